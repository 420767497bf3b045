"""Opening a store directory for writing: clean, after a crash, or new."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from backends.lazy_dataclass import dataclass
from tiered.crashpoints import reached
from tiered.errors import DataError, InvalidError
from tiered.format.block import bytes_at, properties_bytes, topic_bytes
from tiered.format.broker_checkpoint import (
    Checkpoint,
    decode_checkpoint,
    encode_checkpoint,
    listed_offset,
)
from tiered.format.items import BATCH_ITEM_BYTES, FILLER_SIZE, ITEM_BYTES, is_filler
from tiered.format.record import BLANK_BYTES_MIN, MAGIC_V1, MAGIC_V2, SIZE_AND_MAGIC
from tiered.local.catalog import check_topic
from tiered.local.chunks import Chunk, LogChunks, Next, count_sound
from tiered.local.compaction_log import file_sizes, folders_of
from tiered.local.consumequeues import BatchQueue, PlainQueue
from tiered.local.layout import (
    ABORT_FILE,
    Layout,
    check_contiguous,
    inspect,
    list_queues,
    log_file_bytes,
    read_text,
)
from tiered.local.mapped_file_queue import NAME_DIGITS, FileCache, MappedFileQueue, list_bases
from tiered.store.disk import (
    CHECKPOINT_FILE,
    Disk,
    RowWriter,
    StoreHold,
    cut_row,
    replace_file,
    sync_folder,
)
from tiered.store.encoding import check_host
from tiered.store.keyindex import KeyIndex, has_cut_file, sizes_on_disk
from tiered.store.listing import Listing, QueueEnd, QueueKinds, of_block
from tiered.store.new_message import parse_levels
from tiered.store.store_options import StoreOptions
from tiered.store.topictable import TopicTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from typing_extensions import Buffer

    from tiered.clock import Clock
    from tiered.format.block import RecordBlock
    from tiered.format.items import Items
    from tiered.model import MessageQueue, QueueOffset

# -- sizes of files ------------------------------------------------------------------------------
#
# The sizes of a store's files: what tells them, and what a file that was cut does not tell.
#
# Files of one kind are equally long, and whatever is written goes by that length. So damage must not set it: the distance of
# two files says it, else what the store was made with (``SIZES_FILE``), and only then the length of the only file.

_FAR: Final = 1 << 62
_CHUNK_BYTES: Final = 4 << 20
SIZES_FILE: Final = "config/tieredStore.json"
"""The sizes that a store was made with, which count as long as no distance of two files shows them. Brokers pass it over."""
_PAGE_BYTES: Final = 4096
_SIZES: Final = (
    "commitlog_file_bytes",
    "consumequeue_file_items",
    "batchqueue_file_items",
    "index_slots",
    "index_items",
)


def note_sizes(root: str, options: StoreOptions) -> None:
    """Note what a new store is made with."""
    path = Path(root, SIZES_FILE)
    path.parent.mkdir(exist_ok=True)
    sync_folder(root)
    document = {"format": 1, **{name: getattr(options, name) for name in _SIZES}}
    replace_file(path, json.dumps(document).encode())


def _as_made(root: str) -> dict[str, int]:
    path = f"{root}/{SIZES_FILE}"
    if (raw := read_text(path)) is None:
        return {}
    try:
        document = json.loads(raw)
        made = {name: int(document[name]) for name in _SIZES}
        replace(StoreOptions(), **made)  # type: ignore[arg-type]
    except (ValueError, LookupError, TypeError, InvalidError) as error:
        raise DataError(
            f"these are no sizes of a store: {error}",
            where=path,
            do="delete the file: sizes of files that are there win, and those asked for count else",
        ) from error
    return made


def as_on_disk(options: StoreOptions, layout: Layout) -> StoreOptions:
    """The options with the sizes that the files have: a broker wants all of a kind to be equal.

    Which that is, the distances of files tell, else what the store was made with. Of a broker's store without either its
    only file does, unless that shows that it was cut: damage sets no size, since whatever is written from then on would
    have it.
    """
    made = _as_made(layout.root)
    bases = list_bases(layout.log)
    asked, options = options, replace(options, **made)  # type: ignore[arg-type]
    if len(bases) > 1 or (bases and not made):
        size = layout.log_file_bytes
        if len(bases) == 1 and size != asked.commitlog_file_bytes:
            _refuse_cut(layout.log, bases[0], size)
        options = replace(options, commitlog_file_bytes=size)
    _refuse_long(layout.log, bases, options.commitlog_file_bytes)
    options = _with_queue_sizes(options, layout, is_made=bool(made))
    if found := file_sizes(layout.root):
        records, units = found
        compacting = replace(
            options.compacting, log_file_bytes=records, unit_file_items=units // BATCH_ITEM_BYTES
        )
        options = replace(options, compacting=compacting)
    slots, items = sizes_on_disk(
        layout.root, options.index_slots, options.index_items, is_made=bool(made)
    )
    return replace(options, index_slots=slots, index_items=items)


def _refuse_cut(log: str, base: int, size: int) -> None:
    """Refuse to take the length of a log's only file for the size of its files where it was cut.

    A broker's files are whole pages, and no record in them reaches beyond 8 bytes before their end.
    """
    cache = FileCache()
    try:
        row = MappedFileQueue(cache, log, size)
        chunks, at, follows = LogChunks(row), base, Next.MORE
        while follows is Next.MORE:
            chunk = chunks.read(at, _FAR, _CHUNK_BYTES, check_crc=False)
            at, follows = chunk.end, chunk.follows
        rest = base + size - at
        head = row.read(at, SIZE_AND_MAGIC.size) if rest else b""
        runs_over = rest < BLANK_BYTES_MIN and (follows is not Next.FILE or bool(rest))
        if len(head) == SIZE_AND_MAGIC.size:
            record_bytes, magic = SIZE_AND_MAGIC.unpack(head)
            runs_over |= magic in {MAGIC_V1, MAGIC_V2} and record_bytes > rest
        if size and (runs_over or size % _PAGE_BYTES):
            raise InvalidError(
                f"the only file of the commit log has {size} bytes, which is not a size of such files: it was cut",
                where=row.path(base),
                do="give it the length of the broker's mappedFileSizeCommitLog back, as by `truncate -s 1G FILE`",
            )
    finally:
        cache.close()


def _refuse_long(folder: str, bases: tuple[int, ...], size: int) -> None:
    """Refuse files that are longer than those of their kind: nobody knows what the rest is, and no broker starts on them."""
    for base in bases:
        path = Path(folder, f"{base:0{NAME_DIGITS}d}")
        if (length := path.stat().st_size) > size:
            raise DataError(
                f"a file of {length} bytes, where those of its kind have {size}",
                where=os.fspath(path),
                do=f"look at what lies behind, and cut it off (`truncate -s {size} FILE`); or, if a broker with other "
                f"sizes has run on the store, delete {SIZES_FILE}",
            )


def _with_queue_sizes(options: StoreOptions, layout: Layout, *, is_made: bool) -> StoreOptions:
    """The options with the sizes of files of consume queues; those of one kind have one."""
    asked = {
        False: options.consumequeue_file_bytes,
        True: options.batchqueue_file_items * BATCH_ITEM_BYTES,
    }
    steps: dict[bool, Counter[int]] = {False: Counter(), True: Counter()}
    lengths: dict[bool, set[int]] = {False: set(), True: set()}
    for queue, is_batch in list_queues(layout.root).items():
        folder = layout.queue_directory(queue, is_batch=is_batch)
        bases = list_bases(folder)
        steps[is_batch].update(after - before for before, after in pairwise(bases))
        if len(bases) == 1:
            lengths[is_batch].add(log_file_bytes(folder, bases))
    found = {}
    for is_batch, unit in ((False, ITEM_BYTES), (True, BATCH_ITEM_BYTES)):
        whole = [size for size in lengths[is_batch] if size and not size % unit]
        if steps[is_batch]:
            most = steps[is_batch].most_common()
            found[is_batch] = min(step for step, count in most if count == most[0][1])
        elif whole and (not is_made or max(whole) > asked[is_batch]):
            found[is_batch] = max(whole)
        else:
            found[is_batch] = asked[is_batch]
    return replace(
        options,
        consumequeue_file_items=found[False] // ITEM_BYTES,
        batchqueue_file_items=found[True] // BATCH_ITEM_BYTES,
    )


def has_cut_queue(layout: Layout) -> bool:
    """Whether a file of a consume queue is short: then what it listed has to be found again, in the whole log.

    Else the queue would go on at an offset that a message has had. An empty last file after a crash is none: whoever made it
    died before it had its length, and what it would list is not covered by any checkpoint.
    """
    is_crashed = Path(layout.root, ABORT_FILE).exists()
    for queue, is_batch in list_queues(layout.root).items():
        folder = layout.queue_directory(queue, is_batch=is_batch)
        bases = list_bases(folder)
        size = layout.batch_bytes if is_batch else layout.queue_bytes
        for base in bases:
            length = Path(folder, f"{base:0{NAME_DIGITS}d}").stat().st_size
            if length < size and not (is_crashed and not length and base == bases[-1]):
                return True
    return False


def sized(layout: Layout, options: StoreOptions) -> Layout:
    """The layout with the sizes that files have, whatever length one of them has."""
    return replace(
        layout,
        log_file_bytes=options.commitlog_file_bytes,
        queue_bytes=options.consumequeue_file_bytes,
        batch_bytes=options.batchqueue_file_items * BATCH_ITEM_BYTES,
    )


def give_length(layout: Layout) -> None:
    """Give short files of the log their length, without which no broker starts: what lacks was blank, or is given up."""
    for base in list_bases(layout.log):
        path = Path(layout.log, f"{base:0{NAME_DIGITS}d}")
        if path.stat().st_size < layout.log_file_bytes:
            os.truncate(path, layout.log_file_bytes)


# -- opening ----------------------------------------------------------------------------------------

LIGHT_PREFIX: Final = "%LMQ%"


@dataclass(slots=True)
class StoreParts:
    """What a store is run with; its holder closes all of it."""

    hold: StoreHold  # the lock
    topics: TopicTable
    options: StoreOptions  # with the sizes that the files have
    cache: FileCache  # descriptors to read with
    log: MappedFileQueue  # the commit log's files
    listing: Listing  # consume queues and index, made whole
    index: KeyIndex
    # log_rows, queue_rows: Write the files.
    log_rows: RowWriter
    queue_rows: RowWriter
    log_end: int  # where the log goes on
    store_ms: int  # store time of the last record
    recovered: Recovered | None  # what recovery did; None when none was needed

    def close(self) -> None:
        """Close the files and give the lock free."""
        self.index.close()
        self.log_rows.close()
        self.queue_rows.close()
        self.cache.close()
        self.hold.close()


def check_names(cluster: str, broker: str, options: StoreOptions) -> None:
    """Refuse names and a host that no store can have."""
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
        with Disk(hold.root):
            note_sizes(hold.root, options)
        return _Opening(hold, topics, options, clock).assemble(StoreEnd(0, 0, {}), RowWriter())
    except BaseException:
        hold.close()
        raise


def open_existing(
    directory: str | os.PathLike[str],
    options: StoreOptions,
    clock: Clock,
    *,
    anew: bool,
    begins: Mapping[MessageQueue, QueueOffset],
    synced_end: int = 0,
) -> StoreParts:
    """Go on with a store, recovered where it was not stopped cleanly. Arguments and errors as of ``MessageStore.open``."""
    layout = inspect(os.fspath(directory))
    hold = StoreHold(layout.root)
    try:
        topics = TopicTable.load(layout.root)
        options = as_on_disk(options, layout)
        layout = sized(layout, options)
        opening = _Opening(hold, topics, options, clock)
        with Disk(layout.root):
            is_cut = has_cut_queue(layout) or has_cut_file(
                layout.root, options.index_slots, options.index_items
            )
            parts = opening.opened(layout, anew=anew or is_cut, synced_end=synced_end)
            for queue, offset in begins.items():
                parts.listing.begin(queue, offset)
            parts.queue_rows.sync()
            give_length(layout)
            return parts
    except BaseException:
        hold.close()
        raise


@dataclass(frozen=True, slots=True)
class _Opening:
    """What is known of a store that is being opened."""

    hold: StoreHold
    topics: TopicTable
    options: StoreOptions
    clock: Clock

    def opened(self, layout: Layout, *, anew: bool, synced_end: int) -> StoreParts:
        if anew:
            return self.recover(layout, anew=True, synced_end=synced_end)
        if Path(layout.root, ABORT_FILE).exists():
            return self.recover(layout, anew=False)
        try:
            end = read_end(layout)
        except DataError:
            return self.recover(layout, anew=False)
        return self.assemble(end, RowWriter())

    def recover(self, layout: Layout, *, anew: bool, synced_end: int = 0) -> StoreParts:
        _refuse_foreign(layout)
        cache, rows = FileCache(), RowWriter()
        # Without it something is wrong that no crash explains: then nothing is taken on trust.
        has_abort = Path(layout.root, ABORT_FILE).exists()
        try:
            if has_abort:
                cut_at_hole(layout, read_checkpoint(layout.root).logics_physical_offset)
            log = open_log(layout, cache)
            refuse_missing_files(log, synced_end)
            if not log.bases:
                parts = self.assemble(StoreEnd(0, 0, cut_queues(rows, layout, cache, -1)), rows)
                parts.index.cut(0)
                parts.recovered = Recovered(0, 0, 0, 0)
                return parts
            checkpoint = read_checkpoint(layout.root)
            has_queues = not anew and bool(list_queues(layout.root))
            begin = plan_begin(log.bases, log.file_bytes, checkpoint, has_queues=has_queues)
            covered = checkpoint.logics_physical_offset
            refuse_missing_files(log, covered)
            is_trusted = has_queues and has_abort
            begin = find_start(layout, cache, begin, checkpoint, is_trusted=is_trusted)
            if not has_abort:  # a crash from now on must not look like a clean stop
                self.hold.begin(int(self.clock.now_ms()))
            queues = cut_queues(rows, layout, cache, begin)
        finally:
            cache.close()
        end = StoreEnd(begin, checkpoint.physical_timestamp_ms, queues)
        parts = self.assemble(end, rows)
        try:
            parts.index.cut(begin)
            reached("store-lists-cut")
            covered = max(covered, synced_end)
            found = replay(parts.log, begin, covered, parts.listing)
            _refuse_lost(parts.log, found.log_end, synced_end)
            cut_row(rows, layout.log, parts.log.file_bytes, found.log_end)
            reached("store-log-cut")
            for base in parts.log.bases:  # a process that was killed may have left it in memory
                if begin - parts.log.file_bytes < base < found.log_end:
                    rows.mark(parts.log.path(base))
            parts.log_end, parts.store_ms = found.log_end, max(found.store_ms, parts.store_ms)
            parts.queue_rows.sync()
            parts.index.sync()
        except BaseException:
            parts.close()
            raise
        parts.recovered = found
        return parts

    def assemble(self, end: StoreEnd, queue_rows: RowWriter) -> StoreParts:
        cache, options = FileCache(), self.options
        log = open_log(sized(Layout(self.hold.root, 0), options), cache)
        index = KeyIndex(self.hold.root, options.index_slots, options.index_items, self.clock)
        kinds = QueueKinds(
            self.topics.is_batch,
            parse_levels(options.delay_levels),
            options.consumequeue_file_bytes,
            options.batchqueue_file_items * BATCH_ITEM_BYTES,
        )
        listing = Listing(self.hold.root, end.queues, queue_rows, index, kinds)
        listing.last_ms = end.store_ms
        return StoreParts(
            hold=self.hold,
            topics=self.topics,
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


def _refuse_foreign(layout: Layout) -> None:
    """Refuse to make lists anew that we would make wrong."""
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


def _refuse_lost(log: MappedFileQueue, end: int, synced_end: int) -> None:
    if end < synced_end:
        raise DataError(
            f"a record at {end} is damaged, and the log was on the disk up to {synced_end}",
            where=log.directory,
            do="look at the disk, and restore into an empty directory",
        )


# -- recovery --------------------------------------------------------------------------------------
#
# Making a store whole that was not stopped cleanly.
#
# ============================ ==========================================================================
# question                     answer
# ============================ ==========================================================================
# where to begin               at the checkpoint's logics physical offset: what lies below it was on the disk,
#                              log, consume queues and index, when the checkpoint was written, and is not
#                              looked at. With the log file that holds it where that may not be the
#                              beginning of a record, or the index is not covered (a broker syncs whole
#                              files of it). Without a checkpoint, or without consume queues, with the
#                              first file
# where the log ends           at the first record, from there, that fails: magic, sizes, CRC, its own
#                              physical offset, or sectors that were never written (``first_lost``).
#                              Behind the end everything becomes zero, later files go: no stale record
#                              can come back
# consume queues, key index    cut back to where we began, then listed again from the log, as a running
#                              store does. Entries behind the end become zero
# a log file is missing        above the checkpoint: the log ends there, as after any crash, and the files
#                              behind it go. Below it is an error
# damage below the checkpoint  is not a torn tail: where it is met it is an error, and nothing is changed
# ============================ ==========================================================================
#
# **Contract.** The store's lock is held. Everything is repeatable: a crash during recovery is recovered from likewise.

# -- walking the log -------------------------------------------------------------------------------
#
# Walking the log of a store that is being recovered: every record is checked, and listed as far as all are
# whole.
#
# **Contract.** A thread of its own reads and checks a chunk while the chunk before is listed; what is listed
# was checked. Nothing of the log is changed. Doing it again lists what is not listed yet.

CHUNK_BYTES: Final = 8 << 20
SECTOR_BYTES: Final = 512
"""What a disk writes whole or not at all, at least; pages are made of them."""
_ZEROS: Final = re.compile(rb"\0+")
_HEAD_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Recovered:
    """What recovery did."""

    begin: int  # where it began to read the log
    log_end: int  # where the log ends: behind the last record before which all are whole
    store_ms: int  # store time of the last record read; 0 without one
    records: int  # how many were read


def replay(log: MappedFileQueue, begin: int, covered: int, listing: Listing) -> Recovered:
    """Walk the log from ``begin`` to its end; below ``covered`` it was on the disk when the checkpoint was written."""
    position, store_ms, records = begin, 0, 0
    readers = LogChunks(log), LogChunks(log)
    with ThreadPoolExecutor(1, "store-replay") as ahead:
        future = ahead.submit(_check, log, readers[0], begin, covered)
        while True:
            chunk, sound = future.result()
            following = _follow(log, chunk, sound)
            if following is not None:
                readers = readers[::-1]  # the other's records are listed meanwhile
                future = ahead.submit(_check, log, readers[0], following, covered)
            if sound:
                block = chunk.block
                listing.take(of_block(block, np.arange(len(block)) < sound))
                store_ms, records = int(block.store_timestamps_ms[sound - 1]), records + sound
                position = chunk.start + int(block.positions[sound - 1] + block.sizes[sound - 1])
            if following is None:
                return Recovered(begin, position, store_ms, records)
            position = following


def check_covered(log: MappedFileQueue, begin: int, covered: int) -> None:
    """Check what the checkpoint covers, from ``begin`` on."""
    chunks, position = LogChunks(log), begin
    while position < covered:
        chunk, sound = _check(log, chunks, position, covered)
        following = _follow(log, chunk, sound)
        if following is None:
            at = chunk.end
            if sound < len(chunk.block):
                at = chunk.start + int(chunk.block.positions[sound])
            if at < covered:
                raise DataError(
                    f"a record at {at} is damaged, and the log was on the disk up to {covered}",
                    where=log.directory,
                    do="restore the file, or let a broker recover the store: it gives up what follows",
                )
            return
        position = following


def is_boundary(log: MappedFileQueue, position: int) -> bool:
    """Whether a sound record begins there, or the blank at the end of a file."""
    chunk = LogChunks(log).read(position, _FAR, _HEAD_BYTES)
    return count_sound(chunk) > 0 or (not len(chunk.block) and chunk.follows is Next.FILE)


def _check(
    log: MappedFileQueue, chunks: LogChunks, position: int, covered: int
) -> tuple[Chunk, int]:
    chunk = chunks.read(position, _FAR, CHUNK_BYTES)
    return chunk, count_whole(log, chunk, covered)


def _follow(log: MappedFileQueue, chunk: Chunk, sound: int) -> int | None:
    """Where the log goes on behind a chunk; None: nowhere."""
    if sound < len(chunk.block):
        return None
    if chunk.follows is Next.MORE:
        return chunk.end
    if chunk.follows is Next.FILE and chunk.next_file is not None:
        # The blank goes too when nothing is behind it: what it made room for is not there.
        head = LogChunks(log).read(chunk.next_file, _FAR, _HEAD_BYTES)
        return chunk.next_file if count_sound(head) > 0 else None
    return None


def count_whole(log: MappedFileQueue, chunk: Chunk, covered: int) -> int:
    """How many records, from the first, pass every check; those that the checkpoint covers are not looked at for zeros."""
    sound, block = count_sound(chunk), chunk.block
    covered_records = int(np.searchsorted(block.positions[:sound], covered - chunk.start))
    place = int(log.within(chunk.start))
    base = chunk.start - place
    return first_lost(
        block, covered_records, sound, place, lambda at, size: log.read(base + at, size)
    )


def first_lost(
    block: RecordBlock, low: int, end: int, place: int, read: Callable[[int, int], bytes]
) -> int:
    """The first record from ``low`` on of whose topic or properties a sector was not written; ``end``: of none.

    No CRC covers these, and where a sector was not written yet they are zero. A producer's properties may have zeros of
    their own, and a record that is whole must not end the log: what stands behind it may have been acknowledged. So zeros
    count only where they can be what is missing of a sector. Records are appended in order, so that a sector on the disk
    holds what was appended up to some moment, and zeros from there to its end: a run counts when it ends with a sector
    (behind the last byte of a record: when the rest of the sector is zero too, so that nothing of what came later is
    there), and begins with one, or with the properties, where a write may have ended. A topic has no zeros.

    A message with just such a run, above what the checkpoint covers, cannot be told from a torn one, and is taken for torn.
    It takes a message made for it, and a crash; while every power cut leaves sectors that end so, and what is behind them
    would be given to consumers though nobody sent it. Who knows that the bytes were synced says so instead (``covered``).

    ``place``: where the block's buffer begins in its file; ``read``: bytes of that file, from where and how many.
    """
    for starts, sizes in (
        (block.topic_positions, block.topic_sizes),
        (block.properties_positions, block.properties_sizes),
    ):
        if has_zero(block.buffer, starts[low:end], sizes[low:end]):
            lost = (number for number in range(low, end) if _has_lost(block, number, place, read))
            return next(lost, end)
    return end


def has_zero(buffer: Buffer, starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int32]) -> bool:
    """Whether a byte is 0 in any of the spans; those of one length are looked at together."""
    for size in np.flatnonzero(np.bincount(sizes)).tolist():
        if size:
            spans = bytes_at(buffer, f"V{size}")[starts[sizes == size]]
            if not spans.view(np.uint8).all():
                return True
    return False


def _has_lost(
    block: RecordBlock, number: int, place: int, read: Callable[[int, int], bytes]
) -> bool:
    if b"\0" in topic_bytes(block, number):
        return True
    raw, begin = properties_bytes(block, number), place + int(block.properties_positions[number])
    for run in _ZEROS.finditer(raw):
        first, last = begin + run.start(), begin + run.end()
        # In the middle a message may have zeros of its own; its properties end with a separator, where they end.
        if run.start() and first % SECTOR_BYTES and run.end() < len(raw):
            continue
        rest = -last % SECTOR_BYTES
        if not rest or (run.end() == len(raw) and not any(read(last, rest))):
            return True
    return False


# -- making it whole -------------------------------------------------------------------------------


def read_checkpoint(root: str) -> Checkpoint:
    """The checkpoint of a store, with our own offset where it has one; zeros when there is none."""
    data = read_text(f"{root}/{CHECKPOINT_FILE}") or b""
    found, own = decode_checkpoint(data), listed_offset(data)
    return found if own is None else replace(found, logics_physical_offset=own)


def refuse_missing_files(log: MappedFileQueue, covered: int) -> None:
    """Refuse a log whose files end before what was on the disk when the checkpoint was written."""
    if covered > log.end:
        raise DataError(
            f"the commit log's files end at {log.end}, and it was on the disk up to {covered}",
            where=log.directory,
            do="restore the missing files; to go on without them, delete the file checkpoint",
        )


def cut_at_hole(layout: Layout, covered: int) -> None:
    """End a log at a file that is missing above what the checkpoint covers: its name had not come to the disk.

    Files come into a directory in any order when the machine fails, and what the checkpoint does not cover was promised
    to nobody.
    A file that is missing below stays an error, and so does any where there is no checkpoint.
    """
    bases = list_bases(layout.log)
    behind = [
        number
        for number, (before, after) in enumerate(pairwise(bases), 1)
        if after - before != layout.log_file_bytes
    ]
    if not behind or not 0 < covered <= bases[behind[0] - 1] + layout.log_file_bytes:
        return
    for base in reversed(
        bases[behind[0] :]
    ):  # from the end: a crash in between leaves the same hole
        Path(f"{layout.log}/{base:0{NAME_DIGITS}d}").unlink()
    sync_folder(layout.log)


def plan_begin(
    bases: tuple[int, ...], file_bytes: int, checkpoint: Checkpoint, *, has_queues: bool
) -> int:
    """Where recovery begins to read: where a log file begins."""
    covered = checkpoint.logics_physical_offset
    if not has_queues or not bases[0] <= covered <= bases[-1] + file_bytes:
        return bases[0]
    return max(base for base in bases if base <= covered)


def find_start(
    layout: Layout, cache: FileCache, begin: int, checkpoint: Checkpoint, *, is_trusted: bool
) -> int:
    """Where to begin to list: what the checkpoint covers where that can be trusted, else ``begin`` (``plan_begin``).

    It can when nothing is known to be wrong with what it covers (``is_trusted``), it covers the index too, and a record is
    known to begin (or the log to end) at its place. When it cannot, it is truncated to ``begin``, so that who crashes from
    now on begins there again.
    """
    log = open_log(layout, cache)
    covered = checkpoint.logics_physical_offset
    if begin >= covered:
        return begin
    has_index = checkpoint.index_timestamp_ms >= checkpoint.logics_timestamp_ms > 0
    is_usable = is_trusted and has_index and covered <= log.end
    if is_usable:
        listed_ends = (found.listed_end for found in queue_ends(layout, cache, covered))
        if is_boundary(log, covered) or max(listed_ends, default=0) == covered:
            return covered
    check_covered(log, begin, min(covered, log.end))
    earlier = replace(checkpoint, logics_physical_offset=begin)
    replace_file(Path(layout.root, CHECKPOINT_FILE), encode_checkpoint(earlier))
    return begin


def cut_queues(
    rows: RowWriter, layout: Layout, cache: FileCache, limit: int
) -> dict[MessageQueue, QueueEnd]:
    """Cut every consume queue back to the records below ``limit``; where each ends then."""
    ends: dict[MessageQueue, QueueEnd] = {}
    for queue, index, found, _ in queue_ends(layout, cache, limit):
        end = found
        if isinstance(index, PlainQueue):
            if not index.row.bases:
                continue
            filled = _filled_end(layout.root, queue, index)
            end = replace(found, next_offset=max(found.next_offset, filled))
        units = end.next_offset if end.unit is None else end.unit
        cut_row(rows, index.row.directory, end.file_bytes, units * index.unit_bytes)
        if end.unit is not None or units > index.unit_span()[0]:
            ends[queue] = end
    return ends


def _filled_end(root: str, queue: MessageQueue, index: PlainQueue) -> int:
    """Where a queue ends of which only a compaction log may have anything (``MessageStore.refill``); 0: it is none such."""
    first, last = index.unit_span()
    end = index.split(first, last, is_filler)
    return end if end > first and Path(folders_of(root, queue)[0]).is_dir() else 0


def open_log(layout: Layout, cache: FileCache) -> MappedFileQueue:
    """The log's files."""
    log = MappedFileQueue(cache, layout.log, layout.log_file_bytes)
    check_contiguous(layout.log, log.bases, layout.log_file_bytes)
    return log


