"""``tiered bench``: measures this machine against plain copying; without a command, all of it in one go."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tiered.cli.frame import make_command, make_program
from tiered.cli.options import OneOf, argument, maybe, option, required
from tiered.cli.output import Output
from tiered.cli.signals import at_end
from tiered.cli.values import not_below_zero, parse_size, seconds_not_below_zero, whole
from tiered.errors import InternalError

if TYPE_CHECKING:
    from tiered.bench.read import ReadBench
    from tiered.cli.call import Call

_MIB = 1024 * 1024
PATTERNS = OneOf("sequential", "groups", "seeks", "stops", "keys", "times")
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
    show(call, results)
    return 0


def _measure(call: Call, *arguments: str) -> dict[str, Any]:
    """Run one of the commands in a fresh process with the same settings of the store."""
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


def show(call: Call, results: list[dict[str, Any]]) -> None:
    """Print measurements; one alone is the document itself."""
    output = Output(call)
    document = results[0] if len(results) == 1 else {"format": 1, "results": results}
    output.emit(document, results, COLUMNS if len(results[0]) > len(COLUMNS) else list(results[0]))


COMMAND = make_program(
    "bench",
    examples=[
        "tiered bench",
        "tiered bench dispatch --store /tmp/store --to file:///tmp/tier --json",
    ],
    run=run_all,
)


@dataclass(frozen=True, kw_only=True)
class MakeStoreOptions:
    """What ``tiered bench make-store`` can be told."""

    directory: str = argument(metavar="DIR")
    messages: int = option("messages in all", "N", whole(1), default=200_000)
    body_bytes: int = option("bytes of each body", "SIZE", parse_size, default=1024)
    queues: int = option("queues of each topic", "N", whole(1), default=16)
    topics: int = option("topics", "N", whole(1), default=1)
    file_size_bytes: int = option(
        "bytes of each file of the commit log", "SIZE", parse_size, default=64 * _MIB
    )
    seed: int = option("of the bodies", "N", whole(0), default=1)


def make_store_of(call: Call, options: MakeStoreOptions) -> int:
    """Make and print."""
    from tiered.store.bulk import make_store

    directory = options.directory
    made = make_store(
        directory,
        topics=options.topics,
        queues=options.queues,
        messages=options.messages,
        body_bytes=options.body_bytes,
        commitlog_file_bytes=options.file_size_bytes,
        seed=options.seed,
        clock=call.clock,
    )
    document = {
        "format": 1,
        "store": directory,
        "messages": made.messages,
        "size_bytes": made.record_bytes,
        "topics": made.topics,
        "queues": made.queues,
    }
    show(call, [document])
    return 0


MAKE_STORE = make_command(
    "bench.make-store",
    MakeStoreOptions,
    make_store_of,
    examples=[
        "tiered bench make-store /tmp/store",
        "tiered bench make-store /tmp/small --messages 1000 --body 64KiB --queues 4 --json",
    ],
)


EMBEDDED_COLUMNS = ["what", "value", "unit", "plain", "ratio", "cpu_us_per_message", "plain_cpu_us_per_message"]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EmbeddedOptions:
    """What ``tiered bench store`` can be told."""

    directory: str | None = maybe(click.Path(file_okay=False), metavar="[DIR]")
    messages: int = option("messages to append, and to recover", "N", whole(1), default=300_000)
    body_bytes: int = option("bytes of each body", "SIZE", parse_size, default=1024)
    threads: int = option("threads that append under sync", "N", whole(1), default=32)
    seconds: float = option(
        "how long sync and visibility are measured", "DURATION", seconds_not_below_zero, default=5.0
    )
    rate: int = option(
        "messages a second while visibility is measured", "N", whole(1), default=20_000
    )


def measure_store(call: Call, options: EmbeddedOptions) -> int:
    """Measure and print."""
    from tiered.bench.store_append import StoreBench, bench_store

    bench = StoreBench(
        options.messages,
        options.body_bytes,
        options.threads,
        options.seconds,
        options.rate,
    )
    where = options.directory
    if where is not None:
        Path(where).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tiered-bench-", dir=where) as folder:
        rows = bench_store(Path(folder), bench, call.clock, random.Random(1))  # noqa: S311 (content)
    Output(call).emit({"format": 1, "results": rows}, rows, EMBEDDED_COLUMNS)
    return 0


STORE = make_command(
    "bench.store",
    EmbeddedOptions,
    measure_store,
    examples=[
        "tiered bench store",
        "tiered bench store /data --messages 4000000 --json",
    ],
)


@dataclass(frozen=True, kw_only=True)
class DispatchOptions:
    """What ``tiered bench dispatch`` can be told."""

    store: str = required("store directory to tier", "DIR", str)
    to: str = required("URL of an empty place for the tier", "URL", str)


def measure_dispatch(call: Call, options: DispatchOptions) -> int:
    """Measure and print."""
    from tiered.attach.writer import AttachSettings
    from tiered.bench.dispatch import bench_dispatch
    from tiered.cli.serve import bound_malloc

    bound_malloc()
    settings = AttachSettings(cluster=call.common.cluster, broker=call.common.broker)
    measured = bench_dispatch(
        options.store,
        options.to,
        settings=settings,
        options=call.s3_options(),
        clock=call.clock,
    )
    show(call, [measured.document()])
    return 0


DISPATCH = make_command(
    "bench.dispatch",
    DispatchOptions,
    measure_dispatch,
    examples=[
        "tiered bench dispatch --store /tmp/store --to file:///tmp/tier",
        "tiered bench dispatch --store /tmp/store --to s3://bucket/bench --json",
    ],
)


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """What ``tiered bench read`` can be told."""

    url: str = argument()
    topic: str | None = option("only this topic", "TOPIC", str, default_text="all")
    queue: int | None = option("only this queue", "N", whole(0), default_text="all")
    queues: int | None = option("only the first so many queues", "N", whole(1), default_text="all")
    pattern: str = option("what readers do", "PATTERN", PATTERNS, default="sequential")
    groups: int = option("readers (sequential, groups)", "N", whole(1), default=1)
    threads: int = option("threads that read (sequential, seeks)", "N", whole(1), default=1)
    count: int = option("messages that a client asks for at once", "N", whole(1), default=32)
    reads: int = option("reads (seeks, stops, keys, times)", "N", whole(1), default=200)
    seconds: float = option(
        "how long to read (groups)", "DURATION", seconds_not_below_zero, default=5.0
    )
    memory_bytes: int = option(
        "memory for what is cached, read ahead and on its way",
        "SIZE",
        parse_size,
        default=256 * _MIB,
    )
    requests: int = option("requests under way at once, on both sides", "N", whole(1), default=16)
    latency_ms: float = option(
        "added to each request, milliseconds", "N", not_below_zero, default=0.0
    )
    bandwidth: float = option(
        "of each request by itself, MiB/s; 0: no limit", "N", not_below_zero, default=0.0
    )
    stall_percent: float = option(
        "share of the requests that is held up, percent; not with plain GETs",
        "N",
        not_below_zero,
        default=0.0,
    )
    stall_ms: float = option("for how long, milliseconds", "N", not_below_zero, default=1000.0)
    seed: int = option("of what is random", "N", whole(0), default=1)


def measure_read(call: Call, options: ReadOptions) -> int:
    """Measure and print."""
    from tiered.api.stores import backend_errors
    from tiered.bench.read import bench_read
    from tiered.cli.call import open_tier
    from tiered.cli.cat import check_queues
    from tiered.cli.serve import bound_malloc

    bound_malloc()
    bench = read_bench(options)
    topic, number = options.topic, options.queue
    with contextlib.ExitStack() as stack, backend_errors():
        tier = open_tier(call, options.url, stack)
        if topic is not None:
            check_queues(tier, topic, number)
        queues = [queue for queue in tier.queues(topic) if number in {None, queue.queue_id}]
        measured = bench_read(tier, queues, bench, call.clock)
    show(call, [measured.document()])
    return 0


def read_bench(options: ReadOptions) -> ReadBench:
    """What the options say."""
    from tiered.bench.patterns import ReadLoad, Slowness
    from tiered.bench.read import ReadBench

    load = ReadLoad(
        pattern=options.pattern,
        groups=options.groups,
        queues=options.queues,
        threads=options.threads,
        count=options.count,
        reads=options.reads,
        seconds=options.seconds,
        seed=options.seed,
    )
    slowness = Slowness(
        latency_ms=options.latency_ms,
        mib_per_s=options.bandwidth or None,
        stall_percent=options.stall_percent,
        stall_ms=options.stall_ms,
    )
    return ReadBench(load, slowness, options.memory_bytes, options.requests)


READ = make_command(
    "bench.read",
    ReadOptions,
    measure_read,
    examples=[
        "tiered bench read file:///tmp/tier --latency-ms 20 --threads 4 --json",
        "tiered bench read s3://bucket/bench --pattern seeks --topic bench-0 --reads 1000",
    ],
)
