"""An embedded store as the target: what is handed over is kept there as a broker keeps timers, and delivered by a wheel.

Overview: ``give`` puts messages into the store's topic ``rmq_sys_wheel_timer`` and into a timing wheel; ``tick`` delivers
what is due to its real topic. Delay levels (``SCHEDULE_TOPIC_XXXX``) that the store has are delivered as well, and so is
what a broker left pending in it.

After a crash: nothing here has to survive but the log. ``config/tieredWheel.json`` says up to which due time all was
delivered, and how far each queue of the store was then; what was delivered since is found among what came into the queues
behind that place, by unique id and due time. So each is delivered once. As long as it says no time (a broker's directory)
the broker's own ``config/timercheck`` and ``config/delayOffset.json`` say how far it was.

A broker that starts on the directory is not told what this wheel has delivered: it would deliver again. (Its timer log is
not written here.)

Never early: a message is delivered when the store's clock has reached its due time. A clock that is set back delays
what is due, one that is set forward delivers what it calls due.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from tiered.errors import InvalidError
from tiered.format import properties as names
from tiered.format.record import Record, decode_record
from tiered.local.catalog import SCHEDULE_TOPIC, WHEEL_TOPIC
from tiered.local.layout import read_timer_progress, read_topics
from tiered.local.rocketmq import RocketMQOptions, RocketMQStore
from tiered.log.timers import TimerSource
from tiered.model import MessageQueue, QueueOffset
from tiered.store.message_store import MessageStore
from tiered.store.special import message_of
from timer.enqueue import Enqueue, ImportProgress
from timer.records import number_of, read_rows, value_of
from timer.wheel import TimingWheel

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Mapping, Sequence

    from tiered.clock import Clock
    from tiered.local.layout import TimerProgress
    from tiered.store.messages import Message
    from tiered.store.options import StoreOptions
    from timer.dequeue import DueMessage
    from timer.records import TimerRows
    from timer.wheel import Fired

STATE_FILE: Final = "config/tieredWheel.json"
SAVE_S: Final = 1.0
WHEEL: Final = MessageQueue(WHEEL_TOPIC, 0)
_BATCH: Final = 512
_LAG_MS: Final = 60_000
"""A broker's files are not older than that."""
_READ_BYTES: Final = 8 << 20
_DUE: Final = b"TIMER_OUT_MS\x01"
_KEY: Final = b"UNIQ_KEY\x01"
_DELIVERED: Final = b"TIMER_DEQUEUE_MS\x01"
_LOG = logging.getLogger("tiered.timer")

Name = tuple[int, bytes]


