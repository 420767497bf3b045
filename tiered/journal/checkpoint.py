"""A checkpoint: the state after one entry, compressed.

With it: shards, objects of their own for what of a state stays; and trimming, which deletes what a checkpoint replaces.

Layout: the two lines of ``tiered.journal.entry.seal_text``; fields of the JSON object:

======== ======================================================================================
field    content
======== ======================================================================================
format   2
number   of the entry
last     checksum of that entry
shards   names of the objects that hold the rest of the state (below)
bytes    size of the state's JSON text, ASCII
state    that text compressed with zlib, in base64
======== ======================================================================================

Bounds (I8): no more is unpacked than ``bytes`` says, and no more than ``STATE_BYTES_MAX`` and ``RATIO_MAX`` bytes for each
that is stored, so that a small object can not become a large state. A state that is larger, or that can be packed better
than that, is stored without being compressed, by zlib's level 0: it is no larger than what holds it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import zlib
from operator import index
from typing import TYPE_CHECKING, Annotated, Any, Protocol, runtime_checkable

from zlib_ng import zlib_ng

from backends.errors import ObjectNotFoundError
from backends.lazy_dataclass import dataclass
from tiered.errors import DataError, OtherVersionError
from tiered.journal.entry import as_row, json_text, open_text, require_sparse, row_of, seal_text
from tiered.keys import (
    JOURNAL,
    SHARD,
    checkpoint_key,
    parse_journal_key,
    parse_shard_key,
    shard_key,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from backends.base import ObjectStore


# --------------------------------------------------------------------------------------------------
# What of a state stays the same from one checkpoint to the next, each an object of its own that checkpoints name.
#
# How to use it: a machine whose states grow large is ``Sharded``. ``settled`` gives a state that says the same and has all
# that changed in shards, of which most are those that it had before; so a checkpoint costs what changed.
#
# Ordering: shards are stored before the checkpoint that names them. A shard's key says at which entry it was stored, and
# what is in it: storing the same again, after a crash or concurrently, makes the same object. A checkpoint that
# names a shard which is gone, cut or flipped is damaged, and not believed, as any damaged checkpoint.
#
# After a crash: shards that no checkpoint names. ``trim_journal`` deletes them once they are old.
# --------------------------------------------------------------------------------------------------


_DIGEST_DIGITS = 16


def _is_digest(digest: str) -> None:
    if len(digest) != _DIGEST_DIGITS or not digest.isalnum():
        raise ValueError(f"{digest!r:.80} names no shard")


@dataclass(frozen=True, slots=True)
class ShardName:
    """How a checkpoint names a shard."""

    number: int  # of the entry at which it was stored
    digest: Annotated[str, _is_digest]  # the first 16 hex digits of the SHA-256 of its bytes
    size_bytes: int  # of the object

    def key(self, prefix: str) -> str:
        """Of the object."""
        return shard_key(prefix, self.number, self.digest)


class Shard(Protocol):
    """Something immutable that is known by its bytes."""

    @property
    def data(self) -> bytes:
        """All of it."""
        ...

    @property
    def digest(self) -> str:
        """``digest_of`` these bytes."""
        ...


@runtime_checkable
class Sharded(Protocol):
    """A machine whose ``dump`` leaves out what is in shards."""

    def settled(self, state: Any) -> Any:  # noqa: ANN401 (the machine's)
        """An equal state, of which shards hold all that they can."""
        ...

    def shards(self, state: Any) -> Sequence[Shard]:  # noqa: ANN401 (the machine's)
        """Those of a settled state, in order."""
        ...

    def load_sharded(self, document: Any, shards: Sequence[bytes]) -> Any:  # noqa: ANN401 (the machine's)
        """Undo ``dump`` and ``shards``."""
        ...


@runtime_checkable
class Streamed(Protocol):
    """A machine that makes a state of its text piece by piece, so that the values of the text are never all held."""

    def load_text(self, text: str) -> Any:  # noqa: ANN401 (the machine's)
        """Undo ``dump_chunks``."""
        ...


def digest_of(data: bytes) -> str:
    """By which bytes are known."""
    return hashlib.sha256(data).hexdigest()[:_DIGEST_DIGITS]


def read_shard(store: ObjectStore, prefix: str, name: ShardName) -> bytes:
    """A shard's bytes."""
    key = name.key(prefix)
    try:
        data = store.get(key)
    except ObjectNotFoundError as error:
        raise DataError("a shard that a checkpoint names is gone", where=key) from error
    if len(data) != name.size_bytes or digest_of(data) != name.digest:
        raise DataError("a shard has other bytes than its checkpoint says", where=key)
    return data


