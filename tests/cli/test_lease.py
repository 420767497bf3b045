"""``tiered lease``: who writes, and freeing it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from support.journals import PREFIX
from support.tiers import TierBuilder

from backends.memory import MemoryStore
from backends.wrapping import WrappingStore
from tiered.clock import ManualClock
from tiered.errors import FencedError
from tiered.journal.lease import Holder, Lease, read_lease
from tiered.keys import LEASE
from tiered.upkeep.workplace import break_lease, report_lease

if TYPE_CHECKING:
    from pathlib import Path

    from support.command_line import CommandLine, Start

    from backends.base import Version


def lease_of(store: MemoryStore, clock: ManualClock, writer: str = "0badcafe") -> Lease:
    holder = Holder.present()
    return Lease(store, PREFIX, writer=writer, holder=holder, seconds=10, clock=clock)


def test_words_of_a_lease():
    store, clock = MemoryStore(), ManualClock()
    TierBuilder(store)
    assert report_lease(store, PREFIX, clock).word == "none"
    lease = lease_of(store, clock)
    assert lease.try_acquire() is None
    assert report_lease(store, PREFIX, clock).is_held
    clock.advance(11)
    assert report_lease(store, PREFIX, clock).word == "expired"
    lease.renew()
    lease.release()
    assert report_lease(store, PREFIX, clock).word == "released"
    _, version = read_lease(store, PREFIX + LEASE)
    store.compare_and_set(PREFIX + LEASE, b"garbage", version)
    assert report_lease(store, PREFIX, clock).word == "unreadable"


def test_a_broken_lease_stops_its_holder_and_lets_another_in():
    store, clock = MemoryStore(), ManualClock()
    old = lease_of(store, clock)
    assert old.try_acquire() is None
    assert break_lease(store, PREFIX, clock, breaker="0000b4ea")
    with pytest.raises(FencedError):
        old.renew()
    assert lease_of(store, clock, "0000feed").try_acquire() is None
    old.release()  # takes nothing from the new one
    present, _ = read_lease(store, PREFIX + LEASE)
    assert present
    assert (present.writer, present.released) == ("0000feed", False)


def test_breaking_what_is_free_changes_nothing():
    store, clock = MemoryStore(), ManualClock()
    assert not break_lease(store, PREFIX, clock, breaker="0000b4ea")
    lease = lease_of(store, clock)
    lease.try_acquire()
    lease.release()
    before = store.get(PREFIX + LEASE)
    assert not break_lease(store, PREFIX, clock, breaker="0000b4ea")
    assert store.get(PREFIX + LEASE) == before


def test_breaking_meets_a_renewal_in_between():
    clock, store = ManualClock(), MemoryStore()
    lease = lease_of(store, clock)
    lease.try_acquire()
    renewals = iter([True, True])

    class Racing(WrappingStore):
        def compare_and_set(self, key: str, data: bytes, expected: Version | None) -> Version:
            if next(renewals, False):
                clock.advance(0.1)
                lease.renew()
            return super().compare_and_set(key, data, expected)

    racing = Racing(store)
    assert break_lease(racing, PREFIX, clock, breaker="0000b4ea")
    with pytest.raises(FencedError):
        lease.renew()


def test_the_command_shows_and_breaks(tiered: CommandLine, basic_tier: str):
    document = tiered.good("lease", basic_tier, "--json").document
    assert document["state"] == "released"
    broker = tiered.good("status", basic_tier, "--json").document["brokers"][0]
    # Other tests collect garbage in this tier, too, each under an epoch of its own.
    assert document["epoch"] == broker["epoch"]
    assert broker["epoch"] >= 1
    assert not document["is_broken"]
    shown = tiered.good("lease", basic_tier, "--break")
    assert "free: given back" in shown.text
    assert "warning" not in shown.err  # there was nothing to break


def test_the_command_needs_a_tier(tiered: CommandLine, tmp_path: object):
    ran = tiered("lease", f"file://{tmp_path}/nothing")
    assert ran.code == 2
    assert "there is no tier here" in ran.error


def test_a_running_attach_whose_lease_is_broken_ends_with_code_4(
    tiered: CommandLine, basic: Path, tmp_path: Path, start: Start
):
    url = f"file://{tmp_path}/tier"
    with start("attach", basic, "--to", url, "--lease-seconds", "1") as process:
        try:
            deadline = time.monotonic() + 120
            while tiered("lease", url, "--json").code != 0:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            broken = tiered.good("lease", url, "--break")
            assert "warning: the lease is broken" in broken.err
            assert "the lease is free now" in broken.text
            assert process.wait(120) == 4
            assert b"another writer has taken the lease" in process.communicate()[1]
        finally:
            process.kill()
    assert tiered.good("attach", basic, "--to", url, "--once", "--no-wait").code == 0
    assert tiered.good("verify", url, "--deep").code == 0
