"""Stores around stores: what they try again, count, and break."""

from __future__ import annotations

import random
import threading
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.case_folding import CaseFoldingStore

from backends.base import ByteRange, Capabilities, ObjectStore, Version
from backends.errors import (
    SETTINGS,
    AlreadyExistsError,
    BackendError,
    ObjectNotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    ShortReadError,
    StoreFullError,
    UnavailableError,
    UnknownOutcomeError,
    UnreachableError,
    UnsupportedError,
)
from backends.memory import MemoryStore
from backends.registry import probe
from backends.testing.contract import ObjectStoreContract
from backends.testing.faulty import (
    READS,
    WRITES,
    Event,
    Fault,
    FaultyStore,
    Rule,
    SimulatedCrash,
)
from backends.wrapping import (
    MeteredStore,
    Prices,
    RetryingStore,
    RetryPolicy,
    WrappingStore,
    plan_delay_s,
    put_own,
    set_own,
)
from tiered.api.stores import with_retries
from tiered.clock import ManualClock, SystemClock

if TYPE_CHECKING:
    from collections.abc import Iterator


class Bench:
    """A retrying store over a faulty one over memory, on a clock that stands still."""

    def __init__(self, *rules: Rule, **policy: float) -> None:
        self.memory = MemoryStore()
        self.faulty = FaultyStore(self.memory, random.Random(1), *rules)
        self.clock = ManualClock()
        self.stop = threading.Event()
        self.store = RetryingStore(
            self.faulty,
            clock=self.clock,
            rng=random.Random(2),
            stop=self.stop,
            policy=replace(RetryPolicy(), **policy),
        )

    @property
    def tries(self) -> int:
        return len(self.faulty.events)


class TestRetryingStoreWithoutFaults(ObjectStoreContract):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return RetryingStore(
            MemoryStore(), clock=SystemClock(), rng=random.Random(1), stop=threading.Event()
        )


class TestRetryingStoreWithFaults(ObjectStoreContract):
    """Two of ten requests fail, and nobody notices; but for compare-and-set, which is not repaired."""

    @pytest.fixture
    def store(self) -> ObjectStore:
        faults = [
            Rule(Fault.UNAVAILABLE, WRITES | READS, times=None, probability=0.1),
            Rule(Fault.LOST_ANSWER, frozenset({"put", "delete"}), times=None, probability=0.1),
            Rule(Fault.LOST_REQUEST, frozenset({"put", "delete"}), times=None, probability=0.1),
            Rule(Fault.CUT, frozenset({"list"}), times=None, probability=0.1),
        ]
        return RetryingStore(
            FaultyStore(MemoryStore(), random.Random(3), *faults),
            clock=ManualClock(),
            rng=random.Random(1),
            stop=threading.Event(),
            policy=RetryPolicy(tries_max=1000, deadline_s=1e9),
        )


class TestMeteredStore(ObjectStoreContract):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return MeteredStore(MemoryStore())


class TestFaultyStoreWithoutRules(ObjectStoreContract):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return FaultyStore(MemoryStore(), random.Random(1))


def test_put_is_tried_until_it_is_done():
    bench = Bench(Rule(Fault.UNAVAILABLE, times=3))
    bench.store.put_if_absent("k", [b"a", b"b"])
    assert bench.memory.get("k") == b"ab"
    assert bench.tries == 4
    assert 0.05 + 0.1 + 0.2 <= bench.clock.monotonic_s() <= 0.1 + 0.2 + 0.4


def test_lost_answer_of_a_put_is_settled_by_reading():
    bench = Bench(Rule(Fault.LOST_ANSWER))
    bench.store.put_if_absent("k", [b"a", b"b"])
    assert [event.operation for event in bench.faulty.events] == ["put", "put", "get"]


def test_lost_answer_and_anothers_object():
    bench = Bench(Rule(Fault.LOST_REQUEST))
    bench.memory.put_if_absent("k", b"other")
    with pytest.raises(AlreadyExistsError):
        bench.store.put_if_absent("k", b"mine!")
    assert bench.memory.get("k") == b"other"


