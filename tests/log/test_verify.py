"""Verification: a whole tier is clean, and each kind of damage is found and called by its name."""

from __future__ import annotations

import json
import random
import re
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.journals import PREFIX
from support.merging import gather, text
from support.synthetic import SyntheticStore
from support.tiers import QUEUE, TierBuilder, batch_of

from backends.memory import MemoryStore
from backends.testing.faulty import Fault, FaultyStore, Rule
from backends.wrapping import WrappingStore
from tiered.errors import DataError
from tiered.format.bundle import (
    BLOCK_BYTES,
    FOOTER_BYTES,
    PACKED_BLOCK_BYTES,
    build_section,
    build_tail,
    pack_table,
    read_table,
)
from tiered.journal.entry import seal_text
from tiered.journal.replay import decode_checkpoint, encode_checkpoint
from tiered.keys import LEASE, ObjectId, bundle_key
from tiered.log.bundles import SectionRow, bundle_row, table_of
from tiered.log.composite import CommitColumns
from tiered.log.history import named_bundles, parts_by_bundle
from tiered.log.parts import Bundle, Parts
from tiered.log.sections import read_range
from tiered.log.state import Incarnation, TierState
from tiered.log.verify import verify_tier
from tiered.log.verify_objects import PROBLEMS_LISTED_MAX, WHOLE, Problem, VerifyReport, check_state
from tiered.model import LogOffset, MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backends.base import ByteRange, ObjectInfo, ObjectStore
    from tiered.local.interface import RecordBatch
    from tiered.log.state import Part

OTHER = MessageQueue("other", 0)


def small_tier(store: ObjectStore | None = None) -> TierBuilder:
    """Two queues, several parts and segments, a gap, holes, inner batches, checkpoints, a lease."""
    builder = TierBuilder(store)
    builder.add([b"a", (3, b"inner"), b"c" * 200])
    builder.add([b"d", None, b"e"], roll=True)
    builder.journal.write_checkpoint(force=True)
    builder.add([b"x"], queue=OTHER, first=7)
    builder.gap(4)
    builder.add([b"after"])
    builder.journal.write_checkpoint(force=True)
    both = batch_of(8, [b"last", None], queue=OTHER), batch_of(13, [b"more"])
    builder.add_round(*both)
    builder.store.put_if_absent(PREFIX + LEASE, seal_text(LEASED))
    return builder


LEASED = {
    "format": 1, "writer": "0badcafe", "expires_ms": 1, "released": True, "epoch": 0, "number": 0, "history": "",
    "holder": {"host": "h", "boot": "b", "space": "s", "pid": 1, "started": 2},
}  # fmt: skip


def verify(store: ObjectStore, **more: Any) -> VerifyReport:
    return verify_tier(store, PREFIX, **{"deep": True, **more})


def kinds(report: VerifyReport) -> set[str]:
    return set(report.problem_counts)


def change(store: ObjectStore, key: str, data: bytes | None) -> None:
    store.delete(key)
    if data is not None:
        store.put_if_absent(key, data)


