"""What is appended comes back, field by field, in the places that the receipts say."""

from __future__ import annotations

import errno
import itertools
import threading
from typing import TYPE_CHECKING

import pytest
from support.embedded import SMALL, SYNC, create, reopen
from support.stored import KINDS, RETRY, check_same, read_all, without_cluster

from tiered.errors import ClosedError, InvalidError, StoreUnavailableError
from tiered.format.broker_checkpoint import decode_checkpoint
from tiered.format.fastjson import loads
from tiered.local.rocketmq import RocketMQStore
from tiered.model import MessageQueue, QueueOffset
from tiered.store import disk
from tiered.store.new_message import Appended, NewMessage
from tiered.store.store_options import StoreOptions

if TYPE_CHECKING:
    from pathlib import Path


def check_all(root: Path, put: list[tuple[NewMessage, Appended]]) -> None:
    """The store holds exactly what was put."""
    found = read_all(root)
    assert sum(map(len, found.values())) == len(put)
    for message, where in put:
        record = found[MessageQueue(message.topic, message.queue_id)][where.queue_offset]
        check_same(without_cluster(message), where, record)


@pytest.mark.parametrize("options", [SMALL, SYNC], ids=["async", "sync"])
def test_messages_of_all_kinds_come_back(tmp_path: Path, options: StoreOptions):
    root = tmp_path / "s"
    put: list[tuple[NewMessage, Appended]] = []
    for times in (120, 3):
        with create(root, options) if not put else reopen(root, options) as store:
            assert store.recovered is None
            for _ in range(times):
                put += zip(KINDS, store.append_batch(KINDS), strict=True)
            put.append((KINDS[0], store.append(KINDS[0])))
        assert not (root / "abort").exists()
        check_all(root, put)
    assert len(list((root / "commitlog").iterdir())) > 2
    assert len(list((root / "index").iterdir())) > 1
    checkpoint = decode_checkpoint((root / "checkpoint").read_bytes())
    assert checkpoint.logics_physical_offset == max(
        where.physical_offset + where.size_bytes for _, where in put
    )


@pytest.mark.parametrize("options", [SMALL, SYNC], ids=["async", "sync"])
def test_many_threads(tmp_path: Path, options: StoreOptions):
    put: list[tuple[NewMessage, Appended]] = []
    with create(tmp_path / "s", options) as store:

        def work(number: int) -> None:
            for at in range(40):
                messages = [NewMessage("t", at % 3, f"{number}-{at}".encode(), keys=f"k{at}")] * 2
                put.extend(zip(messages, store.append_batch(messages), strict=True))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(put) == 640
    check_all(tmp_path / "s", put)


def test_a_running_store_is_live_and_readers_follow_it(tmp_path: Path):
    with create(tmp_path / "s") as store:
        reader = RocketMQStore.open(tmp_path / "s")
        for count in range(1, 20):
            store.append(NewMessage("t", 1, b"x" * count * 20))
            assert store.wait_listed()
            reader.refresh()
            assert reader.identity.is_live
            assert reader.queues()[MessageQueue("t", 1)].end == count
        reader.close()
        assert (tmp_path / "s" / "abort").exists()
    with pytest.raises(ClosedError):
        store.append(NewMessage("t", 0, b""))


def test_a_reader_sees_the_newest_file_of_a_running_store_with_its_first_refresh(tmp_path: Path):
    """A store on which somebody has just started, and nothing was appended since: nothing waits, nothing is missing."""
    queue = MessageQueue("t", 0)
    with create(tmp_path / "s") as store:
        store.append_batch([NewMessage("t", 0, b"x" * 1000)] * 150)
    with reopen(tmp_path / "s"):
        reader = RocketMQStore.open(tmp_path / "s")
        first = reader.queues()[queue].end
        reader.refresh()
        assert 100 < first < reader.queues()[queue].end == 150
        assert reader.waiting().records == 0
        reader.close()


