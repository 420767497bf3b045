"""What bodies of a topic become: columns, as the archive's log fixes them, as people write them, and as documents have them.

That is fixed in the log so that jobs agree, whichever infers first (``tiered.archive.job``).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from dataclasses import astuple, field
from decimal import Context, Decimal
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol

import numpy as np

from backends.lazy_dataclass import dataclass
from tiered.api.arrow import load_pyarrow
from tiered.errors import InternalError, InvalidError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt
    import pyarrow as pa


# -- columns that a file has beside those of every file --------------------------------------------
#
# Which columns files of a topic get beside those that every file has: decoded bodies, and the bytes of stored records.
#
# What bodies of a topic become is fixed in the archive's log, so that jobs agree whichever infers first; see
# ``tiered.archive.job``. Values only, no pyarrow: the planner of a job reads them. All are immutable.

FORMATS = ("json", "avro", "protobuf", "text")
PREFIX = "value_"
"""Of the columns that a body's fields become: no column of ours begins so."""
ERROR = "body_error"
TEXT = "body_text"
RECORD = "record"


def _is_format(name: str) -> None:
    if name not in FORMATS:
        raise ValueError(f"bodies of an unknown format {name!r:.40}")


@dataclass(frozen=True, slots=True)
class BodyColumns:
    """What bodies of a topic become."""

    format: Annotated[str, _is_format]  # one of ``FORMATS``
    columns: str = ""
    """Names and types as ``BodyLayout`` writes them, without ``PREFIX``; empty for text."""
    definition: str = ""
    """For Avro the schema, for Protocol Buffers a descriptor set in base64; else empty."""
    message: str = ""  # for Protocol Buffers the full name of the message; else empty

    def continues(self, old: BodyColumns) -> bool:
        """Whether it has all columns of another in the same order, and perhaps more behind them."""
        more = self.columns == old.columns or self.columns.startswith(f"{old.columns}, ")
        return self.format == old.format and more


def column_names(body: BodyColumns) -> list[str]:
    """Names of a file's columns that bodies become."""
    if body.format == "text":
        return [TEXT]
    return [PREFIX + column.name for column in parse_columns(body.columns)]


@dataclass(frozen=True, slots=True)
class BodyLayout:
    """What files get beside the columns that every file has."""

    body: BodyColumns | None = None  # what bodies become; None when they stay bytes only
    number: int = 0  # which of the topic's it is in the log, from 1; 0 without
    has_records: bool = False  # whether the bytes of each stored record are a column
    is_kafka: bool = False  # whether Kafka's columns are there

    @property
    def marks(self) -> tuple[str, ...]:
        """What a key has to change with; nothing for files without more columns."""
        if self == PLAIN:
            return ()
        raw = repr((self.body and list(astuple(self.body)), self.has_records))
        raw += "kafka" * self.is_kafka
        return (hashlib.sha256(raw.encode("utf-8", "surrogateescape")).hexdigest(),)


PLAIN = BodyLayout()


# -- SQL -------------------------------------------------------------------------------------------
#
# Columns as people write them in SQL: ``order_id BIGINT, amount DECIMAL(12,2), items ARRAY<STRUCT<sku: STRING,
# n: INT>>``.
#
# Spark's words; what the log holds is what ``columns_text`` writes, and what it writes can be read: what stands in the log
# once can never be taken out again. Names that are not plain stand between backticks, ``--`` outside of them begins a
# comment. Every column may be null.

_SIMPLE: Final[Mapping[str, str]] = {
    "BOOLEAN": "bool_",
    "TINYINT": "int8",
    "SMALLINT": "int16",
    "INT": "int32",
    "BIGINT": "int64",
    "FLOAT": "float32",
    "DOUBLE": "float64",
    "STRING": "string",
    "BINARY": "binary",
    "DATE": "date32",
}
_ALSO: Final[Mapping[str, str]] = {
    "BOOL": "BOOLEAN",
    "BYTE": "TINYINT",
    "SHORT": "SMALLINT",
    "INTEGER": "INT",
    "LONG": "BIGINT",
    "REAL": "FLOAT",
    "TEXT": "STRING",
    "VARCHAR": "STRING",
}
_COMMENT = "--"
_TOKEN = re.compile(rf"\s*({_COMMENT}[^\n]*|`(?:[^`]|``)+`|[^\W\d][\w$]*|\d+|[<>(),:])", re.UNICODE)
_PLAIN = re.compile(r"[^\W\d][\w$]*", re.UNICODE)
_DEPTH_MAX = 32
_DECIMAL_DIGITS = 38


