"""Lookups give exactly what looking at every message would, however the tier is indexed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import given, settings
from hypothesis import strategies as st
from support.keyed import KeyedTier, Mail, places
from support.tiers import TIME_MS

from tiered.index import hashing
from tiered.model import MessageQueue

if TYPE_CHECKING:
    import pytest

A0, A1, B0 = MessageQueue("orders", 0), MessageQueue("orders", 1), MessageQueue("bank-ä", 0)
WORDS = st.sampled_from(["k", "key-1", "key-2", "ключ", "x" * 40, "order-12345678", "7"])
MAIL = st.builds(
    Mail,
    keys=st.lists(WORDS, max_size=3).map(tuple),
    unique=st.sampled_from(["", "7F0000010000", "UNIQUE", "k"]),
    body=st.binary(max_size=9),
    time_ms=st.one_of(st.none(), st.integers(TIME_MS - 3, TIME_MS + 3)),
)
BATCH = st.builds(Mail, inner=st.lists(MAIL, min_size=1, max_size=3).map(tuple))
ITEMS = st.lists(st.one_of(MAIL, MAIL, BATCH, st.none()), min_size=1, max_size=7)
PUT = st.tuples(st.sampled_from([A0, A1, B0]), ITEMS, st.booleans())
STEPS = st.lists(st.one_of(PUT, st.just("index"), st.just("collect")), max_size=9)


@given(
    steps=STEPS,
    key=WORDS,
    count=st.integers(1, 5),
    bounds=st.tuples(st.integers(-4, 9), st.integers(-4, 9)),
)
@settings(max_examples=150)
def test_a_lookup_is_what_brute_force_finds(
    steps: list[Any], key: str, count: int, bounds: tuple[int, int]
):
    tier = KeyedTier()
    for step in steps:
        if step == "index":
            tier.index()
        elif step == "collect":
            tier.collect()
        else:
            queue, items, roll = step
            tier.put(queue, items, roll=roll)
    for topic in ("orders", "bank-ä"):
        for asked in (key, "UNIQUE", "absent"):
            for wish in (
                {"count": 64},
                {"count": count},
                {"count": 64, "from_ms": TIME_MS + bounds[0], "until_ms": TIME_MS + bounds[1]},
            ):
                found = tier.ask(topic, asked, **wish)
                assert places(found) == tier.expected(topic, asked, **wish)
                assert all(hit.message.topic == topic for hit in found.hits)
    tier.builder.reset()


def test_keys_whose_hashes_are_equal_are_told_apart(monkeypatch: pytest.MonkeyPatch):
    for module in ("builder", "search"):
        monkeypatch.setattr(f"tiered.index.{module}.topic_seed", lambda _topic: 0)
    monkeypatch.setattr(
        "tiered.index.extract.hash_many", lambda _b, s, _n, _seed: (s * 0).astype("u8")
    )
    monkeypatch.setattr("tiered.index.search.key_hash", lambda _topic, _key: 0)
    assert hashing.key_hash("a", "b") != 0
    tier = KeyedTier()
    for queue in (A0, B0):
        tier.put(queue, [Mail(keys=(f"k{n % 3}",)) for n in range(9)])
    tier.index()
    tier.put(A0, [Mail(keys=(f"k{n % 3}",)) for n in range(9)])
    for key in ("k0", "k1", "k2", "k3"):
        assert places(tier.ask("orders", key)) == tier.expected("orders", key)
    assert places(tier.ask("orders", "k1", count=2)) == tier.expected("orders", "k1", count=2)
