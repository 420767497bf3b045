"""Verification of one broker's tier: journal, listing, and, if asked to, every byte and a local store.

How to use it::

    report = verify_tier(store, prefix, deep=True, local=None, executor=pool, progress=print)
    report.is_clean, report.problems, report.recorded, report.comparison

Ordering: the journal is replayed before and after the listing, so that the work of a living writer or collector meanwhile
is not taken for damage: missing is what is named before and after and not listed; orphaned what is listed and named at
neither time.

What is in objects is checked by ``tiered.log.verify_objects``; what was found is ``tiered.log.verify_objects``.

Memory: the state, and for each of ``in_flight_max`` steps one bundle (or a batch of tier and local store).
"""

from __future__ import annotations

import contextlib
import re
from collections import deque
from dataclasses import field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from backends.base import ObjectInfo, foreign_below
from backends.errors import BackendError, ObjectNotFoundError
from backends.lazy_dataclass import dataclass
from tiered import keys
from tiered.errors import (
    DataError,
    InvalidError,
    JournalLostError,
    OtherVersionError,
    TieredStoreError,
)
from tiered.format.heads import is_same_batch
from tiered.journal.entry import EPOCH, checksum, decode_entry
from tiered.journal.lease import read_lease
from tiered.journal.replay import CHECKPOINTS_KEPT, JournalReader, replay_starts
from tiered.keys import JOURNAL, LEASE, checkpoint_key, entry_key
from tiered.local.interface import HoleReason
from tiered.log.broker_tables import HANDOVER, is_handed_over, read_handover
from tiered.log.history import named_objects, parts_by_bundle
from tiered.log.reader import READ_BYTES, QueueReader, TierReader
from tiered.log.rebuilt_state import REBUILT_STRIDE
from tiered.log.state import Gap, TierMachine
from tiered.log.timers import FACTS, kept_facts
from tiered.log.verify_objects import (
    OTHER_VERSION,
    BundleCheck,
    Finding,
    IndexCheck,
    Problem,
    StoreComparison,
    VerifyReport,
    check_indexes,
    check_quarantined,
    check_state,
    unindexed_messages,
)
from tiered.model import QueueBounds, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from collections.abc import Set as AbstractSet
    from concurrent.futures import Executor, Future

    import numpy.typing as npt

    from backends.base import ObjectStore
    from tiered.journal.entry import Entry
    from tiered.local.interface import LocalStore, RecordBatch
    from tiered.log.state import TierState

IN_FLIGHT_MAX = 4


