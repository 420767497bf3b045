"""What to ask for next: requests along the parts of a queue. Pure.

The walk begins where the reader stands and goes on, across parts and segments, until the window is full. A part that fits
wholly into what is left of the window, or whose section is small, is asked for whole: one request. Of a larger one the
index comes first, since it says where records begin; it is asked for as soon as the walk reaches the part, so that it is
there before the reader is.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from fetcher.runs import (
    INDEX,
    PART_BYTES,
    Key,
    PartLayout,
    block_count,
    key_of,
    layout_bytes,
    room_of,
)
from fetcher.window import plan_pieces
from tiered.log.flat_file import ITEM_BYTES
from tiered.log.sections import WHOLE_AT_ONCE_BYTES
from tiered.model import LogOffset

if TYPE_CHECKING:
    from backends.base import ByteRange
    from fetcher.limits import FetchSettings
    from tiered.log.cursor import IncarnationView
    from tiered.log.parts import Part
    from tiered.model import QueueOffset


INDEXES_MAX = 4
"""Indexes that are asked for at once for one reader, before it is known where their records begin."""

PARTS_MAX = 256
"""Parts that one plan looks at, so that a plan over tiny ones is short."""


class Known(Protocol):
    """What is here."""

    def layout(self, part: Part) -> PartLayout | None:
        """A part's layout, if its index is here."""
        ...

    def is_known(self, key: Key) -> bool:
        """Whether a thing is here or on its way."""
        ...


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """One thing to ask for."""

    part: Part
    keys: tuple[Key, ...]  # under which it will be found
    size_bytes: int  # room that it will take
    blocks: range  # which blocks; empty for the index alone
    layout: PartLayout | None  # the part's, if known; else its index is asked for, too

    @property
    def is_plain(self) -> bool:
        """All of a section, small enough for one block, and stored as it is."""
        part = self.part
        is_plain = not (part.section.is_packed or part.section.gone)
        return len(self.blocks) == 1 and part.is_whole and is_plain


@dataclass(frozen=True, slots=True)
class WidePlan:
    """Several neighbouring sections are read whole, with one request; their receiver checks the bytes."""

    key: str  # of their bundle
    ranges: tuple[ByteRange]  # one


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """What to ask for, in order, and the log offset up to which all is then here or on its way."""

    requests: list[FetchRequest]
    asked: LogOffset


def plan_fetches(
    view: IncarnationView,
    start: QueueOffset,
    window: int,
    known: Known,
    settings: FetchSettings,
    *,
    until: int = -1,
) -> FetchPlan:
    """Plan what a reader needs.

    Args:
        window: Bytes wanted from there on (> 0): at least the block of ``start``.
        until: Everything before this queue offset will be read: a part of it that is no larger than a piece is asked for
            whole, a little beyond the window or with the next plan, rather than its index now and its records in pieces.
    """
    requests: list[FetchRequest] = []
    asked = view.incarnation.log_end
    left = window
    sure = _Sure(start, until, window, settings)
    for part in islice(view.parts_from(start), PARTS_MAX):
        layout = known.layout(part)
        if layout is None:
            is_one = sure.is_one(part)
            if is_one and 0 < 2 * left < part.log_bytes:
                asked = part.log_offset
                break
            if left <= 0 or not (is_one or _fits(part, left, settings)):
                requests += _indexes_ahead(view, part, left, known, sure)
                asked = part.log_offset
                break
            if not known.is_known(key_of(part, INDEX)):
                requests.append(whole_part(part, settings))
            left -= max(part.log_bytes, PART_BYTES)
        elif left <= 0:
            asked = part.log_offset
            break
        else:
            found, asked = _blocks_wanted(layout, left, known, sure)
            requests += found
            left -= max(asked - layout.bounds[_first(layout, start)], PART_BYTES)
            if asked < part.log_end:
                left = min(left, 0) - (part.log_end - asked)
                requests += _indexes_behind(view, part, left, known, sure)
                break
        asked = part.log_end
    return FetchPlan(requests, asked)


@dataclass(frozen=True, slots=True)
class _Sure:
    """What a reader will surely read, and how far ahead of it one looks."""

    start: QueueOffset
    until: int
    window: int
    settings: FetchSettings

    def is_one(self, part: Part) -> bool:
        """Whether all of a part will be read, and comes with one request."""
        is_whole = self.start <= part.queue_offset and part.queue_end <= self.until
        return is_whole and part.log_bytes <= min(self.window, self.settings.piece_bytes)

    def look_bytes(self, part: Part) -> int:
        """How far behind the window one looks for indexes: it is over by the time that they are here."""
        return self.window if part.queue_offset < self.until else 0


