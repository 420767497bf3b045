"""The four packages are ours, import without a fuss, and export what they say."""

import ast
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = ("tiered", "backends", "fetcher", "timer")
# Names of packages that anyone may publish: what we import must be this distribution's.
HEAVY = (
    "numpy",
    "boto3",
    "botocore",
    "obstore",
    "fsspec",
    "s3fs",
    "pyarrow",
    "pyspark",
    "prometheus_client",
)


def modules() -> Iterator[str]:
    for package in PACKAGES:
        yield package
        path = importlib.import_module(package).__path__
        yield from (info.name for info in pkgutil.walk_packages(path, package + "."))


def loaded_after(statement: str) -> set[str]:
    """Names in sys.modules once a fresh interpreter has run the statement."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split("\n")[-2].split())


@pytest.mark.parametrize("package", PACKAGES)
def test_the_package_is_of_this_distribution(package: str, root: Path):
    module = importlib.import_module(package)
    assert module.__distribution__ == "tieredmq"
    assert module.__file__
    assert Path(module.__file__).is_relative_to(root)


@pytest.mark.parametrize("name", [m for m in modules() if not m.endswith("__main__")])
def test_the_module_imports_and_exports_what_it_says(name: str):
    module = importlib.import_module(name)
    for exported in getattr(module, "__all__", []):
        assert hasattr(module, exported), exported


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_loads_nothing_heavy(package: str):
    loaded = loaded_after(f"import {package}")
    assert package in loaded
    assert loaded & set(HEAVY) == set()


def test_starting_the_program_loads_nothing_heavy():
    assert importlib.util.find_spec("tiered.__main__"), "the program has no door yet"
    call = "import sys; sys.argv = ['tiered', '--help']\nfrom tiered.__main__ import main"
    loaded = loaded_after(f"{call}\ntry: main()\nexcept SystemExit as end: assert not end.code")
    assert "tiered.__main__" in loaded
    assert loaded & set(HEAVY) == set()


def test_reading_a_tier_loads_no_module_that_only_types_want():
    """It is a tenth of what starting to read costs."""
    assert "typing_extensions" not in loaded_after("import tiered.api.tier, tiered.cli.cat")


def test_a_writer_loads_what_reads_a_tier_when_it_is_wanted():
    loaded = loaded_after("import tiered.attach.writer, tiered.attach.index")
    assert not {"tiered.log.reader", "tiered.log.decode", "tiered.format.remoting"} & set(loaded)


def test_dataclasses_are_those_whose_methods_are_made_late(root: Path):
    """The one of the standard library costs each start a millisecond a class."""
    for package in PACKAGES:
        for path in (root / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module == "dataclasses":
                    names = {one.name for one in node.names}
                    is_ours = path.name == "lazy_dataclass.py"
                    assert "dataclass" not in names or is_ours, (
                        f"{path}: from backends.lazy_dataclass import dataclass"
                    )
