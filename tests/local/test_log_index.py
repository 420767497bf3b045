"""Consume queues as an index of the log: what they say spares walking it, and rules over nothing."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support import captures, following

from tiered.errors import InvalidError
from tiered.format.items import ITEM
from tiered.format.record import SIZE_AND_MAGIC
from tiered.local import chunks as log_index
from tiered.local.chunks import LogChunks
from tiered.local.chunks import following as next_of
from tiered.local.consumequeues import PlainQueue
from tiered.local.mapped_file_queue import FileCache
from tiered.local.views import DeadView

if TYPE_CHECKING:
    from pathlib import Path

    from tiered.local.rocketmq import RocketMQStore
    from tiered.local.views import View


def walked(view: View, window_bytes: int, *, is_told: bool) -> list[int]:
    """Where each record of the log begins."""
    chunks = LogChunks(view.log, view.log_index() if is_told else None)
    found, at = [], view.log_min
    while at is not None and at < view.log_end:
        chunk = chunks.read(at, view.log_end, window_bytes)
        found += (chunk.block.positions + chunk.start).tolist()
        at = next_of(chunk)
    return found


@pytest.fixture(scope="module", params=captures.NAMES)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp(request.param)
    store = following.open_store(following.unpack(request.param, folder))
    yield store
    store.close()


@pytest.mark.parametrize("span", [1, 10_000, 64 << 20])
def test_places_are_where_records_begin(
    store: RocketMQStore, span: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(log_index, "_SPAN_BYTES", span)
    monkeypatch.setattr(log_index, "_UNITS_MIN", 2)
    view = store.current_view()
    expected = walked(view, 1 << 20, is_told=False)
    assert walked(view, 3_000, is_told=True) == expected
    index, found, step = view.log_index(), [], 7_000
    for start in range(view.log_min, view.log_end, step):
        end = min(start + step, view.log_end)
        found += index.places(start, end, view.log_end).tolist()
    assert found == sorted(found)
    assert set(expected) >= set(found)
    unlisted = len(set(expected) - set(found))  # a crash has lost some entries
    assert unlisted <= len(expected) // 10, f"{unlisted} of {len(expected)} are walked one by one"


def test_a_window_that_tiles_is_not_walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = following.open_store(following.unpack("s01-basic", tmp_path))
    view = store.current_view()
    asked = []

    class Counted:
        size = SIZE_AND_MAGIC.size

        def unpack_from(self, data: memoryview, at: int) -> tuple[int, int]:
            asked.append(at)
            return SIZE_AND_MAGIC.unpack_from(data, at)

    monkeypatch.setattr("tiered.format.block.SIZE_AND_MAGIC", Counted())
    assert len(walked(view, 1 << 20, is_told=True)) > 20 * len(asked)
    store.close()


def test_what_is_not_written_yet_is_read_once_it_is_and_what_cannot_be_read_is_left_out(
    tmp_path: Path,
):
    folder = tmp_path / "0"
    folder.mkdir()
    units = np.zeros(300, ITEM)
    units["physical_offset"][:10], units["size"][:10] = np.arange(10) * 100, 100

    def write() -> None:
        (folder / "0".zfill(20)).write_bytes(units.tobytes())

    class Unreadable(PlainQueue):
        def units(self, first: int, last: int) -> np.ndarray:
            raise InvalidError("cannot read the store")

    write()
    with closing(FileCache()) as cache:
        kinds = (Unreadable, PlainQueue)
        queues = [(kind(cache, str(folder), units.nbytes), 0) for kind in kinds]
        index = log_index.LogIndex(lambda: queues)
        assert index.places(0, 1_000, 1_000).tolist() == list(range(0, 1_000, 100))
        units["physical_offset"][10:20], units["size"][10:20] = np.arange(10, 20) * 100, 100
        write()
        assert index.places(1_000, 2_000, 2_000).tolist() == list(range(1_000, 2_000, 100))


def test_entries_that_lie_cost_a_walk_and_nothing_else(tmp_path: Path):
    """Places that are damaged, doubled or out of order: the same messages come."""
    folder = following.unpack("s01-basic", tmp_path)
    expected = following.expected("s01-basic").messages

    class Lying(log_index.LogIndex):
        def places(self, start: int, end: int, limit: int) -> np.ndarray:
            found = super().places(start, end, limit)
            return np.sort(np.concatenate((found[::3], found[::2] + 5, found[:4])))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiered.local.views.LogIndex", Lying)
        store = following.open_store(folder)
        assert following.follow_all(store, 5_000).messages == expected
        store.close()


# -- what is listed without a gap has no orphans ---------------------------------------------------


def scanned(folder: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether opening a stopped store walks the log below recovery's start; all messages come either way."""
    walks = []
    scan = DeadView._scan
    monkeypatch.setattr(
        DeadView, "_scan", lambda view, *span: (walks.append(span), scan(view, *span))
    )
    store = following.open_store(folder)
    assert following.follow_all(store).messages == following.expected("s01-basic").messages
    store.close()
    return bool(walks)


