"""Key compaction of a tier: of each key of a topic the newest message stays. Plan, then apply.

Overview: ``Compactor.plan`` reads the sealed segments of each queue that is due (``tiered.compaction.passes``): once for the
offset map what was not compacted yet, then all of it, round by round, to see what stays. ``apply`` rewrites the parts of
which something goes as sparse sections in bundles of the last level, and names them with one ``compacted`` action for as
many whole queues as fill a bundle: a reader sees a queue before or after, never a mix.

Ordering: data, then the entry (I2). Offsets and their order never change; the newest message of a queue always stays, as the
queue's end is known by it.

Beside a running writer: it takes no epoch, and touches only sealed segments. An action is taken only if every part that it
presumes is still there; merging or expiry may come between, then the plan is refused and made again. It is refused as
well when the epoch has changed, since a gc under a newer one may have deleted what nobody had named.

Memory: the offset map and as much of columns that are looked at again, one bundle (64 MiB) and the two parts that were read
last, one bit a message planned.

Damage: of a queue in which something is damaged the pass ends before the segment with the damage, and the rest stays as it
is: nobody knows which values lie there, and a tombstone must not go before them. Where that was compacted before, the whole
queue is left alone. What is damaged is named (``damaged``), and the next pass goes on once it is repaired.

Retries and errors: reads and uploads are tried again by the store. Damage between plan and apply ends the run, before that
queue is touched. After a crash: what was uploaded and not named is an orphan, which ``gc`` removes; plan again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from backends.wrapping import Prices
from tiered.api.broker_place import require_conditional_writes
from tiered.clock import ManualClock
from tiered.compaction.keyed import keyed_records
from tiered.compaction.offset_map import OffsetMap, in_several
from tiered.compaction.passes import LogFile, PassSettings, plan_pass
from tiered.compaction.retention import (
    CAREFUL,
    EVERY,
    PieceCache,
    RetentionPolicy,
    fill,
    stays,
    tombstones_gone,
    with_pass,
)
from tiered.crashpoints import reached
from tiered.dispatch.group_commit import Uploader
from tiered.dispatch.merging import Packer
from tiered.dispatch.settings import Compression
from tiered.errors import DataError, InvalidError
from tiered.journal.entry import Entry
from tiered.keys import guest_sequences, maker_of
from tiered.log.bundles import bundle_row, encode_numbers
from tiered.log.flat_file import ITEM
from tiered.log.merge import LAST_LEVEL, MergeOutput, MergeRun, fingerprint
from tiered.log.parts import Parts, Pass
from tiered.log.reader import QueueReader, TierReader
from tiered.log.state import TierMachine
from tiered.model import MessageQueue
from tiered.upkeep.compact_sections import (
    RUN_BYTES_MAX,
    PartLeft,
    part_records,
    plan_runs,
    section_of,
)
from tiered.upkeep.workplace import (
    FORMAT,
    Ledger,
    Plan,
    digest,
    journal_writer,
    moved_on,
    require_same_tier,
    tier_fields,
    was_applied,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from backends.base import ObjectStore
    from tiered.compaction.passes import PassPlan
    from tiered.compaction.retention import Flags, KeyedRecords
    from tiered.format.bundle import Section
    from tiered.journal.append import JournalWriter
    from tiered.journal.entry import Action
    from tiered.local.interface import RecordBatch
    from tiered.log.bundles import SectionRow
    from tiered.log.parts import Part, QueueLife, Segment
    from tiered.log.state import TierState
    from tiered.upkeep.workplace import Workplace

Tell = Callable[[MessageQueue, int, int], None]
MIB: Final = 1 << 20
GIB: Final = 1 << 30
STORED_PER_GIB_MONTH: Final = 0.023
"""US dollars, as of ``backends.wrapping.Prices``."""
KEYS_SAMPLED: Final = 1 << 16
"""Of each queue so many keys, at most, are held against those of the topic's other queues; 512 KiB."""
_ENTRY_REQUESTS: Final = 3
"""An entry, the listing behind it, and its share of checkpoint and ledger, about."""


@dataclass(frozen=True, slots=True)
class CompactSettings:
    """How a topic is compacted."""

    retention: RetentionPolicy = CAREFUL  # what stays
    passes: PassSettings = field(default_factory=PassSettings)  # when a pass is made
    memory_bytes: int = 128 * MIB  # of the offset map, at most
    compression: Compression | None = field(default_factory=Compression)
    """Of what is rewritten; None: it stays as it is."""
    across_queues: bool = False
    """The newest message of a key in all queues of its topic stays, by store time; else one in each queue."""


