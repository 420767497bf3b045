"""Key compaction of a tier: of each key of a topic the newest message stays. Plan, then apply.

Overview: ``Compactor.plan`` reads the keys in sealed segments of each queue that is due (``tiered.compaction.passes``), in
ranges and, when not all keys fit into memory, in rounds (``tiered.compaction.newest``), to see what stays. ``apply``
rewrites the parts of which something goes as sparse sections in bundles of the last level, and names them with one
``compacted`` action for as many whole queues as fill a bundle: a reader sees a queue before or after, never a mix. Messages
are read and written by an engine's works (``tiered.upkeep.compact_work``): in this thread, or as tasks of Spark.

Ordering: data, then the entry (I2). Offsets and their order never change; the newest message of a queue always stays, as the
queue's end is known by it.

Beside a running writer: it takes no epoch, and touches only sealed segments. An action is taken only if every part that it
presumes is still there; merging or expiry may come between, then the plan is refused and made again. It is refused as
well when the epoch has changed, since a gc under a newer one may have deleted what nobody had named.

Memory: the keys of a round; a bit a message planned, a byte a message of queues that are looked at together; and what works
need.

Damage: of a queue in which something is damaged the pass ends before the segment with the damage, and the rest stays as it
is: nobody knows which values lie there, and a tombstone must not go before them. Where that was compacted before, the whole
queue is left alone. What is damaged is named (``damaged``), and the next pass goes on once it is repaired.

Retries and errors: reads and uploads are tried again by the store. Damage between plan and apply ends the run, before that
queue is touched. After a crash: what was uploaded and not named is an orphan, which ``gc`` removes; plan again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import field
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from backends.lazy_dataclass import dataclass
from backends.wrapping import Prices
from tiered.api.broker_place import require_conditional_writes
from tiered.compaction.newest import GOES, HOLDS, Newest, in_rounds, in_several, keys_that_fit
from tiered.compaction.passes import (
    CAREFUL,
    EVERY,
    LogFile,
    PassSettings,
    RetentionPolicy,
    plan_pass,
    tombstones_gone,
    with_pass,
)
from tiered.crashpoints import reached
from tiered.dispatch.settings import Compression
from tiered.errors import DataError, no_topic
from tiered.journal.entry import AnyInt, Entry, row_of
from tiered.keys import maintenance_sequences, maker_of
from tiered.log.actions import IncarnationPasses
from tiered.log.bundles import encode_numbers
from tiered.log.flat_file import ITEM
from tiered.log.lineage import stable_end
from tiered.log.merge import MergeRun, fingerprint
from tiered.log.parts import Parts, Pass
from tiered.log.reader import QueueReader, TierReader
from tiered.log.state import TierMachine
from tiered.model import MessageQueue
from tiered.upkeep.compact_work import (
    RUN_BYTES_MAX,
    BundleWork,
    KeysWork,
    MaintenanceWriter,
    PartRange,
    make_bundle,
    plan_runs,
    read_keys,
)
from tiered.upkeep.engine import WorkContext, all_done, own_engine
from tiered.upkeep.workplace import (
    Ledger,
    TierPlan,
    digest,
    journal_writer,
    moved_on,
    plan_head,
    require_same_tier,
    was_applied,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from tiered.compaction.newest import Rows
    from tiered.compaction.passes import PassPlan
    from tiered.journal.append import JournalWriter
    from tiered.journal.entry import Action
    from tiered.log.parts import AbortedRange, Incarnation, Segment
    from tiered.log.state import TierState
    from tiered.upkeep.compact_work import MadeBundle, PartRead
    from tiered.upkeep.engine import Engine
    from tiered.upkeep.workplace import Workplace

Tell = Callable[[MessageQueue, int, int], None]
MIB: Final = 1 << 20
GIB: Final = 1 << 30
STORED_PER_GIB_MONTH: Final = 0.023
"""US dollars, as of ``backends.wrapping.Prices``."""
KEYS_SAMPLED: Final = 1 << 16
"""Of each queue so many keys, at most, are held against those of the topic's other queues; 512 KiB."""
RANGE_BYTES: Final = 64 << 20
_MESSAGE_BYTES: Final = 256
"""Works that read keys: about so many bytes each, where small messages count for more: a work gives a row back for each key,
44 bytes, and many are under way."""
_ENTRY_REQUESTS: Final = 3
"""An entry, the listing behind it, and its share of checkpoint and ledger, about."""


