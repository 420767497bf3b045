"""The task: one sealed segment becomes Parquet objects. The same function runs in this process and in Spark's workers.

Ordering: the whole segment is read and its objects are written; then it returns what they are. Nothing of it is part of
the archive before an entry of the log says so (``tiered.archive.job``).

Retries: keys depend on the segment alone, so whoever does it again makes the same objects. An object that is there already
is read and held against the source; if it has the same rows it is adopted, byte differences aside (another version of
pyarrow). Reads and writes are tried again by the stores that are given.

After a crash: objects that no entry names. Doing it again adopts them.

Memory: ``READ_BYTES`` of records as columns, and for each day that the segment touches a file under way, ended at
``FILE_BYTES`` of columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from zlib_ng import zlib_ng

from backends.errors import AlreadyExistsError
from tiered import __version__
from tiered.api.arrow import load_pyarrow
from tiered.archive.body.wishes import NOTHING, BodyWishes
from tiered.archive.columns import Aside, Columns, side_table
from tiered.archive.model import SCHEMA_VERSION, Archived, ParquetFile, SideFile
from tiered.archive.parquet import FileWriter, Written, read_columns, read_metadata, write_small
from tiered.archive.paths import DAY_MS, file_key, side_key
from tiered.crashpoints import reached
from tiered.errors import DataError, InternalError
from tiered.log.parts import Gap
from tiered.log.reader import READ_BYTES, QueueReader
from tiered.upkeep.workplace import GIVE_UP_S

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    import pyarrow as pa

    from backends.base import ObjectStore
    from tiered.api.broker_place import Place
    from tiered.archive.plan import Task
    from tiered.clock import Clock
    from tiered.log.decode import TierBatch


@dataclass(frozen=True, slots=True)
class Workshop:
    """What an archive job works with.

    Attributes:
        tier: The tier's store, with retries.
        place: Which broker.
        archive: The archive's store, with retries.
        bare: The same without, for the log, which tries again by itself.
        clock: Time.
        rng: For ids and jitter.
        takes: Whether a topic is wanted.
        wishes: What bodies shall become.
        give_up_s: A store that has refused an entry of the log for so long is given up.
    """

    tier: ObjectStore
    place: Place
    archive: ObjectStore
    bare: ObjectStore
    clock: Clock
    rng: random.Random
    takes: Callable[[str], bool] = lambda _topic: True
    wishes: BodyWishes = NOTHING
    give_up_s: float = GIVE_UP_S


FILE_BYTES = 256 << 20
"""A file is ended when its columns took so many bytes, before they were packed."""


def archive_segment(tier: ObjectStore, prefix: str, archive: ObjectStore, task: Task) -> Archived:
    """Make the Parquet objects of one task.

    Args:
        tier: Where the segment lies, with retries.
        prefix: Of the broker.
        archive: Where the objects go, with retries.
        task: What to do.

    Returns:
        What was made; each offset of the task is accounted for.

    Raises:
        DataError: The segment is damaged, or something else lies under one of our keys.
        InternalError: A file did not reconcile; none of it was published.
        ObjectNotFoundError: A part has been merged or has expired meanwhile: plan again.
        BackendError: A store failed.
    """
    work = _TaskWork(archive, prefix, task)
    for batch in _batches(tier, prefix, task):
        work.add(batch)
    files, side = work.finish()
    archived = Archived(
        task.start,
        task.end,
        work.holes,
        work.bad,
        work.source_bytes,
        tuple(sorted(files, key=lambda file: (file.store_min_ms // DAY_MS, file.low))),
        side,
        _sources(tier, prefix, task),
        misfits=work.misfits,
        columns=task.layout.number,
        has_records=task.layout.has_records,
    )
    if not archived.is_whole:
        raise InternalError(
            f"{task.lane} [{task.start}, {task.end}) does not reconcile: {archived.rows} rows,"
            f" {archived.holes} holes, {archived.bad} bad records; it is not published"
        )
    return archived


def _batches(tier: ObjectStore, prefix: str, task: Task) -> Iterator[TierBatch]:
    """All records of a task, checked."""
    reader = QueueReader.of_life(tier, prefix, task.lane.queue, task.life)
    at = task.life.min_offset
    for found in reader.batches(at, bytes_max=READ_BYTES):
        if isinstance(found, Gap) or found.base_offset != at:
            raise InternalError(f"{task.lane} is not continuous at {at}")
        yield found
        at = found.end_offset


def _sources(tier: ObjectStore, prefix: str, task: Task) -> tuple[tuple[str, str], ...]:
    """Key and version of each object, as it is now."""
    keys = dict.fromkeys(bundle.key for bundle in task.parts.bundles)
    return tuple((key, str(tier.head(prefix + key).version or "")) for key in keys)


class _TaskWork:
    """What a task has made so far."""

    def __init__(self, archive: ObjectStore, prefix: str, task: Task) -> None:
        self.source_bytes = 0
        self._archive = archive
        self._prefix = prefix
        self._task = task
        self._columns = Columns(task.lane, task.layout)
        self._writers: dict[int, FileWriter] = {}
        self._files: list[ParquetFile] = []
        self._aside: list[Aside] = []

    @property
    def holes(self) -> int:
        return sum(one.record is None for one in self._aside)

    @property
    def bad(self) -> int:
        return len(self._aside) - self.holes - self.misfits

    @property
    def misfits(self) -> int:
        return sum(one.has_row for one in self._aside)

    def add(self, batch: TierBatch) -> None:
        records = batch.records
        self.source_bytes += len(memoryview(records.data).cast("B"))
        made, aside = self._columns.make(batch)
        self._aside += aside
        for rows in made:
            for day, some in _by_day(rows):
                writer = self._writers.setdefault(day, FileWriter())
                writer.add(some)
                if writer.size_bytes >= FILE_BYTES:
                    self._end(day)

    def finish(self) -> tuple[list[ParquetFile], SideFile | None]:
        for day in list(self._writers):
            self._end(day)
        return self._files, self._side()

    def _end(self, day: int) -> None:
        reached("archive-writing")
        written = self._writers.pop(day).finish(self._metadata())
        key = file_key(self._task, day, written.low, written.high)
        self._files.append(_publish(self._archive, key, written))
        reached("archive-written")

    def _metadata(self) -> dict[str, str]:
        lane, task, body = self._task.lane, self._task, self._task.layout.body
        return {
            **(
                {"tiered.body_format": body.format, "tiered.body_columns": body.columns}
                if body
                else {}
            ),
            "tiered.schema": str(SCHEMA_VERSION),
            "tiered.program": __version__,
            "tiered.source": self._prefix,
            "tiered.lane": f"{lane.queue} of incarnation {lane.incarnation}",
            "tiered.segment": f"{task.start}-{task.end}",
            "tiered.objects": " ".join(dict.fromkeys(bundle.key for bundle in task.parts.bundles)),
        }

    def _side(self) -> SideFile | None:
        if not self._aside:
            return None
        aside = sorted(self._aside, key=lambda one: one.queue_offset)
        data = write_small(side_table(self._task.lane, aside))
        key = side_key(self._task)
        try:
            self._archive.put_if_absent(key, data)
        except AlreadyExistsError:
            data = self._archive.get(key)
            if read_columns(data)["queue_offset"].to_pylist() != [o.queue_offset for o in aside]:
                raise _another(self._archive, key) from None
        return SideFile(key, len(aside), len(data), zlib_ng.crc32(data))


def _by_day(rows: pa.RecordBatch) -> list[tuple[int, pa.RecordBatch]]:
    """Rows by UTC day of store time, each day's in order."""
    arrow = load_pyarrow()
    micros = rows.column("store_ts").view(arrow.int64()).to_numpy()
    days = micros // (DAY_MS * 1000)
    if len(days) and (days == days[0]).all():
        return [(int(days[0]), rows)]
    return [(day, rows.filter(arrow.array(days == day))) for day in np.unique(days).tolist()]


