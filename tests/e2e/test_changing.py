"""Stores that grow, expire and are cut under a running ``tiered attach``; copies that lag behind."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from support import captures, command_line, tier_checks
from support.command_line import here
from support.growing import LOG_FILE_BYTES, Growing, first_ms
from support.live import Attach
from support.tier_checks import cat
from support.waiting import until

from tiered.attach.writer import Attachment, AttachSettings
from tiered.dispatch.settings import DispatchSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

FAST = ("--freshness", "0.2")


@pytest.fixture
def grown(stores: Callable[[str], Path], tmp_path: Path) -> Iterator[Callable[[str], Growing]]:
    """A captured store of which nothing is there yet."""
    made: list[Growing] = []

    def make(name: str) -> Growing:
        made.append(Growing(stores(name), tmp_path / name))
        return made[-1]

    yield make
    for growing in made:
        growing.crash()


def below(dump: captures.Dump, end: int) -> dict[tuple[str, int], int]:
    """One past the last queue offset of each queue whose record lies wholly below a physical offset."""
    ends: dict[tuple[str, int], int] = {}
    for messages in dump.messages.values():
        for m in messages:
            if m["physical_offset"] + m["size"] <= end:
                ends[m["topic"], m["queue_id"]] = m["queue_offset"] + 1
    return ends


def wait_for(url: str, ends: dict[tuple[str, int], int]) -> None:
    """Until the tier is as far as this, and no further."""

    def found() -> dict[tuple[str, int], int]:
        ran = here("status", url, "-o", "jsonl")
        rows = ran.rows if ran.code == 0 else []
        return {(r["topic"], r["queue_id"]): r["commit_offset"] for r in rows if r["commit_offset"]}

    until(lambda: found() == ends, "the tier level with the store", 30)


@pytest.mark.parametrize("name", ["s01-basic", "s05-crash"])
def test_a_store_that_grows(name: str, grown: Callable[[str], Growing], tmp_path: Path) -> None:
    """Step by step, most steps ending in the middle of a record, to the end of its broker."""
    growing, dump = grown(name), captures.captured(name)
    rng, url = random.Random(7), f"file://{tmp_path}/tier"
    growing.start(first_ms(name) - 1000)
    with Attach(growing.store, url, tmp_path / "attach.log", FAST) as attach:
        while growing.end < growing.whole_end:
            growing.grow(min(growing.whole_end, growing.end + rng.randrange(1, 300_000)))
            if rng.random() < 0.3:
                wait_for(url, below(dump, growing.end))
            else:
                time.sleep(rng.random() / 5)
        growing.crash() if name == "s05-crash" else growing.stop()
        wait_for(url, below(dump, growing.whole_end))
        said = attach.stop()
    assert said["messages"] == dump.count
    tier_checks.check_equal(url, dump)
    tier_checks.check_sound(url, growing.store)


def test_a_copy_that_lags_behind(grown: Callable[[str], Growing], tmp_path: Path) -> None:
    """Of no broker's: attached again and again, and cut in the middle of a record each time.

    Before the end of its body, that is: behind it, Java's recovery takes the record, and so do we.
    """
    growing, dump = grown("s01-basic"), captures.captured("s01-basic")
    url = f"file://{tmp_path}/tier"
    places = sorted(m["physical_offset"] for found in dump.messages.values() for m in found)
    for end in (*(place + 90 for place in places[400::500]), growing.whole_end):
        growing.grow(end)
        here("attach", growing.store, "--to", url, "--once").good()
        wait_for(url, below(dump, end))
        tier_checks.check_sound(url, growing.store)
    tier_checks.check_equal(url, dump)


def test_only_what_comes_from_now_on(grown: Callable[[str], Growing], tmp_path: Path) -> None:
    """``--start latest`` of a store that grows: the end of now, and all of a queue that comes later."""
    growing, dump = grown("s01-basic"), captures.captured("s01-basic")
    url, log = f"file://{tmp_path}/tier", tmp_path / "attach.log"
    growing.start(first_ms("s01-basic") - 1000)
    growing.grow(1_000_000)  # not all topics are there yet, and the newest log file has messages
    early = below(dump, growing.end)
    with Attach(growing.store, url, log, (*FAST, "--start", "latest")) as attach:
        until(lambda: "tiered: tiering" in log.read_text(), "attach follows")
        growing.grow(growing.whole_end)
        wait_for(url, below(dump, growing.whole_end))
        said = attach.stop()
    assert said["messages"] == dump.count - sum(early.values())
    for queue, (start, _) in tier_checks.bounds(url).items():
        assert start == early.get((queue.topic, queue.queue_id), 0)


def test_what_was_in_hand_counts_as_brought_over(
    stores: Callable[[str], Path], tmp_path: Path
) -> None:
    """Nothing is due before the end of the test: all that the result counts was drained."""
    dump = captures.captured("s01-basic")
    settings = AttachSettings(dispatch=DispatchSettings(freshness_s=600.0))
    attachment = Attachment.open(str(stores("s01-basic")), f"file://{tmp_path}/tier", settings)
    dispatcher = attachment.dispatcher
    assert dispatcher is not None

    def has_all() -> bool:
        known = dispatcher.lag()
        ends = {queue: end for queue, (_, end) in dump.bounds.items()}
        return all(
            q in known and dispatcher.file(q).append_offset == end for q, end in ends.items()
        )

    with ThreadPoolExecutor(1) as pool, contextlib.closing(attachment):
        running = pool.submit(attachment.run)
        until(has_all, "everything in hand")
        assert sum(dispatcher.lag().values()) == 0
        attachment.stop()
        result = running.result()
    assert (result.behind, result.is_complete) == (0, True)


def test_what_expires_behind_attach_stays_in_the_tier(
    grown: Callable[[str], Growing], tmp_path: Path
) -> None:
    growing, dump = grown("s05-crash"), captures.captured("s05-crash")
    url = f"file://{tmp_path}/tier"
    growing.start(first_ms("s05-crash") - 1000)
    with Attach(growing.store, url, tmp_path / "attach.log", FAST) as attach:
        for end in range(400_000, growing.whole_end, 400_000):
            growing.grow(end)
            wait_for(url, below(dump, end))
            growing.expire(end - 300_000)
        growing.grow(growing.whole_end)
        wait_for(url, below(dump, growing.whole_end))
        said = attach.stop()
    assert (said["gaps"], said["quarantined"]) == (0, 0)
    tier_checks.check_equal(url, dump)
    tier_checks.check_sound(url, growing.store)
    status = here("status", url, "--store", growing.store, "--json").good().document
    assert status["brokers"][0]["lag_messages"] == 0


def test_what_expires_before_attach_comes_is_a_gap(
    grown: Callable[[str], Growing], tmp_path: Path
) -> None:
    growing, dump = grown("s05-crash"), captures.captured("s05-crash")
    url = f"file://{tmp_path}/tier"
    growing.grow(700_000)
    here("attach", growing.store, "--to", url, "--once").good()
    kept = below(dump, 700_000)
    growing.grow(growing.whole_end)
    log_min = 6 * LOG_FILE_BYTES
    growing.expire(log_min)
    said = here("attach", growing.store, "--to", url, "--once", "--json").good()
    assert said.document["gaps"] == 6  # one in each queue of `load`; `warm-up` was done
    assert "local retention was faster" in said.err
    found = cat(url, "load")
    assert found == [
        m
        for m in dump.messages["load"]
        if m["queue_offset"] < kept["load", m["queue_id"]] or m["physical_offset"] >= log_min
    ]
    assert here("verify", url, "--deep", "--store", growing.store).code == 0
    assert here("verify", url, "--strict").code == 1
    broker = here("status", url, "--json").good().document["brokers"][0]
    assert (broker["gaps"], broker["gap_messages"]) == (6, len(dump.messages["load"]) - len(found))
    first = found[0]["queue_offset"]
    last_kept = kept["load", 0]
    assert cat(url, "load", "--queue", "0", "--offset", str(last_kept), "--count", "1") == [
        next(m for m in found if m["queue_id"] == 0 and m["queue_offset"] >= last_kept)
    ]
    assert first == 0


@pytest.mark.parametrize("what", ["commitlog", "consumequeue"])
def test_a_file_that_is_cut_short_for_a_while(
    what: str, grown: Callable[[str], Growing], tmp_path: Path
) -> None:
    """As a copying tool or a person might; nobody falls over, and what comes back is taken."""
    growing, dump = grown("s05-crash"), captures.captured("s05-crash")
    url = f"file://{tmp_path}/tier"
    growing.start(first_ms("s05-crash") - 1000)
    with Attach(growing.store, url, tmp_path / "attach.log", FAST) as attach:
        growing.grow(900_000)
        wait_for(url, below(dump, 900_000))
        growing.grow(1_000_000)
        files = sorted((growing.store / what).rglob("0" * 5 + "*"))
        cut = files if what == "consumequeue" else [growing.newest_log()]
        whole = {path: path.read_bytes() for path in cut}
        for path in cut:
            os.truncate(path, 500)
        time.sleep(1.5)
        assert attach.is_running
        for path, data in whole.items():
            with path.open("r+b") as out:
                out.write(data)
        growing.grow(1_500_000)
        wait_for(url, below(dump, 1_500_000))
        growing.grow(growing.whole_end)
        wait_for(url, below(dump, growing.whole_end))
        said = attach.stop()
    assert (said["gaps"], said["quarantined"]) == (0, 0)
    tier_checks.check_equal(url, dump)
    tier_checks.check_sound(url, growing.store)


def test_cat_follows(grown: Callable[[str], Growing], tmp_path: Path) -> None:
    growing, dump = grown("s01-basic"), captures.captured("s01-basic")
    url = f"file://{tmp_path}/tier"
    expected = {_place(m) for m in dump.messages["orders"]}
    growing.start(first_ms("s01-basic") - 1000)
    growing.grow(1_000_000)
    out = tmp_path / "followed.jsonl"
    with Attach(growing.store, url, tmp_path / "attach.log", FAST) as attach:
        wait_for(url, below(dump, 1_000_000))
        options = ("--follow", "--count", str(len(expected)))
        with out.open("wb") as lines:
            follower = subprocess.Popen(
                command_line.command(("cat", url, "orders", *options)), stdout=lines
            )
        try:
            for end in (*range(1_500_000, growing.whole_end, 500_000), growing.whole_end):
                growing.grow(end)
                time.sleep(0.3)
            assert follower.wait(180) == 0
        finally:
            follower.kill()
            follower.wait()
        attach.stop()
    found = command_line.Ran((), 0, out.read_bytes(), "").rows
    assert len(found) == len(expected)
    assert {_place(m) for m in found} == expected
    for queue_id in range(4):
        offsets = [m["queue_offset"] for m in found if m["queue_id"] == queue_id]
        assert offsets == sorted(offsets)


def _place(message: dict[str, Any]) -> tuple[int, int, str]:
    return message["queue_id"], message["queue_offset"], message["msg_id"]
