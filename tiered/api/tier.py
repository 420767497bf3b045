"""Opens a tier for reading: the door of the Python API."""

from __future__ import annotations

from backends.s3_settings import S3Options
from fetcher.settings import MEMORY_BYTES, FetchSettings, TransferLimits
from tiered.api.broker_place import choose_place
from tiered.api.stores import backend_errors, open_for_reading
from tiered.api.tier_reader import Tier
from tiered.clock import Clock, SystemClock

__all__ = ["MEMORY_BYTES", "REQUESTS", "Tier", "open"]
REQUESTS = 16
"""Requests under way at once, unless told otherwise."""


def open(  # noqa: A001 (the API's door)
    url: str,
    *,
    cluster: str | None = None,
    broker: str | None = None,
    options: S3Options | None = None,
    memory_bytes: int = MEMORY_BYTES,
    requests: int = REQUESTS,
    settings: FetchSettings | None = None,
    clock: Clock | None = None,
) -> Tier:
    """Open a tier for reading.

    Args:
        url: ``file:///path``, ``s3://bucket/prefix``, or anything that fsspec knows.
        cluster: Name of the cluster; needed only when several brokers have their data there.
        broker: Name of the broker; likewise.
        options: Endpoint, region and the like; default: from the environment.
        memory_bytes: What is cached, read ahead, on its way or kept free, and filters of the key index, all together; at
            least 1 MiB (``FetchSettings.of_memory``). What a caller holds is the caller's.
        requests: Requests under way at once, at most; as many threads are started by the first read.
        settings: All limits, in place of these two.
        clock: For tests.

    Raises:
        InvalidError: No such tier, or several; less memory, or fewer requests, than there can be.
        StoreUnavailableError: The store cannot be reached or refuses us.
    """
    clock = clock or SystemClock()
    if settings is None:
        transfers = TransferLimits(requests_in_flight_max=requests)
        settings = FetchSettings.of_memory(memory_bytes, transfers)
    opened = open_for_reading(url, options or S3Options(), clock)
    with backend_errors():
        try:
            place = choose_place(opened.store, cluster, broker)
            tier = Tier.over(opened, place, clock, settings)
            tier.refresh()
        except BaseException:
            opened.close()
            raise
    return tier
