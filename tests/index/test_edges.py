"""Index objects that end where a block does, or one item beside it: each key is found, and only by its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from support.edges import BESIDE, finds, planted
from support.keyed import KeyedTier, Mail

from tiered.format.object import INDEX_BLOCK_BYTES, ITEM, ITEM_BYTES
from tiered.index.lookup import IndexObjects
from tiered.model import MessageQueue

QUEUE = MessageQueue("orders", 0)
A_BLOCK = INDEX_BLOCK_BYTES // ITEM_BYTES
COUNTS = [blocks * A_BLOCK + by for blocks in (1, 2, 3) for by in BESIDE]


def each_key_is_found(count: int) -> None:
    tier = KeyedTier()
    tier.post(QUEUE, [Mail((f"order-{n}",)) for n in range(count)])
    tier.index()
    for n in range(count):
        hits = tier.ask("orders", f"order-{n}").hits
        assert [hit.queue_offset for hit in hits] == [n]


@pytest.mark.parametrize("count", COUNTS)
def test_each_key_of_an_object_that_ends_at_an_edge_is_found(count: int):
    each_key_is_found(count)


def _ends_early(self: IndexObjects, index: Any, loaded: Any, start: int, end: int) -> Any:
    """Wrong where an item is the first of its block."""
    low, high = start * ITEM_BYTES, end * ITEM_BYTES
    first = low // INDEX_BLOCK_BYTES * INDEX_BLOCK_BYTES
    last = -(-(high - ITEM_BYTES) // INDEX_BLOCK_BYTES) * INDEX_BLOCK_BYTES
    data = self._get(index, first, min(last, index.place.payload_bytes))
    self._check(index, data, first, loaded.crcs)
    return np.frombuffer(data, ITEM, end - start, low - first)


def test_a_reader_that_is_wrong_at_an_edge_is_found():
    with planted(IndexObjects, "items", _ends_early):
        assert finds(each_key_is_found, count=st.sampled_from(COUNTS))
