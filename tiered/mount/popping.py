"""Popping: messages are given to any consumer of a group that asks, hidden for a while, and acknowledged one by one.

Overview
    ``Popper`` answers pops out of the tier's queues, what is visible again first: there is no revive topic. What it knows of
    each group and queue is in ``tiered.mount.inflight``: all below a floor is acknowledged, which is the group's consumer
    offset, so that pulling and popping go on from one another.

Durability
    An acknowledgement is answered when an entry of the mount's journal has it: one entry for all that came meanwhile, one at
    a time, ``MountSettings.ack_s`` apart at least. While the store is out it is refused after ``ACK_S`` (``SYSTEM_BUSY``).
    What is in flight is in memory alone: after a crash that comes again at once, and no more than that. How often a message
    was given goes along with what is written next.

Ordering
    Without ``order`` none is promised, though queues are read forward. With it a queue gives nothing while one of the
    messages that it gave is hidden, and then all again that are not acknowledged.

Who acknowledges late, when the message was given to another one already, is believed: it was consumed. Who wants to change
how long it is hidden is not, or it would be given to a third one.

Limits: ``PopLimits``; requests that are held as of ``PullLimits``, counted by themselves. Of one loop.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from dataclasses import field, replace
from functools import partial
from itertools import pairwise
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

from backends.lazy_dataclass import dataclass
from tiered.errors import DataError
from tiered.format.message_forms import split_batch
from tiered.format.record import BODY_SIZE_AT, SYS_FLAG_AT, decode_record
from tiered.format.remoting import Command
from tiered.format.sysflag import (
    BORN_HOST_V6,
    INNER_BATCH,
    NEED_UNWRAP,
    STORE_HOST_V6,
    V6_EXTRA_BYTES,
)
from tiered.model import MessageQueue
from tiered.mount import protocol
from tiered.mount.answers import encoded
from tiered.mount.consumers import share_of
from tiered.mount.inflight import AckLog, QueuePops
from tiered.mount.name_servers import RETRY
from tiered.mount.offsets import ack_row
from tiered.mount.protocol import Code, RefusalError, as_json
from tiered.mount.pulling import make_filter, wake

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from fetcher.filters import Filter
    from tiered.mount.consumers import Queue
    from tiered.mount.name_servers import NameServers
    from tiered.mount.offsets import MountState, Name, PopName
    from tiered.mount.pulling import PullLimits, Served
    from tiered.mount.server import Exchange, Handler

COUNT_MAX: Final = 32
"""Messages of one pop, as brokers have it."""
HIDDEN_MS_MAX: Final = 30 * 24 * 3600 * 1000
ORDERED: Final = 999
"""The number in place of a revive queue's by which clients know that a message was popped in order."""
ANY_QUEUE: Final = -1
RETRY_TURN: Final = 5
"""Every so many pops retry topics of an old broker come first, else last."""
PULL, POP = "PULL", "POP"
_RECONSUME: Final = Struct(">i")


@dataclass(frozen=True, slots=True)
class PopLimits:
    """Limits of popping."""

    in_flight_max: int = 10_000  # messages of a group in a queue, as brokers have it
    all_in_flight_max: int = 200_000  # of all groups and queues
    states_max: int = 100_000  # of groups in queues


# -- requests --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pop:
    """What is asked."""

    group: str  # who asks
    topic: str  # of which topic
    queue_id: int  # of which queue; ``ANY_QUEUE``: of any
    count: int  # messages at most
    hidden_ms: int  # how long they are hidden
    until_s: float  # how long it may be held
    wanted: Filter | None  # which messages; None: all
    is_ordered: bool  # nothing of a queue while something of it is hidden
    attempt: str  # the same when a request is repeated


