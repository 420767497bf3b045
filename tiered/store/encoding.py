"""From messages, or records of elsewhere, to the chunks of records, as far as possible before the log's order is known.

All of it goes a batch at a time.

Checks that hardly ever fail are made on whole columns; where one does, ``checked_properties`` looks at one message
after another and says what is wrong. Properties are joined as text: the usual ones (tag, keys, unique id, cluster) by
one template, others pair by pair.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from itertools import chain, repeat
from operator import attrgetter
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, TypeVar, cast

from zlib_ng import zlib_ng

from backends.lazy_dataclass import dataclass
from tiered.errors import InvalidError
from tiered.format import properties as names
from tiered.format import sysflag
from tiered.format.properties import join_properties
from tiered.format.record import (
    BODY_AT,
    CRC_MASK,
    MAGIC_V1,
    MAGIC_V2,
    is_v6,
    offset_msg_id,
    pack_host,
    record_bytes,
)
from tiered.local.catalog import TOPIC_BYTES_MAX, check_topic
from tiered.model import PhysicalOffset, QueueOffset
from tiered.store.new_message import Appended, all_properties, counter_digits

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from tiered.store.new_message import IdRun, KeyMaker, NewMessage
    from tiered.store.store_options import StoreOptions


# -- checks ----------------------------------------------------------------------------------------

PROPERTIES_BYTES_MAX: Final = 0x7FFF
INT_MAX: Final = 2**31 - 1
LONG_MAX: Final = 2**63 - 1
QUEUE_ID_MAX: Final = 65_535
_REFUSED_FLAGS: Final = (
    (sysflag.NEED_UNWRAP | sysflag.INNER_BATCH, "an inner batch"),
    (sysflag.TRANSACTION_PREPARED, "a prepared or rolled back transaction"),
)


def checked_properties(
    message: NewMessage, options: StoreOptions, *, cluster: str, unique_key: str
) -> tuple[bytes, str]:
    """The stored properties of a message that can be stored as it is, and its unique id.

    ``unique_key``, unless it has one.
    """
    topic_bytes = check_topic(message.topic)
    _check_numbers(message)
    born_host = message.born_host or options.store_host
    found = all_properties(message)
    if not found.get(names.UNIQ_KEY):
        found[names.UNIQ_KEY] = unique_key
    found[names.CLUSTER] = cluster
    try:
        raw = join_properties(found)
    except ValueError as error:  # a separator, an empty value, or what is not Unicode text
        raise InvalidError(str(error)) from error
    if len(raw) > PROPERTIES_BYTES_MAX:
        raise InvalidError(
            f"properties of {len(raw)} bytes, and at most {PROPERTIES_BYTES_MAX} may be"
        )
    size = record_bytes(
        body=len(message.body),
        topic=topic_bytes,
        props=len(raw),
        sys_flag=host_bits(message.sys_flag, born_host, options.store_host),
        version=1 if topic_bytes <= TOPIC_BYTES_MAX else 2,
    )
    if len(message.body) > options.message_bytes_max:
        raise InvalidError(
            f"a body of {len(message.body)} bytes, and at most {options.message_bytes_max} may be"
        )
    if size > options.record_bytes_max:
        raise InvalidError(
            f"a record of {size} bytes, and at most {options.record_bytes_max} may be"
        )
    return raw, found[names.UNIQ_KEY]


@lru_cache(maxsize=4096)
def check_host(host: str) -> None:
    """Refuse what is neither ``ip:port`` nor ``[ip]:port``."""
    try:
        pack_host(host)
    except ValueError as error:
        raise InvalidError(str(error), do="give ip:port or [ip]:port") from error


def _check_numbers(message: NewMessage) -> None:
    for name, value, low, high in (
        ("queue_id", message.queue_id, 0, QUEUE_ID_MAX),
        ("flag", message.flag, -INT_MAX - 1, INT_MAX),
        ("sys_flag", message.sys_flag, 0, INT_MAX),
        ("reconsume_times", message.reconsume_times, 0, INT_MAX),
        ("born_timestamp_ms", message.born_timestamp_ms or 0, -LONG_MAX - 1, LONG_MAX),
    ):
        if not low <= value <= high:
            raise InvalidError(f"{name} {value}: it must lie between {low} and {high}")
    for bits, what in _REFUSED_FLAGS:
        if message.sys_flag & bits:
            raise InvalidError(f"sys_flag {message.sys_flag:#x}: {what} cannot be stored here")


def host_bits(flag: int, born_host: str, store_host: str) -> int:
    """A sysFlag that says of which kinds the two hosts are. Errors as of ``check_host``."""
    check_host(born_host)
    flag &= ~(sysflag.BORN_HOST_V6 | sysflag.STORE_HOST_V6)
    if is_v6(born_host):
        flag |= sysflag.BORN_HOST_V6
    if is_v6(store_host):
        flag |= sysflag.STORE_HOST_V6
    return flag


# -- columns ---------------------------------------------------------------------------------------

QueueKey = tuple[str, int]
_Value = TypeVar("_Value")
_HEADS: Final = {
    (born, stored): Struct(f">iIIiiqqiq{born}sq{stored}siqi")
    for born in (8, 20)
    for stored in (8, 20)
}
_MIDDLES: Final = {
    (born, stored): Struct(f">iq{born}sq{stored}siq") for born in (8, 20) for stored in (8, 20)
}
_ALIKE: Final = {size: Struct(f">i4sIi4sqq{size}si") for size in (48, 60, 72)}
"""Heads that differ in sizes, CRC and place only: what lies between them is one run of bytes."""
_MAGIC_V1: Final = MAGIC_V1.to_bytes(4, "big")
_SHORT: Final = Struct(">h")
_LENGTHS_KNOWN_MAX: Final = 10_000
_NO_FLAG: Final = bytes(4)


class MessageFields(NamedTuple):
    """The messages' fields, one tuple each, in the order of ``tiered.store.new_message.NewMessage``."""

    topics: tuple[str, ...]
    queue_ids: tuple[int, ...]
    bodies: tuple[bytes, ...]
    tags: tuple[str | None, ...]
    keys: tuple[str | None, ...]
    flags: tuple[int, ...]
    born_ms: tuple[int | None, ...]
    reconsume_times: tuple[int, ...]


