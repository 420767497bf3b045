"""Where something is broken, pages show what, and all the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.broken import COUNT, build
from support.command_line import attach
from support.pages import served
from support.tiers import TierBuilder
from support.waiting import until

from backends.local import LocalFolderStore
from tiered.api.broker_place import Place
from tiered.log.state import queue_action
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from pathlib import Path

    from support.pages import PageAnswer, Pages

SAID = {"cluster": "DefaultCluster", "broker": "broker", "topic": "orders", "queue": 0}


def test_a_damaged_journal_is_a_row_and_the_other_broker_is_whole(basic: Path, tmp_path: Path):
    tier = tmp_path / "tier"
    url = attach(basic, tier, "--cluster", "c", "--broker", "well")
    attach(basic, tier, "--cluster", "c", "--broker", "hurt")
    prefix = tier / Place("c", "hurt").prefix
    for path in (prefix / "journal").iterdir():
        path.chmod(0o644)
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] + b"?" + data[len(data) // 2 + 1 :])
    with served(url) as pages:
        rows = pages.good("/").table("Brokers")
        broken = pages.get("/broker", cluster="c", broker="hurt")
        well = pages.good("/broker", cluster="c", broker="well")
        costs = pages.good("/costs")
    assert [row["Broker"] for row in rows] == ["c/hurt", "c/well"]  # the worst comes first
    assert rows[0]["Health"].startswith("broken damaged: ")
    assert "journal" in rows[0]["Health"]
    assert rows[0]["Messages"] == "-"
    assert rows[1]["Messages"] == "2,613"
    assert broken.status == 500
    assert "Where:" in broken.text
    assert len(well.table("Topics")) > 3
    assert "c/hurt: damaged" in costs.text


@pytest.fixture(scope="module")
def hurt(tmp_path_factory: pytest.TempPathFactory):
    made = build(tmp_path_factory.mktemp("hurt"))
    made.flip(0, 100)
    with served(made.url) as pages:
        yield pages


def cells(got: PageAnswer) -> list[list[str]]:
    """Of the rows of the first table."""
    rows = got.page.first("tbody").each("tr")
    return [[cell.text for cell in row.each("th", "td")] for row in rows]


def test_a_damaged_message_is_named_and_the_others_are_shown(hurt: Pages):
    """Its block of 64 KiB is lost with it, and nothing else."""
    got = hurt.good("/messages", offset=90, **SAID)
    rows = cells(got)
    (lost,) = [row for row in rows if len(row) == 2]
    low, high = int(lost[0]), int(lost[1].split()[2].rstrip(":"))
    assert 90 < low <= 100 < high < 160
    assert lost[1].startswith(f"damaged to {high}: ")
    shown = [int(row[0]) for row in rows if len(row) > 2]
    assert shown == [*range(90, low), *range(high, 50 + 90 + high - low)]
    got = hurt.good("/messages", before=high + 10, **SAID)
    rows = cells(got)
    assert sum(len(row) == 2 for row in rows) == 1
    assert [int(row[0]) for row in rows if len(row) > 2][-10:] == list(range(high, high + 10))


def test_a_damaged_message_alone_says_so(hurt: Pages):
    got = hurt.good("/message", offset=100, **SAID)
    (note,) = [p for p in got.page.each("p") if p.attributes.get("class") == "note fail"]
    assert note.text
    assert hurt.good("/message", offset=199, **SAID).table("Fields")
    assert hurt.get("/message", offset=COUNT, **SAID).status == 400


def test_a_key_of_a_damaged_message_says_what_may_be_missing(hurt: Pages):
    said = {name: value for name, value in SAID.items() if name != "queue"}
    got = hurt.good("/messages", key="key-100", **said)
    assert [row["Offset"] for row in got.table("Messages")] == [
        *("queue 1, 300", "queue 0, 300", "queue 1, 100"),
    ]
    notes = [p.text for p in got.page.each("p") if p.attributes.get("class") == "note warn"]
    assert notes


def test_a_tier_that_is_gone_and_comes_back(basic: Path, tmp_path: Path):
    tier, away = tmp_path / "tier", tmp_path / "away"
    url = attach(basic, tier, "--cluster", "c", "--broker", "b")
    with served(url, "--refresh", "0.1") as pages:
        assert pages.good("/").table("Brokers")[0]["Messages"] == "2,613"
        tier.rename(away)
        until(lambda: "The store does not answer" in pages.good("/").text)
        assert pages.good("/").table("Brokers")[0]["Messages"] == "2,613"
        got = pages.get("/messages", cluster="c", broker="b", topic="orders", queue=0)
        assert got.status in {200, 500, 502}
        assert "damaged" in got.text or "What to do" in got.text or "gone" in got.text
        away.rename(tier)
        until(lambda: "The store does not answer" not in pages.good("/").text)
        assert pages.good("/messages", cluster="c", broker="b", topic="orders", queue=0)


def test_no_tier_at_all_is_said(tmp_path: Path):
    (tmp_path / "tier").mkdir()
    with served(f"file://{tmp_path}/tier") as pages:
        got = pages.get("/")
    assert got.status == 400
    assert "there is no tier here" in got.text
    assert "tiered attach" in got.text


def test_gaps_holes_and_what_is_in_quarantine_are_in_the_map(tmp_path: Path):
    place, queue = Place("c", "b"), MessageQueue("t", 2)
    builder = TierBuilder(LocalFolderStore(tmp_path), prefix=place.prefix)
    builder.add([b"one", None, b"three"], queue=queue)
    builder.say(queue_action("quarantine", queue, 0, count=1))
    builder.gap(7, queue=queue)
    builder.add([b"four"] * 5, queue=queue)
    with served(f"file://{tmp_path}") as pages:
        said = {"cluster": "c", "broker": "b", "topic": "t", "queue": 2}
        got = pages.good("/queue", **said)
        hole = pages.good("/message", offset=1, **said)
    titles = {title.text for title in got.page.each("title")}
    assert "gap: [3, 10)" in titles
    assert "quarantined: [1, 2)" in titles
    assert "open: [10, 15)" in titles
    assert [(row["From"], row["To"], row["Why"]) for row in got.table("Gaps")] == [
        ("3", "10", "made so")
    ]
    assert "Records at these queue offsets are damaged: 1." in got.text
    assert "no message has this queue offset" in hole.text
