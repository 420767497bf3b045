"""What expired of a queue before the tier met it is on record, where the tier was attached before; else it is not a loss."""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING

import pytest
from support.dispatching import FAST, read_back
from support.synthetic import SyntheticStore

from backends.memory import MemoryStore
from backends.wrapping import MeteredStore
from tiered.api.broker_place import Place
from tiered.attach.writer import Attachment, AttachSettings
from tiered.clock import SystemClock
from tiered.dispatch.dispatcher import NEVER_MET
from tiered.log.reader import TierReader
from tiered.log.verify import verify_tier
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered.log.parts import Incarnation

PLACE = Place("c", "b")
OLD, NEW = MessageQueue("old", 0), MessageQueue("new", 0)


class Attaching:
    """A store that is attached now and then."""

    def __init__(self) -> None:
        self.store, self.local, self.runs = MemoryStore(), SyntheticStore(), 0

    def open(self, **settings: object) -> Attachment:
        self.runs += 1
        made = Attachment(
            local=self.local,
            meter=MeteredStore(self.store),
            place=PLACE,
            settings=AttachSettings(dispatch=FAST, **settings),  # type: ignore[arg-type]
            clock=SystemClock(),
            rng=random.Random(self.runs),
            announce=lambda _state: None,
        )
        made._begin()
        return made

    def attach(self, **settings: object) -> Attachment:
        """Until all is tiered."""
        made = self.open(**settings)
        try:
            assert made.run(once=True).is_complete
        finally:
            made.close()
        return made

    def append(self, queue: MessageQueue, count: int, *, keep: int | None = None) -> None:
        """Store messages; with ``keep`` retention leaves the last so many."""
        for number in range(count):
            self.local.append(queue.topic, queue.queue_id, b"message %d" % number)
        if keep is not None:
            end = self.local.queues()[queue].end
            self.local.expire(queue.topic, queue.queue_id, end - keep)

    def incarnation(self, queue: MessageQueue) -> Incarnation:
        reader = TierReader(self.store, PLACE.prefix)
        reader.refresh()
        incarnation = reader.state.incarnation(queue)
        assert incarnation
        return incarnation

    def gaps(self, queue: MessageQueue) -> list[tuple[int, int, str]]:
        return [(gap.start, gap.end, gap.reason) for gap in self.incarnation(queue).gaps]


@pytest.fixture
def attaching() -> Iterator[Attaching]:
    made = Attaching()
    yield made
    assert verify_tier(made.store, PLACE.prefix, deep=True, local=made.local).is_clean


@pytest.mark.parametrize("keep", [0, 1, 4])
def test_made_and_expired_while_nothing_was_attached(attaching: Attaching, keep: int):
    attaching.append(OLD, 3)
    attaching.attach()
    attaching.append(NEW, 9, keep=keep)
    second = attaching.attach()
    assert attaching.gaps(NEW) == [(0, 9 - keep, NEVER_MET)]
    assert second.dispatcher
    assert second.dispatcher.counters.gaps == 1
    assert attaching.incarnation(NEW).min_offset == 9 - keep
    assert attaching.gaps(OLD) == []
    attaching.append(NEW, 2)
    attaching.attach()
    assert attaching.gaps(NEW) == [(0, 9 - keep, NEVER_MET)]
    found = read_back(attaching.store, NEW, prefix=PLACE.prefix)[0]
    assert [*found] == [*range(9 - keep, 11)]


@pytest.mark.parametrize("keep", [0, 4])
def test_what_had_expired_before_the_first_attach_is_no_loss_and_said(
    attaching: Attaching, keep: int, caplog: pytest.LogCaptureFixture
):
    attaching.append(OLD, 9, keep=keep)
    with caplog.at_level(logging.INFO, "tiered.dispatch"):
        attaching.attach()
    assert "new queues that begin above 0" in caplog.text
    for _ in range(2):
        assert attaching.gaps(OLD) == []
        assert attaching.incarnation(OLD).min_offset == 9 - keep
        attaching.attach()


def test_a_first_attach_that_ended_at_once_has_met_its_queues(attaching: Attaching):
    attaching.append(OLD, 9, keep=4)
    first = attaching.open()
    dispatcher = first.dispatcher
    assert dispatcher
    dispatcher.follow(lambda: True)
    first.close()
    attaching.local.expire("old", 0, 7)
    attaching.attach()
    assert [gap[:2] for gap in attaching.gaps(OLD)] == [(5, 7)]


def test_a_queue_that_comes_and_expires_during_the_first_attach(attaching: Attaching):
    first = attaching.open()
    attaching.append(NEW, 9, keep=4)
    first.run(once=True)
    first.close()
    assert attaching.gaps(NEW) == [(0, 5, NEVER_MET)]


def test_a_topic_that_is_selected_later_may_have_lost_messages_and_the_reason_says_so(
    attaching: Attaching,
):
    attaching.append(OLD, 3)
    attaching.append(NEW, 9, keep=4)
    attaching.attach(selects=lambda topic: topic == "old")
    attaching.attach()
    assert attaching.gaps(NEW) == [(0, 5, NEVER_MET)]
    assert "its topic was not selected" in NEVER_MET


def test_a_topic_made_anew_whose_first_messages_have_expired(attaching: Attaching):
    attaching.append(OLD, 9)
    attaching.attach()
    attaching.local.delete("old", 0)
    attaching.append(OLD, 6, keep=2)
    attaching.attach()
    assert attaching.incarnation(OLD).number == 1
    assert attaching.gaps(OLD) == [(0, 4, NEVER_MET)]


@pytest.mark.parametrize(("start", "gaps"), [("latest", []), (1_700_000_000_010, [])])
def test_what_is_not_wanted_is_no_loss(
    attaching: Attaching, start: str | int, gaps: list[tuple[int, int, str]]
):
    attaching.append(OLD, 3)
    attaching.attach()
    attaching.append(NEW, 20, keep=18)
    attaching.attach(start=start)
    assert attaching.gaps(NEW) == gaps


def test_the_first_message_that_is_left_is_wanted_by_its_time_so_one_before_it_may_have_been(
    attaching: Attaching,
):
    attaching.attach()
    attaching.append(NEW, 9, keep=4)
    attaching.attach(start=1_600_000_000_000)
    assert attaching.gaps(NEW) == [(0, 5, NEVER_MET)]
