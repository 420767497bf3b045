"""Restoring a damaged tier: refused with all of the damage named, or with what is sound, and holes that are told."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import pytest
from support.broken import COUNT, TOPIC, Broken, build
from support.command_line import Ran, here

from tiered.api.tier import open_tier
from tiered.clock import SystemClock
from tiered.mount.restore import Restore, RestoreSelection, building, plan_restore
from tiered.store.store_options import StoreOptions

if TYPE_CHECKING:
    from pathlib import Path

FLIPS = [(0, 0), (0, 200), (1, 10), (1, COUNT - 1)]
"""Queue and offset of messages in damaged blocks: the first, the last, and some between."""
SMALL = ("--log-file-size", "256KiB", "--queue-items", "100")


@pytest.fixture
def broken(tmp_path: Path) -> Broken:
    made = build(tmp_path)
    for queue_id, offset in FLIPS:
        made.flip(queue_id, offset)
    return made


def restore(broken: Broken, to: Path, *options: str) -> Ran:
    return here("restore", broken.url, "--to", to, *SMALL, *options, "--json")


def bodies(store: Path, folder: Path) -> dict[tuple[str, int, int], bytes]:
    """What a tier of the store has."""
    url = f"file://{folder}/again"
    here("attach", store, "--to", url, "--once")
    found = {}
    for topic in (TOPIC, "payments"):
        for row in here("cat", url, topic).good().rows:
            place = row["topic"], row["queue_id"], row["queue_offset"]
            found[place] = base64.b64decode(row["body_base64"])
    return found


def lost_of(rows: list[Any]) -> set[tuple[str, int, int]]:
    return {
        (row["topic"], row["queue_id"], at)
        for row in rows
        for at in range(row["start"], row["end"])
    }


def test_all_damage_is_named_and_the_same_command_goes_on_when_it_is_mended(
    broken: Broken, tmp_path: Path
) -> None:
    to = tmp_path / "restored"
    ran = restore(broken, to)
    assert ran.code == 5
    for queue_id, _ in FLIPS:
        assert f"{TOPIC}/{queue_id} [" in ran.error
    assert ran.error.count(f"{TOPIC}/") == len(FLIPS)
    assert "payments" not in ran.error
    assert "--accept-damage" in ran.error
    assert not to.exists()
    here("verify", broken.url, "--deep", "--store", broken.store, "--repair").good()
    document = restore(broken, to).good().document
    assert (document["filled_offsets"], document["damaged_messages"]) == (0, 0)
    assert bodies(to, tmp_path) == broken.bodies


def test_what_is_sound_is_restored_where_that_is_asked_for(broken: Broken, tmp_path: Path) -> None:
    to = tmp_path / "restored"
    ran = restore(broken, to, "--accept-damage")
    assert ran.code == 1
    lost = lost_of(ran.document["damaged"])
    assert {(TOPIC, *flip) for flip in FLIPS} <= lost
    assert len(lost) == ran.document["damaged_messages"] < len(FLIPS) * 60
    found = bodies(to, tmp_path)
    assert found == {place: body for place, body in broken.bodies.items() if place not in lost}
    ends = here("store", "info", to, "--json").good().document
    assert {row["end"] for row in ends["queues"]} == {COUNT}
    for queue_id in (0, 1):  # a broker goes on behind the holes, too
        line = json.dumps({"topic": TOPIC, "queue_id": queue_id, "body_base64": "eA=="})
        (tmp_path / "line").write_text(line + "\n")
        here("store", "put", to, tmp_path / "line").good()
    ends = here("store", "info", to, "--json").good().document
    assert [row["end"] for row in ends["queues"] if row["topic"] == TOPIC] == [COUNT + 1] * 2


def test_what_is_lost_is_told_whole_however_often_it_was_stopped(
    broken: Broken, tmp_path: Path
) -> None:
    to, told, runs = tmp_path / "restored", None, 0
    while told is None:
        runs += 1
        with open_tier(broken.url) as tier:
            steps = iter([False, False, True])
            made = Restore(
                tier,
                plan_restore(tier, RestoreSelection()),
                str(to),
                StoreOptions(256 << 10, 100),
                SystemClock(),
                memory_bytes=1,
                stop=lambda: next(steps),  # noqa: B023 (used up before the next round)
                accepts_damage=True,
            )
            result = made.run()
            told = result.lost if result.is_complete else None
    assert runs > 2
    assert len({one[:3] for one in told}) == len(told)
    lost = {(*one.queue, at) for one in told for at in range(one.start, one.end)}
    found = bodies(to, tmp_path)
    assert found == {place: body for place, body in broken.bodies.items() if place not in lost}
    assert {(TOPIC, *flip) for flip in FLIPS} <= lost


def test_one_that_was_begun_without_is_not_gone_on_with(broken: Broken, tmp_path: Path) -> None:
    to = tmp_path / "restored"
    assert restore(broken, to).code == 5
    assert building(str(to)).exists()
    ran = restore(broken, to, "--accept-damage")
    assert ran.code == 2
    assert "a restore of something else" in ran.error
