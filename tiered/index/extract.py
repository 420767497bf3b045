"""From records to index items: every key of every message, with NumPy over a whole batch.

A message has the keys of its ``KEYS`` property (separated by blanks) and its ``UNIQ_KEY``. The search may find more than
``parse_properties`` would (of a name that comes twice both values, say), never less: what is found too much costs an item,
since a lookup checks the key on the message itself.

How: the properties of all records are gathered into rows of a few widths (no Python per record), each row as wide as its
own properties or up to 15 bytes more to the left, where the end of the topic stands. Where all rows have the same names and
separators in the same places, as one producer's have, the first one tells where the keys are; else one pass finds the
separators, and names are compared before each 0x01, as words.

Records that hold inner batches are taken one by one: keys are those of their inner messages.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from tiered.errors import DataError
from tiered.format.block import RecordBlock, bytes_at, parse_records
from tiered.format.properties import KEYS, UNIQ_KEY, split_keys
from tiered.format.record import RecordError, decode_record
from tiered.format.sysflag import INNER_BATCH

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Buffer

    from tiered.local.interface import RecordBatch


# -- hashing ------------------------------------------------------------------------------------

SIZE_MULTIPLIER: Final = 0x9E37_79B9_7F4A_7C15
WORD_MULTIPLIER: Final = 0xBF58_476D_1CE4_E5B9
END_MULTIPLIER: Final = 0x94D0_49BB_1331_11EB
WORD: Final = 8
_MASK: Final = 2**64 - 1
_ENDS: Final = np.array([_MASK] + [2 ** (8 * n) - 1 for n in range(1, WORD)], np.uint64)
"""Which bits of the last word belong to the text, by its size mod 8."""

Hashes = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]


def hash_bytes(text: bytes, seed: int = 0) -> int:
    """The 64-bit hash of one text.

    It is hashed as its UTF-8 bytes, 8 at a time (little-endian words, the last one filled up with zeros)::

        h = seed ^ (size * SIZE_MULTIPLIER)
        for each word:  h = (h ^ word) * WORD_MULTIPLIER;  h ^= h >> 32
        h = (h ^ h >> 29) * END_MULTIPLIER;  h ^= h >> 32            all mod 2^64

    The topic's hash, with the seed 0, is the seed of the key's. Words instead of single characters, as Java's ``hashCode``
    has them, make it an eighth of the work; and 64 bits tell keys apart before any message is read. It is no cryptographic
    hash: who chooses keys that collide makes lookups of those keys slow, and never wrong, since the key is checked on the
    message.
    """
    value = _absorb_one(seed ^ (len(text) * SIZE_MULTIPLIER & _MASK), text)
    value = (value ^ value >> 29) * END_MULTIPLIER & _MASK
    return value ^ value >> 32


@functools.lru_cache(maxsize=4096)
def topic_seed(topic: str) -> int:
    """What hashes of a topic's keys begin with."""
    return hash_bytes(topic.encode("utf-8", "surrogateescape"))


def key_hash(topic: str, key: str) -> int:
    """The hash of one key of a topic."""
    return hash_bytes(key.encode("utf-8", "surrogateescape"), topic_seed(topic))


def hash_many(buffer: Buffer, starts: Indices, sizes: Indices, seed: int | Hashes) -> Hashes:
    """The hashes of many texts that lie in one buffer.

    Args:
        buffer: Holds them, and at least 7 more bytes behind the last.
        starts: int64[n], where each begins.
        sizes: int64[n], in bytes.
        seed: Of the topic; or that of each text.
    """
    found = sizes.astype(np.uint64)
    found *= np.uint64(SIZE_MULTIPLIER)
    found ^= np.uint64(seed) if isinstance(seed, int) else seed
    if len(sizes):
        words, long = bytes_at(buffer, "<u8"), np.flatnonzero(sizes > _LONG_BYTES)
        if (
            0 < len(long) < _LONG_TOGETHER
        ):  # a round over all words of so few costs more than plain code
            short = np.flatnonzero(sizes <= _LONG_BYTES)
            some = found[short]
            if len(short):
                _absorb(some, words, starts[short], sizes[short])
            found[short] = some
            for at in long.tolist():
                text = bytes(
                    memoryview(buffer).cast("B")[int(starts[at]) : int(starts[at] + sizes[at])]
                )
                found[at] = _absorb_one(int(found[at]), text)
        else:
            _absorb(found, words, starts, sizes)
    found ^= found >> np.uint64(29)
    found *= np.uint64(END_MULTIPLIER)
    found ^= found >> np.uint64(32)
    return found


