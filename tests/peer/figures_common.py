"""What all rows of the table of figures need: stores, commands, medians, and the patience to wait for a quiet machine."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TIERED = [sys.executable, "-m", "tiered"]
MIB = 1024 * 1024
STORES = {
    "1 x 1, 200k x 1 KiB": (1, 1, 200_000, 1024),
    "1 x 16, 500k x 1 KiB": (1, 16, 500_000, 1024),
    "4 x 250, 200k x 256 B": (4, 250, 200_000, 256),
    "1 x 8, 8k x 64 KiB": (1, 8, 8_000, 65_536),
}
DISPATCHED = list(STORES)[1:]
Result = dict[str, Any]
SETTLE_S = 6.0


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
    while busy_cores() > 0.3 and time.monotonic() < deadline:
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


def store_of(work: Path, name: str) -> Path:
    """The store of a case, made on first use: by the peer where Java is there, so that both read the same one."""
    path = work / f"s{list(STORES).index(name) + 1}"
    if not path.exists():
        topics, queues, messages, body = STORES[name]
        sizes = [
            "--topics",
            str(topics),
            "--queues",
            str(queues),
            "--messages",
            str(messages),
            "--body",
            str(body),
        ]
        if has_java():
            peer("make-store", "--dir", str(path), *sizes)
        else:
            run_json([*TIERED, "bench", "make-store", str(path), "--seed", "1", "--json", *sizes])
    return path


def median(results: list[Result], field: str) -> float:
    """Median of a field."""
    return statistics.median(float(result[field]) for result in results)


def alternate(runs: int, *sides: Callable[[], Result]) -> list[list[Result]]:
    """Run each side in turn, ``runs`` times."""
    results: list[list[Result]] = [[] for _ in sides]
    for _ in range(runs):
        for row, side in zip(results, sides, strict=True):
            wait_for_quiet()
            row.append(side())
    return results
