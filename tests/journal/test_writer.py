"""Appending: whatever the store does, one history; and who has lost the epoch stops."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

import pytest
from support.journals import PREFIX, Toy, ToyMachine, make_writer, say

from backends.errors import PermissionDeniedError
from backends.memory import MemoryStore
from backends.testing.faulty import Fault, FaultyStore, Rule
from backends.wrapping import WrappingStore
from tiered.clock import ManualClock
from tiered.errors import ClosedError, DataError, FencedError, StoreUnavailableError
from tiered.journal.append import CHECKPOINT_ENTRIES, JournalWriter
from tiered.journal.entry import Entry, checksum, encode_entry
from tiered.journal.replay import JournalReader
from tiered.keys import checkpoint_key, entry_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Buffer

    from backends.base import ByteRange, ObjectInfo, ObjectStore

PUT, GET, LIST = frozenset({"put"}), frozenset({"get"}), frozenset({"list"})


def history(store: ObjectStore) -> Toy:
    reader = JournalReader(store, PREFIX, ToyMachine())
    reader.catch_up()
    return reader.state


def faulty(store: ObjectStore, *rules: Rule) -> FaultyStore:
    return FaultyStore(store, random.Random(7), *rules)


def keys_of(store: ObjectStore) -> list[str]:
    return [info.key.rpartition("/")[2] for info in store.list(PREFIX)]


class Hooked(WrappingStore):
    """Runs something before or after the first request of a kind on a key that ends so."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.before: dict[tuple[str, str], Callable[[], object]] = {}
        self.after: dict[tuple[str, str], Callable[[], object]] = {}

    def _hook(
        self, hooks: dict[tuple[str, str], Callable[[], object]], kind: str, key: str
    ) -> None:
        for wanted in [name for name in hooks if name[0] == kind and key.endswith(name[1])]:
            hooks.pop(wanted)()

    def put_if_absent(self, key: str, data: Sequence[Buffer] | Buffer) -> None:
        self._hook(self.before, "put", key)
        self._inner.put_if_absent(key, data)
        self._hook(self.after, "put", key)

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        self._hook(self.before, "get", key)
        return self._inner.get(key, byte_range)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        self._hook(self.before, "list", start_after)
        return self._inner.list(prefix, start_after=start_after)


# -- the plain way ------------------------------------------------------------------------------


def test_i4_entries_are_numbered_from_1_and_each_is_created_once():
    store = MemoryStore()
    writer = make_writer(store)
    assert [writer.append(say(value)).number for value in "abc"] == [2, 3, 4]
    assert keys_of(store) == [f"{number:020d}" for number in (1, 2, 3, 4)]
    assert history(store) == writer.state
    assert writer.state.values == ["epoch 1", "a", "b", "c"]


def test_a_round_costs_one_put_and_one_listing():
    store = faulty(MemoryStore())
    writer = make_writer(store)
    before = len(store.events)
    writer.append(say(1))
    assert [event.operation for event in store.events[before:]] == ["put", "list"]


def test_a_checkpoint_is_due_after_so_many_entries_and_only_then():
    store = MemoryStore()
    writer = make_writer(store)
    for number in range(2, CHECKPOINT_ENTRIES + 1):
        assert not writer.write_checkpoint()
        writer.append(say(number))
    assert writer.write_checkpoint()
    assert not writer.write_checkpoint(force=True)
    writer.append(say("more"))
    assert not writer.write_checkpoint()
    assert writer.write_checkpoint(force=True)
    assert history(store) == writer.state


def test_a_checkpoint_that_cannot_be_written_is_no_error():
    store = faulty(MemoryStore(), Rule(Fault.UNAVAILABLE, PUT, ".checkpoint"))
    writer = make_writer(store)
    assert not writer.write_checkpoint(force=True)
    assert writer.write_checkpoint(force=True)


