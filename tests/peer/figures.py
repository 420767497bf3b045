#!/usr/bin/env python3
"""Prints the table of figures: what a user types, what it takes, the limit of the machine, the peer, and their ratio.

    .venv/bin/python tests/peer/figures.py [--quick] [--write] [--work DIR] [--runs 3]
        [--only attach,start,linear,reads,s3,memory,status,help,live,idle]

Each row measures all its sides in turn, in the same minutes, each run in a fresh process; medians are printed. The peer is
the Java tiered store; a row without it says "not measured". Our side is whole processes, interpreter and index included,
unless the row says otherwise; the peer's begins when its store is open, and ends with its index (``indexed_seconds``).

``--quick``: stores of a fifth, one run of each side, without the 10 GiB and the broker. ``--write`` puts
the table into docs/performance.md, with date, commit and machine. Stores are kept in DIR, so that a second run is quicker.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from figures_common import (
    LARGE,
    MANY,
    MIB,
    ROOT,
    SIXTEEN,
    TIERED,
    Bench,
    Result,
    Row,
    SpeedRow,
    has_java,
    made_store,
    median,
    page_of,
    peer,
    remove_and_settle,
    run_json,
    timed,
)
from figures_reads import reads_rows
from figures_s3 import s3_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- figures: begin -->\n", "<!-- figures: end -->\n"
QUICK = ("attach", "start", "linear", "reads", "s3", "status", "help")


# -- sides -----------------------------------------------------------------------------------------


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


def attach_once(store: Path, tier: Path, *options: str) -> Result:
    """`tiered attach --once`, the whole process; ``mib_per_s`` of its wall."""
    found = timed(
        [
            *TIERED,
            "attach",
            str(store),
            "--to",
            tier.as_uri(),
            "--once",
            "--json",
            "--quiet",
            *options,
        ]
    )
    size = float(found["size_bytes"]) / MIB
    return {
        **found,
        "mib": size,
        "mib_per_s": size / found["wall"],
        "cpu_per_gib": found["cpu"] / size * 1024 if size else 0.0,
    }


def bench_dispatch(store: Path, url: str) -> Result:
    """`tiered bench dispatch`: the same without start and index."""
    return run_json(
        [*TIERED, "bench", "dispatch", "--store", str(store), "--to", url, "--json", "--quiet"]
    )


def java_dispatch(store: Path, tier: Path, *, index: bool, passes: int) -> Result:
    """The peer's; nothing where it cannot run."""
    if not has_java():
        return {}
    remove_and_settle(tier)
    result = peer("dispatch", "--store", str(store), "--tier", str(tier), "--passes", str(passes),
                  "--index", str(index).lower(), "--set", "tieredStoreGroupCommitTimeout=0")  # fmt: skip
    return {**result, "warm": (result.get("later_passes") or [result])[-1]["mib_per_s"]}


# -- rows ------------------------------------------------------------------------------------------


def attach_rows(bench: Bench) -> Iterator[Row | SpeedRow]:
    """Dispatch into a folder, with index and without, of three stores; and what the index adds."""
    goals = {
        SIXTEEN: (3.0, 4.0, 2.0, 2.5),
        MANY: (0.0, 30.0, 0.0, 8.0),
        LARGE: (0.0, 3.0, 1.8, 0.0),
    }
    for name, (with_index, cold, warm, cpu) in goals.items():
        store, tier, other = bench.store(name), bench.work / "tier", bench.work / "tier-java"

        def ours(*options: str, store: Path = store, tier: Path = tier) -> Result:
            remove_and_settle(tier)
            return attach_once(store, tier, *options)

        def plain(store: Path = store, tier: Path = tier) -> Result:
            remove_and_settle(tier)
            return bench_dispatch(store, tier.as_uri())

        def java(
            *, index: bool, store: Path = store, other: Path = other, name: str = name
        ) -> Result:
            return java_dispatch(
                store, other, index=index, passes=1 if index or name == MANY else 2
            )

        indexed, bare, mine, floor, theirs, peers = bench.alternate(
            ours, lambda ours=ours: ours("--no-index"), plain,  # type: ignore[misc]
            lambda tier=tier: bare_files(tier, bench.work / "bare"),  # type: ignore[misc]
            lambda java=java: java(index=True), lambda java=java: java(index=False),  # type: ignore[misc]
        )  # fmt: skip
        yield indexed_row(name, indexed, theirs, with_index)
        yield plain_row(name, mine, floor, peers, (cold, warm, cpu))
        if name == SIXTEEN:
            yield index_row(indexed, bare)


