"""verify: what it finds, what it shows, and how it ends."""

from __future__ import annotations

import re
import shutil
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from support.command_line import CommandLine, attach

from backends.local import LocalFolderStore
from tiered.clock import SystemClock
from tiered.journal.lease import Holder, Lease

if TYPE_CHECKING:
    from pathlib import Path

    from support.captures import Unpack


@pytest.fixture
def copied(basic_tier: str, tmp_path: Path) -> Path:
    """A tier that may be damaged."""
    folder = tmp_path / "tier"
    shutil.copytree(basic_tier.removeprefix("file://"), folder)
    return folder


def bundles(folder: Path) -> list[Path]:
    roots = ("bundle", "topic", "queue")
    return [path for root in roots for path in folder.glob(f"*/*/{root}/**/*") if path.is_file()]


def largest(folder: Path) -> Path:
    return max(bundles(folder), key=lambda path: path.stat().st_size)


def test_one_is_no_plural(tiered: CommandLine, tmp_path: Path):
    store, lines = tmp_path / "store", tmp_path / "lines"
    lines.write_text('{"topic": "one", "queue_id": 0, "properties": {}, "body_base64": "eA=="}\n')
    tiered.good("store", "create", store)
    tiered.good("store", "put", store, lines)
    url = attach(store, tmp_path / "tier")
    text = tiered.good("verify", url, "--deep", "--store", store).text
    assert re.search(r"compared  1 queue, 1 message, \d+ B of records\n", text)


def test_a_whole_tier(tiered: CommandLine, basic: Path, basic_tier: str):
    shallow = tiered.good("verify", basic_tier, "--json").document
    assert (shallow["is_clean"], shallow["messages"], shallow["checked_messages"]) == (
        True,
        2613,
        0,
    )
    deep = tiered.good("verify", basic_tier, "--deep", "--store", basic, "--strict", "--json")
    assert deep.document["checked_messages"] == 2613
    assert deep.document["comparison"]["messages"] == 2613
    text = tiered.good("verify", basic_tier, "--deep", "--store", basic).text
    assert text.splitlines()[-1].split() == ["result", "whole"]
    assert tiered.good("verify", basic_tier, "-o", "jsonl").out == b""


def test_a_flipped_byte_is_found_by_deep(tiered: CommandLine, copied: Path):
    file = largest(copied)
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.chmod(0o600)
    file.write_bytes(data)
    url = f"file://{copied}"
    assert tiered.good("verify", url).code == 0
    ran = tiered("verify", url, "--deep", "--json")
    assert ran.code == 1
    assert ran.document["problem_counts"]["block"] == 1
    (block,) = [problem for problem in ran.document["problems"] if problem["kind"] == "block"]
    assert block["where"].endswith(file.name)
    assert re.match(r"\S+/\d+ queue offsets \[\d+, \d+\): bytes \[\d+, \d+\) fail", block["detail"])
    table = tiered("verify", url, "--deep")
    assert table.code == 1
    assert file.name in table.text
    assert table.err == ""


def test_a_lost_object_is_found(tiered: CommandLine, copied: Path):
    file = largest(copied)
    file.unlink()
    ran = tiered("verify", f"file://{copied}", "-o", "jsonl")
    assert ran.code == 1
    (problem,) = ran.rows
    assert problem["kind"] == "missing"
    assert problem["where"].endswith(file.name)


def test_an_orphan_is_recorded_and_counts_when_strict(tiered: CommandLine, copied: Path):
    file = largest(copied)
    sequence = file.name[-10:]
    shutil.copy(file, file.with_name(file.name[:-10] + f"{int(sequence) + 5000:010d}"))
    url = f"file://{copied}"
    ran = tiered.good("verify", url, "--json").document
    assert ran["recorded"]["orphans"] == 1
    text = tiered.good("verify", url).text
    assert "1 orphan, " in text
    assert "`tiered gc` deletes them" in text
    assert tiered("verify", url, "--strict").code == 1


