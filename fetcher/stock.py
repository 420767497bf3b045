"""What is here of a tier and what is on its way, shared by all readers.

Contract
    A thing (a run of records, or the layout of a part) is *claimed* before it is asked for: room is reserved, and
    whoever wants it from then on waits for the same load. When its bytes are there they are checked and decoded in the
    thread that brought them, put into the cache, and only then is the claim over. A load that fails gives its room back
    and is forgotten.

    ``lock`` guards everything, the streams included. Requests are begun without it, since their answers may come at
    once.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from fetcher.cache import ByteCache, Entry, Shelf
from fetcher.claims import INDEX, Claim, Key, key_of, plan_claims, whole_claim
from fetcher.layout import PartLayout
from fetcher.loading import Job, Load, Loader
from fetcher.runs import Run, compact
from fetcher.streams import Stream
from tiered.log.consume_queue import ITEM_BYTES
from tiered.log.decode import decode_items, decode_records

if TYPE_CHECKING:
    from collections.abc import Callable

    from fetcher.memory import Memory
    from fetcher.settings import FetchSettings
    from fetcher.streams import Beside
    from tiered.clock import Clock
    from tiered.log.parts import Part, SectionRange
    from tiered.log.view import LifeView
    from tiered.model import MessageQueue, QueueOffset

PAUSE_SECONDS = 0.2
"""How long nothing is read ahead for a reader after that has failed, lest each batch ask for the same again."""

Thing = Run | PartLayout
Begun = list[tuple[Claim, Load[Thing]]]
NOTHING: Begun = []


@dataclass(slots=True, eq=False)
class Waiting:
    """One read that finds nothing here.

    Attributes:
        has_waited: For whatever.
        has_queued: It is in the row of those who wait for room.
        may_fail: What was read ahead and failed has not been asked for again yet.
    """

    has_waited: bool = False
    has_queued: bool = False
    may_fail: bool = True


class Stock:
    """See the module's contract.

    Attributes:
        lock: Held by the caller wherever a method says so.
        room: Notified when a load has ended.
        cache: What is here; with the lock held.
        unread_bytes: What was read ahead and dropped before anybody had it, so far.
        hits: Reads that were served at once, so far.
        waits: Reads that had to wait, so far.
        is_closed: Nothing is asked for any more.
    """

    def __init__(
        self,
        loader: Loader,
        memory: Memory,
        clock: Clock,
        settings: FetchSettings,
        go_on: Callable[[Stream], Begun],
    ) -> None:
        """Begin with nothing.

        Args:
            loader: Asks for bytes.
            memory: For records that are copied.
            clock: For times to live.
            settings: Limits.
            go_on: Called with the lock held when a part's index has come for a reader who is not waiting for it: what
                to read ahead now.
        """
        self._loader = loader
        self._memory = memory
        self._clock = clock
        self._settings = settings
        self._go_on = go_on
        self.lock = threading.Lock()
        self.room = threading.Condition(self.lock)
        self._waiting: deque[Waiting] = deque()
        self._loads: dict[Key, Load[Thing]] = {}
        self.unread_bytes = self.hits = self.waits = 0
        self.is_closed = False
        self.cache: ByteCache[Thing] = ByteCache(
            settings.cache_bytes,
            {
                Shelf.UNREAD: settings.unread_seconds,
                Shelf.READ: settings.read_seconds,
                Shelf.INDEX: settings.unread_seconds,
                Shelf.SPENT: settings.read_seconds,
            },
            settings.spent_bytes,
        )

    # With the lock held

    def layout(self, part: Part) -> PartLayout | None:
        """See ``fetcher.claims.Known``."""
        entry = self.cache.get(key_of(part, INDEX))
        return cast("PartLayout", entry.value) if entry is not None else None

    def is_known(self, key: Key) -> bool:
        """See ``fetcher.claims.Known``."""
        return self._load(key) is not None or self.cache.get(key) is not None

    def find(self, part: Part, start: QueueOffset) -> Entry[Thing] | None:
        """The run that holds a queue offset of a part, if it is here."""
        layout = self.layout(part)
        if layout is None:
            return None
        index = self.cache.get(key_of(part, INDEX))
        if index is not None:
            self.cache.use(index, self._clock.monotonic_s())
        return self.cache.get(key_of(part, layout.block_of(start)))

    def on_its_way(self, part: Part, start: QueueOffset) -> Load[Thing] | None:
        """The load that a reader of a queue offset has to wait for next, if there is one."""
        layout = self.layout(part)
        block = INDEX if layout is None else layout.block_of(start)
        return self._load(key_of(part, block))

    def _load(self, key: Key) -> Load[Thing] | None:
        load = self._loads.get(key)
        return None if load is None or load.is_over else load

    def claim(
        self,
        stream: Stream,
        view: LifeView,
        start: QueueOffset,
        window: int,
        *,
        urgent: bool = False,
    ) -> Begun:
        """Plan what a reader needs next, and claim as much of it as there is room for; then ``begin`` it.

        Args:
            stream: The reader.
            view: What it reads. (Another read of this stream may have gone on to a newer one.)
            start: Where it stands.
            window: Bytes from there on.
            urgent: It waits for the first of it.
        """
        if self._waiting and not urgent:
            return []
        plan = plan_claims(view, start, window, self, self._settings)
        begun: Begun = []
        stream.asked = plan.asked
        for claim in plan.claims:
            if begun and claim.layout is None and self.is_known(key_of(claim.part, INDEX)):
                continue  # it comes along with what was claimed a moment ago
            has_room, dropped = self.cache.reserve(claim.size_bytes)
            self._lose(dropped)
            if not has_room:
                stream.asked = min(stream.asked, claim.part.log_offset)
                break
            load: Load[Thing] = Load(stream, urgent and not begun, claim.size_bytes)
            self._loads.update(dict.fromkeys(claim.keys, load))
            begun.append((claim, load))
            if stream.sweep is not None and claim.layout is None and claim.blocks:
                begun += self._beside(stream.sweep, claim.part, load)
        return begun

    def _beside(self, sweep: Beside, part: Part, leader: Load[Thing]) -> Begun:
        """Claim what lies beside a section and is wanted by the same reader, as far as there is room."""
        begun: Begun = []
        for stream, one in sweep.beside(part, self.is_known):
            claim = whole_claim(one, self._settings)
            if not self.cache.reserve_gently(claim.size_bytes):
                break
            load: Load[Thing] = Load(stream, False, claim.size_bytes, leader=leader)
            self._loads.update(dict.fromkeys(claim.keys, load))
            begun.append((claim, load))
        return begun

    # Who waits for room gets it in turn, or a large record would wait for ever behind small ones

    def claim_urgently(
        self, waiting: Waiting, stream: Stream, view: LifeView, start: QueueOffset, window: int
    ) -> Begun:
        """Claim what a reader waits for; nothing when others have waited longer, or there is no room: it is in the row."""
        begun: Begun = []
        if not self._waiting or self._waiting[0] is waiting:
            begun = self.claim(stream, view, start, window, urgent=True)
        if not begun and not waiting.has_queued:
            waiting.has_queued = True
            self._waiting.append(waiting)
        return begun

    def step_out(self, waiting: Waiting) -> None:
        """It does not wait for room any more."""
        waiting.has_queued = False
        self._waiting.remove(waiting)
        self.room.notify_all()

    def expire(self, now_s: float) -> None:
        """Drop what has outlived its time."""
        self._lose(self.cache.expire(now_s))

    def _lose(self, dropped: list[Entry[Thing]]) -> None:
        for entry in dropped:
            self.unread_bytes += entry.size_bytes
            if isinstance(entry.owner, Stream) and isinstance(entry.value, Run):
                entry.owner.lose(entry.value.batch.log_offset)

    # Without it

    def resize(self, bytes_max: int) -> None:
        """Have another budget: what is too much is dropped, as for whatever comes."""
        with self.lock:
            self._lose(self.cache.resize(bytes_max))
            self.room.notify_all()

    def begin(self, begun: Begun) -> None:
        """Ask for what was claimed."""
        if begun:
            self._loader.begin([self._job(claim, load) for claim, load in begun])

    def hurry(self, load: Load[Thing]) -> None:
        """Somebody waits for it now."""
        self._loader.hurry(load)

    def forsake(self, stream: Stream) -> None:
        """A reader has gone elsewhere: drop what was read ahead for it, and do not send what was not sent."""
        with self.lock:
            for entry in self.cache.of_owner(stream):
                self.unread_bytes += entry.size_bytes
                self.cache.drop(entry)
            loads = {id(x): x for x in self._loads.values() if x.stream is stream}.values()
        for load in loads:
            if not load.is_urgent:
                self._loader.cancel(load)

    def _job(self, claim: Claim, load: Load[Thing]) -> Job[Thing]:
        part, layout = claim.part, claim.layout
        wanted: list[SectionRange] = []
        if layout is None:
            wanted.append(part.index)
            if claim.blocks and part.log_bytes:
                wanted.append(part.log)
        else:
            begin, end = layout.span(claim.blocks)
            if end > begin:
                wanted.append(part.log.part_of(begin - part.log_offset, end - part.log_offset))
        return Job(
            load,
            wanted,
            lambda pieces: self._arrive(claim, load, pieces),
            lambda error: self._end(claim, load, error),
        )

    def _arrive(self, claim: Claim, load: Load[Thing], pieces: list[memoryview]) -> Thing:
        """Make of the bytes what was wanted, and put it into the cache."""
        layout, run = claim.layout, None
        if layout is None:
            layout = self._lay_out(claim.part, pieces.pop(0))
        if claim.blocks:
            data = pieces[0] if pieces else memoryview(b"")
            run = self._decode(cast("Stream", load.stream).queue, layout, claim, data)
        now_s = self._clock.monotonic_s()
        with self.lock:
            self.cache.release(load.size_bytes)
            load.size_bytes = 0
            if self.is_closed:
                return layout if run is None else run
            if claim.layout is None:
                key = key_of(claim.part, INDEX)
                self.cache.put(Entry(layout, (key,), layout.size_bytes, shelf=Shelf.INDEX), now_s)
            if run is not None:
                keys = [key for key in claim.keys if key[-1] != INDEX]
                entry: Entry[Thing] = Entry(run, keys, run.size_bytes, owner=load.stream)
                self.cache.put(entry, now_s)
        return layout if run is None else run

    def _lay_out(self, part: Part, raw: memoryview) -> PartLayout:
        assert len(raw) == part.count * ITEM_BYTES
        items = decode_items(part, part.queue_offset, raw, where=self._loader.prefix)
        return PartLayout.of(part, items, self._settings.block_bytes)

    def _decode(
        self, queue: MessageQueue, layout: PartLayout, claim: Claim, data: memoryview
    ) -> Run:
        part, where = layout.part, self._loader.prefix
        begin = part.log_offset if claim.layout is None else layout.span(claim.blocks)[0]
        items = layout.items_of(claim.blocks)
        if claim.layout is not None:
            items = (
                items.copied()
            )  # else the arrays of the whole index would stay as long as this run
        return Run.of(
            decode_records(queue, part, items, compact(data, self._memory), begin, where=where)
        )

    def _end(self, claim: Claim, load: Load[Thing], error: BaseException | None) -> None:
        """It is here, or will not come."""
        begun: Begun = []
        stream = cast("Stream", load.stream)
        now_s = self._clock.monotonic_s()
        with self.lock:
            self.cache.release(load.size_bytes)
            for key in claim.keys:
                if self._loads.get(key) is load:
                    del self._loads[key]
            self.room.notify_all()
            if error is not None:
                stream.asked = min(stream.asked, claim.part.log_offset)
                if not isinstance(error, CancelledError) and not load.is_urgent:
                    stream.paused_s = now_s + PAUSE_SECONDS
            elif not claim.blocks and not load.is_urgent:
                begun = self._go_on(stream)
        self.begin(begun)
