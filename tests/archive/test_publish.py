"""Tables of an Iceberg catalog (SQLite) that name an archive's own files: the same rows, once, after whatever happened."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from pyiceberg.io.pyarrow import pyarrow_to_schema
from pyiceberg.types import StringType
from support.archive_jobs import (
    alone,
    archive,
    check,
    is_shared,
    job_context,
    with_other_messages_behind,
)
from support.bodies import KINDS, ORDER, wishes
from support.command_line import here
from support.lakes import published, table_of
from support.servers import use_server
from support.tiers import QUEUE, TIME_MS, TierBuilder

from backends.registry import open_store
from backends.s3_settings import S3Options
from tiered.archive import publish as module
from tiered.archive.bodies import BodyColumns, BodyLayout
from tiered.archive.columns import schema
from tiered.archive.job import log_writer, run_job
from tiered.archive.merging import merge, plan_merge
from tiered.archive.plan import Limits
from tiered.archive.publish import Destination, expire_snapshots, publish, table_name
from tiered.errors import DataError, InvalidError, StoreUnavailableError
from tiered.log.state import queue_action
from tiered.model import MessageQueue
from tiered.upkeep.engine import local_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.archive_fixtures import Sealed
    from support.servers import S3Server

    from tiered.archive.task import JobContext

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.fixture
def catalog(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/catalog.db"


@pytest.fixture
def at(tmp_path: Path) -> Iterator[JobContext]:
    """A tier in memory and an archive in a folder."""
    with closing(open_store(f"file://{tmp_path}/parquet", S3Options())) as store:
        tier = TierBuilder()
        for body in (b"a", b"b"):
            tier.add([body, body], roll=True)
        tier.add([b"open"], roll=True)
        made = job_context(tier.store, store)
        archive(made)
        yield made


def rows(catalog: str, topic: str, *columns: str) -> list[dict[str, Any]]:
    found = table_of(catalog, topic).scan(selected_fields=columns or ("*",)).to_arrow()
    return sorted(found.to_pylist(), key=lambda row: (row["queue_id"], row["queue_offset"]))


def bodies(catalog: str) -> list[bytes]:
    names = ("queue_id", "queue_offset", "body")
    return [row["body"] for row in rows(catalog, QUEUE.topic, *names)]


def test_rows_once_and_again_is_nothing(at: JobContext, catalog: str) -> None:
    (first,) = published(at, catalog)
    assert (first.added, first.removed) == (2, 0)
    assert bodies(catalog) == [b"a", b"a", b"b", b"b"]
    (again,) = published(at, catalog)
    assert again == replace(first, added=0)
    table = table_of(catalog, QUEUE.topic)
    assert len(table.snapshots()) == 1
    said = table.current_snapshot().summary.additional_properties
    assert said[module.NUMBER] == str(log_writer(at).number)
    assert table.current_snapshot().summary.operation.value == "append"


def test_old_snapshots_go_before_what_they_name(at: JobContext, catalog: str) -> None:
    published(at, catalog)
    log = log_writer(at)
    merge(at, log, plan_merge(log.state, takes=lambda _queue: True))
    published(at, catalog)
    place = Destination(catalog, "lake")
    (old, present) = table_of(catalog, QUEUE.topic).snapshots()
    assert list(expire_snapshots(at.archive, place, S3Options(), old.timestamp_ms)) == []
    late = present.timestamp_ms + 1
    found = dict(expire_snapshots(at.archive, place, S3Options(), late))
    assert found == {f"lake.{table_name(QUEUE.topic)}": 1}
    table = table_of(catalog, QUEUE.topic)
    assert [one.snapshot_id for one in table.snapshots()] == [present.snapshot_id]
    assert bodies(catalog) == [b"a", b"a", b"b", b"b"]
    assert dict(expire_snapshots(at.archive, place, S3Options(), late)) == {}


def test_names_are_mapped_to_the_ids_in_files(at: JobContext, catalog: str) -> None:
    published(at, catalog)
    table = table_of(catalog, QUEUE.topic)
    ids = {field.name: field.field_id for field in table.schema().fields}
    mapped = {field.names[0]: field.field_id for field in table.name_mapping()}
    assert mapped == ids


def test_a_table_says_how_rows_of_its_files_are_sorted_and_they_are(
    at: JobContext, catalog: str
) -> None:
    more = TierBuilder(at.tier, writer="0badbeef")  # type: ignore[arg-type]
    for queue_id in (7, 0):
        more.add([b"x", b"y"], queue=MessageQueue(QUEUE.topic, queue_id), roll=True)
        more.add([b"open"], queue=MessageQueue(QUEUE.topic, queue_id), roll=True)
    archive(at)
    log = log_writer(at)
    merge(at, log, plan_merge(log.state, takes=lambda _queue: True))
    published(at, catalog)
    table = table_of(catalog, QUEUE.topic)
    names = [table.schema().find_column_name(f.source_id) for f in table.sort_order().fields]
    assert names == ["broker", "queue_id", "incarnation", "queue_offset"]
    (file,) = [task.file.file_path for task in table.scan().plan_files()]
    found = pq.read_table(file.removeprefix("file://"), partitioning=None).to_pylist()
    places = [tuple(row[name] for name in names) for row in found]
    assert len({place[1] for place in places}) == 3
    assert places == sorted(places)


def test_merged_files_take_the_place_of_the_old_in_one_snapshot(
    at: JobContext, catalog: str
) -> None:
    published(at, catalog)
    log = log_writer(at)
    merge(at, log, plan_merge(log.state, takes=lambda _queue: True))
    (found,) = published(at, catalog)
    assert (found.added, found.removed) == (1, 2)
    assert bodies(catalog) == [b"a", b"a", b"b", b"b"]
    table = table_of(catalog, QUEUE.topic)
    assert len(table.snapshots()) == 2
    (file,) = [task.file.file_path for task in table.scan().plan_files()]
    assert is_shared(file)
    assert published(at, catalog)[0].added == 0


def test_what_the_broker_truncates_goes_from_the_table(tmp_path: Path, catalog: str) -> None:
    with closing(open_store(f"file://{tmp_path}/parquet", S3Options())) as store:
        tier = TierBuilder()
        tier.add([b"a"])
        tier.add([b"b", b"old c", b"old d"], roll=True)
        tier.add([b"old e"], roll=True)
        at = job_context(tier.store, store)
        archive(at)
        published(at, catalog)
        with_other_messages_behind(tier, b"new c", b"open")
        archive(at)
        published(at, catalog)
    assert bodies(catalog) == [b"a", b"b", b"new c"]


def test_a_topic_of_which_all_was_truncated_leaves_an_empty_table(
    tmp_path: Path, catalog: str
) -> None:
    """The log forgets such a topic; its table kept the rows, and named deleted files after ``--clean``."""
    with closing(open_store(f"file://{tmp_path}/parquet", S3Options())) as store:
        tier = TierBuilder()
        tier.add([b"a"])
        tier.add([b"old b", b"old c"], roll=True)
        incarnation = tier.journal.state.incarnation(QUEUE)
        assert incarnation is not None
        tier.say(queue_action("seal", QUEUE, 0, segment=incarnation.segments[-1].base_offset))
        at = job_context(tier.store, store)
        late = Limits(from_ms=TIME_MS + 1)
        run_job(at, local_engine(at.context, 1), limits=late)
        published(at, catalog)
        assert bodies(catalog) == [b"old b", b"old c"]
        tier.truncate(1)
        TierBuilder(tier.store, writer="0badbeef").add([b"new"], roll=True)
        run_job(at, local_engine(at.context, 1), limits=late)
        assert not log_writer(at).state.queues
        (done,) = published(at, catalog)
        assert (done.added, done.removed) == (0, 1)
        assert bodies(catalog) == []
        assert published(at, catalog) == [replace(done, removed=0)]


def test_an_archive_that_was_begun_anew_is_not_taken_for_one_that_is_published(
    at: JobContext, catalog: str
) -> None:
    """Its log is behind the table for a while, which must not look like nothing to do."""
    more = TierBuilder(at.tier, writer="0badbeef")  # type: ignore[arg-type]
    more.add([b"more"], roll=True)
    archive(at)
    published(at, catalog)
    for info in list(at.archive.list("")):
        if not info.key.startswith("_iceberg/"):
            at.archive.delete(info.key)
    archive(at)
    with pytest.raises(InvalidError, match="begun anew"):
        published(at, catalog)


def test_a_topic_that_cannot_be_published_does_not_keep_the_others(
    at: JobContext, catalog: str
) -> None:
    more = TierBuilder(at.tier, writer="0badbeef")  # type: ignore[arg-type]
    more.add([b"x"], queue=MessageQueue("zebra", 0), roll=True)
    more.add([b"open"], queue=MessageQueue("zebra", 0), roll=True)
    archive(at)
    state = log_writer(at).state
    for queue, offset_ranges in state.queues.items():
        if queue.topic == QUEUE.topic:
            at.archive.delete(offset_ranges[0].files[0].key)
    with pytest.raises(DataError):
        published(at, catalog)
    assert len(rows(catalog, "zebra")) == 1


def test_columns_that_come_later_are_added(tmp_path: Path, catalog: str) -> None:
    with closing(open_store(f"file://{tmp_path}/parquet", S3Options())) as store:
        tier = TierBuilder()
        tier.add([b"plain"], roll=True)
        tier.add([ORDER], roll=True)
        at = job_context(tier.store, store)
        archive(at)
        published(at, catalog)
        tier.add([ORDER], roll=True)
        tier.add([ORDER], roll=True)
        tier.add([b"open"], roll=True)
        archive(replace(at, wishes=wishes("json", schema=KINDS)))
        (found,) = published(at, catalog)
        assert (found.added, found.removed) == (3, 0)
        values = [row["value_id"] for row in rows(catalog, QUEUE.topic)]
        assert values == [None, 7, 7, 7]
        log = log_writer(at)
        merge(at, log, plan_merge(log.state, takes=lambda _queue: True))
        check(at)
        (found,) = published(at, catalog)
        assert (found.added, found.removed) == (1, 3), "files of other columns are not merged"
    last = rows(catalog, QUEUE.topic)[-1]
    assert (last["value_small"], str(last["value_price"]), last["value_ok"]) == (3, "1.25", True)
    assert (last["value_tags"], last["value_inner"]) == (["x"], {"a": 0.5})


def _ids(columns: Any) -> dict[str, int]:
    return {columns.find_column_name(number): number for number in columns.field_ids}


def test_columns_have_their_ids_in_files_and_tables_whichever_run_brought_them(
    tmp_path: Path, catalog: str
) -> None:
    """Records after bodies here, bodies after records there: each column has one id, in each file and both tables."""
    some, more = KINDS[:30].rpartition(b",")[0], KINDS
    runs = (
        [
            wishes("json", schema=some),
            wishes("json", schema=more),
            wishes(records=True),
        ],
        [wishes(records=True), wishes("json", schema=more)],
    )
    known: dict[str, int] = {}
    for number, wished in enumerate(runs):
        with closing(open_store(f"file://{tmp_path}/parquet{number}", S3Options())) as store:
            tier = TierBuilder()
            tier.add([ORDER], roll=True)
            tier.add([b"open"], roll=True)
            at = job_context(tier.store, store)
            archive(at)
            destination = Destination(catalog, f"lake{number}")
            list(publish(store, destination, S3Options(), alone(store)))
            for wish in wished:
                tier.add([ORDER], roll=True)
                archive(replace(at, wishes=wish))
                list(publish(store, destination, S3Options(), alone(store)))
        table = table_of(catalog, QUEUE.topic, f"lake{number}")
        ids = _ids(table.schema())
        assert len(set(ids.values())) == len(ids)
        assert known in ({}, ids)
        known = ids
        files = [task.file.file_path for task in table.scan().plan_files()]
        assert len({len(pq.read_schema(file.removeprefix("file://"))) for file in files}) > 2
        for file in files:
            its = _ids(pyarrow_to_schema(pq.read_schema(file.removeprefix("file://"))))
            assert its.items() <= ids.items()
        found = table.scan().to_arrow().to_pylist()
        assert {row["value_id"] for row in found} == {None, 7}
        assert [row["value_tags"] for row in found if row["value_inner"]] == [["x"]] * (2 - number)
        assert any(row["record"] for row in found)
        mapped = {one.names[0]: one.field_id for one in table.name_mapping()}
        assert mapped.items() <= ids.items(), "whoever goes by names finds the same"


FIELD_IDS = """
    1 topic! 2 queue_id! 3 queue_offset! 4 uniq_key 5 msg_key 6 keys 7 tag 8 born_ts 9 store_ts 10 born_host
    11 store_host 12 sys_flag 13 flag 14 body_crc 15 reconsume_times 16 prepared_tx_offset 17 properties 18 body
    19 physical_offset 20 broker! 21 incarnation! 22 keys.element 23 properties.key! 24 properties.value 25 record
    26 body_error 1000 value_a 1001 value_b 1002 value_b.key! 1003 value_b.value 1004 value_b.value.x
    1005 value_b.value.y 1006 value_b.value.y.element 1007 value_c
