"""Segments that sealing compresses: the same messages, whoever reads, when damaged, repaired, rebuilt, cut."""

from __future__ import annotations

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.dispatching import FAST, assert_equal, dispatching
from support.fetching import expected
from support.journals import PREFIX
from support.packing import noise, pack, parts_of, text
from support.synthetic import SyntheticStore
from support.tiers import QUEUE, TIME_MS, TierBuilder

from backends.memory import MemoryStore
from backends.metered import MeteredStore
from tiered.clock import ManualClock
from tiered.dispatch.packing import Compression
from tiered.errors import DataError, InvalidError
from tiered.format.object import parse_trailer
from tiered.journal.reader import JournalReader
from tiered.log import seal
from tiered.log import state as states
from tiered.log.described import Described, read_described
from tiered.log.objects import read_range, read_trailer
from tiered.log.parts import part_json, part_of, queue_action
from tiered.log.reader import TierReader
from tiered.log.rebuild import propose
from tiered.log.seal import SealPolicy, plan_seals
from tiered.log.state import Gap, TierMachine
from tiered.log.takeback import head_of
from tiered.log.verify import verify_tier
from tiered.model import MessageQueue, QueueOffset
from tiered.plugin.repair import Repairer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from support.tiers import Item

    from backends.base import ObjectStore

SMALL = Compression(block_bytes=512)
MERGING = SealPolicy(1 << 20, 8 << 20, packs=True)
BIG = [text(n, 20_000) for n in range(10)]


def messages(store: ObjectStore, **options: Any) -> dict[int, bytes]:
    """All records, by queue offset."""
    reader = TierReader(store, PREFIX)
    reader.refresh()
    queue = reader.queue(QUEUE)
    found: dict[int, bytes] = {}
    for batch in queue.batches(queue.life.min_offset, **options):
        if isinstance(batch, Gap):
            continue
        records = batch.records
        view = memoryview(records.data)
        for number in range(records.count):
            at, size = int(records.positions[number]), int(records.sizes[number])
            found[records.base_offset + number] = bytes(view[at : at + size])
    return found


def built(rows: Sequence[Sequence[Item]], **options: Any) -> tuple[TierBuilder, dict[int, bytes]]:
    builder, wanted = TierBuilder(), dict[int, bytes]()
    for row in rows:
        wanted |= expected(builder.file(QUEUE).append_offset, row)
        builder.add(row, **options)
    return builder, wanted


def actions(builder: TierBuilder) -> list[str]:
    journal = [info.key for info in builder.store.list(PREFIX + "journal/")]
    entries = [
        json.loads(builder.store.get(key).splitlines()[0]) for key in journal if key[-1].isdigit()
    ]
    return [action["do"] for entry in entries for action in entry["actions"]]


