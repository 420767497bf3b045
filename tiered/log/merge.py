"""Merging: neighbours of a queue are gathered into fewer, larger sections, and bundles into larger, tidier bundles.

Everything here is pure. ``plan_merge`` finds what is to be gathered next, from nothing but the state, so a restart finds
what an earlier epoch has left; ``replace_run`` is the rule by which replay accepts what came of it.

Levels: rounds write bundles of level 0. When a level has its fan-in of small ones, or of such as share a queue, all that is
still named of these is gathered one level up. What comes out is sorted by topic, queue and offset, in bundles of
``bundle_bytes_max`` at most. A queue that has ``own_bytes`` there gets bundles of its own, which are done with: their level
is the last one. So does a topic, so that topics expire apart. Nothing of the last level is gathered again, unless less than
half of a bundle is still named.

What was given up stays in a bundle of which more is named, until then or until somebody asks for it: ``plan_erasure`` has
any bundles rewritten, without what nobody names, however little that is.

Bounds: parts of a queue stay below fan-in x levels and what is of the last level; a byte is rewritten once a level, at
most ``LAST_LEVEL`` times; bytes stored stay below 2 x bytes named for each bundle (about 1.5 over all).

It works on open segments as on rolled ones: a segment is a row of parts, and a merge changes only which these are. Rolled
segments that a bad hour has left small (file switches) become one where a run of neighbours crosses their border.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Final
from zlib import crc32

import numpy as np

from backends.lazy_dataclass import dataclass
from tiered.errors import InvalidError
from tiered.log.parts import PART, SPARSE_BYTES, Parts

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from tiered.log.parts import Bundle, Incarnation, Part, Segment, TierState
    from tiered.model import MessageQueue

MIB: Final = 1024 * 1024
FAN_IN: Final = 8
LAST_LEVEL: Final = 3
BUNDLE_BYTES_MAX: Final = 64 * MIB
OWN_BYTES: Final = 8 * MIB
_OVERHEAD_BYTES: Final = 64 * 1024
"""What stands in a bundle besides sections; so small bundles, of which it is the most, are not rewritten for ever."""
_GATHERED_BYTES_MAX: Final = 1024 * MIB
"""Of one plan; what is left is gathered by the next. Bounds how long an entry waits, and what a crash leaves."""


@dataclass(frozen=True, slots=True)
class MergePolicy:
    """When merging pays, and what comes out."""

    fan_in: int = FAN_IN
    """A level is gathered when it has so many small bundles, or so many that share a queue."""
    bundle_bytes_max: int = BUNDLE_BYTES_MAX
    """A bundle that is made is about so large at most: one is held in memory while it is made."""
    own_bytes: int = OWN_BYTES
    """A queue (a topic) that has so many bytes in a plan gets bundles of its own."""
    segment_bytes_max: int = 1024 * MIB
    """Rolled neighbours become one segment of at most so many bytes of records; 0: never."""
    segment_age_ms_max: int = 24 * 3_600_000
    """The age at which a segment is rolled. Neighbours become one that were begun within half of it: so what was
    rolled for its age stays apart, and expires in time."""
    compresses: bool = True
    """What is of the last level is compressed; so bundles of one queue are rewritten once for that."""

    def __post_init__(self) -> None:
        if self.fan_in < 2:  # noqa: PLR2004 (one would gather itself for ever)
            raise InvalidError(f"the fan-in of merging must be at least 2, not {self.fan_in}")


@dataclass(frozen=True, slots=True)
class MergeRun:
    """Neighbours of one incarnation that become one section."""

    queue: MessageQueue
    position: int  # its place among those of the queue
    incarnation: int  # of that incarnation
    segment: int
    """Base log offset of the segment that they lie in, the first if they lie in several."""
    parts: Parts  # they; may be one, which only moves
    truncated: bool = False  # the incarnation is what the broker truncated

    @property
    def size_bytes(self) -> int:
        """Bytes of records and items, as they are before they are packed."""
        return run_bytes(self.parts)


@dataclass(frozen=True, slots=True)
class MergeOutput:
    """One bundle that is to be made."""

    level: int
    runs: tuple[MergeRun, ...]  # its sections, sorted by topic, queue id and offset
    topic: str = ""  # it is of this topic alone; empty: of any
    queue: MessageQueue | None = None  # it is of this queue alone

    @property
    def size_bytes(self) -> int:
        """Of its runs."""
        return sum(run.size_bytes for run in self.runs)


@dataclass(frozen=True, slots=True)
class MergePlan:
    """What is to be gathered."""

    bundles: tuple[Bundle, ...]  # what is gathered: nothing of these is named afterwards
    outputs: tuple[MergeOutput, ...]  # what is to be made of it


def run_bytes(parts: Parts) -> int:
    """Bytes of records and items of parts."""
    return parts.log_bytes + 20 * int(parts.rows["count"].sum(dtype="i8"))


def fingerprint(parts: Parts) -> int:
    """32 bits by which parts are known again: what a merge presumes."""
    keys = "\n".join(bundle.key for bundle in parts.bundles)
    found = crc32(keys.encode("utf-8", "surrogateescape"))
    rows = np.ascontiguousarray(parts.rows).view(np.uint8).reshape(len(parts), PART.itemsize)
    found = crc32(rows[:, :-SPARSE_BYTES].tobytes(), found)
    sparse = rows[:, -SPARSE_BYTES:]  # (so what was said before there was compaction still holds)
    return crc32(sparse.tobytes(), found) if sparse.any() else found


# -- planning -------------------------------------------------------------------------------------


def plan_merge(
    state: TierState, policy: MergePolicy, *, leave: Collection[str] = ()
) -> MergePlan | None:
    """What is to be gathered next, but for what lies in damaged bundles (``leave``, keys); None when nothing is due."""
    used = bundles_used(state, leave)
    chosen, level = _full_level(state, used, policy)
    if not chosen:
        chosen = _sparse(used, policy)
        level = max([1, *(use.bundle.level for use in chosen)])  # (level 0: as committed)
    return _gathering(state, chosen, level, policy)


def plan_erasure(
    state: TierState, policy: MergePolicy, bundles: Collection[str]
) -> MergePlan | None:
    """What is to be rewritten next so that nothing of some bundles is named any more; None when nothing of them is.

    What is named of them stays on its level, some bundles of one level at a time: nothing else is gathered on the way.
    """
    used = [use for use in bundles_used(state) if use.bundle.key in bundles]
    level = max(1, used[0].bundle.level) if used else 1  # (level 0: as committed)
    chosen = _first([use for use in used if max(1, use.bundle.level) == level])
    return _gathering(state, chosen, level, policy)


def _gathering(
    state: TierState, chosen: list[BundleUse], level: int, policy: MergePolicy
) -> MergePlan | None:
    """What gathers all that is named of some bundles."""
    keys = {use.bundle.key for use in chosen}
    runs = [run for run in _runs(state, keys, policy) if len(run.parts)]
    outputs = tuple(_outputs(runs, min(level, LAST_LEVEL), policy))
    return MergePlan(tuple(use.bundle for use in chosen), outputs) if outputs else None


@dataclass(slots=True)
class BundleUse:
    """A bundle that is named, and how many of its bytes are."""

    bundle: Bundle
    named_bytes: int = 0


def bundles_used(state: TierState, leave: Collection[str] = ()) -> list[BundleUse]:
    """Each bundle that is named, and how much of it, in the order of levels and of their keys' times."""
    found: dict[str, BundleUse] = {}
    for parts in (parts for one in state.placed() for parts in one.incarnation.tables()):
        for bundle, size in zip(parts.bundles, parts.stored_bytes().tolist(), strict=True):
            use = found.get(bundle.key)
            if use is None:
                use = found[bundle.key] = BundleUse(bundle)
            use.named_bytes += size
    kept = [use for key, use in found.items() if key not in leave]
    return sorted(kept, key=lambda use: (use.bundle.level, use.bundle.key.rpartition("/")[2]))


