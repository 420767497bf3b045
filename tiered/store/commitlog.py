"""The commit log of a store that is being written: one writer gives places, and writes.

**Contract.** ``append`` takes one lock: log order is the order in which calls got it. Places count only once the bytes
are in their files; a write that fails is truncated (the bytes are zeroed again) and changes nothing, unless even that
fails: then ``is_broken``, and nothing more is taken. Store times never go back. What was appended survives the end of
the process; ``sync`` brings it to the disk. After a sync that failed all later ones fail, and nothing more is taken: the
system may have dropped what it could not write, and the next sync would not tell. ``seal`` ends the appends.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from concurrent.futures import Future
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from backends.local_files import advice_for
from tiered.crashpoints import reached
from tiered.errors import ClosedError, DataError, InvalidError, StoreUnavailableError
from tiered.format.record import BLANK_BYTES_MIN, MAGIC_BLANK, SIZE_AND_MAGIC
from tiered.local.layout import LOG_DIRECTORY
from tiered.local.mapped_file_queue import NAME_DIGITS
from tiered.store.encoding import RecordPlaces, join
from tiered.store.listing import StoredHandover

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tiered.clock import Clock
    from tiered.store.disk import RowWriter
    from tiered.store.encoding import Prepared, QueueKey
    from tiered.store.restored import ReadyRecords


_Data = TypeVar("_Data")
_CHUNK_BYTES_MIN: Final = 1024
"""From here on the mean chunk of an append is written from where it lies: of bodies, from about 4 KiB."""


class CommitLog:
    """The log's end: gives records their places, and writes them, one call after another. For any thread."""

    def __init__(
        self,
        root: str,
        file_bytes: int,
        *,
        end: int,
        store_ms: int,
        queue_ends: Mapping[QueueKey, int],
        rows: RowWriter,
        clock: Clock,
    ) -> None:
        """Go on at ``end``; DataError: no record nor blank fits behind it, so the last writer had other sizes."""
        if 0 < (rest := -end % file_bytes) < BLANK_BYTES_MIN:
            raise DataError(
                f"the log ends {rest} bytes before the end of a file of {file_bytes}, where no record can end",
                where=f"{root}/{LOG_DIRECTORY}",
                do="give the files the length that the store was made with",
            )
        # Physical offsets: behind the last record; and what is below it is on the disk.
        self.end = self.synced = end
        self.store_ms = store_ms  # store time of the last record
        self.handover = StoredHandover()  # what was appended, for the thread that lists it
        # Bytes may stand behind ``end`` that were refused and could not be truncated.
        self.is_broken = False
        self._folder = f"{root}/{LOG_DIRECTORY}"
        self._file_bytes = file_bytes
        self._queue_ends = dict(queue_ends)
        self._rows = rows
        self._clock = clock
        self._lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._is_sealed = self._has_lost = False

    def seal(self) -> None:
        """Take nothing more: appends from now on raise ``ClosedError``."""
        with self._lock:
            self._is_sealed = True

    def queue_end(self, queue: QueueKey) -> int:
        """Queue offset of the next message of a queue."""
        return self._queue_ends.get(queue, 0)

    def begin_queue(self, queue: QueueKey, offset: int) -> bool:
        """Let a queue without messages begin at ``offset``; False when it has messages."""
        with self._lock:
            if queue in self._queue_ends:
                return False
            self._queue_ends[queue] = offset
            return True

    def append(self, messages: Prepared, store_host: bytes) -> RecordPlaces:
        """Put messages one behind another, none of others between them. After an error nothing was stored."""
        with self._lock:
            self._check_sound()
            now_ms = max(int(self._clock.now_ms()), self.store_ms)
            begin = self.end
            plan = _AppendPlan(messages, begin, self._file_bytes, self._queue_ends)
            heads = messages.heads(plan.queue_offsets, plan.positions, now_ms, store_host)
            self._write(plan.chunks(messages, heads), 4 * len(messages), plan.end)
            # First, then the hand-over: what isn't handed over is read from the log, as far as this end.
            places = self._count(plan.places(now_ms), plan.moved)
            if plan.end > begin:
                self.handover.give(begin, messages, places)
            return places

    def append_ready(self, records: ReadyRecords, store_host: bytes) -> RecordPlaces:
        """Put records that lack nothing but their places, as ``append``. Who lists them reads the log."""
        with self._lock:
            self._check_sound()
            now_ms = max(int(self._clock.now_ms()), self.store_ms)
            plan = _AppendPlan(records, self.end, self._file_bytes, self._queue_ends)
            records.put_places(plan.queue_offsets, plan.positions, now_ms, store_host)
            chunks = plan.ready_chunks(records)
            self._write(chunks, len(chunks), plan.end)
            return self._count(plan.places(now_ms), plan.moved)

    def append_made(
        self, queue: QueueKey, takes: int, make: Callable[[int, int, int], bytes]
    ) -> RecordPlaces:
        """Put one record that is made for its place. After an error nothing was stored.

        It ``takes`` so many queue offsets (an inner batch one for each message); ``make`` gives it for a queue offset, a
        physical offset and a store time, and its length depends on the first only.
        """
        with self._lock:
            self._check_sound()
            now_ms = max(int(self._clock.now_ms()), self.store_ms)
            offset, position = self._queue_ends.get(queue, 0), self.end
            chunks = [make(offset, position, now_ms)]
            room = self._file_bytes - position % self._file_bytes - BLANK_BYTES_MIN
            if len(chunks[0]) > room:
                rest = room + BLANK_BYTES_MIN
                position += rest
                chunks = [_blank(rest), make(offset, position, now_ms)]
            end = position + len(chunks[-1])
            self._write(chunks, len(chunks), end)
            places = RecordPlaces((offset,), (position,), end, now_ms)
            return self._count(places, {queue: offset + takes})

    def _count(self, places: RecordPlaces, moved: Mapping[QueueKey, int]) -> RecordPlaces:
        self._queue_ends.update(moved)
        self.end, self.store_ms = places.end, places.store_ms
        return places

    def sync(self) -> int:
        """Bring to the disk what was appended before this call; what is below ``synced`` then.

        After an OSError it may not be there, nor will a later call bring it there.
        """
        with self._sync_lock:
            if self._has_lost:
                raise OSError(errno.EIO, "an earlier sync failed")
            end = self.end
            if end > self.synced:
                self._has_lost = True  # unless it ends well
                self._rows.sync()
                self._has_lost = False
                self.synced = end
            return self.synced

    def _check_sound(self) -> None:
        """Under the lock, where nobody can have failed since."""
        if self._is_sealed:
            raise ClosedError("the store has been closed", where=self._folder)
        if self.is_broken:
            raise OSError(errno.EIO, "an earlier write could not be truncated")

    def _write(self, chunks: Iterable[bytes | bytearray], count: int, end: int) -> None:
        # Small chunks are joined, which costs less than having the system take each; large ones are not copied.
        if end - self.end < _CHUNK_BYTES_MIN * count:
            self._write_at(self._rows.write, b"".join(chunks), end)
        else:
            self._write_at(self._rows.write_chunks, list(chunks), end)

    def _write_at(
        self, write: Callable[[str, int, int, _Data], None], data: _Data, end: int
    ) -> None:
        try:
            write(self._folder, self._file_bytes, self.end, data)
        except BaseException:
            self._truncate(end)
            raise
        reached("store-appended")

    def _truncate(self, end: int) -> None:
        self.is_broken = True
        at = self.end
        while at < end:
            base = at - at % self._file_bytes
            path = f"{self._folder}/{base:0{NAME_DIGITS}d}"
            if Path(path).exists():
                os.truncate(path, at - base)
                os.truncate(path, self._file_bytes)
                self._rows.mark(path)
            at = base + self._file_bytes
        self.is_broken = False


