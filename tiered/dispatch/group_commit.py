"""Group commits: rounds take all that waits in the queues' buffers, upload it in shared bundles, and name it in entries.

When: what has waited longest is old enough; or what waits fills more than a bundle, and more where queues are many
(``DispatchSettings.round_bytes``); or memory is short; or everything is to be flushed. A round then takes everything of
every queue, so that it costs by its bytes and not by the number of queues: ``plan_bundles`` divides the commits over bundles
of ``bundle_bytes``, sorted by topic, queue and offset.

Ordering: a queue may have commits in several bundles on their way; what is durable is handed on in the order of its queue
(``tiered.log.composite``).

Retries and errors: of a bundle that failed, or whose outcome is unknown, each queue switches files and is tried
again after a pause with jitter, for ever; a refusal that waiting cannot mend ends the dispatcher.

Bounds: ``uploads_max`` bundles are on their way at once, fewer on a slow way (``InFlight``), and no round is taken while
they are.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from backends.errors import AlreadyExistsError, BackendError
from backends.lazy_dataclass import dataclass
from backends.wrapping import put_own
from tiered import keys
from tiered.crashpoints import reached
from tiered.dispatch.settings import MemoryBudget
from tiered.errors import FencedError, InternalError, StoreUnavailableError, TieredStoreError
from tiered.format.bundle import SectionTable, build_sections, build_tail, pack_table
from tiered.format.object import build_object
from tiered.log.actions import action_of
from tiered.log.bundles import (
    SectionRow,
    StoredBundle,
    bundle_row,
    sections_of,
    some_of,
    table_of,
)
from tiered.log.composite import CommitColumns
from tiered.log.lineage import grown, grown_to
from tiered.log.parts import Bundle, LineageFacts
from tiered.log.state import TierState, queue_action
from tiered.model import QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Buffer

    from backends.base import ObjectStore
    from tiered.clock import Clock
    from tiered.dispatch.settings import DispatchContext, DispatchSettings
    from tiered.format.bundle import Section
    from tiered.journal.append import JournalWriter
    from tiered.journal.entry import Action
    from tiered.local.interface import LocalStore
    from tiered.log.composite import CompositeFlatFile, GroupCommit
    from tiered.log.merge import MergeOutput
    from tiered.model import MessageQueue


# -- uploads -----------------------------------------------------------------------------------------
#
# Makes bundles and puts them into the store. No state but the count of objects begun.
#
# Retries and errors: nothing is retried here. A failed or unknown outcome is answered by other bundles under other keys,
# never by asking what became of the first (invariants I4, I7).


class Uploader:
    """Puts objects under keys that no other try has. From any thread."""

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        *,
        epoch: int,
        writer: str,
        clock: Clock,
        escapes_case: bool = False,
        sequences: Iterator[int] | None = None,
        budget: MemoryBudget | None = None,
    ) -> None:
        """Begin.

        Args:
            sequences: Numbers of its objects, each once; default: 0, 1, ... See ``tiered.keys.maintenance_sequences``.
            budget: Keeps what is put for the merge that will gather it; None: nothing is kept.
        """
        self.budget = budget or MemoryBudget(0)  # keeps small bundles of level 0 for a while
        self._store = store
        self._escapes_case = escapes_case
        self._prefix = prefix
        self._epoch = epoch
        self._writer = writer
        self._clock = clock
        self._sequences = sequences or itertools.count()
        # Told of commits that are durable and about to be named, in the order of each queue, while they still have
        # their records; must not raise.
        self.on_stored: Callable[[Sequence[GroupCommit]], None] = lambda _some: None

    def put_commits(self, commits: Sequence[GroupCommit], *, alone: bool) -> StoredBundle:
        """Upload commits as one bundle of level 0, in this order.

        Args:
            commits: Sorted by topic, queue id and offset.
            alone: They are of one queue, and the bundle is its own.
        """
        reached("bundle-begun")
        first = commits[0]
        if alone:
            key = keys.queue_bundle_key(
                "",
                first.queue,
                first.incarnation,
                first.queue_offset,
                self.next_id(),
                escapes_case=self._escapes_case,
            )
        else:
            key = keys.bundle_key("", 0, self._clock.now_ms(), self.next_id())
        stored = self._put_bundle(key, *commit_sections(commits))
        reached("bundle-stored")
        return stored

    def put_merged(
        self, output: MergeOutput, sections: Sequence[tuple[SectionRow, Section]]
    ) -> StoredBundle:
        """Upload a bundle made by a merge."""
        made, escapes = self.next_id(), self._escapes_case
        now_ms, level = self._clock.now_ms(), output.level
        row = sections[0][0]
        if output.queue is not None:
            place = output.queue, row.incarnation, QueueOffset(row.queue_offset)
            key = keys.queue_bundle_key("", *place, made, escapes_case=escapes)
        elif output.topic:
            key = keys.topic_bundle_key("", output.topic, level, now_ms, made, escapes_case=escapes)
        else:
            key = keys.bundle_key("", level, now_ms, made)
        table = table_of(((row, section.place) for row, section in sections), level)
        buffers = [buffer for _, section in sections for buffer in section.buffers]
        return self._put_bundle(key, table, buffers)

    def _put_bundle(self, key: str, table: SectionTable, buffers: Sequence[Buffer]) -> StoredBundle:
        packed = pack_table(table)
        tail = build_tail(table, packed)
        put_own(self._store, self._prefix + key, [*buffers, tail])
        size = int(table.rows["size_bytes"].sum()) + len(tail)
        if not table.level:
            self.budget.keep(key, buffers, size)
        return StoredBundle(table, packed, sections_of(Bundle(key, size, table.level), table))

    def put_quarantine(self, commit: GroupCommit) -> int:
        """Upload the raw bytes and the reason of each damaged record; how many there were."""
        damaged = commit.quarantined
        for record in damaged:
            key = keys.quarantine_key(
                "",
                commit.queue,
                commit.incarnation,
                record.queue_offset,
                self.next_id(),
                escapes_case=self._escapes_case,
            )
            description = {
                "kind": "quarantine",
                "topic": commit.queue.topic,
                "queue_id": commit.queue.queue_id,
                "incarnation": commit.incarnation,
                "queue_offset": record.queue_offset,
                "physical_offset": record.physical_offset,
                "reason": record.reason.name,
                "detail": record.detail,
            }
            made = build_object([record.raw], description)
            put_own(self._store, self._prefix + key, made.buffers)
            reached("quarantine-stored")
        return len(damaged)

    def next_id(self) -> keys.ObjectId:
        """Id of an object that is about to be begun."""
        return keys.ObjectId(self._epoch, self._writer, next(self._sequences))


def commit_sections(commits: Sequence[GroupCommit]) -> tuple[SectionTable, list[Buffer]]:
    """The sections of commits, and their bytes: all of a bundle of level 0 but its tail."""
    said = CommitColumns.of(commits)
    counts = [commit.count for commit in commits]
    buffers, rows = build_sections((commit.data() for commit in commits), said.items, counts)
    number: dict[str, int] = {}
    rows["topic"] = [number.setdefault(one.queue.topic, len(number)) for one in commits]
    rows["queue_id"] = [one.queue.queue_id for one in commits]
    rows["incarnation"] = [one.incarnation for one in commits]
    rows["segment"] = [one.segment for one in commits]
    rows["log_offset"] = [one.log_offset for one in commits]
    rows["queue_offset"] = [one.queue_offset for one in commits]
    rows["last"] = [one.last for one in commits]
    rows["holes"], rows["store_min_ms"], rows["store_max_ms"] = (
        said.holes,
        said.low_ms,
        said.high_ms,
    )
    return SectionTable(list(number), rows), buffers


# -- lineage -----------------------------------------------------------------------------------------


class LineageTracker:
    """Finds what commits tell, in the order of each queue. For one thread at a time."""

    def __init__(self, local: LocalStore, state: Callable[[], TierState]) -> None:
        self._local = local
        self._state = state
        # Of queues whose commits are on their way into the journal: up to where, and what it will say then.
        self._known: dict[MessageQueue, tuple[int, LineageFacts]] = {}

    def follow(self, commits: Sequence[GroupCommit]) -> None:
        """Note in commits that are about to be named, and still have their records, what they tell."""
        for commit in commits:
            before = self._before(commit)
            local = None
            if before is None or not before.is_sure:
                local = self._local.lineage(commit.queue, commit.queue_offset)
            key = commit.queue, commit.incarnation
            said = commit.lineage = grown(*key, commit.batches, before, local)
            facts = grown_to(before, said) if said else before or LineageFacts()
            self._known[commit.queue] = commit.queue_end, facts

    def _before(self, commit: GroupCommit) -> LineageFacts | None:
        end, facts = self._known.get(commit.queue, (-1, None))
        if end == commit.queue_offset:
            return facts
        incarnation = self._state().incarnation(commit.queue)
        if incarnation is None or incarnation.number != commit.incarnation:
            return None
        facts, segments = incarnation.lineage, incarnation.segments
        if facts and not (segments and segments[-1].parts.queue_end == commit.queue_offset):
            # What was open before a gap may have ended in it: the local store says.
            return replace(facts, opened=(), is_sure=False)
        return facts


# -- group_commit ------------------------------------------------------------------------------------


_OUTAGE_S = 2.0
"""Without a success for so long: an outage, after which nobody waits out a pause that was meant for it."""

_LOG = logging.getLogger("tiered.dispatch")


def plan_bundles(taken: Sequence[GroupCommit], bundle_bytes: int) -> list[list[GroupCommit]]:
    """Divide a round's commits over bundles of about ``bundle_bytes``; one with more than half of that goes alone."""
    plans: list[list[GroupCommit]] = []
    shared: list[GroupCommit] = []
    size = 0
    for one in sorted(taken, key=attrgetter("queue", "queue_offset")):
        more = one.data_bytes
        if 2 * more > bundle_bytes:
            plans.append([one])
            continue
        if shared and size + more > bundle_bytes:
            plans.append(shared)
            shared, size = [], 0
        shared.append(one)
        size += more
    return [*plans, shared] if shared else plans