# -- I7: unknown is not failed ------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault", [Fault.LOST_REQUEST, Fault.LOST_ANSWER, Fault.UNAVAILABLE, Fault.FULL]
)
@pytest.mark.parametrize("times", [1, 3])
def test_i7_an_entry_whose_answer_is_lost_is_history_once(fault: Fault, times: int):
    inner = MemoryStore()
    store = faulty(inner)
    writer = make_writer(store)
    store.add(Rule(fault, PUT, times=times))
    writer.append(say("a"))
    writer.append(say("b"))
    assert history(inner).values == ["epoch 1", "a", "b"]


def test_i7_a_late_landing_changes_nothing():
    inner = MemoryStore()
    store = faulty(inner)
    writer = make_writer(store)
    store.add(Rule(Fault.LATE, PUT, times=2))
    writer.append(say("a"))
    writer.append(say("b"))
    before = {info.key: inner.get(info.key) for info in inner.list("")}
    assert store.land_late() == 2
    assert {info.key: inner.get(info.key) for info in inner.list("")} == before


def test_i7_an_entry_that_lands_between_two_tries_is_ours():
    inner = MemoryStore()
    store = faulty(inner)
    hooked = Hooked(store)
    writer = make_writer(hooked)
    store.add(Rule(Fault.LATE, PUT))

    def second_try() -> None:
        hooked.before["put", "00002"] = store.land_late

    hooked.before["put", "00002"] = second_try
    writer.append(say("a"))
    assert store.land_late() == 0
    assert history(inner).values == ["epoch 1", "a"]


def test_i7_an_entry_is_never_re_cut_while_its_outcome_is_unknown():
    inner, stop = MemoryStore(), threading.Event()
    store = faulty(inner)
    writer = make_writer(store, stop=stop)
    store.add(Rule(Fault.LATE, PUT, times=None))
    stop.set()
    with pytest.raises(StoreUnavailableError, match="may or may not be written"):
        writer.append(say("a"))
    store.heal()
    with pytest.raises(ClosedError):
        writer.append(say("b"))
    assert not writer.write_checkpoint(force=True)
    store.land_late()
    assert history(inner).values == ["epoch 1", "a"]


def test_told_to_stop_before_anything_was_sent_says_so():
    inner, stop = MemoryStore(), threading.Event()
    store = faulty(inner)
    writer = make_writer(store, stop=stop)
    store.add(Rule(Fault.UNAVAILABLE, PUT, times=None))
    stop.set()
    with pytest.raises(StoreUnavailableError, match="is not written"):
        writer.append(say("a"))


def test_a_refusal_ends_the_writer():
    store = faulty(MemoryStore())
    writer = make_writer(store)
    store.add(Rule(Fault.DENIED, PUT))
    with pytest.raises(StoreUnavailableError) as caught:
        writer.append(say("a"))
    assert isinstance(caught.value.__cause__, PermissionDeniedError)


@pytest.mark.parametrize("operations", [GET, LIST])
def test_i7_what_is_asked_to_settle_an_entry_is_asked_again(operations: frozenset[str]):
    inner = MemoryStore()
    store = faulty(inner)
    writer = make_writer(store)
    store.add(Rule(Fault.LOST_ANSWER, PUT), Rule(Fault.UNAVAILABLE, operations, times=3))
    writer.append(say("a"))
    writer.append(say("b"))
    assert history(inner).values == ["epoch 1", "a", "b"]


def test_an_entry_that_is_durable_but_not_yet_proven_may_be_history():
    inner, stop = MemoryStore(), threading.Event()
    store = faulty(inner)
    writer = make_writer(store, stop=stop)
    store.add(Rule(Fault.UNAVAILABLE, LIST, times=None))
    stop.set()
    with pytest.raises(StoreUnavailableError, match="is written, but"):
        writer.append(say("a"))
    assert writer.state.values == ["epoch 1"]
    assert history(inner).values == ["epoch 1", "a"]


# -- I6: one lineage ----------------------------------------------------------------------------


