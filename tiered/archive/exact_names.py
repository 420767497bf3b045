"""Names of tables in a question, upper and lower case told apart, which DuckDB does not do, quoted or not.

RocketMQ's topics may differ in case alone. Each has a table of its own, named such that DuckDB can tell it from the others
(``table_names``: the second is ``orders~2``), and a question is put into these words before DuckDB sees it. A name that
is a topic's but for its case is an error, and no other topic's rows.

How: DuckDB's own parser says what of a SELECT is a table (``json_serialize_sql``), so aliases, columns, texts, comments and
common table expressions of the same name stay what they are. Statements that are no SELECT it does not take apart; there
each identifier of such a name counts as a table, which may refuse what would have been right and never answers with
another topic's rows. A question that has nothing of the kind stays as it is, letter by letter.
"""

from __future__ import annotations

import json
import re
from dataclasses import field
from itertools import chain, count
from typing import TYPE_CHECKING, Any

from backends.lazy_dataclass import dataclass
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping


def table_names(topics: Iterable[str]) -> dict[str, str]:
    """The table of each topic for engines that do not tell upper case from lower.

    Names that differ in case alone are one name to them, so all but the first topic have ``~2``, ``~3`` … behind theirs.
    Bytes that are no UTF-8 are question marks.
    """
    found: dict[str, str] = {}
    taken: set[str] = set()
    for topic in topics:
        plain = _plain(topic)
        tries = (f"{plain}~{number}" for number in count(2))
        found[topic] = next(n for n in chain([plain], tries) if n.casefold() not in taken)
        taken.add(found[topic].casefold())
    return found


def exact_names(tables: Mapping[str, str], behind: str = "") -> dict[str, str]:
    """The tables by the names that people write: the topics' own."""
    found: dict[str, str] = {}
    for topic, table in tables.items():
        plain = _plain(topic)
        found[(table if plain in found else plain) + behind] = table + behind
    return found


def quoted(name: str) -> str:
    """A name as SQL has it."""
    return '"' + name.replace('"', '""') + '"'


def _plain(topic: str) -> str:
    return topic.encode("utf-8", "replace").decode()


class _OpaqueError(Exception):
    """The parser does not take a statement apart."""


@dataclass(slots=True)
class ExactNames:
    """Names that a question may have, and what they are to DuckDB."""

    tables: Mapping[str, str]  # what DuckDB calls a table, by its exact name
    columns: Collection[str] = ()
    """Columns of tables: where nobody can say what a name is, one of these is not a table's."""
    alike: dict[str, list[str]] = field(default_factory=dict, init=False)
    """Exact names by what they are without case."""

    def __post_init__(self) -> None:
        for name in self.tables:
            self.alike.setdefault(name.casefold(), []).append(name)

    def put(self, connection: Any, question: str) -> str:  # noqa: ANN401 (duckdb)
        """A question in DuckDB's names.

        Raises:
            InvalidError: It has a name that is a table's but for its case.
        """
        import duckdb  # noqa: PLC0415 (heavy)

        folded = question.casefold().replace('""', '"')
        if not any(name in folded for name in self.alike):
            return question
        try:
            statements = [one.query for one in connection.extract_statements(question)]
        except duckdb.Error:
            return question  # running it will report that
        found = [self._put_one(connection, one).rstrip(" ;\n") for one in statements]
        is_same = found == [one.rstrip(" ;\n") for one in statements]
        return question if is_same else "\n;\n".join(found)

    def _put_one(self, connection: Any, statement: str) -> str:  # noqa: ANN401
        try:
            return self._put_select(connection, statement)
        except _OpaqueError:
            return self._put_words(statement)

    # -- what the parser takes apart ---------------------------------------------------------------

    def _put_select(self, connection: Any, statement: str) -> str:  # noqa: ANN401
        import duckdb  # noqa: PLC0415

        ask = "SELECT json_serialize_sql(?::VARCHAR)"
        try:
            ((raw,),) = connection.execute(ask, [statement]).fetchall()
        except duckdb.Error as error:
            raise _OpaqueError from error
        tree = json.loads(raw)
        if tree["error"]:
            raise _OpaqueError
        select = _Select(self)
        select.put_tables(tree["statements"], frozenset())
        if not select.is_changed:
            return statement
        select.put_qualifiers(tree["statements"])
        back = "SELECT json_deserialize_sql(?)"
        ((text,),) = connection.execute(back, [json.dumps(tree)]).fetchall()
        return str(text)

    def table(self, name: str) -> str:
        """What DuckDB calls a table."""
        table = self.tables.get(name)
        if table is None:
            alike = ", ".join(map(quoted, sorted(self.alike[name.casefold()])))
            raise InvalidError(
                f"there is no table {quoted(name)}",
                do=f"names of tables are exact, also in upper and lower case: {alike}",
            )
        return table

    # -- what it does not --------------------------------------------------------------------------

    def _put_words(self, statement: str) -> str:
        if _TEXTS.search(statement):
            self.require_exact(statement)
        row_ranges, at = list[str](), 0
        for start, end, name in identifiers(statement):
            is_column = name not in self.tables and name in self.columns
            if name.casefold() in self.alike and not is_column:
                table = self.table(name)
                row_ranges += [statement[at:start], quoted(table)]
                at = end if table != name else start
                row_ranges = row_ranges if table != name else row_ranges[:-1]
        return "".join([*row_ranges, statement[at:]])

    def require_exact(self, text: str) -> None:
        """See that a text names no table that cannot be told apart from others."""
        folded = text.casefold()
        for fold, names in self.alike.items():
            if fold in folded and (len(names) > 1 or names[0] not in text):
                alike = ", ".join(map(quoted, sorted(names)))
                raise InvalidError(
                    f"a text here may be the name of one of {alike}, which differ in case alone from it or from others",
                    do="name the table itself, as in FROM",
                )


