"""Decoders of bodies and what describes them: types, what fits and what does not, each body the same in any block."""

from __future__ import annotations

import base64
import io
import json
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.bodies import ORDER_AVSC, ORDER_TYPE, avro, descriptors, message

from tiered.archive.bodies import (
    NO_FIT,
    NO_OBJECT,
    BodyColumns,
    BodyCounts,
    BodyLayout,
    Decoder,
    columns_of_schema,
    columns_text,
    decode_bodies,
    infer_columns,
    is_name,
    parse_columns,
)
from tiered.archive.body_formats import (
    RAW,
    AvroDecoder,
    ProtoDecoder,
    avro_columns,
    body_fields,
    open_decoder,
    proto_columns,
    read_wishes,
)
from tiered.archive.columns import schema
from tiered.errors import InternalError, InvalidError

EVERY = (
    "a BOOLEAN, b TINYINT, c SMALLINT, d INT, e BIGINT, f FLOAT, g DOUBLE, h STRING, i BINARY, j DATE, k TIMESTAMP,"
    " l DECIMAL(12,2), m ARRAY<INT>, n MAP<STRING, ARRAY<DATE>>, o STRUCT<p: INT, `q r`: STRUCT<s: BIGINT>>"
)


def decoded(
    decoder: Decoder, columns: list[pa.Field], bodies: list[bytes]
) -> tuple[list[dict[str, Any]], dict[int, str]]:
    found = decode_bodies(decoder, pa.array(bodies, pa.binary()), columns)
    names = [column.name for column in columns]
    assert [column.type for column in found.columns] == [column.type for column in columns]
    rows = [
        dict(zip(names, row, strict=True))
        for row in zip(*(column.to_pylist() for column in found.columns), strict=True)
    ]
    return rows, {row: what for row, (what, _) in found.unfit.items()}


def json_of(columns: str, *bodies: bytes) -> tuple[list[dict[str, Any]], dict[int, str]]:
    return decoded(open_decoder(BodyColumns("json", columns)), parse_columns(columns), list(bodies))


def test_columns_are_written_as_they_are_read() -> None:
    assert columns_text(parse_columns(EVERY)) == EVERY
    loose = "A: long, -- what it is\n b\ttext,\n c array<struct<x int>>,\n"
    assert columns_text(parse_columns(loose)) == "A BIGINT, b STRING, c ARRAY<STRUCT<x: INT>>"
    assert columns_text(parse_columns("`a``b, c` INT")) == "`a``b, c` INT"
    assert parse_columns("") == []
    assert columns_text(parse_columns("-- a, b\n`a--b` INT -- c, `d\n, e INT--")) == (
        "`a--b` INT, e INT"
    )
    assert parse_columns("-- nothing") == []


JSON_NAMES = st.text(st.characters() | st.sampled_from("`-\n\"',()<>: \0\ud800aA"), max_size=12)
"""Names of members, whatever JSON allows: half a pair of surrogates, too."""


def types(names: st.SearchStrategy[str]) -> st.SearchStrategy[pa.DataType]:
    """Types that columns may have."""
    simple = [field.type for field in parse_columns(EVERY) if not pa.types.is_nested(field.type)]
    return st.recursive(
        st.sampled_from(simple),
        lambda inner: (
            inner.map(pa.list_)
            | st.tuples(inner, inner).map(lambda pair: pa.map_(*pair))
            | columns_of(names, inner).map(pa.struct)
        ),
        max_leaves=6,
    )


def columns_of(
    names: st.SearchStrategy[str], kinds: st.SearchStrategy[pa.DataType]
) -> st.SearchStrategy[list[pa.Field]]:
    """Columns whose names differ by more than upper and lower case."""
    pairs = st.tuples(names, kinds)
    distinct = st.lists(pairs, min_size=1, max_size=4, unique_by=lambda pair: pair[0].lower())
    return distinct.map(lambda some: [pa.field(name, kind) for name, kind in some])


