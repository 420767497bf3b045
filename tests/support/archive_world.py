"""A small world of an archive: seeded jobs, merges, cleans, repairs, tables and indexes that are killed and come in between.

Everything runs in one thread. A run is killed at a crash point, or the store fails, or another run comes and goes, whole,
between two requests of it, also for so long that the log is trimmed behind its back: that is what two processes, one of
which is paused for a while, can do to each other.

The oracle knows nothing of the program but the format. It sees each entry of the log as it is created (also those that are
trimmed later), carries its actions out by its own few lines, and reads files by pyarrow. After each step

- the log's reader sees what the oracle says: the files are there, with the bytes that the log says, each row once, with
  the body that was sent;
- what the program says of the log is what the oracle says;
- the directory has nothing besides, but what the log calls replaced and what no entry ever named;
- each version of a table of newest rows that counts has its files.

At the end one job, one merge and one clean in peace leave a directory with each sealed message once, and nothing else.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pyarrow.parquet as pq
from support.archive_jobs import job_context
from support.keyed import KeyedTier, Mail
from zlib_ng import zlib_ng

from backends.errors import BackendError, UnavailableError, UnknownOutcomeError
from backends.memory import MemoryStore
from backends.wrapping import WrappingStore
from tiered.archive import audit, clean, job, latest, lookup, merging, task
from tiered.archive.body_formats import BodyWish, BodyWishes
from tiered.archive.clean import apply_clean, plan_clean
from tiered.archive.job import log_writer, run_job
from tiered.archive.latest import plan_latest, read_latest, update_latest
from tiered.archive.machine import named_sizes
from tiered.archive.merging import merge_each, plan_merge
from tiered.archive.tables import read_archive
from tiered.errors import InvalidError, StoreUnavailableError
from tiered.journal import append, replay
from tiered.journal.entry import decode_entry
from tiered.log.state import queue_action
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tiered.archive.job import JobContext
    from tiered.upkeep.engine import WorkContext

TOPIC = "t"
QUEUES = [MessageQueue(TOPIC, number) for number in range(3)]
START_MS = 1_700_000_000_000
GRACE_MS = 60_000
POINTS = (
    *("archive-writing", "archive-written", "archive-rewriting", "archive-rewritten"),
    *("archive-condemned", "archive-deleted", "archive-repaired", "entry-begun", "entry-put"),
    *("shard-stored", "checkpoint-stored", "latest-written", "latest-named"),
)
"""All crash points that an archive's runs reach."""
_MODULES = (audit, clean, latest, merging, task, append, replay)


class KilledError(BaseException):
    """A run was killed. No handler of the product takes it."""


class WorldError(AssertionError):
    """What is wrong, and of which seed."""


# -- the oracle ------------------------------------------------------------------------------------


