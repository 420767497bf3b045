"""What an embedded store is given, our reader finds again; what no broker would take, it refuses."""

from __future__ import annotations

import errno
import itertools
import json
import random
import re
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest
from local.harness import unpack
from local_writer.reading import KINDS, NAMES, RETRY, check_same, read_all

from tiered.clock import ManualClock, SystemClock
from tiered.errors import ClosedError, DataError, InvalidError, StoreUnavailableError
from tiered.format.checkpoint import decode_checkpoint
from tiered.format.fastjson import loads
from tiered.format.ids import parse_offset_msg_id
from tiered.local.rocketmq import RocketMQStore
from tiered.local.writer import files
from tiered.local.writer.messages import Appended, Message, StoreSettings
from tiered.local.writer.records import PROPERTIES_BYTES_MAX
from tiered.local.writer.store import EmbeddedStore
from tiered.local.writer.uniqkeys import UniqueKeys, ms_of_month
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from pathlib import Path

SMALL = StoreSettings(commitlog_file_bytes=4096, consumequeue_file_items=7)


def make(folder: Path, settings: StoreSettings = SMALL, clock: object = None) -> EmbeddedStore:
    return EmbeddedStore.create(
        folder / "s",
        **NAMES,
        clock=clock or ManualClock(),
        settings=settings,
        unique_key=UniqueKeys(random.Random(1)),
    )


def again(folder: Path, **options: object) -> EmbeddedStore:
    return EmbeddedStore.open(folder / "s", **NAMES, clock=ManualClock(), **options)


def test_messages_of_all_kinds_come_back(tmp_path: Path):
    with make(tmp_path) as store:
        put = [(message, store.append(message)) for message in KINDS * 5]
    found = read_all(tmp_path / "s")
    assert sum(map(len, found.values())) == len(put)
    for message, where in put:
        record = found[MessageQueue(message.topic, message.queue_id)][where.queue_offset]
        check_same(
            message if message.properties.get("CLUSTER") is None else _without_cluster(message),
            where,
            record,
        )
        assert record.version == (2 if message.topic == RETRY else 1)
        assert parse_offset_msg_id(where.offset_msg_id) == (
            "127.0.0.1:10911",
            where.physical_offset,
        )
    physical = [where.physical_offset for _, where in put]
    assert physical == sorted(set(physical))


def _without_cluster(message: Message) -> Message:
    properties = {name: value for name, value in message.properties.items() if name != "CLUSTER"}
    return Message(message.topic, message.queue_id, message.body, properties=properties)


def test_a_batch_is_one_append_after_another(tmp_path: Path):
    logs = []
    for name, is_batch in (("a", True), ("b", False)):
        (tmp_path / name).mkdir()
        with make(tmp_path / name) as store:
            if is_batch:
                store.append_batch(KINDS * 9)
            else:
                for message in KINDS * 9:
                    store.append(message)
        root = tmp_path / name / "s"
        logs.append(
            {
                path.relative_to(root): path.read_bytes()
                for part in ("commitlog", "consumequeue")
                for path in sorted((root / part).rglob("*"))
                if path.is_file()
            }
        )
    assert logs[0] == logs[1]
    assert len(logs[0]) > 10


def test_files_have_their_full_size(tmp_path: Path):
    with make(tmp_path) as store:
        store.append_batch([Message("t", 0, b"x" * 300)] * 20)
    log = sorted((tmp_path / "s" / "commitlog").iterdir())
    assert [path.name for path in log] == [f"{4096 * at:020d}" for at in range(len(log))]
    assert {path.stat().st_size for path in log} == {4096}
    queue = sorted((tmp_path / "s" / "consumequeue" / "t" / "0").iterdir())
    assert [path.name for path in queue] == [f"{140 * at:020d}" for at in range(3)]
    assert {path.stat().st_size for path in queue} == {140}


def test_a_big_message(tmp_path: Path):
    body = random.Random(1).randbytes(4 << 20)
    with make(tmp_path, StoreSettings()) as store:
        put = [store.append(Message("t", 0, body)) for _ in range(5)]
        with pytest.raises(InvalidError):
            store.append(Message("t", 0, body + b"x"))
    assert put[3].physical_offset == 16 << 20
    found = read_all(tmp_path / "s")[MessageQueue("t", 0)]
    assert [record.body == body for record in found.values()] == [True] * 5


