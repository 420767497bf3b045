"""The fast way to tags and keys says what the plain one says."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from tiered.format.block import group_by_queue, split_records
from tiered.format.properties import KEYS, TAGS, UNIQ_KEY, split_keys, tag_hash
from tiered.format.property_columns import PropertyColumns
from tiered.format.record import Record, decode_record, encode_record
from tiered.store.listing import describe, key_hash

if TYPE_CHECKING:
    from tiered.format.block import RecordBlock

TEXT = st.text(st.sampled_from("ab 1é"), max_size=5)
NAMES = st.sampled_from(["TAGS", "KEYS", "UNIQ_KEY", "XKEYS", "KEYSX", "a", ""])
CHUNK = st.one_of(
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


def plainly(block: RecordBlock) -> tuple[list[int], list[tuple[int, int]]]:
    """Tag codes; of each key whose it is, and its hash. One record after another."""
    codes, keys = [], []
    for number, position in enumerate(block.positions.tolist()):
        record = decode_record(block.buffer, position)
        found = record.properties
        codes.append(tag_hash(found.get(TAGS)))
        words = [found.get(UNIQ_KEY), *split_keys(found.get(KEYS))]
        keys += [(number, key_hash(record.topic, word)) for word in words if word]
    return codes, keys


def check(block: RecordBlock) -> None:
    groups = group_by_queue(block)
    found = describe(PropertyColumns.of(block), groups, len(block))
    keys = list(zip(found.owners.tolist(), found.hashes.tolist(), strict=True))
    assert (found.tag_codes.tolist(), keys) == plainly(block)
    # Records that are in no group have nothing.
    queue, indices = groups[0]
    found = describe(PropertyColumns.of(block), [(queue, indices[:1])], len(block))
    assert found.owners.tolist() == [0] * sum(1 for at, _ in keys if at == 0)
    assert not found.tag_codes[1:].any()


@settings(deadline=None, max_examples=120)
@given(
    st.lists(
        st.tuples(st.lists(CHUNK, max_size=6).map("".join), st.sampled_from(["t", "other"])),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([1, 9]),
)
def test_columns_say_what_the_records_say(records: list[tuple[str, str]], times: int):
    records = records * times
    check(block_of([text for text, _ in records], [topic for _, topic in records]))


def test_records_of_several_shapes():
    """Other names, blanks and lengths."""
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
    check(block_of(texts, ["t", "other"] * (len(texts) // 2)))
