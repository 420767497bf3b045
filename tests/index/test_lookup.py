"""Lookups give exactly what looking at every message would, however the tier is indexed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hypothesis import given, settings
from hypothesis import strategies as st
from support.keyed import KeyedTier, Mail, places
from support.tiers import TIME_MS

from tiered.index import extract
from tiered.journal.entry import json_text
from tiered.log.state import TierMachine, index_action, indexed_to
from tiered.log.verify_objects import check_indexes, check_state
from tiered.model import MessageQueue

if TYPE_CHECKING:
    import pytest

MACHINE = TierMachine()
A0, A1, B0 = MessageQueue("orders", 0), MessageQueue("orders", 1), MessageQueue("bank-ä", 0)
KEYS = ("k", "key-1", "ключ", "x" * 40)
WORDS = st.sampled_from(KEYS)
MAIL = st.builds(
    Mail,
    keys=st.lists(WORDS, max_size=3).map(tuple),
    unique=st.sampled_from(["", "UNIQUE", "k"]),
    time_ms=st.one_of(st.none(), st.integers(TIME_MS - 3, TIME_MS + 3)),
)
BATCH = st.builds(Mail, inner=st.lists(MAIL, min_size=1, max_size=3).map(tuple))
ITEMS = st.lists(st.one_of(MAIL, MAIL, BATCH, st.none()), min_size=1, max_size=4)
QUEUES = st.sampled_from([A0, A0, A0, A1, B0])
PUT = st.tuples(QUEUES, ITEMS, st.booleans())
CHANGE = st.one_of(
    st.tuples(st.just("truncate"), QUEUES, st.integers(1, 2)),
    st.tuples(st.sampled_from(["begin_anew", "expire", "gap"]), QUEUES),
)
OWN = st.sampled_from(["index", "collect", "crash", "drop"])
STEPS = st.lists(st.one_of(PUT, PUT, PUT, OWN, OWN, CHANGE), min_size=3, max_size=20)


def play(tier: KeyedTier, steps: list[Any]) -> None:
    for step in steps:
        match step:
            case "index":
                tier.index()
            case "collect":
                tier.collect()
            case "crash":
                tier.builder.reset()
            case "drop":
                for index in tier.journal.state.indexes[:1]:
                    tier.say(index_action([], [index.place.key]))
            case ("truncate", queue, parts):
                tier.truncate_parts(queue, parts)
            case ("begin_anew", queue):
                tier.begin_anew(queue)
            case ("expire", queue):
                tier.expire(queue)
            case ("gap", queue):
                if queue in tier.journal.state.queues:
                    tier.gap(3, queue=queue)
            case (queue, items, roll):
                tier.post(queue, items, roll=roll)


@given(steps=STEPS, count=st.integers(1, 5), low=st.integers(-4, 9), every=st.booleans())
@settings(max_examples=100)
def test_a_lookup_is_what_brute_force_finds(steps: list[Any], count: int, low: int, every: bool):
    tier = KeyedTier()
    play(tier, steps)
    tier.builder.reset()
    bounds = {"from_ms": TIME_MS + low, "until_ms": TIME_MS + low + count}
    wishes: list[dict[str, Any]] = [{"count": count}, {**bounds, "count": 64}]
    for is_indexed in (False, True):
        for topic in ("orders", "bank-ä"):
            for asked in (*KEYS, "UNIQUE", "absent"):
                for wish in wishes:
                    found = tier.ask(topic, asked, every_incarnation=every, **wish)
                    expected = tier.expected(topic, asked, every_incarnation=every, **wish)
                    assert places(found) == expected
                    assert all(hit.message.topic == topic for hit in found.hits)
        if not is_indexed:
            for (
                _
            ) in steps:  # an object covers what is not covered of a queue up to where something is
                tier.index()
            incarnations = [incarnations[-1] for incarnations in tier.journal.state.queues.values()]
            assert all(
                indexed_to(incarnation) == incarnation.commit_offset for incarnation in incarnations
            )
    state = tier.journal.state
    assert not [*check_indexes(state), *check_state(state)]
    assert MACHINE.load(json.loads(json_text(MACHINE.dump(state)))) == state


def test_two_ranges_that_nothing_covers_take_two_objects():
    tier = KeyedTier()
    play(
        tier,
        [
            (A0, one("k"), False),
            "index",
            (A0, one("k"), False),
            "index",
            (A0, one("k"), False),
            "drop",
        ],
    )
    tier.index()
    assert tier.journal.state.incarnation(A0).indexed == ((0, 2),)
    tier.index()
    assert tier.journal.state.incarnation(A0).indexed == ((0, 3),)


def one(*keys: str) -> list[Mail | None]:
    return [Mail(keys=(key,)) for key in keys]


def test_messages_written_where_others_were_truncated_are_found():
    tier = KeyedTier()
    tier.post(A0, one("a", "b"))
    tier.post(A0, one("a", "c"))
    tier.index()
    tier.truncate_parts(A0, 1)
    tier.post(A0, one("c", "a", "d"))
    for is_indexed in (False, True):
        assert [hit[2] for hit in places(tier.ask("orders", "a"))] == [3, 0]
        assert [hit[2] for hit in places(tier.ask("orders", "c"))] == [2]
        every = places(tier.ask("orders", "c", every_incarnation=True))
        assert [(number, offset) for _, number, offset, _ in every] == [(0, 3), (1, 2)]
        if not is_indexed:
            tier.index()


def test_a_topic_made_anew_has_only_its_own_messages():
    tier = KeyedTier()
    tier.post(A0, one("a", "b"))
    tier.index()
    tier.begin_anew(A0)
    assert places(tier.ask("orders", "a")) == []
    tier.post(A0, one("b", "a"))
    for is_indexed in (False, True):
        assert [hit[1:3] for hit in places(tier.ask("orders", "a"))] == [(1, 1)]
        every = places(tier.ask("orders", "a", every_incarnation=True))
        assert [hit[1:3] for hit in every] == [(1, 1), (0, 0)]
        if not is_indexed:
            tier.index()


def test_keys_whose_hashes_are_equal_are_told_apart(monkeypatch: pytest.MonkeyPatch):
    for module in ("indexer", "lookup"):
        monkeypatch.setattr(f"tiered.index.{module}.topic_seed", lambda _topic: 0)
    monkeypatch.setattr(
        "tiered.index.extract.hash_many", lambda _b, s, _n, _seed: (s * 0).astype("u8")
    )
    monkeypatch.setattr("tiered.index.lookup.key_hash", lambda _topic, _key: 0)
    assert extract.key_hash("a", "b") != 0
    tier = KeyedTier()
    for queue in (A0, B0):
        tier.post(queue, [Mail(keys=(f"k{n % 3}",)) for n in range(9)])
    tier.index()
    tier.post(A0, [Mail(keys=(f"k{n % 3}",)) for n in range(9)])
    for key in ("k0", "k1", "k2", "k3"):
        assert places(tier.ask("orders", key)) == tier.expected("orders", key)
    assert places(tier.ask("orders", "k1", count=2)) == tier.expected("orders", "k1", count=2)
