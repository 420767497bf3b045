"""Spark reads an archive, or a tier itself, through this program's own client.

How to use it::

    register(spark)
    spark.read.format("tieredmq").option("topic", "orders").load("s3://bucket2/parquet")

``tieredmq`` looks at the place to see which of both it is; ``rmq_archive`` and ``rmq_tier`` say so, as the option ``source``
does. Of an archive exactly the files that its log names are read, a partition each; of a tier what is committed, sealed or
not, in partitions of whole segments. Both have the same columns. docs/spark.md lists the options.

What is not needed is not read: files, parts and row groups by options; columns by ``.schema("queue_offset long")``, since
Spark does not tell a source written in Python which columns it wants.

Filters of a query are not handed down: Spark (4.3 does) keeps what a source written in Python was handed with the frame, on
its own side of the socket, and reads another query of the same frame by it, which then misses rows. No source can mend that.

Threads and retries: a reader is pickled and used in workers, one partition at a time each; whatever fails, Spark does a
partition again, and gets the same rows.

Importing this module needs pyspark.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from functools import partial, reduce, wraps
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar

import numpy as np
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from backends.lazy_dataclass import dataclass
from tiered.api.arrow import load_pyarrow
from tiered.api.stores import backend_errors
from tiered.archive.bodies import BodyLayout
from tiered.archive.checked_ranges import ObjectFile
from tiered.archive.columns import every_schema, topic_schema
from tiered.archive.columns import schema as archive_schema
from tiered.archive.plan import filled
from tiered.archive.selection import selection_of, shown
from tiered.archive.tables import OF_ROW_RANGES, groups_of, open_parquet, plan_files, read_archive
from tiered.errors import InvalidError, TieredStoreError
from tiered.spark.offset_ranges import (
    FAIL,
    SKIP,
    FetchedStore,
    packed,
    plan_pinned,
    plan_tier,
    queues_of,
    read_range,
    require_own,
    require_topics,
)
from tiered.spark.options import (
    ARCHIVE,
    OF_STREAM,
    OF_TIER,
    READ,
    SOME,
    TIER,
    TierStates,
    at_archive,
    at_place,
    choice,
    isolation_option,
    kind_of,
    partition_bytes,
    plain_names,
    require_columns,
    require_isolation,
    require_known,
    require_values,
    takes,
    unpacked,
    whole,
)
from tiered.spark.positions import (
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
    require_same,
    start_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import pyarrow as pa

    from backends.base import ObjectStore
    from tiered.api.broker_place import Place
    from tiered.archive.machine import ArchiveState
    from tiered.archive.selection import Selection
    from tiered.archive.tables import Chosen
    from tiered.log.parts import TierState
    from tiered.spark.offset_ranges import Key, OffsetRange
    from tiered.spark.positions import Histories, Positions

_log = logging.getLogger(__name__)
WAIT = "wait"


Of = ParamSpec("Of")
T = TypeVar("T")


def register(session: Any) -> None:  # noqa: ANN401 (pyspark has no types)
    """Make the sources known to a session.

    On this machine alone (``local[…]``) its workers run the Python that runs here, unless ``PYSPARK_PYTHON`` names one:
    ``python3`` of the search path, which Spark takes otherwise, may know nothing of this package.
    """
    context = getattr(session, "_sc", None)  # Spark Connect has none
    if context is not None and context.master.startswith("local") and not _NAMED & set(os.environ):
        context.pythonExec = sys.executable
    for source in (TieredSource, ArchiveSource, TierSource):
        session.dataSource.register(source)


_NAMED = {"PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"}


@contextlib.contextmanager
def _in_a_sentence() -> Iterator[None]:
    """An error that is ours says all that there is to say: Spark puts its sentence alone into its own, without a traceback.

    In a worker only, which ends with an error, so nobody else's tracebacks are hidden; and of batches only: what plans a
    stream ends in an error of Spark's own after ours, which then is to be seen in the traceback alone.
    """
    try:
        yield
    except TieredStoreError:
        if os.environ.get("SPARK_PYTHON_RUNTIME") == "PYTHON_WORKER":
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise


def plainly(method: Callable[Of, T]) -> Callable[Of, T]:
    """What Spark calls in a worker."""

    @wraps(method)
    def run(*of: Of.args, **named: Of.kwargs) -> T:
        with _in_a_sentence():
            return method(*of, **named)

    return run


def plainly_each(
    method: Callable[Of, Iterator[T]],
) -> Callable[Of, Iterator[T]]:
    """The same of an iterator."""

    @wraps(method)
    def run(*of: Of.args, **named: Of.kwargs) -> Iterator[T]:
        with _in_a_sentence():
            yield from method(*of, **named)

    return run


class TieredSource(DataSource):
    """Either of both; see the module."""

    kind: ClassVar[str | None] = None

    @classmethod
    def name(cls) -> str:
        """What ``format`` takes."""
        return "tieredmq"

    @plainly
    def schema(self) -> Any:  # noqa: ANN401
        """All columns that every file has; of one topic of an archive also those of decoded bodies."""
        options = plain_names(self.options)
        topics = selection_of(options).texts.get("topic", frozenset())
        if kind_of(options, self.kind) != ARCHIVE:
            return spark_schema(tier_schema(options))
        state = _state(options)
        return spark_schema(
            topic_schema(state, _exactly(state, next(iter(topics))))
            if len(topics) == 1
            else every_schema(state)
        )

    @plainly
    def reader(self, schema: Any) -> DataSourceReader:  # noqa: ANN401
        """A reader of the columns of ``schema``, some of ours in any order."""
        options = plain_names(self.options)
        is_archive = kind_of(options, self.kind) == ARCHIVE
        require_known(options, READ if is_archive else READ | OF_TIER)
        require_values(options)
        wanted, columns = selection_of(options), _arrow_schema(schema)
        require_columns(
            columns.names,
            partial(_archive_columns if is_archive else tier_columns, options, wanted),
        )
        kind: type[SourceReader] = ArchiveReader if is_archive else TierBatchReader
        return kind(options, columns, wanted)

    def streamReader(self, schema: Any) -> TierStreamReader:  # noqa: N802, ANN401 (Spark's name)
        """A reader of what comes into a tier."""
        options = plain_names(self.options)
        if kind_of(options, self.kind) == ARCHIVE:
            raise InvalidError(
                "an archive is no stream", do="read it as a batch, or give the tier's URL"
            )
        require_known(options, (READ | OF_TIER | OF_STREAM) - {"pinned"})
        require_values(options)
        columns, wanted = _arrow_schema(schema), selection_of(options)
        require_columns(columns.names, partial(tier_columns, options, wanted))
        return TierStreamReader(options, columns, wanted)


class ArchiveSource(TieredSource):
    """An archive."""

    kind = ARCHIVE

    @classmethod
    def name(cls) -> str:
        """What ``format`` takes."""
        return "rmq_archive"


class TierSource(TieredSource):
    """A tier."""

    kind = TIER

    @classmethod
    def name(cls) -> str:
        """What ``format`` takes."""
        return "rmq_tier"


def spark_schema(columns: pa.Schema) -> Any:  # noqa: ANN401
    """Columns in Spark's words."""
    from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415 (heavy)

    return from_arrow_schema(columns)


