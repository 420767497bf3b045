"""Messages of JoyQueue (JMQ 4), as journals of its partition groups have them: headers as columns, and one message's fields.

Big-endian. Files of a journal begin with 128 bytes of their own; messages follow one another, and none spans two files:

====== ===== ================= ===================================================================
offset bytes field             notes
====== ===== ================= ===================================================================
0      4     size              of the whole message
4      2     partition         -1 in a transaction that is not committed
6      8     index             in the partition; of the first message in a batch
14     4     term              of the leader that wrote it
18     2     magic             0x1234
20     2     flags             below
22     1     priority
23     16    client            port 2, little-endian; address 4; zeros
39     8     client_time       ms
47     4     store_delta       store time less client time, ms: wraps after 24.8 days
51     8     crc               CRC-32 of the body as stored, and of nothing else
59     2     flag              in a batch the number of messages, else the user's
61     ..    body              size 4; then business id 1, attributes 2, extension 4, app 1
====== ===== ================= ===================================================================

Flags: bit 0 compressed, 1 ordered, 2 to 3 source (3 JoyQueue), 4 to 6 codec (2 ZLIB, 3 Snappy), 7 IPv4, 8 to 11 version,
12 batch. A batch's body, once unpacked, is a row of messages: size 4 (itself counted), priority 1, flag 2, then behind their
sizes body 4, business id 1, attributes 2.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
from zlib_ng import zlib_ng

from backends.lazy_dataclass import dataclass
from tiered.format.block import bytes_at
from tiered.format.unpacking import Codec, UnpackError, unpack

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from tiered.format.kafka_batch import Flags, Longs

HEADER: Final = np.dtype(
    [
        ("size", ">i4"),
        ("partition", ">i2"),
        ("index", ">i8"),
        ("term", ">i4"),
        ("magic", ">i2"),
        ("flags", ">i2"),
        ("priority", "i1"),
        ("client", "V16"),
        ("client_time", ">i8"),
        ("store_delta", ">i4"),
        ("crc", ">i8"),
        ("flag", ">i2"),
        ("body_size", ">i4"),
    ]
)
FILE_HEADER_BYTES: Final = 128
MAGIC: Final = 0x1234
COMPRESSED: Final = 1
BATCH: Final = 1 << 12
CODECS: Final = {2: Codec.ZLIB, 3: Codec.SNAPPY_FRAMED}
_MAGIC_AT: Final = 18
BODY_AT: Final = 65
_BYTES_MIN: Final = 73
"""All fields empty."""
_SIZE: Final = Struct(">i")
_INNER: Final = Struct(">ibhi")
_TAIL: Final = (1, 2, 4, 1)
"""Bytes of the sizes of what follows a body: business id, attributes, extension, app."""


class MessageError(ValueError):
    """Bytes that are no message, or one whose parts do not fill it."""


@dataclass(slots=True, eq=False)
class MessageBlock:
    """Messages in a row: one element a message in each array."""

    buffer: Buffer
    positions: Longs
    headers: npt.NDArray[np.void]  # of ``HEADER``
    is_sound: Flags  # the body matches its checksum
    end: int  # where the walk stopped: one past the last message

    def __len__(self) -> int:
        return len(self.positions)

    def counts(self) -> Longs:
        """How many indexes each takes: those of a batch, else 1."""
        is_batch = self.headers["flags"].astype(np.int64) & BATCH != 0
        found: Longs = np.where(is_batch, self.headers["flag"], 1).astype(np.int64)
        return found

    def store_times_ms(self) -> Longs:
        """As the broker has them: wrong where the clocks were more than 24.8 days apart."""
        found: Longs = self.headers["client_time"].astype(np.int64) + self.headers["store_delta"]
        return found


def walk_messages(buffer: Buffer, start: int, end: int, *, size_max: int) -> MessageBlock:
    """Follow messages from ``start`` by their sizes, those wholly in ``[start, end)``, up to what is none; CRCs compared."""
    view, found, position = memoryview(buffer), list[int](), start
    while position + _BYTES_MIN <= end:
        size = _SIZE.unpack_from(view, position)[0]
        magic = int.from_bytes(view[position + _MAGIC_AT : position + _MAGIC_AT + 2], "big")
        if magic != MAGIC or not _BYTES_MIN <= size <= min(size_max, end - position):
            break
        found.append(position)
        position += size
    positions = np.array(found, np.int64)
    headers = bytes_at(buffer, f"V{BODY_AT}")[positions].view(HEADER)
    starts = positions + BODY_AT
    ends = starts + headers["body_size"]
    fits = (headers["body_size"] >= 0) & (ends <= positions + headers["size"])
    slices = map(slice, starts.tolist(), np.where(fits, ends, starts).tolist())
    computed = np.fromiter(map(zlib_ng.crc32, map(view.__getitem__, slices)), np.int64, len(found))
    return MessageBlock(buffer, positions, headers, fits & (computed == headers["crc"]), position)


@dataclass(frozen=True, slots=True)
class JmqMessage:
    """One message, or one of a batch. Texts are UTF-8, and what is not is kept by surrogate escapes."""

    index: int
    priority: int
    flag: int
    body: bytes  # unpacked
    business_id: str
    attributes_raw: bytes  # text of Java's properties
    extension: bytes
    app: str


def messages_of(block: MessageBlock, number: int, *, bytes_max: int) -> list[JmqMessage]:
    """What one message of a block holds: itself, or those of its batch. MessageError: it is malformed."""
    head = block.headers[number]
    start = int(block.positions[number]) + BODY_AT - _SIZE.size
    raw = memoryview(block.buffer)[start : start - BODY_AT + _SIZE.size + int(head["size"])]
    stored, business_id, attributes, extension, app = _parts(raw, (4, *_TAIL))
    flags, index, app_name = int(head["flags"]), int(head["index"]), _text(app)
    body = _unpacked(stored, flags, bytes_max)
    if not flags & BATCH:
        priority, flag = int(head["priority"]), int(head["flag"])
        return [
            JmqMessage(
                index, priority, flag, body, _text(business_id), attributes, extension, app_name
            )
        ]
    found, at = list[JmqMessage](), 0
    for place in range(int(head["flag"])):
        if at + _INNER.size > len(body):
            raise MessageError(f"a batch of {int(head['flag'])} messages has {place}")
        size, priority, flag, _ = _INNER.unpack_from(body, at)
        inner, key, attributes = _parts(memoryview(body)[at + 7 : at + max(size, 7)], (4, 1, 2))
        found.append(
            JmqMessage(
                index + place, priority, flag, inner, _text(key), attributes, extension, app_name
            )
        )
        at += size
    if at != len(body):
        raise MessageError("a batch has bytes behind its messages")
    return found


def _unpacked(stored: bytes, flags: int, bytes_max: int) -> bytes:
    if not flags & COMPRESSED:
        return stored
    kind = flags >> 4 & 7
    if kind not in CODECS:
        raise MessageError(f"a body is compressed in an unknown way ({kind})")
    try:
        return unpack(CODECS[kind], stored, bytes_max)
    except UnpackError as error:
        raise MessageError(f"a body {error}") from error


def _parts(raw: memoryview, sizes: tuple[int, ...]) -> list[bytes]:
    """Parts that fill ``raw``, each behind its size in so many bytes."""
    found, at = list[bytes](), 0
    for width in sizes:
        size = int.from_bytes(raw[at : at + width], "big", signed=True)
        at += width
        if size < 0 or at + size > len(raw):
            raise MessageError("the parts of a message do not fit into it")
        found.append(bytes(raw[at : at + size]))
        at += size
    if at != len(raw):
        raise MessageError("the parts of a message do not fill it")
    return found


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
