"""Files of an archive that take the place of others: values, actions, and the rule by which replay accepts them. Pure.

A file may hold rows of several queues, and of several stretches of one. Then each stretch names it, with the numbers of its
own rows in it (a *piece*): the proof of each stretch stays what it was, whichever file its rows lie in. A merge says only
which pieces lie in which new file; it changes no stretch otherwise.

A piece is known by its lane and ``low``: a row is in one file, and ``low`` is the offset of a piece's first row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tiered.archive.model import Archived, Lane, ParquetFile
from tiered.log.wellformed import check_ints, check_texts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, MutableMapping

    from tiered.journal.entry import Action

MERGE = "merge"
PACK = "pack"


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one stretch in one file.

    Attributes:
        lane: Whose.
        file: The numbers of these rows, with key, size and checksum of the file that holds them.
    """

    lane: Lane
    file: ParquetFile

    @property
    def mark(self) -> tuple[Lane, int]:
        """What it is known by."""
        return self.lane, self.file.low


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file that takes the place of others.

    Attributes:
        key: Relative to the archive.
        size_bytes: Of the object.
        crc: CRC-32 of the object.
        pieces: What it holds, as it lay before.
    """

    key: str
    size_bytes: int
    crc: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Replaced:
    """An object that nothing names any more.

    Attributes:
        key: Relative to the archive.
        size_bytes: Of the object.
        at_ms: Time of the entry since which that is so.
    """

    key: str
    size_bytes: int
    at_ms: int

    def row(self) -> list[Any]:
        """As JSON: the fields in order."""
        return [self.key, self.size_bytes, self.at_ms]

    @classmethod
    def of(cls, row: list[Any]) -> Replaced:
        """Undo ``row``.

        Raises:
            ValueError: It is none (likewise ``TypeError``).
        """
        key, size_bytes, at_ms = row
        check_texts((key,), "a file that was replaced")
        check_ints((size_bytes, at_ms), "a file that was replaced")
        return cls(key, size_bytes, at_ms)


def merge_action(files: Iterable[NewFile]) -> Action:
    """The action by which files take the place of others."""
    return {"do": MERGE, "format": 1, "files": [_file_row(file) for file in files]}


def pack_action(stretches: Iterable[tuple[Lane, int, Archived]]) -> Action:
    """The action that adds stretches that share files: all of them, or none.

    Args:
        stretches: Lane, how many marks of the lane the archiver knew of, and what it archived.
    """
    rows = [
        {"lane": lane.row(), "tails": tails, **archived.document()}
        for lane, tails, archived in stretches
    ]
    return {"do": PACK, "format": 1, "stretches": rows}


def _file_row(file: NewFile) -> dict[str, Any]:
    lanes: dict[Lane, list[list[Any]]] = {}
    for piece in file.pieces:
        lanes.setdefault(piece.lane, []).append([piece.file.low, piece.file.key])
    return {
        "key": file.key,
        "size_bytes": file.size_bytes,
        "crc": file.crc,
        "rows": sum(piece.file.rows for piece in file.pieces),
        "pieces": [[lane.row(), found] for lane, found in lanes.items()],
    }


def pieces_of(
    lanes: Mapping[Lane, tuple[Archived, ...]], only: Iterable[Lane] | None = None
) -> Iterator[Piece]:
    """Every piece, in order of lane and stretch.

    Args:
        lanes: Stretches of each lane.
        only: Of these lanes; None: of all.
    """
    for lane in sorted(lanes if only is None else only):
        for archived in lanes[lane]:
            for file in archived.files:
                yield Piece(lane, file)


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


def relatives(lanes: Iterable[Lane], of: Iterable[Lane]) -> list[Lane]:
    """Those of ``lanes`` that may share a file with some: the same broker's, of the same topics."""
    wanted = {(lane.cluster, lane.broker, lane.topic) for lane in of}
    return [lane for lane in lanes if (lane.cluster, lane.broker, lane.topic) in wanted]


def move(
    lanes: MutableMapping[Lane, tuple[Archived, ...]], action: Action
) -> list[ParquetFile] | None:
    """Carry out a ``merge`` action.

    Args:
        lanes: Stretches of each lane; changed.
        action: The action.

    Returns:
        The files (one of each key) that nothing names any more; None, and nothing is changed, when the action presumes
        what does not hold: each piece must lie where the action says, every piece of an old file must move, and a new
        file must have as many rows as the pieces in it.

    Raises:
        ValueError: It makes no sense (likewise ``LookupError`` and ``TypeError``).
    """
    places = dict(_moved(action))
    near = relatives(lanes, {lane for lane, _ in places})
    found = {piece.mark: piece for piece in pieces_of(lanes, near)}
    old = {key for key, _ in places.values()}
    if any(mark not in found or found[mark].file.key != key for mark, (key, _) in places.items()):
        return None
    if any(piece.file.key in old and mark not in places for mark, piece in found.items()):
        return None
    for row in action["files"]:
        rows = sum(found[mark].file.rows for mark, (_, new) in places.items() if new is row)
        if rows != row["rows"] or not rows or any(p.file.key == row["key"] for p in found.values()):
            return None
    for lane in {lane for lane, _ in places}:
        lanes[lane] = tuple(_with_moved(lane, one, places) for one in lanes[lane])
    gone = {found[mark].file.key: found[mark].file for mark in places}
    return [gone[key] for key in sorted(gone)]


def _moved(action: Action) -> Iterator[tuple[tuple[Lane, int], tuple[str, Any]]]:
    """Each piece's mark, with the key of its old file and the row of the new one."""
    for row in action["files"]:
        check_texts((row["key"],), "a file of an archive")
        check_ints((row["size_bytes"], row["crc"], row["rows"]), "a file of an archive")
        for lane_row, found in row["pieces"]:
            lane = Lane.of(lane_row)
            for low, key in found:
                check_ints((low,), "a piece of a file")
                check_texts((key,), "a piece of a file")
                yield (lane, low), (key, row)


def _with_moved(
    lane: Lane, archived: Archived, places: Mapping[tuple[Lane, int], tuple[str, Any]]
) -> Archived:
    files = list(archived.files)
    for number, file in enumerate(files):
        if (lane, file.low) in places:
            new = places[lane, file.low][1]
            fields = {"key": new["key"], "size_bytes": new["size_bytes"], "crc": new["crc"]}
            files[number] = replace(file, **fields)
    return replace(archived, files=tuple(files))
