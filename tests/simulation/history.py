"""The journal's meaning once more, as plainly as can be, and fed by what really landed in the store.

``History`` shares no code with the product but the model of the local store. It sees every object at the moment it
becomes visible, and holds it against the invariants there and then.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections import Counter
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from simulation.contents import (
    GAP,
    claims_of,
    description,
    hole,
    joined,
    tag_code,
    unpacked,
)
from simulation.lives import Life, Row, Segment, runs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from simulation.broker import Broker, QueueKey

FOREIGN = (
    "notes", "journal/notes.txt", "journal/00000000000000000003.bak", "journal/00000000000000000002.checkpoint.tmp",
    "queue/topic0/notes", "queue/topic0/0000000000/0000000000/commitlog/notes", "ledger/notes", "zz/x y",
)  # fmt: skip
"""Keys that are not the tier's: nothing may stop because of them, and nobody deletes them."""
_ITEM = struct.Struct(">qiq")
_OF_GUESTS = {"seal", "join", "pack", "expire"}
"""What others than the reigning writer may say, under no reign."""
_MERGES = _OF_GUESTS - {"expire"}


class ViolationError(AssertionError):
    """An invariant does not hold."""


def require(holds: bool, what: str) -> None:
    """Raise a ``ViolationError`` unless it holds."""
    if not holds:
        raise ViolationError(what)


def merges_of(entry: bytes) -> list[dict[str, Any]]:
    """What an entry seals, joins or packs."""
    actions = json.loads(entry.partition(b"\n")[0])["actions"]
    return [action for action in actions if action["do"] in _MERGES]


