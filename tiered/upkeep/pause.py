"""A topic is paused, or goes on: what a person tells the writer of a tier by an entry of its journal.

Beside a running writer: neither lease nor epoch is taken; the entry is a guest's. A writer that has nothing to write looks
for it every few seconds, and one that begins later meets it in the journal. Nothing is lost by it: what comes meanwhile is
taken from the broker's store when the topic goes on, and what the broker has expired by then becomes a gap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiered.log.actions import Pause, action_of
from tiered.upkeep.workplace import journal_writer

if TYPE_CHECKING:
    from tiered.log.state import TierState
    from tiered.upkeep.workplace import Workplace


def set_paused(at: Workplace, topic: str, *, is_paused: bool) -> dict[str, Any]:
    """Have a topic paused, or go on; once, however often it is asked for.

    Returns:
        ``is_changed``, ``since_ms`` (null: it is not paused), ``is_known`` (the tier has the topic).
    """
    journal = journal_writer(at)
    is_changed = (topic in journal.state.paused_topics) is not is_paused
    if is_changed:
        journal.append([action_of(Pause(topic, is_paused))])
    return {
        "topic": topic,
        "is_paused": is_paused,
        "is_changed": is_changed,
        "since_ms": _since_ms(journal.state, topic),
        "is_known": any(queue.topic == topic for queue in journal.state.queues),
    }


def _since_ms(state: TierState, topic: str) -> int | None:
    return next((one.since_ms for one in state.paused if one.topic == topic), None)
