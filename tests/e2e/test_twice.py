"""Every PUT is carried out twice on its way, and only the second answer comes ("exists"): that is no other writer."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from support import captures, tier_checks
from support.command_line import here
from support.faultproxy import FaultProxy, Rule

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.servers import S3Server


class Doubling(FaultProxy):
    """Carries out each PUT twice."""

    def take(self, method: str, path: str) -> Rule | None:
        return Rule("twice", method) if method == "PUT" else None

    def kinds(self) -> set[str]:
        """What was put, by the words in its keys."""
        puts = (path for path in self.requests if path.startswith("PUT "))
        return {
            word for path in puts for word in re.findall(r"[a-z]+", path.rpartition("?")[0] or path)
        }


@pytest.mark.parametrize(
    "name", ["s01-basic", pytest.param("s02-delay-timer", marks=pytest.mark.slow)]
)
def test_a_tier_is_written_read_and_cleaned_though_each_put_comes_twice(
    s3_environment: S3Server, stores: Callable[[str], Path], name: str
):
    bucket, store = s3_environment.bucket(), stores(name)
    url, archive = f"s3://{bucket}/tier", f"s3://{bucket}/archive"
    with Doubling(s3_environment.endpoint_url) as proxy:
        through = ("--endpoint-url", proxy.url)
        attach = ("attach", store, "--to", url, "--once", *through)
        here(*attach, "--bundle-size", "64KiB", "--timers", "--index-age", "1").good()
        over = ("--timers", "--near", "0s", "--accept-pending")
        here(*attach, "--seal", "--merge", "--decommission", "--index-age", "1", *over).good()
        here("doctor", url, *through).good()
        here("lease", url, "--break", *through)
        here("archive", url, "--to", archive, *through).good()
        here("archive", url, "--to", archive, "--merge", *through).good()
        here("archive", url, "--to", archive, "--key-index", *through).good()
        here("gc", url, "--apply", "-", "--grace", "1s", *through)
        kinds = proxy.kinds()
    tier_checks.check_equal(url, captures.captured(name))
    tier_checks.check_sound(url, store)
    here("archive", url, "--to", archive, "--verify").good()
    assert kinds >= {
        "bundle",
        "journal",
        "checkpoint",
        "index",
        "lease",
        "probe",
        "handover",
        "parquet",
    }
