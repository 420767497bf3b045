"""One run: a broker that grows and forgets, writers that come, crash, sleep and overlap, and a store with bad luck.

Everything is decided by the seed. After the last operation the store is healed, everything is ended, and one more writer
brings the tier level; then the whole of it is read as a stranger would.

Room for more steps: each is one method in ``_operations``.
"""

from __future__ import annotations

import base64
import hashlib
import random
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest import mock

from simulation.broker import EDGE_BYTES, Broker
from simulation.bystander import Bystander, Inline
from simulation.checker import check_end, check_level, check_now
from simulation.contents import bundle, claims_of, is_hole, table_bytes, tag_code
from simulation.history import FOREIGN, History, ViolationError, merged_in, require
from simulation.persons import DEEDS, Person, plan_one_erasure
from simulation.process import Process
from simulation.reclaimer import GRACE_S, TTL_S, Reclaimer
from simulation.scheduler import START_MS, Scheduler, SimClock
from support.case_folding import CaseFoldingStore

from backends.errors import BackendError
from backends.memory import MemoryStore
from backends.testing.faulty import READS, WRITES, Fault, FaultyStore, Rule
from backends.wrapping import WrappingStore
from tiered import keys
from tiered.api.broker_place import Place
from tiered.dispatch.settings import Compression
from tiered.format.bundle import build_section, build_tail, pack_table
from tiered.journal.entry import Entry, checksum, encode_entry
from tiered.keys import JOURNAL, LEASE, entry_key, parse_journal_key
from tiered.log.bundles import SectionRow, table_of
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from simulation.broker import QueueKey
    from simulation.contents import Section
    from simulation.incarnations import ModelIncarnation
    from simulation.scheduler import Owner
    from typing_extensions import Buffer

    from backends.base import ObjectStore, Version

END_S = 30.0
"""Virtual seconds of bad luck; what comes after is healing."""
THOROUGH_EVERY = 5
"""Of so many seeds one is read to the last byte, verified deep and against the broker, and cleaned by a last gc."""
FOLDS_EVERY = 7
"""Of so many seeds one has a store that takes names for one that differ only in case, and topics with such names."""
TOPICS, TOPICS_FOLDED = ("topic0", "topic1"), ("Topic", "topic")
PACKS_EVERY = 6
"""Of so many seeds one has writers that compress what is of the last level, and messages for which that is worth it."""
COMPACTS_EVERY = 4
"""Of so many seeds one has messages with keys, and somebody who compacts."""
PERSONS_EVERY = 3
"""Of so many seeds one has a key index, and a person who truncates, breaks leases, erases and makes the index again."""
_COMPACTS = 0.3
"""How often, at each step."""
_BAD_END = 0.3
"""How often, at each step, a queue is chosen whose tail is lost when it is tiered up to a damaged record."""
_BEFORE_GAP = 0.2
"""How often, at each step, somebody expires what lies before a gap, if that is old."""
_EARLY_S = 2.5
"""So soon after something was merged somebody collects, in some worlds: the grace is longer."""
_LAGS = 0.2
"""In so many of the seeds one queue lags, and goes on by other messages when that is known."""
KEEPS_EVERY = 2
"""Of so many seeds one has memory for bundles just written: its merges read nothing, so that little comes between."""
_CALM = 0.7
"""How often nothing bad happens until something is tiered; else it may happen to the very first request."""
EDGES_EVERY = 8
"""Of so many seeds one has records, sections and segments that end at edges of blocks, or one byte beside them."""
REPAIRS_EVERY = 3
"""Of so many seeds one ends with a wrong bit in a part, which a person has repaired."""
SETBACKS_EVERY = 5
"""Of so many seeds one has a broker whose clock is set back now and then, so that store times fall."""
RATES_EVERY = 11
"""Of so many seeds one has writers that copy one topic only at a rate."""
WEATHER_EVERY = 4
"""Of so many seeds one has a store that treats one kind of keys worse than others."""
KINDS = (
    "bundle/", "queue/", "topic/", "quarantine/", "index/", "ledger/", "shard/", ".checkpoint", "journal/", "/lease",
)  # fmt: skip
"""What is in the keys of each kind."""
TWICE = KINDS
"""Kinds of which a write may be carried out twice by the network, whose second answer is that it exists."""
STALE = ("bundle/", "queue/", "topic/", "quarantine/", "index/", "ledger/", "shard/")
"""Kinds of which a listing may be behind: only the journal's own has to be true, since that is what fences."""
STUCK_S = 300.0
"""Virtual seconds in which the last writer must have brought the tier level."""


