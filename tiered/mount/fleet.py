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

import hashlib
import logging
import threading
from dataclasses import dataclass, field, replace
from math import ceil
from typing import TYPE_CHECKING, Final

from backends.errors import BackendError
from tiered.api.broker_place import find_places
from tiered.api.stores import backend_errors, open_for_reading
from tiered.errors import FencedError, InvalidError, TieredStoreError
from tiered.journal.lease import Holder, Lease, read_lease
from tiered.keys import MEMBERS, member_prefix, parse_member_key
from tiered.mount.mount import Mount, MountSettings

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
"""After so long without a sign the object of a member is deleted by whoever sees it."""
PORTS_TRIED: Final = 1000


def choose(members: Iterable[str], places: Iterable[Place]) -> Mapping[Place, str]:
    """Who mounts what. Pure: the same members and brokers give the same answer, in any order.

    Args:
        members: Ids of the members that live.
        places: Brokers that are to be mounted.

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
            store: With retries.
            member: Our id.
            seconds: How long a sign of us lasts.
            clock: Time.
            rng: For the id of our writer.
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
            BackendError: The store does not answer.
        """
        try:
            self._lease.acquire(wait=False, announce=lambda _: None, stop=self._wait)
        except FencedError as error:
            raise FencedError(
                f"a member {self._member} lives: {error.what}",
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
            BackendError: The store does not answer.
        """
        self._lease.renew()

    def leave(self) -> None:
        """Have the others see at once that we go."""
        self._lease.release()

    def alive(self) -> list[str]:
        """Ids of the members that live, ours among them.

        Raises:
            BackendError: The store does not answer.
        """
        now_ms, found = int(self._clock.now_ms()), {self._member}
        for info in self._store.list(MEMBERS):
            member = parse_member_key(info.key)
            state, _ = read_lease(self._store, info.key)
            if member is None or state is None or member == self._member:
                continue
            if not (state.released or state.expires_ms <= now_ms or state.holder.is_gone()):
                found.add(member)
            elif state.expires_ms + FORGOTTEN_MS < now_ms:
                self._store.delete(info.key)
        return sorted(found)


@dataclass(slots=True)
class _Running:
    """A mount in its thread.

    Attributes:
        stop: Ends it, also while it waits for a lease.
        thread: In which it runs.
        mount: Once it is open.
        error: Why it ended by itself.
    """

    stop: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    mount: Mount | None = None
    error: str = ""


class Fleet:
    """One member of a fleet. See the module's contract.

    Attributes:
        member: Its id: the address at which it is reached.
        is_drained: After ``run``: all mounts ended in order.
    """

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
            url: Below which the brokers are.
            settings: Of each mount; the port of ``listen`` is that of the first, others take the next that are free.
            options: For S3.
            clock: Time.
            rng: For ids.
            tell: Told what happens, for people.
            stopping: ``stop`` sets it.
        """
        host, port = settings.advertise or settings.listen
        self.member = f"{host or Holder.present().host}:{port or Holder.present().pid}"
        self.is_drained = True
        self.ended: list[Mount] = []
        self._url = url
        self._settings = settings
        self._options = options
        self._clock = clock
        self._rng = rng
        self._tell = tell
        self._stopping = stopping or threading.Event()
        self._running: dict[Place, _Running] = {}
        self._not_before_s: dict[Place, float] = {}
        self._told: dict[Place, str] = {}
        self._places: Sequence[Place] = ()
        self._looked_s = float("-inf")

    def stop(self) -> None:
        """End all mounts in order. From any thread."""
        self._stopping.set()

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
            self._end_all()
            members.leave()
            opened.close()

    def _look(self, store: ObjectStore, members: Members) -> None:
        try:
            members.renew()
            now_s = self._clock.monotonic_s()
            if now_s - self._looked_s >= PLACES_S:
                self._places, self._looked_s = find_places(store), now_s
            chosen = choose(members.alive(), self._places)
        except BackendError as error:
            _LOG.warning("could not look who mounts what, trying again: %s", error)
            return
        mine = {place for place, member in chosen.items() if member == self.member}
        for place in [place for place in self._running if place not in mine]:
            self._tell(f"{place.cluster}/{place.broker} goes to {chosen.get(place, 'nobody')}")
            self._end(place)
        for place in sorted(mine):
            self._see_to(place)

    def _see_to(self, place: Place) -> None:
        """Have a broker mounted, or mounted again."""
        now_s = self._clock.monotonic_s()
        running = self._running.get(place)
        if running is not None and running.thread is not None and not running.thread.is_alive():
            if running.error and self._told.get(place) != running.error:
                self._tell(f"{place.cluster}/{place.broker} is not mounted: {running.error}")
            self._told[place] = running.error
            self._not_before_s[place] = now_s + RETRY_S
            self._end(place)
            running = None
        if running is None and now_s >= self._not_before_s.get(place, now_s):
            running = self._running[place] = _Running()
            running.thread = threading.Thread(
                target=self._mount, args=(place, running), name=f"tiered-mount-{place.broker}"
            )
            running.thread.start()

    def _end(self, place: Place) -> None:
        running = self._running.pop(place)
        running.stop.set()
        if running.mount is not None:
            running.mount.stop()
        if running.thread is not None:
            running.thread.join()
        if running.mount is not None:
            self.is_drained = self.is_drained and running.mount.is_drained
            self.ended.append(running.mount)

    def _end_all(self) -> None:
        for running in self._running.values():
            running.stop.set()
            if running.mount is not None:
                running.mount.stop()
        for place in list(self._running):
            self._end(place)

    # -- one mount, in its thread -----------------------------------------------------------------

    def _mount(self, place: Place, running: _Running) -> None:
        try:
            host, port = self._settings.listen
            for tried in range(PORTS_TRIED):
                if self._mount_at(place, running, (host, port and port + tried)):
                    return
            running.error = f"no port from {port} on is free"
        except TieredStoreError as error:
            if not running.stop.is_set():
                running.error = str(error)

    def _mount_at(self, place: Place, running: _Running, listen: tuple[str, int]) -> bool:
        """Mount and serve; False when the port was not free.

        Raises:
            TieredStoreError: It could not be mounted, or ended by itself.
        """
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
        try:
            mount.run(
                lambda ready: self._tell(f"{place.cluster}/{place.broker} at {ready.address}")
            )
        except InvalidError as error:
            if "cannot listen" not in error.what or not listen[1]:
                raise
            running.mount = None
            return False
        finally:
            mount.close()
        return True
