"""A store that fails by rule, so that a seed replays a run of bad luck.

What can go wrong with one request:

=============== =================================================== ==============================
fault           what happens                                        what the caller sees
=============== =================================================== ==============================
UNAVAILABLE     nothing                                             UnavailableError
FULL            nothing                                             StoreFullError
DENIED          nothing                                             PermissionDeniedError
LOST_REQUEST    nothing                                             UnknownOutcomeError
LOST_ANSWER     it is done                                          UnknownOutcomeError
LATE            it is done when ``land_late`` is called             UnknownOutcomeError
TWICE           it is done, and done again                          the second answer
CRASH_BEFORE    nothing                                             SimulatedCrash
CRASH_AFTER     it is done                                          SimulatedCrash
FLIP            a read gives one wrong bit                          wrong bytes
CUT             a read breaks off                                   ShortReadError
=============== =================================================== ==============================

TWICE is what a network does that delivers a request again: a creation finds its own object there, and a compare-and-set
its own version. ``stale`` names a part of keys of which listings may show what was there a few changes ago.

A read that is lost is unavailable, since no read has an unknown outcome; FLIP and CUT pass by what
is not a read of bytes. What lands late lands as a server would do it: unless its condition no longer
holds, whatever that means to the writer who has long gone on.

Any thread may call anything; with several threads the order of requests, and so the use of the
seed, is theirs.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from backends.base import as_chunks
from backends.errors import (
    BackendError,
    ObjectNotFoundError,
    PermissionDeniedError,
    ShortReadError,
    StoreFullError,
    UnavailableError,
    UnknownOutcomeError,
)
from backends.lazy_dataclass import dataclass
from backends.wrapping import WrappingStore

if TYPE_CHECKING:
    import builtins
    import random
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from typing_extensions import Buffer

    from backends.base import ByteRange, ObjectInfo, ObjectStore, Version


_T = TypeVar("_T")
WRITES = frozenset({"put", "delete", "compare_and_set"})
READS = frozenset({"get", "head", "list"})
_STALE_MAX = 8
"""A listing is at most so many changes behind."""


class Fault(enum.Enum):
    """What goes wrong with a request; the module's table says when."""

    UNAVAILABLE = enum.auto()
    FULL = enum.auto()
    DENIED = enum.auto()
    LOST_REQUEST = enum.auto()
    LOST_ANSWER = enum.auto()
    LATE = enum.auto()
    TWICE = enum.auto()
    CRASH_BEFORE = enum.auto()
    CRASH_AFTER = enum.auto()
    FLIP = enum.auto()
    CUT = enum.auto()


class SimulatedCrash(BaseException):
    """The process is gone. No ``except Exception`` catches it."""


@dataclass(slots=True)
class Rule:
    """When to fail. The first rule that matches and strikes decides about a request."""

    fault: Fault  # how
    operations: frozenset[str] = WRITES  # of ``WRITES`` and ``READS``
    key_part: str = ""  # what the key (of a listing: the prefix) has in it
    skip: int = 0  # how many matching requests pass first
    times: int | None = 1  # how often it strikes; None for ever
    probability: float = 1.0  # how likely it strikes when it may

    def strikes(self, operation: str, key: str, rng: random.Random) -> bool:
        """Whether to fail this request; uses up ``skip`` and ``times``."""
        if operation not in self.operations or self.key_part not in key or self.times == 0:
            return False
        if self.skip:
            self.skip -= 1
            return False
        if rng.random() >= self.probability:
            return False
        if self.times is not None:
            self.times -= 1
        return True


@dataclass(frozen=True, slots=True)
class Event:
    """One request and what was done to it (None: nothing)."""

    operation: str
    key: str
    fault: Fault | None


