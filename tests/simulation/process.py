"""One ``tiered attach`` in the simulation: the real ``Attachment`` over a store that answers late, wrongly or not at all."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from simulation.history import ViolationError, require
from simulation.scheduler import Owner, SimClock, SimLock

from backends.base import as_chunks
from backends.errors import BackendError, UnavailableError, UnknownOutcomeError
from backends.registry import PREFIX as PROBES
from backends.testing.faulty import Fault, SimulatedCrash
from backends.wrapping import MeteredStore, WrappingStore
from tiered.attach.settings import IndexSettings
from tiered.attach.writer import Attachment, AttachSettings
from tiered.dispatch.settings import DispatchSettings
from tiered.errors import ClosedError, DataError, FencedError, InvalidError, StoreUnavailableError
from tiered.journal.entry import encode_entry
from tiered.journal.lease import Holder
from tiered.model import MessageQueue

if TYPE_CHECKING:
    import builtins
    from collections.abc import Iterator, Sequence

    from simulation.broker import QueueKey
    from simulation.bystander import Bystander
    from simulation.reclaimer import Reclaimer
    from simulation.world import World
    from typing_extensions import Buffer

    from backends.base import ByteRange, ObjectInfo, Version

DISPATCH = DispatchSettings(
    freshness_s=1.0, bundle_bytes=1500, buffer_bytes_max=12_000, window_bytes=3000, uploads_max=2,
    segment_bytes_max=4000, segment_age_s_max=18.0, poll_s=0.5, backoff_s_max=4.0,
    compression=None,
)  # fmt: skip
_LATENCY_S = 0.04
_DEADLINE_S = 60.0
"""Of every request: what has not been answered by then has failed for who asked, whatever becomes of it."""


class SimStore(WrappingStore):
    """A process's connection: each request takes time on its way, and the answer too; a kill may fall into either."""

    def __init__(self, process: Process | Reclaimer | Bystander) -> None:
        super().__init__(process.world.faulty)
        self._process = process
        self._world = process.world

    def _travel(self, slow: float = 1.0) -> bool:
        """Let the time pass that a request takes; False when its deadline came first."""
        world = self._world
        slow *= 40 if not world.is_calm and world.rng.random() < world.slowness else 1
        takes_s = world.rng.expovariate(1 / _LATENCY_S) * slow
        world.scheduler.park(min(takes_s, _DEADLINE_S))
        return takes_s < _DEADLINE_S

    def _ask(self, key: str) -> None:
        if not self._travel():
            raise UnavailableError(key, "no answer in time")

    def _write(self, key: str, write: Any, late: Any, slow: float = 1.0) -> Any:
        world = self._world
        world.dramatise(self._process, key)
        try:
            is_in_time = self._travel(slow)
        except SimulatedCrash:
            if world.rng.random() < 0.4:  # on its way all the same
                world.leave_behind(self._process, late)
            raise
        if not is_in_time:
            world.leave_behind(self._process, late)
            world.count("deadline")
            raise UnknownOutcomeError(key, "no answer in time")
        try:
            done = write()
        except UnknownOutcomeError:
            world.scheduler.park(world.rng.choice((0.2, 3.0)))  # a timeout
            raise
        if not self._travel():
            raise UnknownOutcomeError(key, "no answer in time")
        return done

    def put_if_absent(self, key: str, data: Sequence[Buffer] | Buffer) -> None:
        body, ledger = b"".join(as_chunks(data)), self._world.ledger
        self._write(
            key,
            lambda: self._inner.put_if_absent(key, body),
            lambda: ledger.put_if_absent(key, body),
            self._world.spoil_merge(key, body),
        )

    def compare_and_set(self, key: str, data: bytes, expected: Version | None) -> Version:
        ledger = self._world.ledger
        version: Version = self._write(
            key,
            lambda: self._inner.compare_and_set(key, data, expected),
            lambda: ledger.compare_and_set(key, data, expected),
        )
        return version

    def delete(self, key: str) -> None:
        is_probe = key.startswith(PROBES) and not isinstance(self._process, Process)
        self._world.has_collected_probes |= is_probe
        self._write(key, lambda: self._inner.delete(key), lambda: self._world.ledger.delete(key))

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        self._ask(key)
        return self._inner.get(key, byte_range)

    def get_ranges(self, key: str, byte_ranges: Sequence[ByteRange]) -> builtins.list[bytes]:
        self._ask(key)
        return self._inner.get_ranges(key, byte_ranges)

    def get_versioned(self, key: str) -> tuple[bytes, Version]:
        self._ask(key)
        return self._inner.get_versioned(key)

    def head(self, key: str) -> ObjectInfo:
        self._ask(key)
        return self._inner.head(key)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """In pages, each of which sees the present."""
        page_keys = self._world.page_keys
        while True:
            self._ask(prefix)
            page = []
            for info in self._inner.list(prefix, start_after=start_after):
                page.append(info)
                if len(page) == page_keys:
                    break
            yield from page
            if len(page) < page_keys:
                return
            start_after = page[-1].key

    def close(self) -> None:
        """The store stays for others."""


