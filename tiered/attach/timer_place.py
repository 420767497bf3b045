"""Where a broker's timers lie: ``timer/`` below its prefix, with a journal, a lease and bundles of their own.

So taking and handing over timers never fences the writer of the broker's topics, and a reader of topics never meets a
timer; everything that works on a tier works on this one as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from backends.lazy_dataclass import dataclass
from tiered.api.broker_place import SIGNS, Place, choose_place
from tiered.errors import ClosedError, FencedError, InvalidError
from tiered.keys import JOURNAL, LEASE, TIMER

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from backends.base import ObjectStore
    from tiered.clock import Clock
    from tiered.journal.lease import Lease, LeaseState

TIMER_SIGNS: Final = (TIMER + JOURNAL, *(TIMER + sign for sign in SIGNS))
"""A broker has timers where one of these has an object."""
TIMER_ANY_SIGN: Final = (*TIMER_SIGNS, TIMER + LEASE)
"""For who rebuilds: a lease that remembers a journal may be all that is left."""


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


def choose_timers(
    store: ObjectStore,
    cluster: str | None,
    broker: str | None,
    signs: Sequence[str] = TIMER_SIGNS,
) -> TimerPlace:
    """The only broker there that has timers and fits the names given."""
    try:
        return timers_of(choose_place(store, cluster, broker, signs=signs))
    except InvalidError as error:
        if "several" in error.what:
            raise
        raise InvalidError(
            "there are no timers here",
            where=store.url,
            do="check the URL; `tiered timer import STORE --to URL` brings timers",
        ) from error


def take_lease(
    lease: Lease,
    clock: Clock,
    stop: threading.Event,
    *,
    wait: bool,
    announce: Callable[[LeaseState], None] = lambda _state: None,
) -> None:
    """Take a lease, and wait for it if asked to, until told to stop.

    Raises:
        ClosedError: ``stop`` was set, and another has it.
        FencedError: Another has it, and we do not wait.
    """
    try:
        lease.acquire(wait=wait, announce=announce, stop=lambda seconds: clock.wait(stop, seconds))
    except FencedError as error:
        if stop.is_set():
            raise ClosedError(
                "told to stop while another's lease was waited for", do="run it again"
            ) from error
        raise
