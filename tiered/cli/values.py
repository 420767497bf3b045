"""Values as people write and read them: sizes, counts, times and durations.

What reads a text raises ``ValueError`` with what is wrong and how it should look.
"""

from __future__ import annotations

import json
import math
import re
from datetime import UTC, datetime
from decimal import Decimal
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from backends.lazy_dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from tiered.api.broker_place import Place

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)", re.IGNORECASE | re.ASCII)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_NAMES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_STEP_BYTES = 1024
_BYTES_MAX = 1 << 62


def parse_size(text: str) -> int:
    """Bytes that ``text`` stands for: ``KiB MiB GiB TiB`` (1,024 to a step; also ``k m g t``) or ``KB MB GB TB`` (1,000)."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise ValueError(f"{text!r} is not a size: write 50MiB, 1.5GB, or bytes")
    step = 1000 if match[4] and match[2] and not match[3] else _STEP_BYTES
    size = float(match[1]) * float(step ** _POWERS[match[2].lower()])
    if not size < _BYTES_MAX:
        raise ValueError(f"{text!r} is more bytes than there are")
    return round(size)


def format_size(size_bytes: float) -> str:
    """As ``12.3 MiB``."""
    power = min(int(math.log(max(size_bytes, 1), _STEP_BYTES) + 1e-9), len(_NAMES) - 1)
    scaled = size_bytes / _STEP_BYTES**power
    digits = 0 if power == 0 or scaled >= 100 else 1  # noqa: PLR2004 (three digits tell enough)
    return f"{scaled:.{digits}f} {_NAMES[power]}"


def size_text(size_bytes: int) -> str:
    """As an option takes it: ``16MiB``, with the largest unit that divides it."""
    for power in range(len(_NAMES) - 1, 0, -1):
        count, rest = divmod(size_bytes, _STEP_BYTES**power)
        if count and not rest:
            return f"{count}{_NAMES[power]}"
    return str(size_bytes)


def few(names: Sequence[str], count_max: int) -> str:
    """The first names, and how many more there are."""
    more = len(names) - count_max
    return ", ".join(names[:count_max]) + (f" and {more} more" if more > 0 else "")


def format_count(count: int) -> str:
    """As ``1,234,567``."""
    return f"{count:,}"


def counted(count: int, one: str, many: str = "") -> str:
    """A number of things, as ``1 message`` or ``1,234 messages``."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


_NOW = re.compile(r"now(?:([+-])((?:\d+(?:ms|[smhdw]))+))?", re.IGNORECASE)
_STEP = re.compile(r"(\d+)(ms|[smhdw])", re.IGNORECASE)
_DURATION = re.compile(r"(?:\d{1,12}(?:ms|[smhdw]))+", re.IGNORECASE | re.ASCII)
_SECONDS = re.compile(r"\d{1,12}(?:\.\d{1,9})?", re.ASCII)
_PLAIN = re.compile(rf"-?{_SECONDS.pattern}(?:[eE]-?\d{{1,2}})?", re.ASCII)
_RFC3339 = re.compile(
    r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(?:\.\d+)?(?:[Zz]|[+-]\d\d:\d\d)", re.ASCII
)
_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_UNIT_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
TIME_MS_MAX = 253_402_300_799_999
"""The last millisecond of the year 9999."""


def parse_time(text: str, now_ms: int) -> int:
    """UTC milliseconds that ``text`` stands for."""
    if text.isascii() and text.isdigit() and int(text) <= TIME_MS_MAX:
        return int(text)
    if match := _NOW.fullmatch(text):
        steps = _STEP.findall(match[2] or "")
        total = sum(int(count) * _UNIT_MS[unit.lower()] for count, unit in steps)
        return now_ms - total if match[1] == "-" else now_ms + total
    if _DATE.fullmatch(text):
        text += "T00:00:00Z"
    if _RFC3339.fullmatch(text):
        try:
            return _epoch_ms(datetime.fromisoformat(text.upper()))
        except ValueError:
            pass  # as the 31st of February: said below
    raise ValueError(
        f"{text!r} is not a time: write 2026-07-01T12:00:00Z, 2026-07-01, now-2h, or milliseconds since 1970"
    )


def parse_duration(text: str) -> int:
    """Milliseconds that ``text`` stands for: ``36h``, ``7d``, ``1d12h``; units ms s m h d w; a plain number is seconds."""
    if _SECONDS.fullmatch(text):
        return round(float(text) * 1000)
    if not _DURATION.fullmatch(text):
        raise ValueError(f"{text!r} is not a duration: write 36h, 7d, or a number of seconds")
    return sum(int(count) * _UNIT_MS[unit.lower()] for count, unit in _STEP.findall(text))


