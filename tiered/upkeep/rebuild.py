"""Rebuild: a lost or damaged journal, again from what the objects say of themselves. Plan, then apply.

Overview: ``plan_rebuild`` reads the journal as far as it goes, lists all objects, reads every bundle's table, and
lets ``tiered.log.rebuild`` propose a state. ``apply_rebuild`` makes that state the tier's: a reign's entry and its
checkpoint, with a number beyond every one that can have been used (the next multiple of ``EPOCH``).

Ordering: lease; the reign's entry, which fences; a listing, which must be the plan's; the checkpoint; the replay that shows
it. For the plan: the listing, then the journal, so that what lands in between makes the plan one that is not carried out.

Why this supersedes what is there: readers jump to the newest checkpoint, so whatever lies before it, damaged, missing or
whole, is not read again. A writer of the old history that wins a number of its own, which is smaller, lists behind it. It
finds the reign's entry, and is fenced; or it was faster, and then its entry is in the listing, and nothing is replaced: plan
again. Nothing is deleted or overwritten.

Retries and errors: the store's, and the journal's for entry and checkpoint.

After a crash: the checkpoint is there, and the rebuild is done; or there is at most the reign's entry, and the journal is as
unreadable as it was: plan again.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tiered.api.ends import require_conditional_writes
from tiered.errors import (
    DataError,
    FencedError,
    InvalidError,
    JournalLostError,
    TieredStoreError,
)
from tiered.journal.entry import REIGN
from tiered.journal.lease import JournalEnd, read_lease
from tiered.journal.reader import JournalReader
from tiered.keys import (
    LEASE,
    OFFSET_DIGITS,
    entry_key,
    parse_data_key,
    parse_index_key,
    parse_journal_key,
)
from tiered.log.rebuild import EPOCH, Proposal, propose
from tiered.log.sections import read_range
from tiered.log.state import TierMachine, TierState
from tiered.log.tables import Refused, Tabled, read_tables
from tiered.log.wellformed import INT_MAX
from tiered.upkeep.plans import moved_on
from tiered.upkeep.reign import Anew, reign_and

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Executor

    from backends.base import ObjectInfo, ObjectStore
    from tiered.journal.writer import JournalWriter
    from tiered.log.parts import SectionRange
    from tiered.log.rebuild_chain import LifeKey
    from tiered.upkeep.workplace import Workplace

Listed = dict[str, list[Any]]
_NUMBER_END = 10**OFFSET_DIGITS


@dataclass(frozen=True, slots=True)
class RebuildPlan:
    """What is to become of a journal.

    Attributes:
        damage: Why the journal can't be read; empty when it can, and there is nothing to do.
        number: Of the checkpoint to be written.
        listing: Of each folder but the lease how many objects it has, and a fingerprint of their keys and sizes.
        proposal: The new state, of the new generation, and what is to be said of it.
        refused: Bundles whose own table is of no use.
        objects: Bundles read.
    """

    damage: str
    number: int
    listing: Listed
    proposal: Proposal
    refused: list[Refused] = field(default_factory=list)
    objects: int = 0


@dataclass(slots=True)
class _Listing:
    """All objects of a broker, but the lease."""

    data: list[ObjectInfo] = field(default_factory=list)
    quarantined: set[tuple[LifeKey, int]] = field(default_factory=set)
    numbers: set[int] = field(default_factory=set)
    generations: set[int] = field(default_factory=set)
    indexes: int = 0
    folders: Listed = field(default_factory=dict)


def list_all(store: ObjectStore, prefix: str, without: str = "") -> _Listing:
    """One listing, sorted by what objects are; but for the lease, and the key ``without``."""
    found = _Listing()
    digests: dict[str, Any] = defaultdict(hashlib.sha256)
    counts: Counter[str] = Counter()
    for info in store.list(prefix):
        if info.key in {prefix + LEASE, without}:
            continue
        folder = info.key[len(prefix) :].partition("/")[0]
        line = f"{info.size_bytes} {info.key}\n"
        digests[folder].update(line.encode("utf-8", "surrogateescape"))
        counts[folder] += 1
        data = parse_data_key(prefix, info.key)
        number = parse_journal_key(prefix, info.key)
        if number:
            found.numbers.add(number[0])
        elif data and data.kind == "quarantine" and data.queue:
            found.quarantined.add(((data.queue, data.incarnation), data.begins))
            found.generations.add(data.object_id.generation)
        elif data:
            found.data.append(info)
            found.generations.add(data.object_id.generation)
        elif index := parse_index_key(prefix, info.key):
            found.indexes += 1
            found.generations.add(index.generation)
    found.folders = {name: [counts[name], digests[name].hexdigest()] for name in digests}
    return found


def plan_rebuild(
    store: ObjectStore,
    prefix: str,
    executor: Executor,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> RebuildPlan:
    """See what a journal could be rebuilt to. Writes nothing.

    Args:
        store: The tier's (with retries).
        prefix: Of the broker.
        executor: Makes requests.
        progress: Told ``(done, total)`` objects.

    Raises:
        DataError: There is a journal key whose number leaves no room for another.
        InvalidError: The journal is of a newer version.
        BackendError: The store does not answer.
    """
    listing = list_all(store, prefix)
    reader, damage = _read_journal(store, prefix)
    lease, _ = read_lease(store, prefix + LEASE)
    remembered = lease.end if lease else JournalEnd()
    numbers = [reader.number, remembered.number, *listing.numbers]
    number = (max(numbers) // EPOCH + 1) * EPOCH
    if number >= _NUMBER_END:
        raise DataError(
            f"a journal key has the number {max(numbers)}, which no writer can have made",
            where=prefix,
            do="delete that object, and rebuild then",
        )
    if not damage:
        return RebuildPlan("", number, listing.folders, Proposal(reader.state))
    tabled: list[Tabled] = []
    refused: list[Refused] = []
    for one in read_tables(store, prefix, listing.data, executor):
        (tabled if isinstance(one, Tabled) else refused).append(one)  # type: ignore[arg-type]
        progress(len(tabled) + len(refused), len(listing.data))

    def read(want: SectionRange) -> memoryview:
        return read_range(store, prefix, want)

    history = reader.state.history or remembered.history
    proposal = propose(
        tabled,
        replace(reader.state, history=history),
        sizes={info.key[len(prefix) :]: info.size_bytes for info in listing.data},
        quarantined=Counter(life for life, _ in listing.quarantined),
        read=read,
        generations=[
            *listing.generations,
            remembered.generation,
            *_later_reigns(reader, listing),
        ],
    )
    state = replace(proposal.state, generation=proposal.state.generation + 1)
    proposal.state = state
    proposal.notes += [f"{one.bundle.key}: {one.salvaged}" for one in tabled if one.salvaged]
    if listing.indexes:
        proposal.notes.append(
            f"the key index ({listing.indexes} objects) is given up; the next writer makes it again"
        )
    return RebuildPlan(damage, number, listing.folders, proposal, refused, len(listing.data))


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


def _later_reigns(reader: JournalReader[TierState], listing: _Listing) -> Iterator[int]:
    """Generations that whole entries behind the damage speak of."""
    for number in sorted(listing.numbers):
        if number <= reader.number:
            continue
        try:
            found = reader.read_entry(number)
        except TieredStoreError:
            continue
        if found is not None:
            said = [a.get("generation") for a in found[0].actions if a.get("do") == REIGN]
            said.append(found[0].generation)
            yield from (number for number in said if type(number) is int and number < INT_MAX)


def apply_rebuild(at: Workplace, plan: RebuildPlan, *, accept_gaps: bool) -> bool:
    """Make the plan's state the tier's.

    Args:
        at: The tier.
        plan: From ``plan_rebuild``, perhaps long ago.
        accept_gaps: Record what is lost as gaps, for ever.

    Returns:
        False when this very plan had been applied before.

    Raises:
        MovedOnError: The tier has moved on. When that was seen only at the second look, there is a reign of ours, and the
            journal is as unreadable as it was.
        InvalidError: Messages are lost and ``accept_gaps`` is not given; the store does not write conditionally.
        FencedError: A writer holds the lease, or another rebuild was faster.
        BackendError: The store does not answer; the plan may be applied again.
    """
    if _is_applied(at, plan):
        return False
    if plan.proposal.losses and not accept_gaps:
        raise InvalidError(
            f"objects of {len(plan.proposal.losses)} stretches of messages are missing",
            where=at.prefix,
            do="restore them and plan again, or record them as gaps with --accept-gaps",
        )
    require_conditional_writes(at.store, at.rng, at.store.url)
    _require_unchanged(at, plan)
    before = replace(plan.proposal.state, generation=plan.proposal.state.generation - 1)
    reign_and(at, partial(_look_and_replace, at, plan), anew=Anew(plan.number, before))
    return True


def _is_applied(at: Workplace, plan: RebuildPlan) -> bool:
    """Whether this plan's checkpoint is there."""
    reader = JournalReader(at.store, at.prefix, TierMachine())
    try:
        found = reader.read_checkpoint(plan.number)
    except DataError:
        return False
    return found is not None and found[0].queues == plan.proposal.state.queues


def _require_unchanged(at: Workplace, plan: RebuildPlan, without: str = "") -> None:
    """Refuse a tier in which there is anything that the plan does not know, or is not what it knows."""
    now = list_all(at.store, at.prefix, without).folders
    for folder in sorted(now.keys() | plan.listing.keys()):
        here, there = now.get(folder, [0, ""]), plan.listing.get(folder, [0, ""])
        if here != there:
            counts = f"it had {there[0]}, and has {here[0]}"
            raise moved_on(f"{at.prefix}{folder} has other objects ({counts})", where=at.store.url)


def _look_and_replace(at: Workplace, plan: RebuildPlan, journal: JournalWriter[TierState]) -> None:
    """Behind the reign's entry: nothing may have landed since the plan; then the new state counts."""
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
