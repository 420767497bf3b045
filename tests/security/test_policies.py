"""Policies: the files are what the generator makes; on a server that enforces them each role does its work, and no more."""

from __future__ import annotations

import random
import re
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from support.minio_admin import MinioAdmin
from support.mounts import mounted
from support.servers import ROOT

from backends.errors import PermissionDeniedError
from backends.registry import open_store
from tiered.errors import StoreUnavailableError
from tiered.keys import broker_prefix
from tiered.mount import protocol
from tiered.upkeep.doctor import ROLES, Grounds, policy

if TYPE_CHECKING:
    from pathlib import Path

    from support.command_line import CommandLine, Ran
    from support.servers import S3Server

    from backends.base import ObjectStore

FILES = ROOT / "localstack" / "policies"
PLACE = broker_prefix("DefaultCluster", "broker-a")
DATA = f"{PLACE}queue/orders/0000000000/0000000000/{'9' * 20}-0000000001-0badcafe-0000000000"


@pytest.mark.parametrize("role", ROLES)
def test_the_files_are_what_the_command_prints(tiered: CommandLine, role: str):
    archive = ("--archive", "s3://tier-bucket/archive") if role == "archiver" else ()
    printed = tiered.good("policy", role, "s3://tier-bucket/prefix", *archive).out
    assert printed == (FILES / f"{role}.json").read_bytes()


def test_what_the_page_shows_is_accepted(tiered: CommandLine):
    page = (ROOT / "docs/security.md").read_text("utf-8")
    shown = re.findall(r"^\$ tiered (policy .*) > \w+\.json$", page, re.MULTILINE)
    assert len(shown) >= 4
    form = "arn:aws:kms:REGION:ACCOUNT:key/ID"  # which errors tell to give
    for line in (*shown, f"policy writer s3://bucket/prefix --sse-kms-key-id {form}"):
        assert tiered.good(*line.split()).document["Statement"], line


def test_every_file_is_of_a_role():
    assert {path.stem for path in FILES.glob("*.json")} == set(ROLES)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("king", "s3://b0b/p"), "no such role: 'king'; name one of writer, reader"),
        (("writer", "file:///tmp/x"), "policies are for S3"),
        (("writer", "s3://b0b/p*"), "has another meaning in a policy"),
        (("writer", "s3://b0b/${aws:username}"), "has another meaning in a policy"),
        (("writer", "s3://user:secret@b0b/p"), "takes no user, password or port"),
        (("writer", "s3://b0b/p", "--broker", "b"), "both --cluster and --broker"),
        (("writer", "s3://b0b/p", "--archive", "s3://b0b/q"), "only an archiver"),
        (("archiver", "s3://b0b/p"), "give --archive URL"),
        (("archiver", "s3://b0b/p", "--archive", "s3://b0b/p/x"), "tier and archive overlap"),
        (("archiver", "s3://b0b/p/x", "--archive", "s3://b0b/p"), "tier and archive overlap"),
        (("archiver", "s3://b0b/p", "--archive", "s3://b0b"), "tier and archive overlap"),
        (("reader", "s3://b0b/p", "--sse-kms-key-id", "x"), "names a key by its ARN"),
    ],
)
def test_what_makes_no_policy(tiered: CommandLine, arguments: tuple[str, ...], what: str):
    ran = tiered("policy", *arguments)
    assert (ran.code, ran.out) == (2, b"")
    assert what in ran.error
    assert "secret" not in ran.err


def test_nothing_but_reading_goes_beyond_what_a_role_names():
    for role in ROLES:
        archive = "s3://other/a" if role == "archiver" else None
        grounds = Grounds(
            "s3://b0b/p", archive=archive, cluster="c", broker="x", region="cn-north-1"
        )
        for statement in policy(role, grounds)["Statement"]:
            writes = {"s3:PutObject", "s3:DeleteObject"}.intersection(statement["Action"])
            for resource in statement["Resource"]:
                assert resource.startswith("arn:aws-cn:s3:::")
                if writes and role != "archiver":
                    below = resource.removeprefix("arn:aws-cn:s3:::b0b/p/")
                    assert below.startswith((broker_prefix("c", "x"), "probe-"))


def test_a_key_of_kms_and_a_whole_bucket():
    arn = "arn:aws:kms:eu-central-1:123456789012:key/0badcafe-0000"
    for role, needs in (("writer", ["kms:Decrypt", "kms:GenerateDataKey"]), ("reader", ["kms:Decrypt"])):  # fmt: skip
        found = policy(role, Grounds("s3://b0b", kms_key=arn))["Statement"]
        assert found[-1] == {"Sid": "Key", "Effect": "Allow", "Action": needs, "Resource": [arn]}
        assert "Condition" not in found[0]


