"""What a store directory is made of, and which directories are refused, each by its name.

Read: a plain store with one commit-log directory and file consume queues (plain and batch), also a slave's, also one
with light queues, compaction topics or ``consumequeue_ext`` (tag codes are then taken from the records).
Refused: RocksDB consume queues, DLedger logs, commit logs spread over several paths, logs with a file missing in the
middle, and what is no store at all. Static topics are left out by name (``tiered.local.topics``).
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from tiered.errors import DataError, InvalidError
from tiered.format.consume_queue import BATCH_ITEM_BYTES, ITEM_BYTES
from tiered.format.record import MAGIC_BLANK, MAGIC_V1, MAGIC_V2
from tiered.local.files import (
    list_bases,
    list_names,
    open_read_only,
    unreadable,
)
from tiered.model import MessageQueue

LOG_DIRECTORY: Final = "commitlog"
QUEUE_DIRECTORY: Final = "consumequeue"
BATCH_DIRECTORY: Final = "batchconsumequeue"
EXT_DIRECTORY: Final = "consumequeue_ext"
_MARKS: Final = (LOG_DIRECTORY, QUEUE_DIRECTORY, "checkpoint", "config/topics.json", "lock")
"""What tells a store from any other directory."""
_DLEDGER_MAGIC: Final = 1
_DLEDGER_HEADER_BYTES: Final = 48
_LOG_BYTES_DEFAULT: Final = 1 << 30
_QUEUE_BYTES_DEFAULT: Final = 6_000_000
_BATCH_BYTES_DEFAULT: Final = 13_800_000


@dataclass(frozen=True, slots=True)
class Layout:
    """A directory that can be read.

    Attributes:
        root: Its path.
        log_file_bytes: Size of each commit-log file, the broker's default as long as it is not known.
    """

    root: str
    log_file_bytes: int

    @property
    def log(self) -> str:
        """Directory of the commit log."""
        return f"{self.root}/{LOG_DIRECTORY}"

    @property
    def has_ext(self) -> bool:
        """Tag codes may be addresses in ``consumequeue_ext``."""
        return Path(f"{self.root}/{EXT_DIRECTORY}").is_dir()

    def queue_directory(self, queue: MessageQueue, *, is_batch: bool) -> str:
        """Directory of a queue's consume queue."""
        kind = BATCH_DIRECTORY if is_batch else QUEUE_DIRECTORY
        topic = queue.topic
        return f"{self.root}/{kind}/{topic}/{queue.queue_id}"


def inspect(directory: str) -> Layout:
    """Look at a directory before it is opened.

    Raises:
        InvalidError: It is no store, may not be read, or is of a kind that is not supported.
        DataError: It is a store that cannot be read as it stands.
    """
    root = str(Path(directory).absolute())
    _check_directory(root)
    names = list_names(root)
    _refuse_foreign(root, names)
    bases = list_bases(f"{root}/{LOG_DIRECTORY}")
    if not bases and _has_entries(root):
        raise InvalidError(
            "the store has consume queues and no commit log",
            where=f"{root}/{LOG_DIRECTORY}",
            do="if storePathCommitLog lies elsewhere, put it there by a link",
        )
    log = f"{root}/{LOG_DIRECTORY}"
    layout = Layout(root, log_file_bytes(log, bases) or _LOG_BYTES_DEFAULT)
    if bases:
        _refuse_dledger_record(f"{layout.log}/{bases[0]:020d}")
    return layout


def check_contiguous(log: str, bases: tuple[int, ...], file_bytes: int) -> None:
    """Refuse a log with a file missing in the middle.

    Raises:
        DataError: Naming the first missing file.
    """
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


