"""A small tier of each format, and an archive of it, always with the same bytes; as a program it writes them to a folder."""

from __future__ import annotations

import json
import random
import shlex
import shutil
import sys
import zlib
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pyarrow as pa
import zstandard
from support import keyed, timers
from support.archive_jobs import index as index_archive
from support.command_line import here
from support.jmq_stores import open_store, pristine
from support.kafka_tiers import add_batches, record_batches
from support.keyed import Mail
from support.merging import gather, text
from support.tiers import TierBuilder

from backends.memory import MemoryStore
from backends.wrapping import put_own
from tiered.api.broker_place import Place, RetryPlace
from tiered.archive.job import JobContext, run_job
from tiered.archive.latest import plan_latest, update_latest
from tiered.clock import ManualClock
from tiered.compaction.passes import PassSettings
from tiered.format.record import decode_record
from tiered.index.indexer import IndexBuilder, Indexer
from tiered.journal.append import JournalWriter
from tiered.journal.lease import Holder, LeaseState, encode_lease
from tiered.keys import LEASE, ObjectId, handover_key, mount_prefix
from tiered.log.broker_tables import HANDOVER, Handover
from tiered.log.decode import TierBatch
from tiered.log.reader import TierReader
from tiered.log.state import index_action, queue_action
from tiered.log.timers import HOUR_MS, FactsCopy
from tiered.model import MessageQueue, QueueOffset
from tiered.mount.inflight import QueuePops
from tiered.mount.offsets import MountMachine, ack_row
from tiered.mount.retries import RetryWriter, delivered, sent_back
from tiered.upkeep.compact import Compactor, CompactSettings
from tiered.upkeep.engine import local_engine
from tiered.upkeep.workplace import Workplace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backends.base import ObjectStore
    from tiered.mount.retries import Sent

FOLDER = Path(__file__).parents[1] / "data" / "golden"
MADE_WITH, ANSWERS = "made-with.json", "answers.json"
PLACE = Place("golden", "broker-a")
PREFIX = PLACE.prefix
PLACES = ("tier", "archive", "kafka", "jmq")
NODE, JMQ_BROKER = Place("golden", "1"), Place("golden", "2")
TIME_MS = 1_700_000_000_000
ORDERS, PAYMENTS, PRICES = (MessageQueue(topic, 0) for topic in ("orders", "payments", "prices"))
JMQ = "j01-basic"
SHIPMENTS = MessageQueue("jd/shipments", 0)
KAFKA = "k02-transactions"
"""A captured log with transactions, some of them aborted."""
HOLDER = Holder("host", "boot", "space", 1, 2)
RELEASED = LeaseState(HOLDER, "0badcafe", TIME_MS, released=True)


def packers() -> dict[str, str]:
    """What packs the bytes: with others they may differ, and mean the same."""
    return {
        "zlib": zlib.ZLIB_RUNTIME_VERSION,
        "zstd": ".".join(map(str, zstandard.ZSTD_VERSION)),
        "pyarrow": pa.__version__,
    }


def golden() -> dict[str, bytes]:
    """Every object by its key below its place, one of ``PLACES``."""
    tier, archive, kafka, jmq = (MemoryStore(name) for name in PLACES)
    with ExitStack() as patched:
        patched.enter_context(patch.object(Holder, "present", return_value=HOLDER))
        # Files name the version that made them; it is no part of their format.
        for module in ("archive.parquet", "archive.job"):
            patched.enter_context(patch(f"tiered.{module}.__version__", "0.2.0"))
        patched.enter_context(patch("support.timers.PREFIX", f"{PREFIX}timer/"))
        _tier(tier)
        _archive(tier, archive)
        _kafka(kafka)
        _jmq(jmq)
    return {
        f"{store.url.removeprefix('memory://')}/{info.key}": store.get(info.key)
        for store in (tier, archive, kafka, jmq)
        for info in store.list("")
    }


