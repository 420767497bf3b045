"""A topic that was archived, and then compacted in its tier: the archive has its history, and is taken for no other's."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.keyed import KeyedTier, Mail

from tests.archive.jobs import archive, check, workshop
from tests.compaction.test_tier import QUEUE, compact
from tiered.archive.audit import verify_archive
from tiered.archive.engine import local_engine
from tiered.archive.evidence import Evidence
from tiered.archive.job import log_writer

FIRST_MS = 1_700_000_000_000


def tier_of(keys: str, last: bytes = b"x") -> KeyedTier:
    """A segment with a message for each letter, the last of another body; and two more, one open."""
    tier = KeyedTier()
    mails = [Mail((key,), body=b"x", time_ms=FIRST_MS + n) for n, key in enumerate(keys)]
    mails[-1] = replace(mails[-1], body=last)
    tier.post(QUEUE, mails)
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
    at = workshop(tier.store)
    archive(at)
    assert compact(tier)["applied"]
    segments = tier.journal.state.life(QUEUE).segments
    assert segments[0].parts.holes
    again = archive(at)
    assert (again.plan.strange, again.segments, again.harmed) == ((), 0, {})
    assert check(at).compared == 2
    evidence = Evidence(at.tier, at.place, at.archive, log_writer(at).state, "")
    state = tier.journal.state
    assert [evidence.holds(state, QUEUE, 0, one) for one in segments] == [True, True, False]


def test_what_is_left_of_a_compacted_topic_is_compared() -> None:
    at = workshop(tier_of("abac").store)
    archive(at)
    other = tier_of("abac", b"another")
    compact(other)
    at = replace(at, tier=other.store)
    found = [one.what for one in verify_archive(at, local_engine(at.bench, 1)).findings]
    assert found == ["rows differ from the tier behind offset 0"]
