"""What a stream reads next of a tier and the archive beside it, and what a batch of it is, now or done again. Pure.

``advance`` decides where a batch ends, from where the last one ended; ``batch_of`` turns the end of a batch, which knows its
beginning too, into what is to be read. In between a crash may lie, and whatever the tier goes through meanwhile: what has
expired by then is ``Batch.short``, and ``charged`` brings it into the positions that the next batch starts from.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from backends.lazy_dataclass import dataclass
from tiered.errors import DataError, InvalidError
from tiered.journal.entry import as_object
from tiered.spark.offset_ranges import (
    FAIL,
    SKIP,
    Key,
    OffsetRun,
    ReadPlan,
    prefixes_of,
    queues_of,
    runs_of_incarnation,
    take_history,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tiered.api.broker_place import Place
    from tiered.archive.machine import ArchiveState
    from tiered.archive.selection import Selection
    from tiered.archive.tables import Chosen
    from tiered.log.lineage import Isolation
    from tiered.log.parts import Incarnation, TierState
    from tiered.spark.offset_ranges import Incarnations, OffsetRange


# -- positions -------------------------------------------------------------------------------------
#
# How far a stream has come in each queue of a tier. Pure; what is read next is planned below.
#
# A position says where a batch ends *and* where it began, so a batch that is done again after a crash is the
# same one whatever the stream's start, the tier's expiry or the broker have done meanwhile. With ``tails`` (how
# many ends of the incarnation the broker had truncated) it also says which history the offsets are of: of
# messages that were truncated afterwards, a batch that is done again still has the old ones, as long as the
# tier has them.
#
# Each broker's positions bear the id of its tier's history (``TierState.history``): they mean nothing in
# another, such as that of a tier that was wiped and begun anew, which would have other messages at the same
# offsets.
#
# Offsets that have expired, or never came into the tier, are counted: those of the batch in ``missing``, those
# of the whole stream in ``lost``. Whether a stream may go on over them is the caller's to say; it never does so
# in silence.
#
# Spark writes a position down before its batch is read, so what expires in between is in the next position.
# Only a process that dies after such a batch was done, and before the next one was planned, takes the number
# along (its log has it). Its successor cannot know whether there was one: what has gone by now of a batch that
# somebody else has done is ``in_doubt``. So what a stream has left out is never less than ``lost``, and never
# more than ``lost`` and ``in_doubt`` together.

EARLIEST = "earliest"
LATEST = "latest"
_OTHERS = {-2: EARLIEST, -1: LATEST}
"""As Kafka's source has them in its offsets."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a batch ends in one queue, and where it began."""

    incarnation: int  # of the queue
    offset: int  # the next queue offset
    from_incarnation: int  # in which the batch began
    from_offset: int  # first queue offset of the batch
    tails: int = 0  # ends of ``incarnation`` that had been truncated, as the batch was planned
    missing: int = 0  # offsets of the batch without anything to read: expired, or never in the tier
    lost: int = 0  # all that the stream has gone over so far
    in_doubt: int = 0
    """Offsets of batches done by a process that is no more, expired since they were planned: read, unless they went
    before that process came to them."""
    through: tuple[tuple[int, int], ...] = ()
    """Incarnations behind the first that the batch comes into, each with the offset at which it begins."""

    @classmethod
    def at(cls, incarnation: int, offset: int, tails: int) -> Position:
        """Before the first message is read."""
        return cls(incarnation, offset, incarnation, offset, tails)

    @property
    def settled(self) -> Position:
        """The same with nothing in its batch."""
        begins = {"from_incarnation": self.incarnation, "from_offset": self.offset}
        return replace(self, **begins, missing=0, through=())


Positions = dict[Key, Position]


Histories = dict[tuple[str, str], str]
"""By cluster and broker."""


def document_of(positions: Mapping[Key, Position], histories: Histories) -> dict[str, Any]:
    """As Spark's checkpoint has it: by cluster, broker, topic and queue."""
    found: dict[str, Any] = {}
    for key, position in sorted(positions.items()):
        history = histories.get((key.cluster, key.broker), "")
        brokers = found.setdefault(key.cluster, {})
        broker = brokers.setdefault(key.broker, {"history": history, "topics": {}})
        broker["topics"].setdefault(key.topic, {})[str(key.queue_id)] = as_object(Position).encode(
            position
        )
    return found


