"""Timers of a tier in memory, a virtual clock, and a target that can be killed, or be deaf."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from backends.memory import MemoryStore
from tiered.api.broker_place import Place
from tiered.clock import ManualClock
from tiered.dispatch.group_commit import Uploader
from tiered.errors import StoreUnavailableError
from tiered.format.properties import join_properties
from tiered.format.record import Record, body_crc, decode_record, encode_record
from tiered.journal.append import JournalWriter
from tiered.local.catalog import WHEEL_TOPIC
from tiered.local.interface import RecordBatch
from tiered.log.state import TierMachine, TierState
from tiered.log.timers import HOUR_MS, TimersTaken
from tiered.model import MessageQueue, QueueOffset
from timer.dequeue import DueMessage, TimerReader
from timer.handover import HandOver, Target
from timer.hour_files import ChosenTimers, Counts, TimerWriter
from timer.local_target import TimingWheel
from timer.records import read_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from backends.base import ObjectStore

PREFIX = "timer/"


class _Place(Place):
    """Where ``Timers`` puts them."""

    @property
    def prefix(self) -> str:
        return PREFIX


PLACE = _Place("c", "b")

SOURCE = MessageQueue(WHEEL_TOPIC, 0)


class Killed(BaseException):
    """Where a kill would have ended the process."""


def wheel_record(offset: int, due_ms: int, **properties: str) -> bytes:
    """As a broker keeps a timed message; its unique id is its offset unless ``UNIQ_KEY`` says otherwise."""
    said = {
        "UNIQ_KEY": f"{offset:032X}",
        "REAL_TOPIC": "orders",
        "REAL_QID": "2",
        "TIMER_OUT_MS": str(due_ms),
        **properties,
    }
    body, raw = b"x" * 40, join_properties(said)
    return encode_record(
        Record(
            size=88 + len(body) + 1 + len(WHEEL_TOPIC) + 2 + len(raw),
            version=1,
            body_crc=body_crc(body),
            queue_id=0,
            flag=0,
            queue_offset=offset,
            physical_offset=1_000 * offset,
            sys_flag=0,
            born_timestamp_ms=1_600_000_000_000,
            born_host="10.0.0.1:4000",
            store_timestamp_ms=1_600_000_000_001 + offset,
            store_host="10.0.0.2:10911",
            reconsume_times=0,
            prepared_transaction_offset=0,
            body=body,
            topic=WHEEL_TOPIC,
            properties_raw=raw,
        )
    )


def wheel_batch(base: int, records: Sequence[bytes]) -> RecordBatch:
    """Records of the wheel's topic, from a queue offset on."""
    sizes = np.array([len(one) for one in records], np.int32)
    ends = sizes.cumsum(dtype=np.int64)
    return RecordBatch(
        queue=SOURCE,
        base_offset=QueueOffset(base),
        data=b"".join(records),
        positions=ends - sizes,
        sizes=sizes,
        tag_codes=np.zeros(len(sizes), np.int64),
        store_timestamps_ms=1_600_000_000_001 + base + np.arange(len(sizes)),
        physical_offsets=1_000 * (base + np.arange(len(sizes))),
    )


@dataclass
class Box:
    """A target.

    Attributes:
        got: What it took, in order.
        dies: Ends the process ``before``, ``within`` or ``after`` the batch of this number.
        fails: Of the next batches only so many messages are taken, and then nothing is answered.
        wheel: Of what it took and has not delivered.
        max_waiting: The most that was.
    """

    got: list[DueMessage] = field(default_factory=list)
    dies: tuple[str, int] | None = None
    fails: list[int] = field(default_factory=list)
    wheel: TimingWheel = field(default_factory=TimingWheel)
    max_waiting: int = 0

    def mark(self) -> Mapping[str, Any]:
        return {"box": len(self.got)}

    def has(self, messages: Sequence[DueMessage], mark: Mapping[str, Any]) -> list[bool]:
        names = [one.record for one in self.got[mark.get("box", 0) :]]
        found = []
        for message in messages:
            found.append(message.record in names)
            if found[-1]:
                names.remove(message.record)
        return found

    def give(self, messages: Sequence[DueMessage]) -> list[int]:
        moment = self._moment()
        if moment == "before":
            raise Killed
        taken = len(messages) // 2 if moment == "within" else len(messages)
        taken = min(taken, self.fails[0]) if self.fails else taken
        dues = np.array([message.due_ms for message in messages[:taken]], np.int64)
        self.wheel.add(dues, 0, len(self.got) + np.arange(taken))
        self.got += messages[:taken]
        self.max_waiting = max(self.max_waiting, len(self.wheel))
        if moment:
            raise Killed
        if self.fails:
            self.fails.pop(0)
            raise StoreUnavailableError("no answer")
        return []

    def _moment(self) -> str:
        if self.dies is None:
            return ""
        moment, left = self.dies
        self.dies = (moment, left - 1)
        return "" if left else moment


