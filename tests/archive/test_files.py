"""What a file of an archive is, whosever rows lie in it: order, row groups, encodings, ids; which segments share one."""

from __future__ import annotations

import io
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.archive_jobs import archive, check, job_context, keys, rows
from support.archive_states import COUNT, tier
from support.bundles import made_part
from support.tiers import TierBuilder

from backends.memory import MemoryStore
from backends.registry import open_store
from backends.s3_settings import S3Options
from backends.wrapping import WrappingStore
from tiered.api.broker_place import Place, choose_place
from tiered.archive import parquet, task
from tiered.archive.columns import schema
from tiered.archive.job import log_writer, plan_job, run_job
from tiered.archive.machine import ArchiveState
from tiered.archive.merging import merge, plan_merge
from tiered.archive.model import DAY_MS, ArchiveQueue
from tiered.archive.parquet import Digest, FileWriter
from tiered.archive.plan import Work, plan_archive, plan_works
from tiered.archive.task import do_work
from tiered.errors import InternalError
from tiered.log.parts import Parts
from tiered.model import MessageQueue
from tiered.upkeep.engine import WorkContext, local_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from support.archive_fixtures import Sealed

    from backends.base import ByteRange
    from tiered.archive.plan import Task
    from tiered.archive.task import JobContext

QUEUES = 40
TOPIC = "many"


def slow_queues() -> TierBuilder:
    """Many queues, each with two sealed segments of a few messages."""
    made = TierBuilder()
    for queue_id in range(QUEUES):
        queue = MessageQueue(TOPIC, queue_id)
        for bodies in ([b"a%d" % queue_id, None], [b"b"], [b"open"]):
            made.add(bodies, queue=queue, roll=True)
    return made


def packed(at: JobContext) -> None:
    run_job(at, local_engine(at.context, 1), small_bytes=1 << 20)


def only_file(at: JobContext) -> Any:
    (key,) = keys(at)
    return pq.ParquetFile(io.BytesIO(at.archive.get(key)))


def test_slow_queues_are_one_file_with_one_row_group_in_order() -> None:
    at = job_context(slow_queues().store)
    packed(at)
    file = only_file(at)
    assert (file.num_row_groups, file.metadata.num_rows) == (1, 2 * QUEUES)
    found = file.read()
    marks = list(zip(found["queue_id"].to_pylist(), found["queue_offset"].to_pylist(), strict=True))
    assert marks == sorted(marks)
    assert {mark[0] for mark in marks} == set(range(QUEUES))
    assert check(at).rows == 2 * QUEUES


def test_what_is_packed_at_making_is_what_merging_makes_later() -> None:
    """One mechanism: the same rows in the same order and row groups, whichever way they came together."""
    made = slow_queues()
    at, later = job_context(made.store), job_context(made.store)
    packed(at)
    archive(later)
    log = log_writer(later)
    merge(later, log, plan_merge(log.state, takes=lambda _queue: True))
    (one,) = {f.key for s in log.state.queues.values() for a in s for f in a.files}
    data = later.archive.get(one)
    assert pq.read_table(io.BytesIO(data)).equals(only_file(at).read())
    said = [pq.ParquetFile(io.BytesIO(d)).metadata for d in (data, at.archive.get(keys(at)[0]))]
    row_ranges = [
        parquet.row_ranges_in({"tiered.row_ranges": m.metadata[b"tiered.row_ranges"]}) for m in said
    ]
    assert row_ranges[0] == row_ranges[1]
    assert said[0].num_row_groups == said[1].num_row_groups


