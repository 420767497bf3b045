"""Several writers, followers and a collector over one store that fails by chance, request by request in an order by chance.

A baton goes from thread to thread at every request, so a seed replays a run. Whatever happens: one history (I6), every
entry immutable (I4), nothing lost that was acknowledged, nothing heard of a writer behind a newer epoch, and every state
that anybody ever had is a prefix of that history (I1, I5).
"""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, TypeVar

import pytest
from support.journals import PREFIX, Toy, ToyMachine, say

from backends.errors import BackendError
from backends.memory import MemoryStore
from backends.testing.faulty import READS, WRITES, Fault, FaultyStore, Rule
from backends.wrapping import WrappingStore
from tiered.clock import ManualClock
from tiered.errors import ClosedError, FencedError, StoreUnavailableError
from tiered.journal.append import JournalWriter
from tiered.journal.entry import Entry, decode_entry
from tiered.journal.replay import JournalReader
from tiered.keys import JOURNAL, parse_journal_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Buffer

    from backends.base import ByteRange, ObjectInfo, ObjectStore

T = TypeVar("T")


class Baton:
    """Lets one of several threads run at a time, up to its next request; now and then one is asleep for long."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._condition = threading.Condition()
        self._waiting: set[int] = set()
        self._alive = 0
        self._turn: int | None = None
        self._asleep: dict[int, int] = {}
        self._steps = 0

    def run(self, bodies: list[Callable[[], None]], between: Callable[[], None]) -> None:
        """Run all to their end; ``between`` is called between requests."""
        errors: list[BaseException] = []

        def guarded(body: Callable[[], None]) -> None:
            try:
                self.step()
                body()
            except BaseException as error:  # noqa: BLE001 (reported below)
                errors.append(error)
            with self._condition:
                self._alive -= 1
                self._turn = None
                self._condition.notify_all()

        self._alive = len(bodies)
        threads = [
            threading.Thread(target=guarded, args=(body,), name=str(number))
            for number, body in enumerate(bodies)
        ]
        for thread in threads:
            thread.start()
        while True:
            with self._condition:
                assert self._condition.wait_for(
                    lambda: self._turn is None and len(self._waiting) == self._alive, 30
                )
                if not self._alive:
                    break
                between()
                self._turn = self._choose()
                self._condition.notify_all()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def _choose(self) -> int:
        self._steps += 1
        if self._rng.random() < 0.02:
            sleeper = self._rng.choice(sorted(self._waiting))
            self._asleep[sleeper] = self._steps + self._rng.randrange(400)
        awake = [one for one in self._waiting if self._asleep.get(one, 0) <= self._steps]
        return self._rng.choice(sorted(awake or self._waiting))

    def step(self) -> None:
        """Give the baton back and wait for it; called before every request."""
        me = int(threading.current_thread().name)
        with self._condition:
            self._waiting.add(me)
            self._turn = None
            self._condition.notify_all()
            assert self._condition.wait_for(lambda: self._turn == me, 30)
            self._waiting.discard(me)


class Stepping(WrappingStore):
    """Waits for the baton before every request; a listing is taken in pages of one key."""

    def __init__(self, inner: ObjectStore, baton: Baton) -> None:
        super().__init__(inner)
        self._baton = baton

    def put_if_absent(self, key: str, data: Sequence[Buffer] | Buffer) -> None:
        self._baton.step()
        self._inner.put_if_absent(key, data)

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        self._baton.step()
        return self._inner.get(key, byte_range)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        while True:
            self._baton.step()
            page = next(iter(self._inner.list(prefix, start_after=start_after)), None)
            if page is None:
                return
            start_after = page.key
            yield page

    def delete(self, key: str) -> None:
        self._baton.step()
        self._inner.delete(key)


class Ledger(WrappingStore):
    """Remembers every entry that was ever created, also deleted ones and those that nobody believes."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.created: dict[str, list[bytes]] = {}

    def put_if_absent(self, key: str, data: Sequence[Buffer] | Buffer) -> None:
        self._inner.put_if_absent(key, data)
        self.created.setdefault(key, []).append(self._inner.get(key))


