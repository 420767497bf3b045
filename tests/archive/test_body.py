"""Bodies as columns, job by job: what the log fixes, what does not fit, what evolves, and stored records beside."""

from __future__ import annotations

import io
import json
import math
import pickle
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from support.archive_jobs import (
    Damaged,
    archive,
    check,
    is_shared,
    job_context,
    keys,
    rows,
    sealed_tier,
)
from support.archives_made import loaded
from support.bodies import ORDER_AVSC, ORDER_TYPE, avro, descriptors, message, wishes
from support.tiers import QUEUE, TierBuilder, record_of
from zlib_ng import zlib_ng

from backends.local import LocalFolderStore
from tiered.archive import duck
from tiered.archive.audit import read_log, verify_archive
from tiered.archive.bodies import BodyColumns, is_name
from tiered.archive.body_formats import read_wishes
from tiered.archive.checked_ranges import with_sums
from tiered.archive.columns import topic_schema
from tiered.archive.job import JobContext, first_error, log_writer, run_job
from tiered.archive.machine import archive_action, columns_action
from tiered.archive.merging import merge, plan_merge
from tiered.archive.model import Archived
from tiered.errors import DataError, InvalidError
from tiered.format.message_forms import InnerMessage, encode_inner_messages
from tiered.journal.entry import as_row, row_of
from tiered.model import MessageQueue
from tiered.upkeep.engine import local_engine

if TYPE_CHECKING:
    from pathlib import Path


ONE = b'{"id": 1, "name": "a", "items": [{"sku": "x", "n": 2}]}'
TWO = b'{"id": 2, "name": "b", "extra": true}'


def values(at: JobContext) -> list[dict[str, Any]]:
    """What was added to each row, in order."""
    added = ("value_", "body_text", "body_error", "record")
    return [{n: v for n, v in row.items() if n.startswith(added)} for row in rows(at)]


def test_json_is_inferred_once_and_then_fixed() -> None:
    tier = sealed_tier([ONE], [TWO, b'{"id": 3, "name": null, "items": []}'])
    at = replace(job_context(tier.store), wishes=wishes("json"))
    result = archive(at)
    assert (result.misfits, result.unknown) == (0, [])
    items = [{"sku": "x", "n": 2}]
    assert values(at) == [
        {"body_error": None, "value_id": 1, "value_name": "a", "value_items": items},
        {"body_error": None, "value_id": 2, "value_name": "b", "value_items": None},
        {"body_error": None, "value_id": 3, "value_name": None, "value_items": []},
    ]  # fmt: skip
    assert read_log(at).bodies == {
        QUEUE.topic: (
            BodyColumns(
                "json",
                "id BIGINT, name STRING, items ARRAY<STRUCT<sku: STRING, n: BIGINT>>",
            ),
        )
    }
    tier.add([b'{"id": 4, "new": 1}'], roll=True)
    tier.add([b"open"], roll=True)
    later = replace(at, wishes=wishes())  # without the option, as the log says
    assert archive(later).misfits == 1  # b"open", which the first job found unsealed
    assert [row["value_id"] for row in values(at)] == [1, 2, 3, None, 4]
    assert len(read_log(at).bodies[QUEUE.topic]) == 1
    assert check(later).compared == 4


