"""A small world of a retry log: messages are sent back, time goes on, and process or store fail at every write in turn.

A model knows what was sent back and what was answered. At the end all that was answered has been given out again, at its
time and not before, or is a dead letter; none is lost, and none is there twice. Planted defects are found.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from backends.memory import MemoryStore
from backends.testing.faulty import WRITES, Fault, FaultyStore, Rule, SimulatedCrash
from tiered.api.broker_place import Place
from tiered.clock import ManualClock
from tiered.format.properties import join_properties
from tiered.format.record import Record, body_crc, record_bytes
from tiered.model import MessageQueue
from tiered.mount.protocol import RefusalError
from tiered.mount.retries import DELAYS_S, RetryLimits, RetryLog, RetryWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tiered.mount.retries import DueTogether, Sent

PREFIX, NOW_MS = "b/meta/mount/b/retry/", 1_700_000_000_000
RETRY, DEAD = MessageQueue("%RETRY%g", 0), MessageQueue("%DLQ%g", 0)
STEPS: tuple[tuple[int, tuple[int, ...]], ...] = (
    (0, (1, 1, 2)), (0, (-1, 1, 3)), (1, (1, 3)), (2, (3,)), (3, (2, -1)), (1, ()), (3, (1,)), (9, ()),
)  # fmt: skip
"""Seconds that pass, and the levels with which messages are sent back then."""
WRITES_MAX = 24


def record(name: str) -> Record:
    """A message as a consumer was given it."""
    body, raw = name.encode(), join_properties({"UNIQ_KEY": name})
    size = record_bytes(body=len(body), topic=1, props=len(raw), sys_flag=0, version=1)
    return Record(
        size, 1, body_crc(body), 0, 0, 0, 9, 0, NOW_MS, "10.0.0.1:5", NOW_MS, "10.0.0.2:6",
        0, 0, body, "t", raw,
    )  # fmt: skip


class OftenMerged(RetryWriter):
    """It merges bundles as soon as there are three."""

    merging = replace(RetryWriter.merging, fan_in=3)


class Waits:
    """What one mount does after the other with one log, and what must come of it."""

    def __init__(self, store: FaultyStore, log: type[RetryLog], writer: type[RetryWriter]) -> None:
        self.store, self.clock = store, ManualClock(NOW_MS)
        self.made = log, writer
        self.log = self.begun()
        self.sent: dict[str, tuple[int, int]] = {}
        """Of each message its level, and when it was sent back."""
        self.answered: set[str] = set()

    def begun(self) -> RetryLog:
        """A mount that takes the log over, as often as it takes."""
        while True:
            writer = self.made[1](
                self.store, self.store, PREFIX, self.clock, random.Random(1), place=Place("c", "b"),
                old_end=lambda _queue: 0,
            )  # fmt: skip
            log = self.made[0](writer, self.clock, RetryLimits(answer_s=30.0))
            try:
                log.begin()
            except SimulatedCrash:
                continue
            return log

    def step(self, seconds: float, levels: Sequence[int]) -> None:
        """Time goes on, what is due is given out, and messages are sent back."""
        self.clock.advance(seconds)
        try:
            asyncio.run(self._step(levels))
        except SimulatedCrash:
            self.log = self.begun()

    async def _step(self, levels: Sequence[int]) -> None:
        running = asyncio.ensure_future(self.log.run())
        some = [self._send(f"m{len(self.sent) + at}", level) for at, level in enumerate(levels)]
        sending = asyncio.gather(*some, self._quiet())
        await asyncio.wait([running, sending], return_when=asyncio.FIRST_COMPLETED)
        self.log.stop()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await running
        self.log._is_stopping = False

    async def _quiet(self) -> None:
        """Until nothing is due."""
        while self.log._take_due():  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.0005)

    async def _send(self, name: str, level: int) -> None:
        self.sent[name] = level, self.clock.now_ms()
        try:
            await self.log.send_back("g", record(name), level=level, max_times=16)
        except RefusalError:
            return
        self.answered.add(name)

    def check(self) -> None:
        """Hold what lies in the queues of the group against what is known."""
        there: Counter[str] = Counter()
        for queue, bounds in self.log.queues().items():
            offsets = []
            for one in self.log.writer.reader.records(queue, bounds.min, bounds.end):
                name = one.body.decode()
                level, sent_ms = self.sent[name]
                there[name] += 1
                offsets.append(one.queue_offset)
                assert queue == (DEAD if level < 0 else RETRY)
                wait_s = DELAYS_S[level - 1] if level > 0 else 0
                assert one.store_timestamp_ms >= sent_ms + 1000 * wait_s, f"{name} came too early"
            assert offsets == list(range(bounds.min, bounds.end))
        assert not self.answered - set(there), "answered, and lost"
        assert all(count == 1 for count in there.values()), "given out twice"
        assert self.log.pending == 0


def lived(
    *rules: Rule, log: type[RetryLog] = RetryLog, writer: type[RetryWriter] = OftenMerged
) -> Waits:
    """A world in which the store fails by rule, at its end."""
    world = Waits(FaultyStore(MemoryStore(), random.Random(3), *rules), log, writer)
    for seconds, levels in STEPS:
        world.step(seconds, levels)
    world.log = world.begun()
    world.step(60, ())
    world.check()
    return world


def test_all_that_was_sent_back_is_given_out_where_nothing_fails() -> None:
    world = lived()
    assert world.answered == set(world.sent)
    writes = sum(event.operation in WRITES for event in world.store.events)
    assert 10 < writes < WRITES_MAX


@pytest.mark.parametrize("fault", [Fault.CRASH_BEFORE, Fault.CRASH_AFTER])
@pytest.mark.parametrize("number", range(WRITES_MAX))
def test_a_crash_at_any_write_loses_nothing_and_doubles_nothing(number: int, fault: Fault) -> None:
    lived(Rule(fault, skip=number))


@pytest.mark.parametrize(
    "fault", [Fault.UNAVAILABLE, Fault.LOST_REQUEST, Fault.LOST_ANSWER, Fault.LATE, Fault.TWICE]
)
@pytest.mark.parametrize("number", range(0, WRITES_MAX, 3))
def test_a_write_that_fails_is_made_anew(number: int, fault: Fault) -> None:
    lived(Rule(fault, skip=number))


# -- planted defects ---------------------------------------------------------------------------------


class GivesUpFirst(OftenMerged):
    """What was delivered is given up in an entry of its own, before it is in the queue of its topic."""

    def commit(self, sent: Sequence[Sent], done: Sequence[DueTogether] = ()) -> list[Record]:
        if done:
            super().commit([], done)
        return super().commit(sent)


class GivesUpLater(OftenMerged):
    """The other way round."""

    def commit(self, sent: Sequence[Sent], done: Sequence[DueTogether] = ()) -> list[Record]:
        made = super().commit(sent)
        if done:
            super().commit([], done)
        return made


class AnswersAtOnce(RetryLog):
    """Who sends back is answered before it is durable."""

    async def put(self, sent: Sent) -> Record:
        self._kept = asyncio.ensure_future(super().put(sent))
        await asyncio.sleep(0)
        return sent[1]


class NamesNothing(OftenMerged):
    """What waits is not read after a crash."""

    def pending(self):  # type: ignore[no-untyped-def]
        return iter(())


class UnitesSegments(OftenMerged):
    """What merging makes of segments is one, whenever they are due."""

    merging = replace(OftenMerged.merging, segment_bytes_max=1 << 30)


DEFECTS: dict[str, Callable[[Rule], object]] = {
    "a retry lost in a hand-over": lambda rule: lived(rule, writer=GivesUpFirst),
    "a retry given out twice by a hand-over": lambda rule: lived(rule, writer=GivesUpLater),
    "a retry answered before it is durable": lambda rule: lived(rule, log=AnswersAtOnce),
    "a retry given out too early, since it was merged with another": lambda rule: lived(
        rule, writer=UnitesSegments
    ),
    "what waits is forgotten by a crash": lambda rule: lived(rule, writer=NamesNothing),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_found(defect: str) -> None:
    found = 0
    for number in range(0, WRITES_MAX, 2):
        try:
            DEFECTS[defect](Rule(Fault.CRASH_BEFORE, skip=number))
        except AssertionError:
            found += 1
    assert found
