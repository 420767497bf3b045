"""From messages to the pieces of records, as much of it as possible before the log's order is known.

What a record says of its place (queue offset, physical offset, store time) is put in by the one writer; body, CRC,
topic and properties are made ready here, by the thread that appends. Checks that hardly ever fail are made on the
joined text; where one does, ``tiered.store.checks`` says what is wrong.
"""

from __future__ import annotations

import struct
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from tiered.errors import InvalidError
from tiered.format import properties as names
from tiered.format import sysflag
from tiered.format.hosts import pack_host
from tiered.format.record import BODY_AT, MAGIC_V1, MAGIC_V2, body_crc
from tiered.store.checks import (
    PROPERTIES_BYTES_MAX,
    QUEUE_ID_MAX,
    TOPIC_BYTES_MAX,
    check_topic,
    checked_properties,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiered.store.messages import Message
    from tiered.store.options import StoreOptions
    from tiered.store.uniqkeys import KeyMaker

_TAIL_ROOM_BYTES: Final = 2
_TAGS_KNOWN_MAX: Final = 10_000
_STORES_OWN: Final = frozenset({names.TAGS, names.KEYS, names.UNIQ_KEY, names.CLUSTER})
"""Properties that are also given otherwise, or that the store adds."""
_SHORT: Final = Struct(">h")
_HEADS: Final = {
    (born, stored): Struct(f">iIIiiqqiq{born}sq{stored}siqi")
    for born in (8, 20)
    for stored in (8, 20)
}
_REFUSED: Final = (
    sysflag.NEED_UNWRAP | sysflag.INNER_BATCH | sysflag.TRANSACTION_PREPARED  # of a rollback too
)
_HOST_BITS: Final = sysflag.BORN_HOST_V6 | sysflag.STORE_HOST_V6


class Prepared(NamedTuple):
    """A checked message in pieces.

    Attributes:
        queue: Topic and queue id.
        size: Bytes of its record.
        magic: Of its record's version.
        crc: Of its body.
        message: As given.
        sys_flag: With the bits of the hosts.
        born_host: Packed.
        tail: Topic and properties, with their lengths.
        msg_id: Its ``UNIQ_KEY``.
        head: Packs what stands before the body.
    """

    queue: tuple[str, int]
    size: int
    magic: int
    crc: int
    message: Message
    sys_flag: int
    born_host: bytes
    tail: bytes
    msg_id: str
    head: Struct


class Encoder:
    """Prepares messages for one store. For any thread."""

    def __init__(self, options: StoreOptions, cluster: str, keys: KeyMaker) -> None:
        self._options = options
        self._cluster = cluster
        self._cluster_pair = f"{names.CLUSTER}\x01{cluster}\x02"
        self._keys = keys
        self._topics: dict[str, bytes] = {}
        self._tags: dict[str, str] = {}
        self._hosts: dict[str | None, tuple[bytes, int]] = {}
        self.store_host = pack_host(options.store_host)
        self._body_max = options.message_bytes_max
        self._size_max = options.record_bytes_max

    def prepare(self, messages: Sequence[Message], now_ms: int) -> list[Prepared]:
        """Check messages and make their pieces.

        Raises:
            InvalidError: One cannot be stored as it is. Retrying does not help.
        """
        fresh = self._keys.take(len(messages), now_ms)
        return [self._prepare(message, key) for message, key in zip(messages, fresh, strict=True)]

    def _prepare(self, message: Message, fresh: str) -> Prepared:
        topic = self._topics.get(message.topic) or self._topic(message.topic)
        born = self._hosts.get(message.born_host) or self._host(message.born_host)
        text, msg_id = self._properties(message, fresh)
        raw = text.encode() if text.isascii() else self._encode(message, text, fresh)
        flag = message.sys_flag & ~_HOST_BITS | born[1]
        body = message.body
        size = (
            BODY_AT
            + len(born[0])
            + len(self.store_host)
            - 16
            + len(body)
            + len(topic)
            + _TAIL_ROOM_BYTES
            + len(raw)
        )
        if (
            size > self._size_max
            or len(raw) > PROPERTIES_BYTES_MAX
            or len(body) > self._body_max
            or flag & _REFUSED
            or flag < 0
            or message.reconsume_times < 0
            or not 0 <= message.queue_id <= QUEUE_ID_MAX
        ):
            self._refuse(message, fresh)
        return Prepared(
            (message.topic, message.queue_id),
            size,
            MAGIC_V1 if len(message.topic) <= TOPIC_BYTES_MAX else MAGIC_V2,
            body_crc(body),
            message,
            flag,
            born[0],
            b"".join((topic, _SHORT.pack(len(raw)), raw)),
            msg_id,
            _HEADS[len(born[0]), len(self.store_host)],
        )

    def _properties(self, message: Message, fresh: str) -> tuple[str, str]:
        """The stored text (``UNIQ_KEY`` and ``CLUSTER`` last), and the unique id."""
        found, tags, keys = message.properties, message.tags, message.keys
        if found:
            return self._with_properties(message, fresh)
        text = "" if tags is None else self._tags.get(tags) or self._tag(message, tags, fresh)
        if keys is not None:
            if not keys or "\x01" in keys or "\x02" in keys:
                self._refuse(message, fresh)
            text = f"{text}KEYS\x01{keys}\x02"
        return f"{text}UNIQ_KEY\x01{fresh}\x02{self._cluster_pair}", fresh

    def _tag(self, message: Message, tags: str, fresh: str) -> str:
        """The pair of a tag that was not met yet."""
        if not tags or "\x01" in tags or "\x02" in tags:
            self._refuse(message, fresh)
        if len(self._tags) >= _TAGS_KNOWN_MAX:
            self._tags.clear()
        pair = self._tags[tags] = f"TAGS\x01{tags}\x02"
        return pair

    def _with_properties(self, message: Message, fresh: str) -> tuple[str, str]:
        found, tags, keys = message.properties, message.tags, message.keys
        if _STORES_OWN.intersection(found):
            return self._slow_properties(message, fresh)
        pairs = [f"{name}\x01{value}\x02" for name, value in found.items()]
        if tags is not None:
            pairs.append(f"TAGS\x01{tags}\x02")
        if keys is not None:
            pairs.append(f"KEYS\x01{keys}\x02")
        text = "".join(pairs)
        if (
            text.count("\x01") != len(pairs)
            or text.count("\x02") != len(pairs)
            or text[0] == "\x01"
            or "\x01\x02" in text
            or "\x02\x01" in text
        ):
            self._refuse(message, fresh)
        return f"{text}UNIQ_KEY\x01{fresh}\x02{self._cluster_pair}", fresh

    def _slow_properties(self, message: Message, fresh: str) -> tuple[str, str]:
        """Where the message names what the store would add, or says a thing twice."""
        found = self._checked(message, fresh)
        return found[0].decode(), found[1]

    def _encode(self, message: Message, text: str, fresh: str) -> bytes:
        try:
            return text.encode()
        except UnicodeEncodeError:
            self._refuse(message, fresh)
            raise

    def _checked(self, message: Message, fresh: str) -> tuple[bytes, str]:
        return checked_properties(message, self._options, cluster=self._cluster, unique_key=fresh)

    def _refuse(self, message: Message, fresh: str) -> None:
        """Raise what is wrong."""
        self._checked(message, fresh)
        raise InvalidError(f"a message for {message.topic} that cannot be stored")

    def _topic(self, topic: str) -> bytes:
        size = check_topic(topic)
        length = size.to_bytes(1 if size <= TOPIC_BYTES_MAX else 2, "big")
        made = self._topics[topic] = length + topic.encode()
        return made

    def _host(self, host: str | None) -> tuple[bytes, int]:
        try:
            packed = self.store_host if host is None else pack_host(host)
        except ValueError as error:
            raise InvalidError(str(error), do="give ip:port or [ip]:port") from error
        bits = sysflag.BORN_HOST_V6 if len(packed) > 8 else 0  # noqa: PLR2004 (bytes of an IPv4 host)
        bits |= sysflag.STORE_HOST_V6 if len(self.store_host) > 8 else 0  # noqa: PLR2004
        if len(self._hosts) > QUEUE_ID_MAX:
            self._hosts.clear()
        made = self._hosts[host] = packed, bits
        return made


def pack_head(
    found: Prepared, queue_offset: int, physical_offset: int, store_ms: int, store_host: bytes
) -> bytes:
    """What stands before the body, once the record's place is known.

    Raises:
        InvalidError: A number of the message does not fit its field.
    """
    message = found.message
    born_ms = message.born_timestamp_ms
    try:
        return found.head.pack(
            found.size,
            found.magic,
            found.crc,
            message.queue_id,
            message.flag,
            queue_offset,
            physical_offset,
            found.sys_flag,
            store_ms if born_ms is None else born_ms,
            found.born_host,
            store_ms,
            store_host,
            message.reconsume_times,
            0,
            len(message.body),
        )
    except struct.error as error:
        raise InvalidError(f"a message for {message.topic}: {error}") from error
