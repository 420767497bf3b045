"""The state machine of an archive's log: what is archived, replayed from entries of the same journal that a tier has.

============= ============================================================================================
action        fields
============= ============================================================================================
archive       ``offset_ranges`` that share files, and count together or not at all: of each the ``queue``, the fields of
              ``Archived`` (queue offsets, and the files that hold them from now on); ``tails``: how many marks of the
              queue the archiver knew of, with another number it is refused; and ``epoch``, see ``fence``
again         likewise, of offset ranges that are archived, with more columns of bodies: they take the places of the old ones
forget        ``queue``; ``starts``: its offset ranges that begin at these offsets are no longer part of the archive;
              ``tail``: mark of what the broker truncated, the reason; see ``Truncation``
merge         ``files``: new ones, each with what lies in it from now on (below)
clean         ``keys``: files that were replaced, and are deleted now
fence         ``epoch``, the one that begins, and ``keys`` of files that are about to be deleted, so that no entry may
              name them any more (none: none made before may); see ``Fence``. Each offset range and each file of a ``merge``
              has the ``epoch`` in which it was planned (none: 0): those that the fence does not let are refused
job           how far the job is that wrote this entry; see ``JobRecord``
columns       ``topic``, and ``body``: the columns that bodies of the topic become from now on (``BodyColumns``);
              ``number``: how many the topic had before: with another number it is refused, so of jobs that choose at
              once the first one's choice holds
============= ============================================================================================

An action has a ``format`` (none: 1). A newer one, and an action that is not known, stop a program: it would read files
twice, or not at all. A ``forget`` of an offset range whose file holds rows of others, too, is refused: they are divided
first.

An ``archive`` that overlaps with what is archived already, or that does not account for each of its offsets, is refused
and counted: of two jobs that did the same work, the first one's entry counts. An archive has no epochs, so its
epoch is always 0.

A file may hold rows of several queues, and of several offset ranges of one. Then each offset range names it, with the
numbers of its own rows in it (a *row range*): the proof of each offset range stays what it was, whichever file its rows lie
in. A merge says only which row ranges lie in which new file; it changes no offset range otherwise. A row range is known by
its queue and ``low``: a row is in one file, and ``low`` is the offset of a row range's first row.

States are immutable, and share the runs of ``tiered.archive.archived``: replay of an entry costs what it says and what
changed since the last checkpoint, and a checkpoint what changed, however much is archived.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

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
    of_row,
)
from tiered.journal.entry import json_text
from tiered.journal.replay import UnknownActionError
from tiered.log.wellformed import check_ints, check_texts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tiered.journal.append import JournalWriter
    from tiered.journal.entry import Action, Entry


# -- jobs ------------------------------------------------------------------------------------------
#
# What the log tells of the jobs that wrote it: one record with each entry of a job, the newest of each run
# kept. Values.

JOB = "job"
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

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> JobRecord:
        """From JSON, with a field for each of these; what else it has is left out.

        Raises:
            ValueError: It has another form; ``LookupError`` and ``TypeError`` mean the same.
        """
        return of_row(cls, [document[one.name] for one in fields(cls)])


def job_action(record: JobRecord) -> Action:
    """The action that says how far a run is."""
    return {"do": JOB, "format": 1, **asdict(record)}


# -- the machine -----------------------------------------------------------------------------------

ARCHIVE = "archive"
AGAIN = "again"
FORGET = "forget"
MERGE = "merge"
CLEAN = "clean"
FENCE = "fence"
COLUMNS = "columns"
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

    @property
    def replaced(self) -> tuple[Replaced, ...]:
        """Files that were part of the archive and are not any more, in the order in which that came."""
        return tuple(self.gone.values())

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
            state.queues.draft(),
            dict(state.tails),
            dict(state.bodies),
            state.gone,
            state.fence,
            state.jobs,
            entry.time_ms,
        )
        for action in entry.actions:
            handler = _HANDLERS.get(action.get("do", ""))
            if handler is None or action.get("format", 1) != 1:
                raise UnknownActionError(f"{action.get('do')!r:.80}")
            work.refused += not handler(work, action)
        return ArchiveState(
            work.queues,
            work.tails,
            state.refused + work.refused,
            entry.time_ms,
            work.jobs,
            work.bodies,
            work.gone,
            work.fence,
        )

    def settled(self, state: ArchiveState) -> ArchiveState:
        """With all offset ranges in runs."""
        return replace(state, queues=state.queues.settled())

    def shards(self, state: ArchiveState) -> Sequence[SavedRun]:
        """The runs."""
        return state.queues.runs

    def dump(self, state: ArchiveState) -> Any:  # noqa: ANN401 (JSON values)
        """For a checkpoint: all but the offset ranges."""
        return {
            "refused": state.refused,
            "updated_ms": state.updated_ms,
            "jobs": [asdict(record) for record in state.jobs],
            "replaced": [one.row() for one in state.replaced],
            "fence": _fence_row(state.fence),
            "tails": [
                [queue.row(), [list(mark) for mark in marks]]
                for queue, marks in state.tails.items()
            ],
            "bodies": [
                [topic, [body.document() for body in found]]
                for topic, found in state.bodies.items()
            ],
        }

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
        check_ints((document["refused"], document["updated_ms"]), "a state")
        check_texts((topic for topic, _ in document["bodies"]), "a topic")
        return ArchiveState(
            OffsetRanges(list(map(SavedRun, shards))),
            {
                ArchiveQueue.of(row): tuple(map(Truncation.of, marks))
                for row, marks in document["tails"]
            },
            document["refused"],
            document["updated_ms"],
            tuple(map(JobRecord.of, document["jobs"])),
            {topic: tuple(map(BodyColumns.of, found)) for topic, found in document["bodies"]},
            {one.key: one for one in map(Replaced.of, document["replaced"])},
            _fence_of(document["fence"]),
        )


# -- actions ---------------------------------------------------------------------------------------


def archive_action(
    offset_ranges: Iterable[tuple[ArchiveQueue, int, Archived]],
    epoch: int = 0,
    *,
    again: bool = False,
) -> Action:
    """The action that adds offset ranges that share files: all of them, or none.

    Args:
        offset ranges: Queue, how many marks of the queue the archiver knew of, and what it archived.
        epoch: Of the archive when they were planned.
        again: They take the places of what they are with fewer columns.
    """
    more = {"epoch": epoch} if epoch else {}
    rows = [
        {"queue": queue.row(), "tails": tails, **archived.document(), **more}
        for queue, tails, archived in offset_ranges
    ]
    return {"do": AGAIN if again else ARCHIVE, "format": 1, "offset_ranges": rows}


def forget_action(queue: ArchiveQueue, starts: list[int], tail: Truncation) -> Action:
    """The action that takes offset ranges out, since the broker took their messages back."""
    return {"do": FORGET, "queue": queue.row(), "starts": starts, "tail": list(tail)}


def merge_action(files: Iterable[NewFile]) -> Action:
    """The action by which files take the place of others."""
    rows = []
    for file in files:
        queues: dict[ArchiveQueue, list[list[Any]]] = {}
        for row_range in file.row_ranges:
            queues.setdefault(row_range.queue, []).append([row_range.file.low, row_range.file.key])
        row = {
            "key": file.key,
            "size_bytes": file.size_bytes,
            "crc": file.crc,
            "rows": sum(row_range.file.rows for row_range in file.row_ranges),
            "row_ranges": [[queue.row(), found] for queue, found in queues.items()],
        }
        rows.append({**row, "epoch": file.epoch} if file.epoch else row)
    return {"do": MERGE, "format": 1, "files": rows}


def clean_action(keys: Iterable[str]) -> Action:
    """The action that says that replaced files are deleted."""
    return {"do": CLEAN, "format": 1, "keys": list(keys)}


def fence_action(epoch: int, keys: Iterable[str]) -> Action:
    """The action that begins an epoch, behind which no entry names these files."""
    condemned = sorted(keys)
    named = condemned if len(condemned) <= CONDEMNED_MAX else None
    return {"do": FENCE, "format": 1, "epoch": epoch, "keys": named}


def columns_action(topic: str, number: int, body: BodyColumns) -> Action:
    """The action that fixes what a topic's bodies become, the ``number``-th time, from 0."""
    return {"do": COLUMNS, "topic": topic, "number": number, "body": body.document()}


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

    Raises:
        FencedError: See ``JournalWriter.append``.
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
    now_ms: int
    refused: int = 0

    def add(self, queues: OffsetRanges, offset_range: Action) -> Archived | None:
        """Add an offset range to a draft, if it fits."""
        queue, new, epoch = (
            ArchiveQueue.of(offset_range["queue"]),
            Archived.of(offset_range),
            offset_range.get("epoch", 0),
        )
        check_ints((epoch,), "an epoch")
        fits = offset_range["tails"] == len(self.tails.get(queue, ()))
        fits &= new.columns <= len(self.bodies.get(queue.topic, ()))
        fits &= self.fence.lets(epoch, (file.key for file in new.objects()))
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


