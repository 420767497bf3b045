"""Bodies as producers compress them: zlib, LZ4 frame or zstd, told by the record's ``sysFlag``.

A few bytes can claim to be gigabytes, so nothing is unpacked beyond a bound. What is cut short is
an error, never a shorter body. Bytes behind the compressed data are ignored, as Java ignores them;
frames of LZ4 and zstd that follow one another are one body.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol, cast

import lz4.frame
import zstandard
from zlib_ng import zlib_ng

from tiered.errors import DataError
from tiered.format.sysflag import (
    COMPRESSED,
    COMPRESSION_LZ4,
    COMPRESSION_MASK,
    COMPRESSION_ZLIB,
    COMPRESSION_ZSTD,
)

if TYPE_CHECKING:
    from collections.abc import Callable

BODY_BYTES_MAX: Final = 64 << 20
"""Largest body that is unpacked by default. A broker takes 4 MiB unless it is told otherwise."""
FRAMES_MAX: Final = 1000
"""A body of millions of empty frames would take hours."""
_ZSTD_STEP_BYTES: Final = 1024
"""zstd knows no bound on its output; this much input makes at most 32 MiB."""
_ZSTD_WINDOW_BYTES_MAX: Final = 128 << 20
_LZ4_MAGIC: Final = b"\x04\x22\x4d\x18"
_ZlibError: Final = cast("type[Exception]", zlib_ng.error)  # declared as an instance there
_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"


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

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        """At most ``max_length`` bytes."""
        ...


def decompress_body(body: bytes, sys_flag: int, *, bytes_max: int = BODY_BYTES_MAX) -> bytes:
    """The body as a client gets it.

    Args:
        body: As stored.
        sys_flag: Of the record; without the compressed bit ``body`` is returned as it is.
        bytes_max: Largest result that is made (inclusive).

    Raises:
        DataError: Damaged, cut short, larger than ``bytes_max``, or of an unknown kind.
    """
    if not sys_flag & COMPRESSED:
        return body
    kind = sys_flag & COMPRESSION_MASK
    try:
        if kind in {0, COMPRESSION_ZLIB}:
            return _unpack(zlib_ng.decompressobj, body, bytes_max, next_frame=None)
        if kind == COMPRESSION_LZ4:
            return _unpack(lz4.frame.LZ4FrameDecompressor, body, bytes_max, next_frame=_LZ4_MAGIC)
        if kind == COMPRESSION_ZSTD:
            return _unpack(_ZstdFrame, body, bytes_max, next_frame=_ZSTD_MAGIC)
    except (_ZlibError, zstandard.ZstdError, RuntimeError, MemoryError) as error:
        raise DataError(f"a compressed body cannot be unpacked: {error}") from error
    raise DataError(f"a body is compressed in an unknown way (sys_flag {sys_flag:#x})")


def _unpack(
    make: Callable[[], _Decompressor], data: bytes, bytes_max: int, *, next_frame: bytes | None
) -> bytes:
    """Unpack ``data``, and what follows it as long as that begins with ``next_frame``."""
    pieces: list[bytes] = []
    for _ in range(FRAMES_MAX):
        decompressor = make()
        pieces.append(decompressor.decompress(data, bytes_max + 1))
        bytes_max -= len(pieces[-1])
        if bytes_max < 0:
            raise DataError("a compressed body unpacks to more than is allowed")
        if not decompressor.eof:
            raise DataError("a compressed body is cut short")
        data = decompressor.unused_data or b""
        if next_frame is None or not data.startswith(next_frame):
            return b"".join(pieces)
    raise DataError(f"a compressed body has more than {FRAMES_MAX} frames")


class _ZstdFrame:
    """One zstd frame with a bound on its output."""

    def __init__(self) -> None:
        context = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES_MAX)
        self._frame = context.decompressobj()
        self.unused_data: bytes = b""

    @property
    def eof(self) -> bool:
        return self._frame.eof

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        """Feed small pieces until the frame ends or the output has grown over ``max_length``."""
        pieces: list[bytes] = []
        for start in range(0, len(data), _ZSTD_STEP_BYTES):
            pieces.append(self._frame.decompress(data[start : start + _ZSTD_STEP_BYTES]))
            max_length -= len(pieces[-1])
            if self._frame.eof:
                self.unused_data = self._frame.unused_data + data[start + _ZSTD_STEP_BYTES :]
                break
            if max_length <= 0:
                break
        return b"".join(pieces)


def compress_body(body: bytes, compression: int) -> tuple[bytes, int]:
    """Compress a body as a producer does.

    Args:
        body: Plain.
        compression: ``COMPRESSION_ZLIB``, ``COMPRESSION_LZ4`` or ``COMPRESSION_ZSTD``.

    Returns:
        The body to store, and the bits that its ``sysFlag`` gets.

    Raises:
        ValueError: Another number.
    """
    if compression == COMPRESSION_ZLIB:
        packed = zlib_ng.compress(body, 5)
    elif compression == COMPRESSION_LZ4:
        packed = lz4.frame.compress(body)
    elif compression == COMPRESSION_ZSTD:
        packed = zstandard.ZstdCompressor(level=3).compress(body)
    else:
        raise ValueError(f"no compression has the number {compression:#x}")
    return packed, COMPRESSED | compression
