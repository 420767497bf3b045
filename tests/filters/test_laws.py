"""Random trees: printed and parsed again they are the same; and the laws of a logic with null."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from support.filter_records import batch_of_properties
from support.filter_trees import (
    CONDITIONS,
    FAILS,
    NAMES,
    NUMBER,
    PROPERTY,
    ROWS,
    SOUPS,
    TEXTS,
    answer,
    chain,
    depth_of,
)

from fetcher.filters import FilterError, compile_filter
from fetcher.filters.sql92 import SqlFilter
from fetcher.filters.sql_parse import parse
from fetcher.filters.sql_tree import (
    Constant,
    Equal,
    In,
    IsNull,
    Logic,
    Node,
    Not,
    Order,
    Property,
    render,
)
from tiered.format.properties import parse_properties

if TYPE_CHECKING:
    from fetcher.filters.batch import Row

TRUE, FALSE, NULL = Constant(True), Constant(False), Constant(None)
VALUES = {True: TRUE, False: FALSE, None: NULL}


@given(CONDITIONS, ROWS)
@settings(max_examples=400)
def test_a_printed_tree_is_parsed_to_itself(tree: Node, row: Row):
    text = render(tree)
    parsed = parse(text)
    assert parsed.end is None
    assert repr(parsed.part.node) == repr(tree)  # 1, 1.0 and True are equal, and not the same
    assert parsed.part.depth == depth_of(tree)
    made = compile_filter(text, "SQL92")
    assert isinstance(made, SqlFilter)
    properties = {name: value for name, value in zip(NAMES, row, strict=True) if value is not None}
    assert made.matches(properties) == (answer(tree, row) is True)


@pytest.mark.parametrize("a", VALUES)
@pytest.mark.parametrize("b", VALUES)
def test_the_tables_of_and_or_not(a, b):
    least = {True: 2, None: 1, False: 0}
    back = {number: value for value, number in least.items()}
    one, other = VALUES[a], VALUES[b]
    assert answer(chain("AND", [one, other]), ()) is back[min(least[a], least[b])]
    assert answer(chain("OR", [one, other]), ()) is back[max(least[a], least[b])]
    assert answer(Not(one), ()) is back[2 - least[a]]


@given(CONDITIONS, CONDITIONS, CONDITIONS, ROWS)
@settings(max_examples=300)
def test_laws_that_failures_do_not_break(p: Node, q: Node, r: Node, row: Row):
    def same(left: Node, right: Node) -> None:
        assert answer(left, row) is answer(right, row)

    same(Not(Not(p)), p)
    same(Not(chain("AND", [p, q])), chain("OR", [Not(p), Not(q)]))
    same(Not(chain("OR", [p, q])), chain("AND", [Not(p), Not(q)]))
    for op in ("AND", "OR"):
        same(chain(op, [p, chain(op, [q, r])]), Logic(op, (Logic(op, (p, q)), r)))
        same(chain(op, [p, chain(op, [q, r])]), Logic(op, (p, Logic(op, (q, r)))))
        same(chain(op, [p, p]), p)
    same(chain("AND", [TRUE, p]), p)
    same(chain("OR", [FALSE, p]), p)
    same(chain("AND", [FALSE, p]), FALSE)
    same(chain("OR", [TRUE, p]), TRUE)
    assert answer(IsNull(p), row) is not None
    assert answer(chain("AND", [p, Not(p)]), row) is not True
    assert answer(chain("OR", [p, Not(p)]), row) is not False


@given(CONDITIONS, CONDITIONS, CONDITIONS, ROWS)
@settings(max_examples=200)
def test_laws_where_nothing_fails(p: Node, q: Node, r: Node, row: Row):
    assume(FAILS not in {answer(one, row) for one in (p, q, r)})
    for op, other in (("AND", "OR"), ("OR", "AND")):
        assert answer(chain(op, [p, q]), row) is answer(chain(op, [q, p]), row)
        left = chain(op, [p, chain(other, [q, r])])
        right = chain(other, [chain(op, [p, q]), chain(op, [p, r])])
        assert answer(left, row) is answer(right, row)


@given(st.one_of(PROPERTY, NUMBER), st.one_of(PROPERTY, NUMBER), ROWS)
def test_orders_are_each_others_opposites(x: Any, y: Any, row: Row):
    orders = {op: answer(Order(op, x, y), row) for op in (">", ">=", "<", "<=")}
    assert orders[">"] is answer(Order("<", y, x), row)
    assert orders[">="] is answer(Order("<=", y, x), row)
    assert orders[">"] is answer(Not(Order("<=", x, y)), row)
    assert orders["<"] is answer(Not(Order(">=", x, y)), row)


@given(PROPERTY, st.lists(TEXTS, min_size=1, max_size=6), ROWS)
def test_in_is_a_chain_of_equals(name: Property, texts: list[str], row: Row):
    equals: list[Node] = [Equal(name, Constant(text)) for text in texts]
    listed = answer(In(name, tuple(texts), is_not=False), row)
    assert listed is answer(chain("OR", [*equals, FALSE]), row)
    assert answer(In(name, tuple(texts), is_not=True), row) is answer(
        Not(chain("OR", [*equals, FALSE])), row
    )


def compiled(text: str, *, strict: bool) -> SqlFilter | FilterError:
    """The filter, or why there is none."""
    try:
        made = compile_filter(text, "SQL92", strict=strict)
    except FilterError as error:
        return error
    assert isinstance(made, SqlFilter)
    return made


@given(st.one_of(st.text(max_size=20), SOUPS), ROWS)
@settings(max_examples=400)
def test_any_text_is_taken_or_refused_at_a_place(text: str, row: Row):
    whole, begun = compiled(text, strict=True), compiled(text, strict=False)
    if isinstance(whole, SqlFilter):
        assert isinstance(begun, SqlFilter)
        assert repr(begun.tree) == repr(whole.tree)
    else:
        assert 0 <= whole.position <= len(text)
        if isinstance(begun, SqlFilter):  # what stands before the place is the expression
            assert repr(parse(text[: whole.position]).part.node) == repr(begun.tree)
    if isinstance(begun, SqlFilter):
        begun.matches({name: value for name, value in zip(NAMES, row, strict=True) if value})


CHUNKS = [
    b"a",
    b"b",
    b"aa",
    b"1",
    b"5",
    b"x",
    b"\x01",
    b"\x02",
    b"a\x01",
    b"a\x015\x02",
    b"\x02a\x01",
    b"\xe6\x97",
    b"\xff",
]


@given(st.lists(st.lists(st.sampled_from(CHUNKS), max_size=8).map(b"".join), max_size=6))
@example([b"a\x01\x02a\x011", b"a\x011\x02a\x01", b"\x02\x02a\x015", b"a\x01\x01\x02"])
@settings(max_examples=300)
def test_stored_properties_are_found_as_they_are_parsed(raws: list[bytes]):
    batch = batch_of_properties(raws)
    for text in ("a = '5'", "a IS NOT NULL AND b IS NULL", "aa = 'x' OR a CONTAINS '\x01'"):
        made = compile_filter(text, "SQL92")
        expected = [n for n, raw in enumerate(raws) if made.matches(parse_properties(raw))]
        assert made.select(batch).tolist() == expected
