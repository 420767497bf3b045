"""Filters by an SQL92 expression on the properties of a message, as RocketMQ's broker decides.

``sql_parse`` and ``sql_build`` make a tree and refuse what RocketMQ refuses, ``sql_compile`` makes functions of it,
``sql_values`` knows how Java reads and orders values. The broker's own answers are the test data.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from fetcher.filters.batch import Row, lookup, select_items
from fetcher.filters.message_filter import EXPRESSION_CHARS_MAX, FilterError, Properties
from fetcher.filters.sql_compile import Function, compile_node
from fetcher.filters.sql_tree import Node, Property, operands_of
from fetcher.filters.sql_values import Unanswerable
from tiered.errors import InvalidError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from tiered.local.face import RecordBatch

NAMES_MAX: Final = 256
"""Different properties that an expression may look at."""


@dataclass(frozen=True, slots=True)
class SqlFilter:
    """Messages whose properties meet an expression; see ``Filter``.

    Attributes:
        expression: As it was given.
        tree: What it means.
        names: The properties that it looks at, in order of first use.
        tag_codes: None: an expression says nothing of the index.
    """

    expression: str
    tree: Node
    names: tuple[str, ...]
    _function: Function = field(repr=False, compare=False)
    tag_codes: npt.NDArray[np.int32] | None = None

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

    Args:
        expression: At most ``EXPRESSION_CHARS_MAX`` characters, ``NAMES_MAX`` properties, and operators nested
            ``sql_build.NESTING_MAX`` deep.
        strict: Refuse text behind the expression. False: leave it out, as RocketMQ does.

    Raises:
        FilterError: RocketMQ refuses it as well, or it exceeds a limit, or ``strict`` refuses it.
        InvalidError: The library that parses it is not installed.
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
        from fetcher.filters.sql_build import CheckError  # noqa: PLC0415 - an extra
        from fetcher.filters.sql_parse import parse  # noqa: PLC0415
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
