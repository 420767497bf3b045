"""The values of an archive: whose messages they are, which files hold them under which keys, and what proves them.

All are immutable. Their rows (``tiered.journal.entry``) are what the archive's log and its checkpoints hold
(docs/formats/archive.md).
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import astuple, replace
from datetime import UTC, datetime
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

from backends.lazy_dataclass import dataclass
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LOG = "_log/"
"""Prefix of the archive's journal. Readers of directories pass over names that begin with an underscore."""
ENTRIES_KEPT = 256
"""Entries of the log that stay at least, so that a job may sleep while others write so many; and how often a run trims."""
SCHEMA_VERSION = 1
KAFKA_SCHEMA = 2
"""Of files that have Kafka's columns, too."""


@dataclass(frozen=True, slots=True, order=True)
class ArchiveQueue:
    """One incarnation of one queue of one broker."""

    cluster: str  # name of the cluster
    broker: str  # name of the broker
    topic: str  # as the tier has it
    queue_id: int  # number of the queue
    incarnation: int  # which incarnation of the queue

    @property
    def message_queue(self) -> MessageQueue:
        """The same without its place and incarnation."""
        return MessageQueue(self.topic, self.queue_id)

    def __str__(self) -> str:
        return f"{self.cluster}/{self.broker} {self.message_queue}"


Kind = tuple[str, str, str]
"""Cluster, broker and topic: only offset ranges of the same may share a file."""


def kind_of(queue: ArchiveQueue) -> Kind:
    """With which others a queue may share files."""
    return queue.cluster, queue.broker, queue.topic


class Truncation(NamedTuple):
    """Which of the ends of a queue that its broker truncated: queue offsets ``[low, high)``.

    Nothing of it is of the tier's parts, which change: they are merged, compacted and given up. What a mark does not know
    again is forgotten a second time, and with it what has come in its place since.
    """

    entry: int
    """Number of the entry of the tier's journal that says so (``Incarnation.cut_by``); 0: not known."""
    low: int  # the first
    high: int  # one past the last

    def knows(self, other: Truncation) -> bool:
        """Whether another mark is of this end.

        Where a journal was rebuilt from bundles alone the other does not say which entry it was; nor, where some of its
        bundles are gone, all of its offsets.
        """
        is_within = self.low <= other.low and other.high <= self.high
        return self == other or (is_within and not other.entry)


class Proof(NamedTuple):
    """What rows prove that are in order of queue offset."""

    low: int  # queue offset of the first row
    high: int  # one past that of the last
    rows: int  # how many
    store_min_ms: int  # smallest store time
    store_max_ms: int  # greatest
    body_crc_sum: int  # sum of the records' own body CRCs
    body_bytes: int  # sum of the bodies' sizes

    @classmethod
    def of(cls, file: ParquetFile) -> Proof:
        """What the log says of a row range."""
        return cls(*(getattr(file, name) for name in cls._fields))

    def beside(self, other: Proof) -> Proof:
        """Of these rows and others, whosever they are."""
        return Proof(
            min(self.low, other.low),
            max(self.high, other.high),
            self.rows + other.rows,
            min(self.store_min_ms, other.store_min_ms),
            max(self.store_max_ms, other.store_max_ms),
            self.body_crc_sum + other.body_crc_sum,
            self.body_bytes + other.body_bytes,
        )


@dataclass(frozen=True, slots=True)
class ParquetFile:
    """One file of messages, all of one UTC day of store time, in order of queue offset.

    Or an offset range's rows in a file that it shares with others, whose key, size and checksum each of them then names.
    """

    key: str  # relative to the archive
    low: int  # queue offset of the first row
    high: int  # one past that of the last
    rows: int  # how many
    size_bytes: int  # of the whole object
    crc: int  # CRC-32 of the whole object
    store_min_ms: int  # smallest store time, UTC
    store_max_ms: int  # greatest
    body_crc_sum: int  # sum of the records' own body CRCs
    body_bytes: int  # sum of the bodies' sizes, unpacked


@dataclass(frozen=True, slots=True)
class SideFile:
    """A file of what could not become rows: holes, and records that cannot be unpacked, each with its reason."""

    key: str  # relative to the archive
    rows: int  # how many
    size_bytes: int  # of the object
    crc: int  # CRC-32 of the object


