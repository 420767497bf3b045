"""``tiered compact`` from the command line, on a real broker's topic with a compaction policy."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cli.program import spawn

from tiered.crashpoints import EXIT_CODE, VARIABLE

if TYPE_CHECKING:
    from cli.program import CommandLine, Unpack

STORES = Path(__file__).parents[1] / "data" / "stores"
NOW = ("--dirty-ratio", "0")


@pytest.fixture
def store(unpacked: Unpack) -> Path:
    return unpacked("s07-compaction")


@pytest.fixture
def url(tiered: CommandLine, store: Path, tmp_path: Path) -> str:
    made = f"file://{tmp_path}/tier"
    tiered.good("attach", store, "--to", made, "--once", "--seal")
    return made


def messages(tiered: CommandLine, url: str, *more: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in tiered.good("cat", url, "prices", *more).out.splitlines()]


def dumped(name: str) -> list[dict[str, Any]]:
    data = gzip.decompress((STORES / f"s07-compaction.{name}.jsonl.gz").read_bytes())
    return [json.loads(line) for line in data.splitlines()]


def final_state(rows: list[dict[str, Any]]) -> dict[tuple[int, str], tuple[int, str]]:
    found = {}
    for row in sorted(rows, key=lambda one: (one["queue_id"], one["queue_offset"])):
        found[row["queue_id"], row["keys"]] = row["queue_offset"], row["body_base64"]
    return found


def test_what_is_left_is_the_state_that_a_real_client_pulled_from_the_brokers_own_compaction(
    tiered: CommandLine, store: Path, url: str, tmp_path: Path
):
    before = messages(tiered, url)
    file = tmp_path / "plan.json"
    planned = tiered(
        "compact", url, "--store", store, *NOW, "--plan", file, "--exit-code", "--json"
    )
    assert planned.code == 1
    assert planned.document["topics"] == ["prices"]
    assert messages(tiered, url) == before
    done = tiered.good("compact", url, "--apply", file, *NOW, "--json").document["applied"]
    assert (done["steps"], done["entries"]) == (2, 1)
    after = messages(tiered, url)
    assert len(before) - len(after) == planned.document["gone_messages"] == 620
    pulled = final_state(dumped("end"))
    assert final_state(after) == final_state(before) == pulled
    ours = {(row["queue_id"], row["queue_offset"]) for row in after}
    theirs = {(row["queue_id"], row["queue_offset"]) for row in dumped("end")}
    assert ours <= theirs, "the broker leaves its active file as it is"
    kept = {(row["queue_id"], row["queue_offset"]): row for row in before}
    for row in after:
        was = kept[row["queue_id"], row["queue_offset"]]
        assert {**row, "log_offset": 0} == {**was, "log_offset": 0}
    again = tiered.good("compact", url, "--apply", file, *NOW, "--json").document["applied"]
    assert again["was_applied"]
    left = tiered.good("compact", url, "--topic", "prices", *NOW, "--json").document
    assert (left["steps"], {row["due"] for row in left["left"]}) == ([], {"nothing new"})


def test_verify_and_gc_take_it_as_it_is(tiered: CommandLine, store: Path, url: str):
    applied = ("--apply", "-")
    text = tiered.good("compact", url, "--topic", "prices", *NOW, *applied).text
    assert "2 queues (done before: 0)" in text
    found = tiered.good("verify", url, "--deep", "--store", store, "--json").document
    assert found["problems"] == []
    assert found["comparison"]["compacted_messages"] == 620
    on = tiered.good("attach", store, "--to", url, "--once", "--json").document
    assert (on["messages"], on["is_complete"]) == (0, True)
    tiered.good("gc", url, "--grace", "1ms", *applied)
    assert tiered.good("verify", url, "--deep", "--json").document["problems"] == []
    one = messages(tiered, url, "--queue", "0", "--offset", "1", "--count", "1")
    assert one[0]["queue_offset"] > 1


def test_mistakes_are_told(tiered: CommandLine, url: str, tmp_path: Path):
    assert "no topic is to be compacted" in tiered("compact", url).err
    assert "no topic none" in tiered("compact", url, "--topic", "none").err
    assert "cannot be read" in tiered("compact", url, "--store", tmp_path / "x").err
    file = tmp_path / "plan.json"
    tiered.good("compact", url, "--topic", "prices", *NOW, "--plan", file)
    other = tiered("compact", url, "--apply", file, "--policy", "rocketmq")
    assert "policy careful" in other.err
    assert "nothing is changed" in tiered.good("compact", url, "--topic", "prices", *NOW).text


@pytest.mark.parametrize("ratio", ["2", "-1", "nan"])
def test_a_ratio_that_no_queue_reaches_is_refused(tiered: CommandLine, tmp_path: Path, ratio: str):
    ran = tiered("compact", f"file://{tmp_path}", "--topic", "prices", f"--dirty-ratio={ratio}")
    assert (ran.code, "from 0 to 1" in ran.error) == (2, True)


@pytest.mark.parametrize("point", ["compacted-stored", "compacted-named"])
def test_a_process_that_ends_at_a_point_leaves_what_the_next_one_finishes(
    tiered: CommandLine, store: Path, url: str, tmp_path: Path, point: str
):
    file = tmp_path / "plan.json"
    tiered.good("compact", url, "--store", store, *NOW, "--plan", file)
    state = final_state(messages(tiered, url))
    process = spawn("compact", url, "--apply", file, *NOW, environment={VARIABLE: point})
    process.communicate(timeout=100)
    assert process.returncode == EXIT_CODE
    assert final_state(messages(tiered, url)) == state
    tiered.good("compact", url, "--apply", file, *NOW)
    assert final_state(messages(tiered, url)) == state
    assert len(messages(tiered, url)) == len(final_state(dumped("end")))
    tiered.good("verify", url, "--deep", "--store", store)
