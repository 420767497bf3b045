"""Compressed sections: how much smaller they are, and what that costs in CPU.

    .venv/bin/python tests/peer/figures_compress.py --work DIR

Each case is the begin of a store's log with 1 KiB bodies in one queue: bodies like JSON (those of the Java peer where there
is Java), and bodies of random bytes. Nobody waits for a quiet machine: CPU seconds say what work costs.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

from figures_common import MIB, ONE, Bench

from tiered.clock import SystemClock
from tiered.format.bundle import build_packed_section, pays, train
from tiered.format.items import ITEM_BYTES
from tiered.log.sections import split_section
from tiered.store.embedded import MessageStore
from tiered.store.new_message import NewMessage

if TYPE_CHECKING:
    from collections.abc import Iterator

RANDOM_MESSAGES = 100_000
BODY_BYTES = 1024
OBJECT_BYTES = 32 * MIB


def random_store(work: Path) -> Path:
    """A store whose bodies nobody can compress, made on first use."""
    path = work / "s-random"
    if path.exists():
        return path
    rng = random.Random(1)
    with MessageStore.create(path, cluster="c", broker="b", clock=SystemClock()) as store:
        store.create_topic("t", queues=1)
        for _ in range(RANDOM_MESSAGES // 1000):
            store.append_batch([NewMessage("t", 0, rng.randbytes(BODY_BYTES)) for _ in range(1000)])
    return path


def codec(store: Path, level: int) -> tuple[float, float, float, float]:
    """Of one large section: ratio; CPU seconds a GiB to train and choose a dictionary, to compress, to unpack and check."""
    data = next(iter(sorted(store.glob("commitlog/*")))).read_bytes()[:OBJECT_BYTES]
    gib = len(data) / (1024 * MIB)
    begin = time.process_time()
    dictionary = train(data, level=level)
    dictionary = dictionary if pays(dictionary, data, level=level) else b""
    trained = time.process_time()
    made = build_packed_section(data, b"\0" * ITEM_BYTES, level=level, dictionary=dictionary)
    packed = time.process_time()
    if made is None:
        return 1.0, (trained - begin) / gib, (packed - trained) / gib, 0.0
    whole = b"".join(made.buffers)
    ready = time.process_time()
    records, _ = split_section(whole, made.place, where="")
    done = time.process_time()
    assert records == data
    ratio = len(data) / len(whole)
    return ratio, (trained - begin) / gib, (packed - trained) / gib, (done - ready) / gib


def codecs(work: Path, runs: int) -> Iterator[str]:
    """What compressing itself costs."""
    yield "| bodies | level | ratio | dictionary, CPU s/GiB | compress | unpack and check |"
    yield "|---|---|---|---|---|---|"
    for name, store in (("JSON", Bench(work, 1).store(ONE)), ("random", random_store(work))):
        for level in (1, 3, 9):
            columns = zip(*(codec(store, level) for _ in range(2 * runs + 1)), strict=True)
            ratio, *cpus = (statistics.median(column) for column in columns)
            row = " | ".join(f"{cpu:.1f}" for cpu in cpus)
            yield f"| {name} | {level} | {ratio:.2f} | {row} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    for line in codecs(args.work, args.runs):
        print(line, flush=True)


if __name__ == "__main__":
    main()
