"""bench read: each pattern on a small tier; a slowed store shows in what is told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from support.command_line import CommandLine

SMALL = ("--json", "--reads", "6", "--seconds", "0.2")


def measure(tiered: CommandLine, url: str, *more: str) -> dict[str, Any]:
    found: dict[str, Any] = tiered.good("bench", "read", url, *SMALL, *more).document
    return found


def test_sequential_reads_every_byte_once(tiered: CommandLine, basic_tier: str):
    found = measure(tiered, basic_tier)
    assert found["messages"] == 2613
    assert found["reads"] >= 2613 / 32
    assert 1 <= found["overfetch"] < 1.5
    twice = measure(tiered, basic_tier, "--groups", "2", "--threads", "3")
    assert twice["size_bytes"] == 2 * found["size_bytes"]
    assert twice["fetched_bytes"] < 1.5 * found["fetched_bytes"], "groups share what is cached"
    few = measure(tiered, basic_tier, "--topic", "orders", "--queues", "2")
    assert (few["queues"], few["messages"]) == (2, 603)


@pytest.mark.parametrize("pattern", ["seeks", "stops", "keys", "times"])
def test_reads_here_and_there(pattern: str, tiered: CommandLine, basic_tier: str):
    found = measure(tiered, basic_tier, "--pattern", pattern, "--topic", "orders")
    assert found["pattern"] == pattern
    assert found["reads"] == 6 or (pattern == "stops" and found["reads"] >= 6)
    assert found["requests_per_read"] > 0
    assert 0 < found["read_p50_ms"] <= found["read_p99_ms"] <= found["read_max_ms"]
    if pattern == "keys":
        assert found["messages"] == 3, "every other key is there"
        assert found["lookup_requests"]["hit"]["max"] >= 1


def test_groups_take_turns(tiered: CommandLine, basic_tier: str):
    found = measure(tiered, basic_tier, "--pattern", "groups", "--groups", "5", "--queues", "2")
    assert 0 < found["slowest_group_ratio"] <= 1
    assert found["cache_bytes_max"] <= found["memory_bytes"]


def test_a_slow_store_is_slow(tiered: CommandLine, basic_tier: str):
    seeks = ("--pattern", "seeks", "--topic", "orders", "--queues", "1")
    slow = measure(tiered, basic_tier, *seeks, "--latency-ms", "20", "--memory", "16MiB")
    assert slow["read_max_ms"] >= 20
    assert slow["latency_ms"] == 20
    narrow = measure(tiered, basic_tier, *seeks, "--bandwidth", "0.5")
    assert narrow["read_max_ms"] >= 20
    stalled = measure(tiered, basic_tier, *seeks, "--stall-percent", "100", "--stall-ms", "30")
    assert stalled["read_max_ms"] >= 30
    assert stalled["copy_seconds"] < stalled["seconds"]


def test_what_cannot_be_measured(tiered: CommandLine, basic_tier: str):
    assert tiered("bench", "read", basic_tier, "--pattern", "wild").code == 2
    assert tiered("bench", "read", basic_tier, "--stall-percent", "101").code == 2
    assert tiered("bench", "read", basic_tier, "--memory", "1KiB").code == 2
