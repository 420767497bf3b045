"""Stores around a store: passing on, trying again, counting; and how what is one's own is written."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeVar

from backends.base import as_chunks, get_into, require_same_process, size_bytes
from backends.errors import (
    AlreadyExistsError,
    BackendError,
    ObjectNotFoundError,
    PreconditionFailedError,
    UnknownOutcomeError,
    UnreachableError,
)
from backends.lazy_dataclass import dataclass

if TYPE_CHECKING:
    import builtins
    import random
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from typing_extensions import Buffer

    from backends.base import ByteRange, Capabilities, ObjectInfo, ObjectStore, Version


Kind = Literal["put", "get", "head", "list", "delete", "compare_and_set"]
_T = TypeVar("_T")


class WrappingStore:
    """Base of decorators: an ``ObjectStore`` that hands each call to ``inner``."""

    def __init__(self, inner: ObjectStore) -> None:
        """Wrap ``inner``, which is closed with this one."""
        self._inner = inner

    @property
    def inner(self) -> ObjectStore:
        """The store that is wrapped."""
        return self._inner

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    def put_if_absent(self, key: str, data: Sequence[Buffer] | Buffer) -> None:
        self._inner.put_if_absent(key, data)

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        return self._inner.get(key, byte_range)

    def get_ranges(self, key: str, byte_ranges: Sequence[ByteRange]) -> builtins.list[bytes]:
        return self._inner.get_ranges(key, byte_ranges)

    def get_versioned(self, key: str) -> tuple[bytes, Version]:
        return self._inner.get_versioned(key)

    def head(self, key: str) -> ObjectInfo:
        return self._inner.head(key)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        return self._inner.list(prefix, start_after=start_after)

    def delete(self, key: str) -> None:
        self._inner.delete(key)

    def compare_and_set(self, key: str, data: bytes, expected: Version | None) -> Version:
        return self._inner.compare_and_set(key, data, expected)

    def close(self) -> None:
        self._inner.close()


class StoreCall(NamedTuple):
    """A request to a store, as decorators see it."""

    kind: Kind
    up: int = 0  # bytes in the body
    requests: int = 1  # that it takes


class AroundStore(WrappingStore):
    """Base of decorators that do the same around each request: ``around`` has them all, but for listings.

    Listings are generators, so that what is around one is around its reader as well: each decorator has its own.
    """

    def around(self, asked: StoreCall, call: Callable[[], _T]) -> _T:
        """Make a request by ``call``; what it gives."""
        raise NotImplementedError

    def put_if_absent(self, key: str, data: Sequence[Buffer] | Buffer) -> None:
        asked = StoreCall("put", up=size_bytes(data))
        self.around(asked, lambda: self._inner.put_if_absent(key, data))

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        return self.around(StoreCall("get"), lambda: self._inner.get(key, byte_range))

    def get_into(self, key: str, byte_range: ByteRange, target: memoryview) -> None:
        def fill() -> memoryview:
            get_into(self._inner, key, byte_range, target)
            return target

        self.around(StoreCall("get"), fill)

    def get_ranges(self, key: str, byte_ranges: Sequence[ByteRange]) -> builtins.list[bytes]:
        asked = StoreCall("get", requests=len(byte_ranges))
        return self.around(asked, lambda: self._inner.get_ranges(key, byte_ranges))

    def get_versioned(self, key: str) -> tuple[bytes, Version]:
        return self.around(StoreCall("get"), lambda: self._inner.get_versioned(key))

    def head(self, key: str) -> ObjectInfo:
        return self.around(StoreCall("head"), lambda: self._inner.head(key))

    def delete(self, key: str) -> None:
        self.around(StoreCall("delete"), lambda: self._inner.delete(key))

    def compare_and_set(self, key: str, data: bytes, expected: Version | None) -> Version:
        asked = StoreCall("compare_and_set", up=len(data))
        return self.around(asked, lambda: self._inner.compare_and_set(key, data, expected))


# -- one's own keys --------------------------------------------------------------------------------
#
# A proxy may send a PUT twice (to HTTP it is idempotent; nginx repeats it when the first answer is lost). The second one
# meets what the first has stored, and its answer, "exists", is the only one that the client sees. So that answer alone says
# nothing of another writer: the bytes do.


def put_own(store: ObjectStore, key: str, data: Sequence[Buffer] | Buffer) -> None:
    """``put_if_absent`` of a key that only this writer makes; an object that has exactly these bytes is taken for ours.

    The key is not shared with other writers, unless the same bytes always mean the same. UnknownOutcomeError: also when the
    object that stands in the way cannot be read.
    """
    try:
        store.put_if_absent(key, data)
    except AlreadyExistsError:
        if not _reads_as(lambda: store.get(key), key, data):
            raise


def set_own(store: ObjectStore, key: str, data: bytes, expected: Version | None) -> Version:
    """``compare_and_set``; when another version is there than expected and it has exactly these bytes, it is taken for ours.

    No other writer has such bytes, unless the same bytes always mean the same. UnknownOutcomeError: also when what is there
    cannot be read.
    """
    try:
        return store.compare_and_set(key, data, expected)
    except PreconditionFailedError:
        with suppress(ObjectNotFoundError), _unknown_if_unread(key):
            found, version = store.get_versioned(key)
            if found == data:
                return version
        raise


def _reads_as(read: Callable[[], bytes], key: str, data: Sequence[Buffer] | Buffer) -> bool:
    """Whether the object that stands in the way has these bytes."""
    try:
        with _unknown_if_unread(key):
            found = memoryview(read())
    except ObjectNotFoundError:
        return False  # deleted meanwhile: that it existed remains true
    at = 0
    for chunk in as_chunks(data):  # not joined: it may be a large bundle
        if found[at : at + len(chunk)] != chunk:
            return False
        at += len(chunk)
    return at == len(found)


@contextmanager
def _unknown_if_unread(key: str) -> Iterator[None]:
    """An object that stands in the way and cannot be read may be ours: nobody knows."""
    try:
        yield
    except (ObjectNotFoundError, UnknownOutcomeError):
        raise
    except BackendError as error:
        raise UnknownOutcomeError(
            f"{key!r} exists and cannot be compared with what was to be written: {error}"
        ) from error


class StoreClock(Protocol):
    """Time that never goes back, and waiting."""

    def monotonic_s(self) -> float:
        """Seconds; only differences mean anything."""
        ...

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Wait until ``event`` is set or ``timeout_s`` seconds have passed; whether it is set."""
        ...


