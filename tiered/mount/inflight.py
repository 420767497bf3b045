"""What groups that pop have of each queue: what is acknowledged, what is in flight; and what of that is to be written.

``QueuePops`` is a machine of one group in one queue, without clock and I/O: a floor, below which all is acknowledged, what
is acknowledged above it, and what was given and is hidden until a time. ``AckLog`` collects what has changed since it was
written, and has those wait who are to know when it is. Of one loop.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from heapq import heappop, heappush
from itertools import chain
from typing import TYPE_CHECKING, Final

from backends.lazy_dataclass import dataclass
from tiered.mount.offsets import Acknowledged
from tiered.mount.protocol import Code, RefusalError
from tiered.mount.pulling import wake

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tiered.mount.offsets import Name, PopName

ACK_S: Final = 2.5
"""So long an acknowledgement waits until it is durable; clients wait for 3 s."""
FAR: Final = 1 << 62


@dataclass(slots=True)
class HiddenUntil:
    """A message in flight."""

    until_ms: int  # hidden up to then, included; 0: it waits to be given again
    popped_ms: int  # by which its last receiver names it


class QueuePops:
    """A group's pops of one queue. Times come from outside; nothing is read or written here."""

    def __init__(self, floor: int, kept: Acknowledged | None = None) -> None:
        """Begin where the group's offset is, with what it had acknowledged."""
        self.given: dict[int, HiddenUntil] = {}  # by queue offset
        self.attempt = ""  # id of the request that was given something in order last
        self.is_read = False  # by a pop, which others do not wait for
        self.turns = 0  # how often it began anew; what was read before counts for nothing
        kept = kept or Acknowledged()
        self.floor = self.next = floor  # ``next``: from there on nothing was given yet
        self._starts, self._ends = list(kept.ranges[::2]), list(kept.ranges[1::2])
        self._counts = dict(zip(kept.counts[::2], kept.counts[1::2], strict=True))
        self._hidden: list[tuple[int, int]] = []  # until when, queue offset; stale ones stay
        self._visible: list[int] = []  # queue offsets, likewise
        self._drop(0, floor)
        self._cut(floor)

    # -- giving -----------------------------------------------------------------------------------

    def again(self, now_ms: int, count: int) -> list[tuple[int, int]]:
        """Ranges of messages that are visible again, the first so many of them."""
        found: list[tuple[int, int]] = []
        for offset in self._take_visible(now_ms, count):
            if found and found[-1][1] == offset:
                found[-1] = (found[-1][0], offset + 1)
            else:
                found.append((offset, offset + 1))
        return found

    def fresh(self) -> tuple[int, int]:
        """The next range of which nothing was given, unless by its offset (``given``), and nothing is acknowledged."""
        while True:
            at = bisect_right(self._starts, self.next)
            if at and self._ends[at - 1] > self.next:
                self.next = self._ends[at - 1]
            elif self.next in self.given:
                self.next += 1
            else:
                return self.next, self._starts[at] if at < len(self._starts) else FAR

    def _take_visible(self, now_ms: int, count: int) -> list[int]:
        while self._hidden and self._hidden[0][0] < now_ms:  # so that no two have it by one time
            until_ms, offset = heappop(self._hidden)
            one = self.given.get(offset)
            if one is not None and one.until_ms == until_ms:
                one.until_ms = 0
                heappush(self._visible, offset)
        found: list[int] = []
        while self._visible and len(found) < count:
            offset = heappop(self._visible)
            one = self.given.get(offset)
            if one is not None and not one.until_ms and found[-1:] != [offset]:
                found.append(offset)
        for offset in found:
            heappush(self._visible, offset)
        return found

    def give(self, offsets: Iterable[int], until_ms: int, now_ms: int) -> list[int]:
        """They are given to somebody; how often each was before."""
        before: list[int] = []
        for offset in offsets:
            count = self._counts.get(offset, 0) or (offset in self.given)
            before.append(count)
            if count:
                self._counts[offset] = count + 1
            self.given[offset] = HiddenUntil(until_ms, now_ms)
            heappush(self._hidden, (until_ms, offset))
        return before

    def is_blocked(self, now_ms: int, attempt: str) -> bool:
        """Whether nothing may be given in order: a message that was is hidden. Who repeats a request gets it again."""
        if attempt and attempt == self.attempt:
            return False
        return any(one.until_ms >= now_ms for one in self.given.values())

    def rewind(self) -> None:
        """Give all again that is not acknowledged."""
        for offset in self.given:
            self._counts.setdefault(offset, 1)
        self.given.clear()
        self._hidden.clear()
        self._visible.clear()
        self.next = self.floor
        self.turns += 1

    def has_more(self, now_ms: int, end: int) -> bool:
        """Whether a pop would find something, in a queue that ends there."""
        if self.fresh()[0] < end:
            return True
        return bool(self._take_visible(now_ms, 1))

    # -- what became of it ------------------------------------------------------------------------

    def is_settled(self, offset: int) -> bool:
        """Whether it is acknowledged."""
        at = bisect_right(self._starts, offset)
        return offset < self.floor or (at > 0 and offset < self._ends[at - 1])

    def is_free(self, offset: int) -> bool:
        """Whether it may be given: nobody has it, and it is not acknowledged."""
        one = self.given.get(offset)
        return (one is None or not one.until_ms) and not self.is_settled(offset)

    def settle(self, start: int, end: int) -> bool:
        """A range is acknowledged, or holds nothing for the group; whether any of it was not."""
        start = max(start, self.floor)
        low, high = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if start >= end or (
            high - low == 1 and self._starts[low] <= start and end <= self._ends[low]
        ):
            return False
        if low < high:
            start, end = min(start, self._starts[low]), max(end, self._ends[high - 1])
        self._starts[low:high], self._ends[low:high] = [start], [end]
        self._drop(start, end)
        self._rise()
        return True

    def _drop(self, start: int, end: int) -> None:
        offsets: Iterable[int] = range(start, end)
        if end - start > len(self.given) + len(self._counts):
            # What was given often by a mount before is not in flight.
            offsets = [offset for offset in (*self.given, *self._counts) if start <= offset < end]
        for offset in offsets:
            self.given.pop(offset, None)
            self._counts.pop(offset, None)

    def hide(self, offset: int, popped_ms: int, until_ms: int, now_ms: int) -> bool:
        """Its receiver wants it hidden until then; False: it is not in its hands any more.

        After a crash nobody knows in whose hands it is: then it is believed.
        """
        one = self.given.get(offset)
        if self.is_settled(offset) or (one is not None and one.popped_ms != popped_ms):
            return False
        if one is None:
            self._counts.setdefault(offset, 1)
        self.given[offset] = HiddenUntil(until_ms, now_ms)
        heappush(self._hidden, (until_ms, offset))
        return True

    def follow(self, floor: int) -> None:
        """The group's offset is elsewhere: ahead, or it was put back, and then all counts as never given."""
        if floor > self.floor:
            self._cut(floor)
        elif floor < self.floor:
            self.restart(floor)

    def restart(self, floor: int) -> None:
        """A person has put the group there: from there on all counts as never given."""
        self.floor = self.next = floor
        self.turns += 1
        for table in (self.given, self._counts):
            table.clear()
        for row in (self._starts, self._ends, self._hidden, self._visible):
            row.clear()

    def _cut(self, floor: int) -> None:
        """The group's offset is there: nothing below counts any more. It may be in the midst of what is acknowledged."""
        gone = bisect_right(self._ends, floor)
        del self._starts[:gone], self._ends[:gone]
        if self._starts:
            self._starts[0] = max(self._starts[0], floor)
        self._drop(self.floor, floor)
        self.floor, self.next = floor, max(self.next, floor)

    def _rise(self) -> None:
        """What is acknowledged right at the floor is below it from now on."""
        if self._starts and self._starts[0] <= self.floor:
            self.floor = self._ends[0]
            self.next = max(self.next, self.floor)
            del self._starts[0], self._ends[0]

    @property
    def is_idle(self) -> bool:
        """Whether its floor says all there is to say."""
        return not (self.given or self._starts or self._counts or self.is_read)

    def kept(self) -> Acknowledged:
        """What is to be written of it beside its floor."""
        often = sorted(self._counts.items())
        return Acknowledged(
            tuple(chain.from_iterable(zip(self._starts, self._ends, strict=True))),
            tuple(chain.from_iterable(often)),
        )


