"""The journal's meaning once more, as plainly as can be, and fed by what really landed in the store.

``History`` shares no code with the product but the model of the local store. It sees every object at the moment it
becomes visible, and holds it against the invariants there and then.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from simulation.contents import (
    COMPACTED,
    GAP,
    bundle,
    bytes_of,
    claims_of,
    hole,
    is_hole,
    is_tombstone,
    joined,
    key_of,
    payload,
    store_ms,
    table,
    tag_code,
)  # fmt: skip
from simulation.incarnations import ModelIncarnation, Row
from simulation.kafka_batches import covers, is_batch
from simulation.kafka_lineage import Said

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from simulation.broker import Broker, QueueKey
    from simulation.contents import Section

    from tiered.local.interface import RecordBatch

FOREIGN = (
    "notes", "journal/notes.txt", "journal/00000000000000000003.bak", "journal/00000000000000000002.checkpoint.tmp",
    "queue/topic0/notes", "queue/topic0/0000000000/0000000000/notes", "bundle/0/notes", "ledger/notes", "zz/x y",
)  # fmt: skip
"""Keys that are not the tier's: nothing may stop because of them, and nobody deletes them."""
_ITEM = struct.Struct(">qiq")
_OF_GUESTS = {"merge", "expire", "compacted", "pause"}
"""What others than the present writer may say, under no epoch."""
_BY_A_PERSON = "a person "
"""How the reasons begin of what a person has decided."""
TOMBSTONES_MS = 300
"""How long a tombstone stays after the first pass that met it."""
_ROOTS = ("bundle/", "topic/", "queue/")


class ViolationError(AssertionError):
    """An invariant does not hold."""


def require(holds: bool, what: str) -> None:
    """Raise a ``ViolationError`` unless it holds."""
    if not holds:
        raise ViolationError(what)


def raws_of(records: RecordBatch) -> Iterator[bytes]:
    """What a batch has, written as history writes it; its tag codes and times are those of the records."""
    fields = (records.positions, records.sizes, records.tag_codes, records.store_timestamps_ms)
    for low, size, tag, time_ms in zip(*(field.tolist() for field in fields), strict=True):
        raw = bytes(memoryview(records.data)[low : low + size]) if size else hole(tag)
        require(tag == tag_code(raw), f"I3: tag code {tag} is not {tag_code(raw)}")
        require(
            not size or time_ms == store_ms(raw), f"I3: {time_ms} is not {size and store_ms(raw)}"
        )
        yield raw


def _unescaped(found: re.Match[str]) -> str:
    return chr(int(found[1], 16))


def merged_in(entry: bytes) -> list[Section]:
    """The sections that an entry puts in the place of others."""
    actions = json.loads(entry.partition(b"\n")[0])["actions"]
    merges = [action for action in actions if action["do"] == "merge"]
    return [section for action in merges for _, section in _named(action)]


def _named(action: dict[str, Any]) -> list[tuple[tuple[str, int, int], Section]]:
    """The bundle (key, size, level) and section of each part that an action names."""
    return [
        ((key, size, level), section)
        for key, size, level, packed in action["bundles"]
        for section in table(base64.b64decode(packed))
    ]


