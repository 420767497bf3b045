"""``make zombies RUNS=100``: a writer that is stopped for longer than its lease wakes up behind a newer one."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TYPE_CHECKING

import pytest
from support import zombies
from support.servers import S3Server, use_server
from support.victims import url_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RUNS = int(os.environ.get("TIERED_ZOMBIE_RUNS", "3"))
SEED = int(os.environ.get("TIERED_ZOMBIE_SEED", "1"))
TOGETHER = 4
"""Runs at once: most of a run is waiting."""
KINDS = ("folder", "ministack", "minio")
pytestmark = pytest.mark.timeout(120 + 20 * RUNS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "folder",
        pytest.param("ministack", marks=pytest.mark.slow),
        pytest.param("minio", marks=[pytest.mark.go, pytest.mark.slow]),
    ],
)
def test_i6_i7_a_zombie_does_no_harm(
    kind: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    stores: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """It ends with code 4, once it wakes; there is one history, whatever of it lands late."""
    server = None if kind == "folder" else request.getfixturevalue(kind)
    if isinstance(server, S3Server):
        use_server(server, monkeypatch)
    runs = []
    for number in range(KINDS.index(kind), RUNS, len(KINDS)):
        folder = tmp_path / str(number)
        folder.mkdir()
        url, endpoint = url_of(kind, server, folder), server.endpoint_url if server else ""
        runs.append(zombies.Run(SEED + number, stores(zombies.NAME), folder, url, endpoint))
    found = list(map(zombies.run, runs)) if len(runs) < TOGETHER else together(runs)
    paused_s, fenced_s = max(s.paused_s for s in found), max(s.fenced_after_s for s in found)
    held = sum(s.held for s in found)
    print(
        f"\n{kind}: {len(runs)} runs, paused up to {paused_s:.1f} s, {held} requests held back,",
        end="",
    )
    print(f" fenced within {fenced_s:.1f} s of waking", flush=True)


def together(runs: list[zombies.Run]) -> list[zombies.Seen]:
    """Several at once, each in a process that serves many."""
    found = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(TOGETHER, context) as pool:
        for future in as_completed([pool.submit(zombies.run, one) for one in runs]):
            found.append(future.result())
            if len(found) % 10 == 0:
                print(f"\n{len(found)} of {len(runs)} runs", end="", flush=True)
    return found
