"""An archive and its tier read as one, without Spark: each message once, whatever moves from one to the other meanwhile."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from support.archive_jobs import archive, job_context
from support.archive_merges import merged
from support.compacting import ALWAYS, workplace
from support.keyed import KeyedTier, Mail
from support.merging import delete_unnamed, gather, named_bundles
from support.streams import OTHER, Broker, Place, Spark
from support.tiers import PLACE, QUEUE, batch_of

from backends.memory import MemoryStore
from backends.wrapping import WrappingStore
from tiered.archive.columns import schema
from tiered.archive.selection import Selection, selection_of
from tiered.archive.tables import read_archive
from tiered.errors import DataError, InvalidError
from tiered.model import MessageQueue
from tiered.spark.offset_ranges import (
    FetchedStore,
    is_ahead,
    packed,
    pins_of,
    plan_tier,
    read_range,
)
from tiered.spark.options import in_one_option, plain_names
from tiered.spark.positions import positions_of
from tiered.spark.source import TierBatchReader, TierPartition, TierSource
from tiered.upkeep.compact import Compactor, CompactSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.base import ByteRange
    from tiered.archive.job import JobContext

Row = tuple[str, int, int, bytes]


class Both:
    """A broker's tier, an archive of it, and what there is to read.

    Attributes:
        truth: Bodies by topic, incarnation and offset, of the histories that count.
    """

    def __init__(self, at: Place, rng: random.Random) -> None:
        self.place, self.rng = at, rng
        self.truth: dict[tuple[str, int, int], bytes] = {}
        self.written = 0

    @property
    def tier(self) -> Broker:
        return self.place.tier

    @property
    def job(self) -> JobContext:
        return job_context(self.tier.store, self.place.archive, self.rng.randrange(99))

    def add(self, count: int, queue: MessageQueue = QUEUE, *, roll: bool = True) -> None:
        incarnation = self.tier.journal.state.incarnation(queue)
        number, at = (incarnation.number, int(incarnation.commit_offset)) if incarnation else (0, 0)
        bodies = [b"%d" % (self.written + n) for n in range(count)]
        self.written += count
        self.tier.add(bodies, queue=queue, roll=roll and incarnation is not None)
        self.truth |= {(queue.topic, number, at + n): body for n, body in enumerate(bodies)}

    def truncate(self, end: int) -> None:
        incarnation = self.tier.journal.state.incarnation(QUEUE)
        assert incarnation
        self.tier.truncate(end)
        mine = (QUEUE.topic, incarnation.number)
        self.truth = {m: b for m, b in self.truth.items() if m[:2] != mine or m[2] < end}

    def expire(self) -> None:
        """Of the queue's present incarnation what is archived, as `expire --archived` does it."""
        incarnation = self.tier.journal.state.incarnation(QUEUE)
        state = read_archive(self.place.archive)
        for queue, offset_ranges in state.queues.items():
            if incarnation and (queue.message_queue, queue.incarnation) == (
                QUEUE,
                incarnation.number,
            ):
                ends = {int(s.parts.queue_end) for s in incarnation.segments[:-1] if s.parts}
                done = incarnation.min_offset
                for one in offset_ranges:
                    done = one.end if one.start <= done < one.end and one.end in ends else done
                if done > incarnation.min_offset:
                    self.tier.expire(done)

    def rows(self, **options: str) -> list[Row]:
        """By the source of batches."""
        chosen = {"path": "tier", "cluster": "c", "broker": "b", "archive": "archive", **options}
        reader = TierBatchReader(chosen, schema(), selection_of(chosen))
        return [
            tuple(row.values())
            for partition in reader.partitions()
            for rows in reader.read(partition)
            for row in rows.select(["topic", "incarnation", "queue_offset", "body"]).to_pylist()
        ]

    def wanted(self) -> list[Row]:
        return sorted((*mark, body) for mark, body in self.truth.items())


@pytest.fixture
def both(place: Place, monkeypatch: pytest.MonkeyPatch) -> Both:
    place.in_memory(monkeypatch)
    place.more = {"archive": "archive"}
    return Both(place, random.Random(1))