def require_same_id(state: TierState, local: LocalStore) -> None:
    """Refuse to hold a tier against another store than its own: what only one of them has would be no difference."""
    known, mine = state.store.get("store_id"), local.identity.store_id
    if known and mine and known != mine:
        raise InvalidError(
            f"this tier belongs to another store (id {known}); this one has id {mine}",
            do="give the store that the tier was made from",
        )


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
        deep: Read and check every object; else only journal, listing and state.
        local: Also compare with this local store, message by message (``refresh`` is called).
        executor: Runs the steps of a deep run and of a comparison; None: they run here, one after another.
        progress: Told ``(done_bytes, total_bytes)`` after each step, on the calling thread.
        in_flight_max: Steps at once; bounds the memory.

    Raises:
        JournalLostError: The journal is gone, or has lost its end (other damage is not an error here).
    """
    run = _VerifyRun(store, prefix)
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


class _VerifyRun:
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
            record_listing(listing, now_named, self._reader.state.epoch, self.report)
        for problem in (*check_state(state), *check_indexes(state)):
            self.report.add(problem)
        self._count(state, listing)
        if listing.has_lease:
            self.take(check_lease(self._store, self._prefix))
        self.take(check_meta(self._store, self._prefix, state, has_facts=listing.has_facts))
        if not deep:
            return []
        self.take(check_journal(self._store, self._prefix, listing.entries, listing.checkpoints))
        self.take(check_mirrors(self._store, self._prefix, listing.mirrors))
        return [
            *self._bundle_steps(state, listing.missing),
            *self._index_steps(state, listing.missing),
            *self._quarantine_steps(listing),
            *self._mount_steps(listing),
        ]

    def comparisons(self, local: LocalStore) -> list[_Step]:
        """Steps that compare queues; queues that only one side has are counted here."""
        require_same_id(self._reader.state, local)
        local.refresh()
        theirs = local.queues()
        count = StoreComparison()
        steps: list[_Step] = []
        for queue, incarnations in self._reader.state.queues.items():
            if queue in theirs:
                tier = QueueReader.of_incarnation(
                    self._store, self._prefix, queue, incarnations[-1]
                )
                comparison = QueueComparison(tier, local, theirs[queue])
                size = incarnations[-1].parts().log_bytes
                steps.append(_Step(comparison.run, size))
            else:
                count.expired_messages += int(incarnations[-1].parts().column("count").sum())
        for queue, bounds in theirs.items():
            if queue not in self._reader.state.queues:
                count.lag_messages += bounds.end - bounds.min
        found, waiting = Finding(comparison=count), local.waiting()
        count.waiting_records = waiting.records
        if waiting.is_behind_damage:
            detail = f"{waiting.records} records are not compared: {waiting.reason}"
            found.problem("unreadable", "local store", detail)
        self.take(found)
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

    def _count(self, state: TierState, listing: ObjectListing) -> None:
        report, recorded = self.report, self.report.recorded
        report.journal_number = self._reader.journal_number
        report.queues = len(state.queues)
        recorded.refused_parts = state.refused_parts
        recorded.quarantined = len(listing.quarantine)
        recorded.unindexed_messages = unindexed_messages(state)
        named = named_objects(state)
        report.named_objects, report.named_bytes = len(named), sum(named.values())
        for queue, _, incarnation, truncated in state.placed():
            if truncated:
                recorded.truncated += 1
                recorded.truncated_messages += incarnation.commit_offset - incarnation.min_offset
            elif incarnation is not state.queues[queue][-1]:
                recorded.ended_incarnations += 1
            recorded.gaps += len(incarnation.gaps)
            recorded.gap_messages += sum(gap.end - gap.start for gap in incarnation.gaps)
            parts = incarnation.parts()
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

    def _mount_steps(self, listing: ObjectListing) -> Iterator[_Step]:
        for key in listing.mounts:
            yield _Step(partial(check_mount_entry, self._store, self._prefix, key), 0)

    def _quarantine_steps(self, listing: ObjectListing) -> Iterator[_Step]:
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


# --------------------------------------------------------------------------------------------------
# Holds one listing of a broker's prefix against what the journal names.
# --------------------------------------------------------------------------------------------------

_OTHERS = ("timer/", "meta/", "ledger/")
"""Folders of other features; not this module's business."""


@dataclass(slots=True)
class ObjectListing:
    """What a listing shows besides the named objects."""

    missing: set[str] = field(default_factory=set)  # Keys that are named and not listed
    unnamed: dict[str, int] = field(default_factory=dict)
    """Bundles and index objects that are listed and not named, with their sizes."""
    quarantine: dict[str, int] = field(default_factory=dict)
    """Damaged records that were put aside, with their sizes."""
    entries: list[int] = field(default_factory=list)  # numbers of journal entries
    checkpoints: list[int] = field(default_factory=list)  # numbers of checkpoints
    has_lease: bool = False  # there is a lease
    has_facts: bool = False  # there is a copy of what is known of timers
    mirrors: list[int] = field(default_factory=list)
    """Numbers of checkpoints of which there is a second copy."""
    mounts: list[str] = field(default_factory=list)
    """Entries in which mounts keep the offsets of groups."""
    unknown: list[str] = field(default_factory=list)
    """Keys that this program does not know, and names that are no keys."""


