"""The fast way to tags and keys says what the plain one says."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered.format.block import group_by_queue, split_records
from tiered.format.record import Record, encode_record
from tiered.store import facts
from tiered.store.facts import _plainly, describe, in_order

if TYPE_CHECKING:
    from tiered.format.block import RecordBlock
    from tiered.store.facts import Described

TEXT = st.text(st.sampled_from("ab 1é"), max_size=5)
NAMES = st.sampled_from(["TAGS", "KEYS", "UNIQ_KEY", "XKEYS", "KEYSX", "a", ""])
PIECE = st.one_of(
    st.builds(lambda name, value: f"{name}\x01{value}\x02", NAMES, TEXT),
    st.sampled_from(["\x02", "\x01", "KEYS", "\x01\x02", "KEYS\x01a\x01b\x02", "TAGS\x01end"]),
)


def block_of(properties: list[str], topics: list[str]) -> RecordBlock:
    data = bytearray()
    for number, (text, topic) in enumerate(zip(properties, topics, strict=True)):
        raw = text.encode()
        data += encode_record(
            Record(
                size=91 + len(topic) + len(raw),
                version=1,
                body_crc=0,
                queue_id=number % 2,
                flag=0,
                queue_offset=number,
                physical_offset=len(data),
                sys_flag=0,
                born_timestamp_ms=0,
                born_host="1.2.3.4:5",
                store_timestamp_ms=number,
                store_host="1.2.3.4:5",
                reconsume_times=0,
                prepared_transaction_offset=0,
                body=b"",
                topic=topic,
                properties_raw=raw,
            )
        )
    block, _ = split_records(bytes(data), 0, len(data), physical_offset=0, size_max=1 << 20)
    assert block.is_sound
    return block


def plainly(block: RecordBlock) -> Described:
    groups = group_by_queue(block)
    return in_order(*_plainly(block, np.arange(len(block)), groups))


def check_equal(fast: Described, plain: Described) -> None:
    assert fast.tag_codes.tolist() == plain.tag_codes.tolist()
    assert fast.owners.tolist() == plain.owners.tolist()
    assert fast.hashes.tolist() == plain.hashes.tolist()


@settings(deadline=None, max_examples=120)
@given(
    st.lists(
        st.tuples(st.lists(PIECE, max_size=6).map("".join), st.sampled_from(["t", "other"])),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([1, 2, 100]),
)
def test_all_ways_are_equal(records: list[tuple[str, str]], rows_min: int):
    """Few rows suffice for a pattern here, so that records go all three ways."""
    block = block_of([text for text, _ in records], [topic for _, topic in records])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(facts, "ROWS_MIN", rows_min)
        check_equal(describe(block, group_by_queue(block)), plainly(block))


def test_what_looks_alike_is_understood_at_once():
    """Other names, blanks and lengths make other patterns; what is left over goes the other ways."""
    texts = [
        f"TAGS\x01t{n % 3}\x02KEYS\x01k{n:04} all\x02UNIQ_KEY\x01{n:032}\x02" for n in range(90)
    ]
    texts += [
        f"TAGS\x01t{n % 3}\x02KEYS\x01k{n:04}-all\x02UNIQ_KEY\x01{n:032}\x02" for n in range(60)
    ]
    texts += [
        f"XAGS\x01t{n % 3}\x02KEYS\x01k{n:04} all\x02UNIQ_KEY\x01{n:032}\x02" for n in range(60)
    ]
    texts += ["KEYS\x01k \x02", "TAGS\x01tä\x02"] * 9
    random.Random(1).shuffle(texts)
    block = block_of(texts, ["t", "other"] * (len(texts) // 2))
    check_equal(describe(block, group_by_queue(block)), plainly(block))
    sizes = block.properties_sizes.astype(np.int64)
    leads = np.zeros(len(block), np.uint32)
    found = facts.Shapes(block.buffer, block.properties_positions, sizes, leads)
    assert len(found.rest) == 18
