"""Entries below the beginning of a trimmed journal: nobody reads them, so they are recorded, and no damage."""

from __future__ import annotations

import pytest
from support.journals import PREFIX
from support.tiers import TierBuilder

from tiered.journal.entry import Entry, checksum, decode_entry, encode_entry
from tiered.keys import entry_key
from tiered.log.reader import TierReader
from tiered.log.verify import verify_tier

TRIMMED_TO = 8
"""A checkpoint; another is at 12."""


def trimmed() -> TierBuilder:
    builder = TierBuilder()
    while builder.journal.number < 14:
        builder.add([b"a"])
        if builder.journal.number in {TRIMMED_TO, 12}:
            builder.journal.write_checkpoint(force=True)
    for number in range(1, TRIMMED_TO):
        builder.store.delete(entry_key(PREFIX, number))
    return builder


def put_stray(
    builder: TierBuilder,
    number: int,
    previous: int = 99,
    *,
    epoch: int = 1,
    writer: str = "0badcafe",
) -> None:
    """What a writer that was fenced long ago had still in flight."""
    actions = [{"do": "meta", "store": {}}]
    entry = Entry(number, epoch, writer, 7, actions, previous)
    builder.store.put_if_absent(entry_key(PREFIX, number), encode_entry(entry))


@pytest.mark.parametrize("numbers", [(7,), (5,), (1,), (3, 4), (1, 2, 6, 7), (6, 7)])
def test_an_entry_under_a_number_used_and_deleted_long_ago_is_recorded(numbers: tuple[int, ...]):
    builder = trimmed()
    before = verify_tier(builder.store, PREFIX, deep=True)
    assert (before.is_clean, before.recorded.stale_entries) == (True, 0)
    for number in numbers:
        put_stray(builder, number)
    report = verify_tier(builder.store, PREFIX, deep=True)
    assert report.problems == []
    assert report.recorded.stale_entries == len(numbers)
    assert entry_key(PREFIX, numbers[0]) in report.recorded.notes[0]
    reader = TierReader(builder.store, PREFIX)
    reader.refresh()
    assert reader.state == builder.journal.state


@pytest.mark.parametrize("has_next", [True, False])
def test_one_with_the_number_of_the_checkpoint_that_was_trimmed_to(has_next: bool):
    """It is told from a wrong checkpoint by the entry behind. (Simulation, seed 59790.)"""
    builder = TierBuilder()
    while builder.journal.number < 8:
        builder.add([b"a"])
    builder.journal.write_checkpoint(force=True)
    for number in range(1, 9):
        builder.store.delete(entry_key(PREFIX, number))
    if has_next:
        builder.add([b"b"])
    put_stray(builder, 8)
    report = verify_tier(builder.store, PREFIX, deep=True)
    assert report.is_clean == has_next
    assert report.recorded.stale_entries == has_next


def test_a_flipped_bit_in_one_is_damage_all_the_same():
    builder = trimmed()
    put_stray(builder, 7)
    key = entry_key(PREFIX, 7)
    data = bytearray(builder.store.get(key))
    data[10] ^= 1
    builder.store.delete(key)
    builder.store.put_if_absent(key, bytes(data))
    report = verify_tier(builder.store, PREFIX, deep=True)
    assert [problem.where for problem in report.problems] == [key]


@pytest.mark.parametrize("number", [9, 11, 13])
def test_another_entry_behind_the_beginning_is_damage(number: int):
    builder = trimmed()
    builder.store.delete(entry_key(PREFIX, number))
    put_stray(builder, number)
    assert not verify_tier(builder.store, PREFIX, deep=True).is_clean


