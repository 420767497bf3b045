"""Commands on a tier of Kafka's records: cat, query and compact, in Kafka's words and by their options."""

from __future__ import annotations

from base64 import b64decode
from typing import TYPE_CHECKING, Any

import pytest
from support.kafka_batches import dump
from support.kafka_tiers import add_batches, record_batches
from support.opened import Made

if TYPE_CHECKING:
    from pathlib import Path

    from support.command_line import CommandLine


@pytest.fixture
def url(tmp_path: Path) -> str:
    made = Made(f"file://{tmp_path}/tier")
    for batches in record_batches("k02-transactions").values():
        for batch in batches:
            add_batches(made.builder, [batch], roll=True)
    return made.url


def sort(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(lines, key=lambda line: (line["topic"], line["partition"], line["offset"]))


def of(name: str, topic: str) -> list[dict[str, Any]]:
    return sort([line for line in dump(name) if line["topic"] == topic])


def test_cat_and_query_print_kafka_s_words(url: str, tiered: CommandLine):
    committed, every = of("k02-transactions.committed", "txn"), of("k02-transactions", "txn")
    assert sort(tiered.good("cat", url, "txn").rows) == committed
    uncommitted = ("--isolation", "read_uncommitted")
    assert sort(tiered.good("cat", url, "txn", *uncommitted).rows) == every
    key = next(line for line in every if line["key_base64"] and line not in committed)["key_base64"]
    ask = "query", url, "txn", "--key", b64decode(key).decode(), "--count", "1000"
    mine = [line for line in committed if line["key_base64"] == key]
    assert sort(tiered.good(*ask).rows) == mine
    mine = [line for line in every if line["key_base64"] == key]
    assert sort(tiered.good(*ask, *uncommitted).rows) == mine
    assert "have no tags" in tiered("cat", url, "txn", "--tag", "a").err


def test_compact_takes_a_topic_of_kafka_s(url: str, tiered: CommandLine):
    before = sort(tiered.good("cat", url, "txn").rows)
    rule = "--policy", "kafka", "--dirty-ratio", "0"
    tiered.good("compact", url, "--topic", "txn", *rule, "--apply", "-")
    left = sort(tiered.good("cat", url, "txn").rows)
    assert left != before
    newest = {(line["partition"], line["key_base64"]): line for line in before}
    assert [line for line in newest.values() if line not in left] == []
    assert all(line in before for line in left)
    assert tiered("verify", url, "--deep").code == 0
