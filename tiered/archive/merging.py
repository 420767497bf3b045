"""Small files of an archive become large ones; and shared files are divided, when a part of them has to go.

Overview: ``plan_merge`` says which files of a topic and day become one. Each is made (``tiered.archive.rewrite``), and an
entry of the log puts the new ones in the place of the old. Nothing is deleted: old files are named as replaced from then on,
and ``tiered.archive.clean`` takes them away after a grace, for the sake of those who are reading them.

Ordering: new files, then the entry. One entry for ``ENTRY_FILES`` new files; what counts is the old ones or the new one.

Retries: keys are functions of what is merged, so who merges the same again makes the same objects. What another has merged,
or forgotten, meanwhile is dropped before each try, and refused in replay.

After a crash: new files that no entry names, and the old ones count; or the entry is there, and the new ones do.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tiered.archive.keys import DAY_MS
from tiered.archive.machine import names_of
from tiered.archive.moves import NewFile, Piece, Places, merge_action, move, pieces_of, relatives
from tiered.archive.rewrite import MERGED, Together, key_of, write_together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tiered.archive.machine import ArchiveState
    from tiered.archive.model import Archived, Lane
    from tiered.archive.workshop import Workshop
    from tiered.journal.writer import JournalWriter

SMALL_BYTES = 32 << 20
MERGED_BYTES = 128 << 20
ENTRY_FILES = 256


@dataclass(slots=True)
class Merged:
    """What a merge did.

    Attributes:
        planned: Files that were to be made.
        new_files: Made, and part of the archive.
        old_files: In the place of which they are.
        rows: In them.
        old_bytes: Of the old files.
        new_bytes: Of the new ones.
        entries: Written to the log.
        overtaken: Files that were made in vain, since the archive had changed meanwhile.
    """

    planned: int = 0
    new_files: int = 0
    old_files: int = 0
    rows: int = 0
    old_bytes: int = 0
    new_bytes: int = 0
    entries: int = 0
    overtaken: int = 0

    def count(self, new: NewFile) -> None:
        """One more file is part of the archive."""
        old = {piece.file.key: piece.file.size_bytes for piece in new.pieces}
        self.new_files += 1
        self.old_files += len(old)
        self.rows += sum(piece.file.rows for piece in new.pieces)
        self.old_bytes += sum(old.values())
        self.new_bytes += new.size_bytes


def plan_merge(
    state: ArchiveState,
    *,
    takes: Callable[[Lane], bool],
    small_bytes: int = SMALL_BYTES,
    merged_bytes: int = MERGED_BYTES,
) -> list[Together]:
    """Which files are to become one. Pure.

    Args:
        state: What the log says.
        takes: Whether a queue is wanted; a file that it shares with one that is not stays.
        small_bytes: Files of less are merged.
        merged_bytes: Of the old files of one new one, at most.

    Returns:
        Files to be, each of at least two, all of one topic, day and schema; in order of topic, day and key.
    """
    files: dict[str, _File] = {}
    for lane, stretches in sorted(state.lanes.items()):
        for archived in stretches:
            for file in archived.files:
                one = files.setdefault(file.key, _File(file.size_bytes, _kind(lane, archived)))
                one.pieces.append(Piece(lane, file))
                one.is_wanted &= takes(lane) and one.kind == _kind(lane, archived)
    small = [one for one in files.values() if one.is_wanted and one.size_bytes < small_bytes]
    small.sort(key=lambda one: (one.kind, one.day, one.pieces[0].lane, one.pieces[0].file.low))
    return [together(MERGED, group) for group in _groups(small, merged_bytes) if len(group) > 1]


@dataclass(slots=True)
class _File:
    """A file as the log has it."""

    size_bytes: int
    kind: tuple[object, ...]
    pieces: list[Piece] = field(default_factory=list)
    is_wanted: bool = True

    @property
    def day(self) -> int:
        return self.pieces[0].file.store_min_ms // DAY_MS


def _kind(lane: Lane, archived: Archived) -> tuple[object, ...]:
    """What files of one new file have in common."""
    columns = archived.schema, archived.columns, archived.has_records
    return (lane.cluster, lane.broker, lane.topic, *columns)


def _groups(files: Iterable[_File], merged_bytes: int) -> Iterator[list[_File]]:
    group: list[_File] = []
    size = 0
    for one in files:
        is_other = bool(group) and (group[0].kind, group[0].day) != (one.kind, one.day)
        if group and (is_other or size + one.size_bytes > merged_bytes):
            yield group
            group, size = [], 0
        group.append(one)
        size += one.size_bytes
    if group:
        yield group


def together(kind: str, files: Iterable[_File]) -> Together:
    """One file of all that is in some."""
    pieces = [piece for file in files for piece in file.pieces]
    return of_pieces(kind, pieces)


def of_pieces(kind: str, pieces: Iterable[Piece]) -> Together:
    """One file of pieces of one topic and day, ``PACKED`` or ``MERGED``."""
    ordered = tuple(sorted(pieces, key=lambda piece: (piece.lane, piece.file.low)))
    day = ordered[0].file.store_min_ms // DAY_MS
    return Together(key_of(kind, day, ordered), ordered)


def plan_division(state: ArchiveState, lane: Lane, starts: Iterable[int]) -> list[Together]:
    """The files that separate some stretches of a lane from those with which they share files. Pure.

    Args:
        state: What the log says.
        lane: Whose.
        starts: Where the stretches begin.

    Returns:
        For each shared file one of the rows of these stretches, and one of the others'.
    """
    wanted = set(starts)
    apart = {
        (lane, file.low)
        for one in state.lanes.get(lane, ())
        if one.start in wanted
        for file in one.files
    }
    shared: dict[str, list[Piece]] = {}
    for piece in pieces_of(state.lanes, relatives(state.lanes, [lane])):
        shared.setdefault(piece.file.key, []).append(piece)
    found: list[Together] = []
    for pieces in shared.values():
        parts = [[p for p in pieces if p.mark in apart], [p for p in pieces if p.mark not in apart]]
        if all(parts):
            found += [of_pieces(MERGED, part) for part in parts]
    return found


def merge(
    at: Workshop,
    log: JournalWriter[ArchiveState],
    plan: Iterable[Together],
    *,
    jobs: int = 1,
    told: Callable[[Merged], None] = lambda _result: None,
) -> Merged:
    """Make files, and put them in the place of those that they are made of.

    Args:
        at: Tier and archive.
        log: The archive's, at its head.
        plan: What is to be made.
        jobs: Files at once; each needs the memory of the old files of it, and of itself.
        told: Called after each entry, with the result so far.

    Raises:
        DataError: A file is not what the log says. What was merged before stays so.
        InternalError: A new file does not hold what it was made of.
        BackendError: A store failed.
    """
    todo = list(plan)
    result = Merged(len(todo))
    with ThreadPoolExecutor(jobs, "tiered-merge") as pool:
        for start in range(0, len(todo), ENTRY_FILES):
            some = todo[start : start + ENTRY_FILES]
            made = list(pool.map(lambda one: write_together(at.archive, at.archive, one), some))
            append_moves(log, made, result)
            told(result)
    log.write_checkpoint()
    return result


class _MovedError(Exception):
    """The archive has changed meanwhile."""


def append_moves(log: JournalWriter[ArchiveState], made: list[NewFile], result: Merged) -> None:
    """One entry for all new files whose old ones still count.

    Raises:
        FencedError: See ``JournalWriter.append``.
        StoreUnavailableError: Likewise.
    """
    due = list(made)

    def hold(state: ArchiveState) -> None:
        if not _fits(state, due):
            raise _MovedError

    while due:
        try:
            log.append([merge_action(due)], check=hold)
        except _MovedError:
            due = [new for new in due if _fits(log.state, [new])]
            continue
        result.entries += 1
        break
    for new in due:
        result.count(new)
    result.overtaken += len(made) - len(due)


def _fits(state: ArchiveState, files: list[NewFile]) -> bool:
    """Whether new files can take the place of the old ones."""
    places = Places(dict(state.lanes), names_of(state))
    return move(places, merge_action(files)) is not None
