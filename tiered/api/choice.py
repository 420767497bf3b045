"""Which messages of a batch are wanted, and in which form."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from tiered.errors import InvalidError
from tiered.model import TimestampMs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import pyarrow as pa

    from fetcher.filters import Filter
    from tiered.api.message import Message
    from tiered.log.decode import TierBatch


@dataclass(frozen=True, slots=True)
class Choice:
    """Messages that a filter lets pass.

    Attributes:
        wanted: The filter; None for all.
    """

    wanted: Filter | None

    @classmethod
    def of(cls, tags: str | None, sql: str | None) -> Choice:
        """Messages with these tags, or whose properties fulfil an expression.

        Raises:
            InvalidError: Both are given.
            FilterError: It is none.
        """
        if tags is not None and sql is not None:
            raise InvalidError("tags and sql contradict each other", do="give one of them")
        if tags is None and sql is None:
            return cls(None)
        from fetcher.filters import compile_filter  # noqa: PLC0415 - an optional dependency

        if sql is not None:
            return cls(compile_filter(sql, "SQL92"))
        return cls(compile_filter(tags or "", "TAG"))

    def lists(self, batches: Iterable[TierBatch]) -> Iterator[list[Message]]:
        """The wanted messages of each batch.

        Raises:
            DataError: A record or inner batch is damaged; nothing of its batch is given out.
        """
        from tiered.api.message import messages_of  # noqa: PLC0415 - commands that only list do without

        for batch in batches:
            numbers = None if self.wanted is None else self.wanted.select(batch.records)
            yield messages_of(batch, numbers)

    def messages(self, batches: Iterable[TierBatch]) -> Iterator[Message]:
        """The wanted messages, one by one; see ``lists``."""
        return (message for found in self.lists(batches) for message in found)

    def arrow(
        self, batches: Iterable[TierBatch], columns: Sequence[str] | None
    ) -> Iterator[pa.RecordBatch]:
        """The wanted messages as record batches, one of each batch that has any.

        Raises:
            InvalidError: No such column, or pyarrow is not installed; at once.
        """
        from tiered.api.arrow import ArrowMaker  # noqa: PLC0415 - an optional dependency

        maker = ArrowMaker(columns)
        made = (
            maker.make(batch, None if self.wanted is None else self.wanted.select(batch.records))
            for batch in batches
        )
        return (batch for batch in made if batch.num_rows)


def time_ms(time: int | datetime) -> TimestampMs:
    """UTC milliseconds of a time.

    Raises:
        InvalidError: A datetime without a time zone.
    """
    if not isinstance(time, datetime):
        return TimestampMs(time)
    if time.tzinfo is None:
        raise InvalidError(f"a time without a time zone: {time}", do="give it one")
    return TimestampMs(round(time.timestamp() * 1000))
