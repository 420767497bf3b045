"""Hypothesis strategies for expression trees that RocketMQ takes, and for the properties of messages."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

from hypothesis import strategies as st

from fetcher.filters.sql92 import compile_node
from fetcher.filters.sql_tree import (
    INT_MAX,
    LONG_MAX,
    Cast,
    Constant,
    Equal,
    In,
    IsNull,
    Logic,
    Long,
    Negate,
    Node,
    Not,
    Order,
    Property,
    Text,
    Unanswerable,
    is_boolean,
    operands_of,
)

if TYPE_CHECKING:
    from fetcher.filters.batch import Row

NAMES: Final = ("a", "b", "c")
NUMBERS: Final = {name: number for number, name in enumerate(NAMES)}
FAILS: Final = "X"

_LETTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\x01\x02")
NUMERIC: Final = st.sampled_from(
    [*("0", "1", "2", "-1", "+5", "007", "2147483647", "2147483648", "-9223372036854775808", "1.0", "1.5", "-0.0", "0.0"),
     *("1e3", ".5", "5.", "NaN", "Infinity", "-Infinity", "0x1p3", "1f", " 1 ", "9007199254740993", "1e400", "-2.50")]
)  # fmt: skip
WORDS: Final = st.sampled_from(["true", "TRUE", "false", "x", "it's", "", "ä"])
TEXTS: Final = st.one_of(NUMERIC, WORDS, st.text(_LETTERS, max_size=4))
ROWS: Final = st.tuples(*[st.one_of(st.none(), TEXTS.filter(bool)) for _ in NAMES])
"""Values of ``NAMES``."""

PROPERTY = st.sampled_from(NAMES).map(Property)
NUMBER = st.one_of(
    st.integers(0, 3),
    st.integers(0, INT_MAX),
    st.integers(INT_MAX + 1, LONG_MAX).map(Long),
    st.floats(sys.float_info.min * sys.float_info.epsilon, sys.float_info.max),
    st.sampled_from([0.5, 1.0, 1.5, 9007199254740992.0]),
).map(Constant)
TRUTH = st.sampled_from([True, False, None]).map(Constant)
TEXT = TEXTS.map(Constant)


def _never_equal(left: Node, right: Node) -> bool:
    """What RocketMQ refuses to compare."""
    if Constant(None) in {left, right}:
        return True
    if not isinstance(left, Constant) or not isinstance(right, Constant):
        return False
    return is_boolean(left) and not is_boolean(right)


def _conditions(inner: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    """One level more. What stands where a value is needed is no cast: it would be read as the property."""
    no_cast = inner.filter(lambda node: not isinstance(node, Cast))
    value = st.one_of(
        PROPERTY, NUMBER, TEXT, no_cast, st.one_of(NUMBER, no_cast, PROPERTY).map(Negate)
    )
    number = st.one_of(PROPERTY, NUMBER, st.one_of(NUMBER, PROPERTY).map(Negate))
    operator, word = (
        st.sampled_from([">", ">=", "<", "<="]),
        st.sampled_from(["CONTAINS", "STARTSWITH", "ENDSWITH"]),
    )
    return st.one_of(
        inner.map(Not),
        value.map(IsNull),
        st.tuples(value, value)
        .filter(lambda two: not _never_equal(*two))
        .map(lambda two: Equal(*two)),
        st.builds(Order, operator, number, number),
        st.builds(In, PROPERTY, st.lists(TEXTS, min_size=1, max_size=7).map(tuple), st.booleans()),
        st.builds(Text, word, value, TEXTS, st.booleans()),
        st.builds(chain, st.sampled_from(["AND", "OR"]), st.lists(inner, min_size=2, max_size=4)),
    )


def chain(op: Any, operands: list[Node]) -> Node:
    """AND or OR, as the parser makes it: what is of the same operator is taken in."""
    flat: list[Node] = []
    for one in operands:
        flat += one.operands if isinstance(one, Logic) and one.op == op else [one]
    return Logic(op, tuple(flat))


CONDITIONS: Final[st.SearchStrategy[Node]] = st.recursive(
    st.one_of(TRUTH, PROPERTY.map(Cast)), _conditions, max_leaves=6
)


def answer(node: Node, row: Row) -> object:
    """True, False, None, or ``FAILS``."""
    try:
        return compile_node(node, NUMBERS)(row)
    except Unanswerable:
        return FAILS


def depth_of(node: Node) -> int:
    """How deep operators are nested; a cast is none."""
    if isinstance(node, Cast):
        return 1
    return 1 + max(map(depth_of, operands_of(node)), default=0)


# fmt: off
TOKENS: Final = [
    "NOT", "AND", "OR", "BETWEEN", "IN", "TRUE", "FALSE", "NULL", "IS", "CONTAINS", "STARTSWITH", "ENDSWITH", "not", "and",
    "a", "b", "a", "b", "a", "b", "a1", "'x'", "'1'", "'it''s'", "''", "'", "0", "1", "5", "5L", "007", "1.5", "2147483648",
    ".5", "5.", "1e3", "5e", "(", ")", "(", ")", ",", "=", "<>", "<", ">", "<=", ">=", "+", "-", "-5", "--", "\n", "/**/",
    "/*", "*/", "#",
]
# fmt: on
SOUPS: Final = st.builds(
    lambda blank, tokens: blank.join(tokens),
    st.sampled_from([" ", " ", ""]),
    st.lists(st.sampled_from(TOKENS), max_size=9),
)
"""Tokens in any order: few are an expression, many begin with one."""