# -- trying again ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how long to try."""

    tries_max: int = 8  # tries altogether, the first included
    first_delay_s: float = 0.1  # longest wait before the second try
    delay_s_max: float = 10.0  # longest wait before any try
    deadline_s: float = 120.0  # no try begins later than this after the first
    first_contact_s: float = 4.0
    """The same, after the store could not be reached and before it has answered anything."""


def plan_delay_s(policy: RetryPolicy, tries: int, share: float) -> float:
    """Seconds to wait after ``tries`` failed tries.

    Args:
        tries: How many have failed, from 1.
        share: Where in the upper half of the allowed wait, in [0, 1); drawn at random.
    """
    longest = min(policy.delay_s_max, policy.first_delay_s * 2.0 ** min(tries - 1, 32))
    return longest * (1 + share) / 2


class RetryingStore(AroundStore):
    """A store that tries again.

    **Contract.** Only errors that are ``retriable`` are met with another try, and only where a second time does
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

    def __init__(
        self,
        inner: ObjectStore,
        *,
        clock: StoreClock,
        rng: random.Random,
        stop: threading.Event,
        policy: RetryPolicy | None = None,
        on_retry: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_retry`` is called before each try but the first of a call, from any thread."""
        super().__init__(inner)
        self._clock = clock
        self._rng = rng
        self._stop = stop
        self._policy = policy or RetryPolicy()
        self._on_retry = on_retry
        self._has_answered = False

    def put_if_absent(self, key: str, data: Sequence[Buffer] | Buffer) -> None:
        tries = _Tries(self)
        unknown = False

        def put() -> None:
            nonlocal unknown
            try:
                self._inner.put_if_absent(key, data)
            except UnknownOutcomeError:
                unknown = True  # for good: a later refusal does not undo what the lost request may yet do (I7)
                raise

        def read() -> bytes:
            return self._again(lambda: self._inner.get(key), _Tries(self, tries.began_s))

        try:
            self._again(put, tries)
        except AlreadyExistsError:
            # Only after a lost answer: else another writer of the same bytes would be taken for us.
            if not unknown or not _reads_as(read, key, data):
                raise
        except BackendError as error:
            if not unknown or isinstance(error, UnknownOutcomeError):
                raise
            raise UnknownOutcomeError(
                f"an earlier try may have written {key!r}; last: {error}"
            ) from error

    def around(self, asked: StoreCall, call: Callable[[], _T]) -> _T:
        # After an unknown outcome the same compare-and-set once more would find another version than it expects.
        return self._again(
            call, final=UnknownOutcomeError if asked.kind == "compare_and_set" else ()
        )

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Each key that comes makes the count of tries begin anew."""
        last = start_after
        tries = _Tries(self)
        while True:
            try:
                for found in self._inner.list(prefix, start_after=last):
                    self._has_answered = True
                    # Behind the last key that was given: no key comes twice, however often it is tried.
                    last = found.key
                    yield found
                    tries = _Tries(self)  # only now: what the caller does meanwhile is no trying
            except BackendError as error:
                if not tries.wait_after(error):
                    raise
            else:
                self._has_answered = True
                return

    def _again(
        self,
        call: Callable[[], _T],
        tries: _Tries | None = None,
        final: type[BackendError] | tuple[()] = (),
    ) -> _T:
        """Call until it succeeds, or fails for good; ``final`` is not met with another try."""
        tries = tries or _Tries(self)
        while True:
            try:
                found = call()
            except BackendError as error:
                if isinstance(error, final) or not tries.wait_after(error):
                    raise
            else:
                # Without a lock, as elsewhere: it only ever becomes true, in any thread.
                self._has_answered = True
                return found

    def _wait(self, failed: int, began_s: float) -> bool:
        """Wait after so many failed tries; False for giving up."""
        policy = self._policy
        delay_s = plan_delay_s(policy, failed, self._rng.random())
        deadline_s = policy.deadline_s if self._has_answered else policy.first_contact_s
        late = self._clock.monotonic_s() - began_s + delay_s > deadline_s
        if failed >= policy.tries_max or late:
            return False
        if self._stop.is_set() or self._clock.wait(self._stop, delay_s):
            return False
        self._on_retry()
        return True


class _Tries:
    """The tries of one call; what belongs to another call has its beginning."""

    def __init__(self, owner: RetryingStore, began_s: float | None = None) -> None:
        self._owner = owner
        now_s = owner._clock.monotonic_s()  # noqa: SLF001 (one class in two parts)
        self.began_s = now_s if began_s is None else began_s
        self._failed = 0

    def wait_after(self, error: BackendError) -> bool:
        """Wait after a failed try; False when there is to be no other."""
        if not isinstance(error, UnreachableError):
            self._owner._has_answered = True  # noqa: SLF001 (the same)
        if not error.retriable:
            return False
        self._failed += 1
        return self._owner._wait(self._failed, self.began_s)  # noqa: SLF001 (the same)


# -- counting --------------------------------------------------------------------------------------

PAGE_KEYS = 1000
_ANSWERS = (ObjectNotFoundError, AlreadyExistsError, PreconditionFailedError)
"""Without a reason these are what was asked: whether something is there, or still the same."""
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Prices:
    """What a store charges, in US dollars.

    The defaults are the list prices of AWS S3 Standard in us-east-1 as of 2025, without transfer:
    reading within the region is free; to the internet it was 0.09 a GiB.
    """

    write_per_1000: float = 0.005  # for 1,000 of put, list and compare-and-set
    read_per_1000: float = 0.0004
    """For 1,000 of get and head. Deleting is free."""
    down_per_gib: float = 0.0  # for each GiB read


@dataclass(frozen=True, slots=True)
class KindCount:
    """What one kind of request came to."""

    requests: int = 0  # how many were made, failed ones included
    errors: Mapping[str, int] = field(default_factory=dict)
    """How many failed, by the name of the error's class; that something is there, or not, is no failure."""
    bytes_up: int = 0  # bytes sent in bodies
    bytes_down: int = 0  # bytes received in bodies


