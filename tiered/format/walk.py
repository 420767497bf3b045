"""Where records begin: the chain of sizes in a piece of the commit log."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from tiered.format.record import (
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    RECORD_BYTES_MIN,
    SIZE_AND_MAGIC,
)


class Stop(Enum):
    """Why a walk ended."""

    SHORT = "short"
    """The buffer ended inside a record (or just behind one): more bytes are needed."""
    BLANK = "blank"
    """The rest of the file is blank: go on with the next file."""
    EMPTY = "empty"
    """Zero size and magic: nothing has been written here."""
    FAULT = "fault"
    """A magic that is none, or a size that cannot be."""


@dataclass(frozen=True, slots=True)
class Walk:
    """A chain of records.

    Attributes:
        positions: int64[n], where each record begins in the buffer.
        sizes: int32[n], bytes of each record.
        end: Where the walk stopped: one past the last record.
        stop: Why.
    """

    positions: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int32]
    end: int
    stop: Stop


def walk_records(buffer: Buffer, start: int, end: int, *, size_max: int) -> Walk:
    """Follow records from ``start`` by their sizes; magics and sizes are looked at, nothing else.

    A tight loop of one ``struct`` call per record, about 0.2 us each: where a record begins is
    known only once the one before has been read, and every vectorised search for magics that was
    tried cost more.

    Args:
        buffer: Holds the records.
        start: Where a record begins.
        end: One past the last byte to look at.
        size_max: Bytes of the largest record that is believed.

    Returns:
        The records that lie wholly in ``[start, end)``, and why the walk ended.
    """
    positions: list[int] = []
    append, unpack = positions.append, SIZE_AND_MAGIC.unpack_from
    position, last, stop = start, end - SIZE_AND_MAGIC.size, Stop.SHORT
    while position <= last:
        size, magic = unpack(buffer, position)
        if (magic != MAGIC_V1 and magic != MAGIC_V2) or not RECORD_BYTES_MIN <= size <= size_max:  # noqa: PLR1714 (a set costs time here)
            stop = _stop_at(size, magic)
            break
        if position + size > end:
            break
        append(position)
        position += size
    found = np.array(positions, np.int64)
    sizes = np.diff(found, append=position).astype(np.int32)
    return Walk(found, sizes, position, stop)


def _stop_at(size: int, magic: int) -> Stop:
    """Why a walk ends at a header that is no record's."""
    if magic == MAGIC_BLANK:
        return Stop.BLANK
    return Stop.EMPTY if size == 0 and magic == 0 else Stop.FAULT
