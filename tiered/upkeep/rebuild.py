"""Rebuild: a lost or damaged journal, or a key index, again from what objects say of themselves. Plan, then apply.

Overview: ``plan_rebuild`` reads the journal as far as it goes, or goes on from the newest second copy of a checkpoint
(``tiered.journal.append``) when that reaches further. It lists all objects, reads every bundle's table, and lets
``tiered.log.rebuilt_state`` propose a state: what is known, and what is newer. Where neither is left, all is guessed from
the bundles, and the plan's notes say so. ``apply_rebuild`` makes that state the tier's: an epoch's entry and its
checkpoint, with a number beyond every one that can have been used (the next multiple of ``REBUILT_STRIDE``).

Ordering: lease; the epoch's entry, which fences; a listing, which must be the plan's; the checkpoint; the replay that shows
it. For the plan: the listing, then the journal, so that what lands in between makes the plan one that is not carried out.

Why this supersedes what is there: readers jump to the newest checkpoint, so whatever lies before it, damaged, missing or
whole, is not read again. A writer of the old history that wins a number of its own, which is smaller, lists behind it. It
finds the epoch's entry, and is fenced; or it was faster, and then its entry is in the listing, and nothing is replaced: plan
again. Nothing is deleted or overwritten.

Why an old copy brings nothing back that was given up: it is the state after a beginning of the journal, just as what can be
read of a damaged one is, and is believed as far: objects that are gone are no history, what is newer counts over it, and
whole entries behind it are replayed. It knows all that had expired, was truncated or erased by then; of what came later,
and of which no entry is left, only what no ``gc`` has deleted yet can be there again, as without it. A copy of another
history than the one that the journal's beginning or the lease tells of (a tier that was begun anew) is not believed.

Retries and errors: the store's, and the journal's for entry and checkpoint.

After a crash: the checkpoint is there, and the rebuild is done; or there is at most the epoch's entry, and the journal is as
unreadable as it was: plan again.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field, replace
from functools import partial
from itertools import starmap
from typing import TYPE_CHECKING, Any

from backends.errors import ObjectNotFoundError
from backends.lazy_dataclass import dataclass, picked
from tiered import keys
from tiered.api.broker_place import require_conditional_writes
from tiered.errors import (
    DataError,
    FencedError,
    InvalidError,
    JournalLostError,
    OtherVersionError,
)
from tiered.format.record_kind import RecordKind
from tiered.index.indexer import IndexBuilder, Indexer
from tiered.journal.entry import EPOCH, INT_MAX, as_document, document_of
from tiered.journal.lease import JournalEnd, read_lease
from tiered.journal.replay import JournalReader
from tiered.keys import (
    JOURNAL,
    LEASE,
    MIRROR,
    OFFSET_DIGITS,
    entry_key,
    parse_data_key,
    parse_handover_key,
    parse_index_key,
    parse_journal_key,
)
from tiered.log.actions import Indexed
from tiered.log.broker_tables import HANDOVER, found_handover, read_handover
from tiered.log.bundles import Refused, Tabled, read_tables
from tiered.log.history import named_bundles
from tiered.log.lineage import found_in, moved
from tiered.log.reader import DAMAGED_OR_GONE, QueueReader
from tiered.log.rebuilt_state import (
    REBUILT_STRIDE,
    Loss,
    RebuiltState,
    ends_behind,
    expired_behind,
    not_found,
    propose,
)
from tiered.log.sections import read_range
from tiered.log.state import TierMachine, TierState, after_index, index_action, require_known
from tiered.log.timers import TIMER_TOPIC, kept_facts, mended_facts
from tiered.log.verify_objects import OTHER_VERSION, IndexCheck, check_state, unindexed_messages
from tiered.upkeep.workplace import (
    Anew,
    TierPlan,
    in_new_epoch,
    load_plan,
    moved_on,
    plan_head,
    require_same_tier,
    save_plan,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Executor

    from backends.base import ObjectInfo, ObjectStore
    from tiered.api.broker_place import Place
    from tiered.journal.append import JournalWriter
    from tiered.journal.entry import Action, Entry
    from tiered.log.parts import Incarnation, IndexObject, LineageFacts, SectionRange, TierState
    from tiered.log.rebuilt_state import IncarnationKey
    from tiered.model import QueueOffset
    from tiered.upkeep.workplace import Workplace

Listed = dict[str, list[Any]]
ROCKETMQ = "rocketmq"
"""Whose records do not tell where they come from."""
_NUMBER_END = 10**OFFSET_DIGITS


@dataclass(frozen=True, slots=True)
class RebuildPlan:
    """What is to become of a journal."""

    damage: str  # why the journal can't be read; empty when it can, and there is nothing to do
    number: int  # of the checkpoint to be written
    listing: Listed
    """Of each folder but the lease how many objects it has, and a fingerprint of their keys and sizes."""
    rebuilt: RebuiltState  # the new state, of the new epoch, and what is to be said of it
    refused: list[Refused] = field(default_factory=list)
    """Bundles whose own table is of no use, or of which only entries tell."""
    objects: int = 0  # bundles read

    @property
    def unread(self) -> list[Refused]:
        """Those of which the proposed state has nothing."""
        named = named_bundles(self.rebuilt.state)
        return [one for one in self.refused if one.key not in named]


@dataclass(slots=True)
class _Listing:
    """All objects of a broker, but the lease."""

    data: list[ObjectInfo] = field(default_factory=list)
    quarantined: set[tuple[IncarnationKey, int]] = field(default_factory=set)
    numbers: set[int] = field(default_factory=set)
    epochs: set[int] = field(default_factory=set)
    meta: list[ObjectInfo] = field(default_factory=list)
    indexes: int = 0
    unknown: list[str] = field(default_factory=list)
    folders: Listed = field(default_factory=dict)


def list_all(store: ObjectStore, prefix: str, without: str = "") -> _Listing:
    """One listing, sorted by what objects are; but for the lease, the key ``without``, and what has a journal of its own."""
    found, apart = _Listing(), (prefix + keys.TIMER, prefix + keys.MOUNT)
    digests: dict[str, Any] = defaultdict(hashlib.sha256)
    counts: Counter[str] = Counter()
    for info in store.list(prefix):
        if info.key in {prefix + LEASE, without} or info.key.startswith(apart):
            continue
        folder = info.key[len(prefix) :].partition("/")[0]
        line = f"{info.size_bytes} {info.key}\n"
        digests[folder].update(line.encode("utf-8", "surrogateescape"))
        counts[folder] += 1
        data = parse_data_key(prefix, info.key)
        number = parse_journal_key(prefix, info.key) or parse_journal_key(prefix + MIRROR, info.key)
        if number:
            found.numbers.add(number[0])
        elif data and data.kind == "quarantine" and data.queue:
            found.quarantined.add(((data.queue, data.incarnation), data.begins))
            found.epochs.add(data.object_id.epoch)
        elif data:
            found.data.append(info)
            found.epochs.add(data.object_id.epoch)
        elif left := parse_handover_key(prefix, info.key):
            found.meta.append(info)
            found.epochs.add(left[1].epoch)  # what comes has to be newer
        elif index := parse_index_key(prefix, info.key):
            found.indexes += 1
            found.epochs.add(index.epoch)
        elif info.key[len(prefix) :].startswith(keys.DATA_ROOTS):
            found.unknown.append(info.key[len(prefix) :])
    found.folders = {name: [counts[name], digests[name].hexdigest()] for name in digests}
    return found


def plan_rebuild(
    store: ObjectStore,
    prefix: str,
    executor: Executor,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> RebuildPlan:
    """See what a journal could be rebuilt to. Writes nothing.

    Raises:
        DataError: There is a journal key whose number leaves no room for another.
    """
    listing = list_all(store, prefix)
    lease, _ = read_lease(store, prefix + LEASE)
    remembered = lease.end if lease else JournalEnd()
    reader, damage = _read_journal(store, prefix)
    note = _go_on_from_mirror(reader, store, prefix, remembered.history) if damage else ""
    numbers = [reader.number, remembered.number, *listing.numbers]
    number = (max(numbers) // REBUILT_STRIDE + 1) * REBUILT_STRIDE
    if number >= _NUMBER_END:
        raise DataError(
            f"a journal key has the number {max(numbers)}, which no writer can have made",
            where=prefix,
            do="delete that object, and rebuild then",
        )
    if not damage:
        return RebuildPlan("", number, listing.folders, RebuiltState(reader.state))
    tabled, refused = _tables(store, prefix, listing, executor, progress)

    def read(want: SectionRange) -> memoryview:
        return read_range(store, prefix, want)

    history = reader.state.history or remembered.history
    behind = _whole_entries_behind(reader, prefix, listing)
    rebuilt = propose(
        tabled,
        replace(reader.state, history=history),
        sizes={info.key[len(prefix) :]: info.size_bytes for info in listing.data},
        quarantined=Counter(incarnation for incarnation, _ in listing.quarantined),
        read=read,
        epochs=[
            *listing.epochs,
            remembered.epoch,
            *_epochs_of(behind),
        ],
        behind=behind,
    )
    state = replace(rebuilt.state, epoch=rebuilt.state.epoch + 1)
    state = _with_handover(store, listing.meta, prefix, state, rebuilt.notes)
    state = _with_lineage(store, prefix, reader.state, state)
    rebuilt.state = _with_timers(store, prefix, reader, state, rebuilt.notes)
    rebuilt.notes += [note] if note else []
    rebuilt.notes += [f"{one.bundle.key}: {one.salvaged}" for one in tabled if one.salvaged]
    if listing.indexes:
        rebuilt.notes.append(
            f"the key index ({listing.indexes} objects) is given up; the next writer makes it again"
        )
    ends, lows = ends_behind(reader.state, behind), expired_behind(reader.state, behind)
    refused += starmap(Refused, not_found(state, ends, lows))
    if not any(rebuilt.parts()):
        refused += [
            Refused(key, "its key is of no form that is known here") for key in listing.unknown
        ]
    return RebuildPlan(damage, number, listing.folders, rebuilt, refused, len(listing.data))


def _tables(
    store: ObjectStore,
    prefix: str,
    listing: _Listing,
    executor: Executor,
    progress: Callable[[int, int], None],
) -> tuple[list[Tabled], list[Refused]]:
    """What bundles say of themselves, and which say nothing."""
    tabled: list[Tabled] = []
    refused: list[Refused] = []
    for one in read_tables(store, prefix, listing.data, executor):
        if isinstance(one, Tabled):
            tabled.append(one)
        elif one.is_other_version:
            raise OtherVersionError(one.reason, where=prefix + one.key)
        else:
            refused.append(one)
        progress(len(tabled) + len(refused), len(listing.data))
    return tabled, refused


def _with_handover(
    store: ObjectStore, meta: list[ObjectInfo], prefix: str, state: TierState, notes: list[str]
) -> TierState:
    """Whether the broker is gone, as the objects beside the journal say it."""
    found = found_handover(meta, prefix)
    with contextlib.suppress(DataError, ObjectNotFoundError):  # which is told when it is used
        read_handover(store, prefix, {HANDOVER: found})
    if found and found != state.store.get(HANDOVER):
        notes.append(
            "the broker was decommissioned; say `tiered attach --recommission` if it is back"
        )
    elif not found and state.store.get(HANDOVER):
        notes.append(
            "the broker was decommissioned, and is back or what it left is lost: it does not count as gone any more"
        )
    without = {name: value for name, value in state.store.items() if name != HANDOVER}
    return replace(state, store={**without, HANDOVER: found} if found else without)


def _with_timers(
    store: ObjectStore,
    prefix: str,
    reader: JournalReader[TierState],
    state: TierState,
    notes: list[str],
) -> TierState:
    """What is known of timers: by the journal as far as it goes, or by the copy beside it, whichever is newer."""
    files = {
        queue.queue_id: (int(incarnations[-1].min_offset), int(incarnations[-1].commit_offset))
        for queue, incarnations in state.queues.items()
        if queue.topic == TIMER_TOPIC
    }
    kept = kept_facts(store, prefix) if files else None
    if not files:
        return state
    if kept is None and state.timers.hours:
        notes.append(
            f"the copy of what is known of timers is damaged or gone: what was taken, handed over or cancelled behind entry"
            f" {reader.number} is forgotten, so timers may come twice"
        )
    is_newer = kept is not None and kept[1] > reader.number
    facts, told = mended_facts(kept[0] if kept and is_newer else state.timers, files)
    notes += told
    if not facts.sources:
        notes.append("nobody knows which timers were taken: another import takes them again")
    return replace(state, timers=facts)


def _with_lineage(store: ObjectStore, prefix: str, known: TierState, state: TierState) -> TierState:
    """Leaders and transactions of records that tell, found again by reading what lies behind what is known of them."""
    queues = dict(state.queues)
    for queue, incarnations in state.queues.items():
        made = []
        for one in incarnations:
            told, low = _told_before(known.queues.get(queue, ()), incarnations, one)
            reader = QueueReader.of_incarnation(store, prefix, queue, one)
            # What is damaged tells nothing; ``verify`` says what it is.
            batches = reader.past_damage(
                low, one.commit_offset, lambda _lost: None, damage=DAMAGED_OR_GONE
            )
            records = (batch.records for batch in batches if batch.records.sizes.any())
            first = None if state.store.get("kind") == ROCKETMQ else next(records, None)
            if first is not None and first.kind is RecordKind.ROCKETMQ:
                return state  # so is all of this tier
            facts = told if first is None else found_in(told, itertools.chain((first,), records))
            made.append(replace(one, lineage=facts))
        queues[queue] = tuple(made)
    return replace(state, queues=queues)


def _told_before(
    known: Sequence[Incarnation], incarnations: Sequence[Incarnation], one: Incarnation
) -> tuple[LineageFacts | None, QueueOffset]:
    """What the readable journal tells of an incarnation that was found again, and from where on its records have to."""
    cuts = [
        {(tail.cut_at, tail.commit_offset) for tail in some if tail.number == one.number}
        for some in (known, incarnations)
    ]
    mine = [had for had in known if had.number == one.number and had.cut_at == one.cut_at]
    tails = [had for had in mine if had.commit_offset == one.commit_offset]
    before = next(reversed(tails if one.cut_at >= 0 else mine), None)
    if before is None or before.lineage is None:
        return None, one.min_offset
    is_cut = any(0 <= at < before.commit_offset for at, _ in cuts[1] - cuts[0])
    if is_cut or before.commit_offset > one.commit_offset or not before.lineage.is_sure:
        return moved(before.lineage, one.min_offset), one.min_offset
    return before.lineage, before.commit_offset


def _read_journal(store: ObjectStore, prefix: str) -> tuple[JournalReader[TierState], str]:
    """As far as it goes, and why it goes no further (or that it has gone further, or was there at all)."""
    reader = JournalReader(store, prefix, TierMachine())
    try:
        reader.catch_up()
    except JournalLostError as error:
        return reader, error.what
    except DataError as error:
        return reader, str(error)
    return reader, ""


def _go_on_from_mirror(
    reader: JournalReader[TierState], store: ObjectStore, prefix: str, history: str
) -> str:
    """Go to the newest second copy of a checkpoint, if it is newer, and replay what is whole behind it; what to tell."""
    mirrored = JournalReader(store, prefix + MIRROR, TierMachine())
    with contextlib.suppress(DataError):  # the newest that is whole is enough
        mirrored.catch_up()
    wanted = reader.state.history or history
    if mirrored.number > reader.number and wanted in {"", mirrored.state.history}:
        reader.place(mirrored.state, mirrored.number, mirrored.last)
        with contextlib.suppress(DataError):
            while reader.step():
                pass
        return f"what was known at journal entry {mirrored.number} is taken from its checkpoint in {MIRROR}{JOURNAL}"
    if reader.number:
        return ""
    return (
        "neither a beginning of the journal nor a copy of a checkpoint is left, so all is guessed from the objects:"
        " the ends of queues, and what was given up, may be told wrongly"
    )


def _whole_entries_behind(
    reader: JournalReader[TierState], prefix: str, listing: _Listing
) -> list[Entry]:
    """What can be read behind the damage. It is not history, since something is missing before it; but it tells."""
    entries = []
    for number in sorted(listing.numbers):
        if number <= reader.number:
            continue
        try:
            found = reader.read_entry(number)
        except DataError:
            continue
        if found is not None:
            require_known(found[0], entry_key(prefix, number))
            entries.append(found[0])
    return entries


def _epochs_of(entries: Iterable[Entry]) -> Iterator[int]:
    """Epochs that entries speak of."""
    for entry in entries:
        said = [a.get("epoch") for a in entry.actions if a.get("do") == EPOCH]
        said.append(entry.epoch)
        yield from (number for number in said if type(number) is int and number < INT_MAX)


def apply_rebuild(
    at: Workplace, plan: RebuildPlan, *, accept_gaps: bool, accept_unread: bool = False
) -> bool:
    """Make the plan's state the tier's.

    Args:
        accept_gaps: Record what is lost as gaps, for ever.
        accept_unread: Go without the messages of bundles that cannot be read, and of which nothing else tells.

    Returns:
        False when this very plan had been applied before.

    Raises:
        MovedOnError: The tier has moved on. When that was seen only at the second look, there is an epoch of ours, and the
            journal is as unreadable as it was.
        InvalidError: Messages are lost and ``accept_gaps`` is not given, or may be and ``accept_unread`` is not; the store
            does not write conditionally.
        FencedError: A writer holds the lease, or another rebuild was faster.
    """
    if _is_applied(at, plan):
        return False
    if plan.rebuilt.losses and not accept_gaps:
        first, *others = plan.rebuilt.losses
        more = f", and {len(others)} more of the like" if others else ""
        raise InvalidError(
            f"objects are missing: those of {first}{more}",
            where=at.prefix,
            do="restore them and plan again, or record them as gaps with --accept-gaps",
        )
    if plan.unread and not accept_unread:
        one, *rest = plan.unread
        more = f", and {len(rest)} more" if rest else ""
        raise InvalidError(
            f"messages that are spoken of were not found: {one.key}: {one.reason}{more}",
            where=at.prefix,
            do="restore what is damaged or missing and plan again, or go without it with --accept-unread",
        )
    require_conditional_writes(at.store, at.rng, at.store.url)
    _require_unchanged(at, plan)
    before = replace(plan.rebuilt.state, epoch=plan.rebuilt.state.epoch - 1)
    in_new_epoch(at, partial(_look_and_replace, at, plan), anew=Anew(plan.number, before))
    return True


def _is_applied(at: Workplace, plan: RebuildPlan) -> bool:
    """Whether this plan's checkpoint is there."""
    reader = JournalReader(at.store, at.prefix, TierMachine())
    try:
        found = reader.read_checkpoint(plan.number)
    except DataError:
        return False
    return found is not None and found[0].queues == plan.rebuilt.state.queues


