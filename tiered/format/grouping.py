"""Whose records are they: group a block by queue, compare topics.

Topic bytes are compared 8 at a time. Word ``k`` of a topic is the 8 bytes that end ``8 k`` bytes
before the topic's end; of the first word the bytes that stand before the topic are masked. Counting
from the end keeps every read inside the record, since more than 8 bytes stand before a topic. Work
and memory are those of the topics' own bytes: one long topic in a large block costs its own words
and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from tiered.format import properties, sysflag
from tiered.format.parse import RecordBlock, bytes_at
from tiered.format.record import RecordFault
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Iterator

_WORD: Final = 8
_MULTIPLIER: Final = 0x9E37_79B9_7F4A_7C15
"""Odd, so that multiplying by it mod 2^64 loses nothing."""
_MASKS: Final = np.array([2**64 - 1] + [2 ** (8 * n) - 1 for n in range(1, 8)], np.uint64)
"""Which bits of a big-endian word belong to the topic, by topic size mod 8, for its first word."""

Indices = npt.NDArray[np.int64]


def group_by_queue(
    block: RecordBlock, *, among: npt.NDArray[np.bool_] | None = None
) -> list[tuple[MessageQueue, Indices]]:
    """Divide a block's records by topic and queue id.

    Records are grouped by a 64-bit hash of topic and queue id, then every record's topic is
    compared with that of its group's first; a group that fails (two queues with one hash) is
    divided by plain comparison.

    Args:
        block: Parsed records.
        among: bool[n], which records to take; default: those without a fault. (Others must have a
            topic: a record whose fault is CRC or PHYSICAL_OFFSET has.)

    Returns:
        For each queue, in the order in which the queues first occur, the indices of its records in
        block order.
    """
    chosen = np.flatnonzero(block.faults == RecordFault.OK if among is None else among)
    if not len(chosen):
        return []
    hashes = _hashes(block, chosen)
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    firsts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    group_of = np.repeat(np.arange(len(firsts)), np.diff(firsts, append=len(order)))
    same = _same_queue(block, chosen[order], chosen[order[firsts]][group_of])
    mixed = set(group_of[~same].tolist())
    groups: list[tuple[MessageQueue, Indices]] = []
    for number, members in enumerate(np.split(chosen[order], firsts[1:])):
        groups.extend(
            _divide(block, members)
            if number in mixed
            else [(_queue(block, int(members[0])), members)]
        )
    groups.sort(key=lambda group: int(group[1][0]))
    return groups


def _hashes(block: RecordBlock, indices: Indices) -> npt.NDArray[np.uint64]:
    """A number for each topic and queue id: equal for equal queues, else most likely not."""
    numbers = block.queue_ids[indices].astype(np.uint64) + (
        block.topic_sizes[indices].astype(np.uint64) << np.uint64(32)
    )
    numbers *= np.uint64(_MULTIPLIER)
    weight = _MULTIPLIER
    for where, words in _topic_words(block, indices):
        weight = weight * _MULTIPLIER % 2**64
        mixed = (words ^ (words >> np.uint64(29))) * np.uint64(weight)
        if where is None:
            numbers += mixed
        else:
            numbers[where] += mixed
    numbers ^= numbers >> np.uint64(32)
    return numbers


def _topic_words(
    block: RecordBlock, indices: Indices
) -> Iterator[tuple[Indices | None, npt.NDArray[np.uint64]]]:
    """Word 0, 1, … of the topics, with the places in ``indices`` that have one (None: all)."""
    sizes = block.topic_sizes[indices].astype(np.int64)
    if not len(sizes) or not sizes.max():
        return
    view = bytes_at(block.buffer, ">u8")
    ends = block.topic_positions[indices] + sizes
    for begun in range(0, int(sizes.max()), _WORD):
        where = None if sizes.min() > begun else np.flatnonzero(sizes > begun)
        left = (sizes if where is None else sizes[where]) - begun
        at = (ends if where is None else ends[where]) - begun - _WORD
        words = view[at].astype(np.uint64)
        words &= _MASKS[np.where(left < _WORD, left, 0)]
        yield where, words


def _same_queue(block: RecordBlock, indices: Indices, others: Indices) -> npt.NDArray[np.bool_]:
    """Element by element: whether the two records have the same queue id and topic bytes."""
    same = np.equal(block.queue_ids[indices], block.queue_ids[others])
    same &= block.topic_sizes[indices] == block.topic_sizes[others]
    if not same.all():
        kept = np.flatnonzero(same)
        same[kept] = _same_queue(block, indices[kept], others[kept])
        return same
    pairs = zip(_topic_words(block, indices), _topic_words(block, others), strict=True)
    for (where, words), (_, other_words) in pairs:
        if where is None:
            same &= words == other_words
        else:
            same[where] &= words == other_words
    return same


def _queue(block: RecordBlock, index: int) -> MessageQueue:
    return MessageQueue(
        topic_bytes(block, index).decode("utf-8", "surrogateescape"), int(block.queue_ids[index])
    )


def topic_bytes(block: RecordBlock, index: int) -> bytes:
    """The topic of one record, as stored."""
    start = int(block.topic_positions[index])
    return bytes(memoryview(block.buffer)[start : start + int(block.topic_sizes[index])])


def properties_bytes(block: RecordBlock, index: int) -> bytes:
    """The properties of one record, as stored."""
    start = int(block.properties_positions[index])
    return bytes(memoryview(block.buffer)[start : start + int(block.properties_sizes[index])])


def _divide(block: RecordBlock, indices: Indices) -> list[tuple[MessageQueue, Indices]]:
    """Group by plain comparison."""
    found: dict[MessageQueue, list[int]] = {}
    for index in indices.tolist():
        found.setdefault(_queue(block, index), []).append(index)
    return [(queue, np.array(members, np.int64)) for queue, members in found.items()]


def topics_equal(block: RecordBlock, indices: Indices, topic: str) -> npt.NDArray[np.bool_]:
    """Whether each of the records at ``indices`` is of ``topic``; False where a fault hides it.

    Args:
        block: Parsed records.
        indices: int64[m], into the block.
        topic: As in ``MessageQueue``: other bytes than UTF-8 by surrogate escapes.
    """
    wanted = topic.encode("utf-8", "surrogateescape")
    has_topic = (block.faults[indices] == RecordFault.OK) | (
        block.faults[indices] >= RecordFault.PHYSICAL_OFFSET
    )
    same: npt.NDArray[np.bool_] = has_topic & (block.topic_sizes[indices] == len(wanted))
    kept = np.flatnonzero(same)
    for number, (_, words) in enumerate(_topic_words(block, indices[kept])):
        end = len(wanted) - _WORD * number
        word = int.from_bytes(wanted[max(0, end - _WORD) : end], "big")
        same[kept] &= words == np.uint64(word)
    return same


def inner_counts(block: RecordBlock) -> npt.NDArray[np.int32]:
    """How many queue offsets each record takes: ``INNER_NUM`` of an inner batch, else 1.

    Only records whose flag says that they are inner batches are looked into, one by one. A number
    that is missing, malformed or below 1 counts as 1.
    """
    counts = np.ones(len(block), np.int32)
    for index in np.flatnonzero(block.sys_flags & sysflag.INNER_BATCH).tolist():
        found = properties.parse_properties(properties_bytes(block, index))
        counts[index] = properties.inner_count(found)
    return counts
