"""The journal's meaning once more, as plainly as can be, and fed by what really landed in the store.

``History`` shares no code with the product but the model of the local store. It sees every object at the moment it
becomes visible, and holds it against the invariants there and then.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from simulation.broker import Broker

_ITEM = struct.Struct(">qiq")
_FOOTER_BYTES = 40
QueueKey = tuple[str, int]


class ViolationError(AssertionError):
    """An invariant does not hold."""


def require(holds: bool, what: str) -> None:
    """Raise a ``ViolationError`` unless it holds."""
    if not holds:
        raise ViolationError(what)


@dataclass
class Life:
    """One queue as history has it.

    Attributes:
        min: First offset.
        commit: One past the last.
        log_end: End of its tiered log.
        parts: Queue offset, count, and the keys of the two objects.
        gaps: ``[start, end)``.
        rows: The parts as entries had them.
        segments: Base of the segment of each part, by queue offset.
        sealed: Bases of those that take no part any more.
    """

    min: int
    commit: int
    log_end: int = 0
    parts: list[tuple[int, int, str, str]] = field(default_factory=list)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    rows: list[list[Any]] = field(default_factory=list)
    segments: dict[int, int] = field(default_factory=dict)
    sealed: set[int] = field(default_factory=set)


class History:
    """See the module.

    Attributes:
        number: The last entry.
        generation: Who reigns.
        queues: By topic and queue id.
        texts: Each entry's bytes.
        strays: Numbers of entries under a number that was used and deleted long ago.
        refused: Parts that do not begin where their queue ends.
    """

    def __init__(self, prefix: str, objects: Mapping[str, Any], broker: Broker) -> None:
        self._prefix = prefix
        self._get: Callable[[str], bytes] = lambda key: objects[prefix + key].data
        self._has: Callable[[str], bool] = lambda key: prefix + key in objects
        self._broker = broker
        self.number = 0
        self.generation = 0
        self.queues: dict[QueueKey, Life] = {}
        self.texts: dict[int, bytes] = {}
        self._now_s = 0.0
        self._deleted: set[str] = set()
        self._unnamed_s: dict[str, float] = {}
        self.strays: set[int] = set()
        self.refused = 0

    def landed(self, key: str, data: bytes, now_s: float = 0.0) -> None:
        """An object has become visible."""
        self._now_s = now_s
        short = key.removeprefix(self._prefix)
        if "/consumequeue/" in short:
            log_key = _description(data)["log_key"]
            is_there = self._has(log_key) or log_key in self._deleted  # (by gc: of an older reign)
            require(is_there, f"I2: {short} points at {log_key}, which is not there")
        elif short.startswith("journal/") and not short.endswith(".checkpoint"):
            number = int(short.removeprefix("journal/"))
            if number <= self.number:
                self.strays.add(number)  # it was used and deleted long ago
                return
            require(number == self.number + 1, f"I6: entry {number} comes after {self.number}")
            self.number = number
            self.texts[number] = data
            self._apply(json.loads(data.partition(b"\n")[0]))

    def _apply(self, entry: dict[str, Any]) -> None:
        for action in entry["actions"]:
            what = action["do"]
            if what == "reign":
                self._reign(action["generation"])
            elif entry["generation"] != self.generation and what not in {"seal", "expire"}:
                continue  # not of the reign: no history
            elif what == "part":
                self._part(action)
            elif what == "gap":
                self._gap(action)
            elif what == "incarnation":
                queue = (action["topic"], action["queue_id"])
                self.queues.setdefault(queue, Life(action["start"], action["start"]))
            elif what == "seal":
                self._seal(action)
            elif what == "expire":
                self._expire(entry, action)
            else:
                require(what == "meta", f"history does not know the action {what!r}")

    def _reign(self, generation: int) -> None:
        require(generation > self.generation, f"I6: reign {generation} after {self.generation}")
        self.generation = generation

    def _part(self, action: dict[str, Any]) -> None:
        row = action["part"]
        log_offset, queue_offset, count = row[12], row[13], row[14]
        queue = (action["topic"], action["queue_id"])
        life = self.queues.setdefault(queue, Life(queue_offset, queue_offset))
        if (queue_offset, log_offset) != (life.commit, life.log_end):
            self.refused += 1  # replay has to refuse it as well
            return
        self._holds(queue, row)
        life.parts.append((queue_offset, count, row[0], row[6]))
        life.rows.append(row)
        if life.segments and max(life.segments.values()) != action["segment"]:
            life.sealed |= set(life.segments.values())
        life.segments[queue_offset] = action["segment"]
        life.commit += count
        life.log_end += row[2] - row[1]

    def _holds(self, queue: QueueKey, row: list[Any]) -> None:
        """A part's objects are there and hold what the broker had, byte for byte (I2, I3)."""
        for key in (row[0], row[6]):
            require(self._has(key), f"I2: an entry names {key}, which is not there")
        log = self._get(row[0])[row[1] : row[2]]
        items = self._get(row[6])[row[7] : row[8]]
        require(len(items) == 20 * row[14], f"I2: the index of {queue} at {row[13]} is too short")
        for number, (address, size, _) in enumerate(_ITEM.iter_unpack(items)):
            at = address - row[12]
            wanted = self._broker.record(queue, row[13] + number)
            require(log[at : at + size] == wanted, f"I3: {queue} differs at {row[13] + number}")

    def _gap(self, action: dict[str, Any]) -> None:
        queue, start, end = (action["topic"], action["queue_id"]), action["start"], action["end"]
        life = self.queues.setdefault(queue, Life(start, start))
        require(
            start == life.commit < end, f"I12: gap [{start}, {end}) of {queue} at {life.commit}"
        )
        there = self._broker.min(queue)
        require(end <= there, f"I12: [{start}, {end}) of {queue} is called gone; min is {there}")
        life.gaps.append((start, end))
        life.min = life.min if life.parts else end
        life.commit = end

    def _seal(self, action: dict[str, Any]) -> None:
        """The same items in fewer parts; one that comes too late changes nothing."""
        queue = (action["topic"], action["queue_id"])
        life = self.queues[queue]
        rows = action["parts"]
        start, end = rows[0][13], rows[-1][13] + rows[-1][14]
        old = [part for part in life.parts if start <= part[0] < end]
        new = [(row[13], row[14], row[0], row[6]) for row in rows]
        if sum(part[1] for part in old) != end - start or not {p[0] for p in new} <= {
            p[0] for p in old
        }:
            return
        for row in rows:
            self._holds(queue, row)
        at = life.parts.index(old[0])
        life.parts[at : at + len(old)] = new
        life.sealed.add(action["segment"])
        life.segments = {
            offset: base for offset, base in life.segments.items() if offset not in
            {part[0] for part in old} - {part[0] for part in new}
        }  # fmt: skip
        self._unname(old, new)

    def _expire(self, entry: dict[str, Any], action: dict[str, Any]) -> None:
        """Whole segments at the beginning; one that presumes what does not hold changes nothing."""
        life, low = self.queues[(action["topic"], action["queue_id"])], action["min_to"]
        gone = [part for part in life.parts if part[0] + part[1] <= low]
        kept = life.parts[len(gone) :]
        bases = {life.segments[part[0]] for part in gone}
        may = bases <= life.sealed or entry["generation"] == self.generation
        begins = kept[0][0] if kept else life.commit
        divided = kept and life.segments[kept[0][0]] in bases
        if action["min_from"] != life.min or not may or begins != low or divided:
            return
        life.min, life.parts = low, kept
        life.gaps = [gap for gap in life.gaps if gap[1] > low]
        self._unname(gone, [])

    def _unname(self, old: list[tuple[int, int, str, str]], new: Any) -> None:
        names = {key for part in new for key in part[2:]}
        for part in old:
            for key in part[2:]:
                if key not in names:
                    self._unnamed_s[key] = self._now_s

    def deleting(self, key: str, now_s: float, grace_s: float) -> None:
        """An object is about to be deleted (I11)."""
        short = key.removeprefix(self._prefix)
        named = {k for life in self.queues.values() for part in life.parts for k in part[2:]}
        require(short not in named, f"I11: {short} is deleted, and named")
        self._deleted.add(short)
        age_s = now_s - self._unnamed_s.get(short, -1e9)
        require(age_s >= grace_s, f"I11: {short} is deleted {age_s:.1f} s after it was named")

    def is_history(self, number: int, data: bytes) -> bool:
        """Whether exactly this was written as an entry."""
        return self.texts.get(number) == data


def _description(data: bytes) -> dict[str, Any]:
    size, _, blocks = struct.unpack_from(">III", data, len(data) - _FOOTER_BYTES + 8)
    start = len(data) - _FOOTER_BYTES - 4 * blocks - size
    found = json.loads(data[start : start + size])
    assert isinstance(found, dict)
    return found
