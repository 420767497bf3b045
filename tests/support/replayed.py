"""Storing again what a broker has stored: captured records become messages, given to a store of ours at the same moments."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from support.stored import NAMES

from tiered.clock import ManualClock
from tiered.format.record import Record, decode_record
from tiered.local.chunks import LogChunks, Next, count_sound
from tiered.local.layout import inspect
from tiered.local.mapped_file_queue import FileCache
from tiered.store.embedded import MessageStore
from tiered.store.opening import open_log
from tiered.store.special import message_of
from tiered.store.store_options import StoreOptions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FAR = 1 << 62
CAPTURED = StoreOptions(262_144, 100, 100, 400, batchqueue_file_items=100)
"""File sizes of the captured stores."""


def records_of(root: Path) -> Iterator[tuple[Record, bytes]]:
    """Every record of a log in its order, decoded and raw, up to the first that is none."""
    cache = FileCache()
    try:
        log = open_log(inspect(str(root)), cache)
        chunks, position = LogChunks(log), log.bases[0]
        while True:
            chunk = chunks.read(position, _FAR, 8 << 20)
            sound = count_sound(chunk)
            places = zip(chunk.block.positions, chunk.block.sizes, strict=True)
            for at, size in islice(places, sound):
                raw = bytes(chunk.block.buffer[at : at + size])
                yield decode_record(raw, 0, physical_offset=chunk.start + int(at)), raw
            if sound < len(chunk.block):
                return
            if chunk.follows is Next.FILE and chunk.next_file is not None:
                position = chunk.next_file
            elif chunk.follows is Next.MORE:
                position = chunk.end
            else:
                return
    finally:
        cache.close()


def store_again(
    records: list[Record], root: Path, *, batch_topics: tuple[str, ...] = (), **options: Any
) -> None:
    """Append each as it is at the moment the broker did, by the way that fits: plain ones as any message."""
    clock = ManualClock()
    sizes = replace(CAPTURED, store_host=records[0].store_host, **options)
    with MessageStore.create(
        root, **NAMES, clock=clock, options=sizes, rng=random.Random(1)
    ) as store:
        for topic in batch_topics:
            store.create_topic(topic, queues=1, is_batch=True)
        for record in records:
            clock.jump((record.store_timestamp_ms - clock.now_ms()) / 1000)
            found = record.properties
            is_usual = found.keys() >= {"UNIQ_KEY", "CLUSTER"} and not record.sys_flag & 0xCC
            if is_usual:
                store.append(message_of(record))
            else:
                half = record.prepared_transaction_offset
                store.append_as_is(message_of(record), prepared_transaction_offset=half)