def test_a_difference_to_the_store_is_found(
    tiered: CommandLine, basic: Path, basic_tier: str, tmp_path: Path
):
    """The local log has another byte in a body, with the checksum that fits it."""
    from tiered.format.record import body_crc, decode_record

    store = tmp_path / "store"
    shutil.copytree(basic, store)
    message = tiered.good("cat", basic_tier, "orders", "--queue", "1", "--count", "1").rows[0]
    at = message["physical_offset"]
    assert at < 262_144
    file = store / "commitlog" / f"{0:020d}"
    data = bytearray(file.read_bytes())
    data[at + 88] ^= 1
    body = decode_record(data, at, check_crc=False).body
    data[at + 8 : at + 12] = body_crc(body).to_bytes(4, "big")
    file.write_bytes(data)
    ran = tiered("verify", basic_tier, "--store", store, "--json")
    assert ran.code == 1
    assert ran.document["problem_counts"] == {"difference": 1}
    assert "orders/1" in ran.document["problems"][0]["where"]


def test_what_is_only_local_is_lag_and_no_failure(tiered: CommandLine, basic: Path, tmp_path: Path):
    url = f"file://{tmp_path}"
    tiered.good("attach", basic, "--to", url, "--once", "--topics", "orders")
    ran = tiered.good("verify", url, "--store", basic, "--json").document
    assert ran["comparison"]["lag_messages"] == 2613 - 1200


def test_the_tier_of_a_store_that_is_gone(tiered: CommandLine, unpacked: Unpack, tmp_path: Path):
    store = unpacked("s08-crash-continue")
    url = attach(store, tmp_path / "tier")
    shutil.rmtree(store)
    assert tiered.good("verify", url, "--deep", "--json").document["checked_messages"] == 1150


def test_repair_from_the_local_store(tiered: CommandLine, basic: Path, copied: Path):
    url = f"file://{copied}"
    for file in bundles(copied):
        data = bytearray(file.read_bytes())
        for at in range(len(data) // 20, len(data), len(data) // 10):
            data[at] ^= 1
        file.chmod(0o600)
        file.write_bytes(data)
    text = tiered("verify", url, "--deep").text
    assert "then `tiered verify URL --deep --store DIR --repair`" in text
    said = tiered("verify", url, "--deep", "--repair", "--json")
    assert said.code == 1  # nothing in the tier has these once more
    assert said.document["repair"]["unrepaired"][0]["reason"] == "no local store is given"
    ran = tiered.good("verify", url, "--deep", "--store", basic, "--repair", "--json").document
    assert ran["repair"]["unrepaired"] == []
    assert (ran["is_clean"], ran["checked_messages"]) == (True, 2613)
    again = tiered.good("verify", url, "--deep", "--store", basic, "--repair", "--json").document
    assert again["repair"] is None
    assert "repaired" not in tiered.good("verify", url, "--deep", "--repair").text


def test_what_cannot_be_repaired_is_said(tiered: CommandLine, copied: Path):
    file = largest(copied)
    file.unlink()
    text = tiered("verify", f"file://{copied}", "--deep", "--repair")
    assert text.code == 1
    left = [line for line in text.text.splitlines() if line.startswith("  left")]
    assert left
    assert all(line.endswith("no local store is given") for line in left)


def test_what_was_found_is_shown_though_a_writer_keeps_it_from_repair(
    tiered: CommandLine, basic: Path, copied: Path
):
    file = largest(copied)
    file.unlink()
    with closing(LocalFolderStore(copied)) as store:
        (key,) = (info.key for info in store.list("") if info.key.endswith("/lease"))
        lease = Lease(
            store, key.removesuffix("lease"), writer="0badcafe", holder=Holder.present(),
            seconds=600, clock=SystemClock(),
        )  # fmt: skip
        assert lease.try_acquire() is None
        ran = tiered("verify", f"file://{copied}", "--repair", "--store", basic, "--json")
        assert (ran.code, "a writer is at work" in ran.error) == (4, True)
        assert ran.document["problem_counts"]["missing"] == 1
        (missing,) = (one for one in ran.document["problems"] if one["kind"] == "missing")
        assert missing["where"].endswith(file.name)


def test_another_store_is_refused_and_not_called_equal(
    tiered: CommandLine, unpacked: Unpack, basic_tier: str
):
    """Nothing is in both, so nothing would differ; and after a good comparison the disks may go."""
    other = unpacked("s08-crash-continue")
    for command in ("verify", "status"):
        ran = tiered(command, basic_tier, "--store", other)
        assert (ran.code, "belongs to another store" in ran.error) == (2, True)
