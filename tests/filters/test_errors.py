"""What is refused, where, and what was expected; and that no expression can do harm."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fetcher.filters import FilterError, compile_filter, sql_parse
from fetcher.filters.batch import EXPRESSION_CHARS_MAX
from fetcher.filters.sql92 import NAMES_MAX
from fetcher.filters.sql_parse import NESTING_MAX
from tiered.errors import InvalidError

PLACES = [
    ("a = = 5", 4, "a property, a value, NOT or ("),
    ("a = ", 4, "a property, a value, NOT or ("),
    ("(a = 5", 6, "an operator, AND, OR or )"),
    ("a = 5 b", 6, "an operator, AND, OR or the end"),
    ("a = 5 AND b IN ('x' 'y')", 20, "a comma or )"),
    ("a IS 5", 5, "NOT or NULL"),
    ("a BETWEEN 1 OR 5", 12, "AND"),
    ("a BETWEEN 5 AND 1", 10, "the lower one first"),
    ("b = 1 AND a > 'x'", 14, "a number or a property"),
    ("b = 1 OR 5", 9, "a condition"),
    ("'x' IN ('x')", 0, "a property"),
    ("a = NULL", 4, "IS NULL, or another value"),
    ("a = 0.0", 4, "0 for zero"),
    ("a = 'x", 4, ""),
    ("a = 5 /* no end", 6, ""),
    ("a # 5", 2, ""),
]


@pytest.mark.parametrize(("text", "position", "expected"), PLACES)
def test_an_error_tells_place_and_what_was_expected(text, position, expected):
    with pytest.raises(FilterError) as caught:
        compile_filter(text, "SQL92")
    assert (caught.value.position, caught.value.expected) == (position, expected)
    assert f"character {position + 1}:" in str(caught.value)
    assert caught.value.exit_code == 2
    assert isinstance(caught.value, InvalidError)


@pytest.mark.parametrize("text", ["a = 5 b", "a LIKE 'x'", "a = 05", "a = 5)", "a + 5 = 10"])
def test_what_rocketmq_leaves_out_is_refused_unless_asked_for(text):
    with pytest.raises(FilterError, match="RocketMQ leaves out"):
        compile_filter(text, "SQL92")
    compile_filter(text, "SQL92", strict=False)


@pytest.mark.parametrize("text", [" ", " || ", "||"])
def test_tags_that_name_none(text):
    with pytest.raises(FilterError, match="names no tag"):
        compile_filter(text, "TAG")


def test_there_are_two_kinds():
    with pytest.raises(ValueError, match="no kind of filter"):
        compile_filter("a", "sql")


def nested(depth: int) -> str:
    return "NOT " * depth + "a"


def test_nesting_is_bounded():
    assert compile_filter(nested(NESTING_MAX - 1), "SQL92").matches(
        {"a": "x"}
    )  # the property's cast is the first
    with pytest.raises(FilterError, match="nested more than"):
        compile_filter(nested(NESTING_MAX), "SQL92")


HOSTILE = {
    "NOT": "NOT " * 16_000 + "a",
    "minus": "- " * 30_000 + "5 = a",
    "plus": "+" * 60_000 + "a",
    "parentheses": "(" * 30_000 + "a" + ")" * 30_000,
    "open parentheses": "(" * 60_000,
    "IN": "a IN ('x'" + ", 'x'" * 13_000 + ")",
    "OR": "a=1" + " OR a=1" * 9_000,
    "right-hand OR": "(a=1 OR " * 6_000 + "a=1" + ")" * 6_000,
    "AND in OR": "(a=1 AND (a=1 OR " * 3_000 + "a=1" + "))" * 3_000,
    "equals": "a" + "=a" * 30_000,
    "IS NULL": "a" + " IS NULL" * 8_000,
    "CONTAINS": "a" + " CONTAINS 'x'" * 5_000,
    "BETWEEN": "a BETWEEN " + "(b = (c BETWEEN " * 2_000,
    "comments": "/**/" * 16_000 + "a",
    "stars": "/*" + "*" * 60_000,
    "slashes": "/*" + "*/ /*" * 12_000,
    "quotes": "a = '" + "''" * 30_000,
    "closed quotes": "a = " + "''" * 30_000,
    "digits": "a = " + "9" * 60_000,
    "zeros": "a = " + "0" * 60_000,
    "decimals": "a = ." + "0" * 60_000 + "1",
    "exponent": "a = 1e" + "9" * 60_000,
    "name": "a" * 65_000,
    "names": " AND ".join(f"a{n}" for n in range(6_000)),
    "lines": "--\n" * 20_000,
    "dashes": "-" * 65_000,
    "dashes behind a line": "\n" + "-" * 65_000,
    "dashes before a line": "-" * 65_000 + "\n",
    "pairs of dashes": "a=1" + " OR a=--1" * 7_000,
    "pairs of dashes, line after line": "a=1" + " OR a=--1\n1" * 5_000,
    "blanks": " " * 65_000,
    "text": "a = '" + "x" * 60_000 + "'",
    "too long": " " * EXPRESSION_CHARS_MAX + "a",
    "NUL": "\0" * 1_000,
    "surrogate": "a = '\ud800'",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_expression_neither_crashes_nor_hangs(name):
    try:
        made = compile_filter(HOSTILE[name], "SQL92", strict=False)
        made.matches({"a": "1"})
        repr(made)
        told = ""
    except FilterError as error:
        told = str(error)
    assert len(told) < 1_000


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_expression_takes_no_stack(name: str):
    """As in a thread of a server that has a small one: what the limits let through recurses no deeper than they say."""
    told: list[BaseException | None] = []

    def work() -> None:
        try:
            made = compile_filter(HOSTILE[name], "SQL92", strict=False)
            made.matches({"a": "1"})
            assert made == compile_filter(HOSTILE[name], "SQL92", strict=False)
            hash(made)
            repr(made)
        except FilterError:
            pass
        except BaseException as error:  # noqa: BLE001 (told to the test)
            told.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert told == []


DENSE = {
    "comparisons": (" OR ", "a=1"),
    "properties": (" OR ", "a"),
    "parentheses": (" OR ", "(a=1)"),
    "negations": (" AND ", "NOT(a=1)"),
    "ranges": (" OR ", "a BETWEEN 1 AND 2"),
    "words": (" OR ", "a CONTAINS 'x'"),
    "names": (" AND ", "a IS NULL"),
}


def calls_of(expression: str) -> int:
    """How many functions are called while an expression is compiled."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    sys.setprofile(count)
    try:
        compile_filter(expression, "SQL92")
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("kind", DENSE)
def test_what_compiling_takes_grows_as_the_text(kind: str):
    """A token costs the same whatever came before it: the longest texts that are let through take a second or two."""
    between, chunk = DENSE[kind]
    compile_filter(chunk, "SQL92")  # the first one makes the parser
    few, many = (calls_of(between.join([chunk] * count)) for count in (200, 800))
    assert many < 4.1 * few


