"""Pages of the reference show what the commands print, field by field."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from support.command_line import CommandLine

PAGES = Path(__file__).parents[2] / "docs" / "reference"
SAMPLES = dict(
    re.findall(
        r"^## `(tiered [^`]+)`\n(?:(?!^## ).)*?```json\n(.*?)```",
        "\n".join(page.read_text("utf-8") for page in sorted(PAGES.glob("*.md"))),
        re.MULTILINE | re.DOTALL,
    )
)


def shape(value: Any) -> object:
    """Fields, and the fields of the first element of each list; what is null may be anything."""
    if isinstance(value, dict):
        return {name: shape(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return None


@pytest.mark.parametrize("command", SAMPLES)
def test_sample(command: str, tiered: CommandLine, tmp_path: Path):
    url, store = f"file://{tmp_path}/tier", str(tmp_path / "store")
    small = ("--messages", "40", "--queues", "2", "--body", "24")
    tiered.good("bench", "make-store", store, *small)
    places = {
        "URL": url,
        "STORE": store,
        "DIR": str(tmp_path / "new"),
        "FILE": str(tmp_path / "file.tgz"),
        "TOPIC": "bench-0",
    }
    if "STORE --to" not in command:
        tiered.good("attach", store, "--to", url, "--once")
    words = [places.get(word, word) for word in shlex.split(command)[1:]]
    if words[0] == "demo":
        words += ["--dir", str(tmp_path / "demo"), "--messages", "40"]
    out = tiered.good(*words).out
    printed = json.loads(out.splitlines()[0] if words[0] == "cat" else out)
    sample = json.loads(SAMPLES[command])
    if words[0] == "config":  # values are of many kinds
        printed["settings"] = printed["settings"][:1]
    assert shape(printed) == shape(sample)
    if words[0] != "cat":
        assert printed["format"] == 1


def test_every_command_with_documents_has_a_sample():
    names = {" ".join(w for w in command.split()[1:] if w.islower()) for command in SAMPLES}
    for name in (
        "attach",
        "status",
        "ls",
        "cat",
        "verify",
        "demo",
        "config show",
        "gc",
        "expire",
        "lease",
    ):
        assert any(f"{found} ".startswith(f"{name} ") for found in names), name
