"""A command line in this process and a captured store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.captures import unpack
from support.command_line import CommandLine

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def tiered(capfdbinary: pytest.CaptureFixture[bytes]) -> CommandLine:
    return CommandLine(capfdbinary)


@pytest.fixture(scope="session")
def basic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 2,613 messages in 25 queues, stopped cleanly."""
    return unpack("s01-basic", tmp_path_factory.mktemp("stores"))
