"""What only a broker's own parts store: delayed messages, transactions, inner batches; after a crash too."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.embedded import SMALL, SYNC, batch, create, reopen
from support.stored import read_all

from tiered.errors import InvalidError
from tiered.format.block import parse_records
from tiered.format.items import ITEM
from tiered.format.message_forms import split_batch
from tiered.format.record import MAGIC_BLANK, decode_record
from tiered.local.rocketmq import RocketMQStore
from tiered.model import MessageQueue
from tiered.store.new_message import SCHEDULE_TOPIC, NewMessage, broker_order, delayed, parse_levels
from tiered.store.restored import ReadyRecords
from tiered.store.special import inner_batch
from tiered.store.transactions import HALF_QUEUE, Transactions

if TYPE_CHECKING:
    from pathlib import Path

    from tiered.format.block import RecordBlock
    from tiered.store.embedded import MessageStore
    from tiered.store.store_options import StoreOptions

GROUPED = MessageQueue("grouped", 1)


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
        message = NewMessage("orders", 2, b"later", tags="t", properties={"a": "b"})
        for level in (1, 3, 99):
            store.append(delayed(message, level))
        store.append(NewMessage(SCHEDULE_TOPIC, 2, b"without a level", tags="t"))
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
        delayed(NewMessage("t", 0, b""), 0)
    with pytest.raises(InvalidError):
        delayed(delayed(NewMessage("t", 0, b""), 1), 1)


@pytest.mark.parametrize("options", [SMALL, SYNC], ids=["async", "sync"])
def test_transactions(tmp_path: Path, options: StoreOptions):
    with create(tmp_path / "s", options) as store:
        bank = Transactions(store)
        kept, gone, open_ = (
            bank.prepare(NewMessage("bank", at, b"%d" % at, tags="t", keys="k"), "group")
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
        assert store.append(NewMessage("grouped", 1, b"alone", keys="single")).queue_offset == 10
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
            assert store.append(NewMessage("grouped", 1, b"alone")).queue_offset == 14
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
    good = NewMessage("t", 0, b"", properties={"UNIQ_KEY": "A"})
    with create(tmp_path / "s") as store:
        store.create_topic("grouped", queues=2, is_batch=True)
        wrong = batch(store, 3)
        for message in (
            NewMessage("t", 0, b"", tags="a"),
            NewMessage("t", -1, b""),
            NewMessage("t/", 0, b""),
            NewMessage("t", 0, b"", sys_flag=0x4),
            NewMessage("t", 0, b"", sys_flag=0xC),
            NewMessage("t", 0, b"", sys_flag=0xC0, properties={"INNER_NUM": "1"}),
            NewMessage("t", 0, b"", properties={"a": ""}),
            NewMessage("t", 0, b"", properties={"a": "x" * 40_000}),
            NewMessage("t", 0, b"x" * 70_000),
            NewMessage("t", 0, b"", flag=1 << 31),
            NewMessage("t", 0, b"", born_host="nowhere"),
            NewMessage("grouped", 1, b"x", sys_flag=0xC0, properties={"INNER_NUM": "1"}),
            NewMessage("grouped", 1, wrong.body, sys_flag=0xC0, properties={"INNER_NUM": "2"}),
        ):
            with pytest.raises(InvalidError):
                store.append_as_is(message)
        for several in ([], [good, NewMessage("t", 1, b"")], [NewMessage("t", 0, b"", sys_flag=1)]):
            with pytest.raises(InvalidError):
                inner_batch(several)
        assert store.log_end == 0
        put = store.append_as_is(good)
        assert (put.msg_id, put.queue_offset) == ("A", 0)
        bare = store.append_as_is(NewMessage("t", 0, b""))
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


def blocks(root: Path) -> RecordBlock:
    """All records of a store."""
    data = b"".join(path.read_bytes() for path in sorted((root / "commitlog").iterdir()))
    chunks, at = [], 0
    while (size := int.from_bytes(data[at : at + 4], "big")) > 0:
        if data[at + 4 : at + 8] != MAGIC_BLANK.to_bytes(4, "big"):
            chunks.append((at, size))
        at += size
    positions, sizes = np.array(chunks, np.int64).T
    return parse_records(data, positions, sizes.astype(np.int32))


@pytest.mark.parametrize("source_host", ["127.0.0.1:10911", "[::1]:10911"])
def test_records_of_elsewhere_keep_all_but_queue_place_and_time(tmp_path: Path, source_host: str):
    """As they come through a broker's own door; over the ends of files, with a producer of either kind."""
    hosts = ["10.0.0.1:5", "[fe80::1]:7", None]
    with create(tmp_path / "a", options=replace(SMALL, store_host=source_host)) as store:
        for at in range(2_000):
            store.append(NewMessage(
                "orders", at % 3, b"b%d" % at * 9, tags="t", keys=f"k{at}", flag=at,
                born_host=hosts[at % 3], born_timestamp_ms=1_000 + at, reconsume_times=at % 2,
            ))  # fmt: skip
    block, topics = blocks(tmp_path / "a"), ("real", "t" * 200, "other")
    queues = [(f"%RETRY%{topics[at % 3]}", at % 5) for at in range(2_000)]
    options = replace(SMALL, store_host="192.168.0.9:10911")
    with create(tmp_path / "b", options=options) as store:
        store.append(NewMessage(*queues[0], b"before"))
        ready = ReadyRecords(block, queues, [b"A\x01%d\x02" % at for at in range(2_000)], options)
        places = store.append_records(ready)
        assert store.wait_listed()
        found = [store.reader.get(MessageQueue(*queue), offset).records[0] for queue, offset in
                 zip(queues, places.queue_offsets, strict=True)]  # fmt: skip
    with contextlib.closing(RocketMQStore.open(tmp_path / "b")) as local:
        assert sum(bounds.end for bounds in local.queues().values()) == 2_001
    for at, record in enumerate(found):
        old = decode_record(block.buffer, int(block.positions[at]))
        assert (record.topic, record.queue_id) == queues[at]
        assert record.properties == {"A": str(at)}
        assert (record.store_host, record.physical_offset) == (
            options.store_host,
            places.positions[at],
        )
        for name in (
            "body",
            "flag",
            "born_host",
            "born_timestamp_ms",
            "reconsume_times",
            "body_crc",
        ):
            assert getattr(record, name) == getattr(old, name)


def test_records_that_no_store_takes_change_nothing(tmp_path: Path):
    with create(tmp_path / "a") as store:
        store.append(NewMessage("orders", 0, b"x" * 10))
        end = store.log_end
        block = blocks(tmp_path / "a")
        for queue, raw in ((("a b", 0), b""), (("a", 70_000), b""), (("a", 0), b"x" * 40_000)):
            with pytest.raises(InvalidError):
                ReadyRecords(block, [queue], [raw], store.options)
        block.sys_flags[0] |= 0x80
        with pytest.raises(InvalidError):
            ReadyRecords(block, [("a", 0)], [b""], store.options)
        assert store.log_end == end
