"""Objects as files of any fsspec file system: for reading everywhere, and writing where that is safe.

Contract
    Reading and listing work on every file system; a listing reads all names below the folder of its
    prefix before it gives the first, since no file system promises an order.

    Creation is atomic only where fsspec's own call is known to be: s3fs (``If-None-Match``). On the
    others ``put_if_absent`` is refused, unless the caller vouches with ``single_writer`` that nobody
    else writes: then it looks, and writes if nothing is there. Compare-and-set is never offered.

    The file system's own timeouts and retries apply. A write that failed in a way that is not known
    to be harmless is an unknown outcome. Any thread may call anything at any time.
"""

from __future__ import annotations

import errno
import math
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

from fsspec import available_protocols
from fsspec.core import url_to_fs

from backends.base import (
    ByteRange,
    Capabilities,
    ForeignNames,
    ObjectInfo,
    Version,
    as_chunks,
    check_key,
    check_range,
    content_version,
    is_key,
)
from backends.errors import (
    AlreadyExistsError,
    BackendError,
    ConfigurationError,
    ObjectNotFoundError,
    PermissionDeniedError,
    UnavailableError,
    UnknownOutcomeError,
    UnsupportedError,
    web_advice,
)

if TYPE_CHECKING:
    import builtins
    from collections.abc import Iterator, Sequence

    from fsspec import AbstractFileSystem
    from typing_extensions import Buffer

CREATES_ATOMICALLY = frozenset({"s3fs.core.S3FileSystem"})
RENAMES = frozenset({"file", "local", "sftp", "smb"})  # a write there can be seen half done
TEMPORARY = ".tiered-tmp-"
_MODIFIED_NAMES = ("LastModified", "mtime", "modified", "last_modified", "created")
_MS_PER_S = 1000
_WHAT_OPENS = (
    "give file:///folder, s3://bucket/prefix (install tieredmq[s3]), or a scheme that fsspec knows,"
    " such as gs (install gcsfs) or az (install adlfs)"
)


def open_fsspec(url: str, *, single_writer: bool = False) -> FsspecStore:
    """Make a store for any URL that fsspec knows, chains like ``dir::s3://...`` too.

    ``single_writer``: the caller vouches that nobody else writes below it. UnavailableError: the file system connects at
    once, and could not.
    """
    scheme = url.partition(":")[0]
    try:
        file_system, root = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    except ImportError as error:
        raise ConfigurationError(f"{scheme}:// needs one more library: {error}") from error
    except (ValueError, TypeError) as error:
        if scheme not in available_protocols():
            raise ConfigurationError(f"nothing opens {scheme}:// URLs; {_WHAT_OPENS}") from error
        raise ConfigurationError(
            f"cannot open a URL of scheme {scheme!r}: {type(error).__name__}"
        ) from error
    except OSError as error:  # some connect at once, or load a library of the system
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise UnavailableError(f"cannot open {scheme}://: {first}") from error
    return FsspecStore(file_system, str(root), single_writer=single_writer)


