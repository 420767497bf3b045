#!/usr/bin/env python3
"""Prints the table of figures: ours, the Java tiered store's, the limit of the machine, and their ratios.

    .venv/bin/python tests/peer/figures.py [--work DIR] [--runs 3]
        [--only dispatch,read,reads,s3,status,help,memory,linear,live,idle]

Each row measures both sides in turn, in the same minutes, each run in a fresh process; medians are printed. A row without
Java says "not measured". Stores are made once and kept in DIR, so that a second run is quicker.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from figures_common import (
    DISPATCHED,
    MIB,
    ROOT,
    STORES,
    TIERED,
    Result,
    alternate,
    has_java,
    median,
    peer,
    remove_and_settle,
    run_json,
    store_of,
)
from figures_reads import reads_rows
from figures_s3 import s3_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def bare_files(source: Path, target: Path, threads: int = 8) -> Result:
    """Write and fsync the files of a tier again, with nothing around it."""
    files = [(p.relative_to(source), p.read_bytes()) for p in source.rglob("*") if p.is_file()]
    remove_and_settle(target)
    target.mkdir(parents=True)

    def write(item: tuple[Path, bytes]) -> None:
        path = target / item[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb", buffering=0) as file:
            file.write(item[1])
            os.fsync(file.fileno())

    begin, cpu = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(write, files))
    seconds = time.perf_counter() - begin
    size = sum(len(data) for _, data in files)
    return {"seconds": seconds, "mib_per_s": size / MIB / seconds, "cpu": time.process_time() - cpu}


def dispatch_rows(work: Path, runs: int) -> Iterator[str]:
    """Dispatch into a folder."""
    for name in DISPATCHED:
        store, tier, other = store_of(work, name), work / "tier", work / "tier-java"

        def ours(store: Path = store, tier: Path = tier) -> Result:
            remove_and_settle(tier)
            return run_json(
                [
                    *TIERED,
                    "bench",
                    "dispatch",
                    "--store",
                    str(store),
                    "--to",
                    tier.as_uri(),
                    "--json",
                ]
            )

        def bare(tier: Path = tier) -> Result:
            return bare_files(tier, work / "bare")

        def java(store: Path = store, other: Path = other, name: str = name) -> Result:
            if not has_java():
                return {"mib_per_s": 0, "cpu_seconds": 0}
            remove_and_settle(other)
            passes = "1" if "250" in name else "2"
            result = peer("dispatch", "--store", str(store), "--tier", str(other), "--passes", passes,
                          "--set", "tieredStoreGroupCommitTimeout=0")  # fmt: skip
            later = result.get("later_passes") or [result]
            return {**result, "warm": later[-1]["mib_per_s"]}

        mine, floor, theirs = alternate(runs, ours, bare, java)
        speed, cpu = median(mine, "mib_per_second"), median(mine, "cpu_seconds_per_gib")
        line = (f"| dispatch {name}, folder | {speed:.0f} MiB/s, {cpu:.2f} CPU s/GiB, "
                f"{median(mine, 'peak_rss_bytes') / MIB:.0f} MiB RSS, {median(mine, 'requests_per_gib'):.0f} requests/GiB "
                f"| {speed / median(mine, 'copy_mib_per_second'):.2f} of cp + fsync "
                f"({median(mine, 'copy_mib_per_second'):.0f}), "
                f"{speed / median(floor, 'mib_per_s'):.2f} of bare files ({median(floor, 'mib_per_s'):.0f}) ")  # fmt: skip
        if has_java():
            cold, warm = median(theirs, "mib_per_s"), median(theirs, "warm")
            mib = median(mine, "size_bytes") / MIB
            java_cpu = median(theirs, "cpu_seconds") / mib * 1024
            line += (f"| {cold:.0f} (warm {warm:.0f}) MiB/s, {java_cpu:.1f} CPU s/GiB "
                     f"| {speed / cold:.1f} x (warm {speed / warm:.1f} x), CPU {cpu / java_cpu:.2f} |")  # fmt: skip
        else:
            line += "| not measured | |"
        yield line


def read_rows(work: Path, runs: int) -> Iterator[str]:
    """Sequential read back of one queue."""
    name = next(iter(STORES))
    store, tier, other = store_of(work, name), work / "read-tier", work / "read-tier-java"
    if not tier.exists():
        run_json([*TIERED, "attach", str(store), "--to", tier.as_uri(), "--once", "--json"])
    if has_java() and not other.exists():
        peer("dispatch", "--store", str(store), "--tier", str(other), "--metadata", "lazy",
             "--set", "tieredStoreGroupCommitTimeout=0")  # fmt: skip

    def ours() -> Result:
        return run_json([*TIERED, "bench", "read", tier.as_uri(), "--json"])

    def java() -> Result:
        if not has_java():
            return {"mib_per_s": 0}
        result = peer("read", "--store", str(store), "--tier", str(other), "--passes", "2")
        return {**result, "warm": result["later_passes"][-1]["mib_per_s"]}

    mine, theirs = alternate(runs, ours, java)
    speed = median(mine, "mib_per_second")
    line = (f"| read back {name}, bytes checked | {speed:.0f} MiB/s, {median(mine, 'cpu_seconds_per_gib'):.2f} CPU s/GiB "
            f"| {median(mine, 'copy_mib_per_second'):.0f} (plain GETs) ")  # fmt: skip
    if has_java():
        cold, warm = median(theirs, "mib_per_s"), median(theirs, "warm")
        line += f"| {cold:.0f} (warm {warm:.0f}) MiB/s | {speed / cold:.1f} x (warm {speed / warm:.1f} x) |"
    else:
        line += "| not measured | |"
    yield line


def status_rows(work: Path, runs: int) -> Iterator[str]:
    """Status of a tier of 1,000 queues and 10,000 objects."""
    store, tier = work / "s3-status", work / "status-tier"
    if not tier.exists():
        run_json([*TIERED, "bench", "make-store", str(store), "--topics", "4", "--queues", "250", "--messages", "100000",
                  "--body", "1024", "--seed", "1", "--json"])  # fmt: skip
        run_json(
            [
                *TIERED,
                "attach",
                str(store),
                "--to",
                tier.as_uri(),
                "--once",
                "--json",
                "--bundle-size",
                "24KiB",
            ]
        )
    objects = sum(1 for path in tier.rglob("*") if path.is_file())
    seconds = []
    document: Result = {}
    for _ in range(runs):
        begin = time.perf_counter()
        document = run_json([*TIERED, "status", tier.as_uri(), "--json"])
        seconds.append(time.perf_counter() - begin)
    requests = document.get("requests", "not told")
    yield f"| status, 1,000 queues, {objects:,} objects | {statistics.median(seconds):.2f} s, {requests} requests | | | |"


def help_rows(_work: Path, runs: int) -> Iterator[str]:
    """Start of the program."""
    seconds = []
    for _ in range(max(runs, 5)):
        begin = time.perf_counter()
        subprocess.run([*TIERED, "--help"], stdout=subprocess.DEVNULL, check=True, cwd=ROOT)
        seconds.append(time.perf_counter() - begin)
    yield f"| `tiered --help` | {statistics.median(seconds):.2f} s | | | |"


def memory_rows(work: Path, _runs: int) -> Iterator[str]:
    """Memory of attach on a 10 GiB store of 1,000 queues."""
    store, tier = work / "s10g", work / "tier-10g"
    if not store.exists():
        run_json([*TIERED, "bench", "make-store", str(store), "--topics", "4", "--queues", "250",
                  "--messages", "9000000", "--body", "1024", "--seed", "1", "--json"])  # fmt: skip
    shutil.rmtree(tier, ignore_errors=True)
    result = run_json(
        [*TIERED, "bench", "dispatch", "--store", str(store), "--to", tier.as_uri(), "--json"]
    )
    shutil.rmtree(tier, ignore_errors=True)
    program = "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    bare_kib = int(subprocess.check_output([sys.executable, "-c", program]))
    above = result["peak_rss_bytes"] / MIB - bare_kib / 1024
    yield (f"| attach, 10 GiB, 1,000 queues | {above:.0f} MiB above the interpreter, "
           f"{result['mib_per_second']:.0f} MiB/s, "
           f"{result['cpu_seconds_per_gib']:.2f} CPU s/GiB, "
           f"{result['requests_per_gib']:.0f} requests/GiB | | | |")  # fmt: skip


def linear_rows(work: Path, _runs: int) -> Iterator[str]:
    """Time by the number of queues, the messages of each being the same."""
    for topics in (1, 10, 100):
        queues = topics * 100
        store, tier = work / f"linear-{queues}", work / "linear-tier"
        if not store.exists():
            run_json([*TIERED, "bench", "make-store", str(store), "--topics", str(topics), "--queues", "100",
                      "--messages", str(queues * 50), "--body", "256", "--seed", "1", "--json"])  # fmt: skip
        remove_and_settle(tier)
        result = run_json(
            [*TIERED, "bench", "dispatch", "--store", str(store), "--to", tier.as_uri(), "--json"]
        )
        bare = bare_files(tier, work / "bare")
        yield (f"| dispatch, {queues:,} queues x 50 x 256 B | {result['seconds']:.2f} s, "
               f"{1000 * result['seconds'] / queues:.2f} ms a queue, {1000 * result['cpu_seconds'] / queues:.2f} CPU ms "
               f"a queue, {result['peak_rss_bytes'] / MIB:.0f} MiB RSS "
               f"| {1000 * bare['seconds'] / queues:.2f} ms, {1000 * bare['cpu'] / queues:.2f} CPU ms a queue (bare files) "
               f"| | {bare['seconds'] / result['seconds']:.2f} of bare |")  # fmt: skip
    remove_and_settle(tier)


def broker_rows(name: str) -> Callable[[Path, int], Iterator[str]]:
    """Rows that need a real broker."""

    def rows(work: Path, runs: int) -> Iterator[str]:
        import figures_live

        yield from figures_live.ROWS[name](work, runs)

    return rows


ROWS: dict[str, Callable[[Path, int], Iterator[str]]] = {
    "dispatch": dispatch_rows,
    "read": read_rows,
    "reads": reads_rows,
    "s3": s3_rows,
    "status": status_rows,
    "help": help_rows,
    "memory": memory_rows,
    "linear": linear_rows,
    "live": broker_rows("live"),
    "idle": broker_rows("idle"),
}


def main() -> None:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "tiered-figures")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default="dispatch,read,s3,status,help")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    print(
        "| what | ours | limit, same minutes | Java tiered store | ratio |\n|---|---|---|---|---|",
        flush=True,
    )
    for name in arguments.only.split(","):
        for line in ROWS[name](arguments.work, arguments.runs):
            print(line, flush=True)


if __name__ == "__main__":
    main()