def flip(store: ObjectStore, key: str, bit: int) -> None:
    data = bytearray(store.get(key))
    data[bit // 8] ^= 1 << bit % 8
    change(store, key, bytes(data))


def first_part(builder: TierBuilder) -> Part:
    incarnation = builder.journal.state.incarnation(QUEUE)
    assert incarnation
    return incarnation.parts()[0]


# -- clean --------------------------------------------------------------------------------------


@pytest.mark.parametrize("deep", [False, True])
def test_a_whole_tier_is_clean_and_what_is_recorded_is_counted(deep: bool):
    builder = small_tier()
    report = verify(builder.store, deep=deep)
    assert report.problems == []
    assert report.is_clean
    assert (report.queues, report.parts, report.named_objects, report.messages) == (2, 6, 5, 11)
    recorded = report.recorded
    assert (recorded.holes, recorded.gaps, recorded.gap_messages, recorded.quarantined) == (
        2,
        1,
        4,
        2,
    )
    assert (recorded.orphans, recorded.unknown_keys, recorded.unreferenced_bytes) == (0, 0, 0)
    assert report.journal_number == builder.journal.number
    if deep:
        assert report.checked_messages == report.messages
        assert report.checked_objects == len([*builder.store.list("")]) - 1  # all but the lease
        assert report.checked_bytes >= report.named_bytes


def test_an_empty_place_is_clean():
    assert verify(MemoryStore()).is_clean


def test_steps_run_in_an_executor_and_progress_comes_to_its_end():
    builder = small_tier()
    seen: list[tuple[int, int]] = []
    with ThreadPoolExecutor(3) as pool:
        report = verify(
            builder.store, executor=pool, progress=lambda done, total: seen.append((done, total))
        )
    assert report.is_clean
    assert report.checked_messages == 11
    assert (
        seen[-1][0]
        == seen[-1][1]
        == report.named_bytes
        + sum(i.size_bytes for i in builder.store.list(PREFIX + "quarantine/"))
    )
    assert seen == sorted(seen)


# -- every bit ----------------------------------------------------------------------------------


@cache
def objects() -> dict[str, bytes]:
    store = small_tier().store
    return {info.key: store.get(info.key) for info in store.list("")}


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_one_flipped_bit_in_any_object_is_found(draw: st.DataObject):
    found = objects()
    key = draw.draw(st.sampled_from(sorted(found)))
    bit = draw.draw(st.integers(0, 8 * len(found[key]) - 1))
    store = MemoryStore()
    for name, data in found.items():
        store.put_if_absent(name, data)
    flip(store, key, bit)
    report = verify(store)
    assert not report.is_clean
    assert any(key in problem.where or key in problem.detail for problem in report.problems)


def test_any_object_that_is_gone_is_found_unless_replay_can_do_without():
    for key in objects():
        store = MemoryStore()
        for name, data in objects().items():
            if name != key:
                store.put_if_absent(name, data)
        optional = key.endswith((".checkpoint", LEASE)) or "quarantine" in key
        covered = "journal/" in key and int(key[-20:]) <= 6 if not optional else False
        last = (
            "journal/" in key
            and not optional
            and int(key[-20:])
            == max(int(k[-20:]) for k in objects() if "journal/" in k and "." not in k)
        )
        report = verify(store, deep=False)
        assert report.is_clean == (optional or covered or last), key
        if last:  # nothing lies behind it: its bundle is an orphan now
            assert report.recorded.orphans == 1


# -- one damage each, by name -------------------------------------------------------------------


@pytest.mark.parametrize("deep", [False, True])
def test_a_missing_bundle_is_named_once(deep: bool):
    builder = small_tier()
    key = PREFIX + first_part(builder).bundle.key
    before = verify(builder.store, deep=False)
    builder.store.delete(key)
    report = verify(builder.store, deep=deep)
    assert report.problems == [Problem("missing", key, "an entry names this object")]
    assert report.damaged == {key: [WHOLE]}
    named = report.named_objects, report.named_bytes
    assert named == (before.named_objects, before.named_bytes)  # it is named as ever


@pytest.mark.parametrize("deep", [False, True])
def test_a_truncated_object_has_the_wrong_size(deep: bool):
    builder = small_tier()
    key = PREFIX + first_part(builder).bundle.key
    change(builder.store, key, builder.store.get(key)[:-1])
    report = verify(builder.store, deep=deep)
    assert "size" in kinds(report)
    assert {problem.where for problem in report.problems} == {key}
    assert report.checked_messages == (11 if deep else 0)  # only the footer is cut


def test_a_flipped_bit_of_a_record_names_the_block_and_the_message():
    builder = small_tier()
    part = first_part(builder)
    key = PREFIX + part.bundle.key
    body_at = bytes(builder.store.get(key)).index(b"c" * 200)
    flip(builder.store, key, 8 * body_at)
    report = verify(builder.store)
    assert dict(report.problem_counts) == {"block": 1, "record": 1}
    end = part.section.start + part.section.records_bytes
    start = part.section.start
    assert report.problems[0].detail == (
        f"{QUEUE} queue offsets [0, 5): bytes [{start}, {end}) fail their checksum"
    )
    assert report.problems[1].detail == f"{QUEUE} queue offset 4: the record has the fault CRC"
    assert report.checked_messages == 10
    assert report.damaged == {key: [start]}


def big_tier(*, packs: bool) -> tuple[TierBuilder, str, list[Part]]:
    """Two queues with sections of several blocks of records and of items, in one bundle; its key, and its parts."""
    builder = TierBuilder()
    body = text(1, 400)
    ones = batch_of(0, [b"%d %s" % (n, body) for n in range(4000)], queue=OTHER)
    twos = batch_of(0, [b"%d %s" % (n, body) for n in range(4000)])
    builder.add_round(ones, twos)
    if packs:
        gather(builder)
    (found,) = parts_by_bundle(builder.journal.state)
    parts = [one.part for one in found[1]]
    assert all(part.section.is_packed == packs for part in parts)
    return builder, PREFIX + found[0].key, parts


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("where", ["records", "items", "table"])
def test_a_flipped_block_costs_what_lies_in_it_and_no_other_queue(packs: bool, where: str):
    """By the words of ``verify`` and by what can still be read: the same queue offsets."""
    builder, key, (_, mine) = big_tier(packs=packs)
    place = mine.section
    at = {
        "records": place.stored_bytes // 2,
        "items": place.items_at + 30_000,
        "table": place.table_at + 3,
    }
    flip(builder.store, key, 8 * (place.start + at[where]))
    report = verify(builder.store)
    some = set(range(0, 4000, 97))
    assert readable_offsets(builder, OTHER, some) == some
    if where == "table":
        assert readable_offsets(builder, QUEUE, some) == some
        assert [p.kind for p in report.problems] == ["table"]
        assert "read whole" in report.problems[0].detail
        return
    found = re.match(
        re.escape(str(QUEUE)) + r" queue offsets \[(\d+), (\d+)\)", report.problems[0].detail
    )
    assert found
    low, high = int(found[1]), int(found[2])
    some |= {max(0, low - 1), low, high - 1, high}
    assert some - readable_offsets(builder, QUEUE, some) == some & set(range(low, high))
    assert report.problems[0].kind == "block"
    block = PACKED_BLOCK_BYTES if packs else BLOCK_BYTES
    most = block // (mine.log_bytes // 4000) + 2 if where == "records" else BLOCK_BYTES // 20 + 2
    assert high - low <= most
    assert 8000 - (high - low) <= report.checked_messages < 8000 + (where == "records")


def readable_offsets(builder: TierBuilder, queue: MessageQueue, some: set[int]) -> set[int]:
    """Those of some queue offsets whose item and record can be had."""
    incarnation = builder.journal.state.incarnation(queue)
    assert incarnation
    found: set[int] = set()
    for part in incarnation.parts():
        for number in sorted(offset - part.queue_offset for offset in some):
            try:
                item = read_range(
                    builder.store, PREFIX, part.index.part_of(20 * number, 20 * number + 20)
                )
                start, size, _ = struct.unpack(">qiq", item)
                at = start - part.log_offset
                read_range(builder.store, PREFIX, part.log.part_of(at, at + size))
            except DataError:
                continue
            found.add(part.queue_offset + number)
    return found


def test_a_damaged_block_and_block_table_leave_nothing_to_prove_the_section_by():
    builder, key, (_, mine) = big_tier(packs=False)
    place = mine.section
    for at in (place.items_at, place.table_at):
        flip(builder.store, key, 8 * (place.start + at))
    report = verify(builder.store)
    (problem,) = report.problems
    assert problem.kind == "section"
    assert problem.detail.startswith(f"{QUEUE} queue offsets [0, 4000): all of it can't be proven")
    assert report.checked_messages == 4000


@pytest.mark.parametrize("behind", [1, FOOTER_BYTES + 3])
def test_a_flipped_bit_of_the_bundles_own_table_or_footer_costs_no_message(behind: int):
    builder = small_tier()
    bundle = first_part(builder).bundle
    flip(builder.store, PREFIX + bundle.key, 8 * (bundle.size_bytes - behind))
    report = verify(builder.store)
    assert [(p.kind, p.where) for p in report.problems] == [("table", PREFIX + bundle.key)]
    assert "no message is lost" in report.problems[0].detail
    assert report.checked_messages == 11


def test_a_bundle_replaced_by_another_whole_one_is_found():
    builder = small_tier()
    parts = first_part(builder)
    other = TierBuilder()
    other.add([b"A", (3, b"inner"), b"C" * 200])
    (mine,) = named_bundles(other.journal.state)
    key = PREFIX + parts.bundle.key
    change(builder.store, key, other.store.get(PREFIX + mine))
    assert {"description", "section"} <= kinds(verify(builder.store))


def test_an_outage_of_one_object_is_a_problem_of_that_object():
    builder = small_tier()
    key = first_part(builder).bundle.key
    store = FaultyStore(
        builder.store,
        random.Random(1),
        Rule(Fault.UNAVAILABLE, frozenset({"get"}), key, times=None),
    )
    report = verify(store)
    assert dict(report.problem_counts) == {"unreadable": 1}
    assert report.checked_messages == 6


def test_a_damaged_quarantined_record_is_found():
    builder = small_tier()
    key = next(info.key for info in builder.store.list(PREFIX + "quarantine/"))
    flip(builder.store, key, 3)
    assert [(p.kind, p.where) for p in verify(builder.store).problems] == [("block", key)]


# -- defects of a writer: right checksums over wrong things -------------------------------------


def forged(batch: RecordBatch, **said: Any) -> VerifyReport:
    """A tier whose only part has these records, under right checksums; the bundle and the journal say ``said`` of it."""
    builder = TierBuilder()
    commit = builder.take(replace(batch, queue=QUEUE, base_offset=QueueOffset(0)))
    of = CommitColumns.of([commit])
    place = QUEUE, 0, commit.segment, commit.log_offset, commit.queue_offset
    row = SectionRow(
        *place, int(of.holes[0]), int(of.low_ms[0]), int(of.high_ms[0]), commit.last
    )._replace(**said)
    key = bundle_key("", 0, 1, builder.uploader.next_id())
    section = build_section(commit.data(), of.items)
    table = table_of([(row, section.place)])
    tail = build_tail(table, pack_table(table))
    builder.store.put_if_absent(PREFIX + key, [*section.buffers, tail])
    bundle = Bundle(key, section.place.size_bytes + len(tail))
    builder.say({"do": "part", "bundles": [bundle_row(bundle, pack_table(table))]})
    return verify(builder.store)


THREE = batch_of(0, [b"a" * 50, b"b" * 50, b"c" * 50])


def test_forging_nothing_is_clean():
    assert forged(THREE).is_clean


@pytest.mark.parametrize(
    ("kind", "batch"),
    [
        ("foreign", batch_of(0, [b"a"], queue=MessageQueue(QUEUE.topic, 99))),
        ("foreign", batch_of(0, [b"a"], queue=MessageQueue("another", QUEUE.queue_id))),
        ("foreign", batch_of(8, [b"a"])),
        ("foreign", replace(THREE, positions=THREE.positions[[0, 0, 2]])),
        ("foreign", replace(THREE, positions=THREE.positions[[1, 0, 2]])),
        ("index", replace(THREE, positions=THREE.positions[[1, 0, 2]])),
        ("index", replace(THREE, positions=THREE.positions + 1)),
        ("index", replace(THREE, positions=THREE.positions - 1)),
        ("index", replace(THREE, positions=np.array([2**62] * 3, np.int64))),
        ("index", replace(THREE, sizes=-THREE.sizes)),
        ("record", replace(THREE, sizes=THREE.sizes - 1)),
        ("record", replace(THREE, data=bytes(memoryview(THREE.data))[:-1] + b"?" * 1, positions=THREE.positions[[0, 1, 1]])),
        ("record", replace(THREE, data=bytes(memoryview(THREE.data)).replace(b"b" * 50, b"x" * 50))),
    ],
)  # fmt: skip
def test_wrong_records_and_items_under_right_checksums(kind: str, batch: RecordBatch):
    if kind == "record" and batch.positions[1] == batch.positions[2]:
        batch = replace(
            THREE,
            data=bytes(memoryview(THREE.data))[:100]
            + b"\xff" * 3
            + bytes(memoryview(THREE.data))[103:],
        )
    assert kind in kinds(forged(batch))


def test_an_item_of_an_inner_batch_behind_its_end_is_foreign():
    batch = batch_of(0, [(3, b"inner")])
    longer = replace(
        batch,
        **{
            name: np.repeat(getattr(batch, name)[:1], 4)
            for name in (
                "positions",
                "sizes",
                "tag_codes",
                "store_timestamps_ms",
                "physical_offsets",
            )
        },
    )
    report = forged(longer)
    assert [p.detail for p in report.problems] == [
        f"{QUEUE} queue offset 3: the record is of another queue offset"
    ]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("description", {"store_min_ms": 10**15, "store_max_ms": 10**15}),
        ("record", {"last": 99}),
        ("index", {"holes": 1}),
    ],
)
def test_a_journal_that_says_something_else_than_the_records(kind: str, said: dict[str, int]):
    assert kind in kinds(forged(THREE, **said))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("queue_id", 99), ("incarnation", 3), ("segment", 900), ("log_offset", 9), ("queue_offset", 9),
        ("count", 1), ("holes", 1), ("store_min_ms", 9), ("store_max_ms", 9), ("last", 9), ("truncated", 1), ("crc", 9),
    ],
)  # fmt: skip
def test_a_bundle_that_says_something_else_of_a_section_than_the_journal(name: str, value: int):
    builder = small_tier()
    bundle = first_part(builder).bundle
    key = PREFIX + bundle.key
    data = builder.store.get(key)
    table = read_table(data, len(data), where=key)
    table.rows[name][0] = value
    tail = build_tail(table, pack_table(table))
    change(builder.store, key, data[: int(table.rows["size_bytes"].sum())] + tail)
    report = verify(builder.store)
    assert "description" in kinds(report)
    assert report.checked_messages == 11


