"""Bundles: one immutable object with the sections of one or many queues.

A *section* is what one commit of one queue wrote, or what a merge made of several: its records, then its items, side by
side. So data and index become durable in one step (I2), and a small section is read and proven with one ranged GET of
exactly its bytes, by the checksum that the journal carries.

Section, positions from its start (big-endian)::

    offset    size   field
    0         W      records: as they are (W = R), or packed: each block of 128 KiB of them one zstd frame, or as it is
    W         K      packed only: dictionary for those frames (RFC 8878); may be empty
    W+K       20·n   items (``tiered.log.flat_file``), one for each queue offset, never packed;
              24·k   sparse: k of them, each behind its number in the section (uint32), ascending; the last one among them
    …         4·B    plain:  CRC-32 of each block, the records' first, then the items'; blocks of 64 KiB, the last one short
              8·B    packed: stored size (uint32; as large as the block itself: stored as it is) and CRC-32 of the stored
                             bytes of each block of the records; then of the dictionary, if there is one; then of each
                             64-KiB block of the items

A section is *sparse* where compaction took most messages away: of the ``n`` items ``n - k`` are not stored. Whoever reads
them is given all ``n``, those as holes with the reason ``COMPACTED`` (``dense_items``), so that nothing above knows of it.

Blocks never cross the ends of records, dictionary or items. The section's checksum is the CRC-32 of everything before the
block table; it is also what the CRCs of the table combine to, so the table, read by itself, is proven by it. The sizes
(R, W, n, and of the whole section) stand in the journal and in the bundle's own table.

Bundle::

    0         S      sections, one after another
    S         T      table: zstd frame, with a checksum of its own, of
                       0  4      uint32  topics; the highest bit: some section is sparse
                       …  2+L    each topic: uint16 length in bytes, UTF-8
                       …  X·m    the columns of ``SECTION``, one after another, each with a value for each of m sections;
                                 then those of ``SECTION_SPARSE``, if the highest bit of the first field is set
    S+T       32     footer:
                       0  8   uint64  sections_bytes (S)
                       8  4   uint32  table_bytes (T)
                      12  4   uint32  sections (m)
                      16  4   uint32  table_crc  CRC-32 of the table as stored
                      20  2   uint16  format_version (1; 2: some section is sparse)
                      22  2   uint16  level: 0 as committed; how often its bytes were gathered
                      24  4   uint32  footer_crc  CRC-32 of footer bytes 0..24
                      28  4   bytes   magic ``TBDL``

Nobody reads the table to read messages; a lost journal is rebuilt from it, and ``verify`` holds it against the journal.
Size, checksum and magic of the footer stay where they are in every version.

Damage: a flipped bit costs the block that it lies in. In a block table it costs nothing but requests: the section is read
whole then, proven by the journal's checksum, and where its blocks lie is found by walking (``SectionBlocks.walked``). In
the bundle's table or footer it costs nothing but the help in a disaster.

Bounds (I8): a bucket may hold anything, with right checksums. Nothing is allocated by a size that the bytes at hand do not
bear out: a table unpacks to at most ``TABLE_BYTES_MAX`` and a thousand times its size, a block to its own size.
"""

from __future__ import annotations

import struct
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import zstandard
from zlib_ng import zlib_ng

from backends.lazy_dataclass import dataclass
from tiered.errors import DataError, InvalidError, OtherVersionError
from tiered.format.items import ITEM, ITEM_BYTES
from tiered.format.object import block_crcs, block_sizes, combined, damaged

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from typing_extensions import Buffer


