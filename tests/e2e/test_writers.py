"""Writers that are killed and replaced while their store grows; ``tests/support/zombies.py`` has those that are paused."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import pytest
from support import captures, command_line, tier_checks
from support.command_line import here
from support.growing import Growing, first_ms
from support.live import Attach
from support.servers import S3Server, use_server
from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NAME = "s05-crash"
FAST = ("--freshness", "0.1", *command_line.SMALL)
KILLS = 6


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


@pytest.mark.slow
def test_killed_again_and_again(growing: Growing, url: str, tmp_path: Path) -> None:
    """Wherever the kill falls, what was said to be durable is, and the next one goes on from there."""
    dump, rng, log = captures.captured(NAME), random.Random(11), tmp_path / "attach.log"
    before = 0
    for _ in range(KILLS):
        with Attach(growing.store, url, log, FAST) as attach:
            until(lambda: here("status", url).code == 0, "a tier")
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
    tier_checks.check_equal(url, dump)
    tier_checks.check_sound(url, growing.store)
