"""``tiered demo``: the whole story on the embedded default, without a server.

Everything lies in one directory, and the mark in it says what a demo left there. Only a directory in which nothing has
changed since is ever emptied: somebody may have written to the demo's store or tier.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends.lazy_dataclass import dataclass, picked
from backends.local_files import is_vacant
from tiered.cli import kinds
from tiered.cli.exits import DONE, NEEDS_A_PERSON
from tiered.cli.frame import command
from tiered.cli.options import option
from tiered.cli.output import show
from tiered.cli.values import counted, format_size
from tiered.errors import InvalidError
from tiered.model import TimestampMs

if TYPE_CHECKING:
    from tiered.api.broker_place import Place
    from tiered.cli.call import Call
    from tiered.clock import Clock
    from tiered.store.embedded import MessageStore
    from tiered.store.new_message import NewMessage
    from tiered.store.store_options import StoreOptions

MARK = ".tiered-demo"
TOPICS = ("demo-orders", "demo-events")
QUEUES = 4
LOG_FILE_BYTES = 16 << 20
INDEX_SLOTS = 100_000
WORDS = ("order", "paid", "sent", "tier", "queue", "offset", "broker", "ledger", "message", "body")
BODY_BYTES = 512
_MADE = ("store", "tier", "timed", "delivered")
_BATCH = 100
_DAY_MS = 86_400_000
TIMERS = 50
SOON_MS = 1_500
MONTH_MS = 30 * 24 * 3_600_000
NEAR_MS = 10_000
"""The near window of the timers' story."""


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What ``tiered demo`` can be told."""

    dir: str | None = option(
        "working directory; an earlier demo there is replaced",
        kinds.DIR,
        default_text="a new temporary one",
    )
    messages: int = option("messages to store", kinds.COUNT, default=10_000)
    source: str = option(
        "a store made here, or a captured Kafka log directory",
        kinds.one_of("NAME", "rocketmq", "kafka"),
        default="rocketmq",
    )


@command("demo", DemoOptions)
def run(call: Call, options: DemoOptions) -> int:
    """Demonstrates everything on a local folder, without a server.

    Examples:
        tiered demo
        tiered demo --dir /tmp/tiered-demo --messages 1000 --json
    """
    folder = prepare(options.dir)
    store, tier = folder / "store", folder / "tier"
    url = tier.as_uri()
    if options.source == "kafka":
        return run_kafka(call, folder)
    with call.progress("demo", "making a store") as progress:
        made = make(call, store, options.messages)
        progress.tell("tiering it")
        tiered = tier_all(call, store, url)
        progress.tell("reading it back")
        read = read_back(call, url)
        progress.tell("verifying it")
        verified = verify(call, url, store)
        progress.tell("keeping timers in the tier")
        timers = keep_timers(call, folder, url)
    document = {
        "format": 1,
        "store": str(store),
        "url": url,
        "made": made,
        "tiered": tiered,
        "read": read,
        "verified": verified,
        "timers": timers,
        "is_well": is_well(made, tiered, read, verified) and timers["is_well"],
    }
    return tell(call, folder, document, story(document))


def tell(call: Call, folder: Path, document: dict[str, Any], lines: list[str]) -> int:
    """Tell what was done, and remember what is there."""
    (folder / MARK).write_text(fingerprint(folder))
    show(call, document, lines=lines)
    return DONE if document["is_well"] else NEEDS_A_PERSON


def run_kafka(call: Call, folder: Path) -> int:
    """The story of a Kafka node that is stopped: two partitions with transactions, of which one was never ended."""
    import tarfile

    store, url = folder / "store", (folder / "tier").as_uri()
    with tarfile.open(Path(__file__).with_name("demo_kafka.tar.gz")) as archive:
        archive.extractall(store, filter="data")
    tiered = tier_all(call, store, url)
    read = {
        level: count_records(call, url, level) for level in ("read_uncommitted", "read_committed")
    }
    verified = verify(call, url, store)
    document = {
        "format": 1,
        "store": str(store),
        "url": url,
        "tiered": tiered,
        "read": read,
        "verified": verified,
        "is_well": bool(tiered["is_complete"] and verified["is_clean"])
        and read["read_uncommitted"] > read["read_committed"] > 0,
    }
    return tell(call, folder, document, kafka_story(document))


def count_records(call: Call, url: str, isolation: str) -> int:
    """How many records a consumer of this isolation would be given."""
    from tiered.api.tier import Tier

    tier = Tier(call.tier(url, isolation=isolation))
    return sum(1 for topic in tier.topics() for _ in tier.read_topic(topic))


def kafka_story(document: dict[str, Any]) -> list[str]:
    """What was done, and what to try next."""
    from shlex import quote

    tiered, read, checked = (document[name] for name in ("tiered", "read", "verified"))
    store, url, program = quote(document["store"]), document["url"], started_as()
    return [
        f"1. Unpacked the log directory of a Kafka node: {store}",
        (
            f"2. Tiered it, as `tiered attach --once --seal` does: {counted(tiered['messages'], 'offset')},"
            f" {format_size(tiered['size_bytes'])} of batches as they are: {url}"
        ),
        (
            f"3. Read it back: {counted(read['read_uncommitted'], 'record')} were written, and"
            f" {read['read_committed']:,} are committed; the rest was aborted, or stands behind a transaction that is open"
        ),
        (
            f"4. Verified every byte, and held {counted(checked['compared_messages'], 'offset')} against the store:"
            f" {counted(checked['problem_count'], 'problem')}."
        ),
        "",
        "Try next:",
        f"  {program} cat {url} txn --count 3",
        f"  {program} cat {url} txn --count 3 --isolation read_uncommitted",
        f"  {program} attach {store} --to {url} --once",
    ]


def prepare(asked: str | None) -> Path:
    """The directory to work in, without what an earlier demo left there.

    Raises:
        InvalidError: It has things that no demo made, or that were changed since.
    """
    if asked is None:
        folder = Path(tempfile.mkdtemp(prefix="tiered-demo-"))
    else:
        folder = Path(asked).absolute()
        if folder.exists() and not folder.is_dir():
            raise InvalidError("not a directory", where=str(folder), do="name another with --dir")
        is_ours = (folder / MARK).exists()
        if not is_ours and not is_vacant(folder):
            raise InvalidError(
                "the directory is not empty, and no demo made it",
                where=str(folder),
                do="name another with --dir",
            )
        if is_ours and (folder / MARK).read_text() != fingerprint(folder):
            raise InvalidError(
                "what a demo made there was used since, or that demo did not end",
                where=str(folder),
                do="name another with --dir, or delete this one",
            )
        folder.mkdir(parents=True, exist_ok=True)
        for name in _MADE:
            shutil.rmtree(folder / name, ignore_errors=True)
    (folder / MARK).write_text("")
    return folder


def fingerprint(folder: Path) -> str:
    """Changes with each file that a demo made there: its name, its size, or when it was written."""
    files = sorted(path for name in _MADE for path in (folder / name).rglob("*") if path.is_file())
    said = [(str(path.relative_to(folder)), path.stat()) for path in files]
    listed = "\n".join(f"{name}\0{found.st_size}\0{found.st_mtime_ns}" for name, found in said)
    return hashlib.sha256(listed.encode("utf-8", "surrogateescape")).hexdigest()


def make(call: Call, store: Path, count: int) -> dict[str, Any]:
    """Store messages of a day whose bodies can be read, without a broker."""
    import random

    from tiered.store.new_message import NewMessage

    rng, late = random.Random(1), random.Random(2)  # noqa: S311 (content, no secret)
    clock, end_ms = _PastClock(call.clock), call.clock.now_ms()
    size = 0
    with made_store(call, store, clock) as writer:
        for start in range(0, count, _BATCH):
            share = start / count  # most come in the middle of the day
            share += math.sin(2 * math.pi * share) / 10
            clock.stopped_ms = end_ms - round((1 - share) * _DAY_MS)
            batch = [
                NewMessage(
                    topic=TOPICS[number % len(TOPICS)],
                    queue_id=number // len(TOPICS) % QUEUES,
                    body=" ".join(rng.choices(WORDS, k=BODY_BYTES // 4)).encode()[:BODY_BYTES],
                    tags=rng.choice(WORDS),
                    keys=f"key-{number}",
                    born_timestamp_ms=clock.stopped_ms - round(late.lognormvariate(1.5, 0.8)),
                )
                for number in range(start, min(start + _BATCH, count))
            ]
            size += sum(stored.size_bytes for stored in writer.append_batch(batch))
    return {"messages": count, "size_bytes": size, "topics": len(TOPICS), "queues": QUEUES}


class _PastClock:
    """A clock that goes, and whose time of day somebody sets."""

    def __init__(self, going: Clock) -> None:
        self.stopped_ms: int = going.now_ms()
        self.monotonic_s = going.monotonic_s
        self.wait = going.wait

    def now_ms(self) -> TimestampMs:
        return TimestampMs(self.stopped_ms)


def made_store(call: Call, folder: Path, clock: Clock | None = None) -> MessageStore:
    """A new one, to write to."""
    from tiered.store.embedded import MessageStore

    return MessageStore.create(
        folder,
        cluster="demo-cluster",
        broker="demo-broker",
        clock=clock or call.clock,
        options=store_options(),
    )


def store_options() -> StoreOptions:
    """Files of a small store."""
    from tiered.store.store_options import StoreOptions

    return StoreOptions(
        LOG_FILE_BYTES, index_slots=INDEX_SLOTS, index_items=4 * INDEX_SLOTS, topic_queues=QUEUES
    )


def tier_all(call: Call, store: Path, url: str) -> dict[str, Any]:
    """As ``attach --once --seal``."""
    from tiered.attach.writer import Attachment, AttachSettings

    settings = AttachSettings(cluster=call.common.cluster, broker=call.common.broker)
    attachment = Attachment.open(str(store), url, settings, clock=call.clock)
    try:
        result = attachment.run(once=True, seal=True)
    finally:
        attachment.close()
    assert attachment.dispatcher is not None
    counters = attachment.dispatcher.counters
    return {
        **picked(counters, "messages", "parts"),
        "size_bytes": counters.record_bytes,
        "requests": attachment.meter.snapshot().requests,
        "is_complete": result.is_complete,
    }


def read_back(call: Call, url: str) -> dict[str, Any]:
    """Read every queue to its end; the first message is shown."""
    from tiered.log.messages import items
    from tiered.log.state import Gap

    messages = size = 0
    first: str | None = None
    tier = call.tier(url)
    for queue in tier.queues():
        reader = tier.reader.queue(queue)
        for found in reader.batches(reader.incarnation.min_offset):
            if isinstance(found, Gap):
                continue
            messages += int((found.records.sizes > 0).sum())
            size += memoryview(found.records.data).nbytes
            if first is None:
                record = next(items(found.records)).record
                first = record.body.decode("utf-8", "backslashreplace")
    return {"messages": messages, "size_bytes": size, "first_body": first}


def verify(call: Call, url: str, store: Path) -> dict[str, Any]:
    """As ``verify --deep --store``."""
    from tiered.api.broker_place import choose_place
    from tiered.log.verify import verify_tier

    objects = call.objects(url)
    place = choose_place(objects, call.common.cluster, call.common.broker)
    report = verify_tier(objects, place.prefix, deep=True, local=call.local(str(store)))
    return {
        "is_clean": report.is_clean,
        "problem_count": sum(report.problem_counts.values()),
        "checked_messages": report.checked_messages,
        "compared_messages": report.comparison.messages if report.comparison else 0,
    }


def keep_timers(call: Call, folder: Path, url: str) -> dict[str, Any]:
    """Messages that are due in a second, and one that is due in a month: as ``timer import`` and ``timer run --once``."""
    import random

    from tiered.attach.timer_import import ImportSettings, import_timers
    from tiered.attach.timer_run import RunSettings, hand_over
    from timer.local_target import LocalTarget

    now_ms = int(call.clock.now_ms())
    dues = [now_ms + SOON_MS + 20 * number for number in range(TIMERS)] + [now_ms + MONTH_MS]
    cluster, broker = call.common.cluster, call.common.broker
    with made_store(call, folder / "timed") as writer:
        writer.append_batch([timer(number, due) for number, due in enumerate(dues)])
    settings = ImportSettings(near_ms=0, cluster=cluster, broker=broker)
    taken = import_timers(str(folder / "timed"), url, settings, clock=call.clock)
    targets: list[LocalTarget] = []

    def opened(place: Place, _source: object, _is_ours: object) -> LocalTarget:
        target = LocalTarget.open(
            str(folder / "delivered"),
            cluster=place.cluster,
            broker=place.broker,
            clock=call.clock,
            rng=random.SystemRandom(),
            options=store_options(),
        )
        targets.append(target)
        return target

    near = RunSettings(near_ms=NEAR_MS, once=True, cluster=cluster, broker=broker)
    ran = hand_over(url, opened, near, options=call.s3_options(), clock=call.clock)
    return {
        "taken": taken.total.taken,
        "delivered": ran.delivered,
        "late_ms_max": targets[0].late_ms_max,
        "is_well": (taken.total.taken, ran.delivered) == (len(dues), TIMERS),
    }


def timer(number: int, due_ms: int) -> NewMessage:
    """A message as a broker keeps it until it is due."""
    from tiered.format import properties as names
    from tiered.local.catalog import WHEEL_TOPIC
    from tiered.store.new_message import NewMessage

    kept = {
        names.TIMER_OUT_MS: str(due_ms),
        names.REAL_TOPIC: TOPICS[0],
        names.REAL_QUEUE_ID: str(number % QUEUES),
    }
    return NewMessage(WHEEL_TOPIC, 0, b"remember %d" % number, properties=kept)


def is_well(
    made: dict[str, Any], tiered: dict[str, Any], read: dict[str, Any], verified: dict[str, Any]
) -> bool:
    """Whether every step saw every message."""
    counts = {made["messages"], tiered["messages"], read["messages"]}
    counts |= {verified["checked_messages"], verified["compared_messages"]}
    return len(counts) == 1 and bool(tiered["is_complete"] and verified["is_clean"])


def story(document: dict[str, Any]) -> list[str]:
    """What was done, and what to try next."""
    made, tiered, read, checked, timers = (
        document[name] for name in ("made", "tiered", "read", "verified", "timers")
    )
    from shlex import quote

    store, url = quote(document["store"]), document["url"]
    program = started_as()
    shown = (read["first_body"] or "")[:40]
    return [
        (
            f"1. Made a store of {counted(made['messages'], 'message')} in {made['topics']} topics of"
            f" {made['queues']} queues, in the format of a RocketMQ broker: {store}"
        ),
        (
            f"2. Tiered it, as `tiered attach --once --seal` does: {counted(tiered['messages'], 'message')},"
            f" {format_size(tiered['size_bytes'])} in {counted(tiered['parts'], 'part')},"
            f" {counted(tiered['requests'], 'request')}: {url}"
        ),
        f"3. Read it back: {counted(read['messages'], 'message')}; the first begins {shown!r}",
        f"4. Verified every byte, and held {counted(checked['compared_messages'], 'message')}"
        " against the store: "
        + ("equal." if document["is_well"] else f"{counted(checked['problem_count'], 'problem')}."),
        (
            f"5. Took {counted(timers['taken'], 'timer')} of another store into hourly files, as `tiered timer import` does;"
            f" {timers['delivered']:,} were due in a second or two and came, {timers['late_ms_max']} ms late at most;"
            " the last is due in a month"
        ),
        "",
        "Try next:",
        f"  {program} status {url} --store {store}",
        f"  {program} cat {url} {TOPICS[0]} --count 3",
        f"  {program} verify {url} --deep",
        f"  {program} timer ls {url} --cost",
        f"  rm -r {quote(str(Path(document['store']).parent))}",
        f"With a bucket of yours: {program} attach {store} --to s3://BUCKET/PREFIX --once{s3_needs()}",
    ]


def s3_needs() -> str:
    """What has to be installed before S3 can be reached; "" where it is."""
    from importlib.util import find_spec

    return "" if find_spec("obstore") else " (first `make setup`, or pip install 'tieredmq[s3]')"


def started_as() -> str:
    """What a shell starts this program by: its name where that leads here, else as it was started now."""
    from shlex import quote

    ours = sys.argv[0]
    if Path(ours).parts[-2:] == ("tiered", "__main__.py"):
        return f"{quote(sys.executable)} -m tiered"
    if Path(ours).name != "tiered":  # a program of somebody's that calls this one
        return "tiered"
    named = shutil.which("tiered")
    leads_here = named is not None and Path(named).resolve() == Path(ours).resolve()
    return "tiered" if leads_here else quote(ours)
