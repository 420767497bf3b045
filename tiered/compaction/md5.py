"""MD5 of many texts at once, with NumPy: the digest by which an offset map tells keys apart.

The compression function of RFC 1321 works on columns: one element a text, some thousand texts at a time, so that the state
stays in the processor's cache. No Python object is made for a text. It tells keys apart as both systems do that are
compacted alike (RocketMQ, Kafka), whose maps it can be held against; it protects nothing.
"""

from __future__ import annotations

from math import sin
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from tiered.format.block import bytes_at

if TYPE_CHECKING:
    from typing_extensions import Buffer


Digests = npt.NDArray[np.uint64]
"""uint64[n, 2], each digest's 16 bytes as two little-endian words."""
Indices = npt.NDArray[np.int64]

BLOCK_BYTES: Final = 64
_LENGTH_BYTES: Final = 8
_PIECE_TEXTS: Final = 4096
_BEGIN: Final = (0x67452301, 0xEFCDAB89, 0x98BADCFE, 0x10325476)
_ADDED: Final = [np.uint32(int(abs(sin(step + 1)) * 2**32)) for step in range(64)]
_TURNS: Final = [(7, 12, 17, 22), (5, 9, 14, 20), (4, 11, 16, 23), (6, 10, 15, 21)]
_WORDS: Final = [(1, 0), (5, 1), (3, 5), (7, 0)]
"""Of each round: word ``(factor * step + first) mod 16`` of the block is added in a step."""

_Column = npt.NDArray[np.uint32]


def digest_many(buffer: Buffer, starts: Indices, sizes: Indices) -> Digests:
    """The MD5 digests of many texts that lie in one buffer.

    Args:
        buffer: Holds them; nothing outside of them is looked at.
        starts: int64[n], where each begins.
        sizes: int64[n], in bytes.
    """
    found = np.empty((len(starts), 2), np.uint64)
    blocks = (sizes + _LENGTH_BYTES) // BLOCK_BYTES + 1
    for count in np.flatnonzero(np.bincount(blocks)).tolist():
        where = np.flatnonzero(blocks == count)
        for at in range(0, len(where), _PIECE_TEXTS):
            some = where[at : at + _PIECE_TEXTS]
            found[some] = _digest(_padded(buffer, starts[some], sizes[some], count))
    return found


def _padded(buffer: Buffer, starts: Indices, sizes: Indices, blocks: int) -> npt.NDArray[np.uint32]:
    """uint32[words, n]: texts that fill so many blocks, as MD5 has them: 0x80, zeros, and the size in bits."""
    width = blocks * BLOCK_BYTES
    rows = np.empty((len(starts), width), np.uint8)
    every = bytes_at(buffer, f"V{width}")
    last = memoryview(buffer).nbytes - width
    near = starts > last
    rows.view(f"V{width}")[~near, 0] = every[starts[~near]]
    if near.any():  # at the buffer's end there is less to copy than a row has
        end = np.frombuffer(memoryview(buffer).cast("B"), np.uint8)[-width:]
        padded = np.concatenate((end, np.zeros(width, np.uint8)))
        shift = starts[near] - (memoryview(buffer).nbytes - len(end))
        rows.view(f"V{width}")[near, 0] = bytes_at(padded.data, f"V{width}")[shift]
    rows[np.arange(width) >= sizes[:, None]] = 0
    rows[np.arange(len(rows)), sizes] = 0x80
    rows[:, -_LENGTH_BYTES:] = (8 * sizes).astype("<u8").view(np.uint8).reshape(-1, _LENGTH_BYTES)
    return np.ascontiguousarray(rows.view("<u4").T)


def _digest(words: npt.NDArray[np.uint32]) -> Digests:
    state = [np.full(words.shape[1], value, np.uint32) for value in _BEGIN]
    for at in range(0, len(words), 16):
        added = _compressed(words[at : at + 16], state)
        state = [old + new for old, new in zip(state, added, strict=True)]
    return np.ascontiguousarray(np.stack(state, axis=1)).view(np.uint64)


def _compressed(words: npt.NDArray[np.uint32], state: list[_Column]) -> list[_Column]:
    a, b, c, d = (column.copy() for column in state)
    mixed, spare = np.empty_like(a), np.empty_like(a)
    for step in range(64):
        kind = step // 16
        factor, first = _WORDS[kind]
        _mix(kind, (b, c, d), mixed, spare)
        a += mixed
        a += words[(factor * step + first) % 16]
        a += _ADDED[step]
        turn = _TURNS[kind][step % 4]
        np.right_shift(a, np.uint32(32 - turn), out=spare)
        np.left_shift(a, np.uint32(turn), out=a)
        a |= spare
        a += b
        a, b, c, d = d, a, b, c
    return [a, b, c, d]


def _mix(
    kind: int, columns: tuple[_Column, _Column, _Column], out: _Column, spare: _Column
) -> None:
    """The function of a round, each in the form that takes fewest steps."""
    b, c, d = columns
    if kind == 0:
        np.bitwise_xor(c, d, out=out)
        out &= b
        out ^= d
    elif kind == 1:
        np.bitwise_xor(b, c, out=out)
        out &= d
        out ^= c
    elif kind == 2:  # noqa: PLR2004 (rounds count from 0)
        np.bitwise_xor(b, c, out=out)
        out ^= d
    else:
        np.bitwise_not(d, out=spare)
        np.bitwise_or(b, spare, out=out)
        out ^= c
