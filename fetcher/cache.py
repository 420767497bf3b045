"""What is here of a tier, and what is on its way.

Stock
    A thing (a run of records, or the layout of a part) is *prepared* before it is asked for: room is reserved, and any
    reader that wants it from then on waits for the same fetch. When its bytes are there they are checked and decoded in
    the thread that brought them, put into the cache, and only then is the fetch over. A fetch that fails gives its room
    back and is forgotten. Its ``lock`` guards everything here, the streams included. Fetches are begun without it, since
    their answers may come at once.

Fetches
    A ``FetchRequest`` says what to fetch (``fetcher.window``); a ``Fetch`` is one that is under way: the ranges that bring
    its bytes, and a future of what is made of them. What fails its check is read again by itself, as
    ``tiered.log.sections.read_ranges`` reads it: that knows how to do without a damaged block table. Where a packed
    section keeps its blocks only its block table says: such a fetch takes two steps when the table is not here. Asking for
    a part's index first brings the table along.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import CancelledError, Future
from dataclasses import field
from itertools import count
from typing import TYPE_CHECKING, Final, cast

from backends.errors import BackendError, InvalidRangeError, ShortReadError
from backends.lazy_dataclass import dataclass
from fetcher.requests import DECODERS, Arrivals
from fetcher.runs import (
    INDEX,
    ByteCache,
    Cached,
    Key,
    LruList,
    MultiSectionRead,
    MultiSectionRun,
    PartLayout,
    Run,
    Thing,
    compact,
    decode_together,
    key_of,
)
from fetcher.window import FetchRequest, Neighbours, Stream, plan_fetches, whole_part
from tiered.errors import DataError, TieredStoreError
from tiered.log.decode import decode_items, decode_records
from tiered.log.flat_file import ITEM_BYTES
from tiered.log.sections import SectionPlan, plan_ranges, read_ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from backends.base import ObjectStore
    from fetcher.limits import FetchSettings
    from fetcher.requests import Data
    from fetcher.runs import Memory
    from fetcher.transfers import Transfers
    from tiered.clock import Clock
    from tiered.log.cursor import IncarnationView
    from tiered.log.parts import Part, SectionRange
    from tiered.log.reader import TierReader
    from tiered.log.sections import OpenSection
    from tiered.model import MessageQueue, QueueOffset


# -- loading

SMALL_BYTES: Final = 1 << 20
"""A range of so many bytes is a small one, as those of indexes are."""


@dataclass(slots=True, eq=False)
class Fetch:
    """A fetch request under way."""

    request: FetchRequest  # what is fetched
    stream: Stream  # the reader for which it was begun
    is_urgent: bool  # a reader waits for it
    leader: Fetch | None = None
    """The fetch that it accompanies, as its neighbour: it has the same priority."""
    multi_read: MultiSectionRead | None = None
    """Sections of other queues that come with it, its own included; None: there are none."""
    size_bytes: int = 0  # room that is reserved for it
    future: Future[Thing | None] = field(default_factory=Future)
    """Ends with what was fetched, or with the reason why it cannot be had. None: look into the cache."""
    asked: list[Future[Data]] = field(default_factory=list)  # the ranges that bring its bytes
    plan: SectionPlan | MultiSectionRead | None = None
    """Which ranges those are; None: there is nothing to ask for."""
    is_over: bool = False
    """It is here or will not come; set before the future ends, so that nobody begins to wait for it."""
    streams: set[Stream] = field(default_factory=set)
    """All readers for which it was asked, since their parts lie side by side."""
    number: int = -1  # its place in the order of asking
    missing: int = 0  # ranges that have not come; guarded by ``lock``
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.size_bytes = self.request.size_bytes
        self.streams.add(self.stream)

    @property
    def keys(self) -> list[Key]:
        """Under which all of it will be found."""
        return [*self.request.keys, *(() if self.multi_read is None else self.multi_read.keys)]

    @property
    def has_priority(self) -> bool:
        """Whether a reader waits for it by now, or for the fetch that it accompanies."""
        return self.is_urgent or (self.leader is not None and self.leader.is_urgent)

    def places(self) -> Iterator[tuple[Stream, int]]:
        """Its readers, and the log offset at which it begins for each."""
        yield self.stream, self.request.part.log_offset
        neighbours, multi_read = self.stream.neighbours, self.multi_read
        if neighbours is not None and multi_read is not None:
            offsets = multi_read.rows["log_offset"].tolist()
            for queue, log_offset in zip(multi_read.queues, offsets, strict=True):
                if (stream := neighbours.stream(queue)) is not None:
                    yield stream, log_offset

    def section_ranges(self) -> list[SectionRange]:
        """What to ask for of the one section, each of it not empty (there may be none)."""
        part, layout = self.request.part, self.request.layout
        if layout is None:
            has_records = self.request.blocks and part.log_bytes
            return [part.index, part.log] if has_records else [part.index]
        begin, end = layout.span(self.request.blocks)
        at = part.log_offset
        return [part.log.part_of(begin - at, end - at)] if end > begin else []


class Loader:
    """Asks for ranges of sections, and checks them. For any thread."""

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        transfers: Transfers,
        *,
        table_bytes: int,
        receive: Callable[[Fetch, list[memoryview]], Thing | None],
        end: Callable[[Fetch, BaseException | None], None],
    ) -> None:
        """Ask for nothing yet. ``receive`` makes something of the bytes of each range of a fetch; ``end`` hears of its end.

        ``receive`` gets checked bytes; of a multi-section read, which nobody has checked, all at once, or none where the
        bundle is shorter. It is called once, without a lock, in the thread that brings the last of the bytes.

        ``end`` is called once, just before the fetch's future ends, since a reader that waits for the future runs as soon
        as it has ended, and would only wait for this thread's locks. (A callback of the future would also keep the fetch:
        what has been read would stay in memory until the collector comes.)
        """
        self._store = store
        self._receive, self._end = receive, end
        self.prefix = prefix
        self.transfers = transfers
        # Not the stock's: block tables are looked up while plans are made, which is done without that one.
        self._lock = threading.Lock()
        # Block tables of sections that are read in parts; they go by their place in the list, and not by time.
        self._tables: ByteCache[OpenSection] = ByteCache(table_bytes, {})
        self._arrivals: Arrivals[Fetch] = Arrivals(DECODERS)
        self._numbers = count()

    def begin(self, fetches: Sequence[Fetch]) -> None:
        """Ask for ranges of sections, neighbours together, and have something made of their bytes.

        Whatever goes wrong becomes the end of the fetches' futures.
        """
        by_priority: dict[bool, list[Fetch]] = {True: [], False: []}
        for fetch in fetches:
            if self._has_plan(fetch):
                # Asked once: it may change at any moment.
                by_priority[fetch.has_priority].append(fetch)
        for urgent, some in by_priority.items():
            try:
                self._ask([fetch for fetch in some if fetch.plan], urgent=urgent)
            except BaseException as error:
                for fetch in some:
                    self._fail(fetch, error)
                if not isinstance(error, Exception):
                    raise
                continue
            for fetch in some:
                fetch.number = next(self._numbers)
                self._gather(fetch)

    def _has_plan(self, fetch: Fetch) -> bool:
        fetch.plan = fetch.multi_read
        try:
            if fetch.plan is None and (wanted := fetch.section_ranges()):
                fetch.plan = self._plan(wanted)
        except DataError as error:
            self._fail(fetch, error)
            return False
        return True

    def _plan(
        self, wanted: Sequence[SectionRange], known: OpenSection | None = None
    ) -> SectionPlan:
        return plan_ranges(wanted, where=self.prefix, known=known or self._known(wanted[0]))

    def _ask(self, fetches: Sequence[Fetch], *, urgent: bool) -> None:
        ranges = [
            (fetch, fetch.plan.key, one)
            for fetch in fetches
            if fetch.plan is not None
            for one in fetch.plan.ranges
        ]
        # Streams take turns by bytes: what is small goes first, or it would wait for a turn behind what is large. What is
        # large goes in the order in which it is wanted.
        order = sorted(range(len(ranges)), key=lambda at: ranges[at][2].size_bytes > SMALL_BYTES)
        wanted = []
        for at in order:
            fetch, key, one = ranges[at]
            wanted.append((fetch.stream, self.prefix + key, one))
        found = dict(zip(order, self.transfers.ask_all(wanted, urgent=urgent), strict=True))
        for fetch in fetches:
            fetch.asked = []
        for at, (fetch, _, _) in enumerate(ranges):
            fetch.asked.append(found[at])
        for fetch in fetches:
            if fetch.is_urgent and not urgent:  # since a moment ago
                self.hurry(fetch)

    def hurry(self, fetch: Fetch) -> None:
        """A reader waits for it now."""
        fetch.is_urgent = True
        for asked in list(fetch.asked):
            self.transfers.hurry(asked)

    def cancel(self, fetch: Fetch) -> None:
        """No reader wants it any more."""
        for asked in list(fetch.asked):
            self.transfers.cancel(asked)

    # What has come. No thread waits for a fetch: the one that brings the last of its ranges goes on with it.

    def _gather(self, fetch: Fetch) -> None:
        """Go on once all has come that it waits for; again when a block table has said what to ask for."""
        asked = list(fetch.asked)
        fetch.missing = len(asked)

        def arrived(_: Future[Data]) -> None:
            # Ranges end in several threads, and exactly one of these goes on.
            with fetch.lock:
                fetch.missing -= 1
                if fetch.missing:
                    return
            self._work(fetch)

        if not asked:
            self._work(fetch)
        for one in asked:
            one.add_done_callback(arrived)

    def _work(self, fetch: Fetch) -> None:
        """Make something of what has come; another thread may do that, and this one for another."""
        with self._lock:
            is_mine = self._arrivals.come(fetch, fetch.number, lambda: fetch.has_priority)
        while is_mine:
            with self._lock:
                one = self._arrivals.next()
            if one is None:
                return
            try:
                self._finish(one)
            except BaseException:
                with self._lock:
                    self._arrivals.leave()
                raise

    def _finish(self, fetch: Fetch) -> None:
        """All has come: the fetch ends, or asks for more. It raises nothing."""
        try:
            found = [] if fetch.plan is None else self._take(fetch, fetch.plan)
            if found is None:
                self._gather(fetch)
                return
            made = self._receive(fetch, found)
            del found
        except CancelledError as error:
            self._over(fetch, error)
            fetch.future.cancel()
            fetch.future.set_running_or_notify_cancel()
        except BaseException as error:  # noqa: BLE001 (the reader that waits for the future handles it)
            if isinstance(error, (TieredStoreError, BackendError)):
                error.__traceback__ = None  # its frames would hold the bytes
            self._fail(fetch, error)
        else:
            self._over(fetch, None)
            fetch.future.set_result(made)

    def _over(self, fetch: Fetch, error: BaseException | None) -> None:
        fetch.is_over = True
        fetch.asked.clear()  # they hold the bytes, and their callbacks the fetch
        self._end(fetch, error)

    def _fail(self, fetch: Fetch, error: BaseException) -> None:
        self._over(fetch, error)
        fetch.future.set_exception(error)

    def _take(self, fetch: Fetch, plan: SectionPlan | MultiSectionRead) -> list[memoryview] | None:
        """Check what has come; None when that only says what to ask for, which is done."""
        asked = list(fetch.asked)
        if any(one.cancelled() for one in asked):
            raise CancelledError
        try:
            chunks = [one.result() for one in asked]
        except (InvalidRangeError, ShortReadError):
            return [] if isinstance(plan, MultiSectionRead) else self._read(plan)
        if isinstance(plan, MultiSectionRead):
            return [memoryview(chunk) for chunk in chunks]
        where = self.prefix + plan.wants[0].key
        try:
            if not plan.is_first:
                found, known = plan.check(chunks, where=where)
                if known is not None and plan.known is None:
                    self._remember(plan.wants[0], known)
                return found
            known = plan.open([chunks[0]], where=where)
        except DataError:  # its block table, too, may be damaged
            return self._read(plan)
        self._remember(plan.wants[0], known)
        fetch.plan = self._plan(plan.wants, known)
        fetch.asked.clear()
        self._ask([fetch], urgent=fetch.has_priority)
        return None

    def _read(self, plan: SectionPlan) -> list[memoryview]:
        """Read by itself, in this thread, what came to nothing the usual way."""
        found = read_ranges(self._store, self.prefix, plan.wants)
        # Copies, since what was read may be the whole section.
        return [memoryview(bytes(data)) for data in found]

    def _known(self, want: SectionRange) -> OpenSection | None:
        with self._lock:
            entry = self._tables.get((want.key, want.place.start))
            if entry is None:
                return None
            self._tables.use(entry, 0.0)
            return entry.value

    def _remember(self, want: SectionRange, known: OpenSection) -> None:
        key, size_bytes = (want.key, want.place.start), known.memory_bytes
        with self._lock:
            self._tables.put(Cached(known, (key,), size_bytes, lru_list=LruList.INDEX), 0.0)
            self._tables.resize(self._tables.bytes_max)


# -- stock

PAUSE_SECONDS = 0.2
"""How long nothing is read ahead for a reader after that has failed, lest each batch ask for the same again."""

MULTI_READ_MIN: Final = 3
"""Sections; so few are not cut in half for want of room."""


@dataclass(slots=True, eq=False)
class WaitingRead:
    """One read that finds nothing at hand, and is to have what holds ``start``."""

    stream: Stream
    view: IncarnationView  # what it reads; another read of this stream may have gone on to a newer one
    part: Part  # the part of it that holds ``start``
    start: QueueOffset
    window: int  # bytes to ask for from there on, if anything has to be asked for
    deadline_s: float
    has_waited: bool = False  # for anything
    has_queued: bool = False  # it is in the row of those that wait for room
    may_fail: bool = True  # what was read ahead and failed has not been asked for again yet


class Stock:
    """What is kept of a tier and what is being fetched, so that nothing is fetched twice at a time. For any thread."""

    def __init__(
        self,
        reader: TierReader,
        transfers: Transfers,
        memory: Memory,
        clock: Clock,
        *,
        settings: FetchSettings,
        go_on: Callable[[Stream], Sequence[Fetch]],
    ) -> None:
        """Begin with nothing.

        ``go_on`` is called with the lock held when a part's index has come for a reader who is not waiting for it: what to
        read ahead now.
        """
        self._loader = Loader(
            reader.store,
            reader.prefix,
            transfers,
            table_bytes=settings.table_bytes,
            receive=self._receive,
            end=self._end,
        )
        self._memory = memory
        self._clock = clock
        self._settings = settings
        self._go_on = go_on
        self.lock = threading.Lock()  # held by the caller wherever a method says so
        self.room = threading.Condition(self.lock)  # notified when a fetch has ended
        self._waiting: deque[WaitingRead] = deque()
        self._fetches: dict[Key, Fetch] = {}
        # So far: what was read ahead and dropped unread; reads that were served at once, and that had to wait.
        self.unread_bytes = self.hits = self.waits = 0
        self.is_closed = False  # nothing is asked for any more
        # What is here; with the lock held.
        self.cache: ByteCache[Thing] = ByteCache(
            settings.cache_bytes,
            {
                LruList.UNREAD: settings.unread_seconds,
                LruList.READ: settings.read_seconds,
                LruList.INDEX: settings.unread_seconds,
                LruList.SPENT: settings.read_seconds,
            },
            settings.spent_bytes,
        )

    # With the lock held

    def layout(self, part: Part) -> PartLayout | None:
        entry = self.cache.get(key_of(part, INDEX))
        return entry.value if entry is not None and isinstance(entry.value, PartLayout) else None

    def is_known(self, key: Key) -> bool:
        return self._under_way(key) is not None or self.cache.get(key) is not None

    def find(self, part: Part, start: QueueOffset) -> Cached[Thing] | None:
        """The run that holds a queue offset of a part, if it is here."""
        index = self.cache.get(key_of(part, INDEX))
        if index is None or not isinstance(index.value, PartLayout):
            return index  # of one block nothing has to be known but the block
        self.cache.use(index, self._clock.monotonic_s())
        return self.cache.get(key_of(part, index.value.block_of(start)))

    def serve(self, stream: Stream, part: Part, entry: Cached[Thing]) -> Run:
        """Serve a reader from where ``find`` found what it wants."""
        value = entry.value
        if isinstance(value, MultiSectionRun):
            value = value.run(key_of(part, INDEX))
        return stream.serve(cast("Run", value), entry)

    def use(self, entry: Cached[Thing], now_s: float) -> None:
        """Say that a reader has been given something of it."""
        if isinstance(entry.value, MultiSectionRun) and entry.value.unread:
            self.cache.touch(entry, now_s)
        else:
            self.cache.use(entry, now_s)

    def on_its_way(self, part: Part, start: QueueOffset) -> Fetch | None:
        """The fetch that a reader of a queue offset has to wait for next, if there is one."""
        layout = self.layout(part)
        block = INDEX if layout is None else layout.block_of(start)
        return self._under_way(key_of(part, block))

    def has(self, part: Part, start: QueueOffset) -> bool:
        """Whether what holds a queue offset is here or on its way."""
        return self.find(part, start) is not None or self.on_its_way(part, start) is not None

    def _under_way(self, key: Key) -> Fetch | None:
        fetch = self._fetches.get(key)
        return None if fetch is None or fetch.is_over else fetch

    def prepare(
        self,
        stream: Stream,
        view: IncarnationView,
        start: QueueOffset,
        window: int,
        *,
        urgent: bool = False,
    ) -> list[Fetch]:
        """Plan what a reader needs next, and reserve room for as much of it as fits; then ``begin`` the fetches.

        Another read of this stream may have gone on to a newer view. ``urgent``: it waits for the first of it.
        """
        # Read-ahead comes in small bits, and would take each bit of room that comes free before a reader that waits for a
        # large one.
        if self._waiting and not urgent:
            return []
        plan = plan_fetches(view, start, window, self, self._settings, until=stream.until)
        fetches: list[Fetch] = []
        stream.asked = plan.asked
        for request in plan.requests:
            if fetches and request.layout is None and self.is_known(key_of(request.part, INDEX)):
                continue  # it comes along with what was prepared a moment ago
            if not self._make_room(stream, request.size_bytes, is_needed=urgent and not fetches):
                stream.fall_back(request.part.log_offset)
                break
            # Only the first is waited for: the others would go before what other readers wait for.
            fetches.append(self._register(Fetch(request, stream, urgent and not fetches)))
            if stream.neighbours is not None and request.layout is None and request.blocks:
                fetches += self._beside(stream.neighbours, fetches[-1])
        return fetches

    def _register(self, fetch: Fetch) -> Fetch:
        self._fetches.update(dict.fromkeys(fetch.keys, fetch))
        return fetch

    def _make_room(self, stream: Stream, size_bytes: int, *, is_needed: bool) -> bool:
        if stream.until >= 0 and not is_needed:
            # It will be wanted for sure, and can be asked for later. So nothing goes for it that others will want as surely:
            # each would drop what the next is about to read, and all of it would be read again and again.
            return self.cache.reserve_gently(size_bytes)
        has_room, dropped = self.cache.reserve(size_bytes)
        self._lose(dropped)
        return has_room

    def _beside(self, neighbours: Neighbours, leader: Fetch) -> list[Fetch]:
        """Fetches of what lies beside a section and is wanted by the same reader, as far as there is room.

        What is small and plain becomes one fetch with it, which costs a tenth of as many fetches.
        """
        if leader.request.is_plain:
            self._widen(neighbours, leader)
            return []
        fetches: list[Fetch] = []
        for stream, one in neighbours.beside(leader.request.part, self.is_known):
            request = whole_part(one, self._settings)
            if not self.cache.reserve_gently(request.size_bytes):
                break
            fetches.append(self._register(Fetch(request, stream, False, leader)))
            stream.take_along(one.queue_offset, one.count, one.log_offset, one.log_bytes)
        return fetches

    def _widen(self, neighbours: Neighbours, fetch: Fetch) -> None:
        """Have the plain sections beside a plain one come with the same range, as many as there is room for."""
        read = neighbours.multi_read(fetch.request.part, self.is_known)
        more_bytes = 0
        while read is not None:
            more_bytes = max(read.size_bytes - fetch.size_bytes, 0)
            if self.cache.reserve_gently(more_bytes):
                break
            read = read.nearest(len(read) // 2) if len(read) > MULTI_READ_MIN else None
        if read is None:
            return
        fetch.multi_read = read
        fetch.size_bytes += more_bytes
        self._register(fetch)
        columns = (
            read.rows[name].tolist()
            for name in ("queue_offset", "count", "log_offset", "log_bytes")
        )
        for queue, *place in zip(read.queues, *columns, strict=True):
            if (stream := neighbours.stream(queue)) is not None:
                fetch.streams.add(stream)
                stream.take_along(*place)

    # Reads that wait for room get it in turn, or a large record would wait for ever behind small ones

    def prepare_urgently(self, read: WaitingRead) -> list[Fetch]:
        """Prepare what a reader waits for; nothing when others have waited longer, or there is no room: it is in the row."""
        fetches: list[Fetch] = []
        if not self._waiting or self._waiting[0] is read:
            fetches = self.prepare(read.stream, read.view, read.start, read.window, urgent=True)
        if not fetches and not read.has_queued:
            read.has_queued = True
            self._waiting.append(read)
        return fetches

    def step_out(self, read: WaitingRead) -> None:
        """It does not wait for room any more."""
        if not read.has_queued:
            return
        read.has_queued = False
        self._waiting.remove(read)
        # All of them: whose turn it is now only the row says, and one that is not the next would sleep on.
        self.room.notify_all()

    def expire(self, now_s: float) -> None:
        """Drop what has outlived its time."""
        self._lose(self.cache.expire(now_s))

    def _lose(self, dropped: list[Cached[Thing]]) -> None:
        for entry in dropped:
            self._count_unread(entry)
            owner, value = entry.owner, entry.value
            assert not isinstance(value, PartLayout)  # nobody is told of those
            for queue, log_offset in value.unread_places():
                stream = owner.stream(queue) if isinstance(owner, Neighbours) else owner
                if isinstance(stream, Stream):
                    stream.lose(log_offset)

    def _count_unread(self, entry: Cached[Thing]) -> None:
        value, size_bytes = entry.value, entry.size_bytes
        if isinstance(value, MultiSectionRun):
            size_bytes = size_bytes * value.unread // len(value.read)
        self.unread_bytes += size_bytes

    # Without it

    def resize(self, bytes_max: int) -> None:
        """Have another budget: what is too much is dropped, as for anything else that comes."""
        with self.lock:
            self._lose(self.cache.resize(bytes_max))
            self.room.notify_all()

    def begin(self, fetches: Sequence[Fetch]) -> None:
        """Ask for what was prepared."""
        if fetches:
            self._loader.begin(fetches)

    def hurry(self, fetch: Fetch) -> None:
        """A reader waits for it now."""
        self._loader.hurry(fetch)

    def forsake(self, stream: Stream, *, has_done: bool = False) -> None:
        """A reader has gone elsewhere: drop what was read ahead for it, and do not send what was not sent.

        What came for several readers stays until all of them have done.
        """
        with self.lock:
            unread = self.cache.of_owner(stream)
            if has_done and stream.neighbours is not None and stream.neighbours.leave(stream):
                unread += self.cache.of_owner(stream.neighbours)
            for entry in unread:
                self._count_unread(entry)
                self.cache.drop(entry)
            its = {id(x): x for x in self._fetches.values() if stream in x.streams}.values()
            for fetch in its:
                fetch.streams.discard(stream)
            unwanted = [fetch for fetch in its if not fetch.streams and not fetch.is_urgent]
        # Without the lock: a request that was not sent ends here and now, and its end takes the lock.
        for fetch in unwanted:
            self._loader.cancel(fetch)

    def _receive(self, fetch: Fetch, chunks: list[memoryview]) -> Thing | None:
        """Make of the bytes what was wanted, and put it into the cache."""
        if fetch.multi_read is not None:
            self._receive_together(fetch, fetch.multi_read, chunks)
            return None  # readers of several queues wait for it, and each finds its own
        request = fetch.request
        layout, run = request.layout, None
        if layout is None:
            layout = self._lay_out(request.part, chunks.pop(0))
        if request.blocks:
            data = chunks[0] if chunks else memoryview(b"")
            run = self._decode(fetch.stream.queue, layout, request, data)
        is_one = request.layout is None and len(request.blocks) == 1
        entries: list[Cached[Thing]] = []
        if request.layout is None and not is_one:
            key = key_of(request.part, INDEX)
            entries.append(Cached(layout, (key,), layout.size_bytes, lru_list=LruList.INDEX))
        if run is not None:
            keys = [key for key in request.keys if is_one or key[-1] != INDEX]
            entries.append(Cached(run, keys, run.size_bytes, owner=fetch.stream))
        self._put(fetch, entries)
        return layout if run is None else run

    def _receive_together(
        self, fetch: Fetch, read: MultiSectionRead, chunks: list[memoryview]
    ) -> None:
        """Put several sections into the cache. What cannot be decoded is asked for by itself."""
        data = compact(chunks.pop(), self._memory) if chunks else None  # what else came is not kept
        things = [] if data is None else decode_together(read, data, self._loader.prefix)
        neighbours = fetch.stream.neighbours
        if neighbours is not None and sum(len(keys) for _, keys in things) < len(read):
            with self.lock:
                neighbours.leave_out(read.bundle.key)
        self._put(
            fetch,
            [Cached(thing, keys, thing.size_bytes, owner=neighbours) for thing, keys in things],
        )

    def _put(self, fetch: Fetch, entries: Sequence[Cached[Thing]]) -> None:
        now_s = self._clock.monotonic_s()
        with self.lock:
            # Now, and not in `end`: what is put takes this room, and in between it would be counted twice.
            self.cache.release(fetch.size_bytes)
            fetch.size_bytes = 0
            for entry in entries if not self.is_closed else ():
                self.cache.put(entry, now_s)

    def _lay_out(self, part: Part, raw: memoryview) -> PartLayout:
        assert len(raw) == part.count * ITEM_BYTES
        items = decode_items(part, part.queue_offset, raw, where=self._loader.prefix)
        return PartLayout.of(part, items, self._settings.block_bytes)

    def _decode(
        self, queue: MessageQueue, layout: PartLayout, request: FetchRequest, data: memoryview
    ) -> Run:
        part, where = layout.part, self._loader.prefix
        begin, items = int(part.log_offset), layout.items_of(request.blocks)
        if request.layout is not None:
            begin = layout.span(request.blocks)[0]
            # Else the arrays of the whole index would stay as long as this run.
            items = items.copied()
        return Run.of(
            decode_records(queue, part, items, compact(data, self._memory), begin, where=where)
        )

    def _end(self, fetch: Fetch, error: BaseException | None) -> None:
        """It is here, or will not come."""
        more: Sequence[Fetch] = ()
        now_s = self._clock.monotonic_s()
        with self.lock:
            self.cache.release(fetch.size_bytes)
            for key in fetch.keys:
                # Once it was over, and before this, it may have been asked for again: then the name is another fetch's.
                if self._fetches.get(key) is fetch:
                    del self._fetches[key]
            if error is not None:
                # What was cancelled, or is told to a reader that waits, is no sign that the store is in trouble.
                may_pause = not isinstance(error, CancelledError) and not fetch.is_urgent
                for stream, log_offset in fetch.places():
                    stream.fall_back(log_offset)
                    if may_pause:
                        stream.paused_s = now_s + PAUSE_SECONDS
            elif not fetch.request.blocks and not fetch.is_urgent:
                more = self._go_on(fetch.stream)
            self.room.notify_all()
        self.begin(more)
