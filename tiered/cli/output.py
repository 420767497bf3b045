"""Results on stdout, in the form that was asked for: table, one JSON document, JSON lines, or CSV."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tiered.cli.call import Call

Row = dict[str, Any]
_ENCODE = json.JSONEncoder(ensure_ascii=False, check_circular=False).encode


def json_bytes(value: object, *, indent: int | None = None) -> bytes:
    """UTF-8 JSON; names that are no UTF-8 come as escapes."""
    try:
        if indent is None:
            return _ENCODE(value).encode()
        return json.dumps(value, ensure_ascii=False, indent=indent).encode()
    except UnicodeEncodeError:
        return json.dumps(value, indent=indent).encode()


class _Safe(dict[int, str]):
    """What stands for each character, made when it is first met."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        self[code] = char if char.isprintable() else char.encode("unicode_escape").decode()
        return self[code]


_SAFE = _Safe()


def printable(value: object) -> str:
    """One cell of a table, without anything that a terminal would obey."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(printable, value))
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return text if text.isprintable() else text.translate(_SAFE)


class Output:
    """Writes the result of one call."""

    def __init__(self, call: Call) -> None:
        self.form = call.form
        self._stdout = call.stdout

    def emit(
        self, document: Mapping[str, Any], rows: Iterable[Row], columns: Sequence[str]
    ) -> None:
        """Write a result that has a document and rows.

        Args:
            document: What ``json`` shows.
            rows: What the other forms show; taken one by one for ``jsonl`` and ``csv``.
            columns: Of table and CSV.
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

    def line(self, text: str = "") -> None:
        """A line between tables."""
        self._stdout.write(text.translate(_SAFE).encode("utf-8", "backslashreplace") + b"\n")

    def table(self, rows: Iterable[Row], columns: Sequence[str]) -> None:
        """A table: drawn on a terminal, plain columns elsewhere."""
        listed = list(rows)
        cells = [[printable(row.get(column)) for column in columns] for row in listed]
        right = [_is_numeric([row.get(column) for row in listed]) for column in columns]
        if self._stdout.isatty():
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
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for column, is_right in zip(columns, right, strict=True):
            table.add_column(column, justify="right" if is_right else "left", overflow="fold")
        for row in cells:
            table.add_row(*map(Text, row))
        self._stdout.flush()
        Console().print(table)

    def _csv(self, rows: Iterable[Row], columns: Sequence[str]) -> None:
        import csv
        import io

        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(columns)
        for row in rows:
            writer.writerow([_csv_cell(row.get(column)) for column in columns])
            self._stdout.write(buffer.getvalue().encode("utf-8", "backslashreplace"))
            buffer.seek(0)
            buffer.truncate()
        self._stdout.write(buffer.getvalue().encode("utf-8", "backslashreplace"))


def _is_numeric(values: Sequence[object]) -> bool:
    found = [value for value in values if value is not None]
    return bool(found) and all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in found
    )


def _csv_cell(value: object) -> object:
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, list | dict) else value