def test_tags_are_bounded_too():
    most = "||".join(["tag"] * (EXPRESSION_CHARS_MAX // 5))
    assert compile_filter(most, "TAG").matches({"TAGS": "tag"})
    with pytest.raises(FilterError, match=f"more than {EXPRESSION_CHARS_MAX} characters"):
        compile_filter("t" * (EXPRESSION_CHARS_MAX + 1), "TAG")


def test_nothing_of_a_wide_expression_counts_as_nesting():
    texts = ", ".join(f"'{n}'" for n in range(5_000))
    assert compile_filter(f"a IN ({texts})", "SQL92").matches({"a": "4999"})
    wide = " OR ".join(f"a = '{n}'" for n in range(3_000))
    assert compile_filter(wide, "SQL92").matches({"a": "2999"})
    names = [f"a{n} IS NULL" for n in range(NAMES_MAX)]
    assert compile_filter(" AND ".join(names), "SQL92").matches({})
    with pytest.raises(FilterError, match="properties"):
        compile_filter(" AND ".join([*names, "more IS NULL"]), "SQL92")


@pytest.mark.parametrize("text", ["a = 5", "a > 5.0", "a = 3000000000", "a < b", "a = TRUE"])
@pytest.mark.parametrize(
    "value",
    [*("9" * 30_000, "0" * 30_000 + "5", "1." * 15_000, "1e" + "9" * 30_000, "0x" + "f" * 30_000, " " * 30_000),
     *("0x1p" + "9" * 30_000, "0x." + "0" * 30_000 + "1p0", "." * 30_000, "\u0665" * 10_000, "1" * 30_000 + "x")],
)  # fmt: skip
def test_a_hostile_property_neither_crashes_nor_hangs(text, value):
    compile_filter(text, "SQL92").matches({"a": value, "b": value})


def test_zeros_before_a_number_count_for_nothing():
    assert compile_filter("a = 5", "SQL92").matches({"a": "0" * 30_000 + "5"})
    assert compile_filter("a = -5", "SQL92").matches({"a": "-" + "\uff10" * 5_000 + "5"})


def test_without_the_parser_the_error_names_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("fetcher.filters.sql_")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lark", None)
    monkeypatch.delitem(sys.modules, "fetcher.filters.sql92")
    with pytest.raises(InvalidError, match=r"lark.*install tieredmq\[sql\]"):
        compile_filter("a", "SQL92")


def test_threads_that_make_the_parser_at_once_do_not_disturb_each_other():
    sql_parse._lark.cache_clear()
    texts = [f"NOT (a IN ('{n}')) AND b = {n}\n" for n in range(32)]
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda text: compile_filter(text, "SQL92"), texts))
    assert all(one.matches({"a": "x", "b": str(n)}) for n, one in enumerate(made))