def compare_listing(
    store: ObjectStore, prefix: str, named: Mapping[str, int], report: VerifyReport
) -> ObjectListing:
    """List everything below ``prefix``; wrong sizes go into the report."""
    found = ObjectListing()
    listed: set[str] = set()
    for info in store.list(prefix):
        key = info.key[len(prefix) :]
        size = named.get(key)
        if size is None:
            _sort(found, prefix, key, info)
            continue
        listed.add(key)
        if info.size_bytes != size:
            detail = f"{info.size_bytes} bytes; the journal says {size}"
            report.add(Problem("size", info.key, detail))
    found.unknown += [name[len(prefix) :] for name in foreign_below(store, prefix)]
    found.missing = named.keys() - listed
    return found


def is_known_key(prefix: str, key: str) -> bool:
    """Whether an object of a tier, or of a feature of ours, may have this whole key."""
    found = ObjectListing()
    _sort(found, prefix, key[len(prefix) :], ObjectInfo(key, 0, -1))
    return not found.unknown


def _sort(found: ObjectListing, prefix: str, key: str, info: ObjectInfo) -> None:
    number = keys.parse_journal_key(prefix, info.key)
    data = keys.parse_data_key("", key)
    if number:
        (found.checkpoints if number[1] else found.entries).append(number[0])
    elif data:
        place = found.quarantine if data.kind == "quarantine" else found.unnamed
        place[key] = info.size_bytes
    elif keys.parse_index_key("", key):
        found.unnamed[key] = info.size_bytes
    elif key == keys.LEASE:
        found.has_lease = True
    elif key == FACTS:
        found.has_facts = True
    elif mirror := keys.parse_journal_key(keys.MIRROR, key):
        found.mirrors.append(mirror[0])
    elif key.startswith(keys.MOUNT) and _MOUNT_ENTRY.search(key):
        found.mounts.append(key)
    elif not key.startswith(_OTHERS):
        found.unknown.append(key)


def record_listing(
    found: ObjectListing, named: AbstractSet[str], epoch: int, report: VerifyReport
) -> None:
    """Count what is not a failure, and name what the journal has never heard of."""
    recorded = report.recorded
    for key, size in found.unnamed.items():
        made = keys.maker_of(key)
        if key in named or made is None:
            continue
        recorded.orphans += 1
        recorded.orphan_bytes += size
        recorded.orphans_of_present_epoch += made.epoch == epoch
        recorded.note(f"orphan: {key}")
        if made.epoch > epoch:
            detail = f"of epoch {made.epoch}, and the present one is {epoch}: the journal may have lost its end"
            report.add(Problem("journal", key, detail))
    recorded.unknown_keys = len(found.unknown)
    for key in found.unknown:
        recorded.note(f"unknown: {key}")


# --------------------------------------------------------------------------------------------------
# Reads every entry and checkpoint that a journal still has, also those that readers jump over. An entry below the
# point to which the journal was trimmed is *stale*: left by a trimming that was cut short, or landed late, from a
# writer that was fenced long ago, under a number that had been used and deleted. Each is held against its own
# checksum; what it follows means nothing any more, since every reader begins behind it. So it is recorded, and no
# problem. Where a trimming that was cut short has left a checkpoint behind, one that landed late may even follow that
# checkpoint, and yet not be what the next entry follows: it is stale as well when a whole checkpoint stands behind the
# break.
# --------------------------------------------------------------------------------------------------


def check_journal(
    store: ObjectStore, prefix: str, entries: Iterable[int], checkpoints: Iterable[int]
) -> Finding:
    """Check entries (checksum, number, what each follows) and checkpoints (and that replay gives the same state)."""
    return _JournalCheck(store, prefix).run(sorted(entries), sorted(checkpoints))


_NOT_NEEDED = "; readers begin at a checkpoint behind it, and it goes when the journal is trimmed"


