"""The state of one broker's tier, as a pure function of its journal.

All values are immutable. ``TierMachine.apply`` is the one place that knows what the actions mean; reader, writer,
recovery, verify, gc and archive use it.

Replay is strict: a part or gap that does not begin exactly at its queue's commit offset and log end, or whose entry is not
of the present epoch, is not history; it is counted in ``refused_parts`` and changes nothing. A merge of parts that
are not there any more changes nothing either, but is not counted: it may honestly come too late, when the queue has begun
anew or some of it has expired. So it is with a truncate or expire that does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from tiered.errors import OtherVersionError
from tiered.journal.entry import EPOCH, Action, Entry, json_members, json_text
from tiered.journal.replay import UnknownActionError
from tiered.keys import DATA_ROOTS, maker_of
from tiered.log.bundles import decode_numbers, named_sections
from tiered.log.expiry import expired
from tiered.log.indexed import INDEX, after_index, is_of_use
from tiered.log.merge import replace_run
from tiered.log.parts import (
    Bundle,
    Gap,
    IndexObject,
    Part,
    Parts,
    QueueLife,
    Segment,
    TierState,
    decode_columns,
    encode_columns,
    life_json,
    life_of,
    passes_of,
    queue_action,
)
from tiered.log.timers import TIMER, TimerFacts, after_timer, hour_queue
from tiered.log.truncation import Head, cut, is_tail
from tiered.log.wellformed import check_action, check_ints, check_texts
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tiered.log.bundles import NamedSections, SectionStretch

__all__ = [
    "Bundle",
    "Gap",
    "Part",
    "Parts",
    "QueueLife",
    "Segment",
    "TierMachine",
    "TierState",
    "queue_action",
]


class TierMachine:
    """What the tier's actions mean. Stateless; see ``tiered.journal.replay.Machine``.

    ============= ============================================================================================
    action        fields besides ``do``, and ``topic queue_id incarnation`` for those of a queue
    ============= ============================================================================================
    epoch         ``epoch``, ``holder`` (with ``store``)
    part          ``bundles``: what became durable, see ``tiered.log.bundles``; a part with a new segment rolls the
                  one before
    merge         ``bundles``; ``lives`` and ``runs``: for each of their sections the number of its life and what it
                  takes the place of (``tiered.log.merge.fingerprint``). From the present writer; of segments that
                  are sealed from anybody
    compacted     ``bundles``, ``lives``, ``runs`` as of a merge, of messages of which some are holes now; and ``passes``:
                  rows of topic, queue id, number of the life, its passes from now on. All of it holds, or nothing is done
    seal          ``segment``: base log offset of the last one, which takes no more parts
    gap           ``start``, ``end``, ``reason``: nothing of these offsets will come
    expire        ``life``, ``min_from``, ``min_to``: whole segments are given up, see ``tiered.log.expiry``; from
                  anybody, but an open segment only from the present writer
    quarantine    ``count``: so many records went into quarantine
    truncate     ``end``, ``was``, ``head``, ``reason``: see ``tiered.log.truncation``
    incarnation   ``start``, ``reason``: the queue begins anew (number 0: for the first time, with nothing in it yet)
    meta          ``store``: identity of the local store
    index         ``objects``: index objects that are new; ``drop``: keys of such as are given up first; see
                  ``tiered.log.indexed``; from anybody
    timer         see ``tiered.log.timers``
    ============= ============================================================================================
    """

    def initial(self) -> TierState:
        """An empty tier."""
        return TierState()

    @property
    def data_roots(self) -> tuple[str, ...]:
        return DATA_ROOTS

    def is_data(self, key: str) -> bool:
        return maker_of(key) is not None

    def epoch(self, state: TierState) -> int:
        """The epoch."""
        return state.epoch

    def history(self, state: TierState) -> str:
        return state.history

    def apply(self, state: TierState, entry: Entry) -> TierState:
        """One step of history.

        Raises:
            UnknownActionError: An action of another version.
            ValueError: One that no writer of this version can have made; ``LookupError``, ``TypeError`` and
                ``AttributeError`` mean the same.
        """
        work = _Work(state, dict(state.queues), entry)
        for action in entry.actions:
            _apply(work, action)
        if any(action["do"] == "expire" for action in entry.actions):
            work.drop_useless_indexes()
        return replace(work.state, queues=work.queues, updated_ms=entry.time_ms)

    def dump(self, state: TierState) -> Any:  # noqa: ANN401 (JSON values)
        """For a checkpoint."""
        queues = [_queue_json(queue, lives) for queue, lives in state.queues.items()]
        return {**self._dump_without_queues(state), "queues": queues}

    def _dump_without_queues(self, state: TierState) -> dict[str, Any]:
        lives = [life for lives in state.queues.values() for life in lives]
        return {
            "epoch": state.epoch,
            "history": state.history,
            "writer": state.writer,
            "holder": dict(state.holder),
            "store": dict(state.store),
            "refused_parts": state.refused_parts,
            "updated_ms": state.updated_ms,
            "parts": encode_columns(parts for life in lives for parts in life.tables()),
            **({"indexes": [one.row() for one in state.indexes]} if state.indexes else {}),
            **({"timers": state.timers.row()} if state.timers != TimerFacts() else {}),
        }

    def dump_pieces(self, state: TierState) -> Iterator[bytes]:
        """For a checkpoint: a few queues at a time."""
        rows = {"queues": (_queue_json(*item) for item in state.queues.items())}
        document = {**self._dump_without_queues(state), **rows}
        for number, (name, value) in enumerate(sorted(document.items())):
            yield (b"," if number else b"{") + json_text(name) + b":"
            yield from _list_pieces(value) if name in rows else (json_text(value),)
        yield b"}"

    def load(self, document: Any) -> TierState:  # noqa: ANN401 (JSON values)
        """Undo ``dump``.

        Raises:
            ValueError: It is not a dump; ``LookupError`` and ``TypeError`` mean the same.
        """
        return _state_of(sorted(dict(document).items()))

    def load_text(self, text: str) -> TierState:
        return _state_of(json_members(text, "queues"))


def _state_of(members: Iterable[tuple[str, Any]]) -> TierState:
    """A state of what it says, by name; queues may come one at a time: all at once, a million segments take 160 MiB."""
    found: dict[str, Any] = {}
    for name, value in members:
        found[name] = value
        if name == "parts":
            found[name] = _Taker(decode_columns(value))
        elif name == "queues":
            found[name] = _queues_of(value, found["parts"].take)
    check_ints((found["epoch"], found["refused_parts"], found["updated_ms"]), "a state")
    check_texts((found["history"], found["writer"]), "a state")
    if type(found["holder"]) is not dict or type(found["store"]) is not dict:
        raise ValueError("holder and store of a state are no objects")
    found["parts"].finish()
    return TierState(
        epoch=found["epoch"],
        history=found["history"],
        writer=found["writer"],
        holder=found["holder"],
        store=found["store"],
        refused_parts=found["refused_parts"],
        updated_ms=found["updated_ms"],
        queues=found["queues"],
        indexes=tuple(IndexObject.of(row) for row in found.get("indexes", ())),
        timers=TimerFacts.of(found["timers"]) if "timers" in found else TimerFacts(),
    )


def _queues_of(
    rows: Iterable[Any], take: Callable[[int], Parts]
) -> dict[MessageQueue, tuple[QueueLife, ...]]:
    found: dict[MessageQueue, tuple[QueueLife, ...]] = {}
    for topic, queue_id, lives in rows:
        check_texts((topic,), "a topic")
        check_ints((queue_id,), "a queue")
        if not lives:
            raise ValueError("a queue has no life")
        found[MessageQueue(topic, queue_id)] = tuple(life_of(life, take) for life in lives)
    return found


class _Taker:
    """Gives parts to segments in order."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._at = 0

    def take(self, count: int) -> Parts:
        start, self._at = self._at, self._at + count
        if self._at > len(self._parts):
            raise ValueError("segments have more parts than there are")
        return self._parts[start : self._at]

    def finish(self) -> None:
        if self._at != len(self._parts):
            raise ValueError("there are more parts than segments have")


