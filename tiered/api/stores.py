"""Object stores as the layers above have them: opened by URL, metered, with retries; and patient where a person must mend.

Each is a decorator around the store that the registry opened. Any thread may call anything; after a crash nothing is left.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from contextlib import contextmanager
from dataclasses import field, replace
from typing import TYPE_CHECKING, TypeVar

from backends.errors import (
    ARCHIVED,
    CLOCK,
    ENCRYPTION,
    FAILING,
    FULL,
    PERMISSION,
    REASONS,
    SETTINGS,
    TRUST,
    UNREACHABLE,
    BackendError,
    ConfigurationError,
    ForkedError,
    ObjectNotFoundError,
    PermissionDeniedError,
    UntrustedError,
)
from backends.lazy_dataclass import dataclass
from backends.local_files import MAKE_ROOM, advice_for
from backends.registry import open_store
from backends.wrapping import AroundStore, MeteredStore, RetryingStore, RetryPolicy
from tiered.errors import InvalidError, StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from backends.base import ObjectInfo, ObjectStore
    from backends.s3_settings import S3Options
    from backends.wrapping import Kind, StoreCall
    from tiered.clock import Clock

_T = TypeVar("_T")


@contextlib.contextmanager
def backend_errors() -> Iterator[None]:
    """Turn what a backend says into what an operator does about it."""
    try:
        yield
    except ConfigurationError as error:
        raise InvalidError(str(error)) from error
    except ForkedError as error:
        raise InvalidError(str(error)) from error
    except BackendError as error:
        raise StoreUnavailableError(str(error), do=what_to_do(error)) from error


def what_to_do(error: BackendError) -> str:
    """What to do about what an object store says."""
    if error.do or isinstance(error, UntrustedError):  # whose message says it
        return error.do
    if isinstance(error, ObjectNotFoundError):
        return "check the URL"
    if isinstance(error, PermissionDeniedError):
        return "check credentials and permissions"
    return advice_for(error, "check that the store can be reached")


def open_metered(url: str, options: S3Options) -> MeteredStore:
    """The store itself, metered."""
    with backend_errors():
        return MeteredStore(open_store(url, options))


def with_retries(
    store: ObjectStore,
    clock: Clock,
    rng: random.Random,
    stop: threading.Event,
    on_retry: Callable[[], None] | None = None,
    *,
    give_up_s: float | None = None,
) -> RetryingStore:
    """For readers, and for a writer's reads, listings and lease; the meter counts what is made again.

    Its data uploads switch files instead, and its journal tries again by itself. ``on_retry`` is needed only where ``store``
    is not the meter itself; ``give_up_s`` shortens how long one request is tried.
    """
    if on_retry is None:
        on_retry = store.count_retry if isinstance(store, MeteredStore) else lambda: None
    policy = RetryPolicy()
    if give_up_s is not None:
        policy = replace(policy, deadline_s=min(policy.deadline_s, give_up_s))
    return RetryingStore(store, clock=clock, rng=rng, stop=stop, policy=policy, on_retry=on_retry)


@dataclass(frozen=True, slots=True)
class OpenStore:
    """A store as readers have it."""

    meter: MeteredStore
    """The store itself, metered; for a journal's writer, who tries again by himself."""
    store: RetryingStore  # the same with retries
    stop: threading.Event = field(default_factory=threading.Event)  # set: nothing is tried again

    def close(self) -> None:
        """Give back connections, and try nothing again."""
        self.stop.set()
        self.store.close()


def open_for_reading(
    url: str,
    options: S3Options,
    clock: Clock,
    *,
    rng: random.Random | None = None,
    stop: threading.Event | None = None,
    give_up_s: float | None = None,
) -> OpenStore:
    """Open a store with a meter and retries.

    Args:
        stop: See ``OpenStore``.
        give_up_s: Shortens how long one request is tried.
    """
    meter, stop = open_metered(url, options), stop or threading.Event()
    rng = rng or random.SystemRandom()
    return OpenStore(meter, with_retries(meter, clock, rng, stop, give_up_s=give_up_s), stop)


# -- patience --------------------------------------------------------------------------------------
#
# Waiting out what a person must mend. Attach puts a ``PatientStore`` around its store. It notes what goes wrong, by kind of
# request, until a request of that kind goes well again. ``troubles`` is what the metrics show; the log has a line when
# trouble begins, one a minute while it lasts, and one when it has ended.
#
# Nothing is retried here. Once ``wait_out_refusals`` was called, a refusal (credentials revoked or expired, a permission
# taken away, a certificate that is not accepted any more) comes as a ``RefusedForNowError``, which those above try again
# as they do any outage: a reader that follows a broker for months must not end because a key was rotated. Before that, and
# for a single run, a refusal ends the run. A refused write has changed nothing, so trying again is harmless.
#
# A store that is nearly full takes small objects and refuses large ones. So it counts as full until it has taken one that
# was put after the last refusal and is as large as the smallest refused one, or has refused none for a minute. Else each
# journal entry would end the trouble, and each part begin it anew, with a line in the log for both. At the border of full
# even that comes and goes: what one part leaves is too little for two. So of a full store the log tells once a minute,
# however often it was full in it; ``troubles`` has it all.


