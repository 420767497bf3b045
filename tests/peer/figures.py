#!/usr/bin/env python3
"""Prints the table of figures: ours, the Java tiered store's, the limit of the machine, and their ratios.

    .venv/bin/python tests/peer/figures.py [--work DIR] [--runs 3] [--only dispatch,read,s3,memory,status,help]

Each row measures both sides in turn, in the same minutes, each run in a fresh process; medians are printed. A row without
Java says "not measured". Stores are made once and kept in DIR, so that a second run is quicker.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TIERED = [sys.executable, "-m", "tiered"]
MIB = 1024 * 1024
STORES = {
    "1 x 1, 200k x 1 KiB": (1, 1, 200_000, 1024),
    "1 x 16, 500k x 1 KiB": (1, 16, 500_000, 1024),
    "4 x 250, 200k x 256 B": (4, 250, 200_000, 256),
    "1 x 8, 8k x 64 KiB": (1, 8, 8_000, 65_536),
}
DISPATCHED = list(STORES)[1:]
Result = dict[str, Any]


def busy_cores(seconds: float = 1.0) -> float:
    """Cores that are busy now."""

    def ticks() -> float:
        fields = Path("/proc/stat").read_text("ascii").split("\n", 1)[0].split()
        return sum(int(fields[i]) for i in (1, 2, 3, 6, 7)) / os.sysconf("SC_CLK_TCK")

    before = ticks()
    time.sleep(seconds)
    return (ticks() - before) / seconds


def wait_for_quiet(patience_s: float = 30.0) -> None:
    """Wait until others leave the machine alone, within reason."""
    deadline = time.monotonic() + patience_s
    while busy_cores() > 0.3 and time.monotonic() < deadline:
        pass


def run_json(command: list[str], **env: str) -> Result:
    """Run a program that prints one JSON document."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        cwd=ROOT,
        env={**os.environ, **env},
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stderr}")
    text = done.stdout.strip()
    return json.loads(text if text.startswith("{\n") else text.splitlines()[-1])


def has_java() -> bool:
    """Whether the peer can run."""
    return bool(shutil.which("java") and shutil.which("mvn"))


def peer(*arguments: str) -> Result:
    """One command of the Java peer."""
    return run_json([str(HERE / "peer"), *arguments])


def store_of(work: Path, name: str) -> Path:
    """The store of a case, made on first use: by the peer where Java is there, so that both read the same one."""
    path = work / f"s{list(STORES).index(name) + 1}"
    if not path.exists():
        topics, queues, messages, body = STORES[name]
        sizes = [
            "--topics",
            str(topics),
            "--queues",
            str(queues),
            "--messages",
            str(messages),
            "--body",
            str(body),
        ]
        if has_java():
            peer("make-store", "--dir", str(path), *sizes)
        else:
            run_json([*TIERED, "bench", "make-store", str(path), "--seed", "1", "--json", *sizes])
    return path


def median(results: list[Result], field: str) -> float:
    """Median of a field."""
    return statistics.median(float(result[field]) for result in results)


def alternate(runs: int, *sides: Callable[[], Result]) -> list[list[Result]]:
    """Run each side in turn, ``runs`` times."""
    results: list[list[Result]] = [[] for _ in sides]
    for _ in range(runs):
        for row, side in zip(results, sides, strict=True):
            wait_for_quiet()
            row.append(side())
    return results


def bare_files(source: Path, target: Path, threads: int = 8) -> Result:
    """Write and fsync the files of a tier again, with nothing around it."""
    files = [(p.relative_to(source), p.read_bytes()) for p in source.rglob("*") if p.is_file()]
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)

    def write(item: tuple[Path, bytes]) -> None:
        path = target / item[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb", buffering=0) as file:
            file.write(item[1])
            os.fsync(file.fileno())

    begin, cpu = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(write, files))
    seconds = time.perf_counter() - begin
    size = sum(len(data) for _, data in files)
    shutil.rmtree(target)
    return {"seconds": seconds, "mib_per_s": size / MIB / seconds, "cpu": time.process_time() - cpu}


