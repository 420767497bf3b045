"""What a fetcher knows of its readers, each one group in one queue. Its owner holds a lock around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol
from weakref import ref

from fetcher.runs import Run
from fetcher.window import grown, halved, wants_more
from tiered.model import QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable
    from weakref import ReferenceType

    from fetcher.cache import Entry
    from fetcher.claims import Key
    from fetcher.layout import PartLayout
    from fetcher.window import WindowLimits
    from tiered.log.cursor import History
    from tiered.log.decode import TierBatch
    from tiered.log.parts import Part
    from tiered.log.view import LifeView
    from tiered.model import MessageQueue


class Beside(Protocol):
    """What lies beside what is asked for (``fetcher.sweeps``)."""

    def beside(self, part: Part, is_known: Callable[[Key], bool]) -> list[tuple[Stream, Part]]:
        """What comes along with a part."""
        ...


@dataclass(slots=True, eq=False)
class Stream:
    """A reader that goes through a queue, in order as a rule. Its owner holds a lock around it.

    Attributes:
        group: Who reads.
        queue: What.
        limits: Of its window.
        window: Bytes to read ahead.
        view: The life that it read last.
        state: The journal's state in which that was the newest view of it; None: to be looked up.
        held: Where the run is cached that it was last served from; it does not keep it in memory.
        here: Log offset behind the last batch.
        asked: Log offset up to which read-ahead has been asked for.
        next_offset: Queue offset at which reading in order goes on; -1 before the first batch, and after a leap.
        last_start: Queue offset of the last batch; likewise.
        leapt_to: Where it has gone, until it is given something there; else -1.
        until: Up to where its reader says that it will read; -1: it does not say.
        sweep: What its reader reads besides, if it has said so.
        ahead_max: Bytes to read ahead at most; 0: no limit but the others.
        sure_max: Bytes of that to read ahead at most; less once some were dropped unread.
        wary: Queue offsets near damage: no more is asked for than is needed.
        paused_s: Nothing is read ahead before, since that failed; monotonic seconds.
        used_s: When it was last read, monotonic seconds.
    """

    group: str
    queue: MessageQueue
    limits: WindowLimits
    window: int = 0
    view: LifeView | None = None
    state: object = None
    held: ReferenceType[Entry[Run | PartLayout]] | None = None
    here: int = 0
    asked: int = 0
    next_offset: int = -1
    last_start: int = -1
    leapt_to: int = -1
    until: int = -1
    sure_max: int = 0
    sweep: Beside | None = None
    ahead_max: int = 0
    wary: range = range(0)
    paused_s: float = 0.0
    _end: tuple[int, LifeView | None, int] = (-1, None, 0)
    used_s: float = 0.0

    def look(self, view: LifeView) -> None:
        """Go on with a view; what was read of another one says nothing of it."""
        if self.view is not view:
            self.view, self.held, self.state = view, None, None
            self.asked = 0

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
        return run if isinstance(run, Run) and run.base <= start < run.end else None

    def leave(self) -> Entry[Run | PartLayout] | None:
        """What it was served from last, from which it goes away, if anybody else still has it."""
        entry, self.held = self.entry, None
        return entry

    @property
    def entry(self) -> Entry[Run | PartLayout] | None:
        """What it was last served from, if anybody else still has it."""
        return None if self.held is None else self.held()

    def serve(self, run: Run, entry: Entry[Run | PartLayout] | None) -> Run:
        """Serve it from a run from now on, as long as that is cached; what has been dropped is not kept for it."""
        self.held = None if entry is None else ref(entry)
        return run

    def deliver(self, batch: TierBatch, now_s: float) -> int:
        """A batch is handed out; its size in bytes."""
        records = batch.records
        size_bytes = memoryview(records.data).nbytes
        here = batch.log_offset + size_bytes
        if self.last_start < records.base_offset <= self.next_offset:
            new_bytes = min(max(here - self.here, 0), size_bytes)
            self.window = grown(self.window, new_bytes, self.limits)
        self.last_start, self.next_offset = records.base_offset, records.end_offset
        self.leapt_to = -1
        self.here = here
        self.used_s = now_s
        return size_bytes

    def aim(self, share: int) -> int:
        """How many bytes to read ahead, of no more than ``share``: of what it will surely read as many as may be."""
        view, position = self.view, self.position
        if view is None or self.until <= position:
            return max(min(self.window, share), 1)
        known_until, known_view, end = self._end
        if known_until != self.until or known_view is not view:
            end = view.about(QueueOffset(self.until))
            self._end = self.until, view, end
        sure = end - self.here
        if (
            self.next_offset < 0 or sure <= 0
        ):  # records need not be alike: what is left by their number
            sure = end - view.about(QueueOffset(position))
        return max(min(sure, self.sure_max, share // 2, self.ahead_max or share), 1)

    def wants_more(self, window: int) -> bool:
        """Whether it is time to read ahead, with a window of so many bytes."""
        return wants_more(window, self.asked - self.here, self.limits)

    def lose(self, log_offset: int) -> None:
        """What was read ahead for it, from a log offset on, was dropped unread; what lies behind it was not its loss."""
        if log_offset < self.here:
            return
        self.window = halved(self.window, self.limits)
        self.sure_max = halved(self.sure_max, self.limits)
        self.asked = min(self.asked, log_offset)


IDLE_SECONDS = 60.0
"""A stream that was not read for so long is forgotten; it begins again with the smallest window."""

Name = tuple[str, "MessageQueue", "History | None"]
"""Group, queue and history (None: whichever is the present one)."""


class Readers:
    """The readers that a fetcher knows: one ``Stream`` for each group in a history of a queue.

    A reader is made by its first read and forgotten when it has come to the end, has done, or has not read for a minute.
    """

    def __init__(self, limits: WindowLimits) -> None:
        """Begin with none, whose windows will have these limits."""
        self._limits = limits
        self._streams: dict[Name, Stream] = {}
        self._announced: dict[Name, Stream] = {}
        self._together: dict[tuple[MessageQueue, History | None], dict[Stream, None]] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def find(self, name: Name) -> Stream | None:
        """A reader that is known."""
        return self._streams.get(name)

    def announce(self, name: Name) -> Stream:
        """A reader that will begin; it takes no share until then."""
        stream = self._streams.get(name) or self._announced.get(name)
        if stream is None:
            group, queue, _ = name
            stream = self._announced[name] = Stream(group, queue, self._limits)
        return stream

    def make(self, name: Name, now_s: float) -> Stream:
        """A reader, which begins now unless it is known."""
        stream = self._streams.get(name)
        if stream is None:
            group, queue, _ = name
            stream = self._announced.pop(name, None) or Stream(group, queue, self._limits)
            self._streams[name] = stream
            stream.used_s, stream.sure_max = now_s, self._limits.bytes_max
            self._together.setdefault(name[1:], {})[stream] = None
        return stream

    def forget(self, name: Name) -> Stream | None:
        """A reader has done; None: nobody knows it."""
        stream = self._streams.pop(name, None)
        if stream is None:
            return self._announced.pop(name, None)
        others = self._together[name[1:]]
        del others[stream]
        if not others:
            del self._together[name[1:]]
        return stream

    def of_group(self, group: str) -> list[Name]:
        """All of one group, begun or not."""
        return [name for name in (*self._streams, *self._announced) if name[0] == group]

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
        self._announced.clear()
        self._together.clear()
