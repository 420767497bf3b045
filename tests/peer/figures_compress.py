"""Compressed segments: how much smaller they are, what that costs in CPU, and how fast they are read cold.

    .venv/bin/python tests/peer/figures_compress.py --work DIR

Each case is a store of 1 KiB bodies in one queue, tiered as it is and with ``--compress zstd``, on a folder: bodies like
JSON (those of the Java peer where there is Java), and bodies of random bytes. Reads are ``tiered bench read`` with 50 MiB/s
for each request: plain and compressed in turn, medians. Nobody waits for a quiet machine: CPU seconds say what work costs.
"""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from figures_common import (
    MIB,
    TIERED,
    Result,
    median,
    remove_and_settle,
    run_json,
    store_of,
)

from tiered.clock import SystemClock
from tiered.format.dictionary import pays, train
from tiered.format.packed import build_packed, stored_range, unpack_blocks
from tiered.format.object import parse_trailer
from tiered.store.message_store import MessageStore
from tiered.store.messages import Message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

JSON_STORE = "1 x 1, 200k x 1 KiB"
RANDOM_MESSAGES = 100_000
BODY_BYTES = 1024
OBJECT_BYTES = 32 * MIB
PIECE_BYTES = 4 * MIB
KINDS = ("plain", "zstd", "zstd:9")


