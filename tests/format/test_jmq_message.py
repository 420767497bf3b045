"""Messages of JoyQueue: what its own store read in a captured journal, and damage."""

from __future__ import annotations

import contextlib
import gzip
import json
import struct
import tarfile
import zipfile
from base64 import b64encode
from io import BytesIO
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from support import jmq_stores, kafka_batches

from tiered.format import jmq_message

FOLDER = Path(__file__).parent.parent / "data" / "jmq"


def journals() -> dict[tuple[str, str, int], bytes]:
    """Data of the journal's files, by topic, group and position."""
    found = {}
    with tarfile.open(FOLDER / "j02-crash.tar.gz") as archive:
        for member in archive:
            places = member.name.split("/")
            if member.isfile() and len(places) == 5 and places[4].isdigit():
                stream = archive.extractfile(member)
                assert stream is not None
                data = stream.read()[jmq_message.FILE_HEADER_BYTES :]
                found[places[2].replace("@", "/"), places[3], int(places[4])] = data
    return found


def test_messages_are_those_of_the_store():
    with gzip.open(FOLDER / "j02-crash.jsonl.gz", "rt", encoding="utf-8") as lines:
        said = {(m["topic"], m["partition"], m["index"]): m for m in map(json.loads, lines)}
    found = 0
    for (topic, _, base), data in journals().items():
        block = jmq_message.walk_messages(data, 0, len(data), size_max=4 << 20)
        assert block.is_sound.all()
        times = block.store_times_ms().tolist()
        for number, position in enumerate(block.positions.tolist()):
            messages = jmq_message.messages_of(block, number, bytes_max=1 << 24)
            head = block.headers[number]
            assert len(messages) == block.counts()[number]
            for message in messages:
                line = said[topic, int(head["partition"]), message.index]
                assert line["journal_position"] == base + position
                assert line["term"] == head["term"]
                assert line["store_time_ms"] == times[number]
                assert line["client_time_ms"] == head["client_time"]
                assert line["stored_length"] == head["size"]
                assert line["body_base64"] == b64encode(message.body).decode()
                assert (line["business_id"] or "") == message.business_id
                assert (line["app"], line["flag"]) == (message.app, message.flag)
                assert line["priority"] == message.priority
                found += 1
    assert found == len(said)


def test_damage_is_seen():
    data = bytearray(next(data for data in journals().values() if data))
    block = jmq_message.walk_messages(data, 0, len(data), size_max=4 << 20)
    at, size = int(block.positions[3]), int(block.headers["size"][3])
    data[at + 70] ^= 1
    again = jmq_message.walk_messages(data, 0, len(data), size_max=4 << 20)
    assert [n for n, sound in enumerate(again.is_sound) if not sound] == [3]
    data[at + 18] ^= 1
    assert jmq_message.walk_messages(data, 0, len(data), size_max=4 << 20).end == at
    data[at + 18] ^= 1
    data[at + 61 : at + 65] = size.to_bytes(4, "big")
    wrong = jmq_message.walk_messages(data, 0, len(data), size_max=4 << 20)
    with pytest.raises(jmq_message.MessageError):
        jmq_message.messages_of(wrong, 3, bytes_max=1 << 20)


def block_of(raw: bytes) -> jmq_message.MessageBlock:
    block = jmq_message.walk_messages(raw, 0, len(raw), size_max=len(raw))
    assert len(block) == 1
    assert block.is_sound.all()
    return block


@pytest.mark.parametrize("name", jmq_stores.NAMES)
def test_what_is_shown_is_what_the_store_read(name: str):
    """Every field of the dump, of all messages; what is not of the message itself is not shown."""
    found = jmq_stores.follow_all(jmq_stores.open_store(jmq_stores.pristine(name)), 1 << 20)
    for queue, lines in jmq_stores.dump(name).items():
        assert found.lines[queue] == jmq_stores.shown(lines)
        some = next(iter(lines.values()))
        assert set(some) - set(found.lines[queue][some["index"]]) == {"group", "committed"}


