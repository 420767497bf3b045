"""What of a state stays the same from one checkpoint to the next, each an object of its own that checkpoints name.

How to use it: a machine whose states grow large is ``Sharded``. ``settled`` gives a state that says the same and has all
that changed in shards, of which most are those that it had before; so a checkpoint costs what changed.

Ordering: shards are stored before the checkpoint that names them. A shard's key says at which entry it was stored, and what
is in it: whoever stores the same once more, after a crash or beside us, makes the same object. A checkpoint that names a
shard which is gone, cut or flipped is damaged, and not believed, as any damaged checkpoint.

After a crash: shards that no checkpoint names. ``trim_journal`` deletes them once they are old.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from backends.errors import ObjectNotFoundError
from tiered.errors import DataError
from tiered.keys import shard_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.base import ObjectStore

_DIGEST_DIGITS = 16


@dataclass(frozen=True, slots=True)
class ShardName:
    """How a checkpoint names a shard.

    Attributes:
        number: Of the entry at which it was stored.
        digest: The first 16 hex digits of the SHA-256 of its bytes.
        size_bytes: Of the object.
    """

    number: int
    digest: str
    size_bytes: int

    def row(self) -> list[Any]:
        """As JSON: the fields in order."""
        return [self.number, self.digest, self.size_bytes]

    @classmethod
    def of(cls, row: list[Any]) -> ShardName:
        """Undo ``row``.

        Raises:
            ValueError: It has another form; ``TypeError`` means the same.
        """
        number, digest, size_bytes = row
        is_hex = type(digest) is str and len(digest) == _DIGEST_DIGITS and digest.isalnum()
        if type(number) is not int or type(size_bytes) is not int or not is_hex:
            raise ValueError("this names no shard")
        return cls(number, digest, size_bytes)

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
        """Undo ``dump`` and ``shards``.

        Raises:
            ValueError: It is no such; ``LookupError`` and ``TypeError`` mean the same.
        """
        ...


def digest_of(data: bytes) -> str:
    """By which bytes are known."""
    return hashlib.sha256(data).hexdigest()[:_DIGEST_DIGITS]


def read_shard(store: ObjectStore, prefix: str, name: ShardName) -> bytes:
    """A shard's bytes.

    Raises:
        DataError: It is gone, or not what the checkpoint says.
        BackendError: It could not be read.
    """
    key = name.key(prefix)
    try:
        data = store.get(key)
    except ObjectNotFoundError as error:
        raise DataError("a shard that a checkpoint names is gone", where=key) from error
    if len(data) != name.size_bytes or digest_of(data) != name.digest:
        raise DataError("a shard has other bytes than its checkpoint says", where=key)
    return data