def positions_of(document: Any) -> Positions:  # noqa: ANN401 (JSON values)
    """Undo ``document_of``."""
    try:
        return {
            Key(cluster, broker, topic, int(queue)): as_object(Position).decode(fields)
            for cluster, brokers in document.items()
            for broker, said in brokers.items()
            for topic, queues in said["topics"].items()
            for queue, fields in queues.items()
        }
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(f"the checkpoint has no positions of ours: {error!r}") from error


def histories_of(document: Any) -> Histories:  # noqa: ANN401 (JSON values)
    """Of which histories the positions are that ``document_of`` has written."""
    try:
        return {
            (cluster, name): broker["history"]
            for cluster, brokers in document.items()
            for name, broker in brokers.items()
        }
    except (AttributeError, LookupError, TypeError) as error:
        raise DataError(f"the checkpoint has no positions of ours: {error!r}") from error


def require_same(before: Histories, now: Histories) -> None:
    """Refuse positions of other histories than the tier has now."""
    for (cluster, broker), history in sorted(before.items()):
        present = now.get((cluster, broker), history)
        if history and present != history:
            raise DataError(
                f"the checkpoint's positions in {cluster}/{broker} are of the history {history}, and the tier's is"
                f" {present}: it was wiped and begun anew, or rebuilt without its journal",
                do="start the stream with a new checkpoint; its option start says where",
            )


def earliest(queue: Incarnations) -> Position:
    """Before the first message that a queue has, in the tier or the archive; behind all of it when it has none."""
    for number in sorted(queue.incarnations):
        incarnations = queue.incarnations[number]
        incarnation = incarnations[-1]
        firsts = [one.start for one in islice(queue.kept_in_turn(number), 1)]
        behind = (part for part in incarnation.parts() if part.queue_end > incarnation.min_offset)
        firsts += [max(part.queue_offset, incarnation.min_offset) for part in islice(behind, 1)]
        if firsts:
            return Position.at(number, min(firsts), len(incarnations) - 1)
    return latest(queue)


def beginning(queue: Incarnations) -> Position:
    """Where a queue began, with all that has expired of it ahead: for one that came after the stream had begun."""
    first = min(queue.incarnations)
    incarnations = queue.incarnations[first]
    return Position.at(first, began(incarnations[-1]), len(incarnations) - 1)


def began(incarnation: Incarnation) -> int:
    """Where an incarnation began, a gap before its first message included; 0 unless surely nothing has expired."""
    parts = incarnation.parts()
    is_whole = parts[0].log_offset == 0 if parts else incarnation.log_end == 0
    first = min([incarnation.min_offset, *(gap.start for gap in incarnation.gaps)])
    return first if is_whole else 0


def latest(queue: Incarnations) -> Position:
    """Behind all that a queue has."""
    last = max(queue.incarnations)
    incarnations = queue.incarnations[last]
    return Position.at(last, queue.end_of(incarnations[-1]), len(incarnations) - 1)


def start_of(
    states: Mapping[Place, TierState],
    start: Any,  # noqa: ANN401 (JSON values)
    takes: Callable[[Key], bool] = lambda _key: True,
    archive: ArchiveState | None = None,
    isolation: Isolation | None = None,
) -> Positions:
    """Where a new stream begins; queues that are not named begin at their earliest message.

    It has every queue that is there: one that it has not came later, and is read from its own beginning.

    Args:
        start: ``earliest``, ``latest``, or by topic and queue an offset or one of these.

    Raises:
        InvalidError: It is none of these, or names several brokers' queues, or one that is not there.
    """
    if isinstance(start, str) and start in {EARLIEST, LATEST}:
        find = latest if start == LATEST else earliest
        every = queues_of(states, archive, isolation)
        return {one.key: find(one) for one in every if takes(one.key)}
    if not isinstance(start, dict) or len(states) > 1:
        raise InvalidError(
            f"a stream cannot start at {start!r:.80}" + (" of several brokers" * (len(states) > 1)),
            do='say earliest, latest, or {"topic": {"0": offset}} of one broker',
        )
    mine = [one for one in queues_of(states, archive, isolation) if takes(one.key)]
    known = {(one.key.topic, one.key.queue_id): one for one in mine}
    found = {one.key: earliest(one) for one in mine}
    for topic, queues in start.items():
        for queue, where in queues.items() if isinstance(queues, dict) else [("", queues)]:
            number = int(queue) if queue.isascii() and queue.isdigit() else -1
            if (topic, number) not in known:
                raise InvalidError(f"the tier has no queue {queue!r:.20} of topic {topic!r:.80}")
            one = known[topic, number]
            found[one.key] = _start(one, where, f"{topic}/{queue}")
    return found


