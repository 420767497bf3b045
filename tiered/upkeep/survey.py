"""One look at a tier for gc, and what ``tiered.log.orphans`` decides of it. Changes nothing.

Order: lease, listing, then the journal's recent history, so that every name that was there before the listing is seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from backends.base import foreign_below
from backends.errors import ObjectNotFoundError
from backends.probe import PREFIX as PROBES
from tiered.errors import DataError
from tiered.keys import JOURNAL
from tiered.log.history import TierHistory
from tiered.log.named import named_objects
from tiered.log.orphans import Known, OrphanPlan, plan_orphans
from tiered.upkeep.lease import report_lease

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backends.base import ObjectInfo, ObjectStore
    from tiered.clock import Clock
    from tiered.journal.ahead import JournalBytes

MISSING_LOOKED_AT = 100
"""Of so many objects that seem to be missing it is looked whether they really are; one is enough to refuse."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What was found at one look.

    Attributes:
        history: The journal.
        orphans: The decision.
        takes_reign: It presumes that a reign is taken first.
        is_held: A writer is alive.
        listed: Every object that could be deleted, as listed.
    """

    history: TierHistory
    orphans: OrphanPlan
    takes_reign: bool
    is_held: bool
    listed: dict[str, ObjectInfo]


def survey(
    store: ObjectStore,
    prefix: str,
    clock: Clock,
    *,
    now_ms: int,
    grace_ms: int,
    limit: int,
    journal: JournalBytes | None = None,
) -> Survey:
    """Look at a tier.

    Args:
        store: With retries.
        prefix: Of the broker.
        clock: For the lease.
        now_ms: Against which ages are held.
        grace_ms: The grace.
        limit: Deletions at most.
        journal: Reads entries, and keeps them for the next look; None: one after another, and anew.

    Raises:
        DataError: The journal is damaged.
        BackendError: The store could not be read.
    """
    before = report_lease(store, prefix, clock)
    is_held = before.is_held
    listed = list(store.list(prefix))
    foreign = foreign_below(store, prefix)
    probes = list(store.list(PROBES))
    history = _history(store, prefix, listed, now_ms - grace_ms, journal)

    def planned(reign: int) -> OrphanPlan:
        known = Known(
            prefix=prefix,
            state=history.state,
            base=history.base,
            protected=history.protected(),
            once_named=history.once_named,
            bound=history.bound,
            reign=reign,
            old_ms=now_ms - grace_ms,
            now_ms=now_ms,
        )
        plan = plan_orphans(listed, probes, known, limit=limit)
        plan.left.add_unknown(foreign)
        return plan

    orphans = planned(history.state.generation)
    takes_reign = False
    if not is_held and orphans.left.present_reign and not orphans.refusals:
        beyond = planned(history.state.generation + 1)
        takes_reign = len(beyond.deletions) > len(orphans.deletions)
        orphans = beyond if takes_reign else orphans
    orphans.refusals += history.problems
    long_named = named_objects(before.state).keys()
    orphans.refusals += _not_shown(store, prefix, orphans.missing & long_named)
    orphans.refusals += _truly_missing(store, prefix, history, orphans.missing - long_named)
    if orphans.refusals:
        orphans.deletions.clear()
    seen = {info.key: info for info in (*listed, *probes)}
    return Survey(history, orphans, takes_reign and bool(orphans.deletions), is_held, seen)


def _history(
    store: ObjectStore,
    prefix: str,
    listed: list[ObjectInfo],
    old_ms: int,
    journal: JournalBytes | None,
) -> TierHistory:
    entries = [info for info in listed if info.key.startswith(prefix + JOURNAL)]
    if journal is None:
        return TierHistory(store, prefix, entries, old_ms)
    with journal.reading(store, entries) as ahead:
        return TierHistory(ahead, prefix, entries, old_ms)


def refused(reasons: list[str], where: str) -> Exception:
    """Nothing is deleted, and why."""
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    return DataError(
        f"nothing is deleted, since something is missing or strange: {reasons[0]}{more}",
        where=where,
        do="run `tiered verify --deep`",
    )


def _not_shown(store: ObjectStore, prefix: str, missing: set[str]) -> Iterator[str]:
    """What was named before the listing, and still is, and was not listed. That alone is reason enough.

    A store may find by its name what it lists under another, as a folder does that takes ``Orders`` and ``orders`` for
    one: then the listing shows, under a name that nobody named, the very objects that must stay. Likewise what lies behind
    a symbolic link that somebody has put into a tier's folder.
    """
    for key in sorted(missing)[:MISSING_LOOKED_AT]:
        try:
            store.head(prefix + key)
        except ObjectNotFoundError:
            yield f"{prefix}{key} is named by the journal and is gone"
        else:
            yield (
                f"{prefix}{key} is named by the journal and can be read, but no listing shows it:"
                " a folder on its way may be a symbolic link, which no listing follows, or the store may take names"
                " for one that differ only in case"
            )


def _truly_missing(
    store: ObjectStore, prefix: str, history: TierHistory, missing: set[str]
) -> Iterator[str]:
    """What an entry names and is not there: what came behind the listing is, and what was unnamed meanwhile may go."""
    gone: list[str] = []
    for key in sorted(missing)[:MISSING_LOOKED_AT]:
        try:
            store.head(prefix + key)
        except ObjectNotFoundError:
            gone.append(key)
    if gone:
        history.follow()
        named = named_objects(history.state)
        for key in gone:
            if key in named:
                yield f"{prefix}{key} is named by the journal and is gone"
