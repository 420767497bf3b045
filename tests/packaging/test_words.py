"""The product and its pages use the field's words, in the English of its readers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACES = ("tiered", "backends", "fetcher", "timer", "docs", "README.md", "CONTRIBUTING.md")
INSTEAD = {
    r"reign(s|ed|ing)?": "epoch",
    r"(tak(e|es|en|ing)|took) back": "truncate (of timers: cancel)",
    r"thrice": "three times",
    r"on wish": "only with (the option)",
    r"litter": "orphans",
    r"so and so many": "a number",
    r"of which nobody knows?": "with an unknown outcome",
    r"(?<!there )is no (size|plan|time|tier|store|number)": "is not a",
    r"what never was": "what never existed",
    r"who (was|has) (killed|died)": "a process that",
    r"partings?": "divergence",
    r"(shelf|shelves)": "LRU list",
    r"lanes?": "queue",
    r"stretch(es)?": "range",
    r"work(shop|bench)": "context",
}
"""Each on the left is not English, or is a word of ours for what the field calls as on the right."""


def texts() -> list[Path]:
    found = []
    for place in PLACES:
        path = ROOT / place
        found += [path] if path.is_file() else [*path.rglob("*.py"), *path.rglob("*.md")]
    return found


@pytest.mark.parametrize("word", INSTEAD)
def test_a_word_of_ours_is_not_used(word: str):
    pattern = re.compile(rf"\b{word}\b", re.IGNORECASE)
    uses = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in texts()
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not uses, f"write {INSTEAD[word]!r} instead:\n" + "\n".join(uses)
