"""What notebooks show of a tier, its topics and its messages: small tables, in which nothing of a message is markup."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

ROWS_MAX: Final = 20
TEXT_MAX: Final = 200


def table(title: str, names: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """An HTML table of at most ``ROWS_MAX`` rows, which says how many there are besides."""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    lines = [
        f"<tr>{''.join(f'<td>{_short(value)}</td>' for value in row)}</tr>"
        for row in rows[:ROWS_MAX]
    ]
    more = len(rows) - ROWS_MAX
    if more > 0:
        lines.append(f'<tr><td colspan="{len(names)}">… and {more:,} more</td></tr>')
    caption = f"<caption>{_short(title)}</caption>"
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def fields(title: str, said: Sequence[tuple[str, object]]) -> str:
    """An HTML table of names and values."""
    lines = [f"<tr><th>{escape(name)}</th><td>{_short(value)}</td></tr>" for name, value in said]
    return f"<table><caption>{_short(title)}</caption><tbody>{''.join(lines)}</tbody></table>"


def _short(value: object) -> str:
    text = f"{value:,}" if isinstance(value, int) else str(value)
    text = text.encode("utf-8", "replace").decode()  # names may have bytes that are no UTF-8
    return escape(text if len(text) <= TEXT_MAX else f"{text[:TEXT_MAX]}…")


class TopicNames(list[str]):
    """Names of topics; notebooks show what they hold."""

    def __init__(self, rows: Sequence[tuple[str, int, int]]) -> None:
        """Of name, number of queues and number of queue offsets, each."""
        super().__init__(name for name, _, _ in rows)
        self._rows = rows

    def _repr_html_(self) -> str:
        return table(f"{len(self)} topics", ("topic", "queues", "messages"), self._rows)