@dataclass(slots=True)
class Popped:
    """What a pop has found so far."""

    body: list[bytes | memoryview]  # records
    starts: list[str]  # ``startOffsetInfo``
    offsets: list[str]  # ``msgOffsetInfo``
    count: int = 0  # messages
    size_bytes: int = 0  # of their records
    popped_ms: int = 0  # when they were
    error: str = ""  # why a queue could not be read


@dataclass(slots=True)
class Taking:
    """What is taken from one queue."""

    count: int  # messages that there is room for still
    size_bytes: int  # likewise
    until_s: float  # when reading ends
    error: str = ""  # why it could not be read
    is_over: bool = False
    found: list[tuple[int, memoryview]] = field(default_factory=list)  # queue offsets and records

    def add(self, offset: int, raw: memoryview) -> None:
        """One more message."""
        self.found.append((offset, raw))
        self.count -= 1
        self.size_bytes -= len(raw)
        self.is_over |= self.count <= 0 or self.size_bytes <= 0


@dataclass(frozen=True, slots=True)
class Handle:
    """By what a receiver names a message that it was given: the beginning of ``extraInfo``."""

    popped_ms: int  # when it was given
    is_ordered: bool

    @classmethod
    def of(cls, text: str) -> Handle:
        """Of ``extraInfo``: start offset, pop time, invisible time, revive queue, and what names the message."""
        words = text.split(" ")
        try:
            _, popped_ms, _, revive_id = map(int, words[:4])
        except ValueError as error:
            raise RefusalError(Code.MESSAGE_ILLEGAL, f"no handle: {text[:100]!r}") from error
        return cls(popped_ms, revive_id == ORDERED)