def _absorb_one(value: int, text: bytes) -> int:
    """Take in the words of one text."""
    for start in range(0, len(text), WORD):
        value = (value ^ int.from_bytes(text[start : start + WORD], "little")) * WORD_MULTIPLIER
        value &= _MASK
        value ^= value >> 32
    return value


def _absorb(found: Hashes, words: npt.NDArray[np.uint64], starts: Indices, sizes: Indices) -> None:
    """Take in word after word; only texts that have one take part."""
    full, longest = int(sizes.min()) // WORD, int(sizes.max())
    for number in range(full):
        found ^= words[starts + WORD * number]
        found *= np.uint64(WORD_MULTIPLIER)
        found ^= found >> np.uint64(32)
    where = np.arange(len(sizes))
    for begun in range(full * WORD, longest, WORD):
        where = where[sizes[where] > begun]
        left = sizes[where] - begun
        word = words[starts[where] + begun]
        word &= _ENDS[np.where(left < WORD, left, 0)]
        some = found[where]
        some ^= word
        some *= np.uint64(WORD_MULTIPLIER)
        some ^= some >> np.uint64(32)
        found[where] = some


# -- extract -----------------------------------------------------------------------------------------


PIECE_RECORDS: Final = 8192
"""Records taken at once, so that what is worked on stays in the processor's cache."""
_COPIED_BYTES: Final = 16 * 1024
"""Of batches that are taken together: larger ones, on average, are not copied whole, but record by record."""
_UNIQUE: Final = int.from_bytes(b"UNIQ_KEY", "big")
_KEYS: Final = int.from_bytes(b"\x02KEYS", "big")
_FIVE: Final = 2**40 - 1
_STEP: Final = 16
_CLASSES_MAX: Final = 8
"""Sizes of properties that are taken each by itself; of more sizes several are taken together."""
_CLASS_MIN: Final = 16
"""Fewer records of one width are taken with those of others, one behind another."""
_LONG_BYTES: Final = 512
_LONG_TOGETHER: Final = 32
_LEAD: Final = 16
"""Bytes before the first row, so that the word before any place can be read."""

Spans = tuple[Indices, Indices]


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of some messages: one element a key in each array, in no particular order."""

    hashes: Hashes  # uint64[n], see ``tiered.index.extract``
    queue_offsets: Indices  # int64[n], of the message
    positions: Indices
    """int64[n], of its record in the batch's data (``shifted``: in the tiered commit log)."""
    sizes: npt.NDArray[np.int32]  # int32[n], of its record
    store_ms: Indices  # int64[n], store time

    def __len__(self) -> int:
        """Number of keys."""
        return len(self.hashes)

    def between(self, low: int, high: int) -> Keys:
        """Those from one number to another, as views."""
        return Keys(
            self.hashes[low:high],
            self.queue_offsets[low:high],
            self.positions[low:high],
            self.sizes[low:high],
            self.store_ms[low:high],
        )

    @property
    def memory_bytes(self) -> int:
        """What it holds."""
        arrays = self.hashes, self.queue_offsets, self.positions, self.sizes, self.store_ms
        return sum(array.nbytes for array in arrays)


def shifted(keys: Keys, log_offset: int) -> Keys:
    """Keys whose positions are log offsets; ``log_offset``: of the first byte of the batch's data."""
    return replace(keys, positions=keys.positions + log_offset)


