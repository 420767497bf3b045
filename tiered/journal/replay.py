"""Reading a journal: newest checkpoint, then the entries behind it, in order.

Ordering: entries are applied by number without a hole, and each must name the checksum of the one before. A missing number
is the head only when nothing lies behind it; when something does, a newer checkpoint is jumped to (old entries are deleted
once two checkpoints cover them).

A journal that is lost is never taken for a new one: the first ``catch_up`` of a ``Guarded`` machine's journal looks for what
a journal leaves beside it. Objects and no entry, or a lease that remembers a later entry than the last one, are a
``JournalLostError``; but the journal is listed once more behind them, since a writer at work in between is not a loss.

Retries and errors: a checkpoint that fails its checks is not believed; an older one, or replay from entry 1, gives the same
state. What was listed and is gone, or is missing, is looked for by another listing, since entries may be deleted while
we read; only what stays missing is damage.

Threads: one reader belongs to one thread; the states that it gives are immutable and may go anywhere.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import zlib
from bisect import bisect_left
from contextlib import contextmanager
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Annotated, Any, Generic, Protocol, TypeVar, runtime_checkable

from zlib_ng import zlib_ng

from backends.errors import ObjectNotFoundError
from backends.lazy_dataclass import dataclass
from backends.wrapping import WrappingStore
from tiered.crashpoints import reached
from tiered.errors import DataError, JournalLostError, OtherVersionError
from tiered.journal.entry import (
    Entry,
    as_row,
    checksum,
    decode_entry,
    json_text,
    open_text,
    require_sparse,
    row_of,
    seal_text,
)
from tiered.journal.lease import JournalEnd, read_lease
from tiered.keys import (
    JOURNAL,
    LEASE,
    SHARD,
    checkpoint_key,
    entry_key,
    parse_journal_key,
    parse_shard_key,
    shard_key,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from concurrent.futures import Executor, Future

    from backends.base import ByteRange, ObjectInfo, ObjectStore

# -- checkpoints ---------------------------------------------------------------------------------
#
# A checkpoint: the state after one entry, compressed.
#
# With it: shards, objects of their own for what of a state stays; and trimming, which deletes what a checkpoint replaces.
#
# Layout: the two lines of ``tiered.journal.entry.seal_text``; fields of the JSON object:
#
# ======== ======================================================================================
# field    content
# ======== ======================================================================================
# format   2
# number   of the entry
# last     checksum of that entry
# shards   names of the objects that hold the rest of the state (below)
# bytes    size of the state's JSON text, ASCII
# state    that text compressed with zlib, in base64
# ======== ======================================================================================
#
# Bounds (I8): no more is unpacked than ``bytes`` says, and no more than ``STATE_BYTES_MAX`` and ``RATIO_MAX`` bytes for each
# that is stored, so that a small object can not become a large state. A state that is larger, or that can be packed better
# than that, is stored without being compressed, by zlib's level 0: it is no larger than what holds it.

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


CHECKPOINT_FORMAT = 2
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
            "format": CHECKPOINT_FORMAT,
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
    document = open_text(data, where=where, versions=(CHECKPOINT_FORMAT,))
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


# -- replay ----------------------------------------------------------------------------------------

S = TypeVar("S")

ENTRY_BYTES_MAX = 256 * 1024 * 1024
CHECKPOINT_BYTES_MAX = 2 * 1024 * 1024 * 1024
"""No more is read of anything that was listed: anyone who can write to the bucket could fill the memory."""
LISTINGS_MAX = 4
"""How often one ``catch_up`` lists the journal, when entries vanish under its hands, before that is damage."""


_SENSELESS = (LookupError, TypeError, ValueError, AttributeError, DataError)
"""What a machine raises for values that make no sense to it. Their checksum holds, so another version has written them."""


class UnknownActionError(Exception):
    """An action of a name or format that this version does not know."""


class Machine(Protocol[S]):
    """A pure state machine over entries. States are immutable."""

    def initial(self) -> S:
        """The state before entry 1."""
        ...

    def apply(self, state: S, entry: Entry) -> S:
        """The state after ``entry``. Pure.

        Raises:
            UnknownActionError: An action that this version does not know.
            ValueError: One that no writer of this version can have made; ``LookupError``, ``TypeError``,
                ``AttributeError`` and ``DataError`` mean the same.
        """
        ...

    def epoch(self, state: S) -> int:
        """The present epoch; 0 before the first."""
        ...

    def dump_chunks(self, state: S) -> Iterator[bytes]:
        """The state as JSON text (``tiered.journal.entry.json_text``), for a checkpoint, a chunk at a time."""
        ...

    def load(self, document: Any) -> S:  # noqa: ANN401 (JSON values)
        """The state that JSON values of such a text say."""
        ...


@runtime_checkable
class Guarded(Protocol):
    """A machine whose journal leaves traces beside it, below the same prefix: data objects, and what the lease remembers."""

    def history(self, state: Any) -> str:  # noqa: ANN401 (the machine's)
        """Which history a state is of."""
        ...

    @property
    def data_roots(self) -> Sequence[str]:
        """Where there is nothing of ours before the journal has an entry."""
        ...

    def is_data(self, key: str) -> bool:
        """Whether a key below the prefix is of an object that only a writer makes; else it is somebody else's."""
        ...


