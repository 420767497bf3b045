"""What must hold of a tier, as the program tells it: what Java read of the store, and every byte in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.command_line import here

from tiered.model import MessageQueue

if TYPE_CHECKING:
    from pathlib import Path

    from support.captures import Dump, Message


def cat(url: str, topic: str, *options: str) -> list[Message]:
    """The messages of a topic, without ``log_offset``, which only a tier knows; that is checked here."""
    found: list[Message] = here("cat", url, topic, *options).good().rows
    check_log_offsets(found)
    return [{k: v for k, v in message.items() if k != "log_offset"} for message in found]


def check_log_offsets(messages: list[Message]) -> None:
    """In a queue one record stands behind the other; messages of an inner batch share one."""
    ends: dict[int, tuple[int, int]] = {}
    for message in messages:
        start = message["log_offset"]
        if message["queue_id"] in ends:
            last_start, last_end = ends[message["queue_id"]]
            assert start >= last_end or start == last_start
        ends[message["queue_id"]] = start, start + message["size"]


def bounds(url: str, *options: str | Path) -> dict[MessageQueue, tuple[int, int]]:
    """[min, commit) of each queue, as ``status`` tells."""
    return {
        MessageQueue(row["topic"], row["queue_id"]): (row["min_offset"], row["commit_offset"])
        for row in here("status", url, "-o", "jsonl", *options).good().rows
    }


def check_equal(url: str, dump: Dump) -> None:
    """Everything that Java found is in the tier field by field, and nothing else."""
    assert bounds(url) == dump.bounds
    for topic in {queue.topic for queue in dump.bounds}:
        assert cat(url, topic) == dump.messages.get(topic, [])


def check_sound(url: str, store: Path | None = None) -> None:
    """``verify`` finds every byte in order, and nothing that the store has otherwise."""
    beside = ("--store", store) if store else ()
    here("verify", url, "--deep", *beside).good()
