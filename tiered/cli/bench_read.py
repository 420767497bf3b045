"""``tiered bench read``: how fast a tier is read."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click

from tiered.cli.bench import ENTRIES, show
from tiered.cli.frame import make_command

if TYPE_CHECKING:
    from tiered.cli.call import Call


def run(call: Call) -> int:
    """Measure and print."""
    from tiered.cli.cat import check_queues
    from tiered.cli.tiers import open_tier
    from tiered.plugin.bench import bench_read
    from tiered.plugin.stores import backend_errors

    url, topic, number = call.argument("url"), call.text("topic"), call.whole_or_none("queue")
    with contextlib.ExitStack() as stack, backend_errors():
        tier = open_tier(call, url, stack)
        if topic is not None:
            check_queues(tier, topic, number)
        measured = bench_read(tier, topic=topic, queue_id=number, url=url, clock=call.clock)
    show(call, [measured.document()])
    return 0


COMMAND = make_command(
    "read",
    run,
    summary=ENTRIES["read"].summary,
    section="bench.read",
    arguments=[click.Argument(["url"])],
    examples=[
        "tiered bench read file:///tmp/tier",
        "tiered bench read s3://bucket/bench --topic bench-0 --queue 3 --json",
    ],
)
