"""Readers of all policies at once, while messages come, are tiered and expire locally: each reads all, once, in order."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

from support.both_sides import QUEUE, BothSides

from fetcher.statuses import GetStatus as Is
from fetcher.statuses import Policy
from fetcher.transfers import Ticker
from tiered.clock import SystemClock

MESSAGES = 1500
POLICIES = (Policy.NOT_IN_DISK, Policy.NOT_IN_MEM, Policy.FORCE, Policy.FORCE)


def write(both: BothSides, rng: random.Random) -> None:
    """Messages come, are tiered, and expire in the local store."""
    while both.commit_offset < MESSAGES:
        if len(both.raws) < MESSAGES:
            both.append(min(rng.randrange(1, 60), MESSAGES - len(both.raws)))
        both.commit(min(both.commit_offset + rng.randrange(1, 80), both.end), roll=True)
        both.memory_from = rng.randrange(both.end)
        base = both.local.queues()[QUEUE].min
        both.expire(rng.randint(base, both.commit_offset))


def read(both: BothSides, policy: Policy, seed: int) -> dict[int, bytes]:
    """Everything, as one group."""
    rng = random.Random(seed)
    found: dict[int, bytes] = {}
    at = 0
    while at < MESSAGES:
        result = both.store.get_message(
            f"g{seed}", "t", 0, at, max_count=rng.randrange(1, 64), policy=policy
        )
        assert not result.missing, (policy, result)
        if result.status is not Is.FOUND:
            waits = {Is.OFFSET_OVERFLOW_ONE, Is.NO_MATCHED_LOGIC_QUEUE}
            assert result.status in waits, (policy, result)
            assert result.next_begin == at
            continue
        for offset, raw in result.messages():
            assert offset == at
            found[at] = bytes(raw)
            at += 1
        assert result.next_begin == at
    return found


def test_i1_i8_readers_of_all_policies_while_everything_moves():
    clock = SystemClock()
    with ThreadPoolExecutor(8) as requests, ThreadPoolExecutor(len(POLICIES)) as readers:
        both = BothSides(executor=requests, clock=clock)
        with Ticker(both.fetcher, clock):
            stop = threading.Event()
            reading = [readers.submit(read, both, one, n) for n, one in enumerate(POLICIES)]
            write(both, random.Random(7))
            found = [one.result(60) for one in reading]
            stop.set()
        both.fetcher.close()
    assert all(one == both.raws for one in found)
