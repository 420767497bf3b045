"""A replica beside a living master: laggards read from the tier, and all else stays the master's.

Overview: a master with ``slaveReadEnable`` tells a consumer that is further behind than its memory holds to pull from the
broker with id 1 of the same name. The mount registers as that one. ``LiveMaster`` knows the master, by name servers, and
asks it; ``ReplicaPuller`` decides for each pull whether the tier answers it.

What is the tier's, of a queue: ``[min, commit)``. A consumer stays (we are its next broker) until it has read up to the
commit offset; then it goes to the master, which sends it here again only when it is behind by more than the master's memory.
These two marks are far apart, so it does not go to and fro.

What goes to the master at once, at the offset that was asked for: all at and above the commit offset; queues that the tier
does not have; offsets that it does not hold (gaps, damage, what was compacted), as far as the master has them; everything
for a while after the tier's store failed; a queue of which the tier has more than the master: their histories have parted.
No consumer is told of another offset because of us, unless what lies between is in neither place. What only the tier has any
more (below the master's minimum) is never left to the master, which would put the group at its own minimum: while it
cannot be read the client is told so, and asks again.

Who asks again for what it was sent away with does not follow (a client may be told to ask one broker only): its pulls are
passed on to the master, as are requests about offsets, locks and groups, so that there is one truth. We keep no offsets.

When the master is gone we stay, and serve what the tier has; pulls for more are held. Where brokers act for their master
(``enableSlaveActingMaster``) we leave the name servers until it is back: a master that starts would wait there for a
connection of replication from each that is registered, and name servers might name one of us as the master.

Limits: ``ASKED_MAX`` requests to the master at once, each with a deadline. A crash leaves nothing but a registration, which
name servers drop with the connection. Of one loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from backends.lazy_dataclass import dataclass
from fetcher.statuses import GetStatus
from tiered.addresses import address as parsed_address
from tiered.errors import FencedError, TieredStoreError
from tiered.format.remoting import SIZE_BYTES, Command, FrameError, decode, encode, frame_size
from tiered.model import MessageQueue
from tiered.mount import protocol
from tiered.mount.protocol import Code, RefusalError, as_json
from tiered.mount.pulling import Puller, places

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

    from fetcher.statuses import GetResult
    from tiered.clock import Clock
    from tiered.mount.acl import SigningKey
    from tiered.mount.name_servers import Identity
    from tiered.mount.pulling import Pull
    from tiered.mount.server import Exchange, Handled, Handler

_LOG = logging.getLogger("tiered.mount")
MASTER: Final = "0"
ASK_S: Final = 3.0
ASKED_MAX: Final = 1024
"""Requests to the master at once."""
LOOK_S: Final = 10.0
"""How long a queue's ends at the master are used before they are asked for again."""
LOOKS_MAX: Final = 64
"""So many such questions at once; others wait for their next pull."""
QUEUES_MAX: Final = 65_536
AGAIN_S: Final = 30.0
"""Who is sent to the master and asks for the same within so long does not go there."""
SICK_S: Final = 5.0
"""How long after the tier failed nothing is read from it that the master has, too."""
GONE_LOOK_S: Final = 1.0
PASSED: Final = (
    protocol.QUERY_CONSUMER_OFFSET,
    protocol.UPDATE_CONSUMER_OFFSET,
    protocol.SEARCH_OFFSET_BY_TIMESTAMP,
    protocol.GET_MAX_OFFSET,
    protocol.GET_MIN_OFFSET,
    protocol.GET_CONSUMER_LIST_BY_GROUP,
    protocol.LOCK_BATCH_MQ,
    protocol.UNLOCK_BATCH_MQ,
    protocol.QUERY_ASSIGNMENT,
    protocol.RESET_CONSUMER_OFFSET,
    protocol.GET_CONSUME_STATS,
    36,  # CONSUMER_SEND_MSG_BACK: what was read here has the place that it has in the master's log
)
"""Requests that the master answers, also when the replica is asked."""


class MasterError(Exception):
    """The master did not answer, or refused."""


@dataclass(frozen=True, slots=True)
class QueueAtMaster:
    """A queue as the master said that it is."""

    seen_s: float  # when
    low: int | None = None  # its first queue offset; None: it did not say
    has_parted: bool = False
    """The tier had more than the master: their messages are not the same."""