def _archive(work: _ArchiveWork, action: Action) -> bool:
    """Both ``archive`` and ``again``, which first takes out what the new offset ranges take the places of."""
    queues, names = work.queues.draft(), list[str]()
    gone: dict[str, tuple[ArchiveQueue, ParquetFile | SideFile]] = {}
    if action["do"] == AGAIN and not action["offset_ranges"]:
        return False
    for offset_range in action["offset_ranges"]:
        if action["do"] == AGAIN:
            queue, new = ArchiveQueue.of(offset_range["queue"]), Archived.of(offset_range)
            old = next(iter(queues.around(queue, new.start, new.end)), None)
            if old is None or not old.proves(new) or new.columns < old.columns:
                return False
            queues.remove(queue, old.start)
            gone |= {file.key: (queue, file) for file in old.objects()}
        added = work.add(queues, offset_range)
        if added is None:
            return False
        names += [file.key for file in added.objects()]
    if any(queues.count_of(queue, key) for key, (queue, _) in gone.items()):
        return False
    work.queues = queues
    work.forget_gone(names)
    work.replace(file for _, file in gone.values())
    return True


def _forget(work: _ArchiveWork, action: Action) -> bool:
    queue, starts = ArchiveQueue.of(action["queue"]), set(action["starts"])
    check_ints(starts, "an offset range")
    mark = Truncation.of(action["tail"])
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


