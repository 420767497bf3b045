"""Which file a start begins with, and the small parts of reading."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tiered.errors import ClosedError, InvalidError
from tiered.format.broker_checkpoint import Checkpoint
from tiered.format.items import BATCH_ITEM
from tiered.local import mapped_file_queue as files
from tiered.local.chunks import FileHead, plan_start
from tiered.local.consumequeues import Entries, Rebuilt, best_division, consistent, no_entries
from tiered.local.layout import abort_mark, is_locked
from tiered.local.mapped_file_queue import FileCache, MappedFileQueue
from tiered.local.matching import runs
from tiered.local.queue_reader import GAP_BYTES_MIN, fill_times, plan_reads

if TYPE_CHECKING:
    from pathlib import Path

HOLDER = """
import fcntl, sys
lock = open(sys.argv[1], "r+")
fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
print("held", flush=True)
sys.stdin.read()
"""
HEADS = [FileHead(base, True, base, 1_000 + base) for base in range(1900, -1, -100)]


@pytest.mark.parametrize(
    ("listed_end", "base"), [(5000, 1900), (1850, 1800), (1200, 1200), (-1, 1000)]
)
def test_after_a_clean_stop_the_consume_queues_decide(listed_end: int, base: int):
    start = plan_start(HEADS[:10], is_clean=True, checkpoint=Checkpoint(), listed_end=listed_end)
    assert start == base


@pytest.mark.parametrize(
    ("checkpoint", "base"),
    [
        (Checkpoint(), 1000),
        (Checkpoint(logics_timestamp_ms=2_750), 1700),
        (Checkpoint(logics_timestamp_ms=9_999, logics_physical_offset=1_299), 1200),
        (Checkpoint(logics_timestamp_ms=1, logics_physical_offset=5_000), 1900),
    ],
)
def test_after_a_crash_the_checkpoint_decides(checkpoint: Checkpoint, base: int):
    start = plan_start(HEADS[:10], is_clean=False, checkpoint=checkpoint, listed_end=5000)
    assert start == base


def test_a_file_without_a_sound_first_record_does_not_qualify():
    heads = [FileHead(300, False), FileHead(200, True, 200, 0), FileHead(100, True, 100, 1)]
    assert plan_start(heads, is_clean=True, checkpoint=Checkpoint(), listed_end=999) == 100
    assert plan_start(heads[:1], is_clean=True, checkpoint=Checkpoint(), listed_end=999) == 300


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 3000)), min_size=1, max_size=40))
def test_planned_reads_cover_the_records_and_little_else(steps: list[tuple[int, int]]):
    place, places, sizes = 0, [], []
    for gap, size in steps:
        place += gap
        if place % 10_000 + size > 10_000:
            place = place // 10_000 * 10_000 + 10_000
        places.append(place)
        sizes.append(size)
        place += size
    reads = plan_reads(np.array(places), np.array(sizes, np.int32), np.array(places) % 10_000)
    assert [first for first, *_ in reads] == [0, *(last for _, last, *_ in reads[:-1])]
    for first, last, start, end in reads:
        assert (start, end) == (places[first], places[last - 1] + sizes[last - 1])
        assert start // 10_000 == (end - 1) // 10_000
        wanted = sum(sizes[first:last])
        assert end - start <= 3 * wanted + GAP_BYTES_MIN * (last - first)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=20), st.integers(0, 30))
def test_rebuilt_entries_fill_in_and_the_first_claim_wins(
    claims: list[tuple[int, int]], start: int
):
    rebuilt, truth = Rebuilt(), {}
    for offset, size in claims:
        truth.setdefault(offset, size)
        rebuilt.add(
            np.array([offset]), np.array([offset * 10]), np.array([size], np.int32), np.array([7])
        )
    entries: Entries = no_entries(start, 12)
    rebuilt.fill(entries)
    assert entries.sizes.tolist() == [truth.get(offset, 0) for offset in range(start, start + 12)]
    bounds = rebuilt.bounds
    assert bounds == ((min(truth), max(truth) + 1) if truth else None)


@given(st.lists(st.integers(-1, 5), max_size=12))
def test_holes_take_the_time_of_a_neighbour(times: list[int]):
    given_times = np.array(times, np.int64)
    filled = fill_times(given_times, given_times >= 0).tolist()
    for at, time in enumerate(filled):
        before = [t for t in times[: at + 1] if t >= 0]
        after = [t for t in times[at:] if t >= 0]
        assert time == (before[-1] if before else after[0] if after else -1)


@given(st.lists(st.integers(0, 6) | st.sampled_from([-(2**63), 2**63 - 1]), max_size=15))
@example([2**63 - 1, -(2**63)])
def test_runs_follow_on(offsets: list[int]):
    found = runs(np.array(offsets, np.int64), None)
    assert [at for first, last in found for at in range(first, last)] == list(range(len(offsets)))
    for first, last in found:
        assert offsets[first:last] == list(range(offsets[first], offsets[first] + last - first))


@given(st.lists(st.sampled_from("lhu"), max_size=20))
def test_the_best_division(units: list[str]):
    lows, highs = (
        np.array([u == "l" for u in units], bool),
        np.array([u == "h" for u in units], bool),
    )

    def misplaced(at: int) -> int:
        return units[at:].count("l") + units[:at].count("h")

    assert best_division(lows, highs) == min(range(len(units) + 1), key=misplaced)


def test_the_lock_of_another_process_is_seen(tmp_path: Path):
    assert not is_locked(str(tmp_path))
    (tmp_path / "lock").write_text("lock")
    assert not is_locked(str(tmp_path))
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            HOLDER,
            str(tmp_path / "lock"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "held\n"
        assert is_locked(str(tmp_path))
    finally:
        holder.communicate()
    assert not is_locked(str(tmp_path))


def test_a_lock_of_this_process_is_seen_and_stays(tmp_path: Path):
    """A writer in the same process takes a lock of its open file, which looking does not drop."""
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    wanted = struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    fcntl.fcntl(lock, fcntl.F_OFD_SETLK, wanted)
    assert is_locked(str(tmp_path))
    assert is_locked(str(tmp_path))
    os.close(lock)
    assert not is_locked(str(tmp_path))


def test_the_abort_file_is_a_mark(tmp_path: Path):
    assert abort_mark(str(tmp_path)) is None
    (tmp_path / "abort").write_text("1")
    os.utime(tmp_path / "abort", ns=(5_000_001, 7_000_001))
    mark = abort_mark(str(tmp_path))
    assert mark is not None
    assert mark.started_ms == 7


def test_a_file_that_is_cut_or_gone_gives_less(tmp_path: Path):
    file = tmp_path / f"{0:020d}"
    file.write_bytes(b"a" * 100)
    cache = FileCache(4)
    row = MappedFileQueue(cache, str(tmp_path), 100)
    assert row.read(90, 50) == b"a" * 10
    file.write_bytes(b"b" * 95)
    assert row.read(90, 50) == b"b" * 5
    buffer = bytearray(20)
    assert row.read_into(85, memoryview(buffer)) == 10
    file.unlink()
    assert row.read(0, 1) == b"b"  # an open descriptor reads on
    assert row.rescan()
    assert row.read(0, 1) == b""
    assert row.bases == ()
    file.write_bytes(b"c" * 100)
    assert row.rescan()
    assert row.read(0, 1) == b"c"
    cache.close()
    with pytest.raises(ClosedError):
        row.read(0, 1)


def test_a_change_of_one_directory_costs_no_look_at_the_files_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """When many queues lose a file at once, each looked at every file that is open: the square of their number."""
    cache, rows = FileCache(100), []
    for number in range(50):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / f"{0:020d}").write_bytes(bytes([number]) * 100)
        rows.append(MappedFileQueue(cache, str(folder), 100))
        assert rows[-1].read(0, 1) == bytes([number])
    looked_at: list[int] = []
    fstat = os.fstat
    monkeypatch.setattr(os, "fstat", lambda at: looked_at.append(at) or fstat(at))
    (tmp_path / "7" / f"{0:020d}").unlink()
    assert rows[7].rescan()
    assert len(looked_at) == 1
    assert rows[7].read(0, 1) == b""
    assert cache.open_count == 49
    (tmp_path / "8" / f"{0:020d}").unlink()
    cache.drop_deleted()
    assert cache.open_count == 48
    cache.close()


def test_where_the_process_may_open_no_more_files_fewer_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The store could not be read: "Too many open files", while it held thousands that it did not need."""
    rows, cache, may = [], FileCache(1000), 10
    for number in range(40):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / f"{0:020d}").write_bytes(bytes([number]) * 100)
        rows.append(MappedFileQueue(cache, str(folder), 100))
    open_read_only = files.open_read_only

    def limited(path: str) -> int:
        if cache.open_count >= may:
            raise OSError(errno.EMFILE, "Too many open files")
        return open_read_only(path)

    monkeypatch.setattr(files, "open_read_only", limited)
    for _ in range(2):
        assert [row.read(0, 1)[0] for row in rows] == list(range(40))
    may = 0
    with pytest.raises(InvalidError, match="Too many"):
        rows[0].read(0, 1)
    assert cache.open_count == 0
    cache.close()


