"""The door of the Python API (docs/reading.md): ``open``, and what it opens."""

from __future__ import annotations

import threading
from datetime import datetime
from html import escape
from itertools import takewhile
from typing import TYPE_CHECKING

from backends.lazy_dataclass import dataclass
from backends.s3_settings import S3Options
from fetcher.limits import MEMORY_BYTES, FetchSettings, TransferLimits
from tiered.api.broker_place import choose_place
from tiered.api.notebook import TopicNames
from tiered.api.open_tier import OpenTier
from tiered.api.reading import follow_queue, plan_span, read_span, read_spans, require_positive
from tiered.api.stores import backend_errors, open_for_reading
from tiered.clock import Clock, SystemClock
from tiered.errors import InvalidError, no_topic
from tiered.log.lineage import Isolation
from tiered.model import Boundary, Closing, MessageQueue, QueueBounds, QueueOffset, TimestampMs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import pyarrow as pa
    from pyarrow.dataset import FileSystemDataset

    from fetcher.filters import Filter
    from tiered.api.message import Found, Message
    from tiered.log.decode import TierBatch

__all__ = ["MEMORY_BYTES", "REQUESTS", "Tier", "open"]

MIB = 1 << 20
MESSAGE_BATCH_BYTES = 1 * MIB
ARROW_BATCH_BYTES = 4 * MIB