def test_what_does_not_fit_keeps_its_row_and_is_put_aside_too() -> None:
    bad = [b'{"id": "x"}', b"no json", b"", b'{"id": 1}{"id": 2}']
    at = job_context(sealed_tier([ONE, *bad, TWO, None]).store)
    at = replace(at, wishes=wishes("json", schema=b"id BIGINT"))
    result = archive(at)
    assert (result.rows, result.misfits, result.bad, result.holes) == (6, 4, 0, 1)
    assert [row["body"] for row in rows(at)] == [ONE, *bad, TWO]
    assert [row["value_id"] for row in values(at)] == [1, None, None, None, None, 2]
    assert [row["body_error"] for row in values(at)] == [
        None,
        "the body does not fit the topic's columns: id",
        *["the body is not of the topic's format"] * 3,
        None,
    ]
    aside = rows(at, "_bad/")
    assert [row["queue_offset"] for row in aside] == [1, 2, 3, 4, 6]
    assert [row["record"] for row in aside[:4]] == [
        record_of(QUEUE, n + 1, body, time_ms=1_700_000_000_001 + n) for n, body in enumerate(bad)
    ]
    assert aside[0]["reason"].startswith(
        "body: the body does not fit the topic's columns: id: JSON"
    )
    assert check(at).compared == 1
    (offset_ranges,) = read_log(at).queues.values()
    assert (offset_ranges[0].misfits, offset_ranges[0].columns) == (4, 1)
    assert (
        as_row(Archived).decode(json.loads(json.dumps(row_of(offset_ranges[0]))))
        == offset_ranges[0]
    )
    assert not replace(offset_ranges[0], misfits=3).is_whole


def test_of_two_jobs_that_infer_the_first_one_s_columns_hold() -> None:
    tier = sealed_tier([ONE], [TWO])
    tier.add([b'{"id": 1.5}'], queue=MessageQueue("other", 0))
    tier.add([b"open"], queue=MessageQueue("other", 0), roll=True)
    at = replace(job_context(tier.store), wishes=wishes("json"))
    rival = replace(at, wishes=wishes("json", schema=b"name STRING, late BIGINT"))
    writer = log_writer(at)
    assert archive(rival).segments == 3
    assert writer.state.bodies == {}
    # What the late one still holds for true is not: its entry does not count.
    late = [columns_action(QUEUE.topic, 0, BodyColumns("json", "other BIGINT"))]
    writer.append(late)
    assert writer.state.bodies[QUEUE.topic] == (BodyColumns("json", "name STRING, late BIGINT"),)
    assert writer.state.refused == 1
    assert archive(at).segments == 0


def test_a_job_that_is_overtaken_while_it_fixes_takes_what_the_other_has_fixed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at = replace(job_context(sealed_tier([ONE]).store), wishes=wishes("json"))
    rival = log_writer(at)
    infer = "tiered.archive.job._Sample.infer"

    def slowly(_self: object) -> BodyColumns:
        rival.append([columns_action(QUEUE.topic, 0, BodyColumns("json", "name STRING"))])
        return BodyColumns("json", "id BIGINT")

    monkeypatch.setattr(infer, slowly)
    archive(at)
    assert values(at) == [{"body_error": None, "value_name": "a"}]
    check(at)


def test_columns_are_added_only() -> None:
    tier = sealed_tier([ONE])
    at = replace(job_context(tier.store), wishes=wishes("json", schema=b"id BIGINT"))
    archive(at)
    tier.add([TWO], roll=True)
    tier.add([b"open"], roll=True)
    more = replace(at, wishes=wishes("json", schema=b"name STRING"))
    archive(more)
    assert [body.columns for body in read_log(at).bodies[QUEUE.topic]] == [
        "id BIGINT",
        "id BIGINT, name STRING",
    ]
    assert [row.get("value_name") for row in values(at)] == [None, None, "b"]
    assert [row["value_id"] for row in values(at)] == [1, None, 2]
    assert check(at).compared == 3
    names = topic_schema(read_log(at), QUEUE.topic).names
    assert names[-3:] == ["body_error", "value_id", "value_name"]
    tier.add([TWO], roll=True)
    tier.add([b"open"], roll=True)
    for wish in (wishes("json", schema=b"id STRING"), wishes("text")):
        with pytest.raises(InvalidError, match="in this archive"):
            archive(replace(at, wishes=wish))
    assert archive(replace(at, wishes=wishes("raw"))).segments == 2
    assert values(at)[-1] == {}
    assert check(at).compared == 5


