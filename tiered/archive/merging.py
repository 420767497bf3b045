"""Small files of an archive become large ones; and shared files are divided, when a part of them has to go.

Overview: ``plan_merge`` says which files of a topic and day become one. Each is made (see below), and an
entry of the log puts the new ones in the place of the old. Nothing is deleted: old files are named as replaced from then on,
and ``tiered.archive.clean`` takes them away after a grace, for the sake of those who are reading them.

Ordering: new files, then the entry. One entry for ``ENTRY_FILES`` new files; what counts is the old ones or the new one.

Retries: keys are functions of what is merged, so who merges the same again makes the same objects. What another has merged,
or forgotten, meanwhile is dropped before each try, and refused in replay.

Failures: a file that is lost or damaged holds up the one new file that it should be in, and no others.

After a crash: new files that no entry names, and the old ones count; or the entry is there, and the new ones do.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import field
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from backends.lazy_dataclass import dataclass
from tiered.archive.checked_ranges import read_proven
from tiered.archive.machine import (
    append_if,
    can_merge,
    fence_action,
    files_merged,
    find_row_range,
    merge_action,
    named_sizes,
)
from tiered.archive.model import DAY_MS, MovedRows, NewFile, Proof, file_key, kind_of
from tiered.archive.parquet import FileWriter, open_whole, read_metadata, row_ranges_in
from tiered.archive.task import publish_file
from tiered.crashpoints import reached
from tiered.errors import DataError
from tiered.upkeep.engine import first_failure, local_engine, while_room

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import pyarrow as pa

    from backends.base import ObjectStore
    from tiered.archive.machine import ArchiveState
    from tiered.archive.model import Archived, ArchiveQueue, ParquetFile
    from tiered.archive.task import JobContext
    from tiered.journal.append import JournalWriter
    from tiered.upkeep.engine import Engine, Failed, WorkContext


# -- rows written once more ------------------------------------------------------------------------
#
# Rows of several files of an archive, written once more into one file, in order of queue and offset; each row range is held
# against its proof.
#
# Ordering: everything is read, checked, written and read back in memory; then the object is put. Nothing of it
# is part of the archive before an entry of the log says so.
#
# Retries: the key is a function of the row ranges. An object that is there already is adopted if it holds the same
# rows.
#
# Memory: the old files as they are stored, of each a row group of columns, and the new file.

_STEP_BYTES = 8 << 20
"""Rows are handed on by so many bytes of columns, about, so that row groups end where they should."""


@dataclass(frozen=True, slots=True)
class Together:
    """A file to be."""

    key: str  # relative to the archive
    row_ranges: tuple[MovedRows, ...]
    """What goes into it, in order of queue and offset; as it lies now."""
    epoch: int  # of the archive; see ``tiered.archive.model.Fence``

    @classmethod
    def of(cls, row_ranges: Iterable[MovedRows], epoch: int) -> Together:
        """One file of row ranges of one topic and day, planned in an epoch."""
        ordered = tuple(sorted(row_ranges, key=lambda one: one.mark))
        day = ordered[0].file.store_min_ms // DAY_MS
        known = [(one.queue, one.file.low, one.file.high, one.file.key) for one in ordered]
        return cls(file_key(day, known, epoch), ordered, epoch)

    def made(self, size_bytes: int, crc: int) -> NewFile:
        """The file, once it is one."""
        return NewFile(self.key, size_bytes, crc, self.row_ranges, self.epoch)


def write_together(context: WorkContext, together: Together) -> tuple[int, int]:
    """Make one file of many.

    Returns:
        Size and CRC-32 of the file.

    Raises:
        DataError: A file is not what the log says, or something else lies under the new key.
        InternalError: The new file does not hold what it was given; it was not put.
    """
    archive, first = context.archive, together.row_ranges[0].file
    files = {first.key: _OldFile(archive, first)}

    def rows() -> Iterator[tuple[MovedRows, pa.RecordBatch]]:
        for row_range in together.row_ranges:
            key = row_range.file.key
            if key not in files:
                files[key] = _OldFile(archive, row_range.file)
            yield from ((row_range, some) for some in files[key].rows(row_range))

    old = files[first.key].said
    said = {name: old[name] for name in _KEPT if name in old}
    return write_row_ranges(
        archive, together, said, rows(), lambda row_range: _differs(archive, row_range.file.key)
    )


def write_row_ranges(
    archive: ObjectStore,
    together: Together,
    said: Mapping[str, str],
    rows: Iterable[tuple[MovedRows, pa.RecordBatch]],
    differs: Callable[[MovedRows], DataError],
) -> tuple[int, int]:
    """Make a file of the rows of its row ranges, which have to prove what the log says of each.

    Args:
        said: What the file says of itself.
        rows: In the order of the row ranges.
        differs: The error to raise of a row range whose rows prove something else. Then nothing is put.

    Returns:
        Size and CRC-32 of the file.
    """
    writer = FileWriter()
    for row_range, some in rows:
        writer.add(some, row_range.queue, row_range.file.low)
    written = writer.finish(said)
    proofs = {(new.queue, new.start): new.proof for new in written.row_ranges}
    for row_range in together.row_ranges:
        if proofs.get(row_range.mark) != Proof.of(row_range.file):
            raise differs(row_range)
    reached("archive-rewriting")
    found = publish_file(archive, together.key, written)
    reached("archive-rewritten")
    return found


_KEPT = ("tiered.source", "tiered.body_format", "tiered.body_columns")
"""What a file says of itself that the one in its place says, too."""


class _OldFile:
    """A file in memory, held against the log; of its columns a row group at a time."""

    def __init__(self, archive: ObjectStore, file: ParquetFile) -> None:
        self._where = archive, file.key
        data = read_proven(archive, file)
        self.said = read_metadata(data)
        self._places = row_ranges_in(self.said)
        self._file = open_whole(data)
        metadata = self._file.metadata
        counts = [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)]
        self._starts = [0, *accumulate(counts)]
        self._held: tuple[int, Any] = (-1, None)

    def rows(self, row_range: MovedRows) -> Iterator[pa.RecordBatch]:
        """The rows of a row range, in order."""
        place = self._places.get(row_range.mark)
        if place is None or place[1] != Proof.of(row_range.file):
            raise _differs(*self._where)
        at, end = place[0], place[0] + row_range.file.rows
        while at < end:
            number = bisect_right(self._starts, at) - 1
            first, behind = self._starts[number], min(end, self._starts[number + 1])
            table = self._group(number).slice(at - first, behind - at)
            step = max(table.num_rows * _STEP_BYTES // max(table.nbytes, 1), 1)
            yield from table.to_batches(max_chunksize=step)
            at = behind
            if behind == self._starts[number + 1]:
                self._held = (-1, None)

    def _group(self, number: int) -> Any:  # noqa: ANN401 (pyarrow has no types)
        if self._held[0] != number:
            table = self._file.read_row_group(number).replace_schema_metadata(None)
            self._held = number, table
        return self._held[1]


def _differs(archive: ObjectStore, key: str) -> DataError:
    return DataError(
        "this file is not what the archive's log says",
        where=f"{archive.url}/{key}",
        do="`tiered archive --verify` looks at all of them",
    )


# -- small files -----------------------------------------------------------------------------------

SMALL_BYTES = 32 << 20
MERGED_BYTES = 128 << 20
MERGED_BODIES = 512 << 20
"""Of a new file, at most, unpacked: what its columns take in memory is not much more."""
ENTRY_FILES = 256


@dataclass(slots=True)
class Merged:
    """What a merge did."""

    planned: int = 0  # files that were to be made
    new_files: int = 0  # made, and part of the archive
    old_files: int = 0  # in the place of which they are
    rows: int = 0  # in them
    old_bytes: int = 0  # of the old files
    new_bytes: int = 0  # of the new ones
    entries: int = 0  # written to the log
    overtaken: int = 0
    """Files that were made in vain, or could not be, since the archive had changed meanwhile."""
    failed: Failed[Together] = field(default_factory=list)  # files that could not be made, and why

    def count(self, new: NewFile) -> None:
        """One more file is part of the archive."""
        old = {row_range.file.key: row_range.file.size_bytes for row_range in new.row_ranges}
        self.new_files += 1
        self.old_files += len(old)
        self.rows += sum(row_range.file.rows for row_range in new.row_ranges)
        self.old_bytes += sum(old.values())
        self.new_bytes += new.size_bytes


def plan_merge(
    state: ArchiveState,
    *,
    takes: Callable[[ArchiveQueue], bool],
    small_bytes: int = SMALL_BYTES,
    merged_bytes: int = MERGED_BYTES,
) -> list[Together]:
    """Which files are to become one. Pure.

    Args:
        takes: Whether a queue is wanted; a file that it shares with one that is not stays.
        merged_bytes: Of the old files of one new one, at most.

    Returns:
        Files to be, each of at least two, all of one topic, day and schema; in order of topic, day and key.
    """
    files: dict[str, _File] = {}
    for queue, archived in state.queues.each():
        for file in archived.files:
            one = files.setdefault(file.key, _File(file.size_bytes, _kind(queue, archived)))
            one.row_ranges.append(MovedRows(queue, file))
            one.is_wanted &= takes(queue) and one.kind == _kind(queue, archived)
    small = [one for one in files.values() if one.is_wanted and one.size_bytes < small_bytes]
    small.sort(key=lambda one: (one.kind, one.day, one.row_ranges[0].mark))
    return [
        Together.of((row_range for one in group for row_range in one.row_ranges), state.fence.epoch)
        for group in _groups(small, merged_bytes)
        if len(group) > 1
    ]


@dataclass(slots=True)
class _File:
    size_bytes: int
    kind: tuple[object, ...]
    row_ranges: list[MovedRows] = field(default_factory=list)
    is_wanted: bool = True

    @property
    def day(self) -> int:
        return self.row_ranges[0].file.store_min_ms // DAY_MS


def _kind(queue: ArchiveQueue, archived: Archived) -> tuple[object, ...]:
    """What files of one new file have in common."""
    columns = archived.schema, archived.columns, archived.has_records
    return (queue.cluster, queue.broker, queue.topic, *columns)


def _groups(files: Iterable[_File], merged_bytes: int) -> Iterator[list[_File]]:
    group: list[_File] = []
    size = bodies = 0
    for one in files:
        more = sum(row_range.file.body_bytes for row_range in one.row_ranges)
        is_other = bool(group) and (group[0].kind, group[0].day) != (one.kind, one.day)
        is_full = size + one.size_bytes > merged_bytes or bodies + more > MERGED_BODIES
        if group and (is_other or is_full):
            yield group
            group, size, bodies = [], 0, 0
        group.append(one)
        size += one.size_bytes
        bodies += more
    if group:
        yield group


def plan_division(
    state: ArchiveState, queue: ArchiveQueue, starts: Iterable[int]
) -> list[Together]:
    """The files that separate some offset ranges of a queue from those with which they share files. Pure.

    Returns:
        For each shared file one of the rows of these offset ranges, and one of the others'.
    """
    wanted = {(queue, start) for start in starts}
    files: dict[str, tuple[list[MovedRows], list[MovedRows]]] = {}
    for other, one in state.queues.each(lambda other: kind_of(other) == kind_of(queue)):
        for file in one.files:
            parts = files.setdefault(file.key, ([], []))
            parts[(other, one.start) in wanted].append(MovedRows(other, file))
    shared = (part for parts in files.values() if all(parts) for part in reversed(parts))
    return [Together.of(part, state.fence.epoch) for part in shared]


def merge_each(
    at: JobContext,
    log: JournalWriter[ArchiveState],
    plan: Iterable[Together],
    *,
    engine: Engine | None = None,
    told: Callable[[Merged], None] = lambda _result: None,
) -> Merged:
    """Make files, and put them in the place of those that they are made of; one that fails holds up no others.

    Args:
        engine: Makes the files; None: a thread, one after another.
        told: Called after each entry, with the result so far.

    Raises:
        BackendError: The log could not be written or read. What was merged before stays so, and what was made is there for
            the next.
    """
    todo = list(plan)
    result, made = Merged(len(todo)), list[NewFile]()

    def commit() -> None:
        append_moves(log, made, result)
        made.clear()
        told(result)

    making = engine or local_engine(at.context, 1)
    with making(write_together, while_room(todo, result.failed)) as outcomes:
        for one, outcome in outcomes:
            if isinstance(outcome, Exception):
                result.failed.append((one, outcome))
                continue
            made.append(one.made(*outcome))
            if len(made) >= ENTRY_FILES:
                commit()
    if made:
        commit()
    if result.failed:
        log.catch_up()
        # That a file is gone which the log does not name any more is not a failure: another has merged or repaired it.
        left = [
            one for one in result.failed if all(_counts(log.state, o) for o in one[0].row_ranges)
        ]
        result.overtaken += len(result.failed) - len(left)
        result.failed = left
    log.write_checkpoint()
    return result


def merge(
    at: JobContext,
    log: JournalWriter[ArchiveState],
    plan: Iterable[Together],
    *,
    engine: Engine | None = None,
) -> Merged:
    """The same for who needs all of it.

    Raises:
        DataError: A file is not what the log says. What could be merged is merged.
        InternalError: A new file does not hold what it was made of.
    """
    result = merge_each(at, log, plan, engine=engine)
    error = first_failure(result.failed)
    if error is not None:
        raise error
    return result


def _counts(state: ArchiveState, row_range: MovedRows) -> bool:
    found = find_row_range(state.queues, *row_range.mark)
    return found is not None and found[1].key == row_range.file.key


def append_moves(log: JournalWriter[ArchiveState], made: list[NewFile], result: Merged) -> None:
    """One entry for all new files whose old ones still count."""
    due = list(made)
    while due:
        if append_if(log, [merge_action(due)], partial(_fits, files=due)):
            result.entries += 1
            break
        due = [new for new in due if _fits(log.state, [new])]
    for new in due:
        result.count(new)
    result.overtaken += len(made) - len(due)


def condemn(log: JournalWriter[ArchiveState], keys: Iterable[str]) -> list[str]:
    """Begin an epoch, so that no entry can name these files from now on: they may be deleted at any time then.

    Returns:
        Which are condemned, in order: those that no entry names by then.
    """
    wanted = set(keys)
    while due := wanted - named_sizes(log.state).keys():
        epoch = log.state.fence.epoch

        def holds(state: ArchiveState, due: set[str] = due, epoch: int = epoch) -> bool:
            return state.fence.epoch == epoch and due.isdisjoint(named_sizes(state))

        if append_if(log, [fence_action(epoch + 1, due)], holds):
            return sorted(due)
    return []


def _fits(state: ArchiveState, files: list[NewFile]) -> bool:
    return can_merge(state.queues, state.fence, files_merged(files))
