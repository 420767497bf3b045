"""The model: what the broker has ever stored, what its retention has left, and what it has truncated.

A queue's *branch* is one course of its events: all records that it had, from its first. Two branches of a queue share a
beginning (a tail was lost), or nothing (its topic was deleted and created again). The last branch is the present one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from simulation.contents import hole, is_hole
from support.synthetic import SyntheticStore, _Queue, make_record

from tiered.model import MessageQueue

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping, Sequence

    from simulation.incarnations import ModelIncarnation

    from tiered.local.interface import RecordBatch
    from tiered.model import QueueOffset

QueueKey = tuple[str, int]
_NOWHERE = _Queue(0)
"""Where the log's lost records belong: no queue lists them."""
EDGE_BYTES = 65_536
"""Of a block; two of them are a block of what is compressed."""
_AT_AN_EDGE = 0.3
_TURNS = 0.1
"""How often a clock is set back, or right again, from one message to the next."""
_KEYED, _KEYS, _TOMBSTONES = 0.9, 20, 0.4
_TAGS = ("a", "a", "red", "Grün", "\N{PILE OF POO}", "", None)


def _properties(tags: str | None, rng: random.Random, *, is_keyed: bool, key: bytes) -> bytes:
    """Of a record: its tags, and perhaps a key and a unique id."""
    pairs = [] if tags is None else [b"TAGS\x01" + tags.encode()]
    if key:
        pairs.append(b"KEYS\x01" + key)
    if is_keyed:
        pairs.append(b"UNIQ_KEY\x01%08X" % rng.getrandbits(32))
    return b"\x02".join(pairs)


@dataclass
class Branch:
    """See the module.

    Attributes:
        first: Offset of the first record.
        records: All that there ever were.
        min: What retention has left begins here.
    """

    first: int
    min: int
    records: list[bytes] = field(default_factory=list)

    @property
    def end(self) -> int:
        """One past the last offset."""
        return self.first + len(self.records)

    def at(self, offset: int) -> bytes | None:
        """The record at an offset, if there ever was one."""
        return self.records[offset - self.first] if self.first <= offset < self.end else None

    def has(self, offset: int, records: list[bytes]) -> bool:
        """Whether exactly these records were there from ``offset`` on."""
        low = offset - self.first
        return low >= 0 and self.records[low : low + len(records)] == records


