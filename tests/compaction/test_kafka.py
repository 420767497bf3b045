"""Compaction of Kafka's topics in a tier: it leaves what Kafka's own cleaner left, and every reader sees that."""

from __future__ import annotations

import gzip
import json
import random
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support import kafka_batches as plain
from support.compacting import ALWAYS, workplace
from support.kafka_tiers import add_batches, record_batch, record_batches
from support.keyed import KeyedTier
from support.opened import opened_over

from tiered.clock import ManualClock
from tiered.compaction.passes import CAREFUL, KAFKA
from tiered.format.kafka_batch import (
    CODECS,
    CONTROL,
    BatchFault,
    check_batches,
    decode_records,
    walk_batches,
    with_records,
)
from tiered.format.unpacking import pack
from tiered.log.lineage import Isolation
from tiered.log.messages import messages_json
from tiered.log.reader import TierReader
from tiered.log.verify import verify_tier
from tiered.model import MessageQueue, QueueOffset
from tiered.upkeep.compact import Compactor, CompactSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiered.local.interface import RecordBatch

QUEUE = MessageQueue("made", 0)


def compact(
    tier: KeyedTier, topic: str, *, clock: ManualClock | None = None, **options: Any
) -> Any:
    chosen = CompactSettings(
        **{"passes": ALWAYS, "compression": None, "retention": KAFKA, **options}
    )
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


def cut_at(
    batches: Sequence[RecordBatch], offset: int
) -> tuple[list[RecordBatch], list[RecordBatch]]:
    """Batches below an offset, which is the end of one, and the others."""
    low = [batch for batch in batches if batch.end_offset <= offset]
    assert low[-1].end_offset == offset
    return low, list(batches[len(low) :])


def cleaned_to() -> dict[str, int]:
    path = plain.FOLDER / "k03-compacted.json.gz"
    return {
        one["partition"]: one["cleaned_to"][0]
        for one in json.loads(gzip.decompress(path.read_bytes()))
    }


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
        wanted = [line for line in after if (line["topic"], line["partition"]) == tuple(queue)]
        assert read(tier, queue) == wanted
        seen += len(wanted)
        assert verify_tier(tier.store, tier.prefix, deep=True).is_clean
        before = {line["offset"]: line for line in wanted}
        assert not compact(tier, queue.topic, passes=ALWAYS).gone_messages
        assert {line["offset"]: line for line in read(tier, queue)} == before
    assert seen == len(after)


def test_aborted_data_go_and_what_is_not_decided_stays():
    queue = MessageQueue("txn", 0)
    batches = record_batches("k02-transactions")[queue]
    tier = KeyedTier()
    for batch in batches:
        add_batches(tier, [batch], roll=True)
    committed = read(tier, queue, Isolation.COMMITTED)
    every = read(tier, queue)
    reader = TierReader(tier.store, tier.prefix)
    reader.refresh()
    stable, end = reader.cursor(queue).end, batches[-1].end_offset
    assert stable < end
    plan = compact(tier, queue.topic, retention=CAREFUL)
    limit = plan.steps[0].end
    assert 0 < limit <= stable
    assert read(tier, queue)[-1] == every[-1]
    newest = {
        (line["key_base64"] or line["offset"]): line for line in committed if line["offset"] < limit
    }
    wanted = sorted(newest.values(), key=lambda line: line["offset"])
    behind = [line for line in committed if line["offset"] >= limit]
    assert read(tier, queue, Isolation.COMMITTED) == wanted + behind
    assert read(tier, queue) == wanted + [line for line in every if line["offset"] >= limit]
    facts = tier.journal.state.incarnation(queue)
    assert facts is not None
    assert facts.lineage is not None
    assert facts.lineage.aborted
    assert verify_tier(tier.store, tier.prefix, deep=True).is_clean


