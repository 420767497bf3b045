"""Seals what is open, so that it can be archived; only while no writer is at work.

Overview: takes lease and epoch for a moment, and says of each open segment that it is sealed, as it is. Nothing is read,
merged or uploaded: segments whose parts are many and small stay so, until a writer merges them. The next writer begins new
ones.

Ordering, retries: one entry for ``ENTRY`` segments. An open segment whose writer is at work is that writer's to seal.

After a crash: each entry is there or not. The lease expires.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered.log.parts import queue_action
from tiered.upkeep.workplace import in_new_epoch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tiered.journal.append import JournalWriter
    from tiered.journal.entry import Action
    from tiered.log.parts import TierState
    from tiered.upkeep.workplace import Workplace

ENTRY = 500


def seal_open(at: Workplace, takes: Callable[[str], bool]) -> int:
    """Seal the open segments of the wanted topics.

    Returns:
        How many.

    Raises:
        FencedError: A writer is at work.
        BackendError: The store does not answer; calling again is harmless.
    """
    count = 0

    def work(journal: JournalWriter[TierState]) -> None:
        nonlocal count
        actions = list(_actions(journal.state, takes))
        for start in range(0, len(actions), ENTRY):
            some = actions[start : start + ENTRY]
            journal.append(some)
            count += len(some)
        journal.write_checkpoint()

    in_new_epoch(at, work)
    return count


def _actions(state: TierState, takes: Callable[[str], bool]) -> Iterator[Action]:
    for queue in sorted(queue for queue in state.queues if takes(queue.topic)):
        incarnation = state.incarnation(queue)
        if incarnation is None or incarnation.ended or not incarnation.segments:
            continue
        segment = incarnation.segments[-1]
        if segment.sealed or not segment.parts:
            continue
        yield queue_action("seal", queue, incarnation.number, segment=segment.base_offset)
