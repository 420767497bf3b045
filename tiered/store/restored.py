"""Records of elsewhere: a commit log made of them, what its consume queues lack then, and such as a running store is given.

**Contract.** Records keep every byte but their place: the physical offset, and the property CRC over it where a record has
one. They are put in the order given; where one does not fit a file, a blank fills the rest, as a broker does it. The log
begins with the second file of its row, not at 0: an entry that stands for no message names place 0, and is below the log so.
What was put is on the disk after ``sync``. Until it is whole the log lies in a folder in which no broker looks for one
(``PART``), so that whatever else starts in the directory makes names of its own beside it. ``open`` goes on at a place that
was synced (``LogMark``), if all bytes before it are those that were put, and cuts off what lies behind it. From ``end_log``
to ``MessageStore.open(anew=True)``, which lists the log, the directory looks as after a broker's crash.

``fill_holes`` puts an entry for no message wherever a queue has none between its first and its last: without, a broker's
start would take the queue's end to be there. Such an entry names a place in the log that is not below its minimum, since a
broker looks for a queue's first message by bisection, and that lies in a file before all records, since a broker that finds
no record passes over the rest of that file: so the log gets a first file with nothing but a blank in it, where there are
to be holes (``has_holes``). For one thread.
"""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
from zlib_ng import zlib_ng

