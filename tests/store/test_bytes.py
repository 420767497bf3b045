"""For equal input our files are a broker's, byte for byte: captured stores, written again by us.

Clock and host are given to us as the broker's were, so that nothing has to be masked: commit log with its blanks, consume
queues and batch queues. Captures whose log does not begin at 0, or that were damaged, are compared record by record.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from support.following import unpack
from support.replayed import CAPTURED, records_of, store_again

from tiered.format.properties import join_properties
from tiered.store.special import Maker, message_of

if TYPE_CHECKING:
    from pathlib import Path

WHOLE: dict[str, dict[str, Any]] = {
    "s01-basic": {},
    "s03-transactions": {},
    "s04-batch-compress": {},
    "s05-crash": {},
    "s07-compaction": {},
    "s10-consumers": {"delay_levels": " ".join(["1s"] * 18)},
    "s11-lmq-batchcq": {"batch_topics": ("grouped",)},
}
PARTS = {
    "s02-delay-timer": 8,
    "s05b-torn": 0,
    "s06-expired": 0,
    "s08-crash-continue": 0,
    "s09-big-offsets": 0,
}
"""With the number of records that have an empty property, which a broker's own recall of a message has; we refuse it."""


def files(root: Path, folder: str) -> dict[str, bytes]:
    """What is in the files of a folder, without the zeros behind it, and without files of nothing but zeros."""
    found = {
        str(path.relative_to(root)): path.read_bytes().rstrip(b"\0")
        for path in (root / folder).rglob("0" * 8 + "*")
        if "%LMQ%" not in str(path)
    }
    return {name: data for name, data in found.items() if data}


@pytest.mark.parametrize("name", WHOLE)
def test_log_and_consume_queues_are_the_brokers(name: str, tmp_path: Path):
    theirs, ours = unpack(name, tmp_path / "theirs"), tmp_path / "ours"
    store_again([record for record, _ in records_of(theirs)], ours, **WHOLE[name])
    for folder in ("commitlog", "consumequeue", "batchconsumequeue"):
        wanted, found = files(theirs, folder), files(ours, folder)
        assert found.keys() == wanted.keys()
        assert [path for path, data in wanted.items() if found[path] != data] == []


@pytest.mark.parametrize("name", PARTS)
def test_records_are_the_brokers(name: str, tmp_path: Path):
    """Also of long topics (version 2), IPv6 hosts and empty bodies."""
    others = count = 0
    for record, raw in records_of(unpack(name, tmp_path)):
        count += 1
        if join_properties(record.properties) != record.properties_raw:
            others += 1
            continue
        options = replace(
            CAPTURED, store_host=record.store_host, commitlog_file_bytes=record.size + 1000
        )
        made = Maker(
            message_of(record),
            options,
            is_batch_topic=False,
            prepared_transaction_offset=record.prepared_transaction_offset,
        )
        place = record.queue_offset, record.physical_offset, record.store_timestamp_ms
        assert made.make(*place) == raw
    assert others == PARTS[name]
    assert count > 300
