"""Pulling: a request becomes a read of the message store, and its outcome an answer as a broker gives it.

Overview: checks in a broker's order, then a read in a thread of the pool, then the records to the socket as they are
stored. A reader in order is given at once what several pulls take, and answered out of that (``Handout``). One at the end
of a queue is held when it asks for that (long polling), until the queue has more, its time is over, or the mount ends;
then it is read once more, and answered as it is.

Where this differs from a broker, and why:
    * What cannot be read now (the tier does not answer), or is damaged, is ``SYSTEM_ERROR`` with the reason: the client
      says so and tries again, and nothing is skipped in silence.
    * A filter's expression that is none is refused, also where a broker would give out everything.
    * SQL92 filters work without being switched on.

Limits: ``PullLimits``; what is read takes of the connection's and the server's room until it is sent. A read ends at its
deadline; its thread may end later, when the connection is gone.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import Counter
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final, TypeVar
from weakref import ref

import numpy as np

from backends.lazy_dataclass import dataclass
from fetcher.filters import FilterError, TagFilter, compile_filter
from fetcher.statuses import COMPACTED, GetResult, GetStatus, Scan, ScanLimits, Side, judge_offset
from tiered.errors import DataError
from tiered.format import properties
from tiered.format.block import bytes_at
from tiered.format.record import SYS_FLAG_AT, RecordError, decode_record
from tiered.format.remoting import Command
from tiered.format.sysflag import INNER_BATCH, NEED_UNWRAP
from tiered.model import MessageQueue, QueueBounds, QueueOffset
from tiered.mount import protocol
from tiered.mount.protocol import Code, RefusalError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Executor

    import numpy.typing as npt

    from fetcher.filters import Filter
    from fetcher.runs import Run
    from fetcher.statuses import Taken
    from tiered.api.local_and_tier import OpenMessageStore
    from tiered.clock import Clock
    from tiered.local.interface import RecordBatch
    from tiered.log.decode import TierBatch
    from tiered.log.parts import Incarnation
    from tiered.log.state import TierState
    from tiered.mount.consumers import Consumers, Locks
    from tiered.mount.name_servers import MountedTopics
    from tiered.mount.offsets import ConsumerOffsets
    from tiered.mount.server import Exchange, Handled

T = TypeVar("T")
COMMITS, SUSPENDS, SUBSCRIBES, HAS_CLASS_FILTER = 1, 2, 4, 8
"""Bits of a pull request's ``sysFlag``."""
FILTERS_MAX: Final = 1024
"""Compiled filters that are kept."""
FILTER_CHARS_MAX: Final = 4096
"""Of the expression of one that is kept: compiled, the largest there may be takes a MiB."""
LARGE_FILTER_HELD_AS: Final = 256
"""A request that is held with a filter of its own counts as so many, or 20,000 of them would hold 20 GiB."""
HANDOUT_PULLS: Final = 8
"""For how many pulls a reader in order is given something at once. Of more than 500 numbers NumPy gives the interpreter's
lock away, and gets it back late; clients ask for 32 messages as a rule."""
HANDOUT_S: Final = 1.0
"""For how long: less than what was read is kept (``FetchSettings.read_seconds``), or slow readers would lose what they are
in."""
HANDOUTS_MAX: Final = 4096
FOUND: Final = GetStatus.FOUND.name
_CODES: Final = {
    GetStatus.NO_MATCHED_MESSAGE: Code.PULL_RETRY_IMMEDIATELY,
    GetStatus.MESSAGE_WAS_REMOVING: Code.PULL_RETRY_IMMEDIATELY,
    GetStatus.OFFSET_OVERFLOW_ONE: Code.PULL_NOT_FOUND,
    GetStatus.OFFSET_OVERFLOW_BADLY: Code.PULL_OFFSET_MOVED,
    GetStatus.OFFSET_TOO_SMALL: Code.PULL_OFFSET_MOVED,
}
_EMPTY: Final = frozenset({GetStatus.NO_MATCHED_LOGIC_QUEUE, GetStatus.NO_MESSAGE_IN_QUEUE})


@dataclass(frozen=True, slots=True)
class PullLimits:
    """Limits of pulling."""

    count_max: int = 1024  # messages of one answer
    bytes_max: int = 256 * 1024  # bytes of its records, but for the first one
    held_max: int = 20_000
    """Requests held at the end of a queue; further ones are refused as too busy."""
    hold_s_max: float = 30.0  # how long one is held at most
    read_s: float = 8.0  # deadline of a read; clients wait for 10 s


