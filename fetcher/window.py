"""How far ahead of a reader to read: an additive-increase, multiplicative-decrease window, in bytes.

Pure. One window belongs to one stream, that is to one group in one queue. It starts at its minimum, and each batch that is
delivered in order makes it larger by a share of that batch; so what lies unread ahead of a reader that stops is at most
that share of what it has read, and the minimum. Data that expires unread, or that had to make room unread, halves it. A
reader that goes elsewhere begins again at the minimum.

Source:
    TCP Tahoe, by way of RocketMQ's design for its tiered store: there the step is the client's batch size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class WindowLimits:
    """Bounds of a window.

    Attributes:
        bytes_min: Where it begins, and what it never falls below (> 0).
        bytes_max: What it never exceeds.
        growth: Which share of each delivered batch it grows by (> 0).
        refill: Read-ahead is asked for when less than this share of the window lies ahead, so that requests are large.
    """

    bytes_min: int = 256 * 1024
    bytes_max: int = 32 * 1024 * 1024
    growth: float = 0.5
    refill: float = 0.75

    def __post_init__(self) -> None:
        if not 0 < self.bytes_min <= self.bytes_max:
            raise InvalidError(
                f"a read-ahead window of {self.bytes_min} to {self.bytes_max} bytes",
                do="make the minimum positive, and the maximum no less",
            )
        if self.growth <= 0 or not 0 < self.refill <= 1:
            raise InvalidError("the read-ahead window needs growth > 0 and 0 < refill <= 1")


def grown(window: int, batch_bytes: int, limits: WindowLimits) -> int:
    """The window after a batch of this many bytes was delivered in order."""
    return min(window + int(batch_bytes * limits.growth), limits.bytes_max)


def halved(window: int, limits: WindowLimits) -> int:
    """The window after data of the stream expired, or made room, unread."""
    return max(window // 2, limits.bytes_min)


def wants_more(window: int, unread: int, limits: WindowLimits) -> bool:
    """Whether it is time to ask for more, with this many bytes ahead, here or on their way."""
    return unread < window * limits.refill


def plan_pieces(
    sizes: Sequence[int], is_here: Sequence[bool], *, piece_bytes: int, gap_bytes: int
) -> list[range]:
    """Cut neighbouring blocks that are to be read into requests.

    Args:
        sizes: Bytes of each block, in order.
        is_here: Whether a block is cached or on its way.
        piece_bytes: A piece is no larger, but for one block that is.
        gap_bytes: Blocks that are here are read again when at most so many of their bytes lie between others.

    Returns:
        Ranges of indexes, in order and apart, that hold every block which is not here; none begins or ends with one
        that is.
    """
    pieces: list[range] = []
    begin, end, held, gap = 0, 0, 0, 0
    for index, size in enumerate(sizes):
        if is_here[index]:
            gap += size
            continue
        joined = held + gap + size
        if end > begin and gap <= gap_bytes and joined <= piece_bytes:
            held = joined
        else:
            if end > begin:
                pieces.append(range(begin, end))
            begin, held = index, size
        end, gap = index + 1, 0
    return [*pieces, range(begin, end)] if end > begin else pieces
