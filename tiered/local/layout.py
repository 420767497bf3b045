"""What a store directory is made of, and which directories are refused, each by its name.

Read: a plain store with one commit-log directory and file consume queues (plain and batch), also a slave's, also one
with light queues, compaction topics or ``consumequeue_ext`` (tag codes are then taken from the records).
Refused: RocksDB consume queues, DLedger logs, commit logs spread over several paths, logs with a file missing in the
middle, and what is not a store at all. Static topics are left out by name (``tiered.local.catalog``).
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import struct
import sys
from collections import Counter
from dataclasses import field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from backends.lazy_dataclass import dataclass
from tiered.errors import DataError, InvalidError
from tiered.format.broker_checkpoint import TimerCheck, decode_timer_check
from tiered.format.fastjson import loads
from tiered.format.items import BATCH_ITEM_BYTES, ITEM_BYTES
from tiered.format.record import MAGIC_BLANK, MAGIC_V1, MAGIC_V2
from tiered.local.mapped_file_queue import (
    list_bases,
    list_names,
    open_if_there,
    stat_if_there,
    unreadable,
)
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


# -- layout ------------------------------------------------------------------------------------------


LOG_DIRECTORY: Final = "commitlog"
QUEUE_DIRECTORY: Final = "consumequeue"
BATCH_DIRECTORY: Final = "batchconsumequeue"
EXT_DIRECTORY: Final = "consumequeue_ext"
_MARKS: Final = (LOG_DIRECTORY, QUEUE_DIRECTORY, "checkpoint", "config/topics.json", "lock")
"""What tells a store from any other directory."""
NAME_BYTES_MAX: Final = 255
"""A topic's name is a directory's."""
TOPIC_NAME: Final = re.compile(r"[%|a-zA-Z0-9_-]+")
_QUEUE_ID_MAX: Final = 2**31 - 1
_QUEUE_ID_DIGITS: Final = 10
_DLEDGER_MAGIC: Final = 1
_DLEDGER_HEADER_BYTES: Final = 48
_LOG_BYTES_DEFAULT: Final = 1 << 30
_QUEUE_BYTES_DEFAULT: Final = 6_000_000
_BATCH_BYTES_DEFAULT: Final = 13_800_000


@dataclass(frozen=True, slots=True)
class Layout:
    """A directory that can be read."""

    root: str  # its path
    log_file_bytes: int
    # queue_bytes, batch_bytes: Size of each file of a plain and a batch consume queue, where all have one; 0: of each
    # queue its own files tell.
    """Size of each commit-log file, the broker's default as long as it is not known."""
    queue_bytes: int = 0
    batch_bytes: int = 0

    @property
    def log(self) -> str:
        """Directory of the commit log."""
        return f"{self.root}/{LOG_DIRECTORY}"

    @property
    def has_ext(self) -> bool:
        """Tag codes may be addresses in ``consumequeue_ext``."""
        return Path(f"{self.root}/{EXT_DIRECTORY}").is_dir()

    def queue_file_bytes(self, directory: str, *, is_batch: bool) -> int:
        """Size of the files of a queue whose directory this is."""
        size = self.batch_bytes if is_batch else self.queue_bytes
        return size or queue_file_bytes(directory, is_batch=is_batch)

    def queue_directory(self, queue: MessageQueue, *, is_batch: bool) -> str:
        """Directory of a queue's consume queue."""
        kind = BATCH_DIRECTORY if is_batch else QUEUE_DIRECTORY
        topic = queue.topic
        return f"{self.root}/{kind}/{topic}/{queue.queue_id}"


def inspect(directory: str) -> Layout:
    """Look at a directory before it is opened. DataError: it is a store that cannot be read as it stands."""
    root = str(Path(directory).absolute())
    _check_directory(root)
    names = list_names(root)
    _refuse_foreign(root, names)
    log = f"{root}/{LOG_DIRECTORY}"
    bases = list_bases(log)
    layout = Layout(root, log_file_bytes(log, bases) or _LOG_BYTES_DEFAULT)
    queues = {} if bases else list_queues(root)
    if any(list_bases(layout.queue_directory(queue, is_batch=queues[queue])) for queue in queues):
        raise InvalidError(
            "the store has consume queues and no commit log",
            where=log,
            do="if storePathCommitLog lies elsewhere, put it there by a link",
        )
    if bases:
        _refuse_dledger_record(f"{log}/{bases[0]:020d}")
    return layout


