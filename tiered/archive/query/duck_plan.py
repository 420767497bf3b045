"""Which files a question needs, as far as DuckDB itself can say before it has opened one.

Overview: the question is explained on empty tables of the archive's columns, with two of DuckDB's optimizers: one that
simplifies expressions (``date_trunc('day', store_ts) = …`` becomes two bounds) and one that pushes filters down to the
tables. What the plan says of each table's rows is read where its form is known (tests joined by AND: a column of the log
against a constant, or a key), and nothing is concluded from the rest. So an answer never depends on this module, only its
cost; with a version of DuckDB that words its plans in another way, every file is read.

No optimizer that looks at data runs, since on empty tables it would conclude too much.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import datetime
from itertools import chain, count
from typing import TYPE_CHECKING, Any

from tiered.archive.columns import schema
from tiered.archive.selection import MAX, MIN, Selection, micros

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tiered.archive.model import Lane, ParquetFile

COLUMNS = ("queue_id", "queue_offset", "store_ts", "incarnation")
"""Those of which the log knows something."""
_LISTS = re.compile(r"(?i)\b(show|desc|describe|pragma|sqlite_master|pg_\w+|duckdb_\w+)\b|_schema")
_PLACE = "memory.main."
_KINDS = {
    "string": "VARCHAR",
    "int32": "INTEGER",
    "int64": "BIGINT",
    "binary": "BLOB",
    "timestamp[us, tz=UTC]": "TIMESTAMPTZ",
    "list<item: string>": "VARCHAR[]",
    "list<element: string>": "VARCHAR[]",
    "map<string, string>": "MAP(VARCHAR, VARCHAR)",
}
_RUN = ("expression_rewriter", "filter_pushdown")
_AMONG = re.compile(r"(\w+) IN \((-?\d+(?:, -?\d+)*)\)")
_TEST = re.compile(r"(\w+) (=|<=|>=|<|>) (?:'(\d+)'::TIMESTAMP WITH TIME ZONE|(-?\d+))")
EMPTY = "FROM hidden.no_rows"
"""The archive's columns without a row, for views that only have to be listed: in a quarter of the time of ``no_rows``."""
_KEY = re.compile(
    r"(?:(uniq_key|msg_key) = '(\d+)'|(?:list|array)_(?:contains|has)\(keys, '(\d+)'\))"
)
_AND = " AND "
_OTHER = re.compile(r"\b(OR|CASE|BETWEEN|NOT)\b")
"""Beside these an AND may mean something else."""
_STEP = {"<": -1, ">": 1}
_TEXT = re.compile(r"'(?:[^']|'')*'")


def table_names(topics: Iterable[str]) -> dict[str, str]:
    """The table of each topic: its name, as far as SQL can tell it from the others'.

    Names of tables that differ in case alone are one name to SQL, so all but the first topic have ``~2``, ``~3`` … behind
    theirs. Bytes that are no UTF-8 are question marks.
    """
    found: dict[str, str] = {}
    taken: set[str] = set()
    for topic in topics:
        plain = topic.encode("utf-8", "replace").decode()
        tries = (f"{plain}~{number}" for number in count(2))
        found[topic] = next(n for n in chain([plain], tries) if n.casefold() not in taken)
        taken.add(found[topic].casefold())
    return found


def quoted(name: str) -> str:
    """A name as SQL has it."""
    return '"' + name.replace('"', '""') + '"'


def is_named(table: str, question: str) -> bool:
    """Whether a question may name a table; files of the others need not be looked at."""
    asked, name = question.casefold(), table.casefold()
    return any(form in asked for form in (name, *(name.replace(m, 2 * m) for m in '"`')))


def may_list_tables(question: str) -> bool:
    """Whether a question may be one about tables themselves, and not about what is in some of them."""
    return _LISTS.search(question) is not None


def make_tables(connection: Any, tables: Mapping[str, str]) -> None:  # noqa: ANN401 (duckdb)
    """Stand-ins, from SELECTs without a row; and ``EMPTY``."""
    connection.execute("CREATE SCHEMA hidden")
    connection.execute(f"CREATE TABLE hidden.no_rows AS {no_rows()}")
    for table, empty in tables.items():
        connection.execute(f"CREATE TABLE {quoted(table)} AS {empty}")


def make_views(connection: Any, views: Mapping[str, str]) -> None:  # noqa: ANN401 (duckdb)
    """Views, from SELECTs, in the places of stand-ins of their names."""
    texts = (
        f"DROP TABLE IF EXISTS {quoted(table)}; CREATE VIEW {quoted(table)} AS {rows}"
        for table, rows in views.items()
    )
    connection.execute(";".join(texts))


def no_rows() -> str:
    """A SELECT of the archive's columns, without a row."""
    listed = (f"NULL::{_KINDS[str(field.type)]} AS {quoted(field.name)}" for field in schema())
    return f"SELECT {', '.join(listed)} WHERE false"


