"""Opened tiers, for tests of the Python API: in memory, built part by part, or over a store of the test's."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
from support.merging import delete_unnamed, merge, named_bundles
from support.tiers import PLACE, TierBuilder

from backends.registry import open_store
from backends.wrapping import MeteredStore
from tiered.api.broker_place import Place
from tiered.api.open_tier import OpenTier
from tiered.api.tier import open as open_tier
from tiered.local.interface import RecordBatch
from tiered.log.decode import TierBatch
from tiered.log.merge import MergePolicy
from tiered.log.state import queue_action
from tiered.model import LogOffset, MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.base import ObjectStore
    from fetcher.limits import FetchSettings
    from tiered.api.tier import Tier
    from tiered.format.record import Record

_NAMES = itertools.count()
ORDERS = MessageQueue("orders", 0)


class Made:
    """A tier that can be opened and goes on growing.

    Attributes:
        url: Where.
        builder: Adds to it.
    """

    def __init__(self, url: str | None = None) -> None:
        self.url = url or f"memory://api-{next(_NAMES)}"
        with patch("support.tiers.PREFIX", Place("c", "b").prefix):
            self.builder = TierBuilder(open_store(self.url))

    def open(self, **more: Any) -> Tier:
        return open_tier(self.url, **more)

    def add(self, *bodies: bytes, queue: MessageQueue = ORDERS) -> None:
        """One part of these messages."""
        self.builder.add(bodies, queue=queue)

    def begin_again(self, queue: MessageQueue = ORDERS) -> None:
        """As when a topic was deleted and made again."""
        self.builder.begin_anew(queue=queue)

    def truncate(self, end: int, queue: MessageQueue = ORDERS) -> None:
        """As when a broker comes back with less: what is behind ``end`` is truncated."""
        self.builder.truncate(end, queue=queue)

    def expire(
        self, start: int, end: int, queue: MessageQueue = ORDERS, *, incarnation: int = 0
    ) -> None:
        """Messages ``[start, end)`` of an incarnation expire, and bundles that nothing names any more are deleted."""
        before = named_bundles(self.builder)
        number = self.builder.journal.state.queues[queue][incarnation].number
        bounds = {"position": incarnation, "min_from": start, "min_to": end}
        self.builder.say(queue_action("expire", queue, number, **bounds))
        delete_unnamed(self.builder, before)

    def merge(self) -> None:
        """All that lies side by side is merged, and the bundles from before are deleted."""
        before = named_bundles(self.builder)
        merge(self.builder, MergePolicy(fan_in=2))
        self.builder.forget()
        delete_unnamed(self.builder, before)


def batch_of_records(records: Sequence[Record], base: int = 0, codes: int = 7) -> TierBatch:
    """A batch whose item ``n`` is record ``n``, as if read from a tier at log offset 1000."""
    from tiered.format.record import encode_record

    raws = [encode_record(record) for record in records]
    sizes = np.array([len(raw) for raw in raws], np.int64)
    positions = np.concatenate([[0], np.cumsum(sizes)[:-1]]) if raws else sizes
    return TierBatch(
        RecordBatch(
            queue=MessageQueue(records[0].topic if records else "t", 0),
            base_offset=QueueOffset(base),
            data=memoryview(b"".join(raws)),
            positions=positions.astype(np.int64),
            sizes=sizes.astype(np.int32),
            tag_codes=np.full(len(raws), codes, np.int64),
            store_timestamps_ms=np.array([r.store_timestamp_ms for r in records], np.int64),
            physical_offsets=np.array([r.physical_offset for r in records], np.int64),
        ),
        LogOffset(1000),
    )


def opened_over(store: ObjectStore, settings: FetchSettings | None = None) -> OpenTier:
    """The tier in a store, replayed."""
    tier = OpenTier(store, MeteredStore(store), PLACE, settings=settings)
    tier.refresh()
    return tier
