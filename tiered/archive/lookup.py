"""Messages of an archive by key or unique id: of the files only those row groups are read that may have the key.

Overview: the log says which files can hold what is wanted by topic, time and place; then statistics and bloom filters of
the keys, which lie in the files themselves, say which row groups may have it. Of a filter the one block of 32 bytes is
looked at that speaks of the key (what is proven together with it is read), and all of a file are asked for at once. Of the
row groups that are left the columns of the keys are read first, and the others only where a row is wanted.

Exact: filters only leave out. Each row is held against all that is wanted, and the newest come first.

Requests of a file that does not have the key: two, one for the footer and one for the blocks. An index
(see below), if one was made, answers for all files that it covers with one.

Threads: files are looked at by ``spread``, several at once if it is the ``map`` of an executor. Nothing is kept.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import struct
from base64 import b64encode
from dataclasses import field
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import zstandard
from zlib_ng import zlib_ng

from backends.base import ByteRange
from backends.errors import AlreadyExistsError, ObjectNotFoundError
from backends.lazy_dataclass import dataclass
from backends.wrapping import put_own
from tiered.api.arrow import load_pyarrow
from tiered.archive.checked_ranges import ObjectFile, reading
from tiered.archive.model import whole_files
from tiered.archive.parquet import BLOCK, block_holds, block_number, filters_of, text_hash
from tiered.archive.plan import filled
from tiered.archive.selection import Selection, micros
from tiered.archive.tables import open_parquet, plan_files, read_archive
from tiered.errors import DataError, InvalidError, OtherVersionError, TieredStoreError
from tiered.format.kafka_batch import HeaderField, KafkaRecord
from tiered.format.properties import tag_hash
from tiered.format.record import offset_msg_id
from tiered.format.sysflag import INNER_BATCH
from tiered.upkeep.engine import while_room

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    import pyarrow as pa

    from backends.base import ObjectInfo, ObjectStore
    from tiered.archive.machine import ArchiveState
    from tiered.archive.model import ParquetFile
    from tiered.archive.tables import Chosen
    from tiered.upkeep.engine import Engine, Failed, WorkContext

    Spread = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]


_LOG = logging.getLogger(__name__)
_STEP_ROWS = 4096
COUNT = 64
"""How many messages a lookup gives by default, as a broker does."""


@dataclass(frozen=True, slots=True)
class FoundRow:
    """What a lookup came to."""

    rows: pa.Table
    """The messages with all their columns, newest first; of equal times the greater queue offset first."""
    files: int  # files of the archive that hold the topic
    files_opened: int  # of which a footer was read
    files_read: int  # of which rows were read
    groups: int  # row groups of the files that may have had it by time and place
    groups_read: int  # of which rows were read


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
        wanted: With a key; a topic, times and places narrow it.
        spread: Looks at files (``map`` of an executor: several at once).
        state: What the log says, when that is known already.
        index: What ``key_index.read_index`` gave; it may be older than the state. None: it is read.

    Raises:
        InvalidError: There is no archive, no key is asked for, or a topic that the archive has not.
    """
    if wanted.key is None:
        raise InvalidError("no key is asked for")
    state = read_archive(archive) if state is None else state
    plan = plan_files(state, wanted)
    topic = plan_files(state, Selection(texts=wanted.texts))
    known = _known(archive, plan.files, wanted.key, read_index(archive) if index is None else index)
    due = [file for file in plan.files if file.key not in known or known[file.key].may]

    def look(file: Chosen) -> _OfFile:
        with reading(archive, file.key):
            return _read(archive, file, wanted, known.get(file.key))

    done = list(spread(look, due))
    opened = {file.key for file in due}
    tables = [one.rows for one in done if one.rows is not None and one.rows.num_rows]
    groups = sum(one.groups for one in done)
    groups += sum(one.groups for key, one in known.items() if key not in opened)
    return FoundRow(
        newest(tables, count),
        len(topic.files),
        len(due),
        sum(one.groups_read > 0 for one in done),
        groups,
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
        may = _told(archive, part, text)
        if may is not None:  # else the files themselves are asked
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
    found: list[pa.Table] = []
    for number in groups:
        deciding = file.read_row_group(number, columns=list(wanted.columns)).combine_chunks()
        (batch,) = deciding.to_batches() or [None]
        mask = None if batch is None else wanted.mask(batch)
        if mask is not None and arrow.compute.any(mask).as_py():
            found += _hits(file, number, mask)
    return arrow.concat_tables(found) if found else None


def _hits(file: Any, number: int, mask: Any) -> Iterator[pa.Table]:  # noqa: ANN401
    """The rows of a group that a mask says; what is behind the last of them is not unpacked, since groups are large."""
    arrow, at = load_pyarrow(), 0
    left = arrow.compute.sum(mask).as_py()
    for batch in file.iter_batches(batch_size=_STEP_ROWS, row_groups=[number]):
        rows = batch.filter(mask.slice(at, batch.num_rows))
        at += batch.num_rows
        left -= rows.num_rows
        if rows.num_rows:
            yield arrow.Table.from_batches([rows])
        if not left:
            return


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
    """The fields of a message, in the order of ``tiered.format.message_forms.message_json``; in the words of its store."""
    if row.get("timestamp_type") is not None:
        return _kafka_document(row)
    if row["store_host"] is None:
        return _jmq_document(row)
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


def _kafka_document(row: dict[str, Any]) -> dict[str, Any]:
    headers = [HeaderField(one["name"], one["value"]) for one in row["headers"]]
    record = KafkaRecord(
        row["offset"],
        row["timestamp_ms"],
        row["timestamp_type"],
        row["key"],
        row["value"],
        headers,
        row["leader_epoch"],
    )
    return record.to_json(row["topic"], row["partition"])


def _jmq_document(row: dict[str, Any]) -> dict[str, Any]:
    """What an archive has of a message of JoyQueue's."""
    return {
        "topic": row["topic"],
        "partition": row["queue_id"],
        "index": row["queue_offset"],
        "store_time_ms": micros(row["store_ts"]) // 1000,
        "business_id": row["msg_key"],
        "body_base64": b64encode(row["body"]).decode("ascii"),
    }


# -- the index of keys -----------------------------------------------------------------------------
#
# An index of an archive's keys: the filters of many Parquet files in one object, laid so that one read asks all of them.
#
# Overview: a filter of Parquet is blocks of 32 bytes, and the hash of a key says which block speaks of it;
# filters of the same size have it at the same number. So block 17 of every filter lies beside block 17 of the
# others, a *row*, and a lookup reads one row for each size that there is: 32 bytes a row group and column. What
# the row leaves is looked at in the files.
#
# The index is derived: without it, or for files that it does not cover, lookups ask the files themselves. Objects are never
# replaced; an object covers files that no other covered when it was made. Merged files are new ones to it.
#
# Damage costs speed, and no answer: an object that is damaged or of another version covers nothing, as if it were not there.
# ``--verify`` reads all of it, ``--repair`` takes it away, and the next build makes it again.
#
# Ordering and crashes: an object is complete or absent; nothing refers to it but its name below ``_keys/``. Two
# that build at once make an object each (or the same one): lookups then have two opinions of the same files,
# and either will do.
#
# Layout::
#
#     rows of each class      blocks * (32 * filters + 4) bytes: the row's blocks, and their CRC-32 (big-endian)
#     head                    JSON, zstd: ``classes`` [[blocks, filters, start]], ``files`` [[key, [[class, …] a group]]]
#     footer, 16 bytes        size of the head and its CRC-32 (big-endian uint32 each), ``TMQKEYS1``
#
# A class is all filters of one size. Filters are numbered within theirs in the order in which ``files`` names them: file by
# file, group by group, the columns of ``tiered.archive.parquet.COLUMNS``; class -1 stands for a column without a filter.

PREFIX: Final = "_keys/"
INDEX_KEY: Final = re.compile(r"_keys/[0-9a-f]{16}\.keys")
OBJECT_BYTES: Final = 64 << 20
"""Filters of one object, at most; more only where one file has more. Memory of a piece of work of a build: twice that."""
ROW_BYTES: Final = 4
"""What the filters of a row take, about."""
FORMAT: Final = 1
_MAGIC: Final = b"TMQKEYS1"
_FOOTER: Final = struct.Struct(">II8s")
_CRC_BYTES: Final = 4
_TAIL_BYTES: Final = 64 * 1024
_HEAD_BYTES_MAX: Final = 256 << 20
_NONE: Final = -1
_PROVED_BYTES: Final = 8 << 20
"""Read at once by who looks at every byte."""
DO_MAKE_AGAIN: Final = (
    "`tiered archive --verify --repair` takes it away, and --key-index makes it again"
)

Groups = list[list[int]]
"""Of each row group of a file the class of each column's filter."""


@dataclass(frozen=True, slots=True)
class IndexPart:
    """One object of the index."""

    key: str  # relative to the archive
    classes: tuple[tuple[int, int, int], ...]
    """Blocks of a filter, filters, and where the rows begin."""
    files: dict[str, Groups]  # the row groups of each file, by its key


@dataclass(slots=True)
class Built:
    """What a build did."""

    objects: int = 0  # that are there now
    files: int = 0  # covered by them
    size_bytes: int = 0  # of them
    failed: Failed[str] = field(default_factory=list)
    """Keys of files that could not be covered, and why. Lookups ask these themselves."""

    def add(self, more: Built) -> None:
        """What somebody else has made."""
        self.objects += more.objects
        self.files += more.files
        self.size_bytes += more.size_bytes
        self.failed += more.failed


def read_index(archive: ObjectStore) -> list[IndexPart]:
    """What the index covers: a listing, and a request for each object.

    An object that is damaged or of another version covers nothing, as if it were not there; the log says so.
    """
    found = []
    for _, part in _parts(archive):
        if isinstance(part, IndexPart):
            found.append(part)
        else:
            _note_useless(part)
    return found


def _parts(
    archive: ObjectStore,
) -> Iterator[tuple[ObjectInfo, IndexPart | DataError | OtherVersionError]]:
    """Each object of the index, or why it cannot be read; one that is gone meanwhile is none."""
    for info in archive.list(PREFIX):
        try:
            yield info, _read_part(archive, info.key, info.size_bytes)
        except ObjectNotFoundError:
            continue
        except (DataError, OtherVersionError) as error:
            yield info, error


def useless_parts(archive: ObjectStore, known: Collection[str]) -> list[ObjectInfo]:
    """Objects of the index of which no file is known any more. One that cannot be read is none: ``--repair`` deletes it."""
    parts = ((info, part) for info, part in _parts(archive) if isinstance(part, IndexPart))
    return [info for info, part in parts if not any(key in known for key in part.files)]


def groups_with(archive: ObjectStore, part: IndexPart, text: str) -> dict[str, list[int]]:
    """Which row groups may have a text, by the key of their file; files without one have an empty list. One request."""
    value = text_hash(text)
    rows = [_row(one, value) for one in part.classes]
    data = archive.get_ranges(part.key, rows) if rows else []
    proven = [_proven_row(part.key, row) for row in data]
    answers = [
        iter([block_holds(row[at : at + BLOCK], value) for at in range(0, len(row), BLOCK)])
        for row in proven
    ]
    found: dict[str, list[int]] = {}
    for key, groups in part.files.items():
        says = [any([n == _NONE or next(answers[n]) for n in classes]) for classes in groups]  # noqa: C419 (each is taken)
        found[key] = [number for number, may in enumerate(says) if may]
    return found


def files_without(archive: ObjectStore, index: Iterable[IndexPart], text: str) -> set[str]:
    """Files of which the index knows that they do not have a text; a request for each object."""
    told = (_told(archive, part, text) or {} for part in index)
    return {key for groups in told for key, may in groups.items() if not may}


def _told(archive: ObjectStore, part: IndexPart, text: str) -> dict[str, list[int]] | None:
    """``groups_with``; None where the object is damaged, or somebody removed it: then it covers nothing."""
    try:
        return groups_with(archive, part, text)
    except ObjectNotFoundError:
        return None
    except DataError as error:
        _note_useless(error)
        return None


def damage_of_index(archive: ObjectStore) -> dict[str, TieredStoreError]:
    """What is wrong with objects of the index, by key, in order. Every byte is read.

    Those of another version are among it (``OtherVersionError``).
    """
    found: dict[str, TieredStoreError] = {}
    for info, part in _parts(archive):
        try:
            if not isinstance(part, IndexPart):
                raise part
            _prove_part(archive, part)
        except (DataError, OtherVersionError) as error:
            found[info.key] = error
        except ObjectNotFoundError:
            continue
    return found


def _prove_part(archive: ObjectStore, part: IndexPart) -> None:
    for blocks, filters, start in part.classes:
        size = filters * BLOCK + _CRC_BYTES
        step = max(1, _PROVED_BYTES // size)
        for first in range(0, blocks, step):
            count = min(step, blocks - first)
            at = start + first * size
            data = archive.get(part.key, ByteRange(at, at + count * size))
            for n in range(count):
                _proven_row(part.key, data[n * size : (n + 1) * size])


def build(
    archive: ObjectStore,
    state: ArchiveState,
    engine: Engine,
    *,
    told: Callable[[Built], None] = lambda _b: None,
) -> Built:
    """Make the index cover every file that the log names; one that is lost or damaged is left out, and named."""
    covered = {key for part in read_index(archive) for key in part.files}
    built = Built()
    files = ((file.key, file.size_bytes, file.rows) for file in _without(covered, state))
    most = OBJECT_BYTES // ROW_BYTES
    shares = while_room(map(tuple, filled(files, lambda file: file[2], most)), built.failed)
    with engine(index_files, shares) as outcomes:
        for share, made in outcomes:
            if isinstance(made, Exception):
                built.failed += [(key, made) for key, *_ in share]
            else:
                built.add(made)
            told(built)
    return built


def _without(covered: set[str], state: ArchiveState) -> Iterator[ParquetFile]:
    for _, some in groupby(state.queues.each(), key=lambda pair: pair[0].topic):
        files = (file for _, one in some for file in one.files)
        yield from whole_files(file for file in files if file.key not in covered)


_Share = tuple[tuple[str, int, int], ...]
"""Files of one object, most likely: key, bytes and rows."""


def index_files(context: WorkContext, share: _Share) -> Built:
    """Make an object for some files; several, where their filters are larger than files of so many rows mostly have.

    Raises:
        BackendError: The store failed. A file that is damaged holds up no others, and is said.
    """
    built = Built()
    for object_files in filled(
        _sound(context.archive, share, built),
        lambda file: sum(len(bits or b"") for group in file[1] for bits in group),
        OBJECT_BYTES,
    ):
        data = _encode(object_files)
        name = hashlib.sha256("\n".join(key for key, _ in object_files).encode()).hexdigest()[:16]
        _put_part(context.archive, f"{PREFIX}{name}.keys", data)
        built.objects += 1
        built.files += len(object_files)
        built.size_bytes += len(data)
    return built


def _put_part(archive: ObjectStore, key: str, data: bytes) -> None:
    """Make an object, or adopt the one that another made of the same files. One that is damaged is replaced."""
    try:
        archive.put_if_absent(key, data)
    except AlreadyExistsError:
        try:
            _prove_part(archive, _read_part(archive, key, archive.head(key).size_bytes))
        except DataError:
            archive.delete(key)
        except ObjectNotFoundError:
            pass
        else:
            return
        put_own(archive, key, data)


_Filters = tuple[str, list[list[bytes | None]]]
"""A file's key, and the bits of its filters by group and column."""


def _sound(archive: ObjectStore, files: _Share, built: Built) -> Iterator[_Filters]:
    """Filters of the files that can be read; the others have failed."""
    for key, size, _ in files:
        try:
            yield _filters(archive, key, size)
        except DataError as error:
            built.failed.append((key, error))


def _filters(archive: ObjectStore, key: str, size: int) -> _Filters:
    with reading(archive, key):
        raw = ObjectFile(archive, key, size)
        metadata = open_parquet(raw).metadata
        places = [filters_of(metadata.row_group(n)) for n in range(metadata.num_row_groups)]
        asked = [place for group in places for place in group if place is not None]
        ranges = [ByteRange(start, start + bits) for start, bits in asked]
        bits = iter(raw.read_ranges(ranges))
    return key, [[None if place is None else next(bits) for place in group] for group in places]


def _encode(files: Sequence[_Filters]) -> bytes:
    every = [bits for _, groups in files for group in groups for bits in group if bits is not None]
    sizes = sorted({len(bits) for bits in every})
    numbers = {size: number for number, size in enumerate(sizes)}
    chunks, classes, at = [], [], 0
    for size in sizes:
        mine = [bits for bits in every if len(bits) == size]
        classes.append([size // BLOCK, len(mine), at])
        chunks.append(_rows(mine))
        at += len(chunks[-1])
    named = [
        [key, [[_NONE if bits is None else numbers[len(bits)] for bits in g] for g in groups]]
        for key, groups in files
    ]
    text = json.dumps({"format": FORMAT, "classes": classes, "files": named}).encode()
    head = zstandard.ZstdCompressor(level=3).compress(text)
    return b"".join([*chunks, head, _FOOTER.pack(len(head), zlib_ng.crc32(head), _MAGIC)])


def _rows(filters: Sequence[bytes]) -> bytes:
    """Block n of each, then their checksum, for each n."""
    bits = np.frombuffer(b"".join(filters), np.uint8).reshape(len(filters), -1, BLOCK)
    rows = np.ascontiguousarray(bits.transpose(1, 0, 2)).reshape(bits.shape[1], -1)
    texts = [row.tobytes() for row in rows]
    return b"".join(data + zlib_ng.crc32(data).to_bytes(_CRC_BYTES, "big") for data in texts)


def _row(one: tuple[int, int, int], value: int) -> ByteRange:
    blocks, filters, start = one
    size = filters * BLOCK + _CRC_BYTES
    at = start + block_number(value, blocks) * size
    return ByteRange(at, at + size)


def _proven_row(key: str, row: bytes) -> memoryview:
    """A row without its checksum."""
    data = memoryview(row)[:-_CRC_BYTES]
    if zlib_ng.crc32(data) != int.from_bytes(row[-_CRC_BYTES:], "big"):
        raise _damaged("a row of the key index has a wrong checksum", key)
    return data


def _read_part(archive: ObjectStore, key: str, size: int) -> IndexPart:
    if size < _FOOTER.size:
        raise _damaged("this is not an object of a key index", key)
    tail = archive.get(key, ByteRange(max(size - _TAIL_BYTES, 0), size))
    length, crc, magic = _FOOTER.unpack(tail[-_FOOTER.size :])
    if magic != _MAGIC or not 0 < length <= min(size - _FOOTER.size, _HEAD_BYTES_MAX):
        raise _damaged("this is not an object of a key index", key)
    start = size - _FOOTER.size - length
    head = tail[-_FOOTER.size - length : -_FOOTER.size]
    if len(tail) < length + _FOOTER.size:
        head = archive.get(key, ByteRange(start, start + length))
    if zlib_ng.crc32(head) != crc:
        raise _damaged("the head of the key index has a wrong checksum", key)
    return _part_of(key, head, start)


def _part_of(key: str, head: bytes, end: int) -> IndexPart:
    try:
        known = json.loads(zstandard.ZstdDecompressor().decompress(head, _HEAD_BYTES_MAX))
        if known["format"] != FORMAT:
            raise _unknown(f"its format is {known['format']!r:.80}, where {FORMAT} is known", key)
        classes = tuple((int(b), int(f), int(s)) for b, f, s in known["classes"])
        files = {str(name): [list(map(int, g)) for g in groups] for name, groups in known["files"]}
    except (ValueError, LookupError, TypeError, zstandard.ZstdError) as error:
        raise _unknown(f"{error!r:.100}", key) from error
    used = [n for groups in files.values() for group in groups for n in group if n != _NONE]
    counts = [used.count(number) for number in range(len(classes))]
    ends = [s + b * (f * BLOCK + _CRC_BYTES) for b, f, s in classes]
    fits = counts == [f for _, f, _ in classes] and all(at <= end for at in ends)
    if not fits or not all(-1 <= n < len(classes) for n in used):
        raise _unknown("it contradicts itself", key)
    return IndexPart(key, classes, files)


def _damaged(what: str, key: str) -> DataError:
    return DataError(what, where=key, do=DO_MAKE_AGAIN)


def _unknown(what: str, key: str) -> OtherVersionError:
    """A head whose checksum holds was written so."""
    return OtherVersionError(f"a key index has another form: {what}", where=key)


def _note_useless(error: DataError | OtherVersionError) -> None:
    _LOG.warning("an object of the key index is passed over: %s", error)
