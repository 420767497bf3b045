"""The lease: who writes and until when. For politeness; the journal is what fences.

The object ``lease`` is the one mutable object of a tier, changed only by compare-and-set. Form: ``seal_text`` of
``{"format":1,"holder":{…},"writer":"0badcafe","expires_ms":…,"released":false,"epoch":3,"number":17}``.

``epoch`` and ``number`` are those of the last journal entry that any holder has known to be history: they may lag
behind the journal, and never lead. Who takes, renews, frees or breaks a lease keeps what it said, so that a journal that has
lost its end is noticed (``tiered.journal.replay``). Nothing else rests on it.

Rules: an absent, released or unreadable lease is free. One that has expired by our wall clock is free once we have watched
it for a while (``WATCH_S``, or our own duration if that is shorter) and nobody has renewed it: the holder's clock may be far
behind ours. One whose holder was a process of this host and this boot that no longer runs is free at once. Else we wait for
it, saying so, or give up.
A holder renews at a third of the duration. While the store does not answer it goes on trying, however long that takes:
afterwards the lease is still its own, or another has taken it, and then it stops (``FencedError``). Two that write at
once meanwhile do no harm, since the journal has room for one.
Where an answer is lost the lease is read back: it bears the writer's id, so a write that landed late is known as ours.

After a crash the lease stays until it expires, or is taken at once by a process of the same host.
A holder that is stopped (not ended) in the very write of its lease, on a folder, keeps the folder's lock as well: others
end with an error that names it, and work when it goes on or is killed.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from backends.errors import (
    BackendError,
    ObjectNotFoundError,
    PreconditionFailedError,
    UnknownOutcomeError,
)
from backends.lazy_dataclass import dataclass
from backends.wrapping import set_own
from tiered.crashpoints import reached
from tiered.errors import DataError, FencedError, OtherVersionError
from tiered.journal.entry import AnyInt, as_document, document_of, open_text, seal_text
from tiered.keys import LEASE, NUMBER_DIGITS, OFFSET_DIGITS

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.base import ObjectStore, Version
    from tiered.clock import Clock

_TRIES = 6
WATCH_S = 15.0
"""How long an expired lease is watched, at most: longer than the default lease, and than the renewals of one of 45 s."""
_NUMBER_END: int = 10 ** (OFFSET_DIGITS - 1)
_EPOCH_END: int = 10**NUMBER_DIGITS - 1
"""What a lease says beyond these no writer of ours can have said; there is room behind them for a rebuild."""


class JournalEnd(NamedTuple):
    """How far a journal reaches, or did when somebody looked."""

    epoch: AnyInt = 0  # the newest epoch; 0: none
    number: AnyInt = 0  # of the last entry; 0: none
    history: str = ""  # which history it is, for ``rebuild``; empty: it is not told

    def or_later(self, other: JournalEnd) -> JournalEnd:
        """The later of both: neither number ever falls."""
        later = max(self.epoch, other.epoch), max(self.number, other.number)
        return JournalEnd(*later, other.history or self.history)

    def is_beyond(self, other: JournalEnd) -> bool:
        """Whether this tells of something that the other does not."""
        return self.epoch > other.epoch or self.number > other.number


NOTHING_KNOWN = JournalEnd()


@dataclass(frozen=True, slots=True)
class Holder:
    """A process, so that its end can be seen on the same host."""

    host: str  # host name
    boot: str  # id of the host's boot; a process id means nothing after another boot
    space: str  # id of the process-id namespace; a process id means nothing in another container
    pid: AnyInt  # process id
    started: AnyInt
    """Start time of the process in clock ticks since boot; tells it from a later one with the same id."""

    @classmethod
    def present(cls) -> Holder:
        """This process."""
        pid = os.getpid()
        return cls(socket.gethostname(), _boot_id(), _pid_space(), pid, _started(pid) or 0)

    def is_gone(self) -> bool:
        """Whether this was a process of this host, boot and container that no longer runs."""
        if not (self.boot and self.space):
            return False  # a system that cannot tell
        here = (self.host, self.boot, self.space) == (
            socket.gethostname(),
            _boot_id(),
            _pid_space(),
        )
        return here and _started(self.pid) != self.started


@dataclass(frozen=True, slots=True)
class LeaseState:
    """What the lease object says; ``end``: of the journal, as it was known to its holders."""

    holder: Holder
    writer: str
    expires_ms: AnyInt
    released: bool
    end: JournalEnd = NOTHING_KNOWN


_UNKNOWN = LeaseState(Holder("another host", "", "", 0, 0), "", 0, released=False)
"""Who was faster than we, when not even the lease tells."""


class Lease:
    """Our hold on a tier. Used by one thread at a time."""

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        *,
        writer: str,
        holder: Holder,
        seconds: float,
        clock: Clock,
        known: Callable[[], JournalEnd] = JournalEnd,
    ) -> None:
        """Take nothing yet.

        Args:
            seconds: How long it lasts from each renewal on.
            known: The journal's end, as we know it now; from any thread.
        """
        self._store = store
        self._key = prefix + LEASE
        self._writer = writer
        self._holder = holder
        self._seconds = seconds
        self._clock = clock
        self._known = known
        self._version: Version | None = None
        # The journal's end as the lease told when we took it, or as we have told it since.
        self.remembered = JournalEnd()
        # When the last write of it that succeeded began, by a clock that never goes back; it lasts from then on.
        self.written_s = -math.inf
        self._seen: tuple[Version | None, float] = None, 0.0
        """Of another's lease, and since when it is so."""

    def try_acquire(self) -> LeaseState | None:
        """Take the lease if it is free; one that has expired only when earlier calls have seen it as it is for a while.

        Returns:
            None when it is ours now; else who has it.
        """
        present: LeaseState | None = None
        for tries_left in reversed(range(_TRIES)):
            present, version = read_lease(self._store, self._key)
            if present and present.writer != self._writer and not self._is_free(present, version):
                return present
            if present:
                self.remembered = self.remembered.or_later(present.end)
            try:
                self._write(version)
            except PreconditionFailedError:
                continue  # another was faster, or a write of ours landed late: look again
            except UnknownOutcomeError:
                if not tries_left:
                    raise
                continue  # what became of it is told by the lease itself
            reached("lease-taken")
            return None
        return present or _UNKNOWN

    def acquire(
        self, *, wait: bool, announce: Callable[[LeaseState], None], stop: Callable[[float], bool]
    ) -> None:
        """Take the lease, waiting for a living holder's to end if asked to. One that has expired is watched in any case.

        Args:
            stop: Waits so many seconds; True when we were told to stop.

        Raises:
            FencedError: Another holder has it (and we do not wait, or were told to stop).
        """
        told, first = False, None
        while (other := self.try_acquire()) is not None:
            first = first or other
            is_silent = other == first and self._has_expired(other)
            if wait and not told:
                announce(other)
                told = True
            if not (wait or is_silent) or stop(min(1.0, self._seconds / 4)):
                raise self._held(other, first)

    def _held(self, other: LeaseState, first: LeaseState) -> FencedError:
        """What is said of a holder that lives; ``first``: what its lease said when we came."""
        where = f"{self._store.url}/{self._key}"
        holder = f"process {other.holder.pid} on {other.holder.host}"
        if other == first or not (self._has_expired(first) or self._has_expired(other)):
            return FencedError(
                f"a writer is at work: {holder} holds the lease",
                where=where,
                do="stop that writer, or wait until its lease ends",
            )
        behind_s = self._seconds + (self._clock.now_ms() - other.expires_ms) / 1000
        return FencedError(
            f"{holder} renews its lease, which our clock calls expired: its clock is about {behind_s:.0f} s behind ours",
            where=where,
            do="set the clocks; stop that writer, or wait until its lease ends",
        )

    @property
    def renewal_seconds(self) -> float:
        """How often to call ``renew``."""
        return self._seconds / 3

    def renew(self) -> None:
        """Prolong the lease.

        Raises:
            FencedError: Another has it: stop writing.
        """
        try:
            self._write(self._version)
        except PreconditionFailedError:
            self._write(self._version_of_ours())

    def release(self) -> None:
        """Give the lease back, if it is still ours. A failure is not an error: it expires by itself."""
        if self._version is None:
            return
        reached("lease-held")
        with contextlib.suppress(BackendError, FencedError):
            try:
                self._write(self._version, released=True)
            except PreconditionFailedError:
                self._write(self._version_of_ours(), released=True)
        self._version = None

    def _version_of_ours(self) -> Version | None:
        """After a refused write: the version to replace, if a write of ours had landed late."""
        present, version = self._read_back()
        damaged = present is None and version is not None  # free, and so ours as well as anybody's
        if not damaged and (present is None or present.writer != self._writer):
            raise FencedError(
                "another writer has taken the lease",
                where=f"{self._store.url}/{self._key}",
                do="`tiered lease` shows the holder",
            )
        return version

    def _read_back(self) -> tuple[LeaseState | None, Version | None]:
        """The lease that should be ours."""
        try:
            return read_lease(self._store, self._key)
        except OtherVersionError as error:
            raise FencedError(
                f"another writer has taken the lease: {error.what}", where=error.where
            ) from error

    def _has_expired(self, present: LeaseState) -> bool:
        return present.expires_ms <= self._clock.now_ms()

    def _is_free(self, present: LeaseState, version: Version | None) -> bool:
        now_s = self._clock.monotonic_s()
        if self._seen[0] != version:
            self._seen = version, now_s
        is_silent = now_s - self._seen[1] >= min(WATCH_S, self._seconds)
        expired = self._has_expired(present) and is_silent
        return present.released or expired or present.holder.is_gone()

    def _write(self, expected: Version | None, *, released: bool = False) -> None:
        self.remembered = self.remembered.or_later(self._known())
        began_s = self._clock.monotonic_s()
        expires_ms = self._clock.now_ms() + round(self._seconds * 1000)
        said = LeaseState(self._holder, self._writer, expires_ms, released, self.remembered)
        try:
            self._version = set_own(self._store, self._key, encode_lease(said), expected)
        except UnknownOutcomeError:
            present, version = self._read_back()
            if present is None or present.writer != self._writer or version == expected:
                raise
            self._version = version
        self.written_s = began_s


