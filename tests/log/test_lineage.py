"""What records tell of leaders and transactions: against a walk of one record after another."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.kafka_items import PARTITION, data, items_of, marker, transactional

from tiered.local.interface import HoleReason, LeaderEpoch, Lineage, OpenTransaction
from tiered.log.lineage import (
    after_grown,
    expired_to,
    found_in,
    grown,
    grown_to,
    hidden,
    moved,
    stable_end,
)
from tiered.log.parts import AbortedRange, Incarnation, LineageFacts
from tiered.model import QueueOffset


@dataclass(frozen=True)
class Step:
    """A batch: ``what`` is data, a transaction's, or its end."""

    what: str
    producer: int
    count: int
    epoch: int
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.count

    def raw(self) -> bytes:
        """Its bytes."""
        if self.what == "data":
            return data(self.offset, self.count, epoch=self.epoch)
        if self.what == "transaction":
            return transactional(self.offset, self.count, self.producer, epoch=self.epoch)
        return marker(self.offset, self.producer, aborts=self.what == "abort", epoch=self.epoch)


@st.composite
def logs(draw: st.DrawFn) -> list[Step]:
    """A log of a few producers, whose leaders change, from some offset on."""
    steps, offset, epoch = [], draw(st.integers(0, 3)), draw(st.integers(0, 2))
    whats = st.sampled_from(["data", "transaction", "transaction", "commit", "abort"])
    for _ in range(draw(st.integers(1, 25))):
        what = draw(whats)
        count = draw(st.integers(1, 4)) if what in {"data", "transaction"} else 1
        epoch += draw(st.sampled_from([0, 0, 0, 1, 3]))
        steps.append(Step(what, draw(st.integers(5, 7)), count, epoch, offset))
        offset += count
    return steps


def walked(steps: list[Step]) -> LineageFacts:
    """One step after another."""
    opened: dict[int, int] = {}
    epochs: list[LeaderEpoch] = []
    aborted: list[AbortedRange] = []
    for step in steps:
        if not epochs or epochs[-1].number != step.epoch:
            epochs.append(LeaderEpoch(step.epoch, step.offset))
        if step.what == "transaction":
            opened.setdefault(step.producer, step.offset)
        elif step.what != "data" and step.producer in opened:
            first = opened.pop(step.producer)
            if step.what == "abort":
                aborted.append(AbortedRange(step.producer, first, step.offset))
    some = tuple(OpenTransaction(*one) for one in sorted(opened.items()))
    return LineageFacts("id", tuple(epochs), some, is_sure=True, aborted=tuple(aborted))


def told(steps: list[Step], cuts: list[int]) -> LineageFacts:
    """As entries tell it whose commits end behind these steps."""
    facts = None
    for low, end in zip([0, *cuts], [*cuts, len(steps)], strict=True):
        if steps[low:end]:
            batches = [items_of([step.raw() for step in steps[low:end]])]
            said = grown(PARTITION, 0, batches, facts, None if facts else Lineage("id"))
            facts = grown_to(facts, said) if said else facts
    assert facts is not None
    return facts


@given(logs(), st.data())
def test_entries_tell_what_a_walk_finds(steps: list[Step], more: st.DataObject):
    cuts = sorted(more.draw(st.lists(st.integers(0, len(steps)), max_size=4)))
    assert told(steps, cuts) == walked(steps)


@given(logs())
def test_a_lost_journal_is_learned_again_from_the_records(steps: list[Step]):
    found = found_in(None, [items_of([step.raw()]) for step in steps])
    assert found == replace(walked(steps), topic_id="", is_sure=False)


@given(logs(), st.data())
def test_a_truncation_and_what_the_node_says_then_are_as_if_nothing_had_come(
    steps: list[Step], more: st.DataObject
):
    kept = more.draw(st.integers(1, len(steps)))
    after = walked(steps[:kept])
    facts = moved(walked(steps), steps[kept - 1].end)
    assert facts is not None
    assert not facts.is_sure
    assert (facts.epochs, facts.aborted) == (after.epochs, after.aborted)
    assert set(facts.opened) <= set(after.opened)  # one that was committed only the node knows
    raw = data(steps[kept - 1].end, epoch=99)
    said = grown(PARTITION, 0, [items_of([raw])], facts, Lineage("id", (), after.opened))
    assert said is not None
    assert said.opened == after.opened
    assert [one.number for one in said.epochs] == [99]


