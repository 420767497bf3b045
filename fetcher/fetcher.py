"""TieredMessageFetcher: reads a tier ahead of its readers.

Overview
    A reader is a group in a queue (a *stream*). What it is given are slices of *runs*: records that came with one
    request, were checked and decoded once, and are shared by all groups. While a reader goes through a queue in order, a
    window of bytes is kept ahead of it, cut into requests that are under way at once, across the borders of parts and
    segments (``fetcher.window``, ``fetcher.cache``). A read that finds nothing here asks for it urgently, and waits.

Ordering
    ``read`` gives what follows its ``start``, whatever was read before; it is the caller's business to go on at the end
    of the batch. Two reads of one stream at once are allowed, and make its window useless.

Retries
    What fails is not asked for again by itself: the store below retries, and a slow request is hedged
    (``fetcher.transfers``). What was read ahead in vain is forgotten, and asked for again when it is wanted. An
    object that is gone makes the journal be replayed (``tiered.log.cursor``).

Histories
    Who reads with a cursor stays on its history of the queue, whatever is refreshed meanwhile. Each read without one is of
    the history that is the present one when it begins.

Limits
    Everything cached, on its way or reserved stays within ``cache_bytes``; a read waits for room, read-ahead does
    without. Each read has a deadline. Batches that a caller holds are the caller's.

    Reads that wait for room wait in a row (``fetcher.cache``). A wait ends with the run, with the deadline, or with the
    error of what was waited for; what had been read ahead and failed is asked for once more.

After a crash nothing is left: it holds no state of its own.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from backends.errors import BackendError, ObjectNotFoundError
from backends.lazy_dataclass import dataclass
from fetcher.cache import Fetch, Stock, WaitingRead
from fetcher.limits import FREE_SHARE, FetchSettings
from fetcher.runs import Memory, MultiSectionRun, Run
from fetcher.transfers import AskingStore, Transfers, result_by, too_late
from fetcher.window import Member, Neighbours, Readers
from tiered.errors import ClosedError, DataError, StoreUnavailableError
from tiered.log.parts import Gap
from tiered.log.reader import QueueReader
from tiered.model import QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Executor

    from fetcher.window import Name, Stream
    from tiered.clock import Clock
    from tiered.log.cursor import HistoryPlace, IncarnationView, QueueCursor
    from tiered.log.decode import TierBatch
    from tiered.log.reader import TierReader
    from tiered.model import MessageQueue


# -- fetcher


IDLE_LOOK_SECONDS = 1.0
"""How often it is looked which readers have not read for a minute."""
FREE_BYTES_MAX = 32 << 20
"""Memory that is kept, above the budget, for what will be read next; less with a small cache, none when nobody reads."""


@dataclass(frozen=True, slots=True)
class FetchStats:
    """Counters since the fetcher was made."""

    delivered_bytes: int  # of records handed out
    delivered_items: int  # likewise, holes included
    hits: int  # reads that were served at once
    waits: int  # reads that had to wait
    unread_bytes: int  # read ahead, and dropped before anybody had it
    cached_bytes: int  # held now
    reserved_bytes: int  # on its way now
    bytes_max: int  # what may be held and on its way: the budget without what is lent
    streams: int  # readers now


class TieredMessageFetcher:
    """See the module's contract. For any thread."""

    def __init__(
        self,
        reader: TierReader,
        executor: Executor,
        clock: Clock,
        settings: FetchSettings | None = None,
    ) -> None:
        """Read nothing yet; reads without a cursor see what any user of ``reader`` has had it refresh.

        ``executor`` makes requests, with as many threads as may be under way at once.
        """
        self.settings = settings or FetchSettings()
        self.tier = reader
        whole_bytes = self.settings.cache_bytes + self.settings.transfers.bytes_in_flight_max
        self._memory = Memory(
            2 * whole_bytes, min(self.settings.cache_bytes // FREE_SHARE, FREE_BYTES_MAX)
        )
        self.transfers = Transfers(
            reader.store,
            executor,
            clock,
            self.settings.transfers,
            memory=self._memory,
        )
        self._stock = Stock(
            reader,
            self.transfers,
            self._memory,
            clock,
            settings=self.settings,
            go_on=lambda stream: self._ahead(stream, clock.monotonic_s()),
        )
        self._prefix = reader.prefix
        self._clock = clock
        self._readers = Readers(self.settings.window)
        self._gone: deque[str] = deque()
        self._delivered_bytes = self._delivered_items = 0
        self._idle_at_s = 0.0

    # Reading

    def read(
        self,
        group: str,
        queue: MessageQueue,
        start: QueueOffset,
        *,
        bytes_max: int = 1 << 20,
        count_max: int = 1 << 20,
        timeout_s: float | None = None,
        cursor: QueueCursor | None = None,
        until: QueueOffset | None = None,
        refresh: Callable[[], object] | None = None,
    ) -> TierBatch | Gap | None:
        """The next records of a queue from ``start`` (or its minimum) on; or the gap that it lies in, or None at the end.

        One record at least, else within ``bytes_max`` and ``count_max`` (> 0); a batch ends where a request ended, so it
        may be smaller. ``group`` has a window of its own; what is cached is everybody's. ``cursor``: the history to read;
        default: the present one.

        ``until``: the reader will read everything before this queue offset and nothing behind: the one is read ahead at
        once, as far as memory allows, and the other not at all. Default: nobody knows, so that read-ahead begins small and
        grows with what is read. ``refresh`` has the journal replayed when an object is gone, and keeps to the deadline; by
        default it is replayed whatever time that takes.

        ExpiredError: they have expired since the journal (or the cursor) was looked at. DataError: the bytes are damaged;
        nothing of them is returned. StoreUnavailableError: they did not come in time, and the same read may be tried again.
        """
        name = (group, queue, None if cursor is None else cursor.history)
        now_s = self._clock.monotonic_s()
        sure = -1 if until is None else int(until)
        place = None if cursor is None else cursor.at(start)
        given = self._go_on(name, place, start, bytes_max, count_max, now_s, sure)
        if given is not None:
            return given[1]
        deadline_s = now_s + (self.settings.read_timeout_s if timeout_s is None else timeout_s)

        def work(place: HistoryPlace) -> TierBatch | Gap | None:
            return self._read(name, place, start, bytes_max, count_max, deadline_s, sure)

        cursor = self.tier.cursor(queue) if cursor is None else cursor
        return cursor.again(start, work, refresh=refresh)

    def at_hand(
        self, group: str, queue: MessageQueue, start: QueueOffset, *, bytes_max: int, count_max: int
    ) -> tuple[Run, TierBatch] | None:
        """As ``read``, where the reader goes on in what is here; None: ask ``read``. It never waits, and asks nothing.

        With the run that the batch is of, for who would cut it by himself; held weakly, it lives as long as it is cached.
        """
        name = (group, queue, None)
        return self._go_on(name, None, start, bytes_max, count_max, self._clock.monotonic_s(), -1)

    def is_here(self, cursor: QueueCursor, start: QueueOffset) -> bool:
        """Whether a read there need not wait, as far as can be told: what it wants is here, or it has nothing to read."""
        place = cursor.at(start)
        if start >= place.end:
            return True
        try:
            found = place.view.locate(
                max(start, place.view.incarnation.min_offset), where=self._prefix
            )
        except DataError:
            return True
        if found is None or isinstance(found, Gap):
            return True
        with self._stock.lock:
            return self._stock.find(found, start) is not None

    def _go_on(  # noqa: PLR0917 (one caller, in this order)
        self,
        name: Name,
        place: HistoryPlace | None,
        start: QueueOffset,
        bytes_max: int,
        count_max: int,
        now_s: float,
        until: int,
    ) -> tuple[Run, TierBatch] | None:
        """What nearly all reads are: of what the reader was served from last, or of what is here behind that."""
        state = self.tier.state
        with self._stock.lock:
            stream = self._readers.find(name)
            if stream is None or not stream.goes_on_at(start):
                return None
            if place is None and not stream.is_of(state):
                return None
            if place is not None and (stream.view is not place.view or start >= place.end):
                return None
            run = stream.at_hand(start) or self._turn_over(name, stream, start)
            if run is None:
                return None
            self._stock.hits += 1
            if stream.until != until:
                stream.say(until)
            if place is not None:
                count_max = min(count_max, place.end - start)
            batch = run.cut(start, bytes_max=bytes_max, count_max=count_max)
            fetches = self._note(stream, batch, now_s)
        if fetches:
            self._stock.begin(fetches)
        return run, batch

    def _turn_over(self, name: Name, stream: Stream, start: QueueOffset) -> Run | None:
        """The run that a reader comes to next, in the same view, if it is here; with the lock held."""
        view = stream.view
        part = None if view is None else view.part_at(start)
        entry = None if part is None else self._stock.find(part, start)
        if part is None or entry is None:
            return None
        self._leave(name, stream)
        return self._stock.serve(stream, part, entry)

    def _read(  # noqa: PLR0917 (one caller, in this order)
        self,
        name: Name,
        place: HistoryPlace,
        start: QueueOffset,
        bytes_max: int,
        count_max: int,
        deadline_s: float,
        until: int,
    ) -> TierBatch | Gap | None:
        self._forget_gone()
        view = place.view
        start = QueueOffset(max(start, view.incarnation.min_offset))
        if start >= place.end:
            self._drop([name])
            return None
        count_max = min(count_max, place.end - start)
        with self._stock.lock:
            stream = self._stream(name, view)
            stream.say(until)
            leaps = stream.arrive(start)
            run = stream.at_hand(start)
            if run is None and not leaps:
                run = self._turn_over(name, stream, start)
            self._stock.hits += run is not None
            if run is None:
                self._leave(name, stream)
        if leaps:
            self._stock.forsake(stream)
        if run is None:
            found = view.locate(start, where=self._prefix)
            if found is None:
                self._drop([name])
                return None
            if isinstance(found, Gap):
                with self._stock.lock:
                    stream.pass_over(start, found.end)
                return found
            wanted = min(bytes_max, count_max * (found.log_bytes // found.count + 1))
            try:
                run = self._fetch_warily(
                    WaitingRead(stream, view, found, start, wanted, deadline_s)
                )
            except DataError:
                # Past the cache and its budget, piece by piece: what is damaged costs only itself.
                asking = AskingStore(
                    self.transfers, self.tier.store, stream, self._clock, deadline_s
                )
                reader = QueueReader.of_incarnation(
                    asking, self._prefix, view.queue, view.incarnation
                )
                sound = reader.read_warily(start, bytes_max=bytes_max, count_max=count_max)
                batch = cast("TierBatch", sound)
                self._deliver(stream, batch)
                return batch
        batch = run.cut(start, bytes_max=bytes_max, count_max=count_max)
        self._deliver(stream, batch)
        return batch

    def _fetch_warily(self, read: WaitingRead) -> Run:
        """The run that holds where a read begins; where something of the part is damaged, with no more than its block."""
        stream = read.stream
        if read.start not in stream.wary:
            share = self._share()
            least = min(read.window, self.settings.chunk_bytes, share)
            try:
                return self._wait_for(replace(read, window=max(stream.aim(share), least)))
            except DataError:
                with self._stock.lock:
                    stream.wary = range(read.part.queue_offset, read.part.queue_end)
        return self._wait_for(replace(read, window=1))

    def _wait_for(self, read: WaitingRead) -> Run:
        """The run that holds where a read begins: from memory, from what is on its way, or asked for."""
        try:
            while (run := self._try(read)) is None:
                pass
            return run
        finally:
            with self._stock.lock:
                self._stock.step_out(read)

    def _try(self, read: WaitingRead) -> Run | None:
        """Take what is here; else wait for what has to come, for room, or for what brings us nearer (None)."""
        stock, fetches = self._stock, list[Fetch]()
        with stock.lock:
            if stock.is_closed:
                raise ClosedError("the fetcher has been closed")
            entry = stock.find(read.part, read.start)
            if entry is not None:
                stock.waits += read.has_waited
                stock.hits += not read.has_waited
                return stock.serve(read.stream, read.part, entry)
            read.has_waited = True
            fetch = stock.on_its_way(read.part, read.start)
            is_ahead = fetch is not None and not fetch.is_urgent
            if fetch is None:
                fetches = stock.prepare_urgently(read)
                if not fetches:
                    left_s = read.deadline_s - self._clock.monotonic_s()
                    if left_s <= 0 or not stock.room.wait(left_s):
                        raise too_late(self._prefix)
                    return None
                fetch = fetches[0]
            stock.step_out(read)
        stock.begin(fetches)
        stock.hurry(fetch)
        try:
            thing = result_by(read.deadline_s, self._clock, fetch.future, self._prefix)
        except CancelledError:
            return None  # somebody forsook it: it is asked for again
        except (BackendError, StoreUnavailableError) as error:
            if isinstance(error, ObjectNotFoundError) or not (is_ahead and read.may_fail):
                raise
            read.may_fail = False  # it was read ahead: who wants it asks for it again, once
            return None
        finally:
            # Their error's frames would hold them, and all that our callers have.
            del fetch, fetches
        if not isinstance(thing, Run) or not thing.base <= read.start < thing.end:
            return None
        with stock.lock:
            stock.waits += 1
            return read.stream.serve(thing, stock.find(read.part, read.start))

    def _deliver(self, stream: Stream, batch: TierBatch) -> None:
        now_s = self._clock.monotonic_s()
        with self._stock.lock:
            fetches = self._note(stream, batch, now_s)
        self._stock.begin(fetches)

    def _note(self, stream: Stream, batch: TierBatch, now_s: float) -> Sequence[Fetch]:
        """A batch is handed out; what to read ahead now. With the lock held."""
        size_bytes = stream.deliver(batch, now_s)
        if (entry := stream.entry) is not None:
            self._stock.use(entry, now_s)
        self._delivered_bytes += size_bytes
        self._delivered_items += batch.records.count
        return self._ahead(stream, now_s)

    # Reading ahead

    def _stream(self, name: Name, view: IncarnationView) -> Stream:
        stream = self._readers.make(name, self._clock.monotonic_s())
        stream.look(view)
        return stream

    def _share(self) -> int:
        return self.settings.cache_bytes // (2 * max(len(self._readers), 1))

    def _ahead(self, stream: Stream, now_s: float) -> Sequence[Fetch]:
        """What to read ahead for a stream now; with the lock held."""
        view = stream.view
        if stream.here <= stream.calm_to:
            return ()
        if view is None or stream.asked >= view.incarnation.log_end or self._stock.is_closed:
            return ()
        window = stream.ahead_now(self._share())
        position = QueueOffset(stream.position)
        if not window or position in stream.wary or stream.paused_s > now_s:
            return ()
        return self._stock.prepare(stream, view, position, window)

    def _leave(self, name: Name, stream: Stream) -> None:
        """A reader goes on to other records than it was served from last; with the lock held."""
        left = stream.leave()
        if left is None or not self._readers.is_spent(name, left[1].end):
            return
        entry, run = left
        if not isinstance(entry.value, MultiSectionRun) or entry.value.spend(run):
            self._stock.cache.retire(entry)

    def expect(
        self, group: str, wanted: Iterable[tuple[QueueCursor, QueueOffset, QueueOffset]]
    ) -> None:
        """A reader says what it will read: what lies side by side then comes with one request (``fetcher.window``).

        It changes nothing of what is read. Until the reader is forgotten, or says something else. The first of them are
        asked for at once, so that who reads them in turn need not wait for each by itself.
        """
        places = [(cursor, cursor.at(start), start, until) for cursor, start, until in wanted]
        with self._stock.lock:
            names, members = [], []
            for cursor, place, start, until in places:
                names.append((group, cursor.queue, cursor.history))
                stream = self._readers.announce(names[-1])
                stream.look(place.view)
                stream.say(until)
                first = QueueOffset(max(start, place.view.incarnation.min_offset))
                end = QueueOffset(min(until, place.end))
                stream.begin_at(first)
                members.append(Member(stream, place.view, first, end))
            neighbours = Neighbours(members, self.settings)
            for member in members:
                member.stream.neighbours = neighbours
            fetches = self._start(names, members)
        self._stock.begin(fetches)

    def _start(self, names: Sequence[Name], members: Sequence[Member]) -> Sequence[Fetch]:
        """Ask for where the first of them begin, or who reads in turn waits for each by itself; with the lock held."""
        fetches: list[Fetch] = []
        most = self.settings.transfers.requests_in_flight_max
        share = self.settings.cache_bytes // (2 * (len(self._readers) + min(len(members), most)))
        for name, (stream, view, first, end) in zip(names, members, strict=True):
            part = view.part_at(first) if first < end and stream.next_offset < 0 else None
            if part is None or self._stock.has(part, first):
                continue  # it comes along with its neighbours, or another group has had it
            prepared = self._stock.prepare(stream, view, first, stream.aim(share))
            if not prepared:
                break
            self._readers.start(name)
            fetches += prepared
            most -= 1
            if not most:
                break
        return fetches

    def forget(self, group: str, queue: MessageQueue | None = None) -> None:
        """A reader has done: what was read ahead for it makes room, and the others may read further ahead.

        Readers that have come to the end of their queue, or have not read for a minute, are forgotten by themselves.
        """
        with self._stock.lock:
            names = self._readers.of_group(group)
        self._drop([name for name in names if queue is None or name[1] == queue])

    def forget_soon(self, group: str) -> None:
        """As ``forget``, within a second or with the next read that has to look; no lock is taken, and nothing waited for.

        For finalizers: the collector may run them in a thread that holds one of our locks.
        """
        self._gone.append(group)

    def _forget_gone(self) -> None:
        while self._gone:
            with suppress(IndexError):  # another thread was faster
                self.forget(self._gone.popleft())

    def _drop(self, names: list[Name]) -> None:
        dropped = []
        with self._stock.lock:
            for name in names:
                stream = self._readers.forget(name)
                if stream is not None:
                    self._leave(name, stream)
                    dropped.append(stream)
        for stream in dropped:
            self._stock.forsake(stream, has_done=True)

    # Upkeep

    def refresh(self) -> bool:
        """See what was committed since; whether there was anything."""
        return self.tier.refresh()

    def lend(self, size_bytes: int) -> None:
        """So much of the memory is used by somebody else from now on: the cache has the rest, and half of all at least."""
        cache_bytes = self.settings.cache_bytes
        self._stock.resize(cache_bytes - min(size_bytes, cache_bytes // 2))

    def listen(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called when ``tick`` ought to be called sooner than it said."""
        self.transfers.wake = wake

    def tick(self) -> float | None:
        """Do what is due: expiry, hedges, deadlines, traffic limits. Called by a ``Ticker``; never blocks.

        In how many seconds it wants to be called again; None: not before the next read.
        """
        self._forget_gone()
        now_s = self._clock.monotonic_s()
        with self._stock.lock:
            self._stock.expire(now_s)
            if now_s >= self._idle_at_s:  # it looks at every reader
                self._idle_at_s = now_s + IDLE_LOOK_SECONDS
                for name in self._readers.idle(now_s):
                    self._readers.forget(name)
            is_idle = not len(self._readers) and not self._stock.cache.held_bytes
        if is_idle:
            self._memory.clear()
        due_s = self.transfers.tick()
        return due_s if is_idle else min(1.0 if due_s is None else due_s, 1.0)

    def stats(self) -> FetchStats:
        """A snapshot."""
        self._forget_gone()
        with self._stock.lock:
            return FetchStats(
                delivered_bytes=self._delivered_bytes,
                delivered_items=self._delivered_items,
                hits=self._stock.hits,
                waits=self._stock.waits,
                unread_bytes=self._stock.unread_bytes,
                cached_bytes=self._stock.cache.held_bytes,
                reserved_bytes=self._stock.cache.reserved_bytes,
                bytes_max=self._stock.cache.bytes_max,
                streams=len(self._readers),
            )

    def close(self) -> None:
        """Refuse new reads, and forget everything. Batches that were handed out stay valid."""
        with self._stock.lock:
            self._stock.is_closed = True
            self._stock.room.notify_all()
        # Between the two: what ends while the transfers close takes the lock, and puts nothing any more.
        self.transfers.close()
        with self._stock.lock:
            self._stock.cache.clear()
            self._readers.clear()
        self._memory.clear()
