"""``attach --once`` merges what earlier runs have left, and with ``--merge`` what is its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from backends.errors import BackendError, PermissionDeniedError, UnavailableError
from backends.local import LocalFolderStore
from tiered.attach.settings import AttachSettings
from tiered.attach.writer import Attachment
from tiered.cli.attach import lines
from tiered.dispatch.settings import DispatchSettings
from tiered.errors import StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.command_line import CommandLine

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


def refuse(
    monkeypatch: pytest.MonkeyPatch, error: BackendError, which: Callable[[str], bool]
) -> None:
    """From now on the folder takes no object whose key is such."""
    put = LocalFolderStore.put_if_absent

    def put_or_refuse(self: LocalFolderStore, key: str, data: bytes) -> None:
        if which(key):
            raise error
        put(self, key, data)

    monkeypatch.setattr(LocalFolderStore, "put_if_absent", put_or_refuse)


@pytest.mark.parametrize(
    ("error", "give_up_s"), [(UnavailableError("busy"), 0.3), (PermissionDeniedError("no"), 60.0)]
)
def test_a_merge_that_the_store_does_not_take_ends_the_run(
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BackendError,
    give_up_s: float,
):
    """It went on for ever, with all messages in the tier, and kept the lease."""
    tier = (tmp_path / "tier").as_uri()
    run(store, tier)
    with monkeypatch.context() as patch:
        refuse(patch, error, lambda key: "/bundle/1/" in key or "/queue/" in key)
        settings = AttachSettings(dispatch=SMALL, give_up_s=give_up_s)
        attachment = Attachment.open(str(store), tier, settings)
        try:
            with pytest.raises(StoreUnavailableError, match="every message is in the tier"):
                attachment.run(once=True)
        finally:
            attachment.close()
    assert run(store, tier) > 0, "the next run merges them"


def test_sealing_ends_when_the_journal_cannot_be_written(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tier = (tmp_path / "tier").as_uri()
    attachment = Attachment.open(str(store), tier, AttachSettings(dispatch=SMALL, give_up_s=0.3))
    try:
        seal = attachment._seal

        def seal_without_journal() -> int:
            refuse(monkeypatch, UnavailableError("busy"), lambda key: "/journal/" in key)
            return seal()

        monkeypatch.setattr(attachment, "_seal", seal_without_journal)
        with pytest.raises(StoreUnavailableError, match="nothing could be uploaded for"):
            attachment.run(once=True, seal=True)
    finally:
        attachment.close()