@dataclass(frozen=True, slots=True)
class Archived:
    """Queue offsets ``[start, end)`` of a queue, archived: every one is a row, a hole or a bad record."""

    start: int  # first queue offset
    end: int  # one past the last
    holes: int  # offsets that the source knows to have no message
    bad: int  # records that could not be unpacked
    source_bytes: int  # bytes of the source's commit log
    files: tuple[ParquetFile, ...]  # in order of day and offset; none when there is no row
    side: SideFile | None  # holes and bad records; None when there are none
    sources: tuple[tuple[str, str], ...]
    """Key below the broker's prefix and version (ETag) of each bundle read, in order."""
    schema: int = SCHEMA_VERSION  # version of the files' schema
    misfits: int = 0
    """Messages whose bodies did not fit their topic's columns: rows, and in the side file too."""
    columns: int = 0
    """Which of the columns that the log has fixed for the topic's bodies the files have, from 1; 0 is none."""
    has_records: bool = False  # the files have the stored bytes of each record
    left_out: tuple[tuple[str, int], ...] = ()
    """Members of bodies that no column is of, each with how many values it had."""
    unfit: tuple[tuple[str, int], ...] = ()
    """Members that did not fit their columns, each with in how many rows."""

    @property
    def rows(self) -> int:
        """Messages in its files."""
        return sum(file.rows for file in self.files)

    def proves(self, other: Archived) -> bool:
        """Whether another offset range has the same rows, holes and bad records, by what logs say, whatever its columns."""
        return self._known() == other._known()

    def _known(self) -> tuple[object, ...]:
        rows = reduce(Proof.beside, map(Proof.of, self.files)) if self.files else None
        return self.start, self.end, self.holes, self.bad, rows

    def objects(self) -> tuple[ParquetFile | SideFile, ...]:
        """All files that it names."""
        return (*self.files, self.side) if self.side else self.files

    @property
    def is_whole(self) -> bool:
        """Every offset is accounted for, and nothing beside."""
        side = self.side.rows if self.side else 0
        inside = all(self.start <= file.low < file.high <= self.end for file in self.files)
        counted = self.rows + self.holes + self.bad == self.end - self.start
        aside = self.holes + self.bad + self.misfits
        return counted and inside and side == aside and 0 <= self.misfits <= self.rows


@dataclass(frozen=True, slots=True)
class MovedRows:
    """Rows of one offset range in one file."""

    queue: ArchiveQueue
    file: ParquetFile
    """The numbers of these rows, with key, size and checksum of the file that holds them."""

    @property
    def mark(self) -> tuple[ArchiveQueue, int]:
        """What it is known by."""
        return self.queue, self.file.low


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file that takes the place of others."""

    key: str  # relative to the archive
    size_bytes: int  # of the object
    crc: int  # CRC-32 of the object
    row_ranges: tuple[MovedRows, ...]  # what it holds, as it lay before
    epoch: int = 0  # of the archive when it was planned; see ``Fence``


@dataclass(frozen=True, slots=True)
class Fence:
    """Which files an entry may still make part of the archive, so that others can be deleted.

    A job has read the epoch in the log before it makes files, and their keys depend on it. A fence begins the next epoch
    and names the keys that are about to be deleted. Behind it no entry can name these: who knows the new epoch makes other
    keys, work of the epoch before is refused if it has one of them, and older work is refused whatever it has. So a file
    that a fence has condemned may be deleted at any time, also by a process that has slept for a week.
    """

    epoch: int = 0  # how many fences there were
    condemned: frozenset[str] | None = frozenset()
    """Keys that the last one named; None: all of work from before."""

    def lets(self, epoch: int, keys: Iterable[str]) -> bool:
        """Whether files that were planned in an epoch may become part of the archive."""
        if epoch == self.epoch:
            return True
        if self.condemned is None or epoch != self.epoch - 1:
            return False
        return self.condemned.isdisjoint(keys)


@dataclass(frozen=True, slots=True)
class Replaced:
    """An object that nothing names any more."""

    key: str  # relative to the archive
    size_bytes: int  # of the object
    at_ms: int  # time of the entry since which that is so


def whole_files(row_ranges: Iterable[ParquetFile]) -> list[ParquetFile]:
    """One file of each key, with the numbers of all its row ranges together; in the order in which they first come."""
    found: dict[str, ParquetFile] = {}
    for row_range in row_ranges:
        known = found.get(row_range.key)
        if known is None:
            found[row_range.key] = row_range
            continue
        together = Proof.of(known).beside(Proof.of(row_range))
        found[row_range.key] = replace(known, **together._asdict())
    return list(found.values())


# -- keys ------------------------------------------------------------------------------------------
#
# Keys of an archive's objects, as Hive's partitions: ``data/topic_dir=…/date=…/<queue>-<low>-<high>-<digest>.parquet``.
#
# What readers of directories make of a key has to be true for each row below it, and must not be a column of the files too:
# so the names of topics in keys are names of folders (``topic_dir``), since they are escaped and cut, and a file that queues
# share is possible because no partition says a queue. Nothing but files of messages ends in ``.parquet``. Nobody here parses
# a key: what is known of a file says the log.
#
# A key is a pure function of the sealed segments, or of the files, that the file is made of, so that the same work
# done again, after a crash or beside us, makes the same object. The digest tells brokers and incarnations apart, and an
# incarnation that the broker truncated from the one that came in its place; and it changes with the schema and with the
# columns that are added to it, since no object is ever replaced. A file of several row ranges has their number in the place
# of queue and offsets.

DAY_MS = 86_400_000
DATA = "data/"
"""Below it lie the messages, and nothing else: all of it may be read as one table."""
FILES = f"{DATA}topic_dir="
"""What the keys of all files with messages begin with."""
SIDE = "_bad/"
PROBES = "_probe/"
"""Where a run tries out what the store can do. Readers of directories pass over names that begin with an underscore."""
PROBE_OLD_MS = 3_600_000
"""What has lain there for so long is of a run that was killed; a probe takes seconds."""
_SAFE = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-.")
_NAME_BYTES_MAX = 200
_OFFSET_DIGITS = 20
_PLAINLY_TEXT = re.compile(rb"[A-Za-z%_]")
_WORDS = frozenset(
    {"true", "false", "null", "none", "nan", "inf", "infinity", "__hive_default_partition__"}
)
"""Readers of directories guess types: what one of them takes for a number, a time or one of these is not a folder's name."""