def test_i6_a_newer_epoch_fences_and_the_old_entry_does_not_get_in():
    store = MemoryStore()
    old = make_writer(store, "aaaaaaaa")
    new = make_writer(store, "bbbbbbbb")
    with pytest.raises(FencedError, match="bbbbbbbb took over"):
        old.append(say("late"))
    with pytest.raises(ClosedError):
        old.append(say("later"))
    assert not old.write_checkpoint(force=True)
    new.append(say("mine"))
    assert history(store).values == ["epoch 1", "epoch 2", "mine"]


def test_i6_a_newer_epoch_fences_also_after_an_unknown_outcome():
    inner = MemoryStore()
    store = faulty(inner)
    old = make_writer(store, "aaaaaaaa")
    hooked = Hooked(inner)
    store.add(Rule(Fault.LATE, PUT))
    old._store = hooked  # the second try goes another way, after the takeover
    hooked.before["put", "00002"] = lambda: make_writer(inner, "bbbbbbbb")
    with pytest.raises(FencedError):
        old.append(say("late"))
    store.land_late()
    assert history(inner).values == ["epoch 1", "epoch 2"]


def test_i6_a_epoch_behind_the_entry_that_we_won_fences_us_and_the_entry_stays():
    inner = MemoryStore()
    hooked = Hooked(inner)
    old = make_writer(hooked, "aaaaaaaa")
    hooked.after["put", "00002"] = lambda: make_writer(inner, "bbbbbbbb")
    with pytest.raises(FencedError):
        old.append(say("just in time"))
    assert history(inner).values == ["epoch 1", "just in time", "epoch 2"]


def test_i6_of_two_that_take_a_epoch_at_once_one_is_fenced():
    inner = MemoryStore()
    hooked = Hooked(inner)
    hooked.before["put", "00001"] = lambda: make_writer(inner, "bbbbbbbb")
    with pytest.raises(FencedError):
        make_writer(hooked, "aaaaaaaa")
    assert history(inner).values == ["epoch 1"]


def test_i6_a_epoch_goes_behind_what_the_old_writer_still_gets_in():
    inner = MemoryStore()
    old = make_writer(inner, "aaaaaaaa")
    hooked = Hooked(inner)
    hooked.before["put", "00002"] = lambda: old.append(say("last"))
    new = make_writer(hooked, "bbbbbbbb")
    assert new.state.values == ["epoch 1", "last", "epoch 2"]
    assert new.epoch == 2
    assert history(inner) == new.state


def test_i6_a_cloned_process_stops():
    store = MemoryStore()
    one = make_writer(store, "aaaaaaaa")
    clone = make_writer(store, "aaaaaaaa", epoch=False)
    clone.epoch = one.epoch
    one.append(say("one"))
    with pytest.raises(FencedError, match="cloned"):
        clone.append(say("two"))
    assert history(store).values == ["epoch 1", "one"]


def prune(store: ObjectStore, up_to: int) -> None:
    for number in range(1, up_to + 1):
        store.delete(entry_key(PREFIX, number))


@pytest.mark.parametrize("up_to", [2, 5, 9])
def test_i6_a_number_that_was_used_and_deleted_long_ago_is_not_history(up_to: int):
    store = MemoryStore()
    old = make_writer(store, "aaaaaaaa")
    new = make_writer(store, "bbbbbbbb")
    for value in range(8):
        new.append(say(value))
        new.write_checkpoint(force=True)
    truth = history(store)
    prune(store, up_to)
    with pytest.raises(FencedError):
        old.append(say("stray"))
    assert old.state.values == ["epoch 1"]
    assert history(store) == truth
    follower = JournalReader(store, PREFIX, ToyMachine())
    follower.state, follower.number, follower.last = old.state, 1, old._reader.last
    follower.catch_up()
    assert follower.state == truth


def test_i6_a_used_number_is_known_by_its_own_checkpoint_alone():
    store = MemoryStore()
    old = make_writer(store, "aaaaaaaa")
    new = make_writer(store, "bbbbbbbb")
    new.write_checkpoint(force=True)
    prune(store, 2)
    with pytest.raises(FencedError, match="deleted"):
        old.append(say("stray"))


