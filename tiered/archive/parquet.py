"""Writes Parquet files in memory, and reads them back to see that they say what they were told to.

Settings, each measured (docs/formats/archive.md): zstd level 1, row groups of 32,768 rows, a page index, dictionaries for
columns of few values only, bloom filters of the keys. Pages have checksums, and all blocks of the file, too
(``tiered.archive.ranges``).

Memory of one writer: the rows of a row group that is not full, ``GROUP_BYTES`` at most, and the file so far; at its end the
file twice, and a row group that is read back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from zlib_ng import zlib_ng

from tiered.api.arrow import load_pyarrow
from tiered.archive.columns import schema
from tiered.archive.ranges import require_sums, with_sums
from tiered.errors import DataError, InternalError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt
    import pyarrow as pa


# -- digests ---------------------------------------------------------------------------------------
#
# Checksums of the values in columns, whatever batches they come in: what a writer got is held against what is
# read back.
#
# Two tables have the same digest when they have the same columns with the same values in the same order, as
# surely as CRC-32 tells. No Python code runs for each value.

_BYTE = 8


@dataclass(slots=True)
class Digest:
    """Of all rows so far.

    Attributes:
        rows: How many.
        crcs: By place and kind of what was added up there.
    """

    rows: int = 0
    crcs: dict[str, int] = field(default_factory=dict)

    def add(self, rows: pa.RecordBatch | pa.Table) -> None:
        """Add rows behind those so far."""
        batches = rows.to_batches() if isinstance(rows, load_pyarrow().Table) else [rows]
        for batch in batches:
            self.rows += batch.num_rows
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                self._fold(name, column)

    def _fold(self, place: str, values: Any) -> None:  # noqa: ANN401 (pyarrow has no types)
        arrow = load_pyarrow()
        kinds, kind = arrow.types, values.type
        valid = values.is_valid().cast(arrow.uint8()).to_numpy()
        self._take(f"{place} there", valid)
        if kinds.is_struct(kind):
            for child, part in zip(kind, values.flatten(), strict=True):
                self._fold(f"{place}.{child.name}", part)
        elif kinds.is_list(kind) or kinds.is_map(kind):
            offsets = values.offsets.to_numpy()
            lengths = np.where(valid, np.diff(offsets), 0)
            self._take(f"{place} lengths", lengths.astype(np.int64))
            self._fold(f"{place}[]", _elements(values, offsets, valid))
        elif kinds.is_binary(kind) or kinds.is_string(kind):
            self._fold_bytes(f"{place} {kind}", values)
        else:
            self._take(f"{place} {kind}", _fixed(values, valid))

    def _fold_bytes(self, place: str, values: Any) -> None:  # noqa: ANN401
        known = values.fill_null(b"" if values.type == load_pyarrow().binary() else "")
        _, offsets, data = known.buffers()
        bounds = np.frombuffer(offsets, np.int32)[known.offset : known.offset + len(known) + 1]
        self._take(f"{place} lengths", np.diff(bounds))
        if data is not None and len(bounds):
            self._take(place, memoryview(data)[bounds[0] : bounds[-1]])

    def _take(self, place: str, data: Any) -> None:  # noqa: ANN401 (a buffer)
        whole = np.ascontiguousarray(data) if isinstance(data, np.ndarray) else data
        self.crcs[place] = zlib_ng.crc32(whole, self.crcs.get(place, 0))


def _elements(values: Any, offsets: Any, valid: Any) -> Any:  # noqa: ANN401
    """The elements of all lists that are there; a null one may have some behind it all the same."""
    inner = _inner(values)
    if valid.all() or (np.diff(offsets)[valid == 0] == 0).all():
        return inner.slice(offsets[0], offsets[-1] - offsets[0])
    spans = np.repeat(valid, np.diff(offsets)).astype(bool)
    return inner.slice(offsets[0], offsets[-1] - offsets[0]).filter(load_pyarrow().array(spans))


def _inner(values: Any) -> Any:  # noqa: ANN401
    arrow = load_pyarrow()
    if not arrow.types.is_map(values.type):
        return values.values
    return arrow.StructArray.from_arrays([values.keys, values.items], ["key", "value"])


def _fixed(values: Any, valid: Any) -> Any:  # noqa: ANN401
    """Values that take the same number of bytes each; of a null one nothing counts."""
    arrow = load_pyarrow()
    if arrow.types.is_boolean(values.type):
        values = values.cast(arrow.uint8())
    width = values.type.bit_width // _BYTE
    _, data = values.buffers()
    found = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    found = found[values.offset * width : (values.offset + len(values)) * width]
    return found if valid.all() else found.reshape(-1, width) * valid[:, None]


# -- files -----------------------------------------------------------------------------------------

GROUP_ROWS = 32_768
GROUP_BYTES = 64 << 20
"""A row group is ended when its columns take so many bytes, even with fewer rows."""
_DICTIONARIES = [
    *("topic", "queue_id", "tag", "born_host", "store_host", "sys_flag", "flag"),
    *("reconsume_times", "prepared_tx_offset", "broker", "incarnation"),
    *("properties.key_value.key",),
]
_KEYS = ("uniq_key", "msg_key", "keys.list.element")
_FALSE_HITS = 0.01


@dataclass(frozen=True, slots=True)
class Written:
    """A finished file and what is in it.

    Attributes:
        data: Its bytes.
        crc: CRC-32 of them.
        low: Queue offset of the first row.
        high: One past that of the last.
        rows: How many.
        store_min_ms: Smallest store time.
        store_max_ms: Greatest.
        body_crc_sum: Sum of the records' own body CRCs.
        body_bytes: Sum of the bodies' sizes.
    """

    data: Any
    crc: int
    low: int
    high: int
    rows: int
    store_min_ms: int
    store_max_ms: int
    body_crc_sum: int
    body_bytes: int


@dataclass(slots=True)
class FileWriter:
    """One file under way. One thread.

    Attributes:
        size_bytes: Bytes that the columns took so far, before they were packed.
    """

    size_bytes: int = 0
    _sink: Any = None
    _writer: Any = None
    _waiting: list[Any] = field(default_factory=list)
    _waiting_rows: int = 0
    _waiting_bytes: int = 0
    _offsets: list[npt.NDArray[np.int64]] = field(default_factory=list)
    _crcs: list[npt.NDArray[np.int64]] = field(default_factory=list)
    _times: list[npt.NDArray[np.int64]] = field(default_factory=list)
    _body_bytes: int = 0
    _given: Digest = field(default_factory=Digest)

    def add(self, rows: pa.RecordBatch) -> None:
        """Take rows, of greater queue offsets than those before."""
        compute = load_pyarrow().compute
        self._given.add(rows)
        self._offsets.append(rows.column("queue_offset").to_numpy())
        self._crcs.append(rows.column("body_crc").to_numpy())
        self._times.append(_millis(rows.column("store_ts")))
        self._body_bytes += compute.sum(compute.binary_length(rows.column("body"))).as_py() or 0
        size = rows.get_total_buffer_size()
        self.size_bytes += size
        self._waiting.append(rows)
        self._waiting_rows += rows.num_rows
        self._waiting_bytes += size
        while self._waiting_rows >= GROUP_ROWS:
            self._write_group(GROUP_ROWS)
        if self._waiting_bytes >= GROUP_BYTES:
            self._write_group(self._waiting_rows)

    def finish(self, metadata: Mapping[str, str]) -> Written:
        """End the file, and hold what it says against what it was given.

        Args:
            metadata: Where it comes from; the proof is added.

        Raises:
            InternalError: It says something else. Nothing of it may be kept.
        """
        if self._waiting_rows:
            self._write_group(self._waiting_rows)
        offsets, crcs = np.concatenate(self._offsets), np.concatenate(self._crcs)
        times = np.concatenate(self._times)
        bounds = int(offsets[0]), int(offsets[-1]) + 1
        proof = (
            len(offsets),
            int(times.min()),
            int(times.max()),
            int(crcs.sum()),
            self._body_bytes,
        )
        names = ("rows", "store_min_ms", "store_max_ms", "body_crc_sum", "body_bytes")
        known = {f"tiered.{name}": str(value) for name, value in zip(names, proof, strict=True)}
        known |= {"tiered.low": str(bounds[0]), "tiered.high": str(bounds[1])}
        self._writer.add_key_value_metadata({**metadata, **known})
        self._writer.close()
        data = with_sums(self._sink.getvalue())
        require_equal(data, self._given)
        return Written(data, zlib_ng.crc32(data), *bounds, *proof)

    def _write_group(self, count: int) -> None:
        arrow = load_pyarrow()
        table = arrow.Table.from_batches(self._waiting)
        if self._writer is None:
            self._sink = arrow.BufferOutputStream()
            self._writer = open_writer(self._sink, table.schema, count)
        self._writer.write_table(table.slice(0, count), row_group_size=count)
        rest = table.slice(count)
        self._waiting = rest.to_batches()
        self._waiting_rows, self._waiting_bytes = rest.num_rows, rest.nbytes


def open_writer(sink: Any, columns: pa.Schema, group_rows: int) -> Any:  # noqa: ANN401 (pyarrow has no types)
    """A writer whose filters fit row groups of so many rows; a small file has small ones."""
    from pyarrow import parquet  # noqa: PLC0415 (heavy; only who writes)

    return parquet.ParquetWriter(
        sink,
        columns,
        compression="zstd",
        compression_level=1,
        use_dictionary=_DICTIONARIES,
        write_page_index=True,
        write_page_checksum=True,
        bloom_filter_options={key: {"ndv": group_rows, "fpp": _FALSE_HITS} for key in _KEYS},
        sorting_columns=[parquet.SortingColumn(columns.get_field_index("queue_offset"))],
    )


def require_equal(data: Any, given: Digest) -> None:  # noqa: ANN401 (a buffer)
    """See that a file has exactly the rows that were given to its writer: every column is read back, bodies too.

    Raises:
        InternalError: It does not reconcile with its source.
    """
    arrow, found = load_pyarrow(), Digest()
    try:
        require_sums(data)
        file = open_whole(data)
        for number in range(file.num_row_groups):
            found.add(file.read_row_group(number))
    except (DataError, arrow.ArrowException, OSError) as error:
        raise InternalError(f"a file cannot be read back, and is not published: {error}") from error
    if found != given:
        raise InternalError("a file does not reconcile with its source, and is not published")


def open_whole(data: Any) -> Any:  # noqa: ANN401 (a buffer)
    """A file in memory; its pages are held against their checksums when they are read."""
    from pyarrow import parquet  # noqa: PLC0415 (heavy)

    return parquet.ParquetFile(load_pyarrow().BufferReader(data), page_checksum_verification=True)


def read_columns(data: Any) -> pa.Table:  # noqa: ANN401
    """All rows of a file in memory, if it is as it was written.

    Raises:
        DataError: It is not.
    """
    arrow = load_pyarrow()
    require_sums(data)
    try:
        return open_whole(data).read()
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"this is no whole Parquet file: {error}") from error


def read_metadata(data: Any) -> dict[str, str]:  # noqa: ANN401 (a buffer)
    """What a file says of itself.

    Raises:
        DataError: It is no whole Parquet file.
    """
    arrow = load_pyarrow()
    try:
        found = open_whole(data).metadata.metadata or {}
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"this is no whole Parquet file: {error}") from error
    return {
        name.decode(): value.decode() for name, value in found.items() if name[:7] == b"tiered."
    }


def write_small(table: pa.Table) -> bytes:
    """A side file."""
    arrow = load_pyarrow()
    from pyarrow import parquet  # noqa: PLC0415 (heavy)

    sink = arrow.BufferOutputStream()
    parquet.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return with_sums(sink.getvalue())


def _millis(times: Any) -> npt.NDArray[np.int64]:  # noqa: ANN401
    micros: npt.NDArray[np.int64] = times.view(load_pyarrow().int64()).to_numpy()
    return micros // 1000


__all__ = [
    "FileWriter",
    "Written",
    "open_writer",
    "read_columns",
    "read_metadata",
    "schema",
    "write_small",
]
