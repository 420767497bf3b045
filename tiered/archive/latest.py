"""The newest row of each key of a topic, as a table of its own beside the history in an archive.

Overview: ``update_latest`` reads the keys of all rows that count (no body), finds of each key the newest row, as key
compaction does (``tiered.compaction.newest``), reads those rows whole, and writes them into files below ``_latest/``. A
*version* names them: a small object, created and never replaced; the one with the greatest number counts. The history stays
as it is.

What is in it: of each queue's last incarnation the newest row of each ``msg_key``, or across queues by store time; not those
whose body is empty, which delete their key; rows without a key have no place in it.

Ordering: files, then their version. Readers see one version or another, never a mix.

Retries and crashes: a run that was killed leaves files that no version names; a run that comes too late (another version has
come since its plan) takes its own away and plans again. Files of older versions, and those of killed runs, go when they are
older than a grace, with the next run that makes a version or with ``archive --clean``. Nothing is done when the rows of the
history are those of the last version.

Damage: a table is derived, so one that is damaged is as good as none, and is made again: by the next run where a listing or
the version's checksum shows it, else once ``archive --verify --repair`` has taken it away. It stops no other table.

Memory: 160 bytes of each key, a row group, and one file of the table.
"""

from __future__ import annotations

import hashlib
import logging
import re
from dataclasses import astuple, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from zlib_ng import zlib_ng

from backends.errors import AlreadyExistsError, ObjectNotFoundError
from backends.lazy_dataclass import dataclass
from backends.wrapping import put_own
from tiered.api.arrow import load_pyarrow
from tiered.archive.checked_ranges import ObjectFile, reading, with_sums
from tiered.archive.machine import ArchiveMachine
from tiered.archive.model import LOG, partition_value
from tiered.archive.parquet import open_writer, read_columns
from tiered.archive.selection import Selection, shown
from tiered.archive.tables import open_parquet, plan_files, read_archive
from tiered.compaction.newest import KEYED, NO_LIMIT, ROW, Newest, digest_many, is_among
from tiered.crashpoints import reached
from tiered.errors import DataError, InvalidError, OtherVersionError, TieredStoreError
from tiered.journal.entry import as_object, document_of, open_text, seal_text
from tiered.journal.replay import JournalReader

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    import numpy.typing as npt
    import pyarrow as pa

    from backends.base import ObjectInfo, ObjectStore
    from tiered.api.broker_place import Place
    from tiered.archive.model import ArchiveQueue
    from tiered.archive.tables import Chosen
    from tiered.clock import Clock

_LOG = logging.getLogger(__name__)
ROOT: Final = "_latest/"
"""Readers of directories pass over it; no file below it ends in ``.parquet``, for the sake of those who go by names."""
GRACE_MS: Final = 86_400_000
_FILE_BYTES: Final = 128 << 20
"""Of rows as Arrow has them, about, of one file."""
_GROUP_ROWS: Final = 32_768
DO_MAKE_AGAIN: Final = (
    "`archive --verify --repair` takes the table away, and `compact --archive` makes it again"
)
_TRIES: Final = 5
"""Others that make a version before a run is done, in a row."""
_OURS: Final = re.compile(
    r"(_latest/[^/]+/[^/]+/topic_dir=[^/]+/)(versions/\d{20}\.json|(?!versions/)[\w-]+/\d{1,9})"
)
_NARROW: Final = ("broker", "queue_id", "incarnation", "queue_offset", "store_ts", "msg_key")


