# ruff: noqa: TC001, TC003 (the types of fields are read at run time: tiered.journal.entry)
"""The state machine of an archive's log: what is archived, replayed from entries of the same journal that a tier has.

An action is one of the typed records below, as an object of its fields, with its name (``KINDS``) as ``do``. A name that is
not known stops a program: it would read files twice, or not at all.

An action that presumes what has changed since is refused, all of it, and counted. So of two jobs that did the same work the
first one's entry counts. An archive has no epochs of writers: an entry's is always 0.

A file may hold rows of several queues, and of several offset ranges of one. Then each offset range names it, with the
numbers of its own rows in it (a *row range*): the proof of each offset range stays what it was, whichever file its rows lie
in. A merge says only which row ranges lie in which new file; it changes no offset range otherwise. A row range is known by
its queue and ``low``: a row is in one file, and ``low`` is the offset of a row range's first row.

States are immutable, and share the runs of ``tiered.archive.archived``: replay of an entry costs what it says and what
changed since the last checkpoint, and a checkpoint what changed, however much is archived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, Final

from backends.lazy_dataclass import dataclass, picked
from tiered.archive.archived import OffsetRanges, SavedRun
from tiered.archive.bodies import BodyColumns
from tiered.archive.model import (
    Archived,
    ArchiveQueue,
    Fence,
    NewFile,
    ParquetFile,
    Replaced,
    SideFile,
    Truncation,
)
from tiered.journal.append import JournalWriter
from tiered.journal.entry import Action, Entry, as_object, json_text
from tiered.log.actions import action_of, read_action
from tiered.log.lineage import Isolation

# -- jobs ------------------------------------------------------------------------------------------
#
# What the log tells of the jobs that wrote it: one record with each entry of a job, the newest of each run
# kept. Values.

KEPT = 16
"""Runs of which the state keeps the record; older ones are in the log's entries."""


@dataclass(frozen=True, slots=True)
class JobRecord:
    """How far a run had come when it wrote an entry. Numbers are of the run, this entry's included."""

    run: str  # its random id
    program: str  # version of the program
    engine: str  # what did the work: ``local`` or ``spark``
    began_ms: int  # when it began, UTC
    elapsed_ms: int  # since then
    planned: int = 0  # segments that it was to archive
    planned_bytes: int = 0  # bytes of the commit log in them, at most
    segments: int = 0  # archived
    overtaken: int = 0  # that others had archived first
    failed: int = 0  # that failed
    files: int = 0  # made
    rows: int = 0  # messages in them
    bad: int = 0  # records that could not be unpacked
    holes: int = 0  # offsets without a message
    source_bytes: int = 0  # bytes of the commit log, read
    size_bytes: int = 0  # bytes of the files


@dataclass(frozen=True, slots=True)
class SourceFixed:
    """What a broker's store is, if not RocketMQ's, and what of it becomes rows: fixed before any of it is archived."""

    cluster: str
    broker: str
    kind: str  # of the store: ``kafka`` or ``jmq``
    isolation: str = ""  # of ``Isolation``; empty where there are no transactions


# -- the machine -----------------------------------------------------------------------------------

CONDEMNED_MAX = 10_000
"""Keys that a fence names. One that is to name more refuses all files that were made before it, instead."""


@dataclass(frozen=True, slots=True)
class ArchiveState:
    """Everything that an archive's log says."""

    queues: OffsetRanges = field(default_factory=OffsetRanges)
    """OffsetRanges of each queue, in order of offset, apart from one another."""
    tails: Mapping[ArchiveQueue, tuple[Truncation, ...]] = field(default_factory=dict)
    """Marks of what brokers truncated and the archive has dealt with, by queue."""
    refused: int = 0  # entries' actions that came too late or did not fit
    updated_ms: int = 0  # time of the last entry
    jobs: tuple[JobRecord, ...] = ()  # records of the last runs, oldest first
    bodies: Mapping[str, tuple[BodyColumns, ...]] = field(default_factory=dict)
    """What bodies of each topic become, each fixed by an entry: the last holds, the others are of older files."""
    gone: Mapping[str, Replaced] = field(default_factory=dict, compare=False)
    """Files that were part of the archive and are not any more, by key, in the order in which that came."""
    fence: Fence = field(default_factory=Fence)  # which files may become part of it
    sources: Mapping[tuple[str, str], SourceFixed] = field(default_factory=dict)
    """By cluster and broker, of those whose store is not RocketMQ's."""

    @property
    def replaced(self) -> tuple[Replaced, ...]:
        """Files that were part of the archive and are not any more, in the order in which that came."""
        return tuple(self.gone.values())

    def isolation(self, cluster: str, broker: str) -> Isolation | None:
        """What was hidden of a broker's transactions; None: nothing is archived of it, or it has none."""
        source = self.sources.get((cluster, broker))
        return Isolation(source.isolation) if source and source.isolation else None

    def overlapping(self, queue: ArchiveQueue, start: int, end: int) -> list[Archived]:
        """What is archived of offsets ``[start, end)`` of a queue, in order."""
        return self.queues.around(queue, start, end)


