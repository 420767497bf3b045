"""Filters: which messages of a topic a reader wants, by tags or by an SQL92 expression, exactly as RocketMQ decides.

``compile_filter`` turns an expression into a ``Filter``; docs/reading.md is the language. A compiled filter is
immutable and may be used by any number of threads. It does no I/O, asks no clock and retries nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from fetcher.filters.batch import Filter, FilterError, Properties, TagFilter, compile_tags

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Filter", "FilterError", "Kind", "Properties", "TagFilter", "compile_filter"]

Kind = Literal["TAG", "SQL92"]
"""The names of the protocol."""


def compile_filter(expression: str, kind: Kind = "TAG", *, strict: bool = True) -> Filter:
    """Make a filter of an expression: ``A||B`` or ``*`` for tags, else an SQL92 expression.

    ``strict`` refuses what RocketMQ takes and leaves out or can never match: text behind a whole SQL92 expression (``a = 5
    b = 6`` is ``a = 5`` there), and tags of which none is named (`` || ``). FilterError: the expression is not valid, or
    exceeds a limit of ``fetcher.filters.sql92``. InvalidError: the library that parses SQL92 expressions is not installed.
    """
    makers: dict[str, Callable[..., Filter]] = {"TAG": compile_tags, "SQL92": _compile_sql}
    if kind not in makers:
        raise ValueError(f"no kind of filter: {kind!r}")
    return makers[kind](expression, strict=strict)


def _compile_sql(expression: str, *, strict: bool) -> Filter:
    from fetcher.filters.sql92 import compile_sql  # noqa: PLC0415 - its parser is loaded by those who use it

    return compile_sql(expression, strict=strict)
