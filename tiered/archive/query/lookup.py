"""Messages of an archive by key or unique id: of the files only those row groups are read that may have the key.

Overview: the log says which files can hold what is wanted by topic, time and place; then statistics and bloom filters of
the keys, which lie in the files themselves, say which row groups may have it. Of a filter the one block of 32 bytes is
looked at that speaks of the key (what is proven together with it is read), and all of a file are asked for at once. Of the
row groups that are left the columns of the keys are read first, and the others only where a row is wanted.

Exact: filters only leave out. Each row is held against all that is wanted, and the newest come first.

Requests of a file that does not have the key: two, one for the footer and one for the blocks. An index
(``tiered.archive.query.key_index``), if one was made, answers for all files that it covers with one.

Threads: files are looked at by ``spread``, several at once if it is the ``map`` of an executor. Nothing is kept.
"""

from __future__ import annotations

import json
from base64 import b64encode
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from backends.base import ByteRange
from backends.errors import ObjectNotFoundError
from tiered.api.arrow import load_pyarrow
from tiered.archive.bloom import BLOCK, block_holds, block_number, filters_of, text_hash
from tiered.archive.harm import reading
from tiered.archive.query.key_index import groups_with, read_index
from tiered.archive.ranges import ObjectFile
from tiered.archive.selection import Selection, micros
from tiered.archive.tables import open_parquet, plan_files, read_archive
from tiered.errors import InvalidError
from tiered.format.hosts import offset_msg_id
from tiered.format.properties import tag_hash
from tiered.format.sysflag import INNER_BATCH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import pyarrow as pa

    from backends.base import ObjectStore
    from tiered.archive.machine import ArchiveState
    from tiered.archive.query.key_index import IndexPart
    from tiered.archive.tables import Chosen

    Spread = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]


COUNT = 64
"""How many messages a lookup gives by default, as a broker does."""


@dataclass(frozen=True, slots=True)
class FoundRow:
    """What a lookup came to.

    Attributes:
        rows: The messages with all their columns, newest first; of equal times the greater queue offset first.
        files: Files of the archive that hold the topic.
        files_opened: Of which a footer was read.
        files_read: Of which rows were read.
        groups: Row groups of the files that may have had it by time and place.
        groups_read: Of which rows were read.
    """

    rows: pa.Table
    files: int
    files_opened: int
    files_read: int
    groups: int
    groups_read: int


@dataclass(frozen=True, slots=True)
class _OfFile:
    rows: pa.Table | None
    groups: int
    groups_read: int


def lookup(
    archive: ObjectStore,
    wanted: Selection,
    *,
    count: int = COUNT,
    spread: Spread = map,
    state: ArchiveState | None = None,
    index: Sequence[IndexPart] | None = None,
) -> FoundRow:
    """Find messages.

    Args:
        archive: Of which.
        wanted: With a key; a topic, times and places narrow it.
        count: So many, the newest.
        spread: Looks at files (``map`` of an executor: several at once).
        state: What the log says, when that is known already.
        index: What ``key_index.read_index`` gave; it may be older than the state. None: it is read.

    Raises:
        InvalidError: There is no archive, no key is asked for, or a topic that the archive has not.
        DataError: The log or a file is damaged.
        BackendError: The store failed.
    """
    if wanted.key is None:
        raise InvalidError("no key is asked for")
    state = read_archive(archive) if state is None else state
    plan = plan_files(state, wanted)
    topic = plan_files(state, Selection(texts=wanted.texts))
    known = _known(archive, plan.files, wanted.key, read_index(archive) if index is None else index)
    due = [file for file in plan.files if file.key not in known or known[file.key].may]
    done = list(spread(lambda file: _look(archive, file, wanted, known.get(file.key)), due))
    opened = {file.key for file in due}
    tables = [one.rows for one in done if one.rows is not None and one.rows.num_rows]
    return FoundRow(
        newest(tables, count),
        len(topic.files),
        len(due),
        sum(one.groups_read > 0 for one in done),
        sum(one.groups for one in done)
        + sum(one.groups for key, one in known.items() if key not in opened),
        sum(one.groups_read for one in done),
    )


@dataclass(frozen=True, slots=True)
class _Known:
    """What an index says of a file: how many row groups it has, and which may have the key."""

    groups: int
    may: list[int]


def _known(
    archive: ObjectStore, files: Sequence[Chosen], text: str, index: Sequence[IndexPart]
) -> dict[str, _Known]:
    """What the index says of files, by key; of those that it does not cover nothing."""
    wanted = {file.key for file in files}
    found: dict[str, _Known] = {}
    for part in index:
        mine = part.files.keys() & wanted - found.keys()
        if not mine:
            continue
        try:
            may = groups_with(archive, part, text)
        except ObjectNotFoundError:
            continue  # somebody removed it: the files themselves are asked
        found |= {key: _Known(len(part.files[key]), may[key]) for key in mine}
    return found


