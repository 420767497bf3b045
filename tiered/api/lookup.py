"""Messages by key, for the Python API."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiered.api.message import message_of_hit
from tiered.api.stores import backend_errors
from tiered.index.reader import IndexReader, Wish

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from backends.base import ObjectStore
    from tiered.api.message import Message
    from tiered.log.state import TierState

_THREADS = 8


@dataclass(frozen=True, slots=True)
class Found:
    """What a lookup by key found; iterates over the messages.

    Attributes:
        messages: Newest first.
        unscanned: Messages that no index covers yet and that were not looked at, for the limit of 256 MiB; 0: all were.
    """

    messages: list[Message]
    unscanned: int

    def __iter__(self) -> Iterator[Message]:
        return iter(self.messages)

    def __len__(self) -> int:
        return len(self.messages)


class Lookups:
    """Looks keys up in one tier; keeps the filters of its index in memory. For any thread."""

    def __init__(
        self, store: ObjectStore, prefix: str, *, memory_bytes: int, tell: Callable[[int], None]
    ) -> None:
        """Start nothing yet.

        Args:
            store: The tier's.
            prefix: Of the broker.
            memory_bytes: Budget of the filters.
            tell: Told what of it they take.
        """
        self._pool = ThreadPoolExecutor(_THREADS, "tiered-query")
        limits = {"filter_bytes_max": memory_bytes}
        self._reader = IndexReader(store, prefix, **limits, tell=tell, spread=self._pool.map)

    def find(self, state: TierState, wish: Wish) -> Found:
        """Look a key up.

        Raises:
            DataError: Something that may hold one is damaged.
            StoreUnavailableError: The store does not answer.
        """
        with backend_errors():
            found = self._reader.lookup(state, wish)
        if found.damaged:
            raise found.damaged[0]
        return Found([message_of_hit(hit) for hit in found.hits], found.unscanned)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)
