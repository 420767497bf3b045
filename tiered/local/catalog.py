"""The queues of a store, those that are tiered and those that are left out by name.

Changed only under the store's lock; ``states`` may be read by any thread.
"""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Final

from backends.lazy_dataclass import dataclass
from tiered.errors import InvalidError
from tiered.local.classification import OFFSET_MAX, is_queue_name
from tiered.local.consumequeues import BatchQueue, PlainQueue, QueueIndex
from tiered.local.interface import LeftOut
from tiered.local.layout import (
    BATCH_DIRECTORY,
    NAME_BYTES_MAX,
    TOPIC_NAME,
    Layout,
    known_queue_file_bytes,
    list_topic_queues,
    list_topics,
)
from tiered.local.mapped_file_queue import list_bases, list_row
from tiered.model import MessageQueue, QueueBounds, QueueOffset

if TYPE_CHECKING:
    from tiered.local.layout import Topics
    from tiered.local.mapped_file_queue import FileCache


# -- topics ------------------------------------------------------------------------------------------
#
# Which topics are tiered: not the broker's own, not light queues, not what cannot be told faithfully. One of the broker's
# has what producers sent, and is tiered: TRANS_CHECK_MAX_TIME_TOPIC, with prepared messages that it has given up, since no
# producer has said in time what is to become of them. A person decides about them, also when the broker is gone.

_SYSTEM: Final = frozenset(
    {
        "TBW102",
        "SCHEDULE_TOPIC_XXXX",
        "BenchmarkTest",
        "SELF_TEST_TOPIC",
        "OFFSET_MOVED_EVENT",
        "CHECKPOINT_TOPIC",
    }
)
_SYSTEM_PREFIXES: Final = ("rmq_sys_", "RMQ_SYS_")
_REPLIES: Final = "_REPLY_TOPIC"
LIGHT_PREFIX: Final = "%LMQ%"
WHEEL_TOPIC: Final = "rmq_sys_wheel_timer"
SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"
TIMER_TOPICS: Final = frozenset({WHEEL_TOPIC, SCHEDULE_TOPIC})
"""Where a broker keeps messages that are due later: at any time, or after one of its delay levels."""
TOPIC_BYTES_MAX: Final = 127
RETRY_TOPIC_BYTES_MAX: Final = NAME_BYTES_MAX
"""A topic's name is a directory's."""
RETRY_PREFIX: Final = "%RETRY%"
DEAD_PREFIX: Final = "%DLQ%"
"""Of dead letters."""


def check_topic(topic: str) -> int:
    """The bytes of a topic's name, which must be one that a broker would take."""
    if not TOPIC_NAME.fullmatch(topic):
        raise InvalidError(f"topic {topic!r}: only %, |, a-z, A-Z, 0-9, _ and - may be in a name")
    limit = RETRY_TOPIC_BYTES_MAX if topic.startswith(RETRY_PREFIX) else TOPIC_BYTES_MAX
    if len(topic) > limit:
        raise InvalidError(f"topic {topic!r}: {len(topic)} bytes, and at most {limit} may be")
    return len(topic)


def reason_left_out(
    topic: str, *, cluster: str | None, broker: str | None, static: frozenset[str] = frozenset()
) -> str | None:
    """Why a topic is not tiered, or None when it is. Retry and dead-letter topics are tiered; the cluster's own is not."""
    if topic.startswith(LIGHT_PREFIX):
        return "light queue: its messages are tiered with their topic"
    if topic in _SYSTEM or topic.startswith(_SYSTEM_PREFIXES):
        return "system topic"
    # The cluster's own, and no other: who calls a topic so has made it, and would miss what is in it.
    if topic.endswith(_REPLIES) and cluster in {None, topic.removesuffix(_REPLIES)}:
        return "system topic (replies)"
    if topic in {cluster, broker}:
        return "system topic (named as the cluster or broker)"
    if topic in static:
        return "static topic: its queue offsets here are not those that clients see"
    return None


# -- catalog -----------------------------------------------------------------------------------------


STRANGERS_NAMED_MAX = 20
LIGHT_NAMED_MAX = 100
"""Light queues that are named one by one; there can be a million of them."""


@dataclass(slots=True)
class QueueState:
    """One tiered queue."""

    queue: MessageQueue
    index: QueueIndex  # its consume queue
    min: int = 0  # first queue offset whose record is not below the log's minimum
    end: int = 0  # one past the last that is committed

    @property
    def bounds(self) -> QueueBounds:
        """As the interface has them."""
        return QueueBounds(QueueOffset(min(self.min, self.end)), QueueOffset(self.end))


