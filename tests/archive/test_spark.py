"""The same job by Spark: one session for all tests."""

from __future__ import annotations

import json
import pickle
import random
import re
import shutil
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from pyiceberg.catalog import load_catalog
from support.archive_jobs import as_engine
from support.archive_rows import java_rows, read_all, rows_of, said_by_archive, said_by_java
from support.archives_made import row_ranges_of
from support.command_line import here
from support.questions import ANSWERS, QUESTIONS, for_spark
from support.questions import rows_of as rows_of_answer
from support.servers import use_server

from backends.errors import ObjectNotFoundError
from backends.registry import open_store
from backends.s3_settings import S3Options
from backends.wrapping import WrappingStore
from tiered.api.broker_place import choose_place
from tiered.archive.audit import apply_repair, plan_repair, verify_archive
from tiered.archive.job import JobContext, log_writer, run_job
from tiered.archive.lookup import build
from tiered.archive.merging import Together, merge, plan_merge
from tiered.archive.publish import Destination, publish
from tiered.archive.tables import read_archive
from tiered.archive.task import do_work
from tiered.clock import SystemClock
from tiered.errors import DataError, ExpiredError, InvalidError, StoreUnavailableError
from tiered.spark import driver as spark
from tiered.spark.frames import ask_spark, make_views
from tiered.spark.source import register as register_sources
from tiered.upkeep.engine import WorkContext, local_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from support.archive_fixtures import Sealed
    from support.servers import S3Server
    from support.shop import Shop

    from backends.base import ByteRange
    from tiered.archive.plan import Work
    from tiered.upkeep.engine import Engine


def job(tier: str, archive: str, session: Any) -> Any:
    options = S3Options()
    source, target = open_store(tier, options), open_store(archive, options)
    place = choose_place(source, None, None)
    at = JobContext(source, place, target, target, SystemClock(), random.Random(1))
    engine = spark.spark_engine(session, spark.SparkOrder(tier, place.prefix, archive, options))
    try:
        return run_job(at, engine)
    finally:
        source.close()
        target.close()


@pytest.mark.spark
@pytest.mark.filterwarnings("ignore")
def test_spark_makes_the_same_archive(
    sealed: Callable[[str], Sealed], archive_url: str, tmp_path: Path, session: Any
) -> None:
    tier, local = sealed("s04-batch-compress"), f"file://{tmp_path}/local"
    result = job(tier.url, archive_url, session)
    assert (result.rows, result.failed) == (tier.dump.count, [])
    here("archive", tier.url, "--to", local).good()
    assert read_all(archive_url) == read_all(local)
    assert here("archive", tier.url, "--to", archive_url, "--json").document["planned"] == 0
    assert here("archive", tier.url, "--to", archive_url, "--verify").good()


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.filterwarnings("ignore")
def test_spark_merges_into_the_same_files(
    sealed: Callable[[str], Sealed], archive_url: str, tmp_path: Path, session: Any
) -> None:
    tier, local, options = sealed("s01-basic"), f"file://{tmp_path}/local", S3Options()
    for url in (archive_url, local):
        here("archive", tier.url, "--to", url, "--pack-below", "0").good()
    assert here("archive", tier.url, "--to", local, "--merge", "--json").document["new_files"]
    source, target, other = (open_store(url, options) for url in (tier.url, archive_url, local))
    with closing(source), closing(target), closing(other):
        place = choose_place(source, None, None)
        at = JobContext(source, place, target, target, SystemClock(), random.Random(1))
        order = spark.SparkOrder(tier.url, place.prefix, archive_url, options)
        log, engine = log_writer(at), spark.spark_engine(session, order)
        result = merge(at, log, plan_merge(log.state, takes=lambda _queue: True), engine=engine)
        assert (result.new_files, result.overtaken) == (result.planned, 0)
        assert log.state.queues == read_archive(other).queues
        assert here("archive", tier.url, "--to", archive_url, "--verify").good()
        one = Together.of(list(row_ranges_of(log.state.queues))[:1], 0)
        target.delete(one.row_ranges[0].file.key)
        with pytest.raises(DataError, match=re.escape(one.row_ranges[0].file.key)):
            merge(at, log, [one], engine=engine)


class OfDriver(WrappingStore):
    """The driver's own archive, of whose files it wants no byte: that is for tasks."""

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        assert not key.startswith("data/"), "the driver reads a file"
        return super().get(key, byte_range)

    def get_ranges(self, key: str, byte_ranges: Sequence[ByteRange]) -> list[bytes]:
        assert not key.startswith("data/"), "the driver reads a file"
        return super().get_ranges(key, byte_ranges)


