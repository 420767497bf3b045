"""Damaged stores, as Java's own recovery reads them: the same end of the log, and nothing that it serves is missing."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support import following, oracle

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.java, oracle.needs_java]
NAMES = ("s05b-torn", "s08-crash-continue", "s01-basic", "s11-lmq-batchcq", "s05-crash")
FEW, MANY = 4, 40


def strike(store: Path, dice: random.Random) -> None:
    """Damage what a start looks at: the newest log files, the ends of consume queues, the checkpoint."""
    abort = store / "abort"
    if dice.random() < 0.5:
        abort.write_text("1")
    if dice.random() < 0.3:
        (store / "checkpoint").write_bytes(bytes(4096))
    for _ in range(dice.randrange(4)):
        kind = dice.choice(["flip", "zero", "remove", "page", "queue"])
        logs = sorted((store / "commitlog").iterdir())
        queues = sorted(store.glob("consumequeue/*/*/*"))
        if kind == "remove" and len(logs) > 1:
            logs[-1].unlink()
        elif kind in {"flip", "zero"}:
            file = dice.choice(logs[-3:])
            data = bytearray(file.read_bytes())
            at = dice.randrange(len(data))
            if kind == "flip":
                data[at] ^= 1 << dice.randrange(8)
            else:
                at = at // 4096 * 4096
                data[at:] = bytes(len(data) - at)
            file.write_bytes(data)
        elif kind == "page" and queues:
            max(dice.choice(queues).parent.iterdir()).unlink()
        elif kind == "queue" and queues:
            shutil.rmtree(dice.choice(queues).parent)


def seeds() -> list[object]:
    return [
        pytest.param(seed, marks=() if seed < FEW else (pytest.mark.slow,)) for seed in range(MANY)
    ]


@pytest.mark.parametrize("seed", seeds())
def test_java_agrees(seed: int, tmp_path: Path):
    dice = random.Random(seed)
    directory = following.unpack(dice.choice(NAMES), tmp_path)
    strike(directory, dice)
    java = following.read_dump(oracle.dump(directory, may_break_off=True))
    store = following.open_store(directory)
    taken = following.follow_all(store, 100_000)
    following.check_complete(store, taken)
    assert store.report().log_end == java.store["max_physical_offset"]
    wrong_codes = 0
    for queue, messages in java.messages.items():
        for offset, message in messages.items():
            # Java serves records without looking at their CRC, and looks for missing entries in ten files only.
            hole = taken.holes.get(queue, {}).get(offset)
            if hole is None and (mine := taken.messages[queue][offset]) != message:
                # Bits of its tags were flipped: Java serves what the entry says, here it is what the record says.
                wrong_codes += 1
                assert replace(mine, tag_code=message.tag_code) == message
    assert wrong_codes <= store.report().wrong_tag_codes
    store.close()
