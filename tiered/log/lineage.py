"""Where a queue's records come from, of stores that tell: leaders, transactions, and what these hide from readers.

Overview: what the records of a commit tell is found when it is handed on to be named (``grown``), in the order of its queue,
and stands in the entry that names them; so the journal knows of each queue which transactions are open at its commit offset,
and which were aborted below it. Nothing but the records decides: who has lost the journal finds the same by reading them.
Where the tier begins amid a log, or goes on behind a gap or a truncation, the local store says what is open there.

Isolation: a reader who wants what was committed reads up to the last stable offset (``stable_end``), and sees what was
aborted, like the node's own records, as holes (``hidden``). Kafka's consumers see the same.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from tiered.format.record_kind import Mark, RecordKind, epochs_of, has_mark
from tiered.local.interface import HoleReason, LeaderEpoch, OpenTransaction, RecordBatch
from tiered.log.actions import LineageGrown
from tiered.log.parts import AbortedRange, LineageFacts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from tiered.local.interface import Lineage
    from tiered.log.parts import Incarnation
    from tiered.model import MessageQueue

    Flags = npt.NDArray[np.bool_]


class Isolation(Enum):
    """What readers see of transactions; other records are not concerned."""

    COMMITTED = "read_committed"
    """Nothing that was aborted, and nothing behind the first transaction that is open."""
    UNCOMMITTED = "read_uncommitted"
    """All but the node's own records."""


# -- writing ---------------------------------------------------------------------------------------


def grown(
    queue: MessageQueue,
    incarnation: int,
    batches: Sequence[RecordBatch],
    before: LineageFacts | None,
    local: Lineage | None,
) -> LineageGrown | None:
    """What batches that are about to be named add to the lineage of their queue; None: nothing.

    Args:
        before: As of their first item; None: nothing is known, as where the tier begins.
        local: Of the local store, of the same place; None: it does not tell, or is not asked.
    """
    known = before or LineageFacts()
    # As it was when the first of them was read: by now the store may have another topic.
    read_of = next((batch.topic_id for batch in batches if batch.topic_id), "")
    topic_id = known.topic_id or read_of or (local.topic_id or "" if local else "")
    if local is not None and not (before and before.is_sure):
        known = replace(known, opened=_either(known.opened, local.open_transactions))
    epochs, now, aborted = _told(known, batches)
    is_same = before is not None and (True, topic_id, now) == (
        before.is_sure,
        before.topic_id,
        before.opened,
    )
    if is_same and not epochs and not aborted:
        return None
    return LineageGrown(queue, incarnation, topic_id, tuple(epochs), now, tuple(aborted))


def _either(
    known: Sequence[OpenTransaction], local: Sequence[OpenTransaction]
) -> tuple[OpenTransaction, ...]:
    """What is open by either word: of what was aborted since, the cleaner may have left the local store nothing."""
    firsts = {one.producer: one.first for one in known} | {one.producer: one.first for one in local}
    return tuple(OpenTransaction(*one) for one in sorted(firsts.items()))


def _told(
    known: LineageFacts, batches: Iterable[RecordBatch]
) -> tuple[list[LeaderEpoch], tuple[OpenTransaction, ...], list[AbortedRange]]:
    """Of batches behind what is known: new epochs, what is open behind them, and what was aborted in them."""
    opened = {one.producer: one.first for one in known.opened}
    epochs, aborted = list[LeaderEpoch](), list[AbortedRange]()
    last = known.epochs[-1].number if known.epochs else None
    end, doubtful = None, set[tuple[int, int]]()
    for batch in batches:
        if end is not None and batch.base_offset != end:
            doubtful |= opened.items()  # they may have ended in the gap
        end = batch.end_offset
        last = _new_epochs(batch, last, epochs)
        aborted += _follow(batch, opened)
    left = sorted(opened.items() - doubtful)
    return epochs, tuple(OpenTransaction(*one) for one in left), aborted


def found_in(known: LineageFacts | None, batches: Iterable[RecordBatch]) -> LineageFacts:
    """What records tell that lie behind those that are known of: how a lost journal learns it again.

    Not sure: of the topic, and of transactions whose records or ends the tier has not, the local store knows more.
    """
    before = known or LineageFacts()
    epochs, opened, aborted = _told(before, batches)
    epochs, aborted = [*before.epochs, *epochs], [*before.aborted, *aborted]
    return LineageFacts(
        before.topic_id, tuple(epochs), opened, is_sure=False, aborted=tuple(aborted)
    )


def _new_epochs(batch: RecordBatch, last: int | None, found: list[LeaderEpoch]) -> int | None:
    """Note where leaders begin; the last one's number."""
    where = np.flatnonzero(batch.sizes > 0)
    if batch.kind is RecordKind.ROCKETMQ or not len(where):
        return last
    numbers = epochs_of(batch.tag_codes[where])
    firsts = np.flatnonzero(np.append(True, numbers[1:] != numbers[:-1]))
    for at in firsts.tolist():
        number = int(numbers[at])
        if number != last and number >= 0:
            found.append(LeaderEpoch(number, int(batch.base_offset + where[at])))
            last = number
    return last


