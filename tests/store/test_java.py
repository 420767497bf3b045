"""Java's own store reads what the embedded store wrote; a real broker starts on what a killed writer left."""

from __future__ import annotations

import base64
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from support.command_line import here
from support.embedded import create, reopen
from support.java_lines import check_as_java_reads
from support.oracle import Broker, dump, needs_java, run
from support.orders_writer import OPTIONS, ORDERS
from support.stored import KINDS

from tiered.model import MessageQueue, QueueOffset
from tiered.store.new_message import NewMessage, delayed
from tiered.store.special import inner_batch
from tiered.store.store_options import Compacting, StoreOptions
from tiered.store.transactions import Transactions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tiered.format.record import Record
    from tiered.store.embedded import MessageStore

pytestmark = [pytest.mark.java, needs_java]


def test_java_reads_what_we_wrote(tmp_path: Path):
    rng = random.Random(1)
    messages = [message for message in KINDS if not message.sys_flag]
    options = StoreOptions(65_536, 50, 1000, 4000)
    with create(tmp_path / "s", options) as store:
        for _ in range(40):
            store.append_batch(messages)
            store.append(
                NewMessage("sizes", rng.randrange(3), rng.randbytes(rng.randrange(20_000)))
            )
    with reopen(tmp_path / "s", options) as store:
        store.begin_queue(MessageQueue("far", 0), QueueOffset(120))
        store.append_batch([NewMessage("far", 0, b"x", tags="täg")] * 70)
        store.append(NewMessage("plain", 0, b"after a stop"))
    check_as_java_reads(tmp_path / "s", 40 * (len(messages) + 1) + 71)


def pulled(broker: Broker) -> list[dict[str, Any]]:
    return run("pull", "--namesrv", broker.address, "--topic", "orders")


