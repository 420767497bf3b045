"""An embedded store as the target: what is handed over is kept there as a broker keeps timers, and delivered by a wheel.

Overview: ``give`` puts messages into the store's topic ``rmq_sys_wheel_timer`` and into a timing wheel; ``tick`` delivers
what is due to its real topic. Delay levels (``SCHEDULE_TOPIC_XXXX``) that the store has are delivered as well, and so is
what a broker left pending in it.

After a crash: nothing here has to survive but the log. ``config/tieredWheel.json`` says up to which due time all was
delivered, and how far each queue of the store was then; what was delivered since is found among what came into the queues
behind that place, by unique id and due time. So each is delivered once. As long as it says no time (a broker's directory)
the broker's own ``config/timercheck`` and ``config/delayOffset.json`` say how far it was.

A broker that starts on the directory goes on with what waits, where this wheel was stopped cleanly (``leave_wheel``).
After a kill it may deliver again what was delivered since the clean stop before.

Never early: what is noted as due (``TIMER_OUT_MS``) is the second before the time that was asked for, and a message is
delivered when the store's clock says that this second is over, as a broker's wheel does. A clock that is set back delays
what is due, one that is set forward delivers what it calls due.
"""

from __future__ import annotations

import heapq
import logging
import os
import struct
import threading
from array import array
from collections import Counter
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from backends.lazy_dataclass import dataclass
from backends.local_files import is_vacant
from tiered.errors import DataError, InvalidError, StoreUnavailableError
from tiered.format.block import parse_records
from tiered.format.properties import value_of
from tiered.local.catalog import TIMER_TOPICS, WHEEL_TOPIC, check_topic
from tiered.local.layout import ABORT_FILE, TIMER_CHECK_FILE, read_topics
from tiered.local.mapped_file_queue import is_row_name
from tiered.local.queue_reader import cut_records
from tiered.log.timers import TimerSource
from tiered.model import MessageQueue
from tiered.store.disk import is_for_room, make_folder, replace_file, sync_folder
from tiered.store.embedded import MessageStore
from tiered.store.encoding import PROPERTIES_BYTES_MAX, QUEUE_ID_MAX
from tiered.store.restored import ReadyRecords
from timer.dequeue import DueBlock
from timer.hour_files import Enqueue
from timer.progress import WheelState, delivered_since, delivered_so_far, noted, opened
from timer.records import MARK, asked_times, changed_properties, names_of, number_of, raw_properties

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Mapping, Sequence

    import numpy.typing as npt
    from typing_extensions import Buffer

    from tiered.clock import Clock
    from tiered.format.block import RecordBlock
    from tiered.local.interface import LocalStore
    from tiered.store.encoding import QueueKey, RecordPlaces
    from tiered.store.store_options import StoreOptions
    from timer.dequeue import DueMessage
    from timer.hour_files import Given
    from timer.records import Flags, Longs

# -- for a broker --------------------------------------------------------------------------------
#
# What a broker needs to go on with our wheel's timers: ``timerlog/``, ``timerwheel`` and ``config/timercheck``.
#
# A broker that starts on a store without them reads its timer topic from the beginning, and delivers all of it again. So
# where our wheel is stopped cleanly it leaves what a broker would have left: a unit of the timer log for each message that
# waits, linked in the slot of its second; one of the topic's last record, by which a broker sees how far the topic was read;
# and the note of when and how far that was. Only what waits has a unit, so nothing else is delivered.
#
# The wheel has the one size that brokers give it. Files of the log are as large as those that lie there are by the distance
# of their names; a length alone may be that of a file that was cut, and is taken only where a broker may have been told it.
# The note is written last: without it, and
# after a kill, a broker goes by what was noted at the clean stop before, and may deliver again what was delivered since.
#
# Timer log unit (52 bytes, big-endian): size, position of the one before in its slot, magic (1; 2: to be rolled; 4: a
# delete mark), time of writing, delay, physical offset, size of the record, hash of its topic (metrics only), 8 bytes
# that are free. Wheel slot (32 bytes): its time in seconds, first and last position in the log, how many, 4 bytes that
# are free.