@dataclass(frozen=True, slots=True)
class Pull:
    """What is asked."""

    group: str  # who asks
    queue: MessageQueue
    offset: int  # from which queue offset on
    count: int  # messages at most
    size_bytes: int  # bytes of their records at most
    hold_s: float  # how long it may be held at the queue's end; 0: not
    wanted: Filter | None  # which messages; None: all
    held_as: int = 1  # as how many it counts while it is held

    def may_wait(self, result: GetResult) -> bool:
        """Whether the answer may wait for the next message of the queue."""
        return self.hold_s > 0 and is_at_end(result, self.offset)


@dataclass(slots=True, eq=False)
class Handout:
    """Records that a reader goes on in by itself: they were given to it at once, and are cut here, pull by pull."""

    run: ref[Run]  # what they are of; it is not kept in memory for us
    is_simple: bool
    # start, end: Queue offsets.
    """Each item is a record of its own, and they lie one behind the other: an answer is one chunk of the run."""
    start: int
    end: int
    # low, high: Where the queue begins and ends.
    low: QueueOffset
    high: QueueOffset
    until_s: float  # when the fetcher is to be asked again, which forgets what nobody reads

    @classmethod
    def of(cls, run: Run, batch: TierBatch, incarnation: Incarnation, until_s: float) -> Handout:
        """Of a batch of a run."""
        records, low, high = batch.records, incarnation.min_offset, incarnation.commit_offset
        is_simple = are_neighbours(records)
        return cls(ref(run), is_simple, batch.base_offset, batch.end_offset, low, high, until_s)

    def has(self, offset: int) -> bool:
        """Whether a queue offset is in it."""
        return self.start <= offset < self.end

    def cut(self, wanted: Pull, now_s: float) -> tuple[memoryview, int] | None:
        """The records that a read would give, and the queue offset behind them; None: the fetcher has to be asked."""
        run, offset = self.run(), wanted.offset
        if run is None or not self.is_simple or now_s > self.until_s or not self.has(offset):
            return None
        first, end, ends = offset - run.base, self.end - run.base, run.ends
        low, last = run.starts[first], first + wanted.count
        most = low + wanted.size_bytes
        if last > end:
            if self.end < run.end and ends[end] <= most:
                return None  # the one behind it would belong to the answer, too
            last = end
        if ends[last - 1] > most:
            # As many as fit, but one at least.
            last = max(bisect_right(ends, most, first, last), first + 1)
        return run.data[low : ends[last - 1]], run.base + last


def are_neighbours(records: RecordBatch) -> bool:
    """Whether each item is a record of its own, none an inner batch, and they lie one behind the other."""
    starts, ends = records.positions, records.positions + records.sizes
    if int(records.sizes.min()) <= 0 or starts[1:].tobytes() != ends[:-1].tobytes():
        return False
    flags = bytes_at(records.data, ">i4")[starts + SYS_FLAG_AT]
    return not int(np.bitwise_or.reduce(flags)) & (INNER_BATCH | NEED_UNWRAP)


@dataclass(frozen=True, slots=True)
class Served:
    """What is served, and to whom: all that answers has this. Of one loop."""

    store: OpenMessageStore
    topics: MountedTopics  # what there is
    consumers: Consumers  # who consumes
    locks: Locks  # of orderly consumers
    offsets: ConsumerOffsets  # where groups are
    executor: Executor  # for what may ask the tier
    clock: Clock

    async def run(self, work: Callable[[], T]) -> T:
        """Have it done in a thread of the pool."""
        return await asyncio.get_running_loop().run_in_executor(self.executor, work)

    def ends(self, topic: str, queue_id: int) -> tuple[int, int]:
        """Where a queue begins and ends; 0 and 0 of one that there is not."""
        bounds = self.store.bounds(topic, queue_id)
        return (0, 0) if bounds is None else (int(bounds.min), int(bounds.end))


