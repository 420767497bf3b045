"""What bundles hold that nobody names any more, though something in them is named: messages that were given up.

Sections lie one behind another from a bundle's beginning, its own table and a footer behind them. So what lies between
sections that are named, or in one of which only some items are, is named by nobody. Behind the last one there may be more
as well; whether there is, the length of the table tells: the table of what is named, packed as an upload packs it, is just
as long as what stands there, or the bundle is suspect (``GivenUp.is_sure`` is False), and its footer has to be read.

Pure. By columns: a million parts cost their rows once more while it is looked, and some seconds: 0.2 ms a bundle and 5 us a
section.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np

from tiered.format.bundle import FOOTER_BYTES, SECTION_ROW, SectionTable, pack_table
from tiered.log.bundles import PLAIN
from tiered.log.parts import PART
from tiered.log.takeback import is_tail

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from tiered.log.parts import Bundle, Segment, TierState
    from tiered.model import MessageQueue

_OF_SECTION = tuple((theirs, mine) for mine, theirs in PLAIN if mine not in {"count", "log_bytes"})
"""Columns of a table's row, and of ``PART`` what is said there of the whole section."""


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A bundle of which something is named, and not all.

    Attributes:
        bundle: It.
        named_end: Where the last section ends that is named.
        size_bytes: By how much the bundle would shrink, about: what is not named, with its rows in the bundle's table.
        is_sure: The journal alone proves it; else nobody knows what lies from ``named_end`` on before its footer is read.
    """

    bundle: Bundle
    named_end: int
    size_bytes: int
    is_sure: bool


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
    """All parts of a state, one behind the other.

    Attributes:
        bundles: Every one that is named.
        of_bundle: int64[n], the number of each part's bundle.
        rows: ``PART``, one a part.
    """

    def __init__(self, state: TierState) -> None:
        places = [
            (queue, life.incarnation, segment, is_tail(lives, number))
            for queue, lives in state.queues.items()
            for number, life in enumerate(lives)
            for segment in life.segments
        ]
        segments = [segment for _, _, segment, _ in places]
        lengths = np.array([len(segment.parts) for segment in segments], np.int64)
        self._topics: dict[str, int] = {}
        self._places = np.array([self._place(*place) for place in places], np.int64).reshape(-1, 5)
        self._names = list(self._topics)
        self._of_place = np.repeat(np.arange(len(segments)), lengths)
        # As bytes: of structured rows NumPy would hold every field against every other first.
        rows = [segment.parts.rows.view(np.uint8) for segment in segments]
        self.rows: npt.NDArray[np.void] = np.concatenate(rows or [np.empty(0, np.uint8)]).view(PART)
        numbers: dict[str, int] = {}
        self.bundles: list[Bundle] = []
        self.of_bundle = np.empty(len(self.rows), np.int64)
        every = chain.from_iterable(segment.parts.bundles for segment in segments)
        for at, bundle in enumerate(every):
            number = self.of_bundle[at] = numbers.setdefault(bundle.key, len(numbers))
            if number == len(self.bundles):
                self.bundles.append(bundle)

    def _place(
        self, queue: MessageQueue, incarnation: int, segment: Segment, is_taken_back: bool
    ) -> tuple[int, ...]:
        topic = self._topics.setdefault(queue.topic, len(self._topics))
        return topic, queue.queue_id, incarnation, int(segment.base_offset), int(is_taken_back)

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
        rows["taken_back"] = places[:, 4] if level else 0  # what is committed was not taken back
        return SectionTable([self._names[topic] for topic in found], rows, level)
