"""When a pass pays, and over which files: lags and the dirty ratio. Pure.

A log is a row of files. What was compacted lies before what was not; the active file is never touched, nor one that holds
a message younger than the minimum lag, nor anything behind such a one. A pass rewrites the compacted files too, so it is
made only when what is new is more than ``dirty_ratio`` of both (a byte is rewritten ``1 / dirty_ratio`` times at most, as
long as the compacted log does not grow), or when something in it has waited for the maximum lag.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from backends.lazy_dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

NEVER_MS: Final = 2**62


@dataclass(frozen=True, slots=True)
class LogFile:
    """One file (segment) of a log."""

    start: int  # first queue offset
    end: int  # one past the last
    size_bytes: int  # of its records
    oldest_ms: int  # smallest store time; -1: it has no record
    newest_ms: int  # greatest store time; -1 likewise
    is_active: bool = False  # it is still written to


@dataclass(frozen=True, slots=True)
class PassSettings:
    """When a pass is made."""

    dirty_ratio: float = 0.5
    """What is new must be more than this share of what is compacted and new; 0: anything new is enough."""
    lag_ms_min: int = 0  # younger messages are not touched
    lag_ms_max: int = NEVER_MS  # what has waited so long is compacted whatever the ratio
    files_min: int = 1  # new files that a pass needs


class Due(StrEnum):
    """Why a pass is made, or not."""

    RATIO = "dirty ratio"
    LAG = "maximum lag"
    NOT_YET = "not dirty enough"
    NOTHING = "nothing new"


@dataclass(frozen=True, slots=True)
class PassPlan:
    """What a pass would be over."""

    due: Due  # why, or why not
    start: int  # first queue offset
    dirty_from: int  # first that was not compacted
    end: int  # one past the last that may be touched
    clean_bytes: int  # of records that were compacted
    dirty_bytes: int  # of those that were not, and may be

    @property
    def is_due(self) -> bool:
        """Whether it is made."""
        return self.due in {Due.RATIO, Due.LAG}

    @property
    def dirty_ratio(self) -> float:
        """0 to 1."""
        return self.dirty_bytes / max(1, self.clean_bytes + self.dirty_bytes)


def plan_pass(
    files: Sequence[LogFile], compacted_to: int, settings: PassSettings, now_ms: int
) -> PassPlan:
    """What a pass would be over, and whether it is due.

    Args:
        files: Of one log, in order.
        compacted_to: One past the last queue offset that a pass has looked at.
        now_ms: UTC.
    """
    youngest_ms = now_ms - settings.lag_ms_min if settings.lag_ms_min else NEVER_MS
    able = list(_cleanable(files, youngest_ms))
    start = able[0].start if able else 0
    end = able[-1].end if able else start
    new = [file for file in able if file.end > compacted_to]
    dirty_bytes = sum(file.size_bytes for file in new)
    clean_bytes = sum(file.size_bytes for file in able) - dirty_bytes
    dirty_from = max(start, min(compacted_to, end))

    def plan(due: Due) -> PassPlan:
        return PassPlan(due, start, dirty_from, end, clean_bytes, dirty_bytes)

    if not new or len(new) < settings.files_min:
        return plan(Due.NOTHING)
    oldest_ms = min((file.oldest_ms for file in new if file.oldest_ms >= 0), default=now_ms)
    if oldest_ms <= now_ms - settings.lag_ms_max:
        return plan(Due.LAG)
    is_enough = dirty_bytes > settings.dirty_ratio * (clean_bytes + dirty_bytes)
    return plan(Due.RATIO if is_enough else Due.NOT_YET)


def _cleanable(files: Sequence[LogFile], youngest_ms: int) -> Iterator[LogFile]:
    for file in files:
        if file.is_active or file.newest_ms > youngest_ms:
            return
        yield file


# --------------------------------------------------------------------------------------------------
# Which records stay: the rule by record, and the horizon of tombstones.
#
# Of all that a pass looks at, a record stays when it is the newest of its key (``tiered.compaction.newest``). A
# *tombstone* (an empty value) is the newest word on its key, that it has none: older values go at once, the tombstone
# itself only when a reader who began before it was first compacted has had ``tombstone_retention_ms`` to reach it.
# --------------------------------------------------------------------------------------------------


DAY_MS: Final = 86_400_000
EVERY: Final = 2**62
"""A queue offset behind all others."""


class Passed(Protocol):
    """A pass that was made (``tiered.log.parts.Pass``)."""

    @property
    def end(self) -> int:
        """One past the last queue offset that it looked at."""

    @property
    def time_ms(self) -> int:
        """When, UTC."""


AnyPass = TypeVar("AnyPass", bound=Passed)


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """What the two systems do differently."""

    name: str  # as people write it
    keeps_keyless: bool
    """Records without a key stay; else they go, as a topic that is compacted should have none."""
    tombstone_retention_ms: int
    """How long a tombstone stays after the first pass that met it; 0: it goes at once."""


ROCKETMQ: Final = RetentionPolicy("rocketmq", keeps_keyless=False, tombstone_retention_ms=0)
KAFKA: Final = RetentionPolicy("kafka", keeps_keyless=False, tombstone_retention_ms=DAY_MS)
CAREFUL: Final = RetentionPolicy("careful", keeps_keyless=True, tombstone_retention_ms=DAY_MS)
"""For topics that nobody has said to be of one kind: nothing goes but what a newer value, or time, has replaced."""
POLICIES: Final = {policy.name: policy for policy in (CAREFUL, KAFKA, ROCKETMQ)}


def tombstones_gone(passes: Iterable[Passed], policy: RetentionPolicy, now_ms: int) -> int:
    """The queue offset below which tombstones have been seen for long enough.

    Args:
        passes: All that were made, or the last of each time (``with_pass``).
        now_ms: UTC.
    """
    if not policy.tombstone_retention_ms:
        return EVERY
    horizon_ms = now_ms - policy.tombstone_retention_ms
    return max((one.end for one in passes if one.time_ms <= horizon_ms), default=0)


def with_pass(passes: Sequence[AnyPass], new: AnyPass, horizon_ms: int) -> tuple[AnyPass, ...]:
    """Passes with one more, without those that say nothing that a later one does not.

    Of those that came as far as the new one, the first stays: since then tombstones are known.

    Args:
        passes: Oldest first.
        horizon_ms: Of passes made before it only the last is kept.
    """
    old = [one for one in passes if one.time_ms <= horizon_ms]
    young = [one for one in passes if one.time_ms > horizon_ms and one.end < new.end]
    same = [one for one in passes if one.time_ms > horizon_ms and one.end == new.end]
    return (*old[-1:], *young, *same[:1], new)
