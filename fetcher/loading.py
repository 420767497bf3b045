"""From a range of a part to its checked bytes, by way of requests that others make.

A ``Load`` is one thing that is on its way: the requests for its bytes, and a future of what is made of them. Bytes are
checked, and what they say is decoded, in the thread that brings the last of them. What fails its check that way is read
again by itself, as ``tiered.log.objects.read_range`` reads it: that knows how to do without a damaged trailer.

Where a packed object keeps its blocks only its trailer says. So a load of such takes two steps when the trailer is not here:
the trailer, then the blocks. Whoever asks for a part's index can have the trailer come along (``trailers``).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, TypeVar

from backends.errors import BackendError, InvalidRangeError, ShortReadError
from tiered.errors import DataError, TieredStoreError
from tiered.log.objects import RangePlan, check_trailer, plan_range, plan_trailer, read_range

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from backends.base import ObjectStore
    from fetcher.requests import Data
    from fetcher.transfers import Transfers
    from tiered.format.part import Trailer
    from tiered.log.parts import ObjectRange

V = TypeVar("V")

TRAILERS_MAX = 2048
"""Trailers of objects that are read in pieces which are remembered. Each takes 300 bytes and 40 for each block; of a packed
object 100 KiB more, since it has a dictionary."""


@dataclass(slots=True, eq=False)
class Load(Generic[V]):
    """Something on its way.

    Attributes:
        stream: For whom it was asked first.
        is_urgent: Somebody waits for it.
        size_bytes: Room that is reserved for it.
        future: Ends with the thing, or with why it cannot be had.
        requests: What brings its bytes.
        is_over: It is here or will not come; set before the future ends, so that nobody waits for it once more.
    """

    stream: Hashable
    is_urgent: bool
    size_bytes: int
    future: Future[V] = field(default_factory=Future)
    requests: list[Future[Data]] = field(default_factory=list)
    is_over: bool = False


Wanted = tuple["ObjectRange", int, int]
"""An object, and the first byte and the end of the range of its payload that is wanted."""


class Loader:
    """Asks for ranges of objects, and checks them. For any thread."""

    def __init__(
        self, store: ObjectStore, prefix: str, transfers: Transfers, *, trailer_bytes: int
    ) -> None:
        self._store = store
        self._trailer_bytes = trailer_bytes
        self.prefix = prefix
        self.transfers = transfers
        self._lock = threading.Lock()
        self._trailers: OrderedDict[str, Trailer] = OrderedDict()
        self._memory_bytes = 0

    def begin(
        self,
        load: Load[V],
        wanted: Sequence[Wanted],
        make: Callable[[list[memoryview]], V],
        end: Callable[[BaseException | None], None],
        *,
        trailers: Sequence[ObjectRange] = (),
    ) -> None:
        """Ask for ranges of payloads, and make something of their bytes.

        Whatever goes wrong becomes the end of ``load.future``.

        Args:
            load: What is on its way from now on.
            wanted: The ranges.
            make: Gets the bytes of each; called once, in whatever thread brings the last of them.
            end: Called once, just before the future ends, with its error, if that is how. Before, since whoever waits for
                the future runs as soon as it has ended, and would only wait for this thread's locks. (A callback of the
                future would also keep the load: what has been read would stay in memory until the collector comes.)
            trailers: Packed objects that will be read in pieces soon, so that their trailers come along if need be.
        """
        try:
            plans = [self._plan(*one) for one in wanted]
            ahead = [one for place in trailers if (one := self._plan_trailer(place)) is not None]
            self.ask(load, [*plans, *ahead])
        except BaseException as error:
            self.cancel(load)
            load.is_over = True
            end(error)
            load.future.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        _Gathering(self, plans, ahead, load, make, end).begin()

    def ask(self, load: Load[V], plans: Sequence[RangePlan]) -> None:
        """Make the requests of these plans those of the load.

        Raises:
            TieredStoreError: The fetcher is closed, or too much is waiting.
        """
        is_urgent = load.is_urgent
        ranges = [(self.prefix + plan.place.key, one) for plan in plans for one in plan.ranges]
        # Streams take turns by bytes: what is small goes first, or it would wait for a turn behind what is large.
        order = sorted(range(len(ranges)), key=lambda number: ranges[number][1].size_bytes)
        asked = self.transfers.ask_all(
            load.stream, [ranges[number] for number in order], urgent=is_urgent
        )
        found = dict(zip(order, asked, strict=True))
        load.requests = [found[number] for number in range(len(ranges))]
        if load.is_urgent and not is_urgent:  # since a moment ago
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

    def read(self, plan: RangePlan) -> memoryview:
        """Read by itself, in this thread, what came to nothing the usual way."""
        data = read_range(self._store, self.prefix, plan.place, plan.start, plan.end)
        return memoryview(bytes(data))  # not the whole object that it may be of

    def check(self, plan: RangePlan, pieces: Sequence[Data]) -> memoryview:
        """The bytes that were planned, checked; read anew where that cannot be done."""
        try:
            data, trailer = plan.check(pieces, where=self.prefix + plan.place.key)
        except DataError:
            return self.read(plan)
        if plan.known is None and plan.high - plan.low < plan.place.payload_bytes:
            self._remember(plan.place.key, trailer)
        return data

    def plan_on(self, plan: RangePlan, tail: Data) -> RangePlan | None:
        """The plan for the blocks, from the trailer that had to come first; None when it is damaged."""
        place = plan.place
        try:
            known = check_trailer(tail, place, where=self.prefix + place.key)
            self._remember(place.key, known)
            return plan_range(place, plan.start, plan.end, where=self.prefix, known=known)
        except DataError:
            return None

    def _plan(self, place: ObjectRange, start: int, end: int) -> RangePlan:
        return plan_range(place, start, end, where=self.prefix, known=self._known(place))

    def _plan_trailer(self, place: ObjectRange) -> RangePlan | None:
        if not place.is_packed or self._known(place) is not None:
            return None
        return plan_trailer(place, where=self.prefix)

    def _known(self, place: ObjectRange) -> Trailer | None:
        with self._lock:
            known = self._trailers.get(place.key)
            if known is not None:
                self._trailers.move_to_end(place.key)
            return known

    def _remember(self, key: str, trailer: Trailer) -> None:
        with self._lock:
            old = self._trailers.pop(key, None)
            kept = self._trailers[key] = replace(trailer, description={})
            self._memory_bytes += kept.memory_bytes - (old.memory_bytes if old else 0)
            while len(self._trailers) > TRAILERS_MAX or self._memory_bytes > self._trailer_bytes:
                self._memory_bytes -= self._trailers.popitem(last=False)[1].memory_bytes


class _Gathering(Generic[V]):
    """Waits for the requests of a load, without a thread of its own; once more when a trailer says what to ask for."""

    def __init__(  # noqa: PLR0917 (one caller)
        self,
        loader: Loader,
        plans: list[RangePlan],
        ahead: list[RangePlan],
        load: Load[V],
        make: Callable[[list[memoryview]], V],
        end: Callable[[BaseException | None], None],
    ) -> None:
        self._loader = loader
        self._left = dict(enumerate(plans))
        self._ahead = ahead
        self._load = load
        self._make = make
        self._end = end
        self._found: dict[int, memoryview] = {}
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
            if self._take():
                self.begin()
                return
            made = self._make([self._found[number] for number in sorted(self._found)])
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
        self._found.clear()
        self._load.requests.clear()  # they hold the bytes, and their callbacks us
        self._end(error)

    def _take(self) -> bool:
        """Check what has come; whether there was something to ask for then."""
        requests = list(self._load.requests)
        if any(request.cancelled() for request in requests):
            raise CancelledError
        left: dict[int, RangePlan] = {}
        at = 0
        for number, plan in self._left.items():
            mine = requests[at : at + len(plan.ranges)]
            at += len(plan.ranges)
            after = self._take_one(number, plan, mine)
            if after is not None:
                left[number] = after
        for plan, request in zip(self._ahead, requests[at:], strict=True):
            with suppress(BackendError):  # whoever needs it asks again
                self._loader.plan_on(plan, request.result())
        self._left, self._ahead = left, []
        if left:
            self._load.requests.clear()
            self._loader.ask(self._load, list(left.values()))
        return bool(left)

    def _take_one(
        self, number: int, plan: RangePlan, requests: Sequence[Future[Data]]
    ) -> RangePlan | None:
        """Keep a range; or what to ask for next, to have it."""
        try:
            pieces = [request.result() for request in requests]
        except (InvalidRangeError, ShortReadError):
            self._found[number] = self._loader.read(plan)
            return None
        after = self._loader.plan_on(plan, pieces[0]) if plan.is_first else None
        if after is None:
            is_damaged = plan.is_first  # its trailer
            read = self._loader.read(plan) if is_damaged else self._loader.check(plan, pieces)
            self._found[number] = read
        return after
