"""The wheel holds the four packages, all of them, and nothing else."""

import email
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = {"tiered", "backends", "fetcher", "timer"}


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    (path,) = folder.glob("tieredmq-*-py3-none-any.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_holds_exactly_the_four_packages(wheel: zipfile.ZipFile):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    (info,) = tops - PACKAGES
    assert info.startswith("tieredmq-")
    assert info.endswith(".dist-info")
    assert tops > PACKAGES


def test_holds_every_file_of_them_and_no_litter(wheel: zipfile.ZipFile, tracked: dict[str, str]):
    packed = {name for name in wheel.namelist() if name.split("/")[0] in PACKAGES}
    committed = {name for name in tracked if name.split("/")[0] in PACKAGES}
    assert committed <= packed
    assert {Path(name).suffix for name in packed} <= {Path(n).suffix for n in committed}


def test_says_what_it_is(wheel: zipfile.ZipFile):
    (path,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = email.message_from_bytes(wheel.read(path))
    assert metadata["Name"] == "tieredmq"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra") or []) == {
        "bodies",
        "charts",
        "iceberg",
        "s3",
        "spark",
        "sql",
        "test",
    }
    (entry,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "tiered = tiered.__main__:main" in wheel.read(entry).decode()


def test_brings_the_licence(wheel: zipfile.ZipFile):
    assert any(name.endswith("/LICENSE") for name in wheel.namelist())