def test_a_bundle_of_another_level_than_the_journal_says():
    builder = small_tier()
    key = PREFIX + first_part(builder).bundle.key
    data = builder.store.get(key)
    table = replace(read_table(data, len(data), where=key), level=2)
    size = int(table.rows["size_bytes"].sum())
    change(builder.store, key, data[:size] + build_tail(table, pack_table(table)))
    (problem,) = verify(builder.store).problems
    assert (problem.kind, problem.detail) == ("description", "level is 2; the journal says 0")


def test_bytes_that_no_item_points_at_are_recorded():
    data = bytes(memoryview(THREE.data))
    report = forged(replace(THREE, data=data + b"\0" * 9))
    assert (report.is_clean, report.recorded.unreferenced_bytes) == (True, 9)


def test_many_problems_are_counted_and_the_first_are_listed():
    many = batch_of(5, [b"x"] * 50)
    report = forged(many)
    assert report.problem_counts["foreign"] == 21  # 20 by name, one for the rest
    assert report.problems[20].detail == f"{QUEUE} 30 more: the record is of another queue offset"
    full = VerifyReport()
    for number in range(PROBLEMS_LISTED_MAX + 5):
        full.add(Problem("block", "k", str(number)))
    assert (len(full.problems), full.problem_counts["block"]) == (
        PROBLEMS_LISTED_MAX,
        PROBLEMS_LISTED_MAX + 5,
    )


