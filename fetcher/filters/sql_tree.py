"""SQL92 expressions as trees.

The nodes are what RocketMQ's evaluation distinguishes, no more: ``<>`` is ``Not(Equal)``, BETWEEN two orders, and a
property where a truth value is needed is wrapped in ``Cast``. A chain of AND or OR is one node, however long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

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
