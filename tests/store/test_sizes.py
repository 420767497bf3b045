"""Damage is not configuration: a file that was cut, or has grown, sets no size of a store's files."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest
from support.broker_files import FakeBroker
from support.embedded import SMALL, create, reopen
from support.stored import read_all

from tiered.errors import InvalidError, TieredStoreError
from tiered.local.layout import inspect
from tiered.model import MessageQueue
from tiered.store.new_message import NewMessage

if TYPE_CHECKING:
    from pathlib import Path

    from tiered.store.embedded import MessageStore

QUEUE = MessageQueue("t", 0)
SIZE = SMALL.commitlog_file_bytes


def make(root: Path, count: int) -> list[int]:
    with create(root) as store:
        return [
            store.append(NewMessage("t", 0, b"x" * 300, keys="k")).physical_offset
            for _ in range(count)
        ]


def crash(root: Path) -> None:
    """As after a crash before the first checkpoint: nothing is promised."""
    (root / "abort").touch()
    (root / "checkpoint").unlink()


def sizes(root: Path, folder: str = "commitlog") -> set[int]:
    return {path.stat().st_size for path in (root / folder).iterdir()}


def log_file(root: Path, number: int) -> Path:
    return sorted((root / "commitlog").iterdir())[number]


@pytest.mark.parametrize("is_crashed", [False, True])
@pytest.mark.parametrize(
    "left", ["nothing", "in zeros", "in the first record", "in the last record", "a page"]
)
def test_the_only_file_was_cut(tmp_path: Path, left: str, is_crashed: bool):
    root = tmp_path / "s"
    places = make(root, 30)
    length = {
        "nothing": 0,
        "in zeros": SIZE - 536,
        "in the first record": 4,
        "in the last record": places[-1] + 4,
        "a page": 8192,
    }[left]
    os.truncate(log_file(root, 0), length)
    if is_crashed or left != "in zeros":
        crash(root)
    kept = sum(place + 459 <= length for place in places)
    with reopen(root) as store:
        assert store.reader.bounds(QUEUE) == ((0, kept) if kept else (0, 0))
        for _ in range(300):
            store.append(NewMessage("t", 0, b"y" * 300))
    assert sizes(root) == {SIZE}
    assert len(read_all(root)[QUEUE]) == kept + 300


@pytest.mark.parametrize("number", [0, 1, -1])
@pytest.mark.parametrize("length", [0, 3, SIZE // 2, SIZE - 100, 8192])
def test_one_of_several_files_was_cut(tmp_path: Path, number: int, length: int):
    root = tmp_path / "s"
    make(root, 600)
    assert len(sizes(root)) == 1
    os.truncate(log_file(root, number), length)
    assert inspect(str(root)).log_file_bytes == SIZE
    crash(root)
    with reopen(root) as store:
        for _ in range(300):
            store.append(NewMessage("t", 0, b"y" * 300))
    assert sizes(root) == {SIZE}
    read_all(root)


@pytest.mark.parametrize("count", [30, 600])
def test_a_longer_file_is_told_and_left_as_it_is(tmp_path: Path, count: int):
    root = tmp_path / "s"
    make(root, count)
    with log_file(root, -1).open("ab") as file:
        file.write(b"what is this" * 100)
    with pytest.raises(
        TieredStoreError, match=f"where those of its kind have {SIZE}.*truncate -s {SIZE}"
    ):
        reopen(root)
    os.truncate(log_file(root, -1), SIZE)
    with reopen(root) as store:
        assert store.reader.bounds(QUEUE) == (0, count)


def test_a_file_that_is_gone_makes_no_larger_size(tmp_path: Path):
    root = tmp_path / "s"
    make(root, 600)
    assert len(list((root / "commitlog").iterdir())) >= 4
    log_file(root, 1).unlink()
    for path in sorted((root / "commitlog").iterdir())[2:]:
        path.unlink()
    assert inspect(str(root)).log_file_bytes == SIZE
    with pytest.raises(TieredStoreError, match="hole"):
        reopen(root)


@pytest.mark.parametrize("cut", [65_000, 40_960])
def test_a_brokers_only_file_that_was_cut_is_refused(tmp_path: Path, cut: int):
    """Nothing tells the size of a broker's files but their length."""
    root = tmp_path / "s"
    make(root, 300)
    (root / "config" / "tieredStore.json").unlink()
    for path in sorted((root / "commitlog").iterdir())[1:]:
        path.unlink()
    os.truncate(log_file(root, 0), cut)
    crash(root)
    before = {path: path.stat().st_size for path in root.rglob("*") if path.is_file()}
    with pytest.raises(InvalidError, match=r"was cut.*truncate"):
        reopen(root)
    assert {path: path.stat().st_size for path in root.rglob("*") if path.is_file()} == before
    os.truncate(log_file(root, 0), SIZE)
    with reopen(root) as store:
        for _ in range(300):
            store.append(NewMessage("t", 0, b"y" * 300))
    assert sizes(root) == {SIZE}


