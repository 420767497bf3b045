"""Waiting out what a person must mend: what troubles a store, said once, and refusals that are tried again.

Overview: attach puts a ``PatientStore`` around its store. It notes what goes wrong, by kind of request, until a request of
that kind goes well again. ``troubles`` is what the metrics show; the log has a line when trouble begins, one a minute
while it lasts, and one when it has ended.

Retries and errors: nothing is retried here. Once ``wait_out_refusals`` was called, a refusal (credentials revoked or
expired, a permission taken away, a certificate that is not accepted any more) comes as a ``RefusedForNowError``, which
those above try again as they do any outage: whoever follows a broker for months must not end because a key was rotated.
Before that, and for whoever runs once, a refusal ends the run. A refused write has changed nothing, so trying again is
harmless.

A store that is nearly full takes small objects and refuses large ones. So it counts as full until it has taken one that was
put after the last refusal and is as large as the smallest refused one, or has refused none for a minute. Else each journal
entry would end the trouble, and each part begin it anew, with a line in the log for both.

Any thread may call anything. After a crash nothing is left.
"""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from backends.base import get_into, size_bytes
from backends.errors import (
    BackendError,
    PermissionDeniedError,
    StoreFullError,
    UnavailableError,
    UnreachableError,
    UntrustedError,
)
from backends.local_files import MAKE_ROOM
from backends.wrapping import WrappingStore

if TYPE_CHECKING:
    import builtins
    from collections.abc import Iterator, Sequence

    from typing_extensions import Buffer

    from backends.base import ByteRange, ObjectInfo, ObjectStore, Version
    from tiered.clock import Clock

PERMISSION, FULL, TRUST, UNREACHABLE, FAILING = (
    "permission", "full", "trust", "unreachable", "failing",
)  # fmt: skip
_REASONS: dict[type[BackendError], str] = {  # the first that fits counts
    PermissionDeniedError: PERMISSION,
    UntrustedError: TRUST,
    StoreFullError: FULL,
    UnreachableError: UNREACHABLE,
    UnavailableError: FAILING,
}
REASONS = tuple(_REASONS.values())
_ADVICE = {
    PERMISSION: "mend credentials or permissions",
    FULL: MAKE_ROOM,
    TRUST: "mend the certificate",
    UNREACHABLE: "see whether it runs",
    FAILING: "see to the store",
}
_PASSING = frozenset({UNREACHABLE, FAILING})
"""What mostly passes by itself, and is said only when it lasts."""
_LASTING_S = 10.0
_AGAIN_S = 60.0
_LOG = logging.getLogger("tiered.attach")


class RefusedForNowError(PermissionDeniedError):
    """The store refuses us, and somebody may mend that while we wait."""

    retriable = True


@dataclass(frozen=True, slots=True)
class Trouble:
    """What goes wrong just now.

    Attributes:
        kind: Of request: ``put``, ``replace`` (the lease), ``get``, ``list`` or ``delete``.
        reason: One of ``REASONS``.
        since_s: Monotonic time of its first failure.
        error: The latest one.
        said_s: When the log last told of it; None: not yet.
        latest_s: Of its latest failure.
        size_bytes: Of the smallest request that failed so.
    """

    kind: str
    reason: str
    since_s: float
    error: str
    said_s: float | None
    latest_s: float
    size_bytes: int