def test_encodings_order_and_ids() -> None:
    at = job_context(slow_queues().store)
    packed(at)
    file = only_file(at)
    group = file.metadata.row_group(0)
    chunks = {group.column(n).path_in_schema: group.column(n) for n in range(group.num_columns)}
    for name in ("queue_offset", "physical_offset", "born_ts", "store_ts"):
        assert "DELTA_BINARY_PACKED" in chunks[name].encodings
        assert "PLAIN_DICTIONARY" not in chunks[name].encodings
    assert "RLE_DICTIONARY" in chunks["topic"].encodings
    assert all(chunk.has_column_index and chunk.has_offset_index for chunk in chunks.values())
    assert all(chunk.compression == "ZSTD" for chunk in chunks.values())
    ids = {field.name: field.metadata[b"PARQUET:field_id"] for field in file.schema_arrow}
    assert list(map(int, ids.values())) == list(range(1, len(ids) + 1))
    required = {field.name for field in schema() if not field.nullable}
    assert {f.name for f in file.schema_arrow if not f.nullable} == required
    order = [file.schema_arrow.names[one.column_index] for one in group.sorting_columns]
    assert order == ["topic", "queue_id", "incarnation", "queue_offset"]
    blooms = {name for name, chunk in chunks.items() if chunk.bloom_filter_offset}
    assert blooms == {"uniq_key", "msg_key", "keys.list.element"}


def test_a_row_group_ends_by_bytes_and_never_with_a_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = job_context(slow_queues().store), job_context(slow_queues().store)
    packed(whole)
    monkeypatch.setattr(parquet, "GROUP_BYTES", 4000)
    packed(cut)
    file = only_file(cut)
    groups = [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)]
    assert 1 < len(groups) < QUEUES / 2
    assert len(set(groups[:-1])) <= 2
    assert rows(cut) == rows(whole)
    check(cut)


def test_files_end_by_the_columns_of_all_days_together(monkeypatch: pytest.MonkeyPatch) -> None:
    at = job_context(slow_queues().store)
    monkeypatch.setattr(task, "FILE_BYTES", 4000)
    packed(at)
    assert len(keys(at)) > 1
    assert check(at).rows == 2 * QUEUES
    log = log_writer(at)
    result = merge(at, log, plan_merge(log.state, takes=lambda _queue: True))
    assert (result.new_files, result.rows) == (1, 2 * QUEUES)
    assert check(at).rows == 2 * QUEUES


def test_rows_that_are_not_in_order_are_refused() -> None:
    at = job_context(slow_queues().store)
    packed(at)
    (batch,) = only_file(at).read().to_batches()
    queue = ArchiveQueue("c", "b", TOPIC, 0, 0)
    writer = FileWriter()
    writer.add(batch.slice(1, 1), queue, 0)
    for place, start in ((queue, 0), (queue, 1), (replace(queue, queue_id=-1), 0)):
        with pytest.raises(InternalError, match="not in order"):
            writer.add(batch.slice(0, 1), place, start)


def of_day(one: Task, day: int, size: int) -> Task:
    part = made_part(0, 0, COUNT, size)
    times = {"store_min_ms": day * DAY_MS + 5, "store_max_ms": day * DAY_MS + 9}
    return replace(one, parts=Parts.of([replace(part, **times)]))


def works_of(tasks: Sequence[Task]) -> list[list[tuple[int, int]]]:
    return [[(t.queue.queue_id, t.start) for t in work.tasks] for work in plan_works(tasks)]


def test_works_take_day_by_day_and_end_between_days() -> None:
    plan = plan_archive(tier(4, 2), Place("c", "b"), ArchiveState(), takes=lambda _topic: True)
    half = 30 << 20
    days = [of_day(one, number % 2, half) for number, one in enumerate(plan.tasks)]
    found = plan_works(days)
    assert [len(work.tasks) for work in found] == [4, 4]
    for work in found:
        assert len({t.parts.store_times for t in work.tasks}) == 1, "a day each"
        assert list(work.tasks) == sorted(work.tasks, key=lambda t: (t.queue, t.start))
    small = [of_day(one, number, 1000) for number, one in enumerate(plan.tasks)]
    assert [len(work.tasks) for work in plan_works(small)] == [8], "days of little come together"
    large = [of_day(one, 0, 64 << 20) for one in plan.tasks]
    assert works_of(large) == [[(t.queue.queue_id, t.start)] for t in large]


