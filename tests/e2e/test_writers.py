"""Writers that are killed, paused and replaced while their store grows, on a folder and on S3 servers."""

from __future__ import annotations

import fcntl
import random
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import use_server
from support.servers import S3Server

from tests.e2e import harness
from tests.e2e.growing import Growing, first_ms
from tests.e2e.harness import here
from tests.e2e.live import Attach

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NAME = "s05-crash"
FAST = ("--freshness", "0.1", *harness.SMALL)
KILLS = 6
LEASE_S = 2
"""Of the writers of which one is paused: renewed every third of it, also on a busy machine."""
HASTE_S = 10
"""Seconds beside the lease within which one that was replaced has ended, also on a busy machine."""


@pytest.fixture(params=["folder", "ministack", pytest.param("minio", marks=pytest.mark.go)])
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Where the tier goes."""
    if request.param == "folder":
        return f"file://{tmp_path}/tier"
    server = request.getfixturevalue(request.param)
    assert isinstance(server, S3Server)
    use_server(server, monkeypatch)
    return f"s3://{server.bucket()}/tier"


@pytest.fixture
def growing(stores: Callable[[str], Path], tmp_path: Path) -> Iterator[Growing]:
    made = Growing(stores(NAME), tmp_path / NAME)
    made.start(first_ms(NAME) - 1000)
    yield made
    made.crash()


def grow_by(growing: Growing, size: int) -> None:
    growing.grow(min(growing.whole_end, growing.end + size))


def committed(url: str) -> int:
    """Messages that the tier says it has."""
    ran = here("status", url, "--json")
    return 0 if ran.code == 2 else int(ran.good().document["brokers"][0]["messages"])


def test_killed_again_and_again(growing: Growing, url: str, tmp_path: Path) -> None:
    """Wherever the kill falls, what was said to be durable is, and the next one goes on from there."""
    dump, rng, log = harness.captured(NAME), random.Random(11), tmp_path / "attach.log"
    before = 0
    for _ in range(KILLS):
        with Attach(growing.store, url, log, FAST) as attach:
            harness.until(lambda: here("status", url).code == 0, "a tier")
            for _ in range(rng.randrange(1, 6)):
                grow_by(growing, 100_000)
                time.sleep(rng.random() / 5)
            attach.kill()
        assert committed(url) >= before
        before = committed(url)
        assert here("verify", url, "--deep").code == 0
    growing.grow(growing.whole_end)
    growing.crash()
    here("attach", growing.store, "--to", url, "--once").good()
    assert "waiting for the lease" not in log.read_text()
    harness.check_equal(url, dump)
    harness.check_sound(url, growing.store)


def listed(growing: Growing, dump: harness.Dump) -> int:
    """Messages that the store lists by now."""
    messages = (message for topic in dump.messages.values() for message in topic)
    return sum(message["physical_offset"] + message["size"] <= growing.end for message in messages)


def pause(attach: Attach, url: str) -> None:
    """Stop a writer, but not while it holds the lock of a folder: that would stop the other as well."""
    lock = Path(url.removeprefix("file://")) / ".tiered-tmp" / "lock"
    attach.pause()
    while url.startswith("file:") and is_locked(lock):
        attach.send(signal.SIGCONT)
        attach.pause()


def is_locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_paused_and_replaced(growing: Growing, url: str, tmp_path: Path) -> None:
    """Who wakes up behind a newer writer is fenced, and has done no harm."""
    dump, options = harness.captured(NAME), (*FAST, "--lease-seconds", str(LEASE_S))
    first = Attach(growing.store, url, tmp_path / "first.log", options)
    second = Attach(growing.store, url, tmp_path / "second.log", options)

    def all_committed() -> bool:
        return committed(url) == listed(growing, dump)

    with first:
        grow_by(growing, 300_000)
        harness.until(all_committed, "the first messages")
        with second:
            harness.until(lambda: "waiting for the lease" in second.log.read_text(), "a second")
            pause(first, url)
            grow_by(growing, 700_000)
            harness.until(all_committed, "messages of the second writer")
            first.send(signal.SIGCONT)
            assert first.ended(within_s=LEASE_S + HASTE_S) == 4
            assert first.log.read_text().count("tiered: error: ") == 1
            growing.grow(growing.whole_end)
            harness.until(all_committed, "all messages")
            assert second.stop()["generation"] == 2
    growing.crash()
    harness.check_equal(url, dump)
    harness.check_sound(url, growing.store)
