"""Try again what may be tried again.

Contract
    Only errors that are ``retriable`` are met with another try, and only where a second time does
    what the first was to do:

    ==================== =======================================================================
    reads, listings      always; a listing goes on behind the last key that it gave
    ``delete``           always
    ``put_if_absent``    always. If an earlier try's outcome is unknown and a later one finds the
                         key taken, the object is read: our bytes mean that it was us. That
                         needs keys or bytes that no two writers share.
    ``compare_and_set``  only when nothing was written; an unknown outcome is the caller's to settle
    ==================== =======================================================================

    Between tries it waits, each time about twice as long, at random so that many clients do not come
    back together. It gives up with the last error after ``tries_max`` tries, when the next wait
    would pass ``deadline_s``, or when ``stop`` is set. If any try of a put has an unknown outcome,
    what is raised says so, whatever came last (I7).

    An ``UnreachableError`` before the store has answered anything most likely means a wrong address
    or a server that is not running, so a person learns of it within ``first_contact_s``. Once the
    store has answered, it is an outage like any other, and patience is due.

    All that it holds between calls is whether there was an answer, of whatever kind. Any thread may
    call anything at any time. While it waits it holds nothing but the caller's buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from backends.buffers import as_one
from backends.errors import (
    AlreadyExistsError,
    BackendError,
    ObjectNotFoundError,
    UnknownOutcomeError,
    UnreachableError,
)
from backends.into import get_into
from backends.wrapping import WrappingStore

if TYPE_CHECKING:
    import builtins
    import random
    import threading
    from collections.abc import Callable, Iterator, Sequence
    from typing import NoReturn

    from typing_extensions import Buffer

    from backends.base import ByteRange, ObjectInfo, ObjectStore, Version
    from backends.clock import Clock

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how long to try.

    Attributes:
        tries_max: Tries altogether, the first included.
        first_delay_s: Longest wait before the second try.
        delay_s_max: Longest wait before any try.
        deadline_s: No try begins later than this after the first.
        first_contact_s: The same, after the store could not be reached and before it has answered
            anything.
    """

    tries_max: int = 8
    first_delay_s: float = 0.1
    delay_s_max: float = 10.0
    deadline_s: float = 120.0
    first_contact_s: float = 4.0


def plan_delay_s(policy: RetryPolicy, tries: int, share: float) -> float:
    """Seconds to wait after ``tries`` failed tries.

    Args:
        policy: The limits.
        tries: How many have failed, from 1.
        share: Where in the upper half of the allowed wait, in [0, 1); drawn at random.
    """
    longest = min(policy.delay_s_max, policy.first_delay_s * 2.0 ** min(tries - 1, 32))
    return longest * (1 + share) / 2


