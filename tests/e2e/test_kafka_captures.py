"""Captured stores of real Kafka nodes and of JoyQueue: what the tier gives out is what their consumers were given."""

from __future__ import annotations

import gzip
import json
import random
import shutil
import tarfile
import time
from functools import cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import pytest
from support import kafka_batches
from support.command_line import SMALL, CommandLine, spawn
from support.kafka_batches import FOLDER

from tiered import open as tier_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

COMMITTED, UNCOMMITTED = "read_committed", "read_uncommitted"
NAMES = kafka_batches.NAMES
WAITS = {"k04-crash-torn"}
"""Of which something lies behind damage: attach says so, and ends with 1."""
JMQ = ("j01-basic", "j02-crash", "j02-crash-torn")
PLACE = itemgetter("topic", "partition", "offset")


def unpacked(name: str, folder: Path) -> Path:
    with tarfile.open(FOLDER / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


@cache
def consumed(name: str, isolation: str) -> tuple[dict[str, Any], ...]:
    """What the node gave a consumer."""
    is_other = isolation == COMMITTED and (FOLDER / f"{name}.committed.jsonl.gz").exists()
    return tuple(sorted(kafka_batches.dump(f"{name}.committed" if is_other else name), key=PLACE))


def given(tiered: CommandLine, url: str, name: str, isolation: str) -> list[dict[str, Any]]:
    """What the tier gives, of all topics that the node gave anything of."""
    topics = sorted({row["topic"] for row in consumed(name, UNCOMMITTED)})
    rows: Iterable[dict[str, Any]] = (
        row
        for topic in topics
        for row in tiered.good("cat", url, topic, "--isolation", isolation).rows
    )
    return sorted(rows, key=PLACE)


def require_same(tiered: CommandLine, url: str, name: str) -> None:
    for isolation in (UNCOMMITTED, COMMITTED):
        assert given(tiered, url, name, isolation) == [*consumed(name, isolation)], isolation


@pytest.mark.parametrize("name", NAMES)
def test_what_was_attached_once_is_what_consumers_got(
    name: str, tiered: CommandLine, tmp_path: Path
) -> None:
    store, url = unpacked(name, tmp_path), (tmp_path / "tier").as_uri()
    ran = tiered("attach", store, "--to", url, "--once", "--json")
    assert ran.code == (name in WAITS), ran
    assert {row["reason"] for row in ran.document["left_out"]} == {"an internal topic of Kafka"}
    require_same(tiered, url, name)
    tiered.good("verify", url, "--deep")
    again = tiered("attach", store, "--to", url, "--once", "--json").document
    assert again["messages"] == 0


@pytest.mark.parametrize("name", NAMES)
def test_merging_packing_and_a_lost_journal_change_nothing(
    name: str, tiered: CommandLine, tmp_path: Path
) -> None:
    store, tier = unpacked(name, tmp_path), tmp_path / "tier"
    url = tier.as_uri()
    ran = tiered("attach", store, "--to", url, "--once", "--seal", "--merge", *SMALL, "--json")
    assert ran.document["merged_bundles"] > 0 or name != "k01-basic"  # others have too few
    tiered.good("verify", url, "--deep")
    require_same(tiered, url, name)
    for folder in [path for path in tier.rglob("journal") if path.is_dir()]:  # both copies
        shutil.rmtree(folder, ignore_errors=True)
    tiered.good("rebuild", url, "--apply", "-")
    tiered.good("verify", url, "--deep")
    require_same(tiered, url, name)


@pytest.mark.parametrize(
    "name",
    [
        "k02-transactions",
        pytest.param("k01-basic", marks=pytest.mark.slow),
        pytest.param("k03-compacted-after", marks=pytest.mark.slow),
    ],
)
def test_killed_and_resumed_it_is_the_same(name: str, tiered: CommandLine, tmp_path: Path) -> None:
    store, url = unpacked(name, tmp_path), (tmp_path / "tier").as_uri()
    rng = random.Random(name)
    for _ in range(4):
        slowly = ("--max-read-rate", "100KiB", *SMALL)
        with spawn("attach", store, "--to", url, "--once", *slowly) as process:
            time.sleep(0.3 + rng.random())
            process.kill()
    tiered.good("attach", store, "--to", url, "--once", *SMALL)
    tiered.good("verify", url, "--deep")
    require_same(tiered, url, name)


@pytest.mark.parametrize("name", ["k01-basic", "k03-compacted-after"])
def test_times_mean_what_kafka_means(name: str, tiered: CommandLine, tmp_path: Path) -> None:
    """The first record whose own time is at or after the one that is asked for, however times are ordered."""
    store, url = unpacked(name, tmp_path), (tmp_path / "tier").as_uri()
    tiered.good("attach", store, "--to", url, "--once", *SMALL)
    rng = random.Random(name)
    rows = consumed(name, UNCOMMITTED)
    with tier_of(url) as tier:
        for queue in tier.queues():
            mine = [r for r in rows if (r["topic"], r["partition"]) == tuple(queue)]
            times = [row["timestamp_ms"] for row in mine]
            for asked in (0, *rng.sample(times, min(12, len(times))), 1 << 60):
                late = [r["offset"] for r in mine if r["timestamp_ms"] >= asked]
                found, wanted = tier.offset_for_time(*queue, asked), late[0] if late else None
                if found != (tier.bounds(*queue).end if wanted is None else wanted):
                    # The end of a transaction has a time, too, and Kafka's lookup finds it.
                    assert wanted is None or found < wanted, (queue, asked)
                    assert found not in {r["offset"] for r in mine}, (queue, asked)


def test_another_replica_is_another_broker_of_the_tier(tiered: CommandLine, tmp_path: Path) -> None:
    """Its place is its own; into that of the first it is not let in, whatever its epochs are."""
    name, url = "k05-epochs", (tmp_path / "tier").as_uri()
    first, second = (unpacked(name, tmp_path / node) for node in ("one", "two"))
    meta = second / "meta.properties"
    meta.write_text(meta.read_text().replace("node.id=1", "node.id=2"))
    tiered.good("attach", first, "--to", url, "--once")
    refused = tiered("attach", second, "--to", url, "--once", "--broker", "kafka-1")
    assert refused.code == 2
    assert "another" in refused.error
    tiered.good("attach", second, "--to", url, "--once")
    for broker in ("kafka-1", "kafka-2"):
        topics = {row["topic"] for row in consumed(name, UNCOMMITTED)}
        found = sum(
            len(tiered.good("cat", url, topic, "--broker", broker).rows) for topic in topics
        )
        assert found == len(consumed(name, UNCOMMITTED))


@pytest.mark.parametrize("name", JMQ)
def test_joyqueue_gives_what_its_store_gave(name: str, tiered: CommandLine, tmp_path: Path) -> None:
    folder = FOLDER.parent / "jmq"
    with tarfile.open(folder / f"{name}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    with gzip.open(folder / f"{name}.jsonl.gz", "rt") as lines:
        rows = [row for row in map(json.loads, lines) if row["committed"]]
    place = itemgetter("topic", "partition", "index")
    for row in rows:
        for said_by_the_store_alone in ("group", "journal_position", "committed"):
            del row[said_by_the_store_alone]
    url = (tmp_path / "tier").as_uri()
    ran = tiered("attach", tmp_path / name, "--to", url, "--once", "--merge", *SMALL, "--json")
    assert ran.code == 1, ran  # something waits in each
    assert "commit position" in ran.document["waiting_reason"]
    tiered.good("verify", url, "--deep")
    topics = sorted({row["topic"] for row in rows})
    found = [row for topic in topics for row in tiered.good("cat", url, topic).rows]
    assert sorted(found, key=place) == sorted(rows, key=place)
