"""Writes Parquet files in memory, and reads them back to see that they say what they were told to.

Settings, each measured (docs/formats/archive.md): zstd level 1, row groups of 64 MiB of columns, a
page index, differences (DELTA) for offsets and times, dictionaries for columns of few values, bloom filters of the keys.
Pages have checksums, and all blocks of the file, too (``tiered.archive.checked_ranges``).

A file is made of *row ranges*: rows of one offset range each, in order of queue and offset. Files of segments
and of other files are all made here, so what proves a row range is reckoned in one way.

Memory of one writer: the rows of a row group that is not full, ``GROUP_BYTES`` and a batch, and the file so far; at its end
the file, and what is read back of it at once.
"""

from __future__ import annotations

import json
import struct
from dataclasses import field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from zlib_ng import zlib_ng

from backends.lazy_dataclass import dataclass
from tiered import __version__
from tiered.api.arrow import load_pyarrow
from tiered.archive.checked_ranges import chunks_with_sums, require_sums, with_sums
from tiered.archive.model import SCHEMA_VERSION, ArchiveQueue, Proof
from tiered.errors import DataError, InternalError
from tiered.journal.entry import as_row, row_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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
    """Of all rows so far."""

    rows: int = 0  # how many
    counts: dict[str, int] = field(default_factory=dict)  # values by place
    crcs: dict[str, int] = field(default_factory=dict)
    """By place and kind of what was added up there."""
    nulls: dict[str, int] = field(default_factory=dict)
    """Values by place, where all so far are null: many columns are so to their end, and cost nothing then."""

    def add(self, rows: pa.RecordBatch | pa.Table) -> None:
        """Add rows behind those so far."""
        batches = rows.to_batches() if isinstance(rows, load_pyarrow().Table) else [rows]
        for batch in batches:
            self.rows += batch.num_rows
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                self._fold(name, column)

    def _fold(self, place: str, values: Any) -> None:  # noqa: ANN401 (pyarrow has no types)
        count, so_far = len(values), self.nulls.get(place, 0)
        if values.null_count == count and so_far == self.counts.get(place, 0):
            if count:
                self.nulls[place] = self.counts[place] = so_far + count
        elif count:
            if so_far:
                self.counts[place] = 0
                self._fold_values(place, load_pyarrow().nulls(self.nulls.pop(place), values.type))
            self._fold_values(place, values)

    def _fold_values(self, place: str, values: Any) -> None:  # noqa: ANN401
        kinds, kind = load_pyarrow().types, values.type
        valid = self._take_nulls(place, values)
        if kinds.is_struct(kind):
            for child, part in zip(kind, values.flatten(), strict=True):
                self._fold(f"{place}.{child.name}", part)
        elif kinds.is_list(kind) or kinds.is_map(kind):
            offsets = values.offsets.to_numpy()
            lengths = np.diff(offsets).astype(np.int64)
            self._take(f"{place} lengths", lengths if valid is None else lengths * valid)
            self._fold(f"{place}[]", _elements(values, offsets, valid))
        elif kinds.is_binary(kind) or kinds.is_string(kind):
            self._fold_bytes(f"{place} {kind}", values)
        else:
            self._take(f"{place} {kind}", _fixed(values, valid))

    def _take_nulls(self, place: str, values: Any) -> npt.NDArray[np.bool_] | None:  # noqa: ANN401
        """Which values are there, None if all are; what counts is where the others stand among all so far."""
        before = self.counts.get(place, 0)
        self.counts[place] = before + len(values)
        if not values.null_count:
            return None
        valid: npt.NDArray[np.bool_] = values.is_valid().to_numpy(zero_copy_only=False)
        self._take(f"{place} nulls", np.flatnonzero(~valid) + before)
        return valid

    def _fold_bytes(self, place: str, values: Any) -> None:  # noqa: ANN401
        if not len(values):
            return  # it may have no buffers
        if values.null_count:
            values = values.fill_null(b"" if values.type == load_pyarrow().binary() else "")
        _, offsets, data = values.buffers()
        bounds = np.frombuffer(offsets, np.int32)[values.offset : values.offset + len(values) + 1]
        self._take(f"{place} lengths", np.diff(bounds))
        if bounds[0] < bounds[-1]:
            self._take(place, memoryview(data)[bounds[0] : bounds[-1]])

    def _take(self, place: str, data: Any) -> None:  # noqa: ANN401 (a buffer)
        whole = np.ascontiguousarray(data) if isinstance(data, np.ndarray) else data
        self.crcs[place] = zlib_ng.crc32(whole, self.crcs.get(place, 0))