def killed_writer(root: Path) -> list[dict[str, int]]:
    """Receipts of a process that appended under sync and was killed in the middle."""
    done = subprocess.run(
        [sys.executable, "-m", "support.orders_writer", str(root)],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == -9, done.stderr.decode()
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_broker_starts_on_a_store_whose_writer_was_killed(tmp_path: Path):
    root = tmp_path / "s"
    receipts = killed_writer(root)
    assert len(receipts) == 500
    told = {
        line["physical_offset"] for line in map(json.loads, dump(root)) if line["type"] == "message"
    }
    assert {receipt["at"] for receipt in receipts} <= told
    with Broker(tmp_path, root) as broker:
        broker.start()
        lines = pulled(broker)
        assert {(at % 4, receipt["offset"]) for at, receipt in enumerate(receipts)} <= {
            (line["queue_id"], line["queue_offset"]) for line in lines
        }
        broker.kill()
    with reopen(root, OPTIONS) as store:
        assert store.append(ORDERS[0]).queue_offset == len(lines) // 4
    check_as_java_reads(root, len(lines) + 1)


def pulled_from(broker: Broker, topic: str, count: int) -> list[dict[str, Any]]:
    """Once there are as many as expected; what is delayed takes a while."""
    lines: list[dict[str, Any]] = []
    for _ in range(10):
        lines = run("pull", "--namesrv", broker.address, "--topic", topic)
        if len(lines) >= count:
            break
    return lines


@pytest.mark.slow
def test_a_broker_delivers_and_serves_what_it_would_have_stored_itself(tmp_path: Path):
    """Delayed messages are due, batches are unpacked, a committed transaction is there, and none that is undecided."""
    root = tmp_path / "s"
    with create(root, replace(OPTIONS, batchqueue_file_items=1000)) as store:
        store.create_topic("later", queues=4)
        store.create_topic("grouped", queues=2, is_batch=True)
        for at in range(5):
            store.append(
                delayed(NewMessage("later", at % 4, b"%d" % at, tags="t", keys=f"k{at}"), 1)
            )
        parts = [NewMessage("grouped", 1, b"%d" % at, keys=f"k{at}") for at in range(10)]
        store.append_as_is(store.complete(inner_batch(parts)))
        store.append(NewMessage("grouped", 1, b"10"))
        bank = Transactions(store)
        halves = [bank.prepare(NewMessage("bank", 0, b"%d" % at), "group") for at in range(3)]
        assert store.wait_listed()
        bank.commit(halves[0].offset_msg_id)
        bank.rollback(halves[1].offset_msg_id)
    with Broker(tmp_path, root) as broker:
        broker.start()
        (line,) = pulled_from(broker, "bank", 1)
        assert (line["body_base64"], line["sys_flag"]) == ("MA==", 8)
        assert line["prepared_transaction_offset"] == halves[0].physical_offset
        lines = pulled_from(broker, "grouped", 11)
        assert [base64.b64decode(line["body_base64"]) for line in lines] == [
            b"%d" % at for at in range(11)
        ]
        assert [line["queue_offset"] for line in lines] == list(range(11))
        lines = pulled_from(broker, "later", 5)
        assert {(base64.b64decode(line["body_base64"]), line["queue_id"]) for line in lines} == {
            (b"%d" % at, at % 4) for at in range(5)
        }
        broker.kill()
    with reopen(root, OPTIONS) as store:
        assert store.queue_end(MessageQueue("grouped", 1)) == 11
        assert [half.queue_offset for half in Transactions(store).undecided()] == [2]


@pytest.mark.slow
def test_a_real_broker_goes_on_with_a_compaction_log_of_ours(tmp_path: Path):
    """A Java client pulls from it exactly what our own reader gives."""
    options = replace(
        OPTIONS, compacting=Compacting(23_000, 100, interval_s=1e9), message_bytes_max=8_000
    )
    queue = MessageQueue("prices", 0)
    with create(tmp_path / "s", options) as store:
        store.create_topic("prices", queues=1, is_compacted=True)
        for at in range(500):
            store.append(NewMessage("prices", 0, b"%d " % at + b"x" * 100, keys=f"k{at % 23}"))
        store.wait_listed()
        assert store.compact().gone_messages
        at, end = store.reader.bounds(queue)
        wanted = []
        while at < end:
            got = store.reader.get(queue, at)
            wanted += [(one.queue_offset, one.properties["KEYS"]) for one in got.records]
            at = got.next_offset
    sizes = {"compactionMappedFileSize": 25_000, "compactionCqMappedFileSize": 4_600}
    (tmp_path / "b").mkdir()
    with Broker(tmp_path / "b", tmp_path / "s", **sizes) as broker:
        broker.start()
        found = run("pull", "--namesrv", broker.address, "--topic", "prices")
    assert [(one["queue_offset"], one["keys"]) for one in found] == wanted
    assert len(wanted) < 400


@pytest.mark.slow
def test_a_real_broker_goes_on_with_a_replica_that_was_refilled(tmp_path: Path):
    """Java reads all that was taken in; a queue of which nothing else is there goes on where the other one ended."""
    options = replace(
        OPTIONS, compacting=Compacting(23_000, 100, interval_s=1e9), message_bytes_max=8_000
    )
    busy, quiet, root = MessageQueue("prices", 0), MessageQueue("prices", 1), tmp_path / "s"
    sent = {busy: [f"k{at % 50}" for at in range(300)], quiet: [f"q{at % 9}" for at in range(40)]}

    def send(store: MessageStore, queue: MessageQueue, first: int = 0) -> None:
        for key in sent[queue][first:]:
            store.append(NewMessage("prices", queue.queue_id, b"x" * 100, keys=key))
        store.wait_listed()

    with create(tmp_path / "other", options) as other:
        other.create_topic("prices", queues=2, is_compacted=True)
        for queue in sent:
            send(other, queue)
    with create(root, options) as store:
        store.create_topic("prices", queues=2, is_compacted=True)
        store.begin_queue(busy, QueueOffset(200))
        send(store, busy, 200)
    here("store", "refill", root, "--from", tmp_path / "other").good()
    found = [line for line in map(json.loads, dump(root)) if line["type"] == "compacted"]
    with reopen(root, options) as store:
        wanted = [
            (queue.queue_id, record.queue_offset)
            for queue in sent
            for record in every_record(store, queue)
        ]
    assert [(line["queue_id"], line["queue_offset"]) for line in found] == wanted
    (tmp_path / "b").mkdir()
    sizes = {"compactionMappedFileSize": 25_000, "compactionCqMappedFileSize": 4_600}
    with Broker(tmp_path / "b", root, **sizes) as broker:
        broker.start()
        more = ("--topic", "prices", "--queue", "1", "--count", "2", "--keys", "5")
        acked = run("produce", "--namesrv", broker.address, *more)
    assert [line["queue_offset"] for line in acked] == [40, 41]


def every_record(store: MessageStore, queue: MessageQueue) -> Iterator[Record]:
    at, end = store.reader.bounds(queue)
    while at < end:
        got = store.reader.get(queue, at)
        yield from got.records
        at = got.next_offset
