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
    """Generation, and everything that was ever said, in order: ``[number, generation, writer, value]``."""

    generation: int = 0
    said: tuple[tuple[int, int, str, Any], ...] = ()

    @property
    def values(self) -> list[Any]:
        return [value for _, _, _, value in self.said]


class ToyMachine:
    """``say`` adds a value, whoever says it, so that nothing hides what got into history."""

    def initial(self) -> Toy:
        return Toy()

    def generation(self, state: Toy) -> int:
        return state.generation

    def apply(self, state: Toy, entry: Entry) -> Toy:
        for action in entry.actions:
            if action["do"] == "reign":
                state = replace(state, generation=action["generation"])
                value = f"reign {action['generation']}"
            elif action["do"] == "say":
                value = action["value"]
            else:
                raise UnknownActionError(f"{action['do']}")
            step = (entry.number, entry.generation, entry.writer, value)
            state = replace(state, said=(*state.said, step))
        return state

    def dump(self, state: Toy) -> Any:
        return {"generation": state.generation, "said": [list(step) for step in state.said]}

    def dump_pieces(self, state: Toy) -> Iterator[bytes]:
        yield json_text(self.dump(state))

    def load(self, document: Any) -> Toy:
        return Toy(document["generation"], tuple(tuple(step) for step in document["said"]))  # type: ignore[misc]


def say(*values: object) -> list[dict[str, Any]]:
    """Actions."""
    return [{"do": "say", "value": value} for value in values]


def make_writer(
    store: ObjectStore,
    writer: str = "0badcafe",
    *,
    stop: threading.Event | None = None,
    reign: bool = True,
    seed: int = 0,
) -> JournalWriter[Toy]:
    """A writer, with a reign by default."""
    journal = JournalWriter(
        store,
        PREFIX,
        ToyMachine(),
        writer=writer,
        clock=ManualClock(),
        rng=random.Random(seed),
        stop=stop or threading.Event(),
    )
    if reign:
        journal.take_reign({"host": "h"})
    else:
        journal.catch_up()
    return journal