@pytest.mark.parametrize("has_guest", [False, True])
def test_one_that_follows_a_checkpoint_which_trimming_had_left_is_recorded(*, has_guest: bool):
    """The trimming was cut short: entries were gone, an old checkpoint was not. (Simulation, seed 18745.)

    The true one may be followed by an entry of a guest, who has no epoch. (Seed 301500.)
    """
    builder = TierBuilder()
    while builder.journal.number < 14:
        if has_guest and builder.journal.number == 5:
            last = checksum(builder.store.get(entry_key(PREFIX, 5)))
            put_stray(builder, 6, last, epoch=0)
            builder.journal.catch_up()
        else:
            builder.add([b"a"])
        if builder.journal.number in {4, 6, 12}:
            builder.journal.write_checkpoint(force=True)
    true = builder.store.get(entry_key(PREFIX, 5))
    for number in range(1, 6):
        builder.store.delete(entry_key(PREFIX, number))
    put_stray(builder, 5, decode_entry(true, where="").previous)
    report = verify_tier(builder.store, PREFIX, deep=True)
    assert report.problems == []
    assert report.recorded.stale_entries == 1


def took_two_epochs(checkpoints: tuple[int, ...] = (2, 6, 10)) -> tuple[TierBuilder, int]:
    """The first epoch ends at entry 4; the end of entry 4."""
    builder = TierBuilder()
    while builder.journal.number < 4:
        builder.add([b"a"])
        if builder.journal.number in checkpoints:
            builder.journal.write_checkpoint(force=True)
    last = checksum(builder.store.get(entry_key(PREFIX, 4)))
    builder.journal.take_epoch({})
    while builder.journal.number < 12:
        builder.add([b"b"])
        if builder.journal.number in checkpoints:
            builder.journal.write_checkpoint(force=True)
    return builder, last


def test_one_of_an_older_epoch_is_recorded_where_some_below_it_are_still_there():
    """A trimming deletes in no order, and is cut short. (Seed 307230.)"""
    builder, last = took_two_epochs()
    for number in (1, 2, 5):
        builder.store.delete(entry_key(PREFIX, number))
    put_stray(builder, 5, last)
    report = verify_tier(builder.store, PREFIX, deep=True)
    assert report.problems == []
    assert report.recorded.stale_entries == 1


@pytest.mark.parametrize("epoch", [2, 3])
def test_one_whose_epoch_another_took_is_recorded_where_some_below_it_are_still_there(
    epoch: int,
):
    """Two wanted the same epoch, or it came too late for that of a writer that went on. (Seed 1200585.)"""
    builder, _ = took_two_epochs((8, 10))
    last = checksum(builder.store.get(entry_key(PREFIX, 5)))
    builder.store.delete(entry_key(PREFIX, 6))
    put_stray(builder, 6, last, epoch=epoch, writer="0000beef")
    report = verify_tier(builder.store, PREFIX, deep=True)
    assert report.problems == []
    assert report.recorded.stale_entries == 1


def test_one_of_an_older_epoch_is_damage_where_the_next_begins_a_epoch():
    builder, _ = took_two_epochs()
    true = builder.store.get(entry_key(PREFIX, 4))
    for number in (1, 2, 4):
        builder.store.delete(entry_key(PREFIX, number))
    put_stray(builder, 4, decode_entry(true, where="").previous)
    assert not verify_tier(builder.store, PREFIX, deep=True).is_clean


def test_a_break_is_damage_where_no_checkpoint_stands_behind_it():
    builder = trimmed()
    true = builder.store.get(entry_key(PREFIX, 13))
    builder.store.delete(entry_key(PREFIX, 13))
    put_stray(builder, 13, decode_entry(true, where="").previous)
    assert not verify_tier(builder.store, PREFIX, deep=True).is_clean


@pytest.mark.parametrize("number", [10, 11])
def test_another_entry_that_follows_its_predecessor_is_damage_in_the_midst(number: int):
    builder = trimmed()
    true = builder.store.get(entry_key(PREFIX, number))
    builder.store.delete(entry_key(PREFIX, number))
    put_stray(builder, number, decode_entry(true, where="").previous)
    assert not verify_tier(builder.store, PREFIX, deep=True).is_clean


def test_another_entry_in_a_journal_that_was_never_trimmed_is_damage():
    builder = TierBuilder()
    for _ in range(5):
        builder.add([b"a"])
    builder.journal.write_checkpoint(force=True)
    builder.store.delete(entry_key(PREFIX, 3))
    put_stray(builder, 3)
    assert not verify_tier(builder.store, PREFIX, deep=True).is_clean