def _exactly(state: ArchiveState, topic: str) -> str:
    return next((queue.topic for queue in state.queues if shown(queue.topic) == topic), topic)


def _state(options: Mapping[str, str]) -> ArchiveState:
    with at_place(options) as store:
        state = read_archive(store)
    require_isolation(options, state)
    return state


def tier_schema(options: Mapping[str, str]) -> pa.Schema:
    """All columns of a tier's messages, and of the archive's beside it."""
    with backend_errors(), contextlib.closing(TierStates(options)) as states:
        kinds = [state.store.get("kind") for state in states.read().values()]
    return archive_schema(BodyLayout(is_kafka="kafka" in kinds))


def tier_columns(options: Mapping[str, str], wanted: Selection) -> frozenset[str]:  # noqa: ARG001 (of archives)
    """Their names."""
    return frozenset(tier_schema(options).names)


def _archive_columns(options: Mapping[str, str], wanted: Selection) -> frozenset[str]:
    """Columns of an archive that only some files have: Kafka's, and what the log has fixed for bodies of wanted topics."""
    state, topics = _state(options), wanted.texts.get("topic")
    read = (topic for topic in state.bodies if topics is None or shown(topic) in topics)
    bodies = (name for topic in read for name in topic_schema(state, topic).names)
    return frozenset((*every_schema(state).names, *SOME, *bodies))


def _arrow_schema(schema: Any) -> pa.Schema:  # noqa: ANN401
    from pyspark.sql.pandas.types import to_arrow_schema  # noqa: PLC0415 (heavy)

    return to_arrow_schema(schema, timezone="UTC")


# -- what both read --------------------------------------------------------------------------------

BATCH_ROWS = 10_000


@dataclass
class FilePartition(InputPartition):
    """Files of an archive, read one after another; none when nothing is to be read."""

    files: tuple[Chosen, ...]


@dataclass
class TierPartition(InputPartition):
    """OffsetRanges of a tier, read one after another."""

    offset_ranges: tuple[OffsetRange, ...]


class SourceReader(DataSourceReader):
    """What both have in common."""

    def __init__(self, options: Mapping[str, str], columns: pa.Schema, wanted: Selection) -> None:
        self._options = options
        self._columns = columns
        self._wanted = wanted