# -- on a server that enforces them --------------------------------------------------------------


class Actors:
    """Users of a MinIO server, one for each role, on one tier."""

    def __init__(self, server: S3Server, patch: pytest.MonkeyPatch) -> None:
        self.server = server
        self.patch = patch
        self.admin = MinioAdmin(server)
        self.bucket = server.bucket()
        self.url = f"s3://{self.bucket}/some/prefix"
        self._names: dict[str, str] = {}

    def make(self, role: str, **exact: str) -> None:
        archive = f"s3://{self.bucket}/archive" if role == "archiver" else None
        name = f"{role}-{self.bucket}"
        document = policy(role, Grounds(self.url, archive=archive, **exact))
        self.admin.add_policy(name, document)
        self.admin.add_user(name, f"{role}-secret", name)
        self._names[role] = name

    def client(self, role: str) -> Any:
        """A boto3 client of a role. Close it."""
        return replace(
            self.server, access_key=self._names[role], secret_key=f"{role}-secret"
        ).client()

    def be(self, role: str) -> None:
        """Have only the keys of one role (or of the owner)."""
        keys = (self.server.access_key, self.server.secret_key)
        if role != "owner":
            keys = (self._names[role], f"{role}-secret")
        self.patch.setenv("AWS_ACCESS_KEY_ID", keys[0])
        self.patch.setenv("AWS_SECRET_ACCESS_KEY", keys[1])


@pytest.fixture
def actors(minio: S3Server, monkeypatch: pytest.MonkeyPatch) -> Actors:
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nonexistent")
    for name, value in minio.environment.items():
        monkeypatch.setenv(name, value)
    found = Actors(minio, monkeypatch)
    for role in ROLES:
        found.make(role)
    return found


@pytest.fixture
def tier(actors: Actors, tiered: CommandLine, basic: Path) -> str:
    """A tier that the writer has made with its policy alone."""
    actors.be("writer")
    tiered.good("attach", basic, "--to", actors.url, "--once", "--seal")
    return actors.url


def refusal(ran: Ran, permission: str) -> None:
    """Exit code 3, and one line that names the operation, the permission and the place."""
    verb = {"s3:PutObject": "put an object", "s3:ListBucket": "list the bucket"}[permission]
    assert ran.code == 3, ran.err
    assert (
        f"refuses to {verb}, for which these credentials need the permission {permission}: 403"
        in ran.error
    )
    assert "check credentials and permissions" in ran.error
    assert "-secret" not in ran.err


@pytest.mark.go
def test_a_writer_and_a_reader(actors: Actors, tiered: CommandLine, tier: str, basic: Path):
    for command in (["verify", tier, "--deep", "--store", basic, "--repair"], ["lease", tier, "--break"]):  # fmt: skip
        assert tiered.good(*command)
    checks = {row["name"]: row["status"] for row in tiered.good("doctor", tier, "--json").document["checks"]}  # fmt: skip
    assert {checks[f"may_{right}"] for right in ("put", "get", "delete")} == {"ok"}
    actors.be("reader")
    assert tiered.good("status", tier, "--json").document["brokers"][0]["messages"] == 2613
    assert tiered.good("cat", tier, "orders", "--count", "3").rows
    tiered.good("verify", tier, "--deep", "--store", basic)
    for command in (["ls", tier, "--objects"], ["lease", tier], ["doctor", tier]):
        tiered.good(*command)
    refusal(tiered("attach", basic, "--to", tier, "--once"), "s3:PutObject")
    refusal(tiered("expire", tier, "--ttl", "1s", "--apply", "-"), "s3:PutObject")
    refusal(tiered("ls", f"s3://{actors.bucket}/elsewhere"), "s3:ListBucket")


@pytest.mark.go
def test_a_mounter_serves_and_keeps_offsets_and_writes_nowhere_else(actors: Actors, tier: str):
    """Its own journal is trimmed, too; a reader serves the same without keeping anything."""
    place = {"consumerGroup": "g", "topic": "orders", "queueId": 1}
    kept = Store(actors)
    before = kept.keys()
    actors.be("mounter")
    with mounted(tier, snapshot_s=0.01) as served, served.client() as client:
        for offset in range(60):
            client.tell(protocol.UPDATE_CONSUMER_OFFSET, commitOffset=offset, **place)
            assert client.pull("orders", 1, offset).code == 0
        served.stop()
        assert served.mount.is_drained
    prefix = served.mount.store.opened.place.prefix
    assert {
        key for key in kept.keys() ^ before if not key.startswith(f"{prefix}meta/mount/broker-a/")
    } == set()
    with mounted(tier) as served, served.client() as client:
        assert client.ask(protocol.QUERY_CONSUMER_OFFSET, **place).fields == {"offset": "59"}
    before = kept.keys()
    actors.be("reader")
    with pytest.raises(StoreUnavailableError, match="s3:PutObject"), mounted(tier):
        pass
    with mounted(tier, keeps_offsets=False) as served, served.client() as client:
        assert client.pull("orders", 1, 0).code == 0
    assert kept.keys() == before