def named_sizes(state: ArchiveState) -> dict[str, int]:
    """Of each file that the log names, bytes."""
    return {file.key: file.size_bytes for _, one in state.queues.each() for file in one.objects()}


class ArchiveMachine:
    """What the actions mean. Stateless; see ``tiered.journal.replay.Machine``."""

    def initial(self) -> ArchiveState:
        """An empty archive."""
        return ArchiveState()

    def epoch(self, state: ArchiveState) -> int:  # noqa: ARG002 (the protocol's)
        """There are none."""
        return 0

    def apply(self, state: ArchiveState, entry: Entry) -> ArchiveState:
        """One step of history.

        Raises:
            UnknownActionError: An action of another version.
            ValueError: One that no archiver of this version can have made; ``LookupError``, ``TypeError`` and
                ``AttributeError`` mean the same.
        """
        work = _ArchiveWork(
            queues=state.queues.draft(),
            tails=dict(state.tails),
            bodies=dict(state.bodies),
            sources=dict(state.sources),
            now_ms=entry.time_ms,
            **picked(state, "gone", "fence", "jobs"),
        )
        for action in entry.actions:
            said = read_action(action, KINDS)
            work.refused += not _HANDLERS[type(said)](work, said)
        changed = picked(work, "queues", "tails", "jobs", "bodies", "gone", "fence", "sources")
        refused = state.refused + work.refused
        return ArchiveState(**changed, refused=refused, updated_ms=entry.time_ms)

    def settled(self, state: ArchiveState) -> ArchiveState:
        """With all offset ranges in runs."""
        return replace(state, queues=state.queues.settled())

    def shards(self, state: ArchiveState) -> Sequence[SavedRun]:
        """The runs."""
        return state.queues.runs

    def dump(self, state: ArchiveState) -> Any:  # noqa: ANN401 (JSON values)
        """For a checkpoint: all but the offset ranges."""
        rest = (
            state.replaced,
            state.fence,
            tuple(state.tails.items()),
            tuple(state.bodies.items()),
            tuple(state.sources.values()),
        )
        saved = _Saved(state.refused, state.updated_ms, state.jobs, *rest)
        document = as_object(_Saved).encode(saved)
        if not state.sources:  # as it was before there were any
            del document["sources"]
        return document

    def dump_chunks(self, state: ArchiveState) -> Iterator[bytes]:
        """For a checkpoint."""
        yield json_text(self.dump(state))

    def load(self, document: Any) -> ArchiveState:  # noqa: ANN401 (JSON values)
        """Undo ``dump`` of an archive without an offset range."""
        return self.load_sharded(document, ())

    def load_sharded(self, document: Any, shards: Sequence[bytes]) -> ArchiveState:  # noqa: ANN401 (JSON values)
        """Undo ``dump`` and ``shards``.

        Raises:
            ValueError: It is not a dump; ``LookupError`` and ``TypeError`` mean the same.
        """
        saved = as_object(_Saved).decode({"sources": [], **document})
        return ArchiveState(
            OffsetRanges(list(map(SavedRun, shards))),
            dict(saved.tails),
            saved.refused,
            saved.updated_ms,
            saved.jobs,
            dict(saved.bodies),
            {one.key: one for one in saved.replaced},
            saved.fence,
            {(one.cluster, one.broker): one for one in saved.sources},
        )


