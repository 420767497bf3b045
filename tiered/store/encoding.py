"""From messages to the pieces of records, a batch at a time, as far as possible before the log's order is known.

Checks that hardly ever fail are made on whole columns; where one does, ``tiered.store.checks`` looks at one message
after another and says what is wrong. Properties are joined as text: the usual ones (tag, keys, unique id, cluster) by
one template, others pair by pair.
"""

from __future__ import annotations

from operator import attrgetter
from struct import Struct
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar

from zlib_ng import zlib_ng

from tiered.errors import InvalidError
from tiered.format import properties as names
from tiered.format import sysflag
from tiered.format.hosts import pack_host
from tiered.format.record import BODY_AT, CRC_MASK, MAGIC_V1, MAGIC_V2
from tiered.store.checks import (
    PROPERTIES_BYTES_MAX,
    QUEUE_ID_MAX,
    TOPIC_BYTES_MAX,
    check_topic,
    checked_properties,
)
from tiered.store.columns import Fields, Prepared

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tiered.store.messages import Message
    from tiered.store.options import StoreOptions
    from tiered.store.uniqkeys import KeyMaker

_Value = TypeVar("_Value")
_Made = TypeVar("_Made")
_KNOWN_MAX: Final = 10_000
"""How many tags, hosts, or lengths of one topic's properties are remembered."""
_STORES_OWN: Final = frozenset({names.TAGS, names.KEYS, names.UNIQ_KEY, names.CLUSTER})
"""Properties that are also given otherwise, or that the store adds."""
_SHORT: Final = Struct(">h")
_V4_BYTES: Final = 8
_REFUSED: Final = (
    sysflag.NEED_UNWRAP | sysflag.INNER_BATCH | sysflag.TRANSACTION_PREPARED  # of a rollback too
)
_HOST_BITS: Final = sysflag.BORN_HOST_V6 | sysflag.STORE_HOST_V6
_FIELDS: Final = attrgetter(
    "topic",
    "queue_id",
    "body",
    "tags",
    "keys",
    "flag",
    "born_timestamp_ms",
    "reconsume_times",
    "properties",
    "born_host",
    "sys_flag",
)


class _Leads(dict[int, bytes]):
    """What stands between a topic's bodies and properties, by the length of the properties."""

    def __init__(self, topic: str) -> None:
        super().__init__()
        size = check_topic(topic)
        self.is_v1 = size <= TOPIC_BYTES_MAX
        self._topic = size.to_bytes(1 if self.is_v1 else 2, "big") + topic.encode()

    def __missing__(self, size: int) -> bytes:
        if len(self) >= _KNOWN_MAX:
            self.clear()
        made = self[size] = self._topic + _SHORT.pack(size)
        return made


_NONE: Final = Prepared(
    Fields((), (), (), (), (), (), (), ()),
    (),
    (),
    (),
    (),
    (),
    (),
    (),
    (),
    (),
    is_alike=True,
    is_plain=True,
)


