"""What a command that changes a tier works with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

    from backends.base import ObjectStore
    from tiered.api.broker_place import Place
    from tiered.clock import Clock


GIVE_UP_S = 60.0


@dataclass(frozen=True, slots=True)
class Workplace:
    """One broker's tier, and what is needed to change it.

    Attributes:
        store: The tier's store, with retries.
        bare: The same without, for the journal, which tries again by itself.
        place: Which broker.
        clock: Time.
        rng: For ids and jitter.
        give_up_s: A store that has refused an entry for so long is given up.
    """

    store: ObjectStore
    bare: ObjectStore
    place: Place
    clock: Clock
    rng: random.Random
    give_up_s: float = GIVE_UP_S

    @property
    def prefix(self) -> str:
        """Of the broker's keys, ending in a slash."""
        return self.place.prefix

    def new_id(self) -> str:
        """A random id of 8 hex digits."""
        return f"{self.rng.getrandbits(32):08x}"

    def at_place(self, place: Place) -> Workplace:
        """The same at another place of the tier, as that of the broker's timers."""
        return replace(self, place=place)
