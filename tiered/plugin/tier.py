"""A tier opened for reading: the face of the Python API."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any

from backends.s3_options import S3Options
from tiered.clock import Clock, SystemClock
from tiered.log.messages import messages_json
from tiered.log.reader import TierReader
from tiered.log.state import Gap, TierState
from tiered.model import MessageQueue, QueueOffset
from tiered.plugin.place import Place, choose_place
from tiered.plugin.stores import backend_errors, open_metered, with_retries

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backends.base import ObjectStore
    from backends.metered import MeteredStore


class Tier:
    """One broker's tier, read-only.

    Attributes:
        place: Which broker.
        store: Where it lies, with retries.
        meter: Counts the requests.
        reader: Journal and queues.
    """

    def __init__(self, store: ObjectStore, meter: MeteredStore, place: Place) -> None:
        self.store = store
        self.meter = meter
        self.place = place
        self.reader = TierReader(store, place.prefix)

    @property
    def state(self) -> TierState:
        """What the journal says, as of opening or the last ``refresh``."""
        return self.reader.state

    def refresh(self) -> bool:
        """See what was committed since; whether there was anything."""
        with backend_errors():
            return self.reader.refresh()

    def queues(self, topic: str | None = None) -> list[MessageQueue]:
        """The queues of a topic, or of all, in order."""
        return sorted(q for q in self.state.queues if topic in {None, q.topic})

    def read(
        self, topic: str, queue_id: int, *, start: int = 0, raw_body: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Messages of one queue from queue offset ``start`` on, as ``tiered cat`` prints them.

        Raises:
            InvalidError: No such queue.
            DataError: The bytes are damaged; nothing of the block is given out.
            StoreUnavailableError: The store does not answer.
        """
        queue = self.reader.queue(MessageQueue(topic, queue_id))
        with backend_errors():
            for found in queue.batches(QueueOffset(start)):
                if not isinstance(found, Gap):
                    yield from messages_json(found.records, found.log_offset, raw_body=raw_body)

    def close(self) -> None:
        """Give back connections."""
        self.store.close()


def open(  # noqa: A001 (the API's door)
    url: str,
    *,
    cluster: str | None = None,
    broker: str | None = None,
    options: S3Options | None = None,
    clock: Clock | None = None,
) -> Tier:
    """Open a tier for reading.

    Args:
        url: ``file:///path``, ``s3://bucket/prefix``, or anything that fsspec knows.
        cluster: Name of the cluster; needed only when several brokers have their data there.
        broker: Name of the broker; likewise.
        options: Endpoint, region and the like; default: from the environment.
        clock: For tests.

    Raises:
        InvalidError: No such tier, or several.
        StoreUnavailableError: The store cannot be reached or refuses us.
    """
    meter = open_metered(url, options or S3Options())
    store = with_retries(meter, clock or SystemClock(), random.Random(), threading.Event())  # noqa: S311 (jitter)
    with backend_errors():
        tier = Tier(store, meter, choose_place(store, cluster, broker))
        tier.refresh()
    return tier
