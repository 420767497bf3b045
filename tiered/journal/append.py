"""Appending to a journal: put-if-absent of the next number is the one atomic point of the whole tier.

How to use it: make one, ``take_epoch`` once, then ``append``. From any thread; one waits for the other. Others than the
writer (expiry, compaction) take no epoch; they ``catch_up`` and ``append`` with a check of what they presume.

Ordering: entry ``n + 1`` is sent only after the outcome of ``n`` is known.

Retries and errors:
    * *exists*: read it. Our own bytes: done. Otherwise it is history: apply it; a newer epoch in it, or an entry of our
      own epoch that we did not send (a cloned process), means that we are fenced. Else the next number is tried.
    * *unknown*: the same bytes go again under the same number, so that a late landing is harmless; *exists* then tells.
      An entry is never re-cut while its outcome is unknown.
    * *won*: list behind the number. All that lies there must follow from our entry: entries number by number, each naming
      the one before, and no checkpoint but of one of them. Else our number had been used and deleted long ago, or the
      journal was rebuilt behind it. That, or a newer epoch among them: fenced. In a journal without epochs (an archive's) it
      only means that we slept: replay from the newest checkpoint, check, and go on.
    Whatever can be tried again is tried again, with pauses, until ``stop`` is set or ``give_up_s`` have passed; with
    ``on_failure`` also what waits for a person. No safety
    rests on a clock or on the lease.

After an error, unless it came from the caller's check, this writer is done: every later ``append`` raises
``ClosedError``, since it may be unknown what became of the last entry.

After a crash: the entry is there or it is not; nothing else has to be cleaned up.

Mirrors: a checkpoint of a journal that is all that knows its objects (a ``Guarded`` machine's) is put a second time, below
``meta/``, once it is stored itself, so that a journal whose folder is lost is not lost (``tiered.upkeep.rebuild``). A copy
that fails is counted (``unmirrored``), and nothing waits for it: the next checkpoint has its own.
"""

from __future__ import annotations

import contextlib
import math
import threading
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from backends.errors import AlreadyExistsError, BackendError, UnknownOutcomeError
from backends.wrapping import RetryingStore, RetryPolicy
from tiered.crashpoints import reached
from tiered.errors import ClosedError, DataError, FencedError, StoreUnavailableError
from tiered.journal.entry import EPOCH, Action, Entry, checksum, encode_entry
from tiered.journal.lease import NOTHING_KNOWN, Holder, JournalEnd, Lease
from tiered.journal.replay import Guarded, JournalReader, Machine
from tiered.keys import MIRROR, checkpoint_key, entry_key

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping, Sequence

    from backends.base import ObjectStore
    from tiered.clock import Clock

S = TypeVar("S")
T = TypeVar("T")

CHECKPOINT_ENTRIES = 12
"""A checkpoint is due after so many entries, so that opening a tier costs at most that many reads and a few more."""
_CHECKPOINT_REST = 20
"""After a checkpoint that took a second none is written for 20: in a hurry they cost at most a twentieth of the time."""
_PAUSE_S_MIN = 0.05
_PAUSE_S_MAX = 5.0
_READING = RetryPolicy(10, _PAUSE_S_MIN, _PAUSE_S_MAX, deadline_s=30.0, first_contact_s=0.0)
"""Of each request of a replay by itself: an opening makes seven or more, and one in five may fail in a storm. A store that
has not answered yet and cannot be reached is not asked again."""


class _LeftBehindError(Exception):
    """What we know of the journal has been trimmed."""


