"""What a fetcher may use. Each setting says what memory it can pin."""

from __future__ import annotations

from dataclasses import field, replace

from backends.lazy_dataclass import dataclass
from tiered.errors import InvalidError

KIB = 1 << 10

MIB = 1 << 20

# -- limits


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """How much may be under way, how fast, and how it is merged and asked again."""

    requests_in_flight_max: int = 16
    """Calls to the store at once (slots). The executor should have as many threads."""
    bytes_in_flight_max: int = 64 * MIB
    """Bytes they ask for together. A single larger request passes alone."""
    bytes_per_s: float | None = None  # most bytes asked for in a second, on average; None: no limit
    requests_per_s: float | None = None  # most calls begun in a second, on average; None: no limit
    coalesce_gap_bytes: int = 64 * KIB
    """Waiting neighbours of one object become one request when at most this many unwanted bytes lie between them."""
    coalesced_bytes_max: int = 4 * MIB
    """Most bytes of a request that was merged. No more than a reader's own requests have: what is kept of a merged
    one has to be copied apart, and two large ones are sooner here side by side."""
    hedge_factor: float = 3.0
    """A request is asked again after this many times the running median of its like,"""
    hedge_floor_s: float = 0.05  # but not before this many seconds
    hedge_budget: float = 0.05  # most hedges for each request; 0: no hedging
    pending_max: int = 4096
    """Chunks that may wait. Read-ahead is refused when so many wait in all; what is urgent, when so many urgent ones
    wait."""

    def __post_init__(self) -> None:
        least = min(self.requests_in_flight_max, self.bytes_in_flight_max, self.pending_max)
        if least < 1 or self.coalesce_gap_bytes < 0 or self.coalesced_bytes_max < 1:
            raise InvalidError(f"a limit is too small: {self}")
        if not (0 <= self.hedge_budget <= 1 and self.hedge_factor >= 1 and self.hedge_floor_s > 0):
            raise InvalidError(f"hedging is set out of range: {self}")


# -- window


@dataclass(frozen=True, slots=True)
class WindowLimits:
    """Bounds of a window."""

    bytes_min: int = 256 * KIB  # where it begins, and what it never falls below (> 0)
    bytes_max: int = 32 * MIB  # what it never exceeds
    growth: float = 0.5  # which share of each delivered batch it grows by (> 0)
    refill: float = 0.75
    """Read-ahead is asked for when less than this share of the window lies ahead, so that requests are large."""

    def __post_init__(self) -> None:
        if not 0 < self.bytes_min <= self.bytes_max:
            raise InvalidError(
                f"a read-ahead window of {self.bytes_min} to {self.bytes_max} bytes",
                do="make the minimum positive, and the maximum no less",
            )
        if self.growth <= 0 or not 0 < self.refill <= 1:
            raise InvalidError("the read-ahead window needs growth > 0 and 0 < refill <= 1")


# -- settings

BLOCK_ALIGNMENT = 64 * KIB
"""Blocks of the cache consist of whole blocks that have a checksum."""

MEMORY_BYTES = 256 * MIB
"""What an opened tier may take, unless told otherwise."""

MEMORY_BYTES_MIN = 1 * MIB
"""With less there is no room for the parts of one read."""

FREE_SHARE = 8
"""Memory that is kept for what will be read next is an eighth of the cache, at most."""


@dataclass(frozen=True, slots=True)
class FetchSettings:
    """Limits of a ``TieredMessageFetcher``."""

    cache_bytes: int = MEMORY_BYTES
    """Everything that is cached or on its way: records, their arrays, indexes, and what each of these takes however
    small it is. Never exceeded, but for one record that is larger. Not in it: what a caller still holds of a
    batch (a slice keeps the run that it is of, up to ``chunk_bytes``); requests under way that nobody wants any
    more (``transfers.bytes_in_flight_max``); block tables; memory that is kept free (an eighth of this); and an
    section that is read whole since it is damaged. Each reader needs a block or two here, or readers drop what
    others are about to read. What is lent (``TieredMessageFetcher.lend``) is of this, too."""
    table_bytes: int = 8 * MIB  # block tables of sections that are read in chunks
    block_bytes: int = 256 * KIB
    """Step in which a part's records are cached and asked for; a multiple of 64 KiB."""
    chunk_bytes: int = 4 * MIB  # largest request for records; a window is read in so many at once
    gap_bytes: int = 256 * KIB
    """Blocks that are here already are read again when no more than this lies between two that are not."""
    unread_seconds: float = 180.0  # how long what nobody has read is kept
    read_seconds: float = 10.0  # how long after its last reading what has been read is kept
    spent_bytes: int = 16 * MIB
    """What every reader of its queue is past is kept no longer than there is no more than this of it."""
    read_timeout_s: float = 300.0
    """Deadline of a read that names none: the store has given up before, with an error that says more (each request
    has a deadline of its own, later where the way is slow, and is tried again for two minutes)."""
    window: WindowLimits = field(default_factory=WindowLimits)
    """Bounds of the read-ahead of one group in one queue."""
    transfers: TransferLimits = field(default_factory=TransferLimits)
    """Bounds of what goes over the wire."""

    def __post_init__(self) -> None:
        if self.block_bytes <= 0 or self.block_bytes % BLOCK_ALIGNMENT:
            raise InvalidError(f"blocks of {self.block_bytes} bytes; make it a multiple of 65536")
        if self.chunk_bytes < self.block_bytes or self.cache_bytes < 2 * self.chunk_bytes:
            raise InvalidError(
                f"a cache of {self.cache_bytes} bytes with requests of {self.chunk_bytes}",
                do="make requests no smaller than blocks, and the cache hold two requests",
            )

    @classmethod
    def of_memory(cls, memory_bytes: int, transfers: TransferLimits | None = None) -> FetchSettings:
        """Settings with which all that a tier keeps fits into so much memory: with little of it all chunks are small.

        That is what is cached, read ahead, on its way or kept free, block tables, and filters of the key index; but for one
        record, one index of a part, or one filter that is larger, while it is read. However little it is, each read gets
        on: what one needs is made room for, by dropping what others have read ahead. InvalidError: it is less than 1 MiB.
        """
        if memory_bytes < MEMORY_BYTES_MIN:
            raise InvalidError(
                f"memory of {memory_bytes} bytes for a tier",
                do=f"give at least {MEMORY_BYTES_MIN} bytes (1 MiB)",
            )
        table_bytes = min(8 * MIB, memory_bytes // 16)
        cache_bytes = (memory_bytes - table_bytes) * FREE_SHARE // (FREE_SHARE + 1)
        chunk_bytes = min(4 * MIB, cache_bytes // 6 // BLOCK_ALIGNMENT * BLOCK_ALIGNMENT)
        block_bytes = min(256 * KIB, chunk_bytes)
        transfers = transfers or TransferLimits()
        return cls(
            cache_bytes=cache_bytes,
            table_bytes=table_bytes,
            block_bytes=block_bytes,
            chunk_bytes=chunk_bytes,
            gap_bytes=block_bytes,
            spent_bytes=min(16 * MIB, cache_bytes // 4),
            window=WindowLimits(
                bytes_min=min(256 * KIB, cache_bytes // 8),
                bytes_max=min(32 * MIB, cache_bytes // 2),
            ),
            transfers=replace(
                transfers,
                bytes_in_flight_max=min(transfers.bytes_in_flight_max, cache_bytes),
                coalesced_bytes_max=min(transfers.coalesced_bytes_max, chunk_bytes),
            ),
        )
