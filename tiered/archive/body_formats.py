"""Bodies of messages to columns: what is wished, and what decodes Avro, Protocol Buffers and texts."""

from __future__ import annotations

import base64
import io
import json
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from backends.lazy_dataclass import dataclass
from tiered.api.arrow import load_library, load_pyarrow
from tiered.archive.bodies import (
    BOM,
    FORMATS,
    NO_FIT,
    NO_OBJECT,
    PREFIX,
    TEXT,
    BodyColumns,
    UnfitError,
    columns_of_schema,
    columns_text,
    keeps_digits,
    parse_columns,
    require_distinct,
)
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy.typing as npt
    import pyarrow as pa

    from tiered.archive.bodies import Decoder


# -- Avro ------------------------------------------------------------------------------------------
#
# Avro bodies: one datum of a record each, bare or behind the header of a single object (``C3 01`` and a fingerprint).
#
# The fields of the record are the columns. Nullable is what has a union with null; another union is refused beforehand, as
# is what no column can be. Uuids and enumerations are texts.
#
# The schema is that of the writer: Avro's bytes do not say what they are. Where there is a header it is held against it.

_MARK = b"\xc3\x01"
_HEADER_BYTES = 10
_AVRO_SIMPLE: Final[Mapping[str, str]] = {
    "boolean": "bool_",
    "int": "int32",
    "long": "int64",
    "float": "float32",
    "double": "float64",
    "string": "string",
    "bytes": "binary",
    "fixed": "binary",
    "enum": "string",
}
_BROKEN = (
    *(EOFError, ValueError, LookupError, TypeError, ArithmeticError),
    *(struct.error, StopIteration, AttributeError, RecursionError),
)
"""What fastavro raises on bytes that are something else."""


def load_fastavro() -> Any:  # noqa: ANN401 (a foreign module)
    """The module."""
    return load_library("fastavro", "Avro bodies need fastavro", "bodies")


def avro_columns(definition: str) -> list[pa.Field]:
    """The columns of a schema (the text of an ``.avsc`` file).

    Raises:
        InvalidError: It is not a schema of a record, or something of it can be no column.
    """
    schema = _avro_schema(definition)
    names = [field["name"] for field in schema["fields"]]
    require_distinct(names)
    known: dict[str, Any] = {}
    return list(_avro_type(schema, known, frozenset(), "the record"))


