"""Which side a read goes to: the broker's own store, or the tier. Pure.

The broker's store is the authority on what a queue's messages are. Their histories may have parted: a topic was deleted and
created again, or the broker lost its end and has grown since. The last message that both should have tells (``is_one``):
where the broker's store ends below what the tier has, they are one only if it is the same; else unless it is another. Where
they are not, the tier serves only what lies below the local minimum, until the journal says what became of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING

from tiered.model import QueueBounds, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable


class Policy(IntEnum):
    """When the tier is read; numbers as RocketMQ's ``tieredStorageLevel``."""

    DISABLE = 0
    """Never."""
    NOT_IN_DISK = 1
    """What the broker has no more."""
    NOT_IN_MEM = 2
    """That, and what the broker would have to read from its disk."""
    FORCE = 3
    """All that the tier has. What is not there yet comes from the broker."""


class Side(Enum):
    """Where a message is read."""

    LOCAL = "local"
    TIER = "tier"


@dataclass(frozen=True, slots=True)
class Both:
    """A queue on both sides, as far as a policy looks at them.

    Attributes:
        local: Bounds in the broker's store; None: it has no such queue, or there is no store.
        tier: Bounds in the tier that may be used; None: there is none.
    """

    local: QueueBounds | None
    tier: QueueBounds | None

    @classmethod
    def of(
        cls,
        policy: Policy,
        local: QueueBounds | None,
        tier: QueueBounds | None,
        *,
        is_one: bool,
    ) -> Both:
        """Leave out what is not to be used of the tier.

        Args:
            policy: Which.
            local: What the broker's store has.
            tier: What the tier has.
            is_one: They are one history.
        """
        if policy is Policy.DISABLE or tier is None:
            return cls(local, None)
        if local is not None and not is_one:
            tier = QueueBounds(tier.min, max(tier.min, min(tier.end, local.min)))
        return cls(local, tier)

    @property
    def bounds(self) -> QueueBounds | None:
        """Of the queue over both sides; None: neither has it."""
        known = [side for side in (self.local, self.tier) if side is not None]
        if not known:
            return None
        end = max(side.end for side in known)
        starts = [side.min for side in known if side.min < side.end]
        return QueueBounds(min(starts, default=end), end)

    def has(self, side: Side, offset: int) -> bool:
        """Whether a side has a queue offset."""
        bounds = self.local if side is Side.LOCAL else self.tier
        return bounds is not None and bounds.min <= offset < bounds.end

    def next_known(self, offset: int) -> QueueOffset:
        """The first queue offset above one that no side has, which a side has; else the end."""
        known = [side for side in (self.local, self.tier) if side is not None]
        above = [side.min for side in known if offset < side.min < side.end]
        return min(above, default=max(side.end for side in known))


def is_shorter(local: QueueBounds | None, tier: QueueBounds | None) -> bool:
    """Whether the tier has more than the broker: either has to be looked at anew, or their histories part."""
    return local is not None and tier is not None and local.end < tier.end


def plan_sides(
    policy: Policy, both: Both, offset: int, is_in_memory: Callable[[], bool]
) -> tuple[Side, ...]:
    """Where to read a queue offset.

    Args:
        policy: Which.
        both: What the sides have.
        offset: First queue offset of the read.
        is_in_memory: Whether the broker's store has it in memory; asked only if that decides.

    Returns:
        Sides to try, in order; empty when none has it.
    """
    sides = tuple(side for side in Side if both.has(side, offset))
    if len(sides) < len(Side):
        return sides
    prefers_tier = policy is Policy.FORCE or (policy is Policy.NOT_IN_MEM and not is_in_memory())
    return (Side.TIER, Side.LOCAL) if prefers_tier else (Side.LOCAL, Side.TIER)
