"""Reads by queue offset, time, key and message id, held against plain lists."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.embedded import SMALL, create, reopen

from tiered.clock import ManualClock
from tiered.errors import InvalidError
from tiered.format.properties import java_hash
from tiered.model import Boundary, MessageQueue, QueueOffset
from tiered.store.keyindex import KeyIndex, index_paths
from tiered.store.listing import key_hash
from tiered.store.live_reading import Status
from tiered.store.new_message import Appended, NewMessage

if TYPE_CHECKING:
    from pathlib import Path

    from tiered.store.embedded import MessageStore

QUEUE = MessageQueue("t", 1)
FIRST = 7


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory):
    """A store and what was put: 300 messages in a queue that begins at 7, two to four at one time."""
    clock, rng = ManualClock(), random.Random(1)
    store = create(tmp_path_factory.mktemp("s") / "s", SMALL, clock)
    store.begin_queue(QUEUE, QueueOffset(FIRST))
    put: list[tuple[NewMessage, Appended, int]] = []
    while len(put) < 300:
        keys = " ".join(f"k{rng.randrange(40)}" for _ in range(rng.randrange(1, 4)))
        message = NewMessage("t", 1, rng.randbytes(rng.randrange(900)), keys=keys, tags="a")
        for _ in range(rng.randrange(1, 5)):
            put.append((message, store.append(message), int(clock.now_ms())))
            store.append(NewMessage("other", 0, b"", keys=keys))
        clock.advance(rng.choice((0.001, 0.7, 3)))
    assert store.wait_listed(timeout_s=1e6)
    yield store, put
    store.close()


Filled = tuple["MessageStore", list[tuple[NewMessage, Appended, int]]]


def test_by_queue_offset(filled: Filled):
    store, put = filled
    end = FIRST + len(put)
    at, bodies = FIRST, []
    while at < end:
        got = store.reader.get(QUEUE, at, count_max=11, bytes_max=3000)
        assert (got.status, got.min_offset, got.end_offset) == (Status.FOUND, FIRST, end)
        assert len(got.records) == 1 or sum(r.size for r in got.records) <= 3000
        assert [r.queue_offset for r in got.records] == list(range(at, got.next_offset))
        bodies += [r.body for r in got.records]
        at = got.next_offset
    assert bodies == [message.body for message, _, _ in put]


def test_statuses_and_next_offsets(filled: Filled):
    store, put = filled
    end = FIRST + len(put)

    def ask(queue: MessageQueue, offset: int) -> tuple[Status, int]:
        got = store.reader.get(queue, offset)
        return got.status, got.next_offset

    assert ask(MessageQueue("t", 9), 5) == (Status.NO_MATCHED_LOGIC_QUEUE, 0)
    assert ask(QUEUE, FIRST - 1) == (Status.OFFSET_TOO_SMALL, FIRST)
    assert ask(QUEUE, end) == (Status.OFFSET_OVERFLOW_ONE, end)
    assert ask(QUEUE, end + 1) == (Status.OFFSET_OVERFLOW_BADLY, end)


def test_by_time(filled: Filled):
    store, put = filled
    times = [time_ms for _, _, time_ms in put]
    assert len(set(times)) < len(times)
    for time_ms in {*times, times[0] - 1, times[-1] + 1, *(time_ms + 1 for time_ms in times)}:
        lower = next((at for at, one in enumerate(times) if one >= time_ms), len(times))
        upper = max((at for at, one in enumerate(times) if one <= time_ms), default=0)
        assert store.reader.offset_by_time(QUEUE, time_ms) == FIRST + lower
        assert store.reader.offset_by_time(QUEUE, time_ms, Boundary.UPPER) == FIRST + upper


def test_by_time_past_what_cannot_be_read(tmp_path: Path):
    clock = ManualClock()
    with create(tmp_path / "s", SMALL, clock) as store:
        put: list[tuple[Appended, int]] = []
        for _ in range(20):
            put.append((store.append(NewMessage("t", 1, b"x")), int(clock.now_ms())))
            clock.advance(1)
        assert store.wait_listed(timeout_s=1e6)
        bad = {5, 10, 11, 19}
        for at in bad:
            place = put[at][0].physical_offset
            names = sorted((tmp_path / "s" / "commitlog").iterdir())
            file = max(path for path in names if int(path.name) <= place)
            with file.open("r+b") as log:
                log.seek(place - int(file.name) + 4)
                log.write(b"\xff\xff\xff\xff")
        sound = [at for at in range(20) if at not in bad]
        for at, (_, time_ms) in enumerate(put):
            lower = next((one for one in sound if one >= at), 20)
            upper = max(one for one in sound if one <= at)
            assert store.reader.offset_by_time(QUEUE, time_ms) == lower
            assert store.reader.offset_by_time(QUEUE, time_ms, Boundary.UPPER) == upper


def test_by_key_in_many_files(filled: Filled):
    store, put = filled
    assert len(index_paths(store.root)) > 2
    middle = put[len(put) // 2][2]
    for number in range(41):
        for begin_ms, end_ms in ((0, 2**63 - 1), (middle, 2**63 - 1), (0, middle)):
            wanted = [
                where.physical_offset
                for message, where, time_ms in reversed(put)
                if f"k{number}" in (message.keys or "").split() and begin_ms <= time_ms <= end_ms
            ]
            found = store.reader.by_key("t", f"k{number}", begin_ms=begin_ms, end_ms=end_ms)
            assert [record.physical_offset for record in found] == wanted[:64]


def test_by_key_and_a_time_within_a_second(tmp_path: Path):
    clock = ManualClock()
    clock.advance(0.999)
    begin_ms = int(clock.now_ms())
    with create(tmp_path / "s", SMALL, clock) as store:
        store.append(NewMessage("t", 0, b"first", keys="other"))
        clock.advance(1.5)
        put = store.append(NewMessage("t", 0, b"x", keys="k"))
        assert store.wait_listed(timeout_s=1e6)
        for since_ms in (begin_ms, begin_ms + 1001, begin_ms + 1400, begin_ms + 1500):
            found = store.reader.by_key("t", "k", begin_ms=since_ms)
            assert [record.physical_offset for record in found] == [put.physical_offset]
        assert store.reader.by_key("t", "k", begin_ms=begin_ms + 1501) == []


def test_the_end_of_an_index_file_that_was_cut_is_known_to_the_second_only(tmp_path: Path):
    index = KeyIndex(str(tmp_path), 10, 100, ManualClock())
    index.put(np.array([5, 7]), np.array([100, 200]), np.array([1000, 3500]))
    index.cut(300)
    assert list(index.find(7, 3200, 4000)) == [200]
    assert list(index.find(7, 4000, 5000)) == []
    index.close()


def test_by_ids(filled: Filled):
    store, put = filled
    for _, where, _ in put[::37]:
        (found,) = store.reader.by_key("t", where.msg_id)
        assert found.physical_offset == where.physical_offset
        record = store.reader.by_offset_msg_id(where.offset_msg_id)
        assert record is not None
        assert record.queue_offset == where.queue_offset
    assert store.reader.by_offset_msg_id("7F00000100002A9F" + f"{store.log_end:016X}") is None
    assert store.reader.by_offset_msg_id("7F00000100002A9F" + f"{5:016X}") is None
    with pytest.raises(InvalidError):
        store.reader.by_offset_msg_id("xyz")


def test_hashes_are_those_of_java():
    assert key_hash("TopicTest", "k1") == 2_746_024
    assert java_hash("polygenelubricants") == -(1 << 31)
    assert key_hash("polygene", "x") == abs(java_hash("polygene#x"))


def test_keys_that_are_no_ascii_and_after_a_restart(tmp_path: Path):
    messages = [NewMessage("t", 0, b"x", keys="ключ 🚀 k"), NewMessage("t", 0, b"y", keys="k ключ")]
    with create(tmp_path / "s") as store:
        store.append_batch(messages)
    with reopen(tmp_path / "s") as store:
        for key, bodies in (("ключ", [b"y", b"x"]), ("🚀", [b"x"]), ("k", [b"y", b"x"])):
            assert [record.body for record in store.reader.by_key("t", key)] == bodies
