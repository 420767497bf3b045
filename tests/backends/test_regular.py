"""A FIFO or device in place of a file that a person has named is said at once, and waited for by nobody."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support import captures, command_line
from support.disks import small_disk

from backends.local_files import read_regular, write_regular

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
    ran = command_line.here("config", "show", "--config", odd)
    assert (ran.code, str(odd) in ran.error) == (2, True)
    ran = command_line.here(
        "ls", "s3://b/p", "--ca-bundle", odd, "--endpoint-url", "https://localhost:1"
    )
    assert ran.code in {2, 3}
    assert command_line.here("gc", url, "--apply", odd).code == 2


@pytest.fixture(scope="module")
def tier(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tier")
    url = f"file://{folder}/tier"
    store = captures.unpack("s01-basic", folder)
    command_line.here("attach", store, "--to", url, "--once").good()
    return url


@pytest.mark.timeout(120)
@pytest.mark.parametrize("what", [("gc",), ("expire", "--ttl", "1d"), ("rebuild",)])
def test_a_plan_is_neither_read_from_nor_written_to_what_is_no_file(
    odd: Path, tier: str, what: tuple[str, ...]
):
    name, *more = what
    for option in ("--plan", "--apply"):
        ran = command_line.here(name, tier, *more, option, odd)
        assert (ran.code, str(odd) in ran.error, "the plan cannot be" in ran.error) == (2, True, True)  # fmt: skip


def test_a_plan_for_which_there_is_no_room_leaves_the_one_before(tier: str, tmp_path: Path):
    with small_disk(tmp_path / "disk", "16k") as disk:
        plan = disk.path / "plan.json"
        command_line.here("gc", tier, "--plan", plan).good()
        before = plan.read_bytes()
        with contextlib.suppress(OSError), (disk.path / "ballast").open("wb", 0) as file:
            while file.write(b"x" * 512):
                pass
        ran = command_line.here("gc", tier, "--plan", plan)
        assert ran.code == 2
        assert "No space left on device" in ran.error
        assert "make room" in ran.error
        assert plan.read_bytes() == before
        assert {path.name for path in disk.path.iterdir()} == {"plan.json", "ballast"}


def test_what_is_written_takes_the_place_of_a_file_and_keeps_its_mode_and_its_links(tmp_path: Path):
    plan, link = tmp_path / "plan", tmp_path / "link"
    plan.write_bytes(b"before")
    plan.chmod(0o640)
    link.symlink_to(plan)
    write_regular(link, b"after")
    assert (plan.read_bytes(), plan.stat().st_mode & 0o777) == (b"after", 0o640)
    assert link.is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"plan", "link"}


def test_what_is_a_regular_file_is_read(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"abc")
    assert read_regular(tmp_path / "a") == b"abc"


def test_what_a_crash_left_of_a_writer_of_the_same_number_is_in_nobody_s_way(tmp_path: Path):
    # In a container each run may have the same number.
    path = tmp_path / "plan"
    (tmp_path / f"plan.{os.getpid()}.tmp").write_bytes(b"ha")
    umask = os.umask(0o027)
    try:
        write_regular(path, b"whole")
    finally:
        os.umask(umask)
    assert path.read_bytes() == b"whole"
    assert path.stat().st_mode & 0o777 == 0o640
    assert len(list(tmp_path.iterdir())) == 2
