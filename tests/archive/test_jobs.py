"""Jobs on tiers of every shape: holes, batches, bad records, midnight, gaps, damage, what brokers take back, other jobs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support.tiers import QUEUE, TierBuilder

from backends.memory import MemoryStore
from backends.wrapping import WrappingStore
from tests.archive.jobs import (
    archive,
    bodies,
    check,
    keys,
    rows,
    with_other_messages_behind,
    workshop,
)
from tiered.archive import parquet
from tiered.archive.job import first_error, local_engine, log_writer, run_job
from tiered.archive.machine import archive_action
from tiered.archive.tables import read_archive
from tiered.archive.task import archive_segment
from tiered.archive.verify import read_log
from tiered.errors import DataError, InternalError, InvalidError
from tiered.log.state import queue_action
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Buffer

    from tiered.archive.job import Outcome
    from tiered.archive.plan import Task

MIDNIGHT = 6_400_000
"""The queue offset whose message is stored at midnight, by ``batch_of``."""
OTHER = MessageQueue("other", 0)


def sealed(*parts: Sequence[object], first: int = 0) -> TierBuilder:
    """A tier whose one queue has a sealed segment of each part, and an open one."""
    tier = TierBuilder()
    for items in (*parts, [b"open"]):
        tier.add(items, first=first, roll=True)  # type: ignore[arg-type]
    return tier


def test_each_offset_becomes_a_row_or_is_put_aside() -> None:
    tier = sealed([b"a", None, b"b"], [None, b"c", (2, b"this is no batch"), b"d"])
    at = workshop(tier.store)
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
    at = workshop(tier.store)
    result = archive(at)
    assert (result.failed, result.segments, keys(at)) == ([], 1, [])
    assert archive(at).plan.tasks == ()
    check(at)


def test_a_segment_is_divided_at_midnight() -> None:
    tier = sealed([b"%d" % n for n in range(6)], first=MIDNIGHT - 2)
    at = workshop(tier.store)
    archive(at)
    days = [(key.split("/")[2], key.split("/")[3][:43]) for key in keys(at)]
    low, middle, high = MIDNIGHT - 2, MIDNIGHT, MIDNIGHT + 4
    assert days == [
        ("date=2023-11-14", f"3-{low:020}-{middle:020}"),
        ("date=2023-11-15", f"3-{middle:020}-{high:020}"),
    ]
    assert [row["store_ts"].date().isoformat() for row in rows(at)].count("2023-11-15") == 4
    check(at)


def test_a_gap_lies_between_stretches() -> None:
    tier = TierBuilder()
    tier.add([b"a"])
    tier.gap(10)
    tier.add([b"b"], roll=True)
    tier.add([b"c"], roll=True)
    at = workshop(tier.store)
    archive(at)
    assert bodies(at) == {0: b"a", 11: b"b"}
    check(at)


def test_damage_of_one_segment_leaves_the_others() -> None:
    tier = sealed([b"a" * 100], [b"b" * 100])
    part = tier.journal.state.queues[QUEUE][0].segments[0].parts[0]
    at = workshop(Damaged(tier.store, part.log.key))
    result = archive(at)
    assert (result.segments, bodies(at)) == (1, {1: b"b" * 100})
    assert isinstance(first_error(result), DataError)
    assert archive(replace(at, tier=tier.store)).segments == 1
    check(replace(at, tier=tier.store))


def test_a_file_that_does_not_reconcile_is_not_published(monkeypatch: pytest.MonkeyPatch) -> None:
    at = workshop(sealed([b"a", b"b"]).store)
    whole = parquet.open_whole

    def shorter(data: object) -> object:
        file = whole(data)
        read = file.read_row_group
        file.read_row_group = lambda number: read(number).slice(1)
        return file

    monkeypatch.setattr(parquet, "open_whole", shorter)
    result = archive(at)
    assert isinstance(first_error(result), InternalError)
    assert (result.segments, keys(at)) == (0, [])


def test_what_the_broker_takes_back_is_forgotten_and_its_successor_archived() -> None:
    tier = TierBuilder()
    tier.add([b"a"])
    tier.add([b"b", b"old c", b"old d"], roll=True)
    tier.add([b"old e"], roll=True)
    at = workshop(tier.store)
    archive(at)
    with_other_messages_behind(tier, b"new c", b"new d", b"open")
    result = archive(at)
    assert [one.starts for one in result.plan.overtaken] == [(1,)]
    check(at)
    state = log_writer(at).state
    ((lane, stretches),) = state.lanes.items()
    assert [(one.start, one.end) for one in stretches] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    named = [file.key for one in stretches for file in one.files]
    found = {row["queue_offset"]: row["body"] for key in named for row in rows(at, key)}
    assert found == {0: b"a", 1: b"b", 2: b"new c", 3: b"new d"}
    assert archive(at).entries == 0
    assert len(state.tails[lane]) == 1


def test_what_was_taken_back_and_expired_before_the_archive_met_it_is_forgotten_too() -> None:
    tier = TierBuilder()
    tier.add([b"a"])
    tier.add([b"b", b"old c", b"old d"], roll=True)
    tier.add([b"old e"], roll=True)
    at = workshop(tier.store)
    archive(at)
    again = with_other_messages_behind(tier, b"new c", b"new d", b"open")
    again.say(queue_action("expire", QUEUE, 0, life=0, min_from=2, min_to=5))
    archive(at)
    check(at)
    ((_, stretches),) = log_writer(at).state.lanes.items()
    named = [file.key for one in stretches for file in one.files]
    found = {row["queue_offset"]: row["body"] for key in named for row in rows(at, key)}
    assert found == {0: b"a", 1: b"b", 2: b"new c", 3: b"new d"}
    assert archive(at).entries == 0


def test_another_job_between_work_and_commit() -> None:
    tier = sealed([b"a"], [b"b"])
    tier.add([b"x"], queue=OTHER)
    tier.add([b"y"], queue=OTHER, roll=True)
    at, rival = workshop(tier.store), workshop(tier.store)
    rival = replace(rival, archive=at.archive, bare=at.bare, takes=lambda topic: topic != "other")

    def engine(tasks: list[Task]) -> Iterator[Outcome]:
        done = list(local_engine(at, 1)(tasks))
        assert archive(rival).segments == 2
        yield from done

    result = run_job(at, engine)
    assert (result.segments, result.overtaken) == (1, 2)
    assert check(at).rows == len(rows(at)) == 3


def test_replay_refuses_what_overlaps_or_is_not_whole() -> None:
    at = workshop(sealed([b"a", b"b"]).store)
    (task,) = (result := archive(at)).plan.tasks
    assert result.segments == 1
    log = log_writer(at)
    done = archive_segment(at.tier, at.place.prefix, at.archive, task)
    other = replace(task.lane, queue_id=7)
    late = (archive_action(task.lane, done, 0), archive_action(other, replace(done, end=9), 0))
    log.append([*late, archive_action(other, done, 1)])
    assert log.state.refused == 3
    assert list(log.state.lanes) == [task.lane]


def test_a_deaf_store_and_nested_places_are_refused() -> None:
    tier = sealed([b"a"])
    with pytest.raises(InvalidError, match="conditional"):
        archive(workshop(tier.store, Deaf(MemoryStore("archive"))))
    with pytest.raises(InvalidError, match="within each other"):
        archive(workshop(tier.store, tier.store))


class Damaged(WrappingStore):
    """One object has a flipped bit."""

    def __init__(self, inner: MemoryStore, key: str) -> None:
        super().__init__(inner)
        self._key = key

    def get(self, key, byte_range=None):
        data = self._inner.get(key, byte_range)
        return bytes([data[0] ^ 1]) + data[1:] if key.endswith(self._key) else data

    def get_ranges(self, key, byte_ranges):
        return [self.get(key, one) for one in byte_ranges]


class Deaf(WrappingStore):
    """A store that takes conditions and ignores them."""

    def put_if_absent(self, key: str, data: Sequence[Buffer] | Buffer) -> None:
        self._inner.delete(key)
        self._inner.put_if_absent(key, data)


def test_a_log_that_is_gone_is_not_taken_for_a_new_archive_s() -> None:
    """Archived anew beside the files of before, rows would be there twice for whoever reads the directory."""
    at = workshop(sealed([b"a"], [b"b"]).store)
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
    at = workshop(sealed([b"a"], [b"b"]).store)

    def dies(_works: Iterator[object]) -> Iterator[tuple[Task, Outcome]]:
        at.archive.put_if_absent("data/topic_dir=orders/date=1970-01-01/0.parquet", b"half a file")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(at, dies)  # type: ignore[arg-type]
    assert read_archive(at.archive).lanes == {}
    assert archive(at).rows == 2
    check(at)


def test_somebody_else_s_files_are_no_trace_of_an_archive() -> None:
    at = workshop(sealed([b"a"]).store)
    at.archive.put_if_absent("data/notes.txt", b"mine")
    assert archive(at).rows == 1