@dataclass(frozen=True, slots=True)
class LatestVersion:
    """A version of the table of one topic."""

    number: int  # of the version; the greatest counts
    log_number: int  # of the last entry of the archive's log that it knows
    source: str
    """Of which rows it was made: a digest of files, offset ranges and the rule. Empty: of none, it is not a table."""
    made_ms: int  # when, UTC
    rows: int  # in all files
    files: tuple[tuple[str, int, int, int], ...]  # key, rows, bytes and CRC-32 of each

    @property
    def is_table(self) -> bool:
        """False: it was made before the first, or in the place of a damaged one, and there is no table until the next."""
        return bool(self.source)

    @classmethod
    def of(cls, text: bytes, where: str) -> LatestVersion:
        """Of its text.

        Raises:
            OtherVersionError: It is whole, and of another form.
        """
        try:
            said = open_text(text, where=where)
        except DataError as error:
            raise DataError(
                f"a version of a table of newest rows is damaged: {error.what}",
                where=where,
                do=DO_MAKE_AGAIN,
            ) from error
        try:
            return as_object(cls).decode({n: one for n, one in said.items() if n in cls.__slots__})
        except (ValueError, TypeError) as error:
            raise OtherVersionError(
                f"a version of a table has another form: {error!r:.80}", where=where
            ) from error


def latest_version(archive: ObjectStore, place: Place, topic: str) -> LatestVersion | None:
    """The version that counts; None: there is none yet."""
    return _newest(archive, _folder(place, topic))


def latest_versions(
    archive: ObjectStore, topics: Collection[str], is_asked: Callable[[str], bool]
) -> dict[str, list[LatestVersion]]:
    """The versions that count, one of each broker, of those topics that have any. One listing, and a request for each.

    Args:
        is_asked: Whether somebody wants a topic's rows. Of the others it is enough to know that there is a table, so damage
            there stops nobody: they have no version then.

    Raises:
        DataError: One that is asked for is damaged; ``OtherVersionError``: another version's.
    """
    folders = {f"/topic_dir={partition_value(topic)}/versions": topic for topic in topics}
    newest: dict[str, str] = {}
    for key in _version_keys(archive, ROOT):
        folder = key.rpartition("/")[0]
        newest[folder] = max(key, newest.get(folder, ""))
    found: dict[str, list[LatestVersion]] = {}
    for folder, key in sorted(newest.items()):
        topic = folders.get("/" + "/".join(folder.split("/")[-2:]))
        if topic is None:
            continue
        try:
            version = LatestVersion.of(archive.get(key), key)
        except (DataError, OtherVersionError):
            if is_asked(topic):
                raise
            found.setdefault(topic, [])
        else:
            if version.is_table:
                found.setdefault(topic, []).append(version)
    return found


@dataclass(frozen=True, slots=True)
class LatestPlan:
    """What there is to do for one topic."""

    place: Place
    """Which broker's rows: an archive may hold those of several, each with a table of its own."""
    topic: str
    log_number: int  # of the archive's log
    files: tuple[Chosen, ...]  # that hold rows which may be the newest
    source: str  # see ``LatestVersion``
    number: int  # of the last version; 0: there is none
    before: LatestVersion | None
    """The version that counts now; None also where it, or one of its files, is damaged or gone."""
    across_queues: bool  # the newest of a key in all queues

    @property
    def has_work(self) -> bool:
        """The history has other rows than when the last version was made."""
        return self.before is None or self.before.source != self.source

    def document(self) -> dict[str, Any]:
        """For people and programs."""
        return {
            "topic": self.topic,
            "has_work": self.has_work,
            "files": len(self.files),
            "rows": sum(file.rows for file in self.files),
            "size_bytes": sum(file.size_bytes for file in self.files),
            "latest_rows": self.before.rows if self.before else None,
            "latest_files": [key for key, *_ in self.before.files] if self.before else [],
        }


