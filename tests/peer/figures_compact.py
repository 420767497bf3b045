"""What key compaction costs: python tests/peer/figures_compact.py DIR [--messages 1300000] [--runs 3] [--sides local,spark]

A topic of 1 KiB messages with keys is tiered and sealed in DIR once, its tier copied for each run; then planned and
applied, each side in turn in a fresh process: by the local engine (one thread) and by Spark (local[2]). CPU is that of the
whole tree of processes, JVM and workers included, as `figures_archive.py` reads it; `cold` counts from the start of the
process, `warm` leaves out starting a JVM and its first job.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from figures_archive import tree_cpu_s  # noqa: E402 (found by the path above)

MIB = 1 << 20
KEYS_SHARE = 10
"""Of so many messages one has a key of its own."""


def make(folder: Path, messages: int) -> None:
    """The tier, sealed."""
    from tiered.clock import SystemClock
    from tiered.store.embedded import MessageStore
    from tiered.store.new_message import NewMessage

    if (folder / "tier").exists():
        return
    rng, store_folder = random.Random(1), folder / "store"
    shutil.rmtree(store_folder, ignore_errors=True)
    with MessageStore.create(store_folder, cluster="c", broker="b", clock=SystemClock()) as store:
        body = rng.randbytes(MIB)
        for start in range(0, messages, 500):
            some = []
            for number in range(start, min(start + 500, messages)):
                key, at = rng.randrange(messages // KEYS_SHARE), number % (MIB - 1024)
                some.append(NewMessage("prices", key % 8, body[at : at + 1024], keys=f"key-{key}"))
            store.append_batch(some)
    command = [sys.executable, "-m", "tiered", "attach", str(store_folder), "--once", "--seal"]
    subprocess.run([*command, "--to", f"file://{folder}/made"], check=True, cwd=ROOT)
    shutil.rmtree(store_folder)
    (folder / "made").rename(folder / "tier")


def one(folder: Path, side: str) -> dict[str, float]:
    """A pass over a copy, in this process."""

    from backends.registry import open_store
    from backends.s3_settings import S3Options
    from tiered.api.broker_place import choose_place
    from tiered.clock import SystemClock
    from tiered.compaction.passes import PassSettings
    from tiered.spark.driver import SparkOrder, open_session, spark_engine
    from tiered.upkeep.compact import Compactor, CompactSettings
    from tiered.upkeep.workplace import Workplace

    def same(batches: Any) -> Any:
        yield from batches

    session: Any = None
    if side == "spark":
        conf = {"spark.driver.host": "127.0.0.1"}
        session = open_session("local[2]", conf)
        session.range(0, 2, 1, 2).mapInArrow(same, "id long").collect()
    url, began_s = f"file://{folder}/tier", tree_cpu_s()
    store = open_store(url, S3Options())
    at = Workplace(store, store, choose_place(store, None, None), SystemClock(), random.Random())
    settings = CompactSettings(passes=PassSettings(dirty_ratio=0), compression=None)
    order = SparkOrder(url, at.prefix, None, S3Options())
    engine = spark_engine(session, order) if session else None
    compactor = Compactor(at, settings, engine=engine, bundles=256 if session else 1)
    plan = compactor.plan(["prices"])
    planned_s = tree_cpu_s()
    done = compactor.apply(plan)
    ended_s = tree_cpu_s()
    found = {
        "messages": plan.messages,
        "gone": plan.gone_messages,
        "mib": plan.log_bytes / MIB,
        "bundles": done["bundles"],
        "plan": planned_s - began_s,
        "apply": ended_s - planned_s,
        "warm": ended_s - began_s,
        "cold": ended_s,
    }
    if session:
        session.stop()
    return found


def run(folder: Path, side: str) -> dict[str, float]:
    """One pass in a fresh process."""
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(folder / "tier", work / "tier")
    command = [sys.executable, __file__, str(work), "--one", side]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=ROOT, env={**os.environ})
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--messages", type=int, default=1_300_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--sides", default="local,spark")
    parser.add_argument("--one", default="")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.folder, options.one)))
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    make(options.folder, options.messages)
    results: dict[str, list[dict[str, float]]] = {}
    for _ in range(options.runs):
        for side in options.sides.split(","):
            results.setdefault(side, []).append(run(options.folder, side))
    for side, rows in results.items():
        middle = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        print(side, json.dumps({name: round(value, 2) for name, value in middle.items()}))


if __name__ == "__main__":
    main()
