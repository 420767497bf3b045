"""Proposes a tier's state again from what its data objects say of themselves. Pure.

``propose`` joins each index object with the commit-log object that it names (``log_key``, ``log_crc``) to a candidate, and
chooses, queue by queue and life by life, the candidates that make a chain. Where candidates overlap, the newest wins, by
generation and then by the sequence in which its writer made it:

* a newer writer knew the history when it began, so what an older one made and it made again was not history;
* a merged part is made after the parts that it replaces, and says the same;
* a part made again because nobody knew what became of the first try is made after it.

What is not chosen is an orphan. Where queue offsets go on and log offsets do not, or both jump, bytes are lost: a ``Loss``.
Where queue offsets jump and log offsets go on, a gap was recorded, or items without a message are lost: a gap.

``known`` is what the readable beginning of the journal says. It settles what objects can't tell: which parts an older reign
had made in vain, what had expired or been taken back, reasons of gaps, times, and the local store's identity.

Not told by objects, so lost with the journal: the reason of a gap, gaps before the first and behind the last message, lives
and queues without a message, why a life ended, whether the last segment was sealed (unless it was merged), tails that were
taken back and not written again, when a segment was made (the time at which the store got its first object stands for it).

The key index is given up: without the journal nobody can tell whether a tail that it covers was taken back and written
anew. The next writer, or ``tiered rebuild --index``, makes it again.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tiered.log.parts import Part, QueueLife, TierState
from tiered.log.rebuild_chain import add_known, choose, is_there, known_life, pair_up
from tiered.log.rebuild_life import Loss, build_life
from tiered.log.takeback import is_tail
from tiered.model import QueueOffset

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tiered.log.described import Described
    from tiered.log.rebuild_chain import Items, LifeKey
    from tiered.model import MessageQueue

EPOCH = 10**12
"""A rebuilt journal begins at the next multiple: beyond what a writer that we do not see may have used since."""
UNKNOWN_END = "unknown: the journal was rebuilt"
SKIPPED_MAX = 1000
"""So many lives of a queue may have left nothing; a number beyond is no life but garbage."""


@dataclass(slots=True)
class Proposal:
    """What a rebuilt journal would say.

    Attributes:
        state: The tier's state; its generation is the highest that any object shows.
        orphans: Keys of data objects that it does not name.
        losses: Where objects are missing; in ``state`` each is a gap.
        notes: What a person should know, a sentence each.
    """

    state: TierState
    orphans: list[str] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def parts(self) -> Iterator[Part]:
        """All parts that it names."""
        for lives in self.state.queues.values():
            for life in lives:
                yield from life.parts()


def propose(
    objects: Sequence[Described],
    known: TierState,
    *,
    quarantined: Mapping[LifeKey, int],
    items: Items,
    generations: Iterable[int] = (),
) -> Proposal:
    """Make the state that the objects allow.

    Args:
        objects: Every commit-log and consume-queue object that could be read.
        known: What the readable beginning of the journal says; the initial state when nothing of it is readable.
        quarantined: Offsets in quarantine, by queue and life.
        items: See ``choose``.
        generations: Of other objects that writers have made.
    """
    by_key = {found.key: found for found in objects}
    tails, tail_keys = _tails(known, by_key)
    candidates = pair_up(objects, tail_keys)
    add_known(candidates, known, by_key)
    made = [one.said.object_id.generation for one in objects]
    proposal = Proposal(replace(known, generation=max([known.generation, *generations, *made])))
    queues: dict[MessageQueue, list[QueueLife]] = defaultdict(list)
    lives = {(queue, life.incarnation) for queue, all_of in known.queues.items() for life in all_of}
    for queue, incarnation in sorted(candidates.keys() | lives):
        before = known_life(known, queue, incarnation)
        chain = choose(candidates.get((queue, incarnation), ()), queue, incarnation, known, items)
        built = build_life(chain, queue, incarnation, before)
        proposal.losses += built.losses
        proposal.notes += built.notes
        if built.life is not None and _skip(queues[queue], incarnation):
            count = max(quarantined.get((queue, incarnation), 0), built.life.quarantined)
            queues[queue] += tails[queue, incarnation]
            queues[queue].append(replace(built.life, quarantined=count))
    proposal.state = replace(
        proposal.state,
        queues={queue: _ended(lives) for queue, lives in queues.items() if lives},
        indexes=(),
    )
    named = {place.key for part in proposal.parts() for place in (part.log, part.index)}
    proposal.orphans = sorted(one.key for one in objects if one.key not in named)
    return proposal


def _tails(
    known: TierState, objects: Mapping[str, Described]
) -> tuple[dict[LifeKey, list[QueueLife]], set[str]]:
    """What brokers took back, and the keys of indexes that only such tails name."""
    tails: dict[LifeKey, list[QueueLife]] = defaultdict(list)
    keys: set[str] = set()
    others: set[str] = set()
    for queue, lives in known.queues.items():
        for number, life in enumerate(lives):
            is_over = is_tail(lives, number)
            (keys if is_over else others).update(part.index.key for part in life.parts())
            if is_over and all(is_there(objects, part) for part in life.parts()):
                tails[queue, life.incarnation].append(life)
    return tails, keys - others


def _skip(lives: list[QueueLife], incarnation: int) -> bool:
    """Add empty lives where no object is left, so that numbers stay what they are; False when it is nonsense."""
    following = lives[-1].incarnation + 1 if lives else 0
    if incarnation - following > SKIPPED_MAX:
        return False
    zero = QueueOffset(0)
    lives += [QueueLife(number, zero, zero) for number in range(following, incarnation)]
    return True


def _ended(lives: Sequence[QueueLife]) -> tuple[QueueLife, ...]:
    """All but the last have ended, and all but the last segment of each is sealed."""
    before = [replace(life, ended=life.ended or UNKNOWN_END, indexed=()) for life in lives[:-1]]
    return (*before, replace(lives[-1], ended="", indexed=()))
