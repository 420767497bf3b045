"""What the store says comes as an error that tells what to do; threads are started late and ended."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from support.opened import Made

from backends.errors import PermissionDeniedError, UnavailableError
from backends.wrapping import WrappingStore
from tiered.api.open_tier import OpenTier
from tiered.api.tier import Tier
from tiered.clock import SystemClock
from tiered.errors import ClosedError, StoreUnavailableError

if TYPE_CHECKING:
    from backends.base import ByteRange


class Failing(WrappingStore):
    """Every read of a range fails."""

    error: Exception | None = None

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        if self.error is not None:
            raise self.error
        return super().get(key, byte_range)


def failing() -> tuple[Tier, Failing]:
    made = Made()
    made.add(b"one")
    opened = made.open()
    store = Failing(opened._opened.store)
    tier = Tier(OpenTier(store, opened._opened.meter, opened._opened.place, clock=SystemClock()))
    tier.refresh()
    return tier, store


@pytest.mark.parametrize(
    ("error", "do"),
    [
        (UnavailableError("gone away"), "can be reached"),
        (PermissionDeniedError("no"), "credentials"),
    ],
)
def test_errors_of_the_store_say_what_to_do(error: Exception, do: str):
    tier, store = failing()
    with tier:
        store.error = error
        with pytest.raises(StoreUnavailableError, match=do):
            next(tier.read("orders", 0))
        with pytest.raises(StoreUnavailableError, match=do):
            next(tier.read_topic("orders"))
        store.error = None
        assert len(list(tier.read("orders", 0))) == 1


def test_threads_begin_with_the_first_read_and_end_with_the_tier():
    def ours() -> set[str]:
        names = (thread.name for thread in threading.enumerate())
        return {name for name in names if name.startswith(("tiered-fetch", "fetcher-ticker"))}

    tier, _ = failing()
    assert tier.topics()
    assert not tier.refresh()
    assert not ours()
    assert len(list(tier.read("orders", 0))) == 1
    assert len(ours()) > 1
    tier.close()
    assert not ours()
    with pytest.raises(ClosedError):
        next(tier.read("orders", 0))
