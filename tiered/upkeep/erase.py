"""Erasing: bundles that share given-up messages with others are rewritten without them, as a plan of ``gc`` says.

Overview: ``tiered.log.history`` finds such bundles, for any ``gc``; ``plan_erasure`` (``tiered.log.merge``) says what
becomes of them; the merger makes it, and ``merge`` entries name it. From then on nobody names the old bundles, and a later
``gc`` deletes them after its grace, as it does all others: readers that are at work get to their end.

Ordering: lease and epoch, since open segments are rewritten as well: so it refuses while a writer is alive. Then all that
is presumed is looked at again, by the state under that epoch. Data before the entry (I2), a bundle at a time. Whoever
expires beside it wins: what was rewritten meanwhile for nothing is rewritten again without it.

Retries and errors: reads and uploads are tried again by the store, entries by the journal. A damaged bundle stays as it is,
and is named.

After a crash: each bundle is rewritten or not. What was made and not named is an orphan for ``gc``;
the same plan goes on where it ended.

Memory: one bundle (64 MiB), and what is read for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tiered.dispatch.merging import Merger, Packer
from tiered.dispatch.settings import Compression
from tiered.errors import DataError
from tiered.log.history import named_bundles
from tiered.log.merge import MergePolicy, plan_erasure
from tiered.upkeep.workplace import Ledger, UploadingEpoch, require_same_tier, was_applied

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiered.dispatch.merging import MergedBundle
    from tiered.log.merge import MergeOutput, MergePlan
    from tiered.log.parts import TierState
    from tiered.upkeep.gc import GcPlan
    from tiered.upkeep.workplace import Workplace

POLICY: Final = MergePolicy(segment_bytes_max=0)
"""Segments stay what they are."""


def apply_erasure(
    at: Workplace, plan: GcPlan, *, told: Callable[[int, int], None] = lambda _done, _total: None
) -> dict[str, Any]:
    """Rewrite the bundles that a plan of ``gc`` names (``erasures``).

    Returns:
        ``bundles`` that were rewritten, and ``given_up_bytes``, about what nobody names in them; ``made`` and
        ``made_bytes``, what is named instead; ``already_done`` (by an earlier run, or a writer's merging); ``stays``, rows
        of ``key`` and ``reason``; ``gone_after_ms``, when a ``gc`` with the plan's grace may delete the old ones;
        ``was_applied``, ``epoch``, ``run``.

    Raises:
        InvalidError: The plan is of another tier.
        FencedError: A writer is at work.
    """
    ledger = Ledger(at, f"{plan.what} --erase")
    store_now_ms, began_s = ledger.begin(plan), at.clock.monotonic_s()
    run = _ErasureRun(at, plan, told)
    run.rewrite()
    ledger.end({**run.done, "stays": len(run.stays)})
    took_ms = round(1000 * (at.clock.monotonic_s() - began_s))
    return {
        **run.done,
        "stays": [{"key": key, "reason": reason} for key, reason in sorted(run.stays.items())],
        "gone_after_ms": store_now_ms + took_ms + plan.grace_ms,
        "was_applied": was_applied(
            len(plan.erasures), run.done["bundles"] + len(run.stays), run.done["already_done"]
        ),
        "epoch": run.epoch,
        "run": ledger.run,
    }


class _ErasureRun:
    def __init__(self, at: Workplace, plan: GcPlan, told: Callable[[int, int], None]) -> None:
        self._at = at
        self._plan = plan
        self._told = told
        self._epoch = UploadingEpoch(at, does="erases")
        self._bytes = {one.key.removeprefix(at.prefix): one.given_up_bytes for one in plan.erasures}
        self._left: set[str] = set()
        self.stays: dict[str, str] = {}
        names = ("bundles", "given_up_bytes", "made", "made_bytes", "already_done")
        self.done = dict.fromkeys(names, 0)

    @property
    def epoch(self) -> int:
        """The epoch under which it was done."""
        return self._epoch.journal.epoch

    def rewrite(self) -> None:
        """All that is planned and still named."""
        journal = self._epoch.journal
        try:
            uploader = self._epoch.uploader()
            require_same_tier(self._plan, journal.state)
            self._left = self._bytes.keys() & named_bundles(journal.state).keys()
            self.done["already_done"] = len(self._bytes) - len(self._left)
            packer = Packer(Compression()) if _is_packed(journal.state) else None
            merger = Merger(
                uploader, self._at.store, self._at.prefix, lambda _size: None, packer=packer
            )
            self._rewrite(merger)
            journal.write_checkpoint()
        finally:
            self._epoch.end()

    def _rewrite(self, merger: Merger) -> None:
        total, before = len(self._left), None
        while (plan := plan_erasure(self._epoch.journal.state, POLICY, self._left)) is not None:
            if plan == before:  # replay took nothing of it: it would be planned for ever
                self._leave(dict.fromkeys(_keys(plan), "the tier has moved on meanwhile"))
            before = plan
            for output in plan.outputs:
                if not _keys(plan) <= self._left or not self._make(merger, output):
                    break  # something is damaged: the others are planned anew, without it
            self._count(total)

    def _make(self, merger: Merger, output: MergeOutput) -> bool:
        """Make a bundle, and name it; False when something in it is damaged."""
        try:
            made = merger.make(output, self._renewed)
        except DataError as error:
            keys = {bundle.key for run in output.runs for bundle in run.parts.bundles}
            found = {key for key in keys if error.where == self._at.prefix + key} or keys
            self._leave(dict.fromkeys(found, error.what))
            return False
        assert made is not None
        self._epoch.journal.append([made.action()])
        self._epoch.journal.write_checkpoint()
        taken = _taken(self._epoch.journal.state, made)
        if taken:
            self.done["made"] += 1
            self.done["made_bytes"] += made.stored.bundle.size_bytes
        if 0 < taken < len(output.runs):  # the rest has expired since: it shall not stay in here
            self._bytes[made.stored.bundle.key] = 0
            self._left.add(made.stored.bundle.key)
        return True

    def _renewed(self) -> bool:
        """Never stops; the lease is prolonged on the way."""
        self._epoch.renew()
        return False

    def _leave(self, reasons: dict[str, str]) -> None:
        self.stays |= {self._at.prefix + key: reason for key, reason in reasons.items()}
        self._left -= reasons.keys()

    def _count(self, total: int) -> None:
        """Count what is named no more."""
        gone = self._left - named_bundles(self._epoch.journal.state).keys()
        self._left -= gone
        self.done["bundles"] += len(gone)
        self.done["given_up_bytes"] += sum(self._bytes[key] for key in gone)
        self._told(max(0, total - len(self._left)), total)


def _keys(plan: MergePlan) -> set[str]:
    return {bundle.key for bundle in plan.bundles}


def _is_packed(state: TierState) -> bool:
    """Whether anything in the tier is compressed: then its writers compress what is of the last level, and so do we."""
    tables = (parts.rows for one in state.placed() for parts in one.incarnation.tables())
    return any(bool((rows["stored_bytes"] < rows["records_bytes"]).any()) for rows in tables)


def _taken(state: TierState, made: MergedBundle) -> int:
    """Of how many sections of a bundle replay has made parts."""
    key, queues = made.stored.bundle.key, {run.queue for run in made.output.runs}
    incarnations = (incarnation for queue in queues for incarnation in state.queues.get(queue, ()))
    return sum(
        bundle.key == key for incarnation in incarnations for bundle in incarnation.parts().bundles
    )
