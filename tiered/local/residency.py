"""Whether records of a foreign store directory are in memory: asked of the page cache, page by page.

A broker maps its log, so what it (or anybody) has read or written lately is in the page cache, for as long as the system
wants. A page is in memory if one byte of it can be read with ``RWF_NOWAIT``, that is without waiting for the disk.
Nothing is mapped or locked (``mincore`` tells the truth only to a file's owner). Not free of traces: for a page that is
not there the system may begin to read that one page; read-ahead is switched off for the descriptor.

Where the file system cannot tell (tmpfs, some network file systems), records count as in memory: then they are read from
the local store. For any thread; nothing is kept.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import numpy as np

from tiered.errors import InvalidError
from tiered.format.block import distinct
from tiered.local.mapped_file_queue import open_read_only

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tiered.local.consumequeues import Entries
    from tiered.local.views import View
    from tiered.model import MessageQueue, QueueBounds

ITEMS_MAX: Final = 1024
"""Of how many records at most the first and the last and some between are looked at."""
SAMPLES: Final = 16
_NOWAIT: Final = getattr(os, "RWF_NOWAIT", 0)


class Residency:
    """What a reader with a policy wants to know of single queues of a store, beside ``LocalStore``."""

    def __init__(
        self,
        view: Callable[[], View],
        is_cached: Callable[[str, Iterable[int]], bool] | None = None,
    ) -> None:
        """Ask nothing yet; ``view`` gives the one that holds now (``RocketMQStore.current_view``)."""
        self._view = view
        self._is_cached = is_cached or is_cached_in_file

    def bounds(self, queue: MessageQueue) -> QueueBounds | None:
        """Bounds of one queue, as ``LocalStore.queues`` has them, without a look at the others."""
        state = self._view().catalog.states.get(queue)
        if state is None or not (state.end or state.index.row.bases):
            return None
        return state.bounds

    def is_in_memory(self, queue: MessageQueue, start: int, count: int) -> bool:
        """Whether the records of ``count`` messages from ``start`` on are in memory, by some of their pages."""
        view = self._view()
        state = view.catalog.states.get(queue)
        end = 0 if state is None else min(start + min(count, ITEMS_MAX), state.end)
        if state is None or start >= end:
            return True
        by_file: dict[str, list[int]] = {}
        for place in plan_samples(state.index.entries(start, end)):
            base = view.log.base_of(place)
            if base is not None:
                by_file.setdefault(view.log.path(base), []).append(place - base)
        return all(self._is_cached(path, within) for path, within in by_file.items())


def plan_samples(entries: Entries) -> list[int]:
    """Physical offsets to look at: where the first and the last record and some between begin, and the last byte."""
    written = np.flatnonzero(entries.is_written)
    if not len(written):
        return []
    chosen = written[distinct(np.linspace(0, len(written) - 1, SAMPLES).astype(np.int64))]
    last = int(entries.physical_offsets[chosen[-1]]) + int(entries.sizes[chosen[-1]]) - 1
    return [*entries.physical_offsets[chosen].tolist(), last]


def is_cached_in_file(path: str, offsets: Iterable[int]) -> bool:
    """Whether the pages that hold these bytes of a file are in the page cache; True where nobody can tell."""
    if not _NOWAIT:
        return True
    try:
        descriptor = open_read_only(path)
    except (OSError, InvalidError):
        return True  # it is gone, or may not be read: reading will tell
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        for offset in offsets:
            os.preadv(descriptor, [bytearray(1)], offset, _NOWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True  # not supported here
    finally:
        os.close(descriptor)
    return True