def _tier(store: ObjectStore) -> None:
    builder = TierBuilder(store, prefix=PREFIX)
    builder.say({"do": "meta", "store": _store_of(PLACE, "rocketmq")})
    _messages(builder)
    _index(builder)
    _compacted(builder)
    _broker_tables(builder)
    builder.journal.write_checkpoint(force=True)
    builder.say(queue_action("seal", ORDERS, 0, segment=_last_base(builder, ORDERS)))
    put_own(store, PREFIX + LEASE, encode_lease(RELEASED))
    _mount(store)
    _retries(store)
    _timers(store)


def _store_of(place: Place, kind: str) -> dict[str, str]:
    return {"cluster": place.cluster, "broker": place.broker, "store_id": "golden", "kind": kind}


def _messages(builder: TierBuilder) -> None:
    """Keys, an inner batch, a damaged record, a gap, what was truncated, expired and begun anew; merged and packed."""

    def post(queue: MessageQueue, *mails: Mail | None, roll: bool = False) -> None:
        base = builder.file(queue).append_offset
        builder.add_batch(keyed.batch_of(queue, base, mails), roll=roll)

    def order(number: int) -> Mail:
        return Mail((f"order-{number}",), f"id-{number}", body=b'{"order":%d}' % number)

    post(ORDERS, order(0), order(1))
    post(ORDERS, order(2), Mail(inner=(order(3), order(4))), roll=True)
    builder.add([b"sound", None, b"sound"], queue=ORDERS)  # the record between them is damaged
    builder.say(queue_action("quarantine", ORDERS, 0, count=1))
    builder.gap(2, queue=ORDERS)
    builder.add([b"behind the gap"], queue=ORDERS)
    post(PAYMENTS, *(order(number) for number in range(4)))
    builder.truncate(2, queue=PAYMENTS)
    post(PAYMENTS, order(12))
    builder.begin_anew(PAYMENTS)
    post(PAYMENTS, order(20), order(21))
    builder.add([text(1, 5_000)], queue=MessageQueue("logs", 1))
    builder.add([text(2, 5_000)], queue=MessageQueue("logs", 1))
    gather(builder, only=["logs"])
    builder.forget()
    expired = {"position": 0, "min_from": 0, "min_to": 2}
    builder.say(queue_action("expire", ORDERS, 0, **expired))
    builder.forget()


def _index(builder: TierBuilder) -> None:
    index = IndexBuilder(builder.store, PREFIX, builder.uploader.next_id)
    indexer = Indexer(index, builder.store, PREFIX)
    while indexer.step(builder.journal.state):
        pass
    builder.say(index_action([index.finish()]))
    index.reset()


def _compacted(builder: TierBuilder) -> None:
    """Of each key of a topic the newest message: sparse sections."""
    for values in ((b"1", b"2"), (b"3", b"4")):
        mails = [Mail(("eur",), body=values[0]), Mail(("usd",), body=values[1])]
        base = builder.file(PRICES).append_offset
        builder.add_batch(keyed.batch_of(PRICES, base, mails))
    base = _last_base(builder, PRICES)
    builder.say(queue_action("seal", PRICES, 0, segment=base))
    store = builder.store
    at = Workplace(store, store, PLACE, ManualClock(), random.Random(5))
    compactor = Compactor(at, CompactSettings(passes=PassSettings(dirty_ratio=0), compression=None))
    compactor.apply(compactor.plan([PRICES.topic]))
    builder.journal.catch_up()
    builder.forget()


def _last_base(builder: TierBuilder, queue: MessageQueue) -> int:
    incarnation = builder.journal.state.incarnation(queue)
    assert incarnation
    return int(incarnation.segments[-1].base_offset)


