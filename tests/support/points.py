"""Named crash points, as the code reaches them and as a page lists them."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parents[2]


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


def points_in_docs(page: str, prefix: str = "") -> list[str]:
    """Every name in the table below ``## Crash points`` of a page of docs/ that begins with ``prefix``."""
    _, _, section = (ROOT / "docs" / page).read_text().partition("## Crash points")
    return re.findall(rf"^\| `({prefix}[a-z-]+)` \|", section, re.MULTILINE)
