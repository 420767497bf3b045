"""``tiered sql``: forms of the answer, names of tables, what is said when a question is wrong, and files left unread."""

from __future__ import annotations

import csv
import io
import json
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow.parquet as pq
import pytest
from support.archive_jobs import archive, index, job_context, keys, small
from support.archives_made import make_archive
from support.command_line import here
from support.servers import use_server
from support.tiers import TierBuilder

from backends.memory import MemoryStore
from backends.registry import open_store
from backends.s3_settings import S3Options
from backends.wrapping import WrappingStore
from tiered.archive import duck
from tiered.archive.duck import ask
from tiered.archive.exact_names import quoted
from tiered.archive.selection import MAX, MIN
from tiered.errors import InvalidError
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from support.servers import S3Server
    from support.shop import Shop

    from tiered.archive.job import JobContext

ODD = ("%RETRY%g", 'quo"ted', "Orders", "orders", "two words", "select")


def values(at: JobContext, question: str) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in ask(at.archive, question).rows.to_pylist()]


# -- forms ----------------------------------------------------------------------------------------

VALUES = (
    "SELECT 1 AS a, 'é' AS a, NULL AS n, 'nan'::DOUBLE AS f, ['x'] AS l, map([], []) AS m, map(['k'], [2]) AS k,"
    " TIMESTAMPTZ '2026-03-07 01:02:03.5Z' AS t, INTERVAL '90' MINUTE AS d, 'ab'::BLOB AS b, '\\xFF'::BLOB AS r,"
    " 12345678901234567890::HUGEINT AS h, 1.5::DECIMAL(9, 2) AS c, DATE '2026-03-07' AS y, true AS w"
)
ROW = {
    "a": 1,
    "a_2": "é",
    "n": None,
    "f": "NaN",
    "l": ["x"],
    "m": {},
    "k": {"k": 2},
    "t": "2026-03-07T01:02:03.500000+00:00",
    "d": "PT5400S",
    "b": "ab",
    "r": "base64:/w==",
    "h": 12345678901234567890,
    "c": 1.5,
    "y": "2026-03-07",
    "w": True,
}


def test_every_form_says_the_same(shop: Shop, tmp_path: Any) -> None:
    document = here("sql", shop.archive, VALUES, "--json").good().document
    assert document == {"format": 1, "columns": list(ROW), "rows": [ROW]}
    assert here("sql", shop.archive, VALUES, "-o", "jsonl").good().rows == [ROW]
    out = here("sql", shop.archive, VALUES, "-o", "csv").good().out.decode()
    (row,) = csv.DictReader(io.StringIO(out))
    assert {name: row[name] for name in ("a", "a_2", "n", "w")} == {
        "a": "1", "a_2": "é", "n": "", "w": "true",
    }  # fmt: skip
    assert json.loads(row["k"]) == {"k": 2}
    head, line = here("sql", shop.archive, VALUES).good().out.decode().splitlines()
    assert head.split() == list(ROW)
    assert "12,345,678,901,234,567,890" in line
    file = tmp_path / "answer.parquet"
    ran = here("sql", shop.archive, "SELECT * FROM orders", "--to", file).good()
    assert (ran.out, pq.read_table(file).num_rows) == (b"", len(shop.of("orders")))
    assert f"{len(shop.of('orders')):,} rows in {file}" in ran.err


def test_a_statement_without_a_result(shop: Shop) -> None:
    for form in ((), ("--json",), ("-o", "csv")):
        ran = here("sql", shop.archive, "SELECT 1 AS a WHERE false", *form).good()
        assert ran.err == "tiered: no rows\n"
    assert here("sql", shop.archive, "SELECT 1 AS a").good().err == ""
    assert here("sql", shop.archive, "SELECT 1 AS a WHERE false", "--quiet").good().err == ""
    assert here("sql", shop.archive, "SELECT 1 AS a WHERE false", "--json").good().document == {
        "format": 1, "columns": ["a"], "rows": [],
    }  # fmt: skip


# -- names ----------------------------------------------------------------------------------------


