"""Unpacking what producers compressed, with a bound, and packing it: gzip, zlib, LZ4, zstd, and forms of Snappy.

A few bytes can claim to be gigabytes, so nothing is unpacked beyond a bound. What is cut short is an error, never a
shorter answer. Bytes behind the compressed data are ignored, as Java ignores them; frames that follow one another are one.

Snappy itself compresses one block at a time, and says at its beginning how large it gets. Around the blocks stands

- nothing (raw): one block;
- xerial's stream, which Kafka's clients write: ``82 53 4e 41 50 50 59 00``, two 4-byte versions, then blocks, each with its
  size before it in 4 bytes, big-endian. A magic where a size should be begins another such stream;
- the framing format, which JoyQueue's write: chunks of 1 byte kind and 3 bytes size, little-endian. Kind ff: begins a
  stream; 00: a masked CRC-32C and a block; 01: a masked CRC-32C and plain bytes; 80 to fe: passed over.
"""

from __future__ import annotations

from enum import Enum
from struct import Struct
from typing import TYPE_CHECKING, Final, Protocol, cast

import lz4.frame
import zstandard
from zlib_ng import zlib_ng

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Buffer


class Codec(Enum):
    """How bytes are compressed."""

    GZIP = "gzip"
    ZLIB = "zlib"
    LZ4 = "lz4"  # frames
    ZSTD = "zstd"
    SNAPPY = "snappy"  # xerial's stream, or one raw block where that does not begin
    SNAPPY_FRAMED = "snappy-framed"


class UnpackError(ValueError):
    """Damaged, cut short, or larger than is allowed."""


FRAMES_MAX: Final = 1000
"""Millions of empty frames would take hours."""
_LZ4_FIRST_BYTES: Final = 1 << 20
_ZSTD_STEP_BYTES: Final = 1024
"""zstd knows no bound on its output; this much input makes at most 32 MiB."""
_ZSTD_WINDOW_BYTES_MAX: Final = 128 << 20
_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_LZ4_MAGIC: Final = b"\x04\x22\x4d\x18"
_GZIP_MAGIC: Final = b"\x1f\x8b"
_GZIP_WINDOW: Final = 31  # a window of 32 KiB, and gzip's head around it
_ZlibError: Final = cast("type[Exception]", zlib_ng.error)  # declared as an instance there
_XERIAL_MAGIC: Final = b"\x82SNAPPY\x00"
_XERIAL_HEAD: Final = _XERIAL_MAGIC + bytes((0, 0, 0, 1, 0, 0, 0, 1))
_XERIAL_HEAD_BYTES: Final = len(_XERIAL_HEAD)
_XERIAL_BLOCK_BYTES: Final = 32 << 10
_SIZE: Final = Struct(">i")
_CRC: Final = Struct("<I")
_CRC_MASK_DELTA: Final = 0xA282_EAD8
_PLAIN_CHUNK, _SKIPPED_FROM, _STREAM_CHUNK = 1, 0x80, 0xFF
_PREAMBLE_BYTES_MAX: Final = 5


class _Decompressor(Protocol):
    """What zlib and LZ4 have in common."""

    @property
    def eof(self) -> bool:
        """The end of the stream or frame was seen."""
        ...

    @property
    def unused_data(self) -> bytes | None:
        """What follows it."""
        ...

    def decompress(self, data: Buffer, max_length: int, /) -> bytes:
        """At most ``max_length`` bytes."""
        ...


def unpack(codec: Codec, data: Buffer, bytes_max: int) -> bytes:
    """What was compressed, of at most ``bytes_max`` bytes. UnpackError: it cannot be had."""
    try:
        match codec:
            case Codec.GZIP:
                return _frames(_gzip_member, data, bytes_max, next_frame=_GZIP_MAGIC)
            case Codec.ZLIB:
                return _frames(zlib_ng.decompressobj, data, bytes_max, next_frame=None)
            case Codec.LZ4:
                return _frames(_Lz4Frame, data, bytes_max, next_frame=_LZ4_MAGIC)
            case Codec.ZSTD:
                return _frames(_ZstdFrame, data, bytes_max, next_frame=_ZSTD_MAGIC)
            case Codec.SNAPPY:
                return _joined(_xerial_blocks(memoryview(data)), bytes_max)
            case Codec.SNAPPY_FRAMED:
                return _unframed(memoryview(data), bytes_max)
    except (
        _ZlibError,
        zstandard.ZstdError,
        RuntimeError,
        MemoryError,
    ) as error:
        raise UnpackError(f"cannot be unpacked: {error}") from error