class LocalTarget:
    """See the module. For one thread; ``close`` it.

    Attributes:
        store: The store.
        wheel: What is not delivered yet.
        delivered: Messages delivered by this process.
        refused: Messages whose real topic the store refuses.
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
    ) -> Self:
        """Open a store, or make one where there is none; find what is pending in it.

        Args:
            directory: Of the store.
            cluster: Its name, where the store does not say.
            broker: Likewise.
            clock: Time of deliveries.
            rng: For the store's mark, and unique ids.
            options: Of the store.

        Raises:
            InvalidError: It is no store, or someone else writes to it.
            DataError: It is damaged.
            StoreUnavailableError: The disk refuses it.
        """
        folder = Path(directory)
        if not folder.exists() or not any(folder.iterdir()):
            store = MessageStore.create(
                directory, cluster=cluster, broker=broker, clock=clock, options=options, rng=rng
            )
            return cls(store, _State(_new_mark(rng), -1, {}), (), -1, clock)
        state, pending, last_ms = _find_pending(directory, _new_mark(rng), clock)
        said = read_topics(directory)
        store = MessageStore.open(
            directory,
            cluster=said.cluster or cluster,
            broker=said.broker or broker,
            clock=clock,
            options=options,
            rng=rng,
        )
        return cls(store, state, pending, last_ms, clock)

    def __init__(
        self,
        store: MessageStore,
        state: _State,
        pending: Sequence[tuple[int, MessageQueue, int]],
        last_ms: int,
        clock: Clock,
    ) -> None:
        """Used by ``open``."""
        self.store = store
        self.wheel = TimingWheel()
        self.delivered = self.refused = self.late_ms_max = 0
        self._state = state
        self._clock = clock
        self._sources: list[MessageQueue] = []
        self._number: dict[MessageQueue, int] = {}
        self._read_ms = max(state.read_ms, last_ms)  # nothing that is due later was delivered
        self._saved_s = clock.monotonic_s()
        for due, queue, offset in pending:
            self.wheel.add(due, self._source(queue), offset)
        state.write(store.root)

    def close(self) -> None:
        """Note how far it is, and close the store."""
        try:
            self._save()
        finally:
            self.store.close()

    # -- the face of a target -------------------------------------------------------------------

    def mark(self) -> Mapping[str, Any]:
        """See ``timer.handover.Target``."""
        return {"kind": "store", "id": self._state.mark, "offset": self.store.queue_end(WHEEL)}

    def has(self, messages: Sequence[DueMessage], mark: Mapping[str, Any]) -> list[bool]:
        """See ``timer.handover.Target``: by due time and unique id. Of another store's mark all is looked through."""
        is_ours = mark.get("id") == self._state.mark
        low = mark.get("offset", 0) if is_ours else 0
        self.store.wait_listed()
        known = Counter(map(_name_of, self._records(WHEEL, low, self.store.queue_end(WHEEL))))
        found = []
        for message in messages:
            name = _name_of(_timed(message))
            found.append(known[name] > 0)
            known[name] -= 1
        return found

    def give(self, messages: Sequence[DueMessage]) -> int:
        """See ``timer.handover.Target``. On the disk when this returns."""
        refused = 0
        records = [(message.due_ms, _timed(message)) for message in messages]
        made = [message_of(replace(record, queue_id=0)) for _, record in records]
        try:
            self._put([due for due, _ in records], made)
        except InvalidError:
            for (due, record), message in zip(records, made, strict=True):
                refused += self._put_one(due, record, message)
        self.store.flush()
        return refused

    def _put(self, dues: Sequence[int], made: Sequence[Message]) -> None:
        places = self.store.append_batch(made)
        number = self._source(WHEEL)
        for due, place in zip(dues, places, strict=True):
            self.wheel.add(due, number, place.queue_offset)

    def _put_one(self, due: int, record: Record, message: Message) -> int:
        try:
            self._put([due], [message])
        except InvalidError as error:
            self.refused += 1
            _LOG.error("a timer that the store refuses (%s): %s", _name_of(record)[1], error)
            return 1
        return 0

    # -- delivering -----------------------------------------------------------------------------

    @property
    def next_ms(self) -> int | None:
        """When something may be due; None: nothing is there."""
        return self.wheel.next_ms

    def tick(self) -> int:
        """Deliver what is due; how many messages. Notes now and then how far it is."""
        now_ms = self._clock.now_ms()
        fired = self.wheel.fire(now_ms)
        count = 0
        if fired:
            self.store.wait_listed()
        for at in range(0, len(fired), _BATCH):
            count += self._deliver(fired[at : at + _BATCH], now_ms)
        self._read_ms = max(self._read_ms, now_ms)
        if count and self._clock.monotonic_s() - self._saved_s >= SAVE_S:
            self._save()
        return count

    def _deliver(self, fired: Sequence[Fired], now_ms: int) -> int:
        records = self._read(fired)
        found = [(one.due_ms, records.get((one.source, one.offset))) for one in fired]
        marks = {
            (due, record.properties[names.TIMER_DEL_UNIQKEY])
            for due, record in found
            if record is not None and names.TIMER_DEL_UNIQKEY in record.properties
        }
        kept = [
            _real(record, due, now_ms)
            for due, record in found
            if record is not None
            and names.TIMER_DEL_UNIQKEY not in record.properties
            and (due, record.properties.get(names.UNIQ_KEY)) not in marks
        ]
        try:
            self.store.append_batch(kept)
        except InvalidError:
            kept = [message for message in kept if self._deliver_one(message)]
        self.delivered += len(kept)
        if kept:
            self.late_ms_max = max(self.late_ms_max, now_ms - fired[0].due_ms)
        return len(kept)

    def _deliver_one(self, message: Message) -> bool:
        try:
            self.store.append(message)
        except InvalidError as error:
            self.refused += 1
            _LOG.error("a timer cannot be delivered to %s: %s", message.topic, error)
            return False
        return True

    def _read(self, fired: Sequence[Fired]) -> dict[tuple[int, int], Record]:
        """The records of what fired: mostly they lie side by side, since they were handed over in due order."""
        found: dict[tuple[int, int], Record] = {}
        places = sorted({(one.source, one.offset) for one in fired})
        begin = 0
        for at, (source, offset) in enumerate(places, 1):
            if at == len(places) or places[at] != (source, offset + 1):
                low = places[begin][1]
                for record in self._records(self._sources[source], low, offset + 1):
                    found[source, record.queue_offset] = record
                begin = at
        return found

    def _records(self, queue: MessageQueue, low: int, high: int) -> Iterator[Record]:
        at = low
        while at < high:
            most = min(_BATCH, high - at)
            got = self.store.reader.get(queue, at, count_max=most, bytes_max=_READ_BYTES)
            yield from got.records
            if got.next_offset <= at:
                return
            at = got.next_offset

    def _source(self, queue: MessageQueue) -> int:
        number = self._number.get(queue)
        if number is None:
            number = self._number[queue] = len(self._sources)
            self._sources.append(queue)
        return number

    def _save(self) -> None:
        """Note how far it is, unless the clock was set back and something waits that is due before what was delivered."""
        first = self.wheel.first_due_ms
        if self._read_ms < 0 or (first is not None and first <= self._read_ms):
            return
        self.store.wait_listed()
        self.store.flush()
        queues = self.store.queues()
        ends = {f"{queue.topic}/{queue.queue_id}": int(end) for queue, end in queues.items()}
        self._state = _State(self._state.mark, self._read_ms, ends)
        self._state.write(self.store.root)
        self._saved_s = self._clock.monotonic_s()


