"""What the package's page says, of README.md: its links lead to files that only the repository has."""

from __future__ import annotations

import os
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

HOME = "TIERED_SOURCE_URL"
"""The repository's address, as a release workflow knows it; without one the page has no links into the repository."""
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:)([^)]+)\)")


class PageHook(MetadataHookInterface):
    """Fills in ``readme`` and ``urls``."""

    def update(self, metadata: dict[str, object]) -> None:
        """Add both."""
        home = os.environ.get(HOME, "").rstrip("/")
        text = (Path(self.root) / "README.md").read_text("utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": page(text, home, f"v{metadata['version']}"),
        }
        metadata["urls"] = links(home)


def page(text: str, home: str, tag: str) -> str:
    """README with whole addresses; where there are none, with the words of its links alone."""

    def whole(link: re.Match[str]) -> str:
        picture, words, path = link.groups()
        if not home:
            return "" if picture else words
        return f"{picture}[{words}]({home}/{'raw' if picture else 'blob'}/{tag}/{path})"

    return _LINK.sub(whole, text)


def links(home: str) -> dict[str, str]:
    """Of the package's page."""
    if not home:
        return {}
    return {
        "Source": home,
        "Documentation": f"{home}/blob/main/README.md",
        "Changelog": f"{home}/blob/main/CHANGELOG.md",
        "Issues": f"{home}/issues",
    }
