"""What is wrong with the files of an archive, and how they are made again.

Three looks: a listing, by which every run finds what is gone or cut; every byte, against the log's checksums; and
``verify_archive``, which holds every row against the log, against the file's own words, and against the tier as far as it
still has it. Looking changes nothing. What is found is listed; the rest goes on.

Repair (``plan_repair``, ``apply_repair``) makes harmed files again from the tier. Rows have to prove what the log says of
them, so what comes of it is what was lost, or nothing. What the broker truncated is made again with the rest of its file: a
job divides the file first, and then forgets it.

Ordering of a repair: the new file, under a key of its own; the entry that puts it in the place of the harmed one; then the
harmed one is deleted, since readers of directories would meet it. A file of holes and bad records has its old key and bytes.

After a crash: a new file that no entry names, which the next repair adopts; or a harmed one that no entry names any more,
which the next repair deletes.

Work of an engine: looking at the files of some offset ranges, and making a file again. Plans and entries are the caller's,
and so is what is deleted, since work may be done twice.

Memory: for each piece of work under way its files (of a repair, the file twice) and, of the tier, ``READ_BYTES``; of the
caller, what the log says of one topic.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from dataclasses import asdict, field, replace
from functools import partial
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from zlib_ng import zlib_ng

from backends.errors import ObjectNotFoundError
from backends.lazy_dataclass import dataclass
from backends.wrapping import put_own
from tiered.api.arrow import load_pyarrow
from tiered.archive.bodies import PLAIN
from tiered.archive.checked_ranges import prove, read_proven
from tiered.archive.columns import (
    BODY_REASON,
    Columns,
    hole_text,
    layout_of,
    side_table,
)
from tiered.archive.latest import damaged_tables, folder_of, give_up
from tiered.archive.lookup import INDEX_KEY, damage_of_index
from tiered.archive.machine import named_sizes
from tiered.archive.merging import Merged, Together, append_moves, condemn, write_row_ranges
from tiered.archive.model import (
    DATA,
    DAY_MS,
    SIDE,
    Archived,
    ArchiveQueue,
    MovedRows,
    ParquetFile,
    Proof,
    SideFile,
    folder_key,
)
from tiered.archive.parquet import (
    have_same_bits,
    read_columns,
    read_metadata,
    row_ranges_in,
    write_small,
)
from tiered.archive.plan import ALL, Sight, Task, ends_dealt_with
from tiered.archive.tables import follow_log
from tiered.archive.task import body_metadata, by_day, task_reader
from tiered.crashpoints import reached
from tiered.errors import DataError, TieredStoreError
from tiered.local.interface import HoleReason
from tiered.log.cursor import incarnation_at
from tiered.log.parts import NO_PARTS, Gap
from tiered.log.reader import TierReader
from tiered.model import QueueOffset
from tiered.upkeep.engine import all_done

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import numpy.typing as npt
    import pyarrow as pa

    from backends.base import ObjectStore
    from tiered.archive.machine import ArchiveState
    from tiered.archive.task import JobContext
    from tiered.journal.append import JournalWriter
    from tiered.log.decode import TierBatch
    from tiered.log.parts import Incarnation, Parts
    from tiered.upkeep.engine import Engine, WorkContext
    from tiered.upkeep.workplace import PlanDocument as Plan


_COMPACTED = hole_text(HoleReason.COMPACTED)


@dataclass(frozen=True, slots=True)
class ArchiveFinding:
    """Something that is not as the log says."""

    queue: str
    key: str  # of the file; empty when it is not a file's
    what: str  # what is wrong


@dataclass(slots=True)
class Report:
    """What was looked at, and what is wrong."""

    findings: list[ArchiveFinding] = field(default_factory=list)  # what is wrong
    files: int = 0  # that were read
    rows: int = 0  # in them
    compared: int = 0  # offset ranges that the tier still has, and that were held against it

    def add(self, more: Report) -> None:
        """What somebody else has looked at."""
        self.findings += more.findings
        self.files += more.files
        self.rows += more.rows
        self.compared += more.compared


def verify_archive(at: JobContext, engine: Engine) -> Report:
    """Read all that is archived of one broker, and what is derived of the whole archive."""
    reader = TierReader(at.tier, at.place.prefix)
    state, report = read_log(at), Report()
    looks: Iterable[Inspection] = _looks(at, state, reader)
    for is_last in (False, True):
        reader.refresh()
        moved: list[Inspection] = []
        with engine(inspect, looks) as outcomes:
            for look, found in outcomes:
                if isinstance(found, ObjectNotFoundError) and not is_last:
                    moved.append(look)  # of the tier, where others merge meanwhile
                elif isinstance(found, Exception):
                    raise found
                else:
                    report.add(found)
        looks = (_again(reader, look) for look in moved)  # once the reader has been refreshed
    report.findings += [
        ArchiveFinding("", key, error.what) for key, error in harmed_derived(at.archive).items()
    ]
    report.findings.sort(key=lambda one: (one.queue, one.key, one.what))
    return report


def harmed_derived(archive: ObjectStore) -> dict[str, TieredStoreError]:
    """What is wrong with what is made of the files alone, the index of keys and tables of newest rows: by key.

    What is another version's is among it (``OtherVersionError``); nobody takes that away.
    """
    return {**damage_of_index(archive), **damaged_tables(archive)}


def read_log(at: JobContext) -> ArchiveState:
    """What the archive's log says."""
    return follow_log(at.archive).state