def parse_columns(text: str) -> list[pa.Field]:
    """Names and types.

    Raises:
        InvalidError: It cannot be read, or two names are the same, upper and lower case aside.
    """
    reader = _Reader(_tokens(text))
    columns = reader.columns("") if reader.tokens else []
    if reader.at < len(reader.tokens):
        raise _wrong(f"{reader.tokens[reader.at]!r} was not expected")
    return columns


def columns_text(columns: Sequence[pa.Field]) -> str:
    """Undo ``parse_columns``, always in the same words."""
    return ", ".join(f"{_quoted(column.name)} {type_text(column.type)}" for column in columns)


def type_text(kind: Any) -> str:  # noqa: ANN401 (pyarrow has no types)
    """A type's name.

    Raises:
        InvalidError: There is none for it, or a name in it is none.
    """
    arrow = load_pyarrow()
    for name, maker in _SIMPLE.items():
        if kind == getattr(arrow, maker)():
            return name
    types = arrow.types
    if types.is_timestamp(kind):
        return "TIMESTAMP"
    if types.is_decimal(kind):
        return f"DECIMAL({kind.precision},{kind.scale})"
    if types.is_map(kind):
        return f"MAP<{type_text(kind.key_type)}, {type_text(kind.item_type)}>"
    if types.is_list(kind):
        return f"ARRAY<{type_text(kind.value_type)}>"
    if types.is_struct(kind):
        inner = (f"{_quoted(field.name)}: {type_text(field.type)}" for field in kind)
        return f"STRUCT<{', '.join(inner)}>"
    raise InvalidError(f"a column of type {kind} is not supported")


def is_name(name: str) -> bool:
    """Whether a column can have a name: where readers are programs in C, it would end at a byte 0."""
    try:
        raw = name.encode()
    except UnicodeEncodeError:  # half of a pair of surrogates, as JSON can say it
        return False
    return bool(raw) and 0 not in raw


def require_distinct(names: Sequence[str]) -> None:
    """See that no reader takes two columns for one."""
    seen: set[str] = set()
    for name in names:
        if name.lower() in seen:
            raise InvalidError(f"two columns of bodies have the name {name!r:.80}")
        seen.add(name.lower())


def _tokens(text: str) -> list[str]:
    found, at, text = [], 0, text.strip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise _wrong(f"{text[at : at + 20]!r} cannot be read")
        if not match[1].startswith(_COMMENT):
            found.append(match[1])
        at = match.end()
    return found


