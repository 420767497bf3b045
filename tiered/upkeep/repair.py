"""Repair: what is damaged or missing in a tier is uploaded again, from what is whole in it and from the local store.

Ordering: bytes in hand first, then the lease, the reign, a bundle with what is repaired of a damaged one (or several, if
that is large), and a ``merge`` entry that names the new sections in the place of the old ones. A bundle of which nothing is
named any more stays as an orphan; ``gc`` removes it.

Memory: one bundle.

Retries and errors: uploads and reads are tried again by the store, entries by the journal. A part that can't be had is
left as it is, and named.

After a crash: what entries name is repaired, the rest as before; repair again.
"""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from tiered.api.ends import require_conditional_writes
from tiered.dispatch.merging import MergedBundle, row_of
from tiered.dispatch.uploads import Uploader
from tiered.errors import InvalidError
from tiered.format.bundle import build_packed_section, build_section
from tiered.journal.lease import Holder, Lease
from tiered.journal.writer import JournalWriter
from tiered.keys import parse_data_key
from tiered.log.merge import BUNDLE_BYTES_MAX, MergeOutput, MergeRun
from tiered.log.named import named_objects
from tiered.log.parts import Parts
from tiered.log.repair import Unrepaired, name_of, plan_repairs, recover_bytes
from tiered.log.state import TierMachine, TierState
from tiered.log.tables import Tabled, read_bundle_table
from tiered.upkeep.workplace import GIVE_UP_S

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Sequence

    from backends.base import ObjectStore
    from tiered.clock import Clock
    from tiered.format.bundle import Section
    from tiered.local.face import LocalStore
    from tiered.log.named import NamedPart
    from tiered.log.repair import PartBytes
    from tiered.log.verify_report import Damaged

LEASE_SECONDS = 60.0


@dataclass(slots=True)
class RepairReport:
    """What was repaired.

    Attributes:
        parts: Parts that have new sections.
        repaired_bytes: Their records and items.
        unrepaired: What stays damaged, and why.
    """

    parts: int = 0
    repaired_bytes: int = 0
    unrepaired: list[Unrepaired] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Recovered:
    """A damaged part, and what it becomes."""

    named: NamedPart
    run: MergeRun
    section: Section


def _section(one: NamedPart, found: PartBytes) -> Section:
    """As it was, packed or not."""
    packed = None
    if one.part.section.is_packed:
        packed = build_packed_section(found.log, found.items)
    return packed or build_section([found.log], found.items)


