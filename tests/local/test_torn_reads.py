"""Readings that fall into the middle of a broker's write: what comes of them is what the broker wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support import following
from support.broker_files import TOPIC, FakeBroker

from tiered.clock import ManualClock
from tiered.format.properties import tag_hash
from tiered.local import views
from tiered.local.chunks import Chunk, LogChunks
from tiered.local.mapped_file_queue import MappedFileQueue
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tiered.format.block import Groups, RecordBlock
    from tiered.local.catalog import Catalog
    from tiered.local.rocketmq import RocketMQStore

QUEUE = MessageQueue(TOPIC, 0)
OTHER = MessageQueue(TOPIC, 1)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[FakeBroker]:
    made = FakeBroker(tmp_path / "store")
    made.start()
    yield made
    made.close()


@pytest.fixture
def store(broker: FakeBroker) -> Iterator[RocketMQStore]:
    opened = following.open_store(broker.store, ManualClock())
    yield opened
    opened.close()


class Torn:
    """The next chunk of the log finds the bytes from ``start`` up to ``end`` not yet written.

    Attributes:
        times: How often that is still to happen.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, start: int, end: int) -> None:
        self.times = 1
        read_into = MappedFileQueue.read_into
        read_chunk = LogChunks.read

        def torn(row: MappedFileQueue, position: int, view: memoryview) -> int:
            count = read_into(row, position, view)
            view[start - position : end - position] = bytes(end - start)
            return count

        def read(chunks: LogChunks, position: int, *args: Any, **options: Any) -> Chunk:
            if not self.times:
                return read_chunk(chunks, position, *args, **options)
            self.times -= 1
            with monkeypatch.context() as patched:
                patched.setattr(MappedFileQueue, "read_into", torn)
                return read_chunk(chunks, position, *args, **options)

        monkeypatch.setattr(LogChunks, "read", read)


@pytest.mark.parametrize("before", [0, 3])
def test_a_record_read_while_its_properties_are_written(
    broker: FakeBroker, store: RocketMQStore, monkeypatch: pytest.MonkeyPatch, before: int
):
    """No checksum covers them, and by the time the consume queue is looked at the record is listed."""
    follower, taken = store.follow({}), following.Taken()
    broker.put(1)
    following.drain(follower, taken)
    written = [broker.append() for _ in range(before + 1)]
    broker.dispatch()
    torn = Torn(monkeypatch, broker.position - 4, broker.position)
    following.drain(follower, taken)
    assert torn.times == 0
    assert [taken.raw[QUEUE][offset] for offset in range(1, before + 2)] == written
    assert taken.offsets(QUEUE) == list(range(before + 2))


def test_a_record_torn_in_the_middle_of_a_chunk(
    broker: FakeBroker, store: RocketMQStore, monkeypatch: pytest.MonkeyPatch
):
    follower, taken = store.follow({}), following.Taken()
    broker.put(1)
    following.drain(follower, taken)
    written = [broker.append() for _ in range(2)]
    middle = broker.position
    written += [broker.append() for _ in range(3)]
    broker.dispatch()
    torn = Torn(monkeypatch, middle - 4, middle)
    following.drain(follower, taken)
    assert torn.times == 0
    assert [taken.raw[QUEUE][offset] for offset in range(1, 6)] == written


def test_a_queue_whose_directory_comes_between_the_readings_of_two(
    broker: FakeBroker, store: RocketMQStore, monkeypatch: pytest.MonkeyPatch
):
    """Its record is not listed when its queue is looked at, and a much later one of another queue is by then."""
    follower, taken = store.follow({}), following.Taken()
    broker.put(1)
    following.drain(follower, taken)
    broker.append(1)
    broker.now_ms += 5000
    broker.append()
    index_of, looked_at = views.match_states, [0]

    def written_meanwhile(catalog: Catalog, block: RecordBlock, groups: Groups) -> Any:
        looked_at[0] += 1
        if looked_at[0] > 1:
            return index_of(catalog, block, groups)
        first = index_of(catalog, block, groups.some([groups.queues.index(OTHER)]))
        broker.dispatch()
        return first + index_of(catalog, block, groups.some([groups.queues.index(QUEUE)]))

    monkeypatch.setattr(views, "match_states", written_meanwhile)
    following.drain(follower, taken)
    assert looked_at[0]
    assert taken.offsets(OTHER) == [0]
    assert taken.offsets(QUEUE) == [0, 1]


def test_an_entry_read_while_its_tag_code_is_written(broker: FakeBroker, store: RocketMQStore):
    follower, taken = store.follow({}), following.Taken()
    broker.put(2)
    file = broker.store / "consumequeue" / TOPIC / "0" / f"{0:020d}"
    whole = file.read_bytes()
    with file.open("r+b") as out:
        out.seek(36)
        out.write(bytes(4))
    following.drain(follower, taken)
    with file.open("r+b") as out:
        out.write(whole)
    broker.put(1)
    following.drain(follower, taken)
    codes = [taken.messages[QUEUE][offset].tag_code for offset in range(3)]
    assert codes == [tag_hash("a")] * 3
