"""What archiving costs: python tests/peer/figures_archive.py DIR [--messages 400000] [--runs 3] [--sides local,spark,plain]

The same messages become Parquet in turn, each time in a fresh process: by the local engine with one thread, by the Spark
engine, and by what one writes without this program: `binaryFile` over the store's commit log, a UDF that parses it, and
`df.write.parquet`. The store and its sealed tier are made in DIR when they are not there. With bodies as columns beside:
`local:json`, `local:text`, `local:records`. For the size of the files: `rewritten` is an archive's rows, every column, by
Spark's writer as it is, `rewritten:zstd` with that packer.

CPU is that of the whole tree of processes, JVM and workers included, read from /proc. `cold` counts from the start of the
process; `warm` leaves out starting: the JVM, a first job with a worker, the imports.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "-1")  # as the command sets it
MIB = 1 << 20
ROOT = Path(__file__).parents[2]
TICKS = os.sysconf("SC_CLK_TCK")
MEMORY = "4g"
RECORD_BYTES = 1232
"""Of a message of ``bench make-store`` in the commit log."""
PLAIN_ROW = (
    "array<struct<topic string, queue_id int, queue_offset long, sys_flag int, flag int, body_crc long,"
    " reconsume_times int, prepared_tx_offset long, born_ts long, store_ts long, born_host string,"
    " store_host string, physical_offset long, properties map<string,string>, body binary>>"
)


def tree_cpu_s() -> float:
    """CPU seconds of this process, of those below it, and of those that they have waited for."""
    stats = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text("latin-1").rpartition(")")[2].split()
            except OSError:
                continue
            stats[int(folder.name)] = int(fields[1]), sum(map(int, fields[11:15])) / TICKS
    mine = {os.getpid()}
    while more := {pid for pid, (parent, _) in stats.items() if parent in mine} - mine:
        mine |= more
    return sum(stats[pid][1] for pid in mine if pid in stats)


def parse_frames(content: bytes) -> list[tuple[Any, ...]]:
    """Each message of a file of a commit log, as one writes it with the format's description at hand."""
    found, at = [], 0
    while at + 8 <= len(content):
        size, magic = struct.unpack_from(">ii", content, at)
        if magic & 0xFFFFFFFF != 0xDAA320A7 or size <= 0:
            break
        crc, queue_id, flag, offset, physical, sys_flag, born = struct.unpack_from(
            ">IiiqqiQ", content, at + 8
        )
        (store,) = struct.unpack_from(">q", content, at + 56)
        again, prepared, body_size = struct.unpack_from(">iqi", content, at + 72)
        born_host, store_host = content[at + 48 : at + 56], content[at + 64 : at + 72]
        body = at + 88
        topic = body + body_size + 1
        end = topic + content[topic - 1]
        (length,) = struct.unpack_from(">h", content, end)
        pairs = content[end + 2 : end + 2 + length].decode().split("\x02")
        properties = dict(pair.split("\x01", 1) for pair in pairs if pair)
        found.append(
            (
                *(content[topic:end].decode(), queue_id, offset, sys_flag, flag, crc, again),
                *(prepared, born, store, host(born_host), host(store_host), physical),
                *(properties, content[body : body + body_size]),
            )
        )
        at += size
    return found


def host(raw: bytes) -> str:
    """``address:port``."""
    return f"{raw[0]}.{raw[1]}.{raw[2]}.{raw[3]}:{int.from_bytes(raw[4:], 'big')}"


def session(name: str) -> Any:
    """A warm session: a worker has run. For our engine as the command opens it, else as one does without this program."""
    from pyspark.sql import SparkSession

    from tiered.spark.driver import open_session

    os.environ["PYTHONPATH"] = f"{ROOT}:{ROOT}/tests/peer"
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if name == "ours":
        spark = open_session("local[2]", {"spark.driver.memory": MEMORY}, is_lean=True)
    else:
        builder = SparkSession.builder.master("local[2]").appName(name)
        spark = builder.config("spark.driver.memory", MEMORY).getOrCreate()
    spark.range(2).mapInArrow(warm_worker, "id long").collect()
    return spark


def warm_worker(batches: Any) -> Any:
    """Imports what work needs."""
    import pyarrow as pa

    pa.array(["x"]).to_numpy(zero_copy_only=False)
    yield from batches


def plain(folder: Path, out: Path) -> dict[str, float]:
    """Without this program."""
    from pyspark.sql import functions

    spark = session("plain")
    begun = tree_cpu_s()
    frames = functions.udf(parse_frames, PLAIN_ROW)
    files = spark.read.format("binaryFile").load(str(folder / "store" / "commitlog"))
    rows = files.select(functions.explode(frames("content")).alias("m")).select("m.*")
    for name in ("born_ts", "store_ts"):
        rows = rows.withColumn(name, functions.timestamp_millis(name))
    rows.write.option("compression", "zstd").parquet(str(out))
    done = tree_cpu_s()
    found = spark.read.parquet(str(out)).count()
    spark.stop()
    return {"warm": done - begun, "cold": done, "rows": found}


