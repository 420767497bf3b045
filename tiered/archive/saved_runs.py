"""What is archived, in runs and in what changed since: collections that cost by what changes, however much there is.

A *run* is a table of stretches, in order of lane and offset: numbers that planning asks for in columns, each stretch
itself a text that is packed until somebody looks. A run is immutable, and the same in memory and as an object: it is a shard
of checkpoints (``tiered.journal.checkpoint``). What a later run says of a lane and a first offset holds; a stretch that ends
where it begins says that there is none any more.

What changed since the last checkpoint lies beside the runs, as values. ``Saved.settled`` makes a run of it, and joins runs
of like sizes, so that each is more than twice as large as the next: there are few (a logarithm of how much is archived),
and a stretch is written so often at most.

All are immutable and share with their predecessors what did not change; each change copies a few hundred references at most.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, overload

import numpy as np
import zstandard

from tiered.archive.model import LOG, Archived, ArchiveLane, check_file_rows
from tiered.errors import DataError
from tiered.journal.checkpoint import digest_of
from tiered.journal.entry import json_text, require_sparse
from tiered.log.wellformed import check_ints

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    import numpy.typing as npt

_CHUNK = 256
"""Values of a chunk, at most."""
_BITS = 5
_LEAF = 32
_BITS_MAX = 60

K = TypeVar("K", bound="Hashable")
V = TypeVar("V")


# -- runs ------------------------------------------------------------------------------------------
#
# The bytes of a run: "TMQRUN" and two bytes of its version; size of the head (uint32, little-endian); the head;
# the columns; the blocks. Head, columns and blocks are zstd frames of their own.
#
# head      JSON: ``lanes``: rows of a lane and how many stretches it has; ``columns`` and ``blocks``: sizes of the frames
# column    of ``COLUMNS``: int64, little-endian, each the difference to the one before, the first from 0
# block     JSON of ``BLOCK`` stretches (the last has fewer), a line each; an empty one where there is none any more

MAGIC = b"TMQRUN\x00\x01"
COLUMNS = ("start", "end", "store_min_ms", "store_max_ms", "bad")
"""Of each stretch; smallest and greatest store time are -1 where no file is."""
BLOCK = 256
ROWS_MAX = 1 << 23
_SMALL_ROWS = 1 << 16
"""A run of more has a byte for each at least, so that a small object can not fill the memory; ours have 70."""
_HEAD_BYTES_MAX = 256 << 20
_BLOCK_BYTES_MAX = 256 << 20
_LEVEL = 3
_LOOKED_AT = 16
"""Blocks that stay unpacked, since whoever looks at one goes on to the next stretch of it."""
Rows = Sequence[tuple[int, Archived | None]]
"""First offsets, each with the stretch that begins there; None: none does any more."""


class SavedRun:
    """A table of stretches.

    Attributes:
        data: Its bytes.
        digest: By which they are known.
    """

    __slots__ = ("__weakref__", "_blocks", "columns", "data", "digest", "lanes")

    def __init__(self, data: bytes) -> None:
        """Of the bytes that ``encoded`` gave.

        Raises:
            ValueError: They are none; ``LookupError`` and ``TypeError`` mean the same.
        """
        size = int.from_bytes(data[len(MAGIC) : len(MAGIC) + 4], "little")
        at = len(MAGIC) + 4 + size
        if not data.startswith(MAGIC) or at > len(data):
            raise ValueError("this is not a run of stretches")
        head = json.loads(require_sparse(_unpacked(data[at - size : at], _HEAD_BYTES_MAX)))
        rows = [(ArchiveLane.of(lane), count) for lane, count in head["lanes"]]
        check_ints((*head["columns"], *head["blocks"], *(n for _, n in rows)), "a run")
        count = sum(n for _, n in rows)
        ends = (at + np.cumsum([*head["columns"], *head["blocks"]])).tolist()
        frames = list(pairwise([at, *ends]))
        self.data, self.digest = data, digest_of(data)
        # Of each, the first of its rows, and one past the last.
        self.lanes: dict[ArchiveLane, tuple[int, int]] = {}
        first = 0
        for lane, n in rows:
            self.lanes[lane] = (first, first := first + n)
        self._blocks = frames[len(COLUMNS) :]
        is_whole = ends[-1] == len(data) and len(head["columns"]) == len(COLUMNS)
        is_whole &= all(low < high for low, high in frames) and all(n > 0 for _, n in rows)
        is_whole &= 0 < count <= min(ROWS_MAX, _SMALL_ROWS + len(data)) and len(self._blocks) == -(
            -count // BLOCK
        )
        if not is_whole or len(self.lanes) != len(rows):
            raise ValueError("a run is cut, or says two things of itself")
        packed = (data[low:high] for low, high in frames[: len(COLUMNS)])
        # ``COLUMNS``, a row each; none of them is written to.
        self.columns = _numbers(packed, count)
        self._require_apart()

    def _require_apart(self) -> None:
        start, end = self.columns[:2]
        is_new = np.zeros(len(start), bool)
        is_new[[first for first, _ in self.lanes.values()]] = True
        if (start < 0).any() or (end < start).any() or (np.diff(start)[~is_new[1:]] <= 0).any():
            raise ValueError("stretches of a run are not in order")
        there = end > start
        begins, lane = start[there], np.cumsum(is_new)[there]
        if ((begins[1:] < end[there][:-1]) & (lane[1:] == lane[:-1])).any():
            raise ValueError("stretches of a run overlap")

    def some(self, first: int, last: int) -> Iterator[Archived]:
        """Stretches ``[first, last)``: a block of them is parsed and checked at once."""
        for at, documents in self._documents(first, last):
            with _no_nonsense():
                found = Archived.of_many(documents)
                said = np.array([*map(_columns_of, found)], np.int64).T
                _require_same(said, self.columns[:, at : at + len(found)])
            yield from found

    def files(self, first: int, last: int) -> Iterator[list[Any]]:
        """Rows of the files of stretches ``[first, last)``, as ``ParquetFile.row`` gives them. Nothing else is checked."""
        for at, documents in self._documents(first, last):
            with _no_nonsense():
                rows = [row for one in documents for row in one["files"]]
                check_file_rows(rows)
                ends = [(one["start"], one["end"]) for one in documents]
                check_ints(chain.from_iterable(ends), "what is archived")
                said = np.array(ends, np.int64).T
                _require_same(said, self.columns[:2, at : at + len(documents)])
            yield from rows

    def _documents(self, first: int, last: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """Stretches ``[first, last)`` as JSON, a block at a time, with the number of its first. Not checked yet."""
        while first < last:
            behind = min(last, (first // BLOCK + 1) * BLOCK)
            texts = self._block(first // BLOCK)[first % BLOCK :][: behind - first]
            with _no_nonsense():
                found = json.loads(b"[%b]" % b",".join(texts))
                if len(found) != behind - first:
                    raise ValueError("a line of a run is not a stretch")
            yield first, found
            first = behind

    def may_say(self, first: int, last: int, word: bytes) -> bool:
        """Whether a word may be in the texts of stretches ``[first, last)``; nothing is parsed for it."""
        blocks = range(first // BLOCK, -(-last // BLOCK))
        return any(any(word in text for text in self._block(number)) for number in blocks)

    def _block(self, number: int) -> list[bytes]:
        low, high = self._blocks[number]
        return _lines(self.data[low:high])

    def lines(self, rows: npt.NDArray[np.int64]) -> Iterator[bytes]:
        """The texts of some, in the order in which they are asked for."""
        at, lines = -1, []
        for number in rows.tolist():
            if number // BLOCK != at:
                at = number // BLOCK
                lines = self._block(at)
            yield lines[number % BLOCK]

    @classmethod
    def of(cls, found: Iterable[tuple[ArchiveLane, Rows]]) -> SavedRun:
        """Of each lane's stretches; lanes and offsets are in order, and one at least is there."""
        lanes = [(lane, len(rows)) for lane, rows in found if rows]
        every = [row for _, rows in found for row in rows]
        columns = [_columns_of(one) if one else (start, start, -1, -1, 0) for start, one in every]
        lines = (json_text(one.document()) if one else b"" for _, one in every)
        return cls(encoded(lanes, np.array(columns, np.int64).T, lines))


