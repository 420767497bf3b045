"""``attach --once`` merges what earlier runs have left, and with ``--merge`` what is its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tiered.attach.settings import AttachSettings
from tiered.attach.writer import Attachment
from tiered.cli.attach import lines
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


def test_what_was_merged_is_told(tiered: CommandLine, store: Path, tmp_path: Path):
    said = tiered.good("attach", store, "--to", (tmp_path / "t").as_uri(), "--once", "--json")
    document = said.document
    assert (document["merged_bundles"], document["merged_bytes"]) == (0, 0)
    assert not any("merged" in line for line in lines(document))
    (line,) = (
        line
        for line in lines(document | {"merged_bundles": 17, "merged_bytes": 3 << 20})
        if "merged" in line
    )
    assert line == "tiered: 3.0 MiB merged into 17 objects"
