"""Runs seeds: one, or many in parallel with a line of progress."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import random
import sys
import time
import traceback

from simulation.world import World


def run_world(seed: int) -> World:
    """Run one seed.

    Raises:
        ViolationError: An invariant does not hold.
    """
    world = World(seed)
    logging.disable(logging.CRITICAL)
    try:
        world.run()
    finally:
        logging.disable(logging.NOTSET)
    return world


def run_seed(seed: int) -> str:
    """Run one seed; the trace's hash."""
    return run_world(seed).trace()


def one_processor() -> None:
    """Only one thread runs at a time, so the others of this process had better not wake up another processor."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {random.choice(sorted(os.sched_getaffinity(0)))})


def _try(seed: int) -> tuple[int, str]:
    try:
        run_seed(seed)
    except BaseException as error:  # noqa: BLE001 (reported with its seed)
        return seed, f"{type(error).__name__}: {error}"
    return seed, ""


def main(arguments: list[str]) -> int:
    """The command line; 1 when a seed failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument(
        "seed", type=int, nargs="?", default=0, help="the seed, or the first of many"
    )
    parser.add_argument("--seeds", type=int, default=0, help="run so many, in parallel")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    if options.seeds:
        return _many(options.seed, options.seeds, options.jobs)
    try:
        trace = run_seed(options.seed)
    except AssertionError:
        traceback.print_exc()
        return 1
    print(f"seed {options.seed}: fine, trace {trace}")
    return 0


def _many(first: int, count: int, jobs: int) -> int:
    failed: list[int] = []
    began_s = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(jobs, initializer=one_processor) as pool:
        seeds = range(first, first + count)
        for done, (seed, error) in enumerate(pool.imap_unordered(_try, seeds, chunksize=20), 1):
            if error:
                failed.append(seed)
                print(f"\rseed {seed} FAILED: {error}\n  replay: python -m tests.simulation {seed}")
            if done % 50 == 0 or done == count:
                rate = done / (time.monotonic() - began_s)
                print(
                    f"\r{done}/{count} seeds, {len(failed)} failed, {rate:.0f} a second",
                    end="",
                    file=sys.stderr,
                    flush=True,
                )
    print(f"\n{count} seeds from {first}: {len(failed)} failed {failed[:20]}")
    return 1 if failed else 0