UNIT: Final = np.dtype(
    [
        *(("size", ">i4"), ("before", ">i8"), ("magic", ">i4"), ("written_ms", ">i8")),
        *(("delay_ms", ">i4"), ("physical", ">i8"), ("record_size", ">i4"), ("topic", ">i4")),
        ("free", ">i8"),
    ]
)
SLOT: Final = np.dtype(
    [("second", ">i8"), ("first", ">i8"), ("last", ">i8"), ("count", ">i4"), ("free", ">i4")]
)
LOG_FILE_BYTES: Final = 104_857_600
SLOTS: Final = 2 * 604_800
ROLL_S: Final = 2 * 86_400
"""What is due later is put into an earlier slot, and looked at again then."""
_BLANK: Final = struct.Struct(">iqi")
_BLANK_MAGIC: Final = 0xCBD43194 - (1 << 32)
_CHECK: Final = struct.Struct(">qqqq")
_CHECK_BYTES: Final = 4096
_DEFAULT, _ROLL, _DELETE = 1, 2, 4
_MIB, _UNITS_MIN = 1 << 20, 2


@dataclass(frozen=True, slots=True)
class PendingMessages:
    """Messages that wait in a wheel, in due order."""

    dues: Longs  # int64[n], as noted (``TIMER_OUT_MS``)
    physical: Longs  # int64[n], physical offsets of their records
    sizes: Longs  # int64[n], bytes of these
    marks: Flags  # bool[n], delete marks


def leave_wheel(
    root: str,
    waiting: PendingMessages,
    last: tuple[int, int],
    *,
    queue_end: int,
    read_ms: int,
    now_ms: int,
) -> None:
    """Leave what a broker needs to go on with the timers that wait.

    Args:
        last: Physical offset and size of the timer topic's last record.
        queue_end: One past that record's queue offset.
        read_ms: What was due by then was delivered.
    """
    check = Path(root, TIMER_CHECK_FILE)
    check.unlink(missing_ok=True)
    second = read_ms // 1000
    units, slots = plan_wheel(waiting, last, second, now_ms)
    end, file_bytes = _write_log(Path(root, "timerlog"), units)
    _write_wheel(Path(root, "timerwheel"), slots, file_bytes)
    sync_folder(root)
    noted = _CHECK.pack(second * 1000, end, queue_end, queue_end)
    replace_file(check, noted.ljust(_CHECK_BYTES, b"\0"))


