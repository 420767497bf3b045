"""Makes stores for benchmarks, byte for byte in the broker's format, at hundreds of thousands of messages a second.

**Contract.** The store is left as by a clean stop. Messages go round the queues, topic by topic within each queue
number. All records of a store are equally long (a user property evens out the topics' names), so the place of every
message follows from its number, and records are built as rows of one array: a template, with columns put over it. The
same arguments and clock give the same bytes. What was written is left to the system to bring to the disk. A crash leaves
``abort`` in the directory; remove the directory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from tiered.errors import InvalidError
from tiered.format.consume_queue import ITEM_BYTES, encode_items
from tiered.format.record import BLANK_BYTES_MIN, MAGIC_BLANK, SIZE_AND_MAGIC
from tiered.local.layout import LOG_DIRECTORY, QUEUE_DIRECTORY
from tiered.store.bulk_bodies import Bodies
from tiered.store.bulk_records import RecordRows
from tiered.store.hold import Disk, StoreHold
from tiered.store.options import StoreOptions
from tiered.store.rows import RowWriter
from tiered.store.topictable import TopicTable

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from tiered.clock import Clock

    Longs = npt.NDArray[np.int64]

CLUSTER: Final = "bench-cluster"
BROKER: Final = "bench-broker"
MESSAGES_PER_MS: Final = 10
_CHUNK_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class MadeStore:
    """What was made.

    Attributes:
        messages: How many.
        record_bytes: Of all records.
        log_bytes: Where the log ends: the records, and the blanks at the ends of files.
        topics: How many topics: ``bench-0`` and so on.
        queues: Queues of each.
    """

    messages: int
    record_bytes: int
    log_bytes: int
    topics: int
    queues: int


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where everything goes: message ``m`` to queue ``m % n`` of the ``n`` queues, which go topic by topic.

    Attributes:
        messages: How many.
        topics: Their names.
        queues: Queues of each topic.
        size: Bytes of each record.
        file_bytes: Of each file of the log.
        begin_ms: Store time of the first message, UTC.
    """

    messages: int
    topics: tuple[str, ...]
    queues: int
    size: int
    file_bytes: int
    begin_ms: int

    @property
    def per_file(self) -> int:
        """Records in each file of the log."""
        return (self.file_bytes - BLANK_BYTES_MIN) // self.size

    def physical(self, numbers: Longs) -> Longs:
        """Physical offsets of messages."""
        files, inside = np.divmod(numbers, self.per_file)
        found: Longs = files * self.file_bytes + inside * self.size
        return found

    def times_ms(self, numbers: Longs) -> Longs:
        """Born and store times of messages."""
        return self.begin_ms + numbers // MESSAGES_PER_MS

    @property
    def end_ms(self) -> int:
        """Store time of the last message."""
        return self.begin_ms + (self.messages - 1) // MESSAGES_PER_MS

    @property
    def log_end(self) -> int:
        """One past the last record."""
        return int(self.physical(np.array([self.messages - 1]))[0]) + self.size


def make_store(
    directory: str | os.PathLike[str],
    *,
    messages: int,
    body_bytes: int,
    queues: int,
    topics: int,
    seed: int,
    clock: Clock,
    commitlog_file_bytes: int = 1 << 30,
    consumequeue_file_items: int = 300_000,
    progress: Callable[[int], object] | None = None,
) -> MadeStore:
    """Make a store whose last message is stored now.

    Args:
        directory: Empty or missing.
        messages: In all, at least 1.
        body_bytes: Of each body; text as ``tiered.store.bulk_bodies`` says.
        queues: Queues of each topic.
        topics: How many, named ``bench-0`` and so on.
        seed: Of bodies and keys.
        clock: Tells now.
        commitlog_file_bytes: Size of each file of the log; the broker's default.
        consumequeue_file_items: Items of each file of a consume queue; the broker's default.
        progress: Told how many messages are in the log, every few thousand.

    Raises:
        InvalidError: The directory has something in it, or a number is out of range.
        StoreUnavailableError: The disk refuses it.
    """
    _check_numbers(messages=messages, queues=queues, topics=topics, body_bytes=body_bytes)
    options = StoreOptions(
        commitlog_file_bytes=commitlog_file_bytes,
        consumequeue_file_items=consumequeue_file_items,
        message_bytes_max=max(body_bytes, 1),
        topic_queues=queues,
    )
    names = tuple(f"bench-{number}" for number in range(topics))
    bodies = Bodies(body_bytes, seed, messages=messages)
    rows = RecordRows(names, bodies, cluster=CLUSTER, host=options.store_host, seed=seed)
    if rows.size + BLANK_BYTES_MIN > commitlog_file_bytes:
        raise InvalidError(
            f"bodies of {body_bytes} bytes do not fit files of {commitlog_file_bytes}"
        )
    plan = _Plan(
        messages=messages,
        topics=names,
        queues=queues,
        size=rows.size,
        file_bytes=commitlog_file_bytes,
        begin_ms=clock.now_ms() - (messages - 1) // MESSAGES_PER_MS,
    )
    hold = StoreHold.of_new(directory)
    try:
        with Disk(hold.root):
            hold.begin(plan.begin_ms)
            _write(hold.root, plan, rows, options, progress or (lambda _: None))
            _write_topics(hold.root, plan)
            hold.write_checkpoint(plan.end_ms, plan.log_end)
            hold.end()
    finally:
        hold.close()
    return MadeStore(messages, messages * rows.size, plan.log_end, topics, queues)


