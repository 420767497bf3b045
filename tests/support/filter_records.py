"""Batches of records with given properties, and what RocketMQ's filters and ours answer for them."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from support.examples import make

from fetcher.filters import FilterError, TagFilter, compile_filter
from fetcher.filters.sql92 import SqlFilter
from fetcher.filters.sql_tree import Unanswerable
from tiered.format.properties import TAGS, java_text, parse_properties, tag_hash, value_of
from tiered.format.record import encode_record
from tiered.format.sysflag import INNER_BATCH
from tiered.local.interface import HoleReason, RecordBatch
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fetcher.filters import Filter

QUEUE = MessageQueue("topic", 0)

Given = bytes | tuple[bytes, ...] | None
"""Properties of a message, of the messages of an inner batch, or a hole."""


def inner_body(messages: Sequence[bytes]) -> bytes:
    """The body of an inner batch of empty messages."""
    return b"".join(
        struct.pack(">iiiiih", 22 + len(raw), 0, 0, 0, 0, len(raw)) + raw for raw in messages
    )


def batch_of_properties(given: Sequence[Given], *, base: int = 100) -> RecordBatch:
    """A batch whose items have these properties."""
    rows: list[tuple[int, int, int]] = []
    raws: list[bytes] = []
    for one in given:
        offset, at = base + len(rows), sum(map(len, raws))
        if one is None:
            rows.append((at, 0, HoleReason.DAMAGED))
            continue
        is_inner = isinstance(one, tuple)
        raws.append(
            encode_record(
                make(
                    queue_offset=offset,
                    sys_flag=INNER_BATCH if is_inner else 0,
                    body=inner_body(one) if isinstance(one, tuple) else b"x",
                    properties_raw=b"a\x01outer\x02INNER_NUM\x01%d\x02" % len(one)
                    if is_inner
                    else one,
                )
            )
        )
        code = 0 if isinstance(one, tuple) else tag_hash(parse_properties(one).get(TAGS))
        rows += [(at, len(raws[-1]), code)] * (len(one) if is_inner else 1)
    columns = np.array(rows, np.int64).reshape(-1, 3).T
    return RecordBatch(
        queue=QUEUE,
        base_offset=QueueOffset(base),
        data=b"".join(raws),
        positions=columns[0],
        sizes=columns[1].astype(np.int32),
        tag_codes=columns[2],
        store_timestamps_ms=np.zeros(len(rows), np.int64),
        physical_offsets=np.zeros(len(rows), np.int64),
    )


@dataclass(frozen=True)
class Answers:
    """Of the real RocketMQ.

    Attributes:
        messages: Stored properties.
        rows: ``kind``, ``text``, and ``answers`` (a letter for each message) or ``error``.
    """

    messages: list[bytes]
    rows: list[dict[str, Any]]


LETTERS = {True: "T", False: "F", None: "N"}


def letter(made: Filter, raw: bytes) -> str:
    """T, F, N for null, X where Java throws."""
    if isinstance(made, TagFilter):
        return LETTERS[made.matches(parse_properties(raw))]
    assert isinstance(made, SqlFilter)
    values = [value_of(raw, name.encode("utf-8", "surrogatepass")) for name in made.names]
    row = tuple(java_text(value) if value else None for value in values)
    try:
        return LETTERS[made._function(row)]
    except Unanswerable:
        return "X"


def letters(row: dict[str, Any], messages: list[bytes]) -> str | None:
    """The answers to one expression; None when it is refused."""
    try:
        made = compile_filter(row["text"], row["kind"], strict=False)
    except FilterError:
        return None
    return "".join(letter(made, raw) for raw in messages)