@given(logs(), st.data())
def test_what_expires_takes_along_what_speaks_of_it_alone(steps: list[Step], more: st.DataObject):
    low = more.draw(st.sampled_from([step.offset for step in steps]))
    facts = expired_to(walked(steps), low)
    assert facts is not None
    of_step = {step.offset: step for step in steps}
    at = [one for one in facts.epochs if one.start <= low]
    assert [one.number for one in at] == [of_step[low].epoch]
    every = walked(steps).aborted
    assert set(every) - set(facts.aborted) == {one for one in every if one.last < low}
    assert facts.opened == walked(steps).opened


@given(logs())
def test_readers_see_what_a_consumer_would(steps: list[Step]):
    facts = walked(steps)
    incarnation = Incarnation(
        0, QueueOffset(steps[0].offset), QueueOffset(steps[-1].end), lineage=facts
    )
    opened = [one.first for one in facts.opened]
    assert stable_end(incarnation) == min([steps[-1].end, *opened])
    batch = items_of([step.raw() for step in steps])
    for aborted in (None, facts.aborted):
        seen = hidden(batch, aborted)
        assert seen.data is batch.data
        for step in steps:
            is_gone = step.what in {"commit", "abort"} or any(
                step.what == "transaction"
                and (step.producer, True) == (one.producer, one.first <= step.offset < one.last)
                for one in aborted or ()
            )
            for offset in range(step.offset, step.end):
                number = offset - batch.base_offset
                assert (seen.sizes[number] == 0) == is_gone
                if is_gone:
                    assert seen.tag_codes[number] == HoleReason.HIDDEN


def test_the_topic_is_that_of_the_batches_and_not_of_the_moment_in_which_they_are_named():
    batch = items_of([data(0)])
    batch.topic_id = "old"
    said = grown(PARTITION, 0, [batch], None, Lineage("new"))
    assert said is not None
    assert said.topic_id == "old"
    later = grown(PARTITION, 0, [batch], grown_to(None, said), None)
    assert later is None or later.topic_id == "old"


def test_where_a_tier_begins_the_node_says_what_is_open():
    batch = items_of([marker(9, 5, aborts=True)])
    before = Lineage("id", (), (OpenTransaction(5, 3), OpenTransaction(6, 4)))
    said = grown(PARTITION, 0, [batch], None, before)
    assert said is not None
    assert said.aborted == (AbortedRange(5, 3, 9),)
    assert said.opened == (OpenTransaction(6, 4),)


def test_what_the_cleaner_has_left_the_node_nothing_of_stays_open_behind_a_truncation():
    facts = replace(walked([Step("transaction", 5, 2, 0, 0)]), is_sure=False)
    said = grown(PARTITION, 0, [items_of([marker(2, 5, aborts=True)])], facts, Lineage("id"))
    assert said is not None
    assert said.aborted == (AbortedRange(5, 0, 2),)


def test_what_may_have_ended_in_a_gap_is_not_called_open_by_a_rebuild():
    batches = [items_of([transactional(0, 1, 5)]), items_of([data(7)])]
    found = found_in(None, batches)
    assert found.opened == ()
    found = found_in(None, [*batches, items_of([marker(8, 5, aborts=True)])])
    assert found.aborted == (AbortedRange(5, 0, 8),)


def test_nothing_new_is_not_said_again():
    first = items_of([data(0, 2)])
    said = grown(PARTITION, 0, [first], None, Lineage("id"))
    assert said is not None
    incarnation = after_grown(Incarnation(0, QueueOffset(0), QueueOffset(2)), said)
    assert grown(PARTITION, 0, [items_of([data(2)])], incarnation.lineage, None) is None


@pytest.mark.parametrize("facts", [None, LineageFacts()])
def test_of_what_is_not_known_nothing_changes(facts: LineageFacts | None):
    assert moved(facts, 3) == (None if facts is None else replace(facts, is_sure=False))
    assert expired_to(facts, 3) == facts
