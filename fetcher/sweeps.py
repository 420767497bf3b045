"""A reader that has said which queues it will read: what lies beside a section that is asked for, and is wanted as well.

The sections of a round lie side by side in bundles. Who reads one queue asks for its section alone. Who reads many (a
*sweep*) will want the neighbours too, so they come with the same request: the *run*. Which neighbours do is decided by
``fetcher.lanes.plan_merge``, as for all requests: small gaps, no more in vain than is wanted, and a size.

Size of a run: a quarter of the cache, divided among the bundles that the sweep goes through. So there is room for a run of
every bundle at once (records take about twice their size while they are kept), and nothing is dropped unread, whether
queues are read one after the other, which goes through all bundles for the first, or in turn, which goes from one to the
next.

Not for several threads at once: its owner holds a lock around it.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from fetcher.claims import INDEX, PART_BYTES
from fetcher.lanes import plan_merge

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fetcher.claims import Key
    from fetcher.settings import FetchSettings
    from fetcher.streams import Stream
    from tiered.log.parts import Part
    from tiered.log.view import LifeView
    from tiered.model import QueueOffset

KIB = 1024
SECTION_BYTES_MAX: Final = 1024 * KIB
"""Of a section that comes along with others; a larger one is worth a request of its own."""
RUN_BYTES_MIN: Final = 256 * KIB
CACHE_SHARE: Final = 4
AHEAD_SECTIONS: Final = 2
"""How many sections are read ahead of a queue whose sections are all small: more would be more bundles at once."""


class Member(NamedTuple):
    """A queue of a sweep.

    Attributes:
        stream: Its reader.
        view: What is read.
        start: First queue offset.
        until: One past the last.
    """

    stream: Stream
    view: LifeView
    start: QueueOffset
    until: QueueOffset


@dataclass(frozen=True, slots=True)
class _Row:
    """Sections of one bundle, in the order in which they lie."""

    starts: list[int]
    ends: list[int]
    members: list[int]
    parts: list[int]


class Sweep:
    """See the module."""

    def __init__(self, members: Sequence[Member], settings: FetchSettings) -> None:
        """Look up where the sections lie, in columns."""
        self._members = members
        self._gap_bytes = settings.transfers.coalesce_gap_bytes
        self._bundles = _by_bundle(members, settings)
        share = settings.cache_bytes // (CACHE_SHARE * max(len(self._bundles), 1))
        most = min(settings.transfers.coalesced_bytes_max, settings.piece_bytes)
        self.run_bytes = min(max(share, RUN_BYTES_MIN), most)

    def beside(self, part: Part, is_known: Callable[[Key], bool]) -> list[tuple[Stream, Part]]:
        """What comes along with the section of a part: readers, and the parts that they will want.

        Args:
            part: It is asked for.
            is_known: Whether a thing is here or on its way.
        """
        row = self._bundles.get(part.bundle.key)
        if row is None:
            return []
        at = bisect_left(row.starts, part.section.start)
        if at == len(row.starts) or row.starts[at] != part.section.start:
            return []
        places = [(row.starts[at], row.ends[at], at, None)]
        before = self._wanted(row, range(at - 1, -1, -1), is_known)
        behind = self._wanted(row, range(at + 1, len(row.starts)), is_known)
        places = [*reversed(before), *places, *behind]
        bounds = plan_merge(
            places, len(before), gap_bytes=self._gap_bytes, bytes_max=self.run_bytes
        )
        numbers = [place[2] for place in places[bounds.low : bounds.high] if place[2] != at]
        return [(self._members[row.members[n]].stream, self._part(row, n)) for n in numbers]

    def _part(self, row: _Row, number: int) -> Part:
        return self._members[row.members[number]].view.parts[row.parts[number]]

    def _wanted(
        self, row: _Row, numbers: range, is_known: Callable[[Key], bool]
    ) -> list[tuple[int, int, int, None]]:
        """Sections that are wanted, as far as one request may reach."""
        found: list[tuple[int, int, int, None]] = []
        left = self.run_bytes
        for number in numbers:
            size = row.ends[number] - row.starts[number]
            left -= size
            if left < 0:
                break
            if self._is_wanted(row, number, is_known):
                found.append((row.starts[number], row.ends[number], number, None))
        return found

    def _is_wanted(self, row: _Row, number: int, is_known: Callable[[Key], bool]) -> bool:
        member, index = self._members[row.members[number]], row.parts[number]
        stream, parts = member.stream, member.view.parts
        if stream.view is not member.view:  # it reads something newer
            return False
        one = parts.rows[index]
        if int(one["queue_offset"]) + int(one["count"]) <= stream.position:
            return False
        bundle, start = parts.bundles[index], row.starts[number]
        return not is_known((bundle.key, start, int(one["items_at"]), int(one["count"]), INDEX))


def _small(member: Member, settings: FetchSettings) -> npt.NDArray[np.int64]:
    """Numbers of the small parts among those that will be read; when all are, few of them are read ahead."""
    parts = member.view.parts
    starts = parts.column("queue_offset")
    wanted = (starts < member.until) & (starts + parts.column("count") > member.start)
    is_small = parts.rows["size_bytes"] <= SECTION_BYTES_MAX
    is_small &= parts.rows["log_bytes"] <= settings.piece_bytes
    chosen = np.flatnonzero(wanted & is_small)
    if len(chosen) and len(chosen) == np.count_nonzero(wanted):
        largest = max(int(parts.rows["log_bytes"][chosen].max()), PART_BYTES)
        member.stream.ahead_max = AHEAD_SECTIONS * largest
    return chosen


def _by_bundle(members: Sequence[Member], settings: FetchSettings) -> dict[str, _Row]:
    """The small sections that will be read, by bundle."""
    names: dict[str, int] = {}
    columns: list[list[npt.NDArray[np.int64]]] = [[], [], [], [], []]
    for number, member in enumerate(members):
        parts, chosen = member.view.parts, _small(member, settings)
        bundles = [names.setdefault(parts.bundles[at].key, len(names)) for at in chosen.tolist()]
        start = parts.column("start")[chosen]
        size = parts.column("size_bytes")[chosen]
        for column, values in zip(
            columns,
            (
                np.array(bundles, np.int64),
                start,
                start + size,
                np.full(len(chosen), number),
                chosen,
            ),
            strict=True,
        ):
            column.append(values)
    if not names:
        return {}
    bundle, start, end, of, index = (np.concatenate(column) for column in columns)
    order = np.lexsort((start, bundle))
    cuts = np.searchsorted(bundle[order], np.arange(len(names) + 1))
    return {
        key: _Row(*(column[order[low:high]].tolist() for column in (start, end, of, index)))
        for key, low, high in zip(names, cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)
    }
