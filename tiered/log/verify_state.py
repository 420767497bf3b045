"""Whether the journal's state is consistent in itself. Pure."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from tiered import keys
from tiered.errors import DataError
from tiered.log.parts import check_rows
from tiered.log.takeback import is_tail
from tiered.log.verify_report import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered.log.parts import Bundle, QueueLife, Segment, TierState
    from tiered.model import MessageQueue


def check_state(state: TierState) -> Iterator[Problem]:
    """Every contradiction in a state: parts, segments, offsets, lives."""
    for queue, lives in state.queues.items():
        for number, life in enumerate(lives):
            where = f"{queue} incarnation {life.incarnation}"
            details = [*_check_life(life), *_check_parts(queue, life)]
            expected = number - sum(is_tail(lives, before) for before in range(number))
            if life.incarnation != expected:
                details.append(f"it is the life number {expected} of its queue")
            if is_tail(lives, number) != (0 <= life.cut_at <= life.min_offset):
                details.append(
                    f"it was cut off at {life.cut_at}, and its minimum is {life.min_offset}"
                )
            if bool(life.ended) != (number < len(lives) - 1):
                details.append("only the last life of a queue may go on")
            yield from (Problem("state", where, detail) for detail in details)


def _check_life(life: QueueLife) -> Iterator[str]:
    if not life.min_offset <= life.commit_offset:
        yield f"minimum {life.min_offset} is above the commit offset {life.commit_offset}"
    for segment in life.segments[:-1]:
        if not segment.sealed:
            yield f"segment {segment.base_offset} is not the last, and is not sealed"
    for number, segment in enumerate(life.segments):
        yield from _check_segment(segment, may_be_cut=bool(life.ended) and number == 0)
    yield from _check_order(life)


def _check_segment(segment: Segment, *, may_be_cut: bool) -> Iterator[str]:
    """A segment that the broker took back in part keeps its name, and may begin later (``tiered.log.takeback``)."""
    if not segment.parts:
        yield f"segment {segment.base_offset} has no part"
        return
    first, base = segment.parts[0], (segment.base_offset, segment.base_queue_offset)
    place = first.log_offset, first.queue_offset
    if place != base and not (may_be_cut and place[0] >= base[0] and place[1] > base[1]):
        yield f"segment {segment.base_offset} does not begin with its first part"
    for one, two in pairwise(segment.parts):
        if one.queue_end != two.queue_offset:
            yield f"between queue offsets {one.queue_end} and {two.queue_offset} of one segment"


def _check_order(life: QueueLife) -> Iterator[str]:
    """Parts and gaps must fill the queue, parts the commit log, without hole or overlap."""
    spans = [(part.queue_offset, part.queue_end) for part in life.parts()]
    spans += [(gap.start, gap.end) for gap in life.gaps]
    for (_, one_end), (two_start, _) in pairwise(sorted(spans)):
        if one_end != two_start:
            yield f"queue offsets go from {one_end} to {two_start}"
    for one, two in pairwise(life.parts()):
        is_gap = (
            one.queue_end != two.queue_offset
        )  # where a rebuilt journal lost bytes, offsets jump
        if one.log_end > two.log_offset or (one.log_end < two.log_offset and not is_gap):
            yield f"log offsets go from {one.log_end} to {two.log_offset}"
    if spans and max(spans)[1] != life.commit_offset:
        yield f"the commit offset is {life.commit_offset}, the last part or gap ends at {max(spans)[1]}"
    last = next(reversed(life.parts()), None)
    if last and last.log_end != life.log_end:
        yield f"the log end is {life.log_end}, the last part ends at {last.log_end}"


def _check_parts(queue: MessageQueue, life: QueueLife) -> Iterator[str]:
    try:
        check_rows(life.parts().rows)
    except ValueError as error:
        yield str(error)
    bundles = {bundle.key: bundle for bundle in life.parts().bundles}
    for bundle in bundles.values():
        yield from _check_key(bundle, queue, life)
    for part in life.parts():
        name = f"the part at queue offset {part.queue_offset}"
        place, bundle = part.section, part.bundle
        try:
            place.check(where=bundle.key)
        except DataError as error:
            yield f"{name}: {error.what}"
        if place.start + place.size_bytes > bundle.size_bytes:
            yield f"{name} lies behind the end of its bundle"


def _check_key(bundle: Bundle, queue: MessageQueue, life: QueueLife) -> Iterator[str]:
    said = keys.parse_data_key("", bundle.key)
    if said is None or said.kind == "quarantine":
        yield f"{bundle.key!r} is no key of a bundle"
    elif (
        (said.level >= 0 and said.level != bundle.level)
        or (said.kind == "topic" and said.topic != queue.topic)
        or (said.kind == "queue" and (said.queue, said.incarnation) != (queue, life.incarnation))
    ):
        yield f"the bundle {bundle.key!r} is named for others, level {bundle.level}"