@dataclass
class _Traps:
    """What waits for its moment.

    Attributes:
        lags: A queue is to lag.
        short: It lags.
        bad_end: A queue that ends with a damaged record.
        asleep: A writer that sleeps over an entry, and the entry's key.
    """

    lags: bool
    short: QueueKey | None = None
    bad_end: QueueKey | None = None
    asleep: tuple[Owner, str] | None = None


class Ledger(WrappingStore):
    """Tells history of each object as it becomes visible."""

    def __init__(self, inner: ObjectStore, world: World) -> None:
        super().__init__(inner)
        self._world = world

    def put_if_absent(self, key: str, data: Sequence[Buffer] | Buffer) -> None:
        assert isinstance(data, bytes)
        self._inner.put_if_absent(key, data)
        world = self._world
        if key.startswith(world.place.prefix):
            try:
                world.history.landed(key, data, world.scheduler.now_s)
            except AssertionError as error:
                world.scheduler.fail(error)

    def delete(self, key: str) -> None:
        world = self._world
        try:
            world.history.deleting(key, world.scheduler.now_s, GRACE_S)
        except AssertionError as error:
            world.scheduler.fail(error)
        self._inner.delete(key)

    def compare_and_set(self, key: str, data: bytes, expected: Version | None) -> Version:
        version = self._inner.compare_and_set(key, data, expected)
        world = self._world
        if key == world.place.prefix + LEASE:
            try:
                world.history.leased(data, is_new=expected is None)
            except AssertionError as error:
                world.scheduler.fail(error)
        return version


