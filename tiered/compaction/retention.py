"""Which records stay: the rule by record, and the horizon of tombstones.

Of all that a pass looks at, a record stays when it is the newest of its key (``tiered.compaction.newest``). A *tombstone*
(an empty value) is the newest word on its key, that it has none: older values go at once, the tombstone itself only when a
reader who began before it was first compacted has had ``tombstone_retention_ms`` to reach it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from backends.lazy_dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
