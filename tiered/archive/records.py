"""What the log tells of the jobs that wrote it: one record with each entry of a job, the newest of each run kept. Values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tiered.log.wellformed import check_ints, check_texts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tiered.journal.entry import Action

JOB = "job"
KEPT = 16
"""Runs of which the state keeps the record; older ones are in the log's entries."""
_TEXTS = ("run", "program", "engine")
_NUMBERS = (
    *("began_ms", "elapsed_ms", "planned", "planned_bytes", "segments", "overtaken", "failed"),
    *("files", "rows", "bad", "holes", "source_bytes", "size_bytes"),
)


@dataclass(frozen=True, slots=True)
class JobRecord:
    """How far a run had come when it wrote an entry. Numbers are of the run, this entry's included.

    Attributes:
        run: Its random id.
        program: Version of the program.
        engine: What did the work: ``local`` or ``spark``.
        began_ms: When it began, UTC.
        elapsed_ms: Since then.
        planned: Segments that it was to archive.
        planned_bytes: Bytes of the commit log in them, at most.
        segments: Archived.
        overtaken: That others had archived first.
        failed: That failed.
        files: Made.
        rows: Messages in them.
        bad: Records that could not be unpacked.
        holes: Offsets without a message.
        source_bytes: Bytes of the commit log, read.
        size_bytes: Bytes of the files.
    """

    run: str
    program: str
    engine: str
    began_ms: int
    elapsed_ms: int
    planned: int = 0
    planned_bytes: int = 0
    segments: int = 0
    overtaken: int = 0
    failed: int = 0
    files: int = 0
    rows: int = 0
    bad: int = 0
    holes: int = 0
    source_bytes: int = 0
    size_bytes: int = 0

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> JobRecord:
        """Undo ``document``; what else it has is left out.

        Raises:
            ValueError: It is none (likewise ``LookupError`` and ``TypeError``).
        """
        texts = {name: document[name] for name in _TEXTS}
        numbers = {name: document[name] for name in _NUMBERS}
        check_texts(texts.values(), "a job")
        check_ints(numbers.values(), "a job")
        return cls(**texts, **numbers)


def job_action(record: JobRecord) -> Action:
    """The action that says how far a run is."""
    return {"do": JOB, "format": 1, **record.document()}


def with_record(records: tuple[JobRecord, ...], new: JobRecord) -> tuple[JobRecord, ...]:
    """Records, oldest first, with a run's newest in the place of its last."""
    others = [one for one in records if one.run != new.run]
    return (*others, new)[-KEPT:]
