"""The states of all brokers of a tier, or of the one that options name, followed from one read to the next. One thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered.api.broker_place import choose_place, find_places
from tiered.archive.source.options import open_place
from tiered.log.reader import TierReader

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tiered.api.broker_place import Place
    from tiered.log.parts import TierState


class TierStates:
    """Follows the journals."""

    def __init__(self, options: Mapping[str, str]) -> None:
        """Open the store; nothing is read yet.

        Args:
            options: Of a source.

        Raises:
            InvalidError: The URL or an option is wrong.
        """
        self._options = options
        self._store = open_place(options)
        self._readers: dict[Place, TierReader] = {}

    def read(self) -> dict[Place, TierState]:
        """As they are now.

        Raises:
            InvalidError: There is no such tier.
            DataError: A journal is damaged.
            BackendError: The store failed.
        """
        for place in self._places():
            if place not in self._readers:
                self._readers[place] = TierReader(self._store, place.prefix)
            self._readers[place].refresh()
        return {place: reader.state for place, reader in self._readers.items()}

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def _places(self) -> list[Place]:
        cluster, broker = self._options.get("cluster"), self._options.get("broker")
        if cluster is not None and broker is not None:
            return list(self._readers) or [choose_place(self._store, cluster, broker)]
        found = [
            place
            for place in find_places(self._store)
            if cluster in {None, place.cluster} and broker in {None, place.broker}
        ]
        return found or [choose_place(self._store, cluster, broker)]