@dataclass(frozen=True, slots=True)
class _Saved:
    """A state as checkpoints have it, without its offset ranges, which are their shards."""

    refused: int
    updated_ms: int
    jobs: tuple[JobRecord, ...]
    replaced: tuple[Replaced, ...]
    fence: Fence
    tails: tuple[tuple[ArchiveQueue, tuple[Truncation, ...]], ...]
    bodies: tuple[tuple[str, tuple[BodyColumns, ...]], ...]
    sources: tuple[SourceFixed, ...]


# -- actions ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NamedRange:
    """An offset range, and when it was planned."""

    queue: ArchiveQueue
    tails: int
    """How many truncations of the queue the archiver knew of; with another number it is refused."""
    archived: Archived
    epoch: int = 0  # of the archive; one that the fence does not let is refused


@dataclass(frozen=True, slots=True)
class RangesNamed:
    """Offset ranges that share files, and count together or not at all.

    One that overlaps with what is archived already, or that does not account for each of its offsets, is refused.
    """

    offset_ranges: tuple[NamedRange, ...]


@dataclass(frozen=True, slots=True)
class RangesAgain:
    """Likewise, of offset ranges that are archived, with more columns of bodies: they take the places of the old ones."""

    offset_ranges: tuple[NamedRange, ...]


@dataclass(frozen=True, slots=True)
class Forget:
    """What the broker truncated is no longer part of the archive.

    An offset range whose file holds rows of others, too, is refused: they are divided first.
    """

    queue: ArchiveQueue
    starts: tuple[int, ...]  # where its offset ranges begin
    tail: Truncation  # the reason


@dataclass(frozen=True, slots=True)
class MergedFile:
    """A new file, and what lies in it from now on."""

    key: str
    size_bytes: int
    crc: int
    rows: int  # of all its row ranges
    row_ranges: tuple[tuple[ArchiveQueue, tuple[tuple[int, str], ...]], ...]
    """Of each queue its row ranges: ``low``, and the key of the old file."""
    epoch: int = (
        0  # of the archive, when it was planned; one that the fence does not let is refused
    )


@dataclass(frozen=True, slots=True)
class FilesMerged:
    """New files take the places of old ones."""

    files: tuple[MergedFile, ...]


@dataclass(frozen=True, slots=True)
class Cleaned:
    """Files that were replaced, and are deleted now."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ColumnsFixed:
    """What bodies of a topic become from now on.

    With another number it is refused, so of jobs that choose at once the first one's choice holds.
    """

    topic: str
    number: int  # how many the topic had before
    body: BodyColumns


KINDS: Final[Mapping[str, type[Any]]] = {
    "archive": RangesNamed,
    "again": RangesAgain,
    "forget": Forget,
    "merge": FilesMerged,
    "clean": Cleaned,
    "fence": Fence,
    "job": JobRecord,
    "columns": ColumnsFixed,
    "source": SourceFixed,
}


def archive_action(
    offset_ranges: Iterable[tuple[ArchiveQueue, int, Archived]],
    epoch: int = 0,
    *,
    again: bool = False,
) -> Action:
    """The action that adds offset ranges that share files: all of them, or none.

    Args:
        offset_ranges: Queue, how many truncations of the queue the archiver knew of, and what it archived.
        epoch: Of the archive when they were planned.
        again: They take the places of what they are with fewer columns.
    """
    rows = tuple(NamedRange(*one, epoch) for one in offset_ranges)
    return action_of(RangesAgain(rows) if again else RangesNamed(rows), KINDS)


def forget_action(queue: ArchiveQueue, starts: Iterable[int], tail: Truncation) -> Action:
    """The action that takes offset ranges out, since the broker took their messages back."""
    return action_of(Forget(queue, tuple(starts), tail), KINDS)


def files_merged(files: Iterable[NewFile]) -> FilesMerged:
    """What puts files in the places of others."""
    rows = []
    for file in files:
        queues: dict[ArchiveQueue, list[tuple[int, str]]] = {}
        for one in file.row_ranges:
            queues.setdefault(one.queue, []).append((one.file.low, one.file.key))
        count = sum(one.file.rows for one in file.row_ranges)
        ranges = tuple((queue, tuple(found)) for queue, found in queues.items())
        rows.append(MergedFile(file.key, file.size_bytes, file.crc, count, ranges, file.epoch))
    return FilesMerged(tuple(rows))


def merge_action(files: Iterable[NewFile]) -> Action:
    """The action by which files take the place of others."""
    return action_of(files_merged(files), KINDS)


def clean_action(keys: Iterable[str]) -> Action:
    """The action that says that replaced files are deleted."""
    return action_of(Cleaned(tuple(keys)), KINDS)


def fence_action(epoch: int, keys: Iterable[str]) -> Action:
    """The action that begins an epoch, behind which no entry names these files."""
    condemned = frozenset(keys)
    return action_of(Fence(epoch, condemned if len(condemned) <= CONDEMNED_MAX else None), KINDS)


def job_action(record: JobRecord) -> Action:
    """The action that says how far a run is."""
    return action_of(record, KINDS)


def columns_action(topic: str, number: int, body: BodyColumns) -> Action:
    """The action that fixes what a topic's bodies become, the ``number``-th time, from 0."""
    return action_of(ColumnsFixed(topic, number, body), KINDS)


