"""From records to index items: every key of every message, with NumPy over a whole batch.

A message has the keys of its ``KEYS`` property (separated by blanks) and its ``UNIQ_KEY``
(``tiered.format.property_columns``).

Records that hold inner batches are taken one by one: keys are those of their inner messages. Of Kafka's records the key is
the key, of JoyQueue's messages the business id, unless that is empty.
"""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from backends.lazy_dataclass import dataclass
from tiered.errors import DataError
from tiered.format.block import RecordBlock, bytes_at, parse_records
from tiered.format.object import ITEM, ITEM_BYTES, Items
from tiered.format.properties import KEYS, UNIQ_KEY, split_keys
from tiered.format.property_columns import PropertyColumns
from tiered.format.record import RecordError, decode_record
from tiered.format.record_kind import RecordKind
from tiered.format.sysflag import INNER_BATCH
from tiered.log.lineage import hidden
from tiered.log.messages import foreign_messages, kafka_records

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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
    long = np.flatnonzero(sizes > _LONG_BYTES)
    if (
        0 < len(long) < _LONG_TOGETHER
    ):  # a round over all words of so few costs more than plain code
        short = np.flatnonzero(sizes <= _LONG_BYTES)
        found[short] = _absorbed(found[short], buffer, starts[short], sizes[short])
        view = memoryview(buffer).cast("B")
        for at in long.tolist():
            text = bytes(view[int(starts[at]) : int(starts[at] + sizes[at])])
            found[at] = _absorb_one(int(found[at]), text)
    else:
        found = _absorbed(found, buffer, starts, sizes)
    found ^= found >> np.uint64(29)
    found *= np.uint64(END_MULTIPLIER)
    found ^= found >> np.uint64(32)
    return found


def _absorb_one(value: int, text: bytes) -> int:
    for start in range(0, len(text), WORD):
        value = (value ^ int.from_bytes(text[start : start + WORD], "little")) * WORD_MULTIPLIER
        value &= _MASK
        value ^= value >> 32
    return value


def _absorbed(found: Hashes, buffer: Buffer, starts: Indices, sizes: Indices) -> Hashes:
    """Take in word after word; only texts that have one take part."""
    if not len(sizes):
        return found
    shortest, longest = int(sizes.min()), int(sizes.max())
    word_at = _words_of(buffer, starts)
    full = shortest // WORD * WORD
    for begun in range(0, full, WORD):
        _take_in(found, word_at(begun))
    if shortest == longest > full:
        _take_in(found, word_at(full) & _ENDS[longest - full])
        return found
    where = np.arange(len(sizes))
    for begun in range(full, longest, WORD):
        where = where[sizes[where] > begun]
        left = sizes[where] - begun
        word = bytes_at(buffer, "<u8")[starts[where] + begun]
        some = found[where]
        _take_in(some, word & _ENDS[np.where(left < WORD, left, 0)])
        found[where] = some
    return found


def _words_of(buffer: Buffer, starts: Indices) -> Callable[[int], Hashes]:
    """Gives a word of each text, by how far behind its start it is: without a copy where texts are evenly spaced."""
    step = int(starts[1] - starts[0]) if len(starts) > 1 else 0
    if step > 0 and (np.diff(starts) == step).all():
        view, first = memoryview(buffer), int(starts[0])
        return lambda at: np.ndarray(len(starts), "<u8", view, first + at, (step,))
    words = bytes_at(buffer, "<u8")
    return lambda at: words[starts + at]


def _take_in(found: Hashes, word: Hashes) -> None:
    found ^= word
    found *= np.uint64(WORD_MULTIPLIER)
    found ^= found >> np.uint64(32)


# -- extract -----------------------------------------------------------------------------------------


