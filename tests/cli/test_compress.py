"""attach --compress: what is sealed is smaller, and everything else is as before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from cli.program import CommandLine


def test_compressed_and_plain_tiers_say_the_same(tiered: CommandLine, tmp_path: Path):
    store, plain, packed = (tmp_path / name for name in ("store", "plain", "packed"))
    made = ("--messages", "600", "--queues", "2", "--body", "1024")
    tiered.good("bench", "make-store", store, *made)
    for tier, options in ((plain, ()), (packed, ("--compress", "zstd:5"))):
        tiered.good("attach", store, "--to", tier.as_uri(), "--once", "--seal", *options)
    totals = [
        tiered.good("status", t.as_uri(), "--json").document["brokers"][0] for t in (plain, packed)
    ]
    assert totals[0]["size_bytes"] == totals[0]["plain_bytes"]
    assert 2 * totals[1]["size_bytes"] < totals[1]["plain_bytes"]
    assert ", compressed)" in tiered.good("status", packed.as_uri()).text
    read = [tiered.good("cat", tier.as_uri(), "bench-0", "-o", "jsonl") for tier in (plain, packed)]
    assert read[0].lines == read[1].lines
    assert len(read[0].lines) == 600
    tiered.good("verify", packed.as_uri(), "--deep", "--store", store)
    query = ("bench-0", "--key", read[0].lines[99]["keys"], "-o", "jsonl")
    found = [tiered.good("query", tier.as_uri(), *query).lines for tier in (plain, packed)]
    assert found[0] == found[1] == [read[0].lines[99]]
    archive = (tmp_path / "archive").as_uri()
    archived = tiered.good(
        "archive", packed.as_uri(), "--to", archive, "--engine", "local", "--json"
    )
    assert archived.document["rows"] == 600
    tiered.good("archive", packed.as_uri(), "--to", archive, "--verify")
    objects = tiered.good("ls", packed.as_uri(), "--objects", "-o", "jsonl").lines
    assert all((packed / one["key"]).stat().st_size == one["size_bytes"] for one in objects)
    assert tiered.good("attach", store, "--to", packed.as_uri(), "--once", "--seal").code == 0


def test_a_plain_tier_is_compressed_by_the_next_attach(tiered: CommandLine, tmp_path: Path):
    store, tier = tmp_path / "store", (tmp_path / "tier").as_uri()
    tiered.good(
        "bench", "make-store", store, "--messages", "300", "--queues", "1", "--body", "1024"
    )
    tiered.good("attach", store, "--to", tier, "--once", "--seal")
    before = tiered.good("cat", tier, "bench-0", "-o", "jsonl").lines
    tiered.good("attach", store, "--to", tier, "--once", "--seal", "--compress", "zstd")
    total = tiered.good("status", tier, "--json").document["brokers"][0]
    assert 2 * total["size_bytes"] < total["plain_bytes"]
    assert tiered.good("cat", tier, "bench-0", "-o", "jsonl").lines == before


@pytest.mark.parametrize("wrong", ["gzip", "zstd:", "zstd:0", "zstd:20", "zstd:x", ""])
def test_what_is_no_compression_is_refused(wrong: str, tiered: CommandLine, tmp_path: Path):
    ran = tiered(
        "attach", tmp_path, "--to", (tmp_path / "t").as_uri(), "--once", "--compress", wrong
    )
    assert ran.code == 2
