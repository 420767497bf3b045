"""Measures dispatch in this process, beside plain copying of the same bytes in the same minute; and how results are told.

A ratio to plain copying tells more than MiB/s do: it leaves out how fast the machine is. Peak memory is that of the whole
process, so each measurement wants a process of its own (``tiered bench`` without a command sees to that).
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
from contextlib import suppress
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends.lazy_dataclass import dataclass
from backends.registry import folder_of
from tiered.attach.writer import Attachment, AttachSettings
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from backends.s3_settings import S3Options
    from tiered.clock import Clock

MIB = 1 << 20
GIB = 1 << 30
_CHUNK_BYTES = 8 * MIB
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


@dataclass(frozen=True, slots=True)
class Cost:
    """What a piece of work took."""

    seconds: float  # by the clock
    cpu_seconds: float  # of all threads of this process, kernel time included


class Stopwatch:
    """Measures from its making on."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_s = clock.monotonic_s()
        self._began_cpu_s = _cpu_s()

    def read(self) -> Cost:
        """The cost so far."""
        return Cost(self._clock.monotonic_s() - self._began_s, _cpu_s() - self._began_cpu_s)


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of one measurement."""

    what: str  # ``dispatch`` or ``read``
    messages: int  # how many
    size_bytes: int  # of their records
    cost: Cost  # what it took
    requests: int  # to the object store
    copied: Cost
    """Plain copying of the same bytes, with fsync; for ``read``: plain GETs, of as many bytes."""
    peak_rss_bytes: int  # of this process so far
    more: dict[str, Any] = field(default_factory=dict)  # further fields

    def document(self) -> dict[str, Any]:
        """For ``--json``."""
        gib = max(self.size_bytes, 1) / GIB
        return {
            "format": 1,
            "what": self.what,
            "messages": self.messages,
            "size_bytes": self.size_bytes,
            "seconds": round(self.cost.seconds, 4),
            "mib_per_second": _rate(self.size_bytes / MIB, self.cost.seconds),
            "messages_per_second": _rate(self.messages, self.cost.seconds),
            "cpu_seconds": round(self.cost.cpu_seconds, 4),
            "cpu_seconds_per_gib": round(self.cost.cpu_seconds / gib, 3),
            "peak_rss_bytes": self.peak_rss_bytes,
            "requests": self.requests,
            "requests_per_gib": round(self.requests / gib, 1),
            "copy_seconds": round(self.copied.seconds, 4),
            "copy_mib_per_second": _rate(self.size_bytes / MIB, self.copied.seconds),
            "copy_cpu_seconds": round(self.copied.cpu_seconds, 4),
            "ratio_to_copy": round(self.cost.seconds / max(self.copied.seconds, 1e-9), 3),
            "cpu_ratio_to_copy": round(
                self.cost.cpu_seconds / max(self.copied.cpu_seconds, 1e-9), 3
            ),
            **self.more,
        }


def bench_dispatch(
    directory: str, url: str, *, settings: AttachSettings, options: S3Options, clock: Clock
) -> Measured:
    """Tier a store from nothing until all is durable; opening (a broker's recovery) and closing are not counted.

    Raises:
        InvalidError: The tier has messages already.
    """
    attachment = Attachment.open(directory, url, settings, options=options, clock=clock)
    watch = Stopwatch(clock)
    try:
        if attachment.epoch > 1:
            raise InvalidError(
                "there is a tier already, and only its rest would be measured",
                where=url,
                do="name an empty place",
            )
        result = attachment.run(once=True)
        cost = watch.read()
        report = attachment.local.report()
    finally:
        attachment.close()
    peak_bytes = peak_rss_bytes()
    dispatcher = attachment.dispatcher
    assert dispatcher is not None
    copied = copy_log(directory, report.log_min, report.log_end, _beside(url), clock)
    return Measured(
        "dispatch",
        dispatcher.counters.messages,
        dispatcher.counters.record_bytes,
        cost,
        attachment.meter.snapshot().requests,
        copied,
        peak_bytes,
        {
            "is_complete": result.is_complete,
            "parts": dispatcher.counters.parts,
            "bundles": dispatcher.counters.bundles,
            "merged_bytes": dispatcher.counters.merged_bytes,
            "request_dollars": round(attachment.meter.snapshot().dollars, 6),
        },
    )


def copy_log(directory: str, start: int, end: int, beside: str | None, clock: Clock) -> Cost:
    """Copy the log's bytes ``[start, end)`` as ``cp`` would, file by file, and fsync each; then remove the copies."""
    folder = Path(directory) / "commitlog"
    files = sorted((path for path in folder.iterdir() if path.name.isdigit()), key=_base)
    with tempfile.TemporaryDirectory(prefix="tiered-bench-", dir=beside) as target:
        watch = Stopwatch(clock)
        for path in files:
            low, high = max(start - _base(path), 0), min(end - _base(path), path.stat().st_size)
            if low < high:
                with path.open("rb") as source, (Path(target) / path.name).open("wb") as copy:
                    _copy_range(source.fileno(), copy.fileno(), low, high)
                    os.fsync(copy.fileno())
        return watch.read()


def _copy_range(source: int, target: int, low: int, high: int) -> None:
    while low < high:
        try:
            copied = os.copy_file_range(source, target, min(high - low, _CHUNK_BYTES), low)
        except (AttributeError, OSError):  # another file system, or none that can
            copied = os.write(target, os.pread(source, min(high - low, _CHUNK_BYTES), low))
        if not copied:
            return
        low += copied


def _beside(url: str) -> str | None:
    """A folder on the file system of a tier in a folder; None: the one for temporary files."""
    folder = folder_of(url)
    return next((str(p) for p in folder.parents if p.is_dir()), None) if folder else None


def _base(path: Path) -> int:
    return int(path.name)


def _rate(amount: float, seconds: float) -> float:
    return round(amount / max(seconds, 1e-9), 1)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def peak_rss_bytes() -> int:
    """Of this program only: what ``getrusage`` says is inherited from the parent process."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text("ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT
