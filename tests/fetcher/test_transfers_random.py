"""The request layer under random orders: every wish ends once and truly, and no limit is ever passed."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Any

from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import ByteRange
from backends.errors import InvalidRangeError, UnavailableError
from fetcher.limits import TransferLimits
from fetcher.requests import Asked, Attempt, BusyError
from fetcher.transfers import TransferState

if TYPE_CHECKING:
    from concurrent.futures import Future

SIZE = 200  # of each object; ranges go beyond it
BYTES = {key: bytes((at * 7 + ord(key)) % 256 for at in range(SIZE)) for key in "ab"}
LIMITS = st.builds(
    TransferLimits,
    requests_in_flight_max=st.integers(1, 5),
    bytes_in_flight_max=st.integers(1, 200),
    bytes_per_s=st.none() | st.floats(50, 5000),
    requests_per_s=st.none() | st.floats(2, 100),
    coalesce_gap_bytes=st.integers(0, 20),
    coalesced_bytes_max=st.integers(1, 120),
    hedge_floor_s=st.just(0.05),
    hedge_budget=st.sampled_from([0.0, 0.05, 0.5]),
    pending_max=st.integers(1, 12),
)
HEDGING = TransferLimits(
    requests_in_flight_max=5, bytes_in_flight_max=200, bytes_per_s=None, requests_per_s=None,
    coalesce_gap_bytes=10, coalesced_bytes_max=120,
    hedge_floor_s=0.05, hedge_budget=0.5, pending_max=12,
)  # fmt: skip
STEPS = ["ask", "ask", "ask", "finish", "finish", "fail", "cancel", "hurry", "tick", "wait"]


class World:
    """A ``TransferState``, and what has become of every wish."""

    def __init__(self, limits: TransferLimits) -> None:
        self.limits = limits
        self.now_s = 0.0
        self.state = TransferState(limits, 0.0)
        for _ in range(10):
            self.state._durations.add(1, 0.01)  # so that hedging begins at once
        self.running: list[Attempt] = []
        self.wishes: dict[Asked, tuple[str, ByteRange]] = {}
        self.ends: Counter[Future[Any]] = Counter()

    def ask(self, rng: Random) -> None:
        key, start = rng.choice("ab"), rng.randrange(21) * 10
        wanted = ByteRange(start, start + rng.choice([1, 10, 10, 10, 20, 30]))
        urgent = rng.random() < 0.5
        asked = Asked(self._cancel, rng.randrange(4), key, wanted)
        asked.add_done_callback(lambda done: self.ends.update([done]))
        try:
            self.state.take_up(asked, self.now_s, urgent=urgent)
            self.state.send(self.now_s)
            self.wishes[asked] = (key, wanted)
        except BusyError:
            assert self.state.wishes.pending >= self.limits.pending_max
        self.do()

    def finish(self, which: int, *, fails: bool) -> None:
        attempt = self.running.pop(which)
        request = attempt.request
        outcome: bytes | BaseException = BYTES[request.key][request.start : request.end]
        if request.end > SIZE:
            outcome = InvalidRangeError("behind the end")
        if fails:
            outcome = UnavailableError("not now")
        self.state.finish(attempt, outcome, self.now_s)
        self.do()

    def do(self) -> None:
        effects = self.state.take_effects()
        for attempt in effects.starts:
            attempt.started_s = self.now_s
            self.running.append(attempt)
        for end in effects.ends:
            end()
        self.check()

    def check(self) -> None:
        limits, state = self.limits, self.state
        assert len(self.running) == state.slots_used <= limits.requests_in_flight_max
        sizes = [attempt.request.size_bytes for attempt in self.running]
        assert sum(sizes) == state.bytes_used
        assert state.bytes_used <= limits.bytes_in_flight_max or len(sizes) == 1
        counts = state.counts
        assert counts["hedges"] <= limits.hedge_budget * counts["requests"] + 1e-6
        assert max(self.ends.values(), default=1) == 1

    def _cancel(self, asked: Asked) -> bool:
        done = self.state.cancel(asked, self.now_s)
        self.do()
        return done

    def check_end(self, asked: Asked) -> None:
        key, wanted = self.wishes[asked]
        assert self.ends[asked] == 1
        if asked.cancelled():
            return
        error = asked.exception(0)
        if isinstance(error, InvalidRangeError):
            assert wanted.end > SIZE, "only who asked for what is not there is told so"
        elif error is None:
            assert asked.result(0) == BYTES[key][wanted.start : wanted.end]
            assert wanted.end <= SIZE
        else:
            assert isinstance(error, UnavailableError)


def _wander(world: World, rng: Random) -> None:
    """Some 150 steps in random order; how likely each is differs from run to run."""
    weights = [rng.random() ** 2 for _ in STEPS]
    for step in rng.choices(STEPS, weights, k=150):
        match step:
            case "ask":
                world.ask(rng)
            case "finish" | "fail" if world.running:
                world.finish(rng.randrange(len(world.running)), fails=step == "fail")
            case "hurry" if world.wishes:
                world.state.hurry(rng.choice(list(world.wishes)), world.now_s)
            case "cancel" if world.wishes:
                asked = rng.choice(list(world.wishes))
                had_ended = bool(world.ends[asked])
                assert asked.cancel() == (not had_ended)
            case "tick" | "wait":
                world.now_s += 0.4 if step == "wait" else 0.01
                world.state.tick(world.now_s)
                world.do()
            case _:
                pass


RARE = {"hedges", "hedge_wins", "joined", "coalesced", "refused", "cancelled"}


def test_every_wish_ends_once():
    total: Counter[str] = Counter()

    def run(limits: TransferLimits, seed: int, is_closed: bool) -> None:
        world = World(limits)
        _wander(world, Random(seed))
        if is_closed:
            world.state.close()
            world.do()
        _run_out(world)
        for asked in world.wishes:
            world.check_end(asked)
        state = world.state
        assert not state.wishes._chunks
        assert not state._running
        assert state.wishes.pending == 0
        total.update(state.counts)

    settings(max_examples=200)(given(LIMITS, st.integers(0, 1 << 32), st.booleans())(run))()
    for seed in range(2000):  # whatever is rare in what was drawn
        if min(total[name] for name in RARE) >= 10:
            break
        run(HEDGING, seed, False)
    assert min(total[name] for name in RARE) >= 10, "the orders are not random enough"


def _run_out(world: World) -> None:
    """Answer all that runs, and let the clock go on as long as anything waits."""
    for _ in range(10_000):
        if world.running:
            world.finish(0, fails=False)
            continue
        next_s = world.state.tick(world.now_s)
        world.do()
        if not world.running:
            if next_s is None:
                return
            world.now_s = max(world.now_s + 1e-3, next_s)
    raise AssertionError("it never comes to an end")


@given(st.lists(st.integers(1, 60), min_size=2, max_size=5), st.integers(1, 4))
def test_streams_share_the_slots_by_bytes(sizes: list[int], slots: int):
    """Streams that always wait get the same bytes, up to the largest of two requests and what is under way."""
    limits = TransferLimits(
        requests_in_flight_max=slots, coalesced_bytes_max=1, coalesce_gap_bytes=0, hedge_budget=0.0
    )
    state = TransferState(limits, 0.0)
    sent: Counter[int] = Counter()
    running: list[Attempt] = []
    for number in range(200):
        for stream, size in enumerate(sizes):
            wanted = ByteRange(number, number + size)
            state.take_up(Asked(lambda _: False, stream, f"{stream}", wanted), 0, urgent=False)
            state.send(0)
    while all(sent[stream] < 100 * min(sizes) for stream in range(len(sizes))):
        for attempt in state.take_effects().starts:
            running.append(attempt)
            sent[int(attempt.request.key)] += attempt.request.size_bytes
        for one in range(len(sizes)):
            for other in range(len(sizes)):
                apart = sizes[one] + sizes[other]
                assert sent[one] - sent[other] <= apart + slots * max(sizes)
        done = running.pop(0)
        state.finish(done, bytes(done.request.size_bytes), 0.0)
