"""``expire``, ``delete-topic`` and ``gc`` from the command line, on a folder and on an S3 server."""

from __future__ import annotations

import json
import re
import signal
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from backends.registry import open_store
from tiered.clock import SystemClock
from tiered.format.bundle import read_table
from tiered.journal.lease import Holder, Lease

if TYPE_CHECKING:
    from pathlib import Path

    from support.captures import Unpack
    from support.command_line import CommandLine, Start
    from support.servers import S3Server

_BUNDLE = re.compile("/(bundle|topic|queue)/")
SMALL = ("--bundle-size", "4KiB", "--segment-size", "8KiB")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/tier"


@pytest.fixture
def bucket_url(s3_environment: S3Server) -> str:
    return f"s3://{s3_environment.bucket()}/tier"


def queues(tiered: CommandLine, url: str, topic: str) -> list[dict[str, Any]]:
    found = tiered.good("ls", url, "--json").document["queues"]
    return [queue for queue in found if queue["topic"] == topic]


def objects(tiered: CommandLine, url: str) -> int:
    return len(tiered.good("ls", url, "--objects", "--json").document["objects"])


def retention(tiered: CommandLine, basic: Path, url: str, tmp_path: Path):
    tiered.good("attach", basic, "--to", url, "--once", "--seal", *SMALL)
    before = objects(tiered, url)
    file = tmp_path / "plan.json"
    some = ("expire", url, "--ttl", "100w", "--topic-ttl", "orders=1s", "--max-deletions", "100000")
    planned = tiered(*some, "--plan", str(file), "--exit-code", "--json")
    assert planned.code == 1
    assert {step["topic"] for step in planned.document["steps"]} == {"orders"}
    assert objects(tiered, url) == before
    done = tiered.good("expire", url, "--apply", file, "--json").document
    assert done["applied"]["steps"] == len(done["steps"]) > 1
    for queue in queues(tiered, url, "orders"):
        assert queue["min_offset"] == queue["commit_offset"] > 0
    assert tiered.good("cat", url, "orders", "--count", "1").out == b""
    assert tiered.good("cat", url, "large", "--count", "1").out
    kept = tiered.good("gc", url, "--json").document
    assert kept["deletions"] == []  # the grace
    assert kept["left"]["within_grace"] >= done["objects"]
    again = tiered.good("expire", url, "--apply", file, "--json").document["applied"]
    assert (again["steps"], again["already_done"]) == (0, len(done["steps"]))
    assert again["was_applied"]
    assert "was applied before" in tiered.good("expire", url, "--apply", file).text
    time.sleep(1.1)  # S3 tells times in seconds
    plan = ("gc", url, "--grace", "1ms")
    tiered.good(*plan, "--plan", file)
    assert tiered(*plan, "--exit-code").code == 1
    deleted = tiered.good("gc", url, "--apply", file, "--json").document
    assert deleted["applied"]["deleted"] == deleted["deletion_count"] >= done["objects"]
    assert tiered.good("gc", url, "--apply", file, "--json").document["applied"]["deleted"] == 0
    assert "was applied before" in tiered.good("gc", url, "--apply", file).text
    assert tiered.good("verify", url, "--deep", "--json").document["recorded"]["orphans"] == 0
    on = tiered.good("attach", basic, "--to", url, "--once", "--json").document
    assert (on["messages"], on["is_complete"]) == (0, True)


def removal(tiered: CommandLine, basic: Path, url: str):
    tiered.good("attach", basic, "--to", url, "--once")
    shown = tiered.good("delete-topic", url, "large")
    assert "nothing is changed" in shown.text
    assert queues(tiered, url, "large")[0]["messages"] > 0
    tiered.good("delete-topic", url, "large", "--apply", "-")
    assert sum(queue["messages"] for queue in queues(tiered, url, "large")) == 0
    time.sleep(1.1)
    tiered.good("gc", url, "--grace", "1ms", "--apply", "-")
    assert tiered.good("verify", url, "--deep", "--strict").code == 0
    ran = tiered("delete-topic", url, "nobody")
    assert ran.code == 2
    assert "no topic nobody" in ran.error


