"""The offset map: the newest queue offset of each key, 24 bytes a key in one flat buffer.

Slot, ``OffsetMap.memory_bytes // 24`` of them::

    offset  size  type    field
         0    16  bytes   MD5 digest of the key; keys are told apart by it alone
        16     8  int64   queue offset + 1; 0: the slot is empty

A key is looked for in one slot after another: those that 13 windows of four bytes of its own digest name, then the ones
that follow. Both systems do so; how many slots are tried depends on how full the map is, so it takes no more keys than
``load`` of its slots. Whole columns of keys are put and looked up at once; each step works on those not yet found.

Not for several threads while something is put.
"""

from __future__ import annotations

import hashlib
from math import sin
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from tiered.errors import DataError, InvalidError
from tiered.format.block import bytes_at

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Buffer


# --------------------------------------------------------------------------------------------------
# MD5 of many texts at once, with NumPy: the digest by which an offset map tells keys apart.
#
# The compression function of RFC 1321 works on columns: one element a text, some thousand texts at a time, so that the state
# stays in the processor's cache. No Python object is made for a text. It tells keys apart as both systems do that are
# compacted alike (RocketMQ, Kafka), whose maps it can be held against; it protects nothing.
# --------------------------------------------------------------------------------------------------


Digests = npt.NDArray[np.uint64]
"""uint64[n, 2], each digest's 16 bytes as two little-endian words."""
Indices = npt.NDArray[np.int64]

BLOCK_BYTES: Final = 64
_LENGTH_BYTES: Final = 8
_PIECE_TEXTS: Final = 4096
_TOGETHER_MIN: Final = 64
_TOGETHER_BLOCKS_MAX: Final = 8
"""Texts are taken together where many have few blocks, and as many: each block costs a round, whatever their number."""
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
    numbers = np.bincount(blocks, minlength=_TOGETHER_BLOCKS_MAX + 1)
    alone = (numbers < _TOGETHER_MIN)[blocks] | (blocks > _TOGETHER_BLOCKS_MAX)
    found[alone] = _digest_each(buffer, starts[alone], sizes[alone])
    for count in np.flatnonzero(numbers[: _TOGETHER_BLOCKS_MAX + 1] >= _TOGETHER_MIN).tolist():
        where = np.flatnonzero(blocks == count)
        for at in range(0, len(where), _PIECE_TEXTS):
            some = where[at : at + _PIECE_TEXTS]
            found[some] = _digest(_padded(buffer, starts[some], sizes[some], count))
    return found


def _digest_each(buffer: Buffer, starts: Indices, sizes: Indices) -> Digests:
    """The digests of texts that few others are as long as, one call each: a round of all is worth it for many only."""
    view = memoryview(buffer).cast("B")
    places = zip(starts.tolist(), (starts + sizes).tolist(), strict=True)
    digests = [
        hashlib.md5(view[start:end], usedforsecurity=False).digest() for start, end in places
    ]
    return np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)


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


ENTRY_BYTES: Final = 24
LOAD: Final = 0.9
ABSENT: Final = -1
_WINDOWS: Final = 13
"""Of four bytes each, in a digest of sixteen."""
_PIECE_KEYS: Final = 16384
"""Put or looked up at once, so that what is worked on stays in the processor's cache."""