class Tier(Closing):
    """One broker's tier, read-only. For any thread; each iterator for one thread at a time.

    Use it in a ``with`` statement, or ``close`` it. Every method may raise ``StoreUnavailableError`` (the store does not
    answer or refuses), ``DataError`` (bytes are damaged; nothing of what holds them is given out) and ``ClosedError``.
    """

    def __init__(self, opened: OpenTier) -> None:
        """Take an opened tier over; it is closed with this one. ``tiered.open`` makes one."""
        self._opened = opened

    def __repr__(self) -> str:
        opened = self._opened
        place = f"{opened.place.cluster}/{opened.place.broker}"
        return f"<Tier {opened.meter.url} {place}: {len(self.topics())} topics, {len(self.queues())} queues>"

    def _repr_html_(self) -> str:
        return (
            self._topics()
            ._repr_html_()
            .replace("<caption>", f"<caption>{escape(repr(self))}<br>", 1)
        )

    def _topics(self) -> TopicNames:
        counts: dict[str, tuple[int, int]] = {}
        for queue, incarnations in self._opened.state.queues.items():
            queues, messages = counts.get(queue.topic, (0, 0))
            there = incarnations[-1].commit_offset - incarnations[-1].min_offset
            counts[queue.topic] = queues + 1, messages + there
        return TopicNames([(topic, *counts[topic]) for topic in sorted(counts)])

    # What there is

    def topics(self) -> list[str]:
        """Names of all topics, in order."""
        return self._topics()

    def queues(self, topic: str | None = None) -> list[MessageQueue]:
        """The queues of a topic, or of all, in order."""
        return self._opened.queues(topic)

    def bounds(self, topic: str, queue_id: int) -> QueueBounds:
        """Queue offsets ``[min, end)`` that can be read, as of opening or the last ``refresh``."""
        return self._opened.bounds(topic, queue_id)

    def refresh(self) -> bool:
        """See what was committed since; whether there was anything. Costs one listing, and what is new."""
        return self._opened.refresh()

    def offset_for_time(
        self, topic: str, queue_id: int, time: int | datetime, *, upper: bool = False
    ) -> QueueOffset:
        """First queue offset stored at or after a time, the end when there is none; or ``upper``, as a broker has it.

        Args:
            time: UTC milliseconds, or a datetime with a time zone.
            upper: The last one stored at or before the time instead, the first there is when there is none.

        Raises:
            InvalidError: No such queue, or a datetime without a time zone.
        """
        self._opened.require_same_process()
        queue = self._opened.reader.queue(MessageQueue(topic, queue_id))
        with backend_errors():
            boundary = Boundary.UPPER if upper else Boundary.LOWER
            return queue.offset_by_time(time_ms(time), boundary)

    # Reading

    def read(
        self,
        topic: str,
        queue_id: int,
        start: int = 0,
        stop: int | None = None,
        *,
        tags: str | None = None,
        sql: str | None = None,
        incarnation: int | None = None,
    ) -> Iterator[Message]:
        """Messages of one queue in order.

        Args:
            start: First queue offset; below the first there is, reading begins with that.
            stop: One past the last; default: the end, as of opening or the last ``refresh``.
            tags: Only messages with one of these tags: ``A||B``.
            sql: Only messages whose properties fulfil this SQL92 expression (docs/reading.md).
            incarnation: Of an older incarnation of the queue; default: the present one.

        Raises:
            InvalidError: No such queue or incarnation, a bound below zero, or both kinds of filters.
            FilterError: The filter is not valid.
            ExpiredError: Messages have expired while they were read; it says where to go on.
        """
        choice = Choice.of(tags, sql)
        batches = self.read_records(
            topic, queue_id, start, stop, incarnation=incarnation, batch_bytes=MESSAGE_BATCH_BYTES
        )
        return choice.messages(batches)

    def read_arrow(
        self,
        topic: str,
        queue_id: int,
        start: int = 0,
        stop: int | None = None,
        *,
        columns: Sequence[str] | None = None,
        tags: str | None = None,
        sql: str | None = None,
        incarnation: int | None = None,
        batch_bytes: int = ARROW_BATCH_BYTES,
    ) -> Iterator[pa.RecordBatch]:
        """Messages of one queue in order, as Arrow record batches; see ``read``.

        Args:
            columns: Which, in this order; default: all (``tiered.api.arrow.COLUMNS``, of other stores'
                queues ``KAFKA_COLUMNS`` and ``JMQ_COLUMNS`` there). What is left out costs nothing.
            batch_bytes: Stored bytes of a batch at most, but for one larger message; batches may be smaller.

        Raises:
            InvalidError: As ``read``; or no such column, or pyarrow is not installed.
        """
        choice = Choice.of(tags, sql)
        batches = self.read_records(
            topic, queue_id, start, stop, incarnation=incarnation, batch_bytes=batch_bytes
        )
        return choice.arrow(batches, columns)

    def read_records(
        self,
        topic: str,
        queue_id: int,
        start: int = 0,
        stop: int | None = None,
        *,
        incarnation: int | None = None,
        batch_bytes: int = ARROW_BATCH_BYTES,
    ) -> Iterator[TierBatch]:
        """Batches of stored records, checked and otherwise as they are: what the other forms are made of; see ``read``."""
        require_positive("batch_bytes", batch_bytes)
        cursor = self._opened.reader.cursor(MessageQueue(topic, queue_id), incarnation)
        return read_span(self._opened, plan_span(cursor, start, stop), batch_bytes=batch_bytes)

    def read_topic(
        self,
        topic: str,
        *,
        tags: str | None = None,
        sql: str | None = None,
        queues_at_once: int = 16,
    ) -> Iterator[Message]:
        """All messages of a topic: in order within each queue, the queues taking turns.

        Args:
            queues_at_once: How many queues are read at once; in memory for each is what one batch holds, and read-ahead.

        Raises:
            InvalidError: No such topic, or ``queues_at_once`` is not above 0; see ``read``.
        """
        choice = Choice.of(tags, sql)
        batches = self.read_topic_records(
            topic, queues_at_once=queues_at_once, batch_bytes=MESSAGE_BATCH_BYTES
        )
        return choice.messages(batches)

    def read_topic_arrow(
        self,
        topic: str,
        *,
        columns: Sequence[str] | None = None,
        tags: str | None = None,
        sql: str | None = None,
        queues_at_once: int = 16,
        batch_bytes: int = ARROW_BATCH_BYTES,
    ) -> Iterator[pa.RecordBatch]:
        """All messages of a topic as Arrow record batches, each of one queue; see ``read_topic`` and ``read_arrow``."""
        choice = Choice.of(tags, sql)
        batches = self.read_topic_records(
            topic, queues_at_once=queues_at_once, batch_bytes=batch_bytes
        )
        return choice.arrow(batches, columns)

    def dataset(self, topic: str, *, columns: Sequence[str] | None = None) -> FileSystemDataset:
        """All messages of a topic, as of now, as a dataset of pyarrow, which DuckDB, Polars and others read as well.

        It streams, in files of about 16 MiB; a reader that is slower than the tier has up to 1 GiB waiting, pyarrow's own
        limit, or a few files if it goes through ``get_fragments``. A filter on queue, queue offset or store time reads
        only what can have such rows. The tier has to stay open.

        Args:
            columns: Of the dataset; default: all. What is left out here costs nothing; a column that is left out of a scan
                alone was made.

        Raises:
            InvalidError: No such topic or column; or pyarrow or fsspec is not installed.
        """
        from tiered.api.arrow import load_library  # noqa: PLC0415 - optional dependencies

        if not self.queues(topic):
            raise self._no_topic(topic)
        # By its name: it stands on this module, and on fsspec.
        module = load_library("tiered.api.filesystem", "a dataset needs fsspec", "fsspec")
        return module.make_dataset(self, topic, columns)

    def read_topic_records(
        self, topic: str, *, queues_at_once: int = 16, batch_bytes: int = ARROW_BATCH_BYTES
    ) -> Iterator[TierBatch]:
        """All of a topic in batches of stored records, each of one queue; see ``read_topic`` and ``read_records``."""
        require_positive("queues_at_once", queues_at_once)
        require_positive("batch_bytes", batch_bytes)
        state = self._opened.state  # of which all queues are read, whenever their turn comes
        queues = sorted(queue for queue in state.queues if queue.topic == topic)
        if not queues:
            raise self._no_topic(topic)
        cursors = [self._opened.reader.cursor(queue, state=state) for queue in queues]
        spans = [plan_span(cursor, 0, cursor.end) for cursor in cursors]
        return read_spans(self._opened, spans, batch_bytes=batch_bytes, at_once=queues_at_once)

    def follow(
        self,
        topic: str,
        queue_id: int,
        start: int | None = None,
        *,
        stop: threading.Event | None = None,
        tags: str | None = None,
        sql: str | None = None,
        pause_s_max: float = 5.0,
    ) -> Iterator[Message]:
        """Messages of one queue in order, waiting for more as they are tiered.

        A queue that was deleted and made again is followed into its new incarnation; of what the broker truncated what came
        in its place is given, so that queue offsets may come again.

        Args:
            start: First queue offset; default: the end, so that only what is new comes.
            stop: Ends the iterator once it is set, amid a pause too; default: it never ends.
            pause_s_max: Longest pause between two looks at the journal (a listing each); pauses double while nothing comes.

        Raises:
            InvalidError: No such queue; see ``read``.
        """
        choice = Choice.of(tags, sql)
        ended = stop or threading.Event()
        batches = self.follow_records(topic, queue_id, start, stop=ended, pause_s_max=pause_s_max)
        return takewhile(lambda _: not ended.is_set(), choice.messages(batches))

    def follow_records(
        self,
        topic: str,
        queue_id: int,
        start: int | None = None,
        *,
        stop: threading.Event | None = None,
        pause_s_max: float = 5.0,
        batch_bytes: int = MESSAGE_BATCH_BYTES,
    ) -> Iterator[TierBatch]:
        """As ``follow``, in batches of stored records."""
        require_positive("pause_s_max", pause_s_max)
        return follow_queue(
            self._opened,
            self._opened.reader.cursor(MessageQueue(topic, queue_id)),
            start,
            stop or threading.Event(),
            batch_bytes=batch_bytes,
            pause_s_max=pause_s_max,
        )

    def query(
        self,
        topic: str,
        key: str,
        *,
        from_time: int | datetime | None = None,
        until_time: int | datetime | None = None,
        count: int = 64,
    ) -> Found:
        """Messages of a topic that have a key, or this unique id, newest first; iterate over what is returned.

        Args:
            key: One of a message's keys, or its unique id.
            from_time: Stored at or after it.
            until_time: Stored before it.
            count: So many at most (> 0).

        Raises:
            InvalidError: No such topic, or ``count`` is not above 0.
            DataError: Something that may hold one is damaged; ``tiered query`` gives out what was found all the same.
        """
        from tiered.api.message import Found  # noqa: PLC0415
        from tiered.index.lookup import TIME_MAX, Wish  # noqa: PLC0415 - only queries need it

        wish = Wish(
            topic=topic,
            key=key,
            count=count,
            from_ms=-TIME_MAX if from_time is None else time_ms(from_time),
            until_ms=TIME_MAX if until_time is None else time_ms(until_time),
        )
        if not self.queues(topic):
            raise self._no_topic(topic)
        with backend_errors():
            return Found.of(self._opened.lookup(wish))

    # The end

    def close(self) -> None:
        """End reads (``ClosedError``), threads and connections. Harmless when repeated; in a forked process nothing."""
        self._opened.close()

    def _no_topic(self, topic: str) -> InvalidError:
        return no_topic(topic, self.topics(), where=self._opened.store.url)


