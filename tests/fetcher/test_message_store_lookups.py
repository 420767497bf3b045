"""Lookups over both sides by time and key: while retention moves, of what is not tiered yet, and what they cost."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

import pytest
from support.both_sides import QUEUE, BothSides
from support.journals import PREFIX
from support.opened import opened_over
from support.tiers import TierBuilder

from backends.local import LocalFolderStore
from backends.memory import MemoryStore
from backends.wrapping import MeteredStore
from fetcher.statuses import KeyQuery, Policy
from tiered.api.broker_place import Place
from tiered.api.local_and_tier import LocalKeys, TierKeys, _Upkeep, open_message_store
from tiered.clock import ManualClock, SystemClock
from tiered.errors import ClosedError, InvalidError
from tiered.index.lookup import Wish
from tiered.model import Boundary, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FIRST_MS = 1_700_000_000_000
"""Store time of the message at queue offset 0; each is a millisecond later than the last."""
REQUESTS_MAX = 12


@pytest.mark.parametrize("policy", [Policy.NOT_IN_DISK, Policy.FORCE])
@pytest.mark.parametrize("boundary", list(Boundary))
@pytest.mark.parametrize("calls", range(4))
def test_a_time_is_found_while_local_retention_moves(
    policy: Policy, boundary: Boundary, calls: int
):
    both = BothSides(policy)
    both.append(60)
    both.commit(50)
    both.tier_side.refresh(1e9)
    both.expire(10)
    left = [calls]

    def expire() -> None:
        if left[0] == 0:
            both.expire(40)
        left[0] -= 1

    both.local.before = expire
    assert both.store.offset_by_time("t", 0, FIRST_MS + 20, boundary) == 20
    assert both.store.offset_by_time("t", 0, FIRST_MS + 30, boundary) == 30


@pytest.mark.parametrize("policy", [Policy.NOT_IN_DISK, Policy.FORCE])
def test_a_time_is_looked_for_in_what_the_journal_says_now_when_the_local_store_has_it_no_more(
    policy: Policy,
):
    both = BothSides(policy)
    both.append(30)
    both.commit(10)
    both.tier_side.refresh(1e9)
    both.commit(30)  # the reader does not know yet
    both.append(10)
    both.expire(25)
    for offset in (5, 12, 24, 25, 35):
        assert both.store.offset_by_time("t", 0, FIRST_MS + offset) == offset


def test_a_time_behind_a_gap_is_found_locally():
    both = BothSides(Policy.FORCE)
    both.append(40)
    both.commit(10)
    both.tier_side.refresh(1e9)
    both.local.expire(QUEUE.topic, QUEUE.queue_id, 20)
    for time_ms, offset in ((5, 5), (15, 20), (25, 25), (99, 40)):
        assert both.store.offset_by_time("t", 0, FIRST_MS + time_ms) == offset


def test_a_lookup_through_the_facade_costs_at_most_12_requests():
    meter = MeteredStore(MemoryStore())
    both = BothSides(Policy.FORCE, has_local=False, seen_store=meter)
    both.append(400, b"x" * 5000)
    for end in range(20, 200, 20):
        both.commit(end, roll=True)
    both.commit(400, roll=True)
    both.tier_side.refresh(1e9)
    for offset in (0, 19, 20, 199, 200, 201, 287, 398, 399):
        for boundary in Boundary:
            before = meter.snapshot().requests
            assert both.store.offset_by_time("t", 0, FIRST_MS + offset, boundary) == offset
            assert meter.snapshot().requests - before <= REQUESTS_MAX


@pytest.fixture
def keyed() -> Iterator[BothSides]:
    """Both sides with lookups by key: local [20, 60), tier [0, 40). Message n has the key ``kn``."""
    both = BothSides()
    both.append(60)
    both.commit(40)
    both.tier_side.refresh(1e9)
    both.expire(20)
    opened = opened_over(both.builder.store)
    tier = TierKeys(opened.lookup, both.clock, PREFIX)
    both.store._tier_keys = tier.find
    both.store._local_keys = LocalKeys(both.local, both.clock).find
    yield both
    tier.close()
    opened.close()


@pytest.mark.parametrize("policy", [Policy.NOT_IN_DISK, Policy.NOT_IN_MEM, Policy.FORCE])
def test_keys_are_found_wherever_the_message_is(keyed: BothSides, policy: Policy):
    for offset in (0, 19, 20, 39, 40, 59):
        wanted = KeyQuery(topic="t", key=f"k{offset}")
        found = keyed.store.query(wanted, policy=policy)
        assert found.is_complete
        (hit,) = found.hits
        assert (hit.queue, hit.queue_offset, hit.store_ms) == (QUEUE, offset, FIRST_MS + offset)
        assert hit.message.queue_offset == offset
    assert not keyed.store.query(KeyQuery(topic="other", key="k1"), policy=policy).hits


class EndsLate(Future[Any]):
    """Ends while whoever waits for it is being told that it did not."""

    def __init__(self, outcome: Any) -> None:
        super().__init__()
        self.outcome = outcome

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            self.set_result(self.outcome)
            raise TimeoutError
        return super().result(timeout)


def test_what_is_found_at_the_moment_of_the_deadline_is_taken(
    keyed: BothSides, monkeypatch: pytest.MonkeyPatch
):
    def submit(_: Any, look: Any) -> Future[Any]:
        return EndsLate(look())

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    found = keyed.store.query(KeyQuery(topic="t", key="k19"))
    assert found.is_complete
    assert [hit.queue_offset for hit in found.hits] == [19]


def test_after_close_it_is_said_that_it_is_closed(tmp_path: Path):
    builder = TierBuilder(LocalFolderStore(tmp_path), prefix=Place("c", "b").prefix)
    builder.add([b"x"], queue=QUEUE)
    store = open_message_store(None, f"file://{tmp_path}")
    store.close()
    for topic in (QUEUE.topic, "which the journal would have to be asked for"):
        with pytest.raises(ClosedError):
            store.get_message("g", topic, 0, 0)
    (error,) = store.query(KeyQuery(topic=QUEUE.topic, key="k")).errors
    assert isinstance(error, ClosedError)


def test_disabled_means_local_only(keyed: BothSides):
    assert not keyed.store.query(KeyQuery(topic="t", key="k19"), policy=Policy.DISABLE).hits
    assert keyed.store.query(KeyQuery(topic="t", key="k20"), policy=Policy.DISABLE).hits


def test_times_and_counts_bound_a_lookup(keyed: BothSides):
    def find(**more: int) -> int:
        return len(keyed.store.query(KeyQuery(topic="t", key="k45", **more)).hits)

    assert find(from_ms=FIRST_MS + 45, until_ms=FIRST_MS + 46) == 1
    assert find(from_ms=FIRST_MS + 46) == 0
    assert find(until_ms=FIRST_MS + 45) == 0


def test_a_look_at_what_is_fresh_is_bounded_and_says_so():
    both = BothSides()
    both.append(4200)
    found = LocalKeys(both.local, both.clock, scan_bytes_max=100).find(
        KeyQuery(topic="t", key="k4199"), 10.0, lambda _: 0
    )
    assert [hit.queue_offset for hit in found.hits] == [QueueOffset(4199)]
    assert not found.is_complete
    late = ManualClock()
    late.advance(11)
    assert (
        not LocalKeys(both.local, late)
        .find(KeyQuery(topic="t", key="k4199"), 10.0, lambda _: 0)
        .is_complete
    )


@pytest.mark.parametrize("count", [0, -1])
def test_a_lookup_for_no_message_is_refused(count: int):
    with pytest.raises(InvalidError, match="ask for 1 or more"):
        KeyQuery(topic="t", key="k", count=count)
    with pytest.raises(InvalidError, match="ask for 1 or more"):
        Wish(topic="t", key="k", count=count)


@pytest.fixture
def outgrown() -> Iterator[BothSides]:
    """The broker lost [30, 40) and grew to 50 before the journal knew: local [20, 50), tier [0, 40).

    Message n has the key ``kn``; those stored anew have ``nn``.
    """
    both = BothSides()
    both.append(40)
    both.commit(25)
    both.commit(40)
    both.tier_side.refresh(1e9)
    both.expire(20)
    both.local.cut(QUEUE.topic, QUEUE.queue_id, 30)
    for offset in range(30, 50):
        properties = b"TAGS\x01a\x02KEYS\x01n%d\x02" % offset
        both.local.append(QUEUE.topic, QUEUE.queue_id, b"anew", properties=properties)
    opened = opened_over(both.builder.store)
    tier = TierKeys(opened.lookup, both.clock, PREFIX)
    both.store._tier_keys = tier.find
    both.store._local_keys = LocalKeys(both.local, both.clock).find
    yield both
    tier.close()
    opened.close()


TIERED = pytest.mark.parametrize("policy", [Policy.NOT_IN_DISK, Policy.NOT_IN_MEM, Policy.FORCE])


@TIERED
def test_a_key_of_what_the_broker_has_truncated_and_outgrown_is_not_found(
    outgrown: BothSides, policy: Policy
):
    for key, offsets in {"k19": [19], "k25": [25], "k35": [], "n35": [35], "n49": [49]}.items():
        found = outgrown.store.query(KeyQuery(topic="t", key=key), policy=policy)
        assert [hit.queue_offset for hit in found.hits] == offsets, key


@TIERED
@pytest.mark.parametrize("count", [1, 7, 32])
def test_no_read_mixes_in_what_the_broker_has_truncated_and_outgrown(
    outgrown: BothSides, policy: Policy, count: int
):
    outgrown.memory_from = 100
    stored, at = outgrown.local.raw(QUEUE), 0
    while (found := outgrown.get(at, policy=policy, max_count=count)).count:
        for offset, raw in found.messages():
            assert bytes(raw) == stored.get(offset, outgrown.raws.get(offset)), offset
        at = found.next_begin
    assert at == 50


@TIERED
def test_a_damaged_message_is_not_read_as_that_which_the_broker_has_truncated(
    outgrown: BothSides, policy: Policy
):
    outgrown.local.cut(QUEUE.topic, QUEUE.queue_id, 35)
    outgrown.local.append(QUEUE.topic, QUEUE.queue_id, b"", is_damaged=True)
    for _ in range(10):
        outgrown.local.append(QUEUE.topic, QUEUE.queue_id, b"anew")
    found = outgrown.get(35, policy=policy)
    assert [offset for offset, _ in found.messages()] == list(range(36, 46))


@TIERED
@pytest.mark.parametrize("boundary", list(Boundary))
def test_a_time_is_not_found_in_what_the_broker_has_truncated_and_outgrown(
    outgrown: BothSides, policy: Policy, boundary: Boundary
):
    found = outgrown.store.offset_by_time("t", 0, FIRST_MS + 35, boundary, policy=policy)
    assert found == (30 if boundary is Boundary.LOWER else 29)
    for offset in (5, 19, 20, 29):
        time_ms = FIRST_MS + offset
        assert outgrown.store.offset_by_time("t", 0, time_ms, boundary, policy=policy) == offset


def test_what_the_broker_has_less_of_is_not_read_past_its_minimum_by_one_batch():
    both = BothSides(Policy.FORCE)
    both.append(40)
    both.commit(40)
    both.tier_side.refresh(1e9)
    both.expire(20)
    both.local.cut(QUEUE.topic, QUEUE.queue_id, 25)
    for _ in range(10):
        both.local.append(QUEUE.topic, QUEUE.queue_id, b"anew")
    assert both.get(15).next_begin == 20
    assert all(b"anew" in bytes(raw) for offset, raw in both.get(20).messages() if offset >= 25)


@TIERED
def test_a_local_disk_that_fails_speaks_not_against_the_tier(keyed: BothSides, policy: Policy):
    def fail() -> None:
        raise InvalidError("the disk fails")

    keyed.local.before = fail
    found = keyed.get(25, policy=policy)
    assert [offset for offset, _ in found.messages()] == list(range(25, 40))


class _Looked:
    """A side that counts how often it is looked at, and fails so many times."""

    def __init__(self, fails: int = 0) -> None:
        self.stop, self.looks, self.fails = threading.Event(), 0, fails
        self.enough = threading.Event()

    def refresh(self) -> bool:
        self.looks += 1
        if self.looks > 2:
            self.enough.set()
        if self.looks <= self.fails:
            raise InvalidError("it may not be read")
        return True


@pytest.mark.parametrize("fails", [(9**9, 0), (0, 9**9)])
def test_a_side_that_cannot_be_looked_at_does_not_hide_what_is_new_of_the_other(
    fails: tuple[int, int], caplog: pytest.LogCaptureFixture
):
    local, tier = map(_Looked, fails)
    upkeep = _Upkeep(cast("Any", tier), cast("Any", local), SystemClock(), 0.001)
    try:
        assert local.enough.wait(10)
        assert tier.enough.wait(10)
        assert "may not be read" in upkeep.trouble
    finally:
        upkeep.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_what_could_not_be_looked_for_is_told_until_it_can():
    local, tier = _Looked(2), _Looked()
    upkeep = _Upkeep(cast("Any", tier), cast("Any", local), SystemClock(), 0.001)
    try:
        assert tier.enough.wait(10)
        until = SystemClock().monotonic_s() + 10
        while upkeep.trouble and SystemClock().monotonic_s() < until:
            SystemClock().wait(threading.Event(), 0.001)
        assert not upkeep.trouble
    finally:
        upkeep.close()
