"""Credentials that are revoked, or expire and are refreshed, while messages are tiered: waited out, said, nothing lost."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
from support import captures, command_line
from support.attachments import Running
from support.minio_admin import MinioAdmin

from backends.s3_settings import S3Options
from tiered.upkeep.doctor import Grounds, policy

if TYPE_CHECKING:
    from pathlib import Path

    from support.servers import S3Server

pytestmark = pytest.mark.go
SECRET = "one-secret-of-a-user"


@pytest.fixture
def admin(minio: S3Server, monkeypatch: pytest.MonkeyPatch) -> MinioAdmin:
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nonexistent")
    for name, value in minio.environment.items():
        monkeypatch.setenv(name, value)
    return MinioAdmin(minio)


@pytest.fixture
def url(minio: S3Server) -> str:
    return f"s3://{minio.bucket()}/tier"


@pytest.fixture
def user(admin: MinioAdmin, url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A writer with its policy, whose keys are in the environment."""
    name = url.split("/")[2]
    admin.add_policy(name, policy("writer", Grounds(url)))
    admin.add_user(name, SECRET, name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", name)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    return name


def test_a_user_who_is_locked_out_for_a_while(
    admin: MinioAdmin, user: str, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with Running(tmp_path, url) as running:
        running.level(0.5)
        admin.enable(user, enabled=False)
        running.growing.grow(running.growing.whole_end * 3 // 4)
        running.until(lambda: running.waits_for("permission"), "that it says what it waits for")
        said = [record.message for record in caplog.records if record.name == "tiered.attach"]
        assert any("waiting (permission)" in line and "InvalidAccessKeyId" in line for line in said)
        running.growing.grow(running.growing.whole_end)
        admin.enable(user, enabled=True)
        running.level()
        running.until(lambda: not running.waits_for("permission"), "the end of the trouble")
    running.check_whole()
    assert any("requests again, after" in record.message for record in caplog.records)
    assert SECRET not in caplog.text


def test_a_right_that_is_taken_away_for_a_while(
    admin: MinioAdmin, user: str, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with Running(tmp_path, url) as running:
        running.level(0.5)
        admin.add_policy(user, policy("reader", Grounds(url)))
        running.growing.grow(running.growing.whole_end)
        running.until(lambda: running.waits_for("permission"), "that it says what it waits for")
        assert "the permission s3:PutObject" in caplog.text
        admin.add_policy(user, policy("writer", Grounds(url)))
        running.level()
    running.check_whole()


def test_once_ends_and_says_why(admin: MinioAdmin, user: str, url: str, tmp_path: Path):
    store = captures.unpack(captures.NAMES[0], tmp_path)
    admin.add_policy(user, policy("reader", Grounds(url)))
    ran = command_line.here("attach", store, "--to", url, "--once")
    assert ran.code == 3
    assert "the permission s3:PutObject" in ran.error


PROGRAM = """
import datetime, json, pathlib
folder = pathlib.Path(__file__).parent
with (folder / "calls").open("a") as calls:
    calls.write("x")
keys = json.loads((folder / "sessions.json").read_text())[(folder / "second").exists()]
end = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=30)
print(json.dumps({**keys, "Version": 1, "Expiration": end.isoformat()}))
"""
CLIENTS = [
    pytest.param(S3Options(), id="fast-client"),
    pytest.param(
        S3Options(headers={"x-amz-request-payer": "requester"}),
        id="signing-client",  # which asks before each request when keys live so shortly
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize("options", CLIENTS)
def test_keys_of_a_session_that_expire_are_asked_for_anew(
    *, admin: MinioAdmin, user: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    options: S3Options,
):  # fmt: skip
    """Each session says that it ends soon; the first one's user is locked out for good, when the second's is there."""
    admin.add_user(f"{user}-2", SECRET, user)
    sessions = [admin.session(name, SECRET, 900) for name in (user, f"{user}-2")]
    (tmp_path / "sessions.json").write_text(json.dumps(sessions, default=str))
    program = tmp_path / "keys.py"
    program.write_text(PROGRAM)
    config = tmp_path / "config"
    config.write_text(f"[default]\ncredential_process = {sys.executable} {program}\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    with Running(tmp_path, url, options) as running:
        running.level(0.5)
        (tmp_path / "second").touch()
        running.level(0.75)
        admin.enable(user, enabled=False)
        running.level()
    running.check_whole()
    assert len((tmp_path / "calls").read_text()) >= 2


@pytest.mark.parametrize("signing", [(), ("--s3-header", "x-amz-request-payer=requester")])
def test_a_source_of_keys_that_fails(
    *, admin: MinioAdmin, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signing: tuple[str, ...]
):  # fmt: skip
    """What it prints may hold secrets, so only that it failed is told."""
    program = tmp_path / "keys.py"
    program.write_text("import sys\nsys.exit('no keys, and SECRET-IN-A-COMPLAINT')\n")
    config = tmp_path / "config"
    config.write_text(f"[default]\ncredential_process = {sys.executable} {program}\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    ran = command_line.here("ls", url, *signing)
    assert ran.code == 2
    assert "keys come from, there are none now: run its credential_process" in ran.error
    assert "SECRET" not in ran.err
