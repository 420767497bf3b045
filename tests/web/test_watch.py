"""The watched state: caught up while somebody looks and not else, with few requests; what goes wrong hides nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support.tiers import TierBuilder
from support.waiting import until

from backends.errors import PermissionDeniedError, UnavailableError
from backends.memory import MemoryStore
from backends.wrapping import MeteredStore, WrappingStore
from tiered.api.broker_place import Place
from tiered.clock import SystemClock
from tiered.errors import InvalidError, StoreUnavailableError
from tiered.upkeep.status import Rate, rate_document
from tiered.web import watch as module
from tiered.web.pages import FAIL, OK, PageQuery, PageSources, costs, fleet, health_of
from tiered.web.watch import TierWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from backends.base import ObjectStore


class RefusingBelow(WrappingStore):
    """Refuses what lies below a prefix, with an error of the test's."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.prefix, self.error = "-", PermissionDeniedError("not yours")

    def get(self, key, byte_range=None):
        if key.startswith(self.prefix):
            raise self.error
        return self._inner.get(key, byte_range)

    def list(self, prefix, *, start_after=""):
        if prefix.startswith(self.prefix):
            raise self.error
        return self._inner.list(prefix, start_after=start_after)


def builder(store: ObjectStore, broker: str) -> TierBuilder:
    made = TierBuilder(store, prefix=Place("c", broker).prefix)
    made.add([b"one", b"two"])
    return made


@pytest.fixture
def watching() -> Iterator[Callable[..., TierWatch]]:
    made: list[TierWatch] = []

    def make(store: ObjectStore, **more: object) -> TierWatch:
        made.append(TierWatch(store, SystemClock(), refresh_s=0.01, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_what_is_tiered_shows_soon(watching: Callable[..., TierWatch]):
    store = MemoryStore("memory://watch")
    tier = builder(store, "a")
    watch = watching(store)
    assert watch.view().brokers[0].document["messages"] == 2
    tier.add([b"three"])
    until(lambda: watch.view().brokers[0].document["messages"] == 3)


def test_a_broker_that_is_refused_hides_no_other(watching: Callable[..., TierWatch]):
    store = RefusingBelow(MemoryStore("memory://refused"))
    builder(store, "a")
    builder(store, "b")
    watch = watching(store)
    assert len(watch.view().brokers) == 2
    store.prefix = Place("c", "b").prefix
    until(lambda: watch.view().unread)
    view = watch.view()
    assert [one.place.broker for one in view.brokers] == ["a"]
    assert view.trouble is None
    assert view.unread[0].document()["state"] == "refused"
    sources = PageSources("memory://refused", watch, SystemClock(), int, str, list)
    page = fleet(sources, PageQuery({}))
    first = page.names["cut"].rows[0]
    assert (first["broker"], first["level"]) == ("b", FAIL)
    store.prefix = "-"
    until(lambda: len(watch.view().brokers) == 2)


def test_a_store_that_does_not_answer_leaves_what_was_seen(watching: Callable[..., TierWatch]):
    store = RefusingBelow(MemoryStore("memory://away"))
    builder(store, "a")
    watch = watching(store)
    seen = watch.view().brokers[0].document
    store.prefix, store.error = "", UnavailableError("nobody is there")
    until(lambda: watch.view().trouble)
    view = watch.view()
    assert isinstance(view.trouble, StoreUnavailableError)
    assert view.brokers[0].document == seen
    store.prefix = "-"
    until(lambda: watch.view().trouble is None)


def test_before_the_first_view_what_is_wrong_is_raised(watching: Callable[..., TierWatch]):
    with pytest.raises(InvalidError, match="there is no tier here"):
        watching(MemoryStore("memory://none")).view()


def test_nobody_looks_while_nobody_asks(
    watching: Callable[..., TierWatch], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "IDLE_S", 0.05)
    store = MeteredStore(MemoryStore("memory://idle"))
    builder(store, "a")
    watch = watching(store)
    watch.view()
    until(lambda: not watch._wake.is_set())
    before = store.snapshot().requests
    watch.clock.wait(watch._stop, 0.2)
    assert store.snapshot().requests == before
    watch.view()
    until(lambda: store.snapshot().requests > before)


def test_a_look_at_what_is_known_takes_two_requests_a_broker():
    store = MeteredStore(MemoryStore("memory://requests"))
    for name in "abc":
        builder(store, name)
    watch = TierWatch(store, SystemClock())
    try:
        watch.look()
        document = watch._view.brokers[0].document
        before = store.snapshot().requests
        watch.look()
        assert store.snapshot().requests - before <= 3 * 2
        assert watch._view.brokers[0].document is document  # nothing is made anew
        for known in watch._known.values():
            known.rate_s = None  # a minute later
        before = store.snapshot().requests
        watch.look()
        assert store.snapshot().requests - before <= 3 * (2 + 1)
        assert watch._view.brokers[0].document["retry_logs"] == []
    finally:
        watch.close()


def test_costs_are_those_of_status(watching: Callable[..., TierWatch]):
    store = MemoryStore("memory://costs")
    builder(store, "a")
    watch = watching(store)
    view = watch.view()
    said = rate_document(Rate(3600.0, 100, 80, 90, 30, 1 << 30, 1 << 29))
    broker = replace(view.brokers[0], document={**view.brokers[0].document, "rate": said})

    watch.close()
    watch._view = replace(view, brokers=(broker,))
    sources = PageSources("s3://bucket", watch, SystemClock(), int, str, list)
    page = costs(sources, PageQuery({}))
    assert page.names["cut"].rows[0]["rate"] == said
    assert page.names["total"] == said["dollars_per_month"]
    assert page.names["is_billed"]


def test_health_by_what_status_says(watching: Callable[..., TierWatch]):
    store = MemoryStore("memory://health")
    builder(store, "a")
    document = watching(store).view().brokers[0].document
    well = {**document, "lease": {"is_held": True, "is_released": False}}
    assert health_of(well) == (OK, [])
    assert health_of({**document, "decommissioned_ms": 1})[0] == OK
    letters = {"mount": "m", "waiting": 1, "dead": 0, "reason": ""}
    assert health_of({**well, "retry_logs": [letters]}) == (OK, [])
    for change, word in (
        ({"lease": None}, "no writer"),
        ({"lease": {"is_held": False, "is_released": False}}, "went without"),
        ({"quarantined": 2}, "quarantine"),
        ({"lag_seconds": 61.0}, "behind"),
        ({"waiting": {"records": 3, "reason": "torn"}}, "torn"),
        ({"retry_logs": [{**letters, "dead": 2}]}, "2 in the dead letter queue"),
        ({"retry_logs": [{**letters, "reason": "damaged"}]}, "cannot be read"),
    ):
        level, remarks = health_of({**well, **change})
        assert level == "warn"
        assert word in " ".join(remarks)