class History:
    """See the module.

    Attributes:
        number: The last entry.
        generation: Who reigns.
        writer: The id that the reigning writer signs with.
        updated_ms: Time of the last entry.
        queues: Lives by topic and queue id, oldest first.
        courses: All that was ever committed of an incarnation (topic, queue id, number), by offset; each take-back begins
            another course, with what it has left.
        texts: Each entry's bytes.
        strays: Numbers of entries under a number that was used and deleted long ago.
        refused: Parts that do not begin where their queue ends, and what speaks of a life that is over.
        taken_back: How often each generation has cut a life.
        met_first: What retention had taken of each queue when the broker was attached for the first time: up to there.
        flips: Some reads give a wrong bit, so that a writer may not know the mark of what stays of a part.
        may_expire: Whether what has this as its newest store time may be given up now, by a topic's policy.
        met: What was met how often (branches that carry a guarantee).
    """

    def __init__(self, prefix: str, objects: Mapping[str, Any], broker: Broker) -> None:
        self._prefix = prefix
        self._get: Callable[[str], bytes] = lambda key: objects[prefix + key].data
        self._has: Callable[[str], bool] = lambda key: prefix + key in objects
        self._broker = broker
        self.number = 0
        self.generation = 0
        self.writer = ""
        self.updated_ms = 0
        self.queues: dict[QueueKey, list[Life]] = {}
        self.courses: dict[tuple[str, int, int], list[dict[int, bytes]]] = {}
        self.texts: dict[int, bytes] = {}
        self.met_first: dict[QueueKey, int] = {}
        self.flips = False
        self.taken_back: Counter[int] = Counter()
        self._now_s = 0.0
        self._deleted: set[str] = set()
        self._unnamed_s: dict[str, float] = {}
        self.strays: set[int] = set()
        self.refused = 0
        self.met: Counter[str] = Counter()
        self.may_expire: Callable[[str, int], bool] = lambda _topic, _newest_ms: True

    def landed(self, key: str, data: bytes, now_s: float = 0.0) -> None:
        """An object has become visible."""
        self._now_s = now_s
        short = key.removeprefix(self._prefix)
        if "/consumequeue/" in short:
            log_key = description(data)["log_key"]
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
        self.updated_ms = entry["time_ms"]
        for action in entry["actions"]:
            what, generation = action["do"], entry["generation"]
            if what == "reign":
                self._reign(action["generation"], entry["writer"])
            elif generation != self.generation and (generation or what not in _OF_GUESTS):
                continue  # not of the reign: no history
            elif what == "part":
                self._part(entry, action)
            elif what == "quarantine":
                self._quarantine(action)
            elif what == "gap":
                self._gap(action)
            elif what == "incarnation":
                self._incarnation(action)
            elif what == "take_back":
                before = self.met["taken back"]
                self._take_back(action)
                self.taken_back[generation] += self.met["taken back"] - before
            elif what == "join" or (what == "pack" and "start" in action):
                self._join(entry, action)
            elif what in {"seal", "pack"}:
                self._seal(entry, action)
            elif what == "expire":
                self._expire(entry, action)
            else:
                require(what == "meta", f"history does not know the action {what!r}")

    def _reign(self, generation: int, writer: str) -> None:
        require(generation > self.generation, f"I6: reign {generation} after {self.generation}")
        if not self.generation:
            had = self._broker.branches.items()
            self.met_first = {queue: max(one.min for one in some) for queue, some in had}
        self.generation, self.writer = generation, writer
        lives = [some[-1] for some in self.queues.values()]
        self.met["reign behind sealed ends"] += any(
            life.segments and life.segments[-1].sealed and life.segments[-1].merged
            for life in lives
        )

    def present(self, queue: QueueKey) -> Life | None:
        """The present life of a queue."""
        lives = self.queues.get(queue)
        return lives[-1] if lives else None

    def _spoken_of(self, action: dict[str, Any], start: int | None = None) -> Life | None:
        """The present life, if the action means it; with ``start``: the first one, if there is none yet."""
        queue, number = (action["topic"], action["queue_id"]), action["incarnation"]
        if start is not None and queue not in self.queues and number == 0:
            return Life(0, start, start, start)
        life = self.present(queue)
        return life if life and life.incarnation == number else None

    def _part(self, entry: dict[str, Any], action: dict[str, Any]) -> None:
        values = action["part"]
        queue = (action["topic"], action["queue_id"])
        life = self._spoken_of(action, values[13])
        if life is None or (values[13], values[12]) != (life.commit, life.log_end):
            self.refused += 1  # replay has to refuse it as well
            return
        row = Row(values, self._records(queue, values))
        before = life.rows[-1] if life.rows else None
        if not life.place(row, action["segment"], entry["time_ms"]):
            self.refused += 1
            return
        self._is_whole(queue, row)
        self._note(queue, life, row.start, row.records)
        what = f"{queue} at {row.start} says {row.claims} of its records"
        require(row.claims == claims_of(row.records), f"I1: {what}, {claims_of(row.records)}")
        self.met["hole"] += row.claims.holes
        self.queues.setdefault(queue, [life])
        self._continues(queue, before, row)

    def _note(self, queue: QueueKey, life: Life, start: int, records: list[bytes]) -> None:
        course = self.courses.setdefault((*queue, life.incarnation), [{}])[-1]
        course.update(enumerate(records, start))

    def lives(self, incarnation: tuple[str, int, int]) -> list[Life]:
        """Those of one incarnation of a queue."""
        topic, queue_id, number = incarnation
        return [one for one in self.queues[topic, queue_id] if one.incarnation == number]

    def _is_whole(self, queue: QueueKey, row: Row) -> None:
        """A new part is all that its two objects hold, and its entry says what they are."""
        for at, packed in ((0, row.packed), (6, 0)):
            key, start, end, size, trailer, crc = row.values[at : at + 6]
            data, payload = self._get(key), self._payload(row.values, at)
            what = f"I5: {queue} at {row.start} does not say of {key} what it is"
            require((start, end) == (0, size) and size == len(payload), what)
            require((trailer, crc) == (len(data) - (packed or size), zlib.crc32(payload)), what)

    def _quarantine(self, action: dict[str, Any]) -> None:
        life = self._spoken_of(action)
        if life is not None:
            life.quarantined += action["count"]
            self.met["quarantined"] += action["count"]

    def _records(self, queue: QueueKey, values: list[Any]) -> list[bytes]:
        """The records of a part, whose objects must be there (I2) and fit each other, tags included."""
        for key in (values[0], values[6]):
            require(self._has(key), f"I2: an entry names {key}, which is not there")
        log = self._payload(values, 0)[values[1] : values[2]]
        items = [*_ITEM.iter_unpack(self._get(values[6])[values[7] : values[8]])]
        what = f"I2: the index of {queue} at {values[13]} is not that of its part"
        require(len(items) == values[14] and values[8] - values[7] == 20 * values[14], what)
        ends = [*accumulate((size for _, size, _ in items), initial=values[12])]
        real = [(item, end) for item, end in zip(items, ends, strict=False) if item[1]]
        require(all(address == end for (address, _, _), end in real), what)
        require(ends[-1] - values[12] == len(log), what)
        at = -values[12]
        found = [log[at + a : at + a + size] if size else hole(tag) for a, size, tag in items]
        tags = [tag for _, _, tag in items]
        require(tags == [*map(tag_code, found)], f"{what}: tags {tags}")
        return found

    def _payload(self, values: list[Any], at: int) -> bytes:
        """What an object of a part holds, compressed or not."""
        data = self._get(values[at])
        packed = values[19] if at == 0 and len(values) > 19 else 0
        if packed and packed < values[3]:
            self.met["packed"] += 1
            return unpacked(data)
        return data[: values[at + 3]]

    def _continues(self, queue: QueueKey, before: Row | None, row: Row) -> None:
        """A part is byte for byte what the broker had (I3), behind what the broker had before it.

        What is behind may be of another branch where nobody could tell: behind a gap, or where the broker no longer had the
        record before it. Where it could be told it is counted: at the end the tier is level, and no such place is left.
        """
        had = self._broker.has_had(queue, row.start, row.records)
        if not had:
            for number, raw in enumerate(row.records, row.start):
                known = self._broker.has_had(queue, number, [raw])
                require(bool(known), f"I3: {queue} differs at {number}")
        joins = before is not None and before.end == row.start
        last = before.records[-1] if before and joins else None
        if not any(
            not joins or one.at(row.start - 1) == last or one.min >= row.start for one in had
        ):
            self.met["mixed"] += 1

    def _gap(self, action: dict[str, Any]) -> None:
        queue, start, end = (action["topic"], action["queue_id"]), action["start"], action["end"]
        life = self._spoken_of(action, start)
        require(life is not None, f"I12: a gap of {queue} speaks of another life")
        assert life is not None
        what = f"I12: gap [{start}, {end}) of {queue} at {life.commit}"
        require(start == life.commit < end, what)
        there = max(branch.min for branch in self._broker.branches[queue])
        require(end <= there, f"I12: [{start}, {end}) of {queue} is called gone; min is {there}")
        life.gaps.append((start, end))
        self._note(queue, life, start, [GAP] * (end - start))
        self.met["gap"] += 1
        self.met["gap in the middle"] += bool(life.segments)
        self.met["gap at the beginning"] += start == 0
        life.min = life.min if life.segments else end
        life.commit = end
        self.queues.setdefault(queue, [life])

    def _take_back(self, action: dict[str, Any]) -> None:
        """The life ends earlier, and its tail is a life that is over; what does not fit changes nothing."""
        life, end = self._spoken_of(action), action["end"]
        if life is None:
            self.refused += 1
            return
        divided = None
        if action["was"] == life.commit and life.min < end < life.commit:
            divided = life.divide(end, action["part"])
        if divided is None:
            self.met["take-back refused"] += 1
            return
        queue = (action["topic"], action["queue_id"])
        self._is_cut_rightly(queue, life, action["part"])
        tail, rest = divided
        for row in (*tail.rows, *rest.rows):
            require(self._records(queue, row.values) == row.records, f"I3: {queue} is cut wrongly")
        self.queues[queue][-1:] = [tail, rest]
        courses = self.courses[*queue, life.incarnation]
        courses.append({offset: raw for offset, raw in courses[-1].items() if offset < end})
        self.met["taken back"] += 1
        # Where the index of the part that is to be cut has a wrong bit, all of the part goes: it differs somewhere.
        whole = [row for row in tail.rows if self.flips and row.start == end and not action["part"]]
        differs = any(
            branch.at(offset) not in {None, tail.record(offset)}
            for branch in self._broker.branches[queue]
            for offset in range(end, whole[0].end if whole else end + 1)
        )
        what = f"{queue} is taken back from {end} on, where the broker has never had another record"
        require(tail.record(end) is None or differs, what)

    def _is_cut_rightly(self, queue: QueueKey, life: Life, head: list[Any] | None) -> None:
        """What stays of a part that is divided says what is true of it."""
        for row in life.rows if head else ():
            if head and row.start == head[13]:
                claims, wanted = Row(head, []).claims, row.beginning(head[14])
                unknown = replace(wanted, mark=0) if self.flips else wanted
                what = f"{queue} is cut to {claims}, which is {wanted}"
                require(claims in {wanted, unknown}, what)
                self.met["part divided"] += 1

    def _incarnation(self, action: dict[str, Any]) -> None:
        queue, number, start = (
            (action["topic"], action["queue_id"]), action["incarnation"], action["start"],
        )  # fmt: skip
        life = self.present(queue)
        if life is not None and number == 0:
            return  # a part was faster
        if number != (life.incarnation + 1 if life else 0):
            self.refused += 1
            return
        if life is not None:
            life.ended = True
            self.met["begun anew"] += 1
            had = self._broker.branches[queue]
            differs = not life.rows or any(
                not branch.has(row.start, row.records) for row in life.rows for branch in had
            )
            what = f"{queue} begins anew, and the broker has only ever had what the tier has"
            require(len(had) > 1 and differs, what)
        self.queues.setdefault(queue, []).append(Life(number, start, start, start))
        self.courses[*queue, number] = [{}]

    def _seal(self, entry: dict[str, Any], action: dict[str, Any]) -> None:
        """The same records in fewer parts; one that comes too late changes nothing."""
        life = self._spoken_of(action)
        for segment in list(life.segments) if life else ():
            if life and segment.base == action["segment"]:
                self._merge(entry, action, life, [segment])

    def _join(self, entry: dict[str, Any], action: dict[str, Any]) -> None:
        """The same records in fewer segments: neighbours become one."""
        life, place = self._spoken_of(action), (action["segment"], action["start"])
        segments = life.segments if life else []
        first = next((n for n, s in enumerate(segments) if (s.base, s.queue_base) == place), None)
        if life is None or first is None:
            return
        end = action["parts"][-1][13] + action["parts"][-1][14]
        old = [segment for segment in segments[first:] if segment.queue_base < end]
        if all(
            (one.rows[-1].end, one.rows[-1].log_end) == (two.queue_base, two.base)
            for one, two in pairwise(old)
        ):
            self._merge(entry, action, life, old)

    def _merge(
        self, entry: dict[str, Any], action: dict[str, Any], life: Life, segments: list[Segment]
    ) -> None:
        """Segments become one that consists of the action's parts, if these are theirs joined."""
        old = [row for segment in segments for row in segment.rows]
        new = [Row(values, []) for values in action["parts"]]
        may = entry["generation"] == self.generation or all(one.sealed for one in segments)
        found = runs(old, new) if may else None
        if found is None or [row.claims for row in new] != [
            joined([row.claims for row in run]) for run in found
        ]:
            queue = (action["topic"], action["queue_id"])
            what = f"I1: {queue}: a merged part says another thing of its records than its parts"
            require(found is None, what)
            self.met["merge too late"] += 1
            return
        self._is_same(action, found, new)
        one, at = segments[0], life.segments.index(segments[0])
        merged = len(segments) > 1 or one.merged or len(new) < len(old) or action["do"] == "pack"
        whole = Segment(one.base, one.queue_base, new, one.created_ms, sealed=True, merged=merged)
        self.met["open segment sealed"] += not segments[-1].sealed
        life.segments[at : at + len(segments)] = [whole]
        self._unname(old)
        self.met["sealed"] += 1

    def _is_same(self, action: dict[str, Any], found: list[list[Row]], new: list[Row]) -> None:
        """Each new part has its run's records, and is whole, or the very part that it stands for."""
        queue = (action["topic"], action["queue_id"])
        for run, row in zip(found, new, strict=True):
            row.records = self._records(queue, row.values)
            before = [raw for one in run for raw in one.records]
            what = f"I3: sealing has changed {queue} in [{row.start}, {row.end})"
            require(before == row.records, what)
            if len(run) > 1 or row.keys != run[0].keys:
                self._is_whole(queue, row)
                sizes = {one.log_end - one.log_offset for one in run}
                self.met["equal parts merged"] += len(run) > 1 and len(sizes) == 1
                self.met["parts with holes merged"] += row.claims.holes > 0
            else:
                require(run[0].values[:19] == row.values[:19], what)

    def _expire(self, entry: dict[str, Any], action: dict[str, Any]) -> None:
        """Whole segments at the beginning of a life; one that presumes what does not hold changes nothing."""
        lives = self.queues.get((action["topic"], action["queue_id"]), [])
        life = lives[action["life"]] if action["life"] < len(lives) else None
        if life is None or life.incarnation != action["incarnation"]:
            return
        if action["min_from"] == life.min:
            old = life.rows
            gone = life.expire(action["min_to"], with_open=entry["generation"] == self.generation)
            self.met["expired segment"] += len(gone)
            for segment in gone:
                is_old = self.may_expire(action["topic"], segment.newest_ms)
                require(
                    is_old, f"I11: {action['topic']} gives up [{segment.queue_base}, …) too early"
                )
            self.met["expiry leaves a gap"] += bool(gone and life.gaps)
            self._unname(old)

    def named(self) -> set[str]:
        """Keys that any life names."""
        lives = (life for some in self.queues.values() for life in some)
        return {key for life in lives for row in life.rows for key in row.keys}

    def _unname(self, rows: list[Row]) -> None:
        """Note since when nobody names the keys of these parts, if nobody does."""
        named = self.named()
        for key in {key for row in rows for key in row.keys} - named:
            self._unnamed_s[key] = self._now_s

    def has_unnamed(self, since_s: float) -> bool:
        """Whether anything that was named is named no more since then."""
        return any(at_s >= since_s for at_s in self._unnamed_s.values())

    def deleting(self, key: str, now_s: float, grace_s: float) -> None:
        """An object is about to be deleted (I11)."""
        short = key.removeprefix(self._prefix)
        require(short not in FOREIGN, f"I11: {short} is deleted, which is somebody else's")
        require(short not in self.named(), f"I11: {short} is deleted, and named")
        self._deleted.add(short)
        age_s = now_s - self._unnamed_s.get(short, -1e9)
        require(age_s >= grace_s, f"I11: {short} is deleted {age_s:.1f} s after it was named")

    def is_history(self, number: int, data: bytes) -> bool:
        """Whether exactly this was written as an entry."""
        return self.texts.get(number) == data