REQUESTS = 16
"""Requests under way at once, unless told otherwise."""


def open(  # noqa: A001 (the API's door)
    url: str,
    *,
    cluster: str | None = None,
    broker: str | None = None,
    options: S3Options | None = None,
    memory_bytes: int = MEMORY_BYTES,
    requests: int = REQUESTS,
    settings: FetchSettings | None = None,
    clock: Clock | None = None,
    is_sequential: bool = False,
    isolation: str = "read_committed",
) -> Tier:
    """Open a tier for reading.

    Args:
        url: ``file:///path``, ``s3://bucket/prefix``, or anything that fsspec knows.
        cluster: Name of the cluster; needed only when several brokers have their data there.
        broker: Name of the broker; likewise.
        options: Endpoint, region and the like; default: from the environment.
        memory_bytes: What is cached, read ahead, on its way or kept free, and filters of the key index, all together; at
            least 1 MiB (``FetchSettings.of_memory``). What a caller holds is the caller's.
        requests: Requests under way at once, at most; as many threads are started by the first read.
        settings: All limits, in place of these two.
        is_sequential: Each queue will be read once, one after the other, in large batches: of a folder nothing is then read
            ahead or cached, and no thread started.
        isolation: ``read_committed`` or ``read_uncommitted``: what is seen of Kafka's transactions. Of a queue's end, too:
            with the first it is the last stable offset.

    Raises:
        InvalidError: No such tier, or several; less memory, or fewer requests, than there can be.
        StoreUnavailableError: The store cannot be reached or refuses us.
    """
    return Tier(
        open_tier(
            url,
            cluster=cluster,
            broker=broker,
            options=options,
            memory_bytes=memory_bytes,
            requests=requests,
            settings=settings,
            clock=clock,
            is_sequential=is_sequential,
            isolation=isolation,
        )
    )


