"""Queues as the journal has them, for a fetcher: looked at anew when an object is gone.

An object that is gone (404) may have been merged or have expired: the journal is replayed, and then asked again. What the
new state no longer has is an ``ExpiredError``; an object that it still names is damage. Never other bytes.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

from backends.errors import ObjectNotFoundError
from tiered.errors import DataError, ExpiredError, InvalidError
from tiered.log.view import LifeView

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiered.log.reader import TierReader
    from tiered.model import MessageQueue, QueueOffset

T = TypeVar("T")

REPLAYS_MAX = 4
"""How often one read replays the journal because an object is gone: each time another must have gone."""


class Views:
    """Views of the lives of queues, made when first asked for, and again when a life has changed. For any thread."""

    def __init__(self, reader: TierReader) -> None:
        self._reader = reader
        self._refresh = threading.Lock()
        self._views: dict[tuple[MessageQueue, int | None], LifeView] = {}

    def refresh(self) -> bool:
        """Replay what is new in the journal; whether there was anything."""
        with self._refresh:
            return self._reader.refresh()

    def find(self, queue: MessageQueue, incarnation: int | None = None) -> LifeView | None:
        """A life of a queue (None: the present one), as last seen."""
        lives = self._reader.state.queues.get(queue, ())
        if incarnation is not None:
            lives = tuple(life for life in lives if life.incarnation == incarnation)
        if not lives:
            self._views.pop((queue, incarnation), None)
            return None
        view = self._views.get((queue, incarnation))
        if view is None or view.life is not lives[-1]:
            view = self._views[queue, incarnation] = LifeView.of(queue, lives[-1])
        return view

    def of(self, queue: MessageQueue, incarnation: int | None = None) -> LifeView:
        """A life of a queue (None: the present one), as last seen.

        Raises:
            InvalidError: The tier has no such queue.
        """
        view = self.find(queue, incarnation)
        if view is None:
            raise InvalidError(
                f"the tier has no queue {queue}",
                where=self._reader.store.url,
                do="`tiered ls URL` lists the topics and queues",
            )
        return view

    def again(
        self,
        queue: MessageQueue,
        incarnation: int | None,
        start: QueueOffset,
        work: Callable[[LifeView], T],
    ) -> T:
        """Work on a life as last seen; when an object is gone, on the life as it is now.

        Raises:
            ExpiredError: ``start`` has expired meanwhile.
            DataError: An object that the journal names is gone.
        """
        for tries_left in reversed(range(REPLAYS_MAX)):
            view = self.of(queue, incarnation)
            try:
                return work(view)
            except ObjectNotFoundError as error:
                where = f"{self._reader.store.url}/{self._reader.prefix}"
                has_moved = tries_left > 0 and (self.refresh() or self.find(queue) is not view)
                now = self.of(queue, incarnation)
                if not has_moved or now.life == view.life:
                    raise DataError(
                        f"an object that the journal names is gone: {error}",
                        where=where,
                        do="run `tiered verify` to see what is damaged",
                    ) from error
                if max(start, view.life.min_offset) < now.life.min_offset:
                    raise ExpiredError(
                        f"offsets {start} to {now.life.min_offset} of {queue} have expired",
                        now.life.min_offset,
                        where=where,
                    ) from error
        raise AssertionError("the last try ends by itself")