Offsets = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class OffsetMap:
    """The newest queue offset of each key that was put."""

    def __init__(self, memory_bytes: int, *, load: float = LOAD) -> None:
        """An empty map.

        Args:
            memory_bytes: That it takes at most, and at once.
            load: The share of its slots that are filled at most; above 0, below 1.

        Raises:
            InvalidError: There is no room for a key.
        """
        self.slots = memory_bytes // ENTRY_BYTES
        self.capacity = int(self.slots * load)
        if not 0 < load < 1 or self.capacity < 1:
            raise InvalidError(
                f"a map of {memory_bytes} bytes filled to {load:.0%} has no room for a key",
                do=f"give it more memory: {ENTRY_BYTES} bytes a key, and room for the load",
            )
        self._rows = np.zeros((self.slots, 3), np.uint64)
        # The greatest queue offset of what was put or passed (``passed``); -1: nothing was.
        self.latest = ABSENT
        self.keys = 0  # distinct keys

    @property
    def memory_bytes(self) -> int:
        """What it takes."""
        return int(self._rows.nbytes)

    @property
    def use(self) -> float:
        """How much of what may be filled is, 0 to 1."""
        return self.keys / self.capacity

    def sampled(self, count: int) -> npt.NDArray[np.uint64]:
        """uint64[<= count], the smallest first words of digests: of two maps they meet in keys that both have."""
        words = self._rows[self._rows[:, 2] != 0, 0]
        return np.sort(words if len(words) <= count else np.partition(words, count)[:count])

    def put(self, digests: Digests, offsets: Offsets) -> int:
        """Take keys in, as many as there is room for.

        Args:
            digests: uint64[n, 2], of the keys.
            offsets: int64[n], ascending, each greater than all that were put before.

        Returns:
            How many were taken, from the first on. Less than n: the next one is a key that has no room.

        Raises:
            DataError: They do not ascend: what was read is in no order.
        """
        if len(offsets) and (int(offsets[0]) <= self.latest or (np.diff(offsets) <= 0).any()):
            raise DataError(f"queue offsets that do not ascend, at {int(offsets[0])}")
        taken = 0
        while taken < len(offsets):
            some = slice(taken, taken + self._fitting(digests[taken : taken + _PIECE_KEYS]))
            if some.start == some.stop:
                break
            self._put(digests[some], offsets[some])
            self.latest = int(offsets[some][-1])
            taken = some.stop
        return taken

    def _fitting(self, digests: Digests) -> int:
        """How many of these can be put without a look at what they have in common."""
        room = self.capacity - self.keys
        if room >= len(digests):
            return len(digests)
        new = np.flatnonzero(self.get(digests) == ABSENT)
        return len(digests) if len(new) <= room else int(new[room])

    def pass_by(self, latest: int) -> None:
        """Know that there are no keys up to an offset but those that were put."""
        self.latest = max(self.latest, latest)

    def _put(self, digests: Digests, offsets: Offsets) -> None:
        for where, slots in self._probes(digests):
            rows = self._rows[slots]
            empty = rows[:, 2] == 0
            if empty.any():  # of those that want one slot the last gets it: among equals the newest
                at, who = slots[empty], where[empty]
                self._rows[at, :2] = digests[who]
                self._rows[at, 2] = np.uint64(1)
                rows = self._rows[slots]
                self.keys += len(np.unique(at))
            mine = (rows[:, 0] == digests[where, 0]) & (rows[:, 1] == digests[where, 1])
            found = where[mine]
            self._rows[slots[mine], 2] = (offsets[found] + 1).astype(np.uint64)
            where[mine] = -1

    def get(self, digests: Digests) -> Offsets:
        """int64[n], the newest offset of each key; ``ABSENT``: it was not put."""
        result = np.full(len(digests), ABSENT, np.int64)
        for where, slots in self._probes(digests):
            rows = self._rows[slots]
            mine = (rows[:, 0] == digests[where, 0]) & (rows[:, 1] == digests[where, 1])
            mine &= rows[:, 2] != 0
            result[where[mine]] = rows[mine, 2].astype(np.int64) - 1
            where[mine | (rows[:, 2] == 0)] = -1
        return result

    def _probes(self, digests: Digests) -> Iterator[tuple[npt.NDArray[np.int64], Offsets]]:
        """Step by step who still looks, and in which slot; who has found is set to -1 there."""
        for begin in range(0, len(digests), _PIECE_KEYS):
            where = np.arange(begin, min(begin + _PIECE_KEYS, len(digests)))
            step = 0
            while len(where):
                yield where, self._slots(digests[where], step)
                where = where[where >= 0]
                step += 1

    def _slots(self, digests: Digests, step: int) -> Offsets:
        window = min(step, _WINDOWS - 1)
        octets = digests.view(np.uint8).reshape(-1, 16)[:, window : window + 4]
        values = np.ascontiguousarray(octets).view(">i4")[:, 0].astype(np.int64)
        values += step - window
        return np.abs(values) % self.slots


def in_several(samples: Sequence[npt.NDArray[np.uint64]], count: int) -> tuple[int, int]:
    """Of some keys of several maps, how many are in more than one of them, and how many were looked at.

    Args:
        samples: See ``OffsetMap.sampled``.
        count: As given there. Maps with fewer keys are looked at whole.
    """
    # Beyond the greatest word of a sample that is full nobody knows what its map has.
    limits = [sample[-1] for sample in samples if len(sample) == count]
    words = np.concatenate(
        [sample for sample in samples if len(sample)] or [np.empty(0, np.uint64)]
    )
    if limits:
        words = words[words <= min(limits)]
    found, often = np.unique(words, return_counts=True)
    return int(np.count_nonzero(often > 1)), len(found)