class Puller:
    """Answers pulls, and holds those at the end of a queue. Of one loop."""

    def __init__(self, served: Served, limits: PullLimits) -> None:
        """Nobody pulls yet."""
        self.limits = limits
        self.found: Counter[GetStatus] = Counter()  # how many reads ended how, by status
        # Queue offsets that were passed over since they hold no message, but for what was compacted.
        self.skipped = 0
        self.read_bytes: Counter[Side] = Counter()  # of records given out, by where they were read
        self._served, self._store, self._clock = served, served.store, served.clock
        self._held: dict[MessageQueue, set[asyncio.Future[None]]] = {}
        self._held_ends: dict[MessageQueue, int] = {}
        self._held_count, self._held_room = 0, self.limits.held_max
        self._is_closing = False
        self._seen: TierState | None = None
        self._handouts: dict[tuple[str, MessageQueue], Handout] = {}
        self._handed: TierState | None = None

    @property
    def held(self) -> int:
        """Requests that are held now."""
        return self._held_count

    def pull(self, asked: Exchange) -> Handled:
        """PULL_MESSAGE and LITE_PULL_MESSAGE. What is at hand, as nearly all is to who reads in order, is answered at once.

        Raises:
            RefusalError: It asks for what there is not, or it cannot be read.
        """
        wanted = self._parse(asked.request)
        reset = self._served.offsets.take_reset(wanted.group, *wanted.queue)
        if reset is not None:
            return self._moved_to(wanted.queue, reset)
        # A filter may look at much.
        if wanted.wanted is None and (served := self._try_now(asked, wanted)) is not None:
            return served
        result = self._known(wanted)
        if result is None or wanted.may_wait(result):
            return self._pull(asked, wanted, result)
        return self._answer(wanted, result)

    def _moved_to(self, queue: MessageQueue, reset: int) -> Command:
        """A person has set the group's offset."""
        fields = places(reset, *self._served.ends(*queue))
        return Command(Code.PULL_OFFSET_MOVED, remark="OFFSET_RESET", fields=fields)

    # -- what is asked ----------------------------------------------------------------------------

    def _parse(self, request: Command) -> Pull:
        group, topic = protocol.name(request, "consumerGroup"), protocol.name(request, "topic")
        queue_id, offset = (
            protocol.whole(request, "queueId"),
            protocol.whole(request, "queueOffset"),
        )
        flags = protocol.whole(request, "sysFlag", 0)
        count = protocol.whole(request, "maxMsgNums", 32)
        size_bytes = protocol.whole(request, "maxMsgBytes", self.limits.bytes_max)
        hold_s = protocol.whole(request, "suspendTimeoutMillis", 0) / 1000
        self._served.topics.require(topic, queue_id)
        wanted, is_one_for_all = self._filter(request, group, topic, flags)
        committed = protocol.whole(request, "commitOffset", -1)
        if flags & COMMITS and committed >= 0:
            self._served.offsets.commit(group, topic, queue_id, committed)
        return Pull(
            group,
            MessageQueue(topic, queue_id),
            offset,
            min(max(count, 1), self.limits.count_max),
            min(max(size_bytes, 1), self.limits.bytes_max),
            min(hold_s, self.limits.hold_s_max) if flags & SUSPENDS else 0.0,
            wanted,
            1 if is_one_for_all else LARGE_FILTER_HELD_AS,
        )

    def _filter(
        self, request: Command, group: str, topic: str, flags: int
    ) -> tuple[Filter | None, bool]:
        """The filter, and whether it is one that all who ask for the same share."""
        if flags & SUBSCRIBES:
            expression = request.fields.get("subscription") or "*"
            kind = request.fields.get("expressionType") or "TAG"
        else:
            version = protocol.whole(request, "subVersion", 0)
            found = self._served.consumers.subscription(group, topic, version)
            expression, kind = found.expression, found.kind
        if flags & HAS_CLASS_FILTER:
            return None, True
        return make_filter(expression, kind), is_shared(expression)

    # -- reading ----------------------------------------------------------------------------------

    async def _pull(self, asked: Exchange, wanted: Pull, result: GetResult | None) -> Command:
        if result is None:
            result = await self._read(asked, wanted)
        if wanted.may_wait(result):
            result = await self._hold(asked, wanted, result)
        return self._answer(wanted, result)

    def _answer(self, wanted: Pull, result: GetResult) -> Command:
        self.found[result.status] += 1
        for chunk in result.chunks:
            self.read_bytes[chunk.side] += int(chunk.records.sizes[chunk.items].sum())
        if result.missing:
            # Compaction is not a loss: a reader is given what has taken the place.
            lost = (gap for gap in result.missing if gap.reason != COMPACTED)
            self.skipped += sum(gap.end - gap.start for gap in lost)
        return answer(result, wanted.offset)

    def _try_now(self, asked: Exchange, wanted: Pull) -> Command | None:
        """Nearly every pull: the next records of a reader in order, of what it was given to go on in. None: it has to wait.

        It answers what a read by the message store would, which takes several times as long.
        """
        if self._store.local is not None:
            return (
                None  # what is at hand is of the tier, and where it is read is a matter of policy
            )
        state = self._store.opened.state
        if state is not self._handed:
            # Also where a queue begins and ends is told of it.
            self._handouts.clear()
            self._handed = state
        name = (wanted.group, wanted.queue)
        handout = self._handouts.get(name)
        cut = None if handout is None else handout.cut(wanted, asked.began_s)
        if handout is None or cut is None:
            if handout is not None and not handout.is_simple and handout.has(wanted.offset):
                return self._scan_on(asked, wanted, handout)
            handout = self._handout(state, wanted, asked.began_s)
            if handout is None:
                return None
            cut = handout.cut(wanted, asked.began_s)
            if cut is None:
                return self._scan_on(asked, wanted, handout)
        # Room is given back when the answer is sent: those of many never exceed the budget.
        if not asked.try_room(cut[0].nbytes):
            return None
        self.found[GetStatus.FOUND] += 1
        self.read_bytes[Side.TIER] += cut[0].nbytes
        fields = places(cut[1], handout.low, handout.high)
        return Command(Code.SUCCESS, remark=FOUND, fields=fields, body=(cut[0],))

    def _handout(self, state: TierState, wanted: Pull, now_s: float) -> Handout | None:
        """What a reader in order goes on in from here: what the fetcher has for it at hand."""
        incarnation = state.incarnation(wanted.queue)
        if (
            incarnation is None
            or not incarnation.min_offset <= wanted.offset < incarnation.commit_offset
            or not self._store.is_tiers_alone(wanted.queue)
        ):
            return None
        size_bytes, count = wanted.size_bytes * HANDOUT_PULLS, wanted.count * HANDOUT_PULLS
        given = self._at_hand_of(wanted, QueueOffset(wanted.offset), size_bytes, count)
        if given is None:
            return None
        if len(self._handouts) >= HANDOUTS_MAX:
            self._handouts.clear()
        made = Handout.of(*given, incarnation, now_s + HANDOUT_S)
        self._handouts[wanted.group, wanted.queue] = made
        return made

    def _scan_on(self, asked: Exchange, wanted: Pull, handout: Handout) -> Command | None:
        """The same where records are not simply one behind the other: holes, and inner batches, have to be looked at.

        Through holes, and between them, it goes on with what is at hand, or a range that was compacted would cost a round
        trip for each few items, whatever is left of them.
        """
        if not asked.try_room(wanted.size_bytes):
            return None
        scan = Scan(QueueOffset(wanted.offset), ScanLimits(wanted.count, wanted.size_bytes), None)
        while not scan.is_over or (scan.met_holes and not scan.is_spent):
            given = self._at_hand_of(wanted, scan.at, *scan.next_read())
            if given is None:
                break
            scan.take(given[1].records, Side.TIER)
        if scan.at == wanted.offset:
            asked.resize(0)
            return None
        asked.resize(scan.size_bytes)
        status = GetStatus.FOUND if scan.chunks else GetStatus.NO_MATCHED_MESSAGE
        low, high = handout.low, handout.high
        chunks, missing = tuple(scan.chunks), tuple(scan.missing)
        found = GetResult(status, scan.at, low, high, chunks, missing, scan.size_bytes)
        return self._answer(wanted, found)

    def _at_hand_of(
        self, wanted: Pull, at: QueueOffset, bytes_max: int, count_max: int
    ) -> tuple[Run, TierBatch] | None:
        at_hand = self._store.opened.fetcher.at_hand
        return at_hand(wanted.group, wanted.queue, at, bytes_max=bytes_max, count_max=count_max)

    def _known(self, wanted: Pull) -> GetResult | None:
        """Where there is nothing to be read is known without asking the tier."""
        bounds = self._store.bounds(wanted.queue.topic, wanted.queue.queue_id)
        judged = judge_offset(QueueOffset(wanted.offset), bounds)
        if judged is None:
            return None
        known = bounds or QueueBounds(QueueOffset(-1), QueueOffset(-1))
        return GetResult(*judged, known.min, known.end)

    async def _read(self, asked: Exchange, wanted: Pull) -> GetResult:
        """Read, with room for what comes."""
        known = self._known(wanted)
        if known is not None:
            return known
        await asked.make_room(wanted.size_bytes)
        # From now on, though all threads may be busy for a while: who asked would be gone when one begins.
        read = partial(self._get, wanted, self._clock.monotonic_s() + self.limits.read_s)
        result = await self._served.run(read)
        asked.resize(result.size_bytes)
        return result

    def _get(self, wanted: Pull, until_s: float) -> GetResult:
        return self._store.get_message(
            wanted.group,
            wanted.queue.topic,
            wanted.queue.queue_id,
            wanted.offset,
            max_count=wanted.count,
            max_bytes=wanted.size_bytes,
            filter=wanted.wanted,
            timeout_s=max(until_s - self._clock.monotonic_s(), 0.0),
        )

    async def _hold(self, asked: Exchange, wanted: Pull, result: GetResult) -> GetResult:
        """Wait at the end of a queue until there is more."""
        until_s = self._clock.monotonic_s() + wanted.hold_s
        asked.slim()
        while is_at_end(result, wanted.offset) and self._may_hold(until_s):
            if self._end(wanted.queue) == result.max_offset:  # else it moved before this was held
                await self._wait(wanted, int(result.max_offset), until_s)
            result = await self._read(asked, wanted)
        return result

    def _may_hold(self, until_s: float) -> bool:
        if self._is_closing or self._clock.monotonic_s() >= until_s:
            return False
        if self._held_room <= 0:
            # Who is told that nothing was found asks again at once, for ever; who is refused waits a while.
            raise RefusalError(Code.SYSTEM_BUSY, "no more pulls are held (--held-requests)")
        return True

    async def _wait(self, wanted: Pull, end: int, until_s: float) -> None:
        loop, queue = asyncio.get_running_loop(), wanted.queue
        turn: asyncio.Future[None] = loop.create_future()
        waiting = self._held.setdefault(queue, set())
        waiting.add(turn)
        # The smallest: who was held before the queue moved must be woken, also if another came after it.
        self._held_ends[queue] = min(end, self._held_ends.get(queue, end))
        self._held_count += 1
        self._held_room -= wanted.held_as
        timer = loop.call_later(until_s - self._clock.monotonic_s(), wake, turn)
        try:
            await turn
        finally:
            timer.cancel()
            self._held_count -= 1
            self._held_room += wanted.held_as
            waiting.discard(turn)
            # Another set may stand there already: of those who came after this one was woken.
            if not waiting and self._held.get(queue) is waiting:
                del self._held[queue], self._held_ends[queue]

    def look(self) -> None:
        """Wake who waits at the end of a queue that has moved. No request; nothing at all while the tier stands still."""
        state = self._store.opened.state
        if state is self._seen:
            return
        self._seen = state
        for queue, end in list(self._held_ends.items()):
            if self._end(queue) != end:
                self._wake(queue)

    def moved(self, queue: MessageQueue) -> None:
        """A queue has more, of which the tier's journal says nothing."""
        if queue in self._held:
            self._wake(queue)

    def _end(self, queue: MessageQueue) -> int:
        return self._store.max_offset(queue.topic, queue.queue_id)

    def close(self) -> None:
        """Hold nobody any more."""
        self._is_closing = True
        for queue in list(self._held):
            self._wake(queue)

    def _wake(self, queue: MessageQueue) -> None:
        # Out of the table before they run: who is held again joins a new set.
        self._held_ends.pop(queue)
        for turn in self._held.pop(queue):
            wake(turn)


