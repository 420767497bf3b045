"""Whose format a stored record has: the tag code of its item says so.

An item of a queue that came from RocketMQ has RocketMQ's tag code: 32 bits, a time in milliseconds, or the address of an
extension, whose highest bit is set. None of these has one of the kinds below in its highest byte, so that an item of other
stores says by itself how its record is to be read, and what a reader has to know before it looks at the record:

===== ==== ==============================================================
bit   bits field
===== ==== ==============================================================
56    8    kind: 0x4B Kafka, 0x4A JoyQueue
40    16   flags: those of ``Mark``
0     32   epoch: Kafka's leader epoch, JoyQueue's term; all ones: unknown
===== ==== ==============================================================

The tag code of a hole is its reason, whatever store it came from.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Final

import numpy as np
import numpy.typing as npt

Longs = npt.NDArray[np.int64]


class RecordKind(IntEnum):
    """Which store a record came from. Never renumbered."""

    ROCKETMQ = 0
    JMQ = 0x4A
    """A message of JoyQueue, or a client's batch of them."""
    KAFKA = 0x4B
    """A batch of records, of magic 2."""


class Mark(IntFlag):
    """What an item says of its record; Kafka's. Never renumbered."""

    TRANSACTIONAL = 1
    CONTROL = 2
    """Of the node's own, as the end of a transaction: nothing for readers."""


_KIND_SHIFT: Final = 56
_FLAGS_SHIFT: Final = 40
_EPOCH_MASK: Final = 0xFFFF_FFFF
_KINDS: Final = {int(kind): kind for kind in RecordKind}


def tag_codes(kind: RecordKind, epochs: Longs, flags: Longs | int = 0) -> Longs:
    """Tag codes of records of a store that is not RocketMQ's: int64[n] each.

    Args:
        epochs: -1: unknown.
        flags: Of ``Mark``.
    """
    found: Longs = (
        np.int64(kind) << _KIND_SHIFT
        | np.asarray(flags, np.int64) << _FLAGS_SHIFT
        | (np.asarray(epochs, np.int64) & _EPOCH_MASK)
    )
    return found


def kind_of(tag_code: int) -> RecordKind:
    """What a record is, by the tag code of an item that is no hole."""
    return _KINDS.get(tag_code >> _KIND_SHIFT, RecordKind.ROCKETMQ)


def kind_of_items(sizes: npt.NDArray[np.int32], tag_codes_: Longs) -> RecordKind:
    """What the records of neighbours in a queue are; RocketMQ's where all are holes."""
    at = int(np.argmax(sizes > 0)) if len(sizes) else 0
    return kind_of(int(tag_codes_[at])) if len(sizes) and sizes[at] > 0 else RecordKind.ROCKETMQ


def epochs_of(codes: Longs) -> Longs:
    """Leader epochs or terms of records; -1: unknown."""
    found: Longs = (codes & _EPOCH_MASK).astype(np.uint32).view(np.int32).astype(np.int64)
    return found


def has_mark(codes: Longs, mark: Mark) -> npt.NDArray[np.bool_]:
    """Which items say this of their record; their records are Kafka's, or they are holes."""
    found: npt.NDArray[np.bool_] = (codes >> _FLAGS_SHIFT) & int(mark) != 0
    return found
