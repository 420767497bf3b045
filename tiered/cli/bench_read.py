"""``tiered bench read``: how fast a tier is read."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click

from tiered.cli.bench import ENTRIES, show
from tiered.cli.frame import make_command

if TYPE_CHECKING:
    from tiered.bench.read import ReadBench
    from tiered.cli.call import Call


def run(call: Call) -> int:
    """Measure and print."""
    from tiered.api.stores import backend_errors
    from tiered.attach.process import bound_malloc
    from tiered.bench.read import bench_read
    from tiered.cli.cat import check_queues
    from tiered.cli.tiers import open_tier

    bound_malloc()
    bench = read_bench(call)
    topic, number = call.text("topic"), call.whole_or_none("queue")
    with contextlib.ExitStack() as stack, backend_errors():
        tier = open_tier(call, call.argument("url"), stack)
        if topic is not None:
            check_queues(tier, topic, number)
        queues = [queue for queue in tier.queues(topic) if number in {None, queue.queue_id}]
        measured = bench_read(tier, queues, bench, call.clock)
    show(call, [measured.document()])
    return 0


def read_bench(call: Call) -> ReadBench:
    """What the options say."""
    from tiered.bench.patterns import Load
    from tiered.bench.read import ReadBench
    from tiered.bench.slow_store import Slowness

    load = Load(
        pattern=call.words("pattern"),
        groups=call.whole("groups"),
        queues=call.whole_or_none("queues"),
        threads=call.whole("threads"),
        count=call.whole("count"),
        reads=call.whole("reads"),
        seconds=call.number("seconds"),
        seed=call.whole("seed"),
    )
    slowness = Slowness(
        latency_ms=call.number("latency-ms"),
        mib_per_s=call.number("bandwidth") or None,
        stall_percent=call.number("stall-percent"),
        stall_ms=call.number("stall-ms"),
    )
    return ReadBench(load, slowness, call.whole("memory"), call.whole("requests"))


COMMAND = make_command(
    "read",
    run,
    summary=ENTRIES["read"].summary,
    section="bench.read",
    arguments=[click.Argument(["url"])],
    examples=[
        "tiered bench read file:///tmp/tier --latency-ms 20 --threads 4 --json",
        "tiered bench read s3://bucket/bench --pattern seeks --topic bench-0 --reads 1000",
    ],
)