class Oracle:
    """What the log says, by its entries as they were created.

    Attributes:
        offset ranges: By queue and first offset.
        gone: Replaced files.
        condemned: Keys that were ever condemned.
    """

    def __init__(self) -> None:
        self.last = 0
        self.early: dict[int, bytes] = {}
        self.offset_ranges: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.tails: Counter[tuple[Any, ...]] = Counter()
        self.gone: set[str] = set()
        self.epoch = 0
        self.barred: set[str] = set()
        self.condemned: set[str] = set()

    def see(self, number: int, data: bytes) -> None:
        """An entry was created. One under a number that was used before belongs to no history."""
        if number == self.last + 1:
            self.last = number
            for action in decode_entry(data, where="oracle").actions:
                getattr(self, "_" + action["do"])(action)

    def named(self) -> dict[str, tuple[int, int]]:
        """Size and CRC of each file."""
        found = {}
        for one in self.offset_ranges.values():
            for key, _, _, _, size, crc, *_ in one["files"]:
                found[key] = size, crc
            if one["side"]:
                found[one["side"][0]] = tuple(one["side"][2:])
        return found

    def _lets(self, row: dict[str, Any], keys: Iterable[str]) -> bool:
        epoch = row.get("epoch", 0)
        late = epoch != self.epoch and (epoch != self.epoch - 1 or not self.barred.isdisjoint(keys))
        return not late

    def _fits(self, row: dict[str, Any]) -> bool:
        queue = tuple(row["queue"])
        keys = [file[0] for file in row["files"]] + row["side"][:1]
        is_free = not any(
            known == queue and one["start"] < row["end"] and row["start"] < one["end"]
            for (known, _), one in self.offset_ranges.items()
        )
        return is_free and row["tails"] == self.tails[queue] and self._lets(row, keys)

    def _add(self, row: dict[str, Any]) -> None:
        self.offset_ranges[tuple(row["queue"]), row["start"]] = row
        self.gone -= {file[0] for file in row["files"]} | set(row["side"][:1])

    def _archive(self, action: dict[str, Any]) -> None:
        rows = [self._row_of(*one) for one in action["offset_ranges"]]
        if all(map(self._fits, rows)):
            list(map(self._add, rows))

    @staticmethod
    def _row_of(queue: list[Any], tails: int, known: list[Any], epoch: int = 0) -> dict[str, Any]:
        names = "start", "end", "holes", "bad", "source_bytes", "files", "side", "sources"
        said = dict(zip(names, known, strict=False))
        side = said["side"] or []
        return {**said, "side": side, "queue": queue, "tails": tails, "epoch": epoch}

    def _merge(self, action: dict[str, Any]) -> None:
        moves: dict[tuple[Any, ...], tuple[str, dict[str, Any]]] = {}
        names = "key", "size_bytes", "crc", "rows", "row_ranges", "epoch"
        files = [dict(zip(names, row, strict=False)) for row in action["files"]]
        for new in files:
            for queue, row_ranges in new["row_ranges"]:
                moves |= {(tuple(queue), low): (key, new) for low, key in row_ranges}
        there = {
            (queue, file[1]): file
            for (queue, _), one in self.offset_ranges.items()
            for file in one["files"]
        }
        olds = {key for key, _ in moves.values()}
        fits = all(mark in there and there[mark][0] == key for mark, (key, _) in moves.items())
        fits &= all(mark in moves for mark, file in there.items() if file[0] in olds)
        fits &= all(self._lets(new, [new["key"]]) for new in files)
        if not fits:
            return
        for (queue, _), one in self.offset_ranges.items():
            for file in one["files"]:
                if (queue, file[1]) in moves:
                    _, new = moves[queue, file[1]]
                    file[0], file[4], file[5] = new["key"], new["size_bytes"], new["crc"]
        self.gone |= olds

    def _forget(self, action: dict[str, Any]) -> None:
        queue = tuple(action["queue"])
        for start in action["starts"]:
            one = self.offset_ranges.pop((queue, start))
            self.gone |= {file[0] for file in one["files"]} | set(one["side"][:1])
        self.tails[queue] += 1

    def _clean(self, action: dict[str, Any]) -> None:
        self.gone -= set(action["keys"])

    def _fence(self, action: dict[str, Any]) -> None:
        if action["epoch"] == self.epoch + 1:
            self.epoch, self.barred = action["epoch"], set(action["condemned"])
            self.condemned |= self.barred

    def _job(self, action: dict[str, Any]) -> None:
        pass

    _columns = _job


# -- what goes wrong -------------------------------------------------------------------------------


class Weather(WrappingStore):
    """The archive's store, between whose requests things happen."""

    def __init__(self, inner: MemoryStore, world: World) -> None:
        super().__init__(inner)
        self._world = world

    def put_if_absent(self, key: str, data: Any) -> Any:
        raw = b"".join(data) if isinstance(data, list | tuple) else bytes(data)
        self._world.between(key)
        made = super().put_if_absent(key, raw)
        self._world.saw_put(key, raw)
        self._world.after_put(key)
        return made

    def delete(self, key: str) -> None:
        self._world.between(key)
        self._world.saw_delete(key)
        super().delete(key)