def _publish(archive: ObjectStore, key: str, written: Written) -> ParquetFile:
    data: Any = written.data
    crc, size = written.crc, len(data)
    try:
        archive.put_if_absent(key, data)
    except AlreadyExistsError:
        present = archive.get(key)
        crc, size = zlib_ng.crc32(present), len(present)
        if crc != written.crc and not _has_same_rows(present, data):
            raise _another(archive, key) from None
    numbers = (written.low, written.high, written.rows, size, crc)
    times = (written.store_min_ms, written.store_max_ms)
    return ParquetFile(key, *numbers, *times, written.body_crc_sum, written.body_bytes)


def _has_same_rows(present: bytes, ours: Any) -> bool:  # noqa: ANN401 (a buffer)
    """Whether two files hold the same messages, whatever their bytes."""
    names = {"tiered.schema", "tiered.source", "tiered.segment"}
    said, wanted = read_metadata(present), read_metadata(ours)
    if any(said.get(name) != wanted.get(name) for name in names):
        return False
    same: bool = read_columns(present).equals(read_columns(ours))
    return same


def _another(archive: ObjectStore, key: str) -> DataError:
    return DataError(
        "something else lies where a file of the archive goes",
        where=f"{archive.url}/{key}",
        do="remove it if you know what it is, and archive again",
    )
