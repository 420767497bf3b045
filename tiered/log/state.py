"""The state of one broker's tier, as a pure function of its journal.

All values are immutable. ``TierMachine.apply`` is the one place that knows what the actions mean; reader, writer,
recovery, verify, gc and archive use it.

Replay is strict: a part or gap that does not begin exactly at its queue's commit offset and log end, or whose entry is not
of the generation that reigns, is not history; it is counted in ``refused_parts`` and changes nothing. A seal (or join) whose
parts are not the segment's own with neighbours joined changes nothing either, but is not counted: it may honestly come too
late, when the queue has begun anew or another has sealed the segment. So it is with a take_back or expire that does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tiered.errors import DataError, InvalidError
from tiered.format.consume_queue import ITEM_BYTES
from tiered.journal.checkpoint import FORMAT, FORMAT_MAX
from tiered.journal.entry import REIGN, Action, Entry, json_text
from tiered.keys import DATA_ROOTS, maker_of
from tiered.log.expiry import expired
from tiered.log.indexed import INDEX, after_index, is_of_use
from tiered.log.parts import (
    Gap,
    IndexObject,
    ObjectRange,
    Part,
    QueueLife,
    Segment,
    TierState,
    life_json,
    life_of,
    packs,
    part_json,
    part_of,
    queue_action,
)
from tiered.log.seal import is_joined, joined
from tiered.log.takeback import cut
from tiered.log.wellformed import check_action, check_ints, check_texts
from tiered.model import LogOffset, MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "Gap",
    "ObjectRange",
    "Part",
    "QueueLife",
    "Segment",
    "TierMachine",
    "TierState",
    "part_json",
    "part_of",
    "queue_action",
]


class TierMachine:
    """What the tier's actions mean. Stateless; see ``tiered.journal.reader.Machine``.

    ============= ============================================================================================
    action        fields besides ``do``, and ``topic queue_id incarnation`` for those of a queue
    ============= ============================================================================================
    reign         ``generation``, ``holder`` (with ``store``)
    part          ``segment`` (base log offset), ``part`` (see ``part_json``); a new segment rolls the one before
    seal          ``segment``, ``parts``: the segment's parts from now on (fewer, larger ones), sealed; when it is
                  the last, only the reigning writer may, since it would go on in it
    join          ``segment``, ``start``, ``parts``: the same for a row of neighbours, which become one segment; the
                  first begins at log offset ``segment`` and queue offset ``start``, the last ends where the parts end
    pack          as ``seal``, or with ``start`` as ``join``, where programs before compression could not read the parts
    gap           ``start``, ``end``, ``reason``: nothing of these offsets will come
    expire        ``life``, ``min_from``, ``min_to``: whole segments are given up, see ``tiered.log.expiry``; from
                  anybody, but an open segment only from the reigning writer
    quarantine    ``count``: so many records went into quarantine
    take_back     ``end``, ``was``, ``part``, ``reason``: see ``tiered.log.takeback``
    incarnation   ``start``, ``reason``: the queue begins anew (number 0: for the first time, with nothing in it yet)
    meta          ``store``: identity of the local store
    index         ``objects``: index objects that are new; ``drop``: keys of such as are given up first; see
                  ``tiered.log.indexed``; from anybody
    ============= ============================================================================================
    """

    def initial(self) -> TierState:
        """An empty tier."""
        return TierState()

    @property
    def data_roots(self) -> tuple[str, ...]:
        """See ``tiered.journal.reader.Guarded``."""
        return DATA_ROOTS

    def is_data(self, key: str) -> bool:
        """See ``tiered.journal.reader.Guarded``."""
        return maker_of(key) is not None

    def generation(self, state: TierState) -> int:
        """The reign."""
        return state.generation

    def history(self, state: TierState) -> str:
        """See ``tiered.journal.reader.Guarded``."""
        return state.history

    def apply(self, state: TierState, entry: Entry) -> TierState:
        """One step of history.

        Raises:
            InvalidError: An action of a newer version.
            DataError: An action that no writer of ours can have made.
        """
        work = _Work(state, dict(state.queues), entry)
        for action in entry.actions:
            try:
                _apply(work, action)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise DataError(
                    f"journal entry {entry.number} makes no sense: {error!r:.200}",
                    do="rebuild the journal with `tiered rebuild`",
                ) from error
        if any(action["do"] == "expire" for action in entry.actions):
            work.drop_useless_indexes()
        return replace(work.state, queues=work.queues, updated_ms=entry.time_ms)

    def dump(self, state: TierState) -> Any:  # noqa: ANN401 (JSON values)
        """For a checkpoint."""
        return {
            "generation": state.generation,
            "history": state.history,
            "writer": state.writer,
            "holder": dict(state.holder),
            "store": dict(state.store),
            "refused_parts": state.refused_parts,
            "updated_ms": state.updated_ms,
            "queues": [_queue_json(queue, lives) for queue, lives in state.queues.items()],
            **({"indexes": [one.row() for one in state.indexes]} if state.indexes else {}),
        }

    def dump_pieces(self, state: TierState) -> Iterator[bytes]:
        """For a checkpoint: one queue at a time."""
        rows = {"queues": (_queue_json(*item) for item in state.queues.items())}
        document = {**self.dump(replace(state, queues={})), **rows}
        for number, (name, value) in enumerate(sorted(document.items())):
            yield (b"," if number else b"{") + json_text(name) + b":"
            yield from _list_pieces(value) if name in rows else (json_text(value),)
        yield b"}"

    def checkpoint_format(self, state: TierState) -> int:
        """3 where compressed parts are named, so that a program that could not read them says so; else 2."""
        lives = (life for lives in state.queues.values() for life in lives)
        return FORMAT_MAX if any(packs(life.parts()) for life in lives) else FORMAT

    def load(self, document: Any) -> TierState:  # noqa: ANN401 (JSON values)
        """Undo ``dump``.

        Raises:
            ValueError: It is no dump (likewise ``LookupError`` and ``TypeError``).
        """
        numbers = (document["generation"], document["refused_parts"], document["updated_ms"])
        check_ints((*numbers, *(queue[1] for queue in document["queues"])), "a state")
        texts = (document["history"], document["writer"])
        check_texts((*texts, *(queue[0] for queue in document["queues"])), "a state")
        if type(document["holder"]) is not dict or type(document["store"]) is not dict:
            raise ValueError("holder and store of a state are no objects")
        if not all(lives for _, _, lives in document["queues"]):
            raise ValueError("a queue has no life")
        return TierState(
            generation=document["generation"],
            history=document["history"],
            writer=document["writer"],
            holder=document["holder"],
            store=document["store"],
            refused_parts=document["refused_parts"],
            updated_ms=document["updated_ms"],
            queues={
                MessageQueue(topic, queue_id): tuple(life_of(life) for life in lives)
                for topic, queue_id, lives in document["queues"]
            },
            indexes=tuple(IndexObject.of(row) for row in document.get("indexes", ())),
        )


def _apply(work: _Work, action: Action) -> None:
    check_action(action)
    handler = _HANDLERS.get(action["do"])
    if handler is None:
        raise InvalidError(
            f"journal entry {work.entry.number} has the action {action['do']!r:.80}, unknown here",
            do="use a newer version of tiered",
        )
    handler(work, action)


@dataclass(slots=True)
class _Work:
    """A state under construction, private to one ``apply``."""

    state: TierState
    queues: dict[MessageQueue, tuple[QueueLife, ...]]
    entry: Entry

    @property
    def reigns(self) -> bool:
        """The entry was written under the present reign."""
        return self.entry.generation == self.state.generation > 0

    def refuse(self) -> None:
        self.state = replace(self.state, refused_parts=self.state.refused_parts + 1)

    def drop_useless_indexes(self) -> None:
        kept = tuple(one for one in self.state.indexes if is_of_use(one, self.queues))
        self.state = replace(self.state, indexes=kept)

    def life(self, action: Action) -> QueueLife | None:
        """The life that an action speaks of, if it is the present one."""
        lives = self.queues.get(_queue(action))
        life = lives[-1] if lives else None
        return life if life and life.incarnation == action["incarnation"] else None

    def put(self, action: Action, life: QueueLife) -> None:
        lives = self.queues.get(_queue(action), ())
        self.queues[_queue(action)] = (*lives[:-1], life)


def _reign(work: _Work, action: Action) -> None:
    if action["generation"] > work.state.generation:
        work.state = replace(
            work.state,
            generation=action["generation"],
            history=work.state.history or f"{work.entry.writer}-{work.entry.time_ms}",
            writer=work.entry.writer,
            holder=action["holder"],
        )


def _meta(work: _Work, action: Action) -> None:
    if work.reigns:
        work.state = replace(work.state, store=action["store"])


def _part(work: _Work, action: Action) -> None:
    part = part_of(action["part"])
    life = work.life(action) or _first_life(work, action, part.queue_offset)
    fits = life is not None and (part.queue_offset, part.log_offset) == (
        life.commit_offset,
        life.log_end,
    )
    whole = part.count > 0 and part.index.size_bytes == part.count * ITEM_BYTES
    segments = _placed(work, action, part, life) if life and fits and whole else None
    if life is None or segments is None or not work.reigns:
        work.refuse()
        return
    grown = replace(life, segments=segments, commit_offset=part.queue_end, log_end=part.log_end)
    work.put(action, grown)


def _placed(work: _Work, action: Action, part: Part, life: QueueLife) -> tuple[Segment, ...] | None:
    """The segments with the part in its place; None when it names a segment where it cannot lie."""
    base = LogOffset(action["segment"])
    last = life.segments[-1] if life.segments else None
    continues = last and not last.sealed and last.parts[-1].queue_end == part.queue_offset
    if last and continues and last.base_offset == base:  # behind a gap only a new segment may come
        return (*life.segments[:-1], replace(last, parts=(*last.parts, part)))
    if base != part.log_offset:  # (of two segments with one base the first has nothing but holes)
        return None
    rolled = (*life.segments[:-1], replace(last, sealed=True)) if last else ()
    return (*rolled, Segment(base, part.queue_offset, work.entry.time_ms, parts=(part,)))


def _first_life(work: _Work, action: Action, start: QueueOffset) -> QueueLife | None:
    """A queue that the journal has never met begins where its first part (or gap) begins."""
    if _queue(action) in work.queues or action["incarnation"] != 0:
        return None
    return QueueLife(0, start, start)


def _seal(work: _Work, action: Action) -> None:
    life = work.life(action)
    parts = tuple(part_of(document) for document in action["parts"])
    if life is None or not (work.reigns or work.entry.generation == 0):
        return
    segments = tuple(
        replace(
            segment,
            parts=parts,
            sealed=True,
            merged=segment.merged or len(parts) < len(segment.parts) or action["do"] == "pack",
        )
        if segment.base_offset == action["segment"]
        and (segment.sealed or work.reigns)
        and is_joined(segment.parts, parts)
        else segment
        for segment in life.segments
    )
    work.put(action, replace(life, segments=segments))


def _join(work: _Work, action: Action) -> None:
    life = work.life(action)
    parts = tuple(part_of(document) for document in action["parts"])
    if life is None or not (work.reigns or work.entry.generation == 0):
        return
    base, start = action["segment"], action["start"]
    segments = joined(life, parts, base=base, start=start, with_open=work.reigns)
    if segments is not None:
        work.put(action, replace(life, segments=segments))


def _pack(work: _Work, action: Action) -> None:
    (_join if "start" in action else _seal)(work, action)


def _gap(work: _Work, action: Action) -> None:
    gap = Gap(action["start"], action["end"], action["reason"])
    life = work.life(action) or _first_life(work, action, gap.start)
    fits = life is not None and gap.start == life.commit_offset and gap.end > gap.start
    if life is None or not fits or not work.reigns:
        work.refuse()
        return
    fresh = not life.segments  # nothing to read before the gap, so the queue begins behind it
    work.put(
        action,
        replace(
            life,
            gaps=(*life.gaps, gap),
            commit_offset=gap.end,
            min_offset=gap.end if fresh else life.min_offset,
        ),
    )


def _take_back(work: _Work, action: Action) -> None:
    life = work.life(action)
    if life is None or not work.reigns:
        work.refuse()
        return
    divided = cut(
        life,
        end=QueueOffset(action["end"]),
        was=QueueOffset(action["was"]),
        head=part_of(action["part"]) if action["part"] else None,
        reason=action["reason"],
    )
    if divided:
        queue = _queue(action)
        work.queues[queue] = (*work.queues[queue][:-1], *divided)


def _expire(work: _Work, action: Action) -> None:
    lives = work.queues.get(_queue(action), ())
    at = action["life"]
    if not 0 <= at < len(lives) or lives[at].incarnation != action["incarnation"]:
        return
    left = expired(lives[at], action, with_open=work.reigns)
    if left and (work.reigns or work.entry.generation == 0):
        work.queues[_queue(action)] = (*lives[:at], left, *lives[at + 1 :])


def _index(work: _Work, action: Action) -> None:
    if work.reigns or work.entry.generation == 0:
        changed = after_index(work.state.indexes, work.queues, action)
        if changed:
            work.state = replace(work.state, indexes=changed[0])
            work.queues.update(changed[1])


def _quarantine(work: _Work, action: Action) -> None:
    life = work.life(action)
    if life and work.reigns:
        work.put(action, replace(life, quarantined=life.quarantined + action["count"]))


def _incarnation(work: _Work, action: Action) -> None:
    queue = _queue(action)
    lives = work.queues.get(queue, ())
    number = lives[-1].incarnation + 1 if lives else 0
    if lives and action["incarnation"] == 0:
        return  # it was to say where the queue begins, and a part was faster
    if action["incarnation"] != number or not work.reigns:
        work.refuse()
        return
    ended = (*lives[:-1], replace(lives[-1], ended=action["reason"])) if lives else ()
    start = QueueOffset(action["start"])
    work.queues[queue] = (*ended, QueueLife(number, start, start))


_HANDLERS = {
    REIGN: _reign,
    "meta": _meta,
    "part": _part,
    "seal": _seal,
    "join": _join,
    "pack": _pack,
    "gap": _gap,
    "take_back": _take_back,
    "expire": _expire,
    "quarantine": _quarantine,
    INDEX: _index,
    "incarnation": _incarnation,
}


def _queue_json(queue: MessageQueue, lives: Iterable[QueueLife]) -> list[Any]:
    return [queue.topic, queue.queue_id, [life_json(life) for life in lives]]


def _list_pieces(values: Iterable[Any]) -> Iterator[bytes]:
    yield b"["
    for number, value in enumerate(values):
        yield (b"," if number else b"") + json_text(value)
    yield b"]"


def _queue(action: Action) -> MessageQueue:
    return MessageQueue(action["topic"], action["queue_id"])
