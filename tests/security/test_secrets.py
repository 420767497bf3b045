"""Recognisable secrets go in by every door; nothing that is written has any of them, in success or failure."""

from __future__ import annotations

import json
import signal
import subprocess
import tarfile
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import urlopen

import pytest
from support import captures, command_line
from support.faultproxy import FaultProxy
from support.servers import free_port
from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from support.servers import S3Server

KEY, SECRET, TOKEN = "AKID-SHOWN-PERHAPS", "SECRET-KEY-0badcafe", "SECRET-TOKEN-0badcafe"
HEADER, PASSWORD = "SECRET-HEADER-0badcafe", "SECRET-PASSWORD-0badcafe"
SECRETS = (SECRET, TOKEN, HEADER, PASSWORD)
HEADERS = [f"x-of-a-gateway={HEADER}", f"x-amz-meta-of-ours={HEADER}"]
"""The second has every request signed, by the other client."""


@pytest.fixture
def environment(ministack: S3Server) -> dict[str, str]:
    """Of a child process: with secrets that this server does not check."""
    return {
        "AWS_ENDPOINT_URL_S3": ministack.endpoint_url,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_SESSION_TOKEN": TOKEN,
        "AWS_REGION": "us-east-1",
        "AWS_CONFIG_FILE": "/nonexistent",
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
        "TIERED_DEBUG": "true",
        "TIERED_ATTACH_NICE": "0",
    }


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return captures.unpack("s01-basic", tmp_path)


def run(environment: dict[str, str], *arguments: str | Path) -> tuple[int, str]:
    """Run the program; code, and all that it wrote."""
    done = subprocess.run(
        command_line.command(arguments),
        capture_output=True,
        env=command_line.environment() | environment,
        timeout=50,
        check=False,
    )
    return done.returncode, (done.stdout + done.stderr).decode()


def clean(*texts: str) -> None:
    for text in texts:
        for secret in SECRETS:
            assert secret not in text


def everything(server: S3Server, bucket: str) -> Iterator[str]:
    """Keys, bodies and metadata of a bucket."""
    client = server.client()
    try:
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket):
            for found in page["Contents"]:
                yield found["Key"]
                yield client.get_object(Bucket=bucket, Key=found["Key"])["Body"].read().decode("latin-1")  # fmt: skip
    finally:
        client.close()


@pytest.mark.parametrize("header", [HEADERS[0], pytest.param(HEADERS[1], marks=pytest.mark.slow)])
def test_in_success(
    header: str, ministack: S3Server, environment: dict[str, str], store: Path, tmp_path: Path
):
    bucket = ministack.bucket()
    url, plan = f"s3://{bucket}/tier", tmp_path / "plan.json"
    environment |= {"TIERED_S3_HEADER": header}
    commands: list[tuple[str | Path, ...]] = [
        ("attach", store, "--to", url, "--once", "--json"),
        ("status", url, "--store", store, "--json"),
        ("doctor", url, "--store", store, "--json"),
        ("config", "show", "--json"),
        ("expire", url, "--ttl", "1s", "--plan", plan),
    ]
    for command in commands:
        code, said = run(environment, *command)
        assert code == 0, said
        clean(said)
    assert f"{header.partition('=')[0]}=***" in run(environment, "config", "show")[1]
    clean(plan.read_text(), *everything(ministack, bucket))


ANSWERS = {"status": (503, "SlowDown"), "denied": (403, "AccessDenied"), "expired": (403, "ExpiredToken")}  # fmt: skip
FAULTS = [
    pytest.param(fault, header, marks=[] if (fault, number) == ("denied", 0) else pytest.mark.slow)
    for fault in (*ANSWERS, "reset", "nobody")
    for number, header in enumerate(HEADERS)
]


@pytest.mark.parametrize(("fault", "header"), FAULTS)
def test_in_failure(
    fault: str, header: str, ministack: S3Server, environment: dict[str, str], store: Path
):
    """With tracebacks on."""
    url = f"s3://{ministack.bucket()}/tier"
    environment |= {"TIERED_S3_HEADER": header, "TIERED_REQUEST_TIMEOUT": "2"}
    with FaultProxy(ministack.endpoint_url) as proxy:
        status, code = ANSWERS.get(fault, (0, ""))
        for method in ("PUT", "GET"):
            kind = "reset" if fault == "reset" else "status"
            proxy.add(kind, method, times=2 if fault in {"status", "reset"} else 999, status=status, code=code)  # fmt: skip
        nobody = f"http://127.0.0.1:{free_port()}"
        environment["AWS_ENDPOINT_URL_S3"] = nobody if fault == "nobody" else proxy.url
        code_1, attached = run(environment, "attach", store, "--to", url, "--once")
        code_2, examined = run(environment, "doctor", url)
    is_refused = fault in {"denied", "expired", "nobody"}
    assert (code_1, code_2) == ((3, 3) if is_refused else (0, 0)), attached + examined
    assert ("Traceback" in attached) == is_refused
    clean(attached, examined)