def is_at_end(result: GetResult, offset: int) -> bool:
    """Whether the next message of the queue, if there ever is one, is the one that is asked for."""
    is_empty = result.status in _EMPTY and not offset
    return is_empty or result.status is GetStatus.OFFSET_OVERFLOW_ONE


def wake(turn: asyncio.Future[None]) -> None:
    """Let one go on."""
    if not turn.done():
        turn.set_result(None)


def is_shared(expression: str) -> bool:
    """Whether all who ask for the same have one compiled filter, which is kept."""
    return len(expression) <= FILTER_CHARS_MAX


def make_filter(expression: str, kind: str) -> Filter | None:
    """The filter; None: every message."""
    try:
        found = (_compiled if is_shared(expression) else _compile)(expression, kind)
    except FilterError as error:
        raise RefusalError(Code.SUBSCRIPTION_PARSE_FAILED, str(error)) from error
    except ValueError as error:
        raise RefusalError(Code.SUBSCRIPTION_PARSE_FAILED, f"no such filter: {kind}") from error
    return None if isinstance(found, TagFilter) and found.names is None else found


def _compile(expression: str, kind: str) -> Filter:
    return compile_filter(expression, kind, strict=False)  # type: ignore[arg-type] # it refuses others


_compiled = lru_cache(FILTERS_MAX)(_compile)


