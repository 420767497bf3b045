"""JoyQueue's messages as Arrow arrays: what ``tiered cat`` prints of them, typed."""

from __future__ import annotations

from base64 import b64decode
from typing import TYPE_CHECKING, Final

from tiered.api.arrow import load_pyarrow, schema_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from tiered.log.messages import ForeignMessage

JMQ_COLUMNS: Final = (
    "topic",
    "partition",
    "index",
    "term",
    "batch",
    "batch_count",
    "compression",
    "source",
    "ordered",
    "priority",
    "flag",
    "client_time_ms",
    "store_time_ms",
    "client_ip_hex",
    "app",
    "business_id",
    "attributes",
    "extension",
    "stored_length",
    "body",
)
"""Every column of JoyQueue's messages, in the order of ``tiered cat``."""


def jmq_types() -> dict[str, pa.DataType]:
    """The type of each column."""
    arrow = load_pyarrow()
    types = dict.fromkeys(JMQ_COLUMNS, arrow.int32())
    types |= dict.fromkeys(["index", "client_time_ms", "store_time_ms"], arrow.int64())
    texts = ["topic", "compression", "client_ip_hex", "app", "business_id"]
    types |= dict.fromkeys(texts, arrow.string())
    types |= dict.fromkeys(["batch", "ordered"], arrow.bool_())
    types |= dict.fromkeys(["extension", "body"], arrow.binary())
    types["attributes"] = arrow.map_(arrow.string(), arrow.string())
    return types


def jmq_schema(columns: Sequence[str] | None = None) -> pa.Schema:
    """The schema of some columns, in their order (default: all).

    Raises:
        InvalidError: There is no such column, or one is named twice.
    """
    return schema_of(jmq_types(), columns, nullable={"business_id", "attributes", "extension"})


def jmq_columns(
    messages: Sequence[ForeignMessage], names: Sequence[str] = JMQ_COLUMNS
) -> dict[str, pa.Array]:
    """Columns of these messages, by their names."""
    arrow, types = load_pyarrow(), jmq_types()
    return {
        name: arrow.array([_value(name, one) for one in messages], types[name]) for name in names
    }


def _value(name: str, message: ForeignMessage) -> object:
    said = message.json
    match name:
        case "body":
            return message.body
        case "extension":
            packed = said["extension_base64"]
            return None if packed is None else b64decode(packed)
        case "attributes":
            return (
                said[name]
                and {_utf8(key): _utf8(value) for key, value in said[name].items()}.items()
            )
        case _:
            value = said[name]
            return _utf8(value) if isinstance(value, str) else value


def _utf8(text: str) -> str:
    """Text that Arrow takes; bytes that are no UTF-8 become U+FFFD."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