class Popper:
    """Answers what clients ask that pop."""

    def __init__(
        self,
        served: Served,
        kept: MountState,
        *,
        is_kept: bool,
        pulls: PullLimits,
        limits: PopLimits | None = None,
    ) -> None:
        """Begin with what the journal says.

        Args:
            is_kept: Somebody writes what ``log`` says.
        """
        self.log = AckLog(is_kept=is_kept)
        self.log.modes.update(kept.modes)
        self.limits = limits or PopLimits()
        self._served, self._pulls = served, pulls
        self._store, self._topics = served.store, served.topics
        self._offsets, self._clock = served.offsets, served.clock
        self._states: dict[PopName, QueuePops] = {}
        for name, row in kept.acks.items():
            self._states[name] = QueuePops(served.offsets.get(*name) or 0, row)
        self._in_flight = 0
        self._turn = 0
        self._held: dict[Name, set[asyncio.Future[None]]] = {}
        self._held_count = 0
        self._is_closing = False

    def handlers(self) -> Mapping[int, Handler]:
        """By code."""
        return {
            protocol.POP_MESSAGE: self.pop,
            protocol.ACK_MESSAGE: self.acknowledge,
            protocol.BATCH_ACK_MESSAGE: self.acknowledge_many,
            protocol.CHANGE_MESSAGE_INVISIBLETIME: self.change_hidden,
            protocol.NOTIFICATION: self.notify,
            protocol.POLLING_INFO: self.polling_info,
        }

    @property
    def held(self) -> int:
        """Requests that are held now."""
        return self._held_count

    @property
    def in_flight(self) -> int:
        """Messages that were given and not acknowledged, as last counted: it is no less."""
        return self._in_flight

    # -- popping ----------------------------------------------------------------------------------

    async def pop(self, asked: Exchange) -> Command:
        """POP_MESSAGE.

        Raises:
            RefusalError: It asks for what there is not, or nothing can be read.
        """
        wanted = self._parse(asked.request)
        while True:
            await asked.make_room(self._pulls.bytes_max)
            found = await self._find(wanted)
            asked.resize(found.size_bytes)
            if found.count:
                return self._answer(wanted, found)
            if found.error:
                raise RefusalError(Code.SYSTEM_ERROR, found.error)
            asked.slim()
            if (code := await self._hold((wanted.group, wanted.topic), wanted.until_s)) is not None:
                return Command(code, remark=code.name, fields=self._times(wanted, found))

    def _parse(self, request: Command) -> Pop:
        group, topic, queue_id = self._place(request)
        expression = request.fields.get("exp") or "*"
        kind = request.fields.get("expType") or "TAG"
        return Pop(
            group,
            topic,
            queue_id,
            min(max(protocol.whole(request, "maxMsgNums", COUNT_MAX), 1), COUNT_MAX),
            min(max(protocol.whole(request, "invisibleTime", 60_000), 0), HIDDEN_MS_MAX),
            self._until_s(request),
            make_filter(expression, kind),
            protocol.flag(request, "order", otherwise=False),
            request.fields.get("attemptId") or "",
        )

    def _place(self, request: Command) -> tuple[str, str, int]:
        """Group, topic, queue id (or ``ANY_QUEUE``) of a request; they are there."""
        group, topic = protocol.name(request, "consumerGroup"), protocol.name(request, "topic")
        queue_id = protocol.whole(request, "queueId", ANY_QUEUE)
        self._topics.require(topic, None if queue_id < 0 else queue_id)
        return group, topic, queue_id

    def _until_s(self, request: Command) -> float:
        """How long a request may be held, by what its client has waited already."""
        left_ms = protocol.whole(request, "pollTime", 0)
        born_ms = protocol.whole(request, "bornTime", 0)
        if born_ms:
            left_ms -= max(self._clock.now_ms() - born_ms, 0)
        return self._clock.monotonic_s() + min(left_ms / 1000, self._pulls.hold_s_max)

    def _queues(
        self, group: str, topic: str, queue_id: int, *, is_ordered: bool
    ) -> Iterator[MessageQueue]:
        """Which queues are looked at, in order: from another one on each time, and what the old broker had to revive."""
        self._turn += 1
        count = self._topics.queues[topic]
        own = [MessageQueue(topic, (self._turn + number) % count) for number in range(count)]
        if queue_id >= 0:
            own = [MessageQueue(topic, queue_id)]
        retries = [] if is_ordered else [
            MessageQueue(name, number)
            for name in retry_topics(group, topic)
            for number in range(self._topics.queues.get(name, 0))
        ]  # fmt: skip
        is_first = self._turn % RETRY_TURN == 0
        yield from (*retries, *own) if is_first else (*own, *retries)

    async def _find(self, wanted: Pop) -> Popped:
        found = Popped([], [], [])
        until_s = self._clock.monotonic_s() + self._pulls.read_s
        place = wanted.group, wanted.topic, wanted.queue_id
        for queue in self._queues(*place, is_ordered=wanted.is_ordered):
            if found.count >= wanted.count or found.size_bytes >= self._pulls.bytes_max:
                break
            state = self._begin(wanted, queue)
            if state is None:
                continue
            state.is_read = True
            try:
                await self._find_in(wanted, queue, state, found, until_s)
            finally:
                state.is_read = False
                if state.has_more(self._clock.now_ms(), self._store.max_offset(*queue)):
                    self._wake(place[:2])  # who found it read by us
        return found

    def _begin(self, wanted: Pop, queue: MessageQueue) -> QueuePops | None:
        """The state to pop from; None: there is nothing to be had."""
        bounds = self._store.bounds(*queue)
        if bounds is None or bounds.end <= 0:
            return None
        reset = self._offsets.take_reset(wanted.group, *queue)
        state = self._state(wanted.group, queue)
        if reset is not None:  # also where the group's offset was there before
            state.restart(reset)
            self.log.note((wanted.group, *queue))
        now_ms = self._clock.now_ms()
        if state.is_read or self._in_flight >= self.limits.all_in_flight_max:
            return None
        if wanted.is_ordered:
            if state.is_blocked(now_ms, wanted.attempt):
                return None
            state.rewind()
        return state if state.has_more(now_ms, int(bounds.end)) else None

    def _state(self, group: str, queue: MessageQueue) -> QueuePops:
        """A group's state of a queue, as its offset is. A group without one begins where the queue does."""
        name = (group, *queue)
        floor = self._offsets.get(*name)
        if floor is None:
            floor = max(self._served.ends(*queue)[0], 0)
            self._offsets.commit(*name, floor)
        state = self._states.get(name)
        if state is None:
            if len(self._states) >= self.limits.states_max:
                raise RefusalError(Code.SYSTEM_BUSY, "too many groups pop here")
            state = self._states[name] = QueuePops(floor)
        if state.floor != floor:
            state.follow(floor)
            self.log.note(name)
        return state

    async def _find_in(
        self, wanted: Pop, queue: MessageQueue, state: QueuePops, found: Popped, until_s: float
    ) -> None:
        """Pop from one queue: what is visible again, then what was never given."""
        taken = Taking(
            wanted.count - found.count, self._pulls.bytes_max - found.size_bytes, until_s
        )
        turns = state.turns
        for start, end in state.again(self._clock.now_ms(), taken.count):
            await self._take(wanted, queue, state, taken, (start, end), is_fresh=False)
        while not taken.is_over and len(state.given) < self.limits.in_flight_max:
            start, end = state.fresh()
            if start >= self._store.max_offset(*queue):
                break
            await self._take(wanted, queue, state, taken, (start, end), is_fresh=True)
        found.error = found.error or taken.error
        # Who had something may have acknowledged it while we read, or hidden it again.
        free = [one for one in taken.found if state.is_free(one[0])]
        if free and state.turns == turns:
            self._give(wanted, queue, state, found, free)

    async def _take(
        self,
        wanted: Pop,
        queue: MessageQueue,
        state: QueuePops,
        taken: Taking,
        where: tuple[int, int],
        *,
        is_fresh: bool,
    ) -> None:
        """Read once in a range, and settle what holds nothing for the group."""
        start, end = where
        if taken.is_over or self._clock.monotonic_s() >= taken.until_s:
            taken.is_over = True
            return
        turns = state.turns
        read = partial(
            self._store.get_message,
            wanted.group if is_fresh else "",  # what is read in order is read ahead
            *queue,
            start,
            max_count=min(taken.count, end - start),
            max_bytes=taken.size_bytes,
            filter=wanted.wanted if queue.topic == wanted.topic else None,
            timeout_s=taken.until_s - self._clock.monotonic_s(),
        )
        result = await self._served.run(read)
        got = [(int(at), raw) for at, raw in result.messages() if start <= at < end]
        behind = min(int(result.next_begin), end)
        if result.error is not None:  # damage is not stepped over
            behind = got[-1][0] + 1 if got else start
        if behind <= start:
            why = result.error or result.status.name
            taken.error, taken.is_over = f"{queue} cannot be read at {start}: {why}", True
            return
        if state.turns != turns:
            taken.is_over = True
            return
        self._pass_over((wanted.group, *queue), state, start, behind, [at for at, _ in got])
        for at, raw in got:
            # What is in flight is not new, though a mount before may have given it.
            if state.is_free(at) and not (is_fresh and at in state.given):
                taken.add(at, raw)
        if is_fresh:
            state.next = max(state.next, behind)

    def _pass_over(
        self, name: PopName, state: QueuePops, start: int, end: int, places: Sequence[int]
    ) -> None:
        """What lies between messages is nothing for the group: holes, what expired, what the filter does not take."""
        is_changed = False
        for low, high in pairwise((start - 1, *places, end)):
            if low + 1 < high:
                is_changed |= state.settle(low + 1, high)
        if is_changed:
            self._moved(name, state)

    def _give(
        self,
        wanted: Pop,
        queue: MessageQueue,
        state: QueuePops,
        found: Popped,
        taken: Sequence[tuple[int, memoryview]],
    ) -> None:
        # Of all queues the same, by which clients name all that they were given.
        now_ms = found.popped_ms = found.popped_ms or int(self._clock.now_ms())
        places = [place for place, _ in taken]
        before = state.give(places, now_ms + wanted.hidden_ms, now_ms)
        self._in_flight += len(places)
        if wanted.is_ordered:
            state.attempt = wanted.attempt
        if any(before):
            self.log.note((wanted.group, *queue))
        records = [
            given_out(raw, *one) for (_, raw), *one in zip(taken, places, before, strict=True)
        ]
        kind = kind_of(queue.topic, wanted.topic)
        found.body += records
        found.count += len(records)
        found.size_bytes += sum(map(len, records))
        found.starts.append(f"{kind} {queue.queue_id} {min(places)}")
        found.offsets.append(f"{kind} {queue.queue_id} {','.join(map(str, places))}")

    def _answer(self, wanted: Pop, found: Popped) -> Command:
        said = {
            **self._times(wanted, found),
            "startOffsetInfo": ";".join(found.starts),
            "msgOffsetInfo": ";".join(found.offsets),
        }
        return Command(Code.SUCCESS, remark="FOUND", fields=said, body=tuple(found.body))

    def _times(self, wanted: Pop, found: Popped) -> dict[str, str]:
        rest = 0
        for number in range(self._topics.queues[wanted.topic]):
            state = self._states.get((wanted.group, wanted.topic, number))
            if state is not None:
                rest += max(self._store.max_offset(wanted.topic, number) - state.next, 0)
        said = {
            "popTime": found.popped_ms or self._clock.now_ms(),
            "invisibleTime": wanted.hidden_ms,
            "reviveQid": ORDERED if wanted.is_ordered else 0,
            "restNum": rest,
        }
        return {name: str(value) for name, value in said.items()}

    # -- acknowledging ----------------------------------------------------------------------------

    async def acknowledge(self, asked: Exchange) -> Command:
        """ACK_MESSAGE. Answered when it is durable."""
        group, topic, queue_id = self._place(asked.request)
        offset = protocol.whole(asked.request, "offset")
        Handle.of(protocol.text(asked.request, "extraInfo"))
        self._require_message(topic, queue_id, offset)
        await self._settle({(group, topic, queue_id): [offset]})
        return Command(Code.SUCCESS)

    async def acknowledge_many(self, asked: Exchange) -> Command:
        """BATCH_ACK_MESSAGE; what there is not is passed over, as a broker does."""
        told: dict[PopName, list[int]] = {}
        for one in protocol.objects(protocol.document(asked.request).get("acks")):
            name, offsets = self._batch(one)
            told.setdefault(name, []).extend(offsets)
        if not told:
            raise RefusalError(Code.NO_MESSAGE, "nothing is acknowledged")
        await self._settle(told)
        return Command(Code.SUCCESS)

    def _batch(self, said: Mapping[str, Any]) -> tuple[PopName, list[int]]:
        """A queue, and offsets of it, of a ``BatchAck``, whose fields have short names, or long ones."""
        group = protocol.checked_name(said.get("c") or said.get("consumerGroup"), "consumerGroup")
        topic = protocol.checked_name(said.get("t") or said.get("topic"), "topic")
        kind = str(said.get("r", said.get("retry", "0")))
        if kind in {"1", "2"}:
            topic = retry_topics(group, topic)[int(kind) - 1]
        queue_id, start = (
            said.get("q", said.get("queueId")),
            said.get("so", said.get("startOffset")),
        )
        bits = said.get("b", said.get("bitSet"))
        if not isinstance(queue_id, int) or not isinstance(start, int) or not isinstance(bits, str):
            raise RefusalError(
                Code.MESSAGE_ILLEGAL, "a batch without queueId, startOffset or bitSet"
            )
        self._topics.require(topic, queue_id)
        low, end = self._served.ends(topic, queue_id)
        offsets = [start + at for at in bits_of(bits, self.limits.in_flight_max)]
        return (group, topic, queue_id), [offset for offset in offsets if low <= offset < end]

    def _require_message(self, topic: str, queue_id: int, offset: int) -> None:
        low, end = self._served.ends(topic, queue_id)
        if not low <= offset < end:
            why = f"offset is illegal, key:{topic}@{queue_id}, commit:{offset}, store:{low}~{end}"
            raise RefusalError(Code.NO_MESSAGE, why)

    async def _settle(self, told: Mapping[PopName, Iterable[int]]) -> None:
        for name, offsets in told.items():
            state = self._state(name[0], MessageQueue(name[1], name[2]))
            changed = [offset for offset in offsets if state.settle(offset, offset + 1)]
            if changed:
                self._moved(name, state)
            if state.attempt and not state.given:
                self._wake(name[:2])
        # Also what was acknowledged before, and is not durable yet: its first answer may have been lost.
        if any(map(self.log.is_pending, told)):
            await self.log.durable()

    def _moved(self, name: PopName, state: QueuePops) -> None:
        self._offsets.commit(*name, state.floor)
        self.log.note(name)

    def change_hidden(self, asked: Exchange) -> Command:
        """CHANGE_MESSAGE_INVISIBLETIME."""
        request = asked.request
        group, topic, queue_id = self._place(request)
        offset = protocol.whole(request, "offset")
        hidden_ms = min(max(protocol.whole(request, "invisibleTime"), 0), HIDDEN_MS_MAX)
        handle = Handle.of(protocol.text(request, "extraInfo"))
        self._require_message(topic, queue_id, offset)
        state = self._state(group, MessageQueue(topic, queue_id))
        now_ms = int(self._clock.now_ms())
        # In order a batch is named by the time of its pop until all of it is settled.
        named_ms = handle.popped_ms if handle.is_ordered else now_ms
        if not state.hide(offset, handle.popped_ms, now_ms + hidden_ms, named_ms):
            raise RefusalError(Code.NO_MESSAGE, f"offset {offset} is not hidden for who asks")
        said = {
            "popTime": named_ms,
            "invisibleTime": now_ms + hidden_ms - named_ms,
            "reviveQid": ORDERED if handle.is_ordered else 0,
        }
        return Command(Code.SUCCESS, fields={name: str(value) for name, value in said.items()})

    def take(self, rows: Sequence[Sequence[Any]]) -> tuple[list[list[Any]], list[list[Any]]]:
        """What is to be written now with these rows of offsets: of states, and of modes."""
        self._follow(rows)
        changed, modes = self.log.take()
        acks = [
            ack_row(name, state.kept())
            for name in sorted(changed)
            if (state := self._states.get(name)) is not None
        ]
        return acks, [[*name, *self.log.modes[name]] for name in sorted(modes)]

    def _follow(self, rows: Sequence[Sequence[Any]]) -> None:
        """Offsets that are written now: nothing counts of what was acknowledged of queues that were put back."""
        for group, topic, ids, offsets in rows:
            for queue_id, offset in zip(ids, offsets, strict=True):
                state = self._states.get((group, topic, queue_id))
                if state is not None and state.floor != offset:
                    state.follow(offset)
                    self.log.note((group, topic, queue_id))

    # -- waiting ----------------------------------------------------------------------------------

    async def notify(self, asked: Exchange) -> Command:
        """NOTIFICATION: whether a pop would find something; held as that would be."""
        group, topic, queue_id = self._place(asked.request)
        until_s = self._until_s(asked.request)
        asked.slim()
        is_full = False
        while not (has_any := self._has_any(group, topic, queue_id)):
            if (code := await self._hold((group, topic), until_s)) is not None:
                is_full = code is Code.POLLING_FULL
                break
        said = {"hasMsg": has_any, "pollingFull": is_full}
        return Command(
            Code.SUCCESS, fields={name: str(value).lower() for name, value in said.items()}
        )

    def polling_info(self, asked: Exchange) -> Command:
        """POLLING_INFO: how many requests are held."""
        group, topic, _ = self._place(asked.request)
        held = len(self._held.get((group, topic), ()))
        return Command(Code.SUCCESS, fields={"pollingNum": str(held)})

    async def _hold(self, name: Name, until_s: float) -> Code | None:
        """Wait until there may be something; else with what it ends."""
        loop, left_s = asyncio.get_running_loop(), until_s - self._clock.monotonic_s()
        if self._is_closing or left_s <= 0:
            return Code.POLLING_TIMEOUT
        if self._held_count >= self._pulls.held_max:
            return Code.POLLING_FULL
        turn: asyncio.Future[None] = loop.create_future()
        self._held.setdefault(name, set()).add(turn)
        self._held_count += 1
        timer = loop.call_later(left_s, wake, turn)
        try:
            await turn
        finally:
            timer.cancel()
            self._held_count -= 1
            waiting = self._held.get(name, set())
            waiting.discard(turn)
            if not waiting:
                self._held.pop(name, None)
        return None

    def tidy(self) -> None:
        """Count what is in flight, and forget what the groups' offsets say as well."""
        pending = self.log.is_pending
        self._states = {
            name: state
            for name, state in self._states.items()
            if not state.is_idle or pending(name)
        }
        self._in_flight = sum(len(state.given) for state in self._states.values())

    def look(self) -> None:
        """Wake who waits for what is there now, or is visible again. No request."""
        for name in list(self._held):
            if self._has_any(*name, ANY_QUEUE):
                self._wake(name)

    def _has_any(self, group: str, topic: str, queue_id: int) -> bool:
        now_ms = self._clock.now_ms()
        for queue in self._queues(group, topic, queue_id, is_ordered=False):
            end = self._store.max_offset(*queue)
            state = self._states.get((group, *queue))
            floor = self._offsets.get(group, *queue) or 0
            if end > 0 and (state.has_more(now_ms, end) if state is not None else floor < end):
                return True
        return False

    def _wake(self, name: Name) -> None:
        for turn in self._held.get(name, ()):
            wake(turn)

    def close(self) -> None:
        """Hold nobody any more."""
        self._is_closing = True
        for name in list(self._held):
            self._wake(name)


