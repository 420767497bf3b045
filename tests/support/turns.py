"""Turns in which a real broker and a store of ours write into one directory; ours runs in processes that are killed."""

from __future__ import annotations

import os
import random
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING

from support.embedded import create, reopen
from support.oracle import SMALL

from tiered.store.new_message import NewMessage
from tiered.store.store_options import Flush, StoreOptions

if TYPE_CHECKING:
    from pathlib import Path


TOPIC, QUEUES = "orders", 4


OPTIONS = StoreOptions(
    SMALL["mappedFileSizeCommitLog"],
    SMALL["mappedFileSizeConsumeQueue"] // 20,
    index_slots=1000,
    index_items=4000,
    flush=Flush.SYNC,
)


def messages(turn: int) -> list[NewMessage]:
    """Of many kinds, others in each turn."""
    rng = random.Random(turn)
    kinds = (
        {},
        {"tags": "paid"},
        {"tags": "täg-✓", "keys": f"t{turn} all"},
        {"properties": {"näme": "välue 🚀", **{f"p{at}": "x" * at for at in range(1, 40)}}},
        {"flag": -7, "born_timestamp_ms": 12, "reconsume_times": 3},
        {"born_host": "[2001:db8:0:0:0:0:0:1]:40000"},
        {"body": b""},
        {"body": zlib.compress(b"squeezed" * 500), "sys_flag": 0x301},
        {"properties": {"UNIQ_KEY": f"OWN{turn}", "WAIT": "false"}, "keys": f"u{turn}"},
    )
    return [
        NewMessage(
            TOPIC,
            at % QUEUES,
            **{"body": rng.randbytes(rng.randrange(1500)), "keys": f"k{turn}-{at}", **kind},
        )
        for at in range(40)
        for kind in kinds
    ]


def write(root: Path, host: str, turn: int, ending: str) -> None:
    """One turn of ours, in a process that is to be killed or in this one. ``host``: where the broker will answer."""
    options = replace(OPTIONS, store_host=host)
    store = create(root, options) if turn == 0 else reopen(root, options)
    given = messages(turn)
    for start in range(0, len(given), 30):
        store.append_batch(given[start : start + 30])
    assert store.wait_listed()
    if ending == "kill":
        os.kill(os.getpid(), 9)
    store.close()
