"""Readers over S3 behind a proxy that cuts, resets and refuses, with retries wired as ``tiered.open`` does."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

import pytest
from support.faultproxy import StormProxy
from support.fetching import expected, rows
from support.tiers import PLACE, TierBuilder

from backends.registry import open_store
from backends.s3_settings import S3Options
from fetcher.limits import FetchSettings, WindowLimits
from tiered.api.open_tier import OpenTier
from tiered.api.reading import plan_span, read_span
from tiered.api.stores import open_for_reading
from tiered.clock import SystemClock
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from support.servers import S3Server

KIB = 1024
QUEUES = [MessageQueue("orders", n) for n in range(3)]


class ReadStorm(StormProxy):
    """Cuts bodies, resets in mid-body, refuses and dawdles."""

    KINDS = {"GET": ("status", "reset", "cut", "torn", "late")}  # noqa: RUF012 (as in the base class)


@pytest.mark.parametrize("seed", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_i3_readers_in_threads_through_a_storm_get_the_truth(s3_environment: S3Server, seed: int):
    url = f"s3://{s3_environment.bucket()}/tier"
    builder = TierBuilder(open_store(url))
    wanted: dict[MessageQueue, dict[int, bytes]] = {queue: {} for queue in QUEUES}
    for queue in QUEUES:
        for size, count in ((40 * KIB, 30), (500, 200), (200 * KIB, 4)):
            at = builder.file(queue).append_offset
            items = [bytes([queue.queue_id + 65]) * (size + n) for n in range(count)]
            builder.add(items, queue=queue)
            wanted[queue] |= expected(at, items, queue=queue)
    builder.store.close()
    before = set(threading.enumerate())
    settings = FetchSettings(
        cache_bytes=1 << 20, block_bytes=64 * KIB, chunk_bytes=128 * KIB,
        window=WindowLimits(bytes_min=64 * KIB, bytes_max=256 * KIB),
    )  # fmt: skip
    found: dict[MessageQueue, dict[int, bytes]] = {queue: {} for queue in QUEUES}
    with ReadStorm(s3_environment.endpoint_url, seed=seed, share=0.15) as proxy:
        options, clock = S3Options(endpoint_url=proxy.url), SystemClock()
        objects = open_for_reading(url, options, clock, rng=random.Random(seed))
        tier = OpenTier.over(objects, PLACE, clock, settings)
        tier.refresh()
        try:

            def read(queue: MessageQueue) -> None:
                span = plan_span(tier.reader.cursor(queue), 0, None)
                for batch in read_span(tier, span, batch_bytes=64 * KIB):
                    found[queue] |= rows(batch)

            threads = [threading.Thread(target=read, args=(queue,)) for queue in QUEUES]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(50)
            stats = tier.fetcher.stats()
        finally:
            tier.close()
        assert set(proxy.broken) >= {"cut", "reset", "status"}
    assert found == wanted
    assert stats.cached_bytes + stats.reserved_bytes <= 1 << 20
    left = set(threading.enumerate()) - before  # a test before may have left one of its own
    names = {thread.name.split("-")[0] for thread in left}
    assert not names & {"fetcher", "tiered"}