@dataclass(frozen=True, slots=True)
class Inspection:
    """OffsetRanges whose rows lie in the same files, to be looked at."""

    offset_ranges: tuple[tuple[Archived, Task], ...]
    """What the log says of each, and what the tier has of it: a task without parts when it has not all."""
    named: dict[str, int]
    """Rows that the log names in each file; only of those that no other look is answerable for."""
    is_last: bool = False
    """An object of the tier that is gone is lost, and not one that others have merged."""


def _looks(at: JobContext, state: ArchiveState, reader: TierReader) -> Iterator[Inspection]:
    """All there is to look at, a topic at a time: who shares a file with others mostly has no second one."""
    mine = (at.place.cluster, at.place.broker)
    each = state.queues.each(lambda o: (o.cluster, o.broker) == mine and at.takes(o.topic))
    for _, some in groupby(each, key=lambda pair: pair[0].topic):
        rows, groups = Counter[str](), defaultdict[tuple[str, ...], list[_Side]](list)
        for queue, one in some:
            for file in one.files:
                rows[file.key] += file.rows
            objects = one.files or one.objects()
            groups[tuple(dict.fromkeys(file.key for file in objects))].append((queue, one))
        for keys, those in groups.items():
            named = {key: rows.pop(key) for key in keys if key in rows}
            tasks = [task_of(state, reader, queue, one) for queue, one in those]
            yield Inspection(tuple(zip((one for _, one in those), tasks, strict=True)), named)


def _again(reader: TierReader, look: Inspection) -> Inspection:
    """The same, as the tier is now."""
    tasks = (
        (one, replace(task, parts=tier_parts(reader, task.queue, one.start, one.end)))
        for one, task in look.offset_ranges
    )
    return replace(look, offset_ranges=tuple(tasks), is_last=True)


def task_of(state: ArchiveState, reader: TierReader, queue: ArchiveQueue, one: Archived) -> Task:
    """What the tier has of an offset range, with its columns; without parts when it has not all of it."""
    parts = tier_parts(reader, queue, one.start, one.end)
    incarnations = _incarnations(reader, queue)
    sight = _sight(state, queue, incarnations[-1], one.start, one.end) if incarnations else ALL
    return Task(
        queue,
        one.start,
        one.end,
        parts,
        len(state.tails.get(queue, ())),
        layout_of(state, queue.topic, one),
        state.fence.epoch,
        sight,
    )


def _sight(
    state: ArchiveState, queue: ArchiveQueue, incarnation: Incarnation, low: int, high: int
) -> Sight:
    return Sight.of(state.isolation(queue.cluster, queue.broker), incarnation, low, high)


def tier_parts(reader: TierReader, queue: ArchiveQueue, low: int, high: int) -> Parts:
    """What the tier has of these offsets; none when it has not all of them."""
    incarnations = _incarnations(reader, queue)
    return _parts_of(reader, queue, incarnations[-1], low, high) if incarnations else NO_PARTS


def _incarnations(reader: TierReader, queue: ArchiveQueue) -> list[Incarnation]:
    incarnations = reader.state.queues.get(queue.message_queue, ())
    return [incarnation for incarnation in incarnations if incarnation.number == queue.incarnation]


