"""Runs seeds: one, or many in parallel with a line of progress and a summary."""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import os
import queue
import sys
import time
import traceback
from collections import Counter
from typing import TYPE_CHECKING, Any

from simulation.kafka_world import KafkaWorld
from simulation.world import World

from backends.testing.faulty import Fault

if TYPE_CHECKING:
    from collections.abc import Sequence

BRANCHES = {
    # what happens to writers and to the store
    "start": 1000, "kill": 300, "pause": 300, "late": 300, "outage": 50, "full": 10, "fenced": 100, "stray": 3,
    "number used and deleted": 2,
    "twice": 50, "switch": 200, "bundle of many": 200, "deadline": 3, "clone": 10, "collected": 100, "spoiled": 50,
    "level without a restart": 30, "escaped": 20, "epoch behind sealed ends": 1,
    # what happens to the broker
    "topic deleted": 50, "tail lost": 100, "copy level": 3, "emptied and grown": 10, "hole": 500, "quarantined": 500,
    "record at an edge": 50, "repaired": 30, "rebuilt": 20,
    "clock set back": 50, "ruled by an earlier part": 5, "damaged end lost": 10, "lag grown": 5,
    # what became of it
    "gap": 50, "gap in the middle": 30, "gap at the beginning": 10, "truncated": 20, "part divided": 10,
    "truncation refused": 1, "begun anew": 40,
    "sealed": 100, "merged": 500, "to level 1": 200, "to level 2": 50, "to level 3": 100, "open segment merged": 300,
    "tail merged": 10, "cut parts merged": 10, "segments joined": 1, "merge too late": 10, "equal parts merged": 5,
    "parts with holes merged": 50, "packed": 50,
    "expired": 20, "expired segment": 20, "expiry leaves a gap": 5, "topic removed": 1, "deleted": 30,
    "collected early": 3, "compacted": 20, "compacted away": 100, "tombstone gone": 1,
    "paused": 5, "resumed": 5, "held back by its rate": 100,
    # who reads meanwhile
    "read beside": 500, "read ahead beside": 500, "wrong bit": 100,
}  # fmt: skip
"""What happens in the first 300 seeds at least so often: the branches that carry a guarantee, not the starts."""
_FAILED_MAX = 50
_AT_ONCE = 10


KAFKA_FIRST = 1_000_000
"""From this seed on the queues are partitions of a Kafka node."""


def run_world(seed: int) -> World:
    """Run one seed.

    Raises:
        ViolationError: An invariant does not hold.
    """
    world = KafkaWorld(seed) if seed >= KAFKA_FIRST else World(seed)
    logging.disable(logging.CRITICAL)
    try:
        world.run()
    finally:
        logging.disable(logging.NOTSET)
    return world


def run_seed(seed: int) -> str:
    """Run one seed; the trace's hash."""
    return run_world(seed).trace()


def met(world: World) -> Counter[str]:
    """What happened in a run, how often."""
    history = world.history
    found = Counter(world.met) + history.met
    found["fenced"] = sum(process.fenced for process in world.processes)
    found["stray"] = len(history.strays)
    found["turns"] = world.scheduler.steps
    found["wrong bit"] = sum(event.fault is Fault.FLIP for event in world.faulty.events)
    found["twice"] = sum(event.fault is Fault.TWICE for event in world.faulty.events)
    found["requests"] = len(world.faulty.events)
    dispatchers = [process.attachment.dispatcher for process in world.processes]
    found["switch"] = sum(one.counters.switches for one in dispatchers if one)
    return found


def one_processor(number: int = 0) -> None:
    """Only one thread runs at a time, so the others of this process had better not wake up another processor."""
    if hasattr(os, "sched_setaffinity"):
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {processors[number % len(processors)]})


