"""The log directory of a Kafka node: which partitions it has, their segments, and what its checkpoints say. Read-only.

What is left out, each by its name: internal topics, and folders of partitions that are being deleted, moved in, or are not
this node's any more. A partition's folder is a row of segments, named by their first offset; the last one is active. Files
that are removed are renamed (``.deleted``) and go a minute later; the cleaner's (``.cleaned``, ``.swap``) are not
segments yet.

Nothing is kept open or remembered here. A directory that changes under a look gives the state before or after it.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from backends.lazy_dataclass import dataclass
from tiered.errors import InvalidError
from tiered.format.kafka_batch import BatchFault, check_batches, walk_batches
from tiered.format.kafka_log import (
    KafkaFileError,
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


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition that is tiered."""

    queue: MessageQueue
    folder: str
    topic_id: str | None  # None: of a version that had none


@dataclass(frozen=True, slots=True)
class LogDirectory:
    """What a log directory has."""

    path: str
    cluster: str | None
    node: str | None
    directory_id: str | None
    partitions: Mapping[MessageQueue, Partition]
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
    partitions, left_out = dict[MessageQueue, Partition](), list[LeftOut]()
    for name in list_names(path):
        found = queue_of(name)
        if isinstance(found, LeftOut):
            left_out.append(found)
        elif found is not None:
            about = _small(f"{path}/{name}/partition.metadata", parse_properties)
            partitions[found] = Partition(found, f"{path}/{name}", about.get("topic_id"))
    return LogDirectory(
        path=path,
        cluster=meta.get("cluster.id"),
        node=meta.get("node.id", meta.get("broker.id")),
        directory_id=meta.get("directory.id"),
        partitions=partitions,
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


def read_epochs(folder: str) -> LeaderEpochs:
    """The leader epochs of a partition."""
    return _small(f"{folder}/leader-epoch-checkpoint", parse_epochs)


def segments_of(folder: str) -> list[LogSegment]:
    """The segments of a partition, in order."""
    found = []
    for name in list_names(folder):
        if (
            name.endswith(".log")
            and is_row_name(name[:NAME_DIGITS])
            and len(name) == NAME_DIGITS + 4
        ):
            path = f"{folder}/{name}"
            if (about := stat_if_there(path)) is not None:
                found.append(
                    LogSegment(
                        int(name[:NAME_DIGITS]),
                        path,
                        about.st_size,
                        about.st_ino,
                        about.st_mtime_ns,
                    )
                )
    return found


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
    segments: Sequence[LogSegment], recovery_point: int, read: Callable[[LogSegment], Buffer]
) -> RecoveredEnd:
    """Where Kafka cuts a log after a crash: before the first batch that is incomplete or fails its checksum.

    ``segments``: all of a partition, at least one. ``read`` gives the whole of one; each is asked for at most once, in
    order, and none behind the cut, since Kafka drops those. Offsets that are out of order are not a reason to cut.
    """
    looked_at = unproven(list(segments), recovery_point)
    end = RecoveredEnd(looked_at[0].base_offset, looked_at[0].base_offset, 0)
    for segment in looked_at:
        data = read(segment)
        size = memoryview(data).nbytes
        block = walk_batches(data, 0, size, size_max=max(size, 1))
        check_batches(block, segment.base_offset)
        bad = np.flatnonzero((block.faults == BatchFault.CRC) | (block.faults == BatchFault.MAGIC))
        sound = block.some(slice(0, int(bad[0]) if len(bad) else len(block)))
        sound = sound.some(sound.faults != BatchFault.LEGACY)
        position = int(block.positions[bad[0]]) if len(bad) else block.end
        offset = int(sound.last_offsets.max()) + 1 if len(sound) else segment.base_offset
        end = RecoveredEnd(max(end.offset, offset), segment.base_offset, position)
        if position < size:
            break
    return end


def _small(path: str, parse: Callable[[str], _Parsed]) -> _Parsed:
    """What a small file says; as of an empty one when it is not there."""
    descriptor = open_if_there(path)
    if descriptor is None:
        return parse("")
    try:
        data = if_there(path, lambda: os.pread(descriptor, _SMALL_BYTES_MAX, 0)) or b""
    finally:
        os.close(descriptor)
    try:
        return parse(data.decode())
    except (KafkaFileError, UnicodeDecodeError) as error:
        raise InvalidError(
            f"a file of Kafka's that cannot be read: {error}",
            where=path,
            do="put it back as the node wrote it, or remove it and let the node write it again",
        ) from error