class _JournalCheck:
    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._machine = TierMachine()
        self._reader = JournalReader(store, prefix, self._machine)
        self._knows = True  # the reader's state is that after entry `number`
        self._trimmed = 0  # entries below this number are stale
        self._is_untrimmed = (
            False  # the first entry is there, and fewer checkpoints than trimming leaves
        )
        self._checkpoints: list[int] = []
        self._row: list[Entry] = []  # entries just behind a missing or stale one
        self._found = Finding()

    def run(self, entries: list[int], checkpoints: list[int]) -> Finding:
        start = self._rebuilt(checkpoints)  # what lies before it means nothing any more
        steps = sorted([(n, False) for n in entries] + [(n, True) for n in checkpoints])
        steps = [step for step in steps if step[0] >= start]
        there = [n for n in entries if n >= start]
        self._is_untrimmed = there[:1] == [start + 1] and (
            len([n for n in checkpoints if n >= start]) < CHECKPOINTS_KEPT
        )
        self._trimmed = self._trimmed_to(there, checkpoints)
        self._checkpoints = checkpoints
        if self._is_untrimmed:
            self._look_for_missing(there)
        for number, is_checkpoint in steps:
            check = self._checkpoint if is_checkpoint else self._entry
            key = (checkpoint_key if is_checkpoint else entry_key)(self._prefix, number)
            try:
                check(number)
            except (TieredStoreError, BackendError) as error:
                detail = str(error)
                kind = OTHER_VERSION if isinstance(error, OtherVersionError) else "journal"
                if not is_checkpoint and any(self._is_whole(n) for n in checkpoints if n >= number):
                    detail += _NOT_NEEDED
                self._found.problem(kind, key, detail)
                self._knows = self._knows and is_checkpoint
        return self._found

    def _rebuilt(self, checkpoints: list[int]) -> int:
        """Number of the newest whole checkpoint at which the journal was rebuilt; 0 when it never was."""
        for number in reversed(checkpoints):
            if number % REBUILT_STRIDE == 0 and self._is_whole(number):
                return number
        return 0

    def _trimmed_to(self, entries: list[int], checkpoints: list[int]) -> int:
        """Number of the oldest whole checkpoint from which replay gets to the head, when none gets there from entry 1."""
        starts = replay_starts(entries, checkpoints)
        if self._is_untrimmed or not entries or 0 in starts or not starts:
            return 0
        if entries[0] >= starts[0]:
            return 0
        return next((number for number in starts if self._is_whole(number)), 0)

    def _look_for_missing(self, entries: list[int]) -> None:
        """Name the entries that are gone though nothing was trimmed."""
        for before, number in pairwise(entries):
            # What came while the journal was listed is there.
            if number > before + 1 and self._reader.read_entry(before + 1) is None:
                key = entry_key(self._prefix, before + 1)
                self._found.problem("journal", key, f"missing, as all up to entry {number}")

    def _is_whole(self, number: int) -> bool:
        with contextlib.suppress(TieredStoreError, BackendError):
            return self._reader.read_checkpoint(number) is not None
        return False

    def _entry(self, number: int) -> None:
        found = self._reader.read_entry(number)
        if found is None:
            return  # deleted since it was listed
        self._found.object_count += 1
        self._found.object_bytes += len(found[1])
        if number < self._trimmed:
            self._found.stale_entries.append(entry_key(self._prefix, number))
            return
        follows = number == self._reader.number + 1
        is_stale = follows and self._is_behind_a_stale_one(found[0])
        self._row = [*self._row[-2:], found[0]] if follows and not is_stale else [found[0]]
        if is_stale:
            self._found.stale_entries.append(entry_key(self._prefix, number - 1))
        elif self._knows and follows:
            self._reader.apply(*found)
            return
        elif follows and self._reader.last and found[0].previous != self._reader.last:
            key = entry_key(self._prefix, number)
            self._found.problem("journal", key, f"it is not the successor of entry {number - 1}")
        self._knows = False
        self._reader.number, self._reader.last = number, checksum(found[1])

    def _is_behind_a_stale_one(self, entry: Entry) -> bool:
        """Whether the entry before this one landed late, under a number that had been used and deleted.

        Those below it are gone, then, and it is of no newer epoch (a guest's entry, of 0, says nothing of epochs); or some
        are still there, and it is of another writer, though this entry does not begin an epoch.
        """
        if entry.previous == self._reader.last or not self._row:
            return False
        before = self._row[-1]
        is_alone = len(self._row) == 1 and (not entry.epoch or before.epoch <= entry.epoch)
        begins = any(action["do"] == EPOCH for action in entry.actions)
        have_epochs = before.epoch and entry.epoch  # and not guests'
        # Of two who took the same epoch only one has won; an epoch that was lost may be the newer one of the two.
        own = entry.epoch, entry.writer
        is_anothers = have_epochs and not begins and (before.epoch, before.writer) != own
        behind = [number for number in self._checkpoints if number >= entry.number]
        return bool(is_alone or is_anothers) and any(map(self._is_whole, behind))

    def _is_vouched_for(self, number: int, last: int) -> bool:
        """Whether a checkpoint is what the next entry follows, so that the lone entry with its number landed late."""
        following = self._reader.read_entry(number + 1) if len(self._row) == 1 else None
        return following is not None and following[0].previous == last

    def _checkpoint(self, number: int) -> None:
        found = self._reader.read_checkpoint(number)
        if found is None:
            return
        self._found.object_count += 1
        state, last = found
        key = checkpoint_key(self._prefix, number)
        if number == self._reader.number and last != self._reader.last:
            if self._is_vouched_for(number, last):
                self._found.stale_entries.append(entry_key(self._prefix, number))
            else:
                self._found.problem("journal", key, "it is not of the entry with its number")
        elif number == self._reader.number and self._knows and state != self._reader.state:
            self._found.problem("journal", key, "replay gives another state")
        self._reader.state, self._reader.number, self._reader.last = state, number, last
        self._knows = True
        self._row = []  # it vouches for what is before it