@dataclass(frozen=True, slots=True)
class CompactSettings:
    """How a topic is compacted."""

    retention: RetentionPolicy = CAREFUL  # what stays
    passes: PassSettings = field(default_factory=PassSettings)  # when a pass is made
    memory_bytes: int = 256 * MIB  # of the keys of a round, at most
    compression: Compression | None = field(default_factory=Compression)
    """Of what is rewritten; None: it stays as it is."""
    across_queues: bool = False
    """The newest message of a key in all queues of its topic stays, by store time; else one in each queue."""


@dataclass(frozen=True, kw_only=True)
class PlannedQueue:
    """A queue, and how far a pass over it goes, or would."""

    queue: MessageQueue
    incarnation: int
    position: int  # of the incarnation, among the queue's incarnations
    due: str  # why, or why not
    start: int  # first queue offset
    dirty_from: int  # first that was not compacted
    end: int  # one past the last that may be touched
    dirty_ratio: float


@dataclass(frozen=True, kw_only=True)
class CompactStep(PlannedQueue):
    """What a pass makes of a queue."""

    messages: int  # that it looks at
    gone_messages: int
    log_bytes: int  # of their records
    gone_bytes: int
    parts: int
    rewritten_parts: int
    rewritten_bytes: int
    keys: int
    rounds: int  # in which keys were looked at
    reads: int  # of parts, in these
    keyless: int  # messages without a key
    tombstones: int
    requests: int
    dollars: float
    saved_dollars_month: float
    fingerprint: int  # of the parts
    passes: tuple[tuple[int, int], ...]
    """That the incarnation has from then on: one past the last queue offset of each, and its time."""


@dataclass(frozen=True, slots=True)
class DamagedRange:
    """What cannot be read of a queue."""

    queue: MessageQueue
    segment: (
        int  # base queue offset of the segment that it lies in, from which on nothing is compacted
    )
    start: int
    end: int
    why: str


@dataclass(frozen=True, slots=True)
class Spread:
    """Keys of a topic that went to several queues, of those that were looked at."""

    topic: str
    keys: int
    of_keys: int


@dataclass(frozen=True, kw_only=True)
class CompactPlan(TierPlan[CompactStep]):
    """What compaction does to some topics; numbers are of all steps."""

    topics: tuple[str, ...]
    policy: str
    tombstone_retention_ms: AnyInt
    keeps_keyless: bool
    map_bytes: int
    across_queues: bool
    messages: int
    gone_messages: int
    log_bytes: int
    gone_bytes: int
    keys: int
    requests: int
    rewritten_bytes: int
    dollars: float
    saved_dollars_month: float
    spread: tuple[Spread, ...]
    steps: tuple[CompactStep, ...]
    left: tuple[PlannedQueue, ...]  # queues that stay as they are
    damaged: tuple[DamagedRange, ...]


@dataclass(frozen=True, slots=True)
class QueuePass:
    """A queue that a pass is over."""

    queue: MessageQueue
    number: int  # of its incarnation, among the queue's incarnations
    incarnation: Incarnation  # that incarnation
    planned: PassPlan  # how far the pass goes
    segments: tuple[Segment, ...]  # those that it goes over
    parts: Parts  # theirs, in order
    tombstones_to: int  # the queue offset below which tombstones may go

    @property
    def last(self) -> int:
        """Queue offset of the queue's newest message, which stays whatever it is; -1: the pass does not reach it."""
        end = int(self.parts.queue_end)
        return end - 1 if end == self.incarnation.commit_offset else -1

    def aborted_in(self, parts: Parts) -> tuple[AbortedRange, ...]:
        """What was aborted of neighbouring parts."""
        facts = self.incarnation.lineage
        start, end = parts[0].queue_offset, parts.queue_end
        every = facts.aborted if facts else ()
        return tuple(one for one in every if one.first < end and one.last >= start)


