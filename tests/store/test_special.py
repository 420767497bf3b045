"""What only a broker's own parts store: delayed messages, transactions, inner batches; after a crash too."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from store.harness import SMALL, SYNC, create, reopen
from store.reading import read_all

from tiered.errors import InvalidError
from tiered.format.consume_queue import ITEM
from tiered.format.message import split_batch
from tiered.local.rocketmq import RocketMQStore
from tiered.model import MessageQueue
from tiered.store.messages import SCHEDULE_TOPIC, Message, broker_order, delayed, parse_levels
from tiered.store.special import inner_batch
from tiered.store.transactions import HALF_QUEUE, Transactions

if TYPE_CHECKING:
    from pathlib import Path

    from tiered.store.message_store import MessageStore
    from tiered.store.options import StoreOptions

GROUPED = MessageQueue("grouped", 1)


def batch(store: MessageStore, count: int) -> Message:
    messages = [Message("grouped", 1, b"%d" % at, tags="a", keys=f"k{at}") for at in range(count)]
    return store.complete(inner_batch(messages))


def codes(root: Path, level: int) -> list[int]:
    (path,) = (root / "consumequeue" / SCHEDULE_TOPIC / str(level - 1)).iterdir()
    items = np.fromfile(path, ITEM)
    return items["tag_code"][items["size"] > 0].tolist()


def copy_while_running(store: MessageStore, to: Path) -> Path:
    """The directory as a crash leaves it."""
    assert store.wait_listed()
    shutil.copytree(store.root, to)
    return to


def test_delayed_messages_are_listed_by_their_time(tmp_path: Path):
    with create(tmp_path / "s") as store:
        message = Message("orders", 2, b"later", tags="t", properties={"a": "b"})
        for level in (1, 3, 99):
            store.append(delayed(message, level))
        store.append(Message(SCHEDULE_TOPIC, 2, b"without a level", tags="t"))
        crashed = copy_while_running(store, tmp_path / "crashed")
        (record,) = store.reader.get(MessageQueue(SCHEDULE_TOPIC, 0), 0).records
    assert (
        record.properties.items()
        >= {
            "DELAY": "1",
            "REAL_TOPIC": "orders",
            "REAL_QID": "2",
            "a": "b",
            "TAGS": "t",
        }.items()
    )
    reopen(crashed, anew=True).close()
    for root in (tmp_path / "s", crashed):
        assert codes(root, 1) == [record.store_timestamp_ms + 1000]
        assert codes(root, 3)[0] - record.store_timestamp_ms in range(10_000, 11_000)
        assert codes(root, 3)[1] == ord("t")
        assert codes(root, 18)[0] - record.store_timestamp_ms in range(7_200_000, 7_201_000)


def test_levels():
    assert parse_levels("1s 2m 3h 1d") == (1000, 120_000, 10_800_000, 86_400_000)
    for bad in ("", "1", "1s,2s", "-1s", "1 s"):
        with pytest.raises(InvalidError):
            parse_levels(bad)
    with pytest.raises(InvalidError):
        delayed(Message("t", 0, b""), 0)
    with pytest.raises(InvalidError):
        delayed(delayed(Message("t", 0, b""), 1), 1)


@pytest.mark.parametrize("options", [SMALL, SYNC], ids=["async", "sync"])
def test_transactions(tmp_path: Path, options: StoreOptions):
    with create(tmp_path / "s", options) as store:
        bank = Transactions(store)
        kept, gone, open_ = (
            bank.prepare(Message("bank", at, b"%d" % at, tags="t", keys="k"), "group")
            for at in range(3)
        )
        assert store.wait_listed()
        assert MessageQueue("bank", 0) not in store.queues()
        put = bank.commit(kept.offset_msg_id)
        bank.rollback(gone.offset_msg_id)
        with pytest.raises(InvalidError):
            bank.commit(put.offset_msg_id)
        crashed = copy_while_running(store, tmp_path / "crashed")
    (record,) = read_all(tmp_path / "s")[MessageQueue("bank", 0)].values()
    assert (record.body, record.sys_flag) == (b"0", 8)
    assert record.prepared_transaction_offset == kept.physical_offset
    assert record.properties.keys() >= {"TRAN_MSG", "PGROUP", "__transactionId__", "KEYS"}
    assert not record.properties.keys() & {"REAL_TOPIC", "REAL_QID"}
    with reopen(crashed) as store:
        assert store.recovered is not None
        (half,) = Transactions(store).undecided()
        assert half.physical_offset == open_.physical_offset
        Transactions(store).commit(open_.offset_msg_id)
        assert store.wait_listed()
        assert Transactions(store).undecided() == []
        assert store.queues()[HALF_QUEUE] == 3
        assert store.queues()[MessageQueue("bank", 2)] == 1


def check_grouped(root: Path, counts: list[int]) -> None:
    store = RocketMQStore.open(root)
    assert store.queues()[GROUPED].end == sum(counts)
    found = store.read(GROUPED, 0, bytes_max=1 << 20, count_max=1000)
    store.close()
    assert found is not None
    assert found.count == sum(counts)
    assert not found.quarantined
    shared = [int(place) for place in dict.fromkeys(found.physical_offsets.tolist())]
    assert [found.physical_offsets.tolist().count(place) for place in shared] == counts


def test_inner_batches_go_on_after_a_stop_and_a_crash(tmp_path: Path):
    root = tmp_path / "s"
    counts = [10, 1, 3, 1, 32]
    with create(root) as store:
        store.create_topic("grouped", queues=2, is_batch=True)
        with pytest.raises(InvalidError):
            store.create_topic("grouped", queues=4)
        assert store.append_as_is(batch(store, 10)).queue_offset == 0
        assert store.append(Message("grouped", 1, b"alone", keys="single")).queue_offset == 10
        assert store.append_as_is(batch(store, 3)).queue_offset == 11
        copy_while_running(store, tmp_path / "crashed")
    for where, more in (
        (root, {}),
        (tmp_path / "crashed", {}),
        (tmp_path / "crashed", {"anew": True}),
    ):
        check_grouped(where, counts[:3])
        with reopen(where, **more) as store:
            assert store.queues()[GROUPED] == 14
    for where in (root, tmp_path / "crashed"):
        with reopen(where) as store:
            assert store.append(Message("grouped", 1, b"alone")).queue_offset == 14
            last = store.append_as_is(batch(store, 32))
            assert (last.queue_offset, store.wait_listed()) == (15, True)
            got = store.reader.get(GROUPED, 3, count_max=9)
            assert [record.queue_offset for record in got.records] == [0, 10, 11]
            assert got.next_offset == 14
            (found,) = store.reader.by_key("grouped", last.msg_id)
            inner = split_batch(found)
            assert [one.queue_offset for one in inner] == list(range(15, 47))
            assert (inner[5].body, inner[5].properties) == (b"5", {"TAGS": "a", "KEYS": "k5"})
            assert (found.properties["INNER_BASE"], found.properties["INNER_NUM"]) == ("15", "32")
        check_grouped(where, counts)


def test_a_batch_queue_rolls_over(tmp_path: Path):
    options = replace(SMALL, batchqueue_file_items=7)
    with create(tmp_path / "s", options) as store:
        store.create_topic("grouped", queues=2, is_batch=True)
        for _ in range(40):
            store.append_as_is(batch(store, 2))
    check_grouped(tmp_path / "s", [2] * 40)
    assert len(list((tmp_path / "s" / "batchconsumequeue" / "grouped" / "1").iterdir())) == 6
    with reopen(tmp_path / "s", options) as store:
        assert store.append_as_is(batch(store, 2)).queue_offset == 80


def test_what_is_refused(tmp_path: Path):
    good = Message("t", 0, b"", properties={"UNIQ_KEY": "A"})
    with create(tmp_path / "s") as store:
        store.create_topic("grouped", queues=2, is_batch=True)
        wrong = batch(store, 3)
        for message in (
            Message("t", 0, b"", tags="a"),
            Message("t", -1, b""),
            Message("t/", 0, b""),
            Message("t", 0, b"", sys_flag=0x4),
            Message("t", 0, b"", sys_flag=0xC),
            Message("t", 0, b"", sys_flag=0xC0, properties={"INNER_NUM": "1"}),
            Message("t", 0, b"", properties={"a": ""}),
            Message("t", 0, b"", properties={"a": "x" * 40_000}),
            Message("t", 0, b"x" * 70_000),
            Message("t", 0, b"", flag=1 << 31),
            Message("t", 0, b"", born_host="nowhere"),
            Message("grouped", 1, b"x", sys_flag=0xC0, properties={"INNER_NUM": "1"}),
            Message("grouped", 1, wrong.body, sys_flag=0xC0, properties={"INNER_NUM": "2"}),
        ):
            with pytest.raises(InvalidError):
                store.append_as_is(message)
        for several in ([], [good, Message("t", 1, b"")], [Message("t", 0, b"", sys_flag=1)]):
            with pytest.raises(InvalidError):
                inner_batch(several)
        assert store.log_end == 0
        put = store.append_as_is(good)
        assert (put.msg_id, put.queue_offset) == ("A", 0)
        bare = store.append_as_is(Message("t", 0, b""))
        assert bare.msg_id == bare.offset_msg_id
    found = read_all(tmp_path / "s")[MessageQueue("t", 0)]
    assert [record.properties for record in found.values()] == [{"UNIQ_KEY": "A"}, {}]


def test_the_brokers_order():
    """As captured: client's, broker's and delay's properties."""
    names = [
        "MSG_REGION",
        "UNIQ_KEY",
        "CLUSTER",
        "DELAY",
        "TAGS",
        "KEYS",
        "WAIT",
        "TRACE_ON",
        "REAL_TOPIC",
        "REAL_QID",
    ]
    assert list(broker_order(dict.fromkeys(["UNIQ_KEY", *sorted(names)], "x"))) == names
    many = {f"p{at}": "x" for at in range(200)}
    assert broker_order(many).keys() == many.keys()
