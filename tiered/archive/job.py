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
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from backends.errors import ObjectNotFoundError, StoreFullError
from backends.probe import probe
from tiered.archive.engines import Engine, archived_of, local_engine
from tiered.archive.fixing import fix_layouts
from tiered.archive.harm import open_log
from tiered.archive.limits import NO_LIMITS, Limits, limited
from tiered.archive.machine import ArchiveMachine, archive_action, forget_action
from tiered.archive.merging import merge, plan_division
from tiered.archive.model import LOG
from tiered.archive.moves import pack_action
from tiered.archive.packing import Pack, plan_packs, tasks_of
from tiered.archive.plan import plan_archive
from tiered.archive.records import job_action
from tiered.archive.result import Done, Result
from tiered.archive.workshop import Workshop
from tiered.errors import InvalidError, TieredStoreError
from tiered.journal.writer import JournalWriter
from tiered.log.reader import TierReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tiered.archive.machine import ArchiveState
    from tiered.archive.packing import Work
    from tiered.archive.plan import Overtaken, Plan, Task
    from tiered.journal.entry import Action

COMMIT_FILES = 64
COMMIT_BYTES = 1 << 30
ROUNDS = 4


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
        give_up_s=at.give_up_s,
    )
    open_log(at.archive, log)
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
    at: Workshop,
    engine: Engine,
    *,
    told: Callable[[Result], None] | None = None,
    limits: Limits = NO_LIMITS,
    small_bytes: int = 0,
    kind: str = "local",
) -> Result:
    """Archive all that is sealed and not archived yet.

    Args:
        at: Tier and archive.
        engine: Does the tasks.
        told: Called when the plan is made and after each entry, with the result so far.
        limits: What the run is held to.
        small_bytes: Segments of less commit log share files (``tiered.archive.packing``); 0: none does.
        kind: What the engine is called in the log.

    Raises:
        InvalidError: The archive's store does not keep to conditional writes, or lies within the tier (or round it).
        DataError: A log is damaged.
        BackendError: A store failed.
    """
    _require_apart(at)
    log = log_writer(at)
    plan = limited(plan_job(at, log.state), limits)
    result = Result(plan, log.writer, kind, at.clock.now_ms())
    if plan.tasks or plan.overtaken:
        _require_conditional(at)
    tell = told or (lambda _result: None)
    _Run(at, log, engine, result, tell, limits=limits, small_bytes=small_bytes).run()
    return result