class Leads(dict[int, bytes]):
    """What stands between body and properties of a topic's records, by the length of the properties."""

    def __init__(self, topic: str) -> None:
        """For a topic whose name brokers take."""
        super().__init__()
        length = check_topic(topic)
        is_v1 = length <= TOPIC_BYTES_MAX
        # Of the records' version, which the topic's length decides.
        self.magic = MAGIC_V1 if is_v1 else MAGIC_V2
        self._topic = length.to_bytes(1 if is_v1 else 2, "big") + topic.encode()
        self.size = len(self._topic) + _SHORT.size  # bytes of each

    def __missing__(self, properties_bytes: int) -> bytes:
        if len(self) >= _LENGTHS_KNOWN_MAX:
            self.clear()
        made = self[properties_bytes] = self._topic + _SHORT.pack(properties_bytes)
        return made


@dataclass(frozen=True, slots=True)
class EncodedKind:
    """What many messages have in common."""

    leads: Leads  # of the topic
    born_host: bytes  # packed
    sys_flag: int  # with the bits of the hosts
    rest_bytes: int  # of a record without body and properties


@dataclass(slots=True, eq=False)  # made for every append: frozen ones take twice as long
class Prepared:
    """Checked messages of one append.

    What a record says of its place (queue offset, physical offset, store time) is known only to the one writer, so the
    heads are packed there, by ``heads``. Everything else is made by the thread that appends.
    """

    fields: MessageFields  # as given
    kinds: Sequence[EncodedKind]  # of each
    distinct: AbstractSet[QueueKey]  # the queues there are
    crcs: Sequence[int]  # of the bodies, as records store them
    sizes: Sequence[int]  # bytes of each record
    leads: Sequence[bytes]
    """What stands between body and properties: topic, length of the properties."""
    properties: Sequence[bytes]  # as stored
    msg_ids: Sequence[str]  # each one's ``UNIQ_KEY``; empty where ``ids`` tells of them
    is_alike: bool
    """They are of one kind of the usual version, and flags and times are the usual ones."""
    ids: Sequence[IdRun] | None = None
    """Their unique ids, where they are plain: of one topic and kind, all with keys (ASCII) or all without, and with
    no properties but those, tags and what the store adds: nothing has to be looked for in these. Else None."""

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def queues(self) -> Iterable[QueueKey]:
        """Topic and queue id of each."""
        return zip(self.fields.topics, self.fields.queue_ids, strict=True)

    def msg_id(self, number: int) -> str:
        """The ``UNIQ_KEY`` of one message of an append."""
        if self.ids is None:
            return self.msg_ids[number]
        (run,) = self.ids
        return run.prefix + counter_digits()[run.first + number]

    def queue_offsets(
        self, ends: Mapping[QueueKey, int]
    ) -> tuple[dict[QueueKey, int], Sequence[int]]:
        """Where the queues go on behind these messages, and each one's place in its own; ``ends``: where they end now."""
        if len(self.distinct) == 1:
            (queue,) = self.distinct
            first = ends.get(queue, 0)
            return {queue: first + len(self)}, range(first, first + len(self))
        if self.ids is None:
            return number_in_queues(list(self.queues), self.distinct, ends)
        topic = self.fields.topics[0]
        moved, offsets = number_in_queues(
            self.fields.queue_ids,
            {number for _, number in self.distinct},
            {number: ends.get((topic, number), 0) for _, number in self.distinct},
        )
        return {(topic, number): end for number, end in moved.items()}, offsets

    def heads(
        self,
        queue_offsets: Sequence[int],
        positions: Sequence[int],
        store_ms: int,
        store_host: bytes,
    ) -> list[bytes]:
        """What stands before each body, once the records' places are known."""
        try:
            if self.is_alike:
                return self._alike(queue_offsets, positions, store_ms, store_host)
            return [
                self._head(at, queue_offsets[at], positions[at], store_ms, store_host)
                for at in range(len(self.sizes))
            ]
        except struct.error as error:
            raise InvalidError(f"a message for {self.fields.topics[0]}: {error}") from error

    def _alike(
        self,
        queue_offsets: Sequence[int],
        positions: Sequence[int],
        store_ms: int,
        store_host: bytes,
    ) -> list[bytes]:
        kind = self.kinds[0]
        middle = _MIDDLES[len(kind.born_host), len(store_host)].pack(
            kind.sys_flag,
            store_ms,
            kind.born_host,
            store_ms,
            store_host,
            0,
            0,
        )
        return list(
            map(
                _ALIKE[len(middle)].pack,
                self.sizes,
                repeat(_MAGIC_V1),
                self.crcs,
                self.fields.queue_ids,
                repeat(_NO_FLAG),
                queue_offsets,
                positions,
                repeat(middle),
                map(len, self.fields.bodies),
            )
        )

    def _head(
        self, at: int, queue_offset: int, position: int, store_ms: int, store_host: bytes
    ) -> bytes:
        fields, kind = self.fields, self.kinds[at]
        born_ms = fields.born_ms[at]
        return _HEADS[len(kind.born_host), len(store_host)].pack(
            self.sizes[at],
            kind.leads.magic,
            self.crcs[at],
            fields.queue_ids[at],
            fields.flags[at],
            queue_offset,
            position,
            kind.sys_flag,
            store_ms if born_ms is None else born_ms,
            kind.born_host,
            store_ms,
            store_host,
            fields.reconsume_times[at],
            0,
            len(fields.bodies[at]),
        )


