"""What the sources read and leave out, without Spark: bloom filters, selections, files, row groups, parts of a tier."""

from __future__ import annotations

import io
import re
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.types import StringType, StructField, StructType
from support.archive_jobs import archive, job_context, sealed_tier
from support.archive_states import PLACE as PLACED
from support.archive_states import state as many_archived
from support.archive_states import tier as many
from support.bodies import wishes
from support.command_line import here
from support.keyed import KeyedTier, Mail
from support.merging import delete_unnamed, gather, named_bundles
from support.streams import Broker
from support.tiers import PLACE, QUEUE, TIME_MS, TierBuilder

from backends.registry import open_store
from backends.s3_settings import S3Options
from tiered.archive.machine import ArchiveState
from tiered.archive.model import ArchiveQueue
from tiered.archive.parquet import bits_of, can_hold, xxh64
from tiered.archive.selection import MAX, MIN, Selection, micros, selection_of
from tiered.archive.tables import explain, groups_of, plan_files
from tiered.errors import DataError, ExpiredError, InvalidError
from tiered.log.parts import Segment, Segments
from tiered.log.state import TierMachine
from tiered.model import MessageQueue
from tiered.spark.frames import _named, file_list, file_uris, report, uri_of
from tiered.spark.offset_ranges import Key, packed, plan_tier, read_range
from tiered.spark.options import (
    OF_TIER,
    READ,
    choice,
    kind_of,
    open_place,
    require_known,
    s3_options,
    source_options,
    whole,
)
from tiered.spark.positions import Position, Rules, advance
from tiered.spark.source import ArchiveSource

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.archive_fixtures import Sealed

ALL = Selection()


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", 0xEF46DB3751D8E999),
        (b"a", 0xD24EC4F1A98C6E5B),
        (b"Nobody inspects the spammish repetition", 0xFBCEA83C8A378BF1),
    ],
)
def test_xxh64(data: bytes, found: int) -> None:
    assert xxh64(data) == found


def bloomed(values: list[str]) -> tuple[Any, bytes]:
    sink = io.BytesIO()
    options = {"uniq_key": {"ndv": len(values), "fpp": 0.01}}
    columns = pa.schema([("uniq_key", pa.string())])
    with pq.ParquetWriter(sink, columns, bloom_filter_options=options) as writer:
        writer.write_table(pa.table({"uniq_key": values}))
    return pq.ParquetFile(io.BytesIO(sink.getvalue())).metadata, sink.getvalue()


def test_a_filter_knows_what_is_there() -> None:
    values = [f"key-{n}-" * (n % 7) + str(n) for n in range(2000)]
    metadata, data = bloomed(values)
    column = metadata.row_group(0).column(0)
    place = bits_of(column)
    assert place is not None
    bits = data[place[0] : place[0] + place[1]]
    assert place[0] + place[1] == column.bloom_filter_offset + column.bloom_filter_length
    assert all(can_hold(bits, value) for value in values)
    assert sum(can_hold(bits, f"no-{n}") for n in range(2000)) < 60
    assert not can_hold(bits, "no")


def test_row_groups_are_left_out_by_statistics_and_filters() -> None:
    metadata, data = bloomed(["b", "m", "z"])
    raw = SimpleNamespace(read_ranges=lambda some: [data[one.start : one.end] for one in some])

    def left(wanted: Selection) -> list[str]:
        return list(groups_of(raw, SimpleNamespace(metadata=metadata), wanted)[1])

    assert left(ALL.among("uniq_key", ["a"])) == ["statistics of uniq_key"]
    assert left(ALL.among("uniq_key", ["c"])) == ["bloom filter of uniq_key"]
    assert left(ALL.among("uniq_key", ["c", "m"])) == []
    assert left(Selection(key="c")) == [], "a file without the column of keys may hold it"


def test_times_that_no_calendar_of_python_has() -> None:
    """A broker's clock was far off; files tell its times all the same."""
    tier, far_ms = KeyedTier(), 300_000_000_000_000
    for number in range(2):
        mails = [Mail(("k",), time_ms=far_ms + 10 * number), Mail((), time_ms=TIME_MS)]
        tier.post(QUEUE, mails, roll=bool(number))
    tier.post(QUEUE, [Mail()], roll=True)
    at = job_context(tier.store)
    archive(at)
    found = explain(at.archive, selection_of({"from": str(far_ms + 1)}))
    assert (found.files_left, found.rows, found.rows_all) == ({"store_ts": 3}, 1, 4)
    found = explain(at.archive, selection_of({"until": str(far_ms)}))
    assert (found.files_left, found.rows, found.groups) == ({"store_ts": 2}, 2, 2)


