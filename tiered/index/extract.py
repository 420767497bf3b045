"""From records to index items: every key of every message, with NumPy over a whole batch.

A message has the keys of its ``KEYS`` property (separated by blanks) and its ``UNIQ_KEY``
(``tiered.format.property_columns``).

Records that hold inner batches are taken one by one: keys are those of their inner messages.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from backends.lazy_dataclass import dataclass
from tiered.errors import DataError
from tiered.format.block import RecordBlock, bytes_at, parse_records
from tiered.format.properties import KEYS, UNIQ_KEY, split_keys
from tiered.format.property_columns import PropertyColumns
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


CHUNK_RECORDS: Final = 8192
"""Records taken at once, so that what is worked on stays in the processor's cache."""
_COPIED_BYTES: Final = 16 * 1024
"""Of batches that are taken together: larger ones, on average, are not copied whole, but record by record."""
_LONG_BYTES: Final = 512
_LONG_TOGETHER: Final = 32


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
    """The keys of a batch, some thousand records at a time; holes have none."""
    if batch.properties_sizes is not None:
        for begin in range(0, batch.count, CHUNK_RECORDS):
            yield _plain(_known(batch, begin, seed))[0]
        return
    real = np.flatnonzero(batch.sizes > 0)
    for begin in range(0, len(real), CHUNK_RECORDS):
        where = real[begin : begin + CHUNK_RECORDS]
        block = parse_records(batch.data, batch.positions[where], batch.sizes[where])
        if not block.is_sound:
            raise DataError("a record is damaged", where=str(batch.queue))
        offsets = where + batch.base_offset
        is_inner = (block.sys_flags & INNER_BATCH) != 0
        plain = np.flatnonzero(~is_inner)
        yield _plain(_parsed(block, plain, offsets, seed))[0]
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
        if batch.properties_sizes is None or batch.count > CHUNK_RECORDS or len(batches) == 1:
            seed = topic_seed(batch.queue.topic)
            found[number] = [keys for keys in extract_keys(batch, seed) if len(keys)]
            continue
        small.append(number)
        count += batch.count
        if count >= CHUNK_RECORDS:
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
        *_together(some, counts, positions + sizes, max(1, int(properties.max()))),
        positions,
        sizes,
        properties,
        np.concatenate([batch.store_timestamps_ms for batch in some]),
        np.arange(int(ends[-1])) + np.repeat(first_offsets, counts),
        np.repeat(np.array(seeds, np.uint64), counts),
    )
    keys, rows = _plain(records)
    of = np.searchsorted(ends, rows, side="right")
    order = np.argsort(of, kind="stable")
    of = of[order]
    every = Keys(*(getattr(keys, name)[order] for name in Keys.__slots__))
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
    where = slice(begin, begin + CHUNK_RECORDS)
    offsets = np.arange(begin, min(begin + CHUNK_RECORDS, batch.count)) + batch.base_offset
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


def _plain(records: _Records) -> tuple[Keys, Indices]:
    sizes = records.properties_sizes
    columns = PropertyColumns(records.buffer, records.ends - sizes, sizes)
    found, hashes = [], []
    for owners, starts, lengths in columns.lookup_keys():  # unique ids have one size, as a rule
        seeds = records.seeds if isinstance(records.seeds, int) else records.seeds[owners]
        hashes.append(hash_many(columns.text.data, starts, lengths, seeds))
        found.append(owners)
    at = np.concatenate(found)
    keys = Keys(
        np.concatenate(hashes),
        records.offsets[at],
        records.positions[at],
        records.sizes[at],
        records.store_ms[at],
    )
    return keys, at


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
