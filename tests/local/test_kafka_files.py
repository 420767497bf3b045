"""The directories of captured Kafka nodes: partitions, segments, checkpoints, indexes and snapshots."""

from __future__ import annotations

import json
import tarfile
from base64 import b64encode
from pathlib import Path

import pytest
from support import kafka_batches as plain

from tiered.errors import InvalidError
from tiered.format import kafka_batch, kafka_log
from tiered.local import kafka_files
from tiered.local.interface import LeftOut
from tiered.model import MessageQueue


@pytest.fixture(scope="module", params=plain.NAMES)
def captured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """(name, directory) of each captured node."""
    folder = tmp_path_factory.mktemp("kafka")
    with tarfile.open(plain.FOLDER / f"{request.param}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return request.param, folder / request.param


def test_a_directory_says_what_the_node_said(captured: tuple[str, Path]):
    name, path = captured
    assert kafka_files.is_log_directory(str(path))
    found = kafka_files.read_log_directory(str(path))
    assert {left.name.rpartition("-")[0] for left in found.left_out} <= {
        "__cluster_metadata",
        "__transaction_state",
    }
    assert found.was_stopped_cleanly == ("crash" not in name)
    assert found.cluster
    assert found.node
    offsets = plain.FOLDER / f"{name}.offsets.jsonl"
    for line in map(json.loads, offsets.read_text().splitlines() if offsets.exists() else []):
        queue = MessageQueue(line["topic"], line["partition"])
        assert kafka_files.read_topic_id(found.folders[queue]) == line["topic_id"]
        segments = kafka_files.segments_of(found.folders[queue])
        start = kafka_files.log_start(segments, found.log_starts.get(queue))
        assert start == line["log_start_offset"]
        if found.was_stopped_cleanly:
            assert found.high_watermarks[queue] == line["high_watermark"]


def test_files_beside_the_log_are_as_kafka_read_them(captured: tuple[str, Path]):
    _, path = captured
    for snapshot in path.glob("*/*.snapshot"):
        assert kafka_log.open_transactions(snapshot.read_bytes()).keys() <= set(range(100))
    for folder in kafka_files.read_log_directory(str(path)).folders.values():
        epochs = kafka_files.read_epochs(folder)
        assert epochs.of(10**9) == max(epochs.epochs, default=-1)


def test_names_of_folders():
    dashed = "a.b_c-d-12"
    leaving = f"orders-0.{'0a' * 16}-delete"
    assert kafka_files.queue_of(dashed) == MessageQueue("a.b_c-d", 12)
    assert isinstance(kafka_files.queue_of(leaving), LeftOut)
    assert isinstance(kafka_files.queue_of("__consumer_offsets-3"), LeftOut)
    assert kafka_files.queue_of("remote-log-index-cache") is None


@pytest.mark.parametrize("text", ["1\n0\n", "0\n2\na 0 1\n", "0\n1\na 0\n", "x", "0\n1\na b c\n"])
def test_a_checkpoint_that_is_not_whole_is_refused(text: str, tmp_path: Path):
    with pytest.raises(kafka_log.KafkaFileError):
        kafka_log.parse_offsets(text)
    (tmp_path / "replication-offset-checkpoint").write_text(text)
    with pytest.raises(InvalidError, match="replication-offset-checkpoint"):
        kafka_files.read_log_directory(str(tmp_path))


def test_recovery_ends_where_kafka_s_did(tmp_path: Path):
    """Both ways: nothing of the dump lies behind the end, and no data that was kept is missing from the dump."""
    name, path = "k04-crash-torn", tmp_path / "k04-crash-torn"
    with tarfile.open(plain.FOLDER / f"{name}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    directory = kafka_files.read_log_directory(str(path))
    wanted = {(r["topic"], r["partition"], r["offset"]): r for r in plain.dump(name)}
    kept, cut = dict[tuple[str, int, int], tuple[object, ...]](), 0
    for queue, folder in directory.folders.items():
        segments = kafka_files.segments_of(folder)
        point = directory.recovery_points.get(queue, 0)
        end = kafka_files.recovered_end(segments, point, part_of)
        for segment in segments:
            if segment.base_offset > end.segment:
                continue
            data = Path(segment.path).read_bytes()
            stop = end.position if segment.base_offset == end.segment else len(data)
            cut += len(data) - stop
            block = kafka_batch.walk_batches(data, 0, stop, size_max=1 << 27)
            assert block.end == stop
            sound = (~block.has(kafka_batch.CONTROL)).nonzero()[0].tolist()
            found = kafka_batch.decode_records(block, sound, bytes_max=1 << 26)
            assert not found.faults
            for n, offset in enumerate(found.offsets.tolist()):
                assert offset < end.offset
                headers = [[h.name, text(h.value)] for h in found.headers(n)]
                time, key = int(found.timestamps_ms[n]), text(found.key(n))
                kept[queue.topic, queue.queue_id, offset] = (
                    time,
                    key,
                    text(found.value(n)),
                    headers,
                )
    assert cut
    assert kept == {
        place: (r["timestamp_ms"], r["key_base64"], r["value_base64"], r["headers"])
        for place, r in wanted.items()
    }


def part_of(segment: kafka_files.LogSegment, start: int, size: int) -> bytes:
    return Path(segment.path).read_bytes()[start : start + size]


def text(data: bytes | None) -> str | None:
    return None if data is None else b64encode(data).decode()
