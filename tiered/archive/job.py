"""An archive job: plan, have tasks done, and make what they did part of the archive by entries of its log.

Overview: the log is a journal (``tiered.journal``) below ``_log/`` of the archive. It has no epochs: any number of jobs
append, each entry put if absent, which is the one atomic point. Before each try a job drops what others have archived
meanwhile, so each offset is archived once, whichever job is faster.

Ordering: objects first, then the entry that names them. Entries take several segments each (``COMMIT_FILES``,
``COMMIT_BYTES``); what is committed stays so when a later task fails.

Retries: planning again after a segment has been merged or has expired under the hands of a task, ``ROUNDS`` times at most.

After a crash: objects that no entry names, which the next job adopts since it makes the same keys; nothing is deleted here.

Threads: one job belongs to one thread; its tasks run in the executor.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, field, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

from backends.errors import BackendError, ObjectNotFoundError, StoreFullError
from backends.lazy_dataclass import dataclass, picked
from backends.local_files import write_regular
from backends.registry import probe
from tiered import __version__
from tiered.archive.audit import harmed_files, still_harmed, task_of
from tiered.archive.bodies import PLAIN, BodyColumns, BodyLayout, columns_text, infer_columns
from tiered.archive.body_formats import RAW, BodyWish, BodyWishes, merged
from tiered.archive.checked_ranges import open_log
from tiered.archive.columns import PAYLOAD, Columns
from tiered.archive.machine import (
    ArchiveMachine,
    JobRecord,
    SourceFixed,
    append_if,
    archive_action,
    columns_action,
    forget_action,
    job_action,
    source_action,
)
from tiered.archive.merging import merge, plan_division
from tiered.archive.model import ENTRIES_KEPT, LOG, PROBE_OLD_MS, PROBES, Archived, partition_value
from tiered.archive.plan import (
    NO_LIMITS,
    Limits,
    Overtaken,
    Task,
    Work,
    isolation_of,
    limited,
    plan_archive,
    plan_works,
)
from tiered.archive.stale import decode_again, stale_rows
from tiered.archive.task import JobContext, divide, do_work, find_lost, task_reader
from tiered.errors import DataError, InvalidError
from tiered.journal.append import JournalWriter
from tiered.journal.replay import trim_journal
from tiered.log.parts import Gap
from tiered.log.reader import TierReader
from tiered.metrics import Metric, MetricType, Sample, render
from tiered.upkeep.engine import first_failure
from tiered.upkeep.workplace import writing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from backends.base import ObjectStore
    from tiered.archive.machine import ArchiveState
    from tiered.archive.model import ArchiveQueue
    from tiered.archive.plan import Open, Plan
    from tiered.archive.stale import Remade, Stale
    from tiered.clock import Clock
    from tiered.journal.entry import Action
    from tiered.log.parts import TierState
    from tiered.upkeep.engine import Engine, T, V, WorkContext


# -- what it has done ------------------------------------------------------------------------------
#
# What an archive job has done so far. One thread.


@dataclass(frozen=True, slots=True)
class Done:
    """Tasks whose files are made, and what they came to."""

    tasks: tuple[Task, ...]
    archived: tuple[Archived, ...]

    def action(self) -> Action:
        """What makes them part of the archive."""
        pairs = zip(self.tasks, self.archived, strict=True)
        rows = [(task.queue, task.tails, archived) for task, archived in pairs]
        return archive_action(rows, self.tasks[0].epoch)


@dataclass(slots=True)
class Result:
    """What a job has done."""

    plan: Plan  # what was there to do at its beginning
    run: str = ""  # its id in the log
    kind: str = ""  # what does the work
    began_ms: int = 0  # when it began, UTC
    segments: int = 0  # offset ranges that it archived
    overtaken: int = 0  # offset ranges that another job had archived first
    files: int = 0  # files that its entries name
    rows: int = 0  # messages in them
    bad: int = 0  # records that could not be unpacked
    holes: int = 0  # offsets without a message
    source_bytes: int = 0  # bytes of the source's commit log
    size_bytes: int = 0  # bytes of the files
    entries: int = 0  # written to the log
    failed: list[tuple[Task | Overtaken, Exception]] = field(default_factory=list)
    """Tasks that failed, and ends truncated that could not be forgotten; and why."""
    not_begun: int = 0
    """Segments left to another run, since the time was over or there was no room, or what was truncated before them
    is not forgotten yet."""
    misfits: int = 0  # rows whose bodies did not fit their topic's columns
    unknown: list[str] = field(default_factory=list)
    """Topics whose columns could not be inferred: their bodies stay bytes."""
    left_out: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Members of bodies that no column is of, by topic and member: how many values."""
    unfit: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Members that did not fit their columns, likewise: in how many rows."""
    is_extended: bool = False
    """Columns were fixed for a topic of which messages are archived already."""
    remade: Remade | None = None
    """What was made again, since it lacked columns; None: nothing was asked for."""
    stale: list[Stale] = field(default_factory=list)
    """Rows without columns that were fixed since; after the run."""
    harmed: dict[str, str] = field(default_factory=dict)
    """Files from before that are gone or cut, by key, and what is wrong with each."""

    @property
    def damaged(self) -> list[Task]:
        """What is not archived, since the tier is damaged there."""
        failed = [one for one, error in self.failed if isinstance(error, DataError)]
        tasks = (one for one in failed if isinstance(one, Task))
        return sorted(tasks, key=lambda task: (task.queue, task.start))

    @property
    def damaged_messages(self) -> int:
        """How many queue offsets these are."""
        return sum(one.end - one.start for one in self.damaged)

    def count(self, done: Done) -> None:
        """More ranges are part of the archive; the tasks of a pack share files with each other, and with no others."""
        files = {file.key: file.size_bytes for one in done.archived for file in one.files}
        self.segments += len(done.archived)
        self.files += len(files)
        self.size_bytes += sum(files.values())
        for one in done.archived:
            self.rows += one.rows
            self.bad += one.bad
            self.holes += one.holes
            self.misfits += one.misfits
            self.source_bytes += one.source_bytes
        for task, one in zip(done.tasks, done.archived, strict=True):
            topic = task.queue.topic
            self.left_out.update({(topic, name): count for name, count in one.left_out})
            self.unfit.update({(topic, name): count for name, count in one.unfit})

    def record(self, now_ms: int) -> JobRecord:
        """How far the run is, for the log and for metrics."""
        counted = ("segments", "overtaken", "files", "rows", "bad", "holes")
        return JobRecord(
            self.run,
            __version__,
            self.kind,
            self.began_ms,
            elapsed_ms=max(now_ms - self.began_ms, 0),
            planned=len(self.plan.tasks),
            planned_bytes=self.plan.size_bytes,
            failed=len(self.failed),
            **picked(self, *counted, "source_bytes", "size_bytes"),
        )

    def after(self, done: Iterable[Done], now_ms: int) -> JobRecord:
        """How far it will be with these."""
        then = replace(self, left_out=Counter(), unfit=Counter())
        for one in done:
            then.count(one)
        return then.record(now_ms)


# -- progress --------------------------------------------------------------------------------------
#
# How far an archive job is, told while it runs, and its last figures for Prometheus.
#
# Counts are written by one thread and read by another.

_GAUGES = {
    "began_ms": "When the run began, UTC milliseconds.",
    "elapsed_ms": "Since then.",
    "planned": "Sealed segments that were not archived at the beginning of the run.",
    "planned_bytes": "Bytes of the commit log in them, at most.",
    "segments": "Segments archived by the run.",
    "overtaken": "Segments that another job had archived first.",
    "failed": "Segments that could not be archived: look at the command's output.",
    "files": "Files made.",
    "rows": "Messages in them.",
    "bad": "Records that could not be unpacked, put aside.",
    "holes": "Queue offsets without a message.",
    "source_bytes": "Bytes of the commit log, archived.",
    "size_bytes": "Bytes of the files.",
}
METRICS = tuple(
    Metric(f"tiered_archive_run_{name}", MetricType.GAUGE, text) for name, text in _GAUGES.items()
)


@dataclass(slots=True)
class JobProgress:
    """Counts what an engine archives."""

    clock: Clock  # time
    segments_all: int = 0  # to be done; 0 before anybody knows
    bytes_all: int = 0  # bytes of the commit log in them, at most
    segments: int = 0  # done, whatever came of them
    size_bytes: int = 0  # bytes of the commit log in these
    rows: int = 0  # messages archived
    ahead: Callable[[], int] = field(default=lambda: 0)
    """Work of an engine that it has not handed over yet, when it can tell."""
    _began_s: float = 0.0

    def over(self, engine: Engine) -> Engine:
        """The same engine, watched."""

        @contextlib.contextmanager
        def run(
            do: Callable[[WorkContext, T], V], works: Iterable[T]
        ) -> Iterator[Iterator[tuple[T, V | Exception]]]:
            self._began_s = self._began_s or self.clock.monotonic_s()
            with engine(do, works) as outcomes:
                yield map(self._count, outcomes)

        return run

    def _count(self, done: tuple[T, V | Exception]) -> tuple[T, V | Exception]:
        work, outcome = done
        if isinstance(work, Work):
            self.segments += len(work.tasks)
            self.size_bytes += work.size_bytes
        if isinstance(work, Work) and isinstance(outcome, tuple):
            self.rows += sum(archived.rows for archived in outcome)
        return done

    @property
    def seconds_left(self) -> float | None:
        """At the rate so far; None when nothing can be said."""
        elapsed_s = self.clock.monotonic_s() - self._began_s
        if not self._began_s or not self.size_bytes:
            return None
        return elapsed_s * max(self.bytes_all - self.size_bytes, 0) / self.size_bytes


def spark_ahead(session: Any) -> Callable[[], int]:  # noqa: ANN401 (pyspark has no types)
    """How many tasks of the jobs under way Spark has done. Called from any thread; 0 when Spark does not tell."""

    def ahead() -> int:
        # Whatever the other side of a socket does: progress is not the work.
        with contextlib.suppress(Exception):
            tracker = session.sparkContext.statusTracker()
            stages = map(tracker.getStageInfo, tracker.getActiveStageIds())
            return sum(stage.numCompletedTasks for stage in stages if stage)
        return 0

    return ahead


def write_metrics(path: str, record: JobRecord) -> None:
    """Put a run's figures into a file, as Prometheus' text form has it; in place of the last, all at once."""
    fields = asdict(record)
    text = render([Sample(f"tiered_archive_run_{name}", fields[name]) for name in _GAUGES], METRICS)
    with writing("metrics", path):
        write_regular(path, text.encode())


# -- what bodies become ----------------------------------------------------------------------------
#
# Fixes in an archive's log what bodies become, before tasks are done.
#
# Overview: for each topic of a plan the log is asked first. What it has fixed holds; where it has nothing, what
# is wished is appended to it, inferred from the topic's first messages when it has to be. Only then tasks get
# their layout, so all jobs and all files of a topic agree.
#
# Ordering: the entry that fixes columns comes before any file that has them.
#
# Retries: of jobs that choose at once the first one's entry holds, the others take it (or are refused, when it
# contradicts what they were told).
#
# After a crash: columns without a file, which the next job uses.

SAMPLE_QUEUES = 4
"""Queues of which the first segment is looked into."""
SAMPLE_MORE = 12
"""Further segments, one after another, as long as there is no JSON object: none was sent, or what was is damaged."""
SAMPLE_ROWS = 1000
SAMPLE_BYTES = 1 << 20
"""Of each task that is looked into."""


def fix_layouts(
    log: JournalWriter[ArchiveState],
    tier: ObjectStore,
    prefix: str,
    tasks: Sequence[Task],
    wishes: BodyWishes,
) -> tuple[tuple[Task, ...], list[str]]:
    """Give each task its layout.

    Returns:
        The tasks; and the topics whose columns cannot be inferred, since none of their first bodies is a JSON object.
    """
    layouts: dict[str, BodyLayout] = {}
    unknown = []
    for topic, some in groupby(tasks, key=lambda task: task.queue.topic):
        wish = wishes.of(topic)
        if wish and not _fix(log, topic, wish, _Sample(tier, prefix, list(some))):
            unknown.append(topic)
        known = () if wish and wish.format == RAW else log.state.bodies.get(topic, ())
        layouts[topic] = BodyLayout(known[-1] if known else None, len(known), wishes.has_records)
    if set(layouts.values()) <= {PLAIN}:
        return tuple(tasks), unknown
    laid_out = (replace(layouts[task.queue.topic], is_kafka=task.layout.is_kafka) for task in tasks)
    pairs = zip(tasks, laid_out, strict=True)
    return tuple(replace(task, layout=layout) for task, layout in pairs), unknown


class _Sample:
    """The first bodies of a topic, read when they are wanted."""

    def __init__(self, tier: ObjectStore, prefix: str, tasks: Sequence[Task]) -> None:
        self._tier = tier
        self._prefix = prefix
        firsts = {task.queue: task for task in reversed(tasks)}
        first = sorted(firsts.values(), key=lambda task: task.queue)[:SAMPLE_QUEUES]
        more = (task for task in tasks if task not in first)
        self._groups = [first, *([task] for task in islice(more, SAMPLE_MORE))]

    def infer(self) -> BodyColumns | None:
        """Columns; None without a JSON object that has any."""
        for tasks in self._groups:
            rows = SAMPLE_ROWS // len(tasks)
            bodies = (body for task in tasks for body in islice(self._sound(task), rows))
            columns = infer_columns(bodies)
            if columns:
                return BodyColumns("json", columns_text(columns))
        return None

    def _sound(self, task: Task) -> Iterator[bytes]:
        """The bodies before damage: of that the task itself will tell, and it is no other topic's."""
        with contextlib.suppress(DataError, ObjectNotFoundError):
            yield from self._bodies(task)

    def _bodies(self, task: Task) -> Iterator[bytes]:
        reader = task_reader(self._tier, self._prefix, task)
        columns = Columns(task.queue, BodyLayout(is_kafka=task.layout.is_kafka))
        for found in islice(reader.batches(task.incarnation.min_offset, bytes_max=SAMPLE_BYTES), 1):
            if not isinstance(found, Gap):
                rows, _ = columns.make(found)
                for some in rows:
                    bodies = some.column(PAYLOAD if task.layout.is_kafka else "body")
                    yield from bodies.drop_null().to_pylist()


