"""An archive as tables: each topic, with exactly the files that the log names. Read-only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered.archive.machine import ArchiveMachine
from tiered.archive.model import LOG
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
    log.catch_up()
    if not log.number:
        raise InvalidError(
            "there is no archive here", where=archive.url, do="`tiered archive` makes one"
        )
    return log.state


def files_by_topic(state: ArchiveState) -> dict[str, list[ParquetFile]]:
    """The files of each topic, in order of topic, queue and offset; topics without a file have an empty list."""
    found: dict[str, list[ParquetFile]] = {}
    for lane, stretches in sorted(state.lanes.items()):
        files = [file for one in stretches for file in one.files]
        found.setdefault(lane.topic, []).extend(files)
    return found