class Counted(WrappingStore):
    """Counts reads by key."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.reads: dict[str, int] = {}

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        self.reads[key] = self.reads.get(key, 0) + 1
        return super().get(key, byte_range)

    def get_ranges(self, key: str, byte_ranges: Sequence[ByteRange]) -> list[bytes]:
        self.reads[key] = self.reads.get(key, 0) + len(byte_ranges)
        return super().get_ranges(key, byte_ranges)


def test_an_object_in_which_queues_lie_together_is_fetched_once(
    sealed: Callable[[str], Sealed],
) -> None:
    with closing(open_store(sealed("s04-batch-compress").url, S3Options())) as store:
        at = replace(job_context(store), place=choose_place(store, None, None))
        tasks = plan_job(at, ArchiveState()).tasks
        topics = {t.queue.topic for t in tasks}
        topic = max(topics, key=lambda name: sum(t.queue.topic == name for t in tasks))
        work = Work(tuple(t for t in tasks if t.queue.topic == topic))
        assert len(work.tasks) > 1
        counted, alone = Counted(store), Counted(store)
        prefix = at.place.prefix
        together = do_work(WorkContext(counted, prefix, MemoryStore("a")), work)
        each_bench = WorkContext(alone, prefix, MemoryStore("b"))
        each = [do_work(each_bench, Work((t,))) for t in work.tasks]
        assert [(one.rows, one.sources) for one in together] == [
            (one.rows, one.sources) for (one,) in each
        ]
        assert sum(counted.reads.values()) < sum(alone.reads.values())
        whole = task._Bundles(store, at.place.prefix, work)._whole
        assert whole, "the capture has such an object"
        assert all(counted.reads[key] == 1 for key in whole)


def test_row_ranges_say_where_their_rows_lie() -> None:
    at = job_context(slow_queues().store)
    packed(at)
    file = only_file(at)
    said = {"tiered.row_ranges": file.metadata.metadata[b"tiered.row_ranges"]}
    table = file.read()
    places = parquet.row_ranges_in(said)
    assert len(places) == 2 * QUEUES
    for (queue, low), (start, proof) in places.items():
        mine = table.slice(start, proof.rows)
        assert np.unique(mine["queue_id"].to_numpy()).tolist() == [queue.queue_id]
        assert parquet.proof_of(mine) == proof
        assert proof.low == low


ROWS: list[dict[str, object]] = [
    {"n": 1, "t": "a", "l": ["x", None], "m": [("k", "v")], "s": {"b": True, "d": b"\0"}},
    {"n": None, "t": None, "l": None, "m": None, "s": None},
    {"n": 0, "t": "", "l": [], "m": [], "s": {"b": None, "d": b""}},
    {"n": 4, "t": "é", "l": [None, "y", ""], "m": [("k", None)], "s": {"b": False, "d": None}},
]
KINDS = pa.schema(
    [
        ("n", pa.int32()),
        ("t", pa.string()),
        ("l", pa.list_(pa.string())),
        ("m", pa.map_(pa.string(), pa.string())),
        ("s", pa.struct([("b", pa.bool_()), ("d", pa.binary())])),
    ]
)


def digest_of(rows: list[dict[str, object]], step: int) -> Digest:
    found = Digest()
    for at in range(0, len(rows), step):
        found.add(pa.Table.from_pylist(rows, KINDS).slice(at, step))
    return found


@pytest.mark.parametrize("first", range(len(ROWS)))
def test_a_digest_is_of_the_values_and_not_of_the_batches(first: int):
    rows = ROWS[first:] + ROWS[:first]
    whole = digest_of(rows, len(rows))
    assert all(digest_of(rows, step) == whole for step in (1, 2, 3))
    # What a null hides does not count: the same again, out of an array that has other bytes there.
    hidden = pa.array([7, 9], mask=np.array([False, True]))
    seen, known = Digest(), Digest()
    seen.add(pa.table({"n": hidden}))
    known.add(pa.table({"n": pa.array([7, None])}))
    assert seen == known


@pytest.mark.parametrize("at", range(len(ROWS)))
@pytest.mark.parametrize("name", KINDS.names)
def test_a_digest_tells_each_value_from_null_and_from_its_neighbours(at: int, name: str):
    whole = digest_of(ROWS, 2)
    for other in [row[name] for row in ROWS if row[name] != ROWS[at][name]]:
        changed = [*ROWS[:at], {**ROWS[at], name: other}, *ROWS[at + 1 :]]
        assert digest_of(changed, 2) != whole
    assert digest_of(ROWS[1:], 2) != whole