def test_readers_see_one_table_whatever_columns_files_have(tmp_path: Path) -> None:
    tier = sealed_tier([b"first"])
    at = job_context(tier.store, LocalFolderStore(tmp_path / "parquet"))
    archive(at)
    tier.add([TWO], roll=True)
    tier.add([b"open"], roll=True)
    archive(replace(at, wishes=wishes("json")))
    question = f'SELECT value_id, body_error FROM "{QUEUE.topic}" ORDER BY queue_offset'
    found = duck.ask(at.archive, question).rows.to_pylist()
    assert [row["value_id"] for row in found] == [None, None, 2]
    assert [row["body_error"] is None for row in found] == [True, False, True]
    few = question.replace("ORDER BY queue_offset", "WHERE queue_offset = 0")
    answer = duck.ask(at.archive, few)
    assert (answer.rows.to_pylist(), answer.left_out) == (
        [{"value_id": None, "body_error": None}],
        2,
    )


def test_text_avro_and_protobuf() -> None:
    order = {"id": 7, "note": "n", "at": 1_700_000_000_123}
    given = {
        "text": ["grüß".encode(), b"\xff"],
        "avro": [avro(order), b"\xff\xff"],
        "protobuf": [message(id=7, note="n"), b"\xff"],
    }
    tier = TierBuilder()
    for topic, bodies in given.items():
        tier.add(bodies, queue=MessageQueue(topic, 0), roll=True)
        tier.add([b"open"], queue=MessageQueue(topic, 0), roll=True)
    files = {"a": json.dumps(ORDER_AVSC).encode(), "p": descriptors()}
    chosen = read_wishes(
        ["*=text", "avro=avro", "proto*=protobuf"],
        ["avro=a", "proto*=p"],
        [f"proto*={ORDER_TYPE}"],
        has_records=False,
        read=files.__getitem__,
    )
    at = replace(job_context(tier.store), wishes=chosen)
    assert archive(at).misfits == 3
    found = {row["topic"]: row for row in reversed(rows(at))}
    assert found["text"]["body_text"] == "grüß"
    assert (found["avro"]["value_id"], found["avro"]["value_note"]) == (7, "n")
    assert found["avro"]["value_at"].timestamp() == 1_700_000_000.123
    assert (found["protobuf"]["value_id"], found["protobuf"]["value_note"]) == (7, "n")
    assert check(at).compared == 3


def test_no_row_is_left_out_because_its_number_is_none(tmp_path: Path) -> None:
    """What is told of a column's least and greatest value does not tell of NaN, which is greater than all."""
    fields = [{"name": "x", "type": "double"}, {"name": "n", "type": "long"}]
    inner = {"type": "record", "name": "Inner", "fields": fields}
    every = {"name": "all", "type": {"type": "array", "items": "double"}}
    whole = {"type": "record", "name": "Whole", "fields": [{"name": "o", "type": inner}, every]}
    schema = json.dumps({**whole, "fields": [fields[0], *whole["fields"]]}).encode()
    bodies = [struct.pack("<ddBBdB", x, x, 2, 2, x, 0) for x in (1.0, math.nan, 2.0)]
    tier = sealed_tier(bodies)
    at = job_context(tier.store, LocalFolderStore(tmp_path / "parquet"))
    assert archive(replace(at, wishes=wishes("avro", schema=schema))).misfits == 0
    for where in ("value_x > 5", "isnan(value_x)", "value_o.x > 5", "NOT (value_x < 5)"):
        question = f'SELECT queue_offset FROM "{QUEUE.topic}" WHERE {where}'
        assert duck.ask(at.archive, question).rows.to_pylist() == [{"queue_offset": 1}], where
    (key,) = keys(at)
    group = pq.read_metadata(io.BytesIO(at.archive.get(key))).row_group(0)
    columns = [group.column(number) for number in range(group.num_columns)]
    bare = {one.path_in_schema for one in columns if not one.is_stats_set}
    assert bare == {"value_x", "value_o.x", "value_all.list.element"}


def test_bodies_that_tell_nothing_stay_bytes() -> None:
    at = replace(job_context(sealed_tier([b"a", b"[1]", b"{}"]).store), wishes=wishes("json"))
    result = archive(at)
    assert (result.unknown, result.misfits, values(at)) == ([QUEUE.topic], 0, [{}, {}, {}])
    assert read_log(at).bodies == {}


