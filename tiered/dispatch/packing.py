"""Compresses sections of the last level. Keeps a dictionary for each topic, since its queues' records are alike.

Ordering and threads: one thread at a time, that of the merger; zstd lets go of the interpreter lock meanwhile.

Memory: ``TOPICS_MAX`` dictionaries of 32 KiB; and beside the records their compressed blocks, which are no larger.

After a crash nothing is missed: each section has the dictionary that its blocks need in itself.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tiered.errors import InvalidError
from tiered.format.bundle import (
    PACK_LEVEL,
    PACK_LEVEL_MAX,
    TRAIN_BYTES_MIN,
    build_packed_section,
    pays,
    train,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from tiered.format.bundle import Section

TOPICS_MAX: Final = 64
RETRAIN_BYTES: Final = 512 * 1024 * 1024
"""So many bytes of a topic share one dictionary; what comes later may be different."""


@dataclass(frozen=True, slots=True)
class Compression:
    """How merging compresses.

    Attributes:
        level: Of zstd.
    """

    level: int = PACK_LEVEL

    def __post_init__(self) -> None:
        if not 1 <= self.level <= PACK_LEVEL_MAX:
            raise InvalidError(f"a level of zstd goes from 1 to {PACK_LEVEL_MAX}, not {self.level}")


@dataclass(slots=True)
class _Known:
    dictionary: bytes
    bytes_left: int = RETRAIN_BYTES


class Packer:
    """Makes packed sections."""

    def __init__(self, compression: Compression) -> None:
        self._level = compression.level
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def pack(
        self, topic: str, records: Buffer, items: Buffer, *, may_be_sparse: bool = False
    ) -> Section | None:
        """Compress the records of one section of a topic; None when it is not worth it. See ``build_section``."""
        dictionary = self._dictionary(topic, records)
        if not pays(dictionary, records, level=self._level):
            dictionary = b""
        return build_packed_section(
            records,
            items,
            level=self._level,
            dictionary=dictionary,
            may_be_sparse=may_be_sparse,
        )

    def _dictionary(self, topic: str, payload: Buffer) -> bytes:
        size = memoryview(payload).nbytes
        known = self._known.get(topic)
        if known is None or known.bytes_left <= 0:
            if size < TRAIN_BYTES_MIN:
                return known.dictionary if known else b""
            known = self._known[topic] = _Known(train(payload, level=self._level))
        known.bytes_left -= size
        self._known.move_to_end(topic)
        while len(self._known) > TOPICS_MAX:
            self._known.popitem(last=False)
        return known.dictionary