class Assignments:
    """How groups consume: which queues are a client's that leaves that to brokers, and whether it pulls or pops."""

    def __init__(
        self,
        log: AckLog,
        served: Served,
        names: NameServers,
    ) -> None:
        """Know what the journal says."""
        self._log, self._topics, self._names = log, served.topics, names
        self._consumers = served.consumers

    def handlers(self) -> Mapping[int, Handler]:
        """By code."""
        return {
            protocol.QUERY_ASSIGNMENT: self.assignment,
            protocol.SET_MESSAGE_REQUEST_MODE: self.set_mode,
        }

    async def assignment(self, asked: Exchange) -> Command:
        """QUERY_ASSIGNMENT."""
        said = protocol.document(asked.request)
        topic = protocol.checked_name(said.get("topic"), "topic")
        group = protocol.checked_name(said.get("consumerGroup"), "consumerGroup")
        client = protocol.checked_name(said.get("clientId"), "clientId")
        queues = await self._names.queues(topic)
        mode, sharing = self._log.modes.get((group, topic), (PULL, 0))
        if said.get("messageModel") != "BROADCASTING":
            clients = self._consumers.clients(group)
            strategy = str(said.get("strategyName") or "AVG")
            if mode == POP:
                queues = popped_by(client, clients, queues, strategy, sharing)
            else:
                queues = share_of(client, clients, queues, strategy)
        told = [
            {
                "messageQueue": {"brokerName": broker, "queueId": number, "topic": name},
                "mode": mode,
                "attachments": None,
            }
            for broker, name, number in queues
        ]
        return Command(Code.SUCCESS, body=(as_json({"messageQueueAssignments": told}),))

    async def set_mode(self, asked: Exchange) -> Command:
        """SET_MESSAGE_REQUEST_MODE: whether a group pulls or pops. Kept as offsets are; answered when it is."""
        said = protocol.document(asked.request)
        topic = protocol.checked_name(said.get("topic"), "topic")
        group = protocol.checked_name(said.get("consumerGroup"), "consumerGroup")
        mode, sharing = said.get("mode"), said.get("popShareQueueNum") or 0
        if topic.startswith(RETRY):
            raise RefusalError(Code.NO_PERMISSION, "retry topic is not allowed to set mode")
        self._topics.require(topic)
        if mode not in {PULL, POP} or not isinstance(sharing, int):
            raise RefusalError(Code.INVALID_PARAMETER, f"no mode {mode!r:.40}")
        self._log.set_mode((group, topic), mode, max(sharing, 0))
        await self._log.durable()
        return Command(Code.SUCCESS)


