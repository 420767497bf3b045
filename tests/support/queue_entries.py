"""Entries of one queue, replayed to a state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from support.bundles import made_part, named_action
from support.tiers import QUEUE

from tiered.journal.entry import Entry, row_of
from tiered.log.actions import Head
from tiered.log.parts import Part, queue_action
from tiered.log.state import TierMachine, TierState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiered.journal.entry import Action
    from tiered.model import MessageQueue


MACHINE = TierMachine()


EPOCH = {"do": "epoch", "epoch": 1, "holder": {"host": "h"}}


part = made_part


def add(chunk: Part, segment: int, *, queue: MessageQueue = QUEUE, incarnation: int = 0) -> Action:
    return named_action((queue, incarnation, segment, chunk))


def replay(*entries: Sequence[Action], epochs: Sequence[int] = ()) -> TierState:
    state = MACHINE.initial()
    for number, actions in enumerate(entries, 1):
        epoch = epochs[number - 1] if epochs else 1
        state = MACHINE.apply(state, Entry(number, epoch, "0badcafe", 1000 + number, actions))
    return state


def incarnation(state: TierState) -> Any:
    found = state.incarnation(QUEUE)
    assert found
    return found


def gap(start: int, end: int) -> Action:
    return queue_action("gap", QUEUE, 0, start=start, end=end, reason="why")


def truncate(end: int, was: int, head: Head | None = None) -> Action:
    row = row_of(head) if head else None
    return queue_action("truncate", QUEUE, 0, end=end, was=was, head=row, reason="why")


def head(whole: Part, count: int) -> Head:
    return Head(whole.queue_offset, whole.log_offset, 100 * count, 0, 9, whole.holes)


def then(state: TierState, *actions: Action, epoch: int = 1) -> TierState:
    return MACHINE.apply(state, Entry(9, epoch, "0badcafe", 9, actions))