class Store:
    """Looks at the tier as its owner, whoever else is at work."""

    def __init__(self, actors: Actors) -> None:
        self._actors = actors

    def keys(self) -> set[str]:
        actors = self._actors
        client = actors.server.client()
        try:
            pages = client.get_paginator("list_objects_v2").paginate(
                Bucket=actors.bucket, Prefix="some/prefix/"
            )
            return {
                row["Key"].removeprefix("some/prefix/")
                for page in pages
                for row in page.get("Contents", ())
            }
        finally:
            client.close()


@pytest.mark.go
def test_a_writer_mends(actors: Actors, tiered: CommandLine, tier: str, basic: Path):
    """A bundle that is gone, and then the journal: what the owner has deleted, the writer makes again."""
    for folder in ("/bundle/", "/journal/"):
        actors.be("owner")
        store = open_store(tier)
        keys = [info.key for info in store.list("") if folder in info.key]
        for key in keys[:1] if folder == "/bundle/" else keys:
            store.delete(key)
        store.close()
        actors.be("writer")
        if folder == "/journal/":
            tiered.good("rebuild", tier, "--apply", "-")
        else:
            assert tiered("verify", tier).code == 1
            tiered.good("verify", tier, "--deep", "--store", basic, "--repair")
        tiered.good("verify", tier, "--deep", "--store", basic)


@pytest.mark.go
def test_a_reclaimer_takes_away_and_adds_nothing(
    actors: Actors, tiered: CommandLine, tier: str, basic: Path
):
    actors.be("writer")
    refusal(tiered("expire", tier, "--ttl", "1s", "--apply", "-"), "s3:PutObject")  # no ledger
    actors.be("reclaimer")
    done = tiered.good("expire", tier, "--ttl", "1s", "--apply", "-", "--json").document
    assert done["applied"]
    assert tiered.good("delete-topic", tier, "orders", "--apply", "-")
    time.sleep(2.1)  # what is deleted must have been nobody's for the grace
    gone = tiered.good("gc", tier, "--grace", "1s", "--apply", "-", "--json").document
    assert gone["applied"]["deleted"] == gone["deletion_count"] > 0
    assert tiered.good("verify", tier)
    refusal(tiered("attach", basic, "--to", tier, "--once"), "s3:PutObject")


@pytest.mark.go
def test_an_eraser_writes_anew_what_others_share_with_what_was_given_up(
    actors: Actors, tiered: CommandLine, tier: str
):
    actors.be("reclaimer")
    assert tiered.good("delete-topic", tier, "orders", "--apply", "-")
    erase = ("gc", tier, "--erase", "--grace", "1s", "--apply", "-", "--json")
    refusal(tiered(*erase), "s3:PutObject")
    actors.be("eraser")
    done = tiered.good(*erase).document
    assert done["erased"]["bundles"] == done["given_up_bundles"] > 0
    time.sleep(2.1)
    again = tiered.good(*erase).document
    assert (again["given_up_bundles"], again["applied"]["deleted"]) == (0, again["deletion_count"])
    assert again["deletion_count"] >= done["erased"]["bundles"]
    assert tiered.good("verify", tier, "--deep")


def _try(store: ObjectStore, operation: str, key: str) -> None:
    if operation == "put":
        store.put_if_absent(key, b"x")
    elif operation == "replace":
        store.compare_and_set(key, b"x", None)
    elif operation == "delete":
        store.delete(key)
    else:
        store.get(key)


@pytest.fixture
def planted(actors: Actors) -> dict[str, str]:
    """An object of each kind; key by kind."""
    keys = {
        "data": DATA,
        "bundle": f"{PLACE}bundle/0/{1:020d}-0000000001-0badcafe-0000000000",
        "topic": f"{PLACE}topic/orders/1/{1:020d}-0000000001-0badcafe-0000000000",
        "entry": f"{PLACE}journal/{7:020d}",
        "lease": f"{PLACE}lease",
        "ledger": f"{PLACE}ledger/{1:020d}-0badcafe-0000000000",
        "quarantine": DATA.replace("queue/", "quarantine/"),
        "index": f"{PLACE}index/{1:020d}-0000000001-0badcafe-0000000000",
        "timer": f"{PLACE}timer/bundle/0/{1:020d}-0000000001-0badcafe-0000000000",
        "probe": "probe-0badcafe-put",
        "mount": f"{PLACE}meta/mount/broker-a/journal/{7:020d}",
    }
    store = open_store(actors.url)
    for key in keys.values():
        store.put_if_absent(key, b"planted")
    store.close()
    return keys


