"""A package of ours that is another distribution's is noticed at the start of a command, and its owner is named."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement
from support.environments import fetched

if TYPE_CHECKING:
    from pathlib import Path

ALONE = f"{sys.executable} -S"
"""Nothing but what the path names: an editable install would offer our packages once more."""
PACKAGES = ("backends", "fetcher", "timer")
FOREIGN = "raise RuntimeError('what is not ours was run')\n"


def tiered(python: str, *arguments: str, path: Path | None = None) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command, in an environment without the repository."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    command = [*python.split(), "-P", "-m", "tiered", *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    """A place on the path with our packages, as links: files of theirs can be replaced there."""
    for package in ("tiered", *PACKAGES):
        (tmp_path / package).mkdir()
        for file in (root / package).iterdir():
            (tmp_path / package / file.name).symlink_to(file)
    return tmp_path


def info(place: Path, name: str, *files: str) -> None:
    """What an installer leaves behind of a distribution."""
    folder = place / f"{name}-1.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (folder / "RECORD").write_text("".join(f"{file},,\n" for file in files))


def replace(file: Path, text: str) -> None:
    file.unlink()
    file.write_text(text)


@pytest.mark.parametrize("package", PACKAGES)
def test_another_distribution_is_named(package: str, copy: Path):
    replace(copy / package / "__init__.py", FOREIGN)
    info(copy, f"py-{package}", f"{package}/__init__.py")
    code, out, said = tiered(sys.executable, "--version", path=copy)
    assert (code, out) == (2, "")
    assert f"the package '{package}' is that of another distribution, py-{package} 1.2" in said
    assert f"pip uninstall py-{package}" in said
    assert len(said.splitlines()) == 1


def test_a_folder_of_that_name_is_named(copy: Path):
    replace(copy / "timer" / "__init__.py", FOREIGN)
    code, _, said = tiered(sys.executable, "--version", path=copy)
    assert code == 2
    assert f"is not tieredmq's ({copy}/timer/__init__.py); rename it" in said


def test_what_was_removed_is_missed(copy: Path):
    (copy / "timer" / "__init__.py").unlink()
    code, _, said = tiered(ALONE, "--version", path=copy)
    assert code == 2
    assert "'timer' has lost its __init__.py" in said
    assert "pip install --force-reinstall --no-deps tieredmq" in said


def test_doctor_names_who_shares_our_files(copy: Path, tmp_path_factory: pytest.TempPathFactory):
    """While ours are still there: installed after the other."""
    info(copy, "timer", "timer/__init__.py", "timer/timer.py")
    folder = tmp_path_factory.mktemp("new")
    code, out, said = tiered(sys.executable, "doctor", f"file://{folder}", path=copy)
    assert code == 0, said
    assert "timer 1.2" in out
    assert "removing timer removes files of tieredmq's" in out.replace("\n", " ")


@pytest.mark.slow  # an environment with all that tieredmq needs
@pytest.mark.parametrize("order", ["ours-first", "ours-last"])
def test_the_real_timer_beside_the_wheel(order: str, root: Path, tmp_path: Path):
    python = tmp_path / "venv" / "bin" / "python"
    built = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(built, cwd=root, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    names = [str(wheel), "timer==0.3.0"]
    for name in names if order == "ours-first" else reversed(names):
        fetched(name, python, "-m", "pip", "install", "--disable-pip-version-check", name)

    code, out, said = tiered(str(python), "doctor", f"file://{tmp_path}", "--new")
    if order == "ours-first":
        assert code == 2
        assert "'timer' is that of another distribution, timer 0.3.0" in said
    else:
        assert code == 0, said
        assert "timer 0.3.0" in out
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "uninstall", "-y", "timer"], check=True, capture_output=True)
    code, _, said = tiered(str(python), "--version")
    assert (code, "'timer' has lost its __init__.py" in said) == (2, True)
    again = ["install", "--force-reinstall", "--no-deps", wheel]
    subprocess.run([*pip, *again], check=True, capture_output=True)
    assert tiered(str(python), "--version")[0] == 0


BARE = """
import sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None  # as if it were not installed
from tiered.__main__ import run
codes = [run(command.split()) for command in sys.argv[2:]]
assert not any(codes), codes
"""


def test_a_folder_needs_no_extra(root: Path, tmp_path: Path):
    """What only an extra installs is imported where it is used."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = [one for ones in project["optional-dependencies"].values() for one in ones]
    absent = {Requirement(one).name.replace("-", "_") for one in extras}
    absent |= {"botocore", "google.protobuf", "yaml"}
    tier = tmp_path / "tier"
    commands = (
        f"store create {tmp_path}/store",
        f"store topic {tmp_path}/store t --queues 1",
        f"attach {tmp_path}/store --to {tier} --once",
        *(f"{command} {tier}" for command in ("doctor", "status", "ls", "verify", "lease")),
        f"gc {tier} --erase --apply -",
        f"expire {tier} --ttl 1d --apply -",
        f"rebuild {tier}",
    )
    bare = [sys.executable, "-c", BARE, ",".join(sorted(absent)), *commands]
    ran = subprocess.run(bare, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
