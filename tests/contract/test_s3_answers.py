"""What a server's refusals are told as: a server that answers by rule, both clients, and what an operator sees."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from support.command_line import here
from support.servers import S3Server, serving, use_server

from backends import s3_listing
from backends.errors import (
    ARCHIVED,
    CLOCK,
    ENCRYPTION,
    FAILING,
    FULL,
    PERMISSION,
    REASONS,
    SETTINGS,
    BackendError,
    ObjectNotFoundError,
    PermissionDeniedError,
    UnavailableError,
    UnknownOutcomeError,
)
from backends.registry import open_store
from backends.s3_control import open_versions, read_object_lock, read_rules
from backends.s3_settings import S3Options
from backends.s3_wire import rows
from tiered.api.stores import PatientStore, RefusedForNowError
from tiered.clock import ManualClock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backends.base import ObjectStore


class Said(NamedTuple):
    """An answer."""

    status: int
    body: bytes = b""
    kind: str = "application/xml"


class Server:
    """Answers everything as it is told to."""

    def __init__(self) -> None:
        self.says = Said(200)
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None: ...

            def _any(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                said = owner.says
                self.send_response(said.status)
                self.send_header("Content-Type", said.kind)
                self.send_header("Content-Length", str(len(said.body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(said.body)

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _any  # noqa: N815 (so the base class calls them)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    from support.servers import use_server

    made = Server()
    use_server(S3Server("ruled", made.url, "key", "secret-key"), monkeypatch)
    with serving(made.http):
        yield made


@pytest.fixture(params=["obstore", "boto"])
def store(request: pytest.FixtureRequest, server: Server) -> Iterator[ObjectStore]:
    del server
    headers = {"x-amz-meta-signed": "yes"} if request.param == "boto" else {}
    opened = open_store("s3://bucket/p", S3Options(headers=headers))
    yield opened
    opened.close()


def error(code: str, **more: str) -> bytes:
    inner = "".join(f"<{name}>{value}</{name}>" for name, value in more.items())
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code>{inner}</Error>'.encode()


def met(call: Any) -> BackendError:
    with pytest.raises(BackendError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize(
    ("status", "code", "more", "reason", "told", "do"),
    [
        (403, "AccessDenied", {}, PERMISSION, "refuses to put an object", "credentials"),
        (403, "InvalidAccessKeyId", {}, PERMISSION, "access key", "access key"),
        (403, "SignatureDoesNotMatch", {}, PERMISSION, "signature", "secret"),
        (403, "AccountProblem", {}, PERMISSION, "account", "account"),
        (403, "AllAccessDisabled", {}, PERMISSION, "all access", "account"),
        (
            403,
            "RequestTimeTooSkewed",
            {"RequestTime": "20261128T013000Z", "ServerTime": "2026-11-28T01:00:00Z"},
            CLOCK,
            "clock is wrong by 1800 s, ahead of the store's (2026-11-28T01:30:00Z here, 2026-11-28T01:00:00Z there)",
            "NTP",
        ),
        (403, "RequestTimeTooSkewed", {}, CLOCK, "clock is wrong", "NTP"),
        (
            403,
            "AccessDenied",
            {"Message": "Request has expired", "Expires": "2026-11-28T01:00:00Z"},
            CLOCK,
            "too late",
            "NTP",
        ),
        (403, "RequestExpired", {}, CLOCK, "too late", "NTP"),
        (403, "InvalidObjectState", {"StorageClass": "GLACIER"}, ARCHIVED, "archive class", "restore"),
        (403, "KMS.DisabledException", {}, ENCRYPTION, "encryption key", "kms:"),
        (400, "KMS.NotFoundException", {}, ENCRYPTION, "encryption key", "kms:"),
        (400, "KMS.KMSInvalidStateException", {}, ENCRYPTION, "encryption key", "kms:"),
        (400, "ExpiredToken", {}, PERMISSION, "expired", "renew"),
        (400, "InvalidToken", {}, PERMISSION, "token", "renew"),
        (400, "InvalidRequest", {"Message": "needs a checksum"}, SETTINGS, "needs a checksum", "doctor"),
        (400, "InvalidArgument", {}, SETTINGS, "does not accept", "doctor"),
        (400, "AuthorizationHeaderMalformed", {"Region": "eu-west-3"}, SETTINGS, "eu-west-3", "--region"),
        (400, "EntityTooLarge", {}, SETTINGS, "size", "--bundle-size"),
        (400, "InvalidBucketName", {}, SETTINGS, "bucket's name", "URL"),
        (400, "BadDigest", {}, FAILING, "other bytes", "tried again"),
        (400, "XAmzContentSHA256Mismatch", {}, FAILING, "other bytes", "tried again"),
        (404, "NoSuchBucket", {}, SETTINGS, "no such bucket", "bucket"),
        (405, "MethodNotAllowed", {}, SETTINGS, "does not do this", "S3 API"),
        (411, "MissingContentLength", {}, SETTINGS, "does not do this", "S3 API"),
        (429, "TooManyRequests", {}, FAILING, "slow down", "tried again"),
        (503, "SlowDown", {}, FAILING, "slow down", "tried again"),
        (507, "InsufficientStorage", {}, FULL, "507", "make room"),
        (500, "InternalError", {}, FAILING, "500", "tried again"),
    ],
)  # fmt: skip
def test_each_code_has_its_reason_and_what_to_do(  # noqa: PLR0917 (columns of the table)
    server: Server,
    store: ObjectStore,
    status: int,
    code: str,
    more: dict[str, str],
    reason: str,
    told: str,
    do: str,
):
    server.says = Said(status, error(code, **more))
    found = met(lambda: store.put_if_absent("k", b"1"))
    assert found.reason == reason
    assert told in str(found)
    assert do in found.do
    for read in (lambda: store.get("k"), lambda: [*store.list("")]):
        assert met(read).reason == reason


HTML = b"<html><head><title>404 Not Found</title></head><body>nginx</body></html>"


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 409, 502])
def test_an_answer_of_somebody_else_says_nothing_of_an_object(
    server: Server, store: ObjectStore, status: int
):
    server.says = Said(status, HTML, "text/html")
    for read in (lambda: store.get("k"), lambda: [*store.list("")]):
        found = met(read)
        assert not isinstance(found, ObjectNotFoundError | PermissionDeniedError)
        assert found.reason in {SETTINGS, FAILING}
    for write in (lambda: store.put_if_absent("k", b""), lambda: store.delete("k")):
        assert isinstance(met(write), UnknownOutcomeError)
    assert isinstance(met(lambda: store.compare_and_set("k", b"", None)), UnknownOutcomeError)


def test_a_redirect_says_which_settings_to_look_at(server: Server):
    """(Both clients hide what stands in it; boto3 follows it by itself.)"""
    server.says = Said(301, error("PermanentRedirect"))
    opened = open_store("s3://bucket/p")
    found = met(lambda: opened.put_if_absent("k", b""))
    opened.close()
    assert found.reason == SETTINGS
    assert "--region" in found.do


def test_an_empty_not_found_is_one(server: Server, store: ObjectStore):
    server.says = Said(404)
    assert isinstance(met(lambda: store.get("k")), ObjectNotFoundError)
    assert isinstance(met(lambda: store.head("k")), ObjectNotFoundError)


def test_every_row_can_be_told():
    for code, answer in rows():
        assert answer.reason in {*REASONS, ""}, code
        assert answer.do or answer.reason == "", code
        assert issubclass(answer.kind, BackendError)


def test_whoever_waits_out_refusals_knows_why_and_what_to_do(server: Server, store: ObjectStore):
    server.says = Said(403, error("RequestTimeTooSkewed"))
    patient = PatientStore(store, ManualClock())
    patient.wait_out_refusals()
    found = met(lambda: patient.put_if_absent("k", b""))
    assert isinstance(found, RefusedForNowError)
    (trouble,) = patient.troubles()
    assert (trouble.reason, patient.seconds_waiting()[CLOCK]) == (CLOCK, 0.0)
    assert "NTP" in trouble.told


def test_the_command_line_and_doctor_tell_it(server: Server):
    server.says = Said(
        403,
        error(
            "RequestTimeTooSkewed",
            RequestTime="20261128T000000Z",
            ServerTime="2026-11-28T01:00:00Z",
        ),
    )
    ran = here("ls", "s3://bucket/p")
    assert ran.code == 3
    assert "clock is wrong by 3600 s, behind" in ran.err
    assert "NTP" in ran.err
    checked = here("doctor", "s3://bucket/p", "--json").document["checks"]
    assert any("NTP" in check["advice"] for check in checked)
    assert any(check["name"] == "clock" and check["status"] == "fail" for check in checked)


@pytest.mark.parametrize("body", [HTML, b""])
def test_success_that_is_somebody_elses_is_no_object_and_nothing_stored(
    server: Server, store: ObjectStore, body: bytes
):
    """As of a login page: what it says is no damaged object, and what was sent is not known to be stored."""
    server.says = Said(200, body, "text/html")
    for read in (lambda: store.get("k"), lambda: store.head("k"), lambda: [*store.list("")]):
        assert met(read).reason == SETTINGS
    for write in (
        lambda: store.put_if_absent("k", b"x"),
        lambda: store.compare_and_set("k", b"x", None),
    ):
        assert isinstance(met(write), UnknownOutcomeError)


VERSIONS = b"<ListVersionsResult><IsTruncated>%s</IsTruncated>%s</ListVersionsResult>"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        HTML,
        b"<ListVersionsResult></ListVersionsResult>",
        VERSIONS % (b"true", b""),
        VERSIONS % (b"true", b"<NextKeyMarker>k</NextKeyMarker>"),
        VERSIONS[:40],
    ],
)
def test_versions_that_are_not_all_told_are_not_taken_for_all(server: Server, body: bytes):
    """Else an erasing run would say that nothing is left."""
    versions = open_versions("s3://bucket/p", S3Options())
    assert versions is not None
    server.says = Said(200, body)
    assert isinstance(met(lambda: [*versions.of_deleted("")]), UnavailableError)
    versions.close()


@pytest.mark.parametrize("body", [b"", HTML])
def test_a_bucket_of_which_nothing_is_said_is_not_without_versions(server: Server, body: bytes):
    server.says = Said(200, body)
    versions = open_versions("s3://bucket/p", S3Options())
    assert versions is not None
    assert met(versions.status).reason in {SETTINGS, FAILING}
    versions.close()
    assert met(lambda: read_rules("bucket/p", S3Options())).reason in {SETTINGS, FAILING}
    assert met(lambda: read_object_lock("bucket/p", S3Options())).reason in {SETTINGS, FAILING}


@pytest.mark.go
def test_a_real_server_tells_both_times(minio: S3Server, monkeypatch: pytest.MonkeyPatch):
    """MinIO says in a header alone what time it is; ours is 40 minutes ahead."""
    use_server(minio, monkeypatch)

    class Ahead(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.now(tz) + timedelta(minutes=40)

    monkeypatch.setattr(s3_listing, "datetime", Ahead)
    opened = open_store(f"s3://{minio.bucket()}/t", S3Options())
    with pytest.raises(PermissionDeniedError) as caught:
        list(opened.list(""))
    opened.close()
    said = re.search(
        r"wrong by (\d+) s, ahead of the store's \((\S+) here, (\S+) there\)", str(caught.value)
    )
    assert said, str(caught.value)
    assert 2300 < int(said[1]) < 2500
    assert "server's time" in str(caught.value)
    assert (caught.value.reason, "NTP" in caught.value.do) == (CLOCK, True)
