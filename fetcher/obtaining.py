"""Obtaining the run that a reader needs now: from the stock, from what is on its way, or by asking for it and waiting.

Ordering and room
    Whoever waits for room waits in a row (``fetcher.stock``). A wait ends with the run, with the deadline, or with the
    error of what was waited for; what had been read ahead and failed is asked for once more.

For any thread; holds nothing of its own.
"""

from __future__ import annotations

from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, cast

from backends.errors import BackendError, ObjectNotFoundError
from fetcher.runs import Run
from fetcher.stock import NOTHING, Stock, Thing, Waiting
from tiered.errors import ClosedError, StoreUnavailableError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from fetcher.streams import Stream
    from tiered.clock import Clock
    from tiered.log.parts import Part
    from tiered.log.view import LifeView
    from tiered.model import QueueOffset


class Obtainer:
    """See the module."""

    def __init__(self, stock: Stock, clock: Clock, prefix: str) -> None:
        """Wait for what comes into a stock; ``prefix`` of the broker is for messages."""
        self._stock = stock
        self._clock = clock
        self._prefix = prefix

    def __call__(  # noqa: PLR0917 (one caller, in this order)
        self,
        stream: Stream,
        view: LifeView,
        part: Part,
        start: QueueOffset,
        window: int,
        deadline_s: float,
    ) -> Run:
        """The run that holds ``start``, asked for if it is not here, with so many bytes behind it.

        Args:
            stream: Who reads.
            view: What.
            part: The part of it that holds ``start``.
            start: Queue offset.
            window: Bytes to ask for from there on, if anything has to be asked for.
            deadline_s: Monotonic.

        Raises:
            StoreUnavailableError: Not before the deadline.
            DataError: It is damaged.
            BackendError: It could not be read.
        """
        waiting = Waiting()
        try:
            while True:
                run = self._try(waiting, stream, view, part, start, window, deadline_s)
                if run is not None:
                    return run
        finally:
            if waiting.has_queued:
                with self._stock.lock:
                    self._stock.step_out(waiting)

    def _try(  # noqa: PLR0917 (one caller)
        self,
        waiting: Waiting,
        stream: Stream,
        view: LifeView,
        part: Part,
        start: QueueOffset,
        window: int,
        deadline_s: float,
    ) -> Run | None:
        """Take what is here; else wait for what has to come, for room, or for what brings us nearer (None)."""
        stock, begun = self._stock, NOTHING
        with stock.lock:
            if stock.is_closed:
                raise ClosedError("the fetcher has been closed")
            entry = stock.find(part, start)
            if entry is not None:
                stock.waits += waiting.has_waited
                stock.hits += not waiting.has_waited
                return stream.serve(cast("Run", entry.value), entry)
            waiting.has_waited = True
            load = stock.on_its_way(part, start)
            is_ahead = load is not None and not load.is_urgent
            if load is None:
                begun = stock.claim_urgently(waiting, stream, view, start, window)
                if not begun:
                    self._await_room(deadline_s)
                    return None
                load = begun[0][1]
            if waiting.has_queued:
                stock.step_out(waiting)
        stock.begin(begun)
        stock.hurry(load)
        try:
            thing = self._await(load.future, deadline_s)
        except (BackendError, StoreUnavailableError) as error:
            if isinstance(error, ObjectNotFoundError) or not (is_ahead and waiting.may_fail):
                raise
            waiting.may_fail = False  # it was read ahead: who wants it asks for it again, once
            return None
        finally:
            del load, begun  # their error's frames would hold them, and all that our callers have
        if not isinstance(thing, Run) or not thing.base <= start < thing.end:
            return None
        with stock.lock:
            stock.waits += 1
            return stream.serve(thing, stock.find(part, start))

    def _await(self, future: Future[Thing], deadline_s: float) -> Thing | None:
        try:
            return future.result(max(deadline_s - self._clock.monotonic_s(), 0))
        except CancelledError:
            return None  # somebody forsook it: it is asked for again
        except TimeoutError:
            if not future.done():
                raise self._late() from None
            return None if future.cancelled() else future.result()  # it came at that very moment
        finally:
            del future  # as above

    def _await_room(self, deadline_s: float) -> None:
        left_s = deadline_s - self._clock.monotonic_s()
        if left_s <= 0 or not self._stock.room.wait(left_s):
            raise self._late()

    def _late(self) -> StoreUnavailableError:
        return StoreUnavailableError(
            "the tier did not answer before the read's deadline",
            where=self._prefix,
            do="try again, or look at the store with `tiered doctor`",
        )
