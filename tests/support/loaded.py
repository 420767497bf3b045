"""A broker under load and the writer that tiers it, threads and all, on a virtual clock."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from simulation import scheduler as simulated
from simulation.scheduler import Owner, Scheduler, SimClock
from support.synthetic import SyntheticStore

from backends.memory import MemoryStore
from backends.wrapping import MeteredStore
from tiered.api.broker_place import Place
from tiered.attach.writer import Attachment, AttachSettings
from tiered.upkeep.gc import apply_gc, plan_gc
from tiered.upkeep.workplace import Workplace

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from backends.base import ObjectStore
    from tiered.clock import Clock

KEPT = 64
"""Messages of a queue that the broker keeps."""


class Broker(SyntheticStore):
    """One whose follower can be told that the head of the log, which it has passed, is gone."""

    def follow(self, *args: Any, **more: Any) -> Any:
        """As the parent does; keeps the follower."""
        self._follower = super().follow(*args, **more)
        return self._follower

    def forget(self, kept: int) -> None:
        """Forget all of the log but its end."""
        dropped = len(self._log) - kept
        assert self._follower._at >= dropped
        self._follower._at -= dropped
        del self._log[:dropped]


class Load:
    """A broker that stores at a constant rate, one writer that tiers it, and gc now and then; nothing takes time.

    Attributes:
        meter: Of the writer's requests.
        gc_meter: Of those of gc.
    """

    def __init__(
        self,
        queues: int,
        settings: AttachSettings,
        *,
        body: bytes = b"x" * 1024,
        way: Callable[[ObjectStore, Clock], ObjectStore] = lambda store, _clock: store,
    ) -> None:
        """Make all of it.

        Args:
            queues: Of the topic ``t``, to which ``send`` gives a message each.
            settings: Of the writer.
            body: Of such a message.
            way: What lies between the writer and the store.
        """
        self.scheduler = Scheduler(random.Random(1))
        self.clock = SimClock(self.scheduler)
        self.store = MemoryStore(now_ms=self.clock.now_ms)
        self.meter = MeteredStore(way(self.store, self.clock))
        self.gc_meter = MeteredStore(self.store)
        self.local = Broker()
        self.queues = queues
        self._body = body
        self._actions: list[tuple[float, float, Callable[[], None]]] = []
        self.attachment = Attachment(
            local=self.local, meter=self.meter, place=Place("c", "b"), settings=settings, clock=self.clock,
            rng=random.Random(2), announce=lambda _state: None,
        )  # fmt: skip

    def every(self, period_s: float, action: Callable[[], None], *, first_s: float = 0.0) -> None:
        """Do something now and then, between two steps of any thread."""
        self._actions.append((first_s, period_s, action))

    def send(self) -> None:
        """A message to each queue."""
        for queue in range(self.queues):
            offset = self.local.append("t", queue, self._body)
            if offset >= 2 * KEPT and offset % KEPT == 0:
                self.local.expire("t", queue, offset - KEPT)
        if len(self.local._log) > 4 * KEPT * self.queues:
            self.local.forget(2 * KEPT * self.queues)

    def collect(self) -> None:
        """Carry out gc."""
        at = Workplace(self.gc_meter, self.gc_meter, Place("c", "b"), self.clock, random.Random(3))  # type: ignore[arg-type]
        plan = plan_gc(at.store, at.place, at.clock, grace_ms=60_000, max_deletions=1_000_000)
        assert not plan.refusals
        apply_gc(at, plan)

    def run(self, seconds: float) -> None:
        """So long by the virtual clock; then the writer stops."""
        owner, scheduler = Owner("writer"), self.scheduler
        scheduler.owners.append(owner)
        scheduler.next_operation_s = 0.0
        due = [[first_s, period_s, action] for first_s, period_s, action in self._actions]

        def operate() -> None:
            for row in due:
                if scheduler.now_s >= row[0]:
                    row[0] += row[1]
                    row[2]()
            scheduler.next_operation_s = min(row[0] for row in due)
            if scheduler.now_s >= seconds:
                self.attachment.stop()
                scheduler.next_operation_s = float("inf")

        def live() -> None:
            try:
                self.attachment._begin()
                self.attachment.run()
            except BaseException as error:
                scheduler.fail(error)
                raise
            finally:
                self.attachment.close()

        scheduler.operate = operate
        scheduler.spawn(owner, "main", live)
        scheduler.run()
        fault = self.attachment.fault
        if fault is not None:
            raise fault


def free_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No queue's lock is taken by chance, and a long run is no hang."""
    monkeypatch.setattr(simulated, "_BUSY", 0.0)
    monkeypatch.setattr(simulated, "_HANG_S", 3600.0)
