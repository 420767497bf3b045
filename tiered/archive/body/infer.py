"""Columns from some JSON documents: the first ones of a topic say what all of it becomes. Pure.

A field that is an integer here and a fraction there is a DOUBLE. Of a field whose values do not go together otherwise the
first one's type holds, and documents with the other do not fit. Fields that are never more than null are left out, and so
is a field whose name differs from one before by upper and lower case only: readers would take both for one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tiered.api.arrow import load_pyarrow

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pyarrow as pa

FIELDS_MAX = 512
"""Columns at most, in all depths: who uses ids as names does not get a column for each."""
_DEPTH_MAX = 16
_SIMPLE = {"bool": "bool_", "int": "int64", "double": "float64", "text": "string"}
_INT64 = range(-(1 << 63), 1 << 63)


def infer_columns(bodies: Iterable[bytes]) -> list[pa.Field]:
    """The columns that documents have together; bodies that are no JSON object are passed over."""
    root, budget = _Seen("object"), _Budget()
    for body in bodies:
        try:
            document = json.loads(body)
        except (ValueError, RecursionError):
            continue
        if isinstance(document, dict):
            _see_object(root, document, budget, 0)
    return _fields(root)


@dataclass
class _Budget:
    """How many more fields there may be."""

    left: int = FIELDS_MAX


@dataclass
class _Seen:
    """What a place has been so far."""

    kind: str = ""
    fields: dict[str, _Seen] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    inner: _Seen | None = None


def _see_object(seen: _Seen, document: dict[str, Any], budget: _Budget, depth: int) -> None:
    for name, value in document.items():
        if name not in seen.fields:
            if value is None or not name or name.lower() in seen.names or not budget.left:
                continue
            budget.left -= 1
            seen.names.add(name.lower())
            seen.fields[name] = _Seen()
        _see(seen.fields[name], value, budget, depth + 1)


def _see(seen: _Seen, value: Any, budget: _Budget, depth: int) -> None:  # noqa: ANN401
    kind = _kind(value)
    if not kind or depth > _DEPTH_MAX:
        return
    if {seen.kind, kind} == {"int", "double"}:
        seen.kind = "double"
    seen.kind = seen.kind or kind
    if kind != seen.kind:
        return
    if kind == "object":
        _see_object(seen, value, budget, depth)
    elif kind == "array":
        seen.inner = seen.inner or _Seen()
        for one in value:
            _see(seen.inner, one, budget, depth + 1)


def _kind(value: Any) -> str:  # noqa: ANN401
    match value:
        case bool():
            return "bool"
        case int():
            return "int" if value in _INT64 else "double"
        case float():
            return "double"
        case str():
            return "text"
        case dict():
            return "object"
        case list():
            return "array"
        case _:
            return ""


def _fields(seen: _Seen) -> list[pa.Field]:
    arrow = load_pyarrow()
    typed = ((name, _type(one)) for name, one in seen.fields.items())
    return [arrow.field(name, kind) for name, kind in typed if kind is not None]


def _type(seen: _Seen) -> Any:  # noqa: ANN401 (pyarrow has no types)
    """None where nothing is known that a column could be of."""
    arrow = load_pyarrow()
    match seen.kind:
        case "object":
            inner = _fields(seen)
            return arrow.struct(inner) if inner else None
        case "array":
            element = _type(seen.inner) if seen.inner else None
            return None if element is None else arrow.list_(element)
        case "":
            return None
        case kind:
            return getattr(arrow, _SIMPLE[kind])()
