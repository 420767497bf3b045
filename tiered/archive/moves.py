"""Files of an archive that take the place of others: values, actions, and the rule by which replay accepts them. Pure.

A file may hold rows of several queues, and of several stretches of one. Then each stretch names it, with the numbers of its
own rows in it (a *piece*): the proof of each stretch stays what it was, whichever file its rows lie in. A merge says only
which pieces lie in which new file; it changes no stretch otherwise.

A piece is known by its lane and ``low``: a row is in one file, and ``low`` is the offset of a piece's first row.
"""

from __future__ import annotations

import base64
import json
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, overload

import numpy as np

from tiered.archive.model import LOG, Archived, ArchiveLane, ParquetFile
from tiered.errors import DataError
from tiered.journal.entry import json_text
from tiered.log.wellformed import check_ints, check_texts

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    import numpy.typing as npt

    from tiered.journal.entry import Action


# -- collections that share ------------------------------------------------------------------------
#
# Immutable collections that share with their predecessors what did not change, so that replay of a long log
# stays linear.
#
# Each change gives another collection and copies a few hundred references at most; whoever holds the old one
# sees no change.

_CHUNK = 256
"""Stretches of a chunk, at most."""
_BITS = 5
_LEAF = 32
_BITS_MAX = 60

K = TypeVar("K", bound="Hashable")
V = TypeVar("V")


class Packed:
    """Stretches as a checkpoint has them: what planning asks is at hand, the rest a text until somebody looks.

    Attributes:
        columns: Of each stretch, a row a column: start, end, smallest and greatest store time (-1: no row), bad records.
        text: All of them, as ``_unpacked`` reads it.
    """

    __slots__ = ("columns", "text")

    def __init__(self, columns: npt.NDArray[np.int64], text: str) -> None:
        """Of what ``row`` gave."""
        self.columns = columns
        self.text = text

    @classmethod
    def of(cls, row: list[Any]) -> Packed:
        """Undo ``row``.

        Raises:
            ValueError: It has another form; ``TypeError`` means the same.
        """
        packed, text = row
        check_texts((packed, text), "stretches of a queue")
        data = np.frombuffer(_inflated(packed, _COLUMNS_BYTES_MAX), "<i8")
        columns = data.reshape(_COLUMNS, -1).cumsum(axis=1)
        if not columns.size or (columns[1] <= columns[0]).any():
            raise ValueError("stretches of a queue are empty")
        if (columns[0, 1:] < columns[1, :-1]).any():
            raise ValueError("stretches of a queue overlap")
        return cls(columns, text)

    @classmethod
    def pack(cls, rows: Sequence[Archived]) -> Packed:
        """Of one stretch at least."""
        documents = json_text([one.document() for one in rows])
        return cls(_columns(rows), _deflated(documents))

    def row(self) -> list[str]:
        """As JSON."""
        steps = np.diff(self.columns, axis=1, prepend=0)
        return [_deflated(steps.astype("<i8").tobytes()), self.text]

    def rows(self) -> tuple[Archived, ...]:
        """The stretches.

        Raises:
            DataError: They are not what the columns say.
        """
        found, columns = _unpacked(self.text)
        if not np.array_equal(columns, self.columns):
            raise DataError(
                "a checkpoint of the archive's log says two things of a queue", where=LOG
            )
        return found


_COLUMNS = 5
_COLUMNS_BYTES_MAX = 8 * _COLUMNS * 2 * _CHUNK
_TEXT_BYTES_MAX = 256 << 20
_LOOKED_AT = 16
"""Chunks that stay as they were unpacked, since whoever looks at one goes on to the next stretch of it."""


def _columns(rows: Sequence[Archived]) -> npt.NDArray[np.int64]:
    found = [
        (
            one.start,
            one.end,
            min((file.store_min_ms for file in one.files), default=-1),
            max((file.store_max_ms for file in one.files), default=-1),
            one.bad,
        )
        for one in rows
    ]
    return np.array(found, np.int64).reshape(-1, _COLUMNS).T


@lru_cache(maxsize=_LOOKED_AT)
def _unpacked(text: str) -> tuple[tuple[Archived, ...], npt.NDArray[np.int64]]:
    """The stretches, and their columns."""
    try:
        rows = tuple(map(Archived.of, json.loads(_inflated(text, _TEXT_BYTES_MAX))))
    except (LookupError, TypeError, ValueError, zlib.error) as error:
        raise DataError(
            f"a checkpoint of the archive's log makes no sense: {error!r:.200}", where=LOG
        ) from error
    return rows, _columns(rows)


