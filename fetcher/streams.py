"""What a fetcher knows of one reader: one group in one queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import ref

from fetcher.runs import Run
from fetcher.window import grown, halved, wants_more

if TYPE_CHECKING:
    from weakref import ReferenceType

    from fetcher.cache import Entry
    from fetcher.layout import PartLayout
    from fetcher.window import WindowLimits
    from tiered.log.decode import TierBatch
    from tiered.log.view import LifeView
    from tiered.model import MessageQueue


@dataclass(slots=True, eq=False)
class Stream:
    """A reader that goes through a queue, in order as a rule. Its owner holds a lock around it.

    Attributes:
        group: Who reads.
        queue: What.
        limits: Of its window.
        window: Bytes to read ahead.
        view: The life that it read last.
        held: Where the run is cached that it was last served from; it does not keep it in memory.
        here: Log offset behind the last batch.
        asked: Log offset up to which read-ahead has been asked for.
        next_offset: Queue offset at which reading in order goes on; -1 before the first batch, and after a leap.
        last_start: Queue offset of the last batch; likewise.
        leapt_to: Where it has gone, until it is given something there; else -1.
        wary: Queue offsets near damage: no more is asked for than is needed.
        paused_s: Nothing is read ahead before, since that failed; monotonic seconds.
        used_s: When it was last read, monotonic seconds.
    """

    group: str
    queue: MessageQueue
    limits: WindowLimits
    window: int = 0
    view: LifeView | None = None
    held: ReferenceType[Entry[Run | PartLayout]] | None = None
    here: int = 0
    asked: int = 0
    next_offset: int = -1
    last_start: int = -1
    leapt_to: int = -1
    wary: range = range(0)
    paused_s: float = 0.0
    used_s: float = 0.0

    def look(self, view: LifeView) -> None:
        """Go on with a view; what was read of another one says nothing of it."""
        if self.view is not view:
            self.view, self.held = view, None
            self.asked = 0

    def arrive(self, start: int) -> bool:
        """Begin a read; whether the reader has gone elsewhere, and something may be under way for it.

        Asking again for what was delivered last, or for the rest of it, is no leap: its answer may have been lost, or
        cut. Nor is it one to try again.
        """
        if self.last_start <= start <= self.next_offset or start == self.leapt_to:
            return False
        had_asked = self.asked > 0
        self.window, self.asked = self.limits.bytes_min, 0
        self.next_offset, self.last_start, self.leapt_to = -1, -1, start
        return had_asked

    def pass_over(self, start: int, end: int) -> None:
        """There is nothing at ``[start, end)``: reading in order goes on behind it."""
        self.last_start = self.last_start if start == self.next_offset else start
        self.next_offset, self.leapt_to = end, -1

    def at_hand(self, start: int) -> Run | None:
        """What it was served from last, if that is still here and holds ``start`` as well."""
        entry = self.entry
        run = entry.value if entry is not None and entry.is_here else None
        if isinstance(run, Run) and run.base <= start < run.end:
            return run
        self.held = None
        return None

    @property
    def entry(self) -> Entry[Run | PartLayout] | None:
        """What it was last served from, if anybody else still has it."""
        return None if self.held is None else self.held()

    def serve(self, run: Run, entry: Entry[Run | PartLayout] | None) -> Run:
        """Serve it from a run from now on, as long as that is cached; what has been dropped is not kept for it."""
        self.held = None if entry is None else ref(entry)
        return run

    def deliver(self, batch: TierBatch, now_s: float) -> None:
        """A batch is handed out."""
        size_bytes = memoryview(batch.records.data).nbytes
        if self.last_start < batch.base_offset <= self.next_offset:
            new_bytes = batch.log_offset + size_bytes - self.here
            self.window = grown(self.window, min(max(new_bytes, 0), size_bytes), self.limits)
        self.last_start, self.next_offset = batch.base_offset, batch.end_offset
        self.leapt_to = -1
        self.here = batch.log_offset + size_bytes
        self.used_s = now_s

    def wants_more(self, window: int) -> bool:
        """Whether it is time to read ahead, with a window of so many bytes."""
        return wants_more(window, self.asked - self.here, self.limits)

    def lose(self, log_offset: int) -> None:
        """What was read ahead for it, from a log offset on, was dropped unread; what lies behind it was not its loss."""
        if log_offset < self.here:
            return
        self.window = halved(self.window, self.limits)
        self.asked = min(self.asked, log_offset)