def indexed_row(name: str, mine: list[Result], theirs: list[Result], goal: float) -> Row:
    """The whole command against the peer until its index is made."""
    speed, cpu, wall = median(mine, "mib_per_s"), median(mine, "cpu"), median(mine, "wall")
    row = Row(f"dispatch {name}, with index", f"{speed:.0f} MiB/s, {wall:.2f} s in all, {cpu:.2f} CPU s",
              peer="not measured")  # fmt: skip
    if name == MANY:
        row = replace(row, goal="2.5 s in all", reached=wall <= 2.5)
    if not has_java():
        return row
    seconds, java_cpu = median(theirs, "indexed_seconds"), median(theirs, "indexed_cpu_seconds")
    ratio, share = speed * seconds / median(mine, "mib"), cpu / java_cpu
    row = replace(row, peer=f"{median(mine, 'mib') / seconds:.0f} MiB/s, {seconds:.2f} s",
                  ratio=f"{ratio:.1f}x, CPU {share:.2f}")  # fmt: skip
    if not goal:
        return row
    return replace(row, goal=f"{goal:g}x, CPU 0.35", reached=ratio >= goal and share <= 0.35)


def plain_row(
    name: str,
    mine: list[Result],
    floor: list[Result],
    theirs: list[Result],
    goals: tuple[float, float, float],
) -> SpeedRow:
    """Once it runs, without index on both sides."""
    speed, cpu = median(mine, "mib_per_second"), median(mine, "cpu_seconds_per_gib")
    of_copy, of_bare = (
        speed / median(mine, "copy_mib_per_second"),
        speed / median(floor, "mib_per_s"),
    )
    cold_goal, warm_goal, cpu_goal = goals
    least = {
        SIXTEEN: ("files 0.6", of_bare >= 0.6),
        MANY: ("cp 0.2", of_copy >= 0.2),
    }.get(name, ("", True))
    said = {"{:g}x": cold_goal, "warm {:g}x": warm_goal, "CPU {:g}": cpu_goal, least[0]: 0.0}
    numbers = (speed, cpu, median(mine, "peak_rss_bytes") / MIB, median(mine, "requests_per_gib"))
    row = SpeedRow(
        f"dispatch {name}",
        numbers,
        limit=f"cp {of_copy:.2f}, files {of_bare:.2f}",
        goal=", ".join(
            form.format(goal) for form, goal in said.items() if goal or form == least[0] != ""
        ),
    )
    if not has_java():
        return row
    cold, warm = median(theirs, "mib_per_s"), median(theirs, "warm")
    java_cpu = median(theirs, "cpu_seconds") / median(mine, "size_bytes") * MIB * 1024
    reached = speed / cold >= cold_goal and speed / warm >= warm_goal and least[1]
    return replace(
        row,
        peer=f"{cold:.0f}, {warm:.0f}",
        ratio=f"{speed / cold:.1f}x, {speed / warm:.1f}x",
        cpu_share=f"{cpu / java_cpu:.2f}",
        reached=reached and (not cpu_goal or cpu <= cpu_goal),
    )


def index_row(indexed: list[Result], bare: list[Result]) -> Row:
    """What the key index adds to a first copy."""
    cpu = median(indexed, "cpu") - median(bare, "cpu")
    wall = median(indexed, "wall") - median(bare, "wall")
    return Row(f"what the key index adds, {SIXTEEN}, {median(indexed, 'messages'):,.0f} messages, two keys each",
               f"{cpu:+.2f} CPU s, {wall:+.2f} s", goal="0.6 CPU s for 500,000", reached=cpu <= 0.6)  # fmt: skip