def newest(tables: Sequence[pa.Table], count: int) -> pa.Table:
    """The newest rows of several tables, which may have different columns."""
    arrow = load_pyarrow()
    if not tables:
        from tiered.archive.columns import schema  # noqa: PLC0415

        return schema().empty_table()
    every = arrow.concat_tables(tables, promote_options="default")
    order = [("store_ts", "descending"), ("queue_offset", "descending"), ("queue_id", "ascending")]
    return every.take(arrow.compute.sort_indices(every, order)[:count])


def _look(archive: ObjectStore, chosen: Chosen, wanted: Selection, known: _Known | None) -> _OfFile:
    """The wanted rows of a file."""
    with reading(archive, chosen.key):
        return _read(archive, chosen, wanted, known)


def _read(archive: ObjectStore, chosen: Chosen, wanted: Selection, known: _Known | None) -> _OfFile:
    assert wanted.key is not None
    raw = ObjectFile(archive, chosen.key, chosen.size_bytes)
    file = open_parquet(raw)
    every = range(file.metadata.num_row_groups)
    if known is None:
        places = [filters_of(file.metadata.row_group(number)) for number in every]
        may = _may_have(raw, places, wanted.key)
        groups = [number for number in every if may[number]]
    else:
        groups = known.may
    rows = read_rows(file, groups, wanted) if groups else None
    return _OfFile(rows, len(every), len(groups))


def _may_have(
    raw: ObjectFile, places: Sequence[Sequence[tuple[int, int] | None]], text: str
) -> list[bool]:
    """For each row group, whether one of its filters has the text, or one of its columns has no filter."""
    value = text_hash(text)
    asked = [place for of_group in places for place in of_group if place is not None]
    starts = [start + BLOCK * block_number(value, bits // BLOCK) for start, bits in asked]
    ranges = [ByteRange(start, start + BLOCK) for start in starts]
    blocks = iter(raw.read_ranges(ranges))
    answers = [
        [place is None or block_holds(next(blocks), value) for place in of_group]
        for of_group in places
    ]
    return [any(of_group) for of_group in answers]


def read_rows(file: Any, groups: Iterable[int], wanted: Selection) -> pa.Table | None:  # noqa: ANN401
    """The wanted rows of some row groups; without any, only the columns that decide were read."""
    arrow = load_pyarrow()
    found = []
    for number in groups:
        deciding = file.read_row_group(number, columns=list(wanted.columns)).combine_chunks()
        (batch,) = deciding.to_batches() or [None]
        mask = None if batch is None else wanted.mask(batch)
        if mask is not None and arrow.compute.any(mask).as_py():
            found.append(file.read_row_group(number).filter(mask))
    return arrow.concat_tables(found) if found else None


# -- lines -----------------------------------------------------------------------------------------
#
# A row of an archive as the JSON that ``tiered cat`` and ``tiered query`` print of a message.
#
# Of what only the stored record knows an archive has nothing: ``stored_sys_flag``, ``size`` and ``log_offset``
# are null.


def lines(rows: pa.Table) -> Iterator[bytes]:
    """A line of JSON for each row, without its end."""
    for row in rows.to_pylist():
        yield json.dumps(document(row), ensure_ascii=False).encode()


def document(row: dict[str, Any]) -> dict[str, Any]:
    """The fields of a message, in the order of ``tiered.format.message.message_json``.

    Args:
        row: All columns of docs/formats/archive.md, maps as lists of pairs.
    """
    properties = dict(row["properties"] or ())
    record_id = offset_msg_id(row["store_host"], row["physical_offset"])
    return {
        "topic": row["topic"],
        "queue_id": row["queue_id"],
        "queue_offset": row["queue_offset"],
        "store_timestamp_ms": micros(row["store_ts"]) // 1000,
        "born_timestamp_ms": micros(row["born_ts"]) // 1000,
        "born_host": row["born_host"],
        "store_host": row["store_host"],
        "tags": row["tag"],
        "keys": row["msg_key"],
        "properties": dict(sorted(properties.items())),
        "msg_id": row["uniq_key"] or record_id,
        "sys_flag": row["sys_flag"],
        "stored_sys_flag": None,
        "flag": row["flag"],
        "body_crc": row["body_crc"],
        "reconsume_times": row["reconsume_times"],
        "prepared_transaction_offset": row["prepared_tx_offset"],
        "size": None,
        "tag_hash": tag_hash(row["tag"]),
        "physical_offset": row["physical_offset"],
        "offset_msg_id": None if row["sys_flag"] & INNER_BATCH else record_id,
        "body_base64": b64encode(row["body"]).decode("ascii"),
        "log_offset": None,
    }
