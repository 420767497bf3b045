"""What lies beside a journal tells when it is gone or has lost its end; a writer at work between two looks is neither."""

from __future__ import annotations

import json
import random
import threading
from typing import TYPE_CHECKING

import pytest
from support.journals import PREFIX, Toy, ToyMachine, make_writer, say

from backends.memory import MemoryStore
from backends.testing.faulty import READS, Fault, FaultyStore, Rule
from backends.wrapping import WrappingStore
from tiered.clock import ManualClock
from tiered.errors import InvalidError, JournalLostError, OtherVersionError
from tiered.journal.append import JournalWriter
from tiered.journal.entry import seal_text
from tiered.journal.lease import Holder, JournalEnd, Lease, read_lease
from tiered.journal.replay import JournalReader
from tiered.keys import JOURNAL, LEASE, checkpoint_key, entry_key
from tiered.upkeep.workplace import break_lease

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from backends.base import ObjectInfo, ObjectStore

HOLDER = Holder("elsewhere", "another-boot", "pid:[1]", 4711, 99)
DATA = PREFIX + "queue/one"


class GuardedToy(ToyMachine):
    """Has objects below ``queue/`` and ``index/``."""

    data_roots = ("queue/", "index/")

    def history(self, state: Toy) -> str:
        return "the-toy's"

    def is_data(self, key: str) -> bool:
        return not key.endswith("notes")


def reader_of(store: ObjectStore) -> JournalReader[Toy]:
    return JournalReader(store, PREFIX, GuardedToy())


def opened(store: ObjectStore) -> JournalReader[Toy]:
    reader = reader_of(store)
    reader.catch_up()
    return reader


def lease_of(
    store: ObjectStore, known: Callable[[], JournalEnd], writer: str = "aaaaaaaa"
) -> Lease:
    clock = ManualClock()
    return Lease(store, PREFIX, writer=writer, holder=HOLDER, seconds=9, clock=clock, known=known)


def remembered(store: ObjectStore) -> JournalEnd:
    found, _ = read_lease(store, PREFIX + LEASE)
    assert found
    return found.end


def written(count: int = 5) -> MemoryStore:
    """A journal of ``count`` entries of epoch 1, a lease that was given back, and an object."""
    store = MemoryStore()
    writer = make_writer(store)
    lease = lease_of(store, lambda: writer.end)
    assert lease.try_acquire() is None
    store.put_if_absent(DATA, b"data")
    for value in range(2, count + 1):
        writer.append(say(value))
    lease.release()
    return store


def cut(store: ObjectStore, behind: int) -> None:
    """The journal loses what lies behind an entry."""
    for info in list(store.list(PREFIX + JOURNAL)):
        if int(info.key.rpartition("/")[2].partition(".")[0]) > behind:
            store.delete(info.key)


def test_a_new_tier_and_a_whole_one_are_opened():
    assert opened(MemoryStore()).number == 0
    assert opened(written()).number == 5


@pytest.mark.parametrize("root", ["queue/", "index/"])
def test_objects_without_an_entry_are_a_lost_journal(root: str):
    store = MemoryStore()
    store.put_if_absent(PREFIX + root + "some", b"")
    with pytest.raises(JournalLostError, match=f"there is no journal.*{root}some.*tiered rebuild"):
        opened(store)
    assert opened_elsewhere(store).number == 0


def test_what_is_somebody_else_s_is_no_trace_of_a_journal():
    store = MemoryStore()
    for root in GuardedToy.data_roots:
        store.put_if_absent(PREFIX + root + "notes", b"")
    assert opened(store).number == 0
    store.put_if_absent(PREFIX + "index/some", b"")
    with pytest.raises(JournalLostError, match="index/some"):
        opened(store)


def opened_elsewhere(store: ObjectStore) -> JournalReader[Toy]:
    reader = JournalReader(store, "00000000_c/other/", GuardedToy())
    reader.catch_up()
    return reader


