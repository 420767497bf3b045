"""Which columns files of a topic get beside those that every file has: decoded bodies, and the bytes of stored records.

What bodies of a topic become is fixed in the archive's log, so that jobs agree whoever infers first; see
``tiered.archive.job``. Values only, no pyarrow: the planner of a job reads them. All are immutable.
"""

from __future__ import annotations

import hashlib
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

from tiered.log.wellformed import check_ints, check_texts

if TYPE_CHECKING:
    from collections.abc import Mapping

FORMATS = ("json", "avro", "protobuf", "text")
PREFIX = "value_"
"""Of the columns that a body's fields become: no column of ours begins so."""
ERROR = "body_error"
TEXT = "body_text"
RECORD = "record"


@dataclass(frozen=True, slots=True)
class BodyColumns:
    """What bodies of a topic become.

    Attributes:
        format: One of ``FORMATS``.
        columns: Names and types as ``tiered.archive.body.schema`` writes them, without ``PREFIX``; empty for text.
        definition: For Avro the schema, for Protocol Buffers a descriptor set in base64; else empty.
        message: For Protocol Buffers the full name of the message; else empty.
    """

    format: str
    columns: str = ""
    definition: str = ""
    message: str = ""

    def continues(self, old: BodyColumns) -> bool:
        """Whether it has all columns of another in the same order, and perhaps more behind them."""
        more = self.columns == old.columns or self.columns.startswith(f"{old.columns}, ")
        return self.format == old.format and more

    def document(self) -> list[str]:
        """As JSON: the fields in order."""
        return list(astuple(self))

    @classmethod
    def of(cls, row: list[Any]) -> BodyColumns:
        """Undo ``document``.

        Raises:
            ValueError: It is none (likewise ``TypeError``).
        """
        check_texts(row, "columns of bodies")
        found = cls(*row)
        if found.format not in FORMATS:
            raise ValueError(f"bodies of an unknown format {found.format!r:.40}")
        return found


@dataclass(frozen=True, slots=True)
class BodyLayout:
    """What files get beside the columns that every file has.

    Attributes:
        body: What bodies become; None when they stay bytes only.
        number: Which of the topic's it is in the log, from 1; 0 without.
        has_records: Whether the bytes of each stored record are a column.
    """

    body: BodyColumns | None = None
    number: int = 0
    has_records: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """What a key has to change with; nothing for files without more columns."""
        if self == PLAIN:
            return ()
        raw = repr((self.body and self.body.document(), self.has_records))
        return (hashlib.sha256(raw.encode("utf-8", "surrogateescape")).hexdigest(),)

    def document(self) -> dict[str, Any]:
        """As JSON."""
        body = self.body.document() if self.body else []
        return {"body": body, "number": self.number, "has_records": self.has_records}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> BodyLayout:
        """Undo ``document``.

        Raises:
            ValueError: It is none (likewise ``LookupError`` and ``TypeError``).
        """
        check_ints((document["number"],), "a layout")
        body = BodyColumns.of(document["body"]) if document["body"] else None
        return cls(body, document["number"], document["has_records"] is True)


PLAIN = BodyLayout()
