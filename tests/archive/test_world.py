"""The archive's small world: seeds that pass, and planted defects, each of which some seed finds."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from support.archive_world import World

from backends.errors import BackendError
from tiered.archive import clean, job, machine
from tiered.archive.merging import Together
from tiered.archive.model import Fence
from tiered.archive.plan import Task
from tiered.errors import TieredStoreError

if TYPE_CHECKING:
    from collections.abc import Callable

Patches = list[Any]
FAST = 3
SLOW = 150


@pytest.mark.parametrize(
    "seed", [*range(FAST), *(pytest.param(n, marks=pytest.mark.slow) for n in range(FAST, SLOW))]
)
def test_whatever_is_killed_and_whoever_comes_between(seed: int) -> None:
    World(seed).live()


# -- planted defects -------------------------------------------------------------------------------


def _no_fence() -> Patches:
    """``--clean`` deletes what no entry names, without a fence."""

    def condemn(log: Any, keys: Any) -> list[str]:
        return sorted(set(keys) - machine.named_sizes(log.state).keys())

    return [mock.patch.object(clean, "condemn", condemn)]


def _blind_fence() -> Patches:
    """Replay lets everybody through the fence."""
    return [mock.patch.object(Fence, "lets", return_value=True)]


def _same_keys() -> Patches:
    """Files have the keys that they had before the fence."""
    origin: Any = Task.origin.fget  # type: ignore[attr-defined]

    def old(self: Task) -> Any:
        return origin(replace(self, epoch=0))

    of: Any = Together.of.__func__  # type: ignore[attr-defined]

    def together(cls: Any, row_ranges: Any, epoch: int) -> Together:
        made = of(cls, row_ranges, 0)
        return Together(made.key, made.row_ranges, epoch)

    return [
        mock.patch.object(Task, "origin", property(old)),
        mock.patch.object(Together, "of", classmethod(together)),
    ]


def _fence_is_forgotten() -> Patches:
    """A checkpoint does not have the fence."""
    of = machine.ArchiveMachine.load_sharded

    def load(self: Any, *saved: Any) -> Any:
        return replace(of(self, *saved), fence=Fence())

    return [mock.patch.object(machine.ArchiveMachine, "load_sharded", load)]


def _unnamed_stay() -> Patches:
    """``--clean`` deletes only what the log calls replaced."""
    return [mock.patch.object(clean, "is_made_key", lambda key: not key.startswith("data/"))]


def _half_packs() -> Patches:
    """Of offset ranges that share files some count when others do not."""

    def add(work: Any, said: Any) -> bool:
        made = [work.add(work.queues, named) for named in said.offset_ranges]
        work.forget_gone(file.key for one in made if one for file in one.objects())
        return all(made)

    return [
        mock.patch.dict(machine._HANDLERS, {machine.RangesNamed: add}),
        mock.patch.object(job, "_fits", return_value=True),
    ]


def _nothing_replaced() -> Patches:
    """Replay forgets which files a merge has replaced."""
    return [mock.patch.object(machine._ArchiveWork, "replace")]


DEFECTS: dict[Callable[[], Patches], int] = {
    _no_fence: 12,
    _blind_fence: 12,
    _same_keys: 5,
    _fence_is_forgotten: 5,
    _unnamed_stay: 5,
    _half_packs: 1,
    _nothing_replaced: 0,
}
"""And a seed that finds each."""


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__.strip("_"))
def test_a_planted_defect_is_found(defect: Callable[[], Patches]) -> None:
    assert is_found(defect, DEFECTS[defect])


def is_found(defect: Callable[[], Patches], seed: int) -> bool:
    """Whether a seed ends otherwise than well."""
    with ExitStack() as patched:
        for patch in defect():
            patched.enter_context(patch)
        try:
            World(seed).live()
        except (AssertionError, LookupError, TieredStoreError, BackendError):
            return True
    return False