class RetryingStore(WrappingStore):
    """A store that tries again; see the module's contract."""

    def __init__(
        self,
        inner: ObjectStore,
        *,
        clock: Clock,
        rng: random.Random,
        stop: threading.Event,
        policy: RetryPolicy | None = None,
        on_retry: Callable[[], None] = lambda: None,
    ) -> None:
        """Wrap a store.

        Args:
            inner: The store.
            clock: For waiting and the deadline.
            rng: For the length of waits.
            stop: When set, no further try is begun.
            policy: The limits.
            on_retry: Called before each try but the first of a call, from any thread.
        """
        super().__init__(inner)
        self._clock = clock
        self._rng = rng
        self._stop = stop
        self._policy = policy or RetryPolicy()
        self._on_retry = on_retry
        self._has_answered = False

    def put_if_absent(self, key: str, data: Sequence[Buffer] | Buffer) -> None:
        """See ``ObjectStore`` and the module's contract."""
        tries = _Tries(self)
        unknown = False
        while True:
            try:
                self._inner.put_if_absent(key, data)
            except AlreadyExistsError:
                self._has_answered = True
                if not unknown or not self._is_ours(key, data):
                    raise
            except BackendError as error:
                unknown |= isinstance(error, UnknownOutcomeError)
                if not tries.wait_after(error):
                    _give_up(error, key, unknown=unknown)
                continue
            self._has_answered = True
            return

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """See ``ObjectStore``."""
        return self._again(lambda: self._inner.get(key, byte_range))

    def get_into(self, key: str, byte_range: ByteRange, target: memoryview) -> None:
        """See ``IntoStore``."""
        self._again(lambda: get_into(self._inner, key, byte_range, target))

    def get_ranges(self, key: str, byte_ranges: Sequence[ByteRange]) -> builtins.list[bytes]:
        """See ``ObjectStore``."""
        return self._again(lambda: self._inner.get_ranges(key, byte_ranges))

    def get_versioned(self, key: str) -> tuple[bytes, Version]:
        """See ``ObjectStore``."""
        return self._again(lambda: self._inner.get_versioned(key))

    def head(self, key: str) -> ObjectInfo:
        """See ``ObjectStore``."""
        return self._again(lambda: self._inner.head(key))

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """See ``ObjectStore``. Each key that comes makes the count of tries begin anew."""
        last = start_after
        tries = _Tries(self)
        while True:
            try:
                for found in self._inner.list(prefix, start_after=last):
                    self._has_answered = True
                    last = found.key
                    tries = _Tries(self)
                    yield found
            except BackendError as error:
                if not tries.wait_after(error):
                    raise
            else:
                self._has_answered = True
                return

    def delete(self, key: str) -> None:
        """See ``ObjectStore``."""
        self._again(lambda: self._inner.delete(key))

    def compare_and_set(self, key: str, data: bytes, expected: Version | None) -> Version:
        """See ``ObjectStore``. An unknown outcome is not tried again."""
        tries = _Tries(self)
        while True:
            try:
                version = self._inner.compare_and_set(key, data, expected)
            except UnknownOutcomeError:
                raise
            except BackendError as error:
                if not tries.wait_after(error):
                    raise
            else:
                self._has_answered = True
                return version

    def _again(self, call: Callable[[], _T]) -> _T:
        tries = _Tries(self)
        while True:
            try:
                found = call()
            except BackendError as error:
                if not tries.wait_after(error):
                    raise
            else:
                self._has_answered = True
                return found

    def _is_ours(self, key: str, data: Sequence[Buffer] | Buffer) -> bool:
        """Whether the object that stands in the way has our bytes.

        Raises:
            UnknownOutcomeError: It cannot be read, so nobody knows.
        """
        try:
            return self.get(key) == as_one(data)
        except ObjectNotFoundError:
            return False  # deleted meanwhile: that it existed remains true
        except BackendError as error:
            _give_up(error, key, unknown=True)

    def _next_delay_s(self, tries: int, began_s: float) -> float | None:
        """Seconds to wait before another try, or None for giving up."""
        policy = self._policy
        delay_s = plan_delay_s(policy, tries, self._rng.random())
        passed_s = self._clock.monotonic_s() - began_s
        late = passed_s + delay_s > self._deadline_s()
        return None if tries >= policy.tries_max or late else delay_s

    def _deadline_s(self) -> float:
        policy = self._policy
        return policy.deadline_s if self._has_answered else policy.first_contact_s

    def _wait(self, delay_s: float) -> bool:
        """Wait; whether to go on."""
        if self._stop.is_set() or self._clock.wait(self._stop, delay_s):
            return False
        self._on_retry()
        return True


class _Tries:
    """The tries of one call."""

    def __init__(self, owner: RetryingStore) -> None:
        self._owner = owner
        self._began_s = owner._clock.monotonic_s()  # noqa: SLF001 (one class in two parts)
        self._failed = 0

    def wait_after(self, error: BackendError) -> bool:
        """Wait after a failed try; False when there is to be no other."""
        if not isinstance(error, UnreachableError):
            self._owner._has_answered = True  # noqa: SLF001 (the same)
        if not error.retriable:
            return False
        self._failed += 1
        delay_s = self._owner._next_delay_s(self._failed, self._began_s)  # noqa: SLF001 (the same)
        return delay_s is not None and self._owner._wait(delay_s)  # noqa: SLF001 (the same)


def _give_up(error: BackendError, key: str, *, unknown: bool) -> NoReturn:
    """Raise what a put ends with."""
    if unknown and not isinstance(error, UnknownOutcomeError):
        raise UnknownOutcomeError(
            f"an earlier try may have written {key!r}; last: {error}"
        ) from error
    raise error
