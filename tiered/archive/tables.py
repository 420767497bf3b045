"""An archive as tables: each topic, with exactly the files that the log names. Read-only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiered.archive.harm import open_log
from tiered.archive.machine import ArchiveMachine
from tiered.archive.model import LOG
from tiered.archive.moves import whole_files
from tiered.errors import InvalidError
from tiered.journal.reader import JournalReader

if TYPE_CHECKING:
    from backends.base import ObjectStore
    from tiered.archive.machine import ArchiveState
    from tiered.archive.model import ParquetFile


def read_archive(archive: ObjectStore) -> ArchiveState:
    """What the log says now.

    Raises:
        InvalidError: There is no archive.
        DataError: The log is damaged.
        BackendError: It could not be read.
    """
    log = JournalReader(archive, LOG, ArchiveMachine())
    open_log(archive, log)
    if not log.number:
        raise InvalidError(
            "there is no archive here", where=archive.url, do="`tiered archive` makes one"
        )
    return log.state


def files_by_topic(state: ArchiveState) -> dict[str, list[ParquetFile]]:
    """The files of each topic, in order of topic, queue and offset; topics without a file have an empty list.

    A file that several queues share comes once, with the numbers of all its rows.
    """
    found: dict[str, list[ParquetFile]] = {}
    for lane, stretches in sorted(state.lanes.items()):
        files = [file for one in stretches for file in one.files]
        found.setdefault(lane.topic, []).extend(files)
    return {topic: whole_files(files) for topic, files in found.items()}


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which files of a topic can hold what is wanted.

    Attributes:
        topic: The topic.
        from_ms: First store time, UTC.
        until_ms: One past the last; None for no end.
        queue_id: Only this queue; None for all.
    """

    topic: str
    from_ms: int = 0
    until_ms: int | None = None
    queue_id: int | None = None


def choose_files(state: ArchiveState, wanted: Wanted) -> tuple[list[ParquetFile], int]:
    """The files that may hold it, by what the log says of each, and how many were left out.

    A file that several queues share comes once, with the numbers of those of its rows that may be wanted.

    Raises:
        InvalidError: The archive has no such topic.
    """
    every: list[ParquetFile] = []
    chosen: list[ParquetFile] = []
    lanes = [lane for lane in sorted(state.lanes) if lane.topic == wanted.topic]
    if not lanes:
        raise InvalidError(f"the archive has no topic {wanted.topic}")
    for lane in lanes:
        files = [file for one in state.lanes[lane] for file in one.files]
        every += files
        if wanted.queue_id in {None, lane.queue_id}:
            chosen += [file for file in files if _meets(file, wanted)]
    kept = whole_files(chosen)
    return kept, len({file.key for file in every}) - len(kept)


def _meets(file: ParquetFile, wanted: Wanted) -> bool:
    until = wanted.until_ms
    return file.store_max_ms >= wanted.from_ms and (until is None or file.store_min_ms < until)