class JournalReader(Generic[S]):
    """Replays a journal and follows it."""

    def __init__(
        self, store: ObjectStore, prefix: str, machine: Machine[S], *, writes: bool = False
    ) -> None:
        """Read nothing yet.

        Args:
            writes: Who asks is going to write: then a lease of another version stops it.
        """
        self._writes = writes
        self._store = store
        self._prefix = prefix
        self._machine = machine
        self.state = machine.initial()  # the state after entry ``number``
        self.number = 0  # the last entry that was applied; 0 for an empty journal
        self.last = 0  # checksum of that entry; 0 for an empty journal
        self.since_checkpoint = 0  # entries applied since the newest checkpoint that is known
        self._too_large: set[str] = set()
        self._shards: dict[str, ShardName] = {}
        self._is_held = not isinstance(machine, Guarded)

    @property
    def end(self) -> JournalEnd:
        """How far we know the journal to reach; from any thread."""
        machine = self._machine
        history = machine.history(self.state) if isinstance(machine, Guarded) else ""
        return JournalEnd(machine.epoch(self.state), self.number, history)

    def catch_up(self) -> list[Entry]:
        """Apply everything that is new.

        Returns:
            The entries that were applied one by one (not those that a checkpoint covers).

        Raises:
            JournalLostError: It is gone, or has lost its end.
            DataError: An entry is damaged, or one is missing in the middle and no checkpoint covers it. The state is
                that of the last entry that could be applied.
            OtherVersionError: An entry or checkpoint is of another version; the state likewise.
        """
        applied = self._catch_up()
        if not self._is_held:
            applied += self._hold()
        return applied

    def require_reached(self, remembered: JournalEnd) -> None:
        """Refuse a journal that ends before an entry of which somebody tells."""
        if remembered.is_beyond(self.end):
            raise self._lost(
                f"the journal has lost its end: it ends with entry {self.number} of epoch {self.end.epoch}, and"
                f" the lease remembers entry {remembered.number} and epoch {remembered.epoch}"
            )

    def _hold(self) -> list[Entry]:
        """Hold the journal against what lies beside it, at its opening."""
        trace = None if self.number else self._trace()
        remembered = self._remembered()
        applied: list[Entry] = []
        if trace is not None or remembered.is_beyond(self.end):
            applied = self._catch_up()  # perhaps a writer was at work between our looks
        if trace is not None and not self.number:
            raise self._lost(
                f"there is no journal, and there are objects that one has named: {trace}"
            )
        self.require_reached(remembered)
        self._is_held = self.number > 0
        return applied

    def _trace(self) -> str | None:
        """A data object; names of others are passed over."""
        machine, prefix = self._machine, self._prefix
        if not isinstance(machine, Guarded):
            return None
        found = (
            info.key for root in machine.data_roots for info in self._store.list(prefix + root)
        )
        return next((key for key in found if machine.is_data(key.removeprefix(prefix))), None)

    def _remembered(self) -> JournalEnd:
        try:
            present, _ = read_lease(self._store, self._prefix + LEASE)
        except OtherVersionError:  # it tells a reader nothing
            if self._writes:
                raise
            present = None
        return present.end if present else JournalEnd()

    def _lost(self, what: str) -> JournalLostError:
        return JournalLostError(
            what,
            where=f"{self._store.url}/{self._prefix}",
            do="restore the journal, or see what `tiered rebuild` makes of the objects; where a new tier is to begin,"
            " delete all that lies there",
        )

    def _catch_up(self) -> list[Entry]:
        applied: list[Entry] = []
        for tries_left in reversed(range(LISTINGS_MAX)):
            entries, checkpoints = self.behind(self.number)
            for number in sorted(checkpoints, reverse=True):
                if number > self.number and self._jump(number):
                    break
            self._apply_all([n for n in sorted(entries) if n > self.number], applied)
            if self.number >= max(entries + checkpoints, default=0):
                break
            if not tries_left:
                raise self._missing(self.number + 1)
        return applied

    def place(self, state: S, number: int, last: int = 0) -> None:
        """Go to a state that somebody vouches for.

        Args:
            last: Checksum of the entry ``number``; 0: all of the journal lies before it, and the next entry follows nothing.
        """
        self.state, self.number, self.last = state, number, last
        self._is_held = True

    def jump_to(self, number: int) -> bool:
        """Go to the state of a checkpoint; whether it is there and passes its checks."""
        return self._jump(number)

    def step(self) -> Entry | None:
        """Apply the next entry, by its number alone; None when there is none, which need not be the head."""
        found = self.read_entry(self.number + 1)
        if found is None:
            return None
        self.apply(*found)
        return found[0]

    def behind(self, number: int) -> tuple[list[int], list[int]]:
        """Numbers of the entries behind ``number``, and of the checkpoints behind it or of that very entry."""
        after = entry_key(self._prefix, number) if number else ""
        entries: list[int] = []
        checkpoints: list[int] = []
        for info in self._store.list(self._prefix + JOURNAL, start_after=after):
            parsed = parse_journal_key(self._prefix, info.key)
            if parsed:
                (checkpoints if parsed[1] else entries).append(parsed[0])
                if info.size_bytes > (CHECKPOINT_BYTES_MAX if parsed[1] else ENTRY_BYTES_MAX):
                    self._too_large.add(info.key)
        return entries, checkpoints

    def read_entry(self, number: int) -> tuple[Entry, bytes] | None:
        """An entry and its bytes; None when there is none with this number."""
        key = entry_key(self._prefix, number)
        self._refuse_too_large(key)
        try:
            data = self._store.get(key)
        except ObjectNotFoundError:
            return None
        entry = decode_entry(data, where=key)
        if entry.number != number:
            raise DataError(
                f"a journal entry says of itself that it is number {entry.number}",
                where=key,
                do="restore the entry, or rebuild the journal",
            )
        return entry, data

    def read_checkpoint(self, number: int) -> tuple[S, int] | None:
        """The state after entry ``number`` and that entry's checksum; None when there is no such checkpoint."""
        machine, key = self._machine, checkpoint_key(self._prefix, number)
        streamed = machine if isinstance(machine, Streamed) else None
        found = self.read_checkpoint_text(number, streamed)
        if found is None:
            return None
        if streamed:
            return found.state, found.last
        shards = [read_shard(self._store, self._prefix, name) for name in found.shards]
        try:
            if not isinstance(machine, Sharded):
                return machine.load(found.state), found.last
            state = machine.load_sharded(found.state, shards)
        except _SENSELESS as error:
            raise no_checkpoint(error, key) from error
        self._shards = {name.digest: name for name in found.shards}
        return state, found.last

    def read_checkpoint_text(
        self, number: int, machine: Streamed | None = None
    ) -> CheckpointText | None:
        """What a checkpoint says; None when there is none with this number."""
        key = checkpoint_key(self._prefix, number)
        self._refuse_too_large(key)
        try:
            found = decode_checkpoint(self._store.get(key), where=key, machine=machine)
        except ObjectNotFoundError:
            return None
        if found.number != number:
            raise DataError(
                f"a checkpoint says of itself that it has number {found.number}", where=key
            )
        return found

    def _refuse_too_large(self, key: str) -> None:
        if key in self._too_large:
            raise DataError(
                "this object is larger than any journal's can be",
                where=key,
                do="delete it, and rebuild the journal with `tiered rebuild`",
            )

    def apply(self, entry: Entry, data: bytes) -> None:
        """Apply the next entry, which the caller knows to be in the store with these bytes."""
        assert entry.number == self.number + 1
        if entry.previous != self.last:
            raise DataError(
                f"this entry is not the successor of journal entry {self.number}",
                where=entry_key(self._prefix, entry.number),
                do="restore the entry, or rebuild the journal",
            )
        self.state = self._applied(entry)
        self.number = entry.number
        self.last = checksum(data)
        self.since_checkpoint += 1

    def _applied(self, entry: Entry) -> S:
        """The state after an entry whose checksum holds: what makes no sense in it is not damage."""
        where = entry_key(self._prefix, entry.number)
        try:
            return self._machine.apply(self.state, entry)
        except UnknownActionError as error:
            raise OtherVersionError(
                f"journal entry {entry.number} has an action unknown here, {error}", where=where
            ) from error
        except _SENSELESS as error:
            raise OtherVersionError(
                f"journal entry {entry.number} has another form: {error!r:.200}", where=where
            ) from error

    def store_checkpoint(self, put: Callable[[str, bytes], None]) -> bytes:
        """Store a checkpoint of the present state, behind those of its shards that are not there yet; its own bytes."""
        machine = self._machine
        if isinstance(machine, Sharded):
            self.state = machine.settled(self.state)
            names = {}
            for shard in machine.shards(self.state):
                name = ShardName(self.number, shard.digest, len(shard.data))
                if shard.digest not in self._shards:
                    put(name.key(self._prefix), shard.data)
                    reached("shard-stored")
                names[shard.digest] = self._shards.setdefault(shard.digest, name)
            self._shards = names
        data = self.checkpoint_bytes()
        put(checkpoint_key(self._prefix, self.number), data)
        reached("checkpoint-stored")
        self.since_checkpoint = 0
        return data

    def checkpoint_bytes(self) -> bytes:
        """A checkpoint of the present state; its shards are stored."""
        text = CheckpointText(self.number, self.last, None, tuple(self._shards.values()))
        return encode_checkpoint(text, partial(self._machine.dump_chunks, self.state))

    def _jump(self, number: int) -> bool:
        try:
            found = self.read_checkpoint(number)
        except DataError:
            found = None  # a checkpoint only makes opening faster; replay gives the same state
        if found is None:
            return False
        self.state, self.last = found
        self.number = number
        self.since_checkpoint = 0
        return True

    def _apply_all(self, numbers: list[int], applied: list[Entry]) -> None:
        """Apply entries in order, until one is not there."""
        for number in numbers:
            found = self.read_entry(number) if number == self.number + 1 else None
            if found is None:
                return
            self.apply(*found)
            applied.append(found[0])

    def _missing(self, number: int) -> DataError:
        return DataError(
            f"journal entry {number} is missing, and later ones are (or were) there",
            where=entry_key(self._prefix, number),
            do="restore the entry, or rebuild the journal",
        )