def have_same_bits(one: pa.Table, other: pa.Table) -> bool:
    """Whether two tables have the same columns and rows, whatever batches they come in.

    Arrow's own comparison goes by value: NaN is not even itself, and -0.0 is 0.0. A copy has the very bits.
    """
    if not one.schema.equals(other.schema):
        return False
    digests = Digest(), Digest()
    for digest, table in zip(digests, (one, other), strict=True):
        digest.add(table)
    return digests[0] == digests[1]


def _elements(values: Any, offsets: Any, valid: npt.NDArray[np.bool_] | None) -> Any:  # noqa: ANN401
    """The elements of all lists that are there; a null one may have some behind it all the same."""
    arrow = load_pyarrow()
    if arrow.types.is_map(values.type):
        inner = arrow.StructArray.from_arrays([values.keys, values.items], ["key", "value"])
    else:
        inner = values.values
    every = inner.slice(offsets[0], offsets[-1] - offsets[0])
    if valid is None or not np.diff(offsets)[~valid].any():
        return every
    return every.filter(arrow.array(np.repeat(valid, np.diff(offsets))))


def _fixed(values: Any, valid: npt.NDArray[np.bool_] | None) -> Any:  # noqa: ANN401
    """Values that take the same number of bytes each; of a null one nothing counts."""
    arrow = load_pyarrow()
    if arrow.types.is_boolean(values.type):
        values = values.cast(arrow.uint8())
    width = values.type.bit_width // _BYTE
    _, data = values.buffers()
    found = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    found = found[values.offset * width : (values.offset + len(values)) * width]
    return found if valid is None else found.reshape(-1, width) * valid[:, None]


# -- files -----------------------------------------------------------------------------------------

GROUP_BYTES = 64 << 20
"""A row group is ended when its columns take so many bytes."""
_WHOLE_BATCHES = 64
"""Of more batches a row group is copied together before it is written: the writer would begin each column anew for each."""
_PROOF_BYTES = 4 << 20
"""Of columns, read back at once: memory that was used a moment ago is fast, a row group's worth of it is not."""
_DICTIONARIES = [
    *("topic", "queue_id", "tag", "born_host", "store_host", "sys_flag", "flag"),
    *("reconsume_times", "prepared_tx_offset", "broker", "incarnation"),
    *("properties.key_value.key",),
    *("partition", "timestamp_type", "leader_epoch", "headers.list.element.name"),
]
_DIFFERENCES = ("queue_offset", "physical_offset", "born_ts", "store_ts", "offset", "timestamp_ms")
_WITHOUT_STATISTICS = frozenset(["value", "headers.list.element.value"])
"""Nobody looks for the least of them, and finding it takes time."""
_KEYS = ("uniq_key", "msg_key", "keys.list.element")
_ORDER = ("topic", "queue_id", "incarnation", "queue_offset")
_FALSE_HITS = 0.01
_ROW_RANGES = "tiered.row_ranges"


def proof_of(rows: pa.RecordBatch | pa.Table) -> Proof:
    """Of one row at least."""
    arrow = load_pyarrow()
    offsets = rows["queue_offset"].to_numpy()
    if (np.diff(offsets) <= 0).any():
        raise _unordered(int(offsets[0]))
    millis = rows["store_ts"].cast(arrow.int64()).to_numpy() // 1000
    payload = "value" if "value" in rows.schema.names else "body"
    lengths = arrow.compute.sum(arrow.compute.binary_length(rows[payload])).as_py() or 0
    times = int(millis.min()), int(millis.max())
    crcs = int(arrow.compute.sum(rows["body_crc"]).as_py() or 0)
    return Proof(int(offsets[0]), int(offsets[-1]) + 1, len(offsets), *times, crcs, lengths)


def _then(one: Proof, more: Proof) -> Proof:
    if more.low < one.high:
        raise _unordered(more.low)
    return one.beside(more)


def _unordered(low: int) -> InternalError:
    return InternalError(f"rows are not in order of queue offset at {low}; they are not published")


class RowRange(NamedTuple):
    """Rows of one offset range in a file."""

    queue: ArchiveQueue
    start: int  # what the caller calls it
    proof: Proof  # of its rows


