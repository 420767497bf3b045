"""What is here of a tier, what is on its way, and what to ask for next.

Stock
    A thing (a run of records, or the layout of a part) is *prepared* before it is asked for: room is reserved, and any
    reader that wants it from then on waits for the same fetch. When its bytes are there they are checked and decoded in
    the thread that brought them, put into the cache, and only then is the fetch over. A fetch that fails gives its room
    back and is forgotten. Its ``lock`` guards everything here, the streams included. Fetches are begun without it, since
    their answers may come at once.

Fetches
    A ``FetchRequest`` says what to fetch (``fetcher.fetch_plan``); a ``Fetch`` is one that is under way: the ranges that
    bring its bytes, and a future of what is made of them. What fails its check is read again by itself, as
    ``tiered.log.sections.read_ranges`` reads it: that knows how to do without a damaged block table. Where a packed
    section keeps its blocks only its block table says: such a fetch takes two steps when the table is not here. Asking for
    a part's index first brings the table along.

Lists
    What is cached is in one of four LRU lists: ``UNREAD`` (read ahead, no reader had it yet), ``READ``, ``SPENT`` (every
    reader of its queue is past it) and ``INDEX``. Room is made by dropping the oldest of ``SPENT``, then what was used
    longest ago of ``READ`` and ``INDEX``, then the oldest of ``UNREAD``. Each list has its time to live: ``UNREAD`` since
    it was put there, the others since it was last used. ``SPENT`` has a limit of its own in bytes: a reader that comes
    later may still profit from it, but memory that was never touched costs more than a second read of the same bytes.

    A multi-section run (``fetcher.runs``: small sections of many queues that came with one request) is one thing. It is
    ``UNREAD`` until each of its sections has been read, and ``SPENT`` when every reader of each is past it; it goes as a
    whole.

    What is on its way counts as well: room is reserved before a request is sent (``reserve``), and becomes the cached
    thing's own when it is put, or is given back (``release``). The cache keeps no clock: callers say what time it is.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar, cast

from backends.base import ByteRange
from backends.errors import BackendError, InvalidRangeError, ShortReadError
from fetcher.fetch_plan import FetchRequest, WidePlan, plan_fetches, whole_part
from fetcher.requests import DECODERS, Arrivals
from fetcher.runs import (
    INDEX,
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
from fetcher.window import Neighbours, Stream
from tiered.errors import DataError, TieredStoreError
from tiered.log.decode import decode_items, decode_records
from tiered.log.flat_file import ITEM_BYTES
from tiered.log.sections import SectionPlan, plan_ranges, read_ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

    from backends.base import ObjectStore
    from fetcher.buffers import Memory
    from fetcher.limits import FetchSettings
    from fetcher.requests import Data
    from fetcher.transfers import Transfers
    from tiered.clock import Clock
    from tiered.log.cursor import IncarnationView
    from tiered.log.parts import Part, SectionRange
    from tiered.log.sections import OpenSection
    from tiered.model import MessageQueue, QueueOffset


# -- cache

V = TypeVar("V")

USED_AGAIN_SECONDS = 0.1
"""A thing that is used again so soon keeps its place: readers use one for each batch that they cut from it."""


@dataclass(slots=True)
class ByteCache(Generic[V]):
    """Values by key, within a budget of bytes; what is on its way is asked for once."""

    bytes_max: int  # the budget
    seconds: Mapping[LruList, float]  # time to live of each lru_list
    spent_bytes_max: int | None = None  # what of them may be spent; None: no limit but the budget
    held_bytes: int = 0  # bytes of the entries
    reserved_bytes: int = 0  # bytes of what is on its way
    _spent_bytes: int = 0
    _unread_bytes: int = 0
    _entries: dict[Hashable, Cached[V]] = field(default_factory=dict)
    _lists: dict[LruList, OrderedDict[int, Cached[V]]] = field(
        default_factory=lambda: {lru_list: OrderedDict() for lru_list in LruList}
    )

    def get(self, key: Hashable) -> Cached[V] | None:
        """What is there under a key."""
        return self._entries.get(key)

    def reserve_gently(self, size_bytes: int) -> bool:
        """Make room for what nobody needs yet, if that costs only what was read, and half is left for others."""
        ahead = self._unread_bytes + self.reserved_bytes + size_bytes
        return ahead <= self.bytes_max // 2 and self.reserve(size_bytes)[0]

    def reserve(self, size_bytes: int) -> tuple[bool, list[Cached[V]]]:
        """Make room for what will be put, if that can be done.

        Returns:
            Whether there is room, and what was dropped unread to make it. A thing that is larger than the budget gets room
            when nothing else is there or on its way.
        """
        dropped: list[Cached[V]] = []
        room = max(self.bytes_max - size_bytes, 0)
        while self.reserved_bytes + self.held_bytes > room:
            oldest = self._oldest() if self.reserved_bytes <= room else None
            if oldest is None:
                return False, dropped
            if oldest.lru_list is LruList.UNREAD:
                dropped.append(oldest)
            self.drop(oldest)
        self.reserved_bytes += size_bytes
        return True, dropped

    def resize(self, bytes_max: int) -> list[Cached[V]]:
        """Have another budget, and keep to it; what was dropped unread for that. What is on its way keeps its room."""
        self.bytes_max, dropped = bytes_max, []
        while self.held_bytes + self.reserved_bytes > bytes_max:
            oldest = self._oldest()
            if oldest is None:
                break
            if oldest.lru_list is LruList.UNREAD:
                dropped.append(oldest)
            self.drop(oldest)
        return dropped

    def release(self, size_bytes: int) -> None:
        """Give back room that was reserved."""
        self.reserved_bytes -= size_bytes

    def put(self, entry: Cached[V], now_s: float) -> None:
        """Put a thing for which there is room; what was there under one of its keys is dropped."""
        for key in entry.keys:
            other = self._entries.get(key)
            if other is not None:
                self.drop(other)
        for key in entry.keys:
            self._entries[key] = entry
        entry.is_here = True
        self.held_bytes += entry.size_bytes
        self._place(entry, entry.lru_list, now_s)

    def use(self, entry: Cached[V], now_s: float) -> None:
        """Say that a thing is read now."""
        lru_list = entry.lru_list
        if not entry.is_here or (
            lru_list is LruList.READ and now_s < entry.used_s + USED_AGAIN_SECONDS
        ):
            return
        if lru_list is LruList.UNREAD or lru_list is LruList.SPENT:
            self._take_off(entry)
            self._place(entry, LruList.READ, now_s)
        else:
            entry.used_s = now_s
            self._lists[lru_list].move_to_end(id(entry))

    def touch(self, entry: Cached[V], now_s: float) -> None:
        """Say that some of a thing is read now, and that others are still to read the rest: it stays where it is."""
        if entry.is_here and now_s >= entry.used_s + USED_AGAIN_SECONDS:
            entry.used_s = now_s
            self._lists[entry.lru_list].move_to_end(id(entry))

    def retire(self, entry: Cached[V]) -> None:
        """Say that every reader is past a thing that was read; the oldest such go when there are too many bytes of them."""
        if not entry.is_here or entry.lru_list is not LruList.READ:
            return
        self._take_off(entry)
        self._place(entry, LruList.SPENT, entry.used_s)
        spent = self._lists[LruList.SPENT]
        while self.spent_bytes_max is not None and self._spent_bytes > self.spent_bytes_max:
            self.drop(next(iter(spent.values())))

    def drop(self, entry: Cached[V]) -> None:
        """Forget a thing, if it is there."""
        if not entry.is_here:
            return
        entry.is_here = False
        self._take_off(entry)
        self.held_bytes -= entry.size_bytes
        for key in entry.keys:
            if self._entries.get(key) is entry:
                del self._entries[key]

    def of_owner(self, owner: object) -> list[Cached[V]]:
        """What was read ahead for somebody and nobody had yet."""
        return [x for x in self._lists[LruList.UNREAD].values() if x.owner is owner]

    def expire(self, now_s: float) -> list[Cached[V]]:
        """Drop what has outlived its time; what of it nobody has read."""
        dropped = []
        for lru_list, seconds in self.seconds.items():
            while entry := next(iter(self._lists[lru_list].values()), None):
                if entry.used_s + seconds > now_s:
                    break
                if lru_list is LruList.UNREAD:
                    dropped.append(entry)
                self.drop(entry)
        return dropped

    def clear(self) -> None:
        """Forget everything; what is on its way keeps its room."""
        for entry in list(self._entries.values()):
            self.drop(entry)

    def _place(self, entry: Cached[V], lru_list: LruList, now_s: float) -> None:
        entry.lru_list, entry.used_s = lru_list, now_s
        self._lists[lru_list][id(entry)] = entry
        self._spent_bytes += entry.size_bytes if lru_list is LruList.SPENT else 0
        self._unread_bytes += entry.size_bytes if lru_list is LruList.UNREAD else 0

    def _take_off(self, entry: Cached[V]) -> None:
        del self._lists[entry.lru_list][id(entry)]
        self._spent_bytes -= entry.size_bytes if entry.lru_list is LruList.SPENT else 0
        self._unread_bytes -= entry.size_bytes if entry.lru_list is LruList.UNREAD else 0

    def _oldest(self) -> Cached[V] | None:
        if self._lists[LruList.SPENT]:
            return next(iter(self._lists[LruList.SPENT].values()))
        read = next(iter(self._lists[LruList.READ].values()), None)
        index = next(iter(self._lists[LruList.INDEX].values()), None)
        if read is not None and index is not None:
            return min(read, index, key=lambda entry: entry.used_s)
        return read or index or next(iter(self._lists[LruList.UNREAD].values()), None)


SMALL_BYTES: Final = 1 << 20
"""A range of so many bytes is a small one, as those of indexes are."""

SECTIONS_MAX = 2048
"""Sections that are read in parts whose block tables are remembered. Each takes 12 bytes a block and half a KiB; a packed
one, which has a dictionary, 100 KiB more."""


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
    plan: SectionPlan | WidePlan | None = (
        None  # which ranges those are; None: there is nothing to ask for
    )
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

    def ranges(self) -> WidePlan | list[SectionRange]:
        """What to ask for: one wide range, or ranges of one section, none of them empty (there may be none)."""
        if self.multi_read is not None:
            read = self.multi_read
            return WidePlan(read.bundle.key, (ByteRange(read.start, read.end),))
        part, layout = self.request.part, self.request.layout
        if layout is None:
            has_records = self.request.blocks and part.log_bytes
            return [part.index, part.log] if has_records else [part.index]
        begin, end = layout.span(self.request.blocks)
        at = part.log_offset
        return [part.log.part_of(begin - at, end - at)] if end > begin else []


class Receiver(Protocol):
    """Makes something of what was fetched. Called without a lock, in the thread that brings the last of the bytes."""

    def receive(self, fetch: Fetch, pieces: list[memoryview]) -> Thing | None:
        """Make something of the bytes of each range; called once.

        Args:
            pieces: Checked. Of a wide plan, which nobody has checked: all at once, or none where the bundle is shorter.
        """
        ...

    def end(self, fetch: Fetch, error: BaseException | None) -> None:
        """The fetch has ended; called once, just before its future ends.

        Before, since a reader that waits for the future runs as soon as it has ended, and would only wait for this
        thread's locks. (A callback of the future would also keep the fetch: what has been read would stay in memory
        until the collector comes.)
        """
        ...


class Loader:
    """Asks for ranges of sections, and checks them. For any thread."""

    def __init__(
        self, store: ObjectStore, prefix: str, transfers: Transfers, *, table_bytes: int
    ) -> None:
        self._store = store
        self._table_bytes = table_bytes
        self.prefix = prefix
        self.transfers = transfers
        # Not the stock's: block tables are looked up while plans are made, which is done without that one.
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[str, int], OpenSection] = OrderedDict()
        self._memory_bytes = 0
        self._arrivals: Arrivals[Fetch] = Arrivals(DECODERS)
        self._numbers = count()

    def begin(self, fetches: Sequence[Fetch], receiver: Receiver) -> None:
        """Ask for ranges of sections, neighbours together, and have something made of their bytes.

        Whatever goes wrong becomes the end of the fetches' futures.
        """
        by_priority: dict[bool, list[Fetch]] = {True: [], False: []}
        for fetch in fetches:
            if self._has_plan(fetch, receiver):
                by_priority[fetch.has_priority].append(
                    fetch
                )  # asked once: it may change at any moment
        for urgent, some in by_priority.items():
            try:
                self._ask([fetch for fetch in some if fetch.plan], urgent=urgent)
            except BaseException as error:
                for fetch in some:
                    _fail(fetch, receiver, error)
                if not isinstance(error, Exception):
                    raise
                continue
            for fetch in some:
                fetch.number = next(self._numbers)
                self._gather(fetch, receiver)

    def _has_plan(self, fetch: Fetch, receiver: Receiver) -> bool:
        ranges = fetch.ranges()
        try:
            fetch.plan = (
                ranges if isinstance(ranges, WidePlan) else self._plan(ranges) if ranges else None
            )
        except DataError as error:
            _fail(fetch, receiver, error)
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

    def _gather(self, fetch: Fetch, receiver: Receiver) -> None:
        """Go on once all has come that it waits for; again when a block table has said what to ask for."""
        asked = list(fetch.asked)
        fetch.missing = len(asked)

        def arrived(_: Future[Data]) -> None:
            # Ranges end in several threads, and exactly one of these goes on.
            with fetch.lock:
                fetch.missing -= 1
                if fetch.missing:
                    return
            self._work(fetch, receiver)

        if not asked:
            self._work(fetch, receiver)
        for one in asked:
            one.add_done_callback(arrived)

    def _work(self, fetch: Fetch, receiver: Receiver) -> None:
        """Make something of what has come; another thread may do that, and this one for another."""
        with self._lock:
            is_mine = self._arrivals.come(fetch, fetch.number, lambda: fetch.has_priority)
        while is_mine:
            with self._lock:
                one = self._arrivals.next()
            if one is None:
                return
            try:
                self._finish(one, receiver)
            except BaseException:
                with self._lock:
                    self._arrivals.leave()
                raise

    def _finish(self, fetch: Fetch, receiver: Receiver) -> None:
        """All has come: the fetch ends, or asks for more. It raises nothing."""
        try:
            found = [] if fetch.plan is None else self._take(fetch, fetch.plan)
            if found is None:
                self._gather(fetch, receiver)
                return
            made = receiver.receive(fetch, found)
            del found
        except CancelledError as error:
            _over(fetch, receiver, error)
            fetch.future.cancel()
            fetch.future.set_running_or_notify_cancel()
        except BaseException as error:  # noqa: BLE001 (the reader that waits for the future handles it)
            if isinstance(error, (TieredStoreError, BackendError)):
                error.__traceback__ = None  # its frames would hold the bytes
            _fail(fetch, receiver, error)
        else:
            _over(fetch, receiver, None)
            fetch.future.set_result(made)

    def _take(self, fetch: Fetch, plan: SectionPlan | WidePlan) -> list[memoryview] | None:
        """Check what has come; None when that only says what to ask for, which is done."""
        asked = list(fetch.asked)
        if any(one.cancelled() for one in asked):
            raise CancelledError
        try:
            pieces = [one.result() for one in asked]
        except (InvalidRangeError, ShortReadError):
            return [] if isinstance(plan, WidePlan) else self._read(plan)
        if isinstance(plan, WidePlan):
            return [memoryview(piece) for piece in pieces]
        where = self.prefix + plan.wants[0].key
        try:
            if not plan.is_first:
                found, known = plan.check(pieces, where=where)
                if known is not None and plan.known is None:
                    self._remember(plan.wants[0], known)
                return found
            known = plan.open([pieces[0]], where=where)
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
        name = want.key, want.place.start
        with self._lock:
            known = self._open.get(name)
            if known is not None:
                self._open.move_to_end(name)
            return known

    def _remember(self, want: SectionRange, known: OpenSection) -> None:
        name = want.key, want.place.start
        with self._lock:
            old = self._open.pop(name, None)
            self._open[name] = known
            self._memory_bytes += known.memory_bytes - (old.memory_bytes if old else 0)
            while len(self._open) > SECTIONS_MAX or self._memory_bytes > self._table_bytes:
                self._memory_bytes -= self._open.popitem(last=False)[1].memory_bytes


def _over(fetch: Fetch, receiver: Receiver, error: BaseException | None) -> None:
    fetch.is_over = True
    fetch.asked.clear()  # they hold the bytes, and their callbacks the fetch
    receiver.end(fetch, error)


def _fail(fetch: Fetch, receiver: Receiver, error: BaseException) -> None:
    _over(fetch, receiver, error)
    fetch.future.set_exception(error)


# -- stock

PAUSE_SECONDS = 0.2
"""How long nothing is read ahead for a reader after that has failed, lest each batch ask for the same again."""

MULTI_READ_MIN: Final = 3
"""Sections; so few are not cut in half for want of room."""


@dataclass(slots=True, eq=False)
class WaitingRead:
    """One read that finds nothing here."""

    has_waited: bool = False  # for anything
    has_queued: bool = False  # it is in the row of those that wait for room
    may_fail: bool = True  # what was read ahead and failed has not been asked for again yet


class Stock:
    """See the module's contract.

    Attributes:
        unread_bytes: What was read ahead and dropped before any reader had it, so far.
        hits: Reads that were served at once, so far.
        waits: Reads that had to wait, so far.
    """

    def __init__(
        self,
        loader: Loader,
        memory: Memory,
        clock: Clock,
        settings: FetchSettings,
        go_on: Callable[[Stream], Sequence[Fetch]],
    ) -> None:
        """Begin with nothing.

        Args:
            go_on: Called with the lock held when a part's index has come for a reader who is not waiting for it: what
                to read ahead now.
        """
        self._loader = loader
        self._memory = memory
        self._clock = clock
        self._settings = settings
        self._go_on = go_on
        self.lock = threading.Lock()  # held by the caller wherever a method says so
        self.room = threading.Condition(self.lock)  # notified when a fetch has ended
        self._waiting: deque[WaitingRead] = deque()
        self._fetches: dict[Key, Fetch] = {}
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

        Args:
            view: What it reads. (Another read of this stream may have gone on to a newer one.)
            urgent: It waits for the first of it.
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

    def prepare_urgently(
        self,
        waiting: WaitingRead,
        stream: Stream,
        view: IncarnationView,
        start: QueueOffset,
        window: int,
    ) -> list[Fetch]:
        """Prepare what a reader waits for; nothing when others have waited longer, or there is no room: it is in the row."""
        fetches: list[Fetch] = []
        if not self._waiting or self._waiting[0] is waiting:
            fetches = self.prepare(stream, view, start, window, urgent=True)
        if not fetches and not waiting.has_queued:
            waiting.has_queued = True
            self._waiting.append(waiting)
        return fetches

    def step_out(self, waiting: WaitingRead) -> None:
        """It does not wait for room any more."""
        waiting.has_queued = False
        self._waiting.remove(waiting)
        # All of them: whose turn it is now only the row says, and one that is not the next would sleep on.
        self.room.notify_all()

    def expire(self, now_s: float) -> None:
        """Drop what has outlived its time."""
        self._lose(self.cache.expire(now_s))

    def _lose(self, dropped: list[Cached[Thing]]) -> None:
        for entry in dropped:
            self._count_unread(entry)
            owner, value = entry.owner, entry.value
            if isinstance(value, Run):
                if isinstance(owner, Neighbours):
                    owner = owner.stream(value.batch.records.queue)
                if isinstance(owner, Stream):
                    owner.lose(value.batch.log_offset)
            elif isinstance(owner, Neighbours) and isinstance(value, MultiSectionRun):
                for queue, log_offset in value.unread_places():
                    if (stream := owner.stream(queue)) is not None:
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
            self._loader.begin(fetches, self)

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

    def receive(self, fetch: Fetch, pieces: list[memoryview]) -> Thing | None:
        """Make of the bytes what was wanted, and put it into the cache."""
        if fetch.multi_read is not None:
            self._receive_together(fetch, fetch.multi_read, pieces)
            return None  # readers of several queues wait for it, and each finds its own
        request = fetch.request
        layout, run = request.layout, None
        if layout is None:
            layout = self._lay_out(request.part, pieces.pop(0))
        if request.blocks:
            data = pieces[0] if pieces else memoryview(b"")
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
        self, fetch: Fetch, read: MultiSectionRead, pieces: list[memoryview]
    ) -> None:
        """Put several sections into the cache. What cannot be decoded is asked for by itself."""
        data = compact(pieces.pop(), self._memory) if pieces else None  # what else came is not kept
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

    def end(self, fetch: Fetch, error: BaseException | None) -> None:
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
