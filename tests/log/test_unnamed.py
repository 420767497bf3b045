"""What bundles hold that nobody names: told by the journal alone nearly always, and never wrongly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.merging import gather, merge, text
from support.tiers import TierBuilder, batch_of

from backends.wrapping import WrappingStore
from tiered.format.bundle import FOOTER_BYTES, read_table
from tiered.log.history import given_up
from tiered.log.merge import MergePolicy
from tiered.log.parts import queue_action
from tiered.log.state import TierMachine
from tiered.model import MessageQueue
from tiered.upkeep.gc import find_given_up

if TYPE_CHECKING:
    from backends.base import ByteRange

A, B, Z = MessageQueue("a", 0), MessageQueue("b", 0), MessageQueue("z", 0)


class Counting(WrappingStore):
    """Counts the bytes that are read."""

    read_bytes = 0

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        found = super().get(key, byte_range)
        self.read_bytes += len(found)
        return found


def give_up(
    builder: TierBuilder, queue: MessageQueue, incarnation: int = -1, to: int | None = None
):
    """Expire all of an incarnation, or up to an offset."""
    incarnations = builder.journal.state.queues[queue]
    at = range(len(incarnations))[incarnation]
    one = incarnations[at]
    end = one.commit_offset if to is None else to
    if one.min_offset < end:
        place = {"position": at, "min_from": one.min_offset, "min_to": end}
        builder.say(queue_action("expire", queue, one.number, **place))


def truth(builder: TierBuilder) -> dict[str, int]:
    """Of each named bundle with anything that is not: bytes of sections, or of items in them, by the bundle's own table."""
    named: dict[str, dict[int, int]] = {}
    for incarnations in builder.journal.state.queues.values():
        for incarnation in incarnations:
            for part in incarnation.parts():
                its = named.setdefault(part.bundle.key, {})
                its[part.section.start] = its.get(part.section.start, 0) + part.count
    found = {}
    for key, its in named.items():
        data = builder.store.get(builder.prefix + key)
        rows = read_table(data, len(data), where=key).rows
        size = sum(
            int(row["size_bytes"]) * (int(row["count"]) - its.get(int(row["start"]), 0))
            // int(row["count"])
            for row in rows
        )  # fmt: skip
        if size:
            found[key] = size
    return found


def looked(builder: TierBuilder) -> dict[str, int]:
    found = find_given_up(builder.store, builder.prefix, builder.journal.state)
    return {one.bundle.key: one.size_bytes for one in found}


def test_of_a_tier_of_which_nothing_was_given_up_nothing_is_read():
    store = Counting(TierBuilder().store)
    builder = TierBuilder(store)
    for number in range(12):
        builder.add_round(*(batch_of(number, [b"x"], queue=queue) for queue in (A, B, Z)))
    merge(builder, MergePolicy(fan_in=2))
    assert truth(builder) == {}
    store.read_bytes = 0
    assert list(given_up(builder.journal.state)) == []
    assert looked(builder) == {}
    assert store.read_bytes == 0


@pytest.mark.parametrize("queue", [A, B, Z])
def test_one_small_message_among_those_of_many_queues_is_seen_wherever_it_lies(
    queue: MessageQueue,
):
    builder = TierBuilder()
    many = [MessageQueue("m", number) for number in range(300)]
    order = sorted([A, B, Z, *many])
    (key,) = {p.bundle.key for p in builder.add_round(*(batch_of(0, [b""], queue=q) for q in order))}  # fmt: skip
    assert looked(builder) == {}
    give_up(builder, queue)
    found = looked(builder)
    assert found.keys() == truth(builder).keys() == {key}
    assert truth(builder)[key] <= found[key] < truth(builder)[key] + 400


