"""A real process is killed at each moment of an archive job, or beside another; the archive has each message once."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from support.archive_rows import check
from support.command_line import command, environment, here, program
from support.servers import use_server

from tiered.crashpoints import EXIT_CODE, VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.archive_fixtures import Sealed
    from support.servers import S3Server

MATRIX = {
    "before write": "archive-writing:3",
    "after write": "archive-written:3",
    "before commit": "entry-begun:2",
    "after commit": "entry-put:2",
    "before checkpoint": "shard-stored",
}
COMMITTED = {MATRIX["after commit"], MATRIX["before checkpoint"]}


@pytest.mark.parametrize("point", MATRIX.values(), ids=MATRIX.keys())
def test_killed(point: str, sealed: Callable[[str], Sealed], archive_url: str) -> None:
    tier = sealed("s04-batch-compress")
    ran = program("archive", tier.url, "--to", archive_url, "--jobs", "2", env={VARIABLE: point})
    assert ran.code == EXIT_CODE
    planned = here("archive", tier.url, "--to", archive_url, "--json").good().document["planned"]
    assert bool(planned) == (point not in COMMITTED)
    check(tier, archive_url)


@pytest.mark.slow
def test_killed_again_and_again(sealed: Callable[[str], Sealed], archive_url: str) -> None:
    tier = sealed("s04-batch-compress")
    # Behind the commit nothing is left that a checkpoint would keep in shards: `test_killed` has that point.
    for point in list(MATRIX.values())[:-1]:
        first = point.removesuffix(":2")  # the log has begun: no entry of a beginning comes before
        code = program("archive", tier.url, "--to", archive_url, env={VARIABLE: first}).code
        assert code == EXIT_CODE
    check(tier, archive_url)


def test_two_jobs_at_once(sealed: Callable[[str], Sealed], archive_url: str) -> None:
    tier = sealed("s04-batch-compress")
    words = command(("archive", tier.url, "--to", archive_url, "--json"))

    def job(_number: int) -> int:
        done = subprocess.run(
            words, env=environment(), capture_output=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.returncode

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(job, range(2))) == [0, 0]
    check(tier, archive_url)


def test_on_a_server(
    sealed: Callable[[str], Sealed], ministack: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = sealed("s04-batch-compress")
    use_server(ministack, monkeypatch)
    url = f"s3://{ministack.bucket()}/parquet"
    said = here("archive", tier.url, "--to", url, "--json").good().document
    assert (said["rows"], said["entries"]) == (tier.dump.count, 1)
    assert here("archive", tier.url, "--to", url, "--verify").good().err.endswith("0 findings\n")
    for topic, messages in tier.dump.messages.items():
        question = f'SELECT count(*) AS n, sum(body_crc) AS crcs FROM "{topic}"'
        (row,) = here("sql", url, question, "-o", "jsonl").good().rows
        assert row == {"n": len(messages), "crcs": sum(m["body_crc"] for m in messages)}