def test_an_archive_is_unpacked():
    stream = BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("0", b"body" * 1000)
    flags = 0x18C | jmq_message.COMPRESSED | 1 << 4
    block = block_of(jmq_stores.encode(0, 5, stream.getvalue(), flags=flags))
    [message] = jmq_message.messages_of(block, 0, bytes_max=4000)
    assert message.body == b"body" * 1000
    assert jmq_message.message_json("t", block.headers[0], message)["compression"] == "Zip"
    with pytest.raises(jmq_message.MessageError, match="more than is allowed"):
        jmq_message.messages_of(block, 0, bytes_max=3999)
    data = bytearray(stream.getvalue())
    for at in range(0, len(data), 3):
        data[at] ^= 0x55
        block = block_of(jmq_stores.encode(0, 5, bytes(data), flags=flags))
        with contextlib.suppress(jmq_message.MessageError):  # fields that nobody needs
            [message] = jmq_message.messages_of(block, 0, bytes_max=4000)
            assert message.body == b"body" * 1000
        data[at] ^= 0x55
    lzma = BytesIO()
    with zipfile.ZipFile(lzma, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("0", b"body")
    block = block_of(jmq_stores.encode(0, 5, lzma.getvalue(), flags=flags))
    with pytest.raises(jmq_message.MessageError, match="of kind 14"):
        jmq_message.messages_of(block, 0, bytes_max=4000)


@pytest.mark.parametrize("codec", [4, 7])
def test_a_codec_without_a_reader_is_named(codec: int):
    raw = jmq_stores.encode(0, 5, b"x", flags=0x18C | jmq_message.COMPRESSED | codec << 4)
    with pytest.raises(jmq_message.MessageError, match=f"codec {codec}.*LZ4"):
        jmq_message.messages_of(block_of(raw), 0, bytes_max=100)


@pytest.mark.parametrize("codec", [0, 1, 4])
def test_records_of_a_kafka_client(codec: int):
    rows = [(n, 0, key, b"value %d" % n, ()) for n, key in enumerate([b"k", None, "ключ".encode()])]
    body = kafka_batches.section(rows)
    packed = {0: bytes, 1: gzip.compress, 4: zstandard.ZstdCompressor().compress}[codec](body)
    extension = struct.pack("<bQQ", 2, 1_700_000_000_000, codec)
    raw = jmq_stores.encode(0, 7, packed, count=3, flags=0x184, extension=extension)
    found = jmq_message.messages_of(block_of(raw), 0, bytes_max=1000)
    assert [(m.index, m.business_id, m.body) for m in found] == [
        (7, "k", b"value 0"),
        (8, "", b"value 1"),
        (9, "ключ", b"value 2"),
    ]
    with pytest.raises(jmq_message.MessageError, match="a Kafka client"):
        jmq_message.messages_of(
            block_of(jmq_stores.encode(0, 7, packed, count=4, flags=0x184, extension=extension)),
            0,
            bytes_max=1000,
        )
    with pytest.raises(jmq_message.MessageError, match="extension"):
        jmq_message.messages_of(
            block_of(jmq_stores.encode(0, 7, packed, count=3, flags=0x184)), 0, bytes_max=1000
        )
    alone = block_of(jmq_stores.encode(0, 7, b"value", flags=0x184, extension=extension))
    assert [m.body for m in jmq_message.messages_of(alone, 0, bytes_max=100)] == [b"value"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (b"", {}),
        (b"a=1\nb=2\r\nc=3\r", {"a": "1", "b": "2", "c": "3"}),
        (b"a : 1\n  b\t2\nc", {"a": "1", "b": "2", "c": ""}),
        (b"#no\n!no\n\n \na=#yes", {"a": "#yes"}),
        (rb"a\=b\:c\ d=e\=f" + b"\n", {"a=b:c d": "e=f"}),
        (rb"k=\u540d\t\n\\x\q", {"k": "名\t\n\\xq"}),
        (rb"k=\ud83d\ude00", {"k": "😀"}),
        (b"k=a\\\n   b\\\r\n\tc\nd=e", {"k": "abc", "d": "e"}),
        (b"a=1\na=2", {"a": "2"}),
        ("é=ü".encode(), {"é": "ü"}),
        (b"k=\\", {"k": ""}),
    ],
)
def test_attributes_are_read_as_java_does(text: bytes, wanted: dict[str, str]):
    assert jmq_message.parse_attributes(text) == wanted


@given(data=st.data())
def test_what_stands_behind_damage_is_found(data: st.DataObject):
    """Sound messages between any rubbish: all come, in order, and the rest is named; whatever the window cuts off."""
    pieces, places, at = list[bytes](), list[int](), 0
    for number in range(data.draw(st.integers(1, 6))):
        for piece in (
            data.draw(st.sampled_from([b"", b"\0" * 100, b"\x12\x34" * 40, b"\xff" * 7])),
            jmq_stores.encode(0, number, data.draw(st.binary(min_size=1, max_size=100))),
        ):
            pieces.append(piece)
            at += len(piece)
        places.append(at - len(pieces[-1]))
    raw = b"".join(pieces) + data.draw(st.sampled_from([b"", b"\0" * 100]))
    block, lost = jmq_message.walk_over_damage(raw, 0, len(raw))
    assert block.positions.tolist() == places
    assert block.is_sound.all()
    ends = [0, *(block.positions + block.headers["size"]).tolist()]
    assert lost == [(a, b) for a, b in zip(ends, places, strict=False) if a < b]
    assert block.end == ends[-1]
    cut = data.draw(st.integers(0, len(raw)))
    part, _ = jmq_message.walk_over_damage(raw[:cut], 0, cut, room=len(raw) - cut)
    assert part.positions.tolist() == [
        place for place, end in zip(places, ends[1:], strict=True) if end <= cut
    ]
    rest, _ = jmq_message.walk_over_damage(raw, part.end, len(raw))
    assert part.positions.tolist() + rest.positions.tolist() == places


def test_a_wrong_size_hides_no_neighbours():
    """A size that leads on to another message's end: those between are not swallowed."""
    raws = [jmq_stores.encode(0, n, b"x" * 50) for n in range(6)]
    wrong = (3 * len(raws[0])).to_bytes(4, "big") + raws[1][4:]
    data = raws[0] + wrong + b"".join(raws[2:])
    block, lost = jmq_message.walk_over_damage(data, 0, len(data))
    assert block.headers["index"].tolist() == [0, 2, 3, 4, 5]
    assert lost == [(len(raws[0]), 2 * len(raws[0]))]
