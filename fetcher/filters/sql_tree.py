"""SQL92 expressions as trees, and how Java reads and compares their values.

The nodes are what RocketMQ's evaluation distinguishes, no more: ``<>`` is ``Not(Equal)``, BETWEEN two orders, and a
property where a truth value is needed is wrapped in ``Cast``. A chain of AND or OR is one node, however long.
"""

from __future__ import annotations

import math
import re
import sys
from typing import Final, Literal, TypeAlias

from backends.lazy_dataclass import dataclass
from fetcher.filters.batch import BLANKS

OrderOp = Literal[">", ">=", "<", "<="]
TextOp = Literal["CONTAINS", "STARTSWITH", "ENDSWITH"]
LogicOp = Literal["AND", "OR"]


class Long(int):
    """A 64-bit integer of Java; a plain ``int`` is one of 32 bits, a ``float`` a double."""

    __slots__ = ()


Value: TypeAlias = str | bool | int | Long | float | None
"""What evaluation knows; ``int`` means a 32-bit integer wherever ``Long`` stands beside it."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A number, text, truth value or NULL."""

    value: Value


@dataclass(frozen=True, slots=True)
class Property:
    """The value of a property: text, or null when the message lacks it."""

    name: str


@dataclass(frozen=True, slots=True)
class Negate:
    """``-``: of a number its negative, of anything else null."""

    operand: Node


@dataclass(frozen=True, slots=True)
class Not:
    """``NOT``."""

    operand: Node


@dataclass(frozen=True, slots=True)
class Cast:
    """A property by itself where a truth value is needed: false whatever it says, null when it is absent."""

    operand: Property


@dataclass(frozen=True, slots=True)
class Equal:
    """``=``."""

    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class IsNull:
    """``IS NULL``: never null itself."""

    operand: Node


@dataclass(frozen=True, slots=True)
class Order:
    """``>``, ``>=``, ``<`` or ``<=``."""

    op: OrderOp
    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class In:
    """``IN`` and ``NOT IN`` a list of texts."""

    operand: Property
    texts: tuple[str, ...]
    is_not: bool


@dataclass(frozen=True, slots=True)
class Text:
    """``CONTAINS``, ``STARTSWITH``, ``ENDSWITH`` and their opposites: never null, and both false without a text."""

    op: TextOp
    operand: Node
    text: str
    is_not: bool


@dataclass(frozen=True, slots=True)
class Logic:
    """``AND`` or ``OR`` of two or more, judged from left to right as far as needed; none is of the same operator."""

    op: LogicOp
    operands: tuple[Node, ...]


Node: TypeAlias = (
    Constant | Property | Negate | Not | Cast | Equal | IsNull | Order | In | Text | Logic
)

_PLAIN: Final = (Property, Negate)


def is_boolean(node: Node) -> bool:
    """Whether RocketMQ takes it where a truth value is needed."""
    if isinstance(node, Constant):
        return node.value is None or isinstance(node.value, bool)
    return not isinstance(node, _PLAIN)


def operands_of(node: Node) -> tuple[Node, ...]:
    """The nodes below it."""
    match node:
        case Constant() | Property():
            return ()
        case Equal(left, right) | Order(_, left, right):
            return (left, right)
        case Logic(_, operands):
            return operands
        case _:
            return (node.operand,)


def render(node: Node) -> str:
    """An expression that parses to an equal tree."""
    match node:
        case Constant(value):
            return _constant(value)
        case Property(name):
            return name
        case Negate(operand):
            return f"- {_inner(operand)}"  # two minus signs would begin a comment
        case Not(operand):
            return f"NOT {_inner(operand)}"
        case Cast(operand):
            return operand.name
        case Equal(left, right):
            return f"{_inner(left)} = {_inner(right)}"
        case IsNull(operand):
            return f"{_inner(operand)} IS NULL"
        case Order(op, left, right):
            return f"{_inner(left)} {op} {_inner(right)}"
        case In(operand, texts, is_not):
            listed = ", ".join(map(_constant, texts))
            return f"{operand.name} {'NOT ' * is_not}IN ({listed})"
        case Text(op, operand, text, is_not):
            return f"{_inner(operand)} {'NOT ' * is_not}{op} {_constant(text)}"
        case Logic(op, operands):
            return f" {op} ".join(map(_inner, operands))


def _inner(node: Node) -> str:
    text = render(node)
    return text if isinstance(node, Constant | Property | Cast) else f"({text})"


def _constant(value: Value) -> str:
    if value is None or isinstance(value, bool):
        return str(value).upper().replace("NONE", "NULL")
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    if isinstance(value, float):
        text = repr(value)
        return text if "." in text or "e" in text else f"{text}.0"
    return str(int(value))


