# ruff: noqa: TC001, TC003 (the types of fields are read at run time: tiered.journal.entry)
"""What the journal of a tier says, as typed records: an action each. What they mean is ``tiered.log.state``'s business.

An action stands in an entry as an object of its fields, with its name as ``do``; its queue is ``topic`` and ``queue_id``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from backends.lazy_dataclass import dataclass
from tiered.journal.entry import EPOCH, Action, as_object
from tiered.journal.replay import UnknownActionError
from tiered.local.interface import LeaderEpoch, OpenTransaction
from tiered.log.parts import AbortedRange, IndexObject, Passes
from tiered.log.timers import TimerCancel, TimerHanded, TimerRunBegins, TimerTake
from tiered.model import MessageQueue, QueueOffset


@dataclass(frozen=True, slots=True)
class Epoch:
    """A writer begins."""

    epoch: int
    holder: Mapping[str, Any]  # who, for people


@dataclass(frozen=True, slots=True)
class Meta:
    """Which local store the tier belongs to."""

    store: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PartsNamed:
    """What became durable; a part with a new segment rolls the one before."""

    bundles: tuple[Any, ...]  # rows, see ``tiered.log.bundles``


@dataclass(frozen=True, slots=True)
class SectionsMerged:
    """Sections take the place of runs of others. From the present writer; of segments that are sealed from anybody."""

    bundles: tuple[Any, ...]  # rows, see ``tiered.log.bundles``
    positions: (
        str  # of each of their sections the place of its incarnation among those of its queue
    )
    runs: str  # what each takes the place of (``tiered.log.merge.fingerprint``)


@dataclass(frozen=True, slots=True)
class IncarnationPasses:
    """The passes of compaction of an incarnation, from now on."""

    queue: MessageQueue
    position: int  # its place among those of its queue
    passes: Passes


@dataclass(frozen=True, slots=True)
class Compacted:
    """As ``SectionsMerged``, of messages of which some are holes now. All of it holds, or nothing is done."""

    bundles: tuple[Any, ...]
    positions: str
    runs: str
    passes: tuple[IncarnationPasses, ...]


@dataclass(frozen=True, slots=True)
class Seal:
    """The last segment takes no more parts."""

    queue: MessageQueue
    incarnation: int
    segment: int  # base log offset of that one


@dataclass(frozen=True, slots=True)
class GapMet:
    """Nothing of ``[start, end)`` will come."""

    queue: MessageQueue
    incarnation: int
    start: QueueOffset
    end: QueueOffset
    reason: str


@dataclass(frozen=True, slots=True)
class Expire:
    """Whole segments are given up (``tiered.log.expiry``). From anybody, but an open one only from the present writer."""

    queue: MessageQueue
    incarnation: int
    position: int
    """Its place among the queue's incarnations, since those that were truncated have the same number."""
    min_from: int  # the minimum that it presumes
    min_to: QueueOffset  # where a segment begins, or the queue ends


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Records went into quarantine."""

    queue: MessageQueue
    incarnation: int
    count: int


@dataclass(frozen=True, slots=True)
class Head:
    """What stays of a part that the end of a cut lies in: its first items."""

    queue_offset: int  # of the part, by which it is known
    log_offset: int  # of the part, likewise
    log_bytes: int  # bytes of records that stay
    holes: int  # items without a message that stay
    last: int  # mark of the last item that stays (``tiered.log.divergence``), or 0
    of_holes: int
    """Of the whole part: of one that was compacted since, other bytes are its beginning."""


@dataclass(frozen=True, slots=True)
class LineageGrown:
    """What the records up to the queue's commit offset have told of their lineage; in the entry of their parts."""

    queue: MessageQueue
    incarnation: int
    topic_id: str
    epochs: tuple[LeaderEpoch, ...]  # new ones
    opened: tuple[OpenTransaction, ...]  # all that are open there
    aborted: tuple[AbortedRange, ...]  # new ones


@dataclass(frozen=True, slots=True)
class Truncate:
    """The queue ends earlier (``tiered.log.state``)."""

    queue: MessageQueue
    incarnation: int
    end: QueueOffset  # above its minimum and below its commit offset
    was: QueueOffset  # its commit offset, as the writer knew it
    head: Head | None
    """What stays of the part that ``end`` lies in; None when it lies between two parts, or in a gap."""
    reason: str


@dataclass(frozen=True, slots=True)
class BeginAnew:
    """The queue begins anew (number 0: for the first time, with nothing in it yet)."""

    queue: MessageQueue
    incarnation: int
    start: QueueOffset
    reason: str


@dataclass(frozen=True, slots=True)
class Indexed:
    """Index objects are new, and others given up first (``tiered.log.state``). From anybody."""

    objects: tuple[IndexObject, ...]  # in the order in which they cover
    drop: tuple[str, ...]  # keys


@dataclass(frozen=True, slots=True)
class Pause:
    """From now on the writer takes nothing more of a topic, or goes on with it. From anybody."""

    topic: str
    is_paused: bool


KINDS: Final[Mapping[str, type[Any]]] = {
    EPOCH: Epoch,
    "meta": Meta,
    "part": PartsNamed,
    "merge": SectionsMerged,
    "compacted": Compacted,
    "seal": Seal,
    "gap": GapMet,
    "expire": Expire,
    "quarantine": Quarantine,
    "truncate": Truncate,
    "lineage": LineageGrown,
    "incarnation": BeginAnew,
    "index": Indexed,
    "pause": Pause,
    "timer_take": TimerTake,
    "timer_run": TimerRunBegins,
    "timer_handed": TimerHanded,
    "timer_cancel": TimerCancel,
}


def read_action(action: Action, kinds: Mapping[str, type[Any]] = KINDS) -> Any:  # noqa: ANN401 (one of these)
    """An action of an entry, of a tier's journal or of another's.

    ``UnknownActionError`` when this version does not know its name.
    """
    fields = dict(action)
    do = fields.pop("do")
    if do not in kinds:
        raise UnknownActionError(f"{do!r:.80}")
    return as_object(kinds[do]).decode(fields)


def action_of(said: Any, kinds: Mapping[str, type[Any]] = KINDS) -> Action:  # noqa: ANN401 (one of these)
    """Undo ``read_action``."""
    do = next(do for do, kind in kinds.items() if kind is type(said))
    return {"do": do, **as_object(type(said)).encode(said)}
