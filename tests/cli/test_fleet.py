"""Commands over several brokers: a row a broker, the worst first, whatever befalls one of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.tiers import TierBuilder

from backends.registry import open_store
from tiered.api.broker_place import Place

if TYPE_CHECKING:
    from support.command_line import CommandLine

NAMES = ("a", "b", "east-1", "east-2")
COMMANDS = {
    "verify": (),
    "gc": (),
    "expire": ("--ttl", "30d"),
    "lease": (),
}


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Four brokers, of which the second has a damaged journal."""
    store = open_store(f"{tmp_path}/tier")
    for name in NAMES:
        TierBuilder(store, prefix=Place("c", name).prefix).add([b"x", b"y"])
    entry = max((tmp_path / "tier" / Place("c", "b").prefix / "journal").iterdir())
    entry.chmod(0o644)
    entry.write_bytes(b"damaged")
    return f"{tmp_path}/tier"


def rows_of(tiered: CommandLine, *words: str) -> tuple[int, list[dict[str, Any]]]:
    ran = tiered(*words, "--json")
    document = ran.document
    assert set(document) == {"format", "url", "exit_code", "brokers"}
    assert document["exit_code"] == ran.code
    return ran.code, document["brokers"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_row_a_broker_and_damage_is_one_of_them(command: str, tiered: CommandLine, url: str):
    words = (command, url, *COMMANDS[command])
    code, rows = rows_of(tiered, *words, "--all-brokers")
    worst = code
    if command == "verify":  # which tells of damage in its own document
        assert (rows[0]["broker"], rows[0]["exit_code"] > 0) == ("b", True)
    else:
        assert (rows[0]["broker"], code, rows[0]["error"]["reason"]) == ("b", 5, "damaged")
    assert [row["broker"] for row in rows] == ["b", "a", "east-1", "east-2"]
    for row in rows[1:]:
        assert (row["exit_code"], row["error"]) == (0, None)
        alone = tiered(*words, "--broker", row["broker"], "--json").document
        assert set(row["result"]) == set(alone), "its own document"
        assert row["result"]["broker"] == row["broker"]
    code, rows = rows_of(tiered, *words, "--brokers", "east*")
    assert (code, [row["broker"] for row in rows]) == (0, ["east-1", "east-2"])
    code, rows = rows_of(tiered, *words, "--brokers", "c/a,nothing")
    assert (code, [row["broker"] for row in rows]) == (0, ["a"])
    table = tiered(*words, "--all-brokers")
    assert table.code == worst
    assert [line.split()[1] for line in table.text.splitlines()[1:]] == [
        "b",
        "a",
        "east-1",
        "east-2",
    ]
    lines = [
        json.loads(line) for line in tiered(*words, "--all-brokers", "-o", "jsonl").out.splitlines()
    ]
    assert [line["broker"] for line in lines] == ["b", "a", "east-1", "east-2"]


def test_what_is_of_one_broker_goes_with_one(tiered: CommandLine, url: str, tmp_path: Path):
    file = str(tmp_path / "plan")
    for words in (
        ("gc", url, "--all-brokers", "--plan", file),
        ("gc", url, "--all-brokers", "--apply", file),
        ("verify", url, "--all-brokers", "--store", str(tmp_path)),
        ("expire", url, "--brokers", "*", "--ttl", "1d", "--store", str(tmp_path)),
        ("archive", url, "--to", f"{tmp_path}/p", "--brokers", "*", "--metrics-file", file),
    ):
        ran = tiered(*words)
        assert (ran.code, "is of one broker" in ran.error) == (2, True), ran.err
    for other in (("--broker", "a"), ("--brokers", "a")):
        ran = tiered("gc", url, "--all-brokers", *other)
        assert (ran.code, "contradict each other" in ran.error) == (2, True)
    ran = tiered("gc", url, "--brokers", "nobody")
    assert (ran.code, "no broker fits --brokers" in ran.error) == (2, True)
    assert not Path(file).exists()


def test_what_is_applied_is_applied_to_each_and_said_of_each(tiered: CommandLine, url: str):
    code, _ = rows_of(tiered, "expire", url, "--ttl", "1s", "--brokers", "a,east*")
    assert code == 0
    ran = tiered("lease", url, "--brokers", "a,east*", "--break", "--json")
    assert [row["result"]["is_broken"] for row in ran.document["brokers"]] == [
        row["result"]["state"] == "held" for row in ran.document["brokers"]
    ]


def test_archive_of_every_broker_goes_into_one_archive(
    tiered: CommandLine, url: str, tmp_path: Path
):
    words = ("archive", url, "--to", f"{tmp_path}/parquet", "--seal", "--brokers", "a,east*")
    code, rows = rows_of(tiered, *words)
    assert (code, [row["result"]["rows"] for row in rows]) == (0, [2, 2, 2])
    asked = tiered.good(
        "sql",
        f"{tmp_path}/parquet",
        'SELECT broker, count(*) n FROM "topic-ä" GROUP BY 1 ORDER BY 1',
        "--json",
    )
    assert [row["n"] for row in asked.document["rows"]] == [2, 2, 2]
