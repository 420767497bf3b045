"""Captured stores, unpacked once, and nothing of this machine's AWS settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support import captures

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(scope="session")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A captured store by its name. Not to be changed."""
    folder = tmp_path_factory.mktemp("captured")

    def store(name: str) -> Path:
        directory = folder / name
        return directory if directory.exists() else captures.unpack(name, folder)

    return store