def _apply(work: _Work, action: Action) -> None:
    check_action(action)
    _handler_of(action)(work, action)


def _handler_of(action: Action) -> Callable[[_Work, Action], None]:
    handler = _HANDLERS.get(action["do"])
    if handler is None:
        raise UnknownActionError(f"{action['do']!r:.80}")
    return handler


def require_known(entry: Entry, where: str) -> None:
    """Refuse an entry that says what this version does not understand, when it cannot be replayed.

    Raises:
        OtherVersionError: It is another version's.
    """
    try:
        for action in entry.actions:
            check_action(action)
            _handler_of(action)
            if action["do"] in _OF_BUNDLES:
                list(map(named_sections, action["bundles"]))
    except (UnknownActionError, LookupError, TypeError, ValueError) as error:
        raise OtherVersionError(
            f"journal entry {entry.number} has another form: {error}", where=where
        ) from error


@dataclass(slots=True)
class _Work:
    """A state under construction, private to one ``apply``."""

    state: TierState
    queues: dict[MessageQueue, tuple[QueueLife, ...]]
    entry: Entry

    @property
    def is_present(self) -> bool:
        """The entry was written in the present epoch."""
        return self.entry.epoch == self.state.epoch > 0

    @property
    def may_mend(self) -> bool:
        """The entry is of the present writer, or of a guest."""
        return self.is_present or self.entry.epoch == 0

    def refuse(self) -> None:
        self.state = replace(self.state, refused_parts=self.state.refused_parts + 1)

    def drop_useless_indexes(self) -> None:
        kept = tuple(one for one in self.state.indexes if is_of_use(one, self.queues))
        self.state = replace(self.state, indexes=kept)

    def life(self, action: Action) -> QueueLife | None:
        """The life that an action speaks of, if it is the present one."""
        return self.present(_queue(action), action["incarnation"])

    def present(self, queue: MessageQueue, incarnation: int) -> QueueLife | None:
        """The present life of a queue, if it is this one."""
        lives = self.queues.get(queue)
        life = lives[-1] if lives else None
        return life if life and life.incarnation == incarnation else None

    def put(self, queue: MessageQueue, life: QueueLife) -> None:
        lives = self.queues.get(queue, ())
        self.queues[queue] = (*lives[:-1], life)


