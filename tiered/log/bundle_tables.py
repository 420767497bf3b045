"""Reads what bundles say of themselves: the tables of all bundles of a broker, some at a time.

Ordering: results come in the order of the listing, whatever finishes first.

Retries and errors: nothing is retried here (the store does). Where only the footer of a bundle is damaged, or gone, its
table is found in front of it, and proves itself (``Tabled.salvaged`` says so). A bundle whose table is damaged, that is not
what its key says, or that is gone, becomes a ``Refused``; other errors of the store end the reading.

Memory: one tail a request in flight (``TAIL_BYTES_MAX`` at most), and about 150 bytes a section.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from backends.base import ByteRange
from backends.errors import InvalidRangeError, ObjectNotFoundError, ShortReadError
from backends.lazy_dataclass import dataclass
from tiered.errors import DataError, OtherVersionError
from tiered.format.bundle import FOOTER_BYTES, find_table, read_table, tail_bytes
from tiered.keys import parse_data_key
from tiered.log.bundles import sections_of
from tiered.log.merge import LAST_LEVEL
from tiered.log.parts import Bundle

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from concurrent.futures import Executor, Future

    from backends.base import ObjectInfo, ObjectStore
    from tiered.format.bundle import SectionTable
    from tiered.keys import DataKey
    from tiered.log.bundles import NamedSections

IN_FLIGHT_MAX: Final = 64
FIRST_BYTES: Final = 32 * 1024
"""Of a first request: the tables of nearly all bundles are smaller."""
TAIL_BYTES_MAX: Final = 64 * 1024 * 1024
"""A table that claims more is refused: it would be of millions of sections."""
SEARCHED_BYTES: Final = 16 * 1024 * 1024
"""Of a bundle's end, where its footer is damaged."""


@dataclass(frozen=True, slots=True)
class Tabled:
    """A bundle and its sections, as far as its table and its key agree."""

    said: DataKey  # its key, parsed
    named: NamedSections  # its sections as parts
    modified_ms: int  # when the store got it; -1 when it does not say
    salvaged: str = ""  # what is damaged, though the table is not; empty if nothing is

    @property
    def bundle(self) -> Bundle:
        """Which."""
        return self.named.bundle


@dataclass(frozen=True, slots=True)
class Refused:
    """A bundle whose table is of no use, and why; it may be of another version."""

    key: str
    reason: str
    is_other_version: bool = False


def read_tables(
    store: ObjectStore, prefix: str, infos: Iterable[ObjectInfo], executor: Executor
) -> Iterator[Tabled | Refused]:
    """What each of the bundles says of itself; at most ``IN_FLIGHT_MAX`` requests are under way."""
    flying: deque[Future[Tabled | Refused]] = deque()
    for info in infos:
        if len(flying) >= IN_FLIGHT_MAX:
            yield flying.popleft().result()
        flying.append(executor.submit(read_bundle_table, store, prefix, info))
    for future in flying:
        yield future.result()


def read_bundle_table(store: ObjectStore, prefix: str, info: ObjectInfo) -> Tabled | Refused:
    """What one bundle says of itself."""
    key = info.key[len(prefix) :]
    said = parse_data_key("", key)
    assert said is not None
    try:
        try:
            table = _read(store, info)
        except DataError as error:
            return _salvaged(store, info, said, key, error.what)
        return _checked(said, key, table, info)
    except DataError as error:
        return Refused(key, error.what)
    except OtherVersionError as error:
        return Refused(key, error.what, is_other_version=True)
    except (ObjectNotFoundError, InvalidRangeError, ShortReadError) as error:
        return Refused(key, f"it changed or went while it was read: {type(error).__name__}")
    except ValueError as error:
        return Refused(key, f"its table is no use: {error}")


def _read(store: ObjectStore, info: ObjectInfo) -> SectionTable:
    """One request nearly always; a second one when the table is longer than expected."""
    size, where = info.size_bytes, info.key
    if size < FOOTER_BYTES:
        raise DataError("it is too short to be a bundle")
    tail = store.get(info.key, ByteRange(max(0, size - FIRST_BYTES), size))
    more = tail_bytes(tail, where=where)
    if more > min(size, TAIL_BYTES_MAX):
        raise DataError("its table claims to be larger than can be")
    if more > len(tail):
        tail = store.get(info.key, ByteRange(size - more, size))
    return read_table(tail, size, where=where)


def _checked(said: DataKey, key: str, table: SectionTable, info: ObjectInfo) -> Tabled:
    named = sections_of(Bundle(key, info.size_bytes, table.level), table)
    if not len(table):
        raise ValueError("it has no section")
    queues = {
        (queue, incarnation)
        for queue, incarnation in zip(named.queues, named.incarnations, strict=True)
    }
    first = int(named.parts.rows["queue_offset"][0])
    is_mine = {
        "bundle": said.level == table.level,
        "topic": said.level == table.level and {q.topic for q, _ in queues} == {said.topic},
        "queue": queues == {(said.queue, said.incarnation)} and said.begins == first,
    }
    if not is_mine[said.kind]:
        raise ValueError("it lies under a key that is not its own")
    return Tabled(said, named, info.modified_ms)


def _salvaged(store: ObjectStore, info: ObjectInfo, said: DataKey, key: str, why: str) -> Tabled:
    """From a table whose footer is no help."""
    size = info.size_bytes
    level = said.level if said.level >= 0 else LAST_LEVEL  # nobody goes on by what was merged
    tail = store.get(info.key, ByteRange(max(0, size - SEARCHED_BYTES), size)) if size else b""
    found = _checked(said, key, find_table(tail, size, level, where=info.key), info)
    return replace(found, salvaged=f"{why}; its table proves itself")
