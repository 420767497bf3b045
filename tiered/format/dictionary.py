"""Dictionaries for packed sections: what the blocks of a topic's records have in common, trained from some of them.

With one, blocks of 128 KiB shrink better than much larger ones do without. Pure, and the same for the same bytes.
"""

from __future__ import annotations

from typing import Final

import zstandard
from typing_extensions import Buffer

from tiered.format.bundle import PACK_LEVEL, PACKED_BLOCK_BYTES

DICTIONARY_BYTES: Final = 32 * 1024
"""Larger ones gain less than they take in the section."""
TRAIN_BYTES_MIN: Final = 512 * 1024
"""Of fewer bytes no dictionary is trained."""
_SAMPLE_BYTES: Final = 2048
_SAMPLES: Final = 40 * DICTIONARY_BYTES // _SAMPLE_BYTES
_TRIALS: Final = 4
_STEPS: Final = 4


def train(payload: Buffer, *, level: int = PACK_LEVEL, size_bytes: int = DICTIONARY_BYTES) -> bytes:
    """A dictionary for these bytes and their like; a sixth of a second.

    Args:
        payload: Records; samples are taken from all over it.
        level: Of zstd, at which it will be used.
        size_bytes: Largest dictionary.

    Returns:
        Nothing when the payload is too small, or has nothing in common with itself.
    """
    view = memoryview(payload).cast("B")
    if len(view) < TRAIN_BYTES_MIN:
        return b""
    step = max(len(view) // _SAMPLES, _SAMPLE_BYTES)
    starts = range(0, len(view) - _SAMPLE_BYTES + 1, step)
    samples: list[bytes | bytearray | memoryview] = [
        bytes(view[start : start + _SAMPLE_BYTES]) for start in starts
    ]
    try:
        found = zstandard.train_dictionary(size_bytes, samples, steps=_STEPS, level=level)
    except zstandard.ZstdError:
        return b""
    return found.as_bytes()


def pays(dictionary: bytes, payload: Buffer, *, level: int = PACK_LEVEL) -> bool:
    """Whether a section of these records is smaller with the dictionary in it, by a few of its blocks."""
    view = memoryview(payload).cast("B")
    if not dictionary or not len(view):
        return False
    known = zstandard.ZstdCompressionDict(dictionary)
    plain = zstandard.ZstdCompressor(level=level)
    helped = zstandard.ZstdCompressor(level=level, dict_data=known, write_dict_id=False)
    step = max(len(view) // _TRIALS, 1)
    blocks = [view[start : start + PACKED_BLOCK_BYTES] for start in range(0, len(view), step)][
        :_TRIALS
    ]
    gain = sum(len(plain.compress(block)) - len(helped.compress(block)) for block in blocks)
    return gain * len(view) > len(dictionary) * sum(map(len, blocks))
