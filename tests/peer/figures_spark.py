"""What Spark's reading of an archive costs: python tests/peer/figures_spark.py DIR [--rows 10000000] [--runs 5]

An archive of one topic is made in DIR when it is not there. Then one warm session reads it in turn by ``tiered.spark`` and
by ``spark.read.parquet`` of the same directory: one column of all rows, and a count by tag; and once by
``format("tieredmq")``, which decodes in Python. CPU is that of the whole tree of processes, JVM and workers included; that
of ours begins with making the frame.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "peer")]
if TYPE_CHECKING:
    from collections.abc import Callable

FILE_ROWS = 250_000
GOALS = {"select(queue_offset)": 1.1, "count by tag": 1.2}


def make(folder: Path, rows: int) -> str:
    """The archive's URL."""
    from support.archives_made import make_archive

    from backends.registry import open_store
    from backends.s3_settings import S3Options

    url, done = (folder / "parquet").as_uri(), folder / f"made-{rows}"
    if not done.exists():
        files, each = max(rows // FILE_ROWS, 1), min(rows, FILE_ROWS)
        store = open_store(url, S3Options())
        make_archive(store, files=files, rows=each, rng=random.Random(1), group_rows=32_768)
        store.close()
        done.touch()
    return url


def offsets(frame: Any) -> None:
    """One column of every row, to nobody."""
    frame.select("queue_offset").write.format("noop").mode("overwrite").save()


def tags(frame: Any) -> None:
    """Rows of each tag."""
    assert frame.groupBy("tag").count().collect()


ASKED: dict[str, Callable[[Any], None]] = {"select(queue_offset)": offsets, "count by tag": tags}


def measured(work: Callable[[], None]) -> tuple[float, float]:
    """CPU seconds and seconds."""
    from figures_archive import tree_cpu_s

    cpu, begun = tree_cpu_s(), time.perf_counter()
    work()
    return tree_cpu_s() - cpu, time.perf_counter() - begun


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    url = make(folder, arguments.rows)
    from figures_archive import session

    from tiered.spark import archive, register

    spark = session("figures_spark")

    register(spark)
    sides: dict[str, Callable[[], Any]] = {
        "ours": lambda: archive(spark, url, "orders"),
        "plain": lambda: spark.read.parquet(url),
    }
    print("| what | side | CPU s | s | ours : plain | goal |\n|---|---|---|---|---|---|")
    for what, ask in ASKED.items():
        found: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
        for run in range(arguments.runs + 1):
            for side, made in sides.items():
                taken = measured(lambda made=made, ask=ask: ask(made()))  # type: ignore[misc]
                found[side] += [taken] if run else []  # the first warms up
        column = "queue_offset long" if ask is offsets else "tag string"
        source = spark.read.format("tieredmq").schema(column)
        found["tieredmq"] = [measured(lambda source=source, ask=ask: ask(source.load(url)))]  # type: ignore[misc]
        ratio = statistics.median(
            ours / plain
            for (ours, _), (plain, _) in zip(found["ours"], found["plain"], strict=True)
        )
        for side, taken_all in found.items():
            cpu, seconds = (statistics.median(column) for column in zip(*taken_all, strict=True))
            said = f"{ratio:.2f} | ≤ {GOALS[what]}" if side == "ours" else " | "
            print(f"| {what} | {side} | {cpu:.2f} | {seconds:.2f} | {said} |", flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
