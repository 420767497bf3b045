"""An archive job: plan, have tasks done, and make what they did part of the archive by entries of its log.

Overview: the log is a journal (``tiered.journal``) below ``_log/`` of the archive. Nobody reigns over it: any number of jobs
append, each entry put if absent, which is the one atomic point. Before each try a job drops what others have archived
meanwhile, so each offset is archived once, whoever is faster.

Ordering: objects first, then the entry that names them. Entries take several segments each (``COMMIT_FILES``,
``COMMIT_BYTES``); what is committed stays so when a later task fails.

Retries: planning again after a segment has been merged or has expired under the hands of a task, ``ROUNDS`` times at most.

After a crash: objects that no entry names, which the next job adopts since it makes the same keys; nothing is deleted here.

Threads: one job belongs to one thread; its tasks run in the executor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from backends.errors import ObjectNotFoundError
from backends.probe import probe
from tiered.archive.machine import ArchiveMachine, ArchiveState, archive_action, forget_action
from tiered.archive.model import LOG, Archived
from tiered.archive.plan import Plan, Task, plan_archive
from tiered.archive.task import archive_segment
from tiered.errors import InvalidError, TieredStoreError
from tiered.journal.writer import JournalWriter
from tiered.log.reader import TierReader

if TYPE_CHECKING:
    import random

    from backends.base import ObjectStore
    from tiered.clock import Clock
    from tiered.plugin.place import Place

COMMIT_FILES = 64
COMMIT_BYTES = 1 << 30
ROUNDS = 4

Outcome = tuple[Task, Archived | Exception]
Engine = Callable[[list[Task]], Iterator[Outcome]]
"""Does tasks in any order; gives what each came to. A task's failure is an outcome, not an exception."""


@dataclass(frozen=True, slots=True)
class Workshop:
    """What an archive job works with.

    Attributes:
        tier: The tier's store, with retries.
        place: Which broker.
        archive: The archive's store, with retries.
        bare: The same without, for the log, which tries again by itself.
        clock: Time.
        rng: For ids and jitter.
        takes: Whether a topic is wanted.
    """

    tier: ObjectStore
    place: Place
    archive: ObjectStore
    bare: ObjectStore
    clock: Clock
    rng: random.Random
    takes: Callable[[str], bool] = lambda _topic: True


@dataclass(slots=True)
class Result:
    """What a job has done.

    Attributes:
        plan: What was there to do at its beginning.
        segments: Stretches that it archived.
        overtaken: Stretches that another job had archived first.
        files: Files that its entries name.
        rows: Messages in them.
        bad: Records that could not be unpacked.
        holes: Offsets without a message.
        source_bytes: Bytes of the source's commit log.
        size_bytes: Bytes of the files.
        entries: Written to the log.
        failed: Tasks that failed, and why.
    """

    plan: Plan
    segments: int = 0
    overtaken: int = 0
    files: int = 0
    rows: int = 0
    bad: int = 0
    holes: int = 0
    source_bytes: int = 0
    size_bytes: int = 0
    entries: int = 0
    failed: list[tuple[Task, Exception]] = field(default_factory=list)

    def count(self, archived: Archived) -> None:
        """One more stretch is part of the archive."""
        self.segments += 1
        self.files += len(archived.files)
        self.rows += archived.rows
        self.bad += archived.bad
        self.holes += archived.holes
        self.source_bytes += archived.source_bytes
        self.size_bytes += sum(file.size_bytes for file in archived.files)


def log_writer(at: Workshop) -> JournalWriter[ArchiveState]:
    """The archive's log, at its head."""
    log = JournalWriter(
        at.bare,
        LOG,
        ArchiveMachine(),
        writer=f"{at.rng.getrandbits(32):08x}",
        clock=at.clock,
        rng=at.rng,
        stop=threading.Event(),
    )
    log.catch_up()
    return log


def plan_job(at: Workshop, state: ArchiveState) -> Plan:
    """What there is to do now.

    Raises:
        DataError: The tier's journal is damaged.
        BackendError: It could not be read.
    """
    reader = TierReader(at.tier, at.place.prefix)
    reader.refresh()
    return plan_archive(reader.state, at.place, state, takes=at.takes)


def run_job(
    at: Workshop, engine: Engine, *, told: Callable[[Result], None] | None = None
) -> Result:
    """Archive all that is sealed and not archived yet.

    Args:
        at: Tier and archive.
        engine: Does the tasks.
        told: Called after each entry, with the result so far.

    Raises:
        InvalidError: The archive's store does not keep to conditional writes, or lies within the tier (or round it).
        DataError: A log is damaged.
        BackendError: A store failed.
    """
    _require_apart(at)
    log = log_writer(at)
    plan = plan_job(at, log.state)
    result = Result(plan)
    if plan.tasks or plan.overtaken:
        _require_conditional(at)
    for _ in range(ROUNDS):
        _forget(log, plan, result)
        moved = _do(log, engine, plan.tasks, result, told or (lambda _result: None))
        if not moved:
            break
        log.catch_up()
        plan = plan_job(at, log.state)
    log.write_checkpoint()
    return result


