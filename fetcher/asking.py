"""A store whose reads are requests of a fetcher: within its limits, in turn with the others, hedged, with a deadline."""

from __future__ import annotations

from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

from backends.wrapping import WrappingStore
from tiered.errors import StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence
    from concurrent.futures import Future

    from backends.base import ByteRange, ObjectStore
    from fetcher.requests import Data
    from fetcher.transfers import Transfers
    from tiered.clock import Clock


class AskingStore(WrappingStore):
    """Reads ranges by asking for them, until one moment; everything else is the store's own. For one read of one reader."""

    def __init__(
        self,
        transfers: Transfers,
        store: ObjectStore,
        stream: Hashable,
        clock: Clock,
        deadline_s: float,
    ) -> None:
        """Ask for nothing yet.

        Args:
            transfers: Make the requests.
            store: Theirs.
            stream: Who takes turns with the others.
            clock: For the deadline.
            deadline_s: Monotonic.
        """
        super().__init__(store)
        self._transfers = transfers
        self._stream = stream
        self._clock = clock
        self._deadline_s = deadline_s

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """See ``ObjectStore``.

        Raises:
            StoreUnavailableError: Not before the deadline.
        """
        if byte_range is None:
            return super().get(key)
        return bytes(self.ask(key, [byte_range])[0])

    def get_ranges(self, key: str, byte_ranges: Sequence[ByteRange]) -> list[bytes]:
        """See ``ObjectStore``.

        Raises:
            StoreUnavailableError: Not before the deadline.
        """
        return [bytes(data) for data in self.ask(key, byte_ranges)]

    def ask(self, key: str, byte_ranges: Sequence[ByteRange]) -> list[Data]:
        """As ``get_ranges``, without a copy.

        Raises:
            StoreUnavailableError: Not before the deadline.
        """
        asked = [
            self._transfers.ask(self._stream, key, one, urgent=True, deadline_s=self._deadline_s)
            for one in byte_ranges
        ]
        found: list[Data] = []
        try:
            while asked:
                found.append(self._await(asked.pop(0), key))
        finally:
            while asked:
                asked.pop().cancel()
        return found

    def _await(self, future: Future[Data], key: str) -> Data:
        try:
            return future.result(max(self._deadline_s - self._clock.monotonic_s(), 0))
        except (TimeoutError, CancelledError):
            if future.done() and not future.cancelled():
                return future.result()  # it came at that very moment
            raise StoreUnavailableError(
                "the tier did not answer before the deadline", where=key, do="try again"
            ) from None
        finally:
            future.cancel()
            del (
                future
            )  # it holds the error, whose frames would hold it and all that our callers have
