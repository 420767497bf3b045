"""A tier that is slow, gone or damaged, a disk that fails, filters that match little: what is told, and what is served."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.both_sides import QUEUE, BothSides
from support.journals import PREFIX
from support.merging import delete_unnamed, gather, named_bundles

from backends.errors import UnavailableError
from backends.memory import MemoryStore
from backends.wrapping import WrappingStore
from fetcher.statuses import (
    COMPACTED,
    KeyAnswer,
    KeyHit,
    KeyQuery,
    Policy,
    ScanLimits,
    Side,
    merge_answers,
)
from fetcher.statuses import GetStatus as Is
from fetcher.transfers import Ticker
from tiered.clock import SystemClock
from tiered.errors import DataError, InvalidError, StoreUnavailableError
from tiered.local.interface import HoleReason
from tiered.log.parts import Gap
from tiered.log.state import queue_action
from tiered.model import QueueOffset

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from backends.base import ByteRange, ObjectInfo
    from tiered.format.record import Record
    from tiered.local.interface import RecordBatch


class Gate(WrappingStore):
    """A store whose reads fail, or wait, while the test says so."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.is_gone = self.waited_in_vain = False
        self.asked = 0
        self.open = threading.Event()
        self.open.set()

    def _pass(self) -> None:
        self.asked += 1
        self.waited_in_vain |= not self.open.wait(20)
        if self.is_gone:
            raise UnavailableError("gone")

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        self._pass()
        return super().get(key, byte_range)

    def get_ranges(self, key: str, byte_ranges: Sequence[ByteRange]) -> list[bytes]:
        self._pass()
        return super().get_ranges(key, byte_ranges)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        self._pass()
        return super().list(prefix, start_after=start_after)


def gated(policy: Policy, **more: Any) -> tuple[BothSides, Gate]:
    """Local [50, 200), tier [0, 150)."""
    gate = Gate()
    both = BothSides(policy, seen_store=gate, **more)
    both.append(200)
    both.commit(100)
    both.commit(150)
    both.tier_side.refresh(1e9)
    both.expire(50)
    both.memory_from = 1 << 40
    return both, gate


@pytest.mark.parametrize("policy", [Policy.NOT_IN_DISK, Policy.NOT_IN_MEM, Policy.FORCE])
def test_when_the_tier_is_gone_what_is_local_is_served_and_the_rest_can_be_tried_again(
    policy: Policy,
):
    both, gate = gated(policy)
    gate.is_gone = True
    for offset in (50, 100, 149, 150, 199):
        found = both.get(offset)
        assert found.status is Is.FOUND
        assert {chunk.side for chunk in found.chunks} == {Side.LOCAL}
    for _ in range(2):
        lost = both.get(49)
        assert (lost.status, lost.next_begin, lost.count) == (Is.TRY_AGAIN, 49, 0)
        assert lost.error is not None
        assert (lost.min_offset, lost.max_offset) == (0, 200)
    assert both.get(200).status is Is.OFFSET_OVERFLOW_ONE
    assert both.store.offset_by_time("t", 0, 1 << 60) == 200
    gate.is_gone = False
    assert both.get(49, max_count=1).status is Is.FOUND


def test_a_time_that_only_the_tier_can_tell_is_a_retriable_error_when_it_is_gone():
    both, gate = gated(Policy.NOT_IN_DISK)
    times = [1_700_000_000_000 + n for n in range(200)]
    assert both.store.offset_by_time("t", 0, times[20]) == 20
    gate.is_gone = True
    with pytest.raises(StoreUnavailableError):
        both.store.offset_by_time("t", 0, times[21])
    assert both.store.offset_by_time("t", 0, times[60]) == 60
    assert both.store.offset_by_time("t", 0, times[60], policy=Policy.FORCE) == 60


def test_nothing_is_said_to_be_too_small_while_the_journal_cannot_be_looked_at():
    gate = Gate()
    both = BothSides(seen_store=gate)
    both.append(100)
    both.commit(80)  # the reader does not know yet
    both.expire(80)
    gate.is_gone = True
    found = both.get(10)
    assert (found.status, found.next_begin) == (Is.TRY_AGAIN, 10)
    gate.is_gone = False
    assert both.get(10, max_count=1).next_begin == 11


