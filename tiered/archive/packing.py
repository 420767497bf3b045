"""Small segments of a topic, archived together: several stretches, of any queues, become one file for each day.

Ordering: each segment becomes files in memory, as if it were alone, which proves it; then its rows are written once more,
into the shared files. Side files are each segment's own.

Retries: the key of a shared file is a function of what is in it. Who packs the same segments again makes the same object;
who packs others, since more were sealed meanwhile, makes another, and the first is an object that no entry names.

Memory: the files of one pack, and one shared file of a day.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from backends.memory import MemoryStore
from backends.wrapping import WrappingStore
from tiered.archive.keys import DATA, DAY_MS
from tiered.archive.moves import Piece
from tiered.archive.plan import Task
from tiered.archive.rewrite import PACKED, Together, copy, key_of, write_together
from tiered.archive.task import archive_segment

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from typing_extensions import Buffer

    from backends.base import ByteRange, ObjectStore
    from tiered.archive.model import Archived, Lane, ParquetFile

SMALL_BYTES = 4 << 20
PACK_BYTES = 32 << 20
_TASKS_MAX = 256


@dataclass(frozen=True, slots=True)
class Pack:
    """Tasks of one topic and layout whose files are shared.

    Attributes:
        tasks: At least two, in order of lane and offset.
    """

    tasks: tuple[Task, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the commit log, at most."""
        return sum(task.size_bytes for task in self.tasks)


Work = Task | Pack
"""What an engine is given to do."""


def tasks_of(work: Work) -> tuple[Task, ...]:
    """The segments in it."""
    return work.tasks if isinstance(work, Pack) else (work,)


def plan_packs(tasks: Sequence[Task], small_bytes: int = SMALL_BYTES) -> list[Work]:
    """Put small segments of a topic together; in order of each pack's first task. Pure.

    Args:
        tasks: What is to be done.
        small_bytes: Segments of less commit log are packed; 0: none is.
    """
    open_packs: dict[object, list[Task]] = {}
    groups: list[list[Task]] = []
    for task in tasks:
        kind = task.lane.cluster, task.lane.broker, task.lane.topic, task.layout
        group = open_packs.get(kind)
        if task.size_bytes >= small_bytes:
            groups.append([task])
        elif group is None or not _fits(group, task):
            groups.append([task])
            open_packs[kind] = groups[-1]
        else:
            group.append(task)
    return [_work(group) for group in groups]


def _fits(group: Sequence[Task], task: Task) -> bool:
    size = sum(one.size_bytes for one in group) + task.size_bytes
    return size <= PACK_BYTES and len(group) < _TASKS_MAX


def _work(group: Sequence[Task]) -> Work:
    if len(group) == 1:
        return group[0]
    return Pack(tuple(sorted(group, key=lambda task: (task.lane, task.start))))


def do_work(tier: ObjectStore, prefix: str, archive: ObjectStore, work: Work) -> list[Archived]:
    """Make the objects of a task, or of those of a pack; see ``archive_segment``.

    Returns:
        What was made, for each task in order.

    Raises:
        DataError: A segment is damaged, or something else lies under one of our keys.
        InternalError: A file did not reconcile; none of it was published.
        ObjectNotFoundError: A part has been merged or has expired meanwhile: plan again.
        BackendError: A store failed.
    """
    if isinstance(work, Task):
        return [archive_segment(tier, prefix, archive, work)]
    held = _Held(archive)
    made = [archive_segment(tier, prefix, held, task) for task in work.tasks]
    pieces = [
        Piece(task.lane, file)
        for task, archived in zip(work.tasks, made, strict=True)
        for file in archived.files
    ]
    moved = dict(_shared(held, archive, pieces))
    return [
        replace(archived, files=tuple(moved[task.lane, file.low] for file in archived.files))
        for task, archived in zip(work.tasks, made, strict=True)
    ]


def _shared(
    held: ObjectStore, archive: ObjectStore, pieces: Iterable[Piece]
) -> Iterator[tuple[tuple[Lane, int], ParquetFile]]:
    """Each piece's mark, and the file in which it lies then."""
    by_day = sorted(pieces, key=lambda piece: (_day(piece), piece.lane, piece.file.low))
    for day, group in groupby(by_day, key=_day):
        found = tuple(group)
        if len(found) == 1:
            copy(held, archive, found[0].file)
            yield found[0].mark, found[0].file
            continue
        new = write_together(held, archive, Together(key_of(PACKED, day, found), found))
        for piece in found:
            at = replace(piece.file, key=new.key, size_bytes=new.size_bytes, crc=new.crc)
            yield piece.mark, at


def _day(piece: Piece) -> int:
    return piece.file.store_min_ms // DAY_MS


class _Held(WrappingStore):
    """An archive whose files of messages stay in memory, and go no further."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self._held = MemoryStore("pack")

    def put_if_absent(self, key: str, data: Sequence[Buffer] | Buffer) -> None:
        self._of(key).put_if_absent(key, data)

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        return self._of(key).get(key, byte_range)

    def _of(self, key: str) -> ObjectStore:
        return self._held if key.startswith(DATA) else self._inner
