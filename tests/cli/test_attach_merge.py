"""``attach --once`` merges what earlier runs have left, and with ``--merge`` what is its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tiered.attach.settings import AttachSettings
from tiered.attach.writer import Attachment
from tiered.dispatch.settings import DispatchSettings

if TYPE_CHECKING:
    from pathlib import Path

    from cli.program import CommandLine

KIB = 1024
SMALL = DispatchSettings(bundle_bytes=32 * KIB, window_bytes=32 * KIB, fan_in=2)


def run(store: Path, tier: str, *, merge: bool = False) -> int:
    """One ``attach --once``; how many bundles it has merged others into."""
    attachment = Attachment.open(str(store), tier, AttachSettings(dispatch=SMALL))
    try:
        assert attachment.run(once=True, merge=merge).is_complete
        assert attachment.dispatcher is not None
        assert not merge or not attachment.dispatcher.is_merge_due
        return attachment.dispatcher.counters.merged_bundles
    finally:
        attachment.close()


@pytest.fixture
def store(tiered: CommandLine, tmp_path: Path) -> Path:
    tiered.good("bench", "make-store", tmp_path / "store", "--messages", "150", "--queues", "3")
    return tmp_path / "store"


def test_a_run_leaves_its_own_bundles_to_the_next(store: Path, tmp_path: Path):
    tier = (tmp_path / "tier").as_uri()
    assert run(store, tier) == 0, "a first copy is not slowed down"
    assert run(store, tier) > 0
    assert run(store, tier) == 0, "nothing is due any more"


def test_a_run_merges_its_own_if_told_to(store: Path, tmp_path: Path):
    tier = (tmp_path / "tier").as_uri()
    assert run(store, tier, merge=True) > 0
    assert run(store, tier) == 0


def test_merge_goes_with_once(tiered: CommandLine, store: Path, tmp_path: Path):
    result = tiered("attach", store, "--to", (tmp_path / "tier").as_uri(), "--merge")
    assert "--once" in result.err
