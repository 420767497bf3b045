"""The sizes of a store's files: what tells them, and what a file that was cut does not tell.

Files of one kind are equally long, and whatever is written goes by that length. So damage must not set it: the distance of
two files says it, else what the store was made with (``SIZES_FILE``), and only then the length of the only file.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tiered.errors import DataError, InvalidError
from tiered.format.items import BATCH_ITEM_BYTES, ITEM_BYTES
from tiered.format.record import BLANK_BYTES_MIN, MAGIC_V1, MAGIC_V2, SIZE_AND_MAGIC
from tiered.local.chunks import LogChunks, Next
from tiered.local.compaction_log import file_sizes
from tiered.local.layout import ABORT_FILE, list_queues, log_file_bytes, read_text
from tiered.local.mapped_file_queue import NAME_DIGITS, FileCache, MappedFileQueue, list_bases
from tiered.store.disk import replace_file, sync_folder
from tiered.store.keyindex import sizes_on_disk
from tiered.store.store_options import StoreOptions

if TYPE_CHECKING:
    from tiered.local.layout import Layout

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
