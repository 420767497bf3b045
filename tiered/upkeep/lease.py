"""Who writes a tier, and freeing its lease by hand.

``break_lease`` writes a released lease under an id of its own, by compare-and-set. A writer that still lives meets that
at its next renewal and stops by itself (exit code 4). One that hangs learns it when it goes on; until a new writer has
begun its reign it may still commit, which harms nothing: the journal has room for one history, and fences it then.

Threads: none. After a crash the lease is as it was, or free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from backends.errors import PreconditionFailedError
from tiered.errors import FencedError
from tiered.journal.lease import Holder, JournalEnd, LeaseState, encode_lease, read_lease
from tiered.journal.reader import JournalReader
from tiered.keys import LEASE
from tiered.log.state import TierMachine, TierState

if TYPE_CHECKING:
    from backends.base import ObjectStore
    from tiered.api.broker_place import Place
    from tiered.clock import Clock

_TRIES = 5
HELD, EXPIRED, RELEASED, GONE, UNREADABLE, NONE = (
    "held",
    "expired",
    "released",
    "gone",
    "unreadable",
    "none",
)


@dataclass(frozen=True, slots=True)
class LeaseReport:
    """What is known of a tier's writer.

    Attributes:
        word: ``held`` (somebody writes), ``expired``, ``released`` (ended cleanly, or broken), ``gone`` (its process, of
            this host, has ended), ``unreadable``, or ``none`` (no lease was ever taken).
        lease: What the lease says; None when unreadable or absent.
        state: What the journal says: who reigned last.
        now_ms: Our wall clock, against which the expiry was held.
        number: Of the last journal entry.
    """

    word: str
    lease: LeaseState | None
    state: TierState
    now_ms: int
    number: int = 0

    @property
    def is_held(self) -> bool:
        """A writer is alive, as far as can be told."""
        return self.word == HELD

    def document(self, place: Place, url: str) -> dict[str, Any]:
        """For ``tiered lease --json``."""
        lease = self.lease
        return {
            "format": 1,
            "url": url,
            "cluster": place.cluster,
            "broker": place.broker,
            "state": self.word,
            "is_held": self.is_held,
            "writer": lease.writer if lease else None,
            "host": lease.holder.host if lease else None,
            "pid": lease.holder.pid if lease else None,
            "expires_ms": lease.expires_ms if lease else None,
            "now_ms": self.now_ms,
            "generation": self.state.generation,
            "reigning_writer": self.state.writer,
            "updated_ms": self.state.updated_ms,
        }


def report_lease(store: ObjectStore, prefix: str, clock: Clock) -> LeaseReport:
    """Read the lease and the journal.

    Raises:
        DataError: The journal is damaged.
        InvalidError: The lease is of a newer format version.
        BackendError: The store could not be read.
    """
    journal = JournalReader(store, prefix, TierMachine())
    journal.catch_up()
    lease, version = read_lease(store, prefix + LEASE)
    now_ms = clock.now_ms()
    word = lease_word(lease, now_ms, exists=version is not None)
    return LeaseReport(word, lease, journal.state, now_ms, journal.number)


def lease_word(lease: LeaseState | None, now_ms: int, *, exists: bool) -> str:
    """What a lease amounts to; see ``LeaseReport.word``."""
    if lease is None:
        return UNREADABLE if exists else NONE
    if lease.released:
        return RELEASED
    if lease.expires_ms <= now_ms:
        return EXPIRED
    return GONE if lease.holder.is_gone() else HELD


def break_lease(store: ObjectStore, prefix: str, clock: Clock, *, breaker: str) -> bool:
    """Free the lease, whoever holds it.

    Args:
        store: Where.
        prefix: Of the broker.
        clock: For the time stamp.
        breaker: Our 8-hex-digit id, other than the holder's, so that the holder sees that it lost the lease.

    Returns:
        Whether there was anything to free.

    Raises:
        FencedError: It was written anew each time that we tried.
        BackendError: Not freed, or unknown; calling again is harmless.
    """
    key = prefix + LEASE
    for _ in range(_TRIES):
        present, version = read_lease(store, key)
        if version is None or (present and present.released):
            return False
        end = present.end if present else JournalEnd()  # what it remembers is kept
        broken = LeaseState(Holder.present(), breaker, clock.now_ms(), released=True, end=end)
        try:
            store.compare_and_set(key, encode_lease(broken), version)
        except PreconditionFailedError:
            continue  # renewed at this very moment
        return True
    raise FencedError("the lease changes faster than it can be broken", where=key, do="try again")
