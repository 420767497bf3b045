"""Captured stores, tiered to a folder, read through the facade under each policy as Java read the store."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from support import captures, command_line
from support.command_line import here

from fetcher.filters import compile_filter
from fetcher.limits import FetchSettings
from fetcher.statuses import GetStatus as Is
from fetcher.statuses import KeyQuery, Policy, Side
from tiered.api.local_and_tier import OpenMessageStore, open_message_store
from tiered.errors import InvalidError
from tiered.model import Boundary, MessageQueue

NAMES = ("s04-batch-compress", "s06-expired", "s11-lmq-batchcq")
Tiered = tuple[str, "Path", str]


@pytest.fixture(scope="module", params=NAMES)
def tiered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiered:
    """Name, store directory and tier of a capture."""
    folder = tmp_path_factory.mktemp("facade")
    store, url = captures.unpack(request.param, folder), f"file://{folder}/tier"
    here("attach", store, "--to", url, "--once", *command_line.SMALL).good()
    return request.param, store, url


def by_queue(name: str) -> dict[MessageQueue, list[dict[str, Any]]]:
    """What Java found."""
    found: dict[MessageQueue, list[dict[str, Any]]] = defaultdict(list)
    for messages in captures.captured(name).messages.values():
        for message in messages:
            found[MessageQueue(message["topic"], message["queue_id"])].append(message)
    return found


def opened(store: Path | None, url: str, policy: Policy = Policy.NOT_IN_DISK) -> OpenMessageStore:
    return open_message_store(
        store, url, policy=policy, fetch=FetchSettings(cache_bytes=16 << 20), refresh_s=60.0
    )


def read_queue(
    store: OpenMessageStore, queue: MessageQueue, **more: Any
) -> tuple[dict[int, bytes], set[Side]]:
    """A queue whole, from its minimum, and where it came from."""
    at, found, sides = max(store.min_offset(queue.topic, queue.queue_id), 0), {}, set()
    while True:
        result = store.get_message("g", queue.topic, queue.queue_id, at, **more)
        if result.status is Is.OFFSET_OVERFLOW_ONE:
            return found, sides
        assert result.status in {Is.FOUND, Is.NO_MATCHED_MESSAGE}, result
        assert not result.missing
        assert result.next_begin > at
        for chunk in result.chunks:
            sides.add(chunk.side)
        for offset, raw in result.messages():
            assert offset >= at
            assert offset not in found
            found[int(offset)] = bytes(raw)
        at = result.next_begin


@pytest.mark.parametrize("policy", list(Policy))
def test_each_policy_gives_what_java_found(tiered: Tiered, policy: Policy):
    name, directory, url = tiered
    log = captures.LocalLog(directory)
    expected_sides = {Policy.FORCE: {Side.TIER}}.get(policy, {Side.LOCAL})
    with opened(directory, url, policy) as store:
        for queue, messages in by_queue(name).items():
            found, sides = read_queue(store, queue, max_bytes=20_000)
            assert found == {m["queue_offset"]: log.record(m) for m in messages}
            if policy is not Policy.NOT_IN_MEM:
                assert sides == expected_sides


def test_without_a_store_directory_all_comes_from_the_tier(tiered: Tiered):
    name, directory, url = tiered
    log = captures.LocalLog(directory)
    with opened(None, url) as store:
        for queue, messages in by_queue(name).items():
            found, sides = read_queue(store, queue, max_count=1000, max_bytes=1 << 20)
            assert found == {m["queue_offset"]: log.record(m) for m in messages}
            assert sides == {Side.TIER}


@pytest.mark.parametrize("policy", [Policy.DISABLE, Policy.NOT_IN_DISK, Policy.FORCE])
def test_times_are_those_that_java_found(tiered: Tiered, policy: Policy):
    name, directory, url = tiered
    with opened(directory, url, policy) as store:
        for queue, messages in by_queue(name).items():
            place = queue.topic, queue.queue_id
            times = [m["store_timestamp_ms"] for m in messages]
            assert times == sorted(times)
            end = messages[-1]["queue_offset"] + 1
            assert store.earliest_time_ms(*place) == times[0]
            for time_ms in {times[0] - 1, times[-1] + 1, *times[:: max(len(times) // 5, 1)]}:
                late = [m["queue_offset"] for m in messages if m["store_timestamp_ms"] >= time_ms]
                lower = late[0] if late else end
                assert store.offset_by_time(*place, time_ms) == lower
                early = [m["queue_offset"] for m in messages if m["store_timestamp_ms"] <= time_ms]
                upper = store.offset_by_time(*place, time_ms, Boundary.UPPER)
                assert upper == (early[-1] if early else messages[0]["queue_offset"])
                if lower < end:
                    found = store.message_by_time(*place, time_ms)
                    assert [o for o, _ in found.messages()] == [lower]


@pytest.mark.parametrize("policy", [Policy.NOT_IN_DISK, Policy.FORCE])
def test_filters_select_on_both_sides(tiered: Tiered, policy: Policy):
    name, directory, url = tiered
    with opened(directory, url, policy) as store:
        for queue, messages in by_queue(name).items():
            tags = {m["properties"].get("TAGS") for m in messages} - {None}
            for tag in sorted(tags)[:2]:
                wanted = {m["queue_offset"] for m in messages if m["properties"].get("TAGS") == tag}
                found, _ = read_queue(store, queue, filter=compile_filter(tag))
                assert found.keys() == wanted


def test_keys_are_found_on_both_sides(tiered: Tiered):
    name, directory, url = tiered
    message = next(m for ms in by_queue(name).values() for m in ms if m["properties"].get("KEYS"))
    key = message["properties"]["KEYS"].split(" ")[0]
    query = KeyQuery(topic=message["topic"], key=key, count=1000)
    wanted = {
        (m["queue_id"], m["queue_offset"])
        for m in captures.captured(name).messages[message["topic"]]
        if key in (m["properties"].get("KEYS") or "").split(" ")
    }
    for store_dir, policies in ((None, [Policy.FORCE]), (directory, list(Policy))):
        with opened(store_dir, url) as store:
            for policy in policies:
                found = store.query(query, policy=policy)
                assert found.is_complete
                assert {(hit.queue.queue_id, hit.queue_offset) for hit in found.hits} == wanted
                times = [hit.store_ms for hit in found.hits]
                assert times == sorted(times, reverse=True)


def test_the_documented_example_reads_a_queue_whole(
    tiered: Tiered, capsys: pytest.CaptureFixture[str]
):
    name, directory, url = tiered
    queue, messages = next(iter(by_queue(name).items()))
    page = (Path(__file__).parents[2] / "docs" / "reading.md").read_text("utf-8")
    code = page.partition("## Policies and statuses")[2].partition("```python\n")[2]
    code = code.partition("```")[0].replace("/data/store", str(directory))
    code = code.replace("s3://bucket/prefix", url).replace('"orders", 0', f'"{queue.topic}", {queue.queue_id}')  # fmt: skip
    exec(compile(code, "docs/reading.md", "exec"), {})
    *lines, last = capsys.readouterr().out.splitlines()
    assert [int(line.split()[0]) for line in lines] == [m["queue_offset"] for m in messages]
    assert last == "GetStatus.OFFSET_OVERFLOW_ONE"


def test_a_store_directory_of_another_broker_is_refused(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
):
    one, other = (captures.unpack(name, tmp_path) for name in ("s01-basic", "s09-big-offsets"))
    url = f"file://{tmp_path}/tier"
    here("attach", one, "--to", url, "--once").good()
    with pytest.raises(InvalidError):
        opened(other, url)


def test_i1_what_local_retention_has_deleted_is_read_from_the_tier_and_the_rest_locally(
    tmp_path: Path,
):
    directory, url = captures.unpack("s01-basic", tmp_path), f"file://{tmp_path}/tier"
    log = captures.LocalLog(directory)
    here("attach", directory, "--to", url, "--once").good()
    files = sorted((directory / "commitlog").iterdir())
    if len(files) < 2:
        pytest.skip("one log file only")
    with opened(directory, url) as store:
        queues = by_queue("s01-basic")
        before = {q: store.get_message("g", q.topic, q.queue_id, 0, max_count=1) for q in queues}
        assert all(found.chunks[0].side is Side.LOCAL for found in before.values())
        files[0].unlink()
        met: set[Side] = set()
        for queue, messages in queues.items():
            found, sides = read_queue(store, queue)
            assert found == {m["queue_offset"]: log.record(m) for m in messages}
            met |= sides
        assert Side.TIER in met
