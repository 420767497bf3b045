"""A flipped bit in a file of an archive is never given out as data: our readers give what was written, or say damage."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from support.archive_jobs import archive, check, index, job_context
from support.archives_made import make_archive
from support.tiers import QUEUE, TierBuilder

from backends.base import ByteRange
from backends.memory import MemoryStore
from backends.registry import open_store
from backends.s3_settings import S3Options
from tiered.archive import parquet
from tiered.archive.audit import verify_archive
from tiered.archive.checked_ranges import ObjectFile
from tiered.archive.columns import schema
from tiered.archive.duck import ask
from tiered.archive.job import first_error, log_writer, run_job
from tiered.archive.lookup import lookup, read_index
from tiered.archive.merging import plan_merge
from tiered.archive.selection import Selection
from tiered.archive.tables import explain
from tiered.errors import DataError, InternalError
from tiered.model import MessageQueue
from tiered.spark.frames import file_uris
from tiered.spark.source import ArchiveReader
from tiered.upkeep.engine import local_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from backends.base import ObjectStore
    from tiered.archive.task import JobContext

FLIPS = 60
"""Of each file; a bit anywhere."""


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobContext]:
    """Two queues that share a file, and messages with keys, in a folder."""
    store = open_store(f"file://{tmp_path_factory.mktemp('flips')}/parquet", S3Options())
    tier = TierBuilder()
    for queue_id in (0, 1):
        queue = MessageQueue(QUEUE.topic, queue_id)
        bodies = [b"body %d of %d" % (number, queue_id) for number in range(40)]
        tier.add(bodies, queue=queue, roll=True)
        tier.add([b"open"], queue=queue, roll=True)
    made = job_context(tier.store, store)
    run_job(made, local_engine(made.context, 1), small_bytes=1 << 20)
    yield made
    store.close()


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ObjectStore, list[str]]]:
    """A file of several row groups with keys, and its unique ids."""
    store = open_store(f"file://{tmp_path_factory.mktemp('keyed')}/parquet", S3Options())
    yield store, make_archive(store, files=1, rows=300, group_rows=100, rng=random.Random(2))
    store.close()


def only_file(store: ObjectStore) -> Path:
    from support.archive_rows import files

    (file,) = files(store.url)
    return file


def by_source(store: ObjectStore) -> Any:
    reader = ArchiveReader({"path": store.url}, schema(), Selection())
    found = [rows for part in reader.partitions() for rows in reader.read(part)]
    return pa.Table.from_batches(found).to_pylist()


def by_duckdb(store: ObjectStore) -> Any:
    question = f'SELECT * FROM "{QUEUE.topic}" ORDER BY queue_id, queue_offset'
    return ask(store, question).rows.to_pylist()


def by_uris(store: ObjectStore) -> Any:
    """What is handed to others has been proven; they read it afterwards."""
    return [uri for uri in file_uris(store) if store.url]


READERS: dict[str, Callable[[ObjectStore], Any]] = {
    "the source of Spark": by_source,
    "sql": by_duckdb,
    "names for others": by_uris,
}


def flipped_bits(file: Path, seed: int) -> Iterator[int]:
    """A file with one other bit, in a row of tries; afterwards it is as it was."""
    whole, chance = file.read_bytes(), random.Random(seed)
    try:
        for _ in range(FLIPS):
            bit = chance.randrange(8 * len(whole))
            data = bytearray(whole)
            data[bit // 8] ^= 1 << bit % 8
            file.write_bytes(data)
            yield bit
    finally:
        file.write_bytes(whole)


@pytest.mark.parametrize("name", READERS)
def test_a_flipped_bit_is_damage_or_changes_nothing(name: str, at: JobContext) -> None:
    read, store = READERS[name], at.archive
    wanted, said = read(store), 0
    for bit in flipped_bits(only_file(store), seed=len(name)):
        try:
            assert read(store) == wanted, f"bit {bit} was given out"
        except DataError:
            said += 1
    assert said > FLIPS // 3
    assert read(store) == wanted


def test_a_flipped_bit_is_a_finding_and_stops_a_merge(at: JobContext) -> None:
    log = log_writer(at)
    plan = plan_merge(log.state, takes=lambda _queue: True, small_bytes=1 << 30)
    assert plan == []
    from support.archives_made import row_ranges_of

    from tiered.archive.merging import Together, write_together

    row_ranges = list(row_ranges_of(log.state.queues))
    one = Together.of(row_ranges, 0)
    for _ in flipped_bits(only_file(at.archive), seed=1):
        assert verify_archive(at, local_engine(at.context, 1)).findings
        with pytest.raises(DataError, match="other bytes than the archive's log says"):
            write_together(at.context, one)
    check(at)


def test_a_key_is_found_or_the_damage_named(keyed: tuple[ObjectStore, list[str]]) -> None:
    store, ids = keyed
    wanted = [lookup(store, Selection(key=ids[n])).rows.to_pylist() for n in (0, 150, 299)]
    whole = explain(store, Selection(key=ids[150])).document()
    said = 0
    for bit in flipped_bits(only_file(store), seed=3):
        for number, rows in zip((0, 150, 299), wanted, strict=True):
            try:
                found = lookup(store, Selection(key=ids[number])).rows.to_pylist()
                assert found == rows, f"bit {bit} hides or changes a message"
                assert explain(store, Selection(key=ids[150])).document() == whole
            except DataError:
                said += 1
    assert said > FLIPS // 10


def test_an_index_is_never_made_of_damaged_filters(keyed: tuple[ObjectStore, list[str]]) -> None:
    store, _ = keyed

    def made() -> list[bytes]:
        index(store)
        found = [info.key for info in store.list("_keys/")]
        data = [store.get(key) for key in found]
        assert read_index(store)
        for key in found:
            store.delete(key)
        return data

    wanted, said = made(), 0
    for bit in flipped_bits(only_file(store), seed=4):
        try:
            assert made() == wanted, f"bit {bit} is in the index"
        except DataError:
            said += 1
    assert said > 0


def test_threads_that_share_a_file_read_each_its_own_place() -> None:
    """As DuckDB's do: each seeks and then reads, and others may come between."""
    store = MemoryStore("shared")
    data = parquet.write_small(pa.table({"text": [random.Random(4).randbytes(300_000)]}))
    store.put_if_absent("file", data)
    file = ObjectFile(store, "file", len(data))
    meeting = Barrier(8, timeout=60)

    def read(at: int) -> bytes:
        file.seek(at)
        meeting.wait()
        return file.read(5000)

    with ThreadPoolExecutor(8) as pool:
        places = range(0, 8 * 5000, 5000)
        assert list(pool.map(read, places)) == [data[at : at + 5000] for at in places]
    for start in (0, 5, len(data) - 100_000, len(data) - 300):
        ranges = [ByteRange(start, end) for end in (start + 1, len(data) - 200, len(data))]
        assert file.read_ranges(ranges) == [data[r.start : r.end] for r in ranges]


