"""Rows of several files of an archive, written once more into one file; each piece is held against its proof.

Layout: pieces in order of lane and offset, row groups never of two lanes. The file says of itself what each piece is.

Ordering: everything is read, checked, written and read back in memory; then the object is put. Nothing of it is part of the
archive before an entry of the log says so.

Retries: the key is a function of the pieces. An object that is there already is adopted if it holds the same rows.

Memory: the old files as they are stored, a row group of columns, and the new file.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from zlib_ng import zlib_ng

from backends.errors import AlreadyExistsError
from tiered import __version__
from tiered.api.arrow import load_pyarrow
from tiered.archive.digest import Digest
from tiered.archive.keys import folder_key
from tiered.archive.model import SCHEMA_VERSION
from tiered.archive.moves import NewFile
from tiered.archive.parquet import (
    GROUP_BYTES,
    GROUP_ROWS,
    open_whole,
    open_writer,
    read_columns,
    require_equal,
)
from tiered.archive.ranges import with_sums
from tiered.crashpoints import reached
from tiered.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa

    from backends.base import ObjectStore
    from tiered.archive.model import Lane, ParquetFile
    from tiered.archive.moves import Piece

PACKED = "packed"
MERGED = "merged"
"""What names of files begin with that several segments share, and of those that took the place of others."""
_PROOF = ("rows", "store_min_ms", "store_max_ms", "body_crc_sum", "body_bytes")


@dataclass(frozen=True, slots=True)
class Together:
    """A file to be.

    Attributes:
        key: Relative to the archive.
        pieces: What goes into it, in order of lane and offset; as it lies now.
    """

    key: str
    pieces: tuple[Piece, ...]


def key_of(kind: str, day: int, pieces: Sequence[Piece]) -> str:
    """Key of a file of these pieces, all of one topic: a function of what they are and where they lie.

    Args:
        kind: ``PACKED`` or ``MERGED``.
        day: Of store time, UTC, since 1970.
        pieces: In order.
    """
    known = [(*astuple(piece.lane), *piece.file.row()) for piece in pieces]
    digest = hashlib.sha256(repr((SCHEMA_VERSION, known)).encode("utf-8", "surrogateescape"))
    return f"{folder_key(pieces[0].lane.topic, day)}{kind}-{digest.hexdigest()[:16]}.parquet"


def write_together(source: ObjectStore, archive: ObjectStore, together: Together) -> NewFile:
    """Make one file of many.

    Args:
        source: Where the pieces lie.
        archive: Where the file goes.
        together: What goes into it.

    Raises:
        DataError: A file is not what the log says, or something else lies under the new key.
        InternalError: The new file does not hold what it was given; it was not put.
        BackendError: A store failed.
    """
    data = _made(source, together.pieces)
    reached("archive-rewriting")
    size, crc = _put(archive, together.key, data)
    reached("archive-rewritten")
    return NewFile(together.key, size, crc, together.pieces)


def copy(source: ObjectStore, archive: ObjectStore, file: ParquetFile) -> None:
    """Put a file under the key that it has, as it is.

    Raises:
        DataError: Something else lies there.
        BackendError: A store failed.
    """
    size, crc = _put(archive, file.key, source.get(file.key))
    if (size, crc) != (file.size_bytes, file.crc):
        raise _another(archive, file.key)


def _put(archive: ObjectStore, key: str, data: Any) -> tuple[int, int]:  # noqa: ANN401 (a buffer)
    """Size and CRC-32 of what lies there then."""
    try:
        archive.put_if_absent(key, data)
    except AlreadyExistsError:
        present = archive.get(key)
        if present != bytes(data) and not read_columns(present).equals(read_columns(data)):
            raise _another(archive, key) from None
        return len(present), zlib_ng.crc32(present)
    return len(data), zlib_ng.crc32(data)


def _another(archive: ObjectStore, key: str) -> DataError:
    return DataError(
        "something else lies where a file of the archive goes",
        where=f"{archive.url}/{key}",
        do="remove it if you know what it is, and do it again",
    )


def _made(source: ObjectStore, pieces: Sequence[Piece]) -> Any:  # noqa: ANN401 (a buffer)
    arrow = load_pyarrow()
    sink = arrow.BufferOutputStream()
    writer: Any = None
    given = Digest()
    for group in _groups(source, pieces):
        if writer is None:
            writer = open_writer(sink, group.schema, _group_rows(pieces))
        given.add(group)
        writer.write_table(group, row_group_size=group.num_rows)
    writer.add_key_value_metadata(_metadata(pieces))
    writer.close()
    data = with_sums(sink.getvalue())
    require_equal(data, given)
    return data


def _group_rows(pieces: Sequence[Piece]) -> int:
    """Rows of the largest row group."""
    rows: dict[Lane, int] = {}
    for piece in pieces:
        rows[piece.lane] = rows.get(piece.lane, 0) + piece.file.rows
    return min(max(rows.values()), GROUP_ROWS)


def _groups(source: ObjectStore, pieces: Sequence[Piece]) -> Iterator[pa.Table]:
    """Row groups."""
    arrow = load_pyarrow()
    files: dict[str, bytes] = {}
    waiting: list[pa.Table] = []
    lane = pieces[0].lane
    for piece in pieces:
        rows = _rows(source, piece, files)
        held = sum(table.num_rows for table in waiting)
        size = sum(table.nbytes for table in waiting)
        is_full = held + rows.num_rows > GROUP_ROWS or size + rows.nbytes > GROUP_BYTES
        if waiting and (is_full or piece.lane != lane):
            yield arrow.concat_tables(waiting).combine_chunks()
            waiting = []
        lane = piece.lane
        while rows.num_rows > GROUP_ROWS:
            yield rows.slice(0, GROUP_ROWS).combine_chunks()
            rows = rows.slice(GROUP_ROWS)
        waiting.append(rows)
    yield arrow.concat_tables(waiting).combine_chunks()


def _rows(source: ObjectStore, piece: Piece, files: dict[str, bytes]) -> pa.Table:
    """The rows of one piece, held against its proof."""
    file = piece.file
    if file.key not in files:
        data = source.get(file.key)
        if (len(data), zlib_ng.crc32(data)) != (file.size_bytes, file.crc):
            raise _differs(source, file.key)
        files[file.key] = data
    table = _read_piece(files[file.key], piece)
    if proof(table) != (file.low, file.high, *(getattr(file, name) for name in _PROOF)):
        raise _differs(source, file.key)
    return table.replace_schema_metadata(None)


def _read_piece(data: bytes, piece: Piece) -> pa.Table:
    """Those rows of a file that are of a piece, in order; row groups of others are not unpacked."""
    from pyarrow import parquet  # noqa: PLC0415 (heavy)

    if open_whole(data).metadata.num_rows == piece.file.rows:
        return read_columns(data)
    raw = load_pyarrow().BufferReader(data)
    return parquet.read_table(raw, filters=_bounds(piece), page_checksum_verification=True)


def _bounds(piece: Piece) -> list[tuple[str, str, int]]:
    return [
        ("queue_id", "=", piece.lane.queue_id),
        ("incarnation", "=", piece.lane.incarnation),
        ("queue_offset", ">=", piece.file.low),
        ("queue_offset", "<", piece.file.high),
    ]


def piece_rows(table: pa.Table, piece: Piece) -> pa.Table:
    """Those rows of a whole file in memory that are of a piece, in order."""
    if table.num_rows == piece.file.rows:
        return table
    compute: Any = load_pyarrow().compute
    tests = {"=": compute.equal, ">=": compute.greater_equal, "<": compute.less}
    masks = [tests[test](table[name], value) for name, test, value in _bounds(piece)]
    mask = masks[0]
    for other in masks[1:]:
        mask = compute.and_(mask, other)
    found: pa.Table = table.filter(mask)
    return found


def proof(table: pa.Table) -> tuple[int, ...]:
    """What rows prove: first offset, one past the last, and ``_PROOF``; nothing when they are not in order."""
    arrow = load_pyarrow()
    compute: Any = arrow.compute
    offsets = table["queue_offset"].to_numpy()
    if not len(offsets) or (np.diff(offsets) <= 0).any():
        return ()
    millis = table["store_ts"].cast(arrow.int64()).to_numpy() // 1000
    return (
        int(offsets[0]),
        int(offsets[-1]) + 1,
        len(offsets),
        int(millis.min()),
        int(millis.max()),
        int(table["body_crc"].to_numpy().sum()),
        compute.sum(compute.binary_length(table["body"])).as_py() or 0,
    )


def _differs(source: ObjectStore, key: str) -> DataError:
    return DataError(
        "this file is not what the archive's log says",
        where=f"{source.url}/{key}",
        do="`tiered archive --verify` looks at all of them",
    )


def _metadata(pieces: Sequence[Piece]) -> dict[str, str]:
    files = [piece.file for piece in pieces]
    numbers = {
        "rows": sum(file.rows for file in files),
        "low": min(file.low for file in files),
        "high": max(file.high for file in files),
        "store_min_ms": min(file.store_min_ms for file in files),
        "store_max_ms": max(file.store_max_ms for file in files),
        "body_crc_sum": sum(file.body_crc_sum for file in files),
        "body_bytes": sum(file.body_bytes for file in files),
    }
    known = [[piece.lane.row(), *_numbers(piece.file)] for piece in pieces]
    return {
        "tiered.schema": str(SCHEMA_VERSION),
        "tiered.program": __version__,
        "tiered.pieces": json.dumps(known, separators=(",", ":")),
        **{f"tiered.{name}": str(value) for name, value in numbers.items()},
    }


def says(metadata: Mapping[str, str], piece: Piece) -> bool:
    """Whether a file's own metadata proves a piece as the log does.

    Args:
        metadata: Of a file that one segment was made into, or of one that was made here.
        piece: Of that file.
    """
    if "tiered.pieces" not in metadata:
        return metadata.get("tiered.body_crc_sum") == str(piece.file.body_crc_sum)
    return [piece.lane.row(), *_numbers(piece.file)] in json.loads(metadata["tiered.pieces"])


def _numbers(file: ParquetFile) -> list[int]:
    return [file.low, file.high, *(getattr(file, name) for name in _PROOF)]
