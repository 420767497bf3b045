"""Files of an archive that take the place of others: values, actions, and the rule by which replay accepts them. Pure.

A file may hold rows of several queues, and of several stretches of one. Then each stretch names it, with the numbers of its
own rows in it (a *piece*): the proof of each stretch stays what it was, whichever file its rows lie in. A merge says only
which pieces lie in which new file; it changes no stretch otherwise.

A piece is known by its lane and ``low``: a row is in one file, and ``low`` is the offset of a piece's first row.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tiered.archive.model import Archived, ArchiveLane, ParquetFile
from tiered.archive.saved_runs import Shared, stretches_of
from tiered.log.wellformed import check_ints, check_texts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tiered.journal.entry import Action


MERGE = "merge"
PACK = "pack"


@dataclass(frozen=True, slots=True)
class MovedPiece:
    """Rows of one stretch in one file."""

    lane: ArchiveLane
    file: ParquetFile
    """The numbers of these rows, with key, size and checksum of the file that holds them."""

    @property
    def mark(self) -> tuple[ArchiveLane, int]:
        """What it is known by."""
        return self.lane, self.file.low


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file that takes the place of others."""

    key: str  # relative to the archive
    size_bytes: int  # of the object
    crc: int  # CRC-32 of the object
    pieces: tuple[MovedPiece, ...]  # what it holds, as it lay before
    epoch: int = 0  # of the archive when it was planned; see ``Fence``


@dataclass(frozen=True, slots=True)
class Fence:
    """Which files an entry may still make part of the archive, so that others can be deleted.

    Whoever makes files has read the epoch in the log before, and their keys depend on it. A fence begins the next epoch and
    names the keys that are about to be deleted. Behind it no entry can name these: who knows the new epoch makes other
    keys, work of the epoch before is refused if it has one of them, and older work is refused whatever it has. So a file
    that a fence has condemned may be deleted at any time, also by a process that has slept for a week.
    """

    epoch: int = 0  # how many fences there were
    condemned: frozenset[str] | None = frozenset()
    """Keys that the last one named; None: all of work from before."""

    def lets(self, epoch: int, keys: Iterable[str]) -> bool:
        """Whether files that were planned in an epoch may become part of the archive."""
        if epoch == self.epoch:
            return True
        if self.condemned is None or epoch != self.epoch - 1:
            return False
        return self.condemned.isdisjoint(keys)


@dataclass(frozen=True, slots=True)
class Replaced:
    """An object that nothing names any more."""

    key: str  # relative to the archive
    size_bytes: int  # of the object
    at_ms: int  # time of the entry since which that is so

    def row(self) -> list[Any]:
        """As JSON: the fields in order."""
        return [self.key, self.size_bytes, self.at_ms]

    @classmethod
    def of(cls, row: list[Any]) -> Replaced:
        """Undo ``row``.

        Raises:
            ValueError: It has another form; ``TypeError`` means the same.
        """
        key, size_bytes, at_ms = row
        check_texts((key,), "a file that was replaced")
        check_ints((size_bytes, at_ms), "a file that was replaced")
        return cls(key, size_bytes, at_ms)


def merge_action(files: Iterable[NewFile]) -> Action:
    """The action by which files take the place of others."""
    return {"do": MERGE, "format": 1, "files": [_file_row(file) for file in files]}


def stretch_row(lane: ArchiveLane, archived: Archived, tails: int, epoch: int) -> dict[str, Any]:
    """A stretch as the actions that add it have it.

    Args:
        tails: How many marks of the lane the archiver knew of.
        epoch: Of the archive when it was planned.
    """
    row = {"lane": lane.row(), "tails": tails, **archived.document()}
    return {**row, "epoch": epoch} if epoch else row


def pack_action(stretches: Iterable[tuple[ArchiveLane, int, Archived]], epoch: int = 0) -> Action:
    """The action that adds stretches that share files: all of them, or none.

    Args:
        stretches: Lane, how many marks of the lane the archiver knew of, and what it archived.
        epoch: Of the archive when they were planned.
    """
    rows = [stretch_row(lane, archived, tails, epoch) for lane, tails, archived in stretches]
    return {"do": PACK, "format": 1, "stretches": rows}


def _file_row(file: NewFile) -> dict[str, Any]:
    lanes: dict[ArchiveLane, list[list[Any]]] = {}
    for piece in file.pieces:
        lanes.setdefault(piece.lane, []).append([piece.file.low, piece.file.key])
    row = {
        "key": file.key,
        "size_bytes": file.size_bytes,
        "crc": file.crc,
        "rows": sum(piece.file.rows for piece in file.pieces),
        "pieces": [[lane.row(), found] for lane, found in lanes.items()],
    }
    return {**row, "epoch": file.epoch} if file.epoch else row


def pieces_of(
    lanes: Mapping[ArchiveLane, Sequence[Archived]], only: Iterable[ArchiveLane] | None = None
) -> Iterator[MovedPiece]:
    """Every piece, in order of lane and stretch.

    Args:
        lanes: Stretches of each lane.
        only: Of these lanes; None: of all.
    """
    for lane in sorted(lanes if only is None else only):
        for archived in lanes[lane]:
            for file in archived.files:
                yield MovedPiece(lane, file)


def whole_files(pieces: Iterable[ParquetFile]) -> list[ParquetFile]:
    """One file of each key, with the numbers of all its pieces together; in the order in which they first come."""
    found: dict[str, ParquetFile] = {}
    for piece in pieces:
        known = found.get(piece.key)
        found[piece.key] = piece if known is None else _together(known, piece)
    return list(found.values())


