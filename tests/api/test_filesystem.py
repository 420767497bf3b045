"""A tier as a file system and as a dataset: other tools read it, and see what the API gives."""

from __future__ import annotations

import errno
import json
import multiprocessing
import pickle
import subprocess
import sys
import zipfile
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import duckdb
import fsspec
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.tests.abstract.common import GLOB_EDGE_CASES_TESTS
from hypothesis import given
from hypothesis import strategies as st
from support.golden import FOLDER
from support.opened import Made
from support.tiers import TIME_MS

import tiered
from tiered.api import filesystem
from tiered.api.filesystem import FileRange, TieredFileSystem, folder_of, offset_ranges, topic_of
from tiered.errors import InvalidError
from tiered.log.parts import PART, Parts
from tiered.model import MessageQueue, QueueBounds, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.servers import S3Server

    from tiered.api.tier import Tier

GOLDEN = FOLDER / "0.2"
URL = f"file://{GOLDEN}/tier"
QUEUES = [MessageQueue("orders", 0), MessageQueue("orders", 1), MessageQueue("%RETRY%shop", 0)]


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    """As an installed package is; a checkout may be older than its entry points."""
    fsspec.register_implementation("tiered", TieredFileSystem, clobber=True)
    yield
    for opened in TieredFileSystem._cache.values():
        opened.close()
    TieredFileSystem.clear_instance_cache()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """Two queues of 40 messages of a KiB, in 4 parts each, and a retry topic; files of some KiB."""
    monkeypatch.setattr(filesystem, "FILE_BYTES", 8_000)
    made = Made()
    for first in range(0, 40, 10):
        for queue in QUEUES[:2]:
            made.add(*(b"%d " % (first + n) + b"x" * 1000 for n in range(10)), queue=queue)
    made.add(b"again", queue=QUEUES[2])
    return made


@pytest.fixture
def tier(made: Made) -> Iterator[Tier]:
    with made.open() as tier:
        yield tier


@pytest.fixture
def files(tier: Tier) -> TieredFileSystem:
    return TieredFileSystem(tier=tier, skip_instance_cache=True)


@pytest.fixture
def local(files: TieredFileSystem, tmp_path: Path) -> Path:
    """The same files in a folder, as fsspec's own `get` copies them."""
    files.get("", f"{tmp_path}/copy", recursive=True)
    return tmp_path / "copy"


# -- files -----------------------------------------------------------------------------------------


def test_it_looks_like_the_folder_that_it_is_copied_to(files: TieredFileSystem, local: Path):
    """Each way of looking, of fsspec's interface, gives what it gives of a local folder."""
    folder, root = LocalFileSystem(), f"{local}/"

    def here(found: list[str]) -> list[str]:
        return sorted(name.removeprefix(root).strip("/") for name in found if name != root[:-1])

    paths = ["orders", "orders/1", *files.find("")]
    assert sorted(files.find("")) == here(folder.find(str(local)))
    there = here(folder.find(f"{root}orders", withdirs=True))
    assert sorted(files.find("orders", withdirs=True)) == there
    for (at, folders, names), (there, *rest) in zip(
        files.walk("orders"), folder.walk(f"{root}orders"), strict=True
    ):
        assert (at, sorted(folders), sorted(names)) == (
            there.removeprefix(root),
            *map(sorted, rest),
        )
    for path in paths:
        there = root + path
        for ask in ("exists", "isdir", "isfile"):
            assert getattr(files, ask)(path) == getattr(folder, ask)(there), (ask, path)
        assert sorted(files.ls(path, detail=False)) == here(folder.ls(there, detail=False))
        assert files.info(path)["type"] == folder.info(there)["type"]
        if files.isfile(path):
            assert files.cat_file(path) == folder.cat_file(there)
            assert files.size(path) == folder.size(there)
            assert files.cat_file(path, 10, 50) == folder.cat_file(there, 10, 50)
            assert files.head(path, 9) == folder.head(there, 9)
            assert files.tail(path, 9) == folder.tail(there, 9)
            assert files.read_block(path, 20, 99) == folder.read_block(there, 20, 99)
    patterns = [
        "*",
        "**",
        "orders/*",
        "orders/*/*.jsonl",
        "*/0/*",
        "**.arrow",
        "%RETRY%*/**",
        "o?ders/[01]",
    ]
    patterns += [case[0] for case in GLOB_EDGE_CASES_TESTS["argvalues"]]
    for pattern in patterns:
        try:
            wanted = here(folder.glob(root + pattern))
        except ValueError:
            with pytest.raises(ValueError, match="Invalid pattern"):
                files.glob(pattern)
        else:
            assert sorted(files.glob(pattern)) == wanted, pattern