_EXPIRED: Final = frozenset({GetStatus.MESSAGE_WAS_REMOVING, GetStatus.OFFSET_TOO_SMALL})
NOT_ASKED: Final = QueueAtMaster(float("-inf"))


class LiveMaster:
    """The master beside which we are: who it is by name servers, and what it says."""

    def __init__(self, identity: Identity, clock: Clock, key: SigningKey | None = None) -> None:
        """Know nothing yet.

        Args:
            key: Signs what we ask ourselves; None: nothing does. What is passed on has its client's signature.
        """
        self.identity = identity  # as what we are known ourselves
        self.address = ""  # of the master; empty: no name server knows one
        self.is_acted_for = False  # brokers of this name act for their master when it is gone
        self.passed: Counter[int] = Counter()  # requests passed on, by code
        self.clock = clock
        self._key = key
        self._refusal = ""  # why the master last refused what we asked ourselves
        self._known: dict[str, str] = {}
        self._queues: dict[MessageQueue, QueueAtMaster] = {}
        self._looks: dict[MessageQueue, asyncio.Task[QueueAtMaster]] = {}
        self._opening = asyncio.Lock()
        self._opaque = count(1)
        self._asked: dict[int, asyncio.Future[Command]] = {}
        self._line: tuple[str, asyncio.StreamWriter, asyncio.Task[None]] | None = None

    # -- by name servers --------------------------------------------------------------------------

    def note(self, name_server: str, known: Mapping[str, Any]) -> None:
        """Take over what a name server knows of our name (``BrokerData``).

        FencedError: another broker has our id.
        """
        addresses = {
            str(key): str(value) for key, value in (known.get("brokerAddrs") or {}).items()
        }
        own = self.identity
        if addresses.get(own.broker_id, own.address) != own.address:
            raise FencedError(
                f"a broker with this id is registered: {own.broker} {own.broker_id} at {addresses[own.broker_id]}",
                where=f"name server {name_server}",
                do="take another --broker-id, and have groups be sent to it (mqadmin updateSubGroup -w)",
            )
        self.is_acted_for = bool(known.get("enableActingMaster"))
        self._known[name_server] = addresses.get(MASTER, "")
        # What a name server said that does not answer any more still counts.
        found = next(filter(None, self._known.values()), "")
        if found != self.address:
            if self.address:
                _LOG.warning("the master is %s now, and was %s", found or "gone", self.address)
            self.address = found
            self._queues.clear()

    @property
    def has_to_leave(self) -> bool:
        """Whether name servers must not know us now; see the module."""
        return self.is_acted_for and not self.address

    def fields(self) -> dict[str, str]:
        """What our registration says beside who we are: name servers keep that of the last registration."""
        return {"enableActingMaster": "true"} if self.is_acted_for else {}

    def registration(self, data_version: Mapping[str, int]) -> bytes:
        """The body of our registration. Topics are the master's to tell; a broker of one topic is not taken."""
        names = (self.identity.broker, self.identity.cluster, "SELF_TEST_TOPIC")
        config = {"readQueueNums": 1, "writeQueueNums": 1, "perm": 4}
        wrapper = {
            "dataVersion": data_version,
            "topicConfigTable": {name: {"topicName": name, **config} for name in names},
            "topicQueueMappingInfoMap": {},
        }
        return as_json({"topicConfigSerializeWrapper": wrapper, "filterServerList": []})

    # -- asking it --------------------------------------------------------------------------------

    async def ask(self, request: Command, timeout_s: float = ASK_S) -> Command:
        """Ask the master something; its answer, whatever its code.

        MasterError: it did not answer in time, or is asked too much already.
        """
        if not self.address or len(self._asked) >= ASKED_MAX:
            raise MasterError("none is known" if not self.address else "it is asked too much")
        opaque = next(self._opaque) & 0x7FFF_FFFF
        turn: asyncio.Future[Command] = asyncio.get_running_loop().create_future()
        self._asked[opaque] = turn
        try:
            async with asyncio.timeout(timeout_s):
                await self._write(replace(request, opaque=opaque))
                return await turn
        except (OSError, TimeoutError, FrameError) as error:
            raise MasterError(f"{self.address}: {str(error) or type(error).__name__}") from error
        finally:
            del self._asked[opaque]

    async def _ask_ourselves(self, code: int, **fields: str) -> Command:
        """Ask the master for what nobody asked us; MasterError: as of ``ask``, or it refused."""
        request = Command(code, fields=fields)
        answer = await self.ask(self._key.signed(request) if self._key else request)
        if answer.code:
            if answer.remark != self._refusal:
                _LOG.warning(
                    "the master refuses what the replica asks it itself (--master-credentials): %s",
                    answer.remark,
                )
            self._refusal = answer.remark
            raise MasterError(answer.remark)
        self._refusal = ""
        return answer

    async def tell(self, request: Command) -> None:
        """Tell the master something that it does not answer; MasterError: it cannot be reached."""
        try:
            async with asyncio.timeout(ASK_S):
                await self._write(replace(request, opaque=next(self._opaque) & 0x7FFF_FFFF))
        except (OSError, TimeoutError, FrameError) as error:
            raise MasterError(f"{self.address}: {str(error) or type(error).__name__}") from error

    async def _write(self, request: Command) -> None:
        async with self._opening:
            if self._line is None or self._line[0] != self.address:
                self.close()
                host, port = parsed_address(self.address)
                reader, writer = await asyncio.open_connection(host, port)
                reading = asyncio.create_task(self._read(reader))
                self._line = self.address, writer, reading
            writer = self._line[1]
        writer.writelines(encode(request))  # type: ignore[arg-type] # any buffer will do
        await writer.drain()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                size = frame_size(await reader.readexactly(SIZE_BYTES))
                answer = decode(await reader.readexactly(size))
                turn = self._asked.get(answer.opaque)
                if answer.is_answer and turn is not None and not turn.done():
                    turn.set_result(answer)
        except (OSError, FrameError, asyncio.IncompleteReadError) as error:
            self.close(ConnectionError(f"the connection has ended: {error}"))

    def close(self, error: Exception | None = None) -> None:
        """End the connection, and what waits for answers."""
        if self._line is not None:
            _, writer, reading = self._line
            self._line = None
            writer.transport.abort()
            if reading is not asyncio.current_task():
                reading.cancel()
            for turn in self._asked.values():
                if not turn.done():
                    turn.set_exception(error or ConnectionError("the connection has ended"))

    async def pass_on(self, asked: Exchange) -> Command:
        """Have the master answer, as it would its own client.

        RefusalError: it does not.
        """
        request = asked.request
        self.passed[request.code] += 1
        try:
            if request.is_oneway:
                await self.tell(request)
                return Command(Code.SUCCESS)
            return await self.ask(request)
        except MasterError as error:
            why = f"this is a replica, and its master does not answer: {error}"
            raise RefusalError(Code.SYSTEM_ERROR, why) from error

    def handlers(self) -> Mapping[int, Handler]:
        """By code."""
        return dict.fromkeys(PASSED, self.pass_on)

    # -- its queues -------------------------------------------------------------------------------

    def queue(self, queue: MessageQueue, commit: int) -> QueueAtMaster | None:
        """What it said of a queue, perhaps ``LOOK_S`` ago and more: then it is asked again. None: nothing yet.

        ``commit``: the tier's end as of now.
        """
        found = self._queues.get(queue)
        if not self.address:
            return found or NOT_ASKED
        if found is None or self.clock.monotonic_s() >= found.seen_s + LOOK_S:
            self._look(queue, commit)
        return found

    async def looked(self, queue: MessageQueue, commit: int) -> QueueAtMaster:
        """What it says of a queue of which it said nothing yet."""
        looking = self._look(queue, commit)
        return NOT_ASKED if looking is None else await asyncio.shield(looking)

    def _look(self, queue: MessageQueue, commit: int) -> asyncio.Task[QueueAtMaster] | None:
        looking = self._looks.get(queue)
        if looking is None and len(self._looks) < LOOKS_MAX:
            looking = self._looks[queue] = asyncio.create_task(self._looks_at(queue, commit))
        return looking

    async def _looks_at(self, queue: MessageQueue, commit: int) -> QueueAtMaster:
        asked = {"topic": queue.topic, "queueId": str(queue.queue_id)}
        now_s = self.clock.monotonic_s()
        found = QueueAtMaster(now_s)
        try:
            codes = (protocol.GET_MIN_OFFSET, protocol.GET_MAX_OFFSET)
            said = [await self._ask_ourselves(code, **asked) for code in codes]
            low, end = (int(answer.fields["offset"]) for answer in said)
            found = QueueAtMaster(now_s, low, commit > end)
        except (MasterError, LookupError, ValueError):
            pass  # it is asked again
        finally:
            del self._looks[queue]
        if len(self._queues) >= QUEUES_MAX:
            self._queues.clear()
        self._queues[queue] = found
        return found

    async def check(self) -> None:
        """Say what at the master keeps consumers from coming."""
        with contextlib.suppress(MasterError):
            said = await self._ask_ourselves(protocol.GET_BROKER_CONFIG)
            if "slaveReadEnable=false" in said.text().decode("utf-8", "replace").split():
                _LOG.warning(
                    "the master sends no consumer here: set slaveReadEnable=true at %s (mqadmin updateBrokerConfig)",
                    self.address,
                )


