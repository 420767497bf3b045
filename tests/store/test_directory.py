"""The directory of an embedded store: files and their sizes, tables, lock, and how a store is gone on with."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support.embedded import create, reopen
from support.following import unpack
from support.stored import KINDS, RETRY, check_same, read_all, without_cluster
from support.unprivileged import reachable_folder, run_unprivileged

from tiered.clock import Clock, ManualClock, SystemClock
from tiered.errors import ClosedError, DataError, InvalidError
from tiered.format.broker_checkpoint import decode_checkpoint
from tiered.format.fastjson import loads
from tiered.format.record import parse_offset_msg_id
from tiered.local.rocketmq import RocketMQStore
from tiered.model import MessageQueue
from tiered.store import disk
from tiered.store.encoding import PROPERTIES_BYTES_MAX
from tiered.store.new_message import Appended, KeyMaker, NewMessage, ms_of_month
from tiered.store.store_options import StoreOptions

if TYPE_CHECKING:
    from pathlib import Path

    from tiered.store.embedded import MessageStore

SMALL = StoreOptions(4096, 7, index_slots=100, index_items=400)


def make(folder: Path, options: StoreOptions = SMALL, clock: Clock | None = None) -> MessageStore:
    return create(folder / "s", options, clock or ManualClock())


def again(folder: Path, options: StoreOptions = SMALL) -> MessageStore:
    return reopen(folder / "s", options, ManualClock())


def test_messages_of_all_kinds_come_back(tmp_path: Path):
    with make(tmp_path) as store:
        put = [(message, store.append(message)) for message in KINDS * 5]
    found = read_all(tmp_path / "s")
    assert sum(map(len, found.values())) == len(put)
    for message, where in put:
        record = found[MessageQueue(message.topic, message.queue_id)][where.queue_offset]
        check_same(
            message if message.properties.get("CLUSTER") is None else without_cluster(message),
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
        store.append_batch([NewMessage("t", 0, b"x" * 300)] * 20)
    log = sorted((tmp_path / "s" / "commitlog").iterdir())
    assert [path.name for path in log] == [f"{4096 * at:020d}" for at in range(len(log))]
    assert {path.stat().st_size for path in log} == {4096}
    queue = sorted((tmp_path / "s" / "consumequeue" / "t" / "0").iterdir())
    assert [path.name for path in queue] == [f"{140 * at:020d}" for at in range(3)]
    assert {path.stat().st_size for path in queue} == {140}


def test_a_big_message(tmp_path: Path):
    body = random.Random(1).randbytes(4 << 20)
    with make(tmp_path, StoreOptions(16 << 20, 7, index_slots=100, index_items=400)) as store:
        put = [store.append(NewMessage("t", 0, body)) for _ in range(5)]
        with pytest.raises(InvalidError):
            store.append(NewMessage("t", 0, body + b"x"))
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
        store.append(NewMessage("t", 1, b"x" * count * 20))
        assert store.wait_listed()
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
        store.append(NewMessage("t", 0, b""))
    with pytest.raises(ClosedError):
        store.flush()


def test_going_on_after_a_stop(tmp_path: Path):
    """Stopped after every append, at every place in a file, it goes on where it was."""
    put: list[tuple[NewMessage, Appended]] = []
    make(tmp_path).close()
    for number in range(40):
        message = NewMessage("t", number % 2, b"x" * (number * 97 % 800), tags=f"t{number}")
        with again(tmp_path) as store:
            assert store.queue_end(MessageQueue("t", number % 2)) == number // 2
            put.append((message, store.append(message)))
    found = read_all(tmp_path / "s")
    assert sum(map(len, found.values())) == 40
    for message, where in put:
        check_same(message, where, found[MessageQueue("t", message.queue_id)][where.queue_offset])


def test_sizes_on_disk_win(tmp_path: Path):
    with make(tmp_path) as store:
        store.append(NewMessage("t", 0, b"x"))
    with again(tmp_path, StoreOptions(index_slots=100, index_items=400)) as store:
        assert store.options.commitlog_file_bytes == 4096
        assert store.options.consumequeue_file_items == 7


def test_going_on_with_a_brokers_store(tmp_path: Path):
    root = unpack("s01-basic", tmp_path)
    before = read_all(root)
    with reopen(root, clock=SystemClock()) as store:
        messages = [NewMessage("orders", 0, b"x" * 400), NewMessage("new", 1, b"y")] * 900
        put = list(store.append_batch(messages))
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


def test_a_log_that_is_not_listed_is_listed_again(tmp_path: Path):
    with make(tmp_path) as store:
        store.append_batch([NewMessage("t", 0, b"x"), NewMessage("t", 1, b"x")])
    (tmp_path / "s" / "consumequeue" / "t" / "1" / f"{0:020d}").unlink()
    with again(tmp_path) as store:
        assert store.recovered is not None
        assert store.recovered.records == 2
        assert store.queue_end(MessageQueue("t", 1)) == 1
    assert sum(map(len, read_all(tmp_path / "s").values())) == 2


def test_a_damaged_tail_is_refused(tmp_path: Path):
    with make(tmp_path) as store:
        put = store.append_batch([NewMessage("t", 0, b"x")] * 3)
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


def test_a_store_is_made_where_a_file_system_has_just_been_mounted(tmp_path: Path):
    (tmp_path / "s" / "lost+found").mkdir(parents=True)
    with make(tmp_path) as store:
        store.append(NewMessage("t", 0, b"x"))
    with again(tmp_path) as store:
        assert store.append(NewMessage("t", 0, b"y")).queue_offset == 1


def test_one_writer_at_a_time(tmp_path: Path):
    lock = tmp_path / "s" / "lock"
    with make(tmp_path) as store:
        store.append(NewMessage("t", 0, b""))
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
        store.append(NewMessage("named", 9, b""))
        store.append(NewMessage("made", 5, b""))
        clock.advance(1)
        store.append(NewMessage("made", 0, b""))
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
    with again(tmp_path) as store, pytest.raises(InvalidError):
        store.create_topic("x", queues=0)


def test_store_times_never_go_back(tmp_path: Path):
    clock = ManualClock()
    with make(tmp_path, clock=clock) as store:
        for step in (5, -100, 30, 80):
            store.append(NewMessage("t", 0, b""))
            clock.jump(step)
        last = clock.now_ms()
    with reopen(tmp_path / "s", clock=ManualClock(1)) as store:
        store.append(NewMessage("t", 0, b""))
    times = [r.store_timestamp_ms for r in read_all(tmp_path / "s")[MessageQueue("t", 0)].values()]
    assert times == sorted(times)
    assert times[-1] == times[-2]
    assert last >= times[-1]


def test_properties_up_to_the_limit(tmp_path: Path):
    with make(tmp_path, StoreOptions(1 << 20, 7, index_slots=100, index_items=400)) as store:
        added = len("x\x01\x02UNIQ_KEY\x01\x02CLUSTER\x01cluster-a\x02") + 32
        message = NewMessage("t", 0, b"", properties={"x": "y" * (PROPERTIES_BYTES_MAX - added)})
        put = store.append(message)
    record = read_all(tmp_path / "s")[MessageQueue("t", 0)][0]
    assert len(record.properties_raw) == PROPERTIES_BYTES_MAX
    check_same(message, put, record)


def test_many_queues_with_few_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disk, "OPEN_MAX", 3)
    with make(tmp_path) as store:
        for number in range(60):
            store.append(NewMessage("t", number % 20, b"x"))
            assert store.wait_listed()
            assert len(store._parts.queue_rows._open) <= 3
        store.append(NewMessage("t", 0, b"x"))
    found = read_all(tmp_path / "s")
    assert [len(found[MessageQueue("t", number)]) for number in range(20)] == [4] + [3] * 19


def test_unique_keys():
    keys = KeyMaker(random.Random(1))
    first_ms = 1_709_251_200_000  # the first of March
    made = [key for ms in range(5) for key in keys.take(1000, first_ms + ms)]
    assert len(set(made)) == 5000
    assert all(re.fullmatch(r"[0-9A-F]{32}", key) for key in made)
    assert {key[20:28] for key in made} == {f"{at:08X}" for at in range(5)}
    assert ms_of_month(1_709_251_199_999) == 29 * 86_400_000 - 1


def test_what_is_no_part_of_a_store_hinders_neither_opening_nor_recovering():
    with reachable_folder() as folder:
        root = folder / "s"
        with create(root) as store:
            for _ in range(5):
                store.append(NewMessage("t", 0, b"x", keys="k"))
        levels = ("", "commitlog", "index", "config", "consumequeue", "consumequeue/t")
        for level in (*levels, "consumequeue/t/0"):
            (root / level / "lost+found").mkdir()
            (root / level / ".DS_Store").touch()
            (root / level / f"{0:020d}.bak").write_text("x")
        for path in (folder, *folder.rglob("*")):
            path.chmod(0 if path.name == "lost+found" else 0o777)
        run_unprivileged(lambda: _assert_goes_on(root))


def _assert_goes_on(root: Path) -> None:
    for crashed in (False, True):
        if crashed:
            (root / "abort").touch()
        with reopen(root) as store:
            before = store.reader.bounds(MessageQueue("t", 0))[1]
            assert store.append(NewMessage("t", 0, b"y", keys="k")).queue_offset == before
            assert store.wait_listed(timeout_s=1e6)
            assert len(store.reader.by_key("t", "k")) == before + 1
            assert set(store.queues()) == {MessageQueue("t", 0)}
