"""A message store in a RocketMQ broker's own format, written in this process.

**Contract.** One writer a directory: it holds the broker's lock, so that a broker and it exclude each other. Methods may
be called from any thread; log order is the order of the appends. Two threads belong to a store: one lists what was
appended (consume queues, key index, dispatchers), usually within a few milliseconds, under full load within tens of them;
one flushes and writes checkpoints. A third compacts, where topics are to be (``tiered.store.compacting``).

**When is it stored?** ``Flush.ASYNC``: what ``append`` returned survives the end of this process. ``Flush.SYNC``: and
the end of the machine. With ``needs_replica`` it has also been acknowledged by ``acknowledge_replica``. What is above
the confirmed offset is neither listed, nor read, nor dispatched.

**Errors and retries.** ``InvalidError``: nothing of the call was stored, and trying again does not help.
``StoreUnavailableError``: the disk refused it, and nothing was stored (the next append may be tried: a full disk may
have room again), or the flush or the replica did not answer in time, and it may be stored. After a flush that failed
the store takes nothing more; ``close`` it, which leaves it as a crash does.

**Crashes** leave the file ``abort``; ``open`` then recovers (``tiered.store.opening``), as a broker would.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import shutil
import threading
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from backends.lazy_dataclass import dataclass
from tiered.crashpoints import reached
from tiered.errors import ClosedError, InvalidError, StoreUnavailableError, TieredStoreError
from tiered.format.broker_checkpoint import Checkpoint, encode_checkpoint
from tiered.local.catalog import check_topic
from tiered.model import Closing, MessageQueue, PhysicalOffset, QueueOffset
from tiered.store.commitlog import CommitLog, GroupCommits, not_stored
from tiered.store.compacting import Compactions
from tiered.store.disk import CHECKPOINT_FILE, Disk, is_for_room, replace_file
from tiered.store.encoding import Encoder, Receipts
from tiered.store.listing import Reput
from tiered.store.live_reading import StoreReader
from tiered.store.new_message import KeyMaker
from tiered.store.opening import StoreParts, check_names, make_new, open_existing
from tiered.store.special import Maker, complete
from tiered.store.store_options import Expiry, Flush, StoreOptions
from tiered.store.topictable import KnownTopics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet
    from concurrent.futures import Future
    from contextlib import AbstractContextManager

    from tiered.clock import Clock
    from tiered.local.interface import RecordBatch
    from tiered.store.compacting import CompactionCounts
    from tiered.store.encoding import RecordPlaces
    from tiered.store.listing import Dispatch, QueueEnd
    from tiered.store.new_message import Appended, NewMessage
    from tiered.store.opening import Recovered
    from tiered.store.restored import ReadyRecords


_DRAIN_S = 60.0


class MessageStore(Closing):
    """See the module. Make it with ``create`` or ``open``."""

    @classmethod
    def create(
        cls,
        directory: str | os.PathLike[str],
        *,
        cluster: str,
        broker: str,
        clock: Clock,
        options: StoreOptions | None = None,
        rng: random.Random | None = None,
    ) -> Self:
        """Begin a store in a directory that is empty or missing, a broker's ``storePathRootDir``.

        ``cluster`` goes into every message and into the table of topics; ``rng`` makes unique ids (default: the system's).
        """
        options = options or StoreOptions()
        check_names(cluster, broker, options)
        parts = make_new(directory, options, cluster=cluster, broker=broker, clock=clock)
        return cls(parts, cluster, clock, rng or random.SystemRandom())

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        *,
        cluster: str,
        broker: str,
        clock: Clock,
        options: StoreOptions | None = None,
        rng: random.Random | None = None,
        anew: bool = False,
        begins: Mapping[MessageQueue, QueueOffset] | None = None,
        synced_end: int = 0,
    ) -> Self:
        """Go on with a store, ours or a broker's; recovers it where it was not stopped cleanly.

        Arguments are those of ``create``, but the sizes of files that are there win, and before there are any those that
        ``create`` was given. With ``anew`` consume queues and index are made anew from the log. ``begins`` says at which
        offsets queues begin that are not there (for ``refill``). ``synced_end``, with ``anew``, says up to where the log is
        known to be on the disk: damage below it is an error, and cuts off nothing.
        """
        options = options or StoreOptions()
        check_names(cluster, broker, options)
        parts = open_existing(
            directory, options, clock, anew=anew, begins=begins or {}, synced_end=synced_end
        )
        return cls(parts, cluster, clock, rng or random.SystemRandom())

    def __init__(self, parts: StoreParts, cluster: str, clock: Clock, rng: random.Random) -> None:
        self.options = options = parts.options
        self.root = parts.hold.root
        self._parts = parts
        self._clock = clock
        self._cluster, self._keys = cluster, KeyMaker(rng)
        self._encoder = Encoder(options, cluster, self._keys)
        self._topics = KnownTopics(parts.topics, clock, options.topic_queues)
        self._log = CommitLog(
            self.root,
            options.commitlog_file_bytes,
            end=parts.log_end,
            store_ms=parts.store_ms,
            queue_ends={
                (queue.topic, queue.queue_id): end.next_offset
                for queue, end in parts.listing.queues.items()
            },
            rows=parts.log_rows,
            clock=clock,
        )
        self._commits = GroupCommits(
            lambda messages: self._log.append(messages, self._encoder.store_host),
            self._log.sync,
            clock,
            needs_sync=options.flush is Flush.SYNC,
            needs_replica=options.needs_replica,
        )
        self._commits.replica_end = parts.log_end
        self._reput = Reput(
            parts.log,
            parts.listing,
            self._log.handover,
            parts.log_end,
            lambda: self.confirm_offset,
        )
        self._upkeep = Upkeep(parts, self._log, self._commits, self._reput, clock)
        try:
            with Disk(self.root):
                self._compactions = Compactions(parts, clock)
        except BaseException:
            parts.close()
            raise
        self._upkeep.before_expiry = self._compactions.advance
        self.reader = StoreReader(parts, lambda: self.confirm_offset, self._compactions.log)
        self._close_lock = threading.Lock()
        self._is_closed = False
        try:
            self._begin()
        except BaseException:
            parts.close()
            raise
        self._upkeep.start()
        self._compactions.start()

    # -- the face --------------------------------------------------------------------------------

    @property
    def recovered(self) -> Recovered | None:
        """What ``open`` had to recover; None after a clean stop."""
        return self._parts.recovered

    @property
    def log_end(self) -> PhysicalOffset:
        """Physical offset behind the last record."""
        return PhysicalOffset(self._log.end)

    @property
    def confirm_offset(self) -> PhysicalOffset:
        """What is below it is stored as the policy says, and visible (or soon is)."""
        end = self._log.synced if self.options.flush is Flush.SYNC else self._log.end
        if self.options.needs_replica:
            end = min(end, self._commits.replica_end)
        return PhysicalOffset(end)

    @property
    def listed_end(self) -> PhysicalOffset:
        """What is below it is in consume queues and index, and was dispatched."""
        return PhysicalOffset(self._reput.position)

    def queues(self) -> dict[MessageQueue, QueueOffset]:
        """Every queue, and the queue offset of its next message to become visible."""
        found = list(self._parts.listing.queues.items())
        return {queue: QueueOffset(end.next_offset) for queue, end in found}

    def register(self, dispatch: Dispatch) -> None:
        """Have a dispatcher called with everything that is listed from now on, in the reput thread."""
        self._reput.dispatchers.append(dispatch)

    def create_topic(
        self, topic: str, *, queues: int, is_batch: bool = False, is_compacted: bool = False
    ) -> None:
        """Make a topic, or give one more queues. Messages make theirs themselves.

        With ``is_batch`` its consume queues are batch queues, which inner batches need. With ``is_compacted`` of each key
        the newest message is kept (``tiered.store.compacting``), and messages without a key are refused.
        """
        self._check_open()
        with Disk(self.root):
            self._topics.create(topic, queues, is_batch=is_batch, is_compacted=is_compacted)
        self._compactions.start()

    def begin_queue(self, queue: MessageQueue, offset: QueueOffset) -> None:
        """Let a queue without messages begin at another queue offset than 0. In memory until its first message."""
        check_topic(queue.topic)
        if offset < 0 or not self._log.begin_queue((queue.topic, queue.queue_id), offset):
            raise InvalidError(f"queue {queue} cannot begin at {offset}")

    def queue_end(self, queue: MessageQueue) -> QueueOffset:
        """Queue offset that the next message of a queue gets; 0 when it has none yet."""
        return QueueOffset(self._log.queue_end((queue.topic, queue.queue_id)))

    def append(self, message: NewMessage) -> Appended:
        """Store one message. Errors as of ``append_batch``."""
        return self.append_batch((message,))[0]

    def append_batch(self, messages: Sequence[NewMessage]) -> Receipts:
        """Store messages in a row; wait as the policy says. InvalidError: one cannot be stored as it is, and none was."""
        if self.options.flush is Flush.SYNC and messages:
            return self._append_together(messages)
        receipts, future = self.submit(messages)
        self._wait(future)
        return receipts

    def submit(self, messages: Sequence[NewMessage]) -> tuple[Receipts, Future[None] | None]:
        """As ``append_batch``, without waiting: the receipts, and a future (None: nothing to wait for)."""
        self._check_room()
        self._refuse_keyless(messages)
        prepared = self._encoder.prepare(messages, int(self._clock.now_ms()))
        with Disk(self.root):
            if not self._topics.has(prepared.distinct):
                self._topics.ensure(prepared.queues)
            places = self._log.append(prepared, self._encoder.store_host)
        return Receipts(prepared, places, self.options.store_host), self._acknowledged(places.end)

    def append_as_is(
        self, message: NewMessage, *, prepared_transaction_offset: int = 0
    ) -> Appended:
        """Store a message that names all that is to be stored of it: see ``tiered.store.special``.

        ``complete`` gives a client's message what a broker adds; the offset is that of the half message that it was.
        Errors as of ``append_batch``.
        """
        self._check_room()
        queue = message.topic, message.queue_id
        with Disk(self.root):
            made = Maker(
                message,
                self.options,
                is_batch_topic=self._topics.is_batch(message.topic),
                prepared_transaction_offset=prepared_transaction_offset,
            )
            self._topics.ensure((queue,))
            places = self._log.append_made(queue, made.takes, made.make)
        self._wait(self._acknowledged(places.end))
        return made.receipt(places)

    def append_records(self, records: ReadyRecords) -> RecordPlaces:
        """Store records that were made for this store (``tiered.store.encoding``), as they are, in one go.

        Errors as of ``append_batch``; what is wrong with a record itself was said when they were made.
        """
        self._check_room()
        with Disk(self.root):
            if not self._topics.has(records.distinct):
                self._topics.ensure(records.queues)
            places = self._log.append_ready(records, self._encoder.store_host)
        self._wait(self._acknowledged(places.end))
        return places

    def complete(self, message: NewMessage) -> NewMessage:
        """A message with what a broker adds, in its order: for ``append_as_is``. Errors: ``InvalidError``."""
        (key,) = self._keys.take(1, int(self._clock.now_ms()))
        return complete(message, cluster=self._cluster, unique_key=key)

    def acknowledge_replica(self, end: PhysicalOffset) -> None:
        """A replica has everything below ``end``."""
        self._commits.acknowledge_replica(end)
        self._upkeep.work.set()

    def flush(self) -> None:
        """Bring everything that was appended to the disk."""
        self._check_open()
        with Disk(self.root, self._upkeep.fail):
            self._log.sync()

    def use_file(self, position: PhysicalOffset) -> AbstractContextManager[None]:
        """Have expiry spare the log file that holds a physical offset, for ``Expiry.spare_s`` once it is due."""
        return self._upkeep.in_use.use(position)

    def hold_expiry(self, held_from: Callable[[], int] | None) -> None:
        """Have expiry keep what is at or above the physical offset that is told."""
        self._upkeep.held_from = held_from

    def expire(self) -> Expired:
        """Delete now what is old enough (with the settings of ``options.expiry``, or the default ones)."""
        self._check_open()
        with Disk(self.root):
            return self._upkeep.expire(self.options.expiry or Expiry(), by_hand=True)

    def compact(self) -> CompactionCounts:
        """Make a pass now over each compacted queue that has anything new in closed files; what was done so far."""
        self._check_open()
        with Disk(self.root):
            return self._compactions.compact(by_hand=True)

    def refill(self, queue: MessageQueue, batches: Iterable[RecordBatch]) -> int:
        """Give a replica what a compacted queue had before this store has anything of it; then a pass is made.

        This store must have something of the queue, or was opened with the offset at which it begins. Batches come from
        another store or a tier, in order; what this store has itself is left out; how many were taken in. After an error of
        the disk nothing is changed.
        """
        self._check_open()
        with Disk(self.root):
            return self._compactions.refill(queue, batches)

    def wait_listed(self, end: int | None = None, timeout_s: float = _DRAIN_S) -> bool:
        """Wait until everything below ``end`` (default: all that was appended) is listed; whether it is."""
        return self._upkeep.wait_listed(self._log.end if end is None else end, timeout_s)

    def close(self) -> None:
        """Stop cleanly: list and flush all, write the checkpoint, remove ``abort``. Again: nothing.

        What is not confirmed cannot be listed; then, and after an error, the store is left as by a crash.
        """
        if self._upkeep.is_forked:
            return
        with self._close_lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._log.seal()  # an append that is under way would write without the lock
            try:
                self._shut_down()
            finally:
                self._upkeep.stop()
                self._compactions.stop()
                self._commits.fail(ClosedError("the store was closed", where=self.root))
                self._parts.close()

    # -- inside ----------------------------------------------------------------------------------

    def _begin(self) -> None:
        with Disk(self.root):
            now_ms = self._clock.now_ms()
            self._parts.topics.save(now_ms)  # without it nobody can open the directory again
            self._parts.hold.begin(now_ms)
            reached("store-marked")
            self._upkeep.write_checkpoint()

    def _shut_down(self) -> None:
        if self._upkeep.failure or self._log.is_broken:
            return
        with Disk(self.root, self._upkeep.fail):
            self._log.sync()
            confirmed = self.confirm_offset
            self._upkeep.wait_listed(confirmed, _DRAIN_S, is_last=True)
            is_cut = self._reput.is_cut(confirmed)
            self._upkeep.stop()
            if failed := self._upkeep.failure:
                raise OSError(failed)
            self._upkeep.write_checkpoint(is_last=self._reput.position == self._log.end)
            reached("store-stopping")
            if self._reput.position == self._log.end:
                self._parts.hold.end()
        self._tell_unlisted(confirmed if not is_cut else self._reput.position)

    def _tell_unlisted(self, confirmed: int) -> None:
        position, end = self._reput.position, self._log.end
        if position < confirmed:
            why = self._upkeep.lacks_room or "listing took too long"
            raise StoreUnavailableError(
                f"closed with {confirmed - position} bytes of the log, from {position} on, in no list: {why}",
                where=self.root,
                do="nothing is lost: the next open of the store lists them",
            )
        if position < end:
            _LOG.warning(
                "%s: closed with %d bytes of the log, from %d on, that no replica has acknowledged; they are in no list",
                self.root,
                end - position,
                position,
            )

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the store has been closed", where=self.root)
        self._upkeep.check_sound()

    def _check_room(self) -> None:
        self._check_open()
        self._upkeep.check_room()

    def _refuse_keyless(self, messages: Sequence[NewMessage]) -> None:
        """As a broker does: a compacted topic would lose them."""
        topics = self._topics.compacted
        for message in messages if topics else ():
            if message.topic in topics and not message.keys:
                raise InvalidError(
                    f"a message without a key, for topic {message.topic}, of which the newest message of each key is kept"
                )

    def _acknowledged(self, end: int) -> Future[None] | None:
        """Done when everything below ``end`` is stored as the policy says; None where there is nothing to wait for."""
        if self.options.flush is Flush.ASYNC and not self.options.needs_replica:
            if not self._upkeep.work.is_set():
                self._upkeep.work.set()
            return None
        return self._commits.submit(end)

    def _append_together(self, messages: Sequence[NewMessage]) -> Receipts:
        """Let the flush thread write and sync what all who wait have to store."""
        self._check_room()
        self._refuse_keyless(messages)
        prepared = self._encoder.prepare(messages, int(self._clock.now_ms()))
        if not self._topics.has(prepared.distinct):
            with Disk(self.root):
                self._topics.ensure(prepared.queues)
        timeout_s = self.options.sync_timeout_s
        try:
            places = self._commits.append(prepared, timeout_s)
        except OSError as error:
            raise not_stored(self.root, timeout_s, error) from error
        return Receipts(prepared, places, self.options.store_host)

    def _wait(self, future: Future[None] | None) -> None:
        if future is None:
            return
        timeout_s = self.options.sync_timeout_s
        try:
            future.result(timeout_s)
        except OSError as error:
            raise not_stored(self.root, timeout_s, error) from error


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
    """Which files go, the oldest first, at a disk that is full by ``used_ratio`` (0 to 1).

    What is at or above ``end`` is not listed yet and stays; so does what is above ``held_from``, unless the disk is fuller
    than ``used_ratio_forced``. ``by_hand``: somebody asked, as in the set hour.
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
    """Of files that are to go, oldest first, those before the first that is in use and not due for long.

    ``due_ms``: since when files in use are due (UTC ms); brought up to date.
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
    """Delete files of the log, and what lists only records that are gone. After an OSError the next round does the rest."""
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
    index = end.opened(parts.cache, parts.hold.root, queue)
    count = 0
    for base in index.row.bases[:-1]:
        last = (base + end.file_bytes) // index.unit_bytes
        item = index.units(last - 1, last)
        if not len(item) or int(item["physical_offset"][0]) >= log_min:
            break
        path = index.row.path(base)
        parts.queue_rows.forget(path)
        Path(path).unlink()
        count += 1
    return count


# -- beside the appends: two threads -----------------------------------------------------------------------------------

_LOG = logging.getLogger(__name__)
_REST_S: Final = 0.01
_COLLECT_S: Final = 0.008
"""What comes within it is listed in one go: a chunk of the log costs as much as some hundred messages."""
_COLLECT_BUSY_S: Final = 0.03
"""Likewise, while so much comes that appends and the lists want the interpreter all the time."""
_BUSY_BYTES: Final = 512 << 10
_BEHIND_BYTES: Final = 16 << 20
"""Who is so far behind does not wait for more."""
_LOOK_S: Final = 0.001
_ROOM_S: Final = 1.0
_LAST_TRIES: Final = 2
"""So often a full disk is tried before a store is closed without its lists."""


class Upkeep:
    """What goes on beside the appends: listing what was appended, flushing, checkpoints, expiry.

    **Contract.** Two threads: one lists, one flushes and writes checkpoints. An error of either ends both: ``failure`` says
    why, everything that waits is answered with it, and the store takes nothing more. A checkpoint is written once all that
    it tells of is on the disk; a crash leaves the one before or this one.

    A disk without room ends nothing: an append that it refuses has stored nothing, and the next may be tried; what was
    appended is listed, and the checkpoint written, once there is room again, which is looked for each second. (A *sync*
    that fails for lack of room ends the store as any other does: what it leaves on the disk is not known.)
    """

    def __init__(
        self, parts: StoreParts, log: CommitLog, commits: GroupCommits, reput: Reput, clock: Clock
    ) -> None:
        self.failure = ""  # why nothing more is taken; empty while all is well
        # What could not be written for lack of room, and is tried again; empty while there is room.
        self.lacks_room = ""
        self._refusals = 0
        self.work = threading.Event()  # set when there may be something to list
        self._parts = parts
        self._log = log
        self._commits = commits
        self._reput = reput
        self._clock = clock
        # Tells the physical offset from which expiry is held back; None: it is not.
        self.held_from: Callable[[], int] | None = None
        # Called before files go; while it fails none do.
        self.before_expiry: Callable[[], None] = lambda: None
        # Log files that expiry spares for a while.
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
        """Refuse work after an earlier write failed, or in a forked process."""
        if self.is_forked:
            raise StoreUnavailableError(
                "a store belongs to the process that opened it",
                where=self._parts.hold.root,
                do="open it behind the fork, in one process",
            )
        if self.failure or self._log.is_broken:
            raise StoreUnavailableError(
                f"an earlier write failed: {self.failure or 'it could not be truncated'}",
                where=self._parts.hold.root,
                do="close the store",
            )

    def check_room(self) -> None:
        """Refuse appends while the disk is too full (as the last round of expiry found it)."""
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
        refusals = self._refusals + _LAST_TRIES
        while self._reput.position < end and not self.failure:
            if self._clock.monotonic_s() > deadline_s or (is_last and self._reput.is_cut(end)):
                return False
            if is_last and self.lacks_room and self._refusals >= refusals:
                return False
            self.work.set()
            pause.wait(_LOOK_S)
        return self._reput.position >= end

    def write_checkpoint(self, *, is_last: bool = False) -> None:
        """Bring everything to the disk, then say so.

        What is written for brokers lags behind until ``is_last``: one that starts after a crash throws away the newest
        index file, and then lists again from where the checkpoint says, which must be where that file begins.
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
        path = Path(self._parts.hold.root, CHECKPOINT_FILE)
        try:
            replace_file(path, encode_checkpoint(checkpoint, listed))
        except OSError as error:
            if is_last or not is_for_room(error):
                raise
            _LOG.warning("the checkpoint waits for room on the disk: %s", error)
            return  # the one before still holds, and the next is due soon
        reached("store-checkpoint-written")
        self._checkpointed = listed

    def expire(self, settings: Expiry, *, by_hand: bool) -> Expired:
        """One round of expiry; rounds exclude one another."""
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
            if not bases:
                return Expired()
            try:
                self.before_expiry()
            except (OSError, TieredStoreError) as error:
                if by_hand:
                    raise
                _LOG.warning("no log file expires: %s", error)
                return Expired()
            return delete_files(self._parts, bases)

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
            before = self._reput.position
            try:
                is_taken = self._reput.step()
            except OSError as error:
                self._wait_for_room(error)
                continue
            self._has_room()
            if not is_taken:
                self.work.wait(_REST_S)
            elif self._log.end - self._reput.position < _BEHIND_BYTES:
                # Whoever lists a few messages again and again takes the interpreter away from those who append.
                is_busy = self._reput.position - before > _BUSY_BYTES
                self._stop.wait(_COLLECT_BUSY_S if is_busy else _COLLECT_S)

    def _wait_for_room(self, error: OSError) -> None:
        """After a write that may be tried again; raises any other error."""
        if not is_for_room(error):
            raise error
        self._refusals += 1
        if not self.lacks_room:
            _LOG.warning("what was appended is listed when there is room on the disk: %s", error)
        self.lacks_room = str(error)
        self._stop.wait(_ROOM_S)

    def _has_room(self) -> None:
        if self.lacks_room:
            _LOG.warning("there is room on the disk again")
            self.lacks_room = ""

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
                expired_s = now_s
                self.expire(options.expiry, by_hand=False)