# -- what is to be written -------------------------------------------------------------------------


class AckLog:
    """States that have changed since they were written, and who waits until they are. For one loop."""

    def __init__(self, *, is_kept: bool = True) -> None:
        """Nothing has changed.

        Args:
            is_kept: Somebody writes it; else nobody waits for that.
        """
        self._is_kept = is_kept
        self.wanted = asyncio.Event()  # somebody waits
        self.modes: dict[Name, tuple[str, int]] = {}
        """How groups are told to consume, and how many clients share a queue."""
        self._changed: set[PopName] = set()
        self._changed_modes: set[Name] = set()
        self._taken: tuple[set[PopName], set[Name]] = (set(), set())
        self._waiting: list[asyncio.Future[None]] = []
        self._written: list[asyncio.Future[None]] = []

    def note(self, name: PopName) -> None:
        """A state has changed; nobody waits for that."""
        if self._is_kept:
            self._changed.add(name)

    def set_mode(self, name: Name, mode: str, sharing: int) -> None:
        """How a group is told to consume a topic."""
        self.modes[name] = mode, sharing
        self._changed_modes.add(name)

    def is_pending(self, name: PopName) -> bool:
        """Whether a state is not written as it is."""
        return name in self._changed or name in self._taken[0]

    async def durable(self) -> None:
        """Wait until all that has changed is written.

        Raises:
            RefusalError: The store does not take it in time.
        """
        if not self._is_kept:
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self.wanted.set()
        try:
            async with asyncio.timeout(ACK_S):
                await turn
        except TimeoutError:
            why = "the tier's store does not take acknowledgements now; the message may come again"
            raise RefusalError(Code.SYSTEM_BUSY, why) from None

    def take(self) -> tuple[set[PopName], set[Name]]:
        """What is to be written now; ``done`` says how that went."""
        self.wanted.clear()
        self._taken = self._changed, self._changed_modes
        self._changed, self._changed_modes = set(), set()
        self._written, self._waiting = self._waiting, []
        return self._taken

    def done(self, *, is_written: bool) -> None:
        """What was taken is durable, or goes with the next."""
        (changed, modes), self._taken = self._taken, (set(), set())
        written, self._written = self._written, []
        if is_written:
            for turn in written:
                wake(turn)
            return
        self._changed |= changed
        self._changed_modes |= modes
        self._waiting += written
        if self._waiting:
            self.wanted.set()
