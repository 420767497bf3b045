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

Flags: bit 0 compressed, 1 ordered, 2 to 3 source (1 Kafka, 2 MQTT, 3 JoyQueue), 4 to 6 codec (1 Zip, 2 ZLIB, 3 Snappy),
7 IPv4, 8 to 11 version, 12 batch. A batch's body, once unpacked, is a row of messages: size 4 (itself counted), priority 1,
flag 2, then behind their sizes body 4, business id 1, attributes 2. Of a batch that a Kafka client sent the body is the
records of Kafka's batch as they came; its extension has 17 bytes, the numbers little-endian: magic 1, timestamp 8,
attributes 8, of which the lowest three bits are Kafka's codec.

The sizes of one byte are taken as unsigned: the broker's parser takes them as signed, and fails above 127.
"""

from __future__ import annotations

import re
from base64 import b64encode
from io import BytesIO
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

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
SIZE_MAX: Final = 2**31 - 1
HEAD_BYTES: Final = HEADER.itemsize
UNPACKED_BYTES_MAX: Final = 256 << 20
"""Of a body. Brokers take messages of 4 MiB unless told otherwise, as they are stored."""
COMPRESSED: Final = 1
ORDERED: Final = 2
IPV4: Final = 1 << 7
BATCH: Final = 1 << 12
CODECS: Final = {2: Codec.ZLIB, 3: Codec.SNAPPY_FRAMED}
CODEC_NAMES: Final = {0: "none", 1: "Zip", 2: "ZLIB", 3: "Snappy"}
_ZIP: Final = 1
_KAFKA: Final = 1
_MAGIC_AT: Final = 18
BODY_AT: Final = 65
_BYTES_MIN: Final = 73
"""All fields empty."""
_SIZE: Final = Struct(">i")
_INNER: Final = Struct(">ibhi")
_KAFKA_EXTENSION: Final = Struct("<bQQ")
_TAIL: Final = (1, 2, 4, 1)
"""Bytes of the sizes of what follows a body: business id, attributes, extension, app."""
_SEARCH_BYTES: Final = 4096
_SEARCH_BYTES_MAX: Final = 1 << 20
"""How much is looked at once for the next message: it is near as a rule."""
_SIZES: Final = {1: "u1", 2: ">i2", 4: ">i4"}


class MessageError(ValueError):
    """Bytes that are no message, or one whose parts do not fill it."""


@dataclass(slots=True, eq=False)
class MessageBlock:
    """Messages in a row: one element a message in each array."""

    buffer: Buffer
    positions: Longs
    headers: npt.NDArray[np.void]  # of ``HEADER``
    is_whole: Flags  # its parts fill it
    is_sound: Flags  # and the body matches its checksum
    end: int  # where the walk stopped: one past the last message

    def __len__(self) -> int:
        return len(self.positions)

    def some(self, chosen: slice) -> MessageBlock:
        """These messages of the block, over the same bytes; it ends behind the last of them."""
        positions, headers = self.positions[chosen], self.headers[chosen]
        end = int(positions[-1] + headers["size"][-1]) if len(positions) else self.end
        whole, sound = self.is_whole[chosen], self.is_sound[chosen]
        return MessageBlock(self.buffer, positions, headers, whole, sound, end)

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
    whole = _are_whole(buffer, headers["body_size"], ends, positions + headers["size"])
    slices = map(slice, starts.tolist(), np.where(whole, ends, starts).tolist())
    computed = np.fromiter(map(zlib_ng.crc32, map(view.__getitem__, slices)), np.int64, len(found))
    sound = whole & (computed == headers["crc"])
    return MessageBlock(buffer, positions, headers, whole, sound, position)


def _are_whole(buffer: Buffer, body_sizes: npt.NDArray[np.int32], at: Longs, ends: Longs) -> Flags:
    """Whether the parts behind bodies, which end at ``at``, end where their messages do."""
    whole: Flags = body_sizes >= 0
    for width in _TAIL:
        whole &= at + width <= ends
        sizes = bytes_at(buffer, _SIZES[width])[np.where(whole, at, 0)].astype(np.int64)
        whole &= sizes >= 0
        at = np.where(whole, at + width + sizes, ends)
    found: Flags = whole & (at == ends)
    return found


def walk_over_damage(
    buffer: Buffer, start: int, end: int, *, room: int = 0
) -> tuple[MessageBlock, list[tuple[int, int]]]:
    """As ``walk_messages``, and on behind bytes that are no message; those, as ranges ``[from, to)`` of the buffer.

    It stops at a message that goes on in the ``room`` bytes behind ``end``, or where no sound one follows. All are whole,
    not all sound: a message whose parts do not fill it may be wrong in its size, so the next one is searched.
    """
    blocks, lost, at = list[MessageBlock](), list[tuple[int, int]](), start
    while True:
        block = walk_messages(buffer, at, end, size_max=SIZE_MAX)
        if not block.is_whole.all():
            first = int(np.argmin(block.is_whole))
            at, block = int(block.positions[first]), block.some(slice(first))
            is_cut = False
        else:
            at = block.end
            is_cut = room > 0 and _is_cut(buffer, at, end, room)
        blocks.append(block)
        found = None if is_cut else find_message(buffer, at + 1, end)
        if found is None:
            break
        lost.append((at, found))
        at = found
    if len(blocks) == 1:
        block.end = at
        return block, lost
    columns = [
        np.concatenate(column)
        for column in zip(
            *((b.positions, b.headers, b.is_whole, b.is_sound) for b in blocks), strict=True
        )
    ]
    return MessageBlock(buffer, columns[0], columns[1], columns[2], columns[3], at), lost


def _is_cut(buffer: Buffer, at: int, end: int, room: int) -> bool:
    """Whether the bytes end within what may be a message of so many bytes more at most."""
    view = memoryview(buffer)
    if at + _BYTES_MIN > end:
        return True
    magic = int.from_bytes(view[at + _MAGIC_AT : at + _MAGIC_AT + 2], "big")
    return magic == MAGIC and end - at < int(_SIZE.unpack_from(view, at)[0]) <= end - at + room


def find_message(buffer: Buffer, start: int, end: int) -> int | None:
    """Where the first sound message begins at or behind ``start`` that lies wholly below ``end``."""
    magics, all_sizes, last = bytes_at(buffer, ">i2"), bytes_at(buffer, ">i4"), end - _BYTES_MIN + 1
    step = _SEARCH_BYTES
    while start < last:
        stop = min(start + step, last)
        places = start + np.flatnonzero(magics[start + _MAGIC_AT : stop + _MAGIC_AT] == MAGIC)
        sizes = all_sizes[places].astype(np.int64)
        fits = (sizes >= _BYTES_MIN) & (places + sizes <= end)
        for place, size in zip(places[fits].tolist(), sizes[fits].tolist(), strict=True):
            if walk_messages(buffer, place, place + size, size_max=size).is_sound.all():
                return int(place)
        start, step = stop, min(2 * step, _SEARCH_BYTES_MAX)
    return None


def messages_at(buffer: Buffer, positions: Longs) -> MessageBlock:
    """Sound messages that begin at these places."""
    headers = bytes_at(buffer, f"V{BODY_AT}")[positions].view(HEADER)
    sound = np.ones(len(positions), np.bool_)
    return MessageBlock(buffer, positions, headers, sound, sound, 0)


@dataclass(frozen=True, slots=True)
class JournalMessage:
    """One message, or one of a batch. Texts are UTF-8, and what is not is kept by surrogate escapes."""

    index: int
    priority: int
    flag: int
    body: bytes  # unpacked
    business_id: str
    attributes_raw: bytes  # text of Java's properties
    extension: bytes
    app: str


def messages_of(block: MessageBlock, number: int, *, bytes_max: int) -> list[JournalMessage]:
    """What one message of a block holds: itself, or those of its batch. MessageError: it is malformed."""
    head = block.headers[number]
    start = int(block.positions[number]) + BODY_AT - _SIZE.size
    raw = memoryview(block.buffer)[start : start - BODY_AT + _SIZE.size + int(head["size"])]
    stored, business_id, attributes, extension, app = _parts(raw, (4, *_TAIL))
    flags, index, app_name = int(head["flags"]), int(head["index"]), _text(app)
    if flags & BATCH and source_of(flags) == _KAFKA:
        return _kafka_records(
            head, stored, attributes, extension, bytes_max=bytes_max, app=app_name
        )
    body = _unpacked(stored, flags, bytes_max)
    if not flags & BATCH:
        priority, flag = int(head["priority"]), int(head["flag"])
        return [
            JournalMessage(
                index, priority, flag, body, _text(business_id), attributes, extension, app_name
            )
        ]
    found, at = list[JournalMessage](), 0
    for place in range(int(head["flag"])):
        if at + _INNER.size > len(body):
            raise MessageError(f"a batch of {int(head['flag'])} messages has {place}")
        size, priority, flag, _ = _INNER.unpack_from(body, at)
        inner, key, attributes = _parts(memoryview(body)[at + 7 : at + max(size, 7)], (4, 1, 2))
        found.append(
            JournalMessage(
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
    kind = codec_of(flags)
    if kind == _ZIP:
        return _unzipped(stored, bytes_max)
    if kind not in CODECS:
        raise MessageError(
            f"a body has codec {kind}, and readers are known for Zip, ZLIB and Snappy only, not for"
            " LZ4 or others of JMQ's own"
        )
    try:
        return unpack(CODECS[kind], stored, bytes_max)
    except UnpackError as error:
        raise MessageError(f"a body {error}") from error


def _unzipped(stored: bytes, bytes_max: int) -> bytes:
    """The first entry of an archive, which is how the Zip codec has it. Its checksum is compared."""
    import zipfile  # noqa: PLC0415 (clients of today have other codecs)
    import zlib  # noqa: PLC0415

    failures = (zipfile.BadZipFile, zlib.error, OSError, EOFError, LookupError, ValueError)
    try:
        with zipfile.ZipFile(BytesIO(stored)) as archive:
            entry = archive.infolist()[0]
            if entry.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
                raise MessageError(f"a body is in an archive of kind {entry.compress_type}")
            with archive.open(entry) as stream:
                body = stream.read(bytes_max + 1)
    except (*failures, RuntimeError) as error:
        raise MessageError(f"a body cannot be unpacked: {error}") from error
    if len(body) > bytes_max:
        raise MessageError("a body unpacks to more than is allowed")
    return body


def _kafka_records(
    head: np.void, stored: bytes, attributes: bytes, extension: bytes, *, app: str, bytes_max: int
) -> list[JournalMessage]:
    """The records of a batch that a Kafka client sent: the value is the body, the key the business id."""
    from tiered.format import kafka_batch as kafka  # noqa: PLC0415 (few stores have any)

    if len(extension) != _KAFKA_EXTENSION.size:
        raise MessageError("a batch of a Kafka client without what its extension has to say")
    bits = _KAFKA_EXTENSION.unpack(extension)[2]
    batch = np.zeros(1, kafka.HEADER)
    batch["base_offset"], batch["count"] = head["index"], head["flag"]
    batch["attributes"], batch["last_offset_delta"] = bits & kafka.CODEC_MASK, head["flag"] - 1
    sizes = np.array([kafka.HEADER_BYTES + len(stored)])
    block = kafka.BatchBlock(
        batch.tobytes() + stored,
        np.zeros(1, np.int64),
        sizes,
        batch,
        np.zeros(1, np.uint8),
        int(sizes[0]),
        kafka.BatchStop.SHORT,
    )
    records = kafka.decode_records(block, [0], bytes_max=bytes_max)
    if records.faults:
        raise MessageError(f"a batch of a Kafka client: {records.faults[0]}")
    priority = int(head["priority"])
    return [
        JournalMessage(
            int(offset),
            priority,
            0,
            records.value(n) or b"",
            _text(records.key(n) or b""),
            attributes,
            extension,
            app,
        )
        for n, offset in enumerate(records.offsets.tolist())
    ]


def _parts(raw: memoryview, sizes: tuple[int, ...]) -> list[bytes]:
    """Parts that fill ``raw``, each behind its size in so many bytes."""
    found, at = list[bytes](), 0
    for width in sizes:
        size = int.from_bytes(raw[at : at + width], "big", signed=width > 1)
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


# -- what is shown of a message ----------------------------------------------------------------------


def codec_of(flags: int) -> int:
    """Number of the codec; it means something where a body is compressed."""
    return flags >> 4 & 7


def source_of(flags: int) -> int:
    """Which kind of client sent it."""
    return flags >> 2 & 3


def message_json(topic: str, head: np.void, message: JournalMessage) -> dict[str, Any]:
    """One message as ``cat`` shows it. ``head`` is the header of the stored one, which a whole batch shares."""
    flags = int(head["flags"])
    client_time, is_batch = int(head["client_time"]), bool(flags & BATCH)
    client = bytes(head["client"])
    kind = codec_of(flags) if flags & COMPRESSED else 0
    return {
        "topic": topic,
        "partition": int(head["partition"]),
        "index": message.index,
        "term": int(head["term"]),
        "batch": is_batch,
        "batch_count": int(head["flag"]) if is_batch else 1,
        "compression": CODEC_NAMES.get(kind, str(kind)),
        "source": source_of(flags),
        "ordered": bool(flags & ORDERED),
        "priority": message.priority,
        "flag": message.flag,
        "client_time_ms": client_time,
        "store_time_ms": client_time + int(head["store_delta"]),
        "client_ip_hex": (client[:6] if flags & IPV4 else client).hex(),
        "app": message.app,
        "business_id": message.business_id or None,
        "attributes": parse_attributes(message.attributes_raw) or None,
        "extension_base64": b64encode(message.extension).decode() or None,
        "stored_length": int(head["size"]),
        "body_base64": b64encode(message.body).decode(),
    }


_LINE: Final = re.compile(r"(?:\\(?:\r\n|.)|[^\\\r\n])+", re.DOTALL)
_KEY: Final = re.compile(r"((?:\\.|[^\\=: \t\f])*)[ \t\f]*[=:]?[ \t\f]*", re.DOTALL)
_ESCAPE: Final = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(\r\n?|\n)[ \t\f]*|(.))", re.DOTALL)
_CONTROLS: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def parse_attributes(raw: bytes) -> dict[str, str]:
    """Attributes by name, from the text of Java's properties, as Java reads it; of a name the last one counts."""
    found = {}
    for line in _LINE.findall(_text(raw)):
        text = line.lstrip(" \t\f")
        if text and text[0] not in "#!" and (key := _KEY.match(text)):
            found[_unescaped(key[1])] = _unescaped(text[key.end() :])
    return found


def _unescaped(text: str) -> str:
    if "\\" not in text:
        return text
    plain = _ESCAPE.sub(_meant, text)
    return plain.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def _meant(escape: re.Match[str]) -> str:
    """What an escape stands for; one at the end of a line goes on with the next."""
    if escape[1]:
        return chr(int(escape[1], 16))
    return _CONTROLS.get(escape[3], escape[3]) if escape[3] else ""
