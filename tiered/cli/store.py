"""``tiered store``: local stores in a broker's own format, made and written without a broker."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from base64 import b64decode
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from tiered.cli.exits import DONE
from tiered.cli.frame import make_command, make_program
from tiered.cli.options import argument, flag, maybe, option
from tiered.cli.output import Output
from tiered.cli.signals import at_end
from tiered.cli.values import counted, parse_size, whole
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from tiered.cli.call import Call
    from tiered.model import MessageQueue, QueueBounds, QueueOffset
    from tiered.store.embedded import MessageStore
    from tiered.store.new_message import NewMessage
    from tiered.store.store_options import StoreOptions

CLUSTER, BROKER = "DefaultCluster", "broker"
_BATCH = 64
_WINDOW_BYTES = 4 << 20
_FOLLOW_S = 0.2
_GIVE = 'give {"topic": …, "body": TEXT}, or body_base64 for bytes, or what `tiered cat` prints'


@dataclass(frozen=True, kw_only=True)
class StoreDirOptions:
    """What every command of ``tiered store`` is told."""

    dir: str = argument()


@dataclass(frozen=True, kw_only=True)
class CreateOptions(StoreDirOptions):
    """What ``tiered store create`` can be told."""

    log_file_size_bytes: int = option(
        "size of a commit-log file, as the broker's mappedFileSizeCommitLog",
        "SIZE",
        parse_size,
        default=1 << 30,
    )
    queue_items: int = option(
        "items of a consume-queue file; 20 times it is the broker's mappedFileSizeConsumeQueue",
        "N",
        whole(1),
        default=300_000,
    )


@dataclass(frozen=True, kw_only=True)
class TopicOptions(StoreDirOptions):
    """What ``tiered store topic`` can be told."""

    topic: str = argument()
    queues: int = option("how many, at least", "N", whole(1), default=8)
    compacted: bool = flag(
        "of each key only the newest message is kept (cleanup.policy=COMPACTION); messages without one are refused"
    )


@dataclass(frozen=True, kw_only=True)
class PutOptions(StoreDirOptions):
    """What ``tiered store put`` can be told."""

    file: str | None = maybe()
    sync: bool = flag("each batch is on the disk before the next one is read")
    keep_offsets: bool = flag(
        "a queue that is new begins at the queue offset of its first message, and gaps are refused"
    )


@dataclass(frozen=True, kw_only=True)
class TailOptions(StoreDirOptions):
    """What ``tiered store tail`` can be told."""

    topic: str | None = maybe()
    count: int = option("how many messages of each queue, at most", "N", whole(0), default=10)
    follow: bool = flag("go on with what is stored from now on")


@dataclass(frozen=True, kw_only=True)
class RecoverOptions(StoreDirOptions):
    """What ``tiered store recover`` can be told."""

    anew: bool = flag(
        "make consume queues and key index anew from the whole log, whatever is there"
    )


@dataclass(frozen=True, slots=True)
class _Line:
    """What one line says."""

    place: str  # its number, for errors
    document: dict[str, Any]  # its object


def create(call: Call, options: CreateOptions) -> int:
    """Make a store."""
    from tiered.store.embedded import MessageStore
    from tiered.store.store_options import StoreOptions

    kept = StoreOptions(options.log_file_size_bytes, options.queue_items)
    cluster, broker = call.common.cluster or CLUSTER, call.common.broker or BROKER
    store = MessageStore.create(
        options.dir, cluster=cluster, broker=broker, clock=call.clock, options=kept
    )
    store.close()
    return _tell(call, {"store": store.root, "cluster": cluster, "broker": broker})


def topic(call: Call, options: TopicOptions) -> int:
    """Make a topic, or give one more queues."""
    with open_store(call, options.dir) as store:
        store.create_topic(options.topic, queues=options.queues, is_compacted=options.compacted)
    made = {"topic": options.topic, "queues": options.queues, "compacted": options.compacted}
    return _tell(call, {"store": store.root, **made})


def put(call: Call, options: PutOptions) -> int:
    """Append what is read."""
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
        writer = _Writer(store, keep_offsets=options.keep_offsets)
        for batch in _batches(lines):
            with whole_batches:
                writer.put(batch)
            count += len(batch)
        store.flush()
    return _tell(call, {"store": store.root, "messages": count, "log_end": store.log_end})


def tail(call: Call, options: TailOptions) -> int:
    """Print what was stored last, each queue in its order, and go on with what comes."""
    from tiered.local.rocketmq import RocketMQStore
    from tiered.log.messages import messages_lines
    from tiered.model import QueueOffset

    topic, count, has_printed = options.topic, options.count, False
    store = RocketMQStore.open(options.dir, clock=call.clock)
    with contextlib.closing(store):
        store.refresh()
        starts = {
            queue: QueueOffset(max(found.min, found.end - count))
            for queue, found in store.queues().items()
        }
        with contextlib.closing(store.follow(starts)) as follower:
            while True:
                for batch in follower.poll(_WINDOW_BYTES):
                    if topic is None or batch.queue.topic == topic:
                        lines = messages_lines(batch, None, raw_body=False)
                        for line in lines:
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


def info(call: Call, options: StoreDirOptions) -> int:
    """Look, without writing anything."""
    from tiered.local.rocketmq import RocketMQStore

    store = RocketMQStore.open(options.dir, clock=call.clock)
    try:
        store.refresh()
        identity, report, bounds = store.identity, store.report(), store.queues()
        rows = [
            {"topic": queue.topic, "queue_id": queue.queue_id, "min": found.min, "end": found.end}
            for queue, found in sorted(bounds.items())
        ]
    finally:
        store.close()
    document = {
        "format": 1,
        "cluster": identity.cluster,
        "broker": identity.broker,
        "is_live": identity.is_live,
        "log_min": report.log_min,
        "log_end": report.log_end,
        "torn_bytes": report.torn_bytes,
        "messages": sum(found.end - found.min for found in bounds.values()),
        "queues": rows,
    }
    Output(call).emit(document, rows, ["topic", "queue_id", "min", "end"])
    return DONE


def recover(call: Call, options: RecoverOptions) -> int:
    """Open, which recovers, and close."""
    with open_store(call, options.dir, anew=options.anew) as store:
        found = store.recovered
    return _tell(
        call,
        {
            "store": store.root,
            "was_clean": found is None,
            "records_read": 0 if found is None else found.records,
            "log_end": store.log_end,
        },
    )


class _Writer:
    """Puts batches into a store, with the queue offsets that they name where that is asked for."""

    def __init__(self, store: MessageStore, *, keep_offsets: bool) -> None:
        self._store = store
        self._keep_offsets = keep_offsets

    def put(self, lines: list[_Line]) -> None:
        """Append a batch."""
        messages = [message_of(line.document, where=line.place) for line in lines]
        if self._keep_offsets:
            self._check_offsets([line.document for line in lines], messages)
        self._store.append_batch(messages)

    def _check_offsets(self, documents: list[dict[str, Any]], messages: list[NewMessage]) -> None:
        from tiered.model import MessageQueue, QueueOffset

        ends: dict[MessageQueue, int] = {}
        for document, message in zip(documents, messages, strict=True):
            queue = MessageQueue(message.topic, message.queue_id)
            wanted = document.get("queue_offset")
            if not isinstance(wanted, int):
                what = f"a message for {queue} has no queue_offset"
                raise InvalidError(what, do="leave out --keep-offsets, or give it one")
            end = ends.get(queue, self._store.queue_end(queue))
            if not end and wanted:
                self._store.begin_queue(queue, QueueOffset(wanted))
                end = wanted
            if end != wanted:
                what = f"{queue} goes on at {end}, and a message has {wanted}"
                raise InvalidError(
                    what, do="leave out --keep-offsets, or begin with an empty queue"
                )
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
    document = {"format": 1, **document}
    Output(call).emit(document, [document], [name for name in document if name != "format"])
    return DONE


CREATE = make_command(
    "store.create",
    CreateOptions,
    create,
    examples=[
        "tiered store create /tmp/store",
        "tiered store create /tmp/store --log-file-size 16MiB --cluster c1 --broker b1",
    ],
)
TOPIC = make_command(
    "store.topic",
    TopicOptions,
    topic,
    examples=[
        "tiered store topic /tmp/store orders --queues 16",
        "tiered store topic /tmp/store prices --queues 4 --compacted",
    ],
)
PUT = make_command(
    "store.put",
    PutOptions,
    put,
    examples=[
        """echo '{"topic": "orders", "body": "one"}' | tiered store put /tmp/store""",
        "tiered store put /tmp/store --keep-offsets messages.jsonl",
    ],
)
TAIL = make_command(
    "store.tail",
    TailOptions,
    tail,
    examples=[
        "tiered store tail /tmp/store orders --count 5",
        "tiered store tail /tmp/store --follow",
    ],
)
INFO = make_command(
    "store.info",
    StoreDirOptions,
    info,
    examples=["tiered store info /tmp/store", "tiered store info /tmp/store --json"],
)
RECOVER = make_command(
    "store.recover",
    RecoverOptions,
    recover,
    examples=["tiered store recover /tmp/store", "tiered store recover /tmp/store --anew"],
)
COMMAND = make_program(
    "store", examples=["tiered store create /tmp/store", "tiered store info /tmp/store"]
)