def test_what_lies_in_both_comes_once(both: Both) -> None:
    for _ in range(3):
        both.add(4)
    archive(both.job)
    both.add(2)
    both.add(1, OTHER)
    assert sorted(both.rows()) == both.wanted()
    both.expire()
    assert sorted(both.rows()) == both.wanted()
    merged(both.job)
    assert sorted(both.rows()) == both.wanted()
    some = both.rows(**{"from-offset": "3", "until-offset": "9", "topic": QUEUE.topic})
    assert [row[2] for row in sorted(some)] == list(range(3, 9))
    with pytest.raises(InvalidError, match="no topic nope"):
        both.rows(topic="nope")


def test_what_was_truncated_of_an_archive_does_not_count(both: Both) -> None:
    """The archive has rows that its log has not given up yet; before the cut they count."""
    both.add(4)
    both.add(4)
    both.add(1)
    archive(both.job)
    both.truncate(6)
    assert sorted(both.rows()) == both.wanted()
    both.add(3)
    assert sorted(both.rows()) == both.wanted()
    state = read_archive(both.place.archive)
    plan = plan_tier({PLACE: both.tier.journal.state}, Selection(), state)
    (queue,) = state.queues
    assert plan.cuts == {queue: 6}
    both.add(1)
    archive(both.job)
    assert sorted(both.rows()) == both.wanted()
    plan = plan_tier(
        {PLACE: both.tier.journal.state}, Selection(), read_archive(both.place.archive)
    )
    assert plan.cuts == {}


def test_what_the_archive_has_counts_on_when_what_was_truncated_is_merged(both: Both) -> None:
    """The archive has dealt with the end, the tier has given up what came in its place."""
    both.add(2)
    both.add(2)
    both.tier.add([None, None])
    both.truncate(2)
    for _ in range(3):
        both.add(2)
    archive(both.job)
    both.expire()
    assert sorted(both.rows()) == both.wanted()
    gather(both.tier)
    assert sorted(both.rows()) == both.wanted()
    assert not is_ahead(read_archive(both.place.archive), {PLACE: both.tier.journal.state})


def test_a_tier_that_was_read_before_its_archive_had_dealt_with_a_cut(both: Both) -> None:
    both.add(4)
    both.add(1)
    old = {PLACE: both.tier.journal.state}
    archive(both.job)
    assert not is_ahead(read_archive(both.place.archive), old)
    both.truncate(2)
    both.add(3)
    both.add(1)
    archive(both.job)
    state = read_archive(both.place.archive)
    assert is_ahead(state, old), "messages of both histories would stand side by side"
    assert not is_ahead(state, {PLACE: both.tier.journal.state})


def test_what_the_archive_alone_knows(both: Both) -> None:
    """A queue's first incarnation, and a whole topic, of which the tier's journal has nothing since it was rebuilt."""
    both.add(3)
    both.add(1, OTHER)
    both.add(1)
    both.add(1, OTHER)
    archive(both.job)
    known = both.wanted()
    both.place.tier = Broker(MemoryStore(), writer="0badbeef")
    both.tier.add([b"of another queue"], queue=MessageQueue("third", 0))
    rows = both.rows()
    archived = [row for row in known if row[2] < (3 if row[0] == QUEUE.topic else 1)]
    assert sorted(rows) == sorted([*archived, ("third", 0, 0, b"of another queue")])


def test_an_archive_of_another_tier_does_not_stand_for_this_one(both: Both) -> None:
    """The tier was wiped and begun anew: at the same offsets are other messages, which the archive's would hide."""
    both.add(2)
    both.add(1)
    archive(both.job)
    both.place.tier = later = KeyedBroker(MemoryStore(), writer="0badbeef")
    for body in (b"new", b"newer", b"open"):
        mails = [Mail(body=body, time_ms=1_800_000_000_000)] * 2
        later.post(QUEUE, mails, roll=body != b"new")
    with pytest.raises(InvalidError, match=r"other messages of c/b .* from offset 0 on"):
        both.rows()
    with (
        both.place.stream() as reader,
        pytest.raises(InvalidError, match=r"other messages of c/b .* from offset 0 on"),
    ):
        reader.initialOffset()


