"""A command line in this process, a captured store and a tier of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.captures import InTopic, Unpack, in_topic, unpack
from support.command_line import CommandLine, Start, attach, spawn

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def tiered(capfdbinary: pytest.CaptureFixture[bytes]) -> CommandLine:
    return CommandLine(capfdbinary)


@pytest.fixture(scope="session")
def basic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 2,613 messages in 25 queues, stopped cleanly."""
    return unpack("s01-basic", tmp_path_factory.mktemp("stores"))


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with compressed bodies."""
    return unpack("s04-batch-compress", tmp_path_factory.mktemp("stores"))


@pytest.fixture(scope="session")
def batches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with inner batches and light queues."""
    return unpack("s11-lmq-batchcq", tmp_path_factory.mktemp("stores"))


@pytest.fixture(scope="session")
def basic_tier(basic: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """URL of a tier of ``basic``. Not to be changed."""
    return attach(basic, tmp_path_factory.mktemp("tiers") / "basic")


@pytest.fixture(scope="session")
def packed_tier(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return attach(packed, tmp_path_factory.mktemp("tiers") / "packed")


@pytest.fixture(scope="session")
def batches_tier(batches: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return attach(batches, tmp_path_factory.mktemp("tiers") / "batches")


@pytest.fixture(scope="session")
def dumped() -> InTopic:
    return in_topic


@pytest.fixture
def unpacked(tmp_path: Path) -> Unpack:
    """Unpacks a captured store that the test may change."""
    return lambda name: unpack(name, tmp_path)


@pytest.fixture(scope="session")
def start() -> Start:
    return spawn
