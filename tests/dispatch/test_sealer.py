"""Merging one segment: the same bytes, what objects say of themselves, and a bound on memory."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.journals import PREFIX
from support.tiers import QUEUE, TierBuilder

from backends.memory import MemoryStore
from backends.wrapping import WrappingStore
from tiered.dispatch.sealer import Sealer, SealJob
from tiered.dispatch.settings import DispatchSettings
from tiered.dispatch.uploads import Uploader
from tiered.log.objects import read_range, read_trailer
from tiered.log.seal import SealPolicy, plan_seals
from tiered.log.verify import verify_tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from support.tiers import Item
    from typing_extensions import Buffer

    from tiered.log.state import Part


def job_of(builder: TierBuilder, policy: SealPolicy) -> SealJob:
    """Of the first of a queue's segments, whether it has rolled or not."""
    return SealJob(plan_seals(builder.journal.state, policy, with_open=True)[0])


def content(builder: TierBuilder, parts: Sequence[Part]) -> tuple[bytes, bytes]:
    """All records and all items."""
    rows = [[part.log for part in parts], [part.index for part in parts]]
    read = [
        b"".join(read_range(builder.store, PREFIX, p, p.start, p.end) for p in row if p.size_bytes)
        for row in rows
    ]
    return read[0], read[1]


ITEMS = st.lists(
    st.one_of(st.none(), st.binary(max_size=40), st.tuples(st.integers(1, 4), st.binary(max_size=9))),
    min_size=1, max_size=5,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(ITEMS, min_size=1, max_size=8), st.sampled_from([0, 300, 10_000]))
def test_i3_merged_parts_have_the_same_bytes_and_say_what_they_are(
    rows: list[list[Item]], small: int
):
    builder = TierBuilder()
    for row in rows:
        builder.add(row)
    before = builder.journal.state.life(QUEUE)
    assert before
    policy = SealPolicy(small, 2 * small + 500)
    job = job_of(builder, policy)
    assert Sealer(builder.uploader, builder.store, PREFIX).advance(job)
    assert content(builder, job.parts) == content(builder, before.parts())
    for run, part in zip(job.plan.runs, job.parts, strict=True):
        if len(run) == 1:
            assert part == run[0]
            continue
        for place, kind in ((part.log, "commitlog"), (part.index, "consumequeue")):
            said = read_trailer(builder.store, PREFIX, place).description
            assert (said["kind"], said["merged"]) == (kind, len(run))
            assert (said["log_offset"], said["queue_offset"], said["count"]) == (
                part.log_offset, part.queue_offset, part.count,
            )  # fmt: skip
    builder.say(job.action())
    after = builder.journal.state.life(QUEUE)
    assert after
    assert after.parts() == job.parts
    assert after.segments[0].sealed
    assert verify_tier(builder.store, PREFIX, deep=True).problems == []


def test_a_job_goes_on_where_it_was_stopped():
    builder = TierBuilder()
    for number in range(6):
        builder.add([b"x%d" % number * 20])
    job = job_of(builder, SealPolicy(400, 800))
    assert len(job.plan.runs) > 1
    sealer = Sealer(builder.uploader, builder.store, PREFIX)
    asked = 0
    for limit in range(1, 100):  # each time it is allowed a little more
        left = limit

        def stop() -> bool:
            nonlocal left, asked
            left -= 1
            asked += 1
            return left < 0

        if sealer.advance(job, stop):
            break
    assert asked > len(job.plan.segment.parts)
    keys = [key.key for key in builder.store.list(PREFIX + "queue/")]
    made = sum(len(run) > 1 for run in job.plan.runs)
    assert len(keys) == 2 * (6 + made), "nothing was made twice"


class Sink(WrappingStore):
    """Swallows what is written, so that only what the sealer holds counts."""

    def put_if_absent(self, key: str, data: Sequence[Buffer] | Buffer) -> None:
        pass


@pytest.mark.parametrize("part_bytes", [2_000, 60_000])
def test_i8_merging_holds_one_merged_object_and_one_part(part_bytes: int):
    builder = TierBuilder(MemoryStore())
    for number in range(3_000_000 // part_bytes):
        builder.add([b"%d" % (number % 10) * part_bytes])
    job = job_of(builder, SealPolicy(100_000, 1_000_000))
    assert len(job.plan.runs) >= 3
    sink = Sink(builder.store)
    uploader = Uploader(sink, PREFIX, generation=1, writer="0badcafe")
    sealer = Sealer(uploader, sink, PREFIX)
    tracemalloc.start()
    try:
        assert sealer.advance(job)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 900_000 < peak < 1_000_000 + 2 * part_bytes + 100_000


def test_merged_parts_fit_any_buffer():
    for buffer_bytes in (1, 5, 1000, 1 << 20, 1 << 30):
        made = DispatchSettings(part_bytes=1, buffer_bytes_max=buffer_bytes).seal_policy
        assert made.merged_bytes_max <= min(buffer_bytes, 32 << 20)
        assert 2 * made.small_bytes <= made.merged_bytes_max
