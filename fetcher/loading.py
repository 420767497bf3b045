"""From ranges of a section to their checked bytes, by way of requests that others make.

A ``Load`` is one thing that is on its way: the requests for its bytes, and a future of what is made of them. Bytes are
checked, and what they say is decoded, in the thread that brings the last of them. What fails its check that way is read
again by itself, as ``tiered.log.sections.read_ranges`` reads it: that knows how to do without a damaged block table.

Where a packed section keeps its blocks only its block table says. So a load of such takes two steps when the table is not
here: the table, then the blocks. Whoever asks for a part's index first has the table come along.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from backends.errors import BackendError, InvalidRangeError, ShortReadError
from tiered.errors import DataError, TieredStoreError
from tiered.log.sections import SectionPlan, plan_ranges, read_ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from backends.base import ObjectStore
    from fetcher.requests import Data
    from fetcher.transfers import Transfers
    from tiered.log.parts import SectionRange
    from tiered.log.sections import OpenSection

V = TypeVar("V")

SECTIONS_MAX = 2048
"""Sections that are read in pieces whose block tables are remembered. Each takes 12 bytes a block and half a KiB; a packed
one, which has a dictionary, 100 KiB more."""


@dataclass(slots=True, eq=False)
class Load(Generic[V]):
    """Something on its way.

    Attributes:
        stream: For whom it was asked first.
        is_urgent: Somebody waits for it.
        size_bytes: Room that is reserved for it.
        future: Ends with the thing, or with why it cannot be had.
        requests: What brings its bytes.
        leader: What it comes along with, as its neighbour: it is asked for as that is.
        is_over: It is here or will not come; set before the future ends, so that nobody waits for it once more.
    """

    stream: Hashable
    is_urgent: bool
    size_bytes: int
    future: Future[V] = field(default_factory=Future)
    requests: list[Future[Data]] = field(default_factory=list)
    leader: Load[V] | None = None
    is_over: bool = False


@dataclass(slots=True, eq=False)
class Job(Generic[V]):
    """What a load is to bring.

    Attributes:
        load: What is on its way from now on.
        wanted: Ranges, all of one section, none empty; there may be none.
        make: Gets the bytes of each; called once, in whatever thread brings the last of them.
        end: Called once, just before the future ends, with its error, if that is how. Before, since whoever waits for the
            future runs as soon as it has ended, and would only wait for this thread's locks. (A callback of the future
            would also keep the load: what has been read would stay in memory until the collector comes.)
        plan: What is asked for.
    """

    load: Load[V]
    wanted: Sequence[SectionRange]
    make: Callable[[list[memoryview]], V]
    end: Callable[[BaseException | None], None]
    plan: SectionPlan | None = None


class Loader:
    """Asks for ranges of sections, and checks them. For any thread."""

    def __init__(
        self, store: ObjectStore, prefix: str, transfers: Transfers, *, table_bytes: int
    ) -> None:
        self._store = store
        self._table_bytes = table_bytes
        self.prefix = prefix
        self.transfers = transfers
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[str, int], OpenSection] = OrderedDict()
        self._memory_bytes = 0

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
                _Gathering(self, job).begin()

    def _plan_job(self, job: Job[V]) -> bool:
        try:
            job.plan = self.plan(job.wanted) if job.wanted else None
        except DataError as error:
            _fail(job, error)
            return False
        return True

    def plan(self, wanted: Sequence[SectionRange], known: OpenSection | None = None) -> SectionPlan:
        """What to ask for, given what is known of the section.

        Raises:
            DataError: The journal contradicts itself.
        """
        return plan_ranges(wanted, where=self.prefix, known=known or self._known(wanted[0]))

    def ask(self, load: Load[V], plan: SectionPlan) -> None:
        """Make the requests of a plan those of the load.

        Raises:
            TieredStoreError: The fetcher is closed, or too much is waiting.
        """
        self._ask_all([(load, plan)], urgent=_is_urgent(load))

    def _ask_all(self, planned: Sequence[tuple[Load[V], SectionPlan]], *, urgent: bool) -> None:
        ranges = [(number, one) for number, (_, plan) in enumerate(planned) for one in plan.ranges]
        # Streams take turns by bytes: what is small goes first, or it would wait for a turn behind what is large.
        order = sorted(range(len(ranges)), key=lambda at: ranges[at][1].size_bytes)
        wanted = []
        for at in order:
            load, plan = planned[ranges[at][0]]
            wanted.append((load.stream, self.prefix + plan.wants[0].key, ranges[at][1]))
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

    def __init__(self, loader: Loader, job: Job[V]) -> None:
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
            self._finish()
        for request in requests:
            request.add_done_callback(self._arrived)

    def _arrived(self, _: Future[Data]) -> None:
        with self._lock:
            self._missing -= 1
            if self._missing:
                return
        self._finish()

    def _finish(self) -> None:
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

    def _take(self, plan: SectionPlan) -> list[memoryview] | None:
        """Check what has come; None when that only says what to ask for, which is done."""
        requests = list(self._load.requests)
        if any(request.cancelled() for request in requests):
            raise CancelledError
        try:
            pieces = [request.result() for request in requests]
        except (InvalidRangeError, ShortReadError):
            return self._loader.read(plan)
        if not plan.is_first:
            return self._loader.check(plan, pieces)
        self._plan = self._loader.plan_on(plan, pieces[0])
        if self._plan is None:  # the block table is damaged
            return self._loader.read(plan)
        self._load.requests.clear()
        self._loader.ask(self._load, self._plan)
        return None
