"""Where the messages of an append were put."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered.format.hosts import offset_msg_id
from tiered.model import PhysicalOffset, QueueOffset
from tiered.store.messages import Appended

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered.store.columns import Places, Prepared


class Receipts:
    """Where the messages of one append were put; each receipt is made when it is asked for."""

    __slots__ = ("_host", "_messages", "places")

    def __init__(self, messages: Prepared, places: Places, host: str) -> None:
        self._messages = messages
        self.places = places
        self._host = host

    def __len__(self) -> int:
        """How many messages."""
        return len(self._messages)

    def __getitem__(self, number: int) -> Appended:
        """The receipt of one message."""
        messages, position = self._messages, self.places.positions[number]
        return Appended(
            QueueOffset(self.places.queue_offsets[number]),
            PhysicalOffset(position),
            offset_msg_id(self._host, position),
            messages.msg_ids[number],
            messages.sizes[number],
        )

    def __iter__(self) -> Iterator[Appended]:
        """In the order of the messages."""
        return (self[number] for number in range(len(self)))