def check_lease(store: ObjectStore, prefix: str) -> Finding:
    """Whether the lease, if there is one, can be read."""
    found = Finding()
    try:
        present, version = read_lease(store, prefix + LEASE)
    except (TieredStoreError, BackendError) as error:
        kind = OTHER_VERSION if isinstance(error, OtherVersionError) else "lease"
        found.problem(kind, prefix + LEASE, str(error))
        return found
    if present is None and version is not None:
        found.problem("lease", prefix + LEASE, "it cannot be read; a writer will take it")
    return found


def check_meta(store: ObjectStore, prefix: str, state: TierState, *, has_facts: bool) -> Finding:
    """Whether what lies beside the journal can be read: what a broker knew, and the copy of what is known of timers.

    Nobody needs either until the broker is gone, or the journal; by then it is too late to hear that they are damaged.
    """
    found = Finding()
    looks: list[tuple[str, Callable[[], object], str]] = []
    if is_handed_over(state.store):
        key = str(state.store[HANDOVER]["key"])
        looks.append((key, lambda: read_handover(store, prefix, state.store), _LOST_HANDOVER))
    if has_facts or any(hour.end for hour in state.timers.hours.values()):
        looks.append((FACTS, lambda: _facts(store, prefix), _LOST_FACTS))
    for key, look, lost in looks:
        try:
            look()
        except OtherVersionError as error:
            found.problem(OTHER_VERSION, prefix + key, str(error))
        except ObjectNotFoundError:
            found.problem("missing", prefix + key, f"it is gone; {lost}")
        except DataError:
            found.problem("meta", prefix + key, f"it cannot be read; {lost}")
    return found