# -- answers --------------------------------------------------------------------------------------


def answer(result: GetResult, asked: int) -> Command:
    """What a broker answers to a read that ended so."""
    next_begin, code = int(result.next_begin), Code.SUCCESS
    if (
        result.status is not GetStatus.FOUND
    ):  # nearly all are, and members of an enum take long to hash
        next_begin, code = _unfound(result, asked)
    if result.chunks:
        next_begin = max(next_begin, _end_of_record(result.chunks[-1]))
    told = places(next_begin, int(result.min_offset), int(result.max_offset))
    return Command(code, remark=result.status.name, fields=told, body=gather(result.chunks))


def _unfound(result: GetResult, asked: int) -> tuple[int, Code]:
    """Where a reader goes on to whom nothing is given, and how it is told."""
    if result.status in {GetStatus.TRY_AGAIN, GetStatus.OFFSET_FOUND_NULL}:
        is_damaged = result.status is GetStatus.OFFSET_FOUND_NULL  # the store would step over it
        why = f"offset {result.next_begin - is_damaged} cannot be read: {result.error}"
        raise RefusalError(Code.SYSTEM_ERROR, why)
    if result.status in _EMPTY:
        return 0, Code.PULL_OFFSET_MOVED if asked else Code.PULL_NOT_FOUND
    return int(result.next_begin), _CODES[result.status]


