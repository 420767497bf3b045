"""A message store in a RocketMQ broker's own format, written in this process.

**Contract.** One writer a directory: it holds the broker's lock, so that a broker and it exclude each other. Methods may
be called from any thread; log order is the order of the appends. Two threads belong to a store: one lists what was
appended (consume queues, key index, dispatchers), usually within a few milliseconds; one flushes and writes checkpoints.

**When is it stored?** ``Flush.ASYNC``: what ``append`` returned survives the end of this process. ``Flush.SYNC``: and
the end of the machine. With ``needs_replica`` it has also been acknowledged by ``acknowledge_replica``. What is above
the confirmed offset is neither listed, nor read, nor dispatched.

**Errors and retries.** ``InvalidError``: nothing of the call was stored, and trying again does not help.
``StoreUnavailableError``: the disk refused it, and nothing was stored (the next append may be tried: a full disk may
have room again), or the flush or the replica did not answer in time, and it may be stored. After a flush that failed
the store takes nothing more; ``close`` it, which leaves it as a crash does.

**Crashes** leave the file ``abort``; ``open`` then recovers (``tiered.store.recovery``), as a broker would.
"""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Self

from tiered.crashpoints import reached
from tiered.errors import ClosedError, InvalidError
from tiered.model import MessageQueue, PhysicalOffset, QueueOffset
from tiered.store.commitlog import CommitLog
from tiered.store.commits import GroupCommits, waiting
from tiered.store.disk import Disk
from tiered.store.encoding import Encoder, Receipts, check_topic
from tiered.store.listing import Reput
from tiered.store.messages import KeyMaker
from tiered.store.opening import StoreParts, check_names, make_new, open_existing
from tiered.store.options import Expiry, Flush, StoreOptions
from tiered.store.reading import StoreReader
from tiered.store.special import AsIs, Special, completed
from tiered.store.topictable import KnownTopics
from tiered.store.upkeep import Upkeep

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from contextlib import AbstractContextManager

    from tiered.clock import Clock
    from tiered.store.listing import Dispatch
    from tiered.store.messages import Appended, Message
    from tiered.store.recovery import Recovered
    from tiered.store.upkeep import Expired

_DRAIN_S = 60.0