class _AppendPlan:
    """Gives places, in memory."""

    def __init__(
        self,
        messages: Prepared | ReadyRecords,
        position: int,
        file_bytes: int,
        ends: Mapping[QueueKey, int],
    ) -> None:
        # Where a file is filled up: the number of the record before which that is, and what is left of the file.
        self.blanks: list[tuple[int, int]] = []
        # Of each record; and physical offset behind the last one.
        self.positions, self.end = self._positions(messages.sizes, position, file_bytes)
        self.moved, self.queue_offsets = messages.queue_offsets(ends)  # where queues go on; of each

    def places(self, store_ms: int) -> RecordPlaces:
        return RecordPlaces(self.queue_offsets, self.positions, self.end, store_ms)

    def _positions(
        self, sizes: Sequence[int], position: int, file_bytes: int
    ) -> tuple[list[int], int]:
        found = list(accumulate(sizes, initial=position))
        end = found.pop()
        if end - position + BLANK_BYTES_MIN <= file_bytes - position % file_bytes:
            return found, end
        found.clear()
        for number, size in enumerate(sizes):
            rest = file_bytes - position % file_bytes
            if size + BLANK_BYTES_MIN > rest:
                self.blanks.append((number, rest))
                position += rest
            found.append(position)
            position += size
        return found, position

    def chunks(self, messages: Prepared, heads: Sequence[bytes]) -> Iterable[bytes]:
        """The bytes from the log's end on; none goes over the end of a file."""
        columns = (heads, messages.fields.bodies, messages.leads, messages.properties)
        found = chain.from_iterable(zip(*columns, strict=True))
        if not self.blanks:
            return found
        chunks = list(found)
        for number, rest in reversed(self.blanks):
            chunks.insert(4 * number, _blank(rest))
        return chunks

    def ready_chunks(self, records: ReadyRecords) -> list[bytes | bytearray]:
        chunks: list[bytes | bytearray] = []
        first = done = 0
        for number, rest in self.blanks:
            end = done + sum(records.sizes[first:number])
            chunks += [records.data[done:end], _blank(rest)]
            first, done = number, end
        return [one for one in (*chunks, records.data[done:] if done else records.data) if one]


