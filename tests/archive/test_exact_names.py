"""Topics that differ in case alone: a name answers with its own topic's rows, or with an error, and with nothing else's."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import duckdb
import pytest
from support.archive_jobs import archive, job_context
from support.bodies import wishes
from support.tiers import TierBuilder

from backends.local import LocalFolderStore
from backends.memory import MemoryStore
from backends.s3_settings import S3Options
from tiered.archive.duck import LATEST, ask
from tiered.archive.exact_names import ExactNames, exact_names, quoted, table_names
from tiered.errors import InvalidError
from tiered.model import MessageQueue
from tiered.spark.frames import ask_spark

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from backends.base import ObjectStore

TOPICS = ("ORDERS", "Orders", "orders", "Tag", "single", 'Quo"te', "select")
EXACT = {
    "SELECT name FROM orders": ["orders"],
    "SELECT name FROM Orders": ["Orders"],
    'SELECT name FROM "ORDERS"': ["ORDERS"],
    'from main."Orders" select name': ["Orders"],
    "FROM memory.main.orders SELECT name": ["orders"],
    "TABLE Orders": ["Orders"],
    'SELECT a.name || b.name AS name FROM orders a JOIN "Orders" b ON true': ["ordersOrders"],
    'SELECT orders.name || "Orders".name AS name FROM orders, "Orders"': ["ordersOrders"],
    'SELECT name FROM (SELECT "Orders".* FROM orders, "Orders", "ORDERS")': ["Orders"],
    "SELECT name FROM orders AS Orders WHERE Orders.tag = 'x'": ["orders"],
    "SELECT orders.name FROM orders ORDER BY orders.name": ["orders"],
    "SELECT t.orders.name AS name FROM (SELECT orders FROM orders) AS t": ["orders"],
    'SELECT name FROM "Orders" WHERE EXISTS(FROM orders WHERE name = \'orders\')': ["Orders"],
    'SELECT (SELECT max(o.name) FROM "Orders" o WHERE o.tag = orders.tag) AS name FROM orders': ["Orders"],
    'FROM orders SELECT name UNION ALL FROM "Orders" SELECT name ORDER BY name': ["Orders", "orders"],
    # Expressions with a topic's name.
    "WITH orders AS (SELECT 'mine' AS name) SELECT name FROM orders": ["mine"],
    "WITH orders AS (SELECT 'mine' AS name) SELECT name FROM \"Orders\"": ["Orders"],
    "WITH Single AS (SELECT 'mine' AS name) SELECT name FROM single": ["single"],
    "WITH Single AS (SELECT 'mine' AS name) SELECT name FROM SINGLE": ["mine"],
    "WITH orders AS (FROM orders) SELECT name FROM orders": ["orders"],
    'WITH x AS (FROM "Orders") SELECT (SELECT name FROM orders) || name AS name FROM x': ["ordersOrders"],
    "WITH RECURSIVE orders AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM orders WHERE n < 3)"
    " SELECT max(n)::VARCHAR AS name FROM orders": ["3"],
    # Texts, comments, columns.
    "SELECT 'Orders' || name AS name FROM orders -- FROM Orders": ["Ordersorders"],
    "SELECT /* Orders */ $$Orders$$ || name AS name FROM ORDERS": ["OrdersORDERS"],
    "SELECT tag AS name FROM \"Tag\" WHERE Tag = 'x'": ["x"],
    "SELECT json_extract_string('{\"orders\": \"o\"}', '$.orders') AS name FROM single": ["o"],
    'SELECT name FROM "Quo""te"': ['Quo"te'],
    'SELECT name FROM "select"': ["select"],
    # What the parser does not take apart.
    "CREATE TABLE mine AS FROM orders; SELECT name FROM mine": ["orders"],
    'CREATE TABLE mine AS FROM "Orders" -- of them\n; FROM mine SELECT name': ["Orders"],
    "COPY (FROM orders) TO '{folder}/x.parquet'; SELECT name FROM '{folder}/x.parquet'": ["orders"],
    'SELECT name FROM (PIVOT "Orders" ON tag USING count(*))': ["Orders"],
    "SELECT name FROM query_table('single')": ["single"],
    'SELECT name FROM "orders$latest"': ["orders$latest"],
    'SELECT name FROM "Orders$latest"': ["Orders$latest"],
}  # fmt: skip
WRONG = [
    *('FROM "ORders"', "FROM SINGLE", "FROM tag", 'FROM "quo""te"', 'FROM "ORDERS$Latest"'),
    *("FROM main.ORders", "SELECT (SELECT max(name) FROM ORders) FROM orders", "DESCRIBE ORders"),
    *(
        "PIVOT ORders ON tag USING count(*)",
        "EXPLAIN FROM ORders",
        "SUMMARIZE Single",
        "SHOW Single",
    ),
    *("CREATE TABLE x AS FROM Single", "FROM query_table('Single')", "FROM query_table('Orders')"),
    *("PRAGMA table_info('Orders')", "FROM orders; FROM ORders", "FROM query('FROM Single')"),
    *("COPY ORders TO 'x.parquet'", "WITH x AS (FROM ORders) FROM x"),
]


@pytest.fixture
def tables() -> Iterator[tuple[Any, ExactNames]]:
    named = table_names(TOPICS)
    exact = {**exact_names(named), **exact_names(named, LATEST)}
    with duckdb.connect() as connection:
        for name, table in exact.items():
            connection.execute(
                f"CREATE TABLE {quoted(table)} AS SELECT ? AS name, 'x' AS tag", [name]
            )
        yield connection, ExactNames(exact, {"name", "tag"})


@pytest.mark.parametrize("question", EXACT)
def test_exact_names_have_their_own_rows(
    question: str, tables: tuple[Any, ExactNames], tmp_path: Path
) -> None:
    connection, names = tables
    asked = question.replace("{folder}", str(tmp_path))
    found = connection.sql(names.put(connection, asked))
    at = found.columns.index("name")
    assert [row[at] for row in found.fetchall()] == EXACT[question]


@pytest.mark.parametrize("question", WRONG)
def test_a_name_that_is_a_topic_s_but_for_its_case_is_refused(
    question: str, tables: tuple[Any, ExactNames]
) -> None:
    connection, names = tables
    with pytest.raises(InvalidError, match=r"there is no table|may be the name"):
        names.put(connection, question)


@pytest.mark.parametrize(
    "question", ["SHOW TABLES", "SELECT 1", "FROM single", "SELEC 1", "FROM x", "FROM 'a.parquet'"]
)
def test_what_has_no_such_name_stays_as_it_is(
    question: str, tables: tuple[Any, ExactNames]
) -> None:
    connection, names = tables
    assert names.put(connection, question) == question


def test_names_that_are_no_utf_8_are_told_apart() -> None:
    named = table_names(["a\udcff", "a\udcfe"])
    assert exact_names(named) == {"a?": "a?", "a?~2": "a?~2"}


# -- an archive -----------------------------------------------------------------------------------

SOME = ("orders", "Orders", "ORDERS")


def of_three(store: ObjectStore | None = None) -> Any:
    tier = TierBuilder()
    for topic in SOME:
        for body in (f'{{"a": "{topic}", "A": 1, "o": {{"b": 2}}}}'.encode(), b"open"):
            tier.add([body], queue=MessageQueue(topic, 0), roll=True)
    at = job_context(tier.store, store)
    archive(at)
    return at


@pytest.mark.parametrize("topic", SOME)
def test_each_topic_of_an_archive_answers_for_itself(topic: str) -> None:
    at = of_three()
    for question in (f"SELECT topic FROM {topic}", f'FROM main."{topic}" SELECT topic'):
        assert ask(at.archive, question).rows.to_pylist() == [{"topic": topic}]


def test_lists_have_the_names_that_people_write_and_nothing_of_our_own() -> None:
    at = of_three()
    names = ask(at.archive, "SHOW TABLES").rows["name"].to_pylist()
    assert sorted(names) == sorted(SOME)
    every = ask(at.archive, "SHOW ALL TABLES").rows
    assert sorted(every["name"].to_pylist()) == sorted(SOME)
    counted = "SELECT count(*) AS n FROM information_schema.tables"
    assert ask(at.archive, counted).rows.to_pylist() == [{"n": 3}]
    with pytest.raises(InvalidError, match=r'"ORDERS", "Orders", "orders"'):
        ask(at.archive, "FROM ordERS")
    with pytest.raises(InvalidError) as found:
        ask(at.archive, 'SELECT nope FROM "ORDERS", orders, "Orders"')
    assert "~" not in str(found.value)


def test_a_member_that_differs_in_case_alone_is_no_column_s() -> None:
    tier = TierBuilder()
    for body in (b'{"a": 1, "A": 2}', b"open"):
        tier.add([body], queue=MessageQueue("orders", 0), roll=True)
    at = job_context(tier.store)
    result = archive(replace(at, wishes=wishes("json")))
    assert result.left_out == {("orders", "A"): 1}
    assert ask(at.archive, "SELECT value_a FROM orders").rows.to_pylist() == [{"value_a": 1}]
    for name in ("value_A", '"value_A"', "VALUE_a", "orders.value_A"):
        with pytest.raises(InvalidError, match="there is no column"):
            ask(at.archive, f"SELECT {name} FROM orders")


@pytest.mark.spark
@pytest.mark.filterwarnings("ignore")
def test_spark_tells_them_apart_too(session: Any, tmp_path: Path) -> None:
    store = LocalFolderStore(tmp_path)
    of_three(store)
    for topic in SOME:
        found = ask_spark(session, store, f"SELECT topic FROM {topic}", store.url, S3Options())
        assert found.to_pylist() == [{"topic": topic}]
    shown = ask_spark(session, store, "SHOW TABLES", store.url, S3Options())
    assert set(SOME) <= set(shown["tableName"].to_pylist())
    with pytest.raises(InvalidError, match="`Orders`"):
        ask_spark(session, store, "SELECT topic FROM ordERS", store.url, S3Options())
    assert session.conf.get("spark.sql.caseSensitive") == "false"


class OfOneCase(MemoryStore):
    """Takes names for one that differ in case alone, as a folder of macOS does, and lists them as they came first."""

    def _known(self, key: str) -> str:
        return next(
            (one.key for one in super().list("") if one.key.casefold() == key.casefold()), key
        )

    def put_if_absent(self, key: str, data: Any) -> Any:
        return super().put_if_absent(self._known(key), data)

    def head(self, key: str) -> Any:
        return super().head(self._known(key))

    def get(self, key: str, byte_range: Any = None) -> bytes:
        return super().get(self._known(key), byte_range)


def test_folders_that_a_place_takes_for_one_are_refused() -> None:
    with pytest.raises(InvalidError, match="the folders of ORDERS and Orders are one here"):
        of_three(OfOneCase("archive"))