_MAGIC = frozenset("*?[")


def require_possible(
    at: JobContext, state: ArchiveState, tier: TierState, plan: Plan, *, again: bool = False
) -> None:
    """See that what is wished of bodies can be done, also where nothing of a topic is to be archived now.

    Raises:
        InvalidError: A topic is named that is nowhere, what is wished contradicts what is fixed, or it is wished of topics
            alone that are archived as bytes.
    """
    there = {archived_queue.topic for archived_queue in state.queues}
    known = {queue.topic for queue in tier.queues} | there | set(state.bodies)
    planned, idle = {task.queue.topic for task in plan.tasks}, dict[str, list[str]]()
    for glob, _ in at.wishes.by_topic:
        if not _MAGIC.intersection(glob) and glob not in known:
            some = ", ".join(sorted(known)[:_NAMED]) or "none yet"
            raise InvalidError(
                f"--body names the topic {glob}, and neither the tier nor the archive has it",
                do=f"leave it out until there is one; topics are {some}",
            )
    for topic in filter(at.takes, sorted(known)):
        glob, wish = next((o for o in at.wishes.by_topic if fnmatchcase(topic, o[0])), ("", None))
        if wish is None or wish.format == RAW:
            continue
        if topic in state.bodies:
            merged(state.bodies[topic][-1], wish.body or BodyColumns(wish.format), topic)
        is_idle = topic in there and topic not in planned and topic not in state.bodies
        idle.setdefault(glob, []).append(topic if is_idle else "")
    for glob, topics in idle.items():
        if all(topics) and not again:
            raise InvalidError(
                f"--body wishes columns of {', '.join(topics[:_NAMED])}: archived as bytes, and nothing is left of it"
                " to be archived",
                where=at.archive.url,
                do="--decode-again makes columns of what is archived; without it leave this wish out"
                + f" ({glob})" * (glob != "*"),
            )


