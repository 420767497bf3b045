"""What a fetcher has done so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FetchStats:
    """Counters since the fetcher was made.

    Attributes:
        delivered_bytes: Of records handed out.
        delivered_items: Likewise, holes included.
        hits: Reads that were served at once.
        waits: Reads that had to wait.
        unread_bytes: Read ahead, and dropped before anybody had it.
        cached_bytes: Held now.
        reserved_bytes: On its way now.
        bytes_max: What may be held and on its way: the budget without what is lent.
        streams: Readers now.
    """

    delivered_bytes: int
    delivered_items: int
    hits: int
    waits: int
    unread_bytes: int
    cached_bytes: int
    reserved_bytes: int
    bytes_max: int
    streams: int
