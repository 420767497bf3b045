"""Tiers made of captured logs of Kafka, without a dispatcher; and their records in the words of the dumps."""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING, Any

import numpy as np
from support import kafka_batches as plain
from support.bundles import part_action

from tiered.format.kafka_batch import CONTROL, TRANSACTIONAL, check_batches, walk_batches
from tiered.format.record_kind import Mark, RecordKind, tag_codes
from tiered.local.interface import HoleReason, Lineage, RecordBatch
from tiered.log.actions import action_of
from tiered.log.lineage import grown
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Sequence

    from support.tiers import TierBuilder

    from tiered.format.kafka_batch import BatchBlock


def record_batches(name: str) -> dict[MessageQueue, list[RecordBatch]]:
    """The sound batches of each file of a captured directory; offsets between them are holes."""
    found: dict[MessageQueue, list[RecordBatch]] = {}
    for (folder, _), data in plain.logs(name).items():
        topic, _, partition = folder.rpartition("-")
        batches = found.setdefault(MessageQueue(topic, int(partition)), [])
        block = walk_batches(data, 0, len(data), size_max=1 << 27)
        check_batches(block, 0)
        bad = np.flatnonzero(block.faults)
        block = block.some(slice(0, int(bad[0]) if len(bad) else None))
        if len(block):
            start = batches[-1].end_offset if batches else int(block.base_offsets[0])
            batches.append(record_batch(MessageQueue(topic, int(partition)), block, start))
    return found


def record_batch(queue: MessageQueue, block: BatchBlock, start: int) -> RecordBatch:
    """Batches as one of a local store's, whose first offset is ``start``."""
    lasts = block.last_offsets
    count = int(lasts[-1]) + 1 - start
    sizes, positions = np.zeros(count, np.int32), np.zeros(count, np.int64)
    codes = np.full(count, int(HoleReason.COMPACTED), np.int64)
    times, physical = np.full(count, -1, np.int64), np.full(count, -1, np.int64)
    marks = block.has(TRANSACTIONAL) * int(Mark.TRANSACTIONAL) | block.has(CONTROL) * int(
        Mark.CONTROL
    )
    mine = tag_codes(RecordKind.KAFKA, block.column("leader_epoch"), marks.astype(np.int64))
    for number, (low, high) in enumerate(
        zip(block.base_offsets - start, lasts - start, strict=True)
    ):
        covered = slice(low, high + 1)
        sizes[covered], positions[covered] = block.sizes[number], block.positions[number]
        codes[covered], physical[covered] = mine[number], block.positions[number]
        times[covered] = block.headers["max_timestamp"][number]
    return RecordBatch(
        queue, QueueOffset(start), block.buffer, positions, sizes, codes, times, physical
    )


def add_batches(
    builder: TierBuilder, batches: Sequence[RecordBatch], *, roll: bool = False
) -> None:
    """Commit batches of one queue one after another, each as a part, with what they tell of their lineage."""
    for batch in batches:
        builder.file(batch.queue, batch.base_offset)
        commit = builder.take(batch, roll=roll)
        known = builder.journal.state.incarnation(batch.queue)
        facts = known.lineage if known else None
        said = grown(batch.queue, commit.incarnation, commit.batches, facts, Lineage())
        stored = builder.put(commit)
        builder.journal.append([part_action(stored), *map(action_of, [said] if said else [])])
        builder.file(batch.queue).committed(stored.named.parts[0])


def add_capture(builder: TierBuilder, name: str) -> None:
    """All queues of a captured directory, each file as a part."""
    for batches in record_batches(name).values():
        add_batches(builder, batches)


def base64(data: bytes | None) -> str | None:
    return None if data is None else b64encode(data).decode()


def as_dumped(row: dict[str, Any]) -> dict[str, Any]:
    """A row of Arrow columns as a line of a dump."""
    named = {"key_base64": base64(row["key"]), "value_base64": base64(row["value"])}
    headers = [[header["name"], base64(header["value"])] for header in row["headers"]]
    return (
        {name: row[name] for name in row if name not in {"key", "value"}}
        | named
        | {"headers": headers}
    )
