"""Which kind of store a directory is, and opening it: RocketMQ's, Kafka's or JoyQueue's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiered.clock import Clock
    from tiered.local.interface import LocalStore
    from tiered.local.rocketmq import RocketMQOptions


def folders_of(text: str) -> list[str]:
    """The directories that are meant: one, or several of one Kafka node as ``log.dirs`` has them, with commas between."""
    if "," not in text or os.path.lexists(text):
        return [text]
    return [folder for folder in text.split(",") if folder]


def open_store(
    directory: str, *, clock: Clock, options: RocketMQOptions | None = None
) -> LocalStore:
    """Open a store read-only.

    Args:
        directory: See ``folders_of``.
        options: How to read RocketMQ's.

    Raises:
        InvalidError: It is not a store.
    """
    folders = folders_of(directory)
    # Other modules are loaded when they are needed: a start is dear.
    if _is_kafka(folders):
        from tiered.local.kafka import KafkaStore  # noqa: PLC0415

        stop = options.stop if options else lambda: False
        return KafkaStore.open(*folders, clock=clock, stop=stop)
    if len(folders) > 1:
        raise InvalidError(
            "several directories make one store only where all are log directories of one Kafka node",
            where=directory,
            do="give one directory; meta.properties marks those of Kafka",
        )
    if _has(directory, "topics") and not _has(directory, "commitlog"):
        from tiered.local.jmq import JmqStore, is_jmq  # noqa: PLC0415

        if is_jmq(directory):
            return JmqStore.open(directory, clock=clock)
    from tiered.local.rocketmq import RocketMQStore  # noqa: PLC0415

    return RocketMQStore.open(directory, clock=clock, options=options)


def kind_of(directory: str) -> str | None:
    """What a directory is by its marks, in words, for errors; None: no broker's store."""
    if _is_kafka([directory]):
        return "a log directory of a Kafka node"
    if _has(directory, "commitlog") or _has(directory, "consumequeue"):
        return "a RocketMQ broker's store"
    from tiered.local.jmq_files import is_jmq  # noqa: PLC0415

    return "a JoyQueue broker's store" if is_jmq(directory) else None


def _has(directory: str, name: str) -> bool:
    """Whether a directory has a folder of this name, as far as can be seen; what cannot, its opener reports."""
    try:
        return Path(directory, name).is_dir()
    except OSError:
        return False


def _is_kafka(folders: Sequence[str]) -> bool:
    if not any(os.path.lexists(f"{folder}/meta.properties") for folder in folders):
        return False
    from tiered.local.kafka_files import is_log_directory  # noqa: PLC0415

    return any(map(is_log_directory, folders))
