"""Reads what data objects say of themselves: the trailers of all objects of a broker, some at a time.

Ordering: results come in the order of the listing, whatever finishes first.

Retries and errors: nothing is retried here (the store does). An object that is damaged, none of ours, or not what its
key says becomes a ``Refused``; an object that is gone likewise; other errors of the store end the reading.

Memory: one tail an object in flight (``TAIL_BYTES_MAX`` at most), and the descriptions, about 500 bytes an object.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from backends.base import ByteRange
from backends.errors import InvalidRangeError, ObjectNotFoundError, ShortReadError
from tiered.errors import DataError, InvalidError
from tiered.format.object import BLOCK_BYTES, parse_trailer, trailer_size
from tiered.keys import parse_data_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from concurrent.futures import Executor, Future

    from backends.base import ObjectInfo, ObjectStore
    from tiered.format.object import Trailer
    from tiered.keys import DataKey

TAIL_BYTES_MAX = 8 * 1024 * 1024
"""A trailer that claims more is refused: it would belong to an object of 100 GiB."""
_DESCRIPTION_BYTES = 4096
"""Room for a description in the first read: two keys of the longest kind and its numbers."""
_INT_MAX = 2**63 - 1
IN_FLIGHT_MAX = 64


@dataclass(frozen=True, slots=True)
class Described:
    """A data object and what its trailer says, as far as both agree.

    Attributes:
        key: Below the broker's prefix.
        said: The key, parsed.
        payload_bytes: Size of the payload.
        trailer_bytes: Size of the trailer.
        packed_bytes: What is stored of the payload, if it is compressed; else 0.
        crc: CRC-32 of the payload.
        segment: Base log offset of its segment.
        log_offset: Of its first record.
        queue_offset: Of its first item.
        count: Items.
        holes: Items without a message; -1 for a commit-log object, which does not say.
        store_min_ms: Smallest store time; -1 when there is none.
        store_max_ms: Greatest store time; -1 likewise.
        log_key: Of an index object: the commit-log object that it points into; else empty.
        log_crc: Of an index object: CRC-32 of that one's payload; else 0.
        is_merged: It was made by sealing, of several.
        joined: Queue offsets of the whole segment that sealing made of several; (0, 0) else.
        modified_ms: When the store got it; -1 when it does not say.
    """

    key: str
    said: DataKey
    payload_bytes: int
    trailer_bytes: int
    packed_bytes: int
    crc: int
    segment: int
    log_offset: int
    queue_offset: int
    count: int
    holes: int
    store_min_ms: int
    store_max_ms: int
    log_key: str
    log_crc: int
    is_merged: bool
    joined: tuple[int, int]
    modified_ms: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A data object whose description is of no use, and why."""

    key: str
    reason: str


def read_described(
    store: ObjectStore, prefix: str, infos: Iterable[ObjectInfo], executor: Executor
) -> Iterator[Described | Refused]:
    """What each of the objects says of itself.

    Args:
        store: Where they lie (with retries).
        prefix: Of the broker.
        infos: As listed; all of them are keys that ``parse_data_key`` knows.
        executor: Makes the requests; at most ``IN_FLIGHT_MAX`` are under way.

    Raises:
        BackendError: The store does not answer.
    """
    flying: deque[Future[Described | Refused]] = deque()
    for info in infos:
        if len(flying) >= IN_FLIGHT_MAX:
            yield flying.popleft().result()
        flying.append(executor.submit(describe, store, prefix, info))
    for future in flying:
        yield future.result()


def describe(store: ObjectStore, prefix: str, info: ObjectInfo) -> Described | Refused:
    """What one object says of itself.

    Raises:
        BackendError: The store does not answer.
    """
    key = info.key[len(prefix) :]
    said = parse_data_key("", key)
    assert said is not None
    try:
        trailer = _read_trailer(store, info)
        return _checked(key, said, trailer, info)
    except (DataError, InvalidError) as error:
        return Refused(key, error.what)
    except (ObjectNotFoundError, InvalidRangeError, ShortReadError) as error:
        return Refused(key, f"it changed or went while it was read: {type(error).__name__}")
    except (KeyError, TypeError, ValueError) as error:
        return Refused(key, f"its description is no use: {error}")


def _read_trailer(store: ObjectStore, info: ObjectInfo) -> Trailer:
    """One request nearly always; a second one when the trailer is longer than expected, as that of a packed object is."""
    size = info.size_bytes
    if size <= 0:
        raise DataError("the object is empty")
    tail_bytes = min(size, _DESCRIPTION_BYTES + 4 * (size // BLOCK_BYTES + 1), TAIL_BYTES_MAX)
    tail = store.get(info.key, ByteRange(size - tail_bytes, size))
    try:
        return parse_trailer(tail, where=info.key)
    except DataError:
        more = min(size, trailer_size(tail), TAIL_BYTES_MAX)
        if more <= tail_bytes:
            raise
    return parse_trailer(store.get(info.key, ByteRange(size - more, size)), where=info.key)


def _checked(key: str, said: DataKey, trailer: Trailer, info: ObjectInfo) -> Described:
    text = trailer.description
    if trailer.stored_bytes + trailer.trailer_bytes != info.size_bytes:
        raise ValueError("it is longer or shorter than it says")
    is_index = said.kind == "consumequeue"
    found = Described(
        key=key,
        said=said,
        payload_bytes=trailer.payload_bytes,
        trailer_bytes=trailer.trailer_bytes,
        packed_bytes=trailer.stored_bytes if trailer.table else 0,
        crc=trailer.payload_crc,
        segment=_whole(text, "segment"),
        log_offset=_whole(text, "log_offset"),
        queue_offset=_whole(text, "queue_offset"),
        count=_whole(text, "count"),
        holes=_whole(text, "holes") if is_index else -1,
        store_min_ms=_whole(text, "store_min_ms", low=-1),
        store_max_ms=_whole(text, "store_max_ms", low=-1),
        log_key=_text(text, "log_key") if is_index else "",
        log_crc=_whole(text, "log_crc") if is_index else 0,
        is_merged="merged" in text,
        joined=_joined(text),
        modified_ms=info.modified_ms,
    )
    queue = (text.get("kind"), text.get("topic"), text.get("queue_id"), text.get("incarnation"))
    mine = (said.kind, said.queue.topic, said.queue.queue_id, said.incarnation)
    offset = found.queue_offset if is_index else found.log_offset
    if queue != mine or offset != said.offset:
        raise ValueError("it lies under a key that is not its own")
    return found


def _whole(text: Mapping[Any, Any], name: object, *, low: int = 0) -> int:
    value = text[name]
    if type(value) is not int or not low <= value <= _INT_MAX:
        raise ValueError(f"{name} is {value!r:.80}")
    return value


def _joined(text: Mapping[str, Any]) -> tuple[int, int]:
    if "joined" not in text:
        return 0, 0
    start, end = (_whole(dict(enumerate(text["joined"])), number) for number in (0, 1))
    return start, end


def _text(text: Mapping[str, Any], name: str) -> str:
    value = text[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} is no text")  # noqa: TRY004 (data, not a defect)
    return value
