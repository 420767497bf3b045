"""Makes stores for benchmarks, byte for byte in the broker's format, at hundreds of thousands of messages a second.

**Contract.** The store is left as by a clean stop. Messages go round the queues, topic by topic within each queue
number. All records of a store are equally long (a user property evens out the topics' names), so the place of every
message follows from its number, and records are built as rows of one array: a template, with columns put over it. The
same arguments and clock give the same bytes. What was written is left to the system to bring to the disk. A crash leaves
``abort`` in the directory; remove the directory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view
from zlib_ng import zlib_ng

from backends.lazy_dataclass import dataclass
from tiered.errors import InvalidError
from tiered.format.items import ITEM_BYTES, encode_items
from tiered.format.properties import CLUSTER, KEYS, TAGS, UNIQ_KEY, tag_hash
from tiered.format.record import (
    BLANK_BYTES_MIN,
    BODY_AT,
    BORN_TIME_AT,
    CRC_AT,
    CRC_MASK,
    MAGIC_BLANK,
    PHYSICAL_OFFSET_AT,
    QUEUE_ID_AT,
    QUEUE_OFFSET_AT,
    SIZE_AND_MAGIC,
    STORE_TIME_AT,
)
from tiered.local.layout import LOG_DIRECTORY, QUEUE_DIRECTORY
from tiered.store.disk import Disk, RowWriter, StoreHold
from tiered.store.new_message import MAKER_BYTES, NewMessage, ms_of_month
from tiered.store.special import Maker
from tiered.store.store_options import StoreOptions
from tiered.store.topictable import TopicTable

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from tiered.clock import Clock

    Longs = npt.NDArray[np.int64]
    Words = npt.NDArray[np.uint64]
    Text = npt.NDArray[np.uint8]


# -- bodies ----------------------------------------------------------------------------------------

EVENTS: Final = (
    "created",
    "shipped",
    "refused",
    "changed",
    "deleted",
    "expired",
    "delayed",
    "renewed",
)
_ID_DIGITS: Final = 12
_TIME_DIGITS: Final = 13
_USER_DIGITS: Final = 6
_TOKEN_WORDS: Final = 4
_TOKEN_DIGITS: Final = 16 * _TOKEN_WORDS
_USERS: Final = 1_000_000
_CENTS: Final = 100_000
_VOCABULARY: Final = 4_000
_POOL_BYTES_MAX: Final = 4 << 20
_SYLLABLES: Final = (
    *(first + second for first in "bdfghklmnprstwyz" for second in "aeio"),
    *("nd", "rk", "st", "ll"),
)
_ZIPF_EXPONENT: Final = 0.88
_END: Final = '"}'
_USER_SALT, _AMOUNT_SALT, _TEXT_SALT, _EVENT_SALT, _TOKEN_SALT = range(1, 6)
_HEX: Final = np.frombuffer(b"0123456789abcdef", np.uint8)


def mix(seed: int, salt: int, numbers: Longs) -> Words:
    """Random-looking 64-bit words, one for each number, the same for the same arguments (splitmix64)."""
    start = (seed * 0x9E37_79B9 + salt * 0xD1B5_4A32_D192_ED03) % (1 << 64)
    word = numbers.astype(np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15) + np.uint64(start)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    mixed: Words = word ^ (word >> np.uint64(31))
    return mixed


def event_numbers(seed: int, numbers: Longs) -> Longs:
    """Which of ``EVENTS`` each message has."""
    return (mix(seed, _EVENT_SALT, numbers) % np.uint64(len(EVENTS))).astype(np.int64)


def digits(values: Longs, count: int) -> Text:
    """Decimal digits, with zeros in front: one row of ``count`` for each value."""
    powers = 10 ** np.arange(count - 1, -1, -1, dtype=np.int64)
    return (values[:, None] // powers % 10 + ord("0")).astype(np.uint8)


def hex_digits(data: Text) -> Text:
    """Lower-case hexadecimal digits of rows of bytes: twice as wide."""
    pairs = np.stack((data >> 4, data & 15), axis=-1)
    return _HEX[pairs].reshape(len(data), -1)


class Bodies:
    """Makes bodies of one length. For any thread.

    ========= ============================================================================
    field     content
    ========= ============================================================================
    id        the number, 12 digits
    time      born time, UTC ms, 13 digits
    event     one of eight words of seven letters, the message's tag too
    user      ``u`` and 6 digits; low ones are more frequent
    amount    3 digits, a point, 2 digits
    token     random hexadecimal digits, which do not compress
    text      words, few of them frequent, many of them rare; the rest of the body
    ========= ============================================================================

    Of bodies of 1 KiB one after another, zlib level 6 makes about 2.8 of 1. A body that is too short for all of it is
    cut.
    """

    def __init__(self, body_bytes: int, seed: int, *, messages: int) -> None:
        """Prepare the words for about so many messages; few need fewer."""
        self._seed = seed
        self._head, self._fields = _head()
        self._text_bytes = max(0, body_bytes - len(self._head) - len(_END))
        self.size = body_bytes  # bytes of each
        wanted = min(_POOL_BYTES_MAX, messages * self._text_bytes)
        pool = _words(np.random.default_rng(seed), wanted + self._text_bytes + 1)
        self._windows = sliding_window_view(pool, self._text_bytes) if self._text_bytes else None

    def fill(self, out: Text, numbers: Longs, times_ms: Longs) -> None:
        """Write the bodies of messages into ``out``, a row each; they were born at ``times_ms``."""
        head = np.tile(self._head, (len(numbers), 1))
        for name, column in self._columns(numbers, times_ms).items():
            at = self._fields[name]
            head[:, at : at + column.shape[1]] = column
        if self._windows is None:
            end = np.frombuffer(_END.encode(), np.uint8)
            whole = np.hstack((head, np.tile(end, (len(numbers), 1))))
            out[:] = whole[:, : self.size]
            return
        starts = mix(self._seed, _TEXT_SALT, numbers) % np.uint64(len(self._windows))
        width = len(self._head)
        out[:, :width] = head
        out[:, width:-2] = self._windows[starts]
        out[:, -2:] = np.frombuffer(_END.encode(), np.uint8)

    def _columns(self, numbers: Longs, times_ms: Longs) -> dict[str, Text]:
        seed = self._seed
        events = np.frombuffer("".join(EVENTS).encode(), np.uint8).reshape(len(EVENTS), -1)
        share = mix(seed, _USER_SALT, numbers) / 2.0**64
        cents = (mix(seed, _AMOUNT_SALT, numbers) % np.uint64(_CENTS)).astype(np.int64)
        tokens = np.stack(
            [mix(seed, _TOKEN_SALT + index, numbers) for index in range(_TOKEN_WORDS)], axis=1
        )
        return {
            "id": digits(numbers, _ID_DIGITS),
            "time": digits(times_ms, _TIME_DIGITS),
            "event": events[event_numbers(seed, numbers)],
            "user": digits((share**3 * _USERS).astype(np.int64), _USER_DIGITS),
            "whole": digits(cents // 100, 3),
            "cents": digits(cents % 100, 2),
            "token": hex_digits(tokens.view(np.uint8).reshape(len(numbers), -1)),
        }


def _head() -> tuple[Text, dict[str, int]]:
    text = ""
    fields: dict[str, int] = {}
    for before, name, width in (
        ('{"id":"', "id", _ID_DIGITS),
        ('","time":', "time", _TIME_DIGITS),
        (',"event":"', "event", len(EVENTS[0])),
        ('","user":"u', "user", _USER_DIGITS),
        ('","amount":"', "whole", 3),
        (".", "cents", 2),
        ('","token":"', "token", _TOKEN_DIGITS),
    ):
        fields[name] = len(text) + len(before)
        text += before + "0" * width
    return np.frombuffer((text + '","text":"').encode(), np.uint8), fields


def _words(rng: np.random.Generator, size: int) -> Text:
    """At least ``size`` bytes of words with blanks between them, ranks after Zipf."""
    lengths = rng.integers(1, 5, _VOCABULARY)
    vocabulary = np.array(
        ["".join(rng.choice(_SYLLABLES, length)) for length in lengths], dtype=object
    )
    weights = 1 / np.arange(1, _VOCABULARY + 1) ** _ZIPF_EXPONENT
    count = size // 3 + 1  # a word and its blank have at least three bytes
    drawn = rng.choice(_VOCABULARY, count, p=weights / weights.sum())
    text = " ".join(vocabulary[drawn])
    return np.frombuffer(text[:size].encode(), np.uint8)


# -- records ---------------------------------------------------------------------------------------

TAG_CODES: Final = np.array([tag_hash(event) for event in EVENTS], np.int64)
"""By number of the event: the event is the tag."""
ORIGIN: Final = "origin"
_KEY: Final = "order-"
_KEY_DIGITS: Final = 12
_UNIQUE_DIGITS: Final = 32
_MAKER_SALT: Final = 99
_UPPER: Final = ord("a") - ord("A")


class RecordRows:
    """Makes the records of one store.

    A template, a record as the store makes it (``tiered.store.special``), has every byte that is the same for all messages
    of a topic; the columns of the rest are put over it. The property ``origin`` comes first and is longer for
    shorter names of topics, so that all records are equally long and what comes behind it stands in the same columns.
    """

    def __init__(
        self,
        topics: Sequence[str],
        bodies: Bodies,
        options: StoreOptions,
        *,
        cluster: str,
        seed: int,
    ) -> None:
        """Make the templates, one for each of ``topics``; ``options.store_host`` is producer and broker."""
        self._bodies = bodies
        self._seed = seed
        longest = max(map(len, topics))
        made = []
        for topic in topics:
            properties = {
                ORIGIN: "o" * (1 + longest - len(topic)),
                KEYS: _KEY + "0" * _KEY_DIGITS,
                TAGS: EVENTS[0],
                CLUSTER: cluster,
                UNIQ_KEY: "0" * _UNIQUE_DIGITS,
            }
            message = NewMessage(topic, 0, bytes(bodies.size), properties=properties)
            made.append(Maker(message, options, is_batch_topic=False).make(0, 0, 0))
        self.size = len(made[0])  # bytes of each record
        columns = {
            "crc": (">i4", CRC_AT),
            "queue_id": (">i4", QUEUE_ID_AT),
            "queue_offset": (">i8", QUEUE_OFFSET_AT),
            "physical_offset": (">i8", PHYSICAL_OFFSET_AT),
            "born_ms": (">i8", BORN_TIME_AT),
            "store_ms": (">i8", STORE_TIME_AT),
            "body": ((np.uint8, bodies.size), BODY_AT),
            "key": ((np.uint8, _KEY_DIGITS), made[0].rindex(_KEY.encode()) + len(_KEY)),
            "tag": ((np.uint8, len(EVENTS[0])), made[0].rindex(EVENTS[0].encode())),
            "unique": ((np.uint8, _UNIQUE_DIGITS), made[0].rindex(b"0" * _UNIQUE_DIGITS)),
        }
        formats, places = zip(*columns.values(), strict=True)
        self._columns = np.dtype(
            {
                "names": list(columns),
                "formats": formats,
                "offsets": places,
                "itemsize": self.size,
            }
        )
        self._templates = np.frombuffer(b"".join(made), np.uint8).reshape(len(made), self.size)
        self._maker = mix(seed, _MAKER_SALT, np.arange(2)).view(np.uint8)[:MAKER_BYTES]

    def tag_codes(self, numbers: Longs) -> Longs:
        """For the consume queues."""
        found: Longs = TAG_CODES[event_numbers(self._seed, numbers)]
        return found

    def build(
        self,
        numbers: Longs,
        *,
        topics: Longs,
        queue_ids: Longs,
        queue_offsets: Longs,
        physical_offsets: Longs,
        times_ms: Longs,
    ) -> Text:
        """The records of messages, one row each. All arrays are of one length, at least 1."""
        rows = self._templates[topics]
        columns = rows.view(self._columns)[:, 0]
        self._bodies.fill(columns["body"], numbers, times_ms)
        columns["crc"] = self._crcs(rows)
        columns["queue_id"], columns["queue_offset"] = queue_ids, queue_offsets
        columns["physical_offset"] = physical_offsets
        columns["born_ms"] = columns["store_ms"] = times_ms
        events = np.frombuffer("".join(EVENTS).encode(), np.uint8).reshape(len(EVENTS), -1)
        columns["key"] = digits(numbers, _KEY_DIGITS)
        columns["tag"] = events[event_numbers(self._seed, numbers)]
        columns["unique"] = self._unique_keys(numbers, times_ms)
        return rows

    def _crcs(self, rows: Text) -> Longs:
        flat, size = rows.data.cast("B"), rows.size
        starts = range(BODY_AT, size, self.size)
        ends = range(BODY_AT + self._bodies.size, size + self.size, self.size)
        found = map(zlib_ng.crc32, map(flat.__getitem__, map(slice, starts, ends)))
        return np.fromiter(found, np.int64, len(rows)) & CRC_MASK

    def _unique_keys(self, numbers: Longs, times_ms: Longs) -> Text:
        """As ``KeyMaker`` describes them; the month is that of the first message."""
        since = times_ms + (ms_of_month(int(times_ms[0])) - int(times_ms[0]))
        packed = np.hstack(
            (
                np.tile(self._maker, (len(numbers), 1)),
                since.astype(">u4")[:, None].view(np.uint8),
                (numbers & 0xFFFF).astype(">u2")[:, None].view(np.uint8),
            )
        )
        text = hex_digits(packed)
        return np.where(text >= ord("a"), text - _UPPER, text).astype(np.uint8)


# -- stores ----------------------------------------------------------------------------------------

BENCH_CLUSTER: Final = "bench-cluster"
BENCH_BROKER: Final = "bench-broker"
MESSAGES_PER_MS: Final = 10
_CHUNK_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class MadeStore:
    """What was made."""

    messages: int  # how many
    record_bytes: int  # of all records
    log_bytes: int  # where the log ends: the records, and the blanks at the ends of files
    topics: int  # how many topics: ``bench-0`` and so on
    queues: int  # queues of each


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where everything goes: message ``m`` to queue ``m % n`` of the ``n`` queues, which go topic by topic."""

    messages: int  # how many
    topics: tuple[str, ...]  # their names
    queues: int  # queues of each topic
    size: int  # bytes of each record
    file_bytes: int  # of each file of the log
    begin_ms: int  # store time of the first message, UTC

    @property
    def per_file(self) -> int:
        return (self.file_bytes - BLANK_BYTES_MIN) // self.size

    def physical(self, numbers: Longs) -> Longs:
        files, inside = np.divmod(numbers, self.per_file)
        found: Longs = files * self.file_bytes + inside * self.size
        return found

    def times_ms(self, numbers: Longs) -> Longs:
        return self.begin_ms + numbers // MESSAGES_PER_MS

    @property
    def end_ms(self) -> int:
        return self.begin_ms + (self.messages - 1) // MESSAGES_PER_MS

    @property
    def log_end(self) -> int:
        return int(self.physical(np.array([self.messages - 1]))[0]) + self.size


