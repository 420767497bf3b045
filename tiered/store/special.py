"""Records that a client does not send: taken over as they are, transactions, inner batches, delayed messages.

**Contract.** What is appended here is stored with the properties it is given, in their order; nothing is added. It goes
through the same log, the same lock and the same flush as every append, with the same errors. What is refused:

=========================================== ========================================================================
what                                        why
=========================================== ========================================================================
prepared or rolled back bits in ``sysFlag`` brokers since 4.0 do not write them: a half message lies in a topic of its
                                            own, without the bits
an inner batch for a topic without batch    its queues could not number the messages in it; so do brokers
consume queues
a batch whose ``INNER_NUM`` is not what is  readers would number other messages
in it
=========================================== ========================================================================
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tiered.errors import DataError, InvalidError
from tiered.format import properties as names
from tiered.format import sysflag
from tiered.format.message_forms import InnerMessage, decode_inner_messages, encode_inner_messages
from tiered.format.properties import join_properties
from tiered.format.record import Record, body_crc, encode_record, offset_msg_id, record_bytes
from tiered.local.catalog import TOPIC_BYTES_MAX, check_topic
from tiered.model import PhysicalOffset, QueueOffset
from tiered.store.encoding import QUEUE_ID_MAX, check_host, host_bits
from tiered.store.new_message import Appended, NewMessage, all_properties, broker_order

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tiered.store.encoding import RecordPlaces
    from tiered.store.store_options import StoreOptions


BATCH_BITS: Final = sysflag.INNER_BATCH | sysflag.NEED_UNWRAP
_HOST_BITS: Final = sysflag.BORN_HOST_V6 | sysflag.STORE_HOST_V6
_COUNT_MAX: Final = 0x7FFF
_LONG_MAX: Final = 2**63 - 1


def message_of(record: Record) -> NewMessage:
    """The message that a record is of, complete: appended as it is, it becomes the same record at another place."""
    return NewMessage(
        record.topic,
        record.queue_id,
        record.body,
        properties=record.properties,
        flag=record.flag,
        born_timestamp_ms=record.born_timestamp_ms,
        born_host=record.born_host,
        sys_flag=record.sys_flag & ~_HOST_BITS,
        reconsume_times=record.reconsume_times,
    )


def complete(message: NewMessage, *, cluster: str, unique_key: str) -> NewMessage:
    """A message of a client with all that a broker stores of it, in a broker's order; ``unique_key`` where it has none."""
    found = all_properties(message)
    found.setdefault(names.UNIQ_KEY, unique_key)
    found[names.CLUSTER] = cluster
    return replace(message, tags=None, keys=None, properties=broker_order(found))


def inner_batch(messages: Sequence[NewMessage]) -> NewMessage:
    """Messages of one queue, none compressed, as the one that holds them; ``complete`` it before it is appended."""
    if not 1 <= len(messages) <= _COUNT_MAX:
        raise InvalidError(f"{len(messages)} messages: a batch holds 1 to {_COUNT_MAX}")
    first = messages[0]
    for message in messages:
        if (message.topic, message.queue_id) != (first.topic, first.queue_id) or message.sys_flag:
            raise InvalidError("the messages of a batch are of one queue, and plain")
    inner = [InnerMessage(one.flag, one.body, _inner_properties(one)) for one in messages]
    return NewMessage(
        first.topic,
        first.queue_id,
        encode_inner_messages(inner),
        properties={names.INNER_NUM: str(len(messages))},
        born_timestamp_ms=first.born_timestamp_ms,
        born_host=first.born_host,
        sys_flag=BATCH_BITS,
    )


