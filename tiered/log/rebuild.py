"""Proposes a tier's state again from what its bundles say of their sections. Pure.

``propose`` takes each section for a candidate, and chooses, life by life, the candidates that make a chain. Where they
overlap, the newest wins, by generation and then by the sequence in which its writer made the bundle:

* a newer writer knew the history when it began, so what an older one made and it made again was not history;
* a merged section is made after those that it replaces, and says the same (but for one that came too late, of what was
  taken back meanwhile: ``rebuild_chain._Late``);
* a section made again because nobody knew what became of the first try is made after it.

What is not chosen is unused, and a bundle with nothing else an orphan. Where queue offsets go on and log offsets do not, or
both jump, bytes are lost: a ``Loss``. Where queue offsets jump and log offsets go on, a gap was recorded, or items without a
message are lost: a gap. What a merge found taken back becomes a life that has ended, as it was.

``known`` is what the readable beginning of the journal says. It settles what objects can't tell: which parts an older reign
had made in vain, what had expired or been taken back, reasons of gaps, times, and the local store's identity.

Not told by bundles, so lost with the journal: the reason of a gap, gaps before the first and behind the last message, lives
and queues without a message, why a life ended, whether the last segment was sealed, tails that were taken back and not
written again (history again, unless they had been merged), when a segment was made (the time at which the store got its
first bundle stands for it).

The key index is given up: without the journal nobody can tell whether a tail that it covers was taken back and written
anew. The next writer, or ``tiered rebuild --index``, makes it again.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tiered.log.named import named_bundles
from tiered.log.parts import Part, QueueLife, TierState
from tiered.log.rebuild_chain import (
    Candidates,
    Present,
    choose,
    choose_tail,
    known_candidates,
    known_life,
)
from tiered.log.rebuild_life import Loss, build_life, build_tails
from tiered.log.takeback import is_tail
from tiered.model import QueueOffset

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tiered.log.rebuild_chain import LifeKey, Read
    from tiered.log.tables import Tabled
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
        orphans: Keys of bundles that it does not name.
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
    tabled: Sequence[Tabled],
    known: TierState,
    *,
    sizes: Mapping[str, int],
    quarantined: Mapping[LifeKey, int],
    read: Read,
    generations: Iterable[int] = (),
) -> Proposal:
    """Make the state that the bundles allow.

    Args:
        tabled: Every bundle whose table, or some of whose sections, could be read.
        known: What the readable beginning of the journal says; the initial state when nothing of it is readable.
        sizes: Of every bundle, by its key.
        quarantined: Offsets in quarantine, by queue and life.
        read: See ``choose``.
        generations: Of other objects that writers have made.
    """
    candidates, present = Candidates(tabled), Present(tabled, sizes)
    tails, of_tails = _tails(known, present)
    made = [one.said.object_id.generation for one in tabled]
    proposal = Proposal(replace(known, generation=max([known.generation, *generations, *made])))
    queues: dict[MessageQueue, list[QueueLife]] = defaultdict(list)
    lives = {(queue, life.incarnation) for queue, all_of in known.queues.items() for life in all_of}
    for queue, incarnation in sorted(candidates.lives() | lives):
        key = (queue, incarnation)
        some = [
            one._replace(taken_back=True) if _section(one.part) in of_tails else one
            for one in candidates.of(key)
        ]
        some += known_candidates(known, key, present)
        chain = choose(some, queue, incarnation, known, read)
        built = build_life(chain, queue, incarnation, known_life(known, queue, incarnation))
        proposal.losses += built.losses
        proposal.notes += built.notes
        if built.life is not None and _skip(queues[queue], incarnation):
            count = max(quarantined.get(key, 0), built.life.quarantined)
            mine = tails[key]
            told = choose_tail(some, [part for tail in mine for part in tail.parts()])
            queues[queue] += [*mine, *build_tails(told, incarnation, UNKNOWN_END)]
            queues[queue].append(replace(built.life, quarantined=count))
    proposal.state = replace(
        proposal.state,
        queues={queue: _ended(lives) for queue, lives in queues.items() if lives},
        indexes=(),
    )
    proposal.orphans = sorted(sizes.keys() - named_bundles(proposal.state).keys())
    return proposal


def _section(part: Part) -> tuple[str, int]:
    return part.bundle.key, part.section.start


def _tails(
    known: TierState, present: Present
) -> tuple[dict[LifeKey, list[QueueLife]], set[tuple[str, int]]]:
    """What brokers took back, and the sections that only such tails name."""
    tails: dict[LifeKey, list[QueueLife]] = defaultdict(list)
    mine: set[tuple[str, int]] = set()
    others: set[tuple[str, int]] = set()
    for queue, lives in known.queues.items():
        for number, life in enumerate(lives):
            is_over = is_tail(lives, number)
            (mine if is_over else others).update(map(_section, life.parts()))
            if is_over and all(map(present.has, life.parts())):
                tails[queue, life.incarnation].append(life)
    return tails, mine - others


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
