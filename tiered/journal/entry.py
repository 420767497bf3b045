r"""One journal entry: small, immutable, created once.

Layout: two lines of ASCII text::

    {"actions":[…],"format":1,"epoch":3,"number":17,"previous":305419896,"time_ms":1700000000000,"writer":"0badcafe"}\n
    <8 hex digits: CRC-32 of the first line without its newline>\n

``previous`` is the checksum of the entry before (0 for the first), so that an entry shows whose successor it is: one that
was put under a number that had been used and deleted long ago, or restored to the wrong place, is found out.

An action is an object whose ``do`` names it. This package knows only ``epoch`` (a writer begins: ``epoch``,
``holder``); all others belong to the state machine above. An unknown action stops a writer and is an error for a reader.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

from zlib_ng import zlib_ng

from backends.lazy_dataclass import dataclass
from tiered.errors import DataError, OtherVersionError
from tiered.journal.typed import AnyInt, as_object
from tiered.keys import TIMER

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMAT_VERSION = 1
EPOCH = "epoch"
_SMALL_BYTES = 1 << 20
_DECODER = json.JSONDecoder()

Action = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """One step of a tier's history."""

    number: AnyInt  # place in the journal, from 1
    epoch: AnyInt  # of its writer; 0 for writers without one
    writer: str  # 8-hex-digit id of the process that wrote it
    time_ms: AnyInt  # when, by the writer's wall clock; for people, nothing depends on it
    actions: Sequence[Action]  # what changed, in order
    previous: AnyInt = 0  # checksum of the entry before; 0 for entry 1


def checksum(data: bytes) -> int:
    """The checksum that an entry bears and that its successor repeats."""
    return zlib_ng.crc32(data.partition(b"\n")[0])


def json_text(value: Any) -> bytes:  # noqa: ANN401 (JSON values)
    """JSON in the one form in which it is written here: ASCII, sorted, without blanks."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode("ascii")


def json_members(text: str, listed: str) -> Iterator[tuple[str, Any]]:
    """Members of an object as ``json_text`` writes it, each made a value when it is its turn.

    Args:
        listed: Name of a list that is given as an iterator of its values, to be used up before the next member.
    """
    at = 0

    def value(mark: str) -> Any:  # noqa: ANN401 (JSON values)
        nonlocal at
        if not text.startswith(mark, at):
            raise ValueError(f"there is no {mark} at {at}")
        found, at = _DECODER.raw_decode(text, at + 1)
        return found

    def values() -> Iterator[Any]:
        nonlocal at
        if text.startswith("[]", at):
            at += 1
        elif text.startswith("[", at):
            yield value("[")
        while not text.startswith("]", at):
            yield value(",")
        at += 1

    for mark in chain("{", repeat(",")):
        name = value(mark)
        if name == listed and text.startswith(":[", at):
            at += 1
            yield name, values()
        else:
            yield name, value(":")
        if at + 1 == len(text) and text.endswith("}"):
            return


def seal_text(document: Mapping[str, Any]) -> bytes:
    """One JSON line and the line with its checksum: the form of entries, checkpoints and the lease."""
    line = json_text(document)
    return b"%s\n%08x\n" % (line, zlib_ng.crc32(line))


def open_text(
    data: bytes, *, where: str, versions: Sequence[int] = (FORMAT_VERSION,)
) -> dict[str, Any]:
    """Check and parse what ``seal_text`` made."""
    line, _, rest = data.partition(b"\n")
    if rest != b"%08x\n" % zlib_ng.crc32(line):
        option = " --timers" if f"/{TIMER}" in where else ""
        do = f"run `tiered verify{option}` to see what is damaged"
        raise DataError("the checksum is wrong", where=where, do=do)
    try:
        document = json.loads(require_sparse(line))
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise OtherVersionError("it is not a JSON object", where=where)
    found = document.get("format")
    if type(found) is not int or found not in versions:
        known = " and ".join(map(str, versions))
        raise OtherVersionError(f"its format is {found!r:.80}, where {known} is known", where=where)
    return document


def require_sparse(text: bytes) -> bytes:
    """Refuse JSON that is little but brackets, since as values it would take twenty times its size in memory.

    Args:
        text: Any; the densest that we write has a bracket in six bytes.

    Returns:
        The text.

    Raises:
        ValueError: It is denser, and not small.
    """
    brackets = text.count(b"[") + text.count(b"{")
    if 4 * brackets > len(text) + _SMALL_BYTES:
        raise ValueError(f"{brackets} brackets in {len(text)} bytes")
    return text


def encode_entry(entry: Entry) -> bytes:
    """The object's bytes."""
    return seal_text({"format": FORMAT_VERSION, **as_object(Entry).encode(entry)})


def decode_entry(data: bytes, *, where: str) -> Entry:
    """Parse an entry."""
    document = open_text(data, where=where)
    del document["format"]
    try:
        return as_object(Entry).decode(document)
    except ValueError as error:
        raise OtherVersionError(
            f"a journal entry has another form: {error}", where=where
        ) from error
