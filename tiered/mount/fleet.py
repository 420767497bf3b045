"""A fleet: several processes that mount all brokers below one URL, each broker by one of them.

Overview: each process is a member: it keeps a lease object of its own below ``mounts/`` at the URL (``tiered.keys``), and
looks every ``LOOK_PARTS``-th of the lease's time who else does. ``choose`` says of each broker which member mounts it:
rendezvous hashing, so that a member that comes or goes moves few brokers, with a bound on how many one member takes. All
members come to the same answer as soon as they see the same members. Only brokers that were decommissioned are mounted: one
that lives serves itself.

Safety does not rest on the choice: each mount holds the lease of its place in the tier (``tiered.mount.offsets``), so for
the moment in which two members see different members the second one waits, and who was taken over ends its mount.

Order: a mount that moves is drained by its member, which frees its lease; the other waits for that. After a crash a member
is missed when its lease has expired (at once on the same host), and its brokers are mounted by the others then, as soon as
the leases of its mounts have expired, too.

Threads: ``run`` in one, each mount in one of its own. Retries: what failed to be mounted is tried again after ``RETRY_S``.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from dataclasses import field, replace
from math import ceil
from typing import TYPE_CHECKING, Final

from backends.errors import BackendError
from backends.lazy_dataclass import dataclass
from tiered.addresses import Address, why_taken
from tiered.api.broker_place import find_places
from tiered.api.stores import backend_errors, open_for_reading
from tiered.errors import FencedError, InvalidError, TieredStoreError
from tiered.journal.lease import Holder, Lease, read_lease
from tiered.keys import MEMBERS, member_prefix, parse_member_key
from tiered.metrics import BROKER, Sample
from tiered.mount.mount import VIP_BELOW, Mount, MountSettings, NotHandedOverError

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from backends.base import ObjectStore
    from backends.s3_settings import S3Options
    from tiered.api.broker_place import Place
    from tiered.clock import Clock

_LOG = logging.getLogger("tiered.mount")
LOOK_PARTS: Final = 3
"""Looks in the time of a lease."""
SLACK: Final = 1.25
"""How many more brokers than its share a member takes at most."""
RETRY_S: Final = 30.0
PLACES_S: Final = 30.0
"""How often brokers are looked for."""
FORGOTTEN_MS: Final = 86_400_000
"""After so long without a sign the object of a member is deleted by any member that sees it."""
PORTS_TRIED: Final = 1000


def choose(members: Iterable[str], places: Iterable[Place]) -> Mapping[Place, str]:
    """Who mounts what. Pure: the same members and brokers give the same answer, in any order.

    Returns:
        The member of each broker; empty without members.
    """
    alive, brokers = sorted(set(members)), sorted(set(places))
    if not alive:
        return {}
    most = ceil(SLACK * len(brokers) / len(alive))
    taken = dict.fromkeys(alive, 0)
    found: dict[Place, str] = {}
    for place in brokers:
        free = [member for member in alive if taken[member] < most]
        chosen = max(free, key=lambda member: _score(member, place))
        found[place] = chosen
        taken[chosen] += 1
    return found


def _score(member: str, place: Place) -> bytes:
    """A number that is another for each pair, evenly spread."""
    return hashlib.sha256(f"{member}\n{place.prefix}".encode("utf-8", "surrogateescape")).digest()


class Members:
    """Our place among the members, and who they are. For one thread."""

    def __init__(
        self, store: ObjectStore, member: str, *, seconds: float, clock: Clock, rng: random.Random
    ) -> None:
        """Say nothing yet.

        Args:
            seconds: How long a sign of us lasts.
        """
        self._store = store
        self._member = member
        self._clock = clock
        self._lease = Lease(
            store,
            member_prefix(member),
            writer=f"{rng.getrandbits(32):08x}",
            holder=Holder.present(),
            seconds=seconds,
            clock=clock,
        )

    def join(self) -> None:
        """Give the first sign.

        Raises:
            FencedError: A member of this id lives.
        """
        try:
            self._lease.acquire(wait=False, announce=lambda _: None, stop=self._wait)
        except FencedError as error:
            raise FencedError(
                f"a member {self._member} incarnations: {error.what}",
                where=error.where,
                do="give each member a --listen or --advertise of its own",
            ) from error

    def _wait(self, seconds: float) -> bool:
        self._clock.wait(threading.Event(), seconds)
        return False

    def renew(self) -> None:
        """Give a sign.

        Raises:
            FencedError: Another has our id.
        """
        self._lease.renew()

    def wait_for(self, thread: threading.Thread) -> None:
        """Wait until a thread ends, which may take longer than a sign lasts. What fails meanwhile the next sign tells."""
        while thread.is_alive():
            thread.join(self._lease.renewal_seconds)
            if thread.is_alive():
                with contextlib.suppress(BackendError, FencedError):
                    self.renew()

    def leave(self) -> None:
        """Have the others see at once that we go."""
        self._lease.release()

    def alive(self) -> list[str]:
        """Ids of the members that live, ours among them."""
        now_ms, found = int(self._clock.now_ms()), {self._member}
        for info in self._store.list(MEMBERS):
            member = parse_member_key(info.key)
            state, _ = read_lease(self._store, info.key)
            if member is None or state is None or member == self._member:
                continue
            if not (state.released or state.expires_ms <= now_ms or state.holder.is_gone()):
                found.add(member)
            # Long after: a member whose clock is wrong by hours is not taken for one that is gone.
            elif state.expires_ms + FORGOTTEN_MS < now_ms:
                self._store.delete(info.key)
        return sorted(found)


@dataclass(slots=True)
class _Running:
    """A mount in its thread."""

    stop: threading.Event = field(default_factory=threading.Event)
    """Ends it, also while it waits for a lease."""
    thread: threading.Thread | None = None
    mount: Mount | None = None  # once it is open
    error: str = ""  # why it ended by itself
    is_living: bool = False  # because the broker was not decommissioned


class Fleet:
    """One member of a fleet. See the module's contract."""

    def __init__(
        self,
        url: str,
        settings: MountSettings,
        *,
        options: S3Options,
        clock: Clock,
        rng: random.Random,
        tell: Callable[[str], None],
        stopping: threading.Event | None = None,
    ) -> None:
        """Mount nothing yet.

        Args:
            settings: Of each mount; the port of ``listen`` is that of the first, others take the next that are free.
        """
        host, port = settings.advertise or settings.listen
        # Its id: the address at which it is reached.
        self.member = f"{host or Holder.present().host}:{port or Holder.present().pid}"
        self.is_drained = True  # after ``run``: all mounts ended in order
        self.ended: list[Mount] = []
        self.members = 0  # how many live, as last seen; 0: nobody has looked yet
        self.mine: frozenset[Place] = frozenset()  # brokers that are this member's
        # Those of them that could not be mounted, or ended, and why; they are tried again.
        self.failed: dict[Place, str] = {}
        # Those of them that were not decommissioned, and are left alone.
        self.living: set[Place] = set()
        self.on_mount: Callable[[Place, Mount], None] = lambda _place, _mount: None
        """Told of each that is open and is about to serve."""
        self.trouble = ""  # why the last look at the bucket failed; empty: it did not
        self._url = url
        self._settings = settings
        self._options = options
        self._clock = clock
        self._rng = rng
        self._tell = tell
        self._stopping = stopping or threading.Event()
        self._running: dict[Place, _Running] = {}
        self._not_before_s: dict[Place, float] = {}
        self._places: Sequence[Place] = ()
        self._looked_s = float("-inf")

    @property
    def is_stopping(self) -> bool:
        """It was told to end."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """End all mounts in order. From any thread."""
        self._stopping.set()

    def mounts(self) -> list[tuple[Place, Mount]]:
        """What is open now. From any thread."""
        running = list(self._running.items())
        return [(place, one.mount) for place, one in running if one.mount is not None]

    # -- how it is, from any thread: each number is right by itself

    def samples(self) -> list[Sample]:
        """What each mount measures, with its broker's name, and what this member does."""
        of_mounts = [
            replace(sample, labels={**sample.labels, BROKER: f"{place.cluster}/{place.broker}"})
            for place, mount in self.mounts()
            for sample in mount.samples()
        ]
        return [
            *of_mounts,
            Sample("tiered_fleet_members", self.members),
            Sample("tiered_fleet_brokers", len(self.mine)),
            Sample("tiered_fleet_failed_brokers", len(self.failed)),
            Sample("tiered_fleet_living_brokers", len(self.living)),
        ]

    def fault(self) -> str:
        """What is wrong, in one clause; empty when nothing is."""
        if self.trouble:
            return f"the bucket cannot be looked at: {self.trouble}"
        for place, why in list(self.failed.items()):
            return f"{place.cluster}/{place.broker} is not mounted: {why}"
        for place, mount in self.mounts():
            if why := mount.fault():
                return f"{place.cluster}/{place.broker}: {why}"
        return ""

    def stuck(self) -> str:
        """Why only a new start can help, in one clause; empty while every mount's loop turns."""
        for place, mount in self.mounts():
            if why := mount.stuck():
                return f"{place.cluster}/{place.broker}: {why}"
        return ""

    def unready(self) -> str:
        """Why not all that is this member's is served, in one clause; empty when it is."""
        if not self.members:
            return "it has not looked yet who mounts what"
        if self.is_stopping:
            return "it ends"
        serving = {place for place, mount in self.mounts() if not mount.unready()}
        missing = sorted(self.mine - self.living - serving)
        if missing:
            return f"{missing[0].cluster}/{missing[0].broker} is not served (yet, or any more)"
        return ""

    # -- running

    def run(self) -> None:
        """Be a member until ``stop`` is called.

        Raises:
            FencedError: A member of the same id lives, or has come.
            InvalidError: The store does not write conditionally.
            StoreUnavailableError: The store cannot be reached, at the beginning.
        """
        opened = open_for_reading(self._url, self._options, self._clock, rng=self._rng)
        seconds = self._settings.lease_s
        members = Members(
            opened.store, self.member, seconds=seconds, clock=self._clock, rng=self._rng
        )
        try:
            with backend_errors():
                members.join()
            self._tell(f"member {self.member} of the mounts of {opened.meter.url}")
            while not self._stopping.is_set():
                self._look(opened.store, members)
                self._clock.wait(self._stopping, seconds / LOOK_PARTS)
        finally:
            # Mounts first: another member takes a broker when we have left, and would wait for the lease of a mount that
            # drains.
            self._end_all(members)
            members.leave()
            opened.close()

    def _look(self, store: ObjectStore, members: Members) -> None:
        try:
            # First, and always: a listing that takes long must not cost us our place.
            members.renew()
            now_s = self._clock.monotonic_s()
            if now_s - self._looked_s >= PLACES_S:
                self._places, self._looked_s = find_places(store), now_s
            alive = members.alive()
            chosen = choose(alive, self._places)
        except BackendError as error:
            _LOG.warning("could not look who mounts what, trying again: %s", error)
            self.trouble = str(error)
            return
        mine = {place for place, member in chosen.items() if member == self.member}
        self.members, self.mine, self.trouble = len(alive), frozenset(mine), ""
        for place in {*list(self.failed), *list(self.living)} - mine:  # copies: mounts change both
            self.failed.pop(place, None)
            self.living.discard(place)
        # What goes is ended before what comes is begun: threads and ports of the old make room for the new.
        for place in [place for place in self._running if place not in mine]:
            self._tell(f"{place.cluster}/{place.broker} goes to {chosen.get(place, 'nobody')}")
            self._end(place, members)
        for place in sorted(mine):
            self._see_to(place, members)

    def _see_to(self, place: Place, members: Members) -> None:
        """Have a broker mounted, or mounted again."""
        now_s = self._clock.monotonic_s()
        running = self._running.get(place)
        if running is not None and running.thread is not None and not running.thread.is_alive():
            self._note(place, running)
            self._not_before_s[place] = now_s + RETRY_S
            self._end(place, members)
            running = None
        if running is None and now_s >= self._not_before_s.get(place, now_s):
            running = self._running[place] = _Running()
            running.thread = threading.Thread(
                target=self._mount, args=(place, running), name=f"tiered-mount-{place.broker}"
            )
            running.thread.start()

    def _note(self, place: Place, running: _Running) -> None:
        """A mount has ended by itself."""
        is_told = self.failed.get(place) == running.error or place in self.living
        if running.error and not is_told:
            self._tell(f"{place.cluster}/{place.broker} is not mounted: {running.error}")
        if running.is_living:
            self.living.add(place)
            self.failed.pop(place, None)
        else:
            self.living.discard(place)
            self.failed[place] = running.error

    def _end(self, place: Place, members: Members) -> None:
        running = self._running.pop(place)
        # The event ends an opening that waits for a lease; ``stop`` one that serves. Which of the two it is may change
        # meanwhile, so both.
        running.stop.set()
        if running.mount is not None:
            running.mount.stop()
        if running.thread is not None:
            members.wait_for(running.thread)
        if running.mount is not None:
            self.is_drained = self.is_drained and running.mount.is_drained
            self.ended.append(running.mount)

    def _end_all(self, members: Members) -> None:
        # All are asked before one is waited for: they drain side by side.
        for running in self._running.values():
            running.stop.set()
            if running.mount is not None:
                running.mount.stop()
        for place in list(self._running):
            self._end(place, members)

    def _serving(self, place: Place, mount: Mount) -> None:
        self._tell(f"{place.cluster}/{place.broker} at {mount.address}")
        self.failed.pop(place, None)
        self.living.discard(place)

    # -- one mount, in its thread -----------------------------------------------------------------

    def _mount(self, place: Place, running: _Running) -> None:
        try:
            host, port = self._settings.listen
            why = ""
            for at in range(port, port + PORTS_TRIED):
                why_not = self._why_not(host, at) if port else ""
                if not why_not and self._mount_at(place, running, (host, port and at)):
                    return
                why = why or why_not
            running.error = f"no port from {port} on is free: {why or 'taken meanwhile'}"
        except TieredStoreError as error:
            if not running.stop.is_set():
                running.error = str(error)
                running.is_living = isinstance(error, NotHandedOverError)
        except Exception as error:  # noqa: BLE001 (told by `_note`; the others are served on)
            _LOG.exception("the mount of %s/%s ended by a defect", place.cluster, place.broker)
            running.error = f"ended by a defect: {error!r}"

    def _why_not(self, host: str, port: int) -> str:
        """Why a mount is not worth opening there, which costs requests, a lease and an epoch; empty: it is."""
        has_vip = self._settings.has_vip and port > VIP_BELOW
        ports = [port, *([port - VIP_BELOW] if has_vip else [])]
        return next(filter(None, (why_taken(Address(host, at)) for at in ports)), "")

    def _mount_at(self, place: Place, running: _Running, listen: tuple[str, int]) -> bool:
        """Mount and serve; False when the port was not free."""
        advertise = self._settings.advertise
        settings = replace(
            self._settings,
            listen=listen,
            advertise=advertise and (advertise[0], 0),
            cluster=place.cluster,
            broker=place.broker,
            needs_handover=True,
        )
        mount = Mount.open(
            self._url, settings, options=self._options, clock=self._clock, stopping=running.stop
        )
        running.mount = mount
        self.on_mount(place, mount)
        try:
            mount.run(lambda ready: self._serving(place, ready))
        except InvalidError as error:
            if "cannot listen" not in error.what or not listen[1]:
                raise
            running.mount = None
            return False
        finally:
            mount.close()
        return True
