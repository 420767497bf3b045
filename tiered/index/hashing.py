"""The 64-bit hash of (topic, key): one key in plain Python, many at once with NumPy.

A text is hashed as its UTF-8 bytes, 8 at a time (little-endian words, the last one filled up with zeros)::

    h = seed ^ (size * SIZE_MULTIPLIER)
    for each word:  h = (h ^ word) * WORD_MULTIPLIER;  h ^= h >> 32
    h = (h ^ h >> 29) * END_MULTIPLIER;  h ^= h >> 32            all mod 2^64

The topic's hash, with the seed 0, is the seed of the key's. Words instead of single characters, as Java's ``hashCode`` has
them, make it an eighth of the work; and 64 bits tell keys apart before any message is read. It is no cryptographic hash:
who chooses keys that collide makes lookups of those keys slow, and never wrong, since the key is checked on the message.
"""

from __future__ import annotations

import functools
from typing import Final

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from tiered.format.block import bytes_at

SIZE_MULTIPLIER: Final = 0x9E37_79B9_7F4A_7C15
WORD_MULTIPLIER: Final = 0xBF58_476D_1CE4_E5B9
END_MULTIPLIER: Final = 0x94D0_49BB_1331_11EB
WORD: Final = 8
_MASK: Final = 2**64 - 1
_ENDS: Final = np.array([_MASK] + [2 ** (8 * n) - 1 for n in range(1, WORD)], np.uint64)
"""Which bits of the last word belong to the text, by its size mod 8."""

Hashes = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]


def hash_bytes(text: bytes, seed: int = 0) -> int:
    """The hash of one text."""
    value = seed ^ (len(text) * SIZE_MULTIPLIER & _MASK)
    for start in range(0, len(text), WORD):
        value = (value ^ int.from_bytes(text[start : start + WORD], "little")) * WORD_MULTIPLIER
        value &= _MASK
        value ^= value >> 32
    value = (value ^ value >> 29) * END_MULTIPLIER & _MASK
    return value ^ value >> 32


@functools.lru_cache(maxsize=4096)
def topic_seed(topic: str) -> int:
    """What hashes of a topic's keys begin with."""
    return hash_bytes(topic.encode("utf-8", "surrogateescape"))


def key_hash(topic: str, key: str) -> int:
    """The hash of one key of a topic."""
    return hash_bytes(key.encode("utf-8", "surrogateescape"), topic_seed(topic))


def hash_many(buffer: Buffer, starts: Indices, sizes: Indices, seed: int | Hashes) -> Hashes:
    """The hashes of many texts that lie in one buffer.

    Args:
        buffer: Holds them, and at least 7 more bytes behind the last.
        starts: int64[n], where each begins.
        sizes: int64[n], in bytes.
        seed: Of the topic; or that of each text.
    """
    found = sizes.astype(np.uint64)
    found *= np.uint64(SIZE_MULTIPLIER)
    found ^= np.uint64(seed) if isinstance(seed, int) else seed
    if len(sizes):
        _absorb(found, bytes_at(buffer, "<u8"), starts, sizes)
    found ^= found >> np.uint64(29)
    found *= np.uint64(END_MULTIPLIER)
    found ^= found >> np.uint64(32)
    return found


def _absorb(found: Hashes, words: npt.NDArray[np.uint64], starts: Indices, sizes: Indices) -> None:
    """Take in word after word; only texts that have one take part."""
    full, longest = int(sizes.min()) // WORD, int(sizes.max())
    for number in range(full):
        found ^= words[starts + WORD * number]
        found *= np.uint64(WORD_MULTIPLIER)
        found ^= found >> np.uint64(32)
    for begun in range(full * WORD, longest, WORD):
        where = np.flatnonzero(sizes > begun)
        left = sizes[where] - begun
        word = words[starts[where] + begun]
        word &= _ENDS[np.where(left < WORD, left, 0)]
        some = found[where]
        some ^= word
        some *= np.uint64(WORD_MULTIPLIER)
        some ^= some >> np.uint64(32)
        found[where] = some