def test_records_without_a_key_go_or_stay_as_the_policy_says():
    section = plain.section(
        [
            (0, 0, None, b"a", ()),
            (1, 0, b"", b"b", ()),
            (2, 0, b"", None, ()),
            (3, 0, b"k", b"", ()),
        ]
    )
    raw = plain.batch(section, 4)
    last = plain.batch(plain.section([(0, 0, b"z", b"z", ())]), 1, base_offset=4)
    for policy, left in ((KAFKA, [2, 3]), (CAREFUL, [0, 2, 3])):
        tier = KeyedTier()
        block = walk_batches(raw, 0, len(raw), size_max=1 << 20)
        add_batches(tier, [record_batch(QUEUE, block, 0)])
        block = walk_batches(last, 0, len(last), size_max=1 << 20)
        add_batches(tier, [record_batch(QUEUE, block, 4)], roll=True)
        plan = compact(tier, QUEUE.topic, retention=policy)
        assert (plan.steps[0].keyless, plan.steps[0].tombstones) == (1, 1)
        assert [line["offset"] for line in read(tier, QUEUE)] == [*left, 4]
        later = ManualClock(2 * policy.tombstone_retention_ms)
        compact(tier, QUEUE.topic, retention=policy, clock=later)
        assert verify_tier(tier.store, tier.prefix, deep=True).is_clean


def test_batches_of_every_codec_keep_their_heads():
    rng = random.Random(3)
    codecs = set()
    for data in plain.logs("k01-basic").values():
        block = walk_batches(data, 0, len(data), size_max=1 << 27)
        for number in np.flatnonzero(~block.has(CONTROL)).tolist()[:5]:
            whole = decode_records(block, [number], bytes_max=1 << 27)
            some = np.array(sorted(rng.sample(whole.offsets.tolist(), len(whole) // 2)), np.int64)
            made = with_records(block, number, some, bytes_max=1 << 27)
            if not len(some):
                assert made == b""
                continue
            codecs.add(int(block.headers["attributes"][number]) & 7)
            again = walk_batches(made, 0, len(made), size_max=1 << 27)
            check_batches(again, 0)
            assert again.faults.tolist() == [BatchFault.OK]
            assert len(made) <= block.sizes[number]
            left = decode_records(again, [0], bytes_max=1 << 27)
            kept = np.flatnonzero(np.isin(whole.offsets, left.offsets))
            assert set(some.tolist()) <= set(left.offsets.tolist())
            for at, was in enumerate(kept.tolist()):
                assert left.timestamps_ms[at] == whole.timestamps_ms[was]
                assert left.key(at) == whole.key(was)
                assert left.value(at) == whole.value(was)
                assert left.headers(at) == whole.headers(was)
            same = [
                "base_offset",
                "leader_epoch",
                "attributes",
                "last_offset_delta",
                "base_timestamp",
            ]
            for field in [*same, "producer_id", "producer_epoch", "base_sequence"]:
                assert again.headers[field][0] == block.headers[field][number]
    assert codecs == {0, 1, 2, 3, 4}


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c", None]), st.none() | st.just(b"v" * 40)), min_size=1, max_size=12),
    st.integers(0, 4),
    st.data(),
)  # fmt: skip
def test_a_topic_is_what_a_table_of_it_has(
    records: list[tuple[bytes | None, bytes | None]], codec: int, data: st.DataObject
):
    """Any batches, packed in any way: of each key the last record is left, and the records behind the pass."""
    cuts = sorted(data.draw(st.sets(st.integers(1, len(records)), max_size=3)) | {len(records)})
    tier, begin = KeyedTier(), 0
    for end in cuts:
        some = [(n, n, key, value, ()) for n, (key, value) in enumerate(records[begin:end])]
        raw = packed(plain.section(some), len(some), codec, begin)
        block = walk_batches(raw, 0, len(raw), size_max=1 << 20)
        add_batches(tier, [record_batch(QUEUE, block, begin)])
        begin = end
    table = {key: n for n, (key, _) in enumerate(records) if key is not None}
    raw = packed(plain.section([(0, 0, b"a", b"last", ())]), 1, codec, begin)
    block = walk_batches(raw, 0, len(raw), size_max=1 << 20)
    add_batches(tier, [record_batch(QUEUE, block, begin)], roll=True)
    every = {line["offset"]: line for line in read(tier, QUEUE)}
    compact(tier, QUEUE.topic)
    wanted = [*sorted(table.values()), begin]
    assert read(tier, QUEUE) == [every[offset] for offset in wanted]
    with opened_over(tier.store) as opened:
        assert opened.reader.cursor(QUEUE).end == begin + 1
    assert verify_tier(tier.store, tier.prefix, deep=True).is_clean


def packed(section: bytes, count: int, codec: int, base: int) -> bytes:
    payload = pack(CODECS[codec], section) if codec else section
    return plain.batch(payload, count, base_offset=base, attributes=codec, max_timestamp=count)
