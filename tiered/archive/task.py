"""The task: sealed segments become Parquet objects. The same function runs in this process and in Spark's workers.

Overview: the segments of a work are read one after another, in order of queue and offset, into a file for each day of store
time; small ones share files so. An object of the tier in which several of them lie is fetched once.

Ordering: everything is read and the objects are written; then it returns what they are. Nothing of it is part of the archive
before an entry of the log says so (``tiered.archive.job``).

Retries: keys depend on the segments alone, so doing it again makes the same objects. An object that is there already
is read and held against the source; if it has the same rows it is adopted, byte differences aside (another version of
pyarrow). Who makes other segments together, since more were sealed meanwhile, or finds less in them, since they were
compacted, makes another object, and the first is one that no entry names. Reads and writes are tried again by the stores
that are given.

After a crash: objects that no entry names. Doing it again adopts them.

Memory: ``READ_BYTES`` of records as columns; files under way, ended at ``FILE_BYTES`` of columns in all of them; and, where
segments share objects of the tier, ``HELD_BYTES`` of these.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from zlib_ng import zlib_ng

from backends.errors import AlreadyExistsError
from backends.lazy_dataclass import dataclass
from backends.wrapping import WrappingStore
from tiered.api.arrow import load_pyarrow
from tiered.archive.bodies import BodyCounts
from tiered.archive.body_formats import NOTHING, BodyWishes
from tiered.archive.columns import Aside, Columns, side_table
from tiered.archive.model import (
    DAY_MS,
    KAFKA_SCHEMA,
    SCHEMA_VERSION,
    Archived,
    ParquetFile,
    SideFile,
    file_key,
    side_key,
)
from tiered.archive.parquet import (
    FileWriter,
    Written,
    have_same_bits,
    read_columns,
    read_metadata,
    write_small,
)
from tiered.archive.plan import holding
from tiered.crashpoints import reached
from tiered.errors import DataError, InternalError, InvalidError
from tiered.log.parts import Gap
from tiered.log.ranges import Ranges, without
from tiered.log.reader import READ_BYTES, QueueReader
from tiered.model import QueueOffset
from tiered.upkeep.engine import WorkContext
from tiered.upkeep.workplace import FORMAT, GIVE_UP_S, PlanDocument

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Sequence

    import pyarrow as pa

    from backends.base import ByteRange, ObjectStore
    from tiered.api.broker_place import Place
    from tiered.archive.bodies import BodyLayout
    from tiered.archive.model import ArchiveQueue
    from tiered.archive.plan import Task, Work
    from tiered.clock import Clock
    from tiered.log.decode import TierBatch
    from tiered.log.lineage import Isolation


@dataclass(frozen=True, slots=True)
class JobContext:
    """What an archive job works with."""

    tier: ObjectStore  # the tier's store, with retries
    place: Place  # which broker
    archive: ObjectStore  # the archive's store, with retries
    bare: ObjectStore  # the same without, for the log, which tries again by itself
    clock: Clock  # time
    rng: random.Random  # for ids and jitter
    takes: Callable[[str], bool] = lambda _topic: True  # whether a topic is wanted
    wishes: BodyWishes = NOTHING  # what bodies shall become
    isolation: Isolation | None = None
    """What of Kafka's transactions becomes rows; None: as the archive has it, else what was committed."""
    give_up_s: float = GIVE_UP_S
    """A store that has refused an entry of the log for so long is given up."""

    @property
    def context(self) -> WorkContext:
        """What each piece of work is done with."""
        return WorkContext(self.tier, self.place.prefix, self.archive)

    def plan(self, what: str, **said: Any) -> PlanDocument:  # noqa: ANN401 (JSON values)
        """What a plan file has: of which archive and broker it is, and what it says."""
        whose = {"cluster": self.place.cluster, "broker": self.place.broker}
        made = {"url": self.archive.url, **whose, "made_ms": self.clock.now_ms()}
        return {"format": FORMAT, "what": what, **made, **said}

    def require_own(self, plan: PlanDocument) -> None:
        """See that a plan is of this archive."""
        if plan["url"] != self.archive.url:
            raise InvalidError(f"this plan is of {plan['url']}", do="plan again")