class Judged:
    """A queue whose messages are looked at, or have been: what stays of each part."""

    def __init__(self, look: QueuePass) -> None:
        self.look = look
        names = ("keys", "rounds", "reads", "keyless", "tombstones")
        self.counts: dict[str, Any] = dict.fromkeys(names, 0)  # of a ``CompactStep``
        # Of each part, bytes of records that stay.
        self.left_bytes: npt.NDArray[np.int64] = np.zeros(len(look.parts), np.int64)
        self._offsets = look.parts.column("queue_offset")
        self._starts = np.append(0, np.cumsum(look.parts.column("count")))
        self._stays = np.zeros(int(self._starts[-1]), np.bool_)

    def begin_round(self) -> None:
        """All parts are read once more."""
        self.counts["rounds"] += 1
        self.counts["reads"] += len(self.look.parts)

    def note(self, read: PartRead) -> None:
        """What stays of a part whatever else there is."""
        begin, end = self._starts[read.part : read.part + 2].tolist()
        self._stays[begin:end] = np.unpackbits(read.stays, count=end - begin)
        self.left_bytes[read.part] = read.left_bytes
        self.counts["keyless"] += read.keyless
        self.counts["tombstones"] += read.tombstones

    def take(self, newest: Rows) -> None:
        """The newest messages of some keys stay, but for tombstones whose time is over."""
        goes = (newest["flags"] & GOES > 0) & (newest["flags"] & HOLDS == 0)
        rows = newest[~goes]
        parts = np.searchsorted(self._offsets, rows["offset"], "right") - 1
        where = self._starts[parts] + rows["offset"] - self._offsets[parts]
        is_more = ~self._stays[where]
        np.add.at(self.left_bytes, parts[is_more], rows["size"][is_more])
        self._stays[where] = True

    def close(self) -> None:
        """All rounds are done: from now on a bit a message."""
        flags = [self._stays[begin:end] for begin, end in pairwise(self._starts.tolist())]
        # Of each part, how many messages go, and which stay, as bits.
        self.gone = [int(np.count_nonzero(~mine)) for mine in flags]
        self.stays = [np.packbits(mine) for mine in flags]
        self._stays = self._stays[:0]

    def changed(self) -> list[bool]:
        """Of each part whether any message goes."""
        return [gone > 0 for gone in self.gone]


@dataclass(frozen=True, slots=True)
class SectionWork:
    """Neighbouring parts of a queue that become one section."""

    judged: Judged  # the queue
    run: MergeRun  # the parts
    begin: int  # number of the first of them among those of the look

    @property
    def _some(self) -> slice:
        return slice(self.begin, self.begin + len(self.run.parts))

    @property
    def left_bytes(self) -> int:
        """Of records that stay, and items."""
        items = ITEM.itemsize * int(self.run.parts.column("count").sum())
        return int(self.judged.left_bytes[self._some].sum()) + items

    @property
    def stays(self) -> list[npt.NDArray[np.uint8]]:
        """Of each part, which messages stay, as bits."""
        return self.judged.stays[self._some]