def _require_unchanged(at: Workplace, plan: RebuildPlan, without: str = "") -> None:
    """Refuse a tier in which there is anything that the plan does not know, or is not what it knows."""
    now = list_all(at.store, at.prefix, without).folders
    for folder in sorted(now.keys() | plan.listing.keys()):
        here, there = now.get(folder, [0, ""]), plan.listing.get(folder, [0, ""])
        if here != there:
            counts = f"it had {there[0]}, and has {here[0]}"
            raise moved_on(f"{at.prefix}{folder} has other objects ({counts})", where=at.store.url)


def _look_and_replace(at: Workplace, plan: RebuildPlan, journal: JournalWriter[TierState]) -> None:
    """Behind the epoch's entry: nothing may have landed since the plan; then the new state counts."""
    _require_unchanged(at, plan, entry_key(at.prefix, plan.number))
    journal.require_checkpoint()
    machine = TierMachine()
    reader = JournalReader(at.store, at.prefix, machine)
    reader.catch_up()
    if machine.dump(reader.state) != machine.dump(journal.state):
        raise FencedError(
            "another writer has taken over this tier at the same moment",
            where=f"{at.store.url}/{at.prefix}",
            do="plan again to see what is left to do",
        )


# --------------------------------------------------------------------------------------------------
# A rebuild's plan as JSON: what people and scripts see, and what a plan file holds.
# --------------------------------------------------------------------------------------------------

