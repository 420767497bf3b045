"""Arrow record batches of messages of any store."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from tiered.api.arrow import ArrowMaker, load_pyarrow
from tiered.api.jmq_arrow import JMQ_COLUMNS, jmq_columns, jmq_schema
from tiered.api.kafka_arrow import KAFKA_COLUMNS, kafka_columns, kafka_schema
from tiered.format.record_kind import RecordKind
from tiered.log.messages import foreign_messages, kafka_records

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

    from tiered.log.decode import TierBatch


class AnyArrowMaker:
    """Makes record batches of messages of any store, in the words of that store. For one thread."""

    def __init__(self, columns: Sequence[str] | None) -> None:
        """Choose the columns.

        Raises:
            InvalidError: No store has such columns.
        """
        self._columns = columns
        named = set(columns or ())
        is_known = any(named <= set(known) for known in (KAFKA_COLUMNS, JMQ_COLUMNS))
        if not is_known or len(named) < len(columns or ()):
            self._usual  # noqa: B018 (it raises, or they are RocketMQ's)

    @cached_property
    def _usual(self) -> ArrowMaker:
        return ArrowMaker(self._columns)

    def make(self, batch: TierBatch, numbers: npt.NDArray[np.int64] | None) -> pa.RecordBatch:
        """As ``ArrowMaker.make``.

        Raises:
            InvalidError: Messages of this queue have no such column.
        """
        records, queue = batch.records, batch.records.queue
        if records.kind is RecordKind.ROCKETMQ:
            return self._usual.make(batch, numbers)
        if records.kind is RecordKind.KAFKA:
            wanted, found = kafka_schema(self._columns), kafka_records(records, numbers)
            made = kafka_columns(found, queue.topic, queue.queue_id, wanted.names)
        else:
            wanted = jmq_schema(self._columns)
            made = jmq_columns(foreign_messages(records, numbers), wanted.names)
        return load_pyarrow().RecordBatch.from_arrays(list(made.values()), schema=wanted)
