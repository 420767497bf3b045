"""Verification: a whole tier is clean, and each kind of damage is found and called by its name."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.journals import PREFIX
from support.synthetic import SyntheticStore
from support.tiers import QUEUE, TierBuilder, batch_of, put_index, put_log

from backends.memory import MemoryStore
from backends.testing.faulty import Fault, FaultyStore, Rule
from backends.wrapping import WrappingStore
from tiered.errors import DataError
from tiered.format.object import build_object, parse_trailer
from tiered.journal.checkpoint import decode_checkpoint, encode_checkpoint
from tiered.journal.entry import seal_text
from tiered.keys import LEASE, ObjectId, commit_log_key
from tiered.log.state import QueueLife, TierState, part_json, queue_action
from tiered.log.verify import verify_tier
from tiered.log.verify_report import PROBLEMS_LISTED_MAX, Problem, VerifyReport
from tiered.log.verify_state import check_state
from tiered.model import LogOffset, MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backends.base import ByteRange, ObjectInfo, ObjectStore
    from tiered.local.face import RecordBatch
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
    builder.add([b"last", None], queue=OTHER)
    builder.store.put_if_absent(PREFIX + LEASE, seal_text(LEASED))
    return builder


LEASED = {
    "format": 1, "writer": "0badcafe", "expires_ms": 1, "released": True, "generation": 0, "number": 0, "history": "",
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
    life = builder.journal.state.life(QUEUE)
    assert life
    return life.parts()[0]


# -- clean --------------------------------------------------------------------------------------


@pytest.mark.parametrize("deep", [False, True])
def test_a_whole_tier_is_clean_and_what_is_recorded_is_counted(deep: bool):
    builder = small_tier()
    report = verify(builder.store, deep=deep)
    assert report.problems == []
    assert report.is_clean
    assert (report.queues, report.parts, report.named_objects, report.messages) == (2, 5, 10, 10)
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
    assert report.checked_messages == 10
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


@settings(deadline=None, max_examples=300)
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
        if last:  # nothing lies behind it: its objects are orphans now
            assert report.recorded.orphans == 2


# -- one damage each, by name -------------------------------------------------------------------


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("which", ["log", "index"])
def test_a_missing_object_is_named_once(deep: bool, which: str):
    builder = small_tier()
    place = getattr(first_part(builder), which)
    builder.store.delete(PREFIX + place.key)
    report = verify(builder.store, deep=deep)
    assert report.problems == [Problem("missing", PREFIX + place.key, "an entry names this object")]


@pytest.mark.parametrize("deep", [False, True])
def test_a_truncated_object_has_the_wrong_size(deep: bool):
    builder = small_tier()
    key = PREFIX + first_part(builder).log.key
    change(builder.store, key, builder.store.get(key)[:-1])
    report = verify(builder.store, deep=deep)
    assert "size" in kinds(report)
    assert {problem.where for problem in report.problems} == {key}


def test_a_flipped_payload_bit_names_the_block_and_the_message():
    builder = small_tier()
    part = first_part(builder)
    key = PREFIX + part.log.key
    body_at = bytes(builder.store.get(key)).index(b"c" * 200)
    flip(builder.store, key, 8 * body_at)
    report = verify(builder.store)
    assert dict(report.problem_counts) == {"block": 1, "record": 1}
    assert report.problems[1].detail == f"{QUEUE} queue offset 4: the record has the fault CRC"
    assert report.checked_messages == 9


def test_a_flipped_trailer_bit_is_the_trailer():
    builder = small_tier()
    place = first_part(builder).log
    flip(builder.store, PREFIX + place.key, 8 * (place.object_bytes - 20))
    assert kinds(verify(builder.store)) == {"trailer"}


def test_an_object_replaced_by_another_whole_one_is_found():
    builder = small_tier()
    place = first_part(builder).log
    key = PREFIX + place.key
    data = builder.store.get(key)
    trailer = parse_trailer(data, where=key)
    bad = bytearray(data[: place.payload_bytes])
    bad[50] ^= 1
    made = build_object([bad], trailer.description)
    change(builder.store, key, b"".join(bytes(memoryview(b)) for b in made.buffers))
    assert {"trailer", "payload"} & kinds(verify(builder.store))


@pytest.mark.parametrize(
    ("name", "value"),
    [("topic", "x"), ("queue_offset", 9), ("count", 1), ("segment", 5), ("kind", "x")],
)
def test_an_object_that_says_something_else_of_itself(name: str, value: object):
    builder = small_tier()
    place = first_part(builder).index
    key = PREFIX + place.key
    data = builder.store.get(key)
    said = dict(parse_trailer(data, where=key).description)
    made = build_object([data[: place.payload_bytes]], {**said, name: value})
    change(builder.store, key, b"".join(bytes(memoryview(b)) for b in made.buffers))
    report = verify(builder.store)
    assert any(p.kind == "description" and p.detail.startswith(name) for p in report.problems)


def test_an_outage_of_one_object_is_a_problem_of_that_object():
    builder = small_tier()
    key = first_part(builder).log.key
    store = FaultyStore(
        builder.store,
        random.Random(1),
        Rule(Fault.UNAVAILABLE, frozenset({"get"}), key, times=None),
    )
    report = verify(store)
    assert dict(report.problem_counts) == {"unreadable": 1}
    assert report.checked_messages == 5


def test_a_damaged_quarantined_record_is_found():
    builder = small_tier()
    key = next(info.key for info in builder.store.list(PREFIX + "quarantine/"))
    flip(builder.store, key, 3)
    assert [(p.kind, p.where) for p in verify(builder.store).problems] == [("block", key)]


# -- defects of a writer: right checksums over wrong things -------------------------------------


def forged(batch: RecordBatch, **said: Any) -> VerifyReport:
    """A tier whose only part has these records, under right checksums."""
    builder = TierBuilder()
    file = builder.file()
    file.append(replace(batch, queue=QUEUE, base_offset=QueueOffset(0)), 0.0)
    commit = file.take(0)
    stored = put_log(builder.uploader, commit)
    part = replace(put_index(builder.uploader, stored), **said)
    fields = {"segment": commit.segment, "part": part_json(part)}
    builder.journal.append([queue_action("part", QUEUE, 0, **fields)])
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
        ("description", {"holes": 1}),
        ("index", {"holes": 1}),
    ],
)
def test_a_journal_that_says_something_else_than_the_objects(kind: str, said: dict[str, int]):
    assert kind in kinds(forged(THREE, **said))


def test_bytes_that_no_item_points_at_are_recorded():
    data = bytes(memoryview(THREE.data))
    report = forged(replace(THREE, data=data + b"\0" * 9))
    assert (report.is_clean, report.recorded.unreferenced_bytes) == (True, 9)


def test_many_problems_are_counted_and_the_first_are_listed():
    many = batch_of(5, [b"x"] * 50)
    report = forged(many)
    assert report.problem_counts["foreign"] == 21  # 20 by name, one for the rest
    assert report.problems[20].detail == "30 more: the record is of another queue offset"
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
    assert report.checked_messages == 10


def test_a_damaged_last_entry_ends_nothing():
    builder = small_tier()
    last = journal_keys(builder.store)[-1]
    flip(builder.store, last, 100)
    report = verify(builder.store)
    assert {(p.kind, p.where) for p in report.problems} == {("journal", last)}
    assert report.checked_messages == 9
    assert report.recorded.orphans == 0, "nobody knows what the damaged entry names"


def test_a_checkpoint_with_another_state_is_found():
    builder = small_tier()
    key = next(key for key in journal_keys(builder.store) if key.endswith(".checkpoint"))
    found = decode_checkpoint(builder.store.get(key), where=key)
    other = replace(found, state={**found.state, "queues": []})
    change(builder.store, key, encode_checkpoint(other))
    report = verify(builder.store)
    assert Problem("journal", key, "replay gives another state") in report.problems


def test_a_missing_entry_in_the_middle_is_found():
    builder = small_tier()
    keys = [key for key in journal_keys(builder.store) if "." not in key]
    builder.store.delete(keys[-1])
    builder.journal.append([{"do": "meta", "store": {}}])
    assert kinds(verify(builder.store, deep=False)) == {"journal"}


def test_a_lease_that_cannot_be_read_is_named():
    builder = small_tier()
    change(builder.store, PREFIX + LEASE, b"nonsense")
    assert kinds(verify(builder.store, deep=False)) == {"lease"}


def test_orphans_and_unknown_keys_are_recorded_and_no_failure():
    builder = small_tier()
    for number, generation in enumerate([0, 1, 1]):
        key = commit_log_key(
            PREFIX, QUEUE, 0, LogOffset(9), ObjectId(generation, "0badcafe", 99 + number)
        )
        builder.store.put_if_absent(key, b"12345")
    builder.store.put_if_absent(PREFIX + "strange", b"?")
    builder.store.put_if_absent(PREFIX + "journal/strange", b"?")
    builder.store.put_if_absent(PREFIX + "timer/of/others", b"?")
    builder.store.put_if_absent("elsewhere", b"?")
    report = verify(builder.store)
    assert report.is_clean
    recorded = report.recorded
    assert (recorded.orphans, recorded.orphan_bytes, recorded.orphans_of_present_reign) == (
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
        part = first_part(self._builder)
        if key.endswith(part.log.key) and not self._calls:
            self._calls += 1
            self._reseal(part)
        return self._inner.get(key, byte_range)

    def _reseal(self, part: Part) -> None:
        life = self._builder.journal.state.life(QUEUE)
        assert life
        segment = life.segments[0]
        data = self._inner.get(PREFIX + part.log.key)[: part.log.payload_bytes]
        made = self._builder.uploader.next_id()
        key = commit_log_key("", QUEUE, 0, part.log_offset, made)
        said = parse_trailer(self._inner.get(PREFIX + part.log.key), where="").description
        log = self._builder.uploader.put_merged(key, [data], said)
        parts = [part_json(replace(part, log=log))]
        self._builder.say(queue_action("seal", QUEUE, 0, segment=segment.base_offset, parts=parts))
        self._inner.delete(PREFIX + part.log.key)


def test_what_writers_and_collectors_do_meanwhile_is_no_damage():
    builder = small_tier()
    report = verify(Busy(builder))
    assert report.problems == []
    assert report.recorded.orphans == 0


# -- the state in itself ------------------------------------------------------------------------


def state_of(builder: TierBuilder, **changes: Any) -> TierState:
    life = builder.journal.state.life(QUEUE)
    assert life
    return replace(builder.journal.state, queues={QUEUE: (replace(life, **changes),)})


def test_a_state_that_contradicts_itself_is_found_whatever_the_contradiction():
    builder = small_tier()
    life = builder.journal.state.life(QUEUE)
    assert isinstance(life, QueueLife)
    one, two, three = life.segments
    part = one.parts[0]
    assert list(check_state(state_of(builder))) == []
    wrong: list[dict[str, Any]] = [
        {"min_offset": 99}, {"commit_offset": 1}, {"log_end": 3}, {"ended": "why"}, {"incarnation": 1},
        {"gaps": ()}, {"segments": (one, three)}, {"segments": (two, one, three)},
        {"segments": (replace(one, sealed=False), two, three)}, {"segments": (one, replace(two, parts=()), three)},
        {"segments": (replace(one, base_offset=LogOffset(1)), two, three)},
        *(
            {"segments": (replace(one, parts=(bad,)), two, three)}
            for bad in (
                replace(part, count=6), replace(part, holes=-1), replace(part, holes=99),
                replace(part, queue_offset=QueueOffset(1)), replace(part, log_offset=LogOffset(1)),
                replace(part, log=replace(part.log, end=part.log.payload_bytes + 1)),
                replace(part, log=replace(part.log, key="strange")),
                replace(part, log=part.index), replace(part, index=two.parts[0].index),
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
            file.append(batch, 0.0)
            commit = file.take(0)
            part = put_index(builder.uploader, put_log(builder.uploader, commit))
            file.log_stored()
            fields = {"segment": commit.segment, "part": part_json(part)}
            builder.say(queue_action("part", queue, 0, **fields))
            file.committed(commit, part)
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
    file = builder.file(A, 5)
    for start, count in ((5, 5), (14, 6)):
        if start == 14:
            builder.gap(4, queue=A)
        batch = local.read(A, start, bytes_max=10**6, count_max=count)
        assert batch
        file.append(batch, 0.0)
        commit = file.take(0)
        part = put_index(builder.uploader, put_log(builder.uploader, commit))
        file.log_stored()
        builder.say(queue_action("part", A, 0, segment=commit.segment, part=part_json(part)))
        file.committed(commit, part)
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
        from tiered.log.trim import trim

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
    life = tier.journal.state.life(A)
    assert life
    key = PREFIX + life.parts()[1].log.key
    flip(tier.store, key, 800)
    report = verify(tier.store, deep=False, local=local)
    assert [problem.kind for problem in report.problems] == ["unreadable"]
    assert report.comparison
    assert report.comparison.messages == 40 - life.parts()[1].count


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