def check_contiguous(log: str, bases: tuple[int, ...], file_bytes: int) -> None:
    """Refuse a log with a file missing in the middle."""
    for before, after in pairwise(bases):
        if after - before != file_bytes:
            raise DataError(
                f"the commit log has a hole: no file {before + file_bytes:020d} before {after:020d}",
                where=log,
                do="if the log is spread over several paths (storePathCommitLog), bring all its "
                "files together by links; else restore the missing file",
            )


def queue_file_bytes(directory: str, *, is_batch: bool) -> int:
    """Size of a queue's files, the broker's default as long as it is not known."""
    default = _BATCH_BYTES_DEFAULT if is_batch else _QUEUE_BYTES_DEFAULT
    return known_queue_file_bytes(directory, is_batch=is_batch) or default


def known_queue_file_bytes(
    directory: str, *, is_batch: bool, bases: tuple[int, ...] | None = None
) -> int:
    """Size of a queue's files: the distance of two, else the length of the only one.

    A length that is not a multiple of the unit is rounded down. 0 when there is no file, or the only one is just being
    made: then nothing is known yet. ``bases``: its files, where they have been listed.
    """
    unit = BATCH_ITEM_BYTES if is_batch else ITEM_BYTES
    bases = list_bases(directory) if bases is None else bases
    steps = [after - before for before, after in pairwise(bases)]
    if not bases:
        return 0
    size = min(steps) if steps else _length(f"{directory}/{bases[0]:020d}")
    return size - size % unit


def list_topics(root: str, strangers: list[str] | None = None) -> list[tuple[str, bool]]:
    """Every topic that has a directory of consume queues, and whether they are batch queues.

    What no topic can be called, and no table of topics names, is not a part of the store (``lost+found``, a file of a file
    manager, somebody's copy): it is passed over, and ``strangers`` gets its path.
    """
    found: list[tuple[str, bool]] = []
    known: frozenset[str] | None = None
    for kind, is_batch in ((QUEUE_DIRECTORY, False), (BATCH_DIRECTORY, True)):
        for name in list_names(f"{root}/{kind}"):
            if not is_topic_name(name):
                known = read_topics(root).names or frozenset() if known is None else known
                if name not in known:
                    _name(strangers, f"{root}/{kind}/{name}")
                    continue
            found.append((name, is_batch))
    return found


def list_topic_queues(
    root: str, topic: str, *, is_batch: bool, strangers: list[str] | None = None
) -> list[MessageQueue]:
    """A topic's queues that have a directory; ``strangers`` gets the paths of whatever else is there.

    A topic's directory that may not be read is a stranger, too, unless the table of topics has it or cannot be read itself.
    """
    directory = f"{root}/{BATCH_DIRECTORY if is_batch else QUEUE_DIRECTORY}/{topic}"
    try:
        names = list_names(directory)
    except InvalidError:
        known = read_topics(root).names
        if known is None or topic in known:
            raise
        _name(strangers, directory)
        return []
    if not names and not Path(directory).is_dir():
        _name(strangers, directory)
    numbers = [name for name in names if _is_queue_id(name)]
    for name in names if len(numbers) < len(names) else ():
        if not _is_queue_id(name):
            _name(strangers, f"{directory}/{name}")
    return [MessageQueue(topic, int(number)) for number in numbers]


def _name(strangers: list[str] | None, path: str) -> None:
    if strangers is not None:
        strangers.append(path)


def _is_queue_id(name: str) -> bool:
    """Whether a directory of this name can be a queue's; ``00`` is not queue 0, which has another."""
    is_number = name.isascii() and name.isdigit() and len(name) <= _QUEUE_ID_DIGITS
    return is_number and str(int(name)) == name and int(name) <= _QUEUE_ID_MAX


