"""pause and resume: a running attach obeys, status tells it, and nothing is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from support.command_line import CommandLine, Start


def put(tiered: CommandLine, store: Path, topic: str, count: int) -> None:
    lines = store.parent / "more.jsonl"
    line = f'{{"topic": "{topic}", "queue_id": 0, "properties": {{}}, "body_base64": "eA=="}}\n'
    lines.write_text(line * count)
    tiered.good("store", "put", store, lines)


def messages(tiered: CommandLine, url: str) -> dict[str, int]:
    rows = tiered.good("ls", url, "-o", "jsonl").rows
    return {row["topic"]: row["messages"] for row in rows}


@pytest.fixture
def made(tiered: CommandLine, tmp_path: Path) -> tuple[Path, str]:
    """A store with two topics, and where its tier is."""
    store = tmp_path / "store"
    tiered.good("store", "create", store)
    for topic in ("orders", "events"):
        put(tiered, store, topic, 3)
    return store, str(tmp_path / "tier")


def test_a_running_attach_obeys(tiered: CommandLine, start: Start, made: tuple[Path, str]):
    store, url = made
    process = start("attach", store, "--to", url, "--freshness", "0.1")
    try:
        until(
            lambda: (
                tiered("ls", url).code == 0 and messages(tiered, url) == {"orders": 3, "events": 3}
            )
        )
        ran = tiered.good("pause", url, "orders")
        assert "orders is paused since" in ran.text
        assert "will be a gap" in ran.err
        for line in process.stderr:
            if b"orders is paused" in line:
                break
        for topic in ("orders", "events"):
            put(tiered, store, topic, 4)
        until(lambda: messages(tiered, url) == {"orders": 3, "events": 7})
        status = tiered.good("status", url, "--store", store)
        assert "4 messages wait: what the broker expires" in status.text
        (broker,) = tiered.good("status", url, "--store", store, "--json").document["brokers"]
        assert [(one["topic"], one["lag_messages"]) for one in broker["paused"]] == [("orders", 4)]
        tiered.good("resume", url, "orders")
        until(lambda: messages(tiered, url) == {"orders": 7, "events": 7})
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0
    tiered.good("verify", url, "--deep", "--store", store)


def test_said_again_it_changes_nothing_and_once_obeys(tiered: CommandLine, made: tuple[Path, str]):
    store, url = made
    tiered.good("attach", store, "--to", url, "--once")
    first = tiered.good("pause", url, "orders", "--json").document
    again = tiered.good("pause", url, "orders", "--json").document
    assert (first["is_changed"], again["is_changed"]) == (True, False)
    assert first["since_ms"] == again["since_ms"]
    put(tiered, store, "orders", 2)
    ran = tiered("attach", store, "--to", url, "--once", "--json")
    assert (ran.code, ran.document["behind_messages"]) == (1, 2), "messages wait"
    assert ran.document["paused_topics"] == ["orders"]
    assert "orders is paused: nothing of it was tiered" in ran.err
    assert not tiered.good("resume", url, "events", "--json").document["is_changed"]
    assert tiered.good("resume", url, "orders").text.endswith("orders is not paused\n")
    tiered.good("attach", store, "--to", url, "--once")
    assert messages(tiered, url)["orders"] == 5


def test_a_topic_that_the_tier_does_not_know_is_told(tiered: CommandLine, made: tuple[Path, str]):
    store, url = made
    assert tiered("pause", url, "orders").code == 2, "there is no tier"
    tiered.good("attach", store, "--to", url, "--once")
    assert "the tier has no topic order yet" in tiered.good("pause", url, "order").err


def test_several_brokers_show_it_in_their_line(tiered: CommandLine, made: tuple[Path, str]):
    store, url = made
    for name in ("a", "b"):
        tiered.good("attach", store, "--to", url, "--once", "--broker", name)
    tiered.good("pause", url, "orders", "--broker", "b")
    assert "orders is paused" in tiered.good("status", url).text


def test_status_names_the_rule_that_holds_a_topic_back(
    tiered: CommandLine, made: tuple[Path, str], tmp_path: Path
):
    store, url = made
    tiered.good("attach", store, "--to", url, "--once")
    rules = tmp_path / "tiered.toml"
    rules.write_text("[topics.'ord*']\nrate = '2KiB'\n[topics.events]\nrate = 0\n")
    asked = ("status", url, "--store", store, "--config", rules)
    assert "limited" not in tiered.good(*asked).text, "nothing waits"
    for topic in ("orders", "events"):
        put(tiered, store, topic, 4)
    assert (
        f"limited   orders to 2.0 KiB a second by file {rules}, 4 messages wait"
        in tiered.good(*asked).text
    )
    (broker,) = tiered.good(*asked, "--json").document["brokers"]
    assert broker["limited"] == [
        {"topic": "orders", "lag_messages": 4, "rate_bytes": 2048, "by": f"file {rules}"}
    ]
    (broker,) = tiered.good(*asked[:-2], "--json").document["brokers"]
    assert broker["limited"] == []