def test_a_request_is_made_only_where_the_journal_does_not_tell_and_only_for_the_footer():
    builder = TierBuilder()
    builder.add_round(*(batch_of(0, [b"x"], queue=queue) for queue in (A, B, Z)))
    give_up(builder, Z)
    store = Counting(builder.store)
    (one,) = find_given_up(store, builder.prefix, builder.journal.state)
    assert one.is_sure
    assert store.read_bytes == FOOTER_BYTES
    assert one.size_bytes == truth(builder)[one.bundle.key]


def test_a_footer_that_is_damaged_proves_nothing_so_the_bundle_is_suspect():
    builder = TierBuilder()
    builder.add_round(*(batch_of(0, [b"x"], queue=queue) for queue in (A, B, Z)))
    give_up(builder, Z)
    (key,) = looked(builder)
    data = bytearray(builder.store.get(builder.prefix + key))
    data[-20] ^= 1
    builder.store.delete(builder.prefix + key)
    builder.store.put_if_absent(builder.prefix + key, bytes(data))
    assert looked(builder).keys() == {key}
    builder.store.delete(builder.prefix + key)
    assert looked(builder) == {}  # that it is gone is said by others


def test_what_was_truncated_whole_is_named_and_nothing_is_read_for_it():
    builder = TierBuilder()
    builder.add([b"abc"], queue=A)
    builder.add([b"wrong"], queue=A)
    builder.truncate(1, queue=A)
    assert list(given_up(builder.journal.state)) == []
    gather(builder, 1)
    assert list(given_up(builder.journal.state)) == []
    give_up(builder, A, incarnation=0)
    assert looked(builder).keys() == truth(builder).keys() != set()


def test_what_is_left_of_a_section_that_was_truncated_in_part():
    builder = TierBuilder()
    builder.add([b"abc", b"defg", b"hij"], queue=A)
    builder.truncate(1, queue=A)
    assert looked(builder) == {}  # both incarnations name it
    give_up(builder, A, incarnation=0)
    found = looked(builder)
    assert found.keys() == truth(builder).keys()
    assert min(found.values()) > 100


def test_of_compressed_and_sealed_bundles_of_the_last_level():
    builder = TierBuilder()
    for queue in (A, B, Z):
        builder.add([text(1, 300_000)], queue=queue)
    gather(builder)
    assert list(given_up(builder.journal.state)) == []
    again = TierMachine().load(TierMachine().dump(builder.journal.state))
    assert list(given_up(again)) == []
    give_up(builder, B)
    assert looked(builder).keys() == truth(builder).keys() != set()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["round", "round", "round", "merge", "back", "anew", "expire", "roll"]),
        st.sampled_from([A, B, Z]),
        st.integers(1, 4),
    ),
    max_size=14,
)


@settings(max_examples=80, deadline=None)
@given(STEPS)
def test_whatever_happens_it_is_what_the_tables_of_the_bundles_say(
    steps: list[tuple[str, MessageQueue, int]],
):
    builder = TierBuilder()
    for step, queue, count in steps:
        incarnation = builder.journal.state.incarnation(queue)
        if step in {"round", "roll"}:
            some = sorted({A, queue, *([B] if count > 2 else [])})
            batches = [
                batch_of(builder.file(one).append_offset, [b"m"] * count, queue=one) for one in some
            ]
            builder.add_round(*batches, roll=step == "roll")
        elif step == "merge":
            merge(builder, MergePolicy(fan_in=2))
        elif incarnation is None:
            continue
        elif step == "back" and incarnation.min_offset < incarnation.commit_offset:
            builder.truncate(
                max(incarnation.min_offset + 1, incarnation.commit_offset - count), queue=queue
            )
        elif step == "anew":
            builder.begin_anew(queue)
        elif step == "expire":
            incarnations = builder.journal.state.queues[queue]
            give_up(builder, queue, incarnation=count % len(incarnations) - len(incarnations))
            builder.forget(queue)
        sure = {one.bundle.key for one in given_up(builder.journal.state) if one.is_sure}
        assert sure <= truth(builder).keys() <= {one.bundle.key for one in given_up(builder.journal.state)}  # fmt: skip
        assert looked(builder).keys() == truth(builder).keys()
