"""Which topics are tiered: not the broker's own, not light queues, not what cannot be told faithfully."""

from __future__ import annotations

from typing import Final

_SYSTEM: Final = frozenset(
    {
        "TBW102",
        "SCHEDULE_TOPIC_XXXX",
        "BenchmarkTest",
        "TRANS_CHECK_MAX_TIME_TOPIC",
        "SELF_TEST_TOPIC",
        "OFFSET_MOVED_EVENT",
        "CHECKPOINT_TOPIC",
    }
)
_SYSTEM_PREFIXES: Final = ("rmq_sys_", "RMQ_SYS_")
LIGHT_PREFIX: Final = "%LMQ%"
WHEEL_TOPIC: Final = "rmq_sys_wheel_timer"
SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"
TIMER_TOPICS: Final = frozenset({WHEEL_TOPIC, SCHEDULE_TOPIC})
"""Where a broker keeps messages that are due later: at any time, or after one of its delay levels."""


def reason_left_out(
    topic: str, *, cluster: str | None, broker: str | None, static: frozenset[str] = frozenset()
) -> str | None:
    """Why a topic is not tiered, or None when it is. Retry and dead-letter topics are tiered.

    Args:
        topic: Name as stored.
        cluster: The broker's cluster, whose name is a topic of its own; None: not known.
        broker: The broker's name, likewise.
        static: Static topics of this broker.
    """
    if topic.startswith(LIGHT_PREFIX):
        return "light queue: its messages are tiered with their topic"
    if topic in _SYSTEM or topic.startswith(_SYSTEM_PREFIXES):
        return "system topic"
    if topic.endswith("_REPLY_TOPIC"):
        return "system topic (replies)"
    if topic in {cluster, broker}:
        return "system topic (named as the cluster or broker)"
    if topic in static:
        return "static topic: its queue offsets here are not those that clients see"
    return None
