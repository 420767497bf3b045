"""From a range of a part to its checked bytes, by way of requests that others make.

A ``Load`` is one thing that is on its way: the requests for its bytes, and a future of what is made of them. Bytes are
checked, and what they say is decoded, in the thread that brings the last of them. What fails its check that way is read
again by itself, as ``tiered.log.objects.read_range`` reads it: that knows how to do without a damaged trailer.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, TypeVar

from backends.errors import BackendError, InvalidRangeError, ShortReadError
from tiered.errors import DataError, TieredStoreError
from tiered.log.objects import RangePlan, plan_range, read_range

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from backends.base import ByteRange, ObjectStore
    from fetcher.transfers import Transfers
    from tiered.format.part import Trailer
    from tiered.log.parts import ObjectRange

V = TypeVar("V")

TRAILERS_MAX = 2048
"""Trailers of objects that are read in pieces which are remembered; half a KiB each, and"""
TRAILER_BLOCKS_MAX = 1 << 16
"""checksums in them, 40 bytes each: 3.6 MiB in all."""


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
    requests: list[Future[bytes]] = field(default_factory=list)
    is_over: bool = False


Wanted = tuple["ObjectRange", int, int]
"""An object, and the first byte and the end of the range of its payload that is wanted."""


class Loader:
    """Asks for ranges of objects, and checks them. For any thread."""

    def __init__(self, store: ObjectStore, prefix: str, transfers: Transfers) -> None:
        self._store = store
        self.prefix = prefix
        self.transfers = transfers
        self._lock = threading.Lock()
        self._trailers: OrderedDict[str, Trailer] = OrderedDict()
        self._blocks = 0

    def begin(
        self,
        load: Load[V],
        wanted: Sequence[Wanted],
        make: Callable[[list[memoryview]], V],
        end: Callable[[], None],
    ) -> None:
        """Ask for ranges of payloads, and make something of their bytes.

        Whatever goes wrong becomes the end of ``load.future``.

        Args:
            load: What is on its way from now on.
            wanted: The ranges.
            make: Gets the bytes of each; called once, in whatever thread brings the last of them.
            end: Called once, when the future has ended. (A callback of the future would be kept by it, and would keep the
                load: what has been read would then stay in memory until the collector of cycles comes.)
        """
        is_urgent = load.is_urgent
        found: dict[tuple[str, ByteRange], Future[bytes]] = {}
        try:
            plans = [self._plan(*one) for one in wanted]
            ranges = [(plan.place.key, one) for plan, _ in plans for one in plan.ranges]
            # Streams take turns by bytes: what is small goes first, or it would wait for a turn behind what is large.
            for key, one in sorted(ranges, key=lambda item: item[1].size_bytes):
                found[key, one] = self.transfers.ask(
                    load.stream, self.prefix + key, one, urgent=is_urgent
                )
                load.requests = [found[item] for item in ranges if item in found]
        except BaseException as error:
            self.cancel(load)
            load.is_over = True
            load.future.set_exception(error)
            end()
            if not isinstance(error, Exception):
                raise
            return
        if load.is_urgent and not is_urgent:  # since a moment ago
            self.hurry(load)
        _Gathering(self, plans, load, make, end).begin()

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

    def check(self, plan: RangePlan, pieces: Sequence[bytes], known: Trailer | None) -> memoryview:
        """The bytes that were planned, checked; read anew where that cannot be done."""
        try:
            data, trailer = plan.check(pieces, known, where=self.prefix + plan.place.key)
        except DataError:
            return self.read(plan)
        if known is None and plan.high - plan.low < plan.place.payload_bytes:
            self._remember(plan.place.key, trailer)
        return data

    def _plan(self, place: ObjectRange, start: int, end: int) -> tuple[RangePlan, Trailer | None]:
        with self._lock:
            known = self._trailers.get(place.key)
        plan = plan_range(place, start, end, where=self.prefix, has_trailer=known is not None)
        return plan, known

    def _remember(self, key: str, trailer: Trailer) -> None:
        with self._lock:
            old = self._trailers.pop(key, None)
            self._trailers[key] = replace(trailer, description={})
            self._blocks += len(trailer.block_crcs) - (len(old.block_crcs) if old else 0)
            while len(self._trailers) > TRAILERS_MAX or self._blocks > TRAILER_BLOCKS_MAX:
                self._blocks -= len(self._trailers.popitem(last=False)[1].block_crcs)


class _Gathering(Generic[V]):
    """Waits for the requests of a load, without a thread of its own."""

    def __init__(
        self,
        loader: Loader,
        plans: list[tuple[RangePlan, Trailer | None]],
        load: Load[V],
        make: Callable[[list[memoryview]], V],
        end: Callable[[], None],
    ) -> None:
        self._loader = loader
        self._plans = plans
        self._load = load
        self._make = make
        self._end = end
        self._lock = threading.Lock()
        self._missing = len(load.requests)

    def begin(self) -> None:
        if not self._missing:
            self._finish()
        for request in list(self._load.requests):
            request.add_done_callback(self._arrived)

    def _arrived(self, _: Future[bytes]) -> None:
        with self._lock:
            self._missing -= 1
            if self._missing:
                return
        self._finish()

    def _finish(self) -> None:
        load, future = self._load, self._load.future
        try:
            made = self._make(self._checked())
        except CancelledError:
            load.is_over = True
            future.cancel()
            future.set_running_or_notify_cancel()
        except BaseException as error:  # noqa: BLE001 (whoever waits for the future handles it)
            load.is_over = True
            if isinstance(error, (TieredStoreError, BackendError)):
                error.__traceback__ = None  # its frames would hold the bytes
            future.set_exception(error)
        else:
            load.is_over = True
            future.set_result(made)
        self._load.requests.clear()  # they hold the bytes, and their callbacks us
        self._end()

    def _checked(self) -> list[memoryview]:
        if any(request.cancelled() for request in self._load.requests):
            raise CancelledError
        at, found = 0, []
        for plan, known in self._plans:
            requests = self._load.requests[at : at + len(plan.ranges)]
            at += len(plan.ranges)
            try:
                pieces = [request.result() for request in requests]
            except (InvalidRangeError, ShortReadError):
                found.append(self._loader.read(plan))
            else:
                found.append(self._loader.check(plan, pieces, known))
        return found