_NAMED = 8


def extend_columns(log: JournalWriter[ArchiveState], at: JobContext) -> None:
    """Fix columns that are wished of topics beside those that they have, also where nothing is to be archived."""
    for topic in filter(at.takes, sorted(log.state.bodies)):
        wish = at.wishes.of(topic)
        if wish and wish.body:
            _fix(log, topic, wish, _Sample(at.tier, at.place.prefix, ()))


def fix_archived(log: JournalWriter[ArchiveState], at: JobContext, reader: TierReader) -> list[str]:
    """Fix what bodies become of topics that are archived as bytes, as far as something is wished of them.

    Returns:
        Topics whose columns cannot be inferred.
    """
    unknown, state = [], log.state
    for topic, queues in groupby(state.queues, key=lambda queue: queue.topic):
        wish = at.wishes.of(topic) if at.takes(topic) and topic not in state.bodies else None
        if wish is None:
            continue
        every = (
            task_of(state, reader, queue, one)
            for queue in queues
            for one in islice(state.queues[queue], SAMPLE_MORE)
        )
        tasks = [task for task in every if task.parts]
        if not _fix(log, topic, wish, _Sample(at.tier, at.place.prefix, tasks)):
            unknown.append(topic)
    return unknown


def fix_source(log: JournalWriter[ArchiveState], at: JobContext, tier: TierState) -> None:
    """Fix what becomes rows of a broker whose store is not RocketMQ's, where it is not fixed yet.

    Raises:
        InvalidError: Another isolation is fixed than is wished.
    """
    place, kind = at.place, str(tier.store.get("kind", ""))
    if kind not in _OTHER_KINDS:
        return
    while (place.cluster, place.broker) not in log.state.sources:
        isolation = isolation_of(tier, place, log.state, at.isolation)
        said = isolation.value if isolation else ""
        append_if(
            log,
            [source_action(SourceFixed(place.cluster, place.broker, kind, said))],
            lambda state: (place.cluster, place.broker) not in state.sources,
        )
    isolation_of(tier, place, log.state, at.isolation)


