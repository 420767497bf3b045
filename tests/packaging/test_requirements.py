"""The requirement files fit pyproject.toml, and pin everything by its hash."""

import importlib.util
import shutil
from importlib.metadata import requires
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

HASH = "    --hash=sha256:"


@pytest.fixture(scope="module")
def lock(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("lock", root / "requirements" / "lock.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    shutil.copy(root / "pyproject.toml", tmp_path)
    shutil.copytree(root / "requirements", tmp_path / "requirements")
    return tmp_path


def test_the_committed_files_fit(lock: ModuleType, root: Path):
    assert lock.problems(root) == []


def test_the_build_backend_is_locked(lock: ModuleType, root: Path):
    (build,) = lock.tables(root)["build"]
    name, version = build.split("==")
    for kind in ("light", "runtime", "test"):
        assert lock.pins((root / f"requirements/{kind}.txt").read_text())[name] == version


def test_localstacks_own_environment_is_pinned_by_hash_too(lock: ModuleType, root: Path):
    entries = lock.entries((root / "localstack" / "requirements-host.txt").read_text())
    assert len(entries) > 10
    assert [e for e in entries if not lock.PIN.match(e) or "--hash=sha256:" not in e] == []


def test_each_extra_bounds_all_that_share_a_window_of_botocore(lock: ModuleType, root: Path):
    """One that takes a few versions of botocore only, and boto3, which takes its own and newer ones: pip must not guess."""
    extras = lock.tables(root)["extras"]
    pinned = lock.pins((root / "requirements/test.txt").read_text())
    windows = {name: botocore_of(name) for name in ("aiobotocore", "ministack")}
    for name, specifier in windows.items():
        assert pinned["botocore"] in specifier, name
        assert "9999" not in specifier, f"{name} has a window"
    assert pinned["botocore"] in botocore_of("boto3")
    closely = {"s3fs": "aiobotocore", "test": "ministack"}
    assert {name for name, listed in extras.items() if named(listed) & {"s3fs", "ministack"}} == (
        closely.keys()
    ), "an extra brings something that wants a window of botocore"
    for extra, name in closely.items():
        bounds = {one.name: one.specifier for one in map(Requirement, extras[extra])}
        assert pinned["boto3"] in bounds["boto3"]
        assert pinned[name] in bounds[name]
        minor = Version(pinned[name])
        assert f"{minor.major}.{minor.minor + 1}" not in bounds[name], "its next window"
        above = {one.version for one in windows["aiobotocore"] if one.operator == "<"}
        assert not above & set(bounds["boto3"].filter(above)), "boto3 wants a newer botocore"


def botocore_of(package: str) -> SpecifierSet:
    """The versions of botocore that a locked package takes; it is installed."""
    found = [Requirement(text) for text in requires(package) or []]
    (chosen,) = [one for one in found if one.name == "botocore" and not one.marker]
    return chosen.specifier


def named(listed: list[str]) -> set[str]:
    return {Requirement(text).name for text in listed}


def test_light_needs_no_extra(lock: ModuleType, root: Path):
    light = lock.pins((root / "requirements/light.txt").read_text())
    assert not light.keys() & {"boto3", "obstore", "pyarrow", "pyspark", "s3fs", "pytest"}
    assert {"click", "numpy", "hatchling"} <= light.keys()


def test_a_changed_dependency_is_noticed(lock: ModuleType, copy: Path):
    path = copy / "pyproject.toml"
    path.write_text(path.read_text().replace('"click>=8.2"', '"click>=8.3"'))
    assert len(lock.problems(copy)) == len([*lock.FILES, *lock.TOOLS])  # every file


def test_a_changed_tool_setting_is_not(lock: ModuleType, copy: Path):
    path = copy / "pyproject.toml"
    path.write_text(path.read_text().replace("line-length = 100", "line-length = 99"))
    assert lock.problems(copy) == []


def test_a_missing_hash_is_noticed(lock: ModuleType, copy: Path):
    path = copy / "requirements" / "light.txt"
    lines = path.read_text().splitlines()
    (at,) = [i for i, line in enumerate(lines) if line.startswith("click==")]
    end = at + 1
    while lines[end].startswith(HASH):
        end += 1
    path.write_text("\n".join([*lines[:at], "click==8.5.1", *lines[end:]]) + "\n")
    assert any("click" in problem for problem in lock.problems(copy))


@pytest.mark.parametrize(
    "line", ["click>=8", "--find-links wheels", "click @ file:///x.whl --hash=sha256:0"]
)
def test_a_requirement_without_a_pin_is_noticed(lock: ModuleType, copy: Path, line: str):
    path = copy / "requirements" / "test.txt"
    path.write_text(path.read_text() + line + "\n")
    assert any("not a pinned version" in problem for problem in lock.problems(copy))


def test_versions_that_differ_are_noticed(lock: ModuleType, copy: Path):
    path = copy / "requirements" / "light.txt"
    text = path.read_text()
    version = lock.pins(text)["numpy"]
    path.write_text(text.replace(f"numpy=={version}", "numpy==1.0"))
    assert any("numpy==1.0" in problem for problem in lock.problems(copy))
