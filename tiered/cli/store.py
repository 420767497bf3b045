"""``tiered store``: local stores in a broker's own format, made and written without a broker."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from typing import TYPE_CHECKING, Any, BinaryIO

from backends.lazy_dataclass import dataclass, picked
from tiered.cli import kinds
from tiered.cli.exits import DONE, NEEDS_A_PERSON
from tiered.cli.frame import group
from tiered.cli.options import StoreFileOptions, argument, flag, maybe, option, required, several
from tiered.cli.output import show
from tiered.cli.signals import at_end
from tiered.cli.values import counted
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from tiered.api.open_tier import OpenTier
    from tiered.cli.call import Call
    from tiered.local.interface import LocalStore, RecordBatch
    from tiered.model import MessageQueue, QueueBounds, QueueOffset
    from tiered.store.embedded import MessageStore
    from tiered.store.new_message import NewMessage
    from tiered.store.store_options import StoreOptions

CLUSTER, BROKER = "DefaultCluster", "broker"
_BATCH = 64
_WINDOW_BYTES = 4 << 20
_FOLLOW_S = 0.2
_GIVE = 'give {"topic": …, "body": TEXT}, or body_base64 for bytes, or what `tiered cat` prints'


STORE = group(
    "store",
    "Makes and writes local stores without a broker.",
    examples=["tiered store create /tmp/store", "tiered store info /tmp/store"],
)


@dataclass(frozen=True, kw_only=True)
class StoreDirOptions:
    """What every command of ``tiered store`` is told."""

    dir: str = argument("store directory")


@dataclass(frozen=True, kw_only=True)
class CreateOptions(StoreDirOptions, StoreFileOptions):
    """What ``tiered store create`` can be told."""


@dataclass(frozen=True, kw_only=True)
class TopicOptions(StoreDirOptions):
    """What ``tiered store topic`` can be told."""

    topic: str = argument()
    queues: int = option("queues, at least", kinds.COUNT, default=8)
    compacted: bool = flag("cleanup.policy=COMPACTION; refuses messages without a key")


@dataclass(frozen=True, kw_only=True)
class PutOptions(StoreDirOptions):
    """What ``tiered store put`` can be told."""

    file: str | None = maybe("JSON lines [default: stdin]")
    sync: bool = flag("sync each batch to disk")
    keep_offsets: bool = flag("start a new queue at its first message's offset, and refuse gaps")


@dataclass(frozen=True, kw_only=True)
class TailOptions(StoreDirOptions):
    """What ``tiered store tail`` can be told."""

    topic: str | None = maybe("only this topic")
    count: int = option("messages per queue", kinds.NUMBER, default=10)
    follow: bool = flag("continue with new messages")


@dataclass(frozen=True, kw_only=True)
class RecoverOptions(StoreDirOptions):
    """What ``tiered store recover`` can be told."""

    anew: bool = flag("rebuild consume queues and key index from the whole log")


@dataclass(frozen=True, slots=True)
class _Line:
    """What one line says."""

    place: str  # its number, for errors
    document: dict[str, Any]  # its object


@STORE.has("create", CreateOptions)
def create(call: Call, options: CreateOptions) -> int:
    """Makes an empty store directory.

    Examples:
        tiered store create /tmp/store
        tiered store create /tmp/store --log-file-size 16MiB --cluster c1 --broker b1
    """
    from tiered.store.embedded import MessageStore
    from tiered.store.store_options import StoreOptions

    kept = StoreOptions(options.log_file_size_bytes, options.queue_items)
    cluster, broker = call.common.cluster or CLUSTER, call.common.broker or BROKER
    store = MessageStore.create(
        options.dir, cluster=cluster, broker=broker, clock=call.clock, options=kept
    )
    store.close()
    return _tell(call, {"store": store.root, "cluster": cluster, "broker": broker})


@STORE.has("topic", TopicOptions)
def topic(call: Call, options: TopicOptions) -> int:
    """Makes a topic, or adds queues to one.

    Examples:
        tiered store topic /tmp/store orders --queues 16
        tiered store topic /tmp/store prices --queues 4 --compacted
    """
    with open_store(call, options.dir) as store:
        store.create_topic(options.topic, queues=options.queues, is_compacted=options.compacted)
    made = {"topic": options.topic, "queues": options.queues, "compacted": options.compacted}
    return _tell(call, {"store": store.root, **made})


@STORE.has("put", PutOptions)
def put(call: Call, options: PutOptions) -> int:
    """Appends messages: JSON lines, of a topic and a body at least.

    Examples:
        echo '{"topic": "orders", "body": "one"}' | tiered store put /tmp/store
        tiered store put /tmp/store --keep-offsets messages.jsonl
    """
    from tiered.store.store_options import Flush, StoreOptions

    flush = Flush.SYNC if options.sync else Flush.ASYNC
    count = 0
    whole_batches = threading.Lock()

    def close_now() -> None:
        whole_batches.acquire()  # for good: nothing is put any more
        store.close()

    with contextlib.ExitStack() as stack:
        lines = _lines(options.file, stack)
        store = open_store(call, options.dir, StoreOptions(flush=flush))
        stack.enter_context(at_end(close_now))
        stack.enter_context(store)
        for batch in _batches(lines):
            messages = [message_of(line.document, where=line.place) for line in batch]
            with whole_batches:
                if options.keep_offsets:
                    _check_offsets(store, batch, messages)
                store.append_batch(messages)
            count += len(batch)
        store.flush()
    return _tell(call, {"store": store.root, "messages": count, "log_end": store.log_end})


@STORE.has("tail", TailOptions)
def tail(call: Call, options: TailOptions) -> int:
    """Prints the last messages of a store directory.

    Examples:
        tiered store tail /tmp/store orders --count 5
        tiered store tail /tmp/store --follow
    """
    from tiered.log.messages import messages_lines
    from tiered.model import QueueOffset

    topic, count, has_printed = options.topic, options.count, False
    store = call.local(options.dir)
    store.refresh()
    starts = {
        queue: QueueOffset(max(found.min, found.end - count))
        for queue, found in store.queues().items()
    }
    with contextlib.closing(store.follow(starts)) as follower:
        while True:
            for batch in follower.poll(_WINDOW_BYTES):
                if topic is None or batch.queue.topic == topic:
                    for line in messages_lines(batch, None, raw_body=False):
                        call.stdout.write(line + b"\n")
                        has_printed = True
            if follower.is_idle:
                call.stdout.flush()
                if not options.follow:
                    if count and not has_printed:
                        call.say(_no_messages(store.queues(), topic))
                    return DONE
                call.clock.wait(threading.Event(), _FOLLOW_S)


def _no_messages(queues: Mapping[MessageQueue, QueueBounds], topic: str | None) -> str:
    """What was looked for, and what there is."""
    from tiered.cli.cat import bounds_text

    of_it = {queue: found for queue, found in queues.items() if topic in {None, queue.topic}}
    if topic is None and not queues:
        return "tiered: no messages: the store has no queues"
    if topic is None:
        return f"tiered: no messages in {counted(len(queues), 'queue')}"
    if not of_it:
        return f"tiered: no messages of {topic}: the store has no such topic"
    bounds = {queue.queue_id: (found.min, found.end) for queue, found in of_it.items()}
    return f"tiered: no messages of {topic}; {bounds_text(bounds)}"


@STORE.has("info", StoreDirOptions)
def info(call: Call, options: StoreDirOptions) -> int:
    """Shows what a store directory holds.

    Examples:
        tiered store info /tmp/store
        tiered store info /tmp/store --json
    """
    store = call.local(options.dir)
    store.refresh()
    identity, report, bounds = store.identity, store.report(), store.queues()
    rows = [
        {"topic": queue.topic, "queue_id": queue.queue_id, "min": found.min, "end": found.end}
        for queue, found in sorted(bounds.items())
    ]
    document = {
        "format": 1,
        **picked(identity, "cluster", "broker", "is_live"),
        **picked(report, "log_min", "log_end", "torn_bytes"),
        "messages": sum(found.end - found.min for found in bounds.values()),
        "queues": rows,
    }
    show(call, document, rows=rows, columns=["topic", "queue_id", "min", "end"])
    return DONE


@STORE.has("recover", RecoverOptions)
def recover(call: Call, options: RecoverOptions) -> int:
    """Recovers a store that was not stopped cleanly.

    Examples:
        tiered store recover /tmp/store
        tiered store recover /tmp/store --anew
    """
    with open_store(call, options.dir, anew=options.anew) as store:
        found = store.recovered
    read = 0 if found is None else found.records
    made = {"store": store.root, "was_clean": found is None, "records_read": read}
    return _tell(call, made | {"log_end": store.log_end})


def _check_offsets(store: MessageStore, lines: list[_Line], messages: list[NewMessage]) -> None:
    """See that a batch gets the queue offsets that it names."""
    from tiered.model import MessageQueue, QueueOffset

    ends: dict[MessageQueue, int] = {}
    for line, message in zip(lines, messages, strict=True):
        queue = MessageQueue(message.topic, message.queue_id)
        wanted = line.document.get("queue_offset")
        if not isinstance(wanted, int):
            what = f"a message for {queue} has no queue_offset"
            raise InvalidError(what, do="leave out --keep-offsets, or give it one")
        end = ends.get(queue, store.queue_end(queue))
        if not end and wanted:
            store.begin_queue(queue, QueueOffset(wanted))
            end = wanted
        if end != wanted:
            what = f"{queue} goes on at {end}, and a message has {wanted}"
            raise InvalidError(what, do="leave out --keep-offsets, or begin with an empty queue")
        ends[queue] = end + 1


def message_of(document: dict[str, Any], *, where: str = "") -> NewMessage:
    """The message that a line describes: a topic and a body, and whatever else ``tiered cat`` prints of one.

    What is not said is as a producer leaves it: queue 0, no tags, keys or properties, born when it is stored. Properties
    rule over ``tags`` and ``keys``. The cluster's name and the place become the store's.

    Raises:
        InvalidError: A field is missing, of another type, or contradicts another.
    """
    from tiered.format import properties as names
    from tiered.store.new_message import NewMessage

    try:
        properties = _properties(document)
        born_ms = document.get("born_timestamp_ms")
        return NewMessage(
            topic=_text(document, "topic"),
            body=_body(document),
            tags=None if names.TAGS in properties else _text_or_none(document, "tags"),
            keys=None if names.KEYS in properties else _text_or_none(document, "keys"),
            properties=properties,
            born_timestamp_ms=None if born_ms is None else int(born_ms),
            born_host=_text_or_none(document, "born_host"),
            queue_id=int(document.get("queue_id", 0)),
            flag=int(document.get("flag", 0)),
            sys_flag=int(document.get("sys_flag", 0)),
            reconsume_times=int(document.get("reconsume_times", 0)),
        )
    except (TypeError, ValueError) as error:
        raise InvalidError(f"not a message: {error}", where=where, do=_GIVE) from error


def _text(document: dict[str, Any], name: str) -> str:
    value = document.get(name)
    if not isinstance(value, str):
        raise TypeError(f"no {name}" if value is None else f"{name} is not a string")
    return value


def _properties(document: dict[str, Any]) -> dict[str, str]:
    found = document.get("properties", {})
    if not isinstance(found, dict):
        raise TypeError("properties is not an object")
    return {str(name): str(value) for name, value in found.items()}


def _text_or_none(document: dict[str, Any], name: str) -> str | None:
    """What is empty is as good as not there, as ``cat`` prints it."""
    return _text(document, name) if document.get(name) else None


def _body(document: dict[str, Any]) -> bytes:
    """Text in ``body``, which is stored as UTF-8, or bytes in ``body_base64``; both would mean that one is ignored."""
    has_text, has_bytes = "body" in document, "body_base64" in document
    if has_text == has_bytes:
        raise ValueError("body and body_base64 are both given" if has_text else "no body")
    if has_bytes:
        from base64 import b64decode

        return b64decode(_text(document, "body_base64"), validate=True)
    try:
        return _text(document, "body").encode()
    except UnicodeEncodeError as error:
        raise ValueError("body has half of a surrogate pair, which is not text") from error


def open_store(
    call: Call,
    directory: str,
    options: StoreOptions | None = None,
    *,
    anew: bool = False,
    begins: Mapping[MessageQueue, QueueOffset] | None = None,
) -> MessageStore:
    """A store to write to; see ``MessageStore.open``."""
    from tiered.local.layout import read_topics
    from tiered.store.embedded import MessageStore

    names = read_topics(directory)
    if not (call.common.cluster or names.cluster):
        call.say(
            f"tiered: the store does not tell its cluster: messages are of {CLUSTER} (see --cluster)"
        )
    return MessageStore.open(
        directory,
        cluster=call.common.cluster or names.cluster or CLUSTER,
        broker=call.common.broker or names.broker or BROKER,
        clock=call.clock,
        options=options,
        anew=anew,
        begins=begins,
    )


def _lines(name: str | None, stack: contextlib.ExitStack) -> BinaryIO:
    if name is None or name == "-":
        return sys.stdin.buffer
    try:
        return stack.enter_context(open(name, "rb"))  # noqa: PTH123 (a name from the command line)
    except OSError as error:
        what = f"the messages cannot be read: {error.strerror}"
        raise InvalidError(
            what, where=name, do="name a file of JSON lines, or - for stdin"
        ) from error


def _batches(lines: Iterable[bytes]) -> Iterator[list[_Line]]:
    batch: list[_Line] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"line {number}"
        try:
            document = json.loads(line)
        except ValueError as error:
            raise InvalidError(f"no JSON: {error}", where=place, do=_GIVE) from error
        if not isinstance(document, dict):
            raise InvalidError("no JSON object", where=place, do=_GIVE)
        batch.append(_Line(place, document))
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _tell(call: Call, document: dict[str, Any]) -> int:
    show(call, {"format": 1, **document}, columns=list(document))
    return DONE


# -- refill ----------------------------------------------------------------------------------------

_BATCH_COUNT = 1 << 16


@dataclass(frozen=True, kw_only=True)
class RefillOptions(StoreDirOptions):
    """What ``tiered store refill`` can be told."""

    from_: str = required(
        "URL of a tier, or another store directory",
        kinds.Kind("WHERE", str),
    )
    topic: tuple[str, ...] = several(
        "compacted topics to refill", kinds.Kind("TOPIC,...", str), default_text="all"
    )


class _TierSource:
    """A tier that has the messages."""

    def __init__(self, tier: OpenTier) -> None:
        self._tier = tier

    def ends(self) -> Mapping[MessageQueue, QueueOffset]:
        """Of each queue one past the last queue offset."""
        return {queue: self._tier.reader.cursor(queue).end for queue in self._tier.queues()}

    def batches(self, queue: MessageQueue, limit: int) -> Iterator[RecordBatch]:
        """Its messages in order, as far as they are below ``limit``, or some more."""
        from tiered.api.reading import plan_span, read_span

        span = plan_span(self._tier.reader.cursor(queue), 0, limit)
        for batch in read_span(self._tier, span, batch_bytes=_WINDOW_BYTES):
            yield batch.records


class _LocalSource:
    """A store that has the messages; see ``_TierSource``."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store

    def ends(self) -> Mapping[MessageQueue, QueueOffset]:
        self._store.refresh()
        return {queue: found.end for queue, found in self._store.queues().items()}

    def batches(self, queue: MessageQueue, limit: int) -> Iterator[RecordBatch]:
        from tiered.model import QueueOffset

        at = QueueOffset(0)
        for read in (self._store.read_compacted, self._store.read):
            while at < limit:
                batch = read(queue, at, bytes_max=_WINDOW_BYTES, count_max=_BATCH_COUNT)
                if batch is None:
                    break
                yield batch
                at = batch.end_offset


