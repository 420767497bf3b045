"""The captured store with pending timers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.captures import unpack

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A copy of the store in which 226 timers are pending."""
    return unpack("s02-delay-timer", tmp_path)
