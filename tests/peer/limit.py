#!/usr/bin/env python3
"""The raw limits of this machine on the data of one local store: what no tiered storage can beat.

    limit.py --store DIR --tier DIR2 [--runs 3] [--objects 24] [--servers nulls3,ministack]
             [--nulls3 FILE]

Prints one line of JSON for each measurement: the median of the runs, CPU of the client and of the
server, and how many cores other processes kept busy meanwhile. Wants boto3, obstore and ministack:
run it with the Python that `make test` sets up.

- copy        `cp --reflink=never` of the commit log into the tier's folder, from page cache to page
              cache; and again with fsync
- crc         CRC32 of the commit log in 8 MiB chunks; and of each body, compared with the CRC of
              its record
- put, get    objects of 8 MiB (the first bytes of the commit log), 4 requests at a time, with
              obstore and with boto3. The null server counts bodies and drops them, and answers a
              GET with bytes that it has at hand: this is the client's cost alone.
"""

import argparse
import json
import mmap
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Self

Put = Callable[[str, bytes], object]
Get = Callable[[str, int], int]  # (key, bytes asked for) -> bytes received

OBJECT_BYTES = 8 << 20
CONCURRENCY = 4
HERE = Path(__file__).resolve().parent
BLANK_MAGIC = -875286124


def machine_cpu_seconds() -> float:
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return sum(int(fields[i]) for i in (1, 2, 3, 6, 7)) / os.sysconf("SC_CLK_TCK")


def own_cpu_seconds() -> float:
    times = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(t.ru_utime + t.ru_stime for t in times)