@dataclass(frozen=True, slots=True)
class Written:
    """A finished file and what is in it."""

    data: tuple[memoryview, bytes]  # its bytes, in buffers one behind the other
    crc: int  # CRC-32 of them
    row_ranges: tuple[RowRange, ...]  # in order

    @property
    def size_bytes(self) -> int:
        """Of the file."""
        return sum(map(len, self.data))


@dataclass(slots=True)
class FileWriter:
    """One file under way. One thread."""

    size_bytes: int = 0  # bytes that the columns took so far, before they were packed
    _sink: Any = None
    _writer: Any = None
    _waiting: list[Any] = field(default_factory=list)
    _waiting_bytes: int = 0
    _row_ranges: list[RowRange] = field(default_factory=list)
    _given: Digest = field(default_factory=Digest)

    def add(self, rows: pa.RecordBatch, queue: ArchiveQueue, start: int) -> None:
        """Take rows that come behind those before, in order of queue and queue offset.

        Args:
            start: Of which row range; what comes with another queue or start than before begins one.
        """
        proof, last = proof_of(rows), self._row_ranges[-1] if self._row_ranges else None
        if last is not None and (last.queue, last.start) == (queue, start):
            self._row_ranges[-1] = RowRange(queue, start, _then(last.proof, proof))
        elif last is not None and (last.queue, last.proof.high) > (queue, proof.low):
            raise _unordered(proof.low)
        else:
            self._row_ranges.append(RowRange(queue, start, proof))
        self._given.add(rows)
        self.size_bytes += rows.nbytes
        self._waiting.append(rows)
        self._waiting_bytes += rows.nbytes
        if self._waiting_bytes >= GROUP_BYTES:
            self._write_group()

    def finish(self, metadata: Mapping[str, str]) -> Written:
        """End the file, and hold what it says against what it was given.

        Args:
            metadata: Where it comes from; the proof is added.

        Raises:
            InternalError: It says something else. Nothing of it may be kept.
        """
        if self._waiting:
            self._write_group()
        row_ranges = tuple(self._row_ranges)
        self._writer.add_key_value_metadata({**metadata, **_said_of(row_ranges)})
        self._writer.close()
        made = self._sink.getvalue()
        blocks, end = chunks_with_sums(made)
        step = max(self._given.rows * _PROOF_BYTES // max(self.size_bytes, 1), 1)
        require_equal(made, self._given, (blocks, end), step)
        return Written((blocks, end), zlib_ng.crc32(end, zlib_ng.crc32(blocks)), row_ranges)

    def _write_group(self) -> None:
        arrow = load_pyarrow()
        table = arrow.Table.from_batches(self._waiting)
        if len(self._waiting) > _WHOLE_BATCHES:
            table = table.combine_chunks()
        if self._writer is None:
            self._sink = arrow.BufferOutputStream()
            self._writer = open_writer(self._sink, table.schema, table.num_rows)
        self._writer.write_table(table, row_group_size=table.num_rows)
        self._waiting, self._waiting_bytes = [], 0


def _said_of(row_ranges: tuple[RowRange, ...]) -> dict[str, str]:
    """What a file says of itself: each row range, and all of them together."""
    whole = row_ranges[0].proof
    for row_range in row_ranges[1:]:
        whole = whole.beside(row_range.proof)
    known = [[row_of(row_range.queue), *row_range.proof] for row_range in row_ranges]
    return {
        "tiered.schema": str(SCHEMA_VERSION),
        "tiered.program": __version__,
        _ROW_RANGES: json.dumps(known, separators=(",", ":")),
        **{f"tiered.{name}": str(value) for name, value in whole._asdict().items()},
    }


def row_ranges_in(metadata: Mapping[str, str]) -> dict[tuple[ArchiveQueue, int], tuple[int, Proof]]:
    """What a file says of its row ranges, by queue and first offset: the number of its first row, and its proof."""
    found: dict[tuple[ArchiveQueue, int], tuple[int, Proof]] = {}
    at = 0
    try:
        for queue, *numbers in json.loads(metadata[_ROW_RANGES]):
            proof = Proof(*numbers)
            found[as_row(ArchiveQueue).decode(queue), proof.low] = at, proof
            at += proof.rows
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(f"a file of an archive does not say what is in it: {error!r:.80}") from None
    return found


def open_writer(sink: Any, columns: pa.Schema, group_rows: int) -> Any:  # noqa: ANN401 (pyarrow has no types)
    """A writer whose filters fit row groups of so many rows; a small file has small ones."""
    from pyarrow import parquet  # noqa: PLC0415 (heavy; only who writes)

    # NaN is in no least or greatest value, and Spark and DuckDB, to which it is the greatest, leave out its rows by these.
    is_floating = load_pyarrow().types.is_floating
    leaves = dict(_leaves(columns))
    differences = [name for name in _DIFFERENCES if name in leaves]
    return parquet.ParquetWriter(
        sink,
        columns,
        compression="zstd",
        compression_level=1,
        use_dictionary=[name for name in _DICTIONARIES if name in leaves],
        column_encoding=dict.fromkeys(differences, "DELTA_BINARY_PACKED"),
        write_statistics=[
            path
            for path, kind in leaves.items()
            if not is_floating(kind) and path not in _WITHOUT_STATISTICS
        ],
        write_page_index=True,
        write_page_checksum=True,
        bloom_filter_options={key: {"ndv": group_rows, "fpp": _FALSE_HITS} for key in _KEYS},
        sorting_columns=[parquet.SortingColumn(columns.get_field_index(name)) for name in _ORDER],
    )


def _leaves(columns: Any, folder: str = "") -> Iterator[tuple[str, Any]]:  # noqa: ANN401
    """What Parquet has of columns: path and type of each that has values itself."""
    kinds = load_pyarrow().types
    for column in columns:
        path, kind = folder + column.name, column.type
        if kinds.is_struct(kind):
            yield from _leaves(kind, f"{path}.")
        elif kinds.is_map(kind):
            yield from _leaves((kind.key_field, kind.item_field), f"{path}.key_value.")
        elif kinds.is_list(kind):
            yield from _leaves((kind.value_field.with_name("element"),), f"{path}.list.")
        else:
            yield path, kind


def require_equal(made: Any, given: Digest, data: tuple[memoryview, bytes], step: int) -> None:  # noqa: ANN401 (a buffer)
    """See that a file has exactly the rows that were given to its writer: every column is read back, bodies too.

    Args:
        step: So many rows are read at once.
    """
    arrow, found = load_pyarrow(), Digest()
    try:
        require_sums(*data)
        for rows in open_whole(made).iter_batches(step, use_threads=False):
            found.add(rows)
    except (DataError, arrow.ArrowException, OSError) as error:
        raise InternalError(f"a file cannot be read back, and is not published: {error}") from error
    if found != given:
        raise InternalError("a file does not reconcile with its source, and is not published")


def open_whole(data: Any) -> Any:  # noqa: ANN401 (a buffer)
    """A file in memory; its pages are held against their checksums when they are read."""
    from pyarrow import parquet  # noqa: PLC0415 (heavy)

    return parquet.ParquetFile(load_pyarrow().BufferReader(data), page_checksum_verification=True)


def read_columns(data: Any) -> pa.Table:  # noqa: ANN401
    """All rows of a file in memory, if it is as it was written."""
    arrow = load_pyarrow()
    require_sums(data)
    try:
        return open_whole(data).read()
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"this is no whole Parquet file: {error}") from error