from backends.lazy_dataclass import dataclass
from tiered.errors import InvalidError
from tiered.format import sysflag
from tiered.format.block import bytes_at
from tiered.format.items import FILLER_SIZE, ITEM_BYTES, encode_items
from tiered.format.record import (
    BLANK_BYTES_MIN,
    CRC_MASK,
    MAGIC_AT,
    MAGIC_BLANK,
    PHYSICAL_OFFSET_AT,
    QUEUE_ID_AT,
    QUEUE_OFFSET_AT,
    SIZE_AND_MAGIC,
    STORE_TIME_AT,
    SYS_FLAG_AT,
    is_v6,
)
from tiered.local.consumequeues import PlainQueue
from tiered.local.layout import LOG_DIRECTORY, inspect, queue_file_bytes
from tiered.local.mapped_file_queue import NAME_DIGITS, FileCache, open_regular
from tiered.store.disk import Disk, RowWriter, StoreHold, cut_row, make_folder
from tiered.store.encoding import (
    PROPERTIES_BYTES_MAX,
    QUEUE_ID_MAX,
    REFUSED_BITS,
    Leads,
    number_in_queues,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tiered.format.block import RecordBlock
    from tiered.model import MessageQueue, QueueOffset
    from tiered.store.encoding import QueueKey
    from tiered.store.store_options import StoreOptions

Longs = npt.NDArray[np.int64]
CRC_NAME: Final = b"__CRC32#\x01"
"""How the property begins that ends a record with a CRC of all before it; ten digits, last first, and a 2 follow."""
CRC_BYTES: Final = 20
_ITEMS: Final = 1 << 16
PART: Final = "commitlog.part"
"""Where the log lies while it is made."""
_READ_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class LogMark:
    """How far a log is, and what is in it."""

    end: int  # physical offset behind the last record
    files: tuple[tuple[int, int], ...]
    """Of each file of the log, from the first on: bytes that were put into it, and their CRC; the rest is zero."""


class RestoredLog:
    """A commit log that is being made of records from elsewhere."""

    def __init__(self, hold: StoreHold, file_bytes: int, mark: LogMark, folder: str) -> None:
        self.root = hold.root  # the store's directory
        self.end = mark.end  # physical offset behind the last record
        self._begin = file_bytes
        self._hold = hold
        self._file_bytes = file_bytes
        self._folder = folder
        self._files = list(mark.files)
        self._rows = RowWriter()

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        *,
        file_bytes: int,
        mark: LogMark | None = None,
        has_holes: bool = False,
        is_whole: bool = False,
    ) -> RestoredLog:
        """Begin a log in a directory that is there, or go on with one; what was put and not synced is written over.

        Gone on with is a ``mark`` that was synced; None: it is begun. ``has_holes``: ``fill_holes`` will be wanted, the
        same whenever it is gone on with. ``is_whole``: nothing more was to be put, so that behind the mark there is
        nothing, or somebody else's. InvalidError: someone else writes to it, or has.
        """
        hold = StoreHold(str(Path(directory)))
        part, whole = f"{hold.root}/{PART}", f"{hold.root}/{LOG_DIRECTORY}"
        folder = whole if is_whole and not Path(part).exists() else part
        log = cls(hold, file_bytes, mark or LogMark(file_bytes, ()), folder)
        log._begin = file_bytes * (2 if has_holes else 1)
        try:
            with Disk(hold.root):
                require_as_put(folder, file_bytes, log.mark, is_whole=is_whole)
                if is_whole:
                    return log
                make_folder(Path(folder))
                cut_row(log._rows, folder, file_bytes, log.end)
                if mark is None and has_holes:
                    log._blank(file_bytes)
                log._rows.sync()
        except BaseException:
            log.close()
            raise
        return log

    @property
    def mark(self) -> LogMark:
        """How far it is; to go on from once that is synced."""
        return LogMark(self.end, tuple(self._files))

    @property
    def is_empty(self) -> bool:
        """Whether no record has been put: a blank with nothing behind it is not a log."""
        return self.end <= self._begin

    def put(self, data: npt.NDArray[np.uint8], sizes: Longs) -> None:
        """Put records (``sizes``: int64[n]) as they were, in their new order; ``data`` is changed in place."""
        starts = np.cumsum(sizes) - sizes
        done = 0
        with Disk(self.root):
            while done < len(sizes):
                fitting = self._fitting(sizes, starts, done)
                if not fitting:
                    self._end_file(int(sizes[done]))
                    continue
                self._write(data, starts[done : done + fitting], sizes[done : done + fitting])
                done += fitting

    def _fitting(self, sizes: Longs, starts: Longs, first: int) -> int:
        """How many records from ``first`` on fit the present file, with room for a blank."""
        room = self._file_bytes - self.end % self._file_bytes - BLANK_BYTES_MIN
        ends = starts[first:] + sizes[first:] - starts[first]
        return int(np.searchsorted(ends, room, side="right"))

    def _end_file(self, size: int) -> None:
        inside = self.end % self._file_bytes
        if not inside:
            raise InvalidError(
                f"a record of {size} bytes does not fit log files of {self._file_bytes}",
                do="choose larger ones with --log-file-size",
            )
        self._blank(self._file_bytes - inside)

    def _blank(self, size: int) -> None:
        self._append(SIZE_AND_MAGIC.pack(size, MAGIC_BLANK))
        self.end += size - SIZE_AND_MAGIC.size

    def _write(self, data: npt.NDArray[np.uint8], starts: Longs, sizes: Longs) -> None:
        begin = int(starts[0])
        places = self.end + starts - begin
        bytes_at(data.data, ">i8")[starts + PHYSICAL_OFFSET_AT] = places
        _renew_property_crcs(data, starts, sizes)
        self._append(data[begin : int(starts[-1] + sizes[-1])].data)

    def _append(self, data: memoryview | bytes) -> None:
        number = self.end // self._file_bytes - 1
        size, crc = self._files[number] if number < len(self._files) else (0, 0)
        self._rows.write(self._folder, self._file_bytes, self.end, data)
        self._files[number:] = [(size + len(data), zlib_ng.crc32(data, crc))]
        self.end += len(data)

    def sync(self) -> None:
        """Bring to the disk what was put."""
        with Disk(self.root):
            self._rows.sync()

    def end_log(self, now_ms: int) -> None:
        """Nothing more is to be put, and all was synced: give the log the name by which it is one. Again is fine."""
        whole = f"{self.root}/{LOG_DIRECTORY}"
        with Disk(self.root):
            self._rows.close()
            if self._folder != whole:
                Path(self._folder).rename(whole)
                self._folder = whole
            self._hold.begin(now_ms)

    def close(self) -> None:
        """Close the files, and give the directory free; without ``sync``."""
        self._rows.close()
        self._hold.close()


def require_as_put(folder: str, file_bytes: int, mark: LogMark, *, is_whole: bool) -> None:
    """Refuse a log that has other bytes than were put, or other files. All of it is read.

    ``is_whole``: there must be nothing behind it either; else that is what a crash has left of us.
    """
    wanted = [f"{file_bytes * number:0{NAME_DIGITS}d}" for number in range(1, len(mark.files) + 1)]
    there = {one.name for one in Path(folder).iterdir()} if Path(folder).is_dir() else set()
    if not is_whole:  # files behind the mark were begun, and not noted
        there = {name for name in there if not (name.isdecimal() and int(name) >= mark.end)}
    if strange := sorted(there.symmetric_difference(wanted)):
        raise _changed(f"{folder}/{strange[0]}", "a file that is not as this restore left it")
    for name, (size, crc) in zip(wanted, mark.files, strict=True):
        path = f"{folder}/{name}"
        is_open = name == wanted[-1] and not is_whole
        if not _is_as_put(path, file_bytes, size, crc, is_open=is_open):
            raise _changed(path, "bytes that this restore did not put there")