class Timers:
    """The timers' place of a tier in memory."""

    def __init__(self, store: ObjectStore | None = None, clock: Any = None) -> None:
        self.store = store or MemoryStore()
        self.clock = clock or ManualClock(1_700_000_000_000 // HOUR_MS * HOUR_MS)
        self.stop = threading.Event()
        self._rng = random.Random(11)
        self._next = 0
        self._runs: list[HandOver] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for run in self._runs:
            run.close()

    @property
    def now_ms(self) -> int:
        return self.clock.now_ms()

    def journal(self) -> JournalWriter[TierState]:
        writer = f"{self._rng.getrandbits(32):08x}"
        return JournalWriter(
            self.store, PREFIX, TierMachine(), writer=writer, clock=self.clock, rng=self._rng,
            stop=self.stop,
        )  # fmt: skip

    def put(self, dues: Sequence[int], **properties: str) -> None:
        """One more writer takes these, in this order, as one round."""
        records = [wheel_record(self._next + n, due, **properties) for n, due in enumerate(dues)]
        self.put_records(records)

    def put_records(self, records: Sequence[bytes]) -> None:
        if not records:
            return
        journal = self.journal()
        journal.take_epoch({"host": "here"})
        uploader = Uploader(
            self.store, PREFIX, epoch=journal.epoch, writer=journal.writer,
            clock=self.clock,
        )  # fmt: skip
        writer = TimerWriter(
            journal, lambda some: uploader.put_commits(some, alone=False), clock=self.clock,
            rng=self._rng, stop=self.stop,
        )  # fmt: skip
        rows = read_rows(wheel_batch(self._next, records))
        high = self._next + len(records)
        writer.add(ChosenTimers(rows, np.arange(len(records)), high, Counts()))
        writer.commit([TimersTaken(SOURCE, 0, 0, self._next, high, 0)])
        self._next = high

    def run(self, box: Target, *, near_ms: int = HOUR_MS, batch: int = 100) -> HandOver:
        """A run that has begun."""
        reader = TimerReader(self.store, PREFIX)
        run = HandOver(reader, self.journal(), box, near_ms, self.clock, batch=batch)
        self._runs.append(run)
        run.begin({"host": "here", "pid": 1})
        return run

    def hand(self, box: Box, *, near_ms: int = HOUR_MS, batch: int = 100) -> HandOver:
        """A whole run: until nothing is to be handed over now."""
        run = self.run(box, near_ms=near_ms, batch=batch)
        while run.step():
            pass
        return run

    def live(self, box: Box, hours: int, *, near_ms: int) -> list[tuple[int, int]]:
        """Hand over and deliver for so many hours; (due, delivered at) of each, in the order of delivery."""
        run, delivered = self.run(box, near_ms=near_ms), []
        end_ms = self.now_ms + hours * HOUR_MS + near_ms
        while self.now_ms < end_ms:
            while run.step():
                pass
            delivered += [(due, self.now_ms) for due in box.wheel.fire(self.now_ms).dues.tolist()]
            moments = [m for m in (run.next_ms, box.wheel.next_ms) if m is not None]
            if not moments:
                break
            self.clock.advance(max(0.999, (min(moments) - self.now_ms) / 1000))
        return delivered

    def messages(self, box: Box) -> list[str]:
        """Unique ids of what a box took."""
        return [decode_record(one.record, 0).properties["UNIQ_KEY"] for one in box.got]
