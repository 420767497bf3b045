"""Small files of an archive become large ones; and shared files are divided, when a part of them has to go.

Overview: ``plan_merge`` says which files of a topic and day become one. Each is made (see below), and an
entry of the log puts the new ones in the place of the old. Nothing is deleted: old files are named as replaced from then on,
and ``tiered.archive.clean`` takes them away after a grace, for the sake of those who are reading them.

Ordering: new files, then the entry. One entry for ``ENTRY_FILES`` new files; what counts is the old ones or the new one.

Retries: keys are functions of what is merged, so who merges the same again makes the same objects. What another has merged,
or forgotten, meanwhile is dropped before each try, and refused in replay.

After a crash: new files that no entry names, and the old ones count; or the entry is there, and the new ones do.
"""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from zlib_ng import zlib_ng

from backends.errors import AlreadyExistsError
from backends.memory import MemoryStore
from backends.wrapping import WrappingStore
from tiered import __version__
from tiered.api.arrow import load_pyarrow
from tiered.archive.machine import names_of
from tiered.archive.model import SCHEMA_VERSION
from tiered.archive.moves import (
    MovedPiece,
    NewFile,
    Places,
    merge_action,
    move,
    pieces_of,
    relatives,
)
from tiered.archive.parquet import (
    GROUP_BYTES,
    GROUP_ROWS,
    Digest,
    open_whole,
    open_writer,
    read_columns,
    require_equal,
)
from tiered.archive.paths import DATA, DAY_MS, folder_key
from tiered.archive.plan import Task
from tiered.archive.ranges import with_sums
from tiered.archive.task import archive_segment
from tiered.crashpoints import reached
from tiered.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import pyarrow as pa
    from typing_extensions import Buffer

    from backends.base import ByteRange, ObjectStore
    from tiered.archive.machine import ArchiveState
    from tiered.archive.model import Archived, ArchiveLane, ParquetFile
    from tiered.archive.task import Workshop
    from tiered.journal.writer import JournalWriter


# -- rows written once more ------------------------------------------------------------------------
#
# Rows of several files of an archive, written once more into one file; each piece is held against its proof.
#
# Layout: pieces in order of lane and offset, row groups never of two lanes. The file says of itself what each
# piece is.
#
# Ordering: everything is read, checked, written and read back in memory; then the object is put. Nothing of it
# is part of the archive before an entry of the log says so.
#
# Retries: the key is a function of the pieces. An object that is there already is adopted if it holds the same
# rows.
#
# Memory: the old files as they are stored, a row group of columns, and the new file.

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
    pieces: tuple[MovedPiece, ...]


def key_of(kind: str, day: int, pieces: Sequence[MovedPiece]) -> str:
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


def _made(source: ObjectStore, pieces: Sequence[MovedPiece]) -> Any:  # noqa: ANN401 (a buffer)
    arrow = load_pyarrow()
    sink = arrow.BufferOutputStream()
    writer: Any = None
    given = Digest()
    for group in _row_groups(source, pieces):
        if writer is None:
            writer = open_writer(sink, group.schema, _group_rows(pieces))
        given.add(group)
        writer.write_table(group, row_group_size=group.num_rows)
    writer.add_key_value_metadata(_metadata(pieces))
    writer.close()
    data = with_sums(sink.getvalue())
    require_equal(data, given)
    return data


def _group_rows(pieces: Sequence[MovedPiece]) -> int:
    """Rows of the largest row group."""
    rows: dict[ArchiveLane, int] = {}
    for piece in pieces:
        rows[piece.lane] = rows.get(piece.lane, 0) + piece.file.rows
    return min(max(rows.values()), GROUP_ROWS)


def _row_groups(source: ObjectStore, pieces: Sequence[MovedPiece]) -> Iterator[pa.Table]:
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


def _rows(source: ObjectStore, piece: MovedPiece, files: dict[str, bytes]) -> pa.Table:
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


def _read_piece(data: bytes, piece: MovedPiece) -> pa.Table:
    """Those rows of a file that are of a piece, in order; row groups of others are not unpacked."""
    from pyarrow import parquet  # noqa: PLC0415 (heavy)

    if open_whole(data).metadata.num_rows == piece.file.rows:
        return read_columns(data)
    raw = load_pyarrow().BufferReader(data)
    return parquet.read_table(raw, filters=_bounds(piece), page_checksum_verification=True)