_QUICK_S = 5.0
_SLOW_S = 15.0
"""Half of a store's usual deadline (30 s): a flush that comes near it has too much beside it."""
_AT_FIRST = 2


class InFlight:
    """How many bundles may be on their way at once: as many as the way to the store bears.

    On a slow way all that share it take as long as their sum, until all of them miss their deadline, are sent again, and
    miss it again. So each that was quick allows one more, and each that was slow, whatever became of it, half as many;
    whatever the speed, what is on its way stays far from the deadline. Not thread safe.
    """

    def __init__(self, uploads_max: int) -> None:
        self._max = uploads_max
        self.limit = min(_AT_FIRST, uploads_max)  # from 1 to ``uploads_max``

    def ended(self, took_s: float, *, is_stored: bool) -> None:
        """Learn how long one took. That it failed quickly says nothing about the way."""
        if took_s > _SLOW_S:
            self.limit = max(1, self.limit // 2)
        elif is_stored and took_s < _QUICK_S:
            self.limit = min(self._max, self.limit + 1)


class GroupCommitter:
    """Uploads group commits, round by round. From any thread."""

    def __init__(
        self,
        uploader: Uploader,
        submit: Callable[[Sequence[GroupCommit]], None],
        context: DispatchContext,
        *,
        guard: Callable[[Callable[[], None]], None],
        lineage: LineageTracker | None = None,
    ) -> None:
        """Wire it.

        Args:
            submit: Told of what is durable, in the order of each queue.
            lineage: Finds what the records of commits tell; None: records of this store tell nothing.
        """
        self._lineage = lineage
        settings, clock = context.settings, context.clock
        self._uploader = uploader
        self._submit = submit
        self._context = context
        self._settings = settings
        self._budget = context.budget
        self._counters = context.counters
        self._clock = clock
        self._stop = context.stop
        self._guard = guard
        self._pool = ThreadPoolExecutor(settings.uploads_max, "tiered-upload")
        self._throttle = context.throttle(settings.upload_rate_bytes_s)
        self._lock = threading.Lock()
        self._handing_on = threading.Lock()  # held before any queue's: order
        self._buffering: dict[CompositeFlatFile, None] = {}  # in the order in which they came
        self._waiting_bytes = 0
        self._due_s: float | None = math.inf  # when a round is due by age; None: to be found out
        # Bundles that wait for others to be uploaded; as few as the records in memory fill.
        self._planned: deque[Sequence[GroupCommit]] = deque()
        self._in_flight = InFlight(settings.uploads_max)
        self._uploading = 0
        self.flush = False  # take every buffer, due or not
        self.is_awaited = False  # the follower waits for memory, so whatever has it is taken
        self._is_growing = False
        # Monotonic time of the last upload that went well.
        self.last_success_s = clock.monotonic_s()

    def reconfigure(self, settings: DispatchSettings) -> None:
        """Go on with others (``DispatchSettings.while_running``)."""
        self._settings = settings
        self._throttle.set_rate(settings.upload_rate_bytes_s)
        with self._lock:
            self._due_s = None

    @contextmanager
    def growing(self) -> Iterator[list[tuple[CompositeFlatFile, int]]]:
        """While a window is appended, of which the list is told: no round is taken, which would tear it.

        Else the rest of it, a small section of each queue, would be a round of its own.
        """
        grown: list[tuple[CompositeFlatFile, int]] = []
        self._is_growing = True
        try:
            yield grown
        finally:
            self._is_growing = False
            self.appended(grown)

    def appended(self, grown: Sequence[tuple[CompositeFlatFile, int]]) -> None:
        """Note that queues' buffers have grown by so many bytes."""
        with self._lock:
            before = self._waiting_bytes
            for file, size_bytes in grown:
                self._waiting_bytes += size_bytes
                if file not in self._buffering:
                    self._buffering[file] = None
                    if self._due_s is not None:
                        self._due_s = min(self._due_s, self._due_of(file))
            due_bytes = self._settings.round_bytes(len(self._buffering))
        if before < due_bytes <= self._waiting_bytes:
            self._context.wake.set()

    def _due_of(self, file: CompositeFlatFile) -> float:
        """Monotonic time at which a queue has a round taken by its age."""
        oldest_s = file.oldest_s
        if oldest_s is None:
            return math.inf
        return max(oldest_s + self._settings.freshness_s, file.next_try_s)

    def due_in_s(self) -> float:
        """How long until a round may be due by age; ``freshness_s`` at most. From the thread that scans."""
        with self._lock:
            due_s, waiting = self._due_s, [] if self._due_s is not None else list(self._buffering)
            self._due_s = math.inf if due_s is None else due_s  # `appended` sees to what comes now
        if due_s is None:
            due_s = min(map(self._due_of, waiting), default=math.inf)
            with self._lock:
                if self._due_s is not None:
                    self._due_s = due_s = min(self._due_s, due_s)
        return min(max(0.0, due_s - self._clock.monotonic_s()), self._settings.freshness_s)

    def scan(self) -> None:
        """Take a round if one is due. From one thread."""
        while self._is_due() and self._take_round():
            pass

    def _is_due(self) -> bool:
        with self._lock:
            if (
                self._stop.is_set()
                or self._is_growing
                or not self._buffering
                or len(self._planned) + self._uploading >= self._in_flight.limit
            ):
                return False
            is_full = self._waiting_bytes >= self._settings.round_bytes(len(self._buffering))
        is_full = is_full or self.is_awaited or self._budget.under_pressure
        return self.flush or is_full or self.due_in_s() <= 0

    def _take_round(self) -> bool:
        """Take what waits in every buffer, but for queues that are to pause; whether there was anything."""
        with self._lock:  # first: what comes to a queue behind its turn is noted again
            files, self._buffering, self._due_s = list(self._buffering), {}, None
        taken: list[GroupCommit] = []
        paused: list[CompositeFlatFile] = []
        now_s, now_ms = self._clock.monotonic_s(), self._clock.now_ms()
        for file in files:
            with file.lock:
                if now_s < file.next_try_s:
                    paused.append(file)
                while now_s >= file.next_try_s and (commit := file.take(now_ms)) is not None:
                    taken.append(commit)
        with self._lock:
            self._buffering.update(dict.fromkeys(paused))
            self._waiting_bytes -= sum(commit.data_bytes for commit in taken)
        self._begin(taken)
        return bool(taken)

    def _begin(self, taken: Sequence[GroupCommit]) -> None:
        """Have the pool upload what was taken."""
        plans = plan_bundles(taken, self._settings.bundle_bytes)
        with self._lock:
            self._planned += plans
        self._upload_planned()

    def _upload_planned(self) -> None:
        while True:
            with self._lock:
                if not self._planned or self._uploading >= self._in_flight.limit:
                    return
                some = self._planned.popleft()
                self._uploading += 1
            with suppress(RuntimeError):  # the pool was closed meanwhile: the commits are given up
                self._pool.submit(self._guard, partial(self._upload, some))

    def take_now(self, file: CompositeFlatFile) -> None:
        """Upload what one queue's buffer holds, since a gap follows. With its lock held."""
        if self._stop.is_set() or self._clock.monotonic_s() < file.next_try_s:
            return
        now_ms = self._clock.now_ms()
        taken: list[GroupCommit] = []
        while (commit := file.take(now_ms)) is not None:
            taken.append(commit)
        with self._lock:
            self._buffering.pop(file, None)
            self._due_s = None
            self._waiting_bytes -= sum(commit.data_bytes for commit in taken)
        self._begin(taken)

    def close(self) -> None:
        """Wait for the uploads that run; those that wait are given up."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _upload(self, some: Sequence[GroupCommit]) -> None:
        """Upload one bundle."""
        try:
            self._throttle.take(sum(commit.data_bytes for commit in some))
            alone = len(some) == 1 and 2 * some[0].data_bytes > self._settings.bundle_bytes
            began_s = self._clock.monotonic_s()
            try:
                stored = self._uploader.put_commits(some, alone=alone)
            except BackendError as error:
                self._took(began_s, is_stored=False)
                self._failed(some, error)
            else:
                self._took(began_s, is_stored=True)
                self._stored(some, stored)
        finally:
            with self._lock:
                self._uploading -= 1
            self._upload_planned()
            self._context.wake.set()

    def _took(self, began_s: float, *, is_stored: bool) -> None:
        with self._lock:
            self._in_flight.ended(self._clock.monotonic_s() - began_s, is_stored=is_stored)

    def _stored(self, some: Sequence[GroupCommit], stored: StoredBundle) -> None:
        now_s = self._clock.monotonic_s()
        was_out, self.last_success_s = now_s - self.last_success_s > _OUTAGE_S, now_s
        failed = self._see_to_holes(some, stored)
        # Before a queue's next can be handed on; and all at once: one entry names them.
        with self._handing_on:
            ready: list[GroupCommit] = []
            for number, commit in enumerate(some):
                if number not in failed:
                    commit.lies_in(stored, number)
                    with commit.file.lock:
                        # Nothing, if it was given up since one before it failed: other bundles will have it.
                        ready += commit.file.stored(commit)
            if ready:
                self._hand_on(ready)
        self._budget.release(sum(commit.data_bytes for commit in ready))
        self._context.room.set()
        if was_out:
            self._wake_all(now_s)

    def _see_to_holes(self, some: Sequence[GroupCommit], stored: StoredBundle) -> set[int]:
        """Put damaged records into quarantine, and count what is missing; the commits of which that has failed."""
        failed: set[int] = set()
        for number in np.flatnonzero(stored.table.rows["holes"]).tolist():
            commit = some[number]
            try:
                commit.damaged = self._uploader.put_quarantine(commit)
            except BackendError as error:
                self._failed([commit], error)
                failed.add(number)
            commit.count_missing()
        return failed

    def _hand_on(self, ready: Sequence[GroupCommit]) -> None:
        """Have these named; their records are let go."""
        if self._lineage is not None:
            self._lineage.follow(ready)
        self._uploader.on_stored(ready)
        for commit in ready:
            commit.batches = ()
        self._submit(ready)

    def _wake_all(self, now_s: float) -> None:
        """End the pauses of all queues, since the store is back; not all at once."""
        with self._lock:
            paused = [file for file in self._buffering if file.next_try_s > now_s]
        for file in paused:
            if file.lock.acquire(blocking=False):  # else it keeps its pause
                try:
                    file.next_try_s = min(file.next_try_s, now_s + self._context.rng.random() / 2)
                finally:
                    file.lock.release()
        with self._lock:
            self._due_s = None

    def _failed(self, some: Sequence[GroupCommit], error: BackendError) -> None:
        self._counters.uploads_failed += 1
        first = False
        for commit in some:
            file = commit.file
            with file.lock:
                before = file.buffered_bytes
                if file.failed(commit, self._clock.monotonic_s(), self._context.backoff_s):
                    self._counters.switches += 1
                    self.appended([(file, file.buffered_bytes - before)])  # waits again
                    first = first or file.failures == 1
        with self._lock:
            self._due_s = None
        if not error.retriable:
            raise refused(error)
        if first:
            more = f" and {len(some) - 1} more" if len(some) > 1 else ""
            what = "upload of a bundle failed (%s%s), going on in new segments: %s"
            _LOG.log(retry_level(error), what, some[0].queue, more, error)


def retry_level(error: BackendError) -> int:
    """Of the log line about one request that is tried again.

    What only a person can mend meets every queue alike; ``tiered.api.stores`` tells of it, once for the whole store.
    """
    return logging.DEBUG if error.needs_a_person else logging.WARNING


def refused(error: BackendError) -> TieredStoreError:
    """The error of a store that says no, and will say so again."""
    if isinstance(
        error, AlreadyExistsError
    ):  # with other bytes (`put_own`): no two tries share a key
        return FencedError(
            f"another process writes under our own id, so this one was cloned: {error}",
            do="stop one of the two, then attach again",
        )
    return StoreUnavailableError(
        f"the store refuses an upload: {error}",
        do=f"{error.do or 'mend permissions or bucket'}, then attach again",
    )


# -- rounds -------------------------------------------------------------------------------------------
#
# The build thread: turns rounds of durable sections into journal entries.
#
# Overview: finished uploads arrive in the *write map*. When the *read map* is drained the two are swapped (double buffer),
# and one journal entry names the parts of all queues, and what else there is to say (``Fact``).
#
# Ordering: data and index are durable in one step, then the entry names them (I2). Parts of one queue keep their order: they
# come in it, and bundles are named in the order in which their sections came. One entry is in flight at a time.
#
# Retries and errors: an entry is never re-cut while its outcome is unknown (``tiered.journal.append``). ``FencedError`` ends
# the thread through the dispatcher.
#
# After a crash: sections that no entry names are orphans; nothing else is left.


@dataclass(frozen=True, slots=True)
class Fact:
    """Something else than a part that the next entry shall say."""

    action: Action
    done: Callable[[], None]  # called when the entry is durable


LOOK_S = 5.0
"""A journal that we have not written to for so long is looked at, a request each."""


class RoundBuilder:
    """Owner of the maps and of the journal's writing end."""

    def __init__(
        self,
        journal: JournalWriter[TierState],
        clock: Clock,
        *,
        committed: Callable[[Sequence[GroupCommit]], None],
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._committed = committed
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._write_map: list[GroupCommit] = []
        self._facts: list[Fact] = []
        self._busy = False
        self._looked_s = clock.monotonic_s()
        self.rounds = 0

    def submit(self, some: Sequence[GroupCommit]) -> None:
        """Put dispatch requests into the write map. From any thread."""
        with self._lock:
            self._write_map += some
        self._wake.set()

    def state_fact(self, fact: Fact) -> None:
        """Have the next entry say something else. From any thread."""
        with self._lock:
            self._facts.append(fact)
        self._wake.set()

    @property
    def is_idle(self) -> bool:
        """Nothing waits and no round is under way."""
        with self._lock:
            return not (self._write_map or self._facts or self._busy)

    def run(self, stop: threading.Event) -> None:
        """Body of the build thread: rounds until ``stop`` is set, and then a last one."""
        while not stop.is_set():
            self._clock.wait(self._wake, 0.25)
            self._wake.clear()
            if not self.run_round():
                self._look()
        self.run_round()

    def _look(self) -> None:
        """See what guests have appended while we have not, as that a topic is paused."""
        if self._clock.monotonic_s() < self._looked_s + LOOK_S:
            return
        with suppress(BackendError):  # the next write meets that too, and reports it
            self._journal.look()
        self._looked_s = self._clock.monotonic_s()

    def wake(self) -> None:
        """Have the thread look at ``stop``."""
        self._wake.set()

    def run_round(self) -> int:
        """Swap the maps and commit what is in them; how many actions became durable."""
        with self._lock:
            read_map, self._write_map = self._write_map, []
            facts, self._facts = self._facts, []
            self._busy = bool(read_map or facts)
        try:
            actions = [fact.action for fact in facts]  # a queue is made known before its parts
            actions += _actions(read_map)
            if actions:
                self._append(actions)
                reached("entry-known")
            for fact in facts:
                fact.done()
            self._committed(read_map)
        finally:
            with self._lock:
                self._busy = False
        if actions:
            reached("entry-counted")
        self._journal.write_checkpoint()
        return len(actions)

    def _append(self, actions: Sequence[Action]) -> None:
        refused = self._journal.state.refused_parts
        self._journal.append(actions)
        self._looked_s = self._clock.monotonic_s()  # an append meets what others have appended
        self.rounds += 1
        if self._journal.state.refused_parts != refused:
            raise InternalError(
                f"replay refuses a part of our own journal entry {self._journal.number}",
                do="stop attaching and report this defect",
            )


def plan_groups(durable: Sequence[GroupCommit]) -> list[list[GroupCommit]]:
    """Divide what is durable into groups of one bundle each, as few as the order of every queue allows."""
    groups: list[list[GroupCommit]] = []
    of_bundle: dict[int, int] = {}
    of_queue: dict[MessageQueue, int] = {}
    for one in durable:
        bundle, queue = id(one.stored), one.queue
        at = of_bundle.get(bundle, -1)
        if at < of_queue.get(queue, 0):  # this queue has something behind that group already
            at = of_bundle[bundle] = len(groups)
            groups.append([])
        groups[at].append(one)
        of_queue[queue] = at
    return groups


def _actions(durable: Sequence[GroupCommit]) -> Iterator[Action]:
    """One ``part`` for all bundles; and what went into quarantine."""
    rows = []
    for group in plan_groups(durable):
        stored, numbers = group[0].section()[0], [one.number for one in group]
        is_whole = numbers == list(range(len(stored.table)))
        packed = stored.packed if is_whole else some_of(stored.table, numbers)
        rows.append(bundle_row(stored.bundle, packed))
    if rows:
        yield {"do": "part", "bundles": rows}
    for one in durable:
        if one.damaged:
            count = {"count": one.damaged}
            yield queue_action("quarantine", one.queue, one.incarnation, **count)
        if one.lineage:
            yield action_of(one.lineage)
