"""Sizes as people write them: ``50MiB``, ``1.5GB``, or plain bytes; and numbers as people read them."""

from __future__ import annotations

import math
import re

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)", re.IGNORECASE | re.ASCII)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_NAMES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_STEP = 1024
_BYTES_MAX = 1 << 62


def parse_size(text: str) -> int:
    """Bytes that ``text`` stands for: ``KiB MiB GiB TiB`` (1,024 to a step; also ``k m g t``) or ``KB MB GB TB`` (1,000).

    Raises:
        ValueError: It is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise ValueError(f"{text!r} is no size: write 50MiB, 1.5GB, or bytes")
    step = 1000 if match[4] and match[2] and not match[3] else _STEP
    size = float(match[1]) * float(step ** _POWERS[match[2].lower()])
    if not size < _BYTES_MAX:
        raise ValueError(f"{text!r} is more bytes than there are")
    return round(size)


def format_size(size_bytes: float) -> str:
    """As ``12.3 MiB``."""
    power = min(int(math.log(max(size_bytes, 1), _STEP) + 1e-9), len(_NAMES) - 1)
    scaled = size_bytes / _STEP**power
    digits = 0 if power == 0 or scaled >= 100 else 1  # noqa: PLR2004 (three digits tell enough)
    return f"{scaled:.{digits}f} {_NAMES[power]}"


def format_count(count: int) -> str:
    """As ``1,234,567``."""
    return f"{count:,}"


def counted(count: int, one: str, many: str = "") -> str:
    """A number of things, as ``1 message`` or ``1,234 messages``.

    Args:
        count: How many.
        one: The word for one.
        many: For any other number; without it, the word with an s.
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"
