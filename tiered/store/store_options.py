"""How an embedded store is laid out, and when what was appended counts as stored."""

from __future__ import annotations

from dataclasses import field
from enum import Enum
from typing import Final

from backends.lazy_dataclass import dataclass
from tiered.compaction.passes import ROCKETMQ, RetentionPolicy
from tiered.errors import InvalidError
from tiered.format.items import BATCH_ITEM_BYTES, ITEM_BYTES
from tiered.format.record import BLANK_BYTES_MIN
from tiered.store.new_message import DELAY_LEVELS, parse_levels

INDEX_HEADER_BYTES: Final = 40
INDEX_SLOT_BYTES: Final = 4
INDEX_ITEM_BYTES: Final = 20
RECORD_ROOM_BYTES: Final = 64 << 10
"""How much longer than the largest body a record may be, as with a broker."""


class Flush(Enum):
    """What an acknowledged append has survived."""

    ASYNC = "async"
    """The end of this process. A crash of the machine may take what was appended in the last ``flush_interval_s``."""
    SYNC = "sync"
    """The end of the machine: the records were on the disk before ``append`` returned."""


@dataclass(frozen=True, slots=True)
class Expiry:
    """What expires: whole files from the oldest on, never the last one, nor what is not listed yet."""

    reserve_s: float = 72 * 3600.0
    """A file is kept so long after its last change (``fileReservedTime``)."""
    hour: int = 4
    """Of the local day, in which files that are old enough go; at other times only when the disk is full."""
    used_ratio_max: float = 0.75  # above it files that are old enough go at any hour
    used_ratio_forced: float = 0.85  # above it the oldest go whatever their age
    used_ratio_refused: float = 0.90
    """Above it nothing is appended, until it is below ``used_ratio_forced`` again."""
    spare_s: float = 120.0
    """A file that is due and in use (``MessageStore.use_file``) is spared so long."""
    files_max: int = 10  # how many go in one round
    interval_s: float = 10.0  # between two rounds


@dataclass(frozen=True, slots=True)
class Compacting:
    """How topics of a store are compacted; the sizes are a broker's own, and those of files that are there win."""

    log_file_bytes: int = 104_857_460
    """Length of each file of records (``compactionMappedFileSize``, as a broker rounds it)."""
    unit_file_items: int = 227_951  # units of each file that lists them
    interval_s: float = 900.0  # between two passes; copying goes on every second
    memory_bytes: int = 32 << 20
    """Of keys, 160 bytes each; what has no room is looked at in further rounds."""
    dirty_ratio: float = 0.0
    """A pass is made when more than this share of what is closed is new; 0: anything new is enough."""
    policy: RetentionPolicy = ROCKETMQ  # what stays

    @property
    def unit_file_bytes(self) -> int:
        """Length of a file of units."""
        return self.unit_file_items * BATCH_ITEM_BYTES


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Sizes default to a broker's own, so that one with default settings starts on the store (files are sparse).

    Of a store that exists, its files' own sizes win, and before it has any those that it was made with.
    """

    commitlog_file_bytes: int = 1 << 30
    """Size of each file of the commit log (``mappedFileSizeCommitLog``)."""
    consumequeue_file_items: int = 300_000  # items of each file of a consume queue
    index_slots: int = 5_000_000  # hash slots of an index file (``maxHashSlotNum``)
    index_items: int = 20_000_000  # items of an index file (``maxIndexNum``)
    store_host: str = "127.0.0.1:10911"
    """The broker's address in every record, ``ip:port`` or ``[ip]:port``."""
    message_bytes_max: int = 4 << 20  # largest body; a record may have 64 KiB more
    topic_queues: int = 4  # queues of a topic that is made because a message names it
    flush: Flush = Flush.ASYNC  # see ``Flush``
    flush_interval_s: float = 0.5  # between two asynchronous flushes
    sync_timeout_s: float = 5.0
    """How long ``append`` waits for its flush, and for a replica where one is asked for."""
    checkpoint_interval_s: float = 1.0  # between two checkpoints: what recovery must read again
    needs_replica: bool = False
    """An append is answered only when ``acknowledge_replica`` has passed it, and only then dispatched."""
    preallocate: bool = False
    """Take a log file's whole room when it is made, so that a full disk is met there."""
    expiry: Expiry | None = None  # what expires, and when; None: nothing does
    batchqueue_file_items: int = 300_000  # units of each file of a batch consume queue
    delay_levels: str = DELAY_LEVELS
    """``messageDelayLevel`` of the broker that will deliver what is delayed."""
    compacting: Compacting = field(default_factory=Compacting)  # see ``Compacting``

    def __post_init__(self) -> None:
        for name in (
            "commitlog_file_bytes",
            "consumequeue_file_items",
            "message_bytes_max",
            "topic_queues",
            "index_slots",
            "index_items",
            "batchqueue_file_items",
            "flush_interval_s",
            "sync_timeout_s",
            "checkpoint_interval_s",
        ):
            if getattr(self, name) <= 0:
                raise InvalidError(f"{name} must be positive, not {getattr(self, name)}")
        parse_levels(self.delay_levels)

    @property
    def consumequeue_file_bytes(self) -> int:
        """Size of each file of a consume queue."""
        return self.consumequeue_file_items * ITEM_BYTES

    @property
    def record_bytes_max(self) -> int:
        """The largest record that may be: 64 KiB more than a body, and a file must hold it and the blank behind it."""
        return min(
            self.message_bytes_max + RECORD_ROOM_BYTES, self.commitlog_file_bytes - BLANK_BYTES_MIN
        )
