"""S3 servers for tests: MinIO, ministack, moto and LocalStack, each on a free port of this machine."""

from __future__ import annotations

import http.client
import itertools
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from socket import create_server
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from botocore.config import Config

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from http.server import HTTPServer
    from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]
MINIO = ROOT / "localstack" / "minio.sh"
START_TIMEOUT_S = 60.0
_NUMBERS = itertools.count(1)


@dataclass(frozen=True)
class S3Server:
    """A running server.

    Attributes:
        name: Which one.
        endpoint_url: Its address.
        access_key: Public half of the keys.
        secret_key: Secret half, good for nothing but this server.
        checks_signatures: Whether it refuses wrong keys.
        is_atomic: Whether its conditional writes are safe under races.
    """

    name: str
    endpoint_url: str
    access_key: str
    secret_key: str = field(repr=False)
    checks_signatures: bool = False
    is_atomic: bool = True

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which AWS tools, and we, find it."""
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
        }

    def client(self) -> Any:
        """A boto3 client of this server. Close it."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name="us-east-1",
            config=Config(s3={"addressing_style": "path"}, signature_version="s3v4"),
        )

    def bucket(self) -> str:
        """Make an empty bucket; its name."""
        name = f"tier-{os.getpid()}-{next(_NUMBERS)}"
        client = self.client()
        try:
            client.create_bucket(Bucket=name)
        finally:
            client.close()
        return name


def missing(what: str) -> NoReturn:
    """Leave a test out because something is not installed, or fail where nothing may be left out."""
    if os.environ.get("CI") == "true" or os.environ.get("TIERED_REQUIRE") == "1":
        pytest.fail(f"{what}, and this run may leave nothing out (CI or TIERED_REQUIRE is set)")
    pytest.skip(f"LEFT OUT: {what}")


def free_port() -> int:
    """A port of this machine that nobody listens on just now."""
    with create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def run_server(command: Sequence[str], env: dict[str, str], port: int, log: Path) -> Iterator[None]:
    """Run a server until the block ends; returns once it answers HTTP on ``port``."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env=os.environ | env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            _await_answer(process, port, log)
            yield
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _await_answer(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"server ended with {process.returncode}: {log.read_text()[-2000:]}")
        if _answers(port):
            return
        time.sleep(0.05)
    raise RuntimeError(f"server did not answer in {START_TIMEOUT_S} s: {log.read_text()[-2000:]}")


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/")
        connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True


@contextmanager
def run_ministack(folder: Path) -> Iterator[S3Server]:
    """ministack: fast, atomic, checks no signatures."""
    program = Path(sys.executable).with_name("ministack")
    if not program.exists():
        missing("ministack is not installed; tests against it")
    port = free_port()
    env = {
        "BIND_HOST": "127.0.0.1",
        "GATEWAY_PORT": str(port),
        "SERVICES": "s3",
        "LOG_LEVEL": "ERROR",
    }
    with run_server([str(program)], env, port, folder / "ministack.log"):
        yield S3Server("ministack", f"http://127.0.0.1:{port}", "test", "test")


@contextmanager
def run_minio(folder: Path) -> Iterator[S3Server]:
    """MinIO: a real server, which checks everything."""
    path = subprocess.run([MINIO, "path"], check=True, capture_output=True, text=True).stdout
    if not Path(path.strip()).exists():
        missing(f"MinIO is not built (run {MINIO.relative_to(ROOT)} install); tests against it")
    port = free_port()
    command = [str(MINIO), "run", "--port", str(port), "--data", str(folder / "data")]
    env = {"MINIO_ROOT_USER": "tiered", "MINIO_ROOT_PASSWORD": "tiered-secret"}
    with run_server(command, env, port, folder / "minio.log"):
        endpoint = f"http://127.0.0.1:{port}"
        yield S3Server("minio", endpoint, "tiered", "tiered-secret", checks_signatures=True)


@contextmanager
def run_moto() -> Iterator[S3Server]:
    """moto, in this process: the shapes of the API. Its conditional writes are not atomic."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield S3Server("moto", f"http://{host}:{port}", "test", "test", is_atomic=False)
    finally:
        server.stop()


@contextmanager
def run_localstack(folder: Path) -> Iterator[S3Server]:
    """LocalStack, installed anew: takes a minute. Checks no keys; two writers may win under stress."""
    if sys.version_info[:2] != (3, 11):
        missing("LocalStack runs on Python 3.11 only; tests against it")
    port = free_port()
    command = [sys.executable, str(ROOT / "localstack" / "run_host.py")]
    env = os.environ | {"LOCALSTACK_STATE": str(folder)}
    up = [*command, "up", "--port", str(port), "--buckets", "tier-one,tier-two"]
    subprocess.run(up, check=True, env=env, stdout=subprocess.DEVNULL)
    try:
        endpoint = f"http://127.0.0.1:{port}"
        yield S3Server("localstack", endpoint, "test", "test", is_atomic=False)
    finally:
        subprocess.run([*command, "down"], check=True, env=env)


@contextmanager
def serving(server: HTTPServer) -> Iterator[None]:
    """Let a server of this process answer, until the block ends."""
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def use_server(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the environment name ``server`` and hide what else this machine knows of AWS."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nonexistent")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
