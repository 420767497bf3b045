"""The readers that a fetcher knows: one ``Stream`` for each group in a history of a queue.

Not for several threads at once: its owner holds a lock around it. A reader is made by its first read and forgotten when it
has come to the end, has done, or has not read for a minute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fetcher.streams import Stream

if TYPE_CHECKING:
    from fetcher.window import WindowLimits
    from tiered.log.cursor import History
    from tiered.model import MessageQueue

IDLE_SECONDS = 60.0
"""A stream that was not read for so long is forgotten; it begins again with the smallest window."""

Name = tuple[str, "MessageQueue", "History | None"]
"""Group, queue and history (None: whichever is the present one)."""


class Readers:
    """See the module."""

    def __init__(self, limits: WindowLimits) -> None:
        """Begin with none, whose windows will have these limits."""
        self._limits = limits
        self._streams: dict[Name, Stream] = {}
        self._announced: dict[Name, Stream] = {}
        self._together: dict[tuple[MessageQueue, History | None], dict[Stream, None]] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def find(self, name: Name) -> Stream | None:
        """A reader that is known."""
        return self._streams.get(name)

    def announce(self, name: Name) -> Stream:
        """A reader that will begin; it takes no share until then."""
        stream = self._streams.get(name) or self._announced.get(name)
        if stream is None:
            group, queue, _ = name
            stream = self._announced[name] = Stream(group, queue, self._limits)
        return stream

    def make(self, name: Name, now_s: float) -> Stream:
        """A reader, which begins now unless it is known."""
        stream = self._streams.get(name)
        if stream is None:
            group, queue, _ = name
            stream = self._announced.pop(name, None) or Stream(group, queue, self._limits)
            self._streams[name] = stream
            stream.used_s, stream.sure_max = now_s, self._limits.bytes_max
            self._together.setdefault(name[1:], {})[stream] = None
        return stream

    def forget(self, name: Name) -> Stream | None:
        """A reader has done; None: nobody knows it."""
        stream = self._streams.pop(name, None)
        if stream is None:
            return self._announced.pop(name, None)
        others = self._together[name[1:]]
        del others[stream]
        if not others:
            del self._together[name[1:]]
        return stream

    def of_group(self, group: str) -> list[Name]:
        """All of one group, begun or not."""
        return [name for name in (*self._streams, *self._announced) if name[0] == group]

    def idle(self, now_s: float) -> list[Name]:
        """Those that have not read for a minute."""
        until_s = now_s - IDLE_SECONDS
        return [name for name, stream in self._streams.items() if stream.used_s < until_s]

    def is_spent(self, name: Name, end: int) -> bool:
        """Whether all others that read the same are past what ends at a queue offset."""
        me = self._streams.get(name)
        others = self._together.get(name[1:], ())
        return all(other is me or other.position >= end for other in others)

    def streams(self) -> list[Stream]:
        """All of them."""
        return list(self._streams.values())

    def clear(self) -> None:
        """Forget all."""
        self._streams.clear()
        self._announced.clear()
        self._together.clear()
