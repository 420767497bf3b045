"""A small state machine and writers of it, for tests of the journal."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tiered.clock import ManualClock
from tiered.journal.append import JournalWriter
from tiered.journal.entry import json_text
from tiered.journal.replay import UnknownActionError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backends.base import ObjectStore
    from tiered.journal.entry import Entry

PREFIX = "00000000_c/b/"


@dataclass(frozen=True, slots=True)
class Toy:
    """Epoch, and everything that was ever said, in order: ``[number, epoch, writer, value]``."""

    epoch: int = 0
    said: tuple[tuple[int, int, str, Any], ...] = ()

    @property
    def values(self) -> list[Any]:
        return [value for _, _, _, value in self.said]


class ToyMachine:
    """``say`` adds a value, whoever says it, so that nothing hides what got into history."""

    def initial(self) -> Toy:
        return Toy()

    def epoch(self, state: Toy) -> int:
        return state.epoch

    def apply(self, state: Toy, entry: Entry) -> Toy:
        for action in entry.actions:
            if action["do"] == "epoch":
                state = replace(state, epoch=action["epoch"])
                value = f"epoch {action['epoch']}"
            elif action["do"] == "say":
                value = action["value"]
            else:
                raise UnknownActionError(f"{action['do']}")
            step = (entry.number, entry.epoch, entry.writer, value)
            state = replace(state, said=(*state.said, step))
        return state

    def dump(self, state: Toy) -> Any:
        return {"epoch": state.epoch, "said": [list(step) for step in state.said]}

    def dump_chunks(self, state: Toy) -> Iterator[bytes]:
        yield json_text(self.dump(state))

    def load(self, document: Any) -> Toy:
        return Toy(document["epoch"], tuple(tuple(step) for step in document["said"]))  # type: ignore[misc]


def say(*values: object) -> list[dict[str, Any]]:
    """Actions."""
    return [{"do": "say", "value": value} for value in values]


def make_writer(
    store: ObjectStore,
    writer: str = "0badcafe",
    *,
    stop: threading.Event | None = None,
    epoch: bool = True,
    seed: int = 0,
) -> JournalWriter[Toy]:
    """A writer, with an epoch by default."""
    journal = JournalWriter(
        store,
        PREFIX,
        ToyMachine(),
        writer=writer,
        clock=ManualClock(),
        rng=random.Random(seed),
        stop=stop or threading.Event(),
    )
    if epoch:
        journal.take_epoch({"host": "h"})
    else:
        journal.catch_up()
    return journal
