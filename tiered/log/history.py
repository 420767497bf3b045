"""The recent history of a tier: not only what is named now, but also what was named within a grace.

A reader may hold any state that was the newest at most one grace ago. So a base is found, an entry that was there before
that, and every key that is named by the state after it, or by any later entry, is *protected*. Ages are told by the
store's own times of the journal's objects.

When the journal was trimmed so that no base is left, nothing is known about the grace, and ``covers`` is False.

Threads: one. ``follow`` moves it on.
"""

from __future__ import annotations

import re
from dataclasses import field
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from backends.lazy_dataclass import dataclass
from tiered import keys
from tiered.errors import DataError
from tiered.format.bundle import FOOTER_BYTES, SECTION_ROW, SectionTable, pack_table
from tiered.journal.replay import (
    CHECKPOINTS_KEPT,
    JournalReader,
    is_trimmed,
    replay_starts,
    trim_bound,
)
from tiered.keys import DATA_ROOTS, entry_key, maker_of, parse_journal_key
from tiered.log.bundles import PLAIN, named_sections
from tiered.log.parts import PART
from tiered.log.state import TierMachine

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Sequence

    import numpy.typing as npt

    from backends.base import ObjectInfo, ObjectStore
    from tiered.journal.entry import Action, Entry
    from tiered.keys import DataKey
    from tiered.log.parts import Bundle, Incarnation, Part, Segment, TierState
    from tiered.model import MessageQueue

# -- named --------------------------------------------------------------------------------------------
#
# What a state names: objects, and the parts that lie in each bundle. Pure.


@dataclass(frozen=True, slots=True)
class NamedPart:
    """A part, and where it stands in the state."""

    queue: MessageQueue
    number: int  # of the incarnation among the queue's incarnations
    incarnation: Incarnation  # that incarnation
    segment: int  # base log offset of its segment
    part: Part
    truncated: bool  # the incarnation is what the broker truncated


def named_bundles(state: TierState) -> dict[str, Bundle]:
    """Every bundle that parts lie in, by its key below the prefix."""
    known: dict[int, Bundle] = {}  # by identity first: parts share their bundle nearly always
    for parts in (parts for one in state.placed() for parts in one.incarnation.tables()):
        known.update(zip(map(id, parts.bundles), parts.bundles, strict=True))
    return {bundle.key: bundle for bundle in known.values()}


def named_objects(state: TierState) -> dict[str, int]:
    """Size of every bundle and index object that is named, by its key below the prefix."""
    sizes = {key: bundle.size_bytes for key, bundle in named_bundles(state).items()}
    return sizes | {one.place.key: one.place.object_bytes for one in state.indexes}


def parts_by_bundle(
    state: TierState, keys: Container[str] | None = None
) -> Iterator[tuple[Bundle, list[NamedPart]]]:
    """The parts of each bundle, in the order of their keys; each bundle's as they lie in it."""
    wanted = {
        key: number
        for number, key in enumerate(sorted(named_bundles(state)))
        if keys is None or key in keys
    }
    places = [(one, segment) for one in state.placed() for segment in one.incarnation.segments]
    of_bundle, of_place, at = _columns([segment for _, segment in places], wanted)
    order = np.lexsort((at, of_bundle))
    of_bundle, of_place, at = of_bundle[order], of_place[order], at[order]
    borders = np.flatnonzero(np.diff(of_bundle, prepend=-2, append=-2))
    for begin, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        rows = zip(of_place[begin:end].tolist(), at[begin:end].tolist(), strict=True)
        found: list[NamedPart] = []
        for place, row in rows:
            one, segment = places[int(place)]
            part = segment.parts[int(row)]
            found.append(NamedPart(*one[:3], segment.base_offset, part, one.truncated))
        found.sort(key=lambda one: (one.part.section.start, one.part.items_at))
        yield found[0].part.bundle, found


Columns = tuple[np.ndarray, np.ndarray, np.ndarray]


def _columns(segments: list[Segment], wanted: dict[str, int]) -> Columns:
    """For each part its bundle's number, its segment's, and its row there."""
    counts = np.array([len(segment.parts) for segment in segments], np.int64)
    every = chain.from_iterable(segment.parts.bundles for segment in segments)
    of_bundle = np.fromiter(
        (wanted.get(bundle.key, -1) for bundle in every), np.int64, int(counts.sum())
    )
    of_place = np.repeat(np.arange(len(segments)), counts)
    at = np.arange(len(of_bundle)) - np.repeat(np.cumsum(counts) - counts, counts)
    is_wanted = of_bundle >= 0
    return of_bundle[is_wanted], of_place[is_wanted], at[is_wanted]


