"""What a request says: its named values as numbers, and its body as JSON; or a refusal, as a broker refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tiered.format.fastjson import JsonError, loads
from tiered.mount.codes import Code, RefusalError

if TYPE_CHECKING:
    from tiered.format.remoting import Command

LONG_MAX: Final = (1 << 63) - 1
NAME_CHARS_MAX: Final = 255
"""Of a topic, a group or a client's id."""


def text(request: Command, name: str, otherwise: str | None = None) -> str:
    """A value.

    Raises:
        RefusalError: There is none, and no other.
    """
    found = request.fields.get(name, otherwise)
    if found is None:
        raise RefusalError(Code.SYSTEM_ERROR, f"the request has no {name}")
    return found


def name(request: Command, field: str) -> str:
    """A name that must be there.

    Raises:
        RefusalError: It is not, or too long.
    """
    return checked_name(text(request, field), field)


def checked_name(found: object, what: str) -> str:
    """The name itself.

    Raises:
        RefusalError: It is none, or too long.
    """
    if not isinstance(found, str) or not 0 < len(found) <= NAME_CHARS_MAX:
        raise RefusalError(Code.INVALID_PARAMETER, f"{what} has 1 to {NAME_CHARS_MAX} characters")
    return found


def whole(request: Command, name: str, otherwise: int | None = None) -> int:
    """A whole number of 64 bits.

    Raises:
        RefusalError: There is none, and no other; or it is no number.
    """
    found = text(request, name, None if otherwise is None else str(otherwise))
    try:
        number = int(found) if len(found) <= len(str(-LONG_MAX)) else LONG_MAX + 1
    except ValueError:
        number = LONG_MAX + 1
    if not -LONG_MAX <= number <= LONG_MAX:
        raise RefusalError(Code.SYSTEM_ERROR, f"{name} is no number of 64 bits: {found[:30]!r}")
    return number


def flag(request: Command, name: str, *, otherwise: bool) -> bool:
    """Yes or no."""
    return text(request, name, str(otherwise)).lower() == "true"


def document(request: Command) -> dict[str, Any]:
    """The body, a JSON object.

    Raises:
        RefusalError: It is none.
    """
    try:
        found = loads(request.text())
    except JsonError as error:
        raise RefusalError(Code.SYSTEM_ERROR, f"the body is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise RefusalError(Code.SYSTEM_ERROR, "the body is no JSON object")
    return found


def objects(value: object) -> list[dict[str, Any]]:
    """The objects of a list; what is none is left out."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
