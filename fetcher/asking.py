"""A store whose reads are requests of a fetcher: within its limits, in turn with the others, hedged, with a deadline."""

from __future__ import annotations

from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, cast

from backends.wrapping import WrappingStore
from tiered.errors import DataError, StoreUnavailableError
from tiered.log.reader import QueueReader

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence
    from concurrent.futures import Future

    from backends.base import ByteRange, ObjectStore
    from fetcher.requests import Data
    from fetcher.transfers import Transfers
    from tiered.clock import Clock
    from tiered.log.decode import TierBatch
    from tiered.log.view import LifeView
    from tiered.model import QueueOffset


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


CAREFUL_BYTES = 64 * 1024
"""How much is read at once where something is damaged."""


class CarefulReader:
    """Reads near damage, piece by piece: what is sound comes out, and what is damaged costs only itself.

    It goes past the cache and its budget, by requests of its own, with the deadline of the read that it is for.
    """

    def __init__(self, transfers: Transfers, store: ObjectStore, prefix: str, clock: Clock) -> None:
        self._transfers = transfers
        self._store = store
        self._prefix = prefix
        self._clock = clock

    def __call__(  # noqa: PLR0917 (one caller, in this order)
        self,
        stream: Hashable,
        view: LifeView,
        start: QueueOffset,
        bytes_max: int,
        count_max: int,
        deadline_s: float,
    ) -> TierBatch:
        """Records from ``start`` on, which a part holds, up to what is damaged.

        Raises:
            DataError: The first of them is damaged.
            StoreUnavailableError: They did not come before the deadline.
            BackendError: They could not be read.
        """
        store = AskingStore(self._transfers, self._store, stream, self._clock, deadline_s)
        reader = QueueReader.of_life(store, self._prefix, view.queue, view.life)
        try:
            found = reader.read(start, bytes_max=min(bytes_max, CAREFUL_BYTES), count_max=count_max)
        except DataError:
            found = reader.read(start, bytes_max=1, count_max=1)
        return cast("TierBatch", found)