@given(columns_of(JSON_NAMES.filter(is_name), types(JSON_NAMES.filter(is_name))))
def test_whatever_columns_are_called_they_are_read_as_they_are_written(
    columns: list[pa.Field],
) -> None:
    """The text stands in the log for ever: one that cannot be read would end each later run."""
    text = columns_text(columns)
    assert parse_columns(text) == columns
    assert parse_columns(f"-- {text!r}\n {text} -- `") == columns


def documents_of(names: st.SearchStrategy[str]) -> st.SearchStrategy[list[dict[str, Any]]]:
    """JSON objects with whatever in them."""
    simple = st.none() | st.booleans() | st.integers() | st.floats() | JSON_NAMES
    values = st.recursive(
        simple | st.sampled_from([2**63, -(2**63), 10**400]),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
        max_leaves=12,
    )
    return st.lists(st.dictionaries(names, values, max_size=5), max_size=4)


@given(documents_of(JSON_NAMES))
def test_what_is_inferred_can_always_be_said_and_used(documents: list[dict[str, Any]]) -> None:
    bodies = [json.dumps(one, ensure_ascii=True).encode() for one in documents]
    columns = infer_columns(bodies)
    text = columns_text(columns)
    assert parse_columns(text) == columns
    if bodies and columns:
        decoded(open_decoder(BodyColumns("json", text)), columns, bodies)


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ({"a": {"b": 1}, "a.b": 2}, "a STRUCT<b: BIGINT>"),
        ({"A.b": 2, "a": {"B": 1, "c": 1}}, "`A.b` BIGINT, a STRUCT<c: BIGINT>"),
        ({"a": [{"b": 1}], "a.element.b": 2, "a.b": 3}, "a ARRAY<STRUCT<b: BIGINT>>, `a.b` BIGINT"),
        ({"a.element": 1, "a": [1]}, "`a.element` BIGINT"),
        ({"a": [1], "a.Element": 1}, "a ARRAY<BIGINT>"),
        ({"x" * 256: 1, "y" * 257: 1, "z": 1}, f"{'x' * 256} BIGINT, z BIGINT"),
        ({"a": {"b": 1}, "c": {"b": 1}}, "a STRUCT<b: BIGINT>, c STRUCT<b: BIGINT>"),
    ],
)
def test_what_readers_would_take_for_another_or_choke_on(
    document: dict[str, Any], text: str
) -> None:
    assert columns_text(infer_columns([json.dumps(document).encode()] * 2)) == text


@given(documents_of(st.sampled_from(["a", "A", "b", "a.b", "a.element", "element", "."])))
def test_iceberg_takes_what_is_inferred(documents: list[dict[str, Any]]) -> None:
    from pyiceberg.io.pyarrow import pyarrow_to_schema
    from pyiceberg.schema import index_by_name

    columns = infer_columns(json.dumps(one).encode() for one in documents)
    if columns:
        index_by_name(
            pyarrow_to_schema(schema(BodyLayout(BodyColumns("json", columns_text(columns)), 1)))
        )


@pytest.mark.parametrize("name", ["", "\0", "a\0b", "\ud800", "a\udfff"])
def test_a_name_that_no_column_can_have(name: str) -> None:
    body = json.dumps({name: 1, "a": {name: 1, "b": 1}}).encode()
    assert columns_text(infer_columns([body])) == "a STRUCT<b: BIGINT>"
    schema = {"properties": {name: {"type": "integer"}}}
    with pytest.raises(InvalidError):
        columns_of_schema(schema)
    if name.isascii():
        with pytest.raises(InvalidError):
            columns_text([pa.field(name, pa.int64())])


