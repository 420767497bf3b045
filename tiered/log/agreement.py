"""Whether records are what their items say they are: one look at all records of a run, in few large steps.

Pure. ``fields_of`` has a fast way for what nearly all runs are, sound records of one queue with IPv4 hosts; whatever else
it meets it leaves to ``tiered.format.block``, which knows of everything and says what is wrong.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tiered.format.block import RecordBlock, bytes_at, headers_at, parse_records, topics_equal
from tiered.format.record import BODY_AT, MAGIC_V1, RECORD_BYTES_MIN
from tiered.format.sysflag import BORN_HOST_V6, INNER_BATCH, STORE_HOST_V6

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from typing_extensions import Buffer

    from tiered.model import MessageQueue

_PROPERTIES_SIZE_BYTES = 2
_UNUSUAL = BORN_HOST_V6 | STORE_HOST_V6 | INNER_BATCH


class Fields(NamedTuple):
    """What records say.

    Attributes:
        store_timestamps_ms: int64[n], UTC ms.
        physical_offsets: int64[n], in the local log.
        fault: Why these are not the records that were wanted; empty when they are.
    """

    store_timestamps_ms: npt.NDArray[np.int64]
    physical_offsets: npt.NDArray[np.int64]
    fault: str = ""


def fields_of(
    queue: MessageQueue,
    data: Buffer,
    positions: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
) -> Fields:
    """Hold records against what an index says of them.

    Args:
        queue: Whose they have to be: queue id and all bytes of the topic.
        data: Holds the records.
        positions: int64[n], where each begins in ``data``; n > 0.
        sizes: int32[n], their sizes.
        offsets: int64[n], their queue offsets; of an inner batch any that it may hold.
    """
    ids = np.int64(queue.queue_id)
    topic = [(queue.topic, None)]
    found = usual_fields(topic, ids, data, positions, sizes, offsets)
    if found is not None:
        return found
    block = parse_records(data, positions, sizes)
    return Fields(block.store_timestamps_ms, block.physical_offsets, _fault(queue, block, offsets))


def usual_fields(  # noqa: PLR0917 (as ``fields_of``)
    topics: Sequence[tuple[str, npt.NDArray[np.bool_] | None]],
    queue_ids: npt.NDArray[np.int64] | np.int64,
    data: Buffer,
    positions: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
) -> Fields | None:
    """The fields of records of many queues, if all are sound, wanted, and without anything unusual; else None.

    Args:
        topics: Each topic, and which records are of it; None: all.
        queue_ids: Of each record, or of all.
        data: As of ``fields_of``, as what follows.
        positions: int64[n].
        sizes: int32[n].
        offsets: int64[n].
    """
    ends = positions + sizes
    in_place = sizes.min() >= RECORD_BYTES_MIN and positions.min() >= 0
    if not in_place or ends.max() > memoryview(data).nbytes:
        return None
    heads = headers_at(data, positions)
    bodies = heads["body_size"]
    same = (
        (heads["magic"] == MAGIC_V1).all()
        and (heads["size"] == sizes).all()
        and (heads["queue_id"] == queue_ids).all()
        and (heads["queue_offset"] == offsets).all()
        and not (heads["sys_flag"] & _UNUSUAL).any()
        and bodies.min() >= 0
    )
    if not same:
        return None
    tails = positions + bodies + BODY_AT
    for topic, which in topics:
        some = slice(None) if which is None else which
        if not _is_of_topic(topic, data, tails[some], ends[some]):
            return None
    times = heads["store_timestamp_ms"].astype(np.int64)
    return Fields(times, heads["physical_offset"].astype(np.int64))


def _is_of_topic(
    topic: str, data: Buffer, at: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> bool:
    """Whether behind every body, at ``at``, come this topic and properties that fill the record to its end."""
    name = topic.encode("utf-8", "surrogateescape")
    words, kind = _tail_kind(len(name) + 1)
    properties_at = at + kind.itemsize
    if len(name) > np.iinfo(np.int8).max or (properties_at > ends).any():
        return False
    tails = bytes_at(data, f"V{kind.itemsize}")[at].view(kind)
    wanted = np.frombuffer(bytes([len(name)]) + name + bytes(_PROPERTIES_SIZE_BYTES), kind)
    properties = tails["properties"]
    return bool(
        all((tails[word] == wanted[word]).all() for word in words)
        and properties.min() >= 0
        and (properties_at + properties == ends).all()
    )


@lru_cache(256)
def _tail_kind(size_bytes: int) -> tuple[list[str], np.dtype[np.void]]:
    """A type that has so many bytes as few words, which may overlap, and then the size of the properties."""
    word = next(size for size in (8, 4, 2, 1) if size <= size_bytes)
    begins = [*range(0, size_bytes - word, word), size_bytes - word]
    names = [f"w{begin}" for begin in begins]
    kind = np.dtype(
        {
            "names": [*names, "properties"],
            "formats": [*(f"u{word}" for _ in begins), ">i2"],
            "offsets": [*begins, size_bytes],
            "itemsize": size_bytes + _PROPERTIES_SIZE_BYTES,
        }
    )
    return names, kind


def _fault(queue: MessageQueue, block: RecordBlock, wanted: npt.NDArray[np.int64]) -> str:
    """What is wrong with records that shall be of these queue offsets; empty when nothing is."""
    if block.faults.any() or not _is_of(block, queue):
        return "an item points at something that is no record of this queue"
    inner = block.sys_flags & INNER_BATCH != 0
    if (np.where(inner, block.queue_offsets > wanted, block.queue_offsets != wanted)).any():
        return "an item points at a record of another queue offset"
    return ""


def _is_of(block: RecordBlock, queue: MessageQueue) -> bool:
    """Whether every record says that it is of this queue: queue id and all bytes of the topic."""
    if (block.queue_ids != queue.queue_id).any():
        return False
    return bool(topics_equal(block, np.arange(len(block)), queue.topic).all())