FILE_BYTES = 256 << 20
"""A file is ended when the columns of all that are under way took so many bytes, before they were packed."""
HELD_BYTES = 128 << 20
"""Of the tier's objects that several segments lie in."""
REQUEST_BYTES = 1 << 20
"""What can be read in the time that another request takes, about."""


def do_work(context: WorkContext, work: Work) -> tuple[Archived, ...]:
    """Make the Parquet objects of some segments.

    Returns:
        What was made, for each task in order; each offset of a task is accounted for.

    Raises:
        DataError: A segment is damaged, or something else lies under one of our keys.
        InternalError: A file did not reconcile; none of it was published.
        ObjectNotFoundError: A part has been merged or has expired meanwhile: plan again.
    """
    source = _Bundles(context.tier, context.prefix, work)
    making = _Making(context.archive, context.prefix, work)
    made = []
    for task in work.tasks:
        counted = _Counted(task)
        columns = Columns(task.queue, task.layout)
        for batch in _batches(source, context.prefix, task):
            counted.source_bytes += len(memoryview(batch.records.data).cast("B"))
            rows, aside = columns.make(batch, counted.bodies)
            counted.aside += aside
            making.add(task, rows)
        made.append(counted)
    files = making.finish()
    return tuple(_archived(context.archive, source, one, files) for one in made)


def task_reader(tier: ObjectStore, prefix: str, task: Task) -> QueueReader:
    """A reader of what becomes rows of a task, and of nothing else."""
    queue, isolation = task.queue.message_queue, task.sight.isolation
    return QueueReader.of_incarnation(tier, prefix, queue, task.incarnation, isolation)


def _batches(tier: ObjectStore, prefix: str, task: Task) -> Iterator[TierBatch]:
    reader = task_reader(tier, prefix, task)
    at = task.incarnation.min_offset
    for found in reader.batches(at, bytes_max=READ_BYTES):
        if isinstance(found, Gap) or found.base_offset != at:
            raise InternalError(f"{task.queue} is not continuous at {at}")
        yield found
        at = found.end_offset


class _Bundles(WrappingStore):
    """The tier, of which objects that several tasks read are fetched whole, and once. One thread."""

    def __init__(self, tier: ObjectStore, prefix: str, work: Work) -> None:
        super().__init__(tier)
        self._prefix = prefix
        self._versions: dict[str, str] = {}
        self._held: dict[str, bytes] = {}
        wanted, uses, sizes = Counter[str](), Counter[str](), dict[str, int]()
        for task in work.tasks:
            uses.update({bundle.key for bundle in task.parts.bundles})
            stored = task.parts.stored_bytes().tolist()
            for bundle, size in zip(task.parts.bundles, stored, strict=True):
                wanted[prefix + bundle.key] += size
                sizes[prefix + bundle.key] = bundle.size_bytes
        # Of an object in which most is another's the ranges are cheaper, unless there are many for few bytes.
        self._whole = {
            prefix + key
            for key, tasks in uses.items()
            if tasks > 1
            and sizes[prefix + key] <= HELD_BYTES
            and sizes[prefix + key] <= max(2 * wanted[prefix + key], tasks * REQUEST_BYTES)
        }

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        if key not in self._whole:
            return super().get(key, byte_range)
        data = self._fetched(key)
        return data if byte_range is None else data[byte_range.start : byte_range.end]

    def get_ranges(self, key: str, byte_ranges: Sequence[ByteRange]) -> list[bytes]:
        if key not in self._whole:
            return super().get_ranges(key, byte_ranges)
        data = self._fetched(key)
        return [data[one.start : one.end] for one in byte_ranges]

    def _fetched(self, key: str) -> bytes:
        data = self._held.pop(key, None)
        data = super().get(key) if data is None else data
        while self._held and len(data) + sum(map(len, self._held.values())) > HELD_BYTES:
            del self._held[next(iter(self._held))]
        self._held[key] = data  # the one that was used last is the last to go
        return data

    def sources(self, task: Task) -> tuple[tuple[str, str], ...]:
        """Key and version of each object of a task, as it is now; no version where that is about to be repaired."""
        keys = dict.fromkeys(bundle.key for bundle in task.parts.bundles)
        if task.is_divided:
            return tuple((key, "") for key in keys)
        for key in keys:
            if key not in self._versions:
                self._versions[key] = str(self.head(self._prefix + key).version or "")
        return tuple((key, self._versions[key]) for key in keys)


