"""What the request layer handles: plain data, to which ``fetcher.transfer_state`` gives meaning.

A future that was asked for, the piece of an object it waits for, the request that brings pieces, and its attempts::

    Asked  n..1  Piece  n..1  Request  1..2  Attempt
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tiered.errors import StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable


Data = bytes | memoryview
"""What came: bytes of its own, or a view of memory that is lent (``fetcher.memory``)."""


class BusyError(StoreUnavailableError):
    """Too much is waiting already. The same read may be asked for later."""


class DeadlineError(StoreUnavailableError):
    """The bytes did not come before the asker's deadline. The same read may be asked for again."""


class Asked(Future[Data]):
    """The bytes of one range, for one asker. It ends exactly once; ``cancel`` works until then.

    Attributes:
        piece: What it waits for; None once its end is decided.
        deadline: Its number among the deadlines; -1 when it has none.
    """

    def __init__(self, cancel: Callable[[Asked], bool]) -> None:
        """Make one; ``cancel`` decides whether it can still be cancelled, and if so ends it."""
        super().__init__()
        self._cancel = cancel
        self.piece: Piece | None = None
        self.deadline = -1

    def cancel(self) -> bool:
        """Take the wish back: never sent, or its answer is dropped. False: it has ended, or is just ending."""
        return self._cancel(self)

    def end_cancelled(self) -> None:
        """Become cancelled; only for who has decided this end."""
        super().cancel()
        self.set_running_or_notify_cancel()


@dataclass(eq=False, slots=True)
class Piece:
    """A range that somebody wants, or wanted when it was sent.

    Attributes:
        key: The object.
        start: First byte.
        end: One past the last.
        stream: Who pays for it.
        is_urgent: Somebody waits for it now.
        number: Its place in the order of asking.
        askers: Who wants it still.
        is_alone: Not to be merged with neighbours.
        request: What brings it; None: not sent.
    """

    key: str
    start: int
    end: int
    stream: Hashable
    is_urgent: bool
    number: int
    askers: dict[Asked, None] = field(default_factory=dict)
    is_alone: bool = False
    request: Request | None = None

    @property
    def size_bytes(self) -> int:
        """Length of the range."""
        return self.end - self.start


@dataclass(eq=False, slots=True)
class Request:
    """One GET, for one or several pieces.

    Attributes:
        key: The object.
        start: First byte.
        end: One past the last.
        pieces: What it brings, each within the range.
        running: Attempts under way.
        is_done: Its pieces have been answered.
        error: Of the attempt that failed while the other one ran on.
    """

    key: str
    start: int
    end: int
    pieces: list[Piece]
    running: int = 0
    is_done: bool = False
    error: BaseException | None = None

    @property
    def size_bytes(self) -> int:
        """Length of the range."""
        return self.end - self.start

    @property
    def is_wanted(self) -> bool:
        """Whether anybody still waits."""
        return any(piece.askers for piece in self.pieces)

    @property
    def is_urgent(self) -> bool:
        """Whether anybody waits for it now."""
        return any(piece.is_urgent and piece.askers for piece in self.pieces)


@dataclass(eq=False, slots=True)
class Attempt:
    """One call to the store.

    Attributes:
        request: For what.
        is_hedge: Whether it is the second of its request.
        started_s: When the call began, monotonic seconds; None: a thread has not come to it.
    """

    request: Request
    is_hedge: bool
    started_s: float | None = None
