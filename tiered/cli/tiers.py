"""Opens what a command was told to read, and closes it when the command ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered.api.stores import open_for_reading

if TYPE_CHECKING:
    import contextlib

    from backends.base import ObjectStore
    from tiered.api.tier import Tier
    from tiered.cli.call import Call
    from tiered.local.face import LocalStore


def open_objects(
    call: Call, url: str, stack: contextlib.ExitStack, *, give_up_s: float | None = None
) -> ObjectStore:
    """The object store that a URL names, with retries; ``give_up_s`` shortens how long one request is tried.

    Raises:
        InvalidError: The URL or an option is wrong.
    """
    return open_both(call, url, stack, give_up_s=give_up_s)[1]


def open_both(
    call: Call, url: str, stack: contextlib.ExitStack, *, give_up_s: float | None = None
) -> tuple[ObjectStore, ObjectStore]:
    """The object store that a URL names, without retries (for a journal's writer) and with.

    Raises:
        InvalidError: The URL or an option is wrong.
    """
    opened = open_for_reading(url, call.s3_options(), call.clock, give_up_s=give_up_s)
    stack.callback(opened.close)
    return opened.meter, opened.store


def open_tier(
    call: Call, url: str, stack: contextlib.ExitStack, *, memory_bytes: int | None = None
) -> Tier:
    """The one broker's tier that is meant.

    Args:
        call: What says so.
        url: Of the tier.
        stack: Closes it.
        memory_bytes: What it caches and reads ahead at most; default: that of the API.

    Raises:
        InvalidError: There is none, or there are several.
        StoreUnavailableError: The store cannot be reached or refuses us.
    """
    from tiered.api.tier import MEMORY_BYTES
    from tiered.api.tier import open as open_tier_at

    tier = open_tier_at(
        url,
        cluster=call.common.cluster,
        broker=call.common.broker,
        options=call.s3_options(),
        memory_bytes=memory_bytes or MEMORY_BYTES,
        clock=call.clock,
    )
    stack.callback(tier.close)
    return tier


def open_local(call: Call, directory: str, stack: contextlib.ExitStack) -> LocalStore:
    """A local store directory, read-only.

    Raises:
        InvalidError: It is none, or of a kind that is not supported.
    """
    from tiered.local.rocketmq import RocketMQStore

    local = RocketMQStore.open(directory, clock=call.clock)
    stack.callback(local.close)
    return local