def ours(folder: Path, out: Path, kind: str) -> dict[str, float]:
    """By a job of the program."""
    import random
    import threading

    import pyarrow as pa

    from backends.s3_settings import S3Options
    from tiered.api.broker_place import choose_place
    from tiered.api.stores import open_metered, with_retries
    from tiered.archive.body_formats import read_wishes
    from tiered.archive.job import run_job
    from tiered.archive.task import JobContext
    from tiered.clock import SystemClock
    from tiered.spark.driver import SparkOrder, spark_engine
    from tiered.upkeep.engine import local_engine

    engine, _, more = kind.partition(":")
    tier_url, url = (folder / "tier").as_uri(), out.as_uri()
    clock, rng, stop = SystemClock(), random.SystemRandom(), threading.Event()
    bare = open_metered(url, S3Options())
    archive = with_retries(bare, clock, rng, stop)
    tier = with_retries(open_metered(tier_url, S3Options()), clock, rng, stop)
    place = choose_place(tier, None, None)
    formats = [more] if more in {"json", "text"} else []
    has_records = more == "records"
    wishes = read_wishes(formats, [], [], has_records=has_records, read=lambda _name: b"")
    at = JobContext(tier, place, archive, bare, clock, rng, wishes=wishes)
    pa.set_cpu_count(1)
    pa.array(["x"]).to_numpy(zero_copy_only=False)
    if engine == "local":
        work, spark = local_engine(at.context, 1), None
    else:
        spark = session("ours")
        work = spark_engine(spark, SparkOrder(tier_url, place.prefix, url, S3Options()))
    begun = tree_cpu_s()
    result = run_job(at, work)
    done = tree_cpu_s()
    if result.failed or result.misfits:
        raise SystemExit(f"{result.failed}, {result.misfits} misfits")
    if spark is not None:
        spark.stop()
    return {"warm": done - begun, "cold": done, "rows": result.rows}


def rewritten(folder: Path, out: Path, codec: str) -> dict[str, float]:
    """The rows of an archive, every column, as Spark's own writer has them: for the size."""
    made = folder / "made"
    shutil.rmtree(made, ignore_errors=True)
    ours(folder, made, "local")
    spark = session("rewritten")
    rows = spark.read.parquet(str(made)).drop("topic_dir", "date").coalesce(1)
    begun = tree_cpu_s()
    (rows.write.option("compression", codec) if codec else rows.write).parquet(str(out))
    done = tree_cpu_s()
    found = spark.read.parquet(str(out)).count()
    spark.stop()
    shutil.rmtree(made)
    return {"warm": done - begun, "cold": done, "rows": found}


def make(folder: Path, messages: int) -> None:
    """Store and sealed tier."""
    store, tier = folder / "store", folder / "tier"
    tiered = [sys.executable, "-m", "tiered"]
    if not store.exists():
        sizes = ["--messages", str(messages), "--queues", "4"]
        subprocess.run(
            [*tiered, "bench", "make-store", str(store), *sizes, "--quiet"], cwd=ROOT, check=True
        )
    if not tier.exists():
        attach = ["attach", str(store), "--to", tier.as_uri(), "--once", "--seal", "--quiet"]
        subprocess.run([*tiered, *attach], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def one(folder: Path, kind: str) -> dict[str, float]:
    """One run; in this process."""
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    begun = time.perf_counter()
    name, _, more = kind.partition(":")
    if name == "rewritten":
        found = rewritten(folder, out, more)
    else:
        found = plain(folder, out) if kind == "plain" else ours(folder, out, kind)
    size = sum(file.stat().st_size for file in out.rglob("*.parquet"))
    return {**found, "seconds": time.perf_counter() - begun, "size_bytes": size}


def run(folder: Path, kind: str) -> dict[str, float]:
    """One run in a fresh process."""
    command = [sys.executable, __file__, str(folder), "--one", kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--messages", type=int, default=400_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--sides", default="local,spark,plain")
    parser.add_argument("--one")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if arguments.one:
        print(json.dumps(one(folder, arguments.one)))
        return
    folder.mkdir(parents=True, exist_ok=True)
    make(folder, arguments.messages)
    sides = arguments.sides.split(",")
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for _ in range(arguments.runs):
        for side in sides:
            found[side].append(run(folder, side))
    source = arguments.messages * RECORD_BYTES / MIB
    print(f"{source:.0f} MiB of commit log, medians of {arguments.runs}")
    print("| side | rows | MiB a CPU second, warm | CPU s warm | CPU s cold | Parquet MiB | s |")
    print("|---|---|---|---|---|---|---|")
    for side, rows in found.items():
        mid = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        print(
            f"| {side} | {mid['rows']:,.0f} | {source / mid['warm']:.0f} | {mid['warm']:.1f} | {mid['cold']:.1f}"
            f" | {mid['size_bytes'] / MIB:.0f} | {mid['seconds']:.0f} |",
            flush=True,
        )
    shutil.rmtree(folder / "out", ignore_errors=True)


if __name__ == "__main__":
    main()
