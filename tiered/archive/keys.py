"""Keys of an archive's objects, as Hive's partitions: ``topic=…/date=…/queue=…/<low>-<high>-<source>.parquet``.

A key is a pure function of the sealed segment that the file is made of, so that whoever does the same work again, after a
crash or beside us, makes the same object. ``source`` tells brokers and incarnations apart, and a life that the broker took
back from the one that came in its place; and it changes with the schema and with the columns that are added to it, since no
object is ever replaced.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from tiered.archive.model import SCHEMA_VERSION

if TYPE_CHECKING:
    from tiered.archive.plan import Task

DAY_MS = 86_400_000
_SAFE = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-.")
_NAME_BYTES_MAX = 200
_OFFSET_DIGITS = 20


def partition_value(name: str) -> str:
    """A topic's name as the value of a partition: other than letters, digits and ``_ - .`` is ``%XX``.

    A name that becomes longer than a key's segment may be is cut and ends in a hash of the whole; the column ``topic``
    always has the whole.
    """
    raw = name.encode("utf-8", "surrogateescape")
    text = "".join(chr(byte) if byte in _SAFE else f"%{byte:02X}" for byte in raw)
    if len(text) <= _NAME_BYTES_MAX:
        return text
    return f"{text[:_NAME_BYTES_MAX].rpartition('%')[0]}~{hashlib.sha256(raw).hexdigest()[:16]}"


def date_text(day: int) -> str:
    """A day since 1970 as ``YYYY-MM-DD``, UTC; a day that no calendar has as its number."""
    try:
        return datetime.fromtimestamp(day * 86_400, UTC).strftime("%Y-%m-%d")
    except (ValueError, OverflowError, OSError):
        return f"day{day}"


def file_key(task: Task, day: int, low: int, high: int) -> str:
    """Key of the rows ``[low, high)`` that were stored on a day."""
    folder = f"topic={partition_value(task.lane.topic)}/date={date_text(day)}"
    return f"{folder}/queue={task.lane.queue_id}/{_leaf(task, low, high)}"


def side_key(task: Task) -> str:
    """Key of what could not become rows. Behind an underscore, where readers of directories do not look."""
    topic = partition_value(task.lane.topic)
    return f"_bad/topic={topic}/queue={task.lane.queue_id}/{_leaf(task, task.start, task.end)}"


def _leaf(task: Task, low: int, high: int) -> str:
    return f"{low:0{_OFFSET_DIGITS}d}-{high:0{_OFFSET_DIGITS}d}-{_source(task)}.parquet"


def _source(task: Task) -> str:
    """Eight hex digits that stay what they are when parts of the segment are merged."""
    lane, parts = task.lane, task.parts
    low = min((part.store_min_ms for part in parts if part.store_min_ms >= 0), default=-1)
    high = max(part.store_max_ms for part in parts)
    known = (SCHEMA_VERSION, lane.cluster, lane.broker, lane.incarnation, task.start, task.end)
    size = parts[-1].log_end - parts[0].log_offset
    text = repr((*known, low, high, parts[-1].last, size, *task.layout.marks))
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:8]