def read_metadata(data: Any) -> dict[str, str]:  # noqa: ANN401 (a buffer)
    """What a file says of itself."""
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


# -- filters of keys -------------------------------------------------------------------------------
#
# Asks the bloom filters of a Parquet file whether a row group can hold a text. Pure.
#
# Parquet's filter is the split-block one: blocks of eight 32-bit words, one bit of each word for a value,
# chosen by the 64-bit xxHash (seed 0) of its bytes.

_MASK = 0xFFFF_FFFF_FFFF_FFFF
_PRIME_1 = 0x9E37_79B1_85EB_CA87
_PRIME_2 = 0xC2B2_AE3D_27D4_EB4F
_PRIME_3 = 0x1656_67B1_9E37_79F9
_PRIME_4 = 0x85EB_CA77_C2B2_AE63
_PRIME_5 = 0x27D4_EB2F_1656_67C5
_SALTS = (
    *(0x47B6_137B, 0x4497_4D91, 0x8824_AD5B, 0xA2B7_289D),
    *(0x7054_95C7, 0x2DF1_424B, 0x9EFC_4947, 0x5C6B_FB31),
)
_STRIPE = 32
_LONG, _INT = 8, 4
BLOCK = 32
"""Bytes of a block."""


def xxh64(data: bytes) -> int:
    """The 64-bit xxHash of bytes, seed 0."""
    size, at = len(data), 0
    if size >= _STRIPE:
        queues = [(_PRIME_1 + _PRIME_2) & _MASK, _PRIME_2, 0, -_PRIME_1 & _MASK]
        while at <= size - _STRIPE:
            words = struct.unpack_from("<4Q", data, at)
            queues = [_round(queue, word) for queue, word in zip(queues, words, strict=True)]
            at += _STRIPE
        turns = zip(queues, (1, 7, 12, 18), strict=True)
        found = sum(_turned(queue, bits) for queue, bits in turns) & _MASK
        for queue in queues:
            found = ((found ^ _round(0, queue)) * _PRIME_1 + _PRIME_4) & _MASK
    else:
        found = _PRIME_5
    found = _rest(data, at, (found + size) & _MASK)
    found = (found ^ found >> 33) * _PRIME_2 & _MASK
    found = (found ^ found >> 29) * _PRIME_3 & _MASK
    return found ^ found >> 32


