"""A tier as a stream of Spark: micro-batches of what has been committed since the last one, read by the workers.

Overview: the driver follows the journals and gives Spark positions (``positions.py``), which go into the query's
checkpoint; a batch's partitions are stretches of the tier, as with a batch query. Spark writes the end of a batch down
before the batch begins, so after a crash the same batch is done again with the same rows; with a sink that knows its batches
(files, or ``foreachBatch`` that is idempotent by batch) each message comes out once.

Order: within a queue by offset, one partition after another; between queues none.

With ``availableNow`` the end is pinned when the query starts, and limits divide the way there into batches. Each is planned
from the tier as it is then, so what has expired meanwhile is seen.

What a stream leaves out is in its positions, and in this log. What goes between the plan of a batch and its reading is said
when the batch is begun and counted with the next plan, at once: nothing else has to come (``positions.py`` has the one case
in which a number stays in doubt). What goes while workers read is an error, and the batch is done again by the next start.

Threads: Spark calls from one at a time.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from tiered.api.stores import backend_errors
from tiered.archive.model import ArchiveLane
from tiered.archive.source.options import TierStates, choice, partition_bytes, whole
from tiered.archive.source.readers import TierPartition, read_partition
from tiered.archive.source.stream_plan import (
    AGAIN,
    EARLIEST,
    LATEST,
    Rules,
    advance,
    batch_of,
    charged,
    document_of,
    histories_of,
    latest,
    positions_of,
    queues_of,
    require_same,
    start_of,
)
from tiered.archive.source.stretches import FAIL, SKIP, packed
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa

    from tiered.api.broker_place import Place
    from tiered.archive.selection import Selection
    from tiered.archive.source.stream_plan import Histories, Key, Positions
    from tiered.log.parts import TierState

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Planned:
    """The batch that was begun last: where it ends, its partitions, and what had gone since it was planned."""

    end: Positions
    partitions: list[InputPartition]
    short: dict[Key, int]


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
        self._histories: Histories = {}
        self._seen: Positions = {}
        self._until: Positions | None = None
        self._planned: _Planned | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 (Spark's name)
        """Where the stream begins when there is no checkpoint."""
        return self._document(start_of(self._read(), self._start, self._takes))

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """From now on nothing new is read."""
        self._until = self._seen = self._ends(self._read())

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """By the options ``max-messages`` or ``max-bytes``."""
        return self._limit

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Where the batch ends that begins at ``start``; the same when there is nothing to read."""
        states, before = self._read_from(start), positions_of(start)
        if self._until is None:
            self._seen = self._ends(states)
        base = self._charged(states, before)
        end = advance(
            states,
            base,
            self._rules,
            takes=self._takes,
            until=self._until,
            rows_max=limit.max_rows if isinstance(limit, ReadMaxRows) else None,
            bytes_max=limit.max_bytes if isinstance(limit, ReadMaxBytes) else None,
        )
        for key, at in end.items():
            count = at.lost - (base[key].lost if key in base else 0)
            _say(key, count, "messages are not there and left out")
        if end is before:
            return start
        return self._document({k: at.settled for k, at in end.items()} if end is base else end)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Where the tier ends, as last seen."""
        return self._document(self._seen) or None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """What a batch reads. Asked again, a process says the same."""
        if start == end:
            return []
        positions = positions_of(end)
        if self._planned is None or self._planned.end != positions:
            batch = batch_of(
                self._read_from(end), positions, self._wanted, self._rules, self._takes
            )
            for key, count in batch.short.items():
                _say(key, count, "messages of a batch that was planned earlier are left out")
            groups = packed(batch.stretches, partition_bytes(self._options))
            self._planned = _Planned(positions, [TierPartition(g) for g in groups], batch.short)
        return self._planned.partitions

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

    def _charged(self, states: dict[Place, TierState], before: Positions) -> Positions:
        """Positions with what was left out of their batch beyond what they say, as far as that is known."""
        if self._planned is not None and self._planned.end == before:
            return charged(before, lost=self._planned.short, in_doubt={})
        if self._rules.on_gap != SKIP:
            return before
        mine = {key: at for key, at in before.items() if self._takes(key)}
        short = batch_of(states, mine, self._wanted, self._rules).short
        for key, count in short.items():
            text = "messages of the batch before, done by a process that is no more, have expired: if they had gone when it"
            _say(key, count, f"{text} came to them, its log says that they were left out")
        return charged(before, lost={}, in_doubt=short)

    def _ends(self, states: dict[Place, TierState]) -> Positions:
        return {key: latest(lives) for key, lives in queues_of(states) if self._takes(key)}

    def _read(self) -> dict[Place, TierState]:
        with backend_errors():
            if self._states is None:
                self._states = TierStates(self._options)
            states = self._states.read()
        self._histories = {(at.cluster, at.broker): state.history for at, state in states.items()}
        return states

    def _read_from(self, document: dict[str, Any]) -> dict[Place, TierState]:
        """The states, which have to be of the histories that a document of positions is of."""
        states = self._read()
        require_same(histories_of(document), self._histories)
        return states

    def _document(self, positions: Positions) -> dict[str, Any]:
        return document_of(positions, self._histories)

    def _takes(self, key: Key) -> bool:
        names = {"cluster": key.cluster, "broker": key.broker}
        if any(self._options.get(name) not in {None, text} for name, text in names.items()):
            return False
        return not self._wanted.refuses(ArchiveLane(*key, 0))


def _say(key: Key, count: int, what: str) -> None:
    """Log what was gone over."""
    if count:
        _log.warning("%s/%s: %s %s", key.topic, key.queue_id, count, what)


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