def _follow(batch: RecordBatch, opened: dict[int, int]) -> list[AbortedRange]:
    """What was aborted in a batch; ``opened``, by producer, is as of its begin, and then as of its end."""
    marked = has_mark(batch.tag_codes, Mark.TRANSACTIONAL | Mark.CONTROL) & (batch.sizes > 0)
    if batch.kind is not RecordKind.KAFKA or not marked.any():
        return []
    from tiered.format.kafka_batch import block_at  # noqa: PLC0415 (few topics have transactions)
    from tiered.format.kafka_log import follow_transactions  # noqa: PLC0415

    where = np.flatnonzero(marked)
    positions = batch.positions[where]
    where = where[np.append(True, positions[1:] != positions[:-1])]
    block = block_at(batch.data, batch.positions[where], batch.sizes[where].astype(np.int64))
    now, aborted = follow_transactions(opened, block)
    opened.clear()
    opened.update(now)
    return [AbortedRange(one.producer_id, one.first_offset, one.last_offset) for one in aborted]


def after_grown(incarnation: Incarnation, said: LineageGrown) -> Incarnation:
    """An incarnation that an entry tells more of."""
    return replace(incarnation, lineage=grown_to(incarnation.lineage, said))


def grown_to(before: LineageFacts | None, said: LineageGrown) -> LineageFacts:
    """The facts with what was said added to them."""
    known = before or LineageFacts()
    epochs, aborted = (*known.epochs, *said.epochs), (*known.aborted, *said.aborted)
    return LineageFacts(said.topic_id, epochs, said.opened, is_sure=True, aborted=aborted)


def moved(facts: LineageFacts | None, end: int) -> LineageFacts | None:
    """The facts of a queue whose end was moved to ``end``: back, or on behind a gap.

    What is open there the local store will say. Until then it is taken for open that may be: more is hidden, not less.
    """
    if facts is None:
        return None
    aborted = [one for one in facts.aborted if one.first < end <= one.last]
    opened = {one.producer: one.first for one in aborted}
    opened |= {one.producer: one.first for one in facts.opened if one.first < end}
    return replace(
        facts,
        epochs=tuple(one for one in facts.epochs if one.start < end),
        opened=tuple(OpenTransaction(*one) for one in sorted(opened.items())),
        is_sure=False,
        aborted=tuple(one for one in facts.aborted if one.last < end),
    )


def expired_to(facts: LineageFacts | None, start: int) -> LineageFacts | None:
    """The facts of a queue whose minimum is ``start``."""
    if facts is None or not (facts.aborted or facts.epochs):
        return facts
    last = [one for one in facts.epochs if one.start <= start][-1:]
    return replace(
        facts,
        epochs=(*last, *(one for one in facts.epochs if one.start > start)),
        aborted=tuple(one for one in facts.aborted if one.last >= start),
    )


# -- reading ---------------------------------------------------------------------------------------


def stable_end(incarnation: Incarnation) -> int:
    """The last stable offset: up to where all transactions are decided."""
    facts, end = incarnation.lineage, incarnation.commit_offset
    return min((one.first for one in facts.opened), default=end) if facts else end


def hidden(batch: RecordBatch, aborted: Sequence[AbortedRange] | None) -> RecordBatch:
    """A batch as readers see it: what is not for them is holes; the bytes are the same.

    Args:
        aborted: What was aborted in its queue; None: that is not hidden.
    """
    if batch.kind is not RecordKind.KAFKA:
        return batch
    gone = has_mark(batch.tag_codes, Mark.CONTROL) & (batch.sizes > 0)
    if aborted:
        gone |= _are_aborted(batch, aborted)
    if not gone.any():
        return batch
    return replace(
        batch,
        sizes=np.where(gone, 0, batch.sizes).astype(np.int32),
        tag_codes=np.where(gone, int(HoleReason.HIDDEN), batch.tag_codes),
    )


def _are_aborted(batch: RecordBatch, aborted: Sequence[AbortedRange]) -> Flags:
    from tiered.format.block import bytes_at  # noqa: PLC0415 (few topics have transactions)
    from tiered.format.kafka_batch import HEADER  # noqa: PLC0415

    found = np.zeros(batch.count, np.bool_)
    marked = has_mark(batch.tag_codes, Mark.TRANSACTIONAL) & (batch.sizes > 0)
    where = np.flatnonzero(marked)
    near = [
        one for one in aborted if one.first < batch.end_offset and one.last >= batch.base_offset
    ]
    if not len(where) or not near:
        return found
    heads = bytes_at(batch.data, f"V{HEADER.itemsize}")[batch.positions[where]].view(HEADER)
    producers, offsets = heads["producer_id"].astype(np.int64), batch.base_offset + where
    for one in near:
        mine = (producers == one.producer) & (offsets >= one.first) & (offsets < one.last)
        found[where[mine]] = True
    return found
