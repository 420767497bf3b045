"""From the text of an SQL92 expression to its tree: RocketMQ's grammar, and what it refuses when it compiles.

The parser takes as many tokens as make an expression. RocketMQ stops there and never looks further, except that the
next token must be one; ``parse`` tells how far it came, and the caller decides what that means.

Neither the parser nor the checks recurse, so that depth costs memory only; both are linear in the text, whose length
is bounded before it comes here.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from lark import Lark, TextSlice, Token, Transformer
from lark.exceptions import UnexpectedCharacters, UnexpectedToken

from backends.lazy_dataclass import dataclass
from fetcher.filters.batch import FilterError
from fetcher.filters.sql_tree import (
    INT_MAX,
    LONG_MAX,
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
    Unanswerable,
    Value,
    is_boolean,
    order_values,
    render,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lark.parsers.lalr_interactive_parser import InteractiveParser


# --------------------------------------------------------------------------------------------------
# What each rule of the grammar makes, with the checks that RocketMQ makes at that point.
#
# The parser calls these as soon as a rule is complete, innermost first. A part carries where it begins, for errors.
# --------------------------------------------------------------------------------------------------


NESTING_MAX: Final = 100
"""Operators within operators; chains of AND or OR and mere parentheses do not count."""
_SHOWN_CHARS: Final = 40
_LONG_DIGITS: Final = len(str(LONG_MAX))
_CONSTANTS: Final[dict[str, bool | None]] = {"TRUE": True, "FALSE": False, "NULL": None}


@dataclass(frozen=True, slots=True)
class SqlPart:
    """A chunk of an expression."""

    node: Node  # its tree
    start: int  # its first character
    depth: int = 1  # how deep its operators are nested


Child: TypeAlias = SqlPart | Token


class CheckError(Exception):
    """RocketMQ refuses this when it compiles; the parser's caller makes a ``FilterError`` of it."""

    def __init__(self, what: str, position: int, expected: str = "") -> None:
        super().__init__(what)
        self.what = what  # in words
        self.position = position  # where
        self.expected = expected  # what could stand there; may be empty


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
        return _literal(children[0], _CONSTANTS[str(children[0]).upper()])

    def property(self, children: list[Child]) -> SqlPart:
        """The name of a property, in the case it is written in."""
        return SqlPart(Property(str(children[0])), _start(children[0]))


def as_boolean(part: SqlPart) -> SqlPart:
    """A part where a truth value is needed; CheckError: it is a number or a text."""
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
    """A comparison by order; CheckError: a side can be no number."""
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


_KEYWORDS: Final = frozenset(
    {"NOT", "AND", "OR", "BETWEEN", "IN", "TRUE", "FALSE", "NULL", "IS"}
    | {"CONTAINS", "STARTSWITH", "ENDSWITH"}
)

_GRAMMAR: Final = r"""
start: any
?any: all | all ("OR" all)+
?all: equality | equality ("AND" equality)+
?equality: comparison
    | equality "=" comparison -> equal
    | equality "<>" comparison -> not_equal
    | equality IS NULL -> is_null
    | equality IS NOT NULL -> is_not_null
?comparison: unary
    | comparison (">" | ">=" | "<" | "<=") unary -> order
    | comparison NOT? (CONTAINS | STARTSWITH | ENDSWITH) STRING -> text
    | comparison NOT? BETWEEN unary AND unary -> between
    | comparison NOT? IN "(" STRING ("," STRING)* ")" -> within
?unary: primary
    | "+" unary -> plus
    | "-" unary -> negate
    | NOT unary -> negation
?primary: STRING -> string
    | DECIMAL -> decimal
    | FLOAT -> float
    | (TRUE | FALSE | NULL) -> word
    | ID -> property
    | "(" any ")" -> group

%declare NOT AND OR BETWEEN IN TRUE FALSE NULL IS CONTAINS STARTSWITH ENDSWITH
ID: /[A-Za-z_$][A-Za-z0-9_$]*/
FLOAT.2: /[0-9]+\.[0-9]*([eE][+-]?[0-9]+)?|\.[0-9]+([eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+/
DECIMAL: /0|[1-9][0-9]*[lL]?/
STRING: /'(?:''|[^'])*'/
_BLOCK_COMMENT.3: /\/\*[^*]*\*(?:\*|[^*\/][^*]*\*)*\//
_BLANK: /[ \t\n\r\f]+/
%ignore _BLOCK_COMMENT
%ignore _BLANK
"""
_LINE_COMMENTS: Final = r"""
_LINE_COMMENT.3: /--[^\n\r]*[\n\r]/
%ignore _LINE_COMMENT
"""

