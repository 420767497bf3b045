"""Messages of JoyQueue: what its own store read in a captured journal, and damage."""

from __future__ import annotations

import gzip
import json
import tarfile
from base64 import b64encode
from pathlib import Path

import pytest

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
