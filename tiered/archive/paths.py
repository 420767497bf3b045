"""Keys of an archive's objects, as Hive's partitions: ``data/topic_dir=…/date=…/<queue>-<low>-<high>-<source>.parquet``.

What readers of directories make of a key has to be true for each row below it, and must not be a column of the files too:
so the names of topics in keys are names of folders (``topic_dir``), since they are escaped and cut, and a file that queues
share is possible because no partition says a queue. Nothing but files of messages ends in ``.parquet``. Nobody here parses a
key: what is known of a file says the log.

A key is a pure function of the sealed segment that the file is made of, so that whoever does the same work again, after a
crash or beside us, makes the same object. ``source`` tells brokers and incarnations apart, and a life that the broker took
back from the one that came in its place; and it changes with the schema and with the columns that are added to it, since no
object is ever replaced.
"""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from tiered.archive.model import SCHEMA_VERSION

if TYPE_CHECKING:
    from tiered.archive.plan import Task

DAY_MS = 86_400_000
DATA = "data/"
"""Below it lie the messages, and nothing else: all of it may be read as one table."""
FILES = f"{DATA}topic_dir="
"""What the keys of all files with messages begin with."""
SIDE = "_bad/"
_SAFE = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-.")
_NAME_BYTES_MAX = 200
_OFFSET_DIGITS = 20
_PLAINLY_TEXT = re.compile(rb"[A-Za-z%_]")
_WORDS = frozenset(
    {"true", "false", "null", "none", "nan", "inf", "infinity", "__hive_default_partition__"}
)
"""Readers of directories guess types: what one of them takes for a number, a time or one of these is no folder's name."""


def partition_value(name: str) -> str:
    """A topic's name as the value of a partition: other than letters, digits and ``_ - .`` is ``%XX``.

    A name that becomes longer than a key's segment may be is cut and ends in a hash of the whole, and one that might be
    taken for something else than a text ends in ``~``; the column ``topic`` always has the whole, and nothing but it.
    """
    raw = name.encode("utf-8", "surrogateescape")
    text = "".join(chr(byte) if byte in _SAFE else f"%{byte:02X}" for byte in raw)
    if len(text) < _NAME_BYTES_MAX:
        is_text = _PLAINLY_TEXT.match(raw) and name.casefold() not in _WORDS
        return text if is_text else f"{text}~"
    return f"{text[:_NAME_BYTES_MAX].rpartition('%')[0]}~{hashlib.sha256(raw).hexdigest()[:16]}"


def date_text(day: int) -> str:
    """A day since 1970 as ``YYYY-MM-DD``, UTC; a day that no calendar has as its number."""
    try:
        return datetime.fromtimestamp(day * 86_400, UTC).date().isoformat()
    except (ValueError, OverflowError, OSError):
        return f"day{day}"


def folder_key(topic: str, day: int) -> str:
    """What keys of a topic's messages begin with that were stored on a day; ends in a slash."""
    return f"{FILES}{partition_value(topic)}/date={date_text(day)}/"


def file_key(task: Task, day: int, low: int, high: int) -> str:
    """Key of the rows ``[low, high)`` that were stored on a day."""
    return f"{folder_key(task.lane.topic, day)}{_leaf(task, low, high)}.parquet"


def side_key(task: Task) -> str:
    """Key of what could not become rows. Behind an underscore, where readers of directories do not look."""
    folder = f"{SIDE}topic_dir={partition_value(task.lane.topic)}/"
    return f"{folder}{_leaf(task, task.start, task.end)}.side"


def _leaf(task: Task, low: int, high: int) -> str:
    offsets = f"{low:0{_OFFSET_DIGITS}d}-{high:0{_OFFSET_DIGITS}d}"
    return f"{task.lane.queue_id}-{offsets}-{_source(task)}"


def _source(task: Task) -> str:
    """Eight hex digits that stay what they are when parts of the segment are merged."""
    lane, parts = task.lane, task.parts
    low = min((part.store_min_ms for part in parts if part.store_min_ms >= 0), default=-1)
    high = max(part.store_max_ms for part in parts)
    known = (SCHEMA_VERSION, *lane.row(), task.start, task.end)
    size = parts[-1].log_end - parts[0].log_offset
    text = repr((*known, low, high, parts[-1].last, size, *task.layout.marks))
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:8]
