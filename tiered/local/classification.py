"""What an entry of a consume queue and a record of the log are to each other: one table for every reader.

No checksum covers a record's queue, queue offset, flags or times, nor anything of an entry. So neither is believed alone:
of a pair, an entry and a record that it names or that names it, and of what surrounds them, this table says what becomes
of it. The readers of stopped and running stores, the follower and verification gather those facts, each in its own way,
and decide nothing by themselves. The first line that holds is the one:

================================================================================ ============
an entry, and what stands where it says (``classify_entries``)
================================================================================ ============
it says nothing                                                                  MISSING
it names no bytes of the log                                                     DANGLING
no sound record stands there, nor anything that says that one did                DANGLING
no sound record stands there                                                     DAMAGED
the record says that it is of this queue and offset                              LISTED
an entry of the queue and offset that the record says names it, too              FOREIGN
no other entry does: the record is damaged in its queue or offset                DAMAGED
================================================================================ ============

================================================================================ ============
a record that the entry of its offset does not name (``classify_orphans``)
================================================================================ ============
it is of a prepared or rolled-back transaction, which gets no entry              NO_MESSAGE
another entry names it; or that of its offset names a record that says so        DROPPED
a start would not look at it, or its neighbours leave no room for it             DROPPED
its offset goes with its neighbours': it is listed from now on                   COUNTS
its offset cannot be its own: it is damaged, at the offset that is left for it   MISPLACED
================================================================================ ============

1. An intact entry rules, as it does for a broker: a record that another entry lists never counts elsewhere.
2. What an entry says beside the place of its record has to be what the record says: its tag code is the hash of the
   record's tags. Where the two differ the record rules, since readers hold its tags against what they want, and would
   never see a message whose code hides it (``are_wrong_tags``).
3. A record that no entry lists is bounded by its neighbours: in the log a queue's offsets go up one by one, so ``place``
   knows between which of them a record may stand. One that says something else is damaged in its offset. It takes the
   place that its neighbours leave for it, as a broker's start would have it, and is read there as damaged.

Pure; arrays in, arrays out.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from tiered.format.items import is_ext_address
from tiered.format.record import RECORD_BYTES_MIN
from tiered.local.interface import HoleReason

if TYPE_CHECKING:
    from tiered.local.consumequeues import Flags, Longs
    from tiered.model import MessageQueue


# -- anomaly counters --------------------------------------------------------------------------------
#
# What was met in a store that is explained and recorded: counted once, however often it is read again.

_REMEMBERED_MAX: Final = 100_000
"""Holes and the like that are remembered one by one; beyond it they are counted at each sight."""
WRONG_TAG_CODES: Final = "wrong_tag_codes"


class AnomalyCounters:
    """Counts holes, dropped records and whatever else is named. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._met: set[tuple[str, MessageQueue, int]] = set()
        self._counts: Counter[str] = Counter()
        self._notes: dict[str, None] = {}

    def hole(self, queue: MessageQueue, queue_offset: int, reason: HoleReason) -> None:
        """A queue offset without a message was met."""
        self._once("hole", queue, queue_offset, hole_counter(reason))

    def wrong_tag_code(self, queue: MessageQueue, queue_offset: int) -> None:
        """An entry was met that gives its record another tag code than the record's own."""
        self._once("tag", queue, queue_offset, WRONG_TAG_CODES)

    def _once(self, kind: str, queue: MessageQueue, queue_offset: int, counter: str) -> None:
        with self._lock:
            key = (kind, queue, queue_offset)
            if key in self._met:
                return
            if len(self._met) < _REMEMBERED_MAX:
                self._met.add(key)
            self._counts[counter] += 1

    def count(self, name: str, number: int = 1) -> None:
        """Something was met ``number`` times."""
        if number:
            with self._lock:
                self._counts[name] += number

    def note(self, text: str) -> None:
        """A line for the report; the same line twice is one."""
        with self._lock:
            self._notes.setdefault(text)

    def counts(self) -> dict[str, int]:
        """A copy of the counts."""
        with self._lock:
            return dict(self._counts)

    def forget(self, counts: dict[str, int]) -> None:
        """Go back to what ``counts`` had said: all is looked at again."""
        with self._lock:
            self._counts = Counter(counts)

    def notes(self) -> tuple[str, ...]:
        """The lines, in the order in which they came."""
        with self._lock:
            return tuple(self._notes)