_ADVICE = {
    PERMISSION: "mend credentials or permissions",
    FULL: MAKE_ROOM,
    TRUST: "mend the certificate",
    UNREACHABLE: "see whether it runs",
    FAILING: "see to the store",
    CLOCK: "set the clock",
    ENCRYPTION: "see to the encryption key",
    ARCHIVED: "restore the objects",
    SETTINGS: "see to bucket and settings",
}
_PASSING = frozenset({UNREACHABLE, FAILING})
"""What mostly passes by itself, and is said only when it lasts."""
_WHOLE_STORE = frozenset({FULL, UNREACHABLE})
"""What meets every request alike."""
_TOLD_AS: dict[Kind, str] = {"head": "get", "compare_and_set": "replace"}
_LASTING_S = 10.0
_AGAIN_S = 60.0
_LOG = logging.getLogger("tiered.attach")


class RefusedForNowError(PermissionDeniedError):
    """The store refuses us, and somebody may mend that while we wait."""

    retriable = True

    def __init__(self, refusal: BackendError) -> None:
        """The same, to be tried again."""
        super().__init__(str(refusal))
        self.reason, self.do = refusal.reason, refusal.do


@dataclass(frozen=True, slots=True)
class Trouble:
    """What goes wrong just now."""

    kind: str  # of request: ``put``, ``replace`` (the lease), ``get``, ``list`` or ``delete``
    reason: str  # one of ``REASONS``
    since_s: float  # monotonic time of its first failure
    error: str  # the latest one
    said_s: float | None  # when the log last told of it; None: not yet
    latest_s: float  # of its latest failure
    size_bytes: int  # of the smallest request that failed so
    do: str = ""  # what the latest one says to do about it

    @property
    def told(self) -> str:
        """In one clause, with what to do."""
        return f"{self.reason}: {self.error}; {self.do or _ADVICE[self.reason]}"


class PatientStore(AroundStore):
    """A store whose troubles are known; see the module's contract."""

    def __init__(self, inner: ObjectStore, clock: Clock) -> None:
        """Wrap a store; refusals end the run until ``wait_out_refusals``."""
        super().__init__(inner)
        self._clock = clock
        self._lock = threading.Lock()
        self._troubles: dict[str, Trouble] = {}
        self._waits = False
        self._said_s: dict[str, float] = {}  # of a reason that is told once for all requests: when

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

    def around(self, asked: StoreCall, call: Callable[[], _T]) -> _T:
        with self._watched(_TOLD_AS.get(asked.kind, asked.kind), asked.up):
            return call()

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        with self._watched("list"):
            yield from self._inner.list(prefix, start_after=start_after)

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
        refused = error.needs_a_person and not error.retriable
        return RefusedForNowError(error) if refused and self._waits else error

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
                after = after and self._once(after, before, now_s)
            self._troubles.pop(kind, None)
            if after is not None:
                self._troubles[kind] = after
            elif all(one.reason != UNREACHABLE for one in self._troubles.values()):
                self._said_s.pop(UNREACHABLE, None)  # the next time is another trouble
        if after is not None and after.said_s == now_s:
            _LOG.warning("%s", _line(after, now_s))
        elif after is None and before is not None and before.said_s is not None:
            passed_s = now_s - before.since_s
            _LOG.warning("the store takes %s requests again, after %.0f s", kind, passed_s)

    def _once(self, trouble: Trouble, before: Trouble | None, now_s: float) -> Trouble:
        """A store that is full or gone is so for parts and for the lease, and again and again: of one of these is told."""
        reason = trouble.reason
        if reason not in _WHOLE_STORE or trouble.said_s != now_s:
            return trouble
        if now_s < self._said_s.get(reason, -_AGAIN_S) + _AGAIN_S:
            goes_on = before is not None and before.reason == reason
            return replace(trouble, said_s=before.said_s if before and goes_on else None)
        self._said_s[reason] = now_s
        return trouble


def plan_trouble(
    before: Trouble | None, kind: str, error: BackendError, now_s: float, size: int
) -> Trouble | None:
    """What is wrong after a failed request; its ``said_s`` is ``now_s`` when the log is to tell of it.

    Args:
        error: With which it failed. One that is an answer like any other (exists, not found) is no trouble.
        size: Bytes of the request; 0: it carries nothing.
    """
    reason = error.reason
    if not reason or isinstance(error, ObjectNotFoundError):
        return None
    goes_on = before is not None and before.reason == reason
    since_s = before.since_s if before is not None and goes_on else now_s
    said_s = before.said_s if before is not None and goes_on else None
    quiet_s = _LASTING_S if reason in _PASSING else 0.0
    due_s = since_s + quiet_s if said_s is None else said_s + _AGAIN_S
    if before is not None and goes_on:
        size = min(size, before.size_bytes)
    told_s = now_s if now_s >= due_s else said_s
    return Trouble(kind, reason, since_s, str(error), told_s, now_s, size, error.do)


def _outlasts(trouble: Trouble, began_s: float, size: int) -> bool:
    """Whether a request of so many bytes that went well is no sign that the trouble has ended."""
    passed_s = began_s - trouble.latest_s
    is_small = size < trouble.size_bytes and passed_s < _AGAIN_S
    return trouble.reason == FULL and (passed_s < 0 or is_small)


def _line(trouble: Trouble, now_s: float) -> str:
    lasted = f" for {now_s - trouble.since_s:.0f} s" if now_s > trouble.since_s else ""
    return f"waiting{lasted} ({trouble.reason}): {trouble.error}; {trouble.do or _ADVICE[trouble.reason]}"