def make_store(
    directory: str | os.PathLike[str],
    *,
    messages: int,
    body_bytes: int,
    queues: int,
    topics: int,
    seed: int,
    clock: Clock,
    commitlog_file_bytes: int = 1 << 30,
    consumequeue_file_items: int = 300_000,
    progress: Callable[[int], object] | None = None,
) -> MadeStore:
    """Make a store whose last message is stored now; ``progress`` hears how many are in the log, every few thousand.

    The directory is empty or missing. Bodies are texts as ``Bodies`` says, topics are named ``bench-0`` and so on.
    """
    _check_numbers(messages=messages, queues=queues, topics=topics, body_bytes=body_bytes)
    options = StoreOptions(
        commitlog_file_bytes=commitlog_file_bytes,
        consumequeue_file_items=consumequeue_file_items,
        message_bytes_max=max(body_bytes, 1),
        topic_queues=queues,
    )
    names = tuple(f"bench-{number}" for number in range(topics))
    bodies = Bodies(body_bytes, seed, messages=messages)
    rows = RecordRows(names, bodies, options, cluster=BENCH_CLUSTER, seed=seed)
    plan = _Plan(
        messages=messages,
        topics=names,
        queues=queues,
        size=rows.size,
        file_bytes=commitlog_file_bytes,
        begin_ms=clock.now_ms() - (messages - 1) // MESSAGES_PER_MS,
    )
    hold = StoreHold.of_new(directory)
    try:
        with Disk(hold.root):
            hold.begin(plan.begin_ms)
            _write(hold.root, plan, rows, options, progress or (lambda _: None))
            table = TopicTable.make(hold.root, cluster=BENCH_CLUSTER, broker=BENCH_BROKER)
            for topic in names:
                table.put(topic, queues)
            table.save(plan.end_ms)
            hold.write_checkpoint(plan.end_ms, plan.log_end)
            hold.end()
    finally:
        hold.close()
    return MadeStore(messages, messages * rows.size, plan.log_end, topics, queues)


