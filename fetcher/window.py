"""Readers: how far ahead of each to read, what to ask for next, and what a reader of many queues takes along. Pure.

Window
    An additive-increase, multiplicative-decrease window, in bytes; pure. One belongs to one stream, that is to one group in
    one queue. It starts at its minimum, and each batch that is delivered in order makes it larger by a share of that batch;
    so what lies unread ahead of a reader that stops is at most that share of what it has read, and the minimum. Data that
    expires unread, or that had to make room unread, halves it. A reader that goes elsewhere begins again at the minimum.
    (TCP Tahoe, by way of RocketMQ's design for its tiered store: there the step is the client's batch size.)

Plan
    The walk begins where the reader stands and goes on, across parts and segments, until the window is full. A part that
    fits wholly into what is left of the window, or whose section is small, is asked for whole: one request. Of a larger one
    the index comes first, since it says where records begin; it is asked for as soon as the walk reaches the part, so that
    it is there before the reader is.

Neighbours
    The sections of a round lie side by side in bundles. A reader of one queue asks for its section alone. A reader of many
    queues will want the neighbouring sections too, so they come with the same request. Which of them do is decided by
    ``fetcher.requests.plan_merge``, as for all requests: small gaps, no more in vain than is wanted, and a size: a quarter
    of the cache, divided among the bundles that its queues go through. So there is room for a request of every bundle at
    once (records take about twice their size while they are kept), and nothing is dropped unread, whether queues are read
    one after the other, which goes through all bundles for the first, or in turn, which goes from one to the next.

Not for several threads at once: its owner holds a lock around it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import islice, pairwise, repeat
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol
from weakref import ref

import numpy as np
import numpy.typing as npt

from backends.lazy_dataclass import dataclass
from fetcher.requests import plan_merge
from fetcher.runs import (
    INDEX,
    PART_BYTES,
    Key,
    MultiSectionRead,
    PartLayout,
    Run,
    block_count,
    key_of,
    layout_bytes,
    room_of,
)
from tiered.format.bundle import BLOCK_BYTES
from tiered.format.items import ITEM_BYTES
from tiered.log.parts import PART
from tiered.log.sections import WHOLE_AT_ONCE_BYTES
from tiered.model import LogOffset, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from weakref import ReferenceType

    from fetcher.limits import FetchSettings, WindowLimits
    from fetcher.runs import Cached, Thing
    from tiered.log.cursor import History, IncarnationView
    from tiered.log.decode import TierBatch
    from tiered.log.parts import Part
    from tiered.log.state import TierState
    from tiered.model import MessageQueue


# -- window


def grown(window: int, batch_bytes: int, limits: WindowLimits) -> int:
    """The window after a batch of this many bytes was delivered in order."""
    return min(window + int(batch_bytes * limits.growth), limits.bytes_max)


def halved(window: int, limits: WindowLimits) -> int:
    """The window after data of the stream expired, or made room, unread."""
    return max(window // 2, limits.bytes_min)


def wants_more(window: int, unread: int, limits: WindowLimits) -> bool:
    """Whether it is time to ask for more, with this many bytes ahead, here or on their way."""
    return unread < window * limits.refill


REFILL_BYTES: Final = 8 << 20
"""What a reader says that it will read is asked for as soon as so much more may be ahead of it, or half of what may be: two
large requests. A larger step would be a pause: what is under way has to last until the next answer."""


# -- plan

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
    """Plan what a reader needs: ``window`` bytes (> 0), at least the block of ``start``.

    Everything before ``until`` will be read: a part of it that is no larger than a chunk is asked for whole, a little
    beyond the window or with the next plan, rather than its index now and its records in chunks.
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
        return is_whole and part.log_bytes <= min(self.window, self.settings.chunk_bytes)

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
    most = min(max(left, settings.block_bytes), settings.chunk_bytes)
    return part.log_bytes <= most or _is_small(part, settings)


