"""Following a store in log order: one read of the log, one check, one read of each consume queue per window.

**Contract.** Each queue's messages come in order, each queue offset once, as a message or a hole, from where the caller
said; a queue's batch begins later than the last one ended only when local retention has overtaken us. What the log's
own order does not give (a damaged record, a stale or foreign entry) is taken through the consume queue
(``tiered.local.queue_reader``): before the next message of that queue, or, when none follows, once the end of the log is
reached. When the broker stops or starts, the store is looked at anew and the follower goes on from its queue offsets.
For one thread. Nothing has to survive a crash: begin again with the queue offsets that are durable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from tiered.errors import ClosedError
from tiered.format.block import queue_groups, tag_guesses
from tiered.local.deadview import DeadView
from tiered.local.liveview import Advance, LiveView
from tiered.local.matching import Match, match, match_groups, runs
from tiered.local.pieces import LogPieces, Next, Piece, Resync
from tiered.local.queue_reader import sound_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from tiered.format.block import RecordBlock
    from tiered.local.catalog import QueueState
    from tiered.local.consumequeues import Longs
    from tiered.local.face import RecordBatch
    from tiered.local.queue_reader import TagRule
    from tiered.model import MessageQueue, QueueOffset


# -- views -------------------------------------------------------------------------------------------
#
# What a follower needs of its store: the view that holds now, and what is decided under the store's lock.

View = DeadView | LiveView


class FollowedStore(Protocol):
    """A store as its followers see it. All methods may be called from any thread."""

    def tag_rule(self, view: View) -> TagRule:
        """What becomes of the tag codes of a view's entries."""
        ...

    def current_view(self) -> View:
        """The view that holds now; made anew when the broker has stopped or started."""
        ...

    def find(self, view: View, queue: MessageQueue) -> QueueState | None:
        """The state of a queue that may be new; None when its topic is left out."""
        ...

    def claim(
        self, view: View, state: QueueState, block: RecordBlock, found: Match, walked_from: int
    ) -> None:
        """Decide on records that are not listed, in the committed part of the log, which was walked from a place on."""
        ...

    def advance(
        self,
        view: LiveView,
        position: int,
        bytes_max: int,
        take: Callable[[Advance], list[RecordBatch]],
    ) -> list[RecordBatch] | None:
        """Move a running store's frontier, if it stands at ``position``, and let ``take`` make batches of it.

        Returns:
            None when nothing is new, or the frontier stands elsewhere.
        """
        ...

    def read_until(self, view: View, state: QueueState, start: int, end: int) -> RecordBatch | None:
        """Some of ``[start, end)`` through the consume queue; None when all of it is gone, or the view holds no more."""
        ...

    def is_unread(self, queue: MessageQueue) -> bool:
        """Whether a queue waits for a record that the device fails to read."""
        ...

    def follow_expiry(self, view: View) -> None:
        """Bring the queues' minima up to date if the log's minimum is known to have moved."""
        ...


# -- follower ----------------------------------------------------------------------------------------


_START_LOOKAHEAD: Final = 64
_ITEM_BYTES: Final = 32
"""What an item costs without its record: holes are not for nothing."""