def test_a_frame_reads_what_was_pinned_wherever_it_lies(both: Both) -> None:
    for _ in range(3):
        both.add(4)
    archive(both.job)
    both.add(4)
    both.add(2)
    state = read_archive(both.place.archive)
    plan = plan_tier({PLACE: both.tier.journal.state}, Selection(), state)
    pins = in_one_option(pins_of(plan.offset_ranges))
    wanted = sorted(both.rows(pinned=pins))
    assert [row[2] for row in wanted] == list(range(8, 18)), "the third segment was still open"
    both.add(5)
    archive(both.job)
    both.expire()
    merged(both.job)
    assert sorted(both.rows(pinned=pins)) == wanted
    both.truncate(17)
    both.add(3)
    assert sorted(both.rows(pinned=pins)) == wanted, "the tier keeps what was truncated"
    with pytest.raises(InvalidError, match="pinned"):
        both.rows(pinned="x")


def test_what_was_pinned_and_is_nowhere_any_more_is_said(both: Both) -> None:
    both.add(4)
    both.add(4)
    both.add(1, OTHER)
    both.add(1, OTHER)
    narrow = Selection().among("topic", [OTHER.topic])
    at = both.job
    archive(replace(at, takes=lambda topic: topic == OTHER.topic))
    plan = plan_tier({PLACE: both.tier.journal.state}, Selection())
    pins = in_one_option(pins_of(plan.offset_ranges))
    assert len(both.rows(pinned=pins)) == 10
    assert len(plan_tier({PLACE: both.tier.journal.state}, narrow).offset_ranges) == 2
    both.tier.expire(4)
    with pytest.raises(DataError, match=r"4 messages of c/b .* have expired since it was made"):
        both.rows(pinned=pins)