class ArchiveReader(SourceReader):
    """Plans on the driver, reads on the workers."""

    @plainly
    def partitions(self) -> Sequence[InputPartition]:
        """One for each file that may hold what is wanted; without any, one that is empty."""
        found = plan_files(_state(self._options), self._wanted)
        return [FilePartition((file,)) for file in found.files] or [FilePartition(())]

    @plainly_each
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Rows of one partition."""
        assert isinstance(partition, FilePartition)
        with at_place(self._options) as store:
            yield from _read_files(store, partition, self._wanted, self._columns)


class TierBatchReader(SourceReader):
    """Plans by the journal, and by the log of an archive beside the tier, on the driver; reads on the workers."""

    @plainly
    def partitions(self) -> Sequence[InputPartition]:
        """Files of the archive, then whole bundles of the tier, small ones together; without any, one that is empty."""
        wanted, pins = self._wanted, self._options.get("pinned")
        with backend_errors(), contextlib.closing(TierStates(self._options)) as states:
            found, level = states.read(), isolation_option(self._options)
            mine = partial(takes, self._options, wanted)
            plan = (
                plan_tier(found, wanted, states.archive, mine, isolation=level)
                if pins is None
                else plan_pinned(found, wanted, states.archive, unpacked(pins), level)
            )
        made = partitions_of(self._options, plan.files.values(), plan.offset_ranges)
        return made or [TierPartition(())]

    @plainly_each
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Rows of one partition."""
        yield from read_partition(self._options, partition, self._wanted, self._columns)


def partitions_of(
    options: Mapping[str, str], files: Iterable[Chosen], offset_ranges: Sequence[OffsetRange]
) -> list[InputPartition]:
    """What is read at once: of an archive files, of a tier what lies in the same bundles; each of so many bytes."""
    most = partition_bytes(options)
    groups = filled(files, lambda file: file.size_bytes, most)
    found: list[InputPartition] = [FilePartition(tuple(group)) for group in groups]
    return [*found, *map(TierPartition, packed(offset_ranges, most))]


