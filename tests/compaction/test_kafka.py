"""Compaction of Kafka's topics in a tier: it leaves what Kafka's own cleaner left, and every reader sees that."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import kafka_batches as plain
from support.compacting import ALWAYS, workplace
from support.kafka_tiers import add_batches, record_batch, record_batches
from support.keyed import KeyedTier
from support.opened import opened_over

from tiered.clock import ManualClock
from tiered.compaction.retention import CAREFUL, KAFKA
from tiered.format.kafka_batch import (
    CONTROL,
    BatchFault,
    check_batches,
    decode_records,
    walk_batches,
    with_records,
)
from tiered.local.interface import RecordBatch
from tiered.log.lineage import Isolation
from tiered.log.messages import messages_json
from tiered.log.reader import TierReader
from tiered.log.verify import verify_tier
from tiered.model import MessageQueue, QueueOffset
from tiered.upkeep.compact import Compactor, CompactSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

QUEUE = MessageQueue("made", 0)


def compact(tier: KeyedTier, topic: str, *, clock: ManualClock | None = None, **options: Any) -> Any:
    chosen = CompactSettings(**{"passes": ALWAYS, "compression": None, "retention": KAFKA, **options})
    compactor = Compactor(workplace(tier, clock), chosen)
    plan = compactor.plan([topic])
    assert not plan.damaged
    if plan.steps:
        compactor.apply(plan)
    tier.journal.catch_up()
    tier.forget()
    return plan


def read(
    tier: KeyedTier, queue: MessageQueue, isolation: Isolation = Isolation.UNCOMMITTED
) -> list[dict[str, Any]]:
    reader = TierReader(tier.store, tier.prefix, isolation)
    reader.refresh()
    found = []
    for batch in reader.queue(queue).batches(QueueOffset(0), bytes_max=10_000):
        assert not hasattr(batch, "reason")
        found += messages_json(batch.records, None, raw_body=False)
    return found


def cut_at(batches: Sequence[RecordBatch], offset: int) -> tuple[list[RecordBatch], list[RecordBatch]]:
    """Batches below an offset, which is the end of one, and the others."""
    low = [batch for batch in batches if batch.end_offset <= offset]
    assert low[-1].end_offset == offset
    return low, list(batches[len(low) :])


def cleaned_to() -> dict[str, int]:
    import gzip
    import json

    path = plain.FOLDER / "k03-compacted.json.gz"
    return {one["partition"]: one["cleaned_to"][0] for one in json.loads(gzip.decompress(path.read_bytes()))}


def test_a_pass_leaves_what_kafka_s_cleaner_left():
    after = plain.dump("k03-compacted-after")
    limits, seen = cleaned_to(), 0
    for queue, batches in record_batches("k03-compacted-before").items():
        limit = limits[f"{queue.topic}-{queue.queue_id}"]
        low, high = cut_at(batches, limit)
        tier = KeyedTier()
        add_batches(tier, low)
        add_batches(tier, high[:1], roll=True)
        add_batches(tier, high[1:])
        plan = compact(tier, queue.topic)
        assert plan.steps[0].end == limit
        assert 0 < plan.gone_bytes < plan.log_bytes
        wanted = [
            line for line in after if (line["topic"], line["partition"]) == tuple(queue)
        ]
        assert read(tier, queue) == wanted
        seen += len(wanted)
        assert verify_tier(tier.store, tier.prefix, deep=True).is_clean
        before = {line["offset"]: line for line in wanted}
        assert not compact(tier, queue.topic, passes=ALWAYS).gone_messages
        assert {line["offset"]: line for line in read(tier, queue)} == before
    assert seen == len(after)
