"""One record of the commit log: its bytes and its fields.

All integers are big-endian. ``A`` is 12 when the born host is IPv6, else 0; ``B`` the same for the
store host.

======== ======= ========================= ========================================================
offset   bytes   field                     notes
======== ======= ========================= ========================================================
0        4       size                      of the whole record, this field included
4        4       magic                     version 1 or 2; a blank (end of file) has its own
8        4       body_crc                  CRC-32 of the body as stored, without its highest bit
12       4       queue_id
16       4       flag                      the producer's; opaque
20       8       queue_offset
28       8       physical_offset           the record's own byte address in the local log
36       4       sys_flag                  see ``tiered.format.sysflag``
40       8       born_timestamp_ms         the producer's clock
48       8+A     born_host                 address, then the port in 4 bytes
56+A     8       store_timestamp_ms        the broker's clock
64+A     8+B     store_host
72+A+B   4       reconsume_times
76+A+B   8       prepared_transaction      physical offset of the half message
84+A+B   4       body size
88+A+B   body    body                      as stored, perhaps compressed
..       1 or 2  topic size                signed; version 1: 1 byte, version 2: 2 bytes
..       topic   topic                     UTF-8
..       2       properties size           signed
..       props   properties                see ``tiered.format.properties``
======== ======= ========================= ========================================================

The shortest record has 91 bytes. What lies between this description and ``tiered.format.block``,
which reads many records at once, is held equal by a property test (through
``tests/support/scalar.py``).
"""

from __future__ import annotations

import ipaddress
from enum import IntEnum
from functools import lru_cache
from struct import Struct
from typing import TYPE_CHECKING, Final

from zlib_ng import zlib_ng

from backends.lazy_dataclass import dataclass
from tiered.format import properties, sysflag

if TYPE_CHECKING:
    from typing_extensions import Buffer


# --------------------------------------------------------------------------------------------------
# Hosts of a record as text, as Java prints them: ``10.0.0.1:80``, ``[2001:db8:0:0:0:0:7:1]:80``.
#
# A host takes 4 or 16 address bytes, then the port as a big-endian 4-byte integer. Zeros in an IPv6
# address are not shortened, so that the text compares equal with what RocketMQ's tools print. The
# port is taken as unsigned: a damaged or foreign one keeps its bytes.
# --------------------------------------------------------------------------------------------------


V4_HOST_BYTES: Final = 8
V6_HOST_BYTES: Final = 20
_PORT_MAX: Final = 2**32 - 1
_KNOWN_MAX: Final = 4096
"""A store has few hosts; so many of each form are remembered, of at most some 200 bytes each."""


@lru_cache(_KNOWN_MAX)
def format_host(packed: bytes) -> str:
    """Text of a packed host: 8 (IPv4) or 20 (IPv6) bytes."""
    port = int.from_bytes(packed[-4:], "big")
    if len(packed) == V4_HOST_BYTES:
        return f"{packed[0]}.{packed[1]}.{packed[2]}.{packed[3]}:{port}"
    if len(packed) == V6_HOST_BYTES:
        groups = ":".join(f"{packed[i] << 8 | packed[i + 1]:x}" for i in range(0, 16, 2))
        return f"[{groups}]:{port}"
    raise ValueError(f"a packed host has 8 or 20 bytes, not {len(packed)}")


@lru_cache(_KNOWN_MAX)
def pack_host(text: str) -> bytes:
    """Bytes of ``ip:port`` or ``[ip]:port``: 8 for IPv4, 20 for IPv6."""
    address, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > _PORT_MAX:
        raise ValueError(f"not a host and port: {text!r}")
    if is_v6(text):
        packed = ipaddress.IPv6Address(address.removeprefix("[").removesuffix("]")).packed
    else:
        packed = ipaddress.IPv4Address(address).packed
    return packed + int(port).to_bytes(4, "big")


def is_v6(text: str) -> bool:
    """Whether ``text`` names an IPv6 host."""
    return text.startswith("[")