# -- journal and listing ------------------------------------------------------------------------


def journal_keys(store: ObjectStore) -> list[str]:
    return [info.key for info in store.list(PREFIX + "journal/")]


def test_a_damaged_old_entry_that_readers_jump_over_is_found():
    builder = small_tier()
    flip(builder.store, journal_keys(builder.store)[1], 100)
    report = verify(builder.store)
    assert [(p.kind, p.where) for p in report.problems] == [
        ("journal", journal_keys(builder.store)[1])
    ]
    assert "readers begin at a checkpoint behind it" in report.problems[0].detail
    assert report.checked_messages == 11


def test_a_damaged_last_entry_ends_nothing():
    builder = small_tier()
    last = journal_keys(builder.store)[-1]
    flip(builder.store, last, 100)
    report = verify(builder.store)
    assert {(p.kind, p.where) for p in report.problems} == {("journal", last)}
    assert not any("readers begin" in p.detail for p in report.problems)
    assert report.checked_messages == 9
    assert report.recorded.orphans == 0, "nobody knows what the damaged entry names"


def test_a_checkpoint_with_another_state_is_found():
    builder = small_tier()
    key = next(key for key in journal_keys(builder.store) if key.endswith(".checkpoint"))
    found = decode_checkpoint(builder.store.get(key), where=key)
    other = replace(found, state={**found.state, "refused_parts": 7})
    change(builder.store, key, encode_checkpoint(other))
    report = verify(builder.store)
    assert Problem("journal", key, "replay gives another state") in report.problems