def _start(queue: Incarnations, where: Any, name: str) -> Position:  # noqa: ANN401
    last = latest(queue)
    where = _OTHERS.get(where, where) if type(where) is int else where
    if where in {EARLIEST, LATEST}:
        return last if where == LATEST else earliest(queue)
    if type(where) is not int or not 0 <= where <= last.offset:
        raise InvalidError(f"a stream cannot start at offset {where!r:.40} of {name}")
    return Position.at(last.incarnation, where, last.tails)


# -- plans -----------------------------------------------------------------------------------------

AGAIN = "again"


@dataclass(frozen=True, slots=True)
class Rules:
    """What to do where a stream would lose or repeat messages."""

    on_gap: str = FAIL  # ``fail`` or ``skip``
    on_truncation: str = FAIL
    """``fail``; ``again``: what came in place of messages that were truncated is read too; ``skip``: only what
    comes behind them."""
    isolation: Isolation | None = None  # what is wished of Kafka's transactions


def base_of(queue: Incarnations, at: Position | None, rules: Rules) -> Position:
    """Where the next batch of a queue begins, with what was truncated dealt with.

    Raises:
        DataError: Messages that were read already have been truncated, and the rules say to fail.
    """
    if at is None:
        return beginning(queue)
    at, incarnations, key = at.settled, queue.incarnations, queue.key
    if at.incarnation not in incarnations:
        raise _stranger(key, f"incarnation {at.incarnation}")
    mine = incarnations[at.incarnation]
    main, tails = mine[-1], len(mine) - 1
    # They are never forgotten, but by a rebuild: which messages were read cannot be told any more.
    if tails < at.tails:
        raise _stranger(key, f"history in which its end was truncated {at.tails} times")
    cuts = [incarnation.cut_at for incarnation in mine[at.tails : -1]]
    low = min([*(cut for cut in cuts if cut < at.offset), main.commit_offset])
    if low >= at.offset:
        return replace(at, tails=tails)
    if rules.on_truncation == FAIL:
        raise DataError(
            f"the broker truncated messages of {key.topic}/{key.queue_id} from offset {low} on, and the stream has"
            f" read up to {at.offset}",
            do='.option("on-truncation", "again") reads what came in their place, "skip" goes on behind it',
        )
    if rules.on_truncation == AGAIN:
        return replace(at, offset=low, from_offset=low, tails=tails)
    end = min(at.offset, main.commit_offset)
    return replace(at, offset=end, from_offset=end, tails=tails, lost=at.lost + max(0, end - low))


def runs_of(queue: Incarnations, at: Position, until: Position) -> Iterator[OffsetRun]:
    """All that lies ahead of a position, in order, up to another; unpacked as it is asked for."""
    for incarnation, start, end in _incarnations_of(queue, at, until):
        kept = queue.kept_in_turn(incarnation.number, start, end)
        yield from runs_of_incarnation(incarnation, start, end, kept)


def _incarnations_of(
    queue: Incarnations, at: Position, until: Position
) -> Iterator[tuple[Incarnation, int, int]]:
    """The incarnations that count between two positions, with the offsets of each that lie there."""
    for number in sorted(n for n in queue.incarnations if at.incarnation <= n <= until.incarnation):
        incarnation = queue.incarnations[number][-1]
        start = at.offset if number == at.incarnation else began(incarnation)
        is_last = number == until.incarnation
        end = queue.end_of(incarnation)
        yield incarnation, start, min(end, until.offset) if is_last else end