def opened_by(tier: Tier) -> OpenTier:
    """What a tier stands on: for this package, and for none that uses it."""
    return tier._opened  # noqa: SLF001


def open_tier(
    url: str,
    *,
    cluster: str | None = None,
    broker: str | None = None,
    options: S3Options | None = None,
    memory_bytes: int = MEMORY_BYTES,
    requests: int = REQUESTS,
    settings: FetchSettings | None = None,
    clock: Clock | None = None,
    is_sequential: bool = False,
    isolation: str = "read_committed",
) -> OpenTier:
    """What ``open`` stands on, for this program's own commands; see there."""
    clock = clock or SystemClock()
    if isolation not in {one.value for one in Isolation}:
        do = "give read_committed or read_uncommitted"
        raise InvalidError(f"{isolation!r} is no isolation level", do=do)
    if settings is None:
        transfers = TransferLimits(requests_in_flight_max=requests)
        settings = FetchSettings.of_memory(memory_bytes, transfers)
    opened = open_for_reading(url, options or S3Options(), clock)
    with backend_errors():
        try:
            place = choose_place(opened.store, cluster, broker)
            tier = OpenTier.over(
                opened,
                place,
                clock,
                settings,
                is_sequential=is_sequential,
                isolation=Isolation(isolation),
            )
            tier.refresh()
        except BaseException:
            opened.close()
            raise
    return tier


# -- which messages, in which form -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Choice:
    """Messages that a filter lets pass."""

    wanted: Filter | None  # the filter; None for all

    @classmethod
    def of(cls, tags: str | None, sql: str | None) -> Choice:
        """Messages with these tags, or whose properties fulfil an expression.

        Raises:
            InvalidError: Both are given.
            FilterError: It is none.
        """
        if tags is not None and sql is not None:
            raise InvalidError("tags and sql contradict each other", do="give one of them")
        if tags is None and sql is None:
            return cls(None)
        from fetcher.filters import compile_filter  # noqa: PLC0415 - an optional dependency

        if sql is not None:
            return cls(compile_filter(sql, "SQL92"))
        return cls(compile_filter(tags or "", "TAG"))

    def lists(self, batches: Iterable[TierBatch]) -> Iterator[list[Message]]:
        """The wanted messages of each batch.

        Raises:
            DataError: A record or inner batch is damaged; nothing of its batch is given out.
        """
        from tiered.api.message import messages_of  # noqa: PLC0415 - commands that only list do without

        for batch in batches:
            numbers = None if self.wanted is None else self.wanted.select(batch.records)
            yield messages_of(batch, numbers)

    def messages(self, batches: Iterable[TierBatch]) -> Iterator[Message]:
        """The wanted messages, one by one; see ``lists``."""
        return (message for found in self.lists(batches) for message in found)

    def arrow(
        self, batches: Iterable[TierBatch], columns: Sequence[str] | None
    ) -> Iterator[pa.RecordBatch]:
        """The wanted messages as record batches, one of each batch that has any.

        Raises:
            InvalidError: No such column, or none at all, or pyarrow is not installed; at once.
        """
        from tiered.api.arrow import AnyArrowMaker  # noqa: PLC0415 - an optional dependency

        if columns is not None and not columns:
            # A batch without columns has no rows: it would look as if there were no messages.
            raise InvalidError("no column is named", do="name one, or leave columns out for all")
        maker = AnyArrowMaker(columns)
        made = (
            maker.make(batch, None if self.wanted is None else self.wanted.select(batch.records))
            for batch in batches
            if (batch.records.sizes > 0).any()  # holes alone do not say whose words they would have
        )
        return (batch for batch in made if batch.num_rows)


def time_ms(time: int | datetime) -> TimestampMs:
    """UTC milliseconds of a time.

    Raises:
        InvalidError: A datetime without a time zone.
    """
    if not isinstance(time, datetime):
        return TimestampMs(time)
    if time.tzinfo is None:
        raise InvalidError(f"a time without a time zone: {time}", do="give it one")
    return TimestampMs(round(time.timestamp() * 1000))
