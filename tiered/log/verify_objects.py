"""Reads whole objects, and checks those with a trailer: of the key index, and quarantined records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zlib_ng import zlib_ng

from backends.errors import BackendError, ObjectNotFoundError
from tiered.errors import DataError, InvalidError
from tiered.format.object import parse_trailer
from tiered.log.verify_report import Finding

if TYPE_CHECKING:
    from backends.base import ObjectStore
    from tiered.format.object import Trailer


def read_object(store: ObjectStore, prefix: str, key: str, found: Finding) -> memoryview | None:
    """An object's bytes; None when it is missing or cannot be read, which is then in ``found``."""
    try:
        data = memoryview(store.get(prefix + key))
    except ObjectNotFoundError:
        found.missing.append(key)
        return None
    except BackendError as error:
        found.problem("unreadable", prefix + key, f"{type(error).__name__}: {error}")
        return None
    found.object_count += 1
    found.object_bytes += len(data)
    return data


def check_object(stored: memoryview, tail: bytes, key: str, found: Finding) -> Trailer | None:
    """Check an object's trailer and each block of what is before it; None when the trailer is no proof."""
    try:
        trailer = parse_trailer(tail, where=key)
    except (DataError, InvalidError) as error:
        found.problem("trailer", key, error.what)
        return None
    block = trailer.block_bytes
    for number, crc in enumerate(trailer.block_crcs):
        piece = stored[number * block : (number + 1) * block]
        if zlib_ng.crc32(piece) != crc:
            start = number * block
            found.problem(
                "block", key, f"bytes [{start}, {start + len(piece)}) fail their checksum"
            )
    return trailer


def check_quarantined(store: ObjectStore, prefix: str, key: str) -> Finding:
    """Check an object that no journal entry has the size and checksum of: by what it says itself."""
    found = Finding()
    data = read_object(store, prefix, key, found)
    if data is None:
        return found
    try:
        size = parse_trailer(bytes(data), where=key).payload_bytes
    except (DataError, InvalidError) as error:
        found.problem("trailer", prefix + key, error.what)
        return found
    trailer = check_object(data[:size], bytes(data[size:]), prefix + key, found)
    if trailer and trailer.payload_bytes + trailer.trailer_bytes != len(data):
        found.problem("size", prefix + key, "it is longer or shorter than it says")
    return found
