"""The wheel holds the four packages, all of them, and nothing else."""

import email
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = {"tiered", "backends", "fetcher", "timer"}
EXTRAS = {"bodies", "charts", "fsspec", "iceberg", "metrics", "s3", "s3fs", "spark", "sql", "test"}
SECONDS_MAX = 270
"""Far above what any extra takes beside Spark's download; far below what trying pairs takes: then it hangs."""


@pytest.fixture(scope="module")
def built(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    (path,) = folder.glob("tieredmq-*-py3-none-any.whl")
    return path


@pytest.fixture(scope="module")
def wheel(built: Path) -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(built) as archive:
        yield archive


@pytest.fixture(scope="module")
def pip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pip that comes with Python, in an environment without anything else."""
    folder = tmp_path_factory.mktemp("plain")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder / "bin" / "pip"


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
    assert "tiered/cli/demo_kafka.tar.gz" in packed  # no text, so not among those
    suffixes = {Path(name).suffix for name in committed} | {".gz"}
    assert {Path(name).suffix for name in packed} <= suffixes


def test_says_what_it_is(wheel: zipfile.ZipFile):
    (path,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = email.message_from_bytes(wheel.read(path))
    assert metadata["Name"] == "tieredmq"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra") or []) == EXTRAS
    (entry,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "tiered = tiered.__main__:main" in wheel.read(entry).decode()


def test_brings_the_licence(wheel: zipfile.ZipFile):
    assert any(name.endswith("/LICENSE") for name in wheel.namelist())


@pytest.mark.slow  # half a minute each: all that pip asks the index for, and the whole of Spark
@pytest.mark.parametrize("extra", [*sorted(EXTRAS), ",".join(sorted(EXTRAS))])
def test_plain_pip_resolves_each_extra_without_searching(extra: str, built: Path, pip: Path):
    """Where it has to try versions one after another it says so, and each release of theirs makes it longer."""
    command = [pip, "install", "--dry-run", "--no-cache-dir", f"{built}[{extra}]"]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=SECONDS_MAX)
    assert ran.returncode == 0, ran.stderr
    assert "Would install" in ran.stdout
    searched = [line for line in ran.stdout.splitlines() if "multiple versions" in line]
    assert searched == []
