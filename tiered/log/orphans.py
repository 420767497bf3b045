"""What gc may delete. Pure: from one listing and the history behind it to a list of keys, in the order of deletion.

With it: what bundles hold that nobody names, beside what somebody does (``given_up``).

Rules, all of which must hold for a data object:
    * no entry names it, nor did any within the grace (``TierHistory.protected``);
    * its epoch is below the present one, so that nobody can name it any more; or it was named once (and merged, or has
      expired): no writer names an object twice;
    * it was written longer ago than the grace, by the store's own time.

Quarantined records go when their queue offset has expired; entries and checkpoints when the journal is trimmed behind them
(``tiered.journal.checkpoint``); so do second copies of checkpoints, but for the newest two: where copying has failed since,
these may be older than what is left of the journal. Probe objects, left by a crash in the middle of a probe, go by their age
alone; records of the ledger when they are older than ``LEDGER_KEPT_MS``, too. What this program does not know is never
deleted, only named.

When anything is missing or strange (``OrphanPlan.refusals``) nothing at all is to be deleted.
"""

from __future__ import annotations

import re
from dataclasses import field
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np

from backends.lazy_dataclass import dataclass
from tiered import keys
from tiered.format.bundle import FOOTER_BYTES, SECTION_ROW, SectionTable, pack_table
from tiered.journal.checkpoint import CHECKPOINTS_KEPT, is_trimmed
from tiered.log.bundles import PLAIN
from tiered.log.history import named_objects
from tiered.log.parts import PART

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

    from backends.base import ObjectInfo
    from tiered.keys import DataKey
    from tiered.log.parts import Bundle, Segment, TierState
    from tiered.model import MessageQueue


KINDS = (
    "index", "bundle", "topic", "queue", "quarantine", "probe", "entry", "checkpoint", "ledger",
)  # fmt: skip
"""In the order of deletion: the key index before data, data before what the journal says of it."""
_PROBE = re.compile(r"probe-[0-9a-f]{16}-(?:put|set)")
_OTHERS = ("timer/", "meta/", keys.LEDGER)
LEDGER_KEPT_MS = 90 * 24 * 3_600_000
"""For so long the ledger says what was deleted."""
_RECORD = re.compile(r"[0-9]{20}-[0-9a-f]{8}-[0-9]{10}")
NAMES_MAX = 100
"""So many unknown keys are named; all are counted."""


@dataclass(frozen=True, slots=True)
class Deletion:
    """One object that is to be deleted."""

    key: str  # relative to the store (with the broker's prefix)
    kind: str  # one of ``KINDS``
    size_bytes: int  # as listed
    modified_ms: int  # as listed


@dataclass(slots=True)
class Left:
    """What is not named and stays; counts of objects."""

    present_epoch: int = 0  # of the present epoch: its writer may be about to name it
    within_grace: int = 0  # was named, or was written, within the grace
    uncovered: int = 0  # the journal's history does not reach back over the grace
    unknown_age: int = 0  # the store does not say when it was written
    over_limit: int = 0  # beyond the limit of one run
    quarantine: int = 0  # damaged records that were put aside
    others: int = 0  # of other features; the ledger
    unknown: int = 0  # Keys that this program does not know, and names that are no keys
    unknown_keys: list[str] = field(default_factory=list)  # the first of them

    def add_unknown(self, names: Sequence[str]) -> None:
        """Count what others have put there, and name the first."""
        self.unknown += len(names)
        self.unknown_keys += names[: max(0, NAMES_MAX - len(self.unknown_keys))]


