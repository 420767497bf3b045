"""What a follower needs of its store: the view that holds now, and what is decided under the store's lock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tiered.local.deadview import DeadView
from tiered.local.liveview import Advance, LiveView

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiered.format.block import RecordBlock
    from tiered.local.batches import TagRule
    from tiered.local.catalog import QueueState
    from tiered.local.face import RecordBatch
    from tiered.local.matching import Match
    from tiered.model import MessageQueue

View = DeadView | LiveView


class FollowedStore(Protocol):
    """A store as its followers see it. All methods may be called from any thread."""

    def tag_rule(self, view: View) -> TagRule:
        """What becomes of the tag codes of a view's entries."""
        ...

    def current_view(self) -> View:
        """The view that holds now; made anew when the broker has stopped or started."""
        ...

    def find(self, view: View, queue: MessageQueue) -> QueueState | None:
        """The state of a queue that may be new; None when its topic is left out."""
        ...

    def claim(
        self, view: View, state: QueueState, block: RecordBlock, found: Match, walked_from: int
    ) -> None:
        """Decide on records that are not listed, in the committed part of the log, which was walked from a place on."""
        ...

    def advance(
        self,
        view: LiveView,
        position: int,
        bytes_max: int,
        take: Callable[[Advance], list[RecordBatch]],
    ) -> list[RecordBatch] | None:
        """Move a running store's frontier, if it stands at ``position``, and let ``take`` make batches of it.

        Returns:
            None when nothing is new, or the frontier stands elsewhere.
        """
        ...

    def read_until(self, view: View, state: QueueState, start: int, end: int) -> RecordBatch | None:
        """Some of ``[start, end)`` through the consume queue; None when all of it has expired meanwhile."""
        ...

    def follow_expiry(self, view: View) -> None:
        """Bring the queues' minima up to date if the log's minimum is known to have moved."""
        ...