def _check_numbers(*, body_bytes: int, **counts: int) -> None:
    for name, value in counts.items():
        if value <= 0:
            raise InvalidError(f"{name} must be positive, not {value}")
    if body_bytes < 0:
        raise InvalidError(f"body_bytes must not be negative, and is {body_bytes}")


def _write(
    root: str,
    plan: _Plan,
    rows: RecordRows,
    options: StoreOptions,
    progress: Callable[[int], object],
) -> None:
    files = RowWriter()
    try:
        _write_log(files, f"{root}/{LOG_DIRECTORY}", plan, rows, progress)
        for index in range(plan.queues * len(plan.topics)):
            _write_queue(files, root, plan, rows, index=index, options=options)
    finally:
        files.close()


def _write_log(
    files: RowWriter, folder: str, plan: _Plan, rows: RecordRows, progress: Callable[[int], object]
) -> None:
    chunk = max(1, _CHUNK_BYTES // plan.size)
    number = 0
    while number < plan.messages:
        file_end = number - number % plan.per_file + plan.per_file
        end = min(number + chunk, plan.messages, file_end)
        numbers = np.arange(number, end)
        physical = plan.physical(numbers)
        in_queue, queue = np.divmod(numbers, plan.queues * len(plan.topics))
        queue_ids, topics = np.divmod(queue, len(plan.topics))
        built = rows.build(
            numbers,
            topics=topics,
            queue_ids=queue_ids,
            queue_offsets=in_queue,
            physical_offsets=physical,
            times_ms=plan.times_ms(numbers),
        )
        files.write(folder, plan.file_bytes, int(physical[0]), built.data.cast("B"))
        if end == file_end and end < plan.messages:
            at = int(physical[-1]) + plan.size
            rest = plan.file_bytes - at % plan.file_bytes
            files.write(folder, plan.file_bytes, at, SIZE_AND_MAGIC.pack(rest, MAGIC_BLANK))
        progress(end)
        number = end


def _write_queue(
    files: RowWriter,
    root: str,
    plan: _Plan,
    rows: RecordRows,
    *,
    index: int,
    options: StoreOptions,
) -> None:
    """Write the consume queue of the queue that message ``index`` is the first of."""
    queue_id, topic = divmod(index, len(plan.topics))
    folder = f"{root}/{QUEUE_DIRECTORY}/{plan.topics[topic]}/{queue_id}"
    step = plan.queues * len(plan.topics)
    items = options.consumequeue_file_items
    for start in range(index, plan.messages, step * items):
        numbers = np.arange(start, min(start + step * items, plan.messages), step)
        data = encode_items(
            plan.physical(numbers), np.full(len(numbers), plan.size), rows.tag_codes(numbers)
        )
        position = start // step * ITEM_BYTES
        files.write(folder, options.consumequeue_file_bytes, position, data)


def _write_topics(root: str, plan: _Plan) -> None:
    table = TopicTable.make(root, cluster=CLUSTER, broker=BROKER)
    for topic in plan.topics:
        table.put(topic, plan.queues)
    table.save(plan.end_ms)
