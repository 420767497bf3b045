"""Somebody who reads the tier while it is written, merged, truncated and cleaned: plainly, or ahead, by the fetcher.

What is read is held against history there and then. It may be what was once (a reader's state is as old as its last
refresh), but it is of one course of the queue's events, in order, without a hole of its own, and never anything else.
"""

from __future__ import annotations

import random
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from simulation.contents import COMPACTED, GAP
from simulation.history import ViolationError, raws_of, require
from simulation.process import SimStore
from simulation.scheduler import Owner, SimClock

from backends.errors import BackendError
from backends.testing.faulty import SimulatedCrash
from tiered.errors import (
    ClosedError,
    DataError,
    ExpiredError,
    InvalidError,
    StoreUnavailableError,
    TieredStoreError,
)
from tiered.log.reader import TierReader
from tiered.log.state import Gap
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Self

    from simulation.world import World

    from fetcher.fetcher import TieredMessageFetcher
    from tiered.log.decode import TierBatch

_SLOW = 0.08
"""How often it takes longer between two reads than what is deleted is kept."""
Found = "TierBatch | Gap | None"


class Inline:
    """An executor that does at once what it is given: all that is asked for ahead comes while the reader waits."""

    def __init__(self, *_: Any) -> None:
        """For as many threads as one likes: a simulated process has none that the baton does not know."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left to wait for."""

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(call(*args))
        return future

    def map(self, call: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        return map(call, items)


class Bystander(Owner):
    """A process that opens the tier, reads some queue from some offset to its end, looks again, and so on."""

    def __init__(self, world: World, number: int, *, ahead: bool) -> None:
        super().__init__(f"b{number}")
        self.world = world
        self.ended = False
        self._rng = random.Random(world.rng.getrandbits(64))
        self._clock = SimClock(world.scheduler)
        self._reader = TierReader(SimStore(self), world.place.prefix, isolation=None)
        self._fetcher: TieredMessageFetcher | None = None
        if ahead:
            from fetcher.fetcher import TieredMessageFetcher

            executor: Any = Inline()
            self._fetcher = TieredMessageFetcher(self._reader, executor, self._clock)

    def live(self) -> None:
        """Body of its thread."""
        try:
            while True:
                self.world.scheduler.park(self._rng.expovariate(0.7))
                refused = (DataError,) if self.world.flips else ()
                with suppress(BackendError, StoreUnavailableError, ClosedError, *refused):
                    self._look()  # unless the store does not answer
        except SimulatedCrash:
            pass
        except BaseException as error:  # noqa: BLE001 (a defect, or what is not history)
            violation = ViolationError(f"{self.name} (a reader): {error!r}")
            violation.__cause__ = error
            self.world.scheduler.fail(violation)
        finally:
            self.ended = True

    def _look(self) -> None:
        if self._rng.random() < 0.6 or not self._reader.state.queues:
            self._refresh()
        state, rng = self._reader.state, self._rng
        if not state.queues:
            return
        queue = rng.choice(sorted(state.queues))
        incarnation = rng.choice(state.queues[queue])
        start = QueueOffset(rng.randrange(int(incarnation.commit_offset) + 1))
        if self._fetcher is None:
            readers = self._reader.incarnations(queue)
            reader = readers[state.queues[queue].index(incarnation)]
            self._follow(queue, incarnation.number, start, reader.read)
        else:
            fetcher, number = self._fetcher, incarnation.number
            cursor = fetcher.tier.cursor(queue, number)

            def read(at: QueueOffset, **limits: int) -> Found:
                if self._rng.random() < _SLOW:
                    self._refresh()  # as a follower of the same tier does
                return fetcher.read("g", queue, at, cursor=cursor, **limits)

            self._follow(queue, number, start, read)

    def _refresh(self) -> None:
        if self._fetcher is None:
            self._reader.refresh()
        else:
            self._fetcher.refresh()
            self._fetcher.tick()

    def _follow(
        self,
        queue: MessageQueue,
        number: int,
        start: QueueOffset,
        read: Callable[..., Found],
    ) -> None:
        """Read on, a little at a time."""
        history, key = self.world.history, (queue.topic, queue.queue_id, number)
        courses, at, is_first = [*history.courses[key]], start, True
        bytes_max = self._rng.choice((1, 400, 5000))
        for _ in range(self._rng.randrange(1, 12)):
            if self._rng.random() < _SLOW:
                self.world.scheduler.park(self._rng.random() * 12)
            try:
                found = read(at, bytes_max=bytes_max)
            except ExpiredError as error:
                low = max(incarnation.min for incarnation in history.incarnations(key))
                require(at < low, f"{key} at {at} is called expired, the minimum is {low}")
                to = error.next_offset
                require(to <= low, f"{key}: goes on at {to}, above {low}")
                return
            except InvalidError:
                return  # (it is another's to say what there is)
            except DataError as error:
                require(self.world.flips, f"{key} at {at}: {error}")
                self.world.count("wrong bit found")
                return
            except TieredStoreError as error:
                self.world.count(f"reader stopped by {type(error).__name__}")
                return
            if found is None:
                return
            courses += [one for one in history.courses[key] if all(one is not c for c in courses)]
            begin, chunks = self._chunks(found, at)
            low = max(incarnation.min for incarnation in history.incarnations(key))
            may = begin == at or (is_first and at < begin <= low)
            require(may, f"I1: {key} goes on at {begin}, not at {at}")
            gone = history.compacted.get(key, ())
            courses = [
                one
                for one in courses
                if all(
                    one.get(n) == raw or (raw == COMPACTED and n in gone)
                    for n, raw in enumerate(chunks, begin)
                )
            ]
            require(bool(courses), f"I3: {key} at {begin} is not of one course of events")
            at, is_first = QueueOffset(begin + len(chunks)), False
            self.world.count("read beside" if self._fetcher is None else "read ahead beside")

    @staticmethod
    def _chunks(found: TierBatch | Gap, at: int) -> tuple[int, list[bytes]]:
        """What was read, by offset: where it begins, and the records, or that there are none."""
        if isinstance(found, Gap):
            begin = max(
                at, int(found.start)
            )  # (an incarnation that was cut off may begin with a gap)
            return begin, [GAP] * (found.end - begin)
        return int(found.records.base_offset), [*raws_of(found.records)]
