"""Lookup by key: index objects by time and filter, the messages not indexed yet by scanning, newest first, exact.

Overview: what may hold the key is made a list of *units*, newest first: index objects whose times and queues fit and whose
filter has the key (one small read of the object each), and parts of queues that no index covers yet. Unit by unit messages
are fetched and checked, until there are as many as were asked for and nothing newer can come.

Complete: what no index covers is read from the tier itself, up to ``scan_bytes_max``; a lookup that had to stop there says
so (``Lookup.unscanned``). Damage costs what is damaged: the rest is found, and ``Lookup.damaged`` names it.

Exact: items are hints. Each message is held against topic, queue, queue offset, key and time itself; what has expired or
was taken back since does not come; none comes twice. Lives of a queue that are over are asked only on request.

An object that is gone (404): the journal is replayed, and all is asked again.

Threads: a reader may be used from any thread at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from backends.errors import ObjectNotFoundError
from tiered.index.asked import COUNT, SCAN_BYTES_MAX, Lookup, Wish
from tiered.index.candidates import Hit, LifeViews
from tiered.index.objects import FILTER_BYTES_MAX, IndexObjects
from tiered.index.search import Means, Search, Spread
from tiered.log.reader import READ_BYTES, TierReader

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.base import ObjectStore
    from tiered.log.state import TierState

__all__ = ["COUNT", "SCAN_BYTES_MAX", "Hit", "IndexReader", "Lookup", "Wish"]
_REPLAYS_MAX: Final = 4


class IndexReader:
    """Looks keys up in one broker's tier.

    Attributes:
        objects: Its index objects, and the filters in memory.
    """

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        *,
        journal: TierReader | None = None,
        filter_bytes_max: int = FILTER_BYTES_MAX,
        tell: Callable[[int], None] = lambda _: None,
        spread: Spread = map,
    ) -> None:
        """Read nothing yet.

        Args:
            store: The tier's.
            prefix: Of the broker, ending in a slash.
            journal: Is refreshed when an object is gone; default: one of its own.
            filter_bytes_max: Budget of the filters that are kept in memory, and, while a lookup runs, of the messages that
                it looks at since no index covers them (or one that is larger).
            tell: See ``IndexObjects``.
            spread: Fetches messages (``map`` of an executor: several at once).
        """
        self.objects = IndexObjects(store, prefix, filter_bytes_max=filter_bytes_max, tell=tell)
        read_bytes = min(READ_BYTES, filter_bytes_max // 2)
        self._means = Means(LifeViews(store, prefix), self.objects, spread, read_bytes)
        self._journal = journal or TierReader(store, prefix)

    def lookup(self, state: TierState, wish: Wish) -> Lookup:
        """Find messages.

        Args:
            state: What the journal says, as new as the answer has to be.
            wish: What is looked for.

        Raises:
            BackendError: The tier did not answer.
            TieredStoreError: The journal cannot be replayed any more.
        """
        for _ in range(_REPLAYS_MAX):
            try:
                return Search(self._means, state, wish, gone_is_damage=False).run()
            except ObjectNotFoundError:  # merged or expired meanwhile, as a rule
                self._journal.refresh()
                if self._journal.state == state:
                    break
                state = self._journal.state
        return Search(self._means, state, wish, gone_is_damage=True).run()
