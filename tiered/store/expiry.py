"""Giving up the oldest messages: files of the log, then what lists only those.

**Contract.** The plan is pure. The log's file goes first; then consume-queue and index files all of whose records are
gone. A crash in between leaves lists of records that are not there, which readers see as below the minimum, and the next
round deletes. Whoever has a file open reads on in it; who says that he uses one keeps it for a bounded time.
``held_from`` keeps what is at or above it (a tier's progress) until the disk is so full that files go whatever their age.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import threading
from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from tiered.crashpoints import reached
from tiered.local.consumequeues import BatchQueue, PlainQueue
from tiered.local.files import NAME_DIGITS
from tiered.local.layout import BATCH_DIRECTORY, QUEUE_DIRECTORY

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from collections.abc import Set as AbstractSet

    from tiered.model import MessageQueue
    from tiered.store.opening import Parts
    from tiered.store.options import Expiry
    from tiered.store.startup import QueueEnd


@dataclass(frozen=True, slots=True)
class LogFile:
    """A file of the log: where it begins, and when it was last written to (UTC ms)."""

    base: int
    changed_ms: int


@dataclass(frozen=True, slots=True)
class Expired:
    """How many files a round deleted."""

    log_files: int = 0
    queue_files: int = 0
    index_files: int = 0


def plan_expiry(
    files: Sequence[LogFile],
    settings: Expiry,
    *,
    now_ms: int,
    used_ratio: float,
    end: int,
    held_from: int | None,
    by_hand: bool,
) -> list[int]:
    """Which files go, the oldest first.

    Args:
        files: Of the log, in order.
        settings: See ``Expiry``.
        now_ms: UTC.
        used_ratio: How full the disk is, 0 to 1.
        end: What is at or above it must stay: it is not listed yet.
        held_from: Likewise, but not when the disk is fuller than ``used_ratio_forced``.
        by_hand: Somebody asked: as in the set hour.
    """
    hour = datetime.fromtimestamp(now_ms / 1000).astimezone().hour
    is_forced = used_ratio >= settings.used_ratio_forced
    if not (is_forced or by_hand or hour == settings.hour or used_ratio >= settings.used_ratio_max):
        return []
    limit = end if held_from is None or is_forced else min(end, held_from)
    gone: list[int] = []
    for file, following in itertools.pairwise(files):
        is_old = file.changed_ms + settings.reserve_s * 1000 < now_ms
        if len(gone) == settings.files_max or following.base > limit or not (is_old or is_forced):
            break
        gone.append(file.base)
    return gone


def leave_in_use(
    bases: Sequence[int],
    in_use: AbstractSet[int],
    due_ms: dict[int, int],
    *,
    now_ms: int,
    spare_s: float,
) -> list[int]:
    """Which of the files that are to go do so now: those before the first that is in use and not due for long.

    Args:
        bases: Files that are to go, the oldest first.
        in_use: Files that somebody uses.
        due_ms: Since when files in use are due (UTC ms); brought up to date.
        now_ms: UTC.
        spare_s: How long a file in use is spared.
    """
    for number, base in enumerate(bases):
        if base in in_use and now_ms < due_ms.setdefault(base, now_ms) + spare_s * 1000:
            return list(bases[:number])
        due_ms.pop(base, None)
    return list(bases)


def is_full(used_ratio: float, settings: Expiry, *, was_full: bool) -> bool:
    """Whether appends are refused: from ``used_ratio_refused`` on, until below ``used_ratio_forced``."""
    if was_full:
        return used_ratio >= settings.used_ratio_forced
    return used_ratio > settings.used_ratio_refused


class FilesInUse:
    """Files of the log that somebody uses, and so often. For any thread."""

    def __init__(self, file_bytes: int) -> None:
        self._file_bytes = file_bytes
        self._counts: Counter[int] = Counter()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def use(self, position: int) -> Iterator[None]:
        """Use the file that holds a physical offset."""
        base = position - position % self._file_bytes
        with self._lock:
            self._counts[base] += 1
        try:
            yield
        finally:
            with self._lock:
                self._counts[base] -= 1

    def bases(self) -> set[int]:
        """The files in use."""
        with self._lock:
            return {base for base, count in self._counts.items() if count}


def look(parts: Parts) -> tuple[list[LogFile], float]:
    """The log's files, and how full their disk is."""
    parts.log.rescan()
    files = [
        LogFile(base, int(Path(parts.log.path(base)).stat().st_mtime * 1000))
        for base in parts.log.bases
    ]
    usage = shutil.disk_usage(parts.hold.root)
    return files, usage.used / usage.total


def delete_files(parts: Parts, bases: Sequence[int]) -> Expired:
    """Delete files of the log, and what lists only records that are gone.

    Raises:
        OSError: Not all of it was done; the next round does the rest.
    """
    for base in bases:
        path = parts.log.path(base)
        parts.log_rows.forget(path)
        Path(path).unlink(missing_ok=True)
    reached("store-log-expired")
    parts.log.rescan()
    if not parts.log.bases:
        return Expired(len(bases))
    log_min = parts.log.bases[0]
    queue_files = sum(
        _expire_queue(parts, queue, end, log_min)
        for queue, end in list(parts.listing.queues.items())
        if not end.is_new
    )
    reached("store-queues-expired")
    return Expired(len(bases), queue_files, parts.index.expire(log_min))


def _expire_queue(parts: Parts, queue: MessageQueue, end: QueueEnd, log_min: int) -> int:
    """Delete a queue's files whose last entry is below the log; never the newest."""
    kind, made = (
        (QUEUE_DIRECTORY, PlainQueue) if end.unit is None else (BATCH_DIRECTORY, BatchQueue)
    )
    folder = f"{parts.hold.root}/{kind}/{queue.topic}/{queue.queue_id}"
    index = made(parts.cache, folder, end.file_bytes)
    count = 0
    for base in index.row.bases[:-1]:
        last = (base + end.file_bytes) // index.unit_bytes
        item = index.units(last - 1, last)
        if not len(item) or int(item["physical_offset"][0]) >= log_min:
            break
        path = f"{folder}/{base:0{NAME_DIGITS}d}"
        parts.queue_rows.forget(path)
        Path(path).unlink()
        count += 1
    return count