# -- history --------------------------------------------------------------------------------


_NAMING = frozenset(("part", "index"))
"""Actions that name what their own writer has just made, or are counted as refused."""
_MERGE = "merge"
"""An action that may come too late, which nobody counts."""


class TierHistory:
    """A journal, replayed entry by entry.

    Attributes:
        base: The state at its beginning, or before; None unless ``covers``.
        once_named: Keys below the prefix that were part of history before the grace: made by any process; none of them that
            is not named now will ever be named again.
        bound: The journal may be trimmed up to this checkpoint, which is whole as another behind it is; 0: not at all.
        problems: What is strange about checkpoints that would be relied on: one says another thing than replay.
    """

    def __init__(
        self, store: ObjectStore, prefix: str, journal: Sequence[ObjectInfo], old_ms: int
    ) -> None:
        """Replay to the head.

        Args:
            old_ms: What was written at this time of the store or before is older than the grace.
        """
        self._store = store
        self._prefix = prefix
        self._entries: dict[int, int] = {}
        self._checkpoints: dict[int, int] = {}
        for info in journal:
            parsed = parse_journal_key(prefix, info.key)
            if parsed:
                (self._checkpoints if parsed[1] else self._entries)[parsed[0]] = info.modified_ms
        self._old_ms = old_ms
        self._forget()
        self._replay()

    def _forget(self) -> None:
        """Know nothing but the listing."""
        self._reader = JournalReader(self._store, self._prefix, TierMachine())
        self._names: set[str] = set()
        self._checksums: dict[int, int] = {}
        self.problems: list[str] = []
        self.once_named: set[str] = set()
        self.base: TierState | None = None
        self.bound = 0

    @property
    def state(self) -> TierState:
        """After the last entry that was applied."""
        return self._reader.state

    @property
    def number(self) -> int:
        """Of that entry."""
        return self._reader.number

    @property
    def checksum(self) -> int:
        """Of that entry."""
        return self._reader.last

    @property
    def covers(self) -> bool:
        """Whether the history reaches back over the whole grace."""
        return self.base is not None

    def checksum_of(self, number: int) -> int | None:
        """Checksum of an entry; None when the history does not reach back so far, or forward."""
        return self._checksums.get(number)

    def protected(self) -> set[str]:
        """Keys, below the prefix, that are named or were within the grace."""
        bases = [self.state] if self.base is None else [self.base, self.state]
        return self._names.union(*map(named_objects, bases))

    def follow(self) -> set[str]:
        """Go on to the head; the keys that new entries name."""
        new: set[str] = set()
        awaited = 0
        while True:
            while (entry := self._reader.step()) is not None:
                self._checksums[self.number] = self.checksum
                for action in entry.actions:
                    new.update(keys_of(action))
            entries, checkpoints = self._reader.behind(self.number)
            if not entries and all(number <= self.number for number in checkpoints):
                break
            if self.number + 1 in entries and self.number + 1 != awaited:
                awaited = self.number + 1  # a writer is at work: it came between the two looks
                continue
            raise DataError(
                f"journal entry {self.number + 1} is missing, and later ones are there",
                where=entry_key(self._prefix, self.number + 1),
                do="run `tiered verify`; if another gc is running, wait for it",
            )
        self._names |= new
        return new

    def _replay(self) -> None:
        """Replay from as far back as can be. What is damaged counts as missing there, so it costs only what lies before it.

        Each time something is set aside, and so this ends.
        """
        harm: DataError | None = None
        while (start := self._begin()) is not None:
            harm = self._replay_from(start)
            if harm is None:
                self.follow()
                return
            self._forget()
        raise harm or DataError(
            "neither the first journal entry nor a whole checkpoint is there to begin with",
            where=self._prefix,
            do="rebuild the journal: `tiered rebuild`",
        )

    def _replay_from(self, start: int) -> DataError | None:
        """Replay what was listed; the damage that was met, which is set aside."""
        base = self._base_number(start)
        usable = [number for number in self._checkpoints if number >= start]
        self.bound = trim_bound(usable, base)
        checked = {*sorted(usable)[-CHECKPOINTS_KEPT:], self.bound} - {0}
        if start == 0 or 0 <= self._checkpoints[start] <= self._old_ms:
            self.base = self.state
            self.once_named = set(named_objects(self.state))
        if harm := self._check(checked):
            return harm
        while self.number < max([*self._entries, *self._checkpoints], default=0):
            refused = self.state.refused_parts
            try:
                entry = self._reader.step()
            except DataError as error:
                self._entries.pop(self.number + 1, None)
                return error
            if entry is None:
                break  # `follow` says what is wrong
            self._checksums[self.number] = self.checksum
            self._note(entry, is_old=self.number <= base, refused=refused)
            if harm := self._check(checked):
                return harm
        return None

    def _note(self, entry: Entry, *, is_old: bool, refused: int) -> None:
        """Keep the keys that an entry names; ``refused`` parts there were before it."""
        if not is_old:
            for action in entry.actions:
                self._names.update(keys_of(action))
            return
        self.base = self.state
        for action in entry.actions:
            if action["do"] in _NAMING and self.state.refused_parts == refused:
                self.once_named.update(keys_of(action))
            elif action["do"] == _MERGE:
                self.once_named.update(_accepted(action, self.state))

    def _begin(self) -> int | None:
        """Go to where the history begins; its number, or None when nothing is whole from which it goes to the head."""
        for start in replay_starts(self._entries, self._checkpoints):
            if start == 0 or self._reader.jump_to(start):
                self._checksums[self.number] = self.checksum
                return start  # a damaged one goes when the journal is trimmed up to one behind it
        return None

    def _base_number(self, start: int) -> int:
        """The last entry in a row of such as are all older than the grace; 0 when there is none."""
        number = start
        while 0 <= self._entries.get(number + 1, -1) <= self._old_ms:
            number += 1
        return number if number in self._entries else 0

    def _check(self, checked: set[int]) -> DataError | None:
        """Hold a checkpoint that is to be relied on against replay; one that is damaged is set aside."""
        if self.number not in checked:
            return None
        try:
            found = self._reader.read_checkpoint(self.number)
        except DataError as error:
            del self._checkpoints[self.number]
            return error
        if found is not None and found != (self.state, self.checksum):
            self.problems.append(f"checkpoint {self.number} is not what replay gives")
        return None