class History:
    """See the module.

    Attributes:
        number: The last entry.
        epoch: The present one.
        writer: The id that the present writer signs with.
        updated_ms: Time of the last entry.
        queues: Incarnations by topic and queue id, oldest first.
        courses: All that was ever committed of an incarnation (topic, queue id, number), by offset; each truncation begins
            another course, with what it has left.
        texts: Each entry's bytes.
        strays: Numbers of entries under a number that was used and deleted long ago.
        refused: Parts that do not begin where their queue ends, and what speaks of an incarnation that is over.
        truncated: How often each epoch has cut an incarnation.
        met_first: What retention had taken of each queue when the broker was attached for the first time: up to there.
        folds: The store takes names for one that differ only in case.
        flips: Some reads give a wrong bit, so that a writer may not know the mark of what stays of a part.
        may_expire: Whether what has this as its newest store time may be given up now, by a topic's policy.
        met: What was met how often (branches that carry a guarantee).
        compacted: Of each incarnation the offsets whose messages compaction took away.
        asked: Where a person wanted a queue to end.
        indexed: Keys of index objects that some entry has named.
    """

    def __init__(
        self, prefix: str, objects: Mapping[str, Any], broker: Broker, *, folds: bool = False
    ) -> None:
        self._prefix = prefix
        self._get: Callable[[str], bytes] = lambda key: objects[prefix + key].data
        self._has: Callable[[str], bool] = lambda key: prefix + key in objects
        self._broker = broker
        self.number = 0
        self.epoch = 0
        self.writer = ""
        self.updated_ms = 0
        self.queues: dict[QueueKey, list[ModelIncarnation]] = {}
        self.courses: dict[tuple[str, int, int], list[dict[int, bytes]]] = {}
        self.texts: dict[int, bytes] = {}
        self.met_first: dict[QueueKey, int] = {}
        self.folds = folds
        self.flips = False
        self.truncated: Counter[int] = Counter()
        self._now_s = 0.0
        self._deleted: set[str] = set()
        self._unnamed_s: dict[str, float] = {}
        self.strays: set[int] = set()
        self.refused = 0
        self.paused: set[str] = set()
        self.met: Counter[str] = Counter()
        self.compacted: dict[tuple[str, int, int], set[int]] = {}
        self.asked: dict[QueueKey, set[int]] = {}
        self.indexed: set[str] = set()
        self._leased = (0, 0)
        self._aside: Counter[tuple[str, int, int]] = Counter()
        self._said_aside: Counter[tuple[str, int, int]] = Counter()
        self.may_expire: Callable[[str, int], bool] = lambda _topic, _newest_ms: True

    def landed(self, key: str, data: bytes, now_s: float = 0.0) -> None:
        """An object has become visible."""
        self._now_s = now_s
        short = key.removeprefix(self._prefix)
        if short.startswith(_ROOTS) and short not in FOREIGN:
            self._bundle_landed(short, data)
        elif short.startswith("quarantine/"):
            _, topic, queue_id, number, _ = re.sub("~(..)", _unescaped, short).split("/")
            self._aside[topic, int(queue_id), int(number)] += 1
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
            what, epoch = action["do"], entry["epoch"]
            if what == "epoch":
                self._epoch(action["epoch"], entry["writer"])
            elif epoch != self.epoch and (epoch or what not in _OF_GUESTS):
                continue  # not of the epoch: no history
            elif what == "part":
                for place, section in _named(action):
                    self._part(entry, place, section)
            elif what == "quarantine":
                self._quarantine(action)
            elif what == "gap":
                self._gap(action)
            elif what == "incarnation":
                self._begin_anew(action)
            elif what == "truncate":
                before = self.met["truncated"]
                self._truncate(action)
                self.truncated[epoch] += self.met["truncated"] - before
            elif what == "merge":
                self._merge(entry, action)
            elif what == "compacted":
                self._compacted(entry, action)
            elif what == "seal":
                self._seal(action)
            elif what == "expire":
                self._expire(entry, action)
            elif what == "index":
                self._index(action)
            elif what == "lineage":
                self._lineage(action)
            elif what == "pause":
                (self.paused.add if action["is_paused"] else self.paused.discard)(action["topic"])
            else:
                require(what == "meta", f"history does not know the action {what!r}")

    def _epoch(self, epoch: int, writer: str) -> None:
        require(epoch > self.epoch, f"I6: epoch {epoch} after {self.epoch}")
        if not self.epoch:
            had = self._broker.branches.items()
            self.met_first = {queue: max(one.min for one in some) for queue, some in had}
        self.epoch, self.writer = epoch, writer
        incarnations = [some[-1] for some in self.queues.values()]
        self.met["epoch behind sealed ends"] += any(
            incarnation.segments and incarnation.segments[-1].sealed for incarnation in incarnations
        )

    def present(self, queue: QueueKey) -> ModelIncarnation | None:
        """The present incarnation of a queue."""
        incarnations = self.queues.get(queue)
        return incarnations[-1] if incarnations else None

    def _spoken_of(
        self, action: dict[str, Any], start: int | None = None
    ) -> ModelIncarnation | None:
        """The present incarnation, if the action means it; with ``start``: the first one, if there is none yet."""
        return self._incarnation(
            (action["topic"], action["queue_id"]), action["incarnation"], start
        )

    def _incarnation(
        self, queue: QueueKey, number: int, start: int | None = None
    ) -> ModelIncarnation | None:
        if start is not None and queue not in self.queues and number == 0:
            return ModelIncarnation(0, start, start, start)
        incarnation = self.present(queue)
        return incarnation if incarnation and incarnation.number == number else None

    def _bundle_landed(self, key: str, data: bytes) -> None:
        """A bundle is what its own table says, to the last field of each section (I2, I3)."""
        sections, level = bundle(data)
        order = [(one.queue, one.queue_offset) for one in sections]
        require(order == sorted(order) or level > 0, f"{key} is not sorted: {order}")
        queues = [one.queue for one in sections]
        require(queues == sorted(queues), f"{key} is not sorted: {queues}")
        require(not self.folds or key == key.lower(), f"I11: {key} has capital letters")
        self.met["escaped"] += "~" in key
        kind, *folders = re.sub("~(..)", _unescaped, key).split("/")
        require(kind != "queue" or len(set(queues)) == 1, f"{key} has other queues: {queues}")
        require(
            kind != "topic" or {topic for topic, _ in queues} == {folders[0]}, f"{key}: {queues}"
        )
        for one in sections:
            records = self._section(key, data, one)
            true, said = claims_of(records), one.claims
            if (
                level
            ):  # of parts that were cut: bounds of what was whole, and a mark that nobody knew
                said = replace(said, mark=true.mark) if not said.mark else said
                wide = said.low <= true.low and said.high >= true.high
                said = replace(said, low=true.low, high=true.high) if wide else said
            require(said == true, f"I1: {key} says {one.claims} of {one.queue}, which is {true}")
        self.met["bundle of many"] += len(sections) > 1

    def _section(self, key: str, data: bytes, one: Section) -> list[bytes]:
        """The records of a section; its items have to fit them, tags included (I2)."""
        log, raw = payload(data, one)
        self.met["packed"] += one.stored_bytes < one.records_bytes
        what = f"I2: the items of {one.queue} at {one.queue_offset} in {key} are not those of its records"
        at, last, found = one.log_offset, (-1, 0), list[bytes]()
        for offset, (address, size, tag) in enumerate(_ITEM.iter_unpack(raw), one.queue_offset):
            if not size:
                found.append(hole(tag))
            elif (address, size) == last and covers(found[-1], offset):
                found.append(found[-1])
            else:
                require(address == at, what)
                record = log[at - one.log_offset : at - one.log_offset + size]
                require(not is_batch(record) or covers(record, offset), what)
                found.append(record)
                at, last = at + size, (address, size)
            require(tag == tag_code(found[-1]), f"{what}: tags")
        require(at - one.log_offset == len(log) == one.records_bytes, what)
        return found

    def _row(self, place: tuple[str, int, int], section: Section) -> Row:
        """A part whose bundle must be there (I2), and have exactly this section."""
        key, size, level = place
        require(self._has(key), f"I2: an entry names {key}, which is not there")
        data = self._get(key)
        sections, its_level = bundle(data)
        what = f"I5: an entry says of {key} what it is not"
        require((size, level) == (len(data), its_level) and section in sections, what)
        return Row.of(place, section, self._section(key, data, section))

    def _part(self, entry: dict[str, Any], place: tuple[str, int, int], section: Section) -> None:
        queue = section.queue
        incarnation = self._incarnation(queue, section.incarnation, section.queue_offset)
        begins = (section.queue_offset, section.log_offset)
        if incarnation is None or begins != (incarnation.commit, incarnation.log_end):
            self.refused += 1  # replay has to refuse it as well
            return
        row = self._row(place, section)
        before = incarnation.rows[-1] if incarnation.rows else None
        if not incarnation.place(row, section.segment, entry["time_ms"]):
            self.refused += 1
            return
        self._note(queue, incarnation, row.start, row.records)
        self.met["hole"] += row.claims.holes
        self.queues.setdefault(queue, [incarnation])
        self._continues(queue, before, row)

    def _note(
        self, queue: QueueKey, incarnation: ModelIncarnation, start: int, records: list[bytes]
    ) -> None:
        course = self.courses.setdefault((*queue, incarnation.number), [{}])[-1]
        course.update(enumerate(records, start))

    def incarnations(self, key: tuple[str, int, int]) -> list[ModelIncarnation]:
        """Those of one incarnation of a queue."""
        topic, queue_id, number = key
        return [one for one in self.queues[topic, queue_id] if one.number == number]

    def _quarantine(self, action: dict[str, Any]) -> None:
        incarnation = self._spoken_of(action)
        queue = action["topic"], action["queue_id"], action["incarnation"]
        self._said_aside[queue] += action["count"]
        there = self._aside[queue]
        what = f"I9: {self._said_aside[queue]} records of {queue} are called put aside, and {there} are"
        require(self._said_aside[queue] <= there, what)
        if incarnation is not None:
            incarnation.quarantined += action["count"]
            self.met["quarantined"] += action["count"]

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
        incarnation = self._spoken_of(action, start)
        require(incarnation is not None, f"I12: a gap of {queue} speaks of another incarnation")
        assert incarnation is not None
        what = f"I12: gap [{start}, {end}) of {queue} at {incarnation.commit}"
        require(start == incarnation.commit < end, what)
        there = max(branch.min for branch in self._broker.branches[queue])
        require(end <= there, f"I12: [{start}, {end}) of {queue} is called gone; min is {there}")
        incarnation.gaps.append((start, end))
        self._note(queue, incarnation, start, [GAP] * (end - start))
        self.met["gap"] += 1
        self.met["gap in the middle"] += bool(incarnation.segments)
        self.met["gap at the beginning"] += start == 0
        incarnation.min = incarnation.min if incarnation.segments else end
        incarnation.commit = end
        incarnation.lineage = incarnation.lineage and incarnation.lineage.moved(end)
        self.queues.setdefault(queue, [incarnation])

    def _truncate(self, action: dict[str, Any]) -> None:
        """The incarnation ends earlier, and its tail is an incarnation that is over; what does not fit changes nothing."""
        incarnation, end = self._spoken_of(action), action["end"]
        if incarnation is None:
            self.refused += 1
            return
        divided = None
        if action["was"] == incarnation.commit and incarnation.min < end < incarnation.commit:
            divided = incarnation.divide(end, action["head"])
        if divided is None:
            self.met["truncation refused"] += 1
            return
        queue = (action["topic"], action["queue_id"])
        self._is_cut_rightly(queue, incarnation, end, action["head"])
        tail, rest = divided
        tail.cut = (end, self.number)
        for row in (*tail.rows, *rest.rows):
            require(
                row.log_bytes == bytes_of(row.records), f"I3: {queue} is cut wrongly at {row.start}"
            )
        self.queues[queue][-1:] = [tail, rest]
        courses = self.courses[*queue, incarnation.number]
        courses.append({offset: raw for offset, raw in courses[-1].items() if offset < end})
        self.met["truncated"] += 1
        # Where the index of the part that is to be cut has a wrong bit, all of the part goes: it differs somewhere.
        whole = [row for row in tail.rows if self.flips and row.start == end and not action["head"]]
        differs = any(
            branch.at(offset) not in {None, tail.record(offset)}
            for branch in self._broker.branches[queue]
            for offset in range(end, whole[0].end if whole else end + 1)
        )
        if self._is_asked(queue, action, end):
            return
        what = f"{queue} is truncated from {end} on, where the broker has never had another record"
        require(tail.record(end) is None or differs, what)

    def _is_asked(self, queue: QueueKey, action: dict[str, Any], end: int) -> bool:
        """Whether this is what a person has asked for; nobody says so for whom nobody has asked."""
        if not action["reason"].startswith(_BY_A_PERSON):
            return False
        asked = self.asked.get(queue, set())
        # Where the index of the part that is to be cut has a wrong bit, all of the part goes.
        is_so = end in asked or (self.flips and any(one > end for one in asked))
        require(is_so, f"{queue} ends at {end}, and a person has asked for {sorted(asked)}")
        return True

    def _is_cut_rightly(
        self, queue: QueueKey, incarnation: ModelIncarnation, end: int, head: list[int] | None
    ) -> None:
        """What stays of a part that is divided says what is true of it."""
        for row in incarnation.rows if head else ():
            if head and row.start == head[0]:
                divided = row.divided(end, head)
                require(divided is not None, f"{queue} is cut where no part lies")
                assert divided is not None
                claims, wanted = divided[0].claims, row.beginning(end - row.start)
                unknown = replace(wanted, mark=0) if self.flips else wanted
                require(
                    claims in {wanted, unknown}, f"{queue} is cut to {claims}, which is {wanted}"
                )
                self.met["part divided"] += 1

    def _begin_anew(self, action: dict[str, Any]) -> None:
        queue, number, start = (
            (action["topic"], action["queue_id"]), action["incarnation"], action["start"],
        )  # fmt: skip
        incarnation = self.present(queue)
        if incarnation is not None and number == 0:
            return  # a part was faster
        if number != (incarnation.number + 1 if incarnation else 0):
            self.refused += 1
            return
        if incarnation is not None:
            incarnation.ended = True
            self.met["begun anew"] += 1
            had = self._broker.branches[queue]
            differs = not incarnation.rows or any(
                not branch.has(row.start, row.records) for row in incarnation.rows for branch in had
            )
            what = f"{queue} begins anew, and the broker has only ever had what the tier has"
            is_asked = self._is_asked(queue, action, start)
            # Where a person had it begin anew at its minimum, and nothing has come yet, a broker that has older messages
            # is another for all that a writer can tell: it takes them again, from the first.
            is_asked |= not incarnation.rows and incarnation.start in self.asked.get(queue, ())
            require(is_asked or (len(had) > 1 and differs), what)
        self.queues.setdefault(queue, []).append(ModelIncarnation(number, start, start, start))
        self.courses[*queue, number] = [{}]

    def _lineage(self, action: dict[str, Any]) -> None:
        incarnation = self._spoken_of(action)
        if incarnation is None:
            self.refused += 1
            return
        incarnation.lineage = (incarnation.lineage or Said()).grown(action)
        self.met["lineage"] += 1

    def _index(self, action: dict[str, Any]) -> None:
        """An index object is there (I2), and covers nothing that is not committed; what is in it, lookups tell."""
        for row in action["objects"]:
            key, covers = row[0], row[-1]
            require(self._has(key), f"I2: an entry names {key}, which is not there")
            for topic, queue_id, number, _, end, *_ in covers:
                incarnation = self._incarnation((topic, queue_id), number)
                is_so = incarnation is None or end <= max(
                    incarnation.commit, self._commit_max(topic, queue_id)
                )
                require(is_so, f"I2: {key} covers {topic} {queue_id} up to {end}")
            self.indexed.add(key)
            self.met["indexed"] += 1

    def _commit_max(self, topic: str, queue_id: int) -> int:
        """How far any incarnation of a queue ever reached: an index of what was truncated comes too late."""
        return max(incarnation.commit for incarnation in self.queues[topic, queue_id])

    def leased(self, data: bytes, *, is_new: bool) -> None:
        """What a lease remembers of the journal's end never falls, unless it was read with a wrong bit."""
        said = json.loads(data.partition(b"\n")[0])
        end = said["epoch"], said["number"]
        fallen = not (is_new or self.flips) and any(
            now < was for now, was in zip(end, self._leased, strict=True)
        )
        require(not fallen, f"the lease remembers {end}, after {self._leased}")
        self._leased = end

    def _seal(self, action: dict[str, Any]) -> None:
        """The last segment takes no more."""
        incarnation = self._spoken_of(action)
        last = incarnation.segments[-1] if incarnation and incarnation.segments else None
        if last and last.base == action["segment"]:
            self.met["sealed"] += not last.sealed
            last.sealed = True

    def _merge(self, entry: dict[str, Any], action: dict[str, Any]) -> None:
        """The same records in fewer parts; of each section that comes too late nothing changes."""
        named = _named(action)
        numbers, prints = (
            self._numbers(action[name], len(named)) for name in ("positions", "runs")
        )
        for (place, section), at, was in zip(named, numbers, prints, strict=True):
            incarnations = self.queues.get(section.queue, [])
            incarnation, run = self._found(incarnations, place, section, (at, was), entry)
            if incarnation is None or run is None:
                self.met["merge too late"] += 1
                continue
            row = self._row(place, section)
            self._is_same(row, run)
            self.met["open segment merged"] += not incarnation.segments[-1].sealed
            self.met["tail merged"] += section.truncated
            spans = len(incarnation.segments)
            incarnation.merge(row, run)
            self.met["segments joined"] += spans - len(incarnation.segments)
            self._unname(run)
            self.met["merged"] += 1

    def _compacted(self, entry: dict[str, Any], action: dict[str, Any]) -> None:
        """Some messages are holes now, of which a newer one has the key (K5). All of it holds, or nothing changes."""
        named = _named(action)
        numbers, prints = (
            self._numbers(action[name], len(named)) for name in ("positions", "runs")
        )
        queues = {section.queue for _, section in named} | {
            (topic, queue_id) for topic, queue_id, *_ in action["passes"]
        }
        after = {queue: deepcopy(self.queues.get(queue, [])) for queue in sorted(queues)}
        changed: list[tuple[ModelIncarnation, Row, list[Row]]] = []
        passed = {
            queue: [incarnation.passes for incarnation in incarnations]
            for queue, incarnations in after.items()
        }
        for (place, section), at, was in zip(named, numbers, prints, strict=True):
            incarnation, run = self._found(
                after[section.queue], place, section, (at, was), entry, compacts=True
            )
            if incarnation is None or run is None:
                self.met["compacted too late"] += 1
                return
            row = self._row(place, section)
            incarnation.merge(row, run)
            changed.append((incarnation, row, run))
        for topic, queue_id, at, passes in action["passes"]:
            incarnations = after[topic, queue_id]
            if at >= len(incarnations) or (passes and passes[-1][0] > incarnations[at].commit):
                self.met["compacted too late"] += 1
                return
            incarnations[at].passes = [(end, time_ms) for end, time_ms in passes]
        for incarnation, row, run in changed:
            was = passed[row.section.queue][after[row.section.queue].index(incarnation)]
            self._has_gone_rightly(incarnation, row, run, was)
        self.queues.update(after)
        for _, _, run in changed:
            self._unname(run)
        self.met["compacted"] += len(action["passes"])

    def _has_gone_rightly(
        self, incarnation: ModelIncarnation, row: Row, run: list[Row], passed: list[tuple[int, int]]
    ) -> None:
        """What is a hole now had a key, which a newer message has as well; or it was a tombstone that all have seen."""
        queue, before = row.section.queue, [raw for one in run for raw in one.records]
        gone = [
            (row.start + n, was)
            for n, (was, now) in enumerate(zip(before, row.records, strict=True))
            if was != now
        ]
        there = [
            (one.start + n, raw) for one in incarnation.rows for n, raw in enumerate(one.records)
        ]
        kept = [(offset, key_of(raw)) for offset, raw in there if not is_hole(raw)]
        newest, oldest = {key: at for at, key in kept}, {key: at for at, key in reversed(kept)}
        now_ms = incarnation.passes[-1][1]
        seen = max((to for to, ms in passed if ms <= now_ms - TOMBSTONES_MS), default=0)
        for offset, was in gone:
            what = f"K5: compaction of {queue} takes away {offset}"
            require(
                not is_hole(was) and incarnation.record(offset) == COMPACTED, f"{what}: no message"
            )
            require(bool(key_of(was)), f"{what}, which has no key")
            require(offset != incarnation.commit - 1, f"{what}, the newest message")
            if newest.get(key_of(was), -1) < offset:
                require(is_tombstone(was), f"{what}, the newest of its key")
                require(offset < seen, f"{what}, a tombstone, too early")
                older = oldest.get(key_of(was), offset) < offset
                require(not older, f"{what}, a tombstone that has an older value")
            mine = self.compacted.setdefault((*queue, incarnation.number), set())
            mine.add(offset)
        self.met["compacted away"] += len(gone)
        self.met["tombstone gone"] += sum(
            is_tombstone(was) and newest.get(key_of(was), -1) < offset for offset, was in gone
        )

    def _found(
        self,
        incarnations: list[ModelIncarnation],
        place: tuple[str, int, int],
        section: Section,
        presumed: tuple[int, int],
        entry: dict[str, Any],
        *,
        compacts: bool = False,
    ) -> tuple[ModelIncarnation | None, list[Row] | None]:
        """The incarnation, and the run of parts, that a section is to take the place of."""
        at, was = presumed
        incarnation = incarnations[at] if at < len(incarnations) else None
        behind = incarnations[at + 1] if at + 1 < len(incarnations) else None
        is_tail = bool(incarnation and behind and behind.number == incarnation.number)
        if (
            incarnation is None
            or incarnation.number != section.incarnation
            or is_tail != section.truncated
        ):
            return incarnation, None
        row = Row.of(place, section, [b""] * section.count)
        is_present = entry["epoch"] == self.epoch
        return incarnation, incarnation.run_for(
            row, section.segment, was, with_open=is_present, compacts=compacts
        )

    @staticmethod
    def _numbers(text: str, count: int) -> tuple[int, ...]:
        return struct.unpack(f"<{count}I", base64.b64decode(text))

    def _is_same(self, row: Row, run: list[Row]) -> None:
        """A merged part has its run's records, and says of them what its parts said."""
        queue = row.section.queue
        before = [raw for one in run for raw in one.records]
        what = f"I3: merging has changed {queue} in [{row.start}, {row.end})"
        require(before == row.records, what)
        said = joined([one.claims for one in run])
        what = f"I1: {queue}: a merged part says {row.claims}, its parts {said}"
        require(row.claims == said, what)
        sizes = {one.log_bytes for one in run}
        self.met["equal parts merged"] += len(run) > 1 and len(sizes) == 1
        self.met["parts with holes merged"] += row.claims.holes > 0
        self.met["cut parts merged"] += any(one.end - one.start < one.section.count for one in run)
        self.met[f"to level {row.bundle[2]}"] += 1

    def _expire(self, entry: dict[str, Any], action: dict[str, Any]) -> None:
        """Whole segments at the beginning of an incarnation; one that presumes what does not hold changes nothing."""
        incarnations = self.queues.get((action["topic"], action["queue_id"]), [])
        incarnation = (
            incarnations[action["position"]] if action["position"] < len(incarnations) else None
        )
        if incarnation is None or incarnation.number != action["incarnation"]:
            return
        if action["min_from"] == incarnation.min:
            old = incarnation.rows
            gone = incarnation.expire(action["min_to"], with_open=entry["epoch"] == self.epoch)
            self.met["expired segment"] += len(gone)
            for segment in gone:
                is_old = self.may_expire(action["topic"], segment.newest_ms)
                require(
                    is_old, f"I11: {action['topic']} gives up [{segment.queue_base}, …) too early"
                )
            self.met["expiry leaves a gap"] += bool(gone and incarnation.gaps)
            self._unname(old)

    def named(self) -> set[str]:
        """Keys that any incarnation names."""
        incarnations = (incarnation for some in self.queues.values() for incarnation in some)
        return {row.key for incarnation in incarnations for row in incarnation.rows}

    def _unname(self, rows: list[Row]) -> None:
        """Note since when nobody names the bundles of these parts, if nobody does."""
        for key in {row.key for row in rows} - self.named():
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