@dataclass(frozen=True, slots=True)
class AskedPlace:
    """Where a pull is, before anything else of it is looked at."""

    group: str  # who
    queue: MessageQueue  # where
    offset: int  # from which queue offset on


class ReplicaPuller(Puller):
    """Answers pulls from the tier, or sends them to the master."""

    master: LiveMaster
    handed_back = 0
    """Pulls that were sent to the master."""

    def beside(self, master: LiveMaster) -> None:
        """Whose replica this is; before the first pull."""
        self.master = master
        self._sent: dict[tuple[str, MessageQueue], tuple[int, float]] = {}
        self._sick_until_s = float("-inf")

    def pull(self, asked: Exchange) -> Handled:
        """PULL_MESSAGE and LITE_PULL_MESSAGE."""
        request = asked.request
        queue = MessageQueue(protocol.name(request, "topic"), protocol.whole(request, "queueId"))
        group = protocol.name(request, "consumerGroup")
        place = AskedPlace(group, queue, protocol.whole(request, "queueOffset"))
        known = self.master.queue(queue, self._commit(queue))
        if known is None:
            return self._pull_when_seen(asked, place)
        return self._decided(asked, place, known)

    async def _pull_when_seen(self, asked: Exchange, place: AskedPlace) -> Command:
        known = await self.master.looked(place.queue, self._commit(place.queue))
        found = self._decided(asked, place, known)
        return found if isinstance(found, Command) else await found

    def _decided(self, asked: Exchange, place: AskedPlace, known: QueueAtMaster) -> Handled:
        if not self._is_ours(place, known):
            return self._away(asked, place)
        try:
            found = super().pull(asked)
        except (RefusalError, TieredStoreError) as error:
            return self._failed(asked, place, known, error)
        if isinstance(found, Command):
            return self._stamped(place.queue, found)
        return self._awaited(asked, place, known, found)

    async def _awaited(
        self,
        asked: Exchange,
        place: AskedPlace,
        known: QueueAtMaster,
        work: Coroutine[None, None, Command],
    ) -> Command:
        try:
            return self._stamped(place.queue, await work)
        except (RefusalError, TieredStoreError) as error:
            asked.resize(0)
            found = self._failed(asked, place, known, error)
        return found if isinstance(found, Command) else await found

    def _failed(
        self, asked: Exchange, place: AskedPlace, known: QueueAtMaster, error: Exception
    ) -> Handled:
        """The tier cannot give what it has: the master can, unless it has it no more."""
        if _is_gone_there(place.offset, known):
            raise error
        return self._away(asked, place)

    def _commit(self, queue: MessageQueue) -> int:
        found = self._store.opened.state.incarnation(queue)
        return 0 if found is None else int(found.commit_offset)

    def _is_ours(self, place: AskedPlace, known: QueueAtMaster) -> bool:
        """Whether the tier answers it."""
        found = self._store.opened.state.incarnation(place.queue)
        if found is None or known.has_parted or place.offset >= found.commit_offset:
            return False
        is_gone_there = _is_gone_there(place.offset, known)
        if place.offset < found.min_offset:
            # In neither place; we have more of what follows.
            return is_gone_there and known.low is not None and found.min_offset < known.low
        return is_gone_there or self._clock.monotonic_s() >= self._sick_until_s

    def _stamped(self, queue: MessageQueue, found: Command) -> Command:
        """The answer, with whom to ask next."""
        is_behind = int(found.fields["nextBeginOffset"]) < self._commit(queue)
        stays = is_behind or not self.master.address
        next_id = self.master.identity.broker_id if stays else MASTER
        fields = {**found.fields, "suggestWhichBrokerId": next_id}
        return Command(found.code, remark=found.remark, fields=fields, body=found.body)

    def _answer(self, wanted: Pull, result: GetResult) -> Command:
        if result.status is GetStatus.TRY_AGAIN:
            self._sick_until_s = self._clock.monotonic_s() + SICK_S
        known = self.master.queue(wanted.queue, self._commit(wanted.queue)) or NOT_ASKED
        low = 0 if known.low is None else known.low
        if result.status in _EXPIRED and low < result.next_begin:
            raise RefusalError(Code.SYSTEM_ERROR, "the tier has this offset no more")
        if result.missing:
            result = without_missing(result, low)
            if result.next_begin == wanted.offset:
                raise RefusalError(Code.SYSTEM_ERROR, "the tier does not have this offset")
        return super()._answer(wanted, result)

    # -- what is the master's ---------------------------------------------------------------------

    def _away(self, asked: Exchange, place: AskedPlace) -> Handled:
        """Have the client ask the master the same."""
        if not self.master.address:
            return self._wait_for_master(asked, place)
        name, now_s = (place.group, place.queue), self._clock.monotonic_s()
        offset, sent_s = self._sent.get(name, (-1, now_s))
        if len(self._sent) >= QUEUES_MAX:
            self._sent.clear()
        self._sent[name] = place.offset, now_s
        if offset == place.offset and now_s < sent_s + AGAIN_S:
            return self._passed_on(asked, place)
        self.handed_back += 1
        return self._nothing(place, Code.PULL_RETRY_IMMEDIATELY, MASTER)

    def _nothing(self, place: AskedPlace, code: Code, next_id: str) -> Command:
        said = places(place.offset, *self._served.ends(*place.queue))
        fields = {**said, "suggestWhichBrokerId": next_id}
        return Command(code, remark="it is the master's", fields=fields)

    async def _passed_on(self, asked: Exchange, place: AskedPlace) -> Command:
        """Ask the master ourselves, for who does not."""
        request = asked.request
        self.master.passed[request.code] += 1
        hold_s = min(
            protocol.whole(request, "suspendTimeoutMillis", 0) / 1000, self.limits.hold_s_max
        )
        try:
            found = await self.master.ask(request, hold_s + ASK_S)
        except MasterError:
            await asyncio.sleep(GONE_LOOK_S)
            return self._nothing(place, Code.PULL_NOT_FOUND, MASTER)
        asked.resize(found.body_bytes)
        return found

    async def _wait_for_master(self, asked: Exchange, place: AskedPlace) -> Command:
        """Hold a pull for what only the master could give, which is gone, until it or the tier can."""
        hold_s = protocol.whole(asked.request, "suspendTimeoutMillis", 0) / 1000
        until_s = self._clock.monotonic_s() + min(hold_s, self.limits.hold_s_max)
        own, waits = self.master.identity.broker_id, self._held_room > 0
        self._held_room -= waits
        try:
            while waits and self._clock.monotonic_s() < until_s and not self._is_closing:
                if self.master.address or self._is_ours(place, NOT_ASKED):
                    next_id = MASTER if self.master.address else own
                    return self._nothing(place, Code.PULL_RETRY_IMMEDIATELY, next_id)
                await asyncio.sleep(GONE_LOOK_S)
        finally:
            self._held_room += waits
        return self._nothing(place, Code.PULL_NOT_FOUND, own)


def _is_gone_there(offset: int, known: QueueAtMaster) -> bool:
    """Whether the master has an offset no more."""
    return known.low is not None and offset < known.low


def without_missing(result: GetResult, low: int) -> GetResult:
    """What was found, up to the first offset that the tier does not hold and the master (from ``low`` on) may have."""
    gap = next((one for one in result.missing if one.end > low), None)
    if gap is None:
        return result
    end = max(int(gap.start), low)
    chunks = []
    for chunk in result.chunks:
        items = chunk.items[chunk.items + int(chunk.records.base_offset) < end]
        if len(items):
            chunks.append(replace(chunk, items=items))
    missing = tuple(one for one in result.missing if one.end <= end)
    status = GetStatus.FOUND if chunks else GetStatus.NO_MATCHED_MESSAGE
    begin = type(result.next_begin)(end)
    return replace(result, status=status, next_begin=begin, chunks=tuple(chunks), missing=missing)
