"""What people do to timers that lie in the tier: cancel one.

Beside a running writer or hand-over: neither lease nor epoch is taken; the entry is a guest's, and replay refuses what has
been handed over meanwhile.

An hour whose file is damaged cannot be looked through, and keeps no message of another hour from being cancelled.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from tiered.errors import DataError, InvalidError
from tiered.format.properties import UNIQ_KEY
from tiered.format.record import decode_record
from tiered.log.actions import action_of
from tiered.log.timers import HOUR_MS, FactsCopy, HourOffset, TimerCancel
from tiered.upkeep.workplace import journal_writer
from timer.dequeue import TimerReader, read_hours

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered.log.parts import TierState
    from tiered.upkeep.workplace import Workplace
    from timer.dequeue import Damaged, DueMessage

_LOG = logging.getLogger("tiered.timer")


def cancel(at: Workplace, msg_id: str) -> list[dict[str, Any]]:
    """Cancel all pending messages with a unique id. All hours are read until none is left.

    Returns:
        ``hour_ms``, ``due_timestamp_ms`` and ``queue_offset`` of each.

    Raises:
        InvalidError: There is none, or it is being handed over already.
        DataError: There is none in what can be read, and a file is damaged.
    """
    reader = TimerReader(at.store, at.prefix)
    reader.refresh()
    damaged: Damaged = {}
    hours = reader.state.timers.hours
    found = list(read_hours(hours, partial(_with_id, reader, msg_id), damaged))
    if not found:
        raise _absent(at, msg_id, damaged)
    for hour, error in damaged.items():
        _LOG.warning("hour %d was not looked through, its file is damaged: %s", hour, error)
    rows = tuple(HourOffset(one.due_ms // HOUR_MS, one.offset) for one in found)
    journal = journal_writer(at)
    journal.append([action_of(TimerCancel(rows))], check=lambda state: _require(state, rows))
    FactsCopy(at.store, at.prefix).keep(journal.state.timers, journal.number)
    return [
        {
            "hour_ms": one.due_ms // HOUR_MS * HOUR_MS,
            "due_timestamp_ms": one.due_ms,
            "queue_offset": one.offset,
        }
        for one in found
    ]


def _absent(at: Workplace, msg_id: str, damaged: Damaged) -> InvalidError | DataError:
    if damaged:
        return DataError(
            f"no message of the hours that can be read has the id {msg_id}, and {len(damaged)} cannot: "
            f"{damaged[min(damaged)].what}",
            where=at.store.url,
            do="`tiered verify URL --timers --deep` names what is damaged",
        )
    return InvalidError(
        f"no pending message has the id {msg_id}",
        where=at.store.url,
        do="`tiered timer ls URL --messages` lists them",
    )


def _with_id(reader: TimerReader, msg_id: str, hour: int) -> Iterator[DueMessage]:
    wanted = msg_id.encode()
    for one in reader.pending(hour):
        if wanted in one.record and decode_record(one.record, 0).properties.get(UNIQ_KEY) == msg_id:
            yield one


def _require(state: TierState, rows: tuple[HourOffset, ...]) -> None:
    for hour, offset in rows:
        if offset < state.timers.hours[hour].end:
            raise InvalidError(
                "it is too late: the hour in which it is due is being handed over",
                do="cancel it where it is delivered",
            )