@pytest.mark.parametrize(
    "text",
    [
        *(
            "a",
            "a INT b INT",
            "a WORD",
            "a DECIMAL(40,2)",
            "a DECIMAL(2,3)",
            "a ARRAY<INT",
            "a INT>",
        ),
        *(
            "a INT, A BIGINT",
            "a STRUCT<x: INT, X: INT>",
            "1 INT",
            "a MAP<INT>",
            "a;b INT",
            "a DECIMAL(x)",
        ),
        "a " + "ARRAY<" * 40 + "INT" + ">" * 40,
    ],
)
def test_columns_that_are_none(text: str) -> None:
    with pytest.raises(InvalidError):
        parse_columns(text)


def test_columns_of_a_json_schema() -> None:
    schema = {
        "type": "object",
        "properties": {
            "id": {"type": "integer"},
            "price": {"type": ["number", "null"]},
            "either": {"type": ["integer", "number"]},
            "ok": {"type": "boolean"},
            "when": {"type": "string", "format": "date-time"},
            "day": {"type": "string", "format": "date"},
            "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}},
        },
        "$defs": {"line": {"type": "object", "properties": {"sku": {"type": "string"}}}},
    }
    assert columns_text(columns_of_schema(schema)) == (
        "id BIGINT, price DOUBLE, either DOUBLE, ok BOOLEAN, when TIMESTAMP, day DATE,"
        " lines ARRAY<STRUCT<sku: STRING>>"
    )
    endless = {"properties": {"a": {"$ref": "#/properties/b"}, "b": {"$ref": "#/properties/a"}}}
    for wrong in (
        [],
        {"type": "string"},
        endless,
        {"properties": {"a": {"type": ["string", "integer"]}}},
    ):
        with pytest.raises(InvalidError):
            columns_of_schema(wrong)


def test_inference() -> None:
    documents: list[Any] = [
        {"n": 1, "t": "x", "none": None, "l": [], "o": {}, "Big": 2**70},
        {"n": 1.5, "t": 7, "l": [None, {"q": 1}], "o": {"deep": [[True]]}, "big": 1},
        [1],
    ]
    bodies = [json.dumps(one).encode() for one in documents]
    found = infer_columns([*bodies, b"no json", b"[" * 100_000])
    assert columns_text(found) == (
        "n DOUBLE, t STRING, l ARRAY<STRUCT<q: BIGINT>>, o STRUCT<deep: ARRAY<ARRAY<BOOLEAN>>>, Big DECIMAL(38,0)"
    )
    for no_json in (
        b"\xff",
        json.dumps({"a": 1}).encode("utf-16"),
        b"\xef\xbb\xbf\xef\xbb\xbf{}",
        b"1" * 5000,
        b"",
    ):
        assert infer_columns([no_json, b'{"n": NaN, "n": -Infinity}']) == [
            pa.field("n", pa.float64())
        ]
    many = json.dumps({f"id-{n}": n for n in range(2000)}).encode()
    assert len(infer_columns([many])) == 512
    assert infer_columns([b"{}", b'{"a": null, "b": [], "c": {}}']) == []


def test_json_of_every_type() -> None:
    columns = "b BOOLEAN, i INT, d DOUBLE, s STRING, day DATE, at TIMESTAMP, m DECIMAL(6,2),"
    columns += " l ARRAY<DATE>, o STRUCT<x: BIGINT>"
    whole = (
        b' {"b": true, "i": -7, "d": 3, "s": "\\u00fc", "day": "2024-02-29", "at": "2024-01-02T03:04:05.5+01:00",\n'
        b'"m": 1.5, "l": ["2024-01-01", null], "o": {"x": 9, "more": 1}, "more": {"y": []}}\r\n'
    )
    rows, unfit = json_of(columns, whole, b"{}", b'{"m": "2.25", "at": "2024-01-02 03:04:05"}')
    assert unfit == {}
    assert rows[0] == {
        "b": True,
        "i": -7,
        "d": 3.0,
        "s": "ü",
        "day": date(2024, 2, 29),
        "at": datetime(2024, 1, 2, 2, 4, 5, 500_000, UTC),
        "m": Decimal("1.50"),
        "l": [date(2024, 1, 1), None],
        "o": {"x": 9},
    }
    assert set(rows[1].values()) == {None}
    assert rows[2]["m"] == Decimal("2.25")
    for kind in ("MAP<STRING, INT>", "BINARY", "ARRAY<BINARY>"):
        with pytest.raises(InvalidError, match="cannot become"):
            open_decoder(BodyColumns("json", f"a {kind}"))