_WORDS: Final = {
    "STRING": "a text such as 'x'",
    "LPAR": "(",
    "RPAR": ")",
    "COMMA": "a comma",
    "$END": "the end",
}
_OPERAND: Final = frozenset({"STRING", "DECIMAL", "FLOAT", "TRUE", "ID", "LPAR", "MINUS"})
_OPERATOR: Final = frozenset({"EQUAL", "IS"})
_COMPARISON: Final = frozenset({"MORETHAN", "IN", "BETWEEN"})


@dataclass(frozen=True, slots=True)
class Parsed:
    """An expression."""

    part: SqlPart  # its tree
    end: (
        int | None
    )  # where the first token stands that is not a part of it; None when there is none
    expected: str  # what could have stood there, in words


def parse(expression: str) -> Parsed:
    """Read the expression at the beginning of a text; FilterError: there is none, or RocketMQ refuses it."""
    parser = _lark().parse_interactive()
    fed: list[Token] = []
    for token in _tokens(expression):
        try:
            parser.feed_token(token)
        except UnexpectedToken:
            accepted = _accepted(fed)
            if "$END" not in accepted:
                raise _unexpected(expression, token, accepted) from None
            return Parsed(_finish(parser, fed, expression), token.start_pos, _describe(accepted))
        fed.append(token)
    return Parsed(_finish(parser, fed, expression), None, "")


def _finish(parser: InteractiveParser, fed: list[Token], expression: str) -> SqlPart:
    try:
        part = parser.feed_eof()  # type: ignore[no-untyped-call]
    except UnexpectedToken:
        what, expected = "the expression ends too early", _describe(_accepted(fed))
        raise FilterError(what, expression, len(expression), expected=expected) from None
    assert isinstance(part, SqlPart)
    return part


def _accepted(fed: list[Token]) -> frozenset[str]:
    """The kinds of tokens that can follow. By a parser of its own, since one that failed has forgotten some."""
    parser = _lark().parse_interactive()
    for token in fed:
        parser.feed_token(token)
    return frozenset(parser.accepts())  # type: ignore[no-untyped-call]


def _tokens(expression: str) -> Iterator[Token]:
    """The tokens one by one: what is not asked for is not looked at.

    Two minus signs begin a comment only if a line ends behind them. Behind the last line end they are lexed as what
    they are then, or else each of them would be followed to the end of the text.
    """
    lines_end = max(expression.rfind("\n"), expression.rfind("\r")) + 1
    done = 0
    try:
        if lines_end:
            for token in _lark(_LINE_COMMENTS).lex(expression):
                yield token
                done = token.end_pos or lines_end
                if done >= lines_end:
                    break
            else:
                return
        yield from _lark().lex(TextSlice(expression, done, len(expression)))
    except UnexpectedCharacters as error:
        raise _unreadable(expression, cast("Any", error).pos_in_stream) from None  # declared None


def _unreadable(expression: str, at: int) -> FilterError:
    """No token begins here."""
    if expression.startswith("'", at):
        what = "a text without its closing quote"
    elif expression.startswith("/*", at):
        what = "a comment without its end"
    else:
        what = f"{expression[at]!r} cannot stand here"
    return FilterError(what, expression, at)


def _unexpected(expression: str, token: Token, accepted: frozenset[str]) -> FilterError:
    at = token.start_pos
    assert at is not None
    what = f"{shorten(str(token))!r} cannot stand here"
    return FilterError(what, expression, at, expected=_describe(accepted))


def _describe(accepted: frozenset[str]) -> str:
    """Kinds of tokens in words."""
    left, words = set(accepted), []
    if left >= _OPERAND:
        words.append("a property, a value, NOT or (")
        left -= _OPERAND | {"PLUS", "NOT", "FALSE", "NULL"}
    if left >= _OPERATOR:
        is_whole = left >= _COMPARISON
        words.append("an operator" if is_whole else "=, <> or IS")
        left &= {"AND", "OR", "$END", "RPAR"}
    words += [
        _WORDS.get(name, name) for name in sorted(left, key=lambda name: (name[0] == "$", name))
    ]
    return ", ".join(words[:-1]) + " or " * (len(words) > 1) + words[-1]


def _keyword(token: Token) -> Token:
    """Words are letters of ASCII, in any case."""
    word = token.upper()
    return token.update(type=word) if word in _KEYWORDS else token


@cache
def _lark(extra: str = "") -> Lark:
    """The parser: its tables are the same for all expressions, and it holds no state of any. Some 0.1 s to make."""
    made = Lark(
        _GRAMMAR + extra,
        parser="lalr",
        lexer="basic",
        keep_all_tokens=True,
        maybe_placeholders=False,
        lexer_callbacks={"ID": _keyword},
        transformer=Builder(),
    )
    # It completes its lexer on first use, which is not for several threads at once.
    list(made.lex("a"))
    return made
