"""Readers that hold an old state and meet what was deleted: the rest, or "expired"; never other bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.aged import GRACE_S, Tier, merge_all, offsets, old_reader
from support.journals import PREFIX
from support.tiers import QUEUE, TIME_MS

from tiered.errors import DataError, ExpiredError, InvalidError
from tiered.model import QueueOffset
from tiered.upkeep.expire import apply_steps, plan_expire

if TYPE_CHECKING:
    from tiered.log.reader import QueueReader


def delete_all_that_may_go(tier: Tier) -> int:
    tier.clock.advance(GRACE_S + 1)
    return int(tier.apply(tier.plan(0))["deleted"])


def expiring() -> tuple[Tier, QueueReader]:
    """A reader of [0, 6), of which [0, 4) has expired and is deleted."""
    tier = Tier()
    for roll in (False, True, True):
        tier.builder.add([b"a", b"b"], roll=roll)
    reader = old_reader(tier)
    tier.clock.advance(60)
    apply_steps(tier.at, plan_expire(tier.at, lambda _: 0, objects_max=99))
    assert delete_all_that_may_go(tier) >= 2
    return tier, reader


def test_what_has_expired_is_said_to_have_and_the_rest_can_be_read():
    _, reader = expiring()
    with pytest.raises(ExpiredError, match=r"offsets 1 to 4 .* have expired") as caught:
        reader.read(QueueOffset(1))
    assert isinstance(caught.value, InvalidError)
    assert offsets(reader, caught.value.next_offset) == [4, 5]
    assert reader.incarnation.min_offset == 0  # nothing had to be read anew for that


def test_what_was_not_touched_is_read_without_a_replay():
    tier, reader = expiring()
    for info in list(tier.store.list(PREFIX + "journal/")):
        tier.store.delete(info.key)
    assert offsets(reader, 4) == [4, 5]


def test_a_search_by_time_goes_on_in_what_is_left():
    _, reader = expiring()
    assert reader.offset_by_time(0) == 0  # of the state that was seen, without a look at any object
    assert reader.offset_by_time(TIME_MS + 1) == 4
    assert reader.incarnation.min_offset == 4


def test_a_reader_goes_on_in_the_merged_parts():
    tier = Tier()
    for body in (b"a", b"b", b"c"):
        tier.builder.add([body])
    tier.builder.add([b"d"], roll=True)
    reader = old_reader(tier)
    merge_all(tier)
    assert delete_all_that_may_go(tier) >= 4
    assert offsets(reader, 0) == [0, 1, 2, 3]
    batch = old_reader(tier).read(QueueOffset(0))
    assert bytes(reader.read(QueueOffset(0)).records.data) == bytes(batch.records.data)  # type: ignore[union-attr]


def test_an_object_that_is_named_still_and_gone_is_damage():
    tier = Tier()
    part = tier.builder.add([b"a"])
    reader = old_reader(tier)
    tier.store.delete(PREFIX + part.bundle.key)
    with pytest.raises(DataError, match="is gone"):
        reader.read(QueueOffset(0))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_i1_i11_every_read_gives_the_right_bytes_or_says_expired(data: st.DataObject):
    tier = Tier()
    bodies = [b"body %d" % n for n in range(8)]
    for body in bodies:
        tier.builder.add([body], roll=data.draw(st.booleans()))
    reader = old_reader(tier)
    for step in data.draw(
        st.lists(st.sampled_from(["expire", "merge", "gc", "restart"]), max_size=6)
    ):
        if step == "expire":
            tier.clock.advance(60)
            apply_steps(tier.at, plan_expire(tier.at, lambda _: 0, objects_max=3))
            tier.builder.journal.catch_up()
        elif step == "merge":
            merge_all(tier)
        elif step == "restart":
            tier.restart()
        else:
            plan = tier.plan(0)
            tier.apply(plan)
            if plan.takes_epoch:
                tier.restart()
    low = tier.builder.journal.state.incarnation(QUEUE).min_offset  # type: ignore[union-attr]
    for start in data.draw(st.permutations(range(8))):
        try:
            batch = reader.read(QueueOffset(start))
        except ExpiredError as error:
            expired = start < error.next_offset <= low
        else:
            first = batch.records.base_offset  # type: ignore[union-attr]
            assert first == max(start, reader.incarnation.min_offset)
            assert bodies[first] in bytes(batch.records.data)  # type: ignore[union-attr]
            continue
        assert expired
