"""What a review feared for: that something goes away that lies nowhere else."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from support.archive_jobs import (
    all_outcomes,
    archive,
    check,
    index,
    is_shared,
    job_context,
    with_other_messages_behind,
)
from support.archive_merges import built, merged, named, seen
from support.command_line import here
from support.tiers import QUEUE, TierBuilder

from backends.s3_settings import S3Options
from tiered.archive.archive_proof import ArchiveProof
from tiered.archive.audit import read_log
from tiered.archive.clean import apply_clean, plan_clean
from tiered.archive.duck import ask
from tiered.archive.job import Result, log_writer, plan_job
from tiered.archive.lookup import lookup
from tiered.archive.machine import archive_action, job_action
from tiered.archive.plan import plan_works
from tiered.archive.selection import Selection
from tiered.archive.tables import read_archive
from tiered.archive.task import do_work
from tiered.errors import DataError, InvalidError
from tiered.log.parts import Parts
from tiered.spark.frames import ask_spark

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.archive_fixtures import Sealed

    from tiered.archive.job import JobContext


def planned(at: JobContext) -> dict[str, Any]:
    return plan_clean(at, log_writer(at).state, grace_ms=0, limit=99)


@pytest.mark.parametrize("harm", ["gone", "cut"])
def test_replaced_files_stay_while_one_that_took_their_place_is_not_there(harm: str) -> None:
    at = job_context(built().store)
    archive(at)
    before = seen(at)
    merged(at)
    at.clock.advance(2)  # type: ignore[attr-defined]
    plan = planned(at)
    assert (plan["deletion_count"], plan["refusals"]) == (6, [])
    (key,) = (key for key in named(at) if is_shared(key))
    data = at.archive.get(key)
    at.archive.delete(key)
    if harm == "cut":
        at.archive.put_if_absent(key, data[:-1])
    with pytest.raises(InvalidError, match="so what nothing names stays"):
        apply_clean(at, log_writer(at), plan)
    assert all(at.archive.head(row[0]) for row in plan["deletions"])
    late = planned(at)
    assert (late["deletion_count"], late["young"]) == (0, 0)
    (refusal,) = late["refusals"]
    assert refusal.startswith(key)
    if harm == "cut":
        at.archive.delete(key)
    at.archive.put_if_absent(key, data)
    assert apply_clean(at, log_writer(at), plan)["deleted"] == 6
    assert seen(at) == before


def holds(at: JobContext, tier: TierBuilder, segment: Any) -> bool:
    proof = ArchiveProof(at.tier, at.place, at.archive, read_archive(at.archive), "x")
    return proof.holds(tier.journal.state, QUEUE, 0, segment)


def test_a_long_offset_range_proves_nothing_of_a_short_segment_of_another_tier() -> None:
    tier = TierBuilder()
    tier.add([b"a", b"b", b"c"], roll=True)
    tier.add([b"open"], roll=True)
    at = job_context(tier.store)
    archive(at)
    segment = tier.journal.state.queues[QUEUE][0].segments[0]
    (part,) = segment.parts
    assert holds(at, tier, segment)
    short = replace(part, count=part.count - 1)
    assert not holds(at, tier, replace(segment, parts=Parts.of([short])))


def test_holes_of_an_archive_prove_nothing_of_messages() -> None:
    tier = TierBuilder()
    tier.add([b"a", None, b"c"], roll=True)
    tier.add([b"open"], roll=True)
    at = job_context(tier.store)
    archive(at)
    segment = tier.journal.state.queues[QUEUE][0].segments[0]
    assert holds(at, tier, segment)
    filled = Parts.of(replace(part, holes=0) for part in segment.parts)
    assert not holds(at, tier, replace(segment, parts=filled))


def test_what_another_job_archives_while_it_is_being_truncated_is_forgotten_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier = TierBuilder()
    tier.add([b"a"])
    tier.add([b"b", b"old c", b"old d"], roll=True)
    tier.add([b"old e"], roll=True)
    at = job_context(tier.store)
    slow = job_context(tier.store, at.archive, seed=1)

    log = log_writer(slow)
    plan = plan_job(slow, log.state)
    log.append([job_action(Result(plan, log.writer, "local", 0).record(0))])  # as a run begins
    done = all_outcomes(slow, do_work, plan_works(plan.tasks, 0))
    with_other_messages_behind(tier, b"new c", b"new d", b"open")

    def overtaken(who: JobContext, *known: Any) -> Any:
        """The slow job's entry comes between this one's planning and its first entry."""
        found = plan_job(who, *known)
        for work, outcome in done:
            assert not isinstance(outcome, Exception)
            (task,), (archived,) = work.tasks, outcome
            log.append([archive_action([(task.queue, task.tails, archived)])])
        done.clear()
        return found

    monkeypatch.setattr("tiered.archive.job.plan_job", overtaken)
    archive(at)
    check(at)
    found = {row["queue_offset"]: row["body"] for row in seen(at)}
    assert found == {0: b"a", 1: b"b", 2: b"new c", 3: b"new d"}


@pytest.mark.parametrize("harm", ["gone", "cut", "rotten"])
def test_a_damaged_file_is_damage_to_whoever_reads_it(harm: str) -> None:
    at = job_context(built().store)
    archive(at)
    merged(at)
    (key,) = (key for key in named(at) if is_shared(key))
    data = at.archive.get(key)
    at.archive.delete(key)
    if harm == "cut":
        at.archive.put_if_absent(key, data[:100])
    if harm == "rotten":
        rotten = bytes(byte ^ 0x55 for byte in data[4:-8])
        at.archive.put_if_absent(key, data[:4] + rotten + data[-8:])
    question = f'SELECT sum(octet_length(body)) FROM "{QUEUE.topic}"'
    with pytest.raises(DataError, match="a file of the archive") as raised:
        ask(at.archive, question)
    assert key in str(raised.value)
    assert ask(at.archive, "SELECT body FROM other").rows.to_pylist() == [{"body": b"x"}]
    with pytest.raises(InvalidError, match="tables are"):
        ask(at.archive, "SELECT nothing FROM other")
    wanted = Selection(texts={"topic": frozenset({QUEUE.topic})}, key="k")
    with pytest.raises(DataError, match="a file of the archive"):
        lookup(at.archive, wanted, count=1)
    with pytest.raises(DataError, match="a file of the archive"):
        index(at.archive)


def test_a_damaged_file_is_damage_to_spark_s_sql_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from py4j.protocol import Py4JError

    failure = (
        "An error\n: org.apache.Outer: x\n\tat a.b(C)\nCaused by: java.Inner: no magic\n\tat d"
    )

    class Conf(dict[str, str]):
        set = dict.__setitem__

    class Failing:
        conf = Conf()

        def sql(self, _question: str) -> None:
            raise Py4JError(failure)

    monkeypatch.setattr("tiered.spark.frames.make_views", lambda *_words, **_more: [])
    at = job_context(built().store)
    archive(at)
    options = S3Options()
    with pytest.raises(InvalidError, match=r"^java.Inner: no magic; tables are"):
        ask_spark(Failing(), at.archive, "SELECT * FROM other", "x", options)
    (key,) = (key for key in named(at) if "topic_dir=other/" in key)
    at.archive.delete(key)
    with pytest.raises(DataError, match="is gone"):
        ask_spark(Failing(), at.archive, "SELECT * FROM other", "x", options)
    with pytest.raises(InvalidError, match="no magic"):
        ask_spark(Failing(), at.archive, "SELECT 1", "x", options)


def test_topics_that_are_not_there_and_questions_that_are_none_are_said(
    sealed: Callable[[str], Sealed], archive_url: str
) -> None:
    words = ("archive", sealed("s04-batch-compress").url, "--to", archive_url)
    assert "has nothing of the topics" in here(*words, "--topics", "no-such*").good().err
    assert "has nothing" not in here(*words, "--topics", "mixed").good().err
    assert "has nothing" not in here(*words, "--topics", "mixed").good().err
    ran = here("sql", archive_url, " ;")
    assert (ran.code, "no question" in ran.err) == (2, True)


def test_damage_of_the_log_names_the_archive() -> None:
    at = job_context(built().store)
    archive(at)
    key, *others = (info.key for info in at.archive.list("_log/journal/"))
    for one in (key, *(one for one in others if one.endswith(".checkpoint"))):
        at.archive.delete(one)
    at.archive.put_if_absent(key, b"rotten")
    for read in (
        lambda: read_archive(at.archive),
        lambda: read_log(at),
        lambda: log_writer(at),
    ):
        with pytest.raises(DataError, match="the archive's log") as raised:
            read()
        assert f"memory://archive/{key}" in str(raised.value)
