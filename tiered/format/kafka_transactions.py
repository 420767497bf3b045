"""Transactions in a Kafka log: which are open, what was aborted, and how far a ``read_committed`` consumer reads. Pure.

A producer has one transaction at a time in a partition: it begins with the first transactional batch, and ends with the
control batch (marker) that bears the producer's id. The epoch tells nothing here: markers of transaction version 2 carry the
epoch behind that of their data. Of what the cleaner has removed nothing is left to protect: a marker without a transaction,
and a batch without records, say nothing.

The state is small and carries over: from block to block, from a ``.snapshot`` of the node, from a tier. What is handed in
lies below the high watermark; then the last stable offset is the node's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tiered.format.kafka_batch import (
    CONTROL,
    TRANSACTIONAL,
    BatchFault,
    ControlType,
    control_markers,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tiered.format.kafka_batch import BatchBlock, Flags


class AbortedTransaction(NamedTuple):
    """A transaction that was aborted, as ``.txnindex`` has it."""

    producer_id: int
    first_offset: int
    last_offset: int  # of the marker
    last_stable_offset: int  # once the marker counts


def follow_transactions(
    opened: Mapping[int, int], block: BatchBlock
) -> tuple[dict[int, int], list[AbortedTransaction]]:
    """What is open behind the sound batches of a block, if ``opened`` was before it; and what was aborted in it.

    ``opened``: the first offset of each, by producer id.
    """
    now, aborted = dict(opened), list[AbortedTransaction]()
    markers = {marker.batch: marker for marker in control_markers(block)}
    sound = block.faults == BatchFault.OK
    is_control = block.has(CONTROL)
    is_data = block.has(TRANSACTIONAL) & ~is_control & (block.headers["count"] > 0)
    where = np.flatnonzero(sound & (is_data | is_control))
    producers = block.column("producer_id")[where].tolist()
    offsets = block.base_offsets[where].tolist()
    for number, producer, offset in zip(where.tolist(), producers, offsets, strict=True):
        if not is_control[number]:
            now.setdefault(producer, offset)
        elif number in markers and markers[number].kind in tuple(ControlType):
            first = now.pop(producer, None)
            if first is not None and markers[number].kind == ControlType.ABORT:
                stable = last_stable_offset(now, offset + 1)
                aborted.append(AbortedTransaction(producer, first, offset, stable))
    return now, aborted


def last_stable_offset(opened: Mapping[int, int], high_watermark: int) -> int:
    """Up to where all transactions are decided, which is how far a ``read_committed`` consumer reads."""
    return min(high_watermark, *opened.values()) if opened else high_watermark


def is_aborted(block: BatchBlock, aborted: Sequence[AbortedTransaction]) -> Flags:
    """Which batches are data of these transactions."""
    found = np.zeros(len(block), np.bool_)
    if not aborted:
        return found
    where = np.flatnonzero(block.has(TRANSACTIONAL) & ~block.has(CONTROL))
    producers, offsets = block.column("producer_id")[where], block.base_offsets[where]
    ranges = np.array(sorted(aborted), np.int64)
    for producer in np.unique(producers).tolist():
        mine = ranges[ranges[:, 0] == producer]
        if len(mine):
            of_it = producers == producer
            place = np.searchsorted(mine[:, 1], offsets[of_it], side="right") - 1
            found[where[of_it]] = (place >= 0) & (offsets[of_it] < mine[place, 2])
    return found


def is_given(
    block: BatchBlock, aborted: Sequence[AbortedTransaction], last_stable: int | None
) -> Flags:
    """Which sound batches a consumer is given: data; with ``last_stable`` (``read_committed``) below it, not aborted."""
    given: Flags = ~block.has(CONTROL) & (block.faults == BatchFault.OK)
    if last_stable is not None:
        given &= ~is_aborted(block, aborted) & (block.base_offsets < last_stable)
    return given
