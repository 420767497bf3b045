"""A full disk, for everything of an archive that writes: one clear error that says to make room, and then it goes on."""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

import pytest
from support.archive_jobs import archive, check, job_context
from support.command_line import here, program
from support.disks import Disk, small_disk
from support.spark_processes import SPARK
from support.tiers import TierBuilder

from backends.errors import StoreFullError
from backends.memory import MemoryStore
from tiered.archive.job import first_error
from tiered.archive.model import LOG
from tiered.spark import driver as spark
from tiered.upkeep.engine import WorkContext

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from support.archive_fixtures import Sealed
    from support.command_line import Ran
    from support.shop import Shop
    from typing_extensions import Buffer

SOON = ("--give-up-seconds", "0.2")
BIG = (
    "SET memory_limit = '40MB'; SET threads = 1; SELECT count(*) FROM (SELECT hash(i) AS h, repeat('x', 50) || i AS t"
    " FROM range({rows}) r(i) ORDER BY h, t) WHERE h > 0 AND t <> ''"
)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with small_disk(tmp_path / "disk", "16k") as made:
        yield made


def fill(disk: Disk) -> None:
    """Leave no room at all."""
    with (disk.path / "fill").open("wb", buffering=0) as file:
        room = os.statvfs(disk.path)
        file.write(bytes(room.f_bavail * room.f_frsize))


def refused(ran: Ran, code: int = 3) -> str:
    assert ran.code == code, ran
    assert "make room" in ran.error
    assert ran.err.count("No space left") == 1 or "disk is full" in ran.err
    return ran.error


def test_archiving_to_a_full_disk_ends_soon_and_goes_on_when_there_is_room(
    disk: Disk, sealed: Callable[[str], Sealed]
) -> None:
    tier, url = sealed("s04-batch-compress"), f"file://{disk.path}/parquet"
    words = ("archive", tier.url, "--to", url)
    ran = here(*words, *SOON, "--jobs", "1", "--pack-below", "0", "--json")
    refused(ran)
    said = ran.document
    assert len(said["failed"]) in {1, 2, 3}, "those under way; all others would wait and fail, too"
    assert said["postponed"] == said["planned"] - said["segments"] - len(said["failed"]) > 0
    disk.resize("64m")
    assert here(*words).good()
    assert here(*words, "--verify", "--json").good().document["rows"] == tier.dump.count
    assert disk.litter() == []


def test_merging_and_indexing_on_a_full_disk(disk: Disk, sealed: Callable[[str], Sealed]) -> None:
    tier, url = sealed("s04-batch-compress"), f"file://{disk.path}/parquet"
    words = ("archive", tier.url, "--to", url)
    disk.resize("64m")
    here(*words, "--pack-below", "0").good()
    disk.resize("1m")
    fill(disk)
    for more in ("--merge", "--key-index"):
        refused(here(*words, more, *SOON))
    disk.resize("64m")
    for more in ("--merge", "--key-index", "--verify"):
        here(*words, more).good()
    assert disk.litter() == []


class FullStore(MemoryStore):
    """Has room for a log, and for so many files."""

    def __init__(self, files: int) -> None:
        super().__init__("archive")
        self.files = files
        self.tries = 0

    def put_if_absent(self, key: str, data: Sequence[Buffer] | Buffer) -> None:
        if key.startswith("data/"):
            self.tries += 1
            if len(list(self.list("data/"))) >= self.files:
                raise StoreFullError("no room")
        super().put_if_absent(key, data)


def test_what_is_archived_before_there_is_no_room_stays(tmp_path: Path) -> None:
    made = TierBuilder()
    for number in range(21):
        made.add([b"%d" % number], roll=True)
    store = FullStore(3)
    at = job_context(made.store, store)
    result = archive(at)
    assert isinstance(first_error(result), StoreFullError)
    assert (result.segments, result.entries) == (3, 1)
    assert result.segments + len(result.failed) + result.not_begun == 20
    assert store.tries <= 6, "two wait for each job"
    assert [info.key for info in store.list(LOG)]
    store.files = 100
    assert archive(at).segments == 17
    assert check(at).rows == 20


def test_a_worker_of_spark_says_that_there_is_no_room() -> None:
    """As an error that ends the job, like that of a thread."""

    def no_room(*_given: object) -> None:
        raise StoreFullError("no room")

    bench = WorkContext(MemoryStore("tier"), "", MemoryStore("archive"))
    assert isinstance(spark.heard(spark.said(no_room, bench, None)), StoreFullError)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("which", ["metadata", "catalog"])
def test_publishing_on_a_full_disk(
    which: str, disk: Disk, sealed: Callable[[str], Sealed], tmp_path: Path
) -> None:
    tier = sealed("s04-batch-compress")
    root, catalog = (
        (disk.path, tmp_path) if which == "metadata" else (tmp_path / "whole", disk.path)
    )
    words = ("archive", tier.url, "--to", f"file://{root}/parquet")
    disk.resize("64m")
    here(*words).good()
    disk.resize("1m")
    fill(disk)
    words = (*words, "--publish", f"iceberg:sqlite:///{catalog}/catalog.db#lake")
    said = refused(here(*words))
    assert "SQL:" not in said
    disk.resize("64m")
    assert here(*words, "--json").good().document["published"]


def test_figures_that_find_no_room_stop_no_archiving(
    disk: Disk, sealed: Callable[[str], Sealed], archive_url: str
) -> None:
    tier = sealed("s04-batch-compress")
    fill(disk)
    metrics = disk.path / "archive.prom"
    words = ("archive", tier.url, "--to", archive_url, "--metrics-file", metrics)
    ran = here(*words, "--json")
    refused(ran, 2)
    assert ran.document["rows"] == tier.dump.count
    disk.resize("64m")
    here(*words).good()
    assert "tiered_archive_run_planned 0" in metrics.read_text()


def test_a_question_that_needs_more_room_than_there_is(
    disk: Disk, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not fit into memory goes where temporary files go, and nowhere else."""
    monkeypatch.setattr(tempfile, "tempdir", str(disk.path))
    disk.resize("2m")
    ran = here("sql", shop.archive, BIG.format(rows=2_000_000))
    assert ran.code == 2
    assert f"({disk.path}/tiered-sql-" in ran.error
    assert "make room" in ran.error
    assert list(disk.path.iterdir()) == []
    disk.resize("512m")
    assert here("sql", shop.archive, BIG.format(rows=2_000_000)).good()
    assert list(disk.path.iterdir()) == []


@pytest.mark.spark
@pytest.mark.slow  # a Spark of its own, which does each task four times
def test_a_question_for_which_spark_has_no_room(
    disk: Disk, sealed: Callable[[str], Sealed], archive_url: str
) -> None:
    here("archive", sealed("s01-basic").url, "--to", archive_url).good()
    disk.resize("2m")
    rows = "SELECT hash(id) AS h, repeat('x', 50) || id AS t FROM range(2000000) DISTRIBUTE BY h"
    ran = program(
        "sql",
        archive_url,
        f"SELECT count(*) FROM ({rows}) WHERE h > 0 AND t <> ''",
        *(*SPARK, "--spark-conf", f"spark.local.dir={disk.path}"),
    )
    assert ran.code == 2
    assert "No space left on device; make room where Spark works" in ran.error