@dataclass
class _Reader:
    tokens: list[str]
    at: int = 0
    depth: int = 0

    def columns(self, end: str) -> list[pa.Field]:
        found = []
        while True:
            name = self.name()
            if self.peek() == ":":
                self.at += 1
            found.append(load_pyarrow().field(name, self.type()))
            if self.peek() != ",":
                break
            self.at += 1
            if not end and self.at == len(self.tokens):
                break  # a comma at the end of a file
        require_distinct([field.name for field in found])
        return found

    def name(self) -> str:
        token = self.take()
        if token.startswith("`"):
            return token[1:-1].replace("``", "`")
        if not _PLAIN.fullmatch(token):
            raise _wrong(f"{token!r} is not a name")
        return token

    def type(self) -> Any:  # noqa: ANN401
        arrow = load_pyarrow()
        self.depth += 1
        if self.depth > _DEPTH_MAX:
            raise _wrong("types are nested too deeply")
        word = self.take().upper()
        word = _ALSO.get(word, word)
        if word in _SIMPLE:
            found = getattr(arrow, _SIMPLE[word])()
        elif word == "TIMESTAMP":
            found = arrow.timestamp("us", "UTC")
        elif word == "DECIMAL":
            found = self.decimal()
        else:
            found = self.nested(word)
        self.depth -= 1
        return found

    def decimal(self) -> Any:  # noqa: ANN401
        digits, scale = 10, 0
        if self.peek() == "(":
            self.expect("(")
            digits = self.number()
            if self.peek() == ",":
                self.expect(",")
                scale = self.number()
            self.expect(")")
        if not (0 < digits <= _DECIMAL_DIGITS and scale <= digits):
            raise _wrong(f"DECIMAL({digits},{scale}) is none")
        return load_pyarrow().decimal128(digits, scale)

    def nested(self, word: str) -> Any:  # noqa: ANN401
        arrow = load_pyarrow()
        if word not in {"ARRAY", "MAP", "STRUCT"}:
            raise _wrong(f"{word!r} is not a type")
        self.expect("<")
        if word == "ARRAY":
            found = arrow.list_(self.type())
        elif word == "STRUCT":
            found = arrow.struct(self.columns(">"))
        else:
            key = self.type()
            self.expect(",")
            found = arrow.map_(key, self.type())
        self.expect(">")
        return found

    def number(self) -> int:
        token = self.take()
        if not token.isdecimal():
            raise _wrong(f"{token!r} is not a number")
        return int(token)

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self) -> str:
        token = self.peek()
        if not token:
            raise _wrong("it ends too early")
        self.at += 1
        return token

    def expect(self, wanted: str) -> None:
        if self.take() != wanted:
            raise _wrong(
                f"{wanted!r} is missing before {' '.join(self.tokens[self.at - 1 :][:3])!r}"
            )


def _quoted(name: str) -> str:
    if not is_name(name):
        raise InvalidError(f"no column can have the name {name!r:.80}")
    return name if _PLAIN.fullmatch(name) else "`" + name.replace("`", "``") + "`"


def _wrong(what: str) -> InvalidError:
    return InvalidError(
        f"columns of bodies cannot be read: {what}",
        do="write them as order_id BIGINT, amount DECIMAL(12,2), items ARRAY<STRUCT<sku: STRING>>",
    )


# -- JSON Schema -----------------------------------------------------------------------------------
#
# Columns from a JSON Schema, as far as it says types; what else it demands of a document is not looked at.


def columns_of_schema(document: Any) -> list[pa.Field]:  # noqa: ANN401 (JSON values)
    """The columns of an object.

    Raises:
        InvalidError: It is not a schema of an object, or says something that no column can be.
    """
    if not isinstance(document, dict) or not isinstance(document.get("properties"), dict):
        raise InvalidError("this JSON Schema is not of an object with properties")
    return _schema_fields(document, document, 0)


def _schema_fields(schema: Any, root: Any, depth: int) -> list[pa.Field]:  # noqa: ANN401
    properties = schema["properties"]
    for name in properties:
        if not is_name(name):
            raise _wrong_schema(name)
    require_distinct(list(properties))
    arrow = load_pyarrow()
    return [
        arrow.field(name, _schema_type(name, one, root, depth)) for name, one in properties.items()
    ]


def _schema_type(name: str, schema: Any, root: Any, depth: int) -> Any:  # noqa: ANN401
    arrow, schema = load_pyarrow(), _resolved(schema, root)
    if depth > _DEPTH_MAX or not isinstance(schema, dict):
        raise _wrong_schema(name)
    kind = schema.get("type")
    if isinstance(kind, list):
        rest = [one for one in kind if one != "null"]
        kind = "number" if set(rest) == {"integer", "number"} else rest[0] if len(rest) == 1 else ""
    match kind:
        case "integer":
            return arrow.int64()
        case "number":
            return arrow.float64()
        case "boolean":
            return arrow.bool_()
        case "string":
            return _text(schema.get("format"))
        case "array" if "items" in schema:
            return arrow.list_(_schema_type(name, schema["items"], root, depth + 1))
        case "object" if isinstance(schema.get("properties"), dict):
            return arrow.struct(_schema_fields(schema, root, depth + 1))
    raise _wrong_schema(name)


def _text(form: Any) -> Any:  # noqa: ANN401
    arrow = load_pyarrow()
    if form == "date-time":
        return arrow.timestamp("us", "UTC")
    return arrow.date32() if form == "date" else arrow.string()