def hole_counter(reason: HoleReason) -> str:
    """Name of the counter of holes of this kind."""
    return f"holes_{reason.name.lower()}"


# -- classification ----------------------------------------------------------------------------------


OFFSET_MAX: Final = 2**63 // 64
"""No queue offset is as large: its entry would have no address."""
_FAR: Final = 2**63 - 1
TOPIC_BYTES_MAX: Final = 255


class Case(IntEnum):
    """What becomes of a pair, by the table above. The holes have the numbers of their ``HoleReason``."""

    LISTED = 0
    DAMAGED = HoleReason.DAMAGED
    DANGLING = HoleReason.DANGLING
    FOREIGN = HoleReason.FOREIGN
    MISSING = HoleReason.MISSING
    COUNTS = 5
    MISPLACED = 6
    DROPPED = 7
    NO_MESSAGE = 8


Cases = npt.NDArray[np.int8]


def classify_entries(
    *,
    is_written: Flags,  # the entry says something
    is_within: Flags,  # it names bytes within the readable log
    is_sound: Flags,  # the record there passes its own checks
    is_trace: Flags,  # if not: something says that a record once stood there
    agrees: Flags,  # the record says this queue and offset
    is_other_listed: Flags,  # another entry, of what the record says, names it
) -> Cases:
    """The case of each entry, int8[n]."""
    table = {
        Case.MISSING: ~is_written,
        Case.DANGLING: ~is_within | ~(is_sound | is_trace),
        Case.DAMAGED: ~is_sound,
        Case.LISTED: agrees,
        Case.FOREIGN: is_other_listed,
    }
    return _first_line(table, Case.DAMAGED)


def classify_orphans(
    *,
    is_message: Flags,  # the record gets an entry at all
    is_other_listed: Flags,  # another entry names it
    is_taken: Flags,
    # The entry of its offset names a record of its own; or a start would not look at this one; or there is no room.
    fits: Flags,  # its offset goes with its neighbours'
) -> Cases:
    """The case of each record that the entry of its offset does not name, int8[n]."""
    table = {
        Case.NO_MESSAGE: ~is_message,
        Case.DROPPED: is_other_listed | is_taken,
        Case.COUNTS: fits,
    }
    return _first_line(table, Case.MISPLACED)


def _first_line(table: dict[Case, Flags], otherwise: Case) -> Cases:
    codes = [np.int8(case) for case in table]
    return np.select(list(table.values()), codes, np.int8(otherwise)).astype(np.int8)


def are_wrong_tags(codes: Longs, hashes: Longs, *, has_ext: bool, is_live: bool) -> Flags:
    """Which entries are damaged in their tag code, bool[n]. The right one is that of the record, of all that differ.

    Args:
        codes: What entries say, each of which names a record of its own.
        hashes: Of the tags of their records. (Those of the delay topic alone have another code: when they are to be
            delivered. No system topic is tiered.)
        has_ext: Codes may be addresses in ``consumequeue_ext``.
        is_live: The last entry may have been read while it was written, its tag code, or the lower half of it, still zero.
    """
    wrong: Flags = codes != hashes
    if has_ext:
        wrong &= ~is_ext_address(codes)
    if is_live and len(wrong) and not int(codes[-1]) & 0xFFFF_FFFF:
        wrong[-1] = False
    return wrong


@dataclass(frozen=True, slots=True)
class Around:
    """What is known of a queue before and behind some of its records in the log."""

    low: int | None = None
    """One past the last queue offset that lies before them in the log, listed or rebuilt; None: none is known."""
    listed_low: int | None = None  # as ``low``, of what the consume queue's files list
    listed_high: int | None = None
    """The first queue offset that they list behind them; None: none. Others may lie between."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Records of one queue in log order that count, or may: listed ones, and those that nothing lists."""

    offsets: Longs  # int64[n], what each says that its first queue offset is
    counts: Longs  # int64[n], how many queue offsets each takes
    is_listed: Flags  # bool[n], an entry agrees
    lost: Longs
    """int64[n], bytes of the log between the record before and this one that cannot be read, or were not."""