@pytest.mark.parametrize(
    "arguments",
    [
        ("ls", f"s3://user:{PASSWORD}@bucket/tier"),
        ("doctor", f"s3://{PASSWORD}@bucket/tier"),
        ("ls", f"nonsense//user:{PASSWORD}@bucket/tier"),
        ("ls", f"unheard-of://user:{PASSWORD}@bucket/tier"),
        ("ls", "s3://bucket/tier", "--endpoint-url", f"http://user:{PASSWORD}@127.0.0.1:1"),
        ("ls", "s3://bucket/tier", "--endpoint-url", f"ftp://user:{PASSWORD}@127.0.0.1:1"),
        ("ls", "s3://bucket/tier", "--endpoint-url", f"http://127.0.0.1:1/?{PASSWORD}"),
        ("attach", ".", "--to", f"s3://user:{PASSWORD}@bucket/tier", "--once"),
        ("policy", "writer", f"s3://user:{PASSWORD}@bucket/tier"),
        ("policy", "writer", f"https://user:{PASSWORD}@bucket/tier"),
        ("ls", "s3://bucket/tier", "--s3-header", HEADER),
    ],
)  # fmt: skip
def test_in_arguments_that_take_none(arguments: tuple[str, ...], environment: dict[str, str]):
    code, said = run(environment, *arguments)
    assert (code, "tiered: error: " in said) == (2, True), said
    clean(said)


def test_in_the_environment_and_in_files(environment: dict[str, str], tmp_path: Path):
    environment |= {
        "TIERED_ENDPOINT_URL": f"http://user:{PASSWORD}@127.0.0.1:1",
        "TIERED_ATTACH_TO": f"s3://user:{PASSWORD}@bucket/tier",
    }
    code, said = run(environment, "config", "show")
    assert (code, "//***@127.0.0.1:1" in said) == (0, True)
    clean(said, run(environment, "config", "show", "--json")[1], run(environment, "ls", "s3://b0b/x")[1])  # fmt: skip
    texts: Iterable[str] = (
        f's3-header = {{ X = "{HEADER}" }}',
        f's3-header = [["{HEADER}"]]',
        f's3-header = ["{HEADER}"]',
        f'["{HEADER}',
    )
    for text in texts:
        (tmp_path / "tiered.toml").write_text(text)
        code, said = run(environment, "--config", tmp_path / "tiered.toml", "config", "show")
        assert code == 2, said
        clean(said)


def test_while_it_runs(ministack: S3Server, environment: dict[str, str], store: Path):
    """Metrics, health, log lines as JSON, and what `ps` shows."""
    port, url = free_port(), f"s3://{ministack.bucket()}/tier"
    environment |= {"TIERED_S3_HEADER": HEADERS[0]}
    arguments = ("attach", store, "--to", url, "--log-format", "json", "--freshness", "0.1")
    process = subprocess.Popen(
        command_line.command((*arguments, "--metrics-listen", f"127.0.0.1:{port}")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=command_line.environment() | environment,
    )
    try:
        until(lambda: "tiered_committed_messages_total 2613" in page(port), "metrics", 30)
        clean(page(port), page(port, "healthz"))
        clean(*(Path(f"/proc/{process.pid}/{name}").read_text() for name in ("cmdline", "comm")))
        time.sleep(0.2)
    finally:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 0
    clean(out.decode(), err.decode())


def page(port: int, name: str = "metrics") -> str:
    try:
        with urlopen(f"http://127.0.0.1:{port}/{name}", timeout=5) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


def test_in_a_support_bundle(
    ministack: S3Server, environment: dict[str, str], store: Path, tmp_path: Path
):
    """A log that somebody else has written has them all; and so have the environment and the settings."""
    url, file, log = f"s3://{ministack.bucket()}/tier", tmp_path / "b.tar.gz", tmp_path / "log"
    environment |= {"TIERED_S3_HEADER": HEADERS[0], "GATEWAY_PASSWORD": PASSWORD}
    environment["MINIO_ACCESS_KEY"] = "tiered"  # a word of every text, which stays readable
    key = "AKIAIOSFODNN7EXAMPLE"
    log.write_text(
        f"first\nGET s3://user:{PASSWORD}x@bucket/tier\naws_secret_access_key = other0badcafe\n{key}\n"
        f'{TOKEN} {HEADER}\nAuthorization: AWS4 Credential=other0badcafe\n"password": "other0badcafe"\nlast\n'
    )
    assert run(environment, "attach", store, "--to", url, "--once")[0] == 0
    port = free_port()
    more = (
        "--store",
        store,
        "--log-file",
        log,
        "--log-lines",
        "7",
        "--json",
        "--metrics",
        f"127.0.0.1:{port}",
    )
    code, said = run(environment, "support-bundle", url, file, *more)
    assert code == 0, said
    with tarfile.open(file) as archive:
        texts = {
            one.name.split("/")[1]: archive.extractfile(one).read().decode() for one in archive
        }  # type: ignore[union-attr]
    clean(said, *texts.values())
    for text in texts.values():
        assert "other0badcafe" not in text
        assert key not in text
        assert KEY not in text
    assert file.stat().st_mode & 0o077 == 0
    assert set(texts) == {"config.json", "doctor.json", "status.json", "log.txt", "about.json"}
    about, status = json.loads(texts["about.json"]), json.loads(texts["status.json"])
    assert "tieredmq" in about
    assert set(about["missing"]) == {
        f"{page}.txt" for page in ("metrics", "livez", "readyz", "healthz")
    }
    assert status["brokers"][0]["messages"] == 2613
    assert json.loads(texts["doctor.json"])["is_ok"]
    assert (texts["log.txt"].splitlines()[0][:8], texts["log.txt"][-4:]) == ("GET s3:/", "last")
