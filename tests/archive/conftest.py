"""Captured stores, tiered and sealed, and archives of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.archive.shop import Shop, make
from tests.e2e import harness
from tests.e2e.conftest import stores  # noqa: F401 (a fixture)
from tests.e2e.harness import here

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@dataclass(frozen=True)
class Sealed:
    """A captured store in a tier, every segment sealed.

    Attributes:
        name: Of the capture.
        url: Of the tier.
        dump: What Java found.
    """

    name: str
    url: str
    dump: harness.Dump


@pytest.fixture(scope="session")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Sealed]:
    """The tier of a capture by its name; made once. Not to be changed."""
    folder = tmp_path_factory.mktemp("sealed")
    made: dict[str, Sealed] = {}

    def tier(name: str) -> Sealed:
        if name not in made:
            store, url = harness.unpack(name, folder), f"file://{folder}/{name}-tier"
            options = ("--to", url, "--once", "--seal")
            assert here("attach", store, *options).code in {0, 1}
            made[name] = Sealed(name, url, harness.captured(name))
        return made[name]

    return tier


@pytest.fixture
def archive_url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/parquet"


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    """A day of a small shop, archived; made once. Not to be changed."""
    return make(tmp_path_factory.mktemp("shop"))