def test_a_journal_that_moved_on_is_looked_at_before_a_offset_range_is_given_up():
    both, _ = gated(Policy.NOT_IN_DISK)
    both.commit(190)
    both.expire(185)
    found = both.get(150, max_count=5)
    assert (found.status, found.next_begin, found.missing) == (Is.FOUND, 155, ())


def test_a_slow_tier_costs_a_part_of_the_deadline_once_and_then_nothing():
    gate = Gate()
    with ThreadPoolExecutor(4) as executor:
        both = BothSides(Policy.FORCE, seen_store=gate, executor=executor, clock=SystemClock())
        with Ticker(both.fetcher, SystemClock()):
            both.append(200)
            both.commit(150)
            both.tier_side.refresh(1e9)
            both.expire(50)
            gate.open.clear()
            try:
                found = both.get(100, timeout_s=4.0)
                assert found.status is Is.FOUND
                assert found.chunks[0].side is Side.LOCAL
                asked = gate.asked
                assert asked > 0, "the tier was tried"
                assert both.get(101, timeout_s=4.0).status is Is.FOUND
                assert gate.asked == asked, "it is not tried again"
                assert both.get(10, timeout_s=0.3).status is Is.TRY_AGAIN
                with pytest.raises(StoreUnavailableError):
                    both.store.offset_by_time("t", 0, 1_700_000_000_005, timeout_s=0.3)
            finally:
                gate.open.set()
            assert both.get(10).status is Is.FOUND
        both.fetcher.close()


def damage(both: BothSides) -> None:
    """Flip a bit in every data object of the tier."""
    store = both.builder.store
    for info in [*store.list(PREFIX + "bundle/")]:
        raw = bytearray(store.get(info.key))
        raw[30] ^= 1
        store.delete(info.key)
        store.put_if_absent(info.key, bytes(raw))


def test_damage_is_told_and_stepped_over_one_by_one_and_served_locally_where_that_can_be():
    both, _ = gated(Policy.FORCE)
    damage(both)
    found = both.get(10)
    assert (found.status, found.next_begin) == (Is.OFFSET_FOUND_NULL, 11)
    assert [(gap.start, gap.end) for gap in found.missing] == [(10, 11)]
    assert isinstance(found.error, DataError)
    found = both.get(60)
    assert found.status is Is.FOUND
    assert found.chunks[0].side is Side.LOCAL


def expired_and_deleted() -> BothSides:
    """[0, 30) in the tier alone, of which [0, 20) has expired and is deleted; the reader does not know yet."""
    both = BothSides(Policy.FORCE, has_local=False)
    both.append(30)
    for end in (10, 20, 30):
        both.commit(end, roll=True)
    both.tier_side.refresh(1e9)
    incarnation = both.builder.journal.state.incarnation(QUEUE)
    assert incarnation is not None
    both.builder.say(queue_action("expire", QUEUE, 0, position=0, min_from=0, min_to=20))
    for part in incarnation.parts()[:2]:
        both.builder.store.delete(PREFIX + part.bundle.key)
    return both


def test_what_expires_while_it_is_read_is_being_removed_and_the_rest_goes_on():
    both = expired_and_deleted()
    found = both.get(3)
    assert (found.status, found.next_begin) == (Is.MESSAGE_WAS_REMOVING, 20)
    assert both.get(3).status is Is.OFFSET_TOO_SMALL
    assert both.get(20).status is Is.FOUND


def test_a_time_in_what_has_expired_meanwhile_is_that_of_the_first_message_left():
    both = expired_and_deleted()
    assert both.store.offset_by_time("t", 0, 1_700_000_000_005) == 20
    assert both.store.min_offset("t", 0) == 20


def test_a_local_disk_that_fails_is_gone_around_by_way_of_the_tier():
    both, _ = gated(Policy.NOT_IN_DISK)

    def fail() -> None:
        raise InvalidError("cannot read the store: input/output error")

    both.local.before = fail
    found = both.get(60)
    assert found.status is Is.FOUND
    assert found.chunks[0].side is Side.TIER
    found = both.get(160)
    assert (found.status, found.next_begin) == (Is.TRY_AGAIN, 160)
    assert isinstance(found.error, InvalidError)