BLOCK_BYTES: Final = 64 * 1024
PACKED_BLOCK_BYTES: Final = 128 * 1024
"""A reader of one record unpacks so much. Smaller blocks take longer to unpack; larger ones gain little."""
SECTION_BYTES_MAX: Final = 2**32 - 1
"""Sizes in a section are 32 bits. A merge stops at 64 MiB; only one commit of huge records can be larger."""
DICTIONARY_BYTES_MAX: Final = 1024 * 1024
TABLE_BYTES_MAX: Final = 256 * 1024 * 1024
"""Unpacked: about two million sections. A bundle of ours has a few thousand."""
_TABLE_RATIO_MAX: Final = 1000
_TABLE_SMALL_BYTES: Final = 1 << 20
"""A section's row has a checksum, of which nothing can be saved: a table of ours is packed to a thirtieth at most."""
PACK_LEVEL: Final = 3
PACK_LEVEL_MAX: Final = 19
"""Beyond it zstd takes memory that nobody has reckoned with."""
FORMAT: Final = 2
"""The newest. What has no sparse section is written as version 1, which every program of ours reads."""
_FORMATS: Final = (1, FORMAT)
MAGIC: Final = b"TBDL"
_FOOTER: Final = struct.Struct(">QIIIHHI4s")
FOOTER_BYTES: Final = _FOOTER.size
_SIGNED_BYTES: Final = FOOTER_BYTES - 8
_PACKED_ENTRY: Final = np.dtype([("size", ">u4"), ("crc", ">u4")])
_CRC: Final = np.dtype(">u4")
SPARSE_ITEM: Final = np.dtype([("number", ">u4"), ("item", ITEM)])
SPARSE_ITEM_BYTES: Final = SPARSE_ITEM.itemsize
SPARSE_COUNT_MAX: Final = 1 << 22
"""Items of a sparse section: so its bytes do not claim more than 80 MiB of them."""
COMPACTED: Final = 5
"""Tag code of a hole that compaction made (``tiered.local.interface.HoleReason``)."""
_SPARSE_TABLE: Final = 0x8000_0000
_WORTH: Final = 8
"""What does not shrink by an eighth, a block or a section, stays as it is: it costs nothing to read then."""
_WINDOW_BYTES_MAX: Final = 2 * 1024 * 1024
_FRAME_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_FRAMES_TRIED_MAX: Final = 100
_FRAME_BLOCK_HEAD_BYTES: Final = 3
_FRAME_BLOCK_OF_ONE_BYTE: Final = 1
"""A block of a frame that is one byte, repeated: its size is not that of what is stored."""

SECTION: Final = np.dtype(
    [
        ("topic", ">u4"),  # number in the table's topics
        ("queue_id", ">u4"),
        ("incarnation", ">u4"),
        ("segment", ">u8"),  # base log offset of the segment that it belongs to
        ("log_offset", ">u8"),  # of its first record
        ("queue_offset", ">u8"),  # of its first item
        ("count", ">u4"),  # items, n
        ("holes", ">u4"),  # items without a message
        ("store_min_ms", ">i8"),  # -1 when all items are holes
        ("store_max_ms", ">i8"),
        ("last", ">u4"),  # mark of the last item's record; 0: a hole
        ("start", ">u8"),  # position in the bundle
        ("records_bytes", ">u4"),  # R
        ("stored_bytes", ">u4"),  # W; less than R: packed
        ("size_bytes", ">u4"),  # of the whole section
        ("crc", ">u4"),  # of everything before its block table
        ("truncated", ">u1"),  # 1: a merge found it in what the broker had truncated by then
    ]
)
"""One row a section: what the bundle's own table says, and what the journal names."""
SECTION_SPARSE: Final = np.dtype(
    [
        ("gone", ">u4"),  # items that are not stored, n - k; they are among the holes
        (
            "log_gone",
            ">u8",
        ),  # bytes of records that compaction took away: the next part begins behind them
    ]
)
"""What a row has besides where compaction was; else both are 0."""
SECTION_ROW: Final = np.dtype([*SECTION.descr, *SECTION_SPARSE.descr])
"""A row in memory."""


@dataclass(frozen=True, slots=True)
class SectionPlace:
    """Where a section lies in its bundle, and how it is divided: all that a reader has to know."""

    start: int  # position in the bundle
    records_bytes: int  # size of the records
    stored_bytes: int  # what is stored of them; less than ``records_bytes`` if they are packed
    count: int  # items
    size_bytes: int  # of the whole section
    crc: int  # CRC-32 of everything before the block table
    gone: int = 0  # items that are not stored: the section is sparse

    @property
    def is_packed(self) -> bool:
        """Whether positions of records are not positions in the section."""
        return self.stored_bytes < self.records_bytes

    @property
    def block_bytes(self) -> int:
        """Of a block of the records."""
        return PACKED_BLOCK_BYTES if self.is_packed else BLOCK_BYTES

    @property
    def items_bytes(self) -> int:
        """Size of the items as they are read: all of them."""
        return ITEM_BYTES * self.count

    @property
    def stored_items_bytes(self) -> int:
        """Size of the items as they are stored."""
        return SPARSE_ITEM_BYTES * (self.count - self.gone) if self.gone else self.items_bytes

    @property
    def dictionary_bytes(self) -> int:
        """Size of the dictionary; what is left when all else is counted."""
        if not self.is_packed:
            return 0
        entries = _blocks(self.records_bytes, PACKED_BLOCK_BYTES)
        entries += _blocks(self.stored_items_bytes)
        left = self.size_bytes - self.stored_bytes - self.stored_items_bytes
        left -= _PACKED_ENTRY.itemsize * entries
        return left - _PACKED_ENTRY.itemsize if left else 0

    @property
    def items_at(self) -> int:
        """Position of the items in the section."""
        return self.stored_bytes + self.dictionary_bytes

    @property
    def table_at(self) -> int:
        """Position of the block table in the section."""
        return self.items_at + self.stored_items_bytes

    def check(self, *, where: str) -> None:
        """Hold the sizes against each other."""
        entry = _PACKED_ENTRY.itemsize if self.is_packed else _CRC.itemsize
        entries = _blocks(self.records_bytes, self.block_bytes)
        entries += _blocks(self.stored_items_bytes)
        entries += self.dictionary_bytes > 0
        fits = self.table_at + entry * entries == self.size_bytes
        fits &= not self.gone or self.count <= SPARSE_COUNT_MAX
        sane = 0 <= self.dictionary_bytes <= DICTIONARY_BYTES_MAX and 0 <= self.gone < self.count
        if not fits or not sane or not 0 <= self.stored_bytes <= self.records_bytes:
            raise damaged("the sizes of a section contradict each other", where)