def erasure(tiered: CommandLine, basic: Path, url: str, tmp_path: Path):
    tiered.good("attach", basic, "--to", url, "--once")
    tiered.good("attach", basic, "--to", url, "--once", "--merge")
    kept = {topic: tiered.good("cat", url, topic, "-o", "jsonl").out for topic in ("events", "orders")}  # fmt: skip
    given_up = tiered.good("delete-topic", url, "large", "--apply", "-")
    assert "until `tiered gc --erase` rewrites it" in given_up.text
    shown = tiered.good("gc", url, "--grace", "1ms")
    assert "1 object beside others; `tiered gc --erase` rewrites these" in shown.text
    plain = tiered.good("gc", url, "--json").document
    assert (plain["given_up_bundles"], plain["erases"], plain["erased"]) == (1, False, None)
    assert plain["given_up_bytes"] > 0
    file = tmp_path / "erase.json"
    erase = ("gc", url, "--grace", "1ms", "--erase")
    planned = tiered(*erase, "--plan", file, "--exit-code")
    assert planned.code == 1
    assert "nothing is changed" in planned.text
    assert "1 object" in planned.text
    done = tiered.good("gc", url, "--apply", file)
    assert "erased    " in done.text
    assert "to come   the old objects hold it still" in done.text
    again = tiered.good("gc", url, "--apply", file, "--json").document["erased"]
    assert (again["bundles"], again["already_done"], again["was_applied"]) == (0, 1, True)
    time.sleep(1.1)  # S3 tells times in seconds
    last = tiered.good(*erase, "--apply", "-", "--json").document
    assert (last["given_up_bundles"], last["erasures"], last["erased"]) == (0, [], None)
    assert last["applied"]["deleted"] == last["deletion_count"] > 0
    for topic, before in kept.items():
        assert tiered.good("cat", url, topic, "-o", "jsonl").out == before
    assert tiered.good("verify", url, "--deep", "--strict").code == 0
    tables = set()
    with closing(open_store(url)) as store:
        for data in (store.get(info.key) for info in store.list("") if _BUNDLE.search(info.key)):
            tables.update(read_table(data, len(data), where=url).topics)
    assert {"events", "orders"} <= tables
    assert "large" not in tables


def test_erasing(tiered: CommandLine, basic: Path, url: str, tmp_path: Path):
    erasure(tiered, basic, url, tmp_path)


@pytest.mark.slow
def test_erasing_on_s3(tiered: CommandLine, basic: Path, bucket_url: str, tmp_path: Path):
    erasure(tiered, basic, bucket_url, tmp_path)


def test_erasing_refuses_beside_a_writer(tiered: CommandLine, basic: Path, url: str):
    tiered.good("attach", basic, "--to", url, "--once")
    tiered.good("delete-topic", url, "large", "--apply", "-")
    with closing(open_store(url)) as store:
        (key,) = (info.key for info in store.list("") if info.key.endswith("/lease"))
        lease = Lease(
            store, key.removesuffix("lease"), writer="0badcafe", holder=Holder.present(),
            seconds=600, clock=SystemClock(),
        )  # fmt: skip
        assert lease.try_acquire() is None
        assert "so --apply refuses until it is stopped" in tiered.good("gc", url, "--erase").text
        ran = tiered("gc", url, "--erase", "--apply", "-")
        assert (ran.code, "a writer is at work" in ran.error) == (4, True)
        lease.release()
    assert tiered.good("gc", url, "--erase", "--apply", "-", "--json").document["erased"]["made"]


def test_a_plan_that_rewrites_nothing_is_not_taken_for_one_that_does(
    tiered: CommandLine, basic_tier: str, tmp_path: Path
):
    file = tmp_path / "plan.json"
    tiered.good("gc", basic_tier, "--plan", file)
    ran = tiered("gc", basic_tier, "--erase", "--apply", file)
    assert ran.code == 2
    assert "made without --erase" in ran.error
    shown = tiered.good("gc", basic_tier, "--apply", file, "--json").document
    assert (shown["erases"], shown["erased"]) == (False, None)


def test_retention(tiered: CommandLine, basic: Path, url: str, tmp_path: Path):
    retention(tiered, basic, url, tmp_path)


@pytest.mark.slow
def test_retention_on_s3(tiered: CommandLine, basic: Path, bucket_url: str, tmp_path: Path):
    retention(tiered, basic, bucket_url, tmp_path)


def test_a_topic_is_removed(tiered: CommandLine, basic: Path, url: str):
    removal(tiered, basic, url)


def test_a_topic_is_removed_from_s3(tiered: CommandLine, basic: Path, bucket_url: str):
    removal(tiered, basic, bucket_url)


def test_beside_a_running_attach(tiered: CommandLine, basic: Path, tmp_path: Path, start: Start):
    url = f"file://{tmp_path}/tier"
    with start("attach", basic, "--to", url, "--freshness", "0.1", *SMALL) as process:
        try:
            deadline = time.monotonic() + 120
            while not (tmp_path / "tier").exists() or not _is_tiered(tiered, url, basic):
                assert time.monotonic() < deadline
                time.sleep(0.2)
            assert tiered.good("lease", url, "--json").document["state"] == "held"
            done = tiered.good("expire", url, "--ttl", "1s", "--apply", "-", "--json").document
            assert done["applied"]["steps"] > 0
            refused = tiered("delete-topic", url, "large", "--apply", "-")
            assert refused.code == 4
            assert "a writer is at work" in refused.error
            held = tiered.good("gc", url, "--grace", "1ms", "--json").document
            assert held["is_writer_alive"]
            assert not held["takes_epoch"]
            assert tiered.good("gc", url, "--grace", "1ms", "--apply", "-").code == 0
            assert process.poll() is None
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=120)
    assert process.returncode == 0
    assert tiered.good("verify", url, "--deep").code == 0


