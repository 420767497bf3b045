"""What a fetcher knows of one reader: one group in one queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fetcher.window import grown, halved, wants_more

if TYPE_CHECKING:
    from fetcher.cache import Entry
    from fetcher.layout import PartLayout
    from fetcher.runs import Run
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
        run: What it was last served from.
        entry: Where that is cached.
        here: Log offset behind the last batch.
        asked: Log offset up to which read-ahead has been asked for.
        next_offset: Queue offset at which reading in order goes on; -1 before the first batch.
        last_start: Queue offset of the last batch.
        used_s: When it was last read, monotonic seconds.
    """

    group: str
    queue: MessageQueue
    limits: WindowLimits
    window: int = 0
    view: LifeView | None = None
    run: Run | None = None
    entry: Entry[Run | PartLayout] | None = None
    here: int = 0
    asked: int = 0
    next_offset: int = -1
    last_start: int = -1
    used_s: float = 0.0

    def look(self, view: LifeView) -> None:
        """Go on with a view; what was read of another one says nothing of it."""
        if self.view is not view:
            self.view, self.run, self.entry = view, None, None
            self.asked = 0

    def arrive(self, start: int) -> bool:
        """Begin a read; whether the reader has gone elsewhere.

        Asking again for what was delivered last is no leap: its answer may have been lost.
        """
        leaps = start not in {self.next_offset, self.last_start}
        if leaps:
            self.window, self.asked = self.limits.bytes_min, 0
        return leaps

    def at_hand(self, start: int) -> Run | None:
        """What it was served from last, if that is still here and holds ``start`` as well."""
        run, entry = self.run, self.entry
        if run is None or entry is None or not entry.is_here or not run.base <= start < run.end:
            self.run = self.entry = None
            return None
        return run

    def serve(self, run: Run, entry: Entry[Run | PartLayout] | None) -> Run:
        """Serve it from a run from now on, as long as that is cached."""
        self.run, self.entry = run, entry
        return run

    def deliver(self, batch: TierBatch, now_s: float) -> None:
        """A batch is handed out."""
        size_bytes = memoryview(batch.records.data).nbytes
        if batch.base_offset == self.next_offset:
            self.window = grown(self.window, size_bytes, self.limits)
        self.last_start, self.next_offset = batch.base_offset, batch.end_offset
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
