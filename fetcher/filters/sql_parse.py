"""From the text of an SQL92 expression to its tree: RocketMQ's grammar, and what it refuses when it compiles.

The parser takes as many tokens as make an expression. RocketMQ stops there and never looks further, except that the
next token must be one; ``parse`` tells how far it came, and the caller decides what that means.

Neither the parser nor the checks recurse, so that depth costs memory only; both are linear in the text, whose length
is bounded before it comes here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final, cast

from lark import Lark, TextSlice, Token
from lark.exceptions import UnexpectedCharacters, UnexpectedToken

from fetcher.filters.message_filter import FilterError
from fetcher.filters.sql_build import Builder, SqlPart, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lark.parsers.lalr_interactive_parser import InteractiveParser

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
    """An expression.

    Attributes:
        part: Its tree.
        end: Where the first token stands that is no part of it; None when there is none.
        expected: What could have stood there, in words.
    """

    part: SqlPart
    end: int | None
    expected: str


def parse(expression: str) -> Parsed:
    """Read the expression at the beginning of a text.

    Raises:
        FilterError: There is none, or RocketMQ refuses it.
    """
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
