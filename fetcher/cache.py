"""What has been read from the tier and may be wanted again, within a budget of bytes.

Contract
    Entries stand on one of four shelves: ``UNREAD`` (read ahead, nobody had it yet), ``READ``, ``SPENT`` (every reader
    of its queue is past it) and ``INDEX``. Room is made by dropping the oldest of ``SPENT``, then what was used longest
    ago of ``READ`` and ``INDEX``, then the oldest of ``UNREAD``. Each shelf has its time to live: ``UNREAD`` since the
    entry was put there, the others since it was last used. ``SPENT`` has a limit of its own in bytes: whoever comes
    later may still profit from it, but memory that was never touched costs more than a second read of the same bytes.

    What is on its way counts as well: room is reserved before a request is sent (``reserve``), and becomes the entry's
    own when it is put, or is given back (``release``).

    Not safe for threads: its owner holds a lock around it. It keeps no clock: callers say what time it is, in
    monotonic seconds.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

V = TypeVar("V")

USED_AGAIN_SECONDS = 0.1
"""A thing that is used again so soon keeps its place: readers use one for each batch that they cut from it."""


class Shelf(IntEnum):
    """Where an entry stands."""

    UNREAD = 0
    READ = 1
    INDEX = 2
    SPENT = 3


@dataclass(slots=True, eq=False, weakref_slot=True)
class Entry(Generic[V]):
    """A thing that is cached.

    Attributes:
        value: The thing.
        keys: Under which it is found.
        size_bytes: What it takes.
        used_s: When it was put, or last used.
        shelf: Where it stands.
        owner: For whom it was read ahead.
        is_here: False once it has been dropped.
    """

    value: V
    keys: Sequence[Hashable]
    size_bytes: int
    used_s: float = 0.0
    shelf: Shelf = Shelf.UNREAD
    owner: object = None
    is_here: bool = False


@dataclass(slots=True)
class ByteCache(Generic[V]):
    """See the module's contract.

    Attributes:
        bytes_max: The budget.
        seconds: Time to live of each shelf.
        spent_bytes_max: What of them may be spent; None: no limit but the budget.
        held_bytes: Bytes of the entries.
        reserved_bytes: Bytes of what is on its way.
    """

    bytes_max: int
    seconds: Mapping[Shelf, float]
    spent_bytes_max: int | None = None
    held_bytes: int = 0
    reserved_bytes: int = 0
    _spent_bytes: int = 0
    _unread_bytes: int = 0
    _entries: dict[Hashable, Entry[V]] = field(default_factory=dict)
    _shelves: dict[Shelf, OrderedDict[int, Entry[V]]] = field(
        default_factory=lambda: {shelf: OrderedDict() for shelf in Shelf}
    )

    def get(self, key: Hashable) -> Entry[V] | None:
        """What is there under a key."""
        return self._entries.get(key)

    def reserve_gently(self, size_bytes: int) -> bool:
        """Make room for what nobody needs yet, if that costs only what was read, and half is left for others."""
        ahead = self._unread_bytes + self.reserved_bytes + size_bytes
        return ahead <= self.bytes_max // 2 and self.reserve(size_bytes)[0]

    def reserve(self, size_bytes: int) -> tuple[bool, list[Entry[V]]]:
        """Make room for what will be put, if that can be done.

        Returns:
            Whether there is room, and what was dropped unread to make it. A thing that is larger than the budget gets room
            when nothing else is there or on its way.
        """
        dropped: list[Entry[V]] = []
        room = max(self.bytes_max - size_bytes, 0)
        while self.reserved_bytes + self.held_bytes > room:
            oldest = self._oldest() if self.reserved_bytes <= room else None
            if oldest is None:
                return False, dropped
            if oldest.shelf is Shelf.UNREAD:
                dropped.append(oldest)
            self.drop(oldest)
        self.reserved_bytes += size_bytes
        return True, dropped

    def resize(self, bytes_max: int) -> list[Entry[V]]:
        """Have another budget, and keep to it; what was dropped unread for that. What is on its way keeps its room."""
        self.bytes_max, dropped = bytes_max, []
        while self.held_bytes + self.reserved_bytes > bytes_max:
            oldest = self._oldest()
            if oldest is None:
                break
            if oldest.shelf is Shelf.UNREAD:
                dropped.append(oldest)
            self.drop(oldest)
        return dropped

    def release(self, size_bytes: int) -> None:
        """Give back room that was reserved."""
        self.reserved_bytes -= size_bytes

    def put(self, entry: Entry[V], now_s: float) -> None:
        """Put a thing for which there is room; what was there under one of its keys is dropped."""
        for key in entry.keys:
            other = self._entries.get(key)
            if other is not None:
                self.drop(other)
        for key in entry.keys:
            self._entries[key] = entry
        entry.is_here = True
        self.held_bytes += entry.size_bytes
        self._place(entry, entry.shelf, now_s)

    def use(self, entry: Entry[V], now_s: float) -> None:
        """Say that a thing is read now."""
        shelf = entry.shelf
        if not entry.is_here or (shelf is Shelf.READ and now_s < entry.used_s + USED_AGAIN_SECONDS):
            return
        if shelf is Shelf.UNREAD or shelf is Shelf.SPENT:
            self._take_off(entry)
            self._place(entry, Shelf.READ, now_s)
        else:
            entry.used_s = now_s
            self._shelves[shelf].move_to_end(id(entry))

    def retire(self, entry: Entry[V]) -> None:
        """Say that every reader is past a thing that was read; the oldest such go when there are too many bytes of them."""
        if not entry.is_here or entry.shelf is not Shelf.READ:
            return
        self._take_off(entry)
        self._place(entry, Shelf.SPENT, entry.used_s)
        spent = self._shelves[Shelf.SPENT]
        while self.spent_bytes_max is not None and self._spent_bytes > self.spent_bytes_max:
            self.drop(next(iter(spent.values())))

    def drop(self, entry: Entry[V]) -> None:
        """Forget a thing, if it is there."""
        if not entry.is_here:
            return
        entry.is_here = False
        self._take_off(entry)
        self.held_bytes -= entry.size_bytes
        for key in entry.keys:
            if self._entries.get(key) is entry:
                del self._entries[key]

    def of_owner(self, owner: object) -> list[Entry[V]]:
        """What was read ahead for somebody and nobody had yet."""
        return [x for x in self._shelves[Shelf.UNREAD].values() if x.owner is owner]

    def expire(self, now_s: float) -> list[Entry[V]]:
        """Drop what has outlived its time; what of it nobody has read."""
        dropped = []
        for shelf, seconds in self.seconds.items():
            while entry := next(iter(self._shelves[shelf].values()), None):
                if entry.used_s + seconds > now_s:
                    break
                if shelf is Shelf.UNREAD:
                    dropped.append(entry)
                self.drop(entry)
        return dropped

    def clear(self) -> None:
        """Forget everything; what is on its way keeps its room."""
        for entry in list(self._entries.values()):
            self.drop(entry)

    def _place(self, entry: Entry[V], shelf: Shelf, now_s: float) -> None:
        entry.shelf, entry.used_s = shelf, now_s
        self._shelves[shelf][id(entry)] = entry
        self._spent_bytes += entry.size_bytes if shelf is Shelf.SPENT else 0
        self._unread_bytes += entry.size_bytes if shelf is Shelf.UNREAD else 0

    def _take_off(self, entry: Entry[V]) -> None:
        del self._shelves[entry.shelf][id(entry)]
        self._spent_bytes -= entry.size_bytes if entry.shelf is Shelf.SPENT else 0
        self._unread_bytes -= entry.size_bytes if entry.shelf is Shelf.UNREAD else 0

    def _oldest(self) -> Entry[V] | None:
        if self._shelves[Shelf.SPENT]:
            return next(iter(self._shelves[Shelf.SPENT].values()))
        read = next(iter(self._shelves[Shelf.READ].values()), None)
        index = next(iter(self._shelves[Shelf.INDEX].values()), None)
        if read is not None and index is not None:
            return min(read, index, key=lambda entry: entry.used_s)
        return read or index or next(iter(self._shelves[Shelf.UNREAD].values()), None)