def plan_wheel(
    waiting: PendingMessages, last: tuple[int, int], second: int, now_ms: int
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.void]]:
    """Units of the log, and slots of the wheel that name them by number. Pure."""
    late_s, now_s = np.maximum(waiting.dues // 1000, second), now_ms // 1000
    is_far = late_s - now_s >= ROLL_S
    left = np.where(late_s - now_s - ROLL_S < ROLL_S // 3, ROLL_S // 2, ROLL_S)
    seconds = np.where(is_far, now_s + left, late_s)
    order = np.argsort(seconds, kind="stable")
    seconds, count = seconds[order], len(order)
    units = np.zeros(count + 1, UNIT)
    units["size"], units["written_ms"] = UNIT.itemsize, now_ms
    is_first = np.append(True, seconds[1:] != seconds[:-1])[:count]
    units["before"][:count] = np.where(is_first, -1, np.arange(count) - 1)
    magic = _DEFAULT | np.where(is_far, _ROLL, 0) | np.where(waiting.marks, _DELETE, 0)
    units["magic"][:count] = magic[order]
    fires_ms = np.where(
        is_far, seconds[np.argsort(order)] * 1000, np.maximum(waiting.dues, second * 1000)
    )
    units["delay_ms"][:count] = (fires_ms - now_ms)[order]
    units["physical"][:count], units["record_size"][:count] = (
        waiting.physical[order], waiting.sizes[order],
    )  # fmt: skip
    over_ms = (second - 60) * 1000  # in a slot that nobody looks at any more
    units[count] = (UNIT.itemsize, -1, _DEFAULT, over_ms, 0, *last, 0, 0)
    firsts = np.flatnonzero(is_first)
    slots = np.zeros(len(firsts), SLOT)
    slots["second"], slots["first"] = seconds[firsts], firsts
    slots["last"] = np.append(firsts[1:], count)[: len(firsts)] - 1
    slots["count"] = slots["last"] - slots["first"] + 1
    return units, slots


def log_file_bytes(bases: Sequence[int], lengths: Sequence[int]) -> int:
    """How large the log's files are to be, by those that lie there. Pure.

    Args:
        bases: Their names, ascending.
    """
    steps, size = [after - before for before, after in pairwise(bases)], max(lengths, default=0)
    if any(not size or step % size for step in steps):  # all were cut; else a file is missing
        size = min(steps)
    is_told = size % UNIT.itemsize == 0 or size % _MIB == 0
    return size if is_told and size >= _UNITS_MIN * UNIT.itemsize else LOG_FILE_BYTES


def _write_log(folder: Path, units: npt.NDArray[np.void]) -> tuple[int, int]:
    """Write the units in the place of all that was there; where they end, and how large a file is."""
    make_folder(folder)
    old = sorted(one for one in folder.iterdir() if is_row_name(one.name) and one.is_file())
    file_bytes = log_file_bytes([int(one.name) for one in old], [one.stat().st_size for one in old])
    for one in old:
        one.unlink()
    per_file = (file_bytes - _BLANK.size) // UNIT.itemsize
    units["before"] = _positions(units["before"].astype(np.int64), file_bytes)
    for low in range(0, len(units), per_file):
        some = units[low : low + per_file]
        base = low // per_file * file_bytes
        with (folder / f"{base:020d}").open("wb") as file:
            file.write(some.tobytes())
            if len(some) == per_file:
                left = file_bytes - per_file * UNIT.itemsize
                file.write(_BLANK.pack(left, 0, _BLANK_MAGIC))
            file.truncate(file_bytes)
            file.flush()
            os.fsync(file.fileno())
    sync_folder(os.fspath(folder))
    end = _positions(np.array([len(units) - 1]), file_bytes)
    return int(end[0]) + UNIT.itemsize, file_bytes


def _positions(numbers: Longs, file_bytes: int) -> Longs:
    """Where units lie in the log; -1 stays."""
    per_file = (file_bytes - _BLANK.size) // UNIT.itemsize
    at = numbers // per_file * file_bytes + numbers % per_file * UNIT.itemsize
    return np.where(numbers < 0, -1, at)


def _write_wheel(path: Path, slots: npt.NDArray[np.void], file_bytes: int) -> None:
    """Write the slots into an empty wheel."""
    slots["first"] = _positions(slots["first"].astype(np.int64), file_bytes)
    slots["last"] = _positions(slots["last"].astype(np.int64), file_bytes)
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(SLOTS * SLOT.itemsize)
        for slot in slots:
            file.seek(int(slot["second"]) % SLOTS * SLOT.itemsize)
            file.write(slot.tobytes())
        file.flush()
        os.fsync(file.fileno())


# -- the target -------------------------------------------------------------------------------------

SAVE_S: Final = 1.0
_ROOM_S: Final = 1.0
WHEEL: Final = MessageQueue(WHEEL_TOPIC, 0)
_BATCH: Final = 4096
_BRIDGED: Final = 8
"""So far apart two records of a queue are still read in one go."""
_SOURCE: Final = 1 << 48
"""More than a queue offset."""
_READ_BYTES: Final = 8 << 20
_DUE: Final = b"TIMER_OUT_MS"
_KEY: Final = b"UNIQ_KEY"
_TOPIC: Final = b"REAL_TOPIC"
_QUEUE: Final = b"REAL_QID"
_REAL: Final = (_TOPIC, _QUEUE)
_CRC: Final = (b"__CRC32#",)
_NOT_KEPT: Final = (b"DELAY", b"TIMER_ROLL_TIMES", *_CRC)
_DELIVERED: Final = b"TIMER_DEQUEUE_MS"
_LOG = logging.getLogger("tiered.timer")

Name = tuple[int, bytes]


class LocalTarget:
    """See the module. ``tick`` may be called while another thread gives; otherwise for one thread. ``close`` it.

    Attributes:
        delivered: Messages delivered by this process.
        refused: Messages that it took, and could not deliver since the store refuses them. (What ``give`` refuses is
            refused in time, and not counted here.)
        missing: Messages that were due and cannot be read from the store any more.
        late_ms_max: The latest that a message was, of those that were known in time.
    """

    @classmethod
    def open(
        cls,
        directory: str,
        *,
        cluster: str,
        broker: str,
        clock: Clock,
        rng: random.Random,
        options: StoreOptions | None = None,
        stop: threading.Event | None = None,
    ) -> Self:
        """Open a store, or make one where there is none; find what is pending in it.

        Args:
            cluster: Its name, where the store does not say.
            stop: Set when nothing is to be waited for any more; see ``stopping``.

        Raises:
            InvalidError: It is not a store, or someone else writes to it.
        """
        if is_vacant(directory):
            store = MessageStore.create(
                directory, cluster=cluster, broker=broker, clock=clock, options=options, rng=rng
            )
            made = cls(store, WheelState(_new_mark(rng), -1, {}), (), -1, clock)
            made.stopping = stop or made.stopping
            return made
        with opened(directory, clock) as local:
            _require_whole(local, directory)
            state = noted(directory, local, _new_mark(rng))
            given = delivered_since(local, state)
            last_ms, pending = given.last_due_ms, list(_pending(directory, local, given))
        said = read_topics(directory)
        store = MessageStore.open(
            directory,
            cluster=said.cluster or cluster,
            broker=said.broker or broker,
            clock=clock,
            options=options,
            rng=rng,
        )
        made = cls(store, state, pending, last_ms, clock)
        made.stopping = stop or made.stopping
        return made

    def __init__(
        self,
        store: MessageStore,
        state: WheelState,
        pending: Sequence[tuple[MessageQueue, Longs, Longs]],
        last_ms: int,
        clock: Clock,
    ) -> None:
        """Used by ``open``."""
        self.store = store
        # Ends waiting for room on the disk: whatever is put in, or delivered, waits until it is there.
        self.stopping = threading.Event()
        self.wheel = TimingWheel()  # what is not delivered yet
        self.delivered = self.refused = self.missing = self.late_ms_max = 0
        self._state = state
        self._clock = clock
        self._sources: list[MessageQueue] = []
        self._number: dict[MessageQueue, int] = {}
        self._read_ms = max(state.read_ms, last_ms)  # nothing that is due later was delivered
        self._saved_s = clock.monotonic_s()
        self._lock = threading.Lock()
        """Held while something goes into the wheel or leaves it: what ``_save`` notes of the store's ends has to be true of
        the wheel, or a crash would lose what is due before the noted time and was given meanwhile."""
        self._is_torn = False  # something left the wheel, and may not have been delivered
        for queue, dues, offsets in pending:
            self.wheel.add(dues, self._source(queue), offsets)
        state.write(store.root)

    def close(self) -> None:
        """Note how far it is, and close the store."""
        try:
            with self._lock:
                if self._save():
                    self._leave_wheel()
        finally:
            self.store.close()

    def _leave_wheel(self) -> None:
        """Leave what a broker needs that goes on with the store. Where the disk refuses it, one would deliver again."""
        end = self.store.queue_end(WHEEL)
        last = self.store.reader.block(WHEEL, max(0, end - 1), end)
        if not len(last):
            return  # nothing is in the wheel's topic
        dues, sources, offsets = self.wheel.rows()
        own = np.array([self._sources[n] == WHEEL for n in sources.tolist()], np.bool_)
        waiting = self._waiting(dues[own], offsets[own])
        place = int(last.physical_offsets[0]), int(last.sizes[0])
        try:
            leave_wheel(
                self.store.root, waiting, place, queue_end=end, read_ms=self._read_ms,
                now_ms=self._clock.now_ms(),
            )  # fmt: skip
        except OSError as error:
            _LOG.error("a broker that starts on this store would deliver timers again: %s", error)

    def _waiting(self, dues: Longs, offsets: Longs) -> PendingMessages:
        """Where the records lie of what waits in the wheel's topic; those that are gone are left out."""
        columns: list[tuple[Longs, Longs, Longs, Flags]] = []
        order = np.argsort(offsets)
        dues, offsets = dues[order], offsets[order]
        for low in range(0, len(offsets), _BATCH):
            some, own = offsets[low : low + _BATCH], dues[low : low + _BATCH]
            for at in range(int(some[0]), int(some[-1]) + 1, _BATCH):
                block = self.store.reader.block(WHEEL, at, min(at + _BATCH, int(some[-1]) + 1))
                found = np.flatnonzero(np.isin(block.queue_offsets, some))
                number = np.searchsorted(some, block.queue_offsets[found])
                raws = raw_properties(block)
                marks = np.array([bool(value_of(raws[n], MARK)) for n in found.tolist()], np.bool_)
                sizes = block.sizes[found].astype(np.int64)
                columns.append((own[number], block.physical_offsets[found], sizes, marks))
        if not columns:
            none = np.empty(0, np.int64)
            return PendingMessages(none, none, none, np.empty(0, np.bool_))
        found_dues, physical, sizes = (
            np.concatenate([row[n] for row in columns]) for n in range(3)
        )
        marks = np.concatenate([row[3] for row in columns])
        return PendingMessages(found_dues, physical, sizes, marks)

    # -- the face of a target -------------------------------------------------------------------

    def mark(self) -> Mapping[str, Any]:
        return {"kind": "store", "id": self._state.mark, "offset": self.store.queue_end(WHEEL)}

    def has(self, messages: Sequence[DueMessage], mark: Mapping[str, Any]) -> list[bool]:
        """See ``timer.handover.Target``: by due time and unique id. Of another store's mark all is looked through."""
        is_ours = mark.get("id") == self._state.mark
        low = mark.get("offset", 0) if is_ours else 0
        self._wait_listed()
        known: Counter[Name] = Counter()
        for at in range(low, self.store.queue_end(WHEEL), _BATCH):
            block = self.store.reader.block(WHEEL, at, at + _BATCH)
            known.update(map(_name_of, raw_properties(block)))
        found = []
        block = _parsed(given := DueBlock.of(messages))
        dues = _own_dues(block, given.dues).tolist()
        for name in zip(dues, map(_key_of, raw_properties(block)), strict=True):
            found.append(known[name] > 0)
            known[name] -= 1
        return found

    def give(self, messages: Sequence[DueMessage]) -> list[int]:
        """See ``timer.handover.Target``. On the disk when this returns."""
        due, refused = DueBlock.of(messages), list[int]()
        if not len(due):
            return refused
        try:
            self._put(due)
        except InvalidError:
            refused = [
                one.offset for at, one in enumerate(due) if not self._put_one(due[at : at + 1])
            ]
        self.store.flush()
        return refused

    def _put(self, due: DueBlock) -> None:
        """Put messages into the wheel. What could not be delivered is refused here, where its file is still kept for it."""
        block = _parsed(due)
        dues, raws = _own_dues(block, due.dues), raw_properties(block)
        for topic, queue_id in {(value_of(raw, _TOPIC), value_of(raw, _QUEUE)) for raw in raws}:
            _real_queue(topic, queue_id)
        made = [
            changed_properties(raw, _NOT_KEPT, {_DUE: b"%d" % ms})
            for raw, ms in zip(raws, dues.tolist(), strict=True)
        ]
        queues = [(WHEEL.topic, WHEEL.queue_id)] * len(due)
        ready = ReadyRecords(block, queues, made, self.store.options)
        with self._lock:
            offsets = np.array(self._append(ready).queue_offsets, np.int64)
            self.wheel.add(dues, self._source(WHEEL), offsets)

    def _put_one(self, due: DueBlock) -> bool:
        try:
            self._put(due)
        except InvalidError as error:
            key = value_of(raw_properties(_parsed(due))[0], _KEY)
            _LOG.error(
                "a timer that the store refuses (%s): %s", key.decode("utf-8", "replace"), error
            )
            return False
        return True

    # -- delivering -----------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Messages in the wheel."""
        return len(self.wheel)

    @property
    def next_ms(self) -> int | None:
        """When something may be due; None: nothing is there."""
        next_ms = self.wheel.next_ms
        return None if next_ms is None else next_ms + SLOT_MS

    def tick(self) -> int:
        """Deliver what is due; how many messages. Notes now and then how far it is."""
        with self._lock:
            return self._tick()

    def _tick(self) -> int:
        now_ms = self._clock.now_ms()
        over_ms = now_ms - SLOT_MS  # the second that was noted has to be over
        fired = self.wheel.fire(over_ms)
        before, low = self.delivered, 0
        self._is_torn = True
        if len(fired):
            self._wait_listed()
        while low < len(fired):
            high = _batch_end(fired.dues, low)
            self._deliver(fired.part(low, high), now_ms)
            low = high
        self._is_torn = False
        self._read_ms = max(self._read_ms, over_ms)
        count = self.delivered - before
        if count and self._clock.monotonic_s() - self._saved_s >= SAVE_S:
            self._save()
        return count

    def _deliver(self, fired: Fired, now_ms: int) -> None:
        """Put messages into their real topics, but those that a delete mark among them cancels."""
        due = self._read(fired)
        raws = raw_properties(_parsed(due))
        dues = due.dues.tolist()
        marks = {
            (ms, mark) for ms, raw in zip(dues, raws, strict=True) if (mark := value_of(raw, MARK))
        }
        if marks:
            kept = [
                at
                for at, (ms, raw) in enumerate(zip(dues, raws, strict=True))
                if not value_of(raw, MARK) and marks.isdisjoint(names_of(ms, raw))
            ]
            due = DueBlock.of([due[at] for at in kept])
        if not len(due):
            return
        try:
            self._put_real(due, now_ms)
        except InvalidError:
            for at in range(len(due)):
                self._put_one_real(due[at : at + 1], now_ms)
        self.late_ms_max = max(self.late_ms_max, now_ms - SLOT_MS - int(due.dues[0]))

    def _put_real(self, due: DueBlock, now_ms: int) -> None:
        block, now = _parsed(due), b"%d" % now_ms
        queues, made = [], []
        for raw, ms in zip(raw_properties(block), due.dues.tolist(), strict=True):
            queues.append(_real_queue(value_of(raw, _TOPIC), value_of(raw, _QUEUE)))
            made.append(_delivered_properties(raw, b"%d" % ms, now))
        self._append(ReadyRecords(block, queues, made, self.store.options))
        self.delivered += len(due)

    def _append(self, records: ReadyRecords) -> RecordPlaces:
        """Append as soon as there is room. What the disk refuses for lack of it has not been stored."""
        is_said = False
        while True:
            try:
                return self.store.append_records(records)
            except StoreUnavailableError as error:
                if not is_for_room(error):
                    raise
                if not is_said:
                    _LOG.warning("timers wait for room on the disk: %s", error)
                    is_said = True
                if self._clock.wait(self.stopping, _ROOM_S):
                    raise

    def _wait_listed(self) -> None:
        """Wait until all that was put in can be read: what cannot be yet is not missing."""
        while not self.store.wait_listed():
            self.store.flush()  # tells whether the store goes on
            if self.stopping.is_set():
                raise StoreUnavailableError(
                    "what was put in is not listed yet",
                    where=self.store.root,
                    do="make room on the disk",
                )

    def _put_one_real(self, due: DueBlock, now_ms: int) -> None:
        try:
            self._put_real(due, now_ms)
        except InvalidError as error:
            self.refused += 1
            _LOG.error("a timer cannot be delivered: %s", error)

    def _read(self, fired: Fired) -> DueBlock:
        """The records of what fired: mostly they lie side by side, since they were handed over in due order."""
        codes: list[Longs] = [np.empty(0, np.int64)]
        sizes: list[Longs] = [np.empty(0, np.int64)]
        chunks: list[Buffer] = []
        for source in np.unique(fired.sources).tolist():
            wanted = np.unique(fired.offsets[fired.sources == source])
            for run in np.split(wanted, np.flatnonzero(np.diff(wanted) > _BRIDGED) + 1):
                low, high = int(run[0]), int(run[-1]) + 1
                block = self.store.reader.block(self._sources[source], low, high)
                found = np.flatnonzero(np.isin(block.queue_offsets, run))
                codes.append(source * _SOURCE + block.queue_offsets[found])
                sizes.append(block.sizes[found].astype(np.int64))
                chunks.append(cut_records(block, found)[0])
        due = _matched(fired, np.concatenate(codes), np.concatenate(sizes), b"".join(chunks))
        if lost := len(fired) - len(due):
            self.missing += lost
            _LOG.error(
                "%d timers cannot be read from the store any more, and are not delivered", lost
            )
        return due

    def _source(self, queue: MessageQueue) -> int:
        number = self._number.get(queue)
        if number is None:
            number = self._number[queue] = len(self._sources)
            self._sources.append(queue)
        return number

    def _save(self) -> bool:
        """Note how far it is; whether that could be.

        Not so when a delivery was cut short: the next who opens the store finds by its log what is missing. Nor when the
        clock was set back and something waits that is due before what was delivered.
        """
        first = self.wheel.first_due_ms
        if self._is_torn or self._read_ms < 0 or (first is not None and first <= self._read_ms):
            return False
        if not self.store.wait_listed():
            return False  # what lies behind is found by the log
        self.store.flush()
        queues = self.store.queues()
        ends = {str(queue): int(end) for queue, end in queues.items()}
        state = WheelState(self._state.mark, self._read_ms, ends)
        try:
            state.write(self.store.root)
        except (OSError, StoreUnavailableError) as error:
            if not is_for_room(error):
                raise
            _LOG.warning("how far timers are is noted when there is room on the disk: %s", error)
            return False
        self._state = state
        self._saved_s = self._clock.monotonic_s()
        return True


def _new_mark(rng: random.Random) -> str:
    return f"{rng.getrandbits(64):016x}"


def _require_whole(local: LocalStore, directory: str) -> None:
    """Refuse a store that was stopped cleanly and is damaged.

    It is read up to the damage, as a broker's start would cut it there, and goes on behind it all the same: what is pending
    behind, and whatever is given to it later, would be in no wheel any more when it is opened again. (Of one that was not
    stopped cleanly, recovery decides.)
    """
    waiting = local.waiting()
    if waiting.is_behind_damage and not Path(directory, ABORT_FILE).exists():
        raise DataError(
            f"{waiting.records} records, timers perhaps among them, lie {waiting.reason}",
            where=directory,
            do="or hand over to another directory: what waits in this one is not delivered then",
        )


def _pending(
    directory: str, local: LocalStore, given: Given
) -> Iterator[tuple[MessageQueue, Longs, Longs]]:
    """What is not delivered: of each queue due times and offsets."""
    progress = delivered_so_far(directory)
    for queue, bounds in sorted(local.queues().items()):
        if queue.topic in TIMER_TOPICS:
            none = TimerSource(bounds.min, bounds.end)
            source = Enqueue(queue, bounds, progress(queue), none, 0, given)
            for dues, offsets in source.columns(local):
                yield queue, dues, offsets


def _parsed(due: DueBlock) -> RecordBlock:
    """The records' fields."""
    block = parse_records(due.data, due.positions, due.sizes.astype(np.int32))
    if not block.is_sound:
        raise DataError("a timer's record is damaged", do="run `tiered verify --timers`")
    return block


def _matched(fired: Fired, codes: Longs, sizes: Longs, data: bytes) -> DueBlock:
    """The records in the order in which they fired, but for those that are not there any more."""
    order = np.argsort(codes)
    wanted = fired.sources * _SOURCE + fired.offsets
    at = np.searchsorted(codes[order], wanted)
    is_there = at < len(codes)
    is_there[is_there] = codes[order[at[is_there]]] == wanted[is_there]
    chosen = order[at[is_there]]
    dues, offsets = fired.dues[is_there], fired.offsets[is_there]
    if not (np.diff(chosen) == 1).all():
        view, starts = memoryview(data), (np.cumsum(sizes) - sizes)[chosen].tolist()
        ends = np.cumsum(sizes)[chosen].tolist()
        data = b"".join([view[start:end] for start, end in zip(starts, ends, strict=True)])
    elif len(chosen):
        begin = int(sizes[: chosen[0]].sum())
        data = data[begin : begin + int(sizes[chosen].sum())]
    return DueBlock(dues, offsets, sizes[chosen], data)


def _batch_end(dues: Longs, low: int) -> int:
    """Where a batch ends that begins at ``low``: what is due at one time, as a message and its mark, is not divided."""
    high = min(low + _BATCH, len(dues))
    alike = int(np.searchsorted(dues, dues[high - 1], side="right"))
    return min(alike, low + 16 * _BATCH)


def _own_dues(block: RecordBlock, dues: Longs) -> Longs:
    """What is noted here as due: of a message from a coarser wheel the second before the time that it asked for."""
    return asked_times(block, dues) - SLOT_MS


def _name_of(raw: bytes) -> Name:
    return number_of(value_of(raw, _DUE), -1), _key_of(raw)


def _key_of(raw: bytes) -> bytes:
    return value_of(raw, _KEY)


@lru_cache(maxsize=4096)
def _real_queue(topic: bytes, queue_id: bytes) -> QueueKey:
    """Where a message is delivered."""
    name, number = topic.decode("utf-8", "replace"), number_of(queue_id, 0)
    check_topic(name)
    if number > QUEUE_ID_MAX:
        raise InvalidError(f"queue {number} of topic {name}: at most {QUEUE_ID_MAX} may be")
    return name, number


def _delivered_properties(raw: bytes, due: bytes, now: bytes) -> bytes:
    """Those of a message that is delivered: when it was due, and when it came, by which it is known after a crash.

    A message that has no room for it gives up what its place says as well, its real topic and queue, and then the time: 0
    tells as well that it was delivered. What comes from a broker's delay levels is known without either.
    """
    said = {_DUE: due, _DELIVERED: now}
    made = changed_properties(raw, _CRC, said)
    if len(made) > PROPERTIES_BYTES_MAX:
        made = changed_properties(raw, (*_CRC, *_REAL), said)
    if len(made) > PROPERTIES_BYTES_MAX:
        made = changed_properties(raw, (*_CRC, *_REAL), {_DUE: due, _DELIVERED: b"0"})
    return made if len(made) <= PROPERTIES_BYTES_MAX else changed_properties(raw, _CRC, {})


# --------------------------------------------------------------------------------------------------
# A hashed timing wheel: what is due when, in slots of one second. Pure; for one thread.
#
# Each entry is three numbers (due time, source, offset), so a million take some tens of MB; messages are read when they
# fire. Entries come and go as columns. Within a slot the order is made when it fires: due time, then source, then
# offset. A slot that lies in the past fires at once, so what comes late is not lost.
# --------------------------------------------------------------------------------------------------


SLOT_MS: Final = 1000
_WIDTH: Final = 3


@dataclass(frozen=True, slots=True)
class Fired:
    """Entries that are due, in order."""

    dues: Longs  # int64[n], due times
    sources: Longs  # int64[n]
    offsets: Longs  # int64[n]

    def __len__(self) -> int:
        """How many."""
        return len(self.dues)

    def part(self, low: int, high: int) -> Fired:
        """Those of ``[low, high)``."""
        return Fired(self.dues[low:high], self.sources[low:high], self.offsets[low:high])


class TimingWheel:
    """Entries by when they are due, in slots of a second; there is a slot only where something is due."""

    def __init__(self) -> None:
        self._slots: dict[int, array[int]] = {}
        self._order: list[int] = []
        self._count = 0

    def __len__(self) -> int:
        """Entries that have not fired."""
        return self._count

    def add(self, dues: Longs, source: int, offsets: Longs) -> None:
        """Take entries of one source; ``dues`` in any order, though ascending costs least."""
        rows = np.column_stack((dues, np.full(len(dues), source), offsets))
        self._add(rows)

    def _add(self, rows: Longs) -> None:
        slots = rows[:, 0] // SLOT_MS
        if len(slots) > 1 and (slots[1:] < slots[:-1]).any():
            order = np.argsort(slots, kind="stable")
            rows, slots = rows[order], slots[order]
        edges = [0, *(np.flatnonzero(np.diff(slots)) + 1).tolist(), len(slots)]
        for low, high in pairwise(edges):
            if low < high:
                self._slot(int(slots[low])).frombytes(rows[low:high].astype(np.int64).tobytes())
        self._count += len(rows)

    def _slot(self, slot: int) -> array[int]:
        entries = self._slots.get(slot)
        if entries is None:
            entries = self._slots[slot] = array("q")
            heapq.heappush(self._order, slot)
        return entries

    @property
    def next_ms(self) -> int | None:
        """When the first slot that has anything begins; None: none has."""
        return self._order[0] * SLOT_MS if self._order else None

    @property
    def first_due_ms(self) -> int | None:
        """The smallest due time; None: nothing is there."""
        return min(self._slots[self._order[0]][::_WIDTH]) if self._order else None

    def rows(self) -> tuple[Longs, Longs, Longs]:
        """Due time, source and offset of all that is in it, in no order."""
        slots = [np.frombuffer(entries, np.int64) for entries in self._slots.values()]
        rows = np.concatenate([np.empty(0, np.int64), *slots]).reshape(-1, _WIDTH)
        return rows[:, 0], rows[:, 1], rows[:, 2]

    def fire(self, now_ms: int) -> Fired:
        """Take out what is due by now, in order; of the present slot what is due later stays."""
        found = [np.empty((0, _WIDTH), np.int64)]
        while self._order and self._order[0] * SLOT_MS <= now_ms:
            slot = heapq.heappop(self._order)
            rows = np.frombuffer(self._slots.pop(slot), np.int64).reshape(-1, _WIDTH)
            self._count -= len(rows)
            rows = rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))]
            due = int(np.searchsorted(rows[:, 0], now_ms, side="right"))
            found.append(rows[:due])
            if due < len(rows):
                self._add(rows[due:])
                break
        return Fired(*np.ascontiguousarray(np.concatenate(found).T))