FORMAT = 2
STATE_BYTES_MAX = 1024 * 1024 * 1024
"""About three million parts."""
RATIO_MAX = 64
"""Our states are packed to a fifth, and the most regular ones, of empty queues, to a thirtieth."""
_SMALL_BYTES = 1 << 20
_LEVEL = 3
"""100,000 parts are packed in an eighth of a second, to a fifth of their text."""


@dataclass(frozen=True, slots=True)
class CheckpointText:
    """What a checkpoint says."""

    number: int  # of the entry
    last: int  # checksum of that entry
    state: Any  # as ``Machine.dump`` gave it; or what a machine has made of it
    shards: tuple[ShardName, ...] = ()  # what holds the rest of the state


def encode_checkpoint(
    checkpoint: CheckpointText,
    chunks: Callable[[], Iterable[bytes]] | None = None,
    *,
    bytes_max: int = STATE_BYTES_MAX,
) -> bytes:
    """The object's bytes.

    Args:
        chunks: Gives the state's JSON text (``json_text``) a chunk at a time, so that it is never held whole; None: it is
            that of ``checkpoint.state``.
        bytes_max: A state whose text is longer is not compressed.
    """
    text = chunks or (lambda: [json_text(checkpoint.state)])
    packed, size_bytes = _packed(text(), _LEVEL)
    if size_bytes > _unpacked_max(len(packed), bytes_max):
        packed, size_bytes = _packed(text(), 0)  # stored as it is, which needs no belief
    return seal_text(
        {
            "format": FORMAT,
            "number": checkpoint.number,
            "last": checkpoint.last,
            "shards": [*map(row_of, checkpoint.shards)],
            "bytes": size_bytes,
            "state": base64.b64encode(packed).decode("ascii"),
        }
    )


def _packed(chunks: Iterable[bytes], level: int) -> tuple[bytearray, int]:
    packer, packed, size_bytes = zlib_ng.compressobj(level), bytearray(), 0
    for chunk in chunks:
        size_bytes += len(chunk)
        packed += packer.compress(chunk)
    return packed + packer.flush(), size_bytes


def decode_checkpoint(
    data: bytes,
    *,
    where: str,
    bytes_max: int = STATE_BYTES_MAX,
    machine: Streamed | None = None,
) -> CheckpointText:
    """Parse a checkpoint.

    Raises:
        OtherVersionError: It is whole, and of another form; or its state is larger than ``bytes_max``.
    """
    document = open_text(data, where=where, versions=(FORMAT,))
    del data  # it is large, as is what it says: neither is held longer than needed
    try:
        packed = document.pop("state")
        text = require_sparse(_unpack(packed, document["bytes"], bytes_max)).decode("ascii")
        state = machine.load_text(text) if machine else json.loads(text)
        shards = tuple(map(as_row(ShardName).decode, document["shards"]))
        return CheckpointText(index(document["number"]), index(document["last"]), state, shards)
    except (
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        OverflowError,
        RecursionError,
        zlib.error,
    ) as error:
        raise no_checkpoint(error, where) from error


def no_checkpoint(error: Exception, where: str) -> OtherVersionError:
    """A checkpoint whose checksum holds, and that makes no sense."""
    return OtherVersionError(
        f"it is not a checkpoint that is known here: {error!r:.200}", where=where
    )


def _unpacked_max(packed_bytes: int, bytes_max: int) -> int:
    return max(min(bytes_max, RATIO_MAX * packed_bytes + _SMALL_BYTES), packed_bytes)