WHAT = "rebuild"


def plan_document(plan: RebuildPlan, place: Place, url: str) -> dict[str, Any]:
    """What ``tiered rebuild --json`` shows."""
    rebuilt = plan.rebuilt
    incarnations = [one.incarnation for one in rebuilt.state.placed()]
    parts = list(rebuilt.parts())
    return {
        "format": 1,
        "url": url,
        **picked(place, "cluster", "broker"),
        "is_needed": bool(plan.damage),
        "is_applied": False,
        "was_applied": False,
        "damage": plan.damage,
        "number": plan.number,
        "epoch": rebuilt.state.epoch,
        "queues": len(rebuilt.state.queues),
        "objects": plan.objects,
        "parts": len(parts),
        "messages": sum(part.count - part.holes for part in parts),
        "gaps": sum(len(incarnation.gaps) for incarnation in incarnations) - len(rebuilt.losses),
        "losses": [*map(document_of, rebuilt.losses)],
        "orphans": rebuilt.orphans,
        "refused": [*map(document_of, plan.refused)],
        "unread_count": len(plan.unread),
        "notes": rebuilt.notes,
    }


def save_rebuild(plan: RebuildPlan, place: Place, url: str, path: str) -> None:
    """Write a plan file."""
    document = plan_document(plan, place, url)
    document |= {"what": WHAT, "listing": plan.listing}
    save_plan(path, document | {"state": TierMachine().dump(plan.rebuilt.state)})