def check_mirrors(store: ObjectStore, prefix: str, numbers: Iterable[int]) -> Finding:
    """Whether second copies of checkpoints can be read; one that is gone meanwhile was trimmed."""
    found, reader = Finding(), JournalReader(store, prefix + keys.MIRROR, TierMachine())
    for number in numbers:
        key = checkpoint_key(prefix + keys.MIRROR, number)
        try:
            found.object_count += reader.read_checkpoint(number) is not None
        except OtherVersionError as error:
            found.problem(OTHER_VERSION, key, str(error))
        except DataError:
            found.problem("meta", key, f"it cannot be read; {_LOST_MIRROR}")
    return found


def check_mount_entry(store: ObjectStore, prefix: str, key: str) -> Finding:
    """Whether an entry can be read in which a mount keeps the offsets of groups; one that is gone meanwhile was trimmed."""
    found = Finding()
    try:
        decode_entry(store.get(prefix + key), where=prefix + key)
    except OtherVersionError as error:
        found.problem(OTHER_VERSION, prefix + key, str(error))
    except DataError as error:
        found.problem("meta", prefix + key, f"offsets of consumer groups are damaged: {error.what}")
    except ObjectNotFoundError:
        pass
    return found


_MOUNT_ENTRY = re.compile(rf"/{JOURNAL}\d+$")
_LOST_HANDOVER = "topics, groups and offsets of the broker that is gone are in it alone: bring it back from a copy"
_LOST_MIRROR = "a journal that is lost is rebuilt without it, from an older one; the next checkpoint has its own"
_LOST_FACTS = "a rebuilt journal forgets without it what was handed over; the next import, run or cancel writes it anew"


def _facts(store: ObjectStore, prefix: str) -> None:
    """Raises what keeps the copy from being used."""
    if kept_facts(store, prefix) is None:
        store.head(prefix + FACTS)
        raise DataError("the copy of what is known of timers is damaged", where=prefix + FACTS)


# --------------------------------------------------------------------------------------------------
# Holds the tier against a local store, message by message, bytes equal. One step a queue.
# --------------------------------------------------------------------------------------------------

LISTED_MAX = 100
"""So many differences of one queue are named; one more says how many there are."""


class QueueComparison:
    """The comparison of one queue. Holds one batch of each side in memory."""

    def __init__(self, tier: QueueReader, local: LocalStore, bounds: QueueBounds) -> None:
        self._tier = tier
        self._local = local
        self._bounds = bounds
        self._count = StoreComparison(queues=1)
        self._found = Finding(comparison=self._count)
        self._differences = 0

    def run(self) -> Finding:
        """Compare what both have."""
        incarnation, bounds, count = self._tier.incarnation, self._bounds, self._count
        low, high = incarnation.min_offset, incarnation.commit_offset
        count.lag_messages = max(0, bounds.end - max(high, bounds.min))
        count.skipped_messages = max(0, min(low, bounds.end) - bounds.min)
        count.expired_messages = max(0, min(bounds.min, high) - low)
        count.ahead_messages = max(0, high - max(bounds.end, low))
        at, end = max(low, bounds.min), min(high, bounds.end)
        while at < end:
            at = self._from(at, end)
        if self._differences > LISTED_MAX:
            self._report(f"{self._differences - LISTED_MAX} more differences")
        return self._found

    def _from(self, at: QueueOffset, end: QueueOffset) -> QueueOffset:
        """Compare from ``at`` on; where to go on."""
        try:
            found = self._tier.read(at)
        except (TieredStoreError, BackendError) as error:
            self._found.problem("unreadable", str(self._tier.queue), f"from {at}: {error}")
            parts = self._tier.incarnation.parts()
            return next((part.queue_end for part in parts if part.queue_end > at), end)
        if found is None:
            return end
        if isinstance(found, Gap):
            self._count.skipped_messages += min(found.end, end) - at
            return found.end
        try:
            self._batch(found.records, at, QueueOffset(min(found.records.end_offset, end)))
        except TieredStoreError as error:
            where = f"local {self._tier.queue}"
            self._found.problem("unreadable", where, f"from {at}: {error}")
        return found.records.end_offset

    def _batch(self, tier: RecordBatch, at: QueueOffset, end: QueueOffset) -> None:
        while at < end:
            local = self._local.read(
                tier.queue, at, bytes_max=READ_BYTES, count_max=max(1, end - at)
            )
            if local is None or local.base_offset >= end:  # expired or truncated meanwhile
                self._count.expired_messages += end - at
                return
            self._count.expired_messages += max(0, local.base_offset - at)
            at = max(at, local.base_offset)
            stop = QueueOffset(min(local.end_offset, end))
            self._compare(
                _View(tier, at - tier.base_offset, stop - tier.base_offset),
                _View(local, at - local.base_offset, stop - local.base_offset),
                at,
            )
            at = stop

    def _compare(self, tier: _View, local: _View, at: QueueOffset) -> None:
        self._count.messages += len(tier.sizes)
        self._count.record_bytes += tier.span_bytes
        if tier.same_as(local):
            return
        compacted = tier.compacted | local.compacted
        self._count.compacted_messages += int(np.count_nonzero(compacted))
        places: tuple[object, object] = (None, None)
        what = ""
        for number in np.flatnonzero(~compacted).tolist():
            here = tier.place(number), local.place(number)
            if here != places:  # else it is another item of the same two records
                places, what = here, self._difference(tier, local, number)
            if what:
                self._differences += 1
                if self._differences <= LISTED_MAX:
                    self._report(f"queue offset {at + number}: {what}")

    @staticmethod
    def _difference(tier: _View, local: _View, number: int) -> str:
        """What is different in the records of an item; a batch that Kafka's cleaner has made smaller since is the same."""
        ours, theirs = tier.record(number), local.record(number)
        what = _difference(ours, theirs)
        is_same = what and is_same_batch(tier.kind, ours.tobytes(), theirs.tobytes())
        return "" if is_same else what

    def _report(self, detail: str) -> None:
        self._found.problem("difference", str(self._tier.queue), detail)


