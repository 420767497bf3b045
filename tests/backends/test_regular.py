"""A FIFO or device in place of a file that a person has named is said at once, and waited for by nobody."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from backends.regular import read_regular
from tests.e2e import harness

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(params=["fifo", "socket", "device", "folder"])
def odd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "odd"
    if request.param == "device":
        yield Path("/dev/zero")  # which has no end
        return
    if request.param == "fifo":
        os.mkfifo(path)
    elif request.param == "folder":
        path.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        if request.param == "socket":
            listener.bind(str(path))
        yield path


def test_what_is_no_regular_file_is_an_error(odd: Path):
    with pytest.raises(OSError):
        read_regular(odd)


def test_plans_configurations_and_bundles_that_are_none(odd: Path, tmp_path: Path):
    (tmp_path / "tier").mkdir()
    url = f"file://{tmp_path}/tier"
    ran = harness.here("config", "show", "--config", odd)
    assert (ran.code, str(odd) in ran.error) == (2, True)
    ran = harness.here(
        "ls", "s3://b/p", "--ca-bundle", odd, "--endpoint-url", "https://localhost:1"
    )
    assert ran.code in {2, 3}
    assert harness.here("gc", url, "--apply", odd).code == 2


def test_what_is_a_regular_file_is_read(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"abc")
    assert read_regular(tmp_path / "a") == b"abc"
