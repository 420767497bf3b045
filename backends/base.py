"""The interface to an object store, as small as it can be.

Rules that hold for every implementation and are checked by ``backends.testing``:

* An object appears whole or not at all; a reader never sees part of one.
* ``put_if_absent`` is atomic among all writers on all machines. It is the only way to create an object.
* A listing is in byte order of the UTF-8 keys, and sees every finished write and delete. What others have put there under
  names that are no keys (``check_key``) it leaves out; ``foreign_below`` tells of it.
* Every call has a deadline (``timeout_s`` of the store, from its options). A write that missed it raises
  ``UnknownOutcomeError``; a read ``UnavailableError``.
* All methods may be called from any thread at once.
* No method retries by itself; ``backends.wrapping.RetryingStore`` does.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from typing import TYPE_CHECKING, NamedTuple, NewType, Protocol, cast, runtime_checkable

from backends.errors import ForkedError, InvalidKeyError, InvalidRangeError, ShortReadError
from backends.lazy_dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Buffer


Version = NewType("Version", str)
"""Opaque mark of one state of one object (an ETag, a content hash); equal marks mean equal objects."""

KEY_BYTES_MAX = 1024
KEY_SEGMENT_BYTES_MAX = 255
_CONTROL = re.compile(rb"[\x00-\x1f\x7f]")
_NO_SEGMENTS = frozenset({"", ".", ".."})


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Half-open range of bytes ``[start, end)`` of one object; ``0 <= start < end``."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise ValueError(f"not a byte range: [{self.start}, {self.end})")

    @property
    def size_bytes(self) -> int:
        """Number of bytes in the range."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a listing or ``head`` tells of an object."""

    key: str  # relative to the store's prefix; never begins with a slash
    size_bytes: int  # length of the object
    modified_ms: int
    """When it was written, by the server's clock (UTC ms); -1 when the store does not say."""
    version: Version | None = None
    """Its version, or None in a listing of a store that does not list it."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a store can do for certain. ``backends.registry`` finds out on the real one instead of believing."""

    put_if_absent: bool  # creation is atomic among writers
    compare_and_set: bool  # ``compare_and_set`` is atomic among writers
    distinguishes_case: bool = True
    """Keys that differ only in the case of letters are two keys. Folders of many disks (macOS, SMB) take them for
    one."""


@runtime_checkable
class ObjectStore(Protocol):
    """A flat space of immutable objects under one prefix, and a few small mutable ones."""

    @property
    def url(self) -> str:
        """Canonical URL of this store, without secrets, for messages."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What this store claims to do; ``backends.registry.probe`` checks the claim."""
        ...

    def put_if_absent(self, key: str, data: Sequence[Buffer] | Buffer) -> None:
        """Create an object that must not exist yet; durable when this returns.

        The bytes come in one buffer or in several that are joined in order; they are not changed, and not kept.
        AlreadyExistsError: an object has this key, and nothing was written. UnknownOutcomeError: it may have been written,
        now or later. After any other error nothing was written.
        """
        ...

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """Read an object or a range of it, never less than was asked for.

        Raises:
            ObjectNotFoundError: No such object.
            InvalidRangeError: The range begins at or behind the object's end.
            ShortReadError: The object ends inside the range, or the answer was cut.
            UnavailableError: Not read; may be tried again.
        """
        ...

    def get_ranges(self, key: str, byte_ranges: Sequence[ByteRange]) -> list[bytes]:
        """Read several ranges of one object, in the order given, at once where the store can; all or none."""
        ...

    def get_versioned(self, key: str) -> tuple[bytes, Version]:
        """Read a small object whole, with the version that ``compare_and_set`` takes."""
        ...

    def head(self, key: str) -> ObjectInfo:
        """Size and version of an object; ObjectNotFoundError as of ``get``."""
        ...

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """All objects whose key begins with ``prefix`` (plain string prefix, "" for all), in byte order of keys.

        Args:
            prefix: What the keys begin with.
            start_after: Only keys greater than this one.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove an object; a missing one is not an error (so that a repeated delete is harmless)."""
        ...

    def compare_and_set(self, key: str, data: bytes, expected: Version | None) -> Version:
        """Replace a small object if it is still at ``expected``; None: create it if it is absent. The new version.

        PreconditionFailedError: another version is there, or none (or, with None, any), and nothing was written.
        UnknownOutcomeError: it may have been written, now or later: read it back and compare the bytes.
        """
        ...

    def close(self) -> None:
        """Give back connections. Using the store afterwards is a defect of the caller."""
        ...


