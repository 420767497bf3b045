"""Rebuild: a lost or damaged journal, again from what the objects say of themselves. Plan, then apply.

Overview: ``plan_rebuild`` reads the journal as far as it goes, lists all objects, reads every data object's trailer, and
lets ``tiered.log.rebuild`` propose a state. ``apply_rebuild`` makes that state the tier's: one checkpoint, of a new
generation, with a number beyond every one that can have been used (the next multiple of ``EPOCH``).

Ordering: lease, then a listing that must be the plan's, then the checkpoint, then the replay that shows it.

Why this supersedes what is there: readers jump to the newest checkpoint, so whatever lies before it, damaged, missing or
whole, is not read again. A writer of the old history that wins a number of its own, which is smaller, lists behind it, finds
the checkpoint, and is fenced. Nothing is deleted or overwritten.

Retries and errors: the store's (``RetryingStore``, which also tells a checkpoint of ours whose answer was lost).

After a crash: the checkpoint is there, and the rebuild is done; or it is not, and nothing has changed but the lease.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from zlib_ng import zlib_ng

from backends.errors import AlreadyExistsError
from backends.probe import probe
from tiered.errors import (
    DataError,
    FencedError,
    InvalidError,
    JournalLostError,
    TieredStoreError,
)
from tiered.journal.checkpoint import CheckpointText, encode_checkpoint
from tiered.journal.entry import REIGN
from tiered.journal.lease import Holder, JournalEnd, Lease, read_lease
from tiered.journal.reader import JournalReader
from tiered.keys import (
    LEASE,
    OFFSET_DIGITS,
    checkpoint_key,
    parse_data_key,
    parse_index_key,
    parse_journal_key,
)
from tiered.log.described import Described, Refused, read_described
from tiered.log.objects import read_range
from tiered.log.rebuild import EPOCH, Proposal, propose
from tiered.log.state import TierMachine, TierState
from tiered.log.wellformed import INT_MAX

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator
    from concurrent.futures import Executor

    from backends.base import ObjectInfo, ObjectStore
    from tiered.clock import Clock
    from tiered.log.parts import ObjectRange
    from tiered.log.rebuild_chain import LifeKey
    from tiered.plugin.place import Place

LEASE_SECONDS = 600.0
_NUMBER_END = 10**OFFSET_DIGITS


@dataclass(frozen=True, slots=True)
class RebuildPlan:
    """What is to become of a journal.

    Attributes:
        damage: Why the journal can't be read; empty when it can, and there is nothing to do.
        number: Of the checkpoint to be written.
        listing: Fingerprint of the keys and sizes of all objects but the lease.
        proposal: The new state, of the new generation, and what is to be said of it.
        refused: Data objects whose own description is of no use.
        objects: Data objects read.
    """

    damage: str
    number: int
    listing: str
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
    fingerprint: str = ""


def list_all(store: ObjectStore, prefix: str) -> _Listing:
    """One listing, sorted by what objects are."""
    found, digest = _Listing(), hashlib.sha256()
    for info in store.list(prefix):
        if info.key == prefix + LEASE:
            continue
        digest.update(f"{info.size_bytes} {info.key}\n".encode("utf-8", "surrogateescape"))
        data = parse_data_key(prefix, info.key)
        number = parse_journal_key(prefix, info.key)
        if number:
            found.numbers.add(number[0])
        elif data and data.kind == "quarantine":
            found.quarantined.add(((data.queue, data.incarnation), data.offset))
            found.generations.add(data.object_id.generation)
        elif data:
            found.data.append(info)
            found.generations.add(data.object_id.generation)
        elif index := parse_index_key(prefix, info.key):
            found.indexes += 1
            found.generations.add(index.generation)
    found.fingerprint = digest.hexdigest()
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
    reader, damage = _read_journal(store, prefix)
    listing = list_all(store, prefix)
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
        return RebuildPlan("", number, listing.fingerprint, Proposal(reader.state))
    objects: list[Described] = []
    refused: list[Refused] = []
    for one in read_described(store, prefix, listing.data, executor):
        (objects if isinstance(one, Described) else refused).append(one)  # type: ignore[arg-type]
        progress(len(objects) + len(refused), len(listing.data))

    def items(place: ObjectRange) -> memoryview:
        return read_range(store, prefix, place, place.start, place.end)

    proposal = propose(
        objects,
        reader.state,
        quarantined=Counter(life for life, _ in listing.quarantined),
        items=items,
        generations=[
            *listing.generations,
            remembered.generation,
            *_later_reigns(reader, listing),
        ],
    )
    state = replace(proposal.state, generation=proposal.state.generation + 1)
    proposal.state = state
    if listing.indexes:
        proposal.notes.append(
            f"the key index ({listing.indexes} objects) is given up; the next writer makes it again"
        )
    return RebuildPlan(damage, number, listing.fingerprint, proposal, refused, len(listing.data))


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


def apply_rebuild(
    plan: RebuildPlan,
    store: ObjectStore,
    place: Place,
    *,
    accept_gaps: bool,
    clock: Clock,
    rng: random.Random,
) -> None:
    """Make the plan's state the tier's.

    Args:
        plan: From ``plan_rebuild``, perhaps long ago.
        store: The tier's, with retries.
        place: The broker's.
        accept_gaps: Record what is lost as gaps, for ever.
        clock: For the lease and the time of the checkpoint.
        rng: For our id.

    Raises:
        InvalidError: Messages are lost and ``accept_gaps`` is not given; the tier has moved on; the store does not write
            conditionally.
        FencedError: A writer holds the lease, or another rebuild was faster.
        BackendError: The store does not answer; the plan may be applied again.
    """
    if plan.proposal.losses and not accept_gaps:
        raise InvalidError(
            f"objects of {len(plan.proposal.losses)} stretches of messages are missing",
            where=place.prefix,
            do="restore them and plan again, or record them as gaps with --accept-gaps",
        )
    found = probe(store, f"{rng.getrandbits(64):016x}")
    if not (found.put_if_absent and found.compare_and_set):
        raise InvalidError(
            "this store does not write conditionally, so two writers could not be kept apart",
            where=store.url,
        )
    writer, holder = f"{rng.getrandbits(32):08x}", Holder.present()
    known = JournalEnd()
    lease = Lease(
        store,
        place.prefix,
        writer=writer,
        holder=holder,
        seconds=LEASE_SECONDS,
        clock=clock,
        known=lambda: known,
    )
    lease.acquire(wait=False, announce=lambda _state: None, stop=lambda _seconds: False)
    try:
        if list_all(store, place.prefix).fingerprint != plan.listing:
            raise InvalidError(
                "the tier has moved on since the plan was made", where=store.url, do="plan again"
            )
        made = {**asdict(holder), "rebuilt": True}
        state = replace(plan.proposal.state, writer=writer, holder=made, updated_ms=clock.now_ms())
        _write(store, place.prefix, plan.number, state)
        known = JournalEnd(state.generation, plan.number)
    finally:
        lease.release()


def _write(store: ObjectStore, prefix: str, number: int, state: TierState) -> None:
    machine = TierMachine()
    document = machine.dump(state)
    # No entry has this number; the next one has to name this mark as that of the entry before it.
    mark = zlib_ng.crc32(repr((number, state.generation, state.writer)).encode())
    version = machine.checkpoint_format(state)
    data = encode_checkpoint(CheckpointText(number, mark, document), version=version)
    try:
        store.put_if_absent(checkpoint_key(prefix, number), data)
    except AlreadyExistsError:
        raise FencedError(
            "another rebuild of this journal was faster",
            where=checkpoint_key(prefix, number),
            do="plan again to see what is left to do",
        ) from None
    reader = JournalReader(store, prefix, machine)
    reader.catch_up()
    if machine.dump(reader.state) != document:
        raise FencedError(
            "another writer has taken over this tier at the same moment",
            where=f"{store.url}/{prefix}",
            do="plan again to see what is left to do",
        )
