"""Tiers of captured stores, made once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.mounts import Compacted, tier_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(scope="session")
def captured_tier(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, str]]:
    """Store directory and tier's URL of a captured store by its name. Only to be read."""
    folder = tmp_path_factory.mktemp("mounted")
    known: dict[str, tuple[Path, str]] = {}

    def find(name: str) -> tuple[Path, str]:
        if name not in known:
            known[name] = tier_of(name, folder)
        return known[name]

    return find


@pytest.fixture(scope="session")
def compacted(tmp_path_factory: pytest.TempPathFactory) -> Compacted:
    """A message, 2,999 that were compacted, and 20 more. Only to be read."""
    keys = ["first", *["hot"] * 3000, *[f"tail{number}" for number in range(19)]]
    return Compacted.make(tmp_path_factory.mktemp("compacted"), keys)
