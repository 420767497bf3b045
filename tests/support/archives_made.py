"""Archives of made-up messages, written by the archive's own writer: as large as they are to be, in little time."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from backends.memory import MemoryStore
from tiered.archive.columns import schema
from tiered.archive.machine import ArchiveMachine, archive_action
from tiered.archive.model import (
    DAY_MS,
    LOG,
    Archived,
    ArchiveQueue,
    MovedRows,
    ParquetFile,
    folder_key,
)
from tiered.archive.parquet import FileWriter
from tiered.clock import SystemClock
from tiered.journal.append import JournalWriter
from tiered.journal.replay import JournalReader

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from backends.base import ObjectStore
    from tiered.archive.archived import OffsetRanges
    from tiered.archive.machine import ArchiveState

TOPIC = "orders"
BATCH_ROWS = 8192
FIRST_MS = 1_772_841_600_000
_STEP_MS = 5
_BODY = b'{"state":"paid","amount":%d,"note":"' + b"x" * 160 + b'"}'


def make_archive(
    archive: ObjectStore,
    *,
    files: int,
    rows: int,
    rng: random.Random,
    group_rows: int | None = None,
    told: Callable[[int], None] = lambda _number: None,
) -> list[str]:
    """One queue, an offset range and a file for each ``rows`` messages; the unique ids in order of offset.

    Args:
        archive: An empty place.
        files: How many.
        rows: Of each.
        rng: Of keys.
        group_rows: Of a row group, at most; default: the writer's own.
        told: Called after each file.
    """
    queue = ArchiveQueue("made", "broker", TOPIC, 0, 0)
    log = JournalWriter(
        archive, LOG, ArchiveMachine(),
        writer="00000001", clock=SystemClock(), rng=rng, stop=threading.Event(),
    )  # fmt: skip
    log.catch_up()
    ids: list[str] = []
    for number in range(files):
        low = number * rows
        texts = [f"{rng.getrandbits(128):032X}" for _ in range(rows)]
        ids += texts
        made = _write(archive, queue, texts, rng, low=low, group_rows=group_rows or rows)
        done = Archived(low, low + rows, 0, 0, rows * 400, (made,), None, ((f"seg-{number}", "1"),))
        log.append([archive_action([(queue, 0, done)])])
        told(number)
    log.write_checkpoint()
    return ids


def _write(
    archive: ObjectStore,
    queue: ArchiveQueue,
    ids: list[str],
    rng: random.Random,
    *,
    low: int,
    group_rows: int,
) -> ParquetFile:
    writer = FileWriter()
    for start in range(0, len(ids), min(BATCH_ROWS, group_rows)):
        some = ids[start : start + min(BATCH_ROWS, group_rows)]
        writer.add(batch_of(queue, low + start, some, rng), queue, low)
        if group_rows < BATCH_ROWS:
            writer._write_group()  # smaller groups than the writer's own
    written = writer.finish({})
    ((_, _, proof),) = written.row_ranges
    day = proof.store_min_ms // DAY_MS
    key = f"{folder_key(queue.topic, day)}0-{low:020d}-{proof.high:020d}.parquet"
    archive.put_if_absent(key, written.data)
    return ParquetFile(key, *proof[:3], written.size_bytes, written.crc, *proof[3:])


def batch_of(queue: ArchiveQueue, low: int, ids: list[str], rng: random.Random) -> pa.RecordBatch:
    """Messages from an offset on, with these unique ids; each fourth has the key of the one before too."""
    count = len(ids)
    offsets = np.arange(low, low + count, dtype=np.int64)
    orders = [f"order-{rng.getrandbits(40)}" for _ in range(count)]
    keys = [[orders[n]] if n % 4 else [orders[n], orders[n - 1]] for n in range(count)]
    times = (FIRST_MS + offsets * _STEP_MS) * 1000
    bodies = [_BODY % rng.randrange(100_000) for _ in range(count)]
    columns = {
        "topic": pa.repeat(queue.topic, count),
        "queue_id": pa.repeat(pa.scalar(queue.queue_id, pa.int32()), count),
        "queue_offset": offsets,
        "uniq_key": ids,
        "msg_key": [" ".join(some) for some in keys],
        "keys": keys,
        "tag": ["paid" if n % 3 else "made" for n in range(count)],
        "born_ts": times - 1000,
        "store_ts": times,
        "born_host": pa.repeat("10.0.0.1:5000", count),
        "store_host": pa.repeat("10.0.0.2:10911", count),
        "body_crc": pa.repeat(pa.scalar(7, pa.int64()), count),
        "properties": [[("UNIQ_KEY", text), ("KEYS", orders[n])] for n, text in enumerate(ids)],
        "body": bodies,
        "physical_offset": offsets * 400,
        "broker": pa.repeat(queue.broker, count),
    }
    zero = {name: pa.repeat(pa.scalar(0, field.type), count) for name, field in _zeros().items()}
    arrays = [
        pa.array(columns[field.name], field.type) if field.name in columns else zero[field.name]
        for field in schema()
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema())


def _zeros() -> dict[str, pa.Field]:
    names = ("sys_flag", "flag", "reconsume_times", "prepared_tx_offset", "incarnation")
    return {name: schema().field(name) for name in names}


def store_state(store: ObjectStore, state: ArchiveState, number: int = 1) -> ArchiveState:
    """The same state, settled, and its checkpoint in a store."""
    log = JournalReader(store, LOG, ArchiveMachine())
    log.place(state, number)
    log.store_checkpoint(store.put_if_absent)
    return log.state


def loaded(state: ArchiveState) -> ArchiveState:
    """The same state as somebody reads it from a checkpoint."""
    store = MemoryStore()
    store_state(store, state)
    found = JournalReader(store, LOG, ArchiveMachine()).read_checkpoint(1)
    assert found is not None
    return found[0]


def row_ranges_of(queues: OffsetRanges) -> list[MovedRows]:
    """Every row range, in order of queue and offset range."""
    return [MovedRows(queue, file) for queue, one in queues.each() for file in one.files]