@dataclass
class Desk:
    """Where an archive is looked after, and by whom."""

    at: JobContext
    engine: Engine

    def verified(self) -> tuple[Any, ...]:
        report = verify_archive(self.at, self.engine)
        return report.findings, report.files, report.rows, report.compared

    def repaired(self, *, by_bytes: bool) -> tuple[Any, ...]:
        log = log_writer(self.at)
        plan = plan_repair(self.at, log.state, self.engine, by_bytes=by_bytes)
        done = apply_repair(self.at, log, plan, self.engine)
        return plan["repairs"], plan["refusals"], done, log.state.queues

    def indexed(self) -> tuple[Any, ...]:
        built = build(self.at.archive, read_archive(self.at.archive), self.engine)
        return built, [self.at.archive.get(one.key) for one in self.at.archive.list("_keys/")]

    def published(self, catalog: str) -> list[Any]:
        place = Destination(f"sqlite:///{catalog}", "lake")
        tables = list(publish(self.at.archive, place, S3Options(), self.engine))
        with closing(load_catalog("tiered", uri=place.catalog)) as found:
            files = [
                [(f.record_count, f.file_size_in_bytes, f.column_sizes, f.value_counts, f.lower_bounds, f.split_offsets)
                 for task in found.load_table(one.table).scan().plan_files() for f in [task.file]]
                for one in tables
            ]  # fmt: skip
        return [
            (one.table, one.added, sorted(some, key=str))
            for one, some in zip(tables, files, strict=True)
        ]


@pytest.fixture
def desks(
    sealed: Callable[[str], Sealed], archive_url: str, tmp_path: Path, session: Any
) -> Iterator[tuple[Desk, Desk, Path]]:
    """Two archives of a tier, byte for byte the same: one for this process, one for Spark, whose driver reads no file."""
    tier, options, local = sealed("s04-batch-compress"), S3Options(), tmp_path / "local"
    here("archive", tier.url, "--to", archive_url).good()
    shutil.copytree(tmp_path / "parquet", local)
    urls = (tier.url, f"file://{local}", archive_url)
    source, mine, theirs = (open_store(url, options) for url in urls)
    with closing(source), closing(mine), closing(theirs):
        place = choose_place(source, None, None)
        one, two = (
            JobContext(source, place, store, store, SystemClock(), random.Random(1))
            for store in (mine, OfDriver(theirs))
        )
        order = spark.SparkOrder(tier.url, place.prefix, archive_url, options)
        yield (
            Desk(one, local_engine(one.context, 2)),
            Desk(two, spark.spark_engine(session, order)),
            local,
        )


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.filterwarnings("ignore")
def test_tasks_verify_and_repair_as_this_process_does(
    desks: tuple[Desk, Desk, Path], tmp_path: Path
) -> None:
    here_, there, local = desks
    whole = here_.verified()
    assert whole == there.verified()
    assert (whole[0], whole[2]) == ([], sum(map(len, read_all(f"file://{local}").values())))
    for folder in (local, tmp_path / "parquet"):
        files = sorted(folder.glob("data/**/*.parquet"), key=lambda file: file.stat().st_size)
        files[0].unlink()
        files[1].write_bytes(files[1].read_bytes()[:-7])
        data = files[2].read_bytes()
        files[2].write_bytes(bytes([*data[:60], data[60] ^ 1, *data[61:]]))
    found = here_.verified()
    assert found == there.verified()
    assert {one.what for one in found[0]} >= {
        "a file of the archive is gone",
        "a file of the archive has other bytes than the archive's log says",
    }
    for by_bytes, count in ((False, 2), (True, 1)):
        repaired = here_.repaired(by_bytes=by_bytes)
        assert repaired == there.repaired(by_bytes=by_bytes)
        assert (repaired[2].made, repaired[2].failed) == (count, [])
    assert here_.verified() == there.verified() == whole


