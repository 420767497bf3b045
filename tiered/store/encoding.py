"""From messages to the pieces of records, a batch at a time, as far as possible before the log's order is known.

Checks that hardly ever fail are made on whole columns; where one does, ``tiered.store.checks`` looks at one message
after another and says what is wrong. Properties are joined as text: the usual ones (tag, keys, unique id, cluster) by
one template, others pair by pair.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Final, NoReturn

from zlib_ng import zlib_ng

from tiered.errors import InvalidError
from tiered.format import properties as names
from tiered.format import sysflag
from tiered.format.hosts import pack_host
from tiered.format.record import BODY_AT, CRC_MASK, MAGIC_V1
from tiered.store.checks import (
    INT_MAX,
    LONG_MAX,
    PROPERTIES_BYTES_MAX,
    QUEUE_ID_MAX,
    checked_properties,
)
from tiered.store.columns import Fields, Kind, Leads, Prepared

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiered.store.messages import Message
    from tiered.store.options import StoreOptions
    from tiered.store.uniqkeys import KeyMaker

_KindKey = tuple[str, str | None, int]
"""Topic, producer, sysFlag."""
_KNOWN_MAX: Final = 10_000
"""How many tags and kinds are remembered."""
_STORES_OWN: Final = frozenset({names.TAGS, names.KEYS, names.UNIQ_KEY, names.CLUSTER})
"""Properties that are also given otherwise, or that the store adds."""
_V4_BYTES: Final = 8
_REFUSED: Final = (
    sysflag.NEED_UNWRAP | sysflag.INNER_BATCH | sysflag.TRANSACTION_PREPARED  # of a rollback too
)
_ZERO: Final = (0,)
_UNSET: Final = (None,)
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


_NONE: Final = Prepared(
    Fields((), (), (), (), (), (), (), ()),
    kinds=(),
    queues=(),
    distinct=frozenset(),
    crcs=(),
    sizes=(),
    leads=(),
    properties=(),
    msg_ids=(),
    is_alike=False,
)


class Encoder:
    """Prepares messages for one store. For any thread."""

    def __init__(self, options: StoreOptions, cluster: str, keys: KeyMaker) -> None:
        self._options = options
        self._cluster = cluster
        self._cluster_pair = f"{names.CLUSTER}\x01{cluster}\x02"
        self._keys = keys
        self._topics: dict[str, Leads] = {}
        self._tags: dict[str | None, str] = {None: ""}
        self._known: dict[_KindKey, Kind] = {}
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
        fresh = self._keys.take(len(messages), now_ms)
        if len(messages) == 1 and (found := self._usual(messages[0], fresh)) is not None:
            return found
        columns = tuple(zip(*map(_FIELDS, messages), strict=True))
        fields, (others, born_hosts, sys_flags) = Fields(*columns[:8]), columns[8:]
        kinds, is_one = self._kinds(
            messages, list(zip(fields.topics, born_hosts, sys_flags, strict=True)), fresh
        )
        if any(others):
            made = list(map(self._properties, messages, fresh))
            msg_ids, texts = [one for _, one in made], [text for text, _ in made]
        else:
            msg_ids, texts = fresh, self._plain_texts(messages, fields, fresh)
        properties = self._encode(messages, texts, fresh)
        leads, sizes = _measure(fields.bodies, properties, kinds, is_one=is_one)
        queues = list(zip(fields.topics, fields.queue_ids, strict=True))
        distinct = set(queues)
        if (
            (largest := max(sizes)) > self._size_max
            or (largest > self._body_max and max(map(len, fields.bodies)) > self._body_max)
            or not all(0 <= queue_id <= QUEUE_ID_MAX for _, queue_id in distinct)
            or not _fit(fields)
        ):
            self._refuse(messages, fresh)
        return Prepared(
            fields=fields,
            kinds=kinds,
            queues=queues,
            distinct=distinct,
            crcs=[crc & CRC_MASK for crc in map(zlib_ng.crc32, fields.bodies)],
            sizes=sizes,
            leads=leads,
            properties=properties,
            msg_ids=msg_ids,
            is_alike=(
                is_one
                and kinds[0].leads.magic == MAGIC_V1
                and not any(fields.flags)
                and not any(fields.reconsume_times)
                and fields.born_ms.count(None) == len(sizes)
            ),
        )

    def _usual(self, message: Message, fresh: list[str]) -> Prepared | None:
        """A single message of the usual sort, at half the price; None when it is another, or may be refused."""
        kind = self._known.get((message.topic, message.born_host, message.sys_flag))
        tag, keys, body = self._tags.get(message.tags), message.keys, message.body
        if (
            kind is None
            or tag is None
            or message.properties
            or message.flag
            or message.reconsume_times
            or message.born_timestamp_ms is not None
            or kind.leads.magic != MAGIC_V1
            or not 0 <= message.queue_id <= QUEUE_ID_MAX
            or (keys is not None and (not keys or "\x01" in keys or "\x02" in keys))
        ):
            return None
        pair = "" if keys is None else f"KEYS\x01{keys}\x02"
        text = f"{tag}{pair}UNIQ_KEY\x01{fresh[0]}\x02{self._cluster_pair}"
        raw = text.encode("utf-8", "replace")
        size = kind.rest_bytes + len(body) + len(raw)
        if (
            not text.isascii()
            or len(raw) > PROPERTIES_BYTES_MAX
            or len(body) > self._body_max
            or size > self._size_max
        ):
            return None
        queue = message.topic, message.queue_id
        return Prepared(
            Fields(
                (message.topic,),
                (message.queue_id,),
                (body,),
                (message.tags,),
                (keys,),
                _ZERO,
                _UNSET,
                _ZERO,
            ),
            kinds=(kind,),
            queues=(queue,),
            distinct={queue},
            crcs=(zlib_ng.crc32(body) & CRC_MASK,),
            sizes=(size,),
            leads=(kind.leads[len(raw)],),
            properties=(raw,),
            msg_ids=fresh,
            is_alike=True,
        )

    def _kinds(
        self, messages: Sequence[Message], keys: list[_KindKey], fresh: Sequence[str]
    ) -> tuple[list[Kind], bool]:
        """Each message's kind, and whether there is but one."""
        made = {}
        for key in set(keys):
            found = self._known.get(key)
            made[key] = self._kind(messages, key, fresh) if found is None else found
        if len(made) == 1:
            return list(made.values()) * len(keys), True
        return [made[key] for key in keys], False

    def _kind(self, messages: Sequence[Message], key: _KindKey, fresh: Sequence[str]) -> Kind:
        topic, born_host, sys_flag = key
        leads = self._topics.get(topic)
        if leads is None:
            leads = self._topics[topic] = Leads(topic)
        try:
            host = self.store_host if born_host is None else pack_host(born_host)
        except ValueError as error:
            raise InvalidError(str(error), do="give ip:port or [ip]:port") from error
        if sys_flag < 0 or sys_flag & _REFUSED:
            self._refuse(messages, fresh)
        flag = sys_flag & ~_HOST_BITS
        flag |= sysflag.BORN_HOST_V6 if len(host) > _V4_BYTES else 0
        flag |= sysflag.STORE_HOST_V6 if len(self.store_host) > _V4_BYTES else 0
        rest = BODY_AT + len(host) + len(self.store_host) - 2 * _V4_BYTES + leads.size
        if len(self._known) >= _KNOWN_MAX:
            self._known.clear()
        made = self._known[key] = Kind(leads, host, flag, rest)
        return made

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

    # -- once for each error ---------------------------------------------------------

    def _checked(self, message: Message, fresh: str) -> tuple[bytes, str]:
        return checked_properties(message, self._options, cluster=self._cluster, unique_key=fresh)

    def _refuse(self, messages: Sequence[Message], fresh: Sequence[str]) -> NoReturn:
        """Raise what is wrong."""
        for message, own in zip(messages, fresh, strict=True):
            self._checked(message, own)
        raise InvalidError(f"a message for {messages[0].topic} that cannot be stored")


