"""Topics with ``cleanup.policy=COMPACTION``: of each key the newest message stays, in a log beside the commit log.

Overview: ``Compactions.advance`` copies what queues list into their compaction logs (``tiered.local.compaction_log`` has the
form; it is a broker's). ``compact`` makes a pass over all files but the last, which is written to: the newest offset of each
key is found (``tiered.compaction``), in rounds when not all keys fit, then what stays is built aside, and put in the place
of the files that it was made of. A thread of its own does both, now and then.

Ordering: a log file expires only when what it has was copied (``advance`` comes first). Files aside are whole and on the
disk before the mark ``ready`` is; then records and units are put in place, file by file; then the mark goes.

**Crashes.** Without the mark what is aside is thrown away; with it the rest is put in place when the store is opened, if the
files that it is to replace are those that it was made of, by the checksums of their lists in the mark: a broker may have
gone on with them meanwhile, and what it has added may be nowhere else. If not, what is aside is thrown away as well, or,
where some of it is in place already, the queue is damaged, and nothing of it is touched. Of the
last file, which alone may be half written (each is on the disk before the next is begun), what comes behind the first record
that does not pass its checks is cut, and copied anew from the commit log, which has it still; what that has no more was on
the disk before it expired, and stays. What stands behind the queue's end goes. A queue is not shown while it is half put in
place. After an error in the middle of a change the queue is opened anew, as after a crash, before anything else is done with
it; readers keep what they had.

**Closing.** A pass under way is left between two pieces: what is aside then has no mark, and is thrown away.

**Threads.** One at a time changes; readers take the log of the moment and keep it (old files stay until they let go).
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
from zlib_ng import zlib_ng

from backends.lazy_dataclass import dataclass
from tiered.compaction.newest import (
    EMPTY,
    KEYED,
    Newest,
    in_rounds,
    is_among,
    keyed_block,
    keys_that_fit,
)
from tiered.compaction.passes import LogFile, PassSettings, plan_pass
from tiered.crashpoints import reached
from tiered.errors import ClosedError, DataError, InvalidError, TieredStoreError
from tiered.format.block import bytes_at, check_records, parse_records, topics_equal
from tiered.format.fastjson import loads
from tiered.format.items import BATCH_ITEM, BATCH_ITEM_BYTES, is_batch
from tiered.format.record import BLANK_BYTES_MIN, MAGIC_BLANK, PHYSICAL_OFFSET_AT, RecordFault
from tiered.local.compaction_log import (
    ASIDE,
    READY,
    CompactedFile,
    CompactionLog,
    MadeList,
    folders_of,
)
from tiered.local.layout import read_text
from tiered.local.mapped_file_queue import NAME_DIGITS, list_bases
from tiered.local.queue_reader import HeldQueue
from tiered.store.disk import RowWriter, make_folder, replace_config, replace_file, sync_folder
from tiered.store.opening import first_lost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tiered.clock import Clock
    from tiered.compaction.newest import Rows
    from tiered.compaction.passes import PassPlan
    from tiered.format.block import RecordBlock
    from tiered.local.compaction_log import Units
    from tiered.local.interface import RecordBatch
    from tiered.model import MessageQueue
    from tiered.store.opening import StoreParts
    from tiered.store.store_options import Compacting

CHECKPOINT_FILE: Final = "compaction/position-checkpoint"
_CHUNK: Final = 8192
"""Queue offsets that are copied or judged at once, if they fit in"""
_CHUNK_BYTES: Final = 16 << 20
_COPY_S: Final = 1.0
_DELETE: Final = (
    "delete both folders of this queue: what the commit log has still is copied anew, and"
    " `tiered store refill` gets the rest from a tier or another store"
)
_LOG = logging.getLogger(__name__)
Longs = npt.NDArray[np.int64]


@dataclass(slots=True)
class CompactionCounts:
    """What was done since the store was opened."""

    passes: int = 0
    rounds: int = 0
    keys: int = 0
    messages: int = 0
    gone_messages: int = 0
    rewritten_bytes: int = 0
    damaged: int = 0
    map_use: float = 0.0


@dataclass(slots=True)
class _End:
    """Where a log goes on: the file that is written to, and what it has."""

    base: int = 0
    size: int = 0
    count: int = 0


class _Appender:
    """Writes records and their units into a pair of folders; rolls both together."""

    def __init__(
        self, folders: tuple[str, str], sizes: Compacting, rows: RowWriter, end: _End
    ) -> None:
        self._folders = folders
        self._sizes = sizes
        self._rows = rows
        self.end = end

    def put(self, block: RecordBlock, tags: Longs, where: Longs) -> None:
        while len(where):
            many = self._fitting(block.sizes[where].astype(np.int64))
            if many:
                self._write(block, tags, where[:many])
                where = where[many:]
            else:
                self.roll()

    def _fitting(self, sizes: Longs) -> int:
        """How many records the present file takes; its last unit says that it ends."""
        room = self._sizes.log_file_bytes - self.end.size - BLANK_BYTES_MIN
        many = int(np.searchsorted(sizes.cumsum(), room, "right"))
        if not many and not self.end.size:
            raise DataError(
                f"a record of {int(sizes[0])} bytes is longer than a file of the compaction log",
                where=self._folders[0],
            )
        return min(many, self._sizes.unit_file_items - 1 - self.end.count)

    def _write(self, block: RecordBlock, tags: Longs, where: Longs) -> None:
        sizes, end = block.sizes[where].astype(np.int64), self.end
        starts = sizes.cumsum() - sizes
        places = end.base + end.size + starts
        view = memoryview(block.buffer)
        begins = block.positions[where]
        chunks = map(view.__getitem__, map(slice, begins.tolist(), (begins + sizes).tolist()))
        data = bytearray().join(chunks)
        bytes_at(data, ">i8")[starts + PHYSICAL_OFFSET_AT] = places
        units = np.zeros(len(where), BATCH_ITEM)
        units["physical_offset"], units["size"], units["tag_code"] = places, sizes, tags[where]
        units["store_timestamp_ms"] = block.store_timestamps_ms[where]
        units["base_offset"], units["count"] = block.queue_offsets[where], 1
        units["compacted_offset"] = -1
        self._put(0, end.size, data)
        self._put(1, end.count * BATCH_ITEM_BYTES, units.tobytes())
        end.size, end.count = end.size + len(data), end.count + len(where)

    def roll(self) -> None:
        """End the file; it is on the disk before there is another, so that after a crash only the last is looked at."""
        if not self.end.size:
            return
        room = self._sizes.log_file_bytes - self.end.size
        self._put(0, self.end.size, room.to_bytes(4, "big") + MAGIC_BLANK.to_bytes(4, "big"))
        unit = np.zeros(1, BATCH_ITEM)
        unit["physical_offset"] = unit["compacted_offset"] = -1
        self._put(1, self.end.count * BATCH_ITEM_BYTES, unit.tobytes())
        self._rows.sync()
        self.end.base += self._sizes.log_file_bytes
        self.end.size = self.end.count = 0

    def _put(self, kind: int, at: int, data: bytes | bytearray) -> None:
        size = (self._sizes.log_file_bytes, self._sizes.unit_file_bytes)[kind]
        path = f"{self._folders[kind]}/{self.end.base:0{NAME_DIGITS}d}"
        self._rows.write_file(path, size, at, data)


class _Queue:
    """The compaction log of one queue, for one thread at a time."""

    def __init__(
        self,
        root: str,
        queue: MessageQueue,
        sizes: Compacting,
        go_on: Callable[[], None],
        *,
        limit: int,
        has_from: Callable[[], int],
        is_sound: bool,
    ) -> None:
        """Open it, put in place what a pass had made, and cut what should not be there."""
        self._root, self.queue, self._sizes, self._go_on = root, queue, sizes, go_on
        self._has_from = has_from
        self.folders = folders_of(root, queue)
        self._rows = RowWriter()
        self._settle()
        if not is_sound:
            self._mend()
        self.log = self._opened()  # as it is; None: nothing is in it
        cut = self._cut_at(limit)
        self.is_cut = cut is not None  # something stood behind the queue's end
        if cut is not None:
            self._cut(*cut)
            self.log = self._opened()
        last = self.log.files[-1] if self.log else None
        end = _End(last.base, last.end - last.base, last.count) if last else _End()
        self._appender = _Appender(self.folders, sizes, self._rows, end)
        self.end = self.log.end if self.log else 0  # queue offset behind what was copied

    # -- opening ----------------------------------------------------------------------------------

    def _settle(self) -> None:
        for folder in self.folders:
            make_folder(Path(folder))
        if Path(self.folders[0], ASIDE, READY).exists() and self._is_as_left():
            self.put_in_place()
        for folder in self.folders:
            shutil.rmtree(f"{folder}/{ASIDE}", ignore_errors=True)
        if self._odd_bases()[1]:
            self._relist()
        odd, is_wrong = self._odd_bases()
        if is_wrong:
            raise DataError(
                "files of the compaction log have no list, or lists no file",
                where=self.folders[0],
                do=_DELETE,
            )
        for base in odd:  # of a pair that was just being begun
            for folder in self.folders:
                Path(_path(folder, base)).unlink(missing_ok=True)

    def _is_as_left(self) -> bool:
        """Whether the files that those aside are to replace are as they were; whatever changes a log changes its lists."""
        ready = json.loads(Path(self.folders[0], ASIDE, READY).read_bytes())
        there = set(list_bases(self.folders[1]))
        aside = [set(list_bases(f"{folder}/{ASIDE}")) for folder in self.folders]
        for base in {*ready["old"], *ready["new"]}:
            sums = {ready["sums"][kind].get(str(base)) for kind in ("old", "new")}
            if base in there and _sum(_path(self.folders[1], base)) not in sums:
                break
        else:
            return True
        if all(names >= set(ready["new"]) for names in aside):
            return False
        raise DataError(
            "the compaction log has changed since a pass over it was cut short in the middle of its end",
            where=self.folders[0],
            do=_DELETE,
        )

    def _odd_bases(self) -> tuple[set[int], bool]:
        """Files of which one half is not there, and whether that is of others than the last, which a crash may leave so."""
        records, units = (list_bases(folder) for folder in self.folders)
        odd = set(records) ^ set(units)
        return odd, bool(odd - {max(records + units, default=0)})

    def _relist(self) -> None:
        """Make lists anew that do not fit, as a broker leaves them that was killed while it put files in place."""
        log = CompactionLog.open(self._root, self.queue, relists=True)
        if log is None:
            return
        for base in set(list_bases(self.folders[1])) - {file.base for file in log.files}:
            Path(_path(self.folders[1], base)).unlink()
        for file in log.files:
            if isinstance(file.listed, MadeList):
                path = _path(self.folders[1], file.base)
                Path(path).unlink(missing_ok=True)
                data = file.listed.read(0, file.listed.size)
                self._rows.write_file(path, self._sizes.unit_file_bytes, 0, data)
        self._rows.mark_folder(self.folders[1])
        self._rows.sync()

    def _opened(self) -> CompactionLog | None:
        if not list_bases(self.folders[0]):
            return None
        log = CompactionLog.open(self._root, self.queue)
        if log is not None:
            return log
        self._mend()  # a broker's, which says nothing of how it ended
        log = CompactionLog.open(self._root, self.queue)
        if log is None:
            self._relist()
            log = CompactionLog.open(self._root, self.queue)
        if log is None:
            raise DataError(
                "the compaction log and its list do not fit", where=self.folders[0], do=_DELETE
            )
        return log

    def _mend(self) -> None:
        """Of the last file keep what passes its checks, up to the first record that does not; the rest is zero then.

        A record that the commit log has no more stays whatever it is: nobody could copy it anew, and readers tell.
        """
        bases = list_bases(self.folders[0])
        if not bases:
            return
        file = CompactedFile.open(self.folders, bases[-1])
        log, size, count, sound = CompactionLog(self.queue, (file,)), 0, 0, 1
        has_from = self._has_from()
        while sound and count < file.count:
            units = file.units(count, count + _CHUNK)
            sizes = units["size"].astype(np.int64)
            ends = size + sizes.cumsum()
            # Of a list of which the machine kept some pages only, places may be anything: they are not read by.
            is_next = is_batch(units) & (units["physical_offset"] == file.base + ends - sizes)
            units = units[: _leading(is_next & (ends <= file.records.size))]
            if not len(units):
                break
            block, kept = log.block(file, units), _leading(units["base_offset"] < has_from)
            passing = kept + _leading(block.faults[kept:] == RecordFault.OK)
            sound = first_lost(block, kept, passing, size, file.records.read)
            size, count = int(ends[sound - 1]) if sound else size, count + sound
            sound = sound if sound == len(sizes) else 0
        self._cut(file.base, size, count)

    def _cut_at(self, limit: int) -> tuple[int, int, int] | None:
        """Base of the file, and how many bytes and units of it stay; None: all of it."""
        for file in self.log.files if self.log is not None else ():
            if file.count and file.last >= limit:
                count = file.first_at("base_offset", limit)
                place = int(file.units(count, count + 1)["physical_offset"][0]) - file.base
                return file.base, place if count else 0, count
        return None

    def _cut(self, base: int, size: int, count: int) -> None:
        """Make zero what lies behind a place, and delete later files."""
        lengths = (self._sizes.log_file_bytes, self._sizes.unit_file_bytes)
        bases = {base for folder in self.folders for base in list_bases(folder)}
        for later in sorted((one for one in bases if one > base), reverse=True):
            for (
                folder
            ) in self.folders:  # pair by pair: of one half that a crash leaves opening knows
                Path(_path(folder, later)).unlink(missing_ok=True)
        for folder, length, at in zip(
            self.folders, lengths, (size, count * BATCH_ITEM_BYTES), strict=True
        ):
            os.truncate(_path(folder, base), at)
            os.truncate(_path(folder, base), length)
            self._rows.mark(_path(folder, base))
            self._rows.mark_folder(folder)
        self._rows.sync()

    # -- copying ----------------------------------------------------------------------------------

    def put(self, block: RecordBlock, tags: Longs, where: Longs, end: int) -> None:
        """Append records; ``end``: the queue offset behind them. After an OSError a store that is opened again looks."""
        self._appender.put(block, tags, where)
        self.end = end

    def show(self) -> None:
        """Bring what was put to the disk, and show it to readers."""
        self._rows.sync()
        found = CompactionLog.open(self._root, self.queue)
        if found is None and list_bases(self.folders[0]):
            raise DataError(
                "the compaction log and its list do not fit", where=self.folders[0], do=_DELETE
            )
        self.log = found

    # -- a pass -----------------------------------------------------------------------------------

    def closed(self) -> list[CompactedFile]:
        return [*filter(_is_full, self.log.files[:-1])] if self.log else []

    def planned(self, compacted_to: int, settings: PassSettings, now_ms: int) -> PassPlan:
        files = [_log_file(file) for file in self.closed()]
        return plan_pass(files, compacted_to, settings, now_ms)

    def keyed(self, files: Iterable[CompactedFile]) -> Iterator[Rows]:
        """The records of files in chunks. DataError: their offsets do not ascend, which tells the newest message."""
        assert self.log is not None
        last = -1
        for file, units in chain.from_iterable(map(self._chunks, files)):
            block = self.log.block(file, units)
            offsets = block.queue_offsets
            if (np.diff(offsets, prepend=last) <= 0).any():
                raise DataError(f"queue offsets that do not ascend, at {int(offsets[0])}")
            last = int(offsets[-1])
            yield keyed_block(block, offsets, self.queue)

    def _chunks(self, file: CompactedFile) -> Iterator[tuple[CompactedFile, Units]]:
        assert self.log is not None
        for one, units in self.log.chunks(file.first, count_max=_CHUNK, bytes_max=_CHUNK_BYTES):
            if one is not file:
                return
            self._go_on()
            yield one, units

    def build(
        self,
        files: Sequence[CompactedFile],
        flags: npt.NDArray[np.bool_],
        before: Iterable[tuple[RecordBlock, Longs, Longs]] = (),
    ) -> int:
        """Make files of what stays of others, aside, behind those of other records; bytes of what stays."""
        aside = tuple(f"{folder}/{ASIDE}" for folder in self.folders)
        for folder in aside:
            shutil.rmtree(folder, ignore_errors=True)
            make_folder(Path(folder))
        rows = RowWriter()
        appender = _Appender((aside[0], aside[1]), self._sizes, rows, _End())
        for block, tags, where in before:
            appender.put(block, tags, where)
        appender.roll()
        number = written = 0
        for file, every in chain.from_iterable(map(self._chunks, filter(_is_full, files))):
            assert self.log is not None
            units = every[flags[number : number + len(every)]]
            number += len(every)
            if len(units):
                block, tags = self.log.block(file, units), units["tag_code"].astype(np.int64)
                if not block.is_sound:
                    raise DataError("a record was damaged meanwhile", where=self.folders[0])
                appender.put(block, tags, np.arange(len(block)))
                written += int(block.sizes.sum())
        rows.sync()
        rows.close()
        reached("store-compacted-built")
        new = list_bases(aside[0])
        there = list_bases(self.folders[0])
        left = [base for base in there if files and base > files[-1].base]
        old = there[: len(there) - len(left)]
        if left and new and new[-1] >= left[0]:
            raise DataError(
                "what stays takes more files than it had, as lists of another writer are fuller than ours",
                where=self.folders[0],
                do="nothing: the next pass is over more files",
            )
        sums = {
            kind: {str(base): _sum(_path(folder, base)) for base in bases}
            for kind, folder, bases in (("old", self.folders[1], old), ("new", aside[1], new))
        }
        mark = {"old": old, "new": new, "sums": sums}
        replace_file(Path(aside[0], READY), json.dumps(mark).encode())
        reached("store-compacted-ready")
        return written

    def put_in_place(self) -> None:
        """Have the files aside take the place of those that they were made of; again does the rest."""
        ready = json.loads(Path(self.folders[0], ASIDE, READY).read_bytes())
        for number, folder in enumerate(self.folders):
            for base in list_bases(f"{folder}/{ASIDE}"):
                self._rows.forget(_path(folder, base))
                Path(_path(f"{folder}/{ASIDE}", base)).replace(_path(folder, base))
            sync_folder(folder)
            if not number:
                reached("store-compacted-halfway")
        for folder in self.folders:
            for base in set(ready["old"]) - set(ready["new"]):
                self._rows.forget(_path(folder, base))
                Path(_path(folder, base)).unlink(missing_ok=True)
            sync_folder(folder)
        reached("store-compacted-swapped")
        # The mark goes last, and for good, as it names files that are to be deleted.
        for folder in self.folders[::-1]:
            shutil.rmtree(f"{folder}/{ASIDE}", ignore_errors=True)
            sync_folder(folder)

    def close(self) -> None:
        self._rows.close()


def _leading(flags: npt.NDArray[np.bool_]) -> int:
    return len(flags) if flags.all() else int(np.argmin(flags))


def _is_full(file: CompactedFile) -> bool:
    return file.count > 0


def _sum(path: str) -> int:
    """Of a list: of each record it has place, size, queue offset and times."""
    return zlib_ng.crc32(Path(path).read_bytes())


def _path(folder: str, base: int) -> str:
    return f"{folder}/{base:0{NAME_DIGITS}d}"


def _log_file(file: CompactedFile) -> LogFile:
    ends = np.concatenate((file.units(0, 1), file.units(file.count - 1, file.count)))
    times = ends["store_timestamp_ms"].tolist()
    return LogFile(file.first, file.last + 1, file.end - file.base, times[0], times[1])


class Compactions:
    """The compacted logs of a store's topics, and the passes that make them."""

    def __init__(self, parts: StoreParts, clock: Clock) -> None:
        self.counts = CompactionCounts()  # what was done
        self.failures: dict[MessageQueue, str] = {}  # queues that are not compacted, and why
        self._parts = parts
        self._clock = clock
        self._settings = parts.options.compacting
        self._lock = threading.RLock()
        self._queues: dict[MessageQueue, _Queue] = {}
        self._torn: set[MessageQueue] = set()  # a change ended in the middle: to be opened anew
        self._stop = threading.Event()
        self._may_leave = (
            False  # the pass under way is the thread's own: closing does not wait for it
        )
        self._thread = threading.Thread(target=self._run, name="store-compact")
        self._open(is_sound=parts.recovered is None)

    def start(self) -> None:
        """Begin to copy and compact by itself, if any topic is such; again: nothing."""
        with self._lock:
            if self._parts.topics.compacted() and not self._thread.is_alive():
                self._thread.start()

    def stop(self) -> None:
        """End that; again: nothing."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            for mine in self._queues.values():
                mine.close()

    def log(self, queue: MessageQueue) -> CompactionLog | None:
        """The compaction log of a queue, as it is now; from any thread."""
        mine = self._queues.get(queue)
        return mine.log if mine is not None else None

    def advance(self) -> None:
        """Copy what queues list into their compaction logs. After an OSError, again does the rest."""
        with self._lock:
            errors = []
            self._open(is_sound=True)
            for queue, mine in self._queues.items():
                if mine.end < self._parts.listing.queues[queue].next_offset:
                    try:
                        with self._whole(queue):
                            if self._copy(mine):
                                mine.show()
                    except (OSError, TieredStoreError) as error:  # one queue keeps no other waiting
                        errors.append(error)
            if errors:
                raise errors[0]

    def compact(self, *, by_hand: bool) -> CompactionCounts:
        """One round over all queues that are due (``by_hand``: that have anything new).

        ClosedError: the store is closed meanwhile (not ``by_hand``). What was not ready is as it was.
        """
        self.advance()
        ratio = 0.0 if by_hand else self._settings.dirty_ratio
        with self._lock:
            self._may_leave = not by_hand
            for queue, mine in sorted(self._queues.items()):
                try:
                    self._pass(mine, PassSettings(dirty_ratio=ratio))
                    self.failures.pop(queue, None)
                except ClosedError:
                    self._may_leave = False
                    raise
                except TieredStoreError as error:
                    if self.failures.get(queue) != str(error):
                        _LOG.warning("%s is not compacted: %s", queue, error)
                    self.failures[queue] = str(error)
            self._may_leave = False
        return self.counts

    def refill(self, queue: MessageQueue, batches: Iterable[RecordBatch]) -> int:
        """Take in what another store or a tier has of a queue before this log begins, and make a pass.

        The queue must be there, if only by its end (``Listing.begin``). Of the batches, which are in order, those from
        where this log begins on, or the queue ends, are left out; how many messages were taken in. After an OSError nothing
        is changed; again does it.
        """
        with self._lock:
            self.advance()
            mine = self._queues.get(queue)
            if mine is None:
                raise InvalidError(
                    f"there is nothing yet of {queue}, or its topic is not compacted"
                )
            root, taken, log = self._parts.hold.root, list[int](), mine.log
            files = log.files if log is not None else ()
            end = self._parts.listing.queues[queue].next_offset
            limit = log.first if log is not None and log.end else end
            before = _older(queue, batches, limit, taken)
            flags = np.ones(sum(file.count for file in files), np.bool_)
            with self._whole(queue):
                mine.build(files, flags, before)
                # Before, not behind: what comes has not been looked at, and a crash must not say that it was.
                _drop_mark(root, queue)
                mine.put_in_place()
                self._torn.add(queue)  # the file that is written to is another now
            self._open(is_sound=True)
            self._force(self._queues[queue], has_active=limit < end)
            self._open(is_sound=True)
            return sum(taken)

    def _force(self, mine: _Queue, *, has_active: bool) -> None:
        """A pass over what was taken in and what was there but its last file, which counts for the rest.

        Without such a file all is looked at but the newest message, by which the queue's end is known.
        """
        files = [*filter(_is_full, mine.log.files)] if mine.log is not None else []
        active = files[len(files) - has_active :]
        files = files[: len(files) - has_active]
        if not files:
            return
        flags = self._judged(mine, files, active)
        flags[-1] |= not active
        if not flags.all():
            with self._whole(mine.queue):
                mine.build(files, flags)
                mine.put_in_place()
                self._torn.add(mine.queue)

    # -- inside ----------------------------------------------------------------------------------

    @contextmanager
    def _whole(self, queue: MessageQueue) -> Iterator[None]:
        """A change that is made wholly; else the queue is opened anew before the next one."""
        try:
            yield
        except BaseException:
            self._torn.add(queue)
            raise

    def _open(self, *, is_sound: bool) -> None:
        topics = self._parts.topics.compacted()
        for queue, end in list(self._parts.listing.queues.items()) if topics else ():
            known, is_torn = self._queues.get(queue), queue in self._torn
            if queue.topic in topics and end.unit is None and (known is None or is_torn):
                root, limit = self._parts.hold.root, end.next_offset
                mine = self._queues[queue] = _Queue(
                    root,
                    queue,
                    self._settings,
                    self._go_on,
                    limit=limit,
                    has_from=partial(self._has_from, queue),
                    is_sound=is_sound and not is_torn,
                )
                self._torn.discard(queue)
                if mine.is_cut:  # what comes at these offsets now has not been looked at
                    _drop_mark(root, queue)
                if known is not None:  # until now readers had its log
                    known.close()

    def _go_on(self) -> None:
        if self._may_leave and self._stop.is_set():
            raise ClosedError("the store is being closed", where=self._parts.hold.root)

    def _listed(self, queue: MessageQueue) -> tuple[HeldQueue, int]:
        """A queue in the commit log, and where it ends."""
        parts = self._parts
        listed = parts.listing.queues[queue]
        parts.log.rescan()
        log_min = parts.log.bases[0] if parts.log.bases else 0
        index = listed.opened(parts.cache, parts.hold.root, queue)
        return HeldQueue(parts.log, queue, index, log_min, 1 << 62), listed.next_offset

    def _has_from(self, queue: MessageQueue) -> int:
        """From which queue offset on the commit log has a queue."""
        held, end = self._listed(queue)
        return held.index.first_not_below(held.log_min, end)

    def _copy(self, mine: _Queue) -> bool:
        """Whether anything was copied."""
        held, end = self._listed(mine.queue)
        index = held.index
        at = begin = max(mine.end, index.first_not_below(held.log_min, end))
        while at < end:
            entries = index.entries(at, min(end, at + _CHUNK))
            sizes = entries.sizes.astype(np.int64).cumsum()
            many = max(1, int(np.searchsorted(sizes, _CHUNK_BYTES, "right")))
            entries = index.entries(at, min(end, at + min(many, _CHUNK)))
            found = held.fetch(entries)
            good = np.flatnonzero((found.cases == 0) & (found.record_of >= 0))
            where, tags = found.record_of[good], np.zeros(len(found.block), np.int64)
            tags[where] = entries.tag_codes[good]
            at += len(entries)
            mine.put(found.block, tags, where, at)
            self.counts.damaged += len(entries) - len(good)
        return at > begin

    def _pass(self, mine: _Queue, settings: PassSettings) -> None:
        marks = _read_marks(self._parts.hold.root)
        name = f"{mine.queue.topic}_{mine.queue.queue_id}"
        planned = mine.planned(marks.get(name, -1) + 1, settings, self._clock.now_ms())
        if not planned.is_due:
            return
        files = mine.closed()
        flags = self._judged(mine, files, new_from=planned.dirty_from)
        if not flags.all():
            with self._whole(mine.queue):
                self.counts.rewritten_bytes += mine.build(files, flags)
                mine.put_in_place()
                mine.show()
        _write_marks(self._parts.hold.root, {**marks, name: planned.end - 1})
        self.counts.passes += 1
        self.counts.messages += len(flags)
        self.counts.gone_messages += int(np.count_nonzero(~flags))

    def _judged(
        self,
        mine: _Queue,
        files: Sequence[CompactedFile],
        others: Sequence[CompactedFile] = (),
        *,
        new_from: int = 0,
    ) -> npt.NDArray[np.bool_]:
        """Which messages of files stay, by the keys of these and of later ones; keys from ``new_from`` on are counted."""
        settings, keyless = self._settings, list[Longs]()

        def look(newest: Newest) -> None:
            for rows in mine.keyed([*files, *others]):
                has_key = rows["flags"] & KEYED > 0
                newest.put(rows[has_key])
                if settings.policy.keeps_keyless and not newest.first:
                    keyless.append(rows["offset"][~has_key])

        stay = list[Longs]()
        keys_max, keys = keys_that_fit(settings.memory_bytes), 0
        for newest in in_rounds(keys_max, look):
            rows = newest.rows()
            stay.append(rows["offset"][rows["flags"] & EMPTY == 0])
            keys += int(np.count_nonzero(rows["offset"] >= new_from))
            self.counts.rounds += 1
        self.counts.keys += keys
        self.counts.map_use = keys / keys_max
        ascending = np.sort(np.concatenate([*stay, *keyless]))
        listed = (file.units(0, file.count)["base_offset"].astype(np.int64) for file in files)
        return np.concatenate([is_among(ascending, offsets) for offsets in listed])

    def _run(self) -> None:
        passed_s = self._clock.monotonic_s()
        while not self._stop.wait(_COPY_S):
            try:
                self.advance()
                if self._clock.monotonic_s() >= passed_s + self._settings.interval_s:
                    passed_s = self._clock.monotonic_s()
                    self.compact(by_hand=False)
            except ClosedError:
                return
            except Exception as error:  # noqa: BLE001 (a thread that has died would be silent)
                # The log keeps what was not copied: expiry waits for it.
                is_defect = not isinstance(error, OSError | TieredStoreError)
                _LOG.warning("topics of a store are not compacted: %s", error, exc_info=is_defect)


def _older(
    queue: MessageQueue, batches: Iterable[RecordBatch], limit: int, taken: list[int]
) -> Iterator[tuple[RecordBlock, Longs, Longs]]:
    """Records of batches below a queue offset, checked; ``taken`` gets how many."""
    at = 0
    for batch in batches:
        if batch.base_offset < at:
            raise InvalidError(f"what is to be taken in of {queue} is not in order, or comes twice")
        at = int(batch.end_offset)
        real = np.flatnonzero(batch.sizes > 0)
        real = real[real + int(batch.base_offset) < limit]
        block = parse_records(batch.data, batch.positions[real], batch.sizes[real])
        check_records(block, expected_physical=None)
        every = np.arange(len(real))
        mine = (block.queue_offsets == real + int(batch.base_offset)) & (
            block.queue_ids == queue.queue_id
        )
        if not (block.is_sound and mine.all() and topics_equal(block, every, queue.topic).all()):
            raise DataError(f"what is to be taken in is damaged, or not of {queue}")
        taken.append(len(real))
        yield block, batch.tag_codes[real].astype(np.int64), every


def _read_marks(root: str) -> dict[str, int]:
    """Of each queue the last queue offset that a pass has looked at."""
    try:
        found = loads(read_text(f"{root}/{CHECKPOINT_FILE}") or b"{}")
        return {
            str(name): int(last) for name, last in dict(found.get("queueOffsetMap", {})).items()
        }
    except (ValueError, TypeError, AttributeError):
        return {}  # then a pass looks at all of it once more


def _drop_mark(root: str, queue: MessageQueue) -> None:
    marks = _read_marks(root)
    if marks.pop(f"{queue.topic}_{queue.queue_id}", None) is not None:
        _write_marks(root, marks)


def _write_marks(root: str, marks: dict[str, int]) -> None:
    document = {"empty": not marks, "queueOffsetMap": marks}
    data = json.dumps(document, indent="\t", separators=(",", ":")).encode()
    replace_config(Path(root, CHECKPOINT_FILE), data)
