"""Options of ``tiered archive`` that say what message bodies become."""

from __future__ import annotations

from tiered.config import Setting, Shape

BODIES: tuple[Setting, ...] = (
    Setting(
        section="archive",
        name="body",
        help="format of message bodies, whose fields become columns: json, avro, protobuf, text, or raw (bytes only);"
        " for some topics as TOPIC=FORMAT, where TOPIC may be a glob",
        default_text="as the archive's log has fixed it for the topic, else raw",
        default=(),
        metavar="[TOPIC=]FORMAT,...",
        shape=Shape.LIST,
    ),
    Setting(
        section="archive",
        name="body-schema",
        help="what bodies are made of: for json columns as in SQL or a JSON Schema, for avro an .avsc file, for protobuf"
        " a descriptor set",
        default_text="inferred from the topic's first messages, with json",
        default=(),
        metavar="[TOPIC=]FILE,...",
        shape=Shape.LIST,
    ),
    Setting(
        section="archive",
        name="body-message",
        help="with protobuf: full name of the message",
        default=(),
        metavar="[TOPIC=]NAME,...",
        shape=Shape.LIST,
    ),
    Setting(
        section="archive",
        name="raw-records",
        help="add a column with the bytes of each stored record",
        shape=Shape.FLAG,
        default=False,
        metavar="",
    ),
)