@dataclass(slots=True)
class _Counted:
    task: Task
    source_bytes: int = 0
    aside: list[Aside] = field(default_factory=list)
    bodies: BodyCounts = field(default_factory=BodyCounts)


class _Making:
    def __init__(self, archive: ObjectStore, prefix: str, work: Work) -> None:
        self._archive = archive
        self._metadata = {"tiered.source": prefix, **body_metadata(work.tasks[0].layout)}
        self._origins = {(task.queue, task.start): task.origin for task in work.tasks}
        self._writers: dict[int, FileWriter] = {}
        self._files: dict[tuple[ArchiveQueue, int], list[ParquetFile]] = defaultdict(list)

    def add(self, task: Task, made: list[pa.RecordBatch]) -> None:
        for rows in made:
            for day, some in by_day(rows):
                self._writers.setdefault(day, FileWriter()).add(some, task.queue, task.start)
                if sum(writer.size_bytes for writer in self._writers.values()) >= FILE_BYTES:
                    self._end(max(self._writers, key=lambda one: self._writers[one].size_bytes))

    def finish(self) -> dict[tuple[ArchiveQueue, int], list[ParquetFile]]:
        """The files of each task, by queue and start."""
        for day in list(self._writers):
            self._end(day)
        return self._files

    def _end(self, day: int) -> None:
        reached("archive-writing")
        written = self._writers.pop(day).finish(self._metadata)
        origins = [
            (queue, proof.low, proof.high, self._origins[queue, start])
            for queue, start, proof in written.row_ranges
        ]
        key = file_key(day, origins)
        size, crc = publish_file(self._archive, key, written)
        for queue, start, proof in written.row_ranges:
            numbers = proof.low, proof.high, proof.rows, size, crc
            self._files[queue, start].append(ParquetFile(key, *numbers, *proof[3:]))
        reached("archive-written")


def body_metadata(layout: BodyLayout) -> dict[str, str]:
    """What a file says of the columns that bodies became."""
    body = layout.body
    return {"tiered.body_format": body.format, "tiered.body_columns": body.columns} if body else {}


