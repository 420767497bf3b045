"""What is wished of topics' bodies, by options: a format, perhaps a schema, and whether records are kept."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from tiered.api.arrow import load_pyarrow
from tiered.archive.body.avro import avro_columns
from tiered.archive.body.decode import UnfitError
from tiered.archive.body.layout import FORMATS, PREFIX, TEXT, BodyColumns
from tiered.archive.body.proto import proto_columns
from tiered.archive.body.schema import columns_of_schema, columns_text, parse_columns
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pyarrow as pa

    from tiered.archive.body.decode import Decoder


RAW = "raw"
DEFINITION_BYTES_MAX = 256 << 10
"""Of a schema: it lies in the log, and goes with each task."""


@dataclass(frozen=True, slots=True)
class BodyWish:
    """What bodies of a topic shall become.

    Attributes:
        format: One of ``FORMATS``, or ``raw``: bytes only.
        body: The columns; None when they are to be inferred (JSON), or there are none (raw).
    """

    format: str
    body: BodyColumns | None = None


@dataclass(frozen=True, slots=True)
class BodyWishes:
    """Of all topics.

    Attributes:
        by_topic: Patterns of topics and what is wished of them; the first that fits holds.
        has_records: Whether the bytes of each stored record become a column.
    """

    by_topic: tuple[tuple[str, BodyWish], ...] = ()
    has_records: bool = False

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
        formats: Of bodies.
        schemas: Names of files: columns or a JSON Schema, an Avro schema, a descriptor set.
        messages: Full names of messages of Protocol Buffers.
        has_records: Whether stored records become a column.
        read: Reads a file by its name.

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
    """Columns of a topic once more are wished: what was fixed stays, what is new comes behind it.

    Raises:
        InvalidError: Another format, or another type of a column.
    """
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
            raise InvalidError(f"the JSON Schema is no JSON: {error}") from None
        columns = columns_of_schema(document)
    else:
        columns = parse_columns(text)
    if not columns:
        raise InvalidError("a schema of bodies has no columns")
    from tiered.archive.body.decode import JsonDecoder  # noqa: PLC0415 (heavy)

    JsonDecoder(columns)  # refuses what JSON cannot become
    return BodyColumns("json", columns_text(columns))


def _needed(form: str, schema: bytes | None) -> bytes:
    if schema is None:
        raise InvalidError(f"--body {form} needs --body-schema FILE")
    return schema


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise InvalidError("a schema of bodies is no UTF-8") from None


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
    """What decodes a topic's bodies.

    Raises:
        InvalidError: Its library is not installed, or the definition is none.
    """
    columns = parse_columns(body.columns)
    match body.format:
        case "json":
            from tiered.archive.body.decode import JsonDecoder  # noqa: PLC0415 (heavy)

            return JsonDecoder(columns)
        case "avro":
            from tiered.archive.body.avro import AvroDecoder  # noqa: PLC0415 (heavy)

            return AvroDecoder(body.definition, columns)
        case "protobuf":
            from tiered.archive.body.proto import ProtoDecoder  # noqa: PLC0415 (heavy)

            return ProtoDecoder(body.definition, body.message, columns)
        case _:
            return TextDecoder()


class TextDecoder:
    """Bodies that are UTF-8."""

    def decode(self, bodies: pa.Array) -> list[pa.Array]:
        """See ``Decoder``."""
        arrow = load_pyarrow()
        try:
            return [bodies.cast(arrow.string())]
        except arrow.ArrowInvalid:
            raise UnfitError("the body is no UTF-8") from None