@dataclass(frozen=True, slots=True)
class Look:
    """A queue that a pass is over."""

    queue: MessageQueue
    number: int  # of its life, among the queue's lives
    life: QueueLife  # that life
    planned: PassPlan  # how far the pass goes
    segments: tuple[Segment, ...]  # those that it goes over
    parts: Parts  # theirs, in order
    tombstones_to: int  # the queue offset below which tombstones may go

    @property
    def last(self) -> int:
        """Queue offset of the queue's newest message, which stays whatever it is; -1: the pass does not reach it."""
        end = int(self.parts.queue_end)
        return end - 1 if end == self.life.commit_offset else -1


@dataclass(slots=True)
class Judged:
    """A queue whose messages have been looked at."""

    look: Look
    gone: list[int]  # of each part, how many messages go
    left_bytes: list[int]  # of each, bytes of records that stay
    counts: dict[str, int]
    """What was met: ``keys``, ``rounds``, ``reads``, ``keyless``, ``tombstones``."""
    stays: list[npt.NDArray[np.uint8]] = field(default_factory=list)
    """Of each, which messages stay, as bits; empty where only workers know."""
    number: int = 0  # of the queue among those that were looked at together

    def changed(self) -> list[bool]:
        """Of each part whether any message goes."""
        return [gone > 0 for gone in self.gone]

    def left(self, at: int) -> Flags:
        """bool[count], which messages of a part stay."""
        count = int(self.look.parts.rows["count"][at])
        return np.unpackbits(self.stays[at], count=count).view(np.bool_)


@dataclass(frozen=True, slots=True)
class Judgement:
    """What was found of queues of one topic."""

    judged: list[Judged]  # of each, in order
    spread_keys: int  # of some keys, how many are in several of the queues
    of_keys: int  # of how many


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring parts of a queue that become one section."""

    judged: Judged  # the queue
    run: MergeRun  # the parts
    begin: int  # number of the first of them among those of the look

    @property
    def left_bytes(self) -> int:
        """Of records that stay, and items."""
        some = slice(self.begin, self.begin + len(self.run.parts))
        items = ITEM.itemsize * int(self.run.parts.column("count").sum())
        return sum(self.judged.left_bytes[some]) + items


@dataclass(frozen=True, slots=True)
class MadeBundle:
    """A bundle that was uploaded, and is to be named."""

    row: list[Any]  # for the action
    size_bytes: int  # of the object
    runs: tuple[MergeRun, ...]  # what its sections take the place of, in order


@dataclass(frozen=True, slots=True)
class Guest:
    """Who uploads, beside the present writer."""

    epoch: int  # of the epoch
    writer: str  # id
    sequences: Iterator[int]  # numbers of its objects (``tiered.keys.guest_sequences``)
    now_ms: int  # UTC; keys begin with it
    escapes_case: bool  # the store takes names for one that differ only in case

    def uploader(self, store: ObjectStore, prefix: str) -> Uploader:
        """Puts its objects."""
        return Uploader(
            store,
            prefix,
            epoch=self.epoch,
            writer=self.writer,
            clock=ManualClock(self.now_ms),
            escapes_case=self.escapes_case,
            sequences=self.sequences,
        )


class Maker(Protocol):
    """Makes bundles of pieces."""

    @property
    def is_full(self) -> bool:
        """There is enough for an action."""

    def add(self, piece: Piece) -> None:
        """Take a piece, and make of it what can be made now."""

    def finish(self) -> list[MadeBundle]:
        """Make the rest; all bundles since the last time."""


class Engine(Protocol):
    """What reads and writes messages: this process, or Spark's (``tiered.upkeep.compact_spark``)."""

    def judge(self, looks: Sequence[Look], seen_ms: int) -> Judgement:
        """Look at queues of one topic.

        Args:
            seen_ms: Tombstones stored before may go (``seen_until_ms``).
        """

    def maker(self, guest: Guest) -> Maker:
        """Makes bundles in the name of ``guest``."""


