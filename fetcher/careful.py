"""Reading near damage: piece by piece, so that what is sound comes out, and what is damaged costs only itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from fetcher.asking import AskingStore
from tiered.errors import DataError
from tiered.log.reader import QueueReader

if TYPE_CHECKING:
    from collections.abc import Hashable

    from backends.base import ObjectStore
    from fetcher.transfers import Transfers
    from tiered.clock import Clock
    from tiered.log.decode import TierBatch
    from tiered.log.view import LifeView
    from tiered.model import QueueOffset

CAREFUL_BYTES = 64 * 1024
"""How much is read at once where something is damaged."""


class CarefulReader:
    """Reads past the cache and its budget, by requests of its own, with the deadline of the read that it is for."""

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
