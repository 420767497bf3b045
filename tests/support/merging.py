"""Merges what a ``TierBuilder`` has written, as the dispatcher does; and messages that can be compressed, or not."""

from __future__ import annotations

import random
from functools import cache
from typing import TYPE_CHECKING

from support.tiers import QUEUE

from tiered.dispatch.merging import Merger, Packer
from tiered.dispatch.settings import Compression
from tiered.log.merge import LAST_LEVEL, MergeOutput, MergeRun, plan_merge
from tiered.log.state import is_tail

if TYPE_CHECKING:
    from collections.abc import Collection

    from support.tiers import TierBuilder

    from tiered.dispatch.merging import MergedBundle
    from tiered.log.merge import MergePlan, MergePolicy
    from tiered.log.parts import Part
    from tiered.log.state import TierState

WORDS = [b"order", b"created", b"amount", b"user", b"total", b"region", b"north", b"south", b"paid"]


@cache
def text(seed: int, size: int) -> bytes:
    """Something like JSON, ``size`` bytes of it: about a third of it is random."""
    rng = random.Random(seed)
    count = size // 18 + 1  # the shortest chunk has 19 bytes
    chunks = (
        b'{"%s":"%s %06d"},' % (rng.choice(WORDS), rng.choice(WORDS), rng.randrange(10**6))
        for _ in range(count)
    )
    return b"".join(chunks)[:size]


@cache
def noise(seed: int, size: int) -> bytes:
    """What nobody can compress."""
    return random.Random(seed).randbytes(size)


def merger_of(
    builder: TierBuilder,
    compression: Compression | None = Compression(),  # noqa: B008 (immutable)
) -> Merger:
    """It carries out plans in the builder's store."""
    packer = Packer(compression) if compression else None
    return Merger(builder.uploader, builder.store, builder.prefix, lambda _: None, packer=packer)


def merge(
    builder: TierBuilder,
    policy: MergePolicy,
    *,
    compression: Compression | None = Compression(),  # noqa: B008 (immutable)
) -> list[MergePlan]:
    """Merge until nothing is due; the plans that were carried out."""
    plans: list[MergePlan] = []
    while (plan := plan_merge(builder.journal.state, policy)) is not None:
        plans.append(plan)
        for output in plan.outputs:
            make(builder, output, compression=compression)
        assert len(plans) < 1000, "merging goes on for ever"
    return plans


def make(
    builder: TierBuilder,
    output: MergeOutput,
    *,
    compression: Compression | None = Compression(),  # noqa: B008 (immutable)
) -> MergedBundle:
    """Make one bundle, and have an entry name it."""
    made = merger_of(builder, compression).make(output, lambda: False)
    assert made is not None
    builder.say(made.action())
    return made


def gather(
    builder: TierBuilder,
    level: int = LAST_LEVEL,
    *,
    compression: Compression | None = Compression(),  # noqa: B008 (immutable)
    only: Collection[str] = (),
) -> MergedBundle:
    """Make every segment one part, all in one bundle, due or not; packed, where it is the last level and that pays.

    Args:
        builder: Whose tier.
        level: Of the bundle.
        compression: None: nothing is compressed.
        only: Topics; empty: all.
    """
    runs = [run for run in runs_of(builder.journal.state) if not only or run.queue.topic in only]
    return make(builder, MergeOutput(level, tuple(runs)), compression=compression)


def runs_of(state: TierState) -> list[MergeRun]:
    """Every segment as one run."""
    return [
        MergeRun(queue, number, incarnation.number, segment.base_offset, segment.parts, is_tail(incarnations, number))
        for queue, incarnations in sorted(state.queues.items())
        for number, incarnation in enumerate(incarnations)
        for segment in incarnation.segments
    ]  # fmt: skip


def named_bundles(builder: TierBuilder) -> set[str]:
    """Keys, below the prefix, of the bundles that the journal names."""
    incarnations = (
        incarnation
        for incarnations in builder.journal.state.queues.values()
        for incarnation in incarnations
    )
    return {bundle.key for incarnation in incarnations for bundle in incarnation.parts().bundles}


def delete_unnamed(builder: TierBuilder, before: set[str]) -> None:
    """Delete those of these bundles that the journal does not name any more, as gc does after a grace."""
    for key in before - named_bundles(builder):
        builder.store.delete(builder.prefix + key)


def parts_of(builder: TierBuilder) -> list[Part]:
    """Those of ``QUEUE``, as the journal has them."""
    incarnation = builder.journal.state.incarnation(QUEUE)
    assert incarnation
    return list(incarnation.parts())
