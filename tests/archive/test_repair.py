"""Files of an archive that are lost or cut are named by the next run, and made again while the tier has their source."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from support.archive_jobs import all_outcomes, archive, as_engine, check, job_context, keys, rows
from support.archive_rows import files
from support.command_line import here, program
from support.journals import PREFIX
from support.keyed import KeyedTier, Mail
from support.merging import delete_unnamed, gather, named_bundles
from support.merging import merge as merge_tier
from support.tiers import QUEUE, TierBuilder

from backends.memory import MemoryStore
from backends.wrapping import WrappingStore
from tiered.archive.audit import apply_repair, plan_repair, verify_archive
from tiered.archive.job import PROBE_OLD_MS, first_error, log_writer, run_job
from tiered.archive.merging import merge, plan_merge
from tiered.archive.model import DAY_MS
from tiered.archive.plan import Limits
from tiered.cli.archive import result_document
from tiered.clock import ManualClock
from tiered.crashpoints import EXIT_CODE, VARIABLE
from tiered.errors import DataError
from tiered.log.merge import MergePolicy
from tiered.log.parts import queue_action
from tiered.model import MessageQueue
from tiered.upkeep.engine import local_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from support.archive_fixtures import Sealed

    from backends.base import ByteRange, ObjectInfo
    from tiered.archive.audit import Repaired
    from tiered.archive.job import JobContext

SECOND = MessageQueue(QUEUE.topic, 7)
OTHER = MessageQueue("other", 0)


def built() -> TierBuilder:
    """Two queues of three sealed segments each, with a hole in each segment."""
    tier = TierBuilder()
    for queue in (QUEUE, SECOND):
        for body in (b"a", b"b", b"c", b"open"):
            tier.add([body, None, body * 2], queue=queue, roll=True)
    return tier


def harm(at: JobContext, key: str, how: str) -> None:
    data = at.archive.get(key)
    at.archive.delete(key)
    if how == "cut":
        at.archive.put_if_absent(key, data[:-1])
    elif how == "flipped":
        at.archive.put_if_absent(key, bytes([*data[:40], data[40] ^ 1, *data[41:]]))


def repaired(at: JobContext, *, by_bytes: bool = False) -> tuple[dict[str, Any], Repaired]:
    log, engine = log_writer(at), local_engine(at.context, 2)
    plan = plan_repair(at, log.state, engine, by_bytes=by_bytes)
    return plan, apply_repair(at, log, plan, engine)


@pytest.mark.parametrize("how", ["gone", "cut", "flipped"])
@pytest.mark.parametrize("small_bytes", [0, 1 << 20], ids=["own files", "shared files"])
def test_what_is_harmed_is_named_and_made_again(how: str, small_bytes: int) -> None:
    at = job_context(built().store)
    run_job(at, local_engine(at.context, 1), small_bytes=small_bytes)
    before = sorted(rows(at), key=str)
    key = keys(at)[0]
    harm(at, key, how)
    told = archive(at).harmed
    assert list(told) == ([] if how == "flipped" else [key]), "a listing tells sizes alone"
    assert verify_archive(at, local_engine(at.context, 1)).findings
    plan, result = repaired(at, by_bytes=how == "flipped")
    assert [row["key"] for row in plan["repairs"]] == [key]
    assert (result.made, result.failed, plan["refusals"]) == (1, [], [])
    assert result.deleted == (how != "gone")
    assert key not in keys(at)
    check(at)
    assert sorted(rows(at), key=str) == before, "who reads the directory meets each row once"
    assert archive(at).harmed == {}
    assert (
        plan_repair(at, log_writer(at).state, local_engine(at.context, 1), by_bytes=True)["repairs"]
        == []
    )


def test_a_merged_file_and_a_side_file() -> None:
    at = job_context(built().store)
    run_job(at, local_engine(at.context, 1))
    log = log_writer(at)
    merge(at, log, plan_merge(log.state, takes=lambda _queue: True))
    queues = log_writer(at).state.queues
    named = {file.key for found in queues.values() for one in found for file in one.files}
    sides = keys(at, "_bad/")
    assert (len(named), len(sides)) == (1, 6)
    lost = {*named, sides[0], sides[5]}
    old = {key: at.archive.get(key) for key in sides}
    for key in lost:
        harm(at, key, "gone" if key == sides[0] else "cut")
    assert set(archive(at).harmed) == lost
    plan, result = repaired(at)
    assert (len(plan["repairs"]), result.made, result.rows, result.failed) == (3, 3, 12, [])
    assert {key: at.archive.get(key) for key in sides} == old, "byte for byte"
    check(at)


@pytest.mark.parametrize("what", ["verify", "repair"])
@pytest.mark.parametrize("is_lost", [False, True], ids=["merged", "lost"])
def test_what_others_merge_between_plan_and_work_is_planned_again(
    what: str, *, is_lost: bool
) -> None:
    """Of the tier; an object that is gone and still named is lost, and is said of the file or offset range that needs it."""
    tier = built()
    at = job_context(tier.store)
    archive(at)
    if what == "repair":
        harm(at, keys(at)[0], "gone")
    rounds: list[int] = []

    def engine(do: Any, works: Any) -> Any:
        planned = list(works)
        if not rounds:
            before = named_bundles(tier)
            if not is_lost:
                gather(tier)
            delete_unnamed(tier, before)
            for key in before if is_lost else ():
                at.tier.delete(PREFIX + key)
        rounds.append(len(planned))
        return all_outcomes(at, do, planned)

    if what == "verify":
        report = verify_archive(at, as_engine(engine))
        assert (rounds, report.compared) == ([6, 6], 6)
        found = [one.what for one in report.findings]
        assert len(found) == 6 * is_lost
        assert all("the tier cannot be read for comparison" in one for one in found)
    else:
        log = log_writer(at)
        plan = plan_repair(at, log.state, as_engine(engine), by_bytes=False)
        done = apply_repair(at, log, plan, as_engine(engine))
        assert (rounds, done.made, len(done.failed)) == ([1, 1], not is_lost, is_lost)


@pytest.mark.parametrize("how", ["gone", "flipped"])
@pytest.mark.parametrize("is_merged", [False, True], ids=["as written", "merged"])
def test_what_was_truncated_in_a_harmed_file_holds_up_no_other_queue_and_is_repaired(
    how: str, *, is_merged: bool
) -> None:
    """Of both queues, one twice; a cut is within a range, and its part of the tier is merged with what came behind it."""
    tier = built()
    tier.add([b"other"], queue=OTHER, roll=True)
    tier.add([b"open"], queue=OTHER, roll=True)
    at = job_context(tier.store)
    run_job(at, local_engine(at.context, 1), small_bytes=1 << 20)
    shared = next(key for key in keys(at) if OTHER.topic not in key)
    side = keys(at, "_bad/")[1]
    for end, queue in ((8, QUEUE), (4, QUEUE), (5, SECOND)):
        tier.truncate(end, queue=queue)
        tier.add([b"new", b"newer"], queue=queue, roll=True)
        tier.add([b"open"], queue=queue, roll=True)
    tier.add([b"more"], queue=OTHER, roll=True)
    if is_merged:
        before = named_bundles(tier)
        merge_tier(tier, MergePolicy(fan_in=2))
        delete_unnamed(tier, before)
    for key in (shared, side):
        harm(at, key, how)
    limits = Limits(bytes_max=1)
    result = run_job(at, local_engine(at.context, 1), small_bytes=1 << 20, limits=limits)
    assert [(one.queue.message_queue, one.start) for one, _ in result.failed] == [
        (QUEUE, 8),
        (SECOND, 5),
    ]
    assert isinstance(first_error(result), DataError)
    assert (result.segments, result.rows) == (1, 1), "what waits takes none of the limit"
    assert {row["start"] for row in result_document(at, result, sealed=0)["failed"]} == {5, 8}
    plan, done = repaired(at, by_bytes=how == "flipped")
    assert {row["key"] for row in plan["repairs"]} == {shared, side}
    assert (done.made, done.failed, plan["refusals"]) == (2, [], [])
    after = archive(at)
    assert (after.failed, len(after.plan.overtaken), after.harmed) == ([], 3, {})
    check(at)
    assert archive(at).entries == 0
    named = {f.key for some in log_writer(at).state.queues.values() for o in some for f in o.files}
    found = {
        (row["topic"], row["queue_id"], row["queue_offset"]): row["body"]
        for key in named
        for row in rows(at, key)
    }
    mine = {
        offset: body
        for (topic, number, offset), body in found.items()
        if (topic, number) == (SECOND.topic, 7)
    }
    assert mine == {0: b"a", 2: b"aa", 3: b"b", 5: b"new", 6: b"newer"}
    assert found[QUEUE.topic, QUEUE.queue_id, 4] == b"new"


def test_what_was_truncated_and_is_nowhere_any_more_is_refused_and_holds_up_its_queue_alone() -> (
    None
):
    tier = built()
    at = job_context(tier.store)
    run_job(at, local_engine(at.context, 1), small_bytes=1 << 20)
    tier.truncate(5)
    tier.add([b"new", b"newer"], roll=True)
    tier.add([b"open"], roll=True)
    tier.add([b"more"], queue=SECOND, roll=True)
    tier.say(queue_action("expire", QUEUE, 0, position=0, min_from=5, min_to=12))
    (shared,) = keys(at)
    harm(at, shared, "gone")
    result = archive(at)
    assert [(one.queue.message_queue, one.start) for one, _ in result.failed] == [(QUEUE, 5)]
    assert (result.segments, result.not_begun) == (1, 2)
    plan, _ = repaired(at)
    assert plan["repairs"] == []
    assert "has not offsets" in plan["refusals"][0]


def test_a_file_that_offset_ranges_share_is_looked_at_with_all_of_them() -> None:
    """Midnight is within the second of three segments, which lies in both files."""
    tier, days = KeyedTier(), (DAY_MS, 2 * DAY_MS)
    for times in ((days[0], days[0]), days, (days[1], days[1]), (days[1],)):
        tier.post(QUEUE, [Mail(time_ms=at_ms) for at_ms in times], roll=True)
    at = job_context(tier.store)
    run_job(at, local_engine(at.context, 1), small_bytes=1 << 20)
    (_, second) = keys(at)
    whole = check(at)
    assert (whole.files, whole.rows, whole.compared) == (2, 6, 3)
    harm(at, second, "gone")
    report = verify_archive(at, local_engine(at.context, 1))
    assert (report.files, report.rows) == (2, 3)
    whats = [one.what for one in report.findings]
    assert sorted(whats) == ["a file of the archive is gone", "the file could not be read"]


@pytest.mark.parametrize("when", ["before it looks", "behind its deletion"])
def test_a_side_file_that_another_run_makes_meanwhile(when: str) -> None:
    at = job_context(built().store)
    archive(at)
    side = keys(at, "_bad/")[0]
    data = at.archive.get(side)
    harm(at, side, "cut")

    class Beside(WrappingStore):
        """Another run is faster."""

        def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
            if key == side and when == "before it looks":
                self._inner.delete(key)
                self._inner.put_if_absent(key, data)
            return self._inner.get(key, byte_range)

        def delete(self, key: str) -> None:
            assert when != "before it looks", "nobody takes away a file that is whole"
            self._inner.delete(key)
            if key == side:
                self._inner.put_if_absent(key, data)

    _, result = repaired(replace(at, archive=Beside(at.archive)))
    assert (result.made, result.failed) == (1, [])
    assert at.archive.get(side) == data


def test_what_the_tier_has_not_any_more_is_refused_and_told() -> None:
    tier = built()
    at = job_context(tier.store)
    archive(at)
    for key in keys(at):
        harm(at, key, "gone")
    short = TierBuilder()
    short.add([b"x"], roll=True)
    emptied = job_context(short.store, at.archive)
    plan, result = repaired(emptied)
    assert (plan["repairs"], result.made) == ([], 0)
    assert len(plan["refusals"]) == len(archive(at).harmed) > 0
    assert "has not offsets [0, 3)" in plan["refusals"][0]
    other = TierBuilder()
    for queue in (QUEUE, SECOND):
        for body in (b"A", b"B", b"C", b"open"):
            other.add([body, None, body * 2], queue=queue, roll=True)
    plan, result = repaired(job_context(other.store, at.archive))
    assert plan["repairs"], "the log of that tier has these offsets"
    assert not result.made
    assert {key for key, _ in result.failed} == {row["key"] for row in plan["repairs"]}
    assert all("is not any more what this file was made of" in why for _, why in result.failed)
    assert keys(at) == [], "nothing was put for them"


def test_a_file_that_another_takes_away_meanwhile_is_not_harmed() -> None:
    class Late(WrappingStore):
        """A listing that does not show the newest yet, once."""

        hidden = True

        def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
            found = [*self._inner.list(prefix, start_after=start_after)]
            if prefix == "data/" and self.hidden:
                self.hidden = False
                return iter(found[1:])
            return iter(found)

    at = job_context(built().store)
    archive(at)
    again = job_context(at.tier, Late(at.archive))
    assert archive(again).harmed == {}
    assert not again.archive.hidden  # type: ignore[attr-defined]


def test_probes_meet_no_readers_and_are_cleared() -> None:
    now_ms = 10 * PROBE_OLD_MS
    store = MemoryStore("archive", now_ms=lambda: now_ms)
    for name in ("probe-00-put", "probe-01-put"):
        store.put_if_absent(f"_probe/{name}", b"first")
    at = job_context(built().store, store)
    at = replace(at, clock=ManualClock(now_ms + PROBE_OLD_MS + 1))
    assert archive(at).segments == 6
    assert keys(at, "_probe/") == []
    roots = {key.split("/")[0] for key in keys(at, "")}
    assert roots == {"data", "_bad", "_log"}


POINTS = ["archive-rewriting", "archive-rewritten", "entry-put", "archive-repaired"]


@pytest.mark.parametrize("point", POINTS)
def test_killed(point: str, sealed: Callable[[str], Sealed], tmp_path: Path) -> None:
    """Whenever a repair is killed: the next one ends it, and the directory has each row once."""
    tier, url = sealed("s04-batch-compress"), f"file://{tmp_path}/parquet"
    here("archive", tier.url, "--to", url).good()
    first = files(url)[0]
    first.write_bytes(first.read_bytes()[:-9])
    said = here("archive", tier.url, "--to", url, "--json")
    assert said.code == 1
    assert [row["key"] for row in said.document["harmed"]] == [
        str(first.relative_to(tmp_path / "parquet"))
    ]
    assert "`tiered archive --repair` makes them again" in said.err
    words = ("archive", tier.url, "--to", url, "--repair", "--apply", "-")
    assert program(*words, env={VARIABLE: point}).code == EXIT_CODE
    done = here(*words, "--json").good().document
    assert done["applied"]["failed"] == []
    assert not first.exists()
    assert here("archive", tier.url, "--to", url, "--json").good().document["harmed"] == []
    verified = here("archive", tier.url, "--to", url, "--verify", "--json").good().document
    assert (verified["rows"], verified["findings"]) == (tier.dump.count, [])


def test_plan_then_apply(sealed: Callable[[str], Sealed], tmp_path: Path) -> None:
    tier, url = sealed("s04-batch-compress"), f"file://{tmp_path}/parquet"
    words = ("archive", tier.url, "--to", url, "--repair", "--verify")
    here("archive", tier.url, "--to", url).good()
    assert here(*words, "--exit-code", "--json").good().document["repairs"] == []
    first = files(url)[0]
    data = first.read_bytes()
    first.write_bytes(bytes([*data[:100], data[100] ^ 4, *data[101:]]))
    plan = tmp_path / "plan.json"
    shown = here(*words, "--plan", str(plan), "--exit-code")
    assert (shown.code, first.exists()) == (1, True)
    assert b"other bytes" in shown.out
    applied = here(*words, "--apply", str(plan)).good()
    assert b"made      1 file" in applied.out
    assert not first.exists()
    assert here(*words, "--json").good().document["repairs"] == []