class IntoStore(Protocol):
    """What a store offers besides that can read into memory of its caller; ``get_into`` asks."""

    def get_into(self, key: str, byte_range: ByteRange, target: memoryview) -> None:
        """Read a range as ``ObjectStore.get`` does, into ``target``: as large as that, writable, flat.

        The memory is not kept. After an error anything may stand in it.
        """
        ...


def check_key(key: str) -> None:
    """Refuse keys that some store would lose, change or never list: InvalidKeyError, with the rule that is broken.

    The rules are what all servers bear: no empty, ``.`` or ``..`` segment, so no ``//`` and no slash at either end;
    segments of at most 255 and keys of at most 1,024 bytes of UTF-8; no control characters.
    """
    try:
        encoded = key.encode()
    except UnicodeEncodeError:
        raise InvalidKeyError(f"key is not valid Unicode: {key!r}") from None
    if len(encoded) > KEY_BYTES_MAX:
        raise InvalidKeyError(
            f"key has {len(encoded)} bytes, at most {KEY_BYTES_MAX} are allowed: {key!r}"
        )
    if _CONTROL.search(encoded):
        raise InvalidKeyError(f"key has a control character: {key!r}")
    for segment in key.split("/"):
        if segment in _NO_SEGMENTS:
            raise InvalidKeyError(f"key has the segment {segment!r}: {key!r}")
        if (
            4 * len(segment) > KEY_SEGMENT_BYTES_MAX
            and len(segment.encode()) > KEY_SEGMENT_BYTES_MAX
        ):
            raise InvalidKeyError(
                f"key has a segment of over {KEY_SEGMENT_BYTES_MAX} bytes: {key!r}"
            )


# -- processes -------------------------------------------------------------------------------------
#
# A fork copies locks that other threads hold, pools without their threads, and connections that two processes would then
# write to: a user of such a store may wait for ever. So each says at once that it is another process's.

FORKED = "it was opened by the process that this one was forked off"
OPEN_ANEW = "open it again in this process, or start processes by `spawn` or `forkserver`"
"""What to do about it."""


def require_same_process(pid: int, where: str) -> None:
    """Refuse to use what another process, ``pid``, has opened."""
    if os.getpid() != pid:
        raise ForkedError(f"{FORKED} ({where}); {OPEN_ANEW}")


# -- buffers ---------------------------------------------------------------------------------------

Chunk = bytes | memoryview
"""A flat buffer whose length is its number of bytes."""


def as_chunks(data: Sequence[Buffer] | Buffer) -> list[Chunk]:
    """The bytes of ``data`` (C-contiguous) in chunks, in order, without the empty ones. Copies nothing."""
    parts = data if isinstance(data, list | tuple) else [data]
    # `bytes` as they are: a view of each would double the cost of many small ones.
    chunks = [part if type(part) is bytes else _flat(cast("Buffer", part)) for part in parts]
    return [chunk for chunk in chunks if chunk]


def _flat(part: Buffer) -> memoryview:
    view = memoryview(part)
    if not view.nbytes:
        return memoryview(b"")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def size_bytes(data: Sequence[Buffer] | Buffer) -> int:
    """How many bytes ``data`` has."""
    return sum(map(len, as_chunks(data)))


# -- ranges ----------------------------------------------------------------------------------------


def check_range(key: str, byte_range: ByteRange, size_bytes: int) -> None:
    """Refuse a range that an object of ``size_bytes`` bytes cannot serve whole.

    InvalidRangeError: it begins at or behind the end. ShortReadError: it ends behind the end.
    """
    asked = f"[{byte_range.start}, {byte_range.end}) of {key!r}, which has {size_bytes} bytes"
    if byte_range.start >= size_bytes:
        raise InvalidRangeError(f"range begins behind the end: {asked}")
    if byte_range.end > size_bytes:
        raise ShortReadError(f"range ends behind the end: {asked}")


# -- memory that the caller has --------------------------------------------------------------------
#
# Reading into memory that the caller has, on stores that can and on those that cannot.
#
# Fresh memory costs more than the bytes that are read into it: the kernel clears each page when it is first
# touched. Who reads much, and again and again, does better with memory that it uses again.