def encoded(
    lanes: Iterable[tuple[ArchiveLane, int]],
    columns: npt.NDArray[np.int64],
    lines: Iterable[bytes],
) -> bytes:
    """The bytes of a run.

    Args:
        lanes: In order, each with how many stretches it has.
        columns: ``COLUMNS`` of all of them.
        lines: Their texts; no more of them is held than a block.
    """
    packer = zstandard.ZstdCompressor(level=_LEVEL)
    steps = np.diff(columns, axis=1, prepend=0).astype("<i8")
    frames = [packer.compress(row.tobytes()) for row in steps]
    block: list[bytes] = []
    for line in lines:
        block.append(line)
        if len(block) == BLOCK:
            frames.append(packer.compress(b"\n".join(block)))
            block = []
    frames += [packer.compress(b"\n".join(block))] if block else []
    sizes, width = list(map(len, frames)), len(COLUMNS)
    rows = [[lane.row(), count] for lane, count in lanes]
    head = {"lanes": rows, "columns": sizes[:width], "blocks": sizes[width:]}
    packed = packer.compress(json_text(head))
    return b"".join([MAGIC, len(packed).to_bytes(4, "little"), packed, *frames])


def _columns_of(one: Archived) -> tuple[int, ...]:
    low = min((file.store_min_ms for file in one.files), default=-1)
    high = max((file.store_max_ms for file in one.files), default=-1)
    return one.start, one.end, low, high, one.bad


