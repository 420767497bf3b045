"""``tiered bench``: measures this machine against plain copying; without a command, all of it in one go."""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from backends.lazy_dataclass import dataclass, picked
from tiered.cli import kinds
from tiered.cli.frame import group
from tiered.cli.options import argument, maybe, option, required, taken
from tiered.cli.output import show
from tiered.cli.signals import at_end
from tiered.errors import InternalError

if TYPE_CHECKING:
    from tiered.bench.read import ReadBench
    from tiered.cli.call import Call

_MIB = 1024 * 1024
PATTERNS = kinds.one_of("PATTERN", "sequential", "groups", "seeks", "stops", "keys", "times")
COLUMNS = [
    "what",
    "messages",
    "size_bytes",
    "seconds",
    "mib_per_second",
    "messages_per_second",
    "cpu_seconds_per_gib",
    "peak_rss_bytes",
    "requests_per_gib",
    "copy_mib_per_second",
    "ratio_to_copy",
]


def run_all(call: Call) -> int:
    """Make a store, tier it and read it back, each in a process of its own."""
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="tiered-bench-") as folder:
        store, tier = f"{folder}/store", f"file://{folder}/tier"
        call.say(f"tiered: making {call.chosen['bench.make-store.messages'].value:,} messages")
        _measure(call, "make-store", store)
        for name, arguments in (("dispatch", ("--store", store, "--to", tier)), ("read", (tier,))):
            call.say(f"tiered: measuring {name}")
            results.append(_measure(call, name, *arguments))
    show_measured(call, results)
    return 0


def _measure(call: Call, *arguments: str) -> dict[str, Any]:
    """Run one of the commands in a fresh process with the same settings of the store."""
    import subprocess

    if arguments[0] == "make-store":
        names = ("messages", "body", "queues", "topics", "seed", "file-size")
        values = [call.chosen[f"bench.make-store.{name}"].value for name in names]
        pairs = zip(names, values, strict=True)
        arguments = (*arguments, *(f"--{name}={value}" for name, value in pairs))
    command = [sys.executable, "-m", "tiered", "bench", *arguments, "--json", "--quiet"]
    pipe = subprocess.PIPE
    with (
        subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as child,  # noqa: S603 (ourselves)
        at_end(child.kill),
    ):
        out, err = child.communicate()
    if child.returncode:
        raise InternalError(f"bench {arguments[0]} failed: {err.strip()}")
    document: dict[str, Any] = json.loads(out)
    return document


def show_measured(call: Call, results: list[dict[str, Any]]) -> None:
    """Print measurements; one alone is the document itself."""
    document = results[0] if len(results) == 1 else {"format": 1, "results": results}
    columns = COLUMNS if len(results[0]) > len(COLUMNS) else list(results[0])
    show(call, document, rows=results, columns=columns)


BENCH = group(
    "bench",
    "Measures this machine against plain copying.",
    examples=[
        "tiered bench",
        "tiered bench dispatch --store /tmp/store --to file:///tmp/tier --json",
    ],
    run=run_all,
)


@dataclass(frozen=True, kw_only=True)
class MakeStoreOptions:
    """What ``tiered bench make-store`` can be told."""

    directory: str = argument("directory to make", metavar="DIR")
    messages: int = option("messages in all", kinds.COUNT, default=200_000)
    body_bytes: int = option("bytes of each body", kinds.SIZE, default=1024)
    queues: int = option("queues of each topic", kinds.COUNT, default=16)
    topics: int = option("topics", kinds.COUNT, default=1)
    file_size_bytes: int = option("bytes of each commit-log file", kinds.SIZE, default=64 * _MIB)
    seed: int = option("of the bodies", kinds.NUMBER, default=1)


@BENCH.has("make-store", MakeStoreOptions)
def make_store_of(call: Call, options: MakeStoreOptions) -> int:
    """Makes a local store of messages to measure with.

    Examples:
        tiered bench make-store /tmp/store
        tiered bench make-store /tmp/small --messages 1000 --body 64KiB --queues 4 --json
    """
    from tiered.store.bulk import make_store

    directory = options.directory
    made = make_store(
        directory,
        **picked(options, "topics", "queues", "messages", "body_bytes", "seed"),
        commitlog_file_bytes=options.file_size_bytes,
        clock=call.clock,
    )
    document = {
        "format": 1,
        "store": directory,
        "size_bytes": made.record_bytes,
        **picked(made, "messages", "topics", "queues"),
    }
    show_measured(call, [document])
    return 0


EMBEDDED_COLUMNS = ["what", "value", "unit", "plain", "ratio", "cpu_us_per_message", "plain_cpu_us_per_message"]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EmbeddedOptions:
    """What ``tiered bench store`` can be told."""

    directory: str | None = maybe(
        "folder [default: a temporary one]",
        click.Path(file_okay=False),
        metavar="[DIR]",
    )
    messages: int = option("messages to append and recover", kinds.COUNT, default=300_000)
    body_bytes: int = option("bytes of each body", kinds.SIZE, default=1024)
    threads: int = option("threads that append under sync", kinds.COUNT, default=32)
    seconds: float = option(
        "how long to measure sync and visibility", kinds.DURATION_S_FROM_0, default=5.0
    )
    rate: int = option("messages a second while measuring visibility", kinds.COUNT, default=20_000)