def test_what_is_not_there(files: TieredFileSystem):
    for path in (
        "nothing", "orders/7", "orders/x", "orders/0/0-1.csv", "orders/0/40-50.arrow", "orders/0/5-5.jsonl",
        "orders/0/x/y",
    ):  # fmt: skip
        assert not files.exists(path), path
        with pytest.raises(FileNotFoundError):
            files.info(path)
        with pytest.raises(FileNotFoundError):
            files.open(path)
    with pytest.raises(IsADirectoryError):
        files.open("orders/0")


def test_nothing_is_written(files: TieredFileSystem):
    first = files.find("")[0]
    for change in (
        lambda: files.open(first, "wb"),
        lambda: files.open(first, "ab"),
        lambda: files.mkdir("new"),
        lambda: files.makedirs("new/one"),
        lambda: files.rm(first),
        lambda: files.rm("orders", recursive=True),
        lambda: files.mv(first, "orders/x"),
        lambda: files.cp_file(first, "orders/x"),
        lambda: files.touch(first),
        lambda: files.pipe(first, b"x"),
    ):
        with pytest.raises(OSError) as refused:
            change()
        assert refused.value.errno == errno.EROFS


def test_both_forms_have_what_the_api_gives(files: TieredFileSystem, tier: Tier):
    for queue in tier.queues():
        wanted = list(tier.read(*queue))
        listed = files.ls(f"{queue.topic}/{queue.queue_id}", detail=False)
        lines = b"".join(files.cat_file(path) for path in listed if path.endswith(".jsonl"))
        assert [json.loads(line) for line in lines.splitlines()] == [m.to_json() for m in wanted]
        tables = [
            pa.ipc.open_file(files.open(path)).read_all() for path in listed if ".arrow" in path
        ]
        assert (
            pa.concat_tables(tables).to_pylist()
            == pa.Table.from_batches(tier.read_arrow(*queue)).to_pylist()
        )


def test_any_range_can_be_named(files: TieredFileSystem):
    rows = files.cat_file("orders/1/7-23.jsonl").splitlines()
    assert [json.loads(row)["queue_offset"] for row in rows] == list(range(7, 23))
    info = files.info("orders/1/7-23.arrow")
    assert (info["store_min_ms"], info["store_max_ms"]) == (TIME_MS, TIME_MS + 29)
    assert files.modified("orders/1/7-23.arrow") == datetime.fromtimestamp(
        (TIME_MS + 29) / 1000, UTC
    )


def test_what_is_committed_later_is_seen_after_the_cache_is_dropped(
    made: Made, files: TieredFileSystem
):
    before = files.find("orders")
    made.add(b"late", queue=MessageQueue("late", 0))
    assert not files.exists("late")
    files.invalidate_cache()
    assert files.ls("late", detail=False) == ["late/0"]
    assert files.find("orders") == before


PARTS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 50), st.integers(1, 300), st.booleans()),
    max_size=12,
)


@given(PARTS, st.integers(0, 99), st.integers(0, 400), st.integers(1, 200))
def test_files_cover_a_queue_once_and_are_no_larger_than_they_may_be(parts, low, end, file_bytes):
    rows, at, real = np.zeros(len(parts), PART), 0, set()
    for row, (gap, count, size, is_holes) in zip(rows, parts, strict=True):
        at += gap
        row["queue_offset"], row["count"], row["log_bytes"] = at, count, 0 if is_holes else size
        row["store_min_ms"] = row["store_max_ms"] = -1 if is_holes else at
        real |= set() if is_holes else set(range(at, at + count))
        at += count
    bounds = QueueBounds(QueueOffset(low), QueueOffset(max(low, min(end, at))))
    made = offset_ranges(Parts(rows, [None] * len(rows)), bounds, file_bytes)
    covered = [offset for one in made for offset in range(one.start, one.stop)]
    assert covered == sorted({*covered})
    assert {*covered} == real & set(range(bounds.min, bounds.end))
    assert all(one.log_bytes <= file_bytes or one.stop == one.start + 1 for one in made)
    assert all(isinstance(one, FileRange) and one.start < one.stop for one in made)


