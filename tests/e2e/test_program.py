"""The whole way of a user, each command a process of its own: attach, look, read, check, attach again."""

from __future__ import annotations

import subprocess
from base64 import b64decode
from typing import TYPE_CHECKING, Any

import pytest
from support import captures, command_line
from support.command_line import program
from support.servers import S3Server

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STORE = "s10-consumers"


@pytest.fixture(params=["folder", "ministack", pytest.param("minio", marks=pytest.mark.go)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, str]]:
    """URL of an empty place, and the environment that it takes."""
    if request.param == "folder":
        return f"file://{tmp_path}/tier", {}
    server = request.getfixturevalue(request.param)
    assert isinstance(server, S3Server)
    nothing = {"AWS_CONFIG_FILE": "/nonexistent", "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent"}
    return f"s3://{server.bucket()}/tiers/one", {**server.environment, **nothing}


def test_the_way_of_a_user(
    place: tuple[str, dict[str, str]], stores: Callable[[str], Path]
) -> None:
    url, env = place
    store, dump = stores(STORE), captures.captured(STORE)

    def run(*arguments: str | Path) -> command_line.Ran:
        return program(*arguments, env=env).good()

    def first(*arguments: str | Path) -> dict[str, Any]:
        (broker,) = run(*arguments, "--json").document["brokers"]
        assert isinstance(broker, dict)
        return broker

    attached = run("attach", store, "--to", url, "--once")
    assert attached.out == b""
    assert f"{dump.count} messages" in attached.err
    broker = first("status", url, "--store", store)
    assert (broker["cluster"], broker["broker"]) == ("cluster-a", "broker-a")
    assert (broker["messages"], broker["lag_messages"]) == (dump.count, 0)
    listed = run("ls", url, "-o", "jsonl").rows
    assert {row["topic"] for row in listed} == set(dump.messages)
    messages = run("cat", url, "work").rows
    assert [m["msg_id"] for m in messages] == [m["msg_id"] for m in dump.messages["work"]]
    body = run("cat", url, "work", "--count", "1", "--format", "body").out
    assert body == b64decode(dump.messages["work"][0]["body_base64"])
    run("verify", url, "--deep", "--store", store)
    again = run("attach", store, "--to", url, "--once", "--seal", "--json").document
    assert (again["messages"], again["epoch"]) == (0, 2)
    assert run("cat", url, "work").rows[0]["msg_id"] == messages[0]["msg_id"]
    run("verify", url, "--deep", "--store", store)


def test_a_reader_that_has_enough_ends_cat_silently(
    stores: Callable[[str], Path], tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/tier"
    program("attach", stores("s05-crash"), "--to", url, "--once").good()
    with subprocess.Popen(
        command_line.command(("cat", url, "load")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=command_line.environment(),
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b"{")
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(120) == 0