def _merge(work: _ArchiveWork, action: Action) -> bool:
    if not can_merge(work.queues, work.fence, action):
        return False
    gone: dict[str, ParquetFile] = {}
    for (queue, low), (_, new) in _moved(action).items():
        row_range = find_row_range(work.queues, queue, low)
        assert row_range is not None
        archived, old = row_range
        fields = {"key": new["key"], "size_bytes": new["size_bytes"], "crc": new["crc"]}
        files = tuple(replace(old, **fields) if file is old else file for file in archived.files)
        work.queues.put(queue, replace(archived, files=files))
        gone[old.key] = old
    work.replace(gone[key] for key in sorted(gone))
    return True


def can_merge(queues: OffsetRanges, fence: Fence, action: Action) -> bool:
    """Whether a ``merge`` is accepted.

    Each row range must lie where the action says, every row range of an old file must move, a new file must have as many
    rows as the row ranges in it, and the fence must let it.

    Raises:
        ValueError: It makes no sense; ``LookupError`` and ``TypeError`` mean the same.
    """
    olds, rows = Counter[tuple[ArchiveQueue, str]](), Counter[int]()
    kinds: dict[str, ArchiveQueue] = {}
    for (queue, low), (key, new) in _moved(action).items():
        found = find_row_range(queues, queue, low)
        if found is None or found[1].key != key or queues.count_of(queue, new["key"]):
            return False
        olds[kinds.setdefault(key, queue), key] += 1
        rows[id(new)] += found[1].rows
    files = action["files"]
    return (
        all(queues.count_of(queue, key) == count for (queue, key), count in olds.items())
        and all(row["rows"] == rows[id(row)] > 0 for row in files)
        and all(fence.lets(row.get("epoch", 0), [row["key"]]) for row in files)
    )


def find_row_range(
    queues: OffsetRanges, queue: ArchiveQueue, low: int
) -> tuple[Archived, ParquetFile] | None:
    """The offset range of a row range, and its file; ``low`` is the row range's first offset."""
    every = ((one, file) for one in queues.around(queue, low, low + 1) for file in one.files)
    return next((found for found in every if found[1].low == low), None)


def _moved(action: Action) -> dict[tuple[ArchiveQueue, int], tuple[str, Any]]:
    """By what each row range is known, the key of its old file and the row of the new one."""
    found: dict[tuple[ArchiveQueue, int], tuple[str, Any]] = {}
    for row in action["files"]:
        check_texts((row["key"],), "a file of an archive")
        numbers = row["size_bytes"], row["crc"], row["rows"], row.get("epoch", 0)
        check_ints(numbers, "a file of an archive")
        for queue_row, row_ranges in row["row_ranges"]:
            queue = ArchiveQueue.of(queue_row)
            check_ints((low for low, _ in row_ranges), "a row range of a file")
            check_texts((key for _, key in row_ranges), "a row range of a file")
            found |= {(queue, low): (key, row) for low, key in row_ranges}
    return found


def _clean(work: _ArchiveWork, action: Action) -> bool:
    check_texts(action["keys"], "a file that is gone")
    work.forget_gone(action["keys"])
    return True


def _fence(work: _ArchiveWork, action: Action) -> bool:
    new = _fence_of([action["epoch"], action["keys"]])
    if new.epoch != work.fence.epoch + 1:
        return False
    work.fence = new
    return True


def _fence_row(fence: Fence) -> list[Any]:
    return [fence.epoch, None if fence.condemned is None else sorted(fence.condemned)]


def _fence_of(row: list[Any]) -> Fence:
    epoch, keys = row
    check_ints((epoch,), "a fence")
    check_texts(keys or (), "a file that is condemned")
    return Fence(epoch, None if keys is None else frozenset(keys))


def _job(work: _ArchiveWork, action: Action) -> bool:
    new = JobRecord.of(action)
    work.jobs = (*(one for one in work.jobs if one.run != new.run), new)[-KEPT:]
    return True


def _columns(work: _ArchiveWork, action: Action) -> bool:
    topic, number, new = action["topic"], action["number"], BodyColumns.of(action["body"])
    check_texts((topic,), "a topic")
    known = work.bodies.get(topic, ())
    if number != len(known) or (known and not new.continues(known[-1])):
        return False
    work.bodies[topic] = (*known, new)
    return True


_HANDLERS = {
    ARCHIVE: _archive,
    AGAIN: _archive,
    FORGET: _forget,
    MERGE: _merge,
    CLEAN: _clean,
    FENCE: _fence,
    JOB: _job,
    COLUMNS: _columns,
}
