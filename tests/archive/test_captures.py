"""Every captured store, archived, is what Java read from the store, whoever reads the Parquet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import duckdb
import pandas as pd
import pytest
from support import captures
from support.archive_rows import files, folder, read_all, rows_of, said_by_archive, said_by_java
from support.command_line import here

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.archive_fixtures import Sealed

FEW = ("s04-batch-compress", "s11-lmq-batchcq")
NAMES = [
    name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in captures.NAMES
]


@pytest.mark.parametrize("name", NAMES)
def test_every_reader_finds_what_java_found(
    name: str, sealed: Callable[[str], Sealed], archive_url: str
) -> None:
    tier = sealed(name)
    said = here("archive", tier.url, "--to", archive_url, "--json").good().document
    assert (said["rows"], said["bad"], said["failed"]) == (tier.dump.count, 0, [])
    wanted = {t: [said_by_java(m) for m in found] for t, found in tier.dump.messages.items()}
    assert tiered(read_all(archive_url)) == wanted
    assert tiered(read_by_duckdb(archive_url, list(wanted))) == wanted
    assert tiered(read_by_pandas(archive_url)) == wanted
    verified = here("archive", tier.url, "--to", archive_url, "--verify", "--json").good().document
    assert (verified["rows"], verified["findings"]) == (tier.dump.count, [])
    assert verified["compared"] == said["segments"]


def test_a_second_run_has_nothing_to_do(sealed: Callable[[str], Sealed], archive_url: str) -> None:
    tier = sealed("s04-batch-compress")
    here("archive", tier.url, "--to", archive_url).good()
    before = {path: path.stat().st_mtime_ns for path in folder(archive_url).rglob("*")}
    again = here("archive", tier.url, "--to", archive_url, "--json").good().document
    assert (again["planned"], again["segments"], again["entries"]) == (0, 0, 0)
    assert again["archived_before"] > 0
    assert {path: path.stat().st_mtime_ns for path in folder(archive_url).rglob("*")} == before


def test_what_is_not_sealed_is_named(
    stores: Callable[[str], Any], tmp_path: Any, archive_url: str
) -> None:
    url = f"file://{tmp_path}/tier"
    here("attach", stores("s04-batch-compress"), "--to", url, "--once").good()
    ran = here("archive", url, "--to", archive_url, "--json").good()
    assert ran.document["segments"] == 0
    opened = sum(row["end"] - row["start"] for row in ran.document["open"])
    assert opened == captures.captured("s04-batch-compress").count
    assert "not sealed" in ran.err
    assert files(archive_url) == []


def tiered(found: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    return {topic: [said_by_archive(row) for row in rows] for topic, rows in sorted(found.items())}


def read_by_duckdb(url: str, topics: list[str]) -> dict[str, list[dict[str, Any]]]:
    names = [str(path) for path in files(url)]
    with duckdb.connect() as connection:
        found = connection.read_parquet(names, hive_partitioning=False)  # type: ignore[arg-type]
        return {
            topic: rows_of(
                found.filter(duckdb.ColumnExpression("topic") == duckdb.ConstantExpression(topic))
                .order("queue_id, queue_offset")
                .to_arrow_table()
            )
            for topic in topics
        }


def read_by_pandas(url: str) -> dict[str, list[dict[str, Any]]]:
    """As whoever is given the folder: the log and side files are passed over."""
    table = pd.read_parquet(folder(url), partitioning=None)
    found = table.sort_values(["topic", "queue_id", "queue_offset"])
    return {str(topic): rows.to_dict("records") for topic, rows in found.groupby("topic")}