_Queue = TypeVar("_Queue")


def number_in_queues(
    queues: Sequence[_Queue], distinct: AbstractSet[_Queue], ends: Mapping[_Queue, int]
) -> tuple[dict[_Queue, int], Sequence[int]]:
    """Where queues go on, and each record's place in its own; ``ends``: where they end now, 0 where it says nothing."""
    moved = {queue: ends.get(queue, 0) for queue in distinct}
    if len(moved) == 1:
        ((queue, first),) = moved.items()
        return {queue: first + len(queues)}, range(first, first + len(queues))
    offsets: list[int] = []
    add = offsets.append
    for queue in queues:
        offset = moved[queue]
        add(offset)
        moved[queue] = offset + 1
    return moved, offsets


@dataclass(slots=True, eq=False)  # made for every append: frozen ones take twice as long
class RecordPlaces:
    """Where the messages of one append were put."""

    queue_offsets: Sequence[int]  # of each
    positions: Sequence[int]  # physical offset of each
    end: int  # physical offset behind the last
    store_ms: int  # their store time, UTC

    def part(self, first: int, last: int, end: int) -> RecordPlaces:
        """Of the messages ``[first, last)``, the last of which ends at ``end``."""
        return RecordPlaces(
            self.queue_offsets[first:last], self.positions[first:last], end, self.store_ms
        )