class World:
    """One run."""

    def __init__(self, seed: int, *, writers: int, followers: int, collects: bool) -> None:
        self.rng = random.Random(seed)
        self.ledger = Ledger(MemoryStore())
        self.faulty = FaultyStore(self.ledger, random.Random(seed))
        self.faulty.add(
            *(Rule(fault, WRITES, times=None, probability=0.04) for fault in
              (Fault.LOST_REQUEST, Fault.LOST_ANSWER, Fault.LATE, Fault.UNAVAILABLE)),
            Rule(Fault.UNAVAILABLE, READS, times=None, probability=0.04),
        )  # fmt: skip
        self.baton = Baton(self.rng)
        self.store = Stepping(self.faulty, self.baton)
        self.acknowledged: list[Entry] = []
        self.seen: list[tuple[int, Toy]] = []
        self.fenced = 0
        self.bodies: list[Callable[[], None]] = [
            *(self._writer(number) for number in range(writers)),
            *(self._other(number) for number in range(2)),
            *(self._follower for _ in range(followers)),
        ]
        if collects:
            self.bodies.append(self._collector)

    def run(self) -> None:
        self.baton.run(self.bodies, self._between)
        self.faulty.heal()
        self.faulty.land_late()

    def _between(self) -> None:
        if self.rng.random() < 0.05:
            self.faulty.land_late(1)

    def _journal(self, name: str, seed: int) -> JournalWriter[Toy]:
        return JournalWriter(
            self.store, PREFIX, ToyMachine(), writer=name, clock=ManualClock(),
            rng=random.Random(seed), stop=threading.Event(),
        )  # fmt: skip

    def _writer(self, number: int) -> Callable[[], None]:
        rng = random.Random(self.rng.random())

        def body() -> None:
            for incarnation in range(3):
                name = f"{number:04x}{incarnation:04x}"
                journal = self._journal(name, incarnation)
                with_epoch = False
                try:
                    self._retry(journal.catch_up)
                    journal.take_epoch({})
                    with_epoch = True
                    for index in range(rng.randrange(8)):
                        self.acknowledged.append(journal.append(say(f"{name} {index}")))
                        self.seen.append((journal.number, journal.state))
                        if rng.random() < 0.4:
                            journal.write_checkpoint(force=True)
                except FencedError:
                    self.fenced += with_epoch
                except BackendError:
                    pass  # the journal could not be read to take the epoch
                self.seen.append((journal.number, journal.state))

        return body

    def _other(self, number: int) -> Callable[[], None]:
        def body() -> None:
            journal = self._journal(f"eeee{number:04x}", number)
            self._retry(journal.catch_up)
            for index in range(4):
                try:
                    self.acknowledged.append(journal.append(say(f"other {number} {index}")))
                except (FencedError, ClosedError, StoreUnavailableError):
                    journal = self._journal(f"eeee{number:02x}{index:02x}", number)
                    self._retry(journal.catch_up)
                self.seen.append((journal.number, journal.state))

        return body

    def _follower(self) -> None:
        reader = JournalReader(self.store, PREFIX, ToyMachine())
        for _ in range(8):
            self._retry(reader.catch_up)
            self.seen.append((reader.number, reader.state))

    def _collector(self) -> None:
        """Deletes what two checkpoints cover, in any order, and is slow."""
        rng = random.Random(self.rng.random())
        for _ in range(4):
            infos = self._retry(lambda: [*self.store.list(PREFIX + JOURNAL)])
            numbers = [(parse_journal_key(PREFIX, info.key), info.key) for info in infos]
            checkpoints = sorted(n[0] for n, _ in numbers if n and n[1])
            if len(checkpoints) < 2:
                continue
            old = [
                key
                for n, key in numbers
                if n and (n[0] < checkpoints[-2] or n == (checkpoints[-2], False))
            ]
            rng.shuffle(old)
            for key in old[: rng.randrange(len(old) + 1)]:
                self._retry(lambda key=key: self.store.delete(key))  # type: ignore[misc]

    def _retry(self, call: Callable[[], T]) -> T:
        while True:
            try:
                return call()
            except BackendError:
                continue


def check(world: World) -> list[tuple[int, int, str, object]]:
    reader = JournalReader(world.ledger, PREFIX, ToyMachine())
    reader.catch_up()
    said = reader.state.said
    numbers = [step[0] for step in said]
    assert numbers == list(range(1, len(said) + 1)), "one entry a number, none missing"
    epochs = [step[1] for step in said if step[1]]
    assert epochs == sorted(epochs), "nobody is heard behind a newer epoch"
    by_number = {step[0]: step for step in said}
    for entry in world.acknowledged:
        step = by_number[entry.number]
        assert (step[2], step[3]) == (entry.writer, entry.actions[0]["value"])
    values = [step[3] for step in said]
    assert len(set(values)) == len(values), "nothing is said twice"
    for number, state in world.seen:
        assert state.said == said[:number]
    return list(said)


@pytest.mark.parametrize("seed", range(40))
def test_i6_i4_i1_writers_at_once_make_one_history(seed: int):
    world = World(seed, writers=2 + seed % 3, followers=1, collects=False)
    world.run()
    said = check(world)
    assert all(len(bodies) == 1 for bodies in world.ledger.created.values()), "immutable (I4)"
    entries = [
        decode_entry(bodies[0], where=key)
        for key, bodies in world.ledger.created.items()
        if "." not in key
    ]
    assert len(entries) == len(said), "what was created is history"


@pytest.mark.parametrize("seed", range(100, 140))
def test_i6_i1_one_history_also_while_old_entries_are_deleted(seed: int):
    world = World(seed, writers=2 + seed % 3, followers=2, collects=True)
    world.run()
    check(world)


def test_the_simulation_meets_what_it_is_made_for():
    fenced = strays = late = 0
    for seed in range(100, 130):
        world = World(seed, writers=3, followers=0, collects=True)
        world.run()
        check(world)
        fenced += world.fenced
        strays += any(len(bodies) > 1 for bodies in world.ledger.created.values())
        late += any(event.fault is Fault.LATE for event in world.faulty.events)
    assert fenced > 10
    assert late > 10
    assert strays > 0