OF_DATA = ("data", "bundle", "topic", "quarantine", "index")


MAY = {
    "writer": {("put", kind) for kind in (*OF_DATA, "entry", "lease", "probe", "timer")}
    | {("delete", "probe")},
    "reader": set(),
    "archiver": set(),
    "reclaimer": {("put", kind) for kind in ("entry", "lease", "ledger")}
    | {("delete", kind) for kind in (*OF_DATA, "entry", "ledger", "timer")},
    "eraser": {
        ("put", kind)
        for kind in ("data", "bundle", "topic", "entry", "lease", "ledger", "probe", "timer")
    }
    | {("delete", kind) for kind in (*OF_DATA, "entry", "ledger", "timer", "probe")},
    "timekeeper": {("put", "timer"), ("put", "probe"), ("delete", "probe")},
    "mounter": {("put", "mount"), ("delete", "mount")},
}
BY_THE_STAR = {
    "writer": {("put", "mount")},
    "reclaimer": {("put", "mount"), ("delete", "mount")},
    "eraser": {("put", "mount"), ("delete", "mount")},
}
"""Where the broker is not named: the star for it covers slashes, and a mount has a journal as well."""


@pytest.mark.go
@pytest.mark.parametrize("exact", [{}, {"cluster": "DefaultCluster", "broker": "broker-a"}])
@pytest.mark.parametrize("role", ROLES)
def test_what_each_role_may(
    actors: Actors, planted: dict[str, str], role: str, exact: dict[str, str]
):
    """Every kind of key: new ones are put below it, and the planted ones deleted."""
    actors.make(role, **exact)
    actors.be(role)
    store = open_store(actors.url)
    found: set[tuple[str, str]] = set()
    for kind, key in planted.items():
        assert store.get(key) == b"planted"
        other = key if kind == "lease" else key[:-1] + "1"
        for operation, at in (("put", other), ("delete", key)):
            try:
                store.delete(at) if operation == "delete" else _put(store, at)
            except PermissionDeniedError:
                continue
            found.add((operation, kind))
    store.close()
    assert found == MAY[role] | (set() if exact else BY_THE_STAR.get(role, set()))


def _put(store: ObjectStore, key: str) -> None:
    if key.endswith("/lease"):
        store.compare_and_set(key, b"mine", store.get_versioned(key)[1])
    else:
        store.put_if_absent(key, b"mine")


@pytest.mark.go
@pytest.mark.parametrize("role", ROLES)
def test_no_role_leaves_its_prefix(actors: Actors, role: str):
    neighbours = [f"s3://{actors.bucket}/{path}" for path in ("some/prefix2", "some", "archive2")]
    if role != "archiver":
        neighbours.append(f"s3://{actors.bucket}/archive")
    actors.be("owner")
    for url in neighbours:
        store = open_store(url)
        store.put_if_absent("k/x", b"not yours")
        store.close()
    actors.be(role)
    for url in neighbours:
        store = open_store(url)
        for operation in ("put", "replace", "delete", "get"):
            key = "k/x" if operation in {"delete", "get"} else f"{DATA}{operation}"
            with pytest.raises(PermissionDeniedError):
                _try(store, operation, key)
        with pytest.raises(PermissionDeniedError):
            next(iter(store.list("")), None)
        store.close()


@pytest.mark.go
def test_an_archiver_reads_the_tier_and_writes_its_archive(
    actors: Actors, tiered: CommandLine, tier: str, basic: Path
):
    actors.be("archiver")
    assert tiered.good("verify", tier, "--deep", "--store", basic)
    refusal(tiered("attach", basic, "--to", tier, "--once"), "s3:PutObject")
    store = open_store(f"s3://{actors.bucket}/archive")
    store.put_if_absent("topic=orders/part-0.parquet", b"PAR1")
    assert [info.key for info in store.list("")] == ["topic=orders/part-0.parquet"]
    with pytest.raises(PermissionDeniedError, match="s3:DeleteObject"):
        store.delete("topic=orders/part-0.parquet")
    store.close()
    client = actors.client("archiver")
    try:  # as Spark writes: in several chunks
        _multipart(client, actors.bucket, "archive/big", random.Random(1).randbytes(100))
    finally:
        client.close()


def _multipart(client: Any, bucket: str, key: str, data: bytes) -> None:
    upload = client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
    where = {"Bucket": bucket, "Key": key, "UploadId": upload}
    etag = client.upload_part(**where, PartNumber=1, Body=data)["ETag"]
    parts = {"Parts": [{"PartNumber": 1, "ETag": etag}]}
    client.complete_multipart_upload(**where, MultipartUpload=parts)
