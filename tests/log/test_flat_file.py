"""Flat files: where bytes lie, over parts, segments and parts of no bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.bundles import made_part

from tiered.log.flat_file import TieredCommitLog, TieredConsumeQueue
from tiered.log.parts import Incarnation, Parts, Segment
from tiered.model import LogOffset, QueueOffset

SIZES = st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=5), min_size=1, max_size=5)


def incarnation_of(sizes: list[list[int]], base: int) -> Incarnation:
    """Each part has two items; the sizes are those of their records."""
    segments = []
    log, queue = base, 2 * base
    for number, row in enumerate(sizes):
        parts = []
        first = LogOffset(log), QueueOffset(queue)
        for n, size in enumerate(row):
            parts.append(made_part(queue, log, 2, size, key=f"{number}.{n}"))
            log, queue = log + size, queue + 2
        segments.append(Segment(*first, 0, sealed=True, parts=Parts.of(parts)))
    low, high = QueueOffset(2 * base), QueueOffset(queue)
    return Incarnation(0, low, high, LogOffset(log), tuple(segments))


@given(SIZES, st.integers(0, 100), st.data())
def test_ranges_are_their_bytes_in_order(sizes: list[list[int]], base: int, draw: st.DataObject):
    incarnation = incarnation_of(sizes, base)
    for stream, of_items in (
        (TieredCommitLog.load(incarnation), False),
        (TieredConsumeQueue.load(incarnation), True),
    ):
        expected = [
            (part.bundle.key, at)
            for part in incarnation.parts()
            for at in range(20 * part.count if of_items else part.log_bytes)
        ]
        first = 40 * base if of_items else base
        assert stream.commit_offset == first + len(expected)
        if not expected:
            continue
        start = draw.draw(st.integers(0, len(expected) - 1))
        end = draw.draw(st.integers(start + 1, len(expected)))
        found = stream.ranges(first + start, first + end)
        assert all(one.start < one.end and one.of_items == of_items for one in found)
        assert [(one.key, n) for one in found for n in range(one.start, one.end)] == expected[
            start:end
        ]


def test_without_segments_a_stream_ends_where_the_next_begins():
    incarnation = Incarnation(0, QueueOffset(7), QueueOffset(7), LogOffset(100))
    assert TieredCommitLog.load(incarnation).commit_offset == 100
    assert TieredConsumeQueue.load(incarnation).commit_offset == 140
    assert TieredCommitLog.load(incarnation).ranges(0, 100) == []