def pack(codec: Codec, data: bytes) -> bytes:
    """Compress as producers do, in what their own readers take; the same bytes of the same data, with the same libraries.

    Raises:
        ValueError: Nothing is written with this codec.
    """
    match codec:
        case Codec.GZIP:
            packer = zlib_ng.compressobj(wbits=_GZIP_WINDOW)
            return packer.compress(data) + packer.flush()
        case Codec.LZ4:  # Kafka's reader takes no linked blocks
            return bytes(lz4.frame.compress(data, block_linked=False, store_size=False))
        case Codec.ZSTD:
            return zstandard.ZstdCompressor().compress(data)
        case Codec.SNAPPY:
            import cramjam  # noqa: PLC0415 (RocketMQ's bodies do without)

            steps = range(0, len(data), _XERIAL_BLOCK_BYTES)
            some = (data[at : at + _XERIAL_BLOCK_BYTES] for at in steps)
            blocks = (bytes(cramjam.snappy.compress_raw(block)) for block in some)
            return _XERIAL_HEAD + b"".join(_SIZE.pack(len(one)) + one for one in blocks)
        case _:
            raise ValueError(f"nothing is written with {codec}")


def _gzip_member() -> _Decompressor:
    return zlib_ng.decompressobj(_GZIP_WINDOW)


def _frames(
    make: Callable[[], _Decompressor], data: Buffer, bytes_max: int, *, next_frame: bytes | None
) -> bytes:
    """Unpack ``data``, and what follows it as long as that begins with ``next_frame``."""
    chunks: list[bytes] = []
    for _ in range(FRAMES_MAX):
        decompressor = make()
        chunks.append(decompressor.decompress(data, bytes_max + 1))
        bytes_max -= len(chunks[-1])
        if bytes_max < 0:
            raise UnpackError("unpacks to more than is allowed")
        if not decompressor.eof:
            raise UnpackError("is cut short")
        data = rest = decompressor.unused_data or b""
        if next_frame is None or not rest.startswith(next_frame):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)
    raise UnpackError(f"has more than {FRAMES_MAX} frames")


class _Lz4Frame:
    """One LZ4 frame. The library takes as much memory as it may return, which costs more than small frames themselves."""

    def __init__(self) -> None:
        self._frame = lz4.frame.LZ4FrameDecompressor()

    @property
    def eof(self) -> bool:
        return bool(self._frame.eof)

    @property
    def unused_data(self) -> bytes | None:
        found: bytes | None = self._frame.unused_data
        return found

    def decompress(self, data: Buffer, max_length: int, /) -> bytes:
        found: bytes = self._frame.decompress(data, min(max_length, _LZ4_FIRST_BYTES))
        if self._frame.eof or len(found) < _LZ4_FIRST_BYTES or max_length == _LZ4_FIRST_BYTES:
            return found
        more: bytes = self._frame.decompress(b"", max_length - _LZ4_FIRST_BYTES)
        return found + more


class _ZstdFrame:
    """One zstd frame with a bound on its output."""

    def __init__(self) -> None:
        context = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES_MAX)
        self._frame = context.decompressobj()
        self.unused_data: bytes = b""

    @property
    def eof(self) -> bool:
        return self._frame.eof

    def decompress(self, data: Buffer, max_length: int, /) -> bytes:
        """Feed small chunks until the frame ends or the output has grown over ``max_length``."""
        view, chunks = memoryview(data), list[bytes]()
        for start in range(0, len(view), _ZSTD_STEP_BYTES):
            chunks.append(self._frame.decompress(view[start : start + _ZSTD_STEP_BYTES]))
            max_length -= len(chunks[-1])
            if self._frame.eof:
                self.unused_data = self._frame.unused_data + view[start + _ZSTD_STEP_BYTES :]
                break
            if max_length <= 0:
                break
        return b"".join(chunks)


