"""Captured stores and tiers of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.captures import InTopic, Unpack, in_topic, unpack
from support.command_line import Start, attach, spawn

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(scope="session")
def packed(stores: Callable[[str], Path]) -> Path:
    """A store with compressed bodies."""
    return stores("s04-batch-compress")


@pytest.fixture(scope="session")
def batches(stores: Callable[[str], Path]) -> Path:
    """A store with inner batches and light queues."""
    return stores("s11-lmq-batchcq")


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