def _parts_of(
    reader: TierReader, queue: ArchiveQueue, incarnation: Incarnation, low: int, high: int
) -> Parts:
    if low < incarnation.min_offset or high > incarnation.commit_offset:
        return NO_PARTS
    view = reader.view(queue.message_queue, incarnation)
    first, behind = np.searchsorted(view.starts, (low + 1, high)).tolist()
    return view.parts[max(first - 1, 0) : behind]


def inspect(context: WorkContext, look: Inspection) -> Report:
    """Hold files against the log, and against the tier.

    Raises:
        ObjectNotFoundError: An object of the tier is gone, perhaps since others have merged it.
    """
    report, files = Report(files=len(look.named)), _Files(context.archive, look.named)
    for archived, task in look.offset_ranges:
        report.findings += _wrong(context, files, archived, task, report, is_last=look.is_last)
    return report


def _wrong(
    context: WorkContext,
    files: _Files,
    archived: Archived,
    task: Task,
    report: Report,
    *,
    is_last: bool,
) -> Iterator[ArchiveFinding]:
    finding, tables = partial(ArchiveFinding, str(task.queue)), []
    for file in archived.files:
        table, wrong = files.read(MovedRows(task.queue, file))
        yield from (finding(file.key, what) for what in wrong)
        if table is not None:
            report.rows += table.num_rows
            tables.append(table)
    aside, what = _read_side(context.archive, archived.side)
    if what and archived.side:
        yield finding(archived.side.key, what)
    if len(tables) < len(archived.files) or what:
        return
    found = [table["queue_offset"].to_numpy() for table in tables]
    offsets = np.sort(np.concatenate([*found, np.array(aside, np.int64)]))
    if not np.array_equal(offsets, np.arange(archived.start, archived.end)):
        yield finding("", f"offsets [{archived.start}, {archived.end}) are not there once each")
    if task.parts:
        report.compared += 1
        for what in _compare(context, task, archived, tables, is_last=is_last):
            yield finding("", what)


_Places = dict[tuple[ArchiveQueue, int], tuple[int, Proof]]


class _Files:
    """Files in memory, and what is wrong with each."""

    def __init__(self, archive: ObjectStore, named: Mapping[str, int]) -> None:
        self._archive = archive
        self._named = named
        self._held: dict[str, tuple[pa.Table | None, _Places]] = {}

    def read(self, row_range: MovedRows) -> tuple[pa.Table | None, list[str]]:
        """A row range's rows, and what is wrong with it and, once, with its file."""
        file, wrong = row_range.file, list[str]()
        if file.key not in self._held:
            table, said, wrong = self._read(file)
            self._held[file.key] = table, said
        table, said = self._held[file.key]
        if table is None:
            is_first = wrong and file.key in self._named
            return None, wrong if is_first else ["the file could not be read"]
        at, proof = said.get(row_range.mark, (0, None))
        if proof != Proof.of(file):
            return None, [*wrong, "the file says something else of these rows than the log"]
        rows = table.slice(at, file.rows)
        return rows, [*wrong, *_wrong_with(rows, row_range)]

    def _read(self, file: ParquetFile) -> tuple[pa.Table | None, _Places, list[str]]:
        try:
            data = read_proven(self._archive, file)
            table, said = read_columns(data), row_ranges_in(read_metadata(data))
        except DataError as error:
            return None, {}, [error.what]
        named = self._named.get(file.key, table.num_rows)
        wrong = f"the file has {table.num_rows} rows, of which the log names {named}"
        return table, said, [wrong] if table.num_rows != named else []


def _wrong_with(table: pa.Table, row_range: MovedRows) -> Iterator[str]:
    arrow, file = load_pyarrow(), row_range.file
    offsets, crcs = table["queue_offset"].to_numpy(), table["body_crc"].to_numpy()
    days = table["store_ts"].cast(arrow.int64()).to_numpy() // (DAY_MS * 1000)
    if len(offsets) != file.rows or not len(offsets):
        yield f"{len(offsets)} rows, and the log says {file.rows}"
        return
    if (offsets[0], offsets[-1] + 1) != (file.low, file.high) or (np.diff(offsets) <= 0).any():
        yield "queue offsets are not those that the log says, or not in order"
    if int(np.nansum(crcs)) != file.body_crc_sum:
        yield "the sum of the bodies' checksums is not the one that the log says"
    queues = {(row_range.queue.queue_id, row_range.queue.incarnation)}
    numbers = (table[name].to_numpy() for name in ("queue_id", "incarnation"))
    if set(zip(*map(np.unique, numbers), strict=False)) != queues:
        yield "rows are of another queue than the log says"
    if len(np.unique(days)) > 1 or not file.key.startswith(
        folder_key(row_range.queue.topic, int(days[0]))
    ):
        yield "rows are not of the topic and day that the key says"


