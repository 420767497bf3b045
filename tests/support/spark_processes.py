"""Jobs of Spark as processes of their own, which can be stopped at a named moment and killed, each part of them apart."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from support.command_line import command, environment
from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PAUSING = Path(__file__).parent / "pausing"
EXECUTOR = "CoarseGrainedExecutorBackend"
WORKER = "pyspark.daemon"
SECONDS_MAX = 240.0
QUICK = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xshare:auto"
SPARK = (
    *("--engine", "spark", "--spark-conf", "spark.driver.host=127.0.0.1"),
    *("--spark-conf", f"spark.driver.extraJavaOptions={QUICK}"),
    *("--spark-conf", f"spark.executor.extraJavaOptions={QUICK}"),
)
"""Options of a job that is small: what it costs is to start."""


def parents() -> dict[int, int]:
    """Of every process there is."""
    found: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                found[int(entry.name)] = int(
                    (entry / "stat").read_text().rpartition(")")[2].split()[1]
                )
    return found


def words_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def below(pid: int) -> list[int]:
    """All processes that a process has started, and those have."""
    known, found = parents(), [pid]
    for one in found:
        found += [child for child, parent in known.items() if parent == one]
    return found[1:]


def above(pid: int) -> Iterator[int]:
    known = parents()
    while (pid := known.get(pid, 0)) > 1:
        yield pid


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@dataclass
class Job:
    """A command that may be paused once.

    Attributes:
        driver: Its process.
        folder: Where it says that it has been paused.
    """

    driver: subprocess.Popen[bytes]
    folder: Path
    killed: list[int] = field(default_factory=list)

    def paused(self) -> int:
        """Wait until one of its processes is paused; which."""
        file = self.folder / "paused"
        until(lambda: file.exists() or self.driver.poll() is not None, "paused", SECONDS_MAX)
        assert file.exists(), self.driver.communicate()[1].decode()
        return int(file.read_text())

    def let_go(self) -> None:
        (self.folder / "go").touch()

    def find(self, word: str) -> list[int]:
        """Its processes with a word in their command line."""
        return [pid for pid in below(self.driver.pid) if word in words_of(pid)]

    def executor_of(self, pid: int) -> int:
        return next(one for one in above(pid) if EXECUTOR in words_of(one))

    def end(self) -> tuple[int, str]:
        """Wait for it; its code and what it said."""
        _, err = self.driver.communicate(timeout=SECONDS_MAX)
        return self.driver.returncode, err.decode()


@contextlib.contextmanager
def job(*arguments: str, folder: Path, env: Mapping[str, str] | None = None) -> Iterator[Job]:
    """Start a command line of ours; nothing of it outlives the test."""
    folder.mkdir()
    paths = os.pathsep.join([str(PAUSING), *filter(None, [os.environ.get("PYTHONPATH")])])
    found = environment() | {"PAUSE_IN": str(folder), "PYTHONPATH": paths, **(env or {})}
    driver = subprocess.Popen(
        command(arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=found
    )
    with driver:
        made = Job(driver, folder)
        try:
            yield made
        finally:
            made.let_go()
            left = [driver.pid, *below(driver.pid)] if driver.poll() is None else []
            kill(left)
