"""Merges the small parts of a segment, or of neighbours that become one. What is to be merged ``tiered.log.seal`` decides.

Ordering: the merged data object, then the merged index object; then, by the caller, the ``seal`` or ``join`` action that
names both. What was merged is named by no entry any more, and is collected as an orphan after the grace.

Retries and errors: nothing is retried here, but a job can be gone on with: it keeps what is stored, so that a failure costs
at most one orphan. Every byte read is checked; a damaged or missing part is a ``DataError``.

Memory: one merged object (at most ``SealPolicy.merged_bytes_max``, or one part that is larger), one part, and the copy of
the merged object that some stores need; compressed blocks once more, but never more than the object.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from backends.errors import InvalidRangeError, ObjectNotFoundError
from tiered.crashpoints import reached
from tiered.errors import DataError
from tiered.log.objects import read_range
from tiered.log.parts import ObjectRange, Part
from tiered.log.seal import SealPlan, seal_action, summary

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from backends.base import ObjectStore
    from tiered.dispatch.packing import Packer
    from tiered.dispatch.uploads import Uploader
    from tiered.journal.entry import Action


@dataclass(slots=True)
class SealJob:
    """A segment that is being sealed, or neighbours that become one.

    Attributes:
        plan: What is to be made.
        parts: The parts for its first runs, as far as they are made.
        log: Merged records of the next run, when only its index is missing.
    """

    plan: SealPlan
    parts: list[Part] = field(default_factory=list)
    log: ObjectRange | None = None

    def action(self) -> Action:
        """What the journal is to say when all is made."""
        plan, first = self.plan, self.plan.segment
        start = first.base_queue_offset if plan.joins else None
        return seal_action(plan.queue, plan.incarnation, first.base_offset, self.parts, start=start)

    def made_logs(self) -> list[ObjectRange]:
        """The commit-log objects that were written."""
        pairs = zip(self.plan.runs, self.parts, strict=True)
        return [part.log for run, part in pairs if part.log.key != run[0].log.key]

    def rewritten(self) -> tuple[int, int]:
        """How many parts were written anew, and the bytes of what they became (records and index, before compression)."""
        merged = [
            (len(run), part)
            for run, part in zip(self.plan.runs, self.parts, strict=True)
            if part.log.key != run[0].log.key
        ]
        sizes = [part.log.size_bytes + part.index.size_bytes for _, part in merged]
        return sum(count for count, _ in merged), sum(sizes)


class Sealer:
    """Makes merged parts. One thread at a time."""

    def __init__(
        self,
        uploader: Uploader,
        store: ObjectStore,
        prefix: str,
        pace: Callable[[int], None] = lambda _bytes: None,
        *,
        packer: Packer | None = None,
    ) -> None:
        """Wire it.

        Args:
            uploader: Makes the objects.
            store: Where the parts are read.
            prefix: The broker's, ending in a slash.
            pace: Called with the bytes of each upload before it begins; may wait.
            packer: Compresses records, where the plan says so.
        """
        self._uploader = uploader
        self._store = store
        self._prefix = prefix
        self._pace = pace
        self._packer = packer

    def advance(self, job: SealJob, stop: Callable[[], bool] = lambda: False) -> bool:
        """Make what is still missing.

        Args:
            job: Where to go on; after an error or a stop it may be given again.
            stop: Asked before each request.

        Returns:
            False when told to stop; then something is still missing.

        Raises:
            BackendError: A part could not be read, or an object not written.
            DataError: A part is damaged or gone.
        """
        for run in job.plan.runs[len(job.parts) :]:
            part = self._merge(job, run, stop) if job.plan.is_rewritten(run) else run[0]
            if part is None:
                return False
            job.parts.append(part)
        return True

    def _merge(self, job: SealJob, run: Sequence[Part], stop: Callable[[], bool]) -> Part | None:
        plan, first = job.plan, run[0]
        *_, holes, low, high = summary(run)
        count = sum(part.count for part in run)
        description: dict[str, Any] = {
            "topic": plan.queue.topic,
            "queue_id": plan.queue.queue_id,
            "incarnation": plan.incarnation,
            "segment": plan.segment.base_offset,
            "log_offset": first.log_offset,
            "queue_offset": first.queue_offset,
            "count": count,
            "store_min_ms": low,
            "store_max_ms": high,
            "merged": len(run),
        }
        if plan.joins:
            ends = plan.segments[-1].parts[-1].queue_end
            description["joined"] = [plan.segment.base_queue_offset, ends]
        if job.log is None:
            data = self._join([part.log for part in run], stop)
            if data is None:
                return None
            key = self._uploader.next_log_key(plan.queue, plan.incarnation, first.log_offset)
            log = self._put_log(key, job.plan, run, data, {**description, "kind": "commitlog"})
            if log is None:
                return _kept(run[0])
            job.log = log
            del data  # before the index is read
            reached("merged-log-stored")
        more = {"kind": "consumequeue", "log_key": job.log.key, "log_crc": job.log.crc}
        items = self._join([part.index for part in run], stop)
        if items is None:
            return None
        key = self._uploader.next_index_key(plan.queue, plan.incarnation, first.queue_offset)
        index = self._put(key, items, {**description, **more, "holes": holes})
        reached("merged-index-stored")
        log, job.log = job.log, None
        start = first.log_offset, first.queue_offset
        return Part(log, index, *start, count, holes, low, high, run[-1].last)

    def _join(self, places: Sequence[ObjectRange], stop: Callable[[], bool]) -> bytearray | None:
        """The places' bytes; None when told to stop."""
        data = bytearray(sum(place.size_bytes for place in places))
        room = memoryview(data)
        for place in places:
            if stop():
                return None
            if place.size_bytes:  # a part of holes only has no records
                room[: place.size_bytes] = self._read(place)
                room = room[place.size_bytes :]
        return None if stop() else data

    def _read(self, place: ObjectRange) -> memoryview:
        try:
            return read_range(self._store, self._prefix, place, place.start, place.end)
        except (ObjectNotFoundError, InvalidRangeError) as error:
            raise DataError(
                f"an object that the journal names is not there: {error}",
                where=self._prefix + place.key,
                do="run `tiered verify` to see what is damaged",
            ) from error

    def _put_log(
        self, key: str, plan: SealPlan, run: Sequence[Part], data: bytearray, description: Action
    ) -> ObjectRange | None:
        """Upload records, compressed if it is asked for and worth it; None for one part that stays as it is."""
        if not plan.packs or self._packer is None or not data:
            return self._put(key, data, description)
        made = self._packer.pack(plan.queue.topic, data, description)
        if made is not None:
            self._pace(made.packed_bytes)
            return self._uploader.put_made(key, made)
        if len(run) == 1:
            return None
        plain = self._put(key, data, description)
        return replace(plain, packed_bytes=plain.payload_bytes)

    def _put(self, key: str, data: bytearray, description: Action) -> ObjectRange:
        self._pace(len(data))
        return self._uploader.put_merged(key, [data] if data else [], description)


def _kept(part: Part) -> Part:
    """A part that compressing would not make smaller: the journal says so, and nobody tries again."""
    return replace(part, log=replace(part.log, packed_bytes=part.log.payload_bytes))