ITEMS = st.lists(
    st.one_of(
        st.none(),
        st.binary(max_size=40),
        st.tuples(st.integers(1, 4), st.binary(max_size=9)),
        st.builds(text, st.integers(0, 9), st.integers(100, 3000)),
        st.builds(noise, st.integers(0, 9), st.integers(100, 2000)),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(ITEMS, min_size=1, max_size=6), st.integers(64, 4096), st.integers(1, 5000))
def test_i3_every_record_is_as_it_was(rows: list[list[Item]], block_bytes: int, bytes_max: int):
    builder, wanted = built(rows)
    assert messages(builder.store) == wanted
    before = parts_of(builder)
    pack(builder, MERGING, compression=Compression(block_bytes=block_bytes))
    assert messages(builder.store) == messages(builder.store, bytes_max=bytes_max) == wanted
    (part,) = parts_of(builder)
    if len(before) > 1 and part.log.size_bytes:
        assert part.log.packed_bytes, "it was tried"
        assert part.log.object_bytes == builder.store.head(PREFIX + part.log.key).size_bytes
    assert verify_tier(builder.store, PREFIX, deep=True).problems == []


def test_a_large_part_is_rewritten_once_and_what_names_it_is_said_to_need_a_newer_program():
    builder, wanted = built([BIG, BIG[:2]])
    (job,) = pack(builder)
    (one, two) = parts_of(builder)
    assert one.log.is_packed
    assert one.log.object_bytes < one.log.payload_bytes / 2
    assert job.rewritten()[0] == 1
    assert not two.log.packed_bytes, "smaller than what is worth two requests"
    assert actions(builder)[-1] == "pack"
    assert messages(builder.store) == wanted
    assert pack(builder) == []
    reader = TierReader(builder.store, PREFIX)
    reader.refresh()
    assert reader.state == builder.journal.state


def test_what_does_not_shrink_is_left_where_it_is_and_not_tried_again():
    builder, wanted = built([[noise(n, 30_000) for n in range(4)]])
    (before,) = parts_of(builder)
    objects = [info.key for info in builder.store.list(PREFIX + "queue/")]
    pack(builder)
    (after,) = parts_of(builder)
    assert [info.key for info in builder.store.list(PREFIX + "queue/")] == objects
    assert after == replace(before, log=replace(before.log, packed_bytes=before.log.payload_bytes))
    assert not after.log.is_packed
    assert messages(builder.store) == wanted
    assert pack(builder) == []


def test_merging_makes_a_plain_object_of_what_does_not_shrink():
    builder, wanted = built([[noise(n, 3000)] for n in range(4)])
    pack(builder, MERGING)
    (part,) = parts_of(builder)
    assert part.log.packed_bytes == part.log.payload_bytes
    assert read_trailer(builder.store, PREFIX, part.log).table is None
    assert messages(builder.store) == wanted


def test_without_compression_nothing_is_packed_and_a_packed_tier_stays_as_it_is():
    builder, _ = built([BIG])
    assert not any(
        plan.rewrites for plan in plan_seals(builder.journal.state, SealPolicy(), with_open=True)
    )
    pack(builder)
    (part,) = parts_of(builder)
    assert plan_seals(builder.journal.state, SealPolicy(), with_open=True) == []
    builder.add([b"more"], roll=True)
    assert parts_of(builder)[0] == part


# -- the journal ---------------------------------------------------------------------------------


def test_rows_of_parts_keep_what_is_stored():
    builder, _ = built([BIG])
    (plain,) = parts_of(builder)
    assert len(part_json(plain)) in {18, 19}
    pack(builder)
    (part,) = parts_of(builder)
    row = part_json(part)
    assert (len(row), part_of(row)) == (20, part)
    assert part_of(part_json(replace(part, last=0))) == replace(part, last=0)
    for wrong in (-1, part.log.payload_bytes + 1, "1", 1.5, None):
        with pytest.raises((ValueError, TypeError)):
            part_of([*row[:19], wrong])


def test_a_program_before_compression_says_that_it_is_too_old(monkeypatch: pytest.MonkeyPatch):
    builder, _ = built([BIG])
    pack(builder)
    handlers = {name: one for name, one in states._HANDLERS.items() if name != "pack"}
    monkeypatch.setattr(states, "_HANDLERS", handlers)
    with pytest.raises(InvalidError, match="unknown here") as caught:
        JournalReader(builder.store, PREFIX, TierMachine()).catch_up()
    assert "newer version" in str(caught.value)


def test_a_checkpoint_that_names_packed_objects_has_another_format():
    builder, wanted = built([BIG])
    key = builder.journal.write_checkpoint(force=True)
    pack(builder)
    builder.journal.write_checkpoint(force=True)
    found = [
        info.key for info in builder.store.list(PREFIX + "journal/") if "checkpoint" in info.key
    ]
    formats = [json.loads(builder.store.get(one).splitlines()[0])["format"] for one in found]
    assert formats == [2, 3], key
    for info in list(builder.store.list(PREFIX + "journal/")):
        if "checkpoint" not in info.key:
            builder.store.delete(info.key)
    assert messages(builder.store) == wanted


def test_pack_changes_nothing_that_seal_would_not():
    builder, wanted = built([BIG, BIG])
    one, two = parts_of(builder)
    state = builder.journal.state
    for parts in ([two, one], [one], [one, replace(two, count=3)]):
        rows = [part_json(part) for part in parts]
        builder.say(queue_action("pack", QUEUE, 0, segment=0, parts=rows))
        assert builder.journal.state.queues == state.queues
    assert messages(builder.store) == wanted


def test_neighbours_become_one_compressed_segment():
    builder, wanted = TierBuilder(), dict[int, bytes]()
    for number in range(4):
        row = [text(number, 3000)] * 3
        wanted |= expected(builder.file(QUEUE).append_offset, row)
        builder.add(row, roll=number > 0)
    policy = SealPolicy(1 << 20, 8 << 20, 1 << 30, packs=True)
    (plan,) = plan_seals(builder.journal.state, policy, with_open=True)
    assert plan.joins
    pack(builder, policy)
    (part,) = parts_of(builder)
    assert part.log.is_packed
    assert actions(builder)[-1] == "pack"
    assert messages(builder.store) == wanted
    assert plan_seals(builder.journal.state, policy, with_open=True) == []


# -- damage --------------------------------------------------------------------------------------


def copy_of(store: ObjectStore, key: str = "", data: bytes = b"") -> MemoryStore:
    found = MemoryStore()
    for info in store.list(""):
        found.put_if_absent(info.key, data if info.key == key else store.get(info.key))
    return found


def test_each_byte_of_a_tiny_compressed_tier():
    builder, wanted = built([[text(1, 1200)], [text(2, 900), None, text(3, 300)]])
    pack(builder, MERGING, compression=Compression(block_bytes=1000))
    (part,) = parts_of(builder)
    assert part.log.is_packed
    key = PREFIX + part.log.key
    data = builder.store.get(key)
    rng = random.Random(1)
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << rng.randrange(8)
        damaged = copy_of(builder.store, key, bytes(changed))
        report = verify_tier(damaged, PREFIX, deep=True)
        assert any(key in problem.where for problem in report.problems), at
        if at % 5:
            continue
        if part.log.trailer_bytes <= at < part.log.stored_bytes:
            with pytest.raises(DataError):
                messages(damaged)
        else:
            assert messages(damaged) == wanted, "the trailer is there twice"
    for other in (data[:-1], data[1:], data + b"\0", b"", data * 2):
        report = verify_tier(copy_of(builder.store, key, other), PREFIX, deep=True)
        assert any(key in problem.where for problem in report.problems), len(other)


def test_a_damaged_block_costs_the_records_in_it():
    builder, wanted = built([BIG])
    pack(builder, compression=Compression(block_bytes=64 * 1024))
    (part,) = parts_of(builder)
    key = PREFIX + part.log.key
    data = bytearray(builder.store.get(key))
    trailer = parse_trailer(bytes(data), where=key)
    assert trailer.table
    data[trailer.table.starts[1] + 5] ^= 4
    damaged = copy_of(builder.store, key, bytes(data))
    reader = TierReader(damaged, PREFIX)
    reader.refresh()
    whole = set()
    for offset in wanted:
        try:
            found = reader.queue(QUEUE).read(QueueOffset(offset), count_max=1)
        except DataError:
            continue
        assert found is not None
        whole.add(offset)
    assert whole == {n for n in wanted if not 3 <= n <= 6}, "64 KiB touch four of them"


def compressed_tier() -> tuple[MemoryStore, SyntheticStore]:
    local, store = SyntheticStore(), MemoryStore()
    for number in range(60):
        local.append("t", 0, text(number, 300))
    settings = replace(FAST, compression=SMALL)
    with dispatching(store, local, settings) as dispatcher:
        dispatcher.follow(lambda: False, until_idle=True)
        assert dispatcher.drain(20), dispatcher.fault
        dispatcher.seal_all()
    return store, local


def damaged_at(store: ObjectStore, at: int) -> str:
    """Flip a bit of the packed object; its key."""
    reader = TierReader(store, PREFIX)
    reader.refresh()
    (part,) = reader.state.queues[MessageQueue("t", 0)][-1].parts()
    assert part.log.is_packed
    key = PREFIX + part.log.key
    data = bytearray(store.get(key))
    data[at] ^= 1
    store.delete(key)
    store.put_if_absent(key, bytes(data))
    return key


def repairer_of(store: ObjectStore, local: SyntheticStore | None) -> Repairer:
    return Repairer(
        store, store, PREFIX, local,
        clock=ManualClock(), rng=random.Random(3), stop=threading.Event(),
    )  # fmt: skip


@pytest.mark.parametrize(("at", "needs_local"), [(3, False), (-30, False), (-1000, True)])
def test_what_is_damaged_is_repaired(at: int, needs_local: bool):
    store, local = compressed_tier()
    assert_equal(store, local)
    key = damaged_at(store, at)
    found = verify_tier(store, PREFIX, deep=True, local=local)
    assert key in found.damaged
    assert repairer_of(store, None).run(found.damaged).parts == (not needs_local)
    found = verify_tier(store, PREFIX, deep=True, local=local)
    assert repairer_of(store, local).run(found.damaged).parts == needs_local
    assert verify_tier(store, PREFIX, deep=True, local=local).problems == []
    assert_equal(store, local)


# -- whoever reads -------------------------------------------------------------------------------


def test_rebuilt_from_the_objects_alone():
    builder, _ = built([[text(n, 2000)] * 4 for n in range(4)])
    pack(builder, MERGING, compression=SMALL)
    infos = list(builder.store.list(PREFIX + "queue/"))
    with ThreadPoolExecutor(2) as pool:
        said = list(read_described(builder.store, PREFIX, infos, pool))
    objects = [one for one in said if isinstance(one, Described)]
    assert len(objects) == len(infos)
    proposal = propose(objects, TierMachine().initial(), quarantined={}, items=lambda _: b"")
    life = builder.journal.state.life(QUEUE)
    rebuilt = proposal.state.life(QUEUE)
    assert life
    assert rebuilt
    assert [replace(part, last=0) for part in life.parts()] == rebuilt.parts()
    assert TierMachine().checkpoint_format(proposal.state) == 3


def test_what_the_broker_takes_back_cuts_a_packed_part():
    builder, wanted = built([BIG])
    pack(builder)
    (part,) = parts_of(builder)
    builder.add([b"x"], roll=True)
    cut = 4
    log_bytes = sum(len(wanted[n]) for n in range(cut))
    head = head_of(part, cut, log_bytes=log_bytes, holes=0, last=0)
    builder.say(
        queue_action("take_back", QUEUE, 0, end=cut, was=11, part=part_json(head), reason="made so")
    )
    assert messages(builder.store) == {n: wanted[n] for n in range(cut)}
    reader = TierReader(builder.store, PREFIX)
    reader.refresh()
    over = reader.lives(QUEUE)[0]
    found = over.read(QueueOffset(cut))
    assert found is not None
    assert not isinstance(found, Gap)
    assert found.records.base_offset == cut
    assert bytes(memoryview(found.records.data)[: len(wanted[cut])]) == wanted[cut]


def test_by_store_time_with_one_trailer():
    builder, wanted = built([[text(n, 30_000) for n in range(40)]])
    pack(builder)
    metered = MeteredStore(builder.store)
    reader = TierReader(metered, PREFIX)
    reader.refresh()
    queue = reader.queue(QUEUE)
    for offset in (0, 7, 39):
        assert queue.offset_by_time(TIME_MS + offset) == offset
    assert queue.offset_by_time(TIME_MS + 99) == len(wanted)


def test_a_small_read_of_a_large_object_takes_the_trailer_and_the_blocks():
    builder, wanted = built([[noise(n, 15_000) + text(n, 15_000) for n in range(60)]])
    pack(builder)
    (part,) = parts_of(builder)
    assert part.log.is_packed
    assert part.log.object_bytes > 256 * 1024
    asked: list[tuple[int, int]] = []

    class Noting(MeteredStore):
        def get_ranges(self, key: str, byte_ranges: Any) -> Any:
            asked.extend((one.start, one.end) for one in byte_ranges)
            return super().get_ranges(key, byte_ranges)

    found = read_range(Noting(builder.store), PREFIX, part.log, 100_000, 100_010)
    whole = b"".join(wanted.values())
    assert bytes(found) == whole[100_000:100_010]
    assert len(asked) == 2
    assert asked[0] == (part.log.stored_bytes, part.log.object_bytes)
    assert asked[1][1] - asked[1][0] <= 128 * 1024


def test_the_seal_thread_counts_what_it_compresses_and_finds_what_was_left_plain(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(seal, "PACK_BYTES_MIN", 1000)
    local, store = SyntheticStore(), MemoryStore()
    rolling = replace(FAST, segment_bytes_max=6000, small_part_bytes=1000, part_bytes=3000)
    with dispatching(store, local, rolling) as dispatcher:
        for number in range(80):
            local.append("t", 0, text(number, 400))
        dispatcher.follow(lambda: False, until_idle=True)
        assert dispatcher.drain(20), dispatcher.fault
        dispatcher.seal_all()
        assert dispatcher.counters.packed_bytes == 0
    packing = replace(rolling, compression=SMALL)
    with dispatching(store, local, packing, seed=2) as dispatcher:
        dispatcher.seal_all()
        counters = dispatcher.counters
        assert 0 < counters.packed_stored_bytes < counters.packed_bytes * 3 / 4
    reader = TierReader(store, PREFIX)
    reader.refresh()
    (lives,) = reader.state.queues.values()
    assert all(part.log.packed_bytes for part in lives[-1].parts())
    assert_equal(store, local)
    assert verify_tier(store, PREFIX, deep=True, local=local).problems == []
    with dispatching(store, local, packing, seed=3) as dispatcher:
        dispatcher.seal_all()
        assert dispatcher.counters.rewritten_bytes == 0