def is_topic_name(name: str) -> bool:
    """Whether a broker would take a topic of this name."""
    return len(name) <= NAME_BYTES_MAX and bool(TOPIC_NAME.fullmatch(name))


def list_queues(root: str) -> dict[MessageQueue, bool]:
    """Every queue that has a directory, light queues too, and whether it is a batch queue."""
    return {
        queue: is_batch
        for topic, is_batch in list_topics(root)
        for queue in list_topic_queues(root, topic, is_batch=is_batch)
    }


def _check_directory(root: str) -> None:
    found = stat_if_there(root)
    if found is None:
        raise InvalidError(
            "no such directory",
            where=root,
            do="give a store directory, or make one with `tiered store create`",
        )
    if not stat.S_ISDIR(found.st_mode):
        raise InvalidError("not a directory", where=root, do="give a store directory")


def _refuse_foreign(root: str, names: list[str]) -> None:
    if not names:
        raise InvalidError(
            "an empty directory, not a store", where=root, do="give the broker's storePathRootDir"
        )
    ledgers = [name for name in names if name.startswith("dledger-") and Path(root, name).is_dir()]
    if ledgers:
        raise InvalidError(
            "the store keeps its log in DLedger, which is not supported",
            where=f"{root}/{ledgers[0]}",
            do="attach to a store with an ordinary commit log",
        )
    # A broken link is something, too.
    if not any(stat_if_there(f"{root}/{mark}", follows_links=False) for mark in _MARKS):
        if any(
            found
            for name in names
            if name[8:9] == "_"
            for found in Path(root, name).glob("*/journal")
        ):
            raise InvalidError(
                "this is a tier, and a broker's store is wanted here",
                where=root,
                do="give the broker's storePathRootDir; a tier stands where URL does",
            )
        raise InvalidError(
            "not a RocketMQ store: there is neither commitlog nor checkpoint nor config",
            where=root,
            do="give the broker's storePathRootDir",
        )
    if stat_if_there(f"{root}/{QUEUE_DIRECTORY}/CURRENT", follows_links=False):
        raise InvalidError(
            "the store keeps its consume queues in RocksDB, which is not supported",
            where=f"{root}/{QUEUE_DIRECTORY}",
            do="use a broker with storeType=default",
        )


def log_file_bytes(log: str, bases: tuple[int, ...]) -> int:
    """The distance that most files have from the next, else the only file's length.

    One file that is short (cut, or just being made) or long says nothing of the others, and a distance that is a multiple of
    what all files have in length is that of a hole. 0 when there is no file, or the only one is just being made.
    """
    if len(bases) <= 1:
        return _length(f"{log}/{bases[0]:020d}") if bases else 0
    lengths = Counter(_length(f"{log}/{base:020d}") for base in bases)
    steps = Counter(after - before for before, after in pairwise(bases))
    step = min(steps, key=lambda one: (-steps[one], -lengths[one], one))
    only = next(iter(lengths)) if len(lengths) == 1 else 0
    return only if only and not any(one % only for one in steps) else step


def _length(path: str) -> int:
    found = stat_if_there(path)
    return 0 if found is None else found.st_size


def _refuse_dledger_record(path: str) -> None:
    """A DLedger entry has 48 bytes before the record, beginning with its own magic, 1."""
    descriptor = open_if_there(path)
    if descriptor is None:
        return
    try:
        head = os.pread(descriptor, _DLEDGER_HEADER_BYTES + 8, 0)
    except OSError as error:
        if error.errno != errno.EIO:
            raise unreadable(path, error) from error
        return  # the device fails to read it: reading the log reports that
    finally:
        os.close(descriptor)
    magic = int.from_bytes(head[4:8], "big")
    inner = int.from_bytes(head[_DLEDGER_HEADER_BYTES + 4 :], "big")
    if (
        magic not in {MAGIC_V1, MAGIC_V2, MAGIC_BLANK}
        and int.from_bytes(head[:4], "big") == _DLEDGER_MAGIC
        and inner in {MAGIC_V1, MAGIC_V2}
    ):
        raise InvalidError(
            "the log's records have DLedger headers, which is not supported",
            where=path,
            do="attach to a store with an ordinary commit log",
        )