def _full_level(
    state: TierState, used: list[BundleUse], policy: MergePolicy
) -> tuple[list[BundleUse], int]:
    """What is to be gathered of the lowest level that has its fan-in, and the level above it.

    Of bundles that are small, whosever they are: there shall be fewer. Else of bundles that one queue has parts in: large
    bundles of different queues or topics, as one merge makes several, would be written again for nothing.
    """
    for level in range(LAST_LEVEL):
        of_it = [use for use in used if use.bundle.level == level and not _is_done(use, policy)]
        most = policy.bundle_bytes_max // policy.fan_in
        small = [use for use in of_it if use.bundle.size_bytes <= most]
        if len(small) < policy.fan_in <= len(of_it):
            small = _deepest(state, of_it)
        if len(small) >= policy.fan_in:
            return _first(small), level + 1
    return [], 0


def _deepest(state: TierState, of_it: list[BundleUse]) -> list[BundleUse]:
    """Those of these bundles that the queue with parts in most of them has parts in."""
    keys = {use.bundle.key for use in of_it}
    found: set[str] = set()
    for incarnations in state.queues.values():
        its = keys & {
            bundle.key
            for incarnation in incarnations
            for s in incarnation.segments
            for bundle in s.parts.bundles
        }
        found = max(found, its, key=len)
    return [use for use in of_it if use.bundle.key in found]


