"""Reading near damage: piece by piece, so that what is sound comes out, and what is damaged costs only itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from tiered.errors import DataError
from tiered.log.reader import QueueReader

if TYPE_CHECKING:
    from backends.base import ObjectStore
    from tiered.log.decode import TierBatch
    from tiered.log.view import LifeView
    from tiered.model import QueueOffset

CAREFUL_BYTES = 64 * 1024
"""How much is read at once where something is damaged."""


class CarefulReader:
    """Reads by itself, in the caller's thread, past the cache and its budget."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def __call__(
        self, view: LifeView, start: QueueOffset, bytes_max: int, count_max: int
    ) -> TierBatch:
        """Records from ``start`` on, which a part holds, up to what is damaged.

        Raises:
            DataError: The first of them is damaged.
            BackendError: It could not be read.
        """
        reader = QueueReader(self._store, self._prefix, view.queue, view.life)
        try:
            found = reader.read(start, bytes_max=min(bytes_max, CAREFUL_BYTES), count_max=count_max)
        except DataError:
            found = reader.read(start, bytes_max=1, count_max=1)
        return cast("TierBatch", found)
