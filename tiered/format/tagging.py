"""The tags of many records at once, by which consume queues are made, and held against their records.

Properties are text of any order and length, so the place of ``TAGS`` has to be looked for in every record. But the
records of one producer mostly differ in no more than a few lengths. ``tag_guesses`` looks into one record, and then by
columns for all others that have the same pair at the same distance from the beginning or the end of their properties;
what is left is looked into by itself.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from tiered.format.parse import RecordBlock, bytes_at
from tiered.format.tags import tag_hash

Longs = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_NAME: Final = b"TAGS\x01"
_PAIR_NAME: Final = b"\x02TAGS\x01"
_WORD: Final = 8
_FEW: Final = 48
"""So few records are looked into one by one."""
_ROUNDS_FREE: Final = 8
_WORTH: Final = 64
"""Looking for others like a record goes on as long as this many were found each time, after the first few times."""


def tag_hashes(block: RecordBlock) -> Longs:
    """The tag code of each record: Java's hash of its ``TAGS`` property, 0 without one.

    Loops over the records in Python, about 0.5 us each (a tag that was met before is not hashed
    again): it is for rebuilding consume queues. ``tag_guesses`` costs a tenth of it.
    """
    return _hashes_of(block, np.arange(len(block)))


def _hashes_of(block: RecordBlock, rows: Longs) -> Longs:
    """As ``tag_hashes``, of some records."""
    view, known = memoryview(block.buffer), {b"": 0}
    starts = block.properties_positions[rows]
    ends = starts + block.properties_sizes[rows]
    found = []
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        tags = find_tags(bytes(view[start:end]))
        code = known.get(tags)
        if code is None:
            code = known[tags] = _hash(tags)
        found.append(code)
    return np.array(found, np.int64)


def tag_guesses(block: RecordBlock) -> Longs:
    """As ``tag_hashes``, but where a record has several pairs ``TAGS``, as no client writes them, it may be any of them.

    So a tag code that is the guess is right; one that is not may be, and ``tag_hashes`` tells. Without ``TAGS`` it
    is 0, for certain.
    """
    rows = np.arange(len(block))
    if len(rows) < _FEW:
        return _hashes_of(block, rows)
    found = np.zeros(len(block), np.int64)
    values, rows = _places_alike(block)
    chosen = np.flatnonzero(values >= 0)
    unlike = _hash_alike(block, chosen, values[chosen], found)
    if len(rows) and _mentions_tags(block, rows):
        unlike = np.concatenate((unlike, rows))
    found[unlike] = _hashes_of(block, unlike)
    return found


def _places_alike(block: RecordBlock) -> tuple[Longs, Longs]:
    """Where the value of ``TAGS`` begins in each record, -1 where it was not found, and the records that are left."""
    starts = block.properties_positions
    ends = starts + block.properties_sizes
    values = np.full(len(block), -1, np.int64)
    left = np.flatnonzero(block.properties_sizes)
    count = len(left)
    bare: list[int] = []
    rounds = 0
    while _is_worth_it(rounds, count, len(left)):
        rounds += 1
        first = int(left[0])
        raw = bytes(memoryview(block.buffer)[int(starts[first]) : int(ends[first])])
        at = _find_pair(raw)
        if at < 0:
            bare.append(first)
            left = left[1:]
            continue
        before = _PAIR_NAME if at else _NAME
        for base, distance in ((starts, at), (ends, at - len(raw))):
            there = base[left] + distance
            is_in = (there >= starts[left]) & (there + len(_NAME) < ends[left])
            if at:
                is_in &= there > starts[left]
            is_in[is_in] = _holds(block, there[is_in] - (at > 0), before)
            values[left[is_in]] = there[is_in] + len(_NAME)
            left = left[~is_in]
            if not at:
                break
    return values, np.concatenate((left, np.array(bare, np.int64)))


def _hash_alike(block: RecordBlock, rows: Longs, values: Longs, found: Longs) -> Longs:
    """Set the hashes of records whose tags begin at ``values``; those that are left, unlike the others."""
    ends = block.properties_positions[rows] + block.properties_sizes[rows]
    words = _words_at(block, values)
    is_left, left, rounds = np.ones(len(rows), np.bool_), len(rows), 0
    alone: list[int] = []
    while _is_worth_it(rounds, len(rows), left):
        rounds += 1
        first = int(is_left.argmax())
        raw = bytes(memoryview(block.buffer)[int(values[first]) : int(ends[first])])
        tags, separator, _ = raw.partition(b"\x02")
        wanted = tags + separator
        mask, word = _masked(wanted[:_WORD])
        # Over all, those that are done too: leaving them out costs more.
        hits = np.flatnonzero(((words & mask) == word) & is_left)
        same = values[hits] + len(wanted) <= ends[hits] if separator else hits == first
        for at in range(_WORD, len(wanted), _WORD):
            same[same] = _holds(block, values[hits[same]] + at, wanted[at : at + _WORD])
        hits = hits if same.all() else hits[same]
        if tags:
            found[rows[hits]] = _hash(tags)
        else:
            alone += rows[hits].tolist()  # an empty one does not count: another may
        is_left[hits] = False
        if is_left[first]:  # at the end of the buffer, whose last word begins before it
            is_left[first] = False
            alone.append(int(rows[first]))
        left = int(is_left.sum())
    return np.concatenate((rows[is_left], np.array(alone, np.int64)))


def _holds(block: RecordBlock, places: Longs, wanted: bytes) -> Flags:
    """Whether the buffer has these bytes, at most eight, at each place, which lies in it."""
    mask, word = _masked(wanted)
    same: Flags = (_words_at(block, places) & mask) == word
    return same


def _words_at(block: RecordBlock, places: Longs) -> npt.NDArray[np.uint64]:
    """Eight bytes from each place on; near the end of the buffer, those that are its last."""
    view = bytes_at(block.buffer, ">u8")
    return view[np.minimum(places, len(view) - 1)].astype(np.uint64)


def _masked(wanted: bytes) -> tuple[np.uint64, np.uint64]:
    """The first bytes of a word, as a mask and what it leaves of it."""
    mask = (b"\xff" * len(wanted)).ljust(_WORD, b"\0")
    return (
        np.uint64(int.from_bytes(mask, "big")),
        np.uint64(int.from_bytes(wanted.ljust(_WORD, b"\0"), "big")),
    )


def _is_worth_it(rounds: int, count: int, left: int) -> bool:
    return left > 0 and rounds < _ROUNDS_FREE + (count - left) // _WORTH


def _mentions_tags(block: RecordBlock, rows: Longs) -> bool:
    """Whether the name stands anywhere in the properties of some records: mostly none of them has tags."""
    view, starts = memoryview(block.buffer), block.properties_positions[rows]
    slices = map(slice, starts.tolist(), (starts + block.properties_sizes[rows]).tolist())
    return _NAME in b"".join(map(view.__getitem__, slices))


def find_tags(raw: bytes) -> bytes:
    """The value of ``TAGS`` in stored properties, without parsing them all; empty without one.

    Of several the last that is not empty counts, as in ``parse_properties``.
    """
    at = _find_pair(raw)
    return raw[at + len(_NAME) : _pair_end(raw, at + len(_NAME))] if at >= 0 else b""


def _find_pair(raw: bytes) -> int:
    """Where the pair ``TAGS`` that counts begins; -1 without one."""
    end = len(raw)
    while (at := raw.rfind(_PAIR_NAME, 0, end)) >= 0:
        start = at + len(_PAIR_NAME)
        if _pair_end(raw, start) > start:
            return at + 1
        end = at + len(_PAIR_NAME) - 1
    return 0 if raw.startswith(_NAME) else -1


def _pair_end(raw: bytes, start: int) -> int:
    end = raw.find(b"\x02", start)
    return len(raw) if end < 0 else end


def _hash(tags: bytes) -> int:
    return tag_hash(tags.decode("utf-8", "replace"))