def popped_by(
    client: str, clients: Sequence[str], queues: Sequence[Queue], strategy: str, sharing: int
) -> list[Queue]:
    """Which queues a client pops from: all of them (by brokers), or its own and those of so many that follow it."""
    ids = sorted(clients)
    if sharing <= 0 or sharing >= len(ids) - 1:
        return sorted({(broker, topic, ANY_QUEUE) for broker, topic, _ in queues})
    if client not in ids:
        return []
    at = ids.index(client)
    if len(ids) > len(queues):
        return [sorted(queues, key=lambda queue: (queue[1], queue[0], queue[2]))[at % len(queues)]]
    its = (ids[(at + number) % len(ids)] for number in range(sharing + 1))
    return list(
        dict.fromkeys(queue for one in its for queue in share_of(one, ids, queues, strategy))
    )


def retry_topics(group: str, topic: str) -> tuple[str, str]:
    """Where a broker keeps what was popped and not acknowledged: the older name and the newer one."""
    return f"{RETRY}{group}_{topic}", f"{RETRY}{group}+{topic}"


def kind_of(topic: str, popped: str) -> int:
    """How clients name the topic that a message was popped from: 0: the one that they asked for."""
    if topic == popped:
        return 0
    return 2 if topic.endswith(f"+{popped}") else 1