def local_engine(at: Workshop, jobs: int) -> Engine:
    """Tasks in threads of this process.

    Args:
        at: Tier and archive.
        jobs: How many at once (> 0).
    """

    def run(tasks: list[Task]) -> Iterator[Outcome]:
        with ThreadPoolExecutor(jobs, "tiered-archive") as pool:
            work = (at.tier, at.place.prefix, at.archive)
            ahead = iter(tasks)
            running = {}
            try:
                for task in _some(ahead, 2 * jobs):
                    running[pool.submit(archive_segment, *work, task)] = task
                while running:
                    done = next(as_completed(running))
                    task = running.pop(done)
                    for more in _some(ahead, 1):
                        running[pool.submit(archive_segment, *work, more)] = more
                    error = done.exception()
                    if error is not None and not isinstance(error, Exception):
                        raise error
                    yield task, error or done.result()
            finally:
                for future in running:
                    future.cancel()

    return run


def _some(tasks: Iterator[Task], count: int) -> Iterable[Task]:
    return [task for _, task in zip(range(count), tasks, strict=False)]


def _do(
    log: JournalWriter[ArchiveState],
    engine: Engine,
    tasks: Iterable[Task],
    result: Result,
    told: Callable[[Result], None],
) -> bool:
    """Have tasks done and commit them; whether one has to be planned again."""
    moved = False
    done: list[tuple[Task, Archived]] = []
    for task, outcome in engine(list(tasks)):
        if isinstance(outcome, ObjectNotFoundError):
            moved = True
        elif isinstance(outcome, Exception):
            result.failed.append((task, outcome))
        else:
            done.append((task, outcome))
        if _is_due(done):
            _commit(log, done, result)
            told(result)
            done = []
    if done:
        _commit(log, done, result)
        told(result)
    return moved


def _is_due(done: list[tuple[Task, Archived]]) -> bool:
    files = sum(len(archived.files) for _, archived in done)
    return files >= COMMIT_FILES or sum(a.source_bytes for _, a in done) >= COMMIT_BYTES


class _OvertakenError(Exception):
    """Another job has archived some of it."""


def _commit(
    log: JournalWriter[ArchiveState], done: list[tuple[Task, Archived]], result: Result
) -> None:
    """One entry for all of it that nobody has archived yet."""
    due = list(done)

    def hold(state: ArchiveState) -> None:
        if any(_is_taken(state, task) for task, _ in due):
            raise _OvertakenError

    while due:
        due = [(task, archived) for task, archived in due if not _is_taken(log.state, task)]
        actions = [archive_action(task.lane, archived, task.tails) for task, archived in due]
        try:
            if actions:
                log.append(actions, check=hold)
                result.entries += 1
            break
        except _OvertakenError:
            continue
    for _, archived in due:
        result.count(archived)
    result.overtaken += len(done) - len(due)
    log.write_checkpoint()


def _is_taken(state: ArchiveState, task: Task) -> bool:
    late = len(state.tails.get(task.lane, ())) != task.tails
    return late or bool(state.overlapping(task.lane, task.start, task.end))


def _forget(log: JournalWriter[ArchiveState], plan: Plan, result: Result) -> None:
    """Take out of the archive what the broker took back."""
    for one in plan.overtaken:
        if one.mark not in log.state.tails.get(one.lane, ()):
            log.append([forget_action(one.lane, list(one.starts), one.mark)])
            result.entries += 1


def _require_conditional(at: Workshop) -> None:
    if not probe(at.archive, f"{at.rng.getrandbits(64):016x}").put_if_absent:
        raise InvalidError(
            "this store does not keep to conditional writes, so two jobs could overwrite each other's log",
            where=at.archive.url,
            do="archive to a store that does",
        )


def _require_apart(at: Workshop) -> None:
    tier, archive = f"{at.tier.url}/", f"{at.archive.url}/"
    if tier.startswith(archive) or archive.startswith(tier):
        raise InvalidError(
            "tier and archive lie within each other",
            where=at.archive.url,
            do="give the archive a place of its own",
        )


def first_error(result: Result) -> TieredStoreError | Exception | None:
    """The failure to end with: damage before what may pass."""
    errors = [error for _, error in result.failed]
    mine = [error for error in errors if isinstance(error, TieredStoreError)]
    return mine[0] if mine else next(iter(errors), None)