_OTHER_KINDS = ("kafka", "jmq")


def _fix(log: JournalWriter[ArchiveState], topic: str, wish: BodyWish, sample: _Sample) -> bool:
    """Fix what is wished where it is not fixed yet; whether the topic has what was wished."""
    if wish.format == RAW:
        return True
    guess = wish.body
    while True:
        known = log.state.bodies.get(topic, ())
        if known:
            wanted = merged(known[-1], wish.body or BodyColumns(wish.format), topic)
            if wish.body is None or wanted == known[-1]:
                return True
        else:
            guess = guess or sample.infer()
            if guess is None:
                return False
            wanted = guess
        number = len(known)
        action = columns_action(topic, number, wanted)
        if append_if(log, [action], partial(_has_columns, topic, number)):
            return True


def _has_columns(topic: str, number: int, state: ArchiveState) -> bool:
    return len(state.bodies.get(topic, ())) == number


# -- the job ---------------------------------------------------------------------------------------

COMMIT_FILES = 64
COMMIT_BYTES = 1 << 30
ROUNDS = 4


def log_writer(at: JobContext) -> JournalWriter[ArchiveState]:
    """The archive's log, at its head."""
    log = JournalWriter(
        at.bare,
        LOG,
        ArchiveMachine(),
        writer=f"{at.rng.getrandbits(32):08x}",
        clock=at.clock,
        rng=at.rng,
        stop=threading.Event(),
        give_up_s=at.give_up_s,
        has_epochs=False,
    )
    open_log(at.archive, log)
    return log


