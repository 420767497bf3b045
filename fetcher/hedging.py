"""When a request is slow enough to be asked again: running medians, a budget, and the choice. Pure but for their counts.

How long a request takes depends on its size, so requests are compared with those of similar size: each *size class*
spans a factor of four. A class that has too few of its own is judged by the next larger one that has enough, which is
patient; or by the next smaller one, its median multiplied by how much larger the class is.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

SAMPLES = 101
"""Requests of a class that its median is taken of."""
SAMPLES_MIN = 8
"""A class with fewer has no median."""
_SMALLEST_BITS = 16
_CLASSES = 8  # up to 64 KiB, 256 KiB, 1 MiB, ... 256 MiB, larger
_BANK = 32.0
"""Hedges that may be saved up. Without it a long calm would pay for doubling every request when the store has trouble."""
_ROUNDING = 1e-6


def size_class(size_bytes: int) -> int:
    """Which class a size belongs to, from 0."""
    bits = (size_bytes - 1).bit_length()
    return min(_CLASSES - 1, max(0, (bits - _SMALLEST_BITS + 1) // 2))


class _Median:
    """Of the last ``SAMPLES`` values."""

    __slots__ = ("_recent", "_sorted")

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, value: float) -> None:
        if len(self._recent) == SAMPLES:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(value)
        insort(self._sorted, value)

    def value(self) -> float | None:
        count = len(self._sorted)
        return self._sorted[count // 2] if count >= SAMPLES_MIN else None


class Durations:
    """How long requests have taken, by size. Not for several threads at once."""

    def __init__(self) -> None:
        self._medians = [_Median() for _ in range(_CLASSES)]

    def add(self, size_bytes: int, duration_s: float) -> None:
        """A request for ``size_bytes`` was answered after ``duration_s`` seconds."""
        self._medians[size_class(size_bytes)].add(duration_s)

    def median_s(self, size_bytes: int) -> float | None:
        """What a request of this size usually takes, in seconds; None: too few were seen."""
        wanted = size_class(size_bytes)
        for larger in range(wanted, _CLASSES):
            if (value := self._medians[larger].value()) is not None:
                return value
        for smaller in range(wanted - 1, -1, -1):
            if (value := self._medians[smaller].value()) is not None:
                return value * float(4 ** (wanted - smaller))
        return None


AHEAD_PATIENCE = 4
"""How much longer read-ahead may take than what is waited for, before it is asked for again."""


class HedgeBudget:
    """At most ``share`` hedges for each request that is not one, at every moment since the start."""

    def __init__(self, share: float) -> None:
        """Begin with nothing; ``share`` is at least 0, and 0.05 allows one in twenty."""
        self._share = share
        self._saved = 0.0

    def earn(self) -> None:
        """A request that is no hedge was sent."""
        self._saved = min(_BANK, self._saved + self._share)

    @property
    def allows_one(self) -> bool:
        """Whether one may be sent."""
        return self._saved >= 1 - _ROUNDING

    def spend(self) -> None:
        """A hedge was sent."""
        self._saved -= 1


class Running(NamedTuple):
    """A request under way, as the choice sees it.

    Attributes:
        started_s: When its call began, monotonic seconds.
        median_s: What its like usually take; None: unknown.
        is_urgent: Somebody waits for it now.
        number: Which one it is.
    """

    started_s: float
    median_s: float | None
    is_urgent: bool
    number: int


class HedgePlan(NamedTuple):
    """What to do.

    Attributes:
        due: Numbers of the requests to ask again, the most pressing first.
        next_s: When to look again, monotonic seconds; None: nothing else runs.
    """

    due: list[int]
    next_s: float | None


def plan_hedges(
    running: Iterable[Running], now_s: float, *, factor: float, floor_s: float
) -> HedgePlan:
    """Choose the requests that have run longer than ``factor`` times their median, and than ``floor_s``.

    Those that nobody waits for yet get ``AHEAD_PATIENCE`` times as long: mostly the machine is busy, and bytes asked for
    twice make it busier. One whose median is unknown is looked at again after ``floor_s``: by then there may be one.
    """
    due: list[Running] = []
    next_s: float | None = None
    for one in running:
        patience = 1 if one.is_urgent else AHEAD_PATIENCE
        at_s = one.started_s + patience * max(floor_s, factor * (one.median_s or 0.0))
        if one.median_s is None:
            at_s = now_s + floor_s
        if at_s <= now_s:
            due.append(one)
        elif next_s is None or at_s < next_s:
            next_s = at_s
    due.sort(key=lambda one: (not one.is_urgent, one.started_s, one.number))
    return HedgePlan([one.number for one in due], next_s)