def _is_done(use: BundleUse, policy: MergePolicy) -> bool:
    """A bundle of one queue that is large and need not be compressed gains nothing."""
    own = use.bundle.key.startswith("queue/")
    return own and use.bundle.size_bytes >= policy.own_bytes and not policy.compresses


def _sparse(used: list[BundleUse], policy: MergePolicy) -> list[BundleUse]:
    """Bundles of which less than half is still named, that would make about one bundle together or are large enough."""
    thin = [use for use in used if 2 * use.named_bytes + _OVERHEAD_BYTES < use.bundle.size_bytes]
    wasted = sum(use.bundle.size_bytes - use.named_bytes for use in thin)
    stored = sum(use.bundle.size_bytes for use in used)
    if not thin or (4 * wasted < stored and wasted < policy.bundle_bytes_max):
        return []
    return _first(thin)


def _first(uses: list[BundleUse]) -> list[BundleUse]:
    size = 0
    taken: list[BundleUse] = []
    for use in uses:
        size += use.named_bytes
        if taken and size > _GATHERED_BYTES_MAX:
            break
        taken.append(use)
    return taken


def _runs(state: TierState, keys: Collection[str], policy: MergePolicy) -> Iterator[MergeRun]:
    for queue, position, incarnation, truncated in sorted(state.placed(), key=itemgetter(0, 1)):
        if any(bundle.key in keys for bundle in incarnation.parts().bundles):
            whose = _Whose(queue, position, incarnation.number, truncated)
            for group in _groups(incarnation, policy):
                yield from _runs_of(whose, group, keys, policy)


def _groups(incarnation: Incarnation, policy: MergePolicy) -> Iterator[list[Segment]]:
    """Rows of segments whose parts may become neighbours."""
    group: list[Segment] = []
    size = 0
    for segment in incarnation.segments:
        if group and not _may_unite(group, segment, size, policy):
            yield group
            group, size = [], 0
        group.append(segment)
        size += segment.size_bytes
    if group:
        yield group


def _may_unite(group: list[Segment], behind: Segment, size: int, policy: MergePolicy) -> bool:
    before = group[-1]
    return (
        before.sealed
        and behind.sealed
        and before.parts.queue_end == behind.base_queue_offset
        and size + behind.size_bytes <= policy.segment_bytes_max
        and 2 * abs(behind.created_ms - group[0].created_ms) <= policy.segment_age_ms_max
    )


@dataclass(frozen=True, slots=True)
class _Whose:
    queue: MessageQueue
    position: int
    incarnation: int
    truncated: bool


def _runs_of(
    whose: _Whose, group: list[Segment], keys: Collection[str], policy: MergePolicy
) -> Iterator[MergeRun]:
    parts = Parts.joined(segment.parts for segment in group)
    bases = [segment.base_offset for segment in group for _ in segment.parts]
    begin, size = 0, 0
    sizes = (parts.column("log_bytes") + 20 * parts.column("count")).tolist()

    def run(end: int) -> MergeRun:
        base, last = bases[begin], bases[end - 1]
        if (
            base != last
        ):  # what is behind lies in one segment with it, as soon as it has taken its place
            bases[end:] = [base if one == last else one for one in bases[end:]]
        place = whose.queue, whose.position, whose.incarnation
        return MergeRun(*place, base, parts[begin:end], whose.truncated)

    for at, bundle in enumerate(parts.bundles):
        wanted = bundle.key in keys
        if at > begin and (not wanted or size + sizes[at] > policy.bundle_bytes_max):
            yield run(at)
            begin, size = at, 0
        if wanted:
            size += sizes[at]
        else:
            begin = at + 1
    if begin < len(parts):
        yield run(len(parts))


