"""Takes away files of an archive that others have replaced. Plan, then apply.

Overview: the log names each file that a merge (or a taken-back end) has taken out of the archive, and since when.
``plan_clean`` lists those that have been so for longer than a grace, in which whoever planned a read before comes to its
end.

Ordering: deletion is last. The log is read again right before it; a file that it names, or one that is not as large as the
log said, stops the run before anything is deleted. So does a file of messages that the log names and that is gone, or has
another size than it says: what was replaced may be all that is left of its rows. Then an entry says that they are gone.

After a crash: some are gone; the log still names them as replaced, and the next run goes on.

What no entry ever named (files of killed jobs) is listed in the plan and not touched: a job that is at work may be about to
name it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backends.errors import ObjectNotFoundError
from tiered.archive.audit import harmed_files, named_sizes
from tiered.archive.machine import clean_action
from tiered.archive.model import DATA, ENTRIES_KEPT, LOG, SIDE
from tiered.archive.moves import Replaced
from tiered.crashpoints import reached
from tiered.errors import InvalidError
from tiered.journal.checkpoint import trim_journal
from tiered.upkeep.workplace import FORMAT, Plan, moved_on

if TYPE_CHECKING:
    from tiered.archive.machine import ArchiveState
    from tiered.archive.task import Workshop
    from tiered.journal.append import JournalWriter

WHAT = "archive"
ENTRY = 1000
ROOTS = (DATA, SIDE)
LISTED = 1000
"""Of the files that no entry names, in a plan."""


def plan_clean(at: Workshop, state: ArchiveState, *, grace_ms: int, limit: int) -> Plan:
    """What may be deleted now, and what no entry names.

    Args:
        at: Tier and archive.
        state: What the log says.
        grace_ms: Leave what was replaced within it.
        limit: Delete at most so many.

    Raises:
        BackendError: The archive could not be listed.
    """
    before_ms = at.clock.now_ms() - grace_ms
    named = named_sizes(state)
    old = [one for one in state.replaced if one.at_ms < before_ms and one.key not in named]
    young = len(state.replaced) - len(old)
    refusals = _harmed(at, state)
    if refusals:
        old = []
    return {
        "format": FORMAT,
        "what": WHAT,
        "url": at.archive.url,
        "cluster": at.place.cluster,
        "broker": at.place.broker,
        "made_ms": at.clock.now_ms(),
        "grace_ms": grace_ms,
        "young": young,
        "deletion_count": len(old[:limit]),
        "deletion_bytes": sum(one.size_bytes for one in old[:limit]),
        "is_cut": len(old) > limit,
        "deletions": [one.row() for one in old[:limit]],
        "refusals": refusals[:LISTED],
        **_unnamed(at, {*named, *(one.key for one in state.replaced)}),
    }


def apply_clean(at: Workshop, log: JournalWriter[ArchiveState], plan: Plan) -> dict[str, Any]:
    """Carry out a plan.

    Returns:
        ``deleted``, ``deleted_bytes``, ``already_gone``.

    Raises:
        InvalidError: It is of another archive, or the archive has moved on. Nothing was deleted.
        BackendError: A store failed. Applying again goes on.
    """
    if plan["url"] != at.archive.url:
        raise InvalidError(f"this plan is of {plan['url']}", do="plan again")
    due = [Replaced.of(row) for row in plan["deletions"]]
    log.catch_up()
    known = set(log.state.replaced)
    due = [one for one in due if one in known]
    there = [one for one in due if _is_there(at, one)]
    done = {"deleted": 0, "deleted_bytes": 0, "already_gone": len(due) - len(there)}
    log.catch_up()
    named = named_sizes(log.state)
    for one in there:
        if one.key in named:
            raise moved_on(f"{one.key} is part of the archive again")
    if harmed := _harmed(at, log.state):
        raise moved_on(harmed[0])
    for one in there:
        at.archive.delete(one.key)
        reached("archive-deleted")
        done["deleted"] += 1
        done["deleted_bytes"] += one.size_bytes
    for start in range(0, len(due), ENTRY):
        log.append([clean_action(one.key for one in due[start : start + ENTRY])])
    if log.write_checkpoint():
        trim_journal(at.archive, LOG, log.number - ENTRIES_KEPT)
    return done


def _unnamed(at: Workshop, known: set[str]) -> dict[str, Any]:
    found = [info for root in ROOTS for info in at.archive.list(root) if info.key not in known]
    return {
        "unnamed_count": len(found),
        "unnamed_bytes": sum(info.size_bytes for info in found),
        "unnamed": sorted(info.key for info in found)[:LISTED],
    }


def _is_there(at: Workshop, one: Replaced) -> bool:
    try:
        found = at.archive.head(one.key)
    except ObjectNotFoundError:
        return False
    if found.size_bytes != one.size_bytes:
        raise moved_on(f"{one.key} has another size than the log says")
    return True


def _harmed(at: Workshop, state: ArchiveState) -> list[str]:
    """What is wrong with the files of messages that count, so far as a listing tells."""
    found = harmed_files(at.archive, state).items()
    return [
        f"{key}: {what}, so what was replaced stays" for key, what in found if key.startswith(DATA)
    ]
