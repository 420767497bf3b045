"""What mkdocs asks while it builds the site: the navigation, and links that leave docs/."""

from __future__ import annotations

import os
import re
from pathlib import Path
from posixpath import dirname, normpath
from typing import Any

SOURCE = "TIERED_SOURCE_URL"
"""The repository's address, as hatch_build.py takes it; without one, links into the repository are their words alone."""
DOCS = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"\[([^\]]+)\]\((?![a-z]+:|#)([^)#]+)(#[^)]*)?\)")
_NOTE = re.compile(r"\A<!--.*?-->\s*", re.DOTALL)
_TO_PAGE = re.compile(r"\[([^\]]+)\]\(([\w/-]+\.md)\)")


def on_config(config: Any) -> None:
    """The navigation is docs/index.md: a part for each heading, in it each page that is linked there."""
    parts = (DOCS / "index.md").read_text("utf-8").split("\n## ")[1:]
    config.nav = [{"Home": "index.md"}, *map(_part, parts)]


def _part(text: str) -> dict[str, Any]:
    """A tab; a line that begins as "Formats: [..." is a group in it."""
    heading, *lines = text.splitlines()
    entries: list[Any] = []
    for line in lines:
        pages = [_entry(*link) for link in _TO_PAGE.findall(line)]
        group = re.match(r"- (\w+): \[", line)
        entries += [{group[1]: pages}] if group else pages
    return {re.split(r":| \(", heading)[0]: entries}


def _entry(words: str, page: str) -> dict[str, Any]:
    """A page; that of `tiered` brings those of its commands along, in their own titles."""
    title = words[:1].upper() + words[1:]
    if page != "reference/tiered.md":
        return {title: page}
    others = sorted(path.relative_to(DOCS).as_posix() for path in (DOCS / page).parent.glob("*.md"))
    return {title: [page, *(other for other in others if other != page)]}


def on_page_markdown(markdown: str, *, page: Any, files: Any, **_more: Any) -> str:
    """A page from its title on; links to what only the repository has lead there."""

    def led(link: re.Match[str]) -> str:
        words, path, anchor = link.groups()
        target = normpath(f"{dirname(page.file.src_uri)}/{path}".lstrip("/"))
        there = DOCS / target
        if files.get_file_from_path(target) or not there.exists():
            return link.group()  # the site's own; or nobody's, of which mkdocs warns
        source = os.environ.get(SOURCE, "").rstrip("/")
        kind = "tree" if there.is_dir() else "blob"
        inside = normpath(f"docs/{target}")
        return f"[{words}]({source}/{kind}/main/{inside}{anchor or ''})" if source else words

    return _LINK.sub(led, _nested(_NOTE.sub("", markdown)))


def _nested(markdown: str) -> str:
    """Lists as Python-Markdown wants them: what belongs to an item indented by four, a line between long items."""
    lines, more, is_code, is_long = [""], "", False, False
    for line in markdown.splitlines():
        if line.startswith("```"):
            is_code = not is_code
        if not is_code and line[:1].strip():
            item = re.match(r"(?:[-*]|\d+\.) ", line)
            lines += [""] if item and is_long and lines[-1] else []
            more, is_long = " " * (4 - len(item[0])) if item else "", False
        is_long |= bool(more) and not line
        lines.append(f"{more}{line}" if line.startswith(" ") and not is_code else line)
    return "\n".join(lines[1:])