def test_odd_names_are_tables() -> None:
    at = small(*ODD)
    names = [name for (name,) in values(at, "SHOW TABLES")]
    assert sorted(names) == sorted(ODD)
    for topic in ODD:
        question = f"SELECT DISTINCT topic FROM {quoted(topic)} WHERE queue_offset = 1"
        assert values(at, question) == [(topic,)]


def test_describe_names_the_columns() -> None:
    at = small("orders", "other")
    assert len(values(at, "DESCRIBE orders")) == 21
    (columns,) = values(
        at, "SELECT count(*) FROM information_schema.columns WHERE table_schema = 'main'"
    )
    assert columns == (42,)


def test_what_is_wrong_is_said(shop: Shop, tmp_path: Any) -> None:
    ran = here("sql", shop.archive, "SELECT * FROM ordres")
    assert ran.code == 2
    for word in ("ordres", '"%RETRY%billing"', '"orders"', '"payments"'):
        assert word in ran.error
    assert "syntax error" in here("sql", shop.archive, "SELEC 1").error
    assert "nope" in here("sql", shop.archive, "SELECT nope FROM orders").error
    late = here("sql", shop.archive, "SELECT error(topic) FROM orders")
    assert (late.code, late.out) == (2, b"")
    assert "there is no archive" in here("sql", shop.tier, "SELECT 1").error
    unwritable = here("sql", shop.archive, "SELECT 1", "--to", tmp_path / "no" / "file")
    assert (unwritable.code, "No such file" in unwritable.error) == (2, True)
    assert "%RETRY%workers" in here("sql", "--help").good().out.decode()


@pytest.mark.parametrize("name", ["x.csv", "x.CSV.gz", "x.json", "x.jsonl", "x.xlsx", "x.db"])
def test_parquet_is_not_written_under_another_form_s_name(name: str, tmp_path: Any) -> None:
    ran = here("sql", f"file://{tmp_path}/nothing", "SELECT 1", "--to", tmp_path / name)
    assert (ran.code, "what is written is Parquet" in ran.error) == (2, True)
    ran = here("archive", f"file://{tmp_path}/nothing", "--to", f"file://{tmp_path}/{name}")
    assert (ran.code, "what is written is Parquet" in ran.error) == (2, True)
    assert not (tmp_path / name).exists()


def test_what_parquet_cannot_hold_is_said(shop: Shop, tmp_path: Any) -> None:
    file = tmp_path / "x.parquet"
    ran = here("sql", shop.archive, "SELECT INTERVAL 1 DAY AS d", "--to", file)
    assert (ran.code, "Parquet has no form" in ran.error, file.exists()) == (2, True, False)


def test_of_many_tables_some_are_named() -> None:
    at = small(*(f"topic-{number:02}" for number in range(23)))
    with pytest.raises(InvalidError, match='"topic-19" and 3 more; SHOW TABLES'):
        ask(at.archive, "FROM nope")


# -- files left unread ----------------------------------------------------------------------------