def _indexes_behind(
    view: IncarnationView, part: Part, left: int, known: Known, sure: _Sure
) -> list[FetchRequest]:
    """Requests for the indexes behind a part that ends so far (0 or less) behind the window, if they are surely read."""
    if left + sure.look_bytes(part) <= 0:
        return []
    behind = view.part_at(part.queue_end)
    if behind is None or not sure.look_bytes(behind):
        return []
    return _indexes_ahead(view, behind, left, known, sure)


def _indexes_ahead(
    view: IncarnationView, part: Part, left: int, known: Known, sure: _Sure
) -> list[FetchRequest]:
    """Requests for the index of a part and of those behind it, as far as the window goes: one wait for all of them."""
    requests = []
    left += sure.look_bytes(part)
    for one in islice(view.parts_from(part.queue_offset), INDEXES_MAX):
        is_here = known.layout(one) is not None or known.is_known(key_of(one, INDEX))
        is_whole = sure.is_one(one) or _is_small(one, sure.settings)
        if not (is_here or is_whole or block_count(one, sure.settings.block_bytes) == 1):
            requests.append(_index_alone(one, sure.settings))
        left -= max(one.log_bytes, PART_BYTES)
        if left <= 0:
            break
    return requests


def _fits(part: Part, left: int, settings: FetchSettings) -> bool:
    most = min(max(left, settings.block_bytes), settings.piece_bytes)
    return part.log_bytes <= most or _is_small(part, settings)


def _is_small(part: Part, settings: FetchSettings) -> bool:
    """Whether its section is read at once whatever is wanted of it, and no more than can be kept comes out of it."""
    is_short = part.section.size_bytes <= WHOLE_AT_ONCE_BYTES
    return is_short and part.log_bytes <= max(settings.piece_bytes, WHOLE_AT_ONCE_BYTES)


def _index_alone(part: Part, settings: FetchSettings) -> FetchRequest:
    return FetchRequest(part, (key_of(part, INDEX),), _layout_room(part, settings), range(0), None)


def _layout_room(part: Part, settings: FetchSettings) -> int:
    return (
        layout_bytes(part.count, block_count(part, settings.block_bytes)) + part.count * ITEM_BYTES
    )


def whole_part(part: Part, settings: FetchSettings) -> FetchRequest:
    """A request for all of a part."""
    blocks = range(block_count(part, settings.block_bytes))
    keys = (*(key_of(part, block) for block in blocks), key_of(part, INDEX))
    size_bytes = room_of(part.log_bytes, part.count) + _layout_room(part, settings)
    return FetchRequest(part, keys, size_bytes, blocks, None)


def _first(layout: PartLayout, start: QueueOffset) -> int:
    return layout.block_of(start) if start > layout.items.start else 0


def _blocks_wanted(
    layout: PartLayout, left: int, known: Known, sure: _Sure
) -> tuple[list[FetchRequest], LogOffset]:
    """Requests for the blocks of a part from where the reader stands, and where they end."""
    part, first, settings = layout.part, _first(layout, sure.start), sure.settings
    bounds = layout.bounds
    end = bisect_left(bounds, bounds[first] + left)
    end = min(max(end, first + 1), layout.blocks)
    while end < layout.blocks and not layout.items_in(end):
        end += 1  # steps that a large record covers hold nothing
    keys = [key_of(part, block) for block in range(first, end)]
    sizes = [bounds[block + 1] - bounds[block] for block in range(first, end)]
    pieces = plan_pieces(
        sizes,
        [known.is_known(key) or not layout.items_in(key[-1]) for key in keys],
        piece_bytes=settings.piece_bytes,
        gap_bytes=settings.gap_bytes,
    )
    if part.queue_offset < sure.until and end < layout.blocks and len(pieces) > 1:
        last = pieces[-1]
        if 2 * sum(sizes[last.start : last.stop]) < settings.piece_bytes:
            end = first + pieces.pop().start  # a crumb: it comes with what will be asked for next
    requests = []
    for piece in pieces:
        blocks = range(first + piece.start, first + piece.stop)
        begin, span_end = layout.span(blocks)  # more than the blocks, where records overlap
        size_bytes = room_of(span_end - begin, len(layout.items_of(blocks)))
        requests.append(
            FetchRequest(part, tuple(keys[piece.start : piece.stop]), size_bytes, blocks, layout)
        )
    return requests, LogOffset(bounds[end])