def plan_job(at: JobContext, state: ArchiveState, reader: TierReader | None = None) -> Plan:
    """What there is to do, by what a reader of the tier has seen; by default by the tier as it is now."""
    tier = (reader or read_tier(at)).state
    return plan_archive(tier, at.place, state, takes=at.takes, isolation=at.isolation)


def read_tier(at: JobContext) -> TierReader:
    """A reader of the tier as it is now."""
    reader = TierReader(at.tier, at.place.prefix)
    reader.refresh()
    return reader


def run_job(
    at: JobContext,
    engine: Engine,
    *,
    told: Callable[[Result], None] | None = None,
    limits: Limits = NO_LIMITS,
    small_bytes: int = 0,
    kind: str = "local",
    again: bool = False,
) -> Result:
    """Archive all that is sealed and not archived yet.

    Args:
        told: Called when the plan is made and after each entry, with the result so far.
        small_bytes: Segments of less commit log share files (``tiered.archive.plan``); 0: none does.
        kind: What the engine is called in the log.
        again: Make files again that lack columns which were fixed since (``tiered.archive.stale``).

    Raises:
        InvalidError: What is wished of bodies cannot be done, or the archive's store does not keep to conditional writes,
            or lies within the tier (or round it).
    """
    _require_apart(at)
    log, reader = log_writer(at), read_tier(at)
    every = plan_job(at, log.state, reader)
    require_possible(at, log.state, reader.state, every, again=again)
    plan = limited(every, limits)
    result = Result(plan, log.writer, kind, at.clock.now_ms())
    if plan.tasks or plan.overtaken:
        planned = {task.queue.topic for task in plan.tasks}
        _require_conditional(at, planned | {queue.topic for queue in log.state.queues})
    tell = told or (lambda _result: None)
    with ThreadPoolExecutor(1, "tiered-listing") as pool:
        looked = pool.submit(harmed_files, at.archive, log.state)
        began_s = at.clock.monotonic_s()
        run = _Run(at, log, engine, result, tell, limits, small_bytes, began_s, reader.state)
        run.run(again=again)
        suspects = looked.result()
    result.stale = stale_rows(log.state)
    if suspects:
        log.catch_up()
        result.harmed = still_harmed(at.archive, log.state, suspects)
    return result


