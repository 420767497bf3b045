"""A tier on a store that takes names for one that differ only in case: every topic keeps what is its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support import command_line
from support.aged import GRACE_S, Tier, keys_of
from support.case_folding import CaseFoldingStore
from support.tiers import TierBuilder, batch_of

from backends.memory import MemoryStore
from tiered.clock import SystemClock
from tiered.errors import DataError
from tiered.model import MessageQueue
from tiered.store.embedded import MessageStore
from tiered.store.new_message import NewMessage

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from backends.base import ObjectStore

BOTH = ("Orders", "orders")


def test_i11_gc_deletes_nothing_when_a_named_object_can_be_read_and_is_not_listed():
    tier = Tier()
    tier.store = CaseFoldingStore(tier.store)  # type: ignore[assignment]  # (used as any store)
    tier.at = tier.workplace(tier.store)
    for turn in range(2):
        tier.builder = TierBuilder(tier.store, writer=f"{turn:08x}")
        for topic in BOTH:
            batch = batch_of(turn, [b"a"], queue=MessageQueue(topic, 0))
            tier.builder.name(tier.builder.put(tier.builder.take(batch), alone=True))
    before = {info.key for info in tier.store.list("")}
    tier.clock.advance(GRACE_S + 1)
    plan = tier.plan()
    assert keys_of(plan) == set()
    assert "differ only in case" in plan.refusals[0]
    assert "symbolic link" in plan.refusals[0]
    with pytest.raises(DataError, match="nothing is deleted"):
        tier.apply(plan)
    assert before <= {info.key for info in tier.store.list("")}


def make_store(folder: Path, topics: Sequence[str]) -> None:
    with MessageStore.create(folder, cluster="c", broker="b", clock=SystemClock()) as store:
        for topic in topics:
            store.create_topic(topic, queues=1)
            store.append_batch([NewMessage(topic, 0, f"{topic} {n}".encode()) for n in range(5)])


@pytest.fixture
def folding(monkeypatch: pytest.MonkeyPatch) -> CaseFoldingStore:
    """Every URL opens this one."""
    store = CaseFoldingStore(MemoryStore("folding"))

    def opened(_url: str, _options: object = None) -> ObjectStore:
        return store

    monkeypatch.setattr("tiered.api.stores.open_store", opened)
    return store


def test_topics_that_differ_only_in_case_lie_apart_and_nothing_of_them_is_an_orphan(
    folding: CaseFoldingStore, tmp_path: Path
):
    make_store(tmp_path / "store", BOTH)
    url = "memory://folding"
    own = ("--bundle-size", "600")  # so that each queue has a bundle of its own
    for _ in range(2):
        command_line.here(
            "attach", tmp_path / "store", "--to", url, "--once", "--seal", *own
        ).good()
    for topic in BOTH:
        rows = command_line.here("cat", url, topic, "--format", "body").good().out
        assert rows.count(f"{topic} ".encode()) == 5
    assert command_line.here("verify", url, "--deep", "--json").good().document["problems"] == []
    plan = command_line.here("gc", url, "--grace", "0s", "--json").good().document
    assert plan["refusals"] == []
    folders = {
        info.key.split("/queue/")[1].split("/")[0]
        for info in folding.list("")
        if "/queue/" in info.key
    }
    assert folders == {"~4frders", "orders"}
    journal = [info.key for info in folding.list("") if "/journal/" in info.key]
    for key in journal:
        folding.delete(key)
    command_line.here("rebuild", url, "--apply", "-").good()
    for topic in BOTH:
        rows = command_line.here("cat", url, topic, "--format", "body").good().out
        assert rows.count(f"{topic} ".encode()) == 5


def test_a_broker_whose_name_differs_only_in_case_is_refused(
    folding: CaseFoldingStore, tmp_path: Path
):
    make_store(tmp_path / "store", BOTH[:1])
    attach = ["attach", tmp_path / "store", "--to", folding.url, "--once", "--cluster", "c"]
    command_line.here(*attach, "--broker", "b").good()
    ran = command_line.here(*attach, "--broker", "B")
    assert (ran.code, "belongs to c/b" in ran.error) == (2, True), ran
