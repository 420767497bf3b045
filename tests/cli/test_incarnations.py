"""Older incarnations of a queue: ``ls --incarnations`` shows them, ``cat --incarnation`` prints them."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

import pytest
from support import tiers
from support.tiers import QUEUE, TierBuilder

from backends.local import LocalFolderStore
from tiered.api.broker_place import Place

if TYPE_CHECKING:
    from pathlib import Path

    from support.command_line import CommandLine, Ran


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """One queue: ``old``, then anew ``a`` to ``d``, of which ``c`` and ``d`` were truncated and ``C`` came."""
    monkeypatch.setattr(tiers, "PREFIX", Place("c", "b").prefix)
    store = LocalFolderStore(tmp_path / "tier")
    builder = TierBuilder(store)
    builder.add([b"old", b"older"])
    builder.begin_anew(reason="created again")
    builder = TierBuilder(store, writer="00000002")
    builder.add([b"a"])
    builder.add([b"b", b"c", b"d"])
    builder.truncate(2, reason="power failure")
    TierBuilder(store, writer="00000003").add([b"C"])
    store.close()
    return f"file://{tmp_path}/tier"


def bodies(ran: Ran) -> list[tuple[object, ...]]:
    return [
        (
            line.get("incarnation"),
            line.get("is_truncated"),
            line["queue_offset"],
            base64.b64decode(line["body_base64"]).decode(),
        )
        for line in ran.rows
    ]


OLD = [(0, False, 0, "old"), (0, False, 1, "older")]
TAIL = [(1, True, 2, "c"), (1, True, 3, "d")]
NOW = [(1, False, 0, "a"), (1, False, 1, "b"), (1, False, 2, "C")]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--incarnation", "all"), [*OLD, *TAIL, *NOW]),
        (("--incarnation", "0"), OLD),
        (("--incarnation", "1"), [*TAIL, *NOW]),
        (("--incarnation", "all", "--count", "3"), [*OLD, TAIL[0]]),
        (("--incarnation", "all", "--offset", "2"), [*TAIL, NOW[2]]),
    ],
)
def test_an_incarnation_or_all_of_them(
    tiered: CommandLine, url: str, options: tuple[str, ...], expected: list[tuple[object, ...]]
):
    assert bodies(tiered.good("cat", url, QUEUE.topic, *options)) == expected


def test_without_the_option_there_is_the_present_and_no_field_more(tiered: CommandLine, url: str):
    plain = tiered.good("cat", url, QUEUE.topic)
    assert bodies(plain) == [(None, None, *rest) for _, _, *rest in NOW]
    assert "incarnation" not in plain.text
    document = tiered.good("cat", url, QUEUE.topic, "--incarnation", "0", "--json").document
    assert [message["incarnation"] for message in document["messages"]] == [0, 0]


def test_other_formats(tiered: CommandLine, url: str):
    cat = ("cat", url, QUEUE.topic, "--incarnation")
    assert tiered.good(*cat, "all", "--format", "body").out == b"oldoldercdabC"
    lines = tiered.good(*cat, "1", "--format", "text").text.splitlines()
    assert "incarnation=1 (truncated) c" in lines[0]
    assert "incarnation=1 a" in lines[2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--incarnation", "7"), "no incarnation 7"),
        (("--incarnation", "-1"), "at least 0"),
        (("--incarnation", "x"), "no whole number"),
        (("--incarnation", "0", "--follow"), "contradict"),
        (("--incarnation", "0", "--queue", "9"), "no queue 9"),
    ],
)
def test_what_is_not_there_is_said(
    tiered: CommandLine, url: str, options: tuple[str, ...], said: str
):
    ran = tiered("cat", url, QUEUE.topic, *options)
    assert ran.code == 2
    assert said in ran.error


def test_ls_shows_them(tiered: CommandLine, url: str):
    rows = tiered.good("ls", url, "--incarnations", "--json").document["incarnations"]
    assert [(r["incarnation"], r["state"], r["reason"]) for r in rows] == [
        (0, "ended", "created again"),
        (1, "truncated", "power failure"),
        (1, "present", ""),
    ]
    assert [(r["min_offset"], r["commit_offset"], r["messages"]) for r in rows] == [
        (0, 2, 2),
        (2, 4, 2),
        (0, 3, 3),
    ]
    head = tiered.good("ls", url).text.splitlines()[0]
    assert "INCARNATION" in head.upper()
    assert tiered("ls", url, "--incarnations", "--objects").code == 2
    status = tiered.good("status", url).text
    assert "older" in status
    assert "INCARNATION" in status.upper()


def test_ls_of_queues_of_one_incarnation_is_as_it_was(tiered: CommandLine, basic_tier: str):
    assert "INCARNATION" not in tiered.good("ls", basic_tier).text.upper()
    rows = tiered.good("ls", basic_tier, "orders", "--incarnations", "-o", "jsonl").rows
    assert {row["state"] for row in rows} == {"present"}
    assert len(rows) == 4


def test_a_gap_is_said_on_stderr_and_stdout_has_only_messages(
    tiered: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tiers, "PREFIX", Place("c", "b").prefix)
    store = LocalFolderStore(tmp_path / "gaps")
    builder = TierBuilder(store)
    builder.add([b"a", b"b"])
    builder.gap(5)
    builder.add([b"c"])
    store.close()
    ran = tiered.good("cat", f"file://{tmp_path}/gaps", QUEUE.topic)
    assert [line["queue_offset"] for line in ran.rows] == [0, 1, 7]
    assert ran.err.count("no messages from offset 2 to 7") == 1
    assert (
        "no messages"
        not in tiered.good("cat", f"file://{tmp_path}/gaps", QUEUE.topic, "--quiet").err
    )


def test_a_folder_behind_a_symbolic_link_is_read_and_nothing_that_goes_by_listings_trusts_it(
    tiered: CommandLine, url: str, tmp_path: Path
):
    place = tmp_path / "tier" / Place("c", "b").prefix
    (place / "bundle").rename(tmp_path / "away")
    (place / "bundle").symlink_to(tmp_path / "away")
    before = sorted(tmp_path.joinpath("away").rglob("*"))
    assert bodies(tiered.good("cat", url, QUEUE.topic)) == [(None, None, *one[2:]) for one in NOW]
    checked = tiered("verify", url)
    assert checked.code == 1
    assert "missing" in checked.text
    refused = tiered("gc", url, "--apply", "-")
    assert refused.code == 1
    assert "no listing shows it" in refused.text + refused.err
    assert sorted(tmp_path.joinpath("away").rglob("*")) == before