def _blank(size: int) -> bytes:
    return SIZE_AND_MAGIC.pack(size, MAGIC_BLANK) + bytes(size - BLANK_BYTES_MIN)


# -- when an append is answered --------------------------------------------------------------------

_GATHER_S_MAX: Final = 0.01


class Waiter:
    """The messages of one append, and who waits for them; completed as a future is, at a fraction of its price."""

    __slots__ = ("_error", "_lock", "is_gone", "messages", "places")

    def __init__(self, messages: Prepared) -> None:
        self.messages = messages  # what is to be stored
        self.places: RecordPlaces | None = None  # where it was put, once it was
        self.is_gone = False  # nobody waits for it any more
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._lock.acquire()

    def set_result(self, _: None) -> None:
        """It is stored as the policy says."""
        self._lock.release()

    def set_exception(self, error: BaseException) -> None:
        """It is not, or may not be."""
        self._error = error
        self._lock.release()

    def wait(self, timeout_s: float) -> RecordPlaces:
        """Where the messages were put, once they are stored as the policy says; after a TimeoutError they may still be."""
        if not self._lock.acquire(timeout=timeout_s):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        assert self.places is not None
        return self.places


Request = tuple[int, "Future[None] | Waiter"]
_WOKEN_AT_ONCE: Final = 2
"""One has the interpreter, the next is on its way out of the system's call."""