# -- ahead ---------------------------------------------------------------------------------------
#
# Reads a journal's entries ahead, several at once, and keeps their bytes for the next look in the same process.
#
# Ordering: entries are asked for in the order of their numbers. Whoever asks for one has the next ``AHEAD`` fetched by the
# executor; what is not asked for is dropped at the end. An entry is the same object as long as key, size and time of writing
# are, as listed: then its bytes are taken from memory, and no request is made.
#
# Memory: ``AHEAD`` entries of ``AHEAD_BYTES_MAX``, and ``KEPT_BYTES_MAX``. Larger ones are read when they are asked for.
#
# Retries and errors: those of the store, raised where the entry is asked for. Threads: one asks; the executor's threads
# read.

AHEAD = 32
AHEAD_BYTES_MAX = 1 << 20
KEPT_BYTES_MAX = 64 << 20
_CHECKPOINT = ".checkpoint"


class JournalBytes:
    """Bytes of entries that were read, of one journal."""

    def __init__(self, executor: Executor, *, kept_bytes_max: int = KEPT_BYTES_MAX) -> None:
        self._executor = executor
        self._room = kept_bytes_max
        self._kept: dict[ObjectInfo, bytes] = {}

    @contextmanager
    def reading(self, store: ObjectStore, listed: Sequence[ObjectInfo]) -> Iterator[ObjectStore]:
        """The store, with entries read ahead."""
        ahead = _ReadAhead(store, self, listed)
        try:
            yield ahead
        finally:
            ahead.drop()

    def find(self, info: ObjectInfo) -> bytes | None:
        """What was kept of an object that is listed so."""
        return self._kept.get(info)

    def keep(self, info: ObjectInfo, data: bytes) -> None:
        """Keep bytes, if there is room and the store tells when an object was written."""
        if info.modified_ms >= 0 and len(data) <= self._room and info not in self._kept:
            self._kept[info] = data
            self._room -= len(data)

    def submit(self, store: ObjectStore, info: ObjectInfo) -> Future[bytes]:
        """Read an object."""
        return self._executor.submit(store.get, info.key)