def _read_side(archive: ObjectStore, side: SideFile | None) -> tuple[list[int], str]:
    if side is None:
        return [], ""
    try:
        table = read_columns(read_proven(archive, side))
    except DataError as error:
        return [], error.what
    compute = load_pyarrow().compute
    others = compute.invert(compute.starts_with(table["reason"], BODY_REASON))
    return table.filter(others)["queue_offset"].to_pylist(), ""


def _compare(
    context: WorkContext, task: Task, archived: Archived, tables: list[pa.Table], *, is_last: bool
) -> Iterator[str]:
    columns = Columns(task.queue, task.layout)
    names = columns.schema.names
    if any(not set(names).issubset(table.column_names) for table in tables):
        yield "columns are missing that the log says are there"
        return
    some = [table.select(names) for table in tables]
    rows = load_pyarrow().concat_tables(some).sort_by("queue_offset") if some else None
    offsets = rows["queue_offset"].to_numpy() if rows is not None else np.zeros(0, np.int64)
    at, aside = 0, 0
    try:
        for batch in _batches(context, task):
            made, left = columns.make(batch)
            behind = int(np.searchsorted(offsets, batch.end_offset))
            # What the tier's topic was compacted of since, the archive has all the same.
            holes = [one.queue_offset for one in left if one.reason == _COMPACTED]
            gone = np.isin(offsets[at:behind], holes)
            if not _is_equal(rows, at, ~gone, made):
                yield f"rows differ from the tier behind offset {batch.base_offset}"
                return
            aside += sum(not one.has_row for one in left) - int(gone.sum())
            at = behind
    except (DataError, ObjectNotFoundError) as error:
        if isinstance(error, ObjectNotFoundError) and not is_last:
            raise
        yield f"the tier cannot be read for comparison: {getattr(error, 'what', error)}"
        return
    if at != archived.rows or aside != archived.holes + archived.bad:
        yield f"the tier has {at} rows and {aside} others"


def _is_equal(
    rows: pa.Table | None, at: int, kept: npt.NDArray[np.bool_], made: list[pa.RecordBatch]
) -> bool:
    arrow = load_pyarrow()
    if rows is None or not made:
        return not made and not kept.any()
    ours = rows.slice(at, len(kept)).filter(arrow.array(kept))
    return have_same_bits(ours, arrow.Table.from_batches(made))


def _batches(context: WorkContext, task: Task) -> Iterator[TierBatch]:
    if not task.parts:
        return iter(())
    source, start = task_reader(context.tier, context.prefix, task), QueueOffset(task.start)
    return (one for one in source.batches(start) if not isinstance(one, Gap))


# -- files that are harmed -------------------------------------------------------------------------


def harmed_files(archive: ObjectStore, state: ArchiveState) -> dict[str, str]:
    """What is wrong with files that the log names, as far as a listing tells: by key, in order."""
    there = {info.key: info.size_bytes for root in (DATA, SIDE) for info in archive.list(root)}
    return {
        key: f"it has {there[key]} bytes, and the log says {size}" if key in there else "it is gone"
        for key, size in sorted(named_sizes(state).items())
        if there.get(key) != size
    }


def damaged_files(archive: ObjectStore, state: ArchiveState, engine: Engine) -> dict[str, str]:
    """The same by every byte: what is gone, has another size, or another checksum than the log says."""
    files = {file.key: file for _, one in state.queues.each() for file in one.objects()}
    found = harmed_files(archive, state)
    rest = (file for key, file in sorted(files.items()) if key not in found)
    with all_done(engine(damage_of, rest)) as every:
        found |= {file.key: what for file, what in every if what}
    return dict(sorted(found.items()))


def damage_of(context: WorkContext, file: ParquetFile | SideFile) -> str:
    """What is wrong with the bytes of a file; empty: nothing."""
    try:
        prove(context.archive, file)
    except DataError as error:
        return error.what
    return ""


