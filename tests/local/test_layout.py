"""What is refused, and by which name."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from support import following
from support.broker_files import FakeBroker
from support.unprivileged import reachable_folder, run_unprivileged

from tiered.errors import ClosedError, DataError, InvalidError
from tiered.local.catalog import reason_left_out
from tiered.local.layout import is_topic_name, read_topics
from tiered.local.mapped_file_queue import FileCache, default_open_max
from tiered.model import MessageQueue, QueueOffset


@pytest.fixture
def store(tmp_path: Path) -> Path:
    broker = FakeBroker(tmp_path / "store")
    broker.put(200)
    return broker.store


def refusal(directory: Path, error: type[Exception] = InvalidError) -> str:
    with pytest.raises(error) as caught:
        following.open_store(directory)
    assert str(directory) in str(caught.value)
    return str(caught.value)


def test_no_directory(tmp_path: Path):
    assert "no such directory" in refusal(tmp_path / "none")


def test_a_file(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    assert "not a directory" in refusal(tmp_path / "file")


def test_an_empty_directory(tmp_path: Path):
    assert "empty directory" in refusal(tmp_path)


def test_another_directory(tmp_path: Path):
    (tmp_path / "meta.properties").write_text("x")
    assert "not a RocketMQ store" in refusal(tmp_path)


def test_a_store_without_messages_is_fine(tmp_path: Path):
    broker = FakeBroker(tmp_path / "store")
    opened = following.open_store(broker.store)
    assert opened.queues() == {}
    assert opened.identity.store_id == ""
    assert following.follow_all(opened).count() == 0
    opened.close()


def test_rocksdb_consume_queues(store: Path):
    (store / "consumequeue" / "CURRENT").write_text("MANIFEST-000004\n")
    assert "RocksDB" in refusal(store)


def test_dledger_directory(store: Path):
    (store / "dledger-n0").mkdir()
    assert "DLedger" in refusal(store)


def test_dledger_records(store: Path):
    file = store / "commitlog" / f"{0:020d}"
    data = file.read_bytes()
    file.write_bytes((struct.pack(">ii", 1, 300) + bytes(40) + data)[: len(data)])
    assert "DLedger" in refusal(store)


def test_a_log_somewhere_else(store: Path):
    shutil.rmtree(store / "commitlog")
    assert "storePathCommitLog" in refusal(store)


def test_a_log_with_a_file_missing(store: Path):
    files = sorted((store / "commitlog").iterdir())
    files[2].unlink()
    said = refusal(store, DataError)
    assert files[2].name in said
    assert "several paths" in said


def test_no_permission():
    with reachable_folder() as folder:
        broker = FakeBroker(folder / "store")
        broker.put(200)
        log = broker.store / "commitlog"
        following.open_store(broker.store).close()
        log.chmod(0)
        try:
            run_unprivileged(lambda: assert_names(log, refusal(broker.store)))
        finally:
            log.chmod(0o755)


def assert_names(path: Path, said: str) -> None:
    assert str(path) in said


def test_no_permission_is_named(store: Path, monkeypatch: pytest.MonkeyPatch):
    real = os.open

    def refuse(path: str, flags: int, *more: int, **others: int) -> int:
        if "commitlog" in str(path):
            raise PermissionError(13, "Permission denied", path)
        return real(path, flags, *more, **others)

    monkeypatch.setattr(os, "open", refuse)
    assert "commitlog" in refusal(store)


def test_a_config_that_is_being_written(tmp_path: Path):
    """Cut off: its ``.bak`` takes its place, and a note says so."""
    directory = following.unpack("s01-basic", tmp_path)
    table = directory / "config" / "topics.json"
    shutil.copy(table, f"{table}.bak")
    table.write_bytes(table.read_bytes()[:500])
    opened = following.open_store(directory)
    assert following.bounds_of(opened) == following.expected("s01-basic").bounds
    assert any("topics.json.bak" in note for note in opened.report().notes)
    assert opened.identity.broker == "broker-a"
    opened.close()


def test_no_config_at_all(tmp_path: Path):
    directory = following.unpack("s11-lmq-batchcq", tmp_path)
    shutil.rmtree(directory / "config")
    opened = following.open_store(directory)
    assert following.follow_all(opened).messages == following.expected("s11-lmq-batchcq").messages
    opened.close()


def test_static_topics_are_left_out_by_name(tmp_path: Path):
    directory = following.unpack("s01-basic", tmp_path)
    (directory / "config" / "topicQueueMapping.json").write_text(
        '{"topicQueueMappingInfoMap":{"orders":{"topic":"orders","hostedQueues":{0:[]}}}}'
    )
    opened = following.open_store(directory)
    assert "orders" not in {queue.topic for queue in opened.queues()}
    left = {left.name: left.reason for left in opened.report().left_out}
    assert "static topic" in left["orders"]
    opened.close()


def test_ext_addresses_become_tag_codes(tmp_path: Path):
    """With ``enableConsumeQueueExt`` the tag code of an entry is an address; the record's tag is hashed instead."""
    directory = following.unpack("s01-basic", tmp_path)
    (directory / "consumequeue_ext").mkdir()
    for file in (directory / "consumequeue" / "orders" / "2").iterdir():
        data = bytearray(file.read_bytes())
        for at in range(0, len(data), 20):
            if any(data[at : at + 12]):
                data[at + 12 : at + 20] = struct.pack(">q", -(2**63) + at)
        file.write_bytes(data)
    opened = following.open_store(directory)
    found = following.expected("s01-basic").messages
    assert following.follow_all(opened).messages == found
    assert following.read_all(opened).messages == found
    opened.close()


