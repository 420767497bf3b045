"""An archive as tables: each topic, with exactly the files that the log names. Read-only."""

from __future__ import annotations

from collections import Counter
from dataclasses import field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from backends.base import ByteRange
from backends.lazy_dataclass import dataclass
from tiered.api.arrow import load_pyarrow
from tiered.archive.checked_ranges import ObjectFile, open_log
from tiered.archive.machine import ArchiveMachine
from tiered.archive.model import LOG, whole_files
from tiered.archive.parquet import bits_of, can_hold
from tiered.archive.selection import shown
from tiered.errors import InvalidError
from tiered.journal.replay import JournalReader

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt
    import pyarrow as pa

    from backends.base import ObjectStore
    from tiered.archive.machine import ArchiveState
    from tiered.archive.model import ArchiveQueue, ParquetFile
    from tiered.archive.selection import Selection


def follow_log(archive: ObjectStore) -> JournalReader[ArchiveState]:
    """A reader of an archive's log, at its head; there may be no entry."""
    log = JournalReader(archive, LOG, ArchiveMachine())
    open_log(archive, log)
    return log


def read_archive(
    archive: ObjectStore, log: JournalReader[ArchiveState] | None = None
) -> ArchiveState:
    """What the log says now.

    Args:
        log: Of the archive; it follows. None: it is read from its checkpoint on.

    Raises:
        InvalidError: There is no archive.
    """
    log = log or JournalReader(archive, LOG, ArchiveMachine())
    open_log(archive, log)
    if not log.number:
        raise InvalidError(
            "there is no archive here", where=archive.url, do="`tiered archive` makes one"
        )
    return log.state


def files_by_topic(state: ArchiveState) -> dict[str, list[ParquetFile]]:
    """The files of each topic, in order of topic, queue and offset; topics without a file have an empty list.

    A file that several queues share comes once, with the numbers of all its rows.
    """
    found: dict[str, list[ParquetFile]] = {}
    for queue, one in state.queues.each():
        found.setdefault(queue.topic, []).extend(one.files)
    return {topic: whole_files(files) for topic, files in found.items()}


# -- what a selection needs ------------------------------------------------------------------------
#
# Which files and row groups of an archive have to be read for a selection, and which are left out by what.
#
# Files are chosen by what the log says of each (queue, queue offsets, store times), row groups by the statistics
# in the file's footer and by the bloom filters of keys. What is chosen may hold nothing that is wanted; what is
# left out holds nothing. Planning is pure; ``explain`` reads.

_KEYS = ("keys.list.element", "uniq_key")
_BLOOMED = {"uniq_key": "uniq_key", "msg_key": "msg_key"}


OF_ROW_RANGES = ("broker", "queue_id", "incarnation", "queue_offset")
"""Columns that tell whose a row is."""


class TableRows(NamedTuple):
    """Rows of a file that count: one queue's, between two offsets."""

    queue: ArchiveQueue
    low: int  # first queue offset
    high: int  # one past the last
    rows: int  # how many


@dataclass(slots=True)
class Chosen:
    """A file that has to be read."""

    key: str  # relative to the archive
    size_bytes: int  # of the object
    row_ranges: list[TableRows]
    """What of it may be wanted. A file may hold more that counts, or that does not count any more."""

    @property
    def rows(self) -> int:
        """Of the row ranges."""
        return sum(row_range.rows for row_range in self.row_ranges)

    def masks(self, batch: pa.RecordBatch) -> Iterator[tuple[ArchiveQueue, npt.NDArray[np.bool_]]]:
        """Of each queue which rows of the file are its own and count; ``batch`` has ``OF_ROW_RANGES``."""
        brokers = batch.column("broker")
        queues, incarnations, offsets = (
            batch.column(name).to_numpy(zero_copy_only=False) for name in OF_ROW_RANGES[1:]
        )
        for queue in dict.fromkeys(one.queue for one in self.row_ranges):
            mine = load_pyarrow().compute.equal(brokers, shown(queue.broker))
            mask = mine.to_numpy(zero_copy_only=False).astype(np.bool_)
            mask &= (queues == queue.queue_id) & (incarnations == queue.incarnation)
            counts = np.zeros(len(mask), np.bool_)
            for one in self.row_ranges:
                if one.queue == queue:
                    counts |= (offsets >= one.low) & (offsets < one.high)
            yield queue, mask & counts


