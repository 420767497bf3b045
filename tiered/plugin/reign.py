"""A short reign for a command that must be sure that no writer is at work: lease, reign, and the lease given back at once.

After the reign's entry nothing that an earlier writer made can be named any more, however long it sleeps. The lease is
held only for the moment of taking the reign: a writer that comes afterwards takes the next one, and what is done under
ours stays right.
"""

from __future__ import annotations

import threading
from dataclasses import asdict
from typing import TYPE_CHECKING

from tiered.errors import FencedError
from tiered.journal.lease import Holder, Lease
from tiered.journal.writer import JournalWriter
from tiered.log.state import TierMachine, TierState

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiered.plugin.workplace import Workplace

_SECONDS = 60.0
"""A lease that nobody renews: longer than taking a reign and a few entries may last."""


def journal_writer(at: Workplace) -> JournalWriter[TierState]:
    """A writer that does not reign, at the head of the journal."""
    journal = JournalWriter(
        at.bare,
        at.prefix,
        TierMachine(),
        writer=at.new_id(),
        clock=at.clock,
        rng=at.rng,
        stop=threading.Event(),
    )
    journal.catch_up()
    return journal


def reign_and(
    at: Workplace,
    work: Callable[[JournalWriter[TierState]], None] = lambda _journal: None,
) -> JournalWriter[TierState]:
    """Take lease and reign, do some short work in the journal, and free the lease.

    Raises:
        FencedError: A writer holds the lease, or took the reign at the same moment.
        BackendError: The store does not answer; calling again is harmless.
    """
    journal = journal_writer(at)
    lease = Lease(
        at.store,
        at.prefix,
        writer=journal.writer,
        holder=Holder.present(),
        seconds=_SECONDS,
        clock=at.clock,
    )
    other = lease.try_acquire()
    if other is not None:
        raise FencedError(
            f"a writer is at work: process {other.holder.pid} on {other.holder.host} holds the lease",
            where=f"{at.store.url}/{at.prefix}",
            do="stop it, or wait until it has ended",
        )
    try:
        journal.take_reign(asdict(Holder.present()))
        work(journal)
    finally:
        lease.release()
    return journal
