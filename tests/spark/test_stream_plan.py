"""A tier as a stream, without Spark: what a batch reads, and reads again after a crash, whatever the tier goes through."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
from support.archive_states import state
from support.archive_states import tier as tier_of
from support.archives_made import loaded
from support.streams import OTHER, Broker
from support.tiers import PLACE, QUEUE, BuiltPlace

from tiered.archive.archived import _Group
from tiered.archive.selection import Selection
from tiered.errors import DataError, InvalidError
from tiered.log.parts import Segments, TierState
from tiered.spark.offset_ranges import SKIP, Key, plan_tier, read_range
from tiered.spark.positions import (
    AGAIN,
    EARLIEST,
    LATEST,
    Position,
    Rules,
    advance,
    batch_of,
    document_of,
    histories_of,
    positions_of,
    shares,
    start_of,
)

ALL = Selection()
Row = tuple[str, int, int, bytes]
"""Topic, incarnation, offset, body."""


@dataclass
class Query:
    """What Spark does with a source: writes the end of a batch down, then reads it; after a crash it reads it again."""

    tier: Broker
    rules: Rules = field(default_factory=Rules)
    start: Any = EARLIEST
    log: list[Any] = field(default_factory=list)

    @property
    def states(self) -> dict[Any, TierState]:
        return {PLACE: self.tier.journal.state}

    def batch(self, rows_max: int | None = None, bytes_max: int | None = None) -> list[Row]:
        last = self.log[-1] if self.log else document_of(start_of(self.states, self.start), {})
        before = positions_of(json.loads(json.dumps(last)))
        end = advance(self.states, before, self.rules, rows_max=rows_max, bytes_max=bytes_max)
        if end is before:
            return []
        self.log.append(document_of(end, {}))
        return self.again()

    def again(self) -> list[Row]:
        end = positions_of(json.loads(json.dumps(self.log[-1])))
        found: list[Row] = []
        for offset_range in batch_of(self.states, end, ALL, self.rules).offset_ranges:
            for rows in read_range(self.tier.store, offset_range, ALL):
                table = rows.select(["topic", "incarnation", "queue_offset", "body"])
                found += [tuple(row.values()) for row in table.to_pylist()]
        return found

    def bodies(self, **limits: int) -> list[bytes]:
        return [row[3] for row in self.batch(**limits)]

    @property
    def lost(self) -> int:
        return sum(at.lost for at in positions_of(self.log[-1]).values())


def test_each_message_once_with_limits() -> None:
    tier = Broker()
    tier.add([b"a", b"b", b"c"])
    tier.add([b"d", None, b"e"], roll=True)
    tier.add([b"x"], queue=OTHER)
    query = Query(tier)
    seen = [query.bodies(rows_max=2) for _ in range(5)]
    assert [len(some) for some in seen] == [2, 2, 1, 1, 0], "the hole counts as an offset"
    assert sorted(body for some in seen for body in some) == [b"a", b"b", b"c", b"d", b"e", b"x"]
    tier.add([b"f"])
    assert query.bodies() == [b"f"]
    assert query.bodies() == []
    assert query.again() == [(QUEUE.topic, 0, 6, b"f")]


def test_limits_in_bytes_always_let_something_through() -> None:
    tier = Broker()
    tier.add([b"%d" % n * 100 for n in range(10)])
    tier.add([b"y" * 100] * 10, queue=OTHER)
    query = Query(tier)
    seen = [query.bodies(bytes_max=1) for _ in range(3)]
    assert [len(some) for some in seen] == [1, 1, 1]
    assert len(query.bodies(bytes_max=1000)) in range(2, 10)
    assert len(query.bodies()) > 5


@pytest.mark.parametrize("limits", [{"rows_max": 250}, {"bytes_max": 2500}])
@pytest.mark.parametrize("kept", ["archive", "tier"])
def test_a_batch_unpacks_what_it_takes_and_not_all_that_lies_ahead(
    limits: dict[str, int], kept: str
) -> None:
    """Of 20,000 offset ranges or parts ahead a batch of two or three of them unpacked every one, each time."""
    known = loaded(state(1, range(20_000)))
    states = {PLACE: TierState() if kept == "archive" else loaded_tier(20_000)}
    archive = known if kept == "archive" else None
    begin = {Key("c", "b", "t", 0): Position.at(0, 0, 0)}
    with (
        mock.patch.object(
            _Group, "offset_ranges", autospec=True, side_effect=_Group.offset_ranges
        ) as rows,
        mock.patch.object(
            Segments, "_segment", autospec=True, side_effect=Segments._segment
        ) as parts,
    ):
        for number in range(1, 4):
            begin = advance(states, begin, Rules(), archive=archive, **limits)
            (at,) = begin.values()
            assert at.offset == 250 * number or (kept == "tier" and at.offset < 1000 * number)
    offset_ranges = sum(
        last - first for _, first, last in (call.args for call in rows.call_args_list)
    )
    assert offset_ranges + parts.call_count < 1000
    assert (offset_ranges > 0) == (kept == "archive")


def loaded_tier(segments: int) -> TierState:
    """As replay has it: segments in columns."""
    found = tier_of(1, segments)
    ((queue, (incarnation,)),) = found.queues.items()
    incarnation = replace(incarnation, segments=Segments.of(incarnation.segments))
    return replace(found, queues={queue: (incarnation,)})


@pytest.mark.parametrize(
    ("weights", "limit", "found"),
    [
        ([5, 5], 20, [5, 5]),
        ([10, 0], 3, [3, 0]),
        ([6, 3], 3, [2, 1]),
        ([1, 1, 1], 2, None),
        ([], 2, []),
    ],
)
def test_shares(weights: list[int], limit: int, found: list[int] | None) -> None:
    made = shares(weights, limit)
    assert sum(made) == min(limit, sum(weights))
    assert found in {None, tuple(made)} if found is None else made == found


def test_where_a_stream_starts() -> None:
    tier = Broker()
    tier.add([b"a", b"b"])
    tier.add([b"x"], queue=OTHER)
    queues = {QUEUE.topic: {str(QUEUE.queue_id): 1}, OTHER.topic: {"0": LATEST}}
    assert Query(tier, start=queues).bodies() == [b"b"]
    late = Query(tier, start=LATEST)
    assert late.batch() == []
    query = Query(tier, start={OTHER.topic: {"0": EARLIEST}})
    assert sorted(query.bodies()) == [b"a", b"b", b"x"], "what is not named begins at its beginning"
    for wrong in (7, {"nope": {"0": 1}}, {OTHER.topic: {"0": 2}}, {OTHER.topic: {"0": "now"}}):
        with pytest.raises(InvalidError):
            Query(tier, start=wrong).batch()
    with pytest.raises(InvalidError, match="several brokers"):
        start_of({PLACE: tier.journal.state, BuiltPlace("c", "d"): tier.journal.state}, queues)


def test_what_has_expired_is_never_passed_over_in_silence() -> None:
    tier = Broker()
    tier.add([b"a", b"b"])
    tier.add([b"c"], roll=True)
    strict, lax = Query(tier), Query(tier, Rules(on_gap=SKIP))
    assert [len(strict.batch(rows_max=1)), len(lax.batch(rows_max=1))] == [1, 1]
    tier.expire(2)
    tier.add([b"d"])
    with pytest.raises(DataError, match=r'offset 1 to 2.*"skip"'):
        strict.batch()
    with pytest.raises(DataError, match="offset 0 to 1"):
        strict.again()
    assert lax.bodies() == [b"c", b"d"]
    assert lax.lost == 1
    assert Query(tier).bodies() == [b"c", b"d"], "a new stream begins at what is there"


def test_a_gap_of_the_tier_is_one_of_the_stream() -> None:
    tier = Broker()
    tier.add([b"a"])
    tier.gap(5)
    tier.add([b"b"])
    strict, lax = Query(tier), Query(tier, Rules(on_gap=SKIP))
    assert strict.bodies(rows_max=1) == [b"a"]
    with pytest.raises(DataError, match="offset 1 to 6"):
        strict.batch()
    assert [lax.bodies(), lax.lost] == [[b"a", b"b"], 5]
    assert lax.again() == [(QUEUE.topic, 0, 0, b"a"), (QUEUE.topic, 0, 6, b"b")]


def test_what_the_broker_truncates() -> None:
    tier = Broker()
    tier.add([b"a", b"b"])
    tier.add([b"old"])
    rules = Rules(), Rules(on_truncation=AGAIN), Rules(on_truncation=SKIP)
    strict, again, skip = (Query(tier, each) for each in rules)
    behind = Query(tier)
    assert behind.bodies(rows_max=2) == [b"a", b"b"]
    for query in (strict, again, skip):
        assert query.bodies() == [b"a", b"b", b"old"]
    tier.truncate(2)
    assert again.again()[-1] == (QUEUE.topic, 0, 2, b"old"), "the same batch, the same rows"
    tier.add([b"new", b"c"])
    with pytest.raises(DataError, match=r"truncated .* from offset 2 on"):
        strict.batch()
    assert again.batch() == [(QUEUE.topic, 0, 2, b"new"), (QUEUE.topic, 0, 3, b"c")]
    assert [skip.bodies(), skip.lost] == [[b"c"], 1]
    assert behind.bodies() == [b"new", b"c"], "it had not read what was truncated"
    for query in (again, skip, behind):
        assert query.batch() == []


def test_a_tier_that_knows_of_fewer_ends_truncated_than_the_stream_is_another() -> None:
    """As after a rebuild without the old journal: of an end that is truncated next nothing would be noticed."""
    tier = Broker()
    tier.add([b"a"])
    tier.add([b"old"])
    tier.truncate(1)
    tier.add([b"b"])
    query = Query(tier)
    assert query.bodies() == [b"a", b"b"]
    query.tier = Broker()
    query.tier.add([b"a", b"another", b"c"])
    with pytest.raises(DataError, match="of another tier, or this one was made anew"):
        query.batch()


def test_a_queue_that_is_made_anew() -> None:
    tier = Broker()
    tier.add([b"a", b"b"])
    query = Query(tier)
    assert query.bodies(rows_max=1) == [b"a"]
    tier.begin_anew()
    tier.add([b"c"])
    assert query.batch() == [(QUEUE.topic, 0, 1, b"b"), (QUEUE.topic, 1, 0, b"c")]
    tier.expire(2, incarnation=0)
    assert Query(tier, Rules(on_gap=SKIP)).bodies() == [b"c"]
    tier.add([b"d"])
    assert query.bodies() == [b"d"]


def test_a_checkpoint_of_something_else_is_refused() -> None:
    for wrong in (
        [],
        {"c": 1},
        {"c": {"b": {"history": "h", "topics": {"t": {"0": {"offset": 1}}}}}},
        {"c": {"b": {"history": "h", "topics": {"t": {"x": {}}}}}},
        {"c": {"b": {"t": {}}}},
    ):
        with pytest.raises(DataError, match="checkpoint"):
            positions_of(wrong)
    for wrong in ([], {"c": 1}, {"c": {"b": {}}}):
        with pytest.raises(DataError, match="checkpoint"):
            histories_of(wrong)


@pytest.mark.parametrize("seed", range(24))
def test_whatever_happens(seed: int) -> None:
    """In the end the stream has told of every offset what it holds now, each once since it was truncated last."""
    rng = random.Random(seed)
    tier, written = Broker(), 0
    query = Query(tier, Rules(on_gap=SKIP, on_truncation=AGAIN))
    told: dict[tuple[str, int, int], bytes] = {}
    truncated = 0

    def read(limit: int | None) -> bool:
        before = len(query.log)
        rows = query.batch(rows_max=limit)
        if rng.random() < 0.3 and len(query.log) > before:
            assert query.again() == rows
        for topic, number, offset, body in rows:
            is_again = (topic, number, offset) in told
            assert not is_again or (truncated and told[topic, number, offset] != body)
            told[topic, number, offset] = body
        return len(query.log) > before

    tier.add([b"first"])
    for _ in range(30):
        incarnation = tier.journal.state.incarnation(QUEUE)
        assert incarnation
        ends = [part.queue_end for part in incarnation.parts()]
        match rng.choice(["add", "add", "add", "gap", "back", "anew", "expire", "read", "read"]):
            case "add":
                count = rng.randrange(1, 5)
                tier.add([b"%d" % (written + n) for n in range(count)], roll=rng.random() < 0.5)
                written += count
            case "gap":
                tier.gap(rng.randrange(1, 4))
            case "back" if len(ends) > 1:
                end = rng.choice(ends[:-1])
                if incarnation.min_offset < end < incarnation.commit_offset:
                    tier.truncate(end)
                    truncated += 1
            case "anew":
                tier.begin_anew()
            case "expire" if len(incarnation.segments) > 1:
                tier.expire(incarnation.segments[1].base_queue_offset)
            case "read":
                read(rng.choice([None, 1, 3]))
    while read(5):
        pass
    offset_ranges = plan_tier(query.states, ALL).offset_ranges
    there = {
        (row["topic"], row["incarnation"], row["queue_offset"]): row["body"]
        for offset_range in offset_ranges
        for rows in read_range(tier.store, offset_range, ALL)
        for row in rows.select(["topic", "incarnation", "queue_offset", "body"]).to_pylist()
    }
    assert {mark: told.get(mark) for mark in there} == there
