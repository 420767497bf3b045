#!/usr/bin/env python3
"""Runs the whole comparison for the Java peer and prints a table.

    bench.py --work DIR [--runs 3] [--only dispatch,read]

Makes the four stores (kept for the next time), then each measurement in a fresh process, `--runs`
times. Before each it waits up to `--patience` seconds for a machine that is less than 15 percent
busy. Raw lines go to DIR/results.jsonl.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
STORES = {
    "1 x 1, 200k x 1 KiB": [
        "--topics",
        "1",
        "--queues",
        "1",
        "--messages",
        "200000",
        "--body",
        "1024",
    ],
    "1 x 16, 500k x 1 KiB": [
        "--topics",
        "1",
        "--queues",
        "16",
        "--messages",
        "500000",
        "--body",
        "1024",
    ],
    "4 x 250, 200k x 256 B": [
        "--topics",
        "4",
        "--queues",
        "250",
        "--messages",
        "200000",
        "--body",
        "256",
    ],
    "1 x 8, 8k x 64 KiB": [
        "--topics",
        "1",
        "--queues",
        "8",
        "--messages",
        "8000",
        "--body",
        "65536",
    ],
}
# The tail of a queue is else held back until its messages are 30 seconds old.
NOW = "tieredStoreGroupCommitTimeout=0"
DISPATCH = {
    "": ["--set", NOW],
    "32 MiB batches": [
        "--set",
        NOW + ",tieredStoreGroupCommitSize=33554432,tieredStoreGroupCommitCount=32768"
        ",tieredStoreMaxGroupCommitCount=65536",
    ],
    "metadata not rewritten": ["--set", NOW, "--metadata", "lazy"],
    "no store": ["--set", NOW, "--provider", "null"],
}
READ = {"0 ms": [], "20 ms": ["--latency-ms", "20"]}


def busy_cores(seconds: float) -> float:
    def ticks() -> float:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        return sum(int(fields[i]) for i in (1, 2, 3, 6, 7)) / os.sysconf("SC_CLK_TCK")

    before = ticks()
    time.sleep(seconds)
    return (ticks() - before) / seconds


def wait_for_quiet(patience: float) -> None:
    deadline = time.monotonic() + patience
    while busy_cores(1.0) > 0.15 * (os.cpu_count() or 1) and time.monotonic() < deadline:
        pass


def peer(*arguments: str) -> dict:
    run = subprocess.run(
        [HERE / "peer", *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    if run.returncode:
        raise SystemExit(f"peer {' '.join(arguments)}\n{run.stderr}")
    return json.loads(run.stdout.strip().splitlines()[-1])


def median(results: list[dict], field: str) -> float:
    return statistics.median(result[field] for result in results)


def row(name: str, results: list[dict]) -> str:
    spread = f"{min(r['seconds'] for r in results):.2f}-{max(r['seconds'] for r in results):.2f}"
    later = [last["later_passes"][-1] for last in results if "later_passes" in last]
    warm = (
        f"{median(later, 'seconds'):.2f} s, {median(later, 'cpu_seconds'):.2f} CPU s"
        if later
        else "-"
    )
    return (
        f"| {name} | {median(results, 'seconds'):.2f} ({spread}) | "
        f"{median(results, 'mib_per_s'):.0f} | "
        f"{median(results, 'msgs_per_s') / 1000:.0f}k | {median(results, 'cpu_seconds'):.2f} | "
        f"{median(results, 'peak_rss_mib'):.0f} | {median(results, 'other_cores'):.2f} | {warm} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--passes", default="2", help="passes in each process; the last shows a warmed-up compiler"
    )
    parser.add_argument("--only", default="dispatch,read")
    parser.add_argument("--stores", default="1,2,3,4")
    parser.add_argument("--variants", default=",".join(DISPATCH))
    parser.add_argument("--patience", type=float, default=20)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    tier = args.work / "tier"
    names = [name for i, name in enumerate(STORES, 1) if str(i) in args.stores.split(",")]
    for name in names:
        store = args.work / f"s{list(STORES).index(name) + 1}"
        if not store.exists():
            peer("make-store", "--dir", str(store), *STORES[name])
        plan = []
        if "dispatch" in args.only:
            plan += [
                ("dispatch", variant, options)
                for variant, options in DISPATCH.items()
                if variant in args.variants.split(",")
            ]
        if "read" in args.only:
            plan += [("read", variant, options) for variant, options in READ.items()]
        kept = store.with_name(store.name.replace("s", "t"))
        if "read" in args.only and not kept.exists():
            peer(
                "dispatch",
                "--store",
                str(store),
                "--tier",
                str(kept),
                *DISPATCH["metadata not rewritten"],
            )
        for command, variant, options in plan:
            results = []
            for _ in range(args.runs):
                shutil.rmtree(tier, ignore_errors=True)
                wait_for_quiet(args.patience)
                many = command == "dispatch" and "250" in name and "metadata" not in variant
                results.append(
                    peer(
                        command,
                        "--store",
                        str(store),
                        "--tier",
                        str(tier if command == "dispatch" else kept),
                        "--passes",
                        "1" if many else args.passes,
                        *options,
                    )
                )
            with (args.work / "results.jsonl").open("a") as file:
                for result in results:
                    file.write(json.dumps({"store": name, "variant": variant, **result}) + "\n")
            print(row(f"{command} {name} {variant}".rstrip(), results), flush=True)


if __name__ == "__main__":
    main()
