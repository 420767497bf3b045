"""``tiered attach`` beside a real node of Kafka under producers: transactions, a cleaner at work, crashes of either.

Afterwards the tier holds what consumers of the node get, in both isolations, and the directory is as the node left it.

``TIERED_E2E_REPEAT=10`` runs it that often.
"""

from __future__ import annotations

import json
import os
from random import Random
from threading import Event
from typing import TYPE_CHECKING, Any

import pytest
from support import command_line, kafka_node, live, oracle
from support.live import Attach
from support.untouched import Watch, entries
from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.kafka_node import Node, Producer, Rows

REPEAT = int(os.environ.get("TIERED_E2E_REPEAT", "1"))
pytestmark = [
    pytest.mark.java,
    oracle.needs_java,
    pytest.mark.timeout(600),
    pytest.mark.parametrize("turn", range(REPEAT)),
]
FOLLOW = ("--freshness", "1s")
ISOLATIONS = ("read_committed", "read_uncommitted")
COMPACTED, KEPT = "compacted", ("transactions", "sent-once")
PARTITIONS = 7
LEFT = "left"
CRASHES = 6
SOME = 100
"""Acknowledged records after which a load is surely under way."""


@pytest.fixture(params=["4.1.1", pytest.param("3.9.1", marks=pytest.mark.slow)])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:
    settings = {"replica_high_watermark_checkpoint_interval_ms": 1000}
    settings["transaction_abort_timed_out_transaction_cleanup_interval_ms"] = 1000
    with kafka_node.Node(tmp_path / "logs", request.param, **settings) as running:
        yield running


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/tier"


def load(node: Node, turn: int) -> list[Producer]:
    """Topics, and producers of some ten seconds, which go on when the node comes back.

    Two leave a transaction open: one that times out, and one whose producer comes back.
    """
    node.create("transactions", 3)
    node.create("sent-once", 2)
    node.create(COMPACTED, 2, cleanup_policy="compact", min_cleanable_dirty_ratio="1.0")
    plan = {"txn_id": "a", "txn": "commit:20,abort:10,commit:5,abort:25", "rounds": 20}
    late = {"txn_id": "late", "txn": "open:15", "producer_config": {"transaction.timeout.ms": 2000}}
    edges = {"headers": 3, "null_keys": 10, "edge": "true", "compression": "zstd"}
    once = {"idempotent": "true", "compression": "lz4"}
    keyed = {"keys": 60, "tombstones": 10, "headers": 1}
    many: list[tuple[str, int, dict[str, object]]] = [
        ("transactions", 3, {"rate": 120, **plan}),
        ("transactions", 3, {"rate": 90, "count": 900, **edges}),
        ("transactions", 3, late),
        ("transactions", 3, {"txn_id": LEFT, "txn": "commit:5,open:12"}),
        ("sent-once", 2, {"rate": 150, "count": 1500, **once}),
        (COMPACTED, 2, {"rate": 250, "count": 2500, **keyed}),
    ]
    return [
        node.producing(topic, partitions=partitions, seed=10 * turn + number, **options)
        for number, (topic, partitions, options) in enumerate(many)
    ]


def wait_acked(producers: list[Producer], more: int) -> None:
    """Until each producer was told of so many more records, or has ended."""
    for producer in producers:
        wanted = len(producer.acked()) + more
        until(lambda p=producer, n=wanted: len(p.acked()) >= n or not p.is_running, "a load")


def wait_level(node: Node, url: str) -> None:
    """Until the tier has all that is committed."""
    ends = {queue: row["high_watermark"] for queue, row in node.offsets().items()}
    until(lambda: live.commits(url) == ends, f"the tier at {ends}")


def end_open(node: Node) -> None:
    """One transaction stays open, and there is more behind it."""
    node.produce("transactions", partitions=3, seed=8, txn_id=LEFT, txn="commit:10,open:20")
    node.produce("transactions", partitions=3, seed=9, count=60)


def tiered(url: str, topic: str, *options: str) -> Rows:
    """What ``cat`` gives of a topic."""
    return command_line.here("cat", url, topic, *options).good().rows


