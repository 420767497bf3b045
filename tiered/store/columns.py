"""The messages of one append in columns: what is written before and behind each body, whose it is, what it is found by.

What a record says of its place (queue offset, physical offset, store time) is known only to the one writer, so the
heads are packed there, by ``heads``. Everything else is made by the thread that appends (``tiered.store.encoding``).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import chain, repeat
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from tiered.errors import InvalidError
from tiered.format.record import MAGIC_V1, MAGIC_V2
from tiered.store.checks import TOPIC_BYTES_MAX, check_topic

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from collections.abc import Set as AbstractSet

QueueKey = tuple[str, int]
_Value = TypeVar("_Value")
_HEADS: Final = {
    (born, stored): Struct(f">iIIiiqqiq{born}sq{stored}siqi")
    for born in (8, 20)
    for stored in (8, 20)
}
_ALIKE: Final = {size: Struct(f">i4sIi4sqq{size}si") for size in (48, 60, 72)}
"""Heads that differ in sizes, CRC and place only: what lies between them is one run of bytes."""
_MAGIC_V1: Final = MAGIC_V1.to_bytes(4, "big")
_SHORT: Final = Struct(">h")
_LENGTHS_KNOWN_MAX: Final = 10_000
_NO_FLAG: Final = bytes(4)


class Fields(NamedTuple):
    """The messages' fields, one tuple each, in the order of ``tiered.store.messages.Message``."""

    topics: tuple[str, ...]
    queue_ids: tuple[int, ...]
    bodies: tuple[bytes, ...]
    tags: tuple[str | None, ...]
    keys: tuple[str | None, ...]
    flags: tuple[int, ...]
    born_ms: tuple[int | None, ...]
    reconsume_times: tuple[int, ...]


class Leads(dict[int, bytes]):
    """What stands between body and properties of a topic's records, by the length of the properties.

    Attributes:
        size: Bytes of each.
        magic: Of the records' version, which the topic's length decides.
    """

    def __init__(self, topic: str) -> None:
        """For a topic.

        Raises:
            InvalidError: No broker would take its name.
        """
        super().__init__()
        length = check_topic(topic)
        is_v1 = length <= TOPIC_BYTES_MAX
        self.magic = MAGIC_V1 if is_v1 else MAGIC_V2
        self._topic = length.to_bytes(1 if is_v1 else 2, "big") + topic.encode()
        self.size = len(self._topic) + _SHORT.size

    def __missing__(self, properties_bytes: int) -> bytes:
        if len(self) >= _LENGTHS_KNOWN_MAX:
            self.clear()
        made = self[properties_bytes] = self._topic + _SHORT.pack(properties_bytes)
        return made


@dataclass(frozen=True, slots=True)
class Kind:
    """What many messages have in common.

    Attributes:
        leads: Of the topic.
        born_host: Packed.
        sys_flag: With the bits of the hosts.
        rest_bytes: Of a record without body and properties.
    """

    leads: Leads
    born_host: bytes
    sys_flag: int
    rest_bytes: int


@dataclass(slots=True, eq=False)  # made for every append: frozen ones take twice as long
class Prepared:
    """Checked messages of one append.

    Attributes:
        fields: As given.
        kinds: Of each.
        queues: Topic and queue id of each.
        distinct: The queues there are.
        crcs: Of the bodies, as records store them.
        sizes: Bytes of each record.
        leads: What stands between body and properties: topic, length of the properties.
        properties: As stored.
        msg_ids: Each one's ``UNIQ_KEY``.
        is_alike: They are of one kind of the usual version, and flags and times are the usual ones.
    """

    fields: Fields
    kinds: Sequence[Kind]
    queues: Sequence[QueueKey]
    distinct: AbstractSet[QueueKey]
    crcs: Sequence[int]
    sizes: Sequence[int]
    leads: Sequence[bytes]
    properties: Sequence[bytes]
    msg_ids: Sequence[str]
    is_alike: bool

    def __len__(self) -> int:
        """How many messages."""
        return len(self.sizes)

    def heads(
        self,
        queue_offsets: Sequence[int],
        positions: Sequence[int],
        store_ms: int,
        store_host: bytes,
    ) -> list[bytes]:
        """What stands before each body, once the records' places are known.

        Raises:
            InvalidError: A number of a message does not fit its field.
        """
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
        middle = struct.pack(
            f">iq{len(kind.born_host)}sq{len(store_host)}siq",
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


@dataclass(slots=True, eq=False)  # made for every append: frozen ones take twice as long
class Places:
    """Where the messages of one append were put.

    Attributes:
        queue_offsets: Of each.
        positions: Physical offset of each.
        end: Physical offset behind the last.
        store_ms: Their store time, UTC.
    """

    queue_offsets: Sequence[int]
    positions: Sequence[int]
    end: int
    store_ms: int

    def part(self, first: int, last: int, end: int) -> Places:
        """Of the messages ``[first, last)``, the last of which ends at ``end``."""
        return Places(
            self.queue_offsets[first:last], self.positions[first:last], end, self.store_ms
        )


def join(parts: Sequence[Prepared]) -> Prepared:
    """The messages of several appends as one, in their order."""
    if len(parts) == 1:
        return parts[0]
    kind = parts[0].kinds[0]
    fields = zip(*(part.fields for part in parts), strict=True)
    return Prepared(
        fields=Fields(*(tuple(chain.from_iterable(column)) for column in fields)),
        kinds=_chain(part.kinds for part in parts),
        queues=_chain(part.queues for part in parts),
        distinct=frozenset().union(*(part.distinct for part in parts)),
        crcs=_chain(part.crcs for part in parts),
        sizes=_chain(part.sizes for part in parts),
        leads=_chain(part.leads for part in parts),
        properties=_chain(part.properties for part in parts),
        msg_ids=_chain(part.msg_ids for part in parts),
        is_alike=all(part.is_alike and part.kinds[0] is kind for part in parts),
    )


def _chain(columns: Iterable[Sequence[_Value]]) -> list[_Value]:
    return list(chain.from_iterable(columns))