def _outputs(runs: list[MergeRun], level: int, policy: MergePolicy) -> Iterator[MergeOutput]:
    """Divide runs, which are sorted, over bundles."""
    of_incarnation: dict[tuple[MessageQueue, int], int] = defaultdict(
        int
    )  # (a key names one incarnation)
    for run in runs:
        of_incarnation[run.queue, run.incarnation] += run.size_bytes
    own = {incarnation for incarnation, size in of_incarnation.items() if size >= policy.own_bytes}
    of_topic: dict[str, int] = defaultdict(int)
    for incarnation, size in of_incarnation.items():
        of_topic[incarnation[0].topic] += 0 if incarnation in own else size
    apart = {topic for topic, size in of_topic.items() if size >= policy.own_bytes}
    for incarnation in sorted(own):
        for some in _cut([r for r in runs if (r.queue, r.incarnation) == incarnation], policy):
            yield MergeOutput(LAST_LEVEL, some, incarnation[0].topic, incarnation[0])
    rest = [run for run in runs if (run.queue, run.incarnation) not in own]
    for topic in sorted(apart):
        for some in _cut([r for r in rest if r.queue.topic == topic], policy):
            yield MergeOutput(level, some, topic)
    for some in _cut([r for r in rest if r.queue.topic not in apart], policy):
        yield MergeOutput(level, some)


def _cut(runs: Iterable[MergeRun], policy: MergePolicy) -> Iterator[tuple[MergeRun, ...]]:
    some: list[MergeRun] = []
    size = 0
    for run in runs:
        if some and size + run.size_bytes > policy.bundle_bytes_max:
            yield tuple(some)
            some, size = [], 0
        some.append(run)
        size += run.size_bytes
    if some:
        yield tuple(some)


# -- the rule of replay ---------------------------------------------------------------------------


def replace_run(
    incarnation: Incarnation,
    part: Part,
    segment: int,
    was: int,
    *,
    with_open: bool,
    compacts: bool = False,
) -> Incarnation | None:
    """The incarnation with one part in the place of a run; None when what the merge presumes does not hold.

    Args:
        segment: Base log offset of the segment that it is to lie in.
        was: ``fingerprint`` of the run.
    """
    for at, first in enumerate(incarnation.segments):
        if first.base_offset != segment or first.parts.queue_end <= part.queue_offset:
            continue
        group = _spanned(incarnation.segments[at:], part)
        if group is None:
            return None
        united = _with_part(group, part, was, compacts=compacts)
        may = with_open or bool(incarnation.ended) or all(one.sealed for one in group)
        if united is None or not may:
            return None
        behind = incarnation.segments[at + len(group) :]
        return replace(incarnation, segments=(*incarnation.segments[:at], united, *behind))
    return None


def _spanned(segments: Sequence[Segment], part: Part) -> Sequence[Segment] | None:
    """The segments that a part spans, from the first on; None when they could not be one."""
    for count, segment in enumerate(segments, 1):
        if segment.parts.queue_end >= part.queue_end:
            group = segments[:count]
            fits = all(
                before.sealed
                and behind.sealed
                and before.parts.queue_end == behind.base_queue_offset
                for before, behind in pairwise(group)
            )
            return group if fits else None
    return None


def _with_part(group: Sequence[Segment], part: Part, was: int, *, compacts: bool) -> Segment | None:
    parts = Parts.joined(segment.parts for segment in group)
    starts = parts.column("queue_offset").tolist()
    ends = [*starts[1:], parts.queue_end]
    try:
        begin, last = starts.index(part.queue_offset), ends.index(part.queue_end)
    except ValueError:
        return None
    run = parts[begin : last + 1]
    same = (
        len(run) > 0
        and fingerprint(run) == was
        and (run[0].log_offset, run.log_end) == (part.log_offset, part.log_end)
        and (run.log_gone, run.holes) <= (part.log_gone, part.holes)
        and (compacts or (run.log_gone, run.holes) == (part.log_gone, part.holes))
    )
    if not same:
        return None
    made = Parts.joined((parts[:begin], Parts.of([part]), parts[last + 1 :]))
    return replace(group[0], sealed=group[-1].sealed, parts=made)