class Reader:
    """``cat --follow`` of a topic, as a process, from now on."""

    def __init__(self, url: str, topic: str, isolation: str, folder: Path) -> None:
        self._out = folder / f"{isolation}.jsonl"
        words = ("cat", url, topic, "--follow", "--isolation", isolation)
        with self._out.open("wb") as out:
            self._process = command_line.spawn(*words, stdout=out)

    def rows(self) -> Rows:
        return [json.loads(line) for line in self._out.read_bytes().split(b"\n")[:-1]]

    def end(self, count: int) -> Rows:
        """What it has printed once that is so much, partition by partition."""
        until(lambda: len(self.rows()) >= count or self._process.poll() is not None, "the reader")
        self._process.terminate()
        assert self._process.communicate(timeout=60)[1] == b""
        return sorted(self.rows(), key=lambda row: row["partition"])

    def close(self) -> None:
        """Kill it if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


def check_lines(found: Rows, expected: Rows) -> None:
    """They are equal; the first that is not is named."""
    for mine, theirs in zip(found, expected, strict=False):
        assert mine == theirs
    assert len(found) == len(expected)


def place_of(row: dict[str, Any]) -> tuple[int, int]:
    return row["partition"], row["offset"]


def by_place(rows: Rows) -> dict[tuple[int, int], dict[str, object]]:
    found = {place_of(row): row for row in rows}
    assert len(found) == len(rows)
    return found


def check_cleaned(tier: Rows, before: Rows, after: Rows) -> None:
    """All that consumers get is in the tier, and what the tier has beside it was there before the cleaner came."""
    held, earlier = by_place(tier), by_place(before)
    for place, row in by_place(after).items():
        assert held[place] == row
    assert len(earlier.keys() - by_place(after).keys()) > 0, "the cleaner has taken nothing"
    ends: dict[int, int] = {partition: offset + 1 for partition, offset in sorted(earlier)}
    for (partition, offset), row in held.items():
        if offset < ends[partition]:
            assert earlier[partition, offset] == row


def places(rows: Rows, topics: tuple[str, ...] = KEPT) -> set[tuple[str, int, int]]:
    return {(r["topic"], r["partition"], r["offset"]) for r in rows if r["topic"] in topics}


def check_equal(url: str, expected: dict[str, Rows], before: Rows) -> None:
    """The tier against what consumers got, before the cleaner came and in the end."""
    for isolation, rows in expected.items():
        level = ("--isolation", isolation)
        for topic in KEPT:
            check_lines(tiered(url, topic, *level), [r for r in rows if r["topic"] == topic])
        after = [row for row in rows if row["topic"] == COMPACTED]
        check_cleaned(tiered(url, COMPACTED, *level), before, after)


def once(node: Node, url: str) -> None:
    """``attach --once`` beside a node that has ended leaves the directory as it is."""
    was = entries(node.directory)
    command_line.program("attach", node.directory, "--to", url, "--once").good()
    assert entries(node.directory) == was


@pytest.mark.slow  # a minute; a captured node stands for it in every run
def test_everything_that_consumers_get_is_in_the_tier(
    node: Node, url: str, tmp_path: Path, request: pytest.FixtureRequest, turn: int
) -> None:
    watch = Watch(node.directory, tmp_path / "acts", request.getfixturevalue("monkeypatch"))
    log, producers = tmp_path / "attach.log", load(node, turn)
    with Attach(node.directory, url, log, FOLLOW) as attach:
        wait_acked(producers, SOME)
        until(lambda: len(live.commits(url)) == PARTITIONS, "all partitions in the tier")
        attach.kill()
    readers = {one: Reader(url, "transactions", one, tmp_path) for one in ISOLATIONS}
    for reader in readers.values():
        request.addfinalizer(reader.close)
    wait_acked(producers, SOME)
    with Attach(node.directory, url, log, FOLLOW) as attach:
        before = node.consume(COMPACTED)
        node.clean(COMPACTED)  # and on it goes
        node.kill()
        node.start()
        acked = [row for producer in producers for row in producer.ended()]
        end_open(node)
        wait_level(node, url)
        expected = {isolation: node.consume(isolation=isolation) for isolation in ISOLATIONS}
        said = attach.stop()
    assert said["is_drained"]
    assert [said[name] for name in ("quarantined", "gaps", "truncated", "begun_anew")] == [0] * 4
    assert "WARNING" not in log.read_text()
    committed, uncommitted = (places(expected[isolation]) for isolation in ISOLATIONS)
    assert committed < uncommitted
    assert places(acked) <= uncommitted
    check_equal(url, expected, before)
    for isolation, reader in readers.items():
        rows = [row for row in expected[isolation] if row["topic"] == "transactions"]
        check_lines(reader.end(len(rows)), rows)
    node.kill()
    once(node, url)
    node.start()
    node.stop()
    once(node, url)
    check_equal(url, expected, before)
    command_line.here("verify", url, "--deep", "--store", node.directory).good()
    assert watch.acts() == (6, [])


@pytest.mark.slow
def test_crashes_at_any_moment(node: Node, url: str, tmp_path: Path, turn: int) -> None:
    """Either is killed at random, at times both, and each goes on where it was."""
    random, pause = Random(turn), Event()
    log, producers = tmp_path / "attach.log", load(node, turn)
    attach = Attach(node.directory, url, log, FOLLOW).start()
    try:
        for crash in range(CRASHES):
            pause.wait(random.uniform(0.2, 3))
            who = random.choice(["attach", "node", "both"])
            if who != "node":
                attach.kill()
            if who != "attach":
                node.kill()
                pause.wait(random.choice([0, 0, 2]))
                node.start()
            if who != "node":
                attach.start()
            if crash == CRASHES // 2:
                before = node.consume(COMPACTED)
                node.clean(COMPACTED)
        for producer in producers:
            producer.ended(may_fail=True)  # a transaction may time out while the node is away
        end_open(node)
        wait_level(node, url)
        expected = {isolation: node.consume(isolation=isolation) for isolation in ISOLATIONS}
        said = attach.stop()
    finally:
        attach.__exit__()
    assert [said[name] for name in ("quarantined", "gaps", "truncated", "begun_anew")] == [0] * 4
    check_equal(url, expected, before)
    command_line.here("verify", url, "--deep", "--store", node.directory).good()


def fill(node: Node, topics: tuple[str, ...], **options: object) -> None:
    """As many records into each topic."""
    for producer in [node.producing(topic, **options) for topic in topics]:
        producer.ended()


@pytest.mark.slow
def test_logs_that_begin_later_and_a_topic_made_again(
    node: Node, url: str, tmp_path: Path, turn: int
) -> None:
    """What was taken stays when the node drops it; a topic of another id under the same name is another queue."""
    topics = ("trimmed", "by-size", "again")
    for topic in topics:
        node.create(topic)
    with Attach(node.directory, url, tmp_path / "attach.log", FOLLOW) as attach:
        fill(node, topics, seed=turn, count=600)
        wait_level(node, url)
        was = node.consume()
        node.call("delete-records", topic="trimmed", before="0:333")
        node.call("delete-topics", topic="again")
        node.create("again")
        fill(node, topics, seed=turn + 1, count=400)
        wait_level(node, url)
        node.call("configure", topic="by-size", config={"retention.bytes": 40_000})
        until(lambda: node.offsets()["by-size", 0]["log_start_offset"] > 0, "retention")
        fill(node, topics, seed=turn + 2, count=10)
        wait_level(node, url)
        found = node.consume()
        said = attach.stop()
    assert [said[name] for name in ("quarantined", "gaps", "truncated", "begun_anew")] == [
        0,
        0,
        0,
        1,
    ]
    for topic in topics:
        first, last = ([row for row in rows if row["topic"] == topic] for rows in (was, found))
        if topic == "again":
            named = {"incarnation": 0, "is_truncated": False}
            check_lines(tiered(url, topic, "--incarnation", "0"), [row | named for row in first])
            check_lines(tiered(url, topic), last)
        else:
            rows = tiered(url, topic)
            assert [row["offset"] for row in rows] == list(range(1010))
            check_lines(rows[:600], first)
            assert 0 < last[0]["offset"] == 1010 - len(last)
            check_lines(rows[last[0]["offset"] :], last)


@pytest.mark.slow
def test_times_are_found_as_the_node_does(node: Node, url: str, turn: int) -> None:
    """``--from`` and the node's offsetsForTimes, where times go up and down."""
    node.create("timed", 2)
    base, step = 1_700_000_000_000, 500
    early = {"ts_base": base, "ts_step": step, "ts_jitter": 40 * step}
    node.produce(
        "timed", partitions=2, seed=turn, count=1500, compression="lz4", headers=2, **early
    )
    times = tuple(base + 7 * step * n + n % 3 for n in range(-10, 230, 13))
    said = node.call("offsets", time=times)
    node.kill()
    command_line.here("attach", node.directory, "--to", url, "--once").good()
    rows = tiered(url, "timed")
    for time_ms in times:
        wanted = {row["partition"]: row[f"from_{time_ms}"] for row in said}
        expected = [r for r in rows if r["offset"] >= wanted[r["partition"]] >= 0]
        check_lines(tiered(url, "timed", "--from", str(time_ms)), expected)


