"""What goes on beside the appends of a store: listing what was appended, flushing, checkpoints.

**Contract.** Two threads: one lists, one flushes and writes checkpoints. An error of either ends both: ``failure`` says
why, everything that waits is answered with it, and the store takes nothing more. A checkpoint is written once all that
it tells of is on the disk; a crash leaves the one before or this one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import threading
from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tiered.crashpoints import reached
from tiered.errors import StoreUnavailableError, TieredStoreError
from tiered.format.checkpoint import Checkpoint, encode_checkpoint
from tiered.local.consumequeues import BatchQueue, PlainQueue
from tiered.local.files import NAME_DIGITS
from tiered.local.layout import BATCH_DIRECTORY, QUEUE_DIRECTORY
from tiered.store.disk import replace_file
from tiered.store.queues import CHECKPOINT_FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from collections.abc import Set as AbstractSet

    from tiered.clock import Clock
    from tiered.model import MessageQueue
    from tiered.store.commitlog import CommitLog
    from tiered.store.commits import GroupCommits
    from tiered.store.listing import Reput
    from tiered.store.opening import StoreParts
    from tiered.store.options import Expiry
    from tiered.store.queues import QueueEnd


# -- expiry ----------------------------------------------------------------------------------------
#
# Giving up the oldest messages: files of the log, then what lists only those.
#
# **Contract.** The plan is pure. The log's file goes first; then consume-queue and index files all of whose
# records are gone. A crash in between leaves lists of records that are not there, which readers see as below
# the minimum, and the next round deletes. Whoever has a file open reads on in it; who says that he uses one
# keeps it for a bounded time. ``held_from`` keeps what is at or above it (a tier's progress) until the disk is
# so full that files go whatever their age.


@dataclass(frozen=True, slots=True)
class AgedFile:
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
    files: Sequence[AgedFile],
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


def look(parts: StoreParts) -> tuple[list[AgedFile], float]:
    """The log's files, and how full their disk is."""
    parts.log.rescan()
    files = [
        AgedFile(base, int(Path(parts.log.path(base)).stat().st_mtime * 1000))
        for base in parts.log.bases
    ]
    usage = shutil.disk_usage(parts.hold.root)
    return files, usage.used / usage.total


def delete_files(parts: StoreParts, bases: Sequence[int]) -> Expired:
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


def _expire_queue(parts: StoreParts, queue: MessageQueue, end: QueueEnd, log_min: int) -> int:
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


# -- two threads -----------------------------------------------------------------------------------

_REST_S: Final = 0.01
_COLLECT_S: Final = 0.008
"""What comes within it is listed in one go: a piece of the log costs as much as some hundred messages."""
_BEHIND_BYTES: Final = 4 << 20
"""Who is so far behind does not wait for more."""
_LOOK_S: Final = 0.001


