"""Parsers of the values that options take; each raises ``ValueError`` with what is wrong."""

from __future__ import annotations

import math

from tiered.cli.times import check_time


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is no number") from None


def above_zero(text: str) -> float:
    """A finite number above 0."""
    number = _number(text)
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(f"{text} must be above 0")
    return number


def not_below_zero(text: str) -> float:
    """A finite number, 0 at least."""
    number = _number(text)
    if not (number >= 0 and math.isfinite(number)):
        raise ValueError(f"{text} must not be below 0")
    return number


def whole(text: str, *, low: int) -> int:
    """A whole number, ``low`` at least."""
    try:
        number = int(text)
    except ValueError:
        raise ValueError(f"{text!r} is no whole number") from None
    if number < low:
        raise ValueError(f"{number} must be at least {low}")
    return number


def incarnation(text: str) -> str:
    """``all``, or a whole number."""
    return text if text == "all" else str(whole(text, low=0))


def start(text: str) -> str:
    """``earliest``, ``latest``, or a time."""
    return text if text in {"earliest", "latest"} else check_time(text)


def pair(text: str) -> str:
    """``NAME=VALUE``."""
    name, equals, _ = text.partition("=")
    if not (name.strip() and equals):
        raise ValueError("write NAME=VALUE")  # the text may hold a token
    return text


def compression(text: str) -> str:
    """``zstd``, ``zstd:LEVEL`` or ``none``."""
    if text != "none":
        compression_level(text)
    return text


def compression_level(text: str) -> int | None:
    """The level that ``zstd:LEVEL`` names; None for ``zstd`` alone.

    Raises:
        ValueError: It is neither.
    """
    name, colon, level = text.partition(":")
    if name != "zstd" or (colon and not level):
        raise ValueError(f"it is zstd, zstd:LEVEL or none, not {text!r}")
    return whole(level, low=1) if colon else None


def destination(text: str) -> str:
    """``iceberg:CATALOG#NAMESPACE``; without a namespace it is ``default``."""
    kind, _, rest = text.partition(":")
    if kind != "iceberg" or not rest.partition("#")[0]:
        raise ValueError("write iceberg:CATALOG#NAMESPACE, the catalog as a URI or by its name")
    return text


def split_address(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``; an IPv6 address stands in brackets.

    Raises:
        ValueError: It is none.
    """
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ValueError(f"{text!r} is no HOST:PORT")
    return host.strip("[]"), int(port)


def address(text: str) -> str:
    """``HOST:PORT``, as it stands."""
    split_address(text)
    return text


def addresses(text: str) -> str:
    """One or more ``HOST:PORT``, between semicolons, as they stand."""
    split_addresses(text)
    return text


def split_addresses(text: str) -> list[tuple[str, int]]:
    """Hosts and ports of ``HOST:PORT;...``.

    Raises:
        ValueError: One has no host or no port, or there is none.
    """
    found = [split_address(one.strip()) for one in text.split(";") if one.strip()]
    if not found or not all(host and port for host, port in found):
        raise ValueError(f"{text!r} is no HOST:PORT;...")
    return found