class RocketMQFollower:
    """Gives what a store gets, in the order of its log, from where each queue's caller stands."""

    def __init__(
        self,
        store: FollowedStore,
        starts: Mapping[MessageQueue, QueueOffset],
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store = store
        self._stop = stop
        self._next: dict[MessageQueue, int] = {queue: int(start) for queue, start in starts.items()}
        self._last: dict[MessageQueue, int] = {}  # local physical offset of the record before it
        self._fallen: set[MessageQueue] = set()
        self._is_idle = False
        self._is_at_end = False
        self._is_closed = False
        self._must_sweep = True
        self._view = store.current_view()
        self._tags = store.tag_rule(self._view)
        self._guessed: tuple[RecordBlock, Longs] | None = None
        self._note_places()
        self._walked_from = self._position = self._first_position()
        self._pieces = LogPieces(self._view.log)
        self._resync = Resync(self._view.log, self._view.catalog)

    @property
    def is_idle(self) -> bool:
        return self._is_idle

    @property
    def is_at_end(self) -> bool:
        return self._is_at_end

    @property
    def position(self) -> int:
        """Local physical offset up to which the log has been followed."""
        return self._position

    def close(self) -> None:
        """See ``Follower``. The store's files stay open."""
        self._is_closed = True

    def poll(self, window_bytes: int) -> list[RecordBatch]:
        if self._is_closed:
            raise ClosedError("the follower has been closed")
        view = self._store.current_view()
        if view is not self._view:
            self._go_on_in(view)
        self._is_at_end = False
        if self._position < view.log_end:
            self._is_idle = False
            batches = self._follow(view, window_bytes)
            self._is_at_end = self._position >= view.log_end and not view.is_live
            return batches
        if isinstance(view, LiveView):
            found = self._store.advance(view, self._position, window_bytes, self._take_advance)
            if found is not None:
                self._is_idle = False
                return found
            if self._position < view.log_end:
                return []  # somebody else has moved the frontier
        return self._sweep(view, window_bytes)

    def take_fallen(self) -> Collection[MessageQueue]:
        fallen, self._fallen = self._fallen, set()
        return fallen

    def seek(self, queue: MessageQueue, start: QueueOffset) -> None:
        """See ``Follower``. What lies before the place in the log is taken through the consume queue."""
        self._next[queue] = int(start)
        state = self._view.catalog.states.get(queue)
        if state is not None:
            self._last[queue] = self._place_before(state)
        self._must_sweep = True

    # -- where to begin --------------------------------------------------------------------------

    def _note_places(self) -> None:
        """Where in the log the record lies that was taken last of each queue, as far as the store has it."""
        self._last = {
            queue: self._place_before(state)
            for queue, state in list(self._view.catalog.states.items())
            if queue in self._next
        }

    def _place_before(self, state: QueueState) -> int:
        offset = self._next[state.queue] - 1
        if offset < 0:
            return -1
        entries = state.index.entries(offset, offset + 1)
        return int(entries.physical_offsets[0]) if entries.is_written[0] else -1

    def _note_fall(self, state: QueueState, block: RecordBlock, indices: Longs, start: int) -> None:
        """Note a queue of which a record that was taken already comes again, behind the last one in the log."""
        fell = block.queue_offsets[indices] < start
        fell &= block.physical_offsets[indices] > self._last.get(state.queue, -1)
        if fell.any() and state.queue in self._next:
            self._fallen.add(state.queue)

    def _first_position(self) -> int:
        """The lowest place in the log where a queue goes on."""
        view = self._view
        places = [
            place
            for state in list(view.catalog.states.values())
            if (place := self._place(state)) is not None
        ]
        return min(places, default=view.log_end)

    def _place(self, state: QueueState) -> int | None:
        """Where the record lies with which a queue goes on; None when it has none yet."""
        start = self._next_of(state)
        if start >= state.end:
            return None
        entries = state.index.entries(start, min(state.end, start + _START_LOOKAHEAD))
        usable = entries.is_written & (entries.physical_offsets >= self._view.log_min)
        usable &= entries.physical_offsets < self._view.log_end
        if not usable.any():
            return self._view.log_min
        return int(entries.physical_offsets[usable].min())

    def _next_of(self, state: QueueState) -> int:
        """The next queue offset wanted; local retention may have pushed it on."""
        return max(self._next.get(state.queue, 0), state.min)

    def _go_on_in(self, view: View) -> None:
        self._view = view
        self._tags = self._store.tag_rule(view)
        self._note_places()
        self._fallen.update(self._next)
        self._pieces = LogPieces(view.log)
        self._resync = Resync(view.log, view.catalog)
        self._walked_from = self._position = min(self._position, self._first_position())
        self._must_sweep = True

    # -- the committed part of the log -----------------------------------------------------------

    def _follow(self, view: View, window_bytes: int) -> list[RecordBatch]:
        self._position = max(self._position, view.log_min)
        piece = self._pieces.read(self._position, view.log_end, window_bytes)
        batches = self._take(view, piece.block)
        if len(piece.block) and not piece.block.is_sound:
            self._must_sweep = True
        self._move(view, piece)
        return batches

    def _move(self, view: View, piece: Piece) -> None:
        """Set the position behind a piece; over damage to where a consume queue says that a record begins."""
        if piece.follows is Next.FILE:
            following = piece.next_file
            self._position = view.log_end if following is None else min(following, view.log_end)
        elif piece.follows in {Next.NOTHING, Next.BROKEN} and piece.end < view.log_end:
            view.log.rescan()
            if piece.end < view.log_min:
                self._position = view.log_min  # expired while we were reading
                self._store.follow_expiry(view)
                return
            self._must_sweep = True
            self._position = self._resync.behind(piece.end, view.log_end)
            view.claims.note_lost(piece.end, self._position)
        else:
            self._position = piece.end

    def _take(self, view: View, block: RecordBlock) -> list[RecordBatch]:
        """The batches of the records in a piece."""
        groups = queue_groups(block)
        states = [self._state(view, queue) for queue in groups.queues]
        firsts = block.queue_offsets[groups.indices[groups.starts[:-1]]].tolist()
        found = match_groups(
            [
                None if state is None or first < self._next_of(state) else state.index
                for state, first in zip(states, firsts, strict=True)
            ],
            block,
            groups,
            view.listing if isinstance(view, DeadView) else None,
        )
        taken: list[tuple[QueueState, Match]] = []
        for number, (state, match_) in enumerate(zip(states, found, strict=True)):
            if state is None:
                continue
            mine = match_ or self._match_rest(state, block, groups.members(number))
            if mine is None:
                continue
            if not mine.is_all_listed:
                self._store.claim(view, state, block, mine, self._walked_from)
            _, end = mine.last_listed()
            if end > state.end and not view.is_live:
                state.end = end  # a damaged entry had hidden what lies behind it
            taken.append((state, mine))
        return self._emit(block, taken)

    def _state(self, view: View, queue: MessageQueue) -> QueueState | None:
        state = view.catalog.states.get(queue)
        if state is None or not state.index.row.bases:
            state = self._store.find(view, queue)
        return state

    def _match_rest(self, state: QueueState, block: RecordBlock, indices: Longs) -> Match | None:
        """Of records of which the first was taken already: what is new of them."""
        start = self._next_of(state)
        state.index.row.rescan()  # the files may be others now
        self._note_fall(state, block, indices, start)
        rest = indices[block.queue_offsets[indices] >= start]
        return match(state.index, block, rest) if len(rest) else None

    def _take_advance(self, found: Advance) -> list[RecordBatch]:
        self._position = found.end
        self._is_at_end = found.is_last
        return self._emit(found.block, found.taken)

    def _emit(
        self, block: RecordBlock, taken: Sequence[tuple[QueueState, Match]]
    ) -> list[RecordBatch]:
        """Batches of the listed records that were not taken yet, the gaps between them filled."""
        even: list[tuple[QueueState, Match]] = []
        odd: list[tuple[QueueState, Match]] = []
        for state, found in taken:
            goes_on = found.entries is not None and found.is_all_listed
            goes_on = goes_on and int(found.offsets[0]) == self._next_of(state)
            (even if goes_on else odd).append((state, found))
        batches = self._batches(block, even)
        for state, found in odd:
            batches += self._emit_runs(state, block, found, self._next_of(state))
        return batches

    def _emit_runs(
        self, state: QueueState, block: RecordBlock, found: Match, start: int
    ) -> list[RecordBatch]:
        if int(found.offsets.min()) < start:
            self._note_fall(state, block, found.indices[found.is_listed], start)
        listed = found.is_listed & (found.offsets >= start)
        indices = found.indices[listed]
        counts = None if found.counts is None else found.counts[listed]
        batches: list[RecordBatch] = []
        for first, last in runs(found.offsets[listed], counts):
            run = match(state.index, block, indices[first:last])
            at = int(run.offsets[0])
            if at >= self._next_of(state):
                batches.extend(self._fill(state, at))
                if self._store.is_unread(state.queue):
                    self._must_sweep = (
                        True  # and comes with all that is behind it when it can be read
                    )
                    return batches
                if run.entries is not None and run.is_all_listed:
                    batches += self._batches(block, [(state, run)])
        return batches

    def _batches(
        self, block: RecordBlock, taken: Sequence[tuple[QueueState, Match]]
    ) -> list[RecordBatch]:
        """One batch a queue, of records that are all listed, and with which the queues go on."""
        found = [(state.queue, match_) for state, match_ in taken]
        if not found:
            return []
        self._tags.apply_all(block, found, self._guesses(block))
        batches = sound_batches(block, found)
        indices = np.concatenate([match_.indices for _, match_ in found])  # one look for all lasts
        ends = np.cumsum([len(match_.indices) for _, match_ in found]) - 1
        lasts = block.physical_offsets[indices[ends]].tolist()
        for batch, last in zip(batches, lasts, strict=True):
            self._next[batch.queue] = batch.end_offset
            self._last[batch.queue] = last
        return batches

    def _guesses(self, block: RecordBlock) -> Longs:
        """Made once for all queues of a piece."""
        if self._guessed is None or self._guessed[0] is not block:
            self._guessed = block, tag_guesses(block)
        return self._guessed[1]

    # -- what the log's order does not give ------------------------------------------------------

    def _fill(self, state: QueueState, end: int) -> Iterator[RecordBatch]:
        """Take a queue's offsets up to ``end`` through its consume queue."""
        while (start := self._next_of(state)) < end and not self._stop():
            batch = self._store.read_until(self._view, state, start, end)
            if batch is None:
                return
            self._next[state.queue] = batch.end_offset
            last = int(batch.physical_offsets.max())
            self._last[state.queue] = max(last, self._last.get(state.queue, -1))
            yield batch

    def _sweep(self, view: View, window_bytes: int) -> list[RecordBatch]:
        """At the end of the log: what is left of queues that no later message has brought on."""
        batches: list[RecordBatch] = []
        size = 0
        if self._must_sweep:
            for state in list(view.catalog.states.values()):
                for batch in self._fill(state, state.end):
                    batches.append(batch)
                    size += memoryview(batch.data).nbytes + batch.count * _ITEM_BYTES
                    if size >= window_bytes:
                        self._is_idle = False
                        return batches
            self._must_sweep = self._stop() or self._store.current_view() is not view
        self._is_idle = self._is_at_end = not batches and not self._must_sweep
        if any(map(self._store.is_unread, view.catalog.states)):
            self._must_sweep = True  # idle as it is: the device may read it later
        return batches
