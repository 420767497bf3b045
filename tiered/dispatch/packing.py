"""Compresses what sealing writes. Keeps a dictionary for each topic, since its queues' records are alike.

Ordering and threads: one thread at a time, that of the sealer; zstd lets go of the interpreter lock meanwhile.

Memory: ``TOPICS_MAX`` dictionaries of 32 KiB; and beside the payload its compressed blocks, which are no larger.

After a crash nothing is missed: each object has the dictionary that its blocks need in itself.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tiered.errors import InvalidError
from tiered.format.dictionary import TRAIN_BYTES_MIN, pays, train
from tiered.format.packed import BLOCK_BYTES, BLOCK_BYTES_MAX, LEVEL, LEVEL_MAX, build_packed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Buffer

    from tiered.format.trailer import SealedObject

TOPICS_MAX: Final = 64
RETRAIN_BYTES: Final = 512 * 1024 * 1024
"""So many bytes of a topic share one dictionary; what comes later may be different."""


@dataclass(frozen=True, slots=True)
class Compression:
    """How sealing compresses.

    Attributes:
        level: Of zstd.
        block_bytes: Bytes of records that are compressed together, and unpacked together by whoever wants one of them.
    """

    level: int = LEVEL
    block_bytes: int = BLOCK_BYTES

    def __post_init__(self) -> None:
        if not 1 <= self.level <= LEVEL_MAX:
            raise InvalidError(f"a level of zstd goes from 1 to {LEVEL_MAX}, not {self.level}")
        if not 1 <= self.block_bytes <= BLOCK_BYTES_MAX:
            raise InvalidError(f"a block has 1 to {BLOCK_BYTES_MAX} bytes, not {self.block_bytes}")


@dataclass(slots=True)
class _Known:
    dictionary: bytes
    bytes_left: int = RETRAIN_BYTES


class Packer:
    """Makes packed objects."""

    def __init__(self, compression: Compression) -> None:
        self._level = compression.level
        self._block_bytes = compression.block_bytes
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def pack(
        self, topic: str, payload: Buffer, description: Mapping[str, Any]
    ) -> SealedObject | None:
        """Compress the records of one queue.

        Args:
            topic: Whose.
            payload: The records.
            description: See ``build_object``.

        Returns:
            None when it is not worth it.
        """
        dictionary = self._dictionary(topic, payload)
        if not pays(dictionary, payload, level=self._level):
            dictionary = b""
        return build_packed(
            payload,
            description,
            level=self._level,
            dictionary=dictionary,
            block_bytes=self._block_bytes,
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