@BENCH.has("store", EmbeddedOptions)
def measure_store(call: Call, options: EmbeddedOptions) -> int:
    """Measures the embedded store, beside plain writes and reads.

    Examples:
        tiered bench store
        tiered bench store /data --messages 4000000 --json
    """
    from tiered.bench.dispatch import StoreBench, bench_store

    bench = taken(StoreBench, options)
    where = options.directory
    if where is not None:
        Path(where).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tiered-bench-", dir=where) as folder:
        rows = bench_store(Path(folder), bench, call.clock, random.Random(1))  # noqa: S311 (content)
    show(call, {"format": 1, "results": rows}, rows=rows, columns=EMBEDDED_COLUMNS)
    return 0


@dataclass(frozen=True, kw_only=True)
class DispatchOptions:
    """What ``tiered bench dispatch`` can be told."""

    store: str = required("store directory to tier", kinds.DIR)
    to: str = required("empty place for the tier", kinds.URL)


@BENCH.has("dispatch", DispatchOptions)
def measure_dispatch(call: Call, options: DispatchOptions) -> int:
    """Measures how fast a store is tiered, beside cp and fsync.

    Examples:
        tiered bench dispatch --store /tmp/store --to file:///tmp/tier
        tiered bench dispatch --store /tmp/store --to s3://bucket/bench --json
    """
    from tiered.attach.writer import AttachSettings
    from tiered.bench.dispatch import bench_dispatch
    from tiered.cli.serve import bound_malloc

    bound_malloc()
    settings = AttachSettings(cluster=call.common.cluster, broker=call.common.broker)
    measured = bench_dispatch(
        options.store, options.to, settings=settings, options=call.s3_options(), clock=call.clock
    )
    show_measured(call, [measured.document()])
    return 0


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """What ``tiered bench read`` can be told."""

    url: str = argument()
    topic: str | None = option("only this topic", kinds.Kind("TOPIC", str))
    queue: int | None = option("only this queue", kinds.NUMBER)
    queues: int | None = option("only the first queues", kinds.COUNT)
    pattern: str = option("what readers do", PATTERNS, default="sequential")
    groups: int = option("readers (sequential, groups)", kinds.COUNT, default=1)
    threads: int = option("threads that read (sequential, seeks)", kinds.COUNT, default=1)
    count: int = option("messages in a client's request", kinds.COUNT, default=32)
    reads: int = option("reads (seeks, stops, keys, times)", kinds.COUNT, default=200)
    seconds: float = option("how long to read (groups)", kinds.DURATION_S_FROM_0, default=5.0)
    memory_bytes: int = option(
        "memory for cache, read-ahead and requests", kinds.SIZE, default=256 * _MIB
    )
    requests: int = option("parallel requests, on both sides", kinds.COUNT, default=16)
    latency_ms: float = option("milliseconds added to each request", kinds.AMOUNT, default=0.0)
    bandwidth: float = option("MiB/s of each request; 0: unlimited", kinds.AMOUNT, default=0.0)
    stall_percent: float = option(
        "percentage of requests that stall, not of plain GETs",
        kinds.AMOUNT,
        default=0.0,
    )
    stall_ms: float = option("milliseconds of a stall", kinds.AMOUNT, default=1000.0)
    seed: int = option("random seed", kinds.NUMBER, default=1)


@BENCH.has("read", ReadOptions)
def measure_read(call: Call, options: ReadOptions) -> int:
    """Measures how fast a tier is read, beside plain ranged GETs.

    Examples:
        tiered bench read file:///tmp/tier --latency-ms 20 --threads 4 --json
        tiered bench read s3://bucket/bench --pattern seeks --topic bench-0 --reads 1000
    """
    from tiered.bench.read import bench_read
    from tiered.cli.cat import check_queues
    from tiered.cli.serve import bound_malloc

    bound_malloc()
    bench = read_bench(options)
    topic, number = options.topic, options.queue
    tier = call.tier(options.url)
    if topic is not None:
        check_queues([tier], topic, number)
    queues = [queue for queue in tier.queues(topic) if number in {None, queue.queue_id}]
    measured = bench_read(tier, queues, bench, call.clock)
    show_measured(call, [measured.document()])
    return 0


def read_bench(options: ReadOptions) -> ReadBench:
    """What the options say."""
    from tiered.bench.read import ReadBench, ReadLoad, Slowness

    slowness = taken(Slowness, options, mib_per_s=options.bandwidth or None)
    return taken(ReadBench, options, load=taken(ReadLoad, options), slowness=slowness)