class Process(Owner):
    """A writer from start to end.

    Attributes:
        once: It ends when the present end is durable.
        acknowledged: Commit offsets that it was sure of, by queue.
        has_rivals: Another may have written at the same time: being fenced is just.
        ended: It has.
    """

    def __init__(self, world: World, number: int, *, once: bool, seal: bool = False) -> None:
        super().__init__(f"p{number}")
        self.world = world
        self.once = once
        self.seal = seal
        self.has_rivals = False
        self.ended = False
        self.fenced = False
        self.result: Any = None
        self._starts: dict[Any, int] = {}
        self.clock = SimClock(world.scheduler, world.rng.choice(world.skews_ms))
        settings = AttachSettings(
            lease_s=world.lease_s,
            wait=once or world.rng.random() < 0.8,
            dispatch=replace(DISPATCH, **world.dispatch),
            give_up_s=600.0,
            index=world.persons and IndexSettings(items_max=20, age_s=3.0),
        )
        self.attachment = Attachment(
            local=world.broker,
            meter=MeteredStore(SimStore(self)),
            place=world.place,
            settings=settings,
            clock=self.clock,
            rng=random.Random(world.rng.getrandbits(64)),
            announce=lambda _state: None,
        )
        self._prepare(world, number)

    def _prepare(self, world: World, number: int) -> None:
        attachment = self.attachment
        journal = attachment._journal
        journal._lock = SimLock(world.scheduler)  # type: ignore[assignment]
        attachment._lease._holder = Holder(f"host{number}", "", "", number, 0)
        if not world.has_lease:
            attachment._lease._is_free = lambda _present, _version: True  # type: ignore[method-assign]
            attachment._lease.renew = lambda: None  # type: ignore[method-assign]
        append = journal.append

        def checked(actions: Any, **more: Any) -> Any:
            entry = append(actions, **more)
            data = encode_entry(entry)
            if not world.history.is_history(entry.number, data):
                world.scheduler.fail(
                    ViolationError(
                        f"I6: {self.name} counts entry {entry.number}, which is not a history"
                    )
                )
            return entry

        journal.append = checked  # type: ignore[method-assign]

    def live(self) -> None:
        """Body of its main thread."""
        try:
            self._live()
        except SimulatedCrash:
            pass
        except FencedError as error:
            self.fenced = True
            is_misread = any(
                event.fault is Fault.FLIP and event.key in str(error)
                for event in self.world.faulty.events
            )
            is_just = (
                self.has_rivals or is_misread
            )  # (its own object, as it was read, is another's)
            if not is_just and self.attachment.dispatcher is not None:
                self._broken(f"fenced without a rival: {error}")
        except (StoreUnavailableError, ClosedError, BackendError):
            pass  # it could not begin, or gave up; an operator starts another
        except InvalidError as error:
            if not self.world.has_collected_probes:
                self._broken(f"refuses to begin: {error}", error)
        except DataError as error:
            if (
                not self.world.flips
            ):  # what it has read is damaged, so it stops; an operator starts another
                self._broken(f"refuses to go on: {error}", error)
        except BaseException as error:  # noqa: BLE001 (a defect)
            self._broken(f"died of {error!r}", error)
        finally:
            self.ended = True

    def _broken(self, what: str, cause: BaseException | None = None) -> None:
        violation = ViolationError(f"{self.name} {what}")
        violation.__cause__ = cause
        self.world.scheduler.fail(violation)

    def _live(self) -> None:
        attachment = self.attachment
        try:
            attachment._begin()
            self._share_locks()
            self.result = attachment.run(once=self.once, seal=self.seal)
        except SimulatedCrash:
            raise
        except BaseException:
            attachment.close()
            raise
        attachment.close()
        fault = attachment.fault
        if fault is not None:
            raise fault

    def _share_locks(self) -> None:
        dispatcher = self.attachment.dispatcher
        assert dispatcher is not None
        dispatcher._merging._turn = SimLock(self.world.scheduler)  # type: ignore[assignment]

    @property
    def epoch(self) -> int:
        """Of its epoch; 0: it has none."""
        return self.attachment._journal.epoch

    def knows_lag(self, queue: QueueKey) -> bool:
        """Whether it has found that the broker's queue is a copy that lags."""
        dispatcher = self.attachment.dispatcher
        return dispatcher is not None and MessageQueue(*queue) in dispatcher.continuity._lagging

    def check(self) -> None:
        """What it believes to be committed is (I5), and what it holds is bounded (I8)."""
        dispatcher = self.attachment.dispatcher
        if dispatcher is None:
            return
        state = self.attachment._journal.state
        for queue, offset in dispatcher.lag().items():
            if state.incarnation(queue) is None:  # where it would begin, of which nobody was told
                self._starts.setdefault(queue, offset)
            incarnations = self.world.history.queues.get((queue.topic, queue.queue_id), [])
            known = max(
                [incarnation.commit for incarnation in incarnations],
                default=self._starts.get(queue, 0),
            )
            known = max(known, self._starts.get(queue, 0))
            what = f"{self.name} counts {queue} up to {offset}, history to {known}"
            require(offset <= known, what)
        work = dispatcher._compensation
        is_held_back = work.is_idle(limited=False) and not work.is_idle(limited=True)
        self.world.count("held back by its rate", is_held_back)
        counted = dispatcher.counters.truncated
        known = self.world.history.truncated[self.epoch]
        require(counted <= known, f"{self.name} counts {counted} truncations, history {known}")
        fault = dispatcher.fault
        just = (FencedError, StoreUnavailableError, ClosedError, BackendError)
        just = (*just, DataError) if self.world.flips else just
        if isinstance(fault, Exception) and not isinstance(fault, just):
            self._broken(f"has a fault: {fault!r}", fault)
