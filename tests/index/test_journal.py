"""What index actions do to a state; and what verify, expire and gc do with index objects."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from support.journals import PREFIX
from support.keyed import KeyedTier, Mail
from support.tiers import TIME_MS

from backends.memory import MemoryStore
from tiered.journal.entry import Entry, as_row, json_text, row_of
from tiered.keys import ObjectId, index_key, maker_of, parse_index_key
from tiered.log.history import keys_of, named_objects
from tiered.log.parts import Cover, IndexObject, ObjectRange
from tiered.log.ranges import clipped, joined, without
from tiered.log.state import TierMachine, index_action, indexed_to, uncovered
from tiered.log.timers import TimerHour
from tiered.log.verify import verify_tier
from tiered.log.verify_objects import check_indexes
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered.log.state import TierState

MACHINE = TierMachine()
A, B = MessageQueue("a", 0), MessageQueue("b", 1)


def mails(count: int, key: str = "k") -> list[Mail | None]:
    return [Mail(keys=(key, f"{key}{n}")) for n in range(count)]


def index_of(name: str, *covers: Cover) -> IndexObject:
    key = index_key("", TIME_MS, ObjectId(1, "0badcafe", int(name)))
    return IndexObject(ObjectRange(key, 8, 60, 7), 0, 0, -1, -1, covers)


@pytest.fixture
def tier() -> Iterator[KeyedTier]:
    made = KeyedTier()
    made.post(A, mails(10))
    made.post(B, mails(4))
    yield made
    made.builder.reset()


def after(state: TierState, action: dict[str, Any], *, epoch: int = 1) -> TierState:
    new = MACHINE.apply(state, Entry(999, epoch, "0badcafe", 5, [action]))
    assert MACHINE.load(json.loads(json_text(MACHINE.dump(new)))) == new
    assert b"".join(MACHINE.dump_chunks(new)) == json_text(MACHINE.dump(new))
    return replace(new, updated_ms=state.updated_ms)


def ranges(state: TierState) -> list[tuple[tuple[int, int], ...]]:
    return [state.queues[queue][-1].indexed for queue in (A, B)]


def test_what_is_covered_grows_without_a_hole(tier: KeyedTier):
    state = tier.journal.state
    one = after(state, index_action([index_of("1", Cover(A, 0, 0, 6), Cover(B, 0, 0, 4))]))
    assert ranges(one) == [((0, 6),), ((0, 4),)]
    assert [indexed_to(one.queues[queue][-1]) for queue in (A, B)] == [6, 4]
    two = after(one, index_action([index_of("2", Cover(A, 0, 6, 10))]), epoch=0)
    assert (ranges(two), len(two.indexes)) == ([((0, 10),), ((0, 4),)], 2)
    assert named_objects(two).keys() > {index.place.key for index in two.indexes}


@pytest.mark.parametrize(
    "cover",
    [
        Cover(A, 0, 5, 8),
        Cover(A, 0, 7, 8),
        Cover(A, 0, 6, 6),
        Cover(A, 0, 6, 11),
        Cover(A, 1, 6, 8),
        Cover(MessageQueue("c", 0), 0, 0, 1),
    ],
)
def test_an_action_that_does_not_fit_changes_nothing(tier: KeyedTier, cover: Cover):
    state = after(tier.journal.state, index_action([index_of("1", Cover(A, 0, 0, 6))]))
    for made in ([cover], [Cover(B, 0, 0, 4), cover]):
        assert after(state, index_action([index_of("2", *made)])) == state
    good = index_action([index_of("2", Cover(A, 0, 6, 8))])
    assert after(state, good, epoch=2) == state, "of another epoch"
    assert after(state, index_action([], ["index/none"])) == state


@pytest.mark.parametrize("is_made", [False, True])
def test_what_was_read_before_an_end_was_truncated_covers_nothing_that_came_since(
    tier: KeyedTier, is_made: bool
):
    """As many messages stand there as before, and others: found by the simulation, in seed 131 of that day."""
    tier.collect()
    made = tier.builder.finish() if is_made else None
    tier.truncate(6, queue=A)
    tier.post(A, mails(8, "new"))
    if made:
        tier.say(index_action([made]))
        tier.builder.reset()
        assert not tier.journal.state.indexes
    tier.index()
    assert indexed_to(tier.journal.state.queues[A][-1]) == 14
    for key in ("new", "new0", "new3"):
        hits = tier.ask("a", key).hits
        assert [hit.queue_offset for hit in hits] == (
            [*range(13, 5, -1)] if key == "new" else [6 + int(key[3])]
        )
    assert [hit.queue_offset for hit in tier.ask("a", "k").hits] == [5, 4, 3, 2, 1, 0]
    row = row_of(tier.journal.state.indexes[-1].covers[0])
    assert row_of(as_row(Cover).decode(row)) == row
    assert len(row) == 6


def test_a_dropped_object_leaves_a_hole_that_is_filled_first(tier: KeyedTier):
    made = [index_of(str(n), Cover(A, 0, 3 * n, 3 * n + 3)) for n in range(3)]
    state = after(tier.journal.state, index_action(made))
    holed = after(state, index_action([], [made[1].place.key]))
    assert uncovered(holed.queues[A][-1]) == [(3, 6), (9, 10)]
    for wrong in (Cover(A, 0, 9, 10), Cover(A, 0, 3, 7)):
        assert after(holed, index_action([index_of("9", wrong)])) == holed
    mended = after(holed, index_action([index_of("9", Cover(A, 0, 3, 6))]))
    assert ranges(mended)[0] == ((0, 9),)
    at_once = after(state, index_action([index_of("8", Cover(A, 0, 3, 6))], [made[1].place.key]))
    assert ranges(at_once)[0] == ((0, 9),)


def test_nonsense_in_an_action_is_no_history(tier: KeyedTier):
    good = index_action([index_of("1", Cover(A, 0, 0, 6))])
    for change in ("x", [], {}, -2, None, 2**63):
        for at in range(len(good["objects"][0])):
            row = [*good["objects"][0]]
            row[at] = change
            try:
                after(tier.journal.state, {**good, "objects": [row]})
            except (LookupError, TypeError, ValueError):
                continue
            assert (at, change) in [(0, "x"), (8, []), (8, {})]


def test_ranges():
    assert joined(((3, 5), (0, 2), (2, 3))) == ((0, 5),)
    assert without(((0, 5), (7, 9)), 3, 8) == ((0, 3), (8, 9))
    assert clipped(((0, 5), (7, 9)), 3, 8) == ((3, 5), (7, 8))
    ranges_of = as_row(TimerHour).decode
    assert ranges_of([1, 2, 0, 0, 9, 0, [], [], [[0, 2], [4, 5]]]).held == ((0, 2), (4, 5))
    for wrong in ([[0, 2], [2, 3]], [[4, 5], [0, 2]], [[2, 2]], [[0, "2"]]):
        with pytest.raises((ValueError, TypeError)):
            ranges_of([1, 2, 0, 0, 9, 0, [], [], wrong])


def test_keys_of_index_objects():
    made = ObjectId(3, "0badcafe", 7)
    key = index_key("p/", 12, made)
    assert key == "p/index/00000000000000000012-0000000003-0badcafe-0000000007"
    assert parse_index_key("p/", key) == made
    assert maker_of(key.removeprefix("p/")) == made
    for wrong in (
        "p/index/1",
        key + "x",
        key.replace("0badcafe", "0BADCAFE"),
        "q" + key,
        "p/index/a-b-c-d",
    ):
        assert parse_index_key("p/", wrong) is None
    found = set(keys_of(index_action([index_of("1", Cover(A, 0, 0, 1))], ["index/none"])))
    assert found == {index_of("1").place.key}


def test_an_index_of_what_has_expired_goes_with_it():
    tier = KeyedTier()
    tier.post(A, mails(3))
    tier.index()
    tier.post(A, mails(3), roll=True)
    tier.index()
    tier.post(A, mails(3), roll=True)
    first, second = tier.journal.state.indexes
    tier.expire(A)
    assert tier.journal.state.indexes == (second,)
    assert first.place.key not in named_objects(tier.journal.state)
    assert [hit.queue_offset for hit in tier.ask("a", "k0").hits] == [6, 3]
    tier.expire(A)
    assert tier.journal.state.indexes == ()
    assert [hit.queue_offset for hit in tier.ask("a", "k0").hits] == [6]


def test_deep_verification_finds_each_changed_byte(tier: KeyedTier):
    tier.index()
    assert verify_tier(tier.store, PREFIX, deep=True).is_clean
    assert isinstance(tier.store, MemoryStore)
    key = PREFIX + tier.journal.state.indexes[0].place.key
    whole = tier.store.get(key)
    for at in range(0, len(whole), 7):
        changed = bytearray(whole)
        changed[at] ^= 0x40
        tier.store.delete(key)
        tier.store.put_if_absent(key, [changed])
        report = verify_tier(tier.store, PREFIX, deep=True)
        assert [problem.where for problem in report.problems][:1] == [key], at
    tier.store.delete(key)
    report = verify_tier(tier.store, PREFIX)
    assert [(problem.kind, problem.where) for problem in report.problems] == [("missing", key)]


def test_what_is_not_indexed_is_counted_and_an_unnamed_object_is_an_orphan(tier: KeyedTier):
    tier.collect()
    tier.builder.finish()
    report = verify_tier(tier.store, PREFIX, deep=True)
    assert report.is_clean
    assert (report.recorded.unindexed_messages, report.recorded.orphans) == (14, 1)
    tier.index()
    report = verify_tier(tier.store, PREFIX, deep=True)
    assert (report.recorded.unindexed_messages, report.recorded.orphans) == (0, 1)


def test_a_state_that_claims_more_than_its_objects_cover_is_told(tier: KeyedTier):
    tier.index()
    state = tier.journal.state
    assert not list(check_indexes(state))
    assert [p.detail for p in check_indexes(replace(state, indexes=()))] == [
        "no index object covers [0, 10)",
        "no index object covers [0, 4)",
    ]
    incarnation = replace(state.queues[A][-1], indexed=((0, 11),))
    beyond = replace(state, queues={**state.queues, A: (incarnation,)})
    assert [p.detail for p in check_indexes(beyond)] == [
        "no index object covers [10, 11)",
        "more is indexed than committed",
    ]
    place = state.indexes[0].place._replace(key="queue/x")
    strange = replace(state, indexes=(replace(state.indexes[0], place=place),))
    assert [p.where for p in check_indexes(strange)] == ["queue/x"]