@dataclass(slots=True)
class _Run:
    """One run of a job, and what it has in hand."""

    _at: JobContext
    _log: JournalWriter[ArchiveState]
    _engine: Engine
    _result: Result
    _told: Callable[[Result], None]
    _limits: Limits
    _small_bytes: int
    _began_s: float
    _tier: TierState
    _is_full: bool = False
    _missed: set[_Source] = field(default_factory=set)
    _stuck: set[ArchiveQueue] = field(default_factory=set)
    _trimmed: int = 0

    def run(self, *, again: bool) -> None:
        plan, log = self._result.plan, self._log
        had = {topic: len(found) for topic, found in log.state.bodies.items()}
        there = {queue.topic for queue in log.state.queues}
        extend_columns(log, self._at)
        if plan.tasks:
            fix_source(log, self._at, self._tier)
        self._archive(plan)
        if again:
            self._decode_again()
        self._result.is_extended = any(
            topic in there and had.get(topic, 0) < len(found)
            for topic, found in log.state.bodies.items()
        )
        # Who plans next reads a checkpoint and no entries, however much this run has done.
        self._save(force=self._result.entries > 0)

    def _decode_again(self) -> None:
        at, log, reader = self._at, self._log, read_tier(self._at)
        self._result.unknown = sorted({*self._result.unknown, *fix_archived(log, at, reader)})
        self._result.remade = decode_again(at, log, self._engine, reader)
        self._result.entries += self._result.remade.entries

    def _archive(self, plan: Plan) -> None:
        if plan.tasks and not self._log.number:  # a file without an entry would be of a lost log
            self._log.append([job_action(self._result.record(self._at.clock.now_ms()))])
        for _ in range(ROUNDS):
            self._told(self._result)
            while self._forget(plan):
                plan = self._planned_again()
            works = self._works(self._laid_out(plan))
            is_moved = self._do_alone_too(works)
            if sound := self._divided():
                is_moved |= self._do_alone_too(plan_works(sound, self._small_bytes))
            if self._is_full or not is_moved:
                break
            plan = self._planned_again()

    def _do_alone_too(self, works: Sequence[Work]) -> bool:
        """Have work done; of what fails together each is tried alone. Whether some has to be planned again."""
        is_moved, alone = self._do(works)
        return (self._do(alone)[0] if alone else False) or is_moved

    def _divided(self) -> list[Task]:
        """What is sound of tasks whose source is damaged, to be done now; what is not takes their place among the failed."""
        result = self._result
        sound: list[Task] = []
        if not result.damaged:
            return sound
        with self._engine(find_lost, result.damaged) as outcomes:
            for task, lost in outcomes:
                if isinstance(lost, Exception) or not lost:
                    continue  # it failed for another reason, which stands
                some, waiting = divide(task, lost)
                sound += some
                result.failed = [one for one in result.failed if one[0] is not task] + list(waiting)
        return sorted(sound, key=lambda task: (task.queue, task.start))

    def _planned_again(self) -> Plan:
        """What there is to do now; others take the place of what waits, within the limits."""
        self._log.catch_up()
        found, stuck = plan_job(self._at, self._log.state), self._stuck
        tasks = tuple(task for task in found.tasks if task.queue not in stuck)
        overtaken = tuple(one for one in found.overtaken if one.queue not in stuck)
        left = self._limits.after(self._result.source_bytes)
        is_first = not self._result.segments
        return limited(replace(found, tasks=tasks, overtaken=overtaken), left, is_first=is_first)

    def _save(self, *, force: bool = False) -> None:
        """Write a checkpoint if one is due; it costs what changed. Then what nobody reads any more goes."""
        log = self._log
        if log.write_checkpoint(force=force) and log.number - self._trimmed > ENTRIES_KEPT:
            self._trimmed = log.number
            with contextlib.suppress(BackendError):  # who may not delete archives all the same
                trim_journal(self._at.archive, LOG, log.number - ENTRIES_KEPT)

    def _works(self, tasks: Sequence[Task]) -> list[Work]:
        """What of a round is done together; what a round before left is counted anew, since it is planned again.

        Of what was not there and is planned again from the same objects each is alone: one that is lost holds up no others.
        """
        again = {(task.queue, task.start) for task in tasks}
        result, missed = self._result, [task for task in tasks if _source(task) in self._missed]
        result.failed = [one for one in result.failed if (one[0].queue, one[0].start) not in again]
        result.not_begun = sum(task.queue in self._stuck for task in result.plan.tasks)
        rest = [task for task in tasks if _source(task) not in self._missed] if missed else tasks
        return [*plan_works(rest, self._small_bytes), *(Work((task,)) for task in missed)]

    def _miss(self, work: Work, error: ObjectNotFoundError) -> bool:
        """Whether to plan again what was not there. Not twice: objects that the tier names still are lost."""
        sources = set(map(_source, work.tasks))
        if not sources <= self._missed:
            self._missed |= sources
            return True
        lost = DataError(
            f"an object that the tier names is gone: {error}",
            where=self._at.tier.url,
            do="`tiered verify` of the tier names all that is lost; the rest is archived",
        )
        self._result.failed += [(task, lost) for task in work.tasks]
        return False

    def _laid_out(self, plan: Plan) -> tuple[Task, ...]:
        at = self._at
        tasks, self._result.unknown = fix_layouts(
            self._log, at.tier, at.place.prefix, plan.tasks, at.wishes
        )
        return tasks

    def _do(self, works: Sequence[Work]) -> tuple[bool, list[Work]]:
        """Have work done and commit it. Once there is no room, no more is begun: all would wait and fail, one after another.

        Returns:
            Whether some has to be planned again; and those of its tasks, to be done alone, that failed together.
        """
        alone: list[Work] = []
        is_moved = False
        done: list[Done] = []
        with self._engine(do_work, self._until_late(works)) as outcomes:
            for work, outcome in outcomes:
                if isinstance(outcome, ObjectNotFoundError):
                    is_moved |= self._miss(work, outcome)
                elif not isinstance(outcome, Exception):
                    done.append(Done(work.tasks, outcome))
                elif isinstance(outcome, StoreFullError):
                    self._is_full = True
                    self._result.failed += [(task, outcome) for task in work.tasks]
                elif len(work.tasks) > 1:
                    alone += [Work((task,)) for task in work.tasks]
                else:
                    self._result.failed.append((work.tasks[0], outcome))
                every = [archived for one in done for archived in one.archived]
                files = len({file.key for archived in every for file in archived.files})
                size = sum(archived.source_bytes for archived in every)
                if files >= COMMIT_FILES or size >= COMMIT_BYTES:
                    is_moved |= self._commit(done)
                    done = []
        return (self._commit(done) if done else False) or is_moved, alone

    def _until_late(self, works: Sequence[Work]) -> Iterator[Work]:
        """Work, as long as there is time and room."""
        limit_ms = self._limits.runtime_ms
        for number, work in enumerate(works):
            elapsed_ms = 1000 * (self._at.clock.monotonic_s() - self._began_s)
            if self._is_full or (limit_ms is not None and elapsed_ms >= limit_ms):
                self._result.not_begun += sum(len(one.tasks) for one in works[number:])
                return
            yield work

    def _commit(self, done: list[Done]) -> bool:
        """One entry for all of it that nobody has archived yet; whether some has to be planned again."""
        due = list(done)
        while due := [one for one in due if _fits(self._log.state, one)]:
            record = self._result.after(due, self._at.clock.now_ms())
            if append_if(
                self._log,
                [*(one.action() for one in due), job_action(record)],
                lambda state: all(_fits(state, one) for one in due),
            ):
                self._result.entries += 1
                break
        for one in due:
            self._result.count(one)
        lost = [task for one in done if one not in due for task in one.tasks]
        taken = [task for task in lost if _is_taken(self._log.state, task)]
        self._result.overtaken += len(taken)
        self._save()
        self._told(self._result)
        return len(taken) < len(lost)

    def _forget(self, plan: Plan) -> bool:
        """Take out of the archive what the broker truncated, also what a job that had not seen it archived meanwhile.

        Where a file that it shares is harmed it stays, and all of its queue waits, since ends are dealt with in their order.
        That is no reason for others to wait, least of all for those whose rows lie in the very file.

        Returns:
            Whether it stays in some queue, so that the plan does not hold.
        """
        before = len(self._stuck)
        for one in plan.overtaken:
            if one.queue in self._stuck:
                continue
            try:
                self._forget_one(one)
            except _HarmedError as error:
                self._stuck.add(one.queue)
                self._result.failed.append((one, _unforgotten(self._at, error.harm)))
        return len(self._stuck) > before

    def _forget_one(self, one: Overtaken) -> None:
        while one.mark not in self._log.state.tails.get(one.queue, ()):
            one = replace(one, starts=_starts(self._log.state, one))
            try:
                self._divide(one)
            except (DataError, ObjectNotFoundError) as error:
                raise _HarmedError(error) from error
            action = forget_action(one.queue, one.starts, one.mark)
            if append_if(self._log, [action], partial(_is_all, one)):
                self._result.entries += 1
                break

    def _divide(self, one: Overtaken) -> None:
        """Separate what has to go from that with which it shares files."""
        for _ in range(ROUNDS):
            apart = plan_division(self._log.state, one.queue, one.starts)
            if not apart:
                return
            self._result.entries += merge(self._at, self._log, apart, engine=self._engine).entries


