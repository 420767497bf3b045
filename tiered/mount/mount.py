"""A mount: the composition of a read-only broker over a tier, from opening to drain.

Overview: ``Mount.open`` opens the tier and takes the mount's place in it (lease and offsets of consumers); ``run`` listens,
registers with name servers, and serves until it is stopped or fenced; then it drains, and everything is given back.

Ordering: the tier is opened before the lease is taken, the lease before anything is served, and a port is listened at
before a name server hears of it. Draining goes the other way: name servers first, so that clients leave; then held requests
are answered, what is under way is finished, and the offsets of consumers are saved; the lease last.

Threads: one loop, in the thread of ``run``; reads of the tier in a pool; snapshots and the lease in one each. ``stop`` may
come from any thread.

After a crash: name servers forget the mount with its connections; the lease is taken over at once on the same host, and
elsewhere when it has expired; offsets of consumers are those of the last snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from backends.lazy_dataclass import dataclass
from backends.s3_settings import S3Options
from fetcher.limits import MEMORY_BYTES, FetchSettings
from fetcher.statuses import Policy
from tiered.addresses import Address
from tiered.api.broker_place import require_conditional_writes
from tiered.api.local_and_tier import open_message_store
from tiered.api.stores import backend_errors
from tiered.attach.observe import request_samples
from tiered.clock import Clock, SystemClock
from tiered.errors import DataError, InvalidError, TieredStoreError
from tiered.keys import RETRIES, mount_prefix
from tiered.local.catalog import reason_left_out
from tiered.metrics import Sample
from tiered.mount.acl import Reason
from tiered.mount.acl_files import CHANGE_S, AccessGuard
from tiered.mount.answers import Answers, Queries
from tiered.mount.consumers import Consumers, Locks, Relays
from tiered.mount.name_servers import BESIDE_S, Identity, MountedTopics, NameServers, SystemTopics
from tiered.mount.offsets import ConsumerOffsets, MountState, OffsetsKeeper
from tiered.mount.popping import Assignments, Popper
from tiered.mount.protocol import BY_CODE, Code
from tiered.mount.pulling import Puller, PullLimits, Served
from tiered.mount.replica import LiveMaster, ReplicaPuller
from tiered.mount.retries import RetryLimits, RetryLog, RetryWriter, consumed_of
from tiered.mount.sending_back import SendingBack
from tiered.mount.server import OTHER, RemotingServer, ServerLimits

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
    from pathlib import Path

    from tiered.api.local_and_tier import OpenMessageStore
    from tiered.journal.lease import LeaseState
    from tiered.log.broker_tables import Handover
    from tiered.model import MessageQueue
    from tiered.mount.acl import SigningKey
    from tiered.mount.offsets import Name
    from tiered.mount.server import Handler

_LOG = logging.getLogger("tiered.mount")
LOOK_S: Final = 0.25
"""How often held requests are held against what has been seen of the tier."""
TIDY_S: Final = 5.0
REGISTER_S: Final = 30.0
_TURN_S: Final = 5.0
"""In it the event loop takes a turn, however busy it is."""
VIP_BELOW: Final = 2
"""The port that clients call the VIP channel is so far below the one that they are told."""


@dataclass(frozen=True, slots=True)
class MountSettings:
    """How a tier is mounted."""

    listen: tuple[str, int]  # host (empty: all) and port (0: any)
    has_vip: bool = True
    """Listen at the port two below as well, as brokers do: clients of 4.x may send much of what they ask there."""
    advertise: tuple[str, int] | None = None
    """Host and port (0: that which is listened at) at which clients reach us; None: as they stand to name servers
    and ``listen``."""
    namesrv: Sequence[tuple[str, int]] = ()  # host and port of each name server
    cluster: str | None = None  # of the tier's place, where it has several brokers
    broker: str | None = None  # likewise
    name: str | None = None  # broker's name under which it is served; None: its own
    selects: Callable[[str], bool] = lambda _topic: True  # which topics name servers are told of
    shares_topics: bool = False  # also of those that a live broker of the cluster has
    is_shared: bool = False
    """Others serve the same tier under the same name, to clients of other name servers: this one has a place of its
    own, by its address."""
    needs_handover: bool = False  # serve only what was decommissioned
    replica_id: int = 0  # a replica of this id beside the living broker; 0: in its place
    is_taking_over: bool = False  # each name server has to say first that the broker is gone
    master_key: SigningKey | None = None  # a replica signs with it what it asks its master itself
    store_dir: str | None = None  # the broker's store, where a replica can see it
    policy: Policy = Policy.FORCE  # when the tier is read, with a store beside it
    keeps_offsets: bool = True
    """Offsets of consumers are kept in the tier; else in memory alone, and nothing is written."""
    known_offsets: Mapping[Name, Mapping[int, int]] = field(default_factory=dict)
    """Offsets for groups that have none there."""
    snapshot_s: float = 5.0  # how often they are kept
    ack_s: float = 0.25  # how often at most, where acknowledgements of messages wait for it
    refresh_s: float = 5.0  # how often the tier is looked at for what is new
    lease_s: float = 10.0  # how long the lease lasts
    wait: bool = True  # wait for another mount of this name to end
    drain_s: float = 10.0  # for what is under way when it is stopped
    memory_bytes: int = MEMORY_BYTES  # for reading the tier
    readers: int = 16  # threads that read
    tls: ssl.SSLContext | None = None  # for connections of clients
    acl: Path | None = (
        None  # rules, or secrets for those that the broker left; None: there are none
    )
    is_open: bool = False  # anybody is served, though the broker left rules
    server: ServerLimits = field(default_factory=ServerLimits)  # limits of clients
    pulls: PullLimits = field(default_factory=PullLimits)  # limits of pulling
    retries: RetryLimits = field(default_factory=RetryLimits)  # limits of what is sent back


class NotHandedOverError(InvalidError):
    """The broker was not decommissioned, and only such are to be served."""

    reason = "not_decommissioned"


class Mount:
    """A tier being served by this process. See the module's contract.

    Attributes:
        adopted: Queues whose offsets came from ``known_offsets``.
        inherited: Queues whose offsets came from what the decommissioned broker left.
    """

    def __init__(
        self,
        store: OpenMessageStore,
        keeper: OffsetsKeeper | None,
        settings: MountSettings,
        clock: Clock,
        stopping: threading.Event,
        *,
        handover: Handover | None,
    ) -> None:
        """Wire it; ``open`` does that."""
        self.store = store  # the tier
        # Broker's name under which it is served.
        self.name = settings.name or store.opened.place.broker
        self.offsets = ConsumerOffsets()  # where groups of consumers are
        self.adopted = self.inherited = 0
        self.is_serving = False  # clients can come
        self.on_answered: Callable[[str, float], None] = lambda _request, _seconds: None
        """Told of each request by name, and how long its answer took."""
        self.is_drained = False  # all that was under way was answered, and all offsets are kept
        self.consumers = Consumers(clock, self._on_group)
        self.locks = Locks(clock)
        self.handover = handover  # what that broker knew; None: it was not decommissioned
        self.topics = MountedTopics(
            store.opened.place.cluster,
            self.name,
            clock,
            _topics_of(store, handover),
            settings.selects,
            takes_retries=keeper is not None,
        )
        self.topics.update(store.tiered_queues())
        self.keeper = keeper
        self.retries: RetryLog | None = None  # what consumers have sent back; None: nothing is kept
        self.address = ""
        self.names: NameServers | None = None
        self.server: RemotingServer | None = None
        self.puller: Puller | None = None
        self.master: LiveMaster | None = None  # beside which we are
        self.guard = _guard(store, handover, settings)  # lets requests through; None: all
        self.popper: Popper | None = None
        self._settings = settings
        self._clock = clock
        self._stopping = stopping
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_now: asyncio.Event | None = None
        self._closing = ExitStack()

    @classmethod
    def open(
        cls,
        url: str,
        settings: MountSettings,
        *,
        options: S3Options | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        announce: Callable[[LeaseState], None] = lambda _state: None,
        stopping: threading.Event | None = None,
    ) -> Mount:
        """Open a tier, and take the mount's place in it.

        Args:
            announce: Told of another mount whose lease is waited for.
            stopping: ``stop`` sets it; its holder can end the waiting in here as well.

        Raises:
            NotHandedOverError: The broker was not decommissioned, and has to be.
            InvalidError: No such tier; or offsets are to be kept where conditional writing is not to be had.
            FencedError: Another mount serves under this name.
        """
        clock, rng = clock or SystemClock(), rng or random.SystemRandom()
        stopping = stopping or threading.Event()
        with ExitStack() as opened:
            store = open_message_store(
                settings.store_dir,
                url,
                policy=settings.policy,
                cluster=settings.cluster,
                broker=settings.broker,
                options=options or S3Options(),
                fetch=FetchSettings.of_memory(settings.memory_bytes),
                refresh_s=settings.refresh_s,
                clock=clock,
            )
            opened.callback(store.close)
            with backend_errors():
                handover = store.handover()
            if handover is None and settings.needs_handover:
                raise NotHandedOverError(
                    "the broker was not decommissioned: it may live",
                    where=store.opened.store.url,
                    do="run `tiered attach STORE --to URL --decommission`, or mount it by itself",
                )
            prefix = _own_prefix(store, settings)
            keeper = _keeper(store, prefix, settings, clock, rng)
            mount = cls(store, keeper, settings, clock, stopping, handover=handover)
            known: Mapping[Name, Mapping[int, int]] = {}
            if keeper is not None:
                opened.callback(keeper.end)
                with backend_errors():
                    known = keeper.begin(
                        wait=settings.wait,
                        announce=announce,
                        stop=lambda seconds: clock.wait(stopping, seconds),
                        prove=lambda: _require_one_writer(store, prefix, rng),
                    )
                mount.retries = _retry_log(
                    store, prefix, settings, known=known, clock=clock, rng=rng
                )
                mount.topics.update((*store.tiered_queues(), *mount.retries.queues()))
            mount.offsets = ConsumerOffsets(known)
            # Before offsets of ours are adopted: what groups had with the broker counts more than what a file says.
            mount._inherit()
            mount.adopted = mount.offsets.adopt(settings.known_offsets)
            mount._closing = opened.pop_all()
        return mount

    def _inherit(self) -> None:
        """Have groups go on where they were with the broker; once, since from then on they say here where they are."""
        if self.handover is None or (self.keeper and self.keeper.handover == self.handover.key):
            return
        served = {
            name: row
            for name, row in self.handover.offsets.items()
            if name[1] in self.topics.queues
        }
        self.inherited = self.offsets.adopt(served, is_newer=True)
        if self.keeper is not None:
            self.keeper.handover = self.handover.key

    def stop(self) -> None:
        """Take no new work, and drain. From any thread; not from a signal's handler."""
        self._stopping.set()
        loop, stop_now = self._loop, self._stop_now
        if loop is not None and stop_now is not None and not loop.is_closed():
            # An asyncio event belongs to its loop; and the loop may be asleep.
            loop.call_soon_threadsafe(stop_now.set)

    def close(self) -> None:
        """Give everything back. Harmless when repeated."""
        self._closing.close()

    # -- how it is, from any thread: each number is right by itself ----------------------------------

    def samples(self) -> list[Sample]:
        """What it measures, as of now."""
        return [
            Sample("tiered_mount_up", not self._unseen()),
            *_client_samples(self),
            *_protocol_samples(self),
            *_state_samples(self),
            *request_samples(self.store.opened.meter),
        ]

    def fault(self) -> str:
        """What is wrong, in one clause; empty when nothing is."""
        kept = self.keeper.trouble if self.keeper is not None else ""
        trouble = self.retries.trouble if self.retries is not None else ""
        return self._unseen() or kept or (trouble and f"messages are not kept: {trouble}")

    def _unseen(self) -> str:
        trouble = self.store.trouble
        return f"the tier cannot be looked at: {trouble}" if trouble else ""

    def stuck(self) -> str:
        """Why only a new start can help, in one clause; empty while the loop that answers clients turns."""
        loop = self._loop
        if loop is None or loop.is_closed() or not self.is_serving:
            return ""
        turned = threading.Event()
        with suppress(RuntimeError):  # closed meanwhile
            loop.call_soon_threadsafe(turned.set)
            if not self._clock.wait(turned, _TURN_S):
                return f"no request was looked at for {_TURN_S:.0f} s"
        return ""

    def unready(self) -> str:
        """Why clients should not come, in one clause; empty when they may."""
        if not self.is_serving:
            return "it is not serving (yet, or any more)"
        servers = self.names.servers if self.names is not None else []
        if servers and all(server.error for server in servers):
            return f"registered with no name server: {servers[0].error}"
        # Offsets that are not kept are no reason: they are here, and nowhere else.
        return self._unseen()

    # -- serving ----------------------------------------------------------------------------------

    def run(self, ready: Callable[[Mount], None] = lambda _mount: None) -> None:
        """Serve until ``stop`` is called, and drain.

        Raises:
            FencedError: Another mount, or a broker of this name, has come.
            InvalidError: The address cannot be listened at.
            StoreUnavailableError: No name server has taken the registration at the start.
        """
        with (
            ThreadPoolExecutor(self._settings.readers, "tiered-mount-read") as readers,
            ThreadPoolExecutor(1, "tiered-mount-save") as saver,
            ThreadPoolExecutor(1, "tiered-mount-lease") as leaser,
        ):
            asyncio.run(self._serve(ready, readers, saver, leaser))

    async def _serve(
        self,
        ready: Callable[[Mount], None],
        readers: ThreadPoolExecutor,
        saver: ThreadPoolExecutor,
        leaser: ThreadPoolExecutor,
    ) -> None:
        self._loop, self._stop_now = asyncio.get_running_loop(), asyncio.Event()
        # ``stop`` may have come before there was a loop to tell.
        if self._stopping.is_set():
            self._stop_now.set()
        duties: list[Coroutine[None, None, object]] = []
        retrying = None if self.retries is None else asyncio.ensure_future(self.retries.run())
        try:
            names = await self._begin(readers)
            self.is_serving = True
            ready(self)
            duties = [self._stop_now.wait(), names.run(), self._look(), self._tidy()]
            if self.guard is not None:
                duties.append(self._watch_rules(self.guard, readers))
            if self.keeper is not None:
                duties += [self._save_now_and_then(saver), self._renew(leaser)]
            if retrying is not None:
                # It goes on while the mount drains: who sends back is answered.
                duties.append(_end_of(retrying))
            await _until_first(duties)
        finally:
            # The lease is renewed until all is kept: draining may take longer than it lasts, and another mount may wait.
            renewing = asyncio.ensure_future(self._renew(leaser))
            try:
                await self._drain(saver, retrying)
            finally:
                renewing.cancel()
                # Its error is of no use any more: the last save tells who has the lease.
                await asyncio.gather(renewing, return_exceptions=True)

    async def _begin(self, readers: ThreadPoolExecutor) -> NameServers:
        """Listen, and tell name servers."""
        settings = self._settings
        kind = ReplicaPuller if settings.replica_id else Puller
        served = Served(
            self.store,
            self.topics,
            self.consumers,
            self.locks,
            self.offsets,
            readers,
            self._clock,
        )
        self.puller = kind(served, settings.pulls)
        kept = self.keeper.kept if self.keeper is not None else MountState()
        is_kept = self.keeper is not None
        self.popper = Popper(served, kept, is_kept=is_kept, pulls=settings.pulls)
        guarding = {"guard": self.guard.check} if self.guard is not None else {}
        self.server = RemotingServer(
            {}, self._clock, settings.server, on_gone=self.consumers.gone, **guarding
        )
        self.server.on_answered = lambda code, taken_s: self.on_answered(_name_of(code), taken_s)
        host, port = settings.listen
        # First: who is told the main port may use the other one at once.
        if settings.has_vip and port > VIP_BELOW:
            await self.server.listen(host, port - VIP_BELOW, settings.tls)
        port = await self.server.listen(host, port, settings.tls)
        host, told = settings.advertise or (_own_host(settings), 0)
        port = told or port
        self.address = str(Address(host, port))
        cluster, own_id = self.store.opened.place.cluster, str(settings.replica_id)
        identity = Identity(cluster, self.name, self.address, own_id)
        self.names = self._names_of(identity)
        self.server.handlers = self._handlers(served, identity)
        # Last: from here on clients come, and all that answers them is there.
        await self.names.begin()
        if self.master is not None:
            await self.master.check()
        return self.names

    def _handlers(self, served: Served, identity: Identity) -> Mapping[int, Handler]:
        """What answers each request, by code."""
        assert self.puller is not None
        assert self.popper is not None
        assert self.names is not None
        answers = Answers(served, identity, self.puller, self._clock.now_ms())
        groups = self.handover.groups if self.handover is not None else {}
        queries = Queries(served, identity, groups)
        if self.retries is not None:
            self.retries.host = self.address
            self.retries.on_moved = self._on_moved
        sending = SendingBack(self.retries, served, queries.record_at, groups)
        relays = Relays(self.consumers, identity.broker, queries.record_at)
        masters = self.master.handlers() if self.master is not None else {}
        assigning = Assignments(self.popper.log, served, self.names)
        others = {
            **answers.handlers(),
            **queries.handlers(),
            **relays.handlers(),
            **self.popper.handlers(),
            **assigning.handlers(),
            **sending.handlers(),
        }
        made = SystemTopics(self.topics, self.names, others)
        # A replica's master has the last word of what is its own.
        return {**others, **made.handlers(), **masters}

    def _names_of(self, identity: Identity) -> NameServers:
        """Who tells name servers; a replica has to know its master."""
        if isinstance(self.puller, ReplicaPuller):
            self.master = LiveMaster(identity, self._clock, self._settings.master_key)
            self.puller.beside(self.master)
        return NameServers(
            self._settings.namesrv,
            identity,
            self.topics,
            interval_s=BESIDE_S if self.master else REGISTER_S,
            is_sharing=self._settings.shares_topics,
            is_taking_over=self._settings.is_taking_over,
            live=self.master,
        )

    async def _drain(
        self, saver: ThreadPoolExecutor, retrying: asyncio.Future[None] | None
    ) -> None:
        """Leave in order; see the module."""
        self.is_serving = False
        until_s = self._clock.monotonic_s() + self._settings.drain_s
        # Clients leave by themselves when name servers no longer name us, so they are told first.
        if self.names is not None:
            await self.names.unregister()
        if self.master is not None:
            self.master.close()
        is_answered = True
        # Who waits for an acknowledgement is answered.
        saving = asyncio.ensure_future(self._save_now_and_then(saver))
        if self.puller is not None and self.popper is not None and self.server is not None:
            self.puller.close()
            self.popper.close()
            is_answered = await self.server.close(max(until_s - self._clock.monotonic_s(), 0.0))
        saving.cancel()
        await asyncio.gather(saving, return_exceptions=True)
        if self.retries is not None and retrying is not None:
            self.retries.stop()
            await asyncio.wait([retrying], timeout=max(until_s - self._clock.monotonic_s(), 1.0))
            self.retries.writer.stop.set()
            # Its error was told by the duty that waited for it.
            await asyncio.gather(retrying, return_exceptions=True)
        self.is_drained = await self._save_at_last(saver, until_s) and is_answered

    # -- duties -----------------------------------------------------------------------------------

    async def _look(self) -> None:
        """See what the tier has got since."""
        assert self.puller is not None
        assert self.popper is not None
        while True:
            await asyncio.sleep(LOOK_S)
            self.puller.look()
            self.popper.look()

    async def _tidy(self) -> None:
        """Topics that have come, clients that have gone."""
        while True:
            await asyncio.sleep(min(TIDY_S, self._settings.refresh_s))
            self.consumers.expire()
            self.locks.expire()
            if self.popper is not None:
                self.popper.tidy()
            self._update_topics()

    def _update_topics(self) -> None:
        kept = self.retries.queues() if self.retries is not None else ()
        if self.topics.update((*self.store.tiered_queues(), *kept)) and self.names is not None:
            self.names.change()

    def _on_moved(self, queue: MessageQueue) -> None:
        """The retry log has put something into a queue."""
        if queue.topic not in self.topics.queues:
            self._update_topics()
        if self.puller is not None:
            self.puller.moved(queue)

    @staticmethod
    async def _watch_rules(guard: AccessGuard, readers: ThreadPoolExecutor) -> None:
        """Take over rules that change."""
        while True:
            await asyncio.sleep(CHANGE_S)
            await asyncio.get_running_loop().run_in_executor(readers, guard.look)

    def _on_group(self, group: str) -> None:
        if self.topics.add_retry(group) and self.names is not None:
            self.names.change()

    async def _renew(self, leaser: ThreadPoolExecutor) -> None:
        loop, keeper = asyncio.get_running_loop(), self.keeper
        while keeper is not None:
            await asyncio.sleep(keeper.renewal_s)
            await loop.run_in_executor(leaser, keeper.renew)

    async def _save_now_and_then(self, saver: ThreadPoolExecutor) -> None:
        while self.keeper is not None and self.popper is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.snapshot_s):
                    await self.popper.log.wanted.wait()
            await self._save(saver)
            # Acknowledgements that come meanwhile go together.
            await asyncio.sleep(self._settings.ack_s)

    async def _save(self, saver: ThreadPoolExecutor) -> None:
        """Write what has changed; it is taken out only when that is done."""
        assert self.keeper is not None
        # Taken out while they are written, so that what changes meanwhile goes with the next; put back if it fails.
        rows = self.offsets.take_changes()
        acks, modes = self.popper.take(rows) if self.popper is not None else ([], [])
        is_saved = False
        try:
            if rows or acks or modes:
                save = partial(self.keeper.save, rows, acks, modes)
                await asyncio.get_running_loop().run_in_executor(saver, save)
            is_saved = True
        finally:
            if not is_saved:
                self.offsets.put_back(rows)
            if self.popper is not None:
                self.popper.log.done(is_written=is_saved)

    async def _save_at_last(self, saver: ThreadPoolExecutor, until_s: float) -> bool:
        """Whether all offsets are kept."""
        if self.keeper is None:
            return True
        saving = asyncio.ensure_future(self._save(saver))
        await asyncio.wait([saving], timeout=max(until_s - self._clock.monotonic_s(), 1.0))
        # The time for draining is over: the request under way ends, and its outcome is all that is left to know.
        self.keeper.abandon()
        try:
            await saving
        except TieredStoreError as error:
            _LOG.error("the last offsets of consumers are not kept: %s", error)
            return False
        return True