def _check_numbers(*, body_bytes: int, **counts: int) -> None:
    for name, value in counts.items():
        if value <= 0:
            raise InvalidError(f"{name} must be positive, not {value}")
    if body_bytes < 0:
        raise InvalidError(f"body_bytes must not be negative, and is {body_bytes}")


def _write(
    root: str,
    plan: _Plan,
    rows: RecordRows,
    options: StoreOptions,
    progress: Callable[[int], object],
) -> None:
    files = RowWriter()
    try:
        _write_log(files, f"{root}/{LOG_DIRECTORY}", plan, rows, progress)
        for index in range(plan.queues * len(plan.topics)):
            _write_queue(files, root, plan, rows, index=index, options=options)
    finally:
        files.close()


def _write_log(
    files: RowWriter, folder: str, plan: _Plan, rows: RecordRows, progress: Callable[[int], object]
) -> None:
    chunk = max(1, _CHUNK_BYTES // plan.size)
    number = 0
    while number < plan.messages:
        file_end = number - number % plan.per_file + plan.per_file
        end = min(number + chunk, plan.messages, file_end)
        numbers = np.arange(number, end)
        physical = plan.physical(numbers)
        in_queue, queue = np.divmod(numbers, plan.queues * len(plan.topics))
        queue_ids, topics = np.divmod(queue, len(plan.topics))
        built = rows.build(
            numbers,
            topics=topics,
            queue_ids=queue_ids,
            queue_offsets=in_queue,
            physical_offsets=physical,
            times_ms=plan.times_ms(numbers),
        )
        files.write(folder, plan.file_bytes, int(physical[0]), built.data.cast("B"))
        if end == file_end and end < plan.messages:
            at = int(physical[-1]) + plan.size
            rest = plan.file_bytes - at % plan.file_bytes
            files.write(folder, plan.file_bytes, at, SIZE_AND_MAGIC.pack(rest, MAGIC_BLANK))
        progress(end)
        number = end


def _write_queue(
    files: RowWriter,
    root: str,
    plan: _Plan,
    rows: RecordRows,
    *,
    index: int,
    options: StoreOptions,
) -> None:
    queue_id, topic = divmod(index, len(plan.topics))
    folder = f"{root}/{QUEUE_DIRECTORY}/{plan.topics[topic]}/{queue_id}"
    step = plan.queues * len(plan.topics)
    items = options.consumequeue_file_items
    for start in range(index, plan.messages, step * items):
        numbers = np.arange(start, min(start + step * items, plan.messages), step)
        data = encode_items(
            plan.physical(numbers), np.full(len(numbers), plan.size), rows.tag_codes(numbers)
        )
        position = start // step * ITEM_BYTES
        files.write(folder, options.consumequeue_file_bytes, position, data)