def test_closed_is_closed(store: Path):
    opened = following.open_store(store)
    follower = opened.follow({})
    batch = follower.poll(1000)[0]
    opened.close()
    for act in (
        lambda: follower.poll(1),
        opened.refresh,
        lambda: opened.read(MessageQueue("t", 0), QueueOffset(0), bytes_max=1, count_max=1),
    ):
        with pytest.raises(ClosedError):
            act()
    assert bytes(batch.data)  # what was handed out stays valid
    other = following.open_store(store)
    follower = other.follow({})
    follower.close()
    with pytest.raises(ClosedError):
        follower.poll(1)
    other.close()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_few_descriptors_are_held(tmp_path: Path):
    directory = following.unpack("s01-basic", tmp_path)
    before = descriptors()
    opened = following.open_store(directory, files_open_max=5)
    assert following.follow_all(opened, 20_000).messages == following.expected("s01-basic").messages
    assert descriptors() <= before + 5
    opened.close()
    assert descriptors() == before


def test_nothing_is_written(tmp_path: Path):
    """The whole tree is the same afterwards, times included, and could be read-only."""
    directory = following.unpack("s05b-torn", tmp_path)

    def tree() -> dict[str, tuple[int, int, int]]:
        return {
            str(path): (found.st_mtime_ns, found.st_size, found.st_mode)
            for path in directory.rglob("*")
            for found in [path.stat()]
        }

    before = tree()
    opened = following.open_store(directory)
    following.follow_all(opened)
    following.read_all(opened)
    opened.close()
    assert tree() == before


@pytest.mark.parametrize(
    ("topic", "is_tiered"),
    [
        ("orders", True),
        ("%RETRY%group", True),
        ("%DLQ%group", True),
        ("my_REPLY_TOPIC_x", True),
        ("orders_REPLY_TOPIC", True),
        ("%LMQ%a", False),
        ("rmq_sys_wheel_timer", False),
        ("RMQ_SYS_TRACE_TOPIC", False),
        ("RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC", False),
        ("SCHEDULE_TOPIC_XXXX", False),
        ("TBW102", False),
        ("c1", False),
        ("b1", False),
        ("c1_REPLY_TOPIC", False),
        ("CHECKPOINT_TOPIC", False),
        ("OFFSET_MOVED_EVENT", False),
        ("TRANS_CHECK_MAX_TIME_TOPIC", True),
    ],
)
def test_which_topics_are_tiered(topic: str, is_tiered: bool):
    assert (reason_left_out(topic, cluster="c1", broker="b1") is None) == is_tiered


def test_topics_of_replies_are_left_out_where_the_cluster_is_not_known():
    assert reason_left_out("c1_REPLY_TOPIC", cluster=None, broker=None) is not None


