"""Bodies of Protocol Buffers: one message each, its fields the columns. What type it is a descriptor set says.

    protoc --include_imports --descriptor_set_out=orders.desc orders.proto

Fields that know whether they are there (messages, ``optional``, members of a ``oneof``) are null when they are not; others
are their default then, as in every language. Enumerations are the names of their values, or the number of one that the
descriptor does not know. ``google.protobuf.Timestamp`` is a time, the wrapper types are their value or null. Fields that
no column is of are passed over.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from tiered.api.arrow import load_pyarrow
from tiered.archive.body.decode import NO_FIT, NO_OBJECT, UnfitError
from tiered.archive.body.schema import require_distinct
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa

Get = Callable[[Any], Any]
_TIMESTAMP = "google.protobuf.Timestamp"
_WRAPPERS: Final = frozenset(
    f"google.protobuf.{name}Value"
    for name in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
)
_SIMPLE: Final[Mapping[str, str]] = {
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

    Args:
        definition: A descriptor set, in base64.
        message: Full name.

    Raises:
        InvalidError: There is no such message, or something of it can be no column.
    """
    fields = _descriptor(definition, message).fields
    require_distinct([field.name for field in fields])
    if not fields:
        raise InvalidError(f"the message {message} has no fields")
    return [load_pyarrow().field(field.name, _type(field, (message,))) for field in fields]


class ProtoDecoder:
    """See ``Decoder``."""

    def __init__(self, definition: str, message: str, columns: Sequence[pa.Field]) -> None:
        """Take the message, and the columns, some of which it may not have.

        Raises:
            InvalidError: There is no such message.
        """
        from google.protobuf import message_factory  # type: ignore[import-untyped] # noqa: PLC0415

        descriptor = _descriptor(definition, message)
        self._parse = message_factory.GetMessageClass(descriptor).FromString
        self._columns = list(columns)
        known = descriptor.fields_by_name
        self._gets = [
            _getter(known[one.name]) if one.name in known else _nothing for one in columns
        ]

    def decode(self, bodies: pa.Array) -> list[pa.Array]:
        """See ``Decoder``."""
        arrow = load_pyarrow()
        found = [self._one(at, body) for at, body in enumerate(bodies.to_pylist())]
        try:
            return [
                arrow.array([get(one) for one in found], column.type)
                for get, column in zip(self._gets, self._columns, strict=True)
            ]
        except (arrow.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise UnfitError(NO_FIT, str(error)) from None

    def _one(self, at: int, body: bytes) -> Any:  # noqa: ANN401
        from google.protobuf.message import (  # type: ignore[import-untyped] # noqa: PLC0415
            DecodeError,
        )

        try:
            return self._parse(body)
        except (DecodeError, ValueError, RecursionError) as error:
            raise UnfitError(NO_OBJECT, f"{type(error).__name__}: {error}"[:200], at) from None


def _descriptor(definition: str, message: str) -> Any:  # noqa: ANN401 (protobuf has no types)
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool  # noqa: PLC0415
        from google.protobuf.message import DecodeError  # noqa: PLC0415
    except ImportError as error:
        raise InvalidError(
            "bodies of Protocol Buffers need protobuf, which is not installed",
            do="pip install 'tieredmq[bodies]'",
        ) from error
    pool = descriptor_pool.DescriptorPool()
    try:
        files = descriptor_pb2.FileDescriptorSet.FromString(base64.b64decode(definition))
        for file in files.file:
            pool.Add(file)
        return pool.FindMessageTypeByName(message)
    except (DecodeError, TypeError, ValueError) as error:
        raise InvalidError(
            f"this is no descriptor set with all that it needs: {error}",
            do="make it by protoc --include_imports --descriptor_set_out=FILE",
        ) from None
    except KeyError:
        raise InvalidError(
            f"the descriptor set has no message {message!r:.80}",
            do="name it in full, with its package",
        ) from None


def _type(field: Any, above: tuple[str, ...]) -> Any:  # noqa: ANN401
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
        if names not in _SIMPLE:
            # Unsigned ones of 64 bits: no reader of Parquet agrees with another on them.
            return arrow.decimal128(20, 0)
        return getattr(arrow, _SIMPLE[names])()
    if inner.full_name == _TIMESTAMP:
        return arrow.timestamp("us", "UTC")
    if inner.full_name in _WRAPPERS:
        return _type_of_one(inner.fields[0], above)
    if inner.full_name in above or not inner.fields:
        what = "empty" if not inner.fields else "within itself"
        raise InvalidError(f"the field {field.full_name} can be no column: its message is {what}")
    path = (*above, inner.full_name)
    return arrow.struct([arrow.field(one.name, _type(one, path)) for one in inner.fields])


def _names(field: Any) -> str:  # noqa: ANN401
    from google.protobuf.descriptor_pb2 import (  # type: ignore[import-untyped] # noqa: PLC0415
        FieldDescriptorProto,
    )

    name: str = FieldDescriptorProto.Type.Name(field.type)
    return "TYPE_MESSAGE" if name == "TYPE_GROUP" else name


def _is_map(field: Any) -> bool:  # noqa: ANN401
    inner = field.message_type
    return bool(inner is not None and inner.GetOptions().map_entry)


def _nothing(_message: Any) -> None:  # noqa: ANN401
    return None


def _getter(field: Any) -> Get:  # noqa: ANN401
    """What takes a field out of a message."""
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
