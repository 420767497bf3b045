"""The wheel holds the four packages and nothing else; the sdist what a wheel is made of; both say what they are."""

import email
import importlib.util
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest
from support.environments import fetched
from support.servers import missing

from tiered import __version__

PACKAGES = {"tiered", "backends", "fetcher", "timer"}
PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
EXTRAS = sorted(tomllib.loads(PYPROJECT.read_text("utf-8"))["project"]["optional-dependencies"])
ALL = ",".join(EXTRAS)
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
def metadata(wheel: zipfile.ZipFile) -> Message:
    (path,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(wheel.read(path))


@pytest.fixture(scope="module")
def sdist(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder)]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    (path,) = folder.glob("tieredmq-*.tar.gz")
    return path


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


def test_says_what_it_is(wheel: zipfile.ZipFile, metadata: Message):
    assert metadata["Name"] == "tieredmq"
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert sorted(metadata.get_all("Provides-Extra") or []) == EXTRAS
    (entry,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    points = wheel.read(entry).decode()
    assert "[console_scripts]\ntiered = tiered.__main__:main" in points
    assert "[fsspec.specs]\ntiered = tiered.api.filesystem:TieredFileSystem" in points


def test_names_the_pythons_that_ci_tests(root: Path, metadata: Message):
    named = re.findall(
        r"Python :: (3\.\d+)$", "\n".join(metadata.get_all("Classifier")), re.MULTILINE
    )
    workflow = (root / ".github/workflows/ci.yml").read_text()
    (matrix,) = re.findall(r"^ +python: \[(.*)\]$", workflow, re.MULTILINE)
    assert matrix.replace('"', "").split(", ") == named
    assert metadata["Requires-Python"] == f">={named[0]}"
    assert re.findall(r" run: (.*)$", workflow, re.MULTILINE) == [".ci/run"]


def test_its_page_leads_nowhere_that_is_not_there(root: Path, metadata: Message):
    """Who reads it on an index has no repository beside it."""
    page = metadata.get_payload()
    assert "RocketMQ keeps messages on" in page.replace("`", "")
    assert re.findall(r"\]\((?!https?:)[^)]*\)", page) == []

    spec = importlib.util.spec_from_file_location("hatch_build", root / "hatch_build.py")
    assert spec
    assert spec.loader
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    text, home = "[words](docs/a.md#b) ![alt](docs/a.svg) [out](https://x.y/z)", "https://h/o/r"
    assert hook.page(text, "", "v1") == "words  [out](https://x.y/z)"
    assert hook.page(text, home, "v1") == (
        "[words](https://h/o/r/blob/v1/docs/a.md#b) ![alt](https://h/o/r/raw/v1/docs/a.svg)"
        " [out](https://x.y/z)"
    )
    assert hook.links(home)["Source"] == home
    assert hook.links("") == {}


def test_the_release_builds_with_the_locked_backend(root: Path):
    workflow = (root / ".github/workflows/release.yml").read_text()
    (wanted,) = re.findall(
        r'^requires = \["(.*)"\]', (root / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert f"pip install {wanted}" in workflow
    assert "TIERED_SOURCE_URL" in workflow


def test_hooks_before_a_commit_are_what_lint_runs(root: Path):
    hooks = (root / ".pre-commit-config.yaml").read_text()
    entries = [entry.split()[:2] for entry in re.findall(r" entry: (.*)$", hooks, re.MULTILINE)]
    lint = (root / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    run = [line.split()[:2] for line in lint.replace("$(BIN)", ".venv/bin").splitlines()[1:]]
    assert [words[0] for words in entries] == [words[0] for words in run]
    assert all((root / words[0]).exists() for words in entries)


def test_the_sdist_is_small_and_makes_the_same_wheel(
    sdist: Path, wheel: zipfile.ZipFile, tmp_path: Path
):
    assert sdist.stat().st_size < 4 << 20
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    assert {path.name for path in folder.iterdir()} == PACKAGES | {
        ".gitignore", "CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "SECURITY.md", "hatch_build.py",
        "pyproject.toml",
    }  # fmt: skip
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    (built,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(built) as again:
        assert {one.filename: one.CRC for one in again.infolist()} == {
            one.filename: one.CRC for one in wheel.infolist()
        }


def test_brings_the_licence(wheel: zipfile.ZipFile):
    assert any(name.endswith("/LICENSE") for name in wheel.namelist())


@pytest.mark.slow  # half a minute each: all that pip asks the index for, and the whole of Spark
@pytest.mark.parametrize("extra", [*EXTRAS, ALL])
def test_plain_pip_resolves_each_extra_without_searching(extra: str, built: Path, pip: Path):
    """Where it has to try versions one after another it says so, and each release of theirs makes it longer."""
    command = [pip, "install", "--dry-run", "--no-cache-dir", f"{built}[{extra}]"]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=SECONDS_MAX)
    assert ran.returncode == 0, ran.stderr
    assert "Would install" in ran.stdout
    searched = [line for line in ran.stdout.splitlines() if "multiple versions" in line]
    assert searched == []


PYTHONS = ("3.11", "3.12", "3.13")


@pytest.fixture(scope="module")
def uv(root: Path) -> str:
    done = subprocess.run(
        [root / "requirements" / "uv.sh"], check=False, capture_output=True, text=True
    )
    if done.returncode:
        missing("uv cannot be had")
    return done.stdout.strip()


@pytest.mark.slow  # asks the index for all that the extras need
@pytest.mark.parametrize("python", PYTHONS)
def test_all_extras_together_resolve(python: str, uv: str, root: Path):
    options = ["--all-extras", "--python-version", python, "--no-header", "--no-annotate"]
    done = subprocess.run(
        [uv, "pip", "compile", *options, root / "pyproject.toml"],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    names = {line.partition("==")[0] for line in done.stdout.splitlines()}
    assert {"pyspark", "pyiceberg", "s3fs", "obstore", "duckdb", "matplotlib"} <= names


@pytest.mark.slow  # a gigabyte where the cache is cold
@pytest.mark.parametrize("python", PYTHONS)
def test_all_extras_together_install_in_one_call(python: str, uv: str, built: Path, tmp_path: Path):
    fetched(f"Python {python}", uv, "venv", "--python", python, tmp_path / "venv")
    interpreter = tmp_path / "venv" / "bin" / "python"
    wish = f"tieredmq[{ALL}] @ {built.as_uri()}"
    fetched(f"all extras for {python}", uv, "pip", "install", "--python", interpreter, wish)
    demo = [tmp_path / "venv" / "bin" / "tiered", "demo", "--dir", tmp_path / "demo"]
    ran = subprocess.run(demo, check=False, capture_output=True, text=True, timeout=SECONDS_MAX)
    assert ran.returncode == 0, ran.stderr