@dataclass(frozen=True, slots=True)
class MeterSnapshot:
    """All counts since the store was wrapped, at one moment."""

    kinds: Mapping[Kind, KindCount]  # by kind of request; kinds that never came are missing
    prices: Prices  # what ``dollars`` goes by
    retries: int
    """How often a failed request was made again; those requests are counted in ``kinds``."""

    @property
    def requests(self) -> int:
        """Requests of all kinds."""
        return sum(count.requests for count in self.kinds.values())

    @property
    def bytes_up(self) -> int:
        """Bytes sent."""
        return sum(count.bytes_up for count in self.kinds.values())

    @property
    def bytes_down(self) -> int:
        """Bytes received."""
        return sum(count.bytes_down for count in self.kinds.values())

    @property
    def errors(self) -> int:
        """Failed requests of all kinds."""
        return sum(sum(count.errors.values()) for count in self.kinds.values())

    @property
    def dollars(self) -> float:
        """What the requests and the bytes read cost by ``prices``; storage is not in it."""
        writes = sum(self._count(kind) for kind in ("put", "list", "compare_and_set"))
        reads = sum(self._count(kind) for kind in ("get", "head"))
        requests = writes * self.prices.write_per_1000 + reads * self.prices.read_per_1000
        return requests / 1000 + self.bytes_down / _GIB * self.prices.down_per_gib

    def _count(self, kind: Kind) -> int:
        return self.kinds.get(kind, KindCount()).requests