# -- configs -----------------------------------------------------------------------------------------
#
# The broker's JSON tables in ``config/``, read as they are: not atomic, and in two dialects.
#
# A broker rewrites a table in place (or renames it away first), so a reader may find it missing, empty or cut off. Such
# a file is read again a few times at once; then its ``.bak``, the content before the last change, takes its place and a
# note says so.

_TRIES: Final = 3
TOPICS_FILE: Final = "config/topics.json"
STATIC_TOPICS_FILE: Final = "config/topicQueueMapping.json"
DELAY_OFFSETS_FILE: Final = "config/delayOffset.json"
TIMER_CHECK_FILE: Final = "config/timercheck"
GROUPS_FILE: Final = "config/subscriptionGroup.json"
OFFSETS_FILE: Final = "config/consumerOffset.json"
_SYNC_MEMBER: Final = "rmq_sys_SYNC_BROKER_MEMBER_"
_REVIVE: Final = "rmq_sys_REVIVE_LOG_"
_REPLIES: Final = "_REPLY_TOPIC"
_MODEL_TOPIC: Final = "TBW102"
"""After which topics are made that a message names first; a broker can be told to make it with one queue."""
_PERM_INHERIT: Final = 1


@dataclass(frozen=True, slots=True)
class Topics:
    """What the topic tables tell."""

    names: frozenset[str] | None = None
    """Topics that exist; None when no table can be read (then nothing is known)."""
    batch: frozenset[str] = frozenset()  # those of them with a batch consume queue
    static: frozenset[str] = frozenset()
    """Static topics: their queue offsets are not those that clients see."""
    compacted: frozenset[str] = frozenset()
    """Those of them of which only the newest message of each key is to be kept."""
    reserve_hours: Mapping[str, int] = field(default_factory=dict)
    """How long messages of a topic are to be kept in a tier, hours; topics that do not say are left out."""
    cluster: str | None = None  # name that the system topics bear, or None
    broker: str | None = None  # likewise
    brokers: tuple[str, ...] = ()
    """Names that the broker may have, where the tables do not tell which."""
    notes: tuple[str, ...] = field(default=())  # lines for the report


def read_topics(root: str) -> Topics:
    """Read the topic tables of the store at ``root``."""
    notes: list[str] = []
    known = _table(read_table(root, TOPICS_FILE, notes), "topicConfigTable")
    table = known or {}
    static = _table(read_table(root, STATIC_TOPICS_FILE, notes), "topicQueueMappingInfoMap")
    cluster, brokers = _own_names(table)

    def with_attribute(key: str, value: str) -> frozenset[str]:
        return frozenset(name for name in table if _attributes(table[name]).get(key) == value)

    hours = {name: _reserve_hours(config) for name, config in table.items()}
    return Topics(
        names=None if known is None else frozenset(table),
        batch=with_attribute("queue.type", "BatchCQ"),
        static=frozenset(static or ()),
        compacted=with_attribute("cleanup.policy", "COMPACTION"),
        reserve_hours={name: some for name, some in hours.items() if some > 0},
        cluster=cluster,
        broker=brokers[0] if len(brokers) == 1 else None,
        brokers=brokers if len(brokers) > 1 else (),
        notes=tuple(notes),
    )


@dataclass(frozen=True, slots=True)
class TimerProgress:
    """How far a broker is with its timers, by its own files, which may be some seconds old."""

    wheel: TimerCheck = field(default_factory=TimerCheck)  # of the timing wheel
    delayed: Mapping[int, int] = field(default_factory=dict)
    """By delay level, from 1, the queue offset behind what is delivered."""
    notes: tuple[str, ...] = ()  # lines for the report


def read_timer_progress(root: str) -> TimerProgress:
    """Read how far the broker of the store at ``root`` is with its timers; nothing where it has never had any."""
    notes: list[str] = []
    wheel = decode_timer_check(read_text(f"{root}/{TIMER_CHECK_FILE}") or b"")
    table = _table(read_table(root, DELAY_OFFSETS_FILE, notes), "offsetTable") or {}
    offsets = {int(level): offset for level, offset in table.items() if level.isdigit()}
    sound = {level: offset for level, offset in offsets.items() if type(offset) is int}
    return TimerProgress(wheel, sound, tuple(notes))