def _is_tiered(tiered: CommandLine, url: str, store: Path) -> bool:
    ran = tiered("status", url, "--store", store, "--json")
    return ran.code == 0 and ran.document["brokers"][0]["lag_messages"] == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("expire",), "no time to live is given"),
        (("expire", "--ttl", "soon"), "not a duration"),
        (("expire", "--topic-ttl", "orders"), "not a duration"),
        (("gc", "--plan", "a", "--apply", "b"), "contradict each other"),
        (("gc", "--apply", "/nowhere/plan"), "the plan cannot be read"),
        (("gc", "--max-deletions", "0"), "must be at least 1"),
    ],
)
def test_wrong_usage(tiered: CommandLine, basic_tier: str, words: tuple[str, ...], says: str):
    ran = tiered(words[0], basic_tier, *words[1:])
    assert ran.code == 2
    assert says in ran.error


def test_the_broker_s_own_reserve_time(
    tiered: CommandLine, unpacked: Unpack, url: str, tmp_path: Path
):
    store = unpacked("s01-basic")
    tiered.good("attach", store, "--to", url, "--once", "--seal")
    table = store / "config" / "topics.json"
    document = json.loads(table.read_text())
    for topic, hours in {"orders": "1", "large": "10000000", "nobody": "x"}.items():
        config = document["topicConfigTable"].setdefault(topic, {})
        config["attributes"] = {"reserve.time": hours}
    table.write_text(json.dumps(document))

    def expiring(*options: str | Path) -> set[str]:
        found = tiered.good("expire", url, "--json", *options).document
        return {step["topic"] for step in found["steps"]}

    assert expiring("--store", store) == {"orders"}
    assert "large" in expiring("--ttl", "1s")
    both = expiring("--store", store, "--ttl", "1s")
    assert "orders" in both
    assert "large" not in both
    assert expiring("--store", store, "--topic-ttl", "orders=1000w") == set()
    ran = tiered("expire", url, "--store", tmp_path / "nothing")
    assert ran.code == 2
    assert "topics cannot be read" in ran.error


def test_a_plan_that_was_changed_or_is_another_s_is_refused(
    tiered: CommandLine, basic_tier: str, tmp_path: Path
):
    file = tmp_path / "plan.json"
    tiered.good("gc", basic_tier, "--plan", file)
    ran = tiered("expire", basic_tier, "--apply", file)
    assert ran.code == 2
    assert "it is of `tiered gc`" in ran.error
    plan = json.loads(file.read_text())
    file.write_text(json.dumps({**plan, "grace_ms": 0}))
    assert "it was changed or cut" in tiered("gc", basic_tier, "--apply", file).error
    file.write_text("{")
    assert "this is not a plan" in tiered("gc", basic_tier, "--apply", file).error


def test_a_plan_of_a_tier_that_has_moved_on_is_refused_with_code_1_and_what_changed(
    tiered: CommandLine, basic: Path, url: str, tmp_path: Path
):
    tiered.good("attach", basic, "--to", url, "--once", "--seal", *SMALL)
    file = tmp_path / "plan.json"
    tiered.good("expire", url, "--topic-ttl", "orders=1s", "--max-deletions", "4", "--plan", file)
    tiered.good("delete-topic", url, "orders", "--apply", "-")
    tiered.good("attach", basic, "--to", url, "--once")
    plan = tmp_path / "gc.json"
    time.sleep(0.01)
    tiered.good("gc", url, "--grace", "1ms", "--plan", plan)
    doomed = json.loads(plan.read_text())["deletions"][0]["key"]
    path = tmp_path / "tier" / doomed
    path.write_bytes(b"another object")
    refused = tiered("gc", url, "--apply", plan)
    assert refused.code == 1
    assert f"moved on since this was planned: {doomed} is another object" in refused.error


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_rows_alone_do_not_hide_that_nothing_may_be_deleted(
    tiered: CommandLine, basic: Path, url: str, form: str
):
    tiered.good("attach", basic, "--to", url, "--once")
    with closing(open_store(url)) as store:
        key = next(info.key for info in store.list("") if _BUNDLE.search(info.key))
        store.delete(key)
    ran = tiered("gc", url, "-o", form)
    assert ran.code == 1
    assert f"refused: {key} is named by the journal and is gone" in ran.err


def test_a_plan_with_another_grace_than_is_given_deletes_nothing(
    tiered: CommandLine, basic_tier: str, tmp_path: Path
):
    file = tmp_path / "plan.json"
    tiered.good("gc", basic_tier, "--grace", "1s", "--plan", file)
    ran = tiered("gc", basic_tier, "--grace", "7d", "--apply", file)
    assert (ran.code, "this plan has a grace of 1s" in ran.error) == (2, True)
    tiered.good("gc", basic_tier, "--grace", "1000ms", "--apply", file)
    tiered.good("gc", basic_tier, "--apply", file)
