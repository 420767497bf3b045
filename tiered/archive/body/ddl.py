"""Columns as people write them in SQL: ``order_id BIGINT, amount DECIMAL(12,2), items ARRAY<STRUCT<sku: STRING, n: INT>>``.

Spark's words; what the log holds is what ``columns_text`` writes. Every column may be null.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tiered.api.arrow import load_pyarrow
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa

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
_TOKEN = re.compile(r"\s*(`(?:[^`]|``)+`|[^\W\d][\w$]*|\d+|[<>(),:])", re.UNICODE)
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
        InvalidError: There is none for it.
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


def require_distinct(names: Sequence[str]) -> None:
    """See that no reader takes two columns for one.

    Raises:
        InvalidError: Two differ by upper and lower case only, or not at all.
    """
    seen: set[str] = set()
    for name in names:
        if name.lower() in seen:
            raise InvalidError(f"two columns of bodies have the name {name!r:.80}")
        seen.add(name.lower())


def _tokens(text: str) -> list[str]:
    found, at, text = [], 0, re.sub(r"--[^\n]*", "", text).strip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise _wrong(f"{text[at : at + 20]!r} cannot be read")
        found.append(match[1])
        at = match.end()
    return found


@dataclass
class _Reader:
    """Recursive descent."""

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
            raise _wrong(f"{token!r} is no name")
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
            raise _wrong(f"{word!r} is no type")
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
            raise _wrong(f"{token!r} is no number")
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
    return name if _PLAIN.fullmatch(name) else "`" + name.replace("`", "``") + "`"


def _wrong(what: str) -> InvalidError:
    return InvalidError(
        f"columns of bodies cannot be read: {what}",
        do="write them as order_id BIGINT, amount DECIMAL(12,2), items ARRAY<STRUCT<sku: STRING>>",
    )