@pytest.mark.parametrize("left", range(5))
def test_a_journal_that_ends_before_what_the_lease_remembers_is_refused(left: int):
    store = written()
    assert remembered(store)[:2] == (1, 5)
    store.delete(DATA)
    cut(store, left)
    with pytest.raises(JournalLostError, match=f"ends with entry {left} .* entry 5"):
        opened(store)


def test_a_journal_that_lost_a_epoch_is_refused_though_its_number_is_as_high():
    store = written()
    second = make_writer(store, "bbbbbbbb")
    lease = lease_of(store, lambda: second.end, "bbbbbbbb")
    assert lease.try_acquire() is None
    lease.release()
    assert remembered(store)[:2] == (2, 6)
    cut(store, 5)
    make_writer_of_epoch_1(store).append(say("restored from elsewhere"))
    with pytest.raises(JournalLostError, match="epoch 2"):
        opened(store)


def make_writer_of_epoch_1(store: ObjectStore) -> JournalWriter[Toy]:
    writer = make_writer(store, "0badcafe", epoch=False)
    writer.epoch = 1
    return writer


def guarded_writer(store: ObjectStore) -> JournalWriter[Toy]:
    return JournalWriter(
        store,
        PREFIX,
        GuardedToy(),
        writer="bbbbbbbb",
        clock=ManualClock(),
        rng=random.Random(1),
        stop=threading.Event(),
    )


def test_a_writer_is_refused_before_it_writes_anything():
    store = written()
    cut(store, 3)
    before = {info.key for info in store.list("")}
    writer = guarded_writer(store)
    with pytest.raises(JournalLostError):
        writer.take_epoch({})
    with pytest.raises(JournalLostError):  # and again: it is looked until it is whole
        writer.catch_up()
    assert {info.key for info in store.list("")} == before


def test_what_a_lease_told_when_it_was_taken_is_held_against_the_journal():
    store = written()
    writer = make_writer(store, "bbbbbbbb", epoch=False)  # it knows nothing of leases by itself
    with pytest.raises(JournalLostError, match="lost its end"):
        writer.take_epoch({}, remembered=JournalEnd(1, 6))
    assert writer.number == 5


def test_an_opening_has_each_of_its_requests_tried_again_by_itself():
    """It makes one for the journal and one for each root: tried as a whole, each would have to answer in the same try."""
    store = MemoryStore()
    rules = [
        Rule(Fault.UNAVAILABLE, READS, part, times=6)
        for part in (JOURNAL, "queue/", "index/", LEASE)
    ]
    writer = guarded_writer(FaultyStore(store, random.Random(7), *rules))
    writer.take_epoch({})
    assert writer.number == 1
    assert not any(rule.times for rule in rules)


# -- what the lease remembers -------------------------------------------------------------------


def test_taking_renewing_and_releasing_remember_the_last_entry_that_is_history():
    store = MemoryStore()
    writer = make_writer(store)
    lease = lease_of(store, lambda: writer.end)
    lease.try_acquire()
    assert remembered(store)[:2] == (1, 1)
    writer.append(say("a"))
    assert remembered(store)[:2] == (1, 1)  # it may lag
    lease.renew()
    assert remembered(store)[:2] == (1, 2)
    writer.append(say("b"))
    lease.release()
    assert remembered(store)[:2] == (1, 3)


def test_who_knows_less_takes_over_what_is_remembered():
    store = written()
    lease = lease_of(store, JournalEnd, "bbbbbbbb")  # it read the journal long ago, and waited
    assert lease.try_acquire() is None
    assert lease.remembered[:2] == (1, 5)
    lease.renew()
    lease.release()
    assert remembered(store)[:2] == (1, 5)


def test_a_broken_lease_remembers():
    store = written()
    lease = lease_of(store, JournalEnd, "bbbbbbbb")
    assert lease.try_acquire() is None
    assert break_lease(store, PREFIX, ManualClock(), breaker="0000b4ea")
    assert remembered(store)[:2] == (1, 5)
    cut(store, 4)
    with pytest.raises(JournalLostError):
        opened(store)