CHUNK_RECORDS: Final = 8192
"""Records taken at once, so that what is worked on stays in the processor's cache."""
_COPIED_BYTES: Final = 16 * 1024
"""Of batches that are taken together: larger ones, on average, are not copied whole, but record by record."""
_LONG_BYTES: Final = 512
_LONG_TOGETHER: Final = 32


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of some messages: one element a key in each array, in no particular order."""

    hashes: Hashes  # uint64[n]
    items: Items
    """As an index object has them, but for ``queue``: queue offsets are counted from ``start``."""
    start: int

    def __len__(self) -> int:
        """Number of keys."""
        return len(self.hashes)

    @property
    def queue_offsets(self) -> Indices:
        """Of the messages."""
        return self.items["queue_offset"].astype(np.int64) + self.start

    @property
    def memory_bytes(self) -> int:
        """What it holds."""
        return self.hashes.nbytes + self.items.nbytes


_ROW: Final = np.dtype(f"V{ITEM_BYTES}")
"""An item as bytes without a meaning, which NumPy copies twice as fast as words."""


@dataclass(frozen=True, slots=True)
class _Records:
    """Records that are messages of their own, of any queues: one element a record in each array."""

    buffer: Buffer  # holds them
    ends: Indices  # int64[n], where in ``buffer`` each ends
    properties_sizes: npt.NDArray[np.int32]  # int32[n]
    seeds: Hashes | int  # of the hashes of each record's keys; one for all
    items: Items  # of a key of each, but for its hash


def _items(
    log_offsets: Indices,
    sizes: npt.NDArray[np.int32],
    store_ms: Indices,
    numbers: Indices,  # queue offsets, counted from that of the batch
) -> Items:
    items = np.zeros(len(sizes), ITEM)
    items["log_offset"], items["size"] = log_offsets, sizes
    items["store_ms"], items["queue_offset"] = store_ms, numbers
    return items


def extract_keys(batch: RecordBatch, seed: int, log_offset: int = 0) -> Iterator[Keys]:
    """The keys of a batch, some thousand records at a time; holes have none.

    Args:
        seed: Of the topic.
        log_offset: Of the first byte of the batch's data; 0: places in the data are found.
    """
    start = batch.base_offset
    if batch.kind is not RecordKind.ROCKETMQ:
        texts = (_kafka_keys if batch.kind is RecordKind.KAFKA else _jmq_keys)(batch)
        yield _of_foreign(batch, texts, seed, log_offset)
        return
    if batch.properties_sizes is not None:
        for begin in range(0, batch.count, CHUNK_RECORDS):
            records = _known(batch, begin, seed, log_offset)
            yield _keys(records, *_plain(records), start)
        return
    real = np.flatnonzero(batch.sizes > 0)
    for begin in range(0, len(real), CHUNK_RECORDS):
        where = real[begin : begin + CHUNK_RECORDS]
        block = parse_records(batch.data, batch.positions[where], batch.sizes[where])
        if not block.is_sound:
            raise DataError("a record is damaged", where=str(batch.queue))
        items = _items(block.positions + log_offset, block.sizes, block.store_timestamps_ms, where)
        is_inner = (block.sys_flags & INNER_BATCH) != 0
        records = _parsed(block, np.flatnonzero(~is_inner), items, seed)
        yield _keys(records, *_plain(records), start)
        if is_inner.any():
            yield from _inner(block, np.flatnonzero(is_inner), items, start, seed)


def extract_all(batches: Sequence[RecordBatch], log_offsets: Sequence[int]) -> list[list[Keys]]:
    """The keys of many batches, those of each as of ``extract_keys``.

    What a call costs goes by the records, not by the batches: small ones are taken together.
    """
    found: list[list[Keys]] = [[] for _ in batches]
    small: list[int] = []
    count = 0
    for number, batch in enumerate(batches):
        if batch.properties_sizes is None or batch.count > CHUNK_RECORDS or len(batches) == 1:
            every = extract_keys(batch, topic_seed(batch.queue.topic), log_offsets[number])
            found[number] = [keys for keys in every if len(keys)]
            continue
        small.append(number)
        count += batch.count
        if count >= CHUNK_RECORDS:
            _take_together(batches, log_offsets, small, found)
            small, count = [], 0
    if small:
        _take_together(batches, log_offsets, small, found)
    return found


def _take_together(
    batches: Sequence[RecordBatch],
    log_offsets: Sequence[int],
    numbers: Sequence[int],
    found: list[list[Keys]],
) -> None:
    """Extract the keys of some batches at once, and divide them."""
    some = [batches[number] for number in numbers]
    counts = np.array([batch.count for batch in some])
    ends = np.cumsum(counts)
    seeds = np.array([topic_seed(batch.queue.topic) for batch in some], np.uint64)
    bases = np.array([log_offsets[number] for number in numbers], np.int64)
    positions = np.concatenate([batch.positions for batch in some])
    sizes = np.concatenate([batch.sizes for batch in some])
    properties = np.concatenate(
        [batch.properties_sizes for batch in some if batch.properties_sizes is not None]
    )
    items = _items(
        positions + np.repeat(bases, counts),
        sizes,
        np.concatenate([batch.store_timestamps_ms for batch in some]),
        np.arange(int(ends[-1])) - np.repeat(ends - counts, counts),
    )
    buffer, record_ends = _together(some, counts, positions + sizes, max(1, int(properties.max())))
    records = _Records(buffer, record_ends, properties, np.repeat(seeds, counts), items)
    hashes, owners = _plain(records)
    order = np.argsort(owners, kind="stable")  # which merges ascending runs
    owners = owners[order]
    every = _keys(records, hashes[order], owners, 0)
    borders = np.searchsorted(owners, np.append(0, ends)).tolist()
    for number, batch, (low, high) in zip(numbers, some, pairwise(borders), strict=True):
        if low < high:
            mine = every.hashes[low:high], every.items[low:high]
            found[number] = [Keys(*mine, batch.base_offset)]


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


def _known(batch: RecordBatch, begin: int, seed: int, log_offset: int) -> _Records:
    """Some records of a batch whose properties' sizes are known."""
    assert batch.properties_sizes is not None
    where = slice(begin, begin + CHUNK_RECORDS)
    positions, sizes = batch.positions[where], batch.sizes[where]
    numbers = np.arange(begin, begin + len(sizes))
    items = _items(positions + log_offset, sizes, batch.store_timestamps_ms[where], numbers)
    return _Records(batch.data, positions + sizes, batch.properties_sizes[where], seed, items)