def plan_latest(
    archive: ObjectStore, place: Place, topic: str, *, across_queues: bool
) -> LatestPlan:
    """What there is to do. Reads the log; changes nothing.

    Raises:
        InvalidError: There is no archive, or it has no such topic.
        DataError: The log is damaged. The last version is made again where it is.
        OtherVersionError: The last version is another version's.
    """
    log = JournalReader(archive, LOG, ArchiveMachine())
    state = read_archive(archive, log)
    wanted = Selection().among("topic", [shown(topic)]).among("broker", [shown(place.broker)])
    newest: dict[int, int] = {}
    files = plan_files(state, wanted).files
    for file in files:  # a broker of another cluster may have the same name, and other incarnations
        file.row_ranges = [o for o in file.row_ranges if o.queue.cluster == place.cluster]
        for queue in (one.queue for one in file.row_ranges):
            newest[queue.queue_id] = max(queue.incarnation, newest.get(queue.queue_id, 0))
    for file in files:
        file.row_ranges = [
            one for one in file.row_ranges if one.queue.incarnation == newest[one.queue.queue_id]
        ]
    files = [file for file in files if file.row_ranges]
    said = [
        (file.key, [(astuple(one.queue), one.low, one.high) for one in file.row_ranges])
        for file in files
    ]
    digest = hashlib.sha256(repr((across_queues, said)).encode("utf-8", "surrogateescape"))
    number, before = _whole(archive, _folder(place, topic))
    return LatestPlan(
        place, topic, log.number, tuple(files), digest.hexdigest(), number, before, across_queues
    )


def _whole(archive: ObjectStore, folder: str) -> tuple[int, LatestVersion | None]:
    """Number of the last version, and itself; None: one listing tells that it or one of its files is not as it was."""
    sizes = {info.key: info.size_bytes for info in archive.list(folder)}
    number = _last_number(sizes, folder)
    if not number:
        return 0, None
    key = _version_key(folder, number)
    try:
        version = LatestVersion.of(archive.get(key), key)
    except DataError as error:
        _LOG.warning("made again: %s", error)
        return number, None
    lost = [key for key, _, size, _ in version.files if sizes.get(key) != size]
    for file in lost:
        _LOG.warning("made again: a table of newest rows whose file is gone or cut (%s)", file)
    return number, None if lost else version


def _last_number(keys: Iterable[str], folder: str) -> int:
    """Of the versions among keys of a table's folder; 0: there is none."""
    mine = (key for key in keys if key.startswith(f"{folder}versions/") and _is_version(key))
    last = max(mine, default="")
    return int(last.rpartition("/")[2].removesuffix(".json") or 0)


def update_latest(
    archive: ObjectStore, plan: LatestPlan, clock: Clock, new_id: str, *, grace_ms: int = GRACE_MS
) -> LatestVersion:
    """Carry out a plan; the version that counts then, ours or one that another made of as much or more.

    Args:
        archive: With retries.
        grace_ms: Files that no version names any more, or never did, stay so long.

    Raises:
        DataError: A file of the archive is damaged. The last version counts on.
        InvalidError: Others were faster, time and again.
        BackendError: A store failed; likewise.
    """
    for tried in range(_TRIES):
        if plan.before is not None and not plan.has_work:
            return plan.before
        made = _make(archive, plan, clock, f"{new_id}-{tried}" if tried else new_id)
        if made is not None:
            reached("latest-named")
            folder = _folder(plan.place, plan.topic)
            delete_leftovers(archive, folder, clock.now_ms() - grace_ms, clock.now_ms())
            return made
        plan = plan_latest(archive, plan.place, plan.topic, across_queues=plan.across_queues)
    raise InvalidError(
        f"others have made versions of the table of {shown(plan.topic)} each time before this run was done",
        where=archive.url,
        do="run it again when they are done; theirs counts",
    )


def _make(archive: ObjectStore, plan: LatestPlan, clock: Clock, run: str) -> LatestVersion | None:
    """Files and their version; None, and nothing is left, when another version has come since the plan."""
    winners = _winners(archive, plan)
    folder = _folder(plan.place, plan.topic)
    files = tuple(_write(archive, f"{folder}{run}/", _rows(archive, plan, winners)))
    reached("latest-written")
    rows = sum(file[1] for file in files)
    number = plan.number + 1
    made = LatestVersion(number, plan.log_number, plan.source, clock.now_ms(), rows, files)
    if _name(archive, folder, made):
        last = _last_number((info.key for info in archive.list(f"{folder}versions/")), folder)
        # A number of long ago is free again once its version was deleted: then readers never saw this one.
        return made if last <= number else None
    for key, *_ in files:
        archive.delete(key)
    return None