def test_options_narrow() -> None:
    options = {"topic": "a, b", "from": "5", "until": "7", "queue": "3", "key": "k"}
    wanted = selection_of(options)
    assert wanted.bounds == {"queue_id": (3, 3), "store_ts": (5000, 6999)}
    assert (wanted.texts, wanted.key) == ({"topic": {"a", "b"}}, "k")
    time = datetime(2024, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
    assert micros(time) == 1_704_164_645_000_006
    found = wanted.within("queue_id", 2, 4).among("topic", ["b", "c"])
    assert (found.bounds["queue_id"], found.texts) == ((3, 3), {"topic": {"b"}})
    nothing = found.within("queue_id", 4, MAX)
    assert nothing.bounds["queue_id"] == (MAX, MIN)
    assert not nothing.meets("queue_id", 0, 99)
    with pytest.raises(InvalidError, match="from is not a number"):
        selection_of({"from": "yesterday"})
    for nobody in ("", " , "):
        with pytest.raises(InvalidError, match="topic names no topic"):
            selection_of({"topic": nobody})


def test_several_values_are_not_taken_for_one() -> None:
    with pytest.raises(InvalidError, match="key has one value, and 2 are given"):
        _named("file:///tier", {"key": ["a", "b"]})
    named = _named("file:///tier", {"uniq_key": ["u", "v"]}, ["orders", "payments"])
    assert (named["uniq-key"], named["topic"]) == ("u,v", "orders,payments")


def test_rows_are_chosen_exactly() -> None:
    rows = pa.RecordBatch.from_pydict(
        {
            "queue_offset": [1, 2, 3, 4],
            "tag": ["a", None, "b", "a"],
            "keys": [["x", "y"], None, [], ["y"]],
            "uniq_key": ["u", "x", None, "v"],
        },
        pa.schema(
            [
                *[("queue_offset", pa.int64()), ("tag", pa.string())],
                *[("keys", pa.list_(pa.string())), ("uniq_key", pa.string())],
            ]
        ),
    )

    def found(wanted: Selection) -> list[int]:
        kept: list[int] = wanted.rows_of(rows).column("queue_offset").to_pylist()
        return kept

    assert found(ALL) == [1, 2, 3, 4]
    assert found(ALL.within("queue_offset", 2, 3)) == [2, 3]
    assert found(ALL.among("tag", ["a"]).within("queue_offset", 2, MAX)) == [4]
    assert found(Selection(key="x")) == [1, 2]
    assert found(Selection(key="y")) == [1, 4]
    assert Selection(key="y").rows_of(rows.slice(3)).column("queue_offset").to_pylist() == [4]


def test_an_archive_says_what_it_leaves_out() -> None:
    tier = sealed_tier([b"a", b"b"], [b"c"], [b"d", b"e"])
    at = job_context(tier.store)
    archive(at)
    found = explain(at.archive, ALL)
    assert (len(found.files), found.groups, found.rows, found.rows_all) == (3, 3, 5, 5)
    found = explain(at.archive, selection_of({"from-offset": "2", "until-offset": "3"}))
    assert (found.files_left, found.rows, found.groups) == ({"queue_offset": 2}, 1, 1)
    found = explain(at.archive, selection_of({"from": str(TIME_MS + 3)}), footers=False)
    assert (found.files_left, found.rows, found.groups) == ({"store_ts": 2}, 2, None)
    found = explain(at.archive, selection_of({"queue": "9"}))
    assert found.document() == {
        "files": 0,
        "files_left_out": {"queue_id": 3},
        "row_groups": 0,
        "row_groups_left_out": {},
        "rows": 0,
        "rows_all": 5,
        "size_bytes": 0,
    }
    found = explain(at.archive, Selection(key="nope"))
    assert (found.groups, sum(found.groups_left.values())) == (0, 3)
    with pytest.raises(InvalidError, match="no topic nope"):
        plan_files(ArchiveState(), ALL.among("topic", ["nope"]))


def test_names_of_files_for_others(tmp_path: Path) -> None:
    tier = sealed_tier([b"a"])
    at = job_context(tier.store)
    archive(at)
    (uri,) = file_uris(at.archive)
    assert uri.startswith("memory://")
    folder = open_place({"path": f"file://{tmp_path}/a[b]"})
    assert uri_of(folder, "t=1/x*y") == f"file://{tmp_path}/a\\[b\\]/t=1/x\\*y"
    folder.close()
    bucket: Any = SimpleNamespace(url="s3://bucket/prefix")
    assert uri_of(bucket, "k") == "s3a://bucket/prefix/k"
    assert uri_of(bucket, "k", scheme="s3") == "s3://bucket/prefix/k"


def bodies(tier: TierBuilder, wanted: Selection) -> list[bytes]:
    plan = plan_tier({PLACE: tier.journal.state}, wanted)
    return [
        body
        for offset_range in plan.offset_ranges
        for rows in read_range(tier.store, offset_range, wanted)
        for body in rows.column("body").to_pylist()
    ]


def test_a_tier_is_read_where_something_is_wanted() -> None:
    tier = Broker()
    tier.add([b"a", b"b", b"c"])
    tier.add([None, None])
    tier.add([b"d", b"e"], roll=True)
    tier.gap(3)
    tier.add([b"f"])
    states = {PLACE: tier.journal.state}
    assert bodies(tier, ALL) == [b"a", b"b", b"c", b"d", b"e", b"f"]
    plan = plan_tier(states, ALL)
    assert (plan.parts_left, plan.missing) == ({"holes": 1}, 3)
    assert [(s.task.start, s.task.end) for s in plan.offset_ranges] == [(0, 3), (5, 7), (10, 11)]
    assert bodies(tier, selection_of({"from-offset": "2", "until-offset": "6"})) == [b"c", b"d"]
    wanted = selection_of({"from": str(TIME_MS + 1), "until": str(TIME_MS + 3)})
    assert bodies(tier, wanted) == [b"b", b"c"]
    assert plan_tier(states, wanted).parts_left == {"holes": 1, "store_ts": 2}
    assert plan_tier(states, ALL.within("queue_id", 0, 1)).parts_left == {"queue_id": 4}
    with pytest.raises(InvalidError, match="no topic nope"):
        plan_tier(states, ALL.among("topic", ["nope"]))


def test_small_offset_ranges_share_a_partition() -> None:
    tier = Broker()
    for _ in range(5):
        tier.add([b"x" * 100], roll=True)
    offset_ranges = plan_tier({PLACE: tier.journal.state}, ALL).offset_ranges
    assert [len(group) for group in packed(offset_ranges, 2 * offset_ranges[0].size_bytes)] == [
        2,
        2,
        1,
    ]
    assert [len(group) for group in packed(offset_ranges, 1)] == [1] * 5
    assert packed([], 1) == []


def test_planning_beside_an_archive_with_many_gaps_looks_at_each_segment_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = 400
    machine = TierMachine()
    there = machine.load(machine.dump(many(1, count)))
    archive = many_archived(1, range(0, count, 2))
    made: list[Segment] = []
    of_row = Segments._segment
    monkeypatch.setattr(Segments, "_segment", lambda *of: made.append(of_row(*of)) or made[-1])
    found = plan_tier({PLACED: there}, ALL, archive)
    assert [one.task.start for one in found.offset_ranges] == [n * 100 for n in range(1, count, 2)]
    assert len(found.files) == count // 2
    key, start = Key("c", "b", "t", 0), Position.at(0, 0, 0)
    end = advance({PLACED: there}, {key: start}, Rules(), archive=archive)
    assert end[key].offset == count * 100
    assert len(made) < 3 * count * count.bit_length()


def test_what_cannot_be_unpacked(caplog: pytest.LogCaptureFixture) -> None:
    tier = Broker()
    tier.add([b"a", (2, b"this is no batch"), b"b"])
    (offset_range,) = plan_tier({PLACE: tier.journal.state}, ALL).offset_ranges
    with pytest.raises(DataError, match=r"offset 1 cannot be unpacked.*on-bad"):
        list(read_range(tier.store, offset_range, ALL))
    rows = list(read_range(tier.store, offset_range, ALL, on_bad="skip"))
    assert "2 messages cannot be unpacked and are left out, the first at offset 1" in caplog.text
    assert [body for some in rows for body in some.column("body").to_pylist()] == [b"a", b"b"]


def test_damage_is_named_whole_and_a_condition_reads_what_lies_beside_it() -> None:
    tier = Broker()
    part = tier.add([b"x" * 1000] * 400)
    key, at = tier.prefix + part.bundle.key, part.section.start
    data = bytearray(tier.store.get(key))
    for block in (1, 4):
        data[at + (block << 16) + 500] ^= 1
    tier.store.delete(key)
    tier.store.put_if_absent(key, bytes(data))
    (offset_range,) = plan_tier({PLACE: tier.journal.state}, ALL).offset_ranges
    with pytest.raises(DataError, match="are damaged") as told:
        list(read_range(tier.store, offset_range, ALL))
    (low, end), (again, last) = [
        map(int, one) for one in re.findall(r"\[(\d+), (\d+)\) ?", told.value.what)[:2]
    ]
    assert 0 < low < end < again < last < 400
    for first, behind in ((0, low), (end, again), (last, 400)):
        wanted = ALL.within("queue_offset", first, behind - 1)
        (some,) = plan_tier({PLACE: tier.journal.state}, wanted).offset_ranges
        rows = sum(one.num_rows for one in read_range(tier.store, some, wanted))
        assert rows == behind - first


def test_columns_that_nobody_asked_for_are_not_made() -> None:
    tier = Broker()
    tier.add([b"a", None, b"b"])
    (offset_range,) = plan_tier({PLACE: tier.journal.state}, ALL).offset_ranges
    (every,) = read_range(tier.store, offset_range, ALL)
    for name in every.schema.names:
        (some,) = read_range(tier.store, offset_range, ALL, names=[name])
        assert set(some.schema.names) == {name, "queue_offset"}
        assert some.column(name).equals(every.column(name))
    wanted = ALL.among("tag", ["nope"])
    assert [r.num_rows for r in read_range(tier.store, offset_range, wanted, names=["body"])] == [0]


def test_what_happens_to_a_tier_while_it_is_read() -> None:
    tier = Broker()
    tier.add([b"a", b"b"])
    tier.add([b"c"], roll=True)
    old, last = plan_tier({PLACE: tier.journal.state}, ALL).offset_ranges
    (incarnation,) = tier.journal.state.queues[QUEUE]
    parts = incarnation.segments[0].parts
    for part in parts:
        tier.store.delete(PLACE.prefix + part.log.key)
    with pytest.raises(DataError, match="gone"):
        list(read_range(tier.store, old, ALL))
    tier.expire(2)
    with pytest.raises(ExpiredError):
        list(read_range(tier.store, old, ALL))
    assert [some.num_rows for some in read_range(tier.store, last, ALL)] == [1]


def test_what_was_truncated_since_is_read_as_it_was_planned() -> None:
    tier = Broker()
    tier.add([b"a", b"b"])
    tier.add([b"old"], roll=True)
    (one, two) = plan_tier({PLACE: tier.journal.state}, ALL).offset_ranges
    keys = [part.log.key for part in two.task.parts]
    tier.truncate(2)
    tier.add([b"new"], roll=True)
    bodies = [
        body
        for offset_range in (one, two)
        for rows in read_range(tier.store, offset_range, ALL)
        for body in rows.column("body").to_pylist()
    ]
    assert bodies == [b"a", b"b", b"old"]
    tier.expire(3, incarnation=0)
    tier.store.delete(PLACE.prefix + keys[0])
    with pytest.raises(ExpiredError, match="truncated"):
        list(read_range(tier.store, two, ALL))


def test_merged_parts_are_found_again() -> None:
    tier = Broker()
    tier.add([b"a"])
    tier.add([b"b"])
    (offset_range,) = plan_tier({PLACE: tier.journal.state}, ALL).offset_ranges
    before = named_bundles(tier)
    gather(tier)
    delete_unnamed(tier, before)
    assert len(named_bundles(tier)) == 1
    assert not named_bundles(tier) & before
    rows = list(read_range(tier.store, offset_range, ALL))
    assert [some.column("body").to_pylist() for some in rows] == [[b"a", b"b"]]


def test_options_that_nobody_looks_at_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="no option pushdown"):
        require_known({"pushdown": "true"}, READ | OF_TIER)
    with pytest.raises(InvalidError, match="no option topics"):
        require_known({"Topics": "x"}, frozenset(["topic"]))
    with pytest.raises(InvalidError, match="on-gap is 'x'"):
        choice({"on-gap": "x"}, "on-gap", ("fail", "skip"))
    for wrong in ("0", "-1", "x", ""):
        with pytest.raises(InvalidError, match="max-bytes is not a number"):
            whole({"max-bytes": wrong}, "max-bytes", None)
    with pytest.raises(InvalidError, match="no URL"):
        open_place({})
    place = {"path": f"file://{tmp_path}"}
    assert kind_of(place, None) == "tier"
    assert kind_of({**place, "source": "archive"}, None) == "archive"
    with pytest.raises(InvalidError, match="source is 'tier'"):
        kind_of({**place, "source": "tier"}, "archive")