@pytest.mark.parametrize(
    "message",
    [
        NewMessage("", 0, b""),
        NewMessage("a/b", 0, b""),
        NewMessage("ünicode", 0, b""),
        NewMessage("t\n", 0, b""),
        NewMessage("t" * 128, 0, b""),
        NewMessage("%DLQ%" + "g" * 123, 0, b""),
        NewMessage(RETRY + "g", 0, b""),
        NewMessage("t", -1, b""),
        NewMessage("t", 65_536, b""),
        NewMessage("t", 0, b"x" * 4097),
        NewMessage("t", 0, b"", flag=1 << 31),
        NewMessage("t", 0, b"", born_timestamp_ms=1 << 63),
        NewMessage("t", 0, b"", born_host="localhost:1"),
        NewMessage("t", 0, b"", born_host="1.2.3.4"),
        NewMessage("t", 0, b"", sys_flag=0x80),
        NewMessage("t", 0, b"", sys_flag=0x4),
        NewMessage("t", 0, b"", sys_flag=0xC),
        NewMessage("t", 0, b"", sys_flag=-1),
        NewMessage("t", 0, b"", tags=""),
        NewMessage("t", 0, b"", tags="a\x01b"),
        NewMessage("t", 0, b"", keys="a\x02"),
        NewMessage("t", 0, b"", properties={"": "x"}),
        NewMessage("t", 0, b"", properties={"a\x01b\x02c": "x"}),
        NewMessage("t", 0, b"", properties={"x": "\ud800"}),
        NewMessage("t", 0, b"", properties={"TAGS": "a"}, tags="b"),
        NewMessage("t", 0, b"", properties={"x": "y" * 32_768}),
        NewMessage("t", 0, b"", reconsume_times=-1),
    ],
    ids=map(str, itertools.count()),
)
def test_what_is_refused_leaves_nothing(tmp_path: Path, message: NewMessage):
    options = StoreOptions(4096 * 20, 7, 100, 400, message_bytes_max=4096)
    with create(tmp_path / "s", options) as store:
        with pytest.raises(InvalidError):
            store.append_batch([NewMessage("good", 0, b""), message])
        assert store.log_end == 0
        put = store.append(NewMessage("good", 0, b""))
        assert (put.queue_offset, put.physical_offset) == (0, 0)
    table = loads((tmp_path / "s" / "config" / "topics.json").read_bytes())["topicConfigTable"]
    assert "good" in table
    assert message.topic == "t" or message.topic not in table


@pytest.mark.parametrize("offset", [1, 49, 50, 51, 1_000_003])
def test_a_queue_that_does_not_begin_at_0(tmp_path: Path, offset: int):
    queue = MessageQueue("far", 2)
    with create(tmp_path / "s") as store:
        store.append(NewMessage("near", 0, b"in front"))
        store.begin_queue(queue, QueueOffset(offset))
        put = [store.append(NewMessage("far", 2, b"x")).queue_offset for _ in range(60)]
        with pytest.raises(InvalidError):
            store.begin_queue(queue, QueueOffset(0))
    assert put == list(range(offset, offset + 60))
    with reopen(tmp_path / "s") as store:
        assert store.append(NewMessage("far", 2, b"x")).queue_offset == offset + 60
    assert list(read_all(tmp_path / "s")[queue]) == list(range(offset, offset + 61))
    first = min((tmp_path / "s" / "consumequeue" / "far" / "2").iterdir())
    assert int(first.name) == offset // 50 * 1000


@pytest.mark.parametrize("size", [300, 30_000], ids=["joined", "piece by piece"])
def test_a_full_disk_refuses_and_the_next_append_goes_on(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Half a batch that reached the file before the disk was full is truncated."""
    body = b"x" * size
    real, calls = disk.os.pwrite, []

    def refuse(descriptor: int, data: memoryview | list[bytes], at: int) -> int:
        calls.append(at)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        raw = b"".join(data) if isinstance(data, list) else data
        return real(descriptor, raw[: len(raw) // 2], at)

    with create(tmp_path / "s") as store:
        put = [(NewMessage("t", 0, b"a"), store.append(NewMessage("t", 0, b"a")))]
        assert store.wait_listed()
        with monkeypatch.context() as patch:
            patch.setattr(disk.os, "pwrite", refuse)
            patch.setattr(disk.os, "pwritev", refuse)
            with pytest.raises(StoreUnavailableError, match=r"No space left.*make room"):
                store.append_batch([NewMessage("t", 0, body)] * 4)
        assert len(calls) == 2
        log = (tmp_path / "s" / "commitlog" / f"{0:020d}").read_bytes()
        assert not log[store.log_end :].strip(b"\0")
        put.append((NewMessage("t", 0, b"b"), store.append(NewMessage("t", 0, b"b"))))
    check_all(tmp_path / "s", put)


def test_a_replica_completes_the_append(tmp_path: Path):
    """Below the replica's end messages are answered, listed and dispatched; above it none is."""
    options = StoreOptions(65_536, 50, 100, 400, flush=SYNC.flush, needs_replica=True)
    seen: list[int] = []
    store = create(tmp_path / "s", options)
    store.register(
        lambda batch: seen.extend([batch.base_offset + i for i in range(batch.count)]) or True
    )
    first, done = store.submit([NewMessage("t", 0, b"1")])
    second, later = store.submit([NewMessage("t", 0, b"2")])
    assert done is not None
    assert later is not None
    store.flush()
    assert not store.wait_listed(1, timeout_s=0.05)
    assert not done.done()
    assert seen == []
    assert store.confirm_offset == 0
    store.acknowledge_replica(first.places.end)
    done.result(60)
    assert store.wait_listed(first.places.end, timeout_s=60)
    assert seen == [0]
    assert not later.done()
    store.close()
    assert isinstance(later.exception(1), ClosedError)
    assert second.places.end == store.log_end
    assert (tmp_path / "s" / "abort").exists()
    assert seen == [0]
