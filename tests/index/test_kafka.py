"""Keys of Kafka's records: what a brute-force look at the dumps finds, indexed, in tails, and in either isolation."""

from __future__ import annotations

from base64 import b64decode
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
from support import kafka_batches as plain
from support.journals import PREFIX
from support.kafka_tiers import add_batches, record_batch, record_batches
from support.keyed import KeyedTier

from tiered.api.message import message_of_hit
from tiered.format.kafka_batch import walk_batches
from tiered.index.lookup import ForeignHit, IndexReader, Wish
from tiered.log.lineage import Isolation
from tiered.log.reader import TierReader
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from tiered.index.lookup import Lookup

QUEUE = MessageQueue("made", 0)


def tier_of(name: str, indexed: str) -> KeyedTier:
    """A captured directory; what is ``indexed``: ``none``, ``half`` or ``all``."""
    tier = KeyedTier()
    for batches in record_batches(name).values():
        middle = len(batches) // 2 if indexed == "half" else 0
        add_batches(tier, batches[:middle])
        if indexed == "half":
            tier.index()
        add_batches(tier, batches[middle:])
    if indexed == "all":
        tier.index()
    return tier


def ask(tier: KeyedTier, isolation: Isolation, key: str, topic: str, **wish: Any) -> Lookup:
    reader = IndexReader(tier.store, PREFIX, journal=TierReader(tier.store, PREFIX, isolation))
    found = reader.lookup(tier.journal.state, Wish(topic=topic, key=key, **wish))
    assert found.is_complete
    return found


def newest_first(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    order = "timestamp_ms", "offset", "partition"
    return sorted(lines, key=lambda line: tuple(line[name] for name in order), reverse=True)


@pytest.mark.parametrize("indexed", ["none", "half", "all"])
@pytest.mark.parametrize(
    ("name", "isolation"),
    [
        ("k02-transactions", Isolation.COMMITTED),
        ("k02-transactions", Isolation.UNCOMMITTED),
        ("k03-compacted-after", Isolation.UNCOMMITTED),
        ("k05-epochs", Isolation.COMMITTED),
    ],
)
def test_keys_are_found_as_by_brute_force(name: str, isolation: Isolation, indexed: str):
    tier = tier_of(name, indexed)
    committed = isolation is Isolation.COMMITTED and name == "k02-transactions"
    keyed: dict[tuple[str, bytes], list[dict[str, Any]]] = defaultdict(list)
    for line in plain.dump(name):  # all keys, so that what is hidden is asked for as well
        if line["key_base64"]:
            keyed[line["topic"], b64decode(line["key_base64"])] = []
    for line in plain.dump(f"{name}.committed" if committed else name):
        if line["key_base64"]:
            keyed[line["topic"], b64decode(line["key_base64"])].append(line)
    assert any(keyed.values())
    assert not committed or not all(keyed.values())
    last = plain.dump(name)[-10:]  # of transactional topics: behind the last stable offset
    asked = {*list(keyed)[:: max(1, len(keyed) // 40)]}
    asked |= {(one["topic"], b64decode(one["key_base64"])) for one in last if one["key_base64"]}
    for (topic, key), lines in ((one, keyed[one]) for one in asked):
        found = ask(tier, isolation, key.decode(), topic, count=1000)
        assert [message_of_hit(hit).to_json() for hit in found.hits] == newest_first(lines)
        assert all(isinstance(hit, ForeignHit) for hit in found.hits)
        assert indexed != "all" or found.objects_read


def test_no_key_is_none_and_an_empty_one_too():
    tier = KeyedTier()
    section = plain.section([(0, 0, None, b"a", ()), (1, 1, b"", b"b", ()), (2, 2, b"k", b"c", ())])
    add_made(tier, plain.batch(section, 3))
    tier.index()
    (index,) = tier.journal.state.indexes
    assert index.count == 1
    assert not ask(tier, Isolation.COMMITTED, "", QUEUE.topic).hits
    assert len(ask(tier, Isolation.COMMITTED, "k", QUEUE.topic).hits) == 1


@pytest.mark.parametrize("is_indexed", [False, True])
def test_a_record_that_is_older_than_its_batch_is_found_by_its_own_time(is_indexed: bool):
    tier = KeyedTier()
    section = plain.section([(0, 0, b"k", b"a", ()), (1, 500, b"x", b"b", ())])
    add_made(tier, plain.batch(section, 2, base_timestamp=1000, max_timestamp=1500))
    if is_indexed:
        tier.index()
    found = ask(tier, Isolation.COMMITTED, "k", QUEUE.topic, until_ms=1200)
    assert [hit.store_ms for hit in found.hits] == [1000]
    assert not ask(tier, Isolation.COMMITTED, "k", QUEUE.topic, from_ms=1200).hits


def add_made(tier: KeyedTier, raw: bytes) -> None:
    block = walk_batches(raw, 0, len(raw), size_max=1 << 20)
    add_batches(tier, [record_batch(QUEUE, block, 0)])
