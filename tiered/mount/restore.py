"""Restore: a tier's messages as a store directory on which a broker starts.

Overview: ``plan_restore`` says what would be read and written, from the journal alone (and a request or two a queue where a
time is asked for). ``Restore.run`` reads all queues side by side, puts their records into one commit log in the order of
their store times, writes the tables of topics, groups and offsets, and has the log listed: consume queues and key index
are made from it by the embedded store's own recovery.

What stays: every byte of a record but its physical offset, and so queue offsets, ids that producers gave, store and born
times and hosts. What changes: physical offsets, and with them message ids that are made of host and offset.

Ordering: the store is made beside the directory, under its name with ``.restoring``, and gets its own name by one rename
when all of it is on the disk: no broker finds half a store. ``restore.json`` in there says what is restored and how far
that is. It comes before anything else, and is written again after the log was synced, so that a record is in the log before
it counts as restored. When the log is whole its folder gets the name that brokers know; then come the table of topics, the
lists, and the tables of groups and offsets. ``restore.json`` stays in the finished store, and says what that was made of.

After a crash, or when it was stopped: the same command goes on from ``restore.json``, to where each queue ended when it
began. What has come into the tier since, queues included, is left out, so that the store is what the tier was at one
moment. Where the tier is not that any more it refuses: what was left has expired in part, the broker truncated messages or
a queue began anew, or there are holes now that the log was not begun for (``RestoredLog``), as compaction makes them. It
refuses another selection.

Damage of the tier ends it with an error that names every damaged range of what is left, and what is restored stays as it
is: once the tier is mended the same command goes on. Where damage is accepted (``accepts_damage``), what lies in damaged
blocks becomes queue offsets without a message, as where the tier has a gap; they are named. They stay so when the
restore is resumed after a repair. One that was begun without accepting damage cannot be resumed with it: its log has no
place for holes.

And it does not take its own note's word for what lies there: it goes on only where every byte of
the log is one that it put (``restore.json`` has checksums of them, and what was put had been checked when it was read), the
tables are those that it wrote, and nothing else is there. Else somebody works in that directory, perhaps a broker that has
given messages its word, and nothing of it is touched. Lists are made of the log, and made anew.

Memory: a batch a queue, about ``memory_bytes`` in all, but at least 64 KiB of each queue, and what the tier's reader caches.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
from zlib_ng import zlib_ng

from backends.lazy_dataclass import dataclass
from tiered.api.broker_place import RetryPlace, require_rocketmq
from tiered.api.reading import Lost, Span, find_lost, plan_span, read_for, read_sound, told
from tiered.api.stores import backend_errors
from tiered.errors import DataError, InvalidError
from tiered.format.fastjson import loads
from tiered.format.items import ITEM_BYTES
from tiered.format.record import decode_record
from tiered.format.sysflag import INNER_BATCH
from tiered.keys import mount_prefix
from tiered.local.catalog import SCHEDULE_TOPIC, reason_left_out
from tiered.local.layout import (
    ABORT_FILE,
    BATCH_DIRECTORY,
    DELAY_OFFSETS_FILE,
    GROUPS_FILE,
    LOCK_FILE,
    LOG_DIRECTORY,
    OFFSETS_FILE,
    QUEUE_DIRECTORY,
    TOPICS_FILE,
    read_text,
)
from tiered.log.broker_tables import Handover, read_handover
from tiered.model import Boundary, MessageQueue, QueueOffset
from tiered.mount.offsets import kept_state, mounts_with_offsets
from tiered.store.disk import (
    CHECKPOINT_FILE,
    NEW_SUFFIX,
    Disk,
    make_folder,
    make_new,
    replace_file,
    require_empty,
    sync_folder,
)
from tiered.store.embedded import MessageStore
from tiered.store.restored import PART, LogMark, RestoredLog, fill_holes
from tiered.store.topictable import TopicTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from concurrent.futures import Executor, Future

    from tiered.api.open_tier import OpenTier
    from tiered.clock import Clock
    from tiered.log.decode import TierBatch
    from tiered.log.parts import Parts
    from tiered.mount.offsets import MountState
    from tiered.store.store_options import StoreOptions

Longs = npt.NDArray[np.int64]
STATE_FILE: Final = "restore.json"
STATE_FORMAT: Final = 3
_LOGGER = logging.getLogger("tiered.mount")
_NEXT, _RETRIES = "next", "retries"
"""Members of ``restore.json`` with what is left of each queue: of the tier, and of the retry log."""
_LOG, _LISTS, _WHOLE = "log", "lists", "whole"
"""How far it is: the log is made; it is whole, and its lists and tables are; all is."""
SUFFIX: Final = ".restoring"
"""Of the directory beside the one that is wanted, in which the store is made."""
_MADE_OF_THE_LOG: Final = (
    *(QUEUE_DIRECTORY, BATCH_DIRECTORY, "index", "compaction"),
    *(ABORT_FILE, CHECKPOINT_FILE, CHECKPOINT_FILE + NEW_SUFFIX),
)
_OF_A_LOG: Final = frozenset({STATE_FILE, STATE_FILE + NEW_SUFFIX, LOCK_FILE, PART})
_OF_LISTS: Final = _OF_A_LOG | {LOG_DIRECTORY, *_MADE_OF_THE_LOG, "config"}
SAVE_BYTES: Final = 64 << 20
"""How much is restored between two notes of how far it is; what a crash does again, at most."""
BATCH_BYTES_MIN: Final = 64 << 10
BATCH_BYTES_MAX: Final = 4 << 20
REQUEST_BYTES: Final = 2 << 20
"""What a request brings, about."""
SYS_FLAG_AT: Final = 36
"""Where a record holds its sysFlag: 4 bytes, big-endian."""


@dataclass(frozen=True, slots=True)
class RestoreSelection:
    """What is to be restored."""

    selects: Callable[[str], bool] = field(default=lambda _topic: True)
    from_ms: int | None = None  # messages stored at or after it, UTC; None: from the first
    until_ms: int | None = None  # messages stored before it; None: up to the last
    wish: str = ""  # all this as a person said it: what goes on later has to be the same
    offsets_of: str = ""
    """The mount of which groups get the offsets: its name, with ``/address`` of one that is shared; empty: that of
    the broker's own name."""
    is_whole: bool = True
    """With what groups have sent back to that mount, which cannot be chosen from."""


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """What would be done."""

    spans: tuple[Span, ...]  # of each queue that has anything, in order
    messages: int  # how many queue offsets these are, holes included
    record_bytes: int  # of their records, about where a part is not wanted whole
    list_bytes: int  # of the consume queues
    requests: int  # to the tier's store, about
    dollars: float  # for these, by list prices
    skipped: int
    """Queues of topics that are not selected, and those that have messages, of which none is."""
    has_holes: bool  # there are queue offsets without a message among these
    wish: str = ""  # that of the selection
    offsets_of: str = ""
    """The mount of which groups get the offsets; it may be none that has ever served."""
    left_out_mounts: tuple[str, ...] = ()  # others that have kept offsets of this tier
    begins: tuple[tuple[MessageQueue, int], ...] = ()
    """Queues of which no message is restored, and the queue offset at which they go on: their messages have expired,
    or are not selected."""
    retries: tuple[Span, ...] = ()
    """Of what was sent back to the mount: what waits for its time, what was given out again, dead letters."""
    retry_tier: OpenTier | None = None  # of these; closed by the caller that made the plan

    @property
    def delay_offsets(self) -> dict[int, int]:
        """Where a broker goes on in the queue of each delay level."""
        return {
            span.cursor.queue.queue_id + 1: int(span.start)
            for span in self.retries
            if span.cursor.queue.topic == SCHEDULE_TOPIC
        }