NONE = [
    *(b"", b" ", b"null", b"[]", b"[{}]", b'"{}"', b"1", b"{", b"}", b'{"n": 1', b'{"n": 1}}'),
    *(b'{"n": 1}{"n": 2}', b'{"n": 1} {"n": 2}', b'{"n": 1}\n{"n": 2}', b'{"n": 1},{"n": 2}'),
    *(
        b'{"n": "x}',
        b'{","n":1}',
        b'{"s": "\xff"}',
        b'{"n": 1}\0',
        b'{"n": 1\0}',
        b"\xef\xbb\xbf",
        b"\xef\xbb\xbf\xef\xbb\xbf{}",
    ),
    *(b'{"s": "a\nb"}', b"{'n': 1}", b'{"n": 1,}', b'{"n": 01}'),
]
UNFIT = {
    **dict.fromkeys([b'{"n": "x"}', b'{"n": 1.5}', b'{"n": 1e1}', b'{"n": true}'], "n"),
    **dict.fromkeys([b'{"n": 9223372036854775808}', b'{"n": [1]}', b'{"n": {}}'], "n"),
    b'{"n": 1, "n": 2}': "n",
    **dict.fromkeys([b'{"s": 1}', b'{"s": {}}', b'{"s": "\\ud800"}'], "s"),
    b'{"s": 1, "n": "x"}': "n, s",
}
"""And the members that are wrong."""


@pytest.mark.parametrize("body", NONE)
def test_what_is_no_json_object(body: bytes) -> None:
    rows, unfit = json_of("n BIGINT, s STRING", body)
    assert (rows, unfit) == ([{"n": None, "s": None}], {0: NO_OBJECT})


@pytest.mark.parametrize(("body", "members"), UNFIT.items())
def test_json_that_does_not_fit(body: bytes, members: str) -> None:
    rows, unfit = json_of("n BIGINT, s STRING", body)
    assert (rows, unfit) == ([{"n": None, "s": None}], {0: f"{NO_FIT}: {members}"})


def test_what_fits_of_a_body_is_there_beside_what_does_not() -> None:
    columns = "id BIGINT, amount DOUBLE, o STRUCT<x: INT, y: INT>, l ARRAY<INT>, s STRING"
    bodies = [
        b'{"id": 1, "amount": 1.5, "o": {"x": 1, "y": 2}, "l": [1], "s": "a"}',
        b'{"id": "x", "amount": 2.5, "o": {"x": 1}, "l": [2], "s": "b"}',
        b'{"id": 3, "amount": "3.5", "o": {"x": "1", "y": 2}, "l": [3, "3"], "s": "c"}',
        b"no json",
    ]
    rows, unfit = json_of(columns, *bodies)
    assert [row["id"] for row in rows] == [1, None, 3, None]
    assert [row["amount"] for row in rows] == [1.5, 2.5, None, None]
    assert [row["o"] for row in rows] == [{"x": 1, "y": 2}, {"x": 1, "y": None}, None, None]
    assert [row["l"] for row in rows] == [[1], [2], None, None]
    assert [row["s"] for row in rows] == ["a", "b", "c", None]
    assert unfit == {1: f"{NO_FIT}: id", 2: f"{NO_FIT}: amount, o, l", 3: NO_OBJECT}