@dataclass(slots=True)
class Pruning:
    """What a selection lets us leave out."""

    files: list[Chosen] = field(default_factory=list)  # files that have to be read
    files_left: Counter[str] = field(default_factory=Counter)
    """Files that are left out, by what: a column of the log."""
    keys_left: set[str] = field(default_factory=set)
    foreign: set[str] = field(default_factory=set)
    """Keys of files, of any, that have rows of other queues than those that are wanted."""
    groups: int | None = None
    """Row groups of ``files`` that have to be read; None when no footer was looked at."""
    groups_left: Counter[str] = field(default_factory=Counter)
    """Row groups of ``files`` that are left out, by ``statistics of <column>`` or ``bloom filter of …``."""
    rows: int = 0  # in the row groups (or files) that have to be read
    rows_all: int = 0  # in all files

    def keys(self) -> set[str]:
        """Of all files of the archive."""
        return self.keys_left.union(file.key for file in self.files)

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "files": len(self.files),
            "files_left_out": dict(sorted(self.files_left.items())),
            "row_groups": self.groups,
            "row_groups_left_out": dict(sorted(self.groups_left.items())),
            "rows": self.rows,
            "rows_all": self.rows_all,
            "size_bytes": sum(file.size_bytes for file in self.files),
        }


def plan_files(state: ArchiveState, wanted: Selection) -> Pruning:
    """The files that may hold what is wanted, in order of queue and offset.

    Raises:
        InvalidError: A topic is asked for that the archive has not.
    """
    known = {shown(queue.topic) for queue in state.queues}
    do = f"topics are {', '.join(sorted(known)[:8])}" if known else "it has none at all"
    wanted.require_topics(known, "archive", do)
    return choose_files(state, wanted)


def choose_files(state: ArchiveState, wanted: Selection) -> Pruning:
    """The same, where an archive need not have the topics. One pass over rows, since logs name a million files."""
    found, chosen, reasons = Pruning(), dict[str, Chosen](), dict[str, str]()
    is_cut = not wanted.bounds.keys().isdisjoint(_OF_FILES)
    for queue in state.queues:
        refused = wanted.refuses(queue)
        for row in state.queues.files(queue):
            key, low, high, rows, size, _, first_ms, last_ms, _, _ = row
            found.rows_all += rows
            if refused:
                found.foreign.add(key)
            reason = refused or (
                refuses_rows(wanted, low, high, first_ms, last_ms) if is_cut else ""
            )
            if reason:
                reasons.setdefault(key, reason)
                continue
            found.rows += rows
            row_range = TableRows(queue, low, high, rows)
            if (one := chosen.get(key)) is None:
                chosen[key] = Chosen(key, size, [row_range])
            else:
                one.row_ranges.append(row_range)
    found.files = list(chosen.values())
    found.keys_left = reasons.keys() - chosen.keys()
    found.files_left.update(reasons[key] for key in found.keys_left)
    return found


_OF_FILES = ("queue_offset", "store_ts")


def refuses_file(wanted: Selection, file: ParquetFile) -> str:
    """By what the log says that nothing of a file is wanted; empty when something may be."""
    return refuses_rows(wanted, file.low, file.high, file.store_min_ms, file.store_max_ms)


