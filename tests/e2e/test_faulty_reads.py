"""Readers behind a proxy that cuts answers, resets and dawdles: right bytes, or an error that says so in time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support import captures, tier_checks
from support.command_line import here, program
from support.faultproxy import FaultProxy, Rule, StormProxy

from tiered.keys import DATA_ROOTS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.servers import S3Server

NAME = "s01-basic"
TIMEOUT_S = 1
"""So long a read is tried again, each try with its own deadline, on a busy machine; a reader that hangs takes a minute."""


class ReadStorm(StormProxy):
    """Cuts bodies, resets in mid-body, refuses and dawdles."""

    KINDS = {"GET": ("status", "reset", "cut", "torn", "late")}  # noqa: RUF012 (as in the base class)


class Broken(FaultProxy):
    """Breaks every read of a data object in one way."""

    def __init__(self, upstream_url: str, kind: str) -> None:
        super().__init__(upstream_url)
        self.kind, self.is_used = kind, False

    def take(self, method: str, path: str) -> Rule | None:
        is_data = method == "GET" and any(f"/{root}" in path for root in DATA_ROOTS)
        self.is_used |= is_data
        return Rule(self.kind, method, seconds=60.0) if is_data else None


@pytest.fixture
def tier(s3_environment: S3Server, stores: Callable[[str], Path]) -> tuple[S3Server, str, Path]:
    url, store = f"s3://{s3_environment.bucket()}/tier", stores(NAME)
    here("attach", store, "--to", url, "--once", "--bundle-size", "16KiB").good()
    return s3_environment, url, store


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_what_is_read_through_a_storm_is_right(tier: tuple[S3Server, str, Path], seed: int) -> None:
    server, url, store = tier
    dump = captures.captured(NAME)
    with ReadStorm(server.endpoint_url, seed=seed, share=0.2) as proxy:
        through = ("--endpoint-url", proxy.url, "--request-timeout", "5")
        for topic, messages in dump.messages.items():
            assert tier_checks.cat(url, topic, *through) == messages
        assert set(proxy.broken) >= {"cut", "torn", "reset"}
        if seed == 0:
            return  # what follows takes a few seconds more
        report = here("verify", url, "--deep", "--store", store, "--json", *through).good().document
        assert report["comparison"]["lag_messages"] == 0


@pytest.mark.parametrize(
    "kind",
    [
        "torn",
        *(pytest.param(k, marks=pytest.mark.slow) for k in ("cut", "reset", "status", "slow")),
    ],
)
def test_what_can_not_be_read_is_an_error_and_no_hang(
    tier: tuple[S3Server, str, Path], kind: str
) -> None:
    server, url, _ = tier
    topic = next(iter(captures.captured(NAME).messages))
    with Broken(server.endpoint_url, kind) as proxy:
        through = ("--endpoint-url", proxy.url, "--request-timeout", str(TIMEOUT_S))
        ran = program("cat", url, topic, *through)
    assert ran.code == 3, ran
    assert ran.error
    assert ran.out == b""
    assert proxy.is_used, "no data object was read"
