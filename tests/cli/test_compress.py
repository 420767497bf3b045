"""attach --compress: what merging is done with is smaller, and everything else is as before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tiered.attach.writer import Attachment, AttachSettings
from tiered.dispatch.settings import Compression, DispatchSettings

if TYPE_CHECKING:
    from pathlib import Path

    from support.command_line import CommandLine

KIB = 1024


def merged(store: Path, tier: str, packing: Compression | None) -> None:
    """Attach once, with limits so small that there is something to merge, and merge it."""
    dispatch = DispatchSettings(
        bundle_bytes=32 * KIB,
        window_bytes=32 * KIB,
        own_bytes=32 * KIB,
        fan_in=2,
        compression=packing,
    )
    attachment = Attachment.open(str(store), tier, AttachSettings(dispatch=dispatch))
    try:
        assert attachment.run(once=True).is_complete
        assert attachment.dispatcher is not None
        attachment.dispatcher.merge_all()
        attachment.run(once=True, seal=True)
    finally:
        attachment.close()


def test_compressed_and_plain_tiers_say_the_same(tiered: CommandLine, tmp_path: Path):
    store, plain, packed = (tmp_path / name for name in ("store", "plain", "packed"))
    made = ("--messages", "600", "--queues", "2", "--body", "1024")
    tiered.good("bench", "make-store", store, *made)
    for tier, packing in ((plain, None), (packed, Compression(5))):
        merged(store, tier.as_uri(), packing)
    totals = [
        tiered.good("status", t.as_uri(), "--json").document["brokers"][0] for t in (plain, packed)
    ]
    assert totals[0]["size_bytes"] >= totals[0]["plain_bytes"]
    assert 2 * totals[1]["size_bytes"] < totals[1]["plain_bytes"]
    assert ", compressed)" in tiered.good("status", packed.as_uri()).text
    read = [tiered.good("cat", tier.as_uri(), "bench-0", "-o", "jsonl") for tier in (plain, packed)]
    assert read[0].rows == read[1].rows
    assert len(read[0].rows) == 600
    tiered.good("verify", packed.as_uri(), "--deep", "--store", store)
    query = ("bench-0", "--key", read[0].rows[99]["keys"], "-o", "jsonl")
    found = [tiered.good("query", tier.as_uri(), *query).rows for tier in (plain, packed)]
    assert found[0] == found[1] == [read[0].rows[99]]
    archive = (tmp_path / "archive").as_uri()
    archived = tiered.good(
        "archive", packed.as_uri(), "--to", archive, "--engine", "local", "--json"
    )
    assert archived.document["rows"] == 600
    tiered.good("archive", packed.as_uri(), "--to", archive, "--verify")
    objects = tiered.good("ls", packed.as_uri(), "--objects", "-o", "jsonl").rows
    assert all((packed / one["key"]).stat().st_size == one["size_bytes"] for one in objects)
    assert tiered.good("attach", store, "--to", packed.as_uri(), "--once", "--seal").code == 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), Compression()),
        (("--compress", "zstd"), Compression()),
        (("--compress", "zstd:7"), Compression(7)),
        (("--compress", "none"), None),
    ],
)
def test_compression_is_the_default(
    words: tuple[str, ...],
    expected: Compression | None,
    tiered: CommandLine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    seen: list[AttachSettings] = []

    def refuse(_store: str, _url: str, told: AttachSettings, **_more: object) -> None:
        seen.append(told)
        raise AssertionError("what it was told is all that is wanted")

    monkeypatch.setattr(Attachment, "open", refuse)
    ran = tiered("attach", tmp_path, "--to", tmp_path.as_uri(), "--once", *words)
    assert ran.code == 70
    assert [told.dispatch.compression for told in seen] == [expected]


@pytest.mark.parametrize("wrong", ["gzip", "zstd:", "zstd:0", "zstd:20", "zstd:x", ""])
def test_what_is_no_compression_is_refused(wrong: str, tiered: CommandLine, tmp_path: Path):
    ran = tiered(
        "attach", tmp_path, "--to", (tmp_path / "t").as_uri(), "--once", "--compress", wrong
    )
    assert ran.code == 2
