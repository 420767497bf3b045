"""What is looked for, and what was found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tiered.errors import InvalidError

if TYPE_CHECKING:
    from tiered.errors import DataError
    from tiered.index.candidates import Hit

COUNT: Final = 64
"""How many messages a lookup gives by default, as a broker does."""
SCAN_BYTES_MAX: Final = 256 * 1024 * 1024
"""How much of what is not indexed yet one lookup reads, by default."""
TIME_MAX: Final = 2**63 - 1


@dataclass(slots=True)
class Lookup:
    """What was found.

    Attributes:
        hits: Newest first; of equal store times the greater queue offset first.
        unscanned: Messages that are not indexed yet and were not looked at, for the limit; 0: nothing is missing.
        damaged: What could not be read; messages there may be missing.
        objects_read: Index objects of which items were read.
    """

    hits: list[Hit] = field(default_factory=list)
    unscanned: int = 0
    damaged: list[DataError] = field(default_factory=list)
    objects_read: int = 0

    @property
    def is_complete(self) -> bool:
        """Nothing that was asked for can be missing."""
        return not self.unscanned and not self.damaged


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is looked for.

    Attributes:
        topic: Of the messages.
        key: One of a message's keys, or its unique id.
        from_ms: Stored at this time or later.
        until_ms: Stored before this time.
        count: So many, the newest (> 0, else ``InvalidError``).
        every_life: Also in lives of queues that are over (deleted topics, what brokers took back).
        scan_bytes_max: Limit of what is read because no index covers it yet.
    """

    topic: str
    key: str
    from_ms: int = -TIME_MAX
    until_ms: int = TIME_MAX
    count: int = COUNT
    every_life: bool = False
    scan_bytes_max: int = SCAN_BYTES_MAX

    def __post_init__(self) -> None:
        if self.count <= 0:
            raise InvalidError(f"a lookup for {self.count} messages", do="ask for 1 or more")

    def wants(self, low_ms: int, high_ms: int) -> bool:
        """Whether messages stored in ``[low_ms, high_ms]`` may be wanted."""
        return high_ms >= self.from_ms and low_ms < self.until_ms