def place(chain: Chain, around: Around) -> Longs:
    """The queue offset at which each record of a chain belongs, by its neighbours; -1 where there is no room for it.

    A record that goes on where the one before ends, or ends where the next one begins, is right: two of them agree. Any
    other is right if it lies between those, and leaves out no more offsets than what was lost of the log could hold.
    Where nothing can be compared it is believed.
    """
    offsets, counts = chain.offsets, chain.counts
    fine = (offsets >= 0) & (offsets < OFFSET_MAX)
    ends = np.where(fine, offsets + counts, -1)
    links = fine[:-1] & fine[1:] & (ends[:-1] == offsets[1:])
    firm = chain.is_listed.copy()
    firm[1:] |= links
    firm[:-1] |= links
    if around.low is not None and len(firm):
        firm[0] |= bool(fine[0]) and int(offsets[0]) == around.low
    if around.listed_high is not None and len(firm):
        firm[-1] |= bool(fine[-1]) and int(ends[-1]) == around.listed_high
    firm &= chain.is_listed | _is_between(chain, ends, around)
    found = np.where(firm, offsets, -1)
    if firm.all():
        return found
    return _place_others(chain, around, firm, found)


def _is_between(chain: Chain, ends: Longs, around: Around) -> Flags:
    """Which records lie between what is listed before and behind them."""
    lows = np.where(chain.is_listed, ends, -1)
    lows = np.maximum.accumulate(np.concatenate(([around.listed_low or 0], lows)))[:-1]
    highs = np.where(chain.is_listed, chain.offsets, _FAR)
    last = _FAR if around.listed_high is None else around.listed_high
    highs = np.minimum.accumulate(np.concatenate((highs, [last]))[::-1])[::-1][1:]
    found: Flags = (chain.offsets >= lows) & (ends <= highs)
    return found


def _place_others(chain: Chain, around: Around, firm: Flags, found: Longs) -> Longs:
    """Place the records on which nobody else agrees, one by one."""
    size = len(firm)
    behind = np.where(firm, np.arange(size), size)
    behind = np.minimum.accumulate(behind[::-1])[::-1]
    low, lost = around.low, np.cumsum(chain.lost)
    taken = np.concatenate((np.cumsum(chain.counts), [int(chain.counts.sum())]))
    before, is_claimed = 0, around.low != around.listed_low
    for at in range(size):
        count, offset = int(chain.counts[at]), int(chain.offsets[at])
        if not firm[at]:
            following = int(behind[at])
            room = (int(lost[at]) - before) // RECORD_BYTES_MIN * count
            high, least = around.listed_high, 0
            if following < size:  # those between need room as well
                high = int(chain.offsets[following] - (taken[following - 1] - taken[at]))
                least = high - count - int(lost[following] - lost[at]) // RECORD_BYTES_MIN * count
            if is_claimed and low is not None and offset < low:
                low = None  # it was alone, too: either may be right
            limits = (least, low + room) if low is not None else (least, OFFSET_MAX)
            low = around.listed_low if low is None else low
            found[at] = offset = _slot(offset, count, low, high, limits)
            if offset < 0:
                continue
        low, before, is_claimed = offset + count, int(lost[at]), False
    return found


def _slot(
    offset: int, count: int, low: int | None, high: int | None, limits: tuple[int, int]
) -> int:
    """Where one record belongs that nobody agrees with: what it says, or next to its neighbours, or nowhere (-1)."""
    least, most = max(limits[0], low or 0), min(limits[1], OFFSET_MAX)
    if least <= offset <= most and (high is None or offset + count <= high):
        return offset
    slot = low if low is not None else limits[0] if high is not None else -1
    return slot if slot >= 0 and (high is None or slot + count <= high) else -1


def is_queue_name(queue: MessageQueue) -> bool:
    """Whether there can be a queue of this name: what a flipped bit made of one may have no directory and no key."""
    topic = queue.topic
    if queue.queue_id < 0 or topic in {"", ".", ".."} or "/" in topic or not topic.isprintable():
        return False
    try:
        return len(topic.encode()) <= TOPIC_BYTES_MAX
    except UnicodeEncodeError:
        return False