@dataclass(frozen=True, slots=True)
class _Records:
    """Records that are messages of their own, of any queues: one element a record in each array."""

    buffer: Buffer  # holds them
    ends: Indices  # int64[n], where in ``buffer`` each ends
    positions: Indices  # int64[n], where it begins in the data of its batch
    sizes: npt.NDArray[np.int32]  # int32[n]
    properties_sizes: npt.NDArray[np.int32]  # int32[n]
    store_ms: Indices  # int64[n]
    offsets: Indices  # int64[n], queue offsets
    seeds: Hashes | int  # of the hashes of each record's keys; one for all


def extract_keys(batch: RecordBatch, seed: int) -> Iterator[Keys]:
    """The keys of a batch, some thousand records at a time; holes have none.

    Args:
        seed: ``topic_seed`` of its topic.
    """
    if batch.properties_sizes is not None:
        for begin in range(0, batch.count, PIECE_RECORDS):
            yield from (keys for keys, _ in _plain(_known(batch, begin, seed)))
        return
    real = np.flatnonzero(batch.sizes > 0)
    for begin in range(0, len(real), PIECE_RECORDS):
        where = real[begin : begin + PIECE_RECORDS]
        block = parse_records(batch.data, batch.positions[where], batch.sizes[where])
        if not block.is_sound:
            raise DataError("a record is damaged", where=str(batch.queue))
        offsets = where + batch.base_offset
        is_inner = (block.sys_flags & INNER_BATCH) != 0
        plain = np.flatnonzero(~is_inner)
        yield from (keys for keys, _ in _plain(_parsed(block, plain, offsets, seed)))
        if len(plain) < len(where):
            yield from _inner(block, np.flatnonzero(is_inner), offsets, seed)


def extract_all(batches: Sequence[RecordBatch]) -> list[list[Keys]]:
    """The keys of many batches, those of each as of ``extract_keys``.

    What a call costs goes by the records, not by the batches: small ones are taken together.
    """
    found: list[list[Keys]] = [[] for _ in batches]
    small: list[int] = []
    count = 0
    for number, batch in enumerate(batches):
        if batch.properties_sizes is None or batch.count > PIECE_RECORDS or len(batches) == 1:
            seed = topic_seed(batch.queue.topic)
            found[number] = [keys for keys in extract_keys(batch, seed) if len(keys)]
            continue
        small.append(number)
        count += batch.count
        if count >= PIECE_RECORDS:
            _take_together(batches, small, found)
            small, count = [], 0
    if small:
        _take_together(batches, small, found)
    return found


def _take_together(
    batches: Sequence[RecordBatch], numbers: Sequence[int], found: list[list[Keys]]
) -> None:
    """Extract the keys of some batches at once, and divide them."""
    some = [batches[number] for number in numbers]
    counts = np.array([batch.count for batch in some])
    ends = np.cumsum(counts)
    first_offsets = np.array([batch.base_offset for batch in some]) - (ends - counts)
    seeds = [topic_seed(batch.queue.topic) for batch in some]
    positions = np.concatenate([batch.positions for batch in some])
    sizes = np.concatenate([batch.sizes for batch in some])
    properties = np.concatenate(
        [batch.properties_sizes for batch in some if batch.properties_sizes is not None]
    )
    records = _Records(
        *_together(some, counts, positions + sizes, int(_width(properties).max())),
        positions,
        sizes,
        properties,
        np.concatenate([batch.store_timestamps_ms for batch in some]),
        np.arange(int(ends[-1])) + np.repeat(first_offsets, counts),
        np.repeat(np.array(seeds, np.uint64), counts),
    )
    pieces = list(_plain(records))
    if not pieces:
        return
    of = np.searchsorted(ends, np.concatenate([rows for _, rows in pieces]), side="right")
    order = np.argsort(of, kind="stable")
    of = of[order]
    columns = [
        np.concatenate([getattr(keys, name) for keys, _ in pieces])[order]
        for name in Keys.__slots__
    ]
    every = Keys(*columns)
    borders = np.searchsorted(of, np.arange(len(some) + 1)).tolist()
    for number, (low, high) in zip(numbers, pairwise(borders), strict=True):
        if low < high:
            found[number] = [every.between(low, high)]