# -- where the tier is -----------------------------------------------------------------------------


def test_a_chain_a_url_and_options_name_the_tier():
    chained, path = fsspec.url_to_fs(f"tiered://orders/0::{URL}")
    assert path == "orders/0"
    assert chained.ls(path) == fsspec.filesystem("tiered", url=URL).ls(path)
    assert fsspec.filesystem("tiered", url=URL) is fsspec.filesystem("tiered", url=URL)
    again = pickle.loads(pickle.dumps(chained))
    assert again.find("") == chained.find("")
    again.close()
    with fsspec.open(f"tiered://orders/0/2-4.jsonl::{URL}", "rt") as lines:
        assert [json.loads(line)["keys"] for line in lines] == ["order-2", "order-3"]
    several = fsspec.open_files("tiered://prices/0/*.jsonl", url=URL)
    assert [file.path for file in several] == [chained.glob("prices/0/*.jsonl")[0]]
    chained.close()
    assert chained.exists("orders")  # it is opened again


def test_a_tier_has_to_be_named():
    with pytest.raises(InvalidError, match="chain it"):
        fsspec.filesystem("tiered")
    with pytest.raises(InvalidError, match="not opened with secret"):
        fsspec.filesystem("tiered", fo="b/p", target_protocol="s3", target_options={"secret": "x"})
    chained = TieredFileSystem(
        fo="bucket/prefix", target_protocol="s3", target_options={"region": "eu-west-1"}
    )
    assert (chained._url, chained._options.region) == ("s3://bucket/prefix", "eu-west-1")


def test_a_tier_on_s3(moto_environment: S3Server):
    """By our own client; a chain has s3fs name the place, and nothing more."""
    url = f"s3://{moto_environment.bucket()}/deep/t"
    made = Made(url)
    made.add(b"first", b"second")
    made.builder.store.close()
    found = fsspec.filesystem("tiered", url=url).cat_file("orders/0/1-2.jsonl")
    assert json.loads(found)["queue_offset"] == 1
    with fsspec.open(f"tiered://orders/0/1-2.jsonl::{url}") as file:
        assert file.read() == found


def read_in_child(url: str) -> int:
    return len(fsspec.filesystem("tiered", url=url).find(""))


def test_a_forked_process_opens_a_tier_of_its_own():
    found = read_in_child(URL)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map_async(read_in_child, [URL]).get(60) == [found]


def test_the_wheel_registers_it(root_wheel: Path):
    code = f"import fsspec; print(len(fsspec.filesystem('tiered', url={URL!r}).find('')))"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(root_wheel)}, cwd=root_wheel,
    )  # fmt: skip
    assert ran.stdout == f"{read_in_child(URL)}\n", ran.stderr


@pytest.fixture
def root_wheel(tmp_path: Path) -> Path:
    """The unpacked wheel."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=FOLDER.parents[2], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "unpacked")
    return tmp_path / "unpacked"


# -- what reads it ---------------------------------------------------------------------------------


def test_pandas_and_duckdb_read_files(files: TieredFileSystem):
    frame = pd.read_json(f"tiered://orders/0/2-8.jsonl::{URL}", lines=True)
    assert frame["queue_offset"].tolist() == [2, 3, 4, 5, 7]
    with fsspec.open("tiered://orders/0/2-8.arrow", url=URL) as file:
        assert pd.read_feather(file)["queue_offset"].tolist() == [2, 3, 4, 5, 7]
    with duckdb.connect() as connection:
        connection.register_filesystem(files)
        question = "SELECT count(*), sum(queue_offset) FROM read_json('tiered://orders/*/*.jsonl')"
        assert connection.sql(question).fetchall() == [(80, 2 * sum(range(40)))]


def opens(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files that are made from now on."""
    made, real = [], TieredFileSystem._make

    def noted(self: TieredFileSystem, path: str) -> bytes:
        made.append(path)
        return real(self, path)

    monkeypatch.setattr(TieredFileSystem, "_make", noted)
    return made


def test_a_dataset_is_what_the_api_reads(tier: Tier):
    dataset = tier.dataset("orders")
    wanted = pa.concat_tables(
        pa.Table.from_batches(tier.read_arrow("orders", queue)) for queue in (0, 1)
    )
    assert dataset.to_table().equals(wanted)
    assert dataset.schema == wanted.schema
    assert dataset.count_rows() == 80
    assert duckdb.sql("SELECT count(DISTINCT body) FROM dataset").fetchall() == [(40,)]
    assert (
        pl.scan_pyarrow_dataset(dataset).filter(pl.col("queue_offset") > 38).collect().height == 2
    )


