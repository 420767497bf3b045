"""Columns from a JSON Schema, as far as it says types; what else it demands of a document is not looked at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiered.api.arrow import load_pyarrow
from tiered.archive.body.ddl import require_distinct
from tiered.errors import InvalidError

if TYPE_CHECKING:
    import pyarrow as pa

_DEPTH_MAX = 32


def columns_of_schema(document: Any) -> list[pa.Field]:  # noqa: ANN401 (JSON values)
    """The columns of an object.

    Raises:
        InvalidError: It is no schema of an object, or says something that no column can be.
    """
    if not isinstance(document, dict) or not isinstance(document.get("properties"), dict):
        raise InvalidError("this JSON Schema is not of an object with properties")
    return _fields(document, document, 0)


def _fields(schema: Any, root: Any, depth: int) -> list[pa.Field]:  # noqa: ANN401
    properties = schema["properties"]
    require_distinct(list(properties))
    arrow = load_pyarrow()
    return [arrow.field(name, _type(name, one, root, depth)) for name, one in properties.items()]


def _type(name: str, schema: Any, root: Any, depth: int) -> Any:  # noqa: ANN401
    arrow, schema = load_pyarrow(), _resolved(schema, root)
    if depth > _DEPTH_MAX or not isinstance(schema, dict):
        raise _wrong(name)
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
            return arrow.list_(_type(name, schema["items"], root, depth + 1))
        case "object" if isinstance(schema.get("properties"), dict):
            return arrow.struct(_fields(schema, root, depth + 1))
    raise _wrong(name)


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


def _wrong(name: str) -> InvalidError:
    return InvalidError(
        f"the JSON Schema's property {name!r:.80} can be no column",
        do="give each property one type; objects have properties, arrays have items",
    )
