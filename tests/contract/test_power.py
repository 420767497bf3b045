"""A power failure of a folder tier, at any moment: what was confirmed is there with all its bytes, nothing is there in part.

Whatever was not forced to the disk may be gone, each by itself (``support.power``). So these tests are about the order in
which bytes and names are forced; that they can fail is shown by leaving each of it out.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from support.dispatching import assert_equal, filled, run_once
from support.journals import PREFIX
from support.power import Power

import backends.local_files
from backends.errors import AlreadyExistsError, BackendError, ObjectNotFoundError
from backends.local import LocalFolderStore
from backends.local_files import Draft, ExclusiveWriter, FolderCache, make_durable_folder, write_all
from backends.testing.faulty import SimulatedCrash
from backends.wrapping import WrappingStore
from tiered.log.reader import TierReader
from tiered.log.verify import verify_tier

if TYPE_CHECKING:
    from collections.abc import Callable

SEEDS = 25
ROUNDS = 25
KEYS = ("a", "b/c", "b/d", "e/f/g", "e/f/h", "e/i")
LEASE = "l/lease"
TIER = "above/tier"


class LostError(AssertionError):
    """The disk has lost, or cut, what was confirmed."""


class Known:
    """What was confirmed of each key, and all that was ever tried.

    Attributes:
        sure: Present for sure, with these bytes.
        tried: Of each key all bytes that somebody has tried to store.
    """

    def __init__(self) -> None:
        self.sure: dict[str, bytes] = {}
        self.tried: dict[str, set[bytes]] = {}

    def check(self, root: Path) -> None:
        """Hold what a power failure has left against it."""
        store = LocalFolderStore(root)
        found = {info.key: store.get(info.key) for info in store.list("")}
        store.close()
        for key, data in found.items():
            if data not in self.tried.get(key, set()):
                raise LostError(f"{key} has {len(data)} bytes that nobody has stored")
        for key, data in self.sure.items():
            if found.get(key) != data:
                raise LostError(f"{key} was confirmed, and is gone")


def killed_at(sync: int) -> Callable[[], None]:
    """For ``before_sync``: the process is gone before its so-manieth; the machine is not."""
    left = iter(range(sync))

    def count() -> None:
        if next(left, None) is None:
            raise SimulatedCrash("a sync")

    return count


class World:
    """Processes that use one folder, one after another: some are killed in the middle, and the next goes on."""

    def __init__(self, seed: int, base: Path) -> None:
        self.rng = random.Random(seed)
        self.power = Power(base)
        self.root = base / TIER
        self.left = base.parent / "left"
        self.known = Known()
        self.unnamed = self.rng.random() < 0.7
        self.store = self._started()
        self.checks = 0

    def _started(self) -> LocalFolderStore:
        store = LocalFolderStore(self.root)
        store._writer._unnamed &= self.unnamed
        return store

    def run(self) -> None:
        with self.power.watched():
            for _ in range(ROUNDS):
                if self.rng.random() < 0.3:
                    self.power.before_sync = killed_at(self.rng.randrange(5))
                try:
                    with suppress(BackendError):
                        self._act()
                except SimulatedCrash:
                    self.power.before_sync = _nothing
                    self.store.close()
                    self.store = self._started()
                self.power.before_sync = _nothing
                self._fail()
            self.store.close()

    def _fail(self) -> None:
        """What would be left of it now?"""
        for _ in range(2):
            number, self.checks = self.checks, self.checks + 1
            left = self.left.with_name(f"left{number}")
            self.power.survivor(left, self.rng)
            self.known.check(left / TIER)

    def _act(self) -> None:
        rng, known = self.rng, self.known
        if rng.random() < 0.2:
            key = rng.choice(KEYS)
            known.sure.pop(key, None)
            self.store.delete(key)
            return
        data = rng.randbytes(rng.choice((1, 30, 5000)))
        if rng.random() < 0.3:
            known.tried.setdefault(LEASE, set()).add(data)
            self._lease(data)
            return
        key = rng.choice(KEYS)
        known.tried.setdefault(key, set()).add(data)
        try:
            self.store.put_if_absent(key, data)
        except AlreadyExistsError:
            data = self.store.get(key)  # whoever is told so relies on it
        known.sure[key] = data

    def _lease(self, data: bytes) -> None:
        expected = None
        with suppress(ObjectNotFoundError):
            _, expected = self.store.get_versioned(LEASE)
        self.known.sure.pop(LEASE, None)  # from now on it is this, or the one before
        self.store.compare_and_set(LEASE, data, expected)
        self.known.sure[LEASE] = data


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "disk"
    path.mkdir()
    return path


def run_some(base: Path, seeds: range) -> None:
    for seed in seeds:
        mine = base / str(seed) / "disk"
        mine.mkdir(parents=True)
        World(seed, mine).run()


def test_what_was_confirmed_is_there_after_a_power_failure_and_nothing_in_part(base: Path):
    run_some(base, range(SEEDS))


def _nothing(*_arguments: object) -> None:
    return None


LEFT_OUT: dict[str, Callable[[], Any]] = {
    "bytes of a new object": lambda: mock.patch.object(Draft, "force", _nothing),
    "the name of a new object": lambda: mock.patch.object(LocalFolderStore, "_force", _nothing),
    "the names of its folders": lambda: mock.patch.object(FolderCache, "force_names", _nothing),
    "the name of an object that exists": lambda: mock.patch.object(
        LocalFolderStore, "_force_names", _only_for_ours()
    ),
    "the folder that a folder is made in": lambda: mock.patch(
        "backends.local_files.sync_folder", _nothing
    ),
    "bytes that take the place of others": lambda: mock.patch.object(
        ExclusiveWriter, "replace", _replace_at_once
    ),
    "the name of a root that another has made": lambda: mock.patch.object(
        FolderCache, "_open_root", _only_if_missing
    ),
    "in the wrong order: the name, then the bytes": lambda: mock.patch.object(
        LocalFolderStore, "_create", _create_in_another_order
    ),
}
"""What is not forced to disk, or too late."""


def _only_for_ours() -> Callable[..., None]:
    force = LocalFolderStore._force_names

    def forced(self: LocalFolderStore, folder: bytes, folder_fd: int, key: str) -> None:
        if sys.exc_info()[0] is not FileExistsError:
            force(self, folder, folder_fd, key)

    return forced


def _only_if_missing(self: FolderCache) -> int:
    """A root that is there is taken to be on disk."""
    if not Path(os.fsdecode(self._root)).is_dir():
        make_durable_folder(self._root)
    return backends.local_files.os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _replace_at_once(self: ExclusiveWriter, folder_fd: int, name: bytes, chunks: Any) -> None:
    draft = self._named_draft(folder_fd)
    try:
        write_all(draft.fd, chunks)
        draft.move_to(name)
    finally:
        draft.close()


def _create_in_another_order(
    self: LocalFolderStore, folder: bytes, name: bytes, key: str, chunks: Any
) -> None:
    with self._folders.hold(folder) as folder_fd:
        draft = self._writer.write(folder_fd, chunks)
        try:
            draft.publish(name)
            self._force_names(folder, folder_fd, key)
            draft.force()
        finally:
            draft.close()


@pytest.mark.parametrize("what", LEFT_OUT)
def test_what_is_not_forced_is_found(base: Path, what: str):
    with LEFT_OUT[what](), pytest.raises(LostError):
        run_some(base, range(200))


# -- a tier -----------------------------------------------------------------------------------------


class Confirming(WrappingStore):
    """Remembers what was confirmed. One change at a time: what is left in the middle of one is of one moment."""

    def __init__(self, inner: LocalFolderStore) -> None:
        super().__init__(inner)
        self.confirmed: list[str] = []
        self._changing = threading.Lock()

    def put_if_absent(self, key: str, data: Any) -> None:
        with self._changing:
            super().put_if_absent(key, data)
            self.confirmed.append(key)

    def compare_and_set(self, *arguments: Any) -> Any:
        with self._changing:
            return super().compare_and_set(*arguments)

    def delete(self, key: str) -> None:
        with self._changing:
            super().delete(key)


@pytest.mark.parametrize("seed", range(6))
def test_a_tier_is_whole_after_a_power_failure_at_any_moment(base: Path, seed: int):
    """What entries name is there, and entries that were confirmed are; the next writer goes on."""
    rng, power = random.Random(seed), Power(base, of_all_threads=True)
    local, root = filled(topics=2, queues=2, each=30), base / TIER
    left: list[Path] = []
    store = Confirming(LocalFolderStore(root))

    def look() -> None:
        if rng.random() < 0.3 and len(left) < 12:
            confirmed, path = [*store.confirmed], base.parent / f"left{len(left)}"
            left.append(path)
            power.survivor(path, rng)
            check_tier(path / TIER, confirmed)

    with power.watched():
        power.before_sync = look
        run_once(store, local)
        power.before_sync = _nothing
    assert left
    for path in left[-3:]:
        with ExitStack() as closed:
            again = LocalFolderStore(path / TIER)
            closed.callback(again.close)
            run_once(again, local, seed=2)
            assert_equal(again, local)
    store.close()


def check_tier(root: Path, confirmed: list[str]) -> None:
    store = LocalFolderStore(root)
    there = {info.key for info in store.list("")}
    assert {*confirmed} <= there
    reader = TierReader(store, PREFIX)
    if any("journal/" in key for key in there):
        reader.refresh()
        assert not verify_tier(store, PREFIX, deep=True).problems
    store.close()