def seconds_above_zero(text: str) -> float:
    """Seconds that a duration stands for, above 0."""
    found = _seconds(text)
    if not found > 0:
        raise ValueError(f"{text} must be above 0")
    return found


def seconds_not_below_zero(text: str) -> float:
    """Seconds that a duration stands for, 0 at least."""
    found = _seconds(text)
    if not found >= 0:
        raise ValueError(f"{text} must not be below 0")
    return found


def _seconds(text: str) -> float:
    """Plain numbers as they are: less than a millisecond, and what is below 0, which the callers refuse."""
    return float(text) if _PLAIN.fullmatch(text) else parse_duration(text) / 1000


def format_duration(duration_ms: int) -> str:
    """As ``1d12h``; ``0s`` for nothing."""
    left, text = duration_ms, ""
    for unit in ("w", "d", "h", "m", "s", "ms"):
        count, left = divmod(left, _UNIT_MS[unit])
        text += f"{count}{unit}" if count else ""
    return text or "0s"


@dataclass(frozen=True, slots=True)
class Moment:
    """A time as it was given; which one ``now`` is, shows later."""

    text: str

    def __post_init__(self) -> None:
        parse_time(self.text, 0)

    def __str__(self) -> str:
        return self.text

    def ms(self, now_ms: int) -> int:
        """UTC milliseconds."""
        return parse_time(self.text, now_ms)


def span_text(start: Moment | None, end: Moment | None) -> str:
    """As `` between 2026-07-01 and now``, of times as they were given; "" without any."""
    if start and end:
        return f" between {start} and {end}"
    if start or end:
        return f" stored at or after {start}" if start else f" stored before {end}"
    return ""


def format_time(timestamp_ms: int) -> str:
    """RFC 3339 in UTC with milliseconds; ``-`` for a negative or impossible time."""
    if not 0 <= timestamp_ms <= TIME_MS_MAX:
        return "-"
    seconds, rest = divmod(timestamp_ms, 1000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest:03d}Z"


def _epoch_ms(moment: datetime) -> int:
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return since.days * 86_400_000 + since.seconds * 1000 + since.microseconds // 1000


def topic_filter(globs: Sequence[str], excluded: Sequence[str] = ()) -> Callable[[str], bool]:
    """Whether a topic fits one of the globs (all, without any) and none of the excluding ones."""

    def takes(topic: str) -> bool:
        wanted = not globs or any(fnmatchcase(topic, glob) for glob in globs)
        return wanted and not any(fnmatchcase(topic, glob) for glob in excluded)

    return takes


def broker_filter(globs: Sequence[str]) -> Callable[[Place], bool]:
    """Whether a broker fits one of the globs (all, without any) by its name, or as ``CLUSTER/BROKER``."""

    def takes(place: Place) -> bool:
        names = place.broker, f"{place.cluster}/{place.broker}"
        return not globs or any(fnmatchcase(name, glob) for name in names for glob in globs)

    return takes


def is_glob(text: str) -> bool:
    """Whether a glob may fit more than the topic of its own name."""
    return any(sign in text for sign in "*?[")


def unmatched(globs: Iterable[str], topics: Collection[str]) -> list[str]:
    """The globs that no topic fits."""
    return [glob for glob in globs if not any(fnmatchcase(topic, glob) for topic in topics)]


class _Safe(dict[int, str]):
    """What stands for each character, made when it is first met."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        self[code] = char if char.isprintable() else char.encode("unicode_escape").decode()
        return self[code]


SAFE = _Safe()
"""For ``str.translate``: nothing that a terminal would obey is left."""


_ENCODE = json.JSONEncoder(ensure_ascii=False, check_circular=False).encode


def json_text(value: object) -> str:
    """JSON on one line. A ``Decimal`` is a number with all its digits, which ``json`` itself has no way to write."""
    try:
        return _ENCODE(value)
    except TypeError:
        pass
    match value:
        case Decimal():
            return f"{value:f}"
        case dict():
            pairs = (f"{_ENCODE(name)}: {json_text(inner)}" for name, inner in value.items())
            return "{" + ", ".join(pairs) + "}"
        case list() | tuple():
            return f"[{', '.join(map(json_text, value))}]"
        case _:
            return _ENCODE(value)


def printable(value: object) -> str:
    """One cell of a table, without anything that a terminal would obey."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case Decimal():
            return f"{value:,f}"
        case list() | tuple() if not any(isinstance(one, list | tuple | dict) for one in value):
            return ", ".join(map(printable, value))
        case list() | tuple() | dict():
            text = json_text(value)
        case _:
            text = str(value)
    return text if text.isprintable() else text.translate(SAFE)
