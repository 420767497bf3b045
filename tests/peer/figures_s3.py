"""Rows of the table of figures that need an S3 server: MinIO, and one that drops what it gets."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from figures_common import MANY, MIB, ROOT, SIXTEEN, TIERED, Bench, Result, Row, median, run_json

if TYPE_CHECKING:
    from collections.abc import Iterator


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


@contextmanager
def null_server() -> Iterator[dict[str, str]]:
    """A server that keeps small objects only, so that it costs next to nothing."""
    server = subprocess.Popen(
        [sys.executable, str(ROOT / "localstack" / "nulls3.py"), "--keep", "65536"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout
        yield {
            "AWS_ENDPOINT_URL_S3": server.stdout.readline().split()[1],
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
        }
    finally:
        server.kill()
        server.wait()


def s3_rows(bench: Bench) -> Iterator[Row]:
    """Dispatch to MinIO and to the null server, beside bare PUTs by the same client."""
    with minio() as environment:
        for name, goal in ((SIXTEEN, 0.8), (MANY, 0.7)):
            if environment is None:
                yield Row(f"dispatch {name}, MinIO", "not measured")
                continue
            make_bucket(environment)
            yield one_row(bench, name, "MinIO", environment, goal)
    with null_server() as environment:
        yield one_row(bench, SIXTEEN, "a server that drops everything", environment, 0.0)


def make_bucket(environment: dict[str, str]) -> None:
    """Make the bucket of the rows."""
    import boto3

    client = boto3.client("s3", endpoint_url=environment["AWS_ENDPOINT_URL_S3"], region_name="us-east-1",
                          aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
                          aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"])  # fmt: skip
    if not any(bucket["Name"] == "figures" for bucket in client.list_buckets()["Buckets"]):
        client.create_bucket(Bucket="figures")


def one_row(bench: Bench, name: str, server: str, environment: dict[str, str], goal: float) -> Row:
    """Dispatch to one server in turn with bare PUTs of the same objects."""
    store = bench.store(name)
    folder = bench.work / f"s3-objects-{store.name}"
    if not folder.exists():
        run_json([*TIERED, "attach", str(store), "--to", folder.as_uri(), "--once", "--json"])

    def ours() -> Result:
        url = f"s3://figures/{time.time_ns()}"
        command = [*TIERED, "bench", "dispatch", "--store", str(store), "--to", url, "--json"]
        return run_json(command, **environment)

    mine, bare = bench.alternate(ours, lambda: put_bare(environment, "figures", folder))
    speed, limit = median(mine, "mib_per_second"), median(bare, "mib_per_s")
    cpu, bare_cpu = median(mine, "cpu_seconds_per_gib"), median(bare, "cpu_seconds_per_gib")
    share = statistics.median(
        m["mib_per_second"] / b["mib_per_s"] for m, b in zip(mine, bare, strict=True)
    )
    more = cpu - bare_cpu
    return Row(f"dispatch {name}, {server}", f"{speed:.0f} MiB/s, CPU {cpu:.2f}",
               limit=f"{share:.2f} of bare PUTs ({limit:.0f} MiB/s): CPU {more:+.2f}",
               goal=f"{goal:g} of bare PUTs" if goal else "CPU +2",
               reached=share >= goal if goal else more <= 2)  # fmt: skip