# -- message ids -----------------------------------------------------------------------------------
#
# Message ids. An offset message id: hex of store host (8 or 20 bytes) and physical offset (8).


def offset_msg_id(store_host: str, physical_offset: int) -> str:
    """The id by which a broker finds a message in its log: 32 or 56 upper-case hex digits."""
    return (pack_host(store_host) + physical_offset.to_bytes(8, "big", signed=True)).hex().upper()


def parse_offset_msg_id(text: str) -> tuple[str, int]:
    """Store host and physical offset of an offset message id: 32 or 56 hex digits."""
    packed = bytes.fromhex(text)
    if len(packed) - 8 not in {V4_HOST_BYTES, V6_HOST_BYTES} or len(text) != 2 * len(packed):
        raise ValueError(f"not an offset message id: {text!r}")
    return format_host(packed[:-8]), int.from_bytes(packed[-8:], "big", signed=True)


MAGIC_V1: Final = 0xDAA3_20A7
MAGIC_V2: Final = 0xDAA3_20AB
MAGIC_BLANK: Final = 0xCBD4_3194
"""Magics as unsigned integers."""
RECORD_BYTES_MIN: Final = 91
"""Version 1, both hosts IPv4, empty body, topic and properties."""
BLANK_BYTES_MIN: Final = 8
"""Size and magic of a blank: a file always ends with at least this much behind its last record."""
CRC_MASK: Final = 0x7FFF_FFFF
"""RocketMQ drops the highest bit of each CRC-32."""

HEADER: Final = Struct(">iIIiiqqiq")
"""Bytes 0 to 48 (exclusive): size to born timestamp."""
SIZE_AND_MAGIC: Final = Struct(">iI")
# Where fields begin, as the table above has it. Up to the born host that holds for every record, behind it for one whose
# hosts are IPv4; code that looks at many records adds ``extra_of`` or ``V6_EXTRA_BYTES``.
MAGIC_AT: Final = 4
CRC_AT: Final = 8
QUEUE_ID_AT: Final = 12
QUEUE_OFFSET_AT: Final = 20
PHYSICAL_OFFSET_AT: Final = 28
SYS_FLAG_AT: Final = 36
BORN_TIME_AT: Final = 40
BORN_HOST_AT: Final = 48
STORE_TIME_AT: Final = 56
BODY_SIZE_AT: Final = 84
BODY_AT: Final = 88
_LONG: Final = Struct(">q")
_TAIL: Final = Struct(">iqi")
"""reconsume_times, prepared_transaction_offset, body size."""
_SHORT: Final = Struct(">h")
_BYTE: Final = Struct(">b")


class RecordFault(IntEnum):
    """What is wrong with a record: the first check that fails. Never renumbered."""

    OK = 0
    SHORT = 1
    """The buffer ends inside the record."""
    MAGIC = 2
    """The magic is none of a record."""
    SIZE = 3
    """The record's size is impossible, or not the one that was expected."""
    LENGTHS = 4
    """The sizes of body, topic and properties do not add up to the record's size."""
    PHYSICAL_OFFSET = 5
    """The record says that it belongs to another place of the log."""
    CRC = 6
    """The body does not match its CRC."""


class RecordError(ValueError):
    """Bytes that are no sound record. Retrying helps only while they are still being written."""

    def __init__(self, fault: RecordFault, detail: str) -> None:
        super().__init__(f"{fault.name}: {detail}")
        self.fault = fault  # which check failed
        self.detail = detail  # with the values that differ


