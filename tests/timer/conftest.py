"""A command line in this process, and the captured store with pending timers."""

from __future__ import annotations

import tarfile
from typing import TYPE_CHECKING

import pytest
from support import captures
from support.command_line import CommandLine

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def tiered(capfdbinary: pytest.CaptureFixture[bytes]) -> CommandLine:
    return CommandLine(capfdbinary)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A copy of the store in which 226 timers are pending."""
    with tarfile.open(captures.FOLDER / "s02-delay-timer.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "s02-delay-timer"
