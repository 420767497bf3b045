"""Delay levels: a message that is to be delivered later is stored in the schedule topic, as a broker stores it.

**Contract.** ``delayed`` is pure: it says what to append. The store lists the schedule topic as a broker does, with the
time of delivery as tag code, so that a broker that starts on the directory delivers what is due. This store delivers
nothing itself. ``append`` never looks at the property ``DELAY``: a delivered message still bears it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tiered.errors import InvalidError
from tiered.format import properties as names
from tiered.local.topics import SCHEDULE_TOPIC
from tiered.store.brokerorder import broker_order

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tiered.store.messages import Message

DELAY_LEVELS: Final = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
"""A broker's own ``messageDelayLevel``."""
_UNITS_MS: Final = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_LEVEL: Final = re.compile(r"([0-9]+)([smhd])")


def parse_levels(text: str) -> tuple[int, ...]:
    """Milliseconds of each level, the first of level 1.

    Args:
        text: As of ``messageDelayLevel``: numbers with one of s, m, h, d, divided by blanks.

    Raises:
        InvalidError: It is not written so.
    """
    words = text.split()
    found = [level for level in map(_LEVEL.fullmatch, words) if level]
    if not words or len(found) < len(words):
        raise InvalidError(f"delay levels {text!r}", do='give them as "1s 5s 1m 2h"')
    return tuple(int(level[1]) * _UNITS_MS[level[2]] for level in found)


def delayed(message: Message, level: int, *, levels: str = DELAY_LEVELS) -> Message:
    """What is stored of a message that is to be delivered after a delay.

    Args:
        message: With the topic and queue where it is to be delivered.
        level: From 1; above the highest the highest is taken, as by a broker.
        levels: Of the broker that will deliver it.

    Raises:
        InvalidError: The level is below 1, or the message is a delayed one already.
    """
    highest = len(parse_levels(levels))
    if level < 1:
        raise InvalidError(f"delay level {level}: the first is 1")
    if message.topic == SCHEDULE_TOPIC:
        raise InvalidError("the message is a delayed one already")
    level = min(level, highest)
    found = {
        **message.properties,
        names.DELAY: str(level),
        names.REAL_TOPIC: message.topic,
        names.REAL_QUEUE_ID: str(message.queue_id),
    }
    return replace(
        message, topic=SCHEDULE_TOPIC, queue_id=level - 1, properties=broker_order(found)
    )


def delivery_ms(
    properties: Mapping[str, str], store_ms: int, delays_ms: tuple[int, ...]
) -> int | None:
    """When a record of the schedule topic is to be delivered, UTC; None: it names no level."""
    text = properties.get(names.DELAY, "")
    level = int(text) if text.isascii() and text.isdigit() else 0
    if level <= 0:
        return None
    return store_ms + delays_ms[min(level, len(delays_ms)) - 1]
