"""An embedded store: a directory in a RocketMQ broker's own format, written in this process.

**Contract.** One writer a directory: it holds the broker's lock, so that a broker and it exclude each other. Readers
(``tiered.local.rocketmq``) see what was appended at once, as they would see a broker's. Methods may be called from any
thread; one lock orders them, and log order is the order of the appends. Store times never go back.

**When is it stored?** What ``append`` returned survives the end of this process; what ``flush`` or ``close`` returned
after survives the end of the machine.

**Errors and retries.** ``InvalidError``: nothing of the call was stored, and trying again does not help. After
``StoreUnavailableError`` (the disk refused something) some of the call may be stored, and the store takes nothing more;
``close`` it, which leaves it as a crash does.

**Crashes** leave the file ``abort``. Such a store is refused by ``open``: it needs recovery, which is a broker's to do
(and will be this module's). Opening it with a broker and stopping that cleanly makes it whole; readers read it as it is.
"""

from __future__ import annotations

import os
import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tiered.errors import ClosedError, DataError, InvalidError, StoreUnavailableError
from tiered.format.consume_queue import ITEM_BYTES
from tiered.local.layout import inspect
from tiered.local.liveness import ABORT_FILE
from tiered.local.writer.hold import Disk, StoreHold
from tiered.local.writer.messages import Appended, Message, StoreSettings
from tiered.local.writer.records import Draft, check_host, check_topic, draft
from tiered.local.writer.rows import StoreRows
from tiered.local.writer.startup import StoreEnd, read_end
from tiered.local.writer.topictable import TopicTable
from tiered.local.writer.uniqkeys import UniqueKeys
from tiered.model import PhysicalOffset, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tiered.clock import Clock
    from tiered.local.layout import Layout
    from tiered.model import MessageQueue