def test_how_s3_is_reached_is_taken_as_it_is_said() -> None:
    for style in (None, True, False):
        given = S3Options(endpoint_url="http://s3", path_style=style)
        assert s3_options(source_options(given)) == given
    assert s3_options({"path-style": "True"}).path_style is True
    assert s3_options({"path-style": "FALSE"}).path_style is False
    for wrong in ("1", "yes", ""):
        with pytest.raises(InvalidError, match="path-style is"):
            s3_options({"path-style": wrong})


def test_queues_that_nothing_is_wanted_of() -> None:
    queue = ArchiveQueue("c", "b", "bad-\udcff", 1, 2)
    assert ALL.refuses(queue) == ""
    assert ALL.among("topic", ["bad-\ufffd"]).refuses(queue) == ""
    assert ALL.among("broker", ["x"]).refuses(queue) == "broker"
    assert ALL.within("incarnation", 0, 1).refuses(queue) == "incarnation"


def test_a_report_of_what_is_left_out(sealed: Callable[[str], Sealed], archive_url: str) -> None:
    tier = sealed("s04-batch-compress")
    here("archive", tier.url, "--to", archive_url).good()
    every, some = report(archive_url), report(archive_url, from_="1", until="2")
    assert (every["source"], every["rows"]) == ("archive", tier.dump.count)
    assert some["rows"] == 0
    assert sum(some["files_left_out"].values()) == every["files"]
    assert len(file_list(archive_url)) == every["files"]
    assert file_list(archive_url, from_="1", until="2") == []
    every, some = report(tier.url), report(tier.url, from_="1", until="2", partition_bytes="1")
    assert (every["source"], some["parts"], some["partitions"]) == ("tier", 0, 0)
    assert every["parts"] == some["parts_left_out"]["store_ts"]
    assert every["offsets"] == tier.dump.count
    with pytest.raises(InvalidError, match="no option start"):
        report(tier.url, start="latest")
    with pytest.raises(InvalidError, match="no archive"):
        file_list(tier.url)