class Repairer:
    """One repair of one broker's tier, on one thread."""

    def __init__(
        self,
        raw: ObjectStore,
        store: ObjectStore,
        prefix: str,
        local: LocalStore | None,
        *,
        clock: Clock,
        rng: random.Random,
        stop: threading.Event,
    ) -> None:
        """Wire it.

        Args:
            raw: The tier's store without retries, for the journal.
            store: The same with retries.
            prefix: The broker's.
            local: Where bytes may be had; None: only what is whole in the tier itself.
            clock: For the lease.
            rng: For our id.
            stop: Ends the journal's tries.
        """
        self._store = store
        self._prefix = prefix
        self._local = local
        self._clock = clock
        self._rng = rng
        self._writer = f"{rng.getrandbits(32):08x}"
        self._journal: JournalWriter[TierState] = JournalWriter(
            raw,
            prefix,
            TierMachine(),
            writer=self._writer,
            clock=clock,
            rng=rng,
            stop=stop,
            give_up_s=GIVE_UP_S,
        )
        self._lease = Lease(
            store,
            prefix,
            writer=self._writer,
            holder=Holder.present(),
            seconds=LEASE_SECONDS,
            clock=clock,
            known=lambda: self._journal.end,
        )
        self._renew_at_s = 0.0
        self._uploader: Uploader | None = None
        self._unnamed: list[Tabled] | None = None
        self._report = RepairReport()

    def run(self, damaged: Damaged) -> RepairReport:
        """Repair what can be repaired.

        Args:
            damaged: What ``verify`` found.

        Raises:
            FencedError: A writer holds the lease, or took over.
            InvalidError: The local store is not the one that the tier belongs to.
            BackendError: The tier's store does not answer; what was done stays.
        """
        self._journal.catch_up()
        self._require_same_store()
        repairs, self._report.unrepaired = plan_repairs(self._journal.state, self._prefix, damaged)
        try:
            for _, named in groupby(repairs, lambda one: one.part.bundle):
                for some in self._recovered(named):
                    self._write(some)
            if self._uploader is not None:
                self._journal.write_checkpoint(force=True)
        finally:
            self._lease.release()
        return self._report

    def _require_same_store(self) -> None:
        known = self._journal.state.store.get("store_id")
        mine = self._local.identity.store_id if self._local else None
        if known and mine and known != mine:
            raise InvalidError(
                f"this tier belongs to another store (id {known}); this one has id {mine}",
                do="give the store that the tier was made from",
            )

    def _recovered(self, named: Iterator[NamedPart]) -> Iterator[list[_Recovered]]:
        """The bytes of a bundle's parts, as far as they can be had, so many as make a bundle."""
        some: list[_Recovered] = []
        size = 0
        for one in named:
            found = recover_bytes(self._store, self._prefix, self._local, self._others, one)
            if isinstance(found, str):
                self._report.unrepaired.append(Unrepaired(name_of(one), found))
                continue
            run = MergeRun(
                *(one.queue, one.number, one.life.incarnation, one.segment),
                Parts.of([one.part]),
                one.taken_back,
            )
            if some and size + run.size_bytes > BUNDLE_BYTES_MAX:
                yield some
                some, size = [], 0
            some.append(_Recovered(one, run, _section(one, found)))
            size += run.size_bytes
        if some:
            yield some

    def _others(self) -> Sequence[Tabled]:
        """The bundles that no entry names, as far as their tables can be read."""
        if self._unnamed is None:
            named = named_objects(self._journal.state)
            self._unnamed = []
            for info in self._store.list(self._prefix):
                key = info.key[len(self._prefix) :]
                said = parse_data_key("", key)
                if said is None or said.kind == "quarantine" or key in named:
                    continue
                found = read_bundle_table(self._store, self._prefix, info)
                self._unnamed += [found] if isinstance(found, Tabled) else []
        return self._unnamed

    def _write(self, some: list[_Recovered]) -> None:
        """Put the sections into a bundle like the damaged one, and name them."""
        uploader = self._reigning()
        some.sort(key=lambda one: (one.run.queue, one.named.part.queue_offset))
        bundle = some[0].named.part.bundle
        said = parse_data_key("", bundle.key)
        own = some[0].run.queue if said and said.kind == "queue" else None
        level = max(1, bundle.level)  # so that a rebuild sees that nobody began to write here
        topic = said.topic if said else ""
        output = MergeOutput(level, tuple(one.run for one in some), topic, own)
        stored = uploader.put_merged(output, [(row_of(one.run), one.section) for one in some])
        self._journal.append([MergedBundle(output, stored).action()])
        is_named = stored.bundle.key in named_objects(self._journal.state)
        for one in some:
            if is_named:
                self._report.parts += 1
                self._report.repaired_bytes += one.run.size_bytes
            else:
                reason = "the tier has moved on meanwhile"
                self._report.unrepaired.append(Unrepaired(name_of(one.named), reason))

    def _reigning(self) -> Uploader:
        """Lease and reign, when there is something to write; prolongs the lease."""
        if self._uploader is None:
            able = require_conditional_writes(self._store, self._rng, self._store.url)
            self._lease.acquire(
                wait=False,
                announce=lambda _state: None,
                stop=lambda seconds: self._clock.wait(threading.Event(), seconds),
            )
            holder = {**asdict(Holder.present()), "repairs": True}
            self._journal.take_reign(holder, remembered=self._lease.remembered)
            self._uploader = Uploader(
                self._store,
                self._prefix,
                generation=self._journal.generation,
                writer=self._writer,
                clock=self._clock,
                escapes_case=not able.distinguishes_case,
            )
        elif self._clock.monotonic_s() >= self._renew_at_s:
            self._lease.renew()
        else:
            return self._uploader
        self._renew_at_s = self._clock.monotonic_s() + self._lease.renewal_seconds
        return self._uploader