@pytest.mark.parametrize("said", [b"", b"nonsense", seal_text({"format": 2})])
def test_a_lease_that_says_nothing_hinders_nobody(said: bytes):
    store = written()
    store.delete(PREFIX + LEASE)
    store.put_if_absent(PREFIX + LEASE, said)
    assert opened(store).number == 5


@pytest.mark.parametrize("number", ["7", None, True])
def test_a_lease_of_another_form_stops_no_reader(number: object):
    store = written()
    data, version = store.get_versioned(PREFIX + LEASE)
    bad = {**json.loads(data.partition(b"\n")[0]), "number": number}
    store.compare_and_set(PREFIX + LEASE, seal_text(bad), version)
    with pytest.raises(OtherVersionError):
        read_lease(store, PREFIX + LEASE)
    assert opened(store).number == 5


@pytest.mark.parametrize("number", [-1, 10**20])
def test_a_lease_that_remembers_nonsense_remembers_nothing(number: object):
    store = written()
    data, version = store.get_versioned(PREFIX + LEASE)
    good = data.partition(b"\n")[0].decode()
    bad = {**json.loads(good), "number": number}
    store.compare_and_set(PREFIX + LEASE, seal_text(bad), version)
    assert read_lease(store, PREFIX + LEASE)[0] is None
    assert opened(store).number == 5


# -- others at work -----------------------------------------------------------------------------


class Racing(WrappingStore):
    """Does something just before a request of a kind, once."""

    def __init__(self, inner: ObjectStore, wanted: str, act: Callable[[], object]) -> None:
        super().__init__(inner)
        self._wanted = wanted
        self._act: Callable[[], object] | None = act

    def _meet(self, key: str) -> None:
        if self._act and key.startswith(PREFIX + self._wanted):
            act, self._act = self._act, None
            act()

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        self._meet(prefix)
        yield from self._inner.list(prefix, start_after=start_after)

    def get_versioned(self, key: str) -> tuple[bytes, str]:
        self._meet(key)
        return self._inner.get_versioned(key)


def test_a_tier_that_begins_between_our_looks_is_not_lost():
    store = MemoryStore()

    def begin() -> None:
        writer = make_writer(store)
        store.put_if_absent(DATA, b"data")
        writer.append(say("a"))

    assert opened(Racing(store, "queue/", begin)).number == 2


def test_a_tier_that_grows_between_our_looks_has_not_lost_its_end():
    store = written()

    def grow() -> None:
        writer = make_writer(store, "bbbbbbbb")
        lease = lease_of(store, lambda: writer.end, "bbbbbbbb")
        assert lease.try_acquire() is None
        writer.append(say("more"))
        lease.renew()

    assert opened(Racing(store, LEASE, grow)).number == 7


def test_a_follower_is_not_asked_again_and_a_whole_journal_costs_one_request_more():
    store = written()
    asked: list[str] = []

    class Counting(WrappingStore):
        def get_versioned(self, key: str) -> tuple[bytes, str]:
            asked.append(key)
            return super().get_versioned(key)

        def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
            asked.append(prefix)
            return super().list(prefix, start_after=start_after)

    reader = opened(Counting(store))
    assert asked == [PREFIX + JOURNAL, PREFIX + LEASE]
    for _ in range(3):
        reader.catch_up()
    assert asked[2:] == [PREFIX + JOURNAL] * 3


def test_a_checkpoint_without_its_entries_counts_as_far_as_it_goes():
    store = written()
    writer = make_writer(store, "bbbbbbbb", epoch=False)
    assert writer.write_checkpoint(force=True)
    for number in range(1, 6):
        store.delete(entry_key(PREFIX, number))
    assert opened(store).number == 5
    store.delete(checkpoint_key(PREFIX, 5))
    with pytest.raises(JournalLostError):
        opened(store)


def test_a_lease_of_a_newer_format_is_told_where_it_matters():
    store = written()
    store.delete(PREFIX + LEASE)
    store.put_if_absent(PREFIX + LEASE, seal_text({"format": 2}))
    assert opened(store).number == 5
    with pytest.raises(InvalidError):
        lease_of(store, JournalEnd).try_acquire()