class EmbeddedStore:
    """See the module. Make it with ``create`` or ``open``."""

    @classmethod
    def create(
        cls,
        directory: str | os.PathLike[str],
        *,
        cluster: str,
        broker: str,
        clock: Clock,
        settings: StoreSettings | None = None,
        unique_key: Callable[[int], str] | None = None,
    ) -> Self:
        """Begin a store in a directory that is empty or missing.

        Args:
            directory: A broker's ``storePathRootDir``.
            cluster: Goes into every message, and into the table of topics.
            broker: Goes into the table of topics.
            clock: For store times.
            settings: Default: ``StoreSettings()``.
            unique_key: Makes a ``UNIQ_KEY`` for a time in UTC ms; default: random ones.

        Raises:
            InvalidError: The directory has something in it, or a name or setting is none.
            StoreUnavailableError: The disk refuses it.
        """
        settings = settings or StoreSettings()
        _check_names(cluster, broker, settings)
        hold = StoreHold.of_new(directory)
        end = StoreEnd(0, 0, {})
        topics = TopicTable.make(hold.root, cluster=cluster, broker=broker)
        return cls._begin(
            hold,
            topics,
            end,
            cluster=cluster,
            clock=clock,
            settings=settings,
            unique_key=unique_key,
        )

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        *,
        cluster: str,
        broker: str,
        clock: Clock,
        settings: StoreSettings | None = None,
        unique_key: Callable[[int], str] | None = None,
    ) -> Self:
        """Go on with a store that was stopped cleanly, by a broker or by ``close``. Arguments as of ``create``.

        Raises:
            InvalidError: It is no store, or someone else writes to it, or a name or setting is none.
            DataError: It was not stopped cleanly, or is damaged.
            StoreUnavailableError: The disk refuses it.
        """
        settings = settings or StoreSettings()
        _check_names(cluster, broker, settings)
        layout = inspect(os.fspath(directory))
        hold = StoreHold(layout.root)
        try:
            _check_clean(layout.root)
            end = read_end(layout)
            topics = TopicTable.load(layout.root)
            settings = _as_on_disk(settings, layout, end)
        except BaseException:
            hold.close()
            raise
        return cls._begin(
            hold,
            topics,
            end,
            cluster=cluster,
            clock=clock,
            settings=settings,
            unique_key=unique_key,
        )

    @classmethod
    def _begin(
        cls,
        hold: StoreHold,
        topics: TopicTable,
        end: StoreEnd,
        *,
        cluster: str,
        clock: Clock,
        settings: StoreSettings,
        unique_key: Callable[[int], str] | None,
    ) -> Self:
        """Mark the directory as being written to."""
        make_key = unique_key or UniqueKeys(random.SystemRandom())
        try:
            with Disk(hold.root):
                now_ms = clock.now_ms()
                hold.begin(now_ms)
                topics.save(now_ms)
                hold.write_checkpoint(end.store_ms, end.log_end)
        except BaseException:
            hold.close()
            raise
        return cls(
            hold, topics, end, cluster=cluster, clock=clock, settings=settings, unique_key=make_key
        )

    def __init__(
        self,
        hold: StoreHold,
        topics: TopicTable,
        end: StoreEnd,
        *,
        cluster: str,
        clock: Clock,
        settings: StoreSettings,
        unique_key: Callable[[int], str],
    ) -> None:
        """Used by ``create`` and ``open``."""
        self._root = hold.root
        self._hold = hold
        self._topics = topics
        self._cluster = cluster
        self._clock = clock
        self._settings = settings
        self._unique_key = unique_key
        self._store_ms = end.store_ms
        self._rows = StoreRows(hold.root, end, settings)
        self._lock = threading.Lock()
        self._is_closed = False
        self._failure = ""

    # -- the face --------------------------------------------------------------------------------

    @property
    def settings(self) -> StoreSettings:
        """As given, with the sizes that the store's files have."""
        return self._settings

    @property
    def log_end(self) -> PhysicalOffset:
        """Physical offset of the next record (unless it goes into the next file)."""
        with self._lock:
            return PhysicalOffset(self._rows.log_end)

    def queue_end(self, queue: MessageQueue) -> QueueOffset:
        """Queue offset of the next message of a queue; 0 when it has none yet."""
        with self._lock:
            return QueueOffset(self._rows.queue_end(queue))

    def create_topic(self, topic: str, *, queues: int) -> None:
        """Make a topic, or give one more queues. Messages make theirs themselves.

        Raises:
            InvalidError: The name is none, or ``queues`` is not positive.
            StoreUnavailableError: See the module.
        """
        check_topic(topic)
        if queues <= 0:
            raise InvalidError(f"topic {topic}: {queues} queues")
        with self._lock, self._writing():
            self._topics.ensure(topic, queues - 1, queues=queues, now_ms=self._clock.now_ms())

    def begin_queue(self, queue: MessageQueue, offset: QueueOffset) -> None:
        """Let a queue without messages begin at another queue offset than 0. In memory until its first message.

        Raises:
            InvalidError: It has messages, or ``offset`` is negative.
        """
        check_topic(queue.topic)
        with self._lock:
            self._check_open()
            self._rows.begin_queue(queue, offset)

    def append(self, message: Message) -> Appended:
        """Store one message.

        Raises:
            InvalidError: It cannot be stored as it is; nothing was.
            ClosedError: The store has been closed.
            StoreUnavailableError: See the module.
        """
        return self.append_batch((message,))[0]

    def append_batch(self, messages: Sequence[Message]) -> list[Appended]:
        """Store messages one after another, none of others between them. Errors as of ``append``."""
        with self._lock, self._writing():
            # The clock may have been set back; recovery and search by time rely on the order.
            now_ms = max(self._clock.now_ms(), self._store_ms)
            drafts = [self._draft(message, now_ms) for message in messages]
            self._failure = "an append was interrupted"  # until it has been done whole
            for found in drafts:
                self._topics.ensure(
                    found.message.topic,
                    found.message.queue_id,
                    queues=self._settings.topic_queues,
                    now_ms=now_ms,
                )
            self._store_ms = now_ms
            appended = list(self._rows.append(drafts, now_ms))
            self._failure = ""
            return appended

    def flush(self) -> None:
        """Bring everything that was appended to the disk.

        Raises:
            ClosedError: The store has been closed.
            StoreUnavailableError: See the module.
        """
        with self._lock, self._writing():
            self._flush()

    def close(self) -> None:
        """Stop cleanly: flush, write the checkpoint, remove ``abort``, give the lock free. Again: nothing.

        Raises:
            StoreUnavailableError: The disk refused it; the store was left as by a crash, and is closed.
        """
        with self._lock:
            if self._is_closed:
                return
            try:
                if not self._failure:
                    with self._writing():
                        self._flush()
                        self._hold.end()
            finally:
                self._is_closed = True
                self._rows.close()
                self._hold.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside; the lock is held ----------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the store has been closed", where=self._root)
        if self._failure:
            raise StoreUnavailableError(
                f"an earlier write failed: {self._failure}", where=self._root, do="close the store"
            )

    def _writing(self) -> Disk:
        self._check_open()
        return Disk(self._root, self._fail)

    def _fail(self, why: str) -> None:
        self._failure = why

    def _draft(self, message: Message, now_ms: int) -> Draft:
        if self._topics.is_batch(message.topic):
            raise InvalidError(
                f"topic {message.topic} has batch consume queues, which is not supported"
            )
        return draft(
            message,
            self._settings,
            cluster=self._cluster,
            unique_key=lambda: self._unique_key(now_ms),
        )

    def _flush(self) -> None:
        self._rows.sync()
        self._hold.write_checkpoint(self._store_ms, self._rows.log_end)


def _check_names(cluster: str, broker: str, settings: StoreSettings) -> None:
    check_topic(cluster)
    check_topic(broker)
    check_host(settings.store_host)


def _check_clean(root: str) -> None:
    if Path(root, ABORT_FILE).exists():
        raise DataError(
            "the store was not stopped cleanly",
            where=f"{root}/{ABORT_FILE}",
            do="let a broker recover it, and stop that cleanly",
        )


def _as_on_disk(settings: StoreSettings, layout: Layout, end: StoreEnd) -> StoreSettings:
    """The settings with the sizes that the files have: a broker wants all of a kind to be equal."""
    if end.log_end:
        settings = replace(settings, commitlog_file_bytes=layout.log_file_bytes)
    for queue in end.queues.values():
        return replace(settings, consumequeue_file_items=queue.file_bytes // ITEM_BYTES)
    return settings
