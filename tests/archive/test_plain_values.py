"""Values of an answer as texts: each with all of its digits, in every form, of both engines."""

from __future__ import annotations

import csv
import io
import json
import math
from contextlib import closing
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa
import pytest
from support.archive_jobs import archive, job_context, small
from support.command_line import here
from support.tiers import TierBuilder

from backends.local import LocalFolderStore
from backends.registry import open_store
from backends.s3_settings import S3Options
from tiered.archive.duck import ask
from tiered.cli.sql import plain_column, plain_rows
from tiered.cli.values import json_text, printable
from tiered.spark.frames import ask_spark

if TYPE_CHECKING:
    from pathlib import Path

SAID: list[tuple[str, Any]] = [
    ("12345678901234567.89::DECIMAL(20, 2)", Decimal("12345678901234567.89")),
    ("1::DECIMAL(20, 2)", Decimal("1.00")),
    ("0::DECIMAL(38, 30)", Decimal("0." + 30 * "0")),
    ("18446744073709551615::UBIGINT", 2**64 - 1),
    ("'-9223372036854775808'::BIGINT", -(2**63)),
    ("'170141183460469231731687303715884105727'::HUGEINT", Decimal(2**127 - 1)),
    ("'340282366920938463463374607431768211455'::UHUGEINT", str(2**128 - 1)),
    ("'123456789012345678901234567890123456789012345'::BIGNUM", "123456789012345678901234567890123456789012345"),
    ("0.1::FLOAT", 0.1),
    ("16777217::FLOAT", 16777216.0),
    ("0.1::DOUBLE + 0.2::DOUBLE", 0.30000000000000004),
    ("'nan'::FLOAT", "NaN"),
    ("'inf'::DOUBLE", "Infinity"),
    ("'-inf'::DOUBLE", "-Infinity"),
    ("'2024-01-01 01:02:03.123456789'::TIMESTAMP_NS", "2024-01-01T01:02:03.123456789"),
    ("'2024-01-01 01:02:03.12'::TIMESTAMP_NS", "2024-01-01T01:02:03.120000"),
    ("'1969-12-31 23:59:59.999999'::TIMESTAMP", "1969-12-31T23:59:59.999999"),
    ("'2024-01-01 01:02:03'::TIMESTAMP_S", "2024-01-01T01:02:03"),
    ("'2024-01-01 01:02:03.5'::TIMESTAMP_MS", "2024-01-01T01:02:03.500000"),
    ("'2024-01-01 01:02:03+05:30'::TIMESTAMPTZ", "2023-12-31T19:32:03+00:00"),
    ("'12345-01-01 00:00:00'::TIMESTAMP", "+12345-01-01T00:00:00"),
    ("'12345-01-01 00:00:00Z'::TIMESTAMPTZ", "+12345-01-01T00:00:00+00:00"),
    ("'infinity'::TIMESTAMPTZ", "infinity"),
    ("'-infinity'::TIMESTAMP", "-infinity"),
    ("'infinity'::TIMESTAMP_NS", "infinity"),
    ("'12345-12-31'::DATE", "+12345-12-31"),
    ("'0044-03-15 (BC)'::DATE", "-0043-03-15"),
    ("'0001-01-01 (BC)'::DATE", "0000-01-01"),
    ("'0001-01-01'::DATE", "0001-01-01"),
    ("'9999-12-31'::DATE", "9999-12-31"),
    ("'-infinity'::DATE", "-infinity"),
    ("'24:00:00'::TIME", "24:00:00"),
    ("'01:02:03.000004'::TIME", "01:02:03.000004"),
    ("'12:13:14.123456789'::TIME_NS", "12:13:14.123456789"),
    ("'12:13:14.123456+02:30'::TIMETZ", "12:13:14.123456+02:30"),
    ("INTERVAL '14 months 3 days 1500 milliseconds'", "P14M3DT1.5S"),
    ("INTERVAL '-1 day'", "P-1DT0S"),
    ("INTERVAL '90' MINUTE", "PT5400S"),
    ("'0b2b6d4c-5a1e-4b52-9f39-b1c1a4a4a4a4'::UUID", "0b2b6d4c-5a1e-4b52-9f39-b1c1a4a4a4a4"),
    ("'10101'::BIT", "10101"),
    ("'ab'::BLOB", "ab"),
    ("''::BLOB", ""),
    (r"'\xFF'::BLOB", "base64:/w=="),
    ("'base64:/w=='::BLOB", "base64:YmFzZTY0Oi93PT0="),
    ("'a'::ENUM('a', 'b')", "a"),
    ("[0.1::FLOAT, NULL, 'nan'::FLOAT]", [0.1, None, "NaN"]),
    ("[1.50::DECIMAL(9, 2)]::DECIMAL(9, 2)[1]", [Decimal("1.50")]),
    ("[['a'::BLOB], NULL, []]", [["a"], None, []]),
    ("{'m': 0.10::DECIMAL(9, 2), 't': ['12345-01-01'::DATE]}", {"m": Decimal("0.10"), "t": ["+12345-01-01"]}),
    ("MAP{1.5: 'nan'::DOUBLE, 2.5: NULL}", {"1.5": "NaN", "2.5": None}),
    ("MAP{'k': {'f': 0.1::FLOAT}}", {"k": {"f": 0.1}}),
    ("[union_value(n := 0.1::FLOAT)::UNION(n FLOAT, s VARCHAR), 'x'::UNION(n FLOAT, s VARCHAR)]", [0.1, "x"]),
    ("{'z': '12:00:00+01'::TIMETZ, 'b': ['1'::BIT]}", {"z": "12:00:00+01", "b": ["1"]}),
    ("MAP{'1'::BIT: '340282366920938463463374607431768211455'::UHUGEINT}", {"1": str(2**128 - 1)}),
    ("[NULL]", [None]),
    ("NULL", None),
]  # fmt: skip