@pytest.mark.parametrize(
    "wrong", ["1e400", '"\\ud800"', '{"n": 1e999}', "[1e400]", '"1", "x": "1"']
)
def test_what_no_parser_gets_over_is_one_member_s(wrong: str) -> None:
    body = f' {{ "n" : 1 , "x" : {wrong} , "s" : "a" }} '.encode()
    rows, unfit = json_of("n BIGINT, x STRING, s STRING", body)
    assert rows == [{"n": 1, "x": None, "s": "a"}]
    assert unfit == {0: f"{NO_FIT}: x"}


def test_of_many_members_that_do_not_fit_some_are_named() -> None:
    names = [f"m{number}" for number in range(20)]
    body = json.dumps(dict.fromkeys(names, "x")).encode()
    _, unfit = json_of(", ".join(f"{name} INT" for name in names), body)
    assert unfit == {0: f"{NO_FIT}: {', '.join(names[:8])} and 12 more"}


@pytest.mark.parametrize(
    ("kind", "number", "fits"),
    [
        *(
            ("DOUBLE", number, True)
            for number in ("0.1", "9007199254740992", "1e22", "-0.0", "NaN")
        ),
        *(("DOUBLE", number, True) for number in ("0.10000000000000001", "18446744073709551616")),
        *(("DOUBLE", number, True) for number in ("0.30000000000000004", "1.50000000000000000000")),
        *(("DOUBLE", number, False) for number in ("9007199254740993", "12345678901234567.89")),
        *(("DOUBLE", number, False) for number in ("-9007199254740993", "0.1234567890123456789")),
        *(("DOUBLE", number, False) for number in ("18446744073709551615", "90071992547409930e-1")),
        *(("FLOAT", number, True) for number in ("16777216", "3.14159265", "0.1")),
        ("FLOAT", "16777217", False),
        ("ARRAY<DOUBLE>", "[1.5, 9007199254740993]", False),
        ("STRUCT<x: DOUBLE>", '{"x": 9007199254740993}', False),
        ("ARRAY<STRUCT<x: DOUBLE>>", '[{"x": 9007199254740993}]', False),
        ("DECIMAL(38,0)", "18446744073709551615", True),
        ("DECIMAL(38,2)", "12345678901234567.89", True),
        ("DECIMAL(38,0)", "1.5", False),
        ("BIGINT", "9007199254740993", True),
        ("STRING", '"9007199254740993"', True),
    ],
)
def test_no_number_loses_digits(kind: str, number: str, fits: bool) -> None:
    body = f'{{"d": {number}, "s": "12345678901234567890.12345678901"}}'.encode()
    _, unfit = json_of(f"d {kind}, s STRING, other DOUBLE", b"{}", body, b'{"d": null}')
    assert unfit == ({} if fits else {1: f"{NO_FIT}: d"})


@pytest.mark.parametrize(
    ("numbers", "kind"),
    [
        (["1", "2"], "BIGINT"),
        (["9007199254740993"], "BIGINT"),
        (["1", "1.5"], "DOUBLE"),
        (["9007199254740993", "1.5"], "DECIMAL(38,9)"),
        (["1.5", "9007199254740993"], "DECIMAL(38,9)"),
        (["18446744073709551615"], "DECIMAL(38,0)"),
        (["18446744073709551615", "1"], "DECIMAL(38,0)"),
        (["12345678901234567.89"], "DECIMAL(38,9)"),
        (["1.123456789012345678", "9007199254740993"], "DECIMAL(38,18)"),
        (["9007199254740993", "NaN"], "DOUBLE"),
        (["1e30", "1"], "DOUBLE"),
        (["1e99999999999999999999"], ""),
        (["1" * 40], "DOUBLE"),
    ],
)
def test_what_is_inferred_of_numbers_keeps_their_digits(numbers: list[str], kind: str) -> None:
    bodies = [f'{{"n": {number}}}'.encode() for number in numbers]
    assert columns_text(infer_columns(bodies)) == (f"n {kind}" if kind else "")