def start_rows(bench: Bench) -> Iterator[Row]:
    """`attach --once` with nothing to do (not even merging), behind a broker's crash; and what it loads."""
    store, tier = bench.store(SIXTEEN), bench.work / f"start-{bench.share:g}"
    if not tier.exists():
        attach_once(store, tier, "--merge")
    abort = store / "abort"
    was_there = abort.exists()
    abort.touch()
    try:
        (found,) = bench.alternate(lambda: attach_once(store, tier))
    finally:
        if not was_there:
            abort.unlink()
    command = [
        sys.executable,
        "-X",
        "importtime",
        "-m",
        "tiered",
        "attach",
        str(store),
        "--to",
        tier.as_uri(),
        "--once",
        "--quiet",
    ]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stderr
    lines = [
        line.removeprefix("import time:").split("|")
        for line in said.splitlines()
        if line.startswith("import time:")
    ]
    took = sum(int(self_us) for self_us, _, _ in lines if self_us.strip().isdigit()) / 1e6
    own = sum(
        name.strip().split(".")[0] in {"tiered", "backends", "fetcher", "timer"}
        for *_, name in lines
    )
    wall = median(found, "wall")
    yield Row("attach --once of an unchanged store, unclean stop",
              f"{wall:.2f} s, {median(found, 'cpu'):.2f} CPU s; imports {took:.2f} s, {own} modules of ours",
              goal="0.9 s, imports 0.3 s, 90 modules",
              reached=wall <= 0.9 and took <= 0.3 and own <= 90)  # fmt: skip