def _unpack(packed: str, size_bytes: int, bytes_max: int) -> bytes:
    """Exactly ``size_bytes``; a ``ValueError`` when it is more or less. Never unpacks more than one byte beyond."""
    bytes_max = _unpacked_max(len(packed) * 3 // 4, bytes_max)
    if not 0 <= size_bytes <= bytes_max:
        raise ValueError(f"{size_bytes} bytes of state are not within {bytes_max}")
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(base64.b64decode(packed, validate=True), size_bytes + 1)
    except binascii.Error as error:
        raise ValueError(str(error)) from error
    if len(text) != size_bytes or not unpacker.eof or unpacker.unused_data:
        raise ValueError("the state's size is not the one that is said")
    return text


# -- trimming -----------------------------------------------------------------------------------------
#
# Which entries and checkpoints of a journal are needed no more. Pure.
#
# A journal is trimmed up to a checkpoint: what is older than it goes, the checkpoint and its own entry stay. Two checkpoints
# at least are left, with all entries behind the older one, so that one damaged checkpoint costs nothing but time; and enough
# history to tell what was named within the grace, which gc needs.

CHECKPOINTS_KEPT = 2


def replay_starts(entries: Collection[int], checkpoints: Collection[int]) -> list[int]:
    """Where replay to the head can begin, earliest first: checkpoints with no entry missing behind, 0 for the start."""
    head = max([*entries, *checkpoints], default=0)
    first, there = head + 1, set(entries)
    while first - 1 in there:
        first -= 1
    return [0] * (first == 1) + sorted(n for n in checkpoints if n >= first - 1)


def trim_bound(checkpoints: Collection[int], base: int) -> int:
    """The checkpoint that becomes the oldest, with the history behind ``base`` left; 0 when nothing is to be trimmed."""
    kept = sorted(checkpoints)[-CHECKPOINTS_KEPT:]
    if len(kept) < CHECKPOINTS_KEPT:
        return 0
    return max((n for n in checkpoints if n <= min(kept[0], base)), default=0)


def is_trimmed(number: int, bound: int) -> bool:
    """Whether the entry or checkpoint ``number`` goes; nothing does for a bound of 0."""
    return number < bound


# --------------------------------------------------------------------------------------------------
# Deletes what of a journal nobody reads any more, where no grace of a garbage collection has to see it.
#
# Which entries and checkpoints go: above. A checkpoint counts as one that is left only if it,
# and each shard that it names, is there as it says. A shard goes when no checkpoint that stays names it, and when it was
# stored before the oldest of these: younger ones may be of a checkpoint that is about to be stored.
#
# Ordering: entries and checkpoints first, oldest first, so that what a crash leaves is read from a checkpoint; then shards.
#
# Whoever sleeps, and wakes up when the entry behind the last that it knows is gone, is fenced
# (``tiered.journal.append``); one that stores a checkpoint of shards that are gone has stored one that nobody believes.
# --------------------------------------------------------------------------------------------------


def trim_journal(store: ObjectStore, prefix: str, base: int) -> int:
    """Delete what is older than the newest checkpoint not newer than ``base``, if another is newer; how many went.

    Raises:
        OtherVersionError: A checkpoint that stays is of another version. Nothing was deleted.
    """
    found = {info.key: info for info in store.list(prefix + JOURNAL)}
    parsed = {key: row for key in found if (row := parse_journal_key(prefix, key))}
    checkpoints = sorted(number for number, is_checkpoint in parsed.values() if is_checkpoint)
    bound = trim_bound(checkpoints, base)
    gone = [key for key, (number, _) in sorted(parsed.items()) if is_trimmed(number, bound)]
    if not gone:
        return 0
    sizes = {info.key: info.size_bytes for info in store.list(prefix + SHARD)}
    named = {
        number: _named(store, prefix, number, sizes) for number in checkpoints if number >= bound
    }
    usable = [number for number, keys in named.items() if keys is not None]
    if trim_bound(usable, base) != bound:
        return 0
    kept = {key for keys in named.values() for key in keys or ()}
    shards = {key: number for key in sizes if (number := parse_shard_key(prefix, key)) is not None}
    gone += [key for key, number in sorted(shards.items()) if number < bound and key not in kept]
    for key in gone:
        store.delete(key)
    return len(gone)


def _named(
    store: ObjectStore, prefix: str, number: int, sizes: dict[str, int]
) -> dict[str, int] | None:
    """The shards of a checkpoint, with their sizes; None when it is of no use."""
    key = checkpoint_key(prefix, number)
    try:
        text = decode_checkpoint(store.get(key), where=key)
    except (DataError, ObjectNotFoundError):
        return None
    found = {name.key(prefix): name.size_bytes for name in text.shards}
    return found if found.items() <= sizes.items() else None
