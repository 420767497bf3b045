"""Named crash points, as the code reaches them and as tests/torture/README.md lists them."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parents[2]
_PARTS = ("store-", "timers-")


def points_in_code(paths: Iterable[Path]) -> list[str]:
    """Every name that these modules call ``reached`` with, as often as they do."""
    found = []
    for path in sorted(paths):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "reached":
                (name,) = node.args
                assert isinstance(name, ast.Constant), f"{path}: a point is named by a literal"
                found.append(str(name.value))
    return found


def points_listed(part: str = "") -> list[str]:
    """Names in the tables of tests/torture/README.md: those that begin with ``part``, or with no part's word."""
    page = (ROOT / "tests/torture/README.md").read_text("utf-8")
    names = re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE)
    return [name for name in names if name.startswith(part or _PARTS) == bool(part)]