class FaultyStore(WrappingStore):
    """A store that fails by rule; see the module's table."""

    def __init__(self, inner: ObjectStore, rng: random.Random, *rules: Rule) -> None:
        """Wrap a store; ``rng`` decides what rules leave to chance. The first rule that strikes decides."""
        super().__init__(inner)
        self._rng = rng
        self._rules = list(rules)
        self._late: builtins.list[Callable[[], object]] = []  # writes on their way
        self._lock = threading.Lock()
        self.events: list[Event] = []  # all requests, and what was done to them
        self.stale = ""  # what is in keys of which listings may be stale; empty: in none
        self._changes: deque[tuple[str, ObjectInfo | None]] = deque(maxlen=_STALE_MAX)

    def add(self, *rules: Rule) -> None:
        """Add rules behind the others."""
        with self._lock:
            self._rules.extend(rules)

    def heal(self) -> None:
        """Drop all rules. What is on its way may still land."""
        with self._lock:
            self._rules.clear()

    def land_late(self, count: int | None = None) -> int:
        """Let ``count`` (None: all) writes that are on their way land, in an order by chance; how many there were."""
        with self._lock:
            self._rng.shuffle(self._late)
            landing = self._late[:count]
            del self._late[: len(landing)]
        for write in landing:
            with suppress(BackendError):
                write()
        return len(landing)

    def put_if_absent(self, key: str, data: Sequence[Buffer] | Buffer) -> None:
        body = b"".join(as_chunks(data))  # now: what lands late must not see later changes
        self._write("put", key, lambda: self._inner.put_if_absent(key, body))

    def delete(self, key: str) -> None:
        self._write("delete", key, lambda: self._inner.delete(key))

    def compare_and_set(self, key: str, data: bytes, expected: Version | None) -> Version:
        return self._write(
            "compare_and_set", key, lambda: self._inner.compare_and_set(key, data, expected)
        )

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        fault = self._fail_read("get", key)
        return self._damaged(fault, key, self._inner.get(key, byte_range))

    def get_ranges(self, key: str, byte_ranges: Sequence[ByteRange]) -> builtins.list[bytes]:
        return [self.get(key, byte_range) for byte_range in byte_ranges]

    def get_versioned(self, key: str) -> tuple[bytes, Version]:
        fault = self._fail_read("get", key)
        data, version = self._inner.get_versioned(key)
        return self._damaged(fault, key, data), version

    def head(self, key: str) -> ObjectInfo:
        self._fail_read("head", key)
        return self._inner.head(key)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """CUT ends a listing in its middle."""
        fault = self._fail_read("list", prefix)
        found = self._inner.list(prefix, start_after=start_after)
        if self.stale and self._changes:
            found = self._as_it_was(found, prefix, start_after)
        if fault is not Fault.CUT:
            yield from found
            return
        whole = [*found]
        yield from whole[: self._rng.randint(0, len(whole))]
        raise UnavailableError(f"listing broke off (injected): {prefix!r}")

    def _write(self, operation: str, key: str, write: Callable[[], _T]) -> _T:
        fault = self._choose(operation, key)
        _raise_before(fault, key)
        if fault is Fault.LOST_REQUEST:
            raise UnknownOutcomeError(f"request lost (injected): {key!r}")
        if fault is Fault.LATE:
            with self._lock:
                self._late.append(write)
            raise UnknownOutcomeError(f"request late (injected): {key!r}")
        done = self._noted(key, write)
        if fault is Fault.TWICE:
            done = write()
        if fault is Fault.LOST_ANSWER:
            raise UnknownOutcomeError(f"answer lost (injected): {key!r}")
        if fault is Fault.CRASH_AFTER:
            raise SimulatedCrash(key)
        return done

    def _noted(self, key: str, write: Callable[[], _T]) -> _T:
        """Write, and remember what was changed, where listings may be stale."""
        if not (self.stale and self.stale in key):
            return write()
        before = self._info(key)
        done = write()
        self._changes.append((key, before))
        return done

    def _info(self, key: str) -> ObjectInfo | None:
        try:
            return self._inner.head(key)
        except ObjectNotFoundError:
            return None

    def _as_it_was(
        self, found: Iterable[ObjectInfo], prefix: str, after: str
    ) -> Iterator[ObjectInfo]:
        """A listing without some of the last changes."""
        with self._lock:
            some = [*self._changes][self._rng.randint(0, len(self._changes)) :]
        was = {key: info for key, info in reversed(some) if key.startswith(prefix) and key > after}
        listed = {info.key: info for info in found}
        for key, info in was.items():
            listed.pop(key, None)
            if info is not None:
                listed[key] = info
        yield from (listed[key] for key in sorted(listed, key=str.encode))

    def _fail_read(self, operation: str, key: str) -> Fault | None:
        fault = self._choose(operation, key)
        _raise_before(fault, key)
        if fault in {Fault.LOST_REQUEST, Fault.LOST_ANSWER, Fault.LATE}:
            raise UnavailableError(f"answer lost (injected): {key!r}")
        if fault is Fault.CRASH_AFTER:
            raise SimulatedCrash(key)
        return fault

    def _damaged(self, fault: Fault | None, key: str, data: bytes) -> bytes:
        if fault is Fault.CUT:
            raise ShortReadError(f"answer broke off (injected): {key!r}")
        if fault is Fault.FLIP and data:
            wrong = bytearray(data)
            wrong[self._rng.randrange(len(wrong))] ^= 1 << self._rng.randrange(8)
            return bytes(wrong)
        return data

    def _choose(self, operation: str, key: str) -> Fault | None:
        with self._lock:
            struck = (rule for rule in self._rules if rule.strikes(operation, key, self._rng))
            rule = next(struck, None)
            fault = None if rule is None else rule.fault
            self.events.append(Event(operation, key, fault))
            return fault


_REFUSALS: dict[Fault | None, type[BackendError]] = {
    Fault.UNAVAILABLE: UnavailableError,
    Fault.FULL: StoreFullError,
    Fault.DENIED: PermissionDeniedError,
}


def _raise_before(fault: Fault | None, key: str) -> None:
    if fault in _REFUSALS:
        raise _REFUSALS[fault](f"refused (injected): {key!r}")
    if fault is Fault.CRASH_BEFORE:
        raise SimulatedCrash(key)