def _resolved(schema: Any, root: Any) -> Any:  # noqa: ANN401
    """What a reference within the document means."""
    if not isinstance(schema, dict) or "$ref" not in schema:
        return schema
    found, path = root, str(schema["$ref"])
    for step in path.removeprefix("#/").split("/"):
        found = found.get(step) if isinstance(found, dict) else None
    return found


def _wrong_schema(name: str) -> InvalidError:
    return InvalidError(
        f"the JSON Schema's property {name!r:.80} can be no column",
        do="give each property one type; objects have properties, arrays have items",
    )


# -- from documents --------------------------------------------------------------------------------
#
# Columns from some JSON documents: the first ones of a topic say what all of it becomes. Pure.
#
# A field that is an integer here and a fraction there is a DOUBLE, as long as that keeps all digits: else it is a
# DECIMAL. Of a field whose values do not go together otherwise the first one's type holds, and documents with the
# other do not fit. Fields that are never more than null are left out.
#
# Nothing that a producer sends ends this. Left out are, too, a field that no column can be called like, or only at length,
# and one that readers would take for another before it: since the names differ by upper and lower case only, or since
# both have the same path, as ``a.b`` and the ``b`` in ``a`` (Iceberg refuses a table with both).

FIELDS_MAX = 512
"""Columns at most, in all depths: who uses ids as names does not get a column for each."""
_NAME_CHARS_MAX = 256
"""Of a name: all of them stand in the log and in each file."""
_SEEN_DEPTH_MAX = 16
_SEEN_TYPES = {"bool": "bool_", "text": "string"}
_INT64 = range(-(1 << 63), 1 << 63)
_SCALE_LEAST = 9
"""Digits behind the point where integers that no DOUBLE has stand beside fractions."""
BOM = b"\xef\xbb\xbf"
"""What some programs begin a text with. It says nothing, and JSON behind it is JSON."""


def keeps_digits(text: str) -> bool:
    """Whether a number that is written so is a DOUBLE with all its digits: written as long, it is the same again."""
    try:
        given = Decimal(text)
    except ArithmeticError:
        return False
    if not given.is_finite():
        return True
    value, digits = float(text), len(given.normalize(_DIGITS).as_tuple().digits)
    return math.isfinite(value) and Decimal(f"{value:.{digits - 1}e}") == given


_DIGITS = Context(prec=10_000)


def infer_columns(bodies: Iterable[bytes]) -> list[pa.Field]:
    """The columns that documents have together; bodies that are no JSON object in UTF-8 are passed over."""
    root, places = _Seen("", "object"), _Places()
    for body in bodies:
        try:
            document = json.loads(body.removeprefix(BOM).decode(), parse_float=Decimal)
        except (ValueError, RecursionError, ArithmeticError):  # an exponent of twenty digits
            continue
        if isinstance(document, dict):
            _see_object(root, document, places, 0)
    return _seen_fields(root)


@dataclass
class _Places:
    paths: set[str] = field(default_factory=set)
    """Of fields and of elements of arrays, as Iceberg has them, in lower case."""
    left: int = FIELDS_MAX  # so many fields

    def field(self, above: _Seen, name: str) -> _Seen | None:
        """A new field; None: there can be none."""
        if not self.left or len(name) > _NAME_CHARS_MAX or not is_name(name):
            return None
        found = self.take(f"{above.path}{name.lower()}.")
        self.left -= found is not None
        return found

    def take(self, path: str) -> _Seen | None:
        """A new place; None: there is one with this path."""
        if path in self.paths:
            return None
        self.paths.add(path)
        return _Seen(path)


