"""kill -9 at random moments, again and again: ``make torture KILLS=500``, divided among the stores."""

from __future__ import annotations

import os
import random
import time
from typing import TYPE_CHECKING

import pytest
from support.live import Attach
from support.victims import FAST, Victim

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KILLS = int(os.environ.get("TIERED_TORTURE_KILLS", "12"))
OF_A_TIER = 25
"""After so many kills a tier is brought level, read whole, and another begun."""
STORES = 3
pytestmark = [pytest.mark.slow, pytest.mark.timeout(60 + 6 * KILLS)]


def test_killed_at_random(
    stores: Callable[[str], Path], new_url: Callable[[Path], str], tmp_path: Path
) -> None:
    """Wherever the kill falls, in starting, tiering, sealing or ending, nothing is lost, doubled or wrong."""
    seed = int(os.environ.get("TIERED_TORTURE_SEED", "1"))
    rng, done, tiers = random.Random(seed), 0, 0
    while done < KILLS // STORES:
        folder = tmp_path / f"tier{tiers}"
        folder.mkdir()
        victim = Victim(stores("s05-crash"), folder / "store", new_url(folder))
        try:
            while victim.kills < OF_A_TIER and done < KILLS // STORES:
                kill_once(victim, rng, folder / "attach.log")
                done += 1
            victim.finish()
        finally:
            victim.close()
        tiers += 1
        print(f"\n{done} kills, {tiers} tiers, seed {seed}", flush=True)


def kill_once(victim: Victim, rng: random.Random, log: Path) -> None:
    """One writer's incarnation, while messages arrive."""
    once = ("--once", "--seal") if rng.random() < 0.4 else ()
    with Attach(victim.growing.store, victim.url, log, (*FAST, *once)) as attach:
        until_s = time.monotonic() + rng.choice((0.5, 1.0, 2.0)) * rng.random() + 0.3
        while time.monotonic() < until_s and attach.is_running:
            victim.grow_by_chance(rng, 40_000)
            time.sleep(rng.random() / 10)
        if attach.is_running:
            attach.kill()
    victim.check()
