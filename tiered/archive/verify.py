"""Reads an archive and holds every file against the log, against itself, and against the tier as far as it still has it.

Nothing is changed. What is found is listed; the rest goes on. A file that several stretches share is read once, as long as
its topic's others leave it room.

Memory: files of ``HELD_BYTES`` and one more and, of the tier, ``READ_BYTES``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from zlib_ng import zlib_ng

from backends.errors import ObjectNotFoundError
from tiered.api.arrow import load_pyarrow
from tiered.archive.columns import BODY_REASON, Columns, layout_of
from tiered.archive.harm import open_log
from tiered.archive.machine import ArchiveMachine
from tiered.archive.merging import piece_rows, says
from tiered.archive.model import LOG, Archived, ArchiveLane, ParquetFile, SideFile
from tiered.archive.moves import MovedPiece, pieces_of
from tiered.archive.parquet import read_columns, read_metadata
from tiered.archive.paths import DAY_MS, folder_key
from tiered.errors import DataError
from tiered.journal.reader import JournalReader
from tiered.log.parts import Gap
from tiered.log.reader import TierReader
from tiered.model import QueueOffset

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from tiered.archive.machine import ArchiveState
    from tiered.archive.task import Workshop
    from tiered.log.decode import TierBatch
    from tiered.log.reader import QueueReader


HELD_BYTES = 256 << 20
"""Of columns, of files that are kept since another stretch may name them, too."""


@dataclass(frozen=True, slots=True)
class ArchiveFinding:
    """Something that is not as the log says.

    Attributes:
        lane: Whose.
        key: Of the file; empty when it is no file's.
        what: What is wrong.
    """

    lane: str
    key: str
    what: str

    def row(self) -> dict[str, str]:
        """For output."""
        return {"lane": self.lane, "key": self.key, "what": self.what}


@dataclass(slots=True)
class Report:
    """What was looked at, and what is wrong.

    Attributes:
        findings: What is wrong.
        files: That were read.
        rows: In them.
        compared: Stretches that the tier still has, and that were held against it.
    """

    findings: list[ArchiveFinding] = field(default_factory=list)
    files: int = 0
    rows: int = 0
    compared: int = 0


def verify_archive(at: Workshop) -> Report:
    """Read all that is archived of one broker.

    Raises:
        DataError: A log is damaged.
        BackendError: A store failed.
    """
    reader = TierReader(at.tier, at.place.prefix)
    reader.refresh()
    report = Report()
    state = read_log(at)
    files = _Files(at, state, report)
    for lane, stretches in sorted(state.lanes.items()):
        mine = (lane.cluster, lane.broker) == (at.place.cluster, at.place.broker)
        if not mine or not at.takes(lane.topic):
            continue
        source = _source(reader, lane)
        for archived in stretches:
            columns = Columns(lane, layout_of(state, lane.topic, archived))
            _verify(files, columns, archived, source, report)
    return report


def read_log(at: Workshop) -> ArchiveState:
    """What the archive's log says.

    Raises:
        DataError: It is damaged.
        BackendError: It could not be read.
    """
    log = JournalReader(at.archive, LOG, ArchiveMachine())
    open_log(at.archive, log)
    return log.state


def _source(reader: TierReader, lane: ArchiveLane) -> QueueReader | None:
    lives = reader.state.queues.get(lane.queue, ())
    known = any(life.incarnation == lane.incarnation for life in lives)
    return reader.queue(lane.queue, lane.incarnation) if known else None


def _verify(
    files: _Files, columns: Columns, archived: Archived, source: QueueReader | None, report: Report
) -> None:
    def found(key: str, what: str) -> None:
        report.findings.append(ArchiveFinding(str(columns.lane), key, what))

    tables = []
    for file in archived.files:
        table, wrong = files.read(MovedPiece(columns.lane, file))
        for what in wrong:
            found(file.key, what)
        if table is not None:
            report.rows += table.num_rows
            tables.append(table)
    aside, what = _read_side(files.at, archived.side)
    if what and archived.side:
        found(archived.side.key, what)
    if len(tables) < len(archived.files) or what:
        return
    for what in _account(archived, tables, aside):
        found("", what)
    is_there = source is not None and source.life.min_offset <= archived.start
    if source is not None and is_there and archived.end <= source.life.commit_offset:
        report.compared += 1
        for what in _compare(columns, archived, source, tables):
            found("", what)


class _Files:
    """The files that were read last, and what is wrong with each."""

    def __init__(self, at: Workshop, state: ArchiveState, report: Report) -> None:
        self.at = at
        self._report = report
        self._rows: dict[str, int] = {}
        for piece in pieces_of(state.lanes):
            self._rows[piece.file.key] = self._rows.get(piece.file.key, 0) + piece.file.rows
        self._held: dict[str, tuple[pa.Table | None, dict[str, str], list[str]]] = {}

    def read(self, piece: MovedPiece) -> tuple[pa.Table | None, list[str]]:
        """A piece's rows, and what is wrong with it and, once, with its file."""
        file = piece.file
        if file.key not in self._held:
            self._report.files += 1
            self._make_room()
            self._held[file.key] = table, said, wrong = self._read(file)
        else:
            table, said, _ = self._held[file.key]
            wrong = [] if table is not None else ["the file could not be read"]
        if table is None:
            return None, wrong
        rows = piece_rows(table, piece)
        return rows, [*wrong, *_wrong_with(rows, said, piece)]

    def _make_room(self) -> None:
        while sum(table.nbytes for table, _, _ in self._held.values() if table) > HELD_BYTES:
            del self._held[next(iter(self._held))]

    def _read(self, file: ParquetFile) -> tuple[pa.Table | None, dict[str, str], list[str]]:
        try:
            data = self.at.archive.get(file.key)
        except ObjectNotFoundError:
            return None, {}, ["the file is gone"]
        if (len(data), zlib_ng.crc32(data)) != (file.size_bytes, file.crc):
            return None, {}, ["the file has other bytes than the log says"]
        try:
            table, said = read_columns(data), read_metadata(data)
        except DataError as error:
            return None, {}, [error.what]
        named = self._rows[file.key]
        wrong = f"the file has {table.num_rows} rows, of which the log names {named}"
        return table, said, [wrong] if table.num_rows != named else []


