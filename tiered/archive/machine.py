"""The state machine of an archive's log: what is archived, replayed from entries of the same journal that a tier has.

============= ============================================================================================
action        fields besides ``do`` and ``lane``
============= ============================================================================================
archive       those of ``Archived``: queue offsets of a lane and the files that hold them from now on;
              ``tails``: how many marks of the lane the archiver knew of: with another number it is refused
forget        ``starts``: the stretches that begin at these offsets are no longer part of the archive;
              ``tail``: mark of what the broker truncated, the reason; see ``Truncation``
again         no ``lane``: ``stretches``, each as an ``archive`` action of one that is archived, with more columns
              of bodies: they take the places of the old ones, all that share files together or not at all
fence         no ``lane``: ``epoch``, the one that begins, and ``keys`` of files that are about to be deleted, so that no
              entry may name them any more (none: none made before may); see ``tiered.archive.moves.Fence``.
              An ``archive``, each stretch of a ``pack`` or ``again`` and each file of a ``merge`` have the ``epoch`` in
              which they were planned (none: 0): those that the fence does not let are refused
pack          no ``lane``: ``stretches``, each as an ``archive`` action: they share files, and count together or
              not at all
clean         no ``lane``: ``keys``: files that were replaced, and are deleted now
merge         no ``lane``: ``files``: new files, each with what lies in it from now on; see ``tiered.archive.moves``
job           no ``lane``: how far the job is that wrote this entry; see ``JobRecord``
columns       no ``lane``: ``topic``, and ``body``: the columns that bodies of the topic become from now on
              (``BodyColumns``); ``number``: how many the topic had before: with another number it is refused, so
              of jobs that choose at once the first one's choice holds
============= ============================================================================================

An action has a ``format`` (none: 1). A newer one, and an action that is not known, stop a program: it would read files
twice, or not at all. A ``forget`` of a stretch whose file holds rows of others, too, is refused: they are divided first.

An ``archive`` that overlaps with what is archived already, or that does not account for each of its offsets, is refused
and counted: of two jobs that did the same work, the first one's entry counts. An archive has no epochs, so its
epoch is always 0. States are immutable, and share what did not change (``tiered.archive.saved_runs``): replay of an
entry costs what it says, and a checkpoint what changed since the last, however much is archived.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tiered.archive.bodies import BodyColumns
from tiered.archive.model import Archived, ArchiveLane, Truncation
from tiered.archive.moves import (
    MERGE,
    PACK,
    Fence,
    Kind,
    Places,
    Replaced,
    move,
    pack_action,
    stretch_row,
)
from tiered.archive.saved_runs import Saved, SavedRun, Shared, stretches_of
from tiered.journal.entry import json_text
from tiered.journal.replay import UnknownActionError
from tiered.log.wellformed import check_ints, check_texts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tiered.archive.model import ParquetFile, SideFile
    from tiered.journal.entry import Action, Entry


# -- jobs ------------------------------------------------------------------------------------------
#
# What the log tells of the jobs that wrote it: one record with each entry of a job, the newest of each run
# kept. Values.

JOB = "job"
KEPT = 16
"""Runs of which the state keeps the record; older ones are in the log's entries."""
_TEXTS = ("run", "program", "engine")
_NUMBERS = (
    *("began_ms", "elapsed_ms", "planned", "planned_bytes", "segments", "overtaken", "failed"),
    *("files", "rows", "bad", "holes", "source_bytes", "size_bytes"),
)


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

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> JobRecord:
        """Undo ``document``; what else it has is left out.

        Raises:
            ValueError: It has another form; ``LookupError`` and ``TypeError`` mean the same.
        """
        texts = {name: document[name] for name in _TEXTS}
        numbers = {name: document[name] for name in _NUMBERS}
        check_texts(texts.values(), "a job")
        check_ints(numbers.values(), "a job")
        return cls(**texts, **numbers)


def job_action(record: JobRecord) -> Action:
    """The action that says how far a run is."""
    return {"do": JOB, "format": 1, **record.document()}


def with_record(records: tuple[JobRecord, ...], new: JobRecord) -> tuple[JobRecord, ...]:
    """Records, oldest first, with a run's newest in the place of its last."""
    others = [one for one in records if one.run != new.run]
    return (*others, new)[-KEPT:]


# -- the machine -----------------------------------------------------------------------------------