class FsspecStore:
    """An ``ObjectStore`` over a file system; see the module's contract."""

    def __init__(self, file_system: Any, root: str, *, single_writer: bool = False) -> None:  # noqa: ANN401 (fsspec ships no types)
        """Use a folder of an ``AbstractFileSystem`` without a cache of listings, as that spells it without its scheme."""
        self._fs: AbstractFileSystem = file_system
        self._root = root.rstrip("/")
        self._single_writer = single_writer
        self.foreign = ForeignNames()
        kind = type(file_system)
        self._atomic = f"{kind.__module__}.{kind.__qualname__}" in CREATES_ATOMICALLY
        protocol = file_system.protocol
        self._scheme = protocol if isinstance(protocol, str) else protocol[0]
        if self._atomic:
            file_system.retries = 1  # of s3fs: a create that is tried again meets its own object

    @property
    def url(self) -> str:
        """The scheme and the folder; never a user or password."""
        start = f"{self._scheme}://"
        return start + self._root.removeprefix(
            start
        )  # of http the file system keeps it in its paths

    @property
    def capabilities(self) -> Capabilities:
        """Only what is known for certain."""
        return Capabilities(put_if_absent=self._atomic, compare_and_set=False)

    def put_if_absent(self, key: str, data: Sequence[Buffer] | Buffer) -> None:
        """Only where the file system can create atomically, or somebody vouched."""
        check_key(key)
        if not (self._atomic or self._single_writer):
            raise UnsupportedError(
                f"{self._scheme} file systems create nothing atomically, so only reading is safe: "
                f"{self.url}; for writing use file://, s3:// or memory://"
            )
        body = b"".join(as_chunks(data))
        with self._mapped(key, write=True):
            if self._atomic:
                self._create(key, body)
            else:
                self._write_alone(key, body)

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        path = self._path(key)
        with self._mapped(key):
            if byte_range is None:
                data = bytes(self._fs.cat_file(path))
                if not data:  # some give them for a folder
                    self.head(key)
                return data
            try:
                data = bytes(self._fs.cat_file(path, start=byte_range.start, end=byte_range.end))
                if len(data) == byte_range.size_bytes:
                    return data
            except PermissionError:
                raise
            except (OSError, ValueError):  # behind the end: each file system in its own way
                pass
            check_range(key, byte_range, self.head(key).size_bytes)
            raise UnavailableError(f"answer was cut: {self._where(key)}")

    def get_ranges(self, key: str, byte_ranges: Sequence[ByteRange]) -> builtins.list[bytes]:
        """One after the other."""
        return [self.get(key, byte_range) for byte_range in byte_ranges]

    def get_versioned(self, key: str) -> tuple[bytes, Version]:
        """The version is a hash of the bytes."""
        data = self.get(key)
        return data, content_version(data)

    def head(self, key: str) -> ObjectInfo:
        """Without a version."""
        path = self._path(key)
        with self._mapped(key):
            info = self._fs.info(path)
            if info["type"] != "file":
                raise ObjectNotFoundError(f"no object, but a folder: {self._where(key)}")
            return _info(key, info)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Reads all names of the prefix's folder first."""
        folder = prefix.rpartition("/")[0]
        if folder and not is_key(folder):
            return
        with self._mapped(prefix):
            try:
                found = self._fs.find(self._below(folder), detail=True)
            except (FileNotFoundError, NotADirectoryError):
                found = {}
        cut = len(self._root) + 1 if self._root else 0
        keys = {path[cut:]: info for path, info in found.items() if info["type"] == "file"}
        for key in sorted(keys):  # code points sort like UTF-8
            if not (key.startswith(prefix) and key > start_after) or TEMPORARY in key:
                continue
            if is_key(key):
                yield _info(key, keys[key])
            else:
                self.foreign.note(key)

    def delete(self, key: str) -> None:
        path = self._path(key)
        with self._mapped(key, write=True):
            if self._fs.isfile(path):
                with suppress(FileNotFoundError):
                    self._fs.rm_file(path)

    def compare_and_set(self, key: str, data: Buffer, expected: Version | None) -> Version:
        """Never offered."""
        check_key(key)
        raise UnsupportedError(
            f"no compare-and-set of {len(memoryview(data))} bytes at {expected} through fsspec: "
            f"{self._where(key)}; use file://, s3:// or memory://"
        )

    def close(self) -> None:
        """The file system closes its own connections."""

    def _create(self, key: str, body: bytes) -> None:
        try:
            self._fs.pipe_file(self._path(key), body, mode="create")
        except PermissionError:
            raise
        except OSError as error:  # s3fs says EINVAL where S3 says 412
            # Nothing else is a refusal: what is there after a lost answer may be ours (I7).
            is_refusal = isinstance(error, FileExistsError) or error.errno == errno.EINVAL
            if is_refusal and self._fs.exists(self._path(key)):
                raise AlreadyExistsError(f"object exists: {self._where(key)}") from error
            raise

    def _write_alone(self, key: str, body: bytes) -> None:
        path = self._path(key)
        if self._fs.exists(path):
            raise AlreadyExistsError(f"object exists: {self._where(key)}")
        folder, _, name = path.rpartition("/")
        if self._scheme not in RENAMES:
            self._fs.pipe_file(path, body)
            return
        self._fs.makedirs(folder, exist_ok=True)
        temporary = f"{folder}/{TEMPORARY}{content_version(name.encode())[:16]}"
        self._fs.pipe_file(temporary, body)
        self._fs.mv(temporary, path)

    def _path(self, key: str) -> str:
        check_key(key)
        return self._below(key)

    def _below(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    def _where(self, key: str) -> str:
        return f"{self.url} {key!r}"

    @contextmanager
    def _mapped(self, key: str, *, write: bool = False) -> Iterator[None]:
        """The one place where whatever a file system raises becomes ours."""
        try:
            yield
        except BackendError:
            raise
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise ObjectNotFoundError(f"no such object: {self._where(key)}") from error
        except PermissionError as error:
            raise PermissionDeniedError(f"refused: {self._where(key)}") from error
        except Exception as error:
            kind = UnknownOutcomeError if write else UnavailableError
            made = kind(f"{type(error).__name__}: {error} ({self._where(key)})")
            made.do = web_advice(self.url)
            raise made from error


def _info(key: str, info: dict[str, Any]) -> ObjectInfo:
    modified = next((info[name] for name in _MODIFIED_NAMES if info.get(name) is not None), None)
    if isinstance(modified, datetime):
        modified = modified.timestamp()
    modified_ms = -1
    if isinstance(modified, int | float) and math.isfinite(modified):
        modified_ms = round(modified * _MS_PER_S)
    return ObjectInfo(key, info["size"], modified_ms)
