"""The contract over S3Store on each server, with both clients; and what a server can answer."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
from botocore.exceptions import ClientError
from support.faultproxy import FaultProxy
from support.servers import free_port

from backends.base import (
    ByteRange,
    Capabilities,
    ObjectStore,
    Version,
    foreign_below,
    is_key,
    printable,
)
from backends.errors import (
    AlreadyExistsError,
    BackendError,
    ConfigurationError,
    InvalidKeyError,
    ObjectNotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    RefusedError,
    ShortReadError,
    StoreFullError,
    UnavailableError,
    UnknownOutcomeError,
    UnreachableError,
    UnsupportedError,
)
from backends.registry import open_store, probe
from backends.s3_listing import Lister
from backends.s3_settings import S3Options
from backends.testing.contract import ObjectStoreContract

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from support.servers import S3Server

    from backends.base import ObjectInfo

BOTO = {"x-amz-meta-signed": "yes"}  # such a header goes through boto3, which signs it


class TestS3Store(ObjectStoreContract):
    @pytest.fixture
    def store(self, s3_environment: S3Server) -> Iterator[ObjectStore]:
        made = open_store(f"s3://{s3_environment.bucket()}/some/prefix")
        yield made
        made.close()


@pytest.mark.slow
class TestS3StoreWithoutPrefix(ObjectStoreContract):
    @pytest.fixture
    def store(self, s3_environment: S3Server) -> Iterator[ObjectStore]:
        made = open_store(f"s3://{s3_environment.bucket()}")
        yield made
        made.close()


class TestS3StoreThroughBoto(ObjectStoreContract):
    @pytest.fixture
    def store(self, s3_environment: S3Server) -> Iterator[ObjectStore]:
        made = open_store(f"s3://{s3_environment.bucket()}/p", S3Options(headers=BOTO))
        yield made
        made.close()

    @pytest.mark.slow
    def test_lists_more_than_a_page(self, store: ObjectStore) -> None:
        super().test_lists_more_than_a_page(store)

    @pytest.mark.slow
    def test_no_update_is_lost(self, store: ObjectStore) -> None:
        super().test_no_update_is_lost(store)

    @pytest.mark.slow
    def test_readers_see_whole_objects(self, store: ObjectStore) -> None:
        super().test_readers_see_whole_objects(store)


@pytest.mark.slow
class TestS3StoreOnMoto(ObjectStoreContract):
    """The shapes of the API only: moto loses updates and has two winners under races."""

    is_atomic = False

    @pytest.fixture
    def store(self, moto_environment: S3Server) -> Iterator[ObjectStore]:
        made = open_store(f"s3://{moto_environment.bucket()}/p")
        yield made
        made.close()


@pytest.fixture
def opened(s3_environment: S3Server) -> Iterator[Callable[..., ObjectStore]]:
    """Opens stores and closes them at the end."""
    stores: list[ObjectStore] = []

    def make(url: str = "", **options: object) -> ObjectStore:
        stores.append(
            open_store(url or f"s3://{s3_environment.bucket()}/p", replace(S3Options(), **options))
        )
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.fixture
def proxy(s3_environment: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3_environment.endpoint_url) as running:
        yield running


@pytest.fixture(params=["obstore", "boto"])
def faulty(
    request: pytest.FixtureRequest, opened: Callable[..., ObjectStore], proxy: FaultProxy
) -> ObjectStore:
    """A store behind the proxy, through each client."""
    headers = BOTO if request.param == "boto" else {}
    return opened(endpoint_url=proxy.url, timeout_s=20.0, headers=headers)


@pytest.fixture(params=["obstore", "boto"])
def hasty(
    request: pytest.FixtureRequest, opened: Callable[..., ObjectStore], proxy: FaultProxy
) -> ObjectStore:
    """The same with a deadline of a second."""
    headers = BOTO if request.param == "boto" else {}
    return opened(endpoint_url=proxy.url, timeout_s=1.0, headers=headers)


def calls(store: ObjectStore) -> dict[str, Callable[[], object]]:
    """Every kind of request."""
    return {
        "put": lambda: store.put_if_absent("k", b"1"),
        "set": lambda: store.compare_and_set("k", b"1", Version('"0"')),
        "get": lambda: store.get("k"),
        "range": lambda: store.get("k", ByteRange(0, 1)),
        "head": lambda: store.head("k"),
        "list": lambda: list(store.list("")),
        "delete": lambda: store.delete("k"),
    }


@pytest.mark.parametrize("headers", [{}, BOTO], ids=["obstore", "boto"])
@pytest.mark.parametrize(
    "s3_server", [pytest.param("minio", marks=pytest.mark.go)], indirect=True
)  # the other one takes any key
def test_wrong_secret(
    s3_server: S3Server,
    opened: Callable[..., ObjectStore],
    monkeypatch: pytest.MonkeyPatch,
    headers: dict[str, str],
):
    assert s3_server.checks_signatures
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    for name, call in calls(opened(headers=headers)).items():
        with pytest.raises(PermissionDeniedError) as caught:
            call()
        assert s3_server.endpoint_url in str(caught.value), name
        assert "not-the-secret" not in str(caught.value)


@pytest.mark.parametrize("headers", [{}, BOTO], ids=["obstore", "boto"])
def test_no_such_bucket(opened: Callable[..., ObjectStore], headers: dict[str, str]):
    for name, call in calls(opened("s3://no-such-bucket-here/p", headers=headers)).items():
        with pytest.raises((ObjectNotFoundError, PreconditionFailedError)) as caught:
            call()
        assert "no-such-bucket-here" in str(caught.value), name


@pytest.mark.parametrize("headers", [{}, BOTO], ids=["obstore", "boto"])
@pytest.mark.parametrize("host", ["no-such-host.invalid", "127.0.0.1"])
def test_nobody_there(opened: Callable[..., ObjectStore], headers: dict[str, str], host: str):
    endpoint = f"http://{host}:{free_port()}"
    for name, call in calls(
        opened("s3://bucket/p", endpoint_url=endpoint, headers=headers, timeout_s=5)
    ).items():
        with pytest.raises(UnreachableError) as caught:  # nothing was sent
            call()
        assert endpoint in str(caught.value), name


@pytest.mark.parametrize("headers", [{}, BOTO], ids=["obstore", "boto"])
def test_nobody_answers_the_call(
    opened: Callable[..., ObjectStore], headers: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    """A connection that does not come about in time has carried nothing, also for a write."""
    monkeypatch.setattr("backends.s3_settings._CONNECT_TIMEOUT_S", 0.3)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(3):  # the queue of callers is full: the next call is not taken
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(server.getsockname())
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        store = opened("s3://bucket/p", endpoint_url=endpoint, headers=headers, timeout_s=5)
        for name in ("put", "get"):
            with pytest.raises(UnreachableError, match=f"cannot reach {endpoint}"):
                calls(store)[name]()


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "InvalidArgument", RefusedError),
        (400, "ExpiredToken", PermissionDeniedError),
        (400, "BadDigest", UnavailableError),
        (400, "KeyTooLongError", InvalidKeyError),
        (401, "Unauthorized", PermissionDeniedError),
        (403, "AccessDenied", PermissionDeniedError),
        (404, "NoSuchBucket", ObjectNotFoundError),
        (409, "ConditionalRequestConflict", UnavailableError),
        (411, "MissingContentLength", UnsupportedError),
        (429, "TooManyRequests", UnavailableError),
        (500, "InternalError", UnknownOutcomeError),
        (501, "NotImplemented", UnsupportedError),
        (502, "BadGateway", UnknownOutcomeError),
        (503, "SlowDown", UnavailableError),
        (503, "SomethingElse", UnknownOutcomeError),
        (507, "XMinioStorageFull", StoreFullError),
    ],
)
def test_answers_to_writes(
    faulty: ObjectStore, proxy: FaultProxy, status: int, code: str, kind: type[BackendError]
):
    for method, name in (("PUT", "put"), ("PUT", "set"), ("DELETE", "delete")):
        proxy.add("status", method, status=status, code=code)
        with pytest.raises(BackendError) as caught:
            calls(faulty)[name]()
        assert type(caught.value) is kind, name


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "InvalidArgument", RefusedError),
        (403, "AccessDenied", PermissionDeniedError),
        (404, "NoSuchBucket", ObjectNotFoundError),
        (429, "TooManyRequests", UnavailableError),
        (500, "InternalError", UnavailableError),
        (503, "SlowDown", UnavailableError),
    ],
)
def test_answers_to_reads(
    faulty: ObjectStore, proxy: FaultProxy, status: int, code: str, kind: type[BackendError]
):
    for name in ("get", "range", "list"):
        proxy.add("status", "GET", status=status, code=code)
        with pytest.raises(BackendError) as caught:
            calls(faulty)[name]()
        assert type(caught.value) is kind, name


@pytest.mark.parametrize("fault", ["reset", "lost"])
def test_unknown_outcome_of_a_write(faulty: ObjectStore, proxy: FaultProxy, fault: str):
    proxy.add(fault, "PUT")
    with pytest.raises(UnknownOutcomeError):
        faulty.put_if_absent("k", b"1")
    assert [found.key for found in faulty.list("")] == ([] if fault == "reset" else ["k"])
    version = faulty.compare_and_set("c", b"1", None)
    proxy.add(fault, "PUT")
    with pytest.raises(UnknownOutcomeError):
        faulty.compare_and_set("c", b"2", version)
    assert faulty.get("c") == (b"1" if fault == "reset" else b"2")


def test_nothing_is_sent_twice(faulty: ObjectStore, proxy: FaultProxy):
    for fault, method in (("lost", "PUT"), ("reset", "PUT"), ("lost", "DELETE"), ("reset", "GET")):
        proxy.requests.clear()
        proxy.add(fault, method)
        with pytest.raises(UnavailableError):
            calls(faulty)[{"PUT": "put", "DELETE": "delete", "GET": "get"}[method]]()
        assert len(proxy.requests) == 1
    proxy.requests.clear()
    proxy.add("status", "PUT", status=503)
    with pytest.raises(UnavailableError):
        faulty.put_if_absent("other", b"")
    assert len(proxy.requests) == 1


@pytest.mark.parametrize("fault", ["reset", "cut"])
def test_reads_that_break_off(faulty: ObjectStore, proxy: FaultProxy, fault: str):
    faulty.put_if_absent("k", bytes(100_000))
    for name in ("get", "list"):
        proxy.add(fault, "GET")
        with pytest.raises(UnavailableError):
            calls(faulty)[name]()
    proxy.add(fault, "GET")
    with pytest.raises((UnavailableError, ShortReadError)):
        faulty.get("k", ByteRange(0, 50_000))
    assert faulty.get("k", ByteRange(0, 50_000)) == bytes(50_000)


def test_deadlines(hasty: ObjectStore, proxy: FaultProxy):
    proxy.add("late", "PUT", seconds=30)
    with pytest.raises(UnknownOutcomeError):
        hasty.put_if_absent("k", b"1")
    proxy.add("late", "GET", seconds=30)
    with pytest.raises(UnavailableError) as caught:
        hasty.get("k")
    assert not isinstance(caught.value, UnknownOutcomeError)
    assert hasty.get("k") == b"1"


def test_a_request_of_many_bytes_has_a_later_deadline(
    opened: Callable[..., ObjectStore], proxy: FaultProxy
):
    """A bundle on a slow way took longer than 30 s, each time that it was sent."""
    store, data = opened(endpoint_url=proxy.url, timeout_s=1.0), bytes(5 << 20)
    proxy.add("late", "PUT", seconds=2.5)
    store.put_if_absent("large", data)
    for end in (5 << 20, 1 << 20):  # of chunks a reader has several under way
        proxy.add("late", "GET", seconds=2.5)
        assert store.get("large", ByteRange(0, end)) == data[:end]
    proxy.add("late", "GET", seconds=0)  # it says how large it is, and is asked for again
    proxy.add("late", "GET", seconds=2.5)
    assert store.get("large") == data
    proxy.add("late", "GET", seconds=2.5)
    with pytest.raises(UnavailableError):
        store.get("large", ByteRange(0, 512 << 10))


def test_conflict_is_looked_into(faulty: ObjectStore, proxy: FaultProxy):
    """AWS answers 409 when two PUTs met; whether one is stored, only a look tells."""
    proxy.add("status", "PUT", status=409, code="ConditionalRequestConflict")
    with pytest.raises(UnavailableError):
        faulty.put_if_absent("k", b"1")
    faulty.put_if_absent("k", b"1")
    proxy.add("status", "PUT", status=409, code="ConditionalRequestConflict")
    with pytest.raises(AlreadyExistsError):
        faulty.put_if_absent("k", b"2")


def test_headers_are_sent_and_signed_where_aws_wants_it(
    opened: Callable[..., ObjectStore], proxy: FaultProxy
):
    plain = opened(endpoint_url=proxy.url, headers={"X-Team": "blue"})
    plain.put_if_absent("k", b"1")
    assert proxy.headers[-1]["x-team"] == "blue"
    assert proxy.headers[-1]["if-none-match"] == "*"
    signed = opened(endpoint_url=proxy.url, headers={"x-amz-meta-team": "blue"})
    for call in ("put", "get", "head", "list", "delete"):
        calls(signed)[call]()
        assert proxy.headers[-1]["x-amz-meta-team"] == "blue"
        assert "x-amz-meta-team" in proxy.headers[-1]["authorization"]


@pytest.mark.parametrize("headers", [{}, BOTO], ids=["obstore", "boto"])
def test_encryption_with_a_key_of_ones_own(
    opened: Callable[..., ObjectStore], proxy: FaultProxy, headers: dict[str, str]
):
    store = opened(endpoint_url=proxy.url, sse_kms_key_id="key-1", headers=headers)
    proxy.add("status", "PUT", status=503)  # a server without a key service refuses it
    with pytest.raises(UnavailableError):
        store.put_if_absent("k", b"1")
    assert proxy.headers[-1]["x-amz-server-side-encryption"] == "aws:kms"
    assert proxy.headers[-1]["x-amz-server-side-encryption-aws-kms-key-id"] == "key-1"


@pytest.mark.parametrize("headers", [{}, BOTO], ids=["obstore", "boto"])
@pytest.mark.parametrize("chunks", [[b"one", b"two"], [b"onetwo"], [], [bytes(6 << 20)]])
def test_each_put_has_the_bodys_hash_as_checksum_and_in_the_signature(
    opened: Callable[..., ObjectStore],
    proxy: FaultProxy,
    headers: dict[str, str],
    chunks: list[bytes],
):
    """A bucket with Object Lock takes no PUT without a checksum."""
    store, data = opened(endpoint_url=proxy.url, headers=headers), b"".join(chunks)
    digest = hashlib.sha256(data)
    store.put_if_absent("k", chunks)
    version = store.compare_and_set("l", data, None)
    store.compare_and_set("l", data + b"?", version)
    puts = [one for one in proxy.headers if "if-match" in one or "if-none-match" in one]
    assert len(puts) == 3
    for put in puts[:2]:
        assert put["x-amz-content-sha256"] == digest.hexdigest()
        assert put["x-amz-checksum-sha256"] == base64.b64encode(digest.digest()).decode()
    assert puts[2]["x-amz-checksum-sha256"] != puts[1]["x-amz-checksum-sha256"]
    assert store.get("k") == data


def test_following_a_prefix_asks_only_for_what_is_behind(
    opened: Callable[..., ObjectStore], proxy: FaultProxy
):
    store = opened(endpoint_url=proxy.url)
    for number in range(5):
        store.put_if_absent(f"journal/{number}", b"")
    proxy.requests.clear()
    assert [f.key for f in store.list("journal/", start_after="journal/3")] == ["journal/4"]
    assert len(proxy.requests) == 1
    assert "start-after=p%2Fjournal%2F3" in proxy.requests[0]
    assert "prefix=p%2Fjournal%2F" in proxy.requests[0]


def test_profile_gives_endpoint_and_keys(
    s3_environment: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    bucket = s3_environment.bucket()
    for name in s3_environment.environment:
        monkeypatch.delenv(name)
    (tmp_path / "config").write_text(
        "[profile blue]\nregion = eu-north-1\nservices = mine\n"
        f"[services mine]\ns3 =\n  endpoint_url = {s3_environment.endpoint_url}\n"
    )
    (tmp_path / "credentials").write_text(
        f"[blue]\naws_access_key_id = {s3_environment.access_key}\n"
        f"aws_secret_access_key = {s3_environment.secret_key}\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    by_option = open_store(f"s3://{bucket}/p", S3Options(profile="blue", region="us-east-1"))
    by_option.put_if_absent("k", b"1")
    monkeypatch.setenv("AWS_PROFILE", "blue")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    by_environment = open_store(f"s3://{bucket}/p")
    assert by_environment.get("k") == b"1"
    missing = open_store(f"s3://{bucket}/p", S3Options(profile="red"))
    with pytest.raises(ConfigurationError, match="red"):
        missing.get("k")
    for store in (by_option, by_environment, missing):
        store.close()


def test_opening_loads_no_client_until_asked():
    code = (
        "import sys; from backends.registry import open_store; open_store('memory://x');"
        "print([m for m in ('obstore', 'boto3', 'fsspec', 's3fs') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "[]"


def test_using_s3_with_keys_in_the_environment_loads_no_boto3(s3_environment: S3Server):
    code = (
        "import sys; from backends.registry import open_store;"
        f"s = open_store('s3://{s3_environment.bucket()}/p'); s.put_if_absent('a', b'');"
        "print('boto3' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=os.environ
    )
    assert run.stdout.strip() == "False"


FOREIGN = ["p//a", "p/./b", "p/../c", "p/a\nb", "p/a\x01b", "p/d/", "p/z\x7f", "/lead"]


@pytest.mark.parametrize("headers", [{}, BOTO], ids=["obstore", "boto"])
def test_keys_of_others_stop_no_listing(
    s3_environment: S3Server, opened: Callable[..., ObjectStore], headers: dict[str, str]
):
    """Each server takes other ones; none may hide what is ours, or be given as another key."""
    bucket = s3_environment.bucket()
    store = opened(f"s3://{bucket}/p", headers=headers)
    whole = opened(f"s3://{bucket}", headers=headers)
    for key in ("-", "aa", "q/1", "q/2", "zz"):
        store.put_if_absent(key, b"")
    client, taken = s3_environment.client(), []
    for key in FOREIGN:
        with contextlib.suppress(ClientError):
            client.put_object(Bucket=bucket, Key=key, Body=b"")
            taken.append(key)
    listed = [found["Key"] for found in client.list_objects_v2(Bucket=bucket)["Contents"]]
    client.close()
    assert len(taken) >= 4
    ours = ["-", "aa", "q/1", "q/2", "zz"]
    folder = (
        "d" if "p/d/" in taken and not headers else None
    )  # which obstore does not tell from a key
    assert [found.key for found in store.list("") if found.key != folder] == ours
    assert [found.key for found in store.list("q/")] == ["q/1", "q/2"]
    assert [found.key for found in store.list("", start_after="q/1") if found.key != folder] == [
        "q/2",
        "zz",
    ]
    odd = [key for key in listed if key.startswith("p/") and not is_key(key[2:]) and key != "p/d/"]
    assert {printable(key[2:]) for key in odd} <= set(foreign_below(store, ""))
    keys = [found.key for found in whole.list("")]
    assert [key for key in keys if key.removeprefix("p/") in ours] == [f"p/{key}" for key in ours]


def test_more_keys_of_others_than_a_page_has(s3_environment: S3Server):
    bucket = s3_environment.bucket()
    store = open_store(f"s3://{bucket}/p")
    client = s3_environment.client()
    with ThreadPoolExecutor(8) as pool:
        put = partial(client.put_object, Bucket=bucket, Body=b"")
        every = [f"p/{n:04d}{odd}" for n in range(600) for odd in ("\x01", "\x02x", "a")]
        for future in [pool.submit(put, Key=key) for key in every]:
            future.result()
    client.close()
    assert [found.key for found in store.list("")] == [f"{n:04d}a" for n in range(600)]
    assert [found.key for found in store.list("", start_after="0597a")] == ["0598a", "0599a"]
    assert len(foreign_below(store, "")) == 1200
    store.close()


def test_an_empty_page_is_not_the_end_of_a_listing(
    s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch
):
    """A server may have looked at a thousand keys of which it shows none."""
    bucket = s3_environment.bucket()
    store, client = open_store(f"s3://{bucket}/p"), s3_environment.client()
    for key in ("p/1", "p/2\x01", "p/3"):
        client.put_object(Bucket=bucket, Key=key, Body=b"")
    client.close()
    pages = Lister.pages

    def with_empty_ones(
        lister: Lister, folder: str, start_after: str
    ) -> Iterator[Sequence[ObjectInfo]]:
        for page in pages(lister, folder, start_after):
            yield from ([], page)

    monkeypatch.setattr(Lister, "pages", with_empty_ones)
    assert [found.key for found in store.list("")] == ["1", "3"]
    store.close()


def test_probe_finds_conditions(s3_environment: S3Server):
    store = open_store(f"s3://{s3_environment.bucket()}/p")
    assert probe(store, "0a1b") == Capabilities(put_if_absent=True, compare_and_set=True)
    assert list(store.list("")) == []
    store.close()