@STORE.has("refill", RefillOptions)
def refill(call: Call, options: RefillOptions) -> int:
    """Copies earlier messages into a replica's compacted topics.

    For a replica that lost its disk: copies earlier messages from WHERE and compacts. No broker may run on the store.
    Repeating it is harmless.

    Examples:
        tiered store refill /data/store --from s3://bucket/prefix
        tiered store refill /data/store --from /data/other-store --topic prices
    """
    from tiered.local.layout import read_topics

    topics = read_topics(options.dir).compacted
    if unknown := sorted(set(options.topic) - topics) or ([] if topics else ["any"]):
        raise InvalidError(
            f"no compacted topic of this store: {', '.join(unknown)}",
            where=options.dir,
            do="`tiered store topic DIR TOPIC --compacted` makes one",
        )
    where = options.from_
    source = _TierSource(call.tier(where)) if "://" in where else _LocalSource(call.local(where))
    wanted = set(options.topic) or topics
    ends = {queue: end for queue, end in source.ends().items() if queue.topic in wanted}
    # One that is named has to be there; of all the store's, those to which nothing was sent are not.
    absent = set(options.topic) - {queue.topic for queue in ends}
    if absent or not ends:
        raise InvalidError(f"it has nothing of {', '.join(sorted(absent or wanted))}", where=where)
    with open_store(call, options.dir, begins=ends) as store:
        for topic in sorted({queue.topic for queue in ends}):
            many = max(queue.queue_id for queue in ends if queue.topic == topic) + 1
            store.create_topic(topic, queues=many, is_compacted=True)
        rows = [_refill(store, source, queue) for queue in sorted(ends)]
    document = {"format": 1, "store": store.root, "from": where, "queues": rows}
    show(
        call, document, rows=rows, columns=["topic", "queue_id", "had_from", "messages", "unknown"]
    )
    return NEEDS_A_PERSON if any(row["unknown"] for row in rows) else DONE


