"""Entries that name what is not theirs: nothing of it is given, by offset, by time or by key, and every read goes on."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from support.embedded import batch, create, reopen

from tiered.clock import ManualClock
from tiered.format.items import BATCH_ITEM, ITEM_BYTES
from tiered.model import MessageQueue
from tiered.store.live_reading import Status
from tiered.store.new_message import Appended, NewMessage

if TYPE_CHECKING:
    from pathlib import Path

    from tiered.store.embedded import MessageStore

MINE, OTHER = MessageQueue("t", 0), MessageQueue("u", 1)
COUNT = 12


@dataclass
class Filled:
    root: Path
    mine: list[Appended]
    others: list[Appended]
    times_ms: list[int]

    def list(self, at: int, place: int, size: int) -> None:
        """Write the entry of a queue offset."""
        path = self.root / "consumequeue" / "t" / "0" / f"{0:020d}"
        with path.open("r+b") as file:
            file.seek(at * ITEM_BYTES)
            file.write(place.to_bytes(8, "big", signed=True) + size.to_bytes(4, "big", signed=True))


@pytest.fixture
def filled(tmp_path: Path) -> Filled:
    clock = ManualClock()
    found = Filled(tmp_path / "s", [], [], [])
    with create(found.root, clock=clock) as store:
        for number in range(COUNT):
            found.others.append(store.append(NewMessage("u", 1, b"other", keys=f"u{number}")))
            found.mine.append(store.append(NewMessage("t", 0, b"mine", keys=f"k{number}")))
            found.times_ms.append(int(clock.now_ms()))
            clock.advance(1)
    return found


def read_out(store: MessageStore, queue: MessageQueue, count_max: int) -> list[int]:
    """The queue offsets of all messages that a reader is given who goes on as it is told."""
    at, given = 0, list[int]()
    for _ in range(200):
        got = store.reader.get(queue, at, count_max=count_max)
        if got.status is Status.OFFSET_OVERFLOW_ONE:
            return given
        assert got.next_offset > at, got
        assert bool(got.records) == (got.status is Status.FOUND)
        assert {(record.topic, record.queue_id) for record in got.records} <= {
            (queue.topic, queue.queue_id)
        }
        offsets = [record.queue_offset for record in got.records]
        assert all(at <= offset < got.next_offset for offset in offsets), got
        given += offsets
        at = got.next_offset
    raise AssertionError("a reader that goes on as it is told comes to no end")


def spoil(filled: Filled, kind: str) -> set[int]:
    """Spoil entries; the queue offsets that have no message of their own from then on."""
    mine, others = filled.mine, filled.others
    wrong = {
        "another queue's": {4: (others[1].physical_offset, others[1].size_bytes)},
        "another queue's, of a place behind": {
            4: (others[9].physical_offset, others[9].size_bytes)
        },
        "its own of before": {7: (mine[2].physical_offset, mine[2].size_bytes)},
        "its own of behind": {2: (mine[7].physical_offset, mine[7].size_bytes)},
        "the one before, twice": {
            5: (mine[4].physical_offset, mine[4].size_bytes),
            6: (mine[4].physical_offset, mine[4].size_bytes),
        },
        "the middle of a record": {4: (mine[4].physical_offset + 9, mine[4].size_bytes)},
        "two records at once, of another": {
            4: (others[4].physical_offset, others[4].size_bytes + mine[4].size_bytes)
        },
        "beyond the log": {4: (1 << 40, 100)},
        "beyond the log, the last": {COUNT - 1: (1 << 40, 100)},
        "above the last record": {4: (60_000, 100)},
        "below zero": {4: (-1, 100)},
        "a size below zero": {4: (others[4].physical_offset, -5)},
        "nothing": {0: (0, 0), 4: (0, 0), 5: (0, 0)},
        "all of them another's": {
            at: (others[at].physical_offset, others[at].size_bytes) for at in range(COUNT)
        },
    }[kind]
    for at, (place, size) in wrong.items():
        filled.list(at, place, size)
    return set(wrong)


KINDS = (
    "another queue's",
    "another queue's, of a place behind",
    "its own of before",
    "its own of behind",
    "the one before, twice",
    "the middle of a record",
    "two records at once, of another",
    "beyond the log",
    "above the last record",
    "below zero",
    "a size below zero",
    "nothing",
    "all of them another's",
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_foreign_record_is_never_given_and_every_read_goes_on(filled: Filled, kind: str):
    with reopen(filled.root) as store:  # the ends have been read: now the entries change
        gone = spoil(filled, kind)
        kept = [at for at in range(COUNT) if at not in gone]
        for count_max in (1, 3, 32):
            assert read_out(store, MINE, count_max) == kept
            assert read_out(store, OTHER, count_max) == list(range(COUNT))


@pytest.mark.parametrize("kind", KINDS)
def test_times_and_keys_mean_only_what_the_queue_lists(filled: Filled, kind: str):
    with reopen(filled.root) as store:
        gone = spoil(filled, kind)
        kept = [at for at in range(COUNT) if at not in gone]
        for at, time_ms in enumerate(filled.times_ms):
            assert store.reader.offset_by_time(MINE, time_ms) == min(
                (one for one in kept if one >= at), default=COUNT
            )
            by_key = [record.queue_offset for record in store.reader.by_key("t", f"k{at}")]
            assert by_key == ([at] if at in kept else [])
            assert len(store.reader.by_key("u", f"u{at}")) == 1
        block = store.reader.block(MINE, 0, COUNT)
        assert block.queue_offsets.tolist() == kept


def test_a_stale_end_of_a_queue_after_a_lost_end_of_the_log(filled: Filled):
    """As a broker leaves it: the log lost its end, others were stored there since, the queue still lists what was there."""
    folder = filled.root / "consumequeue" / "t" / "0"
    with reopen(filled.root) as store:
        later = [store.append(NewMessage("t", 0, b"lost")) for _ in range(5)]
    shutil.copytree(folder, filled.root.parent / "stale")
    log = filled.root / "commitlog" / f"{0:020d}"
    with log.open("r+b") as file:
        file.seek(later[0].physical_offset)
        file.write(bytes(sum(place.size_bytes for place in later)))
    (filled.root / "checkpoint").unlink()  # else the loss is told, and nothing opened
    with reopen(filled.root) as store:  # it is recovered: the queue ends where the log does
        assert store.reader.bounds(MINE) == (0, COUNT)
        for _ in range(9):
            store.append(NewMessage("u", 1, b"lost"))
    shutil.rmtree(folder)
    shutil.copytree(filled.root.parent / "stale", folder)
    with reopen(filled.root) as store:
        for count_max in (1, 32):
            assert read_out(store, MINE, count_max) == list(range(COUNT))
            assert read_out(store, OTHER, count_max) == list(range(COUNT + 9))
        assert store.append(NewMessage("t", 0, b"new")).queue_offset == COUNT + 5
        assert store.wait_listed(timeout_s=1e6)
        assert read_out(store, MINE, 2) == [*range(COUNT), COUNT + 5]


def test_units_of_a_batch_queue_that_name_others(tmp_path: Path):
    with create(tmp_path / "s") as store:
        store.create_topic("grouped", queues=2, is_batch=True)
        for _ in range(4):
            store.append_as_is(batch(store, 3))
        other = store.append(NewMessage("u", 1, b"other"))
        queue = MessageQueue("grouped", 1)
        assert store.wait_listed(timeout_s=1e6)
        assert read_out(store, queue, 1) == [0, 3, 6, 9]
        path = tmp_path / "s" / "batchconsumequeue" / "grouped" / "1" / f"{0:020d}"
        with path.open("r+b") as file:
            file.seek(BATCH_ITEM.itemsize)
            file.write(other.physical_offset.to_bytes(8, "big"))
            file.write(other.size_bytes.to_bytes(4, "big"))
        for count_max in (1, 2, 32):
            assert read_out(store, queue, count_max) == [0, 6, 9]
