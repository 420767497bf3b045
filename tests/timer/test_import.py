"""``tiered timer import`` of what a real broker left behind: everything pending that its own wheel would deliver, once."""

from pathlib import Path

import pytest
from support.timer_stores import CAPTURED_MS, bring, held, pending, set_back

from tiered.dispatch.settings import DispatchSettings
from tiered.log.timers import HOUR_MS


def test_all_that_is_pending_is_taken_and_nothing_else(store: Path):
    result = bring(store, 0)
    assert held(store) == pending()
    assert (result.total.taken, result.total.cancelled) == (166 + 60, 16)
    assert sum(pending().values()) == 226
    assert result.bundles == 1


def test_again_takes_nothing_and_a_smaller_window_the_rest(store: Path):
    far, day = 24 * HOUR_MS, CAPTURED_MS + 24 * HOUR_MS
    first = bring(store, far)
    assert held(store) == pending(day)
    assert (first.total.taken, first.total.near) == (
        sum(pending(day).values()), sum((pending() - pending(day)).values())
    )  # fmt: skip
    again = bring(store, far, now_ms=CAPTURED_MS + 60_000)
    assert (again.total.taken, again.bundles, again.entries) == (0, 0, 0)
    rest = bring(store, 0)
    assert held(store) == pending()
    assert rest.total.taken == first.total.near
    assert bring(store, 0).total.taken == 0


def test_in_small_rounds(store: Path):
    result = bring(store, 0, dispatch=DispatchSettings(bundle_bytes=8_192, compression=None))
    assert result.entries > 1
    assert held(store) == pending()
    assert bring(store, 0).total.taken == 0


@pytest.mark.parametrize("back_ms", [0, 5_000, 40_000])
def test_what_a_real_broker_delivered_after_its_last_note_is_not_taken(store: Path, back_ms: int):
    set_back(store, back_ms)
    found = bring(store, 0).total
    assert held(store) == pending()
    assert found.taken == 226
