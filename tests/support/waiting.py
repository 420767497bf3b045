"""Waiting for what other threads and processes do: for a condition, with a limit, never for a time."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def until(what: Callable[[], object], why: str = "it", seconds_max: float = 180.0) -> float:
    """Wait until something holds; the seconds it took."""
    began_s = time.monotonic()
    while not what():
        assert time.monotonic() < began_s + seconds_max, f"{why}: not after {seconds_max} s"
        time.sleep(0.01)
    return time.monotonic() - began_s


async def until_async(what: Callable[[], object]) -> None:
    """The same in an event loop; the test's own limit is its limit."""
    while not what():  # noqa: ASYNC110 (many things are waited for)
        await asyncio.sleep(0.01)