@pytest.mark.parametrize(
    ("condition", "rows", "files"),
    [
        (ds.field("queue_offset") < 5, 10, 2),
        (ds.field("queue_id") == 1, 40, 8),
        ((ds.field("queue_id") == 1) & (ds.field("queue_offset").isin([0, 39])), 2, 2),
        (ds.field("topic") == "other", 0, 0),
        (ds.field("store_timestamp") >= datetime.fromtimestamp((TIME_MS + 35) / 1000, UTC), 10, 4),
        (ds.field("tags") == "a", 80, 16),
    ],
)
def test_a_filter_reads_what_can_have_such_rows_only(
    tier: Tier, monkeypatch: pytest.MonkeyPatch, condition: Any, rows: int, files: int
):
    made = opens(monkeypatch)
    found = tier.dataset("orders").to_table(filter=condition)
    assert found.num_rows == rows
    assert len(set(made)) == files


def test_columns_that_are_left_out_are_not_made(tier: Tier, monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []
    real = type(tier).read_arrow

    def noted(self: Tier, *place: Any, columns: Any) -> Any:
        asked.append(columns)
        return real(self, *place, columns=columns)

    monkeypatch.setattr(type(tier), "read_arrow", noted)
    found = tier.dataset("orders", columns=["queue_offset", "tags"]).to_table()
    assert found.column_names == ["queue_offset", "tags"]
    assert {tuple(columns) for columns in asked} == {("queue_offset", "tags")}


def test_fragment_by_fragment_one_file_is_made_at_a_time(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
):
    """A scan of the whole reads ahead as far as pyarrow allows."""
    made, rows = opens(monkeypatch), 0
    for number, fragment in enumerate(tier.dataset("orders").get_fragments()):
        rows += sum(batch.num_rows for batch in fragment.to_batches())
        assert len(made) == number + 1
    assert rows == 80


def test_without_fsspec_it_says_what_to_install(tier: Tier, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.delitem(sys.modules, "tiered.api.filesystem")
    with pytest.raises(InvalidError, match=r"needs fsspec, .*pip install 'tieredmq\[fsspec\]'"):
        tier.dataset("orders")


def test_datasets_that_there_cannot_be(tier: Tier):
    with pytest.raises(InvalidError, match="no topic nothing"):
        tier.dataset("nothing")
    with pytest.raises(InvalidError, match="no column 'nothing'"):
        tier.dataset("orders", columns=["nothing"])


def test_kafkas_records_in_their_words():
    with tiered.open(f"file://{GOLDEN}/kafka") as tier:
        dataset = tier.dataset("txn")
        found = dataset.to_table(filter=ds.field("offset") < 100)
        wanted = [row for batch in tier.read_arrow("txn", 0) for row in batch.to_pylist()]
        assert dataset.to_table().to_pylist() == wanted
        assert found.to_pylist() == [row for row in wanted if row["offset"] < 100]
        files = TieredFileSystem(tier=tier, skip_instance_cache=True)
        (name,) = files.glob("txn/0/*.jsonl")
        assert len(files.cat_file(name).splitlines()) == len(wanted)


def test_joyqueues_topics_have_slashes():
    with tiered.open(f"file://{GOLDEN}/jmq") as tier:
        files = TieredFileSystem(tier=tier, skip_instance_cache=True)
        assert files.ls("", detail=False) == ["jd%2Fshipments"]
        assert files.ls("jd%2Fshipments", detail=False) == ["jd%2Fshipments/0"]
        (name,) = files.glob("jd*/0/*.jsonl")
        rows = [json.loads(line) for line in files.cat_file(name).splitlines()]
        assert rows == [message.to_json() for message in tier.read("jd/shipments", 0)]
        found = tier.dataset("jd/shipments").to_table(filter=ds.field("index") < 5)
        assert found["index"].to_pylist() == [0, 1, 2, 3, 4]


@given(st.lists(st.sampled_from(["/", "%", "2", "5", "F", "a"]), max_size=8).map("".join))
def test_a_folder_stands_for_one_topic(topic: str):
    assert "/" not in folder_of(topic)
    assert topic_of(folder_of(topic)) == topic