class _ReadAhead(WrappingStore):
    def __init__(
        self, inner: ObjectStore, journal: JournalBytes, listed: Sequence[ObjectInfo]
    ) -> None:
        super().__init__(inner)
        self._journal = journal
        small = (info for info in listed if info.size_bytes <= AHEAD_BYTES_MAX)
        entries = (i for i in small if JOURNAL in i.key and not i.key.endswith(_CHECKPOINT))
        self._infos = sorted(entries, key=lambda info: info.key)
        self._keys = [info.key for info in self._infos]
        self._flying: dict[str, Future[bytes]] = {}
        self._next = 0

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """An object of the store; of an entry perhaps what was read ahead."""
        at = bisect_left(self._keys, key)
        if byte_range is not None or at == len(self._keys) or self._keys[at] != key:
            return self._inner.get(key, byte_range)
        info = self._infos[at]
        kept = self._journal.find(info)
        if kept is not None:
            return kept
        self._read_up_to(at)
        flying = self._flying.pop(key, None)
        data = flying.result() if flying else self._inner.get(key)
        self._journal.keep(info, data)
        return data

    def drop(self) -> None:
        """Nothing more will be asked for; returns when nothing is under way."""
        for future in self._flying.values():
            if not future.cancel():
                future.exception()
        self._flying.clear()

    def _read_up_to(self, at: int) -> None:
        """Have the entry at ``at`` and those behind it under way."""
        self._next = max(self._next, at)
        while self._next < min(at + AHEAD, len(self._infos)):
            info = self._infos[self._next]
            if self._journal.find(info) is None:
                self._flying[info.key] = self._journal.submit(self._inner, info)
            self._next += 1
