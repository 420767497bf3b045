"""Spark's workers and its driver are killed at each moment of a job; the archive has each message once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.archive_rows import check
from support.command_line import here, program

from tiered.crashpoints import EXIT_CODE, VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.archive_fixtures import Sealed

pytestmark = [pytest.mark.spark, pytest.mark.slow]
SPARK = ("--engine", "spark", "--master", "local[2,4]")


@pytest.mark.parametrize("point", ["archive-writing:4", "archive-written:4"])
def test_workers_are_killed(point: str, sealed: Callable[[str], Sealed], archive_url: str) -> None:
    """Each worker dies at its fourth file; Spark starts others, and the job ends well or gives up."""
    tier = sealed("s04-batch-compress")
    words = ("archive", tier.url, "--to", archive_url, *SPARK, "--json")
    ran = program(*words, env={VARIABLE: point})
    assert ran.code == 0 or "Spark has given up" in ran.error
    check(tier, archive_url)


def test_spark_gives_up(sealed: Callable[[str], Sealed], archive_url: str) -> None:
    tier = sealed("s04-batch-compress")
    words = ("archive", tier.url, "--to", archive_url, *SPARK)
    ran = program(*words, env={VARIABLE: "archive-written"})
    assert ran.code == 3
    assert ran.error.startswith("Spark has given up: Job aborted")
    check(tier, archive_url)


@pytest.mark.parametrize("point", ["entry-begun:2", "entry-put:2"])
def test_the_driver_is_killed(
    point: str, sealed: Callable[[str], Sealed], archive_url: str
) -> None:
    tier = sealed("s04-batch-compress")
    words = ("archive", tier.url, "--to", archive_url, *SPARK)
    assert program(*words, env={VARIABLE: point}).code == EXIT_CODE
    planned = here("archive", tier.url, "--to", archive_url, "--json").good().document["planned"]
    assert bool(planned) == (point == "entry-begun:2")
    check(tier, archive_url)
