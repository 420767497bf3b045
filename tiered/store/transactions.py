"""Transactions as a broker keeps them: half messages in a topic of their own, and marks for those that were decided.

**Contract.** ``prepare`` stores a half message, which no reader of its topic sees. ``commit`` stores the message in its
topic, then the mark; ``rollback`` only the mark. A crash between message and mark leaves the half message undecided: the
next ``commit`` of it stores the message again, as with a broker. ``undecided`` finds the half messages without a mark,
also those of a process that ended. Nobody is asked about them here: a broker that starts on the directory asks the
producers. For any thread; decisions about one half message are for one thread.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tiered.errors import InvalidError
from tiered.format import properties as names
from tiered.format.sysflag import TRANSACTION_COMMIT, TRANSACTION_MASK
from tiered.model import MessageQueue
from tiered.store.new_message import NewMessage, broker_order
from tiered.store.special import message_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered.format.record import Record
    from tiered.store.embedded import MessageStore
    from tiered.store.new_message import Appended

HALF_QUEUE: Final = MessageQueue("RMQ_SYS_TRANS_HALF_TOPIC", 0)
OP_QUEUE: Final = MessageQueue("RMQ_SYS_TRANS_OP_HALF_TOPIC", 0)
_DECIDED: Final = "d"
_COUNT: Final = 256
_BYTES: Final = 4 << 20


def half_message(message: NewMessage, producer_group: str) -> NewMessage:
    """What is stored of a complete message that waits for a decision, with the topic and queue where it is to appear."""
    unique = message.properties.get(names.UNIQ_KEY)
    if message.topic == HALF_QUEUE.topic or unique is None:
        raise InvalidError("a half message is made of a complete message of its own topic")
    found = {
        **message.properties,
        names.TRANSACTION_MARK: "true",
        names.PRODUCER_GROUP: producer_group,
        names.TRANSACTION_ID: unique,
        names.REAL_TOPIC: message.topic,
        names.REAL_QUEUE_ID: str(message.queue_id),
    }
    return replace(
        message,
        topic=HALF_QUEUE.topic,
        queue_id=HALF_QUEUE.queue_id,
        properties=broker_order(found),
        sys_flag=message.sys_flag & ~TRANSACTION_MASK,
    )


def committed(half: NewMessage) -> NewMessage:
    """What is stored in its topic of a half message that is committed."""
    found = dict(half.properties)
    topic, queue_id = found.pop(names.REAL_TOPIC, ""), found.pop(names.REAL_QUEUE_ID, "")
    if not topic or not (queue_id.isascii() and queue_id.isdigit()):
        raise InvalidError("a message that does not say where it is to appear is no half message")
    flag = half.sys_flag & ~TRANSACTION_MASK | TRANSACTION_COMMIT
    return replace(half, topic=topic, queue_id=int(queue_id), properties=found, sys_flag=flag)


def mark_of(queue_offset: int) -> NewMessage:
    """The mark that a half message is decided."""
    return NewMessage(
        OP_QUEUE.topic,
        OP_QUEUE.queue_id,
        f"{queue_offset},".encode(),
        properties={names.WAIT: "true", names.TAGS: _DECIDED},
    )


class Transactions:
    """The transactions of one store; see the module."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store

    def prepare(self, message: NewMessage, producer_group: str) -> Appended:
        """Store a half message. Errors as of ``MessageStore.append_as_is``."""
        half = half_message(self._store.complete(message), producer_group)
        return self._store.append_as_is(half)

    def commit(self, offset_msg_id: str) -> Appended:
        """Let a half message appear in its topic; it may have expired. ``offset_msg_id``: of its receipt."""
        record = self._half(offset_msg_id)
        appended = self._store.append_as_is(
            committed(message_of(record)), prepared_transaction_offset=record.physical_offset
        )
        self._store.append_as_is(mark_of(record.queue_offset))
        return appended

    def rollback(self, offset_msg_id: str) -> None:
        """Never let it appear. Errors as of ``commit``."""
        self._store.append_as_is(mark_of(self._half(offset_msg_id).queue_offset))

    def undecided(self) -> list[Record]:
        """The half messages that have no mark, the oldest first, as far as the store has them (and lists them)."""
        decided: set[int] = set()
        for mark in self._read(OP_QUEUE):
            if mark.properties.get(names.TAGS) == _DECIDED:
                decided.update(int(text) for text in mark.body.split(b",") if text.isdigit())
        return [half for half in self._read(HALF_QUEUE) if half.queue_offset not in decided]

    def _half(self, offset_msg_id: str) -> Record:
        record = self._store.reader.by_offset_msg_id(offset_msg_id)
        if record is None or record.topic != HALF_QUEUE.topic:
            raise InvalidError("there is no such half message", where=offset_msg_id)
        return record

    def _read(self, queue: MessageQueue) -> Iterator[Record]:
        offset, _ = self._store.reader.bounds(queue)
        while records := self._store.reader.get(
            queue, offset, count_max=_COUNT, bytes_max=_BYTES
        ).records:
            yield from records
            offset = records[-1].queue_offset + 1