class _Ahead:
    """What lies ahead in one queue. However much that is, only what is taken is unpacked, and for a look the first run."""

    def __init__(self, queue: Incarnations, base: Position, until: Position) -> None:
        self.queue = queue
        self.base = base
        self.count = sum(
            max(0, end - start) for _, start, end in _incarnations_of(queue, base, until)
        )
        self._runs = runs_of(queue, base, until)

    def weight(self, *, by_bytes: bool) -> int:
        """Offsets ahead; or bytes, if all were like the first that are there."""
        if not by_bytes:
            return self.count
        seen: list[OffsetRun] = []
        for run in self._runs:
            seen.append(run)
            if run.is_there:
                break
        self._runs = chain(seen, self._runs)
        first = seen[-1] if seen else None
        if first is None or not first.is_there:
            return 0
        return max(1, first.size_bytes * self.count // first.count)

    def take(self, amount: int | None, *, by_bytes: bool, least: bool) -> list[OffsetRun]:
        """As much as an amount of messages or bytes allows; what is not there costs nothing."""
        if amount is None:
            return list(self._runs)
        taken: list[OffsetRun] = []
        left, is_first = amount, least
        for run in self._runs:
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
    until: Mapping[Key, Position] | None = None,
    rows_max: int | None = None,
    bytes_max: int | None = None,
    archive: ArchiveState | None = None,
) -> Positions:
    """Where the next batch ends. ``start`` itself when there is nothing to read.

    Args:
        start: Where the last batch ended.
        rules: See ``Rules``.
        until: Where the stream is to end, by queue; others are not read. None: at what there is.
        rows_max: Messages at most; divided among queues by how many offsets lie ahead in each.
        bytes_max: Bytes of the commit log, about; one message at least. Divided by how many lie ahead, about: as if all
            messages of a queue were as large as its next.

    Raises:
        DataError: The rules say to fail; or the positions are of another tier.
    """
    ahead: dict[Key, _Ahead] = {}
    queues = {one.key: one for one in queues_of(states, archive, rules.isolation)}
    gone = next((key for key in start if key not in queues and takes(key)), None)
    if gone is not None:
        raise _stranger(gone, "such queue")
    ends = until if until is not None else {key: latest(one) for key, one in queues.items()}
    for key, one in queues.items():
        if key in ends and takes(key):
            ahead[key] = _Ahead(one, base_of(one, start.get(key), rules), ends[key])
    by_bytes = bytes_max is not None
    amounts = _amounts(list(ahead.values()), bytes_max if by_bytes else rows_max, by_bytes=by_bytes)
    most = max(range(len(amounts)), key=lambda number: amounts[number] or 0, default=-1)
    found: Positions = {}
    for number, (key, mine) in enumerate(ahead.items()):
        taken = mine.take(amounts[number], by_bytes=by_bytes, least=number == most)
        found[key] = _end(mine.queue, mine.base, taken, rules)
    same = all(key in start and start[key].settled == at.settled for key, at in found.items())
    return start if same else {**{key: at.settled for key, at in start.items()}, **found}