"""
"""What is written in files that people have; ``!`` is required."""


def test_ids_of_fields_never_change(tmp_path: Path) -> None:
    body = BodyColumns("json", "a BIGINT, b MAP<STRING, STRUCT<x: INT, y: ARRAY<INT>>>, c DATE")
    pq.write_table(
        schema(BodyLayout(body, 1, has_records=True)).empty_table(), tmp_path / "x.parquet"
    )
    found = pyarrow_to_schema(pq.read_schema(tmp_path / "x.parquet"))
    fields = {number: found.find_field(number) for number in found.field_ids}
    said = (f"{n} {found.find_column_name(n)}{'!' * fields[n].required}" for n in sorted(fields))
    assert " ".join(said).split() == FIELD_IDS.split()


def test_keys_are_required_in_files_and_table(at: JobContext, catalog: str) -> None:
    published(at, catalog)
    table = table_of(catalog, QUEUE.topic)
    required = {field.name for field in table.schema().fields if field.required}
    assert required == {"broker", "topic", "queue_id", "incarnation", "queue_offset"}
    for task in table.scan().plan_files():
        columns = pq.read_schema(task.file.file_path.removeprefix("file://"))
        assert {field.name for field in columns if not field.nullable} == required


@pytest.mark.parametrize(
    "change",
    [
        lambda columns, _text: columns.rename_column("tag", "label"),
        lambda columns, _text: columns.delete_column("flag"),
        lambda columns, text: columns.add_column("extra", text),  # takes the id of a column of ours
    ],
    ids=["renamed", "dropped", "id taken"],
)
def test_columns_that_others_changed_are_refused(
    at: JobContext, catalog: str, change: Callable[[Any, Any], object]
) -> None:
    published(at, catalog)
    with table_of(catalog, QUEUE.topic).update_schema() as columns:
        change(columns, StringType())
    more = TierBuilder(at.tier, writer="0badbeef")  # type: ignore[arg-type]
    for body in (b"x", b"open"):
        more.add([body], queue=MessageQueue(QUEUE.topic, 7), roll=True)
    archive(replace(at, wishes=wishes(records=True)))
    with pytest.raises(InvalidError, match="others have changed columns"):
        published(at, catalog)


def test_two_publishers_at_once_add_each_file_once(at: JobContext, catalog: str) -> None:
    with warnings.catch_warnings(), ThreadPoolExecutor(2) as pool:
        warnings.simplefilter("ignore")
        found = list(pool.map(lambda _: published(at, catalog), range(2)))
    assert sum(one.added for some in found for one in some) == 2
    assert bodies(catalog) == [b"a", b"a", b"b", b"b"]


def test_another_commits_between(
    at: JobContext, catalog: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, rivals = module._Publisher._commit, [1]

    def late(self: Any, *given: Any) -> None:
        if rivals:
            rivals.pop()
            published(at, catalog)
        commit(self, *given)

    monkeypatch.setattr(module._Publisher, "_commit", late)
    (found,) = published(at, catalog)
    assert found.added == 0, "the rival's files are there, and are not added once more"
    assert bodies(catalog) == [b"a", b"a", b"b", b"b"]


def test_a_publisher_that_died_between_tables_goes_on(at: JobContext, catalog: str) -> None:
    more = TierBuilder(at.tier, writer="0badbeef")  # type: ignore[arg-type]
    more.add([b"x"], queue=MessageQueue("zebra", 0), roll=True)
    more.add([b"open"], queue=MessageQueue("zebra", 0), roll=True)
    archive(at)
    going = publish(
        at.archive, Destination(catalog, "lake"), S3Options(), local_engine(at.context, 1)
    )
    assert next(going).added == 2
    going.close()  # type: ignore[attr-defined]
    assert [one.added for one in published(at, catalog)] == [0, 1]
    assert len(rows(catalog, "zebra")) == 1


def test_a_table_of_another_archive_is_refused(
    at: JobContext, catalog: str, tmp_path: Path
) -> None:
    published(at, catalog)
    with closing(open_store(f"file://{tmp_path}/other", S3Options())) as store:
        other = replace(at, archive=store, bare=store)
        archive(other)
        with pytest.raises(InvalidError, match="not of this archive"):
            published(other, catalog)


def test_a_damaged_file_is_no_refusal_of_the_catalog(
    at: JobContext, catalog: str, tmp_path: Path
) -> None:
    path = max((tmp_path / "parquet" / "data").rglob("*.parquet"))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"is shorter") as raised:
        published(at, catalog)
    assert path.name in str(raised.value.where)


def test_catalogs_that_are_none(at: JobContext, tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="no such catalog"):
        published(at, "gopher://nowhere")
    with pytest.raises(StoreUnavailableError):
        published(at, f"sqlite:///{tmp_path}/no/such/folder/catalog.db")
    with pytest.raises(ValueError, match="not a place"):
        Destination.of("delta:x")
    assert Destination.of("iceberg:sqlite:////x.db#a.b") == Destination("sqlite:////x.db", "a.b")
    assert Destination.of("iceberg:prod").namespace == "default"


def test_names_of_tables() -> None:
    assert table_name("orders_1") == "orders_1"
    names = [
        table_name(topic) for topic in ("Orders", "orders-", "%RETRY%orders", "%DLQ%orders", "ä")
    ]
    assert len({*names, "orders"}) == 6
    assert all(name.replace("_", "").isalnum() for name in names)


def test_the_command(sealed: Callable[[str], Sealed], archive_url: str, catalog: str) -> None:
    tier = sealed("s04-batch-compress")
    words = ("archive", tier.url, "--to", archive_url, "--publish", f"iceberg:{catalog}#lake")
    said = here(*words, "--pack-below", "0", "--json").good().document["published"]
    assert sum(one["added"] for one in said) > len(said) > 1
    for topic, messages in tier.dump.messages.items():
        found = table_of(catalog, topic).scan()
        assert found.count() == len(messages)
    again = here(*words, "--json").good().document["published"]
    assert [one["added"] for one in again] == [0] * len(said)
    merged = here(*words, "--merge", "--json").good().document["published"]
    assert any(one["removed"] > one["added"] > 0 for one in merged)
    clean = ("--clean", "--grace", "0s", "--apply", "-", "--json")
    cleaned = here(*words, *clean).good().document
    assert cleaned["applied"]["deleted"] == sum(one["removed"] for one in merged)
    assert set(cleaned["expired_snapshots"].values()) == {1}
    for topic, messages in tier.dump.messages.items():
        table = table_of(catalog, topic)
        assert (len(table.snapshots()), table.scan().count()) == (1, len(messages))
    ran = here("archive", tier.url, "--to", archive_url, "--publish", "delta:x")
    assert (ran.code, "write iceberg:" in ran.err) == (2, True)
    nowhere = here(*words[:4], "--publish", "iceberg:sqlite:////no/such/folder/x.db", "--json")
    assert (nowhere.code, nowhere.document["published"], nowhere.document["segments"]) == (3, [], 0)


@pytest.mark.slow
def test_on_a_server(ministack: S3Server, monkeypatch: pytest.MonkeyPatch, catalog: str) -> None:
    use_server(ministack, monkeypatch)
    with closing(open_store(f"s3://{ministack.bucket()}/parquet", S3Options())) as store:
        tier = TierBuilder()
        for body in (b"a", b"open"):
            tier.add([body], roll=True)
        at = job_context(tier.store, store)
        archive(at)
        assert published(at, catalog)[0].added == 1
        assert bodies(catalog) == [b"a"]
        assert published(at, catalog)[0].added == 0
    told = str(table_of(catalog, QUEUE.topic).metadata) + str(Path(catalog[10:]).read_bytes())
    assert len(ministack.secret_key) > 3
    assert ministack.secret_key not in told.replace(ministack.access_key, "")