def main(arguments: list[str]) -> int:
    """The command line; 1 when a seed failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument(
        "seed", type=int, nargs="?", default=0, help="the seed, or the first of many"
    )
    parser.add_argument("--seeds", type=int, default=0, help="run so many, in parallel")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--defects",
        action="store_true",
        help="look for every planted defect, and write tests/simulation/DEFECTS.md anew",
    )
    options = parser.parse_args(arguments)
    if options.defects:
        from simulation.defects import find_all

        return find_all(options.jobs)
    if options.seeds:
        return _Many(options.seed, options.seeds, options.jobs).run()
    try:
        trace = run_seed(options.seed)
    except AssertionError:
        traceback.print_exc()
        return 1
    print(f"seed {options.seed}: fine, trace {trace}")
    return 0


def _try(seed: int) -> tuple[int, str, Counter[str]]:
    try:
        return seed, "", met(run_world(seed))
    except BaseException as error:  # noqa: BLE001 (reported with its seed)
        return seed, f"{type(error).__name__}: {error}", Counter()


def _work(number: int, seeds: Sequence[int], results: Any) -> None:
    """Body of a process; what it gives has no order."""
    one_processor(number)
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    for low in range(0, len(seeds), _AT_ONCE):
        done = [_try(seed) for seed in seeds[low : low + _AT_ONCE]]
        if low % 200 == 0:
            gc.collect()
        results.put(([one[:2] for one in done], sum((one[2] for one in done), Counter())))


class _Many:
    """Many seeds, each process with its own share."""

    def __init__(self, first: int, count: int, jobs: int) -> None:
        self._first, self._count, self._jobs = first, count, max(1, min(jobs, count))
        self._failed: dict[int, str] = {}
        self._met: Counter[str] = Counter()
        self._done = 0
        self._began_s = time.monotonic()
        self._told_s = 0.0

    def run(self) -> int:
        """Until all are done, or too many have failed; 1 when any has, or a process was lost."""
        context = multiprocessing.get_context("spawn")
        results = context.Queue()
        end = self._first + self._count
        workers = [
            context.Process(
                target=_work,
                args=(number, range(self._first + number, end, self._jobs), results),
                daemon=True,
            )
            for number in range(self._jobs)
        ]
        for worker in workers:
            worker.start()
        try:
            while self._done < self._count and len(self._failed) < _FAILED_MAX:
                try:
                    self._take(*results.get(timeout=5.0))
                except queue.Empty:
                    if not any(worker.is_alive() for worker in workers):
                        break
        finally:
            for worker in workers:
                worker.terminate()
            self._sum_up()
        return 1 if self._failed or self._done < self._count else 0

    def _take(self, done: list[tuple[int, str]], found: Counter[str]) -> None:
        self._done += len(done)
        self._met.update(found)
        for seed, error in done:
            if error:
                self._failed[seed] = error
                print(f"\rseed {seed} FAILED: {error}\n  replay: python -m tests.simulation {seed}")
        now_s = time.monotonic()
        if now_s >= self._told_s + 1.0 or self._done == self._count:
            self._told_s = now_s
            rate = self._done / (now_s - self._began_s)
            left_s = (self._count - self._done) / rate
            print(
                f"\r{self._done}/{self._count} seeds, {len(self._failed)} failed, {rate:.1f} a second,"
                f" {left_s / 60:.1f} minutes left ",
                end="",
                file=sys.stderr,
                flush=True,
            )

    def _sum_up(self) -> None:
        seconds = time.monotonic() - self._began_s
        rate = self._done / seconds
        print(
            f"\n{self._done} of {self._count} seeds from {self._first}: {len(self._failed)} violations;"
            f" {seconds:.0f} seconds, {self._jobs} processes, {rate:.1f} seeds a second,"
            f" {rate / self._jobs:.1f} for each process"
        )
        names = [*sorted(self._met.keys() - BRANCHES.keys()), *BRANCHES]
        print("  met: " + ", ".join(f"{name} {self._met[name]}" for name in names))
        if never := [name for name in BRANCHES if not self._met[name]]:
            print("  never: " + ", ".join(never))
        for seed in sorted(self._failed):
            print(f"  replay: python -m tests.simulation {seed}   # {self._failed[seed]:.120}")
