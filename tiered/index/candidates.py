"""From an item of an index to the message: one read by its log offset, checked on the record itself."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiered.errors import DataError
from tiered.format.message import split_batch
from tiered.format.properties import KEYS, TAGS, UNIQ_KEY, split_keys, tag_hash
from tiered.format.record import Record, RecordError, decode_record
from tiered.log.reader import QueueReader
from tiered.log.sections import read_range
from tiered.log.state import Gap
from tiered.model import QueueOffset

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.base import ObjectStore
    from tiered.log.state import Part, QueueLife, TierState
    from tiered.model import MessageQueue

    Views = dict[tuple[MessageQueue, int], "LifeView"]


@dataclass(frozen=True, slots=True)
class Hit:
    """A message that has the key.

    Attributes:
        queue: Where it is.
        incarnation: In which life of the queue.
        life: Number of that life among the queue's.
        queue_offset: In that life.
        store_ms: Store time, UTC.
        message: The message; an inner message as ``split_batch`` gives it.
        stored: The record that holds it.
        log_offset: Of that record in the tiered commit log.
    """

    queue: MessageQueue
    incarnation: int
    life: int
    queue_offset: int
    store_ms: int
    message: Record
    stored: Record
    log_offset: int

    @property
    def tag_code(self) -> int:
        """Of its item in the consume queue."""
        return tag_hash(self.stored.properties.get(TAGS))

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Greater is newer; a total order."""
        return self.store_ms, self.queue_offset, self.queue.queue_id, self.life


@dataclass(frozen=True, slots=True)
class Candidate:
    """What an item says: a place where a message may have the key."""

    queue: MessageQueue
    life: int
    queue_offset: int
    log_offset: int
    size: int
    store_ms: int


class LifeView:
    """One life of a queue, for reading single messages. Threads: any."""

    def __init__(
        self, store: ObjectStore, prefix: str, queue: MessageQueue, number: int, life: QueueLife
    ) -> None:
        self.queue = queue
        self.number = number
        self.life = life
        self.parts: Sequence[Part] = life.parts()
        self.reader = QueueReader.of_life(store, prefix, queue, life)
        self._starts = [part.queue_offset for part in self.parts]
        self._store = store
        self._prefix = prefix

    def part_of(self, offset: int) -> Part | None:
        """The part that has a queue offset; None: none has."""
        at = bisect_right(self._starts, offset) - 1
        part = self.parts[at] if at >= 0 else None
        return part if part and offset < part.queue_end else None

    def fetch(self, candidate: Candidate, key: str) -> Hit | None:
        """The message, if it is there and has the key.

        The item may be older than the truth: the queue may have been taken back, and other messages may stand there
        now. So the record has to be of this queue and queue offset, or it is looked up in the consume queue.

        Raises:
            DataError: It is damaged.
            BackendError: It could not be read (``ObjectNotFoundError``: the journal is to be replayed).
        """
        part = self.part_of(candidate.queue_offset)
        if part is None:
            return None  # expired, or taken back, or never there
        found = self._at_log_offset(part, candidate)
        if found is None:
            found = self._by_queue_offset(candidate.queue_offset)
        return self.hit(*found, candidate.queue_offset, key) if found else None

    def hit(self, stored: Record, log_offset: int, offset: int, key: str) -> Hit | None:
        """The message of a record at a queue offset, if it has the key.

        Raises:
            DataError: It is an inner batch that cannot be unpacked.
        """
        message = next((m for m in split_batch(stored) if m.queue_offset == offset), None)
        if message is None or not has_key(message, key):
            return None
        return Hit(
            self.queue,
            self.life.incarnation,
            self.number,
            offset,
            message.store_timestamp_ms,
            message,
            stored,
            log_offset,
        )

    def _at_log_offset(self, part: Part, candidate: Candidate) -> tuple[Record, int] | None:
        start = candidate.log_offset
        if candidate.size <= 0 or not part.log_offset <= start <= part.records_end - candidate.size:
            return None
        low = start - part.log_offset
        wanted = part.log.part_of(low, low + candidate.size)
        data = read_range(self._store, self._prefix, wanted)
        try:
            stored = decode_record(data, 0, check_crc=False)  # each block was checked
        except RecordError:
            return None
        mine = (stored.topic, stored.queue_id) == (self.queue.topic, self.queue.queue_id)
        is_there = mine and _holds(stored, candidate.queue_offset)
        return (stored, start) if is_there else None

    def _by_queue_offset(self, offset: int) -> tuple[Record, int] | None:
        found = self.reader.read(QueueOffset(offset), count_max=1)
        if found is None or isinstance(found, Gap) or not found.records.sizes[0]:
            return None
        position = int(found.records.positions[0])
        try:
            stored = decode_record(found.records.data, position, check_crc=False)
        except RecordError as error:
            raise DataError(f"a record is damaged: {error}", where=str(self.queue)) from error
        return stored, found.log_offset + position


class LifeViews:
    """Lives of queues by topic, made once for a state: a long life has many parts. Threads: any."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._held: tuple[TierState | None, dict[str, Views]] = (None, {})

    def of(self, state: TierState, topic: str) -> Views:
        """Every life of every queue of a topic, by queue and number."""
        held = self._held
        if held[0] is not state:
            held = self._held = (state, {})
        found = held[1].get(topic)
        if found is None:
            found = held[1][topic] = {
                (queue, number): LifeView(self._store, self._prefix, queue, number, life)
                for queue, lives in state.queues.items()
                if queue.topic == topic
                for number, life in enumerate(lives)
            }
        return found


def has_key(message: Record, key: str) -> bool:
    """Whether a message has a key, or is the one with this unique id."""
    found = message.properties
    return found.get(UNIQ_KEY) == key or key in split_keys(found.get(KEYS))


def _holds(stored: Record, offset: int) -> bool:
    try:
        return any(message.queue_offset == offset for message in split_batch(stored))
    except DataError:
        return False