def test_controller_identity(store: Path):
    (store / "brokerIdentity").write_text("clusterX#brokerY#3")
    opened = following.open_store(store)
    assert (opened.identity.cluster, opened.identity.broker) == ("clusterX", "brokerY")
    assert opened.identity.store_id == "identity:clusterX#brokerY#3"
    opened.close()


def of_4_9(*more: str, cluster: str = "prod", broker: str = "broker-1", perm: int = 7) -> bytes:
    """The table of a broker of 4.9, which has no topic that names it but the one that is called like it."""
    made = {
        "SELF_TEST_TOPIC": (1, 6), "TBW102": (1, 7), "BenchmarkTest": (1024, 6), "orders": (1, 6),
        "OFFSET_MOVED_EVENT": (1, 6), "SCHEDULE_TOPIC_XXXX": (18, 6), "RMQ_SYS_TRACE_TOPIC": (1, 6),
        cluster: (16, perm), f"{cluster}_REPLY_TOPIC": (1, 6), broker: (1, perm), "mine_REPLY_TOPIC": (1, 6),
        "mine": (1, 6), **dict.fromkeys(more, (1, 7)),
    }  # fmt: skip
    table = {
        name: {"topicName": name, "readQueueNums": queues, "writeQueueNums": queues, "perm": perm}
        for name, (queues, perm) in made.items()
    }
    return json.dumps({"topicConfigTable": table}).encode()


@pytest.mark.parametrize(
    ("table", "cluster", "broker", "brokers"),
    [
        (of_4_9(), "prod", "broker-1", ()),
        (of_4_9(perm=1), "prod", "broker-1", ()),  # clusterTopicEnable, brokerTopicEnable: false
        (of_4_9(cluster="same", broker="same"), "same", "same", ()),
        (of_4_9("renamed"), "prod", None, ("broker-1", "renamed")),
        (b'{"topicConfigTable": {"orders": {"perm": 6}, "odd": 1}}', None, None, ()),
    ],
)
def test_names_by_the_table_of_a_broker_of_4_9(
    table: bytes, cluster: str | None, broker: str | None, brokers: tuple[str, ...], tmp_path: Path
):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "topics.json").write_bytes(table)
    found = read_topics(str(tmp_path))
    assert (found.cluster, found.broker, found.brokers) == (cluster, broker, brokers)


def test_names_can_be_given(store: Path):
    opened = following.open_store(store, cluster="one", broker="two")
    assert (opened.identity.cluster, opened.identity.broker) == ("one", "two")
    opened.close()


def test_very_many_light_queues_are_not_all_named(tmp_path: Path):
    directory = following.unpack("s11-lmq-batchcq", tmp_path)
    for number in range(150):
        (directory / "consumequeue" / f"%LMQ%x{number:03d}").mkdir()
    opened = following.open_store(directory)
    assert following.follow_all(opened).messages == following.expected("s11-lmq-batchcq").messages
    left = {left.name: left.reason for left in opened.report().left_out}
    assert len(left) == 101
    assert "153" in left["%LMQ%*"]
    opened.close()