def _is_small(part: Part, settings: FetchSettings) -> bool:
    """Whether its section is read at once whatever is wanted of it, and no more than can be kept comes out of it."""
    is_short = part.section.size_bytes <= WHOLE_AT_ONCE_BYTES
    return is_short and part.log_bytes <= max(settings.chunk_bytes, WHOLE_AT_ONCE_BYTES)


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
    chunks = plan_chunks(
        sizes,
        [known.is_known(key) or not layout.items_in(key[-1]) for key in keys],
        chunk_bytes=settings.chunk_bytes,
        gap_bytes=settings.gap_bytes,
    )
    if part.queue_offset < sure.until and end < layout.blocks and len(chunks) > 1:
        last = chunks[-1]
        if 2 * sum(sizes[last.start : last.stop]) < settings.chunk_bytes:
            end = first + chunks.pop().start  # a crumb: it comes with what will be asked for next
    requests = []
    for chunk in chunks:
        blocks = range(first + chunk.start, first + chunk.stop)
        begin, span_end = layout.span(blocks)  # more than the blocks, where records overlap
        size_bytes = room_of(span_end - begin, len(layout.items_of(blocks)))
        requests.append(
            FetchRequest(part, tuple(keys[chunk.start : chunk.stop]), size_bytes, blocks, layout)
        )
    return requests, LogOffset(bounds[end])


def plan_chunks(
    sizes: Sequence[int], is_here: Sequence[bool], *, chunk_bytes: int, gap_bytes: int
) -> list[range]:
    """Cut neighbouring blocks that are to be read into requests, none of which begins or ends with one that is here.

    They are ranges of indexes, in order and apart, of at most ``chunk_bytes`` but for one block that is larger. Blocks that
    are cached or on their way are read again when at most ``gap_bytes`` of theirs lie between others.
    """
    chunks: list[range] = []
    begin, end, held, gap = 0, 0, 0, 0
    for index, size in enumerate(sizes):
        if is_here[index]:
            gap += size
            continue
        joined = held + gap + size
        if end > begin and gap <= gap_bytes and joined <= chunk_bytes:
            held = joined
        else:
            if end > begin:
                chunks.append(range(begin, end))
            begin, held = index, size
        end, gap = index + 1, 0
    return [*chunks, range(begin, end)] if end > begin else chunks


# -- streams