class _ByBody:
    """Decodes one body after another; all that a definition has are columns."""

    strict = None
    _columns: list[pa.Field]

    def left_out(self, body: bytes) -> Iterable[str]:  # noqa: ARG002 (what it does not know has no name)
        return ()

    def decode(self, bodies: pa.Array) -> list[pa.Array]:
        arrow = load_pyarrow()
        rows = [self._values(at, body) for at, body in enumerate(bodies.to_pylist())]
        try:
            return [
                arrow.array([row[number] for row in rows], column.type)
                for number, column in enumerate(self._columns)
            ]
        except (arrow.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise UnfitError(NO_FIT, str(error)) from None

    def _values(self, at: int, body: bytes) -> list[Any]:
        raise NotImplementedError


class AvroDecoder(_ByBody):
    """Decodes Avro records by one schema."""

    def __init__(self, definition: str, columns: Sequence[pa.Field]) -> None:
        """Take the writer's schema, and the columns, some of which it may not have."""
        fastavro = load_fastavro()
        self._schema = _avro_schema(definition)
        self._read = fastavro.schemaless_reader
        canonical = fastavro.schema.to_parsing_canonical_form(_raw(definition))
        fingerprint = fastavro.schema.fingerprint(canonical, "CRC-64-AVRO")
        self._header = _MARK + bytes.fromhex(fingerprint)
        self._columns = list(columns)
        self._definition = definition

    def only(self, number: int) -> AvroDecoder:
        return AvroDecoder(self._definition, [self._columns[number]])

    def _values(self, at: int, body: bytes) -> list[Any]:
        file = io.BytesIO(body)
        if body.startswith(_MARK) and len(body) >= _HEADER_BYTES:
            if body.startswith(self._header):
                file.seek(_HEADER_BYTES)
            elif not self._is_bare(body):
                raise UnfitError(NO_OBJECT, "its header is of another schema", at)
        try:
            found: dict[str, Any] = self._read(file, self._schema, None)
        except _BROKEN as error:
            raise UnfitError(NO_OBJECT, f"{type(error).__name__}: {error}"[:200], at) from None
        if file.tell() != len(body):
            raise UnfitError(NO_OBJECT, f"{len(body) - file.tell()} bytes are left over", at)
        return [found.get(column.name) for column in self._columns]

    def _is_bare(self, body: bytes) -> bool:
        """Whether what looks like a header is a datum's first bytes."""
        file = io.BytesIO(body)
        try:
            self._read(file, self._schema, None)
        except _BROKEN:
            return False
        return file.tell() == len(body)


def _raw(definition: str) -> Any:  # noqa: ANN401 (JSON values)
    try:
        return json.loads(definition)
    except (ValueError, RecursionError) as error:
        raise InvalidError(f"the Avro schema is not JSON: {error}") from None


def _avro_schema(definition: str) -> Any:  # noqa: ANN401
    """A schema as fastavro wants it, without logical types that Arrow has no values for."""
    fastavro, raw = load_fastavro(), _raw(definition)
    try:
        found = fastavro.parse_schema(_plain(raw))
    except (*_BROKEN, fastavro.schema.SchemaParseException) as error:
        raise InvalidError(f"this is not Avro schema: {error}") from None
    if not isinstance(found, dict) or found.get("type") != "record":
        raise InvalidError("this Avro schema is not of a record")
    return found


def _plain(schema: Any) -> Any:  # noqa: ANN401
    if isinstance(schema, list):
        return [_plain(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {"decimal", "date", "timestamp-millis", "timestamp-micros"}
    return {
        name: _plain(value)
        for name, value in schema.items()
        if name != "logicalType" or value in kept
    }


def _avro_type(schema: Any, known: dict[str, Any], above: frozenset[str], name: str) -> Any:  # noqa: ANN401
    arrow = load_pyarrow()
    if isinstance(schema, list):
        rest = [one for one in schema if one != "null"]
        if len(rest) != 1:
            raise _no_column(name, "a union of several types")
        return _avro_type(rest[0], known, above, name)
    if isinstance(schema, str):
        if schema in _AVRO_SIMPLE:
            return getattr(arrow, _AVRO_SIMPLE[schema])()
        if schema in above or schema not in known:
            raise _no_column(name, "a type within itself" if schema in above else schema)
        return _avro_type(known[schema], known, above, name)
    if "name" in schema:
        known[schema["name"]] = schema
    if "logicalType" in schema:
        return _logical(schema)
    match schema["type"]:
        case "record":
            if not schema["fields"] or schema["name"] in above:
                raise _no_column(name, "a record without fields, or within itself")
            inner = above | {schema["name"]}
            return arrow.struct(
                [
                    arrow.field(one["name"], _avro_type(one["type"], known, inner, one["name"]))
                    for one in schema["fields"]
                ]
            )
        case "array":
            return arrow.list_(_avro_type(schema["items"], known, above, name))
        case "map":
            return arrow.map_(arrow.string(), _avro_type(schema["values"], known, above, name))
        case plain if plain in _AVRO_SIMPLE:
            if schema.get("size") == 0:
                raise _no_column(name, "of no size")
            return getattr(arrow, _AVRO_SIMPLE[plain])()
        case other:
            raise _no_column(name, str(other))


def _logical(schema: Any) -> Any:  # noqa: ANN401
    arrow = load_pyarrow()
    match schema["logicalType"]:
        case "decimal":
            return arrow.decimal128(schema["precision"], schema.get("scale", 0))
        case "date":
            return arrow.date32()
        case _:
            return arrow.timestamp("us", "UTC")


def _no_column(name: str, what: str) -> InvalidError:
    return InvalidError(f"the Avro field {name!r:.80} can be no column: it is {what}")


# -- Protocol Buffers ------------------------------------------------------------------------------
#
# Bodies of Protocol Buffers: one message each, its fields the columns. What type it is a descriptor set says.
#
#     protoc --include_imports --descriptor_set_out=orders.desc orders.proto
#
# Fields that know whether they are there (messages, ``optional``, members of a ``oneof``) are null when they are not; others
# are their default then, as in every language. Enumerations are the names of their values, or the number of one that the
# descriptor does not know. ``google.protobuf.Timestamp`` is a time, the wrapper types are their value or null. Fields that
# no column is of are passed over.

Get = Callable[[Any], Any]
_TIMESTAMP = "google.protobuf.Timestamp"
_WRAPPERS: Final = frozenset(
    f"google.protobuf.{name}Value"
    for name in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
)
_PROTO_SIMPLE: Final[Mapping[str, str]] = {
    "TYPE_DOUBLE": "float64",
    "TYPE_FLOAT": "float32",
    "TYPE_INT64": "int64",
    "TYPE_SINT64": "int64",
    "TYPE_SFIXED64": "int64",
    "TYPE_INT32": "int32",
    "TYPE_SINT32": "int32",
    "TYPE_SFIXED32": "int32",
    "TYPE_UINT32": "int64",
    "TYPE_FIXED32": "int64",
    "TYPE_BOOL": "bool_",
    "TYPE_STRING": "string",
    "TYPE_BYTES": "binary",
    "TYPE_ENUM": "string",
}


def proto_columns(definition: str, message: str) -> list[pa.Field]:
    """The columns of a message.

    Raises:
        InvalidError: There is no such message, or something of it can be no column.
    """
    fields = _descriptor(definition, message).fields
    require_distinct([field.name for field in fields])
    if not fields:
        raise InvalidError(f"the message {message} has no fields")
    return [load_pyarrow().field(field.name, _proto_type(field, (message,))) for field in fields]


class ProtoDecoder(_ByBody):
    """Decodes Protocol Buffers of one message type."""

    def __init__(self, definition: str, message: str, columns: Sequence[pa.Field]) -> None:
        """Take the message, and the columns, some of which it may not have."""
        from google.protobuf import message_factory  # type: ignore[import-untyped] # noqa: PLC0415

        descriptor = _descriptor(definition, message)
        self._parse = message_factory.GetMessageClass(descriptor).FromString
        self._columns = list(columns)
        self._definition, self._message = definition, message
        known = descriptor.fields_by_name
        self._gets = [
            _getter(known[one.name]) if one.name in known else lambda _message: None
            for one in columns
        ]

    def only(self, number: int) -> ProtoDecoder:
        return ProtoDecoder(self._definition, self._message, [self._columns[number]])

    def _values(self, at: int, body: bytes) -> list[Any]:
        from google.protobuf.message import (  # type: ignore[import-untyped] # noqa: PLC0415
            DecodeError,
        )

        try:
            found = self._parse(body)
        except (DecodeError, ValueError, RecursionError) as error:
            raise UnfitError(NO_OBJECT, f"{type(error).__name__}: {error}"[:200], at) from None
        return [get(found) for get in self._gets]


def _descriptor(definition: str, message: str) -> Any:  # noqa: ANN401 (protobuf has no types)
    needs = "bodies of Protocol Buffers need protobuf"
    descriptor_pb2 = load_library("google.protobuf.descriptor_pb2", needs, "bodies")
    from google.protobuf import descriptor_pool  # noqa: PLC0415
    from google.protobuf.message import DecodeError  # noqa: PLC0415

    pool = descriptor_pool.DescriptorPool()
    try:
        files = descriptor_pb2.FileDescriptorSet.FromString(base64.b64decode(definition))
        for file in files.file:
            pool.Add(file)
        return pool.FindMessageTypeByName(message)
    except (DecodeError, TypeError, ValueError) as error:
        raise InvalidError(
            f"this is not a descriptor set with all that it needs: {error}",
            do="make it by protoc --include_imports --descriptor_set_out=FILE",
        ) from None
    except KeyError:
        raise InvalidError(
            f"the descriptor set has no message {message!r:.80}",
            do="name it in full, with its package",
        ) from None


def _proto_type(field: Any, above: tuple[str, ...]) -> Any:  # noqa: ANN401
    arrow = load_pyarrow()
    if _is_map(field):
        key, value = field.message_type.fields
        return arrow.map_(_type_of_one(key, above), _type_of_one(value, above))
    kind = _type_of_one(field, above)
    return arrow.list_(kind) if field.is_repeated else kind


def _type_of_one(field: Any, above: tuple[str, ...]) -> Any:  # noqa: ANN401
    arrow, inner = load_pyarrow(), field.message_type
    if inner is None:
        names = _names(field)
        if names not in _PROTO_SIMPLE:
            # Unsigned ones of 64 bits: no reader of Parquet agrees with another on them.
            return arrow.decimal128(20, 0)
        return getattr(arrow, _PROTO_SIMPLE[names])()
    if inner.full_name == _TIMESTAMP:
        return arrow.timestamp("us", "UTC")
    if inner.full_name in _WRAPPERS:
        return _type_of_one(inner.fields[0], above)
    if inner.full_name in above or not inner.fields:
        what = "empty" if not inner.fields else "within itself"
        raise InvalidError(f"the field {field.full_name} can be no column: its message is {what}")
    path = (*above, inner.full_name)
    return arrow.struct([arrow.field(one.name, _proto_type(one, path)) for one in inner.fields])


def _names(field: Any) -> str:  # noqa: ANN401
    from google.protobuf.descriptor_pb2 import (  # type: ignore[import-untyped] # noqa: PLC0415
        FieldDescriptorProto,
    )

    name: str = FieldDescriptorProto.Type.Name(field.type)
    return "TYPE_MESSAGE" if name == "TYPE_GROUP" else name


def _is_map(field: Any) -> bool:  # noqa: ANN401
    inner = field.message_type
    return bool(inner is not None and inner.GetOptions().map_entry)


def _getter(field: Any) -> Get:  # noqa: ANN401
    name = field.name
    if _is_map(field):
        key, value = map(_converter, field.message_type.fields)
        return lambda message: [
            (key(k), value(v)) for k, v in sorted(getattr(message, name).items())
        ]
    convert = _converter(field)
    if field.is_repeated:
        return lambda message: [convert(one) for one in getattr(message, name)]
    if field.has_presence:
        return lambda message: convert(getattr(message, name)) if message.HasField(name) else None
    return lambda message: convert(getattr(message, name))


def _converter(field: Any) -> Get:  # noqa: ANN401
    """From a value of Protocol Buffers to what Arrow takes."""
    inner = field.message_type
    if inner is None:
        if _names(field) == "TYPE_ENUM":
            texts = {value.number: value.name for value in field.enum_type.values}
            return lambda number: texts.get(number, str(number))
        return lambda value: value
    if inner.full_name == _TIMESTAMP:
        return lambda value: value.seconds * 1_000_000 + value.nanos // 1000
    if inner.full_name in _WRAPPERS:
        return lambda value: value.value
    gets = [(one.name, _getter(one)) for one in inner.fields]
    return lambda message: {name: get(message) for name, get in gets}


# -- wishes ----------------------------------------------------------------------------------------
#
# What is wished of topics' bodies, by options: a format, perhaps a schema, and whether records are kept.

RAW = "raw"
DEFINITION_BYTES_MAX = 256 << 10
"""Of a schema: it lies in the log, and goes with each task."""


@dataclass(frozen=True, slots=True)
class BodyWish:
    """What bodies of a topic shall become."""

    format: str  # one of ``FORMATS``, or ``raw``: bytes only
    body: BodyColumns | None = None
    """The columns; None when they are to be inferred (JSON), or there are none (raw)."""


@dataclass(frozen=True, slots=True)
class BodyWishes:
    """Of all topics."""

    by_topic: tuple[tuple[str, BodyWish], ...] = ()
    """Patterns of topics and what is wished of them; the first that fits holds."""
    has_records: bool = False  # whether the bytes of each stored record become a column

    def of(self, topic: str) -> BodyWish | None:
        """What is wished of a topic; None: as the archive's log says, else bytes only."""
        return next((wish for glob, wish in self.by_topic if fnmatchcase(topic, glob)), None)


NOTHING = BodyWishes()


def read_wishes(
    formats: Sequence[str],
    schemas: Sequence[str],
    messages: Sequence[str],
    *,
    has_records: bool,
    read: Callable[[str], bytes],
) -> BodyWishes:
    """Wishes from options, each ``VALUE`` or ``TOPIC=VALUE``, where the topic may be a pattern.

    Args:
        schemas: Names of files: columns or a JSON Schema, an Avro schema, a descriptor set.
        messages: Full names of messages of Protocol Buffers.
        has_records: Whether stored records become a column.

    Raises:
        InvalidError: Something is no format or no schema, is missing, or belongs to nothing.
    """
    wished, files, names = _by_topic(formats), _by_topic(schemas), _by_topic(messages)
    unused = [*(set(files) - set(wished)), *(set(names) - set(files))]
    if unused:
        topic = f"{unused[0]}=" if unused[0] != "*" else ""
        raise InvalidError(
            f"--body-schema or --body-message says something for {topic or 'all topics'},"
            " and what it belongs to does not",
            do=f"give --body {topic}FORMAT, and for protobuf both others in the same way",
        )
    found = [
        (glob, _wish(form, read(files[glob]) if glob in files else None, names.get(glob, "")))
        for glob, form in wished.items()
    ]
    # A pattern for some goes before the one for all.
    return BodyWishes(tuple(sorted(found, key=lambda one: one[0] == "*")), has_records)


def merged(old: BodyColumns, new: BodyColumns, topic: str) -> BodyColumns:
    """Columns of a topic once more are wished: what was fixed stays, what is new comes behind it."""
    if new.format != old.format:
        raise InvalidError(
            f"bodies of {topic} are {old.format} in this archive, not {new.format}",
            do="a topic has one format in an archive; archive to another place for another",
        )
    known = {column.name: column for column in parse_columns(old.columns)}
    more = []
    for column in parse_columns(new.columns):
        before = known.get(column.name)
        if before is not None and before.type != column.type:
            raise InvalidError(
                f"the column {column.name} of {topic} is {columns_text([before])} in this archive",
                do="columns are added only: give another type another name",
            )
        if before is None:
            more.append(column)
    columns = columns_text([*known.values(), *more])
    parse_columns(columns)  # no two names that differ by case only
    return replace(new, columns=columns)


def _by_topic(texts: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        topic, divided, value = text.partition("=")
        glob, value = (topic, value) if divided else ("*", text)
        if glob in found:
            raise InvalidError(f"two values are given for {glob}: {found[glob]!r} and {value!r}")
        found[glob] = value
    return found


def _wish(form: str, schema: bytes | None, message: str) -> BodyWish:
    if form not in (*FORMATS, RAW):
        raise InvalidError(
            f"{form!r:.40} is no format of bodies", do=f"choose from {', '.join((*FORMATS, RAW))}"
        )
    if schema is not None and len(schema) > DEFINITION_BYTES_MAX:
        raise InvalidError(
            f"a schema of {len(schema)} bytes; {DEFINITION_BYTES_MAX} are the most",
            do="leave out what the message does not need",
        )
    match form:
        case "avro":
            text = _text(_needed(form, schema))
            return BodyWish(form, BodyColumns(form, columns_text(avro_columns(text)), text))
        case "protobuf":
            packed = base64.b64encode(_needed(form, schema)).decode()
            columns = columns_text(proto_columns(packed, message))
            return BodyWish(form, BodyColumns(form, columns, packed, message))
        case "json" if schema is not None:
            return BodyWish(form, _json_columns(_text(schema)))
        case "text":
            return BodyWish(form, BodyColumns(form))
        case _:
            return BodyWish(form)


def _json_columns(text: str) -> BodyColumns:
    if text.lstrip().startswith("{"):
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidError(f"the JSON Schema is not JSON: {error}") from None
        columns = columns_of_schema(document)
    else:
        columns = parse_columns(text)
    if not columns:
        raise InvalidError("a schema of bodies has no columns")
    JsonDecoder(columns)  # refuses what JSON cannot become
    return BodyColumns("json", columns_text(columns))


def _needed(form: str, schema: bytes | None) -> bytes:
    if schema is None:
        raise InvalidError(f"--body {form} needs --body-schema FILE")
    return schema


def _text(raw: bytes) -> str:
    try:
        return raw.removeprefix(BOM).decode()
    except UnicodeDecodeError:
        raise InvalidError("a schema of bodies is not UTF-8") from None


# -- decoders --------------------------------------------------------------------------------------
#
# Which columns a topic's bodies become, and what decodes them.


def body_fields(body: BodyColumns) -> list[pa.Field]:
    """The columns of a file that bodies become, in order."""
    arrow = load_pyarrow()
    if body.format == "text":
        return [arrow.field(TEXT, arrow.string())]
    return [one.with_name(PREFIX + one.name) for one in parse_columns(body.columns)]


def open_decoder(body: BodyColumns) -> Decoder:
    """What decodes a topic's bodies."""
    columns = parse_columns(body.columns)
    match body.format:
        case "json":
            return JsonDecoder(columns)
        case "avro":
            return AvroDecoder(body.definition, columns)
        case "protobuf":
            return ProtoDecoder(body.definition, body.message, columns)
        case _:
            return TextDecoder()


class TextDecoder(_ByBody):
    """Bodies that are UTF-8."""

    def only(self, number: int) -> TextDecoder:  # noqa: ARG002 (there is one)
        return self

    def decode(self, bodies: pa.Array) -> list[pa.Array]:
        arrow = load_pyarrow()
        try:
            return [bodies.cast(arrow.string())]
        except arrow.ArrowInvalid:
            raise UnfitError("the body is not UTF-8") from None


# --------------------------------------------------------------------------------------------------
# Decodes JSON bodies: each one object, its members columns of given types. Arrow's parser takes a block of them at
# once.
#
# What fits: a member that is missing or null is null; members that no column is of are passed over (the body has them
# still) and counted; integers are taken for fractions, nothing else for something else. Numbers fit a DOUBLE if it has
# all their digits; integers a FLOAT likewise, fractions as far as it goes. Dates are ``2024-01-31``, times ISO 8601,
# UTC where they say no zone. Members that come twice do not fit.
#
# Why rows cannot get out of step with bodies: each body begins with ``{``, ends with ``}`` and is followed by a line's
# end, which no text of JSON may contain. A body that is not whole therefore breaks the block, one cannot disappear in
# the one before it, and two in one body are one row too many.
# --------------------------------------------------------------------------------------------------


_ROW = re.compile(r" in row (\d+)$")
_OPEN, _CLOSE = b"{}"
_BLANKS = " \t\r\n"


class JsonDecoder:
    """Decodes JSON objects by a fixed schema; fields that it has not are passed over."""

    def __init__(self, columns: Sequence[pa.Field], *, is_strict: bool = False) -> None:
        """Take the columns.

        Args:
            is_strict: Fields that it has not do not fit.

        Raises:
            InvalidError: One has a type that JSON has nothing for.
        """
        from pyarrow import json as arrow_json  # noqa: PLC0415 (heavy)

        self._arrow: Any = load_pyarrow()
        self._reading = arrow_json
        self._columns = list(columns)
        self._wanted = [column.type for column in columns]
        self._tree = _tree(columns)
        self._run = min(_runs(columns), default=0)
        parsed = [self._arrow.field(one.name, _parsed(one.name, one.type)) for one in columns]
        self._options = arrow_json.ParseOptions(
            explicit_schema=self._arrow.schema(parsed),
            unexpected_field_behavior="error" if is_strict else "ignore",
        )
        self.strict = None if is_strict else JsonDecoder(columns, is_strict=True)

    def only(self, number: int) -> _MemberDecoder:
        """Whatever is wrong with the other members."""
        return _MemberDecoder(self._columns[number])

    def left_out(self, body: bytes) -> Iterable[str]:
        """Names, those within others behind theirs and a dot."""
        try:
            document = json.loads(body.removeprefix(BOM), parse_int=str, parse_float=str)
        except (ValueError, RecursionError):
            return ()
        return _strangers(document, self._tree, "")

    def decode(self, bodies: pa.Array) -> list[pa.Array]:
        """All of a block."""
        bodies = self._without_marks(bodies)
        self._require_objects(bodies)
        arrow = self._arrow
        try:
            table = self._read(bodies)
        except arrow.ArrowInvalid as error:
            raise self._unfit(bodies, str(error)) from None
        if table.num_rows != len(bodies):
            raise UnfitError(NO_OBJECT, "it is not one object")
        if self._run:
            self._require_digits(bodies)
        try:
            columns = (arrow.concat_arrays(column.chunks) for column in table.columns)
            return [one.cast(kind) for one, kind in zip(columns, self._wanted, strict=True)]
        except arrow.ArrowInvalid as error:
            raise UnfitError(NO_FIT, str(error)) from None

    def _without_marks(self, bodies: pa.Array) -> pa.Array:
        """The same without byte-order marks before them."""
        arrow = self._arrow
        if not arrow.compute.any(arrow.compute.starts_with(bodies, BOM)).as_py():
            return bodies
        return arrow.array([body.removeprefix(BOM) for body in bodies.to_pylist()], arrow.binary())

    def _read(self, bodies: pa.Array) -> pa.Table:
        arrow = self._arrow
        listed = arrow.ListArray.from_arrays([0, len(bodies)], bodies)
        (joined,) = arrow.compute.binary_join(listed, b"\n")
        data = joined.as_buffer()
        options = self._reading.ReadOptions(use_threads=False, block_size=data.size + 64)
        return self._reading.read_json(arrow.BufferReader(data), options, self._options)

    def _require_digits(self, bodies: pa.Array) -> None:
        """See that no number loses digits. Only bodies are looked into that have one with so many."""
        raw, bounds = _bytes_of(bodies)
        is_other = ((raw < _ZERO) | (raw > _NINE)) & (raw != _POINT)
        others = np.flatnonzero(is_other)
        ends = others[1:][np.diff(others) > self._run]
        for row in np.unique(np.searchsorted(bounds, ends, "right") - 1).tolist():
            self._require_digits_of(row, bodies[row].as_py())

    def _require_digits_of(self, row: int, body: bytes) -> None:
        try:
            document = json.loads(body, parse_int=_Digits, parse_float=_Digits)
        except (ValueError, RecursionError):
            return
        for column in self._columns:
            for digits in _lost_digits(document.get(column.name), column.type):
                raise UnfitError(NO_FIT, f"{column.name} would lose digits of {digits:.80}", row)

    def _require_objects(self, bodies: pa.Array) -> None:
        """See that nothing gets out of step, and that texts will be UTF-8, which Arrow does not look at."""
        arrow = self._arrow
        try:
            texts = bodies.cast(arrow.string())
        except arrow.ArrowInvalid:
            raise UnfitError(NO_OBJECT, "it is not UTF-8") from None
        raw, bounds = _bytes_of(bodies)
        is_bare = bool((np.diff(bounds) > 1).all())
        is_bare = is_bare and bool((raw[bounds[:-1]] == _OPEN).all())
        if not (is_bare and (raw[bounds[1:] - 1] == _CLOSE).all()):
            self._require_braces(texts)
        if not raw.all():
            raise UnfitError(NO_OBJECT, "a byte of it is 0")

    def _require_braces(self, texts: Any) -> None:  # noqa: ANN401
        """The same with blanks around."""
        compute = self._arrow.compute
        bare = compute.ascii_trim(texts, _BLANKS)
        good = compute.and_(compute.starts_with(bare, "{"), compute.ends_with(bare, "}"))
        if not compute.all(good).as_py():
            raise UnfitError(NO_OBJECT, "it is not an object", compute.index(good, False).as_py())

    def _unfit(self, bodies: pa.Array, said: str) -> UnfitError:
        if len(bodies) > 1:
            found = _ROW.search(said)
            return UnfitError(NO_FIT, "", int(found[1]) if found else -1)
        try:
            json.loads(bodies[0].as_py())
        except ValueError:
            return UnfitError(NO_OBJECT, said)
        except RecursionError:
            pass  # a version of Python with more patience would have read it
        return UnfitError(NO_FIT, said)


class _MemberDecoder(JsonDecoder):
    """Decodes one member, whatever is wrong with the others."""

    def __init__(self, column: pa.Field) -> None:
        super().__init__([column])
        self._name = column.name

    def decode(self, bodies: pa.Array) -> list[pa.Array]:
        try:
            return super().decode(bodies)
        except UnfitError:
            # A number beyond all bounds, or half a character, is what the parser stops at, wherever it stands.
            alone = _alone(bodies[0].as_py(), self._name) if len(bodies) == 1 else None
            if alone is None:
                raise
            return super().decode(self._arrow.array([alone], self._arrow.binary()))


_VALUES = json.JSONDecoder(parse_int=str, parse_float=str)
_BLANK = re.compile(r"[ \t\r\n]*")


def _alone(body: bytes, name: str) -> bytes | None:
    """An object of one member of another, as it is written there; None when it has it twice, or is not an object."""
    text, found = body.removeprefix(BOM).decode(errors="replace"), list[str]()
    try:
        at = _behind(text, 0, "{")
        while text[at] != "}":
            key, at = _VALUES.raw_decode(text, at)
            at = _behind(text, at, ":")
            _, end = _VALUES.raw_decode(text, at)
            found += [text[at:end]] if key == name else []
            at = _behind(text, end, "")
            at = _behind(text, at, ",") if text[at] == "," else at
    except (ValueError, LookupError, RecursionError):
        return None
    if len(found) > 1:
        return None
    inner = f"{json.dumps(name)}: {found[0]}" if found else ""
    return f"{{{inner}}}".encode()


def _behind(text: str, at: int, mark: str) -> int:
    """Where the next token begins, behind a mark and the blanks about it."""
    match = _BLANK.match(text, at)
    assert match is not None
    if not text.startswith(mark, match.end()):
        raise ValueError(mark)
    behind = _BLANK.match(text, match.end() + len(mark))
    assert behind is not None
    return behind.end()


def _bytes_of(bodies: Any) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:  # noqa: ANN401
    """All bytes of some bodies, and where each begins, and the last ends."""
    _, offsets, data = bodies.buffers()
    bounds = np.frombuffer(offsets, np.int32)[bodies.offset :][: len(bodies) + 1]
    raw = np.frombuffer(data or b"", np.uint8)[bounds[0] : bounds[-1]]
    return raw, bounds.astype(np.int64) - bounds[0]


class _Digits(str):
    __slots__ = ()


_ZERO, _NINE, _POINT = b"09."
_SURE_DIGITS = {32: 7, 64: 15}
"""A number of no more digits than that is a FLOAT, or a DOUBLE, with all of them."""
_FLOAT_BITS = 32


def _runs(columns: Iterable[pa.Field]) -> Iterator[int]:
    """For each type of floating numbers the digits that are no question."""
    types = load_pyarrow().types
    for column in columns:
        kind = column.type
        if types.is_floating(kind):
            yield _SURE_DIGITS[kind.bit_width]
        elif types.is_struct(kind):
            yield from _runs(kind)
        elif types.is_list(kind):
            yield from _runs([kind.value_field])


def _lost_digits(value: Any, kind: Any) -> Iterator[str]:  # noqa: ANN401
    types = load_pyarrow().types
    if isinstance(value, _Digits):
        if types.is_floating(kind) and not _keeps(value, kind.bit_width):
            yield value
    elif isinstance(value, list) and types.is_list(kind):
        for one in value:
            yield from _lost_digits(one, kind.value_type)
    elif isinstance(value, dict) and types.is_struct(kind):
        for one in kind:
            yield from _lost_digits(value.get(one.name), one.type)


def _keeps(digits: str, bits: int) -> bool:
    if bits != _FLOAT_BITS:
        return keeps_digits(digits)
    is_fraction = not digits.lstrip("-").isdecimal()
    return is_fraction or int(np.float32(digits)) == int(digits)


_Tree = dict[str, "_Tree | None"]


def _tree(columns: Iterable[pa.Field]) -> _Tree:
    """Names of columns, and of the fields of those that have some."""
    return {column.name: _tree_of(column.type) for column in columns}


def _tree_of(kind: Any) -> _Tree | None:  # noqa: ANN401
    types = load_pyarrow().types
    if types.is_list(kind):
        return _tree_of(kind.value_type)
    return _tree(kind) if types.is_struct(kind) else None


def _strangers(value: Any, tree: _Tree, path: str) -> Iterator[str]:  # noqa: ANN401
    """Members of a value that are not in a tree."""
    if isinstance(value, list):
        for one in value:
            yield from _strangers(one, tree, path)
    elif isinstance(value, dict):
        for name, inner in value.items():
            if inner is None:
                continue
            if name not in tree:
                yield path + name
            elif (below := tree[name]) is not None:
                yield from _strangers(inner, below, f"{path}{name}.")


def _parsed(name: str, kind: Any) -> Any:  # noqa: ANN401 (pyarrow has no types)
    """The type that Arrow's parser is told: dates are texts to it."""
    arrow = load_pyarrow()
    types = arrow.types
    if types.is_date32(kind):
        return arrow.string()
    if types.is_list(kind):
        return arrow.list_(_parsed(name, kind.value_type))
    if types.is_struct(kind):
        return arrow.struct([field.with_type(_parsed(name, field.type)) for field in kind])
    if types.is_map(kind) or types.is_binary(kind):
        raise InvalidError(f"the column {name!r:.80} is a {kind}, which JSON bodies cannot become")
    return kind
