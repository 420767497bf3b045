"""The log directory of a Kafka node: which partitions it has, their segments, and what its checkpoints say. Read-only.

What is left out, each by its name: internal topics, and folders of partitions that are being deleted, moved in, or are not
this node's any more. A partition's folder is a row of segments, named by their first offset; the last one is active. Files
that are removed are renamed (``.deleted``) and go a minute later; the cleaner's (``.cleaned``, ``.swap``) are not
segments yet, unless what they replace is gone.

Nothing is kept open or remembered here. A directory that changes under a look gives the state before or after it.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from backends.lazy_dataclass import dataclass
from tiered.errors import InvalidError
from tiered.format.kafka_batch import (
    BATCH_BYTES_MAX,
    BatchFault,
    BatchStop,
    check_batches,
    walk_batches,
)
from tiered.format.kafka_log import (
    KafkaFileError,
    open_transactions,
    parse_epochs,
    parse_offsets,
    parse_properties,
)
from tiered.local.interface import LeftOut
from tiered.local.mapped_file_queue import (
    NAME_DIGITS,
    if_there,
    is_row_name,
    list_names,
    open_if_there,
    stat_if_there,
    unreadable,
)
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeVar

    from typing_extensions import Buffer

    from tiered.format.kafka_log import LeaderEpochs

    _Parsed = TypeVar("_Parsed")

_FOLDER: Final = re.compile(r"(?P<topic>[a-zA-Z0-9._-]{1,249})-(?P<partition>\d{1,10})")
_LEAVING: Final = re.compile(r".+\.[0-9a-f]{32}-(?P<why>delete|future|stray)")
_REASONS: Final = {
    "delete": "the partition is being deleted",
    "future": "the partition is being moved to this directory",
    "stray": "the partition is not this node's any more",
}
_SMALL_BYTES_MAX: Final = 64 << 20
_WINDOW_BYTES: Final = 8 << 20
_SEGMENTS: Final = (".log", ".log.swap")
_TRIES: Final = 10


@dataclass(frozen=True, slots=True)
class LogDirectory:
    """What a log directory has."""

    path: str
    cluster: str | None
    node: str | None
    directory_id: str | None
    folders: Mapping[MessageQueue, str]  # of the partitions that are tiered
    left_out: tuple[LeftOut, ...]
    was_stopped_cleanly: bool
    high_watermarks: Mapping[MessageQueue, int]
    log_starts: Mapping[
        MessageQueue, int
    ]  # of those alone that do not begin with their first segment
    recovery_points: Mapping[MessageQueue, int]  # what lies below was forced to the disk


class LogSegment(NamedTuple):
    """A segment of a partition, as it was when it was looked at."""

    base_offset: int
    path: str
    size_bytes: int
    inode: int  # another one under the same name: the cleaner has made the segment anew
    modified_ns: int


def is_log_directory(path: str) -> bool:
    """Whether a directory is one of Kafka's: ``meta.properties`` is in it, with a cluster's id."""
    return "cluster.id" in _small(f"{path}/meta.properties", parse_properties)


def read_log_directory(path: str) -> LogDirectory:
    """Look at a log directory."""
    meta = _small(f"{path}/meta.properties", parse_properties)
    folders, left_out = dict[MessageQueue, str](), list[LeftOut]()
    for name in list_names(path):
        found = queue_of(name)
        if isinstance(found, LeftOut):
            left_out.append(found)
        elif found is not None:
            folders[found] = f"{path}/{name}"
    return LogDirectory(
        path=path,
        cluster=meta.get("cluster.id"),
        node=meta.get("node.id", meta.get("broker.id")),
        directory_id=meta.get("directory.id"),
        folders=folders,
        left_out=tuple(left_out),
        was_stopped_cleanly=stat_if_there(f"{path}/.kafka_cleanshutdown") is not None,
        high_watermarks=_small(f"{path}/replication-offset-checkpoint", parse_offsets),
        log_starts=_small(f"{path}/log-start-offset-checkpoint", parse_offsets),
        recovery_points=_small(f"{path}/recovery-point-offset-checkpoint", parse_offsets),
    )


def queue_of(name: str) -> MessageQueue | LeftOut | None:
    """Whose folder a name is: a partition's, one that is left out, or nobody's."""
    if leaving := _LEAVING.fullmatch(name):
        return LeftOut(name, _REASONS[leaving["why"]])
    if not (found := _FOLDER.fullmatch(name)):
        return None
    if found["topic"].startswith("__"):
        return LeftOut(name, "an internal topic of Kafka")
    return MessageQueue(found["topic"], int(found["partition"]))


def read_topic_id(folder: str) -> str | None:
    """The id of a partition's topic; None: the node's version had none when it was made."""
    return _small(f"{folder}/partition.metadata", parse_properties).get("topic_id")


def read_epochs(folder: str) -> LeaderEpochs:
    """The leader epochs of a partition."""
    return _small(f"{folder}/leader-epoch-checkpoint", parse_epochs)


def segments_of(folder: str) -> list[LogSegment]:
    """The segments of a partition, in order.

    For a moment the cleaner's segment has no name but that with ``.swap``, while what it replaces is gone.
    """
    names, found = list_names(folder), list[LogSegment]()
    for _ in range(_TRIES):
        paths = dict[int, str]()
        for name in names:  # sorted: ``.log`` comes before ``.log.swap``
            base, ending = name[:NAME_DIGITS], name[NAME_DIGITS:]
            if is_row_name(base) and ending in _SEGMENTS:
                paths.setdefault(int(base), f"{folder}/{name}")
        looks = {base: stat_if_there(path) for base, path in sorted(paths.items())}
        before, names = names, list_names(folder)
        found = [
            LogSegment(base, paths[base], about.st_size, about.st_ino, about.st_mtime_ns)
            for base, about in looks.items()
            if about is not None
        ]
        if names == before and len(found) == len(paths):
            break
    return found


def entry_before(
    path: str, kind: np.dtype[np.void], field: str, wanted: int
) -> dict[str, int] | None:
    """The last entry of an index whose field is at most ``wanted``, if the index is in order; None: none is there.

    It is a hint. Entries rise; behind the last one there may be zeros.
    """
    if (descriptor := open_if_there(path)) is None:
        return None
    try:
        low, high, found = 0, os.fstat(descriptor).st_size // kind.itemsize, None
        while low < high:
            middle = (low + high) // 2
            data = os.pread(descriptor, kind.itemsize, middle * kind.itemsize)
            entry = np.frombuffer(data, kind)
            if len(entry) and any(data) and entry[field][0] <= wanted:
                low, found = middle + 1, entry
            else:
                high = middle
    except OSError as error:
        raise unreadable(path, error) from error
    finally:
        os.close(descriptor)
    return None if found is None else {name: int(found[name][0]) for name in kind.names or ()}


def transactions_before(folder: str, offset: int) -> tuple[int, Mapping[int, int]] | None:
    """The newest snapshot of producers at or below an offset: its offset, and which transactions were open there."""
    names = [name for name in list_names(folder) if name.endswith(".snapshot")]
    numbers = [int(name[:NAME_DIGITS]) for name in names if is_row_name(name[:-9])]
    for number in sorted((number for number in numbers if number <= offset), reverse=True):
        path = f"{folder}/{number:0{NAME_DIGITS}d}.snapshot"
        data = _read(path)
        try:
            return number, open_transactions(data or b"")
        except KafkaFileError:
            continue  # as Kafka does: an older one, and more of the log
    return None


def log_start(segments: list[LogSegment], checkpoint: int | None) -> int:
    """The first offset of a partition that is served."""
    return max(segments[0].base_offset if segments else 0, checkpoint or 0)


def unproven(segments: list[LogSegment], recovery_point: int) -> list[LogSegment]:
    """The segments that Kafka reads again after a crash: from the one on that holds the recovery point.

    It cuts the log before the first batch of them that is incomplete or fails its checksum.
    """
    first = max(
        (n for n, segment in enumerate(segments) if segment.base_offset <= recovery_point),
        default=0,
    )
    return segments[first:]


class RecoveredEnd(NamedTuple):
    """Where a partition ends once Kafka has recovered it."""

    offset: int  # one past the last
    segment: int  # base offset of the segment in which it ends
    position: int  # in that segment: what stands behind it is cut off


def recovered_end(
    segments: Sequence[LogSegment],
    recovery_point: int,
    read: Callable[[LogSegment, int, int], Buffer],
) -> RecoveredEnd:
    """Where Kafka cuts a log after a crash: before the first batch that is incomplete or fails its checksum.

    Args:
        segments: All of a partition, at least one.
        recovery_point: What lies below it was forced to the disk.
        read: Bytes of a segment, from a place and of a number, fewer at its end. None is asked for behind the cut, since
            Kafka drops those. Offsets that are out of order are not a reason to cut.
    """
    looked_at = unproven(list(segments), recovery_point)
    end = RecoveredEnd(looked_at[0].base_offset, looked_at[0].base_offset, 0)
    nexts = [*(segment.base_offset for segment in looked_at[1:]), None]
    for segment, next_base in zip(looked_at, nexts, strict=True):
        end = RecoveredEnd(max(end.offset, segment.base_offset), segment.base_offset, 0)
        is_cut, size = False, _WINDOW_BYTES
        while not is_cut:
            data = read(segment, end.position, size)
            count = memoryview(data).nbytes
            block = walk_batches(data, 0, count, size_max=BATCH_BYTES_MAX)
            check_batches(block, segment.base_offset, next_base)
            wrong = (block.faults == BatchFault.CRC) | (block.faults == BatchFault.MAGIC)
            cut = int(block.positions[np.argmax(wrong)]) if wrong.any() else block.end
            sound = block.some((block.positions < cut) & (block.faults == BatchFault.OK))
            offset = max([end.offset, *(sound.last_offsets[-1:] + 1).tolist()])
            end = RecoveredEnd(offset, segment.base_offset, end.position + cut)
            if count < size and cut == count:
                break
            is_cut = count < size or cut < block.end or block.stop is not BatchStop.SHORT
            size = _WINDOW_BYTES if cut else min(size * 4, BATCH_BYTES_MAX)  # a batch is larger
        if is_cut:
            break
    return end


def _read(path: str) -> bytes | None:
    """A small file; None: it is not there."""
    if (descriptor := open_if_there(path)) is None:
        return None
    try:
        return if_there(path, lambda: os.pread(descriptor, _SMALL_BYTES_MAX, 0))
    finally:
        os.close(descriptor)


def _small(path: str, parse: Callable[[str], _Parsed]) -> _Parsed:
    """What a small file says; as of an empty one when it is not there."""
    try:
        return parse((_read(path) or b"").decode())
    except (KafkaFileError, UnicodeDecodeError) as error:
        raise InvalidError(
            f"a file of Kafka's that cannot be read: {error}",
            where=path,
            do="put it back as the node wrote it, or remove it and let the node write it again",
        ) from error
