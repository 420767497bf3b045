"""Key compaction of a tier: of each key of a topic the newest message stays. Plan, then apply.

Overview: ``Compactor.plan`` reads the sealed segments of each queue that is due (``tiered.compaction.choice``): once for the
offset map what was not compacted yet, then all of it, round by round, to see what stays. ``apply`` rewrites the parts of
which something goes as sparse sections in bundles of the last level, and names them with one ``compacted`` action for as
many whole queues as fill a bundle: a reader sees a queue before or after, never a mix.

Ordering: data, then the entry (I2). Offsets and their order never change; the newest message of a queue always stays, as the
queue's end is known by it.

Beside a running writer: it takes no reign, and touches only sealed segments. An action is taken only if every part that it
presumes is still there; merging or expiry may come between, then the plan is refused and made again. It is refused as
well when the reign has changed, since a gc under a newer one may have deleted what nobody had named.

Memory: the offset map, one bundle (64 MiB) and what is read for it, one bit a message planned.

Retries and errors: reads and uploads are tried again by the store. What is damaged ends the run, before that queue is
touched. After a crash: what was uploaded and not named is an orphan, which ``gc`` removes; plan again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from backends.wrapping import Prices
from tiered.api.ends import require_conditional_writes
from tiered.compaction.choice import LogFile, PassSettings, plan_pass
from tiered.compaction.keyed import keyed_records
from tiered.compaction.offset_map import OffsetMap
from tiered.compaction.retention import (
    CAREFUL,
    RetentionPolicy,
    fill,
    stays,
    tombstones_gone,
    with_pass,
)
from tiered.compaction.rewrite import RUN_BYTES_MAX, PartLeft, compacted_run, plan_runs
from tiered.crashpoints import reached
from tiered.dispatch.group_commit import Uploader
from tiered.dispatch.merging import Packer
from tiered.dispatch.settings import Compression
from tiered.errors import InvalidError
from tiered.format.bundle import build_section
from tiered.format.record import RECORD_BYTES_MIN
from tiered.journal.entry import Entry
from tiered.log.bundles import SectionRow, bundle_row, encode_numbers
from tiered.log.decode import decode_items, decode_records
from tiered.log.merge import LAST_LEVEL, MergeOutput, MergeRun, fingerprint
from tiered.log.parts import Parts, Pass
from tiered.log.reader import TierReader
from tiered.log.sections import read_part
from tiered.log.state import TierMachine
from tiered.model import MessageQueue
from tiered.upkeep.workplace import (
    FORMAT,
    Ledger,
    Plan,
    digest,
    journal_writer,
    moved_on,
    was_applied,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy.typing as npt

    from tiered.compaction.choice import PassPlan
    from tiered.compaction.retention import Flags, KeyedRecords
    from tiered.format.bundle import Section
    from tiered.journal.entry import Action
    from tiered.journal.writer import JournalWriter
    from tiered.local.face import RecordBatch
    from tiered.log.parts import Part, QueueLife, Segment
    from tiered.log.state import TierState
    from tiered.upkeep.workplace import Workplace

MIB: Final = 1 << 20
GIB: Final = 1 << 30
STORED_PER_GIB_MONTH: Final = 0.023
"""US dollars, as of ``backends.wrapping.Prices``."""
_ENTRY_REQUESTS: Final = 3
"""An entry, the listing behind it, and its share of checkpoint and ledger, about."""


@dataclass(frozen=True, slots=True)
class CompactSettings:
    """How a topic is compacted.

    Attributes:
        retention: What stays.
        passes: When a pass is made.
        memory_bytes: Of the offset map, at most.
        compression: Of what is rewritten; None: it stays as it is.
    """

    retention: RetentionPolicy = CAREFUL
    passes: PassSettings = field(default_factory=PassSettings)
    memory_bytes: int = 128 * MIB
    compression: Compression | None = field(default_factory=Compression)


@dataclass(slots=True)
class _Judged:
    """A queue whose messages have been looked at.

    Attributes:
        parts: Those that a pass is over.
        stays: Of each, which messages stay, as bits.
        left_bytes: Of each, bytes of records that stay.
        counts: What was met.
    """

    queue: MessageQueue
    number: int
    life: QueueLife
    segments: tuple[Segment, ...]
    parts: Parts
    stays: list[npt.NDArray[np.uint8]]
    left_bytes: list[int]
    counts: dict[str, int]

    @property
    def gone(self) -> list[int]:
        """Of each part how many messages go."""
        return [int(np.count_nonzero(~self.left(at))) for at in range(len(self.parts))]

    def changed(self) -> list[bool]:
        """Of each part whether any message goes."""
        return [gone > 0 for gone in self.gone]

    def left(self, at: int) -> Flags:
        """bool[count], which messages of a part stay."""
        return np.unpackbits(self.stays[at], count=int(self.parts.rows["count"][at])).view(np.bool_)


class Compactor:
    """Compacts topics of one tier, on one thread."""

    def __init__(
        self,
        at: Workplace,
        settings: CompactSettings,
        *,
        tell: Callable[[MessageQueue, int, int], None] = lambda _queue, _done, _of: None,
    ) -> None:
        """Read nothing yet.

        Args:
            at: The tier.
            settings: How.
            tell: Progress: the queue, messages looked at, and how many there are to look at.
        """
        self._at = at
        self._settings = settings
        self._tell = tell
        self._judged: dict[tuple[MessageQueue, int], _Judged] = {}

    # -- planning ---------------------------------------------------------------------------------

    def plan(self, topics: Sequence[str]) -> Plan:
        """What compaction would do. Reads the messages' keys; changes nothing.

        Raises:
            InvalidError: There is no such topic, or one cannot be compacted.
            DataError: Something is damaged.
            BackendError: The store could not be read.
        """
        reader = TierReader(self._at.store, self._at.prefix)
        reader.refresh()
        now_ms, state = self._at.clock.now_ms(), reader.state
        for topic in topics:
            if all(queue.topic != topic for queue in state.queues):
                raise InvalidError(
                    f"the tier has no topic {topic}",
                    where=self._at.store.url,
                    do="`tiered ls URL` lists them",
                )
        steps, left = [], []
        for queue in sorted(queue for queue in state.queues if queue.topic in topics):
            number = len(state.queues[queue]) - 1
            planned = self._pass(state.queues[queue][number], now_ms)
            row = _row(queue, state.queues[queue][number], number, planned)
            if planned.is_due:
                life = state.queues[queue][number]
                judged = self._judge(queue, number, life, planned, now_ms)
                steps.append({**row, **self._step(judged, planned, now_ms)})
            else:
                left.append(row)
        return self._document(reader, now_ms, list(topics), steps, left)

    def _pass(self, life: QueueLife, now_ms: int) -> PassPlan:
        compacted_to = life.passes[-1].end if life.passes else 0
        files = [_file(segment) for segment in life.segments]
        return plan_pass(files, compacted_to, self._settings.passes, now_ms)

    def _judge(
        self, queue: MessageQueue, life_number: int, life: QueueLife, planned: PassPlan, now_ms: int
    ) -> _Judged:
        retention = self._settings.retention
        gone_to = tombstones_gone(life.passes, retention, now_ms)
        able = [one for one in life.segments if one.base_queue_offset < planned.end]
        parts = Parts.joined(segment.parts for segment in able)
        flags = [np.ones(count, np.bool_) for count in parts.column("count").tolist()]
        left_bytes = [0] * len(parts)
        counts = dict.fromkeys(("keys", "rounds", "reads", "keyless", "tombstones"), 0)
        at = planned.dirty_from
        while at < planned.end:
            known = OffsetMap(self._settings.memory_bytes)
            at = fill(known, self._from(queue, parts, at, counts), planned.end)
            counts["keys"] += known.keys
            counts["rounds"] += 1
            for number, part in enumerate(parts):
                if part.queue_offset > known.latest:
                    break
                records = self._records(queue, part, counts)
                rule = partial(stays, known=known, policy=retention, tombstones_to=gone_to)
                left_bytes[number] = _judge_part(part, flags[number], records, rule, counts)
        if int(parts.queue_end) == life.commit_offset and not flags[-1][-1]:
            flags[-1][-1] = True
            left_bytes[-1] += (
                RECORD_BYTES_MIN  # about: the queue's last message stays whatever it is
            )
        packed = [np.packbits(mine) for mine in flags]
        judged = _Judged(queue, life_number, life, tuple(able), parts, packed, left_bytes, counts)
        self._judged[queue, life_number] = judged
        return judged

    def _from(
        self, queue: MessageQueue, parts: Parts, start: int, counts: dict[str, int]
    ) -> Iterator[KeyedRecords]:
        for part in parts:
            if part.queue_end > start:
                for records in self._records(queue, part, counts):
                    yield records.some(records.offsets >= start)

    def _records(
        self, queue: MessageQueue, part: Part, counts: dict[str, int]
    ) -> Iterator[KeyedRecords]:
        counts["reads"] += 1
        self._tell(queue, int(part.queue_offset), int(part.queue_end))
        yield from keyed_records(self._batch(queue, part))

    def _batch(self, queue: MessageQueue, part: Part) -> RecordBatch:
        """All of a part, each record held against its item."""
        at = self._at
        log, index = read_part(at.store, at.prefix, part)
        items = decode_items(part, part.queue_offset, index, where=at.prefix)
        begin = int(part.log_offset)
        return decode_records(queue, part, items, log, begin, where=at.prefix).records

    def _step(self, judged: _Judged, planned: PassPlan, now_ms: int) -> dict[str, Any]:
        parts = judged.parts
        changed, left_bytes = judged.changed(), judged.left_bytes
        log_bytes = parts.column("log_bytes")
        rewritten = sum(size for size, goes in zip(left_bytes, changed, strict=True) if goes)
        objects = -(-rewritten // RUN_BYTES_MAX)
        reads = judged.counts["reads"] + sum(changed)
        writes = objects + _ENTRY_REQUESTS if any(changed) else _ENTRY_REQUESTS
        prices, share = Prices(), parts.stored_bytes() / np.maximum(log_bytes, 1)
        saved = (log_bytes - np.array(left_bytes, np.int64)) * share
        policy = self._settings.retention
        passes = with_pass(
            judged.life.passes,
            Pass(planned.end, now_ms),
            now_ms - policy.tombstone_retention_ms,
        )
        return {
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
            "store": dict(reader.state.store),
            "journal_number": reader.journal_number,
            "generation": reader.state.generation,
            "made_ms": now_ms,
            "topics": topics,
            "policy": settings.retention.name,
            "tombstone_retention_ms": settings.retention.tombstone_retention_ms,
            "keeps_keyless": settings.retention.keeps_keyless,
            "map_bytes": settings.memory_bytes,
            **{name: sum(step[name] for step in steps) for name in summed},
            "steps": steps,
            "left": left,
        }

    # -- applying ---------------------------------------------------------------------------------

    def apply(self, plan: Plan) -> dict[str, Any]:
        """Carry out a plan that has steps.

        Returns:
            ``steps`` that were carried out now, ``already_done``, ``entries``, ``bundles``, ``stored_bytes``,
            ``generation``, ``run``; and ``was_applied``: all of it had been done before.

        Raises:
            InvalidError: The tier has moved on.
            DataError: Something is damaged.
            BackendError: The store does not answer. Applying again goes on.
        """
        at = self._at
        able = require_conditional_writes(at.store, at.rng, at.store.url)
        ledger = Ledger(at.store, at.prefix, at.clock, run=at.new_id(), what="compact")
        ledger.note("begin", {"plan": digest(plan)})
        journal = journal_writer(at)
        if dict(journal.state.store) != plan["store"]:
            raise moved_on("it belongs to another store")
        uploader = Uploader(
            at.store,
            at.prefix,
            generation=journal.state.generation,
            writer=journal.writer,
            clock=at.clock,
            escapes_case=not able.distinguishes_case,
            first=at.clock.now_ms() // 1000,
        )
        run = _CompactRun(self, journal, uploader, plan, self._settings.compression)
        run.run()
        journal.write_checkpoint()
        ledger.end(run.done)
        before = was_applied(len(plan["steps"]), run.done["steps"], run.done["already_done"])
        return {
            **run.done,
            "was_applied": before,
            "generation": journal.state.generation,
            "run": ledger.run,
        }

    def judged(self, step: dict[str, Any], plan: Plan, state: TierState) -> _Judged | None:
        """What stays of a queue; None when the step was carried out before.

        Raises:
            InvalidError: The queue is not what it was.
        """
        queue, number = MessageQueue(step["topic"], step["queue_id"]), int(step["life"])
        lives = state.queues.get(queue, ())
        life = lives[number] if number < len(lives) else None
        if life is None or life.incarnation != step["incarnation"]:
            raise moved_on(f"{queue} has begun anew")
        if [[one.end, one.time_ms] for one in life.passes] == step["passes"]:
            return None
        able = (one for one in life.segments if one.base_queue_offset < step["end"])
        if fingerprint(Parts.joined(one.parts for one in able)) != step["fingerprint"]:
            raise moved_on(f"the parts of {queue} have changed, as merging or expiry changes them")
        known = self._judged.get((queue, number))
        if known is not None and fingerprint(known.parts) == step["fingerprint"]:
            return known
        planned = self._pass(life, plan["made_ms"])
        if (planned.end, planned.dirty_from) != (step["end"], step["dirty_from"]):
            raise moved_on(f"the options do not give what was planned for {queue}")
        return self._judge(queue, number, life, planned, plan["made_ms"])

    def lefts(self, judged: _Judged, begin: int, end: int) -> list[PartLeft]:
        """Parts of a queue, read, and what stays of them."""
        return [
            PartLeft(judged.parts[at], self._batch(judged.queue, judged.parts[at]), judged.left(at))
            for at in range(begin, end)
        ]


def _judge_part(
    part: Part,
    mine: Flags,
    pieces: Iterable[KeyedRecords],
    rule: Callable[[KeyedRecords], Flags],
    counts: dict[str, int],
) -> int:
    """Clear the flags of messages that go; bytes of the records that stay."""
    left_bytes = 0
    for records in pieces:
        where = records.offsets - int(part.queue_offset)
        mine[where] &= rule(records)
        left_bytes += int(records.sizes[mine[where]].sum())
        if counts["rounds"] == 1:
            counts["keyless"] += int(np.count_nonzero(~records.has_key))
            counts["tombstones"] += int(np.count_nonzero(records.is_tombstone))
    return left_bytes


class _CompactRun:
    """Carries out a plan: whole queues are gathered until a bundle is full, then named by one action."""

    def __init__(
        self,
        compactor: Compactor,
        journal: JournalWriter[TierState],
        uploader: Uploader,
        plan: Plan,
        compression: Compression | None,
    ) -> None:
        self._compactor = compactor
        self._journal = journal
        self._uploader = uploader
        self._plan = plan
        self._packer = Packer(compression) if compression else None
        self._generation = journal.state.generation
        self.done = dict.fromkeys(
            ("steps", "already_done", "entries", "bundles", "stored_bytes"), 0
        )
        self._open: list[tuple[MergeRun, tuple[SectionRow, Section]]] = []
        self._bundles: list[list[Any]] = []
        self._runs: list[MergeRun] = []
        self._passes: list[list[Any]] = []

    def run(self) -> None:
        """All steps."""
        for step in self._plan["steps"]:
            judged = self._compactor.judged(step, self._plan, self._journal.state)
            if judged is None:
                self.done["already_done"] += 1
                continue
            if self._passes and self._passes[-1][0] != step["topic"]:
                self._publish()
            self._queue(judged)
            self._passes.append([step["topic"], step["queue_id"], step["life"], step["passes"]])
            if self._bundles:
                self._publish()
        if self._passes:
            self._publish()

    def _queue(self, judged: _Judged) -> None:
        changed, left_bytes = judged.changed(), judged.left_bytes
        base = 0
        for segment in judged.segments:
            many = len(segment.parts)
            some = slice(base, base + many)
            for begin, end in plan_runs(segment.parts, changed[some], left_bytes[some]):
                self._section(judged, segment, base + begin, base + end)
            base += many

    def _section(self, judged: _Judged, segment: Segment, begin: int, end: int) -> None:
        made = compacted_run(self._compactor.lefts(judged, begin, end))
        parts = judged.parts[begin:end]
        run = MergeRun(
            judged.queue, judged.number, judged.life.incarnation, segment.base_offset, parts
        )
        row = SectionRow(
            judged.queue,
            judged.life.incarnation,
            segment.base_offset,
            int(parts[0].log_offset),
            int(parts[0].queue_offset),
            made.holes,
            made.store_min_ms,
            made.store_max_ms,
            made.last,
            log_gone=made.log_gone,
        )
        section = None
        if self._packer is not None and made.records:
            data = b"".join(made.records)
            section = self._packer.pack(judged.queue.topic, data, made.items, may_be_sparse=True)
        section = section or build_section(made.records, made.items, may_be_sparse=True)
        self._open.append((run, (row, section)))
        if sum(one.place.size_bytes for _, (_, one) in self._open) >= RUN_BYTES_MAX:
            self._upload()

    def _upload(self) -> None:
        runs = tuple(run for run, _ in self._open)
        queues = {run.queue for run in runs}
        own = runs[0].queue if len(queues) == 1 else None
        output = MergeOutput(LAST_LEVEL, runs, runs[0].queue.topic, own)
        stored = self._uploader.put_merged(output, [section for _, section in self._open])
        reached("compacted-stored")
        self._bundles.append(bundle_row(stored.bundle, stored.packed))
        self._runs += runs
        self.done["bundles"] += 1
        self.done["stored_bytes"] += stored.bundle.size_bytes
        self._open.clear()

    def _publish(self) -> None:
        if self._open:
            self._upload()
        action = {
            "do": "compacted",
            "bundles": self._bundles,
            "lives": encode_numbers([run.life for run in self._runs]),
            "runs": encode_numbers([fingerprint(run.parts) for run in self._runs]),
            "passes": self._passes,
        }
        self._journal.append([action], check=lambda state: self._hold(state, action))
        reached("compacted-named")
        self.done["entries"] += 1
        self.done["steps"] += len(self._passes)
        self._bundles, self._runs, self._passes = [], [], []

    def _hold(self, state: TierState, action: Action) -> None:
        """Everything that the action presumes: that replay will take it."""
        if state.generation != self._generation:
            raise moved_on("another writer reigns: what was uploaded may be gone")
        entry = Entry(self._journal.number + 1, 0, self._journal.writer, 0, [action])
        after = TierMachine().apply(state, entry)
        for topic, queue_id, number, passes in self._passes:
            queue = MessageQueue(topic, queue_id)
            found = after.queues[queue][number].passes if queue in after.queues else ()
            if [[one.end, one.time_ms] for one in found] != passes:
                raise moved_on(f"the parts of {queue} have changed, as merging or expiry does")


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