def _epoch(work: _Work, action: Action) -> None:
    if action["epoch"] > work.state.epoch:
        work.state = replace(
            work.state,
            epoch=action["epoch"],
            history=work.state.history or f"{work.entry.writer}-{work.entry.time_ms}",
            writer=work.entry.writer,
            holder=action["holder"],
        )


def _meta(work: _Work, action: Action) -> None:
    if work.is_present:
        work.state = replace(work.state, store=action["store"])


def _parts(work: _Work, action: Action) -> None:
    for row in action["bundles"]:
        named = named_sections(row)
        for number, place in enumerate(named.places()):
            _part(work, named, number, place)


def _part(work: _Work, named: NamedSections, number: int, place: SectionStretch) -> None:
    """Take one part."""
    queue, incarnation = named.queues[number], named.incarnations[number]
    life = work.present(queue, incarnation) or _first_life(
        work, queue, incarnation, place.queue_offset
    )
    fits = life is not None and place.goes_on(life.commit_offset, life.log_end)
    part = named.parts[number : number + 1]
    segments = _placed(work, place, part, life) if life and fits else None
    if life is None or segments is None or not work.is_present:
        work.refuse()
        return
    work.put(queue, life.grown(segments, place.queue_end, place.log_end))


def _placed(
    work: _Work, place: SectionStretch, part: Parts, life: QueueLife
) -> tuple[Segment, ...] | None:
    """The segments with the part in its place; None when it names a segment where it cannot lie."""
    last = life.segments[-1] if life.segments else None
    continues = last and not last.sealed and last.parts.queue_end == place.queue_offset
    if last and continues and last.base_offset == place.segment:
        grown = Segment(
            last.base_offset,
            last.base_queue_offset,
            last.created_ms,
            parts=last.parts.followed_by(part),
        )
        return (*life.segments[:-1], grown)
    # Behind a gap only a new segment may come. (Of two segments with one base the first has nothing but holes.)
    if place.segment != place.log_offset:
        return None
    rolled = (*life.segments[:-1], replace(last, sealed=True)) if last else ()
    fresh = Segment(place.segment, place.queue_offset, work.entry.time_ms, parts=part)
    return (*rolled, fresh)