def _broker_tables(builder: TierBuilder) -> None:
    tables = Handover(
        TIME_MS,
        topics={"orders": {"topicName": "orders", "perm": 6, "readQueueNums": 1, "writeQueueNums": 1}},
        groups={"shop": {"groupName": "shop", "consumeEnable": True}},
        offsets={("shop", "orders"): {0: 3}},
        delay_offsets={3: 12},
        pending=[{"what": "half messages", "count": 1}],
        notes=["topics.json was read from its .bak"],
    )  # fmt: skip
    key = handover_key(PREFIX, TIME_MS, ObjectId(builder.journal.epoch, "0badcafe", 900))
    data = tables.encode()
    put_own(builder.store, key, data)
    mark = {"key": key.removeprefix(PREFIX), "size_bytes": len(data), "time_ms": TIME_MS}
    known = dict(builder.journal.state.store)
    builder.say({"do": "meta", "store": {**known, HANDOVER: mark}})


def _mount(store: ObjectStore) -> None:
    prefix = mount_prefix(PREFIX, PLACE.broker)
    journal = JournalWriter(
        store, prefix, MountMachine(), writer="0badbeef", clock=ManualClock(),
        rng=random.Random(2), stop=Event(),
    )  # fmt: skip
    journal.take_epoch({"host": "host"})
    (handover,) = store.list(f"{PREFIX}meta/handover/")
    pops = QueuePops(2)
    pops.give([2, 3, 4, 5], 1, 0)
    pops.settle(4, 5)
    pops.give([3], 2, 1)
    popped = [{"do": "acks", "rows": [ack_row(("pop", *ORDERS), pops.kept())]}]
    offsets = [["pop", "orders", [0], [2]], ["shop", "orders", [0], [5]]]
    journal.append([
        {"do": "offsets", "rows": offsets},
        *popped,
        {"do": "modes", "rows": [["pop", "orders", "POP", 1]]},
        {"do": "handover", "key": handover.key.removeprefix(PREFIX)},
    ])  # fmt: skip
    journal.write_checkpoint(force=True)
    pops.settle(7, 8)
    journal.append([
        {"do": "offsets", "rows": [["shop", "orders", [0], [6]]]},
        {"do": "acks", "rows": [ack_row(("pop", *ORDERS), pops.kept())]},
    ])  # fmt: skip
    put_own(store, prefix + LEASE, encode_lease(RELEASED))


def _retries(store: ObjectStore) -> None:
    """Of four messages that were sent back two wait, one was given out again, and one is a dead letter."""
    prefix, clock = RetryPlace(PLACE.cluster, PLACE.broker, PLACE.broker).prefix, ManualClock()
    log = RetryWriter(
        store, store, prefix, clock, random.Random(4), place=PLACE, old_end=lambda _queue: 0
    )  # fmt: skip
    log.begin()
    reader = TierReader(store, PREFIX)
    reader.refresh()
    batch = reader.queue(ORDERS).read(QueueOffset(2), bytes_max=1, count_max=1)
    assert isinstance(batch, TierBatch)
    record = decode_record(batch.records.data)

    def back(level: int, times: int = 0) -> Sent:
        made = replace(record, reconsume_times=times)
        return sent_back(made, "shop", level=level, max_times=16)

    log.commit([back(1), back(3), back(-1)])
    clock.advance(1)
    due = [one for one in log.pending() if one.due_ms <= clock.now_ms()]
    log.commit([delivered(record) for one in due for record in one.records], due)
    log.tidy(1 << 40)  # writes a checkpoint
    log.commit([back(0, times=1)])


def _timers(store: ObjectStore) -> None:
    """Three hours, of which one is handed over; one timer is cancelled."""
    hour = TIME_MS // HOUR_MS
    with timers.Timers(store, ManualClock(hour * HOUR_MS)) as made:
        made.put([(hour + hours) * HOUR_MS + 60_000 * n for hours in (1, 2, 3) for n in (1, 2)])
        made.hand(timers.Box(), near_ms=2 * HOUR_MS)
        journal = made.journal()
        journal.catch_up()
        journal.append([{"do": "timer_cancel", "cancel": [[hour + 3, 0]]}])
        FactsCopy(store, timers.PREFIX).keep(journal.state.timers, journal.number)