NAMES = [
    *("utm--source", "a--", "--", "a\n--b", "`--`", "``", "a`b", "a, b", "x) INT", "a: b", "<>"),
    *('"', "'", "", " ", "\0", "a\0b", "\ud800", "\ud83d\ude00", "grüß", "a.b", "1", "$"),
]


SOME = {"a\n--b", "a`b", '"', "\0", "\ud800", "a.b"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in SOME else pytest.mark.slow) for name in NAMES],
    ids=range(len(NAMES)),
)
def test_whatever_a_producer_calls_a_field_jobs_go_on(name: str, tmp_path: Path) -> None:
    """Its columns stand in the log for ever, and each later job reads them, of whichever topic it is."""
    tier = sealed_tier([json.dumps({name: 1, "id": 2}).encode()])
    tier.add([ONE], queue=MessageQueue("other", 0), roll=True)
    tier.add([b"open"], queue=MessageQueue("other", 0), roll=True)
    at = job_context(tier.store, LocalFolderStore(tmp_path / "parquet"))
    at = replace(at, wishes=wishes("json"))
    assert archive(at).segments == 2
    for queue in (QUEUE, MessageQueue("other", 0)):
        tier.add([ONE], queue=queue, roll=True)
        tier.add([b"open"], queue=queue, roll=True)
    result = archive(at)
    assert (result.segments, result.failed, result.unknown) == (4, [], [])
    question = f'SELECT * FROM "{QUEUE.topic}" ORDER BY queue_offset LIMIT 1'
    (row,) = duck.ask(at.archive, question).rows.to_pylist()
    names = topic_schema(read_log(at), QUEUE.topic).names
    assert [one for one in names if one.startswith("value_")] == [
        one for one in row if one.startswith("value_")
    ]
    assert (f"value_{name}" in names) == is_name(name)
    if is_name(name):
        assert (row[f"value_{name}"], row["value_id"]) == (1, 2)
    assert check(at).compared == 6


@pytest.mark.parametrize("how", ["damaged", "lost"])
@pytest.mark.parametrize("more", [0, 2], ids=["all of it", "the first"])
def test_damage_where_columns_are_looked_for_is_that_segment_s_alone(how: str, more: int) -> None:
    """What is behind it, and what other topics have, becomes columns all the same; the task itself tells of the damage."""
    tier, other = sealed_tier([ONE], *[[TWO]] * more), MessageQueue("other", 0)
    key = tier.journal.state.queues[QUEUE][0].segments[0].parts[0].log.key
    tier.add([ONE], queue=other, roll=True)
    tier.add([b"open"], queue=other, roll=True)
    if how == "lost":
        tier.store.delete(tier.prefix + key)
    at = job_context(tier.store if how == "lost" else Damaged(tier.store, key))
    result = archive(replace(at, wishes=wishes("json")))
    assert (result.segments, len(result.failed)) == (more + 1, 1)
    assert isinstance(first_error(result), DataError)
    assert result.unknown == ([] if more else [QUEUE.topic])
    found = [(row["topic"], row["value_id"]) for row in rows(at)]
    assert sorted(found) == sorted([("other", 1), *[(QUEUE.topic, 2)] * more])


def test_stored_records_byte_for_byte() -> None:
    batch = encode_inner_messages([InnerMessage(0, body, b"") for body in (b"x", b"y")])
    items = [b"a", (2, batch), b"b", None, (1, b"this is no batch")]
    at = replace(job_context(sealed_tier(items).store), wishes=wishes(records=True))
    result = archive(at)
    assert (result.rows, result.bad, result.holes) == (4, 1, 1)
    raw = {row["queue_offset"]: row["record"] for row in rows(at)}
    time_ms = 1_700_000_000_000
    assert raw == {
        0: record_of(QUEUE, 0, b"a", time_ms=time_ms),
        1: record_of(QUEUE, 1, batch, inner=2, time_ms=time_ms + 1),
        2: None,
        3: record_of(QUEUE, 3, b"b", time_ms=time_ms + 3),
    }
    assert check(at).compared == 1
    plain = job_context(sealed_tier([b"a", b"b"]).store)
    plain = replace(plain, wishes=wishes(records=True))
    archive(plain)
    assert [row["record"][-1:] for row in rows(plain)] == [b"\x02", b"\x02"]
    assert check(plain).compared == 1