class Upkeep:
    """See the module.

    Attributes:
        failure: Why nothing more is taken; empty while all is well.
        work: Set when there may be something to list.
        held_from: Tells the physical offset from which expiry is held back; None: it is not.
        in_use: Log files that expiry spares for a while.
    """

    def __init__(
        self, parts: StoreParts, log: CommitLog, commits: GroupCommits, reput: Reput, clock: Clock
    ) -> None:
        self.failure = ""
        self.work = threading.Event()
        self._parts = parts
        self._log = log
        self._commits = commits
        self._reput = reput
        self._clock = clock
        self.held_from: Callable[[], int] | None = None
        self.in_use = FilesInUse(parts.options.commitlog_file_bytes)
        self._due_ms: dict[int, int] = {}
        self._is_full = False
        self._expiry_lock = threading.Lock()
        self._stop = threading.Event()
        self._checkpointed = -1
        self._process = os.getpid()
        self._threads = [
            threading.Thread(target=self._guard, args=(body,), name=f"store-{name}")
            for name, body in (("reput", self._run_reput), ("flush", self._run_flush))
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads; again: nothing."""
        self._stop.set()
        self.work.set()
        self._commits.wake.set()
        for thread in self._threads:
            thread.join()

    @property
    def is_forked(self) -> bool:
        """Whether this process is a copy of the store's: it has neither its threads nor its log's end."""
        return os.getpid() != self._process

    def fail(self, why: str) -> None:
        """Take nothing more."""
        self.failure = self.failure or why

    def check_sound(self) -> None:
        """Refuse work after an error.

        Raises:
            StoreUnavailableError: An earlier write failed, or this is a forked process.
        """
        if self.is_forked:
            raise StoreUnavailableError(
                "a store belongs to the process that opened it",
                where=self._parts.hold.root,
                do="open it behind the fork, in one process",
            )
        if self.failure or self._log.is_broken:
            raise StoreUnavailableError(
                f"an earlier write failed: {self.failure or 'it could not be taken back'}",
                where=self._parts.hold.root,
                do="close the store",
            )

    def check_room(self) -> None:
        """Refuse appends while the disk is too full (as the last round of expiry found it).

        Raises:
            StoreUnavailableError: It is.
        """
        if self._is_full:
            raise StoreUnavailableError(
                "the disk is too full for more messages",
                where=self._parts.hold.root,
                do="make room; the next round of expiry looks again",
            )

    def wait_listed(self, end: int, timeout_s: float, *, is_last: bool = False) -> bool:
        """Wait until everything below ``end`` is listed; whether it is. With ``is_last`` nothing more is confirmed."""
        pause = threading.Event()
        deadline_s = self._clock.monotonic_s() + timeout_s
        while self._reput.position < end and not self.failure:
            if self._clock.monotonic_s() > deadline_s or (is_last and self._reput.is_cut(end)):
                return False
            self.work.set()
            pause.wait(_LOOK_S)
        return self._reput.position >= end

    def write_checkpoint(self, *, is_last: bool = False) -> None:
        """Bring everything to the disk, then say so.

        What is written for brokers lags behind until ``is_last``: one that starts after a crash throws away the newest
        index file, and then lists again from where the checkpoint says, which must be where that file begins.

        Raises:
            OSError: It may not be there.
        """
        listed, last_ms = self._reput.position, self._parts.listing.last_ms
        store_ms = self._log.store_ms
        if listed == self._checkpointed and not is_last:
            return
        self._log.sync()
        self._parts.queue_rows.sync()
        self._parts.index.sync()
        begin_ms, begin = self._parts.index.newest_begin or (last_ms, listed)
        if is_last:
            begin_ms, begin = last_ms, listed
        checkpoint = Checkpoint(
            physical_timestamp_ms=store_ms,
            logics_timestamp_ms=min(last_ms, begin_ms),
            index_timestamp_ms=last_ms,
            logics_physical_offset=min(listed, begin),
        )
        reached("store-checkpoint-due")
        replace_file(
            Path(self._parts.hold.root, CHECKPOINT_FILE), encode_checkpoint(checkpoint, listed)
        )
        reached("store-checkpoint-written")
        self._checkpointed = listed

    def expire(self, settings: Expiry, *, by_hand: bool) -> Expired:
        """One round of expiry; rounds exclude one another.

        Raises:
            OSError: Not all of it was done.
        """
        with self._expiry_lock:
            files, used_ratio = look(self._parts)
            bases = plan_expiry(
                files,
                settings,
                now_ms=int(self._clock.now_ms()),
                used_ratio=used_ratio,
                end=self._reput.position,
                held_from=self.held_from() if self.held_from is not None else None,
                by_hand=by_hand,
            )
            bases = leave_in_use(
                bases,
                self.in_use.bases(),
                self._due_ms,
                now_ms=int(self._clock.now_ms()),
                spare_s=settings.spare_s,
            )
            self._is_full = is_full(used_ratio, settings, was_full=self._is_full)
            return delete_files(self._parts, bases) if bases else Expired()

    def _guard(self, body: Callable[[], None]) -> None:
        try:
            body()
        except (OSError, TieredStoreError) as error:
            self.fail(str(error))
            self._commits.fail(error)
        except BaseException as error:  # a dispatcher's, or a fault of ours
            self.fail(repr(error))
            self._commits.fail(StoreUnavailableError(repr(error), where=self._parts.hold.root))
            raise

    def _run_reput(self) -> None:
        while not self._stop.is_set():
            self.work.clear()
            if not self._reput.step():
                self.work.wait(_REST_S)
            elif self._log.end - self._reput.position < _BEHIND_BYTES:
                # Whoever lists a few messages again and again takes the interpreter away from those who append.
                self._stop.wait(_COLLECT_S)

    def _run_flush(self) -> None:
        options = self._parts.options
        rest_s = min(options.flush_interval_s, options.checkpoint_interval_s)
        flushed_s = checkpoint_s = expired_s = self._clock.monotonic_s()
        while not self._stop.is_set():
            self._commits.wake.wait(rest_s)
            self._commits.wake.clear()
            self._commits.run_once()
            self.work.set()
            now_s = self._clock.monotonic_s()
            if now_s >= flushed_s + options.flush_interval_s:
                self._log.sync()
                flushed_s = now_s
            if now_s >= checkpoint_s + options.checkpoint_interval_s:
                self.write_checkpoint()
                checkpoint_s = now_s
            if options.expiry is not None and now_s >= expired_s + options.expiry.interval_s:
                self.expire(options.expiry, by_hand=False)
                expired_s = now_s