@pytest.mark.parametrize("policy", [Policy.NOT_IN_DISK, Policy.FORCE])
def test_what_is_damaged_locally_comes_from_the_tier_and_is_not_skipped_while_that_is_gone(
    policy: Policy,
):
    both, gate = gated(policy)
    whole = both.local.read
    broken = {60, 61, 170}

    def read(*args: Any, **more: Any) -> RecordBatch | None:
        batch = whole(*args, **more)
        if batch is not None:
            offsets = np.arange(batch.count) + batch.base_offset
            holes = np.isin(offsets, list(broken))
            tags = np.where(holes, HoleReason.DAMAGED, batch.tag_codes)
            return replace(batch, sizes=np.where(holes, 0, batch.sizes), tag_codes=tags)
        return batch

    both.local.read = read  # type: ignore[method-assign]
    at, seen = 50, []
    while at < 200:
        found = both.get(at)
        seen += [offset for offset, _ in found.messages()]
        gap = (Gap(QueueOffset(170), QueueOffset(171), "hole: damaged"),)
        assert found.missing == (gap if at <= 170 < found.next_begin else ())
        at = found.next_begin
    assert seen == [offset for offset in range(50, 200) if offset != 170]
    gate.is_gone = True
    both.fetcher._stock.cache.clear()
    assert both.get(59).next_begin == 60
    lost = both.get(60)
    assert (lost.status, lost.next_begin) == (Is.TRY_AGAIN, 60)


def gap_in_the_tier(policy: Policy) -> BothSides:
    """[0, 30) in the broker, of which the tier has no message at [10, 20): as after a loss there."""
    both = BothSides(policy)
    both.append(30)
    both.commit(10)
    both.gap(20)
    both.commit(30)
    both.memory_from = 100
    both.tier_side.refresh(1e9)
    return both


@pytest.mark.parametrize("policy", Policy)
def test_what_the_tier_has_a_gap_for_is_read_locally_where_it_is(policy: Policy):
    both = gap_in_the_tier(policy)
    at, seen = 0, []
    while at < 30:
        found = both.get(at)
        assert not found.missing
        seen += [offset for offset, _ in found.messages()]
        at = found.next_begin
    assert seen == list(range(30))


@pytest.mark.parametrize("policy", [Policy.NOT_IN_DISK, Policy.FORCE])
def test_a_gap_of_the_tier_is_not_passed_over_where_the_disk_fails(policy: Policy):
    both = gap_in_the_tier(policy)
    whole = both.local.read

    def fail(queue: Any, start: int, **more: Any) -> RecordBatch | None:
        if start == 12:
            raise DataError("damaged")
        if start == 15:
            raise InvalidError("cannot read the store: input/output error")
        return whole(queue, start, **more)

    both.local.read = fail  # type: ignore[method-assign]
    found = both.get(12)
    assert (found.status, found.next_begin) == (Is.OFFSET_FOUND_NULL, 13)
    found = both.get(15)
    assert (found.status, found.next_begin) == (Is.TRY_AGAIN, 15)
    assert isinstance(found.error, InvalidError)


class SlowJournal(Gate):
    """Data comes at once, the journal when the test says so."""

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        return (
            super().get(key, byte_range) if "/journal/" in key else self.inner.get(key, byte_range)
        )


@pytest.mark.parametrize("has_local", [False, True])
def test_where_an_object_is_gone_the_journal_is_looked_at_within_the_deadline(has_local: bool):
    gate = SlowJournal()
    with ThreadPoolExecutor(1) as journal:
        both = BothSides(
            Policy.FORCE, has_local=has_local, seen_store=gate, clock=SystemClock(), timeout_s=0.4
        )
        both.append(40)
        for end in (10, 20, 30, 40):
            both.commit(end, roll=True)
        both.tier_side.refresh(time.monotonic() + 9)
        both.tier_side._executor = journal
        before = named_bundles(both.builder)
        gather(both.builder)
        delete_unnamed(both.builder, before)
        gate.open.clear()
        try:
            found = both.get(5)
            if not has_local:
                with pytest.raises(StoreUnavailableError):
                    both.store.offset_by_time("t", 0, 1_700_000_000_005)
            assert not gate.waited_in_vain
        finally:
            gate.open.set()
        assert found.status is (Is.FOUND if has_local else Is.TRY_AGAIN)
        assert both.get(5, timeout_s=9).status is Is.FOUND


