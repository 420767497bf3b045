"""Jobs on tiers of every shape: holes, batches, bad records, midnight, gaps, damage, what brokers truncate, other jobs."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import permutations
from typing import TYPE_CHECKING, Any

import pytest
from support.archive_jobs import (
    MIDNIGHT,
    Damaged,
    all_outcomes,
    archive,
    as_engine,
    bodies,
    check,
    job_context,
    keys,
    rows,
    sealed_tier,
    with_other_messages_behind,
)
from support.archives_made import row_ranges_of
from support.compacting import QUEUE as KEYED
from support.compacting import compact
from support.journals import PREFIX
from support.keyed import KeyedTier, Mail
from support.merging import merge as merge_tier
from support.tiers import QUEUE, TIME_MS, TierBuilder

from backends.errors import UnavailableError
from backends.memory import MemoryStore
from backends.wrapping import WrappingStore
from tiered.archive import job, lookup, merging, parquet
from tiered.archive.audit import Report, apply_repair, plan_repair, read_log, verify_archive
from tiered.archive.job import first_error, log_writer, run_job
from tiered.archive.lookup import build
from tiered.archive.machine import ArchiveState, archive_action
from tiered.archive.merging import Together, merge
from tiered.archive.model import ArchiveQueue, Truncation
from tiered.archive.plan import Limits, Work, overtaken_by
from tiered.archive.tables import read_archive
from tiered.archive.task import do_work
from tiered.errors import DataError, InternalError, InvalidError
from tiered.journal.append import JournalWriter
from tiered.log.merge import MergePolicy
from tiered.log.reader import TierReader
from tiered.log.state import queue_action
from tiered.model import MessageQueue
from tiered.spark import driver as spark
from tiered.upkeep.engine import local_engine, rolling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Buffer

    from backends.base import ByteRange, ObjectInfo
    from tiered.log.parts import TierState

OTHER = MessageQueue("other", 0)


def test_each_offset_becomes_a_row_or_is_put_aside() -> None:
    tier = sealed_tier([b"a", None, b"b"], [None, b"c", (2, b"this is no batch"), b"d"])
    at = job_context(tier.store)
    result = archive(at)
    assert (result.segments, result.rows, result.holes, result.bad) == (2, 4, 2, 2)
    assert bodies(at) == {0: b"a", 2: b"b", 4: b"c", 7: b"d"}
    aside = rows(at, "_bad/")
    assert [row["queue_offset"] for row in aside] == [1, 3, 5, 6]
    assert [row["record"] is None for row in aside] == [True, True, False, False]
    assert aside[0]["reason"] == "hole: damaged"
    assert check(at).compared == 2
    (opened,) = result.plan.opened
    assert (opened.start, opened.end) == (8, 9)


def test_a_segment_of_holes_alone_is_archived() -> None:
    tier = TierBuilder()
    tier.add([None, None])
    tier.say(queue_action("seal", QUEUE, 0, segment=0))
    at = job_context(tier.store)
    result = archive(at)
    assert (result.failed, result.segments, keys(at)) == ([], 1, [])
    assert archive(at).plan.tasks == ()
    check(at)


def test_a_segment_is_divided_at_midnight() -> None:
    tier = sealed_tier([b"%d" % n for n in range(6)], first=MIDNIGHT - 2)
    at = job_context(tier.store)
    archive(at)
    days = [(key.split("/")[2], key.split("/")[3][:43]) for key in keys(at)]
    low, middle, high = MIDNIGHT - 2, MIDNIGHT, MIDNIGHT + 4
    assert days == [
        ("date=2023-11-14", f"3-{low:020}-{middle:020}"),
        ("date=2023-11-15", f"3-{middle:020}-{high:020}"),
    ]
    assert [row["store_ts"].date().isoformat() for row in rows(at)].count("2023-11-15") == 4
    check(at)


def test_a_gap_lies_between_offset_ranges() -> None:
    tier = TierBuilder()
    tier.add([b"a"])
    tier.gap(10)
    tier.add([b"b"], roll=True)
    tier.add([b"c"], roll=True)
    at = job_context(tier.store)
    archive(at)
    assert bodies(at) == {0: b"a", 11: b"b"}
    check(at)


def test_damage_of_one_segment_leaves_the_others() -> None:
    tier = sealed_tier([b"a" * 100], [b"b" * 100])
    part = tier.journal.state.queues[QUEUE][0].segments[0].parts[0]
    at = job_context(Damaged(tier.store, part.log.key))
    result = archive(at)
    assert (result.segments, bodies(at)) == (1, {1: b"b" * 100})
    assert isinstance(first_error(result), DataError)
    assert archive(replace(at, tier=tier.store)).segments == 1
    check(replace(at, tier=tier.store))


def test_a_file_that_does_not_reconcile_is_not_published(monkeypatch: pytest.MonkeyPatch) -> None:
    at = job_context(sealed_tier([b"a", b"b"]).store)
    whole = parquet.open_whole

    def shorter(data: object) -> object:
        file = whole(data)
        read = file.iter_batches
        file.iter_batches = lambda *how, **more: (some.slice(1) for some in read(*how, **more))
        return file

    monkeypatch.setattr(parquet, "open_whole", shorter)
    result = archive(at)
    assert isinstance(first_error(result), InternalError)
    assert (result.segments, keys(at)) == (0, [])


def test_what_the_broker_truncates_is_forgotten_and_its_successor_archived() -> None:
    tier = TierBuilder()
    tier.add([b"a"])
    tier.add([b"b", b"old c", b"old d"], roll=True)
    tier.add([b"old e"], roll=True)
    at = job_context(tier.store)
    archive(at)
    with_other_messages_behind(tier, b"new c", b"new d", b"open")
    result = archive(at)
    assert [one.starts for one in result.plan.overtaken] == [(1,)]
    check(at)
    state = log_writer(at).state
    ((queue, offset_ranges),) = state.queues.items()
    assert [(one.start, one.end) for one in offset_ranges] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    named = [file.key for one in offset_ranges for file in one.files]
    found = {row["queue_offset"]: row["body"] for key in named for row in rows(at, key)}
    assert found == {0: b"a", 1: b"b", 2: b"new c", 3: b"new d"}
    assert archive(at).entries == 0
    assert len(state.tails[queue]) == 1


def test_what_was_truncated_and_expired_before_the_archive_met_it_is_forgotten_too() -> None:
    tier = TierBuilder()
    tier.add([b"a"])
    tier.add([b"b", b"old c", b"old d"], roll=True)
    tier.add([b"old e"], roll=True)
    at = job_context(tier.store)
    archive(at)
    again = with_other_messages_behind(tier, b"new c", b"new d", b"open")
    again.say(queue_action("expire", QUEUE, 0, position=0, min_from=2, min_to=5))
    archive(at)
    check(at)
    ((_, offset_ranges),) = log_writer(at).state.queues.items()
    named = [file.key for one in offset_ranges for file in one.files]
    found = {row["queue_offset"]: row["body"] for key in named for row in rows(at, key)}
    assert found == {0: b"a", 1: b"b", 2: b"new c", 3: b"new d"}
    assert archive(at).entries == 0


def numbered(first: int, *after_ms: int | None) -> list[Mail | None]:
    """A message for each time, counted from ``TIME_MS``; None: a hole."""
    return [
        None if ms is None else Mail((f"k{n % 2}",), body=b"%d" % (first + n), time_ms=TIME_MS + ms)
        for n, ms in enumerate(after_ms)
    ]


@pytest.mark.parametrize("last", [(500, 501), (None, None)], ids=["clock set back", "holes"])
def test_what_was_truncated_is_known_again_when_its_parts_are_merged(
    last: tuple[int | None, ...],
) -> None:
    """Its last part is not the newest, and what came in its place has been given up by the tier."""
    queue, tier = MessageQueue("t", 0), KeyedTier()
    tier.post(queue, numbered(0, 0, 1))
    tier.post(queue, numbered(2, 1000, 1001), roll=True)
    tier.post(queue, numbered(4, *last))
    at = job_context(tier.store)
    tier.truncate(2, queue=queue)
    for first, times in ((6, (2000, 2001)), (8, (2002,)), (9, (2003,))):
        tier.post(queue, numbered(first, *times), roll=True)
    archive(at)
    tier.say(queue_action("expire", queue, 0, position=1, min_from=0, min_to=4))
    before = read_log(at)
    assert merge_tier(tier, MergePolicy(fan_in=2))
    assert len(tier.journal.state.queues[queue][0].parts()) == 1
    result = archive(at)
    assert (result.plan.overtaken, result.segments) == ((), 0)
    assert read_log(at).queues == before.queues
    assert bodies(at) == {0: b"0", 1: b"1", 2: b"6", 3: b"7", 4: b"8"}


def ends_of(state: TierState) -> list[Truncation]:
    """Of all that was truncated of the one queue."""
    incarnations, queue = state.queues[KEYED], ArchiveQueue("c", "b", "t", 0, 0)
    found = [overtaken_by(ArchiveState(), queue, incarnation) for incarnation in incarnations[:-1]]
    return [one.mark for some in found for one in some]


def test_ends_truncated_are_told_apart_whatever_becomes_of_them() -> None:
    """Three of the same offsets, two of these with the same messages, and one that reaches further."""
    tier = KeyedTier()
    tier.post(KEYED, numbered(0, 0, 1, 2, 3))
    for times in ((5, 6), (5, 6), (9, None)):
        tier.post(KEYED, numbered(4, *times), roll=True)
        tier.post(KEYED, numbered(6, 1))
        tier.truncate(4, queue=KEYED)
    tier.post(KEYED, numbered(4, 10, 11, 12, 13), roll=True)
    tier.truncate(2, queue=KEYED)
    tier.post(KEYED, numbered(2, *range(20, 28)), roll=True)
    tier.post(KEYED, numbered(10, 30), roll=True)
    wanted = ends_of(tier.journal.state)
    assert len(set(wanted)) == 4
    assert [(one.low, one.high) for one in wanted] == [(4, 7)] * 3 + [(2, 8)]
    assert not any(one.knows(other) for one, other in permutations(wanted, 2))
    tails = [incarnation.parts() for incarnation in tier.journal.state.queues[KEYED][:-1]]
    assert merge_tier(tier, MergePolicy(fan_in=2))
    after = [incarnation.parts() for incarnation in tier.journal.state.queues[KEYED][:-1]]
    assert all(one != other for one, other in zip(tails, after, strict=True))
    assert ends_of(tier.journal.state) == wanted
    assert compact(tier)["applied"]
    assert ends_of(tier.journal.state) == wanted
    tier.say(queue_action("expire", KEYED, 0, position=1, min_from=4, min_to=7))
    tier.say(queue_action("expire", KEYED, 0, position=3, min_from=2, min_to=4))
    assert ends_of(tier.journal.state) == wanted
    for is_saved in (False, True):
        if is_saved:
            tier.journal.write_checkpoint(force=True)
        reader = TierReader(tier.store, PREFIX)
        reader.refresh()
        assert ends_of(reader.state) == wanted


def test_an_end_of_which_bundles_alone_tell_is_known_by_its_offsets() -> None:
    """A rebuilt journal does not say which entry it was; nor, where bundles are gone, where it began."""
    known = Truncation(17, 4, 9)
    assert [known.knows(Truncation(0, *span)) for span in ((4, 9), (5, 7), (3, 9), (9, 12))] == [
        *(True, True),
        *(False, False),
    ]
    assert not known.knows(Truncation(18, 4, 9))


def test_another_job_between_work_and_commit() -> None:
    tier = sealed_tier([b"a"], [b"b"])
    tier.add([b"x"], queue=OTHER)
    tier.add([b"y"], queue=OTHER, roll=True)
    at, rival = job_context(tier.store), job_context(tier.store)
    rival = replace(rival, archive=at.archive, bare=at.bare, takes=lambda topic: topic != "other")

    def engine(do: Any, works: Any) -> Any:
        done = all_outcomes(at, do, works)
        assert archive(rival).segments == 2
        return done

    result = run_job(at, as_engine(engine))
    assert (result.segments, result.overtaken) == (1, 2)
    assert check(at).rows == len(rows(at)) == 3


def test_replay_refuses_what_overlaps_or_is_not_whole() -> None:
    at = job_context(sealed_tier([b"a", b"b"]).store)
    (task,) = (result := archive(at)).plan.tasks
    assert result.segments == 1
    log = log_writer(at)
    (done,) = do_work(at.context, Work((task,)))
    other = replace(task.queue, queue_id=7)
    late = (
        archive_action([(task.queue, 0, done)]),
        archive_action([(other, 0, replace(done, end=9))]),
    )
    log.append([*late, archive_action([(other, 1, done)])])
    assert log.state.refused == 3
    assert list(log.state.queues) == [task.queue]


def test_a_deaf_store_and_nested_places_are_refused() -> None:
    tier = sealed_tier([b"a"])
    with pytest.raises(InvalidError, match="conditional"):
        archive(job_context(tier.store, Deaf(MemoryStore("archive"))))
    with pytest.raises(InvalidError, match="within each other"):
        archive(job_context(tier.store, tier.store))


class Deaf(WrappingStore):
    """A store that takes conditions and ignores them."""

    def put_if_absent(self, key: str, data: Sequence[Buffer] | Buffer) -> None:
        self._inner.delete(key)
        self._inner.put_if_absent(key, data)


def test_a_log_that_is_gone_is_not_taken_for_a_new_archive_s() -> None:
    """Archived anew beside the files of before, rows would be there twice for whoever reads the directory."""
    at = job_context(sealed_tier([b"a"], [b"b"]).store)
    archive(at)
    for key in keys(at, "_log/"):
        at.archive.delete(key)
    before = keys(at, "")
    for open_it in (archive, read_log, lambda at: read_archive(at.archive)):
        with pytest.raises(DataError, match="log is gone, and there are files") as refused:
            open_it(at)
        assert "_log/" in refused.value.do
    assert keys(at, "") == before


def test_a_job_that_dies_before_its_first_files_are_archived_is_no_lost_log() -> None:
    at = job_context(sealed_tier([b"a"], [b"b"]).store)

    def dies(_do: object, _works: object) -> Any:
        at.archive.put_if_absent("data/topic_dir=orders/date=1970-01-01/0.parquet", b"half a file")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(at, dies)
    assert read_archive(at.archive).queues == {}
    assert archive(at).rows == 2
    check(at)


def test_somebody_else_s_files_are_no_trace_of_an_archive() -> None:
    at = job_context(sealed_tier([b"a"]).store)
    at.archive.put_if_absent("data/notes.txt", b"mine")
    assert archive(at).rows == 1


@dataclass(frozen=True)
class Numbered:
    """Stands for work."""

    number: int


def test_a_slow_task_holds_up_no_others_and_no_more_is_taken_than_the_window_holds() -> None:
    taken: list[int] = []
    slow = threading.Event()

    def works() -> Iterator[Any]:
        for number in range(100):
            taken.append(number)
            yield Numbered(number)

    def do(some: Sequence[Any]) -> list[Any]:
        if some[0].number == 0:
            assert slow.wait(60)
        return [(one.number,) for one in some]

    with rolling(works(), do, count=3, window=2) as found:
        first = [next(found) for _ in range(60)]
        done = {work.number for work, _ in first}
        assert (len(done), done & {0, 1, 2}) == (60, set()), "the first three are not done"
        assert len(taken) <= 63 + 3 * 2 * 2
        slow.set()
        rest = [*first, *found]
    assert sorted(work.number for work, _ in rest) == list(range(100))
    assert all(made == (work.number,) for work, made in rest)


def workers() -> list[str]:
    """Threads of engines."""
    return [one.name for one in threading.enumerate() if one.name.startswith("tiered-archive")]


@pytest.mark.parametrize(
    "how", ["an error that is no outcome", "the caller wants no more", "the caller fails"]
)
def test_what_is_under_way_is_given_up(how: str) -> None:
    """At once, and by the caller: behind it no thread is left, whoever holds on to the iterator."""
    given_up: list[int] = []
    here = threading.get_ident()
    begun = threading.Semaphore(0)

    def do(some: Sequence[Any]) -> list[Any]:
        begun.release()
        if how.startswith("an error") and some[0].number == 7:
            raise KeyError(7)
        return [() for _ in some]

    works = (Numbered(number) for number in range(10_000))
    rolls = rolling(
        works, do, count=1, window=2, give_up=lambda: given_up.append(threading.get_ident())
    )
    with contextlib.ExitStack() as stack:
        if how != "the caller wants no more":
            stack.enter_context(pytest.raises(KeyError))
        with rolls as found:
            for _ in found:
                if how == "the caller fails":
                    raise KeyError
                if how == "the caller wants no more":
                    break
    assert given_up == [here]
    assert workers() == []
    count = 0
    while begun.acquire(blocking=False):
        count += 1
    assert count < 100, "no more was begun"


def fails(*_args: object, **_more: object) -> None:
    raise UnavailableError("no more of this")


@pytest.mark.parametrize("what", ["archive", "merge", "verify", "repair", "key index"])
def test_who_fails_while_others_work_leaves_no_thread(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The traceback holds on to whatever the failed one had in hand, so nothing may wait for a collection of garbage."""
    tier = sealed_tier(*([b"%d" % number] for number in range(12)))
    at = job_context(tier.store)
    run_job(at, local_engine(at.context, 1), limits=Limits(bytes_max=1))
    if what != "archive":
        archive(at)
    if what == "repair":
        for key in keys(at):
            at.archive.delete(key)
    log, engine = log_writer(at), local_engine(at.context, 2)
    plan = plan_repair(at, log.state, engine, by_bytes=False)
    monkeypatch.setattr(job, "COMMIT_FILES", 1)
    monkeypatch.setattr(merging, "ENTRY_FILES", 1)
    monkeypatch.setattr(lookup, "OBJECT_BYTES", 1)
    monkeypatch.setattr(JournalWriter, "append", fails)
    monkeypatch.setattr(Report, "add", fails)
    again = [Together.of([row_range], 0) for row_range in row_ranges_of(log.state.queues)]
    acts: dict[str, Callable[[], object]] = {
        "archive": lambda: run_job(at, engine),
        "merge": lambda: merge(at, log, again, engine=engine),
        "verify": lambda: verify_archive(at, engine),
        "repair": lambda: apply_repair(at, log, plan, engine),
        "key index": lambda: build(at.archive, log.state, engine, told=fails),
    }
    with pytest.raises(UnavailableError) as caught:
        acts[what]()
    assert (workers(), caught.value.args) == ([], ("no more of this",))


def test_the_same_work_done_twice_at_once_is_the_same() -> None:
    """As by a task that Spark tries again, or a second one beside a slow one."""
    at = job_context(sealed_tier([b"a", None, b"b"], [b"c"]).store)

    def engine(do: Any, works: Any) -> Any:
        for work in works:
            with ThreadPoolExecutor(4) as pool:
                said = set(pool.map(lambda one: spark.said(do, at.context, one), [work] * 8))
            assert len(said) == 1
            yield work, spark.heard(said.pop())

    assert run_job(at, as_engine(engine)).rows == 3
    assert check(at).rows == 3
    assert len(rows(at)) == 3, "one object each"


class Counting(WrappingStore):
    """How often it was asked for something."""

    asked = 0

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        self.asked += 1
        return self._inner.list(prefix, start_after=start_after)

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        self.asked += 1
        return self._inner.get(key, byte_range)


def test_a_long_run_leaves_a_log_that_few_requests_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "COMMIT_FILES", 1)
    at = job_context(sealed_tier(*([b"%d" % number] for number in range(31))).store)
    assert archive(at).entries == 31
    again = Counting(at.archive)
    assert len(read_archive(again).queues) == 1
    assert again.asked <= 20