def _is_as_put(path: str, file_bytes: int, size: int, crc: int, *, is_open: bool) -> bool:
    with os.fdopen(open_regular(path), "rb") as file:
        if os.fstat(file.fileno()).st_size != file_bytes:
            return False
        found, left = 0, size
        while left and (chunk := file.read(min(left, _READ_BYTES))):
            found, left = zlib_ng.crc32(chunk, found), left - len(chunk)
        if left or found != crc:
            return False
        rest = iter(lambda: file.read(_READ_BYTES), b"")
        return is_open or all(chunk.count(0) == len(chunk) for chunk in rest)


def _changed(where: str, what: str) -> InvalidError:
    return InvalidError(
        f"{what}, so somebody else has written here since it was cut short",
        where=where,
        do="keep this directory if it has messages of its own, and restore into another one",
    )


def _renew_property_crcs(data: npt.NDArray[np.uint8], starts: Longs, sizes: Longs) -> None:
    """Of records that end with a CRC of themselves, as few brokers write them."""
    name = np.frombuffer(CRC_NAME, np.uint8)
    ends = starts + sizes
    marked = np.flatnonzero(sizes > CRC_BYTES + PHYSICAL_OFFSET_AT)
    tails = data[(ends[marked] - CRC_BYTES)[:, None] + np.arange(len(name))]
    for number in marked[(tails == name).all(axis=1)].tolist():
        start, end = int(starts[number]), int(ends[number])
        crc = zlib_ng.crc32(data[start : end - CRC_BYTES]) & CRC_MASK
        digits = f"{crc:010d}"[::-1].encode()
        data[end - CRC_BYTES + len(name) : end - 1] = np.frombuffer(digits, np.uint8)


def fill_holes(directory: str, ends: Mapping[MessageQueue, QueueOffset], place: int) -> int:
    """Put entries for no message where queues have none, in a store that was listed and closed; how many.

    ``ends``: one past the last queue offset of each queue (``MessageStore.queues``). ``place``: the physical offset that
    they name, where the log begins.
    """
    layout, cache, rows, count = inspect(directory), FileCache(), RowWriter(), 0
    try:
        with Disk(directory):
            for queue, end in ends.items():
                folder = layout.queue_directory(queue, is_batch=False)
                if Path(folder).is_dir():  # units of batch queues say themselves what they are of
                    size = queue_file_bytes(folder, is_batch=False)
                    count += _fill(PlainQueue(cache, folder, size), rows, place, int(end))
            rows.sync()
    finally:
        rows.close()
        cache.close()
    return count


def _fill(index: PlainQueue, rows: RowWriter, place: int, end: int) -> int:
    first, row, count = index.span()[0], index.row, 0
    for start in range(first, end, _ITEMS):
        entries = index.entries(start, min(start + _ITEMS, end))
        missing = np.flatnonzero(entries.sizes == 0)
        for run in np.split(missing, np.flatnonzero(np.diff(missing) != 1) + 1):
            if len(run):
                items = encode_items(
                    np.full(len(run), place), np.full(len(run), FILLER_SIZE), np.zeros(len(run))
                )
                at = (start + int(run[0])) * ITEM_BYTES
                rows.write(row.directory, row.file_bytes, at, items)
                count += len(run)
    return count


# -- records that are there already ----------------------------------------------------------------

_TIME_BYTES: Final = 8
_PREPARED_TO_BODY: Final = 12
"""Bytes from the field of the prepared transaction to the body; the store's address ends 4 bytes before that."""


