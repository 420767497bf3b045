"""Places and sizes where blocks, pages and files end: on the edge, one byte before it and one behind.

Chance alone does not meet them: of the sizes up to a few blocks one in twenty thousand is such a one. So strategies that
draw sizes, ranges or counts draw half of them from here.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BESIDE = (-1, 0, 1)


def near_edges(low: int, high: int, block: int) -> st.SearchStrategy[int]:
    """Places in ``[low, high]``: half of them at a multiple of ``block``, or one beside it."""
    edges = range(-(-low // block) * block, high + block + 1, block)
    beside = [edge + by for edge in edges for by in BESIDE if low <= edge + by <= high]
    anywhere = st.integers(low, high)
    return st.one_of(st.sampled_from([low, high, *beside]), anywhere)


@st.composite
def ranges_near_edges(draw: st.DrawFn, size: int, block: int) -> tuple[int, int]:
    """A range of ``[0, size)`` whose ends are such places; it may be empty."""
    low = draw(near_edges(0, size, block))
    return low, draw(near_edges(low, size, block))


def finds(test: Callable[..., None], **strategies: st.SearchStrategy[object]) -> bool:
    """Whether a test fails for some of 200 examples, which are always the same; for tests of planted defects."""
    sure = settings(
        deadline=None, max_examples=200, derandomize=True, database=None, phases=[Phase.generate]
    )
    try:
        sure(given(**strategies)(test))()
    except Exception:  # noqa: BLE001 (whatever it is that a defect leads to)
        return True
    return False


@contextmanager
def planted(owner: object, name: str, wrong: object) -> Iterator[None]:
    """A defect in the place of a function."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, wrong)
        yield