class _View:
    """Items ``[start, end)`` of a batch, as arrays."""

    def __init__(self, batch: RecordBatch, start: int, end: int) -> None:
        self.kind = batch.kind
        self.sizes = batch.sizes[start:end].astype(np.int64)
        self.compacted = (self.sizes == 0) & (batch.tag_codes[start:end] == HoleReason.COMPACTED)
        self._positions = batch.positions[start:end]
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(memoryview(batch.data), np.uint8)
        real = self.sizes > 0
        starts = self._positions[real]
        self._low = int(starts.min()) if len(starts) else 0
        high = int((starts + self.sizes[real]).max()) if len(starts) else 0
        self._relative = starts - self._low
        self._span = self._bytes[self._low : high]

    @property
    def span_bytes(self) -> int:
        return len(self._span)

    def same_as(self, other: _View) -> bool:
        """All sizes, the layout and all bytes are equal: true of nearly every batch, at memory speed."""
        return (
            np.array_equal(self.sizes, other.sizes)
            and np.array_equal(self._relative, other._relative)
            and np.array_equal(self._span, other._span)
        )

    def place(self, number: int) -> tuple[int, int]:
        """Where the record of an item lies; items of one record have the same."""
        return int(self._positions[number]), int(self.sizes[number])

    def record(self, number: int) -> npt.NDArray[np.uint8]:
        start = int(self._positions[number])
        return self._bytes[start : start + int(self.sizes[number])]


def _difference(tier: npt.NDArray[np.uint8], local: npt.NDArray[np.uint8]) -> str:
    """What differs between two records; empty when nothing does."""
    if len(tier) != len(local):
        if not len(tier) or not len(local):
            return "a hole in the tier" if not len(tier) else "a hole in the local store"
        return f"{len(tier)} bytes in the tier, {len(local)} in the local store"
    unequal = np.flatnonzero(tier != local)
    if not len(unequal):
        return ""
    return f"{len(unequal)} bytes differ, the first at byte {int(unequal[0])} of the record"