def _require_same(said: npt.NDArray[np.int64], columns: npt.NDArray[np.int64]) -> None:
    if not np.array_equal(said, columns):
        raise DataError("a checkpoint of the archive's log says two things", where=LOG)


@contextmanager
def _no_nonsense() -> Iterator[None]:
    try:
        yield
    except (LookupError, TypeError, ValueError) as error:
        raise DataError(
            f"a checkpoint of the archive's log makes no sense: {error!r:.200}", where=LOG
        ) from error


def _numbers(packed: Iterable[bytes], count: int) -> npt.NDArray[np.int64]:
    found = np.empty((len(COLUMNS), count), np.int64)
    for row, frame in zip(found, packed, strict=True):
        data = _unpacked(frame, 8 * count)
        if len(data) != 8 * count:
            raise ValueError("a column of a run is cut")
        np.cumsum(np.frombuffer(data, "<i8"), out=row)
    return found


def _unpacked(frame: bytes, bytes_max: int) -> bytes:
    """No more than so many bytes are ever unpacked (I8)."""
    try:
        if not 0 <= zstandard.frame_content_size(frame) <= bytes_max:
            raise ValueError("a frame of a run is larger than it may be")
        return zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"a frame of a run cannot be unpacked: {error}") from error


@lru_cache(maxsize=_LOOKED_AT)
def _lines(frame: bytes) -> list[bytes]:
    return _unpacked(frame, _BLOCK_BYTES_MAX).split(b"\n")


class Slice:
    """Rows of a run that follow one another, all of one lane."""

    __slots__ = ("first", "last", "run")

    def __init__(self, run: SavedRun, first: int, last: int) -> None:
        """Rows ``[first, last)``."""
        self.run, self.first, self.last = run, first, last

    @property
    def columns(self) -> npt.NDArray[np.int64]:
        """``COLUMNS`` of these rows."""
        return self.run.columns[:, self.first : self.last]

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, rows: slice) -> Slice:
        low, high, _ = rows.indices(len(self))
        return Slice(self.run, self.first + low, self.first + max(low, high))

    def rows(self) -> Iterator[Archived]:
        """The stretches, unpacked."""
        return self.run.some(self.first, self.last)


# -- stretches of a lane ---------------------------------------------------------------------------

_Chunk = tuple[Archived, ...] | Slice


def _rows(chunk: _Chunk) -> Iterable[Archived]:
    return chunk.rows() if isinstance(chunk, Slice) else chunk


def _start(chunk: _Chunk) -> int:
    return int(chunk.run.columns[0, chunk.first]) if isinstance(chunk, Slice) else chunk[0].start


def _place(chunk: _Chunk, start: int) -> int:
    """Behind those that begin there or before."""
    if isinstance(chunk, Slice):
        return int(np.searchsorted(chunk.columns[0], start, "right"))
    return bisect_right(chunk, start, key=lambda one: one.start)


def _around(chunk: _Chunk, start: int, end: int) -> Iterable[Archived]:
    """Those that overlap with offsets ``[start, end)``; no other is unpacked."""
    if isinstance(chunk, Slice):
        starts, ends = chunk.columns[:2]
        low, high = int(np.searchsorted(ends, start, "right")), int(np.searchsorted(starts, end))
    else:
        low = bisect_right(chunk, start, key=lambda one: one.end)
        high = bisect_left(chunk, end, key=lambda one: one.start)
    return _rows(chunk[low:high])


