"""Replay of an archive's log: an entry costs what it says, however long the log is; and states stay what they were."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support.archive_states import archived, state
from support.archives_made import loaded

from tiered.archive.machine import (
    ArchiveMachine,
    ArchiveState,
    JobRecord,
    archive_action,
    clean_action,
    forget_action,
    job_action,
    merge_action,
)
from tiered.archive.model import ArchiveQueue, MovedRows, NewFile, Replaced, Truncation
from tiered.journal.entry import Entry

if TYPE_CHECKING:
    from tiered.journal.entry import Action

QUEUE = ArchiveQueue("c", "b", "t", 0, 0)
END = Truncation(9, 0, 1 << 40)
MACHINE = ArchiveMachine()
SEGMENTS, REPLACED = 20_000, 100_000
ENTRY_BYTES_MAX = 64 << 10
"""Of memory that an entry takes, at most; a copy of what is archived takes 160,000 bytes."""
GONE_BYTES_MAX = 16 << 20
"""And one that replaces files, or deletes some: their list is copied."""


def after(known: ArchiveState, *actions: Action) -> ArchiveState:
    found = MACHINE.apply(known, Entry(1, 0, "0badcafe", 5, list(actions)))
    assert found.refused == known.refused
    return found


@pytest.fixture(scope="module")
def large() -> ArchiveState:
    """A queue of many segments, and many files that were replaced; as replay has it behind a checkpoint."""
    gone = {f"old-{n}": Replaced(f"old-{n}", 1, 2) for n in range(REPLACED)}
    known = replace(loaded(state(1, range(SEGMENTS))), gone=gone)
    assert known.queues.count_of(QUEUE, "k-1"), "the first merge of a topic has looked at all of it"
    return after(known, job_action(JobRecord("0badcafe", "0.1", "local", 3, 4)))


def row_ranges(first: int, count: int) -> tuple[MovedRows, ...]:
    return tuple(MovedRows(QUEUE, archived(n).files[0]) for n in range(first, first + count))


ACTIONS: dict[str, Action] = {
    "archive": archive_action([(QUEUE, 0, archived(SEGMENTS))]),
    "merge": merge_action([NewFile("new", 9, 9, row_ranges(7000, 4))]),
    "forget": forget_action(QUEUE, [archived(SEGMENTS - 1).start], END),
    "clean": clean_action(["old-4711"]),
    "a replaced file counts again": archive_action(
        [
            (
                QUEUE,
                0,
                replace(
                    archived(SEGMENTS), files=(replace(archived(SEGMENTS).files[0], key="old-5"),)
                ),
            )
        ]
    ),
}


@pytest.mark.parametrize("what", ACTIONS)
def test_an_entry_costs_no_copy_of_what_is_archived(what: str, large: ArchiveState) -> None:
    after(large, ACTIONS[what])  # what it looks at is unpacked
    tracemalloc.start()
    try:
        found = after(large, ACTIONS[what])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < ENTRY_BYTES_MAX + (found.gone is not large.gone) * GONE_BYTES_MAX
    assert (found.gone is large.gone) == (what == "archive")
    assert len(found.queues[QUEUE]) in range(SEGMENTS - 1, SEGMENTS + 2)
    assert (len(large.queues[QUEUE]), len(large.gone)) == (SEGMENTS, REPLACED), (
        "the old state is as it was"
    )
    assert found != large or what == "clean"


def test_a_long_log_gives_what_its_entries_say() -> None:
    known, count = MACHINE.initial(), 2000
    order = list(range(count))
    random.Random(1).shuffle(order)
    for number in order:
        known = after(known, archive_action([(QUEUE, 0, archived(number))]))
    assert known.queues == {QUEUE: tuple(map(archived, range(count)))}
    for first in range(0, count, 4):
        new = NewFile(f"merged-{first}", 9, 9, row_ranges(first, 4))
        known = after(known, merge_action([new]))
    assert [one.key for one in known.replaced[:5]] == ["k-0", "k-1", "k-2", "k-3", "k-4"]
    keys = [file.key for one in known.queues[QUEUE] for file in one.files]
    assert keys == [f"merged-{n // 4 * 4}" for n in range(count)]
    known = after(known, clean_action([f"k-{n}" for n in range(0, count, 2)]))
    left = sorted(int(one.key[2:]) for one in known.replaced)
    assert left == list(range(1, count, 2))
    last = [archived(number).start for number in range(count - 4, count)]
    known = after(known, forget_action(QUEUE, last, END))
    assert len(known.queues[QUEUE]) == count - 4
    assert loaded(known) == known
    assert known.overlapping(QUEUE, 1150, 1350) == list(known.queues[QUEUE])[11:14]