def _first_life(
    work: _Work, queue: MessageQueue, incarnation: int, start: QueueOffset
) -> QueueLife | None:
    """A queue that the journal has never met begins where its first part (or gap) begins."""
    if queue in work.queues or incarnation != 0:
        return None
    return QueueLife(0, start, start)


def _compacted(work: _Work, action: Action) -> None:
    before = dict(work.queues)
    if not _replace_all(work, action, compacts=True) or not _note_passes(work, action["passes"]):
        work.queues = before


def _note_passes(work: _Work, rows: list[Any]) -> bool:
    for topic, queue_id, at, passes in rows:
        queue = MessageQueue(topic, queue_id)
        lives = work.queues.get(queue, ())
        if not 0 <= at < len(lives):
            return False
        found = passes_of(passes)
        if found and found[-1].end > lives[at].commit_offset:
            return False
        work.queues[queue] = (*lives[:at], replace(lives[at], passes=found), *lives[at + 1 :])
    return True


def _merge(work: _Work, action: Action) -> None:
    _replace_all(work, action, compacts=False)


def _replace_all(work: _Work, action: Action, *, compacts: bool) -> bool:
    """Put each part in the place of its run; whether all of them fit."""
    bundles = [named_sections(row) for row in action["bundles"]]
    count = sum(len(named.parts) for named in bundles)
    lives, runs = (decode_numbers(action[name], count).tolist() for name in ("lives", "runs"))
    at, all_fit = 0, True
    for named in bundles:
        for number, part in enumerate(named.parts):
            place = lives[at], runs[at]
            all_fit &= _merge_one(work, named, number, part, place, compacts=compacts)
            at += 1
    return all_fit


def _merge_one(
    work: _Work,
    named: NamedSections,
    number: int,
    part: Part,
    place: tuple[int, int],
    *,
    compacts: bool,
) -> bool:
    at, was = place
    queue, segment = named.queues[number], named.segments[number]
    lives = work.queues.get(queue, ())
    incarnation = named.incarnations[number]
    if at >= len(lives) or lives[at].incarnation != incarnation or not work.may_mend:
        return False
    if is_tail(lives, at) != named.truncated[number]:
        return False  # truncated since: its section, from which a lost journal is rebuilt, does not say so
    made = replace_run(lives[at], part, segment, was, with_open=work.is_present, compacts=compacts)
    if made is not None:
        work.queues[queue] = (*lives[:at], made, *lives[at + 1 :])
    return made is not None


def _seal(work: _Work, action: Action) -> None:
    life = work.life(action)
    last = life.segments[-1] if life and life.segments else None
    if life and last and last.base_offset == action["segment"] and work.is_present:
        segments = (*life.segments[:-1], replace(last, sealed=True))
        work.put(_queue(action), replace(life, segments=segments))


def _gap(work: _Work, action: Action) -> None:
    gap = Gap(action["start"], action["end"], action["reason"])
    queue, incarnation = _queue(action), action["incarnation"]
    life = work.life(action) or _first_life(work, queue, incarnation, gap.start)
    fits = life is not None and gap.start == life.commit_offset and gap.end > gap.start
    if life is None or not fits or not work.is_present:
        work.refuse()
        return
    fresh = not life.segments  # nothing to read before the gap, so the queue begins behind it
    work.put(
        queue,
        replace(
            life,
            gaps=(*life.gaps, gap),
            commit_offset=gap.end,
            min_offset=gap.end if fresh else life.min_offset,
        ),
    )