def join(parts: Sequence[Prepared]) -> Prepared:
    """The messages of several appends as one, in their order."""
    if len(parts) == 1:
        return parts[0]
    kind = parts[0].kinds[0]
    fields = zip(*(part.fields for part in parts), strict=True)
    return Prepared(
        fields=MessageFields(*(tuple(chain.from_iterable(column)) for column in fields)),
        kinds=_chain(part.kinds for part in parts),
        distinct=frozenset().union(*(part.distinct for part in parts)),
        crcs=_chain(part.crcs for part in parts),
        sizes=_chain(part.sizes for part in parts),
        leads=_chain(part.leads for part in parts),
        properties=_chain(part.properties for part in parts),
        msg_ids=_chain(part.msg_ids for part in parts),
        is_alike=all(part.is_alike and part.kinds[0] is kind for part in parts),
        ids=_join_ids(parts),
    )


def _join_ids(parts: Sequence[Prepared]) -> Sequence[IdRun] | None:
    first = parts[0].fields
    found: list[IdRun] = []
    for part in parts:
        fields = part.fields
        if (
            part.ids is None
            or fields.topics[0] != first.topics[0]
            or (fields.keys[0] is None) != (first.keys[0] is None)
        ):
            return None
        found += part.ids
    return found


def _chain(columns: Iterable[Sequence[_Value]]) -> list[_Value]:
    return list(chain.from_iterable(columns))


# -- receipts --------------------------------------------------------------------------------------


class Receipts:
    """Where the messages of one append were put; each receipt is made when it is asked for."""

    __slots__ = ("_host", "_messages", "places")

    def __init__(self, messages: Prepared, places: RecordPlaces, host: str) -> None:
        self._messages = messages
        self.places = places
        self._host = host

    def __len__(self) -> int:
        return len(self._messages)

    def __getitem__(self, number: int) -> Appended:
        messages, position = self._messages, self.places.positions[number]
        return Appended(
            QueueOffset(self.places.queue_offsets[number]),
            PhysicalOffset(position),
            offset_msg_id(self._host, position),
            messages.msg_id(number),
            messages.sizes[number],
        )

    def __iter__(self) -> Iterator[Appended]:
        return (self[number] for number in range(len(self)))


# -- encoder ---------------------------------------------------------------------------------------

