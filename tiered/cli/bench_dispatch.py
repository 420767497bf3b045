"""``tiered bench dispatch``: how fast a store is tiered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered.cli.bench import ENTRIES, show
from tiered.cli.frame import make_command

if TYPE_CHECKING:
    from tiered.cli.call import Call


def run(call: Call) -> int:
    """Measure and print."""
    from tiered.attach.process import bound_malloc
    from tiered.attach.writer import AttachSettings
    from tiered.bench.dispatch import bench_dispatch

    bound_malloc()
    settings = AttachSettings(cluster=call.text("cluster"), broker=call.text("broker"))
    measured = bench_dispatch(
        call.words("store"),
        call.words("to"),
        settings=settings,
        options=call.s3_options(),
        clock=call.clock,
    )
    show(call, [measured.document()])
    return 0


COMMAND = make_command(
    "dispatch",
    run,
    summary=ENTRIES["dispatch"].summary,
    section="bench.dispatch",
    examples=[
        "tiered bench dispatch --store /tmp/store --to file:///tmp/tier",
        "tiered bench dispatch --store /tmp/store --to s3://bucket/bench --json",
    ],
)