ARCHIVE = "archive"
FORGET = "forget"
COLUMNS = "columns"
CLEAN = "clean"
AGAIN = "again"
FENCE = "fence"
CONDEMNED_MAX = 10_000
"""Keys that a fence names. One that is to name more refuses all files that were made before it, instead."""


@dataclass(frozen=True, slots=True)
class ArchiveState:
    """Everything that an archive's log says."""

    lanes: Mapping[ArchiveLane, Sequence[Archived]] = field(default_factory=dict)
    """Stretches of each lane, in order of offset, apart from one another."""
    tails: Mapping[ArchiveLane, tuple[Truncation, ...]] = field(default_factory=dict)
    """Marks of what brokers truncated and the archive has dealt with, by lane."""
    refused: int = 0  # entries' actions that came too late or did not fit
    updated_ms: int = 0  # time of the last entry
    jobs: tuple[JobRecord, ...] = ()  # records of the last runs, oldest first
    bodies: Mapping[str, tuple[BodyColumns, ...]] = field(default_factory=dict)
    """What bodies of each topic become, each fixed by an entry: the last holds, the others are of older files."""
    gone: Shared[str, tuple[int, Replaced]] = field(default_factory=Shared, compare=False)
    """Files that were part of the archive and are not any more, by key, with a number in their order."""
    gone_count: int = field(default=0, compare=False)  # the number of the next of them
    fence: Fence = field(default_factory=Fence)  # which files may become part of it
    named: Mapping[Kind, Shared[str, int]] = field(default_factory=dict, compare=False)
    """See ``Places``."""
    saved: Saved = field(default_factory=Saved, compare=False)  # the runs that ``lanes`` came from

    @property
    def replaced(self) -> tuple[Replaced, ...]:
        """Files that were part of the archive and are not any more, in the order in which that came."""
        return tuple(one for _, one in sorted(self.gone.values()))

    def overlapping(self, lane: ArchiveLane, start: int, end: int) -> list[Archived]:
        """What is archived of offsets ``[start, end)`` of a lane, in order."""
        return stretches_of(self.lanes, lane).around(start, end)


def named_sizes(state: ArchiveState) -> dict[str, int]:
    """Of each file that the log names, bytes."""
    stretches = (one for found in state.lanes.values() for one in found)
    return {file.key: file.size_bytes for one in stretches for file in one.objects()}


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
            Places(dict(state.lanes), dict(state.named), state.fence),
            dict(state.tails),
            dict(state.bodies),
            jobs=state.jobs,
            gone=state.gone,
            gone_count=state.gone_count,
            now_ms=entry.time_ms,
        )
        for action in entry.actions:
            handler = _HANDLERS.get(action.get("do", ""))
            if handler is None or action.get("format", 1) != 1:
                raise UnknownActionError(f"{action.get('do')!r:.80}")
            handler(work, action)
        return replace(
            state,
            lanes=work.places.lanes,
            named=work.places.named,
            tails=work.tails,
            bodies=work.bodies,
            refused=state.refused + work.refused,
            updated_ms=entry.time_ms,
            jobs=work.jobs,
            gone=work.gone,
            gone_count=work.gone_count,
            fence=work.places.fence,
        )

    def settled(self, state: ArchiveState) -> ArchiveState:
        """With all stretches in runs."""
        saved = state.saved.settled(state.lanes)
        return replace(state, lanes=saved.lanes, saved=saved)

    def shards(self, state: ArchiveState) -> Sequence[SavedRun]:
        """The runs."""
        return state.saved.runs

    def dump(self, state: ArchiveState) -> Any:  # noqa: ANN401 (JSON values)
        """For a checkpoint: all but the stretches."""
        return {
            "refused": state.refused,
            "updated_ms": state.updated_ms,
            "jobs": [record.document() for record in state.jobs],
            "replaced": [one.row() for one in state.replaced],
            "fence": _fence_row(state.fence),
            "tails": [
                [lane_row(lane), [mark.row() for mark in marks]]
                for lane, marks in state.tails.items()
            ],
            "bodies": [
                [topic, [body.document() for body in found]]
                for topic, found in state.bodies.items()
            ],
        }

    def dump_pieces(self, state: ArchiveState) -> Iterator[bytes]:
        """For a checkpoint."""
        yield json_text(self.dump(state))

    def load(self, document: Any) -> ArchiveState:  # noqa: ANN401 (JSON values)
        """Undo ``dump`` of an archive without a stretch."""
        return self.load_sharded(document, ())

    def load_sharded(self, document: Any, shards: Sequence[bytes]) -> ArchiveState:  # noqa: ANN401 (JSON values)
        """Undo ``dump`` and ``shards``.

        Raises:
            ValueError: It is not a dump; ``LookupError`` and ``TypeError`` mean the same.
        """
        check_ints((document["refused"], document["updated_ms"]), "a state")
        replaced = list(map(Replaced.of, document["replaced"]))
        saved = Saved.of(list(map(SavedRun, shards)))
        return ArchiveState(
            saved.lanes,
            {
                ArchiveLane.of(row): tuple(map(Truncation.of, marks))
                for row, marks in document["tails"]
            },
            document["refused"],
            document["updated_ms"],
            tuple(map(JobRecord.of, document["jobs"])),
            _bodies(document["bodies"]),
            Shared((one.key, (number, one)) for number, one in enumerate(replaced)),
            len(replaced),
            _fence_of(document.get("fence", [0, []])),
            saved=saved,
        )