@dataclass(slots=True)
class _Numbers:
    """What numbers of a place have been so far."""

    is_whole: bool = True  # all are integers
    is_small: bool = True  # all integers are of 64 bits
    is_double: bool = True  # all are of DOUBLE with all their digits
    is_decimal: bool = True  # none is of no DECIMAL (NaN)
    whole: int = 0  # digits before the point, at most
    scale: int = 0  # digits behind it

    def add(self, value: float | Decimal) -> None:
        exact = Decimal(value)
        if not exact.is_finite():
            self.is_whole = self.is_decimal = False
            return
        _, digits, exponent = exact.as_tuple()
        assert isinstance(exponent, int)
        self.is_whole &= isinstance(value, int)
        self.is_small &= value in _INT64 if isinstance(value, int) else True
        self.is_double &= keeps_digits(str(value))
        self.whole = max(self.whole, len(digits) + exponent)
        self.scale = max(self.scale, -exponent)

    def type(self) -> Any:  # noqa: ANN401 (pyarrow has no types)
        """Of a column that keeps all digits, if there is one."""
        arrow = load_pyarrow()
        if self.is_whole and self.is_small:
            return arrow.int64()
        scale = 0 if self.is_whole else max(self.scale, _SCALE_LEAST)
        fits = self.is_decimal and self.whole + scale <= _DECIMAL_DIGITS
        if fits and (self.is_whole or not self.is_double):
            return arrow.decimal128(_DECIMAL_DIGITS, scale)
        return arrow.float64()


@dataclass
class _Seen:
    path: str  # names from the outermost field on, a dot behind each
    kind: str = ""  # of values; empty as long as there was none
    fields: dict[str, _Seen] = field(default_factory=dict)  # of an object
    inner: _Seen | None = None  # elements of an array
    numbers: _Numbers = field(default_factory=_Numbers)  # what is known of values that are numbers


def _see_object(seen: _Seen, document: dict[str, Any], places: _Places, depth: int) -> None:
    for name, value in document.items():
        known = seen.fields.get(name)
        if known is None and value is not None:
            known = places.field(seen, name)
        if known is not None:
            seen.fields[name] = known
            _see(known, value, places, depth + 1)


def _see(seen: _Seen, value: Any, places: _Places, depth: int) -> None:  # noqa: ANN401
    kind = _kind(value)
    if not kind or depth > _SEEN_DEPTH_MAX:
        return
    seen.kind = seen.kind or kind
    if kind != seen.kind:
        return
    if kind == "number":
        seen.numbers.add(value)
    elif kind == "object":
        _see_object(seen, value, places, depth)
    elif kind == "array":
        seen.inner = inner = seen.inner or places.take(f"{seen.path}element.")
        if inner is not None:
            for one in value:
                _see(inner, one, places, depth + 1)


def _kind(value: Any) -> str:  # noqa: ANN401
    match value:
        case bool():
            return "bool"
        case int() | float() | Decimal():
            return "number"
        case str():
            return "text"
        case dict():
            return "object"
        case list():
            return "array"
        case _:
            return ""


def _seen_fields(seen: _Seen) -> list[pa.Field]:
    arrow = load_pyarrow()
    typed = ((name, _seen_type(one)) for name, one in seen.fields.items())
    return [arrow.field(name, kind) for name, kind in typed if kind is not None]


def _seen_type(seen: _Seen) -> Any:  # noqa: ANN401 (pyarrow has no types)
    """None where nothing is known that a column could be of."""
    arrow = load_pyarrow()
    match seen.kind:
        case "object":
            inner = _seen_fields(seen)
            return arrow.struct(inner) if inner else None
        case "array":
            element = _seen_type(seen.inner) if seen.inner else None
            return None if element is None else arrow.list_(element)
        case "":
            return None
        case "number":
            return seen.numbers.type()
        case kind:
            return getattr(arrow, _SEEN_TYPES[kind])()


# --------------------------------------------------------------------------------------------------
# Bodies to columns, a block of messages at a time, whatever their format. What does not fit is set apart and counted.
#
# A block that does not decode is divided where its decoder says that it broke, else halved, until what does not fit is
# alone, and the others are none the worse. What is alone is decoded a column at a time, so that only the member is
# null that does not fit. One semantics: a message becomes the same whatever block it is in.
# --------------------------------------------------------------------------------------------------


BLOCK_ROWS = 1024
"""What one bad body can make be done again."""
_FEW_ROWS = 16
"""Of so few each is tried alone: halving goes over them as often."""
NO_OBJECT = "the body is not of the topic's format"
NO_FIT = "the body does not fit the topic's columns"


