"""Stores by URL, and what they really do. Loads a backend, and the libraries it needs, only when a URL asks for it.

========================= =====================================================================
URL                       store
========================= =====================================================================
``file:///folder``        a folder of this machine (percent escapes are decoded)
``/folder``, ``./folder`` the same, as a path, in which a percent sign is one
``s3://bucket/prefix``    an S3-compatible server; which one, says ``S3Options``
``memory://name``         memory of this process, shared by all who give the same name
``fsspec+scheme://...``   any file system of fsspec
any scheme fsspec knows   the same
========================= =====================================================================
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from backends.base import Capabilities
from backends.errors import (
    AlreadyExistsError,
    BackendError,
    ConfigurationError,
    PreconditionFailedError,
    UnknownOutcomeError,
    UnsupportedError,
)
from backends.local import LocalFolderStore
from backends.s3_settings import S3Options
from backends.wrapping import put_own, set_own

if TYPE_CHECKING:
    from backends.base import ObjectStore, Version

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*):(.*)$", re.DOTALL)
_ABSOLUTE = "give a URL like file:///var/tier, s3://bucket/prefix or memory://name"
_PATH = ("/", "./", "../")
"""What a path begins with: a bare name may as well be a bucket whose ``s3://`` was forgotten."""


def open_store(url: str, options: S3Options | None = None) -> ObjectStore:
    """Make the store that a URL names; ``options`` are for ``s3`` only. Asks nothing of the network yet.

    ConfigurationError: the URL names nothing that can be opened, or a library is missing.
    """
    if is_path(url):
        return _open_folder(str(Path(url).resolve()))
    match = _SCHEME.match(url)
    if match is None:
        do = (
            f"a folder is written as ./{redacted(url)} or by its whole path; or {_ABSOLUTE}"
            if url
            else _ABSOLUTE
        )
        raise ConfigurationError(f"not a URL: {redacted(url)!r}; {do}")
    scheme, rest = match[1].lower(), match[2]
    if scheme == "file":
        return _open_file(rest)
    if scheme == "memory":
        from backends.memory import MemoryStore  # noqa: PLC0415 (loaded only for who names it)

        return MemoryStore.shared(_below(scheme, rest))
    if scheme in {"s3", "s3a"}:
        from backends.s3 import open_s3  # noqa: PLC0415 (the same)

        return open_s3(_below(scheme, rest), options or S3Options())
    try:
        from backends.fsspec_store import open_fsspec  # noqa: PLC0415 (the same)
    except ImportError as error:
        raise ConfigurationError(
            f"{scheme}:// needs fsspec: install tieredmq[fsspec], and fsspec's library for the scheme;"
            f" or {_ABSOLUTE}"
        ) from error
    return open_fsspec(f"{scheme.removeprefix('fsspec+')}:{rest}")


def is_path(url: str) -> bool:
    """Whether it is a path of this machine, and not a URL."""
    return url.startswith(_PATH) or url in {".", ".."}


def folder_of(url: str) -> Path | None:
    """The folder that a URL or a path names; None for other stores."""
    if is_path(url):
        return Path(url).resolve()
    if not url.startswith("file:"):
        return None
    return Path(unquote("/" + url.removeprefix("file:").removeprefix("//localhost").strip("/")))


def redacted(url: str) -> str:
    """The URL for a message: without user, password, query and fragment."""
    return re.sub(r"//[^/@]*@", "//***@", re.sub(r"[?#].*$", "", url, flags=re.DOTALL))


def _open_file(rest: str) -> LocalFolderStore:
    if rest.startswith("//localhost/"):
        rest = rest.removeprefix("//localhost")
    if rest.startswith("//") and not rest.startswith("///"):
        raise ConfigurationError(
            f"file://{rest[2:]} names a host or a relative path; write file:/// and the whole path"
        )
    path = unquote(rest.removeprefix("//"))
    if not path.startswith("/"):
        raise ConfigurationError(f"relative path in file:{rest}; write file:/// and the whole path")
    return _open_folder(path)


def _open_folder(path: str) -> LocalFolderStore:
    if "\0" in path:
        raise ConfigurationError("path has a zero byte")
    return LocalFolderStore("/" + path.strip("/"))


def _below(scheme: str, rest: str) -> str:
    if not rest.startswith("//"):
        raise ConfigurationError(f"no // in the {scheme} URL; {_ABSOLUTE}")
    return rest.removeprefix("//").rstrip("/")


# -- what a store really does ----------------------------------------------------------------------
#
# Several servers take the conditions and ignore them; several disks take two names for one that differ only in case.


PREFIX = "probe-"
_TRIES = 6


def probe(store: ObjectStore, probe_id: str, *, below: str = "") -> Capabilities:
    """Write, write again, look for it under another spelling, replace with a stale version, and clean up.

    About ten requests. It cannot show that a store is safe under races, only that it is not deaf to conditions.
    ``probe_id`` makes the keys ``probe-<id>-...``; random, so that no two probes meet. ``below``: prefix of the keys,
    ending in a slash, for who may write only there. After an error it stays open what the store can do.
    """
    for tried in range(_TRIES - 1):
        with suppress(
            UnknownOutcomeError
        ):  # what became of it is not worth asking: the next has other keys
            return _probe(store, f"{probe_id}-{tried}", below)
    return _probe(store, probe_id, below)


def _probe(store: ObjectStore, probe_id: str, below: str) -> Capabilities:
    name = f"{PREFIX}{probe_id}-put"
    created, replaced = below + name, f"{below}{PREFIX}{probe_id}-set"
    try:
        return Capabilities(
            put_if_absent=_creates_once(store, created),
            distinguishes_case=not _is_there(store, below + name.upper()),
            compare_and_set=_replaces_only_the_expected(store, replaced),
        )
    finally:
        for key in (created, replaced):
            with suppress(BackendError):
                store.delete(key)


def _creates_once(store: ObjectStore, key: str) -> bool:
    try:
        put_own(store, key, b"first")
    except UnsupportedError:
        return False
    try:
        store.put_if_absent(key, b"second")
    except AlreadyExistsError:
        return store.get(key) == b"first"
    return False


def _is_there(store: ObjectStore, key: str) -> bool:
    try:
        store.head(key)
    except BackendError as error:
        if error.retriable:
            raise
        return False  # not found; or refused, as S3 answers for what is not there to those who may not list
    return True


def _replaces_only_the_expected(store: ObjectStore, key: str) -> bool:
    try:
        first = set_own(store, key, b"first", None)
    except UnsupportedError:
        return False
    second = set_own(store, key, b"second", first)
    refused = all(_is_refused(store, key, b"third", stale) for stale in (first, None))
    kept = store.get_versioned(key) == (b"second", second)
    store.delete(key)
    # Some versions of MinIO wrote the object when the key was missing.
    return refused and kept and _is_refused(store, key, b"fourth", second)


def _is_refused(store: ObjectStore, key: str, data: bytes, expected: Version | None) -> bool:
    try:
        store.compare_and_set(key, data, expected)
    except PreconditionFailedError:
        return True
    return False