def _accepted(action: Action, state: TierState) -> Iterator[str]:
    """The bundles of a merge of which replay took anything."""
    for row in action["bundles"]:
        named = named_sections(row)
        incarnations = {queue: state.queues.get(queue, ()) for queue in named.queues}
        if any(
            bundle.key == named.bundle.key
            for incarnations_of in incarnations.values()
            for incarnation in incarnations_of
            for parts in incarnation.tables()
            for bundle in parts.bundles
        ):
            yield named.bundle.key


def keys_of(action: Action) -> Iterator[str]:
    """Every key of a data object that an action mentions, whatever its kind."""
    yield from _keys_in(list(action.values()))


def _keys_in(value: Any) -> Iterator[str]:  # noqa: ANN401 (JSON values)
    if isinstance(value, str):
        if value.startswith(DATA_ROOTS) and maker_of(value):
            yield value
    elif isinstance(value, list):
        for inner in value:
            yield from _keys_in(inner)
    elif isinstance(value, dict):
        yield from _keys_in(list(value.values()))


# -- orphans -------------------------------------------------------------------------------------
#
# What gc may delete. Pure: from one listing and the history behind it to a list of keys, in the order of deletion.
#
# With it: what bundles hold that nobody names, beside what somebody does (``given_up``).
#
# Rules, all of which must hold for a data object:
#     * no entry names it, nor did any within the grace (``TierHistory.protected``);
#     * its epoch is below the present one, so that nobody can name it any more; or it was named once (and merged, or has
#       expired): no writer names an object twice;
#     * it was written longer ago than the grace, by the store's own time.
#
# Quarantined records go when their queue offset has expired; entries and checkpoints when the journal is trimmed behind
# them (``tiered.journal.replay``); so do second copies of checkpoints, but for the newest two: where copying has
# failed since, these may be older than what is left of the journal. Probe objects, left by a crash in the middle of a
# probe, go by their age alone; records of the ledger when they are older than ``LEDGER_KEPT_MS``, too. What this program
# does not know is never deleted, only named.
#
# When anything is missing or strange (``OrphanPlan.refusals``) nothing at all is to be deleted.

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