# -- where a store goes on -------------------------------------------------------------------------
#
# What a clean stop leaves is taken as it stands: the consume queues list every record of the log. Where they do not, the
# store needs recovery; here it is refused.

_END_CHUNK_BYTES: Final = 4 << 20
_FILES_LOOKED_AT: Final = 2


class FoundEnd(NamedTuple):
    """A queue, and where it ends."""

    queue: MessageQueue
    files: PlainQueue | BatchQueue
    end: QueueEnd
    listed_end: int  # where the last record ends that it lists; 0 without one


def queue_ends(layout: Layout, cache: FileCache, limit: int | None = None) -> Iterator[FoundEnd]:
    """Where each queue ends; with ``limit``, of the records below this physical offset alone.

    An entry for no message counts, as with a broker: it says how far the queue had come, of which nothing may be left.
    """
    for queue, is_batch in list_queues(layout.root).items():
        folder = layout.queue_directory(queue, is_batch=is_batch)
        made = BatchQueue if is_batch else PlainQueue
        index = made(cache, folder, layout.queue_file_bytes(folder, is_batch=is_batch))
        unit, last = _last_listed(index, limit)
        listed_end = next_offset = 0
        if last is not None and last["size"][0] != FILLER_SIZE:
            listed_end = int(last["physical_offset"][0]) + int(last["size"][0])
        if last is not None and is_batch:
            next_offset = int(last["base_offset"][0]) + int(last["count"][0])
        end = QueueEnd(
            next_offset if is_batch else unit,
            index.row.file_bytes,
            is_new=not index.row.bases,
            unit=unit if is_batch else None,
        )
        yield FoundEnd(queue, index, end, listed_end)


