"""The kinds of values that options take: what stands for one in help, and what makes one of a text.

What reads a text raises ``ValueError`` with what is wrong and how it should look.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from backends.lazy_dataclass import dataclass
from tiered.addresses import address
from tiered.cli.values import (
    Moment,
    format_duration,
    parse_duration,
    parse_size,
    seconds_above_zero,
    seconds_not_below_zero,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiered.dispatch.settings import Compression

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """A kind of value."""

    metavar: str  # what stands for it in help, with its unit
    parse: Callable[[str], T]
    """Makes a value of a text; raises ``ValueError`` or ``InvalidError`` with what is wrong."""
    choices: tuple[str, ...] = ()  # the only texts allowed, when there are any


def one_of(metavar: str, *choices: str) -> Kind[str]:
    """Takes only some texts."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"{text!r} is none of {', '.join(choices)}")
        return text

    return Kind(metavar, parse, choices)


ISOLATION: Kind[str] = one_of("LEVEL", "read_committed", "read_uncommitted")
"""What is seen of Kafka's transactions."""


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None


def not_below_zero(text: str) -> float:
    """A finite number, 0 at least."""
    number = _number(text)
    if not (number >= 0 and math.isfinite(number)):
        raise ValueError(f"{text} must not be below 0")
    return number


def share(text: str) -> float:
    """A number from 0 to 1."""
    number = _number(text)
    if not 0 <= number <= 1:
        raise ValueError(f"{text} is not a share: give a number from 0 to 1")
    return number


def whole(low: int) -> Callable[[str], int]:
    """Takes a whole number, ``low`` at least."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise ValueError(f"{text!r} is no whole number") from None
        if number < low:
            raise ValueError(f"{number} must be at least {low}")
        return number

    return parse


def incarnation(text: str) -> str:
    """``all``, or a whole number."""
    return text if text == "all" else str(whole(0)(text))


def start(text: str) -> str | Moment:
    """``earliest``, ``latest``, or a time."""
    return text if text in {"earliest", "latest"} else Moment(text)


def pair(text: str) -> str:
    """``NAME=VALUE``."""
    name, equals, _ = text.partition("=")
    if not (name.strip() and equals):
        raise ValueError("write NAME=VALUE")  # the text may hold a token
    return text


class TopicDuration(NamedTuple):
    """A duration for the topics that a glob fits."""

    glob: str
    duration_ms: int

    def __str__(self) -> str:
        return f"{self.glob}={format_duration(self.duration_ms)}"


def topic_duration(text: str) -> TopicDuration:
    """``GLOB=DURATION``."""
    glob, _, duration = text.rpartition("=")
    return TopicDuration(glob.strip(), parse_duration(duration.strip()))


def compression(text: str) -> str:
    """``zstd``, ``zstd:LEVEL`` or ``none``."""
    name, colon, level = text.partition(":")
    if text != "none" and (name != "zstd" or (colon and not level)):
        raise ValueError(f"it is zstd, zstd:LEVEL or none, not {text!r}")
    if colon:
        whole(1)(level)
    return text


def compression_of(text: str) -> Compression | None:
    """How ``zstd``, ``zstd:LEVEL`` or ``none`` compresses; None: not at all."""
    from tiered.dispatch.settings import Compression

    _, _, level = text.partition(":")
    return None if text == "none" else Compression(int(level)) if level else Compression()


def destination(text: str) -> str:
    """``iceberg:CATALOG#NAMESPACE``; without a namespace it is ``default``."""
    kind, _, rest = text.partition(":")
    if kind != "iceberg" or not rest.partition("#")[0]:
        raise ValueError("write iceberg:CATALOG#NAMESPACE, the catalog as a URI or by its name")
    return text


_NOT_PARQUET = re.compile(
    r"\.(csv|tsv|txt|json|jsonl|ndjson|xlsx?|ods|html?|md|xml|yaml|arrow|feather|ipc|orc|avro|db|duckdb|sqlite3?)"
    r"(\.(gz|zst|zstd|bz2|xz|zip|lz4))?/*$",
    re.IGNORECASE,
)


def parquet_name(text: str) -> str:
    """The name of what is written as Parquet: a name that promises another form is a mistake."""
    found = _NOT_PARQUET.search(text)
    if found:
        raise ValueError(
            f"{text!r} is named as {found[1].lower()}, and what is written is Parquet: name it .parquet"
        )
    return text


COUNT = Kind("N", whole(1))  # at least one
NUMBER = Kind("N", whole(0))
AMOUNT = Kind("N", not_below_zero)
SHARE = Kind("RATIO", share)
SIZE = Kind("SIZE", parse_size)
DURATION_MS = Kind("DURATION", parse_duration)
DURATION_S = Kind("DURATION", seconds_above_zero)
DURATION_S_FROM_0 = Kind("DURATION", seconds_not_below_zero)
TIME = Kind("TIME", Moment)
PAIR = Kind("NAME=VALUE", pair)
DIR, FILE, URL, NAME, GLOBS = (
    Kind(metavar, str) for metavar in ("DIR", "FILE", "URL", "NAME", "GLOB,...")
)
ADDRESS = Kind("HOST:PORT", address)
