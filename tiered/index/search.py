"""One lookup on one state of a tier: units, newest first, until nothing newer can come."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from backends.errors import ObjectNotFoundError
from tiered.errors import DataError
from tiered.format.key_index import BUCKET_BITS_MAX
from tiered.format.record import decode_record
from tiered.index.asked import TIME_MAX, Lookup, Wish
from tiered.index.candidates import Candidate, Hit, LifeView, LifeViews
from tiered.index.extract import extract_keys
from tiered.index.hashing import key_hash, topic_seed
from tiered.log.indexed import uncovered
from tiered.log.state import Gap, TierState
from tiered.model import QueueOffset

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered.format.key_index import Items
    from tiered.index.objects import IndexObjects
    from tiered.log.parts import IndexObject
    from tiered.log.reader import TierBatch
    from tiered.model import MessageQueue

RUN_ITEMS: Final = 2048
"""Items read at once of a key that has more (64 KiB)."""
Spread = Callable[
    [Callable[[Candidate], "Hit | None"], Sequence[Candidate]], Iterable["Hit | None"]
]
"""``map``, or that of an executor."""


@dataclass(frozen=True, slots=True)
class Means:
    """What a lookup works with.

    Attributes:
        views: Lives of queues, for reading messages.
        objects: The index objects, and the filters in memory.
        spread: Fetches messages.
        read_bytes: How much of what is not indexed is read at once, about.
    """

    views: LifeViews
    objects: IndexObjects
    spread: Spread
    read_bytes: int


@dataclass(frozen=True, slots=True)
class _Unit:
    """What may hold the key, and the newest time that may come of it."""

    newest_ms: int
    run: Callable[[Search], None]


class Search:
    """One lookup on one state."""

    def __init__(self, means: Means, state: TierState, wish: Wish, *, gone_is_damage: bool) -> None:
        """Ask nothing yet.

        Args:
            means: What it works with.
            state: What the journal says.
            wish: What is looked for.
            gone_is_damage: An object that is gone is damage; else an ``ObjectNotFoundError``.
        """
        self._objects = means.objects
        self._spread = means.spread
        self._read_bytes = means.read_bytes
        self._state = state
        self._wish = wish
        self._gone_is_damage = gone_is_damage
        self._hash = key_hash(wish.topic, wish.key)
        self._hits: dict[tuple[MessageQueue, int, int], Hit] = {}
        self._found = Lookup()
        self._scan_left = wish.scan_bytes_max
        self._views = {
            (queue, number): view
            for (queue, number), view in means.views.of(state, wish.topic).items()
            if wish.every_life or number == len(state.queues[queue]) - 1
        }

    def run(self) -> Lookup:
        """Do it."""
        units = sorted([*self._indexes(), *self._tails()], key=lambda unit: -unit.newest_ms)
        for unit in units:
            if unit.newest_ms < self._oldest_wanted():
                break
            unit.run(self)
        hits = sorted(self._hits.values(), key=lambda hit: hit.order, reverse=True)
        self._found.hits = hits[: self._wish.count]
        return self._found

    def _oldest_wanted(self) -> int:
        """Nothing that is older than this can be among the newest any more."""
        times = sorted((hit.store_ms for hit in self._hits.values()), reverse=True)
        count = self._wish.count
        return times[count - 1] if len(times) >= count else -TIME_MAX

    # -- index objects --------------------------------------------------------------------------

    def _indexes(self) -> Iterator[_Unit]:
        for index in self._state.indexes:
            if index.count and self._wish.wants(index.store_min_ms, index.store_max_ms):
                lives = self._lives_of(index)
                if lives:
                    yield _Unit(index.store_max_ms, _AskIndex(index, lives))

    def _lives_of(self, index: IndexObject) -> dict[int, list[LifeView]]:
        """The wanted lives that an object covers, by their number in it."""
        found: dict[int, list[LifeView]] = {}
        for number, cover in enumerate(index.covers):
            if cover.queue.topic == self._wish.topic:
                views = [
                    view
                    for (queue, _), view in self._views.items()
                    if queue == cover.queue and view.life.incarnation == cover.incarnation
                ]
                if views:
                    found[number] = views
        return found

    def ask(self, index: IndexObject, lives: dict[int, list[LifeView]]) -> None:
        """Take the items of one object."""
        with self._noting():
            loaded = self._objects.load(index)
            start, end = loaded.filter.find(self._hash)
            self._found.objects_read += start < end
            is_ordered = loaded.filter.bits == BUCKET_BITS_MAX
            while start < end:
                stop = min(end, start + RUN_ITEMS)
                items = self._objects.items(index, loaded, start, stop)
                if self._take(index, items, lives) and is_ordered:
                    break
                start = stop

    def _take(self, index: IndexObject, items: Items, lives: dict[int, list[LifeView]]) -> bool:
        """Fetch what items point at; True: there are enough, and the rest of these is older."""
        wish = self._wish
        times = items["store_ms"].astype(np.int64)
        mine = items["hash_low"] == np.uint32(self._hash & 0xFFFF_FFFF)
        mine &= np.isin(items["queue"], list(lives))
        wanted = np.flatnonzero(mine & (times >= wish.from_ms) & (times < wish.until_ms))
        for begin in range(0, len(wanted), wish.count):
            if times[wanted[begin:]].max() < self._oldest_wanted():
                return True
            numbers = wanted[begin : begin + wish.count].tolist()
            some = [place for at in numbers for place in self._places(index, items[at], lives)]
            for hit in self._spread(self._fetch, some):
                if hit:
                    self._keep(hit)
        return False

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """Note what is damaged, and go on."""
        try:
            yield
        except DataError as error:
            self._found.damaged.append(error)
        except ObjectNotFoundError as error:
            if not self._gone_is_damage:
                raise
            do = "`tiered verify` shows what is missing; an index: `tiered rebuild --index`"
            damage = DataError(f"an object that the journal names is gone: {error}", do=do)
            self._found.damaged.append(damage)

    def _places(
        self, index: IndexObject, item: np.void, lives: dict[int, list[LifeView]]
    ) -> Iterator[Candidate]:
        number = int(item["queue"])
        offset = index.covers[number].start + int(item["queue_offset"])
        for view in lives[number]:
            if (view.queue, view.number, offset) not in self._hits:
                yield Candidate(
                    view.queue,
                    view.number,
                    offset,
                    int(item["log_offset"]),
                    int(item["size"]),
                    int(item["store_ms"]),
                )

    def _fetch(self, candidate: Candidate) -> Hit | None:
        found: list[Hit | None] = []
        with self._noting():
            view = self._views[candidate.queue, candidate.life]
            found.append(view.fetch(candidate, self._wish.key))
        return found[0] if found else None

    def _keep(self, hit: Hit) -> None:
        """Take a message, if its time is right."""
        if self._wish.from_ms <= hit.store_ms < self._wish.until_ms:
            self._hits[hit.queue, hit.life, hit.queue_offset] = hit

    # -- what is not indexed yet ------------------------------------------------------------------

    def _tails(self) -> Iterator[_Unit]:
        for view in self._views.values():
            for start, end in uncovered(view.life):
                for part in view.parts:
                    low, high = max(start, part.queue_offset), min(end, part.queue_end)
                    timed = part.store_max_ms >= 0
                    if low < high and timed and self._wish.wants(part.store_min_ms, part.store_max_ms):  # fmt: skip
                        yield _Unit(part.store_max_ms, _Scan(view, low, high))

    def scan(self, view: LifeView, start: int, end: int) -> None:
        """Look at every message in ``[start, end)``, as far as the limit goes."""
        at = start
        with self._noting():
            while at < end:
                if self._scan_left <= 0:
                    self._found.unscanned += end - at
                    return
                batch = view.reader.read(
                    QueueOffset(at), bytes_max=self._read_bytes, count_max=end - at
                )
                if batch is None or isinstance(batch, Gap):
                    return
                self._look_at(view, batch)
                at = batch.records.end_offset

    def _look_at(self, view: LifeView, batch: TierBatch) -> None:
        data = batch.records.data
        self._scan_left -= memoryview(data).nbytes
        for keys in extract_keys(batch.records, topic_seed(self._wish.topic)):
            mine = np.flatnonzero(keys.hashes == np.uint64(self._hash))
            places = keys.positions[mine].tolist(), keys.queue_offsets[mine].tolist()
            for position, offset in zip(*places, strict=True):
                stored = decode_record(data, position, check_crc=False)
                hit = view.hit(stored, batch.log_offset + position, offset, self._wish.key)
                if hit:
                    self._keep(hit)


@dataclass(frozen=True, slots=True)
class _AskIndex:
    index: IndexObject
    lives: dict[int, list[LifeView]]

    def __call__(self, search: Search) -> None:
        search.ask(self.index, self.lives)


@dataclass(frozen=True, slots=True)
class _Scan:
    view: LifeView
    start: int
    end: int

    def __call__(self, search: Search) -> None:
        search.scan(self.view, self.start, self.end)