@pytest.mark.parametrize("name", ["s01-basic", "s08-crash-continue", "s11-lmq-batchcq", "live"])
def test_the_scans_of_opening_end_soon_when_told_to_stop(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A store of many gigabytes, or a slow disk, is looked at for minutes: no read more is begun."""
    if name == "live":
        broker = FakeBroker(tmp_path / "store")
        broker.start()
        broker.put(200)
        directory = broker.store
    else:
        directory = following.unpack(name, tmp_path)
    reads: list[str] = []
    begin = FileCache._take

    def counted(cache: FileCache, path: str) -> Any:
        found = begin(cache, path)
        reads.append(path)
        return found

    monkeypatch.setattr(FileCache, "_take", counted)
    following.open_store(directory, stop=lambda: False).close()
    total = len(reads)
    assert total > 3
    for wanted in (0, 1, total // 2, total - 1):
        reads.clear()
        with pytest.raises(ClosedError, match="told to stop"):
            following.open_store(directory, stop=lambda most=wanted: len(reads) >= most)
        assert len(reads) == wanted


def test_what_is_open_is_read_whether_or_not_it_was_told_to_stop(tmp_path: Path):
    """What is in hand has to be drained."""
    is_told = False
    directory = following.unpack("s01-basic", tmp_path)
    store = following.open_store(directory, stop=lambda: is_told)
    is_told = True
    assert following.follow_all(store).messages == following.expected("s01-basic").messages
    store.close()


@pytest.mark.parametrize(
    ("may", "open_max"),
    [(20, 16), (1024, 512), (8192, 4096), (20_000, 15_904), (2**20, 32_768), (-1, 32_768)],
)
def test_as_many_files_stay_open_as_leave_enough_to_others(
    may: int, open_max: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("resource.getrlimit", lambda _kind: (may, may))
    assert default_open_max() == open_max


# -- what is not a part of a store --------------------------------------------------------------------------

COPIES = ("orders.bak", "lost+found", ".snapshot", ".DS_Store", "backup", "00", "4294967296")


def _put_strangers(store: Path, topic: str) -> list[Path]:
    """Names that are no part of a store, on each level, some of which only root may look into; those that are named."""
    table = {"topicConfigTable": {topic: {"topicName": topic, "readQueueNums": 8, "perm": 6}}}
    (store / "config" / "topics.json").write_text(json.dumps(table))
    queue = store / "consumequeue" / topic / "0"
    kinds = [store / "consumequeue", store / "consumequeue" / topic, queue, store / "commitlog"]
    found: list[Path] = []
    for folder in (store, store / "config", *kinds):
        for name in COPIES:
            (folder / name).mkdir()
            if folder != store / "consumequeue" or not is_topic_name(
                name
            ):  # else a topic of theirs
                (folder / name / "0").mkdir()
                shutil.copy(queue / f"{0:020d}", folder / name / "0" / f"{0:020d}")
                found += [folder / name] if folder in kinds else []
        (folder / "empty-file").touch()
        (folder / f"{0:020d}.bak").write_text("x")
        (folder / "lost+found").chmod(0)
    (store / "consumequeue" / "unreadable").mkdir(mode=0)
    return [*found, store / "consumequeue" / "unreadable"]


def _assert_passed_over(store: Path, before: following.Taken, strangers: list[Path]) -> None:
    opened = following.open_store(store)
    try:
        assert following.follow_all(opened).messages == before.messages
        notes = "\n".join(opened.report().notes)
        missing = [path for path in strangers if f"{path}: no part of a store" not in notes]
        assert not missing or "not all are named" in notes
        assert str(store / "consumequeue" / "lost+found") in notes
        assert set(opened.queues()) == set(before.messages)
    finally:
        opened.close()


def test_what_is_no_part_of_a_store_is_passed_over_and_named():
    with reachable_folder() as folder:
        broker = FakeBroker(folder / "store")
        broker.put(200)
        opened = following.open_store(broker.store)
        before = following.follow_all(opened)
        opened.close()
        topic = next(iter(before.messages)).topic
        for queue in before.messages:
            assert queue.topic == topic
        strangers = _put_strangers(broker.store, topic)
        run_unprivileged(lambda: _assert_passed_over(broker.store, before, strangers))


def test_a_queue_that_cannot_be_read_is_no_stranger():
    with reachable_folder() as folder:
        broker = FakeBroker(folder / "store")
        broker.put(200)
        topic = next((broker.store / "consumequeue").iterdir())
        for told in (topic, next(topic.iterdir())):
            told.chmod(0)
            try:
                run_unprivileged(lambda path=told: assert_names(path, refusal(broker.store)))  # type: ignore[misc]
            finally:
                told.chmod(0o755)


def test_a_topic_of_an_unusual_name_is_one_where_the_table_has_it(tmp_path: Path):
    broker = FakeBroker(tmp_path / "store")
    queue = MessageQueue("orders.v2", 0)
    broker.append(0, topic="orders.v2")
    broker.dispatch()
    opened = following.open_store(broker.store)
    assert [queue] == list(following.follow_all(opened).messages)
    opened.close()
    table = {"topicConfigTable": {"orders.v2": {"topicName": "orders.v2"}}}
    (broker.store / "config" / "topics.json").write_text(json.dumps(table))
    opened = following.open_store(broker.store)
    assert opened.queues()[queue].end == 1
    assert not any("no part" in note for note in opened.report().notes)
    opened.close()