@pytest.mark.parametrize("seed", range(16))
def test_each_message_once_as_a_batch_whatever_has_moved(
    seed: int, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.in_memory(monkeypatch)
    rng = random.Random(seed)
    both = Both(place, rng)
    both.add(2)
    both.add(2)
    archive(both.job)
    for _ in range(12):
        event(both, rng, truncate=True)
        assert sorted(both.rows()) == both.wanted()


def event(both: Both, rng: random.Random, *, truncate: bool) -> None:
    """Anything that can happen to a tier and its archive."""
    what = rng.random()
    incarnation = both.tier.journal.state.incarnation(QUEUE)
    assert incarnation
    ends = [int(part.queue_end) for part in incarnation.parts()][:-1]
    if what < 0.4:
        both.add(rng.randrange(1, 5), roll=rng.random() < 0.8)
    elif what < 0.45:
        both.add(1, OTHER)
    elif what < 0.6:
        archive(both.job)
    elif what < 0.75:
        both.expire()
    elif what < 0.82:
        merged(both.job)
    elif what < 0.87:
        before = named_bundles(both.tier)
        gather(both.tier)
        delete_unnamed(both.tier, before)
    elif what < 0.92 and truncate and ends and ends[-1] > incarnation.min_offset:
        both.truncate(rng.choice([end for end in ends if end > incarnation.min_offset]))
    elif what > 0.96:
        both.tier.begin_anew()
        both.add(1, roll=False)


@pytest.mark.parametrize("seed", range(16))
def test_a_stream_has_each_message_once_whatever_dies(
    seed: int, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins with the archive, goes on in the tier and follows; what has expired is archived, so no rule lets it go."""
    place.in_memory(monkeypatch)
    place.more = {"archive": "archive"}
    rng = random.Random(seed)
    both = Both(place, rng)
    both.add(3)
    both.add(3)
    archive(both.job)
    both.expire()

    def happens() -> None:
        if rng.random() < 0.5:
            event(both, rng, truncate=False)

    spark = Spark(place, rng, happens, rule="fail")
    for _ in range(10):
        happens()
        spark.run(crash=0.15)
    spark.events = lambda: None
    for _ in range(3):
        spark.run(crash=0)
    told = [row for rows in spark.sink.values() for row in rows]
    assert sorted(told) == sorted(both.truth)
    assert sum(at.lost for at in positions_of(spark.offsets[-1]).values()) == 0


class KeyedBroker(Broker, KeyedTier):
    """A broker whose messages have keys."""


class BothKeyed(Both):
    """The same of a topic of few keys, whose older messages compaction takes out of the tier."""

    compacted = 0

    def add(self, count: int, queue: MessageQueue = QUEUE, *, roll: bool = True) -> None:
        incarnation = self.tier.journal.state.incarnation(queue)
        number, at = (incarnation.number, int(incarnation.commit_offset)) if incarnation else (0, 0)
        bodies = [b"%d" % (self.written + n) for n in range(count)]
        self.written += count
        mails = [Mail((self.rng.choice("abc"),), body=body) for body in bodies]
        assert isinstance(self.tier, KeyedBroker)
        self.tier.post(queue, mails, roll=roll and incarnation is not None)
        self.truth |= {(queue.topic, number, at + n): body for n, body in enumerate(bodies)}

    def compact(self) -> None:
        assert isinstance(self.tier, KeyedBroker)
        settings = CompactSettings(passes=ALWAYS, compression=None)
        compactor = Compactor(workplace(self.tier), settings)
        plan = compactor.plan([QUEUE.topic])
        if plan.steps:
            compactor.apply(plan)
            self.tier.journal.catch_up()
            self.compacted += 1


@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(n, marks=pytest.mark.slow) for n in range(8, 24))]
)
def test_a_stream_beside_compaction_has_each_message_once_that_is_left(
    seed: int, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was compacted away before the stream came by it never tells of, unless it was archived; all else once."""
    place.in_memory(monkeypatch)
    place.tier, place.more = KeyedBroker(MemoryStore()), {"archive": "archive"}
    rng = random.Random(seed)
    both = BothKeyed(place, rng)
    both.add(3)
    both.add(3)
    archive(both.job)

    def happens() -> None:
        what = rng.random()
        if what < 0.2:
            both.compact()
        elif what < 0.6:
            event(both, rng, truncate=False)

    spark = Spark(place, rng, happens, rule="fail")
    spark.is_compacted = True
    for _ in range(10):
        happens()
        spark.run(crash=0.15)
    both.add(2)
    both.add(1)
    both.compact()
    spark.events = lambda: None
    for _ in range(3):
        spark.run(crash=0)
    told = [row for rows in spark.sink.values() for row in rows]
    assert len(set(told)) == len(told), "none is doubled"
    assert set(told) <= set(both.truth)
    left = both.rows()
    assert {row[:3] for row in left} <= set(told), "none is lost that compaction keeps"
    assert all(both.truth[row[:3]] == row[3] for row in left)
    assert both.compacted > 0
    assert len(left) < len(both.truth), "some are gone"
    assert sum(at.lost for at in positions_of(spark.offsets[-1]).values()) == 0


# -- bundles ---------------------------------------------------------------------------------------


class Counted(WrappingStore):
    """Counts what is asked for of bundles."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.asked: list[str] = []

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        self.asked.append(key)
        return self._inner.get(key, byte_range)

    def get_ranges(self, key: str, byte_ranges: Sequence[ByteRange]) -> list[bytes]:
        self.asked.append(key)
        return self._inner.get_ranges(key, byte_ranges)


def rounds(tier: Broker, count: int, queues: int) -> None:
    """So many rounds, each a bundle with a section of every queue."""
    for number in range(count):
        batches = [
            batch_of(
                number * 2,
                [b"%d of %d" % (n, queue) for n in (0, 1)],
                queue=MessageQueue("t", queue),
            )
            for queue in range(queues)
        ]
        tier.add_round(*batches)


def test_what_lies_in_a_bundle_is_fetched_once_by_one_task() -> None:
    tier = Broker()
    rounds(tier, 6, 20)
    plan = plan_tier({PLACE: tier.journal.state}, Selection())
    assert len(plan.offset_ranges) == 20
    size = sum(one.size_bytes for one in plan.offset_ranges)
    groups = packed(plan.offset_ranges, size // 3)
    assert len(groups) == 3
    bundles = [{b.key for one in group for b in one.task.parts.bundles} for group in groups]
    assert len(set.union(*bundles)) == sum(map(len, bundles)) == 6, "no bundle is in two"
    assert all(len(group) == 20 for group in groups), (
        "neighbours of a queue are one offset range again"
    )
    counted = Counted(tier.store)
    rows = [
        (row["queue_id"], row["queue_offset"])
        for group in groups
        for fetched in [FetchedStore(counted, group)]
        for one in group
        for rows in read_range(fetched, one, Selection())
        for row in rows.select(["queue_id", "queue_offset"]).to_pylist()
    ]
    assert sorted(rows) == [(queue, offset) for queue in range(20) for offset in range(12)]
    assert len(counted.asked) == 6, "a request for each bundle, not one for each queue"
    whole, some = (
        len(pickle.dumps(TierPartition(group))) for group in (plan.offset_ranges, groups[0])
    )
    assert some < whole / 2, "a worker gets the rows of its own parts alone"


def test_a_byte_that_was_wrong_on_its_way_is_asked_for_again() -> None:
    tier = Broker()
    rounds(tier, 1, 4)

    class Wrong(Counted):
        def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
            data = super().get(key, byte_range)
            return data if "journal" in key else bytes([data[0] ^ 1]) + data[1:]

    counted = Wrong(tier.store)
    (group,) = packed(plan_tier({PLACE: tier.journal.state}, Selection()).offset_ranges, 1 << 20)
    fetched = FetchedStore(counted, group)
    found = [rows.num_rows for one in group for rows in read_range(fetched, one, Selection())]
    assert found == [2] * 4
    assert len(counted.asked) == 2


# -- names of options ------------------------------------------------------------------------------


def test_names_that_people_know() -> None:
    known = {
        "maxOffsetsPerTrigger": "5",
        "startingOffsets": "latest",
        "failOnDataLoss": "FALSE",
        "Topic": "t",
    }
    assert plain_names(known) == {
        "max-messages": "5", "start": "latest", "on-gap": "skip", "topic": "t",
    }  # fmt: skip
    assert plain_names({"failOnDataLoss": "true", "maxBytesPerTrigger": "9"}) == {
        "on-gap": "fail", "max-bytes": "9",
    }  # fmt: skip
    with pytest.raises(InvalidError, match="given both"):
        plain_names({"maxOffsetsPerTrigger": "5", "max-messages": "5"})
    with pytest.raises(InvalidError, match="failondataloss is 'maybe'"):
        plain_names({"failOnDataLoss": "maybe"})


def test_offsets_as_other_sources_write_them(place: Place) -> None:
    place.tier.add([b"a", b"b"])
    place.tier.add([b"x"], queue=OTHER)
    start = f'{{"{QUEUE.topic}": {{"{QUEUE.queue_id}": -1}}, "{OTHER.topic}": {{"0": -2}}}}'
    with place.stream(start=start) as reader:
        found = {key.topic: at.offset for key, at in positions_of(reader.initialOffset()).items()}
    assert found == {QUEUE.topic: 2, OTHER.topic: 0}


def test_a_topic_that_is_not_there_is_no_stream_that_waits_for_ever(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.tier.add([b"a"])
    topics = [QUEUE.topic, OTHER.topic]
    wanted = Selection().among("topic", topics)
    with (
        place.stream(wanted) as reader,
        pytest.raises(InvalidError, match=f"no topic {OTHER.topic}") as said,
    ):
        reader.initialOffset()
    assert said.value.do
    with place.stream(wanted, **{"on-missing-topic": "wait"}) as reader:
        start = reader.initialOffset()
        assert [key.topic for key in positions_of(start)] == [QUEUE.topic]
        assert f"no topic {OTHER.topic}" in caplog.text
        place.tier.add([b"x"], queue=OTHER)
        end = reader.latestOffset(start, reader.getDefaultReadLimit())
        assert {key.topic for key in positions_of(end)} == set(topics)
    with (
        place.stream(Selection().among("topic", ["slip"])) as reader,
        pytest.raises(InvalidError, match="no topic slip"),
    ):
        reader.latestOffset(start, reader.getDefaultReadLimit())
    with pytest.raises(InvalidError, match="no option pinned"):
        TierSource({"path": place.url, "pinned": "x"}).streamReader("queue_offset long")


def test_an_archive_that_is_not_there_is_said(place: Place, tmp_path: Any) -> None:
    place.tier.add([b"a"])
    beside = f"file://{tmp_path}/nowhere"
    with (
        place.stream(archive=beside) as reader,
        pytest.raises(InvalidError, match="no archive here"),
    ):
        reader.initialOffset()
    with pytest.raises(InvalidError, match="no option archiv"):
        TierSource({"path": place.url, "archiv": beside}).reader("queue_offset long")
