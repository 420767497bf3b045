"""Verification of one broker's tier: journal, listing, and, if asked to, every byte and a local store.

How to use it::

    report = verify_tier(store, prefix, deep=True, local=None, executor=pool, progress=print)
    report.is_clean, report.problems, report.recorded, report.comparison

Ordering: the journal is replayed before and after the listing, so that the work of a living writer or collector meanwhile
is not taken for damage: missing is what is named before and after and not listed; orphaned what is listed and named at
neither time.

Memory: the state, and for each of ``in_flight_max`` steps one bundle (or a batch of tier and local store).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from tiered.errors import DataError, JournalLostError
from tiered.log.named import named_objects, parts_by_bundle
from tiered.log.reader import QueueReader, TierReader
from tiered.log.takeback import is_tail
from tiered.log.verify_bundle import BundleCheck
from tiered.log.verify_index import IndexCheck, check_indexes, unindexed_messages
from tiered.log.verify_journal import check_journal, check_lease
from tiered.log.verify_listing import compare_listing, record_listing
from tiered.log.verify_local import QueueComparison
from tiered.log.verify_objects import check_quarantined
from tiered.log.verify_report import Finding, Problem, StoreComparison, VerifyReport
from tiered.log.verify_state import check_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Executor, Future

    from backends.base import ObjectStore
    from tiered.local.face import LocalStore
    from tiered.log.state import TierState
    from tiered.log.verify_listing import Listing

IN_FLIGHT_MAX = 4


class _Step(NamedTuple):
    run: Callable[[], Finding]
    size_bytes: int


def verify_tier(
    store: ObjectStore,
    prefix: str,
    *,
    deep: bool = False,
    local: LocalStore | None = None,
    executor: Executor | None = None,
    progress: Callable[[int, int], None] | None = None,
    in_flight_max: int = IN_FLIGHT_MAX,
) -> VerifyReport:
    """Check a tier. Whatever is damaged is in the report, and ends nothing.

    Args:
        store: The tier's store (with retries).
        prefix: Of the broker, ending in a slash (``Place.prefix``).
        deep: Read and check every object; else only journal, listing and state.
        local: Also compare with this local store, message by message (``refresh`` is called).
        executor: Runs the steps of a deep run and of a comparison; None: they run here, one after another.
        progress: Told ``(done_bytes, total_bytes)`` after each step, on the calling thread.
        in_flight_max: Steps at once; bounds the memory.

    Raises:
        JournalLostError: The journal is gone, or has lost its end (other damage is no error here).
        BackendError: The journal or the listing could not be read.
        TieredStoreError: The journal is of a newer version, or the local store cannot be read at all.
    """
    run = _Run(store, prefix)
    steps = run.journal_and_listing(deep=deep)
    if local is not None:
        steps += run.comparisons(local)
    total = sum(step.size_bytes for step in steps)
    done = 0
    for step, finding in _run_all(steps, executor, in_flight_max):
        run.take(finding)
        done += step.size_bytes
        if progress:
            progress(done, total)
    return run.report


class _Run:
    """One verification, on the caller's thread."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._reader = TierReader(store, prefix)
        self.report = VerifyReport()

    def journal_and_listing(self, *, deep: bool) -> list[_Step]:
        """Say what can be said without reading a data object; the steps of a deep run."""
        whole = self._refresh()
        state = self._reader.state
        named = named_objects(state)
        listing = compare_listing(self._store, self._prefix, named, self.report)
        whole = self._refresh() and whole
        now_named = named_objects(self._reader.state).keys()
        for key in sorted(listing.missing & now_named):
            self.report.add(Problem("missing", self._prefix + key, "an entry names this object"))
        if whole:
            record_listing(listing, now_named, self._reader.state.generation, self.report)
        for problem in (*check_state(state), *check_indexes(state)):
            self.report.add(problem)
        self._count(state, listing)
        if listing.has_lease:
            self.take(check_lease(self._store, self._prefix))
        if not deep:
            return []
        self.take(check_journal(self._store, self._prefix, listing.entries, listing.checkpoints))
        return [
            *self._bundle_steps(state, listing.missing),
            *self._index_steps(state, listing.missing),
            *self._quarantine_steps(listing),
        ]

    def comparisons(self, local: LocalStore) -> list[_Step]:
        """Steps that compare queues; queues that only one side has are counted here."""
        local.refresh()
        theirs = local.queues()
        count = StoreComparison()
        steps: list[_Step] = []
        for queue, lives in self._reader.state.queues.items():
            if queue in theirs:
                tier = QueueReader.of_life(self._store, self._prefix, queue, lives[-1])
                comparison = QueueComparison(tier, local, theirs[queue])
                size = lives[-1].parts().log_bytes
                steps.append(_Step(comparison.run, size))
            else:
                count.expired_messages += int(lives[-1].parts().column("count").sum())
        for queue, bounds in theirs.items():
            if queue not in self._reader.state.queues:
                count.lag_messages += bounds.end - bounds.min
        self.take(Finding(comparison=count))
        return steps

    def take(self, finding: Finding) -> None:
        """Merge what a step found; what it missed is damage only if an entry names it still."""
        if finding.missing:
            self._refresh()
            named = named_objects(self._reader.state)
            for key in finding.missing:
                if key in named:
                    finding.problem("missing", self._prefix + key, "an entry names this object")
        self.report.merge(finding)

    def _refresh(self) -> bool:
        """Replay; whether all of the journal could be."""
        try:
            self._reader.refresh()
        except JournalLostError:
            raise  # there is nothing to hold the objects against
        except DataError as error:
            problem = Problem("journal", error.where, error.what)
            if problem not in self.report.problems:
                self.report.add(problem)
            return False
        return True

    def _count(self, state: TierState, listing: Listing) -> None:
        report, recorded = self.report, self.report.recorded
        report.journal_number = self._reader.journal_number
        report.queues = len(state.queues)
        recorded.refused_parts = state.refused_parts
        recorded.quarantined = len(listing.quarantine)
        recorded.unindexed_messages = unindexed_messages(state)
        for key, size in named_objects(state).items():
            report.named_objects += key not in listing.missing
            report.named_bytes += size
        for lives in state.queues.values():
            tails = [life for number, life in enumerate(lives) if is_tail(lives, number)]
            recorded.ended_lives += len(lives) - 1 - len(tails)
            recorded.taken_back += len(tails)
            recorded.taken_back_messages += sum(
                life.commit_offset - life.min_offset for life in tails
            )
            for life in lives:
                recorded.gaps += len(life.gaps)
                recorded.gap_messages += sum(gap.end - gap.start for gap in life.gaps)
                parts = life.parts()
                holes = int(parts.column("holes").sum())
                report.parts += len(parts)
                report.messages += int(parts.column("count").sum()) - holes
                recorded.holes += holes

    def _bundle_steps(self, state: TierState, missing: set[str]) -> Iterator[_Step]:
        for bundle, named in parts_by_bundle(state):
            if bundle.key not in missing:
                check = BundleCheck(self._store, self._prefix, bundle, named)
                yield _Step(check.run, bundle.size_bytes)

    def _index_steps(self, state: TierState, missing: set[str]) -> Iterator[_Step]:
        for index in state.indexes:
            if index.place.key not in missing:
                check = IndexCheck(self._store, self._prefix, index)
                yield _Step(check.run, index.place.object_bytes)

    def _quarantine_steps(self, listing: Listing) -> Iterator[_Step]:
        for key, size_bytes in listing.quarantine.items():
            yield _Step(_Quarantined(self._store, self._prefix, key).run, size_bytes)


class _Quarantined(NamedTuple):
    store: ObjectStore
    prefix: str
    key: str

    def run(self) -> Finding:
        return check_quarantined(self.store, self.prefix, self.key)


def _run_all(
    steps: Iterable[_Step], executor: Executor | None, in_flight_max: int
) -> Iterator[tuple[_Step, Finding]]:
    """Run steps, so many at once, and give what they found in their order."""
    if executor is None:
        for step in steps:
            yield step, step.run()
        return
    flying: deque[tuple[_Step, Future[Finding]]] = deque()
    for step in steps:
        if len(flying) >= in_flight_max:
            first, future = flying.popleft()
            yield first, future.result()
        flying.append((step, executor.submit(step.run)))
    for step, future in flying:
        yield step, future.result()