def plan_restore(tier: OpenTier, selection: RestoreSelection) -> RestorePlan:
    """Say what a restore would do."""
    kind, what = tier.state.store.get("kind"), "restoring writes a store of RocketMQ"
    require_rocketmq(kind, what, tier.store.url, "give the tier of a RocketMQ broker")
    chosen, left_out_mounts = _choose_mount(tier, selection.offsets_of)
    spans, messages, sizes, skipped = [], 0, 0, 0
    begins: list[tuple[MessageQueue, int]] = []
    read_bytes: dict[str, float] = {}
    for queue in tier.queues():
        span = _span(tier, queue, selection) if selection.selects(queue.topic) else None
        if span is None or span.start >= span.stop:
            # One of which everything has expired is as whole as it can be, and leaves out nothing.
            skipped += span is None or span.cursor.low < span.cursor.end
            if span is not None and span.start:
                begins.append((queue, int(span.start)))
            continue
        spans.append(span)
        messages += span.stop - span.start
        sizes += _weigh(span, read_bytes)
    if not spans:
        raise InvalidError(
            "there is nothing to restore",
            where=tier.store.url,
            do="check --topics, --from and --until; `tiered ls URL` shows what there is",
        )
    retry_tier, retries = _plan_retries(tier, chosen) if selection.is_whole else (None, ())
    for span in retries:
        messages += span.stop - span.start
        sizes += _weigh(span, read_bytes)
    reads = sum(math.ceil(size / REQUEST_BYTES) for size in read_bytes.values())
    dollars = reads / 1000 * tier.meter.snapshot().prices.read_per_1000
    return RestorePlan(
        tuple(spans),
        messages,
        sizes,
        messages * ITEM_BYTES,
        reads,
        dollars,
        skipped,
        any(map(_has_holes, spans)),
        selection.wish,
        chosen,
        left_out_mounts,
        tuple(begins),
        retries,
        retry_tier,
    )