def test_reads_under_way_survive_being_dropped(tmp_path: Path):
    """More files than may be open, from several threads."""
    from concurrent.futures import ThreadPoolExecutor

    for base in range(0, 2000, 100):
        (tmp_path / f"{base:020d}").write_bytes(bytes([base // 100]) * 100)
    cache = FileCache(3)
    row = MappedFileQueue(cache, str(tmp_path), 100)

    def read(number: int) -> bool:
        base = number * 700 % 2000 // 100 * 100
        return row.read(base, 100) == bytes([base // 100]) * 100

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(2000)))
    assert cache.open_count <= 3
    cache.close()


@given(
    st.lists(st.integers(1, 9), min_size=4, max_size=30),
    st.integers(0, 29),
    st.integers(0, 300),
    st.integers(1, 9),
)
def test_a_damaged_unit_of_a_batch_queue_is_found(
    counts: list[int], at: int, base: int, count: int
):
    """Of units that follow on, one that was changed so that it overlaps others is the one that does not fit."""
    units = np.zeros(len(counts), BATCH_ITEM)
    units["count"] = counts
    units["base_offset"] = np.cumsum(counts) - counts
    assert consistent(units).all()
    at %= len(counts)
    truth = int(units["base_offset"][at])
    units["base_offset"][at], units["count"][at] = base, count
    others = np.delete(np.arange(len(counts)), at)
    if base + count <= truth or base >= truth + counts[at]:
        kept = consistent(units)
        assert kept[[i for i in others if abs(i - at) > 1]].all()


def test_a_damaged_unit_does_not_fit():
    units = np.zeros(5, BATCH_ITEM)
    units["count"] = 10
    units["base_offset"] = [150, 160, 0, 180, 190]
    assert consistent(units[:0]).tolist() == []
    assert consistent(units[:1]).tolist() == [True]
    assert consistent(units).tolist() == [True, True, False, True, True]
