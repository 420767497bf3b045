"""Whether values of rows that are read by hand have the right types; ``tiered.journal.typed`` checks all others. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiered.journal.typed import INT_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable

_INT_SET = {int}


def check_ints(values: Iterable[Any], what: str) -> None:
    """Refuse (``ValueError``) what is not whole numbers from -1 to ``INT_MAX``."""
    found = tuple(values)
    if not found:
        return
    if set(map(type, found)) != _INT_SET or min(found) < -1 or max(found) >= INT_MAX:
        raise ValueError(f"{what} is {found!r:.200}")


def check_texts(values: Iterable[Any], what: str) -> None:
    """Refuse (``ValueError``) what is not texts."""
    for value in values:
        if type(value) is not str:
            raise ValueError(f"{what} is {value!r:.80}")