def random_store(work: Path) -> Path:
    """A store whose bodies nobody can compress, made on first use."""
    path = work / "s-random"
    if path.exists():
        return path
    rng = random.Random(1)
    with MessageStore.create(path, cluster="c", broker="b", clock=SystemClock()) as store:
        store.create_topic("t", queues=1)
        for _ in range(RANDOM_MESSAGES // 1000):
            store.append_batch([Message("t", 0, rng.randbytes(BODY_BYTES)) for _ in range(1000)])
    return path


def in_turn(runs: int, *sides: Callable[[], Result]) -> list[list[Result]]:
    """Run each side in turn, ``runs`` times."""
    results: list[list[Result]] = [[] for _ in sides]
    for _ in range(runs):
        for row, side in zip(results, sides, strict=True):
            row.append(side())
    return results


def attach(store: Path, tier: Path, kind: str) -> Result:
    """Tier a store and seal it: what it took, and what is stored."""
    remove_and_settle(tier)
    options = () if kind == "plain" else ("--compress", kind)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run_json(
        [
            *TIERED,
            "attach",
            str(store),
            "--to",
            tier.as_uri(),
            "--once",
            "--seal",
            "--json",
            *options,
        ]
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    broker = run_json([*TIERED, "status", tier.as_uri(), "--json"])["brokers"][0]
    logs = run_json([*TIERED, "ls", tier.as_uri(), "--objects", "--json"])["objects"]
    records = sum(one["end"] - one["start"] for one in logs if one["kind"] == "commitlog")
    stored = sum(one["size_bytes"] for one in logs if one["kind"] == "commitlog")
    return {
        "cpu_seconds": cpu,
        "plain_bytes": broker["plain_bytes"],
        "size_bytes": broker["size_bytes"],
        "ratio": broker["plain_bytes"] / broker["size_bytes"],
        "records_ratio": records / stored,
    }


def sizes(work: Path, runs: int) -> Iterator[str]:
    """Ratio and CPU."""
    yield "| bodies | sealed | records | records and index | CPU s/GiB of `attach --once --seal` |"
    yield "|---|---|---|---|---|"
    for name, store in (("JSON", store_of(work, JSON_STORE)), ("random", random_store(work))):
        tiers = {kind: work / f"compress-{name}-{kind.replace(':', '-')}" for kind in KINDS}
        sides = [partial(attach, store, tier, kind) for kind, tier in tiers.items()]
        for kind, found in zip(KINDS, in_turn(runs, *sides), strict=True):
            gib = found[0]["plain_bytes"] / (1024 * MIB)
            yield (
                f"| {name} | {kind} | {median(found, 'records_ratio'):.2f} | {median(found, 'ratio'):.2f}"
                f" | {median(found, 'cpu_seconds') / gib:.1f} |"
            )


def codec(store: Path, level: int) -> tuple[float, float, float, float]:
    """Of one merged object: ratio; CPU seconds a GiB to train and choose a dictionary, to compress, to unpack and check."""
    data = next(iter(sorted(store.glob("commitlog/*")))).read_bytes()[:OBJECT_BYTES]
    gib = len(data) / (1024 * MIB)
    begin = time.process_time()
    dictionary = train(data, level=level)
    dictionary = dictionary if pays(dictionary, data, level=level) else b""
    trained = time.process_time()
    made = build_packed(data, {}, level=level, dictionary=dictionary)
    packed = time.process_time()
    if made is None:
        return 1.0, (trained - begin) / gib, (packed - trained) / gib, 0.0
    whole = b"".join(made.buffers)
    trailer = parse_trailer(whole, where="")
    view, pieces = memoryview(whole), list[memoryview]()
    ready = time.process_time()
    for start in range(0, len(data), PIECE_BYTES):  # as a reader does
        end = min(start + PIECE_BYTES, len(data))
        low, high = stored_range(start, end, trailer)
        pieces.append(unpack_blocks(view[low:high], start, end, trailer, where=""))
    done = time.process_time()
    assert b"".join(pieces) == data
    ratio = len(data) / len(whole)
    return ratio, (trained - begin) / gib, (packed - trained) / gib, (done - ready) / gib


def codecs(work: Path, runs: int) -> Iterator[str]:
    """What compressing itself costs."""
    yield "| bodies | level | ratio | dictionary, CPU s/GiB | compress | unpack and check |"
    yield "|---|---|---|---|---|---|"
    for name, store in (("JSON", store_of(work, JSON_STORE)), ("random", random_store(work))):
        for level in (1, 3, 9):
            columns = zip(*(codec(store, level) for _ in range(2 * runs + 1)), strict=True)
            ratio, *cpus = (statistics.median(column) for column in columns)
            row = " | ".join(f"{cpu:.1f}" for cpu in cpus)
            yield f"| {name} | {level} | {ratio:.2f} | {row} |"


def read(tier: Path, connections: int, latency_ms: int) -> Result:
    """One cold read."""
    options = ("--bandwidth", "50", "--latency-ms", str(latency_ms), "--requests", str(connections))
    return run_json([*TIERED, "bench", "read", tier.as_uri(), "--json", *options])


def reads(work: Path, runs: int) -> Iterator[str]:
    """Cold reads at 50 MiB/s a connection."""
    yield "| bodies | connections | latency | plain | compressed | | CPU s/GiB plain | compressed |"
    yield "|---|---|---|---|---|---|---|---|"
    for name in ("JSON", "random"):
        for connections, latency_ms in ((1, 0), (1, 20), (4, 20), (16, 20)):
            tiers = (work / f"compress-{name}-plain", work / f"compress-{name}-zstd")
            sides = [partial(read, tier, connections, latency_ms) for tier in tiers]
            plain, packed = in_turn(runs, *sides)
            one, two = median(plain, "mib_per_second"), median(packed, "mib_per_second")
            cpus = [median(row, "cpu_seconds_per_gib") for row in (plain, packed)]
            yield (
                f"| {name} | {connections} | {latency_ms} ms | {one:.0f} MiB/s | {two:.0f} MiB/s | {two / one:.2f} x"
                f" | {cpus[0]:.1f} | {cpus[1]:.1f} |"
            )


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    for rows in (
        codecs(args.work, args.runs),
        sizes(args.work, args.runs),
        reads(args.work, args.runs),
    ):
        for line in rows:
            print(line, flush=True)
        print()


if __name__ == "__main__":
    main()
