"""Appends of messages that are complete: what is stored is what is given (``tiered.store.special``). For any thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered.store.special import Maker, Special, complete

if TYPE_CHECKING:
    from tiered.clock import Clock
    from tiered.store.commitlog import CommitLog
    from tiered.store.knowntopics import KnownTopics
    from tiered.store.messages import Appended, Message
    from tiered.store.options import StoreOptions
    from tiered.store.uniqkeys import KeyMaker


class AsIs:
    """Puts complete messages into one store's log, one by one."""

    def __init__(self, log: CommitLog, topics: KnownTopics, options: StoreOptions) -> None:
        self._log = log
        self._topics = topics
        self._options = options

    def put(self, special: Special) -> tuple[Appended, int]:
        """Write one; its receipt, and where the log ends behind it.

        Raises:
            InvalidError: It cannot be stored as it is; nothing was.
            OSError: The disk refused it; nothing was stored.
        """
        queue = special.message.topic, special.message.queue_id
        is_batch = self._topics.is_batch(queue[0])
        made = Maker(special, self._options, is_batch_topic=is_batch)
        self._topics.ensure({queue}, (queue,))
        places = self._log.append_made(queue, made.takes, made.make)
        return made.receipt(places), places.end


def completed(message: Message, *, cluster: str, keys: KeyMaker, clock: Clock) -> Message:
    """A message with what a broker adds, in its order, and a new unique id if it has none."""
    (key,) = keys.take(1, int(clock.now_ms()))
    return complete(message, cluster=cluster, unique_key=key)
