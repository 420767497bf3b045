"""What was appended, handed to the thread that lists it, so that it need not read the log again.

**Contract.** The writer gives what it has written, in log order, without bodies; one thread takes it, in the same order.
No more than about ``BYTES_MAX`` are held: then the oldest go, and who takes reads those from the log instead.
Nothing is lost with it in a crash: the log has it all.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiered.store.columns import Kind, Places, Prepared, QueueKey

BYTES_MAX: Final = 32 << 20
_BYTES_EACH: Final = 256
"""About what a message takes besides its properties."""


@dataclass(slots=True, eq=False)  # made for every append: frozen ones take twice as long
class Handed:
    """The messages of one append.

    Attributes:
        begin: Where the log ended before it.
        end: Behind the last record.
        store_ms: Store time of all of them, UTC.
        queues: Topic and queue id of each.
        queue_offsets: Of each.
        positions: Physical offset of each.
        sizes: Bytes of each record.
        kinds: Of each: its sysFlag.
        properties: As stored.
    """

    begin: int
    end: int
    store_ms: int
    queues: Sequence[QueueKey]
    queue_offsets: Sequence[int]
    positions: Sequence[int]
    sizes: Sequence[int]
    kinds: Sequence[Kind]
    properties: Sequence[bytes]

    @property
    def size_bytes(self) -> int:
        """Of memory, about."""
        return _BYTES_EACH * len(self.sizes) + sum(map(len, self.properties))


class Handover:
    """See the module."""

    def __init__(self) -> None:
        self._waiting: deque[Handed] = deque()
        self._given = self._taken = self._dropped = 0
        self._next: Handed | None = None
        self._is_off = False

    def give(self, begin: int, messages: Prepared, places: Places) -> None:
        """Hand over what was written. From one thread at a time."""
        if self._is_off:
            return
        handed = Handed(
            begin,
            places.end,
            places.store_ms,
            messages.queues,
            places.queue_offsets,
            places.positions,
            messages.sizes,
            messages.kinds,
            messages.properties,
        )
        self._waiting.append(handed)
        self._given += handed.size_bytes
        while self._given - self._taken - self._dropped > BYTES_MAX and (oldest := self._pop()):
            self._dropped += oldest.size_bytes

    def take(self, position: int, limit: int, count_max: int) -> list[Handed]:
        """What was appended from ``position`` on, as far as it lies below ``limit``; about ``count_max`` messages.

        Empty when the log has to be read from ``position`` on, up to what ``peek`` tells.
        """
        found: list[Handed] = []
        count = 0
        while count < count_max and (handed := self.peek()) is not None:
            if handed.begin >= position:
                if handed.begin > position or handed.end > limit:
                    break
                found.append(handed)
                position, count = handed.end, count + len(handed.sizes)
            self._next = None  # it is taken, or was read from the log already
        return found

    def stop(self) -> None:
        """Hold nothing from now on: who takes wants the records themselves. From the thread that takes."""
        self._is_off, self._next = True, None
        self._waiting.clear()

    def peek(self) -> Handed | None:
        """The next one, for the thread that takes."""
        if self._next is None:
            self._next = self._pop()
            if self._next is not None:
                self._taken += self._next.size_bytes
        return self._next

    def _pop(self) -> Handed | None:
        try:
            return self._waiting.popleft()
        except IndexError:
            return None
