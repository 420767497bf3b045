"""``tiered bench``: measures this machine against plain copying; without a command, all of it in one go."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any

from tiered.cli.frame import COMMANDS, Entry, make_program
from tiered.cli.output import Output
from tiered.cli.signals import at_end
from tiered.errors import InternalError

if TYPE_CHECKING:
    from tiered.cli.call import Call

ENTRIES = {
    "make-store": Entry(
        "tiered.cli.bench_store", "Makes a local store of messages to measure with."
    ),
    "store": Entry(
        "tiered.cli.bench_embedded", "Measures the embedded store, beside plain writes and reads."
    ),
    "dispatch": Entry(
        "tiered.cli.bench_dispatch", "Measures how fast a store is tiered, beside cp and fsync."
    ),
    "read": Entry(
        "tiered.cli.bench_read", "Measures how fast a tier is read, beside plain ranged GETs."
    ),
}
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


def run(call: Call) -> int:
    """Make a store, tier it and read it back, each in a process of its own."""
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="tiered-bench-") as folder:
        store, tier = f"{folder}/store", f"file://{folder}/tier"
        call.say(f"tiered: making {call.find('bench.make-store.messages').value:,} messages")
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
        values = [call.find(f"bench.make-store.{name}").value for name in names]
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
    ENTRIES,
    COMMANDS["bench"].summary,
    ["tiered bench", "tiered bench dispatch --store /tmp/store --to file:///tmp/tier --json"],
    run=run,
)
