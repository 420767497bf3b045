"""Filters by an SQL92 expression on the properties of a message, as RocketMQ's broker decides.

``sql_parse`` makes a tree and refuses what RocketMQ refuses; functions are made of it here; ``sql_tree`` knows the nodes,
and how Java reads and orders values. The broker's own answers are the test data.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import field
from typing import TYPE_CHECKING, Final, TypeAlias

from backends.lazy_dataclass import dataclass
from fetcher.filters.batch import (
    EXPRESSION_CHARS_MAX,
    FilterError,
    Properties,
    Row,
    lookup,
    select_items,
)
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
    OrderOp,
    Property,
    Text,
    Unanswerable,
    Value,
    operands_of,
    order_doubles,
    order_values,
    read_double,
    read_integer,
)
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import numpy.typing as npt

    from tiered.local.interface import RecordBatch


# --------------------------------------------------------------------------------------------------
# From trees to functions: one call of Python for each operator that is reached, and no tree at run time.
#
# A function takes a row (the values of the properties by number) and gives what the node is: a value, or a truth value
# or null. It raises ``Unanswerable`` where Java throws. What is evaluated before what, and what not at all, is as in
# Java, since it decides whether a failure comes about.
# --------------------------------------------------------------------------------------------------


Function: TypeAlias = Callable[[Row], Value]

_TESTS: Final[dict[OrderOp, Callable[[float, float], bool]]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_MIRRORED: Final[dict[OrderOp, OrderOp]] = {">": "<", ">=": "<=", "<": ">", "<=": ">="}


def compile_node(node: Node, numbers: Mapping[str, int]) -> Function:
    """The function of a tree, by recursion; ``numbers``: where in a row each property is that the tree names."""
    match node:
        case Constant(value):
            return lambda _: value
        case Property(name):
            return operator.itemgetter(numbers[name])
        case Cast(Property(name)):
            number = numbers[name]
            return lambda row: None if row[number] is None else False
        case Negate(operand):
            return _negate(compile_node(operand, numbers))
        case Not(operand):
            return _not(compile_node(operand, numbers))
        case IsNull(operand):
            inner = compile_node(operand, numbers)
            return lambda row: inner(row) is None
        case Equal(left, right):
            return _equal(left, right, numbers)
        case Order(op, left, right):
            return _order(op, left, right, numbers)
        case In(Property(name), texts, is_not):
            return _within(numbers[name], frozenset(texts), is_not)
        case Text():
            return _text(node, compile_node(node.operand, numbers))
        case Logic(op, operands):
            return _logic([compile_node(one, numbers) for one in operands], is_or=op == "OR")


def _negate(inner: Function) -> Function:
    def negate(row: Row) -> Value:
        value = inner(row)
        if isinstance(value, Long):
            return Long(-value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return -value

    return negate


def _not(inner: Function) -> Function:
    def negation(row: Row) -> Value:
        value = inner(row)
        return None if value is None else not value

    return negation


def _logic(inners: list[Function], *, is_or: bool) -> Function:
    def logic(row: Row) -> Value:
        result: Value = not is_or
        for inner in inners:
            value = inner(row)
            if value is is_or:
                return is_or
            if value is None:
                result = None
        return result

    return logic


def _within(number: int, texts: frozenset[str], is_not: bool) -> Function:
    def within(row: Row) -> Value:
        value = row[number]
        return None if value is None else (value in texts) is not is_not

    return within


def _text(node: Text, inner: Function) -> Function:
    text, is_not = node.text, node.is_not
    tests: dict[str, Callable[[str], bool]] = {
        "CONTAINS": lambda value: text in value,
        "STARTSWITH": lambda value: value.startswith(text),
        "ENDSWITH": lambda value: value.endswith(text),
    }
    test = tests[node.op]
    if not text:
        return lambda _: False  # before the operand is looked at

    def compare(row: Row) -> Value:
        value = inner(row)
        return isinstance(value, str) and test(value) is not is_not

    return compare


def _equal(left: Node, right: Node, numbers: Mapping[str, int]) -> Function:
    fast = _equal_fast(left, right, numbers)
    if fast is not None:
        return fast
    one, other = compile_node(left, numbers), compile_node(right, numbers)

    def equal(row: Row) -> Value:
        a, b = one(row), other(row)
        if a is None:
            return True if b is None else None
        return b is not None and order_values(a, b) == 0

    return equal


def _equal_fast(left: Node, right: Node, numbers: Mapping[str, int]) -> Function | None:
    """A property on one side and a number or text on the other: nearly all there are."""
    absent: Value = None
    if isinstance(right, Property):
        left, right = right, left
        absent = False  # `5 = a` is false without a, `a = 5` is null
    wanted = _number_or_text(right)
    if not isinstance(left, Property) or wanted is None:
        return None
    number, reader = numbers[left.name], _reader(wanted)

    def equal(row: Row) -> Value:
        value = row[number]
        return absent if value is None else reader(value) == wanted

    return equal


def _order(op: OrderOp, left: Node, right: Node, numbers: Mapping[str, int]) -> Function:
    if isinstance(right, Property) and not isinstance(left, Property):
        fast = _order_fast(_MIRRORED[op], right, left, numbers)
    else:
        fast = _order_fast(op, left, right, numbers)
    if fast is not None:
        return fast
    one, other, test = compile_node(left, numbers), compile_node(right, numbers), _TESTS[op]

    def order(row: Row) -> Value:
        a = one(row)
        if a is None:
            return None  # before the right side is looked at
        b = other(row)
        if b is None:
            return None
        if isinstance(a, str) and isinstance(b, str):
            return test(order_doubles(read_double(a), read_double(b)), 0)
        return test(order_values(a, b), 0)

    return order


def _order_fast(
    op: OrderOp, left: Node, right: Node, numbers: Mapping[str, int]
) -> Function | None:
    bound = _number_or_text(right)
    if not isinstance(left, Property) or bound is None or isinstance(bound, str):
        return None
    number, reader, test = numbers[left.name], _number_reader(bound), _TESTS[op]
    limit, is_above = bound, op.startswith(">")

    def order(row: Row) -> Value:
        value = row[number]
        if value is None:
            return None
        read = reader(value)
        if read != read:  # noqa: PLR0124 - NaN is above everything in Java
            return is_above
        return test(read, limit)

    return order


def _number_or_text(node: Node) -> str | int | float | None:
    """The value of a constant that has one, and of a negated number; None for all else."""
    if isinstance(node, Negate):
        value = _number_or_text(node.operand)
        if value is None or isinstance(value, str):
            return None
        return Long(-value) if isinstance(value, Long) else -value
    if not isinstance(node, Constant) or isinstance(node.value, bool):
        return None
    return node.value


def _reader(model: str | int | float) -> Callable[[str], str | float]:  # noqa: PYI041
    """What turns a property into what the other side is."""
    return str if isinstance(model, str) else _number_reader(model)


def _number_reader(model: int | float) -> Callable[[str], float]:  # noqa: PYI041 - mypy tells them apart
    if not isinstance(model, int):
        return read_double
    bound = LONG_MAX if isinstance(model, Long) else INT_MAX
    return lambda text: read_integer(text, bound)


NAMES_MAX: Final = 256
"""Different properties that an expression may look at."""


@dataclass(frozen=True, slots=True)
class SqlFilter:
    """Messages whose properties meet an expression; see ``Filter``."""

    expression: str  # as it was given
    tree: Node  # what it means
    names: tuple[str, ...]  # the properties that it looks at, in order of first use
    _function: Function = field(repr=False, compare=False)
    tag_codes: npt.NDArray[np.int32] | None = None  # none: an expression says nothing of the index

    def matches(self, properties: Properties) -> bool:
        return self.test(tuple(lookup(properties, name) for name in self.names))

    def test(self, row: Row) -> bool:
        """Whether a message is wanted, by the values of ``names``. Null and what fails in Java is no."""
        try:
            return self._function(row) is True
        except Unanswerable:
            return False

    def select(self, batch: RecordBatch) -> npt.NDArray[np.int64]:
        """See ``Filter``. Only ``names`` are looked up."""
        return select_items(batch, None, self.names, self.test)


def compile_sql(expression: str, *, strict: bool) -> SqlFilter:
    """Make a filter of an SQL92 expression.

    It has at most ``EXPRESSION_CHARS_MAX`` characters, ``NAMES_MAX`` properties, and operators nested
    ``sql_parse.NESTING_MAX`` deep. ``strict`` refuses text behind it, which RocketMQ leaves out.
    """
    if len(expression) > EXPRESSION_CHARS_MAX:
        what = f"the expression has more than {EXPRESSION_CHARS_MAX} characters"
        raise FilterError(what, expression, EXPRESSION_CHARS_MAX)
    tree = _parse(expression, strict=strict)
    names = _names(tree)
    if len(names) > NAMES_MAX:
        raise FilterError(f"the expression names more than {NAMES_MAX} properties", expression, 0)
    numbers = {name: number for number, name in enumerate(names)}
    return SqlFilter(expression, tree, names, compile_node(tree, numbers))


def _parse(expression: str, *, strict: bool) -> Node:
    try:
        from fetcher.filters.sql_parse import CheckError, parse  # noqa: PLC0415 - an extra
    except ImportError as error:
        what = f"SQL92 expressions need the package {error.name}"
        raise InvalidError(what, do="install tieredmq[sql]") from error
    try:
        parsed = parse(expression)
    except CheckError as error:
        raise FilterError(error.what, expression, error.position, expected=error.expected) from None
    if strict and parsed.end is not None:
        what = "the expression is complete, and more stands behind it, which RocketMQ leaves out"
        raise FilterError(what, expression, parsed.end, expected=parsed.expected)
    return parsed.part.node


def _names(tree: Node) -> tuple[str, ...]:
    found: dict[str, None] = {}
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Property):
            found[node.name] = None
        waiting += reversed(operands_of(node))
    return tuple(found)