@pytest.mark.parametrize(("said", "shown"), SAID, ids=[said for said, _ in SAID])
def test_every_digit_is_kept(said: str, shown: Any) -> None:
    at = small("orders")
    rows = ask(at.archive, f"SELECT * FROM (VALUES (NULL), ({said}), ({said})) AS t(x)").rows
    found = [row["x"] for batch in rows.to_batches() for row in plain_rows(batch)]
    assert found == [None, shown, shown]
    assert type(found[1]) is type(shown)
    # What a slice has is of its own rows.
    (column,) = rows.combine_chunks().columns
    assert plain_column(column.chunk(0).slice(1, 1)) == [shown]


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ("12345678901234567.89::DECIMAL(20, 2)", "12345678901234567.89"),
        ("18446744073709551615::UBIGINT", "18446744073709551615"),
        ("9007199254740993::BIGINT", "9007199254740993"),
        ("sum(9223372036854775807::BIGINT)", "9223372036854775807"),
        ("0.1::FLOAT", "0.1"),
        ("1e-10::DECIMAL(38, 20)", "0.00000000010000000000"),
        ("[12345678901234567.89::DECIMAL(20, 2)]", "12345678901234567.89"),
        ("{'a': 12345678901234567.89::DECIMAL(20, 2)}", "12345678901234567.89"),
        ("MAP{'a': [18446744073709551615::UBIGINT]}", "18446744073709551615"),
        ("'2024-01-01 00:00:00.123456789'::TIMESTAMP_NS", "2024-01-01T00:00:00.123456789"),
    ],
)
def test_every_form_has_every_digit(said: str, text: str, tmp_path: Path) -> None:
    url = _archived(tmp_path)
    for form in ("csv", "json", "jsonl", "table", "wide"):
        out = here("sql", url, f"SELECT {said} AS x", "-o", form).good().out.decode()
        plain = out.replace(",", "") if form in {"table", "wide"} else out
        assert text in plain, form
        if form == "jsonl":
            json.loads(out, parse_constant=pytest.fail)


def _archived(folder: Path) -> str:
    """The URL of an archive that no question here is about."""
    tier = TierBuilder()
    for body in (b"sealed", b"open"):
        tier.add([body], roll=True)
    archive(job_context(tier.store, LocalFolderStore(folder / "archive")))
    return f"file://{folder}/archive"


def test_json_has_numbers_of_any_length() -> None:
    value = {"a": Decimal("1.50"), "b": [Decimal("1E+3"), {"c": Decimal("0E-30")}], "é": "ü"}
    text = json_text(value)
    assert text == '{"a": 1.50, "b": [1000, {"c": 0.000000000000000000000000000000}], "é": "ü"}'
    assert json.loads(text, parse_float=Decimal)["a"] == Decimal("1.50")
    with pytest.raises(TypeError):
        json_text({"a": object()})


def test_tables_have_values_within_others_as_json() -> None:
    assert printable([1, 2]) == "1, 2"
    assert printable([[1], [Decimal("0.10")]]) == "[[1], [0.10]]"
    assert printable({"a": Decimal("0.10")}) == '{"a": 0.10}'
    assert printable(Decimal("1234567.00")) == "1,234,567.00"