def _topics_of(
    store: OpenMessageStore, handover: Handover | None
) -> Mapping[str, Mapping[str, Any]]:
    """Topics that a decommissioned broker had, but for its own."""
    if handover is None:
        return {}
    place = store.opened.place
    return {
        name: config
        for name, config in handover.topics.items()
        if reason_left_out(name, cluster=place.cluster, broker=place.broker) is None
    }


async def _end_of(task: asyncio.Future[None]) -> None:
    """Wait for its end or its error; who stops waiting does not end it."""
    await asyncio.shield(task)


async def _until_first(duties: Sequence[Coroutine[None, None, object]]) -> None:
    """Run until one ends, or fails; then cancel the others."""
    tasks = [asyncio.ensure_future(duty) for duty in duties]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for error in ended:
        if isinstance(error, BaseException) and not isinstance(error, asyncio.CancelledError):
            raise error


def _guard(
    store: OpenMessageStore, handover: Handover | None, settings: MountSettings
) -> AccessGuard | None:
    """What lets requests through; None: nothing has to."""
    kept = handover.acl if handover is not None else None
    if settings.acl is not None:
        return AccessGuard(settings.acl, store.opened.place.cluster, kept)
    if kept is None or settings.is_open:
        return None
    raise InvalidError(
        "the broker asked who its clients are, and left its rules in the tier without secrets",
        where=store.opened.store.url,
        do="name a file of secrets with --acl, or serve anybody with --no-acl",
    )


