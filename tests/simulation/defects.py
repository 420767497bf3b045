"""Which seed finds each planted defect first; and DEFECTS.md, which says so, made anew."""

from __future__ import annotations

import multiprocessing
import re
from pathlib import Path
from typing import TYPE_CHECKING

from simulation.mutants import MUTANTS, defect
from simulation.mutants_kafka import KAFKA
from simulation.runner import KAFKA_FIRST, one_processor, run_seed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SEEDS = 300
"""So many are run by the tests."""
MORE_SEEDS = 900
"""So many at most are looked through for a defect, or a branch, that 300 have missed: a few are met once in a hundred."""
PAGE = Path(__file__).parent / "DEFECTS.md"
_TABLE = re.compile(r"(?<=when last counted \|\n\|---\|---\|\n)(?:\|.*\|\n)*")


def seeds_of(name: str) -> range:
    """Those that may find a defect."""
    return range(KAFKA_FIRST, KAFKA_FIRST + MORE_SEEDS) if name in KAFKA else range(MORE_SEEDS)


def first_found(name: str, seeds: Iterable[int]) -> int | None:
    """The first of these seeds that finds a defect; None: not one of them does."""
    for seed in seeds:
        try:
            with defect(name):
                run_seed(seed)
        except AssertionError:
            return seed
    return None


def told() -> dict[str, int]:
    """What the page says."""
    table = _TABLE.search(PAGE.read_text())
    assert table is not None
    rows = [line.strip("| \n").split(" | ") for line in table.group().splitlines()]
    return {name: int(seed) for name, seed in rows}


def write(found: Mapping[str, int]) -> None:
    """Have the page say it."""
    rows = "".join(f"| {name} | {seed} |\n" for name, seed in found.items())
    PAGE.write_text(_TABLE.sub(rows, PAGE.read_text()))


def find_all(jobs: int) -> int:
    """Look for every defect, and write the page when all are found; 1 when one was not."""
    found: dict[str, int | None] = {}
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for name, seed in pool.imap_unordered(_find, enumerate(MUTANTS)):
            found[name] = seed
            print(f"{name}: {'NOT FOUND' if seed is None else f'seed {seed}'}", flush=True)
    ordered = {name: found[name] for name in MUTANTS}
    missed = [name for name, seed in ordered.items() if seed is None]
    print(f"{len(found) - len(missed)} of {len(found)} found within {MORE_SEEDS} seeds")
    if not missed:
        write({name: seed for name, seed in ordered.items() if seed is not None})
    return 1 if missed else 0


def _find(job: tuple[int, str]) -> tuple[str, int | None]:
    number, name = job
    one_processor(number)
    return name, first_found(name, seeds_of(name))