def load_rebuild(path: str, place: Place, url: str) -> RebuildPlan:
    """Read a plan file."""
    document = load_plan(path, WHAT, place)
    where = path
    if document.get("url") != url:
        raise InvalidError(f"this plan is of the tier at {document.get('url')}", where=where)
    try:
        plan = _plan_of(document)
    except (ValueError, LookupError, TypeError) as error:
        raise InvalidError(
            f"this is not a plan of a rebuild: {error!r:.200}", where=where
        ) from error
    problem = next(iter(check_state(plan.rebuilt.state)), None)
    if problem is not None:
        raise InvalidError(
            f"the plan contradicts itself: {problem.where}: {problem.detail}",
            where=where,
            do="plan again",
        )
    return plan


def _plan_of(document: dict[str, Any]) -> RebuildPlan:
    losses = [*map(as_document(Loss).decode, document["losses"])]
    rebuilt = RebuiltState(
        TierMachine().load(document["state"]), document["orphans"], losses, document["notes"]
    )
    return RebuildPlan(
        str(document["damage"]),
        int(document["number"]),
        {folder: list(row) for folder, row in document["listing"].items()},
        rebuilt,
        [*map(as_document(Refused).decode, document["refused"])],
        int(document["objects"]),
    )


# --------------------------------------------------------------------------------------------------
# ``tiered rebuild --index``: what is lost or damaged of the key index, and what it does not cover, again. Plan, then
# apply. Overview: the plan reads every object that the journal names and checks each byte. What is missing or damaged
# is dropped by one ``index`` action; then all that no object covers is read from the tier and made into new objects,
# as a writer does it.
#
# Ordering: an epoch, so that no writer is at work; what is dropped; then object by object, each with its entry.
#
# An epoch that was taken meanwhile by one who only tidies up (``gc``) ends nothing: with no writer alive another is
# taken, and what is in hand is stored again under it, since an object of an older epoch may be deleted before it is
# named.
#
# After a crash, or when a writer takes over in the middle: what was named stays, and the rest is found again by the
# next plan, or made by that writer. Nothing is deleted: ``gc`` collects what was dropped.
# --------------------------------------------------------------------------------------------------

