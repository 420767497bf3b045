"""Seals what a ``TierBuilder`` has written, compressed."""

from __future__ import annotations

import random
from functools import cache
from typing import TYPE_CHECKING

from support.journals import PREFIX
from support.tiers import QUEUE

from tiered.dispatch.packing import Compression, Packer
from tiered.dispatch.sealer import Sealer, SealJob
from tiered.log.seal import SealPolicy, plan_seals

if TYPE_CHECKING:
    from support.tiers import TierBuilder

    from tiered.log.parts import Part

WORDS = [b"order", b"created", b"amount", b"user", b"total", b"region", b"north", b"south", b"paid"]


@cache
def text(seed: int, size: int) -> bytes:
    """Something like JSON, ``size`` bytes of it: about a third of it is random."""
    rng = random.Random(seed)
    count = size // 18 + 1  # the shortest piece has 19 bytes
    pieces = (
        b'{"%s":"%s %06d"},' % (rng.choice(WORDS), rng.choice(WORDS), rng.randrange(10**6))
        for _ in range(count)
    )
    return b"".join(pieces)[:size]


@cache
def noise(seed: int, size: int) -> bytes:
    """What nobody can compress."""
    return random.Random(seed).randbytes(size)


def pack(
    builder: TierBuilder,
    policy: SealPolicy = SealPolicy(0, packs=True),  # noqa: B008 (immutable)
    *,
    compression: Compression = Compression(),  # noqa: B008 (immutable)
) -> list[SealJob]:
    """Seal all that is to be sealed, the open segment too; what was done."""
    sealer = Sealer(builder.uploader, builder.store, PREFIX, packer=Packer(compression))
    jobs = [SealJob(plan) for plan in plan_seals(builder.journal.state, policy, with_open=True)]
    for job in jobs:
        assert sealer.advance(job)
        builder.say(job.action())
    return jobs


def parts_of(builder: TierBuilder) -> list[Part]:
    """As the journal has them."""
    life = builder.journal.state.life(QUEUE)
    assert life
    return life.parts()
