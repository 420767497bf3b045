"""`make docs-site`: every page is on the site, nothing comes from another host, and what is broken fails."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.environments import fetched

ROOT = Path(__file__).parents[2]
FOREIGN = re.compile(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"?(?:https?:)?//[^>]*>")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout as far as the site needs one."""
    copy = tmp_path_factory.mktemp("checkout")
    fetched("mkdocs", "make", "-C", str(ROOT), ".tools/site/.installed")
    shutil.copytree(ROOT / "docs", copy / "docs")
    for name in ("Makefile", "CHANGELOG.md", "CONTRIBUTING.md", "requirements", "tests", ".tools"):
        (copy / name).symlink_to(ROOT / name)
    return copy


def build(copy: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "docs-site"], cwd=copy, env=os.environ | settings,
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip


@pytest.mark.slow
def test_every_page_is_there_and_asks_no_other_host(copy: Path) -> None:
    built = build(copy, TIERED_SOURCE_URL="https://example.com/tiered")
    assert built.returncode == 0, built.stderr
    site = copy / "build/site"
    sources = [path.relative_to(copy / "docs") for path in (copy / "docs").rglob("*.md")]
    for path in sources:
        folder = path.parent if path.stem in {"index", "README"} else path.with_suffix("")
        text = (site / folder / "index.html").read_text("utf-8")
        assert not FOREIGN.search(text.replace(' rel="canonical"', "")), path
        assert "<h1" in text
    home = (site / "index.html").read_text("utf-8")
    assert "https://example.com/tiered/blob/main/CONTRIBUTING.md" in home
    tabs = re.findall(r"md-tabs__link[^>]*>\s*([\w -]+?)\s*<", home)
    assert tabs == [
        "Home",
        "Tutorials",
        "How-to guides",
        "Reference",
        "Explanation",
        "Contributing",
    ]
    assert (site / "search/search_index.json").stat().st_size > 100_000
    assert not list(site.rglob("*hooks*"))


@pytest.mark.slow
def test_what_is_broken_fails(copy: Path) -> None:
    page = copy / "docs/jmq.md"
    whole = page.read_text("utf-8")
    page.write_text(f"{whole}\n[a](no-page.md) [b](kafka.md#no-heading) [c](../tests/no-file.py)\n")
    (copy / "docs/lost.md").write_text("# Lost\n")
    built = build(copy)
    page.write_text(whole)
    (copy / "docs/lost.md").unlink()
    assert built.returncode != 0
    for named in ("no-page.md", "no-heading", "no-file.py", "lost.md"):
        assert named in built.stderr
    assert build(copy).returncode == 0