def test_a_missing_entry_in_the_middle_is_found():
    builder = small_tier()
    keys = [key for key in journal_keys(builder.store) if "." not in key]
    builder.store.delete(keys[-1])
    builder.journal.append([{"do": "meta", "store": {}}])
    assert kinds(verify(builder.store, deep=False)) == {"journal"}


def test_a_missing_entry_that_readers_jump_over_is_named():
    """There is but one checkpoint, so nothing was trimmed yet, and what is below the missing one is not stale."""
    builder = TierBuilder()
    builder.add([b"a"])
    builder.add([b"b"])
    builder.add([b"c"])
    builder.journal.write_checkpoint(force=True)
    builder.add([b"d"])
    key = journal_keys(builder.store)[1]
    builder.store.delete(key)
    report = verify(builder.store)
    assert report.problems == [Problem("journal", key, "missing, as all up to entry 3")]
    assert not report.recorded.stale_entries
    assert report.checked_messages == 4


def test_a_lease_that_cannot_be_read_is_named():
    builder = small_tier()
    change(builder.store, PREFIX + LEASE, b"nonsense")
    assert kinds(verify(builder.store, deep=False)) == {"lease"}


def test_orphans_and_unknown_keys_are_recorded_and_no_failure():
    builder = small_tier()
    for number, epoch in enumerate([0, 1, 1]):
        key = bundle_key(PREFIX, 0, 9, ObjectId(epoch, "0badcafe", 99 + number))
        builder.store.put_if_absent(key, b"12345")
    builder.store.put_if_absent(PREFIX + "strange", b"?")
    builder.store.put_if_absent(PREFIX + "journal/strange", b"?")
    builder.store.put_if_absent(PREFIX + "timer/of/others", b"?")
    builder.store.put_if_absent("elsewhere", b"?")
    report = verify(builder.store)
    assert report.is_clean
    recorded = report.recorded
    assert (recorded.orphans, recorded.orphan_bytes, recorded.orphans_of_present_epoch) == (
        3,
        15,
        2,
    )
    assert recorded.unknown_keys == 2
    assert "unknown: strange" in recorded.notes