def _measure(
    bodies: Sequence[bytes], properties: Sequence[bytes], kinds: Sequence[Kind], *, is_one: bool
) -> tuple[list[bytes], list[int]]:
    """What stands between bodies and properties, and the sizes of the records."""
    lengths = list(map(len, properties))
    if is_one:
        lead, rest = kinds[0].leads, kinds[0].rest_bytes
        return (
            [lead[length] for length in lengths],
            [rest + size + length for size, length in zip(map(len, bodies), lengths, strict=True)],
        )
    return (
        [kind.leads[length] for kind, length in zip(kinds, lengths, strict=True)],
        [
            kind.rest_bytes + len(body) + length
            for kind, body, length in zip(kinds, bodies, lengths, strict=True)
        ],
    )


def _fit(fields: Fields) -> bool:
    """Whether the numbers that hardly anybody sets fit their fields."""
    flags, times, born_ms = fields.flags, fields.reconsume_times, fields.born_ms
    if any(flags) and not -INT_MAX - 1 <= min(flags) <= max(flags) <= INT_MAX:
        return False
    if any(times) and not 0 <= min(times) <= max(times) <= INT_MAX:
        return False
    return born_ms.count(None) == len(born_ms) or all(
        -LONG_MAX - 1 <= ms <= LONG_MAX for ms in born_ms if ms is not None
    )
