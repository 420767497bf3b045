"""Config JSON: fastjson's habits, and no guessing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import captures

from tiered.format.fastjson import DEPTH_MAX, JsonError, canonical, loads

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


def loosely(value: object) -> str:
    """The value as fastjson 1 might write it: bare integer keys, object keys as objects."""
    if isinstance(value, dict):
        return "{\n" + ",\t".join(f"{_key(k)}: {loosely(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + " ,".join(map(loosely, value)) + "]"
    return json.dumps(value)


def _key(key: str) -> str:
    bare = key.isascii() and key.isdigit()
    return key if bare else json.dumps(key)


@settings(deadline=None)
@given(VALUES)
def test_strict_json(value):
    assert loads(json.dumps(value)) == value
    assert (
        loads(json.dumps(value, ensure_ascii=False, indent=1).encode("utf-8", "surrogatepass"))
        == value
    )


@settings(deadline=None)
@given(st.dictionaries(st.integers(0).map(str) | st.text(alphabet="ab "), VALUES, min_size=1))
def test_bare_keys(value):
    document = loosely({"1": 0} | value)
    assert loads(document) == {"1": 0} | value


@settings(deadline=None)
@given(st.dictionaries(st.integers(0, 99).map(str), VALUES, min_size=1), st.data())
def test_every_cut_is_an_error(value, data):
    """A reader can meet a file that is being rewritten."""
    document = loosely({"1": value})
    with pytest.raises(JsonError):
        loads(document[: data.draw(st.integers(0, len(document) - 1))])
    with pytest.raises(JsonError):
        loads(document + document)


def test_object_keys():
    document = '{"table":{{"topic":"T","queueId":3}:{1:2}, [1,2]:3, a_b:"c\td", "q":[1,2,],}}'
    assert loads(document) == {
        "table": {
            '{"queueId":3,"topic":"T"}': {"1": 2},
            "[1,2]": 3,
            "a_b": "c\td",
            "q": [1, 2],
        }
    }
    assert canonical({"b": 1, "a": "é"}) == '{"a":"é","b":1}'


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "{",
        "{1",
        "{1:",
        "{1:2",
        "{1:2,",
        "{:2}",
        "{1 2}",
        "{1:2}}",
        "[1 2]",
        "{1:nul}",
        "{1:'x'}",
        "\x00{}",
        "{1:2}\0\0",
        "[,]",
    ],
)
def test_no_json(text):
    with pytest.raises(JsonError) as caught:
        loads(text)
    assert 0 <= caught.value.position <= len(text)


def test_bytes_that_are_no_text():
    with pytest.raises(JsonError):
        loads(b'{"a":"\xff"}')


@pytest.mark.parametrize("depth", [DEPTH_MAX + 1, 200_000])
def test_depth_is_bounded(depth):
    with pytest.raises(JsonError):
        loads("{1:" + "[" * depth)


@pytest.mark.parametrize("text", ['{"a":%s}', "{1:%s}", "%s"])
def test_digits_of_a_number_are_bounded(text):
    with pytest.raises(JsonError):
        loads(text % ("9" * 5000))


@pytest.mark.parametrize("name", captures.NAMES)
def test_captured_configs(name):
    seen = 0
    for path, data in captures.files(name, "config/").items():
        if not path.endswith(("timercheck", "timercheck.bak")):
            assert isinstance(loads(data), dict), path
            seen += 1
    assert seen >= 1
    delays = captures.files(name, "config/").get("config/delayOffset.json", b'{"offsetTable":{}}')
    assert all(level.isdigit() for level in loads(delays)["offsetTable"])
