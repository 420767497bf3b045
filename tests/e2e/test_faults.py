"""A whole attach through a proxy that loses answers, resets connections, delays, cuts and refuses: the end state is true."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support import command_line
from support.faultproxy import StormProxy

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.servers import S3Server


def storm(server: S3Server, store: Path, *, seed: int, share: float) -> StormProxy:
    """Attach through a storm, once; then hold everything against the local store, without one."""
    url = f"s3://{server.bucket()}/tier"
    with StormProxy(server.endpoint_url, seed=seed, share=share) as proxy:
        attached = run("attach", store, "--to", url, "--once", "--bundle-size", "16KiB", "--freshness", "0.2",
                       "--request-timeout", "5", "--lease-seconds", "5", "--endpoint-url", proxy.url)  # fmt: skip
    assert attached.returncode == 0, attached.stderr[-2000:]
    verified = run("verify", url, "--deep", "--store", store, "--json")
    assert verified.returncode == 0, verified.stdout[-2000:] + verified.stderr[-2000:]
    lag = command_line.json.loads(verified.stdout)["comparison"]
    assert (lag["lag_messages"], lag["skipped_messages"]) == (0, 0)
    again = run("attach", store, "--to", url, "--once", "--json")
    assert command_line.json.loads(again.stdout)["messages"] == 0
    return proxy


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tiered", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


def test_a_storm(s3_environment: S3Server, stores: Callable[[str], Path]):
    proxy = storm(s3_environment, stores("s01-basic"), seed=1, share=0.15)
    assert len(set(proxy.broken)) >= 3  # which of the kinds, hangs on the order of requests


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", ["s01-basic", "s04-batch-compress", "s11-lmq-batchcq"])
def test_storms(s3_environment: S3Server, stores: Callable[[str], Path], name: str, seed: int):
    storm(s3_environment, stores(name), seed=seed, share=0.05 + 0.015 * seed)