def test_a_stopped_store_is_clean_and_a_running_one_is_live(tmp_path: Path):
    clock = SystemClock()
    store = make(tmp_path, clock=clock)
    root = tmp_path / "s"
    reader = RocketMQStore.open(root, clock=clock)
    queue = MessageQueue("t", 1)
    for count in range(1, 30):
        store.append(Message("t", 1, b"x" * count * 20))
        reader.refresh()
        assert reader.identity.is_live
        assert reader.queues()[queue].end == count
        assert not reader.waiting().records
    assert (root / "abort").exists()
    store.close()
    store.close()
    assert not (root / "abort").exists()
    assert (root / "lock").read_bytes() == b"lock"
    reader.refresh()
    assert not reader.identity.is_live
    assert reader.queues()[queue].end == 29
    assert (reader.identity.cluster, reader.identity.broker) == ("cluster-a", "broker-a")
    reader.close()
    with pytest.raises(ClosedError):
        store.append(Message("t", 0, b""))
    with pytest.raises(ClosedError):
        store.flush()


def test_going_on_after_a_stop(tmp_path: Path):
    """Stopped after every append, at every place in a file, it goes on where it was."""
    put: list[tuple[Message, Appended]] = []
    make(tmp_path).close()
    for number in range(40):
        message = Message("t", number % 2, b"x" * (number * 97 % 800), tags=f"t{number}")
        with again(tmp_path) as store:
            assert store.queue_end(MessageQueue("t", number % 2)) == number // 2
            put.append((message, store.append(message)))
    found = read_all(tmp_path / "s")
    assert sum(map(len, found.values())) == 40
    for message, where in put:
        check_same(message, where, found[MessageQueue("t", message.queue_id)][where.queue_offset])


def test_sizes_on_disk_win(tmp_path: Path):
    with make(tmp_path) as store:
        store.append(Message("t", 0, b"x"))
    with again(tmp_path, settings=StoreSettings()) as store:
        assert store.settings.commitlog_file_bytes == 4096
        assert store.settings.consumequeue_file_items == 7


def test_going_on_with_a_brokers_store(tmp_path: Path):
    root = unpack("s01-basic", tmp_path)
    before = read_all(root)
    with EmbeddedStore.open(root, **NAMES, clock=SystemClock()) as store:
        messages = [Message("orders", 0, b"x" * 400), Message("new", 1, b"y")] * 900
        put = store.append_batch(messages)
    found = read_all(root)
    for queue, records in before.items():
        assert {offset: found[queue][offset] for offset in records} == records
    assert put[0].queue_offset == len(before[MessageQueue("orders", 0)])
    for message, where in zip(messages, put, strict=True):
        check_same(
            message, where, found[MessageQueue(message.topic, message.queue_id)][where.queue_offset]
        )
    table = loads((root / "config" / "topics.json").read_bytes())["topicConfigTable"]
    assert table["events"]["readQueueNums"] == 8
    assert table["new"]["writeQueueNums"] == 4


def test_a_crashed_store_is_refused(tmp_path: Path):
    root = unpack("s05-crash", tmp_path)
    with pytest.raises(DataError, match="not stopped cleanly"):
        EmbeddedStore.open(root, **NAMES, clock=ManualClock())
    store = make(tmp_path)
    store.append(Message("t", 0, b"x"))
    store.close()
    (tmp_path / "s" / "abort").touch()
    with pytest.raises(DataError, match="not stopped cleanly"):
        again(tmp_path)


def test_a_log_that_is_not_listed_is_refused(tmp_path: Path):
    with make(tmp_path) as store:
        store.append_batch([Message("t", 0, b"x"), Message("t", 1, b"x")])
    (tmp_path / "s" / "consumequeue" / "t" / "1" / f"{0:020d}").unlink()
    with pytest.raises(DataError, match="consume queues list"):
        again(tmp_path)


def test_a_damaged_tail_is_refused(tmp_path: Path):
    with make(tmp_path) as store:
        put = store.append_batch([Message("t", 0, b"x")] * 3)
    with (tmp_path / "s" / "commitlog" / f"{0:020d}").open("r+b") as log:
        log.seek(put[2].physical_offset + 4)
        log.write(b"oops")
    with pytest.raises(DataError):
        again(tmp_path)


def test_nothing_is_made_where_something_is(tmp_path: Path):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "precious").touch()
    with pytest.raises(InvalidError, match="something already"):
        make(tmp_path)
    assert [path.name for path in (tmp_path / "s").iterdir()] == ["precious"]