class Compactor:
    """Compacts topics of one tier, on one thread."""

    def __init__(
        self,
        at: Workplace,
        settings: CompactSettings,
        *,
        tell: Tell = lambda _queue, _done, _of: None,
        engine: Engine | None = None,
    ) -> None:
        """Read nothing yet.

        Args:
            tell: Progress: the queue, messages looked at, and how many there are to look at.
            engine: What reads and writes messages; None: this process.
        """
        self._at = at
        self._settings = settings
        self.engine = engine or LocalEngine(at, settings, tell)  # what reads and writes messages
        self._judged: dict[tuple[MessageQueue, int], Judged] = {}
        self._spread: dict[str, tuple[int, int]] = {}
        self._damaged: list[dict[str, Any]] = []

    # -- planning ---------------------------------------------------------------------------------

    def plan(self, topics: Sequence[str]) -> Plan:
        """What compaction would do. Reads the messages' keys; changes nothing.

        Raises:
            InvalidError: There is no such topic, or one cannot be compacted.
            DataError: The journal is damaged, or contradicts itself. Of messages the plan says what is (``damaged``).
        """
        reader = TierReader(self._at.store, self._at.prefix)
        reader.refresh()
        now_ms, state = self._at.clock.now_ms(), reader.state
        steps, left = [], []
        self._damaged = []
        for topic in sorted(set(topics)):
            queues = sorted(queue for queue in state.queues if queue.topic == topic)
            if not queues:
                raise InvalidError(
                    f"the tier has no topic {topic}",
                    where=self._at.store.url,
                    do="`tiered ls URL` lists them",
                )
            planned = {queue: self._pass(state.queues[queue][-1], now_ms) for queue in queues}
            due = [queue for queue in queues if planned[queue].is_due]
            if due and self._settings.across_queues:  # what is newest of a key may be in any
                due = [queue for queue in queues if planned[queue].end > planned[queue].start]
            looks = [self._look(state, queue, planned[queue], now_ms) for queue in due]
            found = self._judge_sound(state, looks, now_ms)
            steps += [self._step(judged, now_ms) for judged in found]
            done = {judged.look.queue for judged in found}
            left += [
                _row(queue, state.queues[queue][-1], len(state.queues[queue]) - 1, planned[queue])
                for queue in queues
                if queue not in done
            ]
        return self._document(reader, now_ms, list(topics), steps, left)

    def _pass(self, life: QueueLife, now_ms: int, end: int = EVERY) -> PassPlan:
        """Over segments that begin before ``end``."""
        compacted_to = life.passes[-1].end if life.passes else 0
        files = [_file(one) for one in life.segments if one.base_queue_offset < end]
        return plan_pass(files, compacted_to, self._settings.passes, now_ms)

    def _look(self, state: TierState, queue: MessageQueue, planned: PassPlan, now_ms: int) -> Look:
        lives = state.queues[queue]
        life = lives[-1]
        able = tuple(one for one in life.segments if one.base_queue_offset < planned.end)
        parts = Parts.joined(segment.parts for segment in able)
        gone_to = tombstones_gone(life.passes, self._settings.retention, now_ms)
        return Look(queue, len(lives) - 1, life, planned, able, parts, gone_to)

    def _judge_sound(self, state: TierState, looks: list[Look], now_ms: int) -> list[Judged]:
        """As ``_judge``, of each queue as far as nothing is damaged; what is is noted."""
        try:
            return self._judge(state, looks)
        except DataError:
            sound = [self._before_damage(state, look, now_ms) for look in looks]
            if not any(row["topic"] == looks[0].queue.topic for row in self._damaged):
                raise  # it is something else
        return self._judge(state, [look for look in sound if look is not None])

    def _before_damage(self, state: TierState, look: Look, now_ms: int) -> Look | None:
        """A look that ends before the first segment in which something is damaged; None: a pass would find nothing to do."""
        reader = QueueReader.of_life(self._at.store, self._at.prefix, look.queue, look.life)
        rows: list[dict[str, Any]] = [
            {"segment": int(one.base_queue_offset), "start": start, "end": end, "why": why}
            for one in look.segments
            for start, end, why in reader.find_lost(one.base_queue_offset, one.parts.queue_end)
        ]
        if not rows:
            return look
        self._damaged += [look.queue._asdict() | row for row in rows]
        planned = self._pass(look.life, now_ms, min(row["segment"] for row in rows))
        has_work = planned.end > planned.dirty_from
        is_due = has_work if self._settings.across_queues else planned.is_due
        return self._look(state, look.queue, planned, now_ms) if is_due else None

    def _judge(self, state: TierState, looks: list[Look]) -> list[Judged]:
        """Look at queues of one topic, and remember what was found."""
        if not looks:
            return []
        seen_ms = seen_until_ms(state, looks) if self._settings.across_queues else EVERY
        verdict = self.engine.judge(looks, seen_ms)
        if verdict.spread_keys and not self._settings.across_queues:
            self._spread[looks[0].queue.topic] = verdict.spread_keys, verdict.of_keys
        self._judged.update({(one.look.queue, one.look.number): one for one in verdict.judged})
        return verdict.judged

    def _step(self, judged: Judged, now_ms: int) -> dict[str, Any]:
        look, parts = judged.look, judged.look.parts
        changed, left_bytes = judged.changed(), judged.left_bytes
        log_bytes = parts.column("log_bytes")
        rewritten = sum(size for size, goes in zip(left_bytes, changed, strict=True) if goes)
        objects = -(-rewritten // RUN_BYTES_MAX)
        reads = judged.counts["reads"] + sum(changed)
        writes = objects + _ENTRY_REQUESTS if any(changed) else _ENTRY_REQUESTS
        prices, share = Prices(), parts.stored_bytes() / np.maximum(log_bytes, 1)
        saved = (log_bytes - np.array(left_bytes, np.int64)) * share
        policy = self._settings.retention
        # Behind the last pass, also where a clock was set back or the broker took an end back since.
        done = [Pass(look.planned.end, now_ms), *look.life.passes[-1:]]
        new = Pass(max(one.end for one in done), max(one.time_ms for one in done))
        passes = with_pass(look.life.passes, new, now_ms - policy.tombstone_retention_ms)
        return {
            **_row(look.queue, look.life, look.number, look.planned),
            "messages": parts.messages,
            "gone_messages": sum(judged.gone),
            "log_bytes": int(log_bytes.sum()),
            "gone_bytes": int(log_bytes.sum()) - sum(left_bytes),
            "parts": len(parts),
            "rewritten_parts": sum(changed),
            "rewritten_bytes": rewritten,
            **judged.counts,
            "requests": reads + writes,
            "dollars": (reads * prices.read_per_1000 + writes * prices.write_per_1000) / 1000,
            "saved_dollars_month": float(saved.sum()) / GIB * STORED_PER_GIB_MONTH,
            "fingerprint": fingerprint(parts),
            "passes": [[one.end, one.time_ms] for one in passes],
        }

    def _document(
        self,
        reader: TierReader,
        now_ms: int,
        topics: list[str],
        steps: list[dict[str, Any]],
        left: list[dict[str, Any]],
    ) -> Plan:
        at, settings = self._at, self._settings
        summed = (
            *("messages", "gone_messages", "log_bytes", "gone_bytes", "keys", "requests"),
            *("rewritten_bytes", "dollars", "saved_dollars_month"),
        )
        return {
            "format": FORMAT,
            "what": "compact",
            "url": at.store.url,
            "cluster": at.place.cluster,
            "broker": at.place.broker,
            **tier_fields(reader.state),
            "journal_number": reader.journal_number,
            "epoch": reader.state.epoch,
            "made_ms": now_ms,
            "topics": topics,
            "policy": settings.retention.name,
            "tombstone_retention_ms": settings.retention.tombstone_retention_ms,
            "keeps_keyless": settings.retention.keeps_keyless,
            "map_bytes": settings.memory_bytes,
            "across_queues": settings.across_queues,
            **{name: sum(step[name] for step in steps) for name in summed},
            "spread": [
                {"topic": topic, "keys": keys, "of_keys": of}
                for topic, (keys, of) in sorted(self._spread.items())
            ],
            "steps": steps,
            "left": left,
            "damaged": self._damaged,
        }

    # -- applying ---------------------------------------------------------------------------------

    def apply(self, plan: Plan) -> dict[str, Any]:
        """Carry out a plan that has steps.

        Returns:
            ``steps`` that were carried out now, ``already_done``, ``entries``, ``bundles``, ``stored_bytes``,
            ``epoch``, ``run``; and ``was_applied``: all of it had been done before.

        Raises:
            InvalidError: The tier has moved on.
            BackendError: The store does not answer. Applying again goes on.
        """
        at = self._at
        able = require_conditional_writes(at.store, at.rng, at.store.url)
        ledger = Ledger(at.store, at.prefix, at.clock, run=at.new_id(), what="compact")
        ledger.note("begin", {"plan": digest(plan)})
        journal = journal_writer(at)
        require_same_tier(plan, journal.state)
        guest = Guest(
            journal.state.epoch,
            journal.writer,
            _sequences(plan, journal),
            at.clock.now_ms(),
            escapes_case=not able.distinguishes_case,
        )
        self._judge_again(plan, journal.state)
        run = _CompactRun(self, journal, self.engine.maker(guest), plan)
        run.run()
        journal.write_checkpoint()
        ledger.end(run.done)
        before = was_applied(len(plan["steps"]), run.done["steps"], run.done["already_done"])
        return {
            **run.done,
            "was_applied": before,
            "epoch": journal.state.epoch,
            "run": ledger.run,
        }

    def _judge_again(self, plan: Plan, state: TierState) -> None:
        """Look at what a plan of another process is over, topic by topic."""
        looks: dict[str, list[Look]] = defaultdict(list)
        for step in plan["steps"]:
            look = self._planned_look(step, plan, state)
            if look is None:
                continue
            known = self._judged.get((look.queue, look.number))
            if known is None or fingerprint(known.look.parts) != step["fingerprint"]:
                looks[look.queue.topic].append(look)
        for topic, some in looks.items():
            steps = [step for step in plan["steps"] if step["topic"] == topic]
            if plan["across_queues"] and len(some) < len(steps):
                raise moved_on(f"some queues of {topic} were compacted since, and not all")
            self._judge(state, some)

    def _planned_look(self, step: dict[str, Any], plan: Plan, state: TierState) -> Look | None:
        """A step's queue as it is now; None when the step was carried out before."""
        queue, number = MessageQueue(step["topic"], step["queue_id"]), int(step["life"])
        lives = state.queues.get(queue, ())
        life = lives[number] if number < len(lives) else None
        if life is None or number != len(lives) - 1 or life.incarnation != step["incarnation"]:
            raise moved_on(f"{queue} has begun anew")
        if [[one.end, one.time_ms] for one in life.passes] == step["passes"]:
            return None
        able = (one for one in life.segments if one.base_queue_offset < step["end"])
        if fingerprint(Parts.joined(one.parts for one in able)) != step["fingerprint"]:
            raise moved_on(f"the parts of {queue} have changed, as merging or expiry changes them")
        planned = self._pass(life, plan["made_ms"], step["end"])  # what was sealed since may wait
        if (planned.end, planned.dirty_from) != (step["end"], step["dirty_from"]):
            raise moved_on(f"the options do not give what was planned for {queue}")
        return self._look(state, queue, planned, plan["made_ms"])

    def judged(self, step: dict[str, Any], plan: Plan, state: TierState) -> Judged | None:
        """What stays of a queue; None when the step was carried out before.

        Raises:
            InvalidError: The queue is not what it was.
        """
        look = self._planned_look(step, plan, state)
        return None if look is None else self._judged[look.queue, look.number]


class _CompactRun:
    """Carries out a plan: whole queues are gathered until there is enough, then named by one action."""

    def __init__(
        self, compactor: Compactor, journal: JournalWriter[TierState], maker: Maker, plan: Plan
    ) -> None:
        self._compactor = compactor
        self._journal = journal
        self._maker = maker
        self._plan = plan
        self._epoch = journal.state.epoch
        self.done = dict.fromkeys(
            ("steps", "already_done", "entries", "bundles", "stored_bytes"), 0
        )
        self._passes: list[list[Any]] = []

    def run(self) -> None:
        """All steps."""
        for step in self._plan["steps"]:
            judged = self._compactor.judged(step, self._plan, self._journal.state)
            if judged is None:
                self.done["already_done"] += 1
                continue
            is_other = bool(self._passes) and self._passes[-1][0] != step["topic"]
            if is_other or (self._maker.is_full and not self._plan["across_queues"]):
                self._publish()
            for piece in pieces_of(judged):
                self._maker.add(piece)
            self._passes.append([step["topic"], step["queue_id"], step["life"], step["passes"]])
        if self._passes:
            self._publish()

    def _publish(self) -> None:
        made = self._maker.finish()
        runs = [run for one in made for run in one.runs]
        self.done["bundles"] += len(made)
        self.done["stored_bytes"] += sum(one.size_bytes for one in made)
        action = {
            "do": "compacted",
            "bundles": [one.row for one in made],
            "lives": encode_numbers([run.life for run in runs]),
            "runs": encode_numbers([fingerprint(run.parts) for run in runs]),
            "passes": self._passes,
        }
        self._journal.append([action], check=lambda state: self._hold(state, action))
        reached("compacted-named")
        self.done["entries"] += 1
        self.done["steps"] += len(self._passes)
        self._passes = []

    def _hold(self, state: TierState, action: Action) -> None:
        """Everything that the action presumes: that replay will take it."""
        if state.epoch != self._epoch:
            raise moved_on("another writer has taken over: what was uploaded may be gone")
        entry = Entry(self._journal.number + 1, 0, self._journal.writer, 0, [action])
        after = TierMachine().apply(state, entry)
        for topic, queue_id, number, passes in self._passes:
            queue = MessageQueue(topic, queue_id)
            found = after.queues[queue][number].passes if queue in after.queues else ()
            if [[one.end, one.time_ms] for one in found] != passes:
                raise moved_on(f"the parts of {queue} have changed, as merging or expiry does")


def pieces_of(judged: Judged) -> Iterator[Piece]:
    """What is to be rewritten of a queue."""
    look, changed, base = judged.look, judged.changed(), 0
    for segment in look.segments:
        some = slice(base, base + len(segment.parts))
        for begin, end in plan_runs(segment.parts, changed[some], judged.left_bytes[some]):
            parts = look.parts[base + begin : base + end]
            place = (look.queue, look.number, look.life.incarnation, segment.base_offset)
            yield Piece(judged, MergeRun(*place, parts), base + begin)
        base += len(segment.parts)


# -- by this process ---------------------------------------------------------------------------------


class LocalEngine:
    """Reads and writes messages itself, one part at a time."""

    def __init__(self, at: Workplace, settings: CompactSettings, tell: Tell) -> None:
        """Wire it; see ``Compactor``."""
        self._at = at
        self._settings = settings
        self._tell = tell

    def maker(self, guest: Guest) -> LocalMaker:
        uploader = guest.uploader(self._at.store, self._at.prefix)
        return LocalMaker(self, uploader, self._settings.compression)

    def judge(self, looks: Sequence[Look], seen_ms: int) -> Judgement:
        if self._settings.across_queues:
            return Judgement(self._judge_across(looks, seen_ms), 0, 0)
        samples: list[npt.NDArray[np.uint64]] = []
        judged = [self._judge(look, samples) for look in looks]
        return Judgement(judged, *in_several(samples, KEYS_SAMPLED))

    def _judge(self, look: Look, samples: list[npt.NDArray[np.uint64]]) -> Judged:
        retention, memory = self._settings.retention, self._settings.memory_bytes
        sampled: list[npt.NDArray[np.uint64]] = []
        found = _Found(look)
        at, cache = look.planned.dirty_from, PieceCache(memory)
        while at < look.planned.end:
            known = OffsetMap(memory)
            at = fill(known, self._from(look, at, found, cache), look.planned.end)
            found.counts["keys"] += known.keys
            sampled.append(known.sampled(KEYS_SAMPLED))
            found.begin_round()
            for number, part in enumerate(look.parts):
                if part.queue_offset > known.latest:
                    break
                for records in self._records(look, part, found, cache):
                    kept = stays(records, known, retention, look.tombstones_to)
                    found.keep(number, records, kept)
        samples.append(np.unique(np.concatenate(sampled))[:KEYS_SAMPLED])
        return found.judged()

    def _judge_across(self, looks: Sequence[Look], seen_ms: int) -> list[Judged]:
        """The newest of each key in all queues; keys that do not fit come in later rounds."""
        retention, founds = self._settings.retention, [_Found(look) for look in looks]
        messages = sum(look.parts.messages for look in looks)
        rounds = -(-messages * _ACROSS_BYTES // self._settings.memory_bytes) or 1
        cache = PieceCache(self._settings.memory_bytes)
        held = self._held(looks, founds, cache)
        for turn in range(rounds):
            newest = self._newest(looks, founds, cache, turn, rounds)
            for queue, (look, found) in enumerate(zip(looks, founds, strict=True)):
                found.begin_round()
                mine = newest["offset"][newest["queue"] == queue]
                mine.sort()
                for number, part in enumerate(look.parts):
                    for records in self._records(look, part, found, cache):
                        wins = is_among(mine, records.offsets)
                        gone_to = look.tombstones_to
                        dead = records.is_tombstone & (records.offsets < gone_to)
                        dead &= records.times_ms < seen_ms
                        dead &= ~np.isin(records.digests[:, 0], held)
                        kept = np.where(records.has_key, wins & ~dead, retention.keeps_keyless)
                        others = records.has_key & (records.digests[:, 0] % rounds != turn)
                        found.keep(number, records, kept | others)
                found.counts["keys"] += len(mine)
        return [found.judged() for found in founds]

    def _held(
        self, looks: Sequence[Look], founds: Sequence[_Found], cache: PieceCache
    ) -> npt.NDArray[np.uint64]:
        """Keys whose tombstone stays: a queue's newest message, which stays itself, has a value of theirs.

        Half of each digest: where another key has the same, its tombstone stays as well, which does no harm.
        """
        held = [np.empty(0, np.uint64)]
        for look, found in zip(looks, founds, strict=True):
            part = look.parts[len(look.parts) - 1]
            records = self._records(look, part, found, cache)
            held += [some.digests[holds(some, look.last), 0] for some in records]
        return np.concatenate(held)

    def _newest(
        self,
        looks: Sequence[Look],
        founds: Sequence[_Found],
        cache: PieceCache,
        turn: int,
        rounds: int,
    ) -> npt.NDArray[np.void]:
        """Where the newest message of each key is whose turn it is."""
        rows = [np.empty(0, PLACE)]
        for queue, (look, found) in enumerate(zip(looks, founds, strict=True)):
            for part in look.parts:
                for records in self._records(look, part, found, cache):
                    mine = records.has_key & (records.digests[:, 0] % rounds == turn)
                    rows.append(places_of(records.some(mine), queue))
        return newest_of(np.concatenate(rows))

    def _from(
        self, look: Look, start: int, found: _Found, cache: PieceCache
    ) -> Iterator[KeyedRecords]:
        for part in look.parts:
            if part.queue_end > start:
                for records in self._records(look, part, found, cache):
                    is_whole = not len(records) or records.offsets[0] >= start
                    yield records if is_whole else records.some(records.offsets >= start)

    def _records(
        self, look: Look, part: Part, found: _Found, cache: PieceCache
    ) -> Iterator[KeyedRecords]:
        def read() -> Iterator[KeyedRecords]:
            found.counts["reads"] += 1
            yield from keyed_records(self._batch(look.queue, part))

        # Offsets tell parts of a queue apart, and queues each other: a look has one of each.
        return cache.pieces((look.queue, int(part.queue_offset)), read)

    def _batch(self, queue: MessageQueue, part: Part) -> RecordBatch:
        self._tell(queue, int(part.queue_offset), int(part.queue_end))
        return part_records(self._at.store, self._at.prefix, queue, part)

    def lefts(self, piece: Piece) -> Iterator[PartLeft]:
        """Parts of a queue, each read when it is asked for, and what stays of them."""
        for at, part in enumerate(piece.run.parts, piece.begin):
            yield PartLeft(part, self._batch(piece.run.queue, part), piece.judged.left(at))


class _Found:
    """What is found of a queue, message by message."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._flags = [np.ones(count, np.bool_) for count in look.parts.column("count").tolist()]
        self._left_bytes = [0] * len(look.parts)
        self.counts = dict.fromkeys(("keys", "rounds", "reads", "keyless", "tombstones"), 0)

    def begin_round(self) -> None:
        """A round looks at all up to its end, the last at all there is: what it counts is not added up."""
        self.counts["rounds"] += 1
        self.counts["keyless"] = self.counts["tombstones"] = 0
        self._left_bytes = [0] * len(self._left_bytes)

    def keep(self, number: int, records: KeyedRecords, kept: Flags) -> None:
        """Of some records of a part, which stay: those that did until now and are ``kept``, and the queue's newest."""
        where = records.offsets - int(self._look.parts.rows["queue_offset"][number])
        mine = self._flags[number]
        mine[where] &= kept | (records.offsets == self._look.last)
        self._left_bytes[number] += int(records.sizes[mine[where]].sum())
        self.counts["keyless"] += int(np.count_nonzero(~records.has_key))
        self.counts["tombstones"] += int(np.count_nonzero(records.is_tombstone))

    def judged(self) -> Judged:
        """All of it."""
        gone = [int(np.count_nonzero(~mine)) for mine in self._flags]
        packed = [np.packbits(mine) for mine in self._flags]
        return Judged(self._look, gone, self._left_bytes, self.counts, packed)


class LocalMaker:
    """Makes sections as they come, and a bundle when they fill one."""

    def __init__(
        self, engine: LocalEngine, uploader: Uploader, compression: Compression | None
    ) -> None:
        """Wire it."""
        self._engine = engine
        self._uploader = uploader
        self._packer = Packer(compression) if compression else None
        self._open: list[tuple[MergeRun, tuple[SectionRow, Section]]] = []
        self._made: list[MadeBundle] = []

    @property
    def is_full(self) -> bool:
        return bool(self._made)

    def add(self, piece: Piece) -> None:
        lefts = self._engine.lefts(piece)
        self._open.append((piece.run, section_of(piece.run, lefts, self._packer)))
        if sum(one.place.size_bytes for _, (_, one) in self._open) >= RUN_BYTES_MAX:
            self._upload()

    def finish(self) -> list[MadeBundle]:
        if self._open:
            self._upload()
        made, self._made = self._made, []
        return made

    def _upload(self) -> None:
        runs = tuple(run for run, _ in self._open)
        self._made.append(put_sections(self._uploader, runs, [one for _, one in self._open]))
        self._open.clear()


def put_sections(
    uploader: Uploader, runs: tuple[MergeRun, ...], sections: Sequence[tuple[SectionRow, Section]]
) -> MadeBundle:
    """Upload one bundle.

    Raises:
        BackendError: Not stored, or nobody knows.
    """
    queues = {run.queue for run in runs}
    own = runs[0].queue if len(queues) == 1 else None
    output = MergeOutput(LAST_LEVEL, runs, runs[0].queue.topic, own)
    stored = uploader.put_merged(output, sections)
    reached("compacted-stored")
    row = bundle_row(stored.bundle, stored.packed)
    return MadeBundle(row, stored.bundle.size_bytes, runs)


# -- newest of several queues ----------------------------------------------------------------------

_ACROSS_BYTES: Final = 128
"""Of a message, while the newest of each key is looked for: its row, and what sorting takes."""
PLACE: Final = np.dtype(
    [
        *(("high", "<u8"), ("low", "<u8")),  # of the key's digest
        *(("time_ms", "<i8"), ("offset", "<i8"), ("queue", "<i4")),
    ]
)


def places_of(records: KeyedRecords, queue: int) -> npt.NDArray[np.void]:
    """Rows of ``PLACE`` of records of a queue."""
    rows = np.empty(len(records), PLACE)
    rows["high"], rows["low"] = records.digests[:, 0], records.digests[:, 1]
    rows["time_ms"], rows["offset"], rows["queue"] = records.times_ms, records.offsets, queue
    return rows


def newest_of(rows: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Of each key the newest, by store time, then offset, then queue."""
    names = ("queue", "offset", "time_ms", "low", "high")
    rows = rows[np.lexsort(tuple(rows[name] for name in names))]
    last = np.ones(len(rows), np.bool_)
    last[:-1] = (rows["high"][1:] != rows["high"][:-1]) | (rows["low"][1:] != rows["low"][:-1])
    return rows[last]


def is_among(ascending: npt.NDArray[np.int64], values: npt.NDArray[np.int64]) -> Flags:
    """bool[n], which values are in a sorted column."""
    if not len(ascending):
        return np.zeros(len(values), np.bool_)
    at = np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)
    found: Flags = ascending[at] == values
    return found


def holds(records: KeyedRecords, last: int) -> Flags:
    """bool[n], whether it is its queue's newest message, at ``last``, and has a value of a key.

    It stays, though another queue may have a newer tombstone of that key. Without that tombstone it would be the newest of
    the key: what was deleted would be back.
    """
    held: Flags = (records.offsets == last) & records.has_key & ~records.is_tombstone
    return held


def seen_until_ms(state: TierState, looks: Sequence[Look]) -> int:
    """The store time before which a pass looks at all messages of a topic.

    A tombstone behind it has to wait: an older value of its key may lie where the pass does not look. That may be in a queue
    of which it looks at nothing.
    """
    looked = {look.queue: len(look.segments) for look in looks}
    unseen = (
        times[0]
        for queue, lives in state.queues.items()
        if queue.topic == looks[0].queue.topic
        for segment in lives[-1].segments[looked.get(queue, 0) :]
        if (times := segment.parts.store_times) is not None
    )
    return min(unseen, default=EVERY)


def _sequences(plan: Plan, journal: JournalWriter[TierState]) -> Iterator[int]:
    state = journal.state
    queues = {MessageQueue(step["topic"], step["queue_id"]) for step in plan["steps"]}
    lives = (life for queue in queues for life in state.queues.get(queue, ()))
    made = (maker_of(bundle.key) for life in lives for bundle in life.parts().bundles)
    return guest_sequences(filter(None, made), state.epoch)


def _file(segment: Segment) -> LogFile:
    oldest_ms, newest_ms = segment.parts.store_times or (-1, -1)
    return LogFile(
        int(segment.base_queue_offset),
        int(segment.parts.queue_end),
        segment.size_bytes,
        oldest_ms,
        newest_ms,
        is_active=not segment.sealed,
    )


def _row(queue: MessageQueue, life: QueueLife, number: int, planned: PassPlan) -> dict[str, Any]:
    return {
        "topic": queue.topic,
        "queue_id": queue.queue_id,
        "incarnation": life.incarnation,
        "life": number,
        "due": str(planned.due),
        "start": planned.start,
        "dirty_from": planned.dirty_from,
        "end": planned.end,
        "dirty_ratio": planned.dirty_ratio,
    }
