"""A rebuild beside a writer that nobody sees: what that writer counts as committed is never dropped.

Both run on threads of their own that take turns at their requests. Every way of dividing the two in which each is
interrupted once is tried: so many requests of the writer, then so many of the rebuild, then each to its end.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from support.journals import PREFIX
from support.tiers import PLACE, QUEUE, TierBuilder

from backends.memory import MemoryStore
from backends.wrapping import WrappingStore
from tiered.clock import ManualClock
from tiered.errors import ClosedError, FencedError, MovedOnError
from tiered.keys import JOURNAL
from tiered.log.reader import TierReader
from tiered.log.verify import verify_tier
from tiered.upkeep.rebuild import apply_rebuild, plan_rebuild
from tiered.upkeep.workplace import Workplace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Buffer

    from backends.base import ByteRange, ObjectInfo, ObjectStore, Version

POOL = ThreadPoolExecutor(2)


class Turns:
    """Lets one of two sides go on at a time, by numbers of requests."""

    def __init__(self, plan: Sequence[tuple[str, int]]) -> None:
        self._condition = threading.Condition()
        self._plan = [[side, count] for side, count in plan]
        self._ended: set[str] = set()

    def take(self, side: str) -> None:
        """Wait for a turn of one request."""
        with self._condition:
            assert self._condition.wait_for(lambda: self._is_turn_of(side), 60)
            for step in self._plan:
                if step[0] == side and step[1]:
                    step[1] -= 1
                    break
            self._condition.notify_all()

    def end(self, side: str) -> None:
        with self._condition:
            self._ended.add(side)
            self._condition.notify_all()

    def _is_turn_of(self, side: str) -> bool:
        for whose, left in self._plan:
            if left and whose not in self._ended:
                return whose == side
        return True


class Taking(WrappingStore):
    """Waits for its side's turn before each request."""

    def __init__(self, inner: ObjectStore, turns: Turns, side: str) -> None:
        super().__init__(inner)
        self._turns = turns
        self._side = side
        self.requests = 0

    def _turn(self) -> None:
        self.requests += 1
        self._turns.take(self._side)

    def put_if_absent(self, key: str, data: Sequence[Buffer] | Buffer) -> None:
        self._turn()
        self._inner.put_if_absent(key, data)

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        self._turn()
        return self._inner.get(key, byte_range)

    def get_versioned(self, key: str) -> tuple[bytes, Version]:
        self._turn()
        return self._inner.get_versioned(key)

    def compare_and_set(self, key: str, data: bytes, expected: Version | None) -> Version:
        self._turn()
        return self._inner.compare_and_set(key, data, expected)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        self._turn()
        yield from list(self._inner.list(prefix, start_after=start_after))


def workplace(store: ObjectStore, seed: int = 5) -> Workplace:
    return Workplace(store, store, PLACE, ManualClock(), random.Random(seed))


def lose_the_first_entries(store: ObjectStore) -> None:
    """So that the journal cannot be read, though its writer goes on without knowing."""
    for number in (1, 2):
        store.delete(f"{PREFIX}{JOURNAL}{number:020d}")


def lose_all(store: ObjectStore) -> None:
    for info in list(store.list(PREFIX + JOURNAL)):
        store.delete(info.key)


def with_zombie(lose: Callable[[ObjectStore], None]) -> tuple[MemoryStore, TierBuilder]:
    store = MemoryStore()
    zombie = TierBuilder(store)
    for body in (b"a", b"b", b"c"):
        zombie.add([body])
    lose(store)
    return store, zombie


def write(zombie: TierBuilder) -> None:
    zombie.add([b"the zombie's"])


def rebuild(at: Workplace) -> None:
    apply_rebuild(at, plan_rebuild(at.store, at.prefix, POOL), accept_gaps=True)


def run(
    lose: Callable[[ObjectStore], None],
    zombies: int,
    rebuilds: int,
) -> tuple[bool, int, int]:
    """One way of dividing them; whether all was applied at once, and the requests of each side."""
    store, zombie = with_zombie(lose)
    turns = Turns([("zombie", zombies), ("rebuild", rebuilds), ("zombie", 10**6)])
    his, ours = Taking(store, turns, "zombie"), Taking(store, turns, "rebuild")
    zombie.journal._store = zombie.journal._reader._store = zombie.uploader._store = his
    errors: list[BaseException] = []
    counted: list[int] = []

    def live() -> None:
        try:
            write(zombie)
            counted.append(zombie.journal.state.queues[QUEUE][-1].commit_offset)
        except FencedError:
            pass
        except BaseException as error:  # noqa: BLE001 (told below)
            errors.append(error)
        finally:
            turns.end("zombie")

    thread = threading.Thread(target=live)
    thread.start()
    is_applied = True
    try:
        rebuild(workplace(ours))
    except MovedOnError:
        is_applied = False
    finally:
        turns.end("rebuild")
        thread.join()
    assert errors == []
    if not is_applied:  # what the command says: plan again
        rebuild(workplace(store, 6))
    reader = TierReader(store, PREFIX)
    reader.refresh()
    incarnation = reader.state.queues[QUEUE][-1]
    for offset in counted:
        assert incarnation.commit_offset >= offset, (zombies, rebuilds, incarnation)
    assert verify_tier(store, PREFIX, deep=True).problems == []
    with pytest.raises((FencedError, ClosedError)):
        write(zombie)
    return is_applied, his.requests, ours.requests


@pytest.mark.slow
@pytest.mark.parametrize("lose", [lose_all, lose_the_first_entries])
def test_i6_what_a_zombie_counts_is_never_dropped_by_a_rebuild(
    lose: Callable[[ObjectStore], None],
):
    _, zombies, rebuilds = run(lose, 0, 10**6)
    _, most, _ = run(lose, 10**6, 0)
    met = {
        run(lose, one, two)[0]
        for one in range(max(zombies, most) + 1)
        for two in range(rebuilds + 1)
    }
    assert met == {True, False}