def _own_prefix(store: OpenMessageStore, settings: MountSettings) -> str:
    """Below which a mount keeps what it knows."""
    place, (host, port) = store.opened.place, settings.advertise or settings.listen
    member = f"{host}:{port}" if settings.is_shared else ""
    return mount_prefix(place.prefix, settings.name or place.broker, member)


def _keeper(
    store: OpenMessageStore, prefix: str, settings: MountSettings, clock: Clock, rng: random.Random
) -> OffsetsKeeper | None:
    """What keeps offsets; None: nothing is to."""
    tier = store.opened
    if not settings.keeps_offsets:
        return None
    return OffsetsKeeper(tier.meter, tier.store, prefix, clock, rng, lease_s=settings.lease_s)


def _retry_log(
    store: OpenMessageStore,
    prefix: str,
    settings: MountSettings,
    *,
    known: Mapping[Name, Mapping[int, int]],
    clock: Clock,
    rng: random.Random,
) -> RetryLog:
    """What keeps what is sent back, begun; from here on it is read with the tier. ``known``: where groups were."""
    tier, place = store.opened, store.opened.place

    def old_end(queue: MessageQueue) -> int:
        known = tier.state.incarnation(queue)
        return 0 if known is None else known.commit_offset

    writer = RetryWriter(
        tier.meter, tier.store, prefix + RETRIES, clock, rng, place=place, old_end=old_end
    )
    log = RetryLog(writer, clock, settings.retries)
    try:
        with backend_errors():
            log.begin(partial(consumed_of, known))
    except DataError as error:
        raise DataError(
            f"what was sent back to the mount is damaged: {error.what}",
            where=f"{tier.store.url}/{error.where}",
            do=f"bring the object back from a copy; else delete all below {prefix}{RETRIES}: what was sent back and not"
            " consumed is lost",
        ) from error
    store.put_beside(log, log.bounds)
    return log