class Maker:
    """Makes the record of a special message for any place. For any thread."""

    def __init__(
        self,
        message: NewMessage,
        options: StoreOptions,
        *,
        is_batch_topic: bool,
        prepared_transaction_offset: int = 0,
    ) -> None:
        """Check a message with all its properties: it is stored as it is.

        ``prepared_transaction_offset``: physical offset of the half message that it was; 0 when it was none.
        """
        self._message = message
        self._prepared_transaction_offset = prepared_transaction_offset
        self._options = options
        self._is_batch = bool(message.sys_flag & BATCH_BITS)
        topic_bytes = check_topic(message.topic)
        if message.tags is not None or message.keys is not None:
            raise InvalidError("what is stored as it is has tags and keys among its properties")
        if not 0 <= message.queue_id <= QUEUE_ID_MAX or message.reconsume_times < 0:
            raise InvalidError(f"queue id {message.queue_id}, reconsumed {message.reconsume_times}")
        if message.sys_flag & sysflag.TRANSACTION_PREPARED or message.sys_flag < 0:
            raise InvalidError(f"sys_flag {message.sys_flag:#x}: half messages do not bear it")
        if self._is_batch:
            _check_batch(message, is_batch_topic=is_batch_topic)
        self._version = 1 if topic_bytes <= TOPIC_BYTES_MAX else 2
        self._born_host = message.born_host or options.store_host
        check_host(self._born_host)
        size = len(self.make(0, 0, 0)) + len(str(_LONG_MAX))
        if len(message.body) > options.message_bytes_max or size > options.record_bytes_max:
            raise InvalidError(
                f"a record of {size} bytes, and at most {options.record_bytes_max} may be"
            )

    @property
    def takes(self) -> int:
        """Queue offsets that it takes."""
        return names.inner_count(self._message.properties) if self._is_batch else 1

    def receipt(self, places: RecordPlaces) -> Appended:
        """Where it was put."""
        (offset,), (position,) = places.queue_offsets, places.positions
        by_place = offset_msg_id(self._options.store_host, position)
        return Appended(
            QueueOffset(offset),
            PhysicalOffset(position),
            by_place,
            self._message.properties.get(names.UNIQ_KEY) or by_place,
            places.end - position,
        )

    def make(self, queue_offset: int, physical_offset: int, store_ms: int) -> bytes:
        """The record for its place."""
        message, options = self._message, self._options
        flag = host_bits(message.sys_flag, self._born_host, options.store_host)
        born_ms = message.born_timestamp_ms
        try:
            raw = join_properties(self._properties(queue_offset))
            record = Record(
                size=record_bytes(
                    body=len(message.body),
                    topic=len(message.topic),
                    props=len(raw),
                    sys_flag=flag,
                    version=self._version,
                ),
                version=self._version,
                body_crc=body_crc(message.body),
                queue_id=message.queue_id,
                flag=message.flag,
                queue_offset=queue_offset,
                physical_offset=physical_offset,
                sys_flag=flag,
                born_timestamp_ms=store_ms if born_ms is None else born_ms,
                born_host=self._born_host,
                store_timestamp_ms=store_ms,
                store_host=options.store_host,
                reconsume_times=message.reconsume_times,
                prepared_transaction_offset=self._prepared_transaction_offset,
                body=message.body,
                topic=message.topic,
                properties_raw=raw,
            )
            return encode_record(record)
        except (ValueError, struct.error) as error:
            raise InvalidError(f"a message for {message.topic}: {error}") from error

    def _properties(self, queue_offset: int) -> Mapping[str, str]:
        found = self._message.properties
        if not self._is_batch:
            return found
        placed = {**found, names.INNER_BASE: str(queue_offset)}
        return placed if names.INNER_BASE in found else broker_order(placed)


def _check_batch(message: NewMessage, *, is_batch_topic: bool) -> None:
    if not is_batch_topic:
        raise InvalidError(
            f"an inner batch for {message.topic}, which has no batch consume queues",
            do="make the topic with queue.type=BatchCQ",
        )
    told = names.inner_count(message.properties)
    if message.sys_flag & sysflag.COMPRESSED:
        return  # by the producer: a broker does not look into it either
    try:
        count = sum(1 for _ in decode_inner_messages(message.body))
    except DataError as error:
        raise InvalidError(f"an inner batch that cannot be read: {error}") from error
    if count != told:
        raise InvalidError(f"an inner batch of {count} messages that says it has {told}")


def _inner_properties(message: NewMessage) -> bytes:
    named = {names.TAGS: message.tags, names.KEYS: message.keys}
    given = {name: value for name, value in named.items() if value is not None}
    try:
        return join_properties({**message.properties, **given})
    except ValueError as error:
        raise InvalidError(str(error)) from error
