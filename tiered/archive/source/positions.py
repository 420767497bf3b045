"""How far a stream has come in each queue of a tier. Pure; ``tiered.archive.source.stream_plan`` says what is read next.

A position says where a batch ends *and* where it began, so a batch that is done again after a crash is the same one whatever
the stream's start, the tier's expiry or the broker have done meanwhile. With ``tails`` (how many ends of the incarnation the
broker had taken back) it also says which history the offsets are of: of messages that were taken back afterwards, a batch
that is done again still has the old ones, as long as the tier has them.

Each broker's positions bear the id of its tier's history (``TierState.history``): they mean nothing in another, such as that
of a tier that was wiped and begun anew, which would have other messages at the same offsets.

Offsets that have expired, or never came into the tier, are counted: those of the batch in ``missing``, those of the whole
stream in ``lost``. Whether a stream may go on over them is the caller's to say; it never does so in silence.

Spark writes a position down before its batch is read, so what expires in between is in the next position. Only a process
that dies after such a batch was done, and before the next one was planned, takes the number along (its log has it). Its
successor cannot know whether there was one: what has gone by now of a batch that somebody else has done is ``in_doubt``. So
what a stream has left out is never less than ``lost``, and never more than ``lost`` and ``in_doubt`` together.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from tiered.archive.source.stretches import incarnations
from tiered.errors import DataError, InvalidError
from tiered.log.wellformed import check_ints

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tiered.api.broker_place import Place
    from tiered.log.parts import QueueLife, TierState

EARLIEST = "earliest"
LATEST = "latest"


class Key(NamedTuple):
    """A queue of one broker."""

    cluster: str
    broker: str
    topic: str
    queue_id: int


@dataclass(frozen=True, slots=True)
class Position:
    """Where a batch ends in one queue, and where it began.

    Attributes:
        incarnation: Of the queue.
        offset: The next queue offset.
        from_incarnation: In which the batch began.
        from_offset: First queue offset of the batch.
        tails: Ends of ``incarnation`` that had been taken back, as the batch was planned.
        missing: Offsets of the batch without anything to read: expired, or never in the tier.
        lost: All that the stream has gone over so far.
        in_doubt: Offsets of batches done by a process that is no more, expired since they were planned: read, unless
            they went before that process came to them.
        through: Incarnations behind the first that the batch comes into, each with the offset at which it begins.
    """

    incarnation: int
    offset: int
    from_incarnation: int
    from_offset: int
    tails: int = 0
    missing: int = 0
    lost: int = 0
    in_doubt: int = 0
    through: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Position:
        """Undo ``asdict``, after JSON.

        Raises:
            ValueError: It is none (likewise ``TypeError``).
        """
        through = tuple((number, start) for number, start in fields.get("through", ()))
        found = cls(**{**fields, "through": through})
        numbers = [value for name, value in asdict(found).items() if name != "through"]
        check_ints([*numbers, *(n for pair in through for n in pair)], "a position")
        return found

    @classmethod
    def at(cls, incarnation: int, offset: int, tails: int) -> Position:
        """Before the first message is read."""
        return cls(incarnation, offset, incarnation, offset, tails)

    @property
    def settled(self) -> Position:
        """The same with nothing in its batch."""
        return replace(
            self,
            from_incarnation=self.incarnation,
            from_offset=self.offset,
            missing=0,
            through=(),
        )


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
        broker["topics"].setdefault(key.topic, {})[str(key.queue_id)] = asdict(position)
    return found


def positions_of(document: Any) -> Positions:  # noqa: ANN401 (JSON values)
    """Undo ``document_of``.

    Raises:
        DataError: It is none.
    """
    try:
        return {
            Key(cluster, broker, topic, int(queue)): Position.of(fields)
            for cluster, brokers in document.items()
            for broker, said in brokers.items()
            for topic, queues in said["topics"].items()
            for queue, fields in queues.items()
        }
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(f"the checkpoint has no positions of ours: {error!r}") from error


def histories_of(document: Any) -> Histories:  # noqa: ANN401 (JSON values)
    """Of which histories the positions are that ``document_of`` has written.

    Raises:
        DataError: It is no such document.
    """
    try:
        return {
            (cluster, name): broker["history"]
            for cluster, brokers in document.items()
            for name, broker in brokers.items()
        }
    except (AttributeError, LookupError, TypeError) as error:
        raise DataError(f"the checkpoint has no positions of ours: {error!r}") from error


def require_same(before: Histories, now: Histories) -> None:
    """Refuse positions of other histories than the tier has now.

    Raises:
        DataError: Some are.
    """
    for (cluster, broker), history in sorted(before.items()):
        present = now.get((cluster, broker), history)
        if present != history:
            raise DataError(
                f"the checkpoint's positions in {cluster}/{broker} are of the history {history}, and the tier's is"
                f" {present}: it was wiped and begun anew, or rebuilt without its journal",
                do="start the stream with a new checkpoint; its option start says where",
            )


def queues_of(
    states: Mapping[Place, TierState],
) -> Iterator[tuple[Key, dict[int, list[QueueLife]]]]:
    """Every queue and its lives by incarnation."""
    for place, state in sorted(states.items()):
        for queue, lives in sorted(state.queues.items()):
            key = Key(place.cluster, place.broker, queue.topic, queue.queue_id)
            yield key, incarnations(lives)


def earliest(lives: Mapping[int, list[QueueLife]]) -> Position:
    """Before the first message that a queue has; behind all of it when it has none."""
    for number in sorted(lives):
        life = lives[number][-1]
        for part in life.parts():
            if part.queue_end > life.min_offset:
                first = max(part.queue_offset, life.min_offset)
                return Position.at(number, first, len(lives[number]) - 1)
    return latest(lives)


def beginning(lives: Mapping[int, list[QueueLife]]) -> Position:
    """Where a queue began, with all that has expired of it ahead: for one that came after the stream had begun."""
    first = min(lives)
    return Position.at(first, began(lives[first][-1]), len(lives[first]) - 1)


def began(life: QueueLife) -> int:
    """Where a life began, a gap before its first message included; 0 unless it is certain that nothing has expired."""
    parts = life.parts()
    is_whole = parts[0].log_offset == 0 if parts else life.log_end == 0
    return min([life.min_offset, *(gap.start for gap in life.gaps)]) if is_whole else 0


def latest(lives: Mapping[int, list[QueueLife]]) -> Position:
    """Behind all that a queue has."""
    last = max(lives)
    return Position.at(last, lives[last][-1].commit_offset, len(lives[last]) - 1)


def start_of(
    states: Mapping[Place, TierState],
    start: Any,  # noqa: ANN401 (JSON values)
    takes: Callable[[Key], bool] = lambda _key: True,
) -> Positions:
    """Where a new stream begins; queues that are not named begin at their earliest message.

    It has every queue that is there: one that it has not came later, and is read from its own beginning.

    Args:
        states: Of the brokers.
        start: ``earliest``, ``latest``, or by topic and queue an offset or one of these.
        takes: Whether a queue is read.

    Raises:
        InvalidError: It is none of these, or names several brokers' queues, or one that is not there.
    """
    if isinstance(start, str) and start in {EARLIEST, LATEST}:
        find = latest if start == LATEST else earliest
        return {key: find(lives) for key, lives in queues_of(states) if takes(key)}
    if not isinstance(start, dict) or len(states) > 1:
        raise InvalidError(
            f"a stream cannot start at {start!r:.80}" + (" of several brokers" * (len(states) > 1)),
            do='say earliest, latest, or {"topic": {"0": offset}} of one broker',
        )
    known = {(key.topic, key.queue_id): (key, lives) for key, lives in queues_of(states)}
    found = {key: earliest(lives) for key, lives in known.values() if takes(key)}
    for topic, queues in start.items():
        for queue, where in queues.items() if isinstance(queues, dict) else [("", queues)]:
            number = int(queue) if queue.isascii() and queue.isdigit() else -1
            if (topic, number) not in known:
                raise InvalidError(f"the tier has no queue {queue!r:.20} of topic {topic!r:.80}")
            key, lives = known[topic, number]
            found[key] = _start(lives, where, f"{topic}/{queue}")
    return found


def _start(lives: Mapping[int, list[QueueLife]], where: Any, name: str) -> Position:  # noqa: ANN401
    last = latest(lives)
    if where in {EARLIEST, LATEST}:
        return last if where == LATEST else earliest(lives)
    if type(where) is not int or not 0 <= where <= last.offset:
        raise InvalidError(f"a stream cannot start at offset {where!r:.40} of {name}")
    return Position.at(last.incarnation, where, last.tails)