def test_members_without_a_column_are_counted() -> None:
    columns = "id BIGINT, o STRUCT<x: INT>, l ARRAY<STRUCT<q: INT>>"
    bodies = [
        b'{"id": 1}',
        b'{"id": 2, "late": 1, "none": null, "o": {"x": 1, "y": 2}}',
        b'\xef\xbb\xbf{"late": {"a": 1}, "l": [{"q": 1, "r": 2}, {"r": 3}, null]}',
        b'{"id": "x", "late": 3}',
        b"no json",
    ]
    decoder, counts = open_decoder(BodyColumns("json", columns)), BodyCounts()
    found = decode_bodies(decoder, pa.array(bodies), parse_columns(columns), counts)
    assert counts.left_out == {"late": 3, "o.y": 1, "l.r": 2}
    assert counts.unfit == {"id": 1}
    assert sorted(found.unfit) == [3, 4]
    many = [json.dumps({f"id-{n}": n}).encode() for n in range(100)]
    counts = BodyCounts()
    decode_bodies(decoder, pa.array([*many, b'{"\\ud800": 1}']), parse_columns(columns), counts)
    assert len(counts.left_out) == 65
    assert counts.left_out["(others)"] == 37


def test_json_behind_a_byte_order_mark_is_json() -> None:
    bodies = [b'\xef\xbb\xbf{"n": 1}', b'{"n": 2}', b'\xef\xbb\xbf {"n": 3}\r\n', b"\xef\xbb\xbf[]"]
    rows, unfit = json_of("n BIGINT", *bodies)
    assert ([row["n"] for row in rows], unfit) == ([1, 2, 3, None], {3: NO_OBJECT})
    assert columns_text(infer_columns(bodies)) == "n BIGINT"


GOOD = st.builds(
    lambda n, s: json.dumps({"n": n, "s": s}).encode(),
    st.none() | st.integers(-(2**63), 2**63 - 1),
    st.none() | st.text(st.characters(exclude_categories=["Cs"])),
)


@given(st.lists(GOOD | st.sampled_from([*NONE, *UNFIT]), min_size=1, max_size=60))
def test_each_body_becomes_the_same_in_any_block(bodies: list[bytes]) -> None:
    rows, unfit = json_of("n BIGINT, s STRING", *bodies)
    for number, body in enumerate(bodies):
        (alone,), why = json_of("n BIGINT, s STRING", body)
        assert rows[number] == alone
        assert unfit.get(number) == why.get(0)
        if not why:
            said = json.loads(body)
            assert (said["n"], said["s"]) == (alone["n"], alone["s"])


def test_blocks_without_end_and_bodies_without_bottom() -> None:
    deep = b'{"n": 1, "x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    bodies = [b'{"n": %d}' % n for n in range(3000)]
    bodies[1500], bodies[2999] = b'{"n": 1.5}', deep
    rows, unfit = json_of("n BIGINT", *bodies)
    assert unfit == {1500: f"{NO_FIT}: n"}
    assert [row["n"] for row in rows[:1500]] == list(range(1500))
    assert rows[2999] == {"n": 1}


def test_a_body_that_is_missing_and_a_decoder_that_counts_wrongly() -> None:
    (column,) = columns = parse_columns("n BIGINT")
    found = decode_bodies(
        open_decoder(BodyColumns("json", "n BIGINT")), pa.array([None], pa.binary()), columns
    )
    assert (found.columns[0].to_pylist(), found.unfit) == ([None], {0: ("there is no body", "")})

    class Wrong:
        def decode(self, bodies: pa.Array) -> list[pa.Array]:
            return [pa.nulls(len(bodies) + 1, column.type)]

    with pytest.raises(InternalError):
        decode_bodies(Wrong(), pa.array([b"x"]), columns)