class Busy(WrappingStore):
    """A writer that commits while we list, and a collector that deletes what is no longer named while we read."""

    def __init__(self, builder: TierBuilder) -> None:
        super().__init__(builder.store)
        self._builder = builder
        self._calls = 0

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        if prefix == PREFIX:
            self._builder.add([b"new"])
        yield from self._inner.list(prefix, start_after=start_after)
        if prefix == PREFIX:
            self._builder.add([b"newer"])

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        bundle = first_part(self._builder).bundle
        if key.endswith(bundle.key) and not self._calls:
            self._calls += 1
            gather(self._builder)
            self._inner.delete(PREFIX + bundle.key)
        return self._inner.get(key, byte_range)


def test_what_writers_and_collectors_do_meanwhile_is_no_damage():
    builder = small_tier()
    report = verify(Busy(builder))
    assert report.problems == []
    assert report.recorded.orphans == 0


# -- the state in itself ------------------------------------------------------------------------


def state_of(builder: TierBuilder, **changes: Any) -> TierState:
    incarnation = builder.journal.state.incarnation(QUEUE)
    assert incarnation
    return replace(builder.journal.state, queues={QUEUE: (replace(incarnation, **changes),)})


def test_a_state_that_contradicts_itself_is_found_whatever_the_contradiction():
    builder = small_tier()
    incarnation = builder.journal.state.incarnation(QUEUE)
    assert isinstance(incarnation, Incarnation)
    one, two, three = incarnation.segments
    part = one.parts[0]
    assert list(check_state(state_of(builder))) == []
    wrong: list[dict[str, Any]] = [
        {"min_offset": 99}, {"commit_offset": 1}, {"log_end": 3}, {"ended": "why"}, {"number": 1},
        {"gaps": ()}, {"segments": (one, three)}, {"segments": (two, one, three)},
        {"segments": (replace(one, sealed=False), two, three)}, {"segments": (one, replace(two, parts=Parts.of([])), three)},
        {"segments": (replace(one, base_offset=LogOffset(1)), two, three)},
        *(
            {"segments": (replace(one, parts=Parts.of([bad])), two, three)}
            for bad in (
                replace(part, count=6), replace(part, holes=99),
                replace(part, queue_offset=QueueOffset(1)), replace(part, log_offset=LogOffset(1)),
                replace(part, section=replace(part.section, size_bytes=part.section.size_bytes - 1)),
                replace(part, section=replace(part.section, start=part.bundle.size_bytes)),
                replace(part, bundle=replace(part.bundle, key="strange")), replace(part, items_at=1),
                replace(part, bundle=replace(part.bundle, level=2)), replace(part, records_at=1),
                replace(part, bundle=replace(part.bundle, key=f"topic/x/0/{part.bundle.key[-51:]}")),
            )
        ),
    ]  # fmt: skip
    for changes in wrong:
        found = list(check_state(state_of(builder, **changes)))
        assert found, changes
        assert {problem.kind for problem in found} == {"state"}
        assert all(problem.where.startswith(str(QUEUE)) for problem in found)


