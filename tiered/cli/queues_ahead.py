"""Begins to read queues that are about to be printed, so that each does not wait for the store anew."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tiered.api.open_tier import OpenTier
    from tiered.log.reader import QueueReader
    from tiered.model import QueueOffset

AT_ONCE = 8
"""Queues that are begun before their turn."""


def queues_ahead(
    source: OpenTier,
    group: str,
    readers: Sequence[QueueReader],
    start: Callable[[QueueReader], QueueOffset],
) -> Iterator[QueueReader]:
    """The same readers, in order, with the first records of those that follow on their way.

    What that meets, such as damage, is left to whoever reads the queue.

    Args:
        source: Reads.
        group: In whose name.
        readers: Of the present lives of queues.
        start: Where the reading of a queue will begin.
    """

    def begin(reader: QueueReader, at: QueueOffset) -> None:
        source.fetch(
            group,
            reader.cursor,
            at,
            bytes_max=1,
            count_max=1,
        )

    starts = [(reader, start(reader)) for reader in readers]
    busy = [(reader, at) for reader, at in starts if at < reader.life.commit_offset]
    if len(busy) <= 1:
        yield from readers
        return
    pool = ThreadPoolExecutor(AT_ONCE, "tiered-ahead")
    try:
        rest = iter(busy)
        for _ in range(AT_ONCE):
            first = next(rest, None)
            if first is not None:
                pool.submit(begin, *first)
        for reader in readers:
            yield reader
            following = next(rest, None)
            if following is not None:
                pool.submit(begin, *following)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