def places(next_begin: int, low: int, end: int) -> dict[str, str]:
    """Fields of an answer to a pull: where to go on, and where the queue begins and ends."""
    return {
        "suggestWhichBrokerId": "0",
        "nextBeginOffset": str(next_begin),
        "minOffset": str(max(low, 0)),
        "maxOffset": str(max(end, 0)),
    }


def gather(chunks: tuple[Taken, ...]) -> list[memoryview]:
    """The stored bytes of what was found, neighbours in one piece, each record once."""
    found: list[memoryview] = []
    last = -1
    for chunk in chunks:
        records, items = chunk.records, chunk.items
        starts, sizes, places = records.positions, records.sizes, records.physical_offsets
        if len(items) < records.count:
            starts, sizes, places = starts[items], sizes[items], places[items]
        ends = starts + sizes
        is_known = 0 <= int(places[0]) == last
        last = int(places[-1])
        view = memoryview(records.data).cast("B")
        if not is_known and starts[1:].tobytes() == ends[:-1].tobytes():  # nearly always
            found.append(view[int(starts[0]) : int(ends[-1])])
        else:
            found += _rows(view, starts, ends, is_known=is_known)
    return found


def _rows(
    view: memoryview, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], *, is_known: bool
) -> Iterator[memoryview]:
    """Rows of neighbours; items of an inner batch share a record, and the first may have gone already."""
    is_new = np.append(not is_known, starts[1:] != starts[:-1])
    if is_known:
        is_new &= starts != starts[0]
    starts, ends = starts[is_new], ends[is_new]
    if len(starts):
        firsts = np.flatnonzero(np.append(True, starts[1:] != ends[:-1]))
        lasts = np.append(firsts[1:], len(starts)) - 1
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            yield view[int(starts[first]) : int(ends[last])]


def _end_of_record(chunk: Taken) -> int:
    """One past the last message of the last record: clients are given inner batches whole."""
    item = int(chunk.items[-1])
    data, begin = chunk.records.data, int(chunk.records.positions[item])
    view = memoryview(data).cast("B")
    flags = int.from_bytes(view[begin + SYS_FLAG_AT : begin + SYS_FLAG_AT + 4], "big")
    end = int(chunk.records.base_offset) + item + 1
    if not flags & (INNER_BATCH | NEED_UNWRAP):
        return end
    try:
        record = decode_record(data, begin)
        return record.queue_offset + int(record.properties.get(properties.INNER_NUM, "1"))
    except (RecordError, ValueError) as error:
        raise DataError(f"an inner batch that cannot be read: {error}") from error