class _State:
    """What is noted: a mark, up to when all was delivered (-1: the broker's files say that), and where queues ended then."""

    def __init__(self, mark: str, read_ms: int, ends: Mapping[str, int]) -> None:
        self.mark, self.read_ms, self.ends = mark, read_ms, ends

    @classmethod
    def read(cls, root: str) -> _State | None:
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            document = json.loads(Path(root, STATE_FILE).read_text("utf-8"))
            ends = {str(name): int(end) for name, end in document["ends"].items()}
            return cls(str(document["mark"]), int(document["read_ms"]), ends)
        return None

    def write(self, root: str) -> None:
        path, document = Path(root, STATE_FILE), {"format": 1, **vars(self)}
        fresh = path.with_suffix(".new")
        with fresh.open("w", encoding="utf-8") as file:
            json.dump(document, file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)

    def end(self, queue: MessageQueue) -> int:
        return self.ends.get(f"{queue.topic}/{queue.queue_id}", 0)


def _new_mark(rng: random.Random) -> str:
    return f"{rng.getrandbits(64):016x}"


def _find_pending(
    directory: str, mark: str, clock: Clock
) -> tuple[_State, list[tuple[int, MessageQueue, int]], int]:
    """What is noted, what is pending (due time, queue, offset), and the greatest due time of what was delivered since."""
    progress = read_timer_progress(directory)
    state = _State.read(directory) or _State(
        mark, -1, _ends_at(directory, progress.wheel.read_ms - _LAG_MS, clock)
    )
    since = _delivered_since(directory, state, clock)
    last_ms = max((due for due, _ in since), default=-1)
    return state, list(_pending(directory, state, progress, since, clock)), last_ms