def _deflated(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 6)).decode("ascii")


def _inflated(text: str, bytes_max: int) -> bytes:
    """No more than so many bytes are ever unpacked (I8)."""
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(base64.b64decode(text, validate=True), bytes_max)
    except zlib.error as error:  # no ValueError, as whoever loads a checkpoint expects
        raise ValueError(f"stretches of a queue cannot be unpacked: {error}") from error
    if not unpacker.eof:
        raise ValueError("stretches of a queue are cut, or too many")
    return data


_Chunk = tuple[Archived, ...] | Packed


def _rows(chunk: _Chunk) -> tuple[Archived, ...]:
    return chunk.rows() if isinstance(chunk, Packed) else chunk


def _start(chunk: _Chunk) -> int:
    return int(chunk.columns[0, 0]) if isinstance(chunk, Packed) else chunk[0].start


def _touches(chunk: _Chunk, start: int, end: int) -> bool:
    """Whether one may overlap with offsets ``[start, end)``; nothing is unpacked for that."""
    if not isinstance(chunk, Packed):
        return True
    low, high = chunk.columns[:2]
    return bool(((low < end) & (high > start)).any())


def _count(chunk: _Chunk) -> int:
    return chunk.columns.shape[1] if isinstance(chunk, Packed) else len(chunk)


