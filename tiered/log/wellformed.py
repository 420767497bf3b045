"""Whether what entries and checkpoints say has the right types. Pure.

A right checksum proves that bytes are as they were written, not that a writer of ours wrote them: whoever may write into
the bucket can compute it. So types and ranges are checked where JSON becomes values, once; whether the values make sense
together is replay's business, and ``tiered.log.verify_report``'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

INT_MAX = 2**62
"""Offsets, sizes and times are below this, so that sums of two fit into 64 bits."""
KEY_CHARS_MAX = 1024
_INT_SET = {int}
_NUMBERS = frozenset(
    ("epoch", "queue_id", "incarnation", "segment", "start", "end", "was", "count", "life")
) | {"min_from", "min_to"}
_TEXTS = frozenset(("do", "topic", "reason"))
_OBJECTS = frozenset(("holder", "store"))


def check_action(action: Mapping[str, Any]) -> None:
    """Check the fields that every version has in common.

    Raises:
        ValueError: One is of a wrong type or out of range.
        TypeError: It is not an object.
    """
    if not isinstance(action, dict):
        raise TypeError("an action is not an object")
    for name, value in action.items():
        if name in _NUMBERS:
            check_ints((value,), name)
        elif (name in _TEXTS and type(value) is not str) or (
            name in _OBJECTS and type(value) is not dict
        ):
            raise ValueError(f"{name} is {value!r:.80}")


def check_ints(values: Iterable[Any], what: str) -> None:
    """Check that all are whole numbers from -1 to ``INT_MAX``.

    Raises:
        ValueError: One is not.
    """
    found = tuple(values)
    if not found:
        return
    if set(map(type, found)) != _INT_SET or min(found) < -1 or max(found) >= INT_MAX:
        raise ValueError(f"{what} is {found!r:.200}")


def check_texts(values: Iterable[Any], what: str) -> None:
    """Check that all are texts.

    Raises:
        ValueError: One is not.
    """
    for value in values:
        if type(value) is not str:
            raise ValueError(f"{what} is {value!r:.80}")


def check_key(key: Any) -> None:  # noqa: ANN401 (JSON values)
    """Check that it may be the key of an object.

    Raises:
        ValueError: It has another form.
    """
    if type(key) is not str or not 0 < len(key) <= KEY_CHARS_MAX:
        raise ValueError(f"an object's key is {key!r:.80}")