def linear_rows(bench: Bench) -> Iterator[Row]:
    """Speed by the number of queues, the messages of each being the same."""
    found: dict[int, Result] = {}
    for queues in (100, 1000, 10_000):
        store, tier = bench.work / f"linear-{queues}", bench.work / "linear-tier"
        made_store(store, queues // 100, 100, queues * 50, 256, by_us=True)

        def ours(store: Path = store, tier: Path = tier) -> Result:
            remove_and_settle(tier)
            return bench_dispatch(store, tier.as_uri())

        (results,) = bench.alternate(ours)
        found[queues] = {name: median(results, name) for name in
                         ("mib_per_second", "cpu_seconds_per_gib", "peak_rss_bytes")}  # fmt: skip
    remove_and_settle(bench.work / "linear-tier")

    def each(name: str, form: str, unit: float = 1) -> str:
        return "/".join(format(result[name] / unit, form) for result in found.values())

    share = found[10_000]["mib_per_second"] / found[1000]["mib_per_second"]
    yield Row("dispatch, 100/1,000/10,000 queues x 50 x 256 B",
              f"{each('mib_per_second', '.0f')} MiB/s, CPU {each('cpu_seconds_per_gib', '.1f')}, "
              f"{each('peak_rss_bytes', '.0f', MIB)} MiB RSS",
              limit=f"{share:.2f} of 1,000 queues", goal="0.8 of 1,000 queues", reached=share >= 0.8)  # fmt: skip


def status_rows(bench: Bench) -> Iterator[Row]:
    """Status of a tier of 1,000 queues and some thousand objects."""
    store, tier = bench.work / "s3-status", bench.work / "status-tier"
    made_store(store, 4, 250, 100_000, 1024, by_us=True)
    if not tier.exists():
        attach_once(store, tier, "--bundle-size", "24KiB")
    objects = sum(1 for path in tier.rglob("*") if path.is_file())
    (found,) = bench.alternate(lambda: timed([*TIERED, "status", tier.as_uri(), "--json"]))
    wall = median(found, "wall")
    yield Row(f"status, 1,000 queues, {objects:,} objects", f"{wall:.2f} s, {median(found, 'cpu'):.2f} CPU s",
              goal="1 s", reached=wall <= 1)  # fmt: skip


def help_rows(bench: Bench) -> Iterator[Row]:
    """Start of the program."""
    seconds = []
    for _ in range(max(bench.runs, 5)):
        begin = time.perf_counter()
        subprocess.run([*TIERED, "--help"], stdout=subprocess.DEVNULL, check=True, cwd=ROOT)
        seconds.append(time.perf_counter() - begin)
    wall = statistics.median(seconds)
    yield Row("start of the program", f"{wall:.2f} s", goal="0.3 s", reached=wall <= 0.3)


def memory_rows(bench: Bench) -> Iterator[Row]:
    """Memory of attach on a 10 GiB store of 1,000 queues, and how often it writes a byte."""
    store, tier = bench.work / "s10g", bench.work / "tier-10g"
    made_store(store, 4, 250, 9_000_000, 1024, by_us=True)
    remove_and_settle(tier)
    result = bench_dispatch(store, tier.as_uri())
    shutil.rmtree(tier, ignore_errors=True)
    # What `getrusage` says would be ours: a process inherits it.
    program = "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    bare_kib = int(subprocess.check_output([sys.executable, "-c", program]))
    above = result["peak_rss_bytes"] / MIB - bare_kib / 1024
    written = 1 + result["merged_bytes"] / result["size_bytes"]
    yield Row("attach, 10 GiB, 1,000 queues, merging included",
              f"{above:.0f} MiB above the interpreter, {result['mib_per_second']:.0f} MiB/s, "
              f"CPU {result['cpu_seconds_per_gib']:.2f}, {result['requests_per_gib']:.0f} requests/GiB, "
              f"each byte written {written:.1f} times",
              goal="300 MiB; written 4 times",
              reached=above <= 300 and written <= 4)  # fmt: skip


def broker_rows(name: str) -> Callable[[Bench], Iterator[Row]]:
    """Rows that need a real broker."""

    def rows(bench: Bench) -> Iterator[Row]:
        import figures_live

        for line in figures_live.ROWS[name](bench.work, bench.runs):
            what, ours, limit, _, ratio = (
                cell.strip() for cell in line.strip().strip("|").split("|")
            )
            yield Row(what, ours, limit=limit, ratio=ratio)

    return rows


ROWS: dict[str, Callable[[Bench], Iterator[Row | SpeedRow]]] = {
    "attach": attach_rows,
    "start": start_rows,
    "linear": linear_rows,
    "reads": reads_rows,
    "s3": s3_rows,
    "memory": memory_rows,
    "status": status_rows,
    "help": help_rows,
    "live": broker_rows("live"),
    "idle": broker_rows("idle"),
}


_ROOM_BYTES = 45 * 1024**3
"""What the stores and tiers of all rows take; they are left there for the next run."""


# -- the page --------------------------------------------------------------------------------------


def machine() -> str:
    """What it ran on."""
    model = next((line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines()
                  if line.startswith("model name")), platform.machine())  # fmt: skip
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3
    return (f"{os.cpu_count()} cores ({model}), {memory:.0f} GiB, {platform.system()} {platform.release()}, "
            f"Python {platform.python_version()}")  # fmt: skip


def said_of(bench: Bench, now: datetime) -> str:
    """The line above the table."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run(
        [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    changed = subprocess.run(
        [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False
    ).stdout
    state = " with changes" if changed.strip() else ""
    sizes = "" if bench.share == 1 else f", stores of {bench.share:g} of their size"
    runs = "one run" if bench.runs == 1 else f"medians of {bench.runs} runs"
    return f"{now:%Y-%m-%d}, commit {commit or 'unknown'}{state}; {machine()}; {runs} of each side{sizes}."


def write_page(text: str, page: Path = PAGE) -> None:
    """Put the table in the place of the last one."""
    before, _, rest = page.read_text("utf-8").partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"{page}: the marks of the table are missing")
    page.write_text(f"{before}{BEGIN}\n{text}\n\n{END}{after}", "utf-8")


def main() -> None:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "tiered-figures")
    parser.add_argument("--runs", type=int)
    parser.add_argument(
        "--share", type=float, help="of the messages of each store; 1, or 0.2 with --quick"
    )
    parser.add_argument("--only", help="groups of rows; all, or those of --quick")
    parser.add_argument(
        "--patience",
        type=float,
        help="seconds that a run waits for a quiet machine; 30, or 5 with --quick",
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    quick = arguments.quick
    patience_s = arguments.patience if arguments.patience is not None else 5.0 if quick else 30.0
    runs = arguments.runs or (1 if quick else 3)
    bench = Bench(arguments.work, runs, arguments.share or (0.2 if quick else 1.0), patience_s)
    names = arguments.only.split(",") if arguments.only else QUICK if quick else list(ROWS)
    bench.work.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(bench.work).free < bench.share * _ROOM_BYTES:
        room = f"{bench.share * _ROOM_BYTES / 1024**3:.0f} GiB"
        raise SystemExit(f"{bench.work}: less than {room} are free; make room, or say --work")
    # As for a user, who compiles a module once and not on each start.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    run_json(
        [
            *TIERED,
            "attach",
            str(bench.store(SIXTEEN)),
            "--to",
            (bench.work / "first").as_uri(),
            "--once",
            "--json",
            "--quiet",
        ]
    )
    shutil.rmtree(bench.work / "first")
    head = said_of(bench, datetime.now(UTC))
    print(head, flush=True)
    rows: list[Row | SpeedRow] = []
    for name in names:
        for row in ROWS[name](bench):
            rows.append(row)
            print(row.line(), flush=True)
    if arguments.write:
        write_page(f"{head}\n\n{page_of(rows)}")


if __name__ == "__main__":
    main()
