"""doctor: what is wrong is found, by a stable name, and what to do is said."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import captures
from support.tiers import TierBuilder

from backends.errors import PermissionDeniedError
from backends.memory import MemoryStore
from backends.s3_control import harm_of
from backends.s3_settings import S3Options
from backends.testing.faulty import Fault, FaultyStore, Rule
from backends.wrapping import WrappingStore
from tiered.clock import ManualClock
from tiered.journal.entry import seal_text
from tiered.keys import LEASE, broker_prefix
from tiered.upkeep import doctor
from tiered.upkeep.doctor import Check, examine

if TYPE_CHECKING:
    from support.command_line import CommandLine

    from backends.base import ObjectStore


def by_name(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in document["checks"]}


def checks_of(store: ObjectStore, **more: Any) -> dict[str, Check]:
    settings: dict[str, Any] = {"clock": ManualClock(), "probe_id": "0", **more}
    return {one.name: one for one in examine("memory://x", store, S3Options(), **settings)}


def test_a_good_folder(tiered: CommandLine, basic: Path, basic_tier: str):
    before = {p for p in Path(basic_tier[7:]).rglob("*") if p.is_file()}
    document = tiered.good("doctor", basic_tier, "--store", basic, "--json").document
    found = by_name(document)
    for name in (
        "reachability", "may_put", "may_get", "may_delete", "clock", "conditional_writes", "free_space",
        "free_inodes", "journal", "lease", "local_store", "packages", "open_files", "java", "spark",
    ):  # fmt: skip
        assert name in found, name
    assert document["is_ok"]
    assert found["local_store"]["detail"].startswith("2,613 messages")
    after = {p for p in Path(basic_tier[7:]).rglob("*") if p.is_file()}
    assert after == before
    assert "reachability" in tiered.good("doctor", basic_tier).text


def test_nobody_answers(tiered: CommandLine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    url = "http://127.0.0.1:1"
    ran = tiered(
        "doctor", "s3://bucket/x", "--endpoint-url", url, "--request-timeout", "1", "--json"
    )
    assert ran.code == 3
    found = by_name(ran.document)
    assert found["reachability"]["status"] == "fail"
    assert found["reachability"]["advice"] == "see whether it runs, and check endpoint and network"
    assert "may_put" not in found


def test_keys_that_are_missing_are_no_matter_of_the_network(
    tiered: CommandLine, monkeypatch: pytest.MonkeyPatch
):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nonexistent")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    url = "http://127.0.0.1:1"
    found = by_name(tiered("doctor", "s3://bucket/x", "--endpoint-url", url, "--json").document)
    assert "no AWS credentials" in found["reachability"]["detail"]
    assert found["reachability"]["advice"] == "correct the URL or the settings"


def test_a_damaged_journal_and_no_local_store(tiered: CommandLine, basic_tier: str, tmp_path: Path):
    copied = tmp_path / "tier"
    shutil.copytree(basic_tier[7:], copied)
    for file in copied.glob("*/*/journal/*"):
        file.chmod(0o600)
        file.write_bytes(b"damaged")
    ran = tiered("doctor", f"file://{copied}", "--store", tmp_path / "none", "--json")
    assert ran.code == 1
    found = by_name(ran.document)
    assert (found["journal"]["status"], found["journal"]["advice"]) == (
        "fail",
        "run `tiered rebuild`",
    )
    assert found["local_store"]["status"] == "fail"


def test_a_wrong_url(tiered: CommandLine):
    assert tiered("doctor", "nonsense").code == 2


class ReadOnly(WrappingStore):
    """Refuses to be written to."""

    def put_if_absent(self, key: str, data: Any) -> None:
        raise PermissionDeniedError(f"no: {key}")


def test_rights_of_a_reader_are_a_warning():
    found = checks_of(ReadOnly(MemoryStore()))
    assert found["may_put"].status == found["conditional_writes"].status == "warn"
    assert "may_get" not in found


class Deaf(WrappingStore):
    """Takes conditions and ignores them, as some servers do."""

    def put_if_absent(self, key: str, data: Any) -> None:
        self._inner.delete(key)
        self._inner.put_if_absent(key, data)


def test_a_store_that_ignores_conditions_fails():
    found = checks_of(Deaf(MemoryStore()))
    assert found["conditional_writes"].status == "fail"
    assert "put-if-absent" in found["conditional_writes"].detail


@pytest.mark.parametrize(("skew_s", "status"), [(0, "ok"), (60, "warn"), (-3600, "fail")])
def test_the_clock(skew_s: int, status: str):
    clock = ManualClock()
    store = MemoryStore(now_ms=lambda: clock.now_ms() + 1000 * skew_s)
    assert checks_of(store, clock=clock)["clock"].status == status


def test_listing_refused():
    rule = Rule(Fault.UNAVAILABLE, frozenset({"list"}), "", times=None)
    found = checks_of(FaultyStore(MemoryStore(), random.Random(1), rule))
    assert found["reachability"].status == "fail"
    assert "may_put" not in found


@pytest.mark.parametrize(
    ("rule", "harms"),
    [
        ({"Status": "Enabled", "Filter": {"Prefix": ""}, "Expiration": {"Days": 30}}, True),
        ({"Status": "Enabled", "Prefix": "tier/a", "Expiration": {"Date": "2030-01-01"}}, True),
        ({"Status": "Enabled", "Filter": {"Prefix": "other/"}, "Expiration": {"Days": 30}}, False),
        ({"Status": "Disabled", "Expiration": {"Days": 30}}, False),
        ({"Status": "Enabled", "Transitions": [{"StorageClass": "GLACIER"}]}, True),
        ({"Status": "Enabled", "Transitions": [{"StorageClass": "STANDARD_IA"}]}, False),
        ({"Status": "Enabled", "NoncurrentVersionExpiration": {"NoncurrentDays": 3}}, False),
        ({"Status": "Enabled", "Expiration": {"ExpiredObjectDeleteMarker": True}}, False),
    ],
)
def test_lifecycle_rules(rule: dict[str, Any], harms: bool):
    assert bool(harm_of(rule, "tier")) is harms


# -- places where no tier is --------------------------------------------------------------------


def test_a_wrong_path_makes_nothing_and_is_an_error(tiered: CommandLine, tmp_path: Path):
    ran = tiered("doctor", f"file://{tmp_path}/wrong/path")
    assert ran.code == 2
    assert "there is no such folder" in ran.error
    assert "--new" in ran.error
    ran = tiered("doctor", f"file://{tmp_path}/wrong/path", "--new")
    assert ran.code == 2
    assert "the one above" in ran.error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_there", [True, False])
def test_a_place_for_a_new_tier_is_tried_and_left_as_it_was(
    tiered: CommandLine, tmp_path: Path, *, is_there: bool
):
    folder = tmp_path / "to come"
    if is_there:
        folder.mkdir()
    options = () if is_there else ("--new",)
    url = f"file://{tmp_path}/to%20come"
    found = by_name(tiered.good("doctor", url, *options, "--json").document)
    assert found["may_put"]["status"] == found["conditional_writes"]["status"] == "ok"
    assert found["clock"]["status"] == "ok"
    assert found["tier"]["detail"].startswith("no tier here yet")
    assert list(tmp_path.rglob("*")) == [folder] * is_there


def test_a_folder_of_other_things_is_no_place_unless_it_is_said(
    tiered: CommandLine, tmp_path: Path
):
    (tmp_path / "holiday.jpg").write_bytes(b"sun")
    ran = tiered("doctor", f"file://{tmp_path}")
    assert ran.code == 2
    assert "no tier is here, but holiday.jpg is" in ran.error
    found = by_name(tiered.good("doctor", f"file://{tmp_path}", "--new", "--json").document)
    assert found["conditional_writes"]["status"] == "ok"
    assert [path.name for path in tmp_path.iterdir()] == ["holiday.jpg"]


def test_what_a_killed_doctor_left_is_nothing_else(tiered: CommandLine, tmp_path: Path):
    for trace in (".tiered-doctor-00/probe-00-put", "probe-00-put", ".tiered-tmp/lock"):
        (tmp_path / trace).parent.mkdir(exist_ok=True)
        (tmp_path / trace).write_bytes(b"probe")
    tiered.good("doctor", f"file://{tmp_path}")


def test_a_folder_in_which_nothing_may_be_written(tiered: CommandLine, tmp_path: Path):
    tmp_path.chmod(0o500)
    try:
        found = by_name(tiered("doctor", f"file://{tmp_path}", "--json").document)
    finally:
        tmp_path.chmod(0o700)
    is_root = os.geteuid() == 0
    assert found["may_put"]["status"] == ("ok" if is_root else "warn")


def test_a_lost_journal(tiered: CommandLine, basic_tier: str, tmp_path: Path):
    copied = tmp_path / "tier"
    shutil.copytree(basic_tier[7:], copied)
    for folder in copied.glob("*/*/journal"):
        shutil.rmtree(folder)
    ran = tiered("doctor", f"file://{copied}", "--json")
    assert ran.code == 1
    assert by_name(ran.document)["journal"]["advice"] == "run `tiered rebuild`"
    assert "tier" not in by_name(ran.document)


def test_timers_are_looked_at_as_topics_are(tiered: CommandLine, tmp_path: Path):
    """They have a journal of their own, and may be all that is there."""
    store, url = captures.unpack("s02-delay-timer", tmp_path), f"file://{tmp_path}/tier"
    tiered.good("timer", "import", store, "--to", url, "--near", "0s")
    alone = by_name(tiered.good("doctor", url, "--json").document)
    assert alone["journal"]["detail"] == "cluster-a/broker-a, timers: epoch 1, 21 queues"
    assert "tier" not in alone
    tiered.good("attach", store, "--to", url, "--once")
    both = tiered.good("doctor", url, "--json").document["checks"]
    assert [one["name"] for one in both].count("journal") == 2
    for file in (tmp_path / "tier").glob("*/*/timer/journal/*"):
        file.chmod(0o600)
        file.write_bytes(b"damaged")
    ran = tiered("doctor", url, "--json")
    failed = [one for one in ran.document["checks"] if one["status"] == "fail"]
    assert [(one["name"], one["advice"]) for one in failed] == [
        ("journal", "run `tiered rebuild --timers`")
    ]
    assert ran.code == 1


def test_it_is_said_where_only_some_objects_were_looked_at_for_names_of_others(
    monkeypatch: pytest.MonkeyPatch,
):
    builder = TierBuilder(prefix=broker_prefix("c", "b"))
    builder.add([b"a"])
    builder.store.put_if_absent(f"{builder.prefix}zzz", b"")
    assert "1 of others" in checks_of(builder.store)["foreign_keys"].detail
    monkeypatch.setattr(doctor, "_LOOKED_AT_MAX", 2)
    found = checks_of(builder.store)["foreign_keys"]
    assert (found.status, "none among the first 2 objects" in found.detail) == ("ok", True)
    monkeypatch.setattr(doctor, "_LOOKED_AT_MAX", 4)
    assert "among" not in checks_of(builder.store)["foreign_keys"].detail


def test_a_broker_that_cannot_be_looked_at_hides_no_other():
    first = TierBuilder(prefix=broker_prefix("c", "a"))
    TierBuilder(first.store, prefix=broker_prefix("c", "b"))
    first.store.put_if_absent(first.prefix + LEASE, seal_text({"format": 99}))
    found = list(examine("memory://x", first.store, S3Options(), clock=ManualClock(), probe_id="0"))
    told = [(one.name, one.status, one.detail) for one in found]
    assert ("journal", "ok", "c/b: epoch 1, 0 queues") in told
    (failed,) = (detail for name, status, detail in told if status == "fail")
    assert failed.startswith("c/a: another version of tiered has written this: its format is 99")
