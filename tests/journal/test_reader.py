"""Replay: the same state whatever became of the checkpoints, and nothing that does not belong to the one history."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.journals import PREFIX, Toy, ToyMachine, make_writer, say

from backends.memory import MemoryStore
from backends.wrapping import WrappingStore
from tiered.errors import DataError, OtherVersionError
from tiered.journal.entry import Entry, encode_entry, open_text, seal_text
from tiered.journal.replay import CHECKPOINT_FORMAT, JournalReader
from tiered.keys import checkpoint_key, entry_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backends.base import ObjectInfo


def written(count: int, checkpoints: list[int]) -> MemoryStore:
    """A journal of ``count`` entries with checkpoints behind some."""
    store = MemoryStore()
    writer = make_writer(store)
    for number in range(2, count + 1):
        if number - 1 in checkpoints:
            writer.write_checkpoint(force=True)
        writer.append(say(number))
    if count in checkpoints:
        writer.write_checkpoint(force=True)
    return store


def reader_of(store: object) -> JournalReader[Toy]:
    return JournalReader(store, PREFIX, ToyMachine())  # type: ignore[arg-type]


def replay(store: object) -> JournalReader[Toy]:
    reader = reader_of(store)
    reader.catch_up()
    return reader


def change(store: MemoryStore, key: str, data: bytes | None) -> None:
    """Damage, which goes behind the store's back."""
    store.delete(key)
    if data is not None:
        store.put_if_absent(key, data)


