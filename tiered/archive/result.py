"""What an archive job has done so far. One thread."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tiered import __version__
from tiered.archive.records import JobRecord

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tiered.archive.model import Archived
    from tiered.archive.plan import Plan, Task


@dataclass(frozen=True, slots=True)
class Done:
    """Tasks whose files are made, and what they came to."""

    tasks: tuple[Task, ...]
    archived: tuple[Archived, ...]


@dataclass(slots=True)
class Result:
    """What a job has done.

    Attributes:
        plan: What was there to do at its beginning.
        run: Its id in the log.
        kind: What does the work.
        began_ms: When it began, UTC.
        segments: Stretches that it archived.
        overtaken: Stretches that another job had archived first.
        files: Files that its entries name.
        rows: Messages in them.
        bad: Records that could not be unpacked.
        holes: Offsets without a message.
        source_bytes: Bytes of the source's commit log.
        size_bytes: Bytes of the files.
        entries: Written to the log.
        failed: Tasks that failed, and why.
        not_begun: Segments left to another run, since the time was over or there was no room.
        misfits: Rows whose bodies did not fit their topic's columns.
        unknown: Topics whose columns could not be inferred: their bodies stay bytes.
    """

    plan: Plan
    run: str = ""
    kind: str = ""
    began_ms: int = 0
    segments: int = 0
    overtaken: int = 0
    files: int = 0
    rows: int = 0
    bad: int = 0
    holes: int = 0
    source_bytes: int = 0
    size_bytes: int = 0
    entries: int = 0
    failed: list[tuple[Task, Exception]] = field(default_factory=list)
    not_begun: int = 0
    misfits: int = 0
    unknown: list[str] = field(default_factory=list)

    def count(self, done: Done) -> None:
        """More stretches are part of the archive; the tasks of a pack share files with each other, and with no others."""
        files = {file.key: file.size_bytes for one in done.archived for file in one.files}
        self.segments += len(done.archived)
        self.files += len(files)
        self.size_bytes += sum(files.values())
        for one in done.archived:
            self.rows += one.rows
            self.bad += one.bad
            self.holes += one.holes
            self.misfits += one.misfits
            self.source_bytes += one.source_bytes

    def record(self, now_ms: int) -> JobRecord:
        """How far the run is, for the log and for metrics."""
        return JobRecord(
            self.run,
            __version__,
            self.kind,
            self.began_ms,
            max(now_ms - self.began_ms, 0),
            len(self.plan.tasks),
            self.plan.size_bytes,
            self.segments,
            self.overtaken,
            len(self.failed),
            self.files,
            self.rows,
            self.bad,
            self.holes,
            self.source_bytes,
            self.size_bytes,
        )

    def after(self, done: Iterable[Done], now_ms: int) -> JobRecord:
        """How far it will be with these."""
        then = replace(self)
        for one in done:
            then.count(one)
        return then.record(now_ms)
