"""gc: deletes what no reader can reach any more. Plan, then apply.

Overview: ``plan_gc`` looks at the tier (``survey``); ``tiered.log.history`` decides. ``apply_gc`` writes a
ledger record (whose time of writing is the clock by which ages are held), looks again, takes an epoch when the plan needs
one, and deletes in batches.

Ordering: indexes before data before journal. Before each batch the journal is followed, so that nothing that an entry
has named meanwhile is touched. A batch ends before the next begins.

Retries and errors: a deletion that fails ends the run behind its batch; what was deleted is in the ledger. When anything
is missing or strange, nothing is deleted.

What was given up and shares a bundle with what is named is not an orphan: the plan says how much, and with ``erases``
which bundles are to be rewritten without it (``apply_erasure``, which a caller carries out before ``apply_gc``).

After a crash: the ledger has the plan's digest; each object is there or gone. The same plan can be applied again (what is
gone is counted as gone), or a new one be made.
"""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 (read at run time: tiered.journal.entry)
from dataclasses import asdict, replace
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from backends.base import ByteRange, foreign_below
from backends.errors import BackendError, InvalidRangeError, ObjectNotFoundError, ShortReadError
from backends.lazy_dataclass import dataclass
from backends.registry import PREFIX as PROBES
from tiered.crashpoints import reached
from tiered.dispatch.merging import Merger, Packer
from tiered.dispatch.settings import Compression
from tiered.errors import DataError, TieredStoreError
from tiered.format.bundle import FOOTER_BYTES, tail_bytes
from tiered.keys import DATA_ROOTS, JOURNAL, maker_of
from tiered.log.history import (
    Deletion,
    GivenUp,
    KnownObjects,
    OrphanPlan,
    TierHistory,
    given_up,
    named_bundles,
    named_objects,
    plan_orphans,
)
from tiered.log.merge import MergePolicy, plan_erasure
from tiered.upkeep.workplace import (
    Ledger,
    TierPlan,
    UploadingEpoch,
    in_new_epoch,
    moved_on,
    plan_head,
    report_lease,
    require_same_tier,
    was_applied,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Executor

    from backends.base import ObjectInfo, ObjectStore, StoredVersion
    from backends.s3_bucket import Bucket
    from tiered.api.broker_place import Place
    from tiered.clock import Clock
    from tiered.dispatch.merging import MergedBundle
    from tiered.journal.replay import JournalBytes
    from tiered.log.merge import MergeOutput, MergePlan
    from tiered.log.parts import TierState
    from tiered.upkeep.workplace import Workplace


@dataclass(frozen=True, slots=True)
class Erasure:
    """A bundle that is to be rewritten without what was given up."""

    key: str
    size_bytes: int  # of the object
    given_up_bytes: int  # of it, about


@dataclass(frozen=True, kw_only=True)
class GcPlan(TierPlan[Deletion]):
    """What is deleted, and what is rewritten before."""

    ROWS = "deletions"

    journal_checksum: int  # of the journal's last entry
    grace_ms: int  # what was named or written within it stays
    max_deletions: int
    is_writer_alive: bool
    takes_epoch: bool  # it presumes that an epoch is taken first
    is_history_covered: bool  # the journal tells of all of the grace
    refusals: tuple[str, ...]  # why nothing is deleted
    left: Mapping[str, Any]  # what is not named and stays
    deletion_count: int
    deletion_bytes: int
    kinds: Mapping[str, Any]  # how many of each
    given_up_bundles: int  # that hold given-up messages beside others
    given_up_bytes: int  # in these, about
    erases: bool  # they are to be rewritten
    erasures: tuple[Erasure, ...]
    steps: tuple[Deletion, ...]


BATCH = 200
"""Deletions between two looks at the journal."""


def plan_gc(
    store: ObjectStore,
    place: Place,
    clock: Clock,
    *,
    grace_ms: int,
    max_deletions: int,
    journal: JournalBytes | None = None,
    what: str = "gc",
    erases: bool = False,
    executor: Executor | None = None,
) -> GcPlan:
    """What gc would do now, as a plan. Changes nothing; ages are held by our own clock until it is applied.

    Args:
        journal: Reads entries ahead and keeps them for ``apply_gc``; None: one after another.
        what: As the plan calls itself: whose it is.
    """
    now_ms = clock.now_ms()
    found = survey(
        store,
        place.prefix,
        clock,
        now_ms=now_ms,
        grace_ms=grace_ms,
        limit=max_deletions,
        journal=journal,
    )
    orphans, history = found.orphans, found.history
    kinds = {kind: len(list(group)) for kind, group in groupby(orphans.deletions, _kind_of)}
    shared = find_given_up(store, place.prefix, history.state, executor)
    erasures = shared if erases and not orphans.refusals else []
    return GcPlan(
        what=what,
        **plan_head(store, place, history.state, history.number),
        journal_checksum=history.checksum,
        made_ms=now_ms,
        grace_ms=grace_ms,
        max_deletions=max_deletions,
        is_writer_alive=found.is_held,
        takes_epoch=found.takes_epoch,
        is_history_covered=history.covers,
        refusals=tuple(orphans.refusals),
        left=asdict(orphans.left),
        deletion_count=len(orphans.deletions),
        deletion_bytes=sum(one.size_bytes for one in orphans.deletions),
        kinds=kinds,
        given_up_bundles=len(shared),
        given_up_bytes=sum(one.size_bytes for one in shared),
        erases=erases,
        erasures=tuple(
            Erasure(place.prefix + one.bundle.key, one.bundle.size_bytes, one.size_bytes)
            for one in erasures
        ),
        steps=tuple(orphans.deletions),
    )


_kind_of = attrgetter("kind")


def apply_gc(
    at: Workplace,
    plan: GcPlan,
    *,
    executor: Executor | None = None,
    journal: JournalBytes | None = None,
    told: Callable[[int, int], None] = lambda _done, _total: None,
) -> dict[str, Any]:
    """Carry out a plan.

    Args:
        journal: With which it was planned, so that entries are not read again; or a new one; None: read one after another.

    Returns:
        What was done: ``deleted``, ``deleted_bytes``, ``already_gone``, ``left_young``, ``epoch``, ``run``; and
        ``was_applied``: all of it had been done before.

    Raises:
        InvalidError: The tier has moved on in a way that matters.
        DataError: Something is missing or strange; nothing was deleted.
        FencedError: The plan needs an epoch, and a writer is at work.
    """
    return _GcRun(at, plan, journal).run(executor, told)


class _GcRun:
    def __init__(self, at: Workplace, plan: GcPlan, journal: JournalBytes | None) -> None:
        self._at = at
        self._plan = plan
        self._journal = journal
        self._deletions = plan.steps
        self._named: set[str] = set()
        self._done = dict.fromkeys(("deleted", "deleted_bytes", "already_gone", "left_young"), 0)

    def run(self, executor: Executor | None, told: Callable[[int, int], None]) -> dict[str, Any]:
        at = self._at
        ledger = Ledger(at, "gc")
        now_ms = ledger.begin(self._plan)
        error = ""
        epoch = self._plan.epoch
        try:
            history, due = self._look_again(now_ms)
            epoch = history.state.epoch
            if self._plan.takes_epoch and due and epoch == self._plan.epoch:
                epoch = in_new_epoch(at).epoch
            total = len(due)
            for batch in _batches(due):
                self._require_unnamed(history, batch)
                self._delete(batch, executor)
                told(self._done["deleted"], total)
        except BaseException as caught:
            error = f"{type(caught).__name__}: {caught}"
            raise
        finally:
            self._close(ledger, {**self._done, "error": error})
        done, gone = self._done["deleted"], self._done["already_gone"]
        return {
            **self._done,
            "was_applied": was_applied(len(self._deletions), done, gone),
            "epoch": epoch,
            "run": ledger.run,
            "store_now_ms": now_ms,
        }

    def _close(self, ledger: Ledger, fields: dict[str, Any]) -> None:
        try:
            ledger.end(fields)
        except BackendError:
            if not fields["error"]:
                raise

    def _look_again(self, now_ms: int) -> tuple[TierHistory, list[Deletion]]:
        """Everything that the plan presumes must hold still; what is left to do."""
        plan = self._plan
        found = survey(
            self._at.store,
            self._at.prefix,
            self._at.clock,
            now_ms=now_ms,
            grace_ms=plan.grace_ms,
            limit=1 << 60,
            journal=self._journal,
        )
        history = found.history
        if found.orphans.refusals:
            raise refused(found.orphans.refusals, self._at.store.url)
        if plan.takes_epoch and found.is_held and history.state.epoch == plan.epoch:
            raise moved_on("a writer has begun")
        require_same_tier(plan, history.state)
        if history.checksum_of(plan.journal_number) != plan.journal_checksum:
            raise moved_on(f"journal entry {plan.journal_number} is another, or was trimmed")
        fresh = {one.key: one for one in found.orphans.deletions}
        due: list[Deletion] = []
        for one in self._deletions:
            listed = found.listed.get(one.key)
            if listed is None:
                self._done["already_gone"] += 1
            elif (listed.size_bytes, listed.modified_ms) != (one.size_bytes, one.modified_ms):
                raise moved_on(f"{one.key} is another object")
            elif one.key[len(self._at.prefix) :] in history.protected():
                raise moved_on(f"{one.key} is named")
            elif one.key in fresh:
                due.append(one)
            elif listed.modified_ms > now_ms - plan.grace_ms or now_ms < plan.made_ms:
                # By the store's clock, which rules, and may be behind ours, or cut to whole seconds. Then it is earlier
                # than it was for the plan, and what is old itself may wait for something young: an entry for the
                # checkpoint above it.
                self._done["left_young"] += 1
            else:
                raise moved_on(f"{one.key} is to stay")
        return history, due

    def _require_unnamed(self, history: TierHistory, batch: list[Deletion]) -> None:
        self._named |= (
            history.follow()
        )  # all since the look: an earlier batch may have met what this one has to mind
        for one in batch:
            if one.key[len(self._at.prefix) :] in self._named:
                raise moved_on(f"{one.key} has just been named")

    def _delete(self, batch: list[Deletion], executor: Executor | None) -> None:
        def delete(one: Deletion) -> BackendError | None:
            try:
                self._at.store.delete(one.key)
            except BackendError as error:
                return error
            reached("object-deleted")
            return None

        failures = list((executor.map if executor else map)(delete, batch))
        for one, failure in zip(batch, failures, strict=True):
            if failure is None:
                self._done["deleted"] += 1
                self._done["deleted_bytes"] += one.size_bytes
        for failure in failures:
            if failure is not None:
                raise failure


def _batches(deletions: list[Deletion]) -> Iterator[list[Deletion]]:
    """Of one kind each."""
    for _, group in groupby(deletions, _kind_of):
        ones = list(group)
        for start in range(0, len(ones), BATCH):
            yield ones[start : start + BATCH]


# --------------------------------------------------------------------------------------------------
# One look at a tier for gc, and what ``tiered.log.history`` decides of it. Changes nothing. Order: lease, listing,
# then the journal's recent history, so that every name that was there before the listing is seen.
# --------------------------------------------------------------------------------------------------

MISSING_LOOKED_AT = 100
"""Of so many objects that seem to be missing it is looked whether they really are; one is enough to refuse."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What was found at one look."""

    history: TierHistory  # the journal
    orphans: OrphanPlan  # the decision
    takes_epoch: bool  # it presumes that an epoch is taken first
    is_held: bool  # a writer is alive
    listed: dict[str, ObjectInfo]  # every object that could be deleted, as listed


def survey(
    store: ObjectStore,
    prefix: str,
    clock: Clock,
    *,
    now_ms: int,
    grace_ms: int,
    limit: int,
    journal: JournalBytes | None = None,
) -> Survey:
    """Look at a tier."""
    before = report_lease(store, prefix, clock)
    is_held = before.is_held
    listed = list(store.list(prefix))
    foreign = foreign_below(store, prefix)
    probes = list(store.list(PROBES))
    history = _history(store, prefix, listed, now_ms - grace_ms, journal)

    def planned(epoch: int) -> OrphanPlan:
        known = KnownObjects(
            prefix=prefix,
            state=history.state,
            base=history.base,
            protected=history.protected(),
            once_named=history.once_named,
            bound=history.bound,
            epoch=epoch,
            old_ms=now_ms - grace_ms,
            now_ms=now_ms,
        )
        plan = plan_orphans(listed, probes, known, limit=limit)
        plan.left.add_unknown(foreign)
        return plan

    orphans = planned(history.state.epoch)
    takes_epoch = False
    if not is_held and orphans.left.present_epoch and not orphans.refusals:
        beyond = planned(history.state.epoch + 1)
        takes_epoch = len(beyond.deletions) > len(orphans.deletions)
        orphans = beyond if takes_epoch else orphans
    orphans.refusals += history.problems
    long_named = named_objects(before.state).keys()
    orphans.refusals += _not_shown(store, prefix, orphans.missing & long_named)
    orphans.refusals += _truly_missing(store, prefix, history, orphans.missing - long_named)
    if orphans.refusals:
        orphans.deletions.clear()
    seen = {info.key: info for info in (*listed, *probes)}
    return Survey(history, orphans, takes_epoch and bool(orphans.deletions), is_held, seen)


def find_given_up(
    store: ObjectStore, prefix: str, state: TierState, executor: Executor | None = None
) -> list[GivenUp]:
    """The bundles that are named and hold what was given up, too; by their keys.

    A request for the footer of each of which the journal does not tell; none for others.
    """

    def look(one: GivenUp) -> GivenUp | None:
        if one.is_sure:
            return one
        key, size = prefix + one.bundle.key, one.bundle.size_bytes
        try:
            footer = store.get(key, ByteRange(max(0, size - FOOTER_BYTES), size))
            hidden = size - tail_bytes(footer, where=key) - one.named_end
        except TieredStoreError:
            return one  # nobody can tell: a rewritten one says what it has
        except (ObjectNotFoundError, InvalidRangeError, ShortReadError):
            return None  # merged and deleted meanwhile; or missing, which is said elsewhere
        return replace(one, size_bytes=hidden, is_sure=True) if hidden > 0 else None

    suspects = sorted(given_up(state), key=lambda one: one.bundle.key)
    looked = (executor.map if executor else map)(look, suspects)
    return [one for one in looked if one is not None]


def _history(
    store: ObjectStore,
    prefix: str,
    listed: list[ObjectInfo],
    old_ms: int,
    journal: JournalBytes | None,
) -> TierHistory:
    entries = [info for info in listed if info.key.startswith(prefix + JOURNAL)]
    if journal is None:
        return TierHistory(store, prefix, entries, old_ms)
    with journal.reading(store, entries) as ahead:
        return TierHistory(ahead, prefix, entries, old_ms)


def refused(reasons: list[str], where: str) -> Exception:
    """Nothing is deleted, and why."""
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    return DataError(
        f"nothing is deleted, since something is missing or strange: {reasons[0]}{more}",
        where=where,
        do="run `tiered verify --deep`",
    )


def _not_shown(store: ObjectStore, prefix: str, missing: set[str]) -> Iterator[str]:
    """What was named before the listing, and still is, and was not listed. That alone is reason enough.

    A store may find by its name what it lists under another, as a folder does that takes ``Orders`` and ``orders`` for
    one: then the listing shows, under a name that nobody named, the very objects that must stay. Likewise what lies behind
    a symbolic link that somebody has put into a tier's folder.
    """
    for key in sorted(missing)[:MISSING_LOOKED_AT]:
        if _is_gone(store, prefix + key):
            yield f"{prefix}{key} is named by the journal and is gone"
        else:
            yield (
                f"{prefix}{key} is named by the journal and can be read, but no listing shows it:"
                " a folder on its way may be a symbolic link, which no listing follows, or the store may take names"
                " for one that differ only in case"
            )


def _is_gone(store: ObjectStore, key: str) -> bool:
    try:
        store.head(key)
    except ObjectNotFoundError:
        return True
    return False


def _truly_missing(
    store: ObjectStore, prefix: str, history: TierHistory, missing: set[str]
) -> Iterator[str]:
    """What an entry names and is not there: what came behind the listing is, and what was unnamed meanwhile may go."""
    gone = [key for key in sorted(missing)[:MISSING_LOOKED_AT] if _is_gone(store, prefix + key)]
    if gone:
        history.follow()
        named = named_objects(history.state)
        for key in gone:
            if key in named:
                yield f"{prefix}{key} is named by the journal and is gone"


# --------------------------------------------------------------------------------------------------
# Old versions in a bucket that keeps them: whether what is deleted stays so, and erasing it for good.
#
# Overview: ``gc`` deletes objects, of which a bucket with versioning keeps every byte behind a marker. ``gc --erase``
# deletes what is left of keys that were deleted and that the journal does not name. What it names and somebody has
# deleted is not touched: its old version is how it comes back.
#
# Ordering: behind ``gc``'s own deletions, with its grace and its looks at the journal. Keys are never used twice, so
# what no entry names and was deleted is named by nobody ever again; the journal is read before the listing.
#
# After a crash: some versions are gone; the next run goes on.
# --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class OldVersions:
    """What there is of old versions."""

    versioning: str | None  # ``Enabled``, ``Suspended``, "" for none; None: nobody may tell
    versions: int | None = None
    """Old versions of deleted objects, markers not counted; None: it was not looked."""
    version_bytes: int | None = None  # their bytes; likewise
    was_deleted: bool = False  # they are gone for good

    def document(self) -> dict[str, Any]:
        """As it stands in the documents of commands."""
        return asdict(self)


def erasable(at: Workplace, bucket: Bucket) -> Iterator[StoredVersion]:
    """What is left of deleted objects that held messages or keys and are named by nobody."""
    named = named_objects(at.reader().state)
    for root in DATA_ROOTS:
        for one in bucket.of_deleted(at.prefix + root):
            key = one.key.removeprefix(at.prefix)
            if key not in named and maker_of(key) is not None:
                yield one


def look_for_versions(at: Workplace, bucket: Bucket, *, deletes: bool) -> OldVersions:
    """Count what can be erased, and delete it if told to."""
    found = OldVersions(bucket.status(), 0, 0, was_deleted=deletes)
    if not found.versioning:
        return found
    count = size = 0
    for one in erasable(at, bucket):
        if deletes:
            bucket.delete(one)
        count += not one.is_marker
        size += one.size_bytes
    found.versions, found.version_bytes = count, size
    return found


# --------------------------------------------------------------------------------------------------
# Erasing: bundles that share given-up messages with others are rewritten without them, as a plan of ``gc`` says.
#
# Overview: ``tiered.log.history`` finds such bundles, for any ``gc``; ``plan_erasure`` (``tiered.log.merge``) says
# what becomes of them; the merger makes it, and ``merge`` entries name it. From then on nobody names the old bundles,
# and a later ``gc`` deletes them after its grace, as it does all others: readers that are at work get to their end.
#
# Ordering: lease and epoch, since open segments are rewritten as well: so it refuses while a writer is alive. Then all
# that is presumed is looked at again, by the state under that epoch. Data before the entry (I2), a bundle at a time.
# Whoever expires beside it wins: what was rewritten meanwhile for nothing is rewritten again without it.
#
# Retries and errors: reads and uploads are tried again by the store, entries by the journal. A damaged bundle stays as
# it is, and is named.
#
# After a crash: each bundle is rewritten or not. What was made and not named is an orphan for ``gc``; the same plan
# goes on where it ended.
#
# Memory: one bundle (64 MiB), and what is read for it.
# --------------------------------------------------------------------------------------------------


POLICY: Final = MergePolicy(segment_bytes_max=0)
"""Segments stay what they are."""


def apply_erasure(
    at: Workplace, plan: GcPlan, *, told: Callable[[int, int], None] = lambda _done, _total: None
) -> dict[str, Any]:
    """Rewrite the bundles that a plan of ``gc`` names (``erasures``).

    Returns:
        ``bundles`` that were rewritten, and ``given_up_bytes``, about what nobody names in them; ``made`` and
        ``made_bytes``, what is named instead; ``already_done`` (by an earlier run, or a writer's merging); ``stays``, rows
        of ``key`` and ``reason``; ``gone_after_ms``, when a ``gc`` with the plan's grace may delete the old ones;
        ``was_applied``, ``epoch``, ``run``.

    Raises:
        InvalidError: The plan is of another tier.
        FencedError: A writer is at work.
    """
    ledger = Ledger(at, f"{plan.what} --erase")
    store_now_ms, began_s = ledger.begin(plan), at.clock.monotonic_s()
    run = _ErasureRun(at, plan, told)
    run.rewrite()
    ledger.end({**run.done, "stays": len(run.stays)})
    took_ms = round(1000 * (at.clock.monotonic_s() - began_s))
    return {
        **run.done,
        "stays": [{"key": key, "reason": reason} for key, reason in sorted(run.stays.items())],
        "gone_after_ms": store_now_ms + took_ms + plan.grace_ms,
        "was_applied": was_applied(
            len(plan.erasures), run.done["bundles"] + len(run.stays), run.done["already_done"]
        ),
        "epoch": run.epoch,
        "run": ledger.run,
    }


class _ErasureRun:
    def __init__(self, at: Workplace, plan: GcPlan, told: Callable[[int, int], None]) -> None:
        self._at = at
        self._plan = plan
        self._told = told
        self._epoch = UploadingEpoch(at, does="erases")
        self._bytes = {one.key.removeprefix(at.prefix): one.given_up_bytes for one in plan.erasures}
        self._left: set[str] = set()
        self.stays: dict[str, str] = {}
        names = ("bundles", "given_up_bytes", "made", "made_bytes", "already_done")
        self.done = dict.fromkeys(names, 0)

    @property
    def epoch(self) -> int:
        """The epoch under which it was done."""
        return self._epoch.journal.epoch

    def rewrite(self) -> None:
        """All that is planned and still named."""
        journal = self._epoch.journal
        try:
            uploader = self._epoch.uploader()
            require_same_tier(self._plan, journal.state)
            self._left = self._bytes.keys() & named_bundles(journal.state).keys()
            self.done["already_done"] = len(self._bytes) - len(self._left)
            packer = Packer(Compression()) if _is_packed(journal.state) else None
            merger = Merger(
                uploader, self._at.store, self._at.prefix, lambda _size: None, packer=packer
            )
            self._rewrite(merger)
            journal.write_checkpoint()
        finally:
            self._epoch.end()

    def _rewrite(self, merger: Merger) -> None:
        total, before = len(self._left), None
        while (plan := plan_erasure(self._epoch.journal.state, POLICY, self._left)) is not None:
            if plan == before:  # replay took nothing of it: it would be planned for ever
                self._leave(dict.fromkeys(_keys(plan), "the tier has moved on meanwhile"))
            before = plan
            for output in plan.outputs:
                if not _keys(plan) <= self._left or not self._make(merger, output):
                    break  # something is damaged: the others are planned anew, without it
            self._count(total)

    def _make(self, merger: Merger, output: MergeOutput) -> bool:
        """Make a bundle, and name it; False when something in it is damaged."""
        try:
            made = merger.make(output, self._renewed)
        except DataError as error:
            keys = {bundle.key for run in output.runs for bundle in run.parts.bundles}
            found = {key for key in keys if error.where == self._at.prefix + key} or keys
            self._leave(dict.fromkeys(found, error.what))
            return False
        assert made is not None
        self._epoch.journal.append([made.action()])
        self._epoch.journal.write_checkpoint()
        taken = _taken(self._epoch.journal.state, made)
        if taken:
            self.done["made"] += 1
            self.done["made_bytes"] += made.stored.bundle.size_bytes
        if 0 < taken < len(output.runs):  # the rest has expired since: it shall not stay in here
            self._bytes[made.stored.bundle.key] = 0
            self._left.add(made.stored.bundle.key)
        return True

    def _renewed(self) -> bool:
        """Never stops; the lease is prolonged on the way."""
        self._epoch.renew()
        return False

    def _leave(self, reasons: dict[str, str]) -> None:
        self.stays |= {self._at.prefix + key: reason for key, reason in reasons.items()}
        self._left -= reasons.keys()

    def _count(self, total: int) -> None:
        """Count what is named no more."""
        gone = self._left - named_bundles(self._epoch.journal.state).keys()
        self._left -= gone
        self.done["bundles"] += len(gone)
        self.done["given_up_bytes"] += sum(self._bytes[key] for key in gone)
        self._told(max(0, total - len(self._left)), total)


def _keys(plan: MergePlan) -> set[str]:
    return {bundle.key for bundle in plan.bundles}


def _is_packed(state: TierState) -> bool:
    """Whether anything in the tier is compressed: then its writers compress what is of the last level, and so do we."""
    tables = (parts.rows for one in state.placed() for parts in one.incarnation.tables())
    return any(bool((rows["stored_bytes"] < rows["records_bytes"]).any()) for rows in tables)


def _taken(state: TierState, made: MergedBundle) -> int:
    """Of how many sections of a bundle replay has made parts."""
    key, queues = made.stored.bundle.key, {run.queue for run in made.output.runs}
    incarnations = (incarnation for queue in queues for incarnation in state.queues.get(queue, ()))
    return sum(
        bundle.key == key for incarnation in incarnations for bundle in incarnation.parts().bundles
    )