def flipped(data: bytes, bit: int) -> bytes:
    bad = bytearray(data)
    bad[bit // 8 % len(bad)] ^= 1 << bit % 8
    return bytes(bad)


def test_an_empty_journal_has_the_initial_state():
    reader = replay(MemoryStore())
    assert (reader.number, reader.state) == (0, Toy())


COUNT = 9
NUMBERS = st.integers(1, COUNT)


@given(st.lists(NUMBERS, max_size=4), st.dictionaries(NUMBERS, st.integers(0, 3), max_size=4))
def test_i5_corrupt_missing_stale_and_misplaced_checkpoints_give_the_same_state(
    checkpoints: list[int], damage: dict[int, int]
):
    plain = replay(written(COUNT, []))
    store = written(COUNT, checkpoints)
    for number, kind in damage.items():
        key = checkpoint_key(PREFIX, number)
        if number in checkpoints:
            data = store.get(key)
            document = open_text(data, where=key, versions=(2,))
            bad = {
                0: None,
                1: flipped(data, 1234 * number),
                2: data[:-5],
                3: seal_text({**document, "number": number + 1}),
            }[kind]
            change(store, key, bad)
    reader = replay(store)
    assert (reader.state, reader.number, reader.last) == (plain.state, plain.number, plain.last)


@given(NUMBERS, st.integers(0, COUNT), st.lists(NUMBERS, max_size=4))
def test_i5_a_follower_catches_up_from_anywhere_also_when_old_entries_are_gone(
    low: int, at: int, more: list[int]
):
    store = written(COUNT, [low, *more])
    follower = reader_of(store)
    for number in range(1, at + 1):
        found = follower.read_entry(number)
        assert found
        follower.apply(*found)
    for number in range(1, low + 1):
        store.delete(entry_key(PREFIX, number))
    follower.catch_up()
    assert follower.state.values == ["epoch 1", *range(2, COUNT + 1)]
    assert replay(store).state == follower.state


def test_catch_up_gives_the_new_entries_one_by_one():
    store = written(4, [])
    reader = replay(store)
    make_writer(store, "ffffffff")
    assert [entry.writer for entry in reader.catch_up()] == ["ffffffff"]
    assert reader.catch_up() == []


def test_a_missing_number_is_the_head_only_when_nothing_lies_behind_it():
    store = written(6, [])
    store.delete(entry_key(PREFIX, 6))
    assert replay(store).number == 5
    store.delete(entry_key(PREFIX, 3))
    reader = reader_of(store)
    with pytest.raises(DataError, match=r"journal entry 3 is missing.*00000003"):
        reader.catch_up()
    assert reader.number == 2


def test_a_checkpoint_that_cannot_be_read_and_has_no_entries_is_not_an_empty_tier():
    store = written(3, [3])
    for number in (1, 2, 3):
        store.delete(entry_key(PREFIX, number))
    assert replay(store).number == 3
    key = checkpoint_key(PREFIX, 3)
    change(store, key, flipped(store.get(key), 99))
    with pytest.raises(DataError, match="missing"):
        replay(store)


def test_a_damaged_entry_is_an_error_and_the_state_is_that_before_it():
    store = written(5, [])
    key = entry_key(PREFIX, 4)
    change(store, key, flipped(store.get(key), 300))
    reader = reader_of(store)
    with pytest.raises(DataError, match="00000004"):
        reader.catch_up()
    assert reader.state.values == ["epoch 1", 2, 3]


def test_i6_an_entry_under_a_wrong_number_is_no_history():
    store = written(5, [])
    change(store, entry_key(PREFIX, 5), store.get(entry_key(PREFIX, 4)))
    with pytest.raises(DataError, match="says of itself that it is number 4"):
        replay(store)


def test_i6_an_entry_that_does_not_follow_from_the_one_before_is_no_history():
    store = written(4, [])
    stray = Entry(4, 1, "0badcafe", 0, say("stray"), previous=12345)
    change(store, entry_key(PREFIX, 4), encode_entry(stray))
    with pytest.raises(DataError, match="not the successor of journal entry 3"):
        replay(store)


def test_an_unknown_action_is_an_error_of_a_newer_version():
    store = written(2, [])
    last = replay(store).last
    change(store, entry_key(PREFIX, 3), encode_entry(Entry(3, 1, "a" * 8, 0, [{"do": "x"}], last)))
    with pytest.raises(OtherVersionError):
        replay(store)


@pytest.mark.parametrize(
    "change_", [{"format": CHECKPOINT_FORMAT + 1}, {"state": {}}, {"last": None}]
)
def test_a_checkpoint_of_another_version_is_said_to_be_one(change_: dict[str, object]):
    store = written(3, [3])
    key = checkpoint_key(PREFIX, 3)
    document = json.loads(store.get(key).splitlines()[0])
    change(store, key, seal_text({**document, **change_}))
    with pytest.raises(OtherVersionError):
        replay(store)


def test_strange_keys_in_the_journal_are_left_alone():
    store = written(3, [])
    for name in ("x", "1", "0" * 20 + ".tmp", "9" * 21):
        store.put_if_absent(f"{PREFIX}journal/{name}", b"?")
    assert replay(store).number == 3


class Vanishing(WrappingStore):
    """Deletes entries 1 to 5 after the first listing; the listing does not see ``hidden`` once."""

    def __init__(self, inner: MemoryStore, *, hidden: str = "") -> None:
        super().__init__(inner)
        self._hidden = hidden
        self._listed = False

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        found = [*self._inner.list(prefix, start_after=start_after)]
        if not self._listed:
            self._listed = True
            if self._hidden:
                found = [info for info in found if not info.key.endswith(self._hidden)]
            else:
                found = [info for info in found if not info.key.endswith(".checkpoint")]
                for number in range(1, 6):
                    self._inner.delete(entry_key(PREFIX, number))
        yield from found


def test_entries_that_are_deleted_while_we_read_are_found_in_a_newer_checkpoint():
    assert replay(Vanishing(written(8, [5, 7]))).state == replay(written(8, [])).state


@pytest.mark.parametrize("hidden", ["00003", "00008", "00007.checkpoint"])
def test_a_listing_that_misses_something_new_is_repeated(hidden: str):
    store = Vanishing(written(8, [7]), hidden=hidden)
    reader = replay(store)
    reader.catch_up()
    assert reader.state == replay(written(8, [])).state
