"""Goes through a queue of which something is damaged: what is sound comes out, and what is lost is named, all of it.

For callers that were told to go on past damage, and for those that want to know its extent before they give up. Damage costs
the messages of its block (``tiered.log.salvage``). Memory: a batch, and the section in which the damage lies.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from tiered.api.reading import read_for
from tiered.api.stores import backend_errors
from tiered.log.reader import QueueReader

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tiered.api.open_tier import OpenTier
    from tiered.api.reading import Span
    from tiered.log.decode import TierBatch
    from tiered.model import MessageQueue

_SHOWN: Final = 64
"""OffsetRanges that an error names; it is one line."""


class Lost(NamedTuple):
    """Queue offsets ``[start, end)`` that cannot be read, and what is damaged."""

    queue: MessageQueue
    start: int
    end: int
    what: str


def read_sound(
    tier: OpenTier, span: Span, group: str, batch_bytes: int, lost: list[Lost]
) -> Iterator[TierBatch]:
    """As ``read_for``, but that damage ends nothing: lost messages are holes of a batch, or in none, and are named.

    Args:
        batch_bytes: Of a batch, at most; where something is damaged a section at once.
        lost: What cannot be read is appended to it before what lies behind comes out.

    Raises:
        TieredStoreError: As ``read_for``; a ``DataError`` only where the journal contradicts itself.
    """
    reader = QueueReader(tier.store, tier.place.prefix, span.cursor)
    with backend_errors():
        yield from reader.past_damage(
            span.start,
            span.stop,
            lambda found: lost.extend(Lost(reader.queue, *one) for one in found.named),
            read=lambda at: read_for(tier, replace(span, start=at), group, batch_bytes),
        )


def find_lost(tier: OpenTier, spans: Sequence[Span], batch_bytes: int) -> list[Lost]:
    """All that cannot be read of some spans, by reading them."""
    lost: list[Lost] = []
    with tier.group() as group:
        for span in spans:
            for _ in read_sound(tier, span, group, batch_bytes, lost):
                pass
    return lost


def told(lost: Iterable[Lost]) -> str:
    """How many messages are lost, and where; for people."""
    every = sorted(lost)
    count = sum(one.end - one.start for one in every)
    places = [f"{one.queue} [{one.start}, {one.end})" for one in every[:_SHOWN]]
    more = f" and {len(every) - _SHOWN} ranges more" if len(every) > _SHOWN else ""
    return f"{count:,} messages in damaged blocks: {', '.join(places)}{more}"