class GroupCommits:
    """Answers appends: flush and replica acknowledgement complete one future; appends that wait are written together.

    **Contract.** Callers hand in their messages (``append``), or a place in the log up to which they have written themselves
    (``submit``). The flush thread swaps the list of them for an empty one, writes all messages as one append in the order in
    which they came, syncs the log once for all, and releases together those that lie below both the synced end and (where
    asked for) the replica's. So a message costs one wake-up, and no thread waits for another's write. The flush thread
    wakes two of them, and each that wakes wakes the next: thirty that wake at once would all ask for the interpreter, and
    sleep and wake once more until it is theirs. Before it begins it waits for as many callers as there were at the last
    sync (those it answered, and those that came meanwhile), at most as long as that sync took, so that all are answered
    together.

    A write that the disk refuses fails the messages of its group, of which nothing is stored; the next may be tried. A sync
    that fails fails all that waits, and the store takes nothing more: what a failed sync leaves on the disk is not known.
    """

    def __init__(
        self,
        write: Callable[[Prepared], RecordPlaces],
        sync: Callable[[], int],
        clock: Clock,
        *,
        needs_sync: bool,
        needs_replica: bool,
    ) -> None:
        self.replica_end = 0  # below it a replica has everything
        self.groups = 0  # how many syncs answered requests
        self._write = write
        self._sync = sync
        self._clock = clock
        self._needs_sync = needs_sync
        self._needs_replica = needs_replica
        self._lock = threading.Lock()
        self._unwritten: list[Waiter] = []
        self._incoming: list[Request] = []
        self._held: list[Request] = []
        self._answered: deque[Waiter] = deque()
        self._failure: BaseException | None = None
        self._synced = 0
        self._callers = 1
        self._last_sync_s = 0.0
        self._is_full = threading.Event()
        self.wake = threading.Event()

    def append(self, messages: Prepared, timeout_s: float) -> RecordPlaces:
        """Have messages (at least one) written and synced with those of others. Errors as of ``Waiter.wait``."""
        waiter = Waiter(messages)
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._unwritten.append(waiter)
            count = len(self._unwritten) + len(self._incoming)
        try:
            self._call(count)
            return waiter.wait(timeout_s)
        finally:  # also who gave up or was interrupted: he may have been woken to wake the others
            waiter.is_gone = True
            self._wake_next()

    def submit(self, end: int) -> Future[None]:
        """Ask to be told when everything below ``end`` is stored as the policy says."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # nobody can cancel what is in the log
        with self._lock:
            if self._failure is not None:
                future.set_exception(self._failure)
                return future
            self._incoming.append((end, future))
            count = len(self._unwritten) + len(self._incoming)
        if self._needs_sync:
            self._call(count)
        else:
            self._release()
        return future

    def run_once(self) -> None:
        """Answer what is waiting, if a sync is what it waits for; its error is theirs as well. From one thread."""
        if not self._needs_sync:
            return
        self._gather()
        with self._lock:
            waiters, self._unwritten = self._unwritten, []
            requests, self._incoming = self._incoming, []
            self._held += requests  # at once: whatever ends this thread, ``fail`` finds them
        if waiters:
            written = self._write_group(waiters)
            with self._lock:
                self._held += written
            requests += written
        if not requests:
            return
        begin_s = self._clock.monotonic_s()
        try:
            synced = self._sync()
        except BaseException as error:
            self.fail(error)
            raise
        reached("store-synced")
        self._last_sync_s = self._clock.monotonic_s() - begin_s
        self._callers = len(requests) + len(self._incoming) + len(self._unwritten)
        self.groups += 1
        self._release(synced)

    def acknowledge_replica(self, end: int) -> None:
        """A replica has everything below ``end``. From any thread; never goes back."""
        with self._lock:
            self.replica_end = max(self.replica_end, end)
        self._release()

    def fail(self, error: BaseException) -> None:
        """Answer everything that waits, and whatever comes, with an error."""
        with self._lock:
            self._failure = self._failure or error
            waiters, self._unwritten = self._unwritten, []
            requests, self._incoming, self._held = self._incoming + self._held, [], []
        for waiter in [*waiters, *(waiter for _, waiter in requests)]:
            waiter.set_exception(error)

    def _wake_next(self) -> None:
        """Wake one who is answered, and who will wake the next; whoever is gone would not."""
        while self._answered:
            try:
                waiter = self._answered.popleft()
            except IndexError:  # another thread was faster
                return
            waiter.set_result(None)
            if not waiter.is_gone:  # who goes only now has yet to call this
                return

    def _call(self, count: int) -> None:
        if count >= self._callers and not self._is_full.is_set():
            self._is_full.set()
        if count == 1:
            self.wake.set()

    def _gather(self) -> None:
        """Wait until as many wait as did the last time."""
        self._is_full.clear()
        count = len(self._unwritten) + len(self._incoming)
        left_s = min(_GATHER_S_MAX, self._last_sync_s)
        if 0 < count < self._callers and left_s > 0:
            self._clock.wait(self._is_full, left_s)

    def _write_group(self, waiters: list[Waiter]) -> list[Request]:
        """Write all messages as one append; the requests of those for whom that went well."""
        try:
            places = self._write(join([waiter.messages for waiter in waiters]))
        except InvalidError as error:
            if len(waiters) > 1:  # what is wrong with one is none of the others' business
                return [request for waiter in waiters for request in self._write_group([waiter])]
            waiters[0].set_exception(error)
            return []
        except (OSError, ClosedError) as error:
            for waiter in waiters:
                waiter.set_exception(error)
            return []
        except BaseException as error:  # ends the thread; nobody else knows of these waiters
            for waiter in waiters:
                waiter.set_exception(error)
            raise
        found: list[Request] = []
        first = 0
        for waiter in waiters:
            last = first + len(waiter.messages)
            end = places.positions[last - 1] + waiter.messages.sizes[-1]
            waiter.places = places.part(first, last, end)
            found.append((end, waiter))
            first = last
        return found

    def _release(self, synced: int | None = None) -> None:
        with self._lock:
            if synced is not None:
                self._synced = max(self._synced, synced)
            if not self._needs_sync:
                self._held += self._incoming
                self._incoming = []
            limit = min(
                self._synced if self._needs_sync else 1 << 62,
                self.replica_end if self._needs_replica else 1 << 62,
            )
            done = [waiter for end, waiter in self._held if end <= limit]
            self._held = [request for request in self._held if request[0] > limit]
        for waiter in done:
            if isinstance(waiter, Waiter):
                self._answered.append(waiter)
            else:
                waiter.set_result(None)
        for _ in range(_WOKEN_AT_ONCE):
            self._wake_next()


def not_stored(root: str, timeout_s: float, error: OSError) -> StoreUnavailableError:
    """What to tell who waited ``timeout_s`` at most, and met an error."""
    if isinstance(error, TimeoutError):
        return StoreUnavailableError(
            f"not on the disk or with the replica after {timeout_s} s",
            where=root,
            do="it may still be stored: look before sending it again",
        )
    return StoreUnavailableError(
        f"the flush failed: {error.strerror or error}",
        where=root,
        do=advice_for(error, "look at the disk"),
    )