def test_what_exists_is_not_taken_for_ours_without_a_reason():
    """Equal bytes that were there before are no success, unless a try of ours may have put them."""
    bench = Bench()
    bench.memory.put_if_absent("k", b"same")
    with pytest.raises(AlreadyExistsError):
        bench.store.put_if_absent("k", b"same")
    assert bench.tries == 1


@pytest.mark.parametrize("last", [Fault.UNAVAILABLE, Fault.DENIED, Fault.FULL])
def test_outcome_stays_unknown_whatever_comes_last(last: Fault):
    bench = Bench(Rule(Fault.LATE), Rule(last, times=None))
    with pytest.raises(UnknownOutcomeError):
        bench.store.put_if_absent("k", b"1")
    assert bench.faulty.land_late() == 1
    assert bench.memory.get("k") == b"1"


def test_outcome_stays_unknown_when_it_cannot_be_read():
    bench = Bench(Rule(Fault.LOST_ANSWER), Rule(Fault.DENIED, READS))
    with pytest.raises(UnknownOutcomeError):
        bench.store.put_if_absent("k", b"1")


def test_late_landing_beside_a_second_try():
    bench = Bench(Rule(Fault.LATE))
    bench.store.put_if_absent("k", b"1")
    bench.faulty.land_late()
    assert bench.memory.get("k") == b"1"


def test_what_is_not_retriable_is_not_tried_again():
    for fault, kind in ((Fault.DENIED, PermissionDeniedError), (Fault.CUT, ShortReadError)):
        bench = Bench(Rule(fault, WRITES | READS, times=None))
        bench.memory.put_if_absent("k", b"1")
        with pytest.raises(kind):
            bench.store.get("k")
        assert bench.tries == 1


def test_compare_and_set_is_tried_again_only_when_nothing_was_written():
    bench = Bench(Rule(Fault.UNAVAILABLE, times=2), Rule(Fault.LOST_ANSWER))
    with pytest.raises(UnknownOutcomeError):
        bench.store.compare_and_set("k", b"1", None)
    assert bench.tries == 3
    data, version = bench.store.get_versioned("k")
    assert data == b"1"
    bench.store.compare_and_set("k", b"2", version)
    with pytest.raises(PreconditionFailedError):
        bench.store.compare_and_set("k", b"3", version)


def test_delete_is_tried_again():
    bench = Bench(Rule(Fault.LOST_ANSWER, times=2))
    bench.memory.put_if_absent("k", b"")
    bench.store.delete("k")
    assert bench.tries == 3


def test_to_ask_whether_it_was_us_begins_no_deadline_anew():
    bench = Bench(Rule(Fault.UNAVAILABLE, READS, times=None), tries_max=10**6, deadline_s=60)
    bench.memory.put_if_absent("k", b"ours")
    began: list[float] = []

    class Losing(WrappingStore):
        """Answers are lost for most of the time that there is; reads fail for ever."""

        def put_if_absent(self, key: str, data: object) -> None:
            if bench.clock.monotonic_s() < 50:
                raise UnknownOutcomeError("no answer")
            raise AlreadyExistsError("there")

        def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
            began.append(bench.clock.monotonic_s())
            return super().get(key, byte_range)

    bench.store._inner = Losing(bench.faulty)
    with pytest.raises(UnknownOutcomeError):
        bench.store.put_if_absent("k", b"ours")
    assert began
    assert max(began) <= 60


def test_a_put_that_is_carried_out_twice_is_ours_by_its_bytes():
    bench = Bench(Rule(Fault.TWICE, times=None))
    put_own(bench.faulty, "k", [b"a", b"", b"b"])
    put_own(bench.store, "l", b"")
    version = set_own(bench.faulty, "m", b"1", None)
    assert set_own(bench.store, "m", b"2", version) == bench.memory.get_versioned("m")[1]
    assert [bench.memory.get(key) for key in "klm"] == [b"ab", b"", b"2"]


