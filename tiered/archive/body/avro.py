"""Avro bodies: one datum of a record each, bare or behind the header of a single object (``C3 01`` and a fingerprint).

The fields of the record are the columns. Nullable is what has a union with null; another union is refused beforehand, as
is what no column can be. Uuids and enumerations are texts.

The schema is that of the writer: Avro's bytes do not say what they are. Where there is a header it is held against it.
"""

from __future__ import annotations

import io
import json
import struct
from typing import TYPE_CHECKING, Any, Final

from tiered.api.arrow import load_pyarrow
from tiered.archive.body.decode import NO_FIT, NO_OBJECT, UnfitError
from tiered.archive.body.schema import require_distinct
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa

_MARK = b"\xc3\x01"
_HEADER_BYTES = 10
_SIMPLE: Final[Mapping[str, str]] = {
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
    """The module.

    Raises:
        InvalidError: It is not installed.
    """
    try:
        import fastavro  # noqa: PLC0415 (only who uses it)
    except ImportError as error:
        raise InvalidError(
            "Avro bodies need fastavro, which is not installed",
            do="pip install 'tieredmq[bodies]'",
        ) from error
    return fastavro


def avro_columns(definition: str) -> list[pa.Field]:
    """The columns of a schema (the text of an ``.avsc`` file).

    Raises:
        InvalidError: It is no schema of a record, or something of it can be no column.
    """
    schema = _parsed(definition)
    names = [field["name"] for field in schema["fields"]]
    require_distinct(names)
    known: dict[str, Any] = {}
    return list(_type(schema, known, frozenset(), "the record"))


class AvroDecoder:
    """See ``Decoder``."""

    def __init__(self, definition: str, columns: Sequence[pa.Field]) -> None:
        """Take the writer's schema, and the columns, some of which it may not have.

        Raises:
            InvalidError: It is no schema.
        """
        fastavro = load_fastavro()
        self._schema = _parsed(definition)
        self._read = fastavro.schemaless_reader
        canonical = fastavro.schema.to_parsing_canonical_form(_raw(definition))
        fingerprint = fastavro.schema.fingerprint(canonical, "CRC-64-AVRO")
        self._header = _MARK + bytes.fromhex(fingerprint)
        self._columns = list(columns)

    def decode(self, bodies: pa.Array) -> list[pa.Array]:
        """See ``Decoder``."""
        arrow = load_pyarrow()
        found = [self._one(at, body) for at, body in enumerate(bodies.to_pylist())]
        try:
            return [
                arrow.array([one.get(column.name) for one in found], column.type)
                for column in self._columns
            ]
        except (arrow.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise UnfitError(NO_FIT, str(error)) from None

    def _one(self, at: int, body: bytes) -> dict[str, Any]:
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
        return found

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
        raise InvalidError(f"the Avro schema is no JSON: {error}") from None


def _parsed(definition: str) -> Any:  # noqa: ANN401
    """A schema as fastavro wants it, without logical types that Arrow has no values for."""
    fastavro, raw = load_fastavro(), _raw(definition)
    try:
        found = fastavro.parse_schema(_plain(raw))
    except (*_BROKEN, fastavro.schema.SchemaParseException) as error:
        raise InvalidError(f"this is no Avro schema: {error}") from None
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


def _type(schema: Any, known: dict[str, Any], above: frozenset[str], name: str) -> Any:  # noqa: ANN401
    arrow = load_pyarrow()
    if isinstance(schema, list):
        rest = [one for one in schema if one != "null"]
        if len(rest) != 1:
            raise _no_column(name, "a union of several types")
        return _type(rest[0], known, above, name)
    if isinstance(schema, str):
        if schema in _SIMPLE:
            return getattr(arrow, _SIMPLE[schema])()
        if schema in above or schema not in known:
            raise _no_column(name, "a type within itself" if schema in above else schema)
        return _type(known[schema], known, above, name)
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
                    arrow.field(one["name"], _type(one["type"], known, inner, one["name"]))
                    for one in schema["fields"]
                ]
            )
        case "array":
            return arrow.list_(_type(schema["items"], known, above, name))
        case "map":
            return arrow.map_(arrow.string(), _type(schema["values"], known, above, name))
        case plain if plain in _SIMPLE:
            if schema.get("size") == 0:
                raise _no_column(name, "of no size")
            return getattr(arrow, _SIMPLE[plain])()
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
