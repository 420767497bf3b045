"""A tier whose messages have keys, its index, and the answers by brute force."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from support.examples import make
from support.journals import PREFIX
from support.tiers import TIME_MS, TierBuilder

from tiered.format.message_forms import InnerMessage, encode_inner_messages
from tiered.format.properties import join_properties
from tiered.format.record import encode_record
from tiered.format.sysflag import INNER_BATCH
from tiered.index.indexer import IndexBuilder, Indexer
from tiered.index.lookup import IndexReader, Wish
from tiered.local.interface import RecordBatch
from tiered.log.state import index_action, queue_action
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.base import ObjectStore
    from tiered.index.lookup import Lookup
    from tiered.log.state import Part


@dataclass(frozen=True, slots=True)
class Mail:
    """One message to be stored: its keys and its unique id; ``inner``: an inner batch of such; ``None``: a hole."""

    keys: tuple[str, ...] = ()
    unique: str = ""
    body: bytes = b"body"
    time_ms: int | None = None
    inner: tuple[Mail, ...] = ()

    @property
    def properties(self) -> bytes:
        found = {"TAGS": "a", "KEYS": " ".join(self.keys), "UNIQ_KEY": self.unique, "WAIT": "true"}
        return join_properties({name: value for name, value in found.items() if value})

    @property
    def all_keys(self) -> set[str]:
        return {key for key in (*self.keys, self.unique) if key}


def record_of(queue: MessageQueue, offset: int, mail: Mail, time_ms: int) -> bytes:
    body, properties = mail.body, mail.properties
    if mail.inner:
        rows = [InnerMessage(0, one.body, one.properties) for one in mail.inner]
        body = encode_inner_messages(rows)
        properties = b"INNER_NUM\x01%d\x02" % len(mail.inner)
    record = make(
        queue_id=queue.queue_id,
        queue_offset=offset,
        physical_offset=1000 + offset,
        sys_flag=INNER_BATCH if mail.inner else 0,
        born_timestamp_ms=time_ms,
        store_timestamp_ms=time_ms,
        body=body,
        topic=queue.topic,
        properties_raw=properties,
    )
    return encode_record(record)


def batch_of(queue: MessageQueue, base: int, mails: Sequence[Mail | None]) -> RecordBatch:
    rows: list[tuple[int, int, int, int]] = []
    raws: list[bytes] = []
    size, offset = 0, base
    for mail in mails:
        if mail is None:
            rows.append((size, 0, 1, -1))
            offset += 1
            continue
        time_ms = TIME_MS + offset if mail.time_ms is None else mail.time_ms
        raw = record_of(queue, offset, mail, time_ms)
        rows += [(size, len(raw), 97, time_ms)] * max(1, len(mail.inner))
        raws.append(raw)
        size += len(raw)
        offset += max(1, len(mail.inner))
    columns = np.array(rows, np.int64).reshape(-1, 4).T
    return RecordBatch(
        queue=queue,
        base_offset=QueueOffset(base),
        data=b"".join(raws),
        positions=columns[0],
        sizes=columns[1].astype(np.int32),
        tag_codes=columns[2],
        store_timestamps_ms=columns[3],
        physical_offsets=columns[0],
    )


Found = tuple[MessageQueue, int, int, int]
"""Queue, number of its incarnation, queue offset, store time."""


class KeyedTier(TierBuilder):
    """A tier with a key index.

    Attributes:
        mails: Everything that was committed, with its place, and all its keys.
    """

    def __init__(self, store: ObjectStore | None = None, *, writer: str = "0badcafe") -> None:
        super().__init__(store, writer=writer)
        self.mails: list[tuple[Found, set[str]]] = []
        self.builder = IndexBuilder(self.store, PREFIX, self.uploader.next_id)
        self.indexer = Indexer(self.builder, self.store, PREFIX)
        self.reader = IndexReader(self.store, PREFIX)

    def post(
        self, queue: MessageQueue, mails: Sequence[Mail | None], *, roll: bool = False
    ) -> Part:
        """Commit messages as one part."""
        base = self.file(queue).append_offset
        part = self.add_batch(batch_of(queue, base, mails), roll=roll)
        number, at = len(self.journal.state.queues[queue]) - 1, int(base)
        for mail in mails:
            first = at
            for one in () if mail is None else mail.inner or (mail,):
                time_ms = (
                    one.time_ms if mail is one and one.time_ms is not None else TIME_MS + first
                )
                self.mails.append(((queue, number, at, time_ms), one.all_keys))
                at += 1
            at += mail is None
        return part

    def collect(self) -> None:
        """Give the builder all that is not indexed."""
        while self.indexer.step(self.journal.state):
            pass

    def index(self) -> None:
        """Make one index object of all that is not indexed, and name it."""
        self.collect()
        if not self.builder.is_empty:
            self.say(index_action([self.builder.finish()]))
            self.builder.reset()

    def truncate_parts(self, queue: MessageQueue, parts: int) -> None:
        """Have the broker truncate the last parts of a queue, as far as the first stays."""
        incarnation = self.journal.state.incarnation(queue)
        ends = [part.queue_end for part in incarnation.parts()] if incarnation else []
        if incarnation is None or len(ends) <= parts:
            return
        end = ends[-1 - parts]
        self.truncate(end, queue=queue)
        if self.journal.state.incarnation(queue) is incarnation:
            return  # nothing of it was left to be truncated
        number = len(self.journal.state.queues[queue]) - 2  # the tail, and what goes on behind it
        self.mails = [
            ((q, n + 1, at, ms), keys)
            if (q, n) == (queue, number) and at < end
            else ((q, n, at, ms), keys)
            for (q, n, at, ms), keys in self.mails
        ]

    def expire(self, queue: MessageQueue) -> None:
        """Give up the first segment of a queue's first incarnation that has one."""
        for number, incarnation in enumerate(self.journal.state.queues.get(queue, ())):
            if incarnation.segments:
                to = [s.base_queue_offset for s in incarnation.segments[1:]] or [
                    incarnation.commit_offset
                ]
                place = {"position": number, "min_from": incarnation.min_offset, "min_to": to[0]}
                self.say(queue_action("expire", queue, incarnation.number, **place))
                self.forget(queue)
                return

    def ask(self, topic: str, key: str, **wish: Any) -> Lookup:
        """A lookup that has to be complete."""
        found = self.reader.lookup(self.journal.state, Wish(topic=topic, key=key, **wish))
        assert found.is_complete, found
        return found

    def expected(self, topic: str, key: str, **wish: Any) -> list[Found]:
        """The answer by brute force, of present incarnations as the tier holds them."""
        asked = Wish(topic=topic, key=key, **wish)
        incarnations = self.journal.state.queues
        found = []
        for place, keys in self.mails:
            queue, number, offset, time_ms = place
            if queue.topic != topic or key not in keys:
                continue
            if number >= len(incarnations[queue]) or (
                number != len(incarnations[queue]) - 1 and not asked.every_incarnation
            ):
                continue
            incarnation = incarnations[queue][number]
            if not incarnation.min_offset <= offset < incarnation.commit_offset:
                continue
            if asked.from_ms <= time_ms < asked.until_ms:
                found.append(place)
        order = [(p[3], p[2], p[0].queue_id, p[1]) for p in found]
        ranked = [p for _, p in sorted(zip(order, found, strict=True), reverse=True)]
        return ranked[: asked.count]


def places(found: Lookup) -> list[Found]:
    """Of the messages found."""
    return [(hit.queue, hit.position, hit.queue_offset, hit.store_ms) for hit in found.hits]