def _last_listed(index: PlainQueue | BatchQueue, limit: int | None) -> tuple[int, Items | None]:
    """One past the last unit that says something, and that unit; else the first unit, and nothing."""
    begin, end = index.unit_span()
    spans = [(begin, end)]
    if limit is None:  # file by file, since one before the last may be missing
        per_file = index.row.file_bytes // index.unit_bytes
        firsts = [base // index.unit_bytes for base in reversed(index.row.bases)]
        spans = [(first, first + per_file) for first in firsts]
    below = _FAR if limit is None else limit
    for first, last in spans:
        at = index.split(first, last, lambda units: units["physical_offset"] < below)
        while at > first:
            unit = index.last_unit(at)
            if unit is not None and int(unit["physical_offset"][0]) < below:
                return at, unit
            at -= 1
    return begin, None


@dataclass(frozen=True, slots=True)
class StoreEnd:
    """Where a store goes on."""

    log_end: int  # physical offset of the next record
    store_ms: int  # store time of the last record, UTC; 0 without one
    queues: Mapping[MessageQueue, QueueEnd]  # the queues that have consume queues


def read_end(layout: Layout) -> StoreEnd:
    """Look for the ends of a store that was stopped cleanly. DataError: the consume queues do not fit the log."""
    cache = FileCache()
    try:
        log = open_log(layout, cache)
        log_end, records_end, store_ms = _log_end(log)
        found = list(queue_ends(layout, cache))
    finally:
        cache.close()
    listed_end = max((one.listed_end for one in found), default=0)
    if listed_end != records_end:
        raise DataError(
            f"the log's last record ends at {records_end}, what the consume queues list at {listed_end}",
            where=layout.root,
            do="let a broker recover the store, and stop it cleanly",
        )
    checkpoint = decode_checkpoint(read_text(f"{layout.root}/{CHECKPOINT_FILE}") or b"")
    queues = {one.queue: one.end for one in found}
    return StoreEnd(log_end, max(store_ms, checkpoint.physical_timestamp_ms), queues)


def _log_end(log: MappedFileQueue) -> tuple[int, int, int]:
    """Where the log goes on, where its last record ends, and that one's store time."""
    if not log.bases:
        return 0, 0, 0
    position = records_end = log.bases[-_FILES_LOOKED_AT:][0]
    store_ms = 0
    chunks = LogChunks(log)
    while True:
        chunk = chunks.read(position, _FAR, _END_CHUNK_BYTES, check_crc=False)
        position = chunk.end
        if count_sound(chunk) < len(chunk.block):
            chunk.follows = Next.BROKEN
        elif len(chunk.block):
            records_end, store_ms = chunk.end, int(chunk.block.store_timestamps_ms[-1])
        if chunk.follows is Next.FILE and chunk.next_file is not None:
            position = chunk.next_file
        elif chunk.follows is Next.FILE:
            return log.end, records_end, store_ms
        elif chunk.follows is Next.NOTHING:
            return position, records_end, store_ms
        elif chunk.follows is not Next.MORE:
            raise DataError(
                f"there is a damaged record, or none, before {position}, where the log should end",
                where=log.directory,
                do="let a broker recover the store, and stop it cleanly",
            )
