"""The lease: polite writers keep apart, a dead one is replaced, and nobody believes that he has it who has not."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from backends.errors import BackendError, UnavailableError
from backends.memory import MemoryStore
from backends.testing.faulty import Fault, FaultyStore, Rule
from tiered.clock import ManualClock
from tiered.errors import FencedError, InvalidError, OtherVersionError
from tiered.journal.entry import seal_text
from tiered.journal.lease import Holder, Lease, LeaseState, encode_lease, read_lease
from tiered.keys import LEASE

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.base import ObjectStore

PREFIX = "00000000_c/b/"
KEY = PREFIX + LEASE
FOREIGN = Holder("elsewhere", "another-boot", "pid:[1]", 4711, 99)
CAS, GET = frozenset({"compare_and_set"}), frozenset({"get"})


def lease_of(
    store: ObjectStore,
    writer: str,
    clock: ManualClock,
    holder: Holder = FOREIGN,
    seconds: float = 9.0,
) -> Lease:
    return Lease(store, PREFIX, writer=writer, holder=holder, seconds=seconds, clock=clock)


def present(store: ObjectStore) -> LeaseState:
    found = read_lease(store, KEY)[0]
    assert found
    return found


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def test_an_absent_lease_is_taken_and_says_who_and_until_when(
    store: MemoryStore, clock: ManualClock
):
    assert lease_of(store, "aaaaaaaa", clock).try_acquire() is None
    assert present(store) == LeaseState(FOREIGN, "aaaaaaaa", clock.now_ms() + 9000, released=False)


def test_the_lease_has_these_bytes(store: MemoryStore, clock: ManualClock):
    lease_of(store, "aaaaaaaa", clock).try_acquire()
    assert store.get(KEY) == (
        b'{"epoch":0,"expires_ms":1700000009000,"format":1,"history":"",'
        b'"holder":{"boot":"another-boot","host":"elsewhere","pid":4711,"space":"pid:[1]","started":99},'
        b'"number":0,"released":false,'
        b'"writer":"aaaaaaaa"}\n' + store.get(KEY)[-9:]
    )


def test_a_living_holder_is_left_in_peace_until_its_lease_expires(
    store: MemoryStore, clock: ManualClock
):
    one, two = lease_of(store, "aaaaaaaa", clock), lease_of(store, "bbbbbbbb", clock)
    assert one.try_acquire() is None
    other = two.try_acquire()
    assert other
    assert other.writer == "aaaaaaaa"
    clock.advance(8.9)
    assert two.try_acquire()
    clock.advance(0.2)
    assert two.try_acquire() is None
    with pytest.raises(FencedError):
        one.renew()


def test_renewing_keeps_the_lease_for_ever(store: MemoryStore, clock: ManualClock):
    one, two = lease_of(store, "aaaaaaaa", clock), lease_of(store, "bbbbbbbb", clock)
    one.try_acquire()
    for _ in range(20):
        clock.advance(one.renewal_seconds)
        one.renew()
        assert two.try_acquire()


def test_a_released_lease_is_free_at_once(store: MemoryStore, clock: ManualClock):
    one, two = lease_of(store, "aaaaaaaa", clock), lease_of(store, "bbbbbbbb", clock)
    one.try_acquire()
    one.release()
    one.release()
    assert two.try_acquire() is None
    one.release()
    assert present(store).writer == "bbbbbbbb"


def test_the_wall_clock_of_the_holder_may_jump(store: MemoryStore, clock: ManualClock):
    one = lease_of(store, "aaaaaaaa", clock)
    one.try_acquire()
    clock.jump(-3600)
    clock.advance(one.renewal_seconds)
    one.renew()


def acquire(lease: Lease, *, wait: bool, stop: Callable[[float], bool]) -> list[str]:
    told: list[str] = []
    lease.acquire(wait=wait, announce=lambda state: told.append(state.writer), stop=stop)
    return told


def passing(clock: ManualClock) -> Callable[[float], bool]:
    """Time passes while somebody waits, and nobody is told to stop."""

    def stop(seconds: float) -> bool:
        clock.advance(seconds)
        return False

    return stop


def test_waiting_for_a_lease_says_so_once_before_it_waits(store: MemoryStore, clock: ManualClock):
    lease_of(store, "aaaaaaaa", clock).try_acquire()
    waited: list[float] = []

    def stop(seconds: float) -> bool:
        waited.append(seconds)
        clock.advance(seconds)
        return False

    assert acquire(lease_of(store, "bbbbbbbb", clock), wait=True, stop=stop) == ["aaaaaaaa"]
    assert 9 <= sum(waited) < 11


def test_who_does_not_wait_or_is_told_to_stop_is_fenced(store: MemoryStore, clock: ManualClock):
    lease_of(store, "aaaaaaaa", clock).try_acquire()
    with pytest.raises(FencedError, match="process 4711 on elsewhere holds the lease"):
        acquire(lease_of(store, "bbbbbbbb", clock), wait=False, stop=lambda _: False)
    with pytest.raises(FencedError):
        acquire(lease_of(store, "bbbbbbbb", clock), wait=True, stop=lambda _: True)


# -- a dead process -----------------------------------------------------------------------------


def test_this_process_is_not_gone():
    holder = Holder.present()
    assert holder.host == socket.gethostname()
    assert holder.pid == os.getpid()
    assert not holder.is_gone()


def test_a_dead_process_of_this_host_is_replaced_at_once(store: MemoryStore, clock: ManualClock):
    code = "from tiered.journal.lease import Holder; from dataclasses import astuple; print(astuple(Holder.present()))"
    with subprocess.Popen(
        [sys.executable, "-c", code + "; input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        assert process.stdin
        holder = Holder(*eval(process.stdout.readline()))
        assert not holder.is_gone()
        lease_of(store, "aaaaaaaa", clock, holder).try_acquire()
        assert lease_of(store, "bbbbbbbb", clock).try_acquire()
        process.kill()
        while not holder.is_gone():  # also while it is a zombie
            pass
        assert process.returncode is None
        acquire(lease_of(store, "bbbbbbbb", clock), wait=False, stop=passing(clock))


@pytest.mark.parametrize(
    "change",
    [{"host": "elsewhere"}, {"boot": "earlier"}, {"space": "pid:[7]"}, {"boot": ""}, {"space": ""}],
)
def test_a_process_of_another_host_boot_or_container_is_not_judged(change: dict[str, str]):
    dead = replace(Holder.present(), started=1)
    assert dead.is_gone()
    assert not replace(dead, **change).is_gone()  # type: ignore[arg-type]


def test_a_process_id_that_is_used_again_is_another_process():
    assert replace(Holder.present(), started=12345).is_gone()
    assert replace(Holder.present(), pid=2**30).is_gone()


# -- damage -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [b"", b"nonsense", seal_text({"format": 1})[:-3], b"X" + seal_text({"format": 1})]
)
def test_a_lease_that_cannot_be_read_is_free(data: bytes, store: MemoryStore, clock: ManualClock):
    store.put_if_absent(KEY, data)
    assert lease_of(store, "aaaaaaaa", clock).try_acquire() is None
    assert present(store).writer == "aaaaaaaa"


@pytest.mark.parametrize("said", [{"format": 1}, {"format": 1, "holder": 3}, {"format": 2}, {}])
def test_a_lease_of_another_version_is_nobody_s_to_take(
    said: dict[str, object], store: MemoryStore, clock: ManualClock
):
    store.put_if_absent(KEY, seal_text(said))
    with pytest.raises(OtherVersionError):
        lease_of(store, "aaaaaaaa", clock).try_acquire()
    assert store.get(KEY) == seal_text(said)


def test_who_loses_the_lease_to_another_version_is_fenced(store: MemoryStore, clock: ManualClock):
    mine = lease_of(store, "aaaaaaaa", clock)
    assert mine.try_acquire() is None
    store.compare_and_set(KEY, seal_text({"format": 2}), store.get_versioned(KEY)[1])
    with pytest.raises(FencedError, match="another version"):
        mine.renew()
    mine.release()
    assert store.get(KEY) == seal_text({"format": 2})


def test_a_lease_until_a_time_that_no_clock_tells_is_as_one_that_cannot_be_read(
    store: MemoryStore, clock: ManualClock
):
    """It ended `status` as a defect of ours, and nobody else could have it for ever."""
    said = LeaseState(FOREIGN, "bbbbbbbb", 10**400, released=False)
    store.put_if_absent(KEY, encode_lease(said))
    assert read_lease(store, KEY)[0] is None
    assert lease_of(store, "aaaaaaaa", clock).try_acquire() is None


def test_a_lease_damaged_while_we_hold_it_is_written_again(store: MemoryStore, clock: ManualClock):
    lease = lease_of(store, "aaaaaaaa", clock)
    lease.try_acquire()
    store.delete(KEY)
    store.put_if_absent(KEY, b"nonsense")
    lease.renew()
    assert present(store).writer == "aaaaaaaa"


def test_a_lease_that_is_taken_away_fences(store: MemoryStore, clock: ManualClock):
    lease = lease_of(store, "aaaaaaaa", clock)
    lease.try_acquire()
    store.delete(KEY)
    with pytest.raises(FencedError):
        lease.renew()
    lease.release()
    assert read_lease(store, KEY) == (None, None)


def test_a_lease_of_a_newer_format_is_not_taken(store: MemoryStore, clock: ManualClock):
    store.put_if_absent(KEY, seal_text({"format": 2}))
    with pytest.raises(InvalidError):
        lease_of(store, "aaaaaaaa", clock).try_acquire()


# -- unknown outcomes ---------------------------------------------------------------------------


def faulty(store: MemoryStore, *rules: Rule) -> FaultyStore:
    return FaultyStore(store, random.Random(1), *rules)


def test_i7_a_lost_answer_is_read_back(store: MemoryStore, clock: ManualClock):
    flaky = faulty(store, Rule(Fault.LOST_ANSWER, CAS, times=2))
    lease = lease_of(flaky, "aaaaaaaa", clock)
    assert lease.try_acquire() is None
    clock.advance(3)
    lease.renew()
    assert present(store).expires_ms == clock.now_ms() + 9000
    clock.advance(3)
    lease.renew()


def test_i7_a_lost_request_is_made_again(store: MemoryStore, clock: ManualClock):
    flaky = faulty(store, Rule(Fault.LOST_REQUEST, CAS))
    assert lease_of(flaky, "aaaaaaaa", clock).try_acquire() is None
    assert present(store).writer == "aaaaaaaa"


def test_i7_requests_lost_again_and_again_are_an_error_and_calling_again_is_harmless(
    store: MemoryStore, clock: ManualClock
):
    flaky = faulty(store, Rule(Fault.LOST_REQUEST, CAS, times=6))
    lease = lease_of(flaky, "aaaaaaaa", clock)
    with pytest.raises(BackendError):
        lease.try_acquire()
    assert lease.try_acquire() is None


def test_i7_a_renewal_that_lands_late_does_not_fence_us(store: MemoryStore, clock: ManualClock):
    flaky = faulty(store)
    lease = lease_of(flaky, "aaaaaaaa", clock)
    lease.try_acquire()
    flaky.add(Rule(Fault.LATE, CAS))
    clock.advance(3)
    with pytest.raises(BackendError):
        lease.renew()
    flaky.land_late()
    clock.advance(1)
    lease.renew()
    assert present(store).expires_ms == clock.now_ms() + 9000
    lease.release()
    assert present(store).released


def test_i7_a_late_landing_cannot_take_the_lease_back_from_another(
    store: MemoryStore, clock: ManualClock
):
    flaky = faulty(store)
    lease = lease_of(flaky, "aaaaaaaa", clock)
    lease.try_acquire()
    flaky.add(Rule(Fault.LATE, CAS))
    clock.advance(1)
    with pytest.raises(BackendError):
        lease.renew()
    clock.advance(20)
    acquire(lease_of(store, "bbbbbbbb", clock), wait=False, stop=passing(clock))
    flaky.land_late()
    assert present(store).writer == "bbbbbbbb"
    with pytest.raises(FencedError):
        lease.renew()


@pytest.mark.parametrize("is_taken", [False, True])
def test_an_outage_of_any_length_ends_only_who_was_replaced(
    store: MemoryStore, clock: ManualClock, is_taken: bool
):
    flaky = faulty(store)
    lease = lease_of(flaky, "aaaaaaaa", clock)
    lease.try_acquire()
    flaky.add(Rule(Fault.UNAVAILABLE, CAS, times=20))
    for _ in range(20):
        clock.advance(lease.renewal_seconds)
        with pytest.raises(UnavailableError):
            lease.renew()
    if is_taken:
        acquire(lease_of(store, "bbbbbbbb", clock), wait=False, stop=passing(clock))
        with pytest.raises(FencedError, match="another writer"):
            lease.renew()
    else:
        lease.renew()
        assert lease_of(store, "bbbbbbbb", clock).try_acquire()


def test_release_that_fails_is_no_error(store: MemoryStore, clock: ManualClock):
    flaky = faulty(store)
    lease = lease_of(flaky, "aaaaaaaa", clock)
    lease.try_acquire()
    flaky.add(Rule(Fault.UNAVAILABLE, CAS))
    lease.release()
    assert not present(store).released


def test_of_many_that_try_at_once_one_gets_it(store: MemoryStore, clock: ManualClock):
    barrier, got = threading.Barrier(8), []

    def body(number: int) -> None:
        lease = lease_of(store, f"{number:08x}", clock)
        barrier.wait()
        if lease.try_acquire() is None:
            got.append(number)

    threads = [threading.Thread(target=body, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [f"{number:08x}" for number in got] == [present(store).writer]


class Beside(ManualClock):
    """Time passes by waiting; another writer, whose clock is behind, renews as it should."""

    def __init__(self, now_ms: int, theirs: ManualClock) -> None:
        super().__init__(now_ms)
        self.theirs = theirs
        self.lease: Lease | None = None

    def stop(self, seconds: float) -> bool:
        self.advance(seconds)
        self.theirs.advance(seconds)
        if self.lease:
            self.lease.renew()
        return False


@pytest.mark.parametrize("seconds", [9.0, 60.0])
def test_who_does_not_wait_leaves_a_living_holder_whose_clock_is_behind(
    store: MemoryStore, clock: ManualClock, seconds: float
):
    ours = Beside(clock.now_ms() + 7_200_000, clock)
    ours.lease = lease_of(store, "aaaaaaaa", clock)
    ours.lease.try_acquire()
    two = lease_of(store, "bbbbbbbb", ours, seconds=seconds)
    with pytest.raises(FencedError, match=r"renews its lease.*about 7\d\d\d s behind ours"):
        acquire(two, wait=False, stop=ours.stop)
    assert present(store).writer == "aaaaaaaa"


def test_who_waits_leaves_a_living_holder_whose_clock_is_behind_until_it_ends(
    store: MemoryStore, clock: ManualClock
):
    ours = Beside(clock.now_ms() + 7_200_000, clock)
    ours.lease = lease_of(store, "aaaaaaaa", clock)
    ours.lease.try_acquire()
    two = lease_of(store, "bbbbbbbb", ours)

    def stop(seconds: float) -> bool:
        if ours.monotonic_s() > 100:
            ours.lease = None  # it was killed
        return ours.stop(seconds)

    acquire(two, wait=True, stop=stop)
    assert ours.monotonic_s() > 100
    assert present(store).writer == "bbbbbbbb"


def test_an_expired_lease_that_nobody_renews_is_taken_after_a_while(
    store: MemoryStore, clock: ManualClock
):
    lease_of(store, "aaaaaaaa", clock).try_acquire()
    clock.advance(1000)
    ours = Beside(clock.now_ms(), clock)
    acquire(lease_of(store, "bbbbbbbb", ours), wait=False, stop=ours.stop)
    assert 9 <= ours.monotonic_s() < 12