@dataclass(slots=True, eq=False)
class Stream:
    """A reader that goes through a queue, in order as a rule. Its owner holds a lock around it."""

    group: str  # who reads
    queue: MessageQueue  # what
    limits: WindowLimits
    window: int = 0  # bytes to read ahead
    view: IncarnationView | None = None  # the incarnation that it read last
    state: TierState | None = None
    """The journal's state in which that was the newest view of it; None: to be looked up."""
    held: ReferenceType[Cached[Thing]] | None = None
    """Where the run is cached that it was last served from; it does not keep it in memory."""
    run: ReferenceType[Run] | None = None  # that run; likewise
    here: int = 0  # log offset behind the last batch
    asked: int = 0  # log offset up to which read-ahead has been asked for
    calm_to: int = -1
    """As long as it is not past this log offset, nothing more is to be asked for; -1: to be looked at."""
    next_offset: int = -1
    """Queue offset at which reading in order goes on; -1 before the first batch, and after a leap."""
    last_start: int = -1  # queue offset of the last batch; likewise
    leapt_to: int = -1  # where it has gone, until it is given something there; else -1
    until: int = -1  # up to where its reader says that it will read; -1: it does not say
    sure_max: int = 0  # bytes of that to read ahead at most; less once some were dropped unread
    neighbours: Neighbours | None = None  # what its reader reads besides, if it has said so
    ahead_max: int = 0  # bytes to read ahead at most; 0: no limit but the others
    wary: range = range(0)  # queue offsets near damage: no more is asked for than is needed
    paused_s: float = 0.0  # nothing is read ahead before, since that failed; monotonic seconds
    _end: tuple[int, IncarnationView | None, int] = (-1, None, 0)
    used_s: float = (
        math.inf
    )  # when it was last read, monotonic seconds; never yet: it was announced

    def look(self, view: IncarnationView) -> None:
        """Go on with a view; what was read of another one says nothing of it."""
        if self.view is not view:
            self.view, self.held, self.run, self.state = view, None, None, None
            self.fall_back(0)

    def is_of(self, state: TierState) -> bool:
        """Whether the view that it read last is the present one of its queue in a state of the journal."""
        if self.state is not state:
            if self.view is None or state.incarnation(self.queue) is not self.view.incarnation:
                return False
            self.state = state  # the next read need not look
        return True

    @property
    def position(self) -> int:
        """Queue offset from which on it may read."""
        return self.next_offset if self.next_offset >= 0 else max(self.leapt_to, 0)

    def goes_on_at(self, start: int) -> bool:
        """Whether reading there is reading in order, or asking again for what was delivered last or for the rest of it."""
        return self.last_start <= start <= self.next_offset

    def arrive(self, start: int) -> bool:
        """Begin a read; whether the reader has gone elsewhere, and something may be under way for it.

        Asking again for what was delivered last, or for the rest of it, is no leap: its answer may have been lost, or
        cut. Nor is it one to try again.
        """
        if self.goes_on_at(start) or start == self.leapt_to:
            return False
        had_asked = self.asked > 0
        self.window = self.limits.bytes_min
        self.fall_back(0)
        self.next_offset, self.last_start, self.leapt_to = -1, -1, start
        return had_asked

    def begin_at(self, start: int) -> None:
        """It will begin there: what is asked for before it comes is not in vain."""
        if self.next_offset < 0 and self.leapt_to != start:
            self.window, self.leapt_to = self.limits.bytes_min, start
            self.fall_back(0)

    def say(self, until: int) -> None:
        """Its reader says how far it will read."""
        self.until, self.calm_to = until, -1

    def fall_back(self, log_offset: int) -> None:
        """From a log offset on nothing is on its way for it any more."""
        self.asked, self.calm_to = min(self.asked, log_offset), -1

    def pass_over(self, start: int, end: int) -> None:
        """There is nothing at ``[start, end)``: reading in order goes on behind it."""
        self.last_start = self.last_start if start == self.next_offset else start
        self.next_offset, self.leapt_to = end, -1

    def at_hand(self, start: int) -> Run | None:
        """What it was served from last, if that is still here and holds ``start`` as well."""
        entry = self.entry
        run = self.run() if self.run is not None and entry is not None and entry.is_here else None
        return run if run is not None and run.base <= start < run.end else None

    def leave(self) -> tuple[Cached[Thing], Run] | None:
        """What it was served from last, from which it goes away, if anybody else still has it."""
        entry = self.entry
        run = None if self.run is None else self.run()
        self.held = self.run = None
        return None if entry is None or run is None else (entry, run)

    @property
    def entry(self) -> Cached[Thing] | None:
        """Where what it was last served from is cached, if anybody else still has it."""
        return None if self.held is None else self.held()

    def serve(self, run: Run, entry: Cached[Thing] | None) -> Run:
        """Serve it from a run from now on, as long as that is cached; what has been dropped is not kept for it."""
        self.held, self.run = (None, None) if entry is None else (ref(entry), ref(run))
        return run

    def deliver(self, batch: TierBatch, now_s: float) -> int:
        """A batch is handed out; its size in bytes."""
        records = batch.records
        size_bytes = memoryview(records.data).nbytes
        here, start = batch.log_offset + size_bytes, records.base_offset
        if self.last_start < start <= self.next_offset:
            new_bytes = min(max(here - self.here, 0), size_bytes)
            self.window = grown(self.window, new_bytes, self.limits)
        self.last_start, self.next_offset = start, start + len(records.sizes)
        self.leapt_to = -1
        self.here = here
        self.used_s = now_s
        return size_bytes

    def aim(self, share: int) -> int:
        """How many bytes to read ahead, of no more than ``share``: of what it will surely read as many as may be."""
        view = self.view
        if view is None or self.until <= self.position:
            return max(min(self.window, share), 1)
        return max(min(self._sure_end(view) - self._reached(view), self._sure_most(share)), 1)

    def ahead_now(self, share: int) -> int:
        """How many bytes to read ahead now, of no more than ``share``; 0: none, enough is here or on its way."""
        view, position = self.view, self.position
        if view is None or (self.next_offset < 0 and self.until < 0):
            return 0
        if self.until < 0:
            window = max(min(self.window, share), 1)
            return window if wants_more(window, self.asked - self.here, self.limits) else 0
        if self.until <= position:
            return 0
        here, most, end = self._reached(view), self._sure_most(share), self._sure_end(view)
        left, unread, step = end - here, self.asked - here, min(REFILL_BYTES, most // 2)
        # The end is near: a share of what is left, and then a share of the rest, would be a wait for each.
        wanted = (
            (most if most - unread > step else 0)
            if left >= most
            else (max(left, 1) if unread < left else 0)
        )
        if not wanted and here == self.here:
            self.calm_to = min(self.asked - most + step, end - most) if left >= most else end - 1
        return wanted

    def _sure_most(self, share: int) -> int:
        # The rest of its share is for what its batches are cut from, which is not ahead of it any more.
        return max(
            min(self.sure_max, max(share // 2, share - SERVED_BYTES), self.ahead_max or share), 1
        )

    def _reached(self, view: IncarnationView) -> int:
        """Log offset at which it stands. Records need not be alike: where nothing was read, or too much, by their number."""
        if self.next_offset >= 0 and self.here < self._sure_end(view):
            return self.here
        return view.about(QueueOffset(self.position))

    def _sure_end(self, view: IncarnationView) -> int:
        """Log offset behind what it says that it will read, about."""
        known_until, known_view, end = self._end
        if known_until != self.until or known_view is not view:
            end = view.about(QueueOffset(self.until))
            self._end = self.until, view, end
        return end

    def take_along(self, start: int, count: int, log_offset: int, log_bytes: int) -> None:
        """A part is on its way for it with what others asked for; where that joins, read-ahead goes on behind it."""
        if log_offset <= self.asked or start <= self.position < start + count:
            self.asked = max(self.asked, log_offset + log_bytes)

    def lose(self, log_offset: int) -> None:
        """What was read ahead for it, from a log offset on, was dropped unread; what lies behind it was not its loss."""
        if log_offset < self.here:
            return
        self.window = halved(self.window, self.limits)
        self.sure_max = halved(self.sure_max, self.limits)
        self.fall_back(log_offset)


IDLE_SECONDS = 60.0
"""A stream that was not read for so long is forgotten; it begins again with the smallest window."""

SURE_SHARE = 2
"""How much further is read ahead, at most, of what a reader says that it will read: nothing of that is in vain."""

SERVED_BYTES: Final = 2 << 20
"""Of a reader's share, for what it is served from; where this is more than half of the share, half."""

Name = tuple[str, "MessageQueue", "History | None"]
"""Group, queue and history (None: whichever is the present one)."""


class Readers:
    """The readers that a fetcher knows: one ``Stream`` for each group in a history of a queue.

    A reader is made by its first read and forgotten when it has come to the end, has done, or has not read for a minute.
    """

    def __init__(self, limits: WindowLimits) -> None:
        self._limits = limits
        self._streams: dict[
            Name, Stream
        ] = {}  # those that have begun, and those that were announced
        self._sharing: set[Stream] = set()  # those that take a share
        self._together: dict[tuple[MessageQueue, History | None], dict[Stream, None]] = {}
        """Those that have begun, by what they read."""

    def __len__(self) -> int:
        return len(self._sharing)

    def find(self, name: Name) -> Stream | None:
        """A reader that is known."""
        return self._streams.get(name)

    def announce(self, name: Name) -> Stream:
        """A reader that will begin; it takes no share until then, or until something is asked for it (``start``)."""
        stream = self._streams.get(name)
        if stream is None:
            group, queue, _ = name
            most = SURE_SHARE * self._limits.bytes_max
            stream = self._streams[name] = Stream(group, queue, self._limits, sure_max=most)
        return stream

    def start(self, name: Name) -> None:
        """Something is asked for a reader that was announced: it takes a share, or those who begin would take too much."""
        self._sharing.add(self._streams[name])

    def make(self, name: Name, now_s: float) -> Stream:
        """A reader, which begins now unless it has begun."""
        stream = self.announce(name)
        begun = self._together.setdefault(name[1:], {})
        if stream not in begun:
            begun[stream] = None
            self._sharing.add(stream)
            stream.used_s = now_s
        return stream

    def forget(self, name: Name) -> Stream | None:
        """A reader has done; None: nobody knows it."""
        stream = self._streams.pop(name, None)
        if stream is not None:
            self._sharing.discard(stream)
            others = self._together.get(name[1:], {})
            others.pop(stream, None)
            if not others:
                self._together.pop(name[1:], None)
        return stream

    def of_group(self, group: str) -> list[Name]:
        """All of one group, begun or not."""
        return [name for name in self._streams if name[0] == group]

    def idle(self, now_s: float) -> list[Name]:
        """Those that have not read for a minute."""
        until_s = now_s - IDLE_SECONDS
        return [name for name, stream in self._streams.items() if stream.used_s < until_s]

    def is_spent(self, name: Name, end: int) -> bool:
        """Whether all others that read the same are past what ends at a queue offset."""
        me = self._streams.get(name)
        others = self._together.get(name[1:], ())
        return all(other is me or other.position >= end for other in others)

    def streams(self) -> list[Stream]:
        """All of them."""
        return list(self._streams.values())

    def clear(self) -> None:
        """Forget all."""
        self._streams.clear()
        self._sharing.clear()
        self._together.clear()


# -- reading many queues

KIB = 1024
_CRC_BYTES: Final = 4
"""Of a plain section, behind its items: one for each block."""

SECTION_BYTES_MAX: Final = 1024 * KIB
"""Of a section that comes along with others; a larger one is worth a request of its own."""

RUN_BYTES_MIN: Final = 256 * KIB

CRUMB_BYTES: Final = 64 * KIB
"""So much more comes with a request where it is the last that is wanted there."""

CACHE_SHARE: Final = 4

AHEAD_SECTIONS: Final = 2
"""How many sections are read ahead of a queue whose sections are all small: more would be more bundles at once."""


class Member(NamedTuple):
    """One of the queues that a reader reads."""

    stream: Stream  # its reader
    view: IncarnationView  # what is read
    start: QueueOffset  # first queue offset
    until: QueueOffset  # one past the last


@dataclass(frozen=True, slots=True)
class _Row:
    """Sections of one bundle, in the order in which they lie."""

    starts: list[int]
    ends: list[int]
    queue_ends: list[int]
    members: list[int]
    parts: list[int]
    keys: list[Key]
    rows: npt.NDArray[np.void]
    is_plain: list[bool]


class Neighbours:
    """Where the sections of many queues lie in bundles, so that one reader's request takes along what others will want."""

    def __init__(self, members: Sequence[Member], settings: FetchSettings) -> None:
        self._members = members
        self._streams = {member.stream.queue: member.stream for member in members}
        self._gap_bytes = settings.transfers.coalesce_gap_bytes
        self._bundles = _by_bundle(members, settings)
        share = settings.cache_bytes // (CACHE_SHARE * max(len(self._bundles), 1))
        most = min(settings.transfers.coalesced_bytes_max, settings.chunk_bytes)
        self.run_bytes = min(max(share, RUN_BYTES_MIN), most)

    def beside(self, part: Part, is_known: Callable[[Key], bool]) -> list[tuple[Stream, Part]]:
        """What comes along with the section of a part: readers, and the parts that they will want."""
        found = self._find(part)
        if found is None:
            return []
        row, at = found
        numbers = self._together(row, at, is_known, is_plain=False)
        numbers.remove(at)
        members = [(self._members[row.members[n]], row.parts[n]) for n in numbers]
        return [(member.stream, member.view.part(number)) for member, number in members]

    def multi_read(self, part: Part, is_known: Callable[[Key], bool]) -> MultiSectionRead | None:
        """What is worth taking along with ``part``, which is asked for and is among it."""
        found = self._find(part)
        if found is None or not found[0].is_plain[found[1]]:
            return None
        row, at = found
        numbers = self._together(row, at, is_known, is_plain=True)
        if len(numbers) == 1:
            return None
        queues = [self._members[row.members[n]].stream.queue for n in numbers]
        keys = [row.keys[n] for n in numbers]
        return MultiSectionRead(part.bundle, numbers.index(at), queues, row.rows[numbers], keys)

    def stream(self, queue: MessageQueue) -> Stream | None:
        """The reader of a queue; None: it has done, or is not one of these."""
        return self._streams.get(queue)

    def leave(self, stream: Stream) -> bool:
        """A reader has done; whether all have."""
        if self._streams.get(stream.queue) is stream:
            del self._streams[stream.queue]
        return not self._streams

    def _find(self, part: Part) -> tuple[_Row, int] | None:
        row = self._bundles.get(part.bundle.key)
        if row is None:
            return None
        at = bisect_left(row.starts, part.section.start)
        if at == len(row.starts) or row.starts[at] != part.section.start:
            return None
        return row, at

    def _together(
        self, row: _Row, at: int, is_known: Callable[[Key], bool], *, is_plain: bool
    ) -> list[int]:
        """Numbers of the sections that one request brings with that at ``at``, itself included, in order."""
        places = [(row.starts[at], row.ends[at], at, None)]
        left = self.run_bytes - (row.ends[at] - row.starts[at])
        before = self._wanted(row, range(at - 1, -1, -1), left, is_known, is_plain=is_plain)
        behind = self._wanted(
            row, range(at + 1, len(row.starts)), left, is_known, is_plain=is_plain
        )
        places = [*reversed(before), *places, *behind]
        bytes_max = self.run_bytes + CRUMB_BYTES
        bounds = plan_merge(places, len(before), gap_bytes=self._gap_bytes, bytes_max=bytes_max)
        return [place[2] for place in places[bounds.low : bounds.high]]

    def leave_out(self, key: str) -> None:
        """Ask for nothing of a bundle together any more: something of it is damaged."""
        self._bundles.pop(key, None)

    def _wanted(
        self,
        row: _Row,
        numbers: range,
        left: int,
        is_known: Callable[[Key], bool],
        *,
        is_plain: bool,
    ) -> list[tuple[int, int, int, None]]:
        """Sections that are wanted, as far as one request may reach (``left`` bytes); only plain ones, or all.

        And a little farther if nothing is wanted behind that: else it would be a request of its own, for which the reader of
        a single section waits.
        """
        found: list[tuple[int, int, int, None]] = []
        within = 0
        for number in numbers:
            is_wanted = row.is_plain[number] or not is_plain
            is_wanted = is_wanted and self._is_wanted(row, number, is_known)
            if left < 0 and not is_wanted:
                break
            left -= row.ends[number] - row.starts[number]
            if left < -CRUMB_BYTES:
                return found[:within]
            if is_wanted:
                found.append((row.starts[number], row.ends[number], number, None))
                within += left >= 0
        return found

    def _is_wanted(self, row: _Row, number: int, is_known: Callable[[Key], bool]) -> bool:
        stream, view, _, _ = self._members[row.members[number]]
        if stream.view is not view:  # it reads something newer
            return False
        return row.queue_ends[number] > stream.position and not is_known(row.keys[number])


def _by_bundle(members: Sequence[Member], settings: FetchSettings) -> dict[str, _Row]:
    """The small sections that will be read, by bundle: looked up in columns, those of a queue in order."""
    if not members:
        return {}
    names: dict[str, int] = {}
    held = [one.key for member in members for one in member.view.parts.bundles]
    bundle = np.array([names.setdefault(key, len(names)) for key in held], np.int64)
    rows = np.concatenate([one.view.parts.rows.view(np.uint8) for one in members]).view(PART)
    counts = np.array([len(one.view.parts) for one in members])
    member = np.repeat(np.arange(len(members)), counts)
    part = np.arange(len(held)) - np.repeat(np.cumsum(counts) - counts, counts)
    chosen = _small(members, rows, member, settings)
    order = chosen[np.lexsort((rows["start"][chosen], bundle[chosen]))]
    cuts = np.searchsorted(bundle[order], np.arange(len(names) + 1)).tolist()
    found = {}
    for key, (low, high) in zip(names, pairwise(cuts), strict=True):
        if low < high:
            at = order[low:high]
            found[key] = _row(key, rows[at], member[at], part[at], settings)
    return found


def _small(
    members: Sequence[Member],
    rows: npt.NDArray[np.void],
    member: npt.NDArray[np.int64],
    settings: FetchSettings,
) -> npt.NDArray[np.int64]:
    """Which of the parts that will be read are small; of a queue where all are, few of them are read ahead.

    ``rows``: ``PART``, one a part; ``member``: int64[n], number of the queue that each is of.
    """
    starts = rows["queue_offset"].astype(np.int64)
    low = np.array([one.start for one in members], np.int64)[member]
    high = np.array([one.until for one in members], np.int64)[member]
    wanted = (starts < high) & (starts + rows["count"] > low)
    is_small = rows["size_bytes"] <= SECTION_BYTES_MAX
    is_small &= rows["log_bytes"] <= settings.chunk_bytes
    chosen = np.flatnonzero(wanted & is_small)
    largest = np.zeros(len(members), np.int64)
    np.maximum.at(largest, member[chosen], rows["log_bytes"][chosen].astype(np.int64))
    largest[member[wanted & ~is_small]] = 0
    for one, size_bytes in zip(members, largest.tolist(), strict=True):
        if size_bytes:
            one.stream.ahead_max = AHEAD_SECTIONS * max(size_bytes, PART_BYTES)
    return chosen


def _row(
    bundle: str,
    rows: npt.NDArray[np.void],
    members: npt.NDArray[np.int64],
    parts: npt.NDArray[np.int64],
    settings: FetchSettings,
) -> _Row:
    starts, items_at, counts = (rows[name].tolist() for name in ("start", "items_at", "count"))
    columns = zip(repeat(bundle), starts, items_at, counts, repeat(INDEX), strict=False)
    return _Row(
        starts,
        (rows["start"] + rows["size_bytes"]).tolist(),
        (rows["queue_offset"] + rows["count"]).tolist(),
        members.tolist(),
        parts.tolist(),
        list(columns),
        rows,
        _are_plain(rows, settings.block_bytes).tolist(),
    )


def _are_plain(rows: npt.NDArray[np.void], block_bytes: int) -> npt.NDArray[np.bool_]:
    """Of parts: all of a section, small enough for one block, stored as it is, and of a size that agrees with that."""
    records, items = rows["records_bytes"].astype(np.int64), rows["items"].astype(np.int64)
    blocks = -(-records // BLOCK_BYTES) - (-(items * ITEM_BYTES) // BLOCK_BYTES)
    are_plain: npt.NDArray[np.bool_] = (
        (rows["stored_bytes"] == records)
        & (rows["gone"] == 0)
        & (rows["log_bytes"] == records)
        & (rows["count"] == items)
        & (records <= block_bytes)
        & (rows["size_bytes"] == records + items * ITEM_BYTES + _CRC_BYTES * blocks)
    )
    return are_plain
