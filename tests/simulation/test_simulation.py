"""300 seeds of the whole writing side with every kind of bad luck (I1-I6, I8, I9, I12); and defects that it has to find.

A failing seed is replayed by ``python -m tests.simulation SEED``; many are run by ``make simulate SEEDS=100000``.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from simulation.defects import MORE_SEEDS, SEEDS, first_found, seeds_of, told
from simulation.mutants import MUTANTS, QUICK, RARE, defect
from simulation.runner import BRANCHES, KAFKA_FIRST, main, met, one_processor, run_seed, run_world
from simulation.scheduler import Scheduler

from tiered.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
BLOCK = 50
A_DAY = 3
"""So many planted defects besides the quick ones are looked for in every run of the tests, others at every commit."""
KAFKA_SEEDS = 100
"""So many of worlds of partitions."""
KAFKA_BRANCHES = (
    "aborted", "committed", "leader changed", "topic deleted", "tail lost", "truncated", "begun anew", "gap", "hidden",
    "batch cleaned", "batch cleaned away", "open at the end", "aborted at the end", "lineage checked", "lineage rebuilt",
)  # fmt: skip
"""What happens there, also in every block of seeds."""
kafka_counted: Counter[str] = Counter()
counted: dict[int, Counter[str]] = {}
"""What each seed met that was run in this process."""


def defects_of_the_day() -> list[str]:
    """Chosen by the commit, so that what fails fails again; by the date where there is no commit."""
    git = shutil.which("git")
    done = git and subprocess.run(
        [git, "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    seed = done.stdout if done and done.stdout else SystemClock().now_ms() // 86_400_000
    rest = sorted(MUTANTS.keys() - set(QUICK))
    return [*QUICK, *random.Random(seed).sample(rest, A_DAY)]


OF_THE_DAY = defects_of_the_day()


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


def in_blocks(first: int, seeds: int) -> list[Any]:
    """The first seed of each block; every run of the tests has a third of the blocks, at least one."""
    blocks = range(first, first + seeds, BLOCK)
    often = max(1, len(blocks) // 3)
    return [*blocks[:often], *(pytest.param(n, marks=pytest.mark.slow) for n in blocks[often:])]


def run_counted(seed: int) -> None:
    try:
        counted[seed] = met(run_world(seed))
    except AssertionError as error:
        pytest.fail(f"{error}\nreplay: python -m tests.simulation {seed}")


@pytest.mark.parametrize("first", in_blocks(0, SEEDS))
def test_i1_to_i6_i8_i9_i12_whatever_happens(first: int):
    for seed in range(first, first + BLOCK):
        run_counted(seed)


@pytest.mark.parametrize("first", in_blocks(KAFKA_FIRST, KAFKA_SEEDS))
def test_partitions_of_a_kafka_node_are_what_its_bytes_say(first: int):
    for seed in range(first, first + BLOCK):
        try:
            kafka_counted.update(met(run_world(seed)))
        except AssertionError as error:
            pytest.fail(f"{error}\nreplay: python -m tests.simulation {seed}")
    # (Those of one block: blocks may run in processes of their own.)
    few = {what: kafka_counted[what] for what in KAFKA_BRANCHES if not kafka_counted[what]}
    assert few == {}


@pytest.mark.slow
def test_the_simulation_meets_what_it_is_made_for():
    for seed in set(range(SEEDS)) - counted.keys():  # those that ran in no process, or in another
        run_counted(seed)
    for seed in range(
        SEEDS, MORE_SEEDS
    ):  # what is met a few times in 300 may be missed by all of them
        if not too_rare():
            break
        run_counted(seed)
    assert too_rare() == {}


def too_rare() -> dict[str, int]:
    """Branches that the seeds so far have not met as often as they should, and how often they have."""
    counts = sum(counted.values(), Counter())
    return {what: counts[what] for what, least in BRANCHES.items() if counts[what] < least}


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


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in OF_THE_DAY else pytest.mark.slow)
        for name in sorted(MUTANTS)
    ],
)
@pytest.mark.timeout(3600)
def test_a_planted_defect_is_found(name: str):
    """By the seed that the page tells; where that finds it no more a whole search follows, which takes long."""
    assert first_found(name, [told()[name], *seeds_of(name)]) is not None


@pytest.mark.parametrize("name", sorted(MUTANTS | RARE))
def test_every_defect_can_be_planted(name: str):
    """What it changes is still called so, also where it is not looked for today."""
    with defect(name):
        pass


def test_the_table_of_first_seeds_names_every_planted_defect():
    """``python -m tests.simulation --defects`` makes it anew."""
    assert list(told()) == list(MUTANTS)
    assert all(seed in seeds_of(name) for name, seed in told().items())


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
