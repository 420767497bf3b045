"""Deliberate defects of what a Kafka node's records tell: leaders, transactions, and which topic it is."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

from tiered.dispatch import group_commit
from tiered.dispatch.continuity import Continuity
from tiered.dispatch.group_commit import LineageTracker
from tiered.format import kafka_log
from tiered.log import cursor, divergence, lineage, state
from tiered.upkeep import rebuild

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiered.log.parts import LineageFacts

Patches = list[Any]


def _marker_ignored() -> Patches:
    """Who ends a transaction by committing it says nothing."""
    real = kafka_log.control_markers

    def aborts(block: Any) -> Any:
        return [one for one in real(block) if one.kind == kafka_log.ControlType.ABORT]

    return [mock.patch.object(kafka_log, "control_markers", aborts)]


def _moves(change: Callable[[LineageFacts, LineageFacts], LineageFacts]) -> Patches:
    """What is known when the end of a queue was moved, and it should not be."""

    def wrong(facts: LineageFacts | None, end: int) -> LineageFacts | None:
        found = lineage.moved(facts, end)
        return change(facts, found) if facts and found else found

    return [mock.patch.object(module, "moved", wrong) for module in (state,)]


def _aborted_survive() -> Patches:
    """What was aborted stays so when its end was truncated."""
    return _moves(lambda before, after: replace(after, aborted=before.aborted))


def _epochs_not_clipped() -> Patches:
    """Leaders stay known of whom all was truncated."""
    return _moves(lambda before, after: replace(after, epochs=before.epochs))


def _open_forgotten() -> Patches:
    """A writer that begins knows of no transaction that is open."""
    before = LineageTracker._before

    def forgets(self: LineageTracker, commit: Any) -> Any:
        facts = before(self, commit)
        is_new = commit.queue not in self._known
        return replace(facts, opened=()) if facts and is_new else facts

    return [mock.patch.object(LineageTracker, "_before", forgets)]


def _node_not_asked() -> Patches:
    """Where the tier begins, or goes on behind a gap, nobody asks the node what is open."""
    real = lineage.grown

    def alone(*arguments: Any) -> Any:
        return real(*arguments[:-1], None)

    return [mock.patch.object(group_commit, "grown", alone)]


def _node_alone_asked() -> Patches:
    """Behind a truncation only what the cleaner has left to the node counts as open."""
    return [mock.patch.object(lineage, "_either", lambda _known, local: tuple(local))]


def _topic_not_compared() -> Patches:
    """A topic that was created again is the same, where it has batches of the same shapes."""
    return [mock.patch.object(Continuity, "_is_other_topic", return_value=False)]


def _stable_end_not_honoured() -> Patches:
    """Readers of what was committed see what is open."""
    return [mock.patch.object(cursor, "stable_end", lambda one: one.commit_offset)]


def _batch_cut_in_two() -> Patches:
    """A batch counts once for each of its records where a part is cut."""
    real = divergence.measure

    def wrong(store: Any, prefix: str, part: Any, count: int) -> tuple[int, int]:
        size, holes = real(store, prefix, part, max(1, count - 1))
        return size, min(holes, count)

    return [mock.patch("tiered.dispatch.continuity.measure", wrong)]


def _rebuilt_from_what_was_cut() -> Patches:
    """A rebuild takes what a journal knew of leaders for true, whatever was truncated since."""

    def trusting(known: Any, _incarnations: Any, one: Any) -> Any:
        had = [before for before in known if before.number == one.number]
        facts = had[-1].lineage if had else None
        return facts, one.min_offset

    return [mock.patch.object(rebuild, "_told_before", trusting)]


KAFKA: dict[str, Callable[[], Patches]] = {
    "a marker that commits is ignored": _marker_ignored,
    "what was aborted survives a truncation": _aborted_survive,
    "leaders survive a truncation": _epochs_not_clipped,
    "open transactions forgotten at a restart": _open_forgotten,
    "a node is not asked what is open": _node_not_asked,
    "the topic's id not compared": _topic_not_compared,
    "the last stable offset not honoured": _stable_end_not_honoured,
    "batches measured short where a part is cut": _batch_cut_in_two,
}
KAFKA_RARE: dict[str, Callable[[], Patches]] = {
    "a node alone is asked what is open": _node_alone_asked,
    "a rebuild trusts what was truncated since": _rebuilt_from_what_was_cut,
}