def _name(archive: ObjectStore, folder: str, made: LatestVersion) -> bool:
    """Create a version; whether its number was free, or it is ours and its first answer was lost."""
    key, text = _version_key(folder, made.number), seal_text({"format": 1, **document_of(made)})
    try:
        archive.put_if_absent(key, text)
    except AlreadyExistsError:
        try:
            return archive.get(key) == text
        except ObjectNotFoundError:  # deleted since: whatever it was, others came behind it
            return False
    return True


def _folder(place: Place, topic: str) -> str:
    names = f"{partition_value(place.cluster)}/{partition_value(place.broker)}"
    return f"{ROOT}{names}/topic_dir={partition_value(topic)}/"


def _version_key(folder: str, number: int) -> str:
    return f"{folder}versions/{number:020d}.json"


def _newest(archive: ObjectStore, folder: str) -> LatestVersion | None:
    key = max(_version_keys(archive, f"{folder}versions/"), default=None)
    return LatestVersion.of(archive.get(key), key) if key else None


def _version_keys(archive: ObjectStore, prefix: str) -> Iterator[str]:
    return (info.key for info in archive.list(prefix) if _is_version(info.key))


def _is_version(key: str) -> bool:
    """What lies beside versions, as a copy that a person made, must not be taken for the newest."""
    found = _OURS.fullmatch(key)
    return found is not None and found[2].startswith("versions/")


# -- what is left of runs and versions of before ---------------------------------------------------


def folder_of(key: str) -> str | None:
    """The folder of a table in which a key of ours lies; None: it has not the form of one."""
    found = _OURS.fullmatch(key)
    return found[1] if found else None


def plan_leftovers(
    archive: ObjectStore, listed: Iterable[ObjectInfo], before_ms: int
) -> tuple[list[ObjectInfo], bool]:
    """What of a table's folder may go: versions that were replaced before a time, with their files; and unnamed files.

    A run's files are as old as its newest: one that takes longer than the grace keeps what it made first. Where a store does
    not tell how old an object is, it is young.

    Returns:
        These, files before versions; and whether some of the files were never named, so that a run that sleeps may be about
        to name them.

    Raises:
        DataError: The last version is damaged; ``OtherVersionError``: one is another version's.
    """
    every = sorted(listed, key=lambda info: info.key)
    keys = [info for info in every if "/versions/" in info.key]
    versions = [_named(archive, info.key, is_last=info is keys[-1]) for info in keys]
    gone = [n for n, after in enumerate(versions[1:]) if after.made_ms < before_ms]
    named = {key for n, one in enumerate(versions) if n not in gone for key, *_ in one.files}
    replaced = {key for n in gone for key, *_ in versions[n].files}
    files = [info for info in every if "/versions/" not in info.key and info.key not in named]
    newest_ms: dict[str, int] = {}
    for info in files:
        run = info.key.rpartition("/")[0]
        newest_ms[run] = max(info.modified_ms, newest_ms.get(run, 0))
    old = [
        info
        for info in files
        if info.key in replaced
        or (info.modified_ms >= 0 and newest_ms[info.key.rpartition("/")[0]] < before_ms)
    ]
    return [*old, *(keys[n] for n in gone)], any(info.key not in replaced for info in old)


def _named(archive: ObjectStore, key: str, *, is_last: bool) -> LatestVersion:
    """A version. One that is damaged, and has another behind it, names nothing: what it named is as if it never was."""
    try:
        return LatestVersion.of(archive.get(key), key)
    except DataError:
        if is_last:
            raise
        return LatestVersion(0, 0, "", 0, 0, ())


