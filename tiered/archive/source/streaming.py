"""A tier as a stream of Spark: micro-batches of what has been committed since the last one, read by the workers.

Overview: the driver follows the journals and gives Spark positions (``positions.py``), which go into the query's
checkpoint; a batch's partitions are stretches of the tier, as with a batch query. Spark writes the end of a batch down
before the batch begins, so after a crash the same batch is done again with the same rows; with a sink that knows its batches
(files, or ``foreachBatch`` that is idempotent by batch) each message comes out once.

Order: within a queue by offset, one partition after another; between queues none.

With ``availableNow`` the end is pinned when the query starts, and limits divide the way there into batches.

Threads: Spark calls from one at a time.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from tiered.archive.model import Lane
from tiered.archive.source.options import choice, partition_bytes, whole
from tiered.archive.source.positions import (
    EARLIEST,
    LATEST,
    document_of,
    latest,
    positions_of,
    queues_of,
    start_of,
)
from tiered.archive.source.readers import TierPartition, read_partition
from tiered.archive.source.stream_plan import AGAIN, Rules, advance, batch_of
from tiered.archive.source.stretches import FAIL, SKIP, packed
from tiered.archive.source.tier_states import TierStates
from tiered.errors import InvalidError
from tiered.plugin.stores import backend_errors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa

    from tiered.archive.selection import Selection
    from tiered.archive.source.positions import Key, Positions
    from tiered.log.parts import TierState
    from tiered.plugin.place import Place

_log = logging.getLogger(__name__)


class TierStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """See the module."""

    def __init__(self, options: Mapping[str, str], columns: pa.Schema, wanted: Selection) -> None:
        """Read nothing yet.

        Args:
            options: Of the source.
            columns: What rows have.
            wanted: Which of them.

        Raises:
            InvalidError: An option is wrong.
        """
        self._options = options
        self._columns = columns
        self._wanted = wanted
        self._rules = Rules(
            choice(options, "on-gap", (FAIL, SKIP)),
            choice(options, "on-take-back", (FAIL, AGAIN, SKIP)),
        )
        self._start = _start_option(options.get("start", EARLIEST))
        self._limit = _limit_option(options)
        self._states: TierStates | None = None
        self._seen: dict[Place, TierState] = {}
        self._is_pinned = False

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 (Spark's name)
        """Where the stream begins when there is no checkpoint."""
        return document_of(start_of(self._states_to_see(), self._start))

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """From now on nothing new is seen."""
        self._seen = self._read()
        self._is_pinned = True

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """By the options ``max-messages`` or ``max-bytes``."""
        return self._limit

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Where the batch ends that begins at ``start``; the same when there is nothing to read."""
        before = positions_of(start)
        end = advance(
            self._states_to_see(),
            before,
            self._rules,
            takes=self._takes,
            rows_max=limit.max_rows if isinstance(limit, ReadMaxRows) else None,
            bytes_max=limit.max_bytes if isinstance(limit, ReadMaxBytes) else None,
        )
        _tell(before, end)
        return start if end is before else document_of(end)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Where the tier ends, as last seen."""
        found = {k: latest(lives) for k, lives in queues_of(self._seen) if self._takes(k)}
        return document_of(found) or None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """What a batch reads."""
        if start == end:
            return []
        stretches = batch_of(self._read(), positions_of(end), self._wanted, self._rules)
        groups = packed(stretches, partition_bytes(self._options))
        return [TierPartition(group) for group in groups]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Rows of one partition."""
        assert isinstance(partition, TierPartition)
        yield from read_partition(self._options, partition, self._wanted, self._columns)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing: the checkpoint is Spark's, and the tier knows of no readers."""

    def stop(self) -> None:
        """Close the store."""
        if self._states is not None:
            self._states.close()
            self._states = None

    def _states_to_see(self) -> dict[Place, TierState]:
        """As of now, or as of the moment at which they were pinned."""
        if not self._is_pinned:
            self._seen = self._read()
        return self._seen

    def _read(self) -> dict[Place, TierState]:
        with backend_errors():
            if self._states is None:
                self._states = TierStates(self._options)
            return self._states.read()

    def _takes(self, key: Key) -> bool:
        return not self._wanted.refuses(Lane(*key, 0))


def _tell(before: Positions, end: Positions) -> None:
    """Say what was gone over."""
    for key, at in end.items():
        lost = at.lost - (before[key].lost if key in before else 0)
        if lost:
            _log.warning(
                "%s/%s: %s messages are not there and left out", key.topic, key.queue_id, lost
            )


def _start_option(text: str) -> Any:  # noqa: ANN401 (JSON values)
    if text in {EARLIEST, LATEST}:
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidError(
            f"the option start is {text!r:.80}",
            do='say earliest, latest, or {"topic": {"0": offset}}',
        ) from error


def _limit_option(options: Mapping[str, str]) -> ReadLimit:
    rows, size = whole(options, "max-messages", None), whole(options, "max-bytes", None)
    if rows and size:
        raise InvalidError("max-messages and max-bytes are given both", do="give one of them")
    if rows:
        return ReadMaxRows(rows)
    return ReadMaxBytes(size) if size else ReadAllAvailable()