def test_other_columns_are_other_files_and_plain_ones_are_as_ever() -> None:
    tier, found = sealed_tier([ONE]), {}
    for name, wish in (
        ("plain", wishes()),
        ("raw", wishes("raw")),
        ("json", wishes("json")),
        ("records", wishes(records=True)),
    ):
        at = replace(job_context(tier.store), wishes=wish)
        archive(at)
        (found[name],) = (info.key for info in at.archive.list("data/"))
    assert found["plain"] == found["raw"]
    assert len(set(found.values())) == 3


def test_a_worker_gets_the_layout() -> None:
    at = replace(job_context(sealed_tier([ONE]).store), wishes=wishes("json", records=True))
    seen: list[Any] = []

    def engine(do: Any, works: Any) -> Any:
        seen.extend(works)
        return local_engine(at.context, 1)(do, pickle.loads(pickle.dumps(seen)))

    run_job(at, engine)
    (work,) = seen
    (task,) = work.tasks
    assert task.layout.has_records
    assert pickle.loads(pickle.dumps(work)) == work
    assert values(at)[0]["value_id"] == 1


def test_a_offset_range_of_columns_that_the_log_does_not_have_is_refused() -> None:
    at = replace(job_context(sealed_tier([ONE]).store), wishes=wishes("json"))
    archive(at)
    ((queue, (one,)),) = read_log(at).queues.items()
    state = read_log(at)
    assert loaded(state) == state
    log = log_writer(at)
    log.append([archive_action([(replace(queue, queue_id=9), 0, replace(one, columns=2))])])
    assert log.state.refused == 1


def test_damage_in_a_decoded_column_is_found() -> None:
    tier = sealed_tier([ONE])
    at = replace(job_context(tier.store), wishes=wishes("json"))
    archive(at)
    ((queue, (one,)),) = read_log(at).queues.items()
    file = pq.ParquetFile(io.BytesIO(at.archive.get(one.files[0].key)))
    table, kept = file.read(), file.metadata.metadata
    spot = table.schema.get_field_index("value_id")
    table = table.set_column(spot, "value_id", [[99]]).replace_schema_metadata(kept)
    sink = io.BytesIO()
    pq.write_table(table, sink)
    forged = job_context(tier.store)
    data = with_sums(sink.getvalue())
    log = log_writer(forged)
    log.append([columns_action(queue.topic, 0, read_log(at).bodies[queue.topic][0])])
    forged.archive.put_if_absent(one.files[0].key, data)
    forgery = replace(one.files[0], size_bytes=len(data), crc=zlib_ng.crc32(data))
    log.append([archive_action([(queue, 0, replace(one, files=(forgery,)))])])
    found = [
        found.what for found in verify_archive(forged, local_engine(forged.context, 1)).findings
    ]
    assert found[-1] == "rows differ from the tier behind offset 0"


def test_merged_files_keep_their_columns() -> None:
    tier = sealed_tier([ONE], [b"bad", ONE])
    at = replace(job_context(tier.store), wishes=wishes("json", schema=b"id BIGINT"))
    archive(at)
    tier.add([TWO], roll=True)
    tier.add([b"open"], roll=True)
    archive(replace(at, wishes=wishes("json", schema=b"name STRING")))
    log = log_writer(at)
    merge(at, log, plan_merge(log.state, takes=lambda _queue: True))
    found = {
        row["queue_offset"]: row for key in keys(at) if is_shared(key) for row in rows(at, key)
    }
    assert [found[n]["value_id"] for n in sorted(found)] == [1, None, 1, None, 2]
    assert [found[n].get("value_name") for n in sorted(found)] == [None, None, None, None, "b"]
    assert check(at).compared == 4