def damaged_tables(archive: ObjectStore) -> dict[str, TieredStoreError]:
    """What is wrong with tables of newest rows, by key of a version or file, in order. Every byte that counts is read.

    Versions of another form are among it (``OtherVersionError``).
    """
    found: dict[str, TieredStoreError] = {}
    keys = sorted(info.key for info in archive.list(ROOT) if folder_of(info.key))
    for folder, mine in groupby(keys, lambda key: folder_of(key) or ""):
        there = list(mine)
        if number := _last_number(there, folder):
            found |= _damage_of(archive, _version_key(folder, number), set(there))
    return found


def _damage_of(
    archive: ObjectStore, key: str, there: Collection[str]
) -> dict[str, TieredStoreError]:
    try:
        version = LatestVersion.of(archive.get(key), key)
    except (DataError, OtherVersionError) as error:
        return {key: error}
    except ObjectNotFoundError:  # others have just replaced it
        return {}
    found: dict[str, TieredStoreError] = {}
    for file, _, _, crc in version.files:
        try:
            wrong = file not in there or zlib_ng.crc32(archive.get(file)) != crc
        except ObjectNotFoundError:
            wrong = True
        if wrong:
            found[file] = DataError(
                "it is gone, or has other bytes than its version says", where=file, do=DO_MAKE_AGAIN
            )
    return found


def give_up(archive: ObjectStore, folder: str, now_ms: int) -> bool:
    """Have no table count: for one that is damaged, until the next run makes it again. Whether that was done."""
    number = _last_number((info.key for info in archive.list(f"{folder}versions/")), folder) + 1
    return _name(archive, folder, LatestVersion(number, 0, "", now_ms, 0, ()))


def delete_leftovers(
    archive: ObjectStore, folder: str, before_ms: int, now_ms: int
) -> list[ObjectInfo]:
    """Delete what may go of a table's folder.

    Before a file goes that no version ever named, a version is made of the same files as the last: a run makes only the
    version behind the one that it knew before its first file, so none of before can name anything any more.

    Returns:
        What was deleted: nothing when a run has just made a version.

    Raises:
        DataError: A version is damaged.
    """
    newest = _newest(archive, folder)
    listed = [info for info in archive.list(folder) if folder_of(info.key) == folder]
    gone, needs_fence = plan_leftovers(archive, listed, before_ms)
    if needs_fence:
        last = newest or LatestVersion(0, 0, "", now_ms, 0, ())
        if not _name(archive, folder, replace(last, number=last.number + 1, made_ms=now_ms)):
            return []
    for info in gone:
        archive.delete(info.key)
    return gone


# -- which rows --------------------------------------------------------------------------------------


def _queues(plan: LatestPlan) -> list[ArchiveQueue]:
    return sorted({row_range.queue for file in plan.files for row_range in file.row_ranges})


def _winners(archive: ObjectStore, plan: LatestPlan) -> list[npt.NDArray[np.int64]]:
    """Of each queue the queue offsets of rows that are the newest of their key, ascending."""
    at = {queue: number for number, queue in enumerate(_queues(plan))}
    newest = Newest(NO_LIMIT, is_across=plan.across_queues)
    for file in plan.files:
        for _, _, batch in _groups(archive, file, _NARROW):
            for queue, mask in file.masks(batch):
                if mask.any():
                    newest.put(_places(batch, mask, at[queue]))
    rows = newest.rows()
    return [np.sort(rows["offset"][rows["queue"] == number]) for number in at.values()]


def _groups(
    archive: ObjectStore, file: Chosen, columns: Sequence[str] | None
) -> Iterator[tuple[Any, int, pa.RecordBatch]]:
    """The open file, number and rows of each row group."""
    with reading(archive, file.key):
        opened = open_parquet(ObjectFile(archive, file.key, file.size_bytes))
        for number in range(opened.metadata.num_row_groups):
            table = opened.read_row_group(number, None if columns is None else list(columns))
            for batch in table.combine_chunks().to_batches():
                yield opened, number, batch