def _plan_retries(tier: OpenTier, mount: str) -> tuple[OpenTier | None, tuple[Span, ...]]:
    """All that lies in a mount's retry log, behind what the broker's tier has of the same queues."""
    for one in tier.retry_logs():
        if isinstance(one.place, RetryPlace) and one.place.mount == mount:
            spans = []
            for queue in one.queues():
                cursor, before = one.reader.cursor(queue), tier.state.incarnation(queue)
                start = max(cursor.low, before.commit_offset if before is not None else 0)
                if start < cursor.end:
                    spans.append(plan_span(cursor, QueueOffset(start), cursor.end))
            return one, tuple(spans)
    return None, ()


def building(directory: str) -> Path:
    """Where a store is made that is to be at ``directory``: beside it, so that a rename brings it there."""
    target = Path(os.path.realpath(directory))
    return target.with_name(target.name + SUFFIX)


def _choose_mount(tier: OpenTier, wanted: str) -> tuple[str, tuple[str, ...]]:
    """The mount of which offsets are taken, and those of which none are."""
    with backend_errors():
        there = mounts_with_offsets(tier.store, tier.place.prefix)
    if wanted and wanted not in there:
        raise InvalidError(
            f"no mount {wanted!r} has kept offsets of this tier, but {', '.join(there) or 'none at all'}",
            where=tier.store.url,
            do="say --offsets-of as one of these, or leave it out",
        )
    chosen = wanted or tier.place.broker
    return chosen, tuple(name for name in there if name != chosen)


def _span(tier: OpenTier, queue: MessageQueue, selection: RestoreSelection) -> Span:
    """Of one queue, from the first message in time to the first behind it."""
    cursor = tier.reader.cursor(queue)
    start: int = cursor.low
    stop: int = cursor.end
    with backend_errors():
        if selection.from_ms is not None:
            start = tier.reader.queue(queue).offset_by_time(selection.from_ms, Boundary.LOWER)
        if selection.until_ms is not None:
            stop = tier.reader.queue(queue).offset_by_time(selection.until_ms, Boundary.LOWER)
    return plan_span(cursor, start, max(start, stop))


def _has_holes(span: Span) -> bool:
    """Whether a queue offset of it may be without a message."""
    incarnation, (start, stop) = span.cursor.incarnation, (span.start, span.stop)
    rows = incarnation.parts().rows
    first, end = rows["queue_offset"], rows["queue_offset"] + rows["count"].astype(np.int64)
    inside = (first < stop) & (end > start) & (rows["holes"] > 0)
    return bool(inside.any()) or any(
        gap.start < stop and gap.end > start for gap in incarnation.gaps
    )


def _weigh(span: Span, read_bytes: dict[str, float]) -> int:
    """Bytes of records, about; and what has to be read of each bundle is added: all queues are read side by side."""
    parts: Parts = span.cursor.incarnation.parts()
    rows = parts.rows
    first, count = rows["queue_offset"], rows["count"].astype(np.int64)
    wanted = np.minimum(first + count, span.stop) - np.maximum(first, span.start)
    share = np.maximum(wanted, 0) / np.maximum(count, 1)
    for bundle, size in zip(parts.bundles, (rows["stored_bytes"] * share).tolist(), strict=True):
        if size:
            read_bytes[bundle.key] = read_bytes.get(bundle.key, 0.0) + size
    return int((rows["log_bytes"] * share).sum())


# -- reading side by side -------------------------------------------------------------------------


class _Source:
    """One queue, batch by batch.

    Attributes:
        next: Queue offset behind what was taken.
        put: Queue offset behind what is in the log.
        keys: int64[n], store times of the records at hand, never falling.
    """

    def __init__(self, span: Span, batches: Iterator[TierBatch]) -> None:
        self.queue = span.cursor.queue
        self.next = self.put = span.start
        self.stop = span.stop  # where it ends
        self.history = list(span.cursor.history)  # what it is read of, as it is noted
        self.has_holes = False  # a queue offset without a message was met
        self._seen: int = span.start
        self._batches = batches
        self._last_ms = 0
        self._view = memoryview(b"")
        self._positions = self._sizes = self._ends = self.keys = np.empty(0, np.int64)
        self.at = 0  # how many of these were taken

    def fill(self) -> bool:
        """See to it that there is something at hand; whether there is."""
        while self.at == len(self.keys):
            batch = next(self._batches, None)
            if batch is None:
                return False
            self._open(batch)
        return True

    def _open(self, batch: TierBatch) -> None:
        records = batch.records
        present = np.flatnonzero(records.sizes > 0)
        self.has_holes |= self._seen < records.base_offset or len(present) < len(records.sizes)
        self._seen = batch.end_offset
        positions = records.positions[present]
        first = np.diff(positions, prepend=-1) != 0  # messages of an inner batch share their record
        present, positions = present[first], positions[first]
        self._view = memoryview(records.data).cast("B")
        self._positions, self._sizes = positions, records.sizes[present].astype(np.int64)
        self._ends = np.append(present[1:] + records.base_offset, int(batch.end_offset))[
            : len(present)
        ]
        times = np.maximum(records.store_timestamps_ms[present], self._last_ms)
        self.keys, self.at = np.maximum.accumulate(times), 0
        if len(present):
            self._last_ms = int(self.keys[-1])
        else:
            self.next = batch.end_offset

    def take(self, horizon_ms: int) -> tuple[Longs, Longs, memoryview, Longs]:
        """Keys, positions, bytes and sizes of all records at hand that were stored up to a time."""
        end = int(np.searchsorted(self.keys, horizon_ms, side="right"))
        taken = slice(self.at, end)
        if end > self.at:
            self.next = QueueOffset(int(self._ends[end - 1]))
        self.at = end
        return self.keys[taken], self._positions[taken], self._view, self._sizes[taken]