# -- Snappy ----------------------------------------------------------------------------------------


def _joined(blocks: Iterator[memoryview], bytes_max: int) -> bytes:
    """Unpack the blocks one after another."""
    chunks: list[bytes] = []
    for block in blocks:
        chunks.append(_block(block, bytes_max))
        bytes_max -= len(chunks[-1])
    return b"".join(chunks)


def _block(block: memoryview, bytes_max: int) -> bytes:
    """One raw block; how large it gets stands at its beginning, 7 bits a byte."""
    size = 0
    for at, byte in enumerate(block[:_PREAMBLE_BYTES_MAX]):
        size |= (byte & 0x7F) << (7 * at)
        if byte < 0x80:  # noqa: PLR2004 (the bit that says that more follows)
            break
    else:
        raise UnpackError("has a Snappy block without a size")
    if size > bytes_max:
        raise UnpackError("unpacks to more than is allowed")
    import cramjam  # noqa: PLC0415 (RocketMQ's bodies do without)

    try:
        return bytes(cramjam.snappy.decompress_raw(block)) if size else b""
    except cramjam.DecompressionError as error:
        raise UnpackError(f"cannot be unpacked: {error}") from error


def _begins_stream(data: memoryview) -> bool:
    return bytes(data[: len(_XERIAL_MAGIC)]) == _XERIAL_MAGIC


def _xerial_blocks(data: memoryview) -> Iterator[memoryview]:
    """The blocks of xerial's stream; without its head the data are one block."""
    if not _begins_stream(data):
        yield data
        return
    at = 0
    while at < len(data):
        if _begins_stream(data[at:]):
            at += _XERIAL_HEAD_BYTES
            continue
        size = _SIZE.unpack_from(data, at)[0] if at + _SIZE.size <= len(data) else -1
        at += _SIZE.size
        if size < 0 or at + size > len(data):
            raise UnpackError("is cut short")
        yield data[at : at + size]
        at += size


def _unframed(data: memoryview, bytes_max: int) -> bytes:
    """Unpack the framing format, checksums compared."""
    chunks, at = list[bytes](), 0
    while at < len(data):
        head = data[at : at + 4]
        kind, size = head[0], int.from_bytes(head[1:], "little")
        chunk = data[at + 4 : at + 4 + size]
        if len(head) < 4 or len(chunk) < size:  # noqa: PLR2004 (kind and size, as the table has it)
            raise UnpackError("is cut short")
        at += 4 + size
        if kind <= _PLAIN_CHUNK:
            chunks.append(_checked_chunk(kind, chunk, bytes_max))
            bytes_max -= len(chunks[-1])
        elif kind < _SKIPPED_FROM or (kind == _STREAM_CHUNK and bytes(chunk) != b"sNaPpY"):
            raise UnpackError(f"has a Snappy chunk of kind {kind:#x}")
    return b"".join(chunks)


def _checked_chunk(kind: int, chunk: memoryview, bytes_max: int) -> bytes:
    if len(chunk) < _CRC.size:
        raise UnpackError("is cut short")
    plain, stored = chunk[_CRC.size :], _CRC.unpack_from(chunk)[0]
    if kind == _PLAIN_CHUNK and len(plain) > bytes_max:
        raise UnpackError("unpacks to more than is allowed")
    import google_crc32c  # noqa: PLC0415 (RocketMQ's bodies do without)

    data = bytes(plain) if kind == _PLAIN_CHUNK else _block(plain, bytes_max)
    crc = google_crc32c.value(data)
    if ((crc >> 15 | crc << 17) + _CRC_MASK_DELTA) & 0xFFFF_FFFF != stored:
        raise UnpackError("has a Snappy chunk that fails its checksum")
    return data
