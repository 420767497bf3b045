"""``tiered store refill``: a replica's compacted topics get what lies before its own messages, from a tier or a store."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tiered.cli.exits import DONE, NEEDS_A_PERSON
from tiered.cli.frame import make_command
from tiered.cli.options import required, several
from tiered.cli.output import Output
from tiered.cli.store import StoreDirOptions, open_store
from tiered.errors import InvalidError
from tiered.local.interface import HoleReason
from tiered.model import QueueOffset

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tiered.api.tier import Tier
    from tiered.cli.call import Call
    from tiered.local.interface import LocalStore, RecordBatch
    from tiered.model import MessageQueue
    from tiered.store.embedded import MessageStore

_BATCH_BYTES = 4 << 20
_BATCH_COUNT = 1 << 16


@dataclass(frozen=True, kw_only=True)
class RefillOptions(StoreDirOptions):
    """What ``tiered store refill`` can be told."""

    from_: str = required(
        "what has the messages: URL of a tier, or directory of another store", "WHERE", str
    )
    topic: tuple[str, ...] = several(
        "compacted topics of the store to refill", "TOPIC,...", str, default_text="all"
    )


class _RefillSource(Protocol):
    """What has the messages."""

    def ends(self) -> Mapping[MessageQueue, QueueOffset]:
        """Of each queue one past the last queue offset."""

    def batches(self, queue: MessageQueue, limit: int) -> Iterator[RecordBatch]:
        """Its messages in order, as far as they are below ``limit``, or some more."""


class _TierSource:
    def __init__(self, tier: Tier) -> None:
        self._tier = tier

    def ends(self) -> Mapping[MessageQueue, QueueOffset]:
        return {queue: self._tier.reader.cursor(queue).end for queue in self._tier.queues()}

    def batches(self, queue: MessageQueue, limit: int) -> Iterator[RecordBatch]:
        from tiered.api.reading import plan_span, read_span

        span = plan_span(self._tier.reader.cursor(queue), 0, limit)
        for batch in read_span(self._tier, span, batch_bytes=_BATCH_BYTES):
            yield batch.records


class _LocalSource:
    def __init__(self, store: LocalStore) -> None:
        self._store = store

    def ends(self) -> Mapping[MessageQueue, QueueOffset]:
        self._store.refresh()
        return {queue: found.end for queue, found in self._store.queues().items()}

    def batches(self, queue: MessageQueue, limit: int) -> Iterator[RecordBatch]:
        at = QueueOffset(0)
        for read in (self._store.read_compacted, self._store.read):
            while at < limit:
                batch = read(queue, at, bytes_max=_BATCH_BYTES, count_max=_BATCH_COUNT)
                if batch is None:
                    break
                yield batch
                at = batch.end_offset


def run(call: Call, options: RefillOptions) -> int:
    """Refill queue after queue."""
    from tiered.local.layout import read_topics

    topics = read_topics(options.dir).compacted
    if unknown := sorted(set(options.topic) - topics) or ([] if topics else ["any"]):
        raise InvalidError(
            f"no compacted topic of this store: {', '.join(unknown)}",
            where=options.dir,
            do="`tiered store topic DIR TOPIC --compacted` makes one",
        )
    with contextlib.ExitStack() as stack:
        source = _open_source(call, options.from_, stack)
        wanted = set(options.topic) or topics
        ends = {queue: end for queue, end in source.ends().items() if queue.topic in wanted}
        # One that is named has to be there; of all the store's, those to which nothing was sent are not.
        absent = set(options.topic) - {queue.topic for queue in ends}
        if absent or not ends:
            raise InvalidError(
                f"it has nothing of {', '.join(sorted(absent or wanted))}", where=options.from_
            )
        store = stack.enter_context(open_store(call, options.dir, begins=ends))
        for topic in sorted({queue.topic for queue in ends}):
            many = max(queue.queue_id for queue in ends if queue.topic == topic) + 1
            store.create_topic(topic, queues=many, is_compacted=True)
        rows = [_refill(store, source, queue) for queue in sorted(ends)]
    document = {"format": 1, "store": store.root, "from": options.from_, "queues": rows}
    Output(call).emit(document, rows, ["topic", "queue_id", "had_from", "messages", "unknown"])
    return NEEDS_A_PERSON if any(row["unknown"] for row in rows) else DONE


def _open_source(call: Call, where: str, stack: contextlib.ExitStack) -> _RefillSource:
    from tiered.cli.call import open_local, open_tier

    if "://" in where:
        return _TierSource(open_tier(call, where, stack))
    return _LocalSource(open_local(call, where, stack))


def _refill(store: MessageStore, source: _RefillSource, queue: MessageQueue) -> dict[str, Any]:
    low, end = store.reader.bounds(queue)
    met = _Met(low if end else 0)
    messages = 0
    if met.limit:
        messages = store.refill(queue, met.passing(source.batches(queue, met.limit)))
    return {
        "topic": queue.topic,
        "queue_id": queue.queue_id,
        "had_from": low,
        "messages": messages,
        "unknown": met.unknown,
    }


class _Met:
    """Counts what a source has not got."""

    def __init__(self, limit: int) -> None:
        self.limit = limit  # queue offset up to which it is looked at
        # Queue offsets, from the first that it has on, of which it has neither a message nor the word that a newer one
        # has replaced it.
        self.unknown = 0

    def passing(self, batches: Iterator[RecordBatch]) -> Iterator[RecordBatch]:
        """The batches, looked at."""
        at = None
        for batch in batches:
            base = int(batch.base_offset)
            count = min(self.limit - base, batch.count)
            if count <= 0:
                break
            is_known = (batch.sizes > 0) | (batch.tag_codes == HoleReason.COMPACTED)
            self.unknown += int(np.count_nonzero(~is_known[:count]))
            self.unknown += base - at if at is not None else 0
            at = base + count
            yield batch
        self.unknown += self.limit - at if at is not None else 0


COMMAND = make_command(
    "store.refill",
    RefillOptions,
    run,
    details=(
        "For a replica that lost its disk, and has its messages from somewhere in the middle on: what lies before is taken"
        " from WHERE, and the queue is compacted. No broker may run on it meanwhile. Again does no harm."
    ),
    examples=[
        "tiered store refill /data/store --from s3://bucket/prefix",
        "tiered store refill /data/store --from /data/other-store --topic prices",
    ],
)
