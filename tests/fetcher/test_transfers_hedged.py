"""Hedging in the request layer, by hand: what is asked again, who wins, and what a failure does."""

from __future__ import annotations

from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

import pytest

from backends.base import ByteRange
from backends.errors import ObjectNotFoundError, UnavailableError
from fetcher.limits import TransferLimits
from fetcher.requests import Asked, Attempt
from fetcher.transfers import TransferState

if TYPE_CHECKING:
    from concurrent.futures import Future

SIZE = 10
WARM = 40


class Hand:
    """Makes the calls of a ``TransferState`` when the test says so."""

    def __init__(self, **limits: Any) -> None:
        self.now_s = 0.0
        self.state = TransferState(
            TransferLimits(**{"coalesced_bytes_max": 1, "coalesce_gap_bytes": 0, **limits}), 0.0
        )
        self.calls: list[Attempt] = []

    def ask(self, key: str, size: int = SIZE, *, urgent: bool = True) -> Future[bytes]:
        asked = Asked(self.cancel, "s", key, ByteRange(0, size))
        self.state.take_up(asked, self.now_s, urgent=urgent)
        self.state.send(self.now_s)
        self._do()
        return asked

    def cancel(self, asked: Asked) -> bool:
        done = self.state.cancel(asked, self.now_s)
        self._do()
        return done

    def finish(self, which: int, outcome: bytes | BaseException | None = None) -> None:
        attempt = self.calls.pop(which)
        whole = b"x" * attempt.request.size_bytes
        self.state.finish(attempt, whole if outcome is None else outcome, self.now_s)
        self._do()

    def tick(self, after_s: float = 0.0) -> float | None:
        self.now_s += after_s
        next_s = self.state.tick(self.now_s)
        self._do()
        return next_s

    def _do(self) -> None:
        effects = self.state.take_effects()
        for attempt in effects.starts:
            attempt.started_s = self.now_s
            self.calls.append(attempt)
        for end in effects.ends:
            end()


def warm(**limits: Any) -> Hand:
    """A store that answers after 0.1 s; forty requests have earned two hedges."""
    hand = Hand(**limits)
    for number in range(WARM):
        hand.ask(f"warm-{number}")
        hand.now_s += 0.1
        hand.finish(0)
    return hand


QUICK_S, LATE_S = 0.005, 1.0


def read_times(late: frozenset[int], reads: int, **limits: Any) -> tuple[list[float], Hand]:
    """How long reads of two ranges take, shortest first, when the calls of these numbers are late; in the hand's time."""
    hand = Hand(requests_in_flight_max=8, **limits)
    numbers: dict[Attempt, int] = {}
    times = []
    for read in range(reads):
        begin_s = hand.now_s
        asked = [hand.ask(f"{read}-{half}") for half in "ab"]
        while not all(one.done() for one in asked):
            next_s = hand.tick()
            for call in hand.calls:
                numbers.setdefault(call, len(numbers) + 1)
            ends = [
                (call.started_s or 0.0) + (LATE_S if numbers[call] in late else QUICK_S)
                for call in hand.calls
            ]
            end_s = min(ends)
            if next_s is not None and next_s < end_s:
                hand.now_s = next_s
            else:
                hand.now_s = end_s
                hand.finish(ends.index(end_s))
        times.append(hand.now_s - begin_s)
    return sorted(times), hand


def test_late_requests_are_hedged_away():
    """2 % of calls take a second: p99 of a read is twice its undisturbed value and the hedge delay at most."""
    reads = 200
    late = frozenset(range(43, 2 * reads, 50))
    limits = TransferLimits()
    slow_s = max(limits.hedge_floor_s, limits.hedge_factor * QUICK_S)
    p99 = int(reads * 0.99)
    unhedged, _ = read_times(late, reads, hedge_budget=0.0)
    assert unhedged[p99] == pytest.approx(LATE_S)
    disturbed, hand = read_times(late, reads)
    assert disturbed[p99] <= 2 * QUICK_S + slow_s + 1e-9
    counts = hand.state.counts
    assert counts["hedges"] == counts["hedge_wins"] == len(late)
    assert counts["hedges"] <= 0.05 * counts["requests"]


def test_a_slow_request_is_asked_again_and_the_hedge_wins():
    hand = warm()
    found = hand.ask("k")
    assert hand.tick() == pytest.approx(hand.now_s + 0.3)
    hand.tick(0.29)
    assert len(hand.calls) == 1
    hand.tick(0.02)
    assert [call.is_hedge for call in hand.calls] == [False, True]
    assert hand.tick(5.0) is None, "once is enough"
    hand.finish(1)
    assert found.result(0) == b"x" * SIZE
    assert hand.state.slots_used == 1, "the loser's call has not returned"
    hand.finish(0)
    counts = hand.state.counts
    assert (counts["hedges"], counts["hedge_wins"], counts["lost_bytes"]) == (1, 1, SIZE)
    assert counts["requests"] == WARM + 1
    assert hand.state.slots_used == hand.state.bytes_used == 0


def test_the_first_may_win_and_the_hedge_loses():
    hand = warm()
    found = hand.ask("k")
    hand.tick(1.0)
    hand.finish(0)
    assert found.done()
    hand.finish(0, UnavailableError("late"))
    assert found.result(0) == b"x" * SIZE
    assert hand.state.counts["hedge_wins"] == 0
    assert hand.state.errors == {"UnavailableError": 1}