def dispatch_rows(work: Path, runs: int) -> Iterator[str]:
    """Dispatch into a folder."""
    for name in DISPATCHED:
        store, tier, other = store_of(work, name), work / "tier", work / "tier-java"

        def ours(store: Path = store, tier: Path = tier) -> Result:
            shutil.rmtree(tier, ignore_errors=True)
            return run_json(
                [
                    *TIERED,
                    "bench",
                    "dispatch",
                    "--store",
                    str(store),
                    "--to",
                    tier.as_uri(),
                    "--json",
                ]
            )

        def bare(tier: Path = tier) -> Result:
            return bare_files(tier, work / "bare")

        def java(store: Path = store, other: Path = other, name: str = name) -> Result:
            if not has_java():
                return {"mib_per_s": 0, "cpu_seconds": 0}
            shutil.rmtree(other, ignore_errors=True)
            passes = "1" if "250" in name else "2"
            result = peer("dispatch", "--store", str(store), "--tier", str(other), "--passes", passes,
                          "--set", "tieredStoreGroupCommitTimeout=0")  # fmt: skip
            later = result.get("later_passes") or [result]
            return {**result, "warm": later[-1]["mib_per_s"]}

        mine, floor, theirs = alternate(runs, ours, bare, java)
        speed, cpu = median(mine, "mib_per_second"), median(mine, "cpu_seconds_per_gib")
        line = (f"| dispatch {name}, folder | {speed:.0f} MiB/s, {cpu:.2f} CPU s/GiB, "
                f"{median(mine, 'peak_rss_bytes') / MIB:.0f} MiB RSS, {median(mine, 'requests_per_gib'):.0f} requests/GiB "
                f"| {speed / median(mine, 'copy_mib_per_second'):.2f} of cp + fsync "
                f"({median(mine, 'copy_mib_per_second'):.0f}), "
                f"{speed / median(floor, 'mib_per_s'):.2f} of bare files ({median(floor, 'mib_per_s'):.0f}) ")  # fmt: skip
        if has_java():
            cold, warm = median(theirs, "mib_per_s"), median(theirs, "warm")
            mib = median(mine, "size_bytes") / MIB
            java_cpu = median(theirs, "cpu_seconds") / mib * 1024
            line += (f"| {cold:.0f} (warm {warm:.0f}) MiB/s, {java_cpu:.1f} CPU s/GiB "
                     f"| {speed / cold:.1f} x (warm {speed / warm:.1f} x), CPU {cpu / java_cpu:.2f} |")  # fmt: skip
        else:
            line += "| not measured | |"
        yield line


def read_rows(work: Path, runs: int) -> Iterator[str]:
    """Sequential read back of one queue."""
    name = next(iter(STORES))
    store, tier, other = store_of(work, name), work / "read-tier", work / "read-tier-java"
    if not tier.exists():
        run_json([*TIERED, "attach", str(store), "--to", tier.as_uri(), "--once", "--json"])
    if has_java() and not other.exists():
        peer("dispatch", "--store", str(store), "--tier", str(other), "--metadata", "lazy",
             "--set", "tieredStoreGroupCommitTimeout=0")  # fmt: skip

    def ours() -> Result:
        return run_json([*TIERED, "bench", "read", tier.as_uri(), "--json"])

    def java() -> Result:
        if not has_java():
            return {"mib_per_s": 0}
        result = peer("read", "--store", str(store), "--tier", str(other), "--passes", "2")
        return {**result, "warm": result["later_passes"][-1]["mib_per_s"]}

    mine, theirs = alternate(runs, ours, java)
    speed = median(mine, "mib_per_second")
    line = (f"| read back {name}, bytes checked | {speed:.0f} MiB/s, {median(mine, 'cpu_seconds_per_gib'):.2f} CPU s/GiB "
            f"| {median(mine, 'copy_mib_per_second'):.0f} (cp + fsync) ")  # fmt: skip
    if has_java():
        cold, warm = median(theirs, "mib_per_s"), median(theirs, "warm")
        line += f"| {cold:.0f} (warm {warm:.0f}) MiB/s | {speed / cold:.1f} x (warm {speed / warm:.1f} x) |"
    else:
        line += "| not measured | |"
    yield line


@contextmanager
def minio() -> Iterator[dict[str, str] | None]:
    """MinIO on a free port, or None where it is not built."""
    script = ROOT / "localstack" / "minio.sh"
    program = subprocess.run(
        [str(script), "path"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(program).exists():
        yield None
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as data:
        server = subprocess.Popen([str(script), "run", "--port", "19123", "--data", data],
                                  stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)  # fmt: skip
        try:
            assert server.stdout
            fields = server.stdout.readline().split()
            yield {
                "AWS_ENDPOINT_URL_S3": fields[1],
                "AWS_REGION": "us-east-1",
                **dict(field.split("=", 1) for field in fields[2:]),
            }
        finally:
            server.kill()
            server.wait()


def put_bare(environment: dict[str, str], bucket: str, tier: Path) -> Result:
    """Concurrent PUTs of the same objects by the same client."""
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        bucket, endpoint=environment["AWS_ENDPOINT_URL_S3"], region="us-east-1",
        access_key_id=environment["AWS_ACCESS_KEY_ID"], secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        virtual_hosted_style_request=False, client_options={"allow_http": True},
    )  # fmt: skip
    files = [
        (str(p.relative_to(tier)), p.read_bytes()) for p in sorted(tier.rglob("*")) if p.is_file()
    ]
    begin, cpu = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(
                lambda item: obstore.put(
                    store, f"bare-{begin}/{item[0]}", item[1], use_multipart=False
                ),
                files,
            )
        )
    seconds, size = time.perf_counter() - begin, sum(len(data) for _, data in files)
    cpu = time.process_time() - cpu
    return {"mib_per_s": size / MIB / seconds, "cpu_seconds_per_gib": cpu / size * 1024 * MIB}