@pytest.mark.spark
@pytest.mark.filterwarnings("ignore")
def test_tasks_index_keys_and_read_footers_as_this_process_does(
    desks: tuple[Desk, Desk, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here_, there, _ = desks
    index = here_.indexed()
    assert index == there.indexed()
    assert (index[0].files > 1, len(index[1])) == (True, 1)
    tables = here_.published(f"{tmp_path}/here.db")
    assert sum(added for _, added, _ in tables) == index[0].files

    def refuses(*_given: object) -> None:
        raise AssertionError("the driver reads a footer")

    monkeypatch.setattr("pyiceberg.io.pyarrow.parquet_file_to_data_file", refuses)
    monkeypatch.setattr("pyiceberg.io.pyarrow.parquet_files_to_data_files", refuses)
    assert tables == there.published(f"{tmp_path}/there.db")
    with pytest.raises(StoreUnavailableError, match="reads a footer"):
        here_.published(f"{tmp_path}/again.db")


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", ["folder", "ministack"])
def test_spark_reads_what_java_found(
    place: str,
    sealed: Callable[[str], Sealed],
    archive_url: str,
    session: Any,
    *,
    ministack: S3Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier, options, url = sealed("s01-basic"), S3Options(), archive_url
    if place == "ministack":
        use_server(ministack, monkeypatch)
        url = f"s3://{ministack.bucket()}/parquet"
    here("archive", tier.url, "--to", url).good()
    archive = open_store(url, options)
    try:
        assert set(make_views(session, archive, url, options)) == set(tier.dump.messages)
        for topic, messages in tier.dump.messages.items():
            table = ask_spark(session, archive, f"SELECT * FROM `{topic}`", url, options)
            rows = sorted(rows_of(table), key=lambda row: (row["queue_id"], row["queue_offset"]))
            assert [said_by_archive(row) for row in rows] == [said_by_java(m) for m in messages]
        with pytest.raises(InvalidError, match="nope"):
            ask_spark(session, archive, "SELECT * FROM nope", url, options)
    finally:
        archive.close()


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_source_reads_chosen_files_and_columns(
    sealed: Callable[[str], Sealed], archive_url: str, session: Any
) -> None:
    tier = sealed("s01-basic")
    here("archive", tier.url, "--to", archive_url).good()
    register_sources(session)
    source = session.read.format("tieredmq").option("topic", "orders")
    some = source.schema("keys array<string>, queue_offset long").option("queue", "1")
    wanted = [m for m in tier.dump.messages["orders"] if m["queue_id"] == 1]
    found = {row["queue_offset"]: row["keys"] for row in some.load(archive_url).collect()}
    assert found == {m["queue_offset"]: (m["keys"] or "").split() or None for m in wanted}
    assert source.option("queue", "1").option("until", "1000").load(archive_url).count() == 0


@pytest.mark.spark
@pytest.mark.filterwarnings("ignore")
def test_spark_reads_archive_and_tier_alike(
    sealed: Callable[[str], Sealed], archive_url: str, session: Any
) -> None:
    tier = sealed("s04-batch-compress")
    here("archive", tier.url, "--to", archive_url).good()
    register_sources(session)
    order = ["topic", "queue_id", "queue_offset"]
    both = [
        session.read.format("tieredmq").load(url).orderBy(order).toArrow()
        for url in (archive_url, tier.url)
    ]
    assert both[0].equals(both[1])
    assert java_rows(tier) == [said_by_archive(row) for row in rows_of(both[0])]
    topic, messages = max(tier.dump.messages.items(), key=lambda pair: len(pair[1]))
    chosen = messages[len(messages) // 2]
    name = chosen["properties"]["UNIQ_KEY"]
    wanted = [m for m in messages if m["properties"].get("UNIQ_KEY") == name]
    before = [m for m in messages if m["store_timestamp_ms"] < chosen["store_timestamp_ms"]]
    for kind, url in (("rmq_archive", archive_url), ("rmq_tier", tier.url)):
        source = session.read.format(kind).option("topic", topic)
        assert source.option("uniq-key", name).load(url).count() == len(wanted) > 0
        narrow = session.read.format(kind).schema("queue_offset long, tag string")
        behind = narrow.option("topic", topic).option("until", str(chosen["store_timestamp_ms"]))
        found = sorted(row["queue_offset"] for row in behind.load(url).collect())
        assert found == sorted(m["queue_offset"] for m in before)
    with pytest.raises(Exception, match="no option nope"):
        session.read.format("tieredmq").option("nope", "1").load(tier.url).count()


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.filterwarnings("ignore")
def test_a_stream_tells_of_each_message_once_over_restarts(
    sealed: Callable[[str], Sealed], tmp_path: Path, session: Any
) -> None:
    tier = sealed("s04-batch-compress")
    register_sources(session)
    out, most = tmp_path / "out", tier.dump.count // 2 + 1

    def run() -> list[int]:
        stream = session.readStream.format("rmq_tier").option("max-messages", str(most))
        query = (
            stream.load(tier.url)
            .writeStream.option("checkpointLocation", f"{tmp_path}/checkpoint")
            .trigger(availableNow=True)
            .start(str(out), "parquet")
        )
        query.awaitTermination()
        return [progress.numInputRows for progress in query.recentProgress]

    counts = run()
    assert sum(counts) == tier.dump.count
    assert max(counts) <= most
    assert sum(run()) == 0
    found = session.read.parquet(str(out)).orderBy(["topic", "queue_id", "queue_offset"])
    assert [said_by_archive(row) for row in rows_of(found.toArrow())] == java_rows(tier)


def test_tasks_and_outcomes_travel(sealed: Callable[[str], Sealed]) -> None:
    tier = sealed("s04-batch-compress")
    seen: list[Work] = []
    store = open_store(tier.url, S3Options())
    place = choose_place(store, None, None)
    target = open_store("memory://", S3Options())
    at = JobContext(store, place, target, target, SystemClock(), random.Random(1))
    run_job(at, as_engine(lambda _do, works: seen.extend(works) or ()))
    assert seen
    assert pickle.loads(pickle.dumps(seen)) == seen
    elsewhere = WorkContext(store, place.prefix + "x", target)
    assert isinstance(spark.heard(spark.said(do_work, elsewhere, seen[0])), ObjectNotFoundError)

    def fails(_bench: WorkContext, error: Exception) -> None:
        raise error

    for error in (DataError("damaged", where="here", do="mend it"), ExpiredError("gone", 7)):
        found = spark.heard(spark.said(fails, elsewhere, error))
        assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))


STARTED = """
import sys
from tiered.spark.driver import open_session
conf = {"spark.driver.extraJavaOptions": sys.argv[2]} if sys.argv[2] else {}
session = open_session("local[1]", conf, is_lean=sys.argv[1] == "lean")
factory = session._jvm.java.lang.management.ManagementFactory
bean = session._jvm.java.lang.Class.forName("com.sun.management.HotSpotDiagnosticMXBean")
print(factory.getPlatformMXBean(bean).getVMOption("TieredStopAtLevel").getValue())
"""


@pytest.mark.spark
@pytest.mark.parametrize(
    ("how", "options", "level"),
    [
        pytest.param("lean", "", "1", marks=pytest.mark.slow),
        pytest.param("lean", "-XX:TieredStopAtLevel=4", "4", marks=pytest.mark.slow),
        pytest.param("full", "", "4", marks=pytest.mark.slow),  # each starts a JVM
    ],
)
def test_the_jvm_of_archiving_makes_no_optimised_code_unless_one_wants_it(
    how: str, options: str, level: str
) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", STARTED, how, options],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split()[-1:] == [level]


def test_without_java_the_message_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(InvalidError, match="needs Java 17, and there is none"):
        spark.require_java()
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    with pytest.raises(InvalidError, match="--engine local"):
        spark.require_java()


def test_an_old_java_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(
        f"#!{sys.executable}\nimport sys\nsys.stderr.write('openjdk version \"1.8.0_392\"')\n"
    )
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(InvalidError, match="this is 8"):
        spark.require_java()


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.filterwarnings("ignore")
def test_spark_answers_the_questions_of_the_page_on_analytics(shop: Shop, session: Any) -> None:
    archive, options = open_store(shop.archive, S3Options()), S3Options()
    try:
        for name, question in QUESTIONS.items():
            answer = ask_spark(session, archive, for_spark(question), shop.archive, options)
            assert rows_of_answer(answer) == ANSWERS[name](shop), name
        shown = ask_spark(session, archive, "SHOW TABLES", shop.archive, options)
        names = set(shown["tableName"].to_pylist())
        assert {one.message.topic for one in shop.sent} <= names
        with pytest.raises(InvalidError, match=r"nope.*tables are `%RETRY%billing`"):
            ask_spark(session, archive, "SELECT * FROM nope", shop.archive, options)
    finally:
        archive.close()


@pytest.mark.spark
@pytest.mark.filterwarnings("ignore")
def test_spark_has_the_columns_of_bodies(shop: Shop, archive_url: str, session: Any) -> None:
    here("archive", shop.tier, "--to", archive_url, "--body", "payments=json").good()
    archive = open_store(archive_url, S3Options())
    try:
        question = "SELECT sum(value_amount) AS n, count(value_order) AS m FROM payments"
        answer = ask_spark(session, archive, question, archive_url, S3Options()).to_pylist()
    finally:
        archive.close()
    paid = [json.loads(one.message.body)["amount"] for one in shop.of("payments")]
    assert answer == [{"n": sum(paid), "m": len(paid)}]