# --------------------------------------------------------------------------------------------------
# How Java reads and compares values of different kinds, and when it fails.
#
# A failure while evaluating is not an answer of the three-valued logic: it ends the whole expression, and the message does
# not match, whatever stands around it.
# --------------------------------------------------------------------------------------------------


INT_MAX: Final = 0x7FFF_FFFF
LONG_MAX: Final = 0x7FFF_FFFF_FFFF_FFFF
_DIGITS_PLAIN: Final = 19
_BMP_MAX: Final = "\uffff"
_DECIMAL: Final = re.compile(
    r"[+-]?(?:NaN|Infinity|(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[fFdD]?)"
)
_HEX: Final = re.compile(
    r"([+-]?0[xX](?:[0-9a-fA-F]+\.?|[0-9a-fA-F]*\.[0-9a-fA-F]+)[pP])([+-]?[0-9]+)[fFdD]?"
)
_EXPONENT_MAX: Final = 1 << 30


class Unanswerable(Exception):  # noqa: N818 - no defect, and no error to anyone: the message does not match
    """Java throws here while it evaluates."""


def read_integer(text: str, bound: int) -> int:
    """As ``Integer.valueOf`` and ``Long.valueOf``: any decimal digits of the basic plane, a sign, no blanks.

    In ``[-bound - 1, bound]``; else, and for any other text, Unanswerable.
    """
    digits = text[1:] if text[:1] in {"+", "-"} else text
    if not digits.isdecimal() or (not digits.isascii() and max(digits) > _BMP_MAX):
        raise Unanswerable
    if len(digits) > _DIGITS_PLAIN:
        # As many zeros as it likes; Python refuses to read numbers of thousands of digits.
        digits = "".join([str(int(digit)) for digit in digits]).lstrip("0") or "0"
        if len(digits) > _DIGITS_PLAIN:
            raise Unanswerable
    value = -int(digits) if text[0] == "-" else int(digits)
    if not -bound - 1 <= value <= bound:
        raise Unanswerable
    return value


def read_double(text: str) -> float:
    """As ``Double.valueOf``: decimal or hexadecimal, NaN, Infinity, blanks around it; else Unanswerable."""
    text = text.strip(BLANKS)
    if _DECIMAL.fullmatch(text):
        return float(text.rstrip("fFdD") if text[-1:] in "fFdD" else text)
    found = _HEX.fullmatch(text)
    if not found:
        raise Unanswerable
    return _read_hex(found[1], found[2])


def _read_hex(mantissa: str, power: str) -> float:
    """Java takes any exponent; what is too great for a double is infinite, or zero."""
    digits = power.lstrip("+-0") or "0"
    exponent = _EXPONENT_MAX if len(digits) > len(str(_EXPONENT_MAX)) else int(digits)
    sign = -1.0 if mantissa.startswith("-") else 1.0
    try:
        return float.fromhex(f"{mantissa}{'-' if power.startswith('-') else ''}{exponent}")
    except OverflowError:
        return sign * math.inf


def read_boolean(text: str) -> bool:
    """As ``Boolean.valueOf``: everything but ``true`` in any case is false."""
    return text.lower() == "true"


def order_doubles(left: float, right: float) -> int:
    """As ``Double.compare``: NaN equals itself and is above all, and -0.0 is below 0.0."""
    if left < right:
        return -1
    if left > right:
        return 1
    if left == right:
        return int(math.copysign(1.0, left) - math.copysign(1.0, right)) if left == 0 else 0
    return (left != left) - (right != right)  # noqa: PLR0124 - the test for NaN


def order_values(left: Value, right: Value) -> int:
    """Below 0, 0 or above, as ``ComparisonExpression`` orders two values that are not null.

    Unanswerable: a text is not the number that the other side asks for, or a truth value stands left of a text.
    """
    if isinstance(left, str):
        if isinstance(right, str):
            return (left > right) - (left < right)
        return _order(_read_as(left, right), right)
    if isinstance(right, str):
        if isinstance(left, bool):
            raise Unanswerable
        return _order(left, _read_as(right, left))
    if isinstance(left, bool) != isinstance(right, bool):
        return -1
    return _order(left, right)


def _read_as(text: str, model: Value) -> Value:
    """A text as what the other side is."""
    if isinstance(model, bool):
        return read_boolean(text)
    if isinstance(model, float):
        return read_double(text)
    if isinstance(model, Long):
        return read_integer(text, LONG_MAX)
    return read_integer(text, INT_MAX)


def _order(left: Value, right: Value) -> int:
    """Two numbers, or two truth values."""
    assert not isinstance(left, str | None)
    assert not isinstance(right, str | None)
    if isinstance(left, float) or isinstance(right, float):
        return order_doubles(float(left), float(right))  # a long loses its last bits, as in Java
    return (left > right) - (left < right)


assert sys.float_info.max_exp == 1024, "Python's float is Java's double"  # noqa: PLR2004