class World:
    """One run; ``run`` raises a ``ViolationError`` when an invariant does not hold.

    Attributes:
        flips: Some reads give a wrong bit.
        is_calm: Nothing bad happens yet.
        has_collected_probes: Some gc has, so that a writer that slept over its probe longer than the grace may find the
            store deaf to conditions.
        met: What happened how often, so that a test can say that the simulation meets what it is made for.
    """

    reads_records = True
    """The product reads the records themselves, for keys and sizes: RocketMQ's."""

    def __init__(self, seed: int) -> None:
        self._seed, self.rng = seed, random.Random(seed)
        rng = self.rng
        self.scheduler = Scheduler(rng)
        self.place = Place("c", "b")
        self.memory = MemoryStore(now_ms=SimClock(self.scheduler).now_ms)
        folds = seed % FOLDS_EVERY == FOLDS_EVERY // 2
        self.ledger = Ledger(CaseFoldingStore(self.memory) if folds else self.memory, self)
        self.faulty = FaultyStore(self.ledger, random.Random(seed + 1))
        self.broker = self._make_broker(TOPICS_FOLDED if folds else TOPICS, rng.randrange(1, 5))
        self.packs = self.broker.repeats = seed % PACKS_EVERY == PACKS_EVERY - 1
        self._own = self._give_keys(seed)  # (others' draws are theirs alone)
        self.persons = self._have_persons(seed)
        self.broker.pause = self.scheduler.pause
        self.broker.elapsed_s = lambda: self.scheduler.now_s
        self.broker.count = self.count
        self.is_thorough, self._keeps = seed % THOROUGH_EVERY == 0, seed % KEEPS_EVERY == 0
        self.history = History(self.place.prefix, self.memory._objects, self.broker, folds=folds)
        self.history.may_expire = self._may_expire
        self.removed: set[str] = set()
        self.processes: list[Process] = []
        self.reclaimers: list[Reclaimer] = []
        self.bystanders: list[Bystander] = []
        self.plans: list[Any] = []
        self.never, self.has_collected_probes = threading.Event(), False
        self.late: list[tuple[Owner, Callable[[], object]]] = []
        self.met: dict[str, int] = {}
        self.has_lease = rng.random() < 0.6
        self.skews_ms = rng.choice(((0,), (0,), (-7_200_000, 0, 3_600_000)))
        self.slowness = rng.choice((0.0, 0.02, 0.1))
        self.page_keys = rng.choice((3, 1000, 1000))
        self.lease_s = rng.choice((3.0, 10.0))
        self._drama = rng.choice((0.0, 0.03, 0.15))
        self.spite = rng.choice((0.0, 0.6))
        self._famine = rng.choice((0.0, 0.0, 3.0))
        self.segment_bytes_max = rng.choice((1500, 4000))
        if self.spite or self._famine:
            self.segment_bytes_max = 1500  # gaps behind more than one segment
        self.dispatch = self._choose_sizes()
        self._have_extremes(seed)
        self._unhealthy = self._choose_rules()
        self._operations = self._choose_operations()
        self.is_calm = rng.random() < _CALM
        self._traps, self.is_ending = _Traps(lags=rng.random() < _LAGS), False
        self._since_s = self._outage_until_s = 0.0
        self._last: Process | None = None
        self._survivor: Process | None = None
        self._removes = rng.random() < 0.1
        self._rounds = rng.choice((1, 1, 2))
        self.scheduler.operate = self._operate
        for name in rng.choice(((), FOREIGN)):
            self.memory.put_if_absent(self.place.prefix + name, b"somebody else's")

    def _make_broker(self, topics: Sequence[str], queues: int) -> Broker:
        return Broker(self.rng, topics, queues=queues)

    @property
    def is_repaired(self) -> bool:
        """It ends with a wrong bit, which a person has repaired."""
        return self._seed % REPAIRS_EVERY == 1

    def run(self) -> None:
        """From the first message to the last check.

        Raises:
            ViolationError: An invariant does not hold.
        """
        if not self.is_calm:
            self.faulty.add(*self._unhealthy)
        self.broker.store_some()
        self._start()
        for number, ahead in enumerate(self.rng.choice(((), (False,), (True,), (False, True)))):
            self._watch(Bystander(self, number, ahead=ahead))
        with (
            mock.patch("tiered.journal.append.CHECKPOINT_ENTRIES", 3),
            mock.patch("tiered.log.merge._OVERHEAD_BYTES", 300),
            mock.patch("tiered.dispatch.merging._LOOK_S", 5.0),
            mock.patch("tiered.upkeep.erase.plan_erasure", plan_one_erasure),
            mock.patch("tiered.upkeep.rebuild.ThreadPoolExecutor", Inline),
            mock.patch(
                "tiered.dispatch.settings._KEPT_BUNDLES_MIN", 8 if self._keeps else 1_000_000
            ),
        ):
            self.scheduler.run()
        check_end(self)

    def trace(self) -> str:
        """Hash of every request with its key and fault, and of the last moment."""
        digest = hashlib.sha256()
        for event in self.faulty.events:
            digest.update(f"{event.operation} {event.key} {event.fault}\n".encode())
        digest.update(f"{self.scheduler.now_s:.6f} {self.scheduler.steps}".encode())
        return digest.hexdigest()

    # -- chance ---------------------------------------------------------------------------------

    def _choose_rules(self) -> list[Rule]:
        """Each seed has its own weather: some faults often, some never."""
        rng, rules = self.rng, []
        for fault, operations in (
            (Fault.UNAVAILABLE, WRITES | READS),
            (Fault.LOST_REQUEST, WRITES),
            (Fault.LOST_ANSWER, WRITES),
            (Fault.LATE, WRITES),
            (Fault.CUT, READS),
            (Fault.FLIP, frozenset({"get"})),
        ):
            probability = rng.choice((0.0, 0.0, 0.03, 0.15))
            if fault is Fault.FLIP:
                probability = rng.choice((0.0, 0.0, 0.0, 0.15))
                self.flips = bool(probability)
            if probability:
                mine = (
                    self.place.prefix if fault is Fault.FLIP else ""
                )  # not of probes of the store
                rule = Rule(fault, operations, mine, times=None, probability=probability)
                rules.append(rule)
        self.history.flips = self.flips
        return [*self._of_one_kind(), *rules]

    def _of_one_kind(self) -> list[Rule]:
        """Writes of one kind fail while others succeed, those of another are carried out twice, a third is listed late."""
        if self._seed % WEATHER_EVERY != WEATHER_EVERY - 1:
            return []
        rng = random.Random(self._seed + 5)
        fault = rng.choice((Fault.UNAVAILABLE, Fault.LOST_REQUEST, Fault.LOST_ANSWER, Fault.FULL))
        part, often = rng.choice(KINDS), rng.choice((0.3, 0.7))
        self.faulty.stale = rng.choice(("", *STALE))
        puts = frozenset({"put", "compare_and_set"})
        return [
            Rule(fault, puts, part, times=None, probability=often),
            Rule(Fault.TWICE, puts, rng.choice(TWICE), times=None, probability=often),
        ]

    def _choose_sizes(self) -> dict[str, Any]:
        """How large bundles and segments are, and what is merged."""
        rng = self.rng
        return {
            "segment_bytes_max": self.segment_bytes_max,
            "fan_in": rng.choice((2, 2, 3, 5)),
            "bundle_bytes": rng.choice((700, 1500, 4000)),
            "merged_bytes_max": rng.choice((2000, 6000, 12_000)),
            "own_bytes": rng.choice((1000, 4000, 12_000)),
            "compression": Compression() if self.packs else None,
        }

    def _have_extremes(self, seed: int) -> None:
        """In some seeds a clock that is set back; in some records as large as blocks, and bundles and segments for them.

        So a segment may end where a block does.
        """
        self._have_rates(seed)
        if seed % SETBACKS_EVERY == SETBACKS_EVERY // 2:
            self.broker.setbacks = random.Random(seed + 7)
        if seed % EDGES_EVERY != EDGES_EVERY // 2 or not self.reads_records:
            return
        self.broker.edges = random.Random(seed + 6)
        self.segment_bytes_max = self.dispatch["segment_bytes_max"] = 2 * EDGE_BYTES
        for name in ("bundle_bytes", "merged_bytes_max", "own_bytes"):
            self.dispatch[name] *= 50
        self.dispatch |= {"buffer_bytes_max": 600_000, "window_bytes": 150_000}

    def _have_rates(self, seed: int) -> None:
        """A topic that is copied slower than it grows, and has caught up long before the world ends."""
        if seed % RATES_EVERY == RATES_EVERY // 2 + 2:
            rng = random.Random(seed + 8)
            limited = rng.choice(sorted({name.topic for name in self.broker._names}))
            share = rng.choice((2, 4))
            self.dispatch["rate_of"] = lambda topic: (
                self.segment_bytes_max // share if topic == limited else 0
            )

    def _have_persons(self, seed: int) -> random.Random | None:
        has = seed % PERSONS_EVERY == 2 and self.reads_records
        return random.Random(seed + 4) if has else None

    def _give_keys(self, seed: int) -> random.Random | None:
        """Where somebody compacts: chance of its own, for that and for keys."""
        if seed % COMPACTS_EVERY != 1 or not self.reads_records:
            return None
        self.broker.keys = random.Random(seed + 2)
        return random.Random(seed)

    def _choose_operations(self) -> list[tuple[Callable[[], None], float]]:
        rng = self.rng
        # Of these three one at a time: two of them may lose a journal together.
        bane = rng.choice((self._collect, self._spoil_checkpoint, self._reclaim))
        self._ambush = rng.choice((0.0, 0.2)) if bane == self._collect else 0.0
        self._collects = bane == self._reclaim and rng.random() < 0.5
        some = [
            (self.broker.store_some, 25.0 if self._famine else 10.0),
            # (What retention has taken cannot be lost while it is merged.)
            (self.broker.forget_some, rng.choice((0.0, 1.0, 3.0)) * (0.1 if self.spite else 1)),
            (self.broker.delete_topic, rng.choice((0.0, 0.0, 0.5))),
            (self.broker.lose_tail, rng.choice((0.0, 0.0, 0.5, 1.5))),
            (self.broker.catch_up, 1.0),
            (self._starve, self._famine * 2),
            (self._kill, rng.choice((0.0, 1.0, 2.0))),
            (self._pause, rng.choice((0.0, 1.0, 2.0))),
            (self._resume, 1.5),
            (self._stop, 0.3),
            (self._start, 2.0),
            (lambda: self._start(once=True, seal=True), rng.choice((0.0, 0.0, 0.4))),
            (lambda: self._reclaim("expire"), rng.choice((0.0, 0.0, 1.0)) + self._famine),
            (lambda: self._reclaim("delete-topic"), rng.choice((0.0, 0.0, 0.0, 0.3))),
            (self._outage, rng.choice((0.0, 0.0, 1.0))),
            (self._land, 3.0),
            (self._jump, rng.choice((0.0, 0.5))),
            (bane, rng.choice((2.0, 5.0, 9.0))),
            (self._misbehave, rng.choice((0.0, 0.0, 0.0, 1.2))),
            (lambda: check_now(self), 1.0),
        ]
        return [(operation, weight) for operation, weight in some if weight]

    # -- operations -----------------------------------------------------------------------------

    def _operate(self) -> None:
        scheduler = self.scheduler
        for process in self.processes:
            if not process.dead:
                process.check()
        if scheduler.now_s >= END_S:
            self._finish()
            return
        if self.is_calm and not self._has_begun():
            scheduler.next_operation_s = scheduler.now_s + 0.5
            return
        if 0 < self._outage_until_s <= scheduler.now_s:
            self._heal(self._unhealthy)
        self._spring()
        if self.broker.rot:
            self._lose_damaged_end()
        if self._traps.lags and scheduler.now_s >= END_S / 2:
            self._lag()
        if self._collects:
            self._collect_early()
        if self._famine and self.rng.random() < _BEFORE_GAP:
            self._expire_before_gap()
        if self._own and self._own.random() < _COMPACTS:
            self._reclaim("compact")
        if self.persons and self.persons.random() < _COMPACTS:
            self._reclaim(self.persons.choice(DEEDS))
        operations, weights = zip(*self._operations, strict=True)
        self.rng.choices(operations, weights)[0]()
        if not self._alive():
            self._start()
        scheduler.next_operation_s = scheduler.now_s + self.rng.expovariate(1.6)

    def _has_begun(self) -> bool:
        """After a calm beginning: as soon as something is tiered, the bad luck begins."""
        if not any(
            incarnation.rows for some in self.history.queues.values() for incarnation in some
        ):
            return False
        self.is_calm = False
        self.faulty.add(*self._unhealthy)
        return True

    def count(self, what: str, number: int = 1) -> None:
        """Note that something happened."""
        self.met[what] = self.met.get(what, 0) + number

    def _alive(self) -> list[Process]:
        return [process for process in self.processes if not (process.dead or process.ended)]

    def _start(self, *, once: bool = False, seal: bool = False) -> Process | None:
        if len(self._alive()) >= 3 and not once:
            return None
        process = Process(self, len(self.processes), once=once, seal=seal)
        process.has_rivals = bool(self._alive()) or any(not r.ended for r in self.reclaimers)
        for other in self._alive():
            other.has_rivals = True
        self.processes.append(process)
        self.scheduler.owners.append(process)
        self.scheduler.spawn(process, f"{process.name} main", process.live)
        self.count("start")
        return process

    def _watch(self, bystander: Bystander) -> None:
        self.bystanders.append(bystander)
        self.scheduler.owners.append(bystander)
        self.scheduler.spawn(bystander, f"{bystander.name} main", bystander.live)

    def _reclaim(self, what: str = "") -> None:
        """Expiry, gc or the deletion of a topic, whose plans may be old, and which may take an epoch."""
        kind = Person if what in {*DEEDS, "resume"} else Reclaimer
        reclaimer = kind(self, len(self.reclaimers), what)
        for process in self._alive():
            process.has_rivals = True
        busy = [
            one for one in self.reclaimers if not one.ended
        ]  # (a dead one's deletions may land late)
        for one in (*busy, reclaimer) if busy else ():
            one.has_rivals = True
        self.reclaimers.append(reclaimer)
        self.scheduler.owners.append(reclaimer)
        self.scheduler.spawn(reclaimer, f"{reclaimer.name} main", reclaimer.live)

    def _kill(self) -> None:
        busy = [one for one in self.reclaimers if not (one.dead or one.ended)]
        if busy and self.rng.random() < 0.3:
            self.rng.choice(busy).dead = True
            return
        if alive := self._alive():
            self.rng.choice(alive).dead = True
            self.count("kill")

    def _pause(self) -> None:
        if alive := self._alive():
            self.rng.choice(alive).paused = True
            self.count("pause")

    def _resume(self) -> None:
        trapped = self._traps.asleep and self._traps.asleep[0]
        for process in self.scheduler.owners:
            is_still = process is trapped or self.rng.random() < 0.3
            process.paused = process.paused and is_still

    def _stop(self) -> None:
        if alive := self._alive():
            self.rng.choice(alive).attachment.stop()

    def _outage(self) -> None:
        self._outage_until_s = self.scheduler.now_s + self.rng.choice((1.0, 8.0))
        self.faulty.heal()
        fault = self.rng.choice((Fault.UNAVAILABLE, Fault.LOST_REQUEST, Fault.LATE, Fault.FULL))
        self.faulty.add(Rule(fault, frozenset({"put", "compare_and_set"}), times=None))
        if fault is Fault.FULL:
            self.count("full")
            return  # what is there can be read, and deleted
        self.faulty.add(Rule(fault, WRITES, times=None), Rule(Fault.UNAVAILABLE, READS, times=None))
        self.count("outage")

    def _heal(self, rules: Sequence[Rule]) -> None:
        self._outage_until_s = 0.0
        self.faulty.heal()
        self.faulty.add(*rules)

    def _jump(self) -> None:
        if alive := self._alive():
            self.rng.choice(alive).clock.skew_ms += self.rng.choice((-60_000, 20_000, 3_600_000))

    def leave_behind(self, sender: Owner, write: Callable[[], object]) -> None:
        """A killed process's request, which may still land."""
        self.late.append((sender, write))

    def dramatise(self, process: Owner, key: str) -> None:
        """A process sends an entry of the journal: the best moment to stop or to kill it."""
        if JOURNAL not in key or self.is_calm:
            return
        is_free = self._ambush and not self._traps.asleep and self._is_ahead(key)
        if is_free and self.rng.random() < self._ambush:
            process.paused, self._traps.asleep = True, (process, key)
            self.count("pause")
            return
        if self.rng.random() >= self._drama:
            return
        if self.rng.random() < 0.7:
            process.paused = True
            self.count("pause")
        else:
            process.dead = True
            self.count("kill")

    def _is_ahead(self, key: str) -> bool:
        """Whether this is the next entry."""
        return key == entry_key(self.place.prefix, self.history.number + 1)

    def _spring(self) -> None:
        """A writer sleeps over an entry until others have used its number, and a collector has deleted that."""
        if self._traps.asleep is None or self.is_ending:
            return
        process, key = self._traps.asleep
        if process.dead:
            self._traps.asleep = None
        elif self._is_ahead(key):
            self.memory.delete(self.place.prefix + LEASE)  # (nobody has to wait for it)
            if all(one.paused for one in self._alive()):
                self._start()
        elif key not in self.memory._objects:
            process.paused, self._traps.asleep = False, None
            self.count("number used and deleted")

    def spoil_merge(self, key: str, body: bytes) -> float:
        """A merged bundle, or its entry, is sent: the broker takes some of it back just then, perhaps.

        How much slower it is than others. Behind slow entries what was planned apart is said at once.
        """
        if not self.spite:
            return 1.0
        merged = self._merged_range(key, body)
        if merged is None:
            return self.rng.choice((1.0, 1.0, 30.0)) if JOURNAL in key else 1.0
        queue, low, end = merged
        if self.rng.random() < self.spite:
            self.broker.lose_behind(queue, self.rng.randrange(low, end))
        return self.rng.choice((1.0, 40.0, 100.0, 2000.0) if JOURNAL in key else (1.0, 10.0, 30.0))

    def _merged_range(self, key: str, body: bytes) -> tuple[QueueKey, int, int] | None:
        """Of which queue's offsets this is the data, or the entry, of a merge."""
        short, some = key.removeprefix(self.place.prefix), []
        if short.startswith((keys.BUNDLE, keys.TOPIC, keys.QUEUE)):
            some, level = bundle(body)
            some = some if level else []
        elif short.startswith(JOURNAL) and not key.endswith(".checkpoint"):
            some = merged_in(body)
        if not some:
            return None
        one = self.rng.choice(some)
        return one.queue, one.queue_offset, one.queue_offset + one.count

    def _may_expire(self, topic: str, newest_ms: int) -> bool:
        """The policy: what is too old, or of a topic that somebody removes."""
        now_ms = START_MS + self.scheduler.now_s * 1000
        return topic in self.removed or newest_ms < now_ms - TTL_S * 1000

    def _starve(self) -> None:
        """Retention takes what is not tiered yet, of a queue that is tiered in part."""
        ends = {
            key: incarnation.commit
            for key, some in self.history.queues.items()
            for incarnation in some[-1:]
        }
        self.broker.forget_beyond(ends)

    def _expire_before_gap(self) -> None:
        """What lies before a gap is too old: it goes, and the gap has to stay."""
        old_ms = START_MS + (self.scheduler.now_s - TTL_S) * 1000
        incarnations = [
            incarnation for some in self.history.queues.values() for incarnation in some
        ]
        is_due = any(incarnation.has_old_before_gap(old_ms) for incarnation in incarnations)
        if is_due and all(one.dead or one.ended for one in self.reclaimers):
            self._reclaim("expire")

    def _collect_early(self) -> None:
        """What was merged a moment ago is named by nobody; its writer dies, and a collector takes an epoch."""
        is_busy = any(not (one.dead or one.ended) for one in self.reclaimers)
        present = self._present_writers()
        if is_busy or not present or not self.history.has_unnamed(self.scheduler.now_s - _EARLY_S):
            return
        self.kill_writers()
        self._reclaim("gc")
        self.count("collected early")

    def kill_writers(self) -> None:
        """The present writer dies, and nobody has to wait for its lease."""
        for process in self._present_writers():
            process.dead = True
            self.count("kill")
        self.memory.delete(self.place.prefix + LEASE)

    def _lose_damaged_end(self) -> None:
        """A queue that ends with a damaged record rests until all of it is tiered; then its tail is lost, and as many other
        messages come at once: a look at its last record does not tell."""
        broker, key = self.broker, self._traps.bad_end
        ends = [one for one in broker.damaged_ends() if one not in broker.resting]
        if key is None:
            if ends and self.rng.random() < _BAD_END:
                self._traps.bad_end = self.rng.choice(ends)
                broker.resting.add(self._traps.bad_end)
            return
        now, incarnation = broker.present(key), self.history.present(key)
        is_tiered = now is not None and incarnation is not None and incarnation.commit >= now.end
        if is_tiered or key not in broker.damaged_ends():
            broker.resting.discard(key)
            self._traps.bad_end = None
        if is_tiered and now and incarnation:
            low = max(incarnation.min, now.min, now.end - 10) + 1
            if low < now.end - 1:
                broker.lose_behind(key, self.rng.randrange(low, now.end - 1), now.end)
                self.count("damaged end lost")

    def _lag(self) -> None:
        """A tail is lost; as soon as the present writer knows that it is a lagging copy it grows by another message, and
        stays short."""
        broker, key = self.broker, self._traps.short
        if key is None:
            key, incarnation = self._some_queue()
            at = incarnation.commit - self.rng.randrange(3, 8) if incarnation else 0
            if incarnation and at > incarnation.min and broker.lose_behind(key, at, again=False):
                self._traps.short = key
                broker.resting.add(key)
        elif any(one.knows_lag(key) for one in self._present_writers()):
            self._traps.lags = False
            broker.grow(key)
            self.count("lag grown")

    def _land(self, count: int | None = 1) -> None:
        """Some of what is on its way lands; those who live then have met a rival."""
        landed = self.faulty.land_late(count)
        self.rng.shuffle(self.late)
        for _ in range(len(self.late) if count is None else min(count, len(self.late))):
            _, write = self.late.pop()
            with suppress(BackendError):
                write()
            landed += 1
            for process in self._alive():
                process.has_rivals = True
        if landed:
            self.count("late")

    def _collect(self) -> None:
        """Deletes some of what two checkpoints cover, as a collector that is slow or is interrupted."""
        numbers = [
            (parsed, info.key)
            for info in self.memory.list(self.place.prefix + JOURNAL)
            if (parsed := parse_journal_key(self.place.prefix, info.key))
        ]
        checkpoints = sorted(number for (number, is_checkpoint), _ in numbers if is_checkpoint)
        if len(checkpoints) < 2:
            return
        old = [key for (number, _), key in numbers if number < checkpoints[-2]]
        self.rng.shuffle(old)
        whole = self.rng.random() < 0.7
        for key in old if whole else old[: self.rng.randrange(len(old) + 1)]:
            self.memory.delete(key)
            self.count("collected")

    def _misbehave(self) -> None:
        """A copy of the present writer's process names a part again, one beyond the end (I1), or a good one of its own."""
        history, (key, incarnation) = self.history, self._some_queue()
        if incarnation is None or not incarnation.rows:
            return
        how = self.rng.randrange(3)
        row = incarnation.rows[-1]
        place, section = row.bundle, row.section
        if how == 1:
            section = replace(
                section, log_offset=incarnation.log_end + 1, queue_offset=incarnation.commit + 1
            )
        elif how == 2:
            good = self._part_of_clone(key, incarnation)
            if good is None:
                return
            place, section = good
        named = [*place, base64.b64encode(table_bytes([section])).decode()]
        action = {"do": "part", "bundles": [named]}
        last = checksum(history.texts[history.number])
        data = encode_entry(
            Entry(history.number + 1, history.epoch, history.writer, 0, [action], last)
        )
        for process in self._alive():
            process.has_rivals = True
        self.ledger.put_if_absent(entry_key(self.place.prefix, history.number + 1), data)
        self.count("clone")
        self.count("clone with a part", how == 2)

    def _part_of_clone(
        self, key: QueueKey, incarnation: ModelIncarnation
    ) -> tuple[tuple[str, int, int], Section] | None:
        """What the broker has behind the tier's end, made durable: bundle and section."""
        now, queue = self.broker.present(key), MessageQueue(*key)
        raw = now.at(incarnation.commit) if now and now.min <= incarnation.commit else None
        if now is None or raw is None or is_hole(raw):
            return None
        last = incarnation.record(incarnation.commit - 1)
        if last is None or is_hole(last) or now.at(incarnation.commit - 1) != last:
            return None  # not of one branch, or nobody can tell: no writer goes on there unlooked
        identity = keys.ObjectId(self.history.epoch, self.history.writer, self.rng.getrandbits(30))
        name = keys.bundle_key("", 0, START_MS, identity)
        claims = claims_of([raw])
        said = SectionRow(
            queue, incarnation.number, incarnation.log_end, incarnation.log_end, incarnation.commit, 0,
            claims.low, claims.high, claims.mark,
        )  # fmt: skip
        item = struct.pack(">qiq", incarnation.log_end, len(raw), tag_code(raw))
        made = build_section([raw], item)
        table = table_of([(said, made.place)])
        data = b"".join([*map(bytes, made.buffers), build_tail(table, pack_table(table))])
        self.ledger.put_if_absent(self.place.prefix + name, data)
        (section,), level = bundle(data)
        return (name, len(data), level), section

    def _some_queue(self) -> tuple[QueueKey, ModelIncarnation | None]:
        keys = sorted(self.history.queues)
        key = self.rng.choice(keys) if keys else ("", 0)
        return key, self.history.present(key)

    def _spoil_checkpoint(self) -> None:
        """A checkpoint goes, or is damaged, or lies."""
        objects = self.memory._objects
        keys = [key for key in objects if key.endswith(".checkpoint")]
        if not keys:
            return
        rng, keys = self.rng, sorted(keys)
        key, how = rng.choice(keys), rng.random()
        self.count("spoiled")
        data = bytearray(objects[key].data)
        if how < 0.2:
            self.memory.delete(key)
            return
        if how < 0.6:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        else:
            data = bytearray(objects[rng.choice(keys)].data)  # a stale one, under a newer name
        objects[key] = objects[key]._replace(data=bytes(data))

    # -- the end --------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Heal, end everybody, have one more writer bring the tier level, and wait for it."""
        scheduler = self.scheduler
        scheduler.next_operation_s = scheduler.now_s + 1.0
        if not self.is_ending:
            self.is_ending, self._since_s = True, scheduler.now_s
            self._ambush = self._drama = self.spite = self.broker.greed = self.broker.bustle = 0.0
            self._heal(())
            self._land(1)
            self._end_all()
        if self.history.paused and all(one.dead or one.ended for one in self.reclaimers):
            self._reclaim("resume")
        if self._survivor is not None:
            if self._survivor.ended or self._is_level():
                self.count("level without a restart", not self._survivor.ended)
                self._survivor.attachment.stop()
                self._survivor, self._since_s = None, scheduler.now_s
        elif self._last is None:
            if not self._alive() and all(one.dead or one.ended for one in self.reclaimers):
                # As an operator breaks the lease of the dead.
                self.memory.delete(self.place.prefix + LEASE)
                if self._removes:
                    self._removes = False
                    self._reclaim("delete-topic")
                    return
                self._last = self._start(
                    once=True, seal=self._rounds > 1 or self.rng.random() < 0.5
                )
        elif self._last.ended and self._rounds == 1:
            scheduler.next_operation_s = float("inf")
        stuck = scheduler.now_s >= self._since_s + STUCK_S
        require(not stuck, "I9: the tier was not brought level in five minutes")
        if self._last is not None and self._last.ended:
            result: Any = self._last.result
            incarnations = [(key, some[-1]) for key, some in self.history.queues.items()]
            gone = sum(
                self.broker.gone_unseen(key, incarnation) for key, incarnation in incarnations
            )
            require(
                result is not None and result.behind == gone,
                f"the last writer did not bring the tier level: {result}",
            )
            if self._rounds > 1:  # another goes on behind open segments that were sealed
                self._rounds, self._last, self._since_s = 1, None, scheduler.now_s
                if self.rng.random() < 0.5:
                    self.broker.store_some()

    def _end_all(self) -> None:
        """End everybody, but perhaps one writer that has to bring the tier level as it is, with all that it remembers."""
        alive = self._present_writers()
        if alive and ("lag grown" in self.met or self.rng.random() < 0.4):
            self._survivor = self.rng.choice(alive)
        for process in self._alive():
            process.paused = False
            if process is self._survivor:
                continue
            if self.rng.random() < 0.5:
                process.dead = True
            else:
                process.attachment.stop()
        for bystander in self.bystanders:
            bystander.dead = True
        for reclaimer in self.reclaimers:
            reclaimer.paused = False
            reclaimer.dead = reclaimer.dead or self.rng.random() < 0.5

    def _present_writers(self) -> list[Process]:
        """The present writer, if it goes on."""
        epoch = self.history.epoch
        return [one for one in self._alive() if not one.once and one.epoch == epoch]

    def _is_level(self) -> bool:
        """Whether the tier is level with the broker already."""
        try:
            for queue in self.history.queues:
                check_level(self, queue)
        except ViolationError:
            return False
        return True
