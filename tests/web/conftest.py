"""Captured stores, tiers of them, and their pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.chromium import browser
from support.command_line import SMALL, attach
from support.pages import served

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.chromium import Browser
    from support.pages import Pages


NAMES = ("--cluster", "shop", "--broker", "north")


@pytest.fixture(scope="session")
def shown_tier(basic: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """URL of a tier of ``basic``, in many segments, sealed. Not to be changed."""
    return attach(basic, tmp_path_factory.mktemp("web") / "tier", *NAMES, *SMALL, "--seal")


@pytest.fixture(scope="session")
def pages(basic: Path, shown_tier: str) -> Iterator[Pages]:
    """Its pages, with bodies, and with the store that it is a tier of."""
    with served(shown_tier, "--bodies", "--store", basic) as found:
        yield found


@pytest.fixture(scope="session")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A real browser."""
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def place() -> dict[str, str]:
    """What names the broker of ``shown_tier``."""
    return {"cluster": "shop", "broker": "north"}


@pytest.fixture(scope="session")
def bare_pages(shown_tier: str) -> Iterator[Pages]:
    """The same as it is without options."""
    with served(shown_tier) as found:
        yield found