_BY_TEXT = frozenset({"query", "query_table"})
"""Functions that take tables, or whole questions, as texts."""


@dataclass(slots=True)
class _Select:
    """The parser's tree of some SELECTs."""

    names: ExactNames  # of tables
    renamed: dict[str, str] = field(default_factory=dict)
    """Tables by the names that they had, where no alias of the asker's stands for them."""
    aliases: set[str] = field(default_factory=set)  # of the asker
    is_changed: bool = False  # anything is another than it was

    def put_tables(self, node: Any, ours: frozenset[str]) -> None:  # noqa: ANN401 (JSON)
        """Put the tables of a node into DuckDB's names."""
        if isinstance(node, list):
            for one in node:
                self.put_tables(one, ours)
            return
        if not isinstance(node, dict):
            return
        for one in node.get("cte_map", {}).get("map", []):
            is_recursive = "RECURSIVE_CTE_NODE" in json.dumps(one["value"])
            self.put_tables(one["value"], ours | {one["key"]} if is_recursive else ours)
            ours |= {one["key"]}
        for name, one in node.items():
            if name != "cte_map":
                self.put_tables(one, ours)
        match node.get("type"):
            case "BASE_TABLE":
                self._put_table(node, ours)
            case "SHOW_REF" if node.get("table_name", "").casefold() in self.names.alike:
                raise _OpaqueError  # SHOW orders, which comes back without its quotes
            case "TABLE_FUNCTION":
                function = node.get("function") or {}
                if function.get("function_name") in _BY_TEXT:
                    texts = (
                        one
                        for node in _nodes(function)
                        for one in (node.get("text"), node.get("value"))
                    )
                    self.names.require_exact("\n".join(t for t in texts if isinstance(t, str)))
            case _:
                pass
        self.aliases |= {node.get("alias") or ""}

    def _put_table(self, node: dict[str, Any], ours: frozenset[str]) -> None:
        name, schema = node["table_name"], node["schema_name"]
        if name.casefold() not in self.names.alike or (not schema and name in ours):
            return
        is_hidden = not schema and name.casefold() in {one.casefold() for one in ours}
        if name not in self.names.tables and is_hidden:
            return  # SQL takes an expression's name in whichever case
        table = self.names.table(name)
        if table == name and not is_hidden:
            return
        # With a schema, so that no expression's name is taken for it.
        node |= {"table_name": table, "schema_name": "main"}
        if "qualified_name" in node:
            node["qualified_name"] = {"path": ["main", table]}
        if not node["alias"]:
            self.renamed[name] = table
        self.is_changed = True

    def put_qualifiers(self, tree: Any) -> None:  # noqa: ANN401
        """Put names of tables before columns, and in the places of whole rows, into the names that these have now."""
        for node in _nodes(tree):
            match node.get("type"):
                case "COLUMN_REF":
                    first, *rest = node["column_names"]
                    if rest or first not in self.names.columns:
                        node["column_names"] = [self._qualifier(first), *rest]
                        is_row = not rest and node["column_names"] != [first]
                        node["alias"] = node["alias"] or first * is_row
                case "STAR":
                    node["relation_name"] = self._qualifier(node["relation_name"])
                case _:
                    pass

    def _qualifier(self, name: str) -> str:
        return name if name in self.aliases else self.renamed.get(name, name)


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401
    """All nodes of a tree, those within others first."""
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    for one in inner:
        yield from _nodes(one)
    if isinstance(tree, dict):
        yield tree


_TEXTS = re.compile(r"(?i)\b(query|query_table|pragma|pragma_\w+|call)\b")


def identifiers(statement: str) -> Iterator[tuple[int, int, str]]:
    """Where identifiers are, and their names."""
    import duckdb  # noqa: PLC0415

    raw = statement.encode()
    for at, kind in duckdb.tokenize(statement):
        if kind != duckdb.token_type.identifier:
            continue
        start = len(raw[:at].decode())
        match = _WORD.match(statement, start)
        if match:
            name = match[0]
            is_quoted = name.startswith('"')
            yield start, match.end(), name[1:-1].replace('""', '"') if is_quoted else name


_WORD = re.compile(r'"(?:[^"]|"")*"|[^\W\d][\w$]*', re.UNICODE)