def _together(
    some: Sequence[RecordBatch], counts: Indices, ends: Indices, width: int
) -> tuple[Buffer, Indices]:
    """A buffer with all records, or with the last ``width`` bytes of each, and where each ends there.

    What is wanted of a record is at its end, and a copy of large records would cost more than all else. Of small ones, a
    few of each batch, the copy costs less than a call for each batch.
    """
    data_ends = np.cumsum([memoryview(one.data).nbytes for one in some])
    if data_ends[-1] < _COPIED_BYTES * len(some) or min(one.sizes.min() for one in some) < width:
        bases = np.concatenate(([0], data_ends[:-1]))
        return b"".join(batch.data for batch in some), ends + np.repeat(bases, counts)
    tails = np.empty(len(ends), f"V{width}")
    low = 0
    for batch in some:
        high = low + batch.count
        tails[low:high] = bytes_at(batch.data, f"V{width}")[ends[low:high] - width]
        low = high
    return tails.view(np.uint8).data, np.arange(1, len(ends) + 1) * width


def _known(batch: RecordBatch, begin: int, seed: int) -> _Records:
    """Some records of a batch whose properties' sizes are known."""
    assert batch.properties_sizes is not None
    where = slice(begin, begin + PIECE_RECORDS)
    offsets = np.arange(begin, min(begin + PIECE_RECORDS, batch.count)) + batch.base_offset
    return _Records(
        batch.data,
        batch.positions[where] + batch.sizes[where],
        batch.positions[where],
        batch.sizes[where],
        batch.properties_sizes[where],
        batch.store_timestamps_ms[where],
        offsets,
        seed,
    )


def _parsed(block: RecordBlock, chosen: Indices, offsets: Indices, seed: int) -> _Records:
    return _Records(
        block.buffer,
        block.positions[chosen] + block.sizes[chosen],
        block.positions[chosen],
        block.sizes[chosen],
        block.properties_sizes[chosen],
        block.store_timestamps_ms[chosen],
        offsets[chosen],
        seed,
    )


def _plain(records: _Records) -> Iterator[tuple[Keys, Indices]]:
    """The keys, some at a time, and of which record each is."""
    sizes = records.properties_sizes
    distinct = np.flatnonzero(np.bincount(sizes))
    is_exact = len(distinct) <= _CLASSES_MAX
    classes = sizes if is_exact else _width(sizes)
    counts = np.bincount(classes)
    for number in np.flatnonzero(counts >= (1 if is_exact else _CLASS_MIN)).tolist():
        members = np.flatnonzero(classes == number)
        width = int(_width(sizes[members[:1]])[0])
        yield _found(records, members, *_row_keys(records, members, width))
    if not is_exact:
        few = np.flatnonzero((counts < _CLASS_MIN)[classes] & (sizes > 0))
        if len(few):
            yield _found(records, few, *_ragged_keys(records, few))


def _found(
    records: _Records, members: Indices, rows: Indices, hashes: Hashes
) -> tuple[Keys, Indices]:
    """The keys that were found in some records: of which of ``members`` each is, and its hash."""
    at = members[rows]
    return (
        Keys(
            hashes,
            records.offsets[at],
            records.positions[at],
            records.sizes[at],
            records.store_ms[at],
        ),
        at,
    )