def merged(sources: Sequence[_Source]) -> Iterator[tuple[npt.NDArray[np.uint8], Longs]]:
    """Records of all queues in the order of their store times; those of one queue stay in theirs.

    Yields:
        Records one behind the other, in memory of their own, and the size of each.
    """
    left = [source for source in sources if source.fill()]
    while left:
        horizon_ms = min(int(source.keys[-1]) for source in left)
        taken = [source.take(horizon_ms) for source in left if source.keys[source.at] <= horizon_ms]
        yield _in_order(taken)
        left = [source for source in left if source.fill()]


def _in_order(
    taken: Sequence[tuple[Longs, Longs, memoryview, Longs]],
) -> tuple[npt.NDArray[np.uint8], Longs]:
    keys = np.concatenate([one[0] for one in taken])
    order = np.argsort(keys, kind="stable")
    starts = np.concatenate([one[1] for one in taken])[order]
    sizes = np.concatenate([one[3] for one in taken])[order]
    owners = np.repeat(np.arange(len(taken)), [len(one[0]) for one in taken])[order]
    goes_on = (np.diff(owners) == 0) & (starts[1:] == starts[:-1] + sizes[:-1])
    firsts = np.flatnonzero(np.append(True, ~goes_on))
    lasts = np.append(firsts[1:], len(starts)) - 1
    runs = zip(
        owners[firsts].tolist(),
        starts[firsts].tolist(),
        (starts[lasts] + sizes[lasts]).tolist(),
        strict=True,
    )
    joined = bytearray().join([taken[owner][2][start:end] for owner, start, end in runs])
    return np.frombuffer(joined, np.uint8), sizes


# -- writing --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore left behind."""

    is_complete: bool  # it was not stopped
    records: int  # put in this run; an inner batch is one
    record_bytes: int  # of these
    log_end: int  # where the log ends
    filled: int = 0  # queue offsets without a message between others, as where the tier has a gap
    # topics, groups: In the tables, without the topics that every broker makes for itself.
    topics: int = 0
    groups: int = 0
    offsets: int = 0  # queues of which a group's offset is in the table
    lost: tuple[Lost, ...] = ()  # what lies in damaged blocks of the tier, in all runs together


