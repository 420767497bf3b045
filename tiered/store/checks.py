"""What of a message is refused, with the reason, and what the store adds to its properties: the plain way, one by one."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from tiered.errors import InvalidError
from tiered.format import properties as names
from tiered.format import sysflag
from tiered.format.hosts import is_v6, pack_host
from tiered.format.properties import join_properties
from tiered.format.record import record_bytes

if TYPE_CHECKING:
    from tiered.store.messages import Message
    from tiered.store.options import StoreOptions

TOPIC_BYTES_MAX: Final = 127
RETRY_TOPIC_BYTES_MAX: Final = 255
"""A topic's name is a directory's."""
RETRY_PREFIX: Final = "%RETRY%"
PROPERTIES_BYTES_MAX: Final = 0x7FFF
_TOPIC: Final = re.compile(r"[%|a-zA-Z0-9_-]+")
INT_MAX: Final = 2**31 - 1
LONG_MAX: Final = 2**63 - 1
QUEUE_ID_MAX: Final = 65_535
_REFUSED_FLAGS: Final = (
    (sysflag.NEED_UNWRAP | sysflag.INNER_BATCH, "an inner batch"),
    (sysflag.TRANSACTION_PREPARED, "a prepared or rolled back transaction"),
)


def checked_properties(
    message: Message, options: StoreOptions, *, cluster: str, unique_key: str
) -> tuple[bytes, str]:
    """Check a message whole, and add what the store adds.

    Args:
        message: To be stored.
        options: Of the store.
        cluster: For the property ``CLUSTER``.
        unique_key: Its ``UNIQ_KEY``, unless it has one.

    Returns:
        The stored properties, and the message's unique id.

    Raises:
        InvalidError: It cannot be stored as it is. Retrying does not help.
    """
    topic_bytes = check_topic(message.topic)
    _check_numbers(message)
    born_host = message.born_host or options.store_host
    found = _properties(message, cluster, unique_key)
    raw = _join(found)
    size = record_bytes(
        body=len(message.body),
        topic=topic_bytes,
        props=len(raw),
        sys_flag=_host_bits(message.sys_flag, born_host, options.store_host),
        version=1 if topic_bytes <= TOPIC_BYTES_MAX else 2,
    )
    _check_sizes(message, size, options)
    return raw, found[names.UNIQ_KEY]


def check_topic(topic: str) -> int:
    """The bytes of a topic's name.

    Raises:
        InvalidError: It is none that a broker would take.
    """
    if not _TOPIC.fullmatch(topic):
        raise InvalidError(f"topic {topic!r}: only %, |, a-z, A-Z, 0-9, _ and - may be in a name")
    limit = RETRY_TOPIC_BYTES_MAX if topic.startswith(RETRY_PREFIX) else TOPIC_BYTES_MAX
    if len(topic) > limit:
        raise InvalidError(f"topic {topic!r}: {len(topic)} bytes, and at most {limit} may be")
    return len(topic)


@lru_cache(maxsize=4096)
def check_host(host: str) -> None:
    """Refuse what is no host and port.

    Raises:
        InvalidError: It is neither ``ip:port`` nor ``[ip]:port``.
    """
    try:
        pack_host(host)
    except ValueError as error:
        raise InvalidError(str(error), do="give ip:port or [ip]:port") from error


def _check_numbers(message: Message) -> None:
    for name, value, low, high in (
        ("queue_id", message.queue_id, 0, QUEUE_ID_MAX),
        ("flag", message.flag, -INT_MAX - 1, INT_MAX),
        ("sys_flag", message.sys_flag, 0, INT_MAX),
        ("reconsume_times", message.reconsume_times, 0, INT_MAX),
        ("born_timestamp_ms", message.born_timestamp_ms or 0, -LONG_MAX - 1, LONG_MAX),
    ):
        if not low <= value <= high:
            raise InvalidError(f"{name} {value}: it must lie between {low} and {high}")
    for bits, what in _REFUSED_FLAGS:
        if message.sys_flag & bits:
            raise InvalidError(f"sys_flag {message.sys_flag:#x}: {what} cannot be stored here")


def _check_sizes(message: Message, size: int, options: StoreOptions) -> None:
    if len(message.body) > options.message_bytes_max:
        raise InvalidError(
            f"a body of {len(message.body)} bytes, and at most {options.message_bytes_max} may be"
        )
    if size > options.record_bytes_max:
        raise InvalidError(
            f"a record of {size} bytes, and at most {options.record_bytes_max} may be"
        )


def _properties(message: Message, cluster: str, unique_key: str) -> dict[str, str]:
    found = dict(message.properties)
    for name, value in ((names.TAGS, message.tags), (names.KEYS, message.keys)):
        if value is None:
            continue
        if found.setdefault(name, value) != value:
            raise InvalidError(f"property {name} says {found[name]!r}, and the message {value!r}")
    if not found.get(names.UNIQ_KEY):
        found[names.UNIQ_KEY] = unique_key
    found[names.CLUSTER] = cluster
    return found


def _join(found: dict[str, str]) -> bytes:
    try:
        raw = join_properties(found)
    except ValueError as error:  # a separator, an empty value, or what is no Unicode text
        raise InvalidError(str(error)) from error
    if len(raw) > PROPERTIES_BYTES_MAX:
        raise InvalidError(
            f"properties of {len(raw)} bytes, and at most {PROPERTIES_BYTES_MAX} may be"
        )
    return raw


def _host_bits(flag: int, born_host: str, store_host: str) -> int:
    check_host(born_host)
    flag &= ~(sysflag.BORN_HOST_V6 | sysflag.STORE_HOST_V6)
    if is_v6(born_host):
        flag |= sysflag.BORN_HOST_V6
    if is_v6(store_host):
        flag |= sysflag.STORE_HOST_V6
    return flag
