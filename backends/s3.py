"""Objects in a bucket of an S3-compatible server.

Contract
    Each method is one request, or one per page of a listing or per range, and none is sent twice.
    Creation is a PUT with ``If-None-Match: *``, replacement one with ``If-Match``; the version is
    the ETag. Larger objects than the server takes in one PUT (5 GiB on AWS) are refused by it.

    A PUT whose answer did not come is an unknown outcome: the object may be there, and may still
    appear. A PUT that was answered 409 is looked for once: AWS answers so when two PUTs of one key
    met, also when neither is stored.

    Listings go by plain prefixes; the server is asked for the folder of the prefix, from just
    before the prefix on. Whatever keys others have put there are left out and noted. The client is
    made at the first request, so that opening asks nothing of the network. Any thread may call
    anything at any time; nothing here has to survive a crash. A process that was forked off one that
    has asked is refused; what it opens itself goes through boto3, since the threads of obstore, which
    all its clients share, were not copied.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from backends.base import (
    ByteRange,
    Capabilities,
    ForeignNames,
    ObjectInfo,
    Version,
    as_chunks,
    check_key,
    is_key,
    keys_from,
    require_same_process,
)
from backends.errors import (
    AlreadyExistsError,
    BackendError,
    InvalidRangeError,
    PreconditionFailedError,
    ShortReadError,
)
from backends.s3_settings import check_options, loaded, resolve, split_location
from backends.s3_wire import DELETE, FOREIGN, GET, LIST, NO_SUCH_BUCKET, PUT, S3Failure, failures_of

if TYPE_CHECKING:
    import builtins
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Buffer

    from backends.s3_settings import S3Options, S3Settings
    from backends.s3_wire import S3Wire


RANGES_AT_ONCE_MAX = 8
_CONFLICT = 409
_PRECONDITION = 412
_NOT_FOUND = 404


def open_s3(location: str, options: S3Options) -> S3Store:
    """Make a store for ``bucket/prefix``. Nothing is asked of the network."""
    bucket, prefix = split_location(location)
    check_options(options)
    signed = any(name.lower().startswith("x-amz-") for name in options.headers)
    _wire_class(is_signed=signed)  # so that what is missing is said now

    def connect() -> tuple[S3Wire, str]:
        settings = resolve(bucket, options, os.environ)
        return _wire_class(is_signed=signed)(settings), settings.server

    return S3Store(bucket, prefix, connect)


def _wire_class(*, is_signed: bool) -> Callable[[S3Settings], S3Wire]:
    """The client: the fast one, unless headers must be signed or a fork has left it without its threads."""
    found: Callable[[S3Settings], S3Wire]
    if not is_signed:
        fast = loaded("s3_obstore")
        if not fast.is_cut_off():
            found = fast.ObstoreWire
            return found
    found = loaded("s3_control").BotoWire
    return found


class S3Store:
    """An ``ObjectStore`` in a bucket; see the module's contract."""

    def __init__(self, bucket: str, prefix: str, connect: Callable[[], tuple[S3Wire, str]]) -> None:
        """Keep what is needed to connect: ``connect`` makes the client and names the server, at the first request."""
        self._url = f"s3://{bucket}/{prefix}" if prefix else f"s3://{bucket}"
        self._prefix = prefix + "/" if prefix else ""
        self._connect = connect
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._connected: tuple[S3Wire, str] | None = None
        self._pool: ThreadPoolExecutor | None = None
        self.foreign = ForeignNames()

    @property
    def url(self) -> str:
        return self._url

    @property
    def capabilities(self) -> Capabilities:
        """What S3 promises; some servers take the conditions and ignore them, so probe."""
        return Capabilities(put_if_absent=True, compare_and_set=True)

    def put_if_absent(self, key: str, data: Sequence[Buffer] | Buffer) -> None:
        """The body's hash goes along as its checksum and in the signature, so the server checks that it arrived whole."""
        check_key(key)
        with self._asking(PUT, key) as wire:
            try:
                wire.put(self._prefix + key, as_chunks(data), None)
            except S3Failure as failure:
                is_taken = failure.status == _PRECONDITION or (
                    failure.status == _CONFLICT and self._is_there(key)
                )
                if not is_taken:
                    raise
                raise AlreadyExistsError(f"object exists: {self._where(key)}") from failure

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        if byte_range is None:
            return self.get_versioned(key)[0]
        return bytes(self._range(key, byte_range))

    def get_into(self, key: str, byte_range: ByteRange, target: memoryview) -> None:
        target[:] = self._range(key, byte_range)

    def _range(self, key: str, byte_range: ByteRange) -> bytes | memoryview:
        check_key(key)
        with self._asking(GET, key) as wire:
            data = wire.get_range(self._prefix + key, byte_range.start, byte_range.end)
        if len(data) == byte_range.size_bytes:
            return data
        asked = f"[{byte_range.start}, {byte_range.end})"
        if not data:  # some servers answer 206 with nothing where 416 is due
            raise InvalidRangeError(f"range begins behind the end: {asked} of {self._where(key)}")
        raise ShortReadError(f"{len(data)} bytes came for {asked} of {self._where(key)}")

    def get_ranges(self, key: str, byte_ranges: Sequence[ByteRange]) -> builtins.list[bytes]:
        """Up to ``RANGES_AT_ONCE_MAX`` at once, over all callers together."""
        if len(byte_ranges) <= 1:
            return [self.get(key, byte_range) for byte_range in byte_ranges]
        futures = [self._executor.submit(self.get, key, asked) for asked in byte_ranges]
        try:
            return [future.result() for future in futures]
        except BackendError:
            for future in futures:
                future.cancel()
            raise

    def get_versioned(self, key: str) -> tuple[bytes, Version]:
        """The version is the ETag."""
        check_key(key)
        with self._asking(GET, key) as wire:
            data, etag = wire.get(self._prefix + key)
            return data, Version(etag)

    def head(self, key: str) -> ObjectInfo:
        check_key(key)
        with self._asking(GET, key) as wire:
            return replace(wire.head(self._prefix + key), key=key)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """A page of 1,000 keys is asked for when it is reached."""
        folder, after = keys_from(self._prefix, prefix, start_after)
        wanted = self._prefix + prefix
        if folder and not is_key(folder.removesuffix("/")):
            return
        with self._asking(LIST, prefix) as wire:
            for found in chain.from_iterable(wire.list(folder, after)):
                if not found.key.startswith(wanted):
                    if found.key > wanted:
                        return
                elif found.key > after:
                    key = found.key.removeprefix(self._prefix)
                    if is_key(key):
                        yield ObjectInfo(key, found.size_bytes, found.modified_ms, found.version)
                    else:
                        self.foreign.note(key)

    def delete(self, key: str) -> None:
        check_key(key)
        with self._asking(DELETE, key) as wire:
            try:
                wire.delete(self._prefix + key)
            except S3Failure as failure:
                if not _is_gone(failure):
                    raise

    def compare_and_set(self, key: str, data: Buffer, expected: Version | None) -> Version:
        check_key(key)
        with self._asking(PUT, key) as wire:
            try:
                return Version(wire.put(self._prefix + key, as_chunks(data), expected))
            except S3Failure as failure:
                if failure.status == _PRECONDITION or _is_gone(failure):
                    message = f"at another version, or gone: {self._where(key)}"
                    raise PreconditionFailedError(message) from failure
                raise

    def close(self) -> None:
        if os.getpid() != self._pid:
            return  # the pool's threads are not here, and the connections are another process's
        # Taken out under the lock and closed outside: threads of the pool may want the lock to end.
        with self._lock:
            connected, self._connected = self._connected, None
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()
        if connected is not None:
            connected[0].close()

    @contextmanager
    def _asking(self, permission: str, key: str) -> Iterator[S3Wire]:
        """The client; what a request by it meets becomes our error."""
        require_same_process(self._pid, self._url)
        connected = self._connected
        if connected is None:
            # Made once, under the lock; looked at without it, which is right since it is set last.
            with self._lock:
                connected = self._connected = self._connected or self._connect()
        wire, server = connected
        with failures_of(permission, self._where(key), server):
            yield wire

    @property
    def _executor(self) -> ThreadPoolExecutor:
        require_same_process(self._pid, self._url)
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(RANGES_AT_ONCE_MAX, thread_name_prefix="s3-range")
            return self._pool

    def _where(self, key: str) -> str:
        return f"{self._url} {key!r}" if key else self._url

    def _is_there(self, key: str) -> bool:
        """Whether a key exists, asked once after a 409; an unclear answer counts as no."""
        try:
            self.head(key)
        except BackendError:
            return False
        return True


def _is_gone(failure: S3Failure) -> bool:
    """Whether a server of S3 says that there is no such object."""
    return failure.status == _NOT_FOUND and failure.code not in {NO_SUCH_BUCKET, FOREIGN}
