"""Questions in SQL, answered by DuckDB in this process. Each topic of the archive is a table of its name.

With ``$latest`` behind it it is the table of its newest rows (``tiered.archive.latest``), of all brokers together.

Files come through the same ``ObjectStore`` as everything else here, with its credentials and options, as a file system that
DuckDB is handed: ranges of objects, nothing is downloaded whole. DuckDB does not look at checksums, so what it gets has been
held against those of its blocks before (``tiered.archive.checked_ranges``), in a folder too. No extension of DuckDB is
installed or loaded. A question may do what DuckDB can do with the rights of this process, reading and writing other files
too: do not take questions from strangers.
"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import replace
from datetime import datetime
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from backends.lazy_dataclass import dataclass
from backends.local_files import MAKE_ROOM
from tiered.api.arrow import load_library, load_pyarrow
from tiered.archive.bodies import PREFIX
from tiered.archive.checked_ranges import ObjectFile
from tiered.archive.columns import schema, topic_schema
from tiered.archive.exact_names import ExactNames, exact_names, identifiers, quoted, table_names
from tiered.archive.lookup import files_without, read_index
from tiered.archive.model import SCHEMA_VERSION
from tiered.archive.selection import MAX, MIN, Selection, micros
from tiered.archive.stale import stale_rows
from tiered.archive.tables import files_by_topic, read_archive, refuses_file
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    import pyarrow as pa

    from backends.base import ObjectStore
    from tiered.archive.checked_ranges import Sums
    from tiered.archive.machine import ArchiveState
    from tiered.archive.model import ArchiveQueue, ParquetFile
    from tiered.archive.stale import Stale


# -- which files a question needs ------------------------------------------------------------------
#
# Which files a question needs, as far as DuckDB itself can say before it has opened one.
#
# Overview: the question is explained on empty tables of the archive's columns, with two of DuckDB's optimizers:
# one that simplifies expressions (``date_trunc('day', store_ts) = …`` becomes two bounds) and one that pushes
# filters down to the tables. What the plan says of each table's rows is read where its form is known (tests
# joined by AND: a column of the log against a constant, or a key), and nothing is concluded from the rest. So
# an answer never depends on this module, only its cost; with a version of DuckDB that words its plans in
# another way, every file is read.
#
# No optimizer that looks at data runs, since on empty tables it would conclude too much.

COLUMNS = ("queue_id", "queue_offset", "store_ts", "incarnation")
"""Those of which the log knows something."""
_LISTS = re.compile(r"(?i)\b(show|desc|describe|pragma|sqlite_master|pg_\w+|duckdb_\w+)\b|_schema")
_PLACE = "memory.main."
_KINDS = {
    "bool": "BOOLEAN",
    "int8": "TINYINT",
    "int16": "SMALLINT",
    "int32": "INTEGER",
    "int64": "BIGINT",
    "float": "FLOAT",
    "double": "DOUBLE",
    "string": "VARCHAR",
    "binary": "BLOB",
    "date32[day]": "DATE",
    "timestamp[us, tz=UTC]": "TIMESTAMPTZ",
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


def no_rows(columns: pa.Schema | None = None) -> str:
    """A SELECT of columns, those of every file if none are given, without a row."""
    fields = schema() if columns is None else columns
    listed = (f"NULL::{_kind_in_sql(field.type)} AS {quoted(field.name)}" for field in fields)
    return f"SELECT {', '.join(listed)} WHERE false"


def _kind_in_sql(kind: Any) -> str:  # noqa: ANN401 (pyarrow has no types)
    types = load_pyarrow().types
    if types.is_map(kind):
        return f"MAP({_kind_in_sql(kind.key_type)}, {_kind_in_sql(kind.item_type)})"
    if types.is_list(kind):
        return f"{_kind_in_sql(kind.value_type)}[]"
    if types.is_struct(kind):
        inner = (f"{quoted(field.name)} {_kind_in_sql(field.type)}" for field in kind)
        return f"STRUCT({', '.join(inner)})"
    if types.is_decimal(kind):
        return f"DECIMAL({kind.precision}, {kind.scale})"
    return _KINDS[str(kind)]


def wanted_of(connection: Any, question: str) -> Mapping[str, list[Selection]]:  # noqa: ANN401
    """What a question wants of each table that it scans, a selection for each scan.

    A table that is not there is not scanned in a way that can be seen: all of it may be wanted. Nothing is raised for a
    question that is wrong; running it will report that.

    Args:
        connection: With stand-ins, in a transaction, so that ``now()`` is the same for plan and answer.
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


