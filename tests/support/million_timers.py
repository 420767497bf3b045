"""A million timers of one hour, taken and handed over, each in a process of its own whose time and memory count."""

from __future__ import annotations

import random
import resource
from typing import TYPE_CHECKING

from support.clocks import Shifted
from support.timers import Timers

from backends.local import LocalFolderStore
from tiered.bench.dispatch import peak_rss_bytes
from tiered.clock import SystemClock
from tiered.log.timers import HOUR_MS
from timer.local_target import LocalTarget

if TYPE_CHECKING:
    from pathlib import Path

    from tiered.clock import Clock


MILLION = 1_000_000


def opened(folder: Path, clock: Clock) -> LocalTarget:
    rng = random.Random(1)
    return LocalTarget.open(str(folder), cluster="c", broker="b", clock=clock, rng=rng)


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def take_a_million(folder: Path, hour_ms: int) -> None:
    rng, timers = random.Random(1), Timers(LocalFolderStore(folder / "tier"), SystemClock())
    for _ in range(20):
        dues = [hour_ms + rng.randrange(HOUR_MS) for _ in range(MILLION // 20)]
        timers.put(dues, PAD="p" * 50)


def hand_a_million(folder: Path, hour_ms: int) -> None:
    clock = Shifted()
    timers, target = Timers(LocalFolderStore(folder / "tier"), clock), opened(folder / "s", clock)
    clock.shift_ms = hour_ms - clock.now_ms()
    begin_s, run = cpu_s(), timers.run(target, batch=4096)
    while run.step():
        pass
    handed_s, count = cpu_s() - begin_s, run.counters.handed
    clock.shift_ms += HOUR_MS + 2_000
    begin_s = cpu_s()
    target.tick()
    target.store.wait_listed()
    print(
        count, target.delivered, f"{MILLION / handed_s:.0f}", f"{MILLION / (cpu_s() - begin_s):.0f}",
        peak_rss_bytes() >> 20,
    )  # fmt: skip
    run.close()
    target.close()
