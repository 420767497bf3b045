"""A bucket that keeps old versions: `gc --erase` deletes these, and all that deletes says that they stay."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from backends.registry import open_store
from backends.s3_control import BotoWire
from backends.s3_wire import S3Failure

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.command_line import CommandLine
    from support.servers import S3Server

ROOTS = ("/bundle/", "/topic/", "/queue/", "/index/", "/quarantine/")


class Bucket:
    """One with versioning, looked at past the tier."""

    def __init__(self, server: S3Server) -> None:
        self.name = server.bucket()
        self.url = f"s3://{self.name}/some/prefix"
        self.client: Any = server.client()
        self.client.put_bucket_versioning(
            Bucket=self.name, VersioningConfiguration={"Status": "Enabled"}
        )

    def hidden(self) -> set[str]:
        """Keys of data of which there are bytes, and no object."""
        pages = self.client.get_paginator("list_object_versions").paginate(Bucket=self.name)
        rows = [(one["Key"], one["IsLatest"]) for page in pages for one in page.get("Versions", [])]
        live = {key for key, is_latest in rows if is_latest}
        return {key for key, _ in rows if any(root in key for root in ROOTS)} - live


@pytest.fixture
def bucket(s3_environment: S3Server) -> Iterator[Bucket]:
    made = Bucket(s3_environment)
    yield made
    made.client.close()


def test_what_is_erased_is_gone_in_every_version(tiered: CommandLine, basic: Path, bucket: Bucket):
    url = bucket.url
    tiered.good("attach", basic, "--to", url, "--once", "--seal")
    said = tiered.good("delete-topic", url, "orders", "--apply", "-").out.decode()
    assert "old versions" in said
    erase = ("gc", url, "--erase", "--grace", "1s", "--apply", "-", "--json")
    done = tiered.good(*erase).document
    assert done["erased"]["bundles"] > 0
    assert done["old_versions"]["versioning"] == "Enabled"
    time.sleep(2.1)  # what is deleted must have been nobody's for the grace
    plain = tiered.good("gc", url, "--grace", "1s", "--apply", "-")
    assert "stays as old versions" in plain.out.decode()
    assert bucket.hidden()
    planned = tiered.good("gc", url, "--erase", "--grace", "1s", "--json").document
    assert planned["old_versions"]["versions"] == len(bucket.hidden())
    again = tiered.good(*erase).document
    assert again["old_versions"]["was_deleted"]
    assert again["old_versions"]["versions"] == planned["old_versions"]["versions"]
    assert bucket.hidden() == set()
    assert tiered.good("verify", url, "--deep")
    assert tiered.good(*erase).document["old_versions"]["versions"] == 0


def test_what_the_journal_names_and_somebody_has_deleted_can_come_back(
    tiered: CommandLine, basic: Path, bucket: Bucket
):
    url = bucket.url
    tiered.good("attach", basic, "--to", url, "--once")
    store = open_store(url)
    key = next(info.key for info in store.list("") if "/bundle/" in info.key)
    store.delete(key)
    store.close()
    ran = tiered("gc", url, "--erase", "--grace", "1ms", "--apply", "-")
    assert ran.code == 5 or b"refused" in ran.out
    assert any(hidden.endswith(key) for hidden in bucket.hidden())


def test_who_may_not_delete_versions_is_told_so_before_anything_is_rewritten(
    tiered: CommandLine, basic: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
):
    def denied(*_: object) -> None:
        raise S3Failure(403, "AccessDenied")

    url = bucket.url
    tiered.good("attach", basic, "--to", url, "--once")
    tiered.good("delete-topic", url, "orders", "--apply", "-")
    for name, permission in (
        ("versioning", "s3:GetBucketVersioning"),
        ("versions", "s3:ListBucketVersions"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(BotoWire, name, denied)
            ran = tiered("gc", url, "--erase", "--grace", "1ms", "--apply", "-")
        assert ran.code == 3
        assert permission in ran.error
    monkeypatch.setattr(BotoWire, "versioning", denied)
    document = tiered.good("gc", url, "--grace", "1ms", "--json").document
    assert document["old_versions"]["versioning"] is None
    assert document["given_up_bundles"] > 0  # still


def test_a_version_that_may_not_be_deleted_is_not_said_to_be_gone(
    tiered: CommandLine, basic: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
):
    def locked(*_: object) -> None:
        raise S3Failure(403, "AccessDenied")

    url = bucket.url
    tiered.good("attach", basic, "--to", url, "--once", "--seal")
    tiered.good("delete-topic", url, "orders", "--apply", "-")
    tiered.good("gc", url, "--erase", "--grace", "1ms", "--apply", "-")
    time.sleep(1.1)
    tiered.good("gc", url, "--grace", "1ms", "--apply", "-")
    assert bucket.hidden()
    monkeypatch.setattr(BotoWire, "delete_version", locked)
    ran = tiered("gc", url, "--erase", "--grace", "1ms", "--apply", "-")
    assert (ran.code, ran.out) == (3, b"")
    assert "s3:DeleteObjectVersion" in ran.error
    assert bucket.hidden()
