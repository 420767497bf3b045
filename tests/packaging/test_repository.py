"""The repository stands alone: no registry's host, no machine's folder, no loose ends."""

import re
import subprocess
from pathlib import Path

import pytest

# In chunks, so that this file does not name them itself.
HOSTS = [
    "pypi" + ".org",
    "python" + "hosted.org",
    "npmjs" + ".org",
    "npmjs" + ".com",
    "yarnpkg" + ".com",
    "crates" + ".io",
    "proxy.golang" + ".org",
    "sum.golang" + ".org",
    "goproxy" + ".io",
    "goproxy" + ".cn",
    "repo.maven" + ".apache.org",
    "repo1.maven" + ".org",
    "central.sonatype" + ".com",
    "maven.aliyun" + ".com",
    "deb.debian" + ".org",
    "security.debian" + ".org",
    "snapshot.debian" + ".org",
    "archive.ubuntu" + ".com",
    "conda" + ".anaconda.org",
    "rubygems" + ".org",
    "docker" + ".io",
    "docker" + ".com",
    "ghcr" + ".io",
    "quay" + ".io",
    "gcr" + ".io",
    "ecr" + ".aws",
    "dl.min" + ".io",
    "go.dev" + "/dl",
    "archive.apache" + ".org",
    "dlcdn.apache" + ".org",
    "nodesource" + ".com",
]
REGISTRY = re.compile("|".join(rf"(?<![\w-]){re.escape(host)}\b" for host in HOSTS), re.IGNORECASE)
# A home, a checkout, or the folder beside it; "/tmp" is a place like any other on every machine.
MACHINE = re.compile(
    r"(?<![\w.])/(?:root|home(?!/rocketmq/)|work|farm|Users)/[\w.]|\.\./shared\b|/tmp/" + r"bg\b"
)
NOTE = re.compile("|".join(rf"\b{a}{b}\b" for a, b in [("TO", "DO"), ("FIX", "ME"), ("HA", "CK")]))


def found(pattern: re.Pattern[str], texts: dict[str, str]) -> list[str]:
    """`path:line: match` of everything that the pattern finds."""
    return [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match.group()}"
        for name, text in texts.items()
        for match in pattern.finditer(text)
    ]


def test_no_registry_is_named(tracked: dict[str, str]):
    named = {  # twenty plain searches are faster than one for any of twenty
        name: text
        for name, text in tracked.items()
        for lower in [text.lower()]
        if any(host in lower for host in HOSTS)
    }
    assert found(REGISTRY, named) == []


def test_no_path_of_a_machine_is_named(tracked: dict[str, str]):
    assert found(MACHINE, tracked) == []


def test_no_note_of_unfinished_work(tracked: dict[str, str]):
    assert found(NOTE, tracked) == []


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        (REGISTRY, "index = https://PyPI" + ".org/simple"),
        (REGISTRY, "files.python" + "hosted.org"),
        (REGISTRY, "https://registry.npmjs" + ".org/x"),
        (MACHINE, "see /" + "root/.cache"),
        (MACHINE, "open('/" + "work/main/x')"),
        (MACHINE, "../" + "shared/stores"),
        (NOTE, "# TO" + "DO: later"),
    ],
)
def test_offences_are_found(pattern: re.Pattern[str], line: str):
    assert found(pattern, {"file": f"first\n{line}\n"})


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        (REGISTRY, "xmlns='http://maven.apache.org/POM/4.0.0'"),
        (REGISTRY, "github.com/minio/minio@v0"),
        (MACHINE, "/tmp/store"),
        (MACHINE, "</root>"),
        (MACHINE, "key/work/part"),
        (NOTE, "mktemp XXXXXX; todos"),
    ],
)
def test_what_only_looks_like_one_is_not(pattern: re.Pattern[str], line: str):
    assert not found(pattern, {"file": line})


def test_make_quick_needs_no_java_minio_or_spark_and_runs_what_is_there(root: Path):
    command = ["make", "-n", "quick"]
    steps = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    assert "system.sh" not in steps
    assert "mypy" in steps
    tests = next(line for line in steps.splitlines() if "--hypothesis-profile=quick" in line)
    assert "not java and not go and not spark" in tests
    named = [word for word in tests.split() if word.startswith("tests/")]
    assert len(named) >= 4
    assert [name for name in named if not (root / name).exists()] == []