class MessageStore:
    """See the module. Make it with ``create`` or ``open``."""

    @classmethod
    def create(
        cls,
        directory: str | os.PathLike[str],
        *,
        cluster: str,
        broker: str,
        clock: Clock,
        options: StoreOptions | None = None,
        rng: random.Random | None = None,
    ) -> Self:
        """Begin a store in a directory that is empty or missing.

        Args:
            directory: A broker's ``storePathRootDir``.
            cluster: Goes into every message, and into the table of topics.
            broker: Goes into the table of topics.
            clock: For store times and waiting.
            options: Default: ``StoreOptions()``.
            rng: For unique ids; default: the system's.

        Raises:
            InvalidError: The directory has something in it, or a name or option is none.
            StoreUnavailableError: The disk refuses it.
        """
        options = options or StoreOptions()
        check_names(cluster, broker, options)
        parts = make_new(directory, options, cluster=cluster, broker=broker, clock=clock)
        return cls(parts, cluster, clock, rng or random.SystemRandom())

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        *,
        cluster: str,
        broker: str,
        clock: Clock,
        options: StoreOptions | None = None,
        rng: random.Random | None = None,
        anew: bool = False,
    ) -> Self:
        """Go on with a store, ours or a broker's; recovers it where it was not stopped cleanly.

        Arguments are those of ``create``, but the sizes of files that are there win. With ``anew`` consume queues and
        index are made anew from the log.

        Raises:
            InvalidError: It is no store, or someone else writes to it, or a name or option is none.
            DataError: It is damaged where it had been on the disk.
            StoreUnavailableError: The disk refuses it.
        """
        options = options or StoreOptions()
        check_names(cluster, broker, options)
        parts = open_existing(directory, options, clock, anew=anew)
        return cls(parts, cluster, clock, rng or random.SystemRandom())

    def __init__(self, parts: StoreParts, cluster: str, clock: Clock, rng: random.Random) -> None:
        """Used by ``create`` and ``open``."""
        self.options = options = parts.options
        self.root = parts.hold.root
        self._parts = parts
        self._clock = clock
        self._cluster, self._keys = cluster, KeyMaker(rng)
        self._encoder = Encoder(options, cluster, self._keys)
        self._topics = KnownTopics(parts.topics, clock, options.topic_queues)
        self._log = CommitLog(
            self.root,
            options.commitlog_file_bytes,
            end=parts.log_end,
            store_ms=parts.store_ms,
            queue_ends={
                (queue.topic, queue.queue_id): end.next_offset
                for queue, end in parts.listing.queues.items()
            },
            rows=parts.log_rows,
            clock=clock,
        )
        self._as_is = AsIs(self._log, self._topics, options)
        self._commits = GroupCommits(
            lambda messages: self._log.append(messages, self._encoder.store_host),
            self._log.sync,
            clock,
            needs_sync=options.flush is Flush.SYNC,
            needs_replica=options.needs_replica,
        )
        self._commits.replica_end = parts.log_end
        self._reput = Reput(
            parts.log,
            parts.listing,
            self._log.handover,
            parts.log_end,
            lambda: self.confirm_offset,
        )
        self.reader = StoreReader(parts, lambda: self.confirm_offset)
        self._upkeep = Upkeep(parts, self._log, self._commits, self._reput, clock)
        self._close_lock = threading.Lock()
        self._is_closed = False
        try:
            self._begin()
        except BaseException:
            parts.close()
            raise
        self._upkeep.start()

    # -- the face --------------------------------------------------------------------------------

    @property
    def recovered(self) -> Recovered | None:
        """What ``open`` had to recover; None after a clean stop."""
        return self._parts.recovered

    @property
    def log_end(self) -> PhysicalOffset:
        """Physical offset behind the last record."""
        return PhysicalOffset(self._log.end)

    @property
    def confirm_offset(self) -> PhysicalOffset:
        """What is below it is stored as the policy says, and visible (or soon is)."""
        end = self._log.synced if self.options.flush is Flush.SYNC else self._log.end
        if self.options.needs_replica:
            end = min(end, self._commits.replica_end)
        return PhysicalOffset(end)

    @property
    def listed_end(self) -> PhysicalOffset:
        """What is below it is in consume queues and index, and was dispatched."""
        return PhysicalOffset(self._reput.position)

    def queues(self) -> dict[MessageQueue, QueueOffset]:
        """Every queue, and the queue offset of its next message to become visible."""
        found = list(self._parts.listing.queues.items())
        return {queue: QueueOffset(end.next_offset) for queue, end in found}

    def register(self, dispatch: Dispatch) -> None:
        """Have a dispatcher called with everything that is listed from now on, in the reput thread."""
        self._reput.dispatchers.append(dispatch)

    def create_topic(self, topic: str, *, queues: int, is_batch: bool = False) -> None:
        """Make a topic, or give one more queues. Messages make theirs themselves.

        With ``is_batch`` its consume queues are batch queues, which inner batches need.

        Raises:
            InvalidError: The name is none, ``queues`` is not positive, or the topic is there and of the other kind.
            StoreUnavailableError: See the module.
        """
        self._check_open()
        with Disk(self.root):
            self._topics.create(topic, queues, is_batch=is_batch)

    def begin_queue(self, queue: MessageQueue, offset: QueueOffset) -> None:
        """Let a queue without messages begin at another queue offset than 0. In memory until its first message.

        Raises:
            InvalidError: It has messages, or ``offset`` is negative.
        """
        check_topic(queue.topic)
        if offset < 0 or not self._log.begin_queue((queue.topic, queue.queue_id), offset):
            raise InvalidError(f"queue {queue} cannot begin at {offset}")

    def queue_end(self, queue: MessageQueue) -> QueueOffset:
        """Queue offset that the next message of a queue gets; 0 when it has none yet."""
        return QueueOffset(self._log.queue_end((queue.topic, queue.queue_id)))

    def append(self, message: Message) -> Appended:
        """Store one message. Errors as of ``append_batch``."""
        return self.append_batch((message,))[0]

    def append_batch(self, messages: Sequence[Message]) -> Receipts:
        """Store messages one after another, none of others between them; wait as the policy says.

        Raises:
            InvalidError: One cannot be stored as it is; nothing was.
            ClosedError: The store has been closed.
            StoreUnavailableError: See the module.
        """
        if self.options.flush is Flush.SYNC and messages:
            return self._append_together(messages)
        receipts, future = self.submit(messages)
        if future is not None:
            self._wait(future)
        return receipts

    def submit(self, messages: Sequence[Message]) -> tuple[Receipts, Future[None] | None]:
        """As ``append_batch``, without waiting: the future is done when it is stored as the policy says.

        Returns:
            The receipts, and the future; None where there is nothing to wait for.
        """
        self._check_room()
        prepared = self._encoder.prepare(messages, int(self._clock.now_ms()))
        with Disk(self.root):
            self._topics.ensure(prepared.distinct, prepared.queues)
            places = self._log.append(prepared, self._encoder.store_host)
        return Receipts(prepared, places, self.options.store_host), self._acknowledged(places.end)

    def append_as_is(self, message: Message, *, prepared_transaction_offset: int = 0) -> Appended:
        """Store a message that names all that is to be stored of it: see ``tiered.store.special``.

        ``complete`` gives a client's message what a broker adds; the offset is that of the half message that it was.
        Errors as of ``append_batch``.
        """
        self._check_room()
        with Disk(self.root):
            receipt, end = self._as_is.put(Special(message, prepared_transaction_offset))
        if (future := self._acknowledged(end)) is not None:
            self._wait(future)
        return receipt

    def complete(self, message: Message) -> Message:
        """A message with what a broker adds, in its order: for ``append_as_is``. Errors: ``InvalidError``."""
        return completed(message, cluster=self._cluster, keys=self._keys, clock=self._clock)

    def acknowledge_replica(self, end: PhysicalOffset) -> None:
        """A replica has everything below ``end``."""
        self._commits.acknowledge_replica(end)
        self._upkeep.work.set()

    def flush(self) -> None:
        """Bring everything that was appended to the disk.

        Raises:
            ClosedError: The store has been closed.
            StoreUnavailableError: See the module.
        """
        self._check_open()
        with Disk(self.root, self._upkeep.fail):
            self._log.sync()

    def use_file(self, position: PhysicalOffset) -> AbstractContextManager[None]:
        """Have expiry spare the log file that holds a physical offset, for ``Expiry.spare_s`` once it is due."""
        return self._upkeep.in_use.use(position)

    def hold_expiry(self, held_from: Callable[[], int] | None) -> None:
        """Have expiry keep what is at or above the physical offset that is told (see ``tiered.store.upkeep``)."""
        self._upkeep.held_from = held_from

    def expire(self) -> Expired:
        """Delete now what is old enough (with the settings of ``options.expiry``, or the default ones).

        Raises:
            ClosedError: The store has been closed.
            StoreUnavailableError: The disk refused it.
        """
        self._check_open()
        with Disk(self.root):
            return self._upkeep.expire(self.options.expiry or Expiry(), by_hand=True)

    def wait_listed(self, end: int | None = None, timeout_s: float = _DRAIN_S) -> bool:
        """Wait until everything below ``end`` (default: all that was appended) is listed; whether it is."""
        return self._upkeep.wait_listed(self._log.end if end is None else end, timeout_s)

    def close(self) -> None:
        """Stop cleanly: list and flush all, write the checkpoint, remove ``abort``. Again: nothing.

        What is not confirmed cannot be listed; then, and after an error, the store is left as by a crash.

        Raises:
            StoreUnavailableError: The disk refused it; the store was left as by a crash, and is closed.
        """
        if self._upkeep.is_forked:
            return
        with self._close_lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._log.seal()  # an append that is under way would write without the lock
            try:
                self._shut_down()
            finally:
                self._upkeep.stop()
                self._commits.fail(ClosedError("the store was closed", where=self.root))
                self._parts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside ----------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Mark the directory as being written to."""
        with Disk(self.root):
            now_ms = self._clock.now_ms()
            self._parts.topics.save(now_ms)  # without it nobody can open the directory again
            self._parts.hold.begin(now_ms)
            reached("store-marked")
            self._upkeep.write_checkpoint()

    def _shut_down(self) -> None:
        if self._upkeep.failure or self._log.is_broken:
            return
        with Disk(self.root, self._upkeep.fail):
            self._log.sync()
            confirmed = self.confirm_offset
            self._upkeep.wait_listed(confirmed, _DRAIN_S, is_last=True)
            self._upkeep.stop()
            if failed := self._upkeep.failure:
                raise OSError(failed)
            self._upkeep.write_checkpoint(is_last=self._reput.position == self._log.end)
            reached("store-stopping")
            if self._reput.position == self._log.end:
                self._parts.hold.end()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the store has been closed", where=self.root)
        self._upkeep.check_sound()

    def _check_room(self) -> None:
        self._check_open()
        self._upkeep.check_room()

    def _acknowledged(self, end: int) -> Future[None] | None:
        """Done when everything below ``end`` is stored as the policy says; None where there is nothing to wait for."""
        if self.options.flush is Flush.ASYNC and not self.options.needs_replica:
            if not self._upkeep.work.is_set():
                self._upkeep.work.set()
            return None
        return self._commits.submit(end)

    def _append_together(self, messages: Sequence[Message]) -> Receipts:
        """Let the flush thread write and sync what all who wait have to store."""
        self._check_room()
        prepared = self._encoder.prepare(messages, int(self._clock.now_ms()))
        with Disk(self.root):
            self._topics.ensure(prepared.distinct, prepared.queues)
        with waiting(self.root, self.options.sync_timeout_s):
            places = self._commits.append(prepared, self.options.sync_timeout_s)
        return Receipts(prepared, places, self.options.store_host)

    def _wait(self, future: Future[None]) -> None:
        with waiting(self.root, self.options.sync_timeout_s):
            future.result(self.options.sync_timeout_s)
