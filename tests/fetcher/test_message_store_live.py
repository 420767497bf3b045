"""A store that a broker is writing, tiered meanwhile and losing its oldest files, read through the facade to its end."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from support import captures
from support.command_line import here
from support.growing import LOG_FILE_BYTES, Growing, first_ms

from fetcher.limits import FetchSettings
from fetcher.statuses import GetStatus as Is
from fetcher.statuses import Policy, Side
from tiered.api.local_and_tier import OpenMessageStore, open_message_store
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from pathlib import Path

NAME = "s05-crash"
STEPS = 2


class Reader:
    """One group in all queues, by one policy."""

    def __init__(self, store: OpenMessageStore, policy: Policy) -> None:
        self.store = store
        self.policy = policy
        self.at: dict[MessageQueue, int] = {}
        self.found: dict[MessageQueue, dict[int, bytes]] = {}
        self.sides: set[Side] = set()

    def read(self, queue: MessageQueue, reads_max: int) -> None:
        """Go on in a queue, to its end at most."""
        found = self.found.setdefault(queue, {})
        for _ in range(reads_max):
            at = self.at.setdefault(queue, 0)
            result = self.store.get_message(
                self.policy.name, queue.topic, queue.queue_id, at, policy=self.policy
            )
            assert not result.missing, (self.policy, result)
            if result.status is not Is.FOUND:
                waits = {Is.OFFSET_OVERFLOW_ONE, Is.NO_MATCHED_LOGIC_QUEUE, Is.NO_MESSAGE_IN_QUEUE}
                assert result.status in waits, (self.policy, result)
                assert result.next_begin == at
                return
            for offset, raw in result.messages():
                assert offset >= at
                assert offset not in found
                found[offset] = bytes(raw)
            self.at[queue] = result.next_begin
            self.sides |= {chunk.side for chunk in result.chunks}


@pytest.mark.timeout(60)
def test_i1_i10_a_live_store_is_read_whole_while_it_grows_and_expires(tmp_path: Path):
    whole = captures.unpack(NAME, tmp_path / "whole")
    log, dump = captures.LocalLog(whole), captures.captured(NAME)
    (tmp_path / "store").mkdir()
    growing, url = Growing(whole, tmp_path / "store"), f"file://{tmp_path}/tier"
    growing.start(first_ms(NAME) - 1000)
    try:
        steps = [growing.whole_end * n // STEPS for n in range(1, STEPS + 1)]
        growing.grow(steps[0])
        here("attach", growing.store, "--to", url, "--once")
        fetch = FetchSettings(cache_bytes=16 << 20)
        with open_message_store(growing.store, url, fetch=fetch, refresh_s=0.2) as store:
            readers = [Reader(store, p) for p in Policy if p is not Policy.DISABLE]
            queues = list(dump.bounds)
            for reads, (last, step) in enumerate(itertools.pairwise([*steps, steps[-1]])):
                for reader, queue in itertools.product(readers, queues):
                    reader.read(queue, 3 + (reads << 20))
                here("attach", growing.store, "--to", url, "--once")
                growing.expire(last - LOG_FILE_BYTES // 2)
                growing.grow(step)
            for reader, queue in itertools.product(readers, queues):
                reader.read(queue, 1 << 20)
    finally:
        growing.crash()
    wanted: dict[MessageQueue, dict[int, bytes]] = {queue: {} for queue in queues}
    for message in itertools.chain.from_iterable(dump.messages.values()):
        place = MessageQueue(message["topic"], message["queue_id"])
        wanted[place][message["queue_offset"]] = log.record(message)
    for reader in readers:
        assert reader.found == wanted, reader.policy
    assert readers[0].sides == set(Side)