def process_cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(
    name: str, work: Callable[[], int], runs: int, server: int | None = None, **facts: object
) -> None:
    """Runs `work`, which returns its number of bytes, and prints the median run."""
    results = []
    for _ in range(runs):
        server_cpu = process_cpu_seconds(server) if server else 0.0
        machine, cpu, began = machine_cpu_seconds(), own_cpu_seconds(), time.perf_counter()
        size = work()
        seconds = time.perf_counter() - began
        cpu = own_cpu_seconds() - cpu
        server_cpu = process_cpu_seconds(server) - server_cpu if server else 0.0
        others = max(0.0, (machine_cpu_seconds() - machine - cpu - server_cpu) / seconds)
        results.append((seconds, size, cpu, server_cpu, others))
    seconds, size, cpu, server_cpu, others = sorted(results)[len(results) // 2]
    out = {
        "limit": name,
        **facts,
        "bytes": size,
        "seconds": round(seconds, 3),
        "mib_per_s": round(size / seconds / 2**20, 1),
        "cpu_seconds": round(cpu, 3),
        "other_cores": round(others, 2),
        "fastest_seconds": round(min(r[0] for r in results), 3),
    }
    if server:
        out["server_cpu_seconds"] = round(server_cpu, 3)
    print(json.dumps(out), flush=True)


def commit_log(store: Path) -> list[tuple[Path, int]]:
    """The files of the commit log, each with the number of bytes that records fill."""
    files = []
    for path in sorted((store / "commitlog").iterdir()):
        end = max((at + size for at, size, _, _ in records(path)), default=0)
        if end:
            files.append((path, end))
    return files


def records(path: Path) -> Iterator[tuple[int, int, int, memoryview]]:
    """(position, size, CRC, body) of each record; with IPv4 hosts, as make-store writes them."""
    with path.open("rb") as file:
        view = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    at = 0
    while at + 88 <= len(view):
        size, magic, crc = struct.unpack_from(">iiI", view, at)
        if size <= 0 or magic == BLANK_MAGIC:
            return
        (body,) = struct.unpack_from(">i", view, at + 84)
        yield at, size, crc, view[at + 88 : at + 88 + body]
        at += size


def copy_all(files: list[tuple[Path, int]], target: Path, *, sync: bool) -> int:
    for path, _ in files:
        copied = target / path.name
        copied.unlink(missing_ok=True)
        subprocess.run(["cp", "--reflink=never", path, copied], check=True)
        if sync:
            subprocess.run(["sync", copied], check=True)
    return sum(end for _, end in files)


def measure_copy(files: list[tuple[Path, int]], tier: Path, runs: int) -> None:
    tier.mkdir(parents=True, exist_ok=True)
    target = Path(tempfile.mkdtemp(prefix="limit-", dir=tier))
    try:
        for sync in (False, True):
            measure("copy", partial(copy_all, files, target, sync=sync), runs, fsync=sync)
    finally:
        shutil.rmtree(target)


def measure_crc(files: list[tuple[Path, int]], runs: int) -> None:
    def chunks() -> int:
        for path, end in files:
            with path.open("rb") as file:
                for at in range(0, end, OBJECT_BYTES):
                    zlib.crc32(file.read(min(OBJECT_BYTES, end - at)))
        return sum(end for _, end in files)

    def bodies() -> int:
        size = 0
        for path, _ in files:
            for at, record, crc, body in records(path):
                if zlib.crc32(body) & 0x7FFFFFFF != crc:
                    raise ValueError(f"{path} at {at}: wrong CRC")
                size += record
        return size

    measure("crc", chunks, runs, of="8 MiB chunks")
    measure("crc", bodies, runs, of="each body, checked")


class Server:
    """A server on a free port of this machine, until the block ends."""

    def __init__(self, name: str, nulls3: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder = tempfile.TemporaryDirectory(prefix="limit-server-")
        environment = {
            **os.environ,
            "BIND_HOST": "127.0.0.1",
            "GATEWAY_PORT": str(self.port),
            "LOG_LEVEL": "ERROR",
        }
        command = (
            [sys.executable, str(nulls3), str(self.port)]
            if name == "nulls3"
            else [str(Path(sys.executable).parent / "ministack")]
        )
        self._process = subprocess.Popen(
            command,
            env=environment,
            cwd=self._folder.name,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    self.__exit__()
                    raise
                time.sleep(0.1)
            else:
                return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(10)
        self._folder.cleanup()


def clients(url: str) -> dict[str, tuple[Put, Get]]:
    import boto3
    import botocore.config
    import obstore
    from obstore.store import S3Store

    boto = boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id="a",
        aws_secret_access_key="b",
        config=botocore.config.Config(
            max_pool_connections=CONCURRENCY,
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )
    if not any(bucket["Name"] == "bucket" for bucket in boto.list_buckets().get("Buckets", [])):
        boto.create_bucket(Bucket="bucket")

    def rust(unsigned: bool) -> tuple[Callable[[str, bytes], object], Callable[[str, int], int]]:
        store = S3Store(
            "bucket",
            endpoint=url,
            region="us-east-1",
            access_key_id="a",
            secret_access_key="b",
            unsigned_payload=unsigned,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )
        return (
            lambda key, data: obstore.put(store, key, data, use_multipart=False),
            lambda key, size: len(obstore.get_range(store, key, start=0, end=size)),
        )

    return {
        "obstore, body signed": rust(False),
        "obstore, body not signed": rust(True),
        "boto3, body signed": (
            lambda key, data: boto.put_object(Bucket="bucket", Key=key, Body=data),
            lambda key, size: len(
                boto.get_object(Bucket="bucket", Key=key, Range=f"bytes=0-{size - 1}")[
                    "Body"
                ].read()
            ),
        ),
    }


def put_all(pool: Executor, put: Put, keys: list[str], data: list[bytes]) -> int:
    list(pool.map(put, keys, data))
    return sum(map(len, data))


def get_all(pool: Executor, get: Get, keys: list[str], data: list[bytes]) -> int:
    return sum(pool.map(get, keys, map(len, data)))


def measure_s3(
    server_name: str, files: list[tuple[Path, int]], objects: int, runs: int, nulls3: Path
) -> None:
    with files[0][0].open("rb") as file:
        chunks = min(objects, max(1, files[0][1] // OBJECT_BYTES))
        data = [file.read(OBJECT_BYTES) for _ in range(chunks)]
    while len(data) < objects:
        data.append(data[-1])
    with (
        Server(server_name, nulls3) as server,
        ThreadPoolExecutor(CONCURRENCY) as pool,
    ):
        for name, (put, get) in clients(server.url).items():
            # The null server reads the size of the answer from the end of the key.
            keys = [f"{i:04d}/o{len(chunk)}" for i, chunk in enumerate(data)]
            facts = {"client": name, "against": server_name, "objects": len(data)}
            measure("put", partial(put_all, pool, put, keys, data), runs, server.pid, **facts)
            measure("get", partial(get_all, pool, get, keys, data), runs, server.pid, **facts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--tier", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--objects", type=int, default=24)
    parser.add_argument("--servers", default="nulls3")
    parser.add_argument("--nulls3", type=Path, default=HERE.parents[1] / "localstack" / "nulls3.py")
    args = parser.parse_args()
    if "nulls3" in args.servers and not args.nulls3.exists():
        parser.error(
            f"no null server at {args.nulls3}; name it with --nulls3, or leave it out of --servers"
        )
    files = commit_log(args.store)
    measure_copy(files, args.tier, args.runs)
    measure_crc(files, args.runs)
    for server in filter(None, args.servers.split(",")):
        measure_s3(server, files, args.objects, args.runs, args.nulls3)


if __name__ == "__main__":
    main()