@dataclass(slots=True)
class OrphanPlan:
    """What gc would do."""

    deletions: list[Deletion] = field(default_factory=list)  # in the order of deletion
    left: Left = field(default_factory=Left)  # what stays
    refusals: list[str] = field(default_factory=list)
    """What is missing or strange; when there is any, there are no deletions."""
    missing: set[str] = field(default_factory=set)
    """Keys below the prefix that are named and were not listed, for the caller to look at again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownObjects:
    """What the journal says, for the planner."""

    prefix: str  # of the broker
    state: TierState  # at the head, replayed after the listing
    base: TierState | None
    """The state before the grace; None when the history does not reach back so far."""
    protected: set[str]  # Keys below the prefix that are named or were within the grace
    once_named: set[str]  # Keys below the prefix that were named once, before the grace
    bound: int  # trim the journal up to this checkpoint; 0: not at all
    epoch: int  # objects of an epoch below this one can be named by nobody any more
    old_ms: int  # what was written at this time of the store or before is older than the grace
    now_ms: int  # the store's time


def plan_orphans(
    listed: Iterable[ObjectInfo], probes: Iterable[ObjectInfo], known: KnownObjects, *, limit: int
) -> OrphanPlan:
    """Decide on every object."""
    planner = _OrphanPlanner(known)
    previous = ""
    for info in listed:
        if info.key <= previous:
            planner.plan.refusals.append(f"the listing has {info.key} behind {previous}")
        previous = info.key
        planner.look(info)
    for info in probes:
        if _PROBE.fullmatch(info.key):
            planner.take_if_old(info, "probe")
    return planner.done(limit)


class _OrphanPlanner:
    def __init__(self, known: KnownObjects) -> None:
        self._known = known
        self._named = named_objects(known.state)
        self._seen: set[str] = set()
        self._mirrors: list[tuple[int, ObjectInfo]] = []
        self.plan = OrphanPlan()

    def look(self, info: ObjectInfo) -> None:
        """Sort one object in."""
        key = info.key[len(self._known.prefix) :]
        left = self.plan.left
        data = keys.parse_data_key("", key)
        index = keys.parse_index_key("", key)
        journal = keys.parse_journal_key(self._known.prefix, info.key)
        if key in self._named:
            self._hold(key, info)
        elif data:
            self._data(key, data, info)
        elif index:
            self._made(key, "index", index.epoch, info)
        elif journal:
            if is_trimmed(journal[0], self._known.bound):
                self.take_if_old(info, "checkpoint" if journal[1] else "entry")
        elif mirror := keys.parse_journal_key(self._known.prefix + keys.MIRROR, info.key):
            self._mirrors.append((mirror[0], info))
        elif key.startswith(_OTHERS):
            is_over = 0 <= info.modified_ms <= self._known.now_ms - LEDGER_KEPT_MS
            if is_over and _RECORD.fullmatch(key.removeprefix(keys.LEDGER)):
                self.take_if_old(info, "ledger")
            else:
                left.others += 1
        elif key != keys.LEASE:
            left.add_unknown([info.key])

    def done(self, limit: int) -> OrphanPlan:
        """The plan, once everything was looked at."""
        plan = self.plan
        plan.missing = self._named.keys() - self._seen
        for number, info in sorted(self._mirrors)[:-CHECKPOINTS_KEPT]:
            if is_trimmed(number, self._known.bound):
                self.take_if_old(info, "checkpoint")
        plan.deletions.sort(key=lambda one: (KINDS.index(one.kind), one.key))
        plan.left.over_limit = max(0, len(plan.deletions) - limit)
        del plan.deletions[limit:]
        if plan.refusals:
            plan.deletions.clear()
        return plan

    def take_if_old(self, info: ObjectInfo, kind: str) -> None:
        """Plan to delete it, when it was written before the grace."""
        if info.modified_ms < 0:
            self.plan.left.unknown_age += 1
        elif info.modified_ms > self._known.old_ms:
            self.plan.left.within_grace += 1
        else:
            self.plan.deletions.append(Deletion(info.key, kind, info.size_bytes, info.modified_ms))

    def _hold(self, key: str, info: ObjectInfo) -> None:
        self._seen.add(key)
        wanted = self._named[key]
        if info.size_bytes != wanted:
            self.plan.refusals.append(
                f"{info.key} has {info.size_bytes} bytes; the journal says {wanted}"
            )

    def _data(self, key: str, data: DataKey, info: ObjectInfo) -> None:
        epoch = data.object_id.epoch
        is_waste = data.kind != "quarantine" or _is_expired(self._known, data)
        if is_waste or epoch > self._known.state.epoch:
            self._made(key, data.kind, epoch, info)
        else:
            self.plan.left.quarantine += 1

    def _made(self, key: str, kind: str, epoch: int, info: ObjectInfo) -> None:
        known, left = self._known, self.plan.left
        if epoch > known.state.epoch:
            self.plan.refusals.append(
                f"{info.key} is of epoch {epoch}, and the present one is {known.state.epoch}:"
                " the journal may have lost its end"
            )
        elif key in known.protected:
            left.within_grace += 1
        elif epoch >= known.epoch and key not in known.once_named:
            left.present_epoch += 1
        elif known.base is None:
            left.uncovered += 1
        else:
            self.take_if_old(info, kind)


def _is_expired(known: KnownObjects, data: DataKey) -> bool:
    """Whether the queue offset of a quarantined record has expired, and had before the grace."""
    queue = data.queue
    incarnations = known.base.queues.get(queue, ()) if known.base and queue else ()
    mine = [incarnation for incarnation in incarnations if incarnation.number == data.incarnation]
    return any(data.begins < incarnation.min_offset for incarnation in mine) and not any(
        incarnation.min_offset <= data.begins < incarnation.commit_offset for incarnation in mine
    )


# --------------------------------------------------------------------------------------------------
# What bundles hold that nobody names any more, though something in them is named: messages that were given up.
#
# Sections lie one behind another from a bundle's beginning, its own table and a footer behind them. So what lies between
# sections that are named, or in one of which only some items are, is named by nobody. Behind the last one there may be more
# as well; whether there is, the length of the table tells: the table of what is named, packed as an upload packs it, is just
# as long as what stands there, or the bundle is suspect (``GivenUp.is_sure`` is False), and its footer has to be read.
#
# Pure. By columns: a million parts cost their rows once more while it is looked, and some seconds: 0.2 ms a bundle and 5
# us a section.
# --------------------------------------------------------------------------------------------------


_OF_SECTION = tuple((theirs, mine) for mine, theirs in PLAIN if mine not in {"count", "log_bytes"})
"""Columns of a table's row, and of ``PART`` what is said there of the whole section."""


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A bundle of which something is named, and not all."""

    bundle: Bundle
    named_end: int  # where the last section ends that is named
    size_bytes: int
    """By how much the bundle would shrink, about: what is not named, with its rows in the bundle's table."""
    is_sure: bool
    """The journal alone proves it; else nobody knows what lies from ``named_end`` on before its footer is read."""


