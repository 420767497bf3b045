"""What each rule of the grammar makes, with the checks that RocketMQ makes at that point.

The parser calls these as soon as a rule is complete, innermost first. A part carries where it begins, for errors.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

from lark import Token, Transformer

from fetcher.filters.sql_tree import (
    Cast,
    Constant,
    Equal,
    In,
    IsNull,
    Logic,
    LogicOp,
    Long,
    Negate,
    Node,
    Not,
    Order,
    OrderOp,
    Property,
    Text,
    TextOp,
    Value,
    is_boolean,
    render,
)
from fetcher.filters.sql_values import INT_MAX, LONG_MAX, Unanswerable, order_values

NESTING_MAX: Final = 100
"""Operators within operators; chains of AND or OR and mere parentheses do not count."""
_SHOWN_CHARS: Final = 40
_LONG_DIGITS: Final = len(str(LONG_MAX))
_WORDS: Final[dict[str, bool | None]] = {"TRUE": True, "FALSE": False, "NULL": None}


@dataclass(frozen=True, slots=True)
class SqlPart:
    """A piece of an expression.

    Attributes:
        node: Its tree.
        start: Its first character.
        depth: How deep its operators are nested.
    """

    node: Node
    start: int
    depth: int = 1


Child: TypeAlias = SqlPart | Token


class CheckError(Exception):
    """RocketMQ refuses this when it compiles; the parser's caller makes a ``FilterError`` of it.

    Attributes:
        what: In words.
        position: Where.
        expected: What could stand there; may be empty.
    """

    def __init__(self, what: str, position: int, expected: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.position = position
        self.expected = expected


class Builder(Transformer[Token, SqlPart]):
    """One method for each rule and alias; each takes all that the rule has matched."""

    def start(self, children: list[Child]) -> SqlPart:
        """The whole expression."""
        return as_boolean(_part(children[0]))

    def any(self, children: list[Child]) -> SqlPart:
        """``a OR b OR c``."""
        return logic("OR", [as_boolean(_part(child)) for child in children[::2]])

    def all(self, children: list[Child]) -> SqlPart:
        """``a AND b AND c``."""
        return logic("AND", [as_boolean(_part(child)) for child in children[::2]])

    def equal(self, children: list[Child]) -> SqlPart:
        """``a = b``."""
        left, right = _part(children[0]), _part(children[2])
        _check_equal(left, right)
        return _make(Equal(left.node, right.node), left, right)

    def not_equal(self, children: list[Child]) -> SqlPart:
        """``a <> b``."""
        return negation_of(self.equal(children))

    def is_null(self, children: list[Child]) -> SqlPart:
        """``a IS NULL``."""
        left = _part(children[0])
        return _make(IsNull(left.node), left)

    def is_not_null(self, children: list[Child]) -> SqlPart:
        """``a IS NOT NULL``."""
        return negation_of(self.is_null(children))

    def order(self, children: list[Child]) -> SqlPart:
        """``a > b``."""
        left, right = _part(children[0]), _part(children[2])
        return order_of(cast("OrderOp", str(children[1])), left, right)

    def text(self, children: list[Child]) -> SqlPart:
        """``a NOT CONTAINS 'b'``."""
        left, is_not = _part(children[0]), len(children) == 4  # noqa: PLR2004 - with NOT
        op = cast("TextOp", str(children[-2]).upper())
        return _make(Text(op, left.node, unquote(children[-1]), is_not), left)

    def between(self, children: list[Child]) -> SqlPart:
        """``a NOT BETWEEN b AND c``."""
        value, low, high = _part(children[0]), _part(children[-3]), _part(children[-1])
        if len(children) == 6:  # noqa: PLR2004 - with NOT
            below, above = order_of("<", value, low), order_of(">", value, high)
            return logic("OR", [below, above])
        _check_between(low, high)
        return logic("AND", [order_of(">=", value, low), order_of("<=", value, high)])

    def within(self, children: list[Child]) -> SqlPart:
        """``a NOT IN ('b', 'c')``."""
        left, second = _part(children[0]), children[1]
        if not isinstance(left.node, Property):
            raise CheckError("IN asks for a property", left.start, "a property")
        texts = tuple(unquote(c) for c in children if isinstance(c, Token) and c.type == "STRING")
        is_not = isinstance(second, Token) and second.type == "NOT"
        return _make(In(left.node, texts, is_not), left)

    def plus(self, children: list[Child]) -> SqlPart:
        """``+ a``."""
        return _group(children[0], _part(children[1]))

    def group(self, children: list[Child]) -> SqlPart:
        """``(a)``."""
        return _group(children[0], _part(children[1]))

    def negate(self, children: list[Child]) -> SqlPart:
        """``- a``."""
        inner = _part(children[1])
        return _group(children[0], _make(Negate(inner.node), inner))

    def negation(self, children: list[Child]) -> SqlPart:
        """``NOT a``."""
        return _group(children[0], negation_of(as_boolean(_part(children[1]))))

    def string(self, children: list[Child]) -> SqlPart:
        """A text."""
        return _literal(children[0], unquote(children[0]))

    def decimal(self, children: list[Child]) -> SqlPart:
        """A whole number."""
        digits = str(children[0]).rstrip("lL")
        if len(digits) > _LONG_DIGITS or int(digits) > LONG_MAX:
            raise CheckError(f"{shorten(digits)} is above {LONG_MAX}", _start(children[0]))
        value = int(digits)
        return _literal(children[0], value if value <= INT_MAX else Long(value))

    def float(self, children: list[Child]) -> SqlPart:
        """A decimal."""
        text = str(children[0])
        value = float(text)
        if value > sys.float_info.max:
            what = f"{shorten(text)} is above {sys.float_info.max}"
            raise CheckError(what, _start(children[0]))
        if value == 0:
            what = f"{shorten(text)} is below the least decimal above zero"
            raise CheckError(what, _start(children[0]), "0 for zero")
        return _literal(children[0], value)

    def word(self, children: list[Child]) -> SqlPart:
        """TRUE, FALSE or NULL."""
        return _literal(children[0], _WORDS[str(children[0]).upper()])

    def property(self, children: list[Child]) -> SqlPart:
        """The name of a property, in the case it is written in."""
        return SqlPart(Property(str(children[0])), _start(children[0]))


def as_boolean(part: SqlPart) -> SqlPart:
    """A part where a truth value is needed.

    Raises:
        CheckError: It is a number or a text.
    """
    if isinstance(part.node, Property):
        return SqlPart(Cast(part.node), part.start)
    if not is_boolean(part.node):
        raise CheckError(f"{_show(part)} is not true or false", part.start, "a condition")
    return part


def negation_of(part: SqlPart) -> SqlPart:
    """``NOT`` of a condition."""
    return _make(Not(part.node), part)


def logic(op: LogicOp, parts: list[SqlPart]) -> SqlPart:
    """A chain; chains of the same operator within it become part of it, which changes no answer."""
    operands: list[Node] = []
    depth = 0
    for part in parts:
        if isinstance(part.node, Logic) and part.node.op == op:
            operands += part.node.operands
            depth = max(depth, part.depth - 1)
        else:
            operands.append(part.node)
            depth = max(depth, part.depth)
    return _bounded(SqlPart(Logic(op, tuple(operands)), parts[0].start, depth + 1))


def order_of(op: OrderOp, left: SqlPart, right: SqlPart) -> SqlPart:
    """A comparison by order.

    Raises:
        CheckError: A side can be no number.
    """
    for side in (left, right):
        node = side.node
        is_text = isinstance(node, Constant) and isinstance(node.value, str)
        if is_text or is_boolean(node):
            raise CheckError(
                f"{_show(side)} has no order ({op})", side.start, "a number or a property"
            )
    return _make(Order(op, left.node, right.node), left, right)


def unquote(child: Child) -> str:
    """What a text between quotes says."""
    return str(child)[1:-1].replace("''", "'")


def _check_equal(left: SqlPart, right: SqlPart) -> None:
    for side in (left, right):
        if side.node == Constant(None):
            raise CheckError("NULL equals nothing", side.start, "IS NULL, or another value")
    a, b = left.node, right.node
    if isinstance(a, Constant) and isinstance(b, Constant) and is_boolean(a) and not is_boolean(b):
        raise CheckError(f"{_show(left)} is never equal to {_show(right)}", right.start)


def _check_between(low: SqlPart, high: SqlPart) -> None:
    a, b = low.node, high.node
    if not isinstance(a, Constant) or not isinstance(b, Constant):
        return
    for side, value in ((low, a.value), (high, b.value)):
        if value is None:
            raise CheckError("BETWEEN knows no NULL", side.start, "a number or a property")
    try:
        is_reversed = order_values(b.value, a.value) < 0
    except Unanswerable:
        raise CheckError(
            f"{_show(low)} has no order", low.start, "a number or a property"
        ) from None
    if is_reversed:
        raise CheckError(f"{_show(low)} is above {_show(high)}", low.start, "the lower one first")


def _literal(child: Child, value: Value) -> SqlPart:
    return SqlPart(Constant(value), _start(child))


def _group(opening: Child, part: SqlPart) -> SqlPart:
    return SqlPart(part.node, _start(opening), part.depth)


def _make(node: Node, *parts: SqlPart) -> SqlPart:
    return _bounded(SqlPart(node, parts[0].start, 1 + max(part.depth for part in parts)))


def _bounded(part: SqlPart) -> SqlPart:
    if part.depth > NESTING_MAX:
        raise CheckError(f"operators are nested more than {NESTING_MAX} deep", part.start)
    return part


def _part(child: Child) -> SqlPart:
    assert isinstance(child, SqlPart)
    return child


def _start(child: Child) -> int:
    at: Any = child.start_pos if isinstance(child, Token) else child.start
    assert isinstance(at, int)
    return at


def _show(part: SqlPart) -> str:
    return shorten(render(part.node))


def shorten(text: str) -> str:
    """As much of a text as a message bears."""
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
