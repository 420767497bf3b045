"""How far who delivers from a store directory is with its timers, and what he has delivered beyond what he noted.

Two note it: a broker in ``config/timercheck`` and ``config/delayOffset.json``, some seconds late, and our own wheel
(``timer.local_target``) in ``config/tieredWheel.json``, which goes first where it has noted a time. A killed run has
delivered for a moment more than he noted. What that was is found among what came into the topics since: it bears due time
and unique id of its timer, or it is the message of a delay level, by unique id, topic and number of attempts.
"""

from __future__ import annotations

import contextlib
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from tiered.format.broker_checkpoint import decode_checkpoint
from tiered.format.properties import value_of
from tiered.format.property_columns import PropertyColumns
from tiered.format.record import decode_record
from tiered.local.catalog import SCHEDULE_TOPIC, TIMER_TOPICS, WHEEL_TOPIC
from tiered.local.layout import read_text, read_timer_progress
from tiered.local.rocketmq import RocketMQOptions, RocketMQStore
from tiered.model import QueueOffset
from tiered.store.disk import replace_file
from timer.hour_files import Given, ImportProgress
from timer.records import number_of, read_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tiered.clock import Clock
    from tiered.local.interface import LocalStore
    from tiered.local.layout import TimerProgress
    from tiered.model import MessageQueue
    from timer.records import TimerRows

STATE_FILE: Final = "config/tieredWheel.json"
_LAG_MS: Final = 60_000
"""A broker's files are not older than that."""
_READ_BYTES: Final = 8 << 20
_DUE: Final = b"TIMER_OUT_MS"
_KEY: Final = b"UNIQ_KEY"
_LEVEL: Final = b"DELAY"
_TOPIC: Final = b"REAL_TOPIC"
_DELIVERED: Final = b"TIMER_DEQUEUE_MS"


class WheelState:
    """What our wheel notes.

    Attributes:
        mark: Of the store.
        read_ms: What is due by then was delivered; -1: the broker's files say how far it is.
        ends: Where queues ended then.
    """

    def __init__(self, mark: str, read_ms: int, ends: Mapping[str, int]) -> None:
        self.mark, self.read_ms, self.ends = mark, read_ms, ends

    @classmethod
    def read(cls, root: str) -> WheelState | None:
        """What is noted in a store directory; None: nothing that can be read."""
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            document = json.loads(Path(root, STATE_FILE).read_text("utf-8"))
            ends = {str(name): int(end) for name, end in document["ends"].items()}
            return cls(str(document["mark"]), int(document["read_ms"]), ends)
        return None

    def write(self, root: str) -> None:
        """Note it, on the disk when this returns."""
        document = {"format": 1, **vars(self)}
        replace_file(Path(root, STATE_FILE), json.dumps(document).encode())

    def end(self, queue: MessageQueue) -> int:
        """Where a queue ended."""
        return self.ends.get(str(queue), 0)


@contextlib.contextmanager
def opened(directory: str, clock: Clock) -> Iterator[RocketMQStore]:
    """A store directory for reading, topics and timers."""
    options = RocketMQOptions(with_timers=True)
    with contextlib.closing(RocketMQStore.open(directory, clock=clock, options=options)) as local:
        local.refresh()
        yield local


def noted(directory: str, local: LocalStore, mark: str = "") -> WheelState:
    """What our wheel has noted, or, before it has, how far the broker was when it wrote its files at last.

    Where the broker's files are lost, it may have delivered any of what its timer topics have still.
    """
    if (state := WheelState.read(directory)) is not None:
        return state
    progress = read_timer_progress(directory)
    if _lacks_notes(progress, local):
        return WheelState(mark, -1, {})
    checkpoint = decode_checkpoint(read_text(f"{directory}/checkpoint") or b"")
    times = progress.wheel.read_ms, checkpoint.physical_timestamp_ms
    time_ms = min((one for one in times if one > 0), default=0) - _LAG_MS
    ends = {str(queue): int(local.offset_by_time(queue, time_ms)) for queue in local.queues()}
    return WheelState(mark, -1, ends)


def _lacks_notes(progress: TimerProgress, local: LocalStore) -> bool:
    """Whether there are timers, and no word on how far their broker is with them."""
    filled = {queue.topic for queue, bounds in local.queues().items() if bounds.min < bounds.end}
    is_wheel_lost = WHEEL_TOPIC in filled and not progress.wheel.read_ms
    return is_wheel_lost or (SCHEDULE_TOPIC in filled and not progress.delayed)


def delivered_so_far(directory: str) -> Callable[[MessageQueue], ImportProgress]:
    """How far who delivers from a store is with each of its queues, as noted."""
    return partial(_progress, WheelState.read(directory), read_timer_progress(directory))


def delivered_since(local: LocalStore, state: WheelState) -> Given:
    """What was delivered since it was noted, as it stands in the topics."""
    given = Given()
    for queue, bounds in local.queues().items():
        at = QueueOffset(max(bounds.min, state.end(queue)))
        while at < bounds.end and queue.topic not in TIMER_TOPICS:
            batch = local.read(queue, at, bytes_max=_READ_BYTES, count_max=1 << 16)
            if batch is None:
                break
            _add_delivered(given, read_rows(batch, np.zeros(batch.count, np.int64)))
            at = batch.end_offset
    return given


def _add_delivered(given: Given, rows: TimerRows) -> None:
    topic = rows.batch.queue.topic.encode()
    said = PropertyColumns.of(rows.block)
    is_said = said.has(_DELIVERED) | said.has(_LEVEL)
    for at in np.flatnonzero(is_said & (rows.dues >= 0)).tolist():
        raw = rows.properties(at)
        key, due = value_of(raw, _KEY), number_of(value_of(raw, _DUE), -1)
        if value_of(raw, _DELIVERED):
            given.timers[due, key] += 1
        elif value_of(raw, _TOPIC) == topic:
            record = decode_record(rows.batch.data, int(rows.batch.positions[at]))
            given.delayed[record.reconsume_times, topic + b"+" + key] += 1
        else:
            continue
        stored_ms = int(rows.batch.store_timestamps_ms[at])
        given.until_ms = max(given.until_ms, stored_ms, due)


def _progress(
    state: WheelState | None, progress: TimerProgress, queue: MessageQueue
) -> ImportProgress:
    if state is not None and state.read_ms >= 0:
        return ImportProgress(state.read_ms + 1, state.end(queue))
    if queue.topic == SCHEDULE_TOPIC:
        return ImportProgress(delivered=progress.delayed.get(queue.queue_id + 1, 0))
    if queue.queue_id:
        return ImportProgress()  # a broker's wheel reads the first queue alone
    return ImportProgress(progress.wheel.read_ms, progress.wheel.queue_offset)