class Stretches(Sequence[Archived]):
    """Stretches of a lane, apart from one another, in order of offset. Equal to a tuple of the same.

    What came from a checkpoint stays packed, about a hundred bytes a stretch, until it is looked at; what was changed since
    is not packed before the next checkpoint.
    """

    __slots__ = ("_chunks", "_total")

    def __init__(self, found: Iterable[Archived] = ()) -> None:
        rows = tuple(found)
        starts = range(0, len(rows), _CHUNK // 2)
        self._chunks: tuple[_Chunk, ...] = tuple(rows[at : at + _CHUNK // 2] for at in starts)
        self._total = len(rows)

    @classmethod
    def of(cls, chunks: Iterable[Packed]) -> Stretches:
        """As a checkpoint has them.

        Raises:
            ValueError: They overlap.
        """
        found = tuple(chunks)
        for one, two in pairwise(found):
            if two.columns[0, 0] < one.columns[1, -1]:
                raise ValueError("stretches of a queue overlap")
        return _made(found)

    def packed(self) -> Iterator[Packed]:
        """For a checkpoint; what did not change since the last costs nothing."""
        for chunk in self._chunks:
            yield chunk if isinstance(chunk, Packed) else Packed.pack(chunk)

    def columns(self) -> npt.NDArray[np.int64]:
        """The columns, from what is packed as it is."""
        found = [c.columns if isinstance(c, Packed) else _columns(c) for c in self._chunks]
        return np.concatenate(found, axis=1) if found else np.zeros((_COLUMNS, 0), np.int64)

    def around(self, start: int, end: int) -> list[Archived]:
        """Those that overlap with offsets ``[start, end)``, in order."""
        found: list[Archived] = []
        first = self._chunk(start)
        for number in range(first, len(self._chunks)):
            if _start(self._chunks[number]) >= end:
                break
            if not _touches(self._chunks[number], start, end):
                continue
            chunk = _rows(self._chunks[number])
            at = max(_place(chunk, start) - 1, 0) if number == first else 0
            while at < len(chunk) and chunk[at].start < end:
                found += [chunk[at]] if chunk[at].end > start else []
                at += 1
        return found

    def with_one(self, new: Archived) -> Stretches:
        """With another, which overlaps with none."""
        if not self._chunks:
            return _made(((new,),))
        number = self._chunk(new.start)
        chunk = _rows(self._chunks[number])
        at = _place(chunk, new.start)
        whole = (*chunk[:at], new, *chunk[at:])
        half = len(whole) if at == len(chunk) else len(whole) // 2  # mostly they come at the end
        parts = (
            (whole,)
            if len(whole) <= _CHUNK
            else tuple(filter(None, (whole[: half - 1], whole[half - 1 :])))
        )
        return _made((*self._chunks[:number], *parts, *self._chunks[number + 1 :]), len(self) + 1)

    def with_changed(self, new: Archived) -> Stretches:
        """With one in the place of that which begins where it does.

        Raises:
            LookupError: None does.
        """
        number = self._chunk(new.start)
        chunk = _rows(self._chunks[number])
        at = _place(chunk, new.start) - 1
        if at < 0 or chunk[at].start != new.start:
            raise LookupError(new.start)
        changed = (*chunk[:at], new, *chunk[at + 1 :])
        chunks = (*self._chunks[:number], changed, *self._chunks[number + 1 :])
        return _made(chunks, len(self))

    def without(self, starts: Iterable[int]) -> Stretches:
        """Without those that begin there."""
        gone = set(starts)
        touched = {self._chunk(start) for start in gone} if self._chunks else set()
        return _made(
            tuple(
                kept
                for number, chunk in enumerate(self._chunks)
                if (
                    kept := chunk
                    if number not in touched
                    else tuple(one for one in _rows(chunk) if one.start not in gone)
                )
            )
        )

    def _chunk(self, start: int) -> int:
        """The last chunk that begins there or before; the first if none does."""
        return max(bisect_right(self._chunks, start, key=_start) - 1, 0)

    def __len__(self) -> int:
        return self._total

    def __iter__(self) -> Iterator[Archived]:
        for chunk in self._chunks:
            yield from _rows(chunk)

    @overload
    def __getitem__(self, index: int) -> Archived: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Archived]: ...
    def __getitem__(self, index: int | slice) -> Archived | Sequence[Archived]:
        return tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stretches | tuple):
            return NotImplemented
        return tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


def _made(chunks: tuple[_Chunk, ...], count: int | None = None) -> Stretches:
    found = Stretches()
    found._chunks = chunks  # noqa: SLF001 (its own)
    found._total = sum(map(_count, chunks)) if count is None else count  # noqa: SLF001
    return found


def _place(chunk: tuple[Archived, ...], start: int) -> int:
    """Behind those that begin there or before."""
    return bisect_right(chunk, start, key=lambda one: one.start)


class Shared(Generic[K, V]):
    """A mapping: a tree of small dictionaries by the hashes of their keys. In no order."""

    __slots__ = ("_root", "_size")

    def __init__(self, items: Iterable[tuple[K, V]] = ()) -> None:
        self._root: object = {}
        self._size = 0
        for key, value in items:
            self._size += self.get(key) is None
            self._root = _changed(self._root, hash(key), 0, key, value)

    def get(self, key: K) -> V | None:
        """The value of a key, if it has one."""
        node, bits = self._root, hash(key)
        while isinstance(node, tuple):
            node, bits = node[bits & (_LEAF - 1)], bits >> _BITS
        return cast("dict[K, V]", node).get(key)

    def having(self, key: K, value: V) -> Shared[K, V]:
        """With a value for a key, in the place of that which it had."""
        is_new = self.get(key) is None
        return self._with(_changed(self._root, hash(key), 0, key, value), self._size + is_new)

    def lacking(self, key: K) -> Shared[K, V]:
        """Without a key."""
        if self.get(key) is None:
            return self
        return self._with(_changed(self._root, hash(key), 0, key, None), self._size - 1)

    def _with(self, root: object, size: int) -> Shared[K, V]:
        found: Shared[K, V] = Shared()
        found._root, found._size = root, size
        return found

    def __len__(self) -> int:
        return self._size

    def values(self) -> Iterator[V]:
        """All values."""
        nodes: list[object] = [self._root]
        while nodes:
            node = nodes.pop()
            if isinstance(node, tuple):
                nodes += node
            else:
                yield from cast("dict[K, V]", node).values()


def _changed(node: object, bits: int, depth: int, key: object, value: object) -> object:
    """A node with another value for a key; None takes it away."""
    if isinstance(node, tuple):
        at = bits & (_LEAF - 1)
        return (
            *node[:at],
            _changed(node[at], bits >> _BITS, depth + _BITS, key, value),
            *node[at + 1 :],
        )
    leaf = dict(cast("dict[object, object]", node))
    if value is None:
        leaf.pop(key, None)
    else:
        leaf[key] = value
    if len(leaf) <= _LEAF or depth >= _BITS_MAX:
        return leaf
    children: list[dict[object, object]] = [{} for _ in range(_LEAF)]
    for each, kept in leaf.items():
        children[hash(each) >> depth & (_LEAF - 1)][each] = kept
    return tuple(children)


# -- moves -----------------------------------------------------------------------------------------

MERGE = "merge"
PACK = "pack"


@dataclass(frozen=True, slots=True)
class MovedPiece:
    """Rows of one stretch in one file.

    Attributes:
        lane: Whose.
        file: The numbers of these rows, with key, size and checksum of the file that holds them.
    """

    lane: ArchiveLane
    file: ParquetFile

    @property
    def mark(self) -> tuple[ArchiveLane, int]:
        """What it is known by."""
        return self.lane, self.file.low


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file that takes the place of others.

    Attributes:
        key: Relative to the archive.
        size_bytes: Of the object.
        crc: CRC-32 of the object.
        pieces: What it holds, as it lay before.
    """

    key: str
    size_bytes: int
    crc: int
    pieces: tuple[MovedPiece, ...]


@dataclass(frozen=True, slots=True)
class Replaced:
    """An object that nothing names any more.

    Attributes:
        key: Relative to the archive.
        size_bytes: Of the object.
        at_ms: Time of the entry since which that is so.
    """

    key: str
    size_bytes: int
    at_ms: int

    def row(self) -> list[Any]:
        """As JSON: the fields in order."""
        return [self.key, self.size_bytes, self.at_ms]

    @classmethod
    def of(cls, row: list[Any]) -> Replaced:
        """Undo ``row``.

        Raises:
            ValueError: It has another form; ``TypeError`` means the same.
        """
        key, size_bytes, at_ms = row
        check_texts((key,), "a file that was replaced")
        check_ints((size_bytes, at_ms), "a file that was replaced")
        return cls(key, size_bytes, at_ms)


def merge_action(files: Iterable[NewFile]) -> Action:
    """The action by which files take the place of others."""
    return {"do": MERGE, "format": 1, "files": [_file_row(file) for file in files]}


def pack_action(stretches: Iterable[tuple[ArchiveLane, int, Archived]]) -> Action:
    """The action that adds stretches that share files: all of them, or none.

    Args:
        stretches: Lane, how many marks of the lane the archiver knew of, and what it archived.
    """
    rows = [
        {"lane": lane.row(), "tails": tails, **archived.document()}
        for lane, tails, archived in stretches
    ]
    return {"do": PACK, "format": 1, "stretches": rows}


def _file_row(file: NewFile) -> dict[str, Any]:
    lanes: dict[ArchiveLane, list[list[Any]]] = {}
    for piece in file.pieces:
        lanes.setdefault(piece.lane, []).append([piece.file.low, piece.file.key])
    return {
        "key": file.key,
        "size_bytes": file.size_bytes,
        "crc": file.crc,
        "rows": sum(piece.file.rows for piece in file.pieces),
        "pieces": [[lane.row(), found] for lane, found in lanes.items()],
    }


def pieces_of(
    lanes: Mapping[ArchiveLane, Sequence[Archived]], only: Iterable[ArchiveLane] | None = None
) -> Iterator[MovedPiece]:
    """Every piece, in order of lane and stretch.

    Args:
        lanes: Stretches of each lane.
        only: Of these lanes; None: of all.
    """
    for lane in sorted(lanes if only is None else only):
        for archived in lanes[lane]:
            for file in archived.files:
                yield MovedPiece(lane, file)


def whole_files(pieces: Iterable[ParquetFile]) -> list[ParquetFile]:
    """One file of each key, with the numbers of all its pieces together; in the order in which they first come."""
    found: dict[str, ParquetFile] = {}
    for piece in pieces:
        known = found.get(piece.key)
        found[piece.key] = piece if known is None else _together(known, piece)
    return list(found.values())


def _together(one: ParquetFile, two: ParquetFile) -> ParquetFile:
    return replace(
        one,
        low=min(one.low, two.low),
        high=max(one.high, two.high),
        rows=one.rows + two.rows,
        store_min_ms=min(one.store_min_ms, two.store_min_ms),
        store_max_ms=max(one.store_max_ms, two.store_max_ms),
        body_crc_sum=one.body_crc_sum + two.body_crc_sum,
        body_bytes=one.body_bytes + two.body_bytes,
    )


def relatives(lanes: Iterable[ArchiveLane], of: Iterable[ArchiveLane]) -> list[ArchiveLane]:
    """Those of ``lanes`` that may share a file with some: the same broker's, of the same topics."""
    wanted = set(map(kind_of, of))
    return [lane for lane in lanes if kind_of(lane) in wanted]


Kind = tuple[str, str, str]
"""Cluster, broker and topic: only stretches of the same may share a file."""


def kind_of(lane: ArchiveLane) -> Kind:
    """With which others a lane may share files."""
    return lane.cluster, lane.broker, lane.topic


@dataclass(slots=True)
class Places:
    """Where everything lies: a state's part that merges change.

    Attributes:
        lanes: Stretches of each lane.
        named: By how many pieces each file of messages is named, of the kinds of which somebody has asked. It follows from
            ``lanes``, and costs a look at all of a kind, which most runs never need.
    """

    lanes: dict[ArchiveLane, Sequence[Archived]]
    named: dict[Kind, Shared[str, int]]

    def names(self, lane: ArchiveLane) -> Shared[str, int]:
        """Of the files of a lane's kind."""
        kind = kind_of(lane)
        if kind not in self.named:
            pieces = pieces_of(self.lanes, relatives(self.lanes, [lane]))
            self.named[kind] = Shared(Counter(piece.file.key for piece in pieces).items())
        return self.named[kind]

    def count(self, lane: ArchiveLane, files: Iterable[ParquetFile], more: int) -> None:
        """So many more pieces name each of these files, for each time that it comes; where ``lanes`` says so already."""
        kind = kind_of(lane)
        named = self.named.get(kind)
        if named is None:
            return
        for file in files:
            count = (named.get(file.key) or 0) + more
            named = named.having(file.key, count) if count else named.lacking(file.key)
        self.named[kind] = named

    def find(self, lane: ArchiveLane, low: int) -> tuple[Archived, ParquetFile] | None:
        """The stretch of a piece, and its file; ``low`` is the piece's first offset."""
        for one in stretches_of(self.lanes, lane).around(low, low + 1):
            for file in one.files:
                if file.low == low:
                    return one, file
        return None


def stretches_of(lanes: Mapping[ArchiveLane, Sequence[Archived]], lane: ArchiveLane) -> Stretches:
    """Those of a lane, ready to be changed."""
    found = lanes.get(lane, ())
    return found if isinstance(found, Stretches) else Stretches(found)


def move(places: Places, action: Action) -> list[ParquetFile] | None:
    """Carry out a ``merge`` action.

    Args:
        places: Changed.
        action: The action.

    Returns:
        The files (one of each key) that nothing names any more; None, and nothing is changed, when the action presumes
        what does not hold: each piece must lie where the action says, every piece of an old file must move, and a new
        file must have as many rows as the pieces in it.

    Raises:
        ValueError: It makes no sense; ``LookupError`` and ``TypeError`` mean the same.
    """
    moved = dict(_moved(action))
    gone: dict[str, ParquetFile] = {}
    olds, rows = Counter[tuple[Kind, str]](), Counter[int]()
    for (lane, low), (key, new) in moved.items():
        found = places.find(lane, low)
        if found is None or found[1].key != key:
            return None
        gone[key] = found[1]
        olds[kind_of(lane), key] += 1
        if places.names(lane).get(new["key"]):
            return None
        rows[id(new)] += found[1].rows
    if any(places.named[kind].get(key) != count for (kind, key), count in olds.items()):
        return None
    if any(rows[id(row)] != row["rows"] or not row["rows"] for row in action["files"]):
        return None
    for (lane, low), (_, new) in moved.items():
        _move_one(places, lane, low, new)
    return [gone[key] for key in sorted(gone)]


def _move_one(places: Places, lane: ArchiveLane, low: int, new: Any) -> None:  # noqa: ANN401 (JSON)
    found = places.find(lane, low)
    assert found is not None
    archived, old = found
    fields = {"key": new["key"], "size_bytes": new["size_bytes"], "crc": new["crc"]}
    files = tuple(replace(old, **fields) if file is old else file for file in archived.files)
    changed = replace(archived, files=files)
    places.lanes[lane] = stretches_of(places.lanes, lane).with_changed(changed)
    places.count(lane, [old], -1)
    places.count(lane, [file for file in files if file.low == low], 1)


def _moved(action: Action) -> Iterator[tuple[tuple[ArchiveLane, int], tuple[str, Any]]]:
    """Each piece's mark, with the key of its old file and the row of the new one."""
    for row in action["files"]:
        check_texts((row["key"],), "a file of an archive")
        check_ints((row["size_bytes"], row["crc"], row["rows"]), "a file of an archive")
        for lane_row, found in row["pieces"]:
            lane = ArchiveLane.of(lane_row)
            for low, key in found:
                check_ints((low,), "a piece of a file")
                check_texts((key,), "a piece of a file")
                yield (lane, low), (key, row)