def read_text(path: str, size_max: int = 1 << 28) -> bytes | None:
    """A whole small file, or None when it does not exist."""
    descriptor = open_if_there(path)
    if descriptor is None:
        return None
    try:
        with os.fdopen(descriptor, "rb") as file:
            return file.read(size_max)
    except OSError as error:
        raise unreadable(path, error) from error


def read_table(root: str, name: str, notes: list[str]) -> dict[str, Any] | None:
    """A table of the store at ``root``, or its ``.bak``; None when neither can be read.

    ``notes`` gets a line for the report where it was not read from its own file.
    """
    exists = False
    for attempt in (name,) * _TRIES + (f"{name}.bak",):
        raw = read_text(f"{root}/{attempt}")
        exists |= raw is not None
        if not raw:
            continue
        try:
            found = loads(raw)
        except ValueError:
            continue
        if isinstance(found, dict):
            if attempt != name:
                notes.append(f"{name} cannot be read; {attempt} was taken")
            return found
    if exists:
        notes.append(f"{name} cannot be read, nor its .bak; its contents are taken as unknown")
    return None


def parse_offsets(document: object) -> dict[tuple[str, str], dict[int, int]]:
    """Offsets of consumers by group and topic, then by queue id, of ``{"offsetTable":{"topic@group":{0:12,1:34}}}``.

    Rows of broadcasting clients (``topic@group@client``) and negative offsets are left out: a broker keeps them for itself.
    """
    table = document.get("offsetTable") if isinstance(document, dict) else None
    if not isinstance(table, dict):
        raise ValueError("there is no offsetTable")  # noqa: TRY004 (its text is wrong, not the call)
    found: dict[tuple[str, str], dict[int, int]] = {}
    for name, row in table.items():
        topic, at, group = str(name).partition("@")
        if at and topic and group and "@" not in group and isinstance(row, dict):
            try:
                offsets = {int(queue_id): int(offset) for queue_id, offset in row.items()}
            except TypeError as error:
                raise ValueError(f"{name}: {error}") from error
            found[group, topic] = {key: value for key, value in offsets.items() if value >= 0}
    return found


def _table(document: dict[str, Any] | None, key: str) -> dict[str, Any] | None:
    found = document.get(key) if document is not None else None
    return {str(name): value for name, value in found.items()} if isinstance(found, dict) else None


def _attributes(config: object) -> dict[str, Any]:
    found = config.get("attributes") if isinstance(config, dict) else None
    return found if isinstance(found, dict) else {}


def _reserve_hours(config: object) -> int:
    """The attribute ``reserve.time``, hours; -1 where there is none, or none that is a number."""
    try:
        return int(str(_attributes(config).get("reserve.time", "-1")))
    except ValueError:
        return -1


def _own_names(table: Mapping[str, Any]) -> tuple[str | None, tuple[str, ...]]:
    """The cluster's name, and those that the broker may have, by topics that every broker makes for itself at its start.

    Brokers since 5.0 make topics whose names end in them. Older ones make a topic of the cluster's name (for replies one
    more, of that name and ``_REPLY_TOPIC``) and one of the broker's, with one queue, both with the permission to inherit,
    which no topic has that a message made. A broker that was renamed, or a topic that a person gave this permission, leaves
    several.
    """
    clusters, brokers = _suffixes(table, _REVIVE), _suffixes(table, _SYNC_MEMBER)
    inherited = {name for name, config in table.items() if _is_inherited(config)}
    if not clusters:
        clusters = tuple(name for name in sorted(inherited) if name + _REPLIES in table)
    if not brokers:
        alone = tuple(
            name
            for name in sorted(inherited - {_MODEL_TOPIC})
            if table[name].get("writeQueueNums") == 1
        )
        brokers = tuple(name for name in alone if name not in clusters) or alone
    return clusters[0] if len(clusters) == 1 else None, brokers


def _suffixes(names: Iterable[str], prefix: str) -> tuple[str, ...]:
    return tuple(sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix)))