@pytest.mark.parametrize("other", [b"ac", b"a", b"abc", b""])
def test_a_stranger_has_other_bytes(other: bytes):
    bench = Bench()
    bench.memory.put_if_absent("k", other)
    with pytest.raises(AlreadyExistsError):
        put_own(bench.faulty, "k", [b"a", b"b"])
    for expected in (None, Version("another")):
        with pytest.raises(PreconditionFailedError):
            set_own(bench.faulty, "k", b"ab", expected)
    assert bench.memory.get("k") == other


def test_who_cannot_look_does_not_know():
    bench = Bench(
        Rule(Fault.TWICE, times=None),
        Rule(Fault.DENIED, READS, times=1),
        Rule(Fault.UNAVAILABLE, READS, times=1),
    )
    with pytest.raises(UnknownOutcomeError):
        put_own(bench.faulty, "k", b"1")
    with pytest.raises(UnknownOutcomeError):
        set_own(bench.faulty, "l", b"1", None)


def test_what_was_deleted_meanwhile_is_not_ours_to_name():
    bench = Bench()

    class Gone(WrappingStore):
        def put_if_absent(self, key: str, data: object) -> None:
            raise AlreadyExistsError(key)

    with pytest.raises(AlreadyExistsError):
        put_own(Gone(bench.faulty), "k", b"1")
    with pytest.raises(PreconditionFailedError):
        set_own(bench.faulty, "k", b"1", Version("another"))


def test_listing_goes_on_where_it_broke_off():
    bench = Bench(Rule(Fault.CUT, READS, times=5))
    keys = [f"{number:03d}" for number in range(100)]
    for key in keys:
        bench.memory.put_if_absent(key, b"")
    assert [found.key for found in bench.store.list("")] == keys
    assert bench.tries > 3


def test_what_is_done_between_two_keys_of_a_listing_does_not_count_as_trying():
    bench = Bench(Rule(Fault.CUT, READS, times=5), deadline_s=60)
    keys = [f"{number:03d}" for number in range(100)]
    for key in keys:
        bench.memory.put_if_absent(key, b"")
    found = []
    for info in bench.store.list(""):
        found.append(info.key)
        bench.clock.advance(61)
    assert found == keys
    assert bench.tries > 3


def test_gives_up_after_so_many_tries():
    bench = Bench(Rule(Fault.UNAVAILABLE, READS, times=None), tries_max=3)
    for call in (bench.store.get, bench.store.head, lambda key: list(bench.store.list(key))):
        bench.faulty.events.clear()
        with pytest.raises(UnavailableError):
            call("k")
        assert bench.tries == 3


def test_gives_up_at_the_deadline():
    bench = Bench(Rule(Fault.UNAVAILABLE, READS, times=None), tries_max=10**6, deadline_s=60)
    with pytest.raises(UnavailableError):
        bench.store.get("k")
    assert 45 <= bench.clock.monotonic_s() <= 60


def test_gives_up_when_told_to_stop():
    bench = Bench(Rule(Fault.UNAVAILABLE, READS, times=None))
    bench.stop.set()
    with pytest.raises(UnavailableError):
        bench.store.get("k")
    assert bench.tries == 1