def read_partition(
    options: Mapping[str, str], partition: InputPartition, wanted: Selection, columns: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Rows of a partition of a tier, or of the archive beside it."""
    if isinstance(partition, FilePartition):
        with at_archive(options) as store:
            yield from _read_files(store, partition, wanted, columns)
        return
    assert isinstance(partition, TierPartition)
    on_bad = choice(options, "on-bad", (FAIL, SKIP))
    with at_place(options) as store:
        fetched = FetchedStore(store, partition.offset_ranges)
        rows = (
            some
            for one in partition.offset_ranges
            for some in read_range(fetched, one, wanted, names=columns.names, on_bad=on_bad)
        )
        yield from (fitted(some, columns) for some in _batched(rows))


def _batched(rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows, in batches that are neither large nor, where that costs nothing, small."""
    arrow = load_pyarrow()
    waiting: list[pa.RecordBatch] = []
    count = 0
    for some in chain(rows, [None]):
        if waiting and (some is None or count + some.num_rows > BATCH_ROWS):
            whole = arrow.Table.from_batches(waiting).combine_chunks()
            yield from whole.to_batches(max_chunksize=BATCH_ROWS)
            waiting, count = [], 0
        if some is not None and some.num_rows:
            waiting.append(some)
            count += some.num_rows


def _read_files(
    store: ObjectStore, partition: FilePartition, wanted: Selection, columns: pa.Schema
) -> Iterator[pa.RecordBatch]:
    for chosen in partition.files:
        raw = ObjectFile(store, chosen.key, chosen.size_bytes)
        file = open_parquet(raw)
        groups, _ = groups_of(raw, file, wanted)
        is_shared = chosen.rows != file.metadata.num_rows
        needed = ["queue_offset", *columns.names, *wanted.columns]
        needed += OF_ROW_RANGES if is_shared else ()
        there = [name for name in dict.fromkeys(needed) if name in file.schema_arrow.names]
        for batch in file.iter_batches(BATCH_ROWS, row_groups=groups, columns=there):
            counted = batch
            if is_shared:
                masks = [mask for _, mask in chosen.masks(batch)]
                counted = batch.filter(load_pyarrow().array(reduce(np.bitwise_or, masks)))
            yield fitted(wanted.rows_of(counted), columns)


def fitted(rows: pa.RecordBatch, columns: pa.Schema) -> pa.RecordBatch:
    """Rows with exactly these columns; those that a file has not are null."""
    arrow = load_pyarrow()
    there = set(rows.schema.names)
    made = [
        rows.column(field.name).cast(field.type)
        if field.name in there
        else arrow.nulls(rows.num_rows, field.type)
        for field in columns
    ]
    return arrow.RecordBatch.from_arrays(made, schema=columns)


# -- streams ---------------------------------------------------------------------------------------
#
# Overview: the driver follows the journals and gives Spark positions (``tiered.spark.positions``), which go into
# the query's checkpoint; a batch's partitions are offset ranges of the tier, as with a batch query. Spark writes the
# end of a batch down before the batch begins, so after a crash the same batch is done again with the same rows;
# with a sink that knows its batches (files, or ``foreachBatch`` that is idempotent by batch) each message comes
# out once.
#
# Order: within a queue by offset, one partition after another; between queues none.
#
# With ``availableNow`` the end is pinned when the query starts, and limits divide the way there into batches.
# Each is planned from the tier as it is then, so what has expired meanwhile is seen.
#
# What a stream leaves out is in its positions, and in this log. What goes between the plan of a batch and its
# reading is said when the batch is begun and counted with the next plan, at once: nothing else has to come
# (``tiered.spark.positions`` has the one case in which a number stays in doubt). What goes while workers read is
# an error, and the batch is done again by the next start.
#
# Threads: Spark calls from one at a time.


@dataclass(frozen=True, slots=True)
class _Planned:
    """The batch that was begun last: where it ends, its partitions, and what had gone since it was planned."""

    end: Positions
    partitions: list[InputPartition]
    short: dict[Key, int]


class TierStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream of messages: an offset says how far each queue was read, a batch is what lies between two of them."""

    def __init__(self, options: Mapping[str, str], columns: pa.Schema, wanted: Selection) -> None:
        """Read nothing yet."""
        self._options = options
        self._columns = columns
        self._wanted = wanted
        self._rules = Rules(
            choice(options, "on-gap", (FAIL, SKIP)),
            choice(options, "on-truncation", (FAIL, AGAIN, SKIP)),
            isolation_option(options),
        )
        self._waits = choice(options, "on-missing-topic", (FAIL, WAIT)) == WAIT
        self._has_looked = False
        self._start = _start_option(options.get("start", EARLIEST))
        self._limit = _limit_option(options)
        self._states: TierStates | None = None
        self._histories: Histories = {}
        self._seen: Positions = {}
        self._until: Positions | None = None
        self._planned: _Planned | None = None
        self._was_whole: Positions | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 (Spark's name)
        """Where the stream begins when there is no checkpoint."""
        states = self._read()
        level = self._rules.isolation
        return self._document(start_of(states, self._start, self._takes, self._archive, level))

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
            archive=self._archive,
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
            states = self._read_from(end)
            batch = batch_of(
                states, positions, self._wanted, self._rules, self._takes, archive=self._archive
            )
            for key, count in batch.short.items():
                _say(key, count, "messages of a batch that was planned earlier are left out")
            made = partitions_of(self._options, batch.files, batch.offset_ranges)
            self._planned = _Planned(positions, made, batch.short)
        return self._planned.partitions

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Rows of one partition."""
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
        if self._rules.on_gap != SKIP or self._was_whole == before:
            return before
        mine = {key: at for key, at in before.items() if self._takes(key)}
        short = batch_of(states, mine, self._wanted, self._rules, archive=self._archive).short
        for key, count in short.items():
            text = "messages of the batch before, done by a process that is no more, have expired: if they had gone when it"
            _say(key, count, f"{text} came to them, its log says that they were left out")
        if not short:  # what is there at our start was there for it: what expires later was read
            self._was_whole = before
        return charged(before, lost={}, in_doubt=short)

    def _ends(self, states: dict[Place, TierState]) -> Positions:
        queues = queues_of(states, self._archive, self._rules.isolation)
        return {queue.key: latest(queue) for queue in queues if self._takes(queue.key)}

    def _read(self) -> dict[Place, TierState]:
        with backend_errors():
            if self._states is None:
                self._states = TierStates(self._options)
            states = self._states.read()
        # By each start: options may name others than those of the checkpoint.
        if not self._has_looked:
            self._look_for_topics(states)
            self._has_looked = True
        self._histories = {(at.cluster, at.broker): state.history for at, state in states.items()}
        return states

    def _look_for_topics(self, states: dict[Place, TierState]) -> None:
        require_own(states, self._archive, self._wanted, self._takes)
        try:
            require_topics(queues_of(states, self._archive, self._rules.isolation), self._wanted)
        except InvalidError as error:
            if not self._waits:
                raise
            _log.warning("%s: the stream waits for what comes", error)

    def _read_from(self, document: dict[str, Any]) -> dict[Place, TierState]:
        """The states, which have to be of the histories that a document of positions is of."""
        states = self._read()
        require_same(histories_of(document), self._histories)
        return states

    def _document(self, positions: Positions) -> dict[str, Any]:
        return document_of(positions, self._histories)

    @property
    def _archive(self) -> ArchiveState | None:
        return self._states.archive if self._states is not None else None

    def _takes(self, key: Key) -> bool:
        return takes(self._options, self._wanted, key)


def _say(key: Key, count: int, what: str) -> None:
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