class Counting(WrappingStore):
    """Counts what is read of messages."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.read: set[str] = set()

    def get(self, key, byte_range=None):
        if key.startswith("data/"):
            self.read.add(key)
        return self._inner.get(key, byte_range)


@pytest.fixture(scope="module")
def twelve() -> JobContext:
    """Ten sealed segments of queue 0, two of queue 1; messages of an offset are stored 13.5 ms apart."""
    tier = TierBuilder()
    for number in range(12):
        queue = MessageQueue("orders", int(number > 9))
        tier.add([b"%d" % number] * 100, queue=queue, roll=True)
    for queue_id in (0, 1):
        tier.add([b"open"], queue=MessageQueue("orders", queue_id), roll=True)
    at = job_context(tier.store)
    archive(at)
    assert len(keys(at)) == 12
    return at


@pytest.fixture
def many(twelve: JobContext) -> tuple[JobContext, Counting]:
    counting = Counting(twelve.archive)
    return replace(twelve, archive=counting, bare=counting), counting


@pytest.mark.parametrize(
    ("where", "files"),
    [
        ("queue_offset = 250", 1),
        ("queue_offset BETWEEN 150 AND 349 AND queue_id = 0", 3),
        ("100 > queue_offset", 2),
        ("NOT queue_offset >= 100", 2),
        ("queue_id = 1", 2),
        ("queue_id IN (1, 7)", 2),
        ("queue_id = 1 AND queue_offset > 99", 1),
        ("queue_id = 1 OR queue_offset > 99", 12),
        ("queue_id = 5", 0),
        ("store_ts < '2001-01-01'", 0),
        ("store_ts >= now()", 0),
        ("store_ts < now()", 12),
        ("date_trunc('day', store_ts) = '2001-01-01'", 0),
        ("coalesce(queue_id = 5, true)", 12),
        ("msg_key = '(queue_id = 5)'", 12),
        ("queue_id = 5 IS NOT TRUE", 12),
        ("true", 12),
    ],
)
def test_files_are_left_unread(where: str, files: int, many: tuple[JobContext, Counting]) -> None:
    at, counting = many
    answer = ask(at.archive, f"SELECT count(*) AS n FROM orders WHERE {where}")
    assert (answer.files, answer.files - answer.left_out) == (12, files)
    assert len(counting.read) == files
    rows = ask(at.archive, "SELECT * FROM orders").rows
    with duckdb.connect() as plainly:
        plainly.execute("SET TimeZone = 'UTC'")
        plainly.register("orders", rows)
        (count,) = plainly.execute(f"SELECT count(*) FROM orders WHERE {where}").fetchall()
    assert [row["n"] for row in answer.rows.to_pylist()] == list(count)


def test_by_day_and_by_time(shop: Shop) -> None:
    day = "date_trunc('day', store_ts) = '2026-03-07'"
    ran = here("sql", shop.archive, f"SELECT count(*) n FROM orders WHERE {day}", "-o", "jsonl")
    assert (ran.rows, "left out" in ran.err) == ([{"n": len(shop.of("orders"))}], False)
    late = "store_ts >= '2026-03-08'"
    ran = here("sql", shop.archive, f"SELECT count(*) n FROM orders WHERE {late}", "-o", "jsonl")
    assert ran.rows == [{"n": 0}]
    assert "1 of 1 file left out unread" in ran.err


def test_each_scan_of_a_join_has_its_own_bounds(many: tuple[JobContext, Counting]) -> None:
    at, counting = many
    question = (
        "SELECT count(*) AS n FROM orders a JOIN orders b ON a.queue_offset = b.queue_offset - 100"
        " WHERE a.queue_offset < 50 AND b.queue_offset >= 900"
    )
    assert ask(at.archive, question).left_out == 12 - 2 - 1
    assert len(counting.read) == 3


def test_several_statements_and_subqueries_read_all(many: tuple[JobContext, Counting]) -> None:
    at, _ = many
    question = "SELECT (SELECT count(*) FROM orders) AS n FROM orders WHERE queue_offset = 250"
    assert values(at, question) == [(1200,)]
    assert values(at, "SELECT 1; SELECT count(*) FROM orders WHERE queue_id = 1") == [(200,)]


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ("(uniq_key = 'AB')", "AB"),
        ("((msg_key = 'a') AND (queue_id = 1))", "a"),
        ("(msg_key = 'a b')", "a"),
        ("list_contains(keys, 'a')", "a"),
        ("array_has(keys, 'it''s')", "it's"),
        ("list_contains(keys, 'a b')", None),
        ("(msg_key = ' a')", None),
        ("(msg_key = '')", None),
        ("(msg_key >= 'a')", None),
        ("(tag = 'a')", None),
        ("((msg_key = 'a') OR (queue_id = 1))", None),
        ("(NOT list_contains(keys, 'a'))", None),
        ("(list_contains(keys, 'a') IS NULL)", None),
    ],
)
def test_keys_that_rows_must_have(said: str, key: str | None) -> None:
    assert duck._selection([said], said).key == key
    assert duck._selection([said], "something else").key is None


def test_the_key_index_leaves_files_out() -> None:
    store = MemoryStore("archive")
    ids = make_archive(store, files=5, rows=200, rng=random.Random(1))
    rows = ask(store, "SELECT uniq_key, keys, msg_key FROM orders WHERE queue_offset = 333").rows
    (row,) = rows.to_pylist()
    tests = [f"uniq_key = '{ids[333]}'", f"msg_key = '{row['msg_key']}'",
             f"array_contains(keys, '{row['keys'][0]}')"]  # fmt: skip
    for is_indexed in (False, True):
        if is_indexed:
            index(store)
        for test in tests:
            answer = ask(store, f"SELECT queue_offset AS n FROM orders WHERE {test}")
            assert 333 in answer.rows["n"].to_pylist()
            assert answer.left_out >= 3 if is_indexed else answer.left_out == 0
            either = f"SELECT count(*) AS n FROM orders WHERE {test} OR queue_id = 0"
            assert (values_of(store, either), ask(store, either).left_out) == ([1000], 0)
        nothing = ask(store, "SELECT count(*) AS n FROM orders WHERE uniq_key = 'nowhere'")
        assert nothing.rows["n"].to_pylist() == [0]
        assert nothing.left_out >= 4 * is_indexed


def values_of(store: MemoryStore, question: str) -> list[int]:
    return ask(store, question).rows["n"].to_pylist()


def test_columns_of_bodies_are_columns_of_tables(shop: Shop, archive_url: str) -> None:
    here("archive", shop.tier, "--to", archive_url, "--topics", "orders").good()
    here("archive", shop.tier, "--to", archive_url, "--body", "payments=json").good()
    question = "SELECT sum(value_amount) AS n FROM payments WHERE queue_id = 1"
    ran = here("sql", archive_url, question, "-o", "jsonl").good()
    found = [json.loads(one.message.body)["amount"] for one in shop.of("payments")
             if one.message.queue_id == 1]  # fmt: skip
    assert ran.rows == [{"n": sum(found)}]
    none = here(
        "sql", archive_url, "SELECT value_amount FROM payments WHERE queue_id = 9", "--json"
    )
    assert none.good().document["rows"] == []
    assert "left out unread" in none.err
    assert "value_amount" in here("sql", archive_url, "DESCRIBE payments").good().out.decode()
    assert here("sql", archive_url, "SELECT value_amount FROM orders").code == 2


@pytest.mark.parametrize(
    ("said", "bounds"),
    [
        ("(queue_id = 2)", {"queue_id": (2, 2)}),
        ("((queue_offset > 4) AND (queue_offset <= 7))", {"queue_offset": (5, 7)}),
        ("optional: (queue_id < -1)", {"queue_id": (MIN, -2)}),
        ("(store_ts < '1970-01-01 00:00:01+00'::TIMESTAMP WITH TIME ZONE)", {"store_ts": (MIN, 999_999)}),
        ("((queue_id = 2) OR (queue_id = 3))", {}),
        ("(queue_id = 1) OR (queue_id = 2) AND (queue_offset = 5)", {}),
        ("(NOT ((queue_id = 1) AND (queue_id = 2)))", {}),
        ("CASE WHEN (queue_id = 1) AND (queue_offset = 2) AND (tag = 'x') THEN (true) ELSE false END", {}),
        ("(queue_id BETWEEN 1 AND 2)", {}),
        ("(queue_id = 9999999999999999999999)", {"queue_id": (MAX, MIN)}),
        ("(body_crc = 5)", {}),
        ("(store_ts = 'never'::TIMESTAMP WITH TIME ZONE)", {}),
        ("(tag = ' AND (queue_id = 1)') AND (queue_id >= 3)", {"queue_id": (3, MAX)}),
    ],
)  # fmt: skip
def test_only_what_is_understood_is_taken(said: str, bounds: dict[str, tuple[int, int]]) -> None:
    assert dict(duck._selection([said], said).bounds) == bounds


def test_from_s3_too(shop: Shop, ministack: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    use_server(ministack, monkeypatch)
    url = f"s3://{ministack.bucket()}/parquet"
    here("archive", shop.tier, "--to", url).good()
    store = open_store(url, S3Options())
    try:
        answer = ask(store, "SELECT count(*) AS n FROM orders WHERE queue_id = 1")
    finally:
        store.close()
    wanted = sum(one.message.queue_id == 1 for one in shop.of("orders"))
    assert (answer.rows.to_pylist(), answer.files, answer.left_out) == ([{"n": wanted}], 1, 0)