def test_one_writer_at_a_time(tmp_path: Path):
    lock = tmp_path / "s" / "lock"
    with make(tmp_path) as store:
        store.append(Message("t", 0, b""))
        for _ in range(
            2
        ):  # the refused one's descriptor has been closed: the lock must still stand
            with pytest.raises(InvalidError, match="another writer"):
                again(tmp_path)
        script = (
            "import fcntl,sys; fcntl.lockf(open(sys.argv[1],'r+'),fcntl.LOCK_EX|fcntl.LOCK_NB,1)"
        )
        ran = subprocess.run([sys.executable, "-c", script, lock], capture_output=True, check=False)
        assert b"BlockingIOError" in ran.stderr
    script += ";print('held',flush=True);sys.stdin.read()"
    script = script.replace(
        "fcntl.lockf(open(sys.argv[1],'r+')", "f=open(sys.argv[1],'r+');fcntl.lockf(f"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as broker:
        assert broker.stdout is not None
        assert broker.stdout.readline() == b"held\n"
        with pytest.raises(InvalidError, match="another writer"):
            again(tmp_path)
        broker.communicate()
    again(tmp_path).close()


def test_topics_and_checkpoint(tmp_path: Path):
    clock = ManualClock(1_700_000_000_123)
    with make(tmp_path, clock=clock) as store:
        store.create_topic("made", queues=2)
        store.append(Message("named", 9, b""))
        store.append(Message("made", 5, b""))
        clock.advance(1)
        store.append(Message("made", 0, b""))
        store.flush()
        root = tmp_path / "s"
        checkpoint = decode_checkpoint((root / "checkpoint").read_bytes())
        assert checkpoint.physical_timestamp_ms == 1_700_000_001_123
        assert checkpoint.logics_physical_offset == store.log_end
    text = (root / "config" / "topics.json").read_text("utf-8")
    assert text.startswith('{\n\t"dataVersion":{\n\t\t"counter":')
    table = json.loads(text)["topicConfigTable"]
    assert {name: config["readQueueNums"] for name, config in table.items()} == {
        "cluster-a": 16,
        "broker-a": 1,
        "rmq_sys_REVIVE_LOG_cluster-a": 8,
        "rmq_sys_SYNC_BROKER_MEMBER_broker-a": 1,
        "named": 10,
        "made": 6,
    }
    assert (root / "config" / "topics.json.bak").exists()
    with pytest.raises(InvalidError):
        again(tmp_path).create_topic("x", queues=0)


@pytest.mark.parametrize("offset", [1, 6, 7, 8, 13, 14, 1_000_003])
def test_a_queue_that_does_not_begin_at_0(tmp_path: Path, offset: int):
    queue = MessageQueue("far", 2)
    with make(tmp_path) as store:
        store.append(Message("near", 0, b"in front, so that the log does not begin with it"))
        store.begin_queue(queue, QueueOffset(offset))
        put = [store.append(Message("far", 2, b"x")) for _ in range(10)]
        with pytest.raises(InvalidError):
            store.begin_queue(queue, QueueOffset(0))
    assert [where.queue_offset for where in put] == list(range(offset, offset + 10))
    with again(tmp_path) as store:
        assert store.append(Message("far", 2, b"x")).queue_offset == offset + 10
    assert list(read_all(tmp_path / "s")[queue]) == list(range(offset, offset + 11))
    first = min((tmp_path / "s" / "consumequeue" / "far" / "2").iterdir())
    assert int(first.name) == offset // 7 * 140


def test_store_times_never_go_back(tmp_path: Path):
    clock = ManualClock()
    with make(tmp_path, clock=clock) as store:
        for step in (5, -100, 30, 80):
            store.append(Message("t", 0, b""))
            clock.jump(step)
        last = clock.now_ms()
    with EmbeddedStore.open(tmp_path / "s", **NAMES, clock=ManualClock(1)) as store:
        store.append(Message("t", 0, b""))
    times = [r.store_timestamp_ms for r in read_all(tmp_path / "s")[MessageQueue("t", 0)].values()]
    assert times == sorted(times)
    assert times[-1] == times[-2]
    assert last >= times[-1]


@pytest.mark.parametrize(
    "message",
    [
        Message("", 0, b""),
        Message("a/b", 0, b""),
        Message("ünicode", 0, b""),
        Message("t\n", 0, b""),
        Message("t" * 128, 0, b""),
        Message("%DLQ%" + "g" * 123, 0, b""),
        Message(RETRY + "g", 0, b""),
        Message("t", -1, b""),
        Message("t", 65_536, b""),
        Message("t", 0, b"x" * 4097),
        Message("t", 0, b"x" * 4000),
        Message("t", 0, b"", flag=1 << 31),
        Message("t", 0, b"", born_timestamp_ms=1 << 63),
        Message("t", 0, b"", born_host="localhost:1"),
        Message("t", 0, b"", born_host="1.2.3.4"),
        Message("t", 0, b"", sys_flag=0x80),
        Message("t", 0, b"", sys_flag=0x4),
        Message("t", 0, b"", sys_flag=0xC),
        Message("t", 0, b"", tags=""),
        Message("t", 0, b"", tags="a\x01b"),
        Message("t", 0, b"", keys="a\x02"),
        Message("t", 0, b"", properties={"": "x"}),
        Message("t", 0, b"", properties={"x": "\ud800"}),
        Message("t", 0, b"", properties={"TAGS": "a"}, tags="b"),
        Message("t", 0, b"", properties={"x": "y" * PROPERTIES_BYTES_MAX}),
    ],
    ids=map(str, itertools.count()),
)
def test_what_is_refused_leaves_nothing(tmp_path: Path, message: Message):
    with make(tmp_path, StoreSettings(4096, 7, message_bytes_max=4096)) as store:
        with pytest.raises(InvalidError):
            store.append_batch([Message("good", 0, b""), message])
        assert store.log_end == 0
        put = store.append(Message("good", 0, b""))
        assert (put.queue_offset, put.physical_offset) == (0, 0)
    table = loads((tmp_path / "s" / "config" / "topics.json").read_bytes())["topicConfigTable"]
    assert "good" in table
    assert message.topic not in table


def test_properties_up_to_the_limit(tmp_path: Path):
    with make(tmp_path, StoreSettings(1 << 20)) as store:
        added = len("x\x01\x02UNIQ_KEY\x01\x02CLUSTER\x01cluster-a\x02") + 32
        message = Message("t", 0, b"", properties={"x": "y" * (PROPERTIES_BYTES_MAX - added)})
        put = store.append(message)
    record = read_all(tmp_path / "s")[MessageQueue("t", 0)][0]
    assert len(record.properties_raw) == PROPERTIES_BYTES_MAX
    check_same(message, put, record)


@pytest.mark.parametrize("name", ["commitlog_file_bytes", "message_bytes_max", "topic_queues"])
def test_settings_are_checked(name: str):
    with pytest.raises(InvalidError, match=name):
        StoreSettings(**{name: 0})


def test_a_full_disk_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = make(tmp_path)
    put = store.append(Message("t", 0, b"x"))

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "pwrite", refuse)
        with pytest.raises(StoreUnavailableError, match="No space left"):
            store.append(Message("t", 0, b"y"))
    with pytest.raises(StoreUnavailableError, match="earlier write failed"):
        store.append(Message("t", 0, b"z"))
    with pytest.raises(StoreUnavailableError, match="earlier write failed"):
        store.flush()
    store.close()
    assert (tmp_path / "s" / "abort").exists()
    records = read_all(tmp_path / "s")[MessageQueue("t", 0)]
    assert [record.body for record in records.values()] == [b"x"]
    assert put.queue_offset == 0