class Broker(SyntheticStore):
    """A local store that grows, forgets and loses, and a model that does not.

    Attributes:
        branches: Of each queue, oldest first.
        greed: How often retention takes something between a poll and its dispatch.
        bustle: How often a queue that retention has emptied grows while somebody looks at it.
        sizes: What bodies have; if all have one, all records have.
        falls: How often a record is stored with a time before that of the one before it.
        setbacks: Decides when the broker's clock is set back, by more than a time to live, and when it is right again.
        rot: How often a record is damaged, so that nobody can read it.
        resting: Queues that get nothing for a while.
        edges: Decides which records end at a block's edge, one byte before it or one behind; None: none does on purpose.
        keys: Messages have keys, most of them, and some no body; None: none has a key.
    """

    def __init__(self, rng: random.Random, topics: Sequence[str], queues: int) -> None:
        """``pause`` is to be set: lets virtual time pass."""
        super().__init__()
        self._rng = rng
        self.pause: Callable[[float], None] = lambda _seconds: None
        self.elapsed_s: Callable[[], float] = lambda: 0.0
        self.count: Callable[[str], None] = lambda _what: None
        self.repeats = False  # bodies that can be compressed
        self.sizes = rng.choice(((5, 40, 40, 300, 900), (5, 40, 40, 300, 900), (40,)))
        self._names = [MessageQueue(topics[number % 2], number // 2) for number in range(queues)]
        self.greed = rng.choice((0.0, 0.0, 0.0, 0.3))
        self.bustle = rng.choice((0.0, 0.5))
        self.falls = rng.choice((0.0, 0.0, 0.1))
        self.rot = rng.choice((0.0, 0.0, 0.0, 0.1, 0.4))
        self.resting: set[QueueKey] = set()
        self.setbacks: random.Random | None = None
        self._back_ms = 0
        self.edges: random.Random | None = None
        self.keys: random.Random | None = None
        self.branches: dict[QueueKey, list[Branch]] = {}
        self._lost: dict[MessageQueue, _Queue] = {}

    def read(
        self, queue: MessageQueue, start: int, *, bytes_max: int, count_max: int
    ) -> RecordBatch | None:
        """From a disk, which takes its time."""
        batch = super().read(queue, start, bytes_max=bytes_max, count_max=count_max)
        self._take_time()
        row = self._queues.get(queue)
        if (
            batch is None
            and row
            and row.base == row.end > start
            and self._rng.random() < self.bustle
        ):
            self._store(queue)  # between the two looks at a queue that retention has emptied
            self.count("emptied and grown")
        return batch

    def follow(
        self,
        starts: Mapping[MessageQueue, QueueOffset],
        stop: Callable[[], bool] = lambda: False,
    ) -> Any:
        follower = super().follow(starts)
        poll, take_fallen = follower.poll, follower.take_fallen

        def slowly(window_bytes: int) -> list[RecordBatch]:
            batches = poll(window_bytes)
            self._take_time()
            if batches and self._rng.random() < self.greed:
                self.forget_some()  # what was polled, perhaps
                self._take_time()
            return batches

        follower.poll = slowly  # type: ignore[method-assign]
        follower.take_fallen = lambda: sorted(take_fallen())  # type: ignore[method-assign,assignment,return-value]
        return follower

    def _take_time(self) -> None:
        if self._rng.random() < 0.2:
            self.pause(self._rng.choice((0.02, 0.3)))

    # -- what happens to it ---------------------------------------------------------------------

    def store_some(self) -> None:
        """A few messages into one or all queues."""
        rng = self._rng
        some = [rng.choice(self._names)] if rng.random() < 0.7 else self._names
        for name in some:
            if (name.topic, name.queue_id) in self.resting:
                continue
            is_burst = len(self.sizes) == 1 and rng.random() < 0.1  # many parts of one size
            for _ in range(60 if is_burst else rng.randrange(1, 6)):
                self._store(name)

    def _store(self, name: MessageQueue) -> None:
        rng = self._rng
        self._count = max(self._count, round(self.elapsed_s() * 1000))  # store times
        size = rng.choice(self.sizes)
        body = rng.randbytes(size)
        if self.repeats:
            body = (body[: size // 4 + 1] * 4)[:size]
        key, keys = b"", self.keys
        if keys is not None and keys.random() < _KEYED:
            key = b"k%d" % keys.choice((keys.randrange(3), keys.randrange(_KEYS)))
            body = b"" if keys.random() < _TOMBSTONES else body
        first = 0
        if name not in self._queues:
            branches = self.branches.setdefault((name.topic, name.queue_id), [])
            first = 0 if branches else rng.choice((0, 0, 7))
            branches.append(Branch(first, first))
        is_alike = len(self.sizes) == 1
        tags, falls = "a" if is_alike else rng.choice(_TAGS), rng.random() < self.falls
        later_ms = (-rng.choice((1, 500, 20_000)) if falls else 0) - self._set_back_ms()
        properties = _properties(tags, rng, is_keyed=is_alike or rng.random() < 0.5, key=key)
        if self.edges and body and self.edges.random() < _AT_AN_EDGE:
            body = self._up_to_an_edge(name, properties, self.edges)
        offset = self.append(
            name.topic,
            name.queue_id,
            body,
            first=first,
            later_ms=later_ms,
            tags=tags,
            properties=properties,
            is_damaged=rng.random() < self.rot,
        )
        row = self._queues[name]
        self._present(name).records.append(row.records[-1] or hole(row.tags[-1]))
        assert offset + 1 == self._present(name).end

    def _set_back_ms(self) -> int:
        """By how much the clock is wrong: for some messages in a row, so that later parts, or the rest of one, are older."""
        if self.setbacks and self.setbacks.random() < _TURNS:
            self._back_ms = 0 if self._back_ms else self.setbacks.choice((9_000, 15_000, 40_000))
            self.count("clock set back")
        return self._back_ms

    def _up_to_an_edge(self, name: MessageQueue, properties: bytes, edges: random.Random) -> bytes:
        """A body whose record ends where a block of 64 KiB does that begins with it, or with the queue; or beside that."""
        had = [raw for raw in self._present(name).records if not is_hole(raw)]
        begun = edges.choice((0, sum(map(len, had)))) % EDGE_BYTES
        bare = len(make_record(name, 0, 0, b"", 0, properties=properties))
        size = EDGE_BYTES * edges.choice((1, 1, 2)) - begun + edges.choice((-1, 0, 0, 1)) - bare
        self.count("record at an edge")
        return (edges.randbytes(size // 4 + 1) * 4)[:size] if size > 0 else b"x"

    def forget_some(self) -> None:
        """Retention: the oldest of a queue go, perhaps all."""
        name = self._rng.choice(self._names)
        row = self._queues.get(name)
        if row is not None and row.records:
            is_all = self._rng.random() < 0.25
            before = row.end if is_all else row.base + self._rng.randrange(1, len(row.records) + 1)
            self.expire(name.topic, name.queue_id, before)
            self._present(name).min = before

    def forget_beyond(self, ends: Mapping[QueueKey, int]) -> None:
        """Retention takes of a queue more than what is tiered, and leaves the last message; a few come just before."""
        names = [MessageQueue(*queue) for queue in sorted(ends)]
        present = [name for name in names if name in self._queues]
        if present:
            name = self._rng.choice(present)
            for _ in range(self._rng.randrange(2, 5)):
                self._store(name)
            row = self._queues[name]
            low = max(ends[name.topic, name.queue_id], row.base) + 1
            if low < row.end:
                before = self._rng.randrange(low, row.end)
                self.expire(name.topic, name.queue_id, before)
                self._present(name).min = before

    def delete_topic(self) -> None:
        """A topic is deleted with all of its queues; perhaps it is there again at once, with other messages."""
        rng = self._rng
        topic = rng.choice(self._names).topic
        mine = [name for name in self._names if name.topic == topic and name in self._queues]
        again = rng.random() < 0.6
        for name in mine:
            self.delete(name.topic, name.queue_id)
            self._lost.pop(name, None)
            for _ in range(rng.choice((1, 3, 30)) if again else 0):
                self._store(name)
        if mine:
            self.count("topic deleted")

    def lose_tail(self) -> None:
        """A power failure, or a copy of the store that is older: of all queues what came last is gone."""
        rng = self._rng
        lost: dict[MessageQueue, int] = {}
        for name, offset, row in self._log[-rng.choice((2, 6, 15, 60)) :]:
            if row is self._queues.get(name) and offset >= row.base:
                lost[name] = min(offset, lost.get(name, offset))
        for name, end in lost.items():
            self._cut(name, end)
        if lost:
            self.count("tail lost")
        if rng.random() < 0.6:
            for name in sorted(lost):
                for _ in range(rng.choice((1, 4, 12))):
                    self._store(name)

    def lose_behind(self, queue: QueueKey, offset: int, to: int = 0, *, again: bool = True) -> bool:
        """As ``lose_tail``, of one queue from an offset on; other messages come at once, at least up to ``to``.

        Args:
            queue: Which.
            offset: What is lost begins here.
            to: See above.
            again: Whether any come.

        Returns:
            Whether anything was lost, and not all.
        """
        name, row = MessageQueue(*queue), self._queues.get(MessageQueue(*queue))
        if row is None or not row.base < offset < row.end:
            return False
        self._cut(name, offset)
        self.count("tail lost")
        for _ in range(max(self._rng.choice((1, 4, 12)), to - offset) if again else 0):
            self._store(name)
        return True

    def grow(self, queue: QueueKey) -> None:
        """One more message."""
        self._store(MessageQueue(*queue))

    def _cut(self, name: MessageQueue, end: int) -> None:
        row, old = self._queues[name], self._present(name)
        self._lost[name] = row.cut(end)
        self._log = [
            (queue, offset, _NOWHERE if queue == name and where is row and offset >= end else where)
            for queue, offset, where in self._log
        ]
        kept = Branch(old.first, old.min, old.records[: end - old.first])
        self.branches[name.topic, name.queue_id].append(kept)

    def catch_up(self) -> None:
        """A copy that lagged gets what it lacked, if nothing else has come meanwhile."""
        for name, lost in sorted(self._lost.items(), key=itemgetter(0)):
            row = self._queues[name]
            if row.end != lost.base:
                continue
            row.regain(lost)
            self._log += [(name, offset, row) for offset in range(lost.base, lost.end)]
            both = zip(lost.records, lost.tags, strict=True)
            self._present(name).records += [raw or hole(tag) for raw, tag in both]
            self.count("copy level")
        self._lost.clear()

    # -- what the checker asks ------------------------------------------------------------------

    def _present(self, name: MessageQueue) -> Branch:
        return self.branches[name.topic, name.queue_id][-1]

    def present(self, queue: QueueKey) -> Branch | None:
        """What a queue is now; None when its topic is deleted."""
        return self.branches[queue][-1] if MessageQueue(*queue) in self._queues else None

    def damaged_ends(self) -> list[QueueKey]:
        """Queues whose last record nobody can read."""
        rows = sorted(self._queues.items(), key=itemgetter(0))
        return [(name.topic, name.queue_id) for name, row in rows if row.end - 1 in row.damaged]

    def has_had(self, queue: QueueKey, offset: int, records: list[bytes]) -> list[Branch]:
        """Branches in which these records were at their place."""
        return [one for one in self.branches.get(queue, ()) if one.has(offset, records)]

    def is_same(self, tiered: bytes | None, present: bytes | None) -> bool:
        """Whether what was tiered is what the broker has now."""
        return tiered == present

    def gone_unseen(self, queue: QueueKey, incarnation: ModelIncarnation) -> int:
        """Messages that retention took before they were tiered, of a queue of which the tier and the broker have nothing.

        No gap is told then before its next message: there is no last record to look for.
        """
        now = self.present(queue)
        has_nothing = now is not None and now.min == now.end and not incarnation.rows
        return max(0, now.end - incarnation.commit) if now and has_nothing else 0