def known_queue_file_bytes(directory: str, *, is_batch: bool) -> int:
    """Size of a queue's files: the distance of two, else the length of the only one.

    A length that is no multiple of the unit is rounded down. 0 when there is no file, or the only one is just being
    made: then nothing is known yet.
    """
    unit = BATCH_ITEM_BYTES if is_batch else ITEM_BYTES
    bases = list_bases(directory)
    steps = [after - before for before, after in pairwise(bases)]
    if not bases:
        return 0
    size = min(steps) if steps else _length(f"{directory}/{bases[0]:020d}")
    return size - size % unit


def list_topics(root: str) -> list[tuple[str, bool]]:
    """Every topic that has a directory of consume queues, and whether they are batch queues."""
    return [
        (topic, is_batch)
        for kind, is_batch in ((QUEUE_DIRECTORY, False), (BATCH_DIRECTORY, True))
        for topic in list_names(f"{root}/{kind}")
    ]


def list_topic_queues(root: str, topic: str, *, is_batch: bool) -> list[MessageQueue]:
    """A topic's queues that have a directory."""
    kind = BATCH_DIRECTORY if is_batch else QUEUE_DIRECTORY
    return [
        MessageQueue(topic, int(number))
        for number in list_names(f"{root}/{kind}/{topic}")
        if number.isascii() and number.isdigit()
    ]


def list_queues(root: str) -> dict[MessageQueue, bool]:
    """Every queue that has a directory, light queues too, and whether it is a batch queue."""
    return {
        queue: is_batch
        for topic, is_batch in list_topics(root)
        for queue in list_topic_queues(root, topic, is_batch=is_batch)
    }


def _check_directory(root: str) -> None:
    try:
        mode = Path(root).stat().st_mode
    except FileNotFoundError:
        raise InvalidError("no such directory", where=root, do="give a store directory") from None
    except OSError as error:
        raise unreadable(root, error) from error
    if not stat.S_ISDIR(mode):
        raise InvalidError("not a directory", where=root, do="give a store directory")


def _refuse_foreign(root: str, names: list[str]) -> None:
    if not names:
        raise InvalidError(
            "an empty directory, not a store", where=root, do="give the broker's storePathRootDir"
        )
    ledgers = [name for name in names if name.startswith("dledger-")]
    if ledgers:
        raise InvalidError(
            "the store keeps its log in DLedger, which is not supported",
            where=f"{root}/{ledgers[0]}",
            do="attach to a store with an ordinary commit log",
        )
    if not any(_exists(f"{root}/{mark}") for mark in _MARKS):
        raise InvalidError(
            "not a RocketMQ store: there is neither commitlog nor checkpoint nor config",
            where=root,
            do="give the broker's storePathRootDir",
        )
    if _exists(f"{root}/{QUEUE_DIRECTORY}/CURRENT"):
        raise InvalidError(
            "the store keeps its consume queues in RocksDB, which is not supported",
            where=f"{root}/{QUEUE_DIRECTORY}",
            do="use a broker with storeType=default",
        )


def _has_entries(root: str) -> bool:
    return any(
        list_bases(
            f"{root}/{BATCH_DIRECTORY if is_batch else QUEUE_DIRECTORY}/{queue.topic}/{queue.queue_id}"
        )
        for queue, is_batch in list_queues(root).items()
    )


def log_file_bytes(log: str, bases: tuple[int, ...]) -> int:
    """The distance that most files have from the next, else the only file's length.

    0 when there is no file, or the only one is just being made: then nothing is known yet.
    """
    steps = Counter(after - before for before, after in pairwise(bases))
    if steps:
        return min(steps, key=lambda step: (-steps[step], step))
    return _length(f"{log}/{bases[0]:020d}") if bases else 0


def _length(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise unreadable(path, error) from error


def _refuse_dledger_record(path: str) -> None:
    """A DLedger entry has 48 bytes before the record, beginning with its own magic, 1."""
    try:
        descriptor = open_read_only(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        head = os.pread(descriptor, _DLEDGER_HEADER_BYTES + 8, 0)
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


def _exists(path: str) -> bool:
    """Whether there is anything of this name, a broken link included."""
    try:
        Path(path).lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise unreadable(path, error) from error
    return True