def test_many_threads(tmp_path: Path):
    with make(tmp_path) as store:
        put: list[tuple[Message, Appended]] = []

        def work(number: int) -> None:
            for at in range(50):
                message = Message("t", at % 3, f"{number}-{at}".encode())
                put.append((message, store.append(message)))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = read_all(tmp_path / "s")
    assert sum(map(len, found.values())) == 300
    for message, where in put:
        check_same(message, where, found[MessageQueue("t", message.queue_id)][where.queue_offset])


def test_many_queues_with_few_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "OPEN_MAX", 3)
    with make(tmp_path) as store:
        for number in range(60):
            store.append(Message("t", number % 20, b"x"))
            assert len(store._rows._files._open) <= 3
        store.flush()
        store.append(Message("t", 0, b"x"))
    found = read_all(tmp_path / "s")
    assert [len(found[MessageQueue("t", number)]) for number in range(20)] == [4] + [3] * 19


def test_unique_keys():
    keys = UniqueKeys(random.Random(1))
    made = [keys(1_709_251_200_000 + at // 1000) for at in range(5000)]  # the first of March
    assert len(set(made)) == 5000
    assert all(re.fullmatch(r"[0-9A-F]{32}", key) for key in made)
    assert {key[20:28] for key in made} == {f"{at:08X}" for at in range(5)}
    assert ms_of_month(1_709_251_199_999) == 29 * 86_400_000 - 1
