"""How many requests a store gets, how many bytes move, and about what that costs.

Requests are counted as S3 bills them: one per call, one per range of ``get_ranges``, and one per
1,000 keys of a listing, at least one. A request that fails counts too, and as an error beside.
Whoever makes a failed request again says so with ``count_retry``.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from backends.batch import objects_per_put, put_many_if_absent
from backends.buffers import size_bytes
from backends.errors import BackendError
from backends.into import get_into
from backends.wrapping import WrappingStore

if TYPE_CHECKING:
    import builtins
    from collections.abc import Iterator, Mapping, Sequence

    from typing_extensions import Buffer

    from backends.base import ByteRange, ObjectInfo, ObjectStore, Version

Kind = Literal["put", "get", "head", "list", "delete", "compare_and_set"]
PAGE_KEYS = 1000
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Prices:
    """What a store charges, in US dollars.

    The defaults are the list prices of AWS S3 Standard in us-east-1 as of 2025, without transfer:
    reading within the region is free; to the internet it was 0.09 a GiB.

    Attributes:
        write_per_1000: For 1,000 of put, list and compare-and-set.
        read_per_1000: For 1,000 of get and head. Deleting is free.
        down_per_gib: For each GiB read.
    """

    write_per_1000: float = 0.005
    read_per_1000: float = 0.0004
    down_per_gib: float = 0.0


@dataclass(frozen=True, slots=True)
class KindCount:
    """What one kind of request came to.

    Attributes:
        requests: How many were made, failed ones included.
        errors: How many failed, by the name of the error's class.
        bytes_up: Bytes sent in bodies.
        bytes_down: Bytes received in bodies.
    """

    requests: int = 0
    errors: Mapping[str, int] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0


@dataclass(frozen=True, slots=True)
class MeterSnapshot:
    """All counts since the store was wrapped, at one moment.

    Attributes:
        kinds: By kind of request; kinds that never came are missing.
        prices: What ``dollars`` goes by.
        retries: How often a failed request was made again; those requests are counted in ``kinds``.
    """

    kinds: Mapping[Kind, KindCount]
    prices: Prices
    retries: int

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


class _Counter:
    """A ``KindCount`` that grows; guarded by the meter's lock."""

    def __init__(self) -> None:
        self.requests = 0
        self.errors: defaultdict[str, int] = defaultdict(int)
        self.bytes_up = 0
        self.bytes_down = 0

    def frozen(self) -> KindCount:
        return KindCount(self.requests, dict(self.errors), self.bytes_up, self.bytes_down)


class MeteredStore(WrappingStore):
    """A store that counts. Safe to use from any number of threads."""

    def __init__(self, inner: ObjectStore, prices: Prices | None = None) -> None:
        """Wrap a store; counting begins at 0."""
        super().__init__(inner)
        self._prices = prices or Prices()
        self._lock = threading.Lock()
        self._counters: defaultdict[Kind, _Counter] = defaultdict(_Counter)
        self._retries = 0

    def count_retry(self) -> None:
        """A failed request is about to be made again."""
        with self._lock:
            self._retries += 1

    def snapshot(self) -> MeterSnapshot:
        """The counts so far, consistent among each other."""
        with self._lock:
            kinds = {kind: counter.frozen() for kind, counter in self._counters.items()}
            return MeterSnapshot(kinds, self._prices, self._retries)

    def put_if_absent(self, key: str, data: Sequence[Buffer] | Buffer) -> None:
        """See ``ObjectStore``."""
        with self._counted("put", up=size_bytes(data)):
            self._inner.put_if_absent(key, data)

    @property
    def objects_per_put(self) -> int:
        """See ``BatchStore``."""
        return objects_per_put(self._inner)

    def put_many_if_absent(
        self, objects: Sequence[tuple[str, Sequence[Buffer] | Buffer]]
    ) -> builtins.list[BackendError | None]:
        """See ``BatchStore``. One request for each object."""
        self._add("put", requests=len(objects), up=sum(size_bytes(data) for _, data in objects))
        errors = put_many_if_absent(self._inner, objects)
        for error in filter(None, errors):
            self._add_error("put", error)
        return errors

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """See ``ObjectStore``."""
        with self._counted("get"):
            data = self._inner.get(key, byte_range)
        self._add("get", down=len(data))
        return data

    def get_into(self, key: str, byte_range: ByteRange, target: memoryview) -> None:
        """See ``IntoStore``."""
        with self._counted("get"):
            get_into(self._inner, key, byte_range, target)
        self._add("get", down=len(target))

    def get_ranges(self, key: str, byte_ranges: Sequence[ByteRange]) -> builtins.list[bytes]:
        """See ``ObjectStore``."""
        with self._counted("get", requests=len(byte_ranges)):
            ranges = self._inner.get_ranges(key, byte_ranges)
        self._add("get", down=sum(map(len, ranges)))
        return ranges

    def get_versioned(self, key: str) -> tuple[bytes, Version]:
        """See ``ObjectStore``."""
        with self._counted("get"):
            data, version = self._inner.get_versioned(key)
        self._add("get", down=len(data))
        return data, version

    def head(self, key: str) -> ObjectInfo:
        """See ``ObjectStore``."""
        with self._counted("head"):
            return self._inner.head(key)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """See ``ObjectStore``."""
        with self._counted("list"):
            for number, found in enumerate(self._inner.list(prefix, start_after=start_after)):
                if number and number % PAGE_KEYS == 0:
                    self._add("list", requests=1)
                yield found

    def delete(self, key: str) -> None:
        """See ``ObjectStore``."""
        with self._counted("delete"):
            self._inner.delete(key)

    def compare_and_set(self, key: str, data: bytes, expected: Version | None) -> Version:
        """See ``ObjectStore``."""
        with self._counted("compare_and_set", up=size_bytes(data)):
            return self._inner.compare_and_set(key, data, expected)

    @contextmanager
    def _counted(self, kind: Kind, *, requests: int = 1, up: int = 0) -> Iterator[None]:
        self._add(kind, requests=requests, up=up)
        try:
            yield
        except BackendError as error:
            self._add_error(kind, error)
            raise

    def _add_error(self, kind: Kind, error: BackendError) -> None:
        with self._lock:
            self._counters[kind].errors[type(error).__name__] += 1

    def _add(self, kind: Kind, *, requests: int = 0, up: int = 0, down: int = 0) -> None:
        with self._lock:
            counter = self._counters[kind]
            counter.requests += requests
            counter.bytes_up += up
            counter.bytes_down += down
