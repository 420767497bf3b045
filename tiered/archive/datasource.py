"""Spark reads an archive as ``tieredmq``: exactly the files that the log names, through this program's own client.

How to use it::

    spark.dataSource.register(ArchiveSource)
    spark.read.format("tieredmq").option("topic", "orders").load("s3://bucket2/parquet")

Options: ``topic`` (required), ``from`` and ``until`` (store time, UTC ms: files outside are not read), ``queue``,
``endpoint-url``, ``region``, ``profile``, ``path-style``, ``ca-bundle``. One partition for each file. Spark does not tell a
source which columns it wants; ``.schema("queue_offset long, body binary")`` does, and the others are then not read.

Whoever imports this module needs pyspark.
"""

from __future__ import annotations

import io
import random
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from backends.s3_options import S3Options
from tiered.archive.columns import schema as archive_schema
from tiered.archive.ranges import ObjectFile
from tiered.archive.tables import Wanted, choose_files, read_archive
from tiered.clock import SystemClock
from tiered.errors import InvalidError
from tiered.plugin.arrow import load_pyarrow
from tiered.plugin.stores import open_metered, with_retries

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa

    from backends.base import ObjectStore

BATCH_ROWS = 10_000
_BUFFER_BYTES = 1 << 20
DDL = (
    "topic string, queue_id int, queue_offset long, uniq_key string, msg_key string, keys array<string>, tag string,"
    " born_ts timestamp, store_ts timestamp, born_host string, store_host string, sys_flag int, flag int,"
    " body_crc long, reconsume_times int, prepared_tx_offset long, properties map<string,string>, body binary,"
    " physical_offset long, broker string, incarnation int"
)
"""The columns of docs/formats/archive.md in Spark's words."""


def source_options(options: S3Options) -> dict[str, str]:
    """How to reach S3, as options of the source; headers and keys of encryption are not among them."""
    style = options.path_style
    texts = {
        "endpoint-url": options.endpoint_url,
        "region": options.region,
        "profile": options.profile,
        "path-style": None if style is None else str(style).lower(),
        "ca-bundle": options.ca_bundle,
    }
    return {name: text for name, text in texts.items() if text is not None}


@dataclass
class FilePartition(InputPartition):
    """One file of the archive."""

    key: str
    size_bytes: int


class ArchiveSource(DataSource):
    """The source; see the module."""

    @classmethod
    def name(cls) -> str:
        """What ``format`` takes."""
        return "tieredmq"

    def schema(self) -> str:
        """All columns."""
        return DDL

    def reader(self, schema: Any) -> ArchiveReader:  # noqa: ANN401
        """A reader of the columns of ``schema``, some of ours in any order."""
        columns = [field.name for field in schema.fields]
        unknown = set(columns) - set(archive_schema().names)
        if unknown or "topic" not in self.options:
            raise InvalidError(
                f"an archive has no column {min(unknown)}" if unknown else "no topic is given",
                do=f"columns are {DDL}" if unknown else 'say .option("topic", …)',
            )
        return ArchiveReader(dict(self.options), columns)


class ArchiveReader(DataSourceReader):
    """Plans on the driver, reads on the workers."""

    def __init__(self, options: Mapping[str, str], columns: list[str]) -> None:
        self._options = options
        self._columns = columns

    def partitions(self) -> Sequence[InputPartition]:
        """One for each file that may hold what is wanted; without any, one that is empty."""
        options = self._options
        until, queue = options.get("until"), options.get("queue")
        wanted = Wanted(
            options["topic"],
            int(options.get("from", 0)),
            None if until is None else int(until),
            None if queue is None else int(queue),
        )
        store = self._open()
        try:
            files, _ = choose_files(read_archive(store), wanted)
        finally:
            store.close()
        return [FilePartition(file.key, file.size_bytes) for file in files] or [
            FilePartition("", 0)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Rows of one file."""
        assert isinstance(partition, FilePartition)
        if not partition.key:
            return
        arrow = load_pyarrow()
        from pyarrow import parquet  # noqa: PLC0415 (heavy)

        store = self._open()
        try:
            raw = ObjectFile(store, partition.key, partition.size_bytes)
            file = parquet.ParquetFile(io.BufferedReader(raw, _BUFFER_BYTES), pre_buffer=True)
            for batch in file.iter_batches(BATCH_ROWS, columns=self._columns):
                arrays = [batch.column(name) for name in self._columns]
                yield arrow.RecordBatch.from_arrays(arrays, self._columns)
        finally:
            store.close()

    def _open(self) -> ObjectStore:
        style = self._options.get("path-style")
        options = S3Options(
            endpoint_url=self._options.get("endpoint-url"),
            region=self._options.get("region"),
            profile=self._options.get("profile"),
            path_style=None if style is None else style == "true",
            ca_bundle=self._options.get("ca-bundle"),
        )
        meter = open_metered(self._options["path"], options)
        rng = random.SystemRandom()
        return with_retries(meter, SystemClock(), rng, threading.Event())