def _truncate(work: _Work, action: Action) -> None:
    life = work.life(action)
    if life is None or not work.is_present:
        work.refuse()
        return
    divided = cut(
        life,
        end=QueueOffset(action["end"]),
        was=QueueOffset(action["was"]),
        head=Head.of(action["head"]) if action["head"] else None,
        reason=action["reason"],
        entry=work.entry.number,
    )
    if divided:
        queue = _queue(action)
        work.queues[queue] = (*work.queues[queue][:-1], *divided)


def _expire(work: _Work, action: Action) -> None:
    lives = work.queues.get(_queue(action), ())
    at = action["life"]
    if not 0 <= at < len(lives) or lives[at].incarnation != action["incarnation"]:
        return
    left = expired(lives[at], action, with_open=work.is_present)
    if left and work.may_mend:
        work.queues[_queue(action)] = (*lives[:at], left, *lives[at + 1 :])


def _index(work: _Work, action: Action) -> None:
    if work.may_mend:
        changed = after_index(work.state.indexes, work.queues, action)
        if changed:
            work.state = replace(work.state, indexes=changed[0])
            work.queues.update(changed[1])


def _timer(work: _Work, action: Action) -> None:
    def bounds(hour: int) -> tuple[int, int]:
        lives = work.queues.get(hour_queue(hour))
        return (lives[-1].min_offset, lives[-1].commit_offset) if lives else (0, 0)

    changed = after_timer(work.state.timers, action, bounds, is_present=work.is_present)
    if changed is not None:
        work.state = replace(work.state, timers=changed)
    elif "take" in action:
        work.refuse()


def _quarantine(work: _Work, action: Action) -> None:
    life = work.life(action)
    if life and work.is_present:
        work.put(_queue(action), replace(life, quarantined=life.quarantined + action["count"]))


def _incarnation(work: _Work, action: Action) -> None:
    queue = _queue(action)
    lives = work.queues.get(queue, ())
    number = lives[-1].incarnation + 1 if lives else 0
    if lives and action["incarnation"] == 0:
        return  # it was to say where the queue begins, and a part was faster
    if action["incarnation"] != number or not work.is_present:
        work.refuse()
        return
    ended = (*lives[:-1], replace(lives[-1], ended=action["reason"])) if lives else ()
    start = QueueOffset(action["start"])
    work.queues[queue] = (*ended, QueueLife(number, start, start))


_HANDLERS = {
    EPOCH: _epoch,
    "meta": _meta,
    "part": _parts,
    "merge": _merge,
    "compacted": _compacted,
    "seal": _seal,
    "gap": _gap,
    "truncate": _truncate,
    "expire": _expire,
    "quarantine": _quarantine,
    INDEX: _index,
    TIMER: _timer,
    "incarnation": _incarnation,
}


_OF_BUNDLES = frozenset(("part", "merge", "compacted"))


def _queue_json(queue: MessageQueue, lives: Iterable[QueueLife]) -> list[Any]:
    return [queue.topic, queue.queue_id, [life_json(life) for life in lives]]


_VALUES_A_PIECE = 16
"""One at a time costs half as much again; many would be much text at once where queues have many segments."""


def _list_pieces(values: Iterable[Any]) -> Iterator[bytes]:
    """A list as JSON text, a few values a piece."""
    left = iter(values)
    yield b"["
    for number, some in enumerate(iter(lambda: list(islice(left, _VALUES_A_PIECE)), [])):
        yield (b"," if number else b"") + json_text(some)[1:-1]
    yield b"]"


def _queue(action: Action) -> MessageQueue:
    return MessageQueue(action["topic"], action["queue_id"])
