"""The model of a Kafka node: partitions of real batches, with leaders, transactions, a cleaner and topic ids.

What a queue's course of events is, and how it is lost, is as of the other broker; a record is a batch here, which stands
at each offset that it covers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from simulation.broker import Branch, Broker
from simulation.contents import hole, is_hole
from simulation.kafka_batches import CONTROL, TRANSACTIONAL, head_of, is_batch, tag_code
from simulation.kafka_lineage import Opened, walk
from support.kafka_batches import batch, plain_records, section
from support.synthetic import SyntheticStore, _Queue

from tiered.local.interface import (
    HoleReason,
    LeaderEpoch,
    Lineage,
    OpenTransaction,
    PartitionFollower,
    RecordBatch,
    StoreIdentity,
)
from tiered.model import MessageQueue, QueueBounds, QueueOffset

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Collection, Mapping, Sequence

    from simulation.broker import QueueKey

_PRODUCERS = (100, 101, 102)
_IDEMPOTENT = (-1, -1, 7)
_DECIDED, _LED, _ALIKE = 0.4, 0.1, 0.6
"""How often an open transaction is decided rather than others begun, another leads, and a topic comes again as it was."""
_START_MS = 1_700_000_000_000


@dataclass(frozen=True)
class Shape:
    """What is appended, but for the bytes of its records.

    Attributes:
        epoch: Of the leader.
        producer: Its id.
        attributes: Of the batch.
        count: Of its records.
        aborts: It is a marker that aborts.
    """

    epoch: int
    producer: int
    attributes: int
    count: int
    aborts: bool = False


@dataclass
class Producing:
    """What a partition's leader knows, and its log does not say.

    Attributes:
        epoch: Of the leader.
        sequences: The next one of each producer.
        shapes: Of all that was appended.
        script: What is to be appended next.
    """

    epoch: int = 0
    sequences: dict[int, int] = field(default_factory=dict)
    shapes: list[Shape] = field(default_factory=list)
    script: list[Shape] = field(default_factory=list)


class _Partition(_Queue):
    """Its records are batches, each at every offset that it covers."""

    def batch(self, queue: MessageQueue, low: int, high: int) -> RecordBatch:
        some = slice(low - self.base, high - self.base)
        raws = self.records[some]
        is_first = [bool(raw) and (not n or raw != raws[n - 1]) for n, raw in enumerate(raws)]
        sizes = np.array([len(raw) for raw in raws], np.int32)
        ends = np.cumsum(np.where(is_first, sizes, 0), dtype=np.int64)
        return RecordBatch(
            queue=queue,
            base_offset=QueueOffset(low),
            data=b"".join(raw for raw, first in zip(raws, is_first, strict=True) if first),
            positions=np.where(sizes > 0, ends - sizes, 0),
            sizes=sizes,
            tag_codes=np.array(self.tags[some], np.int64),
            store_timestamps_ms=np.array(self.times[some], np.int64),
            physical_offsets=np.arange(low, high, dtype=np.int64),
        )

    def end_at(self, offset: int) -> int:
        """One past the batch, or the hole, at an offset."""
        raw = self.records[offset - self.base]
        return head_of(raw).end if raw else offset + 1


class _PartitionStore(SyntheticStore):
    """A store of partitions in memory, which is followed as the real one is."""

    def __init__(self) -> None:
        super().__init__()
        self.identity = StoreIdentity("c", "b", "synthetic", "kafka", is_live=True)
        self._fell: list[MessageQueue] = []
        self._bounds: Mapping[MessageQueue, QueueBounds] = {}
        self._topic_ids: dict[str, str] = {}

    def topic_id(self, topic: str) -> str:
        """Of the topic that is there now."""
        return self._topic_ids.get(topic, "")

    def look(self) -> None:
        """See ``PartitionStore``."""

    def queues(self) -> Mapping[MessageQueue, QueueBounds]:
        bounds = super().queues()
        if bounds != self._bounds:
            self._bounds = bounds
        return self._bounds

    def fallen_since(self, count: int) -> tuple[int, Collection[MessageQueue]]:
        """See ``PartitionStore``."""
        return len(self._fell), set(self._fell[count:])

    def read(
        self, queue: MessageQueue, start: int, *, bytes_max: int, count_max: int
    ) -> RecordBatch | None:
        row = self._queues.get(queue)
        if not isinstance(row, _Partition) or max(start, row.base) >= row.end:
            return None
        low = end = max(start, row.base)
        size = 0
        while end < row.end and end - low < count_max:
            more = len(row.records[end - row.base])
            if end > low and size + more > bytes_max:
                break
            end, size = row.end_at(end), size + more
        found = row.batch(queue, low, end)
        found.topic_id = self.topic_id(queue.topic)
        return found

    def follow(
        self,
        starts: Mapping[MessageQueue, QueueOffset],
        stop: Callable[[], bool] = lambda: False,
    ) -> Any:
        return PartitionFollower(self, starts, stop)


class KafkaBroker(Broker, _PartitionStore):
    """See the module.

    Attributes:
        cleaned: Of each batch that the cleaner has made, those that it was before.
        transactions: How often what is appended is of a transaction.
    """

    def __init__(self, rng: random.Random, topics: Sequence[str], queues: int) -> None:
        super().__init__(rng, topics, queues)
        self.rot = 0.0
        self.cleaned: dict[bytes, frozenset[bytes]] = {}
        self.transactions = rng.choice((0.0, 0.3, 0.6, 0.6))
        self._producing: dict[MessageQueue, Producing] = {}
        # Where what is, or was, at an offset begins: a leader's time ends with a batch, whatever the cleaner leaves of it.
        self._bases: dict[MessageQueue, dict[int, int]] = {}

    # -- what happens to it ---------------------------------------------------------------------

    def _store(self, name: MessageQueue) -> None:
        if name not in self._queues:
            self._queues[name] = _Partition(0)
            self.branches.setdefault((name.topic, name.queue_id), []).append(Branch(0, 0))
            self._topic_ids.setdefault(name.topic, f"{self._rng.getrandbits(64):016x}")
            self._producing.setdefault(name, Producing())
        producing = self._producing[name]
        shape = producing.script.pop(0) if producing.script else self._next_shape(name, producing)
        producing.epoch = max(producing.epoch, shape.epoch)
        producing.shapes.append(shape)
        self._append(name, shape, producing)

    def _next_shape(self, name: MessageQueue, producing: Producing) -> Shape:
        rng = self._rng
        if rng.random() < _LED:
            producing.epoch += rng.choice((1, 1, 4))
            self.count("leader changed")
        opened = sorted(self._open_at(name, self._queues[name].end))
        if opened and rng.random() < _DECIDED:
            aborts = rng.random() < 0.5
            self.count("aborted" if aborts else "committed")
            attributes = CONTROL | TRANSACTIONAL
            return Shape(producing.epoch, rng.choice(opened), attributes, 1, aborts)
        count = rng.choice((1, 1, 2, 3, 5))
        if rng.random() < self.transactions:
            return Shape(producing.epoch, rng.choice(_PRODUCERS), TRANSACTIONAL, count)
        return Shape(producing.epoch, rng.choice(_IDEMPOTENT), 0, count)

    def _append(self, name: MessageQueue, shape: Shape, producing: Producing) -> None:
        rng, row = self._rng, self._queues[name]
        self._count = max(self._count, round(self.elapsed_s() * 1000))
        falls = rng.random() < self.falls
        time_ms = _START_MS + self._count - (rng.choice((1, 500, 20_000)) if falls else 0)
        time_ms -= self._set_back_ms()
        self._count += 1
        is_control, size = bool(shape.attributes & CONTROL), rng.choice(self.sizes) // shape.count
        key = bytes((0, 0, 0, 0 if shape.aborts else 1)) if is_control else None
        values = [bytes(6) if is_control else self._value(size) for _ in range(shape.count)]
        payload = section([(n, 0, key, value, ()) for n, value in enumerate(values)])
        has_sequence = shape.producer >= 0 and not is_control
        sequence = producing.sequences.get(shape.producer, 0) if has_sequence else -1
        producing.sequences[shape.producer] = sequence + shape.count
        raw = batch(
            payload,
            shape.count,
            base_offset=row.end,
            leader_epoch=shape.epoch,
            attributes=shape.attributes,
            base_timestamp=time_ms,
            max_timestamp=time_ms,
            producer_id=shape.producer,
            producer_epoch=0 if shape.producer >= 0 else -1,
            base_sequence=sequence,
        )
        self._log.append((name, row.end, row))
        bases = self._bases.setdefault(name, {})
        bases |= dict.fromkeys(range(row.end, row.end + shape.count), row.end)
        row.records += [raw] * shape.count
        row.times += [time_ms] * shape.count
        row.tags += [tag_code(raw)] * shape.count
        self._end += len(raw)
        self._present(name).records += [raw] * shape.count

    def _value(self, size: int) -> bytes:
        value = self._rng.randbytes(size)
        return (value[: size // 4 + 1] * 4)[:size] if self.repeats else value

    def delete_topic(self) -> None:
        """A topic is deleted; perhaps it is there again at once, perhaps with batches of the same shapes."""
        rng = self._rng
        topic = rng.choice(self._names).topic
        mine = [name for name in self._names if name.topic == topic and name in self._queues]
        again, alike = rng.random() < 0.7, rng.random() < _ALIKE
        self._topic_ids.pop(topic, None)
        for name in mine:
            self.delete(name.topic, name.queue_id)
            self._lost.pop(name, None)
            self._fell.append(name)
            had = self._producing.pop(name)
            if alike:
                self._producing[name] = Producing(script=had.shapes)
        for name in mine if again else ():
            had = self._producing.get(name, Producing())
            for _ in range(rng.choice((1, 3, max(30, len(had.script))))):
                self._store(name)
        if mine:
            self.count("topic deleted")
            self.count("topic alike", again and alike)

    def lose_behind(self, queue: QueueKey, offset: int, to: int = 0, *, again: bool = True) -> bool:
        row = self._queues.get(MessageQueue(*queue))
        if row is not None and row.base < offset < row.end:
            offset = self._bases[MessageQueue(*queue)][offset]
        return super().lose_behind(queue, offset, to, again=again)

    def _cut(self, name: MessageQueue, end: int) -> None:
        super()._cut(name, end)
        self._producing[name].epoch += 1
        self._producing[name].script.clear()
        self._fell.append(name)

    def catch_up(self) -> None:
        before = len(self._log)
        super().catch_up()
        self._log[before:] = [
            (name, offset, row)
            for name, offset, row in self._log[before:]
            if self._bases[name][offset] == offset
        ]

    def clean_some(self) -> None:
        """The cleaner takes records out of a batch whose transactions are decided, or all of the batch."""
        name = self._rng.choice(self._names)
        row = self._queues.get(name)
        if row is None or len(row.records) < 2:
            return
        stable = min([row.end, *self._open_at(name, row.end).values()])
        last = head_of(row.records[-1]).base_offset if row.records[-1] else row.end - 1
        heads = {raw: head_of(raw) for raw in row.records if raw}
        may = [
            raw
            for raw, head in heads.items()
            if row.base <= head.base_offset and head.end <= min(stable, last)
            if not head.is_control and head.count
        ]
        if may:
            self._clean(name, self._rng.choice(may))

    def _clean(self, name: MessageQueue, raw: bytes) -> None:
        rng, row, head = self._rng, self._queues[name], head_of(raw)
        had = plain_records(raw[61:], head.count)
        left = [one for one in had if rng.random() < 0.4][: len(had) - 1]
        fields = {"base_offset": head.base_offset, "leader_epoch": head.leader_epoch}
        fields |= {"attributes": head.attributes, "last_offset_delta": head.last_offset_delta}
        fields |= {"base_timestamp": head.base_timestamp, "max_timestamp": head.max_timestamp}
        fields |= {"producer_id": head.producer_id, "producer_epoch": head.producer_epoch}
        made = batch(section(left), len(left), **fields, base_sequence=head.base_sequence)
        goes = not left and rng.random() < 0.7
        low = head.base_offset - row.base
        branch = self._present(name)
        after = Branch(branch.first, branch.min, [*branch.records])
        self.branches[name.topic, name.queue_id].append(after)
        for at in range(low, low + head.end - head.base_offset):
            row.records[at] = b"" if goes else made
            row.tags[at] = HoleReason.COMPACTED if goes else row.tags[at]
            after.records[at + row.base - branch.first] = (
                hole(HoleReason.COMPACTED) if goes else made
            )
        if not goes:
            self.cleaned[made] = self.cleaned.get(raw, frozenset()) | {raw}
        self.count("batch cleaned away" if goes else "batch cleaned")

    # -- what the checker asks ------------------------------------------------------------------

    def lineage(self, queue: MessageQueue, at: QueueOffset | None = None) -> Lineage | None:
        """See ``LocalStore``."""
        if queue not in self._queues:
            return None
        branch = self._present(queue)
        epochs = [LeaderEpoch(*one) for one in _walk(branch, branch.end).epochs]
        opened = sorted(self._open_at(queue, at).items()) if at is not None else ()
        some = tuple(OpenTransaction(*one) for one in opened)
        return Lineage(self._topic_ids[queue.topic], tuple(epochs), some)

    def _open_at(self, queue: MessageQueue, offset: int) -> Opened:
        return open_at(self._present(queue), offset)

    def is_same(self, tiered: bytes | None, present: bytes | None) -> bool:
        if tiered == present:
            return True
        return present is not None and tiered in self.cleaned.get(present, ())


def _walk(branch: Branch, end: int) -> Any:
    return walk(enumerate(branch.records[: end - branch.first], branch.first), lambda _: {}, 0)


def open_at(branch: Branch, offset: int) -> Opened:
    """The transactions that are open at an offset of a course of events."""
    found: Opened = _walk(branch, offset).opened
    return found


def is_gone(record: bytes | None) -> bool:
    """Whether there is no batch."""
    return record is None or is_hole(record) or not is_batch(record)
