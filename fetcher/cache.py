"""What is here of a tier, what is on its way, and what to ask for next.

Stock
    A thing (a run of records, or the layout of a part) is *claimed* before it is asked for: room is reserved, and
    whoever wants it from then on waits for the same load. When its bytes are there they are checked and decoded in the
    thread that brought them, put into the cache, and only then is the claim over. A load that fails gives its room back
    and is forgotten. Its ``lock`` guards everything here, the streams included. Requests are begun without it, since
    their answers may come at once.

Loads
    A ``Load`` is one thing that is on its way: the requests for its bytes, and a future of what is made of them. What fails
    its check is read again by itself, as ``tiered.log.sections.read_ranges`` reads it: that knows how to do without a
    damaged block table. Where a packed section keeps its blocks only its block table says: a load of such takes two steps
    when the table is not here. Whoever asks for a part's index first has the table come along.

Shelves
    What is cached stands on one of four shelves: ``UNREAD`` (read ahead, nobody had it yet), ``READ``, ``SPENT`` (every
    reader of its queue is past it) and ``INDEX``. Room is made by dropping the oldest of ``SPENT``, then what was used
    longest ago of ``READ`` and ``INDEX``, then the oldest of ``UNREAD``. Each shelf has its time to live: ``UNREAD`` since
    it was put there, the others since it was last used. ``SPENT`` has a limit of its own in bytes: whoever comes later may
    still profit from it, but memory that was never touched costs more than a second read of the same bytes.

    A sheet (``fetcher.runs``: small sections of many queues that came with one request) is one thing. It is ``UNREAD`` until
    each of its sections has been read, and ``SPENT`` when every reader of each is past it; it goes as a whole.

    What is on its way counts as well: room is reserved before a request is sent (``reserve``), and becomes the cached
    thing's own when it is put, or is given back (``release``). The cache keeps no clock: callers say what time it is.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Final, Generic, TypeVar, cast

from backends.base import ByteRange
from backends.errors import BackendError, InvalidRangeError, ShortReadError
from fetcher.claims import Claim, WidePlan, plan_claims, whole_claim
from fetcher.requests import DECODERS, Arrivals
from fetcher.runs import (
    INDEX,
    Cached,
    Key,
    PartLayout,
    Run,
    Sheet,
    Shelf,
    Strip,
    Thing,
    compact,
    decode_strip,
    key_of,
)
from fetcher.window import Stream, Sweep
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
    from fetcher.window import Beside
    from tiered.clock import Clock
    from tiered.log.cursor import LifeView
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
    seconds: Mapping[Shelf, float]  # time to live of each shelf
    spent_bytes_max: int | None = None  # what of them may be spent; None: no limit but the budget
    held_bytes: int = 0  # bytes of the entries
    reserved_bytes: int = 0  # bytes of what is on its way
    _spent_bytes: int = 0
    _unread_bytes: int = 0
    _entries: dict[Hashable, Cached[V]] = field(default_factory=dict)
    _shelves: dict[Shelf, OrderedDict[int, Cached[V]]] = field(
        default_factory=lambda: {shelf: OrderedDict() for shelf in Shelf}
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
            if oldest.shelf is Shelf.UNREAD:
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
            if oldest.shelf is Shelf.UNREAD:
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
        self._place(entry, entry.shelf, now_s)

    def use(self, entry: Cached[V], now_s: float) -> None:
        """Say that a thing is read now."""
        shelf = entry.shelf
        if not entry.is_here or (shelf is Shelf.READ and now_s < entry.used_s + USED_AGAIN_SECONDS):
            return
        if shelf is Shelf.UNREAD or shelf is Shelf.SPENT:
            self._take_off(entry)
            self._place(entry, Shelf.READ, now_s)
        else:
            entry.used_s = now_s
            self._shelves[shelf].move_to_end(id(entry))

    def touch(self, entry: Cached[V], now_s: float) -> None:
        """Say that some of a thing is read now, and that others are still to read the rest: it stays where it is."""
        if entry.is_here and now_s >= entry.used_s + USED_AGAIN_SECONDS:
            entry.used_s = now_s
            self._shelves[entry.shelf].move_to_end(id(entry))

    def retire(self, entry: Cached[V]) -> None:
        """Say that every reader is past a thing that was read; the oldest such go when there are too many bytes of them."""
        if not entry.is_here or entry.shelf is not Shelf.READ:
            return
        self._take_off(entry)
        self._place(entry, Shelf.SPENT, entry.used_s)
        spent = self._shelves[Shelf.SPENT]
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
        return [x for x in self._shelves[Shelf.UNREAD].values() if x.owner is owner]

    def expire(self, now_s: float) -> list[Cached[V]]:
        """Drop what has outlived its time; what of it nobody has read."""
        dropped = []
        for shelf, seconds in self.seconds.items():
            while entry := next(iter(self._shelves[shelf].values()), None):
                if entry.used_s + seconds > now_s:
                    break
                if shelf is Shelf.UNREAD:
                    dropped.append(entry)
                self.drop(entry)
        return dropped

    def clear(self) -> None:
        """Forget everything; what is on its way keeps its room."""
        for entry in list(self._entries.values()):
            self.drop(entry)

    def _place(self, entry: Cached[V], shelf: Shelf, now_s: float) -> None:
        entry.shelf, entry.used_s = shelf, now_s
        self._shelves[shelf][id(entry)] = entry
        self._spent_bytes += entry.size_bytes if shelf is Shelf.SPENT else 0
        self._unread_bytes += entry.size_bytes if shelf is Shelf.UNREAD else 0

    def _take_off(self, entry: Cached[V]) -> None:
        del self._shelves[entry.shelf][id(entry)]
        self._spent_bytes -= entry.size_bytes if entry.shelf is Shelf.SPENT else 0
        self._unread_bytes -= entry.size_bytes if entry.shelf is Shelf.UNREAD else 0

    def _oldest(self) -> Cached[V] | None:
        if self._shelves[Shelf.SPENT]:
            return next(iter(self._shelves[Shelf.SPENT].values()))
        read = next(iter(self._shelves[Shelf.READ].values()), None)
        index = next(iter(self._shelves[Shelf.INDEX].values()), None)
        if read is not None and index is not None:
            return min(read, index, key=lambda entry: entry.used_s)
        return read or index or next(iter(self._shelves[Shelf.UNREAD].values()), None)


SMALL_BYTES: Final = 1 << 20
"""A request of so many bytes is a small one, as those for indexes are."""

SECTIONS_MAX = 2048
"""Sections that are read in pieces whose block tables are remembered. Each takes 12 bytes a block and half a KiB; a packed
one, which has a dictionary, 100 KiB more."""


@dataclass(slots=True, eq=False)
class Load(Generic[V]):
    """Something on its way."""

    stream: Hashable  # for whom it was asked first
    is_urgent: bool  # somebody waits for it
    size_bytes: int  # room that is reserved for it
    future: Future[V] = field(default_factory=Future)
    """Ends with the thing, or with why it cannot be had."""
    requests: list[Future[Data]] = field(default_factory=list)  # what brings its bytes
    leader: Load[V] | None = None
    """What it comes along with, as its neighbour: it is asked for as that is."""
    is_over: bool = False
    """It is here or will not come; set before the future ends, so that nobody waits for it once more."""
    streams: set[Hashable] = field(default_factory=set)
    """All for whom it was asked: whose parts lie side by side."""

    def __post_init__(self) -> None:
        self.streams.add(self.stream)


@dataclass(slots=True, eq=False)
class Job(Generic[V]):
    """What a load is to bring."""

    load: Load[V]  # what is on its way from now on
    wanted: Sequence[SectionRange]  # ranges, all of one section, none empty; there may be none
    make: Callable[[list[memoryview]], V]
    """Gets the bytes of each; called once, in whatever thread brings the last of them. Of a wide plan it gets all at
    once, or nothing where the bundle has not so many."""
    end: Callable[[BaseException | None], None]
    """Called once, just before the future ends, with its error, if that is how. Before, since whoever waits for the
    future runs as soon as it has ended, and would only wait for this thread's locks. (A callback of the future
    would also keep the load: what has been read would stay in memory until the collector comes.)"""
    plan: SectionPlan | WidePlan | None = None  # what is asked for; None: as ``wanted`` says


class Loader(Generic[V]):
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
        self._arrivals: Arrivals[_Gathering[V]] = Arrivals(DECODERS)
        self._numbers = count()

    def begin(self, jobs: Sequence[Job[V]]) -> None:
        """Ask for ranges of sections, neighbours together, and make something of their bytes.

        Whatever goes wrong becomes the end of the futures of the loads.
        """
        sound = [job for job in jobs if self._plan_job(job)]
        lanes: dict[bool, list[Job[V]]] = {True: [], False: []}
        for job in sound:  # once: it may become urgent at any moment
            lanes[_is_urgent(job.load)].append(job)
        for urgent, some in lanes.items():
            try:
                self._ask_all([(job.load, job.plan) for job in some if job.plan], urgent=urgent)
            except BaseException as error:
                for job in some:
                    _fail(job, error)
                if not isinstance(error, Exception):
                    raise
                continue
            for job in some:
                _Gathering(self, job, next(self._numbers)).begin()

    def _plan_job(self, job: Job[V]) -> bool:
        try:
            if job.wanted:
                job.plan = self.plan(job.wanted)
        except DataError as error:
            _fail(job, error)
            return False
        return True

    def plan(self, wanted: Sequence[SectionRange], known: OpenSection | None = None) -> SectionPlan:
        """What to ask for, given what is known of the section."""
        return plan_ranges(wanted, where=self.prefix, known=known or self._known(wanted[0]))

    def ask(self, load: Load[V], plan: SectionPlan) -> None:
        """Make the requests of a plan those of the load.

        Raises:
            TieredStoreError: The fetcher is closed, or too much is waiting.
        """
        self._ask_all([(load, plan)], urgent=_is_urgent(load))

    def _ask_all(
        self, planned: Sequence[tuple[Load[V], SectionPlan | WidePlan]], *, urgent: bool
    ) -> None:
        ranges = [(number, one) for number, (_, plan) in enumerate(planned) for one in plan.ranges]
        # Streams take turns by bytes: what is small goes first, or it would wait for a turn behind what is large. What is
        # large goes in the order in which it is wanted.
        order = sorted(range(len(ranges)), key=lambda at: ranges[at][1].size_bytes > SMALL_BYTES)
        wanted = []
        for at in order:
            load, plan = planned[ranges[at][0]]
            wanted.append((load.stream, self.prefix + plan.key, ranges[at][1]))
        found = dict(zip(order, self.transfers.ask_all(wanted, urgent=urgent), strict=True))
        for load, _ in planned:
            load.requests = []
        for at, (number, _) in enumerate(ranges):
            planned[number][0].requests.append(found[at])
        for load, _ in planned:
            if load.is_urgent and not urgent:  # since a moment ago
                self.hurry(load)

    def hurry(self, load: Load[V]) -> None:
        """Somebody waits for it now."""
        load.is_urgent = True
        for request in list(load.requests):
            self.transfers.hurry(request)

    def cancel(self, load: Load[V]) -> None:
        """Nobody wants it any more."""
        for request in list(load.requests):
            self.transfers.cancel(request)

    def finish(self, gathering: _Gathering[V]) -> None:
        """Make something of what has come; another thread may do that, and this one for another."""
        with self._lock:
            is_mine = self._arrivals.come(gathering, gathering.number, gathering.is_urgent)
        while is_mine:
            with self._lock:
                one = self._arrivals.next()
            if one is None:
                return
            try:
                one.finish()
            except BaseException:
                with self._lock:
                    self._arrivals.leave()
                raise

    def read(self, plan: SectionPlan) -> list[memoryview]:
        """Read by itself, in this thread, what came to nothing the usual way."""
        found = read_ranges(self._store, self.prefix, plan.wants)
        return [
            memoryview(bytes(data)) for data in found
        ]  # not the whole section that it may be of

    def check(self, plan: SectionPlan, pieces: Sequence[Data]) -> list[memoryview]:
        """The ranges that were planned, checked; read anew where that cannot be done."""
        try:
            found, known = plan.check(pieces, where=self.prefix + plan.wants[0].key)
        except DataError:
            return self.read(plan)
        if known is not None and plan.known is None:
            self._remember(plan.wants[0], known)
        return found

    def plan_on(self, plan: SectionPlan, behind: Data) -> SectionPlan | None:
        """The plan for the blocks, from the block table that had to come first; None when that is damaged."""
        try:
            known = plan.open([behind], where=self.prefix + plan.wants[0].key)
        except DataError:
            return None
        self._remember(plan.wants[0], known)
        return self.plan(plan.wants, known)

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


def _is_urgent(load: Load[V]) -> bool:
    """Whether somebody waits for it, or for what it comes along with."""
    return load.is_urgent or (load.leader is not None and load.leader.is_urgent)


def _fail(job: Job[V], error: BaseException) -> None:
    """It will not come, and nothing is on its way for it."""
    job.load.is_over = True
    job.end(error)
    job.load.future.set_exception(error)


class _Gathering(Generic[V]):
    """Waits for the requests of a load, without a thread of its own; once more when a block table says what to ask for."""

    def __init__(self, loader: Loader[V], job: Job[V], number: int) -> None:
        self.number = number
        self._loader = loader
        self._plan = job.plan
        self._load = job.load
        self._make = job.make
        self._end = job.end
        self._lock = threading.Lock()
        self._missing = 0

    def begin(self) -> None:
        requests = list(self._load.requests)
        self._missing = len(requests)
        if not requests:
            self.finish()
        for request in requests:
            request.add_done_callback(self._arrived)

    def _arrived(self, _: Future[Data]) -> None:
        # Requests end in several threads, and exactly one of these goes on.
        with self._lock:
            self._missing -= 1
            if self._missing:
                return
        self._loader.finish(self)

    def is_urgent(self) -> bool:
        """Whether somebody waits for it by now."""
        return _is_urgent(self._load)

    def finish(self) -> None:
        """All has come: the load ends, or asks for more. It raises nothing."""
        future = self._load.future
        try:
            found = [] if self._plan is None else self._take(self._plan)
            if found is None:
                self.begin()
                return
            made = self._make(found)
            del found
        except CancelledError as error:
            self._over(error)
            future.cancel()
            future.set_running_or_notify_cancel()
        except BaseException as error:  # noqa: BLE001 (whoever waits for the future handles it)
            if isinstance(error, (TieredStoreError, BackendError)):
                error.__traceback__ = None  # its frames would hold the bytes
            self._over(error)
            future.set_exception(error)
        else:
            self._over(None)
            future.set_result(made)

    def _over(self, error: BaseException | None) -> None:
        self._load.is_over = True
        self._load.requests.clear()  # they hold the bytes, and their callbacks us
        self._end(error)

    def _take(self, plan: SectionPlan | WidePlan) -> list[memoryview] | None:
        """Check what has come; None when that only says what to ask for, which is done."""
        requests = list(self._load.requests)
        if any(request.cancelled() for request in requests):
            raise CancelledError
        try:
            pieces = [request.result() for request in requests]
        except (InvalidRangeError, ShortReadError):
            return [] if isinstance(plan, WidePlan) else self._loader.read(plan)
        if isinstance(plan, WidePlan):
            return [memoryview(piece) for piece in pieces]
        if not plan.is_first:
            return self._loader.check(plan, pieces)
        self._plan = self._loader.plan_on(plan, pieces[0])
        if self._plan is None:  # the block table is damaged
            return self._loader.read(plan)
        self._load.requests.clear()
        self._loader.ask(self._load, self._plan)
        return None


# -- stock

PAUSE_SECONDS = 0.2
"""How long nothing is read ahead for a reader after that has failed, lest each batch ask for the same again."""

STRIP_MIN: Final = 3
"""Sections; so few are not cut in half for want of room."""


@dataclass(slots=True)
class Bid:
    """What one load is for."""

    stream: Stream  # for whom it was asked first
    claim: Claim  # what
    strip: Strip | None = None  # what comes along with it, itself included; None: nothing

    @property
    def keys(self) -> list[Key]:
        """Under which all of it will be found."""
        return [*self.claim.keys, *(self.strip.keys if self.strip is not None else ())]

    def places(self) -> Iterator[tuple[Stream, int]]:
        """For whom it is, and the log offset at which it begins for each."""
        yield self.stream, self.claim.part.log_offset
        sweep, strip = self.stream.sweep, self.strip
        if sweep is not None and strip is not None:
            offsets = strip.rows["log_offset"].tolist()
            for queue, log_offset in zip(strip.queues, offsets, strict=True):
                if (stream := sweep.stream(queue)) is not None:
                    yield stream, log_offset


Begun = list[tuple[Bid, Load[Thing | None]]]

NOTHING: Begun = []


@dataclass(slots=True, eq=False)
class LoadWaiter:
    """One read that finds nothing here."""

    has_waited: bool = False  # for whatever
    has_queued: bool = False  # it is in the row of those who wait for room
    may_fail: bool = True  # what was read ahead and failed has not been asked for again yet


class Stock:
    """See the module's contract.

    Attributes:
        unread_bytes: What was read ahead and dropped before anybody had it, so far.
        hits: Reads that were served at once, so far.
        waits: Reads that had to wait, so far.
    """

    def __init__(
        self,
        loader: Loader[Thing | None],
        memory: Memory,
        clock: Clock,
        settings: FetchSettings,
        go_on: Callable[[Stream], Begun],
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
        self.room = threading.Condition(self.lock)  # notified when a load has ended
        self._waiting: deque[LoadWaiter] = deque()
        self._loads: dict[Key, Load[Thing | None]] = {}
        self.unread_bytes = self.hits = self.waits = 0
        self.is_closed = False  # nothing is asked for any more
        # What is here; with the lock held.
        self.cache: ByteCache[Thing] = ByteCache(
            settings.cache_bytes,
            {
                Shelf.UNREAD: settings.unread_seconds,
                Shelf.READ: settings.read_seconds,
                Shelf.INDEX: settings.unread_seconds,
                Shelf.SPENT: settings.read_seconds,
            },
            settings.spent_bytes,
        )

    # With the lock held

    def layout(self, part: Part) -> PartLayout | None:
        entry = self.cache.get(key_of(part, INDEX))
        return entry.value if entry is not None and isinstance(entry.value, PartLayout) else None

    def is_known(self, key: Key) -> bool:
        return self._load(key) is not None or self.cache.get(key) is not None

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
        run = value.run(key_of(part, INDEX)) if isinstance(value, Sheet) else cast("Run", value)
        return stream.serve(run, entry)

    def use(self, entry: Cached[Thing], now_s: float) -> None:
        """Say that a reader has been given something of it."""
        if isinstance(entry.value, Sheet) and entry.value.unread:
            self.cache.touch(entry, now_s)
        else:
            self.cache.use(entry, now_s)

    def on_its_way(self, part: Part, start: QueueOffset) -> Load[Thing | None] | None:
        """The load that a reader of a queue offset has to wait for next, if there is one."""
        layout = self.layout(part)
        block = INDEX if layout is None else layout.block_of(start)
        return self._load(key_of(part, block))

    def has(self, part: Part, start: QueueOffset) -> bool:
        """Whether what holds a queue offset is here or on its way."""
        return self.find(part, start) is not None or self.on_its_way(part, start) is not None

    def _load(self, key: Key) -> Load[Thing | None] | None:
        load = self._loads.get(key)
        return None if load is None or load.is_over else load

    def claim(
        self,
        stream: Stream,
        view: LifeView,
        start: QueueOffset,
        window: int,
        *,
        urgent: bool = False,
    ) -> Begun:
        """Plan what a reader needs next, and claim as much of it as there is room for; then ``begin`` it.

        Args:
            view: What it reads. (Another read of this stream may have gone on to a newer one.)
            urgent: It waits for the first of it.
        """
        # Read-ahead comes in small bits, and would take each bit of room that comes free before who waits for a large one.
        if self._waiting and not urgent:
            return []
        plan = plan_claims(view, start, window, self, self._settings, until=stream.until)
        begun: Begun = []
        stream.asked = plan.asked
        for claim in plan.claims:
            if begun and claim.layout is None and self.is_known(key_of(claim.part, INDEX)):
                continue  # it comes along with what was claimed a moment ago
            if not self._make_room(stream, claim.size_bytes, is_needed=urgent and not begun):
                stream.fall_back(claim.part.log_offset)
                break
            # Only the first is waited for: the others would go before what other readers wait for.
            load: Load[Thing | None] = Load(stream, urgent and not begun, claim.size_bytes)
            self._loads.update(dict.fromkeys(claim.keys, load))
            begun.append((Bid(stream, claim), load))
            if stream.sweep is not None and claim.layout is None and claim.blocks:
                begun += self._beside(stream.sweep, *begun[-1])
        return begun

    def _make_room(self, stream: Stream, size_bytes: int, *, is_needed: bool) -> bool:
        if stream.until >= 0 and not is_needed:
            # It will be wanted for sure, and can be asked for later. So nothing goes for it that others will want as surely:
            # each would drop what the next is about to read, and all of it would be read again and again.
            return self.cache.reserve_gently(size_bytes)
        has_room, dropped = self.cache.reserve(size_bytes)
        self._lose(dropped)
        return has_room

    def _beside(self, sweep: Beside, bid: Bid, leader: Load[Thing | None]) -> Begun:
        """Claim what lies beside a section and is wanted by the same reader, as far as there is room.

        What is small and plain becomes one load with it, which costs a tenth of as many loads.
        """
        if bid.claim.is_plain:
            self._take_strip(sweep, bid, leader)
            return []
        begun: Begun = []
        for stream, one in sweep.beside(bid.claim.part, self.is_known):
            claim = whole_claim(one, self._settings)
            if not self.cache.reserve_gently(claim.size_bytes):
                break
            load: Load[Thing | None] = Load(stream, False, claim.size_bytes, leader=leader)
            self._loads.update(dict.fromkeys(claim.keys, load))
            stream.take_along(one.queue_offset, one.count, one.log_offset, one.log_bytes)
            begun.append((Bid(stream, claim), load))
        return begun

    def _take_strip(self, sweep: Beside, bid: Bid, load: Load[Thing | None]) -> None:
        strip, more_bytes = sweep.strip(bid.claim.part, self.is_known), 0
        while strip is not None:
            more_bytes = max(strip.size_bytes - load.size_bytes, 0)
            if self.cache.reserve_gently(more_bytes):
                break
            strip = strip.nearest(len(strip) // 2) if len(strip) > STRIP_MIN else None
        if strip is None:
            return
        bid.strip = strip
        load.size_bytes += more_bytes
        self._loads.update(dict.fromkeys(strip.keys, load))
        names = ("queue_offset", "count", "log_offset", "log_bytes")
        for queue, *place in zip(
            strip.queues, *(strip.rows[name].tolist() for name in names), strict=True
        ):
            if (stream := sweep.stream(queue)) is not None:
                load.streams.add(stream)
                stream.take_along(*place)

    # Who waits for room gets it in turn, or a large record would wait for ever behind small ones

    def claim_urgently(
        self, waiting: LoadWaiter, stream: Stream, view: LifeView, start: QueueOffset, window: int
    ) -> Begun:
        """Claim what a reader waits for; nothing when others have waited longer, or there is no room: it is in the row."""
        begun: Begun = []
        if not self._waiting or self._waiting[0] is waiting:
            begun = self.claim(stream, view, start, window, urgent=True)
        if not begun and not waiting.has_queued:
            waiting.has_queued = True
            self._waiting.append(waiting)
        return begun

    def step_out(self, waiting: LoadWaiter) -> None:
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
                its = owner.stream(value.batch.records.queue) if isinstance(owner, Sweep) else owner
                if isinstance(its, Stream):
                    its.lose(value.batch.log_offset)
            elif isinstance(owner, Sweep) and isinstance(value, Sheet):
                for queue, log_offset in value.unread_places():
                    if (stream := owner.stream(queue)) is not None:
                        stream.lose(log_offset)

    def _count_unread(self, entry: Cached[Thing]) -> None:
        value, size_bytes = entry.value, entry.size_bytes
        if isinstance(value, Sheet):
            size_bytes = size_bytes * value.unread // len(value.strip)
        self.unread_bytes += size_bytes

    # Without it

    def resize(self, bytes_max: int) -> None:
        """Have another budget: what is too much is dropped, as for whatever comes."""
        with self.lock:
            self._lose(self.cache.resize(bytes_max))
            self.room.notify_all()

    def begin(self, begun: Begun) -> None:
        """Ask for what was claimed."""
        if begun:
            self._loader.begin([self._job(bid, load) for bid, load in begun])

    def hurry(self, load: Load[Thing | None]) -> None:
        """Somebody waits for it now."""
        self._loader.hurry(load)

    def forsake(self, stream: Stream, *, has_done: bool = False) -> None:
        """A reader has gone elsewhere: drop what was read ahead for it, and do not send what was not sent.

        What came for several readers stays until all of them have done.
        """
        with self.lock:
            unread = self.cache.of_owner(stream)
            if has_done and stream.sweep is not None and stream.sweep.leave(stream):
                unread += self.cache.of_owner(stream.sweep)
            for entry in unread:
                self._count_unread(entry)
                self.cache.drop(entry)
            loads = {id(x): x for x in self._loads.values() if stream in x.streams}.values()
            for load in loads:
                load.streams.discard(stream)
            unwanted = [load for load in loads if not load.streams and not load.is_urgent]
        # Without the lock: a request that was not sent ends here and now, and its end takes the lock.
        for load in unwanted:
            self._loader.cancel(load)

    def _job(self, bid: Bid, load: Load[Thing | None]) -> Job[Thing | None]:
        if bid.strip is not None:
            return self._strip_job(bid, bid.strip, load)
        claim = bid.claim
        part, layout = claim.part, claim.layout
        wanted: list[SectionRange] = []
        if layout is None:
            wanted.append(part.index)
            if claim.blocks and part.log_bytes:
                wanted.append(part.log)
        else:
            begin, end = layout.span(claim.blocks)
            if end > begin:
                wanted.append(part.log.part_of(begin - part.log_offset, end - part.log_offset))
        return Job(
            load,
            wanted,
            lambda pieces: self._arrive(claim, load, pieces),
            lambda error: self._end(bid, load, error),
        )

    def _strip_job(self, bid: Bid, strip: Strip, load: Load[Thing | None]) -> Job[Thing | None]:
        return Job(
            load,
            (),
            partial(self._arrive_together, bid.stream.sweep, strip, load),
            lambda error: self._end(bid, load, error),
            WidePlan(strip.bundle.key, (ByteRange(strip.start, strip.end),)),
        )

    def _arrive_together(
        self,
        sweep: Beside | None,
        strip: Strip,
        load: Load[Thing | None],
        pieces: list[memoryview],
    ) -> None:
        """Put a strip into the cache. What cannot be decoded is asked for by itself.

        Nothing is returned: readers of several queues wait for it, and each finds its own.
        """
        data = compact(pieces.pop(), self._memory) if pieces else None  # what else came is not kept
        things = [] if data is None else decode_strip(strip, data, self._loader.prefix)
        now_s = self._clock.monotonic_s()
        with self.lock:
            self.cache.release(load.size_bytes)
            load.size_bytes = 0
            if sweep is not None and sum(len(keys) for _, keys in things) < len(strip):
                sweep.leave_out(strip.bundle.key)
            for thing, keys in things if not self.is_closed else ():
                self.cache.put(Cached(thing, keys, thing.size_bytes, owner=sweep), now_s)

    def _arrive(self, claim: Claim, load: Load[Thing | None], pieces: list[memoryview]) -> Thing:
        """Make of the bytes what was wanted, and put it into the cache."""
        layout, run = claim.layout, None
        if layout is None:
            layout = self._lay_out(claim.part, pieces.pop(0))
        if claim.blocks:
            data = pieces[0] if pieces else memoryview(b"")
            run = self._decode(cast("Stream", load.stream).queue, layout, claim, data)
        now_s = self._clock.monotonic_s()
        with self.lock:
            # Now, and not in `_end`: what is put takes this room, and in between it would be counted twice.
            self.cache.release(load.size_bytes)
            load.size_bytes = 0
            if self.is_closed:
                return layout if run is None else run
            is_one = claim.layout is None and len(claim.blocks) == 1
            if claim.layout is None and not is_one:
                key = key_of(claim.part, INDEX)
                self.cache.put(Cached(layout, (key,), layout.size_bytes, shelf=Shelf.INDEX), now_s)
            if run is not None:
                keys = [key for key in claim.keys if is_one or key[-1] != INDEX]
                entry: Cached[Thing] = Cached(run, keys, run.size_bytes, owner=load.stream)
                self.cache.put(entry, now_s)
        return layout if run is None else run

    def _lay_out(self, part: Part, raw: memoryview) -> PartLayout:
        assert len(raw) == part.count * ITEM_BYTES
        items = decode_items(part, part.queue_offset, raw, where=self._loader.prefix)
        return PartLayout.of(part, items, self._settings.block_bytes)

    def _decode(
        self, queue: MessageQueue, layout: PartLayout, claim: Claim, data: memoryview
    ) -> Run:
        part, where = layout.part, self._loader.prefix
        begin = part.log_offset if claim.layout is None else layout.span(claim.blocks)[0]
        items = layout.items_of(claim.blocks)
        if claim.layout is not None:
            items = (
                items.copied()
            )  # else the arrays of the whole index would stay as long as this run
        return Run.of(
            decode_records(queue, part, items, compact(data, self._memory), begin, where=where)
        )

    def _end(self, bid: Bid, load: Load[Thing | None], error: BaseException | None) -> None:
        """It is here, or will not come."""
        begun: Begun = []
        now_s = self._clock.monotonic_s()
        with self.lock:
            self.cache.release(load.size_bytes)
            for key in bid.keys:
                # Once it was over, and before this, it may have been asked for again: then the name is another load's.
                if self._loads.get(key) is load:
                    del self._loads[key]
            if error is not None:
                # What was truncated, or is told to somebody who waits, is no sign that the store is in trouble.
                may_pause = not isinstance(error, CancelledError) and not load.is_urgent
                for stream, log_offset in bid.places():
                    stream.fall_back(log_offset)
                    if may_pause:
                        stream.paused_s = now_s + PAUSE_SECONDS
            elif not bid.claim.blocks and not load.is_urgent:
                begun = self._go_on(bid.stream)
            self.room.notify_all()
        self.begin(begun)
