"""What lies below a store's prefix and is no object of it: names that no key can have, links, devices.

Others write into the same bucket or folder, and one odd name of theirs must stop nothing. So listings leave such things out,
and the store remembers them here for whoever has to name them (``tiered verify``, ``doctor``, ``gc``).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from backends.base import ObjectStore

NAMES_MAX = 10_000
"""So many are remembered; of more it is only known that there are."""


class ForeignNames:
    """What listings of one store have left out. Any thread may call anything."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: dict[str, None] = {}

    def note(self, name: str | bytes) -> None:
        """Remember one, by its whole name below the store's prefix."""
        text = printable(name)
        with self._lock:
            if len(self._names) < NAMES_MAX:
                self._names[text] = None

    def below(self, prefix: str) -> list[str]:
        """All that begin with ``prefix``, fit to be printed, sorted."""
        with self._lock:
            return sorted(name for name in self._names if name.startswith(prefix))


@runtime_checkable
class NotingStore(Protocol):
    """A store that remembers what its listings left out."""

    @property
    def foreign(self) -> ForeignNames:
        """What they were."""
        ...


def foreign_below(store: ObjectStore, prefix: str) -> list[str]:
    """What listings of a store, or of the one that it wraps, have met below ``prefix`` and left out. Asks nothing."""
    inner: object = store
    while inner is not None:
        if isinstance(inner, NotingStore):
            return inner.foreign.below(prefix)
        inner = getattr(inner, "inner", None)
    return []


def printable(name: str | bytes) -> str:
    r"""A name as text that any terminal and any document bears: what cannot be shown is ``\xff``, ``\n`` and the like."""
    if isinstance(name, bytes):
        name = name.decode("utf-8", "backslashreplace")
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in name
    )