def encode_lease(said: LeaseState) -> bytes:
    """The object's bytes."""
    return seal_text({"format": 1, **document_of(said)})


def read_lease(store: ObjectStore, key: str) -> tuple[LeaseState | None, Version | None]:
    """The lease and its version; a lease that is damaged is as good as none, but has a version."""
    try:
        data, version = store.get_versioned(key)
    except ObjectNotFoundError:
        return None, None
    try:
        document = open_text(data, where=key)
    except DataError:
        return None, version
    del document["format"]
    try:
        found = as_document(LeaseState).decode(document)
    except ValueError as error:
        raise OtherVersionError(f"a lease has another form: {error}", where=key) from error
    return (found if _is_possible(found) else None), version


def _is_possible(found: LeaseState) -> bool:
    """Whether a clock and a system can have made it: the checksum says nothing of who did."""
    epoch, number, _ = found.end
    numbers = (found.expires_ms, found.holder.pid, found.holder.started, epoch, number)
    if any(abs(value) >= _NUMBER_END for value in numbers):
        return False
    return 0 <= number < _NUMBER_END and 0 <= epoch < _EPOCH_END


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


def _pid_space() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _started(pid: int) -> int | None:
    """Start time of a process in ticks since boot; None when there is none that runs (or no /proc)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])  # a zombie writes no more