def wanted_of(connection: Any, question: str) -> Mapping[str, list[Selection]]:  # noqa: ANN401
    """What a question wants of each table that it scans, a selection for each scan.

    A table that is not there is not scanned in a way that can be seen: all of it may be wanted. Nothing is raised for a
    question that is wrong; whoever runs it will hear of it.

    Args:
        connection: With stand-ins, in a transaction, so that ``now()`` is the same for plan and answer.
        question: One statement.
    """
    import duckdb  # noqa: PLC0415 (heavy)

    every = connection.execute("SELECT name FROM duckdb_optimizers()").fetchall()
    others = ",".join(name for (name,) in every if name not in _RUN)
    connection.execute(f"SET disabled_optimizers = '{others}'")
    try:
        ((_, text),) = connection.execute(f"EXPLAIN (FORMAT JSON) {question}").fetchall()
        return _read(json.loads(text), question)
    except (duckdb.Error, ValueError):
        connection.rollback()
        connection.begin()
        return {}
    finally:
        connection.execute("SET disabled_optimizers = ''")


def may_hold(wanted: Selection, lane: Lane, file: ParquetFile) -> bool:
    """Whether a file can have a row that is wanted, by what the log says of it."""
    return (
        wanted.meets("queue_id", lane.queue_id, lane.queue_id)
        and wanted.meets("incarnation", lane.incarnation, lane.incarnation)
        and wanted.meets("queue_offset", file.low, file.high - 1)
        and wanted.meets("store_ts", file.store_min_ms * 1000, file.store_max_ms * 1000 + 999)
    )


def _read(plan: Any, question: str) -> dict[str, list[Selection]]:  # noqa: ANN401 (JSON)
    found: dict[str, list[Selection]] = {}
    for node in _nodes(plan):
        said = node.get("extra_info", {})
        table = said.get("Table")
        if table is None or not node["name"].strip().endswith("SCAN"):
            continue
        filters = said.get("Filters", [])
        listed = [filters] if isinstance(filters, str) else filters
        found.setdefault(_name(table), []).append(_selection(listed, question))
    return found


def _nodes(plan: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401
    for node in plan:
        yield node
        yield from _nodes(node.get("children", ()))


def _name(table: str) -> str:
    """The name in ``memory.main."%RETRY%g"``."""
    name = table.removeprefix(_PLACE)
    return name[1:-1].replace('""', '"') if name[:1] == '"' else name


def _selection(filters: Iterable[str], question: str) -> Selection:
    found = Selection()
    for masked, texts in map(_masked, filters):
        for test in _joined(masked):
            found = _narrowed(found, test, texts)
            key = _key(test, texts)
            if key and found.key is None and _literal(key) in question:
                found = replace(found, key=key.split(" ")[0])
    return found


def _narrowed(found: Selection, test: str, texts: Sequence[str]) -> Selection:
    """The same within what a test says of a column that the log knows."""
    among, known = _AMONG.fullmatch(test), _TEST.fullmatch(test)
    if among and among[1] in COLUMNS:
        numbers = [int(number) for number in among[2].split(", ")]
        return found.within(among[1], min(numbers), max(numbers))
    if known is None or known[1] not in COLUMNS:
        return found
    column, sign, time, number = known.groups()
    value = int(number) if number else _micros(texts[int(time)])
    if value is None:
        return found
    value += _STEP.get(sign, 0)
    low = value if sign in {"=", ">", ">="} else MIN
    high = value if sign in {"=", "<", "<="} else MAX
    return found.within(column, low, high)


def _key(test: str, texts: Sequence[str]) -> str:
    """The key that a row must have to pass a test; empty when it says nothing of one.

    A whole ``msg_key`` is keys with single blanks between them; the first of them is a key as far as no blank is about it.
    """
    known = _KEY.fullmatch(test)
    text = texts[int(known[2] or known[3])] if known else ""
    is_list = known is not None and known[3] is not None
    return "" if (is_list and " " in text) or text != text.strip() else text


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _masked(text: str) -> tuple[str, list[str]]:
    """A filter with a number in the place of each text, since a text may look like a filter; and the texts."""
    found: list[str] = []

    def number(quoted_text: re.Match[str]) -> str:
        found.append(quoted_text[0][1:-1].replace("''", "'"))
        return f"'{len(found) - 1}'"

    return _TEXT.sub(number, text), found


def _joined(text: str) -> Iterator[str]:
    """The tests that all have to hold: what AND joins, without its parentheses. Quotes have none in them."""
    text = text.removeprefix("optional: ")
    if text[:1] == "(" and _closes(text) == len(text) - 1:
        yield from _joined(text[1:-1])
        return
    depth, start, pieces, outline = 0, 0, [], ""
    for at, char in enumerate(text):
        depth += {"(": 1, ")": -1}.get(char, 0)
        outline += char * (depth == 0)
        if depth == 0 and text.startswith(_AND, at):
            pieces.append(text[start:at])
            start = at + len(_AND)
    if not pieces:
        yield text
    elif not _OTHER.search(outline):
        for piece in (*pieces, text[start:]):
            yield from _joined(piece)


def _closes(text: str) -> int:
    """Where the parenthesis that a text begins with is closed."""
    depth = 0
    for at, char in enumerate(text):
        depth += {"(": 1, ")": -1}.get(char, 0)
        if depth == 0:
            return at
    return -1


def _micros(time: str) -> int | None:
    try:
        return micros(datetime.fromisoformat(time))
    except ValueError:
        return None