def _read(plan: Any, question: str) -> dict[str, list[Selection]]:  # noqa: ANN401 (JSON)
    found: dict[str, list[Selection]] = {}
    for node in _nodes(plan):
        said = node.get("extra_info", {})
        table = said.get("Table")
        if table is None or not node["name"].strip().endswith("SCAN"):
            continue
        filters = said.get("Filters", [])
        listed = [filters] if isinstance(filters, str) else filters
        name = table.removeprefix(_PLACE)  # as in ``memory.main."%RETRY%g"``
        name = name[1:-1].replace('""', '"') if name[:1] == '"' else name
        found.setdefault(name, []).append(_selection(listed, question))
    return found


def _nodes(plan: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401
    for node in plan:
        yield node
        yield from _nodes(node.get("children", ()))


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
    try:
        value = int(number) if number else micros(datetime.fromisoformat(texts[int(time)]))
    except ValueError:
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
    depth, start, row_ranges, outline = 0, 0, [], ""
    for at, char in enumerate(text):
        depth += {"(": 1, ")": -1}.get(char, 0)
        outline += char * (depth == 0)
        if depth == 0 and text.startswith(_AND, at):
            row_ranges.append(text[start:at])
            start = at + len(_AND)
    if not row_ranges:
        yield text
    elif not _OTHER.search(outline):
        for row_range in (*row_ranges, text[start:]):
            yield from _joined(row_range)


def _closes(text: str) -> int:
    depth = 0
    for at, char in enumerate(text):
        depth += {"(": 1, ")": -1}.get(char, 0)
        if depth == 0:
            return at
    return -1


# -- questions -------------------------------------------------------------------------------------

SCHEME = "tieredarchive"
LATEST = "$latest"
"""Behind the name of a topic's table it is that of its newest rows: no topic has a dollar in its name."""
_SHOWN = 20
_SUMS = 256
"""Files of which the checksums are kept: DuckDB opens each several times."""
_DO_FULL = f"{MAKE_ROOM} there (TMPDIR names another place), or sort, join and group less at once"
"""What does not fit into memory DuckDB writes there, as far as there is room."""
_OPTIONS = (
    *("TimeZone = 'UTC'", "autoinstall_known_extensions = false"),
    "autoload_known_extensions = false",
    "python_enable_replacements = false",
)


@dataclass(frozen=True, slots=True)
class QueryAnswer:
    """What came of a question."""

    rows: pa.Table  # none for a statement that has no result
    files: int  # files of the topics that it names
    left_out: int
    """Those of them that the log said hold nothing that is wanted; they were not opened."""
    stale: list[Stale]  # what may be missing in columns that the question may be about


def ask(archive: ObjectStore, question: str) -> QueryAnswer:
    """The answer to a question.

    Args:
        question: SQL, one statement as a rule: only then files are left out. Times are in UTC.

    Raises:
        InvalidError: There is no archive, or the statement is wrong.
        DataError: The log, or a file that the question is about, is damaged.
    """
    arrow = load_pyarrow()
    duckdb = load_library("duckdb", "this needs DuckDB", "sql")
    state = read_archive(archive)
    topics = files_by_topic(state)
    tables = table_names(topics)
    sizes = {file.key: file.size_bytes for files in topics.values() for file in files}
    exact = {**exact_names(tables), **exact_names(tables, LATEST)}
    asked = {table for name, table in exact.items() if is_named(name, question)}
    latest = _latest_files(archive, tables, question, asked, sizes)
    with TemporaryDirectory(prefix="tiered-sql-") as work, duckdb.connect(":memory:") as connection:
        for option in (*_OPTIONS, f"temp_directory = {_literal(work)}"):
            connection.execute(f"SET {option}")
        files = file_system(archive, sizes)
        connection.register_filesystem(files)
        root = f"{SCHEME}://"
        chosen: dict[str, list[str]] = {}
        named = {t: table for t, table in tables.items() if table in asked}
        columns = [name for topic in named for name in topic_schema(state, topic).names]
        require_exact_columns(columns, question)
        question = ExactNames(exact, columns).put(connection, question)
        try:
            stand_ins = {table: _stand_in(state, topic) for topic, table in named.items()}
            stand_ins |= dict.fromkeys(latest, no_rows())
            make_tables(connection, stand_ins)
            connection.begin()
            is_one = len(connection.extract_statements(question)) == 1
            wanted = wanted_of(connection, question) if is_one else {}
            asked_for = {one.key for some in wanted.values() for one in some if one.key is not None}
            index = read_index(archive) if asked_for else []
            without = {key: files_without(archive, index, key) for key in asked_for}
            chosen = {
                topic: _chosen(state, topic, wanted.get(table), without)
                for topic, table in named.items()
            }
            views = dict.fromkeys(tables.values() if may_list_tables(question) else (), EMPTY)
            for topic, table in named.items():
                views[table] = _view(state, topic, root, chosen[topic])
            for table, keys in latest.items():
                empty = no_rows() if table in asked else EMPTY
                views[table] = _read_files(root, keys, differ=True) if keys else empty
            make_views(connection, views)
            connection.execute("DROP SCHEMA hidden CASCADE")  # no table of the asker's
            found = connection.sql(question)
            answer = arrow.table({}) if found is None else _table(found)
            answer = _listed(answer, exact) if _LISTING.fullmatch(question) else answer
        except duckdb.Error as error:
            if files.failed:  # DuckDB makes text of it
                raise files.failed[0] from error
            if isinstance(error, duckdb.OutOfMemoryException):
                raise InvalidError(_said(error), where=work, do=_DO_FULL) from error
            there = [name for name, table in exact.items() if table in {*tables.values(), *latest}]
            raise InvalidError(_in_exact(_said(error), exact), do=tables_there(there)) from error
    every = {file.key for topic in named for file in topics[topic]}
    read = {key for keys in chosen.values() for key in keys}
    return QueryAnswer(answer, len(every), len(every - read), stale_asked(state, named, question))


_LISTING = re.compile(r"\s*show\s+(all\s+)?tables\s*;?\s*", re.IGNORECASE)


def _listed(answer: pa.Table, exact: Mapping[str, str]) -> pa.Table:
    """A list of tables, by the names that people write, without what is this program's own."""
    arrow = load_pyarrow()
    if "schema" in answer.schema.names:
        answer = answer.filter(arrow.compute.equal(answer["schema"], "main"))
    names = {table: name for name, table in exact.items()}
    found = [names.get(name, name) for name in answer["name"].to_pylist()]
    at = answer.schema.get_field_index("name")
    return answer.set_column(at, "name", arrow.array(found, arrow.string()))


def _in_exact(said: str, exact: Mapping[str, str]) -> str:
    for name, table in exact.items():
        said = said.replace(table, name) if table != name else said
    return said


def require_exact_columns(columns: Collection[str], question: str) -> None:
    """See that columns of bodies are named exactly: members of JSON may differ in case alone, and only one has a column."""
    alike = {name.casefold(): name for name in columns if name.startswith(PREFIX)}
    if not alike or PREFIX not in question.casefold():
        return
    for _, _, name in identifiers(question):
        column = alike.get(name.casefold())
        if column is not None and name not in columns:
            raise InvalidError(
                f"there is no column {quoted(name)}",
                do=f"names of columns of bodies are exact: {quoted(column)}; a member without a column is in body alone",
            )


_ALL = re.compile(r"\*|^(?!.*\bselect\b)", re.IGNORECASE | re.DOTALL)
"""In a question for all columns."""


def stale_asked(state: ArchiveState, topics: Collection[str], question: str) -> list[Stale]:
    """What may be missing in columns of topics that a question names."""
    return [
        one
        for one in stale_rows(state, topics)
        if _ALL.search(question) or any(is_named(column, question) for column in one.columns)
    ]


_NO_ARROW = frozenset({"bit", "uhugeint", "time with time zone", "bignum", "variant"})
"""Types that Arrow has nothing for: of the greatest UHUGEINT it makes -1, of a time with a zone one without."""


def _table(found: Any) -> pa.Table:  # noqa: ANN401 (duckdb)
    """A result with all that it says: what Arrow has no type for comes as DuckDB writes it."""
    columns = [(f"#{number}", kind) for number, kind in enumerate(found.types, 1)]
    if not any(map(_has_no_arrow, found.types)):
        return found.to_arrow_table()
    cast = (
        f"CAST({column} AS {_with_texts(kind)})" if _has_no_arrow(kind) else column
        for column, kind in columns
    )
    table: pa.Table = found.project(", ".join(cast)).to_arrow_table()
    return table.rename_columns(found.columns)


def _has_no_arrow(kind: Any) -> bool:  # noqa: ANN401
    return kind.id in _NO_ARROW or any(_has_no_arrow(inner) for _, inner in _within(kind))


def _within(kind: Any) -> list[tuple[str, Any]]:  # noqa: ANN401
    """The types that a type is made of, with their names."""
    nested = {"list", "array", "struct", "tuple", "map", "union"}
    return [one for one in kind.children if one[0] != "size"] if kind.id in nested else []


def _with_texts(kind: Any) -> str:  # noqa: ANN401
    """A type as SQL has it, with texts in the places of those that Arrow has nothing for."""
    if kind.id in _NO_ARROW:
        return "VARCHAR"
    inner = [(name, _with_texts(one)) for name, one in _within(kind)]
    match kind.id:
        case "list":
            return f"{inner[0][1]}[]"
        case "array":
            return f"{inner[0][1]}[{dict(kind.children)['size']}]"
        case "map" | "tuple":
            return f"{kind.id}({', '.join(one for _, one in inner)})"
        case "struct" | "union":
            return f"{kind.id}({', '.join(f'{quoted(name)} {one}' for name, one in inner)})"
        case _:
            return str(kind)


def _latest_files(
    archive: ObjectStore,
    tables: Mapping[str, str],
    question: str,
    asked: Collection[str],
    sizes: dict[str, int],
) -> dict[str, list[str]]:
    """The files of each table of newest rows that a question may be about; their sizes are added.

    A table that is only listed has none here: nobody reads it, and what is wrong with it stops nobody.
    """
    from tiered.archive.latest import latest_versions  # noqa: PLC0415 (only who asks)

    if LATEST not in question.casefold() and not may_list_tables(question):
        return {}
    found: dict[str, list[str]] = {}

    def is_asked(topic: str) -> bool:
        return tables[topic] + LATEST in asked

    for topic, versions in latest_versions(archive, tables, is_asked).items():
        wanted = versions if is_asked(topic) else []
        files = [file for version in wanted for file in version.files]
        sizes.update((key, size) for key, _, size, _ in files)
        found[tables[topic] + LATEST] = [key for key, *_ in files]
    return found


def _chosen(
    state: ArchiveState,
    topic: str,
    wanted: Sequence[Selection] | None,
    without: Mapping[str, set[str]],
) -> list[str]:
    """Keys of the files of a topic that a question may need; None wants all. Each once, in order."""

    def is_needed(queue: ArchiveQueue, file: ParquetFile) -> bool:
        return wanted is None or any(
            not (each.refuses(queue) or refuses_file(each, file))
            and file.key not in without.get(each.key or "", ())
            for each in wanted
        )

    files = (
        file.key
        for queue, one in state.queues.each(lambda queue: queue.topic == topic)
        for file in one.files
        if is_needed(queue, file)
    )
    return list(dict.fromkeys(files))


def local_root(archive: ObjectStore) -> str | None:
    """The folder that an archive is, ending in a slash; None when it is none."""
    if not archive.url.startswith("file://"):
        return None
    return unquote(archive.url.removeprefix("file://")).rstrip("/") + "/"


def _view(state: ArchiveState, topic: str, root: str, keys: Sequence[str]) -> str:
    """A SELECT of the rows of some files of a topic, with the columns of all of them."""
    empty = _stand_in(state, topic)
    if not keys:
        return empty
    differ = _has_more(state, topic)  # only then all are opened for their columns
    rows = _read_files(root, keys, differ=differ)
    return f"{rows} UNION ALL BY NAME {empty}" if differ else rows


def _stand_in(state: ArchiveState, topic: str) -> str:
    """A SELECT without a row, of all columns that files of a topic may have, also where none has them yet."""
    return no_rows(topic_schema(state, topic)) if _has_more(state, topic) else no_rows()


def _read_files(root: str, keys: Sequence[str], *, differ: bool) -> str:
    listed = ", ".join(_literal(f"{root}{key}") for key in keys)
    options = f"hive_partitioning = false, union_by_name = {str(differ).lower()}"
    return f"SELECT * FROM read_parquet([{listed}], {options})"  # noqa: S608 (quoted)


def _has_more(state: ArchiveState, topic: str) -> bool:
    """Whether files of a topic may differ in their columns."""
    return topic in state.bodies or any(
        one.columns or one.has_records or one.schema != SCHEMA_VERSION
        for _, one in state.queues.each(lambda queue: queue.topic == topic)
    )


class _Watched(ObjectFile):
    """Remembers what went wrong, since a reader of DuckDB does not pass exceptions on."""

    def __init__(self, *file: Any, failed: list[Exception]) -> None:  # noqa: ANN401
        self._failed = failed
        with self._watched():
            super().__init__(*file)

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 (a buffer)
        with self._watched():
            return super().readinto(buffer)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._failed.append(error)
            raise


def file_system(archive: ObjectStore, sizes: Mapping[str, int]) -> Any:  # noqa: ANN401
    """The archive's files behind fsspec's interface."""
    from fsspec import AbstractFileSystem  # noqa: PLC0415 (heavy)

    class ArchiveFiles(AbstractFileSystem):  # type: ignore[misc] # it has no types
        """Read-only; names are keys."""

        protocol = SCHEME
        cachable = False

        def __init__(self) -> None:
            super().__init__()
            self.failed: list[Exception] = []
            self._sums: dict[str, Sums] = {}

        def info(self, path: str, **_more: Any) -> dict[str, Any]:  # noqa: ANN401
            """Size and kind."""
            key = self._strip_protocol(path)
            if key not in sizes:
                raise FileNotFoundError(path)
            return {"name": key, "size": sizes[key], "type": "file"}

        def glob(self, path: str, **_more: Any) -> list[str]:  # noqa: ANN401
            """A file's own name."""
            key = self._strip_protocol(path)
            return [key] if key in sizes else []

        def _open(self, path: str, mode: str = "rb", **_more: Any) -> _Watched:  # noqa: ANN401, ARG002
            key = self._strip_protocol(path)
            sums = self._sums.get(key)
            file = _Watched(archive, key, sizes[key], sums, failed=self.failed)
            if sums is None:
                while len(self._sums) >= _SUMS:
                    self._sums.pop(next(iter(self._sums)), None)
                self._sums[key] = file.sums
            return file

        def modified(self, path: str) -> Any:  # noqa: ANN401, ARG002
            """Files never change."""
            from datetime import UTC, datetime  # noqa: PLC0415

            return datetime.fromtimestamp(0, UTC)

    return ArchiveFiles()


def _said(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    is_python_s = lines[0].startswith("Traceback")  # of a store, when a file could not be read
    return lines[-1 if is_python_s else 0]


def tables_there(tables: Collection[str], mark: str = '"') -> str:
    """Which tables there are, for the error that names another; quoted with the engine's mark."""
    shown = [mark + name.replace(mark, 2 * mark) + mark for name in sorted(tables)[:_SHOWN]]
    more = f" and {len(tables) - _SHOWN} more; SHOW TABLES" if len(tables) > _SHOWN else ""
    return f"tables are {', '.join(shown)}{more}" if shown else "the archive has no topic yet"