class World:
    """One seed."""

    def __init__(self, seed: int, *, steps: int = 30) -> None:
        self.seed, self.steps = seed, steps
        self.rng = random.Random(seed)
        self.tier = KeyedTier()
        self.now_ms = START_MS
        self.bare = MemoryStore("archive", now_ms=lambda: self.now_ms)
        self.oracle = Oracle()
        self.store = Weather(self.bare, self)
        self.sent: dict[MessageQueue, list[Mail]] = {queue: [] for queue in QUEUES}
        self.sealed = dict.fromkeys(QUEUES, 0)
        self.ever: dict[tuple[int, int], set[bytes]] = {}
        self.fate: dict[str, Any] = {}
        self.depth = 0
        self.told: list[str] = []

    # -- runs

    def at(self) -> JobContext:
        """Tier and archive, as a new process has them."""
        made = job_context(self.tier.store, self.store, seed=self.rng.getrandbits(30))
        made.clock.advance((self.now_ms - made.clock.now_ms()) / 1000)  # type: ignore[attr-defined]
        wishes = self.rng.choice(
            [BodyWishes(), BodyWishes(((TOPIC, BodyWish("json")),)), BodyWishes(has_records=True)]
        )
        return replace(made, wishes=wishes, give_up_s=0.0)

    def engine(self, at: JobContext) -> Any:
        """In this very thread, so that a seed says all."""

        @contextlib.contextmanager
        def run(do: Callable[[WorkContext, Any], Any], works: Iterable[Any]) -> Iterator[Any]:
            def each() -> Iterator[Any]:
                for work in works:
                    try:
                        yield work, do(at.context, work)
                    except Exception as error:  # noqa: BLE001 (as engines do)
                        yield work, error

            yield each()

        return run

    def archive(self) -> None:
        at = self.at()
        run_job(at, self.engine(at), small_bytes=self.rng.choice([0, 1 << 20]))

    def merge(self) -> None:
        at = self.at()
        log = log_writer(at)
        size = self.rng.choice([20_000, 1 << 30])
        plan = plan_merge(log.state, takes=lambda _queue: True, merged_bytes=size)
        merge_each(at, log, plan, engine=self.engine(at))

    def clean(self, grace_ms: int | None = None) -> None:
        at = self.at()
        log = log_writer(at)
        grace_ms = self.rng.choice([0, GRACE_MS]) if grace_ms is None else grace_ms
        plan = plan_clean(at, log.state, grace_ms=grace_ms, limit=self.rng.choice([2, 1000]))
        assert plan["refusals"] == [], plan["refusals"]
        assert plan["foreign"] == [key for key in ["data/readme.txt"] if self.has(key)]
        apply_clean(at, log, json.loads(json.dumps(plan)))

    def repair(self) -> None:
        at = self.at()
        log = log_writer(at)
        plan = audit.plan_repair(at, log.state, self.engine(at), by_bytes=False)
        audit.apply_repair(at, log, plan, self.engine(at))

    def table(self) -> None:
        at = self.at()
        if self.oracle.last and any(one.topic == TOPIC for one in read_archive(at.archive).queues):
            plan = plan_latest(at.archive, at.place, TOPIC, across_queues=False)
            name = f"{self.rng.getrandbits(32):08x}"
            update_latest(at.archive, plan, at.clock, name, grace_ms=GRACE_MS)

    def index(self) -> None:
        at = self.at()
        if not self.oracle.last:
            return
        lookup.build(at.archive, read_archive(at.archive), self.engine(at))

    # -- the broker

    def grow(self) -> None:
        queue = self.rng.choice(QUEUES)
        some = [self._mail() for _ in range(self.rng.randrange(1, 5))]
        self.tier.post(queue, some, roll=bool(self.sent[queue]))
        for at, mail in enumerate(some, len(self.sent[queue])):
            self.ever.setdefault((queue.queue_id, at), set()).add(mail.body)
        self.sent[queue] += some
        incarnation = self.tier.journal.state.incarnation(queue)
        assert incarnation
        base = incarnation.segments[-1].base_offset
        self.tier.say(queue_action("seal", queue, incarnation.number, segment=base))
        self.sealed[queue] = len(self.sent[queue])

    def truncate(self) -> None:
        queue = self.rng.choice(QUEUES)
        count = len(self.sent[queue])
        if count > 1:
            end = self.rng.randrange(max(1, count - 4), count)
            self.tier.truncate(end, queue=queue)
            del self.sent[queue][end:]
            writer = f"{self.rng.getrandbits(32):08x}"
            self.tier = KeyedTier(self.tier.store, writer=writer)
            self.grow()

    def _mail(self) -> Mail:
        body = self.rng.choice([b"", b"text", json.dumps({"n": self.rng.randrange(99)}).encode()])
        # A day every few minutes, so that offset ranges touch several.
        time_ms = START_MS + self.rng.randrange(3) * 86_400_000
        keys = (f"k{self.rng.randrange(5)}",) if self.rng.random() < 0.8 else ()
        return Mail(keys, body=body + b" " * self.rng.randrange(3), time_ms=time_ms)

    # -- faults

    def between(self, key: str) -> None:
        """Before a request that changes something."""
        self.now_ms += self.rng.randrange(1, 2000)
        fate = self.fate
        if not fate or not key.startswith(fate["at"]):
            return
        fate["in"] -= 1
        if fate["in"]:
            return
        kind, self.fate = fate["kind"], {}
        self.told.append(f"{kind} before {key}")
        if kind == "fails":
            raise UnavailableError("made so")
        if kind == "killed":
            raise KilledError
        if kind == "others":
            self.depth += 1
            for _ in range(self.rng.choice([1, 2, 4, 12])):
                self.now_ms += self.rng.choice([0, 2 * GRACE_MS])
                self.step(self._some_fate() if self.depth < DEEP else {})
            self.depth -= 1
        if kind == "lost":
            self.fate = {"kind": "lost", "at": key, "in": 0}

    def after_put(self, key: str) -> None:
        if self.fate.get("in") == 0:
            self.fate = {}
            raise UnknownOutcomeError(f"the answer was lost: {key}")

    def reached(self, point: str) -> None:
        if self.fate.get("point") == point:
            self.fate = {}
            self.told.append(f"killed at {point}")
            raise KilledError

    def _some_fate(self) -> dict[str, Any]:
        kind = self.rng.choice(["", "", "killed", "fails", "lost", "others", "others", "point"])
        if kind == "point":
            return {"point": self.rng.choice(POINTS), "at": "", "in": -1, "kind": "point"}
        at, number = self.rng.choice(["", *FOLDERS]), self.rng.choice([1, 1, 2, 3, 5, 8])
        return {"kind": kind, "at": at, "in": number} if kind else {}

    def step(self, fate: dict[str, Any]) -> None:
        """Whatever happens next."""
        what = self.rng.choice(STEPS)
        if what in BROKERS:
            getattr(self, what)()
        else:
            self.run(what, fate)

    def run(self, what: str, fate: dict[str, Any]) -> None:
        """One run of a program, to its end or to its death."""
        self.told.append(f"{'  ' * self.depth}{what} {fate}")
        outer, self.fate = self.fate, fate
        try:
            getattr(self, what)()
        except (KilledError, BackendError, StoreUnavailableError) as error:
            self.told.append(f"{'  ' * self.depth}{what} ended: {error!r}")
        except InvalidError as error:
            if not any(
                word in str(error) for word in ("moved on", "others have made", "column", "format")
            ):
                raise
            self.told.append(f"{'  ' * self.depth}{what} refused: {error}")
        finally:
            self.fate = outer

    # -- what is seen

    def saw_put(self, key: str, data: bytes) -> None:
        if key.startswith("_log/journal/") and not key.endswith(".checkpoint"):
            self.oracle.see(int(key.rpartition("/")[2]), data)
            self.look_at_named()
        elif key.startswith(("data/", "_bad/")):
            self.require(key not in self.oracle.condemned, f"{key} was condemned and is made again")

    def saw_delete(self, key: str) -> None:
        self.require(key not in self.oracle.named(), f"{key} counts and is deleted")

    def look_at_named(self) -> None:
        """What counts is there."""
        for key in self.oracle.named():
            self.require(self.has(key), f"{key} counts and is not there")

    def has(self, key: str) -> bool:
        return key in self.bare._objects

    def require(self, holds: bool, what: str) -> None:
        if not holds:
            raise WorldError("\n".join([f"seed {self.seed}: {what}", *self.told[-40:]]))

    def check(self) -> None:
        """Hold the log's reader and the directory's against the oracle."""
        named = self.oracle.named()
        rows = self.rows(key for key in named if key.endswith(".parquet"))
        for key, (size, crc) in named.items():
            data = self.bare.get(key)
            self.require((len(data), zlib_ng.crc32(data)) == (size, crc), f"{key} has other bytes")
        self.require(max(rows.values(), default=1) == 1, f"a row twice: {rows}")
        for queue, offset, body in rows:
            known = self.ever.get((queue, offset), set())
            self.require(body in known, f"a row that was never sent: {queue} {offset}")
        if self.oracle.last:
            state = read_archive(self.bare)
            sizes = {key: size for key, (size, _) in named.items()}
            self.require(named_sizes(state) == sizes, "the program sees other files")
            self.require({one.key for one in state.replaced} == self.oracle.gone, "replaced")
            self.require(state.refused == 0, "an entry was refused")
        self.check_table()

    def check_table(self) -> None:
        try:
            read_latest(self.bare, self.at().place, TOPIC)
        except BackendError as error:
            self.require(holds=False, what=f"a table that counts: {error!r}")

    def rows(self, keys: Iterable[str]) -> Counter[tuple[int, int, bytes]]:
        found: Counter[tuple[int, int, bytes]] = Counter()
        for key in keys:
            table = pq.read_table(io.BytesIO(self.bare.get(key)))
            columns = (table.column(n).to_pylist() for n in ("queue_id", "queue_offset", "body"))
            found.update(zip(*columns, strict=True))
        return found

    # -- a whole seed

    def live(self) -> None:
        """All of it.

        Raises:
            WorldError: Something is wrong.
        """
        with contextlib.ExitStack() as patched:
            for module in _MODULES:
                patched.enter_context(mock.patch.object(module, "reached", self.reached))
            for module in (job, clean):
                patched.enter_context(mock.patch.object(module, "ENTRIES_KEPT", 6))
            patched.enter_context(mock.patch.object(append, "CHECKPOINT_ENTRIES", 3))
            patched.enter_context(mock.patch.object(append, "_CHECKPOINT_REST", 0))
            self.grow()
            for _ in range(self.steps):
                self.step(self._some_fate())
                self.now_ms += self.rng.choice([0, 1000, GRACE_MS + 1])
                self.check()
            self.end()

    def end(self) -> None:
        """In peace."""
        for what in ("archive", "archive", "merge", "table", "index"):
            self.run(what, {})
        for _ in range(2):
            self.now_ms += 4_000_000
            for _ in range(40):
                self.clean(0)
        self.check()
        wanted = Counter(
            (queue.queue_id, at, mail.body)
            for queue in QUEUES
            for at, mail in enumerate(self.sent[queue][: self.sealed[queue]])
        )
        named = self.oracle.named()
        lying = {info.key for root in ("data/", "_bad/") for info in self.bare.list(root)}
        self.require(lying == set(named), f"the directory has more: {sorted(lying - set(named))}")
        found = self.rows(key for key in lying if key.endswith(".parquet"))
        self.require(found == wanted, "each message once")
        self.check_newest()
        left = [info.key for info in self.bare.list("_probe/")]
        self.require(not left, f"probes: {left}")

    def check_newest(self) -> None:
        """The table is the newest row of each key of each queue, and of its folder nothing is left but what counts."""
        newest: dict[tuple[int, str], tuple[int, bytes]] = {}
        for queue in QUEUES:
            for at, mail in enumerate(self.sent[queue]):
                if mail.keys:
                    newest[queue.queue_id, mail.keys[0]] = at, mail.body
        wanted = sorted((q, k, at, body) for (q, k), (at, body) in newest.items() if body)
        table = read_latest(self.bare, self.at().place, TOPIC)
        names = ("queue_id", "msg_key", "queue_offset", "body")
        found = (
            sorted(zip(*(table.column(n).to_pylist() for n in names), strict=True)) if table else []
        )
        self.require(found == wanted, f"the table of newest rows: {found} for {wanted}")
        versions = [i.key for i in self.bare.list("_latest/") if "/versions/" in i.key]
        files = [i.key for i in self.bare.list("_latest/") if "/versions/" not in i.key]
        counts = latest.latest_version(self.bare, self.at().place, TOPIC)
        assert counts is not None
        self.require(len(versions) == 1, f"versions: {versions}")
        self.require(sorted(files) == sorted(key for key, *_ in counts.files), f"files: {files}")


BROKERS = ("grow", "truncate")
RUNS = ("archive", "archive", "merge", "clean", "clean", "table", "index", "repair")
STEPS = (*("grow",) * 6, "truncate", *RUNS, "archive", "merge")
FOLDERS = ("_log/", "data/", "_latest/", "_probe/")
DEEP = 2
"""Runs that come between the requests of a run that came between those of another go in peace."""
