"""What all rows of the table of figures need: rows, stores, commands, medians, and patience for a quiet machine."""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TIERED = [sys.executable, "-m", "tiered"]
MIB = 1024 * 1024
ONE, SIXTEEN, MANY, LARGE = (
    "1 queue, 1 KiB",
    "16 queues, 1 KiB",
    "1,000 queues, 256 B",
    "8 queues, 64 KiB",
)
STORES = {
    ONE: (1, 1, 200_000, 1024),
    SIXTEEN: (1, 16, 500_000, 1024),
    MANY: (4, 250, 200_000, 256),
    LARGE: (1, 8, 8_000, 65_536),
}
"""Topics, queues of each, messages of all, bytes of a body."""
Result = dict[str, Any]
SETTLE_S = 6.0


@dataclass(frozen=True)
class Row:
    """A figure that stands by itself.

    Attributes:
        what: Measured.
        ours: What it came to.
        limit: The plain thing of the same minutes that it cannot beat.
        peer: What the Java tiered store came to.
        ratio: Of ours to the peer's, or to the limit.
        goal: To be reached.
        reached: Whether it was; None: it has no goal, or could not be measured.
    """

    what: str
    ours: str
    limit: str = ""
    peer: str = ""
    ratio: str = ""
    goal: str = ""
    reached: bool | None = None

    def line(self) -> str:
        """As Markdown, an item of a list."""
        peer = ": ".join(filter(None, (self.peer and f"Java {self.peer}", self.ratio)))
        goal = self.goal and f"goal {self.goal}{REACHED[self.reached]}"
        return f"- {self.what}: " + "; ".join(filter(None, (self.ours, self.limit, peer, goal)))


@dataclass(frozen=True)
class SpeedRow:
    """A row of the table of speeds: one run of all messages of a store, without start-up.

    Attributes:
        what: Measured.
        numbers: MiB/s, CPU seconds a GiB, MiB of RSS, requests a GiB.
        limit: Shares of the plain things of the same minutes that it cannot beat.
        peer: MiB/s of the Java tiered store, of the first pass and of later ones.
        ratio: Of our speed to the peer's, likewise.
        cpu_share: Of the peer's CPU time.
        goal: To be reached.
        reached: Whether it was; None: it could not be measured.
    """

    what: str
    numbers: tuple[float, float, float, float]
    limit: str
    peer: str = "not measured"
    ratio: str = ""
    cpu_share: str = ""
    goal: str = ""
    reached: bool | None = None

    def line(self) -> str:
        """As Markdown, a row of a table below ``HEAD``."""
        speed, cpu, rss, requests = self.numbers
        numbers = (f"{speed:.0f}", f"{cpu:.2f}", f"{rss:.0f}", f"{requests:.0f}")
        goal = self.goal + REACHED[self.reached]
        cells = (self.what, *numbers, self.limit, self.peer, self.ratio, self.cpu_share, goal)
        return f"| {' | '.join(cells)} |"


REACHED = {True: ": yes", False: ": **no**", None: ""}
HEAD = """| what | MiB/s | CPU | RSS | requests | limit | Java, warm | ratio, warm | of its CPU | goal |
|---|---|---|---|---|---|---|---|---|---|"""


def page_of(rows: Iterable[Row | SpeedRow]) -> str:
    """The table, and below it the list of what is no row of it."""
    found = list(rows)
    speeds = [row.line() for row in found if isinstance(row, SpeedRow)]
    table = [HEAD, *speeds, ""] if speeds else []
    return "\n".join([*table, *(row.line() for row in found if isinstance(row, Row))])


@dataclass(frozen=True)
class Bench:
    """How a table is measured.

    Attributes:
        work: Where stores and tiers are.
        runs: Of each side, in turn.
        share: Messages of each store, 1 for all.
        patience_s: How long to wait for a quiet machine before each run.
    """

    work: Path
    runs: int
    share: float = 1.0
    patience_s: float = 30.0

    def store(self, name: str) -> Path:
        """The store of a case, made on first use: by the peer where Java is there, so that both read the same one.

        It is read once, since whoever reads it first would be measured with the disk, and the others without.
        """
        suffix = "" if self.share == 1 else f"-{self.share:g}"
        path = self.work / f"s{list(STORES).index(name) + 1}{suffix}"
        topics, queues, messages, body = STORES[name]
        made_store(path, topics, queues, max(topics * queues, int(messages * self.share)), body)
        for file in path.rglob("*"):
            if file.is_file():
                read_once(file)
        return path

    def alternate(self, *sides: Callable[[], Result]) -> list[list[Result]]:
        """Run each side in turn."""
        results: list[list[Result]] = [[] for _ in sides]
        for _ in range(self.runs):
            for row, side in zip(results, sides, strict=True):
                wait_for_quiet(self.patience_s)
                row.append(side())
        return results


def read_once(path: Path) -> None:
    """Bring a file into the page cache."""
    with path.open("rb", buffering=0) as file:
        while file.read(4 * MIB):
            pass


def busy_cores(seconds: float = 1.0) -> float:
    """Cores that are busy now."""

    def ticks() -> float:
        fields = Path("/proc/stat").read_text("ascii").split("\n", 1)[0].split()
        return sum(int(fields[i]) for i in (1, 2, 3, 6, 7)) / os.sysconf("SC_CLK_TCK")

    before = ticks()
    time.sleep(seconds)
    return (ticks() - before) / seconds


def wait_for_quiet(patience_s: float = 30.0) -> None:
    """Wait until others leave the machine alone, within reason."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline and busy_cores() > 0.3:
        pass


def run_json(command: list[str], **env: str) -> Result:
    """Run a program that prints one JSON document."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        cwd=ROOT,
        env={**os.environ, **env},
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stderr}")
    text = done.stdout.strip()
    return json.loads(text if text.startswith("{\n") else text.splitlines()[-1])


def timed(command: list[str], **env: str) -> Result:
    """As ``run_json``, with what the whole process took: ``wall`` and ``cpu`` seconds, start and end in them."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    document = run_json(command, **env)
    wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**document, "wall": wall, "cpu": cpu}


def has_java() -> bool:
    """Whether the peer can run."""
    return bool(shutil.which("java") and shutil.which("mvn"))


def peer(*arguments: str) -> Result:
    """One command of the Java peer."""
    return run_json([str(HERE / "peer"), *arguments])


def remove_and_settle(folder: Path) -> None:
    """Remove a tree; then wait, since ext4 looks for inodes around those deleted in the last five seconds."""
    if folder.exists():
        shutil.rmtree(folder)
        os.sync()
        time.sleep(SETTLE_S)


def made_store(
    path: Path, topics: int, queues: int, messages: int, body: int, *, by_us: bool = False
) -> Path:
    """A store of these sizes, made on first use."""
    sizes = ["--topics", topics, "--queues", queues, "--messages", messages, "--body", body]
    words = [str(word) for word in sizes]
    if path.exists():
        return path
    if has_java() and not by_us:
        peer("make-store", "--dir", str(path), *words)
    else:
        run_json([*TIERED, "bench", "make-store", str(path), "--seed", "1", "--json", *words])
    return path


def median(results: list[Result], field: str) -> float:
    """Median of a field."""
    return statistics.median(float(result[field]) for result in results)
