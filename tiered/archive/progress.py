"""How far an archive job is, told while it runs, and its last figures for Prometheus.

Counts are written by one thread and read by another.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from backends.local_files import advice_for, write_regular
from tiered.archive.engines import archived_of
from tiered.archive.packing import tasks_of
from tiered.errors import InvalidError
from tiered.metrics import Kind, Metric, Sample, render

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tiered.archive.engines import Engine, Outcome
    from tiered.archive.packing import Work
    from tiered.archive.records import JobRecord
    from tiered.clock import Clock

_GAUGES = {
    "began_ms": "When the run began, UTC milliseconds.",
    "elapsed_ms": "Since then.",
    "planned": "Sealed segments that were not archived at the beginning of the run.",
    "planned_bytes": "Bytes of the commit log in them, at most.",
    "segments": "Segments archived by the run.",
    "overtaken": "Segments that another job had archived first.",
    "failed": "Segments that could not be archived: look at the command's output.",
    "files": "Files made.",
    "rows": "Messages in them.",
    "bad": "Records that could not be unpacked, put aside.",
    "holes": "Queue offsets without a message.",
    "source_bytes": "Bytes of the commit log, archived.",
    "size_bytes": "Bytes of the files.",
}
METRICS = tuple(
    Metric(f"tiered_archive_run_{name}", Kind.GAUGE, text) for name, text in _GAUGES.items()
)


@dataclass(slots=True)
class Watch:
    """Counts what an engine gets done.

    Attributes:
        clock: Time.
        segments_all: To be done; 0 before anybody knows.
        bytes_all: Bytes of the commit log in them, at most.
        segments: Done, whatever came of them.
        size_bytes: Bytes of the commit log in these.
        rows: Messages archived.
        ahead: Work of an engine that it has not handed over yet, when it can tell.
    """

    clock: Clock
    segments_all: int = 0
    bytes_all: int = 0
    segments: int = 0
    size_bytes: int = 0
    rows: int = 0
    ahead: Callable[[], int] = field(default=lambda: 0)
    _began_s: float = 0.0

    def over(self, engine: Engine) -> Engine:
        """The same engine, watched."""

        def run(works: Iterable[Work]) -> Iterator[Outcome]:
            self._began_s = self._began_s or self.clock.monotonic_s()
            for work, outcome in engine(works):
                self.segments += len(tasks_of(work))
                self.size_bytes += work.size_bytes
                if not isinstance(outcome, Exception):
                    self.rows += sum(archived.rows for archived in archived_of(outcome))
                yield work, outcome

        return run

    @property
    def seconds_left(self) -> float | None:
        """At the rate so far; None when nothing can be said."""
        elapsed_s = self.clock.monotonic_s() - self._began_s
        if not self._began_s or not self.size_bytes:
            return None
        return elapsed_s * max(self.bytes_all - self.size_bytes, 0) / self.size_bytes


def spark_ahead(session: Any) -> Callable[[], int]:  # noqa: ANN401 (pyspark has no types)
    """How many tasks of the present wave Spark has done. Called from any thread; 0 when Spark does not tell."""

    def ahead() -> int:
        with contextlib.suppress(
            Exception
        ):  # whatever the other side of a socket does: progress is not the work
            tracker = session.sparkContext.statusTracker()
            stages = map(tracker.getStageInfo, tracker.getActiveStageIds())
            return sum(stage.numCompletedTasks for stage in stages if stage)
        return 0

    return ahead


def write_metrics(path: str, record: JobRecord) -> None:
    """Put a run's figures into a file, as Prometheus' text form has it; in place of the last, all at once.

    Raises:
        InvalidError: The file cannot be written.
    """
    fields = record.document()
    text = render([Sample(f"tiered_archive_run_{name}", fields[name]) for name in _GAUGES], METRICS)
    try:
        write_regular(path, text.encode())
    except OSError as error:
        advice = advice_for(error, "name a file in a directory that can be written")
        raise InvalidError(
            f"the metrics cannot be written: {error.strerror}", where=path, do=advice
        ) from error