def s3_rows(work: Path, runs: int) -> Iterator[str]:
    """Dispatch to MinIO, beside bare PUTs by the same client."""
    name = DISPATCHED[0]
    store, folder = store_of(work, name), work / "s3-objects"
    if not folder.exists():
        run_json([*TIERED, "attach", str(store), "--to", folder.as_uri(), "--once", "--json"])
    with minio() as environment:
        if environment is None:
            yield "| dispatch to MinIO | not measured | | | |"
            return
        import boto3

        client = boto3.client("s3", endpoint_url=environment["AWS_ENDPOINT_URL_S3"], region_name="us-east-1",
                              aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
                              aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"])  # fmt: skip
        client.create_bucket(Bucket="figures")
        count = iter(range(1000))

        def ours() -> Result:
            url = f"s3://figures/{next(count)}"
            return run_json(
                [*TIERED, "bench", "dispatch", "--store", str(store), "--to", url, "--json"],
                **environment,
            )

        mine, bare = alternate(runs, ours, lambda: put_bare(environment, "figures", folder))
    speed, limit = median(mine, "mib_per_second"), median(bare, "mib_per_s")
    yield (f"| dispatch {name}, MinIO | {speed:.0f} MiB/s, {median(mine, 'cpu_seconds_per_gib'):.2f} CPU s/GiB "
           f"| {limit:.0f} MiB/s, {median(bare, 'cpu_seconds_per_gib'):.2f} CPU s/GiB (bare PUTs) | no S3 backend "
           f"| {speed / limit:.2f} of bare |")  # fmt: skip


def status_rows(work: Path, runs: int) -> Iterator[str]:
    """Status of a tier of 1,000 queues and 10,000 objects."""
    store, tier = work / "s3-status", work / "status-tier"
    if not tier.exists():
        run_json([*TIERED, "bench", "make-store", str(store), "--topics", "4", "--queues", "250", "--messages", "100000",
                  "--body", "1024", "--seed", "1", "--json"])  # fmt: skip
        run_json(
            [
                *TIERED,
                "attach",
                str(store),
                "--to",
                tier.as_uri(),
                "--once",
                "--json",
                "--part-size",
                "24KiB",
            ]
        )
    objects = sum(1 for path in tier.rglob("*") if path.is_file())
    seconds = []
    document: Result = {}
    for _ in range(runs):
        begin = time.perf_counter()
        document = run_json([*TIERED, "status", tier.as_uri(), "--json"])
        seconds.append(time.perf_counter() - begin)
    requests = document.get("requests", "not told")
    yield f"| status, 1,000 queues, {objects:,} objects | {statistics.median(seconds):.2f} s, {requests} requests | | | |"


def help_rows(_work: Path, runs: int) -> Iterator[str]:
    """Start of the program."""
    seconds = []
    for _ in range(max(runs, 5)):
        begin = time.perf_counter()
        subprocess.run([*TIERED, "--help"], stdout=subprocess.DEVNULL, check=True, cwd=ROOT)
        seconds.append(time.perf_counter() - begin)
    yield f"| `tiered --help` | {statistics.median(seconds):.2f} s | | | |"


def memory_rows(work: Path, _runs: int) -> Iterator[str]:
    """Memory of attach on a 10 GiB store of 1,000 queues."""
    store, tier = work / "s10g", work / "tier-10g"
    if not store.exists():
        run_json([*TIERED, "bench", "make-store", str(store), "--topics", "4", "--queues", "250",
                  "--messages", "9000000", "--body", "1024", "--seed", "1", "--json"])  # fmt: skip
    shutil.rmtree(tier, ignore_errors=True)
    result = run_json(
        [*TIERED, "bench", "dispatch", "--store", str(store), "--to", tier.as_uri(), "--json"]
    )
    shutil.rmtree(tier, ignore_errors=True)
    program = "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    bare_kib = int(subprocess.check_output([sys.executable, "-c", program]))
    above = result["peak_rss_bytes"] / MIB - bare_kib / 1024
    yield (f"| attach, 10 GiB, 1,000 queues | {above:.0f} MiB above the interpreter, "
           f"{result['mib_per_second']:.0f} MiB/s, "
           f"{result['cpu_seconds_per_gib']:.2f} CPU s/GiB, "
           f"{result['requests_per_gib']:.0f} requests/GiB | | | |")  # fmt: skip


ROWS: dict[str, Callable[[Path, int], Iterator[str]]] = {
    "dispatch": dispatch_rows,
    "read": read_rows,
    "s3": s3_rows,
    "status": status_rows,
    "help": help_rows,
    "memory": memory_rows,
}


def main() -> None:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "tiered-figures")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default="dispatch,read,s3,status,help")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    print(
        "| what | ours | limit, same minutes | Java tiered store | ratio |\n|---|---|---|---|---|",
        flush=True,
    )
    for name in arguments.only.split(","):
        for line in ROWS[name](arguments.work, arguments.runs):
            print(line, flush=True)


if __name__ == "__main__":
    main()
