"""What ``cat`` selects and how it prints it, held against Java's dump by a model of a few lines."""

from __future__ import annotations

import json
import zlib
from base64 import b64decode
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import captures, command_line
from support.command_line import here
from support.tier_checks import cat

from tiered.format.sysflag import COMPRESSED

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TOPICS = (
    ("s01-basic", "orders"),
    ("s01-basic", "unicode"),
    ("s06-expired", "long-lived"),
    ("s10-consumers", "work"),
    ("s11-lmq-batchcq", "grouped"),
)
PACKED = "s04-batch-compress"


@pytest.fixture(scope="module")
def urls(stores: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tiers of a few captured stores, in parts of a few messages."""
    found = {}
    for name in {*(name for name, _ in TOPICS), PACKED}:
        found[name] = f"file://{tmp_path_factory.mktemp('tier')}"
        here("attach", stores(name), "--to", found[name], "--once", *command_line.SMALL).good()
    return found


def select(messages: list[Any], wish: dict[str, Any]) -> list[Any]:
    """What ``cat`` is to give of a topic's messages, which are in order of queue and queue offset."""
    found = []
    for queue_id in sorted({message["queue_id"] for message in messages}):
        queue = [message for message in messages if message["queue_id"] == queue_id]
        if wish.get("queue", queue_id) != queue_id:
            continue
        low, end = wish.get("offset", 0), queue[-1]["queue_offset"] + 1
        if "from" in wish:
            low = max(low, _first_at_or_after(queue, wish["from"], end))
        if "until" in wish:
            end = min(end, _first_at_or_after(queue, wish["until"], end))
        found += [message for message in queue if low <= message["queue_offset"] < end]
    if "tag" in wish and wish["tag"] != "*":
        found = [message for message in found if message["tags"] in wish["tag"].split("||")]
    return found[: wish.get("count")]


def _first_at_or_after(queue: list[Any], time_ms: int, end: int) -> int:
    later = (m["queue_offset"] for m in queue if m["store_timestamp_ms"] >= time_ms)
    return min(later, default=end)


@st.composite
def wishes(draw: st.DrawFn) -> tuple[str, str, dict[str, Any]]:
    """A captured topic, and options of ``cat``."""
    name, topic = draw(st.sampled_from(TOPICS))
    messages = captures.captured(name).messages[topic]
    times = sorted({message["store_timestamp_ms"] for message in messages})
    near = st.sampled_from(times).flatmap(lambda time: st.integers(time - 1, time + 1))
    tags = sorted({message["tags"] for message in messages if message["tags"]})
    options: dict[str, st.SearchStrategy[Any]] = {
        "queue": st.sampled_from(sorted({message["queue_id"] for message in messages})),
        "offset": st.integers(0, max(message["queue_offset"] for message in messages) + 2),
        "count": st.integers(0, len(messages) + 1),
        "from": near,
        "until": near,
        "tag": st.lists(st.sampled_from([*tags, "no-such-tag", "*"]), min_size=1, max_size=3).map(
            lambda names: "*" if "*" in names else "||".join(names)
        ),
    }
    wish: dict[str, Any] = draw(st.fixed_dictionaries({}, optional=options))
    return name, topic, wish


@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(asked=wishes())
def test_selection_is_the_model_s(
    urls: dict[str, str], asked: tuple[str, str, dict[str, Any]]
) -> None:
    name, topic, wish = asked
    options = [word for key, value in wish.items() for word in (f"--{key}", str(value))]
    expected = select(captures.captured(name).messages[topic], wish)
    assert cat(urls[name], topic, *options) == expected
    raw = here("cat", urls[name], topic, "--format", "body", *options).good().out
    assert raw == b"".join(b64decode(message["body_base64"]) for message in expected)


def test_times_are_read_in_every_form(urls: dict[str, str]) -> None:
    messages = captures.captured("s01-basic").messages["orders"]
    time_ms = messages[500]["store_timestamp_ms"]
    expected = select(messages, {"from": time_ms})
    moment = datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")
    for text in (str(time_ms), moment, moment.replace("+00:00", "Z")):
        assert cat(urls["s01-basic"], "orders", "--from", text) == expected
    assert cat(urls["s01-basic"], "orders", "--from", "now-1s") == []
    assert cat(urls["s01-basic"], "orders", "--until", "now-1s") == messages


def test_every_body_is_unpacked_and_can_be_had_as_stored(urls: dict[str, str]) -> None:
    packed = 0
    for topic, messages in captures.captured(PACKED).messages.items():
        rows = cat(urls[PACKED], topic, "--raw-body")
        assert [row["queue_offset"] for row in rows] == [m["queue_offset"] for m in messages]
        for row, message in zip(rows, messages, strict=True):
            stored = b64decode(row["body_base64"])
            assert zlib.crc32(stored) & 0x7FFF_FFFF == row["body_crc"]
            assert row["sys_flag"] == row["stored_sys_flag"] == message["stored_sys_flag"]
            is_packed = bool(row["stored_sys_flag"] & COMPRESSED)
            assert (row["body_base64"] != message["body_base64"]) == is_packed
            packed += is_packed
    assert packed > 200


def test_one_document_and_text(urls: dict[str, str]) -> None:
    messages = captures.captured("s01-basic").messages["unicode"]
    document = here("cat", urls["s01-basic"], "unicode", "--json").good().document
    assert document["format"] == 1
    assert [m["msg_id"] for m in document["messages"]] == [m["msg_id"] for m in messages]
    empty = here("cat", urls["s01-basic"], "unicode", "--json", "--count", "0").good().out
    assert json.loads(empty)["messages"] == []
    text = here("cat", urls["s01-basic"], "unicode", "--format", "text").good().out
    assert len(text.decode().splitlines()) == len(messages)


def test_raw_with_tags_gives_whole_records(
    urls: dict[str, str], stores: Callable[[str], Path]
) -> None:
    for name, topic in TOPICS:
        log, messages = captures.LocalLog(stores(name)), captures.captured(name).messages[topic]
        tag = next(message["tags"] for message in messages if message["tags"])
        wanted = select(messages, {"tag": tag, "count": 40})
        options = ("--tag", tag, "--count", "40", "--format", "raw")
        assert here("cat", urls[name], topic, *options).good().out == log.records(wanted)