def given_up(state: TierState) -> Iterator[GivenUp]:
    """Every bundle that holds, or may hold, what nobody names; in no order."""
    columns = _Columns(state)
    starts = columns.rows["start"].astype(np.int64)
    counts = columns.rows["count"].astype(np.int64)
    if not len(starts):
        return
    order = np.lexsort((columns.rows["items_at"], starts, columns.of_bundle))
    of_bundle, starts = columns.of_bundle[order], starts[order]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = (np.diff(of_bundle) != 0) | (np.diff(starts) != 0)
    first = np.flatnonzero(is_first)
    named = np.add.reduceat(counts[order], first)
    order, of_bundle, starts = order[first], of_bundle[first], starts[first]
    sizes = columns.rows["size_bytes"][order].astype(np.int64)
    items = columns.rows["items"][order].astype(np.int64)
    inside = sizes - sizes * np.minimum(named, items) // items
    ends = starts + sizes
    borders = np.flatnonzero(np.diff(of_bundle, prepend=-1, append=-1))
    # What lies before a section, from the end of the one before it; at the beginning of a bundle from there.
    before = np.concatenate(([0], ends[:-1]))
    before[borders[:-1]] = 0
    inside += np.maximum(starts - before, 0)
    for low, high in pairwise(borders.tolist()):
        bundle, end = columns.bundles[of_bundle[low]], int(ends[high - 1])
        table = columns.table(order[low:high], bundle.level)
        behind = bundle.size_bytes - end - FOOTER_BYTES - len(pack_table(table))
        within = int(inside[low:high].sum())
        if within or behind:
            yield GivenUp(bundle, end, within + max(0, behind), within > 0)


class _Columns:
    """All parts of a state, one behind the other."""

    def __init__(self, state: TierState) -> None:
        places = [
            (queue, incarnation.number, segment, truncated)
            for queue, _, incarnation, truncated in state.placed()
            for segment in incarnation.segments
        ]
        segments = [segment for _, _, segment, _ in places]
        lengths = np.array([len(segment.parts) for segment in segments], np.int64)
        self._topics: dict[str, int] = {}
        self._places = np.array([self._place(*place) for place in places], np.int64).reshape(-1, 5)
        self._names = list(self._topics)
        self._of_place = np.repeat(np.arange(len(segments)), lengths)
        # As bytes: of structured rows NumPy would hold every field against every other first.
        rows = [segment.parts.rows.view(np.uint8) for segment in segments]
        # ``PART``, one a part.
        self.rows: npt.NDArray[np.void] = np.concatenate(rows or [np.empty(0, np.uint8)]).view(PART)
        numbers: dict[str, int] = {}
        self.bundles: list[Bundle] = []  # every one that is named
        # int64[n], the number of each part's bundle.
        self.of_bundle = np.empty(len(self.rows), np.int64)
        every = chain.from_iterable(segment.parts.bundles for segment in segments)
        for at, bundle in enumerate(every):
            number = self.of_bundle[at] = numbers.setdefault(bundle.key, len(numbers))
            if number == len(self.bundles):
                self.bundles.append(bundle)

    def _place(
        self, queue: MessageQueue, incarnation: int, segment: Segment, is_truncated: bool
    ) -> tuple[int, ...]:
        topic = self._topics.setdefault(queue.topic, len(self._topics))
        return topic, queue.queue_id, incarnation, int(segment.base_offset), int(is_truncated)

    def table(self, chosen: npt.NDArray[np.int64], level: int) -> SectionTable:
        """The table of a bundle with just these sections, each given by a part of it, as its upload would have made it."""
        rows = np.zeros(len(chosen), SECTION_ROW)
        mine = self.rows[chosen]
        for theirs, name in _OF_SECTION:
            rows[theirs] = mine[name]
        places = self._places[self._of_place[chosen]]
        found = list(dict.fromkeys(places[:, 0].tolist()))
        numbers = {topic: number for number, topic in enumerate(found)}
        rows["topic"] = [numbers[topic] for topic in places[:, 0].tolist()]
        for at, name in enumerate(("queue_id", "incarnation", "segment"), 1):
            rows[name] = places[:, at]
        rows["truncated"] = places[:, 4] if level else 0  # what is committed was not truncated
        return SectionTable([self._names[topic] for topic in found], rows, level)