def _archived(
    archive: ObjectStore,
    source: _Bundles,
    counted: _Counted,
    files: dict[tuple[ArchiveQueue, int], list[ParquetFile]],
) -> Archived:
    task, aside = counted.task, counted.aside
    holes = sum(one.record is None for one in aside)
    misfits = sum(one.has_row for one in aside)
    mine = files.get((task.queue, task.start), [])
    archived = Archived(
        task.start,
        task.end,
        holes,
        len(aside) - holes - misfits,
        counted.source_bytes,
        tuple(sorted(mine, key=lambda file: (file.store_min_ms // DAY_MS, file.low))),
        _side(archive, task, aside),
        source.sources(task),
        misfits=misfits,
        schema=KAFKA_SCHEMA if task.layout.is_kafka else SCHEMA_VERSION,
        columns=task.layout.number,
        has_records=task.layout.has_records,
        left_out=tuple(sorted(counted.bodies.left_out.items())),
        unfit=tuple(sorted(counted.bodies.unfit.items())),
    )
    if not archived.is_whole:
        raise InternalError(
            f"{task.queue} [{task.start}, {task.end}) does not reconcile: {archived.rows} rows,"
            f" {archived.holes} holes, {archived.bad} bad records; it is not published"
        )
    return archived


def _side(archive: ObjectStore, task: Task, found: list[Aside]) -> SideFile | None:
    if not found:
        return None
    aside = sorted(found, key=lambda one: one.queue_offset)
    data = write_small(side_table(task.queue, aside))
    key = side_key(task.queue, task.start, task.end, task.origin)
    try:
        archive.put_if_absent(key, data)
    except AlreadyExistsError:
        data = archive.get(key)
        if read_columns(data)["queue_offset"].to_pylist() != [one.queue_offset for one in aside]:
            raise _another(archive, key) from None
    return SideFile(key, len(aside), len(data), zlib_ng.crc32(data))


def by_day(rows: pa.RecordBatch) -> list[tuple[int, pa.RecordBatch]]:
    """Rows by UTC day of store time, each day's in order."""
    arrow = load_pyarrow()
    micros = rows.column("store_ts").view(arrow.int64()).to_numpy()
    days = micros // (DAY_MS * 1000)
    if len(days) and (days == days[0]).all():
        return [(int(days[0]), rows)]
    # Kafka's producers may say any time: a look at all rows for each day could take for ever.
    order = np.argsort(days, kind="stable")
    found, starts = np.unique(days[order], return_index=True)
    rows = rows.take(arrow.array(order))
    bounds = [*starts.tolist(), len(days)]
    return [
        (day, rows.slice(low, high - low))
        for day, (low, high) in zip(found.tolist(), pairwise(bounds), strict=True)
    ]


def publish_file(archive: ObjectStore, key: str, written: Written) -> tuple[int, int]:
    """Put a file, or adopt one that has the same rows.

    Returns:
        Size and CRC-32 of what lies there then.
    """
    try:
        archive.put_if_absent(key, written.data)
    except AlreadyExistsError:
        present = archive.get(key)
        crc = zlib_ng.crc32(present)
        if crc != written.crc and not _has_same_rows(present, b"".join(written.data)):
            raise _another(archive, key) from None
        return len(present), crc
    return written.size_bytes, written.crc


def _has_same_rows(present: bytes, ours: bytes) -> bool:
    """Whether two files hold the same messages, whatever their bytes."""
    names = {"tiered.schema", "tiered.source", "tiered.row_ranges"}
    said, wanted = read_metadata(present), read_metadata(ours)
    if any(said.get(name) != wanted.get(name) for name in names):
        return False
    return have_same_bits(read_columns(present), read_columns(ours))


def _another(archive: ObjectStore, key: str) -> DataError:
    return DataError(
        "something else lies where a file of the archive goes",
        where=f"{archive.url}/{key}",
        do="remove it if you know what it is, and do it again",
    )


# -- a source that is damaged ----------------------------------------------------------------------
#
# A task whose source is damaged is divided: what is sound is archived, and what lies in damaged blocks waits for a repair.
#
# Each sound offset range becomes a task of its own, with its own entry in the log, so the damaged ones in between stay what
# they are: queue offsets of a sealed segment that are not archived. They are named, the next run tries them again, and
# nothing takes them for archived (``tiered.archive.archive_proof``). So a repair of the tier brings them in.

DO: Final = (
    "the rest is archived; `tiered verify URL --deep --store STORE --repair` mends what the broker or another object still"
    " has, and the same archive command brings it in then"
)
"""What to do about messages in damaged blocks."""


def find_lost(context: WorkContext, task: Task) -> tuple[tuple[int, int, str], ...]:
    """Queue offsets of a task that cannot be read, each offset range with what is damaged; empty: all can.

    Memory: a section, where it is damaged.
    """
    reader = task_reader(context.tier, context.prefix, task)
    return tuple(reader.find_lost(QueueOffset(task.start), QueueOffset(task.end)))


def divide(
    task: Task, lost: tuple[tuple[int, int, str], ...]
) -> tuple[list[Task], list[tuple[Task, DataError]]]:
    """What of a task is sound, in order; and what is lost, with why. Neighbours of one cause are one."""
    left: Ranges = ((task.start, task.end),)
    waiting: list[tuple[int, int, str]] = []
    for start, end, why in lost:
        left = without(left, start, end)
        goes_on = bool(waiting) and waiting[-1][1:] == (start, why)
        waiting.append((waiting.pop()[0] if goes_on else start, end, why))
    sound = [_part(task, start, end) for start, end in left]
    return sound, [
        (
            _part(task, start, end),
            DataError(
                f"messages [{start}, {end}) are damaged in the tier: {why}",
                where=str(task.queue),
                do=DO,
            ),
        )
        for start, end, why in waiting
    ]


def _part(task: Task, start: int, end: int) -> Task:
    parts = holding(task.parts, start, end)
    return replace(task, start=start, end=end, parts=parts, is_divided=True)