def test_a_column_that_no_topic_has_is_refused_with_the_one_that_was_meant(tmp_path: Path) -> None:
    """It would be null in every row, and the slip go unseen; but a column that other topics' files lack is one."""
    with closing(open_store(f"file://{tmp_path}", S3Options())) as store:
        tier = TierBuilder()
        other = MessageQueue("plain", 0)
        for queue in (QUEUE, other):
            tier.add([b'{"amount": 1}'], queue=queue, roll=True)
            tier.add([b"{}"], queue=queue, roll=True)
        wished = wishes("json", schema=b"amount BIGINT")
        at = replace(job_context(tier.store, store), wishes=wished)
        archive(replace(at, takes=lambda topic: topic == QUEUE.topic))
        archive(replace(at, wishes=wishes()))

    def reads(names: str, **options: str) -> None:
        columns = StructType([StructField(name, StringType()) for name in names.split()])
        ArchiveSource({"path": f"file://{tmp_path}", **options}).reader(columns)

    reads("topic value_amount body_error body_text record")
    reads("value_amount", topic=f"{QUEUE.topic},{other.topic}")
    for names, options, do in (
        ("topic value_amout", {}, "did you mean value_amount?"),
        ("value_x", {}, "and of bodies value_amount"),
        ("body_err", {}, "did you mean body_error?"),
        ("records", {}, "did you mean record?"),
        ("value_amount", {"topic": other.topic}, "columns are topic string"),
    ):
        with pytest.raises(InvalidError, match="there is no column") as raised:
            reads(names, **options)
        assert do in (raised.value.do or "")
