"""SIGKILL to each part of a Spark job at each of its moments, and two jobs at once: each message is archived once."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.archive_rows import check
from support.command_line import here
from support.spark_processes import EXECUTOR, SPARK, WORKER, job, kill
from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.archive_fixtures import Sealed
    from support.spark_processes import Job

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]
CLUSTER = (*SPARK, "--master", "local-cluster[2,1,1024]")
LOCAL = (*SPARK, "--master", "local[2,4]")
MOMENTS = {
    "before write": "archive-writing",
    "after write": "archive-written",
    "before commit": "entry-begun:2",
    "after commit": "entry-put:2",
}
"""The first entry is of the job's beginning, before there is a file; the second names the files."""


def victims(running: Job, who: str, paused: int) -> list[int]:
    """What is to be killed while one of the job's processes stands still."""
    if who == "driver":
        return [running.driver.pid]
    is_worker = paused != running.driver.pid
    if who == "executor":
        return [running.executor_of(paused)] if is_worker else running.find(EXECUTOR)[:1]
    return [paused] if is_worker else running.find(WORKER)


def files(archive_url: str) -> list[Path]:
    return list(Path(archive_url.removeprefix("file://"), "data").rglob("*.parquet"))


def entries(archive_url: str) -> list[Path]:
    return list(Path(archive_url.removeprefix("file://"), "_log", "journal").glob("*[0-9]"))


@pytest.mark.parametrize("who", ["worker", "executor", "driver"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed(
    who: str, moment: str, sealed: Callable[[str], Sealed], archive_url: str, tmp_path: Path
) -> None:
    tier = sealed("s04-batch-compress")
    words = ("archive", tier.url, "--to", archive_url, *CLUSTER, "--json")
    env = {"PAUSE_AT": MOMENTS[moment]}
    with job(*words, folder=tmp_path / "pause", env=env) as running:
        paused = running.paused()
        assert (paused == running.driver.pid) == ("commit" in moment)
        assert len(entries(archive_url)) == 1 + (moment == "after commit")
        assert files(archive_url) or "write" in moment, "a commit names files"
        parts = [running.driver.pid, *running.find("")]
        chosen = victims(running, who, paused)
        assert chosen
        kill(chosen)
        running.let_go()  # an orphan goes on too, and writes what it has
        code, said = running.end()
        assert code == (-signal.SIGKILL if who == "driver" else 0), said
        kill([pid for pid in parts if pid != running.driver.pid])
    if who != "driver" or moment == "after commit":
        planned = (
            here("archive", tier.url, "--to", archive_url, "--json").good().document["planned"]
        )
        assert planned == 0, "what was under way when it was killed has been committed"
    check(tier, archive_url)


def test_a_job_that_another_overtakes(
    sealed: Callable[[str], Sealed], archive_url: str, tmp_path: Path
) -> None:
    """One stands still just before its commit; another does all of it; the first then finds nothing left to commit."""
    tier = sealed("s04-batch-compress")
    words = ("archive", tier.url, "--to", archive_url, *LOCAL, "--json")
    with job(*words, folder=tmp_path / "one", env={"PAUSE_AT": "entry-begun:2"}) as one:
        one.paused()
        assert files(archive_url), "all that is left to do is to name them"
        with job(*words, folder=tmp_path / "two") as two:
            assert two.end()[0] == 0
        one.let_go()
        code, said = one.end()
        assert code == 0, said
    check(tier, archive_url)


@pytest.mark.parametrize("who", ["worker", "driver"])
def test_two_jobs_at_once_and_one_is_killed(
    who: str, sealed: Callable[[str], Sealed], archive_url: str, tmp_path: Path
) -> None:
    tier = sealed("s04-batch-compress")
    words = ("archive", tier.url, "--to", archive_url, *LOCAL, "--json")
    with (
        job(*words, folder=tmp_path / "one", env={"PAUSE_AT": "archive-written"}) as one,
        job(*words, folder=tmp_path / "two") as two,
    ):
        chosen = victims(one, who, one.paused())
        kill(chosen)
        one.let_go()
        codes = [running.end()[0] for running in (one, two)]
    assert codes == [-signal.SIGKILL if who == "driver" else 0, 0]
    check(tier, archive_url)


def test_a_folder_of_pauses_is_needed(tmp_path: Path) -> None:
    """The pausing itself: a process that nobody kills goes on."""
    with job("--version", folder=tmp_path / "pause", env={"PAUSE_AT": "never"}) as running:
        until(lambda: running.driver.poll() is not None, "ended")
        assert running.end()[0] == 0