# -- limits and filters ---------------------------------------------------------------------------


class Wanted:
    """A ``Filter`` by queue offset."""

    expression = "test"
    tag_codes = None

    def __init__(self, offsets: set[int]) -> None:
        self.offsets = offsets

    def matches(self, properties: Any) -> bool:
        raise AssertionError("not asked")

    def select(self, batch: RecordBatch) -> npt.NDArray[np.int64]:
        offsets = np.arange(batch.count) + batch.base_offset
        return np.flatnonzero(np.isin(offsets, list(self.offsets)) & (batch.sizes > 0))


def java_queue(**more: Any) -> BothSides:
    """[100, 200) in the tier alone, as in the tests of the Java fetcher."""
    both = BothSides(Policy.FORCE, first=100, has_local=False, **more)
    both.append(100)
    both.commit(200)
    both.tier_side.refresh(1e9)
    return both


@pytest.mark.parametrize(
    ("offset", "wanted", "count", "found", "status", "next_begin"),
    [
        (100, range(101, 200, 2), 32, 32, Is.FOUND, 164),
        (164, range(101, 200, 2), 32, 18, Is.FOUND, 200),
        (200, range(101, 200, 2), 32, 0, Is.OFFSET_OVERFLOW_ONE, 200),
        (199, range(100, 200, 2), 32, 0, Is.NO_MATCHED_MESSAGE, 200),
        (100, range(100, 200, 2), 32, 32, Is.FOUND, 163),
        (100, {110, 120}, 2, 2, Is.FOUND, 121),
        (100, (), 32, 0, Is.NO_MATCHED_MESSAGE, 200),
    ],
)  # fmt: skip
def test_filters_end_where_java_s_do(  # noqa: PLR0917
    offset: int, wanted: Any, count: int, found: int, status: Is, next_begin: int
):
    result = java_queue().get(offset, filter=Wanted(set(wanted)), max_count=count)
    assert (result.count, result.status, result.next_begin) == (found, status, next_begin)


def test_a_scan_without_a_match_is_bounded_and_goes_on_where_it_ended():
    both = java_queue(scan=ScanLimits(scan_items_max=30))
    found = both.get(100, filter=Wanted({190}))
    assert (found.status, found.next_begin) == (Is.NO_MATCHED_MESSAGE, 130)
    found = both.get(found.next_begin, filter=Wanted({150}))
    assert [offset for offset, _ in found.messages()] == [150]


class Unreadable(Wanted):
    """One that cannot look into some records, such as an inner batch that does not hold together."""

    def __init__(self, offsets: set[int], broken: set[int]) -> None:
        super().__init__(offsets)
        self.broken = broken

    def select(self, batch: RecordBatch) -> npt.NDArray[np.int64]:
        if self.broken & set(range(batch.base_offset, batch.end_offset)):
            raise DataError("an inner batch is damaged")
        return super().select(batch)


@pytest.mark.parametrize("count", [1, 7, 32])
def test_what_a_filter_cannot_look_into_costs_only_itself(count: int):
    both = java_queue()
    wanted = Unreadable(set(range(100, 200, 2)), {150, 151, 199})
    at, seen, lost = 100, list[int](), list[int]()
    while at < 200:
        found = both.get(at, filter=wanted, max_count=count)
        if found.status is Is.OFFSET_FOUND_NULL:
            lost += range(found.missing[-1].start, found.missing[-1].end)
        seen += [offset for offset, _ in found.messages()]
        at = found.next_begin
    assert lost == [150, 151, 199]
    assert seen == [offset for offset in range(100, 200, 2) if offset != 150]


def compacted_queue(count: int, **settings: Any) -> BothSides:
    """A tier of so many queue offsets, of which the first and the last have a message."""
    both = BothSides(has_local=False, **settings)
    both.append(count)
    whole = both.local.read

    def read(*args: Any, **more: Any) -> RecordBatch | None:
        batch = whole(*args, **more)
        assert batch is not None
        holes = np.isin(np.arange(batch.count) + batch.base_offset, [0, count - 1], invert=True)
        tags = np.where(holes, HoleReason.COMPACTED, batch.tag_codes)
        return replace(batch, sizes=np.where(holes, 0, batch.sizes), tag_codes=tags)

    both.local.read = read  # type: ignore[method-assign]
    both.commit(count)
    both.tier_side.refresh(1e9)
    return both


