"""cat --sql and --tag: what the messages' own properties say, in every format, inner batches too; errors show the place."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import pytest

from fetcher.filters import compile_filter

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.captures import InTopic
    from support.command_line import CommandLine

CASES: dict[str, tuple[str, Callable[[dict[str, Any]], bool]]] = {
    "key": ("KEYS = '{0}'", lambda m: m["keys"] == m["first"]["keys"]),
    "not key": ("KEYS <> '{0}'", lambda m: m["keys"] not in {None, m["first"]["keys"]}),
    "no tag": ("TAGS IS NULL", lambda m: m["tags"] is None),
    "tag": ("TAGS IS NOT NULL AND NOT (TAGS IN ('x'))", lambda m: m["tags"] not in {None, "x"}),
    "all": ("TRUE", lambda m: True),
    "none": ("missing > 5", lambda m: False),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "place", [("basic", "s01-basic", "orders"), ("batches", "s11-lmq-batchcq", "grouped")]
)
def test_messages_are_those_whose_properties_say_so(
    case: str,
    place: tuple[str, str, str],
    tiered: CommandLine,
    dumped: InTopic,
    request: pytest.FixtureRequest,
):
    tier, name, topic = place
    messages = dumped(name, topic)
    text, test = CASES[case]
    text = text.format(messages[0]["keys"])
    wanted = [m for m in messages if test(m | {"first": messages[0]})]
    assert wanted == [m for m in messages if compile_filter(text, "SQL92").matches(m["properties"])]
    arguments = ("cat", request.getfixturevalue(f"{tier}_tier"), topic, "--sql", text)
    lines = tiered.good(*arguments).rows
    assert [line["msg_id"] for line in lines] == [m["msg_id"] for m in wanted]
    bodies = b"".join(base64.b64decode(m["body_base64"]) for m in wanted)
    assert tiered.good(*arguments, "--format", "body").out == bodies
    raw = tiered.good(*arguments, "--format", "raw").out
    assert len(raw) == sum({m["physical_offset"]: m["size"] for m in wanted}.values())
    assert len(tiered.good(*arguments, "--format", "text", "--count", "3").out.splitlines()) == min(
        3, len(wanted)
    )


def test_an_expression_that_is_none_is_refused_before_anything_is_read(tiered: CommandLine):
    ran = tiered("cat", "file:///no-such-tier", "orders", "--sql", "a = 5 AND b LIKE 'x'")
    assert ran.code == 2
    assert "character 13" in ran.err
    assert "RocketMQ leaves out" in ran.err
    assert tiered("cat", "file:///no-such-tier", "orders", "--tag", " || ").code == 2


def test_one_filter_at_a_time(tiered: CommandLine, basic_tier: str):
    ran = tiered("cat", basic_tier, "orders", "--sql", "TRUE", "--tag", "a")
    assert ran.code == 2
    assert "give one of them" in ran.err
