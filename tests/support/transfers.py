"""Doubles for the request layer: an executor that runs what the test says, and a store that tells what was asked."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any

from backends.memory import MemoryStore
from backends.wrapping import WrappingStore
from fetcher.limits import TransferLimits
from fetcher.transfers import Transfers
from tiered.clock import ManualClock

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.base import ByteRange

OBJECT = bytes(range(256)) * 400
LIMITS = {"coalesce_gap_bytes": 0, "coalesced_bytes_max": 1, "hedge_budget": 0.0}


class HeldExecutor(Executor):
    """Runs a call when the test says so, in the test's thread."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], Any]] = []
        self.is_shut = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self.is_shut:
            raise RuntimeError("cannot schedule new futures after shutdown")
        self.calls.append(lambda: fn(*args, **kwargs))
        return Future()

    def run(self, which: int = 0) -> None:
        self.calls.pop(which)()

    def run_all(self) -> None:
        while self.calls:
            self.run()


class AskedStore(WrappingStore):
    """Notes each read; raises what ``errors`` has for it, the first of the list once."""

    def __init__(self) -> None:
        inner = MemoryStore()
        for key in "abcdefgh":
            inner.put_if_absent(key, OBJECT)
        super().__init__(inner)
        self.reads: list[tuple[str, int, int]] = []
        self.errors: dict[str, list[BaseException | None]] = {}

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        assert byte_range is not None
        self.reads.append((key, byte_range.start, byte_range.end))
        if self.errors.get(key) and (error := self.errors[key].pop(0)):
            raise error
        return super().get(key, byte_range)


class Rig:
    """A ``Transfers`` of which the test moves every part."""

    def __init__(self, **limits: Any) -> None:
        self.store = AskedStore()
        self.executor = HeldExecutor()
        self.clock = ManualClock()
        self.wakes = 0
        made = TransferLimits(**{**LIMITS, **limits})
        self.transfers = Transfers(self.store, self.executor, self.clock, made, wake=self._wake)

    def _wake(self) -> None:
        self.wakes += 1

    def ask(self, stream: Any, key: str, wanted: ByteRange, *, urgent: bool) -> Future[Any]:
        return ask(self.transfers, stream, key, wanted, urgent=urgent)


def ask(
    transfers: Transfers, stream: Any, key: str, wanted: ByteRange, *, urgent: bool
) -> Future[Any]:
    """Want one range."""
    return transfers.ask_all([(stream, key, wanted)], urgent=urgent)[0]