def _parsed(block: RecordBlock, chosen: Indices, items: Items, seed: int) -> _Records:
    ends = block.positions[chosen] + block.sizes[chosen]
    return _Records(block.buffer, ends, block.properties_sizes[chosen], seed, items[chosen])


def _plain(records: _Records) -> tuple[Hashes, Indices]:
    """The hash of each key, and which record it is of."""
    sizes = records.properties_sizes
    columns = PropertyColumns(records.buffer, records.ends - sizes, sizes)
    found, hashes = [], []
    for owners, starts, lengths in columns.lookup_keys():
        seeds = records.seeds if isinstance(records.seeds, int) else records.seeds[owners]
        hashes.append(hash_many(columns.text.data, starts, lengths, seeds))
        found.append(owners)
    return np.concatenate(hashes), np.concatenate(found)


def _keys(records: _Records, hashes: Hashes, owners: Indices, start: int) -> Keys:
    items = records.items.view(_ROW)[owners].view(ITEM)
    items["hash_low"] = hashes.astype(np.uint32)
    return Keys(hashes, items, start)


class _Texts(NamedTuple):
    """Keys of messages of another store: one element a message that has one in each array."""

    data: Buffer  # they lie in it
    starts: Indices
    sizes: Indices
    numbers: Indices  # of the messages' items
    times_ms: Indices


def _kafka_keys(batch: RecordBatch) -> _Texts:
    found = kafka_records(hidden(batch, None))
    columns = found.columns
    rows = found.rows[columns.key_sizes[found.rows] > 0]
    places = columns.data, columns.key_starts[rows], columns.key_sizes[rows]
    return _Texts(*places, columns.offsets[rows] - batch.base_offset, columns.timestamps_ms[rows])


def _jmq_keys(batch: RecordBatch) -> _Texts:
    found = [one for one in foreign_messages(batch) if one.key]
    rows = [(len(one.key), one.number, one.time_ms) for one in found]
    sizes, numbers, times_ms = np.array(rows, np.int64).reshape(-1, 3).T
    data = b"".join([*(one.key for one in found), bytes(WORD)])
    return _Texts(data, np.cumsum(sizes) - sizes, sizes, numbers, times_ms)


def _of_foreign(batch: RecordBatch, texts: _Texts, seed: int, log_offset: int) -> Keys:
    hashes = hash_many(texts.data, texts.starts, texts.sizes, seed)
    at = texts.numbers
    items = _items(batch.positions[at] + log_offset, batch.sizes[at], texts.times_ms, at)
    items["hash_low"] = hashes.astype(np.uint32)
    return Keys(hashes, items, batch.base_offset)


def _inner(
    block: RecordBlock, chosen: Indices, items: Items, start: int, seed: int
) -> Iterator[Keys]:
    """Of inner batches. The items of one batch share a record, which is looked into once."""
    wanted: dict[int, dict[int, int]] = {}
    for at in chosen.tolist():
        offset = int(items["queue_offset"][at]) + start
        wanted.setdefault(int(block.positions[at]), {})[offset] = at
    for position, asked in wanted.items():
        found = [
            (hash_bytes(key.encode("utf-8", "surrogateescape"), seed), asked[offset])
            for offset, key in _inner_keys(block, position)
            if offset in asked
        ]
        hashes = np.array([value for value, _ in found], np.uint64)
        mine = items[np.array([at for _, at in found], np.int64)]
        mine["hash_low"] = hashes.astype(np.uint32)
        yield Keys(hashes, mine, start)


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
