"""``tiered bench store``: how fast the embedded store is."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tiered.cli.bench import ENTRIES
from tiered.cli.frame import make_command
from tiered.cli.output import Output

if TYPE_CHECKING:
    from tiered.cli.call import Call

COLUMNS = ["what", "value", "unit", "plain", "ratio", "cpu_us_per_message", "plain_cpu_us_per_message"]  # fmt: skip


def run(call: Call) -> int:
    """Measure and print."""
    from tiered.bench.store import StoreBench, bench_store

    bench = StoreBench(
        call.whole("messages"),
        call.whole("body"),
        call.whole("threads"),
        call.number("seconds"),
        call.whole("rate"),
    )
    where = call.arguments["directory"]
    if where is not None:
        Path(where).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tiered-bench-", dir=where) as folder:
        rows = bench_store(Path(folder), bench, call.clock, random.Random(1))  # noqa: S311 (content)
    Output(call).emit({"format": 1, "results": rows}, rows, COLUMNS)
    return 0


COMMAND = make_command(
    "store",
    run,
    summary=ENTRIES["store"].summary,
    section="bench.store",
    arguments=[
        click.Argument(
            ["directory"], required=False, metavar="[DIR]", type=click.Path(file_okay=False)
        )
    ],
    examples=[
        "tiered bench store",
        "tiered bench store /data --messages 4000000 --json",
    ],
)