def _rest(data: bytes, at: int, found: int) -> int:
    """What is behind the last whole stripe."""
    size = len(data)
    while at <= size - _LONG:
        (word,) = struct.unpack_from("<Q", data, at)
        found = (_turned(found ^ _round(0, word), 27) * _PRIME_1 + _PRIME_4) & _MASK
        at += _LONG
    if at <= size - _INT:
        (word,) = struct.unpack_from("<I", data, at)
        found = (_turned(found ^ (word * _PRIME_1 & _MASK), 23) * _PRIME_2 + _PRIME_3) & _MASK
        at += _INT
    for byte in data[at:]:
        found = _turned(found ^ (byte * _PRIME_5 & _MASK), 11) * _PRIME_1 & _MASK
    return found


def _round(queue: int, word: int) -> int:
    return _turned((queue + word * _PRIME_2) & _MASK, 31) * _PRIME_1 & _MASK


def _turned(value: int, bits: int) -> int:
    return (value << bits | value >> (64 - bits)) & _MASK


def can_hold(bits: bytes, text: str) -> bool:
    """Whether a row group may hold a text in the column that a filter is of."""
    found = text_hash(text)
    at = block_number(found, len(bits) // BLOCK) * BLOCK
    return block_holds(bits[at : at + BLOCK], found)


def text_hash(text: str) -> int:
    """What decides about a text."""
    return xxh64(text.encode("utf-8", "replace"))


def block_number(found: int, blocks: int) -> int:
    """Which block of a filter of ``blocks`` speaks of a hash."""
    return ((found >> 32) * blocks) >> 32


def block_holds(block: bytes | memoryview, found: int) -> bool:
    """Whether that block has all bits of a hash."""
    low = found & 0xFFFF_FFFF
    chosen = (1 << ((low * salt & 0xFFFF_FFFF) >> 27) for salt in _SALTS)
    return all(word & bit for word, bit in zip(struct.unpack("<8I", block), chosen, strict=True))


# -- where the filters lie -------------------------------------------------------------------------
#
# Where the bloom filters of keys lie in a Parquet file, so that single blocks of them can be read. Pure.

COLUMNS = ("uniq_key", "keys.list.element")
"""Those whose filters are asked; ``msg_key`` is the text that ``keys`` are divided from."""
_HEADER_MAX = 64


def filters_of(group: Any) -> list[tuple[int, int] | None]:  # noqa: ANN401 (pyarrow has no types)
    """Where the bits of a row group's filters of ``COLUMNS`` lie, first byte and bytes; None: it has none to be asked."""
    chunks = (group.column(number) for number in range(group.num_columns))
    found = {chunk.path_in_schema: chunk for chunk in chunks}
    return [bits_of(found.get(name)) for name in COLUMNS]


def bits_of(chunk: Any) -> tuple[int, int] | None:  # noqa: ANN401
    """Where the bits of a column's filter lie; None: it has none to be asked.

    The filters of our writer have a power of two of bytes, and a short header before them.
    """
    start = chunk and chunk.bloom_filter_offset
    length = chunk and chunk.bloom_filter_length
    if not start or not length:
        return None
    bits = 1 << (int(length).bit_length() - 1)
    header = length - bits
    return (start + header, bits) if bits >= BLOCK and 0 < header <= _HEADER_MAX else None