# -- a local store ------------------------------------------------------------------------------


def tier_of(local: SyntheticStore, upto: dict[MessageQueue, int] | None = None) -> TierBuilder:
    builder = TierBuilder()
    for queue, bounds in local.queues().items():
        file = builder.file(queue, bounds.min)
        end = (upto or {}).get(queue, bounds.end)
        while file.commit_offset < end:
            batch = local.read(
                queue, file.commit_offset, bytes_max=300, count_max=end - file.commit_offset
            )
            assert batch
            builder.add_batch(batch)
    return builder


def local_store() -> SyntheticStore:
    local = SyntheticStore()
    for number in range(20):
        local.append("a", 0, b"a%d" % number)
        local.append("b", 1, b"b%d" % number, first=5)
    return local


A, B = MessageQueue("a", 0), MessageQueue("b", 1)


@pytest.mark.parametrize("deep", [False, True])
def test_equal_stores_have_no_difference(deep: bool):
    local = local_store()
    report = verify(tier_of(local).store, deep=deep, local=local)
    assert report.problems == []
    found = report.comparison
    assert found
    assert (found.queues, found.messages) == (2, 40)
    assert found.record_bytes == sum(len(raw) for q in (A, B) for raw in local.raw(q).values())
    assert (
        found.lag_messages,
        found.skipped_messages,
        found.expired_messages,
        found.ahead_messages,
    ) == (0,) * 4


def test_a_difference_is_named_by_queue_and_offset():
    local = local_store()
    tier = tier_of(local)
    raw = local._queues[A].records[7]
    local._queues[A].records[7] = raw[:-3] + b"\xff" + raw[-2:]
    local._queues[B].records[2] += b"longer"
    report = verify(tier.store, deep=False, local=local)
    details = {(p.kind, p.where, p.detail) for p in report.problems}
    assert details == {
        ("difference", "a/0", f"queue offset 7: 1 bytes differ, the first at byte {len(raw) - 3} of the record"),
        (
            "difference", "b/1",
            f"queue offset 7: {len(local.raw(B)[7]) - 6} bytes in the tier, {len(local.raw(B)[7])} in the local store",
        ),
    }  # fmt: skip