def _places(
    batch: pa.RecordBatch, mask: npt.NDArray[np.bool_], number: int
) -> npt.NDArray[np.void]:
    """Those rows that have a key, as compaction looks at them."""
    arrow = load_pyarrow()
    some = batch.filter(arrow.array(mask))
    keys = some.column("msg_key").cast(arrow.binary()).fill_null(b"")
    _, bounds, data = keys.buffers()
    ends = np.frombuffer(bounds, np.int32)[keys.offset : keys.offset + len(keys) + 1]
    starts, sizes = ends[:-1].astype(np.int64), np.diff(ends).astype(np.int64)
    real = np.flatnonzero(sizes > 0)
    rows = np.zeros(len(real), ROW)
    if len(real):
        digests = digest_many(memoryview(data), starts[real], sizes[real])
        rows["high"], rows["low"] = digests[:, 0], digests[:, 1]
    rows["offset"] = some.column("queue_offset").to_numpy(zero_copy_only=False)[real]
    times = some.column("store_ts").cast(arrow.int64()).to_numpy(zero_copy_only=False)[real]
    rows["time_ms"], rows["queue"] = times, number
    rows["flags"] = KEYED
    return rows


# -- files of the table ------------------------------------------------------------------------------


def _rows(
    archive: ObjectStore, plan: LatestPlan, winners: list[npt.NDArray[np.int64]]
) -> Iterator[pa.Table]:
    """The newest rows with all their columns, without those that delete their key."""
    arrow, at = load_pyarrow(), {queue: number for number, queue in enumerate(_queues(plan))}
    for file in plan.files:
        for opened, number, batch in _groups(archive, file, _NARROW):
            kept = np.zeros(batch.num_rows, np.bool_)
            offsets = batch.column("queue_offset").to_numpy(zero_copy_only=False)
            for queue, mask in file.masks(batch):
                kept |= mask & is_among(winners[at[queue]], offsets)
            if kept.any():
                with reading(archive, file.key):
                    table = opened.read_row_group(number).filter(arrow.array(kept))
                payload = "value" if "value" in table.schema.names else "body"
                sizes = arrow.compute.binary_length(table.column(payload))
                yield table.filter(arrow.compute.greater(sizes.fill_null(0), 0))


def _write(
    archive: ObjectStore, folder: str, tables: Iterator[pa.Table]
) -> Iterator[tuple[str, int, int, int]]:
    held: list[pa.Table] = []
    number = 0
    for table in tables:
        held.append(table)
        if sum(one.nbytes for one in held) >= _FILE_BYTES:
            yield _put(archive, f"{folder}{number:06d}", held)
            held, number = [], number + 1
    if sum(one.num_rows for one in held):
        yield _put(archive, f"{folder}{number:06d}", held)


def _put(archive: ObjectStore, key: str, tables: list[pa.Table]) -> tuple[str, int, int, int]:
    arrow = load_pyarrow()
    # Files from before a topic's bodies got columns have none: there they are null, as for all who begin with the log.
    table = arrow.concat_tables(tables, promote_options="default").replace_schema_metadata(None)
    sink = arrow.BufferOutputStream()
    with open_writer(sink, table.schema, min(_GROUP_ROWS, max(1, table.num_rows))) as writer:
        writer.write_table(table, row_group_size=_GROUP_ROWS)
    data = with_sums(sink.getvalue())
    put_own(archive, key, data)
    return key, table.num_rows, len(data), zlib_ng.crc32(data)


def read_latest(archive: ObjectStore, place: Place, topic: str) -> pa.Table | None:
    """The table, if it fits into memory; None: there is none yet.

    Raises:
        BackendError: The store could not be read; also when its files went since (ask again).
    """
    version = latest_version(archive, place, topic)
    if version is None:
        return None
    arrow, tables = load_pyarrow(), []
    for key, *_, crc in version.files:
        data = archive.get(key)
        if zlib_ng.crc32(data) != crc:
            raise DataError(
                "a file of the table of newest rows has other bytes than its version says",
                where=f"{archive.url}/{key}",
                do=DO_MAKE_AGAIN,
            )
        tables.append(read_columns(data))
    return arrow.concat_tables(tables, promote_options="default") if tables else None
