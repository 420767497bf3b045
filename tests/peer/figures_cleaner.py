"""A pass in memory, a pass of the embedded store, and Kafka's cleaner: python tests/peer/figures_cleaner.py DIR [--runs 3]

The same messages on each side (1 KiB bodies, keys by one formula, a ninth of as many keys), in turn, each in a fresh
process. CPU is that of the thread that does the pass. `core` has no storage, and looks at the keys twice. `store` reads,
checks each body's checksum, and writes what stays of closed files of 100 MiB; so does `kafka`, whose own classes clean a log
that they have made, in segments of that size, but for the checksums: RUNS times in one JVM, so that the last ones are of
compiled code. The best run of each counts. Needs JDK 17 and Maven (the first call builds into
`${PEER_HOME:-$HOME/.cache/tiered-peer}/kafka`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
MIB = 1 << 20
KEYS_SHARE = 9
BODY_BYTES = 1024
FACTOR, ADDED = 6364136223846793005, 1442695040888963407


def key_of(number: int, keys: int) -> int:
    """As the Java side has it."""
    return ((number * FACTOR + ADDED) % 2**64 >> 33) % keys


@dataclass(frozen=True)
class Sizes:
    """How much is made."""

    messages: int
    keys: int


def core(_folder: Path, sizes: Sizes) -> dict[str, float]:
    """Keys of records, the newest of each, and the bytes of what stays joined; records are made anew for both looks."""
    from support.examples import make
    from support.synthetic import make_batch

    from tiered.compaction.newest import KEY_BYTES, Newest, is_among, keyed_records
    from tiered.format.record import QUEUE_OFFSET_AT, encode_record
    from tiered.model import MessageQueue, QueueOffset

    queue, chunk, mark = MessageQueue("prices", 0), 8192, b"k00000000"
    raw = encode_record(
        make(topic="prices", queue_offset=0, properties_raw=b"KEYS\x01" + mark, body=b"x" * 920)
    )
    at = raw.rindex(mark) + 1
    batch = make_batch(queue, 0, [raw] * chunk, [5] * chunk)
    rows = np.frombuffer(bytearray(batch.data), np.uint8).reshape(chunk, len(raw))
    batch.data = rows.data
    digits = 10 ** np.arange(7, -1, -1)
    cpu_s = 0.0

    def looked() -> Any:
        for first in range(0, sizes.messages, chunk):
            numbers = np.arange(first, first + chunk, dtype=np.uint64)
            hashed = numbers * np.uint64(FACTOR) + np.uint64(ADDED)
            key = (hashed >> np.uint64(33)) % np.uint64(sizes.keys)
            rows[:, at : at + 8] = (key[:, None] // digits.astype(np.uint64)) % 10 + 48
            rows[:, QUEUE_OFFSET_AT : QUEUE_OFFSET_AT + 8] = (
                numbers.astype(">i8").view(np.uint8).reshape(-1, 8)
            )
            batch.base_offset = QueueOffset(first)
            yield first

    newest = Newest(sizes.keys)
    end = -(-sizes.messages // chunk) * chunk
    for _ in looked():
        begun = time.thread_time()
        for records in keyed_records(batch):
            newest.put(records)
        cpu_s += time.thread_time() - begun
    begun = time.thread_time()
    stay = np.sort(newest.rows()["offset"])
    cpu_s += time.thread_time() - begun
    left = 0
    view = memoryview(rows).cast("B")
    for first in looked():
        begun = time.thread_time()
        kept = np.flatnonzero(is_among(stay, np.arange(first, first + chunk)))
        starts = kept * len(raw)
        chunks = map(slice, starts.tolist(), (starts + len(raw)).tolist())
        left += len(bytearray().join(map(view.__getitem__, chunks)))
        cpu_s += time.thread_time() - begun
    assert left == sizes.keys * len(raw)
    return {"messages": end, "log_bytes": end * len(raw), "left_bytes": left, "cpu_s": cpu_s,
            "map_bytes_a_key": KEY_BYTES}  # fmt: skip


def store(folder: Path, sizes: Sizes) -> dict[str, float]:
    """A pass over all closed files of one queue."""
    from tiered.clock import SystemClock
    from tiered.store.embedded import MessageStore
    from tiered.store.new_message import NewMessage
    from tiered.store.store_options import Compacting, StoreOptions

    options = StoreOptions(compacting=Compacting(interval_s=1e9))
    noise = np.random.default_rng(1).bytes(MIB)
    with MessageStore.create(
        folder / "store", cluster="c", broker="b", clock=SystemClock(), options=options
    ) as made:
        made.create_topic("prices", queues=1, is_compacted=True)
        for first in range(0, sizes.messages, 500):
            made.append_batch(
                [
                    NewMessage(
                        "prices", 0, noise[(at := number % (MIB - BODY_BYTES)) : at + BODY_BYTES],
                        keys=f"key-{key_of(number, sizes.keys)}",
                    )
                    for number in range(first, min(first + 500, sizes.messages))
                ]
            )  # fmt: skip
        made.wait_listed()
        passes = made._compactions
        passes.advance()
        (queue,) = passes._queues.values()
        log_bytes = sum(file.end - file.base for file in queue.closed())
        begun = time.thread_time()
        counts = made.compact()
        cpu_s = time.thread_time() - begun
        return {"messages": counts.messages, "log_bytes": log_bytes, "cpu_s": cpu_s,
                "left_bytes": counts.rewritten_bytes}  # fmt: skip


def kafka(folder: Path, sizes: Sizes, runs: int) -> list[dict[str, float]]:
    """Each run of the Java side."""
    home = Path(os.environ.get("PEER_HOME", Path.home() / ".cache" / "tiered-peer")) / "kafka"
    pom = Path(__file__).parent / "kafka" / "pom.xml"
    maven = ["mvn", "-q", "-B", "-f", str(pom), f"-Dpeer.build={home}/build", "package"]
    subprocess.run(maven, check=True, stdout=sys.stderr)
    numbers = (sizes.messages, sizes.keys, BODY_BYTES, 16, runs)
    done = subprocess.run(
        [
            *("java", "-Xmx1g", "-XX:+UseSerialGC"),
            *("-cp", f"{home}/build/cleaner.jar:{home}/build/lib/*", "peer.Cleaning"),
            *(str(folder), *map(str, numbers)),
        ],
        check=True,
        stdout=subprocess.PIPE,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def one(folder: Path, side: str, sizes: Sizes, runs: int) -> list[dict[str, float]]:
    """A side, in a folder of its own."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        if side == "kafka":
            return kafka(folder, sizes, runs)
        return [{"core": core, "store": store}[side](folder, sizes)]
    finally:
        shutil.rmtree(folder)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--messages", type=int, default=400_000)
    parser.add_argument("--keys", type=int, default=0, help="default: a ninth of the messages")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--sides", default="core,store,kafka")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = Sizes(options.messages, options.keys or options.messages // KEYS_SHARE)
    if options.one:
        print(json.dumps(one(options.folder, options.one, sizes, options.runs)))
        return
    print("| side | messages | MiB of log | MiB left | CPU s | MiB a second | messages a second |")
    print("|---|---|---|---|---|---|---|")
    for side in options.sides.split(","):
        rows: list[dict[str, float]] = []
        for _ in range(1 if side == "kafka" else options.runs):
            again = [sys.executable, __file__, *sys.argv[1:], "--one", side]
            again[2] = str(options.folder / side)
            done = subprocess.run(again, check=True, stdout=subprocess.PIPE)
            rows += json.loads(done.stdout.splitlines()[-1])
        best = min(rows, key=lambda row: row["cpu_s"])
        mib, cpu_s = best["log_bytes"] / MIB, best["cpu_s"]
        said = f"; {best['map_bytes_a_key']:.0f} bytes a key" if "map_bytes_a_key" in best else ""
        print(
            f"| {side}{said} | {best['messages']:,.0f} | {mib:.0f} | {best['left_bytes'] / MIB:.0f} |"
            f" {cpu_s:.2f} | {mib / cpu_s:.0f} | {best['messages'] / cpu_s:,.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
