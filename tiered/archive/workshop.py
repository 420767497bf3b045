"""What archive jobs work with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiered.archive.body.wishes import NOTHING, Wishes
from tiered.upkeep.workplace import GIVE_UP_S

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from backends.base import ObjectStore
    from tiered.api.broker_place import Place
    from tiered.clock import Clock


@dataclass(frozen=True, slots=True)
class Workshop:
    """What an archive job works with.

    Attributes:
        tier: The tier's store, with retries.
        place: Which broker.
        archive: The archive's store, with retries.
        bare: The same without, for the log, which tries again by itself.
        clock: Time.
        rng: For ids and jitter.
        takes: Whether a topic is wanted.
        wishes: What bodies shall become.
        give_up_s: A store that has refused an entry of the log for so long is given up.
    """

    tier: ObjectStore
    place: Place
    archive: ObjectStore
    bare: ObjectStore
    clock: Clock
    rng: random.Random
    takes: Callable[[str], bool] = lambda _topic: True
    wishes: Wishes = NOTHING
    give_up_s: float = GIVE_UP_S