def still_harmed(
    archive: ObjectStore, state: ArchiveState, suspects: Mapping[str, str]
) -> dict[str, str]:
    """Those of ``harmed_files`` that a newer state names too, after another look: others merge and clean meanwhile."""
    if not suspects:
        return {}
    sizes = named_sizes(state)
    return {
        key: what
        for key, what in suspects.items()
        if key in sizes and _size_of(archive, key) != sizes[key]
    }


def _size_of(archive: ObjectStore, key: str) -> int | None:
    try:
        return archive.head(key).size_bytes
    except ObjectNotFoundError:
        return None


# -- repair ----------------------------------------------------------------------------------------

REPAIR = "repair"


@dataclass(slots=True)
class Repaired:
    """What a repair did."""

    planned: int = 0  # files that were to be made again
    made: int = 0  # that are part of the archive now
    rows: int = 0  # in them
    deleted: int = 0  # harmed files deleted
    taken_away: int = 0
    """Damaged objects of the index of keys, and tables of newest rows, that do not count any more."""
    failed: list[tuple[str, str]] = field(default_factory=list)
    """Keys of those that could not be made, and why."""

    def document(self) -> dict[str, Any]:
        """As JSON."""
        failed = [{"key": key, "why": why} for key, why in self.failed]
        return {**asdict(self), "failed": failed}


def plan_repair(at: JobContext, state: ArchiveState, engine: Engine, *, by_bytes: bool) -> Plan:
    """What is harmed, and of which the tier has what it was made of. Of this broker; others are named as refused.

    Args:
        by_bytes: Read every file; else one listing tells.
    """
    archive = at.archive
    harmed = damaged_files(archive, state, engine) if by_bytes else harmed_files(archive, state)
    reader = TierReader(at.tier, at.place.prefix)
    reader.refresh()
    repairs, refusals, sizes = [], [], named_sizes(state)
    for key, (row_ranges, sides) in _row_ranges(state, harmed).items():
        parts = [(one.queue, one.file.low, one.file.high) for one in row_ranges]
        parts += [(queue, one.start, one.end) for queue, one in sides]
        sources = ((*part, _sources(reader, state, *part)) for part in parts)
        why = next(filter(None, (_unmakeable(at, *one) for one in sources)), "")
        if why:
            refusals.append(f"{key}: {harmed[key]}; {why}")
            continue
        rows = sum(one.file.rows for one in row_ranges)
        repairs.append({"key": key, "what": harmed[key], "rows": rows, "size_bytes": sizes[key]})
    return at.plan(
        REPAIR,
        repairs=repairs,
        remains=_remains(archive, state),
        derived=_derived(archive) if by_bytes else [],
        refusals=refusals,
    )


def apply_repair(
    at: JobContext, log: JournalWriter[ArchiveState], plan: Plan, engine: Engine
) -> Repaired:
    """Carry out a plan: what of it is still named, and of which the rows prove the same.

    Raises:
        InvalidError: It is of another archive.
        BackendError: A store failed. Applying again goes on.
    """
    at.require_own(plan)
    keys = [row["key"] for row in plan["repairs"]]
    result = Repaired(len(keys))
    log.catch_up()
    reader = TierReader(at.tier, at.place.prefix)
    wanted = keys
    for is_last in (False, True):
        reader.refresh()
        moved: list[str] = []
        with engine(make_again, _remakes(log.state, reader, wanted)) as outcomes:
            for remake, made in outcomes:
                if isinstance(made, ObjectNotFoundError) and not is_last:
                    moved.append(remake.key)  # of the tier, where others merge meanwhile
                elif isinstance(made, (TieredStoreError, ObjectNotFoundError)):
                    result.failed.append((remake.key, str(made)))
                elif isinstance(made, Exception):
                    raise made
                else:
                    _take(at, log, remake, made, result)
        wanted = moved
    _delete_harmed(at, log, [*keys, *plan["remains"]], result)
    _take_away(at, [key for key, _ in plan["derived"]], result)
    log.write_checkpoint()
    return result


def _derived(archive: ObjectStore) -> list[list[str]]:
    """Key and damage of what is derived and may be taken away."""
    found = harmed_derived(archive).items()
    return [[key, error.what] for key, error in found if isinstance(error, DataError)]


