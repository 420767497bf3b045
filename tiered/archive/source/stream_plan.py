"""What a stream reads next of a tier, and what a batch of it is, now or done again. Pure.

``advance`` decides where a batch ends, from where the last one ended; ``batch_of`` turns the end of a batch, which knows its
beginning too, into what is to be read. In between a crash may lie, and whatever the tier goes through meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tiered.archive.model import Lane
from tiered.archive.source.positions import Key, Position, Positions, earliest, queues_of
from tiered.archive.source.stretches import FAIL, SKIP, History, cut, owner
from tiered.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tiered.archive.selection import Selection
    from tiered.archive.source.stretches import Stretch
    from tiered.log.parts import QueueLife, TierState
    from tiered.plugin.place import Place

AGAIN = "again"


@dataclass(frozen=True, slots=True)
class Rules:
    """What to do where a stream would lose or repeat messages.

    Attributes:
        on_gap: ``fail`` or ``skip``.
        on_take_back: ``fail``; ``again``: what came in place of messages that were taken back is read too;
            ``skip``: only what comes behind them.
    """

    on_gap: str = FAIL
    on_take_back: str = FAIL


@dataclass(frozen=True, slots=True)
class Run:
    """Offsets ``[start, end)`` of one incarnation that lie ahead, in one part, or nowhere."""

    incarnation: int
    start: int
    end: int
    size_bytes: int
    is_there: bool

    @property
    def count(self) -> int:
        """How many."""
        return self.end - self.start


def base_of(
    key: Key, lives: Mapping[int, list[QueueLife]], at: Position | None, rules: Rules
) -> Position:
    """Where the next batch of a queue begins, with what was taken back dealt with.

    Raises:
        DataError: Messages that were read already have been taken back, and the rules say to fail.
    """
    if at is None:
        return earliest(lives)
    at = at.settled
    mine = lives[at.incarnation]
    main, tails = mine[-1], len(mine) - 1
    cuts = [life.min_offset if life.parts() else main.min_offset for life in mine[at.tails : -1]]
    low = min([*(cut for cut in cuts if cut < at.offset), main.commit_offset])
    if low >= at.offset:
        return replace(at, tails=tails)
    if rules.on_take_back == FAIL:
        raise DataError(
            f"the broker took back messages of {key.topic}/{key.queue_id} from offset {low} on, and the stream has"
            f" read up to {at.offset}",
            do='.option("on-take-back", "again") reads what came in their place, "skip" goes on behind it',
        )
    if rules.on_take_back == AGAIN:
        return replace(at, offset=low, from_offset=low, tails=tails)
    end = min(at.offset, main.commit_offset)
    return replace(at, offset=end, from_offset=end, tails=tails, lost=at.lost + max(0, end - low))


def runs_of(lives: Mapping[int, list[QueueLife]], at: Position) -> list[Run]:
    """All that lies ahead of a position, in order."""
    found: list[Run] = []
    for number in sorted(number for number in lives if number >= at.incarnation):
        life = lives[number][-1]
        start = at.offset if number == at.incarnation else began(life)
        found += runs_of_life(life, start, life.commit_offset)
    return found


def began(life: QueueLife) -> int:
    """Where a life that a stream comes to began; 0 unless it is certain that nothing has expired."""
    parts = life.parts()
    is_whole = parts[0].log_offset == 0 if parts else life.log_end == 0
    return life.min_offset if is_whole else 0


def runs_of_life(life: QueueLife, start: int, end: int) -> Iterator[Run]:
    """Offsets ``[start, end)`` of one life, part by part, and what is in none."""
    at = start
    for part in life.parts():
        low, high = max(part.queue_offset, life.min_offset, at), min(part.queue_end, end)
        if low >= high:
            continue
        if low > at:
            yield Run(life.incarnation, at, low, 0, False)
        size = part.log.size_bytes * (high - low) // part.count
        yield Run(life.incarnation, low, high, size, True)
        at = high
    if at < end:
        yield Run(life.incarnation, at, end, 0, False)


def shares(weights: Sequence[int], limit: int) -> list[int]:
    """A limit divided by weight; in all ``limit``, or the weights themselves when they are less."""
    total = sum(weights)
    if total <= limit:
        return list(weights)
    found = [weight * limit // total for weight in weights]
    left = limit - sum(found)
    for number in sorted(range(len(weights)), key=lambda n: weights[n] - found[n], reverse=True):
        if not left:
            break
        found[number] += 1
        left -= 1
    return found


def advance(
    states: Mapping[Place, TierState],
    start: Positions,
    rules: Rules,
    *,
    takes: Callable[[Key], bool] = lambda _key: True,
    rows_max: int | None = None,
    bytes_max: int | None = None,
) -> Positions:
    """Where the next batch ends. ``start`` itself when there is nothing to read.

    Args:
        states: Of the brokers.
        start: Where the last batch ended.
        rules: See ``Rules``.
        takes: Whether a queue is read.
        rows_max: Messages at most; divided among queues by what each has.
        bytes_max: Bytes of the commit log, about; one message at least.

    Raises:
        DataError: The rules say to fail.
    """
    ahead: dict[Key, tuple[Position, list[Run]]] = {}
    queues = dict(queues_of(states))
    for key, lives in queues.items():
        if takes(key):
            base = base_of(key, lives, start.get(key), rules)
            ahead[key] = base, runs_of(lives, base)
    weights = [_weight(runs, by_bytes=bytes_max is not None) for _, runs in ahead.values()]
    limit = rows_max if bytes_max is None else bytes_max
    parts = weights if limit is None else shares(weights, limit)
    most = max(range(len(parts)), key=parts.__getitem__, default=-1)
    found: Positions = {}
    for number, (key, (base, runs)) in enumerate(ahead.items()):
        amount = parts[number] if parts[number] < weights[number] else None
        taken = _take(runs, amount, bytes_max is not None, least=number == most)
        found[key] = _end(key, base, taken, queues[key], rules)
    same = all(start.get(key) is not None and _is_same(start[key], found[key]) for key in found)
    return start if same else {**{key: at.settled for key, at in start.items()}, **found}


def _weight(runs: list[Run], *, by_bytes: bool) -> int:
    return sum(run.size_bytes if by_bytes else run.count for run in runs if run.is_there)


def _take(runs: list[Run], amount: int | None, by_bytes: bool, *, least: bool) -> list[Run]:
    """As much of some runs as an amount of messages or bytes allows; what is not there costs nothing."""
    if amount is None:
        return runs
    taken: list[Run] = []
    left, is_first = amount, least
    for run in runs:
        cost = run.size_bytes if by_bytes else run.count
        if not run.is_there or cost <= left:
            taken.append(run)
            left -= cost if run.is_there else 0
            is_first = is_first and not run.is_there
            continue
        count = run.count * left // cost if by_bytes else left
        count = max(count, int(is_first and by_bytes))
        if count:
            taken.append(replace(run, end=run.start + count))
        break
    return taken


def _end(
    key: Key,
    base: Position,
    taken: list[Run],
    lives: Mapping[int, list[QueueLife]],
    rules: Rules,
) -> Position:
    first = next((number for number, run in enumerate(taken) if not run.is_there), None)
    if first is not None and rules.on_gap != SKIP:
        if not first:
            raise gap_error(key, taken[0].start, taken[0].end)
        taken = taken[:first]
    if not taken:
        return base
    missing = sum(run.count for run in taken if not run.is_there)
    last = taken[-1]
    tails = base.tails
    if last.incarnation != base.incarnation:
        tails = len(lives[last.incarnation]) - 1
    return replace(
        base,
        incarnation=last.incarnation,
        offset=last.end,
        tails=tails,
        missing=missing,
        lost=base.lost + missing,
    )


def gap_error(key: Key, start: int, end: int) -> DataError:
    """Messages that a stream would miss."""
    return DataError(
        f"the tier has no messages of {key.topic}/{key.queue_id} from offset {start} to {end}:"
        " they have expired, or never came there",
        do='.option("on-gap", "skip") goes on behind them',
    )


def _is_same(before: Position, after: Position) -> bool:
    return before.settled == after.settled


def batch_of(
    states: Mapping[Place, TierState], end: Positions, wanted: Selection, rules: Rules
) -> list[Stretch]:
    """What the batch that ends at some positions reads, by the tier as it is now.

    Raises:
        DataError: Less is there than when the batch was planned, and the rules say to fail; or a broker is gone.
    """
    queues = dict(queues_of(states))
    prefixes = {(place.cluster, place.broker): place.prefix for place in states}
    found: list[Stretch] = []
    for key, at in sorted(end.items()):
        if at == at.settled:
            continue
        if key not in queues:
            raise DataError(f"the tier has no queue {key.topic}/{key.queue_id} any more")
        missing = 0
        for number in sorted(n for n in queues[key] if at.from_incarnation <= n <= at.incarnation):
            lives = queues[key][number]
            history = _history(prefixes[key.cluster, key.broker], key, lives, at)
            made, count = _stretches(history, lives, at, wanted)
            found += made
            missing += count
        if missing > at.missing and rules.on_gap != SKIP:
            raise gap_error(key, at.from_offset, at.offset)
    return found


def _history(prefix: str, key: Key, lives: list[QueueLife], at: Position) -> History:
    number = lives[-1].incarnation
    tails = at.tails if number == at.incarnation else len(lives) - 1
    return History(prefix, Lane(*key, number), tails)


def _stretches(
    history: History, lives: list[QueueLife], at: Position, wanted: Selection
) -> tuple[list[Stretch], int]:
    """Those of one incarnation, and how many offsets are in none."""
    main, number = lives[-1], lives[-1].incarnation
    begin = at.from_offset if number == at.from_incarnation else began(main)
    end = at.offset if number == at.incarnation else int(main.commit_offset)
    found: list[Stretch] = []
    missing = 0
    for life, low, high in _owned(lives, history.tails, begin, end):
        found += cut(history, life, (max(low, life.min_offset), high), wanted)
        missing += sum(run.count for run in runs_of_life(life, low, high) if not run.is_there)
    return found, missing


def _owned(
    lives: list[QueueLife], tails: int, begin: int, end: int
) -> Iterator[tuple[QueueLife, int, int]]:
    """Offsets ``[begin, end)`` by the life in which they lay, as so many ends had been taken back."""
    cuts = [life.min_offset for life in lives[tails:-1]]
    at = begin
    while at < end:
        life = owner(lives, tails, at)
        behind = [int(cut) for cut in cuts if cut > at]
        stop = min([end, *behind, *([life.commit_offset] if life is not lives[-1] else [])])
        yield life, at, stop
        at = stop
