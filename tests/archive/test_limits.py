"""What one run takes on, what it says of itself, and sealing before it."""

from __future__ import annotations

import contextlib
import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from support import captures
from support.archive_jobs import Damaged, all_outcomes, archive, as_engine, check, job_context, rows
from support.archive_rows import files
from support.archive_states import COUNT, tier
from support.bundles import made_part
from support.command_line import here
from support.tiers import QUEUE, TierBuilder

from backends.registry import open_store
from backends.s3_settings import S3Options
from tiered.api.broker_place import Place, choose_place
from tiered.archive.job import JobProgress, log_writer, plan_job, run_job, spark_ahead
from tiered.archive.machine import ArchiveState
from tiered.archive.plan import NO_LIMITS, Limits, Plan, Work, limited, plan_archive, plan_works
from tiered.archive.task import do_work
from tiered.cli.archive import progressed
from tiered.clock import ManualClock, SystemClock
from tiered.errors import DataError
from tiered.journal.lease import Holder, Lease
from tiered.log.parts import Parts, TierState
from tiered.spark import driver as spark
from tiered.upkeep.engine import WorkContext, local_engine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.archive_fixtures import Sealed


def plan(queues: int = 2, segments: int = 4) -> Plan:
    """Segment ``n`` of each queue: messages of times 10 n to 10 n + 9, 1,000 bytes of commit log."""
    place = Place("c", "b")
    return plan_archive(tier(queues, segments), place, ArchiveState(), takes=lambda _: True)