def _require_one_writer(store: OpenMessageStore, prefix: str, rng: random.Random) -> None:
    """Refuse a store that does not write conditionally: two mounts could not be kept apart there."""
    try:
        require_conditional_writes(store.opened.store, rng, store.opened.meter.url, below=prefix)
    except InvalidError as error:
        raise InvalidError(
            f"offsets of consumers cannot be kept here: {error.what}",
            where=error.where,
            do="serve with --no-state, so that they are in memory alone",
        ) from error


def _own_host(settings: MountSettings) -> str:
    """The host that clients are told: as listened at, else as this machine stands to the first name server."""
    host = settings.listen[0]
    if host not in {"", "0.0.0.0", "::"}:  # noqa: S104 (compared, not bound)
        return host
    peer = settings.namesrv[0] if settings.namesrv else ("192.0.2.1", 9)
    try:
        found = socket.getaddrinfo(*peer, type=socket.SOCK_DGRAM)[0]
        with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[4])  # of UDP: nothing is sent
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


# -- what it measures ------------------------------------------------------------------------------


def _client_samples(mount: Mount) -> Iterator[Sample]:
    server, puller = mount.server, mount.puller
    if server is None or puller is None:
        return
    yield Sample("tiered_mount_connections", len(server.connections))
    yield Sample("tiered_mount_refused_connections_total", server.counters.refused_connections)
    for reason, count in sorted(server.counters.dropped.copy().items()):
        yield Sample("tiered_mount_dropped_connections_total", count, {"reason": reason})
    yield Sample("tiered_mount_in_flight_bytes", server.budget.used_bytes)
    yield Sample("tiered_mount_sent_bytes_total", server.counters.sent_bytes)
    yield Sample("tiered_mount_held_requests", puller.held)
    yield Sample("tiered_mount_skipped_messages_total", puller.skipped)
    for side, size_bytes in puller.read_bytes.copy().items():
        yield Sample("tiered_mount_read_bytes_total", size_bytes, {"side": side.value})
    if isinstance(puller, ReplicaPuller):
        yield Sample("tiered_mount_replica_handed_back_total", puller.handed_back)
        yield Sample("tiered_mount_replica_passed_on_total", puller.master.passed.total())
        yield Sample("tiered_mount_replica_master_known", bool(puller.master.address))
    guard = mount.guard
    yield Sample("tiered_mount_rules_trouble", guard is not None and bool(guard.trouble))
    for why in Reason:
        count = guard.refused[why] if guard is not None else 0
        yield Sample("tiered_mount_denied_requests_total", count, {"reason": why.value})
    if mount.popper is not None:
        yield Sample("tiered_mount_held_pops", mount.popper.held)
        yield Sample("tiered_mount_popped_messages_in_flight", mount.popper.in_flight)
    for status, count in puller.found.copy().items():
        yield Sample("tiered_mount_pulls_total", count, {"status": status.name})