@pytest.mark.parametrize("first", [0, 1])
def test_the_first_failure_of_a_pair_waits_for_the_other(first: int):
    hand = warm()
    found = hand.ask("k")
    hand.tick(1.0)
    hand.finish(first, UnavailableError("first"))
    assert not found.done()
    hand.finish(0)
    assert found.result(0) == b"x" * SIZE


def test_both_fail_and_the_first_error_is_told():
    hand = warm()
    found = hand.ask("k")
    hand.tick(1.0)
    hand.finish(1, ObjectNotFoundError("gone"))
    hand.finish(0, UnavailableError("second"))
    assert isinstance(found.exception(0), ObjectNotFoundError)


def test_nothing_is_asked_again_before_the_floor():
    hand = Hand(hedge_floor_s=0.05)
    for number in range(WARM):
        hand.ask(f"warm-{number}")
        hand.now_s += 0.001
        hand.finish(0)
    hand.ask("k")
    hand.tick(0.04)
    assert len(hand.calls) == 1
    hand.tick(0.011)
    assert len(hand.calls) == 2


def test_budget_slots_and_bytes_hold_a_hedge_up():
    hand = warm(requests_in_flight_max=3)
    for key in "abc":
        hand.ask(key)
    hand.tick(1.0)
    assert len(hand.calls) == 3, "no slot"
    hand.finish(2)
    assert len(hand.calls) == 3, "the slot that came free is used at once"
    assert hand.calls[2].is_hedge
    hand.finish(2)
    assert [call.request.key for call in hand.calls] == ["a", "b", "b"]
    for _ in range(3):
        hand.finish(0)
    hand.ask("d")
    hand.ask("e")
    hand.tick(9.0)
    assert hand.state.counts["hedges"] == 2, "45 requests, so two hedges and no third"


def test_large_requests_are_hedged_within_the_bytes():
    hand = warm(bytes_in_flight_max=30)
    found = hand.ask("k", 20)
    hand.tick(60.0)
    assert len(hand.calls) == 1
    found.cancel()
    hand.finish(0)


def test_a_hedge_takes_tokens():
    hand = warm(requests_per_s=100.0)
    hand.ask("k")
    hand.tick(0.35)
    assert len(hand.calls) == 2
    hand = warm(bytes_per_s=1000.0)
    hand.ask("k", 2000)
    next_s = hand.tick(0.5)
    assert len(hand.calls) == 1, "the request itself has left a debt"
    assert next_s == pytest.approx(hand.now_s + 1.4)
    hand.tick(1.41)
    assert len(hand.calls) == 2


def test_nobody_asks_again_for_what_nobody_wants():
    hand = warm()
    found = hand.ask("k")
    found.cancel()
    assert hand.tick(9.0) is None
    assert len(hand.calls) == 1
    hand.finish(0)
    with pytest.raises(CancelledError):
        found.result(0)


def test_no_hedge_without_experience_or_when_switched_off():
    hand = Hand()
    hand.ask("k")
    assert hand.tick(9.0) == hand.now_s + 0.05, "there may be a median by then"
    assert len(hand.calls) == 1
    hand = warm(hedge_budget=0.0)
    hand.ask("k")
    assert hand.tick(9.0) is None
    assert len(hand.calls) == 1


def test_a_call_that_no_thread_has_begun_is_not_late():
    hand = warm()
    hand.ask("k")
    hand.calls[0].started_s = None
    hand.tick(9.0)
    assert len(hand.calls) == 1


def test_what_is_waited_for_is_asked_again_first():
    hand = warm(requests_in_flight_max=3)
    hand.ask("ahead", urgent=False)
    hand.now_s += 0.01
    hand.ask("urgent")
    hand.tick(1.0)
    assert hand.calls[2].request.key == "urgent"


def test_read_ahead_gets_four_times_as_long_until_somebody_waits_for_it():
    hand = warm()
    asked = hand.ask("ahead", urgent=False)
    hand.state.take_effects()
    hand.tick(1.1)
    assert len(hand.calls) == 1
    hand.state.hurry(asked, hand.now_s)
    assert hand.state.take_effects().is_sooner, "it is due at once now"
    hand.tick(0.0)
    assert len(hand.calls) == 2
    hand.ask("left alone", urgent=False)
    hand.tick(1.3)
    assert len(hand.calls) == 4


def test_while_requests_are_sent_it_is_not_woken_for_each():
    hand = warm()
    hand.tick()
    assert hand.state.linger(hand.now_s) == pytest.approx(hand.now_s + 0.05)
    for number in range(20):
        hand.now_s += 0.001
        asked = Asked(hand.cancel, "s", f"k{number}", ByteRange(0, 5))
        hand.state.take_up(asked, hand.now_s, urgent=True)
        hand.state.send(hand.now_s)
        assert not hand.state._effects.is_sooner
        hand._do()
        hand.finish(0)
    hand.tick(0.03)
    assert hand.state.linger(hand.now_s) == pytest.approx(hand.now_s + 0.05)
    hand.tick(0.05)
    assert hand.state.linger(hand.now_s) is None, "nothing was sent meanwhile"
