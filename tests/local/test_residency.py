"""Whether records of a store are in memory, by the page cache and without a trace in the directory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from support import following

from tiered.api.local_and_tier import ITEMS_MAX, SAMPLES, Residency, is_cached_in_file
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from tiered.local.rocketmq import RocketMQStore

NAME = "s01-basic"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RocketMQStore]:
    found = following.open_store(following.unpack(NAME, tmp_path))
    yield found
    found.close()


def test_bounds_of_one_queue_are_those_of_the_store(store: RocketMQStore):
    residency = Residency(store.current_view)
    assert store.queues()
    for queue, bounds in store.queues().items():
        assert residency.bounds(queue) == bounds
    assert residency.bounds(MessageQueue("no such topic", 0)) is None


def test_it_looks_at_the_first_the_last_and_some_between(store: RocketMQStore):
    asked: dict[str, list[int]] = {}

    def is_cached(path: str, offsets: Iterable[int]) -> bool:
        asked.setdefault(path, []).extend(offsets)
        return True

    residency = Residency(store.current_view, is_cached)
    queue, bounds = max(store.queues().items(), key=lambda item: item[1].end - item[1].min)
    count = min(bounds.end - bounds.min, ITEMS_MAX)
    assert residency.is_in_memory(queue, bounds.min, count)
    batch = store.read(queue, bounds.min, bytes_max=1 << 40, count_max=count)
    assert batch is not None
    places = [place for places in asked.values() for place in places]
    assert len(places) <= SAMPLES + 1
    size = store.current_view().log.file_bytes  # of each file; offsets below are in a file
    first, last = (int(batch.physical_offsets[at]) % size for at in (0, -1))
    assert {first, last, last + int(batch.sizes[-1]) - 1} <= set(places)


def test_one_page_that_is_not_there_is_enough_and_what_is_unknown_is_in_memory(
    store: RocketMQStore,
):
    queue, bounds = next(iter(store.queues().items()))
    assert not Residency(store.current_view, lambda _, __: False).is_in_memory(queue, bounds.min, 1)
    cold = Residency(store.current_view, lambda _, __: False)
    assert cold.is_in_memory(queue, bounds.end, 1)
    assert cold.is_in_memory(MessageQueue("no such topic", 0), 0, 1)
    assert is_cached_in_file("/no/such/file", [0])


def test_the_page_cache_is_believed(store: RocketMQStore):
    queue, bounds = next(iter(store.queues().items()))
    residency = Residency(store.current_view)
    path = store.current_view().log.path(store.current_view().log.bases[0])
    store.read(queue, bounds.min, bytes_max=1 << 40, count_max=bounds.end - bounds.min)
    assert residency.is_in_memory(queue, bounds.min, 8)
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        if is_cached_in_file(path, [0]):
            pytest.skip("this file system does not tell, or does not drop its pages")
        assert not residency.is_in_memory(queue, bounds.min, 8)
        os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        assert residency.is_in_memory(queue, bounds.min, 8)
    finally:
        os.close(descriptor)