def bits_of(text: str, count_max: int) -> list[int]:
    """The bits that are set in a ``BitSet`` as JSON has it."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RefusalError(Code.MESSAGE_ILLEGAL, "a bitSet that is not base64") from error
    found = [
        8 * at + bit for at, byte in enumerate(data) if byte for bit in range(8) if byte >> bit & 1
    ]
    if len(found) > count_max:
        raise RefusalError(Code.MESSAGE_ILLEGAL, f"more than {count_max} messages of a queue")
    return found


def given_out(raw: memoryview, offset: int, times: int) -> bytes | memoryview:
    """A record as it is given: alone, if it lies in an inner batch, and with how often it was given before."""
    flags = int.from_bytes(raw[SYS_FLAG_AT : SYS_FLAG_AT + 4], "big")
    if flags & INNER_BATCH:
        for record in split_batch(decode_record(raw)):
            if record.queue_offset == offset:
                alone = record.sys_flag & ~(INNER_BATCH | NEED_UNWRAP)
                made = replace(record, sys_flag=alone, size=0, reconsume_times=times)
                return encoded(made)
        raise DataError(f"an inner batch without the message at {offset}")
    if not times:
        return raw
    at = (
        BODY_SIZE_AT
        - 12
        + V6_EXTRA_BYTES * (bool(flags & BORN_HOST_V6) + bool(flags & STORE_HOST_V6))
    )
    copy = bytearray(raw)
    (known,) = _RECONSUME.unpack_from(copy, at)
    _RECONSUME.pack_into(copy, at, known + times)
    return bytes(copy)
