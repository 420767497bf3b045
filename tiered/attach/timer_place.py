"""Where a broker's timers lie: ``timer/`` below its prefix, with a journal, a lease and bundles of their own.

So taking and handing over timers never fences the writer of the broker's topics, and whoever reads topics never meets a
timer; everything that works on a tier works on this one as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tiered.api.broker_place import SIGNS, Place, choose_place
from tiered.errors import InvalidError
from tiered.keys import JOURNAL, TIMER

if TYPE_CHECKING:
    from backends.base import ObjectStore

TIMER_SIGNS: Final = (TIMER + JOURNAL, *(TIMER + sign for sign in SIGNS))
"""A broker has timers where one of these has an object."""


@dataclass(frozen=True, slots=True, order=True)
class TimerPlace(Place):
    """The place of a broker's timers."""

    @property
    def prefix(self) -> str:
        """Of their keys, ending in a slash."""
        return Place(self.cluster, self.broker).prefix + TIMER


def timers_of(place: Place) -> TimerPlace:
    """The place of a broker's timers."""
    return TimerPlace(place.cluster, place.broker)


def choose_timers(store: ObjectStore, cluster: str | None, broker: str | None) -> TimerPlace:
    """The only broker there that has timers and fits the names given.

    Raises:
        InvalidError: There is none, or more than one.
    """
    try:
        return timers_of(choose_place(store, cluster, broker, signs=TIMER_SIGNS))
    except InvalidError as error:
        if "several" in error.what:
            raise
        raise InvalidError(
            "there are no timers here",
            where=store.url,
            do="check the URL; `tiered timer import STORE --to URL` brings timers",
        ) from error
