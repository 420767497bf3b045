"""Results on stdout, in the form that was asked for: table, one JSON document, JSON lines, or CSV."""

from __future__ import annotations

import itertools
import json
import re
import textwrap
from decimal import Decimal
from itertools import zip_longest
from numbers import Number
from typing import TYPE_CHECKING, Any

from backends.lazy_dataclass import dataclass
from tiered.cli.values import SAFE, json_text, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tiered.cli.call import Call

Row = dict[str, Any]
WIDE = "wide"
"""A table of which nothing is cut or left out."""
ALARMS = frozenset({"gaps", "quarantined", "missing"})
"""Columns that tell of messages that are not there: never left out while they have anything to tell."""
_NAME_MIN, _PROSE_MIN = 12, 20
_GAP = "  "
_CSV_QUOTED = re.compile(r'[",\r\n]|^\s|\s$')
_NOT_ASCII = re.compile(r"[^\x00-\x7e]")


def json_bytes(value: object, *, indent: int | None = None) -> bytes:
    """UTF-8 JSON; names that are no UTF-8 come as escapes."""
    is_line = indent is None
    text = json_text(value) if is_line else json.dumps(value, ensure_ascii=False, indent=indent)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text).encode()


class Output:
    """Writes the result of one call."""

    def __init__(self, call: Call) -> None:
        self.form = "table" if call.form == WIDE else call.form
        self._is_wide = call.form == WIDE
        self._stdout = call.stdout

    def emit(
        self, document: Mapping[str, Any], rows: Iterable[Row], columns: Sequence[str]
    ) -> None:
        """Write a result that has a document and rows.

        Args:
            rows: What the other forms show; taken one by one for ``jsonl`` and ``csv``.
        """
        if self.form == "json":
            self.document(document)
        elif self.form == "jsonl":
            for row in rows:
                self._stdout.write(json_bytes(row) + b"\n")
        elif self.form == "csv":
            self._csv(rows, columns)
        else:
            self.table(rows, columns)
        self._stdout.flush()

    def document(self, document: Mapping[str, Any]) -> None:
        """Exactly one JSON document."""
        self._stdout.write(json_bytes(document, indent=2) + b"\n")
        self._stdout.flush()

    def listing(
        self,
        head: Mapping[str, Any],
        name: str,
        rows: Iterable[Row],
        behind: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """Exactly one JSON document: ``head`` and behind it a list, whose rows are taken and written one by one.

        Args:
            behind: What stands behind it; asked for when they are written.
        """
        opened = json_bytes({**head, name: []}, indent=2)
        self._stdout.write(opened.removesuffix(b"]\n}"))
        comma = b"\n    "
        for row in rows:
            self._stdout.write(comma + json_bytes(row))
            comma = b",\n    "
        rest = behind()
        tail = b"," + json_bytes(rest, indent=2).removeprefix(b"{") if rest else b"\n}"
        self._stdout.write(b"]" + tail + b"\n")
        self._stdout.flush()

    def line(self, text: str = "") -> None:
        """A line between tables."""
        self._stdout.write(text.translate(SAFE).encode("utf-8", "backslashreplace") + b"\n")

    def table(self, rows: Iterable[Row], columns: Sequence[str]) -> None:
        """A table: as wide as the terminal, elsewhere (and with ``-o wide``) as wide as it needs."""
        listed = list(rows)
        cells = [[printable(row.get(column)) for column in columns] for row in listed]
        right = [_is_numeric([row.get(column) for row in listed]) for column in columns]
        if self._stdout.isatty() and not self._is_wide:
            self._drawn(columns, cells, right)
        else:
            self._plain(columns, cells, right)

    def _plain(self, columns: Sequence[str], cells: list[list[str]], right: list[bool]) -> None:
        widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
        for line in ([*columns], *cells):
            padded = [
                cell.rjust(width) if is_right else cell.ljust(width)
                for cell, width, is_right in zip(line, widths, right, strict=True)
            ]
            self.line("  ".join(padded).rstrip())

    def _drawn(self, columns: Sequence[str], cells: list[list[str]], right: list[bool]) -> None:
        from shutil import get_terminal_size

        for line in fit(columns, cells, right, get_terminal_size().columns):
            self.line(line)

    def _csv(self, rows: Iterable[Row], columns: Sequence[str]) -> None:
        """RFC 4180; nothing between two commas is null, and ``""`` a text without a character."""
        for cells in itertools.chain([columns], ([row.get(c) for c in columns] for row in rows)):
            line = ",".join(map(_csv_cell, cells)) + "\n"
            self._stdout.write(line.encode("utf-8", "backslashreplace"))


@dataclass(frozen=True, slots=True)
class Table:
    """Rows among lines for people."""

    rows: Sequence[Row]
    columns: Sequence[str]


def show(
    call: Call,
    document: Mapping[str, Any],
    *,
    rows: Iterable[Row] | None = None,
    columns: Sequence[str] | None = None,
    lines: Iterable[str | Table] | None = None,
) -> None:
    """Print a result in the form that was asked for.

    Args:
        document: What ``json`` shows.
        rows: What ``jsonl`` and ``csv`` show; without them it is one, the document.
        columns: Of the rows; without them, all that the document has.
        lines: What people read instead of a table of the rows.
    """
    output = Output(call)
    if lines is None or output.form != "table":
        rows = [{**document}] if rows is None else rows
        output.emit(document, rows, list(document) if columns is None else columns)
        return
    for line in lines:
        if isinstance(line, Table):
            output.table(line.rows, line.columns)
        else:
            output.line(line)


def fit(
    columns: Sequence[str], cells: list[list[str]], right: Sequence[bool], width: int
) -> list[str]:
    """The lines of a table no wider than a terminal.

    Numbers never break. Names are cut in the middle, sentences wrapped in their own column, titles wrapped at their
    underscores. What still has no room is left out and said: first columns of numbers that have nothing, then the last ones;
    of ``ALARMS`` only what is nothing.

    Args:
        width: Of the terminal; when not even the first column and a number fit, it is passed.
    """
    table = [
        _Column(title, [row[number] for row in cells], right[number])
        for number, title in enumerate(columns)
    ]
    if _room(table, [column.natural for column in table], width) >= 0:
        widths = [column.natural for column in table]
        return _lines(table, widths)
    shown = list(table)
    while len(shown) > 1 and _room(shown, [column.least for column in shown], width) < 0:
        shown.remove(_dispensable(shown[1:]))
    lines = _lines(shown, _widths(shown, width))
    missing = ", ".join(column.title for column in table if column not in shown)
    if missing:
        lines += textwrap.wrap(f"(no room for {missing}: -o wide shows all)", max(width, 1))
    return lines


class _Column:
    """A column of a table, and the widths that it can have."""

    def __init__(self, title: str, cells: list[str], is_number: bool) -> None:
        self.title, self.cells, self.is_number = title, cells, is_number
        self.is_prose = not is_number and any(" " in cell for cell in cells)
        self.words = re.findall(r"[^_]+_?", title) or [title]
        self.data = max(map(_cells_of, cells), default=0)
        self.natural = max(self.data, len(title))
        head = max(map(len, self.words))
        shortest = self.data if is_number else _PROSE_MIN if self.is_prose else _NAME_MIN
        self.least = max(head, min(self.data, shortest))

    @property
    def is_empty(self) -> bool:
        """Nothing is in it but noughts."""
        return all(cell in {"-", "0", "0.0", "no", ""} for cell in self.cells)

    def head(self, width: int) -> list[str]:
        """The title in as many lines as it takes."""
        found = [""]
        for word in self.words:
            if found[-1] and len(found[-1] + word) > width:
                found.append("")
            found[-1] += word
        return found

    def shown(self, cell: str, width: int) -> list[str]:
        """A cell in as many lines as it takes."""
        if _cells_of(cell) <= width:
            return [cell]
        if self.is_prose:
            return _wrapped(cell, width)
        return [_cut(cell, width)]


def _room(columns: Sequence[_Column], widths: Sequence[int], width: int) -> int:
    return width - sum(widths) - len(_GAP) * (len(columns) - 1)


def _dispensable(columns: Sequence[_Column]) -> _Column:
    """The column to do without: numbers before names, which can be cut; of them what is empty, and then the last."""

    def rank(at: tuple[int, _Column]) -> tuple[bool, bool, bool, int]:
        column = at[1]
        is_alarm = column.title in ALARMS and not column.is_empty
        return not is_alarm, column.is_number, column.is_empty, at[0]

    return max(enumerate(columns), key=rank)[1]


def _widths(columns: Sequence[_Column], width: int) -> list[int]:
    """What is left beside the least goes to texts, a character at a time to the narrowest, and then to titles."""
    widths = [column.least for column in columns]
    room = _room(columns, widths, width)
    texts = [n for n, column in enumerate(columns) if not column.is_number]
    while room > 0:
        growing = [n for n in texts if widths[n] < columns[n].data]
        if not growing:
            break
        widths[min(growing, key=widths.__getitem__)] += 1
        room -= 1
    for number, column in enumerate(columns):
        more = len(column.title) - widths[number]
        if 0 < more <= room:
            widths[number] += more
            room -= more
    return widths


def _lines(columns: Sequence[_Column], widths: Sequence[int]) -> list[str]:
    heads = [column.head(width) for column, width in zip(columns, widths, strict=True)]
    tall = max(map(len, heads))
    lines = _row(columns, widths, [[""] * (tall - len(head)) + head for head in heads])
    lines.append(_GAP.join("\u2500" * width for width in widths))
    for cells in zip(*(column.cells for column in columns), strict=True):
        shown = [c.shown(cell, w) for c, cell, w in zip(columns, cells, widths, strict=True)]
        lines += _row(columns, widths, shown)
    return lines


def _row(
    columns: Sequence[_Column], widths: Sequence[int], shown: Sequence[list[str]]
) -> list[str]:
    lines = []
    for texts in zip_longest(*shown, fillvalue=""):
        padded = []
        for column, width, text in zip(columns, widths, texts, strict=True):
            blanks = " " * (width - _cells_of(text))
            padded.append(blanks + text if column.is_number else text + blanks)
        lines.append(_GAP.join(padded).rstrip())
    return lines


def _cells_of(text: str) -> int:
    """How many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _cut(text: str, width: int) -> str:
    """Its beginning and its end, which tell names apart."""
    head, tail = text, text
    while _cells_of(head) > (width - 1) // 2:
        head = head[:-1]
    while _cells_of(tail) > width - 1 - _cells_of(head):
        tail = tail[1:]
    return head + "…" + tail


def _wrapped(text: str, width: int) -> list[str]:
    if text.isascii():
        return textwrap.wrap(text, width)
    from rich.cells import chop_cells

    return chop_cells(text, width)


def _is_numeric(values: Sequence[object]) -> bool:
    found = [value for value in values if value is not None]
    return bool(found) and all(
        isinstance(value, Number) and not isinstance(value, bool) for value in found
    )


def _csv_cell(value: object) -> str:
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case list() | tuple() | dict():
            text = json_text(value)
        case Decimal():
            return f"{value:f}"
        case _:
            text = str(value)
    is_plain = text and not _CSV_QUOTED.search(text)
    return text if is_plain else '"' + text.replace('"', '""') + '"'
