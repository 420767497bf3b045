"""Stores by URL. Loads a backend, and the libraries it needs, only when a URL asks for it.

========================= =====================================================================
URL                       store
========================= =====================================================================
``file:///folder``        a folder of this machine (percent escapes are decoded)
``s3://bucket/prefix``    an S3-compatible server; which one, says ``S3Options``
``memory://name``         memory of this process, shared by all who give the same name
``fsspec+scheme://...``   any file system of fsspec
any scheme fsspec knows   the same
========================= =====================================================================
"""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, cast
from urllib.parse import unquote

from backends.errors import ConfigurationError
from backends.local import LocalFolderStore
from backends.memory import MemoryStore
from backends.s3_settings import S3Options

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.base import ObjectStore

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*):(.*)$", re.DOTALL)
_ABSOLUTE = "give a URL like file:///var/tier, s3://bucket/prefix or memory://name"


def open_store(url: str, options: S3Options | None = None) -> ObjectStore:
    """Make the store that a URL names. Asks nothing of the network yet.

    Args:
        url: See the table above.
        options: For ``s3`` only.

    Raises:
        ConfigurationError: The URL names nothing that can be opened, or a library is missing.
    """
    match = _SCHEME.match(url)
    if match is None:
        raise ConfigurationError(f"not a URL: {redacted(url)!r}; {_ABSOLUTE}")
    scheme, rest = match[1].lower(), match[2]
    if scheme == "file":
        return _open_file(rest)
    if scheme == "memory":
        return _open_memory(rest)
    if scheme in {"s3", "s3a"}:
        opener = _function("backends.s3", "open_s3")
        return cast("ObjectStore", opener(_below(scheme, rest), options or S3Options()))
    try:
        opener = _function("backends.fsspec_store", "open_fsspec")
    except ImportError as error:
        raise ConfigurationError(
            f"{scheme}:// needs fsspec: install tieredmq[fsspec], and fsspec's library for the scheme;"
            f" or {_ABSOLUTE}"
        ) from error
    return cast("ObjectStore", opener(f"{scheme.removeprefix('fsspec+')}:{rest}"))


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
    if "\0" in path:
        raise ConfigurationError("path has a zero byte")
    return LocalFolderStore("/" + path.strip("/"))


def _open_memory(rest: str) -> MemoryStore:
    return MemoryStore.shared(_below("memory", rest))


def _below(scheme: str, rest: str) -> str:
    if not rest.startswith("//"):
        raise ConfigurationError(f"no // in the {scheme} URL; {_ABSOLUTE}")
    return rest.removeprefix("//").rstrip("/")


def _function(module: str, name: str) -> Callable[..., object]:
    return cast("Callable[..., object]", getattr(importlib.import_module(module), name))