def test_text() -> None:
    bodies = [b"a", b"", "ü".encode(), b"\xff", b"b\0"]
    columns = body_fields(BodyColumns("text"))
    rows, unfit = decoded(open_decoder(BodyColumns("text")), columns, bodies)
    assert [row["body_text"] for row in rows] == ["a", "", "ü", None, "b\0"]
    assert unfit == {3: "the body is not UTF-8"}


WIDE: dict[str, Any] = {
    "type": "record",
    "name": "Wide",
    "fields": [
        {"name": "u", "type": {"type": "string", "logicalType": "uuid"}},
        {"name": "k", "type": {"type": "enum", "name": "Kind", "symbols": ["A", "B"]}},
        {
            "name": "lines",
            "type": {
                "type": "array",
                "items": {
                    "type": "record",
                    "name": "Line",
                    "fields": [
                        {
                            "name": "price",
                            "type": {
                                "type": "bytes",
                                "logicalType": "decimal",
                                "precision": 8,
                                "scale": 2,
                            },
                        }
                    ],
                },
            },
        },
        {"name": "m", "type": {"type": "map", "values": ["null", "Line"]}},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "f", "type": {"type": "fixed", "name": "F", "size": 2}},
    ],
}


def test_avro_of_every_type() -> None:
    text = json.dumps(WIDE)
    columns = avro_columns(text)
    assert columns_text(columns) == (
        "u STRING, k STRING, lines ARRAY<STRUCT<price: DECIMAL(8,2)>>,"
        " m MAP<STRING, STRUCT<price: DECIMAL(8,2)>>, day DATE, f BINARY"
    )
    line = {"price": Decimal("1.25")}
    value = {
        "u": "x",
        "k": "B",
        "lines": [line],
        "m": {"a": line, "b": None},
        "day": date(2024, 1, 2),
        "f": b"xy",
    }
    rows, unfit = decoded(
        AvroDecoder(text, columns), columns, [avro({**value, "u": "x"}, _plain(WIDE))]
    )
    assert unfit == {}
    assert rows == [{**value, "m": [("a", line), ("b", None)]}]


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    """Without the uuid, so that any text can be written."""
    fields = [{"name": "u", "type": "string"}, *schema["fields"][1:]]
    return {**schema, "fields": fields}


def test_avro_that_does_not_fit_and_headers() -> None:
    text = json.dumps(ORDER_AVSC)
    columns = avro_columns(text)
    good = avro({"id": 5, "note": None, "at": 0})
    mark = fastavro.schema.fingerprint(
        fastavro.schema.to_parsing_canonical_form(ORDER_AVSC), "CRC-64-AVRO"
    )
    header = b"\xc3\x01" + bytes.fromhex(mark)
    bodies = [
        good,
        header + good,
        b"",
        good + b"\0",
        good[:-1],
        b"\xc3\x01" + bytes(8) + good,
        b"\xff" * 12,
    ]
    rows, unfit = decoded(AvroDecoder(text, columns), columns, bodies)
    assert [row["id"] for row in rows] == [5, 5, None, None, None, None, None]
    assert unfit == dict.fromkeys(range(2, 7), NO_OBJECT)
    more = [*columns, pa.field("later", pa.string())]
    rows, unfit = decoded(AvroDecoder(text, more), more, [good])
    assert (rows[0]["later"], unfit) == (None, {})


@given(st.binary(max_size=40))
def test_no_bytes_break_a_decoder(body: bytes) -> None:
    packed = base64.b64encode(descriptors()).decode()
    for decoder, columns in (
        (AvroDecoder(json.dumps(WIDE), _WIDE), _WIDE),
        (ProtoDecoder(packed, ORDER_TYPE, _ORDER), _ORDER),
    ):
        rows, unfit = decoded(decoder, columns, [body])
        assert len(rows) == 1
        assert set(unfit) <= {0}


_WIDE = avro_columns(json.dumps(WIDE))
_ORDER = proto_columns(base64.b64encode(descriptors()).decode(), ORDER_TYPE)