def _refill(
    store: MessageStore, source: _TierSource | _LocalSource, queue: MessageQueue
) -> dict[str, Any]:
    low, end = store.reader.bounds(queue)
    met = _Met(low if end else 0)
    messages = 0
    if met.limit:
        messages = store.refill(queue, met.passing(source.batches(queue, met.limit)))
    return {
        "topic": queue.topic,
        "queue_id": queue.queue_id,
        "had_from": low,
        "messages": messages,
        "unknown": met.unknown,
    }


class _Met:
    """Counts what a source has not got."""

    def __init__(self, limit: int) -> None:
        self.limit = limit  # queue offset up to which it is looked at
        # Queue offsets, from the first that it has on, of which it has neither a message nor the word that a newer one
        # has replaced it.
        self.unknown = 0

    def passing(self, batches: Iterator[RecordBatch]) -> Iterator[RecordBatch]:
        """The batches, looked at."""
        import numpy as np

        from tiered.local.interface import HoleReason

        at = None
        for batch in batches:
            base = int(batch.base_offset)
            count = min(self.limit - base, batch.count)
            if count <= 0:
                break
            is_known = (batch.sizes > 0) | (batch.tag_codes == HoleReason.COMPACTED)
            self.unknown += int(np.count_nonzero(~is_known[:count]))
            self.unknown += base - at if at is not None else 0
            at = base + count
            yield batch
        self.unknown += self.limit - at if at is not None else 0
