"""A topic that was archived, and then compacted in its tier: the archive has its history, and is taken for no other's."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.archive_jobs import archive, check, job_context
from support.compacting import QUEUE, compact
from support.keyed import KeyedTier, Mail
from support.merging import merge

from tiered.archive.archive_proof import ArchiveProof
from tiered.archive.audit import verify_archive
from tiered.archive.job import Result, log_writer, plan_job
from tiered.archive.machine import job_action
from tiered.archive.plan import plan_works
from tiered.archive.task import do_work
from tiered.log.merge import MergePolicy
from tiered.upkeep.engine import local_engine

FIRST_MS = 1_700_000_000_000


def tier_of(keys: str, last: bytes = b"x", holes: int = 0) -> KeyedTier:
    """A segment with a message for each letter, the last of another body behind holes; and two more, one open."""
    tier = KeyedTier()
    mails = [Mail((key,), body=b"x", time_ms=FIRST_MS + n) for n, key in enumerate(keys)]
    mails[-1] = replace(mails[-1], body=last)
    tier.post(QUEUE, mails[:1])
    tier.post(QUEUE, [*mails[1:-1], *[None] * holes, mails[-1]])
    newer = [Mail((key,), body=b"y", time_ms=FIRST_MS + 50 + n) for n, key in enumerate("ab")]
    tier.post(QUEUE, newer, roll=True)
    tier.post(QUEUE, [Mail(("z",), time_ms=FIRST_MS + 90)], roll=True)
    return tier


@pytest.mark.parametrize(
    "keys", ["abac", "cabab", "ab"], ids=["the last stays", "the first", "none"]
)
def test_what_is_compacted_since_is_no_damage(keys: str) -> None:
    """Neither for the next run, nor for who verifies, nor for who gives up what is archived."""
    tier = tier_of(keys)
    at = job_context(tier.store)
    archive(at)
    assert compact(tier)["applied"]
    segments = tier.journal.state.incarnation(QUEUE).segments
    assert segments[0].parts.holes
    again = archive(at)
    assert (again.plan.strange, again.segments, again.harmed) == ((), 0, {})
    assert check(at).compared == 2
    proof = ArchiveProof(at.tier, at.place, at.archive, log_writer(at).state, "")
    state = tier.journal.state
    assert [proof.holds(state, QUEUE, 0, one) for one in segments] == [True, True, False]


@pytest.mark.parametrize("holes", [0, 1])
def test_what_a_killed_job_made_of_a_segment_does_not_stop_who_comes_when_it_is_compacted(
    holes: int,
) -> None:
    """Both ends stay, so offsets, times, mark and size are those of before; its files are other ones all the same."""
    tier = tier_of("xabac", holes=holes)
    at = job_context(tier.store)
    log = log_writer(at)
    plan = plan_job(at, log.state)
    log.append([job_action(Result(plan, log.writer, "local", 0).record(0))])
    for work in plan_works(plan.tasks, 0):
        do_work(at.context, work)
    stray = {info.key for info in at.archive.list("data/")}
    assert merge(tier, MergePolicy(fan_in=2, segment_bytes_max=0))
    origins = [one.origin for one in plan.tasks]
    assert [one.origin for one in plan_job(at, log.state).tasks] == origins
    assert compact(tier)["applied"]
    result = archive(at)
    assert (result.failed, result.segments) == ([], 2)
    check(at)
    named = {f.key for some in log_writer(at).state.queues.values() for o in some for f in o.files}
    assert len(named & stray) == 1, "the one of the segment of which nothing was taken away"
    assert archive(at).entries == 0


def test_what_is_left_of_a_compacted_topic_is_compared() -> None:
    at = job_context(tier_of("abac").store)
    archive(at)
    other = tier_of("abac", b"another")
    compact(other)
    at = replace(at, tier=other.store)
    found = [one.what for one in verify_archive(at, local_engine(at.context, 1)).findings]
    assert found == ["rows differ from the tier behind offset 0"]