class Catalog:
    """Finds the state of a queue, and remembers what is left out."""

    def __init__(
        self,
        layout: Layout,
        cache: FileCache,
        topics: Topics,
        *,
        cluster: str | None,
        broker: str | None,
        timers: bool = False,
        with_timers: bool = False,
    ) -> None:
        self._timers, self._with_timers = timers, with_timers
        self._layout = layout
        self._cache = cache
        self._cluster, self._broker = cluster, broker
        self.topics = topics  # what the topic tables say
        self.states: dict[MessageQueue, QueueState] = {}  # the tiered queues
        self._left_out: dict[str, str] = {}
        self._reasons: dict[str, str | None] = {}
        self.log_min = -1  # the log's minimum that the queues' minima go with
        # Indexes of the queues that are left out, as of the last ``load``; light queues are not among them.
        self.others: list[QueueIndex] = []
        # Lines for the report: what the topic tables had, and names in the directories that are no part of a store.
        self.notes: tuple[str, ...] = topics.notes

    def load(self) -> None:
        """Take in every queue that has a directory, and open the indexes of those left out; light queues are only named."""
        others: list[QueueIndex] = []
        strangers: list[str] = []
        light = []
        list_bases(self._layout.log, strangers)
        for topic, is_batch in list_topics(self._layout.root, strangers):
            if topic.startswith(LIGHT_PREFIX):
                light.append(topic)
                continue
            is_tiered = self.reason(topic) is None
            for queue in list_topic_queues(
                self._layout.root, topic, is_batch=is_batch, strangers=strangers
            ):
                if not is_tiered:
                    others.append(self._index(queue, is_batch))
                elif queue not in self.states:
                    index = self._index(queue, is_batch, strangers)
                    self.states[queue] = QueueState(queue, index)
        for topic in light[:LIGHT_NAMED_MAX]:
            self.reason(topic)
        if len(light) > LIGHT_NAMED_MAX:
            self.leave_out(
                f"{LIGHT_PREFIX}*", f"{len(light)} light queues in all; not all are named"
            )
        self.others = others
        self._name_strangers(strangers)

    def _name_strangers(self, paths: list[str]) -> None:
        """Name what was passed over, once each: it stops nobody, but somebody put it there."""
        named = dict.fromkeys(self.notes)
        for path in paths[:STRANGERS_NAMED_MAX]:
            named.setdefault(f"{path}: no part of a store, passed over")
        if len(paths) > STRANGERS_NAMED_MAX:
            named.setdefault(f"{len(paths)} names in all are no part of a store; not all are named")
        self.notes = tuple(named)

    def find(self, queue: MessageQueue) -> QueueState | None:
        """The state of a queue, made when it is new; None when its topic is left out, or there can be no such queue."""
        state = self.states.get(queue)
        if state is not None and (state.index.row.bases or state.index.row.ignored):
            return state
        if not is_queue_name(queue) or self.reason(queue.topic) is not None:
            return None
        if state is None:
            state = self.states[queue] = QueueState(queue, self._index(queue, self._kind(queue)))
        else:
            self._look_again(state)
        return state

    def reason(self, topic: str) -> str | None:
        """Why a topic is left out, or None."""
        if topic not in self._reasons:
            reason = self._reason(topic)
            self._reasons[topic] = reason
            if reason is not None:
                self._left_out[topic] = reason
        return self._reasons[topic]

    def _reason(self, topic: str) -> str | None:
        if self._timers:
            return None if topic in TIMER_TOPICS else "no topic of timers"
        if self._with_timers and topic in TIMER_TOPICS:
            return None
        return reason_left_out(
            topic, cluster=self._cluster, broker=self._broker, static=self.topics.static
        )

    def leave_out(self, topic: str, reason: str) -> None:
        """Name something that is left out for another reason than its topic's name."""
        self._left_out.setdefault(topic, reason)

    def left_out(self) -> list[LeftOut]:
        """Everything left out so far, by name."""
        return [LeftOut(name, reason) for name, reason in sorted(self._left_out.items())]

    def bounds(self) -> dict[MessageQueue, QueueBounds]:
        """All tiered queues that have a directory or messages."""
        return {
            queue: state.bounds
            for queue, state in list(self.states.items())
            if state.end or state.index.row.bases
        }

    def lists(self, queue: MessageQueue, queue_offset: int, physical_offset: int) -> bool:
        """Whether a queue lists the record at ``physical_offset``; of a queue that is left out it is believed."""
        state = self.states.get(queue)
        if state is None:
            return is_queue_name(queue) and self.reason(queue.topic) is not None
        if not 0 <= queue_offset < OFFSET_MAX:
            return False
        entries = state.index.entries(queue_offset, queue_offset + 1)
        return bool(entries.is_written[0]) and int(entries.physical_offsets[0]) == physical_offset

    def follow_expiry(self, log_min: int) -> None:
        """Bring the queues' minima up to date when the log begins later than at the last call."""
        if log_min == self.log_min:
            return
        self.log_min = log_min
        for state in list(self.states.values()):
            state.index.row.rescan()
            if state.min < state.end:
                low = state.index.first_not_below(log_min, state.end)
                state.min = max(state.min, min(low, state.end))

    def _look_again(self, state: QueueState) -> None:
        """A queue without files: its directory may have come meanwhile, of either kind."""
        fresh = self._index(state.queue, self._kind(state.queue))
        if fresh.row.bases:
            fresh.rebuilt = state.index.rebuilt
            state.index = fresh

    def _kind(self, queue: MessageQueue) -> bool:
        if pathlib.Path(
            f"{self._layout.root}/{BATCH_DIRECTORY}/{queue.topic}/{queue.queue_id}"
        ).is_dir():
            return True
        plain = self._layout.queue_directory(queue, is_batch=False)
        return queue.topic in self.topics.batch and not pathlib.Path(plain).is_dir()

    def _index(
        self, queue: MessageQueue, is_batch: bool, strangers: list[str] | None = None
    ) -> QueueIndex:
        directory = self._layout.queue_directory(queue, is_batch=is_batch)
        listed = list_row(directory, strangers)
        size = known_queue_file_bytes(directory, is_batch=is_batch, bases=listed[1])
        kind = BatchQueue if is_batch else PlainQueue
        return kind(self._cache, directory, size, listed)