@pytest.mark.parametrize("column", schema().names)
def test_a_file_that_says_another_value_is_not_published(
    column: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer of Parquet gets one value of one column wrong, bodies among them."""
    tier = TierBuilder()
    for body in (b"a", b"b", b"open"):
        tier.add([body, body], roll=True)
    at = job_context(tier.store)

    class Wrong:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def write_table(self, table: pa.Table, **given: Any) -> None:
            place = table.schema.get_field_index(column)
            kind = table.schema.field(column).type
            values = table[column].to_pylist()
            values[0] = other(values[0], kind)
            changed = pa.array(values, kind)
            self._inner.write_table(
                table.set_column(place, table.schema.field(column), changed), **given
            )

    true_writer = parquet.open_writer
    monkeypatch.setattr(parquet, "open_writer", lambda *given: Wrong(true_writer(*given)))
    result = archive(at)
    assert isinstance(first_error(result), InternalError)
    assert (result.segments, list(at.archive.list("data/"))) == (0, [])


def other(value: Any, kind: pa.DataType) -> Any:
    if pa.types.is_map(kind):
        return [*(value or []), ("x", "y")]
    if pa.types.is_list(kind):
        return [*(value or []), "x"]
    if pa.types.is_timestamp(kind):
        return None
    if pa.types.is_binary(kind):
        return bytes([value[0] ^ 1]) + value[1:]
    return (value or "") + "x" if pa.types.is_string(kind) else (value or 0) + 1