class Compactor:
    """Compacts topics of one tier, on one thread."""

    def __init__(
        self,
        at: Workplace,
        settings: CompactSettings,
        *,
        tell: Tell = lambda _queue, _start, _end: None,
        engine: Engine | None = None,
        bundles: int = 1,
    ) -> None:
        """Read nothing yet.

        Args:
            tell: Progress, before a work is handed out: the queue, and the queue offsets that it looks at.
            bundles: So many are made before they are named, at least; all of a queue's are named at once.
        """
        self._at = at
        self.settings = settings
        self._tell = tell
        self.engine = engine or own_engine(WorkContext(at.store, at.prefix, at.store))
        self.bundles = bundles
        self._judged: dict[tuple[MessageQueue, int], Judged] = {}
        self._spread: dict[str, tuple[int, int]] = {}
        self._damaged: list[DamagedRange] = []

    # -- planning ---------------------------------------------------------------------------------

    def plan(self, topics: Sequence[str]) -> CompactPlan:
        """What compaction would do. Reads the messages' keys; changes nothing.

        Raises:
            InvalidError: There is no such topic, or one cannot be compacted.
            DataError: The journal is damaged, or contradicts itself. Of messages the plan says what is (``damaged``).
        """
        reader = self._at.reader()
        now_ms, state = self._at.clock.now_ms(), reader.state
        steps, left = [], []
        self._damaged = []
        for topic in sorted(set(topics)):
            queues = sorted(queue for queue in state.queues if queue.topic == topic)
            if not queues:
                known = {queue.topic for queue in state.queues}
                raise no_topic(topic, known, where=self._at.store.url)
            planned = {queue: self._pass(state.queues[queue][-1], now_ms) for queue in queues}
            due = [queue for queue in queues if planned[queue].is_due]
            if due and self.settings.across_queues:  # what is newest of a key may be in any
                due = [queue for queue in queues if planned[queue].end > planned[queue].start]
            looks = [self._look(state, queue, planned[queue], now_ms) for queue in due]
            found = self._judge_sound(state, looks, now_ms)
            steps += [self._step(judged, now_ms) for judged in found]
            done = {judged.look.queue for judged in found}
            left += [
                PlannedQueue(
                    **_head(
                        queue, state.queues[queue][-1], len(state.queues[queue]) - 1, planned[queue]
                    )
                )
                for queue in queues
                if queue not in done
            ]
        return self._summed(reader, now_ms, topics, steps, left)

    def _pass(self, incarnation: Incarnation, now_ms: int, end: int = EVERY) -> PassPlan:
        """Over segments that begin before ``end``, as far as all transactions are decided."""
        compacted_to = incarnation.passes[-1].end if incarnation.passes else 0
        able = takewhile(
            lambda one: one.parts.queue_end <= stable_end(incarnation), incarnation.segments
        )
        files = [_file(one) for one in able if one.base_queue_offset < end]
        return plan_pass(files, compacted_to, self.settings.passes, now_ms)

    def _look(
        self, state: TierState, queue: MessageQueue, planned: PassPlan, now_ms: int
    ) -> QueuePass:
        incarnations = state.queues[queue]
        incarnation = incarnations[-1]
        able = tuple(one for one in incarnation.segments if one.base_queue_offset < planned.end)
        parts = Parts.joined(segment.parts for segment in able)
        gone_to = tombstones_gone(incarnation.passes, self.settings.retention, now_ms)
        return QueuePass(queue, len(incarnations) - 1, incarnation, planned, able, parts, gone_to)

    def _judge_sound(self, state: TierState, looks: list[QueuePass], now_ms: int) -> list[Judged]:
        """As ``_judge``, of each queue as far as nothing is damaged; what is is noted."""
        try:
            return self._judge(state, looks)
        except DataError:
            sound = [self._before_damage(state, look, now_ms) for look in looks]
            if not any(row.queue.topic == looks[0].queue.topic for row in self._damaged):
                raise  # it is something else
        return self._judge(state, [look for look in sound if look is not None])

    def _before_damage(self, state: TierState, look: QueuePass, now_ms: int) -> QueuePass | None:
        """A look that ends before the first segment in which something is damaged; None: a pass would find nothing to do."""
        reader = QueueReader.of_incarnation(
            self._at.store, self._at.prefix, look.queue, look.incarnation
        )
        rows = [
            DamagedRange(look.queue, int(one.base_queue_offset), start, end, why)
            for one in look.segments
            for start, end, why in reader.find_lost(one.base_queue_offset, one.parts.queue_end)
        ]
        if not rows:
            return look
        self._damaged += rows
        planned = self._pass(look.incarnation, now_ms, min(row.segment for row in rows))
        has_work = planned.end > planned.dirty_from
        is_due = has_work if self.settings.across_queues else planned.is_due
        return self._look(state, look.queue, planned, now_ms) if is_due else None

    def _judge(self, state: TierState, looks: list[QueuePass]) -> list[Judged]:
        """QueuePass at queues of one topic, and remember what was found."""
        if not looks:
            return []
        is_across = self.settings.across_queues
        seen_ms = seen_until_ms(state, looks) if is_across else EVERY
        keys_max = keys_that_fit(self.settings.memory_bytes)
        found, samples = [], []
        for some in [looks] if is_across else _together(looks, keys_max):
            judged = [Judged(look) for look in some]
            sampled = self._judge_together(judged, seen_ms, keys_max)
            found += judged
            samples += sampled
        spread = in_several(samples, KEYS_SAMPLED)
        if spread[0] and not is_across:
            self._spread[looks[0].queue.topic] = spread
        self._judged.update({(one.look.queue, one.look.number): one for one in found})
        return found

    def _judge_together(
        self, judged: list[Judged], seen_ms: int, keys_max: int
    ) -> list[npt.NDArray[np.uint64]]:
        """QueuePass at queues by the same works; of each queue some of the digests that were new in it."""
        settings = self.settings
        is_across, keeps_keyless = settings.across_queues, settings.retention.keeps_keyless
        samples = [np.empty(0, np.uint64) for _ in judged]

        def look(newest: Newest) -> None:
            works = (
                # A round may have got shorter since: what it gives up needs not be sent.
                KeysWork(some, keeps_keyless, seen_ms, is_across, (newest.first, newest.last))
                for some in _offset_ranges([one.look for one in judged], self._tell)
            )
            with all_done(self.engine(read_keys, works)) as each:
                for _, (rows, parts) in each:
                    newest.put(rows)
                    for part in () if newest.first else parts:
                        judged[part.queue].note(part)

        for newest in in_rounds(keys_max, look, is_across=is_across):
            rows = newest.rows()
            for number, one in enumerate(judged):
                mine = rows[rows["queue"] == number]
                # What is clean in one queue is not among several.
                new_from = 0 if is_across else one.look.planned.dirty_from
                new = mine["high"][mine["offset"] >= new_from]
                one.begin_round()
                one.counts["keys"] += len(new)
                one.take(mine)
                samples[number] = np.concatenate((samples[number], new[:KEYS_SAMPLED]))
        for one in judged:
            one.close()
        return [sample[:KEYS_SAMPLED] for sample in samples]

    def _step(self, judged: Judged, now_ms: int) -> CompactStep:
        look, parts = judged.look, judged.look.parts
        changed, left_bytes = judged.changed(), judged.left_bytes
        log_bytes = parts.column("log_bytes")
        rewritten = int(left_bytes[changed].sum())
        objects = -(-rewritten // RUN_BYTES_MAX)
        reads = judged.counts["reads"] + sum(changed)
        writes = objects + _ENTRY_REQUESTS if any(changed) else _ENTRY_REQUESTS
        prices, share = Prices(), parts.stored_bytes() / np.maximum(log_bytes, 1)
        saved = (log_bytes - left_bytes) * share
        policy = self.settings.retention
        # Behind the last pass, also where a clock was set back or the broker took an end back since.
        done = [Pass(look.planned.end, now_ms), *look.incarnation.passes[-1:]]
        new = Pass(max(one.end for one in done), max(one.time_ms for one in done))
        passes = with_pass(look.incarnation.passes, new, now_ms - policy.tombstone_retention_ms)
        return CompactStep(
            **_head(look.queue, look.incarnation, look.number, look.planned),
            messages=parts.messages,
            gone_messages=sum(judged.gone),
            log_bytes=int(log_bytes.sum()),
            gone_bytes=int((log_bytes - left_bytes).sum()),
            parts=len(parts),
            rewritten_parts=sum(changed),
            rewritten_bytes=rewritten,
            **judged.counts,
            requests=reads + writes,
            dollars=(reads * prices.read_per_1000 + writes * prices.write_per_1000) / 1000,
            saved_dollars_month=float(saved.sum()) / GIB * STORED_PER_GIB_MONTH,
            fingerprint=fingerprint(parts),
            passes=_rows_of(passes),
        )

    def _summed(
        self,
        reader: TierReader,
        now_ms: int,
        topics: Sequence[str],
        steps: list[CompactStep],
        left: list[PlannedQueue],
    ) -> CompactPlan:
        at, settings = self._at, self.settings
        summed = (
            *("messages", "gone_messages", "log_bytes", "gone_bytes", "keys", "requests"),
            *("rewritten_bytes", "dollars", "saved_dollars_month"),
        )
        return CompactPlan(
            what="compact",
            **plan_head(at.store, at.place, reader.state, reader.journal_number),
            made_ms=now_ms,
            topics=tuple(topics),
            policy=settings.retention.name,
            tombstone_retention_ms=settings.retention.tombstone_retention_ms,
            keeps_keyless=settings.retention.keeps_keyless,
            map_bytes=settings.memory_bytes,
            across_queues=settings.across_queues,
            **{name: sum(getattr(step, name) for step in steps) for name in summed},
            spread=tuple(Spread(topic, *found) for topic, found in sorted(self._spread.items())),
            steps=tuple(steps),
            left=tuple(left),
            damaged=tuple(self._damaged),
        )

    # -- applying ---------------------------------------------------------------------------------

    def apply(self, plan: CompactPlan) -> dict[str, Any]:
        """Carry out a plan that has steps.

        Returns:
            ``steps`` that were carried out now, ``already_done``, ``entries``, ``bundles``, ``stored_bytes``,
            ``epoch``, ``run``; and ``was_applied``: all of it had been done before.

        Raises:
            InvalidError: The tier has moved on.
        """
        at = self._at
        able = require_conditional_writes(at.store, at.rng, at.store.url)
        ledger = Ledger(at, plan.what)
        ledger.note("begin", {"plan": digest(plan)})
        journal = journal_writer(at)
        require_same_tier(plan, journal.state)
        sequences, now_ms = _sequences(plan, journal), at.clock.now_ms()
        epoch, writer, escapes = journal.state.epoch, journal.writer, not able.distinguishes_case
        guests = (MaintenanceWriter(epoch, writer, number, now_ms, escapes) for number in sequences)
        self._judge_again(plan, journal.state)
        run = _CompactRun(self, journal, guests, plan)
        run.run()
        journal.write_checkpoint()
        ledger.end(run.done)
        before = was_applied(len(plan.steps), run.done["steps"], run.done["already_done"])
        return {
            **run.done,
            "was_applied": before,
            "epoch": journal.state.epoch,
            "run": ledger.run,
        }

    def _judge_again(self, plan: CompactPlan, state: TierState) -> None:
        """QueuePass at what a plan of another process is over, topic by topic."""
        looks: dict[str, list[QueuePass]] = defaultdict(list)
        for step in plan.steps:
            look = self._planned_look(step, plan, state)
            if look is None:
                continue
            known = self._judged.get((look.queue, look.number))
            if known is None or fingerprint(known.look.parts) != step.fingerprint:
                looks[look.queue.topic].append(look)
        for topic, some in looks.items():
            steps = [step for step in plan.steps if step.queue.topic == topic]
            if plan.across_queues and len(some) < len(steps):
                raise moved_on(f"some queues of {topic} were compacted since, and not all")
            self._judge(state, some)

    def _planned_look(
        self, step: CompactStep, plan: CompactPlan, state: TierState
    ) -> QueuePass | None:
        """A step's queue as it is now; None when the step was carried out before."""
        queue, number = step.queue, step.position
        incarnations = state.queues.get(queue, ())
        incarnation = incarnations[number] if number < len(incarnations) else None
        if (
            incarnation is None
            or number != len(incarnations) - 1
            or incarnation.number != step.incarnation
        ):
            raise moved_on(f"{queue} has begun anew")
        if _rows_of(incarnation.passes) == step.passes:
            return None
        able = (one for one in incarnation.segments if one.base_queue_offset < step.end)
        if fingerprint(Parts.joined(one.parts for one in able)) != step.fingerprint:
            raise moved_on(f"the parts of {queue} have changed, as merging or expiry changes them")
        planned = self._pass(incarnation, plan.made_ms, step.end)  # what was sealed since may wait
        if (planned.end, planned.dirty_from) != (step.end, step.dirty_from):
            raise moved_on(f"the options do not give what was planned for {queue}")
        return self._look(state, queue, planned, plan.made_ms)

    def judged(self, step: CompactStep, plan: CompactPlan, state: TierState) -> Judged | None:
        """What stays of a queue; None when the step was carried out before."""
        look = self._planned_look(step, plan, state)
        return None if look is None else self._judged[look.queue, look.number]

    def made(self, works: Iterator[BundleWork]) -> Iterator[tuple[BundleWork, MadeBundle]]:
        """Have bundles made; what came of them, in order."""
        with all_done(self.engine(make_bundle, self._told(works))) as each:
            yield from sorted(each, key=lambda pair: pair[0].guest.sequence)

    def _told(self, works: Iterator[BundleWork]) -> Iterator[BundleWork]:
        for work in works:
            for run in work.runs:
                start, end = run.parts[0].queue_offset, run.parts[len(run.parts) - 1].queue_end
                self._tell(run.queue, int(start), int(end))
            yield work


class _CompactRun:
    """Carries out a plan: whole queues are gathered until there is enough, then made and named by one action."""

    def __init__(
        self,
        compactor: Compactor,
        journal: JournalWriter[TierState],
        guests: Iterator[MaintenanceWriter],
        plan: CompactPlan,
    ) -> None:
        self._compactor = compactor
        self._journal = journal
        self._guests = guests
        self._plan = plan
        self._epoch = journal.state.epoch
        self.done = dict.fromkeys(
            ("steps", "already_done", "entries", "bundles", "stored_bytes"), 0
        )
        self._passes: list[IncarnationPasses] = []
        self._bundles: list[list[SectionWork]] = []
        self._size = 0  # of what stays of the last of them

    def run(self) -> None:
        """All steps."""
        for step in self._plan.steps:
            judged = self._compactor.judged(step, self._plan, self._journal.state)
            if judged is None:
                self.done["already_done"] += 1
                continue
            is_other = bool(self._passes) and self._passes[-1].queue.topic != step.queue.topic
            is_full = len(self._bundles) > self._compactor.bundles
            if is_other or (is_full and not self._plan.across_queues):
                self._publish()
            for chunk in chunks_of(judged):
                if not self._bundles or self._size + chunk.left_bytes > RUN_BYTES_MAX:
                    self._bundles.append([])
                    self._size = 0
                self._bundles[-1].append(chunk)
                self._size += chunk.left_bytes
            passes = tuple(Pass(*row) for row in step.passes)
            self._passes.append(IncarnationPasses(step.queue, step.position, passes))
        if self._passes:
            self._publish()

    def _publish(self) -> None:
        compression = self._compactor.settings.compression
        bundles, self._bundles = self._bundles, []
        works = (
            BundleWork(
                next(self._guests),
                compression,
                tuple(chunk.run for chunk in chunks),
                tuple(chunk.stays for chunk in chunks),
            )
            for chunks in bundles
        )
        pairs = list(self._compactor.made(works))
        made, runs = [one for _, one in pairs], [run for work, _ in pairs for run in work.runs]
        self.done["bundles"] += len(made)
        self.done["stored_bytes"] += sum(one.size_bytes for one in made)
        action = {
            "do": "compacted",
            "bundles": [one.row for one in made],
            "positions": encode_numbers([run.position for run in runs]),
            "runs": encode_numbers([fingerprint(run.parts) for run in runs]),
            "passes": [*map(row_of, self._passes)],
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
        for one in self._passes:
            found = (
                after.queues[one.queue][one.position].passes if one.queue in after.queues else ()
            )
            if found != one.passes:
                raise moved_on(f"the parts of {one.queue} have changed, as merging or expiry does")


def chunks_of(judged: Judged) -> Iterator[SectionWork]:
    """What is to be rewritten of a queue."""
    look, changed, base = judged.look, judged.changed(), 0
    for segment in look.segments:
        some = slice(base, base + len(segment.parts))
        for begin, end in plan_runs(segment.parts, changed[some], judged.left_bytes[some].tolist()):
            parts = look.parts[base + begin : base + end]
            place = (look.queue, look.number, look.incarnation.number, segment.base_offset)
            yield SectionWork(judged, MergeRun(*place, parts), base + begin)
        base += len(segment.parts)


def _together(looks: Sequence[QueuePass], keys_max: int) -> Iterator[list[QueuePass]]:
    """Queues that are looked at together: as many as have no more messages than keys fit, so that small ones share works."""
    some: list[QueuePass] = []
    messages = 0
    for look in looks:
        if some and messages + look.parts.messages > keys_max:
            yield some
            some, messages = [], 0
        some.append(look)
        messages += look.parts.messages
    yield some


def _offset_ranges(looks: Sequence[QueuePass], tell: Tell) -> Iterator[tuple[PartRange, ...]]:
    """What is read by each work: neighbouring parts of one queue or of several."""
    work: list[PartRange] = []
    size = 0
    for number, look in enumerate(looks):
        parts, begin = look.parts, 0
        sizes = np.maximum(parts.column("log_bytes"), _MESSAGE_BYTES * parts.column("count"))
        for at, more in enumerate(sizes.tolist()):
            size += more
            if size < RANGE_BYTES and at < len(parts) - 1:
                continue
            some = parts[begin : at + 1]
            places = look.tombstones_to, look.last, look.aborted_in(some)
            work.append(PartRange(look.queue, number, begin, some, *places))
            tell(look.queue, int(some[0].queue_offset), int(parts.queue_end))
            begin = at + 1
            if size >= RANGE_BYTES:
                yield tuple(work)
                work, size = [], 0
    if work:
        yield tuple(work)


def seen_until_ms(state: TierState, looks: Sequence[QueuePass]) -> int:
    """The store time before which a pass looks at all messages of a topic.

    A tombstone behind it has to wait: an older value of its key may lie where the pass does not look. That may be in a queue
    of which it looks at nothing.
    """
    looked = {look.queue: len(look.segments) for look in looks}
    unseen = (
        times[0]
        for queue, incarnations in state.queues.items()
        if queue.topic == looks[0].queue.topic
        for segment in incarnations[-1].segments[looked.get(queue, 0) :]
        if (times := segment.parts.store_times) is not None
    )
    return min(unseen, default=EVERY)


def _sequences(plan: CompactPlan, journal: JournalWriter[TierState]) -> Iterator[int]:
    state = journal.state
    queues = {step.queue for step in plan.steps}
    incarnations = (incarnation for queue in queues for incarnation in state.queues.get(queue, ()))
    made = (
        maker_of(bundle.key)
        for incarnation in incarnations
        for bundle in incarnation.parts().bundles
    )
    return maintenance_sequences(filter(None, made), state.epoch)


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


def _rows_of(passes: Sequence[Pass]) -> tuple[tuple[int, int], ...]:
    return tuple((one.end, one.time_ms) for one in passes)


def _head(
    queue: MessageQueue, incarnation: Incarnation, number: int, planned: PassPlan
) -> dict[str, Any]:
    """Of a ``PlannedQueue``."""
    return {
        "queue": queue,
        "incarnation": incarnation.number,
        "position": number,
        "due": str(planned.due),
        "start": planned.start,
        "dirty_from": planned.dirty_from,
        "end": planned.end,
        "dirty_ratio": planned.dirty_ratio,
    }
