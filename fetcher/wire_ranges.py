"""Ranges of data objects for one lookup, by way of the fetcher's requests: within its limits, hedged, with a deadline."""

from __future__ import annotations

from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

from backends.errors import InvalidRangeError, ShortReadError
from tiered.errors import DataError, StoreUnavailableError
from tiered.log.objects import read_planned, read_range

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence
    from concurrent.futures import Future

    from backends.base import ByteRange, ObjectStore
    from fetcher.requests import Data
    from fetcher.transfers import Transfers
    from tiered.clock import Clock
    from tiered.format.part import Trailer
    from tiered.log.parts import ObjectRange


class WireRanges:
    """See ``tiered.log.by_time.Ranges``. An object's trailer is read once. For one thread."""

    def __init__(  # noqa: PLR0917 (one caller)
        self,
        transfers: Transfers,
        store: ObjectStore,
        prefix: str,
        stream: Hashable,
        clock: Clock,
        deadline_s: float,
    ) -> None:
        """Read nothing yet.

        Args:
            transfers: Make the requests.
            store: Theirs; for reading anew what is damaged.
            prefix: Of the broker.
            stream: Who takes turns with the others.
            clock: For the deadline.
            deadline_s: Monotonic.
        """
        self._transfers = transfers
        self._store = store
        self._prefix = prefix
        self._stream = stream
        self._clock = clock
        self._deadline_s = deadline_s
        self._trailers: dict[str, Trailer] = {}

    def read(self, place: ObjectRange, start: int, end: int) -> memoryview:
        """See ``Ranges``.

        Raises:
            StoreUnavailableError: Not before the deadline.
        """
        known = self._trailers.get(place.key)
        try:
            data, self._trailers[place.key] = read_planned(
                place, start, end, self._get, where=self._prefix, known=known
            )
        except (InvalidRangeError, ShortReadError, DataError):
            return read_range(self._store, self._prefix, place, start, end)
        return data

    def _get(self, key: str, ranges: Sequence[ByteRange]) -> list[Data]:
        asked = [
            self._transfers.ask(self._stream, key, one, urgent=True, deadline_s=self._deadline_s)
            for one in ranges
        ]
        try:
            return [self._await(future) for future in asked]
        finally:
            for future in asked:
                future.cancel()

    def _await(self, future: Future[Data]) -> Data:
        try:
            return future.result(max(self._deadline_s - self._clock.monotonic_s(), 0))
        except (TimeoutError, CancelledError):
            if future.done() and not future.cancelled():
                return future.result()  # it came at that very moment
            raise StoreUnavailableError(
                "the tier did not answer before the deadline", where=self._prefix, do="try again"
            ) from None