def _archive(tier: ObjectStore, archive: ObjectStore) -> None:
    at = JobContext(tier, PLACE, archive, archive, ManualClock(), random.Random(3))
    run_job(at, local_engine(at.context, 1))
    index_archive(archive)
    plan = plan_latest(archive, PLACE, PRICES.topic, across_queues=False)
    update_latest(archive, plan, ManualClock(), "run")


def _kafka(store: ObjectStore) -> None:
    builder = TierBuilder(store, prefix=NODE.prefix)
    builder.say({"do": "meta", "store": _store_of(NODE, "kafka")})
    add_batches(builder, record_batches(KAFKA)[MessageQueue("txn", 0)][:2])
    builder.journal.write_checkpoint(force=True)


QUESTIONS = {
    "tier": [
        "ls URL --incarnations --json",
        "ls URL --objects --json",
        "status URL --json",
        "cat URL orders --json",
        "cat URL payments --json --incarnation 0",
        "cat URL prices --json",
        "cat URL logs --json",
        "query URL orders --key order-3 --json",
        "query URL payments --key id-20 --json",
        "query URL prices --key usd --json",
        "timer ls URL --json",
        "timer show URL 2023-11-15T01:00:00Z --json",
        "verify URL --deep --json",
        "verify URL --deep --timers --json",
        "lease URL --json",
        "cat URL SCHEDULE_TOPIC_XXXX --json",
        "cat URL %RETRY%shop --json",
        "cat URL %DLQ%shop --json",
        "verify URL --retries broker-a --deep --json",
        "rebuild URL --json",
    ],
    "archive": [
        "query URL orders --key order-3 --json",
        "query URL prices --key eur --json",
        """sql URL 'SELECT queue_offset, keys, body FROM orders ORDER BY 1' --json""",
        """sql URL 'SELECT queue_offset FROM "prices$latest" ORDER BY 1' --json""",
    ],
    "jmq": ["cat URL jd/shipments --json", "ls URL --json", "verify URL --deep --json"],
    "kafka": ["cat URL txn --json", "ls URL --json", "verify URL --deep --json"],
}
"""What is asked of each part, and answered the same by every later version."""


def ask(folder: Path, part: str, question: str) -> Any:
    """The answer of the command line, as JSON without the URL and the time."""
    url = f"file://{folder / part}"
    said = here(*(url if word == "URL" else word for word in shlex.split(question))).good()
    answer = json.loads(said.out.replace(url.encode(), b"URL"))
    return {name: value for name, value in answer.items() if name != "now_ms"}


def _jmq(store: ObjectStore) -> None:
    builder, local = TierBuilder(store, prefix=JMQ_BROKER.prefix), open_store(pristine(JMQ))
    builder.say({"do": "meta", "store": _store_of(JMQ_BROKER, "jmq")})
    batch = local.read(SHIPMENTS, QueueOffset(0), bytes_max=4_000, count_max=20)
    local.close()
    assert batch
    add_batches(builder, [batch])
    builder.journal.write_checkpoint(force=True)


def write(folder: Path) -> None:
    """Write it, in the place of what is there, with what is answered about it."""
    made = golden()
    shutil.rmtree(folder, ignore_errors=True)
    for name, data in made.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    answers = {
        part: {question: ask(folder, part, question) for question in questions}
        for part, questions in QUESTIONS.items()
    }
    (folder / ANSWERS).write_text(json.dumps(answers, indent=1, sort_keys=True) + "\n")
    (folder / MADE_WITH).write_text(json.dumps(packers(), indent=2) + "\n")


def versions() -> Iterator[Path]:
    """A folder for each version whose formats are committed, the oldest first."""
    found = (path for path in FOLDER.iterdir() if path.is_dir())
    yield from sorted(found, key=lambda path: [int(part) for part in path.name.split(".")])


if __name__ == "__main__":
    write(Path(sys.argv[1]).resolve())