def _ends_at(directory: str, time_ms: int, clock: Clock) -> dict[str, int]:
    """Where each queue was at a time."""
    local = RocketMQStore.open(directory, clock=clock)
    try:
        local.refresh()
        return {str(queue): int(local.offset_by_time(queue, time_ms)) for queue in local.queues()}
    finally:
        local.close()


def _pending(
    directory: str, state: _State, progress: TimerProgress, since: Counter[Name], clock: Clock
) -> Iterator[tuple[int, MessageQueue, int]]:
    local = RocketMQStore.open(directory, clock=clock, options=RocketMQOptions(timers=True))
    try:
        local.refresh()
        for queue, bounds in sorted(local.queues().items()):
            ours = ImportProgress(state.read_ms + 1, state.end(queue))
            done = ours if state.read_ms >= 0 else _broker_progress(queue, progress)
            source = Enqueue(queue, bounds, done, TimerSource(bounds.min, bounds.end), 0)
            for chosen in source.choose(local):
                yield from _left(queue, chosen.rows, chosen.indices.tolist(), since)
    finally:
        local.close()


def _left(
    queue: MessageQueue, rows: TimerRows, indices: Sequence[int], since: Counter[Name]
) -> Iterator[tuple[int, MessageQueue, int]]:
    for at in indices:
        name = int(rows.dues[at]), rows.keys[at]
        if since[name] > 0:
            since[name] -= 1
        else:
            yield name[0], queue, rows.batch.base_offset + at


def _delivered_since(directory: str, state: _State, clock: Clock) -> Counter[Name]:
    """What came into the queues behind their noted ends and is a timer that this wheel delivered."""
    found: Counter[Name] = Counter()
    local = RocketMQStore.open(directory, clock=clock)
    try:
        local.refresh()
        for queue, bounds in local.queues().items():
            at = QueueOffset(max(bounds.min, state.end(queue)))
            while at < bounds.end:
                batch = local.read(queue, at, bytes_max=_READ_BYTES, count_max=1 << 16)
                if batch is None:
                    break
                rows = read_rows(batch, np.zeros(batch.count, np.int64))
                for number in range(len(rows)):
                    raw = rows.properties(number)
                    if value_of(raw, _DELIVERED):
                        found[number_of(value_of(raw, _DUE), -1), rows.keys[number]] += 1
                at = batch.end_offset
    finally:
        local.close()
    return found


def _broker_progress(queue: MessageQueue, found: TimerProgress) -> ImportProgress:
    if queue.topic == SCHEDULE_TOPIC:
        return ImportProgress(delivered=found.delayed.get(queue.queue_id + 1, 0))
    return ImportProgress(found.wheel.read_ms, found.wheel.queue_offset)


def _timed(message: DueMessage) -> Record:
    """The record as the wheel's topic keeps it."""
    record = decode_record(message.record, 0)
    said = dict(record.properties)
    for name in (names.DELAY, names.TIMER_ROLL_TIMES, "__CRC32#"):
        said.pop(name, None)
    said[names.TIMER_OUT_MS] = str(message.due_ms)
    return replace(record, topic=WHEEL_TOPIC, properties_raw=names.join_properties(said))


def _name_of(record: Record) -> Name:
    raw = record.properties_raw
    return number_of(value_of(raw, _DUE), -1), value_of(raw, _KEY)


def _real(record: Record, due_ms: int, now_ms: int) -> Message:
    """The message as it is delivered: to its real topic, with the properties that a broker leaves and adds."""
    said = dict(record.properties)
    said.pop("__CRC32#", None)
    said[names.TIMER_OUT_MS] = str(due_ms)
    said[names.TIMER_DEQUEUE_MS] = str(now_ms)
    topic, queue_id = said.get(names.REAL_TOPIC, ""), said.get(names.REAL_QUEUE_ID, "0")
    place = number_of(queue_id.encode(), 0)
    real = replace(record, topic=topic, queue_id=place, properties_raw=names.join_properties(said))
    return message_of(real)
