"""Repair: what is damaged or missing in a tier is uploaded again, from what is whole in it and from the local store.

Ordering: bytes in hand first, then the lease, the reign, data object, index object, and one ``seal`` entry a segment, which
names the new objects in the place of the old ones. Objects that are replaced stay as orphans; ``gc`` removes them.

A segment that is repaired is sealed from then on: the next writer opens a new one.

Retries and errors: uploads and reads are tried again by the store, entries by the journal. A part that can't be had is
left as it is, and named.

After a crash: what entries name is repaired, the rest as before; repair again.
"""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tiered.dispatch.uploads import Uploader
from tiered.errors import InvalidError
from tiered.journal.lease import Holder, Lease
from tiered.journal.writer import JournalWriter
from tiered.log.repair import (
    PartBytes,
    SegmentRepair,
    Unrepaired,
    name_of,
    plan_repairs,
    recover_bytes,
)
from tiered.log.seal import seal_action
from tiered.log.state import TierMachine, TierState
from tiered.plugin.ends import require_conditional_writes
from tiered.plugin.workplace import GIVE_UP_S

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable

    from typing_extensions import Buffer

    from backends.base import ObjectStore
    from tiered.clock import Clock
    from tiered.local.face import LocalStore
    from tiered.log.parts import ObjectRange, Part

LEASE_SECONDS = 60.0


@dataclass(slots=True)
class RepairReport:
    """What was repaired.

    Attributes:
        parts: Parts that have new objects.
        repaired_bytes: Their payloads.
        unrepaired: What stays damaged, and why.
    """

    parts: int = 0
    repaired_bytes: int = 0
    unrepaired: list[Unrepaired] = field(default_factory=list)


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
        self._report = RepairReport()

    def run(self, damaged: Iterable[str]) -> RepairReport:
        """Repair what can be repaired.

        Args:
            damaged: Whole keys of damaged or missing objects.

        Raises:
            FencedError: A writer holds the lease, or took over.
            InvalidError: The local store is not the one that the tier belongs to.
            BackendError: The tier's store does not answer; what was done stays.
        """
        self._journal.catch_up()
        self._require_same_store()
        repairs, self._report.unrepaired = plan_repairs(
            self._journal.state, self._prefix, frozenset(damaged)
        )
        try:
            for repair in repairs:
                self._segment(repair)
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

    def _segment(self, repair: SegmentRepair) -> None:
        made: dict[Part, Part] = {}
        for part in repair.damaged:
            found = recover_bytes(self._store, self._prefix, self._local, repair.queue, part)
            if isinstance(found, str):
                self._report.unrepaired.append(Unrepaired(name_of(repair.queue, part), found))
                continue
            uploader = self._reigning()
            made[part] = _upload(uploader, repair, part, found)
        if not made:
            return
        segment = repair.segment
        parts = [made.get(part, part) for part in segment.parts]
        action = seal_action(repair.queue, repair.incarnation, segment.base_offset, parts)
        self._journal.append([action])
        life = self._journal.state.life(repair.queue)
        named = set(life.parts()) if life else set()
        for part, new in made.items():
            if new in named:
                self._report.parts += 1
                self._report.repaired_bytes += part.log.size_bytes + part.index.size_bytes
            else:
                reason = "the tier has moved on meanwhile"
                self._report.unrepaired.append(Unrepaired(name_of(repair.queue, part), reason))

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
                escapes_case=not able.distinguishes_case,
            )
        elif self._clock.monotonic_s() >= self._renew_at_s:
            self._lease.renew()
        else:
            return self._uploader
        self._renew_at_s = self._clock.monotonic_s() + self._lease.renewal_seconds
        return self._uploader


def _upload(uploader: Uploader, repair: SegmentRepair, part: Part, found: PartBytes) -> Part:
    queue, incarnation = repair.queue, repair.incarnation
    description: dict[str, Any] = {
        "topic": queue.topic,
        "queue_id": queue.queue_id,
        "incarnation": incarnation,
        "segment": repair.segment.base_offset,
        "log_offset": part.log_offset,
        "queue_offset": part.queue_offset,
        "count": part.count,
        "store_min_ms": part.store_min_ms,
        "store_max_ms": part.store_max_ms,
        "merged": 1,  # so that a rebuild does not take it for a reign that began to write here
    }

    if (segment := repair.segment).merged:
        description["joined"] = [segment.base_queue_offset, segment.parts[-1].queue_end]

    def put(key: str, data: Buffer, **more: object) -> ObjectRange:
        buffers = [data] if memoryview(data).nbytes else []
        return uploader.put_merged(key, buffers, {**description, **more})

    log_key = uploader.next_log_key(queue, incarnation, part.log_offset)
    log = put(log_key, found.log, kind="commitlog")
    index_key = uploader.next_index_key(queue, incarnation, part.queue_offset)
    more = {"log_key": log_key, "log_crc": log.crc, "holes": part.holes}
    index = put(index_key, found.items, kind="consumequeue", **more)
    return replace(part, log=log, index=index)
