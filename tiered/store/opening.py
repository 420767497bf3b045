"""Opening a store directory for writing: clean, after a crash, or new."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tiered.crashpoints import reached
from tiered.errors import DataError, InvalidError
from tiered.format.consume_queue import BATCH_ITEM_BYTES, ITEM_BYTES
from tiered.local.files import FileCache, FileRow, list_bases
from tiered.local.layout import ABORT_FILE, inspect, known_queue_file_bytes, list_queues
from tiered.store.disk import Disk, RowWriter, StoreHold, cut_row
from tiered.store.encoding import check_host, check_topic
from tiered.store.keyindex import KeyIndex, sizes_on_disk
from tiered.store.listing import Listing
from tiered.store.messages import parse_levels
from tiered.store.queues import QueueEnd, QueueKinds, StoreEnd, read_batch_end, read_end
from tiered.store.recovery import (
    Recovered,
    cut_at_hole,
    cut_queues,
    find_start,
    open_log,
    plan_begin,
    read_checkpoint,
    refuse_missing_files,
    replay,
)
from tiered.store.topictable import TopicTable

if TYPE_CHECKING:
    from tiered.clock import Clock
    from tiered.local.layout import Layout
    from tiered.model import MessageQueue
    from tiered.store.options import StoreOptions


LIGHT_PREFIX: Final = "%LMQ%"


@dataclass(slots=True)
class StoreParts:
    """What a store is run with; its holder closes all of it.

    Attributes:
        hold: The lock.
        topics: The table of topics.
        options: With the sizes that the files have.
        cache: Descriptors to read with.
        log: The commit log's files.
        listing: Consume queues and index, made whole.
        index: The key index.
        log_rows, queue_rows: Write the files.
        log_end: Where the log goes on.
        store_ms: Store time of the last record.
        recovered: What recovery did; None when none was needed.
    """

    hold: StoreHold
    topics: TopicTable
    options: StoreOptions
    cache: FileCache
    log: FileRow
    listing: Listing
    index: KeyIndex
    log_rows: RowWriter
    queue_rows: RowWriter
    log_end: int
    store_ms: int
    recovered: Recovered | None

    def close(self) -> None:
        """Close the files and give the lock free."""
        self.index.close()
        self.log_rows.close()
        self.queue_rows.close()
        self.cache.close()
        self.hold.close()


def check_names(cluster: str, broker: str, options: StoreOptions) -> None:
    """Refuse names and a host that no store can have.

    Raises:
        InvalidError: One is none.
    """
    check_topic(cluster)
    check_topic(broker)
    check_host(options.store_host)


def make_new(
    directory: str | os.PathLike[str],
    options: StoreOptions,
    *,
    cluster: str,
    broker: str,
    clock: Clock,
) -> StoreParts:
    """Begin a store in a directory that is empty or missing. Errors as of ``MessageStore.create``."""
    hold = StoreHold.of_new(directory)
    try:
        topics = TopicTable.make(hold.root, cluster=cluster, broker=broker)
        return _assemble(hold, topics, options, StoreEnd(0, 0, {}), clock, queue_rows=RowWriter())
    except BaseException:
        hold.close()
        raise


def open_existing(
    directory: str | os.PathLike[str], options: StoreOptions, clock: Clock, *, anew: bool
) -> StoreParts:
    """Go on with a store, recovered where it was not stopped cleanly. Errors as of ``MessageStore.open``.

    Args:
        directory: Its root.
        options: As asked for.
        clock: Time.
        anew: Make consume queues and index anew from the whole log, whatever is there.
    """
    layout = inspect(os.fspath(directory))
    hold = StoreHold(layout.root)
    try:
        topics = TopicTable.load(layout.root)
        options = _as_on_disk(options, layout)
        with Disk(layout.root):
            if anew or Path(layout.root, ABORT_FILE).exists():
                return _recover(hold, topics, options, layout, clock, anew=anew)
            try:
                end = read_end(layout)
            except DataError:
                return _recover(hold, topics, options, layout, clock, anew=False)
            return _assemble(hold, topics, options, end, clock, queue_rows=RowWriter())
    except BaseException:
        hold.close()
        raise


def _recover(
    hold: StoreHold,
    topics: TopicTable,
    options: StoreOptions,
    layout: Layout,
    clock: Clock,
    *,
    anew: bool,
) -> StoreParts:
    _refuse_foreign(layout)
    cache, rows = FileCache(), RowWriter()
    # Without it something is wrong that no crash explains: then nothing is taken on trust.
    has_abort = Path(layout.root, ABORT_FILE).exists()
    try:
        if has_abort:
            cut_at_hole(layout, read_checkpoint(layout.root).logics_physical_offset)
        log = open_log(layout, cache)
        if not log.bases:
            queues = cut_queues(rows, layout, cache, -1) | _cut_batch_queues(
                rows, layout, cache, -1
            )
            parts = _assemble(hold, topics, options, StoreEnd(0, 0, queues), clock, queue_rows=rows)
            parts.index.cut(0)
            parts.recovered = Recovered(0, 0, 0, 0)
            return parts
        checkpoint = read_checkpoint(layout.root)
        has_queues = not anew and bool(list_queues(layout.root))
        begin = plan_begin(log.bases, log.file_bytes, checkpoint, has_queues=has_queues)
        covered = checkpoint.logics_physical_offset
        refuse_missing_files(log, covered)
        begin = find_start(layout, cache, begin, checkpoint, is_trusted=has_queues and has_abort)
        if not has_abort:  # a crash from now on must not look like a clean stop
            hold.begin(int(clock.now_ms()))
        queues = cut_queues(rows, layout, cache, begin) | _cut_batch_queues(
            rows, layout, cache, begin
        )
    finally:
        cache.close()
    end = StoreEnd(begin, checkpoint.physical_timestamp_ms, queues)
    parts = _assemble(hold, topics, options, end, clock, queue_rows=rows)
    try:
        parts.index.cut(begin)
        reached("store-lists-cut")
        found = replay(parts.log, begin, covered, parts.listing)
        cut_row(rows, layout.log, parts.log.file_bytes, found.end)
        reached("store-log-cut")
        for base in parts.log.bases:  # a process that was killed may have left it in memory
            if begin - parts.log.file_bytes < base < found.end:
                rows.mark(parts.log.path(base))
        parts.log_end, parts.store_ms = found.end, max(found.store_ms, parts.store_ms)
        parts.queue_rows.sync()
        parts.index.sync()
    except BaseException:
        parts.close()
        raise
    parts.recovered = Recovered(begin, found.end, found.store_ms, found.records)
    return parts


def _refuse_foreign(layout: Layout) -> None:
    """Refuse to make lists anew that we would make wrong.

    Raises:
        InvalidError: The store has lists of a kind that only a broker writes.
    """
    for queue in list_queues(layout.root):
        if queue.topic.startswith(LIGHT_PREFIX):
            raise InvalidError(
                f"a store with the light queue {queue.topic} was not stopped cleanly, "
                "and only a broker can recover it",
                where=layout.root,
                do="start a broker on it, and stop that cleanly",
            )
    if layout.has_ext:
        raise InvalidError(
            "a store with consumequeue_ext was not stopped cleanly, and only a broker can recover it",
            where=layout.root,
            do="start a broker on it, and stop that cleanly",
        )


def _cut_batch_queues(
    rows: RowWriter, layout: Layout, cache: FileCache, limit: int
) -> dict[MessageQueue, QueueEnd]:
    """As ``cut_queues``, of batch queues."""
    ends: dict[MessageQueue, QueueEnd] = {}
    for queue, is_batch in list_queues(layout.root).items():
        if not is_batch:
            continue
        end, _ = read_batch_end(layout, cache, queue, limit)
        folder = layout.queue_directory(queue, is_batch=True)
        cut_row(rows, folder, end.file_bytes, (end.unit or 0) * BATCH_ITEM_BYTES)
        ends[queue] = end
    return ends


def _assemble(
    hold: StoreHold,
    topics: TopicTable,
    options: StoreOptions,
    end: StoreEnd,
    clock: Clock,
    *,
    queue_rows: RowWriter,
) -> StoreParts:
    cache = FileCache()
    layout = inspect(hold.root) if end.log_end else None
    folder = f"{hold.root}/commitlog"
    log = (
        open_log(layout, cache)
        if layout is not None
        else FileRow(cache, folder, options.commitlog_file_bytes)
    )
    index = KeyIndex(hold.root, options.index_slots, options.index_items, clock)
    kinds = QueueKinds(
        topics.is_batch,
        parse_levels(options.delay_levels),
        options.consumequeue_file_bytes,
        options.batchqueue_file_items * BATCH_ITEM_BYTES,
    )
    listing = Listing(hold.root, end.queues, queue_rows, index, kinds)
    listing.last_ms = end.store_ms
    return StoreParts(
        hold=hold,
        topics=topics,
        options=options,
        cache=cache,
        log=log,
        listing=listing,
        index=index,
        log_rows=RowWriter(preallocate=options.preallocate),
        queue_rows=queue_rows,
        log_end=end.log_end,
        store_ms=end.store_ms,
        recovered=None,
    )


def _as_on_disk(options: StoreOptions, layout: Layout) -> StoreOptions:
    """The options with the sizes that the files have: a broker wants all of a kind to be equal."""
    if list_bases(layout.log):
        options = replace(options, commitlog_file_bytes=layout.log_file_bytes)
    sizes: dict[bool, int] = {}
    for queue, is_batch in list_queues(layout.root).items():
        if not sizes.get(is_batch):
            folder = layout.queue_directory(queue, is_batch=is_batch)
            sizes[is_batch] = known_queue_file_bytes(folder, is_batch=is_batch)
    if size := sizes.get(False, 0):
        options = replace(options, consumequeue_file_items=size // ITEM_BYTES)
    if size := sizes.get(True, 0):
        options = replace(options, batchqueue_file_items=size // BATCH_ITEM_BYTES)
    slots, items = sizes_on_disk(layout.root, options.index_slots, options.index_items)
    return replace(options, index_slots=slots, index_items=items)