def lane_row(lane: ArchiveLane) -> list[Any]:
    """A lane as JSON; ``ArchiveLane.of`` undoes it."""
    return [lane.cluster, lane.broker, lane.topic, lane.queue_id, lane.incarnation]


def archive_action(lane: ArchiveLane, archived: Archived, tails: int, epoch: int = 0) -> Action:
    """The action that adds a stretch."""
    return {"do": ARCHIVE, **stretch_row(lane, archived, tails, epoch)}


def again_action(stretches: Iterable[tuple[ArchiveLane, int, Archived]], epoch: int = 0) -> Action:
    """The action by which stretches take the places of what they are with fewer columns; see ``pack_action``."""
    return {**pack_action(stretches, epoch), "do": AGAIN}


def forget_action(lane: ArchiveLane, starts: list[int], tail: Truncation) -> Action:
    """The action that takes stretches out, since the broker took their messages back."""
    return {"do": FORGET, "lane": lane_row(lane), "starts": starts, "tail": tail.row()}


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


@dataclass(slots=True)
class _ArchiveWork:
    """A state under construction, private to one ``apply``."""

    places: Places
    tails: dict[ArchiveLane, tuple[Truncation, ...]]
    bodies: dict[str, tuple[BodyColumns, ...]]
    refused: int = 0
    jobs: tuple[JobRecord, ...] = ()
    gone: Shared[str, tuple[int, Replaced]] = field(default_factory=Shared)
    gone_count: int = 0
    now_ms: int = 0

    def add(self, stretch: Action) -> bool:
        """Add a stretch, as an ``archive`` action has it; whether it fits."""
        lane, new = ArchiveLane.of(stretch["lane"]), Archived.of(stretch)
        found = stretches_of(self.places.lanes, lane)
        is_late = stretch["tails"] != len(self.tails.get(lane, ()))
        is_late |= new.columns > len(self.bodies.get(lane.topic, ()))
        epoch = stretch.get("epoch", 0)
        check_ints((epoch,), "an epoch")
        is_late |= not self.places.fence.lets(epoch, (file.key for file in new.objects()))
        if is_late or new.start >= new.end or not new.is_whole or found.around(new.start, new.end):
            return False
        self.places.lanes[lane] = found.with_one(new)
        self.places.count(lane, new.files, 1)
        for file in new.objects():
            self.gone = self.gone.lacking(file.key)
        return True

    def replace(self, files: Iterable[ParquetFile | SideFile]) -> None:
        """Nothing names these files any more."""
        for one in files:
            new = Replaced(one.key, one.size_bytes, self.now_ms)
            self.gone = self.gone.having(one.key, (self.gone_count, new))
            self.gone_count += 1


def _archive(work: _ArchiveWork, action: Action) -> None:
    work.refused += not work.add(action)


def _pack(work: _ArchiveWork, action: Action) -> None:
    places = Places(dict(work.places.lanes), dict(work.places.named), work.places.fence)
    trial = _ArchiveWork(places, work.tails, work.bodies, gone=work.gone)
    if all(trial.add(stretch) for stretch in action["stretches"]):
        work.places, work.gone = trial.places, trial.gone
    else:
        work.refused += 1