class JournalWriter(Generic[S]):
    """The writing end of a journal."""

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        machine: Machine[S],
        *,
        writer: str | None = None,
        clock: Clock,
        rng: random.Random,
        stop: threading.Event,
        give_up_s: float = math.inf,
        on_failure: Callable[[BackendError], None] | None = None,
        has_epochs: bool = True,
    ) -> None:
        """Prepare to write; nothing is read or written yet.

        Args:
            store: Where the journal lies. Must be able to put if absent, and must not retry by itself: an answer that
                was lost is our business here.
            writer: Our id, 8 hex digits; None: one at random.
            stop: When set, tries end with ``StoreUnavailableError`` instead of going on.
            give_up_s: They end so, too, when the store has not taken an entry for so long.
            on_failure: Told of each try that failed. Somebody hears of it, so what only a person can mend (credentials,
                say) is waited for, too, and ends no tries.
            has_epochs: Whether writers of this journal fence one another. If not, one that others have left behind, with all
                that it knew trimmed, goes on from the newest checkpoint; each ``append`` has to be right then, be it by its
                check, after it has become history unnoticed.
        """
        reading = RetryingStore(store, clock=clock, rng=rng, stop=stop, policy=_READING)
        self._reading = reading
        self._reader = JournalReader(reading, prefix, machine, writes=True)
        self._store = store
        self._prefix = prefix
        self._machine = machine
        self._clock = clock
        self._rng = rng
        self._stop = stop
        self._lock = threading.RLock()
        self._in_flight = 0
        self.writer = writer or f"{rng.getrandbits(32):08x}"
        self.epoch = 0  # our epoch; 0 before ``take_epoch`` and for writers without one
        self.unmirrored = 0  # checkpoints of which there is no second copy
        self._checkpoint_not_before_s = 0.0
        self._give_up_s = give_up_s
        self._give_up_at_s = math.inf
        self._on_failure = on_failure
        self._has_epochs = has_epochs

    @property
    def state(self) -> S:
        """The state after the last entry that we know."""
        return self._reader.state

    @property
    def number(self) -> int:
        """The last entry that we know."""
        return self._reader.number

    @property
    def end(self) -> JournalEnd:
        """How far we know the journal to reach: every entry of it is durable and history. From any thread."""
        return self._reader.end

    def catch_up(self) -> None:
        """Replay to the head. A store is asked again a few times, but not one that cannot be reached and never answered."""
        with self._lock:
            self._reader.catch_up()

    def look(self) -> None:
        """Apply what others have appended since: a request for the next entry by its number, which mostly is not there.

        Raises:
            FencedError: A newer epoch exists.
        """
        with self._lock:
            while not self._in_flight:
                found = self._reader.read_entry(self.number + 1)
                if found is None:
                    return
                self._refuse(found[0])
                self._apply(*found)

    def lease(self, store: ObjectStore, seconds: float, *, below: str = "") -> Lease:
        """A lease beside the journal, or ``below`` its prefix, that tells how far we know the journal to reach."""
        return Lease(
            store,
            self._prefix + below,
            writer=self.writer,
            holder=Holder.present(),
            seconds=seconds,
            clock=self._clock,
            known=lambda: self.end,
        )

    def take_epoch(
        self, holder: Mapping[str, Any] | None = None, *, remembered: JournalEnd = NOTHING_KNOWN
    ) -> None:
        """Begin an epoch: whatever an earlier writer has in flight will be named by no entry.

        Args:
            holder: What its entry says of who has it; None: of this process.
            remembered: What the lease told of the journal when we took it.

        Raises:
            JournalLostError: The journal ends before that.
            FencedError: Another writer took an epoch at the same moment.
        """
        with self._lock:
            self.catch_up()
            self._reader.require_reached(remembered)
            epoch = self._machine.epoch(self.state) + 1
            self.epoch = epoch
            said = asdict(Holder.present()) if holder is None else dict(holder)
            self.append([{"do": EPOCH, "epoch": epoch, "holder": said}])
            reached("epoch-taken")

    def take_epoch_anew(self, number: int, state: S, holder: Mapping[str, Any]) -> None:
        """Begin an epoch in a journal that cannot be read, at a number beyond all that may have been used.

        A writer that has won a smaller number and looks after it from now on is fenced. What lies before counts until a
        checkpoint of this entry is there (``require_checkpoint``).

        Raises:
            FencedError: Another was faster, or something lies behind ``number``.
        """
        with self._lock:
            self._reader.place(state, number - 1)
            self.epoch = self._machine.epoch(state) + 1
            self.append([{"do": EPOCH, "epoch": self.epoch, "holder": dict(holder)}])
            reached("epoch-taken")

    def require_checkpoint(self) -> None:
        """Write a checkpoint of the state after the last entry, which is to count without the entries before it."""
        with self._lock:
            self._give_up_at_s = self._clock.monotonic_s() + self._give_up_s
            self._mirror(
                self._patiently(
                    lambda: self._reader.store_checkpoint(self._put),
                    "the checkpoint is not written",
                )
            )

    def append(
        self, actions: Sequence[Action], *, check: Callable[[S], None] | None = None
    ) -> Entry:
        """Make one entry durable and apply it.

        Args:
            check: Called with the state before the first try, and again whenever another's entry came between; raises
                what it likes when the actions presume something that does not hold (any more).

        Raises:
            FencedError: A newer epoch exists. ``actions`` may have become history just before it, else never will.
            StoreUnavailableError: We were told to stop, and the store refused or the outcome is unknown; the entry may
                be or become history.
            ClosedError: An earlier call ended by an error.
        """
        with self._lock:
            return self._append(actions, check)

    def _append(self, actions: Sequence[Action], check: Callable[[S], None] | None) -> Entry:
        if self._in_flight:
            raise ClosedError(f"this journal writer has ended with entry {self._in_flight}")
        while True:
            try:
                entry = self._append_once(actions, check)
            except _LeftBehindError as left:
                self._begin_again(left)
                continue
            if entry is not None:
                return entry

    def _append_once(
        self, actions: Sequence[Action], check: Callable[[S], None] | None
    ) -> Entry | None:
        """Try the next number; None when another's entry has it, which is applied."""
        if check:
            check(self.state)
        entry = Entry(
            self.number + 1,
            self.epoch,
            self.writer,
            self._clock.now_ms(),
            actions,
            self._reader.last,
        )
        self._in_flight = entry.number  # stays when anything is raised
        won = self._make_history(entry)
        self._in_flight = 0
        return entry if won else None

    def _begin_again(self, left: _LeftBehindError) -> None:
        """Go on from the newest checkpoint: while we slept others wrote and trimmed so much that our place is gone.

        Without epochs nobody is fenced by that. What we were about to append may have become history before the place
        went, or not: the caller's ``check`` says what must not be there yet.
        """
        number = self._in_flight
        reader = JournalReader(self._reading, self._prefix, self._machine, writes=True)
        what = "what others have appended meanwhile cannot be read"
        applied = self._patiently(reader.catch_up, what)
        if reader.number < number:
            raise self._fenced(str(left)) from left
        if number not in (entry.number for entry in applied):
            # What we put there belongs to no history, and who sleeps before it might take it for some. Else the next trim
            # deletes it.
            with contextlib.suppress(BackendError):
                self._store.delete(entry_key(self._prefix, number))
        self._reader, self._in_flight = reader, 0

    def write_checkpoint(self, *, force: bool = False) -> bool:
        """Write a checkpoint if one is due (or, with ``force``, if anything happened since the last).

        Returns:
            Whether one was written. A failure is not an error: a checkpoint only makes opening faster.
        """
        with self._lock:
            return self._write_checkpoint(1 if force else CHECKPOINT_ENTRIES, force=force)

    def _write_checkpoint(self, due: int, *, force: bool) -> bool:
        if self._in_flight or self._reader.since_checkpoint < due:
            return False
        begin_s = self._clock.monotonic_s()
        if begin_s < self._checkpoint_not_before_s and not force:
            return False
        try:
            self._mirror(self._reader.store_checkpoint(self._put))
        except BackendError:
            self._checkpoint_not_before_s = self._clock.monotonic_s() + _PAUSE_S_MAX
            return False
        now_s = self._clock.monotonic_s()
        self._checkpoint_not_before_s = now_s + _CHECKPOINT_REST * (now_s - begin_s)
        return True

    def _mirror(self, checkpoint: bytes) -> None:
        """Put the second copy of the checkpoint that was just stored."""
        if not isinstance(self._machine, Guarded):
            return
        try:
            self._put(checkpoint_key(self._prefix + MIRROR, self.number), checkpoint)
        except BackendError:
            self.unmirrored += 1

    def _put(self, key: str, data: bytes) -> None:
        """Of an object that nobody changes, perhaps by an earlier try."""
        with contextlib.suppress(AlreadyExistsError):
            self._store.put_if_absent(key, data)

    def _make_history(self, entry: Entry) -> bool:
        """Whether the entry is history now; else another's is, under its number."""
        data = encode_entry(entry)
        self._give_up_at_s = self._clock.monotonic_s() + self._give_up_s
        reached("entry-begun")
        if not self._settle(entry, data):
            return False
        reached("entry-put")
        self._patiently(
            lambda: self._refuse_used_number(entry.number, data),
            "the last journal entry is written, but may have come too late",
        )
        self._reader.apply(entry, data)
        return True

    def _settle(self, entry: Entry, data: bytes) -> bool:
        """Put the entry until its outcome is known: True when it is there, False when its number was taken."""
        key = entry_key(self._prefix, entry.number)
        pause_s, unknown = _PAUSE_S_MIN, False
        while True:
            try:
                self._store.put_if_absent(key, data)
            except AlreadyExistsError:
                return self._patiently(
                    lambda: self._is_ours(entry, data),
                    "the last journal entry may or may not be written",
                )
            except BackendError as error:
                unknown = unknown or isinstance(error, UnknownOutcomeError)
                what = "may or may not be written" if unknown else "is not written"
                pause_s = self._pause(pause_s, f"the last journal entry {what}", error)
            else:
                return True

    def _is_ours(self, entry: Entry, data: bytes) -> bool:
        found = self._reader.read_entry(entry.number)
        if found is None:  # deleted between the two requests: only a number used long ago is
            raise self._left_behind("the journal has moved on far behind our back")
        other, present = found
        if present == data:
            return True
        self._refuse(other)
        self._apply(other, present)
        return False

    def _apply(self, other: Entry, data: bytes) -> None:
        try:
            self._reader.apply(other, data)
        except DataError as error:  # an entry that follows another history than ours
            raise self._left_behind(f"{error.what} that we know") from error

    def _refuse(self, other: Entry) -> None:
        """Stop when another writer's entry shows that our epoch is over."""
        if not self.epoch:
            return
        for action in other.actions:
            if action.get("do") == EPOCH and action["epoch"] >= self.epoch:
                raise self._fenced(f"{other.writer} took over with journal entry {other.number}")
        if other.epoch >= self.epoch:
            raise self._fenced(
                f"journal entry {other.number} is of epoch {other.epoch} and is not ours; "
                "this process was cloned, or another has taken over"
            )

    def _refuse_used_number(self, number: int, data: bytes) -> None:
        """Hold what lies behind the entry that we put against it."""
        entries, checkpoints = self._reader.behind(number)
        used = f"journal entry {number} had been written before and deleted, or the journal was rebuilt"
        row = {number: checksum(data)}
        for later in sorted(entries):
            found = self._reader.read_entry(later)
            if found is not None:
                self._refuse(found[0])
            if found is None or found[0].previous != row.get(later - 1):
                raise self._left_behind(used)
            row[later] = checksum(found[1])
        for covered in checkpoints:
            if covered not in row or not self._is_of(covered, row[covered]):
                raise self._left_behind(used)

    def _is_of(self, number: int, last: int) -> bool:
        """Whether a checkpoint is of the entry with this checksum; one that nobody believes may be of any."""
        try:
            known = self._reader.read_checkpoint_text(number)
        except DataError:
            return True
        return known is None or known.last == last

    def _patiently(self, request: Callable[[], T], what: str) -> T:
        """Make a request that changes nothing until it is answered."""
        pause_s = _PAUSE_S_MIN
        while True:
            try:
                return request()
            except BackendError as error:
                pause_s = self._pause(pause_s, what, error)

    def _pause(self, pause_s: float, what: str, error: BackendError) -> float:
        """Wait before another try; the next pause."""
        may_help = error.retriable
        if self._on_failure is not None:
            self._on_failure(error)
            may_help = True
        wait_s = pause_s * self._rng.uniform(0.5, 1.0)
        has_given_up = self._clock.monotonic_s() + wait_s > self._give_up_at_s
        if not may_help or has_given_up or self._clock.wait(self._stop, wait_s):
            raise StoreUnavailableError(
                f"{what}: {error}",
                where=self._store.url,
                do="nothing is lost; try again when the store answers",
            ) from error
        return min(pause_s * 2, _PAUSE_S_MAX)

    def _left_behind(self, why: str) -> Exception:
        """What to raise when the journal is not what we know any more."""
        return self._fenced(why) if self._has_epochs else _LeftBehindError(why)

    def _fenced(self, why: str) -> FencedError:
        return FencedError(
            f"another writer has taken over this tier: {why}",
            where=f"{self._store.url}/{self._prefix}",
            do="find out which broker may write; `tiered lease` shows the holder",
        )
