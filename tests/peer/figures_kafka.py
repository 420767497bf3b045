"""What a Kafka source costs, beside a plain copy: python tests/peer/figures_kafka.py DIR [--mib 512] [--runs 3]

A log directory of eight partitions is made in DIR: lz4 batches of 16 KiB, records of 1,000 bytes with a key each, segments
of 64 MiB with their indexes. Each run, in turn and in fresh processes: a copy of its files with fsync of each; `attach
--once --no-index`; the same with the key index, which unpacks every batch. Then one archive of the last tier. Start
included; CPU is that of the whole process.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import struct
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]

import lz4.frame  # noqa: E402 (found by the path above)
from figures_common import MIB, TIERED, remove_and_settle, timed  # noqa: E402
from support.kafka_batches import batch, section  # noqa: E402

PARTITIONS = 8
SEGMENT_BYTES = 64 * MIB
BATCH_BYTES = 16_000
VALUE_BYTES = 1000
KINDS_OF_BATCH = 64
TIME_MS = 1_700_000_000_000
LZ4 = 3


def packed(count: int, rng: random.Random, words: list[bytes]) -> tuple[bytes, int]:
    """The records of a batch, compressed; and how many bytes they are."""
    records = [
        (
            at,
            at,
            b"key-%08d" % rng.randrange(100_000),
            b" ".join(rng.choices(words, k=160))[:VALUE_BYTES],
            (),
        )
        for at in range(count)
    ]
    plain = section(records)
    return lz4.frame.compress(plain, block_size=lz4.frame.BLOCKSIZE_MAX64KB), len(plain)


def make(folder: Path, mib: int) -> float:
    """The directory of a node that was stopped; how much larger its records are unpacked."""
    rng = random.Random(1)
    words = [
        bytes(rng.choices(b"abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 9))) for _ in range(2000)
    ]
    count = 8
    while len(packed(count, rng, words)[0]) < BATCH_BYTES:
        count += 1
    pool = [packed(count, rng, words) for _ in range(KINDS_OF_BATCH)]
    marks = []
    for partition in range(PARTITIONS):
        offset = write_partition(
            folder / f"load-{partition}", mib * MIB // PARTITIONS, count, pool, rng
        )
        marks.append(f"load {partition} {offset}\n")
    (folder / "meta.properties").write_text("version=1\ncluster.id=figures\nnode.id=1\n")
    (folder / "replication-offset-checkpoint").write_text(f"0\n{len(marks)}\n{''.join(marks)}")
    (folder / ".kafka_cleanshutdown").write_text('{"version":0,"brokerEpoch":1}')
    return sum(size for _, size in pool) / sum(len(data) for data, _ in pool)


def write_partition(
    folder: Path, size: int, count: int, pool: list[tuple[bytes, int]], rng: random.Random
) -> int:
    """Segments and indexes of one partition; its end."""
    folder.mkdir(parents=True)
    (folder / "leader-epoch-checkpoint").write_text("0\n1\n0 0\n")
    offset = written = 0
    log, index, base = bytearray(), bytearray(), 0
    while written < size:
        data, _ = rng.choice(pool)
        head = {"attributes": LZ4, "last_offset_delta": count - 1, "leader_epoch": 0}
        times = {"base_timestamp": TIME_MS, "max_timestamp": TIME_MS + count - 1}
        one = bytearray(batch(data, count, **head, **times))
        struct.pack_into(">q", one, 0, offset)  # not under the checksum
        if log:
            index += struct.pack(">ii", offset + count - 1 - base, len(log))
        log += one
        offset, written = offset + count, written + len(one)
        if len(log) >= SEGMENT_BYTES or written >= size:
            (folder / f"{base:020d}.log").write_bytes(log)
            (folder / f"{base:020d}.index").write_bytes(index)
            log, index, base = bytearray(), bytearray(), offset
    return offset


def copied(source: Path, target: Path) -> float:
    """Seconds that a plain copy takes, each file forced to the disk."""
    remove_and_settle(target)
    begun = time.perf_counter()
    for file in sorted(path for path in source.rglob("*") if path.is_file()):
        there = target / file.relative_to(source)
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, there)
        with there.open("rb+") as opened:
            os.fsync(opened)
    return time.perf_counter() - begun


def attached(store: Path, tier: Path, *options: str) -> tuple[float, float]:
    """Wall and CPU seconds of an attach to a new tier."""
    remove_and_settle(tier)
    told = ("--once", "--seal", "--json", "--quiet", *options)
    ran = timed([*TIERED, "attach", str(store), "--to", tier.as_uri(), *told])
    return ran["wall"], ran["cpu"]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    store, tier, copy = (options.folder / name for name in ("store", "tier", "copy"))
    shutil.rmtree(store, ignore_errors=True)
    unpacked = options.mib * make(store, options.mib)
    sides: dict[str, tuple[str, ...]] = {"--no-index": ("--no-index",), "with the key index": ()}
    rows: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    copies = []
    for _ in range(options.runs):
        copies.append(copied(store, copy))
        for name, more in sides.items():
            rows[name].append(attached(store, tier, *more))
    plain_s = statistics.median(copies)
    print("| what | speed | of cp | wall s | CPU |")
    print("|---|---|---|---|---|")
    print(f"| cp, fsync | {options.mib / plain_s:.0f} MiB/s | | {plain_s:.2f} | |")
    for name, found in rows.items():
        wall, cpu = (statistics.median(column) for column in zip(*found, strict=True))
        speed, share = f"{options.mib / wall:.0f} MiB/s", f"{plain_s / wall:.2f}"
        gib = f"{cpu / options.mib * 1024:.2f} s/GiB"
        print(f"| attach --once, {name} | {speed} | {share} | {wall:.2f} | {gib} |")
    target = options.folder / "archive"
    shutil.rmtree(target, ignore_errors=True)
    ran = timed([*TIERED, "archive", tier.as_uri(), "--to", target.as_uri(), "--json", "--quiet"])
    speed = f"{unpacked / ran['cpu']:.0f} MiB of records a CPU second"
    print(
        f"| archive, {unpacked:.0f} MiB unpacked | {speed} | | {ran['wall']:.2f} | {ran['cpu']:.2f} s |"
    )
    shutil.rmtree(copy)


if __name__ == "__main__":
    main()