@dataclass(frozen=True, slots=True)
class Record:
    """The fields of one record, as stored."""

    size: int  # bytes of the whole record
    version: int  # 1 or 2
    body_crc: int  # as stored; not compared by this class
    queue_id: int  # number of the queue in its topic
    flag: int  # the producer's flag
    queue_offset: int  # ordinal in the queue; of an inner batch, that of its first message
    physical_offset: int  # byte address in the local log
    sys_flag: int  # see ``tiered.format.sysflag``
    born_timestamp_ms: int  # producer's clock, UTC
    born_host: str  # ``ip:port`` or ``[ip]:port``
    store_timestamp_ms: int  # broker's clock, UTC
    store_host: str  # the broker, in the same form
    reconsume_times: int  # how often it was sent back
    prepared_transaction_offset: int  # physical offset of the half message, or 0
    body: bytes  # as stored, perhaps compressed
    topic: str  # bytes that are no UTF-8 are kept by surrogate escapes
    properties_raw: bytes  # as stored

    @property
    def properties(self) -> dict[str, str]:
        """The properties by name, parsed anew at each call."""
        return properties.parse_properties(self.properties_raw)


def body_crc(body: Buffer) -> int:
    """CRC-32 of a body as RocketMQ stores it, without the highest bit."""
    return zlib_ng.crc32(body) & CRC_MASK


def record_bytes(*, body: int, topic: int, props: int, sys_flag: int, version: int) -> int:
    """Bytes of a record with a body, topic and properties of the given sizes in bytes."""
    return 90 + version + sysflag.v6_extra_bytes(sys_flag) + body + topic + props


def decode_record(
    buffer: Buffer,
    position: int = 0,
    *,
    check_crc: bool = True,
    physical_offset: int | None = None,
) -> Record:
    """Decode and check the record that begins at ``position``; with ``physical_offset``, its own place as well.

    An empty body is never compared with its CRC (nor does the broker). RecordError: the first check that fails, in the
    order of ``RecordFault``, but that the size comes first.
    """
    view = memoryview(buffer)
    size = _checked_size(view, position)
    record = _decode(view[position : position + size])
    if physical_offset is not None and record.physical_offset != physical_offset:
        raise RecordError(
            RecordFault.PHYSICAL_OFFSET, f"says {record.physical_offset}, lies at {physical_offset}"
        )
    if check_crc and record.body and record.body_crc != (computed := body_crc(record.body)):
        raise RecordError(RecordFault.CRC, f"stored {record.body_crc:08x}, computed {computed:08x}")
    return record


def _checked_size(view: memoryview, position: int) -> int:
    """The record's own size, known to be possible and inside the buffer."""
    available = len(view) - position
    if available < SIZE_AND_MAGIC.size:
        raise RecordError(RecordFault.SHORT, f"{available} bytes are no header")
    size, magic = SIZE_AND_MAGIC.unpack_from(view, position)
    if size < RECORD_BYTES_MIN:
        raise RecordError(RecordFault.SIZE, f"a record of {size} bytes")
    if magic not in {MAGIC_V1, MAGIC_V2}:
        raise RecordError(RecordFault.MAGIC, f"magic {magic:08x}")
    if size > available:
        raise RecordError(RecordFault.SHORT, f"{available} of {size} bytes")
    return int(size)


def _decode(view: memoryview) -> Record:
    """Decode exactly one record whose size and magic are known to be good."""
    size, magic, crc, queue_id, flag, queue_offset, physical, sys_flag, born = HEADER.unpack_from(
        view
    )
    version = 1 if magic == MAGIC_V1 else 2
    extra = sysflag.v6_extra_bytes(sys_flag)
    if size < record_bytes(body=0, topic=0, props=0, sys_flag=sys_flag, version=version):
        raise RecordError(RecordFault.LENGTHS, f"{size} bytes are too few for hosts and lengths")
    store_at = STORE_TIME_AT + extra_of(sys_flag, sysflag.BORN_HOST_V6)
    reconsume, prepared, body_size = _TAIL.unpack_from(view, BODY_SIZE_AT - 12 + extra)
    topic_at = BODY_AT + extra + body_size
    body, topic, props = _variable_parts(view, BODY_AT + extra, topic_at, version)
    return Record(
        size=size,
        version=version,
        body_crc=crc,
        queue_id=queue_id,
        flag=flag,
        queue_offset=queue_offset,
        physical_offset=physical,
        sys_flag=sys_flag,
        born_timestamp_ms=born,
        born_host=format_host(bytes(view[BORN_HOST_AT:store_at])),
        store_timestamp_ms=_LONG.unpack_from(view, store_at)[0],
        store_host=format_host(bytes(view[store_at + 8 : BODY_SIZE_AT - 12 + extra])),
        reconsume_times=reconsume,
        prepared_transaction_offset=prepared,
        body=body,
        topic=topic.decode("utf-8", "surrogateescape"),
        properties_raw=props,
    )


