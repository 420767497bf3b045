"""Small embedded stores for tests."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from support.stored import NAMES

from tiered.clock import Clock, SystemClock
from tiered.store.embedded import MessageStore
from tiered.store.store_options import Flush, StoreOptions

if TYPE_CHECKING:
    from pathlib import Path

SMALL = StoreOptions(65_536, 50, index_slots=100, index_items=400)
SYNC = StoreOptions(65_536, 50, index_slots=100, index_items=400, flush=Flush.SYNC)


def create(root: Path, options: StoreOptions = SMALL, clock: Clock | None = None) -> MessageStore:
    return MessageStore.create(
        root, **NAMES, clock=clock or SystemClock(), options=options, rng=random.Random(1)
    )


def reopen(
    root: Path, options: StoreOptions = SMALL, clock: Clock | None = None, **more: Any
) -> MessageStore:
    return MessageStore.open(
        root, **NAMES, clock=clock or SystemClock(), options=options, rng=random.Random(2), **more
    )