def _together(one: ParquetFile, two: ParquetFile) -> ParquetFile:
    return replace(
        one,
        low=min(one.low, two.low),
        high=max(one.high, two.high),
        rows=one.rows + two.rows,
        store_min_ms=min(one.store_min_ms, two.store_min_ms),
        store_max_ms=max(one.store_max_ms, two.store_max_ms),
        body_crc_sum=one.body_crc_sum + two.body_crc_sum,
        body_bytes=one.body_bytes + two.body_bytes,
    )


def relatives(lanes: Iterable[ArchiveLane], of: Iterable[ArchiveLane]) -> list[ArchiveLane]:
    """Those of ``lanes`` that may share a file with some: the same broker's, of the same topics."""
    wanted = set(map(kind_of, of))
    return [lane for lane in lanes if kind_of(lane) in wanted]


Kind = tuple[str, str, str]
"""Cluster, broker and topic: only stretches of the same may share a file."""


def kind_of(lane: ArchiveLane) -> Kind:
    """With which others a lane may share files."""
    return lane.cluster, lane.broker, lane.topic


@dataclass(slots=True)
class Places:
    """Where everything lies: a state's part that merges change."""

    lanes: dict[ArchiveLane, Sequence[Archived]]  # stretches of each lane
    named: dict[Kind, Shared[str, int]]
    """By how many pieces each file of messages is named, of the kinds of which somebody has asked. It follows from
    ``lanes``, and costs a look at all of a kind, which most runs never need."""
    fence: Fence = field(default_factory=Fence)  # which files may become part of it

    def names(self, lane: ArchiveLane) -> Shared[str, int]:
        """Of the files of a lane's kind."""
        kind = kind_of(lane)
        if kind not in self.named:
            pieces = pieces_of(self.lanes, relatives(self.lanes, [lane]))
            self.named[kind] = Shared(Counter(piece.file.key for piece in pieces).items())
        return self.named[kind]

    def count(self, lane: ArchiveLane, files: Iterable[ParquetFile], more: int) -> None:
        """So many more pieces name each of these files, for each time that it comes; where ``lanes`` says so already."""
        kind = kind_of(lane)
        named = self.named.get(kind)
        if named is None:
            return
        for file in files:
            count = (named.get(file.key) or 0) + more
            named = named.having(file.key, count) if count else named.lacking(file.key)
        self.named[kind] = named

    def find(self, lane: ArchiveLane, low: int) -> tuple[Archived, ParquetFile] | None:
        """The stretch of a piece, and its file; ``low`` is the piece's first offset."""
        for one in stretches_of(self.lanes, lane).around(low, low + 1):
            for file in one.files:
                if file.low == low:
                    return one, file
        return None


def move(places: Places, action: Action) -> list[ParquetFile] | None:
    """Carry out a ``merge`` action.

    Returns:
        The files (one of each key) that nothing names any more; None, and nothing is changed, when the action presumes
        what does not hold: each piece must lie where the action says, every piece of an old file must move, a new
        file must have as many rows as the pieces in it, and the fence must let it.

    Raises:
        ValueError: It makes no sense; ``LookupError`` and ``TypeError`` mean the same.
    """
    moved = dict(_moved(action))
    gone: dict[str, ParquetFile] = {}
    olds, rows = Counter[tuple[Kind, str]](), Counter[int]()
    for (lane, low), (key, new) in moved.items():
        found = places.find(lane, low)
        if found is None or found[1].key != key:
            return None
        gone[key] = found[1]
        olds[kind_of(lane), key] += 1
        if places.names(lane).get(new["key"]):
            return None
        rows[id(new)] += found[1].rows
    if any(places.named[kind].get(key) != count for (kind, key), count in olds.items()):
        return None
    if any(rows[id(row)] != row["rows"] or not row["rows"] for row in action["files"]):
        return None
    if not all(places.fence.lets(row.get("epoch", 0), [row["key"]]) for row in action["files"]):
        return None
    for (lane, low), (_, new) in moved.items():
        _move_one(places, lane, low, new)
    return [gone[key] for key in sorted(gone)]


def _move_one(places: Places, lane: ArchiveLane, low: int, new: Any) -> None:  # noqa: ANN401 (JSON)
    found = places.find(lane, low)
    assert found is not None
    archived, old = found
    fields = {"key": new["key"], "size_bytes": new["size_bytes"], "crc": new["crc"]}
    files = tuple(replace(old, **fields) if file is old else file for file in archived.files)
    changed = replace(archived, files=files)
    places.lanes[lane] = stretches_of(places.lanes, lane).with_changed(changed)
    places.count(lane, [old], -1)
    places.count(lane, [file for file in files if file.low == low], 1)


def _moved(action: Action) -> Iterator[tuple[tuple[ArchiveLane, int], tuple[str, Any]]]:
    """Each piece's mark, with the key of its old file and the row of the new one."""
    for row in action["files"]:
        check_texts((row["key"],), "a file of an archive")
        numbers = row["size_bytes"], row["crc"], row["rows"], row.get("epoch", 0)
        check_ints(numbers, "a file of an archive")
        for lane_row, found in row["pieces"]:
            lane = ArchiveLane.of(lane_row)
            for low, key in found:
                check_ints((low,), "a piece of a file")
                check_texts((key,), "a piece of a file")
                yield (lane, low), (key, row)