class MeteredStore(AroundStore):
    """A store that counts. Safe to use from any number of threads.

    Requests are counted as S3 bills them: one per call, one per range of ``get_ranges``, and one per
    1,000 keys of a listing, at least one. A request that fails counts too, and as an error beside.
    A caller that makes a failed request again says so with ``count_retry``. A process forked off
    the one that made it is refused.
    """

    def __init__(self, inner: ObjectStore, prices: Prices | None = None) -> None:
        super().__init__(inner)
        self._pid = os.getpid()
        self._prices = prices or Prices()
        self._lock = threading.Lock()
        self._counts: dict[Kind, KindCount] = {}
        self._retries = 0
        self.timing: Callable[[Kind], AbstractContextManager[object]] = lambda _kind: nullcontext()
        """Entered around each request, and the first page of each listing."""

    def count_retry(self) -> None:
        """A failed request is about to be made again."""
        with self._lock:
            self._retries += 1

    def snapshot(self) -> MeterSnapshot:
        """The counts so far, consistent among each other."""
        # All under one lock: a request must not be missing where its bytes are counted.
        with self._lock:
            return MeterSnapshot(dict(self._counts), self._prices, self._retries)

    def around(self, asked: StoreCall, call: Callable[[], _T]) -> _T:
        with self._counted(asked), self.timing(asked.kind):
            found = call()
        if asked.kind == "get":
            self._add("get", down=_size_down(found))
        return found

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        with self._counted(StoreCall("list")):
            listing = self._inner.list(prefix, start_after=start_after)
            with self.timing("list"):
                first = next(listing, None)
            if first is None:
                return
            yield first
            for number, found in enumerate(listing, 1):
                if number % PAGE_KEYS == 0:
                    self._add("list", requests=1)
                yield found

    @contextmanager
    def _counted(self, asked: StoreCall) -> Iterator[None]:
        # Before the lock: its holder may be a thread of that process.
        require_same_process(self._pid, self.url)
        # Before it is made: a store bills what it refuses, and what nobody waits for any more.
        self._add(asked.kind, requests=asked.requests, up=asked.up)
        try:
            yield
        except BackendError as error:
            if error.reason or not isinstance(error, _ANSWERS):
                self._add(asked.kind, error=type(error).__name__)
            raise

    def _add(
        self, kind: Kind, *, requests: int = 0, up: int = 0, down: int = 0, error: str = ""
    ) -> None:
        with self._lock:
            so_far = self._counts.get(kind, KindCount())
            errors = so_far.errors
            if error:
                errors = {**errors, error: errors.get(error, 0) + 1}
            self._counts[kind] = KindCount(
                so_far.requests + requests, errors, so_far.bytes_up + up, so_far.bytes_down + down
            )


def _size_down(found: object) -> int:
    """Bytes in the answer to a GET, whichever method made it."""
    if isinstance(found, list):
        return sum(map(len, found))
    data = found[0] if isinstance(found, tuple) else found
    return len(data) if isinstance(data, bytes | memoryview) else 0