def test_i6_an_entry_that_is_deleted_under_our_hands_was_of_another_time():
    inner = MemoryStore()
    hooked = Hooked(inner)
    old = make_writer(hooked, "aaaaaaaa")
    make_writer(inner, "bbbbbbbb")
    hooked.before["get", "00002"] = lambda: prune(inner, 2)
    with pytest.raises(FencedError, match="moved on"):
        old.append(say("stray"))


def test_i6_an_entry_of_another_history_fences():
    store = MemoryStore()
    writer = make_writer(store, "aaaaaaaa")
    stray = Entry(2, 0, "cccccccc", 0, say("other"), previous=99)
    store.put_if_absent(entry_key(PREFIX, 2), encode_entry(stray))
    with pytest.raises(FencedError, match="successor"):
        writer.append(say("a"))


def test_a_damaged_entry_in_our_place_stops_us():
    store = MemoryStore()
    writer = make_writer(store, "aaaaaaaa")
    store.put_if_absent(entry_key(PREFIX, 2), b"nonsense\n")
    with pytest.raises(DataError):
        writer.append(say("a"))


# -- others than the writer ---------------------------------------------------------------------


def test_others_append_between_and_fence_nobody():
    store = MemoryStore()
    writer = make_writer(store, "aaaaaaaa")
    other = make_writer(store, "cccccccc", epoch=False)
    assert other.epoch == 0
    writer.append(say("a"))
    other.append(say("b"))
    writer.append(say("c"))
    make_writer(store, "bbbbbbbb")
    other.append(say("d"))
    assert history(store).values == ["epoch 1", "a", "b", "c", "epoch 2", "d"]
    with pytest.raises(FencedError):
        writer.append(say("e"))


def test_others_look_again_at_what_they_presume_and_can_go_on_after_a_no():
    inner = MemoryStore()
    hooked = Hooked(inner)
    writer = make_writer(inner, "aaaaaaaa")
    other = make_writer(hooked, "cccccccc", epoch=False)
    seen: list[list[object]] = []

    def check(state: Toy) -> None:
        seen.append(state.values)
        if "a" in state.values:
            raise KeyError("no longer so")

    hooked.before["put", "00002"] = lambda: writer.append(say("a"))
    with pytest.raises(KeyError):
        other.append(say("b"), check=check)
    assert seen == [["epoch 1"], ["epoch 1", "a"]]
    other.append(say("c"))
    assert history(inner).values == ["epoch 1", "a", "c"]


def test_a_checkpoint_of_our_own_entry_by_a_fast_follower_fences_nobody():
    inner = MemoryStore()
    hooked = Hooked(inner)
    writer = make_writer(hooked, "aaaaaaaa")

    def follower() -> None:
        other = make_writer(inner, "cccccccc", epoch=False)
        other._reader.since_checkpoint = 1
        assert other.write_checkpoint(force=True)

    hooked.after["put", "00002"] = follower
    writer.append(say("a"))
    assert writer.number == 2

    def faster() -> None:
        other = make_writer(inner, "cccccccc", epoch=False)
        other.append(say("x"))
        assert other.write_checkpoint(force=True)

    hooked.after["put", "00003"] = faster
    writer.append(say("b"))
    writer.append(say("c"))
    assert history(inner).values == ["epoch 1", "a", "b", "x", "c"]
    assert checkpoint_key(PREFIX, 4) in {info.key for info in inner.list("")}