def reads_into(store: ObjectStore) -> bool:
    """Whether a store, and every store that it is around, fills the caller's memory without a copy in between."""
    inner = getattr(store, "inner", None)
    return _filling(store) is not None and (inner is None or reads_into(inner))


def get_into(store: ObjectStore, key: str, byte_range: ByteRange, target: memoryview) -> None:
    """By way of ``get`` where the store has no better way."""
    filling = _filling(store)
    if filling is not None:
        filling.get_into(key, byte_range, target)
        return
    data = store.get(key, byte_range)
    if len(data) != len(target):
        raise ShortReadError(f"{len(data)} bytes instead of {len(target)} of {key!r}")
    target[:] = data


def _filling(store: ObjectStore) -> IntoStore | None:
    # `isinstance` with a protocol looks at every member, for each call anew.
    return cast("IntoStore", store) if hasattr(type(store), "get_into") else None


# -- names of others -------------------------------------------------------------------------------

NAMES_MAX = 10_000
"""So many are remembered; of more it is only known that there are."""


class ForeignNames:
    """What listings of one store have left out. Any thread may call anything.

    Others write into the same bucket or folder, and one odd name of theirs must stop nothing. So listings leave such
    things out, and the store remembers them here for commands that name them (``tiered verify``, ``doctor``, ``gc``).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: dict[str, None] = {}

    def note(self, name: str | bytes) -> None:
        """Remember one, by its whole name below the store's prefix."""
        text = printable(name)
        with self._lock:
            if len(self._names) < NAMES_MAX:
                self._names[text] = None

    def below(self, prefix: str) -> list[str]:
        """All that begin with ``prefix``, fit to be printed, sorted."""
        with self._lock:
            return sorted(name for name in self._names if name.startswith(prefix))


def foreign_below(store: ObjectStore, prefix: str) -> list[str]:
    """What listings of a store, or of the one that it wraps, have met below ``prefix`` and left out. Asks nothing."""
    inner: object = store
    while inner is not None:
        foreign = getattr(inner, "foreign", None)
        if isinstance(foreign, ForeignNames):
            return foreign.below(prefix)
        inner = getattr(inner, "inner", None)
    return []


def printable(name: str | bytes) -> str:
    r"""A name as text that any terminal and any document bears: what cannot be shown is ``\xff``, ``\n`` and the like."""
    if isinstance(name, bytes):
        name = name.decode("utf-8", "backslashreplace")
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in name
    )


# -- prefixes --------------------------------------------------------------------------------------

_LAST_CHARACTER = "\U0010ffff"
_FIRST_SAFE = 0x22  # what is before a space or below, XML cannot carry
_AFTER_SURROGATES = 0xE000
_BEFORE_SURROGATES = 0xD7FF


def keys_from(root: str, prefix: str, start_after: str) -> tuple[str, str]:
    """Folder and key with which to list what begins with ``prefix``, behind ``start_after``; both below ``root``.

    The folder is that of the prefix, "" or ending in a slash, as ``root`` is. The listing begins behind the later of
    ``start_after`` and a key just before the prefix, so that what sorts before is not sent; what does not begin with the
    prefix must still be left out.
    """
    wanted = root + prefix
    folder = wanted[: wanted.rfind("/") + 1]
    after = root + start_after if start_after else ""
    return folder, max(after, _just_before(wanted) if len(wanted) > len(folder) else "")


def _just_before(wanted: str) -> str:
    """A key before ``wanted`` with hardly a key between them, or "" where that is not safe."""
    last = ord(wanted[-1])
    if last < _FIRST_SAFE:
        return ""
    before = _BEFORE_SURROGATES if last == _AFTER_SURROGATES else last - 1
    return wanted[:-1] + chr(before) + _LAST_CHARACTER


def is_key(text: str) -> bool:
    """Whether something can have this key."""
    try:
        check_key(text)
    except InvalidKeyError:
        return False
    return True


class StoredVersion(NamedTuple):
    """A version of an object in a bucket that keeps them, or the marker of its deletion."""

    key: str  # of the object
    version_id: str  # by which it is deleted
    size_bytes: int  # of it; 0 for a marker
    is_latest: bool  # it is what a GET gives, or, a marker, why there is nothing
    is_marker: bool  # it is not an object


# -- versions --------------------------------------------------------------------------------------


def content_version(data: Buffer) -> Version:
    """The same for the same bytes, and practically only for them."""
    return Version(hashlib.sha256(data).hexdigest())
