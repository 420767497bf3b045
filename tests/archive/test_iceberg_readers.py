"""Tables in Iceberg as other programs read them: DuckDB's extension, and a Spark for which Iceberg has a runtime.

Each is of one version with what it reads Iceberg by, and this project's own are newer ones; so each has an environment of
its own below ``.tools``, from the package index by ``requirements/iceberg-*.txt``. Spark's jars Maven alone has.
"""

from __future__ import annotations

import subprocess
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from support.archive_jobs import archive, job_context
from support.bodies import KINDS, ORDER, wishes
from support.command_line import environment
from support.environments import ROOT, fetched, python_of
from support.lakes import published, table_of
from support.tiers import QUEUE, TierBuilder

from backends.registry import open_store
from backends.s3_settings import S3Options
from tiered.archive.job import log_writer
from tiered.archive.merging import merge, plan_merge
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from tiered.archive.task import JobContext

pytestmark = [
    pytest.mark.slow,  # what reads is fetched when it is not there yet: half a gigabyte
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
]
OUTSIDE = Path(__file__).parent / "outside"
JARS = (
    "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0",
    "org.xerial:sqlite-jdbc:3.50.3.0",
)
"""For the Spark of ``requirements/iceberg-spark.txt``: a runtime is made for one minor version each."""
COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy"
CONDITION = "queue_id = 3 AND queue_offset >= 1 AND store_ts >= '2023-01-01 00:00:00'"


def jars() -> list[Path]:
    home = ROOT / ".tools" / "iceberg-jars"
    paths = [home / "{1}-{2}.jar".format(*jar.split(":")) for jar in JARS]
    for jar, path in zip(JARS, paths, strict=True):
        if not path.exists():
            given = (f"-Dartifact={jar}", f"-DoutputDirectory={home}")
            fetched(
                f"{jar}, of Maven's repository,", "mvn", "--batch-mode", "--quiet", COPY, *given
            )
    return paths


@pytest.fixture
def catalog(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/catalog.db"


@pytest.fixture
def table(tmp_path: Path, catalog: str) -> Any:
    """One with columns that came later, files replaced by a merge, and rows out of the order in which they were archived."""
    with closing(open_store(f"file://{tmp_path}/parquet", S3Options())) as store:
        tier = TierBuilder()
        tier.add([ORDER, b"\0\xff"], roll=True)
        tier.add([b"open"], roll=True)
        at = job_context(tier.store, store)
        archive(at)
        published(at, catalog)
        plain, typed = wishes("json", schema=KINDS), wishes(records=True)
        for number, wish in enumerate((plain, typed)):
            tier.add([ORDER, b"misfit"], roll=True)
            for body in (ORDER, b"open"):
                tier.add([body], queue=MessageQueue(QUEUE.topic, number), roll=True)
            archive(replace(at, wishes=wish))
            published(at, catalog)
        _merge(at)
        published(at, catalog)
        return table_of(catalog, QUEUE.topic)


def _merge(at: JobContext) -> None:
    log = log_writer(at)
    assert merge(at, log, plan_merge(log.state, takes=lambda _queue: True)).entries


def require_same(table: Any, out: Path, said: str) -> None:
    """What another program has read is what pyiceberg reads: every column of every row."""
    wanted = table.scan().to_arrow()
    found = pq.read_table(out)
    assert found.column_names == wanted.column_names
    assert _rows(found) == _rows(wanted)
    assert {row["value_id"] for row in _rows(wanted)} == {None, 7}
    chosen = table.scan(row_filter="queue_id == 3 and queue_offset >= 1").to_arrow()
    assert int(said) == len(chosen) > 0


def _rows(found: Any) -> list[dict[str, Any]]:
    return sorted(found.to_pylist(), key=lambda row: (row["queue_id"], row["queue_offset"]))


def run(name: str, program: str, *words: str | Path) -> str:
    done = subprocess.run(
        [python_of(name), OUTSIDE / program, *words],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_duckdb_reads_a_table_as_pyiceberg_does(table: Any, tmp_path: Path) -> None:
    place = table.metadata_location.removeprefix("file://")
    out = tmp_path / "out.parquet"
    require_same(table, out, run("iceberg-duckdb", "by_duckdb.py", place, CONDITION, out))


@pytest.mark.spark
@pytest.mark.java
def test_spark_reads_a_table_as_pyiceberg_does(table: Any, tmp_path: Path) -> None:
    name, out = ".".join(table.name()), tmp_path / "out"
    words = (tmp_path / "catalog.db", f"file://{tmp_path}/warehouse", name, CONDITION, out, *jars())
    require_same(table, out, run("iceberg-spark", "by_spark.py", *words))