def source_action(said: SourceFixed) -> Action:
    """The action that fixes what becomes rows of a broker whose store is not RocketMQ's."""
    return action_of(said, KINDS)


def append_if(
    log: JournalWriter[ArchiveState],
    actions: Sequence[Action],
    holds: Callable[[ArchiveState], bool],
) -> bool:
    """Append an entry of what presumes something of the archive; another's entry may come before each try.

    Args:
        holds: Whether that is so in the state to which the entry would be added.

    Returns:
        Whether it was appended; else it does not hold any more, as the log's state, caught up, tells.
    """

    def check(state: ArchiveState) -> None:
        if not holds(state):
            raise _MovedOnError

    try:
        log.append(actions, check=check)
    except _MovedOnError:
        return False
    return True


class _MovedOnError(Exception):
    """The archive has changed meanwhile."""


# -- what they do ----------------------------------------------------------------------------------
#
# Each says whether it was carried out. One that is refused has changed nothing.


@dataclass(slots=True)
class _ArchiveWork:
    """A state under construction, private to one ``apply``."""

    queues: OffsetRanges  # a draft
    tails: dict[ArchiveQueue, tuple[Truncation, ...]]
    bodies: dict[str, tuple[BodyColumns, ...]]
    gone: Mapping[str, Replaced]
    fence: Fence
    jobs: tuple[JobRecord, ...]
    sources: dict[tuple[str, str], SourceFixed]
    now_ms: int
    refused: int = 0

    def add(self, queues: OffsetRanges, named: NamedRange) -> Archived | None:
        """Add an offset range to a draft, if it fits."""
        queue, new = named.queue, named.archived
        fits = named.tails == len(self.tails.get(queue, ()))
        fits &= new.columns <= len(self.bodies.get(queue.topic, ()))
        fits &= self.fence.lets(named.epoch, (file.key for file in new.objects()))
        if not fits or new.start >= new.end or not new.is_whole:
            return None
        if queues.around(queue, new.start, new.end):
            return None
        queues.put(queue, new)
        return new

    def replace(self, files: Iterable[ParquetFile | SideFile]) -> None:
        """Nothing names these files any more."""
        new = {one.key: Replaced(one.key, one.size_bytes, self.now_ms) for one in files}
        if new:
            self.forget_gone(new)
            self.gone = {**self.gone, **new}

    def forget_gone(self, keys: Iterable[str]) -> None:
        """These files are named again, or deleted."""
        known = self.gone.keys() & set(keys)
        if known:
            self.gone = {key: one for key, one in self.gone.items() if key not in known}


def _archive(work: _ArchiveWork, said: RangesNamed | RangesAgain) -> bool:
    """One that comes again first takes out what the new offset ranges take the places of."""
    queues, names = work.queues.draft(), list[str]()
    gone: dict[str, tuple[ArchiveQueue, ParquetFile | SideFile]] = {}
    is_again = isinstance(said, RangesAgain)
    if is_again and not said.offset_ranges:
        return False
    for named in said.offset_ranges:
        if is_again:
            queue, new = named.queue, named.archived
            old = next(iter(queues.around(queue, new.start, new.end)), None)
            if old is None or not old.proves(new) or new.columns < old.columns:
                return False
            queues.remove(queue, old.start)
            gone |= {file.key: (queue, file) for file in old.objects()}
        added = work.add(queues, named)
        if added is None:
            return False
        names += [file.key for file in added.objects()]
    if any(queues.count_of(queue, key) for key, (queue, _) in gone.items()):
        return False
    work.queues = queues
    work.forget_gone(names)
    work.replace(file for _, file in gone.values())
    return True


