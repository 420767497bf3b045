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
from tiered.addresses import Address
from tiered.api.broker_place import require_conditional_writes
from tiered.api.local_and_tier import open_message_store
from tiered.api.stores import backend_errors
from tiered.attach.observe import request_samples
from tiered.clock import Clock, SystemClock
from tiered.errors import InvalidError, TieredStoreError
from tiered.keys import mount_prefix
from tiered.local.catalog import reason_left_out
from tiered.metrics import Sample
from tiered.mount.answers import Answers, Queries
from tiered.mount.consumers import Consumers, Locks, Relays
from tiered.mount.name_servers import Identity, MountedTopics, NameServers
from tiered.mount.offsets import ConsumerOffsets, OffsetsKeeper
from tiered.mount.protocol import BY_CODE, Code
from tiered.mount.pulling import Puller, PullLimits
from tiered.mount.server import OTHER, RemotingServer, ServerLimits

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence

    from tiered.api.local_and_tier import OpenMessageStore
    from tiered.journal.lease import LeaseState
    from tiered.log.broker_tables import Handover
    from tiered.mount.offsets import Name

_LOG = logging.getLogger("tiered.mount")
LOOK_S: Final = 0.25
"""How often held requests are held against what has been seen of the tier."""
TIDY_S: Final = 5.0
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
    keeps_offsets: bool = True
    """Offsets of consumers are kept in the tier; else in memory alone, and nothing is written."""
    known_offsets: Mapping[Name, Mapping[int, int]] = field(default_factory=dict)
    """Offsets for groups that have none there."""
    snapshot_s: float = 5.0  # how often they are kept
    refresh_s: float = 5.0  # how often the tier is looked at for what is new
    lease_s: float = 10.0  # how long the lease lasts
    wait: bool = True  # wait for another mount of this name to end
    drain_s: float = 10.0  # for what is under way when it is stopped
    memory_bytes: int = MEMORY_BYTES  # for reading the tier
    readers: int = 16  # threads that read
    tls: ssl.SSLContext | None = None  # for connections of clients
    server: ServerLimits = field(default_factory=ServerLimits)  # limits of clients
    pulls: PullLimits = field(default_factory=PullLimits)  # limits of pulling


class NotHandedOverError(InvalidError):
    """The broker was not decommissioned, and only such are to be served."""


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
        )
        self.topics.update(store.tiered_queues())
        self.keeper = keeper
        self.address = ""
        self.names: NameServers | None = None
        self.server: RemotingServer | None = None
        self.puller: Puller | None = None
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
                None,
                url,
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
        return self._unseen() or (self.keeper.trouble if self.keeper is not None else "")

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
        try:
            names = await self._begin(readers)
            self.is_serving = True
            ready(self)
            duties = [self._stop_now.wait(), names.run(), self._look(), self._tidy()]
            if self.keeper is not None:
                duties += [self._save_now_and_then(saver), self._renew(leaser)]
            await _until_first(duties)
        finally:
            # The lease is renewed until all is kept: draining may take longer than it lasts, and another mount may wait.
            renewing = asyncio.ensure_future(self._renew(leaser))
            try:
                await self._drain(saver)
            finally:
                renewing.cancel()
                # Its error is of no use any more: the last save tells who has the lease.
                await asyncio.gather(renewing, return_exceptions=True)

    async def _begin(self, readers: ThreadPoolExecutor) -> NameServers:
        """Listen, and tell name servers."""
        settings = self._settings
        self.puller = Puller(
            self.store,
            self.topics,
            self.consumers,
            self.offsets,
            executor=readers,
            clock=self._clock,
            limits=settings.pulls,
        )
        self.server = RemotingServer({}, self._clock, settings.server, on_gone=self.consumers.gone)
        self.server.on_answered = lambda code, taken_s: self.on_answered(_name_of(code), taken_s)
        host, port = settings.listen
        # First: who is told the main port may use the other one at once.
        if settings.has_vip and port > VIP_BELOW:
            await self.server.listen(host, port - VIP_BELOW, settings.tls)
        port = await self.server.listen(host, port, settings.tls)
        host, told = settings.advertise or (_own_host(settings), 0)
        port = told or port
        self.address = str(Address(host, port))
        identity = Identity(self.store.opened.place.cluster, self.name, self.address)
        self.names = NameServers(
            settings.namesrv, identity, self.topics, is_sharing=settings.shares_topics
        )
        answers = Answers(
            self.store,
            identity,
            self.topics,
            self.consumers,
            self.locks,
            self.offsets,
            self.puller,
            self.names,
            readers,
            self._clock,
            self._clock.now_ms(),
        )
        groups = self.handover.groups if self.handover is not None else {}
        queries = Queries(
            self.store,
            identity,
            self.topics,
            self.consumers,
            self.offsets,
            readers,
            self._clock,
            groups,
        )
        relays = Relays(self.consumers, identity.broker, queries.record_at)
        self.server.handlers = {**answers.handlers(), **queries.handlers(), **relays.handlers()}
        # Last: from here on clients come, and all that answers them is there.
        await self.names.begin()
        return self.names

    async def _drain(self, saver: ThreadPoolExecutor) -> None:
        """Leave in order; see the module."""
        self.is_serving = False
        until_s = self._clock.monotonic_s() + self._settings.drain_s
        # Clients leave by themselves when name servers no longer name us, so they are told first.
        if self.names is not None:
            await self.names.unregister()
        is_answered = True
        if self.puller is not None and self.server is not None:
            self.puller.close()
            is_answered = await self.server.close(max(until_s - self._clock.monotonic_s(), 0.0))
        self.is_drained = await self._save_at_last(saver, until_s) and is_answered

    # -- duties -----------------------------------------------------------------------------------

    async def _look(self) -> None:
        """See what the tier has got since."""
        assert self.puller is not None
        while True:
            await asyncio.sleep(LOOK_S)
            self.puller.look()

    async def _tidy(self) -> None:
        """Topics that have come, clients that have gone."""
        while True:
            await asyncio.sleep(min(TIDY_S, self._settings.refresh_s))
            self.consumers.expire()
            self.locks.expire()
            if self.topics.update(self.store.tiered_queues()) and self.names is not None:
                self.names.change()

    def _on_group(self, group: str) -> None:
        if self.topics.add_retry(group) and self.names is not None:
            self.names.change()

    async def _renew(self, leaser: ThreadPoolExecutor) -> None:
        loop, keeper = asyncio.get_running_loop(), self.keeper
        while keeper is not None:
            await asyncio.sleep(keeper.renewal_s)
            await loop.run_in_executor(leaser, keeper.renew)

    async def _save_now_and_then(self, saver: ThreadPoolExecutor) -> None:
        while True:
            await asyncio.sleep(self._settings.snapshot_s)
            await self._save(saver)

    async def _save(self, saver: ThreadPoolExecutor) -> None:
        """Write what has changed; it is taken out only when that is done."""
        assert self.keeper is not None
        # Taken out while they are written, so that what changes meanwhile goes with the next; put back if it fails.
        rows = self.offsets.take_changes()
        if not rows:
            return
        try:
            save = partial(self.keeper.save, rows)
            await asyncio.get_running_loop().run_in_executor(saver, save)
        except BaseException:
            self.offsets.put_back(rows)
            raise

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
    for server in mount.names.servers if mount.names is not None else []:
        yield Sample("tiered_mount_name_servers", not server.error, {"address": server.address})