class Restore:
    """One restore of one tier into one directory. See the module's contract."""

    def __init__(
        self,
        tier: OpenTier,
        plan: RestorePlan,
        directory: str,
        options: StoreOptions,
        clock: Clock,
        *,
        memory_bytes: int,
        stop: Callable[[], bool] = lambda: False,
        accepts_damage: bool = False,
    ) -> None:
        """Write nothing yet.

        Args:
            directory: Where to; empty or missing. It is made beside that (``building``).
            stop: Asked between two pieces; True ends it in order.
            accepts_damage: What lies in damaged blocks becomes holes; else it is an error.
        """
        self.done_bytes = 0  # bytes of records put in this run
        self._tier = tier
        self._plan = plan
        self._target = Path(os.path.realpath(directory))
        self._root = building(directory)
        self._options = options
        self._clock = clock
        self._stop = stop
        self._accepts_damage = accepts_damage
        self._lost: list[Lost] = []
        share = memory_bytes // max(2 * len(plan.spans), 1)
        self._batch_bytes = min(max(share, BATCH_BYTES_MIN), BATCH_BYTES_MAX)
        self._has_holes = plan.has_holes or accepts_damage
        self._batch_topics: set[str] = set()
        self._tables: dict[str, int] = {}
        self._records = 0
        self._put_mark: LogMark | None = None
        self._rows: dict[str, list[list[Any]]] = {}

    def check(self) -> bool:
        """Refuse what ``run`` would refuse by what lies there, log files unread; whether there is something to go on with.

        Raises:
            InvalidError: The directory has something in it, or what was cut short is not as this restore left it.
            DataError: The offsets that a mount has kept are damaged, and that is not accepted: said before hours of work.
        """
        self._require_free()
        with backend_errors():
            self._kept_by_a_mount()
        return self._load() is not None

    def run(self) -> Restored:
        """Do it, or what is left of it.

        Raises:
            InvalidError: The directory has something else in it, a record does not fit a file, or the tier is not any more
                what it was when the restore was begun.
            StoreUnavailableError: The tier does not answer, or the disk refuses it.
            DataError: Bytes of the tier are damaged, and that is not accepted. All of them are named. What is in the log
                stays; the restore may go on when they are mended.
        """
        self._require_free()
        known = self._load()
        if known is None:
            known = self._note_beginning()
        else:
            self._plan = self._begun(known)
        self._has_holes = bool(known["has_holes"])
        self._batch_topics.update(known["batch_topics"])
        self._lost = [Lost(MessageQueue(*row[:2]), *row[2:]) for row in known["lost"]]
        is_whole = known["phase"] != _LOG
        log = RestoredLog.open(
            self._root,
            file_bytes=self._options.commitlog_file_bytes,
            mark=_mark(known),
            has_holes=self._has_holes,
            is_whole=is_whole,
        )
        try:
            self._put_mark = log.mark
            self._rows = {name: known.get(name, []) for name in (_NEXT, _RETRIES)}
            is_whole = is_whole or self._fill_log(log)
            lost = tuple(sorted(self._lost))
            result = Restored(is_whole, self._records, self.done_bytes, log.end, lost=lost)
            if not is_whole:
                return result
            with Disk(str(self._root)):
                self._note(_LISTS)
                self._clear()
            log.end_log(int(self._clock.now_ms()))
        finally:
            log.close()
        with Disk(str(self._root)):
            result = self._finish(result, synced_end=0 if log.is_empty else log.end)
            self._note(_WHOLE)
            self._take_place()
        return result

    # -- the log ----------------------------------------------------------------------------------

    def _fill_log(self, log: RestoredLog) -> bool:
        """Put what is not there yet; whether all is. What was sent back comes last: its queues follow those of the tier."""
        plan = self._plan
        is_whole = self._fill_of(self._tier, plan.spans, _NEXT, log)
        if is_whole and plan.retry_tier is not None and plan.retries:
            is_whole = self._fill_of(plan.retry_tier, plan.retries, _RETRIES, log)
        return is_whole

    def _fill_of(self, tier: OpenTier, spans: Sequence[Span], name: str, log: RestoredLog) -> bool:
        """The same of one tier; ``name`` of the rows that say how far it is."""
        with tier.group() as group:
            tier.expect(group, [(one.cursor, one.start, one.stop) for one in spans])
            sources = [_Source(span, self._batches(tier, span, group)) for span in spans]
            try:
                with ThreadPoolExecutor(1, "tiered-restore-save") as saver:
                    return self._put_all(log, sources, saver, name)
            except DataError as error:
                self._tell_damage(tier, spans, sources, error)
                raise

    def _batches(self, tier: OpenTier, span: Span, group: str) -> Iterator[TierBatch]:
        if self._accepts_damage:
            return read_sound(tier, span, group, self._batch_bytes, self._lost)
        return read_for(tier, span, group, self._batch_bytes)

    def _tell_damage(
        self, tier: OpenTier, spans: Sequence[Span], sources: Sequence[_Source], first: DataError
    ) -> None:
        """Name all that is damaged of what is left, by reading it."""
        both = zip(spans, sources, strict=True)
        left = [replace(span, start=source.next) for span, source in both]
        if lost := find_lost(tier, left, self._batch_bytes):
            raise DataError(
                f"the tier has {told(lost)}",
                where=self._tier.store.url,
                do="`tiered verify URL --deep --store STORE --repair` mends what it can, and the same command goes on then;"
                f" or delete {self._root} and restore what is sound with --accept-damage",
            ) from first

    def _put_all(
        self, log: RestoredLog, sources: Sequence[_Source], saver: Executor, name: str
    ) -> bool:
        """Put what the sources have; whether that was all. The disk is waited for beside it, one note at a time."""
        saving, saved_bytes = self._save(log, sources, saver, name), self.done_bytes
        try:
            for data, sizes in self._chunks(sources):
                self._note_batches(data, sizes)
                log.put(data, sizes)
                for source in sources:
                    source.put = source.next
                self._put_mark = log.mark
                self.done_bytes += len(data)
                self._records += len(sizes)
                if self.done_bytes - saved_bytes >= SAVE_BYTES:
                    saving.result()
                    saving, saved_bytes = self._save(log, sources, saver, name), self.done_bytes
                if self._stop():
                    return False
        finally:
            saving.result()  # first: after a sync that failed the next one may say that all is well
            self._save(log, sources, saver, name).result()
        return True

    def _chunks(self, sources: Sequence[_Source]) -> Iterator[tuple[npt.NDArray[np.uint8], Longs]]:
        with backend_errors():
            for chunk in merged(sources):
                if not self._has_holes:  # compaction may have come in since it was begun
                    for source in sources:
                        self._refuse_holes(source.queue, has_holes=source.has_holes)
                yield chunk

    def _note_batches(self, data: npt.NDArray[np.uint8], sizes: Longs) -> None:
        """Remember topics with inner batches: their consume queues are of another kind."""
        starts = np.cumsum(sizes) - sizes
        flags = data[starts[:, None] + np.arange(SYS_FLAG_AT, SYS_FLAG_AT + 4)]
        packed = flags.copy().view(">i4").ravel() & INNER_BATCH
        for start in starts[packed != 0].tolist():
            self._batch_topics.add(decode_record(data.data, start, check_crc=False).topic)

    # -- how far it is ----------------------------------------------------------------------------

    def _identity(self) -> dict[str, Any]:
        """What must be the same when it goes on."""
        tier = self._tier
        return {
            "format": STATE_FORMAT,
            "url": tier.store.url,
            "place": [tier.place.cluster, tier.place.broker],
            "file_bytes": self._options.commitlog_file_bytes,
            "wish": self._plan.wish,
            "accepts_damage": self._accepts_damage,
        }

    def _begun(self, known: Mapping[str, Any]) -> RestorePlan:
        """What is left of what was begun: without queues that have come into the tier since."""
        plan = self._plan
        spans = self._begun_of(plan.spans, known[_NEXT], known)
        retries = self._begun_of(plan.retries, known.get(_RETRIES, []), known)
        new = len(plan.spans) - len(spans)
        begins = tuple((MessageQueue(topic, at), offset) for topic, at, offset in known["begins"])
        skipped = plan.skipped + new
        return replace(plan, spans=spans, retries=retries, skipped=skipped, begins=begins)

    def _begun_of(
        self, planned: Sequence[Span], rows: Sequence[Sequence[Any]], known: Mapping[str, Any]
    ) -> tuple[Span, ...]:
        """What is left of spans as they were noted."""
        now, spans = {span.cursor.queue: span.cursor for span in planned}, []
        for topic, queue_id, start, stop, *history in rows:
            queue = MessageQueue(topic, queue_id)
            cursor = now.get(queue)
            if cursor is None:
                raise self._changed(f"{queue} is not in the tier any more")
            if list(cursor.history) != history:
                raise self._changed(f"{queue} began anew, or messages of it were truncated")
            if start < min(cursor.low, stop):
                low = min(cursor.low, stop)
                raise self._changed(f"messages [{start}, {low}) of {queue} have expired")
            span = Span(cursor, QueueOffset(start), QueueOffset(stop), is_firm=True)
            if not known["has_holes"]:
                self._refuse_holes(queue, has_holes=_has_holes(span))
            spans.append(span)
        return tuple(spans)

    def _refuse_holes(self, queue: MessageQueue, *, has_holes: bool) -> None:
        """Refuse holes in a log that was begun without the file that entries for them name."""
        if has_holes:
            raise self._changed(f"{queue} has been compacted, or has a gap now")

    def _changed(self, what: str) -> InvalidError:
        return InvalidError(
            f"{what}, since the restore was begun",
            where=str(self._root),
            do="restore what there is into an empty directory",
        )

    def _require_free(self) -> None:
        """Refuse a directory that the finished store could not take the place of."""
        if os.path.ismount(self._target):
            raise InvalidError(
                "a file system is mounted here, and a finished store gets its name by a rename",
                where=str(self._target),
                do="name a directory below it that is missing or empty",
            )
        known = _read_note(self._target) if self._target.is_dir() else None
        if known is not None and self._is_same(known):
            raise InvalidError(
                "this has been restored here already; nothing is changed",
                where=str(self._target),
                do="start a broker on it, or name an empty directory to restore it once more",
            )
        require_empty(self._target)

    def _load(self) -> dict[str, Any] | None:
        """What a restore that was cut short has left; None: there was none."""
        known = _read_note(self._root)
        if known is None:
            require_empty(self._root, beside=STATE_FILE + NEW_SUFFIX)
            return None
        if not self._is_same(known):
            raise InvalidError(
                "a restore of something else was cut short there",
                where=str(self._root),
                do="go on with the options that it had, or delete that directory",
            )
        self._tables = known["tables"]
        if strange := self._strange(is_log=known["phase"] == _LOG):
            raise InvalidError(
                f"{strange} is not as this restore left it, so somebody else has written here since it was cut short",
                where=str(self._root),
                do="keep this directory if it has messages of its own, and restore into another one",
            )
        return known

    def _is_same(self, known: Mapping[str, Any]) -> bool:
        return all(known.get(name) == value for name, value in self._identity().items())

    def _strange(self, *, is_log: bool) -> str | None:
        """A name that is not ours, or a table that is not as we wrote it. The log is looked at when it is opened."""
        there = {one.name for one in self._root.iterdir()}
        if strange := sorted(there - (_OF_A_LOG if is_log else _OF_LISTS)):
            return strange[0]
        for path in sorted((self._root / "config").glob("*")):
            name = f"config/{path.name}"
            if name in self._tables:
                if self._tables[name] != _sum(path.read_bytes()):
                    return name
            elif name.removesuffix(NEW_SUFFIX).removesuffix(".bak") not in self._tables:
                return name
        return None

    def _note_beginning(self) -> dict[str, Any]:
        """Say what is begun before anything else is in the directory: what is stopped from here on can go on."""
        self._has_holes = self._plan.has_holes or self._accepts_damage
        self._rows = {
            name: [
                [*span.cursor.queue, int(span.start), int(span.stop), *span.cursor.history]
                for span in spans
            ]
            for name, spans in ((_NEXT, self._plan.spans), (_RETRIES, self._plan.retries))
        }
        make_new(self._root, beside=STATE_FILE + NEW_SUFFIX)
        with Disk(str(self._root)):
            return self._note(_LOG)

    def _document(self, phase: str) -> dict[str, Any]:
        mark = self._put_mark
        return {
            **self._identity(),
            "phase": phase,
            "log": mark and {"end": mark.end, "files": mark.files},
            **self._rows,
            "begins": [[*queue, offset] for queue, offset in self._plan.begins],
            "has_holes": self._has_holes,
            "lost": self._lost_before(phase),
            "batch_topics": sorted(self._batch_topics),
            "tables": self._tables,
        }

    def _lost_before(self, phase: str) -> list[list[Any]]:
        """What is lost of what is in the log, or before it; what lies behind will be met again when it is gone on with."""
        put = {MessageQueue(*row[:2]): row[2] for rows in self._rows.values() for row in rows}
        rows = (one for one in self._lost if phase != _LOG or one.end <= put[one.queue])
        return [[*one.queue, *one[1:]] for one in rows]

    def _note(self, phase: str) -> dict[str, Any]:
        """Write down how far it is."""
        document = self._document(phase)
        replace_file(self._root / STATE_FILE, json.dumps(document).encode())
        return document

    def _save(
        self, log: RestoredLog, sources: Sequence[_Source], saver: Executor, name: str
    ) -> Future[None]:
        """Note how far it is now, once that is on the disk: as of the last chunk that was put whole."""
        rows = [
            [*source.queue, int(source.put), int(source.stop), *source.history]
            for source in sources
        ]
        self._rows = {**self._rows, name: rows}
        document = self._document(_LOG)

        def save() -> None:
            log.sync()  # all that was put before this was asked for, and perhaps more
            with Disk(str(self._root)):
                replace_file(self._root / STATE_FILE, json.dumps(document).encode())

        return saver.submit(save)

    # -- tables and lists -------------------------------------------------------------------------

    def _clear(self) -> None:
        """Delete what is made of the log, and the tables: they are ours (``_load``), and are made anew."""
        for name in (*_MADE_OF_THE_LOG, "config"):
            path = self._root / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def _finish(self, result: Restored, synced_end: int) -> Restored:
        tier, now_ms = self._tier, int(self._clock.now_ms())
        with backend_errors():
            handover = read_handover(tier.store, tier.place.prefix, tier.state.store)
            offsets = self._offsets(handover)
        table, topics = self._topics(handover)
        self._write_table(TOPICS_FILE, table.encoded(now_ms))
        groups = dict(handover.groups) if handover is not None else {}
        plan = self._plan
        stops = {span.cursor.queue: span.stop for span in (*plan.spans, *plan.retries)}
        begins = {queue: QueueOffset(offset) for queue, offset in self._plan.begins} | stops
        store = MessageStore.open(
            self._root,
            cluster=tier.place.cluster,
            broker=tier.place.broker,
            clock=self._clock,
            options=self._options,
            anew=True,
            # Of queues without a record: it has holes alone, or nothing of it is restored.
            begins={queue: at for queue, at in begins.items() if not table.is_batch(queue.topic)},
            synced_end=synced_end,  # so that no message that was put is taken for a torn one
        )
        filled = 0
        with store:
            ends = store.queues()
        if self._has_holes:
            ends = {queue: max(end, stops.get(queue, end)) for queue, end in ends.items()}
            filled = fill_holes(str(self._root), ends, self._options.commitlog_file_bytes)
        offsets = _kept_offsets(offsets, topics, ends)
        self._write_tables(groups, offsets, now_ms)
        count = sum(map(len, offsets.values()))
        return replace(result, filled=filled, topics=len(topics), groups=len(groups), offsets=count)

    def _take_place(self) -> None:
        """Give the store its name: in one step, with all that is in it on the disk."""
        try:
            self._root.rename(self._target)
        except (FileExistsError, NotADirectoryError) as error:
            raise _taken(self._target) from error
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            raise _taken(self._target) from error
        sync_folder(str(self._target.parent))

    def _topics(self, handover: Handover | None) -> tuple[TopicTable, set[str]]:
        """The table of topics: as the broker had them, else with as many queues as have messages; which these are."""
        place = self._tier.place
        table = TopicTable.make(str(self._root), cluster=place.cluster, broker=place.broker)
        restored: dict[str, int] = {}
        for queue in (
            *(span.cursor.queue for span in (*self._plan.spans, *self._plan.retries)),
            *(queue for queue, _ in self._plan.begins),
        ):
            if queue.topic == SCHEDULE_TOPIC:
                continue  # every broker has it
            restored[queue.topic] = max(restored.get(queue.topic, 0), queue.queue_id + 1)
        known, written = handover.topics if handover is not None else {}, set(restored)
        is_whole = not self._plan.skipped
        for name, config in known.items():
            is_own = reason_left_out(name, cluster=place.cluster, broker=place.broker) is not None
            if name in restored or (is_whole and not is_own):
                table.adopt(name, config)
                written.add(name)
        for name, queues in restored.items():
            table.put(name, queues)
            if name in self._batch_topics:
                table.set_batch(name)
        return table, written

    def _offsets(self, handover: Handover | None) -> Mapping[tuple[str, str], Mapping[int, int]]:
        """Where groups are: with a mount, where one has served the tier, else as the broker had it."""
        offsets = dict(handover.offsets) if handover is not None else {}
        kept = self._kept_by_a_mount()
        if kept and kept.handover == (handover.key if handover is not None else ""):
            for name, row in kept.offsets.items():
                offsets[name] = {**offsets.get(name, {}), **row}
        return offsets

    def _kept_by_a_mount(self) -> MountState | None:
        """What the mount has kept whose offsets are wanted; None also where that is damaged and damage is accepted."""
        mount, _, member = self._plan.offsets_of.partition("/")
        try:
            return kept_state(
                self._tier.store, mount_prefix(self._tier.place.prefix, mount, member)
            )
        except DataError as error:
            if not self._accepts_damage:
                raise
            _LOGGER.warning("groups are where they were with the broker: %s", error)
            return None

    def _write_tables(
        self,
        groups: Mapping[str, Mapping[str, Any]],
        offsets: Mapping[tuple[str, str], Mapping[int, int]],
        now_ms: int,
    ) -> None:
        version = {"counter": 1, "stateVersion": 0, "timestamp": now_ms}
        rows = {f"{topic}@{group}": row for (group, topic), row in sorted(offsets.items())}
        self._write_table(OFFSETS_FILE, _encoded({"dataVersion": version, "offsetTable": rows}))
        if delays := self._plan.delay_offsets:
            table: dict[str, Any] = {"dataVersion": version, "offsetTable": delays}
            self._write_table(DELAY_OFFSETS_FILE, _encoded(table))
        if groups:
            table = {"forbiddenTable": {}, "subscriptionGroupTable": groups}
            self._write_table(GROUPS_FILE, _encoded({"dataVersion": version, **table}))

    def _write_table(self, name: str, data: bytes) -> None:
        """Write a table, its checksum first: by that it is known as ours when it is gone on with."""
        self._tables = {**self._tables, name: _sum(data)}
        self._note(_LISTS)
        path = self._root / name
        make_folder(path.parent)
        replace_file(path, data)


