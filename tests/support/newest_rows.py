"""A tier whose keys are written again and again, its archive, and the newest rows by a replay."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from support import archive_jobs as jobs
from support.archive_jobs import job_context
from support.keyed import KeyedTier, Mail

from backends.memory import MemoryStore
from tiered.archive.latest import ROOT, plan_latest, read_latest, update_latest
from tiered.clock import ManualClock
from tiered.log.state import queue_action
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from tiered.archive import latest
    from tiered.archive.task import JobContext


QUEUES = [MessageQueue("t", 0), MessageQueue("t", 1)]


Rows = list[tuple[int, int, str, bytes]]


class History:
    """A tier that grows, its archive, and what a replay says."""

    def __init__(self, seed: int = 1) -> None:
        self.rng = random.Random(seed)
        self.tier = KeyedTier()
        self.at: JobContext = job_context(
            self.tier.store, MemoryStore("archive", now_ms=lambda: 1_700_000_000_000)
        )
        self.sent: dict[MessageQueue, list[Mail]] = {queue: [] for queue in QUEUES}

    def grow(self, parts: int = 3) -> None:
        for queue in QUEUES:
            for part in range(parts):
                some = [self._mail() for _ in range(25)]
                self.tier.post(queue, some, roll=not part and bool(self.sent[queue]))
                self.sent[queue] += some
            incarnation = self.tier.journal.state.incarnation(queue)
            assert incarnation
            base = incarnation.segments[-1].base_offset
            self.tier.say(queue_action("seal", queue, incarnation.number, segment=base))
        jobs.archive(self.at)

    def _mail(self) -> Mail:
        rng = self.rng
        keys = () if rng.random() < 0.1 else (f"k{rng.randrange(12)}",)
        body = b"" if rng.random() < 0.15 else rng.randbytes(20)
        return Mail(keys, body=body, time_ms=1_600_000_000_000 + rng.randrange(10**9))

    def expected(self, *, across: bool = False) -> Rows:
        found: dict[Any, Any] = {}
        for queue, mails in self.sent.items():
            for at, mail in enumerate(mails):
                if mail.keys:
                    scope = () if across else (queue.queue_id,)
                    order = (mail.time_ms if across else 0, at, queue.queue_id)
                    row = (queue.queue_id, at, mail.keys[0], mail.body)
                    found[*scope, mail.keys] = max(
                        found.get((*scope, mail.keys), ((-1, 0, 0),)), (order, row)
                    )
        return sorted(row for _, row in found.values() if row[3])

    def plan(self, *, across: bool = False) -> latest.LatestPlan:
        return plan_latest(self.at.archive, self.at.place, "t", across_queues=across)

    def update(self, run: str, clock: ManualClock | None = None, *, across: bool = False) -> Any:
        return update_latest(self.at.archive, self.plan(across=across), clock or ManualClock(), run)

    def rows(self) -> Rows:
        table = read_latest(self.at.archive, self.at.place, "t")
        assert table is not None
        return sorted(
            (row["queue_id"], row["queue_offset"], row["msg_key"], row["body"])
            for row in table.to_pylist()
        )

    def files(self) -> list[str]:
        return [info.key for info in self.at.archive.list(ROOT)]
