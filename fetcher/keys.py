"""Lookups by key over both sides of a message store: what is asked, what comes back, and how both are merged. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tiered.format.record import Record
    from tiered.model import MessageQueue, QueueOffset

TIME_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyQuery:
    """What is looked for.

    Attributes:
        topic: Of the messages.
        key: One of a message's keys, or its unique id.
        from_ms: Stored at this time or later, UTC.
        until_ms: Stored before this time.
        count: So many, the newest (> 0, else ``InvalidError``).
    """

    topic: str
    key: str
    from_ms: int = 0
    until_ms: int = TIME_MAX
    count: int = 64

    def __post_init__(self) -> None:
        if self.count <= 0:
            raise InvalidError(f"a lookup for {self.count} messages", do="ask for 1 or more")


@dataclass(frozen=True, slots=True)
class KeyHit:
    """A message that has the key.

    Attributes:
        queue: Where it is.
        queue_offset: Likewise.
        store_ms: Store time, UTC.
        message: The message; an inner message as it is by itself.
    """

    queue: MessageQueue
    queue_offset: QueueOffset
    store_ms: int
    message: Record = field(repr=False)


@dataclass(frozen=True, slots=True)
class KeyAnswer:
    """What was found.

    Attributes:
        hits: Newest first, no message twice.
        is_complete: Nothing that was asked for can be missing.
        errors: Why something may be.
    """

    hits: tuple[KeyHit, ...] = ()
    is_complete: bool = True
    errors: tuple[Exception, ...] = ()


class KeyLookup(Protocol):
    """Looks for messages on one side."""

    def __call__(
        self, wanted: KeyQuery, deadline_s: float, tier_end: Callable[[MessageQueue], int], /
    ) -> KeyAnswer:
        """Look.

        Args:
            wanted: What.
            deadline_s: Until which moment of the monotonic clock.
            tier_end: Up to which queue offset of a queue the tier is asked: the local side need look no further down.

        Raises:
            StoreUnavailableError: Not before the deadline.
        """
        ...


def merge(answers: Sequence[KeyAnswer], count: int) -> KeyAnswer:
    """One answer of several; the first wins where two have the same message."""
    found = {
        (hit.queue, hit.queue_offset): hit for answer in reversed(answers) for hit in answer.hits
    }
    hits = sorted(
        found.values(), key=lambda hit: (hit.store_ms, hit.queue_offset, hit.queue), reverse=True
    )
    return KeyAnswer(
        tuple(hits[:count]),
        all(answer.is_complete for answer in answers),
        tuple(error for answer in answers for error in answer.errors),
    )