def _take_away(at: JobContext, keys: list[str], result: Repaired) -> None:
    """What is derived and still damaged, so that who makes it makes it again."""
    still = {key for key, _ in _derived(at.archive)} if keys else set()
    tables = {folder_of(key) or "" for key in keys if key in still}
    for key in keys:
        if key in still and INDEX_KEY.fullmatch(key):
            at.archive.delete(key)
            result.taken_away += 1
    for folder in sorted(tables - {""}):
        result.taken_away += give_up(at.archive, folder, at.clock.now_ms())


def _take(
    at: JobContext,
    log: JournalWriter[ArchiveState],
    remake: Remake,
    made: bytes | tuple[int, int],
    result: Repaired,
) -> None:
    if isinstance(made, bytes):
        _replace(at.archive, remake.key, made)
        result.made += 1
        return
    merged = Merged()
    new = Together.of((row_range for row_range, _ in remake.row_ranges), remake.epoch).made(*made)
    append_moves(log, [new], merged)
    result.made += merged.new_files
    result.rows += merged.rows


def _delete_harmed(
    at: JobContext, log: JournalWriter[ArchiveState], keys: list[str], result: Repaired
) -> None:
    """What no entry names any more; ``--clean`` waits for readers, and this one nobody can read."""
    log.catch_up()
    replaced = {one.key for one in log.state.replaced}
    there = [key for key in keys if key in replaced and _size_of(at.archive, key) is not None]
    for key in condemn(log, there):
        reached("archive-repaired")
        at.archive.delete(key)
        result.deleted += 1


def _remains(archive: ObjectStore, state: ArchiveState) -> list[str]:
    """Files that a killed repair has replaced, and not deleted any more: of another size than they once had."""
    sizes, named = {one.key: one.size_bytes for one in state.replaced}, named_sizes(state)
    found = (info for info in archive.list(DATA) if info.key in sizes and info.key not in named)
    return sorted(info.key for info in found if info.size_bytes != sizes[info.key])


_Side = tuple[ArchiveQueue, Archived]


def _row_ranges(
    state: ArchiveState, keys: Iterable[str]
) -> dict[str, tuple[list[MovedRows], list[_Side]]]:
    """What lies in each file that is named: rows, or what is not a row."""
    wanted = set(keys)
    found: dict[str, tuple[list[MovedRows], list[_Side]]] = {}
    for queue, one in state.queues.each():
        for file in one.files:
            if file.key in wanted:
                found.setdefault(file.key, ([], []))[0].append(MovedRows(queue, file))
        if one.side and one.side.key in wanted:
            found.setdefault(one.side.key, ([], []))[1].append((queue, one))
    return found


def _unmakeable(at: JobContext, queue: ArchiveQueue, low: int, high: int, sources: Sources) -> str:
    """Why the tier is not a source of these offsets; empty: it is one."""
    if (queue.cluster, queue.broker) != (at.place.cluster, at.place.broker):
        return f"it is of {queue.cluster}/{queue.broker}: repair with the tier of that broker"
    if not sources:
        return f"the tier has not offsets [{low}, {high}) of {queue.message_queue} any more: put the file back from a copy"
    return ""


@dataclass(frozen=True, slots=True)
class Remake:
    """A file to be made again, and what the tier has of it."""

    key: str  # of the harmed one
    row_ranges: tuple[tuple[MovedRows, Sources], ...]  # rows that lay in it
    sides: tuple[tuple[SideFile, Sources], ...]
    """Or the offset range whose holes and bad records did."""
    epoch: int  # of the archive


Sources = tuple[Task, ...]
"""Where the tier has some offsets, in order: at least one; of each as much as lies in one of a queue's incarnations."""


def _sources(
    reader: TierReader, state: ArchiveState, queue: ArchiveQueue, low: int, high: int
) -> Sources:
    """Where the tier has offsets of the history that the archive stands on; none when it has not all of them.

    What the broker has truncated since is kept there, too. It does not count any more, but nothing forgets it as long as
    the file in which it lies beside others is harmed.
    """
    incarnations, found, at = _incarnations(reader, queue), list[Task](), low
    if not incarnations:
        return ()
    (offset_range,) = state.overlapping(queue, low, low + 1)
    layout = layout_of(state, queue.topic, offset_range)
    tails = ends_dealt_with(state, queue, incarnations)
    while at < high:
        incarnation, _, behind = incarnation_at(incarnations, tails, at)
        end = min(behind, high)
        parts = _parts_of(reader, queue, incarnation, at, end) if at < end else NO_PARTS
        if not parts:
            return ()
        sight = _sight(state, queue, incarnation, at, end)
        found.append(Task(queue, at, end, parts, layout=layout, sight=sight))
        at = end
    return tuple(found)


