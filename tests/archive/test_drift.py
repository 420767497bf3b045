"""Bodies of JSON that change: what is left out is counted and told, what cannot be done refused, old rows made again."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from support.archive_jobs import archive, check, job_context, keys, rows, sealed_tier
from support.archives_made import loaded
from support.bodies import wishes
from support.command_line import here
from support.tiers import QUEUE, TierBuilder

from tiered.archive.audit import read_log
from tiered.archive.duck import ask
from tiered.archive.job import log_writer, run_job
from tiered.archive.machine import archive_action
from tiered.archive.merging import merge, plan_merge
from tiered.archive.model import Archived
from tiered.archive.selection import Selection
from tiered.archive.stale import stale_rows
from tiered.errors import InvalidError
from tiered.journal.entry import as_row, row_of
from tiered.model import MessageQueue
from tiered.spark.frames import warn_of_stale
from tiered.upkeep.engine import local_engine

if TYPE_CHECKING:
    from pathlib import Path

    from tiered.archive.job import JobContext, Result

TOPIC = QUEUE.topic
EARLY = b'{"id": 1}'
LATE = b'{"id": 2, "late": 5, "more": {"x": 1}}'


def again(at: JobContext) -> Result:
    return run_job(at, local_engine(at.context, 1), again=True)


def summed(at: JobContext, column: str = "value_late") -> Any:
    (row,) = ask(at.archive, f'SELECT sum({column}) AS s FROM "{TOPIC}"').rows.to_pylist()
    return row["s"]


def drifted() -> tuple[TierBuilder, JobContext]:
    tier = sealed_tier([EARLY], [LATE, LATE, b'{"id": "x"}'], [LATE])
    at = replace(job_context(tier.store), wishes=wishes("json", schema=b"id BIGINT"))
    return tier, at


# -- what is left out ------------------------------------------------------------------------------


def test_members_without_a_column_are_counted_in_the_result_and_in_the_log() -> None:
    _, at = drifted()
    result = archive(at)
    assert result.left_out == {(TOPIC, "late"): 3, (TOPIC, "more"): 3}
    assert result.unfit == {(TOPIC, "id"): 1}
    ((_, offset_ranges),) = read_log(at).queues.items()
    assert [one.left_out for one in offset_ranges] == [
        (),
        (("late", 2), ("more", 2)),
        (("late", 1), ("more", 1)),
    ]
    assert [one.unfit for one in offset_ranges] == [(), (("id", 1),), ()]
    for one in offset_ranges:
        assert as_row(Archived).decode(json.loads(json.dumps(row_of(one)))) == one
    state = read_log(at)
    assert loaded(state) == state
    assert result.stale == []
    check(at)


def test_what_fits_is_not_nulled_by_what_does_not() -> None:
    tier = sealed_tier([b'{"id": 1, "amount": "x"}', b'{"id": "y", "amount": 2}'])
    at = replace(job_context(tier.store), wishes=wishes("json", schema=b"id BIGINT, amount BIGINT"))
    assert archive(at).misfits == 2
    assert [(row["value_id"], row["value_amount"], row["body_error"]) for row in rows(at)] == [
        (1, None, "the body does not fit the topic's columns: amount"),
        (None, 2, "the body does not fit the topic's columns: id"),
    ]
    check(at)


# -- what is stale ---------------------------------------------------------------------------------


def test_rows_from_before_a_column_are_told_until_they_are_made_again() -> None:
    _, at = drifted()
    archive(at)
    more = replace(at, wishes=wishes("json", schema=b"late BIGINT, never INT"))
    result = archive(more)  # nothing is left to be archived
    assert (result.segments, result.is_extended) == (0, True)
    (stale,) = result.stale
    # The first segment has no such member, and none has the other one.
    assert (stale.topic, stale.columns, stale.rows) == (TOPIC, ("value_late",), 4)
    assert not archive(more).is_extended
    answer = ask(at.archive, f'SELECT sum(value_late) FROM "{TOPIC}"')
    assert [one.rows for one in answer.stale] == [4]
    assert summed(at) is None
    old = keys(at)
    result = again(more)
    assert result.remade is not None
    assert (result.remade.offset_ranges, result.remade.rows, result.remade.left) == (2, 4, [])
    assert (result.stale, summed(at)) == ([], 15)
    assert ask(at.archive, f'SELECT sum(value_late) FROM "{TOPIC}"').stale == []
    state = read_log(at)
    assert state.refused == 0
    assert {one.key for one in state.replaced} >= {key for key in old if key not in keys_of(at)}
    assert len(state.replaced) == 3  # two files, and one of what did not fit
    check(at)
    assert again(more).remade == replace(result.remade, offset_ranges=0, rows=0, entries=0)


def keys_of(at: JobContext) -> set[str]:
    queues = read_log(at).queues.values()
    return {file.key for found in queues for one in found for file in one.objects()}


def test_what_was_archived_as_bytes_becomes_columns() -> None:
    at = job_context(sealed_tier([LATE], [EARLY, LATE]).store)
    archive(at)
    wished = replace(at, wishes=wishes("json"))
    with pytest.raises(InvalidError, match="archived as bytes"):
        archive(wished)
    result = again(wished)
    assert result.remade is not None
    assert (result.remade.offset_ranges, result.stale, summed(at)) == (2, [], 10)
    check(at)


def test_more_of_a_topic_archived_as_bytes_becomes_columns_and_the_rest_is_told() -> None:
    tier = sealed_tier([LATE])
    at = job_context(tier.store)
    archive(at)
    tier.add([LATE], roll=True)
    tier.add([b"open"], roll=True)
    result = archive(replace(at, wishes=wishes("json")))
    (stale,) = result.stale
    assert (result.is_extended, stale.rows, summed(at)) == (True, 1, 5)
    assert again(at).stale == []
    assert summed(at) == 10


def test_a_frame_of_spark_warns_of_what_is_stale() -> None:
    _, at = drifted()
    archive(at)
    warn_of_stale(read_log(at), Selection())
    archive(replace(at, wishes=wishes("json", schema=b"late BIGINT")))
    with pytest.warns(UserWarning, match="value_late"):
        warn_of_stale(read_log(at), Selection())


def test_merged_files_are_made_again_with_all_that_shares_them() -> None:
    tier = TierBuilder()
    for queue in (QUEUE, MessageQueue(TOPIC, 1)):
        for body in (EARLY, LATE, b"open"):
            tier.add([body], queue=queue, roll=True)
    at = replace(job_context(tier.store), wishes=wishes("json", schema=b"id BIGINT"))
    archive(at)
    log = log_writer(at)
    merge(at, log, plan_merge(log.state, takes=lambda _queue: True))
    result = again(replace(at, wishes=wishes("json", schema=b"late BIGINT")))
    assert result.remade is not None
    assert (result.remade.offset_ranges, result.remade.entries) == (4, 1)
    assert (summed(at), summed(at, "value_id"), result.stale) == (10, 6, [])
    assert read_log(at).refused == 0
    check(at)


def test_what_the_tier_has_not_any_more_stays_and_is_named() -> None:
    _, at = drifted()
    archive(at)
    empty = job_context(TierBuilder().store, at.archive)
    result = again(replace(empty, wishes=wishes("json", schema=b"late BIGINT")))
    assert result.remade is not None
    assert result.remade.left == [(TOPIC, "the tier has not all of its messages any more")]
    assert [one.rows for one in result.stale] == [4]
    assert rows(at)


def test_an_entry_that_is_late_or_of_other_rows_is_refused() -> None:
    _, at = drifted()
    archive(at)
    more = replace(at, wishes=wishes("json", schema=b"late BIGINT"))
    ((queue, before),) = read_log(at).queues.items()
    again(more)
    ((_, after),) = read_log(at).queues.items()
    log = log_writer(at)
    log.append(
        [archive_action([(queue, 0, before[1])], again=True)]
    )  # fewer columns than are there
    assert log.state.refused == 1
    other = replace(after[1], misfits=0, side=None, bad=after[1].bad + 1)
    log.append([archive_action([(queue, 0, other)], again=True)])
    log.append([archive_action([], again=True)])
    assert log.state.refused == 3
    assert log.state.queues[queue] == after


def test_a_file_that_others_share_is_not_replaced_in_part() -> None:
    tier = sealed_tier([LATE], [LATE])
    at = replace(job_context(tier.store), wishes=wishes("json", schema=b"id BIGINT"))
    run_job(at, local_engine(at.context, 1), small_bytes=1 << 20)
    ((queue, (one, two)),) = read_log(at).queues.items()
    assert one.files[0].key == two.files[0].key
    log = log_writer(at)
    log.append([archive_action([(queue, 0, one)], again=True)])
    assert log.state.refused == 1
    assert log.state.queues[queue] == (one, two)
    assert stale_rows(log.state) == []


# -- what cannot be done ---------------------------------------------------------------------------


def test_a_wish_that_can_do_nothing_is_refused() -> None:
    _, at = drifted()
    archive(at)
    for wish, what in (
        (wishes(f"{TOPIC}x=json"), "names the topic"),
        (wishes("json", schema=b"id STRING"), "in this archive"),
        (wishes("text"), "in this archive"),
    ):
        with pytest.raises(InvalidError, match=what):
            archive(replace(at, wishes=wish))
    for fine in (wishes("x-*=json"), wishes("json"), wishes("raw")):
        assert archive(replace(at, wishes=fine)).segments == 0


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path) -> tuple[str, str]:
    """URLs of a tier and of its archive, which has two segments of JSON."""
    store, tier = tmp_path / "store", f"file://{tmp_path}/tier"
    assert here("demo", "--help").code == 0
    lines = tmp_path / "lines"
    lines.write_bytes(
        b"".join(b'{"topic": "t", "queue_id": 0, "body": %s}\n' % body for body in SENT)
    )
    here("store", "create", store).good()
    here("store", "put", store, lines).good()
    here("attach", store, "--to", tier, "--once", "--seal").good()
    return tier, f"file://{tmp_path}/archive"


SENT = [json.dumps(body).encode() for body in ('{"id": 1}', '{"id": 2, "late": 5}')]


def test_the_command_tells_refuses_and_makes_again(place: tuple[str, str], tmp_path: Path) -> None:
    tier, url = place
    to = ("archive", tier, "--to", url, "--json")
    columns = tmp_path / "c.sql"
    columns.write_text("id BIGINT")
    done = here(*to, "--body", "json", "--body-schema", columns).good()
    assert done.document["left_out"] == [{"topic": "t", "member": "late", "values": 1}]
    assert "t late (1)" in done.err
    columns.write_text("late BIGINT")
    done = here(*to, "--body", "json", "--body-schema", columns)
    (stale,) = done.document["stale"]
    assert (done.code, stale["rows"], stale["columns"]) == (1, 2, ["value_late"])
    assert "--decode-again" in done.err
    asked = here("sql", url, "SELECT sum(value_late) AS s FROM t").good()
    assert "value_late" in asked.err
    columns.write_text("late STRING")
    assert here(*to, "--body", "json", "--body-schema", columns).code == 2
    for wish in ("typo-topic=json", "t=text"):
        assert here(*to, "--body", wish).code == 2
        assert here(*to, "--body", wish, "--dry-run").code == 2
    assert here(*to, "--decode-again").good().document["stale"] == []
    asked = here("sql", url, "SELECT sum(value_late) AS s FROM t", "-o", "csv").good()
    assert (asked.out, asked.err) == (b"s\n5\n", "")
    assert here("archive", tier, "--to", url, "--verify").good()


def test_the_command_refuses_columns_of_what_is_archived_as_bytes(place: tuple[str, str]) -> None:
    tier, url = place
    here("archive", tier, "--to", url).good()
    done = here("archive", tier, "--to", url, "--body", "t=json")
    assert (done.code, "--decode-again" in done.error) == (2, True)
    here("archive", tier, "--to", url, "--body", "t=json", "--decode-again").good()
    asked = here("sql", url, "SELECT sum(value_late) AS s FROM t", "-o", "csv").good()
    assert asked.out == b"s\n5\n"