def _name_of(code: int) -> str:
    """Of a request; of those that are not known, one for all."""
    known = BY_CODE.get(code)
    return "other" if known is None else known.name


def _protocol_samples(mount: Mount) -> Iterator[Sample]:
    if mount.server is None:
        return
    counters = mount.server.counters
    names: Counter[str] = Counter()
    for code, count in counters.requests.copy().items():
        names[_name_of(code)] += count
    for name, asked in sorted(names.items()):
        yield Sample("tiered_mount_requests_total", asked, {"request": name})
    for code, count in sorted(counters.answers.copy().items()):
        name = "other" if code == OTHER else Code(code).name
        yield Sample("tiered_mount_answers_total", count, {"code": name})


def _state_samples(mount: Mount) -> Iterator[Sample]:
    groups = list(mount.consumers.groups.values())
    yield Sample("tiered_mount_groups", len(groups))
    yield Sample("tiered_mount_consumers", sum(len(group.members) for group in groups))
    yield Sample("tiered_mount_topics", len(mount.topics.queues))
    if mount.keeper is not None:
        yield Sample("tiered_mount_snapshots_total", mount.keeper.saved)
        yield Sample("tiered_mount_keeps_offsets", not mount.keeper.trouble)
    if mount.retries is not None:
        yield Sample("tiered_mount_sent_back_total", mount.retries.accepted)
        yield Sample("tiered_mount_given_again_total", mount.retries.delivered)
        yield Sample("tiered_mount_pending_retries", mount.retries.pending)
    for server in mount.names.servers if mount.names is not None else []:
        yield Sample("tiered_mount_name_servers", not server.error, {"address": server.address})
