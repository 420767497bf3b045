"""Measures dispatch in this process, beside plain copying of the same bytes in the same minute; and how results are told.

A ratio to plain copying tells more than MiB/s do: it leaves out how fast the machine is. Peak memory is that of the whole
process, so each measurement wants a process of its own (``tiered bench`` without a command sees to that).
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends.lazy_dataclass import dataclass
from backends.registry import folder_of
from tiered.attach.writer import Attachment, AttachSettings
from tiered.errors import InvalidError
from tiered.format.broker_checkpoint import decode_checkpoint, encode_checkpoint
from tiered.store.bulk import make_store
from tiered.store.embedded import MessageStore
from tiered.store.new_message import NewMessage
from tiered.store.store_options import Flush, StoreOptions

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

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


# --------------------------------------------------------------------------------------------------
# Measures the embedded store in this process, each figure beside the plain thing that it cannot beat, in the same
# minute.
#
# ==================== =====================================================================================
# figure               beside
# ==================== =====================================================================================
# append               a plain ``write`` of the same bytes in the same chunks, in rounds that take turns; left to
#                      the system, and with both brought to the disk at the end. In batches of 32 and
#                      of 256, and one message at a time
# sync                 one ``fdatasync`` a record, by one thread
# visible              nothing: the time from an append's answer until the message is listed
# recover              reading the bytes of the log that are looked at; both from the disk
# ==================== =====================================================================================
#
# Rates are medians of rounds. Beside a rate stands the CPU time of the whole process for one message, kernel time
# included.
# --------------------------------------------------------------------------------------------------


BATCH = 32
LARGE_BATCH = 256
_SINGLE_SHARE = 8
"""Of the messages; one at a time takes longer."""
QUEUES = 8
_CLUSTER = "bench-cluster"
_BROKER = "bench-broker"
_POOL = 1024
"""Messages that are used again and again: no colder than those that a producer has just made."""
_TURNS = 8
_READ_BYTES = 8 * MIB


@dataclass(frozen=True, slots=True)
class StoreBench:
    """What to measure."""

    messages: int  # to append, and to recover; in all
    body_bytes: int  # of each body
    threads: int  # that append under sync
    seconds: float  # how long each of those is measured, and visibility
    rate: int  # messages a second while visibility is measured


def bench_store(folder: Path, bench: StoreBench, clock: Clock, rng: random.Random) -> list[Row]:
    """Measure everything in an empty folder, which is empty again afterwards."""
    batches, large, single = (_batches(bench, rng, size) for size in (BATCH, LARGE_BATCH, 1))
    few = replace(bench, messages=max(1, bench.messages // _SINGLE_SHARE))
    return [
        *_append(folder, bench, batches, clock, "append"),
        *_append(folder, bench, large, clock, f"append, {LARGE_BATCH} at a time"),
        *_append(folder, few, single, clock, "append, one at a time"),
        _sync(folder, bench, batches, clock),
        _visible(folder, bench, batches, clock),
        _recover(folder, bench, clock, covered_share=0.0),
        _recover(folder, bench, clock, covered_share=0.9),
    ]


Row = dict[str, Any]


def _made(folder: Path, clock: Clock, flush: Flush = Flush.ASYNC) -> MessageStore:
    """A new store in the folder."""
    options, at = StoreOptions(flush=flush), folder / "store"
    return MessageStore.create(at, cluster=_CLUSTER, broker=_BROKER, clock=clock, options=options)


def _batches(bench: StoreBench, rng: random.Random, size: int) -> list[list[NewMessage]]:
    pool = [
        NewMessage(
            "bench",
            number % QUEUES,
            rng.randbytes(bench.body_bytes),
            tags=f"tag-{number % 4}",
            keys=f"key-{number:08d}",
        )
        for number in range(min(_POOL, max(size, bench.messages)))
    ]
    return [pool[at : at + size] for at in range(0, len(pool) - size + 1, size)]


def _append(
    folder: Path,
    bench: StoreBench,
    batches: Sequence[Sequence[NewMessage]],
    clock: Clock,
    name: str,
) -> list[Row]:
    plain = folder / "plain"
    batches, each = list(batches) * _TURNS, len(batches[0])
    rounds = max(1, bench.messages // (len(batches) * each))
    count = rounds * len(batches) * each
    ours, theirs, our_cpu_s, their_cpu_s = [], [], 0.0, 0.0
    with _made(folder, clock) as store, plain.open("wb", buffering=0) as file:
        for _ in range(rounds):
            begin, watch = store.log_end, Stopwatch(clock)
            if each == 1:
                for (message,) in batches:
                    store.append(message)
            else:
                for batch in batches:
                    store.append_batch(batch)
            cost = watch.read()
            ours.append(cost.seconds)
            store.wait_listed()
            our_cpu_s += watch.read().cpu_seconds
            size = (store.log_end - begin) // len(batches)
            chunks = [os.urandom(size) for _ in batches[: len(batches) // _TURNS]]
            watch = Stopwatch(clock)
            for chunk in chunks * _TURNS:
                file.write(chunk)
            cost = watch.read()
            theirs.append(cost.seconds)
            their_cpu_s += cost.cpu_seconds
        watch = Stopwatch(clock)
        store.flush()
        our_flush_s = watch.read().seconds
        watch = Stopwatch(clock)
        os.fdatasync(file.fileno())
        their_flush_s = watch.read().seconds
        size_mib = store.log_end / MIB
    _remove(folder)
    medians = [statistics.median(times) * rounds for times in (ours, theirs)]
    synced = [sum(ours) + our_flush_s, sum(theirs) + their_flush_s]
    return [
        _row(
            what,
            "MiB/s",
            (size_mib / one, size_mib / other),
            (our_cpu_s / count, their_cpu_s / count),
        )
        for what, (one, other) in ((name, medians), (f"{name}, forced to disk", synced))
    ]


def _sync(
    folder: Path, bench: StoreBench, batches: Sequence[Sequence[NewMessage]], clock: Clock
) -> Row:
    messages = [message for batch in batches for message in batch][: bench.threads]
    messages *= -(-bench.threads // len(messages))
    counts, ends = [0] * bench.threads, threading.Event()
    with _made(folder, clock, Flush.SYNC) as store:

        def work(number: int) -> None:
            while not ends.is_set():
                store.append(messages[number])
                counts[number] += 1

        watch = Stopwatch(clock)
        _run([partial(work, number) for number in range(bench.threads)], ends, bench.seconds, clock)
        ours = watch.read()
        size = store.log_end // sum(counts)
    done, data = 0, os.urandom(size)
    with (folder / "plain").open("wb", buffering=0) as file:
        os.ftruncate(file.fileno(), 1 << 30)
        watch = Stopwatch(clock)
        while (theirs := watch.read()).seconds < bench.seconds:
            file.write(data)
            os.fdatasync(file.fileno())
            done += 1
    _remove(folder)
    total = sum(counts)
    return _row(
        f"append, {bench.threads} threads, sync",
        "messages/s",
        (total / ours.seconds, done / theirs.seconds),
        (ours.cpu_seconds / total, theirs.cpu_seconds / done),
    )


def _visible(
    folder: Path, bench: StoreBench, batches: Sequence[Sequence[NewMessage]], clock: Clock
) -> Row:
    """The waits of single batches, looked at by a thread of its own."""
    waiting: list[tuple[int, float]] = []
    waits: list[float] = []
    ends, pause = threading.Event(), threading.Event()
    with _made(folder, clock) as store:

        def look() -> None:
            while not ends.is_set() or waiting:
                listed, now_s = store.listed_end, clock.monotonic_s()
                while waiting and waiting[0][0] <= listed:
                    waits.append(now_s - waiting.pop(0)[1])
                clock.wait(pause, 0.0005)

        looker = threading.Thread(target=look)
        looker.start()
        watch, done = Stopwatch(clock), 0
        while (cost := watch.read()).seconds < bench.seconds:
            if done > cost.seconds * bench.rate:
                clock.wait(pause, 0.0005)
                continue
            batch = batches[done // BATCH % len(batches)]
            end = store.append_batch(batch).places.end
            waiting.append((end, clock.monotonic_s()))
            done += BATCH
        ends.set()
        looker.join()
    _remove(folder)
    waits.sort()
    row = _row(
        "visible after append, p99",
        "ms",
        (waits[len(waits) * 99 // 100] * 1000, 0.0),
        (cost.cpu_seconds / done, 0.0),
    )
    return row | {"median": round(waits[len(waits) // 2] * 1000, 2)}


def _recover(folder: Path, bench: StoreBench, clock: Clock, *, covered_share: float) -> Row:
    """A store whose checkpoint covers a share of the log, as a crash leaves it; 0: it lists nothing yet."""
    root = folder / "store"
    made = make_store(
        root, messages=bench.messages, body_bytes=bench.body_bytes, queues=QUEUES, topics=1, seed=1,
        clock=clock, commitlog_file_bytes=1 << 30,
    )  # fmt: skip
    checkpoint, size = root / "checkpoint", made.record_bytes // made.messages
    (root / "abort").touch()
    covered = int(made.messages * covered_share) * size if made.log_bytes <= 1 << 30 else 0
    if covered_share and not covered:
        covered = (made.log_bytes >> 30) << 30
    found = decode_checkpoint(checkpoint.read_bytes())
    found = replace(
        found, index_timestamp_ms=found.logics_timestamp_ms, logics_physical_offset=covered
    )
    checkpoint.write_bytes(encode_checkpoint(found))
    os.sync()
    _forget(root)
    watch = Stopwatch(clock)
    _read_log(root, covered, made.log_bytes)
    theirs = watch.read()
    _forget(root)
    watch = Stopwatch(clock)
    with MessageStore.open(root, cluster=_CLUSTER, broker=_BROKER, clock=clock) as store:
        ours = watch.read()
        recovered = store.recovered
    _remove(folder)
    assert recovered is not None
    mib, count = (made.log_bytes - covered) / MIB, max(1, recovered.records)
    name = "recover, no checkpoint" if not covered else "recover behind a checkpoint"
    return _row(
        name, "MiB/s", (mib / ours.seconds, mib / theirs.seconds),
        (ours.cpu_seconds / count, theirs.cpu_seconds / count),
    ) | {"seconds": round(ours.seconds, 3), "records": recovered.records}  # fmt: skip


def _read_log(root: Path, begin: int, end: int) -> None:
    """Read ``[begin, end)``: what lies behind is a hole."""
    buffer = bytearray(_READ_BYTES)
    for path in sorted((root / "commitlog").iterdir()):
        at = max(0, begin - int(path.name))
        size = min(path.stat().st_size, end - int(path.name))
        with path.open("rb", buffering=0) as file:
            while at < size and (
                done := os.preadv(file.fileno(), [memoryview(buffer)[: size - at]], at)
            ):
                at += done


def _forget(root: Path) -> None:
    """Have the next reading of the log come from the disk, where the system can be asked for that."""
    for path in (root / "commitlog").iterdir():
        with path.open("rb") as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _run(
    bodies: Sequence[Callable[[], None]], ends: threading.Event, seconds: float, clock: Clock
) -> None:
    threads = [threading.Thread(target=body) for body in bodies]
    for thread in threads:
        thread.start()
    clock.wait(threading.Event(), seconds)
    ends.set()
    for thread in threads:
        thread.join()


def _remove(folder: Path) -> None:
    shutil.rmtree(folder / "store")
    (folder / "plain").unlink(missing_ok=True)


def _row(what: str, unit: str, rates: tuple[float, float], cpu_s: tuple[float, float]) -> Row:
    """Ours first, then the plain thing; CPU time for each message."""
    ours, plain = rates
    return {
        "what": what,
        "value": round(ours, 2),
        "unit": unit,
        "plain": round(plain, 2),
        "ratio": round(ours / plain, 3) if plain else None,
        "cpu_us_per_message": round(cpu_s[0] * 1e6, 2),
        "plain_cpu_us_per_message": round(cpu_s[1] * 1e6, 2),
    }