class ReadyRecords:
    """Records that lie elsewhere, made anew for one store but for their places, which it gives them (``put_places``).

    Body, checksum, producer, times of the producer and its flags stay as they are; queue and properties are new ones.
    """

    def __init__(
        self,
        block: RecordBlock,
        queues: Sequence[QueueKey],
        properties: Sequence[bytes],
        options: StoreOptions,
    ) -> None:
        """Make them of sound records, whose buffer is not changed, with their queues and stored properties."""
        leads = {topic: Leads(topic) for topic in dict.fromkeys(topic for topic, _ in queues)}
        lengths = list(map(len, properties))
        if max(lengths, default=0) > PROPERTIES_BYTES_MAX:
            raise InvalidError(f"properties of more than {PROPERTIES_BYTES_MAX} bytes")
        middles = [leads[queue[0]][size] for queue, size in zip(queues, lengths, strict=True)]
        heads = _heads(block, options.store_host)
        self.queues, self.distinct = queues, set(queues)  # of each; and those there are
        chunks = chain.from_iterable(zip(heads, middles, properties, strict=True))
        self.data = bytearray().join(chunks)  # the records, one behind the other
        head_sizes = np.fromiter(map(len, heads), np.int64, len(heads))
        sizes = head_sizes + np.fromiter(map(len, middles), np.int64, len(middles)) + lengths
        self.sizes: list[int] = sizes.tolist()  # bytes of each
        self._starts: Longs = np.cumsum(sizes) - sizes
        self._behind: Longs = self._starts + head_sizes - block.body_sizes
        self._check(block, options)
        bytes_at(self.data, ">i4")[self._starts] = sizes
        magics = [leads[topic].magic for topic, _ in queues]
        bytes_at(self.data, ">u4")[self._starts + MAGIC_AT] = magics
        ids = [queue_id for _, queue_id in queues]
        bytes_at(self.data, ">i4")[self._starts + QUEUE_ID_AT] = ids
        bytes_at(self.data, ">i8")[self._behind - _PREPARED_TO_BODY] = 0

    def __len__(self) -> int:
        return len(self.sizes)

    def queue_offsets(
        self, ends: Mapping[QueueKey, int]
    ) -> tuple[dict[QueueKey, int], Sequence[int]]:
        """As of ``Prepared``."""
        return number_in_queues(self.queues, self.distinct, ends)

    def put_places(
        self, queue_offsets: Sequence[int], positions: Sequence[int], store_ms: int, host: bytes
    ) -> None:
        """Say in each record where it is, when it came, and to whom."""
        bytes_at(self.data, ">i8")[self._starts + QUEUE_OFFSET_AT] = queue_offsets
        bytes_at(self.data, ">i8")[self._starts + PHYSICAL_OFFSET_AT] = positions
        host_at = self._behind - _PREPARED_TO_BODY - 4 - len(host)
        bytes_at(self.data, ">i8")[host_at - _TIME_BYTES] = store_ms
        bytes_at(self.data, f"V{len(host)}")[host_at] = np.frombuffer(host, f"V{len(host)}")

    def _check(self, block: RecordBlock, options: StoreOptions) -> None:
        if (block.sys_flags & REFUSED_BITS).any() or (block.sys_flags < 0).any():
            raise InvalidError("an inner batch, or a prepared transaction, cannot be stored here")
        if not all(0 <= queue_id <= QUEUE_ID_MAX for _, queue_id in self.distinct):
            raise InvalidError(f"a queue id that is not between 0 and {QUEUE_ID_MAX}")
        largest = max(self.sizes, default=0)
        if largest > options.record_bytes_max:
            raise InvalidError(
                f"a record of {largest} bytes, and at most {options.record_bytes_max} may be"
            )
        if (block.body_sizes > options.message_bytes_max).any():
            raise InvalidError(f"a body of more than {options.message_bytes_max} bytes")


def _heads(block: RecordBlock, store_host: str) -> list[bytes]:
    """The records up to the end of their bodies, with room for the store's address."""
    view = memoryview(block.buffer).cast("B")
    ends = (block.body_positions + block.body_sizes).tolist()
    heads = [bytes(view[slice(*pair)]) for pair in zip(block.positions.tolist(), ends, strict=True)]
    wanted = sysflag.STORE_HOST_V6 if is_v6(store_host) else 0
    for at in np.flatnonzero(block.sys_flags & sysflag.STORE_HOST_V6 != wanted).tolist():
        flags, raw = int(block.sys_flags[at]), bytearray(heads[at])
        host_at = STORE_TIME_AT + _TIME_BYTES + _extra(flags & sysflag.BORN_HOST_V6)
        host_end = host_at + _TIME_BYTES + _extra(flags & sysflag.STORE_HOST_V6)
        raw[host_at:host_end] = bytes(_TIME_BYTES + _extra(wanted))
        raw[SYS_FLAG_AT : SYS_FLAG_AT + 4] = (flags ^ sysflag.STORE_HOST_V6).to_bytes(4, "big")
        heads[at] = bytes(raw)
    return heads


def _extra(is_v6_flag: int) -> int:
    return sysflag.V6_EXTRA_BYTES if is_v6_flag else 0
