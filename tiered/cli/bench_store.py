"""``tiered bench make-store``: a local store of messages to measure with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tiered.cli.bench import ENTRIES, show
from tiered.cli.frame import make_command

if TYPE_CHECKING:
    from tiered.cli.call import Call


def run(call: Call) -> int:
    """Make and print."""
    from tiered.store.bulk import make_store

    directory = call.argument("directory")
    made = make_store(
        directory,
        topics=call.whole("topics"),
        queues=call.whole("queues"),
        messages=call.whole("messages"),
        body_bytes=call.whole("body"),
        commitlog_file_bytes=call.whole("file-size"),
        seed=call.whole("seed"),
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


COMMAND = make_command(
    "make-store",
    run,
    summary=ENTRIES["make-store"].summary,
    section="bench.make-store",
    arguments=[click.Argument(["directory"], metavar="DIR")],
    examples=[
        "tiered bench make-store /tmp/store",
        "tiered bench make-store /tmp/small --messages 1000 --body 64KiB --queues 4 --json",
    ],
)