def _is_inherited(config: object) -> bool:
    perm = config.get("perm") if isinstance(config, dict) else None
    return type(perm) is int and bool(perm & _PERM_INHERIT)


# -- liveness ----------------------------------------------------------------------------------------
#
# Whether a broker runs on a store directory, and since when.
#
# A running broker holds a POSIX write lock on byte 0 of ``lock``. It has written ``abort`` at its start and removes it
# when it stops cleanly; so ``abort`` tells a crash from a clean stop, and its time is the start of the running broker.
# Brokers before 5.0 leave an ``abort`` file of the run before as it is, and empty; but each start writes into ``lock``,
# whose time then tells. Both are written before messages are accepted, which is why a changed mark is seen before
# anything that the new broker stored. Between the two a broker *starts*: it holds the lock, and ``abort`` is still the one
# of the run before.
#
# **Never open ``lock`` in a process that holds a POSIX lock on it**: closing any descriptor of the file drops the lock.
# A writer in this process therefore takes an open-file-description lock (``F_OFD_SETLK``), which other processes'
# POSIX locks respect and which closing another descriptor leaves alone; ``is_locked`` sees such locks too.

LOCK_FILE: Final = "lock"
ABORT_FILE: Final = "abort"

_FLOCK: Final = struct.Struct("@qqihh" if sys.platform == "darwin" else "@hhqqi4x")
"""``struct flock``: type, whence, start, length, process (on macOS start, length, process, type, whence)."""


@dataclass(frozen=True, slots=True)
class AbortMark:
    """The ``abort`` file as it stands."""

    inode: int  # its number
    mtime_ns: int  # when it was written, nanoseconds since 1970
    changed_ns: int = 0  # when the system saw it written, whatever time it was given
    lock_mtime_ns: int = 0  # when ``lock`` was written, if ``abort`` is empty; else 0

    @property
    def started_ms(self) -> int:
        """When the broker that runs (or crashed) started, UTC milliseconds, rounded down."""
        return max(self.mtime_ns, self.lock_mtime_ns) // 1_000_000


@dataclass(frozen=True, slots=True)
class Liveness:
    """A look at a store."""

    is_locked: bool  # a broker (or other writer) holds the store
    abort: AbortMark | None
    """None when there is no ``abort`` file: stopped cleanly, or not quite started."""
    is_starting: bool = False
    """The lock was taken, and ``abort`` is still that of the run before: what was stored since that run began proves
    nothing, since the start may have given it up."""


def look(directory: str) -> Liveness:
    """Whether a broker runs on ``directory``, and since when. The lock is looked at first: a broker takes it first."""
    locked = is_locked(directory)
    lock = stat_if_there(f"{directory}/{LOCK_FILE}") if locked else None
    abort = abort_mark(directory)
    is_starting = (
        lock is not None
        and abort is not None
        and not abort.lock_mtime_ns
        and abort.changed_ns < lock.st_mtime_ns
    )
    return Liveness(locked, abort, is_starting)


def abort_mark(directory: str) -> AbortMark | None:
    """The ``abort`` file, or None. One system call, two with brokers before 5.0."""
    found = stat_if_there(f"{directory}/{ABORT_FILE}")
    if found is None:
        return None
    lock = None if found.st_size else stat_if_there(f"{directory}/{LOCK_FILE}")
    lock_mtime_ns = 0 if lock is None else lock.st_mtime_ns
    return AbortMark(found.st_ino, found.st_mtime_ns, found.st_ctime_ns, lock_mtime_ns)


def is_locked(directory: str, name: str = LOCK_FILE) -> bool:
    """Whether another open file holds a conflicting lock on byte 0 of a file (``lock``). Takes no lock itself."""
    path = f"{directory}/{name}"
    descriptor = open_if_there(path)
    if descriptor is None:
        return False
    wanted, type_at = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0), 0
    if sys.platform == "darwin":
        wanted, type_at = _FLOCK.pack(0, 1, 0, fcntl.F_WRLCK, os.SEEK_SET), 3
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, wanted)
    finally:
        os.close(descriptor)
    return bool(_FLOCK.unpack(answer)[type_at] != fcntl.F_UNLCK)
