"""Replay of an archive's log: an entry costs what it says, however long the log is; and states stay what they were."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support.archive_states import COUNT, archived, state
from support.archives_made import loaded

from tiered.archive.machine import (
    ArchiveMachine,
    ArchiveState,
    archive_action,
    clean_action,
    forget_action,
)
from tiered.archive.model import ArchiveLane, Truncation
from tiered.archive.moves import (
    MovedPiece,
    NewFile,
    Places,
    Replaced,
    merge_action,
)
from tiered.archive.saved_runs import Shared, Stretches
from tiered.journal.entry import Entry

if TYPE_CHECKING:
    from tiered.journal.entry import Action

LANE = ArchiveLane("c", "b", "t", 0, 0)
END = Truncation(9, 0, 1 << 40)
MACHINE = ArchiveMachine()
SEGMENTS, REPLACED = 20_000, 100_000
ENTRY_BYTES_MAX = 64 << 10
"""Of memory that an entry takes, at most. A copy of what is archived takes 160,000 bytes, of what is replaced 800,000."""


def after(known: ArchiveState, *actions: Action) -> ArchiveState:
    found = MACHINE.apply(known, Entry(1, 0, "0badcafe", 5, list(actions)))
    assert found.refused == known.refused
    return found


@pytest.fixture(scope="module")
def large() -> ArchiveState:
    """A queue of many segments, and many files that were replaced; as replay has it in the middle."""
    gone = ((f"old-{n}", (n, Replaced(f"old-{n}", 1, 2))) for n in range(REPLACED))
    (stretches,) = state(1, range(SEGMENTS)).lanes.values()
    places = Places({LANE: Stretches(stretches)}, {})
    assert len(places.names(LANE)) == SEGMENTS, "the first merge of a topic has looked at all of it"
    known = ArchiveState(places.lanes, gone=Shared(gone), gone_count=REPLACED, named=places.named)
    return after(known, clean_action([]))


def pieces(first: int, count: int) -> tuple[MovedPiece, ...]:
    return tuple(MovedPiece(LANE, archived(n).files[0]) for n in range(first, first + count))


ACTIONS: dict[str, Action] = {
    "archive": archive_action(LANE, archived(SEGMENTS), 0),
    "merge": merge_action([NewFile("new", 9, 9, pieces(7000, 4))]),
    "forget": forget_action(LANE, [archived(SEGMENTS - 1).start], END),
    "clean": clean_action(["old-4711"]),
    "a replaced file counts again": archive_action(
        LANE,
        replace(archived(SEGMENTS), files=(replace(archived(SEGMENTS).files[0], key="old-5"),)),
        0,
    ),
}


@pytest.mark.parametrize("what", ACTIONS)
def test_an_entry_costs_no_copy_of_what_is_archived(what: str, large: ArchiveState) -> None:
    tracemalloc.start()
    try:
        found = after(large, ACTIONS[what])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < ENTRY_BYTES_MAX
    assert len(found.lanes[LANE]) in range(SEGMENTS - 1, SEGMENTS + 2)
    assert (len(large.lanes[LANE]), len(large.gone)) == (SEGMENTS, REPLACED), (
        "the old state is as it was"
    )
    assert found != large or what == "clean"


def test_a_long_log_gives_what_its_entries_say() -> None:
    known, count = MACHINE.initial(), 2000
    order = list(range(count))
    random.Random(1).shuffle(order)
    for number in order:
        known = after(known, archive_action(LANE, archived(number), 0))
    assert known.lanes == {LANE: tuple(map(archived, range(count)))}
    for first in range(0, count, 4):
        new = NewFile(f"merged-{first}", 9, 9, pieces(first, 4))
        known = after(known, merge_action([new]))
    assert [one.key for one in known.replaced[:5]] == ["k-0", "k-1", "k-2", "k-3", "k-4"]
    keys = [file.key for one in known.lanes[LANE] for file in one.files]
    assert keys == [f"merged-{n // 4 * 4}" for n in range(count)]
    known = after(known, clean_action([f"k-{n}" for n in range(0, count, 2)]))
    left = sorted(int(one.key[2:]) for one in known.replaced)
    assert left == list(range(1, count, 2))
    last = [archived(number).start for number in range(count - 4, count)]
    known = after(known, forget_action(LANE, last, END))
    assert len(known.lanes[LANE]) == count - 4
    assert loaded(known) == known
    assert known.overlapping(LANE, 1150, 1350) == list(known.lanes[LANE])[11:14]


@pytest.mark.parametrize("seed", range(3))
def test_a_shared_mapping_is_a_mapping(seed: int) -> None:
    chance, plain, shared = random.Random(seed), dict[str, int](), Shared[str, int]()
    for _ in range(5000):
        key = f"k{chance.randrange(800)}"
        before = (shared, dict(plain)) if chance.random() < 0.01 else None
        if chance.random() < 0.3:
            plain.pop(key, None)
            shared = shared.lacking(key)
        else:
            plain[key] = chance.randrange(99)
            shared = shared.having(key, plain[key])
        assert (len(shared), shared.get(key)) == (len(plain), plain.get(key))
        if before:
            assert sorted(before[0].values()) == sorted(before[1].values())
    assert sorted(shared.values()) == sorted(plain.values())
    assert all(shared.get(key) == value for key, value in plain.items())


@pytest.mark.parametrize("seed", range(3))
def test_shared_stretches_are_a_sorted_tuple(seed: int) -> None:
    chance, plain, shared = random.Random(seed), list[int](), Stretches()
    for _ in range(1500):
        number = chance.choice([len(plain), chance.randrange(4000)])
        if number in plain and chance.random() < 0.5:
            plain.remove(number)
            shared = shared.without([archived(number).start])
        elif number in plain:
            shared = shared.with_changed(archived(number))
        else:
            plain.append(number)
            shared = shared.with_one(archived(number))
        low = chance.randrange(400_000)
        high = low + chance.randrange(1, 2000)
        near = [n for n in sorted(plain) if COUNT * n < high and COUNT * (n + 1) > low]
        assert [one.start for one in shared.around(low, high)] == [COUNT * n for n in near]
    assert shared == tuple(map(archived, sorted(plain)))
    assert len(shared) == len(plain)
