"""rebuild: a lost journal of a captured store's tier, by the command line."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from cli.program import CommandLine, Dump


@pytest.fixture
def copied(basic_tier: str, tmp_path: Path) -> Path:
    """A tier that may be damaged."""
    folder = tmp_path / "tier"
    shutil.copytree(basic_tier.removeprefix("file://"), folder)
    return folder


def journal_of(folder: Path) -> Path:
    (found,) = folder.glob("*/*/journal")
    return found


def test_a_deleted_journal_comes_back(
    tiered: CommandLine, basic: Path, copied: Path, basic_tier: str, dumped: Dump
):
    url = f"file://{copied}"
    before = tiered.good("ls", basic_tier, "--json").document["queues"]
    cat = tiered.good("cat", basic_tier, "large").out
    shutil.rmtree(journal_of(copied))
    assert tiered("ls", url).code == 5
    planned = tiered("rebuild", url, "--exit-code", "--json")
    assert planned.code == 1
    assert planned.document["messages"] == 2613
    assert (planned.document["losses"], planned.document["orphans"]) == ([], [])
    assert not journal_of_exists(copied)
    assert "rebuilt" in tiered.good("rebuild", url, "--apply", "-").text.splitlines()[-1]
    verified = tiered.good("verify", url, "--deep", "--store", basic, "--json").document
    assert (verified["is_clean"], verified["checked_messages"]) == (True, 2613)
    assert verified["comparison"]["messages"] == 2613
    assert tiered.good("ls", url, "--json").document["queues"] == before
    assert tiered.good("cat", url, "large").out == cat
    again = tiered.good("rebuild", url, "--exit-code", "--json").document
    assert (again["is_needed"], again["is_applied"]) == (False, False)
    assert "nothing to rebuild" in tiered.good("rebuild", url).text


def journal_of_exists(folder: Path) -> bool:
    return any(folder.glob("*/*/journal/*"))


def test_a_writer_goes_on_in_a_rebuilt_tier(tiered: CommandLine, basic: Path, copied: Path):
    url = f"file://{copied}"
    shutil.rmtree(journal_of(copied))
    tiered.good("rebuild", url, "--apply", "-")
    tiered.good("attach", basic, "--to", url, "--once", "--quiet")
    verified = tiered.good("verify", url, "--deep", "--store", basic, "--json").document
    assert verified["checked_messages"] == 2613
    assert verified["recorded"]["orphans"] == 1  # the key index, which was made again


def test_exactly_the_plan_is_carried_out(tiered: CommandLine, copied: Path, tmp_path: Path):
    url, file = f"file://{copied}", tmp_path / "plan.json"
    shutil.rmtree(journal_of(copied))
    tiered.good("rebuild", url, "--plan", file)
    assert not journal_of_exists(copied)
    document = json.loads(file.read_text())
    strange = tmp_path / "strange.json"
    strange.write_text(json.dumps({**document, "broker": "other"}))
    assert "it was changed or cut" in tiered("rebuild", url, "--apply", strange).error
    strange.write_text("[" * 100_000)
    assert tiered("rebuild", url, "--apply", strange).code == 2
    more = next(copied.glob("*/*/bundle/0")) / f"{0:020d}-{7:010d}-0badcafe-{0:010d}"
    more.write_bytes(b"an orphan that came since")
    refused = tiered("rebuild", url, "--apply", file)
    assert (refused.code, "moved on" in refused.error) == (1, True)
    assert "/bundle has other objects (it had 1, and has 2)" in refused.error
    more.unlink()
    assert tiered.good("rebuild", url, "--apply", file, "--json").document["is_applied"]
    again = tiered.good("rebuild", url, "--apply", file)
    assert "this plan was applied before" in again.text
    assert tiered.good("rebuild", url, "--apply", file, "--json").document["was_applied"]
    assert tiered.good("verify", url, "--deep").code == 0


def test_what_is_lost_must_be_accepted(tiered: CommandLine, basic: Path, tmp_path: Path):
    copied = tmp_path / "tier"
    url = f"file://{copied}"
    small = ("--bundle-size", "16KiB", "--segment-size", "32KiB")
    tiered.good("attach", basic, "--to", url, "--once", *small, "--quiet")
    shutil.rmtree(journal_of(copied))
    for level in copied.glob("*/*/bundle/[1-9]"):
        shutil.rmtree(level)  # what was merged; what that was made of is there still
    assert tiered.good("rebuild", url, "--json").document["losses"] == []
    middle = sorted(copied.glob("*/*/queue/large/0000000000/0000000000/*"))
    assert len(middle) >= 3
    middle[1].unlink()
    assert len(tiered.good("rebuild", url, "--json").document["losses"]) == 1
    assert "--accept-gaps" in tiered("rebuild", url, "--apply", "-").error
    assert not journal_of_exists(copied)
    tiered.good("rebuild", url, "--apply", "-", "--accept-gaps")
    verified = tiered.good("verify", url, "--deep", "--json").document
    assert (verified["is_clean"], verified["recorded"]["gaps"]) == (True, 1)


def test_no_tier_at_all(tiered: CommandLine, tmp_path: Path):
    assert tiered("rebuild", f"file://{tmp_path}").code == 2
