"""Makes bundles and puts them into the store. No state but the count of objects begun.

Retries and errors: nothing is retried here. A failed or unknown outcome is answered by other bundles under other keys,
never by asking what became of the first (invariants I4, I7).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiered import keys
from tiered.crashpoints import reached
from tiered.format.bundle import build_section, build_tail, pack_table
from tiered.format.object import build_object
from tiered.log.bundles import NamedSections, SectionRow, sections_of, table_of
from tiered.log.composite import CommitColumns, GroupCommit
from tiered.log.parts import Bundle
from tiered.model import QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from backends.base import ObjectStore
    from tiered.clock import Clock
    from tiered.format.bundle import Section, SectionTable
    from tiered.log.merge import MergeOutput


@dataclass(frozen=True, slots=True)
class StoredBundle:
    """A bundle that is durable.

    Attributes:
        table: Of its sections.
        packed: The same, as it stands in the bundle.
        named: Its sections as parts.
    """

    table: SectionTable
    packed: bytes
    named: NamedSections

    @property
    def bundle(self) -> Bundle:
        """Which."""
        return self.named.bundle


@dataclass(frozen=True, slots=True)
class Durable:
    """A commit whose section is durable: a dispatch request. The records' bytes are let go.

    Attributes:
        commit: Without its batches.
        stored: The bundle that its section lies in.
        number: Of the section in the bundle.
        missing: Holes where the local store should have a record, and has none.
        quarantined: Damaged records put into quarantine.
    """

    commit: GroupCommit
    stored: StoredBundle
    number: int
    missing: int
    quarantined: int

    @property
    def queue_offset(self) -> int:
        """At which the section begins that the journal is to name: that of the commit."""
        return int(self.stored.table.rows["queue_offset"][self.number])

    @property
    def start(self) -> int:
        """Position of the section in the bundle."""
        return int(self.stored.table.rows["start"][self.number])


class Uploader:
    """Puts objects under keys that no other try has. From any thread.

    Attributes:
        on_stored: Told of commits that are durable and about to be named, in the order of each queue, while they still
            have their records; must not raise.
    """

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        *,
        generation: int,
        writer: str,
        clock: Clock,
        escapes_case: bool = False,
        first: int = 0,
    ) -> None:
        """Begin.

        Args:
            store: Where the objects go.
            prefix: Of the broker.
            generation: Our reign.
            writer: Our id.
            clock: Keys of bundles begin with the time.
            escapes_case: The store takes names for one that differ only in case (``tiered.keys``).
            first: Sequence number of the first object. Of a guest under another's reign it is greater than the writer's
                are, since a lost journal is rebuilt from what has the greatest.
        """
        self._store = store
        self._escapes_case = escapes_case
        self._prefix = prefix
        self._generation = generation
        self._writer = writer
        self._clock = clock
        self._sequence = itertools.count(first)
        self.on_stored: Callable[[Sequence[tuple[GroupCommit, Durable]]], None] = lambda _some: None

    def put_commits(self, commits: Sequence[GroupCommit], *, alone: bool) -> StoredBundle:
        """Upload commits as one bundle of level 0, in this order.

        Args:
            commits: Sorted by topic, queue id and offset.
            alone: They are of one queue, and the bundle is its own.

        Raises:
            BackendError: Not stored, or nobody knows.
        """
        reached("bundle-begun")
        said = CommitColumns.of(commits)
        rows = map(_row, commits, said.holes, said.low_ms, said.high_ms)
        built = map(build_section, (commit.data() for commit in commits), said.items)
        sections = list(zip(rows, built, strict=True))
        first = commits[0]
        if alone:
            key = keys.queue_bundle_key(
                "",
                first.queue,
                first.incarnation,
                first.queue_offset,
                self.next_id(),
                escapes_case=self._escapes_case,
            )
        else:
            key = keys.bundle_key("", 0, self._clock.now_ms(), self.next_id())
        stored = self._put_bundle(key, sections, 0)
        reached("bundle-stored")
        return stored

    def put_merged(
        self, output: MergeOutput, sections: Sequence[tuple[SectionRow, Section]]
    ) -> StoredBundle:
        """Upload a bundle made by a merge.

        Raises:
            BackendError: Not stored, or nobody knows.
        """
        made, escapes = self.next_id(), self._escapes_case
        now_ms, level = self._clock.now_ms(), output.level
        row = sections[0][0]
        if output.queue is not None:
            place = output.queue, row.incarnation, QueueOffset(row.queue_offset)
            key = keys.queue_bundle_key("", *place, made, escapes_case=escapes)
        elif output.topic:
            key = keys.topic_bundle_key("", output.topic, level, now_ms, made, escapes_case=escapes)
        else:
            key = keys.bundle_key("", level, now_ms, made)
        return self._put_bundle(key, sections, level)

    def _put_bundle(
        self, key: str, sections: Sequence[tuple[SectionRow, Section]], level: int
    ) -> StoredBundle:
        table = table_of(((row, section.place) for row, section in sections), level)
        packed = pack_table(table)
        tail = build_tail(table, packed)
        buffers = [buffer for _, section in sections for buffer in section.buffers]
        self._store.put_if_absent(self._prefix + key, [*buffers, tail])
        size = sum(section.place.size_bytes for _, section in sections) + len(tail)
        return StoredBundle(table, packed, sections_of(Bundle(key, size, level), table))

    def put_quarantine(self, commit: GroupCommit) -> int:
        """Upload the raw bytes and the reason of each damaged record; how many there were.

        Raises:
            BackendError: Not all are stored.
        """
        damaged = commit.quarantined
        for record in damaged:
            key = keys.quarantine_key(
                "",
                commit.queue,
                commit.incarnation,
                record.queue_offset,
                self.next_id(),
                escapes_case=self._escapes_case,
            )
            description = {
                "kind": "quarantine",
                "topic": commit.queue.topic,
                "queue_id": commit.queue.queue_id,
                "incarnation": commit.incarnation,
                "queue_offset": record.queue_offset,
                "physical_offset": record.physical_offset,
                "reason": record.reason.name,
                "detail": record.detail,
            }
            made = build_object([record.raw], description)
            self._store.put_if_absent(self._prefix + key, made.buffers)
            reached("quarantine-stored")
        return len(damaged)

    def next_id(self) -> keys.ObjectId:
        """Id of an object that is about to be begun."""
        return keys.ObjectId(self._generation, self._writer, next(self._sequence))


def _row(commit: GroupCommit, holes: int, low: int, high: int) -> SectionRow:
    return SectionRow(
        commit.queue,
        commit.incarnation,
        commit.segment,
        commit.log_offset,
        commit.queue_offset,
        holes,
        low,
        high,
        commit.last,
    )
