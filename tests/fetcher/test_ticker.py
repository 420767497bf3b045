"""The thread behind a fetcher goes on whatever a call does, is woken, and ends."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from fetcher.transfers import Ticker, result_by
from tiered.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


class Failing:
    def __init__(self) -> None:
        self.calls = 0
        self.is_again = threading.Event()
        self.wake: Callable[[], None] = lambda: None

    def listen(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def tick(self) -> float | None:
        self.calls += 1
        if self.calls > 1:
            self.is_again.set()
            return None
        raise ValueError("made so")


def test_a_call_that_fails_is_logged_and_made_again(caplog: pytest.LogCaptureFixture):
    ticking = Failing()
    with caplog.at_level(logging.ERROR), Ticker(ticking, SystemClock()) as ticker:
        assert ticking.is_again.wait(10)
        assert ticker._thread.is_alive()
    assert not ticker._thread.is_alive()
    assert "a defect of ours" in caplog.text


class JustInTime(Future[Any]):
    """Its answer comes when the waiting has just been given up."""

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            self.set_result(b"here")
            raise TimeoutError
        return super().result(timeout)


def test_an_answer_at_the_very_deadline_counts():
    assert result_by(0.0, SystemClock(), JustInTime(), "key") == b"here"
