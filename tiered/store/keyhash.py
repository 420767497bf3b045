"""Which keys a record is found by, and their hashes, many at a time.

A key is hashed as ``topic#key`` by Java's ``String.hashCode``, made non-negative. The hash of a joined text follows from
those of its parts, so keys of one length in ASCII are hashed as the rows of one array.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from tiered.format.properties import java_hash

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiered.format.block import RecordBlock

Longs = npt.NDArray[np.int64]
_UNIQUE: Final = b"UNIQ_KEY\x01"
_KEYS: Final = b"KEYS\x01"
_INT: Final = 0xFFFF_FFFF


def key_hash(topic: str, key: str) -> int:
    """The hash of one key, as an index file stores it."""
    return _magnitude(java_hash(f"{topic}#{key}"))


def keys_of(raw: bytes) -> list[bytes]:
    """The keys of a record by its stored properties: the unique one first, then those of ``KEYS``."""
    unique = _value(raw, _UNIQUE)
    keys = _value(raw, _KEYS)
    found = [unique] if unique else []
    if keys:
        found += [key for key in keys.split(b" ") if key]
    return found


def hashes_of(block: RecordBlock, indices: Longs, topic: str) -> tuple[Longs, Longs]:
    """The keys' hashes of the records at ``indices``, all of one topic.

    Returns:
        The hashes, and for each which of the block's records it belongs to; in the records' order.
    """
    view = memoryview(block.buffer)
    starts = block.properties_positions[indices]
    ends = starts + block.properties_sizes[indices]
    keys: list[bytes] = []
    counts: list[int] = []
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        found = keys_of(bytes(view[start:end]))
        keys += found
        counts.append(len(found))
    return _hash_all(keys, topic), np.repeat(indices, counts)


def _value(raw: bytes, name: bytes) -> bytes:
    """The value of a property; the last that is not empty, as a parser of all of them has it."""
    end = len(raw)
    while (at := raw.rfind(name, 0, end)) >= 0:
        if at == 0 or raw[at - 1] == 2:  # noqa: PLR2004 (the end of a pair)
            start = at + len(name)
            stop = raw.find(b"\x02", start)
            value = raw[start:] if stop < 0 else raw[start:stop]
            if value:
                return value
        end = at + len(name) - 1
    return b""


def _hash_all(keys: Sequence[bytes], topic: str) -> Longs:
    found = np.zeros(len(keys), np.int64)
    by_length: dict[int, list[int]] = {}
    for number, key in enumerate(keys):
        by_length.setdefault(len(key), []).append(number)
    lead = java_hash(f"{topic}#") & _INT
    for length, numbers in by_length.items():
        found[numbers] = _hash_rows([keys[number] for number in numbers], length, lead, topic)
    return found


def _hash_rows(keys: list[bytes], length: int, lead: int, topic: str) -> Longs:
    joined = b"".join(keys)
    if not joined.isascii():
        texts = [key.decode("utf-8", "replace") for key in keys]
        return np.array([key_hash(topic, text) for text in texts], np.int64)
    powers = np.array([pow(31, length - 1 - at, 1 << 32) for at in range(length)], np.uint64)
    rows = np.frombuffer(joined, np.uint8).reshape(len(keys), length)
    value = (rows * powers).sum(axis=1) + np.uint64(lead * pow(31, length, 1 << 32) & _INT)
    signed = (value & np.uint64(_INT)).astype(np.uint32).view(np.int32).astype(np.int64)
    magnitude: Longs = np.abs(signed)
    magnitude[signed == -(1 << 31)] = 0
    return magnitude


def _magnitude(value: int) -> int:
    return 0 if value == -(1 << 31) else abs(value)
