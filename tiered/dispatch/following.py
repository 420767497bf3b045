"""Following a local store: window by window, until told to stop or until its end is reached.

Overview: a ``Follower`` gives batches in log order, which are offered to dispatch. Before each offer the queues whose
offsets fell are opened (``tiered.dispatch.continuity``), so that nothing of another life is taken for the next of this one;
when the end is reached, what is open is looked at.

Threads: the dispatch thread only. After a crash nothing has to survive.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tiered.dispatch.rounds import Fact
from tiered.log.parts import queue_action

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tiered.dispatch.compensation import Compensation
    from tiered.dispatch.continuity import Continuity
    from tiered.dispatch.files import QueueFiles, Unknown
    from tiered.dispatch.throttle import Throttle
    from tiered.local.face import Follower, LocalStore, RecordBatch
    from tiered.model import MessageQueue, QueueOffset

_LOG = logging.getLogger("tiered.dispatch")


class Following:
    """One run along a local store."""

    def __init__(
        self,
        local: LocalStore,
        starts: Mapping[MessageQueue, QueueOffset],
        *,
        files: QueueFiles,
        continuity: Continuity,
        compensation: Compensation,
        dispatch: Callable[[RecordBatch], bool],
        throttle: Throttle,
        stop: Callable[[], bool],
    ) -> None:
        """Begin.

        Args:
            local: The store.
            starts: Where to go on in each queue.
            files: Write sides.
            continuity: Told of queues whose offsets fell.
            compensation: Told of queues that are suspect.
            dispatch: Offers a batch.
            throttle: Of bytes read.
            stop: Ends a long poll early.
        """
        self._follower: Follower = local.follow(starts, stop)
        self._files = files
        self._continuity = continuity
        self._compensation = compensation
        self._dispatch = dispatch
        self._throttle = throttle
        self._left: set[MessageQueue] = set()  # of which the last batch was not taken
        continuity.reopen(queue for queue in starts if files.known(queue))

    def step(self, window_bytes: int, *, until_idle: bool) -> bool:
        """Take the next window.

        Args:
            window_bytes: Of the local log, at most.
            until_idle: The caller ends when there is nothing more.

        Returns:
            Whether that may be (``until_idle``: is) all for now.
        """
        for queue, start in self._continuity.take_moved().items():
            file = self._files.known(queue)
            self._follower.seek(queue, max(start, file.append_offset) if file else start)
        batches = self._follower.poll(window_bytes)
        fallen = self._follower.take_fallen()
        if fallen:
            self._continuity.reopen(fallen)
        for queue in self._left.intersection(fallen):
            # What it was behind is gone, and the follower, which has passed that place, gives nothing of what came instead.
            self._compensation.fall_behind(queue)
        for batch in batches:
            (self._left.discard if self._dispatch(batch) else self._left.add)(batch.queue)
        self._throttle.take(sum(memoryview(batch.data).nbytes for batch in batches))
        is_done = not batches and self._follower.is_idle
        is_at_end = self._follower.is_at_end or is_done
        is_final = until_idle and is_done
        for queue in self._continuity.patrol(is_at_end=is_at_end, is_final=is_final):
            self._compensation.fall_behind(queue)
        return is_done if until_idle else self._follower.is_at_end

    def close(self) -> None:
        """Close the follower."""
        self._follower.close()


def register(
    unknown: Unknown, say: Callable[[Fact], None], fall_behind: Callable[[MessageQueue], None]
) -> None:
    """Have the journal know queues that begin above 0, and those that are empty already.

    So their bounds are seen in the tier, and a restart goes on where they began, whatever came in between.

    Args:
        unknown: Queues that it has never met.
        say: Has the next entry say something.
        fall_behind: Leaves a queue to compensation, which records what is gone of it: no record of it will be met.
    """
    for queue, offset in unknown.above_0.items():
        begin = {"start": offset, "reason": "begins here"}
        say(Fact(queue_action("incarnation", queue, 0, **begin), lambda: None))
    if unknown.above_0:
        what = "new queues that begin above 0 (what came before is not in the local store, or not wanted): %d"
        _LOG.info(what, len(unknown.above_0))
    for queue in unknown.emptied:
        fall_behind(queue)
