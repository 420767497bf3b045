"""What is archived, as one table: a row for each offset range, in order of queue and offset.

The table lies in *runs*: Parquet files, the same in memory and as objects, since each is a shard of checkpoints
(``tiered.journal.replay``). Of a run the numbers that planning asks for are columns in memory; the rest is unpacked a
row group at a time, when somebody looks. What changed since the last checkpoint lies beside the runs, as values.

What a later run says of a queue and a first offset holds, and what changed holds before all runs; an offset range that ends
where it begins says that there is none any more. ``settled`` makes a run of what changed, and joins runs of like sizes, so
that each is more than twice as large as the next: there are few (a logarithm of how much is archived), and an offset range
is written so often at most.

Runs are immutable. So is a table, once it is a state's: a change is made to a ``draft``, which shares the runs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, field, fields
from functools import cache
from itertools import pairwise, starmap
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from backends.lazy_dataclass import dataclass, picked
from tiered.api.arrow import load_pyarrow
from tiered.archive.model import (
    LOG,
    Archived,
    ArchiveQueue,
    Kind,
    ParquetFile,
    SideFile,
    kind_of,
)
from tiered.errors import DataError
from tiered.journal.entry import INT_MAX
from tiered.journal.replay import digest_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt
    import pyarrow as pa


# -- columns ---------------------------------------------------------------------------------------
#
# A column for each field of a queue and of an offset range, by the same name; none is ever null. What there may be several
# of is a list of structures. Texts are bytes, since the names of topics and of members of bodies need not be UTF-8.

_PLAIN: Final = ("str", "int", "bool")


def _plain_fields(of: type) -> dict[str, str]:
    return {one.name: str(one.type) for one in fields(of) if one.type in _PLAIN}


_QUEUE: Final = _plain_fields(ArchiveQueue)
_OFFSET_RANGE: Final = _plain_fields(Archived)
_MEMBERS: Final = {"name": "str", "count": "int"}
_LISTS: Final = {
    "files": _plain_fields(ParquetFile),
    "side": _plain_fields(SideFile),  # none or one
    "sources": {"key": "str", "version": "str"},
    "left_out": _MEMBERS,
    "unfit": _MEMBERS,
}
GROUP_ROWS: Final = 1024
_GROUPS_READ: Final = 32
"""Of which the numbers are read at once."""
ROWS_MAX: Final = 1 << 23
_SMALL_ROWS: Final = 1 << 16
_SMALL_BYTES: Final = 1 << 20
_RATIO_MAX: Final = 64
"""A run has a byte for each row at least, and one for so many that are unpacked of it; beyond these first ones. So a small
object can not fill the memory (I8); ours have 80 bytes a row, and are packed to a third."""


@cache
def run_schema() -> pa.Schema:
    """The columns of a run."""
    arrow = load_pyarrow()
    kinds = {"str": arrow.binary(), "int": arrow.int64(), "bool": arrow.bool_()}

    def plain(some: Mapping[str, str]) -> list[pa.Field]:
        return [arrow.field(name, kinds[kind], nullable=False) for name, kind in some.items()]

    def listed(some: Mapping[str, str]) -> pa.DataType:
        return arrow.list_(arrow.field("element", arrow.struct(plain(some)), nullable=False))

    lists = [arrow.field(name, listed(some), nullable=False) for name, some in _LISTS.items()]
    return arrow.schema([*plain(_QUEUE), *plain(_OFFSET_RANGE), *lists])


def table_of(rows: Iterable[tuple[ArchiveQueue, Archived]]) -> pa.Table:
    """OffsetRanges as rows of a run, in the order given."""
    documents = []
    for queue, one in rows:
        lists = {
            "files": [_plain_row(file, _LISTS["files"]) for file in one.files],
            "side": [_plain_row(one.side, _LISTS["side"])] if one.side else [],
            **{
                name: [dict(zip(_LISTS[name], map(_stored, pair), strict=True)) for pair in pairs]
                for name, pairs in picked(one, "sources", "left_out", "unfit").items()
            },
        }
        documents.append({**_plain_row(queue, _QUEUE), **_plain_row(one, _OFFSET_RANGE), **lists})
    return load_pyarrow().Table.from_pylist(documents, schema=run_schema())


def _plain_row(value: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: _stored(getattr(value, name)) for name in names}


def _stored(value: Any) -> Any:  # noqa: ANN401
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value


def _values(column: pa.Array) -> list[Any]:
    """Undo that: texts, numbers, and tuples of the lists' structures."""
    arrow = load_pyarrow()
    if column.type == arrow.int64():
        numbers: list[Any] = column.to_numpy().tolist()
        return numbers
    if column.type == arrow.binary():
        return [data.decode("utf-8", "surrogatepass") for data in column.to_pylist()]
    if not arrow.types.is_list(column.type):
        return list(column.to_pylist())
    every = list(zip(*map(_values, column.values.flatten()), strict=True))
    return [tuple(every[low:high]) for low, high in pairwise(column.offsets.to_numpy().tolist())]


