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

Whoever imports this module needs pyspark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pyspark.sql.datasource import DataSource, DataSourceReader

from tiered.api.stores import backend_errors
from tiered.archive.body.layout import ERROR, PREFIX, RECORD, TEXT
from tiered.archive.columns import schema as archive_schema
from tiered.archive.columns import topic_schema
from tiered.archive.selection import selection_of, shown
from tiered.archive.source.options import (
    ARCHIVE,
    OF_STREAM,
    OF_TIER,
    READ,
    TIER,
    kind_of,
    open_place,
    require_known,
    source_options,
)
from tiered.archive.source.readers import (
    ArchiveReader,
    SourceReader,
    TierBatchReader,
)
from tiered.archive.source.streaming import TierStreamReader
from tiered.archive.tables import read_archive
from tiered.errors import InvalidError, nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pyarrow as pa

    from tiered.archive.machine import ArchiveState
    from tiered.archive.selection import Selection

__all__ = ["DDL", "ArchiveSource", "TierSource", "TieredSource", "register", "source_options"]

DDL = (
    "topic string, queue_id int, queue_offset long, uniq_key string, msg_key string, keys array<string>, tag string,"
    " born_ts timestamp, store_ts timestamp, born_host string, store_host string, sys_flag int, flag int,"
    " body_crc long, reconsume_times int, prepared_tx_offset long, properties map<string,string>, body binary,"
    " physical_offset long, broker string, incarnation int"
)
"""The columns of docs/formats/archive.md in Spark's words."""
_SOME = (ERROR, TEXT, RECORD)
"""Columns that only some files have, whatever is in bodies."""


def register(session: Any) -> None:  # noqa: ANN401 (pyspark has no types)
    """Make the sources known to a session."""
    for source in (TieredSource, ArchiveSource, TierSource):
        session.dataSource.register(source)


class TieredSource(DataSource):
    """Either of both; see the module."""

    kind: ClassVar[str | None] = None

    @classmethod
    def name(cls) -> str:
        """What ``format`` takes."""
        return "tieredmq"

    def schema(self) -> Any:  # noqa: ANN401
        """All columns that every file has; of one topic of an archive also those of decoded bodies."""
        options = dict(self.options)
        topics = selection_of(options).texts.get("topic", frozenset())
        if len(topics) != 1 or kind_of(options, self.kind) != ARCHIVE:
            return DDL
        return _topic_schema(options, next(iter(topics)))

    def reader(self, schema: Any) -> DataSourceReader:  # noqa: ANN401
        """A reader of the columns of ``schema``, some of ours in any order."""
        options = dict(self.options)
        is_archive = kind_of(options, self.kind) == ARCHIVE
        require_known(options, READ if is_archive else READ | OF_TIER)
        wanted, columns = selection_of(options), _arrow_schema(schema)
        bodies = _columns_of_bodies(options, wanted) if is_archive else None
        _require_columns(columns.names, bodies)
        kind: type[SourceReader] = ArchiveReader if is_archive else TierBatchReader
        return kind(options, columns, wanted)

    def streamReader(self, schema: Any) -> TierStreamReader:  # noqa: N802, ANN401 (Spark's name)
        """A reader of what comes into a tier."""
        options = dict(self.options)
        if kind_of(options, self.kind) == ARCHIVE:
            raise InvalidError(
                "an archive is no stream", do="read it as a batch, or give the tier's URL"
            )
        require_known(options, READ | OF_TIER | OF_STREAM)
        columns = _arrow_schema(schema)
        _require_columns(columns.names, None)
        return TierStreamReader(options, columns, selection_of(options))


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


def _topic_schema(options: Mapping[str, str], topic: str) -> Any:  # noqa: ANN401
    from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415 (heavy)

    state = _state(options)
    named = next((lane.topic for lane in state.lanes if shown(lane.topic) == topic), topic)
    return from_arrow_schema(topic_schema(state, named))


def _state(options: Mapping[str, str]) -> ArchiveState:
    """Of an archive's log, as it is now."""
    with backend_errors():
        store = open_place(options)
        try:
            return read_archive(store)
        finally:
            store.close()


def _columns_of_bodies(
    options: Mapping[str, str], wanted: Selection
) -> Callable[[], frozenset[str]]:
    """Tells what the log has fixed for bodies of the topics that are wanted; it reads the log when it is asked."""

    def names() -> frozenset[str]:
        state, topics = _state(options), wanted.texts.get("topic")
        read = (topic for topic in state.bodies if topics is None or shown(topic) in topics)
        return frozenset(name for topic in read for name in topic_schema(state, topic).names)

    return names


def _arrow_schema(schema: Any) -> pa.Schema:  # noqa: ANN401
    from pyspark.sql.pandas.types import to_arrow_schema  # noqa: PLC0415 (heavy)

    return to_arrow_schema(schema, timezone="UTC")


def _require_columns(names: list[str], bodies: Callable[[], frozenset[str]] | None) -> None:
    """See that there are columns of these names: one that nobody has would be null in each row, and a slip go unseen."""
    if not names:  # batches without a column have no rows: there would be none, whatever there is
        raise InvalidError("no column is asked for", do=f"columns are {DDL}")
    known = {*archive_schema().names, *(_SOME if bodies else ())}
    if bodies and not known.issuperset(names):
        known |= bodies()
    for name in names:
        if name in known:
            continue
        meant, more = nearest(name, known, 0.75), sorted(n for n in known if n.startswith(PREFIX))
        ours = f"columns are {DDL}" + (f", and of bodies {', '.join(more)}" if more else "")
        do = f"did you mean {meant}?" if meant else ours
        raise InvalidError(f"there is no column {name} in what is read", do=do)