def _encoded(document: Mapping[str, Any]) -> bytes:
    text = json.dumps(document, indent="\t", separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "surrogateescape")


def _sum(data: bytes) -> int:
    """Of a table without its version, which changes whenever it is written, also by the store that lists the log."""
    try:
        document = loads(data)
    except ValueError:
        return -1
    rest = {name: value for name, value in dict(document).items() if name != "dataVersion"}
    return zlib_ng.crc32(json.dumps(rest, sort_keys=True).encode())


def _read_note(folder: Path) -> dict[str, Any] | None:
    """``restore.json`` of a folder; empty when it is none of ours."""
    raw = read_text(str(folder / STATE_FILE))
    if raw is None:
        return None
    try:
        found = loads(raw)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _mark(known: Mapping[str, Any]) -> LogMark | None:
    log = known["log"]
    return log and LogMark(log["end"], tuple((size, crc) for size, crc in log["files"]))


def _taken(target: Path) -> InvalidError:
    return InvalidError(
        "something has come there while it was restored",
        where=str(target),
        do=f"empty it and give the same command again: the finished store lies in {building(str(target))}",
    )


def _kept_offsets(
    offsets: Mapping[tuple[str, str], Mapping[int, int]],
    topics: set[str],
    ends: Mapping[MessageQueue, QueueOffset],
) -> Mapping[tuple[str, str], Mapping[int, int]]:
    """Offsets of the topics that are there, none beyond its queue: a group would pass over what is produced up to it."""
    return {
        (group, topic): {
            queue_id: min(offset, int(ends.get(MessageQueue(topic, queue_id), 0)))
            for queue_id, offset in row.items()
        }
        for (group, topic), row in offsets.items()
        if topic in topics
    }