def test_any_thread_may_append_and_write_checkpoints():
    store = MemoryStore()
    writer = make_writer(store)

    def body(name: str) -> None:
        for number in range(30):
            writer.append(say(f"{name}{number}"))
            writer.write_checkpoint(force=True)

    threads = [threading.Thread(target=body, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(writer.state.values)) == 91
    for info in list(store.list(PREFIX)):
        if info.key.endswith(".checkpoint"):
            number = int(info.key[-31:-11])
            found = JournalReader(store, PREFIX, ToyMachine()).read_checkpoint(number)
            assert found
            assert found[0].said == writer.state.said[:number]


# -- what lies behind a number that was won ------------------------------------------------------


def numbered(store: ObjectStore, writer: str, number: int, previous: int) -> int:
    """Another's entry under a number; its checksum."""
    data = encode_entry(Entry(number, 1, writer, 0, say("another's"), previous))
    store.put_if_absent(entry_key(PREFIX, number), data)
    return checksum(data)


def test_a_checkpoint_behind_another_zombie_s_entry_fences_as_well():
    """Both had been asleep while the journal was rebuilt; the other's entry follows ours, and says nothing for it."""
    store = MemoryStore()
    hooked = Hooked(store)
    writer = make_writer(hooked)
    far = JournalReader(store, PREFIX, ToyMachine())
    far.place(Toy(2), 10**12)

    def others() -> None:
        store.put_if_absent(checkpoint_key(PREFIX, 10**12), far.checkpoint_bytes())
        ours = store.get(entry_key(PREFIX, 2))
        numbered(store, "0badcafe", 3, checksum(ours))

    writer._reader._store = hooked
    hooked.after["put", "00002"] = others
    writer.epoch = 0  # a guest: no epoch that could be refused
    with pytest.raises(FencedError, match="the journal was rebuilt"):
        writer.append(say("dropped"))
    assert "dropped" not in history(store).values


@pytest.mark.parametrize("later", [1, 3])
def test_entries_behind_a_won_number_must_follow_one_from_the_other(later: int):
    store = MemoryStore()
    hooked = Hooked(store)
    writer = make_writer(hooked)

    def others() -> None:
        last = checksum(store.get(entry_key(PREFIX, 2)))
        for number in range(3, 3 + later):
            last = numbered(store, "bbbbbbbb", number, last)
        numbered(store, "bbbbbbbb", 3 + later, 12345)

    hooked.after["put", "00002"] = others
    writer.epoch = 0
    with pytest.raises(FencedError):
        writer.append(say("not history"))


def test_a_guest_s_entries_and_checkpoints_that_follow_from_ours_are_no_fence():
    store = MemoryStore()
    hooked = Hooked(store)
    writer = make_writer(hooked)

    def others() -> None:
        guest = make_writer(store, "bbbbbbbb", epoch=False)
        assert guest.write_checkpoint(force=True)  # of our own entry
        guest.append(say("a guest's"))
        assert guest.write_checkpoint(force=True)
        guest.append(say("another"))

    hooked.after["put", "00002"] = others
    assert writer.append(say("ours")).number == 2
    assert writer.append(say("more")).number == 5
    assert history(store).values == ["epoch 1", "ours", "a guest's", "another", "more"]


def test_a_damaged_checkpoint_behind_a_won_number_is_believed_by_nobody():
    store = MemoryStore()
    hooked = Hooked(store)
    writer = make_writer(hooked)
    hooked.after["put", "00002"] = lambda: store.put_if_absent(checkpoint_key(PREFIX, 2), b"bad")
    assert writer.append(say("ours")).number == 2


@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.LOST_REQUEST, Fault.LOST_ANSWER])
def test_a_guest_gives_up_a_store_that_refuses_for_too_long(fault: Fault):
    store = MemoryStore()
    make_writer(store)
    clock = ManualClock()
    flaky = faulty(store, Rule(fault, PUT, times=10**6))
    guest = JournalWriter(
        flaky,
        PREFIX,
        ToyMachine(),
        writer="bbbbbbbb",
        clock=clock,
        rng=random.Random(1),
        stop=threading.Event(),
        give_up_s=60,
    )
    guest.catch_up()
    if fault is Fault.LOST_ANSWER:  # it is there, and nobody can be asked about it
        flaky.add(Rule(Fault.UNAVAILABLE, frozenset({"get"}), times=10**6))
    begin_s = clock.monotonic_s()
    with pytest.raises(StoreUnavailableError, match="written"):
        guest.append(say("x"))
    assert 40 < clock.monotonic_s() - begin_s <= 60
    with pytest.raises(ClosedError):
        guest.append(say("y"))
