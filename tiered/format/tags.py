"""Tag codes: hashes by which a reader can filter by tag without reading the records."""

from __future__ import annotations

import sys
from array import array


def java_hash(text: str) -> int:
    """Java's ``String.hashCode``: ``h = 31 h + unit`` over UTF-16 units, signed, 32 bits."""
    units = array("H", text.encode(f"utf-16-{sys.byteorder[0]}e", "surrogatepass"))
    value = 0
    for unit in units:
        value = (31 * value + unit) & 0xFFFF_FFFF
    return value - (value >> 31 << 32)


def tag_hash(tags: str | None) -> int:
    """The tag code of a message with this ``TAGS`` property; 0 when it is absent or empty.

    (Entries of ``SCHEDULE_TOPIC_XXXX`` are the exception: their tag code is the time of delivery.)
    """
    return java_hash(tags) if tags else 0