class PatientStore(WrappingStore):
    """A store whose troubles are known; see the module's contract."""

    def __init__(self, inner: ObjectStore, clock: Clock) -> None:
        """Wrap a store; refusals end the run until ``wait_out_refusals``."""
        super().__init__(inner)
        self._clock = clock
        self._lock = threading.Lock()
        self._troubles: dict[str, Trouble] = {}
        self._waits = False

    def wait_out_refusals(self) -> None:
        """From now on a refusal may be tried again."""
        self._waits = True

    def troubles(self) -> list[Trouble]:
        """What goes wrong just now, by kind of request."""
        with self._lock:
            return list(self._troubles.values())

    def seconds_waiting(self) -> dict[str, float]:
        """For each reason how long it has lasted; 0: it does not hold."""
        now_s = self._clock.monotonic_s()
        found = dict.fromkeys(REASONS, 0.0)
        for one in self.troubles():
            found[one.reason] = max(found[one.reason], now_s - one.since_s)
        return found

    def put_if_absent(self, key: str, data: Sequence[Buffer] | Buffer) -> None:
        """See ``ObjectStore``."""
        with self._watched("put", size_bytes(data)):
            self._inner.put_if_absent(key, data)

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """See ``ObjectStore``."""
        with self._watched("get"):
            return self._inner.get(key, byte_range)

    def get_into(self, key: str, byte_range: ByteRange, target: memoryview) -> None:
        """See ``IntoStore``."""
        with self._watched("get"):
            get_into(self._inner, key, byte_range, target)

    def get_ranges(self, key: str, byte_ranges: Sequence[ByteRange]) -> builtins.list[bytes]:
        """See ``ObjectStore``."""
        with self._watched("get"):
            return self._inner.get_ranges(key, byte_ranges)

    def get_versioned(self, key: str) -> tuple[bytes, Version]:
        """See ``ObjectStore``."""
        with self._watched("get"):
            return self._inner.get_versioned(key)

    def head(self, key: str) -> ObjectInfo:
        """See ``ObjectStore``."""
        with self._watched("get"):
            return self._inner.head(key)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """See ``ObjectStore``."""
        with self._watched("list"):
            yield from self._inner.list(prefix, start_after=start_after)

    def delete(self, key: str) -> None:
        """See ``ObjectStore``."""
        with self._watched("delete"):
            self._inner.delete(key)

    def compare_and_set(self, key: str, data: bytes, expected: Version | None) -> Version:
        """See ``ObjectStore``."""
        with self._watched("replace", len(data)):
            return self._inner.compare_and_set(key, data, expected)

    @contextmanager
    def _watched(self, kind: str, size: int = 0) -> Iterator[None]:
        began_s = self._clock.monotonic_s()
        try:
            yield
        except BackendError as error:
            self._note(kind, error, began_s, size)
            met = self._as_met(error)
            if met is error:
                raise
            raise met from error
        self._note(kind, None, began_s, size)

    def _as_met(self, error: BackendError) -> BackendError:
        refused = isinstance(error, PermissionDeniedError | UntrustedError)
        return RefusedForNowError(str(error)) if refused and self._waits else error

    def _note(self, kind: str, error: BackendError | None, began_s: float, size: int) -> None:
        """Take in how a request went, and say what is to be said."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            before = self._troubles.get(kind)
            if error is None:
                if before is None or _outlasts(before, began_s, size):
                    return
                after = None
            else:
                after = plan_trouble(before, kind, error, now_s, size)
                after = after and self._once(after)
            self._troubles.pop(kind, None)
            if after is not None:
                self._troubles[kind] = after
        if after is not None and after.said_s == now_s:
            _LOG.warning("%s", _line(after, now_s))
        elif after is None and before is not None and before.said_s is not None:
            passed_s = now_s - before.since_s
            _LOG.warning("the store takes %s requests again, after %.0f s", kind, passed_s)

    def _once(self, trouble: Trouble) -> Trouble:
        """A store that is full is full for parts and for the lease: one of the two is told of."""
        others = [one for one in self._troubles.values() if one.kind != trouble.kind]
        told = [one.said_s for one in others if one.reason == FULL and one.said_s is not None]
        if trouble.reason == FULL and told and trouble.latest_s < max(told) + _AGAIN_S:
            return replace(trouble, said_s=None)
        return trouble


def plan_trouble(
    before: Trouble | None, kind: str, error: BackendError, now_s: float, size: int
) -> Trouble | None:
    """What is wrong after a failed request; its ``said_s`` is ``now_s`` when the log is to tell of it.

    Args:
        before: What was wrong with requests of this kind.
        kind: Of request.
        error: With which it failed. One that is an answer like any other (exists, not found) is no trouble.
        now_s: Monotonic time.
        size: Bytes of the request; 0: it carries nothing.
    """
    reason = next((word for fits, word in _REASONS.items() if isinstance(error, fits)), None)
    if reason is None:
        return None
    goes_on = before is not None and before.reason == reason
    since_s = before.since_s if before is not None and goes_on else now_s
    said_s = before.said_s if before is not None and goes_on else None
    quiet_s = _LASTING_S if reason in _PASSING else 0.0
    due_s = since_s + quiet_s if said_s is None else said_s + _AGAIN_S
    if before is not None and goes_on:
        size = min(size, before.size_bytes)
    told_s = now_s if now_s >= due_s else said_s
    return Trouble(kind, reason, since_s, str(error), told_s, now_s, size)


def _outlasts(trouble: Trouble, began_s: float, size: int) -> bool:
    """Whether a request of so many bytes that went well is no sign that the trouble has ended."""
    passed_s = began_s - trouble.latest_s
    is_small = size < trouble.size_bytes and passed_s < _AGAIN_S
    return trouble.reason == FULL and (passed_s < 0 or is_small)


def _line(trouble: Trouble, now_s: float) -> str:
    lasted = f" for {now_s - trouble.since_s:.0f} s" if now_s > trouble.since_s else ""
    return f"waiting{lasted} ({trouble.reason}): {trouble.error}; {_ADVICE[trouble.reason]}"