@pytest.mark.parametrize(
    "schema",
    [
        *("{", '"string"', '{"type": "array", "items": "int"}', '{"type": "record", "name": "A"}'),
        '{"type": "record", "name": "A", "fields": [{"name": "a", "type": ["int", "string"]}]}',
        '{"type": "record", "name": "A", "fields": [{"name": "a", "type": ["null", "A"]}]}',
        '{"type": "record", "name": "A", "fields": [{"name": "a", "type": {"type": "array", "items": "null"}}]}',
        '{"type": "record", "name": "A", "fields": [{"name": "a", "type": "int"}, {"name": "A", "type": "int"}]}',
    ],
)
def test_avro_schemas_that_are_refused(schema: str) -> None:
    with pytest.raises(InvalidError):
        avro_columns(schema)


def test_protobuf() -> None:
    packed = base64.b64encode(descriptors()).decode()
    columns = proto_columns(packed, ORDER_TYPE)
    assert columns_text(columns) == (
        "id BIGINT, note STRING, kind STRING, at TIMESTAMP, items ARRAY<STRUCT<sku: STRING>>,"
        " big DECIMAL(20,0), m MAP<STRING, INT>"
    )
    more = [*columns, pa.field("later", pa.string())]
    full = message(
        id=1, note="", kind=1, at=1500, items=["a", "b"], big=2**64 - 1, m={"z": 1, "a": 2}
    )
    rows, unfit = decoded(
        ProtoDecoder(packed, ORDER_TYPE, more), more, [full, b"", full[:-1], message(kind=9)]
    )
    assert unfit == {2: NO_OBJECT}
    assert rows[0] == {
        "id": 1,
        "note": "",
        "kind": "GIFT",
        "at": datetime(1970, 1, 1, 0, 0, 1, 500_000, UTC),
        "items": [{"sku": "a"}, {"sku": "b"}],
        "big": Decimal(2**64 - 1),
        "m": [("a", 2), ("z", 1)],
        "later": None,
    }
    assert rows[1] | {"later": 0} == {
        "id": 0,
        "note": None,
        "kind": "PLAIN",
        "at": None,
        "items": [],
        "big": Decimal(0),
        "m": [],
        "later": 0,
    }
    assert rows[3]["kind"] == "9"
    for definition, name in ((packed, "shop.Nothing"), ("AAAA", ORDER_TYPE), ("", ORDER_TYPE)):
        with pytest.raises(InvalidError):
            proto_columns(definition, name)


@pytest.mark.parametrize(
    ("formats", "schemas", "messages"),
    [
        (["xml"], [], []),
        (["json", "text"], [], []),
        (["avro"], [], []),
        (["protobuf"], ["f"], []),
        ([], ["f"], []),
        (["json"], ["a=f"], []),
        (["json"], [], ["x"]),
        (["json"], ["empty"], []),
        (["json"], ["large"], []),
        (["json"], ["map"], []),
        (["json"], ["bytes"], []),
    ],
)
def test_options_that_make_no_sense(
    formats: list[str], schemas: list[str], messages: list[str]
) -> None:
    files = {
        "empty": b" ",
        "large": b"a INT," * 100_000,
        "map": b"a MAP<STRING, INT>",
        "bytes": b"\xff",
    }
    with pytest.raises(InvalidError):
        read_wishes(
            formats, schemas, messages, has_records=False, read=lambda name: files.get(name, b"{")
        )


def test_a_topic_s_own_wish_goes_before_the_one_for_all() -> None:
    found = read_wishes(
        ["text", "orders=json", "log-*=raw"], [], [], has_records=False, read=io.BytesIO
    )  # type: ignore[arg-type]
    wishes = [found.of(topic) for topic in ("orders", "log-1", "other")]
    assert [wish and wish.format for wish in wishes] == ["json", RAW, "text"]
    assert read_wishes([], [], [], has_records=False, read=io.BytesIO).of("x") is None  # type: ignore[arg-type]
