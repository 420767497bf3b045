"""The machine of a timer run loses its power: each timer is in the target's log once, whenever that happens.

The run's directory loses what it had not brought to the disk, the tier loses nothing; so a batch has to be on the disk
before its entry is written, and what was delivered before it is noted.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from support.clocks import Stopped
from support.power import Power, PowerFailure
from support.timer_stores import SMALL, delivered
from support.timers import Timers

from backends.memory import MemoryStore
from timer.local_target import LocalTarget

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from typing_extensions import Buffer

    from timer.handover import HandOver

COUNT, SEEDS = 120, 24


class Tier(MemoryStore):
    """Counts what is written to it, and can be copied as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.moment = lambda: None

    def put_if_absent(self, key: str, data: Sequence[Buffer] | Buffer) -> None:
        self.moment()
        super().put_if_absent(key, data)
        self.moment()

    def copied(self) -> Tier:
        made = Tier()
        made._objects = dict(self._objects)
        return made


def opened(folder: Path, clock: Stopped) -> LocalTarget:
    return LocalTarget.open(
        str(folder), cluster="c", broker="b", clock=clock, rng=random.Random(3), options=SMALL
    )


def work(target: LocalTarget, run: HandOver, clock: Stopped) -> None:
    """Hand over and deliver until nothing is left; a second passes between two looks."""
    while run.step() or len(target.wheel):
        clock.time_ms += 1_000
        target.tick()


def failed_at(moment: int, seed: int, folder: Path) -> tuple[Counter[str], bool]:
    """What the target's log has in the end when the power fails at a moment, by unique id; whether it did fail."""
    rng, clock = random.Random(seed), Stopped()
    tier, power = Tier(), Power(folder / "store")
    timers = Timers(tier, clock)
    timers.put([clock.now_ms() - 2_000 + rng.randrange(12) * 1_000 for _ in range(COUNT)])
    left = iter(range(moment))

    def tick() -> None:
        if next(left, None) is None:
            raise PowerFailure

    is_failed = False
    with power.watched():
        target = opened(power.root, clock)
        run = timers.run(target, batch=10, near_ms=1 << 40)
        power.before_sync = tier.moment = tick
        try:
            work(target, run, clock)
        except PowerFailure:
            is_failed = True
        power.before_sync = tier.moment = lambda: None
        tier = tier.copied()
        power.survivor(folder / "left", rng)
        run.close()
        with contextlib.suppress(Exception):
            target.close()
    again = Timers(tier, clock)
    with contextlib.closing(opened(folder / "left", clock)) as target:
        run = again.run(target, batch=10, near_ms=1 << 40)
        work(target, run, clock)
        run.close()
    found: Counter[str] = Counter()
    for (topic, _, key), count in delivered(folder / "left").items():
        found[key] += count if topic == "orders" else 0
    return found, is_failed


ONCE = {f"{number:032X}": 1 for number in range(COUNT)}


@pytest.fixture(autouse=True)
def often_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the wheel that delivers something is noted."""
    monkeypatch.setattr("timer.local_target.SAVE_S", 0.0)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_power_failure_at_any_moment_loses_and_doubles_no_timer(seed: int, tmp_path: Path):
    found, is_failed = failed_at(random.Random(seed).randrange(60), seed, tmp_path)
    assert found == ONCE
    assert is_failed


def given_unflushed(self: LocalTarget, messages: Any) -> Any:
    flush, self.store.flush = self.store.flush, lambda: None  # type: ignore[method-assign]
    try:
        return GIVE(self, messages)
    finally:
        self.store.flush = flush  # type: ignore[method-assign]


def noted_unflushed(self: LocalTarget) -> None:
    flush, self.store.flush = self.store.flush, lambda: None  # type: ignore[method-assign]
    try:
        SAVE(self)
    finally:
        self.store.flush = flush  # type: ignore[method-assign]


GIVE, SAVE = LocalTarget.give, LocalTarget._save


@pytest.mark.parametrize(
    ("name", "defect"),
    [("give", given_unflushed), ("_save", noted_unflushed)],
    ids=["an entry ahead of its records", "a note ahead of what was delivered"],
)
def test_a_swapped_order_is_found(
    name: str, defect: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(LocalTarget, name, defect)

    def is_found(seed: int) -> bool:
        folder = tmp_path / str(seed)
        folder.mkdir()
        return failed_at(random.Random(seed).randrange(60), seed, folder)[0] != ONCE

    assert any(is_found(seed) for seed in range(40))
