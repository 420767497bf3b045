"""A tier and an archive as they are after very many segments, in a folder; and planning from them, measured."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import random
import threading
import time
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from support.archive_states import PLACE, archived, plan, tier
from support.archives_made import store_state

from backends.registry import open_store
from backends.s3_settings import S3Options
from backends.wrapping import WrappingStore
from tiered.__main__ import YOUNG_OBJECTS
from tiered.archive.archived import GROUP_ROWS, OffsetRanges, SavedRun, table_of
from tiered.archive.checked_ranges import open_log
from tiered.archive.machine import ArchiveMachine, ArchiveState, archive_action
from tiered.archive.model import LOG, Archived, ArchiveQueue
from tiered.clock import ManualClock
from tiered.journal.append import JournalWriter
from tiered.journal.replay import JournalReader
from tiered.log.parts import Parts
from tiered.log.reader import TierReader
from tiered.log.state import TierMachine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backends.base import ByteRange, ObjectInfo
    from tiered.log.parts import TierState

SEGMENTS = 100
"""Of each queue, of which one is not archived."""
_AGES = (0, 66, 88, 95, 98, 99)
"""OffsetRanges of a queue by the runs that hold them: each run is more than twice as large as the next."""
_ENTRIES = 4
"""Behind the checkpoint, of a job that was killed."""
_PAGE = 1000


def as_long_as_real(queue: int, number: int) -> Archived:
    """An offset range whose names and numbers are no shorter, and no more alike, than real ones."""
    one = archived(number)
    digest = hashlib.sha256(b"%d %d" % (queue, number)).hexdigest()
    low, high, crc = one.start, one.end, int(digest[24:32], 16)
    folder = "data/topic_dir=orders/date=2026-03-07"
    file = replace(
        one.files[0],
        key=f"{folder}/{queue}-{low:020d}-{high:020d}-{digest[:16]}.parquet",
        size_bytes=int(digest[16:23], 16),
        crc=crc,
        body_crc_sum=crc * 97,
        body_bytes=int(digest[3:9], 16),
    )
    begun_ms = 1_772_841_600_000 + number * 600_000
    source = f"bundle/2/{begun_ms:020d}-0000000003-0badcafe-{number:010d}", digest[32:]
    return replace(one, files=(file,), sources=(source,))


def queue(number: int) -> ArchiveQueue:
    return ArchiveQueue(PLACE.cluster, PLACE.broker, "t", number, 0)


def make(root: str, queues: int) -> None:
    """Both logs, each with a checkpoint, and some entries behind that of the archive."""
    with contextlib.closing(open_store(f"file://{root}/tier", S3Options())) as store:
        log = JournalReader(store, PLACE.prefix, TierMachine())
        log.place(_tier(queues), 1)
        log.store_checkpoint(store.put_if_absent)
    with contextlib.closing(open_store(f"file://{root}/archive", S3Options())) as store:
        made = [_run(queues, low, high) for low, high in pairwise(_AGES)]
        store_state(store, ArchiveState(OffsetRanges(made)), 15_000)
        writer = JournalWriter(
            store,
            LOG,
            ArchiveMachine(),
            writer="0badcafe",
            clock=ManualClock(),
            rng=random.Random(1),
            stop=threading.Event(),
        )
        writer.catch_up()
        for number in range(_ENTRIES):
            writer.append([archive_action([(queue(number), 0, archived(SEGMENTS - 1))])])


def _tier(queues: int) -> TierState:
    """With checksums that differ, since what can be packed too well is not believed."""
    chance, made, found = np.random.default_rng(1), tier(queues, SEGMENTS), {}
    for queue, (incarnation,) in made.queues.items():
        rows = np.concatenate([segment.parts.rows for segment in incarnation.segments])
        for name in ("crc", "last", "start"):
            rows[name] = chance.integers(0, 1 << 31, SEGMENTS)
        parts = Parts(rows, [segment.parts.bundles[0] for segment in incarnation.segments])
        segments = tuple(
            replace(one, parts=parts[number : number + 1])
            for number, one in enumerate(incarnation.segments)
        )
        found[queue] = (replace(incarnation, segments=segments),)
    return replace(made, queues=found, epoch=1, history="h")


def _run(queues: int, low: int, high: int) -> SavedRun:
    every = (
        (queue(at), as_long_as_real(at, number))
        for at in range(queues)
        for number in range(low, high)
    )
    return SavedRun.of(map(table_of, iter(lambda: list(islice(every, GROUP_ROWS)), [])))


class _Counting(WrappingStore):
    """Counts requests as S3 does: a listing is one for each page."""

    requests = 0

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        _Counting.requests += 1
        return self._inner.get(key, byte_range)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        _Counting.requests += 1
        for number, info in enumerate(self._inner.list(prefix, start_after=start_after), 1):
            _Counting.requests += number % _PAGE == 0
            yield info


def measure(root: str) -> None:
    """Plan, and tell what it took: the archive's log, the tier's journal, planning."""
    told: dict[str, float] = {}
    gc.set_threshold(YOUNG_OBJECTS)  # as the program does
    with contextlib.ExitStack() as closing:
        stores = [
            closing.enter_context(
                contextlib.closing(open_store(f"file://{root}/{name}", S3Options()))
            )
            for name in ("tier", "archive")
        ]
        there, archive = map(_Counting, stores)
        log, reader = JournalReader(archive, LOG, ArchiveMachine()), TierReader(there, PLACE.prefix)
        with _took(told, "archive"):
            open_log(archive, log)
        with _took(told, "tier"):
            reader.refresh()
        with _took(told, "plan"):
            found = plan(reader.state, log.state)
    told |= {"tasks": len(found.tasks), "archived": found.archived_segments}
    print(json.dumps(told | {"requests": _Counting.requests}))


@contextlib.contextmanager
def _took(told: dict[str, float], what: str) -> Iterator[None]:
    """CPU seconds, and by how much the process was larger at its largest."""
    began_s, before_kib = time.process_time(), _peak_kib()
    yield
    told[f"{what}_cpu_s"] = round(time.process_time() - began_s, 2)
    told[f"{what}_mib"] = (_peak_kib() - before_kib) >> 10


def _peak_kib() -> int:
    """Of this program alone: what ``getrusage`` says may be the parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