def _width(sizes: npt.NDArray[np.int32]) -> Indices:
    """Of the row for each size: one more, rounded up. It never exceeds the record, which has 91 bytes besides."""
    wide = sizes.astype(np.int64) + 1
    return -(-wide // _STEP) * _STEP


def _row_keys(records: _Records, members: Indices, width: int) -> tuple[Indices, Hashes]:
    """For each key found in the members' properties the member's number, and the hash."""
    text = _rows(records, members, width)
    rows = text[_LEAD : len(text) - _LEAD].reshape(len(members), width)
    unique, keys = _places(text, rows) if _alike(text, rows) else _search(text)
    found, hashes = [], []
    for starts, sizes in (unique, _tokens(text, *keys)):  # unique ids have one size, as a rule
        numbers = (starts - _LEAD) // width
        seeds = records.seeds if isinstance(records.seeds, int) else records.seeds[members[numbers]]
        hashes.append(hash_many(text.data, starts, sizes, seeds))
        found.append(numbers)
    return np.concatenate(found), np.concatenate(hashes)


def _ragged_keys(records: _Records, members: Indices) -> tuple[Indices, Hashes]:
    """As ``_row_keys``, of records whose properties are of many sizes: one behind another, so that none is padded."""
    sizes = records.properties_sizes[members].astype(np.int64)
    ends = records.ends[members]
    view = memoryview(records.buffer).cast("B")
    pieces = map(view.__getitem__, map(slice, (ends - sizes).tolist(), ends.tolist()))
    edge = bytes([2]) * _LEAD
    text = np.frombuffer(edge + b"\x02".join(pieces) + edge, np.uint8)
    firsts = _LEAD + (sizes + 1).cumsum() - (sizes + 1)
    unique, keys = _search(text)
    found, hashes = [], []
    for starts, lengths in (unique, _tokens(text, *keys)):
        numbers = np.searchsorted(firsts, starts, side="right") - 1
        seeds = records.seeds if isinstance(records.seeds, int) else records.seeds[members[numbers]]
        hashes.append(hash_many(text.data, starts, lengths, seeds))
        found.append(numbers)
    return np.concatenate(found), np.concatenate(hashes)


def _alike(text: npt.NDArray[np.uint8], rows: npt.NDArray[np.uint8]) -> bool:
    """Whether all rows have separators where the first one has them, and the same names before them.

    A producer's messages are alike as a rule, and then nothing has to be searched for.
    """
    kinds = np.minimum(rows, 3).view(np.uint64)
    if np.bitwise_or.reduce(kinds ^ kinds[0], axis=None):
        return False
    words, (count, width) = bytes_at(text.data, "<u8"), rows.shape
    ends = np.flatnonzero(rows[0] < 3).tolist()  # noqa: PLR2004 (as in _search)
    for start, end in pairwise(ends):
        if (
            rows[0, end] == 1
        ):  # the last bytes of the name, and the separator before it if there is room
            names = words[_LEAD + end - 8 :: width][:count] ^ words[_LEAD + end - 8]
            if (names >> np.uint64(8 * max(0, 8 - (end - start)))).any():
                return False
    return True


def _search(text: npt.NDArray[np.uint8]) -> tuple[Spans, Spans]:
    """Starts and sizes of all values of ``UNIQ_KEY``, and of ``KEYS``."""
    ends = np.flatnonzero(text < 3)  # noqa: PLR2004 (separators are 1 and 2; a 0 is none, and rare)
    kinds = text[ends]
    firsts = np.flatnonzero(kinds == 1)
    before = bytes_at(text.data, ">u8")[ends[firsts] - 8]
    is_unique = before == np.uint64(_UNIQUE)
    is_keys = (before & np.uint64(_FIVE)) == np.uint64(_KEYS)
    return _values(ends, kinds, firsts, is_unique), _values(ends, kinds, firsts, is_keys)


def _places(text: npt.NDArray[np.uint8], rows: npt.NDArray[np.uint8]) -> tuple[Spans, Spans]:
    """As ``_search``, where all rows are alike: what is found in the first is where it is in all."""
    count, width = rows.shape
    first = np.concatenate((text[:_LEAD], rows[0], text[:_LEAD]))
    steps = np.arange(count) * width
    found: list[Spans] = []
    for starts, sizes in _search(first):
        kept = starts < _LEAD + width
        at = (steps[:, None] + starts[kept]).ravel()
        found.append((at, np.tile(sizes[kept], count)))
    return found[0], found[1]


def _rows(records: _Records, members: Indices, width: int) -> npt.NDArray[np.uint8]:
    """The last ``width`` bytes of each record, one after another; 0x02 stands before and behind its properties."""
    starts = records.ends[members] - width
    text = np.empty(_LEAD + width * len(members) + _LEAD, np.uint8)
    text[:_LEAD] = text[len(text) - _LEAD :] = 2
    rows = text[_LEAD : len(text) - _LEAD].reshape(len(members), width)
    rows.view(f"V{width}")[:, 0] = bytes_at(records.buffer, f"V{width}")[starts]
    sizes = records.properties_sizes[members]
    if (sizes == sizes[0]).all():
        rows[:, : width - int(sizes[0])] = 2
    else:
        text[_LEAD + np.arange(len(members)) * width + (width - sizes) - 1] = 2
        rows[:, 0] = 2  # ends the last value of the row before
    return text


def _values(
    ends: Indices, kinds: npt.NDArray[np.uint8], firsts: Indices, chosen: npt.NDArray[np.bool_]
) -> tuple[Indices, Indices]:
    """Starts and sizes of the values behind the chosen separators; empty ones are left out."""
    mine = firsts[chosen]
    starts = ends[mine] + 1
    following = mine + 1
    odd = np.flatnonzero(kinds[following] != 2)  # noqa: PLR2004 (a value that holds 0x01)
    if len(odd):
        seconds = np.flatnonzero(kinds == 2)  # noqa: PLR2004
        following[odd] = seconds[np.searchsorted(seconds, mine[odd])]
    sizes = ends[following] - starts
    kept = sizes > 0
    return (starts, sizes) if kept.all() else (starts[kept], sizes[kept])


def _tokens(
    text: npt.NDArray[np.uint8], starts: Indices, sizes: Indices
) -> tuple[Indices, Indices]:
    """What the values are made of, divided at blanks."""
    blanks = np.flatnonzero(text == ord(" "))
    low = np.searchsorted(blanks, starts)
    counts = np.searchsorted(blanks, starts + sizes) - low
    if not counts.any():
        return starts, sizes
    pieces = counts + 1
    of = np.repeat(np.arange(len(starts)), pieces)
    number = np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    padded = np.append(blanks, 0)
    begins = np.where(number == 0, starts[of], padded[low[of] + number - 1] + 1)
    last = number == counts[of]
    stops = np.where(last, (starts + sizes)[of], padded[np.minimum(low[of] + number, len(blanks))])
    lengths = stops - begins
    kept = lengths > 0
    return begins[kept], lengths[kept]


def _inner(block: RecordBlock, chosen: Indices, offsets: Indices, seed: int) -> Iterator[Keys]:
    """Of inner batches. The items of one batch share a record, which is looked into once."""
    wanted: dict[int, list[int]] = {}
    for at in chosen.tolist():
        wanted.setdefault(int(block.positions[at]), []).append(at)
    for position, items in wanted.items():
        asked = {int(offsets[at]) for at in items}
        found = [
            (hash_bytes(key.encode("utf-8", "surrogateescape"), seed), offset)
            for offset, key in _inner_keys(block, position)
            if offset in asked
        ]
        count = len(found)
        yield Keys(
            np.array([value for value, _ in found], np.uint64),
            np.array([offset for _, offset in found], np.int64),
            np.full(count, position, np.int64),
            np.full(count, block.sizes[items[0]], np.int32),
            np.full(count, block.store_timestamps_ms[items[0]], np.int64),
        )


def _inner_keys(block: RecordBlock, position: int) -> Iterator[tuple[int, str]]:
    from tiered.format.message_forms import split_batch  # noqa: PLC0415 (start-up loads only what is needed)

    try:
        messages = split_batch(decode_record(block.buffer, position, check_crc=False))
    except (RecordError, DataError):
        return  # nobody can read these messages, so nobody misses their keys
    for message in messages:
        found = message.properties
        for key in (*split_keys(found.get(KEYS)), found.get(UNIQ_KEY)):
            if key:
                yield message.queue_offset, key
