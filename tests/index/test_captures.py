"""Captured stores of real brokers, tiered by the program: each key finds what Java's dump has of it, and nothing else."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
from support import captures
from support.command_line import here

from tiered import open as open_tier
from tiered.format.message_forms import message_json
from tiered.index.lookup import Hit, IndexReader, Wish
from tiered.log.state import indexed_to

if TYPE_CHECKING:
    from pathlib import Path

    from tiered import Tier

UNIQUE_STEP = 17
"""Of unique ids every so many-th is asked."""
Message = dict[str, Any]


def keys_of(message: Message) -> set[str]:
    properties = message["properties"]
    found = {*properties.get("KEYS", "").split(" "), properties.get("UNIQ_KEY", "")}
    return found - {""}


def by_key(messages: list[Message]) -> dict[str, list[Message]]:
    """The messages of each key, newest first."""
    found: dict[str, list[Message]] = defaultdict(list)
    for message in messages:
        for key in keys_of(message):
            found[key].append(message)
    for row in found.values():
        row.sort(key=order, reverse=True)
    return found


def order(message: Message) -> tuple[int, int, int]:
    return message["store_timestamp_ms"], message["queue_offset"], message["queue_id"]


def as_dumped(hit: Hit) -> Message:
    found = message_json(
        hit.message,
        tag_code=hit.tag_code,
        log_offset=None,
        raw_body=False,
        stored_sys_flag=hit.stored.sys_flag,
    )
    del found["log_offset"]
    return found


def check_each_key(tier: Tier, dump: captures.Dump) -> int:
    reader, asked = IndexReader(tier._opened.store, tier._opened.place.prefix), 0
    for topic, messages in dump.messages.items():
        groups = by_key(messages)
        named = {key for message in messages for key in keys_of(message)}
        unique = sorted(m["properties"].get("UNIQ_KEY", "") for m in messages)
        keys = sorted(named - {*unique}) + [key for key in unique[::UNIQUE_STEP] if key]
        for key in [*keys, "no-such-key"]:
            found = reader.lookup(tier._opened.state, Wish(topic=topic, key=key, count=10_000))
            assert found.is_complete
            assert [as_dumped(hit) for hit in found.hits] == groups.get(key, [])
            asked += 1
    return asked


@pytest.mark.parametrize("name", captures.NAMES)
def test_each_key_of_a_captured_store(name: str, tmp_path: Path):
    store, url = captures.unpack(name, tmp_path), f"file://{tmp_path}/tier"
    here(
        "attach", store, "--to", url, "--once", "--bundle-size", "16KiB", "--index-items", "300"
    ).good()
    dump, tier = captures.captured(name), open_tier(url)
    incarnations = [incarnations[-1] for incarnations in tier._opened.state.queues.values()]
    assert all(indexed_to(incarnation) == incarnation.commit_offset for incarnation in incarnations)
    assert check_each_key(tier, dump) > len(dump.messages)
    tier.close()


def test_a_tier_without_an_index_is_read_instead(tmp_path: Path):
    store, url = captures.unpack("s01-basic", tmp_path), f"file://{tmp_path}/tier"
    here("attach", store, "--to", url, "--once", "--no-index").good()
    assert not open_tier(url)._opened.state.indexes
    groups = by_key(captures.captured("s01-basic").messages["orders"])
    for key in sorted(groups)[::400]:
        rows = here("query", url, "orders", "--key", key, "--count", "9").good().rows
        assert [{**row, "log_offset": 0} for row in rows] == [
            {**message, "log_offset": 0} for message in groups[key][:9]
        ]


def test_the_program_finds_by_key_and_time(tmp_path: Path):
    store, url = captures.unpack("s11-lmq-batchcq", tmp_path), f"file://{tmp_path}/tier"
    here("attach", store, "--to", url, "--once").good()
    groups = by_key(captures.captured("s11-lmq-batchcq").messages["grouped"])
    key, messages = max(groups.items(), key=lambda item: len(item[1]))
    middle = messages[len(messages) // 2]["store_timestamp_ms"]
    wanted = [m for m in messages if m["store_timestamp_ms"] >= middle]
    rows = (
        here("query", url, "grouped", "--key", key, "--from", middle, "--count", 1000).good().rows
    )
    assert [{k: v for k, v in row.items() if k != "log_offset"} for row in rows] == wanted
    document = here("query", url, "grouped", "--key", key, "--count", "1", "--json").good().document
    assert (document["format"], document["is_complete"], len(document["messages"])) == (1, True, 1)
    assert (
        here("query", url, "grouped", "--key", "absent", "--json").good().document["messages"] == []
    )


def test_what_was_not_looked_at_is_said(tmp_path: Path):
    store, url = captures.unpack("s01-basic", tmp_path), f"file://{tmp_path}/tier"
    here("attach", store, "--to", url, "--once", "--no-index").good()
    ran = here("query", url, "orders", "--key", "absent", "--scan", "1KiB")
    assert ran.code == 1
    assert "messages that no index covers yet were not looked at" in ran.err
    assert "no topic nothing" in here("query", url, "nothing", "--key", "k").error
    assert here("query", url, "orders", "--key", "k", "-o", "csv").code == 2


def test_the_work_file_never_lies_in_the_store(tmp_path: Path):
    store, url = captures.unpack("s10-consumers", tmp_path), f"file://{tmp_path}/tier"
    for place, what in (
        (store / "config", "lies in the broker's store"),
        (tmp_path / "none", "not a directory"),
    ):
        assert what in here("attach", store, "--to", url, "--once", "--index-dir", place).error
    here("attach", store, "--to", url, "--once", "--index-dir", tmp_path).good()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s10-consumers", "tier"]