class Silent(WrappingStore):
    """Nobody listens while ``is_silent``."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.is_silent = True
        self.tries = 0

    @property
    def _inner(self) -> ObjectStore:  # every call goes through it
        self.tries += 1
        if self.is_silent:
            raise UnreachableError("nobody listens")
        return self._real

    @_inner.setter
    def _inner(self, inner: ObjectStore) -> None:
        self._real = inner


class Contact:
    """A retrying store over one that may be silent, on a clock that stands still."""

    def __init__(self) -> None:
        self.silent = Silent(MemoryStore())
        self.clock = ManualClock()
        self.store = RetryingStore(
            self.silent, clock=self.clock, rng=random.Random(1), stop=threading.Event()
        )

    def seconds_until_given_up(self) -> float:
        began_s = self.clock.monotonic_s()
        with pytest.raises(UnreachableError):
            self.store.get("k")
        return self.clock.monotonic_s() - began_s


@pytest.mark.parametrize("name", ["put", "set", "get", "list"])
def test_first_contact_is_given_up_soon(name: str):
    contact = Contact()
    store = contact.store
    calls = {
        "put": lambda: store.put_if_absent("k", b"1"),
        "set": lambda: store.compare_and_set("k", b"1", None),
        "get": lambda: store.get("k"),
        "list": lambda: list(store.list("")),
    }
    with pytest.raises(UnreachableError):
        calls[name]()
    assert 1 <= contact.clock.monotonic_s() <= 4
    assert 3 <= contact.silent.tries <= 6  # a server that is just starting is waited for a little


ANSWERS = {
    "put": lambda store: store.put_if_absent("new", b"1"),
    "taken": lambda store: store.put_if_absent("k", b"1"),
    "set": lambda store: store.compare_and_set("new", b"1", None),
    "refused": lambda store: store.compare_and_set("k", b"1", None),
    "get": lambda store: store.get("k"),
    "gone": lambda store: store.get("gone"),
    "key": lambda store: next(store.list("")),
    "nothing": lambda store: list(store.list("none")),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_after_any_answer_an_outage_is_waited_out(name: str):
    contact = Contact()
    contact.silent.is_silent = False
    contact.silent._real.put_if_absent("k", b"0")
    with suppress(AlreadyExistsError, ObjectNotFoundError, PreconditionFailedError):
        ANSWERS[name](contact.store)
    contact.silent.is_silent = True
    assert contact.seconds_until_given_up() > 6


def test_a_server_that_answers_badly_is_no_wrong_address():
    bench = Bench(Rule(Fault.UNAVAILABLE, READS, times=None))
    with pytest.raises(UnavailableError):
        bench.store.get("k")
    assert bench.tries == RetryPolicy().tries_max


def test_retries_are_counted_by_the_meter():
    meter = MeteredStore(
        FaultyStore(MemoryStore(), random.Random(1), Rule(Fault.UNAVAILABLE, WRITES, times=2))
    )
    store = with_retries(meter, ManualClock(), random.Random(1), threading.Event())
    store.put_if_absent("k", b"1")
    assert (meter.snapshot().retries, meter.snapshot().errors) == (2, 2)
    store.get("k")
    with pytest.raises(ObjectNotFoundError):
        store.get("gone")
    assert meter.snapshot().retries == 2


def test_a_try_that_is_not_made_is_no_retry():
    counted: list[None] = []
    stop = threading.Event()
    store = RetryingStore(
        Silent(MemoryStore()),
        clock=ManualClock(),
        rng=random.Random(1),
        stop=stop,
        policy=RetryPolicy(tries_max=3),
        on_retry=lambda: counted.append(None),
    )
    for wanted in (2, 0):
        counted.clear()
        with pytest.raises(UnreachableError):
            store.head("k")
        assert len(counted) == wanted
        stop.set()


@given(st.integers(1, 100), st.floats(0, 1, exclude_max=True))
def test_delays_grow_to_a_limit(tries: int, share: float):
    policy = RetryPolicy(first_delay_s=0.1, delay_s_max=10)
    delay_s = plan_delay_s(policy, tries, share)
    longest = min(10, 0.1 * 2 ** (tries - 1))
    assert longest / 2 <= delay_s <= longest


def test_meter_counts_by_kind():
    store = MeteredStore(MemoryStore(), Prices(down_per_gib=1.0))
    store.put_if_absent("a", [b"12", b"345"])
    with pytest.raises(AlreadyExistsError):
        store.put_if_absent("a", b"12")
    store.get("a")
    store.get_ranges("a", [ByteRange(0, 1), ByteRange(1, 3)])
    store.get_versioned("a")
    store.head("a")
    with pytest.raises(ObjectNotFoundError):
        store.head("b")
    version = store.compare_and_set("c", b"123", None)
    with pytest.raises(PreconditionFailedError):
        store.compare_and_set("c", b"1", None)
    assert version
    store.delete("a")
    seen = store.snapshot()
    assert {kind: count.requests for kind, count in seen.kinds.items()} == {
        "put": 2,
        "get": 4,
        "head": 2,
        "compare_and_set": 2,
        "delete": 1,
    }
    assert (seen.requests, seen.errors) == (11, 0)  # what is there, and what is not, are answers
    assert (seen.bytes_up, seen.bytes_down) == (5 + 2 + 3 + 1, 5 + 3 + 5)
    wanted = (4 * 0.005 + 6 * 0.0004) / 1000 + 13 / 2**30
    assert seen.dollars == pytest.approx(wanted)


def test_meter_counts_what_failed():
    """A bucket that is not there is an error, unlike an object."""
    gone = ObjectNotFoundError("no such bucket")
    gone.reason = SETTINGS
    for error in (gone, UnavailableError("busy")):
        store = MeteredStore(MemoryStore())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store.inner, "head", Mock(side_effect=error))
            with pytest.raises(type(error)):
                store.head("a")
        assert store.snapshot().kinds["head"].errors == {type(error).__name__: 1}


def test_meter_has_each_request_timed():
    store, timed = MeteredStore(MemoryStore()), []

    @contextmanager
    def timing(kind: str) -> Iterator[None]:
        timed.append(f"{kind} begins")
        yield
        timed.append(f"{kind} ends")

    store.put_if_absent("a", b"1")
    store.put_if_absent("b", b"1")
    store.timing = timing
    store.get("a")
    listing = store.list("")
    assert next(listing).key == "a"
    timed.append("what its reader does")
    assert [one.key for one in listing] == ["b"]
    assert not list(store.list("c"))
    of_list = ["list begins", "list ends"]
    assert timed == ["get begins", "get ends", *of_list, "what its reader does", *of_list]


def test_meter_counts_pages_of_a_listing():
    memory = MemoryStore()
    for number in range(1001):
        memory.put_if_absent(f"{number:04d}", b"")
    for prefix, pages in (("", 2), ("0", 1), ("none", 1), ("1", 1)):
        store = MeteredStore(memory)
        list(store.list(prefix))
        assert store.snapshot().requests == pages


def test_snapshot_does_not_change():
    store = MeteredStore(MemoryStore())
    before = store.snapshot()
    store.put_if_absent("a", b"")
    assert before.requests == 0
    assert store.snapshot().requests == 1


@pytest.mark.parametrize(
    ("fault", "kind", "stored"),
    [
        (Fault.UNAVAILABLE, UnavailableError, False),
        (Fault.FULL, StoreFullError, False),
        (Fault.DENIED, PermissionDeniedError, False),
        (Fault.LOST_REQUEST, UnknownOutcomeError, False),
        (Fault.LOST_ANSWER, UnknownOutcomeError, True),
        (Fault.LATE, UnknownOutcomeError, False),
        (Fault.CRASH_BEFORE, SimulatedCrash, False),
        (Fault.CRASH_AFTER, SimulatedCrash, True),
    ],
)
def test_faults_of_writes(fault: Fault, kind: type[BaseException], stored: bool):
    store = FaultyStore(MemoryStore(), random.Random(1), Rule(fault))
    with pytest.raises(kind) as caught:
        store.put_if_absent("k", b"1")
    assert type(caught.value) is kind
    assert [found.key for found in store.inner.list("")] == (["k"] if stored else [])
    assert store.events == [Event("put", "k", fault)]


def test_late_writes_keep_their_bytes_and_conditions():
    store = FaultyStore(MemoryStore(), random.Random(1), Rule(Fault.LATE, times=3))
    body = bytearray(b"then")
    for key in ("a", "b", "b"):
        with pytest.raises(UnknownOutcomeError):
            store.put_if_absent(key, body)
    body[:] = b"now!"
    store.put_if_absent("a", b"first")
    assert store.land_late() == 3
    assert store.land_late() == 0
    assert (store.get("a"), store.get("b")) == (b"first", b"then")


def test_a_listing_is_behind_for_the_keys_that_a_rule_names():
    """Only a listing: whoever asks by name gets what is there."""
    store = FaultyStore(MemoryStore(), random.Random(1))
    store.stale = "old/"
    for number in range(12):
        store.put_if_absent(f"old/{number:02}", b"")
        store.put_if_absent(f"new/{number:02}", b"")
    store.delete("old/11")
    found = [{info.key for info in store.list("")} for _ in range(50)]
    everything = {f"{part}/{number:02}" for part in ("old", "new") for number in range(12)}
    sizes = {len(keys & everything) for keys in found}
    assert min(sizes) < 23, "what was just written may not be shown"
    assert any("old/11" in keys for keys in found), "what was just deleted may be shown"
    surely = {f"new/{number:02}" for number in range(12)} | {
        f"old/{number:02}" for number in range(4)
    }
    assert all(surely <= keys for keys in found)
    assert store.get("old/10") == b""


def test_damage_to_reads():
    store = FaultyStore(
        MemoryStore(), random.Random(1), Rule(Fault.FLIP, READS), Rule(Fault.CUT, READS)
    )
    store.put_if_absent("k", bytes(100))
    wrong = store.get("k")
    assert len(wrong) == 100
    assert sum(byte.bit_count() for byte in wrong) == 1
    with pytest.raises(ShortReadError):
        store.get("k")
    assert store.get("k") == bytes(100)


def test_rules_skip_match_and_heal():
    rule = Rule(Fault.UNAVAILABLE, frozenset({"put"}), key_part="journal/", skip=1, times=None)
    store = FaultyStore(MemoryStore(), random.Random(1), rule)
    store.put_if_absent("data/1", b"")
    store.put_if_absent("journal/1", b"")
    for _ in range(2):
        with pytest.raises(UnavailableError):
            store.put_if_absent("journal/2", b"")
    store.heal()
    store.put_if_absent("journal/2", b"")


def test_a_seed_replays_a_run():
    def run(seed: int) -> list[Event]:
        rule = Rule(Fault.UNAVAILABLE, times=None, probability=0.5)
        store = FaultyStore(MemoryStore(), random.Random(seed), rule)
        for number in range(50):
            try:
                store.put_if_absent(str(number), b"")
            except UnavailableError:
                continue
        return store.events

    assert run(1) == run(1)
    assert run(1) != run(2)


class Deaf(WrappingStore):
    """Ignores conditions, as some servers do."""

    def put_if_absent(self, key: str, data: object) -> None:
        self.inner.delete(key)
        self.inner.put_if_absent(key, data)  # type: ignore[arg-type]  # (passed through)

    def compare_and_set(self, key: str, data: bytes, expected: object) -> object:  # type: ignore[override]
        self.inner.delete(key)
        return self.inner.compare_and_set(key, data, None)


class WritesWhatIsMissing(WrappingStore):
    """Takes any version for a missing key, as some MinIO did."""

    def compare_and_set(self, key: str, data: bytes, expected: object) -> object:  # type: ignore[override]
        try:
            self.inner.head(key)
        except ObjectNotFoundError:
            expected = None
        return self.inner.compare_and_set(key, data, expected)  # type: ignore[arg-type]


class Without(WrappingStore):
    """Has no conditions and says so."""

    def put_if_absent(self, key: str, data: object) -> None:
        raise UnsupportedError("no")

    def compare_and_set(self, key: str, data: bytes, expected: object) -> object:  # type: ignore[override]
        raise UnsupportedError("no")


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (WrappingStore, Capabilities(put_if_absent=True, compare_and_set=True)),
        (Deaf, Capabilities(put_if_absent=False, compare_and_set=False)),
        (WritesWhatIsMissing, Capabilities(put_if_absent=True, compare_and_set=False)),
        (Without, Capabilities(put_if_absent=False, compare_and_set=False)),
        (
            CaseFoldingStore,
            Capabilities(put_if_absent=True, compare_and_set=True, distinguishes_case=False),
        ),
    ],
)
def test_probe(make: type[WrappingStore], found: Capabilities):
    memory = MemoryStore()
    assert probe(make(memory), "0a1b") == found
    assert list(memory.list("")) == []


def test_probe_cleans_up_after_a_failure():
    memory = MemoryStore()
    store = FaultyStore(memory, random.Random(1), Rule(Fault.DENIED, frozenset({"get"})))
    with pytest.raises(BackendError):
        probe(store, "0a1b")
    assert list(memory.list("")) == []