def test_nothing_is_not_an_empty_text_in_csv(tmp_path: Path) -> None:
    url = _archived(tmp_path)
    question = (
        "SELECT NULL AS n, '' AS e, 'a\"b' AS q, 'a,b' AS c, ' a' AS s, 'a\nb' AS l, ''::BLOB AS z"
    )
    out = here("sql", url, question, "-o", "csv").good().out.decode()
    assert out == 'n,e,q,c,s,l,z\n,"","a""b","a,b"," a","a\nb",""\n'
    (row,) = csv.DictReader(io.StringIO(out))
    assert list(row.values()) == ["", "", 'a"b', "a,b", " a", "a\nb", ""]


def test_duckdb_reads_what_csv_says(tmp_path: Path) -> None:
    url, file = _archived(tmp_path), tmp_path / "x.csv"
    question = "SELECT 1 AS i, NULL::VARCHAR AS n, '' AS e UNION ALL SELECT 2, 'x', NULL ORDER BY i"
    file.write_bytes(here("sql", url, question, "-o", "csv").good().out)
    read = f"SELECT * FROM read_csv('{file}', allow_quoted_nulls = false, all_varchar = true)"
    assert duckdb.sql(read).fetchall() == [("1", None, ""), ("2", "x", None)]


def test_structs_that_have_a_name_twice_lose_nothing() -> None:
    kind = pa.struct([("a", pa.int32()), ("a", pa.int32())])
    columns = [pa.array([1, 2], pa.int32()), pa.array([3, 4], pa.int32())]
    values = pa.StructArray.from_arrays(columns, fields=list(kind))
    assert plain_column(values.slice(1)) == [{"a": 2, "a_2": 4}]


def test_kinds_that_spark_and_parquet_have() -> None:
    duration = pa.array([93_784_000_001, None], pa.duration("us"))
    assert plain_column(duration) == ["PT93784.000001S", None]
    assert plain_column(pa.array([None, math.inf], pa.float16())) == [None, "Infinity"]
    assert plain_column(pa.array([1, None], pa.date64())) == ["1970-01-01", None]
    assert plain_column(pa.array([b"ab"], pa.binary(2))) == ["ab"]
    ids = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([bytes(16)], pa.binary(16)))
    assert plain_column(ids) == ["00000000-0000-0000-0000-000000000000"]
    there = pa.array([1_700_000_000], pa.timestamp("s", "Asia/Kolkata"))
    assert plain_column(there) == ["2023-11-15T03:43:20+05:30"]
    assert plain_column(pa.array(["a", None]).dictionary_encode()) == ["a", None]
    dense = pa.UnionArray.from_dense(
        pa.array([0, 1, 0], pa.int8()),
        pa.array([0, 0, 1], pa.int32()),
        [pa.array([0.5, None]), pa.array(["x"])],
    )
    assert plain_column(dense) == [0.5, "x", None]


OF_SPARK = {
    "CAST('12345678901234567.89' AS DECIMAL(20, 2))": Decimal("12345678901234567.89"),
    "CAST(0.1 AS FLOAT)": 0.1,
    "double('NaN')": "NaN",
    "timestamp'+12345-01-01 00:00:00'": "+12345-01-01T00:00:00+00:00",
    "date'-0043-03-15'": "-0043-03-15",
    "INTERVAL '0 00:00:01.5' DAY TO SECOND": "PT1.5S",
    "INTERVAL '1-2' YEAR TO MONTH": "INTERVAL '1-2' YEAR TO MONTH",
    "parse_json('{\"a\":1}')": '{"a":1}',
    "map(1.5, array(CAST(0.1 AS FLOAT)))": {"1.5": [0.1]},
    "X'FF'": "base64:/w==",
}


@pytest.mark.spark
@pytest.mark.filterwarnings("ignore")
def test_spark_s_answers_have_every_digit_too(session: Any, tmp_path: Path) -> None:
    place = open_store(_archived(tmp_path), S3Options())
    columns = ", ".join(f"{said} AS x{number}" for number, said in enumerate(OF_SPARK))
    with closing(place):
        answer = ask_spark(session, place, f"SELECT {columns}", place.url, S3Options())
    (row,) = (row for batch in answer.to_batches() for row in plain_rows(batch))
    assert list(row.values()) == list(OF_SPARK.values())