def extra_of(sys_flag: int, bit: int) -> int:
    """Extra bytes of the host that ``bit`` speaks of."""
    return V6_HOST_BYTES - V4_HOST_BYTES if sys_flag & bit else 0


def _variable_parts(
    view: memoryview, body_at: int, topic_at: int, version: int
) -> tuple[bytes, bytes, bytes]:
    """Body, topic and properties of a record that ends where ``view`` ends."""
    length = _BYTE if version == 1 else _SHORT
    if topic_at < body_at or topic_at + length.size + _SHORT.size > len(view):
        raise RecordError(RecordFault.LENGTHS, f"a body of {topic_at - body_at} bytes")
    topic_size = length.unpack_from(view, topic_at)[0]
    topic_at += length.size
    properties_at = topic_at + topic_size + _SHORT.size
    if topic_size < 0 or properties_at > len(view):
        raise RecordError(RecordFault.LENGTHS, f"a topic of {topic_size} bytes")
    properties_size = _SHORT.unpack_from(view, properties_at - _SHORT.size)[0]
    if properties_size < 0 or properties_at + properties_size != len(view):
        raise RecordError(
            RecordFault.LENGTHS,
            f"properties of {properties_size} bytes at {properties_at} of {len(view)}",
        )
    return (
        bytes(view[body_at : topic_at - length.size]),
        bytes(view[topic_at : topic_at + topic_size]),
        bytes(view[properties_at:]),
    )


def encode_record(record: Record) -> bytes:
    """The bytes of a record, exactly as its fields say; the CRC too is taken as it stands.

    ValueError: the fields do not fit together (size, host kinds, lengths that the version cannot bear).
    """
    topic = record.topic.encode("utf-8", "surrogateescape")
    expected = record_bytes(
        body=len(record.body),
        topic=len(topic),
        props=len(record.properties_raw),
        sys_flag=record.sys_flag,
        version=record.version,
    )
    if record.size != expected:
        raise ValueError(f"the record says {record.size} bytes and has {expected}")
    for bit, host in (
        (sysflag.BORN_HOST_V6, record.born_host),
        (sysflag.STORE_HOST_V6, record.store_host),
    ):
        if bool(record.sys_flag & bit) != is_v6(host):
            raise ValueError(f"sys_flag {record.sys_flag:#x} does not fit host {host}")
    return _encode(record, topic)


def _encode(record: Record, topic: bytes) -> bytes:
    topic_length = _BYTE if record.version == 1 else _SHORT
    if len(topic) >> (8 * topic_length.size - 1) or len(record.properties_raw) >> 15:
        raise ValueError(f"topic ({len(topic)} bytes) or properties are too long for the version")
    return b"".join(
        (
            HEADER.pack(
                record.size,
                MAGIC_V1 if record.version == 1 else MAGIC_V2,
                record.body_crc,
                record.queue_id,
                record.flag,
                record.queue_offset,
                record.physical_offset,
                record.sys_flag,
                record.born_timestamp_ms,
            ),
            pack_host(record.born_host),
            _LONG.pack(record.store_timestamp_ms),
            pack_host(record.store_host),
            _TAIL.pack(
                record.reconsume_times, record.prepared_transaction_offset, len(record.body)
            ),
            record.body,
            topic_length.pack(len(topic)),
            topic,
            _SHORT.pack(len(record.properties_raw)),
            record.properties_raw,
        )
    )
