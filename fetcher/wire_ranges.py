"""Ranges of data objects for one lookup, by way of the fetcher's requests: within its limits, hedged, with a deadline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.errors import InvalidRangeError, ShortReadError
from fetcher.asking import AskingStore
from tiered.errors import DataError
from tiered.log.objects import read_planned, read_range

if TYPE_CHECKING:
    from collections.abc import Hashable

    from backends.base import ObjectStore
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
            store: Theirs.
            prefix: Of the broker.
            stream: Who takes turns with the others.
            clock: For the deadline.
            deadline_s: Monotonic.
        """
        self._asking = AskingStore(transfers, store, stream, clock, deadline_s)
        self._prefix = prefix
        self._trailers: dict[str, Trailer] = {}

    def read(self, place: ObjectRange, start: int, end: int) -> memoryview:
        """See ``Ranges``.

        Raises:
            StoreUnavailableError: Not before the deadline.
        """
        known = self._trailers.get(place.key)
        try:
            data, self._trailers[place.key] = read_planned(
                place, start, end, self._asking.ask, where=self._prefix, known=known
            )
        except (InvalidRangeError, ShortReadError, DataError):
            return read_range(self._asking, self._prefix, place, start, end)
        return data
