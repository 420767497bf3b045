"""What a command that uploads holds: lease, epoch and an uploader, from when there is something to write until it ends.

Ordering: lease, epoch, then uploads, whose keys carry the epoch. So nothing that an earlier writer made can be
named any more, and what a crash leaves here unnamed goes with the next ``gc``. The lease is renewed as the work goes on
(``renew``): a command that hangs for longer than a minute may be followed by a writer, and is fenced then.

Threads: one. Errors: whoever writes already refuses us (``FencedError``).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from tiered.api.broker_place import require_conditional_writes
from tiered.dispatch.group_commit import Uploader
from tiered.journal.append import JournalWriter
from tiered.journal.lease import Holder, Lease
from tiered.log.state import TierMachine, TierState

if TYPE_CHECKING:
    import random
    import threading

    from backends.base import ObjectStore
    from tiered.clock import Clock

LEASE_SECONDS = 60.0


class UploadingEpoch:
    """One epoch over one broker's tier."""

    def __init__(
        self,
        raw: ObjectStore,
        store: ObjectStore,
        prefix: str,
        *,
        clock: Clock,
        rng: random.Random,
        stop: threading.Event,
        give_up_s: float,
        does: str,
    ) -> None:
        """Read and write nothing yet.

        Args:
            raw: The tier's store without retries, for the journal.
            store: The same with retries.
            stop: Ends the journal's tries, and waiting for a lease.
            give_up_s: A store that has refused an entry for so long is given up.
            does: What the epoch is for, as its entry says.
        """
        self._store = store
        self._prefix = prefix
        self._clock = clock
        self._rng = rng
        self._stop = stop
        self._does = does
        self._writer = f"{rng.getrandbits(32):08x}"
        # Written to under the epoch, once it is taken; to be read before.
        self.journal: JournalWriter[TierState] = JournalWriter(
            raw,
            prefix,
            TierMachine(),
            writer=self._writer,
            clock=clock,
            rng=rng,
            stop=stop,
            give_up_s=give_up_s,
        )
        self._lease = Lease(
            store,
            prefix,
            writer=self._writer,
            holder=Holder.present(),
            seconds=LEASE_SECONDS,
            clock=clock,
            known=lambda: self.journal.end,
        )
        self._renew_at_s = 0.0
        self._uploader: Uploader | None = None

    @property
    def is_taken(self) -> bool:
        """There was something to write."""
        return self._uploader is not None

    def uploader(self) -> Uploader:
        """Take lease and epoch, when that is not done yet; what puts objects under it.

        Raises:
            FencedError: A writer holds the lease, or took the epoch at the same moment.
            BackendError: The store does not answer; calling again is harmless.
        """
        if self._uploader is None:
            able = require_conditional_writes(self._store, self._rng, self._store.url)
            self._lease.acquire(
                wait=False,
                announce=lambda _state: None,
                stop=lambda seconds: self._clock.wait(self._stop, seconds),
            )
            holder = {**asdict(Holder.present()), self._does: True}
            self.journal.take_epoch(holder, remembered=self._lease.remembered)
            self._uploader = Uploader(
                self._store,
                self._prefix,
                epoch=self.journal.epoch,
                writer=self._writer,
                clock=self._clock,
                escapes_case=not able.distinguishes_case,
            )
            self._renew_at_s = self._clock.monotonic_s() + self._lease.renewal_seconds
        return self._uploader

    def renew(self) -> None:
        """Prolong the lease, when that is due.

        Raises:
            FencedError: Another writer took over.
        """
        if self.is_taken and self._clock.monotonic_s() >= self._renew_at_s:
            self._lease.renew()
            self._renew_at_s = self._clock.monotonic_s() + self._lease.renewal_seconds

    def end(self) -> None:
        """Give the lease back."""
        self._lease.release()
