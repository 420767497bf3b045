"""Storing again what a broker has stored: captured records become messages, given to a store of ours at the same moments."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from store.reading import NAMES

from tiered.clock import ManualClock
from tiered.format import sysflag
from tiered.format.record import Record, decode_record
from tiered.local.files import FileCache
from tiered.local.layout import inspect
from tiered.local.pieces import LogPieces, Next
from tiered.store.message_store import MessageStore
from tiered.store.messages import Message
from tiered.store.options import StoreOptions
from tiered.store.recovery import open_log

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FAR = 1 << 62
_HOSTS = sysflag.BORN_HOST_V6 | sysflag.STORE_HOST_V6
CAPTURED = StoreOptions(262_144, 100, index_slots=100, index_items=400)
"""File sizes of the captured stores."""


def records_of(root: Path) -> Iterator[tuple[Record, bytes]]:
    """Every record of a log in its order, decoded and raw, up to the first that is none."""
    cache = FileCache()
    try:
        log = open_log(inspect(str(root)), cache)
        pieces, position = LogPieces(log), log.bases[0]
        while True:
            piece = pieces.read(position, _FAR, 8 << 20)
            for at, size in zip(piece.block.positions, piece.block.sizes, strict=True):
                raw = bytes(piece.block.buffer[at : at + size])
                yield decode_record(raw, 0, physical_offset=piece.start + int(at)), raw
            if piece.follows is Next.FILE and piece.next_file is not None:
                position = piece.next_file
            elif piece.follows is Next.MORE:
                position = piece.end
            else:
                return
    finally:
        cache.close()


def as_message(record: Record) -> Message:
    """What a broker must have been given to store this record."""
    return Message(
        record.topic,
        record.queue_id,
        record.body,
        properties=record.properties,
        flag=record.flag,
        born_timestamp_ms=record.born_timestamp_ms,
        born_host=record.born_host,
        sys_flag=record.sys_flag & ~_HOSTS,
        reconsume_times=record.reconsume_times,
    )


def store_again(records: list[Record], root: Path, store_host: str) -> list[tuple[int, int]]:
    """Append each at the moment the broker did; physical and queue offset of each."""
    clock = ManualClock()
    options = StoreOptions(262_144, 100, 100, 400, store_host=store_host)
    with MessageStore.create(
        root, **NAMES, clock=clock, options=options, rng=random.Random(1)
    ) as store:
        places = []
        for record in records:
            clock.jump((record.store_timestamp_ms - clock.now_ms()) / 1000)
            put = store.append(as_message(record))
            places.append((put.physical_offset, put.queue_offset))
        return places
