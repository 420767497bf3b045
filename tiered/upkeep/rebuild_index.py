"""``tiered rebuild --index``: what is lost or damaged of the key index, and what it does not cover, again. Plan, then apply.

Overview: the plan reads every object that the journal names and checks each byte. What is missing or damaged is dropped by
one ``index`` action; then all that no object covers is read from the tier and made into new objects, as a writer does it.

Ordering: a reign, so that no writer is at work; what is dropped; then object by object, each with its entry.

A reign that was taken meanwhile by one who only tidies up (``gc``) ends nothing: with no writer alive another is taken, and
what is in hand is stored again under it, since an object of an older reign may be deleted before it is named.

After a crash, or when a writer takes over in the middle: what was named stays, and the rest is found again by the next plan,
or made by that writer. Nothing is deleted: ``gc`` collects what was dropped.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tiered import keys
from tiered.errors import FencedError, InvalidError
from tiered.index.builder import IndexBuilder
from tiered.index.indexer import Indexer
from tiered.log.indexed import after_index, index_action
from tiered.log.reader import TierReader
from tiered.log.verify_index import IndexCheck, unindexed_messages
from tiered.upkeep.plans import FORMAT, Plan, moved_on
from tiered.upkeep.reign import reign_and

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiered.journal.entry import Action
    from tiered.journal.writer import JournalWriter
    from tiered.log.parts import IndexObject, TierState
    from tiered.upkeep.workplace import Workplace

WHAT = "rebuild --index"
REIGNS_MAX = 1000
"""So often a run may lose its reign to others that only tidy up."""
THREADS = 4
"""Objects checked at once; each is held in memory."""


def plan_rebuild_index(
    at: Workplace, told: Callable[[str, int, int], None] = lambda _what, _done, _total: None
) -> Plan:
    """See what is to be made again. Writes nothing.

    Args:
        at: The tier.
        told: Of progress: what, how many are done, of how many.

    Raises:
        TieredStoreError: The journal cannot be read.
        BackendError: The store does not answer.
    """
    reader = TierReader(at.store, at.prefix)
    reader.refresh()
    state = reader.state
    drop: list[dict[str, str]] = []
    with ThreadPoolExecutor(THREADS, "tiered-rebuild") as pool:
        checks = [IndexCheck(at.store, at.prefix, index) for index in state.indexes]
        for done, (index, found) in enumerate(
            zip(state.indexes, pool.map(lambda check: check.run(), checks), strict=True), 1
        ):
            told("checking the index", done, len(checks))
            reasons = [f"{problem.kind}: {problem.detail}" for problem in found.problems]
            reasons += ["missing"] * len(found.missing)
            if reasons:
                drop.append({"key": index.place.key, "reason": reasons[0]})
    return {
        "format": FORMAT,
        "what": WHAT,
        "url": at.store.url,
        "cluster": at.place.cluster,
        "broker": at.place.broker,
        "store": dict(state.store),
        "journal_number": reader.journal_number,
        "generation": state.generation,
        "objects": len(state.indexes),
        "items": sum(index.count for index in state.indexes),
        "size_bytes": sum(index.place.object_bytes for index in state.indexes),
        "drop": drop,
        "unindexed_messages": unindexed_messages(_without(state, [one["key"] for one in drop])),
    }


def has_work(plan: Plan) -> bool:
    """Whether there is anything to do."""
    return bool(plan["drop"] or plan["unindexed_messages"])


def apply_rebuild_index(
    at: Workplace,
    plan: Plan,
    *,
    items_max: int,
    directory: str | None = None,
    told: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
) -> dict[str, Any]:
    """Drop what the plan says, and cover all that is not covered now.

    Args:
        at: The tier.
        plan: From ``plan_rebuild_index``, perhaps long ago.
        items_max: Keys in one object.
        directory: For the work file; None: the system's for temporary files.
        told: Of progress: what, how many are done, of how many.

    Returns:
        What was done: ``dropped``, ``objects``, ``items``, ``size_bytes``, what is left: ``unindexed_messages``, and
        ``damaged``: queues that cannot be read on, and why.

    Raises:
        InvalidError: The tier is another one.
        FencedError: A writer is at work, or has taken over.
        BackendError: The store does not answer; planning again shows what is left.
        OSError: There is no room for the work file.
    """
    run = _Run(at, reign_and(at), items_max, directory)
    try:
        if dict(run.journal.state.store) != plan["store"]:
            raise moved_on("it belongs to another store")
        dropped = run.drop([one["key"] for one in plan["drop"]])
        run.all(told)
    finally:
        run.builder.reset()
    run.journal.write_checkpoint()
    return {
        "dropped": dropped,
        **run.done,
        "was_applied": has_work(plan) and not dropped and not run.done["objects"],
        "unindexed_messages": unindexed_messages(run.journal.state),
        "damaged": [
            {"queue": f"{queue} incarnation {number}", "reason": str(error)}
            for (queue, number), error in run.indexer.damaged.items()
        ],
        "generation": run.journal.generation,
    }


class _Run:
    def __init__(
        self,
        at: Workplace,
        journal: JournalWriter[TierState],
        items_max: int,
        directory: str | None,
    ) -> None:
        sequence = itertools.count()
        self._at = at
        self._reigns_left = REIGNS_MAX
        self.journal = journal
        self._items_max = items_max
        self.builder = IndexBuilder(
            at.store,
            at.prefix,
            lambda: keys.ObjectId(self.journal.generation, self.journal.writer, next(sequence)),
            directory=directory,
        )
        self.indexer = Indexer(self.builder, at.store, at.prefix)
        self.done = {"objects": 0, "items": 0, "size_bytes": 0}

    def drop(self, damaged: list[str]) -> int:
        """Name these objects no more; how many that were."""
        named = {index.place.key for index in self.journal.state.indexes}
        found = [key for key in damaged if key in named]
        while found and found[0] in {index.place.key for index in self.journal.state.indexes}:
            self._say(index_action([], found))
        return len(found)

    def _say(self, action: Action) -> bool:
        """Append an action; False when another has taken the reign, and it is ours again: look at the state.

        Raises:
            FencedError: A writer is alive, and will see to the rest.
        """
        try:
            self.journal.append([action])
        except FencedError:
            self._reigns_left -= 1
            if not self._reigns_left:
                raise
            self.journal = reign_and(self._at)
            return False
        return True

    def all(self, told: Callable[[str, int, int], None]) -> None:
        """Cover all that can be read."""
        total = unindexed_messages(self.journal.state)
        while self.indexer.step(self.journal.state, items_max=self._items_max):
            left = self.indexer.waits(self.journal.state)
            told("indexing", max(0, total - left), total)
            if self.builder.count >= self._items_max:
                self._publish()
        if not self.builder.is_empty:
            self._publish()

    def _publish(self) -> None:
        is_said, made = False, self.builder.finish()
        while not (is_said or self._is_named(made)):
            is_said = self._say(index_action([made]))
            if not is_said and not self._is_named(made):  # it may have become history just before
                made = self.builder.finish()
        if not self._is_named(made):
            raise moved_on("its queues have changed meanwhile")
        self.builder.reset()
        self.done["objects"] += 1
        self.done["items"] += made.count
        self.done["size_bytes"] += made.place.object_bytes

    def _is_named(self, made: IndexObject) -> bool:
        return any(one.place.key == made.place.key for one in self.journal.state.indexes)


def _without(state: TierState, drop: list[str]) -> TierState:
    """The state once these objects are dropped."""
    changed = after_index(state.indexes, state.queues, index_action([], drop))
    if changed is None:
        raise InvalidError("the journal names an index object twice", do="run `tiered verify`")
    return replace(state, indexes=changed[0], queues={**state.queues, **changed[1]})