def spans(found: Plan) -> list[tuple[int, int]]:
    return [(task.queue.queue_id, task.start // 100) for task in found.tasks]


def test_a_segment_that_touches_the_wanted_time_is_taken_whole() -> None:
    found = limited(plan(), Limits(from_ms=19, until_ms=30))
    assert spans(found) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert (found.outside, found.postponed) == (4, 0)
    assert spans(limited(plan(), Limits(from_ms=20, until_ms=31))) == [
        *((0, 2), (0, 3)),
        *((1, 2), (1, 3)),
    ]
    assert limited(plan(), NO_LIMITS) == plan()


def test_a_run_takes_the_oldest_first_and_one_segment_at_least() -> None:
    found = limited(plan(), Limits(bytes_max=3999))
    assert spans(found) == [(0, 0), (1, 0), (0, 1)]
    assert (found.postponed, found.postponed_bytes) == (5, 5000)
    assert spans(limited(plan(), Limits(bytes_max=1))) == [(0, 0)]
    assert limited(plan(), Limits(bytes_max=1), is_first=False).tasks == ()
    assert Limits(bytes_max=10).after(7) == Limits(bytes_max=3)
    assert Limits(bytes_max=10).after(17) == Limits(bytes_max=0)


def test_small_segments_of_a_topic_are_packed_and_large_ones_are_not() -> None:
    tasks = list(plan(3, 2).tasks)
    tasks[1] = replace(tasks[1], parts=Parts.of([made_part(0, 0, COUNT, 5000)]))
    other = replace(tasks[0], queue=replace(tasks[0].queue, topic="other"))
    found = plan_works([*tasks, other], 4000)
    assert found == [Work((tasks[0], *tasks[2:])), Work((tasks[1],)), Work((other,))]
    assert plan_works(tasks, 0) == [Work((task,)) for task in tasks]


def test_nothing_is_begun_when_the_time_is_over() -> None:
    made = TierBuilder()
    for body in (b"a", b"b", b"c", b"open"):
        made.add([body], roll=True)
    at = job_context(made.store)
    assert isinstance(at.clock, ManualClock)

    def slow(do: Any, works: Any) -> Any:
        for work in works:
            at.clock.advance(10)  # type: ignore[attr-defined]
            yield from all_outcomes(at, do, [work])

    result = run_job(at, as_engine(slow), limits=Limits(runtime_ms=15_000))
    assert (result.segments, result.not_begun) == (2, 1)
    rest = archive(at)
    assert (rest.segments, check(at).rows) == (1, 3)


def test_each_entry_says_how_far_its_run_is() -> None:
    made = TierBuilder()
    for body in (b"a", b"b", b"open"):
        made.add([body], roll=True)
    at = job_context(made.store)
    first = archive(at)
    (record,) = log_writer(at).state.jobs
    assert record == first.record(record.began_ms + record.elapsed_ms)
    assert (record.run, record.engine, record.planned) == (first.run, "local", 2)
    assert (record.segments, record.rows, record.files) == (2, 2, 2)
    made.add([b"c"], roll=True)
    made.add([b"more"], roll=True)
    second = archive(replace(at, rng=type(at.rng)(7)))
    assert [one.run for one in log_writer(at).state.jobs] == [first.run, second.run]


def test_a_watch_counts_and_knows_how_long_the_rest_takes() -> None:
    made = TierBuilder()
    for body in (b"a", b"b", b"open"):
        made.add([body], roll=True)
    at = job_context(made.store)
    clock = ManualClock()
    clock.advance(5)
    watch = JobProgress(clock)
    assert watch.seconds_left is None
    tasks = archive_tasks(at)
    watch.segments_all, watch.bytes_all = 2, sum(task.size_bytes for task in tasks)
    with watch.over(local_engine(at.context, 1))(do_work, plan_works(tasks, 0)) as watched:
        for number, (_, outcome) in enumerate(watched, 1):
            assert not isinstance(outcome, Exception)
            assert len(outcome) == 1
            clock.advance(10)
            assert watch.segments == watch.rows == number
            left_s = watch.seconds_left
            assert left_s == (10.0 if number == 1 else 0.0)


def archive_tasks(at: Any) -> Any:
    seen: list[Any] = []
    run_job(at, as_engine(lambda _do, works: seen.extend(works) or ()))
    return [task for work in seen for task in work.tasks]


def test_packed_segments_are_read_as_if_they_were_not() -> None:
    made = TierBuilder()
    for body in (b"a", b"b", b"open"):
        made.add([body, body], roll=True)
    plain, packed = job_context(made.store), job_context(made.store)
    assert archive(plain).files == 2
    result = run_job(packed, local_engine(packed.context, 1), small_bytes=1 << 20)
    assert (result.files, result.segments, result.rows, result.holes) == (1, 2, 4, 0)
    assert rows(packed) == rows(plain)
    assert check(packed).rows == 4
    assert run_job(packed, local_engine(packed.context, 1), small_bytes=1 << 20).entries == 0


def three_sealed() -> TierBuilder:
    made = TierBuilder()
    for body in (b"a" * 100, b"b" * 100, b"c" * 100, b"open"):
        made.add([body], roll=True)
    return made


def test_damage_of_one_segment_leaves_the_others_of_its_pack() -> None:
    made = three_sealed()
    at = job_context(made.store)
    part = made.journal.state.queues[QUEUE][0].segments[1].parts[0]
    harmed = replace(at, tier=Damaged(made.store, part.log.key))
    result = run_job(harmed, local_engine(harmed.context, 1), small_bytes=1 << 20)
    assert (result.segments, result.rows) == (2, 2)
    ((task, error),) = result.failed
    assert (task.start, type(error)) == (1, DataError)
    rest = run_job(at, local_engine(at.context, 1), small_bytes=1 << 20)
    assert (rest.segments, check(at).rows) == (1, 3)


@pytest.mark.parametrize("small_bytes", [0, 1 << 20])
def test_an_object_that_the_tier_lost_is_named_and_holds_up_no_others(small_bytes: int) -> None:
    made = three_sealed()
    at = job_context(made.store)
    part = made.journal.state.queues[QUEUE][0].segments[1].parts[0]
    key = at.place.prefix + part.log.key
    lost = made.store.get(key)
    made.store.delete(key)
    result = run_job(at, local_engine(at.context, 1), small_bytes=small_bytes)
    assert (result.segments, result.rows, result.not_begun) == (2, 2, 0)
    ((task, error),) = result.failed
    assert (task.start, type(error)) == (1, DataError)
    assert part.log.key in str(error)
    made.store.put_if_absent(key, lost)
    rest = run_job(at, local_engine(at.context, 1), small_bytes=small_bytes)
    assert (rest.failed, rest.segments, check(at).rows) == ([], 1, 3)


def test_another_job_takes_a_part_of_a_pack_between_work_and_commit() -> None:
    at = job_context(three_sealed().store)
    rival = replace(at, rng=type(at.rng)(5))
    seen: list[int] = []

    def engine(do: Any, works: Any) -> Any:
        done = all_outcomes(at, do, works)
        if not seen:
            ran = run_job(rival, local_engine(rival.context, 1), limits=Limits(bytes_max=1))
            assert ran.segments == 1
        seen.append(len(done))
        return done

    result = run_job(at, as_engine(engine), small_bytes=1 << 20)
    assert (result.overtaken, result.segments, len(seen)) == (1, 2, 2)
    state = log_writer(at).state
    assert state.refused == 0
    assert check(at).rows == 3


def test_a_pack_is_work_for_spark_as_well(
    sealed: Callable[[str], Sealed], archive_url: str
) -> None:
    tier, options = sealed("s04-batch-compress"), S3Options()
    with contextlib.closing(open_store(tier.url, options)) as store:
        at = replace(job_context(store), place=choose_place(store, None, None))
        pack = next(work for work in plan_works(archive_tasks(at)) if len(work.tasks) > 1)
        sent = pickle.loads(pickle.dumps(pack))
        assert sent == pack
        with contextlib.closing(open_store(archive_url, options)) as target:
            bench = WorkContext(store, at.place.prefix, target)
            outcome = spark.heard(spark.said(do_work, bench, sent))
    assert isinstance(outcome, tuple)
    assert [(one.start, one.end) for one in outcome] == [(t.start, t.end) for t in pack.tasks]
    (file,) = files(archive_url)
    assert {one.files[0].key.rpartition("/")[2] for one in outcome} == {file.name}


def test_spark_tells_how_far_it_is_or_nothing() -> None:
    stages = {
        3: SimpleNamespace(numCompletedTasks=4),
        5: SimpleNamespace(numCompletedTasks=2),
        6: None,
    }
    tracker = SimpleNamespace(getActiveStageIds=lambda: list(stages), getStageInfo=stages.get)
    context = SimpleNamespace(statusTracker=lambda: tracker)
    assert spark_ahead(SimpleNamespace(sparkContext=context))() == 6
    assert spark_ahead(None)() == 0
    watch = JobProgress(ManualClock(), 10, 1000, 5, 500, 7, lambda: 6)
    said = progressed(watch)
    assert said.text == "5 of 10 segments (and 6 tasks under way), 7 messages, 500 B of 1000 B"
    assert (said.done, said.total) == (500, 1000)
    assert progressed(JobProgress(ManualClock())).text == "reading the logs"


def test_another_tier_of_the_same_name_is_not_taken_for_this_one() -> None:
    made = TierBuilder()
    made.add([b"a", b"b"], roll=True)
    made.add([b"open"], roll=True)
    at = job_context(made.store)
    archive(at)
    same = plan_job(at, log_writer(at).state)
    assert (same.strange, same.archived_segments) == ((), 1)
    late = TierState(queues={QUEUE: (shifted(made.journal.state.queues[QUEUE][0], 5),)})
    place = Place("c", "b")
    found = plan_archive(late, place, log_writer(at).state, takes=lambda _: True)
    assert [(queue.message_queue, start) for queue, start in found.strange] == [(QUEUE, 0)]


def shifted(incarnation: Any, by_ms: int) -> Any:
    """The same offsets, stored at other times."""
    segments = []
    for segment in incarnation.segments:
        parts = [
            replace(p, store_min_ms=p.store_min_ms + by_ms, store_max_ms=p.store_max_ms + by_ms)
            for p in segment.parts
        ]
        segments.append(replace(segment, parts=Parts.of(parts)))
    return replace(incarnation, segments=tuple(segments))


def test_the_command_in_parts(
    sealed: Callable[[str], Sealed], archive_url: str, tmp_path: Path
) -> None:
    tier = sealed("s04-batch-compress")
    words = ("archive", tier.url, "--to", archive_url)
    planned = here(*words, "--dry-run", "--json").good().document
    assert planned["planned"] == len(planned["tasks"]) > 2
    for acts in (("--clean", "--apply", "-"), ("--key-index",)):
        refused = here(*words, "--dry-run", *acts)
        assert (refused.code, "contradict" in refused.error) == (2, True)
    assert files(archive_url) == []
    metrics = tmp_path / "archive.prom"
    first = here(*words, "--max-bytes", "1", "--metrics-file", metrics, "--json").good()
    assert (first.document["segments"], first.document["postponed"]) == (1, planned["planned"] - 1)
    assert "left to the next run" in first.err
    text = metrics.read_text()
    assert "\ntiered_archive_run_segments 1.0\n" in text
    assert list(tmp_path.glob("*.tmp")) == []
    topic = planned["tasks"][-1]["topic"]
    kept = here(*words, "--exclude", topic, "--json").good().document
    assert kept["segments"] < planned["planned"] - 1
    outside = here(*words, "--until", "1000", "--json").good().document
    assert (outside["planned"], outside["segments"]) == (0, 0)
    assert outside["outside"] > 0
    here(*words).good()
    verified = here(*words, "--verify", "--json").good().document
    assert (verified["rows"], verified["findings"]) == (tier.dump.count, [])


def test_open_segments_are_sealed_unless_a_writer_is_at_work(
    stores: Callable[[str], Any], tmp_path: Path, archive_url: str
) -> None:
    url, store = f"file://{tmp_path}/tier", stores("s04-batch-compress")
    here("attach", store, "--to", url, "--once").good()
    with contextlib.closing(open_store(url, S3Options())) as tier:
        prefix = choose_place(tier, None, None).prefix
        known = {"writer": "0badcafe", "holder": Holder.present(), "clock": SystemClock()}
        lease = Lease(tier, prefix, seconds=60, **known)  # type: ignore[arg-type]
        assert lease.try_acquire() is None
        ran = here("archive", url, "--to", archive_url, "--seal", "--json").good()
        assert (ran.document["sealed"], ran.document["segments"]) == (0, 0)
        assert "nothing is sealed: a writer is at work" in ran.err
        lease.release()
    ran = here("archive", url, "--to", archive_url, "--seal", "--json").good()
    said = ran.document
    assert f"tiered: {said['sealed']} open segments sealed" in ran.err
    count = captures.captured("s04-batch-compress").count
    assert said["rows"] == count
    assert said["sealed"] == said["segments"]
    assert here("archive", url, "--to", archive_url, "--seal", "--json").document["sealed"] == 0
    here("attach", store, "--to", url, "--once").good()
    here("verify", url, "--store", store).good()
