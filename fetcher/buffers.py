"""Memory for what comes over the wire, used again and again.

Contract
    ``Memory.lend`` gives a buffer. It comes back by itself when nothing refers to it any more, no view of it, slice of such
    or array on it; so that bytes which a caller keeps never change under him.

    Buffers are cut from one range of addresses, the lowest that are free first, so that what is lent is mostly memory
    that was in use before. What lies free goes back to the system when it is more than a limit, the highest first, and all
    of it when ``clear`` is called. When the range is full (somebody keeps very much) buffers come from ``malloc``.

Why: the kernel clears each page that a process touches for the first time, which costs more than reading into it; and
``malloc`` returns blocks of this size to the kernel when they are freed.

For any thread. Buffers come back in whatever thread lets go of the last reference, at any moment, even in the midst of
``lend``: so they are only noted then, without a lock, and put in order by the next call.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from bisect import insort
from collections import deque
from contextlib import suppress
from itertools import chain

import numpy as np

STEP_BYTES = max(4 * 1024, mmap.PAGESIZE)
"""Sizes of buffers are multiples of this: a page."""

BYTES_MIN = 64 * 1024
"""Smaller ones are better had from ``malloc``."""

_LOOKED_AT_MAX = 128
"""Free extents that are tried, lowest first, before the upper end is cut from."""

Extent = tuple[int, int]
"""Begin and end, in steps."""

_Lent = np.ndarray[tuple[int], np.dtype[np.uint8]]
"""A buffer while somebody has it: views of it refer to it, and it can be referred to weakly.

Not a class of ours: of such, unlike of plain arrays, the collector says that it is dead as soon as it is found in a cycle,
before finalizers run, which may still read it or give it to somebody.
"""


class Memory:
    """Memory that ranges are read into, lent and truncated."""

    def __init__(self, size_bytes: int, free_bytes_max: int) -> None:
        """Have nothing yet but addresses; ``free_bytes_max`` are kept though nobody uses them."""
        self._steps = max(size_bytes // STEP_BYTES, 1)
        self._free_max = free_bytes_max // STEP_BYTES
        self._arena: mmap.mmap | None = None
        self._free: list[Extent] = [(0, self._steps)]  # apart from each other, in order
        self._has_memory = np.zeros(self._steps, np.bool_)  # since it was in use
        self._lock = threading.Lock()
        self._lent: dict[int, tuple[weakref.ref[_Lent], Extent]] = {}
        self._returned: deque[Extent] = deque()

    @property
    def lent_bytes(self) -> int:
        """What somebody has, about."""
        return sum(end - begin for _, (begin, end) in [*self._lent.values()]) * STEP_BYTES

    @property
    def held_bytes(self) -> int:
        """What of the range may have memory behind it."""
        return int(np.count_nonzero(self._has_memory)) * STEP_BYTES

    def lend(self, size_bytes: int) -> memoryview:
        """A writable buffer of this size, in which anything may stand; ``.obj`` of it is as large as what it takes."""
        steps = -(-size_bytes // STEP_BYTES)
        with self._lock:
            self._tidy()
            if self._arena is None:
                self._open()
            begin = self._take(steps)
        if begin is None:
            return memoryview(np.empty(size_bytes, np.uint8).data)
        shape = (steps * STEP_BYTES,)
        lent: _Lent = np.ndarray(shape, np.uint8, self._arena, begin * STEP_BYTES)
        reference = weakref.ref(lent, self._come_back)
        self._lent[id(reference)] = reference, (begin, begin + steps)
        return memoryview(lent.data)[:size_bytes]

    def clear(self) -> None:
        """Give back to the system what nobody uses."""
        with self._lock:
            self._tidy(at_once=True)
            for begin, end in self._free:
                self._give_back(begin, end, end - begin)

    def _open(self) -> None:
        try:
            self._arena = _addresses(self._steps * STEP_BYTES)
        except OSError:  # the system promises no more memory than it has
            self._free = []

    def _come_back(self, reference: weakref.ref[_Lent]) -> None:
        self._returned.append(self._lent.pop(id(reference))[1])

    def _take(self, steps: int) -> int | None:
        """The lowest addresses that are free, about; None when no so many are free together."""
        if not self._free:
            return None
        last = len(self._free) - 1
        for number in chain(range(min(last, _LOOKED_AT_MAX)), (last,)):
            begin, end = self._free[number]
            if end - begin >= steps:
                left = (begin + steps, end)
                self._free[number : number + 1] = [left] if left[0] < end else []
                self._has_memory[begin : begin + steps] = True
                return begin
        return None

    def _tidy(self, *, at_once: bool = False) -> None:
        """Put what has come back in order, if it is worth it, and give back to the system what is too much."""
        if not self._returned or (not at_once and len(self._returned) * 8 < len(self._free)):
            return
        while self._returned:
            insort(self._free, self._returned.popleft())
        joined: list[Extent] = []
        for begin, end in self._free:
            if joined and joined[-1][1] == begin:
                joined[-1] = joined[-1][0], end
            else:
                joined.append((begin, end))
        self._free = joined
        lent = self._steps - sum(end - begin for begin, end in joined)
        too_much = int(np.count_nonzero(self._has_memory)) - lent - self._free_max
        for begin, end in reversed(joined):
            if too_much <= 0:
                break
            too_much -= self._give_back(begin, end, too_much)

    def _give_back(self, begin: int, end: int, wanted: int) -> int:
        """Memory of what nobody uses goes back to the system, the highest first; how much, in steps."""
        used = np.flatnonzero(self._has_memory[begin:end])[-wanted:]
        if len(used) and self._arena is not None and hasattr(mmap, "MADV_DONTNEED"):
            low, high = begin + int(used[0]), begin + int(used[-1]) + 1
            at, size_bytes = low * STEP_BYTES, (high - low) * STEP_BYTES
            with suppress(OSError):  # the process has locked its memory
                self._arena.madvise(mmap.MADV_DONTNEED, at, size_bytes)
                self._has_memory[low:high] = False
        return len(used)


def _addresses(size_bytes: int) -> mmap.mmap:
    """Addresses without memory; the kernel puts memory behind them when they are touched.

    In small pages: large ones were found to cost more, since the kernel has few at hand and clears them whole.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return mmap.mmap(-1, size_bytes, flags)
