"""Whether what a tier holds is in an archive, so that the tier may give it up. Everything doubtful means: no.

A segment may go when the archive's log has each of its offsets, of the same store times and of this very history of the
queue, no more holes among them than the tier knows of, and every file that these offset ranges name is there with the bytes
that the log says: each is read, and its checksum computed. OffsetRanges must lie within the segment, since times say nothing
of one that reaches far beyond it. Objects that the segment still has, as when it was archived, must be the same version.

What a broker truncated is in no archive, and stays. Nothing is changed. One thread; what was read is not read again.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from backends.errors import ObjectNotFoundError
from tiered.archive.checked_ranges import read_proven
from tiered.archive.columns import hole_text
from tiered.archive.model import KAFKA_SCHEMA, ArchiveQueue
from tiered.archive.parquet import read_columns
from tiered.archive.plan import has_times, overtaken_by
from tiered.errors import DataError
from tiered.local.interface import HoleReason
from tiered.log.ranges import Ranges, without
from tiered.log.state import is_tail

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from backends.base import ObjectStore
    from tiered.api.broker_place import Place
    from tiered.archive.machine import ArchiveState
    from tiered.archive.model import Archived, ParquetFile, SideFile
    from tiered.log.parts import Incarnation, Segment, TierState
    from tiered.model import MessageQueue

LISTED = 1000
"""Segments named in a plan among those that stay."""


class ArchiveProof:
    """What an archive proves of a tier; see ``tiered.upkeep.expire.ExpiryProof``."""

    def __init__(
        self,
        tier: ObjectStore,
        place: Place,
        archive: ObjectStore,
        state: ArchiveState,
        url: str,
    ) -> None:
        """Nothing is read yet."""
        self._tier = tier
        self._place = place
        self._archive = archive
        self._state = state
        self._url = url
        self._wrong: dict[str, str] = {}
        self._left: list[dict[str, Any]] = []
        self._damaged: list[str] = []

    @property
    def url(self) -> str:
        """Of the archive."""
        return self._url

    def holds(self, state: TierState, queue: MessageQueue, number: int, segment: Segment) -> bool:
        """Whether the archive has the segment whole, and its files are what the log says."""
        incarnation, place = state.queues[queue][number], self._place
        archived_queue = ArchiveQueue(
            place.cluster, place.broker, queue.topic, queue.queue_id, incarnation.number
        )
        start = int(max(segment.parts[0].queue_offset, incarnation.min_offset))
        end = int(segment.parts[-1].queue_end)
        known = self._state.overlapping(archived_queue, start, end)
        why = self._broken(archived_queue, state.queues[queue], number)
        why = why or _missing(known, segment, start, end, self._hidden)
        damage = "" if why else self._damage(known, segment)
        if damage and damage not in self._damaged:
            self._damaged.append(damage)
        if why or damage:
            span = {"start": int(segment.base_queue_offset), "end": end}
            self._left.append({**queue._asdict(), **span, "why": why or damage})
        return not (why or damage)

    def document(self) -> dict[str, Any]:
        """For a plan: the archive, what stays for want of proof, and what is wrong with the archive."""
        return {"archive": self._url, "unproved": self._left[:LISTED], "refusals": self._damaged}

    def _broken(self, queue: ArchiveQueue, incarnations: Sequence[Incarnation], number: int) -> str:
        """Whether an incarnation is of another history than the archive."""
        ends = [one for n, one in enumerate(incarnations) if is_tail(incarnations, n)]
        if is_tail(incarnations, number):
            return "the broker truncated it, so it is in no archive"
        mine = (one for one in ends if one.number == queue.incarnation)
        if any(overtaken_by(self._state, queue, one) for one in mine):
            return "the archive does not know yet what the broker truncated: archive first"
        return ""

    def _damage(self, known: Iterable[Archived], segment: Segment) -> str:
        for archived in known:
            for file in archived.objects():
                if file.key not in self._wrong:
                    self._wrong[file.key] = self._look(file)
                if wrong := self._wrong[file.key]:
                    return wrong
            if wrong := self._sources(archived, segment):
                return wrong
        return ""

    def _hidden(self, known: Iterable[Archived]) -> int:
        """Holes of an archive where a tier of Kafka's has items: of what is hidden, and of what the cleaner took."""
        count = 0
        for side in (one.side for one in known if one.schema == KAFKA_SCHEMA and one.side):
            with suppress(DataError):  # ``_damage`` tells of it
                reasons = read_columns(read_proven(self._archive, side))["reason"].to_pylist()
                count += sum(map(_EXPLAINED.__contains__, reasons))
        return count

    def _look(self, file: ParquetFile | SideFile) -> str:
        try:
            read_proven(self._archive, file)
        except DataError as error:
            return f"{file.key}: {error.what}"
        return ""

    def _sources(self, archived: Archived, segment: Segment) -> str:
        """What is wrong with objects that were archived and are still the segment's."""
        present = {bundle.key for bundle in segment.parts.bundles}
        for key, version in archived.sources:
            if key not in present or not version:
                continue
            try:
                found = str(self._tier.head(self._place.prefix + key).version or "")
            except ObjectNotFoundError:
                return f"{key}: the tier's object is gone"
            if version != found:
                return f"{key}: the tier's object is another version than was archived"
        return ""


_EXPLAINED = frozenset(map(hole_text, (HoleReason.HIDDEN, HoleReason.COMPACTED)))


def _missing(
    known: list[Archived],
    segment: Segment,
    start: int,
    end: int,
    hidden: Callable[[list[Archived]], int],
) -> str:
    """What of the offsets of a segment is not archived, or not for certain."""
    left: Ranges = ((start, end),) if start < end else ()
    for one in known:
        left = without(left, one.start, one.end)
    if left:
        return f"offsets [{left[0][0]}, {left[0][1]}) are not archived"
    if any(one.start < start or one.end > end for one in known):
        return "the archive was made of other segments there: it is another tier's, or older than this history"
    more = sum(one.holes for one in known) - segment.parts.holes
    if more > 0 and more > hidden(known):
        return "the archive has holes where the tier has messages"
    if not has_times(known, segment, start, end):
        return "the archive has messages of other times there: it is another tier's"
    return ""


def _row(queue: MessageQueue, segment: Segment, why: str) -> dict[str, Any]:
    return {
        "topic": queue.topic,
        "queue_id": queue.queue_id,
        "start": int(segment.base_queue_offset),
        "end": int(segment.parts[-1].queue_end),
        "why": why,
    }