class UnfitError(Exception):
    """A block holds something that does not fit."""

    def __init__(self, what: str, details: str = "", at: int = -1) -> None:
        super().__init__(f"{what}: {details}" if details else what)
        self.what = what  # in few words that no library's version changes
        self.details = details  # whatever else is known
        self.at = at  # which row, if known; a guess is harmless


class Decoder(Protocol):
    """Decodes bodies of one format. For any thread."""

    @property
    def strict(self) -> Decoder | None:
        """The same, but what a body has and no column is of does not fit; None where there is no such thing."""
        ...

    def only(self, number: int) -> Decoder:
        """What decodes one of the columns."""
        ...

    def left_out(self, body: bytes) -> Iterable[str]:
        """Members of a body that no column is of, each as often as it has a value."""
        ...

    def decode(self, bodies: pa.Array) -> list[pa.Array]:
        """All of a block, a column for each of the layout's.

        Args:
            bodies: Binary, without nulls; at least one.
        """
        ...


@dataclass(slots=True)
class Decoded:
    """What bodies became."""

    columns: list[pa.Array]  # null where a body, or a member of it, did not fit
    unfit: dict[int, tuple[str, str]] = field(default_factory=dict)
    """By row, why it did not fit: the plain words, and the details."""


NAMES_MAX = 64
"""Members that are counted by name, of one kind; who uses ids as names gets no count for each."""
OTHERS = "(others)"
_SHOWN = 8


@dataclass(slots=True)
class BodyCounts:
    """What of bodies is in no column of theirs. One thread."""

    left_out: Counter[str] = field(default_factory=Counter)
    """By member that no column is of: how many values there were, null aside."""
    unfit: Counter[str] = field(default_factory=Counter)
    """By member: in how many rows it did not fit its column."""

    def leave_out(self, names: Iterable[str]) -> None:
        """Members of a body."""
        for name in names:
            _count(self.left_out, name)

    def misfit(self, name: str) -> None:
        """A row's."""
        _count(self.unfit, name)


def _count(counts: Counter[str], name: str) -> None:
    is_sound = len(name) <= _NAME_CHARS_MAX and is_name(name)
    is_known = name in counts or (is_sound and len(counts) < NAMES_MAX)
    counts[name if is_known else OTHERS] += 1


def decode_bodies(
    decoder: Decoder,
    bodies: pa.Array,
    columns: list[pa.Field],
    counts: BodyCounts | None = None,
) -> Decoded:
    """Decode what can be. Of a body that does not fit only the members are null that do not.

    Args:
        bodies: Binary; null is what does not fit.
        counts: What is in no column is added to it; None: it is not looked for.
    """
    work = _DecodeWork(decoder, bodies, counts or BodyCounts(), is_counting=counts is not None)
    work.take_all(np.flatnonzero(bodies.is_valid().to_numpy(zero_copy_only=False)))
    for row in np.flatnonzero(bodies.is_null().to_numpy(zero_copy_only=False)).tolist():
        work.unfit[row] = ("there is no body", "")
    found = Decoded(work.columns(columns), work.unfit)
    if work.partly:
        _decode_members(decoder, bodies, columns, found, work)
    return found


def _decode_members(
    decoder: Decoder,
    bodies: pa.Array,
    columns: list[pa.Field],
    found: Decoded,
    work: _DecodeWork,
) -> None:
    """Decode bodies that do not fit as a whole, a column at a time."""
    arrow, count = load_pyarrow(), len(bodies)
    rows = sorted(work.partly)
    some, where = bodies.take(arrow.array(rows, arrow.int64())), np.arange(count)
    where[rows] = np.arange(count, count + len(rows))
    wrong: dict[int, list[tuple[str, str]]] = {row: [] for row in rows}
    for number, column in enumerate(columns):
        one = _DecodeWork(decoder.only(number), some, BodyCounts())
        one.take_all(np.arange(len(rows)))
        for at in sorted({*one.unfit, *one.partly}):
            _, details = one.unfit.get(at) or one.partly[at]
            wrong[rows[at]].append((column.name.removeprefix(PREFIX), details))
        (values,) = one.columns([column])
        whole = arrow.concat_arrays([found.columns[number], values])
        found.columns[number] = whole.take(arrow.array(where))
    for row, members in wrong.items():
        found.unfit[row] = _misfit(work.partly[row], members)
        for name, _ in members:
            work.counts.misfit(name)


