"""A tier that is full: said, waited out, and nothing lost when there is room again."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support import captures, command_line, tier_checks
from support.attachments import Running
from support.disks import Disk, small_disk
from support.faultproxy import FaultProxy

from backends.s3_settings import S3Options
from tiered.attach.observe import is_well
from tiered.keys import DATA_ROOTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.servers import S3Server

ANSWERS = [
    pytest.param(507, "XMinioStorageFull"),
    pytest.param(400, "XMinioAdminBucketQuotaExceeded", marks=pytest.mark.slow),
    pytest.param(403, "QuotaExceeded", marks=pytest.mark.slow),
]


@pytest.fixture
def server(ministack: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nonexistent")
    for name, value in ministack.environment.items():
        monkeypatch.setenv(name, value)
    return ministack


@pytest.mark.parametrize(("status", "code"), ANSWERS)
def test_a_full_bucket(
    server: S3Server, tmp_path: Path, status: int, code: str, caplog: pytest.LogCaptureFixture
):
    url = f"s3://{server.bucket()}/tier"
    with (
        FaultProxy(server.endpoint_url) as proxy,
        Running(tmp_path, url, S3Options(endpoint_url=proxy.url)) as running,
    ):
        running.level(1 / 3)
        for root in DATA_ROOTS:
            proxy.add("status", "PUT", path=f"/{root}", times=10_000, status=status, code=code)
        running.growing.grow(running.growing.whole_end)
        running.until(lambda: running.waits_for("full"), "that it says what it waits for")
        assert f"waiting (full): {proxy.url} answered {status} {code}" in caplog.text
        assert "make room" in caplog.text
        proxy.rules.clear()
        running.level()
        running.until(lambda: not running.waits_for("full"), "the end of the trouble")
    running.check_whole()


def test_once_ends_and_says_why(server: S3Server, tmp_path: Path):
    store = captures.unpack("s01-basic", tmp_path)
    with FaultProxy(server.endpoint_url) as proxy:
        for root in DATA_ROOTS:
            proxy.add(
                "status", "PUT", path=f"/{root}", times=10_000, status=507, code="XMinioStorageFull"
            )
        options = ["--endpoint-url", proxy.url, "--give-up-seconds", "1", "--freshness", "0.1"]
        options += ["--drain-seconds", "0"]
        ran = command_line.here(
            "attach", store, "--to", f"s3://{server.bucket()}", "--once", *options
        )
    assert ran.code == 3
    assert "nothing could be uploaded" in ran.error
    assert "waiting (full)" in ran.err
    assert "XMinioStorageFull" in ran.err


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with small_disk(tmp_path / "disk", "600k") as made:
        yield made


def test_a_full_disk(disk: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    began_s = time.monotonic()
    with Running(tmp_path, f"file://{disk.path}/tier") as running:
        running.growing.grow(running.growing.whole_end)
        running.until(lambda: running.waits_for("full"), "that it says what it waits for")
        assert "waiting (full)" in caplog.text
        running.until(lambda: "nothing could be committed" in is_well(running.attachment), "health")
        assert "full: No space left" in is_well(running.attachment)
        running.until(lambda: "nothing could be committed for" in caplog.text, "a line in the log")
        disk.resize("64m")
        running.level()
        running.until(lambda: is_well(running.attachment) == "", "that it is well again")
        running.until(lambda: "messages are committed again" in caplog.text, "that the log tells")
    running.check_whole()
    assert disk.litter() == []
    told = [line for line in caplog.messages if "No space" in line and "upload" not in line]
    minutes = 1 + (time.monotonic() - began_s) // 60
    assert 1 <= len(told) <= minutes, told  # not one for each part, entry and renewal of the lease
    assert all(line.endswith("make room") for line in told)
    assert [r for r in caplog.records if "upload" in r.message and r.levelname == "WARNING"] == []


needs_full_device = pytest.mark.skipif(
    not Path("/dev/full").exists(),
    reason="LEFT OUT: no /dev/full here, the device that is always full (Linux has it)",
)


@needs_full_device
@pytest.mark.parametrize("form", ["text", "json"])
def test_logs_that_nobody_takes_stop_no_work(tmp_path: Path, form: str):
    """Neither what is done nor the exit code depends on whether stderr has room."""
    store, url = captures.unpack("s01-basic", tmp_path), f"file://{tmp_path}/tier"
    for arguments, code in (
        (["attach", str(store), "--to", url, "--once", "--log-format", form], 0),
        (["ls", f"file://{tmp_path}/elsewhere", "--log-format", form], 2),
    ):
        with Path("/dev/full").open("wb") as full:
            done = subprocess.run(
                command_line.command(arguments),
                stdout=subprocess.PIPE,
                stderr=full,
                env=command_line.environment(),
                timeout=300,
                check=False,
            )
        assert done.returncode == code, arguments
    tier_checks.check_sound(url, store)


CHATTER = """
import logging, os
from tiered.cli.stderr import logging_to_stderr
with logging_to_stderr("json", logging.INFO, lambda: 0):
    for _ in range(4000):  # more than a pipe holds
        os.write(2, b"of a library " * 8 + b"\\n")
"""


@needs_full_device
def test_what_libraries_write_waits_for_no_room():
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-c", CHATTER]
        assert subprocess.run(command, stderr=full, timeout=60, check=False).returncode == 0


def test_a_run_that_ends_for_a_full_disk_names_it_in_its_last_line(disk: Disk, tmp_path: Path):
    store = captures.unpack("s01-basic", tmp_path)
    more = ("--once", "--give-up-seconds", "1", "--bundle-size", "4MiB", "--drain-seconds", "0")
    disk.resize("100k")
    ran = command_line.here("attach", store, "--to", f"file://{disk.path}/tier", *more)
    last = ran.err.splitlines()[-1]
    assert ran.code == 3
    assert re.search(r"nothing could be uploaded for \d+ s: full: No space left on device", last), (
        ran.err
    )
    assert f"(file://{disk.path}/tier " in last
    assert "make room" in last
