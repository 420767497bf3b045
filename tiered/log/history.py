"""The recent history of a tier: not only what is named now, but also what was named within a grace.

A reader may hold any state that was the newest at most one grace ago. So a base is found, an entry that was there before
that, and every key that is named by the state after it, or by any later entry, is *protected*. Ages are told by the
store's own times of the journal's objects.

When the journal was trimmed so that no base is left, nothing is known about the grace, and ``covers`` is False.

Threads: one. ``follow`` moves it on.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from backends.lazy_dataclass import dataclass
from tiered.errors import DataError
from tiered.journal.checkpoint import CHECKPOINTS_KEPT, replay_starts, trim_bound
from tiered.journal.replay import JournalReader
from tiered.keys import DATA_ROOTS, entry_key, maker_of, parse_journal_key
from tiered.log.bundles import named_sections
from tiered.log.state import TierMachine

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

    from backends.base import ObjectInfo, ObjectStore
    from tiered.journal.entry import Action, Entry
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