@pytest.mark.slow
def test_partitions_move_between_directories_of_a_node(tmp_path: Path, url: str, turn: int) -> None:
    """A node of two ``log.dirs``; each partition goes to the other one while it is written to."""
    first, other = tmp_path / "logs", tmp_path / "other"
    both = f"{first},{other}"
    settings = {"log_dirs": both, "replica_high_watermark_checkpoint_interval_ms": 1000}
    with kafka_node.Node(first, **settings) as node:
        node.create("moved", 4)
        node.produce("moved", partitions=4, seed=turn, txn_id="a", txn="commit:30,abort:50")
        with Attach(both, url, tmp_path / "attach.log", FOLLOW) as attach:
            load = {"count": 1500, "rate": 150, "seed": turn + 1, "idempotent": "true"}
            producer = node.producing("moved", partitions=4, **load)
            wait_acked([producer], SOME)
            to = {n: other if (first / f"moved-{n}").exists() else first for n in range(4)}
            assert set(to.values()) == {first, other}
            for number, folder in to.items():
                node.call("move", topic="moved", partition=number, dir=folder)
            until(lambda: all((folder / f"moved-{n}").exists() for n, folder in to.items()))
            producer.ended()
            node.produce("moved", partitions=4, seed=turn + 2, txn_id="a", txn="abort:50,commit:30")
            wait_level(node, url)
            said = attach.stop()
        assert [said[name] for name in ("quarantined", "gaps", "truncated", "begun_anew")] == [
            0
        ] * 4
        for isolation in ISOLATIONS:
            expected = node.consume(isolation=isolation)
            check_lines(tiered(url, "moved", "--isolation", isolation), expected)
