"""How much work a call does, as a count that is the same on every machine, however busy it is."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def calls(work: Callable[[], object]) -> int:
    """Functions that this thread calls meanwhile, Python's and C's.

    What a single call of C does is not seen: sorting a million numbers is one.
    """
    count = 0

    def called(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count