_KindKey = tuple[str, str | None, int]
"""Topic, producer, sysFlag."""
_KindColumns = tuple[tuple[str, ...], tuple[str | None, ...], tuple[int, ...]]
_KNOWN_MAX: Final = 10_000
"""How many tags and kinds are remembered."""
_STORES_OWN: Final = frozenset({names.TAGS, names.KEYS, names.UNIQ_KEY, names.CLUSTER})
"""Properties that are also given otherwise, or that the store adds."""
_V4_BYTES: Final = 8
REFUSED_BITS: Final = (
    sysflag.NEED_UNWRAP | sysflag.INNER_BATCH | sysflag.TRANSACTION_PREPARED  # of a rollback too
)
_ZERO: Final = (0,)
_UNSET: Final = (None,)
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
    MessageFields((), (), (), (), (), (), (), ()),
    kinds=(),
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
        self._known: dict[_KindKey, EncodedKind] = {}
        self.store_host = pack_host(options.store_host)
        self._body_max = options.message_bytes_max
        self._size_max = options.record_bytes_max

    def prepare(self, messages: Sequence[NewMessage], now_ms: int) -> Prepared:
        """Check messages and make their chunks. InvalidError: one cannot be stored as it is; retrying does not help."""
        if not messages:
            return _NONE
        if len(messages) == 1 and (found := self._single(messages[0], now_ms)) is not None:
            return found
        columns = tuple(zip(*map(_FIELDS, messages), strict=True))
        found = self._plainly(columns, len(messages), now_ms)
        return self._one_by_one(messages, columns, now_ms) if found is None else found

    def _plainly(self, columns: tuple[Any, ...], count: int, now_ms: int) -> Prepared | None:
        """Messages of the plainest sort, at half the price; None when one is not, is new to us, or may be refused."""
        topics, queue_ids, bodies, tags, keys, flags, born_ms, times, others, hosts, bits = columns
        topic = topics[0]
        kind = self._known.get((topic, hosts[0], bits[0]))
        if (
            kind is None
            or kind.leads.magic != MAGIC_V1
            or topics.count(topic) < count
            or hosts.count(hosts[0]) < count
            or bits.count(bits[0]) < count
            or any(flags)
            or any(times)
            or any(others)
            or born_ms.count(None) < count
        ):
            return None
        pairs = list(map(self._tags.get, tags))
        # Ids come last: those of messages that turn out not to be plain must not be lost.
        if None in pairs or not _are_plain(keys) or (run := self._keys.run(count, now_ms)) is None:
            return None
        texts = self._plain_properties(pairs, keys, run)
        properties = [text.encode() for text in texts]
        lengths, body_sizes = list(map(len, properties)), list(map(len, bodies))
        rest, leads = kind.rest_bytes, kind.leads
        sizes = [rest + body + length for body, length in zip(body_sizes, lengths, strict=True)]
        if (
            max(sizes) > self._size_max
            or max(body_sizes) > self._body_max
            or max(lengths) > PROPERTIES_BYTES_MAX
            or min(queue_ids) < 0
            or max(queue_ids) > QUEUE_ID_MAX
        ):
            return None
        return Prepared(
            MessageFields(topics, queue_ids, bodies, tags, keys, flags, born_ms, times),
            [kind] * count,
            {(topic, queue_id) for queue_id in set(queue_ids)},
            [crc & CRC_MASK for crc in map(zlib_ng.crc32, bodies)],
            sizes,
            [leads[length] for length in lengths],
            properties,
            (),
            is_alike=True,
            ids=(run,),
        )

    def _single(self, message: NewMessage, now_ms: int) -> Prepared | None:
        """As ``_plainly``, of one message: columns of one cost three times as much."""
        topic, queue_id, body, tags, keys, flag, born_ms, times, others, host, bits = _FIELDS(
            message
        )
        kind, pair = self._known.get((topic, host, bits)), self._tags.get(tags)
        if (
            kind is None
            or pair is None
            or kind.leads.magic != MAGIC_V1
            or flag
            or times
            or others
            or born_ms is not None
            or not 0 <= queue_id <= QUEUE_ID_MAX
            or (keys is not None and not _are_plain((keys,)))
            or (run := self._keys.run(1, now_ms)) is None
        ):
            return None
        if keys is not None:
            pair = f"{pair}KEYS\x01{keys}\x02"
        own = counter_digits()[run.first]
        raw = f"{pair}UNIQ_KEY\x01{run.prefix}{own}\x02{self._cluster_pair}".encode()
        length, body_bytes = len(raw), len(body)
        size = kind.rest_bytes + body_bytes + length
        if size > self._size_max or body_bytes > self._body_max or length > PROPERTIES_BYTES_MAX:
            return None
        return Prepared(
            MessageFields((topic,), (queue_id,), (body,), (tags,), (keys,), _ZERO, _UNSET, _ZERO),
            (kind,),
            {(topic, queue_id)},
            (zlib_ng.crc32(body) & CRC_MASK,),
            (size,),
            (kind.leads[length],),
            (raw,),
            (),
            is_alike=True,
            ids=(run,),
        )

    def _plain_properties(
        self, pairs: Sequence[str | None], keys: Sequence[str | None], run: IdRun
    ) -> list[str]:
        """Their text; ``pairs``: that of each tag."""
        four = counter_digits()[run.first : run.first + run.length]
        lead, end = f"UNIQ_KEY\x01{run.prefix}", f"\x02{self._cluster_pair}"
        if keys[0] is None:
            return [f"{pair}{lead}{own}{end}" for pair, own in zip(pairs, four, strict=True)]
        lead = f"\x02{lead}"
        return [
            f"{pair}KEYS\x01{key}{lead}{own}{end}"
            for pair, key, own in zip(pairs, keys, four, strict=True)
        ]

    def _one_by_one(
        self, messages: Sequence[NewMessage], columns: tuple[Any, ...], now_ms: int
    ) -> Prepared:
        fresh = self._keys.take(len(messages), now_ms)
        fields, (others, born_hosts, sys_flags) = MessageFields(*columns[:8]), columns[8:]
        kinds, is_one = self._kinds(messages, (fields.topics, born_hosts, sys_flags), fresh)
        if any(others):
            made = list(map(self._properties, messages, fresh))
            msg_ids, texts = [one for _, one in made], [text for text, _ in made]
        else:
            msg_ids, texts = fresh, self._plain_texts(messages, fields, fresh)
        properties = self._encode(messages, texts, fresh)
        lengths = list(map(len, properties))
        leads = [kind.leads[length] for kind, length in zip(kinds, lengths, strict=True)]
        sizes = [
            kind.rest_bytes + len(body) + length
            for kind, body, length in zip(kinds, fields.bodies, lengths, strict=True)
        ]
        distinct = set(zip(fields.topics, fields.queue_ids, strict=True))
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

    def _kinds(
        self, messages: Sequence[NewMessage], columns: _KindColumns, fresh: Sequence[str]
    ) -> tuple[list[EncodedKind], bool]:
        """Each message's kind, and whether there is but one."""
        made = {}
        for key in set(zip(*columns, strict=True)):
            found = self._known.get(key)
            made[key] = self._kind(messages, key, fresh) if found is None else found
        if len(made) == 1:
            return list(made.values()) * len(messages), True
        return [made[key] for key in zip(*columns, strict=True)], False

    def _kind(
        self, messages: Sequence[NewMessage], key: _KindKey, fresh: Sequence[str]
    ) -> EncodedKind:
        topic, born_host, sys_flag = key
        leads = self._topics.get(topic)
        if leads is None:
            leads = self._topics[topic] = Leads(topic)
        said = self._options.store_host if born_host is None else born_host
        flag = host_bits(sys_flag, said, self._options.store_host)
        if sys_flag < 0 or sys_flag & REFUSED_BITS:
            self._refuse(messages, fresh)
        host = pack_host(said)
        rest = BODY_AT + len(host) + len(self.store_host) - 2 * _V4_BYTES + leads.size
        if len(self._known) >= _KNOWN_MAX:
            self._known.clear()
        made = self._known[key] = EncodedKind(leads, host, flag, rest)
        return made

    # -- properties: the stored text (``UNIQ_KEY`` and ``CLUSTER`` last) -----------------------------

    def _plain_texts(
        self, messages: Sequence[NewMessage], fields: MessageFields, fresh: Sequence[str]
    ) -> list[str]:
        """Of messages that have no others than tag and keys."""
        try:
            tags = [self._tags[tag] for tag in fields.tags]
        except KeyError:
            self._learn(messages, fields, fresh)
            tags = [self._tags[tag] for tag in fields.tags]
        joined = "".join(filter(None, fields.keys))
        if "" in fields.keys or "\x01" in joined or "\x02" in joined:
            self._refuse(messages, fresh)
        end = f"\x02{self._cluster_pair}"
        pairs = ["" if keys is None else f"KEYS\x01{keys}\x02" for keys in fields.keys]
        return [
            f"{tag}{pair}UNIQ_KEY\x01{own}{end}"
            for tag, pair, own in zip(tags, pairs, fresh, strict=True)
        ]

    def _learn(
        self, messages: Sequence[NewMessage], fields: MessageFields, fresh: Sequence[str]
    ) -> None:
        tags = set(fields.tags)
        if any(tag is not None and (not tag or "\x01" in tag or "\x02" in tag) for tag in tags):
            self._refuse(messages, fresh)
        known = {} if len(self._tags) > _KNOWN_MAX else self._tags
        # Other threads may be using the old table.
        self._tags = known | {tag: f"TAGS\x01{tag}\x02" if tag is not None else "" for tag in tags}

    def _properties(self, message: NewMessage, fresh: str) -> tuple[str, str]:
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
        self, messages: Sequence[NewMessage], texts: Sequence[str], fresh: Sequence[str]
    ) -> list[bytes]:
        try:
            found = [text.encode() for text in texts]
        except UnicodeEncodeError:
            self._refuse(messages, fresh)
        if max(map(len, found)) > PROPERTIES_BYTES_MAX:
            self._refuse(messages, fresh)
        return found

    # -- once for each error ---------------------------------------------------------

    def _checked(self, message: NewMessage, fresh: str) -> tuple[bytes, str]:
        return checked_properties(message, self._options, cluster=self._cluster, unique_key=fresh)

    def _refuse(self, messages: Sequence[NewMessage], fresh: Sequence[str]) -> NoReturn:
        for message, own in zip(messages, fresh, strict=True):
            self._checked(message, own)
        raise InvalidError(f"a message for {messages[0].topic} that cannot be stored")


def _are_plain(keys: Sequence[str | None]) -> bool:
    """Whether all have keys or none has, and these are ASCII that can be stored."""
    if (missing := keys.count(None)) or "" in keys:
        return missing == len(keys)
    joined = "".join(cast("Sequence[str]", keys))
    return joined.isascii() and "\x01" not in joined and "\x02" not in joined


def _fit(fields: MessageFields) -> bool:
    flags, times, born_ms = fields.flags, fields.reconsume_times, fields.born_ms
    if any(flags) and not -INT_MAX - 1 <= min(flags) <= max(flags) <= INT_MAX:
        return False
    if any(times) and not 0 <= min(times) <= max(times) <= INT_MAX:
        return False
    return born_ms.count(None) == len(born_ms) or all(
        -LONG_MAX - 1 <= ms <= LONG_MAX for ms in born_ms if ms is not None
    )