INDEX_WHAT = "rebuild --index"


@dataclass(frozen=True, slots=True)
class DroppedIndex:
    """An index object that is given up."""

    key: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class IndexPlan(TierPlan[DroppedIndex]):
    """What of the key index is to be made again."""

    ROWS = "drop"

    steps: tuple[DroppedIndex, ...]
    objects: int  # that the journal names
    items: int  # in these
    size_bytes: int  # of these
    unindexed_messages: int  # once that is dropped

    @property
    def has_work(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.steps or self.unindexed_messages)


EPOCHS_MAX = 1000
"""So often a run may lose its epoch to others that only tidy up."""
THREADS = 4
"""Objects checked at once; each is held in memory."""


def plan_rebuild_index(
    at: Workplace, told: Callable[[str, int, int], None] = lambda _what, _done, _total: None
) -> IndexPlan:
    """See what is to be made again. Writes nothing."""
    reader = at.reader()
    state = reader.state
    drop: list[DroppedIndex] = []
    with ThreadPoolExecutor(THREADS, "tiered-rebuild") as pool:
        checks = [IndexCheck(at.store, at.prefix, index) for index in state.indexes]
        for done, (index, found) in enumerate(
            zip(state.indexes, pool.map(lambda check: check.run(), checks), strict=True), 1
        ):
            told("checking the index", done, len(checks))
            for problem in found.problems:
                if problem.kind == OTHER_VERSION:
                    raise OtherVersionError(problem.detail, where=problem.where)
            reasons = [f"{problem.kind}: {problem.detail}" for problem in found.problems]
            reasons += ["missing"] * len(found.missing)
            if reasons:
                drop.append(DroppedIndex(index.place.key, reasons[0]))
    return IndexPlan(
        what=INDEX_WHAT,
        **plan_head(at.store, at.place, state, reader.journal_number),
        made_ms=at.clock.now_ms(),
        steps=tuple(drop),
        objects=len(state.indexes),
        items=sum(index.count for index in state.indexes),
        size_bytes=sum(index.place.object_bytes for index in state.indexes),
        unindexed_messages=unindexed_messages(_without(state, [one.key for one in drop])),
    )


