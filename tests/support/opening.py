"""Opened tiers over the stores of tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.tiers import PLACE

from backends.wrapping import MeteredStore
from tiered.api.open_tier import OpenTier

if TYPE_CHECKING:
    from backends.base import ObjectStore
    from fetcher.limits import FetchSettings


def opened_over(store: ObjectStore, settings: FetchSettings | None = None) -> OpenTier:
    """The tier in a store, replayed."""
    tier = OpenTier(store, MeteredStore(store), PLACE, settings=settings)
    tier.refresh()
    return tier
