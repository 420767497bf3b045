"""A damaged record in the middle of a stopped store's log: what stands behind it waits, counted, and is not tiered."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from support import following

if TYPE_CHECKING:
    from pathlib import Path

MIDDLE = [("s08-crash-continue", 0.5), ("s09-big-offsets", 0.6), ("s03-transactions", 0.2)]


def places(name: str) -> dict[int, int]:
    """Where each record begins, and its size."""
    truth = following.expected(name)
    return {
        message.physical_offset: message.size
        for found in truth.messages.values()
        for message in found.values()
    }


def flip(directory: Path, place: int) -> Path:
    """One bit behind a record's header, where its CRC sees it; the file."""
    file = max(path for path in (directory / "commitlog").iterdir() if int(path.name) <= place)
    data = bytearray(file.read_bytes())
    data[place - int(file.name) + 8] ^= 4  # of the CRC itself
    file.write_bytes(data)
    return file


@pytest.mark.parametrize(("name", "share"), MIDDLE)
def test_what_stands_behind_a_damaged_record_waits(name: str, share: float, tmp_path: Path):
    directory = following.unpack(name, tmp_path)
    known = places(name)
    newest = max(int(path.name) for path in (directory / "commitlog").iterdir())
    last_file = [place for place in sorted(known) if place >= newest]
    place = last_file[int(share * len(last_file))]
    file = flip(directory, place)
    store = following.open_store(directory)
    taken, waiting = following.follow_all(store), store.waiting()
    store.close()
    took = {one.physical_offset for found in taken.messages.values() for one in found.values()}
    assert took == {one for one in known if one < place}
    assert waiting.records == sum(one >= place for one in known) > 1
    assert f"{file}, byte {place - newest}" in waiting.reason
    assert waiting.size_bytes == sum(size for one, size in known.items() if one > place)


@pytest.mark.parametrize("is_clean", [True, False])
def test_a_damaged_last_record_is_the_torn_tail_of_a_crash_only(is_clean: bool, tmp_path: Path):
    directory = following.unpack("s09-big-offsets", tmp_path)
    (directory / "abort").unlink(missing_ok=True)
    if not is_clean:
        (directory / "abort").write_text("1")
    flip(directory, max(places("s09-big-offsets")))
    store = following.open_store(directory)
    assert store.waiting().records == is_clean
    assert store.report().torn_bytes > 0
    store.close()


@pytest.mark.parametrize("behind", [0, 50_000, 150_000])
def test_bytes_behind_a_hole_are_torn_too(behind: int, tmp_path: Path):
    """A log's file is mostly a hole, which is not read; what was written behind it is found all the same."""
    directory = following.unpack("s09-big-offsets", tmp_path)
    (directory / "abort").write_text("1")
    path = max((directory / "commitlog").iterdir())
    store = following.open_store(directory)
    end = store.report().log_end
    assert store.report().torn_bytes == 0
    store.close()
    size = path.stat().st_size
    assert end - int(path.name) + behind + 100 < size
    with path.open("r+b") as file:
        file.truncate(end - int(path.name))
        file.truncate(size)
        file.seek(end - int(path.name) + behind + 100)
        file.write(b"x")
    store = following.open_store(directory)
    assert store.report().log_end == end
    assert store.report().torn_bytes == behind + 101
    store.close()


def test_what_an_earlier_start_has_given_up_does_not_wait(tmp_path: Path):
    """Behind the last new record stand older ones, sound and listed, which came to life again by chance."""
    name = "s08-crash-continue"
    directory = following.unpack(name, tmp_path)
    truth = following.expected(name)
    messages = [one for found in truth.messages.values() for one in found.values()]
    newest = max(messages, key=lambda one: (one.store_timestamp_ms, one.physical_offset))
    behind = [one for one in messages if one.physical_offset > newest.physical_offset]
    assert len(behind) == 60
    flip(directory, newest.physical_offset)
    store = following.open_store(directory)
    assert store.report().log_end == newest.physical_offset
    assert store.waiting().records == 0
    store.close()


@pytest.mark.parametrize("what", ["gone", "zeros", "cut"])
@pytest.mark.parametrize("is_clean", [True, False])
def test_what_the_log_has_not_though_it_was_stopped_cleanly_is_told(
    what: str, is_clean: bool, tmp_path: Path
):
    """A file of the log is gone, or zeros: what was listed there is missed, unless a crash may have taken it."""
    name = "s09-big-offsets"
    directory = following.unpack(name, tmp_path)
    if not is_clean:
        (directory / "abort").write_text("1")
    path, known = max((directory / "commitlog").iterdir()), places(name)
    size = path.stat().st_size
    low, cut = int(path.name), sorted(one for one in known if one >= int(path.name))[100]
    if what == "gone":
        path.unlink()
    else:
        low = low if what == "zeros" else cut
        with path.open("r+b") as file:
            file.truncate(low - int(path.name))
            file.truncate(size)
    store = following.open_store(directory)
    taken, waiting = following.follow_all(store), store.waiting()
    notes = " ".join(store.report().notes)
    store.close()
    took = {one.physical_offset for found in taken.messages.values() for one in found.values()}
    assert took == {one for one in known if one < low}
    assert waiting.records == (sum(one >= low for one in known) if is_clean else 0)
    assert (
        max(one.name for one in (directory / "commitlog").iterdir()) in waiting.reason
    ) == is_clean
    gone = sum(one >= low for one in known)
    assert (f"list {gone} records behind the log's end" in notes) == (not is_clean)


@pytest.mark.parametrize("is_clean", [True, False])
def test_what_stands_behind_damage_is_told_though_no_consume_queue_lists_it(
    is_clean: bool, tmp_path: Path
):
    """The checkpoint of a clean stop says that the log went on; how many records there were nobody knows."""
    directory = following.unpack("s09-big-offsets", tmp_path)
    shutil.rmtree(directory / "consumequeue")
    if not is_clean:
        (directory / "abort").write_text("1")
    place = sorted(places("s09-big-offsets"))[-50]  # in the last file, which every start looks at
    file = flip(directory, place)
    store = following.open_store(directory)
    assert store.report().log_end == place
    assert store.waiting().records == is_clean
    assert (f"{file}, byte {place - int(file.name)}" in store.waiting().reason) == is_clean
    store.close()