def test_a_brokers_only_file_that_is_whole_tells_the_size(tmp_path: Path):
    root = tmp_path / "s"
    make(root, 30)
    (root / "config" / "tieredStore.json").unlink()
    with reopen(root) as store:
        for _ in range(300):
            store.append(NewMessage("t", 0, b"y" * 300))
    assert sizes(root) == {SIZE}


@pytest.mark.parametrize("is_made", [True, False])
@pytest.mark.parametrize("items", [7.5, 12])
def test_a_queues_only_file_was_cut(tmp_path: Path, is_made: bool, items: float):
    root = tmp_path / "s"
    make(root, 30)
    with reopen(root) as store:
        store.append(NewMessage("u", 0, b"x"))
    if not is_made:
        (root / "config" / "tieredStore.json").unlink()
    path = root / "consumequeue" / "t" / "0" / f"{0:020d}"
    size = path.stat().st_size
    os.truncate(path, int(items * 20))
    with reopen(root) as store:
        for _ in range(100):
            store.append(NewMessage("t", 0, b"y"))
    assert sizes(root, "consumequeue/t/0") == {size}
    assert len(read_all(root)[QUEUE]) == 130


def test_a_live_brokers_log_with_a_short_file_is_read(tmp_path: Path):
    broker = FakeBroker(tmp_path / "store")
    broker.put(3000)
    files = sorted((broker.store / "commitlog").iterdir())
    assert len(files) > 2
    size = files[0].stat().st_size
    for cut in (0, 100, size - 1):
        copy = tmp_path / f"copy{cut}"
        shutil.copytree(broker.store, copy)
        os.truncate(copy / "commitlog" / files[-1].name, cut)
        assert inspect(str(copy)).log_file_bytes == size


def found_by_key(store: MessageStore) -> list[int]:
    return [one.physical_offset for one in store.reader.by_key("t", "k", count_max=2000)]


@pytest.mark.parametrize("cut", [1, 880, 4096])
@pytest.mark.parametrize("which", [0, -1])
def test_an_index_file_that_was_cut_is_made_anew(tmp_path: Path, cut: int, which: int):
    root = tmp_path / "s"
    places = make(root, 450)
    files = sorted((root / "index").iterdir())
    length = files[0].stat().st_size
    assert len(files) > 1
    os.truncate(files[which], cut)
    for _ in range(2):
        with reopen(root) as store:
            assert sorted(found_by_key(store)) == places
            places.append(store.append(NewMessage("t", 0, b"y", keys="k")).physical_offset)
    assert sizes(root, "index") == {length}


@pytest.mark.parametrize("what", ["consumequeue/t/0", "index"])
def test_lists_that_are_made_anew_survive_a_crash_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
):
    root = tmp_path / "s"
    places = make(root, 60)
    first = min((root / what).iterdir())
    os.truncate(first, 40)

    class CrashError(Exception):
        pass

    def crashed(name: str) -> None:
        if name == "store-lists-cut":
            raise CrashError

    with monkeypatch.context() as patched:
        patched.setattr("tiered.store.opening.reached", crashed)
        with pytest.raises(CrashError):
            reopen(root)
    with reopen(root) as store:
        assert store.reader.bounds(QUEUE)[1] == 60
        assert sorted(found_by_key(store)) == places
        store.append(NewMessage("t", 0, b"y", keys="k"))
    assert len(read_all(root)[QUEUE]) == 61