class _Run:
    """One run of a job, and what it has in hand."""

    def __init__(
        self,
        at: Workshop,
        log: JournalWriter[ArchiveState],
        engine: Engine,
        result: Result,
        told: Callable[[Result], None],
        *,
        limits: Limits,
        small_bytes: int,
    ) -> None:
        self._at = at
        self._log = log
        self._engine = engine
        self._result = result
        self._told = told
        self._limits = limits
        self._small_bytes = small_bytes
        self._began_s = at.clock.monotonic_s()
        self._is_full = False

    def run(self) -> None:
        """See ``run_job``."""
        plan = self._result.plan
        if plan.tasks and not self._log.number:  # a file without an entry would be of a lost log
            self._log.append([job_action(self._result.record(self._at.clock.now_ms()))])
        for _ in range(ROUNDS):
            self._told(self._result)
            self._forget(plan)
            works = plan_packs(self._laid_out(plan), self._small_bytes)
            is_moved, alone = self._do(works)
            if alone:
                is_moved |= self._do(alone)[0]
            if self._is_full or not is_moved:
                break
            self._log.catch_up()
            left = self._limits.after(self._result.source_bytes)
            is_first = not self._result.segments
            plan = limited(plan_job(self._at, self._log.state), left, is_first=is_first)
        self._log.write_checkpoint()

    def _laid_out(self, plan: Plan) -> tuple[Task, ...]:
        """The tasks, with what bodies become, once the log has fixed it."""
        at = self._at
        tasks, self._result.unknown = fix_layouts(
            self._log, at.tier, at.place.prefix, plan.tasks, at.wishes
        )
        return tasks

    def _do(self, works: Sequence[Work]) -> tuple[bool, list[Task]]:
        """Have work done and commit it. Once there is no room, no more is begun: all would wait and fail, one after another.

        Returns:
            Whether some has to be planned again; and tasks of packs that failed, to be done alone.
        """
        alone: list[Task] = []
        is_moved = False
        done: list[Done] = []
        for work, outcome in self._engine(self._until_late(works)):
            if isinstance(outcome, ObjectNotFoundError):
                is_moved = True
            elif not isinstance(outcome, Exception):
                done.append(Done(tasks_of(work), archived_of(outcome)))
            elif isinstance(outcome, StoreFullError):
                self._is_full = True
                self._result.failed += [(task, outcome) for task in tasks_of(work)]
            elif isinstance(work, Pack):
                alone += work.tasks
            else:
                self._result.failed.append((work, outcome))
            if _is_due(done):
                is_moved |= self._commit(done)
                done = []
        return (self._commit(done) if done else False) or is_moved, alone

    def _until_late(self, works: Sequence[Work]) -> Iterator[Work]:
        """Work, as long as there is time and room."""
        limit_ms = self._limits.runtime_ms
        for number, work in enumerate(works):
            elapsed_ms = 1000 * (self._at.clock.monotonic_s() - self._began_s)
            if self._is_full or (limit_ms is not None and elapsed_ms >= limit_ms):
                self._result.not_begun += sum(len(tasks_of(one)) for one in works[number:])
                return
            yield work

    def _commit(self, done: list[Done]) -> bool:
        """One entry for all of it that nobody has archived yet; whether some has to be planned again."""
        due = list(done)

        def hold(state: ArchiveState) -> None:
            if any(_is_taken(state, task) for one in due for task in one.tasks):
                raise _OvertakenError

        while due:
            due = [one for one in due if not any(_is_taken(self._log.state, t) for t in one.tasks)]
            try:
                if due:
                    record = self._result.after(due, self._at.clock.now_ms())
                    self._log.append([*map(_action, due), job_action(record)], check=hold)
                    self._result.entries += 1
                break
            except _OvertakenError:
                continue
        for one in due:
            self._result.count(one)
        lost = [task for one in done if one not in due for task in one.tasks]
        taken = [task for task in lost if _is_taken(self._log.state, task)]
        self._result.overtaken += len(taken)
        self._log.write_checkpoint()
        self._told(self._result)
        return len(taken) < len(lost)

    def _forget(self, plan: Plan) -> None:
        """Take out of the archive what the broker took back, also what a job that had not seen it archived meanwhile."""
        for planned in plan.overtaken:
            one = planned
            while one.mark not in self._log.state.tails.get(one.lane, ()):
                one = replace(one, starts=_starts(self._log.state, one))
                self._divide(one)
                try:
                    self._log.append(
                        [forget_action(one.lane, list(one.starts), one.mark)],
                        check=partial(_require_all, one),
                    )
                except _OvertakenError:
                    continue
                self._result.entries += 1
                break

    def _divide(self, one: Overtaken) -> None:
        """Separate what has to go from that with which it shares files."""
        for _ in range(ROUNDS):
            apart = plan_division(self._log.state, one.lane, one.starts)
            if not apart:
                return
            self._result.entries += merge(self._at, self._log, apart).entries


def _action(done: Done) -> Action:
    pairs = list(zip(done.tasks, done.archived, strict=True))
    if len(pairs) == 1:
        ((task, archived),) = pairs
        return archive_action(task.lane, archived, task.tails)
    return pack_action((task.lane, task.tails, archived) for task, archived in pairs)


def _starts(state: ArchiveState, one: Overtaken) -> tuple[int, ...]:
    """Of what is to be forgotten now."""
    return tuple(found.start for found in state.overlapping(one.lane, one.low, one.high))


def _require_all(one: Overtaken, state: ArchiveState) -> None:
    """Nothing else is to be forgotten, since a mark is dealt with once; nor has another dealt with it."""
    if one.mark in state.tails.get(one.lane, ()) or _starts(state, one) != one.starts:
        raise _OvertakenError


def _is_due(done: list[Done]) -> bool:
    every = [archived for one in done for archived in one.archived]
    files = len({file.key for archived in every for file in archived.files})
    return files >= COMMIT_FILES or sum(a.source_bytes for a in every) >= COMMIT_BYTES


class _OvertakenError(Exception):
    """Another job has archived some of it."""


def _is_taken(state: ArchiveState, task: Task) -> bool:
    late = len(state.tails.get(task.lane, ())) != task.tails
    return late or bool(state.overlapping(task.lane, task.start, task.end))


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


__all__ = ["Result", "Workshop", "first_error", "local_engine", "log_writer", "plan_job", "run_job"]
