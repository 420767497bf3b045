"""Takes away what lies in an archive and counts for nobody, by rule, whatever made it. Plan, then apply.

Overview: each object below the archive's folders is one of these.

========== =====================================================================================================
replaced   a file that a merge (or a forgotten end) has taken out of the archive; the log says since when
unnamed    a file that no entry names: of a job, a merge, a division or a repair that was killed or came second, or of a
           task that Spark ran twice
table      of a table of newest rows: versions in whose place others came, with their files, and files of killed runs
index      an object of the key index that covers no file that is named or replaced any more
probe      what a killed run tried out of the store
========== =====================================================================================================

``plan_clean`` lists those that have been so for longer than a grace, in which whoever planned a read before comes to its
end. Those within it are counted. What has not the form of a key of ours is somebody else's: it is counted and named, never
deleted. The log itself, and the metadata of tables in catalogs, are not looked at.

Ordering: deletion is last. The log is read again right before it; a file that it names, or one that is not what it was
when the plan was made, stops the run before anything is deleted. So does a file of messages that the log names and that is
gone, or has another size than it says: what nothing names may be all that is left of its rows. Then an entry, the fence,
condemns the files: behind it nobody can make them part of the archive, even by a job that is at work or asleep
(``tiered.archive.model.Fence``); a job at work that had one of them in hand makes it again under another key. Then they are
deleted, and an entry says so of those that the log had named.

After a crash: some are gone, and the next run goes on; the log still names replaced ones as replaced.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from backends.errors import ObjectNotFoundError
from backends.lazy_dataclass import dataclass
from tiered.archive.audit import harmed_files
from tiered.archive.latest import ROOT as TABLES
from tiered.archive.latest import delete_leftovers, folder_of, plan_leftovers
from tiered.archive.lookup import useless_parts
from tiered.archive.machine import clean_action, named_sizes
from tiered.archive.merging import condemn
from tiered.archive.model import (
    DATA,
    ENTRIES_KEPT,
    LOG,
    PROBE_OLD_MS,
    PROBES,
    SIDE,
    is_made_key,
)
from tiered.crashpoints import reached
from tiered.errors import DataError, OtherVersionError
from tiered.journal.entry import as_row, row_of
from tiered.journal.replay import trim_journal
from tiered.upkeep.workplace import PlanDocument as Plan
from tiered.upkeep.workplace import moved_on

if TYPE_CHECKING:
    from collections.abc import Iterable

    from backends.base import ObjectInfo, ObjectStore
    from tiered.archive.machine import ArchiveState
    from tiered.archive.task import JobContext
    from tiered.journal.append import JournalWriter

WHAT = "archive"
ENTRY = 1000
ROOTS = (DATA, SIDE)
LISTED = 1000
"""Of what stays, in a plan."""
REPLACED, UNNAMED, TABLE, PART, PROBE = "replaced", "unnamed", "table", "index", "probe"


@dataclass(frozen=True, slots=True)
class Leftover:
    """An object that may go."""

    key: str  # relative to the archive
    size_bytes: int  # of the object
    at_ms: int  # when it was replaced, else when it was written; UTC
    kind: str  # which of those above


def plan_clean(at: JobContext, state: ArchiveState, *, grace_ms: int, limit: int) -> Plan:
    """What may be deleted now, and what stays."""
    before_ms = at.clock.now_ms() - grace_ms
    named = named_sizes(state)
    found = [
        Leftover(one.key, one.size_bytes, one.at_ms, REPLACED)
        for one in state.replaced
        if one.key not in named
    ]
    strays = unnamed_files(at.archive, state)
    found += strays.ours
    old = [one for one in found if 0 <= one.at_ms < before_ms]
    harmed = _harmed(at, state)
    if harmed:
        old = []
    tables, damaged = _tables(at.archive, before_ms)
    old += [
        *tables,
        *_old(useless_parts(at.archive, _known(state)), PART, before_ms),
        # Of a run that is trying the store out right now none goes, however short the grace.
        *_old(at.archive.list(PROBES), PROBE, min(before_ms, at.clock.now_ms() - PROBE_OLD_MS)),
    ]
    young = [one for one in strays.ours if not 0 <= one.at_ms < before_ms]
    return at.plan(
        WHAT,
        grace_ms=grace_ms,
        young=sum(one.kind == REPLACED and one.at_ms >= before_ms for one in found),
        deletion_count=len(old[:limit]),
        deletion_bytes=sum(one.size_bytes for one in old[:limit]),
        is_cut=len(old) > limit,
        deletions=[row_of(one) for one in old[:limit]],
        refusals=[*harmed, *damaged][:LISTED],
        unnamed_count=len(young),
        unnamed_bytes=sum(one.size_bytes for one in young),
        unnamed=sorted(one.key for one in young)[:LISTED],
        foreign_count=len(strays.foreign),
        foreign=strays.foreign[:LISTED],
    )


def apply_clean(at: JobContext, log: JournalWriter[ArchiveState], plan: Plan) -> dict[str, Any]:
    """Carry out a plan.

    Returns:
        ``deleted``, ``deleted_bytes``, ``already_gone``.

    Raises:
        InvalidError: It is of another archive, or the archive has moved on. Nothing was deleted.
        BackendError: A store failed. Applying again goes on.
    """
    at.require_own(plan)
    rows = [as_row(Leftover).decode(row) for row in plan["deletions"]]
    done = {"deleted": 0, "deleted_bytes": 0, "already_gone": 0}
    _delete_files(at, log, [one for one in rows if one.kind in {REPLACED, UNNAMED}], done)
    _delete_others(at, log.state, [one for one in rows if one.kind in {PART, PROBE}], done)
    before_ms = at.clock.now_ms() - plan["grace_ms"]
    for folder in sorted({folder_of(one.key) or "" for one in rows if one.kind == TABLE}):
        for info in delete_leftovers(at.archive, folder, before_ms, at.clock.now_ms()):
            _count(done, info.size_bytes)
    if log.write_checkpoint():
        trim_journal(at.archive, LOG, log.number - ENTRIES_KEPT)
    return done


def _delete_files(
    at: JobContext, log: JournalWriter[ArchiveState], rows: list[Leftover], done: dict[str, int]
) -> None:
    log.catch_up()
    known = {one.key for one in log.state.replaced}
    due = [one for one in rows if one.kind == UNNAMED or one.key in known]
    there = [one for one in due if _is_there(at, one)]
    done["already_gone"] += len(due) - len(there)
    log.catch_up()
    named = named_sizes(log.state)
    for one in there:
        if one.key in named:
            raise moved_on(f"{one.key} is part of the archive again")
    if there and (harmed := _harmed(at, log.state)):
        raise moved_on(harmed[0])
    condemned = set(condemn(log, (one.key for one in there)))
    reached("archive-condemned")
    for one in there:
        if one.key not in condemned:
            continue  # somebody has just named it
        at.archive.delete(one.key)
        reached("archive-deleted")
        _count(done, one.size_bytes)
    gone = [one.key for one in due if one.key in known]
    for start in range(0, len(gone), ENTRY):
        log.append([clean_action(gone[start : start + ENTRY])])


def _delete_others(
    at: JobContext, state: ArchiveState, rows: list[Leftover], done: dict[str, int]
) -> None:
    """Delete what nothing but its name refers to."""
    useless = {info.key for info in useless_parts(at.archive, _known(state))} if rows else set()
    for one in rows:
        if one.kind == PROBE or one.key in useless:
            at.archive.delete(one.key)
            _count(done, one.size_bytes)


def _count(done: dict[str, int], size_bytes: int) -> None:
    done["deleted"] += 1
    done["deleted_bytes"] += size_bytes


# -- what lies there -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Strays:
    """Objects below the folders of files that the log does not name, neither as part of the archive nor as replaced."""

    ours: list[Leftover]  # those that an archiver made, in order of key
    foreign: list[str]  # Keys of the others


def unnamed_files(archive: ObjectStore, state: ArchiveState) -> Strays:
    """Look at all that lies there: a listing."""
    known = _known(state)
    found = [info for root in ROOTS for info in archive.list(root) if info.key not in known]
    ours = _as_rows((info for info in found if is_made_key(info.key)), UNNAMED)
    return Strays(ours, [info.key for info in found if not is_made_key(info.key)])


def _known(state: ArchiveState) -> set[str]:
    return {*named_sizes(state), *(one.key for one in state.replaced)}


def _as_rows(infos: Iterable[ObjectInfo], kind: str) -> list[Leftover]:
    return [Leftover(info.key, info.size_bytes, info.modified_ms, kind) for info in infos]


def _tables(archive: ObjectStore, before_ms: int) -> tuple[list[Leftover], list[str]]:
    """What may go of tables of newest rows; and of which tables nothing does, since a version is damaged."""
    found: list[Leftover] = []
    damaged: list[str] = []
    ours = (info for info in archive.list(TABLES) if folder_of(info.key))
    for folder, listed in groupby(ours, lambda info: folder_of(info.key) or ""):
        try:
            found += _as_rows(plan_leftovers(archive, listed, before_ms)[0], TABLE)
        except (DataError, OtherVersionError, ObjectNotFoundError) as error:
            damaged.append(f"{folder}: {error}, so all of this table stays")
    return found, damaged


def _old(infos: Iterable[ObjectInfo], kind: str, before_ms: int) -> list[Leftover]:
    return [one for one in _as_rows(infos, kind) if 0 <= one.at_ms < before_ms]


def _is_there(at: JobContext, one: Leftover) -> bool:
    try:
        found = at.archive.head(one.key)
    except ObjectNotFoundError:
        return False
    if found.size_bytes != one.size_bytes:
        raise moved_on(f"{one.key} has another size than the {_WHO[one.kind]} says")
    if one.kind == UNNAMED and found.modified_ms != one.at_ms:
        raise moved_on(f"{one.key} was written again")
    return True


_WHO = {REPLACED: "log", UNNAMED: "plan"}


def _harmed(at: JobContext, state: ArchiveState) -> list[str]:
    """What is wrong with the files of messages that count, so far as a listing tells."""
    found = harmed_files(at.archive, state).items()
    return [
        f"{key}: {what}, so what nothing names stays" for key, what in found if key.startswith(DATA)
    ]
