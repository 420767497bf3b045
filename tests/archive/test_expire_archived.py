"""The tier gives up only what the archive has, file by file, byte by byte; of anything else nothing."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from support.archive_jobs import archive, as_engine, job_context, with_other_messages_behind
from support.archive_rows import files
from support.command_line import here
from support.tiers import QUEUE, TierBuilder

from tiered.archive.archive_proof import ArchiveProof
from tiered.archive.job import log_writer, run_job
from tiered.archive.plan import Limits
from tiered.log.parts import Parts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.archive_fixtures import Sealed

    from tiered.archive.job import JobContext

NAME = "s04-batch-compress"


@pytest.fixture
def tier_url(sealed: Callable[[str], Sealed], tmp_path: Path) -> str:
    """A tier of our own, every segment sealed."""
    made = sealed(NAME)
    shutil.copytree(made.url.removeprefix("file://"), tmp_path / "tier")
    return f"file://{tmp_path}/tier"


def expire(tier: str, archive_url: str, *words: Any) -> Any:
    options = ("--ttl", "1ms", "--archived", "--archive", archive_url, "--json")
    return here("expire", tier, *options, *words)


def left(tier: str) -> dict[str, int]:
    """Messages that can be read, by topic."""
    (broker,) = here("status", tier, "--json").document["brokers"]
    found: dict[str, int] = {}
    for topic in broker["topics"]:
        for row in topic["queues"]:
            count = row["commit_offset"] - row["min_offset"]
            found[topic["topic"]] = found.get(topic["topic"], 0) + count
    return {topic: count for topic, count in found.items() if count}


def test_what_is_archived_and_verifies_goes(tier_url: str, archive_url: str) -> None:
    topic = min(left(tier_url))
    here("archive", tier_url, "--to", archive_url, "--topics", topic).good()
    before = left(tier_url)
    planned = expire(tier_url, archive_url).good().document
    assert {step["topic"] for step in planned["steps"]} == {topic}
    assert {row["topic"] for row in planned["unproved"]} == before.keys() - {topic}
    assert planned["refusals"] == []
    assert left(tier_url) == before, "a plan changes nothing"
    done = expire(tier_url, archive_url, "--apply", "-").good().document
    assert done["applied"]["steps"] == len(planned["steps"])
    assert left(tier_url) == {name: count for name, count in before.items() if name != topic}
    here("verify", tier_url).good()
    here("archive", tier_url, "--to", archive_url, "--verify").good()


def test_a_file_that_is_gone_is_named_beside_many_that_never_were(
    tier_url: str, archive_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiered.cli.planned._SHOWN", 1)
    here("archive", tier_url, "--to", archive_url, "--topics", max(left(tier_url))).good()
    (file, *_) = files(archive_url)
    file.unlink()
    asked = ("expire", tier_url, "--ttl", "1ms", "--archived", "--archive", archive_url)
    ran = here(*asked)
    text = ran.out.decode()
    assert (ran.code, "each with all behind it" in text) == (1, True)
    assert f"{file.name}: a file of the archive is gone" in text


@pytest.mark.parametrize("harm", ["tampered", "cut", "gone"])
def test_nothing_goes_whose_file_is_not_what_it_was(
    harm: str, tier_url: str, archive_url: str
) -> None:
    here("archive", tier_url, "--to", archive_url, "--pack-below", "0").good()
    before, file = left(tier_url), files(archive_url)[0]
    data = file.read_bytes()
    file.chmod(0o600)
    if harm == "gone":
        file.unlink()
    else:
        file.write_bytes(data[:-1] if harm == "cut" else bytes([data[0] ^ 1]) + data[1:])
    ran = expire(tier_url, archive_url, "--apply", "-")
    assert ran.code == 1
    (refusal,) = ran.document["refusals"]
    assert refusal.startswith(str(file.relative_to(archive_url.removeprefix("file://"))))
    (row,) = ran.document["unproved"]
    assert left(tier_url) == {row["topic"]: row["end"] - row["start"]}
    assert sum(before.values()) > row["end"] - row["start"]


def test_a_plan_is_proved_again_when_it_is_applied(
    tier_url: str, archive_url: str, tmp_path: Path
) -> None:
    here("archive", tier_url, "--to", archive_url).good()
    before, plan = left(tier_url), str(tmp_path / "plan")
    expire(tier_url, archive_url, "--plan", plan).good()
    refused = here("expire", tier_url, "--ttl", "1ms", "--apply", plan)
    assert (refused.code, "with another archive" in refused.err) == (2, True)
    file = files(archive_url)[-1]
    data = file.read_bytes()
    file.unlink()
    ran = expire(tier_url, archive_url, "--apply", plan)
    assert ran.code == 1
    assert "the archive does not hold" in ran.err
    assert left(tier_url) == before
    file.write_bytes(data)
    assert expire(tier_url, archive_url, "--apply", plan).good()
    assert left(tier_url) == {}


def test_both_options_or_none(tier_url: str) -> None:
    ran = here("expire", tier_url, "--ttl", "1ms", "--archived")
    assert (ran.code, "go together" in ran.err) == (2, True)


def proof(at: JobContext) -> ArchiveProof:
    return ArchiveProof(at.tier, at.place, at.archive, log_writer(at).state, "memory://archive")


def proved(tier: TierBuilder, at: JobContext, queue: Any = QUEUE) -> list[list[bool]]:
    """Of each segment of each incarnation, in order."""
    state, found = tier.journal.state, proof(at)
    return [
        [found.holds(state, queue, number, segment) for segment in incarnation.segments]
        for number, incarnation in enumerate(state.queues[queue])
    ]


def test_a_segment_that_is_archived_in_part_is_not() -> None:
    tier = TierBuilder()
    for body in (b"a", b"b", b"c", b"open"):
        tier.add([body], roll=True)
    at = job_context(tier.store)
    run_job(at, as_engine(lambda _do, _works: ()))
    assert proved(tier, at) == [[False] * 4]
    from tiered.upkeep.engine import local_engine

    run_job(at, local_engine(at.context, 1), limits=Limits(bytes_max=1))
    assert proved(tier, at) == [[True, False, False, False]]
    first, second = tier.journal.state.queues[QUEUE][0].segments[:2]
    joined = replace(first, parts=first.parts + second.parts)
    assert not proof(at).holds(tier.journal.state, QUEUE, 0, joined)
    archive(at)
    assert proved(tier, at) == [[True, True, True, False]]
    assert proof(at).holds(tier.journal.state, QUEUE, 0, joined)


def test_another_s_archive_proves_nothing() -> None:
    tier = TierBuilder()
    for body in (b"a", b"open"):
        tier.add([body], roll=True)
    at = job_context(tier.store)
    archive(at)
    other = replace(at, place=type(at.place)("c", "other"))
    found = ArchiveProof(at.tier, other.place, at.archive, log_writer(at).state, "x")
    segment = tier.journal.state.queues[QUEUE][0].segments[0]
    assert proof(at).holds(tier.journal.state, QUEUE, 0, segment)
    assert not found.holds(tier.journal.state, QUEUE, 0, segment)


def test_a_tier_of_the_same_name_with_other_times_is_another() -> None:
    tier = TierBuilder()
    tier.add([b"a", b"b", None], roll=True)
    tier.add([b"c"], roll=True)
    tier.add([b"open"], roll=True)
    at = job_context(tier.store)
    archive(at)
    state = tier.journal.state
    one, two = state.queues[QUEUE][0].segments[:2]
    joined = replace(one, parts=one.parts + two.parts)
    for segment in (one, two, joined):
        assert proof(at).holds(state, QUEUE, 0, segment)
        last = segment.parts[-1]
        for shift in (-1, 1, 1000):
            low, high = last.store_min_ms + shift, last.store_max_ms + shift
            late = replace(last, store_min_ms=low, store_max_ms=high)
            assert not proof(at).holds(state, QUEUE, 0, replace(segment, parts=Parts.of([late])))
        assert proof(at).holds(state, QUEUE, 0, replace(segment, parts=Parts.of([last])))
    empty = [replace(p, store_min_ms=-1, store_max_ms=-1) for p in one.parts]
    assert not proof(at).holds(state, QUEUE, 0, replace(one, parts=Parts.of(empty)))


def test_what_the_broker_truncated_proves_nothing_for_its_successor() -> None:
    tier = TierBuilder()
    tier.add([b"a"])
    tier.add([b"b", b"old c", b"old d"], roll=True)
    tier.add([b"old e"], roll=True)
    at = job_context(tier.store)
    archive(at)
    again = with_other_messages_behind(tier, b"new c", b"new d", b"open")
    found = proved(again, at)
    assert not any(flag for incarnation in found for flag in incarnation), (
        "same offsets, other messages"
    )
    archive(at)
    tail, present = proved(again, at)
    assert not any(tail)
    assert present == [True] * (len(present) - 1) + [False]


def test_an_object_of_another_version_proves_nothing() -> None:
    tier = TierBuilder()
    for body in (b"a", b"open"):
        tier.add([body], roll=True)
    at = job_context(tier.store)
    archive(at)
    segment = tier.journal.state.queues[QUEUE][0].segments[0]
    key = at.place.prefix + segment.parts[0].log.key
    data = tier.store.get(key)
    tier.store.delete(key)
    tier.store.put_if_absent(key, data + b"x")
    assert not proof(at).holds(tier.journal.state, QUEUE, 0, segment)
    assert "another version" in evidence_of(at, tier, segment)


def evidence_of(at: JobContext, tier: TierBuilder, segment: Any) -> str:
    found = proof(at)
    found.holds(tier.journal.state, QUEUE, 0, segment)
    (refusal,) = found.document()["refusals"]
    return str(refusal)