def partition_value(name: str) -> str:
    """A topic's name as the value of a partition: other than letters, digits and ``_ - .`` is ``%XX``.

    A name that becomes longer than a key's segment may be is cut and ends in a hash of the whole, and one that might be
    taken for something else than a text ends in ``~``; the column ``topic`` always has the whole, and nothing but it.
    """
    raw = name.encode("utf-8", "surrogateescape")
    text = "".join(chr(byte) if byte in _SAFE else f"%{byte:02X}" for byte in raw)
    if len(text) < _NAME_BYTES_MAX:
        is_text = _PLAINLY_TEXT.match(raw) and name.casefold() not in _WORDS
        return text if is_text else f"{text}~"
    return f"{text[:_NAME_BYTES_MAX].rpartition('%')[0]}~{hashlib.sha256(raw).hexdigest()[:16]}"


def date_text(day: int) -> str:
    """A day since 1970 as ``YYYY-MM-DD``, UTC; a day that no calendar has as its number."""
    try:
        return datetime.fromtimestamp(day * 86_400, UTC).date().isoformat()
    except (ValueError, OverflowError, OSError):
        return f"day{day}"


def folder_key(topic: str, day: int) -> str:
    """What keys of a topic's messages begin with that were stored on a day; ends in a slash."""
    return f"{FILES}{partition_value(topic)}/date={date_text(day)}/"


def file_key(
    day: int, row_ranges: Sequence[tuple[ArchiveQueue, int, int, str]], epoch: int = 0
) -> str:
    """Key of a file of one topic's messages that were stored on a day.

    Args:
        day: Since 1970, UTC.
        row ranges: In order: whose rows ``[low, high)`` they are, and where they come from: ``Task.origin``, or the key
            of the file in which they lay before.
        epoch: Of the archive, where the row ranges do not tell it.
    """
    queue, low, high, _ = row_ranges[0]
    known = [(*astuple(one), *more) for one, *more in row_ranges]
    said = (SCHEMA_VERSION, known, epoch) if epoch else (SCHEMA_VERSION, known)
    name = f"{_span(queue, low, high)}-" if len(row_ranges) == 1 else f"{len(row_ranges)}-"
    return f"{folder_key(queue.topic, day)}{name}{digest_of(said)}.parquet"


def side_key(queue: ArchiveQueue, low: int, high: int, origin: str) -> str:
    """Key of what could not become rows. Behind an underscore, where readers of directories do not look."""
    folder = f"{SIDE}topic_dir={partition_value(queue.topic)}/"
    return f"{folder}{_span(queue, low, high)}-{origin}.side"


_FOLDER = r"topic_dir=[A-Za-z0-9_.%~-]{1,255}/"
_SPAN = r"\d{1,10}-\d{20}-\d{20}"
_DIGEST = r"[0-9a-f]{16}"
_OURS = re.compile(
    rf"{DATA}{_FOLDER}date=(\d{{4}}-\d\d-\d\d|day-?\d+)/({_SPAN}|\d+)-{_DIGEST}\.parquet"
    rf"|{SIDE}{_FOLDER}{_SPAN}-{_DIGEST}\.side"
)


def is_made_key(key: str) -> bool:
    """Whether a key has the form of those that an archiver makes: what lies below ``data/`` otherwise is somebody else's."""
    return _OURS.fullmatch(key) is not None


def _span(queue: ArchiveQueue, low: int, high: int) -> str:
    return f"{queue.queue_id}-{low:0{_OFFSET_DIGITS}d}-{high:0{_OFFSET_DIGITS}d}"


def digest_of(known: tuple[object, ...]) -> str:
    """Sixteen hex digits that tell values from others."""
    return hashlib.sha256(repr(known).encode("utf-8", "surrogateescape")).hexdigest()[:16]
