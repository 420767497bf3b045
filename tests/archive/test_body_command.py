"""``tiered archive --body`` from options to an answer in SQL."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from support.command_line import here

if TYPE_CHECKING:
    from pathlib import Path

MESSAGES = 300


@pytest.fixture(scope="module")
def tier(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Sealed, one topic ``bench-0`` of JSON bodies."""
    folder = tmp_path_factory.mktemp("bodies")
    store, url = str(folder / "store"), f"file://{folder}/tier"
    sizes = ("--messages", str(MESSAGES), "--queues", "2", "--body", "200", "--file-size", "4MiB")
    assert here("bench", "make-store", store, *sizes).code == 0
    assert here("attach", store, "--to", url, "--once", "--seal").code == 0
    return url


def test_bodies_become_columns_and_are_verified(
    tier: str, archive_url: str, tmp_path: Path
) -> None:
    columns = tmp_path / "bench.sql"
    columns.write_text("id STRING, user STRING, amount DECIMAL(6,2) -- cents\n")
    options = ("--body", "bench-*=json", "--body-schema", f"bench-*={columns}")
    done = here("archive", tier, "--to", archive_url, *options, "--raw-records", "--json")
    assert done.code == 0, done
    document = json.loads(done.out)
    assert (document["rows"], document["misfits"], document["columns_unknown"]) == (MESSAGES, 0, [])
    question = (
        "SELECT count(*) AS n, count(DISTINCT value_id) AS ids, sum(value_amount) > 0 AS good,"
        ' sum(octet_length(record)) AS size FROM "bench-0" WHERE body_error IS NULL'
    )
    (row,) = json.loads(here("sql", archive_url, question, "--json").out)["rows"]
    assert (row["n"], row["ids"], row["good"]) == (MESSAGES, MESSAGES, True)
    assert row["size"] == document["source_bytes"]
    verified = here("archive", tier, "--to", archive_url, "--verify", "--json")
    assert (verified.code, json.loads(verified.out)["findings"]) == (0, [])


def test_what_does_not_fit_ends_the_command_with_code_1(
    tier: str, archive_url: str, tmp_path: Path
) -> None:
    columns = tmp_path / "bench.sql"
    columns.write_text("id BIGINT")
    options = ("--body", "json", "--body-schema", columns)
    done = here("archive", tier, "--to", archive_url, *options, "--json")
    assert (done.code, json.loads(done.out)["misfits"]) == (1, MESSAGES)
    assert "did not fit" in done.err
    assert here("archive", tier, "--to", archive_url, "--verify").code == 0


def test_options_that_lack_something(tier: str, archive_url: str) -> None:
    done = here("archive", tier, "--to", archive_url, "--body", "avro")
    assert (done.code, "needs --body-schema" in done.err) == (2, True)
    done = here("archive", tier, "--to", archive_url, "--body", "text", "--body-schema", "/nothing")
    assert (done.code, "cannot be read" in done.err) == (2, True)