@pytest.mark.parametrize("wanted", [None, Wanted({999})])
@pytest.mark.parametrize("count", [1, 32])
def test_a_compacted_range_is_passed_over_in_one_read(wanted: Wanted | None, count: int):
    """However many messages are asked for, and also where a read may look at fewer items."""
    found = compacted_queue(1000, scan=ScanLimits(scan_items_max=200)).get(
        1, max_count=count, filter=wanted
    )
    assert (found.status, found.next_begin) == (Is.FOUND, 1000)
    assert [offset for offset, _ in found.messages()] == [999]
    assert found.missing == (Gap(QueueOffset(1), QueueOffset(999), COMPACTED),)


def test_so_many_holes_are_passed_over_and_the_next_read_goes_on_behind_them():
    both = compacted_queue(1000, scan=ScanLimits(scan_items_max=100, scan_holes_max=300))
    at, reads = 1, 0
    while (found := both.get(at, max_count=1)).status is Is.NO_MATCHED_MESSAGE:
        assert at + 300 <= found.next_begin <= at + 400
        at, reads = found.next_begin, reads + 1
    assert (reads, found.next_begin) == (2, 1000)


def test_bytes_and_counts_end_a_read_after_at_least_one_message():
    both = java_queue()
    size = len(both.raws[100])
    for limit, count in ((8 * size + 10, 8), (8 * size, 8), (1, 1), (size - 1, 1)):
        found = both.get(100, max_bytes=limit)
        assert (found.count, found.next_begin) == (count, 100 + count)
        assert found.size_bytes == count * size
    assert both.get(100, max_count=8).next_begin == 108
    calls, at = 0, 100
    while at < 200:
        at, calls = both.get(at, max_count=4).next_begin, calls + 1
    assert calls == 25


@settings(deadline=None, max_examples=40)
@given(st.sets(st.integers(100, 199)), st.integers(1, 20), st.integers(1, 60), st.integers(1, 3000))
def test_a_filtered_queue_is_read_whole_whatever_the_limits(
    wanted: set[int], count: int, scan: int, size: int
):
    both = java_queue(scan=ScanLimits(scan_items_max=scan))
    got: list[int] = []
    at = 100
    while at < 200:
        found = both.get(at, filter=Wanted(wanted), max_count=count, max_bytes=size)
        assert at < found.next_begin <= 200
        assert found.count <= count
        got += [offset for offset, _ in found.messages()]
        at = found.next_begin
    assert got == sorted(wanted)


# -- keys -----------------------------------------------------------------------------------------


def hit(offset: int, time_ms: int) -> KeyHit:
    message: Record = None  # type: ignore[assignment]
    return KeyHit(QUEUE, QueueOffset(offset), time_ms, message)


def test_keys_of_both_sides_are_merged_newest_first_and_a_side_that_fails_costs_completeness():
    query = KeyQuery(topic="t", key="k", count=3)
    local = KeyAnswer((hit(3, 103), hit(2, 102)))
    tier = KeyAnswer((hit(2, 102), hit(1, 101), hit(0, 100)))
    assert [found.queue_offset for found in merge_answers([local, tier], 3).hits] == [3, 2, 1]

    def gone(*_: Any) -> KeyAnswer:
        raise StoreUnavailableError("gone")

    both = BothSides()
    both.append(4)
    both.commit(3)
    both.tier_side.refresh(1e9)
    store = both.store
    store._local_keys, store._tier_keys = (lambda *_: local), (lambda *_: tier)
    assert store.query(query).is_complete
    assert [found.queue_offset for found in store.query(query, policy=Policy.DISABLE).hits] == [
        3,
        2,
    ]
    store._tier_keys = lambda *_: KeyAnswer((hit(99, 999),))  # of a history that has ended
    assert [found.queue_offset for found in store.query(query).hits] == [3, 2]
    store._tier_keys = gone
    found = store.query(query)
    assert [one.queue_offset for one in found.hits] == [3, 2]
    assert not found.is_complete
    assert isinstance(found.errors[0], StoreUnavailableError)
