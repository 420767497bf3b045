"""Which columns a topic's bodies become, and what decodes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered.api.arrow import load_pyarrow
from tiered.archive.body.ddl import parse_columns
from tiered.archive.body.decode import UnfitError
from tiered.archive.body.layout import PREFIX, TEXT, BodyColumns

if TYPE_CHECKING:
    import pyarrow as pa

    from tiered.archive.body.decode import Decoder


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
            from tiered.archive.body.json_lines import JsonDecoder  # noqa: PLC0415 (heavy)

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