def refuses_rows(wanted: Selection, low: int, high: int, first_ms: int, last_ms: int) -> str:
    """The same of rows: queue offsets ``[low, high)``, with the smallest and the greatest store time."""
    if not wanted.meets("queue_offset", low, high - 1):
        return "queue_offset"
    return "" if wanted.meets("store_ts", first_ms * 1000, last_ms * 1000 + 999) else "store_ts"


def groups_of(raw: ObjectFile, file: Any, wanted: Selection) -> tuple[list[int], Counter[str]]:  # noqa: ANN401
    """The row groups of an open file that may hold what is wanted: their numbers, and how many are left out by what."""
    chosen: list[int] = []
    left: Counter[str] = Counter()
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        chunks = [group.column(at) for at in range(group.num_columns)]
        columns = {chunk.path_in_schema: chunk for chunk in chunks}
        reason = _left_by_statistics(columns, wanted) or _left_by_filters(columns, wanted, raw)
        if reason:
            left[reason] += 1
        else:
            chosen.append(number)
    return chosen, left


def _left_by_statistics(columns: dict[str, Any], wanted: Selection) -> str:
    for name in wanted.bounds:
        found = _statistics(columns.get(name))
        # As they are stored: a broker's clock may say a time that no ``datetime`` can.
        if found is not None and not wanted.meets(name, found.min_raw, found.max_raw):
            return f"statistics of {name}"
    for name, values in wanted.texts.items():
        if not _may_hold(columns.get(name), values):
            return f"statistics of {name}"
    if wanted.key is not None and not any(_may_hold(columns.get(n), [wanted.key]) for n in _KEYS):
        return "statistics of keys"
    return ""


def _left_by_filters(columns: dict[str, Any], wanted: Selection, raw: ObjectFile) -> str:
    for name, column in _BLOOMED.items():
        values = wanted.texts.get(name)
        if values is not None and not _passes(columns.get(column), values, raw):
            return f"bloom filter of {name}"
    key = wanted.key
    if key is not None and not any(_passes(columns.get(name), [key], raw) for name in _KEYS):
        return "bloom filter of keys"
    return ""


def _passes(chunk: Any, values: Iterable[str], raw: ObjectFile) -> bool:  # noqa: ANN401
    """Whether the filter of a column says that one of the values may be there; without a filter it may."""
    place = bits_of(chunk)
    if place is None:
        return True
    start, size = place
    (bits,) = raw.read_ranges([ByteRange(start, start + size)])
    return any(can_hold(bits, value) for value in values)


def _may_hold(chunk: Any, values: Iterable[str]) -> bool:  # noqa: ANN401
    found = _statistics(chunk)
    return found is None or any(found.min <= value <= found.max for value in values)


def _statistics(chunk: Any) -> Any:  # noqa: ANN401
    """Of a column with a least and a greatest value; None: it tells neither."""
    if chunk is None or not chunk.is_stats_set or not chunk.statistics.has_min_max:
        return None
    return chunk.statistics


def open_parquet(raw: ObjectFile) -> Any:  # noqa: ANN401
    """A file of an archive; nothing more of it is read before somebody asks."""
    from pyarrow import parquet  # noqa: PLC0415 (heavy)

    return parquet.ParquetFile(raw, pre_buffer=True, page_checksum_verification=True)


def explain(archive: ObjectStore, wanted: Selection, *, footers: bool = True) -> Pruning:
    """What a read of a selection would leave out; reads the log, the footers of the files chosen, and filters of keys.

    Args:
        footers: Look into the files; else the log alone is asked.

    Raises:
        InvalidError: There is no archive, or a topic is asked for that it has not.
    """
    found = plan_files(read_archive(archive), wanted)
    if not footers:
        return found
    found.groups = found.rows = 0
    for each in found.files:
        raw = ObjectFile(archive, each.key, each.size_bytes)
        file = open_parquet(raw)
        chosen, left = groups_of(raw, file, wanted)
        found.groups += len(chosen)
        found.groups_left.update(left)
        found.rows += sum(file.metadata.row_group(number).num_rows for number in chosen)
    return found