def _misfit(whole: tuple[str, str], members: list[tuple[str, str]]) -> tuple[str, str]:
    if not members:
        return whole
    names = [name for name, _ in members]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    details = "; ".join(dict.fromkeys(details for _, details in members[:_SHOWN] if details))
    return f"{whole[0]}: {', '.join(names[:_SHOWN])}{more}", details


@dataclass(slots=True)
class _DecodeWork:
    decoder: Decoder
    bodies: Any  # all of them
    counts: BodyCounts  # see ``decode_bodies``
    is_counting: bool = False  # members without a column are looked for
    unfit: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Rows of which there is nothing, and why."""
    partly: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Rows that do not fit as a whole; of their members some may."""
    is_strict: bool = True  # no body so far had a member without a column
    _row_ranges: list[list[Any]] = field(default_factory=list)
    _rows: list[npt.NDArray[np.int64]] = field(default_factory=list)

    def take_all(self, rows: npt.NDArray[np.int64]) -> None:
        """Decode rows that ascend, in blocks."""
        for start in range(0, len(rows), BLOCK_ROWS):
            self.take(rows[start : start + BLOCK_ROWS])

    def take(self, rows: npt.NDArray[np.int64]) -> None:
        """Decode rows that ascend."""
        waiting = [rows]
        while waiting:
            some = waiting.pop()
            if not len(some):
                continue
            try:
                self._keep(some, self._decoded(self._block(some)))
            except UnfitError as error:
                if len(some) > 1:
                    waiting += reversed(_divided(some, error.at))
                    continue
                kept = self.partly if error.what == NO_FIT else self.unfit
                kept[int(some[0])] = (error.what, error.details)
                if error.what == NO_FIT:
                    self._count(self._block(some))

    def _decoded(self, block: pa.Array) -> list[pa.Array]:
        strict = self.decoder.strict if self.is_counting and self.is_strict else None
        if strict is not None:
            try:
                return strict.decode(block)
            except UnfitError:
                self.is_strict = False
        found = self.decoder.decode(block)
        self._count(block)
        return found

    def _count(self, block: pa.Array) -> None:
        if self.is_counting and self.decoder.strict is not None:
            for body in block.to_pylist():
                self.counts.leave_out(self.decoder.left_out(body))

    def _block(self, rows: npt.NDArray[np.int64]) -> Any:  # noqa: ANN401 (pyarrow has no types)
        first, count = int(rows[0]), len(rows)
        if int(rows[-1]) - first == count - 1:
            return self.bodies.slice(first, count)
        return self.bodies.take(load_pyarrow().array(rows))

    def _keep(self, rows: npt.NDArray[np.int64], columns: list[Any]) -> None:
        if any(len(column) != len(rows) for column in columns):
            raise InternalError("a decoder of bodies gave another number of rows than it was given")
        self._row_ranges.append(columns)
        self._rows.append(rows)

    def columns(self, wanted: list[pa.Field]) -> list[pa.Array]:
        """All rows in order; null where one did not fit."""
        arrow, count = load_pyarrow(), len(self.bodies)
        if not self._row_ranges:
            return [arrow.nulls(count, column.type) for column in wanted]
        whole = [
            arrow.concat_arrays([row_range[number] for row_range in self._row_ranges])
            for number in range(len(wanted))
        ]
        rows = np.concatenate(self._rows)
        if len(rows) == count and (np.diff(rows) == 1).all():
            return whole
        where = np.full(count, -1)
        where[rows] = np.arange(len(rows))
        places = arrow.array(where, mask=where < 0)
        return [column.take(places) for column in whole]


def _divided(rows: npt.NDArray[np.int64], at: int) -> list[npt.NDArray[np.int64]]:
    if 0 <= at < len(rows):
        return [rows[:at], rows[at : at + 1], rows[at + 1 :]]
    if len(rows) <= _FEW_ROWS:
        return list(np.split(rows, len(rows)))
    middle = len(rows) // 2
    return [rows[:middle], rows[middle:]]
