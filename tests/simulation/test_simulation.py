"""300 seeds of the whole writing side with every kind of bad luck (I1-I6, I8, I9, I12); and defects that it has to find.

A failing seed is replayed by ``python -m tests.simulation SEED``; many are run by ``make simulate SEEDS=100000``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from simulation.mutants import MUTANTS, QUICK, defect
from simulation.runner import STEPS, main, met, one_processor, run_seed, run_world
from simulation.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
SEEDS = 300
BLOCK = 50
counts: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def _pinned() -> Iterator[None]:
    """Threads that take turns are fastest on one processor."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    one_processor()
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.parametrize("first", range(0, SEEDS, BLOCK))
def test_i1_to_i6_i8_i9_i12_whatever_happens(first: int):
    for seed in range(first, first + BLOCK):
        try:
            world = run_world(seed)
        except AssertionError as error:
            pytest.fail(f"{error}\nreplay: python -m tests.simulation {seed}")
        counts.update(met(world))


def test_the_simulation_meets_what_it_is_made_for():
    if counts["start"] < SEEDS:
        pytest.skip("counts what the 300 seeds of this run met, and they were not all run here")
    wanted = {
        "start": 1000, "kill": 300, "pause": 300, "late": 300, "outage": 50, "collected": 100,
        "spoiled": 50, "clone": 10, "gap": 50, "fenced": 100, "stray": 1, "switch": 200,
        "deleted": 20, "expired": 5, "topic deleted": 50, "tail lost": 100, "taken back": 30, "begun anew": 50,
        "copy level": 3, "batch": 500, "batch divided": 50, "batch broken": 10, "sealed": 100, "packed": 100,
    }  # fmt: skip
    assert {what: counts[what] for what, least in wanted.items() if counts[what] < least} == {}
    assert {*wanted} <= {*STEPS}


def test_the_same_seed_gives_the_same_trace_also_in_another_process():
    traces = [run_seed(7), run_seed(7)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation", "7"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONHASHSEED": "12345"},
        check=True,
    )
    assert {*traces, done.stdout.split()[-1]} == {traces[0]}
    assert run_seed(8) != traces[0]


@pytest.mark.parametrize("name", QUICK)
def test_a_planted_defect_is_found(name: str):
    assert first_found(name, 30) is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MUTANTS.keys() - set(QUICK)))
def test_each_planted_defect_is_found(name: str):
    assert first_found(name, SEEDS) is not None


def first_found(name: str, seeds: int) -> int | None:
    """The first seed that finds a defect."""
    for seed in range(seeds):
        try:
            with defect(name):
                run_seed(seed)
        except AssertionError:
            return seed
    return None


def test_many_seeds_are_run_and_summed_up(capsys: pytest.CaptureFixture[str]):
    assert main(["40", "--seeds", "12", "--jobs", "2"]) == 0
    out = capsys.readouterr().out
    assert "12 of 12 seeds from 40: 0 violations" in out
    assert "met: " in out


def test_an_actor_that_blocks_is_told_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("simulation.scheduler._HANG_S", 0.2)
    monkeypatch.setattr(Scheduler, "_hand_on", lambda _self, **_more: None)
    with pytest.raises(AssertionError, match="hangs"):
        run_seed(0)