_Source = tuple["ArchiveQueue", int, tuple[str, ...]]


def _source(task: Task) -> _Source:
    return task.queue, task.start, tuple(bundle.key for bundle in task.parts.bundles)


def _starts(state: ArchiveState, one: Overtaken) -> tuple[int, ...]:
    """Of what is to be forgotten now."""
    return tuple(found.start for found in state.overlapping(one.queue, one.mark.low, one.mark.high))


def _is_all(one: Overtaken, state: ArchiveState) -> bool:
    """Nothing else is to be forgotten, since a mark is dealt with once; nor has another dealt with it."""
    return one.mark not in state.tails.get(one.queue, ()) and _starts(state, one) == one.starts


class _HarmedError(Exception):
    def __init__(self, harm: DataError | ObjectNotFoundError) -> None:
        super().__init__(str(harm))
        self.harm = harm


def _unforgotten(at: JobContext, harm: DataError | ObjectNotFoundError) -> DataError:
    known = harm.what if isinstance(harm, DataError) else f"it is gone: {harm}"
    return DataError(
        f"what the broker truncated shares a file of the archive that is harmed: {known}",
        where=(harm.where if isinstance(harm, DataError) else "") or at.archive.url,
        do="`tiered archive --repair` makes it again from the tier; what else there is to do is done",
    )