def test_what_only_one_side_has_is_counted_and_no_difference():
    local = local_store()
    tier = tier_of(local, {A: 15})
    local.expire("b", 1, 10)
    local.append("new", 0, b"x")
    report = verify(tier.store, deep=False, local=local)
    found = report.comparison
    assert report.is_clean
    assert found
    assert (found.messages, found.lag_messages, found.expired_messages) == (15 + 15, 5 + 1, 5)
    del local._queues[B]
    del local._queues[A].records[12:]
    report = verify(tier.store, deep=False, local=local)
    found = report.comparison
    assert found
    assert (report.is_clean, found.messages, found.ahead_messages, found.expired_messages) == (
        True,
        12,
        3,
        20,
    )


def test_gaps_and_a_later_start_are_skipped_and_counted():
    local = SyntheticStore()
    for number in range(20):
        local.append("a", 0, b"a%d" % number)
    builder = TierBuilder()
    builder.file(A, 5)
    for start, count in ((5, 5), (14, 6)):
        if start == 14:
            builder.gap(4, queue=A)
        batch = local.read(A, start, bytes_max=10**6, count_max=count)
        assert batch
        builder.add_batch(batch)
    report = verify(builder.store, local=local)
    assert report.problems == []
    assert report.comparison
    assert (report.comparison.messages, report.comparison.skipped_messages) == (11, 5 + 4)


class Fixed(SyntheticStore):
    """A local store that gives one batch, cut as it is asked."""

    def __init__(self, batch: RecordBatch) -> None:
        super().__init__()
        self._batch = batch

    def queues(self) -> Any:
        from tiered.model import QueueBounds

        return {QUEUE: QueueBounds(self._batch.base_offset, self._batch.end_offset)}

    def read(self, queue: MessageQueue, start: int, *, bytes_max: int, count_max: int) -> Any:
        from tiered.log.composite import trim

        return trim(self._batch, QueueOffset(start))


ITEMS: list[Any] = [b"a", None, (3, b"inner"), b"b" * 300, None, b"c"]


def test_holes_and_inner_batches_compare_equal_in_any_cut():
    builder = TierBuilder()
    builder.add(ITEMS[:2])
    builder.add(ITEMS[2:5], roll=True)
    builder.add(ITEMS[5:])
    report = verify(builder.store, local=Fixed(batch_of(0, ITEMS)))
    assert report.problems == []
    assert report.comparison
    assert report.comparison.messages == 8


@pytest.mark.parametrize(
    ("items", "what"),
    [
        ([b"a", b"?", *ITEMS[2:]], "queue offset 1: a hole in the tier"),
        ([None, *ITEMS[1:]], "queue offset 0: a hole in the local store"),
    ],
)
def test_a_hole_against_a_message_is_a_difference(items: list[Any], what: str):
    builder = TierBuilder()
    builder.add(ITEMS)
    report = verify(builder.store, local=Fixed(batch_of(0, items)))
    assert [problem.detail for problem in report.problems] == [what]


def test_a_part_that_cannot_be_read_is_a_problem_and_the_rest_is_compared():
    local = local_store()
    tier = tier_of(local)
    incarnation = tier.journal.state.incarnation(A)
    assert incarnation
    key = PREFIX + incarnation.parts()[1].bundle.key
    flip(tier.store, key, 800)
    report = verify(tier.store, deep=False, local=local)
    assert [problem.kind for problem in report.problems] == ["unreadable"]
    assert report.comparison
    assert report.comparison.messages == 40 - incarnation.parts()[1].count


def test_a_local_queue_that_cannot_be_read_is_a_problem_and_the_rest_is_compared():
    class Broken(Fixed):
        def read(self, queue: MessageQueue, start: int, *, bytes_max: int, count_max: int) -> Any:
            raise DataError("a torn page")

    builder = TierBuilder()
    builder.add(ITEMS)
    report = verify(builder.store, local=Broken(batch_of(0, ITEMS)))
    assert [(p.kind, p.where) for p in report.problems] == [("unreadable", f"local {QUEUE}")]


def test_a_report_is_plain_data():
    from dataclasses import asdict

    text = json.dumps(asdict(verify(small_tier().store, local=local_store())))
    assert json.loads(text)["recorded"]["holes"] == 2