def _forget(work: _ArchiveWork, said: Forget) -> bool:
    queue, starts, mark = said.queue, set(said.starts), said.tail
    some = [one for start in sorted(starts) for one in work.queues.around(queue, start, start + 1)]
    some = [one for one in some if one.start in starts]
    counts = Counter(file.key for one in some for file in one.files)
    is_shared = any(work.queues.count_of(queue, key) != count for key, count in counts.items())
    if mark in work.tails.get(queue, ()) or is_shared:
        return False
    for one in some:
        work.queues.remove(queue, one.start)
    work.replace(file for one in some for file in one.objects())
    work.tails[queue] = (*work.tails.get(queue, ()), mark)
    return True


def _merge(work: _ArchiveWork, said: FilesMerged) -> bool:
    if not can_merge(work.queues, work.fence, said):
        return False
    gone: dict[str, ParquetFile] = {}
    for (queue, low), (_, new) in _moved(said).items():
        row_range = find_row_range(work.queues, queue, low)
        assert row_range is not None
        archived, old = row_range
        moved = replace(old, key=new.key, size_bytes=new.size_bytes, crc=new.crc)
        files = tuple(moved if file is old else file for file in archived.files)
        work.queues.put(queue, replace(archived, files=files))
        gone[old.key] = old
    work.replace(gone[key] for key in sorted(gone))
    return True


def can_merge(queues: OffsetRanges, fence: Fence, said: FilesMerged) -> bool:
    """Whether a merge is accepted.

    Each row range must lie where it says, every row range of an old file must move, a new file must have as many
    rows as the row ranges in it, and the fence must let it.
    """
    olds, rows = Counter[tuple[ArchiveQueue, str]](), Counter[str]()
    kinds: dict[str, ArchiveQueue] = {}
    for (queue, low), (key, new) in _moved(said).items():
        found = find_row_range(queues, queue, low)
        if found is None or found[1].key != key or queues.count_of(queue, new.key):
            return False
        olds[kinds.setdefault(key, queue), key] += 1
        rows[new.key] += found[1].rows
    return (
        all(queues.count_of(queue, key) == count for (queue, key), count in olds.items())
        and all(file.rows == rows[file.key] > 0 for file in said.files)
        and all(fence.lets(file.epoch, [file.key]) for file in said.files)
    )


def find_row_range(
    queues: OffsetRanges, queue: ArchiveQueue, low: int
) -> tuple[Archived, ParquetFile] | None:
    """The offset range of a row range, and its file; ``low`` is the row range's first offset."""
    every = ((one, file) for one in queues.around(queue, low, low + 1) for file in one.files)
    return next((found for found in every if found[1].low == low), None)


def _moved(said: FilesMerged) -> dict[tuple[ArchiveQueue, int], tuple[str, MergedFile]]:
    """By what each row range is known, the key of its old file and the new one."""
    return {
        (queue, low): (key, file)
        for file in said.files
        for queue, row_ranges in file.row_ranges
        for low, key in row_ranges
    }


def _clean(work: _ArchiveWork, said: Cleaned) -> bool:
    work.forget_gone(said.keys)
    return True


def _fence(work: _ArchiveWork, said: Fence) -> bool:
    if said.epoch != work.fence.epoch + 1:
        return False
    work.fence = said
    return True


def _job(work: _ArchiveWork, said: JobRecord) -> bool:
    work.jobs = (*(one for one in work.jobs if one.run != said.run), said)[-KEPT:]
    return True


def _columns(work: _ArchiveWork, said: ColumnsFixed) -> bool:
    known = work.bodies.get(said.topic, ())
    if said.number != len(known) or (known and not said.body.continues(known[-1])):
        return False
    work.bodies[said.topic] = (*known, said.body)
    return True


def _source(work: _ArchiveWork, said: SourceFixed) -> bool:
    return work.sources.setdefault((said.cluster, said.broker), said) == said


_HANDLERS: Final[Mapping[type[Any], Callable[[_ArchiveWork, Any], bool]]] = {
    RangesNamed: _archive,
    RangesAgain: _archive,
    Forget: _forget,
    FilesMerged: _merge,
    Cleaned: _clean,
    Fence: _fence,
    JobRecord: _job,
    ColumnsFixed: _columns,
    SourceFixed: _source,
}
