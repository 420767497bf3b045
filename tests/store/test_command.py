"""``tiered store``: made, written, looked at and recovered from the command line; ``cat | put`` copies a topic."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from support.command_line import CommandLine, Ran
from support.following import unpack
from support.stored import read_all

from tiered.local.layout import read_topics
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from pathlib import Path

SMALL = ("--log-file-size", "1MiB", "--queue-items", "100")
PLACE = {"physical_offset", "store_timestamp_ms", "store_host", "offset_msg_id", "log_offset"}


def same(line: dict[str, Any]) -> dict[str, Any]:
    """What a copy keeps."""
    kept = {name: value for name, value in line.items() if name not in PLACE | {"size"}}
    return {**kept, "properties": {**kept["properties"], "CLUSTER": None}}


def test_cat_and_put_copy_a_topic(tmp_path: Path, tiered: CommandLine):
    root = unpack("s01-basic", tmp_path / "from")
    url, copy = f"file://{tmp_path}/tier", tmp_path / "copy"
    tiered.good("attach", str(root), "--to", url, "--once")
    lines = tiered.good("cat", url, "orders").out
    (tmp_path / "lines").write_bytes(lines)
    tiered.good("store", "create", str(copy), *SMALL)
    done = tiered.good(
        "store", "put", str(copy), str(tmp_path / "lines"), "--keep-offsets", "--json"
    )
    count = len(lines.splitlines())
    assert done.document["messages"] == count > 1000
    info = tiered.good("store", "info", str(copy), "--json").document
    assert (info["messages"], info["is_live"], info["torn_bytes"]) == (count, False, 0)
    tiered.good("attach", str(copy), "--to", f"file://{tmp_path}/other", "--once")
    again = tiered.good("cat", f"file://{tmp_path}/other", "orders").rows
    assert [same(line) for line in again] == [same(json.loads(line)) for line in lines.splitlines()]


def test_a_store_keeps_the_sizes_that_it_was_made_with(tmp_path: Path, tiered: CommandLine):
    """Though no file shows them before the first message; then its files do, whatever the note says."""
    root, note = tmp_path / "s", tmp_path / "s" / "config" / "tieredStore.json"
    tiered.good("store", "create", str(root), "--log-file-size", "64KiB", "--queue-items", "50")
    assert put(tiered, root, *[{"topic": "t", "queue_id": 0, "body": "x"}] * 60).code == 0
    assert {file.stat().st_size for file in (root / "commitlog").iterdir()} == {64 << 10}
    sizes = {file.stat().st_size for file in (root / "consumequeue" / "t" / "0").iterdir()}
    assert sizes == {50 * 20}
    note.write_text("[]")
    ended = put(tiered, root, {"topic": "t", "body": "x"})
    assert (ended.code, str(note) in ended.err) == (5, True)
    note.unlink()
    assert put(tiered, root, {"topic": "t", "queue_id": 0, "body": "x"}).code == 0
    assert {file.stat().st_size for file in (root / "commitlog").iterdir()} == {64 << 10}


def test_a_compacted_topic_is_made(tmp_path: Path, tiered: CommandLine):
    root = tmp_path / "s"
    tiered.good("store", "create", str(root), *SMALL)
    done = tiered.good(
        "store", "topic", str(root), "prices", "--queues", "2", "--compacted", "--json"
    )
    assert done.document["compacted"]
    tiered.good("store", "topic", str(root), "orders", "--queues", "3")
    topics = read_topics(str(root))
    assert topics.compacted == {"prices"}
    assert topics.names
    assert {"prices", "orders"} <= topics.names
    (tmp_path / "one").write_text('{"topic": "prices", "body": "no key"}')
    assert tiered("store", "put", str(root), str(tmp_path / "one")).code == 2


def test_put_reads_stdin(tmp_path: Path):
    def run(*words: str, data: bytes = b"") -> Ran:
        done = subprocess.run(
            [sys.executable, "-m", "tiered", "store", *words],
            input=data,
            capture_output=True,
            check=False,
        )
        return Ran((), done.returncode, done.stdout, done.stderr.decode())

    root = str(tmp_path / "s")
    assert run("create", root, *SMALL).code == 0
    message = {"topic": "t", "queue_id": 1, "body_base64": "aGk=", "properties": {"TAGS": "a"}}
    data = json.dumps(message).encode() + b"\n\n" + json.dumps(message).encode()
    assert run("put", root, "--sync", data=data).code == 0
    records = read_all(tmp_path / "s")[MessageQueue("t", 1)]
    assert [record.body for record in records.values()] == [b"hi"] * 2
    for bad in (b"{", b"[]", b'{"topic": "t"}', json.dumps({**message, "queue_id": -1}).encode()):
        ended = run("put", root, data=bad)
        assert (ended.code, ended.out) == (2, b"")
        assert "tiered: error: " in ended.err
    assert len(read_all(tmp_path / "s")[MessageQueue("t", 1)]) == 2


def put(tiered: CommandLine, root: Path, *lines: object) -> Ran:
    file = root.parent / "lines"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tiered("store", "put", str(root), str(file), "--json")


def test_a_topic_and_a_body_are_enough(tmp_path: Path, tiered: CommandLine):
    root = tmp_path / "s"
    tiered.good("store", "create", str(root), *SMALL)
    done = put(
        tiered,
        root,
        {"topic": "t", "body": "grüße"},
        {"topic": "t", "body_base64": "/wA="},
        {"topic": "t", "body": "", "queue_id": 2, "tags": "a", "keys": "k1 k2"},
        {"topic": "t", "body": "x", "tags": "a", "keys": "", "properties": {"TAGS": "b", "c": "d"}},
    )
    assert done.code == 0, done.err
    lines = tiered.good("store", "tail", str(root), "t").rows
    bodies = {(line["queue_id"], line["queue_offset"]): line["body_base64"] for line in lines}
    assert bodies == {(0, 0): "Z3LDvMOfZQ==", (0, 1): "/wA=", (0, 2): "eA==", (2, 0): ""}
    told = {line["queue_offset"]: line["properties"] for line in lines if line["queue_id"] == 0}
    assert set(told[0]) == {"UNIQ_KEY", "CLUSTER"}
    assert (told[2]["TAGS"], told[2]["c"], "KEYS" in told[2]) == ("b", "d", False)
    (other,) = (line["properties"] for line in lines if line["queue_id"] == 2)
    assert (other["TAGS"], other["KEYS"]) == ("a", "k1 k2")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ({"topic": "t"}, "no body"),
        ({"body": "x"}, "no topic"),
        ({"topic": None, "body": "x"}, "no topic"),
        ({"topic": 7, "body": "x"}, "topic is not a string"),
        ({"topic": "t", "body": "x", "body_base64": "eA=="}, "both given"),
        ({"topic": "t", "body": {"a": 1}}, "body is not a string"),
        ({"topic": "t", "body": "\ud800"}, "surrogate"),
        ({"topic": "t", "body": "x", "tags": ["a"]}, "tags is not a string"),
        ({"topic": "t", "body": "x", "properties": "a=b"}, "properties is not an object"),
        ({"topic": "t", "body": "x", "born_host": ["a"]}, "born_host is not a string"),
        ([], "no JSON object"),
    ],
)
def test_what_is_no_message_is_refused_by_its_line(
    line: object, what: str, tmp_path: Path, tiered: CommandLine
):
    root = tmp_path / "s"
    tiered.good("store", "create", str(root), *SMALL)
    refused = put(tiered, root, {"topic": "t", "body_base64": "eA==", "queue_id": 0}, line)
    assert refused.code == 2
    assert what in refused.error
    assert "line 2" in refused.error
    assert '{"topic": …, "body": TEXT}' in refused.error
    assert not read_all(root)


def test_tail_prints_the_last_and_copies_without_a_tier(tmp_path: Path, tiered: CommandLine):
    root, copy = unpack("s01-basic", tmp_path / "from"), tmp_path / "copy"
    kept = read_all(root)
    lines = tiered.good("store", "tail", str(root), "orders", "--count", "3").rows
    wanted = {
        (queue.queue_id, offset)
        for queue, records in kept.items()
        if queue.topic == "orders"
        for offset in sorted(records)[-3:]
    }
    assert {(line["queue_id"], line["queue_offset"]) for line in lines} == wanted
    out = tiered.good("store", "tail", str(root), "orders", "--count", "100000").out
    (tmp_path / "lines").write_bytes(out)
    tiered.good("store", "create", str(copy), *SMALL)
    tiered.good("store", "put", str(copy), str(tmp_path / "lines"))
    again = read_all(copy)
    for queue, records in kept.items():
        if queue.topic == "orders":
            bodies = [record.body for record in again[queue].values()]
            assert bodies == [record.body for record in records.values()]


def test_recover(tmp_path: Path, tiered: CommandLine):
    root = unpack("s05-crash", tmp_path)
    found = tiered.good("store", "recover", str(root), "--json").document
    assert not found["was_clean"]
    assert found["records_read"] > 100
    assert not (root / "abort").exists()
    again = tiered.good("store", "recover", str(root), "--json").document
    assert again["was_clean"]
    assert again["log_end"] == found["log_end"]