def test_a_log_that_is_listed_without_a_gap_is_not_walked_at_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert not scanned(following.unpack("s01-basic", tmp_path), monkeypatch)


@pytest.mark.parametrize("bit", [70, 100])  # of its size, of its place
def test_one_entry_that_lies_has_the_log_walked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bit: int
):
    folder = following.unpack("s01-basic", tmp_path)
    queue = min(following.expected("s01-basic").messages)
    following.flip_entry(folder, queue, 3, bit)
    assert scanned(folder, monkeypatch)


def test_an_entry_that_is_gone_or_there_twice_has_the_log_walked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    queue = min(following.expected("s01-basic").messages)
    for name, source in (("gone", bytes(20)), ("twice", None)):
        folder = following.unpack("s01-basic", tmp_path / name)
        file = min((folder / "consumequeue" / queue.topic / str(queue.queue_id)).iterdir())
        data = bytearray(file.read_bytes())
        data[60:80] = data[40:60] if source is None else source
        file.write_bytes(data)
        assert scanned(folder, monkeypatch), name


def test_files_of_two_queues_that_changed_places_have_the_log_walked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Every record is listed once then, too: by another queue."""
    folder = following.unpack("s01-basic", tmp_path)
    one, other = sorted(following.expected("s01-basic").messages)[:2]
    files = [
        min((folder / "consumequeue" / queue.topic / str(queue.queue_id)).iterdir())
        for queue in (one, other)
    ]
    data = [file.read_bytes() for file in files]
    for file, mine in zip(files, reversed(data), strict=True):
        file.write_bytes(mine)
    assert scanned(folder, monkeypatch)


@pytest.mark.parametrize(("one", "other"), [(3, 5), (3, 4), (0, 9)])
def test_entries_that_changed_places_within_a_queue_come_to_the_same_without_a_walk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one: int, other: int
):
    """Each record is listed once, and two at each other's offset: whoever follows meets them, and decides as a walk does."""
    queue = min(following.expected("s01-basic").messages)
    found = []
    for name in ("walked", "tiled"):
        folder = following.unpack("s01-basic", tmp_path / name)
        file = min((folder / "consumequeue" / queue.topic / str(queue.queue_id)).iterdir())
        items = np.frombuffer(file.read_bytes(), ITEM).copy()
        items[[one, other]] = items[[other, one]]
        file.write_bytes(items.tobytes())
        if name == "tiled":
            monkeypatch.undo()
        else:
            monkeypatch.setattr(DeadView, "_is_tiled", lambda *_: False)
        store = following.open_store(folder)
        taken = following.follow_all(store)
        following.check_complete(store, taken)
        found.append((taken.messages, taken.holes, following.read_all(store).messages))
        store.close()
    assert found[0] == found[1]