class Stretches(Sequence[Archived]):
    """Stretches of a lane, apart from one another, in order of offset. Equal to a tuple of the same."""

    __slots__ = ("_chunks", "_total")

    def __init__(self, found: Iterable[Archived] = ()) -> None:
        rows = tuple(found)
        starts = range(0, len(rows), _CHUNK // 2)
        self._chunks: tuple[_Chunk, ...] = tuple(rows[at : at + _CHUNK // 2] for at in starts)
        self._total = len(rows)

    @classmethod
    def of(cls, slices: Sequence[Slice]) -> Stretches:
        """As runs have them, the oldest first.

        Raises:
            ValueError: They overlap.
        """
        if len(slices) == 1 and (slices[0].columns[1] > slices[0].columns[0]).all():
            return _made(tuple(slices))
        of, rows, columns = _newest(slices)
        there = columns[1] > columns[0]
        of, rows, columns = of[there], rows[there], columns[:, there]
        if (columns[0, 1:] < columns[1, :-1]).any():
            raise ValueError("stretches of a queue overlap")
        cuts = np.flatnonzero((np.diff(of) != 0) | (np.diff(rows) != 1)) + 1
        bounds = pairwise([0, *cuts.tolist(), len(rows)]) if len(rows) else ()
        return _made(
            tuple(
                Slice(slices[of[low]].run, int(rows[low]), int(rows[high - 1]) + 1)
                for low, high in bounds
            )
        )

    def columns(self) -> npt.NDArray[np.int64]:
        """``COLUMNS``; nothing is unpacked for them."""
        found = [
            c.columns if isinstance(c, Slice) else np.array([*map(_columns_of, c)], np.int64).T
            for c in self._chunks
        ]
        if len(found) == 1:
            return found[0]
        return np.concatenate(found, axis=1) if found else np.zeros((len(COLUMNS), 0), np.int64)

    def files(self) -> Iterator[list[Any]]:
        """Rows of their files, as ``ParquetFile.row`` gives them: no value is made of what a run has."""
        for chunk in self._chunks:
            if isinstance(chunk, Slice):
                yield from chunk.run.files(chunk.first, chunk.last)
            else:
                yield from (file.row() for one in chunk for file in one.files)

    @property
    def has_records(self) -> bool:
        """The files of some have the stored bytes of each record."""
        word = b'"has_records"'  # which most archives never say, so that nothing has to be parsed
        return any(
            any(one.has_records for one in _rows(chunk))
            for chunk in self._chunks
            if not isinstance(chunk, Slice) or chunk.run.may_say(chunk.first, chunk.last, word)
        )

    def changes(self, base: Stretches) -> Rows:
        """What a run says that makes these of others, which come from runs alone."""
        runs = {c.run for c in base._chunks if isinstance(c, Slice)}
        new = [
            (one.start, one)
            for c in self._chunks
            if not (isinstance(c, Slice) and c.run in runs)
            for one in _rows(c)
        ]
        if len(self) - len(new) == len(base):
            return new
        gone = set(base.columns()[0].tolist()) - set(self.columns()[0].tolist())
        return sorted([*new, *((start, None) for start in gone)], key=lambda row: row[0])

    def around(self, start: int, end: int) -> list[Archived]:
        """Those that overlap with offsets ``[start, end)``, in order."""
        found: list[Archived] = []
        for number in range(self._chunk(start), len(self._chunks)):
            if _start(self._chunks[number]) >= end:
                break
            found += _around(self._chunks[number], start, end)
        return found

    def with_one(self, new: Archived) -> Stretches:
        """With another, which overlaps with none."""
        number = self._chunk(new.start)
        chunk = self._chunks[number] if self._chunks else ()
        return self._spliced(number, _place(chunk, new.start), 0, new)

    def with_changed(self, new: Archived) -> Stretches:
        """With one in the place of that which begins where it does.

        Raises:
            LookupError: None does.
        """
        number, at = self._find(new.start)
        return self._spliced(number, at, 1, new)

    def without(self, starts: Iterable[int]) -> Stretches:
        """Without those that begin there."""
        found = self
        for start in starts:
            found = found._spliced(*found._find(start), 1)
        return found

    def _find(self, start: int) -> tuple[int, int]:
        number = self._chunk(start)
        chunk = self._chunks[number] if self._chunks else ()
        at = _place(chunk, start) - 1
        if at < 0 or _start(chunk[at : at + 1]) != start:
            raise LookupError(start)
        return number, at

    def _spliced(self, number: int, at: int, gone: int, *new: Archived) -> Stretches:
        """With some in the place of so many of a chunk, from a place in it on. Small neighbours become one chunk."""
        chunk = self._chunks[number] if self._chunks else ()
        near = (*self._chunks[max(number - 1, 0) : number], chunk[:at], new, chunk[at + gone :])
        joined: list[_Chunk] = []
        for one in (*near, *self._chunks[number + 1 : number + 2]):
            last = joined[-1] if joined else None
            if (
                isinstance(one, tuple)
                and isinstance(last, tuple)
                and len(one) + len(last) <= _CHUNK
            ):
                joined[-1] = (*last, *one)
            elif len(one):
                joined.append(one)
        chunks = (*self._chunks[: max(number - 1, 0)], *joined, *self._chunks[number + 2 :])
        return _made(chunks, len(self) - gone + len(new))

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
    found._total = sum(map(len, chunks)) if count is None else count  # noqa: SLF001
    return found


def _newest(
    slices: Sequence[Slice],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """What the last of some slices of a lane says of each first offset: number of the slice, row of its run, columns."""
    columns = np.concatenate([one.columns for one in slices], axis=1)
    of = np.repeat(np.arange(len(slices)), [len(one) for one in slices])
    rows = np.concatenate([np.arange(one.first, one.last) for one in slices])
    order = np.lexsort((of, columns[0]))
    start = columns[0, order]
    order = order[np.append(start[1:] != start[:-1], [True] * (len(start) > 0))]
    return of[order], rows[order], columns[:, order]


def stretches_of(lanes: Mapping[ArchiveLane, Sequence[Archived]], lane: ArchiveLane) -> Stretches:
    """Those of a lane, ready to be changed."""
    found = lanes.get(lane, ())
    return found if isinstance(found, Stretches) else Stretches(found)


# -- all that is archived --------------------------------------------------------------------------

SMALL_BYTES = 128 << 10
"""Runs of up to so many bytes are joined whatever they join with."""
_GROWTH = 2
Lanes = Mapping[ArchiveLane, Sequence[Archived]]


@dataclass(frozen=True, slots=True)
class Saved:
    """What runs say, the oldest first."""

    runs: tuple[SavedRun, ...] = ()  # of each is more than twice as large as the next
    lanes: Mapping[ArchiveLane, Stretches] = field(default_factory=dict)  # stretches of each lane

    @classmethod
    def of(cls, runs: Sequence[SavedRun]) -> Saved:
        """Of runs.

        Raises:
            ValueError: Stretches overlap.
        """
        return cls(tuple(runs), _lanes_of(runs, {lane for run in runs for lane in run.lanes}))

    def settled(self, lanes: Lanes) -> Saved:
        """With runs that say all of what ``lanes`` do, which came from these."""
        every = sorted(lane for lane in {**self.lanes, **lanes} if not self._has(lanes, lane))
        none = Stretches()
        changes = [
            (lane, stretches_of(lanes, lane).changes(self.lanes.get(lane, none))) for lane in every
        ]
        if not any(rows for _, rows in changes):
            return self
        runs, joined = list(self.runs), [SavedRun.of(changes)]
        size = len(joined[0].data)
        while runs and len(runs[-1].data) <= max(_GROWTH * size, SMALL_BYTES):
            joined.insert(0, runs.pop())
            size += len(joined[0].data)
        touched = {lane for run in joined for lane in run.lanes}
        if len(joined) > 1:
            runs += _joined(joined, is_oldest=not runs)
        else:
            runs += joined
        found = {lane: one for lane, one in self.lanes.items() if lane not in touched}
        return Saved(tuple(runs), found | _lanes_of(runs, touched))

    def _has(self, lanes: Lanes, lane: ArchiveLane) -> bool:
        return lanes.get(lane) is self.lanes.get(lane)


def _lanes_of(
    runs: Sequence[SavedRun], lanes: Iterable[ArchiveLane]
) -> dict[ArchiveLane, Stretches]:
    found: dict[ArchiveLane, Stretches] = {}
    for lane in lanes:
        slices = [Slice(run, *run.lanes[lane]) for run in runs if lane in run.lanes]
        stretches = Stretches.of(slices) if slices else Stretches()
        if len(stretches):
            found[lane] = stretches
    return found


def _joined(runs: Sequence[SavedRun], *, is_oldest: bool) -> list[SavedRun]:
    """One run that says what some say that follow one another. Of what is not there the oldest run says nothing."""
    lanes: list[tuple[ArchiveLane, int]] = []
    parts: list[tuple[npt.NDArray[np.int64], ...]] = []
    for lane in sorted({lane for run in runs for lane in run.lanes}):
        numbers = [number for number, run in enumerate(runs) if lane in run.lanes]
        of, rows, columns = _newest([Slice(runs[n], *runs[n].lanes[lane]) for n in numbers])
        kept = columns[1] > columns[0] if is_oldest else np.ones(len(of), bool)
        if kept.any():
            lanes.append((lane, int(kept.sum())))
            parts.append((np.array(numbers)[of[kept]], rows[kept], columns[:, kept]))
    if not lanes:
        return []
    of, rows, columns = (np.concatenate(part, axis=-1) for part in zip(*parts, strict=True))
    texts = [run.lines(rows[of == number]) for number, run in enumerate(runs)]
    return [SavedRun(encoded(lanes, columns, (next(texts[number]) for number in of.tolist())))]


# -- a mapping -------------------------------------------------------------------------------------


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