def _blocks(size: int, block_bytes: int = BLOCK_BYTES) -> int:
    return -(-size // block_bytes)


# -- making ---------------------------------------------------------------------------------------


class Section(NamedTuple):
    """A section ready to be put into a bundle."""

    buffers: Sequence[Buffer]  # its bytes, in order; the records' are the caller's own, not copied
    place: SectionPlace  # its sizes and checksum; ``start`` is 0


def sparse_items(items: Buffer) -> bytes | None:
    """The stored form of items without those that compaction took away; None when that is not smaller."""
    every = np.frombuffer(memoryview(items).cast("B"), ITEM)
    stays = (every["size"] != 0) | (every["tag_code"] != COMPACTED)
    stays[-1:] = True  # so a section says itself how far it reaches
    where = np.flatnonzero(stays)
    if len(every) > SPARSE_COUNT_MAX or len(where) * SPARSE_ITEM_BYTES >= len(every) * ITEM_BYTES:
        return None
    stored = np.empty(len(where), SPARSE_ITEM)
    stored["number"], stored["item"] = where, every[where]
    return stored.tobytes()


def dense_items(stored: Buffer, place: SectionPlace, *, where: str) -> memoryview:
    """All items of a section, from what is stored of them, checked."""
    if not place.gone:
        return memoryview(stored).cast("B")
    some = np.frombuffer(memoryview(stored).cast("B"), SPARSE_ITEM)
    numbers = some["number"].astype(np.int64)
    ascend = (np.diff(numbers) > 0).all()
    if not len(some) or not ascend or numbers[-1] != place.count - 1:
        raise damaged(f"the sparse items of the section at {place.start} are none", where)
    every = np.zeros(place.count, ITEM)
    every["tag_code"] = COMPACTED
    every[numbers] = some["item"]
    return memoryview(every.view(np.uint8).data)


def _stored_items(items: Buffer, *, may_be_sparse: bool) -> tuple[Buffer, int, int]:
    """Items as they are stored, how many there are, and how many are not stored."""
    count = memoryview(items).nbytes // ITEM_BYTES
    sparse = sparse_items(items) if may_be_sparse else None
    if sparse is None:
        return items, count, 0
    return sparse, count, count - len(sparse) // SPARSE_ITEM_BYTES


def build_section(
    records: Sequence[Buffer], items: Buffer, *, may_be_sparse: bool = False
) -> Section:
    """A plain section of records and of their items (20 bytes each, one at least), the records not copied.

    ``may_be_sparse``: items that compaction took away need not be stored. InvalidError: it would be larger than
    ``SECTION_BYTES_MAX``.
    """
    stored, count, gone = _stored_items(items, may_be_sparse=may_be_sparse)
    size, crc, rest = _proven(records, memoryview(stored).cast("B"))
    place = SectionPlace(0, size, size, count, size + len(rest), crc, gone)
    return Section([*records, rest], place)


def build_sections(
    records: Iterable[Sequence[Buffer]], items: Buffer, counts: Sequence[int]
) -> tuple[list[Buffer], npt.NDArray[np.void]]:
    """The plain sections of a whole bundle, each as ``build_section`` makes it.

    Args:
        records: Of each section.
        items: Of all sections, one behind another.
        counts: How many of them are each section's; one at least.

    Returns:
        Their bytes, in order, the records' not copied; and ``SECTION_ROW``, one a section, in which no more is said than
        where each lies, and what proves it.
    """
    listed = memoryview(items).cast("B")
    buffers: list[Buffer] = []
    sizes, crcs, wholes, at = [], [], [], 0
    for some, count in zip(records, counts, strict=True):
        end = at + ITEM_BYTES * count
        size, crc, rest = _proven(some, listed[at:end])
        buffers += some
        buffers.append(rest)
        sizes.append(size)
        crcs.append(crc)
        wholes.append(size + len(rest))
        at = end
    rows = np.zeros(len(sizes), SECTION_ROW)
    rows["records_bytes"] = rows["stored_bytes"] = sizes
    rows["count"], rows["crc"], rows["size_bytes"] = counts, crcs, wholes
    rows["start"] = _starts(rows["size_bytes"])
    return buffers, rows


def _proven(records: Sequence[Buffer], items: memoryview) -> tuple[int, int, bytes]:
    """Of a plain section: bytes of its records, its checksum, and what stands behind its records."""
    size, crcs = block_crcs(records)
    if size <= BLOCK_BYTES >= len(items):
        more = [zlib_ng.crc32(items)]
        crc = zlib_ng.crc32(items, *crcs)
    else:
        items_bytes, more = block_crcs([items])
        blocks = chain(block_sizes(size), block_sizes(items_bytes))
        crc = combined(zip([*crcs, *more], blocks, strict=True))
    rest = b"".join((items, struct.pack(f">{len(crcs) + len(more)}I", *crcs, *more)))
    if size + len(rest) > SECTION_BYTES_MAX:
        whole = size + len(rest)
        raise InvalidError(f"a section of {whole:,} bytes is larger than the format allows")
    return size, crc, rest


def build_packed_section(
    records: Buffer,
    items: Buffer,
    *,
    level: int = PACK_LEVEL,
    dictionary: bytes = b"",
    may_be_sparse: bool = False,
) -> Section | None:
    """A section whose records are compressed; None when that is not worth it. See ``build_section``."""
    view = memoryview(records).cast("B")
    packer = _packer(level, dictionary)
    stored: list[Buffer] = []
    for at in range(0, len(view), PACKED_BLOCK_BYTES):
        block = view[at : at + PACKED_BLOCK_BYTES]
        frame = packer.compress(block)
        stored.append(frame if len(frame) * _WORTH <= len(block) * (_WORTH - 1) else block)
    chunks: list[Buffer] = [*stored, *([dictionary] if dictionary else [])]
    listed, count, gone = _stored_items(items, may_be_sparse=may_be_sparse)
    cut = memoryview(listed).cast("B")
    chunks += [cut[at : at + BLOCK_BYTES] for at in range(0, len(cut), BLOCK_BYTES)]
    sizes = [memoryview(chunk).nbytes for chunk in chunks]
    table = np.empty(len(chunks), _PACKED_ENTRY)
    table["size"], table["crc"] = sizes, [zlib_ng.crc32(chunk) for chunk in chunks]
    stored_bytes = sum(sizes[: len(stored)])
    if (stored_bytes + len(dictionary)) * _WORTH > len(view) * (_WORTH - 1):
        return None
    crc = combined(zip(table["crc"].tolist(), sizes, strict=True))
    place = SectionPlace(0, len(view), stored_bytes, count, sum(sizes) + table.nbytes, crc, gone)
    return Section([*chunks, table.tobytes()], place)


def _packer(level: int, dictionary: bytes) -> zstandard.ZstdCompressor:
    if not dictionary:
        return zstandard.ZstdCompressor(level=level)
    known = zstandard.ZstdCompressionDict(dictionary)
    known.precompute_compress(level=level)
    return zstandard.ZstdCompressor(level=level, dict_data=known, write_dict_id=False)


@dataclass(frozen=True, slots=True)
class SectionTable:
    """The sections of a bundle, in columns."""

    topics: Sequence[str]  # names that the column ``topic`` counts
    rows: npt.NDArray[np.void]  # ``SECTION_ROW``, one a section, in the order in which they lie
    level: int = 0  # of the bundle

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def is_sparse(self) -> bool:
        """Some section is; compaction was here."""
        return any(self.rows[name].any() for name in SECTION_SPARSE.names or ())

    def place(self, number: int) -> SectionPlace:
        """Where a section lies."""
        row = self.rows[number]
        names = ("start", "records_bytes", "stored_bytes", "count", "size_bytes", "crc", "gone")
        return SectionPlace(*(int(row[name]) for name in names))


def pack_table(table: SectionTable) -> bytes:
    """The table as it stands in the bundle, and in the journal entry that names the bundle: one zstd frame."""
    names = [topic.encode("utf-8", "surrogateescape") for topic in table.topics]
    head = [struct.pack(">I", len(names) | (_SPARSE_TABLE if table.is_sparse else 0))]
    head += [struct.pack(">H", len(name)) + name for name in names]
    kind = SECTION_ROW if table.is_sparse else SECTION
    columns = [table.rows[name].tobytes() for name in kind.names or ()]
    packer = zstandard.ZstdCompressor(level=PACK_LEVEL, write_checksum=True)
    return packer.compress(b"".join([*head, *columns]))


def build_tail(table: SectionTable, packed: bytes) -> bytes:
    """What stands behind the sections, which lie one after another from position 0 on: their table and the footer."""
    size = int(table.rows["size_bytes"].sum())
    signed = _FOOTER.pack(
        *(size, len(packed), len(table), zlib_ng.crc32(packed)),
        *(FORMAT if table.is_sparse else 1, table.level, 0, MAGIC),
    )[:_SIGNED_BYTES]
    return packed + signed + zlib_ng.crc32(signed).to_bytes(4, "big") + MAGIC


# -- reading --------------------------------------------------------------------------------------


def tail_bytes(footer: Buffer, *, where: str) -> int:
    """How many bytes at a bundle's end are its table and footer, as its last ``FOOTER_BYTES`` (or more) say."""
    return _read_footer(memoryview(footer).cast("B"), where)[1] + FOOTER_BYTES


def _read_footer(tail: memoryview, where: str) -> tuple[int, int, int, int, int]:
    """(sections_bytes, table_bytes, sections, table_crc, level)."""
    footer = bytes(tail[-FOOTER_BYTES:])
    if len(footer) < FOOTER_BYTES or not footer.endswith(MAGIC):
        raise damaged("the object does not end in the footer of a bundle", where)
    size, table_bytes, count, table_crc, version, level, crc, _ = _FOOTER.unpack(footer)
    if zlib_ng.crc32(footer[:_SIGNED_BYTES]) != crc:
        raise damaged("the checksum of the footer is wrong", where)
    if version not in _FORMATS:
        raise OtherVersionError(
            f"a bundle of format version {version}, where 1 to {FORMAT} are known", where=where
        )
    return size, table_bytes, count, table_crc, level


def read_table(tail: Buffer, object_bytes: int, *, where: str) -> SectionTable:
    """What a bundle says of its sections; ``tail``: its last ``tail_bytes``, or more."""
    view = memoryview(tail).cast("B")
    size, table_bytes, count, table_crc, level = _read_footer(view, where)
    if size + table_bytes + FOOTER_BYTES != object_bytes or table_bytes + FOOTER_BYTES > len(view):
        raise damaged("the bundle is longer or shorter than it says", where)
    stored = view[len(view) - FOOTER_BYTES - table_bytes : len(view) - FOOTER_BYTES]
    if zlib_ng.crc32(stored) != table_crc:
        raise damaged("the checksum of the bundle's table is wrong", where)
    try:  # its bytes are proven
        table = unpack_table(stored, level, where=where)
    except DataError as error:
        raise OtherVersionError(error.what, where=where) from error
    if len(table) != count or int(table.rows["size_bytes"].sum(dtype=np.uint64)) != size:
        raise OtherVersionError("the bundle's table is longer or shorter than it says", where=where)
    if (table.rows["start"] != _starts(table.rows["size_bytes"])).any():
        raise OtherVersionError("the bundle's sections do not lie one after another", where=where)
    return table


def find_table(tail: Buffer, object_bytes: int, level: int, *, where: str) -> SectionTable:
    """Look for a bundle's table where the footer is damaged or gone; it is proven by the checksum of its frame."""
    data = bytes(memoryview(tail).cast("B"))
    at = data.rfind(_FRAME_MAGIC)
    for _ in range(_FRAMES_TRIED_MAX):
        if at < 0:
            break
        table = _proven_table(data[at:], level, where)
        if table is not None and _lies_behind(table, object_bytes - len(data) + at):
            return table
        at = data.rfind(_FRAME_MAGIC, 0, at)
    raise damaged("the bundle's table is damaged, and what lies in it can't be told", where)


def _proven_table(data: bytes, level: int, where: str) -> SectionTable | None:
    try:
        if not zstandard.get_frame_parameters(data).has_checksum:
            return None
        return unpack_table(data, level, where=where)
    except (zstandard.ZstdError, DataError):  # it may be any frame of ours, or of another version
        return None


def _lies_behind(table: SectionTable, position: int) -> bool:
    """Whether its sections lie one after another, from the bundle's beginning to the table."""
    sizes = table.rows["size_bytes"]
    is_whole = int(sizes.sum(dtype=np.uint64)) == position
    return is_whole and len(table) > 0 and bool((table.rows["start"] == _starts(sizes)).all())


def unpack_table(packed: Buffer, level: int = 0, *, where: str) -> SectionTable:
    """Undo ``pack_table``: of a whole bundle, or of those of its sections that an entry names."""
    table = _parse_table(_unpacked_table(memoryview(packed).cast("B"), where), level, where)
    rows = table.rows
    wrong = (rows["topic"] >= len(table.topics)) | (rows["holes"] > rows["count"])
    if (wrong | (rows["gone"] > rows["holes"])).any():
        raise damaged("the bundle's table contradicts itself", where)
    return table


def _starts(sizes: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    wide = sizes.astype(np.uint64)
    return np.cumsum(wide, dtype=np.uint64) - wide


def _unpacked_table(stored: memoryview, where: str) -> bytes:
    try:
        claimed = zstandard.frame_content_size(stored)
        credible = _TABLE_RATIO_MAX * stored.nbytes + _TABLE_SMALL_BYTES
        if not 0 <= claimed <= min(TABLE_BYTES_MAX, credible):
            raise damaged(f"the bundle's table claims to have {claimed:,} bytes", where)
        unpacker = zstandard.ZstdDecompressor(max_window_size=2 * TABLE_BYTES_MAX)
        return unpacker.decompress(stored, max_output_size=claimed)
    except zstandard.ZstdError as error:
        raise damaged(f"the bundle's table cannot be unpacked: {error}", where) from error


def _parse_table(data: bytes, level: int, where: str) -> SectionTable:
    at, topics, kind = 4, [], SECTION
    try:
        (many,) = struct.unpack_from(">I", data)
        kind = SECTION_ROW if many & _SPARSE_TABLE else SECTION
        for _ in range(many & ~_SPARSE_TABLE):
            size = struct.unpack_from(">H", data, at)[0]
            topics.append(data[at + 2 : at + 2 + size].decode("utf-8", "surrogateescape"))
            at += 2 + size
    except (struct.error, UnicodeDecodeError) as error:
        raise damaged(f"the topics of the bundle's table are none: {error}", where) from error
    count, odd = divmod(len(data) - at, kind.itemsize)
    if odd or count < 0:
        raise damaged("the bundle's table is cut short", where)
    rows = np.zeros(count, SECTION_ROW)
    for name in kind.names or ():
        column = kind[name]
        rows[name] = np.frombuffer(data, column, count, at)
        at += column.itemsize * count
    return SectionTable(topics, rows, level)


@dataclass(frozen=True, slots=True)
class SectionBlocks:
    """A section's block table, proven: what ranges of it are read and checked by."""

    place: SectionPlace
    starts: npt.NDArray[np.int64]
    """Position in the section of each block, records, then dictionary, then items; last the table's own."""
    crcs: npt.NDArray[np.uint32]  # CRC-32 of each, as stored

    @classmethod
    def parse(cls, data: Buffer, place: SectionPlace, *, where: str) -> SectionBlocks:
        """Read the block table, and prove it by the section's checksum; ``data``: from ``place.table_at`` on."""
        place.check(where=where)
        view = memoryview(data).cast("B")
        if len(view) != place.size_bytes - place.table_at:
            raise damaged("a section's block table is cut short", where)
        if place.is_packed:
            rows = np.frombuffer(view, _PACKED_ENTRY)
            sizes, crcs = rows["size"].astype(np.int64), rows["crc"].astype(np.uint32)
        else:
            crcs = np.frombuffer(view, _CRC).astype(np.uint32)
            cut = chain(block_sizes(place.records_bytes), block_sizes(place.stored_items_bytes))
            sizes = np.fromiter(cut, np.int64)
        starts = np.fromiter(accumulate(sizes.tolist(), initial=0), np.int64, len(sizes) + 1)
        whole = combined(zip(crcs.tolist(), sizes.tolist(), strict=True))
        if int(starts[-1]) != place.table_at or whole != place.crc:
            raise damaged("a section's block table fails its checksum", where)
        return cls(place, starts, crcs)

    @classmethod
    def walked(cls, data: Buffer, place: SectionPlace, *, where: str) -> SectionBlocks:
        """Find the blocks of a section, proven up to ``place.table_at`` (``check_section``), without the block table."""
        place.check(where=where)
        view = memoryview(data).cast("B")[: place.table_at]
        sizes = _walk(view[: place.stored_bytes], place, where)
        if place.dictionary_bytes:
            sizes.append(place.dictionary_bytes)
        sizes += block_sizes(place.stored_items_bytes)
        ends = np.cumsum(sizes, dtype=np.int64)
        starts = np.concatenate((np.zeros(1, np.int64), ends))
        pairs = zip(starts.tolist(), ends.tolist(), strict=False)
        crcs = np.fromiter((zlib_ng.crc32(view[low:high]) for low, high in pairs), np.uint32)
        return cls(place, starts, crcs)

    def records_range(self, start: int, end: int) -> tuple[int, int]:
        """Where the blocks are stored that hold records' bytes ``[start, end)``: positions in the section."""
        block = self.place.block_bytes
        first, stop = start // block, _blocks(end, block)
        return int(self.starts[first]), int(self.starts[stop])

    def check(self, data: Buffer, start: int, *, where: str) -> None:
        """Check whole blocks that were read from a position of the section; DataError says which bytes fail."""
        for low, high in self.faults(data, start):
            at = self.place.start
            raise damaged(f"bytes [{at + low}, {at + high}) fail their checksum", where)

    def faults(self, data: Buffer, start: int = 0) -> Iterator[tuple[int, int]]:
        """Positions of those of whole blocks, read from ``start``, that fail their checksums, or are cut short."""
        view = memoryview(data).cast("B")
        first = int(np.searchsorted(self.starts, start))
        end = min(start + len(view), self.place.table_at)
        stop = int(np.searchsorted(self.starts, end))
        starts, crcs = self.starts[first : stop + 1].tolist(), self.crcs[first:stop].tolist()
        sizes = [high - low for low, high in pairwise(starts)]
        # At once, as what their checksums combine to: each call by itself would give the interpreter's lock away.
        if starts[-1] == end and zlib_ng.crc32(view[: end - start]) == combined(
            zip(crcs, sizes, strict=True)
        ):
            return
        for (low, high), crc in zip(pairwise(starts), crcs, strict=True):
            if zlib_ng.crc32(view[low - start : high - start]) != crc:
                yield low, high


def _walk(stored: memoryview, place: SectionPlace, where: str) -> list[int]:
    """Sizes of the blocks of a section's records as stored: each a zstd frame of exactly its block, or the block itself."""
    if not place.is_packed:
        return list(block_sizes(place.records_bytes))
    sizes: list[int] = []
    at = 0
    for low in range(0, place.records_bytes, PACKED_BLOCK_BYTES):
        block = min(PACKED_BLOCK_BYTES, place.records_bytes - low)
        size = _frame_bytes(stored[at : at + block], block)
        sizes.append(size or block)
        at += sizes[-1]
    if at != place.stored_bytes:
        raise damaged("the blocks of a section are not found without its block table", where)
    return sizes


def _frame_bytes(data: memoryview, block: int) -> int:
    """Size of the zstd frame of one whole block that the data begin with; 0 when they begin with none.

    By the headers of the frame (RFC 8878, 3.1.1): nothing is unpacked.
    """
    try:
        head = zstandard.get_frame_parameters(data)
        at = zstandard.frame_header_size(data)
    except zstandard.ZstdError:
        return 0
    if head.content_size != block:
        return 0
    is_last = False
    while not is_last:
        if at + _FRAME_BLOCK_HEAD_BYTES > len(data):
            return 0
        said = int.from_bytes(data[at : at + _FRAME_BLOCK_HEAD_BYTES], "little")
        is_last, kind, size = bool(said & 1), said >> 1 & 3, said >> 3
        at += _FRAME_BLOCK_HEAD_BYTES + (1 if kind == _FRAME_BLOCK_OF_ONE_BYTE else size)
    at += 4 if head.has_checksum else 0
    return at if at <= len(data) else 0


class RecordsUnpacker:
    """Unpacks blocks of a packed section's records. For one thread."""

    def __init__(self, blocks: SectionBlocks, dictionary: Buffer, *, where: str) -> None:
        """Take in the dictionary, which was checked and may be empty."""
        self._blocks = blocks
        self._where = where
        known = memoryview(dictionary).tobytes()
        try:
            self._frames = zstandard.ZstdDecompressor(
                dict_data=zstandard.ZstdCompressionDict(known) if known else None,
                max_window_size=_WINDOW_BYTES_MAX,
            )
        except (zstandard.ZstdError, MemoryError) as error:
            raise damaged(f"the dictionary of a section is none: {error}", where) from error

    def unpack(self, stored: Buffer, start: int, end: int) -> memoryview:
        """Records' bytes of whole blocks: those at ``[start, end)`` of the records."""
        view, room = memoryview(stored).cast("B"), np.empty(end - start, np.uint8).data
        starts, at = self._blocks.starts, 0
        for low in range(start, end, PACKED_BLOCK_BYTES):
            number = low // PACKED_BLOCK_BYTES
            size = int(starts[number + 1] - starts[number])
            block = room[low - start : low - start + PACKED_BLOCK_BYTES]
            self._fill(block, view[at : at + size], low)
            at += size
        return room

    def _fill(self, block: memoryview, stored: memoryview, low: int) -> None:
        """A frame is unpacked straight to its place, and only if it says that it fits exactly: it takes no other memory."""
        if len(stored) == len(block):
            block[:] = stored
            return
        try:
            if zstandard.frame_content_size(stored) == len(block):
                with self._frames.stream_reader(stored) as reader:
                    if reader.readinto(block) == len(block):
                        return
            fault = "the frame is not of that size"
        except (zstandard.ZstdError, MemoryError) as error:
            fault = str(error)
        raise damaged(
            f"records' bytes [{low}, {low + len(block)}) of the section at {self._blocks.place.start}"
            f" cannot be unpacked: {fault}",
            self._where,
        )


def check_section(data: Buffer, place: SectionPlace, *, where: str) -> None:
    """Prove a section that was read whole, up to the block table at least, by the checksum that the journal has of it."""
    view = memoryview(data).cast("B")
    if len(view) < place.table_at or zlib_ng.crc32(view[: place.table_at]) != place.crc:
        low = place.start
        raise damaged(f"bytes [{low}, {low + place.table_at}) fail their checksum", where)


# -- dictionaries ----------------------------------------------------------------------------------
#
# Dictionaries for packed sections: what the blocks of a topic's records have in common, trained from some of
# them.
#
# With one, blocks of 128 KiB shrink better than much larger ones do without. Pure, and the same for the same
# bytes.

DICTIONARY_BYTES: Final = 32 * 1024
"""Larger ones gain less than they take in the section."""
TRAIN_BYTES_MIN: Final = 512 * 1024
"""Of fewer bytes no dictionary is trained."""
_SAMPLE_BYTES: Final = 2048
_SAMPLES: Final = 40 * DICTIONARY_BYTES // _SAMPLE_BYTES
_TRIALS: Final = 4
_STEPS: Final = 4


def train(payload: Buffer, *, level: int = PACK_LEVEL, size_bytes: int = DICTIONARY_BYTES) -> bytes:
    """A dictionary for these bytes and their like, by samples from all over them; a sixth of a second.

    Nothing when the payload is too small, or has nothing in common with itself.
    """
    view = memoryview(payload).cast("B")
    if len(view) < TRAIN_BYTES_MIN:
        return b""
    step = max(len(view) // _SAMPLES, _SAMPLE_BYTES)
    starts = range(0, len(view) - _SAMPLE_BYTES + 1, step)
    samples: list[bytes | bytearray | memoryview] = [
        bytes(view[start : start + _SAMPLE_BYTES]) for start in starts
    ]
    try:
        found = zstandard.train_dictionary(size_bytes, samples, steps=_STEPS, level=level)
    except zstandard.ZstdError:
        return b""
    return found.as_bytes()


def pays(dictionary: bytes, payload: Buffer, *, level: int = PACK_LEVEL) -> bool:
    """Whether a section of these records is smaller with the dictionary in it, by a few of its blocks."""
    view = memoryview(payload).cast("B")
    if not dictionary or not len(view):
        return False
    known = zstandard.ZstdCompressionDict(dictionary)
    plain = zstandard.ZstdCompressor(level=level)
    helped = zstandard.ZstdCompressor(level=level, dict_data=known, write_dict_id=False)
    step = max(len(view) // _TRIALS, 1)
    blocks = [view[start : start + PACKED_BLOCK_BYTES] for start in range(0, len(view), step)][
        :_TRIALS
    ]
    gain = sum(len(plain.compress(block)) - len(helped.compress(block)) for block in blocks)
    return gain * len(view) > len(dictionary) * sum(map(len, blocks))