def _amounts(ahead: list[_Ahead], limit: int | None, *, by_bytes: bool) -> list[int | None]:
    """How much of each queue may be taken; None: all of it."""
    if limit is None:
        return [None] * len(ahead)
    weights = [one.weight(by_bytes=by_bytes) for one in ahead]
    total = sum(weights)
    if not by_bytes and total <= limit:
        return [None] * len(ahead)
    if by_bytes and 0 < total < limit:  # a guess: more may lie there
        return [weight * limit // total for weight in weights]
    return list(shares(weights, limit))


def _end(queue: Incarnations, base: Position, taken: list[OffsetRun], rules: Rules) -> Position:
    first = next((number for number, run in enumerate(taken) if not run.is_there), None)
    if first is not None and rules.on_gap != SKIP:
        if not first:
            gap, key = taken[0], queue.key
            raise DataError(
                f"the tier has no messages of {key.topic}/{key.queue_id} from offset {gap.start} to {gap.end}:"
                " they have expired, or never came there",
                do='.option("on-gap", "skip") goes on behind them',
            )
        taken = taken[:first]
    if not taken:
        return base
    missing = sum(run.count for run in taken if not run.is_there)
    last = taken[-1]
    tails = base.tails
    if last.incarnation != base.incarnation:
        tails = len(queue.incarnations[last.incarnation]) - 1
    starts = {run.incarnation: run.start for run in reversed(taken)}
    through = sorted((n, start) for n, start in starts.items() if n != base.incarnation)
    return replace(
        base,
        incarnation=last.incarnation,
        offset=last.end,
        tails=tails,
        missing=missing,
        lost=base.lost + missing,
        through=tuple(through),
    )


def _stranger(key: Key, what: str) -> DataError:
    return DataError(
        f"the checkpoint has a position of {key.topic}/{key.queue_id} of {key.cluster}/{key.broker}, and the tier has"
        f" no {what}: the checkpoint is of another tier, or this one was made anew",
        do="give the URL that the checkpoint was made with, or a new checkpoint; the options cluster and broker leave out"
        " brokers whose data was removed",
    )


@dataclass(frozen=True, slots=True)
class Batch:
    """What a batch reads."""

    offset_ranges: list[OffsetRange]  # by queue and offset
    files: list[Chosen]  # of the archive beside the tier
    short: dict[Key, int]  # offsets that were there when it was planned, and are no more, by queue


def batch_of(
    states: Mapping[Place, TierState],
    end: Positions,
    wanted: Selection,
    rules: Rules,
    takes: Callable[[Key], bool] = lambda _key: True,
    *,
    archive: ArchiveState | None = None,
) -> Batch:
    """What the batch that ends at some positions reads, by the tier and the archive as they are now.

    Raises:
        DataError: Less is there than when the batch was planned, and the rules say to fail; or a queue is gone.
        InvalidError: The batch has messages of a queue that is not read any more: they would be left out for good.
    """
    queues = {one.key: one for one in queues_of(states, archive, rules.isolation)}
    prefixes = prefixes_of(states)
    plan, short = ReadPlan([], {}), dict[Key, int]()
    for key, at in sorted(end.items()):
        if at == at.settled:
            continue
        if not takes(key):
            raise InvalidError(
                f"the batch that is to be done again has messages of {key.topic}/{key.queue_id} of {key.cluster}/"
                f"{key.broker}, which the options leave out now",
                do="start the stream once with the options that it had, until that batch is done",
            )
        begins = {at.from_incarnation: at.from_offset, **dict(at.through)}
        if key not in queues or begins.keys() - queues[key].incarnations.keys():
            raise _stranger(key, "such queue, or not the incarnation that is to be read")
        missing = 0
        for number, begin in sorted(begins.items()):
            history, span = _share(queues[key], number, begin, at)
            prefix = prefixes.get(key[:2], "")
            missing += take_history(plan, prefix, queues[key], history, span=span, wanted=wanted)
        if missing > at.missing:
            short[key] = missing - at.missing
            if rules.on_gap != SKIP:
                raise DataError(
                    f"the batch of {key.topic}/{key.queue_id} from offset {at.from_offset} to {at.offset} cannot be read"
                    f" as it was planned: {short[key]} of its messages have expired since",
                    do='.option("on-gap", "skip") reads what is left of it, and counts them',
                )
    return Batch(plan.offset_ranges, list(plan.files.values()), short)


def _share(
    queue: Incarnations, number: int, begin: int, at: Position
) -> tuple[tuple[int, int], tuple[int, int]]:
    """What a batch has of one incarnation: its history, as incarnation and ends truncated, and the offsets."""
    incarnations = queue.incarnations[number]
    main = incarnations[-1]
    if main.number == at.incarnation:
        return (main.number, at.tails), (begin, at.offset)
    return (main.number, len(incarnations) - 1), (begin, queue.end_of(main))


def charged(
    positions: Positions, *, lost: Mapping[Key, int], in_doubt: Mapping[Key, int]
) -> Positions:
    """Positions with more left out than they say; the same object if there is nothing."""
    if not lost and not in_doubt:
        return positions
    return {
        key: replace(
            at, lost=at.lost + lost.get(key, 0), in_doubt=at.in_doubt + in_doubt.get(key, 0)
        )
        for key, at in positions.items()
    }