def _bounds(piece: MovedPiece) -> list[tuple[str, str, int]]:
    return [
        ("queue_id", "=", piece.lane.queue_id),
        ("incarnation", "=", piece.lane.incarnation),
        ("queue_offset", ">=", piece.file.low),
        ("queue_offset", "<", piece.file.high),
    ]


def piece_rows(table: pa.Table, piece: MovedPiece) -> pa.Table:
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


def _metadata(pieces: Sequence[MovedPiece]) -> dict[str, str]:
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


def says(metadata: Mapping[str, str], piece: MovedPiece) -> bool:
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


# -- small segments --------------------------------------------------------------------------------
#
# Small segments of a topic, archived together: several stretches, of any queues, become one file for each day.
#
# Ordering: each segment becomes files in memory, as if it were alone, which proves it; then its rows are
# written once more, into the shared files. Side files are each segment's own.
#
# Retries: the key of a shared file is a function of what is in it. Who packs the same segments again makes the
# same object; who packs others, since more were sealed meanwhile, makes another, and the first is an object
# that no entry names.
#
# Memory: the files of one pack, and one shared file of a day.

SMALL_SEGMENT_BYTES = 4 << 20
PACK_BYTES = 32 << 20
_TASKS_MAX = 256


@dataclass(frozen=True, slots=True)
class Pack:
    """Tasks of one topic and layout whose files are shared.

    Attributes:
        tasks: At least two, in order of lane and offset.
    """

    tasks: tuple[Task, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the commit log, at most."""
        return sum(task.size_bytes for task in self.tasks)


Work = Task | Pack
"""What an engine is given to do."""


def tasks_of(work: Work) -> tuple[Task, ...]:
    """The segments in it."""
    return work.tasks if isinstance(work, Pack) else (work,)


def plan_packs(tasks: Sequence[Task], small_bytes: int = SMALL_SEGMENT_BYTES) -> list[Work]:
    """Put small segments of a topic together; in order of each pack's first task. Pure.

    Args:
        tasks: What is to be done.
        small_bytes: Segments of less commit log are packed; 0: none is.
    """
    open_packs: dict[object, list[Task]] = {}
    groups: list[list[Task]] = []
    for task in tasks:
        kind = task.lane.cluster, task.lane.broker, task.lane.topic, task.layout
        group = open_packs.get(kind)
        if task.size_bytes >= small_bytes:
            groups.append([task])
        elif group is None or not _fits_pack(group, task):
            groups.append([task])
            open_packs[kind] = groups[-1]
        else:
            group.append(task)
    return [_work(group) for group in groups]


def _fits_pack(group: Sequence[Task], task: Task) -> bool:
    size = sum(one.size_bytes for one in group) + task.size_bytes
    return size <= PACK_BYTES and len(group) < _TASKS_MAX


def _work(group: Sequence[Task]) -> Work:
    if len(group) == 1:
        return group[0]
    return Pack(tuple(sorted(group, key=lambda task: (task.lane, task.start))))


def do_work(tier: ObjectStore, prefix: str, archive: ObjectStore, work: Work) -> list[Archived]:
    """Make the objects of a task, or of those of a pack; see ``archive_segment``.

    Returns:
        What was made, for each task in order.

    Raises:
        DataError: A segment is damaged, or something else lies under one of our keys.
        InternalError: A file did not reconcile; none of it was published.
        ObjectNotFoundError: A part has been merged or has expired meanwhile: plan again.
        BackendError: A store failed.
    """
    if isinstance(work, Task):
        return [archive_segment(tier, prefix, archive, work)]
    held = _HeldFile(archive)
    made = [archive_segment(tier, prefix, held, task) for task in work.tasks]
    pieces = [
        MovedPiece(task.lane, file)
        for task, archived in zip(work.tasks, made, strict=True)
        for file in archived.files
    ]
    moved = dict(_shared(held, archive, pieces))
    return [
        replace(archived, files=tuple(moved[task.lane, file.low] for file in archived.files))
        for task, archived in zip(work.tasks, made, strict=True)
    ]


def _shared(
    held: ObjectStore, archive: ObjectStore, pieces: Iterable[MovedPiece]
) -> Iterator[tuple[tuple[ArchiveLane, int], ParquetFile]]:
    """Each piece's mark, and the file in which it lies then."""
    by_day = sorted(pieces, key=lambda piece: (_day(piece), piece.lane, piece.file.low))
    for day, group in groupby(by_day, key=_day):
        found = tuple(group)
        if len(found) == 1:
            copy(held, archive, found[0].file)
            yield found[0].mark, found[0].file
            continue
        new = write_together(held, archive, Together(key_of(PACKED, day, found), found))
        for piece in found:
            at = replace(piece.file, key=new.key, size_bytes=new.size_bytes, crc=new.crc)
            yield piece.mark, at


def _day(piece: MovedPiece) -> int:
    return piece.file.store_min_ms // DAY_MS


class _HeldFile(WrappingStore):
    """An archive whose files of messages stay in memory, and go no further."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self._held = MemoryStore("pack")

    def put_if_absent(self, key: str, data: Sequence[Buffer] | Buffer) -> None:
        self._of(key).put_if_absent(key, data)

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        return self._of(key).get(key, byte_range)

    def _of(self, key: str) -> ObjectStore:
        return self._held if key.startswith(DATA) else self._inner


# -- small files -----------------------------------------------------------------------------------

SMALL_BYTES = 32 << 20
MERGED_BYTES = 128 << 20
ENTRY_FILES = 256


@dataclass(slots=True)
class Merged:
    """What a merge did.

    Attributes:
        planned: Files that were to be made.
        new_files: Made, and part of the archive.
        old_files: In the place of which they are.
        rows: In them.
        old_bytes: Of the old files.
        new_bytes: Of the new ones.
        entries: Written to the log.
        overtaken: Files that were made in vain, since the archive had changed meanwhile.
    """

    planned: int = 0
    new_files: int = 0
    old_files: int = 0
    rows: int = 0
    old_bytes: int = 0
    new_bytes: int = 0
    entries: int = 0
    overtaken: int = 0

    def count(self, new: NewFile) -> None:
        """One more file is part of the archive."""
        old = {piece.file.key: piece.file.size_bytes for piece in new.pieces}
        self.new_files += 1
        self.old_files += len(old)
        self.rows += sum(piece.file.rows for piece in new.pieces)
        self.old_bytes += sum(old.values())
        self.new_bytes += new.size_bytes


def plan_merge(
    state: ArchiveState,
    *,
    takes: Callable[[ArchiveLane], bool],
    small_bytes: int = SMALL_BYTES,
    merged_bytes: int = MERGED_BYTES,
) -> list[Together]:
    """Which files are to become one. Pure.

    Args:
        state: What the log says.
        takes: Whether a queue is wanted; a file that it shares with one that is not stays.
        small_bytes: Files of less are merged.
        merged_bytes: Of the old files of one new one, at most.

    Returns:
        Files to be, each of at least two, all of one topic, day and schema; in order of topic, day and key.
    """
    files: dict[str, _File] = {}
    for lane, stretches in sorted(state.lanes.items()):
        for archived in stretches:
            for file in archived.files:
                one = files.setdefault(file.key, _File(file.size_bytes, _kind(lane, archived)))
                one.pieces.append(MovedPiece(lane, file))
                one.is_wanted &= takes(lane) and one.kind == _kind(lane, archived)
    small = [one for one in files.values() if one.is_wanted and one.size_bytes < small_bytes]
    small.sort(key=lambda one: (one.kind, one.day, one.pieces[0].lane, one.pieces[0].file.low))
    return [together(MERGED, group) for group in _groups(small, merged_bytes) if len(group) > 1]


@dataclass(slots=True)
class _File:
    """A file as the log has it."""

    size_bytes: int
    kind: tuple[object, ...]
    pieces: list[MovedPiece] = field(default_factory=list)
    is_wanted: bool = True

    @property
    def day(self) -> int:
        return self.pieces[0].file.store_min_ms // DAY_MS


def _kind(lane: ArchiveLane, archived: Archived) -> tuple[object, ...]:
    """What files of one new file have in common."""
    columns = archived.schema, archived.columns, archived.has_records
    return (lane.cluster, lane.broker, lane.topic, *columns)


def _groups(files: Iterable[_File], merged_bytes: int) -> Iterator[list[_File]]:
    group: list[_File] = []
    size = 0
    for one in files:
        is_other = bool(group) and (group[0].kind, group[0].day) != (one.kind, one.day)
        if group and (is_other or size + one.size_bytes > merged_bytes):
            yield group
            group, size = [], 0
        group.append(one)
        size += one.size_bytes
    if group:
        yield group


def together(kind: str, files: Iterable[_File]) -> Together:
    """One file of all that is in some."""
    pieces = [piece for file in files for piece in file.pieces]
    return of_pieces(kind, pieces)


def of_pieces(kind: str, pieces: Iterable[MovedPiece]) -> Together:
    """One file of pieces of one topic and day, ``PACKED`` or ``MERGED``."""
    ordered = tuple(sorted(pieces, key=lambda piece: (piece.lane, piece.file.low)))
    day = ordered[0].file.store_min_ms // DAY_MS
    return Together(key_of(kind, day, ordered), ordered)


def plan_division(state: ArchiveState, lane: ArchiveLane, starts: Iterable[int]) -> list[Together]:
    """The files that separate some stretches of a lane from those with which they share files. Pure.

    Args:
        state: What the log says.
        lane: Whose.
        starts: Where the stretches begin.

    Returns:
        For each shared file one of the rows of these stretches, and one of the others'.
    """
    wanted = set(starts)
    apart = {
        (lane, file.low)
        for one in state.lanes.get(lane, ())
        if one.start in wanted
        for file in one.files
    }
    shared: dict[str, list[MovedPiece]] = {}
    for piece in pieces_of(state.lanes, relatives(state.lanes, [lane])):
        shared.setdefault(piece.file.key, []).append(piece)
    found: list[Together] = []
    for pieces in shared.values():
        parts = [[p for p in pieces if p.mark in apart], [p for p in pieces if p.mark not in apart]]
        if all(parts):
            found += [of_pieces(MERGED, part) for part in parts]
    return found


def merge(
    at: Workshop,
    log: JournalWriter[ArchiveState],
    plan: Iterable[Together],
    *,
    jobs: int = 1,
    told: Callable[[Merged], None] = lambda _result: None,
) -> Merged:
    """Make files, and put them in the place of those that they are made of.

    Args:
        at: Tier and archive.
        log: The archive's, at its head.
        plan: What is to be made.
        jobs: Files at once; each needs the memory of the old files of it, and of itself.
        told: Called after each entry, with the result so far.

    Raises:
        DataError: A file is not what the log says. What was merged before stays so.
        InternalError: A new file does not hold what it was made of.
        BackendError: A store failed.
    """
    todo = list(plan)
    result = Merged(len(todo))
    with ThreadPoolExecutor(jobs, "tiered-merge") as pool:
        for start in range(0, len(todo), ENTRY_FILES):
            some = todo[start : start + ENTRY_FILES]
            made = list(pool.map(lambda one: write_together(at.archive, at.archive, one), some))
            append_moves(log, made, result)
            told(result)
    log.write_checkpoint()
    return result


class _MovedError(Exception):
    """The archive has changed meanwhile."""


def append_moves(log: JournalWriter[ArchiveState], made: list[NewFile], result: Merged) -> None:
    """One entry for all new files whose old ones still count.

    Raises:
        FencedError: See ``JournalWriter.append``.
        StoreUnavailableError: Likewise.
    """
    due = list(made)

    def hold(state: ArchiveState) -> None:
        if not _fits(state, due):
            raise _MovedError

    while due:
        try:
            log.append([merge_action(due)], check=hold)
        except _MovedError:
            due = [new for new in due if _fits(log.state, [new])]
            continue
        result.entries += 1
        break
    for new in due:
        result.count(new)
    result.overtaken += len(made) - len(due)


def _fits(state: ArchiveState, files: list[NewFile]) -> bool:
    """Whether new files can take the place of the old ones."""
    places = Places(dict(state.lanes), names_of(state))
    return move(places, merge_action(files)) is not None