def _wrong_with(table: pa.Table, said: dict[str, str], piece: MovedPiece) -> Iterator[str]:
    arrow, file = load_pyarrow(), piece.file
    offsets, crcs = table["queue_offset"].to_numpy(), table["body_crc"].to_numpy()
    days = table["store_ts"].cast(arrow.int64()).to_numpy() // (DAY_MS * 1000)
    if len(offsets) != file.rows or not len(offsets):
        yield f"{len(offsets)} rows, and the log says {file.rows}"
        return
    if (offsets[0], offsets[-1] + 1) != (file.low, file.high) or (np.diff(offsets) <= 0).any():
        yield "queue offsets are not those that the log says, or not in order"
    if int(crcs.sum()) != file.body_crc_sum:
        yield "the sum of the bodies' checksums is not the one that the log says"
    if not says(said, piece):
        yield "the file says another sum of checksums than the log"
    if len(np.unique(days)) > 1 or not file.key.startswith(
        folder_key(piece.lane.topic, int(days[0]))
    ):
        yield "rows are not of the topic and day that the key says"


def _read_side(at: Workshop, side: SideFile | None) -> tuple[list[int], str]:
    if side is None:
        return [], ""
    try:
        data = at.archive.get(side.key)
    except ObjectNotFoundError:
        return [], "the file is gone"
    if (len(data), zlib_ng.crc32(data)) != (side.size_bytes, side.crc):
        return [], "the file has other bytes than the log says"
    table = read_columns(data)
    compute = load_pyarrow().compute
    others = compute.invert(compute.starts_with(table["reason"], BODY_REASON))
    return table.filter(others)["queue_offset"].to_pylist(), ""


def _account(archived: Archived, tables: list[pa.Table], aside: list[int]) -> Iterator[str]:
    """Whether each offset is there once."""
    found = [table["queue_offset"].to_numpy() for table in tables]
    offsets = np.sort(np.concatenate([*found, np.array(aside, np.int64)]))
    if not np.array_equal(offsets, np.arange(archived.start, archived.end)):
        yield f"offsets [{archived.start}, {archived.end}) are not there once each"


def _compare(
    columns: Columns, archived: Archived, source: QueueReader, tables: list[pa.Table]
) -> Iterator[str]:
    """Whether the rows are those that the tier has."""
    names = columns.schema.names
    if any(not set(names).issubset(table.column_names) for table in tables):
        yield "columns are missing that the log says are there"
        return
    some = [table.select(names) for table in tables]
    rows = load_pyarrow().concat_tables(some).sort_by("queue_offset") if some else None
    at, aside = 0, 0
    try:
        for batch in _batches(source, archived):
            made, left = columns.make(batch)
            aside += sum(not one.has_row for one in left)
            for batch_rows in made:
                count = batch_rows.num_rows
                if rows is None or not _is_equal(rows.slice(at, count), batch_rows):
                    yield f"rows differ from the tier behind offset {batch.base_offset}"
                    return
                at += count
    except DataError as error:
        yield f"the tier cannot be read for comparison: {error.what}"
        return
    if at != archived.rows or aside != archived.holes + archived.bad:
        yield f"the tier has {at} rows and {aside} others"


def _is_equal(ours: pa.Table, theirs: pa.RecordBatch) -> bool:
    same: bool = ours.equals(load_pyarrow().Table.from_batches([theirs]))
    return same


def _batches(source: QueueReader, archived: Archived) -> Iterator[TierBatch]:
    at = QueueOffset(archived.start)
    while at < archived.end:
        found = source.read(at, count_max=archived.end - at)
        if found is None:
            return
        if not isinstance(found, Gap):
            yield found
        at = found.end if isinstance(found, Gap) else found.end_offset
