"""The broker's JSON tables in ``config/``, read as they are: not atomic, and in two dialects.

A broker rewrites a table in place (or renames it away first), so a reader may find it missing, empty or cut off. Such
a file is read again a few times at once; then its ``.bak``, the content before the last change, takes its place and a
note says so.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from tiered.format.fastjson import loads
from tiered.format.timercheck import TimerCheck, decode_timer_check
from tiered.local.files import open_read_only, unreadable

if TYPE_CHECKING:
    from collections.abc import Mapping

_TRIES: Final = 3
TOPICS_FILE: Final = "config/topics.json"
STATIC_TOPICS_FILE: Final = "config/topicQueueMapping.json"
DELAY_OFFSETS_FILE: Final = "config/delayOffset.json"
TIMER_CHECK_FILE: Final = "config/timercheck"
GROUPS_FILE: Final = "config/subscriptionGroup.json"
OFFSETS_FILE: Final = "config/consumerOffset.json"
_SYNC_MEMBER: Final = "rmq_sys_SYNC_BROKER_MEMBER_"
_REVIVE: Final = "rmq_sys_REVIVE_LOG_"


@dataclass(frozen=True, slots=True)
class Topics:
    """What the topic tables tell.

    Attributes:
        names: Topics that exist; None when no table can be read (then nothing is known).
        batch: Those of them with a batch consume queue.
        static: Static topics: their queue offsets are not those that clients see.
        reserve_hours: How long messages of a topic are to be kept in a tier, hours; topics that do not say are left out.
        cluster: Name that the system topics bear, or None.
        broker: Likewise.
        notes: Lines for the report.
    """

    names: frozenset[str] | None = None
    batch: frozenset[str] = frozenset()
    static: frozenset[str] = frozenset()
    reserve_hours: Mapping[str, int] = field(default_factory=dict)
    cluster: str | None = None
    broker: str | None = None
    notes: tuple[str, ...] = field(default=())


def read_topics(root: str) -> Topics:
    """Read the topic tables of the store at ``root``."""
    notes: list[str] = []
    table = _table(read_table(root, TOPICS_FILE, notes), "topicConfigTable")
    static = _table(read_table(root, STATIC_TOPICS_FILE, notes), "topicQueueMappingInfoMap")
    names = None if table is None else frozenset(table)
    return Topics(
        names=names,
        batch=frozenset(name for name, config in (table or {}).items() if _is_batch(config)),
        static=frozenset(static or ()),
        reserve_hours={
            name: hours
            for name, config in (table or {}).items()
            if (hours := _reserve_hours(config)) > 0
        },
        cluster=_suffix(names, _REVIVE),
        broker=_suffix(names, _SYNC_MEMBER),
        notes=tuple(notes),
    )


@dataclass(frozen=True, slots=True)
class TimerProgress:
    """How far a broker is with its timers, by its own files, which may be some seconds old.

    Attributes:
        wheel: Of the timing wheel.
        delayed: By delay level, from 1, the queue offset behind what is delivered.
        notes: Lines for the report.
    """

    wheel: TimerCheck = field(default_factory=TimerCheck)
    delayed: Mapping[int, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_timer_progress(root: str) -> TimerProgress:
    """Read how far the broker of the store at ``root`` is with its timers; nothing where it has never had any.

    Raises:
        InvalidError: A file may not be read.
    """
    notes: list[str] = []
    wheel = decode_timer_check(read_text(f"{root}/{TIMER_CHECK_FILE}") or b"")
    table = _table(read_table(root, DELAY_OFFSETS_FILE, notes), "offsetTable") or {}
    offsets = {int(level): offset for level, offset in table.items() if level.isdigit()}
    sound = {level: offset for level, offset in offsets.items() if type(offset) is int}
    return TimerProgress(wheel, sound, tuple(notes))


def read_text(path: str, size_max: int = 1 << 28) -> bytes | None:
    """A whole small file, or None when it does not exist.

    Raises:
        InvalidError: It may not be read.
    """
    try:
        with os.fdopen(open_read_only(path), "rb") as file:
            return file.read(size_max)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise unreadable(path, error) from error


def read_table(root: str, name: str, notes: list[str]) -> dict[str, Any] | None:
    """A table of the store at ``root``, or its ``.bak``; None when neither can be read.

    Args:
        root: Of the store.
        name: Of the file, as ``TOPICS_FILE``.
        notes: Gets a line for the report where it was not read from its own file.
    """
    exists = False
    for attempt in (name,) * _TRIES + (f"{name}.bak",):
        raw = read_text(f"{root}/{attempt}")
        exists |= raw is not None
        if not raw:
            continue
        try:
            found = loads(raw)
        except ValueError:
            continue
        if isinstance(found, dict):
            if attempt != name:
                notes.append(f"{name} cannot be read; {attempt} was taken")
            return found
    if exists:
        notes.append(f"{name} cannot be read, nor its .bak; its contents are taken as unknown")
    return None


def parse_offsets(document: object) -> dict[tuple[str, str], dict[int, int]]:
    """Offsets of consumers by group and topic, then by queue id, of ``{"offsetTable":{"topic@group":{0:12,1:34}}}``.

    Rows of broadcasting clients (``topic@group@client``) and negative offsets are left out: a broker keeps them for itself.

    Raises:
        ValueError: It is no such table.
    """
    table = document.get("offsetTable") if isinstance(document, dict) else None
    if not isinstance(table, dict):
        raise ValueError("there is no offsetTable")  # noqa: TRY004 (its text is wrong, not the call)
    found: dict[tuple[str, str], dict[int, int]] = {}
    for name, row in table.items():
        topic, at, group = str(name).partition("@")
        if at and topic and group and "@" not in group and isinstance(row, dict):
            offsets = {int(queue_id): int(offset) for queue_id, offset in row.items()}
            found[group, topic] = {key: value for key, value in offsets.items() if value >= 0}
    return found


def _table(document: dict[str, Any] | None, key: str) -> dict[str, Any] | None:
    found = document.get(key) if document is not None else None
    return {str(name): value for name, value in found.items()} if isinstance(found, dict) else None


def _is_batch(config: object) -> bool:
    attributes = config.get("attributes") if isinstance(config, dict) else None
    return isinstance(attributes, dict) and attributes.get("queue.type") == "BatchCQ"


def _reserve_hours(config: object) -> int:
    """The attribute ``reserve.time``, hours; -1 where there is none, or none that is a number."""
    attributes = config.get("attributes") if isinstance(config, dict) else None
    text = attributes.get("reserve.time", "-1") if isinstance(attributes, dict) else "-1"
    try:
        return int(str(text))
    except ValueError:
        return -1


def _suffix(names: frozenset[str] | None, prefix: str) -> str | None:
    """What follows ``prefix`` in the only topic that has it."""
    found = [name.removeprefix(prefix) for name in names or () if name.startswith(prefix)]
    return found[0] if len(found) == 1 else None
