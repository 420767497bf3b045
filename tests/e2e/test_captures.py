"""Every captured store, tiered to a folder and to S3 servers, reads back as Java reads the store."""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from support import captures, command_line, tier_checks
from support.command_line import here
from support.servers import S3Server, use_server
from support.tier_checks import cat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SERVERS = (
    "folder",
    pytest.param("minio", marks=pytest.mark.go),
    pytest.param("ministack", marks=pytest.mark.slow),
)
REQUESTS_OF_NOTHING_MAX = 40  # a slow machine renews the lease meanwhile
SEALED_ON_SERVERS = ("s04-batch-compress", "s06-expired", "s08-crash-continue", "s11-lmq-batchcq")
MET: dict[str, dict[str, Any]] = {
    "s05b-torn": {"torn_bytes": 275},
    "s06-expired": {"below_min_entries": 413},
}
LEFT_OUT = {
    "s02-delay-timer": {"SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer"},
    "s03-transactions": {"RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC"},
    "s04-batch-compress": {"RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC"},
    "s10-consumers": {"SCHEDULE_TOPIC_XXXX"},
    "s11-lmq-batchcq": {"%LMQ%d1", "%LMQ%d2", "%LMQ%d3"},
}


@dataclass(frozen=True)
class Tiered:
    """A captured store and a tier of it.

    Attributes:
        name: Of the capture.
        store: Its directory.
        url: Of the tier.
        attached: What ``attach`` said.
        dump: What Java found.
    """

    name: str
    store: Path
    url: str
    attached: dict[str, Any]
    dump: captures.Dump


@pytest.fixture(scope="module", params=SERVERS)
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], str]]:
    """Where tiers go: the URL of an empty place by a name."""
    if request.param == "folder":
        yield lambda name: f"file://{tmp_path_factory.mktemp('tiers')}/{name}"
        return
    server = request.getfixturevalue(request.param)
    assert isinstance(server, S3Server)
    bucket = server.bucket()
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_server(server, monkeypatch)
        yield lambda name: f"s3://{bucket}/e2e/{name}"


@pytest.fixture(scope="module", params=captures.NAMES)
def tier(
    request: pytest.FixtureRequest, place: Callable[[str], str], stores: Callable[[str], Path]
) -> Tiered:
    """Each captured store, tiered once."""
    name, store, url = request.param, stores(request.param), place(request.param)
    attached = here("attach", store, "--to", url, "--once", "--json").good().document
    return Tiered(name, store, url, attached, captures.captured(name))


def test_attach_takes_everything_and_says_what_it_met(tier: Tiered) -> None:
    said = tier.attached
    assert said["is_complete"]
    assert said["is_drained"]
    assert said["messages"] == tier.dump.count
    met = (
        *("torn_bytes", "foreign_entries", "below_min_entries", "wrong_tag_codes"),
        *("gaps", "quarantined", "switches"),
    )
    assert {name: said[name] for name in met if said[name]} == MET.get(tier.name, {})
    assert {left["name"] for left in said["left_out"]} == LEFT_OUT.get(tier.name, set())


def test_verify_finds_nothing(tier: Tiered) -> None:
    tier_checks.check_sound(tier.url, tier.store)


def test_cat_gives_what_java_found(tier: Tiered) -> None:
    assert tier.dump.messages
    for topic, messages in tier.dump.messages.items():
        assert cat(tier.url, topic) == messages


def test_status_tells_java_s_bounds(tier: Tiered) -> None:
    assert tier_checks.bounds(tier.url) == tier.dump.bounds
    document = here("status", tier.url, "--store", tier.store, "--json").good().document
    (broker,) = document["brokers"]
    assert (broker["lag_messages"], broker["lag_bytes"], broker["lag_seconds"]) == (0, 0, 0)
    assert broker["waiting"]["records"] == 0
    assert broker["messages"] == tier.dump.count
    assert broker["local"]["rebuilt_queues"] == (["load/0"] if tier.name == "s05b-torn" else [])
    assert not broker["lease"]["is_held"]
    for topic in broker["topics"]:
        for queue in topic["queues"]:
            assert queue["local_max_offset"] == queue["commit_offset"]


def test_raw_gives_the_local_log_s_bytes(tier: Tiered) -> None:
    log = captures.LocalLog(tier.store)
    for topic, messages in tier.dump.messages.items():
        found = here("cat", tier.url, topic, "--format", "raw").good().out
        assert found == log.records(messages)


def test_nothing_in_the_store_was_touched(tier: Tiered) -> None:
    here("attach", tier.store, "--to", tier.url, "--once").good()
    here("verify", tier.url, "--store", tier.store).good()
    with tarfile.open(captures.FOLDER / f"{tier.name}.tar.gz") as archive:
        captured = {
            member.name.partition("/")[2]: (member.size, int(member.mtime))
            for member in archive
            if member.isfile()
        }
    assert captured == {
        str(path.relative_to(tier.store)): (path.stat().st_size, int(path.stat().st_mtime))
        for path in tier.store.rglob("*")
        if path.is_file()
    }


def test_attaching_again_copies_nothing(tier: Tiered) -> None:
    said = here("attach", tier.store, "--to", tier.url, "--once", "--json").good().document
    assert said["is_complete"]
    assert (said["messages"], said["parts"], said["rounds"]) == (0, 0, 0)
    assert said["requests"] <= REQUESTS_OF_NOTHING_MAX
    assert tier_checks.bounds(tier.url) == tier.dump.bounds


def test_small_parts_and_sealed_segments_give_the_same(
    tier: Tiered, place: Callable[[str], str]
) -> None:
    if not tier.url.startswith("file:") and tier.name not in SEALED_ON_SERVERS:
        return  # the requests are the same, only more of them
    url = place(f"{tier.name}-sealed")
    said = here("attach", tier.store, "--to", url, "--once", "--json", *command_line.SMALL).good()
    tier_checks.check_equal(url, tier.dump)
    here("attach", tier.store, "--to", url, "--once", "--seal", *command_line.SMALL).good()
    rows = here("ls", url, "--objects", "-o", "jsonl").good().rows
    parts = [part for row in rows for part in row["parts"]]
    assert {part["state"] for part in parts} == {"sealed"}
    assert len(rows) <= len(parts) <= said.document["parts"], "merging makes fewer of them"
    tier_checks.check_equal(url, tier.dump)
    tier_checks.check_sound(url, tier.store)
    again = (
        here("attach", tier.store, "--to", url, "--once", "--json", *command_line.SMALL)
        .good()
        .document
    )
    assert (again["messages"], again["parts"]) == (0, 0)