# -- runs ------------------------------------------------------------------------------------------

COLUMNS = ("start", "end", "store_min_ms", "store_max_ms", "bad", "has_records")
"""Of each offset range, in memory; smallest and greatest store time are -1 where no file is."""


class _Group:
    """Rows of a run, unpacked; each column becomes values when it is asked for."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self._values: dict[str, list[Any]] = {}

    def column(self, name: str) -> list[Any]:
        if name not in self._values:
            self._values[name] = _values(self.table[name].combine_chunks())
        return self._values[name]

    def offset_ranges(self, first: int, last: int) -> Iterator[Archived]:
        columns = {one.name: self.column(one.name)[first:last] for one in fields(Archived)}
        columns["files"] = [tuple(starmap(ParquetFile, some)) for some in columns["files"]]
        columns["side"] = [SideFile(*some[0]) if some else None for some in columns["side"]]
        return starmap(Archived, zip(*columns.values(), strict=True))


def _require_sparse(file: Any, data: bytes) -> None:  # noqa: ANN401
    known = file.metadata
    groups = [known.row_group(number) for number in range(known.num_row_groups)]
    counts = [
        sum(group.column(at).num_values for group in groups) for at in range(known.num_columns)
    ]
    size = sum(group.total_byte_size for group in groups)
    is_sparse = max([known.num_rows, *counts]) <= min(ROWS_MAX, _SMALL_ROWS + len(data))
    is_sparse &= size <= _SMALL_BYTES + _RATIO_MAX * len(data)
    is_whole = all(group.num_rows == GROUP_ROWS for group in groups[:-1])
    if not file.schema_arrow.equals(run_schema()) or not known.num_rows:
        raise ValueError("a run has other columns, or no rows")
    if not is_sparse or not is_whole or groups[-1].num_rows > GROUP_ROWS:
        raise ValueError("a run has more rows than its bytes may hold, or other row groups")


class SavedRun:
    """Some rows of the table, as they were saved."""

    __slots__ = ("__weakref__", "_held", "_metadata", "data", "digest", "numbers", "queues")

    def __init__(self, data: bytes) -> None:
        """Of the bytes of a run."""
        arrow = load_pyarrow()
        self.data = data  # a Parquet file
        self.digest = digest_of(data)  # by which it is known
        self._metadata = None
        try:
            file = self._open()
            self._metadata = file.metadata
            _require_sparse(file, data)
            # ``COLUMNS``, a row each; none of them is written to.
            self.numbers, bounds = self._read_numbers(file)
        except (arrow.ArrowException, OSError) as error:
            raise ValueError(f"this is not a run of offset ranges: {error!s:.200}") from error
        # In order, each with the first of its rows and one past the last.
        self.queues = {queue: (low, high) for (low, high), queue in bounds}
        if len(self.queues) != len(bounds):
            raise ValueError("a run has a queue twice")
        self._held: tuple[int, _Group] | None = None

    def _open(self) -> Any:  # noqa: ANN401 (pyarrow has no types)
        """The file. Each look opens it anew, since an open one is not for several threads; what it says is known."""
        from pyarrow import parquet  # noqa: PLC0415 (heavy)

        buffer = load_pyarrow().BufferReader(self.data)
        return parquet.ParquetFile(buffer, metadata=self._metadata)

    def _read_numbers(
        self,
        file: Any,  # noqa: ANN401
    ) -> tuple[npt.NDArray[np.int64], list[tuple[tuple[int, int], ArchiveQueue]]]:
        """The numbers, and whose rows are where."""
        numbers = np.empty((len(COLUMNS), file.metadata.num_rows), np.int64)
        firsts: list[int] = []
        queues: list[ArchiveQueue] = []
        at = 0
        for number in range(0, file.num_row_groups, _GROUPS_READ):
            some = range(number, min(number + _GROUPS_READ, file.num_row_groups))
            table = file.read_row_groups(some, [*_QUEUE, *_READ], use_threads=False)
            columns = {name: table[name].combine_chunks() for name in table.column_names}
            end = at + table.num_rows
            for row, name in zip(numbers, COLUMNS, strict=True):
                row[at:end] = (
                    columns[name].cast(load_pyarrow().int64()).to_numpy()
                    if name in columns
                    else _extreme(columns["files"], name)
                )
            for first, queue in _queues_in(columns, table.num_rows):
                if not queues or queues[-1] != queue:
                    firsts.append(at + first)
                    queues.append(queue)
            at = end
        self._require_apart(numbers, firsts)
        return numbers, list(zip(pairwise([*firsts, at]), queues, strict=True))

    def _require_apart(self, numbers: npt.NDArray[np.int64], firsts: Sequence[int]) -> None:
        start, end = numbers[:2]
        is_new = np.zeros(len(start), bool)
        is_new[list(firsts)] = True
        is_wrong = (start < 0).any() or (end < start).any() or (end >= INT_MAX).any()
        if is_wrong or (np.diff(start)[~is_new[1:]] <= 0).any():
            raise ValueError("offset ranges of a run are not in order")
        _require_no_overlap(np.cumsum(is_new), start, end)

    def group(self, number: int) -> _Group:
        """A row group. The last one that was asked for is held, since the next row of it is usually asked for next."""
        held = self._held
        if held is None or held[0] != number:
            try:
                table = self._open().read_row_group(number, use_threads=False)
            except (load_pyarrow().ArrowException, OSError) as error:
                raise DataError(
                    f"a checkpoint of the archive's log makes no sense: {error!s:.200}", where=LOG
                ) from error
            self._held = held = number, _Group(table)
        return held[1]

    def places(self, first: int, last: int) -> Iterator[tuple[_Group, int, int]]:
        """Rows ``[first, last)``, by row group."""
        for number in range(first // GROUP_ROWS, -(-last // GROUP_ROWS)):
            at = number * GROUP_ROWS
            yield self.group(number), max(first - at, 0), min(last - at, GROUP_ROWS)

    def take(self, rows: npt.NDArray[np.int64]) -> pa.Table:
        """Some rows, in ascending order."""
        arrow, groups = load_pyarrow(), rows // GROUP_ROWS
        return arrow.concat_tables(
            [
                self.group(number).table.take(rows[groups == number] - number * GROUP_ROWS)
                for number in np.unique(groups).tolist()
            ]
        )

    @classmethod
    def of(cls, tables: Iterable[pa.Table]) -> SavedRun:
        """Of rows in order of queue and offset; one at least, and in each table but the last as many as in a row group."""
        from pyarrow import parquet  # noqa: PLC0415 (heavy)

        sink = load_pyarrow().BufferOutputStream()
        with parquet.ParquetWriter(
            sink,
            run_schema(),
            compression="zstd",
            use_dictionary=list(_QUEUE),
            write_statistics=False,
            store_schema=False,
        ) as writer:
            for table in tables:
                writer.write_table(table, GROUP_ROWS)
        return cls(sink.getvalue().to_pybytes())


_READ: Final = (
    *("start", "end", "bad", "has_records"),
    *("files.list.element.store_min_ms", "files.list.element.store_max_ms"),
)


def _extreme(files: pa.Array, name: str) -> npt.NDArray[np.int64]:
    """Of each list of files the smallest or greatest store time."""
    offsets = files.offsets.to_numpy()
    found, there = np.full(len(files), -1, np.int64), np.diff(offsets) > 0
    least = np.minimum if name == "store_min_ms" else np.maximum
    if there.any():
        times = files.values.field(name).to_numpy()
        found[there] = least.reduceat(times, offsets[:-1][there])
    return found


def _queues_in(columns: Mapping[str, pa.Array], count: int) -> Iterator[tuple[int, ArchiveQueue]]:
    """The first row of each queue, and the queue."""
    is_first = np.zeros(count, bool)
    is_first[0] = True
    for name in _QUEUE:
        codes = columns[name].dictionary_encode().indices.to_numpy()
        is_first[1:] |= codes[1:] != codes[:-1]
    rows = np.flatnonzero(is_first)
    values = (_values(columns[name].take(load_pyarrow().array(rows))) for name in _QUEUE)
    yield from zip(rows.tolist(), starmap(ArchiveQueue, zip(*values, strict=True)), strict=True)


def _require_no_overlap(
    queues: npt.NDArray[np.int64], start: npt.NDArray[np.int64], end: npt.NDArray[np.int64]
) -> None:
    there = end > start
    if not there.all():
        queues, start, end = queues[there], start[there], end[there]
    if ((start[1:] < end[:-1]) & (queues[1:] == queues[:-1])).any():
        raise ValueError("offset ranges of a queue overlap")


@dataclass(frozen=True, slots=True)
class _Runs:
    """What runs say together, in order of queue and offset: of each the last run that speaks of it."""

    runs: tuple[SavedRun, ...] = ()  # the oldest first
    queues: Mapping[ArchiveQueue, tuple[int, int]] = field(default_factory=dict)
    """Of each queue that has a row, the first of them and one past the last."""
    run: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """Of each row the number of the run."""
    row: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """And the row of that run."""
    held: dict[ArchiveQueue, npt.NDArray[np.int64]] = field(default_factory=dict)
    """Numbers of the queue of which somebody asked last."""
    names: dict[Kind, Counter[str]] = field(default_factory=dict)
    """How many row ranges lie in each file, of the kinds of which somebody has asked: it costs a look at all of a kind."""

    @classmethod
    def of(cls, runs: Sequence[SavedRun], *, with_gone: bool = False) -> _Runs:
        """Of runs, the oldest first.

        Args:
            with_gone: Keep what says that a range is not there any more.
        """
        if not runs:
            return cls()
        queues = sorted({queue for run in runs for queue in run.queues})
        ranks = {queue: rank for rank, queue in enumerate(queues)}
        counts = [len(run.numbers[0]) for run in runs]
        sizes = [high - low for run in runs for low, high in run.queues.values()]
        ranked = np.array([ranks[queue] for run in runs for queue in run.queues], np.int32)
        of = np.repeat(ranked, sizes)
        number = np.repeat(np.arange(len(runs), dtype=np.int32), counts)
        row = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
        start, end = np.concatenate([run.numbers[:2] for run in runs], axis=1)
        order = np.lexsort((number, start, of)) if len(runs) > 1 else np.arange(len(of))
        is_last = (np.diff(of[order]) != 0) | (np.diff(start[order]) != 0)
        order = order[np.append(is_last, True)]
        if not with_gone:
            order = order[end[order] > start[order]]
        of, start, end = (
            of[order],
            start[order],
            end[order],
        )  # a million of each: none is held twice
        _require_no_overlap(of, start, end)
        bounds = np.searchsorted(of, np.arange(len(queues) + 1)).tolist()
        found = dict(zip(queues, pairwise(bounds), strict=True))
        there = {queue: (low, high) for queue, (low, high) in found.items() if low < high}
        return cls(tuple(runs), there, number[order], row[order])

    def numbers(self, queue: ArchiveQueue) -> npt.NDArray[np.int64]:
        """``COLUMNS`` of the rows of a queue; they are held, since the same queue is usually asked for next."""
        found = self.held.get(queue)
        if found is None:
            first, last = self.queues.get(queue, (0, 0))
            run, row = self.run[first:last], self.row[first:last]
            found = np.empty((len(COLUMNS), len(run)), np.int64)
            for number in np.unique(run).tolist():
                mine = run == number
                found[:, mine] = self.runs[number].numbers[:, row[mine]]
            self.held.clear()
            self.held[queue] = found
        return found

    def places(self, first: int, last: int) -> Iterator[tuple[_Group, int, int]]:
        """Where rows ``[first, last)`` lie: row groups, each with the first of its rows and one past the last."""
        run, row = self.run[first:last], self.row[first:last]
        cuts = np.flatnonzero((np.diff(run) != 0) | (np.diff(row) != 1)) + 1
        for low, high in pairwise([0, *cuts.tolist(), len(run)]) if len(run) else ():
            yield from self.runs[run[low]].places(int(row[low]), int(row[high - 1]) + 1)

    def tables(self) -> Iterator[pa.Table]:
        """All rows, as many as are in a row group at once."""
        for at in range(0, len(self.run), GROUP_ROWS):
            run, row = self.run[at : at + GROUP_ROWS], self.row[at : at + GROUP_ROWS]
            mine = {number: np.flatnonzero(run == number) for number in np.unique(run).tolist()}
            some = [self.runs[number].take(row[places]) for number, places in mine.items()]
            order = np.argsort(np.concatenate(list(mine.values())))
            yield load_pyarrow().concat_tables(some).take(order)


# -- the table -------------------------------------------------------------------------------------

SMALL_BYTES = 128 << 10
"""Runs of up to so many bytes are joined whatever they join with."""
_GROWTH = 2
_END: Final = INT_MAX


class OffsetRanges(Mapping[ArchiveQueue, tuple[Archived, ...]]):
    """The table. As a mapping: the offset ranges of each queue, in order of offset, apart from one another."""

    __slots__ = ("_changes", "_named", "_saved", "_starts")

    def __init__(self, runs: Sequence[SavedRun] = ()) -> None:
        """As runs have it, the oldest first."""
        self._saved = _Runs.of(runs)
        self._changes: dict[ArchiveQueue, dict[int, Archived]] = {}
        self._starts: dict[ArchiveQueue, list[int]] = {}  # of what changed, in order
        self._named: Counter[str] = Counter()  # how many row ranges more lie in each file

    @classmethod
    def of(cls, found: Mapping[ArchiveQueue, Iterable[Archived]]) -> OffsetRanges:
        """Of offset ranges, none of which is saved yet."""
        made = cls()
        for queue, some in found.items():
            for one in some:
                made.put(queue, one)
        return made

    @property
    def runs(self) -> tuple[SavedRun, ...]:
        """What is saved of it."""
        return self._saved.runs

    # -- reading

    def __iter__(self) -> Iterator[ArchiveQueue]:
        every = sorted({*self._saved.queues, *self._changes})
        return (queue for queue in every if self._count(queue))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, queue: ArchiveQueue) -> tuple[Archived, ...]:
        found = tuple(self.around(queue, 0, _END))
        if not found:
            raise KeyError(queue)
        return found

    def __contains__(self, queue: object) -> bool:
        return isinstance(queue, ArchiveQueue) and self._count(queue) > 0

    def _count(self, queue: ArchiveQueue) -> int:
        return len(self.columns(queue)[0])

    def each(
        self, takes: Callable[[ArchiveQueue], bool] = lambda _queue: True
    ) -> Iterator[tuple[ArchiveQueue, Archived]]:
        """Every offset range, in order of queue and offset; never are those of more than a queue held."""
        for queue in filter(takes, self):
            for one in self.around(queue, 0, _END):
                yield queue, one

    def around(self, queue: ArchiveQueue, start: int, end: int) -> list[Archived]:
        """Those that overlap with offsets ``[start, end)``, in order; no other is unpacked."""
        changed = self._changes.get(queue, {})
        first, _ = self._saved.queues.get(queue, (0, 0))
        starts, ends = self._saved.numbers(queue)[:2]
        low, high = np.searchsorted(ends, start, "right"), np.searchsorted(starts, end)
        found = [
            one
            for group, *rows in self._saved.places(first + int(low), first + int(high))
            for one in group.offset_ranges(*rows)
            if one.start not in changed
        ]
        if changed:
            found += self._changed_around(queue, start, end)
            found.sort(key=lambda one: one.start)
        return found

    def _changed_around(self, queue: ArchiveQueue, start: int, end: int) -> Iterator[Archived]:
        starts, changed = self._starts[queue], self._changes[queue]
        low, high = bisect_right(starts, start), bisect_left(starts, end)
        # To the last offset range that begins there or before, past what is not there any more.
        while low:
            low -= 1
            if changed[starts[low]].end > starts[low]:
                break
        every = (changed[at] for at in starts[low:high])
        return (one for one in every if max(one.start, start) < one.end)

    def columns(self, queue: ArchiveQueue) -> npt.NDArray[np.int64]:
        """``COLUMNS``, a row each; nothing is unpacked for them."""
        found, changed = self._saved.numbers(queue), self._changes.get(queue)
        if not changed:
            return found
        kept = found[:, ~np.isin(found[0], list(changed))]
        more = [_numbers_of(one) for one in changed.values() if one.start < one.end]
        found = np.concatenate([kept, np.array(more, np.int64).reshape(-1, len(COLUMNS)).T], axis=1)
        return found[:, np.argsort(found[0])]

    def files(self, queue: ArchiveQueue) -> Iterator[tuple[Any, ...]]:
        """The fields of each file of a queue, in order: no value is made of what runs have."""
        if queue in self._changes:
            yield from (astuple(file) for one in self.around(queue, 0, _END) for file in one.files)
            return
        for group, low, high in self._saved.places(*self._saved.queues.get(queue, (0, 0))):
            for some in group.column("files")[low:high]:
                yield from some

    def count_of(self, queue: ArchiveQueue, key: str) -> int:
        """How many row ranges, of the queues that may share files with one, lie in a file."""
        kind, saved = kind_of(queue), self._saved
        if kind not in saved.names:
            mine = (one for one in saved.queues if kind_of(one) == kind)
            alone = OffsetRanges()
            alone._saved = saved  # without what changed
            saved.names[kind] = Counter(row[0] for one in mine for row in alone.files(one))
        return saved.names[kind][key] + self._named[key]

    # -- changing

    def draft(self) -> OffsetRanges:
        """The same, to be changed. It costs what changed since the last checkpoint."""
        made = OffsetRanges()
        made._saved = self._saved
        made._changes = {queue: dict(found) for queue, found in self._changes.items()}
        made._starts = {queue: list(starts) for queue, starts in self._starts.items()}
        made._named = self._named.copy()
        return made

    def put(self, queue: ArchiveQueue, new: Archived) -> None:
        """Take in a range, in the place of that which begins where it does; it overlaps with no other. Of a draft."""
        old = [o for o in self.around(queue, new.start, new.start + 1) if o.start == new.start]
        self._named.subtract(file.key for one in old for file in one.files)
        self._named.update(file.key for file in new.files)
        changed = self._changes.setdefault(queue, {})
        if new.start not in changed:
            insort(self._starts.setdefault(queue, []), new.start)
        changed[new.start] = new

    def remove(self, queue: ArchiveQueue, start: int) -> None:
        """Take out the offset range that begins there. Of a draft."""
        self.put(queue, Archived(start, start, 0, 0, 0, (), None, ()))

    # -- saving

    def settled(self) -> OffsetRanges:
        """The same, all of it in runs."""
        rows = [
            (queue, self._changes[queue][start])
            for queue in sorted(self._changes)
            for start in self._starts[queue]
        ]
        if not rows:
            return self
        runs, joined = list(self.runs), [SavedRun.of([table_of(rows)])]
        size = len(joined[0].data)
        while runs and len(runs[-1].data) <= max(_GROWTH * size, SMALL_BYTES):
            joined.insert(0, runs.pop())
            size += len(joined[0].data)
        if len(joined) > 1 or not runs:  # of what is not there the oldest run says nothing
            view = _Runs.of(joined, with_gone=bool(runs))
            joined = [SavedRun.of(view.tables())] if len(view.run) else []
        return OffsetRanges([*runs, *joined])


def _numbers_of(one: Archived) -> tuple[int, ...]:
    low = min((file.store_min_ms for file in one.files), default=-1)
    high = max((file.store_max_ms for file in one.files), default=-1)
    return one.start, one.end, low, high, one.bad, one.has_records
