"""Bodies of Avro and of Protocol Buffers for tests, and what describes them."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import fastavro
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2

from tiered.archive.body_formats import BodyWishes, read_wishes

if TYPE_CHECKING:
    from collections.abc import Sequence


ORDER_TYPE = "shop.Order"
ORDER_AVSC: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "note", "type": ["null", "string"]},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
    ],
}


def avro(order: dict[str, Any], schema: dict[str, Any] | None = None) -> bytes:
    """A bare datum."""
    file = io.BytesIO()
    fastavro.schemaless_writer(file, fastavro.parse_schema(schema or ORDER_AVSC), order)
    return file.getvalue()


def _files() -> descriptor_pb2.FileDescriptorSet:
    """``message Order``: id, optional note, kind, at, repeated items, big (unsigned), map m."""
    kinds = descriptor_pb2.FieldDescriptorProto
    found = descriptor_pb2.FileDescriptorSet()
    timestamp_pb2.DESCRIPTOR.CopyToProto(found.file.add())
    file = found.file.add(name="orders.proto", package="shop", syntax="proto3")
    file.dependency.append("google/protobuf/timestamp.proto")
    kind = file.enum_type.add(name="Kind")
    kind.value.add(name="PLAIN", number=0)
    kind.value.add(name="GIFT", number=1)
    item = file.message_type.add(name="Item")
    item.field.add(name="sku", number=1, type=kinds.TYPE_STRING, label=1)
    order = file.message_type.add(name="Order")
    order.field.add(name="id", number=1, type=kinds.TYPE_INT64, label=1)
    order.oneof_decl.add(name="_note")
    order.field.add(
        name="note", number=2, type=kinds.TYPE_STRING, label=1, proto3_optional=True, oneof_index=0
    )
    order.field.add(name="kind", number=3, type=kinds.TYPE_ENUM, type_name=".shop.Kind", label=1)
    stamp = ".google.protobuf.Timestamp"
    order.field.add(name="at", number=4, type=kinds.TYPE_MESSAGE, type_name=stamp, label=1)
    order.field.add(
        name="items", number=5, type=kinds.TYPE_MESSAGE, type_name=".shop.Item", label=3
    )
    order.field.add(name="big", number=6, type=kinds.TYPE_UINT64, label=1)
    entry = order.nested_type.add(name="MEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=kinds.TYPE_STRING, label=1)
    entry.field.add(name="value", number=2, type=kinds.TYPE_INT32, label=1)
    pair = ".shop.Order.MEntry"
    order.field.add(name="m", number=7, type=kinds.TYPE_MESSAGE, type_name=pair, label=3)
    return found


def descriptors() -> bytes:
    """A descriptor set."""
    return _files().SerializeToString()


def message(**fields: Any) -> bytes:
    """An order."""
    pool = descriptor_pool.DescriptorPool()
    for file in _files().file:
        pool.Add(file)
    order = message_factory.GetMessageClass(pool.FindMessageTypeByName(ORDER_TYPE))()
    for item in fields.pop("items", []):
        order.items.add(sku=item)
    for name, value in fields.pop("m", {}).items():
        order.m[name] = value
    if "at" in fields:
        order.at.FromMilliseconds(fields.pop("at"))
    for name, value in fields.items():
        setattr(order, name, value)
    return order.SerializeToString()


def wishes(
    *formats: str,
    schema: bytes | None = None,
    message: Sequence[str] = (),
    records: bool = False,
) -> BodyWishes:
    schemas = [] if schema is None else ["file"]
    return read_wishes(
        formats, schemas, message, has_records=records, read=lambda _name: schema or b""
    )


KINDS = (
    b"id BIGINT, small SMALLINT, price DECIMAL(10, 2), day DATE, at TIMESTAMP, ok BOOLEAN,"
    b" tags ARRAY<STRING>, inner STRUCT<a: DOUBLE>"
)


ORDER = (
    b'{"id": 7, "small": 3, "price": 1.25, "day": "2026-11-21", "at": "2026-11-21T10:00:00Z", "ok": true,'
    b' "tags": ["x"], "inner": {"a": 0.5}}'
)
