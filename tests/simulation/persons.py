"""What a person does to a tier in the simulation: takes a queue's end back, breaks a lease, erases, makes the index again,
pauses a topic and has it go on.

Each is the real plan and the real execution, by a process that can be killed, stopped and overtaken like any other. What a
person has asked for is written down beforehand, so that history can hold what was done against it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulation.history import require
from simulation.reclaimer import GRACE_S, TTL_S, Reclaimer

from tiered.log.merge import plan_erasure
from tiered.model import MessageQueue
from tiered.upkeep.expire import apply_steps, apply_truncate, plan_expire, plan_truncate
from tiered.upkeep.gc import apply_erasure, apply_gc, plan_gc
from tiered.upkeep.rebuild import apply_rebuild_index, plan_rebuild_index
from tiered.upkeep.workplace import break_lease, set_paused

if TYPE_CHECKING:
    from collections.abc import Collection

    from tiered.log.merge import MergePlan, MergePolicy
    from tiered.log.parts import TierState

DEEDS = ("truncate", "break", "erase", "index", "pause")
"""What a person can do."""


def plan_one_erasure(
    state: TierState, policy: MergePolicy, bundles: Collection[str]
) -> MergePlan | None:
    """One bundle at a time, as if each were as large as may be gathered at once."""
    plans = (plan_erasure(state, policy, {key}) for key in sorted(bundles))
    return next((plan for plan in plans if plan), None)


class Person(Reclaimer):
    """A process that a person has started."""

    def _live(self) -> None:
        deeds = {
            "truncate": self._truncate,
            "break": self._break,
            "erase": self._erase,
            "index": self._index,
            "pause": self._pause,
            "resume": self._resume,
        }
        deeds[self._what]()

    def _hesitate(self) -> None:
        """A plan is looked at, before it is carried out."""
        if self._rng.random() < 0.4:
            self.world.scheduler.park(self._rng.random() * 6)

    def _truncate(self) -> None:
        """From some offset on; the queue goes on there."""
        history = self.world.history
        if not history.queues:
            return
        queue = self._rng.choice(sorted(history.queues))
        incarnation = history.queues[queue][-1]
        if incarnation.min >= incarnation.commit:
            return
        end = self._rng.randrange(incarnation.min, incarnation.commit)
        plan = plan_truncate(self._at, MessageQueue(*queue), end)
        self._hesitate()
        if plan.steps:
            history.asked.setdefault(queue, set()).add(end)
            done = apply_truncate(self._at, plan)
            self.world.count("truncated by a person", int(done["steps"]))

    def _pause(self) -> None:
        """A topic that is paused goes on, as likely as one that is not is paused."""
        history = self.world.history
        topics = sorted({topic for topic, _ in history.queues})
        if history.paused and self._rng.random() < 0.5:
            self._resume()
        elif topics and not self.world.is_ending:
            done = set_paused(self._at, self._rng.choice(topics), is_paused=True)
            self.world.count("paused", int(done["is_changed"]))

    def _resume(self) -> None:
        for topic in sorted(self.world.history.paused):
            done = set_paused(self._at, topic, is_paused=False)
            self.world.count("resumed", int(done["is_changed"]))

    def _break(self) -> None:
        if break_lease(self._at.store, self._at.prefix, self._at.clock, breaker=self._at.new_id()):
            self.world.count("lease broken")

    def _erase(self) -> None:
        """What is old is given up, of one topic everything; what is then said to be erased is in no bundle that is named."""
        at, world = self._at, self.world
        named = world.history.named
        # Topics share bundles, so that other messages remain in those of the one.
        topic = self._rng.choice(sorted({topic for topic, _ in world.broker.branches}))
        world.removed.add(topic)
        ttls = {topic: 0}
        old = plan_expire(at, lambda topic: ttls.get(topic, round(TTL_S * 1000)), objects_max=20)
        apply_steps(at, old)
        plan = plan_gc(
            at.store, at.place, at.clock,
            grace_ms=round(GRACE_S * 1000), max_deletions=50, erases=True,
        )  # fmt: skip
        self._hesitate()
        if plan.erasures:
            world.kill_writers()  # or it is refused
            done = apply_erasure(at, plan)
            wanted = {row.key for row in plan.erasures} - {row["key"] for row in done["stays"]}
            left = {key.removeprefix(at.prefix) for key in wanted} & named()
            require(not left, f"{left} is called erased, and named")
            world.count("erased", int(done["bundles"]))
        apply_gc(at, plan)

    def _index(self) -> None:
        plan = plan_rebuild_index(self._at)
        self._hesitate()
        if plan.has_work:
            done = apply_rebuild_index(self._at, plan, items_max=20)
            self.world.count("indexed by a person", int(done["objects"]))