def apply_rebuild_index(
    at: Workplace,
    plan: IndexPlan,
    *,
    items_max: int,
    told: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
) -> dict[str, Any]:
    """Drop what the plan says, and cover all that is not covered now.

    Returns:
        What was done: ``dropped``, ``objects``, ``items``, ``size_bytes``, what is left: ``unindexed_messages``, and
        ``damaged``: queues that cannot be read on, and why.

    Raises:
        FencedError: A writer is at work, or has taken over.
    """
    run = _RebuildRun(at, in_new_epoch(at), items_max)
    try:
        require_same_tier(plan, run.journal.state)
        dropped = run.drop([one.key for one in plan.steps])
        run.all(told)
    finally:
        run.builder.reset()
    run.journal.write_checkpoint()
    return {
        "dropped": dropped,
        **run.done,
        "was_applied": plan.has_work and not dropped and not run.done["objects"],
        "unindexed_messages": unindexed_messages(run.journal.state),
        "damaged": [
            {"queue": f"{queue} incarnation {number}", "reason": str(error)}
            for (queue, number), error in run.indexer.damaged.items()
        ],
        "epoch": run.journal.epoch,
    }


class _RebuildRun:
    def __init__(self, at: Workplace, journal: JournalWriter[TierState], items_max: int) -> None:
        sequence = itertools.count()
        self._at = at
        self._epochs_left = EPOCHS_MAX
        self.journal = journal
        self._items_max = items_max
        self.builder = IndexBuilder(
            at.store,
            at.prefix,
            lambda: keys.ObjectId(self.journal.epoch, self.journal.writer, next(sequence)),
        )
        self.indexer = Indexer(self.builder, at.store, at.prefix)
        self.done = {"objects": 0, "items": 0, "size_bytes": 0}

    def drop(self, damaged: list[str]) -> int:
        """Name these objects no more; how many that were."""
        found = self._named(damaged)
        # Looked at anew each time: of a list with one that an expiry has dropped meanwhile nothing is taken.
        while left := self._named(damaged):
            self._say(index_action([], left))
        return len(found)

    def _named(self, keys_of: list[str]) -> list[str]:
        named = {index.place.key for index in self.journal.state.indexes}
        return [key for key in keys_of if key in named]

    def _say(self, action: Action) -> bool:
        """Append an action; False when another has taken the epoch, and it is ours again: look at the state."""
        try:
            self.journal.append([action])
        except FencedError:
            self._epochs_left -= 1
            if not self._epochs_left:
                raise
            self.journal = in_new_epoch(self._at)
            return False
        return True

    def all(self, told: Callable[[str, int, int], None]) -> None:
        """Cover all that can be read."""
        total = unindexed_messages(self.journal.state)
        while self.indexer.step(self.journal.state, items_max=self._items_max):
            left = self.indexer.waits(self.journal.state)
            told("indexing", max(0, total - left), total)
            if self.builder.count >= self._items_max:
                self._publish()
        if not self.builder.is_empty:
            self._publish()

    def _publish(self) -> None:
        is_said, made = False, self.builder.finish()
        while not (is_said or self._is_named(made)):
            is_said = self._say(index_action([made]))
            if not is_said and not self._is_named(made):  # it may have become history just before
                made = self.builder.finish()
        if not self._is_named(made):
            raise moved_on("its queues have changed meanwhile")
        self.builder.reset()
        self.done["objects"] += 1
        self.done["items"] += made.count
        self.done["size_bytes"] += made.place.object_bytes

    def _is_named(self, made: IndexObject) -> bool:
        return any(one.place.key == made.place.key for one in self.journal.state.indexes)


def _without(state: TierState, drop: list[str]) -> TierState:
    """The state once these objects are dropped."""
    changed = after_index(state.indexes, state.queues, Indexed((), tuple(drop)))
    if changed is None:
        raise InvalidError("the journal names an index object twice", do="run `tiered verify`")
    return replace(state, indexes=changed[0], queues={**state.queues, **changed[1]})
