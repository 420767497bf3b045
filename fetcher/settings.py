"""What a fetcher may use. Each setting says what memory it can pin."""

from __future__ import annotations

from dataclasses import dataclass, field

from fetcher.transfers import TransferLimits
from fetcher.window import WindowLimits
from tiered.errors import InvalidError

KIB = 1024
MIB = 1024 * KIB
BLOCK_ALIGNMENT = 64 * KIB
"""Blocks of the cache consist of whole blocks that have a checksum."""


@dataclass(frozen=True, slots=True)
class FetchSettings:
    """Limits of a ``TieredMessageFetcher``.

    Attributes:
        cache_bytes: Everything that is cached or on its way: records, their arrays, indexes, and what each of these takes
            however small it is. Never exceeded, but for one record that is larger. Not in it: what a caller still holds
            of a batch (a slice keeps the run that it is of, up to ``piece_bytes``); requests under way that nobody wants
            any more (``transfers.bytes_in_flight_max``); and an object that is read whole since it is damaged. Each
            reader needs a block or two here, or readers drop what others are about to read.
        block_bytes: Step in which a part's records are cached and asked for; a multiple of 64 KiB.
        piece_bytes: Largest request for records; a window is read in so many at once.
        gap_bytes: Blocks that are here already are read again when no more than this lies between two that are not.
        unread_seconds: How long what nobody has read is kept.
        read_seconds: How long after its last reading what has been read is kept.
        spent_bytes: What every reader of its queue is past is kept no longer than there is no more than this of it.
        read_timeout_s: Deadline of a read that names none.
        window: Bounds of the read-ahead of one group in one queue.
        transfers: Bounds of what goes over the wire.
    """

    cache_bytes: int = 256 * MIB
    block_bytes: int = 256 * KIB
    piece_bytes: int = 4 * MIB
    gap_bytes: int = 256 * KIB
    unread_seconds: float = 180.0
    read_seconds: float = 10.0
    spent_bytes: int = 16 * MIB
    read_timeout_s: float = 30.0
    window: WindowLimits = field(default_factory=WindowLimits)
    transfers: TransferLimits = field(default_factory=TransferLimits)

    def __post_init__(self) -> None:
        if self.block_bytes <= 0 or self.block_bytes % BLOCK_ALIGNMENT:
            raise InvalidError(f"blocks of {self.block_bytes} bytes; make it a multiple of 65536")
        if self.piece_bytes < self.block_bytes or self.cache_bytes < 2 * self.piece_bytes:
            raise InvalidError(
                f"a cache of {self.cache_bytes} bytes with requests of {self.piece_bytes}",
                do="make requests no smaller than blocks, and the cache hold two requests",
            )
