"""Times as people write them: RFC 3339, a date (its first moment in UTC), ``now-2h``, or epoch milliseconds (all digits)."""

from __future__ import annotations

import re
from datetime import UTC, datetime

_NOW = re.compile(r"now(?:([+-])((?:\d+(?:ms|[smhdw]))+))?", re.IGNORECASE)
_STEP = re.compile(r"(\d+)(ms|[smhdw])", re.IGNORECASE)
_DURATION = re.compile(r"(?:\d{1,12}(?:ms|[smhdw]))+", re.IGNORECASE | re.ASCII)
_RFC3339 = re.compile(
    r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(?:\.\d+)?(?:[Zz]|[+-]\d\d:\d\d)", re.ASCII
)
_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_UNIT_MS = {
    "ms": 1,
    "s": 1000,
    "m": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
    "w": 604_800_000,
}
TIME_MS_MAX = 253_402_300_799_999
"""The last millisecond of the year 9999."""


def parse_time(text: str, now_ms: int) -> int:
    """UTC milliseconds that ``text`` stands for.

    Raises:
        ValueError: It is no time; the message says what one looks like.
    """
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
        f"{text!r} is no time: write 2026-07-01T12:00:00Z, 2026-07-01, now-2h, or milliseconds since 1970"
    )


def parse_duration(text: str) -> int:
    """Milliseconds that ``text`` stands for: ``36h``, ``7d``, ``1d12h``; units ms s m h d w.

    Raises:
        ValueError: It is no duration.
    """
    if not _DURATION.fullmatch(text):
        raise ValueError(f"{text!r} is no duration: write 36h or 7d")
    return sum(int(count) * _UNIT_MS[unit.lower()] for count, unit in _STEP.findall(text))


def format_duration(duration_ms: int) -> str:
    """As ``1d12h``; ``0s`` for nothing."""
    left, text = duration_ms, ""
    for unit in ("w", "d", "h", "m", "s", "ms"):
        count, left = divmod(left, _UNIT_MS[unit])
        text += f"{count}{unit}" if count else ""
    return text or "0s"


def check_time(text: str) -> str:
    """The text itself, once it is known to be a time (what ``now`` is, shows later).

    Raises:
        ValueError: It is none.
    """
    parse_time(text, 0)
    return text


def span_text(start: str | None, end: str | None) -> str:
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
