"""Each byte of a tiny tier, flipped in turn: a deep verification finds every one, and names its object."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from support.journals import PREFIX
from support.tiers import TierBuilder

from backends.memory import MemoryStore
from tiered.log.verify import verify_tier

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.base import ObjectStore


def with_everything() -> ObjectStore:
    """Entries, a checkpoint that entries follow, data, an index, a hole and its record in quarantine."""
    builder = TierBuilder()
    builder.add([b"a", None])
    builder.journal.write_checkpoint(force=True)
    builder.gap(2)
    return builder.store


def without_checkpoint() -> ObjectStore:
    builder = TierBuilder()
    builder.add([(2, b"inner")])
    return builder.store


@pytest.mark.parametrize("make", [with_everything, without_checkpoint])
def test_each_byte(make: Callable[[], ObjectStore]):
    objects = {info.key: info for info in make().list("")}
    store = make()
    whole = {key: store.get(key) for key in objects}
    assert verify_tier(store, PREFIX, deep=True).is_clean
    rng = random.Random(1)
    missed = []
    for key, data in whole.items():
        for at in range(len(data)):
            changed = bytearray(data)
            changed[at] ^= 1 << rng.randrange(8)
            found = MemoryStore()
            for name, other in whole.items():
                found.put_if_absent(name, bytes(changed) if name == key else other)
            report = verify_tier(found, PREFIX, deep=True)
            if not any(key in problem.where for problem in report.problems):
                missed.append((key, at))
    assert missed == []


def test_each_object_cut_short_or_grown():
    store = with_everything()
    whole = {info.key: store.get(info.key) for info in store.list("")}
    for key, data in whole.items():
        for other in (data[:-1], data[1:], data + b"\0", data + b"\n", b"", data * 2):
            found = MemoryStore()
            for name, kept in whole.items():
                found.put_if_absent(name, other if name == key else kept)
            report = verify_tier(found, PREFIX, deep=True)
            assert any(key in problem.where for problem in report.problems), (key, len(other))
