"""Readers of the Spark sources: plans on the driver, rows of partitions on the workers (``tiered.archive.datasource``).

Whoever imports this module needs pyspark.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, InputPartition

from tiered.api.arrow import load_pyarrow
from tiered.api.stores import backend_errors
from tiered.archive.ranges import ObjectFile
from tiered.archive.selection import shown
from tiered.archive.source.options import TierStates, choice, open_place, partition_bytes
from tiered.archive.source.stretches import FAIL, SKIP, packed, plan_tier, read_stretch
from tiered.archive.tables import groups_of, open_parquet, plan_files, read_archive

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa

    from tiered.archive.selection import Selection
    from tiered.archive.source.stretches import Stretch
    from tiered.archive.tables import Chosen

BATCH_ROWS = 10_000
_PIECE = ("broker", "queue_id", "incarnation", "queue_offset")


@dataclass
class FilePartition(InputPartition):
    """One file of an archive; none when nothing is to be read."""

    file: Chosen | None


@dataclass
class TierPartition(InputPartition):
    """Stretches of a tier, read one after another."""

    stretches: tuple[Stretch, ...]


class SourceReader(DataSourceReader):
    """What both have in common."""

    def __init__(self, options: Mapping[str, str], columns: pa.Schema, wanted: Selection) -> None:
        self._options = options
        self._columns = columns
        self._wanted = wanted


class ArchiveReader(SourceReader):
    """Plans on the driver, reads on the workers."""

    def partitions(self) -> Sequence[InputPartition]:
        """One for each file that may hold what is wanted; without any, one that is empty."""
        with backend_errors():
            store = open_place(self._options)
            try:
                found = plan_files(read_archive(store), self._wanted)
            finally:
                store.close()
        return [FilePartition(file) for file in found.files] or [FilePartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Rows of one file."""
        assert isinstance(partition, FilePartition)
        if partition.file is None:
            return
        with backend_errors():
            store = open_place(self._options)
            try:
                chosen = partition.file
                raw = ObjectFile(store, chosen.key, chosen.size_bytes)
                file = open_parquet(raw)
                groups, _ = groups_of(raw, file, self._wanted)
                is_shared = chosen.rows != file.metadata.num_rows
                needed = ["queue_offset", *self._columns.names, *self._wanted.columns]
                needed += _PIECE if is_shared else ()
                there = [name for name in dict.fromkeys(needed) if name in file.schema_arrow.names]
                for batch in file.iter_batches(BATCH_ROWS, row_groups=groups, columns=there):
                    counted = _of_pieces(batch, chosen) if is_shared else batch
                    yield fitted(self._wanted.rows_of(counted), self._columns)
            finally:
                store.close()


class TierBatchReader(SourceReader):
    """Plans by the journal on the driver, reads on the workers."""

    def partitions(self) -> Sequence[InputPartition]:
        """Whole segments, small ones together; without any, one that is empty."""
        with backend_errors():
            states = TierStates(self._options)
            try:
                plan = plan_tier(states.read(), self._wanted)
            finally:
                states.close()
        groups = packed(plan.stretches, partition_bytes(self._options))
        return [TierPartition(group) for group in groups] or [TierPartition(())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Rows of one partition."""
        assert isinstance(partition, TierPartition)
        yield from read_partition(self._options, partition, self._wanted, self._columns)


def read_partition(
    options: Mapping[str, str], partition: TierPartition, wanted: Selection, columns: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Rows of some stretches of a tier."""
    on_bad = choice(options, "on-bad", (FAIL, SKIP))
    with backend_errors():
        store = open_place(options)
        try:
            for stretch in partition.stretches:
                found = read_stretch(store, stretch, wanted, names=columns.names, on_bad=on_bad)
                for rows in found:
                    for start in range(0, rows.num_rows, BATCH_ROWS):
                        yield fitted(rows.slice(start, BATCH_ROWS), columns)
        finally:
            store.close()


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


def _of_pieces(rows: pa.RecordBatch, chosen: Chosen) -> pa.RecordBatch:
    """The rows that count, of a file that holds others too."""
    compute = load_pyarrow().compute
    mask: Any = None
    for piece in chosen.pieces:
        lane, offsets = piece.lane, rows.column("queue_offset")
        some = compute.equal(rows.column("broker"), shown(lane.broker))
        some = compute.and_(some, compute.equal(rows.column("queue_id"), lane.queue_id))
        some = compute.and_(some, compute.equal(rows.column("incarnation"), lane.incarnation))
        some = compute.and_(some, compute.greater_equal(offsets, piece.low))
        some = compute.and_(some, compute.less(offsets, piece.high))
        mask = some if mask is None else compute.or_(mask, some)
    return rows.filter(mask)
