"""Damage in a segment costs an archive what lies in the damaged block; a repair brings it in, and nothing is there twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.archive_jobs import bodies, check, job_context, rows
from support.broken import COUNT as MESSAGES
from support.broken import SOUND, TOPIC, build
from support.command_line import here
from support.tiers import QUEUE, TierBuilder

from tiered.archive.archive_proof import ArchiveProof
from tiered.archive.job import first_error, log_writer, run_job
from tiered.cli.archive import result_document
from tiered.errors import DataError
from tiered.format.message_forms import InnerMessage, encode_inner_messages
from tiered.upkeep.engine import local_engine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from backends.base import ObjectStore
    from tiered.archive.job import JobContext, Result
    from tiered.log.parts import Part

COUNT = 300
BODY = 1000
"""So that a segment's records have several blocks, and its items one."""


def flipped(*at: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        changed = bytearray(data)
        for position in at:
            changed[position] ^= 1
        return bytes(changed)

    return change


CHANGES: dict[str, Callable[[bytes], bytes | None]] = {
    "the first block": flipped(10),
    "a block in the middle": flipped(150_000),
    "several blocks": flipped(10, 150_000, 250_000),
    "items": lambda data: flipped(data.rindex(b"\0\0\0\0\0\0\0\x61"))(data),
    "cut short": lambda data: data[: len(data) // 2],
    "gone": lambda _: None,
}


def built() -> TierBuilder:
    """A sealed segment of three parts with a hole each, another one, and what is open; a second queue."""
    tier = TierBuilder()
    for number in range(4):
        tier.add([b"%d" % number * BODY] * COUNT + [None], roll=number in {0, 3})
    tier.add([b"open"], roll=True)
    return tier


def parts(tier: TierBuilder) -> list[Part]:
    return [part for one in tier.journal.state.queues[QUEUE][0].segments for part in one.parts]


def harmed(store: ObjectStore, key: str, change: Callable[[bytes], bytes | None]) -> bytes:
    before = store.get(key)
    store.delete(key)
    if (after := change(before)) is not None:
        store.put_if_absent(key, after)
    return before


def run(at: JobContext, small_bytes: int = 0) -> Result:
    return run_job(at, local_engine(at.context, 2), small_bytes=small_bytes)


@pytest.mark.parametrize("small_bytes", [0, 1 << 30], ids=["own files", "shared files"])
@pytest.mark.parametrize("change", CHANGES)
def test_damage_costs_its_block_until_it_is_repaired(change: str, small_bytes: int) -> None:
    tier = built()
    whole = job_context(tier.store)
    run(whole)
    expected = bodies(whole)
    key = tier.prefix + parts(tier)[1].bundle.key
    before = harmed(tier.store, key, CHANGES[change])
    at = job_context(tier.store)
    result = run(at, small_bytes)
    found = bodies(at)
    assert found.items() <= expected.items()
    assert len(rows(at)) == len(found)
    lost = set(expected) - set(found)
    low, high = COUNT + 1, 2 * COUNT + 1
    assert lost
    assert lost <= set(range(low, high))
    if change in {"the first block", "a block in the middle"}:
        assert len(lost) <= 2 + (64 * 1024) // BODY
    told = {at for one, _ in result.failed for at in range(one.start, one.end)}
    assert lost <= told <= lost | {high}, "each is named, and nothing else but the part's own hole"
    for _, error in result.failed:
        assert isinstance(error, DataError)
        assert "--repair" in error.do
    assert isinstance(first_error(result), DataError)
    assert result_document(at, result, sealed=0)["damaged_messages"] == len(told)
    again = run(at, small_bytes)
    assert ({one.start for one, _ in again.failed}, bodies(at)) == (
        {one.start for one, _ in result.failed},
        found,
    )
    if change == "gone":
        tier.store.put_if_absent(key, before)
    else:
        harmed(tier.store, key, lambda _: before)
    rest = run(at, small_bytes)
    assert rest.failed == []
    assert bodies(at) == expected
    assert len(rows(at)) == len(expected)
    check(at)
    assert run(at).plan.strange == ()


def test_what_waits_for_a_repair_proves_nothing_to_expire() -> None:
    tier = built()
    key = tier.prefix + parts(tier)[1].bundle.key
    before = harmed(tier.store, key, CHANGES["a block in the middle"])
    at = job_context(tier.store)
    run(at)

    def proved() -> list[bool]:
        proof = ArchiveProof(tier.store, at.place, at.archive, log_writer(at).state, "a")
        state = tier.journal.state
        return [proof.holds(state, QUEUE, 0, one) for one in state.queues[QUEUE][0].segments[:2]]

    assert proved() == [False, True]
    harmed(tier.store, key, lambda _: before)
    run(at)
    assert proved() == [True, True]


def test_damage_within_the_items_of_an_inner_batch_divides_it() -> None:
    """Items of a batch lie in two blocks: those in the sound one are rows now, the others once it is mended."""
    tier = TierBuilder()
    batch = encode_inner_messages([InnerMessage(0, b"%d" % n, b"") for n in range(20)])
    tier.add([b"x"] * 3270 + [(20, batch)] + [b"y"] * 10)
    tier.add([b"open"], roll=True)
    whole = job_context(tier.store)
    run(whole)
    part = parts(tier)[0]
    end = part.section.start + part.section.items_at + 3276 * 20
    key = tier.prefix + part.bundle.key
    before = harmed(tier.store, key, flipped(end + 30))
    at = job_context(tier.store)
    run(at)
    assert sorted(bodies(at)) == list(range(3276))
    harmed(tier.store, key, lambda _: before)
    run(at)
    assert bodies(at) == bodies(whole)
    assert len(rows(at)) == len(rows(whole)) == 3300
    check(at)


def test_the_command_names_what_waits_and_ends_with_5_until_it_is_repaired(tmp_path: Path) -> None:
    tier = build(tmp_path)
    tier.flip(0, 200)
    tier.flip(1, 10)
    words = ("archive", tier.url, "--to", f"file://{tmp_path}/parquet")
    ran = here(*words, "--json")
    assert ran.code == 5
    waiting = ran.document["damaged_messages"]
    assert ran.document["rows"] == 4 * MESSAGES - waiting
    assert 0 < waiting < 120
    assert {
        (row["queue"].rpartition(" ")[2], row["start"] > 0) for row in ran.document["failed"]
    } == {
        (f"{TOPIC}/0", True),
        (f"{TOPIC}/1", False),
    }
    assert f"{waiting} messages in 2 ranges not archived" in ran.err
    assert SOUND not in ran.err
    mended = ("verify", tier.url, "--deep", "--store", tier.store, "--repair")
    here(*mended).good()
    assert here(*words, "--json").good().document["rows"] == waiting
    here("archive", tier.url, "--to", f"file://{tmp_path}/parquet", "--verify").good()
