"""Records of benchmark messages as rows of one array of bytes.

A template has every byte that is the same for all messages of a topic; the columns of the rest are put over it (places
as in ``tiered.format.record``, both hosts IPv4). The property ``origin`` comes first and is longer for shorter names of
topics, so that all records are equally long and what comes behind it stands in the same columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
from zlib_ng import zlib_ng

from tiered.format.properties import CLUSTER, KEYS, TAGS, UNIQ_KEY, join_properties, tag_hash
from tiered.format.record import BODY_AT, CRC_MASK, STORE_TIME_AT, Record, encode_record
from tiered.format.record import record_bytes as size_of
from tiered.store.bulk_bodies import EVENTS, Bodies, digits, event_numbers, hex_digits, mix
from tiered.store.uniqkeys import MAKER_BYTES, ms_of_month

if TYPE_CHECKING:
    from collections.abc import Sequence

    Longs = npt.NDArray[np.int64]
    Text = npt.NDArray[np.uint8]

TAG_CODES: Final = np.array([tag_hash(event) for event in EVENTS], np.int64)
"""By number of the event: the event is the tag."""
ORIGIN: Final = "origin"
_CRC_AT: Final = 8
_QUEUE_ID_AT: Final = 12
_QUEUE_OFFSET_AT: Final = 20
_PHYSICAL_AT: Final = 28
_BORN_TIME_AT: Final = 40
_KEY: Final = "order-"
_KEY_DIGITS: Final = 12
_UNIQUE_DIGITS: Final = 32
_MAKER_SALT: Final = 99
_UPPER: Final = ord("a") - ord("A")


class RecordRows:
    """Makes the records of one store.

    Attributes:
        size: Bytes of each record.
    """

    def __init__(
        self, topics: Sequence[str], bodies: Bodies, *, cluster: str, host: str, seed: int
    ) -> None:
        """Make the templates: one for each of ``topics``; ``host`` is producer and broker."""
        self._bodies = bodies
        self._seed = seed
        longest = max(map(len, topics))
        made = [
            _template(topic, bodies.size, cluster, host, origin="o" * (1 + longest - len(topic)))
            for topic in topics
        ]
        self.size = len(made[0])
        self._templates = np.frombuffer(b"".join(made), np.uint8).reshape(len(made), self.size)
        self._key_at = made[0].rindex(_KEY.encode()) + len(_KEY)
        self._tag_at = made[0].rindex(EVENTS[0].encode())
        self._unique_at = made[0].rindex(b"0" * _UNIQUE_DIGITS)
        maker = mix(seed, _MAKER_SALT, np.arange(2)).view(np.uint8)[:MAKER_BYTES]
        self._maker = maker

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
        """The records of messages, one row each. All arrays are of one length, at least 1.

        Args:
            numbers: Of the messages in the store.
            topics: Which of the topics each goes to.
            queue_ids: Of each.
            queue_offsets: Of each.
            physical_offsets: Of each.
            times_ms: Born and store times, UTC.
        """
        rows = self._templates[topics]
        self._bodies.fill(rows[:, BODY_AT : BODY_AT + self._bodies.size], numbers, times_ms)
        for at, values, kind in (
            (_CRC_AT, self._crcs(rows), ">i4"),
            (_QUEUE_ID_AT, queue_ids, ">i4"),
            (_QUEUE_OFFSET_AT, queue_offsets, ">i8"),
            (_PHYSICAL_AT, physical_offsets, ">i8"),
            (_BORN_TIME_AT, times_ms, ">i8"),
            (STORE_TIME_AT, times_ms, ">i8"),
        ):
            _put(rows, at, _bytes_of(values, kind))
        events = np.frombuffer("".join(EVENTS).encode(), np.uint8).reshape(len(EVENTS), -1)
        _put(rows, self._key_at, digits(numbers, _KEY_DIGITS))
        _put(rows, self._tag_at, events[event_numbers(self._seed, numbers)])
        _put(rows, self._unique_at, self._unique_keys(numbers, times_ms))
        return rows

    def _crcs(self, rows: Text) -> Longs:
        flat, size = rows.data.cast("B"), rows.size
        starts = range(BODY_AT, size, self.size)
        ends = range(BODY_AT + self._bodies.size, size + self.size, self.size)
        found = map(zlib_ng.crc32, map(flat.__getitem__, map(slice, starts, ends)))
        return np.fromiter(found, np.int64, len(rows)) & CRC_MASK

    def _unique_keys(self, numbers: Longs, times_ms: Longs) -> Text:
        """As ``tiered.store.uniqkeys`` describes them; the month is that of the first message."""
        since = times_ms + (ms_of_month(int(times_ms[0])) - int(times_ms[0]))
        packed = np.hstack(
            (
                np.tile(self._maker, (len(numbers), 1)),
                _bytes_of(since, ">u4"),
                _bytes_of(numbers & 0xFFFF, ">u2"),
            )
        )
        text = hex_digits(packed)
        return np.where(text >= ord("a"), text - _UPPER, text).astype(np.uint8)


def _template(topic: str, body_bytes: int, cluster: str, host: str, *, origin: str) -> bytes:
    properties = join_properties(
        {
            ORIGIN: origin,
            KEYS: _KEY + "0" * _KEY_DIGITS,
            TAGS: EVENTS[0],
            CLUSTER: cluster,
            UNIQ_KEY: "0" * _UNIQUE_DIGITS,
        }
    )
    size = size_of(body=body_bytes, topic=len(topic), props=len(properties), sys_flag=0, version=1)
    return encode_record(
        Record(
            size=size,
            version=1,
            body_crc=0,
            queue_id=0,
            flag=0,
            queue_offset=0,
            physical_offset=0,
            sys_flag=0,
            born_timestamp_ms=0,
            born_host=host,
            store_timestamp_ms=0,
            store_host=host,
            reconsume_times=0,
            prepared_transaction_offset=0,
            body=bytes(body_bytes),
            topic=topic,
            properties_raw=properties,
        )
    )


def _bytes_of(values: Longs, kind: str) -> Text:
    """Big-endian bytes of each value as a row."""
    return values.astype(kind)[:, None].view(np.uint8)


def _put(rows: Text, at: int, columns: Text) -> None:
    rows[:, at : at + columns.shape[1]] = columns
