"""Compaction beside damage: the pass ends before the damaged segment, and a repair brings back no value that was gone."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from support.broken import COUNT, SOUND, TOPIC, build
from support.command_line import here
from support.compacting import QUEUE, compact, messages
from support.journals import PREFIX
from support.keyed import KeyedTier, Mail

from tiered.compaction.passes import ROCKETMQ
from tiered.format.record import decode_record
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from pathlib import Path

    from tiered.log.parts import Part

OTHER = MessageQueue("t", 1)
Row = tuple[int, int, int, str, bytes]


def rows(tier: KeyedTier) -> list[Row]:
    """Store time, queue, offset, key and body of each message."""
    found = []
    for queue in (QUEUE, OTHER):
        for at, raw in messages(tier, queue):
            record = decode_record(raw, 0)
            key = record.properties.get("KEYS", "")
            found.append((record.store_timestamp_ms, queue.queue_id, at, key, bytes(record.body)))
    return sorted(found)


def latest(found: list[Row], *, across: bool) -> dict[tuple[int, str], bytes]:
    """What a consumer has of each key in the end; of one that was deleted nothing."""
    every = {((0 if across else row[1]), row[3]): row[4] for row in found}
    return {key: body for key, body in every.items() if body}


def flip(tier: KeyedTier, part: Part) -> bytes:
    """Flip a bit of a part's section."""
    key, at = PREFIX + part.bundle.key, part.section.start
    before = tier.store.get(key)
    tier.store.delete(key)
    tier.store.put_if_absent(key, before[:at] + bytes([before[at] ^ 1]) + before[at + 1 :])
    return before


def parts(tier: KeyedTier, queue: MessageQueue) -> list[Part]:
    """Of each sealed segment the first part."""
    incarnation = tier.journal.state.queues[queue][-1]
    return [one.parts[0] for one in incarnation.segments[:-1]]


def mend(tier: KeyedTier, part: Part, before: bytes) -> None:
    tier.store.delete(PREFIX + part.bundle.key)
    tier.store.put_if_absent(PREFIX + part.bundle.key, before)


def filled(rng: random.Random) -> KeyedTier:
    tier = KeyedTier()
    for queue in (QUEUE, OTHER):
        for _ in range(5):
            keys = [f"k{rng.randrange(6)}" for _ in range(8)]
            some = [
                Mail((key,), body=rng.choice([b"", b"v%d" % rng.randrange(99)])) for key in keys
            ]
            tier.post(queue, some, roll=True)
    return tier


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("seed", range(7))
def test_no_value_is_lost_beside_damage_and_none_comes_back_with_the_repair(
    seed: int, *, across: bool
) -> None:
    rng = random.Random(seed)
    tier = filled(rng)
    truth = latest(rows(tier), across=across)
    if rng.random() < 0.4:  # what is damaged then was compacted before
        compact(tier, retention=ROCKETMQ, across_queues=across)
    queue = rng.choice([QUEUE, OTHER])
    tier.post(queue, [Mail(("k1",), body=b"new")], roll=True)
    tier.post(queue, [Mail(("last",), body=b"x")], roll=True)
    truth = latest(rows(tier), across=across)
    number = rng.randrange(len(parts(tier, queue)))
    part = parts(tier, queue)[number]
    incarnation = tier.journal.state.queues[queue][-1]
    behind, bounds = incarnation.segments[number:], incarnation.segments[number].parts
    before = flip(tier, part)
    for _ in range(2):
        done = compact(tier, retention=ROCKETMQ, across_queues=across)
        (row,) = done["damaged"]
        assert MessageQueue(row["topic"], row["queue_id"]) == queue
        assert bounds[0].queue_offset <= row["start"] < row["end"] <= bounds[-1].queue_end
        assert tier.journal.state.queues[queue][-1].segments[number:] == behind, "as it was"
    mend(tier, part, before)
    assert latest(rows(tier), across=across) == truth
    done = compact(tier, retention=ROCKETMQ, across_queues=across)
    assert done["damaged"] == []
    assert latest(rows(tier), across=across) == truth


def test_what_lies_before_the_damage_and_in_other_queues_is_compacted() -> None:
    tier = KeyedTier()
    for queue in (QUEUE, OTHER):
        for body in (b"1", b"2", b"3", b"4"):
            tier.post(queue, [Mail(("a",), body=body), Mail(("a",), body=body * 2)], roll=True)
    part = parts(tier, QUEUE)[2]
    before = flip(tier, part)
    done = compact(tier)
    assert [(step["queue_id"], step["end"]) for step in done["steps"]] == [(0, 4), (1, 6)]
    ((row),) = done["damaged"]
    assert (row["queue_id"], row["segment"], row["start"], row["end"]) == (0, 4, 4, 6)
    mend(tier, part, before)
    assert [at for at, _ in messages(tier)] == [3, 4, 5, 6, 7]
    assert [at for at, _ in messages(tier, OTHER)] == [5, 6, 7]
    compact(tier)
    assert [at for at, _ in messages(tier)] == [5, 6, 7]


def test_what_is_gone_beside_damage_is_named_as_well() -> None:
    tier = KeyedTier()
    for queue in (QUEUE, OTHER):
        for body in (b"1", b"2", b"3"):
            tier.post(queue, [Mail(("a",), body=body), Mail(("a",), body=body * 2)], roll=True)
    flip(tier, parts(tier, QUEUE)[1])
    tier.store.delete(PREFIX + parts(tier, OTHER)[1].bundle.key)
    done = compact(tier)
    assert [(row["queue_id"], row["start"], row["end"]) for row in done["damaged"]] == [
        (0, 2, 4),
        (1, 2, 4),
    ]
    assert "is gone" in done["damaged"][1]["why"]
    assert [(step["queue_id"], step["end"]) for step in done["steps"]] == [(0, 2), (1, 2)]


def test_the_command_names_all_damage_and_ends_with_5_until_it_is_repaired(tmp_path: Path) -> None:
    tier = build(tmp_path)
    for flipped in ((0, 10), (0, 300), (1, 200)):
        tier.flip(*flipped)
    words = ("compact", tier.url, "--topic", TOPIC, "--topic", SOUND, "--dirty-ratio", "0")
    ran = here(*words, "--apply", "-", "--json")
    assert ran.code == 5
    assert {step["topic"] for step in ran.document["steps"]} == {SOUND}
    assert ran.document["applied"]["steps"] == 2
    assert {(row["topic"], row["queue_id"]) for row in ran.document["damaged"]} == {
        (TOPIC, 0),
        (TOPIC, 1),
    }
    assert f"{TOPIC}/0, {TOPIC}/1" in ran.err
    here("verify", tier.url, "--deep", "--store", tier.store, "--repair").good()
    done = here(*words, "--apply", "-", "--json").good().document
    assert {step["topic"] for step in done["steps"]} == {TOPIC}
    assert done["gone_messages"] == COUNT