def _is_taken(state: ArchiveState, task: Task) -> bool:
    late = len(state.tails.get(task.queue, ())) != task.tails
    return late or bool(state.overlapping(task.queue, task.start, task.end))


def _fits(state: ArchiveState, one: Done) -> bool:
    """Whether nobody has archived any of it meanwhile, and no run of ``--clean`` is about to delete its files."""
    keys = [file.key for archived in one.archived for file in archived.objects()]
    is_free = not any(_is_taken(state, task) for task in one.tasks)
    return is_free and state.fence.lets(one.tasks[0].epoch, keys)


def _require_distinct(at: JobContext, topics: Iterable[str]) -> None:
    """See that no two topics have one folder, where a place takes names for one that differ in case alone."""
    seen: dict[str, str] = {}
    for topic in sorted(topics):
        other = seen.setdefault(partition_value(topic).casefold(), topic)
        if other != topic:
            raise InvalidError(
                f"the folders of {other} and {topic} are one here, where upper case is not told from lower",
                where=at.archive.url,
                do="archive them to places of their own (--topics), or where names are exact",
            )


def _require_conditional(at: JobContext, topics: Iterable[str]) -> None:
    """Try the store out, where no reader of directories looks, and clear what killed runs left there."""
    before_ms = at.clock.now_ms() - PROBE_OLD_MS
    for info in list(at.archive.list(PROBES)):
        if 0 <= info.modified_ms < before_ms:
            with contextlib.suppress(BackendError):  # who may not delete archives all the same
                at.archive.delete(info.key)
    found = probe(at.archive, f"{at.rng.getrandbits(64):016x}", below=PROBES)
    if not found.distinguishes_case:
        _require_distinct(at, topics)
    if not found.put_if_absent:
        raise InvalidError(
            "this store does not keep to conditional writes, so two jobs could overwrite each other's log",
            where=at.archive.url,
            do="archive to a store that does",
        )


def _require_apart(at: JobContext) -> None:
    tier, archive = f"{at.tier.url}/", f"{at.archive.url}/"
    if tier.startswith(archive) or archive.startswith(tier):
        raise InvalidError(
            "tier and archive lie within each other",
            where=at.archive.url,
            do="give the archive a place of its own",
        )


def first_error(result: Result) -> Exception | None:
    """The failure to end with."""
    return first_failure(result.failed)


__all__ = ["JobContext", "Result", "first_error", "log_writer", "plan_job", "run_job"]

# -- as documents ----------------------------------------------------------------------------------


def plan_document(at: JobContext, plan: Plan) -> dict[str, Any]:
    """What a run would do, as ``tiered archive --dry-run --json`` shows it."""
    return {
        **plan_head(at, plan),
        "postponed": plan.postponed,
        "open": [queue_row(one) for one in plan.opened],
        "tasks": [queue_row(task) for task in plan.tasks],
    }


def plan_head(at: JobContext, plan: Plan) -> dict[str, Any]:
    """How documents of a run begin."""
    return {
        "format": 1,
        "archive": at.archive.url,
        **picked(at.place, "cluster", "broker"),
        "planned": len(plan.tasks),
        "planned_bytes": plan.size_bytes,
        "archived_before": plan.archived_segments,
        "outside": plan.outside,
        "strange": len(plan.strange),
    }


def queue_row(one: Task | Open) -> dict[str, Any]:
    """What is to be archived of a queue, or is not sealed yet."""
    row = picked(one.queue, "topic", "queue_id", "incarnation")
    return row | picked(one, "start", "end", "size_bytes")