def _again(work: _ArchiveWork, action: Action) -> None:
    places = Places(dict(work.places.lanes), dict(work.places.named), work.places.fence)
    trial = _ArchiveWork(places, work.tails, work.bodies, gone=work.gone)
    gone: dict[str, ParquetFile | SideFile] = {}
    is_whole = bool(action["stretches"])
    for stretch in action["stretches"]:
        lane, new = ArchiveLane.of(stretch["lane"]), Archived.of(stretch)
        every = stretches_of(places.lanes, lane)
        old = next(iter(every.around(new.start, new.end)), None)
        if old is None or not old.proves(new) or new.columns < old.columns:
            is_whole = False
            break
        places.names(lane)  # counted before anything is taken out
        places.lanes[lane] = every.without([old.start])
        places.count(lane, old.files, -1)
        gone |= {file.key: file for file in old.objects()}
        is_whole &= trial.add(stretch)
    named = {
        lane: places.names(lane)
        for lane in {ArchiveLane.of(s["lane"]) for s in action["stretches"]}
    }
    if not is_whole or any(names.get(key) for names in named.values() for key in gone):
        work.refused += 1
        return
    work.places, work.gone = trial.places, trial.gone
    work.replace(gone.values())


def _merge(work: _ArchiveWork, action: Action) -> None:
    gone = move(work.places, action)
    if gone is None:
        work.refused += 1
    else:
        work.replace(gone)


def _clean(work: _ArchiveWork, action: Action) -> None:
    keys = set(action["keys"])
    check_texts(keys, "a file that is gone")
    for key in keys:
        work.gone = work.gone.lacking(key)


def _fence(work: _ArchiveWork, action: Action) -> None:
    new = _fence_of([action["epoch"], action["keys"]])
    if new.epoch == work.places.fence.epoch + 1:
        work.places.fence = new
    else:
        work.refused += 1


def _fence_row(fence: Fence) -> list[Any]:
    return [fence.epoch, None if fence.condemned is None else sorted(fence.condemned)]


def _fence_of(row: list[Any]) -> Fence:
    epoch, keys = row
    check_ints((epoch,), "a fence")
    check_texts(keys or (), "a file that is condemned")
    return Fence(epoch, None if keys is None else frozenset(keys))


def _job(work: _ArchiveWork, action: Action) -> None:
    work.jobs = with_record(work.jobs, JobRecord.of(action))


def _forget(work: _ArchiveWork, action: Action) -> None:
    lane, starts = ArchiveLane.of(action["lane"]), set(action["starts"])
    check_ints(starts, "a stretch")
    mark = Truncation.of(action["tail"])
    every = stretches_of(work.places.lanes, lane)
    some = [one for start in sorted(starts) for one in every.around(start, start + 1)]
    some = [one for one in some if one.start in starts]
    gone = {file.key: file for one in some for file in one.objects()}
    counts = Counter(file.key for one in some for file in one.files)
    named = work.places.names(lane)
    is_shared = any(named.get(key) != count for key, count in counts.items())
    if mark in work.tails.get(lane, ()) or is_shared:
        work.refused += 1
        return
    work.places.lanes[lane] = every.without(one.start for one in some)
    if not work.places.lanes[lane]:
        del work.places.lanes[lane]
    for one in some:
        work.places.count(lane, one.files, -1)
    work.replace(gone.values())
    work.tails[lane] = (*work.tails.get(lane, ()), mark)


def _columns(work: _ArchiveWork, action: Action) -> None:
    topic, number, new = action["topic"], action["number"], BodyColumns.of(action["body"])
    check_texts((topic,), "a topic")
    known = work.bodies.get(topic, ())
    if number != len(known) or (known and not new.continues(known[-1])):
        work.refused += 1
        return
    work.bodies[topic] = (*known, new)


def _bodies(rows: list[Any]) -> dict[str, tuple[BodyColumns, ...]]:
    check_texts((topic for topic, _ in rows), "a topic")
    return {topic: tuple(map(BodyColumns.of, found)) for topic, found in rows}


_HANDLERS = {
    ARCHIVE: _archive,
    FORGET: _forget,
    COLUMNS: _columns,
    PACK: _pack,
    AGAIN: _again,
    MERGE: _merge,
    JOB: _job,
    CLEAN: _clean,
    FENCE: _fence,
}
