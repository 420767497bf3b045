"""An archive's directory, read by programs that know nothing of its log: the same rows, and no false partition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import duckdb
import pandas as pd
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from support.archive_jobs import check, job_context
from support.command_line import here
from support.tiers import TierBuilder

from backends.registry import open_store
from backends.s3_settings import S3Options
from tiered.archive.columns import schema
from tiered.archive.job import run_job
from tiered.model import MessageQueue
from tiered.upkeep.engine import local_engine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.shop import Shop

Row = tuple[str, int, int, bytes]
NAMES = ("topic", "queue_id", "queue_offset", "body")
ODD = ("007", "7", "2026-01-01", "true", "null", "%RETRY%g", "orders", "Orders.1")
"""Topics whose names are numbers, days and the like to who guesses."""


def by_pandas(place: Path) -> Any:
    return pd.read_parquet(place)


def by_pyarrow(place: Path) -> Any:
    return pq.read_table(place).to_pandas()


def by_dataset(place: Path) -> Any:
    return ds.dataset(place, partitioning="hive").to_table().to_pandas()


def by_duckdb(place: Path) -> Any:
    return duckdb.sql(f"SELECT * FROM read_parquet('{place}/**/*.parquet')").df()


def by_duckdb_hive(place: Path) -> Any:
    files = f"'{place}/**/*.parquet'"
    return duckdb.sql(f"SELECT * FROM read_parquet({files}, hive_partitioning = true)").df()


def by_polars(place: Path) -> Any:
    import polars as pl

    found = pl.read_parquet(f"{place}/**/*.parquet", hive_partitioning=True)
    if (place / "data").exists():
        assert pl.read_parquet(place / "data").height == found.height
    return pd.DataFrame(found.to_dicts())


READERS: dict[str, Callable[[Path], Any]] = {
    "pandas": by_pandas,
    "pyarrow": by_pyarrow,
    "pyarrow's dataset": by_dataset,
    "duckdb": by_duckdb,
    "duckdb with partitions": by_duckdb_hive,
    "polars": by_polars,
}


def rows_of(frame: Any) -> list[Row]:
    return sorted(
        (str(row.topic), int(row.queue_id), int(row.queue_offset), bytes(row.body))
        for row in frame[list(NAMES)].itertuples()
    )


def require_true(frame: Any) -> None:
    """Each partition's value is true for its rows, and says no topic together with another."""
    more = set(frame.columns) - set(schema().names)
    assert more <= {"topic_dir", "date"}
    for row in frame.itertuples():
        if "date" in more:
            stored = row.store_ts.tz_convert("UTC") if row.store_ts.tz else row.store_ts
            assert str(row.date)[:10] == stored.strftime("%Y-%m-%d")
        if "topic_dir" in more:
            assert row.topic_dir in {row.topic, f"{row.topic}~"}
    if "topic_dir" in more:
        assert frame.groupby("topic_dir", observed=True)["topic"].nunique().max() == 1


@dataclass(frozen=True)
class Directory:
    """An archive's place, and what is in it."""

    place: Path
    rows: list[Row]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Directory:
    """Three queues of each topic share a file, one has a file of its own; a record is set aside."""
    place = tmp_path_factory.mktemp("directory") / "parquet"
    tier, wanted = TierBuilder(), []
    for topic in ODD:
        for queue_id in range(3):
            queue = MessageQueue(topic, queue_id)
            bodies = [b"%d of %s" % (n, topic.encode()) for n in range(2)]
            tier.add([*bodies, None], queue=queue, roll=True)
            tier.add([b"open"], queue=queue, roll=True)
            wanted += [(topic, queue_id, n, body) for n, body in enumerate(bodies)]
    store = open_store(f"file://{place}", S3Options())
    at = job_context(tier.store, store)
    run_job(at, local_engine(at.context, 1), small_bytes=1 << 20)
    check(at)
    assert list(store.list("_bad/"))
    assert list(store.list("_log/"))
    store.close()
    return Directory(place, sorted(wanted))


@pytest.mark.parametrize("name", READERS)
def test_plain_readers_of_the_directory_give_the_same_rows(name: str, directory: Directory) -> None:
    frame = READERS[name](directory.place)
    assert rows_of(frame) == directory.rows
    require_true(frame)


@pytest.mark.parametrize("name", READERS)
def test_plain_readers_of_one_topic_s_directory(name: str, directory: Directory) -> None:
    frame = READERS[name](directory.place / "data" / "topic_dir=007~")
    assert rows_of(frame) == [row for row in directory.rows if row[0] == "007"]
    require_true(frame)


@pytest.mark.parametrize("name", READERS)
def test_after_a_merge_and_its_clean_the_rows_are_the_same(
    name: str, shop: Shop, archive_url: str, tmp_path: Path
) -> None:
    words = ("archive", shop.tier, "--to", archive_url)
    here(*words, "--topics", "orders", "--pack-below", "0").good()
    here(*words).good()
    before = rows_of(READERS[name](tmp_path / "parquet"))
    assert len(before) == len(shop.sent)
    assert here(*words, "--merge", "--json").good().document["new_files"] > 0
    here(*words, "--clean", "--grace", "0s", "--apply", "-").good()
    frame = READERS[name](tmp_path / "parquet")
    assert rows_of(frame) == before
    require_true(frame)


@pytest.mark.spark
@pytest.mark.filterwarnings("ignore")
def test_spark_s_own_reader_of_the_directory(directory: Directory, session: Any) -> None:
    frame = session.read.parquet(f"file://{directory.place}")
    found = [tuple(row) for row in frame.select(*NAMES).collect()]
    assert sorted((t, q, o, bytes(body)) for t, q, o, body in found) == directory.rows
    assert frame.where("queue_id = 2").count() == len([r for r in directory.rows if r[1] == 2])
    require_true(frame.toPandas())


def test_nothing_but_messages_is_named_as_parquet(directory: Directory) -> None:
    files = {path.relative_to(directory.place) for path in directory.place.rglob("*.parquet")}
    assert files
    assert {path.parts[0] for path in files} == {"data"}
    columns = set(schema().names)
    assert not [part for path in files for part in path.parts if part.partition("=")[0] in columns]
