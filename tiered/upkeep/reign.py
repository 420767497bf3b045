"""A short reign for a command that must be sure that no writer is at work: lease, reign, and the lease given back at once.

**Fence, then look again.** Whoever replaces or deletes by what it has read or listed (``gc``, ``delete-topic``, ``rebuild``)
goes through ``reign_and``: after the reign's entry nothing that an earlier writer made can be named any more, however long
it sleeps. So what came in between is there to be seen by then, and the work looks again at all that it presumes, and only
then acts: ``gc`` follows the journal before each batch, ``delete-topic`` holds each step against the state, and ``rebuild``
lists.

The lease is held only for the moment of taking the reign, and that work: a writer that comes afterwards takes the next one,
and what is done under ours stays right.

A lease that has expired by our clock alone is watched first (``Lease.acquire``): a writer whose clock is behind ours renews
it, and must not be fenced by a command that only tidies up.
"""

from __future__ import annotations

import threading
from dataclasses import asdict
from typing import TYPE_CHECKING, NamedTuple

from tiered.journal.lease import Holder, Lease
from tiered.journal.writer import JournalWriter
from tiered.log.state import TierMachine, TierState

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiered.upkeep.workplace import Workplace

_SECONDS = 60.0
"""A lease that nobody renews: longer than taking a reign and a few entries may last."""
_SECONDS_ANEW = 600.0
"""The same, where all of a tier is listed again, and a checkpoint written."""


class Anew(NamedTuple):
    """Where a journal begins anew that cannot be read.

    Attributes:
        number: Of its first entry, beyond all that may have been used.
        state: What went before.
    """

    number: int
    state: TierState


def journal_writer(at: Workplace) -> JournalWriter[TierState]:
    """A writer that does not reign, at the head of the journal."""
    journal = _writer(at)
    journal.catch_up()
    return journal


def _writer(at: Workplace) -> JournalWriter[TierState]:
    return JournalWriter(
        at.bare,
        at.prefix,
        TierMachine(),
        writer=at.new_id(),
        clock=at.clock,
        rng=at.rng,
        stop=threading.Event(),
        give_up_s=at.give_up_s,
    )


def reign_and(
    at: Workplace,
    work: Callable[[JournalWriter[TierState]], None] = lambda _journal: None,
    *,
    anew: Anew | None = None,
) -> JournalWriter[TierState]:
    """Take lease and reign, do some short work in the journal, and free the lease.

    Args:
        at: The tier.
        work: Looks again at what it presumes, and then acts.
        anew: The journal cannot be read, and begins there; ``work`` sees to the checkpoint.

    Raises:
        FencedError: A writer holds the lease, or took the reign at the same moment.
        BackendError: The store does not answer; calling again is harmless.
    """
    journal = _writer(at) if anew else journal_writer(at)
    lease = Lease(
        at.store,
        at.prefix,
        writer=journal.writer,
        holder=Holder.present(),
        seconds=_SECONDS_ANEW if anew else _SECONDS,
        clock=at.clock,
        known=lambda: journal.end,
    )
    never = threading.Event()
    lease.acquire(
        wait=False,
        announce=lambda _state: None,
        stop=lambda seconds: at.clock.wait(never, seconds),
    )
    try:
        holder = asdict(Holder.present())
        if anew:
            journal.take_reign_anew(anew.number, anew.state, {**holder, "rebuilt": True})
        else:
            journal.take_reign(holder, remembered=lease.remembered)
        work(journal)
    finally:
        lease.release()
    return journal
