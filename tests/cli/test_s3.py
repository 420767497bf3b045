"""The same commands on an S3 server, found through the environment or through options."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.servers import use_server

from backends.registry import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from support.command_line import CommandLine
    from support.servers import S3Server


def test_a_tier_in_a_bucket(
    tiered: CommandLine, basic: Path, basic_tier: str, s3_environment: S3Server
):
    url = f"s3://{s3_environment.bucket()}/some/prefix"
    first = tiered.good("attach", basic, "--to", url, "--once", "--json").document
    assert (first["messages"], first["is_complete"]) == (2613, True)
    assert first["requests"] < 200
    assert first["request_dollars"] > 0
    for topic in ("orders", "large"):
        raw = tiered.good("cat", url, topic, "--format", "raw").out
        assert raw == tiered.good("cat", basic_tier, topic, "--format", "raw").out
    assert tiered.good("verify", url, "--deep", "--store", basic).code == 0
    broker = tiered.good("status", url, "--store", basic, "--json").document["brokers"][0]
    assert broker["lag_messages"] == 0


def test_options_name_the_server(
    tiered: CommandLine, s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch
):
    url = f"s3://{s3_environment.bucket()}"
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    place = ("--endpoint-url", s3_environment.endpoint_url, "--region", "us-east-1")
    ran = tiered("ls", url, *place, "--path-style")
    assert ran.code == 2
    assert "there is no tier here" in ran.error


def test_a_bucket_that_is_not_there(tiered: CommandLine, s3_environment: S3Server):
    assert s3_environment.endpoint_url
    ran = tiered("ls", "s3://no-such-bucket-here/prefix")
    assert ran.code == 3
    assert "no-such-bucket-here" in ran.error
    assert "check the URL" in ran.error


@pytest.mark.go
def test_wrong_keys(tiered: CommandLine, minio: S3Server, monkeypatch: pytest.MonkeyPatch):
    url = f"s3://{minio.bucket()}"
    for name, value in {**minio.environment, "AWS_SECRET_ACCESS_KEY": "wrong"}.items():
        monkeypatch.setenv(name, value)
    ran = tiered("ls", url)
    assert ran.code == 3
    assert "check the access key, its secret" in ran.error
    assert "wrong" not in ran.err


def test_doctor_before_there_is_a_tier(tiered: CommandLine, s3_environment: S3Server):
    bucket = s3_environment.bucket()
    document = tiered.good("doctor", f"s3://{bucket}/to/come", "--json").document
    found = {check["name"]: check["detail"] for check in document["checks"]}
    assert found["tier"].startswith("no tier here yet")
    store = open_store(f"s3://{bucket}")
    try:
        assert list(store.list("")) == []
        store.put_if_absent("to/come/other", b"thing")
    finally:
        store.close()
    assert "but other is" in tiered("doctor", f"s3://{bucket}/to/come").error
    ran = tiered("doctor", "s3://no-such-bucket-here/prefix", "--json")
    assert (ran.code, ran.document["checks"][0]["status"]) == (3, "fail")
    assert "create the bucket" in ran.document["checks"][0]["advice"]


def test_doctor_reads_the_rules_of_a_bucket(tiered: CommandLine, s3_environment: S3Server):
    bucket = s3_environment.bucket()
    url = f"s3://{bucket}/some/prefix"
    document = tiered.good("doctor", url, "--json").document
    found = {check["name"]: check["status"] for check in document["checks"]}
    assert found["conditional_writes"] == found["clock"] == found["lifecycle"] == "ok"
    assert (found["encryption"], found["versioning"]) == ("ok", "ok")
    rule = {
        "ID": "r",
        "Status": "Enabled",
        "Filter": {"Prefix": "some/"},
        "Expiration": {"Days": 9},
    }
    client = s3_environment.client()
    try:
        client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
        client.put_bucket_lifecycle_configuration(
            Bucket=bucket, LifecycleConfiguration={"Rules": [rule]}
        )
    finally:
        client.close()
    ran = tiered("doctor", url, "--json")
    found = {check["name"]: check["status"] for check in ran.document["checks"]}
    assert (ran.code, found["lifecycle"], found["versioning"]) == (1, "fail", "warn")


def test_a_lost_journal_in_a_bucket(tiered: CommandLine, basic: Path, s3_environment: S3Server):
    url = f"s3://{s3_environment.bucket()}/some/prefix"
    tiered.good("attach", basic, "--to", url, "--once", "--no-index")
    store = open_store(url)
    try:
        for info in list(store.list("")):
            if "/journal/" in info.key:
                store.delete(info.key)
    finally:
        store.close()
    assert tiered("ls", url).code == 5
    assert tiered.good("rebuild", url, "--apply", "-", "--json").document["is_applied"]
    assert tiered.good("verify", url, "--deep", "--store", basic, "--strict").code == 0


@pytest.mark.go
def test_a_bucket_with_object_lock_takes_a_tier_and_is_told_of(
    tiered: CommandLine, basic: Path, minio: S3Server, monkeypatch: pytest.MonkeyPatch
):
    use_server(minio, monkeypatch)
    bucket = f"{minio.bucket()}-locked"
    client = minio.client()
    retention = {"Mode": "GOVERNANCE", "Days": 1}
    rule = {"ObjectLockEnabled": "Enabled", "Rule": {"DefaultRetention": retention}}
    try:
        client.create_bucket(Bucket=bucket, ObjectLockEnabledForBucket=True)
        client.put_object_lock_configuration(Bucket=bucket, ObjectLockConfiguration=rule)
    finally:
        client.close()
    tiered.good("attach", basic, "--to", f"s3://{bucket}/p", "--once")
    document = tiered("doctor", f"s3://{bucket}/p", "--json").document
    found = {check["name"]: check for check in document["checks"]}
    assert found["object_lock"]["status"] == "warn"
    assert "GOVERNANCE 1 days" in found["object_lock"]["detail"]
