"""Appending to a journal: put-if-absent of the next number is the one atomic point of the whole tier.

How to use it: ``JournalWriter.open``, ``take_reign`` once, then ``append`` from one thread at a time.

Ordering: entry ``n + 1`` is sent only after the outcome of ``n`` is known.

Retries and errors:
    * *exists*: read it. Our own bytes: done. Otherwise it is history: apply it; a newer reign in it, or an entry of our
      own generation that we did not send (a cloned process), means that we are fenced. Else the next number is tried.
    * *unknown*: read the number. Absent: the same bytes go again under the same number, so that a late landing is
      harmless. An entry is never re-cut while its outcome is unknown.
    * *won*: list behind the number. A checkpoint or an entry there means that the number had been used and deleted long
      ago: fenced.
    No safety rests on a clock or on the lease.

After a crash: the entry is there or it is not; nothing else has to be cleaned up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from backends.errors import AlreadyExistsError, BackendError, UnknownOutcomeError
from tiered.errors import FencedError, StoreUnavailableError
from tiered.journal.entry import REIGN, Action, Entry, encode_entry
from tiered.journal.reader import JournalReader, Machine
from tiered.keys import checkpoint_key, entry_key

if TYPE_CHECKING:
    import random
    import threading
    from collections.abc import Mapping, Sequence

    from backends.base import ObjectStore
    from tiered.clock import Clock

S = TypeVar("S")

CHECKPOINT_ENTRIES = 12
"""A checkpoint is due after so many entries, so that opening a tier costs at most that many reads and a few more."""
_PAUSE_S_MIN = 0.05
_PAUSE_S_MAX = 5.0


class JournalWriter(Generic[S]):
    """The writing end of a journal.

    Attributes:
        writer: Our 8-hex-digit id.
        generation: Our reign; 0 before ``take_reign``.
    """

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        machine: Machine[S],
        *,
        writer: str,
        clock: Clock,
        rng: random.Random,
        stop: threading.Event,
    ) -> None:
        """Prepare to write; nothing is read or written yet.

        Args:
            store: Where the journal lies. Must be able to put if absent.
            prefix: Of the broker (or archive), ending in a slash.
            machine: The state machine.
            writer: Random id of this process, 8 hex digits.
            clock: For the time stamps and the pauses between tries.
            rng: For the jitter of the pauses.
            stop: When set, tries end with ``StoreUnavailableError`` instead of going on.
        """
        self._reader = JournalReader(store, prefix, machine)
        self._store = store
        self._prefix = prefix
        self._machine = machine
        self._clock = clock
        self._rng = rng
        self._stop = stop
        self.writer = writer
        self.generation = 0

    @property
    def state(self) -> S:
        """The state after the last entry that we know."""
        return self._reader.state

    @property
    def number(self) -> int:
        """The last entry that we know."""
        return self._reader.number

    def catch_up(self) -> None:
        """Replay to the head."""
        self._reader.catch_up()

    def take_reign(self, holder: Mapping[str, Any]) -> None:
        """Begin to reign: whatever an earlier writer has in flight will be named by no entry.

        Args:
            holder: Who we are, for people (host, process, store).

        Raises:
            FencedError: Another writer took a reign at the same moment.
        """
        self._reader.catch_up()
        generation = self._machine.generation(self.state) + 1
        self.generation = generation
        self.append([{"do": REIGN, "generation": generation, "holder": dict(holder)}])

    def append(self, actions: Sequence[Action]) -> Entry:
        """Make one entry durable and apply it.

        Raises:
            FencedError: A newer reign exists. Nothing of ``actions`` is history, now or later.
            StoreUnavailableError: The outcome is unknown and we were told to stop; the entry may become history.
        """
        while True:
            entry = Entry(
                self.number + 1,
                self.generation,
                self.writer,
                self._clock.now_ms(),
                actions,
            )
            if self._settle(entry):
                self._reader.apply(entry)
                self._refuse_used_number(entry.number)
                return entry

    def write_checkpoint(self, *, force: bool = False) -> bool:
        """Write a checkpoint if one is due (or, with ``force``, if anything happened since the last).

        Returns:
            Whether one was written. A failure is no error: a checkpoint only makes opening faster.
        """
        due = 1 if force else CHECKPOINT_ENTRIES
        if self._reader.since_checkpoint < due:
            return False
        try:
            self._store.put_if_absent(
                checkpoint_key(self._prefix, self.number), self._reader.checkpoint_bytes()
            )
        except AlreadyExistsError:
            pass
        except BackendError:
            return False
        self._reader.since_checkpoint = 0
        return True

    def _settle(self, entry: Entry) -> bool:
        """Put the entry until its outcome is known: True when it is history, False when its number was taken."""
        data = encode_entry(entry)
        key = entry_key(self._prefix, entry.number)
        pause_s, unknown = _PAUSE_S_MIN, False
        while True:
            try:
                self._store.put_if_absent(key, data)
            except AlreadyExistsError:
                return self._is_ours(entry, data)
            except BackendError as error:
                unknown = unknown or isinstance(error, UnknownOutcomeError)
                if not error.retriable:
                    raise
                pause_s = self._pause(pause_s, unknown, error)
            else:
                return True

    def _is_ours(self, entry: Entry, data: bytes) -> bool:
        found = self._reader.read_entry(entry.number)
        if found is None:  # deleted between the two requests: only a number used long ago is
            raise self._fenced("the journal has moved on far behind our back")
        other, present = found
        if present == data:
            return True
        self._refuse(other)
        self._reader.apply(other)
        return False

    def _refuse(self, other: Entry) -> None:
        """Stop when an entry of another hand shows that we no longer reign."""
        for action in other.actions:
            if action["do"] == REIGN and action["generation"] >= self.generation:
                raise self._fenced(f"{other.writer} took over with journal entry {other.number}")
        if self.generation and other.generation == self.generation:
            raise self._fenced(
                f"journal entry {other.number} is of our own generation and is not ours; "
                "this process was cloned"
            )

    def _refuse_used_number(self, number: int) -> None:
        entries, checkpoints = self._reader.behind(number)
        if any(later > number for later in checkpoints):
            raise self._fenced("a checkpoint lies behind the entry that we wrote")
        for later in entries:
            found = self._reader.read_entry(later)
            if found:
                self._refuse(found[0])

    def _pause(self, pause_s: float, unknown: bool, error: BackendError) -> float:
        if self._clock.wait(self._stop, pause_s * self._rng.uniform(0.5, 1.0)):
            what = "may or may not be written" if unknown else "is not written"
            raise StoreUnavailableError(
                f"the last journal entry {what}: {error}",
                where=self._store.url,
                do="nothing is lost; attach again when the store answers",
            ) from error
        return min(pause_s * 2, _PAUSE_S_MAX)

    def _fenced(self, why: str) -> FencedError:
        return FencedError(
            f"another writer has taken over this tier: {why}",
            where=f"{self._store.url}/{self._prefix}",
            do="find out which broker may write; `tiered lease` shows the holder",
        )
