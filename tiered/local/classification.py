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
another entry names it, of whatever queue and offset                             DROPPED
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
    # A start would not look at it, or there is no room, or an entry says something where there is.
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

    ``codes`` are what entries say, each of which names a record of its own; ``hashes``: of the tags of their records.
    (Those of the delay topic alone have another code: when they are to be delivered. No system topic is tiered.)
    ``has_ext``: codes may be addresses in ``consumequeue_ext``. ``is_live``: the last entry may have been read while it was
    written, its tag code, or the lower half of it, still zero.
    """
    wrong: Flags = codes != hashes
    if has_ext:
        wrong &= ~is_ext_address(codes)
    if is_live and len(wrong) and not int(codes[-1]) & 0xFFFF_FFFF:
        wrong[-1] = False
    return wrong


def place(
    offsets: Longs,  # what each record says that its first queue offset is, int64[n]
    counts: Longs,  # how many queue offsets each takes, int64[n]
    lost: Longs,  # bytes of the log between the record before and this one that cannot be read, or were not, int64[n]
    low: int | None,  # one past the last queue offset before them; None: it is not known
    high: int | None,  # the first queue offset behind them; None: there is none
) -> Longs:
    """The queue offset at which each record between two others belongs, in log order; -1 where there is no room for it.

    A record that goes on where the one before ends, or ends where the next one begins, is right: two of them agree. Any
    other is right if it lies between those, and leaves out no more offsets than what was lost of the log could hold.
    Where nothing can be compared it is believed.
    """
    inside = (offsets >= (low or 0)) & (offsets < OFFSET_MAX)
    ends = np.where(inside, offsets + counts, -1)
    inside &= ends <= (_FAR if high is None else high)
    befores = np.concatenate(([-1 if low is None else low], ends[:-1]))
    nexts = np.append(np.where(inside, offsets, -1)[1:], -1 if high is None else high)
    firm = inside & ((offsets == befores) | (ends == nexts))
    found = np.where(firm, offsets, -1)
    following = np.where(firm, np.arange(len(firm)), len(firm))
    following = np.minimum.accumulate(following[::-1])[::-1]
    until, taken, last = np.cumsum(lost), np.cumsum(counts), -1
    for at in np.flatnonzero(~firm).tolist():  # nobody else agrees with it
        count, least, most, top = int(counts[at]), 0, OFFSET_MAX, high
        if at and found[at - 1] >= 0:
            last = at - 1
        reached = low if last < 0 else int(found[last] + counts[last])
        if (behind := int(following[at])) < len(firm):  # those between need room as well
            top = int(offsets[behind] - (taken[behind - 1] - taken[at]))
            least = top - count - _held_by(int(until[behind] - until[at])) * count
        if reached is not None:
            since = int(until[at]) - (int(until[last]) if last >= 0 else 0)
            least, most = max(least, reached), min(most, reached + _held_by(since) * count)
        slot = int(offsets[at])
        if not max(least, 0) <= slot <= most or (top is not None and slot + count > top):
            slot = reached if reached is not None else -1 if top is None else least
        if slot >= 0 and (top is None or slot + count <= top):
            found[at] = slot
    return found


def _held_by(lost_bytes: int) -> int:
    return lost_bytes // RECORD_BYTES_MIN


def is_queue_name(queue: MessageQueue) -> bool:
    """Whether there can be a queue of this name: what a flipped bit made of one may have no directory and no key."""
    topic = queue.topic
    if queue.queue_id < 0 or topic in {"", ".", ".."} or "/" in topic or not topic.isprintable():
        return False
    try:
        return len(topic.encode()) <= TOPIC_BYTES_MAX
    except UnicodeEncodeError:
        return False