def _remakes(state: ArchiveState, reader: TierReader, keys: Iterable[str]) -> Iterator[Remake]:
    for key, (row_ranges, sides) in _row_ranges(state, keys).items():
        rows, others = [], []
        for row_range in row_ranges:
            file = row_range.file
            rows.append((row_range, _sources(reader, state, row_range.queue, file.low, file.high)))
        for queue, one in sides:
            assert one.side is not None
            others.append((one.side, _sources(reader, state, queue, one.start, one.end)))
        yield Remake(key, tuple(rows), tuple(others), state.fence.epoch)


def make_again(context: WorkContext, remake: Remake) -> bytes | tuple[int, int]:
    """A harmed file once more.

    Returns:
        Size and CRC-32 of a file that lies under a key of its own now; or the bytes of one of holes and bad records.

    Raises:
        InternalError: The file does not say what it was told to.
        ObjectNotFoundError: An object of the tier is gone.
    """
    for side, tasks in remake.sides:
        return _side_again(context, side, tasks)
    new = Together.of((row_range for row_range, _ in remake.row_ranges), remake.epoch)
    sources = dict(remake.row_ranges)
    layouts = (task.layout for tasks in sources.values() for task in tasks)
    said = {"tiered.source": context.prefix, **body_metadata(next(layouts, PLAIN))}

    def rows() -> Iterator[tuple[MovedRows, pa.RecordBatch]]:
        for row_range in new.row_ranges:
            tasks, found = sources[row_range], 0
            if not tasks:
                raise _differs(row_range, "it has not all of these offsets")
            for task in tasks:
                for some in _rows_of(context, task, row_range.file):
                    yield row_range, some
                    found += some.num_rows
            if found != row_range.file.rows:
                raise _differs(row_range, f"it has {found} of {row_range.file.rows} rows")

    differs = partial(_differs, what="it has other rows")
    return write_row_ranges(context.archive, new, said, rows(), differs)


def _rows_of(context: WorkContext, task: Task, file: ParquetFile) -> Iterator[pa.RecordBatch]:
    """Rows of the file's day between its offsets, in order."""
    columns = Columns(task.queue, task.layout)
    for batch in _batches(context, task):
        for made in columns.make(batch)[0]:
            for day, rows in by_day(made):
                offsets = rows.column("queue_offset").to_numpy()
                low, high = np.searchsorted(offsets, (file.low, file.high)).tolist()
                if day == file.store_min_ms // DAY_MS and low < high:
                    yield rows.slice(low, high - low)


def _differs(row_range: MovedRows, what: str) -> DataError:
    return DataError(
        f"the tier is not any more what this file was made of: {what}",
        where=f"{row_range.queue} [{row_range.file.low}, {row_range.file.high})",
        do="put the file back from a copy",
    )


def _side_again(context: WorkContext, side: SideFile, tasks: Sources) -> bytes:
    """The file of holes and bad records once more, byte for byte; it is the caller's to put it in the old one's place."""
    data = b""
    if tasks:
        columns = Columns(tasks[0].queue, tasks[0].layout)
        batches = chain.from_iterable(_batches(context, task) for task in tasks)
        aside = [one for batch in batches for one in columns.make(batch)[1]]
        aside.sort(key=lambda one: one.queue_offset)
        data = write_small(side_table(tasks[0].queue, aside))
    if (len(data), zlib_ng.crc32(data)) != (side.size_bytes, side.crc):
        raise DataError(
            "the tier is not any more what this file was made of",
            where=f"{context.archive.url}/{side.key}",
            do="put the file back from a copy",
        )
    return data


def _replace(archive: ObjectStore, key: str, data: bytes) -> None:
    """Put a file in the place of a harmed one. Another run may do the same: who comes late has nothing to do."""
    with contextlib.suppress(ObjectNotFoundError):
        if archive.get(key) == data:
            return
    archive.delete(key)
    put_own(archive, key, data)
