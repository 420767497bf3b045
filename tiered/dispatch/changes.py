"""Tells operators what was said of a queue that the broker has changed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiered.dispatch.counters import DispatchCounters
    from tiered.log.parting import Change
    from tiered.model import MessageQueue

_LOG = logging.getLogger("tiered.dispatch")


def tell(queue: MessageQueue, change: Change, counters: DispatchCounters) -> None:
    """Count and log a change that an entry has made history."""
    if change.is_anew and change.action["incarnation"] == 0:
        _LOG.info("%s begins at %d", queue, change.start)
    elif change.is_anew:
        counters.begun_anew += 1
        _LOG.warning(
            "%s begins anew at %d: nothing of its history up to %d is in the local store. It stays readable as"
            " an older incarnation",
            queue,
            change.start,
            change.end,
        )
    else:
        counters.taken_back += 1
        _LOG.warning(
            "%s: the broker has taken back [%d, %d), which was in the tier. It is kept; the queue goes on at %d",
            queue,
            change.start,
            change.end,
            change.start,
        )