class Encoder:
    """Prepares messages for one store. For any thread."""

    def __init__(self, options: StoreOptions, cluster: str, keys: KeyMaker) -> None:
        self._options = options
        self._cluster = cluster
        self._cluster_pair = f"{names.CLUSTER}\x01{cluster}\x02"
        self._keys = keys
        self._topics: dict[str, _Leads] = {}
        self._tags: dict[str | None, str] = {None: ""}
        self._hosts: dict[str | None, tuple[bytes, int, int]] = {}
        self.store_host = pack_host(options.store_host)
        self._body_max = options.message_bytes_max
        self._size_max = options.record_bytes_max

    def prepare(self, messages: Sequence[Message], now_ms: int) -> Prepared:
        """Check messages and make their pieces.

        Raises:
            InvalidError: One cannot be stored as it is. Retrying does not help.
        """
        if not messages:
            return _NONE
        columns = tuple(zip(*map(_FIELDS, messages), strict=True))
        fields, (others, born_hosts, sys_flags) = Fields(*columns[:8]), columns[8:]
        fresh = self._keys.take(len(messages), now_ms)
        topics = _spread(fields.topics, self._topic)
        hosts = _spread(born_hosts, self._host)
        is_plain = not any(others)
        if is_plain:
            msg_ids, texts = fresh, self._plain_texts(messages, fields, fresh)
        else:
            made = list(map(self._properties, messages, fresh))
            msg_ids, texts = [one for _, one in made], [text for text, _ in made]
        properties = self._encode(messages, texts, fresh)
        bodies = fields.bodies
        leads = [lead[len(raw)] for lead, raw in zip(topics, properties, strict=True)]
        sizes = [
            rest + len(body) + len(lead) + len(raw)
            for (_, _, rest), body, lead, raw in zip(hosts, bodies, leads, properties, strict=True)
        ]
        flags = set(sys_flags)
        if (
            max(sizes) > self._size_max
            or max(map(len, bodies)) > self._body_max
            or min(fields.queue_ids) < 0
            or max(fields.queue_ids) > QUEUE_ID_MAX
            or min(fields.reconsume_times) < 0
            or any(flag < 0 or flag & _REFUSED for flag in flags)
        ):
            self._refuse(messages, fresh)
        is_alike = (
            len(flags) == 1
            and len(set(born_hosts)) == 1
            and not any(fields.flags)
            and not any(fields.reconsume_times)
            and set(fields.born_ms) == {None}
            and max(map(len, set(fields.topics))) <= TOPIC_BYTES_MAX
        )
        return Prepared(
            fields=fields,
            queues=list(zip(fields.topics, fields.queue_ids, strict=True)),
            crcs=[crc & CRC_MASK for crc in map(zlib_ng.crc32, bodies)],
            sizes=sizes,
            leads=leads,
            properties=properties,
            msg_ids=msg_ids,
            sys_flags=[
                flag & ~_HOST_BITS | bits
                for flag, (_, bits, _) in zip(sys_flags, hosts, strict=True)
            ],
            born_hosts=[packed for packed, _, _ in hosts],
            magics=[MAGIC_V1 if lead.is_v1 else MAGIC_V2 for lead in topics],
            is_alike=is_alike,
            is_plain=is_plain,
        )

    # -- properties: the stored text (``UNIQ_KEY`` and ``CLUSTER`` last) -----------------------------

    def _plain_texts(
        self, messages: Sequence[Message], fields: Fields, fresh: Sequence[str]
    ) -> list[str]:
        """Of messages that have no others than tag and keys."""
        try:
            tags = [self._tags[tag] for tag in fields.tags]
        except KeyError:
            self._learn(messages, fields, fresh)
            tags = [self._tags[tag] for tag in fields.tags]
        end = f"\x02{self._cluster_pair}"
        given = set(map(type, fields.keys))
        if given == {type(None)}:
            return [f"{tag}UNIQ_KEY\x01{own}{end}" for tag, own in zip(tags, fresh, strict=True)]
        joined = "".join(filter(None, fields.keys))
        if "" in fields.keys or "\x01" in joined or "\x02" in joined:
            self._refuse(messages, fresh)
        if len(given) == 1:
            return [
                f"{tag}KEYS\x01{keys}\x02UNIQ_KEY\x01{own}{end}"
                for tag, keys, own in zip(tags, fields.keys, fresh, strict=True)
            ]
        pairs = ["" if keys is None else f"KEYS\x01{keys}\x02" for keys in fields.keys]
        return [
            f"{tag}{pair}UNIQ_KEY\x01{own}{end}"
            for tag, pair, own in zip(tags, pairs, fresh, strict=True)
        ]

    def _learn(self, messages: Sequence[Message], fields: Fields, fresh: Sequence[str]) -> None:
        """Make the pairs of tags that were not met yet."""
        tags = set(fields.tags)
        if any(tag is not None and (not tag or "\x01" in tag or "\x02" in tag) for tag in tags):
            self._refuse(messages, fresh)
        known = {} if len(self._tags) > _KNOWN_MAX else self._tags
        # Other threads may be using the old table.
        self._tags = known | {tag: f"TAGS\x01{tag}\x02" if tag is not None else "" for tag in tags}

    def _properties(self, message: Message, fresh: str) -> tuple[str, str]:
        """Of one message of any kind; and its unique id."""
        found, tags, keys = message.properties, message.tags, message.keys
        if _STORES_OWN.intersection(
            found
        ):  # it names what the store would add, or says a thing twice
            raw, msg_id = self._checked(message, fresh)
            return raw.decode(), msg_id
        pairs = [f"{name}\x01{value}\x02" for name, value in found.items()]
        if tags is not None:
            pairs.append(f"TAGS\x01{tags}\x02")
        if keys is not None:
            pairs.append(f"KEYS\x01{keys}\x02")
        text = "".join(pairs)
        if (
            text.count("\x01") != len(pairs)
            or text.count("\x02") != len(pairs)
            or text[:1] == "\x01"
            or "\x01\x02" in text
            or "\x02\x01" in text
        ):
            self._refuse((message,), (fresh,))
        return f"{text}UNIQ_KEY\x01{fresh}\x02{self._cluster_pair}", fresh

    def _encode(
        self, messages: Sequence[Message], texts: Sequence[str], fresh: Sequence[str]
    ) -> list[bytes]:
        try:
            found = [text.encode() for text in texts]
        except UnicodeEncodeError:
            self._refuse(messages, fresh)
        if max(map(len, found)) > PROPERTIES_BYTES_MAX:
            self._refuse(messages, fresh)
        return found

    # -- once for each topic, host, or error ---------------------------------------------------------

    def _checked(self, message: Message, fresh: str) -> tuple[bytes, str]:
        return checked_properties(message, self._options, cluster=self._cluster, unique_key=fresh)

    def _refuse(self, messages: Sequence[Message], fresh: Sequence[str]) -> NoReturn:
        """Raise what is wrong."""
        for message, own in zip(messages, fresh, strict=True):
            self._checked(message, own)
        raise InvalidError(f"a message for {messages[0].topic} that cannot be stored")

    def _topic(self, topic: str) -> _Leads:
        found = self._topics.get(topic)
        if found is None:
            found = self._topics[topic] = _Leads(topic)
        return found

    def _host(self, host: str | None) -> tuple[bytes, int, int]:
        """Packed, the bits of both hosts, and the bytes of a record of nothing."""
        found = self._hosts.get(host)
        if found is not None:
            return found
        try:
            packed = self.store_host if host is None else pack_host(host)
        except ValueError as error:
            raise InvalidError(str(error), do="give ip:port or [ip]:port") from error
        bits = sysflag.BORN_HOST_V6 if len(packed) > _V4_BYTES else 0
        bits |= sysflag.STORE_HOST_V6 if len(self.store_host) > _V4_BYTES else 0
        if len(self._hosts) > _KNOWN_MAX:
            self._hosts.clear()
        rest = BODY_AT + len(packed) + len(self.store_host) - 2 * _V4_BYTES
        made = self._hosts[host] = packed, bits, rest
        return made


def _spread(column: tuple[_Value, ...], make: Callable[[_Value], _Made]) -> list[_Made]:
    """What is made of each value, made once for equal ones."""
    values = set(column)
    if len(values) == 1:
        return [make(column[0])] * len(column)
    made = {value: make(value) for value in values}
    return [made[value] for value in column]
